"""Which heads pay for the handoff: a mapper's metrics per layer and head, on held-out text.

The target reads each text natively, in chunks, while its attention is watched; the mapped cache of the same
text, made by the real `KVMapper.map_into` behind native anchors, lies beside it. Each attention call of a
chunk is then repeated with this layer's mapped keys and values in place of the true ones, so that every
layer is judged on true queries and no error travels from layer to layer. The attention of only one layer and
a block of query positions exists at a time (`workbench.lab.head_sums`), so texts of thousands of tokens do.

Definitions; e is a token's error, d the head size, sums over all tokens but the anchors:

    r2            1 - sum |e|² / sum |y - mean y|²                keys y without their rotation
    cosine        mean (and worst) over query positions of cos(true output, output over the mapped cache)
    attention_kl  mean over query positions of KL(attention over true keys ‖ over mapped keys)
    k_error_in_q  d tr(E M) / (tr E tr M), E = sum e eᵀ of rotated keys, M = sum q qᵀ of the group's rotated
                  queries: the mean of (q·e)² over all pairs, over what an error of the same size without a
                  preferred direction gives
    v_error_in_o  the same for values, with M = sum Wᵀ W over the group's slices of the output projection
    output_error  mean over query positions of |W (mapped output - true output)|² / |r|², where W is the slice of
                  the output projection of the KV head's query heads and r the residual stream: the layer's input
                  plus what its attention adds (a bias of the projection aside)
    output_error_abs  the same without |r|²
    patch_estimate  what patching the head would win for the 32 tokens after a switch near the end of the text and one
                  half-way, from gradients: see `workbench.lab.attribution`
    *_error_sinks, *_middle, *_recent  mean |e|² of the keys or values in a zone of the text, over the mean |y - mean y|²
                  of all tokens; weighted by the zones' tokens the three sum to 1 - r2

`k_error_in_q` takes the keys rotated because that is how a query meets their error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from workbench.errors import Cancelled, InputError
from workbench.kv.cache import new_cache, truncate
from workbench.kv.capture import capture_attention
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.lab.attribution import path_gains
from workbench.lab.branches import Branches
from workbench.lab.corpus import Document, documents, passages
from workbench.lab.head_detail import details
from workbench.lab.head_sums import HeadSums, layer_inputs
from workbench.lab.provenance import models_of, trace
from workbench.lab.results.common import Step
from workbench.lab.results.heads import CHEAP, HeadMaps

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
Hold = Callable[[ShouldStop], AbstractContextManager[None]]
DEFAULT_TEXTS, DEFAULT_LENGTH = 8, 512
CHUNK = 256
FOLLOWING = 32  # tokens after a switch for which the patch gain is estimated


def stream(
    host: PairHost,
    direction: str,
    texts: Sequence[Document] | None = None,
    limit: int = DEFAULT_TEXTS,
    length: int = DEFAULT_LENGTH,
    anchors: int | None = None,
    metrics: Sequence[str] | None = None,
    should_stop: ShouldStop = None,
) -> Iterator[Step | HeadMaps]:
    """Measure the heads of a direction's mapper.

    Args:
        host: the pair.
        direction: "up" or "down".
        texts: to measure on, None for the held-out ones.
        limit: at most so many passages.
        length: tokens a passage.
        anchors: first tokens that stay native, None for the mapper's own choice.
        metrics: names in `CHEAP` to keep, None for all.
        should_stop: asked before every chunk.

    Yields:
        A `Step` a chunk; the `HeadMaps` last.

    Raises:
        InputError: for an unknown metric, or texts and settings that leave nothing to measure.
        Cancelled: when asked to stop.
    """
    names = list(CHEAP) if metrics is None else list(metrics)
    unknown = [name for name in names if name not in CHEAP]
    if unknown:
        raise InputError(f"There is no metric {unknown[0]!r}.", f"Choose among {', '.join(CHEAP)}.")
    source, target = models_of(host, direction)
    mapper, _ = host.mapper(direction)
    anchors = mapper.anchors if anchors is None else anchors
    limit_positions = min(source.spec.max_positions, target.spec.max_positions)
    if not 0 <= anchors < length - 1 or length > limit_positions or limit < 1:
        raise InputError(
            f"Texts of {length:,} tokens with {anchors:,} anchors cannot be measured.",
            f"A text must be longer than the anchors and have at most {limit_positions:,} tokens.",
        )
    cut = passages(target.tokenizer, texts or documents("heldout"), length, limit)

    sums = HeadSums(target, length)
    done, total = 0, len(cut) * math.ceil(length / CHUNK)
    for number, passage in enumerate(cut, start=1):
        for _ in measure_text(
            sums, source, target, mapper, passage.ids, anchors, host.holding_lane, should_stop
        ):
            done += 1
            yield Step(done / total, f"text {number} of {len(cut)}")
    values = sums.metrics()
    yield HeadMaps(
        metrics={name: values[name].numpy() for name in names},
        layers=target.spec.layers,
        kv_heads=target.spec.kv_heads,
        query_heads=target.spec.query_heads,
        tokens=sums.tokens,
        texts=len(cut),
        anchors=anchors,
        features=1
        + max(map(len, mapper.key_layers)) * source.spec.kv_width * (2 if mapper.features == "both" else 1),
        provenance=trace(host, direction, sums.tokens, [(passage.name, passage.ids) for passage in cut]),
        details=details(sums, mapper, target.tokenizer, cut),
    )


def measure_text(
    sums: HeadSums,
    source: LoadedModel,
    target: LoadedModel,
    mapper: KVMapper,
    ids: Sequence[int],
    anchors: int,
    hold: Hold,
    should_stop: ShouldStop = None,
    chunk: int = CHUNK,
) -> Iterator[int]:
    """Add one text to the sums.

    Args:
        sums: of the target, are added to.
        source: model whose cache is mapped.
        target: model that is measured.
        mapper: from source to target.
        ids: of the text.
        anchors: first tokens that stay native and are not counted.
        hold: takes the pair's lane, which is held during each chunk and free between them.
        should_stop: asked before every chunk.
        chunk: query positions at a time.

    Yields:
        The number of tokens done, after each chunk.
    """
    with hold(should_stop):
        source_cache = new_cache(source.spec.layers, len(ids))
        forward(source.model, ids, source_cache, keep=0, chunk=512, should_stop=should_stop)
        mapped = new_cache(target.spec.layers, len(ids))
        if anchors:
            forward(target.model, ids[:anchors], mapped, keep=0)
        mapper.map_into(source_cache, mapped, anchors, len(ids), source.rotary, target.rotary, should_stop)
        del source_cache
    own = new_cache(target.spec.layers, len(ids))
    text = sums.begin(len(ids), anchors, mapped)
    for start in range(0, len(ids), chunk):
        if should_stop and should_stop():
            raise Cancelled("The measurement was stopped.")
        with (
            hold(should_stop),
            layer_inputs(target.model) as stream,
            capture_attention(target.model, sums.watcher(text, target.rotary, stream)),
        ):
            forward(target.model, ids[start : start + chunk], own, keep=0)
        sums.tokens += max(0, min(len(ids), start + chunk) - max(start, anchors))
        if start + chunk >= len(ids):
            with hold(should_stop):
                sums.estimate += estimate(target, mapped, own, ids, anchors)
        yield min(len(ids), start + chunk)


def estimate(target: LoadedModel, mapped: Cache, own: Cache, ids: Sequence[int], anchors: int) -> Tensor:
    """(L, H, 2) what patching each head's keys and values would win for the tokens after a switch.

    The mean over a switch `FOLLOWING` tokens before the end of the text and one half-way to it. The two caches, of the
    whole text, are cut to what stands before.
    """
    following = max(1, min(FOLLOWING, (len(ids) - anchors) // 4))
    end = len(ids) - 1 - following
    gains = []
    for context in (end, (anchors + end) // 2):
        for cache in (mapped, own):
            truncate(cache, context)
        gains.append(path_gains(Branches(target, mapped, own, ids[context : context + following], following)))
    return torch.stack(gains).mean(0)
