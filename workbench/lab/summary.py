"""The few figures that say what a pair is worth in one direction: for the gallery, the report and the stage.

Everything here is read from saved results; nothing is computed with a model and no torch is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.lab.provenance import Provenance, load_precomputed
from workbench.lab.results import KINDS


@dataclass(frozen=True)
class Run:
    """All saved results of a pair in one direction.

    Attributes:
        pair: name in the catalog.
        title: for people.
        direction: "up" or "down".
        results: kind -> result, in the order of `KINDS`.
        manifest: of the mapper, {} when there is none.
        problems: a sentence for every saved result that could not be read.
    """

    pair: str
    title: str
    direction: str
    results: dict[str, Any]
    manifest: dict[str, Any]
    problems: tuple[str, ...] = ()

    @property
    def provenance(self) -> Provenance | None:
        """Of the newest result, None when there is none."""
        known = [result.provenance for result in self.results.values()]
        return max(known, key=lambda origin: origin.measured, default=None)


@dataclass(frozen=True)
class KeyFigure:
    """One number for people.

    Attributes:
        term: the word of `workbench.words.TERMS` that explains it.
        label: what stands under the number.
        value: the number itself, NaN when it is unknown.
        shown: the number with its unit.
        better: "high" or "low".
    """

    term: str
    label: str
    value: float
    shown: str
    better: str


def gather(pair: str, title: str, direction: str, folder: Path) -> Run:
    """Reads everything that was saved beside a mapper.

    Args:
        pair: name in the catalog.
        title: for people.
        direction: "up" or "down".
        folder: of the mapper.
    """
    results, problems = {}, []
    for kind in KINDS:
        try:
            found = load_precomputed(pair, direction, kind, folder)
        except WorkbenchError as error:
            problems.append(str(error))
            continue
        if found is not None:
            results[kind] = found
    return Run(pair, title, direction, results, read_manifest(folder), tuple(problems))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The mapper's manifest, {} when there is none that can be read."""
    try:
        data = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def key_figures(results: Mapping[str, Any]) -> list[KeyFigure]:
    """The figures that decide: how much faster, how close, how much of the context survives.

    Args:
        results: kind -> result; what is missing is left out.
    """
    found = []
    bench, quality, heads = (results.get(kind) for kind in ("latency", "quality", "heads"))
    if bench is not None and bench.cells:
        cell = bench.cells[-1]
        found.append(
            KeyFigure("prefill", f"faster than reading {cell.tokens:,} tokens again", cell.ratio,
                      f"{cell.ratio:.1f}×", "high")
        )  # fmt: skip
    if quality is not None:
        main = quality.settings[0]
        mapped = main.arms["mapped"]
        found.append(
            KeyFigure("KL", "KL to the true cache", mapped.kl.value, f"{mapped.kl.value:.3f}", "low")
        )
        found.append(
            KeyFigure("gap recovered", "gap recovered", main.gap_recovered.value,
                      f"{main.gap_recovered.value:.0%}", "high")
        )  # fmt: skip
        found.append(
            KeyFigure("top-1", "same next token", mapped.top1.value, f"{mapped.top1.value:.0%}", "high")
        )
    if heads is not None and "cosine" in heads.metrics:
        from workbench.lab.results.common import nan_mean

        mean = nan_mean(heads.metrics["cosine"])
        found.append(KeyFigure("attention-output cosine", "attention-output cosine, mean", mean,
                               f"{mean:.3f}", "high"))  # fmt: skip
    return [figure for figure in found if math.isfinite(figure.value)]
