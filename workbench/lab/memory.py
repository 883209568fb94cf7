"""How much memory a piece of work holds at its worst moment: what it allocates through PyTorch, followed exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def peak_bytes(work: Callable[[], Any], devices: Sequence[torch.device]) -> int | None:
    """Most bytes that `work` held at once of what it allocated itself, what it leaves behind included.

    Args:
        work: is run once.
        devices: where it runs; with several kinds, or several accelerators, they are added up.

    Returns:
        None where the allocator cannot be followed.
    """
    places = {device for device in devices if device.type == "cuda"}
    for device in places:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = sum(torch.cuda.memory_allocated(device) for device in places)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    steps = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    )
    peak = held = 0
    for _, change in steps:
        held += change
        peak = max(peak, held)
    if not steps and not places:
        return None
    return peak + sum(torch.cuda.max_memory_allocated(device) for device in places) - before
