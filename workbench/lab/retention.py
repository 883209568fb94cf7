"""Does following text stay as likely? The target on a mapped cache against native, the source, and controls.

A passage is `context` tokens and `following` ones. Every arm predicts the following tokens, teacher-forced;
the first of them is predicted by the last context token. Arms:

    native            the target reads all of it
    mapped            the real handoff: anchors, mapped tokens, held-back tokens
    source            the source model reads all of it: would staying do as well?
    no_context        the target reads only the last context token
    zero              as mapped, but zeros in place of what the mapper writes
    wrong_document    as mapped, but all but the held-back tokens are another document's
    held_back_only    the target reads only what a switch runs natively: what those tokens alone are worth
    identity          as mapped, but the source's cache as it is; only where both geometries agree
    recipe            a second mapper as the published recipe uses it: no anchors, only the last token run

A gain in likelihood without the controls is no evidence: published work saw wrong, random and zero caches
reproduce most of it. KL is KL(native ‖ arm), as everywhere. Intervals resample documents, since passages of
one document are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from workbench.chat.handoff import hand_over
from workbench.errors import Cancelled, InputError
from workbench.kv.cache import copy, new_cache, truncate
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.lab.arms import Recipe, native_only, unmapped, zero_cache
from workbench.lab.corpus import Document, Passage, documents, passages
from workbench.lab.intervals import Bootstrap
from workbench.lab.likelihood import cross_entropy, kl_divergence, same_argmax
from workbench.lab.provenance import models_of, text_hash, trace
from workbench.lab.results.common import Step
from workbench.lab.results.quality import Arm, Evaluation, Setting

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
DEFAULT_LIMIT, DEFAULT_CONTEXT, DEFAULT_FOLLOWING = 24, 256, 64
FIXED = ("native", "source", "no_context")


def stream(
    host: PairHost,
    direction: str,
    texts: Sequence[Document] | None = None,
    limit: int = DEFAULT_LIMIT,
    context: int = DEFAULT_CONTEXT,
    following: int = DEFAULT_FOLLOWING,
    settings: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    should_stop: ShouldStop = None,
    recipe: Recipe | None = None,
) -> Iterator[Step | Evaluation]:
    """Evaluate a direction's mapper.

    Args:
        host: the pair.
        direction: "up" or "down".
        texts: to measure on, None for the held-out ones.
        limit: at most so many passages.
        context: context tokens of a passage.
        following: teacher-forced tokens after it.
        settings: (anchors, hold_back) of the handoffs, the main one first; None for the mapper's own choice.
        seed: of the bootstrap.
        should_stop: asked before every arm.
        recipe: a mapper of the published recipe, for an arm of its own.

    Yields:
        A `Step` a passage; the `Evaluation` last.

    Raises:
        InputError: for texts or settings that cannot be measured.
        Cancelled: when asked to stop.
    """
    source, target = models_of(host, direction)
    mapper, _ = host.mapper(direction)
    chosen = list(dict.fromkeys((a, max(1, h)) for a, h in settings or [(mapper.anchors, mapper.hold_back)]))
    _check(chosen, context, following, limit, min(source.spec.max_positions, target.spec.max_positions))
    cut = passages(target.tokenizer, texts or documents("heldout"), context + following, limit)
    if len(cut) < 2:
        raise InputError(
            "One passage is not enough: a wrong document is needed as a control.", "Give more text."
        )

    scores: dict[tuple[str, int], _Scores] = {}
    jobs = _Arms(source, target, mapper, context, should_stop, recipe)
    with host.holding_lane(should_stop):
        other = jobs.source_cache(cut[-1])
    for number, passage in enumerate(cut, start=1):
        following_ids = passage.ids[context:]
        with host.holding_lane(should_stop):
            native, found, own = jobs.fixed(passage)
        for name, logits in found.items():
            scores.setdefault((name, 0), _Scores()).add(logits, native, following_ids)
        for index, setting in enumerate(chosen):
            with host.holding_lane(should_stop):
                found = jobs.handed_over(passage, own, cut[number - 2], other, *setting)
            for name, logits in found.items():
                scores.setdefault((name, index), _Scores()).add(logits, native, following_ids)
        other = own
        yield Step(number / len(cut), f"passage {number} of {len(cut)}")

    boot = Bootstrap([passage.document for passage in cut], seed)
    fixed = {name: scores[name, 0].arm(boot) for name in FIXED}
    measured = []
    for index, (anchors, hold_back) in enumerate(chosen):
        arms = {name: scores[name, at].arm(boot) for name, at in scores if at == index and name not in FIXED}
        gap = boot.gap(scores["no_context", 0].ce, scores["mapped", index].ce, scores["native", 0].ce)
        measured.append(Setting(anchors, hold_back, arms, gap))
    total = len(cut) * (context + following)
    yield Evaluation(
        fixed=fixed,
        settings=tuple(measured),
        passages=tuple({"name": passage.name, "sha256": text_hash(passage.ids)} for passage in cut),
        context=context,
        following=following,
        seed=seed,
        provenance=trace(host, direction, total, [(passage.name, passage.ids) for passage in cut]),
        absent=jobs.absent,
    )


class _Arms:
    """Logits (following, vocab) of each arm for one passage; no cache is computed twice."""

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        mapper: KVMapper,
        context: int,
        should_stop: ShouldStop,
        recipe: Recipe | None = None,
    ) -> None:
        self.source, self.target, self.mapper, self.context = source, target, mapper, context
        self.should_stop, self.recipe = should_stop, recipe
        self.identity, why = unmapped(source, target, mapper)
        self.absent = {} if self.identity else {"identity": why}
        if recipe is None:
            self.absent["recipe"] = "No mapper of the published recipe was given (--recipe)."

    def source_cache(self, passage: Passage) -> Cache:
        """The source's cache of a passage's context."""
        cache = new_cache(self.source.spec.layers)
        forward(self.source.model, passage.ids[: self.context], cache, keep=0)
        return cache

    def fixed(self, passage: Passage) -> tuple[Tensor, dict[str, Tensor], Cache]:
        """Arms that no setting changes.

        Returns:
            Native logits, all fixed arms by name, and the source's cache of the context.
        """
        n, ids = self.context, passage.ids
        own = new_cache(self.source.spec.layers)
        native = self._follow(self.target, ids, new_cache(self.target.spec.layers), n)
        arms = {
            "native": native,
            "source": self._follow(self.source, ids, own, n),
            "no_context": self._follow(self.target, ids[n - 1 :], new_cache(self.target.spec.layers), 1),
        }
        truncate(own, n)
        return native, arms, own

    def handed_over(
        self, passage: Passage, own: Cache, wrong: Passage, wrong_cache: Cache, anchors: int, hold_back: int
    ) -> dict[str, Tensor]:
        """Arms at one setting: mapped, zero, wrong_document, held_back_only where it is not no_context."""
        n, ids, h = self.context, passage.ids, hold_back
        wrong_source = copy(wrong_cache)
        truncate(wrong_source, n - h)
        wrong_ids = (*wrong.ids[: n - h], *ids[n - h :])
        arms = {
            "mapped": self._hand_over(ids, own, anchors, h),
            "zero": self._follow(
                self.target, ids[n - h :], zero_cache(self.target, ids[:n], anchors, n - h, self.mapper), h
            ),
            "wrong_document": self._hand_over(wrong_ids, wrong_source, anchors, h),
        }
        if self.identity is not None:
            arms["identity"] = self._hand_over(ids, own, anchors, h, self.identity)
        if self.recipe is not None:
            r = self.recipe
            arms["recipe"] = self._hand_over(ids, own, r.anchors, r.hold_back, r.mapper)
        if h > 1:
            alone = native_only(ids[:n], self.mapper, anchors, h)
            arms["held_back_only"] = self._follow(
                self.target, (*alone, *ids[n:]), new_cache(self.target.spec.layers), len(alone)
            )
        return arms

    def _hand_over(
        self,
        ids: Sequence[int],
        source_cache: Cache,
        anchors: int,
        hold_back: int,
        mapper: KVMapper | None = None,
    ) -> Tensor:
        cache, n = new_cache(self.target.spec.layers), self.context
        first, _ = hand_over(
            ids[:n],
            source_cache,
            self.target,
            cache,
            mapper or self.mapper,
            self.source,
            anchors,
            hold_back,
            self.should_stop,
        )
        if len(ids) == n + 1:
            return first
        rest = forward(self.target.model, ids[n:-1], cache, keep=len(ids) - n - 1)
        assert rest is not None
        return torch.cat((first, rest))

    def _follow(self, model: LoadedModel, ids: Sequence[int], cache: Cache, given: int) -> Tensor:
        """Run ids over a cache and predict those after the first `given`; the last id is only predicted."""
        if self.should_stop and self.should_stop():
            raise Cancelled("The evaluation was stopped.")
        logits = forward(model.model, ids[:-1], cache, keep=len(ids) - given)
        assert logits is not None
        return logits


@dataclass
class _Scores:
    """Per passage: means over the following tokens."""

    ce: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)

    def add(self, logits: Tensor, native: Tensor, ids: Sequence[int]) -> None:
        self.ce.append(float(cross_entropy(logits, ids).mean()))
        self.kl.append(float(kl_divergence(native, logits).mean()))
        self.top1.append(float(same_argmax(native, logits).double().mean()))

    def arm(self, boot: Bootstrap) -> Arm:
        per_passage = {"ce": tuple(self.ce), "kl": tuple(self.kl), "top1": tuple(self.top1)}
        return Arm(boot.mean(self.ce), boot.mean(self.kl), boot.mean(self.top1), len(self.ce), per_passage)


def _check(
    settings: Sequence[tuple[int, int]], context: int, following: int, limit: int, longest: int
) -> None:
    """Refuse before anything is computed.

    Raises:
        InputError: naming what is wrong.
    """
    if following < 1 or limit < 2 or context < 2:
        raise InputError("At least 2 passages, 2 context tokens and 1 following token are needed.")
    if context + following > longest:
        raise InputError(
            f"{context:,} and {following:,} tokens are beyond the {longest:,} that both models can read."
        )
    for anchors, hold_back in settings:
        if anchors < 0 or anchors + hold_back >= context:
            raise InputError(
                f"{anchors} anchors and {hold_back} held-back tokens leave nothing to map of {context}.",
                "Use a longer context.",
            )
