"""The cost of a handoff over context lengths, as medians with all runs beside them.

The figure that counts is the net saving of one attempted handoff:

    prefill - handoff - transport - delivery - artefact load / handoffs - what rejected ones cost

with everything that a handoff does inside `handoff` (new cache, mapping, anchors, hold-back, first logits).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable

SCALING_RANGE = (256, 8192)  # context lengths over which the exponent is fitted


@dataclass(frozen=True)
class Terms:
    """What a handoff costs besides itself; times in milliseconds.

    Attributes:
        load_ms: reading and verifying the artefact once.
        handoffs: over how many handoffs this is spread.
        rejection_rate: share of handoffs that are rejected, after which the context is prefilled after all.
        delivered: "memory" or "file" when the mapped cache goes to another process, "" when it stays in this one.
    """

    load_ms: float = 0.0
    handoffs: int = 1
    rejection_rate: float = 0.0
    delivered: str = ""


@dataclass(frozen=True)
class LatencyCell:
    """Medians at one context length, in milliseconds.

    Attributes:
        tokens: context length.
        map_ms: mapping all tokens: strip, matrix products, rotation, writing into a new cache.
        handoff_ms: the whole handoff: new cache, mapping, anchors, hold-back, first logits.
        prefill_ms: the target's true prefill without its language-model head, whole or in chunks, whichever is faster.
        prefill_first_ms: the same with the head on the last token, as a first answer token needs it.
        gemm_ms: the bare matrix products of the mapping.
        parts: medians of the parts of the handoff, as in its account.
        samples: every run of every job, in order.
        ahead_handoff_ms: the handoff when all but the last `turn_tokens` had been mapped ahead; None when not measured.
        ahead_ms: what mapping them ahead took.
        turn_tokens: tokens that were new at the switch.
        move_ms: moving the mapped cache to the other device, None where there is no other.
        deliver_ms: way -> milliseconds until another process has the whole cache ("memory", "file").
        deliver_first_ms: way -> milliseconds until it has the first layer and can begin.
        cache_bytes: of the mapped cache.
        source_bytes: of the source's cache.
        peak_bytes: both caches and everything else that a handoff held at its worst moment, None when unknown.
        prefill_chunk: tokens a pass of the prefill, 0 for all in one.
        terms: what the net saving subtracts besides.
    """

    tokens: int
    map_ms: float
    handoff_ms: float
    prefill_ms: float
    prefill_first_ms: float
    gemm_ms: float
    parts: dict[str, float] = field(default_factory=dict)
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    ahead_handoff_ms: float | None = None
    ahead_ms: float | None = None
    turn_tokens: int = 0
    move_ms: float | None = None
    deliver_ms: dict[str, float] = field(default_factory=dict)
    deliver_first_ms: dict[str, float] = field(default_factory=dict)
    cache_bytes: int = 0
    source_bytes: int = 0
    peak_bytes: int | None = None
    prefill_chunk: int = 0
    terms: Terms = field(default_factory=Terms)

    @property
    def ratio(self) -> float:
        """True prefill without the head over the whole handoff, which does include it: the strict ratio."""
        return self.prefill_ms / self.handoff_ms

    @property
    def ratio_first_token(self) -> float:
        """Both up to the first logits."""
        return self.prefill_first_ms / self.handoff_ms

    @property
    def shipping_ms(self) -> float:
        """Transport between devices and delivery to another process, as far as they apply."""
        return (self.move_ms or 0.0) + self.deliver_ms.get(self.terms.delivered, 0.0)

    @property
    def attempt_ms(self) -> float:
        """What one attempted handoff costs on average; a rejected one is not shipped, but prefilled."""
        rate = self.terms.rejection_rate
        load = self.terms.load_ms / self.terms.handoffs
        return self.handoff_ms + load + (1 - rate) * self.shipping_ms + rate * self.prefill_ms

    @property
    def net_saving_ms(self) -> float:
        """Prefill without the head minus all that an attempted handoff costs."""
        return self.prefill_ms - self.attempt_ms

    @property
    def accepted_ms(self) -> float:
        """Cost per accepted handoff: attempts that were rejected, and their prefills, included."""
        return self.attempt_ms / (1 - self.terms.rejection_rate)

    @property
    def memory_over(self) -> float | None:
        """Peak memory during a handoff over the two caches."""
        both = self.cache_bytes + self.source_bytes
        return self.peak_bytes / both if self.peak_bytes and both else None

    def to_json(self) -> dict[str, Any]:
        """The fields and the derived figures."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "ratio_first_token": self.ratio_first_token,
            "net_saving_ms": self.net_saving_ms,
            "accepted_ms": self.accepted_ms,
            "memory_over_caches": self.memory_over,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LatencyCell:
        """The inverse of `to_json`; fields that an older file does not have keep their defaults."""
        values = {entry.name: data[entry.name] for entry in fields(cls) if entry.name in data}
        values["samples"] = {name: tuple(runs) for name, runs in data.get("samples", {}).items()}
        values["terms"] = Terms(**data["terms"]) if "terms" in data else Terms()
        return cls(**values)


