"""Does a conversation that changes models again and again drift away? Alternating handoffs over many turns.

    turn     0        1            2            3
    side     small ─▶ large    ─▶  small    ─▶  large …
    maps     –        turn 0       turn 1       turn 2      each handoff maps only what is new to the other side

Answers are given (teacher-forced), so that every turn's distributions can be compared with those of the same model
that read everything itself. That is the conversation that never switched *and* the one that reads everything again
at each switch: with the same words both have the same cache. Beside it stands *one* switch at the same place:
everything before was read natively by the other side, and only this handoff is mapped. What a long chain of handoffs
adds is the difference of the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from transformers import Cache

from workbench.chat.handoff import hand_over
from workbench.errors import Cancelled, InputError
from workbench.kv.cache import copy, length, new_cache, truncate
from workbench.kv.forward import forward
from workbench.lab.corpus import TEXT_FOLDER
from workbench.lab.intervals import Bootstrap
from workbench.lab.likelihood import cross_entropy, kl_divergence, same_argmax
from workbench.lab.provenance import models_of, text_hash, trace
from workbench.lab.questions import Question, plain_ids
from workbench.lab.recall import told_facts
from workbench.lab.results.common import Step
from workbench.lab.results.drift import Drift, DriftTurn
from workbench.lab.rows import Plan, Span
from workbench.models.catalog import other_side, source_side

if TYPE_CHECKING:
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
DEFAULT_TURNS, DEFAULT_CHATS, ANSWER = 10, 12, 48  # handoffs, conversations, tokens of an answer
BAR = 2.0  # a turn may be so many times as far as one switch


@dataclass(frozen=True)
class Turn:
    """Where a turn stands in the conversation's ids: answer from `start` to `end`, the next turn from `stop` on."""

    start: int
    end: int
    stop: int


@dataclass(frozen=True)
class Chat:
    """A conversation with given answers.

    Attributes:
        name: of the held-out chats it is made of.
        ids: all token ids.
        turns: where each turn stands.
        questions: about facts that the first turn tells.
    """

    name: str
    ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]


def stream(
    host: PairHost,
    direction: str = "up",
    turns: int = DEFAULT_TURNS,
    limit: int = DEFAULT_CHATS,
    seed: int = 0,
    chats: Sequence[Sequence[dict[str, str]]] | None = None,
    should_stop: ShouldStop = None,
) -> Iterator[Step | Drift]:
    """Measure alternating handoffs.

    Args:
        host: the pair, with mappers of both directions.
        direction: of the first handoff.
        turns: handoffs a conversation.
        limit: conversations.
        seed: of facts and intervals.
        chats: messages of each conversation, None for the held-out ones, joined until they are long enough.
        should_stop: asked before every turn.

    Yields:
        A `Step` a conversation; the `Drift` last.

    Raises:
        InputError: no turns, or conversations that are too short.
        Cancelled: when asked to stop.
    """
    if turns < 1 or limit < 1:
        raise InputError("At least one handoff and one conversation are needed.")
    models_of(host, direction)
    tokenizer = host.model(source_side(direction)).tokenizer
    raw = [list(chat) for chat in chats] if chats is not None else _held_out()
    made = [conversation(tokenizer, raw, number, turns + 1, seed) for number in range(min(limit, len(raw)))]
    longest = max(len(chat.ids) for chat in made) + 64
    if longest > host.max_positions():
        raise InputError(f"{turns} turns have up to {longest:,} tokens, more than both models can read.")
    found: list[list[dict[str, float]]] = []
    for number, chat in enumerate(made, start=1):
        found.append(list(_Run(host, direction, should_stop).turns(chat)))
        yield Step(number / len(made), f"conversation {number} of {len(made)}")
    yield _result(host, direction, made, found, seed)


def conversation(
    tokenizer: Any, raw: Sequence[Sequence[dict[str, str]]], first: int, turns: int, seed: int
) -> Chat:
    """Held-out chats from the `first` on, one after the other, until there are enough turns; four facts in the first.

    Raises:
        InputError: the template rewrites earlier turns, so that there is no fixed text to force.
    """
    rng = np.random.default_rng([seed, first])
    told, questions = told_facts(tokenizer, rng)
    pairs = [
        (chat[i]["content"], chat[i + 1]["content"])
        for k in range(len(raw))
        for chat in [raw[(first + k) % len(raw)]]
        for i in range(0, len(chat) - 1, 2)
    ][:turns]
    if len(pairs) < turns:
        raise InputError(f"The chats have {len(pairs)} turns together; {turns} are needed.")
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    places, done = [], ""
    for number, (question, answer) in enumerate(pairs):
        short = tokenizer.decode(
            list(plain_ids(tokenizer, answer)[:ANSWER]), clean_up_tokenization_spaces=False
        ).strip()
        messages.append({"role": "user", "content": f"{told} {question}" if number == 0 else question})
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        messages.append({"role": "assistant", "content": short})
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        if not asked.startswith(done) or not whole.startswith(asked + short):
            raise InputError(
                "This model's chat template rewrites earlier turns, so turns cannot be compared."
            )
        ids += plain_ids(tokenizer, asked[len(done) :])
        start = len(ids)
        ids += plain_ids(tokenizer, short)
        end = len(ids)
        ids += plain_ids(tokenizer, whole[len(asked) + len(short) :])
        places.append(Turn(start, end, len(ids)))
        done = whole
    return Chat(f"chat-{first + 1}", tuple(ids), tuple(places), tuple(questions))


