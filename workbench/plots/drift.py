"""Distance to a conversation that never switched, handoff by handoff."""

from __future__ import annotations

import plotly.graph_objects as go

from workbench.lab.results import Drift
from workbench.plots.style import BLUE, ORANGE, layout


def drift(result: Drift) -> go.Figure:
    """KL after every handoff with its 95 % interval; the KL of one switch at the same place; the bar."""
    fig = go.Figure()
    x = [turn.n for turn in result.turns]
    for name, figures, colour, symbol, dash in (
        ("after all handoffs so far", [turn.kl for turn in result.turns], BLUE, "circle", "solid"),
        ("after one switch", [turn.kl_once for turn in result.turns], ORANGE, "diamond", "dot"),
    ):
        fig.add_scatter(
            x=x,
            y=[entry.value for entry in figures],
            mode="lines+markers",
            name=name,
            line={"color": colour, "dash": dash, "width": 2},
            marker={"size": 9, "symbol": symbol, "color": colour},
            error_y={
                "type": "data",
                "array": [entry.high - entry.value for entry in figures],
                "arrayminus": [entry.value - entry.low for entry in figures],
                "color": colour,
                "thickness": 1.2,
                "width": 4,
            },
            hovertext=[
                f"handoff {turn.n}, to the {turn.side} model<br>{name}: {entry.value:.4f} nats "
                f"(95 %: {entry.low:.4f} to {entry.high:.4f})<br>{turn.new:.0f} tokens mapped, top-1 "
                f"{turn.top1.value:.0%}"
                for turn, entry in zip(result.turns, figures, strict=True)
            ],
            hoverinfo="text",
        )
    layout(fig, "", height=330)
    fig.update_xaxes(title="handoffs so far", dtick=1)
    fig.update_yaxes(title="KL to never switching, nats", rangemode="tozero")
    return fig


def describe_drift(result: Drift) -> str:
    """The chart as one sentence."""
    turns = "; ".join(
        f"handoff {turn.n} KL {turn.kl.value:.3f}, one switch {turn.kl_once.value:.3f}, recall "
        f"{turn.recall.value:.0%} against {turn.recall_never.value:.0%}"
        for turn in result.turns
    )
    return f"Over {len(result.chats)} conversations: {turns}. {result.sentence()}"
