"""Long work behind a streaming page: one worker thread, progress out, a stop flag in.

A gradio handler is a generator; closing it does not end a step that computes inside. So the step runs in a
thread of its own that holds the model lane, checks a flag at every token and layer, and posts what it has.
The handler only polls, so it can be closed at any time; closing it, or not polling for a while (the browser
is gone), raises the flag.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

POLL_SECONDS = 0.07
ABANDONED_SECONDS = 8.0


@dataclass(eq=False)
class StopFlag:
    """Asks one run to end. Also true when nobody has read its output for `ABANDONED_SECONDS`, and past a limit.

    Attributes:
        timed_out: the time limit ended the run, not a person.
    """

    event: threading.Event = field(default_factory=threading.Event)
    last_poll: float = field(default_factory=time.monotonic)
    timed_out: bool = False
    _deadline: float = math.inf

    def set(self) -> None:
        """Raises the flag."""
        self.event.set()

    def limit(self, seconds: float | None) -> None:
        """Starts the clock: the run ends after so many seconds from now, never for None."""
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds

    def extend(self, seconds: float) -> None:
        """Time that was spent waiting for others does not count."""
        self._deadline += seconds

    def __call__(self) -> bool:
        """Whether to stop: asked, out of time, or nobody reads any more."""
        now = time.monotonic()
        if now - self.last_poll > ABANDONED_SECONDS:
            self.event.set()
        if now > self._deadline and not self.event.is_set():
            self.timed_out = True
            self.event.set()
        return self.event.is_set()


@dataclass(frozen=True)
class Done:
    """Last item of `run_job`: what the work returned, or the error that it raised."""

    result: Any = None
    error: BaseException | None = None


def run_job(
    work: Callable[[Callable[[Any], None], StopFlag], Any], stop: StopFlag
) -> Generator[Any, None, None]:
    """Runs `work(post, should_stop)` in a thread; yields the newest posted item at each poll, `Done` last.

    Items that were posted between two polls are dropped but the newest: the page shows states, not a log.
    """
    posts: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def body() -> None:
        try:
            posts.put(Done(work(posts.put, stop)))
        except BaseException as error:  # handed over whole: the handler decides what a person sees
            posts.put(Done(error=error))

    stop.last_poll = time.monotonic()
    threading.Thread(target=body, name="workbench-job", daemon=True).start()
    try:
        while True:
            stop.last_poll = time.monotonic()
            try:
                item = posts.get(timeout=1.0)
            except queue.Empty:
                yield None  # a sign of life, so that a closed page is noticed
                continue
            while not isinstance(item, Done):
                try:
                    item = posts.get_nowait()
                except queue.Empty:
                    break
            yield item
            if isinstance(item, Done):
                return
            time.sleep(POLL_SECONDS)
    finally:
        stop.set()
