"""Watching attention changes nothing, shows what the layer really computes, and always takes itself out."""

import pytest
import torch

from tests.conftest import random_ids, tiny_model
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.capture import capture_attention, capture_keys_pre, o_proj_weight
from workbench.kv.forward import forward


def test_watching_leaves_logits_as_they_are(any_model: torch.nn.Module) -> None:
    ids, layers = random_ids(60), any_model.config.num_hidden_layers
    plain, watched, seen = new_cache(layers), new_cache(layers), []
    for chunk in (
        ids[:40],
        ids[40:59],
        ids[59:],
    ):  # prefill, a chunk over a cache (needs the mask), one token
        expected = forward(any_model, chunk, plain, keep=len(chunk))
        with capture_attention(any_model, lambda layer, *tensors: seen.append((layer, tensors))):
            assert torch.equal(forward(any_model, chunk, watched, keep=len(chunk)), expected)
    assert [layer for layer, _ in seen] == list(range(layers)) * 3
    heads, kv_heads = any_model.config.num_attention_heads, any_model.config.num_key_value_heads
    q_rot, k_rot, v, out = seen[layers][1]  # layer 0 in the second pass
    head_dim = q_rot.shape[3]
    assert q_rot.shape == (1, heads, 19, head_dim) and out.shape == (1, 19, heads, head_dim)
    assert k_rot.shape == v.shape == (1, kv_heads, 59, head_dim)
    assert torch.equal(k_rot, layer_tensors(watched, 0)[0][:, :, :59])


def test_out_times_o_proj_is_the_output_of_the_layer(any_model: torch.nn.Module) -> None:
    captured, outputs = {}, {}
    handles = [
        layer.self_attn.register_forward_hook(lambda _m, _i, result, n=n: outputs.update({n: result[0]}))
        for n, layer in enumerate(any_model.model.layers)
    ]
    with capture_attention(any_model, lambda layer, q, k, v, out: captured.update({layer: out.clone()})):
        forward(any_model, random_ids(33), new_cache(any_model.config.num_hidden_layers))
    for handle in handles:
        handle.remove()
    assert len(outputs) == any_model.config.num_hidden_layers
    for layer, result in outputs.items():
        weight = o_proj_weight(any_model, layer)
        assert weight.shape == (
            any_model.config.hidden_size,
            captured[layer].shape[2] * captured[layer].shape[3],
        )
        bias = getattr(getattr(any_model.model.layers[layer].self_attn, "dense", None), "bias", None)
        product = captured[layer].flatten(2) @ weight.T + (0.0 if bias is None else bias)
        torch.testing.assert_close(product, result, rtol=1e-4, atol=1e-5)


def test_out_is_softmax_of_queries_and_keys() -> None:
    """By hand, with the causal mask of a chunk over a cache."""
    model, seen = tiny_model("qwen3"), {}
    cache, ids = new_cache(3), random_ids(30)
    forward(model, ids[:20], cache, keep=0)
    with capture_attention(model, lambda layer, *tensors: seen.update({layer: tensors})):
        forward(model, ids[20:], cache)
    q, k, v, out = seen[1]
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * 16**-0.5
    mask = torch.arange(30)[None, :] > torch.arange(20, 30)[:, None]
    by_hand = scores.masked_fill(mask, -float("inf")).softmax(-1) @ v
    torch.testing.assert_close(out.transpose(1, 2), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_restored_after_exceptions(implementation: str) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(implementation)
    expected = forward(model, random_ids(10), new_cache(3))

    def fail(*_: object) -> None:
        raise KeyError("visitor")

    with pytest.raises(KeyError, match="visitor"), capture_attention(model, fail):
        forward(model, random_ids(10), new_cache(3))
    assert model.config._attn_implementation == implementation
    assert not any("visit" in name for layer in model.model.layers for name in vars(layer.self_attn))
    assert torch.equal(forward(model, random_ids(10), new_cache(3)), expected)


def test_nested_and_two_models_at_once() -> None:
    one, two = tiny_model("llama"), tiny_model("llama", seed=1)
    calls: list[str] = []
    with capture_attention(one, lambda *_: calls.append("outer")):
        with capture_attention(two, lambda *_: calls.append("two")):
            forward(two, [1, 2], new_cache(3))
            forward(one, [1, 2], new_cache(3))
        with capture_attention(one, lambda *_: calls.append("inner")):
            forward(one, [1, 2], new_cache(3))
        forward(one, [1, 2], new_cache(3))
    forward(one, [1, 2], new_cache(3))
    assert calls == ["two"] * 3 + ["outer"] * 3 + ["inner"] * 3 + ["outer"] * 3


def test_keys_before_rotation_join_over_passes_and_hooks_go(any_model: torch.nn.Module) -> None:
    ids, layers = random_ids(30), any_model.config.num_hidden_layers
    with capture_keys_pre(any_model) as whole:
        forward(any_model, ids, new_cache(layers))
    with pytest.raises(ZeroDivisionError), capture_keys_pre(any_model) as pieces:
        forward(any_model, ids, new_cache(layers), chunk=11)
        raise ZeroDivisionError
    for layer in range(layers):
        torch.testing.assert_close(pieces[layer], whole[layer], rtol=1e-4, atol=1e-5)
    forward(any_model, ids, new_cache(layers))
    assert pieces[0].shape[2] == 30
    assert not any(module._forward_hooks for module in any_model.modules())
