"""Tiny random models and a tiny tokenizer for all tests: real classes of transformers, no files.

`tiny_model(kind, seed, **overrides)` builds one of `KINDS` in float32. Their head counts and head sizes
differ on purpose, and every parameter is random (biases and norms too), so that a wrong transpose or a
forgotten bias shows.
`tiny_tokenizer()` splits into bytes and a few words and has a ChatML template.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# Threads that spin while they wait make tiny operations ten times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

VOCAB = 320  # rows of the embeddings; the tokenizer has fewer, as real ones do

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

# kind -> (model_type of transformers, what differs from the defaults in `tiny_config`)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 32, "num_hidden_layers": 2}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN, "num_hidden_layers": 4}),
    "qwen2": (
        "qwen2",
        {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3": (
        "qwen3",
        {"hidden_size": 48, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "mistral": (
        "mistral",
        {"sliding_window": None, "hidden_size": 32, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "num_key_value_heads": 4}),
    "stablelm-qknorm": ("stablelm", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "num_hidden_layers": 2, "qk_layernorm": True}),
    "phi3": ("phi3", {"hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}),
}


def tiny_config(kind: str, **overrides: Any) -> Any:
    """The config of a tiny model: 3 layers, hidden 64, 4 query and 2 KV heads unless the kind differs."""
    from transformers import AutoConfig

    model_type, own = KINDS[kind]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    settings.update(own)
    settings.update(overrides)
    return AutoConfig.for_model(model_type, **settings)


def tiny_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random model in float32 and evaluation mode; the same seed gives the same weights.

    Args:
        kind: a key of `KINDS`.
        seed: of the weights.
        **overrides: of the config, for example `num_hidden_layers=2` or `rope_parameters={...}`.
    """
    return random_model(tiny_config(kind, **overrides), seed)


def random_model(config: Any, seed: int = 0) -> Any:
    """A model of any config with every parameter random, as `tiny_model` makes them."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    # Large enough that attention is far from uniform and logits are far apart.
                    parameter.normal_(0.0, 1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5)
                else:
                    parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
    return model.eval().requires_grad_(False)


def tiny_tokenizer(words: tuple[str, ...] = (), extra_special: tuple[str, ...] = ()) -> Any:
    """A byte-level BPE of about 300 tokens: every text encodes, and decodes to exactly itself.

    Args:
        words: further letter sequences that get tokens of their own (built by merges from the left).
        extra_special: further special tokens, after the usual ones.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in ("Ġthe", "Ġa", "ing", "er", "Ġon", "Ġis", "he", "llo", "Ġwor", "ld", *words):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(extra_special) or None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def random_ids(n: int, seed: int = 0, vocab: int = 290) -> list[int]:
    """`n` token ids below `vocab`, the same for the same seed."""
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny models; all for tests with real weights."""
    before = torch.get_num_threads()
    if not request.node.get_closest_marker("weights"):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One tiny tokenizer for tests that do not change it."""
    return tiny_tokenizer()


@pytest.fixture(params=sorted(KINDS))
def any_model(request: pytest.FixtureRequest) -> Any:
    """Each kind of tiny model in turn."""
    return tiny_model(request.param)
