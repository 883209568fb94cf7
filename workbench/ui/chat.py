"""The Chat tab: a conversation that changes models, and the account of every change.

Every action takes three steps. The first runs at once, outside the queue: it checks, notes what was asked for
in the visitor's `Visit`, and shows that it was heard. The second waits for the models' turn, picks the note
up (once: a double click finds nothing), does the work in a job thread, and streams. All computing, undo and
clear included, happens in the second step, so a conversation is never touched by two threads. The third shows
how everything is now: for every component that an event names gradio builds a new one at each piece that is
streamed, so the second step names only what grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import gradio as gr

from workbench.errors import Cancelled, InputError
from workbench.ui import chat_view as view
from workbench.ui.chat_settings import chat_settings, choices
from workbench.ui.chat_work import carry_out
from workbench.ui.engine import Engine
from workbench.ui.export import chat_export
from workbench.ui.jobs import Done, StopFlag, run_job
from workbench.ui.markup import progress
from workbench.ui.measuring import MODEL, QUICK, visit_of
from workbench.ui.session import Request, Visit
from workbench.ui.theme import ASSETS, html

DOUBLE_CLICK_SECONDS = 0.8
LOG_TEMPLATE = (
    '<div class="kv-logbox"><div class="kv-log" role="log" aria-live="polite" aria-label="Conversation" '
    'tabindex="0"></div>'
    '<button type="button" class="kv-jump" hidden>↓ newest</button></div>'
)
STARTING = "Waiting for the model"


class ChatTab:
    """Handlers and layout. Components are attributes; handlers return dicts of the ones that change."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # --- layout ---

    def build(self, key: gr.State) -> None:
        """Lays the tab out inside the current `gr.Blocks` and wires its events."""
        self.key = key
        with gr.Row(equal_height=False):
            with gr.Column(scale=7, min_width=340):
                nobody = Visit(None)  # what a visitor will find, so that nothing moves when they arrive
                self.models = html(self._pair(nobody), elem_id="kv-models")
                self.log = html(
                    view.log_value(None, False, loads=self._loads(nobody)),
                    html_template=LOG_TEMPLATE,
                    js_on_load=(ASSETS / "chat_log.js").read_text(encoding="utf-8"),
                    elem_id="kv-chat",
                )
                self.meter = html("", elem_id="kv-context")
                self.status = html("", elem_id="kv-status")
                self.text = gr.Textbox(
                    placeholder="Write a message. Enter sends, Shift+Enter starts a new line.",
                    label="Message",
                    show_label=False,
                    lines=1,  # with one line, Enter sends
                    max_lines=8,
                    elem_id="kv-message",
                    html_attributes=gr.InputHTMLAttributes(enterkeyhint="send"),
                )
                with gr.Row(elem_classes="kv-actions"):
                    self.send = gr.Button("Send", variant="primary", scale=2, min_width=50, elem_id="kv-send")
                    self.stop = gr.Button(
                        "Stop",
                        interactive=False,
                        scale=1,
                        min_width=50,
                        elem_classes="kv-stop",
                        elem_id="kv-stop",
                    )
                    self.undo = gr.Button("Undo", scale=1, min_width=50, elem_id="kv-undo")
                    self.retry = gr.Button("Retry", scale=1, min_width=50, elem_id="kv-retry")
                    self.clear = gr.Button("Clear", scale=1, min_width=50, elem_id="kv-clear")
                self.switch = gr.Button(
                    view.switch_label("small"), elem_id="kv-switch", elem_classes="kv-switch kv-to-large"
                )
                chat_export(self.engine).build(key)
            with gr.Column(scale=5, min_width=320):
                self.account = html(view.account_panel(None), elem_id="kv-account")
                self.measure = gr.Button(
                    "Measure the true prefill now", interactive=False, elem_id="kv-measure"
                )
                self.settings = chat_settings(self.engine)
        self._wire()

    def _wire(self) -> None:
        settings = [self.key, *self.settings.components()]
        streamed = [self.key, self.log, self.status]
        heard = [
            *streamed,
            self.text,
            self.send,
            self.stop,
            self.undo,
            self.retry,
            self.clear,
            self.switch,
            self.measure,
        ]
        shown = [*heard, self.models, self.meter, self.account]
        api = {"api_visibility": self.engine.settings.api_visibility}

        def action(
            trigger: Callable[..., Any], ask: Callable[..., Any], inputs: list[Any], name: str
        ) -> None:
            first = trigger(ask, inputs, heard, api_name=f"ask_{name}", **QUICK, **api)
            second = first.then(self.run, settings, streamed, api_name=f"run_{name}", **MODEL, **api)
            second.then(self.end, [self.key], shown, api_name=f"end_{name}", **QUICK, **api)

        action(self.send.click, self.ask_send, [self.key, self.text], "send")
        action(self.text.submit, self.ask_send, [self.key, self.text], "submit")
        action(self.log.act, self.ask_act, [self.key], "act")
        action(
            self.switch.click, self.ask_switch, [self.key, self.switch, self.settings.true_prefill], "switch"
        )
        for button, kind in (
            (self.undo, "undo"),
            (self.retry, "retry"),
            (self.clear, "clear"),
            (self.measure, "measure"),
        ):
            action(button.click, self._asker(kind), [self.key], kind)
        self.stop.click(self.ask_stop, [self.key], [self.status], api_name="stop", **QUICK, **api)

    # --- first step: at once, no model ---

    def ask_send(self, key: str | None, text: str) -> dict[Any, Any]:
        """Notes a message to send, or an edited one."""
        old, (key, visit) = key, visit_of(self.engine, key)
        text = text or ""
        if old != key and visit.notice:  # told once, with what is on the screen left as it is
            return self._refuse(key, visit, "")
        if why := self._not_now(visit):
            return self._refuse(key, visit, why)
        if not text.strip():
            return self._refuse(key, visit, "The message is empty. Write something first.", "warn")
        limit = self.engine.settings.max_prompt_chars
        if len(text) > limit:
            return self._refuse(
                key,
                visit,
                f"The message has {len(text):,} characters; at most {limit:,} are accepted.",
                "warn",
            )
        kind = "send" if visit.editing is None else "edit"
        visit.pending = Request(kind, text=text, index=visit.editing if visit.editing is not None else -1)
        visit.editing = None
        shown = view.log_value(visit.chat, True, waiting=text)
        return {
            self.key: key,
            self.log: shown,
            self.text: "",
            self.status: progress(STARTING),
            **self._buttons(visit, True),
        }

    def ask_switch(self, key: str | None, label: str, true_prefill: bool) -> dict[Any, Any]:
        """Notes a switch to the side that the clicked button named."""
        key, visit = visit_of(self.engine, key)
        to = view.switch_target(str(label))
        side = visit.chat.side if visit.chat is not None else "small"
        again = time.monotonic() - visit.last_switch < DOUBLE_CLICK_SECONDS
        if why := self._not_now(visit):
            return self._refuse(key, visit, why)
        if again or to == side:
            return {self.key: key}
        visit.pending = Request("switch", to=to, how="prefill" if true_prefill else "mapped")
        return {
            self.key: key,
            self.status: progress(f"Switching to the {to} model"),
            **self._buttons(visit, True),
        }

    def ask_act(self, key: str | None, event: gr.EventData) -> dict[Any, Any]:
        """A click inside the conversation: an example to send, or a message to edit."""
        data = event._data or {}
        if data.get("act") == "example":
            return self.ask_send(key, str(data.get("text", "")))
        key, visit = visit_of(self.engine, key)
        index = data.get("index")
        messages = visit.chat.messages if visit.chat is not None else []
        if (
            visit.busy
            or data.get("act") != "edit"
            or not isinstance(index, int)
            or not 0 <= index < len(messages)
        ):
            return {self.key: key}
        visit.editing = index
        text = "Editing an earlier message: sending it drops what came after. Undo cancels the edit."
        return {
            self.key: key,
            self.text: messages[index].text,
            self.status: view.notice_view(text),
            self.send: gr.update(value="Send the edit"),
        }

    def _asker(self, kind: str) -> Callable[[str | None], dict[Any, Any]]:
        def ask(key: str | None) -> dict[Any, Any]:
            key, visit = visit_of(self.engine, key)
            if kind == "undo" and visit.editing is not None:
                visit.editing = None
                return {self.key: key, self.text: "", self.status: "", **self._buttons(visit, False)}
            if why := self._not_now(visit):
                return self._refuse(key, visit, why)
            if visit.chat is None:
                return self._refuse(key, visit, "There is nothing yet to do that with.")
            visit.pending = Request(kind)
            words = {
                "undo": "Taking back",
                "retry": "Answering again",
                "clear": "Clearing",
                "measure": "Running a true prefill",
            }
            return {self.key: key, self.status: progress(words[kind]), **self._buttons(visit, True)}

        ask.__name__ = f"ask_{kind}"
        return ask

    def ask_stop(self, key: str | None) -> str:
        """Raises the stop flag; the running step ends within a token and shows its own end."""
        _, visit = visit_of(self.engine, key)
        if visit.pending is None and not visit.busy:
            return ""
        visit.stop_all()
        return progress("Stopping")

    def _not_now(self, visit: Visit) -> str:
        """Why nothing new can be asked for, "" when it can; said at once, before anything on the page changes."""
        if visit.pending is not None or visit.busy:
            return "The model is still at work. Press Stop to end it first."
        return str(self.engine.lane.refusal) if self.engine.crowded() else ""

    # --- second step: in the models' lane ---

    def _noted(self, key: str | None) -> tuple[Visit, Request] | None:
        """Takes what the first step noted; None when there is nothing (any more), or another step is at work."""
        visit = self.engine.visits.get(key)
        if visit is None:
            return None
        with visit.lock:
            request, visit.pending = visit.pending, None
            if request is None or visit.busy:
                return None
            visit.running, visit.done = request, None
        return visit, request

    def run(
        self,
        key: str | None,
        greedy: bool,
        temperature: float,
        top_p: float,
        max_tokens: float,
        seed: float,
        recommended: bool,
        anchors: float,
        hold_back: float,
        measure_each: bool,
        incremental: bool = False,
        automatic: bool = False,
        threshold: float = 0.0,
    ) -> Generator[dict[Any, Any], None, None]:
        """Does what the first step noted, streaming; without a note it changes nothing."""
        noted = self._noted(key)
        if noted is None:
            # A generator that ends without a word would empty everything that it might have shown.
            yield {self.key: gr.skip()}
            return
        visit, request = noted
        try:
            chosen = choices(
                greedy, temperature, top_p, max_tokens, seed, recommended, anchors, hold_back, measure_each,
                incremental, automatic, threshold,
            )  # fmt: skip

            def work(post: Callable[[Any], None], stop: StopFlag) -> str | None:
                return carry_out(self.engine, visit, request, chosen, post, stop)

            with closing(run_job(work, request.stop)) as items:
                for item in items:
                    if item is None:
                        continue
                    if isinstance(item, Done):
                        yield self._ended(visit, request, item)
                    elif isinstance(item, tuple):
                        yield {self.status: progress(*item)}
                    else:
                        yield {self.log: view.log_value(visit.chat, True), self.status: ""}
        except Exception as error:  # outside of the job: the third step says so and the buttons come back
            yield self._ended(visit, request, Done(error=error))
        finally:
            visit.running = None

    def _ended(self, visit: Visit, request: Request, done: Done) -> dict[Any, Any]:
        """Leaves what came of a step to the third one."""
        visit.running, visit.done = None, (request, done)
        return {self.log: view.log_value(visit.chat, False, loads=self._loads(visit))}

    # --- third step: at once, no model ---

    def end(self, key: str | None) -> dict[Any, Any]:
        """The whole tab as it is after a step, or as it was before one that was not let in."""
        key, visit = visit_of(self.engine, key)
        with visit.lock:
            done, visit.done = visit.done, None
            if done is None and visit.pending is not None:  # gradio's own queue was full
                done, visit.pending = (visit.pending, Done(error=self.engine.lane.refusal)), None
        return {self.key: key} | (self._after(visit, *done) if done is not None else {})

    # --- what is shown ---

    def _after(self, visit: Visit, request: Request, done: Done) -> dict[Any, Any]:
        """The whole tab after a step, with one sentence when it failed."""
        told: Any = ""
        back: dict[Any, Any] = {}
        error = done.error
        if visit.notice:
            told, visit.notice = view.notice_view(visit.notice, "warn"), ""
        if isinstance(error, Cancelled):
            told = view.notice_view("Stopped.")
        elif error is not None:
            kind = "warn" if isinstance(error, InputError) else "error"
            told = view.notice_view(self.engine.sentence(error), kind)
        if request.stop.timed_out:
            told = view.notice_view(self.engine.time_is_up(), "warn")
        if isinstance(done.result, str):
            back = {self.text: done.result}
        if error is not None and request.kind in ("send", "edit"):
            back = {self.text: request.text}  # nothing that was written is lost
        return {**self.everything(visit), self.status: told, **back}

    def everything(self, visit: Visit) -> dict[Any, Any]:
        """All components as they are when nothing runs."""
        chat = visit.chat
        return {
            self.log: view.log_value(chat, False, loads=self._loads(visit)),
            self.models: self._pair(visit),
            self.account: view.tally_view(visit.tally) + view.account_panel(chat),
            self.meter: view.meter_view(chat),
            **self._buttons(visit, False),
        }

    def _pair(self, visit: Visit) -> str:
        """The two models, and whether their mappers are approved."""
        look = self.engine.look(visit)
        side = visit.chat.side if visit.chat is not None else "small"
        return view.models_view(look.names, look.details, side) + view.approval_view(self.engine, visit)

    def _loads(self, visit: Visit) -> str:
        look = self.engine.look(visit)
        if "small" in look.loaded:
            return "The small model is loaded, so the first message is answered at once."
        if look.ref.name == "embedded":
            return (
                "The first message loads the small model (0.4 GB of memory), the first switch the large one "
                "(0.5 GB). Where their weights are not on this machine yet, 93 MB are fetched once. "
                "Progress is shown."
            )
        return "The first message loads the small model, the first switch the large one, with progress."

    def _buttons(self, visit: Visit, busy: bool) -> dict[Any, Any]:
        chat = visit.chat
        side = chat.side if chat is not None else "small"
        can_measure = not busy and chat is not None and bool(chat.accounts) and chat.accounts[-1].tokens > 0
        some = chat is not None and bool(chat.messages)
        return {
            self.send: gr.update(interactive=not busy, value="Send"),
            self.stop: gr.update(interactive=busy),
            self.undo: gr.update(interactive=not busy and some),
            self.retry: gr.update(interactive=not busy and some),
            self.clear: gr.update(interactive=not busy and chat is not None),
            self.switch: gr.update(
                interactive=not busy,
                value=view.switch_label(side),
                elem_classes=["kv-switch", f"kv-to-{view.other(side)}"],
            ),
            self.measure: gr.update(interactive=can_measure),
        }

    def _refuse(self, key: str, visit: Visit, text: str, kind: str = "info") -> dict[Any, Any]:
        if visit.notice:
            text, kind, visit.notice = visit.notice, "warn", ""
        return {self.key: key, self.status: view.notice_view(text, kind)}
