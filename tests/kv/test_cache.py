"""The growing cache gives the logits and tokens of DynamicCache, and its lengths are exact."""

import copy as copying

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from tests.conftest import random_ids, tiny_model
from workbench.kv.cache import copy, layer_tensors, length, nbytes, new_cache, truncate
from workbench.kv.forward import forward


def greedy(
    model: torch.nn.Module, ids: list[int], cache: object, steps: int
) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits of a plain loop of transformers itself."""
    tokens, rows, feed = [], [], torch.tensor([ids])
    with torch.no_grad():
        for _ in range(steps):
            logits = model(input_ids=feed, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            rows.append(logits)
            tokens.append(int(logits.argmax()))
            feed = torch.tensor([[tokens[-1]]])
    return tokens, torch.stack(rows)


def test_same_tokens_and_logits_as_dynamic_cache(any_model: torch.nn.Module) -> None:
    ids = random_ids(150)
    ours, theirs = new_cache(any_model.config.num_hidden_layers), DynamicCache()
    tokens, logits = greedy(any_model, ids, ours, 64)
    expected_tokens, expected = greedy(any_model, ids, theirs, 64)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    for layer in range(any_model.config.num_hidden_layers):
        assert torch.equal(layer_tensors(ours, layer)[0], theirs.layers[layer].keys)
        assert torch.equal(layer_tensors(ours, layer)[1], theirs.layers[layer].values)


@pytest.mark.parametrize("held_back", [1, 2, 8, 64])
def test_held_back_tokens_over_a_filled_cache(any_model: torch.nn.Module, held_back: int) -> None:
    """The model's own cache put in slot by slot, then 1, 2, 8, 64 tokens: logits equal native."""
    ids, layers = random_ids(130), any_model.config.num_hidden_layers
    native = new_cache(layers)
    expected = forward(any_model, ids, native, keep=held_back)
    cache = new_cache(layers)
    for layer in range(layers):
        k, v = (t[:, :, :-held_back] for t in layer_tensors(native, layer))
        slots = cache.layers[layer].append_slots(k.shape[2], k.shape[1], k.shape[3], k.dtype, k.device)
        slots[0].copy_(k)
        slots[1].copy_(v)
    logits = forward(any_model, ids[-held_back:], cache, keep=held_back)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert length(cache) == 130


def test_crop_and_continue_as_if_nothing_had_been() -> None:
    model, ids, other = tiny_model("qwen2"), random_ids(100), random_ids(40, seed=1)
    cache = new_cache(3)
    forward(model, ids + other, cache)
    truncate(cache, 90)
    again = forward(model, ids[90:], cache, keep=10)
    torch.testing.assert_close(again, forward(model, ids, new_cache(3), keep=10), rtol=1e-4, atol=1e-4)
    truncate(cache, 0)
    assert length(cache) == 0 and nbytes(cache) == 0 and cache.get_seq_length() == 0
    assert torch.equal(forward(model, ids, cache), forward(model, ids, new_cache(3)))


def test_truncate_refuses_to_lengthen_and_mends_uneven_layers() -> None:
    cache = new_cache(2)
    for layer in cache.layers:
        layer.append_slots(5, 2, 4, torch.float32, "cpu")
    cache.layers[0].append_slots(3, 2, 4, torch.float32, "cpu")  # a job that broke off after the first layer
    assert length(cache) == 5
    for wrong in (6, -1):
        with pytest.raises(ValueError, match="5 tokens"):
            truncate(cache, wrong)
    truncate(cache, 5)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5]
    truncate(new_cache(2), 0)
    assert length(new_cache(2)) == 0 == nbytes(new_cache(2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["update", "slots", "cut"]), st.integers(1, 300)), max_size=12))
def test_any_order_of_appending_and_cutting(steps: list[tuple[str, int]]) -> None:
    """Against plain concatenation; buffers grow on the way."""
    cache, generator = new_cache(1, capacity=16), torch.Generator().manual_seed(0)
    keys = values = torch.empty(1, 2, 0, 3)
    for kind, n in steps:
        if kind == "cut":
            keep = max(0, keys.shape[2] - n)
            truncate(cache, keep)
            keys, values = keys[:, :, :keep], values[:, :, :keep]
            continue
        k, v = torch.randn(2, 1, 2, n, 3, generator=generator).unbind(0)
        if kind == "update":
            got = cache.update(k, v, 0)
            assert got[0].data_ptr() == layer_tensors(cache, 0)[0].data_ptr()
        else:
            slots = cache.layers[0].append_slots(n, 2, 3, torch.float32, "cpu")
            slots[0].copy_(k)
            slots[1].copy_(v)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        assert length(cache) == keys.shape[2]
        assert torch.equal(layer_tensors(cache, 0)[0], keys) and torch.equal(
            layer_tensors(cache, 0)[1], values
        )
    assert nbytes(cache) == keys.numel() * 8


def test_appending_does_not_move_what_is_there() -> None:
    cache = new_cache(1, capacity=1000)
    first = cache.update(*torch.randn(2, 1, 2, 10, 4), 0)[0]
    for _ in range(900):
        cache.update(*torch.randn(2, 1, 2, 1, 4), 0)
    assert layer_tensors(cache, 0)[0].data_ptr() == first.data_ptr()
    moves, before = 0, first.data_ptr()
    for _ in range(20_000):
        now = cache.update(*torch.zeros(2, 1, 2, 1, 4), 0)[0].data_ptr()
        moves, before = moves + (now != before), now
    assert moves <= 5  # doubling: logarithmic


def test_copy_is_independent() -> None:
    model, ids = tiny_model("llama"), random_ids(50)
    cache = new_cache(3)
    forward(model, ids, cache)
    for branch in (copy(cache), copying.deepcopy(cache)):
        kept = layer_tensors(cache, 1)[0].clone()
        forward(model, random_ids(9, seed=2), branch)
        layer_tensors(branch, 1)[0].zero_()
        assert length(branch) == 59 and length(cache) == 50
        assert torch.equal(layer_tensors(cache, 1)[0], kept)
    dynamic = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), cache=dynamic)
    assert torch.equal(layer_tensors(copy(dynamic), 2)[1], layer_tensors(cache, 2)[1])


def test_written_in_inference_mode_and_changed_outside() -> None:
    cache = new_cache(1)
    with torch.inference_mode():
        cache.update(*torch.randn(2, 1, 2, 4, 4), 0)
    layer_tensors(cache, 0)[0].mul_(2.0)
    cache.layers[0].append_slots(2, 2, 4, torch.float32, "cpu")[0].zero_()
    grown = cache.update(*torch.randn(2, 1, 2, 4, 4, requires_grad=True), 0)[0]
    assert not grown.requires_grad


def test_misuse_is_refused() -> None:
    cache = new_cache(1)
    with pytest.raises(ValueError, match="empty"):
        layer_tensors(cache, 0)
    cache.layers[0].append_slots(2, 2, 4, torch.float32, "cpu")
    for shape in [(3, 4, torch.float32), (2, 8, torch.float32), (2, 4, torch.float64)]:
        with pytest.raises(ValueError, match="2 heads of 4"):
            cache.layers[0].append_slots(1, *shape, "cpu")
    assert length(cache) == 2
    with pytest.raises(ValueError, match="negative"):
        cache.crop(1)
    with pytest.raises(NotImplementedError, match="one sequence"):  # rather than beams over stale buffers
        cache.reorder_cache(torch.tensor([0]))
    cache.reset()
    assert length(cache) == 0
