"""The mapper against the definition: written out per token and head, exact for the identity, whole or not at all."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import random_ids, tiny_model
from workbench.errors import Cancelled
from workbench.kv.cache import layer_tensors, length, new_cache
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.kv.rope import Rotary
from workbench.kv.spec import KVSpec


def random_mapper(source, target, seed=0, k=2) -> KVMapper:
    """A mapper with random matrices whose key and value layers differ, so that mixing them up shows."""
    generator = torch.Generator().manual_seed(seed)
    spec_src, spec_tgt = KVSpec.from_config(source.config), KVSpec.from_config(target.config)
    key_layers = tuple(
        tuple(sorted({t % spec_src.layers, (t + 1) % spec_src.layers})) for t in range(spec_tgt.layers)
    )
    value_layers = tuple((spec_src.layers - 1 - t % spec_src.layers,) for t in range(spec_tgt.layers))

    def matrices(layers):
        sizes = [(len(chosen) * spec_src.kv_width, spec_tgt.kv_width) for chosen in layers]
        return tuple(torch.randn(size, generator=generator) / size[0] ** 0.5 for size in sizes)

    def biases():
        return tuple(torch.randn(spec_tgt.kv_width, generator=generator) for _ in range(spec_tgt.layers))

    return KVMapper(spec_src, spec_tgt, key_layers, value_layers,
                    matrices(key_layers), biases(), matrices(value_layers), biases())  # fmt: skip


def filled(model, ids):
    cache = new_cache(model.config.num_hidden_layers)
    forward(model, ids, cache, keep=0)
    return cache


@pytest.mark.parametrize("start", [0, 5])
def test_map_is_what_the_definition_says(start):
    """Different layer counts, head counts, head sizes and thetas; written out per head and token."""
    source = tiny_model("llama", 1)
    target = tiny_model("llama", 2, num_hidden_layers=4, num_key_value_heads=4, head_dim=8,
                        rope_parameters={"rope_type": "default", "rope_theta": 500.0})  # fmt: skip
    ids = random_ids(20)
    mapper, rotary_src, rotary_tgt = random_mapper(source, target), Rotary(source), Rotary(target)
    source_cache, target_cache = filled(source, ids), new_cache(4)
    if start:
        forward(target, ids[:start], target_cache, keep=0)
    mapper.map_into(source_cache, target_cache, start, 18, rotary_src, rotary_tgt)

    assert length(target_cache) == 18
    for t in range(4):
        key_parts, value_parts = [], []
        for layer in mapper.key_layers[t]:
            k_pre = rotary_src.strip(layer_tensors(source_cache, layer)[0])
            key_parts += [k_pre[0, head] for head in range(mapper.source.kv_heads)]
        for layer in mapper.value_layers[t]:
            value = layer_tensors(source_cache, layer)[1]
            value_parts += [value[0, head] for head in range(mapper.source.kv_heads)]
        k_hat = torch.cat(key_parts, -1) @ mapper.key_weight[t] + mapper.key_bias[t]
        v_hat = torch.cat(value_parts, -1) @ mapper.value_weight[t] + mapper.value_bias[t]
        keys, values = layer_tensors(target_cache, t)
        for head in range(4):
            columns = slice(head * 8, head * 8 + 8)
            expected = rotary_tgt.rotate(k_hat[None, None, :, columns])[0, 0, start:18]
            torch.testing.assert_close(keys[0, head, start:], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                values[0, head, start:], v_hat[start:18, columns], rtol=1e-4, atol=1e-5
            )


def test_identity_pair_maps_exactly(any_model):
    ids = random_ids(40)
    own, mapped = filled(any_model, ids), new_cache(any_model.config.num_hidden_layers)
    rotary = Rotary(any_model)
    KVMapper.identity(KVSpec.from_config(any_model.config)).map_into(own, mapped, 0, 40, rotary, rotary)
    for layer in range(any_model.config.num_hidden_layers):
        for ours, theirs in zip(layer_tensors(mapped, layer), layer_tensors(own, layer), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_stopped_map_leaves_the_cache_as_it_was(stop_after):
    model = tiny_model("llama")
    ids = random_ids(30)
    own, target = filled(model, ids), new_cache(3)
    forward(model, ids[:7], target, keep=0)
    before = [tensor.clone() for layer in range(3) for tensor in layer_tensors(target, layer)]
    asked = iter(range(100))
    rotary = Rotary(model)
    with pytest.raises(Cancelled):
        KVMapper.identity(KVSpec.from_config(model.config)).map_into(
            own, target, 7, 29, rotary, rotary, should_stop=lambda: next(asked) >= stop_after
        )
    after = [tensor for layer in range(3) for tensor in layer_tensors(target, layer)]
    assert length(target) == 7
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_wrong_ranges_and_shapes_are_refused():
    model = tiny_model("llama")
    own, rotary, spec = filled(model, random_ids(10)), Rotary(model), KVSpec.from_config(model.config)
    identity = KVMapper.identity(spec)
    with pytest.raises(ValueError, match="the source holds 10"):
        identity.map_into(own, new_cache(3), 0, 11, rotary, rotary)
    with pytest.raises(ValueError, match="the target 0"):
        identity.map_into(own, new_cache(3), 4, 8, rotary, rotary)
    layers = ((0,), (1,), (2,))
    with pytest.raises(ValueError, match=r"key_weight\[0\]"):
        KVMapper(spec, spec, layers, layers, (torch.eye(3),) * 3, identity.key_bias, identity.value_weight,
                 identity.value_bias)  # fmt: skip
    with pytest.raises(ValueError, match="do not exist"):
        KVMapper(spec, spec, ((0,), (1,), (3,)), layers, identity.key_weight, identity.key_bias,
                 identity.value_weight, identity.value_bias)  # fmt: skip


def low_rank_mapper(source, target, features="both", rank=7, hidden=0, seed=3) -> KVMapper:
    """A random mapper of the low-rank form over source layers 0 and 2, with an MLP when asked for."""
    generator = torch.Generator().manual_seed(seed)
    spec_src, spec_tgt = KVSpec.from_config(source.config), KVSpec.from_config(target.config)

    def matrices(count, *shape):
        return tuple(torch.randn(*shape, generator=generator) / shape[0] ** 0.5 for _ in range(count))

    rows = 2 * spec_src.kv_width * (2 if features == "both" else 1)
    layers, width = ((0, 2),) * spec_tgt.layers, spec_tgt.kv_width
    mlp = ()
    if hidden:
        mlp = (
            *matrices(1, rank, hidden),
            *matrices(1, hidden),
            *matrices(1, hidden, hidden),
            *matrices(1, hidden),
        )
    return KVMapper(
        spec_src, spec_tgt, layers, layers, matrices(spec_tgt.layers, rank + hidden, width),
        matrices(spec_tgt.layers, width), matrices(spec_tgt.layers, rank + hidden, width),
        matrices(spec_tgt.layers, width), 0, 1, features, matrices(1 if features == "both" else 2, rows, rank), mlp,
    )  # fmt: skip


@pytest.mark.parametrize(("features", "hidden"), [("own", 0), ("both", 0), ("both", 5)])
def test_the_low_rank_form_is_what_the_definition_says(features, hidden):
    source, target = tiny_model("llama", 1), tiny_model("qwen3", 2)
    mapper = low_rank_mapper(source, target, features, hidden=hidden)
    rotary_src, rotary_tgt, own = Rotary(source), Rotary(target), filled(source, random_ids(20))
    mapped = new_cache(3)
    mapper.map_into(own, mapped, 0, 20, rotary_src, rotary_tgt)

    def rows(kind):
        each = [layer_tensors(own, layer)[kind] for layer in (0, 2)]
        each = [rotary_src.strip(k) for k in each] if kind == 0 else each
        return torch.cat([heads[0, h] for heads in each for h in range(heads.shape[1])], -1)

    keys, values = rows(0), rows(1)
    if features == "own":
        z_key, z_value = keys @ mapper.reduce[0], values @ mapper.reduce[1]
    else:
        z_key = torch.cat((keys, values), -1) @ mapper.reduce[0]
        if hidden:
            gelu = torch.nn.functional.gelu
            h = gelu(gelu(z_key @ mapper.mlp[0] + mapper.mlp[1]) @ mapper.mlp[2] + mapper.mlp[3])
            z_key = torch.cat((z_key, h), -1)
        z_value = z_key
    dim = mapper.target.head_dim
    for t in range(3):
        k_hat = z_key @ mapper.key_weight[t] + mapper.key_bias[t]
        v_hat = z_value @ mapper.value_weight[t] + mapper.value_bias[t]
        mapped_keys, mapped_values = layer_tensors(mapped, t)
        for head in range(mapper.target.kv_heads):
            columns = slice(head * dim, (head + 1) * dim)
            rotated = rotary_tgt.rotate(k_hat[None, None, :, columns])[0, 0]
            torch.testing.assert_close(mapped_keys[0, head], rotated, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mapped_values[0, head], v_hat[:, columns], rtol=1e-4, atol=1e-4)
    z = mapper.coordinates(keys, values)
    torch.testing.assert_close(z[0], z_key, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(z[1], z_value, rtol=1e-4, atol=1e-4)


def test_full_form_with_both_features():
    """Keys first, then values, of exactly the chosen layers; scattered ones are gathered, others read in place."""
    source, target = tiny_model("llama", 1), tiny_model("llama", 2)
    spec = KVSpec.from_config(source.config)
    generator = torch.Generator().manual_seed(1)
    layers = ((0, 2), (1, 2), (0, 1, 2))
    weights = tuple(
        torch.randn(2 * len(row) * spec.kv_width, spec.kv_width, generator=generator) for row in layers
    )
    zeros = (torch.zeros(spec.kv_width),) * 3
    mapper = KVMapper(spec, spec, layers, layers, weights, zeros, weights, zeros, 0, 1, "both")
    rotary, own, mapped = Rotary(source), filled(source, random_ids(12)), new_cache(3)
    mapper.map_into(own, mapped, 0, 12, rotary, Rotary(target))
    for t, row in enumerate(layers):
        keys = [rotary.strip(layer_tensors(own, layer)[0])[0] for layer in row]
        values = [layer_tensors(own, layer)[1][0] for layer in row]
        x = torch.cat([head for heads in (*keys, *values) for head in heads], -1)
        got = layer_tensors(mapped, t)[1][0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(got, x @ weights[t], rtol=1e-4, atol=1e-4)


def test_costs_are_counted():
    source, target = tiny_model("llama", 1), tiny_model("qwen3", 2)
    mapper = low_rank_mapper(source, target, rank=7, hidden=5)
    width_src, width_tgt = mapper.source.kv_width, mapper.target.kv_width
    numbers = 4 * width_src * 7 + 7 * 5 + 5 * 5 + 2 * 3 * 12 * width_tgt
    assert mapper.flops_per_token == 2 * numbers
    assert mapper.nbytes == 4 * (numbers + 10 + 2 * 3 * width_tgt)
    assert mapper.to(torch.float16).nbytes == mapper.nbytes // 2
    assert (mapper.rank, mapper.hidden, KVMapper.identity(mapper.source).rank) == (7, 5, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": "all"}, "features must be one of"),
        ({"reduce": ()}, "MLP needs"),
        ({"features": "own"}, "own features need two"),
        ({"key_layers": ((0, 1), (0, 2), (0, 2))}, "same source layers"),
        ({"value_layers": ((0, 1),) * 3}, "keys and values read the same"),
        ({"mlp": (torch.zeros(7, 5), torch.zeros(5), torch.zeros(5, 4), torch.zeros(5))}, r"mlp\[2\]"),
    ],
)
def test_forms_that_contradict_themselves_are_refused(change, message):
    mapper = low_rank_mapper(tiny_model("llama", 1), tiny_model("qwen3", 2), hidden=5)
    with pytest.raises(ValueError, match=message):
        replace(mapper, **change)
