"""What all visitors share: the models of a pair, loaded once, and the one lane in which they compute.

Nothing here imports torch until a model is asked for, so the page is there before the libraries are.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from workbench.errors import Cancelled, InputError, WorkbenchError, out_of_memory
from workbench.ui.jobs import StopFlag
from workbench.ui.lane import Lane
from workbench.ui.session import Visit, Visits
from workbench.ui.settings import Settings

log = logging.getLogger("workbench.ui")

MAX_HOSTS = 2  # pairs held in memory: the one the page started with and one more
SIDES = {"up": ("small", "large"), "down": ("large", "small")}
_importing = threading.Lock()
DROPPED = (
    "To make room, the server has freed this chat's caches. Nothing that was said is lost; the model reads "
    "the conversation again."
)
EMBEDDED = {  # known without reading anything
    "small": ("SmolLM2 sibling", "a pruned and distilled sibling; loads with the first message"),
    "large": ("SmolLM2-135M-Instruct (30 layers)", "loads with the first switch"),
}


@dataclass(frozen=True)
class Look:
    """A pair as the page shows it: its reference; per side a name, a detail, and whether it is in memory."""

    ref: Any
    names: dict[str, str]
    details: dict[str, str]
    loaded: frozenset[str]


def import_libraries() -> None:
    """Imports what computes. One thread at a time: transformers fills itself in while others already look at it."""
    with _importing:
        import workbench.chat.conversation
        import workbench.lab.compare  # noqa: F401


class Engine:
    """Start options, the pairs in memory, the visits, and the lane."""

    def __init__(self, settings: Settings, host: Any = None) -> None:
        self.settings = settings
        self.lane = Lane(settings.queue_size)
        self._make = threading.Lock()
        self._hosts: dict[str, Any] = {}
        self._start_host = host
        self.visits = Visits(None, settings.max_chats)
        self._warm = False

    def start_ref(self) -> Any:
        """The pair that the page was started with, as a reference."""
        if self._start_host is not None:
            return self._start_host.pair
        from workbench.models.catalog import resolve

        s = self.settings
        return resolve(s.pair if s.source is None else None, s.source, s.target, s.direction)

    def start_host(self) -> Any:
        """The host of that pair (no weights are loaded by this, but torch is imported)."""
        with self._make:
            if self._start_host is None:
                self._start_host = self._host(self.start_ref())
            return self._start_host

    def look(self, visit: Visit | None) -> Look:
        """What can be said about a visitor's pair at once, without importing or loading anything."""
        wanted = visit.wanted if visit is not None and visit.host is None else None
        host = (visit.host if visit is not None else None) or (None if wanted else self._start_host)
        ref = host.pair if host is not None else wanted or self.start_ref()
        names, details, loaded = {}, {}, set()
        for side in ("small", "large"):
            names[side] = ref.ref(side).removeprefix("embedded:").rpartition("/")[2]
            details[side] = "loads when it is needed"
            if host is not None and host.is_loaded(side):
                model = host.model(side)
                names[side] = model.name
                details[side] = (
                    f"loaded · {model.spec.layers} layers, {model.spec.kv_heads} KV heads of "
                    f"{model.spec.head_dim}"
                    + ("" if model.tokenizer.chat_template else " · no chat template: a plain transcript")
                )
                loaded.add(side)
            elif ref.name == "embedded":
                names[side], details[side] = EMBEDDED[side]
        return Look(ref, names, details, frozenset(loaded))

    def host_of(self, visit: Visit) -> Any:
        """The pair that a visitor works with."""
        if visit.host is None:
            visit.host = self.host_for(visit.wanted) if visit.wanted else self.start_host()
        return visit.host

    def host_for(self, ref: Any) -> Any:
        """A pair by its reference; keeps at most `MAX_HOSTS` beside each other."""
        if ref == self.start_ref():
            return self.start_host()
        with self._make:
            if ref.name not in self._hosts:
                while len(self._hosts) >= MAX_HOSTS - 1:
                    self._hosts.pop(next(iter(self._hosts)))
                self._hosts[ref.name] = self._host(ref)
            return self._hosts[ref.name]

    def _host(self, ref: Any) -> Any:
        import_libraries()
        from workbench.models.pair import PairHost

        s = self.settings
        return PairHost(
            ref, device_map=s.device_map, dtype=s.dtype, max_memory=s.max_memory, by_side=s.by_side
        )

    def warm_up(self) -> None:
        """Imports the heavy libraries in the background, once, after the first page has been sent."""
        if self._warm:
            return
        self._warm = True

        def body() -> None:
            try:
                import_libraries()
            except Exception:
                log.exception("The model libraries could not be imported")

        threading.Thread(target=body, name="workbench-imports", daemon=True).start()

    @contextmanager
    def model_lane(
        self, stop: StopFlag, visit: Visit | None = None, tell: Callable[[str], None] | None = None
    ) -> Iterator[Callable[[], None]]:
        """Holds the only lane in which models compute, so that two visitors never share a moment of it.

        The time limit of a job runs while it has the lane.

        Args:
            stop: asked while waiting.
            visit: whose job this is; None for a job that counts as a visitor of its own.
            tell: called with the place in the queue, in words.

        Yields:
            A function for long jobs to call between two parts: it lets those who wait go first.

        Raises:
            BusyError: too many wait already.
            Cancelled: asked to stop.
        """

        def place(number: int) -> None:
            if tell is not None:
                tell(f"Waiting for the model, number {number} in the queue")

        with self.lane.turn(id(visit or stop), stop, place) as turn:
            if stop():
                raise Cancelled("Stopped.")
            stop.limit(self.settings.job_seconds)
            yield lambda: stop.extend(turn.step_aside())

    def crowded(self) -> bool:
        """Whether the lane and its queue are full, what has been asked for a moment ago counted with them."""
        noted = sum(visit.pending is not None and visit.pending.fresh for visit in self.visits.all())
        return self.lane.busy + self.lane.waiting + noted > self.lane.capacity

    @contextmanager
    def loaded(
        self, host: Any, sides: tuple[str, ...], tell: Callable[[float, str], None], stop: StopFlag
    ) -> Iterator[None]:
        """Loads what is missing of a pair, with progress; what its models then compute ends soon after a stop.

        Raises:
            InputError: on a public page only the pair that it was started with and the embedded one are run.
        """
        if self.settings.public and host.pair.name != "embedded" and host.pair != self.start_ref():
            raise InputError(f"{host.pair.title}: figures only; this public page does not run that pair.")
        missing = [side for side in sides if not host.is_loaded(side)]
        for place, side in enumerate(missing):

            def report(share: float, text: str, place: int = place) -> None:
                tell((place + share) / len(missing), text)

            host.model(side, report)
        with host.stopping_between_layers(stop):
            yield

    def cache_bytes(self) -> int:
        """Bytes of keys and values that all chats hold together."""
        return sum(visit.chat.cache_bytes for visit in self.visits.all() if visit.chat is not None)

    def make_room(self, keep: Visit) -> None:
        """Frees the caches of the longest unused chats while all together hold more than is allowed.

        Called in the lane, so no other chat computes: one that only waits for its turn is no exception, else whoever
        asks and never comes back could hold any amount. Their owners are told; what they say next is answered after
        a visible prefill.

        Args:
            keep: the visit whose turn it is.
        """
        limit = self.settings.max_cache_mb * 1_000_000
        held = self.cache_bytes()
        for visit in self.visits.by_need():
            if held <= limit:
                return
            if visit is keep or visit.chat is None or not visit.chat.cache_bytes:
                continue
            held -= visit.chat.cache_bytes
            visit.chat.drop_caches()
            visit.notice = DROPPED
            log.info("caches of a chat that does not compute were freed")

    def time_is_up(self) -> str:
        """What is said when the time limit ended a job."""
        return f"Stopped: one job may take {self.settings.job_seconds:,.0f} seconds here. Ask for less."

    def sentence(self, error: BaseException) -> str:
        """One sentence for people; what is no `WorkbenchError` is logged and named without its internals."""
        if isinstance(error, WorkbenchError):
            log.warning("%s: %s", type(error).__name__, error)
            return str(error)
        if (asked := out_of_memory(error)) is not None:
            log.warning("out of memory: %s", error)
            return f"There was not enough memory for this{asked}; try a shorter context or a smaller model."
        where = "".join(traceback.format_tb(error.__traceback__))
        # The words of a foreign error may repeat what somebody wrote, so they are logged when asked for only.
        log.error("unexpected %s\n%s%s", type(error).__name__, where, error if self.settings.debug else "")
        return (
            f"Something went wrong inside the program ({type(error).__name__}); the log has the details. "
            "You can go on."
        )
