"""The page: six tabs around one engine. Building it imports no torch; models come when they are needed."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import gradio as gr
import huggingface_hub.constants

from workbench.ui import links
from workbench.ui.chat import ChatTab
from workbench.ui.engine import Engine
from workbench.ui.fit import FitTab
from workbench.ui.gallery import welcome
from workbench.ui.heads import HeadsTab
from workbench.ui.latency import LatencyTab
from workbench.ui.memory import give_back
from workbench.ui.present import Stage
from workbench.ui.quality import QualityTab
from workbench.ui.replay import replay, replay_value, script
from workbench.ui.session import Visit
from workbench.ui.settings import Settings
from workbench.ui.side_by_side import SideTab
from workbench.ui.theme import html

TITLE = "KV Handoff Workbench"
REMEMBER = """() => {
  // The open tab stands in the address, so that a link opens it again. The first one selects itself at start.
  const start = !window.kvStarted;
  window.kvStarted = true;
  if (start && !"NAME") return;
  const url = new URL(location.href);
  if ("NAME") url.searchParams.set("tab", "NAME"); else url.searchParams.delete("tab");
  history.replaceState(null, "", url);
}"""


def build(settings: Settings | None = None, host: Any = None) -> gr.Blocks:
    """The whole page.

    Args:
        settings: how it was started.
        host: a `PairHost` to use instead of the one that the settings name (tests).

    Returns:
        Blocks with the queue set up; launch with `workbench.ui.theme.launch_options(settings)`.
    """
    settings = settings or Settings()
    if settings.public:  # nor a token from a file, of somebody who logged in on this machine
        os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
        huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = True
    engine = Engine(settings, host)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as demo:
        key = gr.State(None)
        html(
            f'<header class="kv-top"><h1>{TITLE}</h1><p>Change the model in the middle of a conversation, '
            "without reading everything again – and see what that costs.</p>"
            '<button type="button" class="kv-small-button" data-present>Present</button></header>'
        )
        chat = ChatTab(engine)
        fit = FitTab(engine)
        stage = Stage(engine)

        def recording_of(visit: Visit) -> dict[str, Any] | None:
            return replay_value(stage.run(visit)[0].results.get("recording"))

        with gr.Tabs(elem_classes="kv-tabs") as tabs:
            with gr.Tab("Chat", id="chat") as first:
                html(welcome(), js_on_load=script("links.js", "welcome.js"), elem_id="kv-welcome")
                recorded = replay(recording_of(Visit(None)))
                chat.build(key)
            made = {"chat": first}
            measuring = {}
            for name, maker in (
                ("side", SideTab),
                ("heads", HeadsTab),
                ("latency", LatencyTab),
                ("quality", QualityTab),
            ):
                measuring[name] = maker(engine)
                made[name] = measuring[name].build(key)
            made["fit"] = fit.build(key)
        for name, tab in made.items():
            tab.select(None, None, None, js=REMEMBER.replace("NAME", "" if name == "chat" else name))
        shown = [
            chat.log,
            chat.models,
            chat.account,
            chat.meter,
            chat.send,
            chat.stop,
            chat.undo,
            chat.retry,
            chat.clear,
            chat.switch,
            chat.measure,
        ]
        fit.wire_use(key, chat, shown)
        stage.build(key)
        links.remember(measuring)

        def arrive(request: gr.Request) -> Generator[dict[Any, Any], None, None]:
            """A visitor's own key; then, while the page is already there, the heavy imports."""
            own = engine.visits.open(request.session_hash)
            visit = engine.visits.get(own)
            assert visit is not None
            link = links.read(request.query_params, tuple(made))
            link.choose(engine, visit)
            opened: dict[Any, Any] = {tabs: gr.Tabs(selected=link.tab)} if link.tab else {}
            if link.pair is not None:
                opened |= fit.chosen(link.pair)
            replayed = {recorded: recording_of(visit)}
            yield {key: own, **chat.everything(visit), **opened, **link.values(measuring), **replayed}
            engine.warm_up()

        def leave(request: gr.Request) -> None:
            engine.visits.tab_closed(request.session_hash)

        def forget(tab: str) -> None:
            """What gradio keeps of a session, a copy of every component (megabytes), goes with the tab."""
            demo.state_holder.session_data.pop(tab, None)
            demo.state_holder.time_last_used.pop(tab, None)
            give_back()

        engine.visits.on_gone = forget
        api = {"api_visibility": settings.api_visibility}
        demo.load(
            arrive,
            None,
            [key, tabs, recorded, fit.pair, *links.outputs(measuring), *shown],
            api_name="arrive",
            queue=True,
            show_progress="hidden",
            **api,
        )
        demo.unload(leave)
    demo.engine = engine
    # Behind the lane's own queue: events that gradio itself has no thread for yet.
    return demo.queue(max_size=4 * settings.queue_size, default_concurrency_limit=8, api_open=False)
