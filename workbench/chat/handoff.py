"""The switch: a target model gets the context of a conversation from the source's KV cache, and says how.

    0 ………… reused | anchors | mapped … re-read … mapped … | held back
           already   run       the source's cache, through    run natively
           there     natively  the mapper; rare tokens run    (at least the last token)
                               natively over it

*Reused* is what the target still holds from an earlier turn of its own. *Anchors* are the first tokens: nothing precedes
them, so running them natively is exact and cheap, and every later token attends to them. The *held back* tokens at the
end, and whatever the source has not computed itself, run natively over the mapped rest; the last one gives the logits.
A mapper may also know which token ids were *rare* in its calibration text (`KVMapper.familiar`): such tokens carry what a
later question asks for, and a linear map loses them first, so they are re-read, over everything that stands before them.
All of these run in one pass where they can: a pass over a few tokens costs what reading the weights costs.
A mapper may leave the lowest layers to the target (`KVMapper.native_layers`): it runs them over the middle before the
layers above are mapped, so what those layers hold is exact.

The target's cache is allocated once, with place for the context and some answer, and written into; mapping goes block by
block, so that besides the two caches only one block's features are in memory. `map_ahead` does the same mapping before
the switch, as far as a switch would map at all, so that the switch itself pays only for what is new.

Every handoff returns an `Account`: tokens of each kind, milliseconds of each part. A true prefill is never hidden: it has
an account of its own, with `how` "prefill" when it was asked for and "fallback", with the reason, when it was not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from workbench.chat.account import Account, Clock
from workbench.chat.policy import decide as decide  # the router's question before a switch, beside the switch
from workbench.errors import Cancelled
from workbench.kv.cache import grows_in_place, length, new_cache, reserve, truncate
from workbench.kv.forward import forward, forward_at, forward_lowest, has_layers, takes_masks
from workbench.kv.mapper import KVMapper, MapTimes
from workbench.kv.rope import Rotary
from workbench.models.loading import LoadedModel
from workbench.words import lowest

ShouldStop = Callable[[], bool] | None
PREFILL_CHUNK = 512  # tokens between two looks at the stop flag during a prefill in the chat
MAP_BLOCK = 512  # tokens mapped at a time, so that memory stays bounded; in smaller blocks threads wait for each other
GPU_MAP_BLOCK = 8192  # an accelerator wants large products
SPARE_SHARE, LEAST_SPARE = (
    16,
    64,
)  # place for an answer in a new cache: a sixteenth of the context, at least this
GATE_TOLERANCE = 1e-3  # largest difference of a log-probability that the gate accepts in float32
HALF_PRECISION_KL = 0.02  # nats between the two next-token distributions that it accepts in half precision


def hand_over(
    ids: Sequence[int],
    source_cache: Cache,
    target: LoadedModel,
    target_cache: Cache,
    mapper: KVMapper,
    source: LoadedModel,
    anchors: int | None = None,
    hold_back: int | None = None,
    should_stop: ShouldStop = None,
) -> tuple[Tensor, Account]:
    """Bring the target's cache to the whole context, through the mapper.

    Args:
        ids: the n token ids of the context.
        source_cache: the source's cache of a prefix of `ids`.
        target: the model to switch to.
        target_cache: its cache of a prefix of `ids`, possibly empty; is extended to n tokens.
        mapper: from source to target.
        source: the model to switch from.
        anchors: first tokens to run natively, None for the mapper's own choice.
        hold_back: last tokens to run natively (at least 1), None for the mapper's own choice.
        should_stop: asked between layers and parts.

    Returns:
        The logits (1, vocab) after the last token, and the account.

    Raises:
        ValueError: when there is no token, or a cache is longer than the context.
        Cancelled: when asked to stop; the target's cache is then as it was before.
    """
    clock = Clock()
    n, before, available = len(ids), length(target_cache), length(source_cache)
    if n == 0 or before > n or available > n:
        raise ValueError(f"context of {n} tokens, but the caches hold {available} and {before}")
    anchors, hold_back = resolved(mapper, anchors, hold_back)
    reused = min(before, n - 1)  # the last token must run for its logits, also when nothing is new
    truncate(target_cache, reused)
    anchor_stop = max(reused, min(anchors, n - hold_back))
    map_stop = max(anchor_stop, min(available, n - hold_back))
    reserve(target_cache, n + max(LEAST_SPARE, n // SPARE_SHARE))
    first, last = range(reused, anchor_stop), range(map_stop, n)
    scattered = _takes_places(target, target_cache)
    reread = mapper.rare(ids, anchor_stop, map_stop) if scattered else []
    bottom = _lowest(mapper, target, target_cache) if anchor_stop < map_stop else 0
    together = scattered and anchor_stop < map_stop and bool(first or reread) and len(last) <= PREFILL_CHUNK
    ms: dict[str, float] = {}
    try:
        if together:
            _heed(should_stop)
            _append_slots(target_cache, len(first), mapper, bottom)
            ms["cache"] = clock.lap()
        elif anchor_stop > reused:
            forward(target.model, ids[reused:anchor_stop], target_cache, keep=0, should_stop=should_stop)
            ms["anchors"] = clock.lap()
        if bottom:
            run_lowest(ids[:map_stop], target, target_cache, mapper, should_stop)
            ms["bottom"] = clock.lap()
        times = map_blocks(
            mapper,
            source_cache,
            target_cache,
            anchor_stop,
            map_stop,
            source.rotary,
            target.rotary,
            should_stop,
            bottom,
        )
        clock.lap()
        ms |= {"map_strip": times.strip_ms, "map_product": times.product_ms, "map_rotate": times.rotate_ms}
        model = target.model
        if together:
            found = forward_at(model, ids, [*first, *reread, *last], target_cache, should_stop=should_stop)
            ms["ends"] = clock.lap()
        else:
            if read_again(ids, anchor_stop, map_stop, target, target_cache, mapper, should_stop):
                ms["ends"] = clock.lap()
            found = forward(model, ids[map_stop:], target_cache, chunk=PREFILL_CHUNK, should_stop=should_stop)
            ms["hold_back"] = clock.lap()
        assert found is not None  # at least the last token was run
        logits = found
    except BaseException:
        truncate(target_cache, reused)
        raise
    ms["total"] = clock.total()
    mapped = map_stop - anchor_stop - len(reread)
    return logits, Account(
        source.name, target.name, "mapped", n, reused, mapped, n - reused - mapped,
        anchor_stop - reused, n - map_stop, ms, reread=len(reread), native_layers=bottom,
        reason=_why_mapped(mapper, bottom) if anchor_stop < map_stop else "",
    )  # fmt: skip


def resolved(mapper: KVMapper, anchors: int | None, hold_back: int | None) -> tuple[int, int]:
    """Anchors and hold-back of a switch, the mapper's own where None is given; at least one token is held back."""
    return (
        mapper.anchors if anchors is None else anchors,
        max(1, mapper.hold_back if hold_back is None else hold_back),
    )


