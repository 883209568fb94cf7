"""What all figures share: colours, the look of axes and legends, text that is shown literally.

Figures read in light and dark mode: transparent backgrounds, mid-grey text, colours of Okabe and Ito (told
apart by colour-blind people) and perceptually even maps on fixed scales. Whatever a model or a person wrote
is shown literally: escaped, and with characters that do not print written as their code. Plotly would take
it for markup otherwise.
"""

from __future__ import annotations

import html

import plotly.graph_objects as go

TEXT, GRID = "#888888", "rgba(136,136,136,0.25)"
BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
COLUMN_COLOURS = {"mapped": BLUE, "prefill": VERMILION, "source": GREEN}


def safe(text: str, longest: int = 40) -> str:
    """Text that plotly shows literally: escaped, unprintable characters as codes, cut at `longest`."""
    shown = text if len(text) <= longest else text[: longest - 1] + "…"
    names = {"\n": "⏎", "\t": "⇥", " ": " "}
    printable = "".join(names.get(c) or (c if c.isprintable() else f"⟨U+{ord(c):04X}⟩") for c in shown)
    return html.escape(printable)


def layout(fig: go.Figure, title: str, height: int) -> None:
    """Gives a figure the common look.

    Args:
        fig: is changed.
        title: "" for none.
        height: pixels.
    """
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
