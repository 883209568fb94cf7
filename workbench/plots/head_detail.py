"""One head: error along the directions that are read, and error by position."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.lab.results.head_details import HeadDetails
from workbench.plots.style import BLUE, VERMILION, layout

FLOOR = 1e-6  # share of energy below which a direction is drawn at the bottom
READERS = {"key": "queries", "value": "output projection"}


def directions(details: HeadDetails, layer: int, head: int, kind: str = "key") -> go.Figure:
    """Energy of what reads and of the error along the same directions, the most read one first.

    Args:
        details: of all heads.
        layer: of the target.
        head: KV head.
        kind: "key" or "value".
    """
    read, error = (getattr(details, f"{kind}_{what}")[layer, head] for what in ("read", "error"))
    fig = go.Figure()
    x = list(range(1, len(read) + 1))
    for values, name, colour, symbol in (
        (read, READERS[kind], BLUE, "circle"),
        (error, f"error of the {kind}s", VERMILION, "diamond"),
    ):
        fig.add_scatter(
            x=x,
            y=_logged(values),
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 5, "symbol": symbol},
            hovertemplate="direction %{x}: %{y:.2%}<extra>" + name + "</extra>",
        )
    layout(fig, "", height=330)
    fig.update_xaxes(title=f"direction, most read by the {READERS[kind]} first")
    fig.update_yaxes(title="share of the energy", type="log", range=[-5, 0.1], tickformat="~%", dtick=1)
    return fig


def positions(details: HeadDetails, layer: int, head: int) -> go.Figure:
    """Mean squared error of keys and values in bins of positions, over the head's variance."""
    edges = details.edges
    labels = [f"{start}–{stop - 1}" for start, stop in pairwise(edges)]
    fig = go.Figure()
    for kind, colour in (("key", BLUE), ("value", VERMILION)):
        values = getattr(details, f"{kind}_position")[layer, head]
        fig.add_bar(
            x=labels,
            y=[None if np.isnan(value) else float(value) for value in values],
            name=f"{kind}s",
            marker={"color": colour},
            customdata=list(details.bin_tokens),
            hovertemplate="positions %{x}, %{customdata} tokens: %{y:.2f}<extra>" + kind + "s</extra>",
        )
    layout(fig, "", height=330)
    fig.update_layout(barmode="group", bargap=0.2)
    fig.update_xaxes(title="position in the text", type="category")
    fig.update_yaxes(title="error / variance", rangemode="tozero")
    return fig


def one_head(details: HeadDetails, layer: int, head: int) -> go.Figure:
    """All three figures of a head above one another, for a file."""
    parts = [directions(details, layer, head, kind) for kind in ("key", "value")]
    parts.append(positions(details, layer, head))
    fig = make_subplots(rows=3, cols=1, vertical_spacing=0.11)
    for row, part in enumerate(parts, start=1):
        for trace in part.data:
            fig.add_trace(trace, row=row, col=1)
    layout(fig, "", height=1050)
    for row, part in enumerate(parts, start=1):
        for name in ("xaxis", "yaxis"):
            axis = part.layout[name]
            wanted = {
                "title": axis.title,
                "type": axis.type,
                "tickformat": axis.tickformat,
                "dtick": axis.dtick,
            }
            fig.update_layout(
                {f"{name}{row if row > 1 else ''}": {k: v for k, v in wanted.items() if v is not None}}
            )
    fig.update_layout(barmode="group")
    return fig


def _logged(values: np.ndarray) -> list[Any]:
    return [None if np.isnan(value) else max(float(value), FLOOR) for value in values]
