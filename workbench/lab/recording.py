"""Holds a scripted conversation and notes when every piece of text came, to be replayed without any model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from workbench.lab.provenance import trace
from workbench.lab.results.recording import RecordedTurn, Recording

if TYPE_CHECKING:
    from workbench.chat.conversation import Conversation


class Recorder:
    """Keeps the turns of a conversation as they are played.

    Args:
        clock: seconds; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.turns: list[RecordedTurn] = []

    def switched(self, chat: Conversation, account: Any) -> None:
        """Note a turn that only switched."""
        shown = account.to_json() if account is not None else None
        how = account.how if account is not None else "native"
        self.turns.append(
            RecordedTurn("", chat.side, chat.host.name(chat.side), how, shown, (), 0, 0.0, 0, 0)
        )

    def said(self, say: str, answers: Iterable[Any]) -> Any:
        """Let an answer come about and note its pieces.

        Args:
            say: what the person said.
            answers: the growing message, as `Conversation.send` yields it.

        Returns:
            The complete message.
        """
        began, length, message = self._clock(), 0, None
        pieces: list[tuple[float, str]] = []
        for message in answers:
            if len(message.text) > length:
                pieces.append((round(1000 * (self._clock() - began), 2), message.text[length:]))
                length = len(message.text)
        assert message is not None
        if len(message.text) < length:  # a stop sequence was taken off again at the end
            pieces = _cut(pieces, len(message.text))
        account = message.account.to_json() if message.account else None
        self.turns.append(
            RecordedTurn(
                say, message.side, message.model, message.how, account, tuple(pieces),
                len(message.token_ids), message.ms, message.reused, message.native,
            )
        )  # fmt: skip
        return message

    def recording(self, chat: Conversation, direction: str, script: Sequence[Mapping[str, str]]) -> Recording:
        """What was recorded, with where and when."""
        ids = tuple(chat.token_ids)
        texts = [("script", json.dumps(script, ensure_ascii=False))]
        origin = trace(chat.host, direction, len(ids), texts)
        return Recording(tuple(self.turns), ids, asdict(chat.sampling), origin)


def _cut(pieces: list[tuple[float, str]], length: int) -> list[tuple[float, str]]:
    """The pieces of the first `length` characters."""
    kept: list[tuple[float, str]] = []
    for at, text in pieces:
        if length <= 0:
            break
        kept.append((at, text[:length]))
        length -= len(text)
    return kept
