"""Mapping ahead of a switch gives what the switch itself would have given; estimates say that they are estimates."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import random_ids
from tests.lab.conftest import make_host
from workbench.chat.account import Account, estimate_prefill, measure_prefill
from workbench.chat.conversation import Conversation
from workbench.chat.decode import Sampling
from workbench.chat.handoff import hand_over, map_ahead
from workbench.errors import Cancelled
from workbench.kv.cache import layer_tensors, length, new_cache
from workbench.kv.forward import forward


@pytest.fixture(scope="module")
def host():
    return make_host()


@pytest.mark.parametrize("rereads", [False, True])
def test_mapped_ahead_turn_by_turn_equals_one_shot(host, rereads):
    source, target = host.model("small"), host.model("large")
    mapper, _ = host.mapper("up")
    ids = random_ids(60)
    if rereads:
        mapper = replace(mapper, familiar=tuple(sorted(set(ids))[::2]))
    source_cache, once, ahead = (new_cache(model.spec.layers) for model in (source, target, target))
    spans = []
    for before, now in ((0, 4), (4, 25), (25, 47)):
        forward(source.model, ids[before:now], source_cache, keep=0)
        spans.append(map_ahead(ids[:now], now - 1, source_cache, target, ahead, mapper, source))
    assert spans == [
        (0, 0),
        (2, 22),
        (22, 44),
    ]  # 2 anchors, 3 held back; the third token is not enough to begin with
    forward(source.model, ids[47:], source_cache, keep=0)
    expected, whole = hand_over(ids, source_cache, target, once, mapper, source)
    logits, account = hand_over(ids, source_cache, target, ahead, mapper, source)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for layer in range(target.spec.layers):
        for ours, theirs in zip(layer_tensors(ahead, layer), layer_tensors(once, layer), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (whole.reread > 0) == (account.reread > 0) == rereads
    assert (whole.mapped + whole.reread, whole.native - whole.reread) == (55, 5)
    assert (account.reused, account.mapped + account.reread, account.native - account.reread) == (44, 13, 3)


def test_a_stop_while_mapping_ahead_leaves_the_cache_as_it_was(host):
    source, target = host.model("small"), host.model("large")
    source_cache, cache = new_cache(source.spec.layers), new_cache(target.spec.layers)
    forward(source.model, random_ids(40), source_cache, keep=0)
    calls = iter(range(99))
    with pytest.raises(Cancelled):
        map_ahead(random_ids(40), 40, source_cache, target, cache, host.mapper("up")[0], source,
                  should_stop=lambda: next(calls) >= 2)  # fmt: skip
    assert length(cache) == 0


def talk(host, incremental, undo=False):
    """A conversation with a switch; returns it with the last answer."""
    chat = Conversation(host, Sampling(max_new_tokens=12), incremental=incremental)
    for text in ("hello world", "the water is on", "singing and reading"):
        *_, answer = chat.send(text)
    if undo:
        chat.undo()
    chat.switch("large")
    *_, answer = chat.send("is the other on a song")
    return chat, answer


@pytest.mark.parametrize("undo", [False, True])
def test_a_conversation_that_maps_ahead_says_the_same(host, undo):
    plain, expected = talk(host, incremental=False, undo=undo)
    chat, answer = talk(host, incremental=True, undo=undo)
    assert answer.token_ids == expected.token_ids and answer.how == expected.how == "mapped"
    one, other = chat.accounts[0], plain.accounts[0]
    assert other.mapped_ahead == 0 == other.ahead_ms
    assert 0 < one.mapped_ahead == one.reused and one.ahead_ms > 0
    # What is held back runs natively in both, however much had been mapped before.
    assert one.hold_back == other.hold_back == 3
    assert one.tokens == other.tokens == one.reused + one.mapped + one.native
    assert one.mapped < 5 and one.native == 3  # the end of the last turn, which its model had not run


def test_a_true_prefill_does_not_rest_on_what_was_mapped_ahead(host):
    chat = Conversation(host, Sampling(max_new_tokens=6), incremental=True)
    list(chat.send("hello world"))
    account = chat.switch("large", how="prefill")
    assert account.mapped == account.mapped_ahead == 0 and account.native > account.tokens - 3
    *_, answer = chat.send("the other")
    assert answer.how == "prefill"


def test_what_was_mapped_ahead_counts_as_avoided_prefill(host):
    chat, _ = talk(host, incremental=True)
    account, target = chat.accounts[0], host.model("large")
    assert account.reused
    run = []
    handle = target.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: run.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    measured = measure_prefill(account, random_ids(account.tokens), target)
    handle.remove()
    assert run == [account.tokens]  # all of it would have had to be read
    assert measured.saved_ms == pytest.approx(measured.prefill_ms - account.ms["total"] - account.ahead_ms)


def test_estimates_are_labelled_and_give_way_to_measured_times():
    account = Account("a", "b", "mapped", 300, 100, 190, 10, 0, 10, {"total": 5.0})
    points = [(100, 50.0), (200, 150.0)]
    told = estimate_prefill(account, points)
    assert told.prefill_source == "estimated" and told.prefill_ms == pytest.approx(250 - 50)
    assert estimate_prefill(account, []) is account
    ahead = estimate_prefill(
        Account("a", "b", "mapped", 50, 40, 5, 5, 0, 5, {"total": 1.0}, mapped_ahead=40), points
    )
    assert ahead.prefill_ms == pytest.approx(25)
    measured = Account("a", "b", "mapped", 9, 0, 8, 1, 0, 1, {"total": 1.0}, 7.0, "measured")
    assert estimate_prefill(measured, points) is measured


def test_a_conversation_estimates_from_what_it_knows(host):
    chat = Conversation(host, Sampling(max_new_tokens=6))
    list(chat.send("hello world"))
    assert chat.switch("large").prefill_source == ""
    chat.measure_prefill()
    assert chat.accounts[-1].prefill_source == "measured" and len(chat.prefill_times["large"]) == 1
    chat.switch("small")
    list(chat.send("and again the water"))
    assert chat.switch("large").prefill_source == "estimated"
