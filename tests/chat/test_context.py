"""The context is the conversation: whatever happens to turns and caches, an answer is that of a fresh run.

Hypothesis plays: send, undo, retry, edit, switch, dropped caches, a changed system prompt. After each answer the
cache that was used must stand for exactly the ids that the conversation says, and the same conversation in fresh
caches must give the same tokens. Keys and values are compared too: a cache that was cut in the wrong place would
show there first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chat.test_template import thinking_tokenizer
from tests.conftest import tiny_model, tiny_tokenizer
from workbench.chat.conversation import Conversation
from workbench.chat.decode import Sampling
from workbench.chat.held import Held, common_prefix
from workbench.errors import InputError
from workbench.kv.cache import layer_tensors, length, new_cache
from workbench.kv.forward import forward
from workbench.models.loading import wrap
from workbench.models.pair import PairHost

WORDS = st.sampled_from(["hello", "the lamp", "a", "<think>x</think> is", "world 🙂", "<|im_end|>"])
ACTIONS = st.one_of(
    st.tuples(st.just("send"), WORDS),
    st.tuples(st.just("send"), WORDS),
    st.tuples(st.just("undo"), st.none()),
    st.tuples(st.just("retry"), st.none()),
    st.tuples(st.just("edit"), st.tuples(st.integers(0, 3), WORDS)),
    st.tuples(st.just("prefill"), st.none()),
    st.tuples(st.just("drop"), st.none()),
    st.tuples(st.just("system"), st.sampled_from([None, "Be brief."])),
    st.tuples(st.just("clear"), st.none()),
)


def host(tokenizer: Any) -> PairHost:
    sides = [wrap(tiny_model("llama", n, num_hidden_layers=n + 1), tokenizer, f"m{n}") for n in (1, 2)]
    return PairHost.from_models(*sides, name="context")


@pytest.fixture(scope="module", params=["plain", "thinking"])
def pair(request: pytest.FixtureRequest) -> PairHost:
    """With a template that keeps every answer, and with one that rewrites old ones."""
    return host(tiny_tokenizer() if request.param == "plain" else thinking_tokenizer())


def play(chat: Conversation, kind: str, value: Any) -> None:
    if kind == "send":
        list(chat.send(value))
    elif kind == "edit":
        users = [i for i, message in enumerate(chat.messages) if message.role == "user"]
        if users:
            list(chat.edit(users[value[0] % len(users)], value[1]))
    elif kind == "retry" and chat.messages:
        list(chat.retry())
    elif kind == "undo" and chat.messages:
        chat.undo()
    elif kind == "prefill":
        chat.switch(how="prefill")
    elif kind == "drop":
        chat.drop_caches()
    elif kind == "system":
        chat.system = value
    elif kind == "clear":
        chat.clear()


def check(chat: Conversation) -> None:
    """Each side's cache holds what a fresh run over its ids gives."""
    for side, held in chat.caches.held.items():
        assert len(held.ids) == length(held.cache)
        model = chat.host.model(side)
        if not held.ids:
            continue
        fresh = new_cache(model.spec.layers)
        forward(model.model, list(held.ids), fresh)
        for layer in range(model.spec.layers):
            for ours, theirs in zip(
                layer_tensors(held.cache, layer), layer_tensors(fresh, layer), strict=True
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=2, max_size=8))
def test_an_answer_is_that_of_a_fresh_run(pair: PairHost, actions: list[tuple[str, Any]]) -> None:
    chat = Conversation(pair, Sampling(max_new_tokens=4))
    for kind, value in actions:
        play(chat, kind, value)
    check(chat)
    list(chat.send("and now"))
    check(chat)
    held = chat.caches.held[chat.side]
    answer = chat.messages[-1].token_ids
    prompt = chat._render(chat.messages[:-1], generation_prompt=True)
    assert list(held.ids) == [*prompt, *answer][: len(held.ids)] and len(held.ids) >= len(prompt)
    fresh = Conversation(pair, Sampling(max_new_tokens=4), chat.system, chat.side)
    fresh.messages = chat.messages[:-2]
    fresh._template_side = chat._template_side
    list(fresh.send("and now"))
    assert fresh.messages[-1].token_ids == answer


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_a_difference_is_cut_back_to_the_common_prefix(had: list[int], wanted: list[int]) -> None:
    shared = common_prefix(had, wanted)
    assert had[:shared] == wanted[:shared]
    assert shared in (len(had), len(wanted)) or had[shared] != wanted[shared]


def test_what_is_held_is_cut_with_its_keys() -> None:
    model = tiny_model("llama", 1)
    held = Held.empty(3)
    forward(model, [1, 2, 3, 4, 5], held.cache)
    held.covers([1, 2, 3, 4, 5])
    held.mapped.append((1, 4))
    assert held.fit([1, 2, 9, 4, 5]) == 2
    assert length(held.cache) == 2 and held.ids == [1, 2] and held.mapped == [(1, 2)]
    fresh = new_cache(3)
    forward(model, [1, 2], fresh)
    torch.testing.assert_close(
        layer_tensors(held.cache, 2)[0], layer_tensors(fresh, 2)[0], rtol=1e-3, atol=1e-3
    )


def test_undo_past_the_first_message_is_told(pair: PairHost) -> None:
    chat = Conversation(pair, Sampling(max_new_tokens=4))
    list(chat.send("hello"))
    chat.undo()
    assert chat.token_ids == [] and chat.covered("small") == 0
    with pytest.raises(InputError, match="no message"):
        chat.undo()
