"""How well following text is predicted from a mapped cache, against controls, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, number
from workbench.lab.results.figure import Figure
from workbench.lab.results.tasks import TaskScores

ARMS: dict[str, str] = {
    "native": "the target on its own cache",
    "mapped": "the target on the mapped cache",
    "recipe": "a mapper of the published recipe, without anchors",
    "source": "the source model alone",
    "identity": "the source's cache as it is, unmapped",
    "no_context": "the target without the context",
    "zero": "zeros in place of the mapped tokens",
    "wrong_document": "another document's mapped cache",
    "held_back_only": "the target on the natively run tokens alone",
}
"""Arms of the evaluation: name -> what the following text is predicted from."""


@dataclass(frozen=True)
class Arm:
    """One arm at one setting.

    Attributes:
        ce: cross entropy of the following tokens, nats per token.
        kl: KL(native ‖ this arm), nats per token.
        top1: share of the following positions with native's argmax.
        n: passages.
        per_passage: ce, kl and top1 of every passage, in the order of `Evaluation.passages`.
    """

    ce: Figure
    kl: Figure
    top1: Figure
    n: int
    per_passage: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Means as plain numbers, intervals beside them under `ci`."""
        figures = {"ce": self.ce, "kl": self.kl, "top1": self.top1}
        return {
            **{name: figure.value for name, figure in figures.items()},
            "n": self.n,
            "ci": {name: [figure.low, figure.high] for name, figure in figures.items()},
            "per_passage": self.per_passage,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Arm:
        """The inverse of `to_json`."""
        figures = {
            name: Figure(number(data[name]), *map(number, data["ci"][name])) for name in ("ce", "kl", "top1")
        }
        per_passage = {name: tuple(map(number, values)) for name, values in data["per_passage"].items()}
        return cls(n=data["n"], per_passage=per_passage, **figures)


@dataclass(frozen=True)
class Setting:
    """The arms that depend on how the handoff is done.

    Attributes:
        anchors: first tokens run natively.
        hold_back: last tokens run natively.
        arms: mapped, zero, wrong_document and, with more than one token held back, held_back_only.
        gap_recovered: (CE without context - CE mapped) / (CE without context - CE native).
    """

    anchors: int
    hold_back: int
    arms: dict[str, Arm]
    gap_recovered: Figure

    def to_json(self) -> dict[str, Any]:
        """The arms by name, and `gap_recovered` with its interval."""
        return {
            "anchors": self.anchors,
            "hold_back": self.hold_back,
            "gap_recovered": self.gap_recovered.value,
            "gap_recovered_ci": [self.gap_recovered.low, self.gap_recovered.high],
            "arms": {name: arm.to_json() for name, arm in self.arms.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Setting:
        """The inverse of `to_json`."""
        return cls(
            anchors=data["anchors"],
            hold_back=data["hold_back"],
            arms={name: Arm.from_json(arm) for name, arm in data["arms"].items()},
            gap_recovered=Figure(number(data["gap_recovered"]), *map(number, data["gap_recovered_ci"])),
        )


@dataclass(frozen=True)
class Evaluation:
    """How well following text is predicted from a mapped cache, against all controls.

    Attributes:
        fixed: the arms that no setting changes: native, source, no_context.
        settings: one or more; the first is the main one.
        passages: name and SHA-256 of the token ids of every passage.
        context: context tokens of a passage.
        following: teacher-forced tokens after it.
        seed: of the bootstrap.
        provenance: where and when.
        absent: arms that could not be measured -> why.
        scores: the tasks, None when none were measured.
    """

    fixed: dict[str, Arm]
    settings: tuple[Setting, ...]
    passages: tuple[dict[str, str], ...]
    context: int
    following: int
    seed: int
    provenance: Provenance
    absent: dict[str, str] = field(default_factory=dict)
    scores: TaskScores | None = None

    def arms(self, setting: int = 0) -> dict[str, Arm]:
        """All arms at one setting, in the order of `ARMS`."""
        both = {**self.fixed, **self.settings[setting].arms}
        return {name: both[name] for name in ARMS if name in both}

    def to_json(self) -> dict[str, Any]:
        """The design's keys at the top (the main setting's), everything else below."""
        main = self.settings[0]
        no_tasks: dict[str, Any] = {
            "tasks": {},
            "retention": {},
            "retention_floor": {},
            "worst_task": None,
            "note": "Likelihood of following text only; no task accuracies were measured.",
        }
        return jsonable(
            {
                **(no_tasks if self.scores is None else {"note": "", **self.scores.to_json()}),
                "absent": self.absent,
                **{name: arm.to_json() for name, arm in self.arms().items()},
                "kl": main.arms["mapped"].kl.value,
                "top1": main.arms["mapped"].top1.value,
                "gap_recovered": main.gap_recovered.value,
                "anchors": main.anchors,
                "hold_back": main.hold_back,
                "settings": [setting.to_json() for setting in self.settings],
                "passages": list(self.passages),
                "context": self.context,
                "following": self.following,
                "seed": self.seed,
                "provenance": self.provenance.to_json(),
                "units": {
                    "ce": "nats per token",
                    "kl": "nats per token",
                    "top1": "share",
                    "gap_recovered": "share",
                },
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_json`."""
        return cls(
            fixed={name: Arm.from_json(data[name]) for name in ("native", "source", "no_context")},
            settings=tuple(Setting.from_json(setting) for setting in data["settings"]),
            passages=tuple(dict(passage) for passage in data["passages"]),
            context=data["context"],
            following=data["following"],
            seed=data["seed"],
            provenance=Provenance.from_json(data["provenance"]),
            absent=dict(data.get("absent", {})),
            scores=TaskScores.from_json(data) if data.get("tasks") else None,
        )
