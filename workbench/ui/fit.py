"""The Fit tab: choose a pair, hear at once whether it can work, calibrate, and use it in the chat."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import gradio as gr

from workbench.errors import Cancelled, InputError, WorkbenchError
from workbench.ui.engine import Engine
from workbench.ui.fit_form import BUILT_IN, FINEWEB, OWN, more_options, number_or_word
from workbench.ui.fit_view import estimate_view, report_view, verdict_view
from workbench.ui.fit_work import fit_and_save
from workbench.ui.jobs import Done, StopFlag, run_job
from workbench.ui.markup import notice, progress, term
from workbench.ui.measuring import QUICK, direction_choice, run_and_stop, take_flag, visit_of, wire_job
from workbench.ui.theme import html
from workbench.words import ARROWS

TYPED = "(two models of my own)"


class FitTab:
    """Handlers and layout of calibration."""

    def __init__(self, engine: Engine, after_use: Any = None) -> None:
        self.engine = engine
        self.after_use = after_use

    def build(self, key: gr.State) -> Any:
        """Lays the tab out; returns the tab."""
        pairs = self._pairs()
        public = self.engine.settings.public
        with gr.Tab("Fit", id="fit") as tab:
            html(
                '<div class="kv-intro"><p>A mapper belongs to exactly one pair and one direction. Fitting '
                "one needs no training: both models read some text, "
                f"and a linear map is solved in closed form. Then the {term('gate')} is checked and the "
                "mapper is saved on this machine.</p></div>"
            )
            with gr.Row():
                with gr.Column(scale=6, min_width=320):
                    choices = [(ref.title, name) for name, ref in pairs.items()] + (
                        [] if public else [(TYPED, TYPED)]
                    )
                    self.pair = gr.Dropdown(
                        choices,
                        value=next(iter(pairs)),
                        label="Pair",
                        elem_id="kv-fit-pair",
                        interactive=True,
                    )
                    with gr.Row(visible=False) as self.own:
                        self.small = gr.Textbox(
                            label="Small model",
                            placeholder="owner/name@revision, a folder, or a GGUF file",
                            elem_id="kv-fit-small",
                        )
                        self.large = gr.Textbox(
                            label="Large model",
                            placeholder="owner/name@revision, a folder, or a GGUF file",
                            elem_id="kv-fit-large",
                        )
                    with gr.Row():
                        self.check = gr.Button("Check this pair", elem_id="kv-fit-check")
                    self.verdict = html("", elem_id="kv-fit-verdict")
                with gr.Column(scale=5, min_width=300):
                    self.direction = direction_choice("fit")
                    self.sequences = gr.Slider(
                        8,
                        256,
                        16 if not public else 8,
                        step=8,
                        label="Sequences of text",
                        elem_id="kv-fit-sequences",
                    )
                    self.length = gr.Slider(
                        64,
                        1024,
                        192 if public else 256,
                        step=64,
                        label="Tokens a sequence",
                        elem_id="kv-fit-length",
                    )
                    self.more = more_options(public)
            self.run, self.stop = run_and_stop("fit", "Fit a mapper", "primary")
            self.status = html("", elem_id="kv-fit-status")
            self.report = html("", elem_id="kv-fit-report")
            self.use = gr.Button("Use this pair in the chat", elem_id="kv-fit-use")
        api = {"api_visibility": self.engine.settings.api_visibility}
        chosen = [self.pair, self.small, self.large]
        tab.select(self.told, [*chosen], [self.verdict], api_name="open_fit", **QUICK, **api)
        self.pair.change(
            self.choose, chosen, [self.own, self.verdict], api_name="choose_pair", **QUICK, **api
        )
        self.check.click(
            self.told_fetching,
            [*chosen, self.direction, self.sequences, self.length, self.more.top_k],
            [self.verdict],
            api_name="check_pair",
            concurrency_limit=2,
            show_progress="minimal",
            **api,
        )
        options = [self.direction, self.sequences, self.length, *self.more.components()]
        wire_job(
            self.engine,
            key,
            self.run,
            self.stop,
            self.status,
            self.fit,
            [key, *chosen, *options],
            [self.status, self.report],
            "fit",
        )
        return tab

    def wire_use(self, key: gr.State, chat: Any, shown: list[Any]) -> None:
        """Lets "Use this pair" change the chat tab; called once both tabs exist."""
        self.chat = chat
        api = {"api_visibility": self.engine.settings.api_visibility}
        self.use.click(
            self.use_pair,
            [key, self.pair, self.small, self.large],
            [self.status, *shown],
            api_name="use_pair",
            **QUICK,
            **api,
        )

    def chosen(self, ref: Any) -> dict[Any, Any]:
        """The menu at the pair that an address names, where it can be chosen here."""
        return {self.pair: ref.name} if ref.name in self._pairs() else {}

    def _pairs(self) -> dict[str, Any]:
        from workbench.models.catalog import PAIRS

        start = self.engine.start_ref()
        found = {start.name: start}
        for name, ref in PAIRS.items():
            if not self.engine.settings.public or name == "embedded":
                found.setdefault(name, ref)
        return found

    def _ref(self, pair: str, small: str, large: str) -> Any:
        """The chosen pair.

        Raises:
            InputError: when it is not one that can be chosen.
        """
        from workbench.models.catalog import resolve

        if pair == TYPED and not self.engine.settings.public:
            if not (small or "").strip() or not (large or "").strip():
                raise InputError("Name both models: a hub id, a folder, or a GGUF file.")
            return resolve(None, small.strip(), large.strip())
        found = self._pairs().get(pair)
        if found is None:
            raise InputError("This pair cannot be chosen here.")
        return found

    def choose(self, pair: str, small: str, large: str) -> dict[Any, Any]:
        """A pair was chosen: shows the fields for typed models, or the verdict."""
        typed = pair == TYPED
        return {
            self.own: gr.update(visible=typed),
            self.verdict: "" if typed else self.told(pair, small, large),
        }

    def told(self, pair: str, small: str, large: str) -> str:
        """Compatibility from what is on this machine, without the network."""
        if pair == TYPED and not ((small or "").strip() and (large or "").strip()):
            return ""
        return self._verdict(pair, small, large, fetch=False)

    def told_fetching(
        self, pair: str, small: str, large: str, direction: str, sequences: float, length: float, top_k: str
    ) -> str:
        """Compatibility, fetching the two config files where needed, and what a fit would take."""
        from workbench.models.planner import plan_pair

        told = self._verdict(pair, small, large, fetch=True)
        try:
            ref = self._ref(pair, small, large)
            found = self._found(ref, fetch=True)
            if not found.compatible:
                return told
            layers = number_or_word(top_k, "The number of source layers", int)
            try:
                planned: Any = plan_pair(ref, top_k=layers)
            except WorkbenchError:
                planned = None  # models that are held in memory alone
            return told + estimate_view(found, planned, direction, int(sequences) * int(length), layers)
        except WorkbenchError as error:
            return told + notice(str(error), "warn")

    def _found(self, ref: Any, fetch: bool) -> Any:
        """The `Compatibility` of a pair; of models that are in memory, by what they are."""
        from workbench.models.catalog import Compatibility, pair_compatibility

        host = self.engine.start_host()
        if ref == host.pair and all(host.is_loaded(side) for side in ("small", "large")):
            return Compatibility(
                True, "", host.model("small").spec, host.model("large").spec, tokenizers=True
            )
        return pair_compatibility(ref, fetch=fetch)

    def _verdict(self, pair: str, small: str, large: str, fetch: bool) -> str:
        from workbench.models.catalog import has_artefact
        from workbench.models.presets import PRESETS

        try:
            ref = self._ref(pair, small, large)
            found = self._found(ref, fetch)
        except WorkbenchError as error:
            return notice(str(error), "warn")
        except Exception as error:
            return notice(self.engine.sentence(error), "error")
        have = [way for way in ("up", "down") if has_artefact(ref, way)]
        presets = [PRESETS.get(name.partition("@")[0]) for name in (ref.small, ref.large)]
        return verdict_view(found, have, [preset.licence for preset in presets if preset is not None], fetch)

    def fit(
        self,
        key: str | None,
        pair: str,
        small: str,
        large: str,
        direction: str,
        sequences: float,
        length: float,
        top_k: str,
        ridge: str,
        anchors: float,
        hold_back: float,
        reread: float,
        native_layers: float,
        stride: float,
        objective: str,
        selection: str,
        features: str,
        rank: float,
        mlp: float,
        polish: float,
        text: str,
        files: list[str] | None,
    ) -> Generator[dict[Any, Any], None, None]:
        """Loads, checks the gate, fits, saves; the page shows how far it is."""
        _, visit = visit_of(self.engine, key)
        settings = self.engine.settings
        if visit.job_stop is not None:
            yield {self.status: notice("A job of yours is running already. Stop it first.")}
            return
        tokens = int(sequences) * int(length)
        if settings.public and tokens > settings.max_public_fit_tokens:
            yield {
                self.status: notice(
                    f"On this public page a fit may read {settings.max_public_fit_tokens:,} tokens; "
                    f"this one asks for {tokens:,}.",
                    "warn",
                )
            }
            return
        stop = take_flag(visit)

        def work(post: Callable[[Any], None], should_stop: StopFlag) -> Any:
            from workbench.kv.options import FitOptions

            options = FitOptions(
                sequences=int(sequences),
                length=int(length),
                top_k=number_or_word(top_k, "The number of source layers", int),
                ridge=number_or_word(ridge, "The ridge strength", float),
                anchors=int(anchors),
                hold_back=int(hold_back),
                reread=float(reread) / 100,
                native_layers=int(native_layers or 0),
                stride=int(stride),
                objective=objective,
                selection=selection,
                features=features,
                rank=int(rank or 0),
                mlp=0 if settings.public else int(mlp or 0),
                polish=0 if settings.public else int(polish or 0),
            )
            own = [] if settings.public or text == BUILT_IN else list(files or [])
            if text == OWN and not own and not settings.public:
                raise InputError("No text was chosen.", "Add files under “More”, or use the built-in texts.")
            if text == FINEWEB and not settings.public:
                own = ["fineweb-edu"]
            ref = self._ref(pair, small, large)
            return fit_and_save(self.engine, ref, direction, options, own, post, should_stop)

        yield {self.status: progress("Waiting for the model"), self.report: ""}
        try:
            with closing(run_job(work, stop)) as items:
                for item in items:
                    if item is None:
                        continue
                    if not isinstance(item, Done):
                        yield {self.status: progress(item[0], item[1], 1.0)}
                    elif item.error is None:
                        host, gate, report = item.result
                        for kind in ("heads", "latency", "quality", "compare"):
                            visit.results.pop((host.pair.name, direction, kind), None)
                        done = "Fitted and checked, but not kept, as this page is public:"
                        done = done if settings.public else "Fitted, checked and saved for"
                        yield {
                            self.status: notice(f"{done} {host.pair.title}, {ARROWS[direction]}."),
                            self.report: report_view(gate, report),
                        }
                    elif isinstance(item.error, Cancelled):
                        yield {
                            self.status: notice(
                                "Stopped; what was saved before is untouched. The same fit goes on from "
                                "here next time."
                            )
                        }
                    else:
                        yield {
                            self.status: notice(
                                self.engine.sentence(item.error),
                                "warn" if isinstance(item.error, InputError) else "error",
                            )
                        }
        finally:
            visit.job_stop = None

    def use_pair(self, key: str | None, pair: str, small: str, large: str) -> dict[Any, Any]:
        """Gives the visitor's chat this pair; a running chat with another pair is cleared."""
        key, visit = visit_of(self.engine, key)
        if visit.busy or visit.pending is not None or visit.job_stop is not None:
            return {self.status: notice("Something of yours is still running; stop it first.")}
        try:
            host = self.engine.host_for(self._ref(pair, small, large))
        except WorkbenchError as error:
            return {self.status: notice(str(error), "warn")}
        if host is not visit.host:
            visit.host, visit.chat = host, None
        return {
            self.status: notice(f"The Chat tab now uses {host.pair.title}."),
            **self.chat.everything(visit),
        }
