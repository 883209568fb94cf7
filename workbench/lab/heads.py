"""Which heads pay for the handoff: a mapper's metrics per layer and head, on held-out text.

The target reads each text natively, in chunks, while its attention is watched; the mapped cache of the same
text, made by the real `KVMapper.map_into` behind native anchors, lies beside it. Each attention call of a
chunk is then repeated with this layer's mapped keys and values in place of the true ones, so that every
layer is judged on true queries and no error travels from layer to layer. Only one layer's (query heads,
chunk, tokens) attention exists at a time.

Definitions; e is a token's error, d the head size, sums over all tokens but the anchors:

    r2            1 - sum |e|² / sum |y - mean y|²                keys y without their rotation
    cosine        mean (and worst) over query positions of cos(true output, output over the mapped cache)
    attention_kl  mean over query positions of KL(attention over true keys ‖ over mapped keys)
    k_error_in_q  d tr(E M) / (tr E tr M), E = sum e eᵀ of rotated keys, M = sum q qᵀ of the group's rotated
                  queries: the mean of (q·e)² over all pairs, over what an error of the same size without a
                  preferred direction gives
    v_error_in_o  the same for values, with M = sum Wᵀ W over the group's slices of the output projection

`k_error_in_q` takes the keys rotated because that is how a query meets their error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from workbench.errors import Cancelled, InputError
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.capture import attention_modules, capture_attention, o_proj_weight
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.lab.corpus import Document, documents, passages
from workbench.lab.provenance import models_of, trace
from workbench.lab.results.common import Step
from workbench.lab.results.heads import METRICS, HeadMaps

if TYPE_CHECKING:
    from workbench.kv.rope import Rotary
    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

ShouldStop = Callable[[], bool] | None
Hold = Callable[[ShouldStop], AbstractContextManager[None]]
DEFAULT_TEXTS, DEFAULT_LENGTH = 8, 512
CHUNK = 256
DEAD = 1e-12  # variance per number below which a head counts as having none


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
        metrics: names of `METRICS` to keep, None for all.
        should_stop: asked before every chunk.

    Yields:
        A `Step` a chunk; the `HeadMaps` last.

    Raises:
        InputError: for an unknown metric, or texts and settings that leave nothing to measure.
        Cancelled: when asked to stop.
    """
    names = list(METRICS) if metrics is None else list(metrics)
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise InputError(f"There is no metric {unknown[0]!r}.", f"Choose among {', '.join(METRICS)}.")
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

    sums = HeadSums(target)
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
        features=1 + max(map(len, mapper.key_layers)) * source.spec.kv_width,
        provenance=trace(host, direction, sums.tokens, [(passage.name, passage.ids) for passage in cut]),
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
    for start in range(0, len(ids), chunk):
        if should_stop and should_stop():
            raise Cancelled("The measurement was stopped.")
        watch = sums.watcher(mapped, anchors, target.rotary)
        with hold(should_stop), capture_attention(target.model, watch):
            forward(target.model, ids[start : start + chunk], own, keep=0)
        sums.tokens += max(0, min(len(ids), start + chunk) - max(start, anchors))
        yield min(len(ids), start + chunk)


