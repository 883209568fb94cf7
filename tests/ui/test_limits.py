"""Limits as a visitor meets them: the queue, the time of a job, what is logged, whose chat goes first."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from typing import Any

import gradio as gr
import pytest

from workbench.ui import jobs, session
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
    """The second step with the usual settings, and the third; what is not named here is off."""
    names = [name for name in inspect.signature(tab.run).parameters if name != "key"]
    yield from tab.run(key, **{name: (CHOSEN | changed).get(name, 0) for name in names})
    yield tab.end(key)


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
        told_other = tab.ask_send(None, "me too")
        assert (
            "1 requests wait" in told_other[tab.status] and tab.text not in told_other
        )  # it stays in the box
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


def test_who_asks_and_never_comes_back_keeps_no_caches(tiny: Any) -> None:
    """The first step of a message without its second: the limit for all caches holds all the same."""
    tab = made(tiny, max_cache_mb=0)
    key, _ = say(tab, None, "hello")
    tab.ask_send(key, "again")
    assert tab.engine.visits.get(key).chat.cache_bytes > 0
    say(tab, None, "hello")
    assert tab.engine.visits.get(key).chat.cache_bytes == 0
    shown = list(run(tab, key))  # and back after all
    assert "freed this chat" in shown[-1][tab.status] and len(shown[-1][tab.log]["items"]) == 4


def test_closed_tabs_are_freed_within_a_minute() -> None:
    assert session.GRACE_SECONDS + jobs.ABANDONED_SECONDS < 60


@pytest.mark.parametrize("how", ["stop", "time"])
def test_a_long_pass_ends_before_its_next_layer(tiny: Any, how: str) -> None:
    """A prefill of thousands of tokens is one pass of many seconds; nobody waits for its end."""
    tab = made(tiny, max_job_seconds=60)
    key, _ = say(tab, None, "hello there")
    tab.ask_switch(key, "Switch to the large model →", False)
    list(run(tab, key))
    visit, layers = tab.engine.visits.get(key), tiny.model("large").model.base_model.layers
    passed: list[int] = []

    def slow(number: int) -> Any:
        def body(*_: Any) -> None:
            passed.append(number)
            if how == "stop" and number == 1:
                visit.stop_all()
            elif number == 1:
                visit.running.stop.limit(0.0)
                time.sleep(0.01)

        return body

    hooks = [layer.register_forward_hook(slow(number)) for number, layer in enumerate(layers)]
    try:
        tab._asker("measure")(key)
        shown = list(run(tab, key))
    finally:
        for hook in hooks:
            hook.remove()
    assert passed == [0, 1] and len(layers) == 5
    assert ("Stopped." if how == "stop" else "one job may take") in shown[-1][tab.status]
    assert visit.chat.accounts[-1].prefill_ms is None
    assert not any(layer._forward_pre_hooks for layer in layers)
    _, shown = say(tab, key, "go on")
    assert len(shown[-1][tab.log]["items"]) == 5  # four messages and the switch


def test_a_stop_reaches_only_its_own_thread(tiny: Any) -> None:
    from workbench.errors import Cancelled
    from workbench.kv.cache import new_cache
    from workbench.kv.forward import forward

    model = tiny.model("small")
    ended: list[str] = []

    def other() -> None:
        forward(model.model, [1, 2, 3], new_cache(model.spec.layers))
        ended.append("other")

    with tiny.stopping_between_layers(lambda: True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        with pytest.raises(Cancelled):
            forward(model.model, [1, 2, 3], new_cache(model.spec.layers))
    assert ended == ["other"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
            "4096 bytes",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "2.00 GiB"),
        (MemoryError(), "not enough memory for this;"),
    ],
)
def test_too_little_memory_is_said_with_sizes(tiny: Any, error: Exception, words: str) -> None:
    told = Engine(Settings(), tiny).sentence(error)
    assert "not enough memory" in told and words in told and "Allocator" not in told


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


def test_a_message_that_was_turned_away_after_all_comes_back(tiny: Any) -> None:
    tab = made(tiny, queue_size=1)
    key = tab.ask_send(None, "hello")[tab.key]
    shown = tab.end(key)  # the step in between was not let in
    assert "1 requests wait" in shown[tab.status] and shown[tab.text] == "hello"
    _, updates = say(tab, key, "hello")
    assert len(updates[-1][tab.log]["items"]) == 2
