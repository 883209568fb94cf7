"""Accuracies of tasks by arm: paired over the same items, with intervals, significance and what they keep.

Retention is accuracy mapped / native and `retention_floor` the same with chance set to 0. Neither is ever shown
without the source model's own score: where staying does as well, keeping everything is no feat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, mean, number
from workbench.lab.results.figure import Figure


@dataclass(frozen=True)
class TaskKind:
    """A task: what a person calls it, what it asks, and the accuracy of guessing."""

    title: str
    asks: str
    chance: float


TASKS: dict[str, TaskKind] = {
    "next_sentence": TaskKind("Next sentence", "which of four sentences comes next", 0.25),
    "last_word": TaskKind("Last word", "which of four words of the context ends the passage", 0.25),
    "fact_recall": TaskKind(
        "Planted fact", "which of four values was planted for this one in the context", 0.25
    ),
    "multi_turn_recall": TaskKind(
        "Multi-turn recall", "a fact told to the first model, asked of the second after the switch", 0.25
    ),
    "following_text": TaskKind("Following text", "the next tokens of the passage, exactly", 0.0),
}
"""The tasks that need no hub: name -> what it is."""


@dataclass(frozen=True)
class TaskArm:
    """One arm of one task.

    Attributes:
        accuracy: share of right answers.
        ce: cross entropy of the right answer's tokens, nats per token.
        correct: of every item: 1 or 0 (a share between them for following text).
        ce_items: cross entropy of every item.
    """

    accuracy: Figure
    ce: Figure
    correct: tuple[float, ...]
    ce_items: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        """Items."""
        return len(self.correct)

    def to_json(self) -> dict[str, Any]:
        """`accuracy`, `ce`, `n`, `ci` (of the accuracy), `ce_ci`, and every item."""
        return {
            "accuracy": self.accuracy.value,
            "ce": self.ce.value,
            "n": self.n,
            "ci": [self.accuracy.low, self.accuracy.high],
            "ce_ci": [self.ce.low, self.ce.high],
            "items": {"correct": list(self.correct), "ce": [round(value, 5) for value in self.ce_items]},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TaskArm:
        """The inverse of `to_json`."""
        return cls(
            Figure(number(data["accuracy"]), *map(number, data["ci"])),
            Figure(number(data["ce"]), *map(number, data["ce_ci"])),
            tuple(map(number, data["items"]["correct"])),
            tuple(map(number, data["items"]["ce"])),
        )


@dataclass(frozen=True)
class TaskResult:
    """One task with all its arms.

    Attributes:
        arms: by name, in the order of `ARMS`.
        chance: accuracy of guessing.
        informative: native is above no_context with intervals that do not overlap, so the context matters.
        retention: mapped / native.
        retention_floor: (mapped - chance) / (native - chance).
        source_gap: (mapped - source) / (native - source): the share of what changing models wins; None where native
            is not above the source.
        p_value: of the exact McNemar test of mapped against each other arm; {} for following text.
        depths: of each item, where the answer stands (0 to 1), () where that has no meaning.
        sha256: of all items.
    """

    arms: dict[str, TaskArm]
    chance: float
    informative: bool
    retention: Figure
    retention_floor: Figure
    source_gap: Figure | None
    p_value: dict[str, float] = field(default_factory=dict)
    depths: tuple[float, ...] = ()
    sha256: str = ""

    @property
    def n(self) -> int:
        """Items."""
        return next(iter(self.arms.values())).n

    def by_depth(self, arm: str) -> list[tuple[float, float, int]]:
        """(depth, accuracy, items) in four parts of the context."""
        found = []
        for part in range(4):
            chosen = [
                c
                for c, d in zip(self.arms[arm].correct, self.depths, strict=True)
                if part / 4 <= d < (part + 1) / 4 + (part == 3)
            ]
            if chosen:
                found.append(((part + 0.5) / 4, mean(tuple(chosen)), len(chosen)))
        return found

    def detail(self) -> dict[str, Any]:
        """What stands beside the arms in JSON."""
        return {
            "chance": self.chance,
            "informative": self.informative,
            "retention": self.retention.to_json(),
            "retention_floor": self.retention_floor.to_json(),
            "source_gap": None if self.source_gap is None else self.source_gap.to_json(),
            "p_value": self.p_value,
            "depths": [round(depth, 4) for depth in self.depths],
            "sha256": self.sha256,
        }

    @classmethod
    def from_json(cls, arms: Mapping[str, Any], detail: Mapping[str, Any]) -> TaskResult:
        """The inverse of the arms' JSON and `detail`."""
        gap = detail["source_gap"]
        return cls(
            arms={name: TaskArm.from_json(arm) for name, arm in arms.items()},
            chance=number(detail["chance"]),
            informative=bool(detail["informative"]),
            retention=Figure.from_json(detail["retention"]),
            retention_floor=Figure.from_json(detail["retention_floor"]),
            source_gap=None if gap is None else Figure.from_json(gap),
            p_value={name: number(p) for name, p in detail["p_value"].items()},
            depths=tuple(map(number, detail["depths"])),
            sha256=str(detail["sha256"]),
        )


