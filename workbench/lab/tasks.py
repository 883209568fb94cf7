"""Questions that need a context, made with a fixed seed from the held-out texts: no hub, no downloads.

    context (given to the source model, then handed over) | question (run natively, over each arm's cache)

    next_sentence      which of four sentences comes next? The others open other documents' passages.
    last_word          which of four words of the context ends the passage?
    fact_recall        four facts of four kinds stand in the context at four depths; which of four values is one's?
    multi_turn_recall  the same in a chat: told to the source model, asked of the target after the switch
    following_text     the passage's next tokens: cross entropy, and how often the likeliest token is right

All but the last are choices: the one whose tokens have the highest mean log-likelihood is the answer, so chance is
one in four. The wrong choices are as likely without the context as the right one, or nearly so: a model that cannot
see the context should be at chance. Whether it is, is measured; a task where it is not says so.

Nothing here is used in fitting or healing: texts are `assets/text/heldout` and `chats-heldout.jsonl`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.lab.corpus import TEXT_FOLDER, Document, documents, encode
from workbench.lab.provenance import text_hash
from workbench.lab.results.tasks import TASKS

CONTEXT, SENTENCE, FOLLOWING = 112, 12, 28  # tokens of a passage, of a candidate sentence, of following text
TALK = 80  # tokens of small talk between the telling and the switch
DEFAULT_ITEMS = 300

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
_COMMON = frozenset({
    "this", "that", "these", "those", "with", "from", "they", "them", "their", "there", "then", "than", "were",
    "have", "been", "when", "what", "which", "will", "would", "could", "should", "shall", "such", "some",
    "into", "only", "very", "more", "most", "much", "many", "must", "make", "made", "about", "after", "also",
    "other", "over", "upon", "your", "yours", "where", "while", "being", "because", "before", "between",
    "through", "does", "done", "each", "even", "ever", "every", "like", "well", "here", "just", "same", "both",
    "though", "under", "used", "using", "without", "within",
})  # fmt: skip
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(‘“]?[A-Z])")


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


def build(
    tokenizer: Any,
    names: Sequence[str] | None = None,
    limit: int = DEFAULT_ITEMS,
    seed: int = 0,
    texts: Sequence[Document] | None = None,
) -> list[Context]:
    """Contexts with questions.

    Args:
        tokenizer: of the pair; it must have a chat template for `multi_turn_recall`.
        names: keys of `TASKS`, None for all.
        limit: questions a task.
        seed: of every choice that is drawn.
        texts: other texts than the held-out ones (tests).

    Raises:
        InputError: an unknown task, or texts that give no question.
    """
    wanted = list(names) if names is not None else list(TASKS)
    for name in wanted:
        if name not in TASKS:
            raise InputError(f"There is no task {name[:40]!r}.", f"There are: {', '.join(TASKS)}.")
    rng = np.random.default_rng(seed)
    texts = list(texts) if texts is not None else documents("heldout")
    cut = _cut(tokenizer, texts)
    found: list[Context] = []
    of_text = [name for name in wanted if name in ("next_sentence", "last_word", "following_text")]
    if of_text:
        found += _passages(tokenizer, cut, of_text, limit, rng)
    if "fact_recall" in wanted:
        found += _facts(tokenizer, cut, limit, rng)
    if "multi_turn_recall" in wanted and getattr(tokenizer, "chat_template", None):
        found += _chats(tokenizer, cut, limit, rng)
    if not any(context.questions for context in found):
        raise InputError("These texts give no question.", "Give longer texts with whole sentences.")
    return found


# --- passages ---


@dataclass(frozen=True)
class _Cut:
    """A place between two sentences: what stands before it and what follows, as text."""

    document: str
    before: str
    after: str


def _cut(tokenizer: Any, texts: Sequence[Document]) -> list[_Cut]:
    """Places at least `FOLLOWING` tokens apart, with enough before and after, from every document in turn."""
    lists = []
    for text in texts:
        sentences = _SENTENCE_END.split(" ".join(text.text.split()))
        lengths = [len(encode(tokenizer, sentence)) for sentence in sentences]
        places, last = [], 0
        for i in range(1, len(sentences)):
            done = sum(lengths[:i])
            enough = done >= CONTEXT + 8 and sum(lengths[i:]) >= FOLLOWING + 8 and lengths[i] >= SENTENCE
            if enough and done - last >= FOLLOWING + 8:
                before = " ".join(sentences[:i])[-CONTEXT * 8 :]
                places.append(_Cut(text.name, before, " ".join(sentences[i:])[: FOLLOWING * 8]))
                last = done
        lists.append(places)
    longest = max(map(len, lists), default=0)
    found = [places[i] for i in range(longest) for places in lists if i < len(places)]
    if len({place.document for place in found}) < 4:
        raise InputError(
            "The texts are too few or too short for tasks.", "Give at least four longer documents."
        )
    return found


def plain_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of text that continues something: no start token."""
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _start(tokenizer: Any) -> tuple[int, ...]:
    """The start token, where the family puts one before every text."""
    bare, with_start = plain_ids(tokenizer, "a"), tuple(encode(tokenizer, "a"))
    return with_start[: len(with_start) - len(bare)]


