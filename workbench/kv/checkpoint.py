"""What a fit has done so far, as tensors in one file, so that a killed one can go on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from workbench.errors import WorkbenchError


class Checkpoint:
    """One file, bound by `digest` to the texts, options and models of one fit."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.digest = Path(path), digest

    def save(self, tensors: Mapping[str, Tensor], **facts: str) -> None:
        """Replace what was kept before; a kill or a full disk leaves the old or the new file.

        Args:
            tensors: what to keep.
            facts: words that stand beside the digest.

        Raises:
            WorkbenchError: it cannot be written.
        """
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        temporary = self.path.with_name(self.path.name + ".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file(kept, temporary, metadata={"digest": self.digest, **facts})
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)  # a full disk must not stay full of halves
            raise WorkbenchError(
                f"What the fit has gathered cannot be kept in {self.path.name!r}: "
                f"{getattr(error, 'strerror', None) or error}.",
                "Make room; the same fit goes on from what was kept before.",
            ) from error

    def load(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What was kept, on the CPU; nothing where there is no file, a damaged one, or another fit's.

        Args:
            like: tensors that must be there in these shapes; others may stand beside them.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                if (file.metadata() or {}).get("digest") != self.digest:
                    return {}
                kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}
        fits = all(name in kept and kept[name].shape == tensor.shape for name, tensor in like.items())
        return kept if fits else {}

    def discard(self) -> None:
        """The fit is complete: remove the file and what a killed save left."""
        for path in (self.path, self.path.with_name(self.path.name + ".new")):
            path.unlink(missing_ok=True)
