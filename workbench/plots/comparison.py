"""The side-by-side decode: KL per token."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from workbench.lab.results import Comparison
from workbench.plots.style import BLUE, GREEN, VERMILION, layout, safe

COLUMN_COLOURS = {"mapped": BLUE, "prefill": VERMILION, "source": GREEN}


def comparison(result: Comparison) -> go.Figure:
    """KL per token of the true prefill's text; marks stand where a column would have said another one."""
    tokens = [safe(piece, 16) or "·" for piece in result.pieces["prefill"]]
    fig = go.Figure()
    for column, name in (("mapped", "mapped"), ("source", "source alone")):
        values, colour = list(result.kl[column]), COLUMN_COLOURS[column]
        where = list(range(len(values)))
        hover = [
            f"token {i + 1}: {tokens[i]}<br>{name}: KL {value:.3f} nats"
            + ("" if result.top1[column][i] else "<br>would have said another token")
            for i, value in enumerate(values)
        ]
        shared: dict[str, Any] = {"hovertext": hover, "hoverinfo": "text"}
        if column == "mapped":
            fig.add_bar(x=where, y=values, name=name, marker_color=colour, **shared)
        else:
            line = {"color": colour, "width": 1.5, "shape": "hvh"}
            fig.add_scatter(x=where, y=values, name=name, mode="lines", line=line, **shared)
        wrong = result.disagreeing(column)
        fig.add_scatter(
            x=wrong,
            y=[values[i] for i in wrong],
            name=f"{name}: another token",
            mode="markers",
            marker={
                "symbol": "x" if column == "mapped" else "circle-open",
                "size": 9,
                "color": VERMILION if column == "mapped" else colour,
                "line_width": 2,
            },
            hovertext=[hover[i] for i in wrong],
            hoverinfo="text",
        )
    layout(fig, "", height=380)
    fig.update_yaxes(title="KL, nats", rangemode="tozero")
    shown = range(0, len(tokens), max(1, len(tokens) // 64))
    fig.update_xaxes(
        title="the true prefill's tokens",
        tickvals=list(shown),
        ticktext=[tokens[i] for i in shown],
        tickangle=-60,
        tickfont={"size": 10},
        showgrid=False,
    )
    return fig


def describe_comparison(result: Comparison) -> str:
    """The distances as one sentence."""
    at = result.first_divergence()
    where = "does not differ from it" if at is None else f"first differs at token {at + 1}"
    return (
        f"Over {len(result.kl['mapped'])} tokens of the true prefill's text the mapped cache has a "
        f"mean KL of {result.mean_kl():.3f} and the source alone {result.mean_kl('source'):.3f}; "
        f"the mapped text {where}."
    )
