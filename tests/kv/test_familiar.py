"""Familiar ids: the fewest that leave no more than the share, counted without the piece that is judged."""

from typing import Any

import pytest

from workbench.kv.familiar import familiar_ids


def letters(text: str, **_: Any) -> dict[str, list[int]]:
    """A tokenizer: a letter is a token."""
    return {"input_ids": [ord(letter) for letter in text]}


TEXT = "a" * 50 + "b" * 30 + "c" * 15 + "d" * 4 + "e"


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, ""), (0.01, "abcd"), (0.05, "abc"), (0.2, "ab"), (0.5, "a"), (0.99, "a")]
)
def test_the_most_frequent_ids_are_familiar(share: float, expected: str) -> None:
    ids = letters(TEXT)["input_ids"]
    found, left = familiar_ids(letters, [TEXT] * 10, [ids], share)
    assert "".join(map(chr, found)) == expected
    assert left <= share and (not share or left == sum(token not in found for token in ids) / len(ids))


def test_where_all_known_ids_leave_too_much_they_are_all_familiar() -> None:
    """What stands in the judged piece alone counts for nothing."""
    found, left = familiar_ids(letters, ["aab" * 20 + "z" * 30], [letters("z" * 30)["input_ids"]], 0.1)
    assert (found, left) == (tuple(map(ord, "azb")), 1.0)
