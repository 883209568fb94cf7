"""Attention in blocks: the same numbers as transformers' own function, for tokens that stand anywhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.conftest import random_ids
from workbench.kv import sdpa
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.forward import forward, forward_at

HEADS, KV_HEADS, DIM, TOKENS, CONTEXT = 6, 2, 16, 150, 400


def inputs(positions, batch=1, dtype=torch.float32, kind=torch.float32):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(batch, HEADS, len(positions), DIM, generator=draw, dtype=dtype)
    k, v = (torch.randn(batch, KV_HEADS, CONTEXT, DIM, generator=draw, dtype=dtype) for _ in range(2))
    mask = torch.arange(CONTEXT) <= torch.tensor(list(positions))[:, None]
    if kind is not torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    return q, k, v, mask[None, None]


def scattered():
    picked = torch.randperm(CONTEXT - 1, generator=torch.Generator().manual_seed(1))[: TOKENS - 1]
    return [*picked.sort().values.tolist(), CONTEXT - 1]


MODULE = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_give_what_one_product_gives(batch, kind):
    for positions, given in ((scattered(), True), (scattered(), False), (range(250, 400), False)):
        tensors = inputs(positions, batch, kind=kind)
        expected, _ = sdpa_attention_forward(MODULE, *tensors, scaling=0.3)
        found, weights = sdpa.attend(
            MODULE, *tensors, scaling=0.3, query_positions=positions if given else None
        )
        assert found.shape == (batch, len(positions), HEADS, DIM) and weights is None
        assert torch.allclose(found, expected, atol=1e-5)


def test_a_block_reads_no_key_behind_its_last_token():
    positions = [*range(100), CONTEXT - 1]
    q, k, v, mask = inputs(positions)
    expected, _ = sdpa.attend(MODULE, q, k, v, mask, positions)
    v[:, :, 100:] = float("nan")  # a masked NaN would spread
    found, _ = sdpa.attend(MODULE, q, k, v, mask, positions)
    assert torch.equal(found[:, : sdpa.BLOCK], expected[:, : sdpa.BLOCK])


def test_gradients_are_the_same():
    positions = scattered()
    q, k, v, mask = inputs(positions)
    grads = []
    for attend in (sdpa_attention_forward, lambda *a, **kw: sdpa.attend(*a, positions, **kw)):
        leaves = [t.clone().requires_grad_(True) for t in (q, k, v)]
        attend(MODULE, *leaves, mask)[0].square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("chunk", [512, 90])
def test_models_run_many_scattered_tokens_as_if_they_had_read_the_text(any_model, chunk):
    sdpa.use(any_model)
    assert any_model.config._attn_implementation == sdpa.NAME
    ids, layers = random_ids(200), any_model.config.num_hidden_layers
    cache = new_cache(layers, 200)
    logits = forward(any_model, ids, cache, keep=200)
    again = new_cache(layers, 200)
    forward(any_model, ids[:60], again, keep=0)
    found = forward(any_model, ids[60:], again, keep=140, chunk=100)
    assert torch.allclose(found, logits[60:], atol=1e-4)
    positions = [position for position in range(200) if position % 4]
    for layer in range(layers):
        for tensor in layer_tensors(again, layer):
            tensor[:, :, positions] = 7.0  # what is run again is written over
    found = forward_at(any_model, ids, positions, again, chunk=chunk)
    assert torch.allclose(found, logits[-1:], atol=1e-4)
