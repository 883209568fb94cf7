"""A walk over the head of a GGUF file that refuses absurd sizes, before any library believes them.

Readers take a declared array length as it stands, so a file of 49 bytes can make them loop or fill the
memory. Here every declared length is first compared with the bytes that are left: an array of n texts needs
at least 8 n of them. So the walk ends after at most as many steps as the file has room for, and what passes
is as large as it looks. Then the reader that transformers uses has to get along with it. Both happen in a child
process with a limit on time and memory.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from pathlib import Path

from workbench.errors import InputError
from workbench.models.isolated import MEMORY_MB, ChildError, ChildLimitError, ask

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # value type -> bytes
TEXT, ARRAY = 8, 9
MOST_TEXTS = 4_000_000  # the largest vocabularies and their merges have about half a million
MOST_KEYS = MOST_TENSORS = 100_000
MOST_DIMENSIONS = 8
LONGEST_NAME = 65_535
SECONDS, MOST_SECONDS, TEXT_SECONDS = 10.0, 90.0, 5e-5


class _Damaged(Exception):
    """What is wrong, in a few words that complete "it …"."""


class _Walk:
    """A position in the file, and what may still follow."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self.texts = data, 0, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def skip(self, n: int) -> None:
        if n > self.left:
            raise _Damaged("ends too early, or declares absurd sizes")
        self._at += n

    def number(self, code: str) -> int:
        start = self._at
        self.skip(struct.calcsize(code))
        return int(struct.unpack_from(code, self._data, start)[0])

    def text(self, longest: int | None = None) -> None:
        self.texts += 1
        length = self.number("<Q")
        if self.texts > MOST_TEXTS or (longest is not None and length > longest):
            raise _Damaged("declares absurd sizes")
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
                raise _Damaged("declares absurd sizes")
            for _ in range(count):
                self.value(inner, depth + 1)
        else:
            raise _Damaged(f"has a value of the unknown type {kind}")


def check_gguf(path: Path) -> None:
    """Refuse a GGUF file that cannot be read within limits; looked at again only when it has changed.

    Args:
        path: a plain file.

    Raises:
        InputError: it is no GGUF file of version 2 or 3, is cut off, declares sizes that it cannot hold, or takes
            too long.
    """
    info = path.stat()
    _check(path.resolve(), info.st_size, info.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _check(path: Path, size: int, mtime_ns: int) -> None:
    megabytes = MEMORY_MB + 2 * size // 1_000_000
    try:
        texts = ask("gguf", str(path), seconds=SECONDS, megabytes=megabytes, patient=True)
        # The reader makes an object of every token and merge: a third of a million of them are ten honest seconds.
        seconds = min(MOST_SECONDS, SECONDS + texts * TEXT_SECONDS)
        ask("gguf_read", str(path), seconds=seconds, megabytes=megabytes, patient=True)
    except (ChildError, ChildLimitError) as why:
        raise InputError(f"{path.name} cannot be read as a GGUF file: it {why}.") from None


def parse(path: Path) -> int:
    """Walk over keys and tensor descriptions: for the child.

    Returns:
        How many texts there are.

    Raises:
        _Damaged: what is wrong.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise _Damaged("does not begin like one")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            walk = _Walk(data)
            _walk(walk, len(data))
            return walk.texts


def read(path: Path) -> int:
    """Let the reader that transformers uses parse the head: for the child.

    Returns:
        How many tensors there are.

    Raises:
        _Damaged: it does not get along with the file.
    """
    from gguf import GGUFReader

    try:
        return len(GGUFReader(path).tensors)
    except MemoryError:
        raise
    except Exception as error:
        raise _Damaged(f"is damaged ({type(error).__name__})") from error


def _walk(walk: _Walk, size: int) -> None:
    walk.skip(4)
    version, tensors, keys = walk.number("<I"), walk.number("<Q"), walk.number("<Q")
    if version not in (2, 3):
        raise _Damaged(f"has the version {version}, and 2 and 3 are known")
    if keys > MOST_KEYS or not 0 < tensors <= MOST_TENSORS:
        raise _Damaged(f"declares {keys} keys and {tensors} tensors")
    for _ in range(keys):
        walk.text(LONGEST_NAME)
        walk.value(walk.number("<I"))
    for _ in range(tensors):
        walk.text(LONGEST_NAME)
        dimensions = walk.number("<I")
        if dimensions > MOST_DIMENSIONS:
            raise _Damaged(f"has a tensor of {dimensions} dimensions")
        elements = math.prod(walk.number("<Q") for _ in range(dimensions))
        walk.skip(4)  # the quantisation; no kind has less than a bit per element
        if elements > 8 * size or walk.number("<Q") > size:
            raise _Damaged("has a tensor that is larger than the file")
