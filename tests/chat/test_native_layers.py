"""Lowest layers that the target runs itself: exact whatever the mapper says, and nothing of it is hidden."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from tests.conftest import KINDS, random_ids, tiny_model, tiny_tokenizer
from tests.kv.test_mapper import filled, low_rank_mapper, random_mapper
from workbench.chat.handoff import hand_over, map_ahead
from workbench.errors import Cancelled
from workbench.kv.cache import layer_tensors, length, new_cache
from workbench.kv.forward import forward, forward_lowest
from workbench.models.loading import wrap

LAYERS = 4


@pytest.fixture(scope="module")
def pair():
    """Two different tiny models and a random mapper between them."""
    small, large = tiny_model("llama", 1), tiny_model("llama", 2, num_hidden_layers=LAYERS)
    tokenizer = tiny_tokenizer()
    return wrap(small, tokenizer, "small"), wrap(large, tokenizer, "large"), random_mapper(small, large)


def assert_same(ours, theirs, layers, where=slice(None)):
    """The caches agree in these layers and positions."""
    for layer in layers:
        for one, other in zip(layer_tensors(ours, layer), layer_tensors(theirs, layer), strict=True):
            torch.testing.assert_close(one[:, :, where], other[:, :, where], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("anchors", "hold_back"), [(0, 1), (4, 16)])
def test_with_all_layers_native_the_switch_is_a_prefill(kind, anchors, hold_back):
    """The golden identity: keys, values and logits, whatever the mapper's numbers are."""
    source, model = tiny_model("llama", 1), tiny_model(kind, 2)
    target = wrap(model, tiny_tokenizer(), kind)
    mapper = replace(random_mapper(source, model), native_layers=target.spec.layers)
    ids, native, handed = random_ids(60), new_cache(target.spec.layers), new_cache(target.spec.layers)
    expected = forward(model, ids, native)
    logits, account = hand_over(ids, filled(source, ids), target, handed, mapper, wrap(source, tiny_tokenizer(), "s"),
                                anchors, hold_back)  # fmt: skip
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert_same(handed, native, range(target.spec.layers))
    assert account.native_layers == target.spec.layers and account.ms["bottom"] > 0
    assert account.mapped == 60 - anchors - hold_back and not account.reason


@pytest.mark.parametrize("form", ["full", "low rank", "mlp"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 10])
def test_lowest_layers_are_exact_and_the_others_mapped(pair, form, layers, before):
    source, target, mapper = pair
    if form != "full":
        hidden = 5 if form == "mlp" else 0
        mapper = low_rank_mapper(source.model, target.model, "both" if hidden else "own", hidden=hidden)
    ids = random_ids(50)
    native, mapped, handed = filled(target.model, ids), new_cache(LAYERS), new_cache(LAYERS)
    for cache in (mapped, handed):
        if before:
            forward(target.model, ids[:before], cache, keep=0)
    hand_over(ids, filled(source.model, ids), target, mapped, mapper, source, 4, 8)
    logits, account = hand_over(ids, filled(source.model, ids), target, handed,
                                replace(mapper, native_layers=layers), source, 4, 8)  # fmt: skip
    assert length(handed) == 50 and account.native_layers == layers
    assert account.reused + account.mapped + account.native == 50
    assert_same(handed, native, range(layers))
    assert_same(handed, mapped, range(layers, LAYERS), slice(0, 42))
    top = layer_tensors(handed, LAYERS - 1)[0]
    assert not torch.allclose(top[:, :, 20:42], layer_tensors(native, LAYERS - 1)[0][:, :, 20:42], atol=1e-2)
    # What is held back stands on all of it.
    again = filled(target.model, ids)
    for layer in range(layers, LAYERS):
        for ours, theirs in zip(layer_tensors(again, layer), layer_tensors(handed, layer), strict=True):
            ours[:, :, :42] = theirs[:, :, :42]
    for each in again.layers:
        each.crop(-8)
    torch.testing.assert_close(logits, forward(target.model, ids[42:], again), rtol=1e-4, atol=1e-4)


def test_rare_tokens_are_re_read_over_exact_lowest_layers(pair):
    source, target, mapper = pair
    ids = random_ids(50)
    reading = replace(mapper, familiar=tuple(sorted(set(ids))[::2]), native_layers=2)
    native, handed = filled(target.model, ids), new_cache(LAYERS)
    _, account = hand_over(ids, filled(source.model, ids), target, handed, reading, source, 4, 8)
    assert account.reread > 5 and account.native_layers == 2 and {"bottom", "ends"} <= set(account.ms)
    assert_same(handed, native, range(2))
    assert account.reused + account.mapped + account.native == 50


