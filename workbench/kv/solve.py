"""From sums to a map in closed form: one matrix per target layer, or thin matrices that all target layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.kv import lowrank
from workbench.kv.attention import root
from workbench.kv.gather import Gatherer
from workbench.kv.mapper import KVMapper
from workbench.kv.options import FitOptions
from workbench.kv.ridge import RidgeSolver, columns_of

Progress = Callable[[float, str], None]
Check = Callable[[], None]


def outputs_of(gatherer: Gatherer, kind: str, t: int) -> slice:
    """Where one target layer's keys or values stand among the gathered outputs."""
    spec = gatherer.target.spec
    first = spec.layers if gatherer.kinds == ("both",) and kind == "value" else 0
    return slice((first + t) * spec.kv_width, (first + t + 1) * spec.kv_width)


def _solver(gatherer: Gatherer, kind: str) -> RidgeSolver:
    spec, sums = gatherer.target.spec, gatherer.kinds[0] if len(gatherer.kinds) == 1 else kind
    return RidgeSolver(
        gatherer.moments(sums), gatherer.rows(f"{sums}_choose"), gatherer.source.spec.layers, spec.kv_heads,
        spec.kv_width, kinds=1 + (gatherer.kinds == ("both",)),
    )  # fmt: skip


def solve_full(
    gatherer: Gatherer, options: FitOptions, tell: Progress, check: Check
) -> tuple[KVMapper, dict[str, Any]]:
    """A matrix per target layer: choose everything first, then solve with the choosing tokens joined."""
    spec = gatherer.target.spec
    chosen: dict[str, list[tuple[tuple[int, ...], float]]] = {}
    for kind in ("key", "value"):
        solver = _solver(gatherer, kind)
        chosen[kind] = []
        for t in range(spec.layers):
            check()
            outputs = outputs_of(gatherer, kind, t)
            chosen[kind].append(
                solver.choose(outputs, options.top_k, options.ridge, options.selection, check)
            )
            share = (t + 1 + (kind == "value") * spec.layers) / (2 * spec.layers)
            tell(0.8 * share, f"chose source layers for the {kind}s of {t + 1} of {spec.layers} layers")
    gatherer.join_chosen()
    weights: dict[str, Any] = {}
    for kind in ("key", "value"):
        solver, found = _solver(gatherer, kind), []
        for t, (layers, ridge) in enumerate(chosen[kind]):
            check()
            found.append(solver.solve(outputs_of(gatherer, kind, t), layers, ridge))
            share = (t + 1 + (kind == "value") * spec.layers) / (2 * spec.layers)
            tell(0.8 + 0.2 * share, f"solved the {kind}s of {t + 1} of {spec.layers} layers")
        weights[f"{kind}_weight"] = tuple(solution.weight.float() for solution in found)
        weights[f"{kind}_bias"] = tuple(solution.bias.float() for solution in found)
    key_layers, value_layers = (tuple(layers for layers, _ in chosen[kind]) for kind in ("key", "value"))
    mapper = KVMapper(
        gatherer.source.spec, spec, key_layers, value_layers, **weights, anchors=options.anchors,
        hold_back=options.hold_back, features=options.features,
    )  # fmt: skip
    return mapper, {kind: [ridge for _, ridge in chosen[kind]] for kind in chosen}


def metric_of(gatherer: Gatherer, kind: str) -> Tensor:
    """D of the low-rank objective for the gathered outputs of "key", "value" or "both"."""
    spec, attention = gatherer.target.spec, gatherer.attention
    if attention is None:  # every head counts alike
        variance = gatherer.moments(kind).var_y(slice(None)).view(-1, spec.head_dim).sum(1)
        return variance.clamp_min(1e-12).rsqrt().repeat_interleave(spec.head_dim)
    keys, values = (root(m).flatten(0, 1) for m in attention.metrics(gatherer.target, gatherer.target.rotary))
    return {"key": keys, "value": values, "both": torch.cat((keys, values))}[kind]


def solve_low_rank(
    gatherer: Gatherer, options: FitOptions, tell: Progress, check: Check
) -> tuple[KVMapper, dict[str, Any]]:
    """Thin matrices that all target layers share."""
    source, target = gatherer.source.spec, gatherer.target.spec
    assert options.top_k is not None
    k, kinds = min(options.top_k, source.layers), 1 + (gatherer.kinds == ("both",))
    layers: dict[str, tuple[int, ...]] = {}
    ridges: dict[str, float] = {}
    for kind in gatherer.kinds:
        check()
        tell(0.1, "choosing source layers and ridge")
        moments, everything = gatherer.moments(kind), slice(None)
        chosen = list(range(source.layers))
        if k < source.layers:
            chosen = _solver(gatherer, kind).greedy(everything, options.ridge or 1e-2, k)
        layers[kind] = tuple(sorted(chosen))
        columns = columns_of(layers[kind], source.kv_width, source.layers, kinds)
        spread = moments.var_y(everything).view(-1, target.head_dim).sum(1).clamp_min(1e-12).sqrt()
        ridges[kind] = options.ridge or lowrank.choose_ridge(
            moments, gatherer.rows(f"{kind}_choose"), columns, spread.repeat_interleave(target.head_dim),
            lowrank.RIDGE_LADDER,
        )  # fmt: skip
    gatherer.join_chosen()
    maps = {}
    for kind in gatherer.kinds:
        check()
        tell(0.4, f"solving the low-rank map of {'keys and values' if kind == 'both' else kind + 's'}")
        columns = columns_of(layers[kind], source.kv_width, source.layers, kinds)
        maps[kind] = lowrank.reduced_rank(
            gatherer.moments(kind), columns, ridges[kind], options.rank, metric_of(gatherer, kind)
        )
    by_layer: dict[str, Any] = {}
    for kind in ("key", "value"):
        found = maps[kind if len(maps) == 2 else "both"]
        at = [outputs_of(gatherer, kind, t) for t in range(target.layers)]
        by_layer[f"{kind}_weight"] = tuple(found.weight[:, outputs].float().contiguous() for outputs in at)
        by_layer[f"{kind}_bias"] = tuple(found.bias[outputs].float() for outputs in at)
    key_layers, value_layers = layers[gatherer.kinds[0]], layers[gatherer.kinds[-1]]
    mapper = KVMapper(
        source, target, (key_layers,) * target.layers, (value_layers,) * target.layers, **by_layer,
        anchors=options.anchors, hold_back=options.hold_back, features=options.features,
        reduce=tuple(found.reduce.float() for found in maps.values()),
    )  # fmt: skip
    return mapper, ridges
