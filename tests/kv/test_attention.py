"""The attention objective: the metric is the change that an error makes; tokens weigh what attention they get."""

import pytest
import torch

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from workbench.kv.attention import (
    DISTANCES,
    FARTHEST,
    NEAR,
    AttentionSums,
    averaged_over_distances,
    root,
    scalings,
)
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.capture import o_proj_weight
from workbench.kv.forward import forward
from workbench.models.loading import wrap


@pytest.fixture(scope="module")
def model():
    return wrap(tiny_model("llama", 3), tiny_tokenizer(), "model")


def test_the_averaged_moment_is_what_keys_before_the_rotation_meet(model):
    """(q turned to a position i later)' (k at 0, turned) squared, averaged over i, for one query and one error."""
    dim = model.spec.head_dim
    generator = torch.Generator().manual_seed(0)
    query, error = torch.randn(dim, generator=generator), torch.randn(dim, generator=generator)
    metric = averaged_over_distances(torch.outer(query, query).double(), model.rotary)
    position = 7
    seen = []
    for step in torch.linspace(NEAR, FARTHEST, DISTANCES).long().tolist():
        q_rot = model.rotary.rotate(query[None], start=position + step)[0]
        e_rot = model.rotary.rotate(error[None], start=position)[0]
        seen.append(float(q_rot @ e_rot) ** 2)
    assert float(error.double() @ metric @ error.double()) == pytest.approx(sum(seen) / len(seen), rel=1e-3)


@pytest.mark.parametrize("kind", ["llama-yarn", "stablelm"])
def test_scaled_and_partial_rotations(kind):
    """The query's scaling is left out; what does not turn stays as it is."""
    model = wrap(tiny_model(kind, 3), tiny_tokenizer(), "model")
    dim, turning = model.spec.head_dim, model.rotary.rotary_dim
    metric = averaged_over_distances(torch.eye(dim, dtype=torch.float64), model.rotary)
    torch.testing.assert_close(
        metric[turning:, turning:], torch.eye(dim - turning, dtype=torch.float64) / model.rotary.scaling**2
    )
    torch.testing.assert_close(
        metric[:turning, :turning], torch.eye(turning, dtype=torch.float64), rtol=1e-4, atol=1e-4
    )


def test_the_value_metric_is_the_output_projection(model):
    sums, cache = AttentionSums(model.spec), new_cache(model.spec.layers)
    sums.watch(model, random_ids(60), cache)
    keys, values = sums.metrics(model, model.rotary)
    assert keys.shape == values.shape == (3, 2, 16, 16)
    weight = o_proj_weight(model.model, 1).double()
    error = torch.randn(16, generator=torch.Generator().manual_seed(1)).double()
    heads = [weight[:, head * 16 : (head + 1) * 16] @ error for head in (2, 3)]  # the group of KV head 1
    expected = sum(float(moved.square().sum()) for moved in heads)
    free = (
        values[1, 1]
        / values[1, 1].trace()
        * sum(float(weight[:, h * 16 : h * 16 + 16].square().sum()) for h in (2, 3))
    )
    assert float(error @ free @ error) == pytest.approx(expected)
    assert len(scalings(model)) == 3


def test_weights_are_the_attention_from_later_tokens_and_the_cache_is_the_models_own(model):
    ids = random_ids(70, seed=4)
    sums, cache, plain = AttentionSums(model.spec), new_cache(3), new_cache(3)
    sums.watch(model, ids, cache)
    forward(model.model, ids, plain, keep=0)
    for layer in range(3):
        for ours, theirs in zip(layer_tensors(cache, layer), layer_tensors(plain, layer), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert sums.token_weight.shape == (70,) and float(sums.token_weight.mean()) == pytest.approx(1.0)
    assert torch.all(sums.token_weight[-NEAR:] < sums.token_weight[:-NEAR].min())  # nobody far behind them
    again = AttentionSums.from_state(sums.state())
    torch.testing.assert_close(again.metrics(model, model.rotary)[0], sums.metrics(model, model.rotary)[0])


def test_root_squares_to_the_metric():
    half = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    metric = half @ half.transpose(1, 2)
    torch.testing.assert_close(root(metric) @ root(metric), metric, rtol=1e-4, atol=1e-4)
