"""Correlation of numbers and of their ranks, along the last axis."""

from __future__ import annotations

import math

import numpy as np


def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """r of every row; NaN where one of the two does not vary."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    size = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.where(size > 1e-12, (x * y).sum(-1) / np.maximum(size, 1e-12), math.nan)


def ranks(values: np.ndarray) -> np.ndarray:
    """0, 1, … in ascending order within every row; equal values share the mean of their places."""
    below = (values[..., None, :] < values[..., :, None]).sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).sum(-1)
    return below + (equal - 1) / 2


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two arrays, whatever their shape; NaN when one of them does not vary."""
    return float(pearson(ranks(a.ravel()), ranks(b.ravel())))