def _passages(
    tokenizer: Any, cut: Sequence[_Cut], names: Sequence[str], limit: int, rng: np.random.Generator
) -> list[Context]:
    start = _start(tokenizer)
    following = [plain_ids(tokenizer, " " + place.after)[:FOLLOWING] for place in cut]
    counts = dict.fromkeys(names, 0)
    whole: list[tuple[str, tuple[int, ...], list[Question]]] = []
    partial: list[tuple[str, tuple[int, ...], list[Question]]] = []
    for i, place in enumerate(cut):
        if len(whole) >= limit:
            break
        ids = plain_ids(tokenizer, place.before)[-CONTEXT:]
        questions = []
        for name in names:
            if name == "next_sentence":
                question = _next_sentence(cut, following, i, rng)
            elif name == "last_word":
                question = _last_word(tokenizer, ids, following[i], rng)
            else:
                question = Question(name, (), (following[i],))
            if question is not None:
                questions.append(question)
        # A context that serves all tasks costs as much as one that serves one, so those come first.
        of = whole if len(questions) == len(names) else partial
        of.append((place.document, (*start, *ids), questions))
    found = []
    for document, ids, questions in [*whole, *partial]:
        kept = [question for question in questions if counts[question.task] < limit]
        for question in kept:
            counts[question.task] += 1
        if kept:
            found.append(Context(document, ids, tuple(kept)))
    return found


def _next_sentence(
    cut: Sequence[_Cut], following: Sequence[tuple[int, ...]], i: int, rng: np.random.Generator
) -> Question | None:
    """The right opening among three of other documents, all equally long: one of the same kind of text, two of others.

    With three of the same kind a small model is near chance even with the context.
    """
    kind, own = _kind(cut[i].document), cut[i].document
    others = [j for j, place in enumerate(cut) if place.document != own]
    alike = [j for j in others if cut[j].document.startswith(kind)]
    unlike = [j for j in others if not cut[j].document.startswith(kind)]
    if alike and len(unlike) >= 2:
        picked = [int(rng.choice(alike)), *map(int, rng.choice(unlike, 2, replace=False))]
    else:
        picked = [int(j) for j in rng.choice(others, 3, replace=False)]
    wrong = [following[j][:SENTENCE] for j in picked]
    return _shuffled("next_sentence", (), following[i][:SENTENCE], wrong, rng)


def _kind(document: str) -> str:
    """ "moby-dick" of "moby-dick-3": texts of one source are alike in style."""
    return re.sub(r"-\d+$", "", document)


def _last_word(
    tokenizer: Any, ids: Sequence[int], following: Sequence[int], rng: np.random.Generator
) -> Question | None:
    """The following text up to its first word that the context has too, against three other words of the context."""
    text = tokenizer.decode(list(following), clean_up_tokenization_spaces=False)
    context = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    known = sorted(_content_words(context))
    ends = [m for m in re.finditer(r"(?<= )[a-z]{4,}(?=[ .,;:!?])", text) if m[0] in known and m.start() > 8]
    if not ends or len(known) < 4:
        return None
    word = ends[0]  # the shorter what stands before it, the more the context matters
    wrong = list(rng.choice([w for w in known if w != word[0]], 3, replace=False))
    prefix = plain_ids(tokenizer, text[: word.start() - 1])
    return _shuffled(
        "last_word",
        prefix,
        plain_ids(tokenizer, f" {word[0]}"),
        [plain_ids(tokenizer, f" {w}") for w in wrong],
        rng,
    )


def _content_words(text: str) -> set[str]:
    return {word for word in re.findall(r"\b[a-z]{4,}\b", text) if word not in _COMMON}


def _shuffled(
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


# --- recall ---


def _facts(tokenizer: Any, cut: Sequence[_Cut], limit: int, rng: np.random.Generator) -> list[Context]:
    """Four facts between the sentences of a passage, at depths of about .2, .4, .6 and .8."""
    start, found, asked = _start(tokenizer), [], 0
    for place in cut:
        if asked >= limit:
            break
        text = tokenizer.decode(
            list(plain_ids(tokenizer, place.before)[-CONTEXT:]), clean_up_tokenization_spaces=False
        )
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
        found.append(Context(place.document, tuple(ids), tuple(questions)))
    return found


def _chats(tokenizer: Any, cut: Sequence[_Cut], limit: int, rng: np.random.Generator) -> list[Context]:
    """Four facts told in two turns of a chat, then small talk of a held-out chat; asked in a turn of its own."""
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
        question = _shuffled(task, plain_ids(tokenizer, prompt), right, wrong, rng, depth)
        if question is not None:
            found.append(question)
    return found
