"""Our own token loop: one token a step, so that a chat can stream, stop at once, and keep the exact ids.

`decode` picks a token from the logits and yields it *before* running it through the model. So when it ends,
the cache holds all ids but the last one that was yielded, and a stop costs nothing. Greedy decoding gives the
tokens of `model.generate(do_sample=False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from workbench.errors import InputError
from workbench.kv.forward import forward
from workbench.models.loading import LoadedModel

CHAT_REPETITION_PENALTY = 1.15  # small models repeat themselves for ever without one; a chat's default
HALF = "\ufffd"  # what tokenizers write for bytes that are no whole character (yet)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        greedy: take the most likely one; the rest is then without effect, but for the last two.
        temperature: logits are divided by it; above 0.
        top_k: only the k most likely tokens, 0 for all.
        top_p: only the smallest set of tokens that together have this probability.
        seed: the same seed and context give the same answer.
        max_new_tokens: longest answer.
        repetition_penalty: above 1, tokens that the context has already become less likely.
    """

    greedy: bool = True
    temperature: float = 0.7
    top_k: int = 50
    top_p: float = 0.95
    seed: int = 0
    max_new_tokens: int = 256
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        checks = {
            "temperature must be above 0 and at most 10": 0 < self.temperature <= 10,
            "top_k must be 0 (all) or more": self.top_k >= 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "seed must be between 0 and 2^63-1": 0 <= self.seed < 1 << 63,
            "max_new_tokens must be between 1 and 1,000,000": 1 <= self.max_new_tokens <= 1_000_000,
            "repetition_penalty must be between 0.1 and 10": 0.1 <= self.repetition_penalty <= 10,
        }
        for sentence, good in checks.items():
            if not good:
                raise InputError(f"Sampling: {sentence}.")


def decode(
    model: LoadedModel,
    logits: Tensor,
    cache: Cache,
    sampling: Sampling,
    should_stop: Callable[[], bool] | None = None,
    context: Sequence[int] = (),
    watch: Callable[[float], None] | None = None,
) -> Iterator[int]:
    """Yield the ids of an answer, one by one.

    Args:
        model: runs every token.
        logits: (1, vocab) after the last token of the context.
        cache: holds the context; gets every yielded id but the last one.
        sampling: how to choose, and how many at most.
        should_stop: asked before each step after the first.
        context: ids that a repetition penalty looks at, besides the answer's own.
        watch: is told the entropy of the model's distribution (nats) before every token.

    Yields:
        Token ids that have *not* been run yet. A stop id is yielded too, and is then the last.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    seen: Tensor | None = None
    if sampling.repetition_penalty != 1.0:
        # Marks instead of a list: a step costs the same however long the context is.
        seen = marks(logits.shape[-1], context)
    for step in range(sampling.max_new_tokens):
        if watch is not None:
            watch(entropy(logits[-1]))
        token = choose(logits[-1], sampling, generator, seen)
        yield token
        if token in model.stop_ids or step + 1 == sampling.max_new_tokens or (should_stop and should_stop()):
            return
        if seen is not None:
            seen[token] = True
        last = forward(model.model, [token], cache)
        assert last is not None  # one is kept
        logits = last


def entropy(logits: Tensor) -> float:
    """Entropy in nats of softmax(logits (vocab,)): how unsure the model is of its next token."""
    log_p = logits.float().log_softmax(-1)
    return float(-(log_p.exp() * log_p).sum())


def marks(vocab: int, ids: Sequence[int]) -> Tensor:
    """(vocab,) true at the given ids."""
    found = torch.zeros(vocab, dtype=torch.bool)
    found[torch.tensor(list(ids), dtype=torch.long)] = True
    return found


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator, seen: Tensor | None = None) -> int:
    """One id from logits (vocab,): penalty, temperature, top-k, top-p, draw; as transformers orders them.

    `seen` marks the ids that a repetition penalty makes less likely (see `marks`).
    """
    logits = logits.float().cpu()
    if seen is not None:
        factor = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)
    if sampling.greedy:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    values, order = logits.sort(descending=True)
    if sampling.top_k:
        values, order = values[: sampling.top_k], order[: sampling.top_k]
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.where(before < sampling.top_p, 0.0)  # the first one always stays
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


class TextStream:
    """Ids in, text out, but only whole characters: one emoji may be spread over several tokens.

    A tail of bytes that is no whole character is held back until it is. What comes out, joined, is what the
    tokenizer makes of all ids at once; special tokens give no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # some tokenizers need the ids before to know whether a space belongs between
        self._done = 0

    def push(self, token: int) -> str:
        """The text that this id completes, "" when it ends inside a character."""
        self._ids.append(token)
        text = self._rest()
        if text.endswith(HALF):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back; half characters come out as U+FFFD."""
        text = self._rest()
        self._start, self._done = self._done, len(self._ids)
        return text

    def _rest(self) -> str:
        """Text of the ids that have not come out yet."""
        whole = self._text(self._ids[self._start :])
        return whole[len(self._text(self._ids[self._start : self._done])) :]

    def _text(self, ids: list[int]) -> str:
        return plain_text(self._tokenizer, ids)


def plain_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids as it is, without special tokens."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
