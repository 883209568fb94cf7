"""The switch: golden identities first, then that every token is accounted for and every cache is exact."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from tests.conftest import KINDS, random_ids, tiny_model, tiny_tokenizer
from tests.kv.test_mapper import filled, random_mapper
from workbench.chat.account import measure_prefill
from workbench.chat.handoff import gate, hand_over, prefill
from workbench.errors import Cancelled
from workbench.kv.cache import copy, layer_tensors, length, new_cache, truncate
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.models.loading import wrap


def greedy(model, logits, cache, steps):
    """Token ids of a greedy continuation through our cache."""
    ids = []
    for _ in range(steps):
        ids.append(int(logits[-1].argmax()))
        logits = forward(model, ids[-1:], cache)
    return ids


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("anchors", "hold_back"), [(0, 1), (4, 64)])
def test_own_cache_through_the_handoff_gives_native_logits_and_tokens(kind, anchors, hold_back):
    """The golden identity: logits to 1e-4 in float32, and all of 64 greedy tokens."""
    model = wrap(tiny_model(kind), tiny_tokenizer(), kind)
    ids = random_ids(90)
    own = new_cache(model.spec.layers)
    native = forward(model.model, ids, own)
    handed = new_cache(model.spec.layers)
    source_cache = filled(model.model, ids)
    logits, account = hand_over(
        ids, source_cache, model, handed, KVMapper.identity(model.spec), model, anchors, hold_back
    )
    torch.testing.assert_close(logits, native, rtol=0, atol=1e-4)
    assert greedy(model.model, logits, handed, 64) == greedy(model.model, native, own, 64)
    assert (account.reused, account.mapped, account.native) == (
        0,
        90 - anchors - hold_back,
        anchors + hold_back,
    )


@pytest.fixture(scope="module")
def pair():
    """Two different tiny models and a random mapper between them."""
    small, large = tiny_model("llama", 1), tiny_model("llama", 2, num_hidden_layers=4)
    tokenizer = tiny_tokenizer()
    return wrap(small, tokenizer, "small"), wrap(large, tokenizer, "large"), random_mapper(small, large)


@pytest.mark.parametrize("available", [0, 3, 20, 60])
@pytest.mark.parametrize("before", [0, 2, 30, 60])
@pytest.mark.parametrize("hold_back", [1, 16, 100])
def test_every_token_is_accounted_for(pair, available, before, hold_back):
    source, target, mapper = pair
    ids = random_ids(60)
    source_cache, target_cache = new_cache(source.spec.layers), new_cache(target.spec.layers)
    if available:
        forward(source.model, ids[:available], source_cache, keep=0)
    if before:
        forward(target.model, ids[:before], target_cache, keep=0)
    logits, account = hand_over(ids, source_cache, target, target_cache, mapper, source, 4, hold_back)
    assert logits.shape == (1, target.spec.vocab_size)
    assert length(target_cache) == 60
    assert account.reused == min(before, 59)
    assert account.reused + account.mapped + account.native == account.tokens == 60
    assert account.mapped == max(
        0, min(available, 60 - hold_back) - max(before, min(4, max(0, 60 - hold_back)))
    )
    assert account.ms["total"] >= sum(value for name, value in account.ms.items() if name != "total") * 0.99


def test_anchors_and_held_back_tokens_are_the_targets_own(pair):
    """Anchors equal the native keys exactly; the mapped middle does not (the mapper is random)."""
    source, target, mapper = pair
    ids = random_ids(50)
    native, handed = filled(target.model, ids), new_cache(target.spec.layers)
    hand_over(ids, filled(source.model, ids), target, handed, mapper, source, 4, 8)
    for layer in range(target.spec.layers):
        ours, theirs = layer_tensors(handed, layer)[0], layer_tensors(native, layer)[0]
        torch.testing.assert_close(ours[..., :4, :], theirs[..., :4, :], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(ours[..., 4:42, :], theirs[..., 4:42, :], atol=1e-2)


@pytest.mark.parametrize("before", [0, 10])
def test_rare_tokens_are_run_over_what_is_mapped(pair, before):
    """Against the definition: map everything, then run the anchors, every rare token in turn and the end by themselves."""
    source, target, mapper = pair
    ids = random_ids(50)
    common = sorted(set(ids))[::2]
    reading = replace(mapper, familiar=tuple(common))
    rare = [p for p in range(max(4, before), 42) if ids[p] not in common]
    assert 5 < len(rare) < 30
    handed, expected = new_cache(target.spec.layers), new_cache(target.spec.layers)
    if before:
        forward(target.model, ids[:before], handed, keep=0)
        forward(target.model, ids[:before], expected, keep=0)
    logits, account = hand_over(ids, filled(source.model, ids), target, handed, reading, source, 4, 8)
    through = 42 - max(4, before)
    assert (account.reused, account.reread, account.mapped) == (before, len(rare), through - len(rare))
    assert account.reused + account.mapped + account.native == 50

    hand_over(ids[:43], filled(source.model, ids[:43]), target, expected, mapper, source, 4, 1)
    for p in rare:
        one = copy(expected)
        truncate(one, p)
        forward(target.model, ids[p : p + 1], one, keep=0)
        for layer in range(target.spec.layers):
            for ours, new in zip(layer_tensors(expected, layer), layer_tensors(one, layer), strict=True):
                ours[:, :, p] = new[:, :, p]
    truncate(expected, 42)
    wanted = forward(target.model, ids[42:], expected)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    for layer in range(target.spec.layers):
        for ours, theirs in zip(layer_tensors(handed, layer), layer_tensors(expected, layer), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_with_every_token_rare_the_switch_is_a_prefill(pair):
    source, target, mapper = pair
    ids = random_ids(40)
    unused = next(i for i in range(320) if i not in ids)
    logits, account = hand_over(ids, filled(source.model, ids), target, new_cache(target.spec.layers),
                                replace(mapper, familiar=(unused,)), source, 4, 8)  # fmt: skip
    expected = forward(target.model, ids, new_cache(target.spec.layers))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (account.mapped, account.reread, account.native) == (0, 28, 40)


def test_a_cache_of_another_kind_is_mapped_whole(pair):
    """Its middle cannot be written to, so nothing is re-read, and the account says so."""
    source, target, mapper = pair
    ids = random_ids(40)
    _, account = hand_over(ids, filled(source.model, ids), target, DynamicCache(config=target.model.config),
                           replace(mapper, familiar=(ids[0],)), source, 4, 8)  # fmt: skip
    assert (account.reread, account.mapped) == (0, 28)


def test_switching_twice_and_with_nothing_new_changes_nothing(pair):
    source, target, mapper = pair
    ids = random_ids(40)
    source_cache, target_cache = filled(source.model, ids), new_cache(target.spec.layers)
    first, _ = hand_over(ids, source_cache, target, target_cache, mapper, source)
    again, account = hand_over(ids, source_cache, target, target_cache, mapper, source)
    torch.testing.assert_close(first, again, rtol=1e-4, atol=1e-4)
    assert (account.reused, account.mapped, account.native) == (39, 0, 1)


def test_a_stopped_handoff_keeps_what_was_reused(pair):
    source, target, mapper = pair
    ids = random_ids(40)
    target_cache = new_cache(target.spec.layers)
    forward(target.model, ids[:10], target_cache, keep=0)
    calls = iter(range(99))
    with pytest.raises(Cancelled):
        hand_over(ids, filled(source.model, ids), target, target_cache, mapper, source,
                  should_stop=lambda: next(calls) >= 2)  # fmt: skip
    assert length(target_cache) == 10
    logits, _ = prefill(ids, target, target_cache, "small")
    expected = forward(target.model, ids, new_cache(target.spec.layers))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_prefill_account_and_fallback(pair):
    source, target, _ = pair
    ids = random_ids(30)
    _, account = prefill(ids, target, new_cache(target.spec.layers), source.name)
    assert (account.how, account.native, account.reason) == ("prefill", 30, "")
    _, account = prefill(
        ids, target, new_cache(target.spec.layers), source.name, reason="no mapper for this pair"
    )
    assert (account.how, account.reason) == ("fallback", "no mapper for this pair")
    with pytest.raises(ValueError, match="context of 0"):
        hand_over([], new_cache(1), target, new_cache(target.spec.layers), pair[2], source)


def test_measured_prefill_is_labelled_and_only_counts_what_was_new(pair):
    source, target, mapper = pair
    ids = random_ids(40)
    target_cache = new_cache(target.spec.layers)
    _, account = hand_over(ids, filled(source.model, ids), target, target_cache, mapper, source)
    assert account.prefill_ms is None and account.saved_ms is None
    measured = measure_prefill(account, ids, target)
    assert measured.prefill_source == "measured"
    assert measured.saved_ms == pytest.approx(measured.prefill_ms - account.ms["total"])
    assert length(target_cache) == 40


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gate_passes_for_every_kind(kind):
    result = gate(wrap(tiny_model(kind), tiny_tokenizer(), kind), random_ids(60))
    assert result.ok and result.tokens == 60


def test_gate_fails_when_the_path_is_wrong(monkeypatch):
    """A rotation off by one position must be noticed."""
    model = wrap(tiny_model("llama"), tiny_tokenizer(), "llama")
    rotate = model.rotary.rotate
    monkeypatch.setattr(
        model.rotary, "rotate", lambda k, start=0, out=None, **which: rotate(k, start + 1, out, **which)
    )
    assert not gate(model, random_ids(60)).ok


def test_truncating_after_a_handoff_is_exact(pair):
    source, target, mapper = pair
    ids = random_ids(40)
    target_cache = new_cache(target.spec.layers)
    hand_over(ids, filled(source.model, ids), target, target_cache, mapper, source)
    truncate(target_cache, 0)
    logits = forward(target.model, ids, target_cache)
    expected = forward(target.model, ids, new_cache(target.spec.layers))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
