"""What the measurements return: frozen dataclasses of numbers with labels, units and their origin.

Measuring (`compare`, `heads`, `latency`, `retention`) stands apart from drawing (`workbench.plots`), and
both meet here. Nothing in this file imports torch, so a page can show a saved result before any model
library is loaded. Every result has a `Provenance`, goes to JSON with `to_json()` and comes back with
`from_json()`.

Units: times in milliseconds, KL and cross entropy (CE) in nats per token, shares between 0 and 1.
A number that cannot be computed (a head without variance) is NaN here and null in JSON.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

from workbench.lab.results.cascade import Calibration
from workbench.lab.results.common import Step, finish
from workbench.lab.results.comparison import COLUMNS, Comparison
from workbench.lab.results.drift import Drift, DriftTurn
from workbench.lab.results.figure import Figure
from workbench.lab.results.heads import METRICS, HeadMaps, Metric
from workbench.lab.results.latency import LatencyBench, LatencyCell
from workbench.lab.results.mappers import CurvePoint, MapperEntry, MapperTable
from workbench.lab.results.patch import HeadPatches
from workbench.lab.results.quality import ARMS, Arm, Evaluation, Setting
from workbench.lab.results.recording import RecordedTurn, Recording
from workbench.lab.results.tasks import TASKS, TaskArm, TaskResult, TaskScores
from workbench.lab.results.variants import Variant, Variants

__all__ = [
    "ARMS",
    "COLUMNS",
    "KINDS",
    "METRICS",
    "TASKS",
    "Arm",
    "Calibration",
    "Comparison",
    "CurvePoint",
    "Drift",
    "DriftTurn",
    "Evaluation",
    "Figure",
    "HeadMaps",
    "HeadPatches",
    "LatencyBench",
    "LatencyCell",
    "MapperEntry",
    "MapperTable",
    "Metric",
    "RecordedTurn",
    "Recording",
    "Setting",
    "Step",
    "TaskArm",
    "TaskResult",
    "TaskScores",
    "Variant",
    "Variants",
    "as_precomputed",
    "finish",
]

Result = TypeVar("Result")

KINDS: dict[str, Any] = {
    "cascade": Calibration,
    "compare": Comparison,
    "drift": Drift,
    "heads": HeadMaps,
    "latency": LatencyBench,
    "patch": HeadPatches,
    "mappers": MapperTable,
    "quality": Evaluation,
    "recording": Recording,
    "variants": Variants,
}
"""Kind of a saved result (the name of its file) -> the class that reads it."""


def as_precomputed(result: Result, note: str = "") -> Result:
    """The same result, marked as read from a file."""
    holder = cast(Any, result)
    parts = {"provenance": replace(holder.provenance, origin="precomputed", note=note)}
    if (
        getattr(holder, "scores", None) is not None
    ):  # measured in a run of their own, with an origin of their own
        parts["scores"] = as_precomputed(holder.scores, note)
    return cast(Result, replace(holder, **parts))
