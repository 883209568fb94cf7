"""Several independent texts side by side, where that is faster than one text on all cores.

A small model's products are too small to keep more than a few cores busy; two texts at a time on one core each take little
more than half as long as one after the other on both. So on the processor the cores are shared out among `MOST` threads.
An accelerator gets one text at a time, and so does a model that runs a part of its layers alone, since that changes it for
everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from workbench.models.loading import LoadedModel

MOST = 4  # more would need much memory for caches, on many cores


class Workers:
    """A few threads of torch. `count`: how many."""

    def __init__(self, count: int, pool: ThreadPoolExecutor) -> None:
        """Args: as `workers` makes them."""
        self.count, self._pool = count, pool

    def map(self, work: Callable[..., Any], *inputs: Any) -> list[Any]:
        """The results in order; the first exception is raised when all have ended."""
        futures = [self._pool.submit(work, *each) for each in zip(*inputs, strict=True)]
        for future in futures:
            future.exception()  # waits
        return [future.result() for future in futures]


@contextmanager
def workers(models: tuple[LoadedModel, ...], native_layers: int = 0) -> Iterator[Workers]:
    """As many as are worth it for these models.

    Args:
        models: that run.
        native_layers: of the mapper that hands over between them.
    """
    threads = torch.get_num_threads()
    local = all(device.type == "cpu" for model in models for device in model.layer_devices)
    count = min(threads, MOST) if local and not native_layers else 1
    share = threads // count
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(share,)) as pool:
            yield Workers(count, pool)
    finally:
        torch.set_num_threads(threads)  # new threads take what was set last
