"""Uncertainty of paired comparisons: bootstrap intervals over documents, and the exact McNemar test.

Items of one document are alike, so documents are drawn with replacement, not items; all arms see the same draws.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import comb, nan

import numpy as np

from workbench.lab.results.figure import Figure

RESAMPLES = 2000


class Bootstrap:
    """95 % intervals of means and of ratios of means."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        """Args: names: the document of each item; seed: of the draws."""
        groups = [
            [i for i, name in enumerate(names) if name == document] for document in dict.fromkeys(names)
        ]
        draws = np.random.default_rng(seed).integers(len(groups), size=(RESAMPLES, len(groups)))
        weights = np.zeros((len(groups), len(names)))
        for row, members in enumerate(groups):
            weights[row, members] = 1.0
        counts = np.stack([(draws == group).sum(1) for group in range(len(groups))], axis=1) @ weights
        self._shares = counts / counts.sum(1, keepdims=True)  # (resamples, items)

    def mean(self, values: Sequence[float]) -> Figure:
        """The mean of one value an item."""
        array = np.asarray(values, dtype=float)
        return figure(float(array.mean()), self._shares @ array)

    def ratio(self, above: Sequence[float] | np.ndarray, below: Sequence[float] | np.ndarray) -> Figure:
        """mean(above) / mean(below); NaN where the denominator is 0."""
        top, bottom = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = (self._shares @ top) / (self._shares @ bottom)
            value = float(top.mean() / bottom.mean()) if bottom.mean() else nan
        return figure(value, draws)

    def gap(self, without: Sequence[float], mapped: Sequence[float], native: Sequence[float]) -> Figure:
        """(without - mapped) / (without - native) of the means."""
        return self.ratio(
            np.asarray(without) - np.asarray(mapped),
            np.asarray(without) - np.asarray(native),
        )


def figure(value: float, draws: np.ndarray) -> Figure:
    """A value with the middle 95 % of its draws; draws that are no number are left out."""
    kept = draws[np.isfinite(draws)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low, high = np.percentile(kept, [2.5, 97.5]) if kept.size else (nan, nan)
    return Figure(value, float(low), float(high))


def mcnemar(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided exact McNemar test: how surprising the split of the items on which two arms disagree is.

    Args:
        one: 1 or 0 of each item.
        other: the same of the other arm.

    Returns:
        The p-value, 1.0 where they never disagree.
    """
    only_one = sum(a > b for a, b in zip(one, other, strict=True))
    only_other = sum(a < b for a, b in zip(one, other, strict=True))
    n, least = only_one + only_other, min(only_one, only_other)
    if n == 0:
        return 1.0
    return min(1.0, 2 * sum(comb(n, i) for i in range(least + 1)) / 2**n)
