"""Both models' caches of one conversation, and how one comes to hold what the other does.

    take_over   the other side's cache gets the conversation's ids: reused, mapped, run natively; or read again, and why
    map_ahead   the same mapping before anybody asks for a switch, at the end of an answer

Every step that computes holds `host.lane`. Whatever fails or is stopped, each cache stands for exactly the ids that its
`Held` names.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from workbench.approval import Policy
from workbench.chat import handoff
from workbench.chat.account import Account
from workbench.chat.answer import ShouldStop
from workbench.chat.held import Held, common_prefix
from workbench.chat.policy import PREFILL, judge
from workbench.chat.shared import begin
from workbench.errors import Cancelled, WorkbenchError, out_of_memory
from workbench.kv.cache import length
from workbench.kv.mapper import KVMapper
from workbench.models.catalog import direction_to, other_side
from workbench.models.pair import PairHost


@dataclass(frozen=True)
class Choice:
    """What stands for switches.

    Attributes:
        anchors, hold_back: None for the mapper's own choice.
        policy: decides whether a pair may be mapped; None: as the person asks.
    """

    anchors: int | None = None
    hold_back: int | None = None
    policy: Policy | None = None


class Caches:
    """What each side holds of one conversation.

    Attributes:
        held: side -> its cache and the ids that it covers; a side that holds nothing may be missing.
    """

    def __init__(self, host: PairHost) -> None:
        """Nothing is held yet."""
        self.host = host
        self.held: dict[str, Held] = {}
        self._ahead_ms = 0.0  # spent on mapping ahead since the last switch

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that both sides hold."""
        return sum(held.nbytes for held in self.held.values())

    def covered(self, side: str) -> int:
        """Tokens of the conversation that a side holds."""
        return len(self.held[side].ids) if side in self.held else 0

    def of(self, side: str) -> Held:
        """What a side holds, nothing at first."""
        if side not in self.held:
            self.held[side] = Held.empty(self.host.model(side).spec.layers)
        return self.held[side]

    def fit(self, ids: list[int]) -> None:
        """Keep of both sides what these ids begin with."""
        for held in self.held.values():
            held.fit(ids)

    def drop(self) -> None:
        """Free the caches of both sides."""
        self.held = {}

    def take_over(
        self, ids: list[int], source: str, to: str, how: str, choice: Choice, should_stop: ShouldStop = None
    ) -> Account:
        """Bring a side's cache to the conversation's ids.

        Args:
            ids: of the conversation.
            source: the side that spoke.
            to: the side that takes over.
            how: "mapped" or "prefill".
            choice: what stands for switches.
            should_stop: asked between layers and chunks.

        Returns:
            The account, with `how` "fallback" and the reason where mapping was not possible.
        """
        account = self._bring(ids, source, to, how, choice, should_stop)
        self._ahead_ms = 0.0
        return account

    def _bring(
        self, ids: list[int], source: str, to: str, how: str, choice: Choice, should_stop: ShouldStop
    ) -> Account:
        """By the mapper where it can be, else by a true prefill."""
        target, name = self.host.model(to), self.host.name(source)
        if not ids:
            return Account(
                name, target.name, how, tokens=0, reused=0, mapped=0, native=0, anchors=0, hold_back=0,
                ms={"total": 0.0},
            )  # fmt: skip
        held, reason = self.of(to), ""
        if how == "mapped":
            try:
                return self._map(ids, source, to, choice, should_stop)
            except Cancelled:
                raise
            except WorkbenchError as error:
                reason = str(error)
            except (
                Exception
            ) as error:  # whatever a mapper does wrong, the conversation goes on, visibly without
                if out_of_memory(error) is not None:
                    raise
                reason = f"Mapping failed ({type(error).__name__}: {str(error)[:200]})."
        with self.host.holding_lane(should_stop):
            held.fit(ids)
            held.cut_mapped()  # a true prefill rests on nothing that was mapped
            try:
                _, account = handoff.prefill(ids, target, held.cache, name, reason, should_stop)
            finally:
                held.covers(ids)
            held.origin, held.ahead = account.how, None
        return account

    def _map(self, ids: list[int], side: str, to: str, choice: Choice, should_stop: ShouldStop) -> Account:
        """Hand over through the mapper.

        Raises:
            WorkbenchError: the policy refuses, there is no mapper, nothing to map from, or it gave no numbers.
        """
        source, target, held = self.host.model(side), self.host.model(to), self.of(to)
        verdict = judge(self.host, direction_to(to), choice.policy, len(ids))
        if verdict.how == PREFILL:
            raise WorkbenchError(verdict.reason)
        mapper, _ = self.host.mapper(direction_to(to))
        with self.host.holding_lane(should_stop):
            theirs = self.of(side)
            if theirs.fit(ids) == 0 and held.fit(ids) < len(ids):
                raise WorkbenchError(f"The cache of {source.name} is not held any more.")
            held.fit(ids)
            if choice.anchors is None:  # other anchors are asked for in order to see what they do
                begin(held, ids, target)
            prepared = self._keep_ahead(ids, held, mapper, choice)
            before = len(held.ids)
            held.cut(len(ids) - 1)
            try:
                logits, account = handoff.hand_over(
                    ids,
                    theirs.cache,
                    target,
                    held.cache,
                    mapper,
                    source,
                    choice.anchors,
                    choice.hold_back,
                    should_stop,
                )
                if not torch.isfinite(logits).all():
                    raise WorkbenchError("Mapping gave values that are not finite.")
            except BaseException:
                held.cut(min(before, length(held.cache)))
                raise
            start = account.reused + account.anchors
            through = account.mapped + account.reread  # what is re-read stands among what is mapped
            if through:
                held.mapped.append((start, start + through))
            held.covers(ids)
            held.ahead = None
        return replace(account, mapped_ahead=prepared, ahead_ms=self._ahead_ms if prepared else 0.0)

    def _keep_ahead(self, ids: list[int], held: Held, mapper: KVMapper, choice: Choice) -> int:
        """How many tokens were brought there ahead; those that this switch holds back are taken out again."""
        if held.ahead is None:
            return 0
        _, hold_back = handoff.resolved(mapper, choice.anchors, choice.hold_back)
        start = held.ahead
        held.cut(max(start, len(ids) - hold_back))
        return len(held.ids) - start

    def map_ahead(self, ids: list[int], side: str, choice: Choice, should_stop: ShouldStop = None) -> None:
        """Map what is new into the other side's cache. What goes wrong here costs nothing: the switch does it then."""
        to = other_side(side)
        if not ids or not self.host.is_loaded(to) or side not in self.held:
            return
        clock = perf_counter()
        with suppress(Exception), self.host.holding_lane(should_stop):
            source, target = self.host.model(side), self.host.model(to)
            mapper, _ = self.host.mapper(direction_to(to))
            theirs, held = self.held[side], self.of(to)
            held.fit(ids)
            if choice.anchors is None:
                begin(held, ids, target)
            before = len(held.ids)
            start, stop = handoff.map_ahead(
                ids,
                common_prefix(theirs.ids, ids),
                theirs.cache,
                target,
                held.cache,
                mapper,
                source,
                choice.anchors,
                choice.hold_back,
                should_stop,
            )
            if stop > start:
                held.ahead = before if held.ahead is None else held.ahead
                held.mapped.append((start, stop))
                held.covers(ids)
                self._ahead_ms += (perf_counter() - clock) * 1e3
