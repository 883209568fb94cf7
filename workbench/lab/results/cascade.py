"""From which uncertainty on the large model should take over: measured on held-out chats, beside the mapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, number

UNCALIBRATED = 2.5  # nats: shown as not calibrated wherever no measurement lies beside the mapper


@dataclass(frozen=True)
class Calibration:
    """The small model's uncertainty over its own answers.

    Attributes:
        uncertainty: mean entropy of each answer, nats a token.
        surprise: the large model's mean -log p of the same answers, nats a token.
        share: of answers that the large model is to take over.
        tokens: longest answer.
        provenance: where and when.
    """

    uncertainty: tuple[float, ...]
    surprise: tuple[float, ...]
    share: float
    tokens: int
    provenance: Provenance

    @property
    def threshold(self) -> float:
        """The uncertainty that `share` of the answers are above."""
        return float(np.quantile(self.uncertainty, 1 - self.share))

    @property
    def r(self) -> float:
        """Correlation of the small model's uncertainty with the large one's surprise: does it know when it is off?"""
        if len(self.uncertainty) < 3:
            return float("nan")
        return float(np.corrcoef(self.uncertainty, self.surprise)[0, 1])

    def sentence(self) -> str:
        """For the screen."""
        return (
            f"Calibrated on {len(self.uncertainty)} answers to held-out chats: {self.share:.0%} of them are above "
            f"{self.threshold:.2f} nats a token. Correlation with the large model's surprise: {self.r:.2f}."
        )

    def to_json(self) -> dict[str, Any]:
        """`threshold` and what it comes from."""
        return jsonable(
            {
                "threshold": self.threshold,
                "share": self.share,
                "n": len(self.uncertainty),
                "r": self.r,
                "tokens": self.tokens,
                "uncertainty": list(self.uncertainty),
                "surprise": list(self.surprise),
                "sentence": self.sentence(),
                "provenance": self.provenance.to_json(),
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_json`."""
        return cls(
            tuple(map(number, data["uncertainty"])),
            tuple(map(number, data["surprise"])),
            number(data["share"]),
            int(data["tokens"]),
            Provenance.from_json(data["provenance"]),
        )
