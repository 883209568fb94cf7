"""A tiny pair in memory with random mappers, and texts: what all measurements are tested on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import tiny_model, tiny_tokenizer
from workbench.kv.mapper import KVMapper
from workbench.lab.corpus import Document
from workbench.models.loading import wrap
from workbench.models.pair import PairHost

WORDS = (
    "the worried baker is hearing a song on the water while hello world is singing and the other is reading "
)


def texts(count: int = 3) -> list[Document]:
    """Documents that differ, each of a few hundred tokens."""
    parts = WORDS.split()
    return [
        Document(f"text-{i}", " ".join(parts[(j * (i + 2) + i) % len(parts)] for j in range(90)))
        for i in range(count)
    ]


def random_mapper(source: Any, target: Any, seed: int = 0, anchors: int = 2, hold_back: int = 3) -> KVMapper:
    """A mapper with random matrices from the two first source layers."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 * source.kv_width

    def matrices(*shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(*shape, generator=generator) / width**0.5 for _ in range(target.layers))

    layers = ((0, 1),) * target.layers
    out = target.kv_width
    weights = (matrices(width, out), matrices(out), matrices(width, out), matrices(out))
    return KVMapper(source, target, layers, layers, *weights, anchors=anchors, hold_back=hold_back)


def make_host(identity: bool = False) -> PairHost:
    """Two tiny models that share a tokenizer; with `identity` one model on both sides and an exact map."""
    tokenizer = tiny_tokenizer()
    large = wrap(tiny_model("llama", seed=1), tokenizer, "large")
    if identity:
        exact = KVMapper.identity(large.spec)
        return PairHost.from_models(large, large, {"up": (exact, None), "down": (exact, None)})
    small = wrap(tiny_model("qwen2", seed=2), tokenizer, "small")
    mappers = {
        "up": (random_mapper(small.spec, large.spec), None),
        "down": (random_mapper(large.spec, small.spec), None),
    }
    return PairHost.from_models(small, large, mappers)


@pytest.fixture(scope="session")
def host() -> PairHost:
    """The tiny pair with random mappers."""
    return make_host()


@pytest.fixture(scope="session")
def same() -> PairHost:
    """One model on both sides with the identity mapper."""
    return make_host(identity=True)
