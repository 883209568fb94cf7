"""Saving what is on the screen: a row of buttons under a figure or a conversation.

Files are put together in the visitor's browser (see `assets/export.js`); the server only sends their content
as the answer to the click, so it keeps no file that another visitor could ask for.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from workbench.errors import WorkbenchError
from workbench.ui.engine import Engine
from workbench.ui.markup import esc
from workbench.ui.measuring import QUICK, results_folder, saved, visit_of
from workbench.ui.theme import ASSETS, html

FORMATS = {
    "html": ("HTML", "The figure as a page of its own that opens offline and can still be explored."),
    "svg": ("SVG", "The figure as a drawing that stays sharp at every size, for a paper."),
    "png": ("PNG", "The figure as a picture, for slides."),
    "csv": ("CSV", "The numbers of the figure, for a spreadsheet."),
    "json": ("JSON", "The whole result with its origin, for a program."),
    "md": ("Markdown", "The conversation and the accounts of its switches, as text."),
    "report": ("Report", "Everything saved for this pair and direction as one page that opens offline."),
}
FIGURE_FORMATS = ("html", "svg", "png", "csv", "json", "report")
MIMES = {"html": "text/html", "csv": "text/csv", "json": "application/json", "md": "text/markdown"}

Make = Callable[..., dict[str, Any]]


class Export:
    """A row of buttons. `make(key, *inputs, format=…)` returns what `assets/export.js` saves."""

    def __init__(self, engine: Engine, formats: Sequence[str], make: Make, label: str, name: str) -> None:
        self.engine, self.formats, self.make, self.label, self.name = engine, formats, make, label, name

    def build(self, key: gr.State, inputs: Sequence[Any] = ()) -> Any:
        """Lays the row out where it is called and wires it; returns the component."""
        row = html(
            None,
            html_template=template(self.formats, self.label),
            js_on_load=(ASSETS / "export.js").read_text(encoding="utf-8"),
            elem_id=f"kv-export-{self.name}",
        )
        api = {"api_visibility": self.engine.settings.api_visibility}
        row.take(self.take, [key, *inputs], [row], api_name=f"export_{self.name}", **QUICK, **api)
        return row

    def take(self, key: str | None, event: gr.EventData, *inputs: Any) -> dict[str, Any]:
        """What a click asks for; what comes from the page is checked."""
        wanted = str((event._data or {}).get("format", ""))
        if wanted not in self.formats:
            return said("There is no such format.")
        try:
            return {**self.make(key, *inputs, format=wanted), "at": time.time_ns()}
        except WorkbenchError as error:
            return said(self.engine.sentence(error))


def said(text: str) -> dict[str, Any]:
    """A sentence instead of a file."""
    return {"say": text, "at": time.time_ns()}


def template(formats: Sequence[str], label: str) -> str:
    """The row of buttons."""
    buttons = "".join(
        f'<button type="button" class="kv-link" data-format="{name}" title="{esc(FORMATS[name][1])}" '
        f'aria-label="{esc(label)} as {FORMATS[name][0]}">{FORMATS[name][0]}</button>'
        for name in formats
    )
    return (
        f'<div class="kv-export" role="group" aria-label="{esc(label)}"><span aria-hidden="true">{esc(label)}'
        f'</span>{buttons}<span class="kv-export-said" role="status"></span></div>'
    )


def figure_export(engine: Engine, kind: str) -> Export:
    """The row under a figure of a saved kind of result; `build` it with (direction) or (direction, metric)."""

    def make(key: str | None, direction: str, metric: str | None = None, *, format: str) -> dict[str, Any]:
        result, why = saved(engine, key, direction, kind)
        if result is None:
            return said(why)
        _, visit = visit_of(engine, key)
        if format == "report":
            return report_file(engine, visit, direction)
        return figure_file(result, kind, format, metric)

    return Export(engine, FIGURE_FORMATS, make, "Save this", kind)


def report_file(engine: Engine, visit: Any, direction: str) -> dict[str, Any]:
    """The report of a visitor's pair; what the visitor measured stands in place of what was precomputed."""
    from dataclasses import replace

    from workbench import report

    ref = engine.look(visit).ref
    run = report.gather(ref.name, ref.title, direction, results_folder(engine, visit, direction))
    own = {kind: r for (pair, way, kind), r in visit.results.items() if (pair, way) == (ref.name, direction)}
    text = report.render(replace(run, results={**run.results, **own}), library=report.MARKER)
    return {"name": f"{file_stem(run.pair, direction, 'report')}.html", "mime": MIMES["html"], "text": text,
            "plotly": True}  # fmt: skip


def figure_file(result: Any, kind: str, format: str, metric: str | None = None) -> dict[str, Any]:
    """A result in one format, as the browser saves it."""
    from workbench import plots, report
    from workbench.lab import tables

    origin = result.provenance
    stem = file_stem(origin.pair, origin.direction, kind, metric or "")
    if format == "json":
        text = json.dumps(result.to_json(), ensure_ascii=False, indent=1, allow_nan=False)
        return {"name": f"{stem}.json", "mime": MIMES["json"], "text": text}
    if format == "csv":
        return {"name": f"{stem}.csv", "mime": MIMES["csv"],
                "text": tables.csv_text(*tables.rows(result, metric))}  # fmt: skip
    options = {"metric": metric} if metric else {}
    figure = report.on_paper(plots.figure(result, **options))
    if format == "html":
        text = report.figure_page(figure, plots.describe(result, metric), result, report.MARKER)
        return {"name": f"{stem}.html", "mime": MIMES["html"], "text": text, "plotly": True}
    height = int(figure.layout.height or 450)
    return {"name": f"{stem}.{format}", "format": format, "figure": figure.to_json(), "width": 1000,
            "height": height}  # fmt: skip


def chat_export(engine: Engine) -> Export:
    """The row under the conversation: Markdown for people, JSON for programs."""

    def make(key: str | None, *, format: str) -> dict[str, Any]:
        _, visit = visit_of(engine, key)
        if visit.chat is None or not visit.chat.messages:
            return said("There is no conversation yet.")
        if visit.busy:
            return said("The model is still writing; wait until it has finished.")
        from workbench.chat.transcript import markdown

        data = visit.chat.to_json()
        text = markdown(data) if format == "md" else json.dumps(data, ensure_ascii=False, indent=1)
        return {"name": f"{file_stem(data['pair'], 'conversation')}.{format}", "mime": MIMES[format],
                "text": text}  # fmt: skip

    return Export(engine, ("md", "json"), make, "Save the conversation", "chat")


def file_stem(*parts: str) -> str:
    """A file name of plain characters."""
    return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part)).strip("-.")[:120] or "workbench"