def _held_out() -> list[list[dict[str, str]]]:
    try:
        lines = (TEXT_FOLDER / "chats-heldout.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        raise InputError("There are no held-out chats.") from None
    return [json.loads(line)["messages"] for line in lines]


class _Run:
    """One conversation: what each side holds, natively and through the mappers."""

    def __init__(self, host: PairHost, direction: str, should_stop: ShouldStop) -> None:
        self.host, self.should_stop = host, should_stop
        self.first = source_side(direction)
        self.native = {side: new_cache(host.model(side).spec.layers) for side in ("small", "large")}
        self.held = {side: new_cache(host.model(side).spec.layers) for side in ("small", "large")}

    def turns(self, chat: Chat) -> Iterator[dict[str, float]]:
        """Figures of every turn after a handoff."""
        before, side = 0, self.first
        for number, turn in enumerate(chat.turns):
            if self.should_stop and self.should_stop():
                raise Cancelled("The measurement was stopped.")
            with self.host.holding_lane(self.should_stop):
                once, new = None, 0
                if number:
                    context = chat.ids[:before]
                    once = new_cache(self.host.model(side).spec.layers)
                    self._switch(context, side, self.native[other_side(side)], once)
                    new = self._switch(context, side, self.held[other_side(side)], self.held[side])
                own = self._read(side, chat, before, turn, self.held[side])
                for each in ("small", "large"):
                    logits = self._read(each, chat, before, turn, self.native[each])
                    if each == side:
                        never = logits
                if once is not None:
                    alone = self._read(side, chat, before, turn, once)
                    yield self._figures(chat, turn, side, own, never, alone, new)
            before, side = turn.stop, other_side(side)

    def _switch(self, context: Sequence[int], side: str, source_cache: Cache, cache: Cache) -> int:
        """Hand over to `side`; returns how many tokens were mapped."""
        direction = "up" if side == "large" else "down"
        mapper, _ = self.host.mapper(direction)
        source, target = self.host.model(other_side(side)), self.host.model(side)
        _, account = hand_over(
            context, source_cache, target, cache, mapper, source, should_stop=self.should_stop
        )
        return account.mapped

    def _read(self, side: str, chat: Chat, before: int, turn: Turn, cache: Cache) -> Tensor:
        """Run a turn; logits (answer, vocab) that predict the answer's tokens."""
        logits = forward(
            self.host.model(side).model, chat.ids[before : turn.stop], cache, keep=turn.stop - turn.start + 1
        )
        assert logits is not None
        return logits[: turn.end - turn.start]

    def _figures(
        self, chat: Chat, turn: Turn, side: str, own: Tensor, never: Tensor, alone: Tensor, new: int
    ) -> dict[str, float]:
        answer = chat.ids[turn.start : turn.end]
        model = self.host.model(side)
        spans = [Span((*q.prefix, *c), len(q.prefix)) for q in chat.questions for c in q.choices]
        plan = Plan(chat.ids[turn.stop - 1], spans)
        right = {}
        for name, cache in (("recall", self.held[side]), ("recall_never", self.native[side])):
            cut = copy(cache)
            truncate(cut, length(cut) - 1)
            scored = [entry.mean for entry in plan.run(model, cut)]
            hits = 0
            for question in chat.questions:
                values, scored = scored[: len(question.choices)], scored[len(question.choices) :]
                hits += max(range(len(values)), key=values.__getitem__) == question.answer
            right[name] = hits / max(1, len(chat.questions))
        return {
            "kl": float(kl_divergence(never, own).mean()),
            "top1": float(same_argmax(never, own).double().mean()),
            "ce": float(cross_entropy(own, answer).mean()),
            "ce_never": float(cross_entropy(never, answer).mean()),
            "kl_once": float(kl_divergence(never, alone).mean()),
            "new": float(new),
            "tokens": float(turn.stop),
            **right,
        }


def _result(
    host: PairHost,
    direction: str,
    made: Sequence[Chat],
    found: Sequence[Sequence[dict[str, float]]],
    seed: int,
) -> Drift:
    boot = Bootstrap([chat.name for chat in made], seed)
    turns, side = [], source_side(direction)
    for place in range(len(found[0])):
        side = other_side(side)
        column = {key: [rows[place][key] for rows in found] for key in found[0][0]}
        mean = {key: float(np.mean(values)) for key, values in column.items()}
        turns.append(
            DriftTurn(
                n=place + 1,
                side=side,
                kl=boot.mean(column["kl"]),
                top1=boot.mean(column["top1"]),
                ce=mean["ce"],
                ce_never=mean["ce_never"],
                kl_once=boot.mean(column["kl_once"]),
                recall=boot.mean(column["recall"]),
                recall_never=boot.mean(column["recall_never"]),
                new=mean["new"],
                tokens=mean["tokens"],
                conversations=len(made),
            )
        )
    return Drift(
        turns=tuple(turns),
        bar=BAR,
        chats=tuple({"name": chat.name, "sha256": text_hash(chat.ids)} for chat in made),
        seed=seed,
        provenance=trace(
            host, direction, sum(len(chat.ids) for chat in made), [(chat.name, chat.ids) for chat in made]
        ),
    )
