"""Which diagnostic foretells what is kept? Saved head metrics against saved retention, one dot a mapper. No torch.

    folder of a mapper: heads.json + quality.json -> (mean of each metric, what was kept) -> r over the folders

What is kept is the mean retention over the informative tasks where tasks were measured, else the share of the context's
worth in likelihood (`gap_recovered`); only folders of one kind are compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.lab.provenance import load_result

LOWER_IS_BETTER = ("k_error_in_q", "v_error_in_o", "attention_kl")


@dataclass(frozen=True)
class Dot:
    """One mapper: its name, direction, the mean of each head metric, and what it keeps."""

    name: str
    direction: str
    metrics: dict[str, float]
    kept: float


def dots(folders: Sequence[Path]) -> tuple[str, list[Dot]]:
    """Read folders that hold `heads.json` and `quality.json`.

    Returns:
        ("retention" or "gap_recovered", a dot a folder).

    Raises:
        InputError: fewer than three, or one that lacks a result.
    """
    if len(folders) < 3:
        raise InputError("At least three mappers are needed for a correlation.", "Give more folders.")
    read = [(folder, load_result(folder / "heads.json", "heads"), load_result(folder / "quality.json", "quality"))
            for folder in folders]  # fmt: skip
    by_tasks = all(quality.scores is not None and quality.scores.informative for _, _, quality in read)
    found = []
    for folder, heads, quality in read:
        metrics = {
            name: float(np.nanmean(np.asarray(values, dtype=float))) for name, values in heads.metrics.items()
        }
        kept = quality.scores.mean_retention if by_tasks else quality.settings[0].gap_recovered.value
        found.append(Dot(folder.name, quality.provenance.direction, metrics, float(kept)))
    return ("retention" if by_tasks else "gap_recovered"), found


def correlations(found: Sequence[Dot]) -> dict[str, float]:
    """r of every metric that all dots have against what is kept, the strongest first; NaN where nothing varies."""
    names = [name for name in found[0].metrics if all(name in dot.metrics for dot in found)]
    kept = np.array([dot.kept for dot in found])
    r = {}
    for name in names:
        values = np.array([dot.metrics[name] for dot in found])
        good = np.isfinite(values) & np.isfinite(kept)
        varies = good.sum() > 2 and values[good].std() > 0 and kept[good].std() > 0
        r[name] = float(np.corrcoef(values[good], kept[good])[0, 1]) if varies else math.nan
    return dict(sorted(r.items(), key=lambda item: -abs(item[1]) if math.isfinite(item[1]) else 1.0))


def summary(folders: Sequence[Path]) -> dict[str, Any]:
    """All of it as plain JSON types."""
    against, found = dots(folders)
    return {
        "against": against,
        "n": len(found),
        "r": correlations(found),
        "dots": [
            {"name": dot.name, "direction": dot.direction, "kept": dot.kept, **dot.metrics} for dot in found
        ],
    }
