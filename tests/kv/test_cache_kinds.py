"""Mapped tokens go into every kind of cache of transformers' that takes tensors; the others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from workbench.chat.handoff import hand_over
from workbench.errors import InputError
from workbench.kv.cache import layer_tensors, length, new_cache, truncate
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.models.loading import LoadedModel, wrap

IDS = random_ids(60)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("qwen3"), tiny_tokenizer(), "tiny")


@pytest.fixture(scope="module")
def own(model: LoadedModel) -> Any:
    cache = new_cache(3)
    forward(model.model, IDS, cache, keep=0)
    return cache


def handed_over(model: LoadedModel, own: Any, cache: Any) -> torch.Tensor:
    """Logits of the last token, with the model's own cache put through the path into `cache`."""
    identity = KVMapper.identity(model.spec)
    return hand_over(IDS, own, model, cache, identity, model, anchors=2, hold_back=3)[0]


KINDS = {
    "lazy": lambda config: DynamicCache(),
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=80),
    "static, full to the last token": lambda config: StaticCache(config=config, max_cache_len=60),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_keep_exact_tensors_give_native_logits(model: LoadedModel, own: Any, kind: str) -> None:
    cache = KINDS[kind](model.model.config)
    native = forward(model.model, IDS, new_cache(3))
    torch.testing.assert_close(handed_over(model, own, cache), native, rtol=1e-3, atol=1e-3)
    assert length(cache) == len(IDS)
    assert layer_tensors(cache, 1)[0].shape == layer_tensors(own, 1)[0].shape
    truncate(cache, 40)
    torch.testing.assert_close(handed_over(model, own, cache), native, rtol=1e-3, atol=1e-3)


def test_a_static_cache_can_be_the_source(model: LoadedModel, own: Any) -> None:
    source = StaticCache(config=model.model.config, max_cache_len=90)
    forward(model.model, IDS, source, keep=0)
    target = new_cache(3)
    assert torch.allclose(
        handed_over(model, source, target), handed_over(model, own, new_cache(3)), atol=1e-4
    )


def test_a_quantised_cache_takes_mapped_tokens(model: LoadedModel, own: Any) -> None:
    cache = QuantizedCache("fp8", model.model.config)
    logits, native = handed_over(model, own, cache), forward(model.model, IDS, new_cache(3))
    assert native is not None and length(cache) == len(IDS)
    close = torch.cosine_similarity(logits, native, dim=-1).item()
    other = torch.cosine_similarity(forward(model.model, IDS[:30], new_cache(3)), native, dim=-1).item()
    assert close > 0.9 > other
    with pytest.raises(ValueError, match="cannot be cut to 40"):
        truncate(cache, 40)
    truncate(cache, 0)
    assert length(cache) == 0
    with pytest.raises(ValueError, match="not plain tensors"):
        layer_tensors(cache, 0)


def test_kinds_that_cannot_take_tokens_are_refused_by_name(model: LoadedModel, own: Any) -> None:
    config = model.model.config
    with pytest.raises(InputError, match="room for 50 tokens, and 57"):
        handed_over(model, own, StaticCache(config=config, max_cache_len=50))
    sliding = tiny_model("mistral", sliding_window=16).config
    with pytest.raises(InputError, match="SlidingWindowLayer"):
        KVMapper.identity(model.spec).map_into(
            own, DynamicCache(config=sliding), 0, 9, model.rotary, model.rotary
        )
    pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(InputError, match="EncoderDecoderCache"):
        from workbench.kv.cache import check_takes

        check_takes(pair, 3)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="offloaded DynamicCache needs a GPU"):
            check_takes(DynamicCache(config=config, offloading=True), 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_an_offloaded_cache_takes_mapped_tokens() -> None:
    model = wrap(tiny_model("qwen3").to("cuda"), tiny_tokenizer(), "tiny")
    own = new_cache(3)
    native = forward(model.model, IDS, own)
    cache = DynamicCache(config=model.model.config, offloading=True)
    logits = hand_over(
        IDS, own, model, cache, KVMapper.identity(model.spec).to(None, model.layer_devices), model
    )[0]
    torch.testing.assert_close(logits, native, rtol=1e-2, atol=1e-2)
