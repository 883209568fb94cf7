"""What a handoff takes over context lengths, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.lab.results import LatencyBench
from workbench.plots.style import BLUE, GREEN, ORANGE, SKY, TEXT, VERMILION, layout


def latency(bench: LatencyBench) -> go.Figure:
    """Bars of mapping, handoff and prefill per context length (log scale; whiskers: middle half of the runs).

    The line is the strict ratio, prefill without the head over the whole handoff, on the right axis.
    """
    fig = make_subplots(specs=[[{"secondary_y": True}]])
    lengths = [f"{cell.tokens:,}" for cell in bench.cells]
    bars = (
        ("map_ms", "map", "mapping alone", SKY),
        ("handoff_ms", "handoff", "whole handoff", BLUE),
        ("prefill_ms", "prefill", "true prefill, no head", ORANGE),
        ("prefill_first_ms", "prefill_first", "true prefill to first token", VERMILION),
    )
    for attribute, job, name, colour in bars:
        values = [getattr(cell, attribute) for cell in bench.cells]
        spread = [
            _quartiles(cell.samples.get(job, ()), value)
            for cell, value in zip(bench.cells, values, strict=True)
        ]
        fig.add_bar(
            x=lengths,
            y=values,
            name=name,
            marker_color=colour,
            error_y={
                "type": "data",
                "array": [high - value for (_, high), value in zip(spread, values, strict=True)],
                "arrayminus": [value - low for (low, _), value in zip(spread, values, strict=True)],
                "color": TEXT,
                "thickness": 1,
                "width": 3,
            },
            hovertemplate=f"%{{x}} tokens<br>{name}: %{{y:.1f}} ms<extra></extra>",
        )
    fig.add_scatter(
        x=lengths,
        y=[cell.ratio for cell in bench.cells],
        name="times faster (right axis)",
        mode="lines+markers+text",
        text=[f"{cell.ratio:.1f}×" for cell in bench.cells],
        textposition="top center",
        line={"color": GREEN, "width": 2, "dash": "dot"},
        marker={"size": 8, "symbol": "diamond"},
        hovertemplate="%{x} tokens<br>prefill without head / whole handoff: %{y:.2f}<extra></extra>",
        secondary_y=True,
    )
    layout(fig, "", height=440)
    fig.update_layout(barmode="group", bargap=0.25)
    fig.update_xaxes(title="context length, tokens", type="category")
    fig.update_yaxes(title="milliseconds (log)", type="log", dtick=1, secondary_y=False)
    top = max([cell.ratio for cell in bench.cells], default=1.0)
    right = {"range": [0, 1.25 * max(top, 1.0)], "tickmode": "auto", "showgrid": False}
    fig.update_yaxes(title="times faster", secondary_y=True, **right)
    return fig


def _quartiles(runs: Sequence[float], value: float) -> tuple[float, float]:
    """First and third quartile, the value itself where there are too few runs."""
    if len(runs) < 2:
        return value, value
    low, _, high = quantiles(runs, n=4, method="inclusive")
    return min(low, value), max(high, value)


def describe_latency(bench: LatencyBench) -> str:
    """The medians as one sentence."""
    cells = [
        f"{cell.tokens:,} tokens handoff {cell.handoff_ms:,.0f} ms, "
        f"true prefill {cell.prefill_ms:,.0f} ms ({cell.ratio:.1f} times)"
        for cell in bench.cells
    ]
    return f"Median times by context length: {'; '.join(cells) or 'nothing measured yet'}."
