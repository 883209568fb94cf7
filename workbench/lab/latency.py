"""What a handoff costs over context lengths, next to the prefill that it replaces, measured on this machine.

Five jobs are timed on the same real text: mapping alone, the whole handoff, the target's true prefill
without its language-model head, the same with it, and the bare matrix products of the mapping. Every round
runs each job once, in an order that turns by one from round to round, so that drift of the machine hits all
alike. Medians are reported and all runs are kept. The primary ratio is the strict one: prefill *without* the
head over the whole handoff, which has everything in it (new cache, anchors, mapping, hold-back, first
logits) but loading the artefact, reported apart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from workbench.chat.handoff import Account, hand_over
from workbench.errors import Cancelled, InputError
from workbench.kv import artefact
from workbench.kv.cache import new_cache
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.lab.corpus import Document, documents, stretch
from workbench.lab.provenance import dtype_name, environment, models_of, trace
from workbench.lab.results.common import Step
from workbench.lab.results.latency import LatencyBench, LatencyCell

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
DEFAULT_LENGTHS = (64, 256, 1024, 4096)
DEFAULT_REPEATS, FEWEST_REPEATS, MOST_REPEATS = 9, 5, 1000
JOBS = ("map", "handoff", "prefill", "prefill_first", "gemm")


def stream(
    host: PairHost,
    direction: str,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    repeats: int = DEFAULT_REPEATS,
    anchors: int | None = None,
    hold_back: int | None = None,
    texts: Sequence[Document] | None = None,
    should_stop: ShouldStop = None,
) -> Iterator[Step | LatencyBench]:
    """Time a direction's mapper.

    Args:
        host: the pair.
        direction: "up" or "down".
        lengths: context lengths in tokens.
        repeats: timed rounds per length, at least 5; one more round comes first to warm up.
        anchors: of the handoff, None for the mapper's own choice.
        hold_back: of the handoff, None for the mapper's own choice.
        texts: what the contexts are made of, None for the held-out ones.
        should_stop: asked between rounds and inside the source's prefill.

    Yields:
        A `Step` a round, with the bench so far as `partial`; the `LatencyBench` last.

    Raises:
        InputError: for lengths or repeats that cannot be measured.
        Cancelled: when asked to stop.
    """
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
    ids = stretch(target.tokenizer, texts or documents("heldout"), lengths[-1])
    load_ms, load_warm_ms = time_loading(host, direction, source, target)
    provenance = trace(host, direction, lengths[-1], [("context", ids)])
    here = environment(dtype_name(target.dtype), str(target.device)).to_json()
    cells: list[LatencyCell] = []

    def bench() -> LatencyBench:
        return LatencyBench(
            tuple(cells), load_ms, load_warm_ms, anchors, hold_back, repeats, here, provenance
        )

    rounds = len(lengths) * (repeats + 1)
    for number, length in enumerate(lengths):
        yield Step(number * (repeats + 1) / rounds, f"{length:,} tokens: the source reads", bench())
        jobs = _Jobs(source, target, mapper, ids[:length], anchors, hold_back)
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
        cells.append(jobs.cell())
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
    ) -> None:
        self.source, self.target, self.mapper, self.ids = source, target, mapper, ids
        self.anchors, self.hold_back = anchors, hold_back
        self.samples: dict[str, list[float]] = {name: [] for name in JOBS}
        self.accounts: list[Account] = []
        self._source_cache: Cache | None = None
        self._features: dict[tuple[int, torch.device], Tensor] = {}

    def prepare(self, should_stop: ShouldStop) -> None:
        """The source's cache, which a chat has already, and inputs for the bare products; not timed."""
        self._source_cache = new_cache(self.source.spec.layers, len(self.ids))
        forward(self.source.model, self.ids, self._source_cache, keep=0, chunk=512, should_stop=should_stop)
        for weight in (*self.mapper.key_weight, *self.mapper.value_weight):
            place = (weight.shape[0], weight.device)
            if place not in self._features:
                self._features[place] = torch.randn(len(self.ids), place[0], device=place[1]).to(weight.dtype)

    def round(self, number: int, keep: bool) -> None:
        """Each job once, starting with another one every round."""
        turn = number % len(JOBS)
        for name in JOBS[turn:] + JOBS[:turn]:
            clock = perf_counter()
            account = getattr(self, f"_{name}")()
            wait_for(self.target)
            if keep:
                self.samples[name].append((perf_counter() - clock) * 1e3)
                if account is not None:
                    self.accounts.append(account)

    def _map(self) -> None:
        cache = new_cache(self.target.spec.layers, len(self.ids))
        assert self._source_cache is not None
        self.mapper.map_into(
            self._source_cache, cache, 0, len(self.ids), self.source.rotary, self.target.rotary
        )

    def _handoff(self) -> Account:
        cache = new_cache(self.target.spec.layers, len(self.ids))
        assert self._source_cache is not None
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

    def _prefill(self) -> None:
        forward(self.target.model, self.ids, new_cache(self.target.spec.layers, len(self.ids)), keep=0)

    def _prefill_first(self) -> None:
        forward(self.target.model, self.ids, new_cache(self.target.spec.layers, len(self.ids)), keep=1)

    @torch.inference_mode()
    def _gemm(self) -> None:
        for weight in (*self.mapper.key_weight, *self.mapper.value_weight):
            torch.mm(self._features[weight.shape[0], weight.device], weight)

    def cell(self) -> LatencyCell:
        """Medians of what was kept."""
        middle = {name: median(runs) for name, runs in self.samples.items()}
        parts = {name: median(account.ms[name] for account in self.accounts) for name in self.accounts[0].ms}
        return LatencyCell(
            tokens=len(self.ids),
            map_ms=middle["map"],
            handoff_ms=middle["handoff"],
            prefill_ms=middle["prefill"],
            prefill_first_ms=middle["prefill_first"],
            gemm_ms=middle["gemm"],
            parts=parts,
            samples={name: tuple(runs) for name, runs in self.samples.items()},
        )


def time_loading(
    host: PairHost, direction: str, source: LoadedModel, target: LoadedModel
) -> tuple[float | None, float | None]:
    """Milliseconds to read, verify and place the artefact: out of the page cache, and again right after.

    Returns:
        (cold, warm), both None for a mapper that is not on disk.
    """
    _, manifest = host.mapper(direction)
    folder = host.mapper_folder(direction)
    if manifest is None or not (folder / artefact.MANIFEST).is_file():
        return None, None
    times = []
    for cold in (True, False):
        if cold:
            drop_from_page_cache(folder / artefact.TENSORS)
        clock = perf_counter()
        mapper, _ = artefact.load(folder, source.identity, target.identity, direction)
        mapper.to(target.dtype, target.layer_devices)
        wait_for(target)
        times.append((perf_counter() - clock) * 1e3)
    return times[0], times[1]


def drop_from_page_cache(path: Path) -> None:
    """Ask the system to forget a file's pages; where it cannot, the "cold" load is a warm one."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError), open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wait_for(model: LoadedModel) -> None:
    """Accelerators run behind: wait until all of a model's devices have finished."""
    for device in set(model.layer_devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
