"""Accuracies of tasks by arm, with intervals and the level of guessing."""

from __future__ import annotations

import plotly.graph_objects as go

from workbench.lab.results import ARMS, TASKS, TaskScores
from workbench.plots.style import BLUE, GREEN, TEXT, VERMILION, layout, safe

_LOOK = {
    "native": (VERMILION, "circle"), "mapped": (BLUE, "diamond"), "source": (GREEN, "square"),
    "recipe": (BLUE, "diamond-open"), "identity": (GREEN, "square-open"), "no_context": (TEXT, "x"),
    "zero": (TEXT, "triangle-up-open"), "wrong_document": (TEXT, "triangle-down-open"),
    "held_back_only": (TEXT, "cross-thin-open"),
}  # fmt: skip


def tasks(result: TaskScores) -> go.Figure:
    """One row a task, the worst first; one mark an arm; a dash at chance."""
    fig = go.Figure()
    names = list(result.tasks)
    arms = [arm for arm in ARMS if any(arm in task.arms for task in result.tasks.values())]
    for place, arm in enumerate(arms):
        colour, symbol = _LOOK[arm]
        rows = [(y, result.tasks[name]) for y, name in enumerate(names) if arm in result.tasks[name].arms]
        figures = [task.arms[arm].accuracy for _, task in rows]
        fig.add_scatter(
            x=[entry.value for entry in figures],
            y=[y + (place - (len(arms) - 1) / 2) * 0.09 for y, _ in rows],
            mode="markers",
            name=arm.replace("_", " "),
            marker={"size": 10, "color": colour, "symbol": symbol, "line": {"width": 1.5, "color": colour}},
            error_x={
                "type": "data",
                "array": [entry.high - entry.value for entry in figures],
                "arrayminus": [entry.value - entry.low for entry in figures],
                "color": colour,
                "thickness": 1.2,
                "width": 0,
            },
            hovertext=[
                f"{ARMS[arm]}<br>{entry.value:.1%} (95 %: {entry.low:.1%} to {entry.high:.1%})"
                for entry in figures
            ],
            hoverinfo="text",
        )
    fig.add_scatter(
        x=[result.tasks[name].chance for name in names],
        y=list(range(len(names))),
        mode="markers",
        name="chance",
        marker={"symbol": "line-ns-open", "size": 46, "color": TEXT, "line": {"width": 1.5, "color": TEXT}},
        hoverinfo="skip",
    )
    layout(fig, "", height=160 + 95 * len(names))
    titles = [TASKS[name].title if name in TASKS else safe(name) for name in names]
    fig.update_yaxes(
        tickvals=list(range(len(names))), ticktext=titles, range=[len(names) - 0.4, -0.6], showgrid=False
    )
    fig.update_xaxes(title="accuracy", range=[0, 1.02], tickformat=".0%")
    return fig


def describe_tasks(result: TaskScores) -> str:
    """The accuracies as one sentence, the worst task first."""
    parts = []
    for name, task in result.tasks.items():
        arms = ", ".join(
            f"{arm.replace('_', ' ')} {scores.accuracy.value:.0%}" for arm, scores in task.arms.items()
        )
        note = "" if task.informative else " (uninformative)"
        parts.append(
            f"{TASKS[name].title if name in TASKS else name}{note}: {arms}, chance {task.chance:.0%}"
        )
    return "; ".join(parts) + "."
