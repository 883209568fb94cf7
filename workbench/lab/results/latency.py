"""The cost of a handoff over context lengths, as medians with all runs beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable


@dataclass(frozen=True)
class LatencyCell:
    """Medians at one context length, in milliseconds.

    Attributes:
        tokens: context length.
        map_ms: mapping all tokens: strip, matrix products, rotation, writing into a new cache.
        handoff_ms: the whole handoff: new cache, anchors, mapping, hold-back, first logits.
        prefill_ms: the target's true prefill in one pass without its language-model head.
        prefill_first_ms: the same with the head on the last token, as a first answer token needs it.
        gemm_ms: the bare matrix products of the mapping.
        parts: medians of the parts of the handoff, as in its account.
        samples: every run of map, handoff, prefill, prefill_first and gemm, in order.
    """

    tokens: int
    map_ms: float
    handoff_ms: float
    prefill_ms: float
    prefill_first_ms: float
    gemm_ms: float
    parts: dict[str, float] = field(default_factory=dict)
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """True prefill without the head over the whole handoff, which does include it: the strict ratio."""
        return self.prefill_ms / self.handoff_ms

    @property
    def ratio_first_token(self) -> float:
        """Both up to the first logits."""
        return self.prefill_first_ms / self.handoff_ms

    @property
    def net_saving_ms(self) -> float:
        """Prefill without the head minus the whole handoff; loading the artefact is not in it."""
        return self.prefill_ms - self.handoff_ms

    def to_json(self) -> dict[str, Any]:
        """The fields and the derived figures."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "ratio_first_token": self.ratio_first_token,
            "net_saving_ms": self.net_saving_ms,
        }


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
    """

    cells: tuple[LatencyCell, ...]
    load_ms: float | None
    load_warm_ms: float | None
    anchors: int
    hold_back: int
    repeats: int
    environment: dict[str, Any]
    provenance: Provenance

    @property
    def gemm_fraction(self) -> float:
        """Time of the bare matrix products over the mapping's, at 1,024 tokens or else the longest length."""
        if not self.cells:
            return math.nan
        cell = next((cell for cell in self.cells if cell.tokens == 1024), self.cells[-1])
        return cell.gemm_ms / cell.map_ms

    @property
    def break_even(self) -> float | None:
        """Context length from which the handoff is faster than prefill, linear between the lengths measured.

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

    def to_json(self) -> dict[str, Any]:
        """All of it, with `gemm_fraction` and `break_even_tokens`."""
        return jsonable(
            {
                "cells": [cell.to_json() for cell in self.cells],
                "load_ms": self.load_ms,
                "load_warm_ms": self.load_warm_ms,
                "gemm_fraction": self.gemm_fraction,
                "break_even_tokens": self.break_even,
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
        """The inverse of `to_json`."""
        names = [entry.name for entry in fields(LatencyCell)]
        cells = []
        for cell in data["cells"]:
            values = {name: cell[name] for name in names}
            values["samples"] = {name: tuple(runs) for name, runs in cell["samples"].items()}
            cells.append(LatencyCell(**values))
        return cls(
            cells=tuple(cells),
            load_ms=data["load_ms"],
            load_warm_ms=data["load_warm_ms"],
            anchors=data["anchors"],
            hold_back=data["hold_back"],
            repeats=data["repeats"],
            environment=dict(data["environment"]),
            provenance=Provenance.from_json(data["provenance"]),
        )
