"""One visitor, one `Visit`. The key is made by the server and lives in `gr.State`, never in the page.

Gradio's own session hash is chosen by the browser, so it only serves to notice that a tab was closed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workbench.ui.jobs import StopFlag

GRACE_SECONDS = 30.0
FRESH_SECONDS = 5.0  # between the two steps of a click
UNSEEN_SECONDS = 3_600.0  # an unused visit without a tab (a script's) is then forgotten


@dataclass(frozen=True)
class Request:
    """What a click asked for; picked up once by the model step that follows it."""

    kind: str
    text: str = ""
    index: int = -1
    to: str = ""
    how: str = "mapped"
    stop: StopFlag = field(default_factory=StopFlag)
    asked: float = field(default_factory=time.monotonic)

    @property
    def fresh(self) -> bool:
        """Whether its model step is still to be expected: a page that went away in between never sends it."""
        return time.monotonic() - self.asked < FRESH_SECONDS


@dataclass(eq=False)
class Visit:
    """Everything of one visitor. Fields are only touched by that visitor's events."""

    host: Any
    tab: str | None = None  # the browser tab's routing number, to notice that it was closed
    chat: Any = None
    tally: Any = None  # of the automatic mode, from its first message on
    pending: Request | None = None
    running: Request | None = None
    done: tuple[Request, Any] | None = (
        None  # the step that ended last and its `Done`, until the page has shown it
    )
    job_asked: StopFlag | None = None  # pressed, and waiting for its turn
    job_stop: StopFlag | None = None  # running
    editing: int | None = None
    notice: str = ""
    last_switch: float = 0.0
    used: float = field(default_factory=time.monotonic)
    results: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    wanted: Any = None  # the pair that the address asked for, until its host is made
    head: tuple[int, int] | None = None  # the layer and head that the address asked for
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stop_all(self) -> None:
        """Raises the stop flag of whatever this visitor has running or waiting."""
        for request in (self.pending, self.running):
            if request is not None:
                request.stop.set()
        for flag in (self.job_asked, self.job_stop):
            if flag is not None:
                flag.set()

    @property
    def busy(self) -> bool:
        """Whether a chat step of this visitor runs."""
        return self.running is not None


class Visits:
    """The chats of all visitors, by secret key; the longest unused idle one goes when there are too many.

    Visits in which nothing was said go first, so that opening pages alone drives nobody's chat away.
    """

    def __init__(self, default_host: Any, limit: int) -> None:
        self.on_gone: Callable[[str], None] = lambda tab: (
            None
        )  # called with a closed tab that will not come back
        self._default_host = default_host
        self._limit = limit
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, tab: str | None = None) -> str:
        """Makes a visit and returns its secret key."""
        key = secrets.token_urlsafe(24)
        with self._lock:
            self._visits[key] = Visit(self._default_host, tab)
            unseen = time.monotonic() - UNSEEN_SECONDS
            for old, visit in list(self._visits.items()):
                if visit.tab is None and visit.used < unseen and not visit.busy:
                    self._drop(old)
            for empty_only in (True, False):
                for old, visit in list(self._visits.items()):
                    if len(self._visits) <= self._limit:
                        break
                    if old != key and not visit.busy and not (empty_only and visit.chat is not None):
                        self._drop(old)
        return key

    def _drop(self, key: str) -> None:
        """Forgets a visit; the lock is held."""
        visit = self._visits.pop(key, None)
        if visit is not None:
            visit.stop_all()

    def get(self, key: str | None) -> Visit | None:
        """The visit of a key, or None when it was dropped (server restarted, too many chats)."""
        with self._lock:
            visit = self._visits.get(key or "")
            if visit is not None:
                visit.used = time.monotonic()
                self._visits.move_to_end(key or "")
            return visit

    def of_tab(self, tab: str | None) -> str | None:
        """The key of a tab's newest visit, None when it has none."""
        with self._lock:
            keys = [key for key, visit in self._visits.items() if tab and visit.tab == tab]
        return keys[-1] if keys else None

    def by_need(self) -> list[Visit]:
        """All visits, longest unused first, those that have asked for something after those that have not."""
        with self._lock:
            return sorted(self._visits.values(), key=lambda visit: visit.busy or visit.pending is not None)

    def all(self) -> list[Visit]:
        """All visits."""
        with self._lock:
            return list(self._visits.values())

    def tab_closed(self, tab: str | None) -> None:
        """Stops at once what a closed tab has running; frees its caches after a short grace."""
        if not tab:
            return
        with self._lock:
            closed = {key: visit for key, visit in self._visits.items() if visit.tab == tab}
        closed_at = time.monotonic()
        for visit in closed.values():
            visit.stop_all()

        def free() -> None:
            with self._lock:
                for key, visit in closed.items():
                    if visit.used <= closed_at:
                        self._drop(key)
            if self.of_tab(tab) is None:
                self.on_gone(tab)

        timer = threading.Timer(GRACE_SECONDS, free)
        timer.daemon = True
        timer.start()

    def __len__(self) -> int:
        return len(self._visits)