@pytest.mark.parametrize("rereads", [False, True])
def test_mapped_ahead_turn_by_turn_equals_one_shot(pair, rereads):
    source, target, mapper = pair
    ids = random_ids(60)
    mapper = replace(mapper, native_layers=2, familiar=tuple(sorted(set(ids))[::2]) if rereads else ())
    source_cache, once, ahead = new_cache(source.spec.layers), new_cache(LAYERS), new_cache(LAYERS)
    for before, now in ((0, 25), (25, 47)):
        forward(source.model, ids[before:now], source_cache, keep=0)
        map_ahead(ids[:now], now, source_cache, target, ahead, mapper, source, 4, 3)
    assert length(ahead) == 44
    assert_same(ahead, filled(target.model, ids[:44]), range(2))
    forward(source.model, ids[47:], source_cache, keep=0)
    expected, _ = hand_over(ids, source_cache, target, once, mapper, source, 4, 3)
    logits, account = hand_over(ids, source_cache, target, ahead, mapper, source, 4, 3)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert_same(ahead, once, range(LAYERS))
    assert (account.reused, account.native_layers, account.anchors) == (44, 2, 0)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stop_anywhere_leaves_the_cache_as_it_was(pair, ahead, monkeypatch):
    source, target, mapper = pair
    monkeypatch.setattr("workbench.chat.handoff.PREFILL_CHUNK", 8)
    monkeypatch.setattr("workbench.chat.handoff.MAP_BLOCK", 16)
    ids, mapper = random_ids(60), replace(mapper, native_layers=2)
    source_cache, every = filled(source.model, ids), target.model.base_model.layers
    stopped = 0
    while True:
        cache, calls = new_cache(LAYERS), iter(range(999))
        forward(target.model, ids[:10], cache, keep=0)

        def asked(calls=calls, stopped=stopped):
            return next(calls) >= stopped

        try:
            if ahead:
                map_ahead(ids, 60, source_cache, target, cache, mapper, source, 4, 3, asked)
            else:
                hand_over(ids, source_cache, target, cache, mapper, source, 4, 3, asked)
            break
        except Cancelled:
            assert [layer.get_seq_length() for layer in cache.layers] == [10] * LAYERS
            assert target.model.base_model.layers is every
            stopped += 1
    assert stopped > 10 and length(cache) == (57 if ahead else 60)


def test_with_nothing_to_map_nothing_runs_alone(pair):
    source, target, mapper = pair
    ids, cache = random_ids(20), new_cache(LAYERS)
    _, account = hand_over(
        ids, new_cache(source.spec.layers), target, cache, replace(mapper, native_layers=2), source
    )
    assert account.mapped == account.native_layers == 0
    assert not account.reason and "bottom" not in account.ms


def test_where_they_cannot_run_alone_all_layers_are_mapped_and_the_account_says_so(pair):
    source, target, mapper = pair
    ids, cache = random_ids(40), DynamicCache(config=target.model.config)
    _, account = hand_over(ids, filled(source.model, ids), target, cache, replace(mapper, native_layers=2), source,
                           4, 8)  # fmt: skip
    assert (account.mapped, account.native_layers) == (28, 0)
    assert "the lowest 2 layers too" in account.reason
    plain = new_cache(LAYERS)
    hand_over(ids, filled(source.model, ids), target, plain, mapper, source, 4, 8)
    assert_same(cache, plain, range(LAYERS))


def test_the_lowest_layers_run_over_layers_of_other_lengths(pair):
    """Positions and masks come from the lowest layers, whatever those above hold."""
    _, target, _ = pair
    ids, cache = random_ids(40), filled(pair[1].model, random_ids(40)[:10])
    for layer in cache.layers[2:]:
        layer.crop(-7)
    forward_lowest(target.model, ids[10:], cache, 2, chunk=7)
    assert [layer.get_seq_length() for layer in cache.layers] == [40, 40, 3, 3]
    assert_same(cache, filled(target.model, ids), range(2))
    assert len(target.model.base_model.layers) == LAYERS


def test_nonsense_is_refused(pair):
    mapper = pair[2]
    for wrong in (-1, LAYERS + 1):
        with pytest.raises(ValueError, match=f"native_layers must be 0 to {LAYERS}, not {wrong}"):
            replace(mapper, native_layers=wrong)


def test_only_what_is_multiplied_is_counted(pair):
    mapper = pair[2]
    whole = mapper.flops_per_token
    sizes = [2 * (k.numel() + v.numel()) for k, v in zip(mapper.key_weight, mapper.value_weight, strict=True)]
    assert replace(mapper, native_layers=1).flops_per_token == whole - sizes[0]
    assert replace(mapper, native_layers=LAYERS).flops_per_token == 0
