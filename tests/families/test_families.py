"""Every supported family, as tiny random models of transformers' own classes, through the whole product.

Each family is a source and a target: keys without rotation equal the keys before it, its own cache through the
handoff path gives its native logits, a mapper is fitted both ways between it and a small Llama, heads are measured,
and a conversation is switched to it and back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import VOCAB, random_ids, random_model, tiny_model, tiny_tokenizer
from tests.kv.test_mapper import random_mapper
from workbench.chat.conversation import Conversation
from workbench.chat.decode import Sampling
from workbench.chat.handoff import gate, hand_over
from workbench.kv import artefact
from workbench.kv.cache import layer_tensors, length, new_cache
from workbench.kv.capture import capture_keys_pre
from workbench.kv.fit import fit
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.kv.options import FitOptions
from workbench.lab import heads
from workbench.lab.results import finish
from workbench.models.loading import LoadedModel, wrap
from workbench.models.pair import PairHost

SIDES = {"up": ("small", "large"), "down": ("large", "small")}
TEXTS = [" ".join(f"the world {seed} hello {n * seed} on a" for n in range(12)) for seed in range(1, 17)]
QUICK_FIT = FitOptions(sequences=16, length=48, top_k=1, ridge=0.1, anchors=2, hold_back=3)
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def rope(kind: str = "default", **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

# name -> (model_type, what differs from the defaults in `config_of`)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("llama", {"num_key_value_heads": 4}),
    "llama-3": ("llama", rope("llama3", **LLAMA3) | {"head_dim": 32}),
    "llama-linear": ("llama", rope("linear", factor=2.0)),
    "llama-tied-attention-bias": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "ministral": ("ministral", {"sliding_window": 64, "layer_types": ["full_attention"] * 2, "head_dim": 32}),
    "ministral-3": ("ministral3", rope("yarn", mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1, **YARN)
                    | {"head_dim": 16}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", rope("yarn", **YARN)),
    "qwen3": ("qwen3", {"hidden_size": 48, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, **MOE}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0}),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi-3": ("phi3", {"pad_token_id": 0}),
    "phi-4-mini": ("phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.75, "head_dim": 16}),
    "granite": ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3}),
    "olmo-2": ("olmo2", {"pad_token_id": None}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "num_key_value_heads": 4}),
    "starcoder2": ("starcoder2", {"sliding_window": None, "use_bias": True}),
    "padded-vocabulary": ("qwen2", {"vocab_size": VOCAB + 4}),
}  # fmt: skip


def config_of(family: str) -> Any:
    from transformers import AutoConfig

    model_type, own = FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **(settings | own))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def other(tokenizer: Any) -> LoadedModel:
    """What every family is paired with: a Llama with another number of layers, heads and dimensions."""
    return wrap(tiny_model("llama", 5, num_hidden_layers=3, head_dim=8), tokenizer, "other")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tokenizer: Any) -> LoadedModel:
    return wrap(random_model(config_of(request.param), 3), tokenizer, request.param)


@pytest.fixture(scope="module")
def pair(family: LoadedModel, other: LoadedModel) -> PairHost:
    """The family as the small side, with mappers fitted both ways."""
    mappers = {
        direction: fit(source, target, TEXTS, QUICK_FIT, direction=direction)[:2]
        for direction, source, target in (("up", family, other), ("down", other, family))
    }
    return PairHost.from_models(family, other, mappers, name="family")


def test_stripped_keys_are_the_keys_before_rotation(family: LoadedModel) -> None:
    ids, cache = random_ids(70), new_cache(family.spec.layers)
    with capture_keys_pre(family.model) as before:
        forward(family.model, ids, cache, keep=0)
    turned = 0
    for layer in range(family.spec.layers):
        k_rot = layer_tensors(cache, layer)[0]
        stripped = family.rotary.strip(k_rot, layer=layer)
        torch.testing.assert_close(stripped, before[layer], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            family.rotary.rotate(before[layer], layer=layer), k_rot, rtol=1e-4, atol=1e-4
        )
        turned += not torch.allclose(stripped, k_rot, atol=1e-2)
    assert turned == family.spec.layers - len(family.spec.rope.parameters.get("unrotated_layers", ()))


def test_its_own_cache_through_the_path_gives_native_logits(family: LoadedModel) -> None:
    ids, layers = random_ids(90, seed=1), family.spec.layers
    own = new_cache(layers)
    native = forward(family.model, ids, own, keep=64)
    assert native is not None
    identity = KVMapper.identity(family.spec)
    for held in (1, 2, 8, 64):
        cache = new_cache(layers)
        identity.map_into(own, cache, 0, len(ids) - held, family.rotary, family.rotary)
        logits = forward(family.model, ids[-held:], cache, keep=held)
        torch.testing.assert_close(logits, native[-held:], rtol=1e-3, atol=2e-3)
    assert gate(family, ids).ok


def test_its_lowest_layers_run_alone(family: LoadedModel, other: LoadedModel) -> None:
    ids, layers = random_ids(60, seed=2), family.spec.layers
    source_cache, native = new_cache(other.spec.layers), new_cache(layers)
    forward(other.model, ids, source_cache, keep=0)
    expected = forward(family.model, ids, native)
    for lowest in (1, layers):
        mapper = replace(random_mapper(other.model, family.model), native_layers=lowest)
        cache = new_cache(layers)
        logits, account = hand_over(ids, source_cache, family, cache, mapper, other, 3, 8)
        assert account.native_layers == lowest and length(cache) == 60
        for layer in range(lowest):
            for one, two in zip(layer_tensors(cache, layer), layer_tensors(native, layer), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
        assert torch.allclose(logits, expected, rtol=1e-3, atol=2e-3) == (lowest == layers)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_fitted_and_saved(pair: PairHost, direction: str, tmp_path: Any) -> None:
    mapper, manifest = pair.mapper(direction)
    source, target = (pair.model(side) for side in SIDES[direction])
    assert mapper.source == source.spec and mapper.target == target.spec
    assert 0.0 < manifest.held_out["r2_v"] < 1.0
    artefact.save(tmp_path / "mapper", mapper, manifest)
    again = artefact.load(tmp_path / "mapper", source.identity, target.identity, direction)[0]
    ids, source_cache = random_ids(40), new_cache(source.spec.layers)
    forward(source.model, ids, source_cache, keep=0)
    caches = [new_cache(target.spec.layers), new_cache(target.spec.layers)]
    for each, cache in zip((mapper, again.to(torch.float32)), caches, strict=True):
        hand_over(ids, source_cache, target, cache, each, source)
        assert length(cache) == 40
    for layer in range(target.spec.layers):
        for one, two in zip(*(layer_tensors(cache, layer) for cache in caches), strict=True):
            torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_heads_are_measured(pair: PairHost, direction: str) -> None:
    found = finish(heads.stream(pair, direction, limit=1, length=40))
    target = pair.model(SIDES[direction][1])
    assert found.metrics["cosine"].shape == (target.spec.layers, target.spec.query_heads)
    for name in ("cosine", "attention_kl", "k_error_in_q", "v_error_in_o"):
        assert torch.tensor(found.metrics[name]).isfinite().all(), name


def test_a_conversation_is_switched_there_and_back(pair: PairHost) -> None:
    chat = Conversation(pair, Sampling(max_new_tokens=5))
    for side in ("large", "small"):
        list(chat.send("hello world, the sun is on a hill and nobody knows why it is there"))
        account = chat.switch()
        assert account.how == "mapped" and account.mapped > 0 and chat.side == side
    answer = list(chat.send("and now?"))[-1]
    assert answer.side == "small" and len(answer.token_ids) <= 5


def test_layers_without_rotation_in_the_attention_metric(tokenizer: Any, other: LoadedModel) -> None:
    family = wrap(random_model(config_of("smollm3"), 3), tokenizer, "smollm3")
    options = FitOptions(sequences=16, length=48, top_k=10**6, anchors=2, rank=8, objective="attention")
    for direction, source, target in (("up", family, other), ("down", other, family)):
        mapper, _, report = fit(source, target, TEXTS, options, direction=direction)
        assert mapper.target == target.spec and 0.0 < report.r2_v < 1.0
