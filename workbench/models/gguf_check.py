"""A walk over the head of a GGUF file that refuses absurd sizes, before any library believes them.

Readers take a declared array length as it stands, so a file of 49 bytes can make them loop or fill the
memory. Here every declared length is first compared with the bytes that are left: an array of n texts needs
at least 8 n of them. So the walk ends after at most as many steps as the file has room for, and what passes
is as large as it looks.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from workbench.errors import InputError

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # value type -> bytes
TEXT, ARRAY = 8, 9
MOST_TEXTS = 4_000_000  # the largest vocabularies and their merges have about half a million
MOST_KEYS = MOST_TENSORS = 100_000
MOST_DIMENSIONS = 8
LONGEST_NAME = 65_535


class _Damaged(Exception):
    """What is wrong, in a few words."""


class _Walk:
    """A position in the file, and what may still follow."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._texts = data, 0, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def skip(self, n: int) -> None:
        if n > self.left:
            raise _Damaged("it ends too early, or declares absurd sizes")
        self._at += n

    def number(self, code: str) -> int:
        start = self._at
        self.skip(struct.calcsize(code))
        return int(struct.unpack_from(code, self._data, start)[0])

    def text(self, longest: int | None = None) -> None:
        self._texts += 1
        length = self.number("<Q")
        if self._texts > MOST_TEXTS or (longest is not None and length > longest):
            raise _Damaged("it declares absurd sizes")
        self.skip(length)

    def value(self, kind: int, depth: int = 0) -> None:
        if kind in SIZES:
            self.skip(SIZES[kind])
        elif kind == TEXT:
            self.text()
        elif kind == ARRAY and depth < 2:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in SIZES:
                self.skip(count * SIZES[inner])
                return
            if count * 8 > self.left:
                raise _Damaged("it declares absurd sizes")
            for _ in range(count):
                self.value(inner, depth + 1)
        else:
            raise _Damaged(f"it has a value of the unknown type {kind}")


def check_gguf(path: Path) -> None:
    """Walk over keys and tensor descriptions; nothing is kept.

    Args:
        path: a plain file.

    Raises:
        InputError: it is no GGUF file of version 2 or 3, is cut off, or declares sizes that it cannot hold.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise _Damaged("it does not begin like one")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _walk(_Walk(data), len(data))
    except _Damaged as damage:
        raise InputError(f"{path.name} cannot be read as a GGUF file: {damage}.") from None


def _walk(walk: _Walk, size: int) -> None:
    walk.skip(4)
    version, tensors, keys = walk.number("<I"), walk.number("<Q"), walk.number("<Q")
    if version not in (2, 3):
        raise _Damaged(f"its version is {version}, and 2 and 3 are known")
    if keys > MOST_KEYS or not 0 < tensors <= MOST_TENSORS:
        raise _Damaged(f"it declares {keys} keys and {tensors} tensors")
    for _ in range(keys):
        walk.text(LONGEST_NAME)
        walk.value(walk.number("<I"))
    for _ in range(tensors):
        walk.text(LONGEST_NAME)
        dimensions = walk.number("<I")
        if dimensions > MOST_DIMENSIONS:
            raise _Damaged(f"it has a tensor of {dimensions} dimensions")
        elements = math.prod(walk.number("<Q") for _ in range(dimensions))
        walk.skip(4)  # the quantisation; no kind has less than a bit per element
        if elements > 8 * size or walk.number("<Q") > size:
            raise _Damaged("it has a tensor that is larger than the file")
