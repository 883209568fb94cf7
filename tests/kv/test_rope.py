"""Stripped keys equal the keys captured before rotation, for every rotary type."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import KINDS, random_ids, tiny_model
from workbench.errors import UnsupportedModelError
from workbench.kv.cache import layer_tensors, new_cache, truncate
from workbench.kv.capture import capture_keys_pre
from workbench.kv.forward import forward
from workbench.kv.rope import Rotary

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("start", [0, 1, 37])
def test_stripped_keys_are_the_keys_before_rotation(kind: str, start: int) -> None:
    model = tiny_model(kind)
    rotary, cache = Rotary(model), new_cache(model.config.num_hidden_layers)
    ids = random_ids(60)
    if start:
        forward(model, ids[:start], cache)
    with capture_keys_pre(model) as keys_pre:
        forward(model, ids[start:], cache)
    for layer in range(model.config.num_hidden_layers):
        k_rot = layer_tensors(cache, layer)[0]
        assert keys_pre[layer].shape == k_rot[:, :, start:].shape
        torch.testing.assert_close(rotary.strip(k_rot[:, :, start:], start), keys_pre[layer], **TOLERANCE)
        torch.testing.assert_close(rotary.rotate(keys_pre[layer], start), k_rot[:, :, start:], **TOLERANCE)
    assert not torch.allclose(rotary.strip(k_rot[:, :, start:], start + 1), keys_pre[layer], atol=1e-2)


def test_yarn_really_scales_and_partial_rotary_really_is_partial() -> None:
    assert Rotary(tiny_model("llama-yarn")).scaling == pytest.approx(1.1386, abs=1e-4)
    rotary = Rotary(tiny_model("stablelm"))
    k = torch.randn(1, 2, 9, 16)
    assert rotary.rotary_dim == 4
    assert torch.equal(rotary.rotate(k, 5)[..., 4:], k[..., 4:])
    assert not torch.allclose(rotary.rotate(k, 5)[..., :4], k[..., :4])


def test_source_and_target_with_other_theta() -> None:
    """The same weights with another theta: mapping by identity gives the keys of the other model exactly."""
    near = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    far = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    ids, caches = random_ids(80), [new_cache(3), new_cache(3)]
    for model, cache in zip((near, far), caches, strict=True):
        forward(model, ids, cache)
    k_src, k_tgt = layer_tensors(caches[0], 0)[0], layer_tensors(caches[1], 0)[0]
    assert not torch.allclose(k_src, k_tgt, atol=1e-2)
    torch.testing.assert_close(Rotary(far).rotate(Rotary(near).strip(k_src)), k_tgt, **TOLERANCE)
    wrong = Rotary(near).rotate(Rotary(near).strip(k_src))  # a wrong theta cancels in the round trip...
    assert not torch.allclose(wrong, k_tgt, atol=1e-2)  # ...and only this comparison notices


@pytest.mark.parametrize("start", [0, 1000, 8000, 30000])
def test_llama3_scaling_far_out(start: int) -> None:
    model = tiny_model("llama-llama3", max_position_embeddings=32768)
    rotary, k_pre = Rotary(model), torch.randn(1, 2, 50, 32)
    cos, sin = model.model.rotary_emb(k_pre, torch.arange(start, start + 50)[None])
    module = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb"])
    k_rot = module.apply_rotary_pos_emb(k_pre, k_pre, cos, sin)[1]
    torch.testing.assert_close(rotary.rotate(k_pre, start), k_rot, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotary.strip(k_rot, start), k_pre, **TOLERANCE)


def test_rotate_writes_into_slots_of_a_cache() -> None:
    rotary, cache = Rotary(tiny_model("llama-yarn")), new_cache(1)
    cache.layers[0].append_slots(3, 2, 16, torch.float32, "cpu")[0].fill_(7.0)
    slots, _ = cache.layers[0].append_slots(20, 2, 16, torch.float32, "cpu")
    product = torch.randn(1, 20, 2, 16)  # as a matrix product lays it out: tokens before heads
    k_pre = product.transpose(1, 2)
    assert rotary.rotate(k_pre, 3, out=slots) is slots
    torch.testing.assert_close(layer_tensors(cache, 0)[0][:, :, 3:], rotary.rotate(k_pre.contiguous(), 3))
    assert (layer_tensors(cache, 0)[0][:, :, :3] == 7.0).all()
    truncate(cache, 3)


def test_strip_writes_into_a_feature_matrix() -> None:
    rotary, k_rot = Rotary(tiny_model("llama-yarn")), torch.randn(1, 2, 20, 16)
    features = torch.full((20, 3, 2, 16), 7.0)  # tokens, layers, heads, head_dim
    rotary.strip(k_rot, 9, out=features[:, 1].transpose(0, 1)[None])
    assert torch.equal(features[:, 1], rotary.strip(k_rot, 9)[0].transpose(0, 1))
    assert (features[:, [0, 2]] == 7.0).all()


def test_bfloat16_is_turned_as_the_model_itself_turns() -> None:
    """Near the exact rotation, and no further from it than the model's own bfloat16 rotation is."""
    model = tiny_model("llama")
    rotary, k = Rotary(model), torch.randn(1, 2, 40, 16).to(torch.bfloat16)
    exact = rotary.rotate(k.float(), 11)
    cos, sin = model.model.rotary_emb(k, torch.arange(11, 51)[None])
    module = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb"])
    own = module.apply_rotary_pos_emb(k, k, cos, sin)[1]
    ours = rotary.rotate(k, 11)
    assert ours.dtype is torch.bfloat16
    assert (ours - exact).pow(2).mean() <= 1.1 * (own - exact).pow(2).mean()
    back = rotary.strip(ours, 11)
    assert (back.float() - k.float()).abs().max() < 0.01 * k.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    rotary, k = Rotary(tiny_model("llama-yarn")), torch.randn(1, 2, 40, 16).to(dtype)
    assert rotary.rotate(k, 11).dtype is dtype
    assert torch.equal(rotary.rotate(k, 11), rotary.rotate(k.float(), 11).to(dtype))
    assert torch.equal(rotary.strip(k, 11), rotary.strip(k.float(), 11).to(dtype))
    out = torch.empty(1, 2, 40, 16, dtype=dtype)
    assert torch.equal(rotary.rotate(k.float(), 11, out=out), rotary.rotate(k.float(), 11).to(dtype))


