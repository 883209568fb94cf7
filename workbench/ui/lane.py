"""The one lane in which models compute: a bounded queue, first come first served, and fair among visitors.

Every turn has a round. A visitor's turn gets the round that is being served, or the one after the visitor's own
last one, whichever is later; the lowest round goes first, and inside a round whoever came first. So somebody
who asks again and again stands behind everybody who waits already, and nobody waits for ever: rounds only
grow. A long job steps aside between its parts (`Turn.step_aside`), so that a chat does not wait for a whole
measurement.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from workbench.errors import BusyError, Cancelled

POLL_SECONDS = 0.1


class Lane:
    """At most one turn at a time, at most `capacity` that wait."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._changed = threading.Condition()
        self._waiting: list[Turn] = []
        self._running: Turn | None = None
        self._round = 0
        self._rounds: dict[Hashable, int] = {}  # of each visitor's latest turn, as far as it still matters
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether somebody has the turn."""
        return self._running is not None

    @property
    def refusal(self) -> BusyError:
        """What somebody is told who cannot be let in."""
        return BusyError(f"{self.capacity} requests wait for the model already.", "Try again in a moment.")

    @contextmanager
    def turn(
        self, who: Hashable, should_stop: Callable[[], bool], tell: Callable[[int], None] | None = None
    ) -> Iterator[Turn]:
        """Waits for a turn and holds it.

        Args:
            who: the visitor, for fairness.
            should_stop: asked while waiting.
            tell: called with the place in the queue (1 is next) whenever it changes.

        Raises:
            BusyError: too many wait already; told at once.
            Cancelled: asked to stop while waiting.
        """
        turn = Turn(self, who, should_stop, tell)
        with self._changed:
            if len(self._waiting) >= self.capacity:
                raise self.refusal
            self._enqueue(turn)
        self._wait(turn)
        try:
            yield turn
        finally:
            self._leave(turn)

    def _enqueue(self, turn: Turn) -> None:
        """Puts a turn where it belongs; the condition is held."""
        turn.round = max(self._round, self._rounds.get(turn.who, -1) + 1)
        turn.number = next(self._numbers)
        self._rounds[turn.who] = turn.round
        self._waiting.append(turn)
        self._waiting.sort(key=lambda each: (each.round, each.number))

    def _wait(self, turn: Turn) -> None:
        told = 0
        with self._changed:
            try:
                while self._running is not None or self._waiting[0] is not turn:
                    place = self._waiting.index(turn) + 1
                    if place != told and turn.tell is not None:
                        turn.tell(place)
                        told = place
                    self._changed.wait(POLL_SECONDS)
                    if turn.should_stop():
                        raise Cancelled("Stopped before it began.")
            except BaseException:
                self._waiting.remove(turn)
                self._changed.notify_all()
                raise
            self._waiting.pop(0)
            self._running, self._round = turn, turn.round
            self._rounds = {who: last for who, last in self._rounds.items() if last >= self._round}

    def _leave(self, turn: Turn) -> None:
        with self._changed:
            if self._running is turn:
                self._running = None
            self._changed.notify_all()


class Turn:
    """A place in the queue, then in the lane."""

    def __init__(
        self,
        lane: Lane,
        who: Hashable,
        should_stop: Callable[[], bool],
        tell: Callable[[int], None] | None,
    ) -> None:
        self.who, self.should_stop, self.tell = who, should_stop, tell
        self.round = self.number = 0
        self._lane = lane

    def step_aside(self) -> float:
        """Lets everybody who waits by now go first; returns the seconds that took, 0 when nobody waits.

        Only between two steps, when nothing of this job is half done on a shared model. The queue's limit does
        not matter here: this job was let in before.

        Raises:
            Cancelled: asked to stop while waiting.
        """
        lane = self._lane
        with lane._changed:
            if not lane._waiting or lane._running is not self:
                return 0.0
            lane._running = None
            lane._enqueue(self)
            lane._changed.notify_all()
        started = time.monotonic()
        lane._wait(self)
        return time.monotonic() - started
