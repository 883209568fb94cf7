"""How one answer comes about: run what the context still lacks, decode, and keep cache, ids and text in step.

    prompt ids ─▶ reused | run in chunks ─▶ one token a step ─▶ `Message` grows

Between two chunks and between two tokens `host.lane` is free and the stop flag is asked. Whatever ends the
answer, a stop, a closed iterator, an error, the cache stands for exactly the ids that `held` names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from torch import Tensor

from workbench.chat.account import Account
from workbench.chat.decode import HALF, Sampling, TextStream, decode
from workbench.chat.handoff import PREFILL_CHUNK
from workbench.chat.held import Held
from workbench.errors import Cancelled
from workbench.kv.cache import length
from workbench.kv.forward import forward
from workbench.models.loading import LoadedModel
from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
FULL = "The answer ends here because the context is full."


@dataclass
class Message:
    """One turn.

    Attributes:
        role: "user" or "assistant".
        text: what is shown; whole characters only.
        token_ids: of an answer, exactly as generated, without the stop id.
        side: "small" or "large", of an answer.
        model: name of the weights that wrote it.
        how: where its context came from: "native", "mapped", "prefill" or "fallback".
        account: of the switch just before it.
        stopped: the person stopped it.
        notice: why it ended early otherwise.
        reused: tokens of the context that its model held already.
        native: tokens of the context that were run for it.
        rerun: tokens that had been held but did not fit any more (undo, edit, a template that rewrites), and
            went.
        ms: milliseconds from asking to the last token.
        tokens_per_second: while decoding.
        uncertainty: mean entropy of the model's own next-token distributions over this answer, in nats.
        replaced: an answer of the other model that this one stands for, because that one was too unsure.
        doubt: the mean entropy of that replaced answer.
    """

    role: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    side: str | None = None
    model: str | None = None
    how: str | None = None
    account: Account | None = None
    stopped: bool = False
    notice: str = ""
    reused: int = 0
    native: int = 0
    rerun: int = 0
    ms: float = 0.0
    tokens_per_second: float | None = None
    uncertainty: float | None = None
    replaced: str = ""
    doubt: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return data | {
            "token_ids": list(self.token_ids),
            "account": self.account.to_json() if self.account else None,
        }


@dataclass(frozen=True)
class Job:
    """What is needed to answer.

    Attributes:
        host: its lane is held for each step.
        model: the one that answers.
        held: its cache of this conversation.
        prompt: ids of the context, up to where the answer begins.
        room: most tokens that an answer can have.
        sampling: how to choose tokens.
        should_stop: asked at every chunk and token.
    """

    host: PairHost
    model: LoadedModel
    held: Held
    prompt: list[int]
    room: int
    sampling: Sampling
    should_stop: ShouldStop = None

    def stopping(self) -> bool:
        """Whether the person has asked to stop."""
        return self.should_stop is not None and self.should_stop()


def stream(answer: Message, job: Job) -> Generator[Message, None, None]:
    """Grow `answer`; yields it before anything is computed, after every token, and when it is complete.

    A stop is no error: the answer then ends as it is, marked. Errors come through after the cache was mended.
    """
    started = decoding = perf_counter()
    text = TextStream(job.model.tokenizer)
    complete = False
    try:
        yield answer
        had = len(job.held.ids)
        answer.rerun = had - job.held.fit(job.prompt)
        job.held.cut(len(job.prompt) - 1)  # the last token must run for its logits
        answer.reused, answer.native = len(job.held.ids), len(job.prompt) - len(job.held.ids)
        logits = _prefill(job)
        answer.how = job.held.how
        decoding = perf_counter()
        for token in _tokens(answer, job, logits):
            answer.text += text.push(token)
            answer.ms = (perf_counter() - started) * 1e3
            yield answer
        complete = True
        if len(answer.token_ids) == job.room < job.sampling.max_new_tokens:
            answer.notice = FULL
    except Cancelled:
        pass
    finally:
        answer.stopped = not complete
        answer.text += text.flush().rstrip(HALF)
        answer.how = answer.how or job.held.how
        now = perf_counter()
        answer.ms = (now - started) * 1e3
        if answer.token_ids and now > decoding:
            answer.tokens_per_second = len(answer.token_ids) / (now - decoding)
    yield answer


def _prefill(job: Job) -> Tensor:
    """Run the rest of the prompt; a stop keeps the chunks that are done. Returns logits (1, vocab)."""
    held, prompt = job.held, job.prompt
    logits: Tensor | None = None
    while len(held.ids) < len(prompt):
        start = len(held.ids)
        stop = min(start + PREFILL_CHUNK, len(prompt))
        with job.host.holding_lane(job.should_stop):
            if job.stopping():
                raise Cancelled("Stopped.")
            try:
                logits = forward(
                    job.model.model, prompt[start:stop], held.cache, keep=int(stop == len(prompt))
                )
            except BaseException:
                held.cut(start)
                raise
            held.covers(prompt[:stop])
    assert logits is not None  # at least the last token was run
    return logits


def _tokens(answer: Message, job: Job, logits: Tensor) -> Iterator[int]:
    """Decode; keeps `answer.token_ids` and what the cache covers in step. Ends before the stop id."""
    held, most = job.held, min(job.room, job.sampling.max_new_tokens)
    sampling = replace(job.sampling, max_new_tokens=most)
    seen: list[float] = []
    steps = decode(job.model, logits, held.cache, sampling, context=job.prompt, watch=seen.append)
    while True:
        done = len(held.ids)
        with job.host.holding_lane(job.should_stop):
            try:
                token = next(steps, None)
            except BaseException:
                held.cut(done)
                raise
            # Only what the step ran is added: listing all ids again at every token would be quadratic.
            for at in range(len(held.ids) - len(job.prompt), length(held.cache) - len(job.prompt)):
                held.ids.append(answer.token_ids[at])
        if token is None or token in job.model.stop_ids:
            break
        answer.token_ids.append(token)
        answer.uncertainty = sum(seen) / len(seen)
        yield token
        if len(answer.token_ids) < most and job.stopping():
            raise Cancelled("Stopped.")
