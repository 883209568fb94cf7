"""The cascade: the small model answers, and the large one takes over where the small one is unsure.

    question ─▶ small answers ─▶ mean entropy of its own distributions ─▶ at most the threshold: the answer stands
                                                                     └─▶ above: large answers, on the mapped context

The large model never reads the conversation: what was said is mapped, the question itself runs natively. The next
question goes to the small model again, which gets the large one's answer through the mapper of the other direction.
`Tally` counts how often that happened, and what it saved against always asking the large model, and against reading
everything again at each change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workbench.chat.account import Account
from workbench.chat.answer import Message
from workbench.chat.conversation import Conversation

ShouldStop = Callable[[], bool] | None


@dataclass
class Tally:
    """What the automatic mode did in one conversation.

    Attributes:
        questions: answered.
        taken_over: of them, by the large model.
        small_tokens: of answers of the small model that stand.
        dropped_tokens: of answers of the small model that the large one replaced.
        large_tokens: of answers of the large model.
        mapped: tokens that a change of models mapped instead of reading them.
        small_ms: spent by the small model, replaced answers included.
        large_ms: spent by the large model.
        switch_ms: spent on changes.
        prefill_ms: what those changes would have taken by reading everything, as far as known.
        unknown: changes whose true prefill is not known.
        fallbacks: changes that read everything after all.
    """

    questions: int = 0
    taken_over: int = 0
    small_tokens: int = 0
    dropped_tokens: int = 0
    large_tokens: int = 0
    mapped: int = 0
    small_ms: float = 0.0
    large_ms: float = 0.0
    switch_ms: float = 0.0
    prefill_ms: float = 0.0
    unknown: int = 0
    fallbacks: int = 0

    def add_switch(self, account: Account) -> None:
        """Count a change of models; before anything was said there is nothing to count."""
        if not account.tokens:
            return
        total = account.ms.get("total", 0.0)
        self.mapped += account.mapped
        self.switch_ms += total
        self.fallbacks += account.how == "fallback"
        if account.how != "mapped":
            self.prefill_ms += total  # it was one
        elif account.prefill_ms is None:
            self.unknown += 1
            self.prefill_ms += total  # nothing is claimed
        else:
            self.prefill_ms += account.prefill_ms

    @property
    def large_ms_per_token(self) -> float | None:
        """How long the large model took for a token of an answer here; None before it answered."""
        return self.large_ms / self.large_tokens if self.large_tokens else None

    @property
    def saved_against_large_ms(self) -> float | None:
        """Estimate: every answer by the large model at its own pace, minus what was spent; None before it answered."""
        pace = self.large_ms_per_token
        if pace is None:
            return None
        return pace * self.small_tokens - self.small_ms - self.switch_ms

    @property
    def saved_against_prefill_ms(self) -> float:
        """What reading everything again at each change would have taken more; unknown ones count as nothing."""
        return self.prefill_ms - self.switch_ms


def ask(
    chat: Conversation, text: str, threshold: float, tally: Tally, should_stop: ShouldStop = None
) -> Iterator[Message]:
    """Say something and get an answer, by the small model or, where that is unsure, by the large one.

    Args:
        chat: the conversation; afterwards its side is the one that answered.
        text: what the person says.
        threshold: largest mean entropy (nats a token) at which the small model's answer stands.
        tally: is added to.
        should_stop: as for `Conversation.send`. An answer that was stopped stands.

    Yields:
        As `Conversation.send`: first the small model's message, then, where it is replaced, the large one's.

    Raises:
        InputError, WorkbenchError: as `send` and `switch`; the conversation is then as it was before, or holds the
            small model's answer when only the large one failed.
    """
    if chat.side != "small":
        tally.add_switch(chat.switch("small", should_stop=should_stop))
    yield from chat.send(text, should_stop)
    first = chat.messages[-1]
    tally.questions += 1
    tally.small_ms += first.ms
    if first.stopped or first.uncertainty is None or first.uncertainty <= threshold:
        tally.small_tokens += len(first.token_ids)
        return
    with chat.restored_on_failure():
        chat.undo()
        account = chat.switch("large", should_stop=should_stop)
        answers = chat.send(text, should_stop)
        for message in answers:
            message.replaced, message.doubt = first.text, first.uncertainty
            yield message
    tally.add_switch(account)
    last = chat.messages[-1]
    tally.taken_over += 1
    tally.dropped_tokens += len(first.token_ids)
    tally.large_tokens += len(last.token_ids)
    tally.large_ms += last.ms
