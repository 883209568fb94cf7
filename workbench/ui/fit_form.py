"""The less common options of a fit: which text, which form of map, which tokens stay native."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import gradio as gr

from workbench.commands.fit import DEFAULTS
from workbench.errors import InputError

BUILT_IN, OWN, FINEWEB = "built-in texts", "own files", "FineWeb-Edu (model hub)"
WORDS = {"all": 10**6, "auto": None}  # in place of a number


@dataclass
class More:
    """The fields of the section, in the order in which the fit takes their values."""

    top_k: Any = None
    ridge: Any = None
    anchors: Any = None
    hold_back: Any = None
    reread: Any = None
    native_layers: Any = None
    stride: Any = None
    objective: Any = None
    selection: Any = None
    features: Any = None
    rank: Any = None
    mlp: Any = None
    polish: Any = None
    text: Any = None
    files: Any = None

    def components(self) -> list[Any]:
        """All of them."""
        return [getattr(self, each.name) for each in fields(self)]


def more_options(public: bool) -> More:
    """Lays the section out, closed at first; a public page offers no text of one's own and nothing that takes long."""
    made = More()
    with gr.Accordion("More", open=False):
        with gr.Row():
            made.top_k = gr.Textbox(
                DEFAULTS["top_k"],
                label="Source layers a target layer",
                info="a number, all, or auto (chosen on held-out text)",
                max_lines=1,
            )
            made.ridge = gr.Textbox(
                DEFAULTS["ridge"], label="Ridge strength", info="a number, or auto", max_lines=1
            )
        with gr.Row():
            made.objective = gr.Dropdown(
                ["plain", "attention"],
                value=DEFAULTS["objective"],
                label="Objective",
                info="attention: errors count as the target notices them",
                interactive=True,
            )
            made.selection = gr.Dropdown(
                ["ranked", "greedy"],
                value=DEFAULTS["selection"],
                label="Choice of layers",
                interactive=True,
            )
            made.features = gr.Dropdown(
                [("separate", "own"), ("both", "both")],
                value=DEFAULTS["features"],
                label="Features",
                info="both: keys and values each from keys and values",
                interactive=True,
            )
        with gr.Row():
            made.rank = gr.Number(
                DEFAULTS["rank"],
                label="Rank",
                info="coordinates that all layers share; 0: a matrix each",
                precision=0,
                minimum=0,
                maximum=4096,
            )
            made.mlp = gr.Number(
                0,
                label="MLP width",
                info="needs a rank and both features; 0: none",
                precision=0,
                minimum=0,
                maximum=4096,
                visible=not public,
            )
            made.polish = gr.Number(
                0 if public else DEFAULTS["polish"],
                label="Steps of polishing",
                info="gradient descent on what the target predicts, afterwards; 0: none",
                precision=0,
                minimum=0,
                maximum=10_000,
                visible=not public,
            )
        made.stride = gr.Slider(1, 16, 1, step=1, label="Use every n-th token of a sequence")
        made.anchors = gr.Slider(
            0,
            64,
            4,
            step=1,
            label="Anchors",
            info="First tokens, left out of the fit and run natively later",
        )
        made.hold_back = gr.Slider(1, 256, 16, step=1, label="Hold-back")
        made.reread = gr.Slider(
            0,
            50,
            round(100 * DEFAULTS["reread"]),
            step=1,
            label="Re-read, % of the tokens",
            info="The rarest tokens, which a switch runs natively instead of mapping them; 0: none",
        )
        made.native_layers = gr.Number(
            DEFAULTS["native_layers"],
            label="Native layers",
            info="Lowest layers, which a switch runs natively instead of mapping them; 0: none",
            precision=0,
            minimum=0,
            maximum=1024,
        )
        made.text = gr.Radio(
            [BUILT_IN, OWN, FINEWEB],
            value=BUILT_IN,
            label="Calibration text",
            visible=not public,
        )
        made.files = gr.File(
            label="Own calibration text (.txt)",
            file_count="multiple",
            file_types=[".txt"],
            visible=not public,
        )
    return made


def number_or_word(text: Any, what: str, kind: type) -> Any:
    """A typed number, or what one of `WORDS` stands for.

    Raises:
        InputError: it is neither.
    """
    text = str(text).strip().lower()
    if text in WORDS:
        return WORDS[text]
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{what} must be a number, all or auto.") from None
