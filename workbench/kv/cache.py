"""A KV cache that grows in place: appending a token does not copy the tokens before it.

`DynamicCache` concatenates at every step, which copies the whole cache for each new token, and gives the
mapper no place to write to. Here each layer owns two buffers with spare capacity; `keys` and `values` are
views on the used part. A forward pass writes into the next free slots, the mapper asks for slots and fills
them itself, going back to an earlier token is a change of one number. For inference only: gradients do not
flow through the cache.

Shapes: buffers `(1, kv_heads, capacity, head_dim)`, views `(1, kv_heads, length, head_dim)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from workbench.errors import InputError

_SPARE = 128  # tokens that a new buffer has beyond what is needed at once


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, on buffers that double when they are full."""

    def __init__(self, capacity: int = 0) -> None:
        """Args: capacity: tokens to reserve at first use; 0 leaves it to the layer."""
        super().__init__()
        self._reserve = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._length = 0
        self._places: tuple[Tensor, int] | None = None

    def get_seq_length(self) -> int:
        """Tokens in this layer."""
        return self._length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `(1, kv_heads, n, head_dim)` keys and values; return views on all of them.

        Inside `places`, the first ones go to the places named there instead.
        """
        seen = None
        if self._places is not None:
            assert self._buffers is not None
            index, seen = self._places
            count, index = len(index), index.to(key_states.device)
            for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
                buffer.index_copy_(2, index, new[:, :, :count].detach())
            key_states, value_states = key_states[:, :, count:], value_states[:, :, count:]
        start, stop = self._length, self._length + key_states.shape[-2]
        buffers = self._room(stop, key_states, value_states)
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop].copy_(new.detach())
        keys, values = self._set_length(stop)
        return keys[:, :, :seen], values[:, :, :seen]

    def append_slots(
        self, n: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """Lengthen the layer by n tokens and return their slots for the caller to fill.

        Returns:
            Writable views `(1, kv_heads, n, head_dim)` of keys and values; their content is undefined.

        Raises:
            ValueError: the layer already holds keys of another shape, dtype or device.
        """
        start, stop = self._length, self._length + n
        like = torch.empty((1, kv_heads, 0, head_dim), dtype=dtype, device=device)
        keys, values = self._room(stop, like, like)
        if keys.shape[1::2] != like.shape[1::2] or keys.dtype != dtype or keys.device != like.device:
            raise ValueError(
                f"the layer holds {keys.shape[1]} heads of {keys.shape[3]} in {keys.dtype} on {keys.device}, "
                f"not {kv_heads} of {head_dim} in {dtype} on {like.device}"
            )
        self._set_length(stop)
        return keys[:, :, start:stop], values[:, :, start:stop]

    def reserve(self, capacity: int) -> None:
        """Reserve place for this many tokens in all at the next allocation, so that there is only one."""
        self._reserve = max(self._reserve, capacity)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number (as `DynamicLayer.crop`); keeps the buffers."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number: how many tokens to remove")
        if self._buffers is not None:
            self._set_length(max(0, self._length + tokens_to_remove))

    def reset(self) -> None:
        """Forget all tokens; keeps the buffers."""
        self.crop(-self._length)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("a growing cache holds one sequence: no beams, no batches, no offloading")

    reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse

    def _room(self, needed: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers with place for `needed` tokens, shaped after the given keys and values."""
        old = self._buffers
        if old is not None and old[0].shape[2] >= needed:
            return old
        capacity = self._reserve if self._reserve >= needed else needed + _SPARE
        if old is not None:
            capacity = max(capacity, 2 * old[0].shape[2])
        # Buffers outlive the caller's inference mode: others write into them outside of it.
        with torch.inference_mode(False), torch.no_grad():
            new = tuple(
                torch.empty((*t.shape[:2], capacity, t.shape[3]), dtype=t.dtype, device=t.device)
                for t in (old or (keys, values))
            )
            if old is not None:
                for buffer, previous in zip(new, old, strict=True):
                    buffer[:, :, : self._length].copy_(previous[:, :, : self._length])
        self._buffers = (new[0], new[1])
        self.device, self.dtype, self.is_initialized = new[0].device, new[0].dtype, True
        return self._buffers

    def _set_length(self, length: int) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        self._length = length
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)
        return self.keys, self.values


def new_cache(layers: int, capacity: int = 0) -> Cache:
    """An empty cache of `GrowingLayer`s.

    Args:
        layers: layers of the model.
        capacity: tokens to reserve per layer at first use (0: grow as needed).
    """
    return Cache(layers=[GrowingLayer(capacity) for _ in range(layers)])


