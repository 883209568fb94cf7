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

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.lab import recall
from workbench.lab.corpus import Document, documents, encode
from workbench.lab.questions import Context, Question, plain_ids, shuffled, start_ids
from workbench.lab.results.tasks import TASKS

CONTEXT, SENTENCE, FOLLOWING = 112, 12, 28  # tokens of a passage, of a candidate sentence, of following text
DEFAULT_ITEMS = 300

_COMMON = frozenset({
    "this", "that", "these", "those", "with", "from", "they", "them", "their", "there", "then", "than", "were",
    "have", "been", "when", "what", "which", "will", "would", "could", "should", "shall", "such", "some",
    "into", "only", "very", "more", "most", "much", "many", "must", "make", "made", "about", "after", "also",
    "other", "over", "upon", "your", "yours", "where", "while", "being", "because", "before", "between",
    "through", "does", "done", "each", "even", "ever", "every", "like", "well", "here", "just", "same", "both",
    "though", "under", "used", "using", "without", "within",
})  # fmt: skip
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(‘“]?[A-Z])")


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
        passages = ((place.document, _before(tokenizer, place)) for place in cut)
        found += recall.in_texts(tokenizer, passages, limit, rng)
    if "multi_turn_recall" in wanted and getattr(tokenizer, "chat_template", None):
        found += recall.in_chats(tokenizer, limit, rng)
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


def _before(tokenizer: Any, place: _Cut) -> str:
    """What stands before a place, `CONTEXT` tokens of it."""
    return str(
        tokenizer.decode(
            list(plain_ids(tokenizer, place.before)[-CONTEXT:]), clean_up_tokenization_spaces=False
        )
    )


def _passages(
    tokenizer: Any, cut: Sequence[_Cut], names: Sequence[str], limit: int, rng: np.random.Generator
) -> list[Context]:
    start = start_ids(tokenizer)
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
    return shuffled("next_sentence", (), following[i][:SENTENCE], wrong, rng)


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
    return shuffled(
        "last_word",
        prefix,
        plain_ids(tokenizer, f" {word[0]}"),
        [plain_ids(tokenizer, f" {w}") for w in wrong],
        rng,
    )


def _content_words(text: str) -> set[str]:
    return {word for word in re.findall(r"\b[a-z]{4,}\b", text) if word not in _COMMON}
