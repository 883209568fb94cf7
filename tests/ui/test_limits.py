"""Limits as a visitor meets them: the queue, the time of a job, what is logged, whose chat goes first."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from typing import Any

import gradio as gr
import pytest

from workbench.ui import session
from workbench.ui.chat import ChatTab
from workbench.ui.engine import Engine
from workbench.ui.session import Visits
from workbench.ui.settings import Settings


def made(tiny: Any, **settings: Any) -> ChatTab:
    tab = ChatTab(Engine(Settings(**settings), tiny))
    with gr.Blocks():
        tab.build(gr.State(None))
    return tab


CHOSEN = {
    "greedy": True, "temperature": 0.7, "top_p": 0.95, "max_tokens": 12, "recommended": True, "anchors": 4,
    "hold_back": 16,
}  # fmt: skip


def run(tab: ChatTab, key: str | None, **changed: Any) -> Any:
    """The second step with the usual settings; what is not named here is off."""
    names = [name for name in inspect.signature(tab.run).parameters if name != "key"]
    return tab.run(key, **{name: (CHOSEN | changed).get(name, 0) for name in names})


def say(tab: ChatTab, key: str | None, text: str, **changed: Any) -> tuple[str, list[Any]]:
    first = tab.ask_send(key, text)
    return first[tab.key], list(run(tab, first[tab.key], **changed))


def test_a_full_queue_is_told_at_once_and_the_text_comes_back(tiny: Any) -> None:
    tab = made(tiny, queue_size=1)
    leave = threading.Event()
    with tab.engine.lane.turn("somebody", leave.is_set):
        waiting = tab.ask_send(None, "me first")[tab.key]
        updates = run(tab, waiting)
        told = [next(updates)]
        while "number 1 in the queue" not in str(told[-1]):
            told.append(next(updates))
        started = time.monotonic()
        _, shown = say(tab, None, "me too")
        assert "1 requests wait" in shown[-1][tab.status] and shown[-1][tab.text] == "me too"
        assert time.monotonic() - started < 5
    rest = list(updates)
    assert len(rest[-1][tab.log]["items"]) == 2  # whoever waited is served


def test_a_job_that_takes_too_long_is_ended_and_says_so(tiny: Any) -> None:
    tab = made(tiny, max_job_seconds=0.3)
    key, shown = say(tab, None, "hello", max_tokens=1024)
    assert "one job may take 0 seconds here" in shown[-1][tab.status]
    answer = tab.engine.visits.get(key).chat.messages[-1]
    assert answer.stopped and len(answer.token_ids) < 1000
    assert not tab.engine.lane.busy


def test_public_jobs_have_a_limit_by_default() -> None:
    assert Settings().job_seconds is None
    assert Settings(public=True).job_seconds == 120
    assert Settings(public=True, max_job_seconds=5).job_seconds == 5


@pytest.mark.parametrize("debug", [False, True])
def test_the_log_names_the_place_and_words_only_when_asked(
    tiny: Any, caplog: pytest.LogCaptureFixture, debug: bool
) -> None:
    engine = Engine(Settings(debug=debug), tiny)
    words = f"the secret word is {'pmal'[::-1]}"  # tracebacks show lines of code, and this is one
    try:
        raise RuntimeError(words)
    except RuntimeError as error:
        with caplog.at_level(logging.INFO, "workbench.ui"):
            told = engine.sentence(error)
    assert "RuntimeError" in told and "lamp" not in told
    assert "test_limits.py" in caplog.text
    assert ("lamp" in caplog.text) is debug


def test_a_chat_leaves_no_words_in_the_log(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    tab = made(tiny)
    with caplog.at_level(logging.INFO):
        key, _ = say(tab, None, "the secret word is zanzibar")
        tab.ask_switch(key, "Switch to the large model →", False)
        list(run(tab, key))
        say(tab, key, "zanzibar " * 20_000)
    assert "zanzibar" not in caplog.text


def test_opening_pages_drives_nobodys_chat_away() -> None:
    visits = Visits(None, limit=3)
    chatting = visits.open("a")
    visits.get(chatting).chat = object()
    for number in range(20):
        visits.open(f"flood-{number}")
    assert visits.get(chatting) is not None and len(visits) == 3


def test_one_tab_with_two_visits_frees_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "GRACE_SECONDS", 0.05)
    visits = Visits(None, limit=5)
    keys = [visits.open("tab"), visits.open("tab"), visits.open("other")]
    visits.tab_closed("tab")
    visits.tab_closed(None)
    time.sleep(0.3)
    assert [visits.get(key) is not None for key in keys] == [False, False, True]


def test_visits_of_scripts_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = Visits(None, limit=50)
    script, tab = visits.open(), visits.open("tab")
    monkeypatch.setattr(session, "UNSEEN_SECONDS", -1.0)
    visits.open("another")
    assert visits.get(script) is None and visits.get(tab) is not None


def test_a_measurement_lets_chats_go_first(tiny: Any) -> None:
    """Between two steps of a long measurement a message is answered."""
    from workbench.ui.measuring import measure, visit_of

    tab = made(tiny)
    key, _ = visit_of(tab.engine, None)
    answered: list[bool] = []  # at each step: whether the message has its answer

    class Step:
        fraction, text, partial = 0.5, "step", None

    def start(host: Any, should_stop: Any) -> Any:
        for number in range(3):
            chats = [visit.chat for visit in tab.engine.visits.all() if visit.chat is not None]
            answered.append(any(chat.messages and chat.messages[-1].token_ids for chat in chats))
            if number == 0:
                threading.Thread(target=chat, daemon=True).start()
                until = time.monotonic() + 20
                while not tab.engine.lane.waiting and time.monotonic() < until:
                    time.sleep(0.01)
            yield Step()
        yield "result"

    def chat() -> None:
        say(tab, None, "hello")

    *_, last = measure(tab.engine, key, "up", "heads", start)
    assert last[1] == "result" and answered == [False, True, True]
