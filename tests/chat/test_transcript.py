"""Base models, which have no chat template: a conversation as a plain transcript, switches included."""

from __future__ import annotations

from tests.conftest import tiny_model, tiny_tokenizer
from workbench.chat.conversation import Conversation
from workbench.chat.decode import Sampling
from workbench.kv.mapper import KVMapper
from workbench.models.loading import wrap
from workbench.models.pair import PairHost


def test_a_conversation_of_base_models_is_switched_and_its_ids_stay() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    small, large = (wrap(tiny_model("llama", 7), tokenizer, name) for name in ("small", "large"))
    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    assert newline in small.stop_ids
    identity = KVMapper.identity(small.spec)
    host = PairHost.from_models(small, large, {"up": (identity, None), "down": (identity, None)})
    chat = Conversation(host, Sampling(max_new_tokens=6))
    list(chat.send("hello there"))
    before = list(chat.token_ids)
    account = chat.switch()
    assert account.how == "mapped" and chat.side == "large"
    answer = list(chat.send("and more"))[-1]
    assert chat.token_ids[: len(before)] == before and newline not in answer.token_ids
    text = tokenizer.decode(chat.token_ids)
    assert text.startswith("User: hello there\n\nAssistant:") and "\n\nUser: and more\n\nAssistant:" in text
    assert answer.reused + answer.rerun + answer.native > 0
