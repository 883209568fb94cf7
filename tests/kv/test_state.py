"""A half-gathered fit on a disk that is full: said in one sentence, the old state whole, nothing left over."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from workbench.errors import WorkbenchError
from workbench.kv import checkpoint
from workbench.kv.state import FitState


class Sums:
    """A part with one tensor."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value])

    def state(self) -> dict[str, Any]:
        return {"x": self.value}

    @classmethod
    def from_state(cls, tensors: dict[str, Any]) -> Sums:
        return cls(float(tensors["x"]))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/secret/path"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    kept = FitState(tmp_path / "sums", "digest")
    kept.save({"part": Sums(1.0)}, 3)

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(WorkbenchError, match="No space left on device") as caught:
        kept.save({"part": Sums(2.0)}, 4)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["sums"]
    parts = {"part": Sums(0.0)}
    assert FitState(tmp_path / "sums", "digest").restore(parts) == 3 and float(parts["part"].value) == 1.0