def map_blocks(
    mapper: KVMapper,
    source_cache: Cache,
    target_cache: Cache,
    start: int,
    stop: int,
    rotary_src: Rotary,
    rotary_tgt: Rotary,
    should_stop: ShouldStop = None,
    first_layer: int = 0,
) -> MapTimes:
    """`KVMapper.map_into`, block by block: the same cache, with the features of one block in memory at a time.

    After an exception the target's cache may hold some of the blocks.
    """
    block = MAP_BLOCK if mapper.key_weight[0].device.type == "cpu" else GPU_MAP_BLOCK
    times = MapTimes()
    for first in range(start, stop, block):
        last = min(first + block, stop)
        part = mapper.map_into(
            source_cache, target_cache, first, last, rotary_src, rotary_tgt, should_stop, first_layer
        )
        times.strip_ms += part.strip_ms
        times.product_ms += part.product_ms
        times.rotate_ms += part.rotate_ms
    return times


def map_ahead(
    ids: Sequence[int],
    available: int,
    source_cache: Cache,
    target: LoadedModel,
    target_cache: Cache,
    mapper: KVMapper,
    source: LoadedModel,
    anchors: int | None = None,
    hold_back: int | None = None,
    should_stop: ShouldStop = None,
) -> tuple[int, int]:
    """Do before a switch what the switch would do for these tokens; those that would be held back are left out.

    A later `hand_over` of the same or a longer context then finds them in the target's cache. The result is the same:
    a token is mapped by itself, a rare one is re-read over what stands before it, and the held-back ones run natively
    over all of it at the switch.

    Args:
        ids: the context as it is now.
        available: how many of its tokens the source's cache holds.
        source_cache: the source's cache, of at least `available` tokens.
        target: the model that might take over.
        target_cache: its cache of a prefix of `ids`; is extended.
        mapper: from source to target.
        source: the model that speaks.
        anchors: as for `hand_over`.
        hold_back: as for `hand_over`.
        should_stop: asked between layers.

    Returns:
        The span (start, stop) that was mapped; equal numbers when there was nothing to do.

    Raises:
        Cancelled: when asked to stop; the target's cache is then as it was before.
    """
    anchors, hold_back = resolved(mapper, anchors, hold_back)
    before = length(target_cache)
    stop = min(available, len(ids) - hold_back)
    start = max(before, min(anchors, stop))
    if stop <= start:
        return before, before
    reserve(target_cache, len(ids) + max(LEAST_SPARE, len(ids) // SPARE_SHARE))
    try:
        if start > before:
            forward(target.model, ids[before:start], target_cache, keep=0, should_stop=should_stop)
        bottom = run_lowest(ids[:stop], target, target_cache, mapper, should_stop)
        map_blocks(
            mapper, source_cache, target_cache, start, stop, source.rotary, target.rotary, should_stop, bottom
        )
        read_again(ids, start, stop, target, target_cache, mapper, should_stop)
    except BaseException:
        truncate(target_cache, before)
        raise
    return start, stop


def read_again(
    ids: Sequence[int],
    start: int,
    stop: int,
    target: LoadedModel,
    cache: Cache,
    mapper: KVMapper,
    should_stop: ShouldStop = None,
) -> list[int]:
    """Run the rare tokens from `start` to before `stop` natively, in their places; returns their positions."""
    rare = mapper.rare(ids, start, stop) if _takes_places(target, cache) else []
    if rare:
        forward_at(target.model, ids, rare, cache, keep=0, should_stop=should_stop)
    return rare


def _takes_places(target: LoadedModel, cache: Cache) -> bool:
    """Whether tokens can be run at places in the middle of this cache; where not, nothing is re-read."""
    return takes_masks(target.model) and all(grows_in_place(cache, t) for t in range(target.spec.layers))


def run_lowest(
    ids: Sequence[int],
    target: LoadedModel,
    cache: Cache,
    mapper: KVMapper,
    should_stop: ShouldStop = None,
) -> int:
    """Run the layers that the mapper leaves to the target over what they lack of `ids`, of which they hold a beginning.

    Returns:
        How many of the lowest layers now hold `ids`: 0 where model or cache do not allow it, so that all are mapped.
    """
    layers = _lowest(mapper, target, cache)
    if layers:
        held = int(cache.layers[0].get_seq_length())
        forward_lowest(target.model, ids[held:], cache, layers, PREFILL_CHUNK, should_stop)
    return layers


def _lowest(mapper: KVMapper, target: LoadedModel, cache: Cache) -> int:
    """How many of the lowest layers run natively: as the mapper says, or none where model or cache do not allow it."""
    layers = target.spec.layers
    able = has_layers(target.model, layers) and all(grows_in_place(cache, t) for t in range(layers))
    return mapper.native_layers if able else 0


def _why_mapped(mapper: KVMapper, bottom: int) -> str:
    """A sentence where layers were mapped that the mapper leaves to the target, else ""."""
    if bottom == mapper.native_layers:
        return ""
    return (
        f"All layers were mapped, {lowest(mapper.native_layers)} too, since this model or this kind of cache cannot run a "
        "part of them alone."
    )


def _heed(should_stop: ShouldStop) -> None:
    """Raises `Cancelled` when asked to stop."""
    if should_stop is not None and should_stop():
        raise Cancelled("Stopped.")


def _append_slots(cache: Cache, count: int, mapper: KVMapper, first_layer: int) -> None:
    """Slots for tokens whose content comes later, zeros until then; allocates what the whole context needs."""
    heads, dim = mapper.target.kv_heads, mapper.target.head_dim
    for t, layer in enumerate(cache.layers[first_layer:], first_layer):
        weight = mapper.key_weight[t]
        for slots in layer.append_slots(count, heads, dim, weight.dtype, weight.device):
            slots.zero_()  # later passes mask what has no content yet, and a masked NaN would still spread


def prefill(
    ids: Sequence[int],
    target: LoadedModel,
    target_cache: Cache,
    source_name: str,
    reason: str = "",
    should_stop: ShouldStop = None,
    chunk: int | None = PREFILL_CHUNK,
) -> tuple[Tensor, Account]:
    """Bring the target's cache to the whole context by running what it lacks: the true prefill.

    Args:
        ids: the n token ids of the context.
        target: the model that runs them.
        target_cache: its cache of a prefix of `ids`; is extended to n tokens.
        source_name: the model that the conversation comes from, for the account.
        reason: why mapping was not possible; makes it a "fallback".
        should_stop: asked between chunks.
        chunk: tokens a forward pass, None for one pass (the fastest).

    Returns:
        The logits (1, vocab) after the last token, and the account.
    """
    clock = Clock()
    n = len(ids)
    reused = min(length(target_cache), n - 1)
    truncate(target_cache, reused)
    try:
        logits = forward(target.model, ids[reused:], target_cache, chunk=chunk, should_stop=should_stop)
    except BaseException:
        truncate(target_cache, reused)
        raise
    assert logits is not None  # at least the last token was run
    total = clock.total()
    return logits, Account(
        source_name, target.name, "fallback" if reason else "prefill", n, reused, 0, n - reused, 0, 0,
        {"prefill": total, "total": total}, reason=reason,
    )  # fmt: skip


@dataclass(frozen=True)
class GateResult:
    """Whether a model's own cache, put in through the handoff path, reproduces its native logits."""

    ok: bool
    max_abs_error: float
    tokens: int


def gate(target: LoadedModel, ids: Sequence[int], tolerance: float | None = None) -> GateResult:
    """Prove the path for one model: strip, identity map, rotate and put its own cache in, then compare log-probabilities.

    Args:
        target: the model.
        ids: at least two token ids.
        tolerance: largest accepted difference of a log-probability. None: 1e-3 in float32; in half precision 0.25, or
            four steps between neighbouring numbers at the largest logit where that is more (logits of 40 are 0.25
            apart in bfloat16), and then the two distributions must also agree to 0.02 nats.
    """
    own, mapped = new_cache(target.spec.layers, len(ids)), new_cache(target.spec.layers, len(ids))
    native = forward(target.model, ids, own)
    assert native is not None  # one row of logits was asked for
    identity = KVMapper.identity(target.spec).to(target.dtype, target.layer_devices)
    logits, _ = hand_over(ids, own, target, mapped, identity, target, anchors=0, hold_back=1)
    own_log, mapped_log = native.log_softmax(-1), logits.log_softmax(-1)
    error = float((mapped_log - own_log).abs().max())
    if tolerance is None and target.dtype == torch.float32:
        tolerance = GATE_TOLERANCE
    if tolerance is not None:
        return GateResult(error <= tolerance, error, len(ids))
    step = torch.finfo(target.dtype).eps * float(native.abs().max())
    kl = float((own_log.exp() * (own_log - mapped_log)).sum())
    return GateResult(error <= max(0.25, 4 * step) and kl <= HALF_PRECISION_KL, error, len(ids))
