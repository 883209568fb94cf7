"""A conversation that can change models: its turns, their exact ids, and which model holds which cache.

    send ─▶ render ids ─▶ longest common prefix with what this side holds ─▶ run the rest ─▶ decode ─▶ message
    switch ─▶ the other side's cache gets the same ids: reused, mapped, run natively (`handoff.py`) ─▶ account

The context is always exactly `token_ids`. Each side keeps its cache with the ids that it covers (`caches.py`,
`held.py`), so after a switch back only what is new is mapped, and after undo, edit or a template that rewrites
old answers the rest is run again, and counted. One chat template serves the whole conversation, that of the model
which spoke first; stop ids are always those of the model that speaks.

A call that fails leaves messages, ids, side and accounts as they were. A stop is no failure: what was said
stays. The models are shared by all visitors, so every prefill chunk and every token is run holding
`host.lane`, which is free while a message waits for its reader.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from workbench.approval import Policy
from workbench.chat.account import Account, estimate_prefill, measure_prefill
from workbench.chat.answer import Job, Message, ShouldStop, stream
from workbench.chat.caches import Caches, Choice
from workbench.chat.decode import Sampling
from workbench.chat.template import clean, render
from workbench.errors import InputError, WorkbenchError, out_of_memory
from workbench.models.catalog import SIDES, other_side
from workbench.models.loading import LoadedModel
from workbench.models.pair import PairHost

CHARS_PER_TOKEN = 32  # a message with more characters a token than this is refused without tokenising it


class Conversation:
    """One person's chat with a pair of models.

    Attributes:
        messages: turns so far, user and assistant by turns.
        side: which model answers next.
        accounts: one of every switch.
        sampling: may be changed between messages.
        system: system prompt, None for the template's own; may be changed between messages.
        anchors, hold_back: for switches, None for the mapper's own choice.
        incremental: at the end of each answer, map what is new into the other model's cache, if that model is loaded, so
            that a switch pays only for what came after; may be changed between messages.
        prefill_times: side -> (tokens, milliseconds) of true prefills on this machine, for estimates of what was saved.
    """

    def __init__(
        self,
        host: PairHost,
        sampling: Sampling | None = None,
        system: str | None = None,
        side: str = "small",
        anchors: int | None = None,
        hold_back: int | None = None,
        incremental: bool = False,
    ) -> None:
        """Nothing is loaded or computed yet."""
        if side not in SIDES:
            raise InputError(f"There is no side {side!r}.", "Use small or large.")
        self.host, self.sampling, self.system, self.side = host, sampling or Sampling(), system, side
        self.caches = Caches(host)
        self.anchors, self.hold_back, self.incremental = anchors, hold_back, incremental
        self.prefill_times: dict[str, list[tuple[int, float]]] = {}
        self.policy: Policy | None = None  # decides whether a pair may be mapped; None: as the person asks
        self.messages: list[Message] = []
        self.accounts: list[Account] = []
        self._ids: list[int] = []
        self._template_side: str | None = None
        self._new_account: Account | None = None  # of a switch that no answer has followed yet
        self._switch_ids: list[int] = []
        self._attempt = 0
        self._busy = threading.Lock()

    # --- what there is ---

    @property
    def token_ids(self) -> list[int]:
        """Exact ids of the whole conversation."""
        return list(self._ids)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that both sides hold for this conversation."""
        return self.caches.nbytes

    def covered(self, side: str) -> int:
        """Tokens of this conversation that a side holds."""
        return self.caches.covered(side)

    def context_left(self) -> int:
        """Tokens that still fit, by the smaller limit of both models."""
        return max(0, self.host.max_positions() - len(self._ids))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "pair": self.host.pair.name,
            "side": self.side,
            "system": self.system,
            "sampling": asdict(self.sampling),
            "messages": [message.to_json() for message in self.messages],
            "accounts": [account.to_json() for account in self.accounts],
            "token_ids": self.token_ids,
        }

    # --- saying something ---

    def send(self, text: str, should_stop: ShouldStop = None) -> Iterator[Message]:
        """Say something and get the growing answer.

        Args:
            text: what the person says.
            should_stop: asked at every token and every chunk; the answer so far then stays, marked as
                stopped. Closing the iterator stops as well.

        Yields:
            Always the same message: once before anything is computed, then after every token, at last
                complete.

        Raises:
            InputError: empty, or too long for either model; nothing was computed.
            WorkbenchError: the model cannot be had, or failed. The conversation is as it was before.
        """
        yield from self._answer(len(self.messages), text, should_stop, attempt=0)

    def retry(self, should_stop: ShouldStop = None) -> Iterator[Message]:
        """Answer the last message again, by the model whose turn it is now; like `send` otherwise."""
        last = self._last_question()
        yield from self._answer(last, self.messages[last].text, should_stop, attempt=self._attempt + 1)

    def edit(self, index: int, text: str, should_stop: ShouldStop = None) -> Iterator[Message]:
        """Replace the user's message at `index`, drop what followed, and answer; like `send` otherwise."""
        if not 0 <= index < len(self.messages) or self.messages[index].role != "user":
            raise InputError("There is no message of yours at this place.")
        yield from self._answer(index, text, should_stop, attempt=0)

    def undo(self) -> str:
        """Take back the last message and its answer; the side stays. Returns the message's text."""
        with self._claimed():
            last = self._last_question()
            text = self.messages[last].text
            ids = self._render(self.messages[:last])
            self._new_account = (
                self._orphaned(last) if ids else None
            )  # no context, nothing that was handed over
            del self.messages[last:]
            self._ids = ids
            self.caches.fit(ids)
            return text

    def clear(self) -> None:
        """Forget everything but the side and the settings."""
        with self._claimed():
            self.messages, self.accounts, self._ids, self._switch_ids = [], [], [], []
            self._template_side, self._new_account = None, None
            self.caches.drop()

    def drop_caches(self) -> None:
        """Free the caches of both sides; what is needed of them is run again, visibly."""
        with self._claimed():
            self.caches.drop()

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """Several steps as one: when one of them fails, what was said, the side and the accounts are as before."""
        names = (
            "messages",
            "accounts",
            "side",
            "_ids",
            "_template_side",
            "_new_account",
            "_switch_ids",
            "_attempt",
        )
        before = {name: getattr(self, name) for name in names}
        before |= {name: list(before[name]) for name in ("messages", "accounts", "_ids")}
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            raise

    # --- changing models ---

    def switch(self, to: str | None = None, how: str = "mapped", should_stop: ShouldStop = None) -> Account:
        """Let the other model carry on.

        Args:
            to: "small" or "large", None for the one that is not speaking.
            how: "mapped", or "prefill" for a true prefill.
            should_stop: asked between layers and chunks.

        Returns:
            The account. Its `how` is "fallback" when mapping was not possible, with the reason.

        Raises:
            InputError: no such side, or that model is speaking already.
            Cancelled: it was stopped. The conversation is as it was before.
        """
        to = other_side(self.side) if to is None else to
        if to not in SIDES or how not in ("mapped", "prefill"):
            raise InputError(
                f"Cannot switch to {to!r} by {how!r}.", "Switch to small or large, by mapped or prefill."
            )
        with self._claimed():
            if to == self.side:
                raise InputError(f"{self.host.name(to)} is speaking already.")
            target = self.host.model(to)
            with self._out_of_memory(target):
                account = self.caches.take_over(self._ids, self.side, to, how, self._choice(), should_stop)
            account = estimate_prefill(account, self.prefill_times.get(to, ()))
            self.side = to
            self.accounts.append(account)
            self._new_account, self._switch_ids = account, list(self._ids)
            return account

    def measure_prefill(self) -> Account:
        """The last switch's account with the true prefill that it avoided, measured on a scratch cache."""
        with self._claimed():
            if not self.accounts or not self.accounts[-1].tokens:
                raise InputError("There was no switch with a context yet.", "Chat, then switch models.")
            old, model = self.accounts[-1], self.host.model(self.side)
            if old.how == "mapped":
                with self.host.holding_lane(), self._out_of_memory(model):
                    new = measure_prefill(old, self._switch_ids, model)
            else:  # it was one
                new = replace(old, prefill_ms=old.ms["total"], prefill_source="measured")
            self.accounts[-1] = new
            if not new.reused and new.prefill_ms is not None:
                self.prefill_times.setdefault(self.side, []).append((new.tokens, new.prefill_ms))
            self._new_account = new if self._new_account is old else self._new_account
            for message in self.messages:
                message.account = new if message.account is old else message.account
            return new

    # --- how an answer comes about ---

    def _answer(self, keep: int, text: str, should_stop: ShouldStop, attempt: int) -> Iterator[Message]:
        """Put a message after the first `keep` ones and answer it; restores everything when it fails."""
        with self._claimed():
            text = clean(text)
            if not text.strip():
                raise InputError("The message is empty.", "Type something first.")
            model = self.host.model(self.side)
            limit = self.host.max_positions()
            if len(text) > CHARS_PER_TOKEN * limit:
                raise InputError(
                    f"The message has {len(text):,} characters, far more than the {limit:,} tokens that fit.",
                    "Shorten it.",
                )
            before = (self.messages, self._ids, self._template_side, self._new_account, self._attempt)
            question, answer = Message("user", text), Message("assistant", side=self.side, model=model.name)
            turns = [*self.messages[:keep], question]
            try:
                self._template_side = (self._template_side if keep else None) or self.side
                prompt = self._render(turns, generation_prompt=True)
                room = limit - len(prompt) - max(0, len(self._render([*turns, answer])) - len(prompt))
                if room < 1:
                    raise InputError(
                        f"The conversation would have {len(prompt):,} tokens, and {limit:,} fit at most.",
                        "Shorten it, undo something, or start again.",
                    )
                answer.account = self._orphaned(keep)
                self.messages, self._new_account, self._attempt = [*turns, answer], None, attempt
                sampling = replace(self.sampling, seed=self.sampling.seed + attempt)
                held = self.caches.of(self.side)
                growing = stream(answer, Job(self.host, model, held, prompt, room, sampling, should_stop))
                try:
                    with self._out_of_memory(model):
                        yield from growing
                finally:
                    growing.close()
                    self._ids = self._render(self.messages)
                if self.incremental:
                    self.caches.map_ahead(self._ids, self.side, self._choice(), should_stop)
            except GeneratorExit:
                raise
            except BaseException:
                self.messages, self._ids, self._template_side, self._new_account, self._attempt = before
                raise

    # --- small parts ---

    def _choice(self) -> Choice:
        """What stands for switches now."""
        return Choice(self.anchors, self.hold_back, self.policy)

    def _render(self, turns: list[Message], generation_prompt: bool = False) -> list[int]:
        """Exact ids of these turns, in the template of the model that spoke first."""
        tokenizer = self.host.model(self._template_side or self.side).tokenizer
        return render(tokenizer, turns, system=self.system, generation_prompt=generation_prompt)

    def _last_question(self) -> int:
        """Index of the user's last message."""
        if not self.messages:
            raise InputError("There is no message yet.", "Say something first.")
        return len(self.messages) - 2

    def _orphaned(self, keep: int) -> Account | None:
        """The latest switch that no answer follows once only the first `keep` messages are kept."""
        dropped = [m.account for m in self.messages[keep:] if m.account is not None]
        return self._new_account or (dropped[-1] if dropped else None)

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """One thing at a time; a second click is told so."""
        if not self._busy.acquire(blocking=False):
            raise InputError("This conversation is busy.", "Wait for it, or stop it first.")
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _out_of_memory(self, model: LoadedModel) -> Iterator[None]:
        """Turns a failed allocation into one sentence."""
        try:
            yield
        except Exception as error:
            if (asked := out_of_memory(error)) is None:
                raise
            per_token = 2 * model.spec.layers * model.spec.kv_width * model.dtype.itemsize
            raise WorkbenchError(
                f"The memory is not enough{asked}: {model.name} needs {per_token:,} bytes a token for its cache.",
                "Shorten the conversation or close other chats.",
            ) from error