def reserve(cache: Cache, capacity: int) -> None:
    """Let every layer of ours have place for `capacity` tokens the next time that it allocates."""
    for index, layer in enumerate(cache.layers):
        if grows_in_place(cache, index):
            layer.reserve(capacity)


@contextmanager
def places(cache: Cache, positions: Sequence[int], seen: int) -> Iterator[None]:
    """Inside, the next forward pass writes its first tokens to these positions, over what is there.

    Tokens of the pass beyond those are appended at the end. The pass gets to see the first `seen` tokens; its positions and
    its mask are the caller's.
    """
    index = torch.tensor(positions, dtype=torch.long)
    for layer in cache.layers:
        layer._places = (index, seen)
    try:
        yield
    finally:
        for layer in cache.layers:
            layer._places = None


def length(cache: Cache) -> int:
    """Tokens that every layer holds. Layers differ only after a job that broke off: see `truncate`."""
    return min((int(layer.get_seq_length()) for layer in cache.layers), default=0)


def truncate(cache: Cache, n: int) -> None:
    """Make the cache exactly n tokens long, also when a job that broke off left layers of unequal length.

    Raises:
        ValueError: n is negative, some layer holds fewer than n tokens, or the cache is of a kind that can only be
            emptied (quantised ones).
    """
    have = length(cache)
    if n < 0 or n > have:
        raise ValueError(f"cannot cut a cache of {have} tokens to {n}")
    for layer in cache.layers:
        held = int(layer.get_seq_length())
        if held == n:
            continue
        if layer.is_croppable:
            layer.crop(n - held)
        elif n == 0:
            layer.reset()
        else:
            raise ValueError(f"a {type(layer).__name__} cannot be cut to {n} tokens, only emptied")


def grows_in_place(cache: Cache, layer: int) -> bool:
    """Whether a layer hands out slots to write into, as ours do; others take tensors (`Cache.update`)."""
    return layer < len(cache.layers) and isinstance(cache.layers[layer], GrowingLayer)


def check_takes(cache: Cache, tokens: int) -> None:
    """Refuse a cache that mapped tokens cannot be put into.

    Args:
        cache: empty or not.
        tokens: how many it shall hold in the end.

    Raises:
        InputError: naming the kind of cache and the reason.
    """
    kind = type(cache).__name__
    if not hasattr(cache, "layers"):
        raise InputError(
            f"A {kind} holds two caches, of an encoder and a decoder, and takes no mapped tokens."
        )
    if getattr(cache, "offloading", False) and not torch.cuda.is_available():
        raise InputError(f"An offloaded {kind} needs a GPU to offload from, and there is none here.")
    for layer in cache.layers:
        name = type(layer).__name__
        if not isinstance(layer, CacheLayerMixin) or getattr(layer, "is_sliding", False):
            raise InputError(f"A {kind} with layers of the kind {name} does not keep every token.")
        room = layer.max_cache_len if isinstance(layer, StaticLayer) else tokens
        if room < tokens:
            raise InputError(f"This {kind} has room for {room:,} tokens, and {tokens:,} are needed.")


def copy(cache: Cache) -> Cache:
    """An independent cache with the same tokens (of a cache of any kind with plain keys and values)."""
    duplicate = new_cache(len(cache.layers))
    for mine, theirs in zip(duplicate.layers, cache.layers, strict=True):
        if theirs.get_seq_length():
            mine.update(theirs.keys, theirs.values)
    return duplicate


def nbytes(cache: Cache) -> int:
    """Bytes of the used tokens' keys and values (spare capacity not counted)."""
    tensors = [t for layer in cache.layers if layer.get_seq_length() for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def allocated_bytes(cache: Cache) -> int:
    """Bytes of the buffers with their spare capacity."""
    held = [layer._buffers for layer in cache.layers if isinstance(layer, GrowingLayer) and layer._buffers]
    return sum(t.numel() * t.element_size() for pair in held for t in pair)


def layer_tensors(cache: Cache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, `(1, kv_heads, length, head_dim)`: views, not copies.

    Raises:
        ValueError: nothing has been written into the layer yet, or it does not keep plain keys and values.
    """
    held = cache.layers[layer]
    if hasattr(held, "_quantized_keys"):
        raise ValueError(
            f"layer {layer} is a {type(held).__name__}, whose keys and values are not plain tensors"
        )
    if held.keys is None or held.values is None:
        raise ValueError(f"layer {layer} of the cache is empty")
    if isinstance(held, StaticLayer):  # its tensors have room for tokens that are not there yet
        used = int(held.get_seq_length())
        return held.keys[:, :, :used], held.values[:, :, :used]
    return held.keys, held.values
