"""Our token loop against `generate`, sampling, stop ids, and text that comes out in whole characters only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from workbench.chat.decode import HALF, Sampling, TextStream, choose, decode, marks, plain_text
from workbench.errors import InputError
from workbench.kv.cache import length, new_cache
from workbench.kv.forward import forward
from workbench.models.loading import LoadedModel, wrap

EMOJI = "a 👩‍👩‍👧 b 日本 مرحبا 🇩🇪 \u202eRTL\u200b e\u0301"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")


def answer(model: LoadedModel, ids: list[int], sampling: Sampling, **options) -> tuple[list[int], int]:
    cache = new_cache(model.spec.layers)
    logits = forward(model.model, ids, cache)
    return list(decode(model, logits, cache, sampling, **options)), length(cache)


def generated(model: LoadedModel, ids: list[int], tokens: int, **options) -> list[int]:
    """What transformers' own loop says."""
    prompt = torch.tensor([ids])
    out = model.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False,
        eos_token_id=sorted(model.stop_ids), pad_token_id=0, **options,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "llama-yarn", "stablelm"])
def test_greedy_equals_generate(kind: str) -> None:
    model = wrap(tiny_model(kind, seed=3), tiny_tokenizer(), kind)
    ids = random_ids(40, seed=1)
    tokens, held = answer(model, ids, Sampling(max_new_tokens=48))
    assert tokens == generated(model, ids, 48)
    assert held == len(ids) + len(tokens) - 1  # the last one has not been run


def test_repetition_penalty_equals_generate(model: LoadedModel) -> None:
    ids = random_ids(30, seed=2)
    sampling = Sampling(max_new_tokens=40, repetition_penalty=1.7)
    assert answer(model, ids, sampling, context=ids)[0] == generated(model, ids, 40, repetition_penalty=1.7)


def test_a_stop_id_comes_last_and_is_not_run(model: LoadedModel) -> None:
    ids = random_ids(20, seed=4)
    free, _ = answer(model, ids, Sampling(max_new_tokens=30))
    stop = free[7]
    first = free.index(stop)
    tokens, held = answer(replace(model, stop_ids=frozenset({stop})), ids, Sampling(max_new_tokens=30))
    assert tokens == free[: first + 1]
    assert held == len(ids) + first


def test_should_stop_is_asked_at_every_token(model: LoadedModel) -> None:
    cache = new_cache(model.spec.layers)
    logits = forward(model.model, random_ids(10), cache)
    said: list[int] = []
    for token in decode(model, logits, cache, Sampling(max_new_tokens=50), lambda: len(said) >= 3):
        said.append(token)
    assert len(said) == 3
    assert length(cache) == 10 + 2


def test_sampling_is_reproducible_and_depends_on_the_seed(model: LoadedModel) -> None:
    ids = random_ids(20, seed=5)
    hot = Sampling(greedy=False, temperature=2.0, top_k=0, top_p=1.0, max_new_tokens=24, seed=7)
    assert answer(model, ids, hot)[0] == answer(model, ids, hot)[0]
    assert answer(model, ids, hot)[0] != answer(model, ids, replace(hot, seed=8))[0]


def test_top_k_and_top_p_limit_what_is_drawn() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(0)

    def drawn(**options) -> set[int]:
        sampling = Sampling(greedy=False, temperature=1.0, **options)
        return {choose(logits, sampling, generator) for _ in range(300)}

    assert drawn(top_k=0, top_p=1.0) == {0, 1, 2, 3}
    assert drawn(top_k=2, top_p=1.0) == {0, 1}
    assert drawn(top_k=0, top_p=0.75) == {0, 1}
    assert drawn(top_k=0, top_p=0.01) == {0}
    assert drawn(top_k=1, top_p=1.0) == {0}


def test_choose_leaves_the_logits_alone() -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    choose(logits, Sampling(repetition_penalty=2.0), torch.Generator(), marks(len(logits), [1, 2, 3]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "bad",
    [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_new_tokens": 0}, {"seed": -1},
     {"temperature": float("nan")}, {"repetition_penalty": 0.0}],
)  # fmt: skip
def test_sampling_checks_itself(bad: dict) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        Sampling(**bad)


def test_text_stream_gives_whole_characters_only() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(EMOJI, add_special_tokens=False)
    stream, text = TextStream(tokenizer), ""
    for token in ids:
        piece = stream.push(token)
        assert HALF not in piece
        text += piece
        assert EMOJI.startswith(text)
    assert text + stream.flush() == EMOJI
    assert stream.flush() == ""


def test_text_stream_equals_decoding_at_once_also_for_random_bytes() -> None:
    tokenizer = tiny_tokenizer()
    for seed in range(20):
        ids = random_ids(200, seed=seed, vocab=len(tokenizer))
        stream = TextStream(tokenizer)
        assert "".join(stream.push(i) for i in ids) + stream.flush() == plain_text(tokenizer, ids)


def test_text_stream_holds_a_broken_character_back_until_flush() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("ok 🙂", add_special_tokens=False)[:-1]
    stream = TextStream(tokenizer)
    assert "".join(stream.push(i) for i in ids) == "ok "
    assert set(stream.flush()) == {HALF}
