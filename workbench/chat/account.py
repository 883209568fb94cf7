"""What a switch did: how many tokens came from where, how long each part took, and what it saved against a true prefill.

The true prefill that was avoided is measured when asked for, or estimated from others on this machine; which of the two
always stands beside the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

from workbench.kv.cache import new_cache
from workbench.kv.forward import forward
from workbench.models.loading import LoadedModel


@dataclass(frozen=True)
class Account:
    """What one switch did. `reused + mapped + native == tokens`.

    Attributes:
        source: name of the model that the context came from.
        target: name of the model that answers from now on.
        how: "mapped", "prefill" (true prefill, asked for) or "fallback" (true prefill, not asked for; see `reason`).
        tokens: length of the context.
        reused: tokens that the target still held.
        mapped: tokens that came through the mapper, in all layers but the lowest `native_layers`.
        native: tokens that the target ran itself in all layers, anchors, re-read ones and hold-back among them.
        anchors: first tokens run natively in this handoff.
        hold_back: last tokens run natively in this handoff.
        ms: milliseconds of each part: "cache" (allocating), "anchors", "map_strip", "map_product", "map_rotate",
            "hold_back", "ends" (anchors, re-read and held-back tokens in one pass), "bottom" (the lowest layers, over the
            tokens that are mapped above), "prefill", "total".
        reread: rare tokens among the mapped ones that were run natively instead.
        mapped_ahead: of the reused tokens, those that were mapped (anchors: run) before the switch, turn by turn.
        ahead_ms: milliseconds that this took, then; not in "total", but subtracted from what was saved.
        prefill_ms: milliseconds of the true prefill that was avoided, None when unknown.
        prefill_source: "measured" or "estimated" for `prefill_ms`, "" when unknown.
        reason: why it fell back, to a true prefill or to mapping the lowest layers too; "" otherwise.
        native_layers: so many of the lowest layers ran natively over the mapped tokens.
    """

    source: str
    target: str
    how: str
    tokens: int
    reused: int
    mapped: int
    native: int
    anchors: int
    hold_back: int
    ms: dict[str, float] = field(default_factory=dict)
    prefill_ms: float | None = None
    prefill_source: str = ""
    reason: str = ""
    mapped_ahead: int = 0
    ahead_ms: float = 0.0
    reread: int = 0
    native_layers: int = 0

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds that mapping saved against a true prefill, None when the prefill is unknown."""
        return None if self.prefill_ms is None else self.prefill_ms - self.ms["total"] - self.ahead_ms

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, `saved_ms` included."""
        return asdict(self) | {"saved_ms": self.saved_ms}


def measure_prefill(
    account: Account, ids: Sequence[int], target: LoadedModel, reused: int | None = None
) -> Account:
    """The account with the true prefill that it avoided, measured now on a scratch cache.

    What the target still held would not have been prefilled either, so only the new tokens are timed, over a cache of
    the reused ones.
    """
    reused = account.reused - account.mapped_ahead if reused is None else reused
    scratch = new_cache(target.spec.layers, len(ids))
    if reused:
        forward(target.model, ids[:reused], scratch, keep=0)
    clock = Clock()
    forward(target.model, ids[reused : account.tokens], scratch)
    return replace(account, prefill_ms=clock.total(), prefill_source="measured")


def estimate_prefill(account: Account, points: Sequence[tuple[int, float]]) -> Account:
    """The account with an estimate, labelled as one, of the true prefill that it avoided.

    Args:
        account: of a switch.
        points: (tokens, milliseconds) of true prefills by this target on this machine; lines between them, from 0 tokens
            in 0 ms on, and beyond the longest one as it went on before.
    """
    if account.how != "mapped" or account.prefill_source == "measured" or not points:
        return account
    known = sorted({0: 0.0, **dict(points)}.items())

    def at(tokens: int) -> float:
        index = next((i for i, (n, _) in enumerate(known[1:], 1) if n >= tokens), len(known) - 1)
        (low, before), (high, after) = known[index - 1], known[index]
        return before + (tokens - low) * (after - before) / (high - low)

    spared = at(account.tokens) - at(account.reused - account.mapped_ahead)
    return replace(account, prefill_ms=max(spared, 0.0), prefill_source="estimated")


class Clock:
    """Milliseconds since the start, and since the last lap."""

    def __init__(self) -> None:
        """Starts."""
        self._start = self._last = perf_counter()

    def lap(self) -> float:
        """Since the last lap."""
        now = perf_counter()
        since, self._last = (now - self._last) * 1e3, now
        return since

    def total(self) -> float:
        """Since the start."""
        return (perf_counter() - self._start) * 1e3
