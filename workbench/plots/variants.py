"""What a head metric says of a mapper against what the mapper keeps, one dot a mapper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.lab.results.common import jsonable
from workbench.lab.results.heads import METRICS
from workbench.lab.results.variants import (
    CLOSENESS,
    RETENTION,
    Correlation,
    Variant,
    Variants,
    best,
    correlations,
)
from workbench.plots.style import BLUE, GREEN, ORANGE, PURPLE, SKY, TEXT, VERMILION, layout, safe
from workbench.words import ARROWS

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE)
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star")
TITLES = {RETENTION: "retention", CLOSENESS: "KL to native, nats (less is higher up)"}


def variants(
    found: Variants | Sequence[Variants], metric: str | None = None, outcome: str = RETENTION
) -> go.Figure:
    """A metric against an outcome, with r over all mappers together.

    Args:
        found: of one direction, or of several pairs and directions.
        metric: a name in `METRICS`; None for the one that foretells the outcome best.
        outcome: a name in `OUTCOMES`.
    """
    groups = _groups(found)
    r = correlations(together(groups), outcome)
    metric = metric or first_metric(groups, outcome)
    fig = go.Figure()
    for number, group in enumerate(groups):
        colour, symbol = COLOURS[number % len(COLOURS)], SYMBOLS[number % len(SYMBOLS)]
        shown = [one for one in group.variants if metric in one.metrics]
        figures = [one.retention if outcome == RETENTION else one.kl for one in shown]
        fig.add_scatter(
            x=[jsonable(one.metrics[metric]) for one in shown],
            y=[jsonable(entry.value) for entry in figures],
            mode="markers",
            name=safe(name_of(group), 60),
            marker={
                "size": 10,
                "color": colour,
                "symbol": [f"{symbol}-open" if one.reread else symbol for one in shown],
                "line": {"width": 1.5, "color": colour},
            },
            error_y={
                "type": "data",
                "array": [jsonable(entry.high - entry.value) for entry in figures],
                "arrayminus": [jsonable(entry.value - entry.low) for entry in figures],
                "color": TEXT,
                "thickness": 0.7,
                "width": 0,
            },
            hovertext=[_hover(group, one, metric) for one in shown],
            hoverinfo="text",
        )
    layout(fig, "", height=430)
    fig.update_layout(showlegend=True)
    fig.update_xaxes(title=f"{METRICS[metric].title}, mean over layers and heads")
    fig.update_yaxes(title=TITLES[outcome], autorange="reversed" if outcome == CLOSENESS else None)
    fig.add_annotation(
        x=0.01, y=0.99, xref="paper", yref="paper", xanchor="left", yanchor="top", showarrow=False,
        text=said(r.get(metric)), font={"color": TEXT, "size": 14},
    )  # fmt: skip
    return fig


def describe_variants(
    found: Variants | Sequence[Variants], metric: str | None = None, outcome: str = RETENTION
) -> str:
    """The figure in a sentence or two."""
    groups = _groups(found)
    r = correlations(together(groups), outcome)
    winner = best(r)
    metric = metric or first_metric(groups, outcome)
    kept = "retention" if outcome == RETENTION else "closeness to the true cache (KL with its sign turned)"
    text = (
        f"{METRICS[metric].title} against {kept} over mapper variants of "
        f"{', '.join(map(name_of, groups))}: {said(r.get(metric))}."
    )
    if winner and winner != metric:
        text += f" {METRICS[winner].title} foretells it best: {said(r[winner])}."
    elif winner:
        text += " No other metric foretells it better."
    return text


def together(groups: Sequence[Variants]) -> list[Variant]:
    """The variants of all pairs and directions."""
    return [one for group in groups for one in group.variants]


def first_metric(groups: Sequence[Variants], outcome: str) -> str:
    """The metric that foretells the outcome best; the first one where none does."""
    r = correlations(together(groups), outcome)
    return best(r) or next(iter(r), "cosine")


def name_of(group: Variants) -> str:
    """Pair and direction."""
    origin = group.provenance
    return f"{origin.pair}, {ARROWS.get(origin.direction, origin.direction)}"


def said(found: Correlation | None) -> str:
    """r with its interval, and over how many mappers."""
    if found is None or not math.isfinite(found.pearson.value):
        return f"no r: too few mappers ({found.n if found else 0}), or nothing varies"
    r = found.pearson
    return (
        f"r = {r.value:.2f} (95 %: {r.low:.2f} to {r.high:.2f}), by ranks {found.spearman.value:.2f}, "
        f"{found.n} mappers"
    )


def settings_of(one: Variant) -> str:
    """How a variant was made, in a few words."""
    told: Mapping[str, Any] = one.settings
    parts = [f"{told['k']} source layers"] if "k" in told else []
    parts += [f"ridge {told['ridge']}"] if "ridge" in told else []
    parts += [f"rank {told['rank']}"] if told.get("rank") else []
    parts += [f"{told['objective']} objective"] if "objective" in told else []
    parts += [f"noise {told['noise']:.0%}"] if told.get("noise") else []
    parts += ["as it is used, with what runs natively"] if one.reread else []
    return ", ".join(parts)


def _hover(group: Variants, one: Variant, metric: str) -> str:
    figures = (("retention", one.retention), ("KL", one.kl), ("gap recovered", one.gap_recovered))
    kept = [
        f"{label} {figure.value:.3f} (95 %: {figure.low:.3f} to {figure.high:.3f})"
        for label, figure in figures
        if math.isfinite(figure.value)
    ]
    return "<br>".join(
        [
            f"{safe(one.name)}: {safe(settings_of(one), 120)}",
            safe(name_of(group), 80),
            f"{METRICS[metric].title} {one.metrics[metric]:.3f}",
            *kept,
        ]
    )


def _groups(found: Variants | Sequence[Variants]) -> list[Variants]:
    return [found] if isinstance(found, Variants) else list(found)
