"""The side-by-side decode as numbers: three columns, and their distance from the true prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.lab.provenance import Provenance
from workbench.lab.results.common import jsonable, mean, number

COLUMNS = ("mapped", "prefill", "source")
"""The columns of the side-by-side decode; `prefill` is the reference that the others are held against."""


@dataclass(frozen=True)
class Comparison:
    """One context continued greedily three ways, and how far each is from the target's true prefill.

    Attributes:
        context: the text that all three continue.
        context_tokens: its length in tokens.
        names: per column, the name of the model that writes it.
        token_ids: per column, the tokens that it wrote; a stop token is the last of them.
        pieces: per column, the text of each token; a character of several tokens stands at its last one.
        kl: per column but `prefill`, KL(true prefill ‖ column) for each token of the prefill's continuation,
            teacher-forced: all read the prefill's tokens, whatever they would have said themselves.
        top1: per column but `prefill`, whether the argmax at those positions is the prefill's token.
        finished: per column, whether it met a stop token.
        done: False while the columns are still growing.
        account: of the handoff, with the measured prefill.
        provenance: where and when.
    """

    context: str
    context_tokens: int
    names: dict[str, str]
    token_ids: dict[str, tuple[int, ...]]
    pieces: dict[str, tuple[str, ...]]
    kl: dict[str, tuple[float, ...]]
    top1: dict[str, tuple[bool, ...]]
    finished: dict[str, bool]
    done: bool
    account: dict[str, Any]
    provenance: Provenance

    @property
    def texts(self) -> dict[str, str]:
        """Per column, the text so far."""
        return {column: "".join(pieces) for column, pieces in self.pieces.items()}

    def first_divergence(self, column: str = "mapped") -> int | None:
        """Index of the first token that is not the prefill's, None as long as the two agree."""
        differing = self.differing(column)
        return differing[0] if differing else None

    def differing(self, column: str) -> tuple[int, ...]:
        """Positions in a column's own text whose token is not the prefill's token of that position."""
        own, reference = self.token_ids[column], self.token_ids["prefill"]
        return tuple(
            i
            for i, token in enumerate(own)
            if (i >= len(reference) and self.done) or reference[i : i + 1] not in ((), (token,))
        )

    def disagreeing(self, column: str) -> tuple[int, ...]:
        """Positions of the prefill's text where a column that read the same tokens would say another one."""
        return tuple(i for i, same in enumerate(self.top1[column]) if not same)

    def mean_kl(self, column: str = "mapped") -> float:
        """Mean of `kl` over the tokens, NaN when there are none."""
        return mean(self.kl[column])

    def top1_share(self, column: str = "mapped") -> float:
        """Share of tokens with the same argmax, NaN when there are none."""
        return mean(self.top1[column])

    def to_json(self) -> dict[str, Any]:
        """All of it; `kl`, `top1` and `first_divergence` are the mapped column's."""
        return jsonable(
            {
                "kl": self.mean_kl(),
                "top1": self.top1_share(),
                "first_divergence": self.first_divergence(),
                "texts": self.texts,
                "source_alone": {
                    "kl": self.mean_kl("source"),
                    "top1": self.top1_share("source"),
                    "first_divergence": self.first_divergence("source"),
                },
                "per_token": {"kl": self.kl, "top1": self.top1},
                "differing": {column: self.differing(column) for column in self.kl},
                "context": self.context,
                "context_tokens": self.context_tokens,
                "names": self.names,
                "token_ids": self.token_ids,
                "pieces": self.pieces,
                "finished": self.finished,
                "account": self.account,
                "provenance": self.provenance.to_json(),
                "units": {"kl": "nats per token", "top1": "share"},
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """The inverse of `to_json`; a loaded comparison is complete."""
        per_token = data["per_token"]
        return cls(
            context=data["context"],
            context_tokens=data["context_tokens"],
            names=dict(data["names"]),
            token_ids={column: tuple(ids) for column, ids in data["token_ids"].items()},
            pieces={column: tuple(pieces) for column, pieces in data["pieces"].items()},
            kl={
                column: tuple(number(value) for value in values) for column, values in per_token["kl"].items()
            },
            top1={column: tuple(map(bool, values)) for column, values in per_token["top1"].items()},
            finished=dict(data["finished"]),
            done=True,
            account=dict(data["account"]),
            provenance=Provenance.from_json(data["provenance"]),
        )
