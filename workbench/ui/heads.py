"""The Heads tab: one number per layer and head, as a grid of buttons; a click opens the head.

The grid opens on the metric that foresees best what interventions find. Text, direction, mapper and metric can be
changed in place, a second mapper put beside the first or subtracted, heads marked, and their repair tried.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import gradio as gr

from workbench.ui import head_work as work
from workbench.ui.engine import Engine
from workbench.ui.export import figure_export
from workbench.ui.head_grid import difference_value, grid_value, scale_view
from workbench.ui.head_marks import HeadMarks
from workbench.ui.head_view import (
    head_view,
    kv_head,
    prediction_line,
    prediction_view,
    summary,
    tokens_view,
)
from workbench.ui.markup import esc, notice, provenance, term
from workbench.ui.measuring import QUICK, measure, visit_of, wire_job
from workbench.ui.theme import ASSETS, html
from workbench.words import ARROWS

GRID = '<div class="kv-gridbox"><div class="kv-grid" role="grid"></div></div>'
NONE = "no other mapper"
BESIDE, MINUS = "side by side", "difference"
FALLBACK = ("patch_estimate", "output_error", "cosine", "r2_k")  # to open on while nothing was patched


class HeadsTab:
    """Handlers and layout of the heatmaps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def build(self, key: gr.State) -> Any:
        """Lays the tab out; returns the tab."""
        from workbench.lab.results import METRICS

        choices = [(metric.title, name) for name, metric in METRICS.items()]
        with gr.Tab("Heads", id="heads") as tab:
            html(
                '<div class="kv-intro"><p>Which heads break it? One cell per layer and head of the target, on text '
                f"that is {term('held out')}. Choose a cell (arrow keys work, or the menu below) to open the head."
                "</p></div>"
            )
            with gr.Row(equal_height=True):
                self.direction = gr.Radio(
                    [(ARROWS["up"], "up"), (ARROWS["down"], "down")],
                    value="up",
                    label="Direction",
                    elem_id="kv-heads-direction",
                )
                self.mapper = gr.Dropdown(
                    [work.IN_USE], value=work.IN_USE, label="Mapper", allow_custom_value=True, min_width=240
                )
                self.metric = gr.Dropdown(choices, value=None, label="Metric", elem_id="kv-heads-metric")
            self._build_options()
            with gr.Row():
                self.run = gr.Button("Measure here", scale=3, elem_id="kv-heads-run")
                self.stop = gr.Button(
                    "Stop", interactive=False, scale=1, elem_classes="kv-stop", elem_id="kv-heads-stop"
                )
            self.status = html("", elem_id="kv-heads-status")
            self.meaning = html("", elem_id="kv-heads-meaning")
            self.grid, self.other_name = self._grid("kv-heads-grid"), html("")
            self.other_grid = self._grid("kv-heads-other")
            self.scale = html("")
            self.origin = html("", elem_id="kv-heads-origin")
            figure_export(self.engine, "heads").build(key, [self.direction, self.metric])
            self._build_head(key)
            self._build_prediction(key)
        self._wire(key, tab)
        return tab

    def _grid(self, name: str) -> Any:
        script = (ASSETS / "heads_grid.js").read_text(encoding="utf-8")
        return html(None, html_template=GRID, js_on_load=script, elem_id=name)

    def _build_options(self) -> None:
        """What to measure on, and the second mapper."""
        with gr.Accordion("Text, interventions and a second mapper", open=False, elem_id="kv-heads-options"):
            with gr.Row():
                self.text = gr.Dropdown(work.text_names(), value=work.EVERY_TEXT, label="Text to measure on")
                self.texts = gr.Slider(1, 24, 4, step=1, label="Passages", info="512 tokens each at most")
                self.patch = gr.Checkbox(
                    False,
                    label="Patch every head too",
                    info="Finds out what each one really costs; takes a minute or more.",
                    elem_id="kv-heads-patch",
                )
            self.own = gr.Textbox(
                label="My own text", lines=4, max_lines=12, visible=False, elem_id="kv-heads-own"
            )
            with gr.Row():
                self.other = gr.Dropdown([NONE], value=NONE, label="Compare with", allow_custom_value=True)
                self.view = gr.Radio([BESIDE, MINUS], value=BESIDE, label="Shown as")

    def _build_head(self, key: gr.State) -> None:
        """One head: a menu, all its numbers, its figures, its marks."""
        with gr.Row(equal_height=True):
            self.menu = gr.Dropdown(
                [],
                value=None,
                label="Open a head",
                allow_custom_value=True,
                min_width=220,
                elem_id="kv-heads-menu",
            )
            self.marking = HeadMarks(self)
            self.marking.build()
        self.marks = html("", elem_id="kv-heads-marks")
        self.head = html("", elem_id="kv-heads-panel")
        self.figures = [
            gr.Plot(show_label=True, label=label, visible=False, elem_id=f"kv-heads-{name}")
            for name, label in (
                ("keys", "Keys: error along the directions that the queries use"),
                ("values", "Values: error along the directions that the output projection uses"),
                ("positions", "Error by position"),
            )
        ]
        work.head_export(self.engine).build(key, [self.direction, self.mapper, self.menu])
        self.tokens = html("", elem_id="kv-heads-tokens")

    def _build_prediction(self, key: gr.State) -> None:
        """Does the map predict what happens?"""
        with gr.Accordion("Does the map predict what happens?", open=False, elem_id="kv-heads-predicts"):
            self.curve = gr.Plot(show_label=False, visible=False, elem_id="kv-heads-repair-curve")
            self.predicted = html("", elem_id="kv-heads-prediction")
            self.correlation = gr.Plot(show_label=False, visible=False, elem_id="kv-heads-correlation")
            self.patch_origin = html("")
            figure_export(self.engine, "patch").build(key, [self.direction])

    def _wire(self, key: gr.State, tab: Any) -> None:
        api = {"api_visibility": self.engine.settings.api_visibility}
        self.choice = [key, self.direction, self.mapper, self.metric, self.other, self.view]
        one = [self.head, *self.figures, self.tokens, self.menu]
        shown = self.shown = [
            self.mapper, self.metric, self.other, self.meaning, self.grid, self.other_name, self.other_grid,
            self.scale, self.origin, self.marks, self.curve, self.predicted, self.correlation, self.patch_origin,
            self.status, self.marking.native, *one,
        ]  # fmt: skip
        for event in (
            tab.select, self.direction.change, self.metric.change, self.mapper.input, self.other.input, self.view.input,
        ):  # fmt: skip
            event(self.open, self.choice, shown, api_name="open_heads", **QUICK, **api)
        for grid in (self.grid, self.other_grid):
            grid.cell(self.pick, self.choice, one, api_name="pick_head", **QUICK, **api)
        self.menu.input(self.choose, [*self.choice, self.menu], shown, api_name="choose_head", **QUICK, **api)
        self.text.change(
            lambda text: gr.update(visible=text == work.OWN_TEXT), [self.text], [self.own], **QUICK, **api
        )
        wire_job(
            self.engine, key, self.run, self.stop, self.status, self.measure,
            [*self.choice, self.text, self.own, self.texts, self.patch], shown, "measure_heads",
        )  # fmt: skip
        self.marking.wire(key)

    def open(
        self, key: str | None, direction: str, label: str, metric: str | None, other: str, view: str
    ) -> dict[Any, Any]:
        """The saved map of a metric."""
        found = work.mappers(self.engine, key, direction)
        label = label if label in found else work.IN_USE
        names = [NONE, *(name for name in found if name != label)]
        other = other if other in names else NONE
        menus = {
            self.mapper: gr.update(choices=list(found), value=label),
            self.other: gr.update(choices=names, value=other),
        }
        result, why = work.result_of(self.engine, key, direction, label, "heads")
        if result is None:
            return {**menus, **self.nothing(), self.status: notice(why)}
        return {**menus, **self.show(key, result, direction, label, metric, other, view), self.status: ""}

    def nothing(self) -> dict[Any, Any]:
        """An empty tab."""
        blank = (self.meaning, self.other_name, self.scale, self.origin, self.head, self.tokens, self.marks,
                 self.predicted, self.patch_origin)  # fmt: skip
        hidden = (*self.figures, self.curve, self.correlation, self.marking.native)
        return {
            **dict.fromkeys(blank, ""),
            **dict.fromkeys(hidden, gr.update(visible=False)),
            self.grid: None,
            self.other_grid: None,
            self.menu: gr.update(choices=[], value=None),
        }

    def measure(
        self,
        key: str | None,
        direction: str,
        label: str,
        metric: str | None,
        other: str,
        view: str,
        text: str,
        own: str | None,
        texts: float,
        patch: bool,
    ) -> Generator[dict[Any, Any], None, None]:
        """Measures all metrics here, with progress; of the second mapper too, where one is chosen."""
        _, visit = visit_of(self.engine, key)
        found = work.mappers(self.engine, key, direction)
        label = label if label in found else work.IN_USE
        own = (own or "")[: self.engine.settings.max_prompt_chars]  # None while the box is hidden
        for name in [label, other] if other in found and other != label else [label]:
            folder = None if name == work.IN_USE else found[name]
            job = work.maps_job(visit, direction, name, folder, (text, own, int(texts)), patch)
            kind = "heads" if name == work.IN_USE else f"heads of {name}"
            for status, result, finished in measure(self.engine, key, direction, kind, job):
                if not (finished and result is not None):
                    yield {self.status: status}
                    continue
                pair = self.engine.look(visit).ref.name
                visit.results.pop((pair, direction, kind), None)
                visit.results[work.place_of(pair, direction, "heads", name)] = result
                yield {**self.open(key, direction, label, metric, other, view), self.status: status}

    def show(
        self,
        key: str | None,
        result: Any,
        direction: str,
        label: str,
        metric: str | None,
        other: str,
        view: str,
    ) -> dict[Any, Any]:
        """Grid, scale, meaning, origin, prediction, and one head."""
        from workbench.lab.results import METRICS

        patches, _ = work.result_of(self.engine, key, direction, label, "patch")
        result = work.with_patches(result, patches)
        metric = metric if metric in METRICS else opening_metric(result, patches)
        predicted = self.show_prediction(patches)
        if metric not in result.metrics:
            text = f"{METRICS[metric].title} was not measured for this result; measure it here."
            return {**self.nothing(), **predicted, self.meaning: notice(text), self.metric: metric}
        kind = METRICS[metric]
        pick = self.chosen_head(key, result, metric) or result.worst(metric)
        marks, folder = work.marks_of(self.engine, key, direction, label)
        value = grid_value(result, metric, pick, marks.heads)
        second, name = None, ""
        if other != NONE:
            compared, why = work.result_of(self.engine, key, direction, other, "heads")
            if compared is None or metric not in compared.metrics or compared.layers != result.layers:
                name = notice(why or f"{kind.title} was not measured for {other}.")
            elif view == MINUS:
                value = difference_value(result, compared, metric, pick, marks.heads)
                name = (
                    f'<p class="kv-note">{esc(label)} against {esc(other)}: above 0 the first is better.</p>'
                )
            else:
                second = grid_value(compared, metric, pick)
                name = (
                    f'<p class="kv-lead">{esc(other)}: {summary(compared, metric)}</p>{provenance(compared)}'
                )
        return {
            self.metric: metric,
            self.meaning: f'<p class="kv-lead"><b>{esc(kind.title)}.</b> {esc(kind.meaning)}</p>'
            + prediction_line(patches, metric),
            self.grid: value,
            self.other_name: name,
            self.other_grid: second,
            self.scale: scale_view(kind, value.get("diverging", False)),
            self.origin: provenance(result) + f'<p class="kv-note">{summary(result, metric)}</p>',
            **self.marking.show(marks, folder, result.kv_heads),
            **predicted,
            **self.show_head(result, metric, pick, patches, marks),
        }

    def show_prediction(self, patches: Any) -> dict[Any, Any]:
        """Figures and table of the interventions."""
        if patches is None or patches.prediction is None:
            why = '<p class="kv-note">Nothing was patched yet for this mapper.</p>'
            hidden = gr.update(visible=False)
            return {self.curve: hidden, self.predicted: why, self.correlation: hidden, self.patch_origin: ""}
        from workbench import plots

        return {
            self.curve: gr.update(value=plots.repair(patches), visible=True),
            self.predicted: f'<p class="kv-sr">{esc(plots.describe(patches))}</p>{prediction_view(patches)}',
            self.correlation: gr.update(value=plots.correlation(patches), visible=True),
            self.patch_origin: provenance(patches),
        }

    def show_head(self, result: Any, metric: str, pick: Any, patches: Any, marks: Any) -> dict[Any, Any]:
        """One head: numbers, figures, tokens, and its place in the menu."""
        from workbench import plots

        hidden = gr.update(visible=False)
        if pick is None:
            return {self.head: "", self.tokens: "", **dict.fromkeys(self.figures, hidden)}
        layer, head = pick[0], kv_head(result, metric, pick[1])
        details, figures = result.details, dict.fromkeys(self.figures, hidden)
        if details is not None:
            drawn = [plots.directions(details, layer, head, kind) for kind in ("key", "value")]
            drawn.append(plots.positions(details, layer, head))
            figures = {
                place: gr.update(value=figure, visible=True)
                for place, figure in zip(self.figures, drawn, strict=True)
            }
        names = {where: name for name, where in work.head_names(result).items()}
        fitting = (
            patches if patches is not None and patches.provenance.mapper == result.provenance.mapper else None
        )
        return {
            self.head: head_view(result, metric, pick[0], pick[1], fitting, marks.heads),
            self.tokens: tokens_view(details, layer, head),
            **figures,
            self.menu: gr.update(choices=list(names.values()), value=names[layer, head]),
        }

    def chosen_head(self, key: str | None, result: Any, metric: str) -> tuple[int, int] | None:
        """The head that the address or the last click asked for, when there is such a head."""
        head = visit_of(self.engine, key)[1].head
        layers, heads = result.metrics[metric].shape
        return head if head is not None and head[0] < layers and head[1] < heads else None

    def pick(
        self,
        key: str | None,
        direction: str,
        label: str,
        metric: str | None,
        other: str,
        view: str,
        event: gr.EventData,
    ) -> dict[Any, Any]:
        """The panel of one head; what comes from the page is checked."""
        data = event._data or {}
        return self._open_head(key, direction, label, metric, (data.get("layer"), data.get("head")))

    def _open_head(
        self, key: str | None, direction: str, label: str, metric: str | None, wanted: tuple[Any, Any]
    ) -> dict[Any, Any]:
        result, why = work.result_of(self.engine, key, direction, label, "heads")
        patches, _ = work.result_of(self.engine, key, direction, label, "patch")
        result = work.with_patches(result, patches)
        layer, head = wanted
        if (
            result is None
            or metric is None
            or metric not in result.metrics
            or type(layer) is not int
            or type(head) is not int
        ):
            return {self.head: notice(why or "There is no such head.")}
        layers, heads = result.metrics[metric].shape
        if not (0 <= layer < layers and 0 <= head < heads):
            return {self.head: notice("There is no such head.")}
        visit_of(self.engine, key)[1].head = (layer, head)
        marks, _ = work.marks_of(self.engine, key, direction, label)
        return self.show_head(result, metric, (layer, head), patches, marks)

    def choose(
        self,
        key: str | None,
        direction: str,
        label: str,
        metric: str | None,
        other: str,
        view: str,
        name: str | None,
    ) -> dict[Any, Any]:
        """A head from the menu; the grid shows it too."""
        result, _ = work.result_of(self.engine, key, direction, label, "heads")
        if result is not None and metric is not None and name:
            names = work.head_names(result)
            if name in names:
                layer, head = names[name]
                per_query = kv_head(result, metric, 1) == 0 and metric in result.metrics
                group = result.query_heads // result.kv_heads if per_query else 1
                visit_of(self.engine, key)[1].head = (layer, head * group)
        return self.open(key, direction, label, metric, other, view)


def opening_metric(result: Any, patches: Any) -> str:
    """The metric that predicts best where that is known."""
    prediction = patches.prediction if patches is not None else None
    if prediction is not None and prediction.best_metric in result.metrics:
        return str(prediction.best_metric)
    return next((name for name in FALLBACK if name in result.metrics), next(iter(result.metrics)))
