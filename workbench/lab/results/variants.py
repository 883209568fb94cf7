"""Many mappers of one direction, each with what head metrics say of it and what it keeps, and how the two go together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, number
from workbench.lab.results.correlation import pearson, ranks
from workbench.lab.results.figure import Figure
from workbench.lab.results.heads import METRICS

RETENTION, CLOSENESS = "retention", "minus_kl"
OUTCOMES = (RETENTION, CLOSENESS)
RESAMPLES, SEED = 1000, 0
FEWEST = 3  # dots for a correlation
PAPER = {"r2": -0.20, "cosine": 0.57}
"""What arXiv 2608.03893 reports: r of R², and of the attention-output cosine, with retention, of other models."""


@dataclass(frozen=True)
class Variant:
    """One mapper.

    Attributes:
        name: short.
        settings: how it was fitted or what was done to it: k, ridge, rank, objective, noise.
        metrics: name in `METRICS` -> mean over layers and heads, with nothing re-read.
        retention: accuracy mapped / native over the items of all tasks in which the context matters.
        kl: KL(native ‖ mapped) of following text, nats per token.
        gap_recovered: share of the context's worth in likelihood that is kept.
        accuracy: of each task.
        reread: tokens were re-read at the switch, which no head metric sees: a dot, but no part of a correlation.
    """

    name: str
    settings: dict[str, Any]
    metrics: dict[str, float]
    retention: Figure
    kl: Figure
    gap_recovered: Figure
    accuracy: dict[str, Figure]
    reread: bool = False

    def outcome(self, name: str) -> float:
        """One of `OUTCOMES`; higher is better in both."""
        return self.retention.value if name == RETENTION else -self.kl.value

    def to_json(self) -> dict[str, Any]:
        """Figures as [value, low, high]."""
        figures = {name: getattr(self, name).to_json() for name in ("retention", "kl", "gap_recovered")}
        accuracy = {task: figure.to_json() for task, figure in self.accuracy.items()}
        plain = {name: getattr(self, name) for name in ("name", "settings", "metrics", "reread")}
        return {**plain, **figures, "accuracy": accuracy}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Variant:
        """The inverse of `to_json`."""
        return cls(
            name=data["name"],
            settings=dict(data["settings"]),
            metrics={name: number(value) for name, value in data["metrics"].items() if name in METRICS},
            **{name: Figure.from_json(data[name]) for name in ("retention", "kl", "gap_recovered")},
            accuracy={task: Figure.from_json(values) for task, values in data["accuracy"].items()},
            reread=bool(data["reread"]),
        )


@dataclass(frozen=True)
class Correlation:
    """How a metric goes with an outcome over n mappers: Pearson's and Spearman's r, with bootstrap intervals."""

    pearson: Figure
    spearman: Figure
    n: int

    def to_json(self) -> dict[str, Any]:
        """Figures as [value, low, high]."""
        return {"pearson": self.pearson.to_json(), "spearman": self.spearman.to_json(), "n": self.n}


@dataclass(frozen=True)
class Variants:
    """Mapper variants of one direction, measured on the same texts and items in one run.

    Attributes:
        variants: in the order in which they were made.
        native, source, no_context: accuracy of each task without a mapper.
        informative: task -> whether the context matters in it; only such tasks count in `retention`.
        counts: what was measured on: head_tokens, head_texts, passages, following_tokens, and items of each task.
        sequences: pieces of calibration text that the fitted ones were fitted on.
        seed: of items, noise and intervals.
        seconds: how long measuring took, without fitting.
        provenance: where and when; the mapper that it names is the pair's own.
    """

    variants: tuple[Variant, ...]
    native: dict[str, Figure]
    source: dict[str, Figure]
    no_context: dict[str, Figure]
    informative: dict[str, bool]
    counts: dict[str, int]
    sequences: int
    seed: int
    seconds: float
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        """Variants, and for readers what `correlations` finds in them."""
        arms = {name: getattr(self, name) for name in ("native", "source", "no_context")}
        return jsonable(
            {
                "variants": [variant.to_json() for variant in self.variants],
                "correlations": {
                    outcome: {metric: found.to_json() for metric, found in correlations(self.variants, outcome).items()}
                    for outcome in OUTCOMES
                },
                "best": {outcome: best(correlations(self.variants, outcome)) for outcome in OUTCOMES},
                "published": {f"r_{name}": value for name, value in PAPER.items()},
                **{name: {task: f.to_json() for task, f in arm.items()} for name, arm in arms.items()},
                "informative": self.informative,
                "counts": self.counts,
                "sequences": self.sequences,
                "seed": self.seed,
                "seconds": self.seconds,
                "provenance": self.provenance.to_json(),
            }
        )  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Variants:
        """The inverse of `to_json`; correlations are computed from the variants when they are asked for."""
        arms = {
            name: {task: Figure.from_json(values) for task, values in data[name].items()}
            for name in ("native", "source", "no_context")
        }
        return cls(
            variants=tuple(Variant.from_json(variant) for variant in data["variants"]),
            **arms,
            informative={task: bool(yes) for task, yes in data["informative"].items()},
            counts={name: int(count) for name, count in data["counts"].items()},
            sequences=data["sequences"],
            seed=data["seed"],
            seconds=number(data["seconds"]),
            provenance=Provenance.from_json(data["provenance"]),
        )


def correlations(variants: Sequence[Variant], outcome: str) -> dict[str, Correlation]:
    """Every metric against one of `OUTCOMES`, the most telling first (see `telling`).

    Mappers that re-read are left out: no head metric sees what is re-read. NaN where fewer than three are left, or nothing
    varies.
    """
    counted = [variant for variant in variants if not variant.reread]
    names = list(dict.fromkeys(name for variant in counted for name in variant.metrics))
    found = {}
    for name in names:
        pairs = [(variant.metrics.get(name, math.nan), variant.outcome(outcome)) for variant in counted]
        found[name] = correlation(tuple(pairs))
    return dict(sorted(found.items(), key=lambda item: -telling(item[0], item[1])))


@lru_cache(maxsize=512)
def correlation(pairs: tuple[tuple[float, float], ...]) -> Correlation:
    """r of pairs of numbers, of their values and of their ranks; the interval is over draws of pairs."""
    kept = np.array([pair for pair in pairs if all(map(math.isfinite, pair))], dtype=float).reshape(-1, 2)
    n = len(kept)
    if n < FEWEST:
        nothing = Figure(math.nan, math.nan, math.nan)
        return Correlation(nothing, nothing, n)
    drawn = kept[np.random.default_rng(SEED).integers(n, size=(RESAMPLES, n))]
    figures = []
    for make in (np.asarray, ranks):
        r = pearson(make(drawn[..., 0]), make(drawn[..., 1]))
        held = r[np.isfinite(r)]
        low, high = np.percentile(held, [2.5, 97.5]) if held.size else (math.nan, math.nan)
        figures.append(Figure(float(pearson(make(kept[:, 0]), make(kept[:, 1]))), float(low), float(high)))
    return Correlation(figures[0], figures[1], n)


def telling(metric: str, found: Correlation) -> float:
    """Pearson's r, turned so that 1 is a metric that is best where the outcome is best; -inf where there is none."""
    r = found.pearson.value
    return (r if METRICS[metric].better == "high" else -r) if math.isfinite(r) else -math.inf


def best(found: Mapping[str, Correlation]) -> str:
    """The metric that foretells the outcome best, "" where there is none."""
    known = [name for name, each in found.items() if math.isfinite(each.pearson.value)]
    return max(known, key=lambda name: telling(name, found[name]), default="")
