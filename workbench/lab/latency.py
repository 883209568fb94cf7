"""What a handoff costs over context lengths, next to the prefill that it replaces, measured on this machine.

Timed on the same real text: mapping alone, the whole handoff, the handoff when earlier turns were mapped ahead,
the target's true prefill without its language-model head, the same with it, the bare matrix products of the mapping,
delivery of the mapped cache to another process, and its move to another device where there is one. Every round runs
each job once, in an order that turns by one from round to round, so that drift of the machine hits all alike. Medians
are reported and all runs are kept. The primary ratio is the strict one: prefill *without* the head, by the faster of
whole and in chunks, over the whole handoff, which has everything in it but loading the artefact, reported apart and
subtracted from the net saving.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from workbench.chat.account import Account
from workbench.chat.handoff import hand_over, map_ahead, map_blocks
from workbench.errors import Cancelled, InputError
from workbench.kv import artefact, features
from workbench.kv.cache import layer_tensors, nbytes, new_cache
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.lab.corpus import Document, documents, stretch
from workbench.lab.decoding import decode_speed
from workbench.lab.delivery import Delivery, Receiver, ways
from workbench.lab.memory import peak_bytes
from workbench.lab.provenance import dtype_name, environment, models_of, trace
from workbench.lab.results.common import Step
from workbench.lab.results.latency import LatencyBench, LatencyCell, Terms

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
DEFAULT_LENGTHS = (64, 256, 1024, 4096)
SCALING_LENGTHS = (256, 512, 1024, 2048, 4096, 8000)  # for the exponent; mapping and handoff only
DEFAULT_REPEATS, FEWEST_REPEATS, MOST_REPEATS = 9, 9, 1000
JOBS = ("map", "handoff", "ahead", "prefill", "prefill_first", "gemm", "move", "memory", "file")
WITHOUT_PREFILL = ("map", "handoff")
TURN = 64  # tokens that are new at a switch when earlier turns were mapped ahead
LONG = 2048  # from here on a prefill in chunks may be faster than in one pass; both are tried
CHUNK = 1024


@dataclass(frozen=True)
class Extras:
    """What is measured, and counted, besides the handoff and the prefill.

    Attributes:
        deliver: deliver the mapped cache to another process too.
        delivered: which delivery the net saving subtracts: "memory", "file" or "" (the cache stays in this process, as
            in the chat). By default the fastest there is.
        handoffs: over how many handoffs loading the artefact is spread.
        rejection_rate: share of handoffs that are followed by a prefill after all, at least 0 and below 1.
        scaling: time mapping and handoff at further lengths, up to 8,000 tokens.
        decode: tokens to decode for the comparison with `generate`, 0 for none.
    """

    deliver: bool = True
    delivered: str = ways()[0]
    handoffs: int = 10
    rejection_rate: float = 0.0
    scaling: bool = False
    decode: int = 0

    def __post_init__(self) -> None:
        if self.delivered not in ("", "memory", "file"):
            raise InputError(f"A cache is delivered by memory or by file, not by {self.delivered!r}.")
        if not 0 <= self.rejection_rate < 1:
            raise InputError("The rejection rate must be at least 0 and below 1.")
        if self.delivered and not self.deliver:
            raise InputError("A delivery can only be subtracted when it is measured.")
        if self.handoffs < 1:
            raise InputError("The artefact must serve at least one handoff.")
        if not 0 <= self.decode <= 4096:
            raise InputError("Between 0 and 4,096 tokens can be decoded.")


def stream(
    host: PairHost,
    direction: str,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    repeats: int = DEFAULT_REPEATS,
    anchors: int | None = None,
    hold_back: int | None = None,
    texts: Sequence[Document] | None = None,
    should_stop: ShouldStop = None,
    extras: Extras | None = None,
) -> Iterator[Step | LatencyBench]:
    """Time a direction's mapper.

    Args:
        host: the pair.
        direction: "up" or "down".
        lengths: context lengths in tokens.
        repeats: timed rounds per length, at least 9; one more round comes first to warm up.
        anchors: of the handoff, None for the mapper's own choice.
        hold_back: of the handoff, None for the mapper's own choice.
        texts: what the contexts are made of, None for the held-out ones.
        should_stop: asked between rounds and inside the source's prefill.
        extras: what else to measure and to count.

    Yields:
        A `Step` a round, with the bench so far as `partial`; the `LatencyBench` last.

    Raises:
        InputError: for lengths or repeats that cannot be measured.
        Cancelled: when asked to stop.
    """
    extras = extras or Extras()
    source, target = models_of(host, direction)
    lengths = sorted(set(lengths))
    longest = min(source.spec.max_positions, target.spec.max_positions)
    if not lengths or lengths[0] < 2 or lengths[-1] > longest:
        raise InputError(f"Context lengths must lie between 2 and {longest:,} tokens.")
    if repeats > MOST_REPEATS:
        raise InputError(f"{repeats} repeats would take for ever.", f"Use at most {MOST_REPEATS}.")
    if repeats < FEWEST_REPEATS:
        raise InputError(
            f"A median of {repeats} runs says little.", f"Use at least {FEWEST_REPEATS} repeats."
        )
    mapper, _ = host.mapper(direction)
    anchors = mapper.anchors if anchors is None else anchors
    hold_back = max(1, mapper.hold_back if hold_back is None else hold_back)
    further = [n for n in SCALING_LENGTHS if n <= longest and n not in lengths] if extras.scaling else []
    ids = stretch(target.tokenizer, texts or documents("heldout"), max([*lengths, *further]))
    load_ms, load_warm_ms, cold = time_loading(host, direction, source, target)
    terms = Terms(load_ms or 0.0, extras.handoffs, extras.rejection_rate, extras.delivered)
    provenance = trace(host, direction, lengths[-1], [("context", ids)])
    here = environment(dtype_name(target.dtype), str(target.device)).to_json()
    cells: list[LatencyCell] = []
    scaling: list[tuple[int, float, float]] = []
    decoded: dict[str, float] = {}

    def bench() -> LatencyBench:
        return LatencyBench(
            tuple(cells), load_ms, load_warm_ms, anchors, hold_back, repeats, here, provenance,
            cold, tuple(scaling), decoded,
        )  # fmt: skip

    tasks = [(n, True) for n in lengths] + [(n, False) for n in further]
    rounds = len(tasks) * (repeats + 1)
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(Receiver()) if extras.deliver else None
        for number, (length, whole) in enumerate(tasks):
            yield Step(number * (repeats + 1) / rounds, f"{length:,} tokens: the source reads", bench())
            jobs = _Jobs(
                source,
                target,
                mapper,
                ids[:length],
                anchors,
                hold_back,
                receiver,
                () if whole else WITHOUT_PREFILL,
            )
            with host.holding_lane(should_stop):
                jobs.prepare(should_stop)
            for repeat in range(repeats + 1):
                if should_stop and should_stop():
                    raise Cancelled("The bench was stopped.")
                with host.holding_lane(should_stop):
                    jobs.round(repeat, keep=repeat > 0)
                done = number * (repeats + 1) + repeat + 1
                what = "warm-up" if repeat == 0 else f"run {repeat} of {repeats}"
                yield Step(done / rounds, f"{length:,} tokens: {what}", bench())
            if whole:
                cells.append(jobs.cell(terms))
            else:
                scaling.append((length, median(jobs.samples["map"]), median(jobs.samples["handoff"])))
    if extras.decode:
        yield Step(1.0, "decoding, against generate", bench())
        with host.holding_lane(should_stop):
            decoded |= decode_speed(target, ids[:64], extras.decode, repeats)
    yield bench()


class _Jobs:
    """The timed jobs at one context length."""

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        mapper: KVMapper,
        ids: Sequence[int],
        anchors: int,
        hold_back: int,
        receiver: Receiver | None = None,
        only: Sequence[str] = (),
    ) -> None:
        self.source, self.target, self.mapper, self.ids = source, target, mapper, ids
        self.anchors, self.hold_back, self.receiver = anchors, hold_back, receiver
        self.other = other_device(target)
        self.jobs = tuple(name for name in JOBS if self._possible(name) and (not only or name in only))
        self.samples: dict[str, list[float]] = {name: [] for name in self.jobs}
        self.first: dict[str, list[float]] = {}
        self.accounts: list[Account] = []
        self.chunk: int | None = None
        self.turn = min(TURN, len(ids) // 2)
        self.ahead_ms: list[float] = []
        self._source_cache: Cache
        self._features: dict[tuple[int, torch.device], Tensor] = {}

    def _possible(self, name: str) -> bool:
        if name in ("memory", "file"):
            return self.receiver is not None and name in ways()
        return name != "move" or self.other is not None

    def prepare(self, should_stop: ShouldStop) -> None:
        """The source's cache, which a chat has already, and inputs for the bare products; not timed."""
        n = len(self.ids)
        self._source_cache = new_cache(self.source.spec.layers, n)
        forward(self.source.model, self.ids, self._source_cache, keep=0, chunk=512, should_stop=should_stop)
        for weight in self.mapper.matrices:
            place = (weight.shape[0], weight.device)
            if place not in self._features:
                self._features[place] = torch.randn(n, place[0], device=place[1]).to(weight.dtype)
        self._mapped = new_cache(self.target.spec.layers, n)
        self._hand_over(self._mapped)
        if "prefill" in self.jobs and n >= LONG:
            times: dict[int | None, float] = {}
            for self.chunk in (None, CHUNK):
                clock = perf_counter()
                self._read(keep=0)
                wait_for(self.target)
                times[self.chunk] = perf_counter() - clock
            self.chunk = min(times, key=lambda chunk: times[chunk])

    def round(self, number: int, keep: bool) -> None:
        """Each job once, starting with another one every round."""
        turn = number % len(self.jobs)
        for name in self.jobs[turn:] + self.jobs[:turn]:
            if name == "ahead":
                self._map_earlier_turns(keep)
            clock = perf_counter()
            told = getattr(self, f"_{name}")()
            wait_for(self.target)
            if not keep:
                continue
            self.samples[name].append((perf_counter() - clock) * 1e3)
            if name == "handoff":
                self.accounts.append(told)
            elif isinstance(told, Delivery):
                self.samples[name][-1] = told.all_ms
                self.first.setdefault(name, []).append(told.first_ms)

    def _map(self) -> None:
        cache = new_cache(self.target.spec.layers, len(self.ids))
        rotary = self.source.rotary, self.target.rotary
        first = self.mapper.native_layers
        map_blocks(self.mapper, self._source_cache, cache, 0, len(self.ids), *rotary, first_layer=first)

    def _handoff(self) -> Account:
        return self._hand_over(new_cache(self.target.spec.layers))

    def _hand_over(self, cache: Cache) -> Account:
        return hand_over(
            self.ids,
            self._source_cache,
            self.target,
            cache,
            self.mapper,
            self.source,
            self.anchors,
            self.hold_back,
        )[1]

    def _map_earlier_turns(self, keep: bool) -> None:
        """What a chat does at the end of earlier turns, when it maps ahead."""
        before = len(self.ids) - self.turn
        self._ahead_cache = new_cache(self.target.spec.layers, len(self.ids) + TURN)
        clock = perf_counter()
        map_ahead(
            self.ids[:before], before, self._source_cache, self.target, self._ahead_cache, self.mapper,
            self.source, self.anchors, self.hold_back,
        )  # fmt: skip
        wait_for(self.target)
        if keep:
            self.ahead_ms.append((perf_counter() - clock) * 1e3)

    def _ahead(self) -> None:
        self._hand_over(self._ahead_cache)

    def _prefill(self) -> None:
        self._read(keep=0)

    def _prefill_first(self) -> None:
        self._read(keep=1)

    def _read(self, keep: int) -> None:
        cache = new_cache(self.target.spec.layers, len(self.ids))
        forward(self.target.model, self.ids, cache, keep=keep, chunk=self.chunk)

    @torch.inference_mode()
    def _gemm(self) -> None:
        for weight in self.mapper.matrices:
            torch.mm(self._features[weight.shape[0], weight.device], weight)

    def _move(self) -> None:
        assert self.other is not None
        for layer in range(self.target.spec.layers):
            for tensor in layer_tensors(self._mapped, layer):
                tensor.to(self.other, copy=True)

    def _memory(self) -> Delivery:
        assert self.receiver is not None
        return self.receiver.deliver(self._mapped, "memory")

    def _file(self) -> Delivery:
        assert self.receiver is not None
        return self.receiver.deliver(self._mapped, "file")

    def cell(self, terms: Terms) -> LatencyCell:
        """Medians of what was kept."""
        middle = {name: median(runs) for name, runs in self.samples.items()}
        names = dict.fromkeys(name for account in self.accounts for name in account.ms)
        parts = {name: median(account.ms.get(name, 0.0) for account in self.accounts) for name in names}
        held = nbytes(self._source_cache) + nbytes(self._mapped)
        extra = peak_bytes(self._handoff, self.target.layer_devices)
        if terms.delivered and terms.delivered not in middle:
            raise InputError(f"A cache cannot be delivered by {terms.delivered} on this machine.")
        return LatencyCell(
            tokens=len(self.ids),
            map_ms=middle["map"],
            handoff_ms=middle["handoff"],
            prefill_ms=middle["prefill"],
            prefill_first_ms=middle["prefill_first"],
            gemm_ms=middle["gemm"],
            parts=parts,
            samples={name: tuple(runs) for name, runs in self.samples.items()},
            ahead_handoff_ms=middle["ahead"],
            ahead_ms=median(self.ahead_ms),
            turn_tokens=self.turn,
            move_ms=middle.get("move"),
            deliver_ms={name: middle[name] for name in ("memory", "file") if name in middle},
            deliver_first_ms={name: median(runs) for name, runs in self.first.items()},
            cache_bytes=nbytes(self._mapped),
            source_bytes=nbytes(self._source_cache),
            peak_bytes=None if extra is None else held - nbytes(self._mapped) + extra,
            prefill_chunk=self.chunk or 0,
            terms=replace(terms),
        )


