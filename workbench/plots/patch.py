"""Interventions on heads: how well the cheap metrics foresee them, and what restoring the worst heads wins."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from workbench.lab.results.heads import METRICS
from workbench.lab.results.patch import CAUSAL, RANDOM, SHARES, HeadPatches
from workbench.plots.style import BLUE, GREEN, GRID, ORANGE, PURPLE, SKY, TEXT, VERMILION, layout

NAMES = {RANDOM: "random heads", CAUSAL: "by their own patch gain"}
OTHERS = (SKY, ORANGE, PURPLE, VERMILION)
DRAWN = 3  # cheap metrics in the figure, the best ones; all stand in the table


def repair(patches: HeadPatches) -> go.Figure:
    """Share of the KL recovered against the share of heads restored, worst first by several orders."""
    fig = go.Figure()
    prediction = patches.prediction
    if prediction is None:
        layout(fig, "", height=320)
        return fig
    curves = prediction.repair
    cheap = sorted((n for n in curves if n not in NAMES), key=lambda n: -_finite(curves[n]["10"]))[:DRAWN]
    if "r2_k" in curves and "r2_k" not in cheap:
        cheap.append("r2_k")
    styles = [
        (CAUSAL, GREEN, "solid"),
        *((n, BLUE if i == 0 else OTHERS[i - 1], "solid") for i, n in enumerate(cheap)),
    ]
    for name, colour, dash in [*styles, (RANDOM, TEXT, "dot")]:
        fig.add_scatter(
            x=list(SHARES),
            y=[None if math.isnan(curves[name][str(s)]) else 100 * curves[name][str(s)] for s in SHARES],
            name=title(name),
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 3 if name == prediction.best_metric else 2},
            marker={"size": 8, "symbol": "circle" if name in NAMES else "diamond"},
            hovertemplate="%{y:.0f} % of the KL recovered<extra>" + title(name) + "</extra>",
        )
    layout(fig, "", height=400)
    fig.update_xaxes(title="worst heads restored, %", tickvals=list(SHARES), range=[0, 21])
    fig.update_yaxes(title="KL recovered, %", rangemode="tozero")
    fig.update_layout(margin={"t": 90})
    return fig


def correlation(patches: HeadPatches) -> go.Figure:
    """Rank correlation of every cheap metric with the patch gain and with the damage alone."""
    fig = go.Figure()
    prediction = patches.prediction
    if prediction is not None:
        r, other = prediction.rank_correlation, prediction.rank_correlation_damage
        names = sorted(r, key=lambda name: _finite(r[name]))
        for values, label, colour in (
            (other, "with the damage alone", SKY),
            (r, "with the patch gain", BLUE),
        ):
            fig.add_bar(
                y=[title(name) for name in names],
                x=[None if math.isnan(values[name]) else values[name] for name in names],
                name=label,
                orientation="h",
                marker={"color": colour},
                hovertemplate="%{y}: %{x:.2f}<extra>" + label + "</extra>",
            )
    layout(fig, "", height=140 + 34 * (0 if prediction is None else len(prediction.rank_correlation)))
    fig.update_xaxes(title="rank correlation (Spearman)", range=[-1, 1], zerolinecolor=GRID)
    fig.update_layout(barmode="group", bargap=0.25, legend={"traceorder": "reversed"})
    return fig


def title(name: str) -> str:
    """What an order is called in a legend."""
    return NAMES.get(name) or METRICS[name].title


def describe_patch(patches: HeadPatches) -> str:
    """The interventions in one or two sentences."""
    layer, head = patches.order()[0]
    text = (
        f"The mapped cache has a KL of {patches.base_kl:.4f} to the native run; the costliest head is layer {layer}, "
        f"KV head {head}, whose patch wins {patches.gain['kv'][layer, head]:.4f}."
    )
    prediction = patches.prediction
    if prediction is None or not prediction.best_metric:
        return text
    curve, best = prediction.repair, prediction.best_metric
    return (
        f"{text} Restoring the worst 10 % of heads by {METRICS[best].title} recovers {curve[best]['10']:.0%} of it, "
        f"random heads {curve[RANDOM]['10']:.0%}, the heads' own patch gains {curve[CAUSAL]['10']:.0%}."
    )


def _finite(value: float) -> float:
    return -math.inf if math.isnan(value) else value
