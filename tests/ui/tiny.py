"""A pair of tiny random models with fitted mappers in both directions, for the page's tests."""

from __future__ import annotations

import random
from typing import Any

WORDS = [
    "the",
    "a",
    "on",
    "is",
    "hello",
    "world",
    "lamp",
    "sea",
    "rock",
    "keeper",
    "light",
    "child",
    "letter",
    "flour",
    "boat",
    "wind",
    "stone",
    "bird",
    "rain",
    "road",
]


def text(words: int, seed: int = 0) -> str:
    """Random words, the same for the same seed."""
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(words))


def tiny_host(max_positions: int = 4096) -> Any:
    """A `PairHost` of two random models; their answers are noise, but everything else is real."""
    from tests.conftest import tiny_model, tiny_tokenizer
    from workbench.kv.fit import fit
    from workbench.kv.options import FitOptions
    from workbench.models.loading import wrap
    from workbench.models.pair import PairHost

    tokenizer = tiny_tokenizer()
    small = wrap(
        tiny_model("llama", 1, num_hidden_layers=3, max_position_embeddings=max_positions),
        tokenizer,
        "tiny-small",
    )
    large = wrap(
        tiny_model("llama", 2, num_hidden_layers=5, max_position_embeddings=max_positions),
        tokenizer,
        "tiny-large",
    )
    options = FitOptions(sequences=12, length=96, top_k=2, anchors=2, hold_back=4)
    texts = [text(120, seed) for seed in range(16)]
    mappers = {}
    for direction, source, target in (("up", small, large), ("down", large, small)):
        mapper, manifest, _ = fit(source, target, texts, options, direction=direction)
        mappers[direction] = (mapper, manifest)
    return PairHost.from_models(small, large, mappers, name="tiny")
