"""What a click on one head opens: where its error lies, by direction, by position and by token, and what it is made of.

All arrays begin with (target layers, KV heads). `Directions` are sorted by what is read: for keys the eigenvectors of
the second moment of the head group's queries, for values those of its slice of the output projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.lab.results.common import jsonable, number


@dataclass(frozen=True)
class TokenHit:
    """A token at which a head's output is far from what it should be.

    Attributes:
        text: name of the text.
        position: of the token in the text.
        before: what stands before it, at most a few words.
        token: its own text.
        after: what follows.
        error: squared norm of the error that the head adds to the residual stream, over that of the stream.
    """

    text: str
    position: int
    before: str
    token: str
    after: str
    error: float


@dataclass(frozen=True, eq=False)
class HeadDetails:
    """Everything about single heads that one streaming pass gives.

    Attributes:
        key_read: (L, H, d) share of the queries' energy along each direction, largest first.
        key_error: (L, H, d) share of the key error's energy along the same directions.
        value_read: (L, H, d) share of the output projection's energy along each direction, largest first.
        value_error: (L, H, d) share of the value error's energy along the same directions.
        edges: positions where a bin begins, and where the last one ends.
        bin_tokens: tokens measured in each bin.
        key_position: (L, H, bins) mean squared error of keys in a bin over the head's variance; NaN without tokens.
        value_position: the same for values.
        key_sources: (L, H, source layers) share of the squared norm of the head's key map that each one has.
        value_sources: the same for values.
        tokens: [layer][head] -> the tokens that suffer most, worst first.
    """

    key_read: np.ndarray
    key_error: np.ndarray
    value_read: np.ndarray
    value_error: np.ndarray
    edges: tuple[int, ...]
    bin_tokens: tuple[int, ...]
    key_position: np.ndarray
    value_position: np.ndarray
    key_sources: np.ndarray
    value_sources: np.ndarray
    tokens: tuple[tuple[tuple[TokenHit, ...], ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Nested lists with four significant digits, axes and units beside them; texts are listed once."""
        arrays = {name: _rounded(getattr(self, name)) for name in ARRAYS}
        tokens = [
            [[[hit.text, hit.position, hit.before, hit.token, hit.after, _digits(hit.error)] for hit in head]
             for head in layer]
            for layer in self.tokens
        ]  # fmt: skip
        return jsonable(
            {
                **arrays,
                "edges": list(self.edges),
                "bin_tokens": list(self.bin_tokens),
                "tokens": tokens,
                "axes": {name: ["layer", "kv_head", last] for name, last in ARRAYS.items()},
                "units": {name: "share of the variance" if "position" in name else "share" for name in ARRAYS},
                "token_columns": ["text", "position", "before", "token", "after", "error"],
            }
        )  # fmt: skip

    def of(self, layer: int, head: int) -> dict[str, Any]:
        """One head's part of `to_json`."""
        data = self.to_json()
        columns = data["token_columns"]
        return {
            "layer": layer,
            "head": head,
            **{name: data[name][layer][head] for name in ARRAYS},
            "edges": data["edges"],
            "tokens": [dict(zip(columns, hit, strict=True)) for hit in data["tokens"][layer][head]],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadDetails:
        """The inverse of `to_json`, but for the rounding."""
        arrays = {
            name: np.array(
                [[[number(x) for x in row] for row in layer] for layer in data[name]], dtype=np.float64
            )
            for name in ARRAYS
        }
        tokens = tuple(
            tuple(
                tuple(TokenHit(hit[0], hit[1], hit[2], hit[3], hit[4], number(hit[5])) for hit in head)
                for head in layer
            )
            for layer in data["tokens"]
        )
        return cls(**arrays, edges=tuple(data["edges"]), bin_tokens=tuple(data["bin_tokens"]), tokens=tokens)


ARRAYS = {
    "key_read": "direction",
    "key_error": "direction",
    "value_read": "direction",
    "value_error": "direction",
    "key_position": "bin",
    "value_position": "bin",
    "key_sources": "source_layer",
    "value_sources": "source_layer",
}
"""Array of `HeadDetails` -> the name of its last axis."""


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(array: np.ndarray) -> list[Any]:
    return [[[_digits(x) for x in row] for row in layer] for layer in array.tolist()]
