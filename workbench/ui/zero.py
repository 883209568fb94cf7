"""ZeroGPU Spaces: what the page does there, and why.

On ZeroGPU a function that wants the GPU runs in a process of its own, forked for the call. What it changes stays
there, and CUDA tensors cannot come back. This page keeps a cache a visitor between calls and writes into it in place, so
its models run on the processor, exactly as on a CPU Space. A ZeroGPU Space that has no GPU function does not start;
`register` gives it one, which says what GPU there would be.
"""

from __future__ import annotations

import os
from typing import Any


def on_zero_gpu() -> bool:
    """Whether this is a ZeroGPU Space, which sets `SPACES_ZERO_GPU`."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() not in ("", "0", "false")


def register() -> Any | None:
    """Makes a ZeroGPU Space start; does nothing elsewhere. Must run before torch is imported.

    Returns:
        The registered function, None elsewhere.
    """
    if not on_zero_gpu():
        return None
    try:
        import spaces
    except ImportError:  # the package comes with the Space; without it there is nothing to register
        return None

    def gpu_name() -> str:
        """The GPU of this call, for the log."""
        import torch

        return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else "none"

    return spaces.GPU(duration=5)(gpu_name)
