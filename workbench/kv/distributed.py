"""A fit on several processes: each reads its share of the text, the first one gets all sums and goes on alone.

Whatever starts the processes with the usual variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) will do:

    accelerate launch --multi_gpu --num_processes 4 -m workbench fit …      (also without GPUs)
    torchrun --nproc-per-node 4 -m workbench fit …

Only tensors travel, through torch.distributed's gloo: sums are summed (first moved to the first process's shift, for sums
about different points cannot be added), kept tokens are sent. Sequences are dealt in groups of eight, so that every
process has the same mix of fitted, choosing and reporting ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.kv.attention import AttentionSums
from workbench.kv.moments import Moments, Rows

GROUP = 8  # sequences that stay together: `gather.PARTS_EVERY`


class ShareDone(Exception):
    """This process has read its share and handed it over; the first one goes on alone."""


def world() -> tuple[int, int]:
    """(number of this process, how many there are); (0, 1) when nothing launched several."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def mine(index: int) -> bool:
    """Whether this process reads the sequence of this number."""
    rank, size = world()
    return (index // GROUP) % size == rank


def own(path: Path) -> Path:
    """A file of this process alone: the same for the first one."""
    rank, _ = world()
    return path.with_name(f"{path.name}.{rank}") if rank else path


def device() -> str | None:
    """The accelerator that this process should use, None without several processes or accelerators."""
    _, size = world()
    if size == 1 or not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


@contextmanager
def joined() -> Iterator[None]:
    """Connected with the other processes, if there are any."""
    _, size = world()
    if size == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def collect(parts: Mapping[str, Any]) -> bool:
    """Bring everything that was gathered to the first process.

    Args:
        parts: `Moments`, `Rows` and `AttentionSums` by name, the same names in every process.

    Returns:
        Whether this is the first process, whose parts are now complete; the others have done their work.
    """
    rank, size = world()
    if size == 1:
        return True
    for part in parts.values():
        if isinstance(part, Rows):
            _collect_rows(part, rank, size)
        elif isinstance(part, Moments):
            _collect_moments(part)
        else:
            assert isinstance(part, AttentionSums)
            for tensor in (part.queries, part.values, part.value_sum, part.outputs):
                dist.reduce(tensor, dst=0)
            part.tokens = int(_summed(float(part.tokens)))
    return rank == 0


def _collect_moments(part: Moments) -> None:
    part.flush()
    shift_x, shift_y = part.shift_x.clone(), part.shift_y.clone()
    dist.broadcast(shift_x, src=0)
    dist.broadcast(shift_y, src=0)
    part.move_to(shift_x, shift_y)
    for tensor in (part.sum_x, part.sum_y, part.sum_xx, part.sum_xy, part.sum_yy):
        dist.reduce(tensor, dst=0)
    part.count, part.mass = int(_summed(float(part.count))), _summed(part.mass)


def _collect_rows(part: Rows, rank: int, size: int) -> None:
    part.flush()
    x, y = part.part(slice(None), slice(None))
    counts = torch.zeros(size, dtype=torch.int64)
    counts[rank] = len(x)
    dist.all_reduce(counts)
    for other in range(1, size):
        if rank == other:
            dist.send(torch.cat((x, y), dim=1), dst=0)
        elif rank == 0:
            both = torch.empty(int(counts[other]), x.shape[1] + y.shape[1])
            dist.recv(both, src=other)
            part.add(both[:, : x.shape[1]], both[:, x.shape[1] :])


def _summed(number: float) -> float:
    total = torch.tensor(number, dtype=torch.float64)
    dist.reduce(total, dst=0)
    return float(total)
