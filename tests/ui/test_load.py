"""The load script in small, on tiny models: nothing lost, nothing mixed up, nothing left running."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gradio import networking

from tests.load import soak
from tests.load.client import Visitor
from tests.load.load import cancels, crowd, sessions
from tests.ui.conftest import free_port
from workbench.ui import Settings, build, launch_options


@pytest.fixture(scope="module")
def small(tiny: Any, home: Path) -> Iterator[SimpleNamespace]:
    """The page on the tiny pair with a queue of ten."""
    settings = Settings(port=free_port(), queue_size=10)
    demo = build(settings, tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networking, "url_ok", lambda url: True)  # gives a busy machine three seconds only
        _, url, _ = demo.launch(prevent_thread_lock=True, **launch_options(settings))
    yield SimpleNamespace(url=url, engine=demo.engine)
    demo.close()


def test_sessions_at_once_equal_sessions_alone(small: Any) -> None:
    args = argparse.Namespace(turns=3, tokens=8, solo=2, levels=[3])
    found = sessions(small, args)
    assert found["ok"], found
    assert found["levels"]["3"]["compared"] == 2 and not found["levels"]["3"]["errors"]


def test_a_crowd_is_served_or_told(small: Any) -> None:
    found = crowd(small, argparse.Namespace(crowd=13, tokens=40, queue=10))
    assert found["ok"], found


def test_stops_and_drops_leave_the_others_exact(small: Any) -> None:
    found = cancels(small, argparse.Namespace(cancels=10, topics=2, tokens=8))
    assert found["exact"] == found["exact_of"] == 5 and found["dropped"] >= 3 and found["stopped"] == 1, found
    assert not found["errors"], found
    assert soak.canary(small.url) == soak.canary(small.url) != []
    assert not small.engine.lane.busy and not small.engine.lane.waiting


@pytest.mark.slow
def test_a_short_soak_keeps_its_canary(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(url=small.url, rss_mb=lambda: 1.0, handles=lambda: 9, tracebacks=lambda: 0)
    monkeypatch.setattr(soak, "MODES", {**soak.MODES, "bad": 5})
    found = soak.watch(process, minutes=0.1, people=2)
    assert found["ok"] and found["canary"]["tried"] >= 1 and sum(found["actions"].values()) > 2, found


def test_a_page_from_before_a_restart_is_told(tiny: Any, home: Path) -> None:
    """The server is gone in the middle of a chat, and another one answers at its address."""
    port, visitor = free_port(), None
    for start in range(2):
        settings = Settings(port=port)
        demo = build(settings, tiny)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(networking, "url_ok", lambda url: True)
            demo.launch(prevent_thread_lock=True, **launch_options(settings))
        try:
            visitor = visitor or Visitor(f"http://127.0.0.1:{port}/")
            visitor.say(f"message {start}")
            if start == 0:
                assert len(visitor.texts()) == 2
        finally:
            demo.close()
    assert "does not hold this chat any more" in visitor.status
    assert visitor.texts()[0] == "message 0"  # what is on the screen stays
