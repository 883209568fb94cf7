"""Arms and controls with their intervals."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.lab.results import ARMS, Evaluation
from workbench.plots.style import BLUE, GREEN, TEXT, VERMILION, layout


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
        subplot_titles=("cross entropy,<br>nats per token", "KL to native,<br>nats per token"),
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
    layout(fig, "Is following text as likely?", height=140 + 40 * len(names))
    fig.update_layout(margin={"t": 90})  # two lines above each half, so that they fit a phone
    fig.update_yaxes(autorange="reversed", showgrid=False)
    fig.update_annotations(font={"color": TEXT, "size": 13})
    return fig


def describe_quality(result: Evaluation) -> str:
    """The arms as one sentence."""
    arms = "; ".join(
        f"{name.replace('_', ' ')} cross entropy {arm.ce.value:.3f}, KL {arm.kl.value:.3f}"
        for name, arm in result.arms().items()
    )
    gap = result.settings[0].gap_recovered.value
    return f"Over {len(result.passages)} passages: {arms}; the mapped cache recovers {gap:.0%} of the gap."
