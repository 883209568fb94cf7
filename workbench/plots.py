"""Results as plotly figures, and as one sentence each for people who cannot see them.

Figures read in light and dark mode: transparent backgrounds, mid-grey text, colours of Okabe and Ito (told
apart by colour-blind people) and perceptually even maps on fixed scales. Whatever a model or a person wrote
is shown literally: escaped, and with characters that do not print written as their code. Plotly would take
it for markup otherwise.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.lab.results import ARMS, METRICS, Comparison, Evaluation, HeadMaps, LatencyBench
from workbench.lab.results.common import nan_mean

TEXT, GRID = "#888888", "rgba(136,136,136,0.25)"
BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
COLUMN_COLOURS = {"mapped": BLUE, "prefill": VERMILION, "source": GREEN}
PARTS = {
    "anchors": ("anchors run natively", ORANGE),
    "map_strip": ("rotation removed", SKY),
    "map_product": ("matrix products", BLUE),
    "map_rotate": ("rotation put in", GREEN),
    "hold_back": ("held-back tokens run natively", PURPLE),
    "prefill": ("true prefill", VERMILION),
}


def safe(text: str, longest: int = 40) -> str:
    """Text that plotly shows literally: escaped, unprintable characters as codes, cut at `longest`."""
    shown = text if len(text) <= longest else text[: longest - 1] + "…"
    names = {"\n": "⏎", "\t": "⇥", " ": " "}
    printable = "".join(names.get(c) or (c if c.isprintable() else f"⟨U+{ord(c):04X}⟩") for c in shown)
    return html.escape(printable)


def figure(result: Any, **options: Any) -> go.Figure:
    """The figure of any result; options go to the function that draws it."""
    draw = {HeadMaps: heads, LatencyBench: latency, Comparison: comparison, Evaluation: quality}
    return draw.get(type(result), account)(result, **options)  # type: ignore[operator]


def heads(maps: HeadMaps, metric: str = "r2_k") -> go.Figure:
    """Layers by heads on the metric's fixed scale; bright is good, heads without a value are crossed out.

    Args:
        maps: the measurement.
        metric: a name in `maps.metrics`.
    """
    kind, values = METRICS[metric], maps.metrics[metric]
    head_word = "KV head" if kind.per == "kv" else "query head"
    shown = np.log2(np.maximum(values, 1e-9)) if kind.log else values
    hover = [
        [
            f"layer {layer}, {head_word} {head}<br>{kind.title}: "
            + ("no value, the head does not vary" if math.isnan(value) else f"{value:.3f} {kind.unit}")
            for head, value in enumerate(row)
        ]
        for layer, row in enumerate(values)
    ]
    ticks: dict[str, Any] = {}
    if kind.log:
        exponents = list(range(int(kind.low), int(kind.high) + 1))
        ticks = {"tickvals": exponents, "ticktext": [f"{2.0**exponent:g}" for exponent in exponents]}
    fig = go.Figure(
        go.Heatmap(
            z=shown.tolist(),
            zmin=kind.low,
            zmax=kind.high,
            colorscale="Viridis",
            reversescale=kind.better == "low",
            xgap=1,
            ygap=1,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            colorbar={
                "title": {"text": kind.unit, "side": "right"},
                "outlinewidth": 0,
                "thickness": 14,
                **ticks,
            },
        )
    )
    dead = np.argwhere(np.isnan(values))
    if dead.size:
        fig.add_scatter(
            x=dead[:, 1].tolist(),
            y=dead[:, 0].tolist(),
            mode="markers",
            marker={"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": TEXT}},
            hovertext=[hover[layer][head] for layer, head in dead],
            hoverinfo="text",
            showlegend=False,
        )
    _layout(fig, kind.title, height=max(260, 90 + 16 * maps.layers))
    fig.update_xaxes(title=head_word, dtick=1 if values.shape[1] <= 16 else None, showgrid=False)
    fig.update_yaxes(title="layer", autorange="reversed", showgrid=False)
    return fig


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
    _layout(fig, "", height=440)
    fig.update_layout(barmode="group", bargap=0.25)
    fig.update_xaxes(title="context length, tokens", type="category")
    fig.update_yaxes(title="milliseconds (log)", type="log", dtick=1, secondary_y=False)
    top = max([cell.ratio for cell in bench.cells], default=1.0)
    right = {"range": [0, 1.25 * max(top, 1.0)], "tickmode": "auto", "showgrid": False}
    fig.update_yaxes(title="times faster", secondary_y=True, **right)
    return fig


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
    _layout(fig, "", height=380)
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


def quality(result: Evaluation, setting: int = 0) -> go.Figure:
    """Cross entropy and KL of all arms with their 95 % intervals, native's cross entropy as a line.

    Args:
        result: the evaluation.
        setting: index into `result.settings`.
    """
    arms = result.arms(setting)
    names = [name.replace("_", " ") for name in arms]
    colours = {"native": VERMILION, "mapped": BLUE, "source": GREEN}
    fig = make_subplots(
        rows=1,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.06,
        subplot_titles=("cross entropy, nats per token", "KL to native, nats per token"),
    )
    for column, measure in enumerate(("ce", "kl"), start=1):
        figures = [getattr(arm, measure) for arm in arms.values()]
        fig.add_scatter(
            x=[entry.value for entry in figures],
            y=names,
            mode="markers",
            marker={"size": 11, "color": [colours.get(name, TEXT) for name in arms]},
            error_x={
                "type": "data",
                "array": [entry.high - entry.value for entry in figures],
                "arrayminus": [entry.value - entry.low for entry in figures],
                "color": TEXT,
                "thickness": 1.5,
                "width": 5,
            },
            hovertext=[
                f"{ARMS[name]}<br>{entry.value:.3f} (95 %: {entry.low:.3f} to {entry.high:.3f})"
                for name, entry in zip(arms, figures, strict=True)
            ],
            hoverinfo="text",
            showlegend=False,
            row=1,
            col=column,
        )
    line = {"color": VERMILION, "dash": "dot", "width": 1}
    fig.add_vline(x=arms["native"].ce.value, line=line, row=1, col=1)
    _layout(fig, "Is the following text still as likely?", height=120 + 40 * len(names))
    fig.update_yaxes(autorange="reversed", showgrid=False)
    fig.update_annotations(font={"color": TEXT, "size": 13})
    return fig


def account(of: Any) -> go.Figure:
    """One bar of the handoff's parts, and below it the true prefill that it stands against.

    Args:
        of: an `Account` or its JSON.
    """
    data: Mapping[str, Any] = of if isinstance(of, Mapping) else of.to_json()
    times: Mapping[str, float] = data["ms"]
    row = {"mapped": "handoff", "prefill": "true prefill", "fallback": "fallback: true prefill"}[data["how"]]
    fig = go.Figure()
    known = [(title, colour, times[key]) for key, (title, colour) in PARTS.items() if times.get(key)]
    rest = times["total"] - sum(value for _, _, value in known)
    if rest > 0.01 * times["total"]:
        known.append(("other", TEXT, rest))
    for title, colour, value in known:
        fig.add_bar(
            x=[value],
            y=[row],
            orientation="h",
            name=title,
            marker_color=colour,
            hovertemplate=f"{title}: %{{x:.1f}} ms<extra></extra>",
        )
    if data.get("prefill_ms") is not None and data["how"] == "mapped":
        label = f"true prefill, {safe(data.get('prefill_source') or 'unknown')}"
        pattern = {"shape": "/" if data.get("prefill_source") == "estimated" else ""}
        fig.add_bar(
            x=[data["prefill_ms"]],
            y=[label],
            orientation="h",
            name=label,
            marker={"color": VERMILION, "pattern": pattern},
            hovertemplate=f"{label}: %{{x:.1f}} ms<extra></extra>",
        )
    _layout(fig, "", height=210)
    fig.update_layout(barmode="stack", bargap=0.35)
    fig.update_xaxes(title="milliseconds", rangemode="tozero")
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig


def describe(result: Any, metric: str | None = None) -> str:
    """The figure of a result as one plain sentence (no markup; escape it where it becomes HTML).

    Args:
        result: any result, an account, or an account's JSON.
        metric: for `HeadMaps`, which one; None for the first.
    """
    if isinstance(result, HeadMaps):
        return _describe_heads(result, metric or next(iter(result.metrics)))
    if isinstance(result, LatencyBench):
        cells = [
            f"{cell.tokens:,} tokens handoff {cell.handoff_ms:,.0f} ms, "
            f"true prefill {cell.prefill_ms:,.0f} ms ({cell.ratio:.1f} times)"
            for cell in result.cells
        ]
        return f"Median times by context length: {'; '.join(cells) or 'nothing measured yet'}."
    if isinstance(result, Comparison):
        at = result.first_divergence()
        where = "does not differ from it" if at is None else f"first differs at token {at + 1}"
        return (
            f"Over {len(result.kl['mapped'])} tokens of the true prefill's text the mapped cache has a "
            f"mean KL of {result.mean_kl():.3f} and the source alone {result.mean_kl('source'):.3f}; "
            f"the mapped text {where}."
        )
    if isinstance(result, Evaluation):
        arms = "; ".join(
            f"{name.replace('_', ' ')} cross entropy {arm.ce.value:.3f}, KL {arm.kl.value:.3f}"
            for name, arm in result.arms().items()
        )
        gap = result.settings[0].gap_recovered.value
        return (
            f"Over {len(result.passages)} passages: {arms}; the mapped cache recovers {gap:.0%} of the gap."
        )
    return _describe_account(result if isinstance(result, Mapping) else result.to_json())


def _describe_heads(maps: HeadMaps, metric: str) -> str:
    kind, values = METRICS[metric], maps.metrics[metric]
    worst = maps.worst(metric)
    word = "KV head" if kind.per == "kv" else "query head"
    if worst is None:
        return f"{kind.title}: no head has a value."
    dead = int(np.isnan(values).sum())
    return (
        f"{kind.title} over {maps.layers} layers and {values.shape[1]} {word}s, mean {nan_mean(values):.3f}, "
        f"worst {values[worst]:.3f} in layer {worst[0]}, {word} {worst[1]}"
        f"{f', {dead} without a value' if dead else ''}."
    )


def _describe_account(data: Mapping[str, Any]) -> str:
    told = (
        f"{data['tokens']:,} tokens from {data['source']} to {data['target']}: {data['reused']:,} reused, "
        f"{data['mapped']:,} mapped, {data['native']:,} run natively, "
        f"in {data['ms'].get('total', 0.0):,.0f} ms"
    )
    if data["how"] == "fallback":
        return f"Fallback to a true prefill ({data['reason'].rstrip('.')}): {told}."
    if data["how"] == "mapped" and data.get("prefill_ms") is not None:
        told += f", against {data['prefill_ms']:,.0f} ms ({data['prefill_source']}) for a true prefill"
    return f"{told}."


def _quartiles(runs: Sequence[float], value: float) -> tuple[float, float]:
    """First and third quartile, the value itself where there are too few runs."""
    if len(runs) < 2:
        return value, value
    low, _, high = quantiles(runs, n=4, method="inclusive")
    return min(low, value), max(high, value)


def _layout(fig: go.Figure, title: str, height: int) -> None:
    """What all figures share."""
    fig.update_layout(
        template="none",
        title={"text": title, "font": {"size": 15, "color": TEXT}, "x": 0, "xref": "paper"}
        if title
        else None,
        height=height,
        margin={"l": 60, "r": 30, "t": 70 if title else 20, "b": 60},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": TEXT, "size": 12},
        # Above the plot, where a legend that wraps makes its own room; so no title stands with one.
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        hoverlabel={"namelength": -1},
    )
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
    fig.update_xaxes(**axis)
    fig.update_yaxes(**axis)
