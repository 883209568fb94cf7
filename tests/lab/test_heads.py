"""Every head metric against a plain computation in float64 that keeps all attention, and planted faults."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_model, tiny_tokenizer
from tests.lab.conftest import make_host, random_mapper, texts
from workbench.errors import Cancelled, InputError
from workbench.kv.cache import copy, layer_tensors, new_cache, truncate
from workbench.kv.capture import capture_attention, capture_keys_pre
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.lab import head_detail, head_sums, heads
from workbench.lab.attribution import path_gains
from workbench.lab.branches import Branches
from workbench.lab.corpus import passages
from workbench.lab.results import METRICS, HeadMaps, Step, finish
from workbench.lab.results.heads import CHEAP
from workbench.models.loading import LoadedModel, wrap
from workbench.models.pair import PairHost

LENGTH, ANCHORS = 60, 2


def brute_force(
    source: LoadedModel, target: LoadedModel, mapper: KVMapper, sequences: list[Any]
) -> dict[str, Tensor]:
    """All metrics, from tensors of whole texts and full attention matrices in float64."""
    spec = target.spec
    layers, heads_kv, heads_q, dim = spec.layers, spec.kv_heads, spec.query_heads, spec.head_dim
    group = heads_q // heads_kv
    queries: list[list[Tensor]] = [[] for _ in range(layers)]
    keep: dict[str, list[list[Tensor]]] = {
        name: [[] for _ in range(layers)] for name in ("k", "km", "v", "vm", "kr", "kmr")
    }
    cosine: list[list[Tensor]] = [[] for _ in range(layers)]
    kl: list[list[Tensor]] = [[] for _ in range(layers)]
    estimates: list[Tensor] = []  # against finite differences in test_patch.py
    output: list[list[Tensor]] = [[] for _ in range(layers)]  # (H, n, 2): squared norm, and over the stream's
    for ids in sequences:
        seen: dict[int, tuple[Tensor, ...]] = {}
        native = target.model.base_model(
            input_ids=torch.tensor([ids]), output_hidden_states=True
        ).hidden_states

        def visit(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, seen: dict = seen) -> None:
            seen[layer] = tuple(t.clone().double() for t in (q[0], k[0], v[0], out[0].transpose(0, 1)))

        with capture_keys_pre(target.model) as pre, capture_attention(target.model, visit):
            forward(target.model, ids, new_cache(layers), keep=0)
        source_cache, mapped = new_cache(source.spec.layers), new_cache(layers)
        forward(source.model, ids, source_cache, keep=0)
        forward(target.model, ids[:ANCHORS], mapped, keep=0)
        mapper.map_into(source_cache, mapped, ANCHORS, len(ids), source.rotary, target.rotary)
        for end in (len(ids) - 15, (ANCHORS + len(ids) - 15) // 2):  # a switch near the end and one half-way
            own, context = new_cache(layers), copy(mapped)
            forward(target.model, ids[:end], own, keep=0)
            truncate(context, end)
            following = ids[end : end + 14]
            estimates.append(path_gains(Branches(target, context, own, following, 14)).sum(-1))
        causal = torch.ones(len(ids), len(ids)).tril().bool()
        for layer in range(layers):
            q, k, v, out = seen[layer]
            k_map, v_map = (t[0].double() for t in layer_tensors(mapped, layer))
            keep["k"][layer].append(pre[layer][0].double()[:, ANCHORS:])
            keep["km"][layer].append(target.rotary.strip(k_map.float())[:, ANCHORS:].double())
            for name, tensor in (("v", v), ("vm", v_map), ("kr", k), ("kmr", k_map)):
                keep[name][layer].append(tensor[:, ANCHORS:])
            queries[layer].append(q[:, ANCHORS:])

            def attention(keys: Tensor, q: Tensor = q, causal: Tensor = causal) -> Tensor:
                scores = q @ keys.repeat_interleave(group, 0).transpose(1, 2) / dim**0.5
                return scores.masked_fill(~causal, -math.inf).softmax(-1)

            true, wrong = attention(k), attention(k_map)
            cosine[layer].append(
                torch.cosine_similarity(wrong @ v_map.repeat_interleave(group, 0), out, dim=-1)[:, ANCHORS:]
            )
            weight = target.model.model.layers[layer].self_attn.o_proj.weight.double()
            own_out = true @ v.repeat_interleave(group, 0)
            stream = native[layer][0].double() + own_out.transpose(0, 1).flatten(1) @ weight.T
            wrong_out = wrong @ v_map.repeat_interleave(group, 0) - own_out
            added = torch.stack([wrong_out[h] @ weight[:, h * dim : (h + 1) * dim].T for h in range(heads_q)])
            energy = added.view(heads_kv, group, len(ids), -1).sum(1).square().sum(-1)
            output[layer].append(torch.stack((energy, energy / stream.square().sum(-1)), -1)[:, ANCHORS:])
            kl[layer].append((torch.xlogy(true, true) - torch.xlogy(true, wrong)).sum(-1)[:, ANCHORS:])

    def stacked(name: str, layer: int) -> Tensor:
        return torch.cat(keep[name][layer], 1)

    found = {
        name: torch.zeros(layers, heads_kv if m.per == "kv" else heads_q)
        for name, m in METRICS.items()
        if name in CHEAP
    }
    found["patch_estimate"] = torch.stack(estimates).mean(0)
    for layer in range(layers):
        for true, wrong, name in (("k", "km", "r2_k"), ("v", "vm", "r2_v")):
            y, error = stacked(true, layer), stacked(wrong, layer) - stacked(true, layer)
            variance = (y - y.mean(1, keepdim=True)).square().sum((1, 2))
            found[name][layer] = 1 - error.square().sum((1, 2)) / variance
        found["cosine"][layer] = torch.cat(cosine[layer], 1).mean(1)
        found["cosine_worst"][layer] = torch.cat(cosine[layer], 1).amin(1)
        found["attention_kl"][layer] = torch.cat(kl[layer], 1).mean(1)
        absolute, relative = torch.cat(output[layer], 1).mean(1).unbind(-1)
        found["output_error_abs"][layer], found["output_error"][layer] = absolute, relative
        for true, wrong, kind in (("k", "km", "k"), ("v", "vm", "v")):
            y = stacked(true, layer)
            spread = (y - y.mean(1, keepdim=True)).square().sum(-1).mean(1)
            for zone, where in (
                ("sinks", slice(2, 16)),
                ("middle", slice(16, 46)),
                ("recent", slice(46, 60)),
            ):
                errors = [
                    (b - a)[:, where.start - ANCHORS : where.stop - ANCHORS].square().sum(-1)
                    for a, b in zip(keep[true][layer], keep[wrong][layer], strict=True)
                ]
                found[f"{kind}_error_{zone}"][layer] = torch.cat(errors, 1).mean(1) / spread
        weight = target.model.model.layers[layer].self_attn.o_proj.weight.double()
        for head in range(heads_kv):
            members = range(head * group, (head + 1) * group)
            e_k = stacked("kmr", layer)[head] - stacked("kr", layer)[head]
            e_v = stacked("vm", layer)[head] - stacked("v", layer)[head]
            q = torch.cat([torch.cat(queries[layer], 1)[h] for h in members])
            pairs = (q @ e_k.T).square().mean() / (
                q.square().sum(1).mean() * e_k.square().sum(1).mean() / dim
            )
            found["k_error_in_q"][layer, head] = pairs
            slices = [weight[:, h * dim : (h + 1) * dim] for h in members]
            energy = sum((e_v @ w.T).square().sum() for w in slices)
            even = sum(w.square().sum() for w in slices) * e_v.square().sum() / dim
            found["v_error_in_o"][layer, head] = energy / even
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3", "llama-yarn"])
def test_every_metric_equals_the_plain_computation(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    source = wrap(tiny_model("qwen2", seed=3), tokenizer, "source")
    target = wrap(tiny_model(kind, seed=4), tokenizer, "target")
    mapper = random_mapper(source.spec, target.spec, anchors=ANCHORS)
    host = PairHost.from_models(source, target, {"up": (mapper, None)})
    monkeypatch.setattr(heads, "CHUNK", 17)
    monkeypatch.setattr(head_sums, "BLOCK", 1000)  # a few query positions at a time
    stream = heads.stream(host, "up", texts(2), limit=2, length=LENGTH)
    maps = finish(stream)
    sequences = [passage.ids for passage in passages(tokenizer, texts(2), LENGTH, 2)]
    expected = brute_force(source, target, mapper, sequences)
    assert maps.tokens == 2 * (LENGTH - ANCHORS) and maps.texts == 2
    for name, values in expected.items():
        assert np.allclose(maps.metrics[name], values.numpy(), atol=2e-4, rtol=2e-3), name


def test_chunks_do_not_matter(host: PairHost) -> None:
    source, target = host.model("small"), host.model("large")
    ids = passages(target.tokenizer, texts(1), 50, 1)[0].ids
    results = []
    for chunk in (1, 7, 50):
        sums = head_sums.HeadSums(target, 50)
        for _ in heads.measure_text(
            sums, source, target, host.mapper("up")[0], ids, 5, host.holding_lane, chunk=chunk
        ):
            pass
        assert sums.tokens == 45
        results.append(sums.metrics())
    for other in results[1:]:
        for name in CHEAP:
            assert torch.allclose(results[0][name], other[name], atol=1e-4, rtol=1e-3), name


def test_an_exact_mapper_has_no_error(same: PairHost) -> None:
    maps = finish(heads.stream(same, "up", texts(1), limit=1, length=64))
    for name in (
        "output_error",
        "output_error_abs",
        "patch_estimate",
        "k_error_sinks",
        "v_error_middle",
        "k_error_recent",
    ):
        assert maps.metrics[name] == pytest.approx(0.0, abs=1e-8)
    for name in ("r2_k", "r2_v", "cosine", "cosine_worst"):
        assert maps.metrics[name] == pytest.approx(1.0, abs=1e-5)
    assert maps.metrics["attention_kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_fault_in_one_head_is_found_there(same: PairHost) -> None:
    exact, _ = same.mapper("up")
    spec = exact.target
    generator = torch.Generator().manual_seed(0)
    weight = exact.value_weight[1].clone()
    weight[:, spec.head_dim :] += 0.5 * torch.randn(spec.kv_width, spec.head_dim, generator=generator)
    broken = replace(exact, value_weight=(exact.value_weight[0], weight, exact.value_weight[2]))
    host = PairHost.from_models(same.model("small"), same.model("large"), {"up": (broken, None)})
    maps = finish(heads.stream(host, "up", texts(1), limit=1, length=64))
    assert maps.worst("r2_v") == (1, 1)
    assert maps.worst("cosine")[0] == 1 and maps.worst("cosine")[1] in (2, 3)  # its query heads
    assert maps.worst("output_error") == maps.worst("v_error_sinks") == (1, 1)
    assert maps.details is not None
    hits = maps.details.tokens[1][1]
    assert len(hits) == 10 and hits[0].error >= hits[-1].error > max(
        h.error for h in maps.details.tokens[0][0]
    )
    others = np.delete(maps.metrics["r2_v"].ravel(), 1 * 2 + 1)
    assert others.min() > 0.999


def test_error_where_queries_look_tells_directions_apart() -> None:
    dim = 8
    queries = torch.diag(torch.tensor([9.0] + [1.0 / 7] * 7)).double()
    along, across = torch.zeros(dim, dim).double(), torch.zeros(dim, dim).double()
    along[0, 0] = across[3, 3] = 2.0
    assert head_sums.concentration(along, queries) == pytest.approx(7.2)
    assert head_sums.concentration(across, queries) == pytest.approx(8 / 70)
    assert head_sums.concentration(torch.eye(dim).double(), queries) == pytest.approx(1.0)
    assert torch.isnan(head_sums.concentration(torch.zeros(dim, dim).double(), queries))


def test_a_dead_head_is_nan_and_survives_json() -> None:
    host = make_host()
    with torch.no_grad():
        projection = host.model("large").model.model.layers[0].self_attn.v_proj.weight
        projection[: host.model("large").spec.head_dim] = 0.0
    maps = finish(heads.stream(host, "up", texts(1), limit=1, length=40))
    assert math.isnan(maps.metrics["r2_v"][0, 0]) and not np.isnan(maps.metrics["r2_v"][1:]).any()
    data = maps.to_json()
    assert data["metrics"]["r2_v"][0][0] is None and data["heads"] == 2 and data["layers"] == 3
    again = HeadMaps.from_json(data)
    assert np.isnan(again.metrics["r2_v"][0, 0]) and again.worst("r2_v") == maps.worst("r2_v")
    assert again.to_json() == data


def test_progress_cancel_and_wrong_input(host: PairHost) -> None:
    items = list(heads.stream(host, "down", texts(2), limit=3, length=40, metrics=["cosine"]))
    fractions = [item.fraction for item in items[:-1] if isinstance(item, Step)]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and list(items[-1].metrics) == ["cosine"]
    with pytest.raises(Cancelled):
        list(heads.stream(host, "up", texts(2), limit=2, length=40, should_stop=lambda: True))
    for wrong in ({"metrics": ["beauty"]}, {"length": 10**6}, {"anchors": 40, "length": 40}, {"anchors": -1}):
        with pytest.raises(InputError):
            list(heads.stream(host, "up", texts(2), limit=2, **wrong))  # type: ignore[arg-type]


def test_details_of_a_head(host: PairHost) -> None:
    maps = finish(heads.stream(host, "up", texts(2), limit=2, length=LENGTH))
    details, mapper = maps.details, host.mapper("up")[0]
    assert details is not None and details.edges == (0, 8, 16, 32, LENGTH)
    assert details.bin_tokens == (12, 16, 32, 56)
    weights = np.array(details.bin_tokens) / sum(details.bin_tokens)
    assert np.allclose((details.key_position * weights).sum(-1), 1 - maps.metrics["r2_k"])
    assert np.allclose((details.value_position * weights).sum(-1), 1 - maps.metrics["r2_v"])
    for name in ("key_read", "key_error", "value_read", "value_error", "key_sources", "value_sources"):
        assert np.allclose(getattr(details, name).sum(-1), 1), name
    dim = mapper.target.head_dim
    concentrated = dim * (details.value_read * details.value_error).sum(-1)
    assert np.allclose(concentrated, maps.metrics["v_error_in_o"])  # the same sum, read along the directions
    blocks = mapper.key_weight[1].view(2, mapper.source.kv_width, 2, dim).square().sum((1, 3))
    assert np.allclose(details.key_sources[1, :, :2], (blocks / blocks.sum(0)).T.numpy(), atol=1e-6)
    hit = details.tokens[0][1][0]
    ids = {p.name: p.ids for p in passages(host.model("large").tokenizer, texts(2), LENGTH, 2)}[hit.text]
    assert hit.token == host.model("large").tokenizer.decode([ids[hit.position]])
    again = HeadMaps.from_json(json.loads(json.dumps(maps.to_json(), allow_nan=False)))
    assert again.details is not None and again.details.tokens[0][1][0].token == hit.token
    assert again.details.to_json() == details.to_json()
    old = maps.to_json()
    del old["details"]
    old["metrics"] = {"r2_k": old["metrics"]["r2_k"]}  # as saved before there was more
    assert HeadMaps.from_json(old).details is None


def test_zones_and_bins_share_out_all_positions() -> None:
    assert head_sums.bin_edges(1) == [0, 1] and head_sums.bin_edges(100) == [0, 8, 16, 32, 64, 100]
    for anchors, length in ((0, 8000), (4, 512), (2, 11), (40, 44)):
        found = head_sums.zones(anchors, length).values()
        covered = [position for where in found for position in range(where.start, where.stop)]
        assert covered == list(range(anchors, length))


def test_source_shares_of_every_form() -> None:
    """The low-rank form has the shares of the full map that it multiplies out to; both halves count together."""
    spec = make_host().model("large").spec
    generator = torch.Generator().manual_seed(0)

    def matrices(rows: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(rows, spec.kv_width, generator=generator) for _ in range(spec.layers))

    every, rank = (tuple(range(spec.layers)),) * spec.layers, 5
    bias = tuple(torch.zeros(spec.kv_width) for _ in range(spec.layers))
    thin = torch.randn(2 * spec.layers * spec.kv_width, rank, generator=generator)
    keys, values = matrices(rank), matrices(rank)
    low = KVMapper(spec, spec, every, every, keys, bias, values, bias, features="both", reduce=(thin,))
    full = KVMapper(
        spec, spec, every, every, tuple(thin @ w for w in keys), bias, tuple(thin @ w for w in values), bias,
        features="both",
    )  # fmt: skip
    for kind in ("key", "value"):
        shares = head_detail.source_shares(low, kind)
        assert np.allclose(shares, head_detail.source_shares(full, kind), atol=1e-5)
        assert np.allclose(shares.sum(-1), 1)
    weight = full.value_weight[2].view(2, spec.layers, spec.kv_width, spec.kv_heads, spec.head_dim)
    energy = weight.square().sum((0, 2, 4))
    assert np.allclose(head_detail.source_shares(full, "value")[2], (energy / energy.sum(0)).T, atol=1e-5)
