"""Jobs stop when asked, when nobody listens, and while they wait; visits are separate and are freed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from workbench.ui import jobs, session
from workbench.ui.jobs import Done, StopFlag, run_job
from workbench.ui.session import Request, Visits


def test_a_job_streams_and_returns() -> None:
    def work(post: Any, stop: Any) -> int:
        post("half")
        return 7

    items = [item for item in run_job(work, StopFlag()) if item is not None]
    assert items[-1] == Done(7)


def test_an_error_arrives_whole() -> None:
    def work(post: Any, stop: Any) -> None:
        raise ValueError("broken")

    *_, last = run_job(work, StopFlag())
    assert isinstance(last.error, ValueError)


def test_closing_the_page_raises_the_flag() -> None:
    ended = threading.Event()

    def work(post: Any, stop: Any) -> None:
        while not stop():
            post("more")
            time.sleep(0.01)
        ended.set()

    running = run_job(work, StopFlag())
    assert next(running) == "more"
    running.close()
    assert ended.wait(2)


def test_nobody_listening_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ABANDONED_SECONDS", 0.05)
    flag = StopFlag()
    assert not flag()
    time.sleep(0.1)
    assert flag()


def test_a_job_past_its_time_ends_and_says_so() -> None:
    flag = StopFlag()
    assert not flag()
    flag.limit(0.05)
    flag.extend(0.05)
    assert not flag() and not flag.timed_out
    time.sleep(0.15)
    assert flag() and flag.timed_out
    pressed = StopFlag()
    pressed.set()
    pressed.limit(-1)
    assert pressed() and not pressed.timed_out


def test_keys_are_secret_and_visits_separate() -> None:
    visits = Visits(None, limit=3)
    first, second = visits.open("tab"), visits.open("tab-2")
    assert first != second and len(first) > 20
    assert visits.get(first) is not visits.get(second)
    assert visits.get("tab") is None and visits.get(None) is None


def test_the_oldest_idle_visit_makes_room() -> None:
    visits = Visits(None, limit=2)
    busy, idle = visits.open(), visits.open()
    visits.get(busy).running = Request("send")
    visits.open()
    assert visits.get(busy) is not None and visits.get(idle) is None


def test_a_closed_tab_stops_and_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "GRACE_SECONDS", 0.1)
    visits = Visits(None, limit=5)
    key = visits.open("tab")
    visit = visits.get(key)
    visit.running = Request("send")
    visits.tab_closed("tab")
    assert visit.running.stop()
    time.sleep(0.4)
    assert len(visits) == 0
