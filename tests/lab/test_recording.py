"""A recording has everything that was said at the time it was said, and survives its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ui.tiny import tiny_host
from workbench import report
from workbench.chat.conversation import Conversation
from workbench.chat.decode import Sampling
from workbench.lab import tables
from workbench.lab.provenance import load_result, save_result
from workbench.lab.recording import Recorder, _cut
from workbench.lab.results import Recording
from workbench.lab.summary import gather


class Clock:
    """Counts on by ten milliseconds a look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@pytest.fixture(scope="module")
def recorded() -> tuple[Recording, Any]:
    chat = Conversation(tiny_host(), Sampling(max_new_tokens=6))
    recorder = Recorder(Clock())
    recorder.said("hello lamp", chat.send("hello lamp"))
    recorder.switched(chat, chat.switch("large"))
    recorder.said("and on", chat.send("and on"))
    return recorder.recording(chat, "up", [{"say": "hello lamp"}]), chat


def test_nothing_is_lost(recorded: tuple[Recording, Any], tmp_path: Path) -> None:
    recording, chat = recorded
    answers = [message.text for message in chat.messages if message.role == "assistant"]
    assert [turn.text for turn in recording.turns if turn.say] == answers
    assert [turn.side for turn in recording.turns] == ["small", "large", "large"]
    assert recording.turns[2].account == chat.accounts[0].to_json() and len(recording.accounts) == 2
    assert recording.token_ids == tuple(chat.token_ids)
    again = load_result(save_result(recording, tmp_path / "recording.json"), "recording")
    assert again.turns == recording.turns and again.provenance.origin == "precomputed"


def test_times_grow_from_the_click_on(recorded: tuple[Recording, Any]) -> None:
    for turn in recorded[0].turns:
        times = [at for at, _ in turn.pieces]
        assert times == sorted(times) and all(at >= 10 for at in times)
    data = recorded[0].to_json()
    data["turns"][0]["pieces"] = [[20.0, "a"], [10.0, "b"]]
    with pytest.raises(ValueError, match="must grow"):
        Recording.from_json(data)


def test_text_that_was_taken_back_is_not_kept() -> None:
    assert _cut([(1.0, "abc"), (2.0, "def"), (3.0, "g")], 4) == [(1.0, "abc"), (2.0, "d")]


def test_it_stands_in_tables_and_reports(recorded: tuple[Recording, Any], tmp_path: Path) -> None:
    recording, _ = recorded
    head, rows = tables.rows(recording)
    assert head[-1] == "text" and len(rows) == sum(len(turn.pieces) for turn in recording.turns)
    save_result(recording, tmp_path / "recording.json")
    text = report.render(gather("tiny", "Tiny", "up", tmp_path), library=report.MARKER)
    assert "A recorded conversation" in text and "hello lamp" in text
