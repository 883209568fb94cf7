"""Side by side: one context continued from the mapped cache, from a true prefill, and by the source alone.

All columns decode greedily and advance one token a step. Beside its own text each column reads the
*prefill's* tokens too (teacher-forced), so that its distance from the true prefill can be told token by
token on equal terms:

    kl[i] = KL(target on its own cache ‖ column), both after the context and the prefill's first i tokens

As long as a column says what the prefill says, its own text and the forced one are the same computation; at
the first difference the cache is copied and the two go separate ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache

from workbench.chat.account import Account
from workbench.chat.decode import TextStream
from workbench.chat.handoff import hand_over, prefill
from workbench.chat.template import clean, render
from workbench.errors import Cancelled, InputError
from workbench.kv.cache import copy, new_cache
from workbench.kv.forward import forward
from workbench.lab.corpus import encode
from workbench.lab.likelihood import kl_divergence, same_argmax
from workbench.lab.provenance import models_of, trace
from workbench.lab.results.comparison import COLUMNS, Comparison

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
DEFAULT_TOKENS = 48


def stream(
    host: PairHost,
    direction: str,
    text: str,
    tokens: int = DEFAULT_TOKENS,
    anchors: int | None = None,
    hold_back: int | None = None,
    should_stop: ShouldStop = None,
    order: Sequence[str] = COLUMNS,
    chat: bool = False,
) -> Iterator[Comparison]:
    """Decode the columns together.

    Args:
        host: the pair.
        direction: "up" or "down".
        text: the context.
        tokens: at most so many per column.
        anchors: of the handoff, None for the mapper's own choice.
        hold_back: of the handoff, None for the mapper's own choice.
        should_stop: asked before every token and inside the long computations.
        order: in which the columns are computed; the results do not depend on it.
        chat: take the text for a person's message and let the models answer it.

    Yields:
        What there is so far, once a token; the last one has `done` set.

    Raises:
        InputError: for an empty text, too few or too many tokens, before anything is computed.
        Cancelled: when asked to stop.
    """
    source, target = models_of(host, direction)
    ids = context_ids(target.tokenizer, text, chat)
    _check(ids, tokens, min(source.spec.max_positions, target.spec.max_positions))
    mapper, _ = host.mapper(direction)
    provenance = trace(host, direction, len(ids), [("context", text)])

    with host.holding_lane(should_stop):
        source_cache = new_cache(source.spec.layers, len(ids) + tokens)
        source_logits = forward(source.model, ids, source_cache, chunk=512, should_stop=should_stop)
        columns: dict[str, _Column] = {}
        accounts: dict[str, Account] = {}
        for name in order:
            if name == "source":
                columns[name] = _Column(source, copy(source_cache), source_logits)
                continue
            cache = new_cache(target.spec.layers, len(ids) + tokens)
            if name == "mapped":
                logits, accounts[name] = hand_over(
                    ids, source_cache, target, cache, mapper, source, anchors, hold_back, should_stop
                )
            else:
                logits, accounts[name] = prefill(ids, target, cache, source.name, should_stop=should_stop)
            columns[name] = _Column(target, cache, logits)

    account = replace(
        accounts["mapped"], prefill_ms=accounts["prefill"].ms["total"], prefill_source="measured"
    ).to_json()
    kl: dict[str, tuple[float, ...]] = {name: () for name in COLUMNS if name != "prefill"}
    top1: dict[str, tuple[bool, ...]] = {name: () for name in kl}
    reference = columns["prefill"]

    def state(done: bool) -> Comparison:
        return Comparison(
            context=text,
            context_tokens=len(ids),
            names={name: columns[name].model.name for name in COLUMNS},
            token_ids={name: tuple(columns[name].ids) for name in COLUMNS},
            pieces={name: tuple(columns[name].pieces) for name in COLUMNS},
            kl=dict(kl),
            top1=dict(top1),
            finished={name: columns[name].finished for name in COLUMNS},
            done=done,
            account=account,
            provenance=provenance,
        )

    for step in range(tokens):
        if should_stop and should_stop():
            raise Cancelled("The comparison was stopped.")
        if all(column.finished for column in columns.values()):
            break
        with host.holding_lane(should_stop):
            spoken = None if reference.finished else int(reference.logits.argmax())
            if spoken is not None:
                for name in kl:
                    kl[name] += (float(kl_divergence(reference.logits, columns[name].forced)),)
                    top1[name] += (bool(same_argmax(reference.logits, columns[name].forced)),)
            last = step == tokens - 1
            for name in order:
                columns[name].advance(spoken, last)
        if not last:
            yield state(done=False)
    for column in columns.values():
        column.flush()
    yield state(done=True)


def context_ids(tokenizer: Any, text: str, chat: bool = False) -> list[int]:
    """Token ids of the context, as plain text or as a message that waits for an answer; [] for no text."""
    if not text.strip():
        return []
    return (
        render(tokenizer, [_Said(clean(text))], generation_prompt=True) if chat else encode(tokenizer, text)
    )


@dataclass
class _Said:
    """A person's message, as the chat template wants it."""

    text: str
    role: str = "user"
    token_ids: list[int] = field(default_factory=list)


class _Column:
    """One model on one cache: its own greedy text, and its predictions along the reference's text."""

    def __init__(self, model: LoadedModel, cache: Cache, logits: Tensor | None) -> None:
        assert logits is not None
        self.model, self.logits, self.forced = model, logits, logits
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.finished = False
        self._cache = cache
        self._forced_cache: Cache | None = None  # None as long as the own text is the reference's
        self._text = TextStream(model.tokenizer)

    def advance(self, spoken: int | None, last: bool) -> None:
        """Take one step on both texts.

        Args:
            spoken: the reference's token of this step, None when it has ended.
            last: no further step will follow, so nothing needs to be predicted.
        """
        own = None if self.finished else int(self.logits.argmax())
        ends = spoken is None or spoken in self.model.stop_ids
        if own != spoken and self._forced_cache is None and not (ends or last):
            self._forced_cache = copy(self._cache)
        if own is not None:
            self.ids.append(own)
            self.finished = own in self.model.stop_ids
            self.pieces.append("" if self.finished else self._text.push(own))
            if not (self.finished or last):
                self.logits = _next(self.model, own, self._cache)
        if not (ends or last):
            assert spoken is not None
            if self._forced_cache is None:
                self.forced = self.logits
            else:
                self.forced = _next(self.model, spoken, self._forced_cache)

    def flush(self) -> None:
        """Show what is left of a character that was cut off."""
        rest = self._text.flush()
        if rest and self.pieces:
            self.pieces[-1] += rest


def _next(model: LoadedModel, token: int, cache: Cache) -> Tensor:
    logits = forward(model.model, [token], cache)
    assert logits is not None
    return logits


def _check(ids: Sequence[int], tokens: int, limit: int) -> None:
    """Refuse before anything is computed.

    Raises:
        InputError: naming what is wrong.
    """
    if not ids:
        raise InputError("The text is empty.", "Write or choose one.")
    if tokens < 1:
        raise InputError("At least one token must be asked for.")
    if len(ids) + tokens > limit:
        raise InputError(
            f"The text has {len(ids):,} tokens, and with {tokens:,} to follow that is beyond the {limit:,} "
            "that both models can read.",
            "Shorten it.",
        )
