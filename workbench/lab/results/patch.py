"""What single heads really cost: next-token KL with one head true in a mapped cache, or one mapped in a true one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, number

KINDS = ("k", "v", "kv")
"""Keys alone, values alone, both."""
SHARES = (1, 5, 10, 20)
"""Per cent of all heads that are restored together for the repair curve."""
RANDOM, CAUSAL = "random", "causal"


@dataclass(frozen=True, eq=False)
class Prediction:
    """Does a cheap metric predict what patching finds?

    Attributes:
        rank_correlation: metric -> Spearman's r with the patch gain (keys and values), positive when it is right.
        rank_correlation_damage: the same with the damage that the head does alone.
        repair: metric, "random" or "causal" -> per cent of the heads restored ("1" to "20") -> share of the KL recovered.
        draws: random sets behind each figure of "random".
        heads_restored: per cent -> how many heads that is.
        metric_tokens: tokens that the metrics were measured on.
        metric_texts: names of their texts.
    """

    rank_correlation: dict[str, float]
    rank_correlation_damage: dict[str, float]
    repair: dict[str, dict[str, float]]
    draws: int
    heads_restored: dict[str, int]
    metric_tokens: int = 0
    metric_texts: tuple[str, ...] = ()

    @property
    def best_metric(self) -> str:
        """The cheap metric whose worst 10 % of heads recover most; of equal ones the better correlated."""
        names = [name for name in self.repair if name not in (RANDOM, CAUSAL)]
        if not names:
            return ""
        return max(names, key=lambda n: (self.repair[n]["10"], number(self.rank_correlation.get(n))))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return jsonable(
            {
                "rank_correlation": self.rank_correlation,
                "rank_correlation_damage": self.rank_correlation_damage,
                "repair": self.repair,
                "best_metric": self.best_metric,
                "draws": self.draws,
                "heads_restored": self.heads_restored,
                "metric_tokens": self.metric_tokens,
                "metric_texts": list(self.metric_texts),
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prediction:
        """The inverse of `to_json`."""

        def floats(values: Mapping[str, Any]) -> dict[str, float]:
            return {name: number(value) for name, value in values.items()}

        return cls(
            rank_correlation=floats(data["rank_correlation"]),
            rank_correlation_damage=floats(data["rank_correlation_damage"]),
            repair={name: floats(curve) for name, curve in data["repair"].items()},
            draws=data["draws"],
            heads_restored=dict(data["heads_restored"]),
            metric_tokens=data.get("metric_tokens", 0),
            metric_texts=tuple(data.get("metric_texts", ())),
        )


@dataclass(frozen=True, eq=False)
class HeadPatches:
    """Interventions on single heads and layers; KL in nats a token, means over texts.

    Attributes:
        base_kl: of the mapped cache as it is.
        gain: kind -> (L, H) fall of the KL when this head's mapped tensors are replaced by the true ones.
        gain_error: (L, H) standard error of `gain["kv"]` over texts; NaN for a single text.
        damage: kind -> (L, H) KL when only this head is mapped in an otherwise true cache.
        estimate: (L, H) `gain["kv"]` as four gradients a text foretell it; NaN in results saved before there was one.
        layer_gain: kind -> (L,) the same as `gain` for all heads of a layer together.
        layer_damage: kind -> (L,) the same as `damage`.
        native_bottom: number of lowest layers run natively -> KL that is left.
        layers: of the target.
        kv_heads: of the target.
        texts: number of texts.
        context: tokens of each context.
        following: tokens predicted after each.
        anchors: first tokens, native.
        hold_back: last context tokens, native.
        seconds: that the interventions took.
        prediction: what the cheap metrics say beforehand; None when none were given.
        provenance: where and when.
    """

    base_kl: float
    gain: dict[str, np.ndarray]
    gain_error: np.ndarray
    damage: dict[str, np.ndarray]
    estimate: np.ndarray
    layer_gain: dict[str, np.ndarray]
    layer_damage: dict[str, np.ndarray]
    native_bottom: dict[int, float]
    layers: int
    kv_heads: int
    texts: int
    context: int
    following: int
    anchors: int
    hold_back: int
    seconds: float
    prediction: Prediction | None
    provenance: Provenance

    def __post_init__(self) -> None:
        """Raise ValueError when an array has the wrong shape."""
        shape = (self.layers, self.kv_heads)
        for arrays, want in (
            (self.gain, shape),
            (self.damage, shape),
            (self.layer_gain, shape[:1]),
            (self.layer_damage, shape[:1]),
        ):
            for kind in KINDS:
                if arrays[kind].shape != want:
                    raise ValueError(f"an array of {kind} must have shape {want}, not {arrays[kind].shape}")

    def order(self) -> list[tuple[int, int]]:
        """All (layer, head), the one whose patch wins most first."""
        flat = np.argsort(-self.gain["kv"].ravel(), kind="stable")
        return [(int(i) // self.kv_heads, int(i) % self.kv_heads) for i in flat]

    def to_json(self) -> dict[str, Any]:
        """Nested lists [layer][head] with axes and units; what is predicted stands beside them."""

        def lists(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
            return {kind: arrays[kind].tolist() for kind in KINDS}

        prediction = {} if self.prediction is None else self.prediction.to_json()
        return jsonable(
            {
                "base_kl": self.base_kl,
                "gain": lists(self.gain),
                "gain_error": self.gain_error.tolist(),
                "damage": lists(self.damage),
                "estimate": self.estimate.tolist(),
                "layer_gain": lists(self.layer_gain),
                "layer_damage": lists(self.layer_damage),
                "native_bottom": {str(m): kl for m, kl in self.native_bottom.items()},
                "layers": self.layers,
                "heads": self.kv_heads,
                "texts": self.texts,
                "context": self.context,
                "following": self.following,
                "anchors": self.anchors,
                "hold_back": self.hold_back,
                "seconds": self.seconds,
                "axes": {"gain": ["layer", "kv_head"], "layer_gain": ["layer"]},
                "units": {
                    **dict.fromkeys(("gain", "damage", "estimate"), "nats a token"),
                    "repair": "share of the KL recovered",
                },
                **prediction,
                "provenance": self.provenance.to_json(),
            }
        )  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadPatches:
        """The inverse of `to_json`."""

        def array(values: Any) -> np.ndarray:
            return np.array(
                [[number(x) for x in row] if isinstance(row, list) else number(row) for row in values],
                dtype=np.float64,
            )

        def arrays(name: str) -> dict[str, np.ndarray]:
            return {kind: array(data[name][kind]) for kind in KINDS}

        names = ("layers", "texts", "context", "following", "anchors", "hold_back", "seconds")
        return cls(
            base_kl=number(data["base_kl"]),
            gain=arrays("gain"),
            gain_error=array(data["gain_error"]),
            damage=arrays("damage"),
            estimate=array(data.get("estimate", [[None] * data["heads"]] * data["layers"])),
            layer_gain=arrays("layer_gain"),
            layer_damage=arrays("layer_damage"),
            native_bottom={int(m): number(kl) for m, kl in data["native_bottom"].items()},
            kv_heads=data["heads"],
            **{name: data[name] for name in names},
            prediction=Prediction.from_json(data) if "rank_correlation" in data else None,
            provenance=Provenance.from_json(data["provenance"]),
        )
