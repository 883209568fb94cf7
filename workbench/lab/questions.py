"""A context that is handed over and the questions about it, in token ids; and what all kinds of questions are made with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.lab.corpus import encode
from workbench.lab.provenance import text_hash


@dataclass(frozen=True)
class Question:
    """One question about a context.

    Attributes:
        task: a key of `TASKS`.
        prefix: token ids between the context and a choice.
        choices: token ids of each choice; one only for following text.
        answer: index of the right choice.
        depth: where in the context the answer stands, 0 to 1; None where it is everywhere.
    """

    task: str
    prefix: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: int = 0
    depth: float | None = None


@dataclass(frozen=True)
class Context:
    """What is handed over, and what is asked about it.

    Attributes:
        document: name; intervals resample documents.
        ids: token ids, a special start token included where the family has one.
        questions: about it, of one or several tasks.
    """

    document: str
    ids: tuple[int, ...]
    questions: tuple[Question, ...]

    @property
    def sha256(self) -> str:
        """Of the context and all questions."""
        asked = [(q.task, q.prefix, q.choices, q.answer) for q in self.questions]
        return text_hash(json.dumps([self.ids, asked]))


def plain_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of text that continues something: no start token."""
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def start_ids(tokenizer: Any) -> tuple[int, ...]:
    """The start token, where the family puts one before every text."""
    bare, with_start = plain_ids(tokenizer, "a"), tuple(encode(tokenizer, "a"))
    return with_start[: len(with_start) - len(bare)]


def shuffled(
    task: str,
    prefix: tuple[int, ...],
    right: tuple[int, ...],
    wrong: Sequence[tuple[int, ...]],
    rng: np.random.Generator,
    depth: float | None = None,
) -> Question | None:
    """A question with the right choice at a drawn place; None when two choices are the same."""
    choices = [right, *wrong]
    if len(set(choices)) < len(choices) or not all(choices):
        return None
    order = rng.permutation(len(choices))
    return Question(task, prefix, tuple(choices[i] for i in order), int(np.flatnonzero(order == 0)[0]), depth)
