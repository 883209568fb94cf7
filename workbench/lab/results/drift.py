"""What repeated handoffs cost: distance to a conversation that never switched, turn by turn, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, number
from workbench.lab.results.figure import Figure


@dataclass(frozen=True)
class DriftTurn:
    """One turn, over all conversations.

    Attributes:
        n: its number, from 1; a handoff precedes every turn but the first.
        side: which model speaks.
        kl: KL(the model that read everything ‖ the same model after these handoffs) on the turn's answer, nats.
        top1: share of its positions with the same likeliest token.
        ce: cross entropy of the answer, nats per token.
        ce_never: the same for the model that read everything.
        kl_once: KL when everything before was read again and only this turn's handoff was mapped: one switch.
        new: tokens that were mapped in this handoff, on average; everything else was held already.
        tokens: of the context, on average.
        conversations: how many reached this turn.
    """

    n: int
    side: str
    kl: Figure
    top1: Figure
    ce: float
    ce_never: float
    kl_once: Figure
    new: float
    tokens: float
    conversations: int

    def to_json(self) -> dict[str, Any]:
        """Means as plain numbers, intervals beside them."""
        return {
            "n": self.n,
            "side": self.side,
            "kl": self.kl.value,
            "top1": self.top1.value,
            "ci": {"kl": [self.kl.low, self.kl.high], "top1": [self.top1.low, self.top1.high]},
            "ce": self.ce,
            "ce_never": self.ce_never,
            "kl_once": self.kl_once.value,
            "kl_once_ci": [self.kl_once.low, self.kl_once.high],
            "new": self.new,
            "tokens": self.tokens,
            "conversations": self.conversations,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DriftTurn:
        """The inverse of `to_json`."""
        return cls(
            n=data["n"],
            side=data["side"],
            kl=Figure(number(data["kl"]), *map(number, data["ci"]["kl"])),
            top1=Figure(number(data["top1"]), *map(number, data["ci"]["top1"])),
            ce=number(data["ce"]),
            ce_never=number(data["ce_never"]),
            kl_once=Figure(number(data["kl_once"]), *map(number, data["kl_once_ci"])),
            new=number(data["new"]),
            tokens=number(data["tokens"]),
            conversations=data["conversations"],
        )


@dataclass(frozen=True)
class Drift:
    """Alternating handoffs in conversations.

    Attributes:
        turns: from the first on; the first is before any handoff.
        recall: share of the facts told in the first turn that are still chosen right at the end: "never" (the model
            that read everything), "mapped" (after all handoffs); {} when not measured.
        bar: how much larger than one switch's KL a turn's may be.
        chats: name and SHA-256 of every conversation.
        seed: of the intervals.
        provenance: where and when.
    """

    turns: tuple[DriftTurn, ...]
    recall: dict[str, Figure] = field(default_factory=dict)
    bar: float = 2.0
    chats: tuple[dict[str, str], ...] = ()
    seed: int = 0
    provenance: Provenance = field(default=None)  # type: ignore[assignment]

    @property
    def switched(self) -> tuple[DriftTurn, ...]:
        """The turns after a handoff."""
        return tuple(turn for turn in self.turns if turn.n > 1)

    @property
    def ratio(self) -> float:
        """KL of the last turn over the KL that one switch alone has there; NaN without a handoff."""
        if not self.switched:
            return math.nan
        last = self.switched[-1]
        return last.kl.value / last.kl_once.value if last.kl_once.value else math.nan

    @property
    def re_prefill_after(self) -> int | None:
        """After how many switches to read everything again: the first at which the KL is above `bar` times that of one
        switch; None when that never happened."""
        for turn in self.switched:
            if turn.kl.value > self.bar * turn.kl_once.value:
                return turn.n - 1
        return None

    def sentence(self) -> str:
        """The recommendation, in words."""
        if not self.switched:
            return "No handoff was measured."
        times = len(self.switched)
        after = self.re_prefill_after
        if after is None:
            return (
                f"After {times} switches the distance is {self.ratio:.2f} times that of one switch: nothing here says "
                "that everything should be read again."
            )
        return (
            f"From switch {after} on the distance is more than {self.bar:g} times that of one switch: read everything "
            f"again then (after {times} it is {self.ratio:.2f} times)."
        )

    def to_json(self) -> dict[str, Any]:
        """`turns`, and the recommendation."""
        return jsonable(
            {
                "turns": [turn.to_json() for turn in self.turns],
                "recall": {name: [f.value, f.low, f.high] for name, f in self.recall.items()},
                "ratio": self.ratio,
                "bar": self.bar,
                "re_prefill_after": self.re_prefill_after,
                "recommendation": self.sentence(),
                "chats": list(self.chats),
                "seed": self.seed,
                "provenance": self.provenance.to_json(),
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Drift:
        """The inverse of `to_json`."""
        return cls(
            tuple(DriftTurn.from_json(turn) for turn in data["turns"]),
            {name: Figure(*map(number, values)) for name, values in data["recall"].items()},
            number(data["bar"]),
            tuple(dict(chat) for chat in data["chats"]),
            data["seed"],
            Provenance.from_json(data["provenance"]),
        )
