"""What one model of the pair holds of a conversation: a KV cache, and the ids that it covers.

Ids decide what can be used again. A conversation may change under a cache (undo, edit, a template that
rewrites old answers, turns of the other model); `fit` keeps the longest common prefix and cuts the rest, so a
cache never stands for something else than its ids say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import Cache

from workbench.kv.cache import length, nbytes, new_cache, truncate


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first ids are equal."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


@dataclass
class Held:
    """A cache with what it covers.

    Attributes:
        cache: holds exactly `len(ids)` tokens.
        ids: the token ids it covers.
        mapped: spans of tokens (start, stop) that came through a mapper, in order.
        origin: how the rest came: "native", "prefill" or "fallback".
        ahead: position from which on everything was brought here before any switch asked for it, None when nothing was.
    """

    cache: Cache
    ids: list[int] = field(default_factory=list)
    mapped: list[tuple[int, int]] = field(default_factory=list)
    origin: str = "native"
    ahead: int | None = None

    @classmethod
    def empty(cls, layers: int) -> Held:
        """Nothing held yet, for a model with so many layers."""
        return cls(new_cache(layers))

    @property
    def how(self) -> str:
        """The badge of what this model says now: "mapped" as soon as any token of its context was mapped."""
        return "mapped" if self.mapped else self.origin

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        return nbytes(self.cache) if self.ids else 0

    def cut(self, n: int) -> None:
        """Keep the first n tokens (all, if there are fewer); also mends a cache that an error left uneven."""
        n = min(n, len(self.ids))
        truncate(self.cache, n)
        del self.ids[n:]
        self.mapped = [(start, min(stop, n)) for start, stop in self.mapped if start < n]
        if n == 0:
            self.origin = "native"
        if self.ahead is not None and self.ahead >= n:
            self.ahead = None

    def fit(self, ids: Sequence[int]) -> int:
        """Cut to the longest common prefix with `ids`; returns its length."""
        self.cut(common_prefix(self.ids, ids))
        return len(self.ids)

    def cut_mapped(self) -> None:
        """Keep only what this model computed itself before the first mapped token."""
        if self.mapped:
            self.cut(self.mapped[0][0])

    def covers(self, ids: Sequence[int]) -> None:
        """Say that the cache now stands for these ids, as far as it is filled."""
        self.ids = list(ids[: length(self.cache)])