@dataclass(frozen=True)
class LatencyBench:
    """What a handoff costs over context lengths.

    Attributes:
        cells: one a length, ascending.
        load_ms: reading and verifying the artefact, its file out of the page cache if that can be done;
            None for a mapper that is in memory only.
        load_warm_ms: the same right after.
        anchors: of the handoffs.
        hold_back: of the handoffs.
        repeats: timed runs per length.
        environment: processor, threads, dtype, versions.
        provenance: where and when.
        load_is_cold: the file was really out of the page cache for `load_ms`; else both are warm.
        scaling: (tokens, mapping alone, whole handoff) of further lengths, without prefill.
        decode: tokens per second of our loop and of transformers' `generate`, or {}.
    """

    cells: tuple[LatencyCell, ...]
    load_ms: float | None
    load_warm_ms: float | None
    anchors: int
    hold_back: int
    repeats: int
    environment: dict[str, Any]
    provenance: Provenance
    load_is_cold: bool = True
    scaling: tuple[tuple[int, float, float], ...] = ()
    decode: dict[str, Any] = field(default_factory=dict)

    @property
    def gemm_fraction(self) -> float:
        """Time of the bare matrix products over the mapping's, at 1,024 tokens or else the longest length."""
        if not self.cells:
            return math.nan
        cell = next((cell for cell in self.cells if cell.tokens == 1024), self.cells[-1])
        return cell.gemm_ms / cell.map_ms

    @property
    def break_even(self) -> float | None:
        """Context length from which the net saving is above 0, linear between the lengths measured.

        0 when it is faster at every length, None when at none.
        """
        previous: LatencyCell | None = None
        for cell in self.cells:
            if cell.net_saving_ms > 0:
                if previous is None:
                    return 0.0
                share = -previous.net_saving_ms / (cell.net_saving_ms - previous.net_saving_ms)
                return previous.tokens + share * (cell.tokens - previous.tokens)
            previous = cell
        return None

    @property
    def scaling_exponent(self) -> float:
        """a of handoff ~ tokens^a, least squares on logarithms; 1 is linear. NaN with fewer than 3 lengths."""
        return exponent([(tokens, handoff) for tokens, _, handoff in self._points()])

    @property
    def map_exponent(self) -> float:
        """The same of mapping alone."""
        return exponent([(tokens, mapping) for tokens, mapping, _ in self._points()])

    def _points(self) -> list[tuple[int, float, float]]:
        low, high = SCALING_RANGE
        points = {cell.tokens: (cell.tokens, cell.map_ms, cell.handoff_ms) for cell in self.cells}
        points |= {point[0]: point for point in self.scaling}
        return [points[n] for n in sorted(points) if low <= n <= high]

    def to_json(self) -> dict[str, Any]:
        """All of it, with the derived figures."""
        return jsonable(
            {
                "cells": [cell.to_json() for cell in self.cells],
                "load_ms": self.load_ms,
                "load_warm_ms": self.load_warm_ms,
                "load_is_cold": self.load_is_cold,
                "gemm_fraction": self.gemm_fraction,
                "break_even_tokens": self.break_even,
                "scaling_exponent": self.scaling_exponent,
                "map_exponent": self.map_exponent,
                "scaling": [list(point) for point in self.scaling],
                "decode": self.decode,
                "anchors": self.anchors,
                "hold_back": self.hold_back,
                "repeats": self.repeats,
                "environment": self.environment,
                "provenance": self.provenance.to_json(),
                "units": "milliseconds, medians",
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LatencyBench:
        """The inverse of `to_json`; fields that an older file does not have keep their defaults."""
        return cls(
            cells=tuple(LatencyCell.from_json(cell) for cell in data["cells"]),
            load_ms=data["load_ms"],
            load_warm_ms=data["load_warm_ms"],
            anchors=data["anchors"],
            hold_back=data["hold_back"],
            repeats=data["repeats"],
            environment=dict(data["environment"]),
            provenance=Provenance.from_json(data["provenance"]),
            load_is_cold=bool(data.get("load_is_cold", True)),
            scaling=tuple((int(n), float(a), float(b)) for n, a, b in data.get("scaling", ())),
            decode=dict(data.get("decode", {})),
        )


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope of log(time) over log(tokens), NaN with fewer than 3 points."""
    if len(points) < 3:
        return math.nan
    xs, ys = [math.log(n) for n, _ in points], [math.log(time) for _, time in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)