@dataclass(eq=False)
class _Energy:
    """Streamed sums of one kind (keys or values), all float64 on the CPU, one entry a layer and KV head."""

    error: Tensor  # (L, H, d, d) sum of e eᵀ as attention sees it
    squared_error: Tensor  # (L, H)
    total: Tensor  # (L, H, d)  sum of y - shift
    squared: Tensor  # (L, H)  sum of |y - shift|²
    shift: (
        Tensor  # (L, H, d)  first token measured: keeps the two sums above small where a head hardly varies
    )

    @classmethod
    def zeros(cls, layers: int, heads: int, dim: int) -> _Energy:
        def empty(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        return cls(
            empty(layers, heads, dim, dim),
            empty(layers, heads),
            empty(layers, heads, dim),
            empty(layers, heads),
            empty(layers, heads, dim),
        )

    def add(self, layer: int, first: bool, true: Tensor, error: Tensor, seen: Tensor) -> None:
        """Add a layer's tokens, all (H, n, d): true ones, their error, the error as attention sees it."""
        true, error, seen = (tensor.cpu().double() for tensor in (true, error, seen))
        if first:
            self.shift[layer] = true[:, 0]
        centred = true - self.shift[layer][:, None]
        self.error[layer] += seen.transpose(1, 2) @ seen
        self.squared_error[layer] += error.square().sum((1, 2))
        self.total[layer] += centred.sum(1)
        self.squared[layer] += centred.square().sum((1, 2))

    def r2(self, n: int) -> Tensor:
        """(L, H), NaN for a head without variance."""
        variance = self.squared - self.total.square().sum(-1) / max(n, 1)
        alive = variance > DEAD * max(n, 1) * self.total.shape[-1]
        return torch.where(alive, 1 - self.squared_error / variance, math.nan)


@dataclass(eq=False)
class HeadSums:
    """Everything that is summed over tokens, for all layers and heads of the target."""

    target: LoadedModel
    tokens: int = 0
    keys: _Energy = field(init=False)
    values: _Energy = field(init=False)
    queries: Tensor = field(
        init=False
    )  # (L, H, d, d) sum of q qᵀ over positions and the query heads of the group
    cosine: Tensor = field(init=False)  # (L, Hq) sums
    cosine_worst: Tensor = field(init=False)
    attention_kl: Tensor = field(init=False)

    def __post_init__(self) -> None:
        spec = self.target.spec
        self.keys = _Energy.zeros(spec.layers, spec.kv_heads, spec.head_dim)
        self.values = _Energy.zeros(spec.layers, spec.kv_heads, spec.head_dim)
        self.queries = torch.zeros(
            spec.layers, spec.kv_heads, spec.head_dim, spec.head_dim, dtype=torch.float64
        )
        self.cosine = torch.zeros(spec.layers, spec.query_heads, dtype=torch.float64)
        self.cosine_worst = torch.full_like(self.cosine, math.inf)
        self.attention_kl = torch.zeros_like(self.cosine)
        self._scaling = [
            float(getattr(module, "scaling", spec.head_dim**-0.5))
            for module in attention_modules(self.target.model)
        ]

    def watcher(self, mapped: Cache, anchors: int, rotary: Rotary) -> Callable[..., None]:
        """A `capture_attention` visitor that adds each layer's part of a chunk.

        Args:
            mapped: the target's cache of the whole text as the mapper makes it, anchors native.
            anchors: first positions, not counted.
            rotary: the target's.
        """

        def visit(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            stop = k.shape[2]
            start = stop - q.shape[2]
            skip = max(0, anchors - start)  # queries among the anchors read native keys only
            if skip >= q.shape[2]:
                return
            k_map, v_map = (tensor[:, :, :stop] for tensor in layer_tensors(mapped, layer))
            new = slice(start + skip, stop)
            first = self.tokens == 0 and new.start == anchors
            self._add_errors(
                layer,
                first,
                k[:, :, new],
                v[:, :, new],
                k_map[:, :, new],
                v_map[:, :, new],
                new.start,
                rotary,
            )
            self._add_attention(
                layer, q[0, :, skip:], k[0], k_map[0], v_map[0], out[0, skip:].transpose(0, 1), start + skip
            )

        return visit

    def _add_errors(
        self,
        layer: int,
        first: bool,
        k: Tensor,
        v: Tensor,
        k_map: Tensor,
        v_map: Tensor,
        start: int,
        rotary: Rotary,
    ) -> None:
        """Errors of new tokens; all tensors (1, H, n, d)."""
        k, v, k_map, v_map = (tensor.float() for tensor in (k, v, k_map, v_map))
        k_pre, k_map_pre = rotary.strip(k, start), rotary.strip(k_map, start)
        self.keys.add(layer, first, k_pre[0], (k_map_pre - k_pre)[0], (k_map - k)[0])
        error = (v_map - v)[0]
        self.values.add(layer, first, v[0], error, error)

    def _add_attention(
        self, layer: int, q: Tensor, k: Tensor, k_map: Tensor, v_map: Tensor, out: Tensor, start: int
    ) -> None:
        """Attention of queries q (Hq, nq, d) at positions start.. over k (H, nk, d) and over its mapped twin.

        out is the true output (Hq, nq, d).
        """
        heads, (query_heads, n, dim) = k.shape[0], q.shape
        group = query_heads // heads
        grouped = q.float().reshape(heads, group * n, dim)
        self.queries[layer] += (grouped.transpose(1, 2) @ grouped).cpu().double()
        hidden = torch.arange(k.shape[1], device=q.device) > start + torch.arange(n, device=q.device)[:, None]

        def log_attention(keys: Tensor) -> Tensor:
            scores = (
                (grouped @ keys.float().transpose(1, 2)).mul_(self._scaling[layer]).view(heads, group, n, -1)
            )
            return scores.masked_fill_(hidden, -math.inf).log_softmax(-1)

        true, mapped = log_attention(k), log_attention(k_map)
        weights = mapped.exp()
        new_out = (weights.view(heads, group * n, -1) @ v_map.float()).view(query_heads, n, dim)
        cosine = torch.cosine_similarity(new_out, out.float(), dim=-1)
        # 0 · (-inf + inf) where a token is hidden: its weight is 0, and so is its share.
        kl = (
            torch.where(hidden, 0.0, true.exp() * (true - mapped))
            .sum(-1)
            .clamp_min_(0.0)
            .view(query_heads, n)
        )
        self.cosine[layer] += cosine.sum(-1).cpu().double()
        self.cosine_worst[layer] = torch.minimum(self.cosine_worst[layer], cosine.amin(-1).cpu().double())
        self.attention_kl[layer] += kl.sum(-1).cpu().double()

    def metrics(self) -> dict[str, Tensor]:
        """All metrics, (L, H) or (L, Hq) float64."""
        spec = self.target.spec
        n = max(self.tokens, 1)
        group = spec.query_heads // spec.kv_heads
        output = torch.zeros_like(self.queries)
        for layer in range(spec.layers):
            weight = o_proj_weight(self.target.model, layer).cpu().double()  # (hidden, Hq*d)
            slices = weight.view(weight.shape[0], spec.kv_heads, group, spec.head_dim)
            output[layer] = torch.einsum("ohgd,ohge->hde", slices, slices)
        return {
            "r2_k": self.keys.r2(self.tokens),
            "r2_v": self.values.r2(self.tokens),
            "cosine": self.cosine / n,
            "cosine_worst": self.cosine_worst,
            "attention_kl": self.attention_kl / n,
            "k_error_in_q": concentration(self.keys.error, self.queries),
            "v_error_in_o": concentration(self.values.error, output),
        }


def concentration(error: Tensor, weight: Tensor) -> Tensor:
    """d tr(E M) / (tr E tr M): 1 for an error without direction, d for one along the only direction read.

    Args:
        error: (..., d, d) second moment of the error.
        weight: (..., d, d) second moment of what reads it.

    Returns:
        (...); NaN where there is no error or nothing that reads it.
    """
    dim = error.shape[-1]
    traces = error.diagonal(dim1=-2, dim2=-1).sum(-1) * weight.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(traces > 0, dim * (error * weight).sum((-2, -1)) / traces, math.nan)
