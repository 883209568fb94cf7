"""Tensors of a training that is under way, in one file, so that a killed one can go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class Checkpoint:
    """One file, bound by `digest` to the options and data of one training; written whole or not at all."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.digest = path, digest

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace what was kept before."""
        temporary = self.path.with_name(self.path.name + ".new")
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(kept, temporary, metadata={"digest": self.digest})
        temporary.replace(self.path)

    def load(self) -> dict[str, Tensor]:
        """What was kept, on the CPU; nothing where there is no file, a damaged one, or another training's."""
        try:
            with safe_open(self.path, framework="pt") as file:
                if (file.metadata() or {}).get("digest") != self.digest:
                    return {}
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}

    def discard(self) -> None:
        """The training is complete: remove the file and what a killed save left."""
        for path in (self.path, self.path.with_name(self.path.name + ".new")):
            path.unlink(missing_ok=True)
