"""What repeated handoffs cost: distance to a conversation that never switched, turn by turn, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, number
from workbench.lab.results.figure import Figure


@dataclass(frozen=True)
class DriftTurn:
    """One turn after a handoff, over all conversations.

    Attributes:
        n: handoffs so far, this turn's included; the turn before the first one is not listed.
        side: which model speaks.
        kl: KL(the model that read everything ‖ the same model after these handoffs) on the turn's answer, nats.
        top1: share of its positions with the same likeliest token.
        ce: cross entropy of the answer, nats per token.
        ce_never: the same for the model that read everything.
        kl_once: KL when everything before was read again and only this turn's handoff was mapped: one switch.
        recall: share of the facts told in the first turn that are chosen right (chance one in four).
        recall_never: the same for the model that read everything.
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
    recall: Figure
    recall_never: Figure
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
            "recall": self.recall.to_json(),
            "recall_never": self.recall_never.to_json(),
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
            recall=Figure.from_json(data["recall"]),
            recall_never=Figure.from_json(data["recall_never"]),
            new=number(data["new"]),
            tokens=number(data["tokens"]),
            conversations=data["conversations"],
        )


@dataclass(frozen=True)
class Drift:
    """Alternating handoffs in conversations.

    Attributes:
        turns: one a handoff, in order.
        bar: how much larger than one switch's KL a turn's may be.
        chats: name and SHA-256 of every conversation.
        seed: of the intervals.
        provenance: where and when.
    """

    turns: tuple[DriftTurn, ...]
    bar: float
    chats: tuple[dict[str, str], ...]
    seed: int
    provenance: Provenance

    @property
    def ratio(self) -> float:
        """KL after the last handoff over the KL that one switch alone has at the same place."""
        last = self.turns[-1]
        return last.kl.value / last.kl_once.value if last.kl_once.value else math.nan

    @property
    def ratio_first(self) -> float:
        """KL after the last handoff over the KL after the first one (of the other direction when n is even)."""
        first = self.turns[0].kl.value
        return self.turns[-1].kl.value / first if first else math.nan

    @property
    def re_prefill_after(self) -> int | None:
        """The first handoff after which the KL is above `bar` times that of one switch; None when none is."""
        for turn in self.turns:
            if turn.kl.value > self.bar * turn.kl_once.value:
                return turn.n
        return None

    def sentence(self) -> str:
        """The recommendation, in words."""
        times = len(self.turns)
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
                "ratio": self.ratio,
                "ratio_first": self.ratio_first,
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
            number(data["bar"]),
            tuple(dict(chat) for chat in data["chats"]),
            data["seed"],
            Provenance.from_json(data["provenance"]),
        )
