"""What is known of the catalog's models without asking a hub: shape, licence, whether their files are behind a form.

The shapes are arguments for transformers' own config classes, so that everything else (KV geometry, number of
parameters, memory) is computed and not typed in. They are for planning; a model that is loaded is read from its own
config, and compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

APACHE, LLAMA_31, LLAMA_32 = "Apache-2.0", "Llama 3.1 Community", "Llama 3.2 Community"
QWEN_RESEARCH = "Qwen Research (not commercial)"


@dataclass(frozen=True)
class Preset:
    """One checkpoint.

    Attributes:
        model_type: as in its config.
        licence: for people.
        gated: whether the hub asks to accept terms first.
        shape: arguments of the config class.
    """

    model_type: str
    licence: str
    shape: dict[str, Any]
    gated: bool = False

    def config(self) -> Any:
        """The config of such a model, enough to compute sizes."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **self.shape)


def _shape(
    layers: int, hidden: int, inner: int, heads: tuple[int, int], head_dim: int, vocab: int, tied: bool,
    positions: int, theta: float, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """heads are those of queries and of keys and values."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "head_dim": head_dim,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **more},
    }  # fmt: skip


def _smollm2(
    layers: int, hidden: int, inner: int, heads: tuple[int, int], theta: float, positions: int
) -> Preset:
    return Preset("llama", APACHE, _shape(layers, hidden, inner, heads, 64, 49_152, True, positions, theta))


def _qwen25(
    layers: int, hidden: int, inner: int, heads: tuple[int, int], head_dim: int, licence: str = APACHE
) -> Preset:
    tied = hidden < 3000
    vocab = 151_936 if tied else 152_064
    return Preset("qwen2", licence, _shape(layers, hidden, inner, heads, head_dim, vocab, tied, 32_768, 1e6))


def _qwen3(layers: int, hidden: int, inner: int, queries: int) -> Preset:
    tied = hidden < 4000
    return Preset(
        "qwen3", APACHE, _shape(layers, hidden, inner, (queries, 8), 128, 151_936, tied, 40_960, 1e6)
    )


def _llama3(
    layers: int, hidden: int, inner: int, queries: int, head_dim: int, factor: float, licence: str, tied: bool
) -> Preset:
    shape = _shape(
        layers, hidden, inner, (queries, 8), head_dim, 128_256, tied, 131_072, 5e5, rope_type="llama3",
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
    )  # fmt: skip
    return Preset("llama", licence, shape, gated=True)


def _ministral3(layers: int, hidden: int, inner: int, tied: bool) -> Preset:
    shape = _shape(
        layers, hidden, inner, (32, 8), 128, 131_072, tied, 262_144, 1e6, rope_type="yarn",
        factor=16.0, original_max_position_embeddings=16_384, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
    )  # fmt: skip
    return Preset("ministral3", APACHE, shape)


PRESETS: dict[str, Preset] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _smollm2(30, 576, 1536, (9, 3), 1e5, 8192),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _smollm2(32, 960, 2560, (15, 5), 1e5, 8192),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _smollm2(24, 2048, 8192, (32, 32), 1.3e5, 8192),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen25(24, 896, 4864, (14, 2), 64),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen25(28, 1536, 8960, (12, 2), 128),
    "Qwen/Qwen2.5-3B-Instruct": _qwen25(36, 2048, 11_008, (16, 2), 128, QWEN_RESEARCH),
    "Qwen/Qwen2.5-7B-Instruct": _qwen25(28, 3584, 18_944, (28, 4), 128),
    "Qwen/Qwen2.5-14B-Instruct": _qwen25(48, 5120, 13_824, (40, 8), 128),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": _qwen25(24, 896, 4864, (14, 2), 64),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _qwen25(28, 1536, 8960, (12, 2), 128),
    "Qwen/Qwen2.5-Coder-7B-Instruct": _qwen25(28, 3584, 18_944, (28, 4), 128),
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 3072, 16),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 6144, 16),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 9728, 32),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 12_288, 32),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 17_408, 40),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 25_600, 64),
    "meta-llama/Llama-3.2-1B-Instruct": _llama3(16, 2048, 8192, 32, 64, 32.0, LLAMA_32, True),
    "meta-llama/Llama-3.2-3B-Instruct": _llama3(28, 3072, 8192, 24, 128, 32.0, LLAMA_32, True),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(32, 4096, 14_336, 32, 128, 8.0, LLAMA_31, False),
    "meta-llama/Llama-3.1-70B-Instruct": _llama3(80, 8192, 28_672, 64, 128, 8.0, LLAMA_31, False),
    "mistralai/Ministral-3-3B-Instruct-2512-BF16": _ministral3(26, 3072, 9216, True),
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": _ministral3(34, 4096, 14_336, False),
    "mistralai/Ministral-3-14B-Instruct-2512-BF16": _ministral3(40, 5120, 16_384, False),
}


def preset_config(ref: str) -> Any:
    """The config of a model of the catalog, None for any other; a revision does not change the shape."""
    preset = PRESETS.get(ref.partition("@")[0])
    return preset.config() if preset is not None else None
