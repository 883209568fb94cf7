"""Presentation mode: six steps in large type over the page, by keyboard, from the real results.

Opens with `?view=present`, with the button on the first screen, and closes with Escape. The live step runs a
short conversation with the loaded models; whatever goes wrong there, the recorded conversation plays instead
and says that it is one and why.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import gradio as gr

from workbench.lab.summary import Run, gather
from workbench.models.catalog import source_side, target_side
from workbench.ui import chat_view, links
from workbench.ui.engine import Engine
from workbench.ui.measuring import MODEL, QUICK, measure, results_folder, visit_of
from workbench.ui.replay import replay_value, script
from workbench.ui.slides import slides
from workbench.ui.theme import html

QUESTION = "Explain to a curious child why the sky is blue."
THEN = "And why is it red in the evening?"
LIVE_TOKENS = 60
TEMPLATE = (
    '<dialog class="kv-stage" tabindex="-1" aria-label="Presentation"><div class="kv-stage-slides"></div>'
    '<footer class="kv-stage-bar"><button type="button" class="kv-small-button" data-go="back" aria-label="Back">←'
    '</button><span class="kv-stage-step" role="status"></span><button type="button" class="kv-small-button" '
    'data-go="on" aria-label="On">→</button><span class="kv-stage-gap"></span><button type="button" '
    'class="kv-small-button" data-go="look">Light or dark</button><button type="button" class="kv-small-button" '
    'data-go="full">Full screen</button><button type="button" class="kv-small-button" data-go="close">Close</button>'
    "</footer></dialog>"
)


class Stage:
    """The presentation: one component with the slides, one that carries the live conversation."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def build(self, key: gr.State) -> None:
        """Lays both components out and wires the live step."""
        self.stage = html(
            None,
            html_template=TEMPLATE,
            js_on_load=script("player.js", "present.js"),
            elem_id="kv-present",
        )
        self.carrier = html(
            None,
            html_template='<span class="kv-carrier"></span>',
            js_on_load="watch('value', () => document.dispatchEvent("
            "new CustomEvent('kv-live', { detail: props.value })));",
            elem_id="kv-live-carrier",
        )
        api = {"api_visibility": self.engine.settings.api_visibility}
        self.stage.open(self.open, [key], [self.stage], api_name="open_stage", **QUICK, **api)
        self.stage.live(self.live, [key], [self.carrier], api_name="live_stage", **MODEL, **api)
        self.stage.halt(self.halt, [key], None, api_name="halt_stage", **QUICK, **api)

    def open(self, key: str | None, request: gr.Request | None = None) -> dict[str, Any]:
        """The slides, when the presentation is asked for."""
        _, visit = visit_of(self.engine, key)
        if key is None and request is not None:  # opened by its address, before the page has read the rest
            links.read(request.query_params, ()).choose(self.engine, visit)
        run, direction = self.run(visit)
        del direction
        loaded = len(self.engine.look(visit).loaded) == 2
        return {
            "slides": slides(run, loaded, QUESTION),
            "replay": replay_value(run.results.get("recording")),
        }

    def run(self, visit: Any) -> tuple[Run, str]:
        """The visitor's pair in the direction that has results, upwards first; own measurements included."""
        ref = self.engine.look(visit).ref
        runs = [
            gather(ref.name, ref.title, way, results_folder(self.engine, visit, way))
            for way in ("up", "down")
        ]
        best = runs[0] if runs[0].results or not runs[1].results else runs[1]
        best.results.update(
            {
                kind: result
                for (pair, way, kind), result in visit.results.items()
                if (pair, way) == (ref.name, best.direction) and kind != "live"
            }
        )
        return best, best.direction

    def live(self, key: str | None) -> Generator[dict[str, Any], None, None]:
        """A short conversation with a switch; the last item says whether it went well."""
        _, visit = visit_of(self.engine, key)
        _, direction = self.run(visit)

        def start(host: Any, should_stop: Callable[[], bool]) -> Iterator[Any]:
            return converse(host, direction, should_stop)

        went, told = False, ""
        for status, shot, finished in measure(self.engine, key, direction, "live", start):
            told = status or told
            if shot is not None:
                went = went or bool(finished)
                yield {**shot, "status": "" if finished else "live", "done": finished}
            elif not finished:
                yield {"status": status}
        visit.results.pop((self.engine.look(visit).ref.name, direction, "live"), None)
        if not went:
            yield {"failed": told or "The live switch could not be run."}

    def halt(self, key: str | None) -> None:
        """Stops a live conversation when the presentation is closed."""
        _, visit = visit_of(self.engine, key)
        if visit.job_stop is not None:
            visit.job_stop.set()


def converse(host: Any, direction: str, should_stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Two questions with a switch between them; yields what the log and the account show."""
    from workbench.chat.conversation import Conversation
    from workbench.chat.decode import CHAT_REPETITION_PENALTY, Sampling

    sampling = Sampling(max_new_tokens=LIVE_TOKENS, repetition_penalty=CHAT_REPETITION_PENALTY)
    chat = Conversation(host, sampling, side=source_side(direction))

    def shot(busy: bool = True) -> dict[str, Any]:
        account = chat_view.account_panel(chat) if chat.accounts else ""
        return {"items": chat_view.log_value(chat, busy)["items"], "account": account}

    for _ in chat.send(QUESTION, should_stop=should_stop):
        yield shot()
    chat.switch(target_side(direction), should_stop=should_stop)
    yield shot(busy=False)
    for _ in chat.send(THEN, should_stop=should_stop):
        yield shot()
    chat.measure_prefill()
    yield shot(busy=False)