@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 3000), n=st.integers(1, 40), split=st.integers(0, 40), seed=st.integers(0, 99))
def test_rotation_in_pieces_and_back(start: int, n: int, split: int, seed: int) -> None:
    rotary = ROTARY
    k = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(seed))
    whole, at = rotary.rotate(k, start), min(split, n)
    pieces = [rotary.rotate(k[:, :at], start), rotary.rotate(k[:, at:], start + at)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=0)
    torch.testing.assert_close(rotary.strip(whole, start), k, **TOLERANCE)


ROTARY = Rotary(tiny_model("llama-yarn"))


def test_tables_survive_inference_mode_and_growth() -> None:
    rotary = Rotary(tiny_model("llama"))
    with torch.inference_mode():
        rotary.rotate(torch.randn(1, 1, 700, 16))
    k = torch.randn(1, 1, 9, 16, requires_grad=True)
    cos, sin = rotary.cos_sin(695, 704)
    assert cos.shape == sin.shape == (9, 16) and cos.dtype == torch.float32
    first, second = k[..., :8], k[..., 8:]
    (
        first * cos[:, :8] + second * sin[:, :8]
    ).sum().backward()  # inference tensors could not be saved for backward
    far = rotary.cos_sin(5000, 5002)[0]
    torch.testing.assert_close(far, torch.cos(torch.outer(torch.tensor([5000.0, 5001.0]), _frequencies())))


def _frequencies() -> torch.Tensor:
    half = 1.0 / 10000 ** (torch.arange(0, 16, 2).float() / 16)
    return torch.cat((half, half))


def test_wrong_out_and_interleaved_rotation_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        Rotary(tiny_model("llama")).rotate(torch.randn(1, 2, 5, 16), out=torch.empty(1, 2, 4, 16))
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    for family in ("cohere", "glm"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        with pytest.raises(UnsupportedModelError, match="rotates"):
            Rotary(model)
