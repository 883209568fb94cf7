"""A conversation with its clock: what was said, by which weights, and when every piece of text came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable


@dataclass(frozen=True)
class RecordedTurn:
    """One turn of the script.

    Attributes:
        say: what the person said, "" for a turn that only switches.
        side: of the model that had the word.
        model: its name.
        how: where its context came from: "native", "mapped", "prefill" or "fallback".
        account: of the switch before this turn, as JSON; None when there was none.
        pieces: (milliseconds since the message was sent, text added), in order.
        tokens: of the answer.
        ms: milliseconds from sending to the last token.
        reused: tokens of the context that the model held already.
        native: tokens of the context that were run for the answer.
    """

    say: str
    side: str
    model: str
    how: str
    account: dict[str, Any] | None
    pieces: tuple[tuple[float, str], ...]
    tokens: int
    ms: float
    reused: int
    native: int

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(text for _, text in self.pieces)


@dataclass(frozen=True)
class Recording:
    """A conversation that was held by a script, with token times.

    Attributes:
        turns: in order.
        token_ids: of the whole conversation.
        sampling: settings of the answers.
        provenance: where and when.
    """

    turns: tuple[RecordedTurn, ...]
    token_ids: tuple[int, ...]
    sampling: dict[str, Any]
    provenance: Provenance

    def __post_init__(self) -> None:
        """Raise ValueError when the times of a turn do not grow."""
        for turn in self.turns:
            times = [time for time, _ in turn.pieces]
            if times != sorted(times) or (times and times[0] < 0):
                raise ValueError("The times of a recorded answer must grow.")

    @property
    def accounts(self) -> list[dict[str, Any]]:
        """Of all switches with something to hand over."""
        return [turn.account for turn in self.turns if turn.account and turn.account["tokens"]]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return jsonable(
            {
                "turns": [asdict(turn) for turn in self.turns],
                "token_ids": self.token_ids,
                "sampling": self.sampling,
                "provenance": self.provenance.to_json(),
                "units": {"pieces": "milliseconds since the message was sent"},
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recording:
        """The inverse of `to_json`."""
        turns = tuple(
            RecordedTurn(**{**turn, "pieces": tuple((float(at), str(text)) for at, text in turn["pieces"])})
            for turn in data["turns"]
        )
        return cls(
            turns, tuple(data["token_ids"]), dict(data["sampling"]), Provenance.from_json(data["provenance"])
        )
