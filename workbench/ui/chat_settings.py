"""The settings beside the chat: automatic mode, how models are switched, how answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import gradio as gr

from workbench.ui import chat_view as view
from workbench.ui.chat_work import Choices
from workbench.ui.engine import Engine


@dataclass
class ChatSettings:
    """The fields, in the order in which `choices` takes their values; `true_prefill` is the switch button's own."""

    greedy: Any = None
    temperature: Any = None
    top_p: Any = None
    max_tokens: Any = None
    seed: Any = None
    recommended: Any = None
    anchors: Any = None
    hold_back: Any = None
    measure_each: Any = None
    incremental: Any = None
    automatic: Any = None
    threshold: Any = None
    true_prefill: Any = None

    def components(self) -> list[Any]:
        """All that a step takes."""
        return [getattr(self, each.name) for each in fields(self) if each.name != "true_prefill"]


def chat_settings(engine: Engine) -> ChatSettings:
    """Lays the three sections out, all closed at first."""
    made = ChatSettings()
    with gr.Accordion("Automatic mode", open=False):
        threshold, origin = view.threshold_of(engine)
        made.automatic = gr.Checkbox(
            False,
            label="Take over when the small model is unsure",
            info="The small model answers; above the threshold the large one answers instead, from the "
            "mapped context.",
            elem_id="kv-automatic",
        )
        made.threshold = gr.Slider(
            0.0,
            6.0,
            threshold,
            step=0.05,
            label="Threshold: mean entropy of the answer's tokens, in nats",
            info=origin,
        )
    with gr.Accordion("Handoff settings", open=False):
        made.true_prefill = gr.Checkbox(
            False,
            label="Switch by true prefill instead",
            info="The new model reads everything again, for comparison.",
        )
        made.measure_each = gr.Checkbox(
            False,
            label="Measure the true prefill after every switch",
            info="On a scratch cache; takes as long as the prefill takes.",
        )
        made.incremental = gr.Checkbox(
            False,
            label="Map every turn ahead",
            info="After each answer, if the other model is loaded: a switch then pays only for what is new.",
        )
        made.recommended = gr.Checkbox(True, label="Anchors and hold-back as the mapper recommends")
        made.anchors = gr.Slider(
            0,
            64,
            4,
            step=1,
            label="Anchors",
            info="First tokens that the new model runs itself. They carry much of the attention.",
        )
        made.hold_back = gr.Slider(
            1,
            256,
            16,
            step=1,
            label="Hold-back",
            info="Last tokens that the new model runs itself, on top of the mapped ones.",
        )
    with gr.Accordion("Sampling", open=False):
        made.greedy = gr.Checkbox(
            True, label="Greedy", info="Always the most likely token; the same words every time."
        )
        made.temperature = gr.Slider(0.1, 2.0, 0.7, step=0.05, label="Temperature")
        made.top_p = gr.Slider(0.05, 1.0, 0.95, step=0.05, label="Top-p")
        made.max_tokens = gr.Slider(8, 1024, 256, step=8, label="Longest answer, in tokens")
        made.seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**31 - 1)
    return made


def choices(
    greedy: bool,
    temperature: float,
    top_p: float,
    max_tokens: float,
    seed: float,
    recommended: bool,
    anchors: float,
    hold_back: float,
    measure_each: bool,
    incremental: bool,
    automatic: bool,
    threshold: float,
) -> Choices:
    """The values of the fields as what a step works by."""
    return Choices(
        sampling={
            "greedy": bool(greedy),
            "temperature": float(temperature),
            "top_p": float(top_p),
            "max_new_tokens": int(max_tokens),
            "seed": int(seed or 0),
        },
        anchors=None if recommended else int(anchors),
        hold_back=None if recommended else int(hold_back),
        measure_each=bool(measure_each),
        incremental=bool(incremental),
        automatic=bool(automatic),
        threshold=float(threshold),
    )
