"""A number with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.lab.results.common import number


@dataclass(frozen=True)
class Figure:
    """A mean over texts with its 95 % bootstrap interval (documents resampled)."""

    value: float
    low: float
    high: float

    def to_json(self) -> list[float]:
        """[value, low, high]."""
        return [self.value, self.low, self.high]

    @classmethod
    def from_json(cls, values: Sequence[float | None]) -> Figure:
        """The inverse of `to_json`; null is NaN."""
        return cls(*map(number, values))
