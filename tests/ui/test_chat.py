"""The chat's handlers on tiny models, called as the page calls them: one step at once, one in the lane."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pytest

from workbench.ui import chat as chat_module
from workbench.ui.chat import ChatTab
from workbench.ui.engine import Engine
from workbench.ui.settings import Settings

TO_LARGE, TO_SMALL = "Switch to the large model →", "← Switch to the small model"
GREEDY = (True, 0.7, 0.95, 12, 0, True, 4, 16, False)


@pytest.fixture
def tab(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> ChatTab:
    monkeypatch.setattr(chat_module, "DOUBLE_CLICK_SECONDS", 0.0)
    made = ChatTab(Engine(Settings(max_prompt_chars=20_000), tiny))
    with gr.Blocks():
        made.build(gr.State(None))
    return made


def run(tab: ChatTab, key: str, settings: tuple[Any, ...] = GREEDY) -> dict[Any, Any]:
    """The second step to its end and the third; all updates merged."""
    shown: dict[Any, Any] = {}
    for update in tab.run(key, *settings):
        shown.update(update)
    return shown | tab.end(key)


def say(tab: ChatTab, key: str | None, text: str) -> tuple[str, dict[Any, Any]]:
    first = tab.ask_send(key, text)
    return first[tab.key], {**first, **run(tab, first[tab.key])}


def texts(shown: dict[Any, Any], tab: ChatTab) -> list[str]:
    return [item["text"] for item in shown[tab.log]["items"] if "text" in item]


def test_chat_switch_chat(tab: ChatTab) -> None:
    key, shown = say(tab, None, "hello <b>lamp</b>")
    assert texts(shown, tab)[0] == "hello <b>lamp</b>"
    assert "native" in shown[tab.log]["items"][1]["head"] and "small" in shown[tab.log]["items"][1]["head"]
    tab.ask_switch(key, TO_LARGE, False)
    shown = run(tab, key)
    assert "mapped context" in shown[tab.account]
    assert shown[tab.switch]["value"] == TO_SMALL
    account = tab.engine.visits.get(key).chat.accounts[-1]
    assert account.how == "mapped" and account.mapped > 0
    assert f"<td>{account.mapped}</td>" in shown[tab.account]
    _, shown = say(tab, key, "and on")
    head = shown[tab.log]["items"][-1]["head"]
    assert "large" in head and "mapped context" in head
    tab.ask_switch(key, TO_SMALL, True)
    assert "true prefill" in run(tab, key)[tab.account]


def test_a_double_click_switches_once(tab: ChatTab) -> None:
    key, _ = say(tab, None, "hello")
    tab.ask_switch(key, TO_LARGE, False)
    assert "still at work" in tab.ask_switch(key, TO_LARGE, False)[tab.status]
    run(tab, key)
    assert set(run(tab, key)) == {tab.key}  # the second click finds nothing to do
    late = tab.ask_switch(key, TO_LARGE, False)
    assert tab.status not in late and set(run(tab, key)) == {tab.key}
    assert len(tab.engine.visits.get(key).chat.accounts) == 1


def test_measured_prefill_is_shown(tab: ChatTab) -> None:
    key, _ = say(tab, None, "hello there")
    tab.ask_switch(key, TO_LARGE, False)
    run(tab, key, (*GREEDY[:-1], True))
    visit = tab.engine.visits.get(key)
    assert visit.chat.accounts[-1].prefill_source == "measured"
    tab._asker("measure")(key)
    assert "Reading everything again took" in run(tab, key)[tab.account]


@pytest.mark.parametrize("text", ["", "   \n\t ", "x" * 20_001])
def test_bad_messages_add_no_turn(tab: ChatTab, text: str) -> None:
    key, _ = say(tab, None, "hello")
    before = list(tab.engine.visits.get(key).chat.messages)
    shown = tab.ask_send(key, text)
    assert "kv-warn" in shown[tab.status] and tab.text not in shown
    assert set(run(tab, key)) == {tab.key}
    assert tab.engine.visits.get(key).chat.messages == before
    assert len(texts(say(tab, key, "go on")[1], tab)) == 4


def test_beyond_the_context_is_told_and_given_back(tab: ChatTab) -> None:
    long = "the lamp is on the rock " * 800
    _, shown = say(tab, None, long)
    assert "tokens" in shown[tab.status] and shown[tab.text] == long
    assert texts(shown, tab) == []


def test_undo_retry_edit_clear(tab: ChatTab) -> None:
    key, first = say(tab, None, "hello")
    say(tab, key, "second")
    tab._asker("undo")(key)
    shown = run(tab, key)
    assert texts(shown, tab) == texts(first, tab) and shown[tab.text] == "second"
    tab._asker("retry")(key)
    assert texts(run(tab, key), tab) == texts(first, tab)  # greedy: the same again
    event = gr.EventData(target=None, _data={"act": "edit", "index": 0, "text": ""})
    assert tab.ask_act(key, event)[tab.text] == "hello"
    _, shown = say(tab, key, "hello lamp")
    assert texts(shown, tab)[0] == "hello lamp" and len(texts(shown, tab)) == 2
    tab._asker("clear")(key)
    assert texts(run(tab, key), tab) == []


def test_stop_ends_the_answer_and_the_next_message_works(tab: ChatTab) -> None:
    first = tab.ask_send(None, "hello")
    key = first[tab.key]
    long = (True, 0.7, 0.95, 1024, 0, True, 4, 16, False)
    updates = tab.run(key, *long)
    next(updates)
    assert "Stopping" in tab.ask_stop(key)
    for _ in updates:
        pass
    answer = tab.engine.visits.get(key).chat.messages[-1]
    assert answer.stopped and len(answer.token_ids) < 1000
    assert len(texts(say(tab, key, "go on")[1], tab)) == 4


def test_a_stop_while_waiting_in_the_queue(tab: ChatTab) -> None:
    key = tab.ask_send(None, "hello")[tab.key]
    tab.ask_stop(key)
    shown = run(tab, key)
    assert "Stopped" in shown[tab.status] and shown[tab.text] == "hello"


def test_an_error_is_one_sentence_and_the_page_goes_on(tab: ChatTab, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = say(tab, None, "hello")
    chat = tab.engine.visits.get(key).chat

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("/secret/path exploded <script>")

    monkeypatch.setattr(chat, "send", broken)
    shown = say(tab, key, "again")[1]
    assert "RuntimeError" in shown[tab.status] and "secret" not in shown[tab.status]
    monkeypatch.undo()
    assert len(texts(say(tab, key, "go on")[1], tab)) == 4


def test_two_visitors_never_meet(tab: ChatTab) -> None:
    one, _ = say(tab, None, "the secret word is lamp")
    two, shown = say(tab, None, "hello")
    assert one != two
    assert "secret" not in str(shown)
    assert "secret" in str(tab.everything(tab.engine.visits.get(one))[tab.log])


def test_a_forgotten_chat_is_told_and_the_next_message_works(tab: ChatTab) -> None:
    shown = tab.ask_send("no-such-key", "hello")
    assert "does not hold this chat" in shown[tab.status] and tab.log not in shown
    key, shown = say(tab, shown[tab.key], "hello")
    assert key != "no-such-key" and len(texts(shown, tab)) == 2


def test_caches_make_room_visibly(tab: ChatTab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = say(tab, None, "hello")
    monkeypatch.setattr(tab.engine, "settings", Settings(max_cache_mb=0))
    second, _ = say(tab, None, "hello")
    assert tab.engine.visits.get(first).chat.cache_bytes == 0
    assert tab.engine.visits.get(second).chat.cache_bytes > 0
    _, shown = say(tab, first, "go on")
    assert "freed this chat" in shown[tab.status] and len(texts(shown, tab)) == 4


def test_an_example_is_sent(tab: ChatTab) -> None:
    event = gr.EventData(target=None, _data={"act": "example", "text": "Why?"})
    key = tab.ask_act(None, event)[tab.key]
    assert texts(run(tab, key), tab)[0] == "Why?"


def test_an_error_outside_of_the_job_gives_the_buttons_and_the_text_back(
    tab: ChatTab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*values: Any) -> None:
        raise RuntimeError("secret words")

    with monkeypatch.context() as patch:
        patch.setattr(chat_module, "choices", broken)
        key, shown = say(tab, None, "hello")
    assert "went wrong" in shown[tab.status] and "secret" not in shown[tab.status]
    assert shown[tab.text] == "hello" and shown[tab.send]["interactive"] and not shown[tab.log]["busy"]
    _, shown = say(tab, key, "hello")
    assert len(texts(shown, tab)) == 2
