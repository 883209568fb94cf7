"""The Heads tab: one number per layer and head, as a grid of buttons; a click opens the head."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import gradio as gr

from workbench.ui.engine import ARROWS, Engine
from workbench.ui.export import figure_export
from workbench.ui.markup import esc, notice, number, provenance, table, term
from workbench.ui.measuring import QUICK, measure, saved, visit_of, wire_job
from workbench.ui.theme import ASSETS, html

GRID = '<div class="kv-gridbox"><div class="kv-grid" role="grid"></div></div>'


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
                '<div class="kv-intro"><p>Which heads survive the mapping? One cell per layer and head of '
                f"the target, on text that is {term('held out')}. "
                "Choose a cell (arrow keys work) to see all its numbers.</p></div>"
            )
            with gr.Row(equal_height=True):
                self.direction = gr.Radio(
                    [(ARROWS["up"], "up"), (ARROWS["down"], "down")],
                    value="up",
                    label="Direction",
                    elem_id="kv-heads-direction",
                )
                self.metric = gr.Dropdown(choices, value="r2_k", label="Metric", elem_id="kv-heads-metric")
                self.texts = gr.Slider(1, 24, 4, step=1, label="Texts to measure on", info="512 tokens each")
            with gr.Row():
                self.run = gr.Button("Measure here", scale=3, elem_id="kv-heads-run")
                self.stop = gr.Button(
                    "Stop", interactive=False, scale=1, elem_classes="kv-stop", elem_id="kv-heads-stop"
                )
            self.status = html("", elem_id="kv-heads-status")
            self.meaning = html("", elem_id="kv-heads-meaning")
            self.grid = html(
                None,
                html_template=GRID,
                js_on_load=(ASSETS / "heads_grid.js").read_text(encoding="utf-8"),
                elem_id="kv-heads-grid",
            )
            self.scale = html("")
            self.origin = html("", elem_id="kv-heads-origin")
            figure_export(self.engine, "heads").build(key, [self.direction, self.metric])
            self.head = html("", elem_id="kv-heads-panel")
        api = {"api_visibility": self.engine.settings.api_visibility}
        shown = [self.meaning, self.grid, self.scale, self.origin, self.head, self.status]
        for event in (tab.select, self.direction.change, self.metric.change):
            event(self.open, [key, self.direction, self.metric], shown, api_name="open_heads", **QUICK, **api)
        self.grid.cell(
            self.pick, [key, self.direction, self.metric], [self.head], api_name="pick_head", **QUICK, **api
        )
        wire_job(
            self.engine,
            key,
            self.run,
            self.stop,
            self.status,
            self.measure,
            [key, self.direction, self.metric, self.texts],
            shown,
            "measure_heads",
        )
        return tab

    def open(self, key: str | None, direction: str, metric: str) -> dict[Any, Any]:
        """The saved map of a metric."""
        result, why = saved(self.engine, key, direction, "heads")
        if result is None:
            return {
                self.meaning: "",
                self.grid: None,
                self.scale: "",
                self.origin: "",
                self.head: "",
                self.status: notice(why),
            }
        return {**self.show(key, result, direction, metric), self.status: ""}

    def measure(
        self, key: str | None, direction: str, metric: str, texts: float
    ) -> Generator[dict[Any, Any], None, None]:
        """Measures all metrics here, with progress."""

        def start(host: Any, should_stop: Any) -> Iterator[Any]:
            from workbench.lab.heads import stream

            return stream(host, direction, limit=int(texts), should_stop=should_stop)

        for status, result, finished in measure(self.engine, key, direction, "heads", start):
            if finished and result is not None:
                yield {**self.show(key, result, direction, metric), self.status: status}
            else:
                yield {self.status: status}

    def show(self, key: str | None, result: Any, direction: str, metric: str) -> dict[Any, Any]:
        """Grid, scale, meaning, origin, and the panel of the worst head."""
        from workbench.lab.results import METRICS

        if metric not in result.metrics:
            return {
                self.meaning: notice(
                    f"{METRICS[metric].title} was not measured for this result; measure it here."
                ),
                self.grid: None,
                self.head: "",
            }
        kind = METRICS[metric]
        pick = self._linked(key, result, metric) or result.worst(metric)
        return {
            self.meaning: f'<p class="kv-lead"><b>{esc(kind.title)}.</b> {esc(kind.meaning)}</p>',
            self.grid: grid_value(result, metric, pick),
            self.scale: scale_view(kind),
            self.origin: provenance(result) + f'<p class="kv-note">{summary(result, metric)}</p>',
            self.head: self._panel(key, result, direction, metric, pick),
        }

    def _linked(self, key: str | None, result: Any, metric: str) -> tuple[int, int] | None:
        """The head that the address asked for, when there is such a head."""
        head = visit_of(self.engine, key)[1].head
        layers, heads = result.metrics[metric].shape
        return head if head is not None and head[0] < layers and head[1] < heads else None

    def pick(self, key: str | None, direction: str, metric: str, event: gr.EventData) -> str:
        """The panel of one head; what comes from the page is checked."""
        from workbench.lab.results import METRICS

        result, why = saved(self.engine, key, direction, "heads")
        data = event._data or {}
        layer, head = data.get("layer"), data.get("head")
        if result is None or not isinstance(layer, int) or not isinstance(head, int):
            return notice(why or "There is no such head.")
        heads = result.kv_heads if METRICS[metric].per == "kv" else result.query_heads
        if not (0 <= layer < result.layers and 0 <= head < heads):
            return notice("There is no such head.")
        return self._panel(key, result, direction, metric, (layer, head))

    def _panel(
        self, key: str | None, result: Any, direction: str, metric: str, pick: tuple[int, int] | None
    ) -> str:
        if pick is None:
            return ""
        _, visit = visit_of(self.engine, key)
        return head_view(result, metric, *pick, source_layers(self.engine.host_of(visit), direction, pick[0]))


def source_layers(host: Any, direction: str, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Source layers that the mapper reads for a target layer: keys, values; None without a mapper."""
    import json

    try:
        manifest = json.loads((host.mapper_folder(direction) / "manifest.json").read_text(encoding="utf-8"))
        return tuple(manifest["key_layers"][layer]), tuple(manifest["value_layers"][layer])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def grid_value(result: Any, metric: str, pick: tuple[int, int] | None) -> dict[str, Any]:
    """What `assets/heads_grid.js` draws."""
    from workbench.lab.results import METRICS

    kind = METRICS[metric]
    values = [[None if math.isnan(x) else float(x) for x in row] for row in result.metrics[metric].tolist()]
    low, high = (2.0**kind.low, 2.0**kind.high) if kind.log else (kind.low, kind.high)
    return {
        "layers": result.layers,
        "heads": len(values[0]),
        "values": values,
        "low": low,
        "high": high,
        "log": kind.log,
        "reverse": kind.better == "low",
        "head_word": "KV head" if kind.per == "kv" else "query head",
        "label": f"{kind.title}, layers by heads",
        "pick": list(pick) if pick else None,
    }


