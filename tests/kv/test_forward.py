"""One call runs ids over a cache: chunked or not, with or without logits, stoppable."""

import pytest
import torch

from tests.conftest import random_ids, tiny_model
from workbench.errors import Cancelled
from workbench.kv.cache import layer_tensors, length, new_cache, truncate
from workbench.kv.capture import capture_attention, capture_keys_pre, o_proj_weight
from workbench.kv.forward import forward, forward_at
from workbench.kv.rope import Rotary
from workbench.kv.spec import KVSpec


def native(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("chunk", [None, 1, 7, 64, 100, 1000])
def test_chunked_over_a_cache_equals_native(any_model: torch.nn.Module, chunk: int | None) -> None:
    ids = random_ids(100)
    cache = new_cache(any_model.config.num_hidden_layers)
    forward(any_model, ids[:23], cache, keep=0)
    keep = 77 if chunk == 64 else 5
    logits = forward(any_model, ids[23:], cache, keep=keep, chunk=chunk)
    assert logits is not None and logits.shape == (keep, 320)
    torch.testing.assert_close(logits, native(any_model, ids)[-logits.shape[0] :], rtol=1e-4, atol=1e-4)
    assert length(cache) == 100


def test_logits_are_float32_on_the_cpu_and_free_to_change() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    logits = forward(model, random_ids(5), new_cache(3))
    assert logits is not None and logits.shape == (1, 320) and logits.dtype == torch.float32
    logits[:, 3] = -float("inf")  # an inference tensor would raise here


def test_keep_zero_runs_without_the_head() -> None:
    model, cache = tiny_model("qwen3"), new_cache(3)
    calls: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert forward(model, random_ids(30), cache, keep=0, chunk=8) is None
    assert not calls and length(cache) == 30
    forward(model, random_ids(30), cache, keep=3, chunk=8)
    handle.remove()
    assert len(calls) == 1  # chunks before the last do not run it either


def test_stop_between_chunks_leaves_a_cache_that_can_be_cut() -> None:
    model, cache, ids = tiny_model("llama"), new_cache(3), random_ids(50)
    forward(model, ids[:10], cache, keep=0)
    before = layer_tensors(cache, 2)[0].clone()
    answers = iter([False, False, True])
    with pytest.raises(Cancelled):
        forward(model, ids[10:], cache, chunk=10, should_stop=lambda: next(answers))
    assert length(cache) == 30
    truncate(cache, 10)
    assert torch.equal(layer_tensors(cache, 2)[0], before)
    torch.testing.assert_close(forward(model, ids[10:], cache), native(model, ids)[-1:], rtol=1e-4, atol=1e-4)


def test_an_error_inside_leaves_a_cache_that_can_be_cut() -> None:
    model, cache, ids = tiny_model("llama"), new_cache(3), random_ids(20)
    forward(model, ids[:10], cache, keep=0)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward(model, ids[10:], cache)
    handle.remove()
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20, 10]
    truncate(cache, length(cache))
    torch.testing.assert_close(forward(model, ids[10:], cache), native(model, ids)[-1:], rtol=1e-4, atol=1e-4)


def test_weights_offloaded_by_accelerate() -> None:
    """Parameters are on the meta device between calls; ids, tables and projections still find their place."""
    accelerate = pytest.importorskip("accelerate")
    plain, offloaded, ids = tiny_model("qwen3"), tiny_model("qwen3"), random_ids(40)
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert offloaded.model.embed_tokens.weight.device.type == "meta"
    ours, theirs, seen = new_cache(3), new_cache(3), []
    with (
        capture_attention(offloaded, lambda layer, *_: seen.append(layer)),
        capture_keys_pre(offloaded) as keys,
    ):
        logits = forward(offloaded, ids, ours, chunk=16)
    assert torch.equal(logits, forward(plain, ids, theirs, chunk=16))
    assert torch.equal(o_proj_weight(offloaded, 1), o_proj_weight(plain, 1))
    stripped = Rotary(offloaded).strip(layer_tensors(ours, 2)[0])
    torch.testing.assert_close(stripped, keys[2], rtol=1e-4, atol=1e-5)
    assert seen == [0, 1, 2] * 3


def test_a_window_that_is_never_reached_changes_nothing() -> None:
    model, ids = tiny_model("mistral", sliding_window=512), random_ids(200)
    assert KVSpec.from_config(model.config).max_positions == 512
    logits = forward(model, ids, new_cache(3), keep=100, chunk=50)
    torch.testing.assert_close(logits, native(model, ids)[-100:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [512, 4])
def test_tokens_at_any_places_equal_native(any_model: torch.nn.Module, chunk: int) -> None:
    """Both ends are missing and three tokens inside are wrong: running those gives what a native pass gives."""
    ids, layers = random_ids(60), any_model.config.num_hidden_layers
    whole, cache = new_cache(layers), new_cache(layers)
    forward(any_model, ids, whole, keep=0)
    for layer in range(layers):
        keys, values = layer_tensors(whole, layer)
        shape = (keys.shape[1], keys.shape[3], keys.dtype, keys.device)
        for slot in cache.layers[layer].append_slots(5, *shape):
            slot.fill_(float("nan") if chunk > 5 else 0.0)  # a slot that is read before it is filled shows
        for slot, own in zip(cache.layers[layer].append_slots(45, *shape), (keys, values), strict=True):
            slot.copy_(own[:, :, 5:50])
            slot[:, :, [3, 20, 21]] = 7.0
    places = [*range(5), 8, 25, 26, *range(50, 60)]
    logits = forward_at(any_model, ids, places, cache, chunk=chunk)
    torch.testing.assert_close(logits, native(any_model, ids)[-1:], rtol=1e-4, atol=1e-4)
    assert length(cache) == 60
    for layer in range(layers):
        for ours, theirs in zip(layer_tensors(cache, layer), layer_tensors(whole, layer), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_without_the_head_nothing_is_returned_and_a_stop_is_heeded() -> None:
    model, ids = tiny_model("llama"), random_ids(20)
    cache = new_cache(model.config.num_hidden_layers)
    forward(model, ids, cache, keep=0)
    assert forward_at(model, ids, [3, 4], cache, keep=0) is None
    with pytest.raises(Cancelled):
        forward_at(model, ids, [3, 4], cache, should_stop=lambda: True)


def test_the_head_is_not_copied_for_the_last_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of the hidden states has strides with which a linear layer copies its whole weight first."""
    model, seen = tiny_model("llama"), []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].stride()))
    forward(model, random_ids(9), new_cache(3))
    handle.remove()
    # Our hook runs after this one, so look at what the layer itself got.
    real, got = torch.nn.functional.linear, []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: (got.append(x), real(x, *rest))[1])
    forward(model, random_ids(9), new_cache(3))
    assert got[-1].shape == (1, 1, 64) and got[-1].stride() == (64, 64, 1) != seen[0]
    assert not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize(("ids", "keep"), [([], 1), ([1, 2], 3), ([1], -1)])
def test_wrong_requests(ids: list[int], keep: int) -> None:
    cache = new_cache(3)
    with pytest.raises(ValueError):
        forward(tiny_model("llama"), ids, cache, keep=keep)
    assert length(cache) == 0
