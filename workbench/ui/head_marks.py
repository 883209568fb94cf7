"""Marked heads of the Heads tab: buttons beside the open head, what repairing the marked ones would win, and doing it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from workbench.errors import WorkbenchError
from workbench.lab.results.restored import native_layers
from workbench.ui import head_work as work
from workbench.ui.head_view import kv_head, marks_view
from workbench.ui.markup import notice
from workbench.ui.measuring import QUICK, measure, visit_of, wire_job
from workbench.words import lowest

if TYPE_CHECKING:
    from workbench.ui.heads import HeadsTab


class HeadMarks:
    """Buttons and handlers; what they change on the screen belongs to the tab."""

    def __init__(self, tab: HeadsTab) -> None:
        self.tab, self.engine = tab, tab.engine

    def build(self) -> None:
        """Puts the buttons into the current row."""
        self.mark = gr.Button("Mark this head", elem_id="kv-heads-mark")
        self.mark_layer = gr.Button("Mark its layer")
        self.unmark = gr.Button("Clear marks")
        self.repair = gr.Button("What would repairing the marked win?", elem_id="kv-heads-repair")
        self.stop_repair = gr.Button("Stop", interactive=False, elem_classes="kv-stop")
        self.native = gr.Button("Run them natively", visible=False, elem_id="kv-heads-native")

    def wire(self, key: gr.State) -> None:
        """Wires the buttons, once the tab is laid out."""
        tab, api = self.tab, {"api_visibility": self.engine.settings.api_visibility}
        for button, what in ((self.mark, "head"), (self.mark_layer, "layer"), (self.unmark, "none")):
            button.click(
                self.marking(what), tab.choice, [tab.marks, tab.grid, tab.head, tab.status, self.native],
                api_name=f"mark_{what}", **QUICK, **api,
            )  # fmt: skip
        self.native.click(self.run_natively, tab.choice, tab.shown, api_name="native_layers", **QUICK, **api)
        wire_job(
            self.engine, key, self.repair, self.stop_repair, tab.status, self.restore,
            [key, tab.direction, tab.mapper, tab.texts, tab.other], [tab.marks, tab.status, self.native],
            "repair_heads",
        )  # fmt: skip

    def marking(self, what: str) -> Any:
        """The handler that marks the open head, its layer, or nothing at all."""

        def handle(
            key: str | None, direction: str, label: str, metric: str | None, other: str, view: str
        ) -> dict[Any, Any]:
            result, _ = work.result_of(self.engine, key, direction, label, "heads")
            patches, _ = work.result_of(self.engine, key, direction, label, "patch")
            result = work.with_patches(result, patches)
            if result is None or metric is None or metric not in result.metrics:
                return {self.tab.status: notice("There is no head to mark yet; measure first.")}
            pick = self.tab.chosen_head(key, result, metric) or result.worst(metric)
            marks, folder = work.marks_of(self.engine, key, direction, label)
            if what == "none":
                marks = marks.toggled(marks.heads)
            elif pick is not None:
                head = kv_head(result, metric, pick[1])
                these = range(result.kv_heads) if what == "layer" else [head]
                marks = marks.toggled([(pick[0], h) for h in these])
            problem = work.keep_marks(self.engine, key, direction, label, marks, folder)
            shown = self.tab.open(key, direction, label, metric, other, view)
            shown[self.tab.status] = notice(problem) if problem else ""
            parts = (self.tab.marks, self.tab.grid, self.tab.head, self.tab.status, self.native)
            return {part: shown[part] for part in parts}

        return handle

    def show(self, marks: Any, folder: Path, kv_heads: int) -> dict[Any, Any]:
        """What is marked, and the button that acts on it where the lowest layers are marked wholly or run natively."""
        now, marked = work.native_now(folder), native_layers(marks.heads, kv_heads)
        offered = marked not in (0, now)
        text = f"Run {lowest(marked)} natively" if offered else "Map all layers again"
        able = not self.engine.settings.public and bool(marks.mapper) and (offered or now > 0)
        return {
            self.tab.marks: marks_view(marks, kv_heads, now),
            self.native: gr.update(value=text, visible=able),
        }

    def run_natively(
        self, key: str | None, direction: str, label: str, metric: str | None, other: str, view: str
    ) -> dict[Any, Any]:
        """Saves the mapper with the wholly marked lowest layers native; with all mapped where they are so already."""
        tab, result = self.tab, work.result_of(self.engine, key, direction, label, "heads")[0]
        marks, folder = work.marks_of(self.engine, key, direction, label)
        marked = native_layers(marks.heads, result.kv_heads) if result is not None else 0
        layers = 0 if marked == work.native_now(folder) else marked
        try:
            label = work.run_natively(self.engine, key, direction, label, layers)
        except WorkbenchError as error:
            return {tab.status: notice(str(error), "warn")}
        done = f"runs {lowest(layers)} natively" if layers else "maps all layers again"
        return {
            **tab.open(key, direction, label, metric, other, view),
            tab.status: notice(f"Saved: from the next switch on the mapper {done}."),
        }

    def restore(
        self, key: str | None, direction: str, label: str, texts: float, refit: str
    ) -> Generator[dict[Any, Any], None, None]:
        """Measures what repairing the marked heads wins: true ones, and those of the second mapper if there is one."""
        _, visit = visit_of(self.engine, key)
        marks, folder = work.marks_of(self.engine, key, direction, label)
        if not marks.heads:
            yield {self.tab.status: notice("Mark a head or a layer first.")}
            return
        mine = None if label == work.IN_USE else folder
        other = work.mappers(self.engine, key, direction).get(refit)
        job = work.restore_job(direction, mine, marks.heads, int(texts), other)
        for status, result, finished in measure(self.engine, key, direction, "restored", job):
            if not (finished and result is not None):
                yield {self.tab.status: status}
                continue
            visit.results.pop((self.engine.look(visit).ref.name, direction, "restored"), None)
            marks = replace(marks, gain=result)
            problem = work.keep_marks(self.engine, key, direction, label, marks, folder)
            yield {
                **self.show(marks, folder, result.kv_heads),
                self.tab.status: notice(problem) if problem else status,
            }
