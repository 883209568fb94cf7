"""Heads that a person has marked in a mapper, and what repairing them wins: a small file beside the mapper.

A mapper that came with the project is not written to; its marks are kept in the workbench's own folder. Marks name
the mapper by the sum of its tensors, so they do not survive a new fit. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.lab.provenance import write_text
from workbench.lab.results.restored import Heads, Restored
from workbench.models.catalog import PRECOMPUTED
from workbench.models.place import home

NAME = "heads-marked.json"


@dataclass(frozen=True)
class Marks:
    """Marked heads of one mapper.

    Attributes:
        mapper: SHA-256 of the mapper's tensors.
        heads: (layer, KV head) each, in order.
        gain: what repairing exactly these heads wins, None when it was not measured.
    """

    mapper: str
    heads: Heads = ()
    gain: Restored | None = None

    def toggled(self, heads: Sequence[tuple[int, int]]) -> Marks:
        """These heads marked; or unmarked where all of them were."""
        now, these = set(self.heads), set(heads)
        return Marks(self.mapper, tuple(sorted(now - these if these <= now else now | these)))


def marks_path(folder: Path) -> Path:
    """Where the marks of the mapper in a folder are kept."""
    if not folder.resolve().is_relative_to(PRECOMPUTED.resolve()):
        return folder / NAME
    return home() / "marks" / f"{'-'.join(folder.resolve().relative_to(PRECOMPUTED.resolve()).parts)}.json"


def load_marks(folder: Path, mapper: str) -> Marks:
    """The marks of a mapper; none where there is no file, or one of another mapper."""
    try:
        data = json.loads(marks_path(folder).read_text(encoding="utf-8"))
        if data["mapper"] != mapper:
            return Marks(mapper)
        heads = tuple((int(layer), int(head)) for layer, head in data["heads"])
        return Marks(mapper, heads, Restored.from_json(data["gain"]) if data.get("gain") else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Marks(mapper)


def save_marks(folder: Path, marks: Marks) -> Path:
    """Write the marks, whole or not at all.

    Raises:
        InputError: when the file cannot be written.
    """
    data = {
        "mapper": marks.mapper,
        "heads": [list(head) for head in marks.heads],
        "gain": None if marks.gain is None else marks.gain.to_json(),
    }
    return write_text(json.dumps(data, allow_nan=False) + "\n", marks_path(folder))
