"""The beginning that all chats share, as one long anchor: computed once per target, copied into every conversation.

A chat template opens every conversation with the same tokens: the system prompt and the start of the first message.
Nothing that is said comes before them, so the target's own keys and values of them are the same in all conversations. A
switch to a target that holds nothing of the conversation starts from a copy: exact where mapping is worst, and free.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import Cache

from workbench.chat.held import Held, common_prefix
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.forward import forward

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel

SHORTEST = 12  # tokens; the usual anchors do for less


@dataclass(frozen=True, eq=False)
class Beginning:
    """Token ids, and the target's own cache of exactly these."""

    ids: tuple[int, ...]
    cache: Cache


_beginnings: WeakKeyDictionary[Any, Beginning | None] = WeakKeyDictionary()  # weights -> what all chats share
_lock = threading.Lock()


def common_beginning(tokenizer: Any) -> list[int]:
    """Token ids that every chat begins with; [] without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    texts = (
        tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        for content in ("1", "?")
    )
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return list(first[: common_prefix(first, second)])


def beginning_of(target: LoadedModel) -> Beginning | None:
    """What all chats with this model share, computed when first asked for; None when it is too short to be worth it.

    The caller holds the pair's lane.
    """
    with _lock:
        if target.model not in _beginnings:
            ids = common_beginning(target.tokenizer)
            found = None
            if len(ids) >= SHORTEST:
                cache = new_cache(target.spec.layers, len(ids))
                forward(target.model, ids, cache, keep=0)
                found = Beginning(tuple(ids), cache)
            _beginnings[target.model] = found
        return _beginnings[target.model]


def begin(held: Held, ids: Sequence[int], target: LoadedModel) -> int:
    """Give a target that holds nothing of a conversation the beginning that all chats share.

    Args:
        held: what the target holds; changed only when it is nothing.
        ids: of the conversation.
        target: the model.

    Returns:
        Tokens that were copied, 0 when nothing was.
    """
    if held.ids:
        return 0
    beginning = beginning_of(target)
    count = common_prefix(beginning.ids, ids[:-1]) if beginning else 0
    if beginning is None or count < SHORTEST:
        return 0
    for t, layer in enumerate(held.cache.layers):
        keys, values = layer_tensors(beginning.cache, t)
        layer.update(keys[:, :, :count], values[:, :, :count])
    held.ids = list(ids[:count])
    return count
