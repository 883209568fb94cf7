"""Facts that are told and asked for later: four of four kinds in a text, or in two turns of a chat.

A fact's value is drawn among words of its kind that the text around it does not have; the wrong choices are three
others, as likely for who has not read the context.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.lab.corpus import TEXT_FOLDER
from workbench.lab.questions import Context, Question, plain_ids, shuffled, start_ids

TALK = 80  # tokens of small talk between the telling and the switch

_WORDS = (
    "silver", "river", "window", "garden", "winter", "music", "paper", "mountain", "bridge", "summer", "forest",
    "island", "engine", "castle", "desert", "mirror", "ocean", "planet",
)  # fmt: skip
_NAMES = (
    "Peter", "Anna", "Max", "Lucy", "Tom", "Emma", "Jack", "Sarah", "David", "Maria", "Henry", "Alice", "Paul",
    "Julia", "Oscar", "Laura", "Simon", "Helen", "Martin", "Rose",
)  # fmt: skip
_CITIES = (
    "Paris",
    "London",
    "Berlin",
    "Rome",
    "Boston",
    "Chicago",
    "Madrid",
    "Vienna",
    "Tokyo",
    "Sydney",
    "Dublin",
)
_COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "white", "black", "pink", "brown")
_FOODS = ("rice", "bread", "fish", "cheese", "soup", "pasta", "chicken", "potatoes", "beans", "eggs")
_JOBS = ("teacher", "doctor", "farmer", "pilot", "nurse", "baker", "lawyer", "painter", "singer", "driver")
_ANIMALS = ("dog", "cat", "horse", "lion", "bear", "wolf", "elephant", "tiger", "rabbit", "snake")


@dataclass(frozen=True)
class _Fact:
    """What is told, and how it is asked for: in a text by its own beginning, in a chat by a question."""

    told: str
    answer: str
    values: tuple[str, ...]
    question: str = ""


_PLANTED = (
    _Fact("The secret word is {}.", "\n\nThe secret word is", _WORDS),
    _Fact("The letter was written in {}.", "\n\nThe letter was written in", _CITIES),
    _Fact("The old door was painted {}.", "\n\nThe old door was painted", _COLOURS),
    _Fact("The golden key was given to {}.", "\n\nThe golden key was given to", _NAMES),
    _Fact("The guests were served {}.", "\n\nThe guests were served", _FOODS),
    _Fact("The animal in the cage was a {}.", "\n\nThe animal in the cage was a", _ANIMALS),
)
_TOLD = (
    _Fact("My name is {}.", "Your name is", _NAMES, "What is my name?"),
    _Fact("I live in {}.", "You live in", _CITIES, "Where do I live?"),
    _Fact("My favorite color is {}.", "Your favorite color is", _COLOURS, "What is my favorite color?"),
    _Fact("My favorite food is {}.", "Your favorite food is", _FOODS, "What is my favorite food?"),
    _Fact("I work as a {}.", "You work as a", _JOBS, "What is my job?"),
    _Fact(
        "My favorite animal is the {}.",
        "Your favorite animal is the",
        _ANIMALS,
        "What is my favorite animal?",
    ),
)


def in_texts(
    tokenizer: Any, passages: Iterable[tuple[str, str]], limit: int, rng: np.random.Generator
) -> list[Context]:
    """Four facts between the words of a passage, at depths of about .2, .4, .6 and .8 (`fact_recall`).

    Args:
        tokenizer: of the pair.
        passages: (name of the document, text); as many are taken as are needed.
        limit: questions in all.
        rng: draws facts, values and the order of the choices.
    """
    start, found, asked = start_ids(tokenizer), [], 0
    for document, text in passages:
        if asked >= limit:
            break
        words = text.split()
        parts = [" ".join(words[len(words) * i // 5 : len(words) * (i + 1) // 5]) for i in range(5)]
        ids, depths = [*start, *plain_ids(tokenizer, parts[0])], []
        facts = _drawn(_PLANTED, text, rng)
        for (fact, values), part in zip(facts, parts[1:], strict=True):
            ids += plain_ids(tokenizer, f" {fact.told.format(values[0])}")
            depths.append(len(ids))
            ids += plain_ids(tokenizer, f" {part}")
        prompts = [fact.answer for fact, _ in facts]
        at = [depth / len(ids) for depth in depths]
        questions = _ask(tokenizer, "fact_recall", prompts, facts, at, rng)[
            : min(limit - asked, _each(limit))
        ]
        asked += len(questions)
        found.append(Context(document, tuple(ids), tuple(questions)))
    return found


def in_chats(tokenizer: Any, limit: int, rng: np.random.Generator) -> list[Context]:
    """Four facts told in two turns of a chat, then small talk; asked in a turn of its own (`multi_turn_recall`).

    Args:
        tokenizer: of the pair, with a chat template.
        limit: questions in all.
        rng: draws facts, values and the order of the choices.
    """
    talks = small_talk(tokenizer)
    found, asked = [], 0
    for number in range(limit):
        if asked >= limit:
            break
        document, question, answer = talks[number % len(talks)]
        facts = _drawn(_TOLD, question + answer, rng)
        told = [fact.told.format(values[0]) for fact, values in facts]
        messages = [
            {"role": "user", "content": f"Hello! {told[0]} {told[1]}"},
            {"role": "assistant", "content": "Nice to meet you! I will remember that."},
            {"role": "user", "content": f"{told[2]} {told[3]} {question}"},
            {"role": "assistant", "content": answer},
        ]
        context = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = plain_ids(tokenizer, context)
        depths = [
            len(plain_ids(tokenizer, context[: context.index(fact) + len(fact)])) / len(ids) for fact in told
        ]
        prompts = [_asked(tokenizer, messages, fact) for fact, _ in facts]
        questions = _ask(tokenizer, "multi_turn_recall", prompts, facts, depths, rng)
        questions = questions[: min(limit - asked, _each(limit))]
        asked += len(questions)
        found.append(Context(document, ids, tuple(questions)))
    return found


def small_talk(tokenizer: Any) -> list[tuple[str, str, str]]:
    """(name, question, shortened answer) of each held-out chat's first turn.

    Raises:
        InputError: the held-out chats are missing.
    """
    try:
        lines = (TEXT_FOLDER / "chats-heldout.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        raise InputError("There are no held-out chats.") from None
    found = []
    for number, line in enumerate(lines, start=1):
        first, answer = (message["content"] for message in json.loads(line)["messages"][:2])
        short = tokenizer.decode(
            list(plain_ids(tokenizer, answer)[:TALK]), clean_up_tokenization_spaces=False
        )
        end = max(short.rfind(mark) for mark in ".!?") + 1
        found.append((f"chat-{number}", first, short[:end] if end > 40 else short))
    return found


def _each(limit: int) -> int:
    """Questions a context: two contexts at least, since one needs the other as its wrong document."""
    return max(1, min(4, limit // 2))


def told_facts(tokenizer: Any, rng: np.random.Generator) -> tuple[str, list[Question]]:
    """Four facts to tell in one message, and a question about each in a turn of its own (`multi_turn_recall`)."""
    facts = _drawn(_TOLD, "", rng)
    told = " ".join(fact.told.format(values[0]) for fact, values in facts)
    messages = [{"role": "user", "content": told}, {"role": "assistant", "content": "Yes."}]
    prompts = [_asked(tokenizer, messages, fact) for fact, _ in facts]
    return told, _ask(tokenizer, "multi_turn_recall", prompts, facts, [0.0] * 4, rng)


def _asked(tokenizer: Any, messages: Sequence[dict[str, str]], fact: _Fact) -> str:
    """What a template puts after these messages for a question about one fact, with the answer's beginning."""
    context = tokenizer.apply_chat_template(list(messages), tokenize=False)
    question = {"role": "user", "content": fact.question}
    whole = tokenizer.apply_chat_template([*messages, question], tokenize=False, add_generation_prompt=True)
    return f"{whole.removeprefix(context)}{fact.answer}"


def _drawn(kinds: Sequence[_Fact], text: str, rng: np.random.Generator) -> list[tuple[_Fact, list[str]]]:
    """Four facts of four kinds, each with its value and three others of the kind; none of them stands in the text."""
    lower = text.lower()
    found = []
    for index in rng.choice(len(kinds), 4, replace=False):
        fact = kinds[int(index)]
        free = [value for value in fact.values if value.lower() not in lower]
        found.append(
            (
                fact,
                [
                    str(value)
                    for value in rng.choice(free if len(free) > 3 else fact.values, 4, replace=False)
                ],
            )
        )
    return found


def _ask(
    tokenizer: Any,
    task: str,
    prompts: Sequence[str],
    facts: Sequence[tuple[_Fact, Sequence[str]]],
    depths: Sequence[float],
    rng: np.random.Generator,
) -> list[Question]:
    """One question a fact; the wrong choices are of the same kind, and as likely for who has not read the context."""
    found = []
    for prompt, (_, values), depth in zip(prompts, facts, depths, strict=True):
        right, *wrong = (plain_ids(tokenizer, f" {value}") for value in values)
        question = shuffled(task, plain_ids(tokenizer, prompt), right, wrong, rng, depth)
        if question is not None:
            found.append(question)
    return found
