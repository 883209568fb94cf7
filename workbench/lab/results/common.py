"""How a job under way reports itself, and how numbers go to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Step:
    """A job that is under way.

    Attributes:
        fraction: done so far, 0 to 1.
        text: what is being done, for people.
        partial: what there is of the result already, or None.
    """

    fraction: float
    text: str
    partial: Any = None


def finish(stream: Iterator[Any], progress: Callable[[float, str], None] | None = None) -> Any:
    """Run a measuring generator to its end.

    Args:
        stream: yields `Step`s or partial results, and the result last.
        progress: called with (fraction, text) for every `Step`.

    Returns:
        The last item.
    """
    last = None
    for last in stream:
        if progress is not None and isinstance(last, Step):
            progress(last.fraction, last.text)
    return last


def jsonable(value: Any) -> Any:
    """The same in plain lists, dicts and numbers; NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def nan_mean(values: np.ndarray) -> float:
    """Mean of what is no NaN, NaN (without a warning) when nothing is left."""
    kept = values[~np.isnan(values)]
    return float(kept.mean()) if kept.size else math.nan


def mean(values: tuple[float, ...] | tuple[bool, ...]) -> float:
    """Mean, NaN of nothing."""
    return float(sum(values)) / len(values) if values else math.nan


def number(value: float | None) -> float:
    """A number out of JSON; null is NaN."""
    return math.nan if value is None else float(value)
