"""The beginning that all chats share: the target's own, computed once, copied, and never more than the context has."""

import pytest
import torch

from tests.conftest import tiny_model, tiny_tokenizer
from workbench.chat import shared
from workbench.chat.conversation import Conversation
from workbench.chat.held import Held
from workbench.kv.cache import layer_tensors, length, new_cache
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.models.loading import wrap
from workbench.models.pair import PairHost

SYSTEM = "{{ '<|im_start|>system\nYou are a helpful friend on the water.<|im_end|>\n' }}"


def model(seed):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SYSTEM + tokenizer.chat_template
    return wrap(tiny_model("llama", seed), tokenizer, f"model-{seed}")


@pytest.fixture
def large():
    return model(1)


def test_it_is_the_system_prompt_and_what_opens_the_message(large):
    ids = shared.common_beginning(large.tokenizer)
    assert large.tokenizer.decode(ids).endswith("the water.<|im_end|>\n<|im_start|>user\n")
    assert shared.common_beginning(object()) == []
    assert shared.beginning_of(wrap(tiny_model("llama", 1), tiny_tokenizer(), "short")) is None


def test_a_copy_is_what_the_model_would_compute_and_only_where_nothing_is_held(large, monkeypatch):
    start = shared.common_beginning(large.tokenizer)
    ids = [*start, 5, 6, 7]
    one, two = Held.empty(3), Held.empty(3)
    assert shared.begin(one, ids, large) == len(start) == length(one.cache)
    monkeypatch.setattr(shared, "forward", None)  # once is enough
    assert shared.begin(two, ids, large) == len(start)
    own = new_cache(3)
    forward(large.model, start, own, keep=0)
    for layer in range(3):
        for ours, theirs in zip(layer_tensors(one.cache, layer), layer_tensors(own, layer), strict=True):
            torch.testing.assert_close(ours, theirs)
    layer_tensors(one.cache, 0)[0].zero_()
    assert layer_tensors(two.cache, 0)[0].abs().sum() > 0
    assert shared.begin(one, ids, large) == 0 and one.how == "native"


def test_another_beginning_or_a_short_context_is_left_alone(large):
    start = shared.common_beginning(large.tokenizer)
    held = Held.empty(3)
    assert shared.begin(held, [9, *start, 5], large) == 0
    assert shared.begin(held, start[:8], large) == 0
    assert shared.begin(held, start, large) == len(start) - 1  # the last token runs for its logits


@pytest.mark.parametrize("anchors", [None, 2])
def test_a_switch_reuses_it_unless_anchors_are_chosen_by_hand(large, anchors):
    small = model(2)
    mappers = {
        "up": (KVMapper.identity(large.spec), None),
        "down": (KVMapper.identity(large.spec), None),
    }
    chat = Conversation(PairHost.from_models(small, large, mappers))
    chat.max_new_tokens = 4
    chat.anchors, chat.hold_back = anchors, 3
    list(chat.send("Hello"))
    account = chat.switch("large")
    start = len(shared.common_beginning(large.tokenizer))
    assert account.how == "mapped" and account.reused == (start if anchors is None else 0)
    assert account.reused + account.mapped + account.native == account.tokens
