"""A half-gathered fit on disk, so that a killed one can go on: the sums, and how many sequences they hold."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from workbench.kv.checkpoint import Checkpoint


class Part(Protocol):
    """Something gathered that can be written down and read again."""

    def state(self) -> dict[str, Tensor]:
        """Everything as named tensors."""
        ...

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Any:
        """The inverse of `state`."""
        ...


class FitState:
    """Keeps what was gathered in one file, bound by `digest` to the texts, options and models of one fit."""

    def __init__(self, path: Path, digest: str, every_seconds: float = 120.0) -> None:
        self.path, self.digest, self.every_seconds = Path(path), digest, every_seconds
        self._file = Checkpoint(self.path, digest)
        self._last = monotonic()

    def save_if_due(self, parts: Mapping[str, Part], done: int) -> None:
        """Write the state when the last one is older than `every_seconds`."""
        if monotonic() - self._last >= self.every_seconds:
            self.save(parts, done)

    def save(self, parts: Mapping[str, Part], done: int) -> None:
        """Write the state now; a kill or a full disk leaves the old or the new one.

        Raises:
            WorkbenchError: it cannot be written.
        """
        tensors = {f"{name}/{key}": t for name, sums in parts.items() for key, t in sums.state().items()}
        self._file.save(tensors, done=str(done))
        self._last = monotonic()

    def restore(self, parts: MutableMapping[str, Any]) -> int:
        """Fill `parts` from the file when it belongs to this fit.

        Returns:
            The number of sequences that are already in; 0 when there is nothing to go on from.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("digest") != self.digest:
                    return 0
                names = list(file.keys())
                for name in parts:
                    state = {
                        key.split("/")[1]: file.get_tensor(key) for key in names if key.startswith(f"{name}/")
                    }
                    parts[name] = type(parts[name]).from_state({key: t.clone() for key, t in state.items()})
                return int(metadata["done"])
        except (OSError, SafetensorError):
            return 0

    def discard(self) -> None:
        """The fit is complete: remove the file and what a killed save left."""
        self._file.discard()
