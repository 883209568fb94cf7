"""Calibrates the cascade: how unsure is the small model over its own answers to held-out chats?

The threshold is the uncertainty that a chosen share of the answers exceeds. Whether it means anything is measured
beside it: the large model reads the same answers, and its surprise should grow with the small model's uncertainty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from workbench.chat.conversation import Conversation
from workbench.chat.decode import CHAT_REPETITION_PENALTY, Sampling
from workbench.errors import Cancelled, InputError
from workbench.kv.cache import new_cache
from workbench.kv.forward import forward
from workbench.lab.corpus import TEXT_FOLDER
from workbench.lab.likelihood import cross_entropy
from workbench.lab.provenance import trace
from workbench.lab.results.cascade import Calibration
from workbench.lab.results.common import Step

if TYPE_CHECKING:
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
DEFAULT_CHATS, DEFAULT_TOKENS, DEFAULT_SHARE = 32, 48, 0.3


def stream(
    host: PairHost,
    limit: int = DEFAULT_CHATS,
    tokens: int = DEFAULT_TOKENS,
    share: float = DEFAULT_SHARE,
    questions: Sequence[str] | None = None,
    should_stop: ShouldStop = None,
) -> Iterator[Step | Calibration]:
    """Let the small model answer the first question of held-out chats.

    Args:
        host: the pair.
        limit: answers.
        tokens: longest answer.
        share: of answers that the large model should take over, between 0 and 1.
        questions: instead of those of the held-out chats.
        should_stop: asked at every token.

    Yields:
        A `Step` an answer; the `Calibration` last.

    Raises:
        InputError: a share outside (0, 1), or too few answers.
        Cancelled: when asked to stop.
    """
    if not 0 < share < 1:
        raise InputError("The share must be between 0 and 1.")
    asked = list(questions) if questions is not None else _first_questions()
    asked = asked[:limit]
    if len(asked) < 2 or tokens < 1:
        raise InputError("At least two questions and one token are needed.")
    large, unsure, surprise, total = host.model("large"), [], [], 0
    for number, question in enumerate(asked, start=1):
        sampling = Sampling(max_new_tokens=tokens, repetition_penalty=CHAT_REPETITION_PENALTY)
        chat = Conversation(host, sampling, side="small")
        for _ in chat.send(question, should_stop):
            pass
        answer = chat.messages[-1]
        if should_stop and should_stop():
            raise Cancelled("The calibration was stopped.")
        if answer.uncertainty is not None and answer.token_ids:
            start = answer.reused + answer.native
            ids = chat.token_ids[: start + len(answer.token_ids)]
            with host.holding_lane(should_stop):
                logits = forward(
                    large.model, ids[:-1], new_cache(large.spec.layers), keep=len(answer.token_ids)
                )
            assert logits is not None
            unsure.append(answer.uncertainty)
            surprise.append(float(cross_entropy(logits, ids[start:]).mean()))
            total += len(ids)
        yield Step(number / len(asked), f"answer {number} of {len(asked)}")
    if len(unsure) < 2:
        raise InputError("The small model gave too few answers.", "Ask for more.")
    yield Calibration(
        tuple(unsure), tuple(surprise), share, tokens,
        trace(host, "up", total, [("questions", "\n".join(asked))]),
    )  # fmt: skip


def _first_questions() -> list[str]:
    try:
        lines = (TEXT_FOLDER / "chats-heldout.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        raise InputError("There are no held-out chats.") from None
    return list(dict.fromkeys(json.loads(line)["messages"][0]["content"] for line in lines))
