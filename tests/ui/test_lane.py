"""The lane: one at a time, bounded, fair, and nobody who waits is forgotten or lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import BusyError, Cancelled
from workbench.ui.lane import Lane


def never() -> bool:
    return False


class Crowd:
    """Threads that queue up in the order in which they are added, and note who is served when."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self.served, self.threads = lane, [], []
        self.places: dict[str, list[int]] = {}

    def add(self, who: str, should_stop: Any = never) -> threading.Thread:
        before = self.lane.waiting
        places = self.places.setdefault(who, [])

        def body() -> None:
            try:
                with self.lane.turn(who, should_stop, places.append):
                    self.served.append(who)
            except Cancelled:
                self.served.append(f"{who} left")

        thread = threading.Thread(target=body)
        self.threads.append(thread)
        thread.start()
        until = time.monotonic() + 5
        while self.lane.waiting == before and time.monotonic() < until:
            time.sleep(0.001)
        return thread

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        return self.served


def test_first_come_first_served_and_places_are_told() -> None:
    crowd = Crowd(Lane(8))
    with crowd.lane.turn("me", never):
        for who in "abc":
            crowd.add(who)
        assert crowd.lane.waiting == 3 and crowd.lane.busy
    assert crowd.join() == ["a", "b", "c"]
    assert crowd.places["c"][0] == 3 and crowd.places["c"] == sorted(crowd.places["c"], reverse=True)
    assert not crowd.lane.busy and not crowd.lane.waiting


def test_who_asks_again_and_again_stands_behind_those_who_wait() -> None:
    crowd = Crowd(Lane(8))
    with crowd.lane.turn("greedy", never):
        for who in ("greedy", "greedy", "a", "greedy", "b"):
            crowd.add(who)
    assert crowd.join() == ["a", "b", "greedy", "greedy", "greedy"]


def test_newcomers_do_not_overtake_for_ever() -> None:
    crowd = Crowd(Lane(8))
    with crowd.lane.turn("regular", never):
        crowd.add("regular")
        for who in ("new-1", "new-2"):
            crowd.add(who)
    assert crowd.join() == ["new-1", "new-2", "regular"]
    again = Crowd(crowd.lane)
    with again.lane.turn("other", never):
        again.add("regular")
        again.add("new-3")
    assert again.join()[-2:] in (["regular", "new-3"], ["new-3", "regular"])


def test_the_queue_is_bounded_and_says_so_at_once() -> None:
    crowd = Crowd(Lane(2))
    with crowd.lane.turn("me", never):
        crowd.add("a")
        crowd.add("b")
        started = time.monotonic()
        with pytest.raises(BusyError, match="2 requests wait"), crowd.lane.turn("c", never):
            pass
        assert time.monotonic() - started < 0.5
    assert crowd.join() == ["a", "b"]


def test_stopping_while_waiting_leaves_no_gap() -> None:
    crowd = Crowd(Lane(8))
    leave = threading.Event()
    with crowd.lane.turn("me", never):
        crowd.add("a", leave.is_set)
        crowd.add("b")
        leave.set()
        crowd.threads[0].join(5)
        assert crowd.lane.waiting == 1
    assert crowd.join() == ["a left", "b"]


def test_an_error_inside_frees_the_lane() -> None:
    lane = Lane(1)
    with pytest.raises(ValueError), lane.turn("me", never):
        raise ValueError
    with lane.turn("you", never):
        assert lane.busy


def test_a_long_job_steps_aside_also_when_the_queue_is_full() -> None:
    crowd = Crowd(Lane(1))
    with crowd.lane.turn("long", never) as turn:
        assert turn.step_aside() == 0.0  # nobody waits
        crowd.add("short")
        assert turn.step_aside() > 0.0
        assert crowd.served == ["short"] and crowd.lane.busy
    assert crowd.join() == ["short"]


def test_a_job_that_stepped_aside_can_be_stopped() -> None:
    lane = Lane(4)
    stop, release, entered = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        with lane.turn("other", never):
            entered.set()
            release.wait(5)

    thread = threading.Thread(target=other)
    with pytest.raises(Cancelled), lane.turn("long", stop.is_set) as turn:
        thread.start()
        while not lane.waiting:
            time.sleep(0.001)
        threading.Timer(0.05, stop.set).start()
        turn.step_aside()
    assert entered.is_set() and lane.busy and not lane.waiting  # the other one still has the lane
    release.set()
    thread.join(5)
    assert not lane.busy


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_nobody_is_served_twice_while_somebody_waits_for_a_first_turn(asked: list[str]) -> None:
    """The order of the queue alone, without threads: between two turns of one visitor everybody had one."""
    from workbench.ui.lane import Turn

    lane = Lane(20)
    for who in asked:
        lane._enqueue(Turn(lane, who, never, None))
    order = [turn.who for turn in lane._waiting]
    assert sorted(order) == sorted(asked)
    for who in set(asked):
        first = order.index(who)
        if order.count(who) > 1:
            second = order.index(who, first + 1)
            assert set(order[:second]) == set(asked)
