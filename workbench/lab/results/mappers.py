"""Several mappers of one direction side by side: what each keeps, what each costs, and how anchors and hold-back help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, number
from workbench.lab.results.figure import Figure
from workbench.lab.results.quality import Arm

FIGURES = ("kl", "top1", "gap_recovered", "ce")
REREAD = "re-read"


@dataclass(frozen=True)
class MapperEntry:
    """One mapper at its own anchors and hold-back.

    Attributes:
        kl: KL(native ‖ mapped) of the following tokens, nats per token.
        top1: share of them with native's argmax.
        gap_recovered: (CE without context - CE mapped) / (CE without context - CE native).
        ce: cross entropy of the following tokens, nats per token.
        map_flops_share: operations of the mapping over those of the target's prefill without its head, same context.
        map_ms: milliseconds that mapping one context took, median over the passages.
        artefact_mb: millions of bytes on disk, matrices in half precision.
        anchors: first tokens run natively.
        hold_back: last tokens run natively.
        form: what kind of mapper it is, for people.
        fitted_tokens: how many tokens it was fitted on, None when unknown.
        reread_share: share of the context's tokens that were rare and run natively instead of mapped: each costs what a
            token of a prefill costs.
        native_share: operations of the lowest layers that run natively, over those of the prefill.
    """

    kl: Figure
    top1: Figure
    gap_recovered: Figure
    ce: Figure
    map_flops_share: float
    map_ms: float
    artefact_mb: float
    anchors: int
    hold_back: int
    form: str = ""
    fitted_tokens: int | None = None
    reread_share: float = 0.0
    native_share: float = 0.0

    @property
    def cost_share(self) -> float:
        """What mapping, re-reading and native layers cost together, as a share of the target's prefill."""
        return self.map_flops_share + self.reread_share + self.native_share


@dataclass(frozen=True)
class CurvePoint:
    """The main mapper at other anchors, another hold-back, or re-reading another share of the context.

    `label` names what is special: "system prompt", or `REREAD` for the points that belong to the curve over the share.
    """

    anchors: int
    hold_back: int
    kl: Figure
    top1: Figure
    gap_recovered: Figure
    ce: Figure
    label: str = ""
    reread_share: float = 0.0


@dataclass(frozen=True)
class MapperTable:
    """Mappers compared on the same passages in one run.

    Attributes:
        fixed: native, source and no_context: what no mapper changes.
        mappers: by name; "recipe_k6" and "recipe_k8" are the published recipe, "default" the pair's own mapper, "best" the
            one that is best without regard to cost.
        curve: the default over anchors and over hold-back, possibly empty.
        passages: name and SHA-256 of the token ids of every passage.
        context: context tokens of a passage.
        following: teacher-forced tokens after it.
        seed: of the bootstrap.
        provenance: where and when.
    """

    fixed: dict[str, Arm]
    mappers: dict[str, MapperEntry]
    curve: tuple[CurvePoint, ...]
    passages: tuple[dict[str, str], ...]
    context: int
    following: int
    seed: int
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        """Figures as plain numbers with their intervals under `ci`."""
        return jsonable(
            {
                **{name: arm.to_json() for name, arm in self.fixed.items()},
                "mappers": {name: _to_json(entry) for name, entry in self.mappers.items()},
                "curve": [_to_json(point) for point in self.curve],
                "passages": list(self.passages),
                "context": self.context,
                "following": self.following,
                "seed": self.seed,
                "provenance": self.provenance.to_json(),
                "units": {
                    "kl": "nats per token", "ce": "nats per token", "top1": "share", "gap_recovered": "share",
                    "map_flops_share": "share", "reread_share": "share", "native_share": "share",
                    "map_ms": "milliseconds", "artefact_mb": "millions of bytes",
                },
            }
        )  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MapperTable:
        """The inverse of `to_json`."""
        return cls(
            fixed={name: Arm.from_json(data[name]) for name in ("native", "source", "no_context")},
            mappers={name: MapperEntry(**_from_json(entry)) for name, entry in data["mappers"].items()},
            curve=tuple(CurvePoint(**_from_json(point)) for point in data["curve"]),
            passages=tuple(dict(passage) for passage in data["passages"]),
            context=data["context"],
            following=data["following"],
            seed=data["seed"],
            provenance=Provenance.from_json(data["provenance"]),
        )


def _to_json(entry: MapperEntry | CurvePoint) -> dict[str, Any]:
    values = {name: getattr(entry, name) for name in entry.__dataclass_fields__}
    figures = {name: values[name] for name in FIGURES}
    return {
        **values,
        **{name: figure.value for name, figure in figures.items()},
        "ci": {name: [figure.low, figure.high] for name, figure in figures.items()},
    }


def _from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in data.items() if name != "ci"}
    for name in FIGURES:
        values[name] = Figure(number(data[name]), *map(number, data["ci"][name]))
    for name in ("map_flops_share", "reread_share", "native_share", "map_ms", "artefact_mb"):
        if name in values:
            values[name] = number(values[name])
    return values
