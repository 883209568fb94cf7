"""Per-head metrics as arrays, each with its meaning, unit and fixed scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, nan_mean, number
from workbench.lab.results.head_details import HeadDetails

if TYPE_CHECKING:
    from workbench.lab.results.patch import HeadPatches


@dataclass(frozen=True)
class Metric:
    """One quantity per layer and head.

    Attributes:
        name: key in JSON.
        title: for a menu and a figure.
        per: "kv" (one value a KV head) or "query" (one a query head).
        low: lower end of the fixed colour scale.
        high: upper end.
        better: "high" or "low".
        unit: for a colour bar.
        meaning: one plain sentence.
        log: colours on a log2 scale; `low` and `high` are then exponents.
        causal: found by intervention (`workbench.lab.patch`), not by the streaming pass.
    """

    name: str
    title: str
    per: str
    low: float
    high: float
    better: str
    unit: str
    meaning: str
    log: bool = False
    causal: bool = False


ZONES = {
    "sinks": "first 16 mapped tokens",
    "middle": "tokens in the middle",
    "recent": "last 64 tokens",
}
"""Zone of a text -> what it holds; in a text under 256 tokens a zone at an end is at most a quarter of it."""

SAME_TEXT = "patch_estimate_same_text"
"""The one cheap metric that is measured together with the interventions, on their texts."""

_ALL = (
    Metric(
        "r2_k", "R² of keys", "kv", 0, 1, "high", "R²",
        "Share of the variance of the target's keys (rotation removed) that is explained.",
    ),
    Metric(
        "r2_v", "R² of values", "kv", 0, 1, "high", "R²",
        "Share of the variance of the target's values that the mapper explains.",
    ),
    Metric(
        "cosine", "Attention output, mean cosine", "query", 0, 1, "high", "cosine",
        "How well a query head's output keeps its direction over the mapped cache, mean over positions.",
    ),
    Metric(
        "cosine_worst", "Attention output, worst cosine", "query", -1, 1, "high", "cosine",
        "The same cosine at the position where it is lowest.",
    ),
    Metric(
        "attention_kl", "Attention pattern, KL", "query", 0, 0.5, "low", "nats",
        "How far a query head's attention over mapped keys is from that over the target's own.",
    ),
    Metric(
        "k_error_in_q", "Key error where queries look", "kv", -2, 2, "low", "times even",
        "Key error as queries meet it, over the same error spread evenly: above 1 it sits where they look.",
        log=True,
    ),
    Metric(
        "v_error_in_o", "Value error where the output reads", "kv", -2, 2, "low", "times even",
        "Value error as the output projection meets it, over the same error spread evenly.",
        log=True,
    ),
    Metric(
        "output_error", "Output error in the residual stream", "kv", -14, -2, "low", "share of the stream",
        "Energy of the error that the head adds to the residual stream, over the energy of the stream there.",
        log=True,
    ),
    Metric(
        "output_error_abs", "Output error, absolute", "kv", -12, 6, "low", "squared norm",
        "Energy of the error that the head adds to the residual stream, mean over positions.",
        log=True,
    ),
    Metric(
        "patch_estimate", "Estimated patch gain", "kv", 0, 0.01, "low", "nats",
        "Next-token KL that a true head in the mapped cache would win, estimated for all heads from a few gradients.",
    ),
    Metric(
        SAME_TEXT, "Estimated patch gain, same text", "kv", 0, 0.01, "low", "nats",
        "The same estimate from the very texts that were patched: what heads cost there, before any was exchanged.",
    ),
    *(
        Metric(
            f"{short}_error_{zone}", f"{kind} error, {what}", "kv", 0, 1, "low", "share of the variance",
            f"Squared error of {kind.lower()} on the {what}, over the head's variance.",
        )
        for short, kind in (("k", "Key"), ("v", "Value"))
        for zone, what in ZONES.items()
    ),
    Metric(
        "patch_gain", "Patch gain, measured", "kv", 0, 0.01, "low", "nats",
        "Fall of the next-token KL when this head's mapped keys and values are replaced by the true ones.",
        causal=True,
    ),
    Metric(
        "patch_damage", "Damage alone, measured", "kv", 0, 0.01, "low", "nats",
        "Next-token KL when only this head is mapped and everything else in the cache is true.",
        causal=True,
    ),
)  # fmt: skip
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
CHEAP = tuple(name for name, metric in METRICS.items() if not metric.causal and name != SAME_TEXT)
"""Metrics that one streaming pass gives."""


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """Per-head metrics of a mapper on held-out text.

    Attributes:
        metrics: name (of `METRICS`) -> float array (target layers, heads); NaN where a head has no variance.
        layers: of the target.
        kv_heads: of the target.
        query_heads: of the target; consecutive ones share a KV head.
        tokens: positions measured, without the anchors.
        texts: number of texts.
        anchors: first tokens of each text that the target runs natively, left out of all metrics.
        features: inputs of the mapper's regression for one output of a key, the widest layer.
        provenance: where and when.
        details: of single heads; None in results saved before there were any.
    """

    metrics: dict[str, np.ndarray]
    layers: int
    kv_heads: int
    query_heads: int
    tokens: int
    texts: int
    anchors: int
    features: int
    provenance: Provenance
    details: HeadDetails | None = None

    def __post_init__(self) -> None:
        """Raise ValueError when an array has not the shape that its metric calls for."""
        for name, values in self.metrics.items():
            heads = self.kv_heads if METRICS[name].per == "kv" else self.query_heads
            if values.shape != (self.layers, heads):
                raise ValueError(f"{name} must have shape {(self.layers, heads)}, not {values.shape}")

    def worst(self, name: str) -> tuple[int, int] | None:
        """(layer, head) with the worst value of a metric, None when all are NaN."""
        values = self.metrics[name]
        if np.isnan(values).all():
            return None
        index = np.nanargmin(values) if METRICS[name].better == "high" else np.nanargmax(values)
        layer, head = np.unravel_index(index, values.shape)
        return int(layer), int(head)

    def with_patches(self, patches: HeadPatches) -> HeadMaps:
        """The same maps with what interventions found, and what was estimated on their texts."""
        found = {"patch_gain": patches.gain["kv"], "patch_damage": patches.damage["kv"]}
        if not np.isnan(patches.estimate).all():
            found[SAME_TEXT] = patches.estimate
        return replace(self, metrics={**self.metrics, **found})

    def by_kv_head(self, name: str) -> np.ndarray:
        """(layers, KV heads) of a metric; of query heads that share a KV head the mean, or the worst one's cosine."""
        values = self.metrics[name]
        if METRICS[name].per == "kv":
            return values
        grouped = values.reshape(self.layers, self.kv_heads, -1)
        return grouped.min(-1) if name == "cosine_worst" else grouped.mean(-1)

    def to_json(self) -> dict[str, Any]:
        """Metrics as nested lists [layer][head], with axes, units, ranges and means beside them."""
        known = [METRICS[name] for name in self.metrics]
        return jsonable(
            {
                "layers": self.layers,
                "heads": self.kv_heads,
                "query_heads": self.query_heads,
                "metrics": {name: values.tolist() for name, values in self.metrics.items()},
                "means": {name: nan_mean(values) for name, values in self.metrics.items()},
                "axes": {metric.name: ["layer", f"{metric.per}_head"] for metric in known},
                "units": {metric.name: metric.unit for metric in known},
                "ranges": {metric.name: [metric.low, metric.high] for metric in known},
                "tokens": self.tokens,
                "texts": self.texts,
                "anchors": self.anchors,
                "features": self.features,
                "provenance": self.provenance.to_json(),
                "details": None if self.details is None else self.details.to_json(),
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadMaps:
        """The inverse of `to_json`; metrics that this version does not know are left out."""
        return cls(
            metrics={
                name: np.array([[number(value) for value in row] for row in rows], dtype=np.float64)
                for name, rows in data["metrics"].items()
                if name in METRICS
            },
            layers=data["layers"],
            kv_heads=data["heads"],
            query_heads=data["query_heads"],
            tokens=data["tokens"],
            texts=data["texts"],
            anchors=data["anchors"],
            features=data["features"],
            provenance=Provenance.from_json(data["provenance"]),
            details=HeadDetails.from_json(data["details"]) if data.get("details") else None,
        )