@dataclass(frozen=True)
class TaskScores:
    """All tasks of one direction.

    Attributes:
        tasks: by name, worst retention first.
        absent: arms that could not be measured -> why.
        anchors: of the handoffs.
        hold_back: of the handoffs.
        limit: items a task that were asked for.
        seed: of items and bootstrap.
        seconds: how long it took.
        provenance: where and when.
    """

    tasks: dict[str, TaskResult]
    absent: dict[str, str]
    anchors: int
    hold_back: int
    limit: int
    seed: int
    seconds: float
    provenance: Provenance

    @property
    def informative(self) -> dict[str, TaskResult]:
        """The tasks in which the context matters, worst first."""
        return {name: task for name, task in self.tasks.items() if task.informative}

    @property
    def worst(self) -> str | None:
        """The informative task with the lowest retention; None when no task is informative."""
        return next(iter(self.informative), None)

    @property
    def mean_retention(self) -> float:
        """Over the informative tasks; not to be shown without `worst`."""
        return mean(tuple(task.retention.value for task in self.informative.values()))

    def to_json(self) -> dict[str, Any]:
        """The command's keys; `details` and `absent` beside them."""
        return jsonable(
            {
                "tasks": {
                    name: {arm: scores.to_json() for arm, scores in task.arms.items()}
                    for name, task in self.tasks.items()
                },
                "chance": {name: task.chance for name, task in self.tasks.items()},
                "informative": {name: task.informative for name, task in self.tasks.items()},
                "retention": {name: task.retention.value for name, task in self.tasks.items()},
                "retention_floor": {name: task.retention_floor.value for name, task in self.tasks.items()},
                "source_gap": {
                    name: None if task.source_gap is None else task.source_gap.value
                    for name, task in self.tasks.items()
                },
                "significance": {name: task.p_value for name, task in self.tasks.items()},
                "worst_task": self.worst,
                "mean_retention": self.mean_retention,
                "task_details": {name: task.detail() for name, task in self.tasks.items()},
                "absent_arms": self.absent,
                "task_setting": {
                    "anchors": self.anchors,
                    "hold_back": self.hold_back,
                    "limit": self.limit,
                    "seed": self.seed,
                    "seconds": self.seconds,
                },
                "task_provenance": self.provenance.to_json(),
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TaskScores:
        """The inverse of `to_json`."""
        setting = data["task_setting"]
        return cls(
            tasks={
                name: TaskResult.from_json(arms, data["task_details"][name])
                for name, arms in data["tasks"].items()
            },
            absent=dict(data["absent_arms"]),
            anchors=setting["anchors"],
            hold_back=setting["hold_back"],
            limit=setting["limit"],
            seed=setting["seed"],
            seconds=number(setting["seconds"]),
            provenance=Provenance.from_json(data["task_provenance"]),
        )
