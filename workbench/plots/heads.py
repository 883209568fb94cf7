"""Layers by heads as heatmaps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.lab.results import METRICS, HeadMaps
from workbench.lab.results.common import nan_mean
from workbench.plots.style import TEXT, layout


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
    layout(fig, kind.title, height=max(260, 90 + 16 * maps.layers))
    fig.update_xaxes(title=head_word, dtick=1 if values.shape[1] <= 16 else None, showgrid=False)
    fig.update_yaxes(title="layer", autorange="reversed", showgrid=False)
    return fig


def describe_heads(maps: HeadMaps, metric: str) -> str:
    """A metric as one sentence."""
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
