"""The Quality tab: how well the following text is predicted from a mapped cache, beside all controls."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import gradio as gr

from workbench.ui.engine import ARROWS, Engine
from workbench.ui.export import figure_export
from workbench.ui.markup import esc, notice, number, provenance, table, term
from workbench.ui.measuring import QUICK, measure, saved, wire_job
from workbench.ui.theme import html

GRID = [(4, 16), (0, 1), (4, 1), (4, 32)]


class QualityTab:
    """Handlers and layout of the evaluation."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def build(self, key: gr.State) -> Any:
        """Lays the tab out; returns the tab."""
        with gr.Tab("Quality", id="quality") as tab:
            html(
                '<div class="kv-intro"><p>What is lost by mapping? Every row predicts the same following '
                "text, from another context. "
                "A good score means little without its controls: if another document's mapped cache did as "
                "well, the mapping would carry nothing.</p></div>"
            )
            with gr.Row():
                self.direction = gr.Radio(
                    [(ARROWS["up"], "up"), (ARROWS["down"], "down")],
                    value="up",
                    label="Direction",
                    elem_id="kv-quality-direction",
                )
                self.passages = gr.Slider(
                    2,
                    48,
                    6,
                    step=1,
                    label="Passages to measure on",
                    info="256 tokens of context, 64 to predict",
                )
                self.grid = gr.Checkbox(
                    False,
                    label="Settings grid too",
                    info="Four settings of anchors and hold-back; takes about three times as long.",
                )
            with gr.Row():
                self.run = gr.Button("Measure here", scale=3, elem_id="kv-quality-run")
                self.stop = gr.Button(
                    "Stop", interactive=False, scale=1, elem_classes="kv-stop", elem_id="kv-quality-stop"
                )
            self.status = html("", elem_id="kv-quality-status")
            self.lead = html("", elem_id="kv-quality-lead")
            self.figure = gr.Plot(show_label=False, visible=False, elem_id="kv-quality-figure")
            self.origin = html("", elem_id="kv-quality-origin")
            figure_export(self.engine, "quality").build(key, [self.direction])
            self.arms = html("", elem_id="kv-quality-arms")
            self.settings = html("", elem_id="kv-quality-settings")
        api = {"api_visibility": self.engine.settings.api_visibility}
        shown = [self.lead, self.figure, self.origin, self.arms, self.settings, self.status]
        for event in (tab.select, self.direction.change):
            event(self.open, [key, self.direction], shown, api_name="open_quality", **QUICK, **api)
        wire_job(
            self.engine,
            key,
            self.run,
            self.stop,
            self.status,
            self.measure,
            [key, self.direction, self.passages, self.grid],
            shown,
            "measure_quality",
        )
        return tab

    def open(self, key: str | None, direction: str) -> dict[Any, Any]:
        """The saved evaluation of a direction."""
        result, why = saved(self.engine, key, direction, "quality")
        if result is None:
            empty = {
                self.lead: "",
                self.figure: gr.update(visible=False),
                self.origin: "",
                self.arms: "",
                self.settings: "",
            }
            return {**empty, self.status: notice(why)}
        return {**self.show(result), self.status: ""}

    def measure(
        self, key: str | None, direction: str, passages: float, grid: bool
    ) -> Generator[dict[Any, Any], None, None]:
        """Evaluates here, with progress."""

        def start(host: Any, should_stop: Any) -> Iterator[Any]:
            from workbench.lab.retention import stream

            return stream(
                host, direction, limit=int(passages), settings=GRID if grid else None, should_stop=should_stop
            )

        for status, result, finished in measure(self.engine, key, direction, "quality", start):
            if result is not None and finished:
                yield {**self.show(result), self.status: status}
            else:
                yield {self.status: status}

    def show(self, result: Any) -> dict[Any, Any]:
        """Figure, sentence, tables, origin."""
        from workbench import plots

        return {
            self.lead: lead(result),
            self.figure: gr.update(value=plots.quality(result), visible=True),
            self.origin: f'<p class="kv-sr">{esc(plots.describe(result))}</p>{provenance(result)}',
            self.arms: arms_view(result),
            self.settings: settings_view(result),
        }


def interval(figure: Any, digits: int = 3) -> str:
    """A mean with its 95 % interval."""
    value, low, high = (number(x, digits) for x in (figure.value, figure.low, figure.high))
    return f"{value} <span class='kv-note'>[{low}, {high}]</span>"


def lead(result: Any) -> str:
    """The main numbers in a sentence, the controls named."""
    main = result.settings[0]
    arms = result.arms()
    text = (
        f"With {main.anchors} anchors and {main.hold_back} tokens held back, the mapped cache keeps "
        f"<b>{main.gap_recovered.value:.0%}</b> of what the context is worth "
        f"({term('gap recovered')}); mean {term('KL')} to the target's own cache "
        f"<b>{number(arms['mapped'].kl.value)}</b>, same most likely token in "
        f"<b>{arms['mapped'].top1.value:.0%}</b>."
    )
    if "source" in arms:
        better = "better than" if arms["mapped"].kl.value < arms["source"].kl.value else "no better than"
        text += f" That is {better} staying with the source model (KL {number(arms['source'].kl.value)})."
    beaten = [
        name
        for name in ("wrong_document", "zero", "held_back_only")
        if name in arms and arms[name].kl.value <= arms["mapped"].kl.value
    ]
    if beaten:
        names = esc(", ".join(beaten).replace("_", " "))
        text += f" <b>A control does as well or better ({names}), so this is no evidence for the mapping.</b>"
    elif "wrong_document" in arms:
        text += f" The wrong document's cache, the control, has KL {number(arms['wrong_document'].kl.value)}."
    return f'<p class="kv-lead">{text}</p>'


def arms_view(result: Any) -> str:
    """Arms and controls at the main setting."""
    from workbench.lab.results import ARMS

    rows = [
        (
            f"<b>{esc(name.replace('_', ' '))}</b><br><span class='kv-note'>{esc(ARMS[name])}</span>",
            interval(arm.ce),
            interval(arm.kl),
            interval(arm.top1),
            number(arm.n),
        )
        for name, arm in result.arms().items()
    ]
    caption = (
        f"Mean and 95 % interval over {len(result.passages)} held-out passages; {result.context} tokens of "
        f"context, {result.following} to predict. Lower CE and KL are better."
    )
    return table(
        ["Context from", term("CE"), term("KL", "KL to native"), term("top-1"), "passages"], rows, caption
    )


def settings_view(result: Any) -> str:
    """The grid of anchors and hold-back, when more than one setting was measured."""
    if len(result.settings) < 2:
        return ""
    rows = [
        (
            f"{s.anchors} {'anchor' if s.anchors == 1 else 'anchors'}, {s.hold_back} held back",
            interval(s.arms["mapped"].kl),
            interval(s.arms["mapped"].top1),
            interval(s.gap_recovered),
        )
        for s in sorted(result.settings, key=lambda s: (s.anchors, s.hold_back))
    ]
    head = ["Setting", term("KL"), term("top-1"), term("gap recovered")]
    return table(head, rows, f"The mapped cache by {term('anchors')} and {term('hold-back')}")
