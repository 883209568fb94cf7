"""The mapper against the definition: written out per token and head, exact for the identity, whole or not at all."""

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
