"""What a handoff takes over context lengths, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.lab.results import LatencyBench, LatencyCell
from workbench.plots.account import PARTS
from workbench.plots.style import BLUE, GREEN, ORANGE, SKY, TEXT, VERMILION, layout

SHIPPING = (("moved between devices", "#F0E442"), ("delivered to another process", "#999933"))
LOADING, REJECTED = ("share of the artefact load", "#44AA99"), ("prefills of rejected ones", "#882255")


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
        mode="lines+markers",
        line={"color": GREEN, "width": 2, "dash": "dot"},
        marker={"size": 8, "symbol": "diamond"},
        hovertemplate="%{x} tokens<br>prefill without head / whole handoff: %{y:.2f}<extra></extra>",
        secondary_y=True,
    )
    for at, cell in enumerate(bench.cells):  # on a ground of its own, since it may lie over a bar
        fig.add_annotation(
            x=at,
            y=cell.ratio,
            yref="y2",
            text=f"{cell.ratio:.1f}×",
            showarrow=False,
            yshift=15,
            bgcolor="rgba(255,255,255,0.85)",
            font={"color": "#1f2933"},
        )
    layout(fig, "", height=440)
    fig.update_layout(barmode="group", bargap=0.25)
    pays = f"<br>pays from about {bench.break_even:,.0f} tokens on" if bench.break_even else ""
    fig.update_xaxes(title=f"context length, tokens{pays}", type="category")
    fig.update_yaxes(title="milliseconds (log)", type="log", dtick=1, secondary_y=False)
    top = max([cell.ratio for cell in bench.cells], default=1.0)
    right = {"range": [0, 1.25 * max(top, 1.0)], "tickmode": "auto", "showgrid": False}
    fig.update_yaxes(title="times faster", secondary_y=True, **right)
    return fig


def latency_parts(bench: LatencyBench) -> go.Figure:
    """What one attempted handoff is made of, stacked, a bar a length; with what comes on top of it.

    The share of each part is drawn, so that short and long contexts can be compared; the milliseconds are in the hover.
    """
    fig = go.Figure()
    lengths = [f"{cell.tokens:,}" for cell in bench.cells]
    stacks = [_stack(cell) for cell in bench.cells]
    names = dict.fromkeys((name, colour) for stack in stacks for name, colour, _ in stack)
    for name, colour in names:
        times = [sum(ms for part, _, ms in stack if part == name) for stack in stacks]
        whole = [sum(ms for _, _, ms in stack) for stack in stacks]
        fig.add_bar(
            x=lengths,
            y=[100 * time / total if total else 0.0 for time, total in zip(times, whole, strict=True)],
            name=name,
            marker_color=colour,
            customdata=times,
            hovertemplate=f"%{{x}} tokens<br>{name}: %{{customdata:.1f}} ms (%{{y:.0f}} %)<extra></extra>",
        )
    layout(fig, "", height=380)
    fig.update_layout(barmode="stack", bargap=0.35)
    fig.update_xaxes(title="context length, tokens", type="category")
    fig.update_yaxes(title="share of one handoff, %", range=[0, 100])
    return fig


def _stack(cell: LatencyCell) -> list[tuple[str, str, float]]:
    """(name, colour, milliseconds) of all that an attempted handoff costs, in order."""
    known = [
        (title, colour, cell.parts[key]) for key, (title, colour) in PARTS.items() if cell.parts.get(key)
    ]
    rest = cell.parts.get("total", 0.0) - sum(ms for _, _, ms in known)
    terms = cell.terms
    delivered = cell.deliver_ms.get(terms.delivered, 0.0)
    keep = 1 - terms.rejection_rate
    more = [
        ("other", TEXT, max(rest, 0.0)),
        (*SHIPPING[0], keep * (cell.move_ms or 0.0)),
        (*SHIPPING[1], keep * delivered),
        (*LOADING, terms.load_ms / terms.handoffs),
        (*REJECTED, terms.rejection_rate * cell.prefill_ms),
    ]
    return known + [part for part in more if part[2] > 0]


def describe_parts(bench: LatencyBench) -> str:
    """The parts at the longest context as one sentence."""
    if not bench.cells:
        return "Nothing measured yet."
    parts = ", ".join(f"{name} {ms:,.1f} ms" for name, _, ms in _stack(bench.cells[-1]))
    return f"One handoff at {bench.cells[-1].tokens:,} tokens: {parts}."


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