def other_device(model: LoadedModel) -> torch.device | None:
    """A second device to which a cache could move, None where there is only one."""
    here = model.layer_devices[0]
    if here.type != "cuda":
        return torch.device("cuda", 0) if torch.cuda.is_available() else None
    if torch.cuda.device_count() > 1:
        return torch.device("cuda", (here.index or 0) ^ 1)
    return torch.device("cpu")


def time_loading(
    host: PairHost, direction: str, source: LoadedModel, target: LoadedModel
) -> tuple[float | None, float | None, bool]:
    """Milliseconds to read, verify and place the artefact: out of the page cache, and again right after.

    Returns:
        (first, second, whether the first one was really cold); the times are None for a mapper that is not on disk.
    """
    _, manifest = host.mapper(direction)
    folder = host.mapper_folder(direction)
    if manifest is None or not (folder / artefact.MANIFEST).is_file():
        return None, None, False
    times = []
    dropped = False
    for cold in (True, False):
        if cold:
            dropped = drop_from_page_cache(folder / artefact.TENSORS)
        clock = perf_counter()
        mapper, _ = artefact.load(folder, source.identity, target.identity, direction)
        mapper.to(target.dtype, target.layer_devices)
        wait_for(target)
        times.append((perf_counter() - clock) * 1e3)
    return times[0], times[1], dropped


def drop_from_page_cache(path: Path) -> bool:
    """Ask the system to forget a file's pages, and look whether it did; where not, a "cold" load is a warm one."""
    if not (hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")):
        return False
    try:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
            except BlockingIOError:
                return True  # the first byte would have to come from the disk
    except OSError:
        pass
    return False


def wait_for(model: LoadedModel) -> None:
    """Accelerators run behind: wait until all of a model's devices have finished."""
    for device in set(model.layer_devices):
        features.wait_for(device)
