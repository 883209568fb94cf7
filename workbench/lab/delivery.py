"""Delivering a mapped cache to another process, measured: through shared memory and through a file.

The sender writes layer by layer and says so after each, and the receiver (`workbench.kv.receiver`, a process of its
own) copies each layer out at once. So the time to the first layer is when a receiver could begin with its last tokens,
and the time to the last one is when it has everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from transformers import Cache

from workbench.errors import WorkbenchError
from workbench.kv import receiver
from workbench.kv.delivery import Layout, put_layer, segment

MEMORY_FOLDER = Path("/dev/shm")  # a file system in memory, on Linux


@dataclass(frozen=True)
class Delivery:
    """One delivery.

    Attributes:
        first_ms: until the receiver had the first layer.
        all_ms: until it had the last one.
        bytes: keys and values.
        sha256: of what it received.
    """

    first_ms: float
    all_ms: float
    bytes: int
    sha256: str


def ways() -> tuple[str, ...]:
    """How a cache can be delivered on this machine: "memory" where there is a file system in memory, and "file"."""
    return ("memory", "file") if os.access(MEMORY_FOLDER, os.W_OK) else ("file",)


class Receiver:
    """The receiving process; a context manager that always ends it."""

    def __enter__(self) -> Receiver:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(receiver.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready":
            raise WorkbenchError("The process that should receive the cache did not start.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def deliver(self, cache: Cache, way: str) -> Delivery:
        """Deliver a cache: "memory" or "file"."""
        layout = Layout.of(cache)
        folder = MEMORY_FOLDER if way == "memory" else None
        with tempfile.TemporaryDirectory(prefix="kv-delivery-", dir=folder) as place:
            path = Path(place) / "cache"
            begin = time.monotonic_ns()
            with segment(path, layout) as buffer:
                self._say(f"open {path}")
                for layer, offset in enumerate(layout.offsets):
                    put_layer(buffer, layout, cache, layer)
                    self._say(f"layer {offset} {layout.block_bytes(layer)}")
                self._say("close")
                told = json.loads(self._line() or "{}")
        if not told:
            raise WorkbenchError("The process that should receive the cache ended.")
        first, last = ((told[name] - begin) / 1e6 for name in ("first", "last"))
        return Delivery(first, last, told["bytes"], told["sha256"])

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