def scale_view(kind: Any) -> str:
    """The colour scale: bright is good, on a fixed range."""
    low, high = (2.0**kind.low, 2.0**kind.high) if kind.log else (kind.low, kind.high)
    worst, best = (low, high) if kind.better == "high" else (high, low)
    return (
        f'<div class="kv-scale"><span>{worst:g}</span><i aria-hidden="true"></i>'
        f"<span>{best:g} {esc(kind.unit)}</span><span>bright is better</span></div>"
    )


def summary(result: Any, metric: str) -> str:
    """The grid in one sentence."""
    import numpy as np

    from workbench.lab.results import METRICS

    kind = METRICS[metric]
    values = result.metrics[metric]
    if np.isnan(values).all():
        return "No head could be measured."
    worst = result.worst(metric)
    by_layer = np.nanmean(values, axis=1)
    at = int(np.nanargmin(by_layer) if kind.better == "high" else np.nanargmax(by_layer))
    return (
        f"Mean over all heads {number(float(np.nanmean(values)))}; weakest head: layer {worst[0]}, head "
        f"{worst[1]} "
        f"({number(float(values[worst]))}); weakest layer on average: {at} ({number(float(by_layer[at]))}). "
        f"{number(result.tokens)} tokens, {number(result.features)} parameters per output; the first "
        f"{result.anchors} tokens of each text are run natively and left out."
    )


def head_view(result: Any, metric: str, layer: int, head: int, sources: Any) -> str:
    """All numbers of one head, and where its keys and values come from."""
    from workbench.lab.results import METRICS

    group = result.query_heads // result.kv_heads
    per = METRICS[metric].per
    kv = head if per == "kv" else head // group
    queries = range(kv * group, (kv + 1) * group)
    rows = []
    for name, kind in METRICS.items():
        if name not in result.metrics:
            continue
        values = result.metrics[name][layer]
        if kind.per == "kv":
            shown = number(float(values[kv]))
        else:
            cells = {q: number(float(values[q])) for q in queries}
            if per == "query":
                cells[head] = f"<b>{cells[head]}</b>"
            shown = " &nbsp; ".join(cells.values())
        rows.append((esc(kind.title), shown, f"{number(float(_mean(result.metrics[name][layer])))}"))
    title = f"Layer {layer}, KV head {kv}"
    which = f" (query head{'s' if group > 1 else ''} {queries[0]}{f'–{queries[-1]}' if group > 1 else ''})"
    source = ""
    if sources is not None:
        keys, values = (", ".join(map(str, sorted(each))) for each in sources)
        source = (
            f'<p class="kv-note">Mapped from source layers {esc(keys)} (keys) and {esc(values)} (values).</p>'
        )
    body = table(["Metric", "this head", "mean of the layer"], rows)
    return (
        f'<section class="kv-panel" aria-live="polite" aria-label="One head">'
        f'<h2>{title}<span class="kv-note">{which}</span></h2>{body}{source}</section>'
    )


def _mean(values: Any) -> float:
    import numpy as np

    return math.nan if np.isnan(values).all() else float(np.nanmean(values))
