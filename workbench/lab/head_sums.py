"""Sums over tokens from which all head metrics come: one pass over the texts, nothing kept of a token but its sums.

`HeadSums` is shown each attention call of a chunk by `workbench.lab.heads`; see there for the definitions. The attention
over true keys and over mapped ones exists for one layer and one block of query positions at a time, so memory does
not grow with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from workbench.kv.cache import layer_tensors
from workbench.kv.capture import attention_modules, o_proj_weight
from workbench.lab.results.heads import ZONES

if TYPE_CHECKING:
    from workbench.kv.rope import Rotary
    from workbench.models.loading import LoadedModel

DEAD = 1e-12  # variance per number below which a head counts as having none
BLOCK = 1 << 22  # numbers of one attention block: 16 MB in float32
SINKS, RECENT = 16, 64
FIRST_EDGE = 8
WORST = 10  # tokens kept of every head


def bin_edges(length: int) -> list[int]:
    """Where bins of positions begin, and where the last one ends: 0, 8, 16, 32, … doubling up to `length`."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, 2 * edges[-1] or FIRST_EDGE))
    return edges


def zones(anchors: int, length: int) -> dict[str, slice]:
    """Positions of each zone of a text, see `ZONES`; the anchors belong to none."""
    left = length - anchors
    sinks, recent = anchors + min(SINKS, left // 4), length - min(RECENT, left // 4)
    return dict(zip(ZONES, (slice(anchors, sinks), slice(sinks, recent), slice(recent, length)), strict=True))


@contextmanager
def layer_inputs(model: Any) -> Iterator[dict[int, Tensor]]:
    """The residual stream as it enters each layer: a dict layer -> (tokens, hidden), renewed by every forward pass."""
    seen: dict[int, Tensor] = {}

    def hook(layer: int) -> Callable[..., None]:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[layer] = hidden[0]

        return keep

    handles = [
        module.register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer, module in enumerate(model.base_model.layers)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Text:
    """One text that is being measured.

    Attributes:
        number: counted from 0.
        length: tokens.
        anchors: first positions, native and not counted.
        mapped: the target's cache of the whole text as the mapper makes it, anchors native.
        groups: (groups, length) float, 1 where a position belongs to a bin (first) or a zone (last three).
    """

    number: int
    length: int
    anchors: int
    mapped: Cache
    groups: Tensor

    @classmethod
    def of(cls, number: int, length: int, anchors: int, mapped: Cache, edges: list[int]) -> Text:
        """A text with its positions sorted into bins between `edges` and into zones."""
        bins = [slice(start, stop) for start, stop in pairwise(edges)]
        groups = torch.zeros(len(bins) + len(ZONES), length)
        for row, where in enumerate([*bins, *zones(anchors, length).values()]):
            groups[row, where] = 1.0
        groups[:, :anchors] = 0.0
        return cls(number, length, anchors, mapped, groups)


@dataclass(eq=False)
class _Energy:
    """Streamed sums of one kind (keys or values), all float64 on the CPU, one entry a layer and KV head."""

    error: Tensor  # (L, H, d, d) sum of e eᵀ as attention sees it
    squared_error: Tensor  # (L, H)
    by_position: Tensor  # (L, H, groups) squared error of each bin and zone
    total: Tensor  # (L, H, d)  sum of y - shift
    squared: Tensor  # (L, H)  sum of |y - shift|²
    shift: (
        Tensor  # (L, H, d)  first token measured: keeps the two sums above small where a head hardly varies
    )

    @classmethod
    def zeros(cls, layers: int, heads: int, dim: int, groups: int) -> _Energy:
        def empty(*shape: int) -> Tensor:
            return torch.zeros(layers, heads, *shape, dtype=torch.float64)

        return cls(empty(dim, dim), empty(), empty(groups), empty(dim), empty(), empty(dim))

    def add(self, layer: int, first: bool, true: Tensor, error: Tensor, seen: Tensor, groups: Tensor) -> None:
        """Add a layer's tokens.

        Args:
            layer: of the target.
            first: no token of this layer has been added yet.
            true: (H, n, d) true ones.
            error: (H, n, d) mapped minus true.
            seen: (H, n, d) the same as attention sees it: of keys, rotated.
            groups: (groups, n) to which bins and zones they belong.
        """
        true, error, seen = (tensor.cpu().double() for tensor in (true, error, seen))
        if first:
            self.shift[layer] = true[:, 0]
        centred = true - self.shift[layer][:, None]
        squares = error.square().sum(2)
        self.error[layer] += seen.transpose(1, 2) @ seen
        self.squared_error[layer] += squares.sum(1)
        self.by_position[layer] += squares @ groups.double().T
        self.total[layer] += centred.sum(1)
        self.squared[layer] += centred.square().sum((1, 2))

    def variance(self, n: int) -> Tensor:
        """(L, H) sum of squares about the mean, NaN for a head without variance."""
        variance = self.squared - self.total.square().sum(-1) / max(n, 1)
        return torch.where(variance > DEAD * max(n, 1) * self.total.shape[-1], variance, math.nan)

    def r2(self, n: int) -> Tensor:
        """(L, H), NaN for a head without variance."""
        return 1 - self.squared_error / self.variance(n)

    def relative(self, n: int, counts: Tensor) -> Tensor:
        """(L, H, groups) mean squared error of each bin and zone over the variance; NaN where there is neither."""
        each = torch.where(counts > 0, counts, math.nan)
        return self.by_position / each / (self.variance(n) / max(n, 1))[..., None]


@dataclass(eq=False)
class _Worst:
    """The tokens with the largest output error of every KV head, (L, H, WORST) each."""

    error: Tensor
    text: Tensor
    position: Tensor

    def add(self, layer: int, error: Tensor, text: int, start: int) -> None:
        """Add (H, n) errors of positions start.. of a text."""
        heads, n = error.shape
        where = torch.arange(start, start + n).expand(heads, n)
        joined = torch.cat((self.error[layer], error), 1)
        texts = torch.cat((self.text[layer], torch.full_like(where, text)), 1)
        positions = torch.cat((self.position[layer], where), 1)
        best, index = joined.topk(WORST, dim=1)
        self.error[layer] = best
        self.text[layer], self.position[layer] = texts.gather(1, index), positions.gather(1, index)


@dataclass(eq=False)
class HeadSums:
    """Everything that is summed over tokens, for all layers and heads of the target.

    Args:
        target: the model that is measured.
        longest: tokens of the longest text, for the bins of positions.
    """

    target: LoadedModel
    longest: int
    tokens: int = 0
    texts: int = 0
    edges: list[int] = field(init=False)
    counts: Tensor = field(init=False)  # (groups,) tokens measured in each bin and zone
    keys: _Energy = field(init=False)
    values: _Energy = field(init=False)
    queries: Tensor = field(init=False)  # (L, H, d, d) sum of q qᵀ over positions and the group's query heads
    cosine: Tensor = field(init=False)  # (L, Hq) sums
    cosine_worst: Tensor = field(init=False)
    attention_kl: Tensor = field(init=False)
    output_error: Tensor = field(init=False)  # (L, H) sums
    output_error_abs: Tensor = field(init=False)
    estimate: Tensor = field(init=False)  # (L, H, 2) sums over texts of what patching would win: keys, values
    worst: _Worst = field(init=False)

    def __post_init__(self) -> None:
        spec = self.target.spec
        self.edges = bin_edges(self.longest)
        groups = len(self.edges) - 1 + len(ZONES)
        shape = (spec.layers, spec.kv_heads)
        self.counts = torch.zeros(groups, dtype=torch.float64)
        self.keys = _Energy.zeros(*shape, spec.head_dim, groups)
        self.values = _Energy.zeros(*shape, spec.head_dim, groups)
        self.queries = torch.zeros(*shape, spec.head_dim, spec.head_dim, dtype=torch.float64)
        self.cosine = torch.zeros(spec.layers, spec.query_heads, dtype=torch.float64)
        self.cosine_worst = torch.full_like(self.cosine, math.inf)
        self.attention_kl = torch.zeros_like(self.cosine)
        self.output_error = torch.zeros(*shape, dtype=torch.float64)
        self.output_error_abs = torch.zeros_like(self.output_error)
        self.estimate = torch.zeros(*shape, 2, dtype=torch.float64)
        none = torch.full((*shape, WORST), -1)
        self.worst = _Worst(none.float(), none, none.clone())
        self._scaling = [
            float(getattr(module, "scaling", spec.head_dim**-0.5))
            for module in attention_modules(self.target.model)
        ]

    def begin(self, length: int, anchors: int, mapped: Cache) -> Text:
        """Start a text; its tokens count from now on."""
        text = Text.of(self.texts, length, anchors, mapped, self.edges)
        self.counts += text.groups.double().sum(1)
        self.texts += 1
        return text

    def watcher(self, text: Text, rotary: Rotary, stream: dict[int, Tensor]) -> Callable[..., None]:
        """A `capture_attention` visitor that adds each layer's part of a chunk.

        Args:
            text: that is being read.
            rotary: the target's.
            stream: see `layer_inputs`.
        """

        def visit(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            stop = k.shape[2]
            start = stop - q.shape[2]
            skip = max(0, text.anchors - start)  # queries among the anchors read native keys only
            if skip >= q.shape[2]:
                return
            k_map, v_map = (tensor[:, :, :stop] for tensor in layer_tensors(text.mapped, layer))
            new = slice(start + skip, stop)
            mine, theirs = ([t[:, :, new].float() for t in pair] for pair in ((k, v), (k_map, v_map)))
            self._add_errors(layer, mine, theirs, new.start, rotary, text)
            rows = max(1, BLOCK // (q.shape[1] * stop))
            for first in range(skip, q.shape[2], rows):
                last = min(q.shape[2], first + rows)
                seen = slice(0, start + last)
                self._add_attention(
                    layer, q[0, :, first:last].float(), k[0, :, seen].float(), v[0, :, seen].float(),
                    k_map[0, :, seen].float(), v_map[0, :, seen].float(), start + first,
                    stream[layer][first:last].float(), text.number,
                )  # fmt: skip

        return visit

    def _add_errors(
        self, layer: int, true: list[Tensor], mapped: list[Tensor], start: int, rotary: Rotary, text: Text
    ) -> None:
        """Errors of new tokens; keys and values (1, H, n, d)."""
        (k, v), (k_map, v_map) = true, mapped
        first = self.tokens == 0 and start == text.anchors
        groups = text.groups[:, start : start + k.shape[2]]
        k_pre, k_map_pre = (rotary.strip(keys, start, layer=layer) for keys in (k, k_map))
        self.keys.add(layer, first, k_pre[0], (k_map_pre - k_pre)[0], (k_map - k)[0], groups)
        error = (v_map - v)[0]
        self.values.add(layer, first, v[0], error, error, groups)

    def _add_attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_map: Tensor,
        v_map: Tensor,
        start: int,
        stream: Tensor,
        text: int,
    ) -> None:
        """Attention of queries q (Hq, nq, d) at positions start.. over k, v (H, nk, d) and over their mapped twins.

        stream is the residual stream (nq, hidden) that enters the layer.
        """
        heads, (query_heads, n, dim) = k.shape[0], q.shape
        group = query_heads // heads
        grouped = q.reshape(heads, group * n, dim)
        self.queries[layer] += (grouped.transpose(1, 2) @ grouped).cpu().double()
        hidden = torch.arange(k.shape[1], device=q.device) > start + torch.arange(n, device=q.device)[:, None]

        def log_attention(keys: Tensor) -> Tensor:
            scores = (grouped @ keys.transpose(1, 2)).mul_(self._scaling[layer]).view(heads, group, n, -1)
            return scores.masked_fill_(hidden, -math.inf).log_softmax(-1)

        def output(weights: Tensor, values: Tensor) -> Tensor:
            return (weights.view(heads, group * n, -1) @ values).view(heads, group, n, dim)

        true, mapped = log_attention(k), log_attention(k_map)
        out, new_out = output(true.exp(), v), output(mapped.exp(), v_map)
        cosine = torch.cosine_similarity(new_out, out, dim=-1).view(query_heads, n)
        # 0 · (-inf + inf) where a token is hidden: its weight is 0, and so is its share.
        kl = torch.where(hidden, 0.0, true.exp() * (true - mapped)).sum(-1).clamp_min_(0.0)
        self.cosine[layer] += cosine.sum(-1).cpu().double()
        self.cosine_worst[layer] = torch.minimum(self.cosine_worst[layer], cosine.amin(-1).cpu().double())
        self.attention_kl[layer] += kl.view(query_heads, n).sum(-1).cpu().double()
        self._add_output(layer, out, new_out - out, stream, text, start)

    def _add_output(
        self, layer: int, out: Tensor, error: Tensor, stream: Tensor, text: int, start: int
    ) -> None:
        """What an error of the heads' outputs (H, group, n, d) does to the residual stream (n, hidden)."""
        weight = o_proj_weight(self.target.model, layer).to(out.device, torch.float32)  # (hidden, Hq*d)
        slices = weight.view(weight.shape[0], out.shape[0], -1).permute(1, 2, 0)  # (H, group*d, hidden)
        added, wrong = (tensor.transpose(1, 2).flatten(2) @ slices for tensor in (out, error))
        energy = wrong.square().sum(-1)  # (H, n)
        share = energy / (stream + added.sum(0)).square().sum(-1).clamp_min(1e-30)
        self.output_error_abs[layer] += energy.sum(-1).cpu().double()
        self.output_error[layer] += share.sum(-1).cpu().double()
        self.worst.add(layer, share.cpu(), text, start)

    def output_moment(self) -> Tensor:
        """(L, H, d, d) sum of Wᵀ W over each group's slices of the output projection."""
        spec = self.target.spec
        moment = torch.zeros_like(self.queries)
        for layer in range(spec.layers):
            weight = o_proj_weight(self.target.model, layer).cpu().double()  # (hidden, Hq*d)
            slices = weight.view(weight.shape[0], spec.kv_heads, -1, spec.head_dim)
            moment[layer] = torch.einsum("ohgd,ohge->hde", slices, slices)
        return moment

    def metrics(self, reads: Tensor | None = None) -> dict[str, Tensor]:
        """All metrics, (L, H) or (L, Hq) float64; `reads`: the `output_moment`, where it is known already."""
        n = max(self.tokens, 1)
        zone_errors = {
            f"{kind}_error_{zone}": energy.relative(self.tokens, self.counts)[..., index - len(ZONES)]
            for kind, energy in (("k", self.keys), ("v", self.values))
            for index, zone in enumerate(ZONES)
        }
        return {
            "r2_k": self.keys.r2(self.tokens),
            "r2_v": self.values.r2(self.tokens),
            "cosine": self.cosine / n,
            "cosine_worst": self.cosine_worst,
            "attention_kl": self.attention_kl / n,
            "k_error_in_q": concentration(self.keys.error, self.queries),
            "v_error_in_o": concentration(
                self.values.error, self.output_moment() if reads is None else reads
            ),
            "output_error": self.output_error / n,
            "output_error_abs": self.output_error_abs / n,
            "patch_estimate": self.estimate.sum(-1) / max(self.texts, 1),
            **zone_errors,
        }


def spectrum(error: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """How the energy of what reads, and of the error, is shared out among the directions that are read.

    Args:
        error: (..., d, d) second moment of the error.
        weight: (..., d, d) second moment of what reads it; its eigenvectors are the directions, largest first.

    Returns:
        Two (..., d) whose entries sum to 1: the energy that reads, the energy of the error; NaN where there is none.
    """
    values, vectors = torch.linalg.eigh(weight)
    read = values.flip(-1).clamp_min(0.0)
    along = torch.einsum("...ij,...ik,...kj->...j", vectors, error, vectors).flip(-1).clamp_min(0.0)

    def shares(energy: Tensor) -> Tensor:
        total = energy.sum(-1, keepdim=True)
        return torch.where(total > 0, energy / total, math.nan)

    return shares(read), shares(along)


def concentration(error: Tensor, weight: Tensor) -> Tensor:
    """The ratio d tr(E M) / (tr E tr M): 1 for an error without direction, d for one along the only direction read.

    Args:
        error: (..., d, d) second moment of the error.
        weight: (..., d, d) second moment of what reads it.

    Returns:
        (...); NaN where there is no error or nothing that reads it.
    """
    dim = error.shape[-1]
    traces = error.diagonal(dim1=-2, dim2=-1).sum(-1) * weight.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(traces > 0, dim * (error * weight).sum((-2, -1)) / traces, math.nan)
