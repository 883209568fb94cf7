"""A number with its interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A mean over texts with its 95 % bootstrap interval (documents resampled)."""

    value: float
    low: float
    high: float
