"""What a true prefill would take here, from a saved bench of this very machine: for estimates, labelled as such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workbench.errors import WorkbenchError
from workbench.lab.provenance import cpu_name, dtype_name, load_precomputed
from workbench.models.catalog import DIRECTIONS, target_side

if TYPE_CHECKING:
    from workbench.models.pair import PairHost


def saved_prefill_times(host: PairHost) -> dict[str, list[tuple[int, float]]]:
    """Side -> (tokens, milliseconds to the first token) out of the saved benches of a pair.

    A bench of another processor, another number of threads or another dtype says nothing about this machine and is left
    out, and so is a side whose model is not loaded yet.
    """
    times: dict[str, list[tuple[int, float]]] = {}
    for direction in DIRECTIONS:
        side = target_side(direction)
        if not host.is_loaded(side):
            continue
        model = host.model(side)
        try:
            bench = load_precomputed(host.pair.name, direction, "latency", host.mapper_folder(direction))
        except WorkbenchError:
            continue  # a damaged file is told on the Latency tab
        here = (cpu_name(), torch.get_num_threads(), dtype_name(model.dtype))
        if bench is None or model.device.type != "cpu":
            continue
        if tuple(bench.environment.get(name) for name in ("processor", "threads", "dtype")) == here:
            times[side] = [(cell.tokens, cell.prefill_first_ms) for cell in bench.cells]
    return times
