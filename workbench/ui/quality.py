"""The Quality tab: how well the following text is predicted from a mapped cache, beside all controls."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import gradio as gr

from workbench.ui.engine import Engine
from workbench.ui.export import figure_export
from workbench.ui.markup import esc, notice, number, provenance, table, term
from workbench.ui.measuring import QUICK, measure, saved, wire_job
from workbench.ui.theme import html
from workbench.ui.variants import VariantsPart
from workbench.words import ARROWS

GRID = [(4, 16), (0, 1), (4, 1), (4, 32)]


class QualityTab:
    """Handlers and layout of the evaluation."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.variants = VariantsPart(engine)

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
                self.items = gr.Slider(
                    0,
                    300,
                    0,
                    step=4,
                    label="Items a task",
                    info="Five tasks, all controls. 0: likelihoods only.",
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
            self.task_lead = html("", elem_id="kv-quality-tasks-lead")
            self.task_figure = gr.Plot(show_label=False, visible=False, elem_id="kv-quality-tasks-figure")
            self.tasks = html("", elem_id="kv-quality-tasks")
            self.lead = html("", elem_id="kv-quality-lead")
            self.figure = gr.Plot(show_label=False, visible=False, elem_id="kv-quality-figure")
            self.origin = html("", elem_id="kv-quality-origin")
            figure_export(self.engine, "quality").build(key, [self.direction])
            self.arms = html("", elem_id="kv-quality-arms")
            self.settings = html("", elem_id="kv-quality-settings")
            self.drift_lead = html("", elem_id="kv-quality-drift-lead")
            self.drift_figure = gr.Plot(show_label=False, visible=False, elem_id="kv-quality-drift-figure")
            figure_export(self.engine, "drift").build(key, [self.direction])
            self.drift_table = html("", elem_id="kv-quality-drift")
            self.curve_lead = html("", elem_id="kv-quality-curve-lead")
            self.curve_figure = gr.Plot(show_label=False, visible=False, elem_id="kv-quality-curve-figure")
            figure_export(self.engine, "mappers").build(key, [self.direction])
            self.variants.build(key, self.direction)
        self.variants.wire(key, tab)
        api = {"api_visibility": self.engine.settings.api_visibility}
        shown = [
            self.task_lead, self.task_figure, self.tasks, self.lead, self.figure, self.origin, self.arms,
            self.settings, self.drift_lead, self.drift_figure, self.drift_table, self.curve_lead, self.curve_figure,
            self.status,
        ]  # fmt: skip
        for event in (tab.select, self.direction.change):
            event(self.open, [key, self.direction], shown, api_name="open_quality", **QUICK, **api)
        wire_job(
            self.engine,
            key,
            self.run,
            self.stop,
            self.status,
            self.measure,
            [key, self.direction, self.passages, self.grid, self.items],
            shown,
            "measure_quality",
        )
        return tab

    def open(self, key: str | None, direction: str) -> dict[Any, Any]:
        """The saved evaluation of a direction."""
        result, why = saved(self.engine, key, direction, "quality")
        if result is None:
            empty = {
                self.task_lead: "",
                self.task_figure: gr.update(visible=False),
                self.tasks: "",
                self.lead: "",
                self.figure: gr.update(visible=False),
                self.origin: "",
                self.arms: "",
                self.settings: "",
            }
            return {**empty, **self.beside(key, direction), self.status: notice(why)}
        return {**self.show(result), **self.beside(key, direction), self.status: ""}

    def beside(self, key: str | None, direction: str) -> dict[Any, Any]:
        """The saved drift and the saved comparison of mappers, where there are any."""
        from workbench import plots

        found: dict[Any, Any] = {}
        for kind, lead_at, figure_at in (
            ("drift", self.drift_lead, self.drift_figure),
            ("mappers", self.curve_lead, self.curve_figure),
        ):
            result, _ = saved(self.engine, key, direction, kind)
            if result is None:
                found |= {lead_at: "", figure_at: gr.update(visible=False)}
            else:
                title = (
                    "Changing models again and again"
                    if kind == "drift"
                    else "Anchors, hold-back and other mappers"
                )
                found |= {
                    lead_at: f'<h2 class="kv-section">{title}</h2><p class="kv-sr">{esc(plots.describe(result))}</p>'
                    f"{provenance(result)}",
                    figure_at: gr.update(value=plots.figure(result), visible=True),
                }
        result, _ = saved(self.engine, key, direction, "drift")
        found[self.drift_table] = "" if result is None else drift_view(result)
        return found

    def measure(
        self, key: str | None, direction: str, passages: float, grid: bool, items: float = 0
    ) -> Generator[dict[Any, Any], None, None]:
        """Evaluates here, with progress."""

        def start(host: Any, should_stop: Any) -> Iterator[Any]:
            return evaluation(host, direction, int(passages), GRID if grid else None, int(items), should_stop)

        for status, result, finished in measure(self.engine, key, direction, "quality", start):
            if result is not None and finished:
                yield {**self.show(result), self.status: status}
            else:
                yield {self.status: status}

    def show(self, result: Any) -> dict[Any, Any]:
        """Figure, sentence, tables, origin."""
        from workbench import plots

        scores = result.scores
        return {
            self.task_lead: task_lead(scores) if scores is not None else "",
            self.task_figure: gr.update(visible=False)
            if scores is None
            else gr.update(value=plots.tasks(scores), visible=True),
            self.tasks: tasks_view(scores) if scores is not None else "",
            self.lead: lead(result),
            self.figure: gr.update(value=plots.quality(result), visible=True),
            self.origin: f'<p class="kv-sr">{esc(plots.describe(result))}</p>{provenance(result)}',
            self.arms: arms_view(result),
            self.settings: settings_view(result),
        }


def evaluation(
    host: Any, direction: str, passages: int, settings: Any, items: int, should_stop: Any
) -> Iterator[Any]:
    """Likelihoods, then tasks where items are asked for; one `Evaluation` at the end."""
    from dataclasses import replace

    from workbench.lab import retention, scores
    from workbench.lab.results import Evaluation, Step, TaskScores

    share = 0.3 if items else 1.0
    found: Any = None
    item: Any
    for item in retention.stream(host, direction, limit=passages, settings=settings, should_stop=should_stop):
        if isinstance(item, Evaluation):
            found = item
        else:
            yield Step(share * item.fraction, item.text)
    if items and found is not None:
        main = found.settings[0]
        for item in scores.stream(
            host, direction, None, max(2, items), 0, main.anchors, main.hold_back, should_stop=should_stop
        ):
            if isinstance(item, TaskScores):
                found = replace(found, scores=item)
            else:
                yield Step(share + (1 - share) * item.fraction, item.text)
    yield found


def task_lead(scores: Any) -> str:
    """The worst task first, the source's own score beside it; the mean never alone."""
    from workbench.lab.results import TASKS

    if scores.worst is None:
        text = (
            "No task is informative here: the target does as well without the context, so nothing can be said about "
            "what mapping keeps."
        )
        return f'<h2 class="kv-section">Does it still do the task?</h2><p class="kv-lead">{text}</p>'
    worst = scores.tasks[scores.worst]
    arms = worst.arms
    text = (
        f"The worst task is <b>{esc(TASKS[scores.worst].title.lower())}</b>: on the mapped cache the target keeps "
        f"<b>{worst.retention.value:.0%}</b> of its accuracy ({arms['mapped'].accuracy.value:.0%} against "
        f"{arms['native'].accuracy.value:.0%}; the source alone {arms['source'].accuracy.value:.0%}, guessing "
        f"{worst.chance:.0%}). Over the {len(scores.informative)} tasks in which the context matters the mean is "
        f"<b>{scores.mean_retention:.0%}</b>."
    )
    return f'<h2 class="kv-section">Does it still do the task?</h2><p class="kv-lead">{text}</p>'


def tasks_view(scores: Any) -> str:
    """Accuracies with intervals, what is kept, and where mapped differs from an arm beyond chance."""
    from workbench.lab.results import ARMS, TASKS

    present = [arm for arm in ARMS if any(arm in task.arms for task in scores.tasks.values())]
    # What is kept stands first, and the source's own score with it: the controls may be scrolled to.
    arms = ["mapped", "native", "source", *(a for a in present if a not in ("mapped", "native", "source"))]
    rows = []
    for name, task in scores.tasks.items():
        note = "" if task.informative else "<br><b>uninformative</b>: the context does not matter"
        kind = TASKS.get(name)
        cells = []
        for arm in arms:
            if arm not in task.arms:
                cells.append("–")
                continue
            p = task.p_value.get(arm)
            mark = "" if p is None or p >= 0.05 else f"<br><span class='kv-note'>p {number(p)}</span>"
            cells.append(interval(task.arms[arm].accuracy, 2) + mark)
        rows.append(
            (
                f"<b>{esc(kind.title if kind else name)}</b><br><span class='kv-note'>"
                f"{esc(kind.asks if kind else '')}; {task.n} items</span>{note}",
                interval(task.retention, 2),
                number(task.retention_floor.value, 2),
                *cells[:3],
                number(task.chance, 2),
                *cells[3:],
                "–" if task.source_gap is None else interval(task.source_gap, 2),
            )
        )
    head = [
        "Task", term("retention"), term("retention floor"), "mapped", "native", "source", term("chance"),
        *(esc(arm.replace("_", " ")) for arm in arms[3:]), "gap to source",
    ]  # fmt: skip
    caption = (
        f"Accuracy with its 95 % interval, the same items for every arm; {scores.anchors} {term('anchors')}, "
        f"{scores.hold_back} held back. p: exact McNemar test against the mapped arm, where below .05. Gap to source: "
        "the share of what changing models wins that the mapped cache keeps."
    )
    absent = "".join(
        f"<li>{esc(arm.replace('_', ' '))}: {esc(why)}</li>" for arm, why in scores.absent.items()
    )
    return (
        table(head, rows, caption)
        + (f'<ul class="kv-note kv-facts">{absent}</ul>' if absent else "")
        + provenance(scores)
    )


def drift_view(result: Any) -> str:
    """The recommendation, and a row a handoff."""
    rows = [
        (
            f"{turn.n}, to {turn.side}",
            number(int(turn.tokens)),
            number(int(turn.new)),
            interval(turn.kl),
            number(turn.kl_once.value),
            number(turn.top1.value, 2),
            f"{number(turn.recall.value, 2)} / {number(turn.recall_never.value, 2)}",
        )
        for turn in result.turns
    ]
    head = [
        "Handoff", "context", term("mapped"), term("KL"), "KL of one switch", term("top-1"), "recall, mapped / never",
    ]  # fmt: skip
    caption = f"Means over {len(result.chats)} held-out conversations, against the same model reading everything itself."
    return f'<p class="kv-lead">{esc(result.sentence())}</p>{table(head, rows, caption)}'


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
