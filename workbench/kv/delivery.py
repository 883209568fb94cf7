"""A KV cache as bytes that another process can read while they are still being written.

    0    magic "KVCACHE1"
    8    length h of the header, unsigned 64 bit, little-endian
    16   layers that are complete, the same way; counted up after each layer, so a reader may follow the writer
    24   header, h bytes of JSON: {"dtype", "tokens", "layers": [{"kv_heads", "head_dim", "offset"}, ...], "bytes"}
    ...  one block a layer at its offset (a multiple of 64): keys, then values

Keys and values of a layer are `(kv_heads, tokens, head_dim)` in row-major order, keys after rotary embedding, in the
byte order of the machine (little-endian wherever PyTorch runs today). The buffer is a mapped file: in a memory file
system two processes share it without a copy, on a disk it outlives them.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from workbench.errors import InputError
from workbench.kv.cache import layer_tensors, length

MAGIC = b"KVCACHE1"
ALIGN = 64
HEADER_LIMIT = 1 << 20
_NUMBERS = struct.Struct("<QQ")
_START = len(MAGIC) + _NUMBERS.size
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Layout:
    """Where everything lies.

    Attributes:
        dtype: "float32", "bfloat16" or "float16".
        tokens: in every layer.
        layers: (kv_heads, head_dim) of each layer.
    """

    dtype: str
    tokens: int
    layers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cache: Cache) -> Layout:
        """The layout of a cache.

        Raises:
            InputError: a dtype that is not carried.
        """
        keys = [layer_tensors(cache, layer)[0] for layer in range(len(cache.layers))]
        dtype = str(keys[0].dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise InputError(f"A cache in {dtype} cannot be delivered.", f"Use one of {', '.join(_DTYPES)}.")
        return cls(dtype, length(cache), tuple((key.shape[1], key.shape[3]) for key in keys))

    def block_bytes(self, layer: int) -> int:
        """Bytes of one layer's keys and values."""
        heads, dim = self.layers[layer]
        return 2 * heads * dim * self.tokens * _DTYPES[self.dtype].itemsize

    @property
    def payload_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(self.block_bytes(layer) for layer in range(len(self.layers)))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer's block begins. The header has a fixed place of 256 bytes and 96 a layer."""
        at, found = _aligned(_START + 256 + 96 * len(self.layers)), []
        for layer in range(len(self.layers)):
            found.append(at)
            at = _aligned(at + self.block_bytes(layer))
        return tuple(found)

    @property
    def total_bytes(self) -> int:
        """Size of the whole buffer."""
        return _aligned(self.offsets[-1] + self.block_bytes(len(self.layers) - 1))

    def header(self) -> bytes:
        """The JSON that describes it."""
        layers = [
            {"kv_heads": heads, "head_dim": dim, "offset": offset}
            for (heads, dim), offset in zip(self.layers, self.offsets, strict=True)
        ]
        data = {"dtype": self.dtype, "tokens": self.tokens, "layers": layers, "bytes": self.total_bytes}
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def read(cls, buffer: Any) -> Layout:
        """The layout that a buffer says it has.

        Raises:
            InputError: it is no such buffer, or its numbers contradict each other or its size.
        """
        bad = InputError("These bytes hold no KV cache.")
        try:
            size, _ = _NUMBERS.unpack_from(buffer, len(MAGIC))
            if bytes(buffer[: len(MAGIC)]) != MAGIC or not 2 <= size <= HEADER_LIMIT:
                raise bad
            data = json.loads(bytes(buffer[_START : _START + size]))
            shapes = tuple((layer["kv_heads"], layer["head_dim"]) for layer in data["layers"])
            layout = cls(data["dtype"], data["tokens"], shapes)
            numbers = (layout.tokens, *(number for shape in shapes for number in shape))
            if layout.dtype not in _DTYPES or not shapes or any(type(n) is not int or n < 1 for n in numbers):
                raise bad
            if json.loads(layout.header()) != data or layout.total_bytes > len(buffer):
                raise bad
        except (struct.error, ValueError, KeyError, TypeError):
            raise bad from None
        return layout


@contextmanager
def segment(path: Path, layout: Layout | None = None) -> Iterator[mmap.mmap]:
    """A mapped file: a new one with a header and no layers for a layout, an existing one without."""
    with path.open("x+b" if layout else "r+b") as file:
        if layout is not None:
            file.truncate(layout.total_bytes)
        with mmap.mmap(file.fileno(), 0) as buffer:
            if layout is not None:
                header = layout.header()
                buffer[: len(MAGIC)] = MAGIC
                buffer[len(MAGIC) : _START] = _NUMBERS.pack(len(header), 0)
                buffer[_START : _START + len(header)] = header
            yield buffer


def ready(buffer: Any) -> int:
    """How many layers are complete, from the first on."""
    return int(_NUMBERS.unpack_from(buffer, len(MAGIC))[1])


def put_layer(buffer: mmap.mmap, layout: Layout, cache: Cache, layer: int) -> None:
    """Write the next layer and count it."""
    for mine, theirs in zip(_views(buffer, layout, layer), layer_tensors(cache, layer), strict=True):
        mine.copy_(theirs[0, :, : layout.tokens])
    buffer[len(MAGIC) : _START] = _NUMBERS.pack(len(layout.header()), layer + 1)


def take_layer(
    buffer: mmap.mmap, layout: Layout, cache: Cache, layer: int, device: torch.device | str = "cpu"
) -> None:
    """Append a layer that is ready to a cache of ours.

    Raises:
        InputError: it is not ready yet.
    """
    if ready(buffer) <= layer:
        raise InputError(f"Layer {layer} has not arrived yet.")
    heads, dim = layout.layers[layer]
    slots = cache.layers[layer].append_slots(layout.tokens, heads, dim, _DTYPES[layout.dtype], device)
    for mine, theirs in zip(slots, _views(buffer, layout, layer), strict=True):
        mine[0].copy_(theirs)


def _views(buffer: mmap.mmap, layout: Layout, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer inside the buffer, `(kv_heads, tokens, head_dim)`."""
    heads, dim = layout.layers[layer]
    count = heads * dim * layout.tokens
    both = torch.frombuffer(
        buffer, dtype=_DTYPES[layout.dtype], count=2 * count, offset=layout.offsets[layer]
    )
    keys, values = both.view(2, heads, layout.tokens, dim)
    return keys, values


def _aligned(number: int) -> int:
    return -(-number // ALIGN) * ALIGN
