"""Results as plotly figures, and as one sentence each for people who cannot see them.

One module a kind of result: `figure` draws any of them, `describe` tells it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from workbench.lab.results import (
    Comparison,
    Drift,
    Evaluation,
    HeadMaps,
    HeadPatches,
    LatencyBench,
    MapperTable,
    TaskScores,
    Variants,
)
from workbench.plots.account import account, describe_account
from workbench.plots.comparison import comparison, describe_comparison
from workbench.plots.drift import describe_drift, drift
from workbench.plots.head_detail import directions, one_head, positions
from workbench.plots.heads import describe_heads, heads
from workbench.plots.latency import describe_latency, describe_parts, latency, latency_parts
from workbench.plots.mappers import describe_mappers, mappers
from workbench.plots.patch import correlation, describe_patch, repair
from workbench.plots.quality import describe_quality, quality
from workbench.plots.style import GRID, TEXT, safe
from workbench.plots.tasks import describe_tasks, tasks
from workbench.plots.variants import describe_variants, variants

__all__ = [
    "GRID",
    "TEXT",
    "account",
    "comparison",
    "correlation",
    "describe",
    "describe_parts",
    "directions",
    "drift",
    "figure",
    "heads",
    "latency",
    "latency_parts",
    "mappers",
    "one_head",
    "positions",
    "quality",
    "repair",
    "safe",
    "tasks",
    "variants",
]


def figure(result: Any, **options: Any) -> go.Figure:
    """The figure of any result; options go to the function that draws it."""
    draw = {
        HeadMaps: heads,
        LatencyBench: latency,
        Comparison: comparison,
        Evaluation: quality,
        HeadPatches: repair,
        MapperTable: mappers,
        Drift: drift,
        TaskScores: tasks,
        Variants: variants,
    }
    return draw.get(type(result), account)(result, **options)  # type: ignore[operator]


def describe(result: Any, metric: str | None = None) -> str:
    """The figure of a result as one plain sentence (no markup; escape it where it becomes HTML).

    Args:
        result: any result, an account, or an account's JSON.
        metric: for `HeadMaps`, which one, None for the first; for `Variants`, None for the best.
    """
    if isinstance(result, HeadMaps):
        return describe_heads(result, metric or next(iter(result.metrics)))
    if isinstance(result, Variants):
        return describe_variants(result, metric)
    tell: dict[type, Any] = {
        LatencyBench: describe_latency,
        Comparison: describe_comparison,
        Evaluation: describe_quality,
        HeadPatches: describe_patch,
        MapperTable: describe_mappers,
        Drift: describe_drift,
        TaskScores: describe_tasks,
    }
    if type(result) in tell:
        return tell[type(result)](result)
    return describe_account(result if isinstance(result, Mapping) else result.to_json())
