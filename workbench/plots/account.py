"""One switch: its parts as a bar, and the true prefill that it stands against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from workbench.plots.style import BLUE, GREEN, ORANGE, PURPLE, SKY, TEXT, VERMILION, layout, safe

PARTS = {
    "cache": ("new cache allocated", "#BBBBBB"),
    "anchors": ("anchors run natively", ORANGE),
    "bottom": ("lowest layers run natively", "#F0E442"),
    "map_strip": ("rotation removed", SKY),
    "map_product": ("matrix products", BLUE),
    "map_rotate": ("rotation put in", GREEN),
    "hold_back": ("held-back tokens run natively", PURPLE),
    "ends": ("first, rare and last tokens run natively", PURPLE),
    "prefill": ("true prefill", VERMILION),
}


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
    layout(fig, "", height=210)
    fig.update_layout(barmode="stack", bargap=0.35)
    fig.update_xaxes(title="milliseconds", rangemode="tozero")
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig


def describe_account(data: Mapping[str, Any]) -> str:
    """A switch as one sentence."""
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
