"""KVSpec reads every supported config and refuses the others by name; pairs and tokenizers are compared."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from tests.conftest import KINDS, tiny_config, tiny_tokenizer
from workbench.errors import IncompatiblePairError, UnsupportedModelError
from workbench.kv.spec import KVSpec, RopeSpec, check_pair, check_tokenizers, tokenizer_hash


def test_sizes_of_a_config() -> None:
    spec = KVSpec.from_config(tiny_config("qwen3"))
    assert (spec.family, spec.layers, spec.kv_heads, spec.query_heads, spec.head_dim) == (
        "qwen3",
        3,
        3,
        6,
        16,
    )
    assert (spec.hidden_size, spec.vocab_size, spec.max_positions, spec.kv_width) == (48, 320, 512, 48)


def test_partial_rotary_and_yarn_parameters() -> None:
    assert KVSpec.from_config(tiny_config("stablelm")).rope.rotary_dim == 4
    rope = KVSpec.from_config(tiny_config("llama-yarn")).rope
    assert (rope.type, rope.theta, rope.parameters["factor"]) == ("yarn", 10000.0, 4.0)


def test_heads_default_to_query_heads() -> None:
    config = tiny_config("llama", num_key_value_heads=None, head_dim=None)
    spec = KVSpec.from_config(config)
    assert (spec.kv_heads, spec.head_dim) == (4, 16)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_json_round_trip(kind: str) -> None:
    spec = KVSpec.from_config(tiny_config(kind))
    again = KVSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)


def test_rope_is_compared_by_value() -> None:
    base = RopeSpec("linear", 1e4, 16, {"factor": 4.0})
    assert base == RopeSpec("linear", 1e4, 16, {"factor": 4.0})
    assert base != RopeSpec("linear", 1e4, 16, {"factor": 2.0})
    assert base != RopeSpec("linear", 5e5, 16, {"factor": 4.0})


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding window of 4,096"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "window"),
        ("gemma2", {}, "sliding window"),
        ("gemma3_text", {}, "sliding window"),
        ("gpt_oss", {}, "sliding window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48,
                                 "long_factor": [2.0] * 48, "partial_rotary_factor": 1.0}},
            "longrope",
        ),
        ("t5", {}, "encoder-decoder"),
        ("deepseek_v3", {}, "MLA"),
        ("mamba", {}, "recurrent"),
        ("mamba2", {}, "recurrent"),
        ("jamba", {}, "recurrent"),
        ("bamba", {}, "recurrent"),
        ("falcon_h1", {}, "recurrent"),
        ("nemotron_h", {}, ""),
        ("recurrent_gemma", {}, "recurrent"),
        ("qwen3_next", {}, "recurrent"),
        ("rwkv", {}, "recurrent"),
        ("bloom", {}, "rotary"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("gpt2", {}, "no rotary"),
        ("opt", {}, "no rotary"),
        ("llama4_text", {}, ""),
        ("gemma3", {}, "multimodal"),
        ("qwen2_vl", {}, "multimodal"),
        ("cohere", {}, "interleaved"),
    ],
)  # fmt: skip
def test_refused_by_name_and_reason(model_type: str, settings: dict, reason: str) -> None:
    config = AutoConfig.for_model(model_type, **settings)
    with pytest.raises(UnsupportedModelError) as caught:
        KVSpec.from_config(config)
    assert reason in str(caught.value)
    assert str(config.model_type) in str(caught.value)


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "olmo2", "granite", "phi", "starcoder2"]
)
def test_accepted_families(model_type: str) -> None:
    settings = {"sliding_window": None} if model_type == "starcoder2" else {}
    KVSpec.from_config(AutoConfig.for_model(model_type, **settings))


def test_a_pair_may_differ_in_everything_but_its_tokens() -> None:
    check_pair(
        KVSpec.from_config(tiny_config("qwen3")), KVSpec.from_config(tiny_config("stablelm", vocab_size=322))
    )
    with pytest.raises(IncompatiblePairError, match=r"320 and 640"):
        check_pair(
            KVSpec.from_config(tiny_config("llama")), KVSpec.from_config(tiny_config("llama", vocab_size=640))
        )


def test_equal_tokenizers_pass_and_hash_alike() -> None:
    one, two = tiny_tokenizer(), tiny_tokenizer()
    check_tokenizers(one, two)
    assert tokenizer_hash(one) == tokenizer_hash(two)
    assert tokenizer_hash(one).startswith("sha256:") and len(tokenizer_hash(one)) == 71
    two(
        ["a", "longer text"], padding=True, truncation=True, max_length=4
    )  # changes its state, not what it is
    assert tokenizer_hash(one) == tokenizer_hash(two)


def test_more_special_tokens_at_the_end_are_padding() -> None:
    plain, more = tiny_tokenizer(), tiny_tokenizer(extra_special=("<think>", "</think>"))
    check_tokenizers(plain, more)
    check_tokenizers(more, plain)
    assert tokenizer_hash(plain) != tokenizer_hash(more)


def test_other_ids_are_counted() -> None:
    with pytest.raises(IncompatiblePairError, match=r"of 277 .* 3 have other ids; 5 are only in the target"):
        check_tokenizers(tiny_tokenizer(), tiny_tokenizer(words=("Ġkitte",)))


def test_same_tokens_split_otherwise() -> None:
    from tokenizers import pre_tokenizers

    other = tiny_tokenizer()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(IncompatiblePairError, match="split"):
        check_tokenizers(tiny_tokenizer(), other)


def test_kv_imports_without_gradio_and_plotly() -> None:
    code = (
        "import sys\n"
        "for name in ('gradio', 'plotly'): sys.modules[name] = None\n"
        "import pkgutil, importlib, workbench.kv\n"
        "names = [m.name for m in pkgutil.iter_modules(workbench.kv.__path__)]\n"
        "assert len(names) >= 5, names\n"
        "for name in names: importlib.import_module('workbench.kv.' + name)\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": -1}, {"vocab_size": 0}, {"max_position_embeddings": None}]
)
def test_a_config_with_impossible_sizes_is_refused(change):
    config = SimpleNamespace(**{**vars(tiny_config("llama")), "model_type": "llama"})
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match="config of this llama"):
        KVSpec.from_config(config)
