"""The caches that a target can stand on after a switch: the mapped one, and every control for it.

    native            the target reads the context itself
    mapped            the real handoff: anchors, mapped tokens, held-back tokens
    recipe            the published recipe: a mapper fitted on all tokens, no anchors, only the last token run
    source            the source reads the context, and answers itself
    identity          as mapped, but the source's cache as it is; only where both geometries are the same
    wrong_document    as mapped, but all but the held-back tokens are another document's
    zero              as mapped, but zeros in place of what the mapper writes; native layers are run as there
    held_back_only    the target reads only what a switch runs natively: anchors and re-read tokens (where tokens are
                      re-read), held-back ones
    no_context        the target reads only the last token

Every cache, the source's too, comes without the context's last token, which the caller runs together with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from workbench.chat.handoff import hand_over, read_again, run_lowest
from workbench.errors import InputError
from workbench.kv.cache import copy, length, new_cache, truncate
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.models.loading import LoadedModel

ShouldStop = Callable[[], bool] | None


@dataclass(frozen=True)
class Recipe:
    """A second mapper, used as the published recipe uses it: no anchors, only the last token run natively."""

    mapper: KVMapper
    anchors: int = 0
    hold_back: int = 1


def unmapped(source: LoadedModel, target: LoadedModel, like: KVMapper) -> tuple[KVMapper | None, str]:
    """The map that changes nothing, where both caches have the same shape and the same rotation.

    Returns:
        (mapper, "") or (None, why there is none).
    """
    a, b = source.spec, target.spec
    for name, what in (("layers", "layers"), ("kv_heads", "KV heads"), ("head_dim", "head size")):
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            return None, f"The caches do not agree: {mine} {what} in the source, {theirs} in the target."
    layers = tuple((layer,) for layer in range(b.layers))
    weight = tuple(torch.eye(b.kv_width) for _ in range(b.layers))
    bias = tuple(torch.zeros(b.kv_width) for _ in range(b.layers))
    mapper = KVMapper(
        a, b, layers, layers, weight, bias, weight, bias, like.anchors, like.hold_back, familiar=like.familiar,
        native_layers=like.native_layers,
    )  # fmt: skip
    return mapper.to(target.dtype, target.layer_devices), ""


def zero_cache(
    target: LoadedModel, ids: Sequence[int], anchors: int, stop: int, mapper: KVMapper | None = None
) -> Cache:
    """The control without any information: native anchors, then zeros in place of what a mapper would write.

    Args:
        target: the model that reads it.
        ids: of the context.
        anchors: first tokens run natively.
        stop: tokens that the cache holds in the end; there is room for all of `ids`.
        mapper: runs the same layers natively as this one, and re-reads the same tokens, over the zeros; None for none.
    """
    spec, cache = target.spec, new_cache(target.spec.layers, len(ids))
    if anchors:
        forward(target.model, ids[:anchors], cache, keep=0)
    bottom = run_lowest(ids[:stop], target, cache, mapper, None) if mapper is not None else 0
    layers: Sequence[Any] = cache.layers[bottom:]
    for layer, device in zip(layers, target.layer_devices[bottom:], strict=True):
        shape = (stop - anchors, spec.kv_heads, spec.head_dim)
        for slots in layer.append_slots(*shape, target.dtype, device):
            slots.zero_()
    if mapper is not None:
        read_again(ids, anchors, stop, target, cache, mapper)
    return cache


def native_only(ids: Sequence[int], mapper: KVMapper, anchors: int, hold_back: int) -> list[int]:
    """The ids that a switch runs natively, as a text of their own: the control for what they alone are worth.

    Anchors count where tokens are re-read; without, the held-back tokens stand alone, as they always did in this control.
    """
    stop = len(ids) - hold_back
    rare = mapper.rare(ids, min(anchors, stop), stop)
    return [*(ids[:anchors] if rare else []), *(ids[position] for position in rare), *ids[stop:]]


def _read(model: LoadedModel, ids: Sequence[int]) -> Cache:
    cache = new_cache(model.spec.layers, len(ids))
    if ids:
        forward(model.model, ids, cache, keep=0)
    return cache


class ArmCaches:
    """Makes the caches of all arms for one context after the other."""

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        mapper: KVMapper,
        anchors: int | None = None,
        hold_back: int | None = None,
        recipe: Recipe | None = None,
        should_stop: ShouldStop = None,
    ) -> None:
        """Args: anchors, hold_back: of the handoff, None for the mapper's own choice."""
        self.source, self.target, self.mapper = source, target, mapper
        self.anchors = mapper.anchors if anchors is None else anchors
        self.hold_back = max(1, mapper.hold_back if hold_back is None else hold_back)
        self.recipe, self.should_stop = recipe, should_stop
        self.identity, why = unmapped(source, target, mapper)
        self.absent = {} if self.identity else {"identity": why}
        if recipe is None:
            self.absent["recipe"] = "No mapper of the published recipe was given (--recipe)."

    def read(self, ids: Sequence[int]) -> Cache:
        """The source's cache of a context, without the last token, which no arm needs of it."""
        return _read(self.source, ids[:-1])

    def caches(
        self, ids: Sequence[int], own: Cache, wrong_ids: Sequence[int], wrong: Cache
    ) -> Iterator[tuple[str, LoadedModel, Cache]]:
        """Every arm's name, the model that goes on, and its cache of the context without the last token.

        Args:
            ids: the context.
            own: the source's cache of it.
            wrong_ids: another document.
            wrong: the source's cache of that.
        """
        for name in self.names():
            if name != "held_back_only" or min(self.hold_back, len(ids) - 1) > 1:
                yield name, *self.make(name, ids, own, wrong_ids, wrong)

    def names(self) -> list[str]:
        """All arms that can be had."""
        extra = [("recipe", self.recipe), ("identity", self.identity)]
        return [
            "native", "mapped", *(name for name, there in extra if there is not None), "wrong_document", "zero",
            *(["held_back_only"] if self.hold_back > 1 else []), "no_context", "source",
        ]  # fmt: skip

    def make(
        self, name: str, ids: Sequence[int], own: Cache, wrong_ids: Sequence[int], wrong: Cache
    ) -> tuple[LoadedModel, Cache]:
        """One arm's model and cache; arguments as for `caches`."""
        n, h = len(ids), max(1, min(self.hold_back, len(ids) - 1))
        if name == "source":
            return self.source, own
        if name == "native":
            cache = _read(self.target, ids[:-1])
        elif name == "mapped":
            cache = self._handed(ids, own, self.mapper, self.anchors, h)
        elif name == "recipe" and self.recipe is not None:
            cache = self._handed(ids, own, self.recipe.mapper, self.recipe.anchors, self.recipe.hold_back)
        elif name == "identity" and self.identity is not None:
            cache = self._handed(ids, own, self.identity, self.anchors, h)
        elif name == "wrong_document":
            m = min(length(wrong), n - h)
            other = copy(wrong)
            truncate(other, m)
            cache = self._handed((*wrong_ids[:m], *ids[n - h :]), other, self.mapper, self.anchors, h)
        elif name == "zero":
            cache = self._zeros(ids, n - h)
        elif name == "held_back_only":
            cache = _read(self.target, native_only(ids, self.mapper, self.anchors, h)[:-1])
        elif name == "no_context":
            cache = new_cache(self.target.spec.layers)
        else:
            raise InputError(f"There is no arm {name[:40]!r} here.", f"There are: {', '.join(self.names())}.")
        return self.target, cache

    def _handed(
        self, ids: Sequence[int], own: Cache, mapper: KVMapper, anchors: int, hold_back: int
    ) -> Cache:
        cache = new_cache(self.target.spec.layers, len(ids))
        hand_over(ids, own, self.target, cache, mapper, self.source, anchors, hold_back, self.should_stop)
        truncate(cache, len(ids) - 1)
        return cache

    def _zeros(self, ids: Sequence[int], stop: int) -> Cache:
        """Native anchors, zeros up to `stop`, the rest native."""
        cache = zero_cache(self.target, ids, min(self.anchors, stop), stop, self.mapper)
        if len(ids) - 1 > length(cache):
            forward(self.target.model, ids[stop:-1], cache, keep=0)
        return cache
