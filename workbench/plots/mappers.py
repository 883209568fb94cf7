"""Mappers side by side, and what anchors and hold-back are worth."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.lab.results import CurvePoint, MapperTable
from workbench.lab.results.mappers import REREAD
from workbench.plots.style import BLUE, GREEN, ORANGE, TEXT, VERMILION, layout, safe

TITLES = {
    "recipe_k6": "recipe, 6 layers",
    "recipe_k8": "recipe, 8 layers",
    "default": "default",
    "best": "best",
}


def mappers(table: MapperTable, part: str = "table") -> go.Figure:
    """KL against cost, one dot a mapper; with `part` "curve" KL over anchors, over hold-back and over what is re-read.

    Args:
        table: the comparison.
        part: "table" or "curve".
    """
    return _curve(table) if part == "curve" else _table(table)


def _table(table: MapperTable) -> go.Figure:
    fig = go.Figure()
    for index, (name, entry) in enumerate(table.mappers.items()):
        colour = {"default": BLUE, "best": GREEN}.get(
            name, VERMILION if name.startswith("recipe") else ORANGE
        )
        fig.add_scatter(
            x=[100 * entry.cost_share],
            y=[entry.kl.value],
            mode="markers+text",
            name=safe(TITLES.get(name, name)),
            text=[safe(TITLES.get(name, name))],
            textposition=("top left", "bottom left")[
                index % 2
            ],  # beside the whisker; two at one height stay apart
            marker={"size": 12, "color": colour},
            error_y={
                "type": "data",
                "array": [entry.kl.high - entry.kl.value],
                "arrayminus": [entry.kl.value - entry.kl.low],
                "color": TEXT,
                "thickness": 1.5,
                "width": 5,
            },
            hovertext=(
                f"{safe(TITLES.get(name, name))}: KL {entry.kl.value:.3f}, top-1 {entry.top1.value:.3f}, gap recovered "
                f"{entry.gap_recovered.value:.0%}<br>{safe(entry.form, 120)}<br>{entry.artefact_mb:.1f} MB, "
                f"{entry.map_ms:.0f} ms, {entry.anchors} anchors, hold-back {entry.hold_back}, "
                f"{entry.reread_share:.1%} re-read, {entry.native_share:.1%} native layers"
            ),
            hoverinfo="text",
            showlegend=False,
        )
    layout(fig, "What is lost, and what it costs", height=380)
    fig.update_xaxes(
        title="mapping, re-reading, native layers:<br>% of the target's prefill", rangemode="tozero"
    )
    fig.update_yaxes(title="KL to native, nats (log)", type="log")
    return fig


def _curve(table: MapperTable) -> go.Figure:
    main = table.mappers.get("default") or next(iter(table.mappers.values()))
    plain = [point for point in table.curve if point.label != REREAD]
    again = [point for point in table.curve if point.label == REREAD]
    sides = [
        ("anchors", [point for point in plain if point.hold_back == main.hold_back]),
        ("hold_back", [point for point in plain if point.anchors == main.anchors and not point.label]),
    ] + ([("reread_share", again)] if again else [])
    fig = make_subplots(rows=1, cols=len(sides), shared_yaxes=True, horizontal_spacing=0.06)
    for column, (axis, points) in enumerate(sides, start=1):
        points = sorted(points, key=lambda point: getattr(point, axis))
        fig.add_scatter(
            x=[_label(point, axis) for point in points],
            y=[point.kl.value for point in points],
            mode="lines+markers",
            line={"color": BLUE, "width": 2},
            error_y={
                "type": "data",
                "array": [point.kl.high - point.kl.value for point in points],
                "arrayminus": [point.kl.value - point.kl.low for point in points],
                "color": TEXT,
                "thickness": 1,
                "width": 4,
            },
            hovertext=[
                f"{point.anchors} anchors, hold-back {point.hold_back}, {point.reread_share:.1%} re-read<br>"
                f"KL {point.kl.value:.3f}, top-1 {point.top1.value:.3f}, gap recovered {point.gap_recovered.value:.0%}"
                for point in points
            ],
            hoverinfo="text",
            showlegend=False,
            row=1,
            col=column,
        )
    layout(fig, "", height=360)
    fig.update_xaxes(title=f"anchors (hold-back {main.hold_back})", type="category", row=1, col=1)
    fig.update_xaxes(title=f"hold-back ({main.anchors} anchors)", type="category", row=1, col=2)
    fig.update_yaxes(title="KL to native, nats (log)", type="log", row=1, col=1)
    if again:
        fig.update_xaxes(title="rare tokens re-read", type="category", row=1, col=3)
    fig.update_yaxes(type="log")
    return fig


def _label(point: CurvePoint, axis: str) -> str:
    if axis == "reread_share":
        return f"{point.reread_share:.0%}"
    value = str(getattr(point, axis))
    return f"{value} ({safe(point.label)})" if point.label else value


def describe_mappers(table: MapperTable) -> str:
    """The comparison as one sentence."""
    told = "; ".join(
        f"{TITLES.get(name, name)} KL {entry.kl.value:.3f}, gap recovered {entry.gap_recovered.value:.0%}, "
        f"{entry.cost_share:.1%} of the prefill's operations, {entry.artefact_mb:.1f} MB"
        for name, entry in table.mappers.items()
    )
    return f"Over {len(table.passages)} passages of {table.context} context tokens: {told}."
