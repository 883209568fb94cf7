"""What a model's KV cache looks like, read from its config alone, and which two models can be paired.

A cache can be mapped when every layer keeps keys and values of *all* tokens, one key and one value per
token and KV head, and when the rotation in the keys is the same for every layer that has one and never
changes while the model runs. `KVSpec.from_config` accepts exactly that and refuses the rest by name and reason, before
any weights are read. What a config does not show (interleaved rotation, for example) is checked on the
model itself by `workbench.kv.rope.Rotary`.

Shapes: a layer's keys and values are `(1, kv_heads, tokens, head_dim)`; `kv_width = kv_heads * head_dim`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.errors import IncompatiblePairError, UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Attributes that only models with a recurrent state have (Mamba, RWKV, linear attention and their hybrids).
_RECURRENT = (
    "mamba_d_state", "ssm_cfg", "state_size", "ssm_state_size", "linear_num_key_heads",
    "hybrid_override_pattern", "layers_block_type", "block_types", "attn_layer_period", "attn_layer_indices",
    "rwkv_version", "attention_hidden_size",
)  # fmt: skip

# What no attribute of the config shows.
_INTERLEAVED = "it rotates interleaved pairs of dimensions"
_NORM_AFTER = "it normalises keys after the rotation"
_REFUSED_FAMILIES = {
    **dict.fromkeys(("cohere", "cohere2", "glm", "glm4", "ernie4_5", "ernie4_5_moe", "helium"), _INTERLEAVED),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat"), _NORM_AFTER),
}

# Families whose attention says of every layer whether it rotates (`use_rope`), so that `Rotary` can follow.
_SOME_UNROTATED = ("smollm3",)

# No model has more; a file that says so would make lists and loops of any length.
MOST_LAYERS = 1024

# Vocabularies of one tokenizer differ only by padding rows; more than this share is another tokenizer.
_PADDING_SHARE = 0.02

# Strings that tokenizers with equal vocabularies but other merges or pre-tokenizers split differently.
_PROBES = (
    "The quick brown fox, 1234567 times; naïve café — don't!",
    "def f(x):\n\treturn {'a': [1, 2.5e-3]}  # ok\n\n\n    end",
    "日本語のテキスト и немного кириллицы 🙂👩‍👩‍👧 مرحبا",
)


@dataclass(frozen=True)
class RopeSpec:
    """The rotation inside a model's keys.

    Attributes:
        type: one of `ROPE_TYPES`.
        theta: base of the wavelengths, without unit.
        rotary_dim: how many of the first dimensions of a head turn (`head_dim` unless rotary is partial).
        parameters: everything else that the config says, JSON values; compared by value. `unrotated_layers`
            among them lists the layers without rotation, where a model has some.
    """

    type: str
    theta: float
    rotary_dim: int
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise UnsupportedModelError(_rope_type_reason(self.type))
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise UnsupportedModelError(
                f"A rotary dimension must be even and positive, not {self.rotary_dim}."
            )


@dataclass(frozen=True)
class KVSpec:
    """Sizes of a model's KV cache and its rotation.

    Attributes:
        family: `model_type` of the config, such as `llama`.
        layers: decoder layers, each with one cache.
        kv_heads, query_heads: heads of keys and values; heads of queries.
        head_dim: dimensions of one head.
        hidden_size, vocab_size: as in the config; the vocabulary may be padded beyond the tokenizer's.
        max_positions: longest context in tokens.
        rope: the rotation.
    """

    family: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    rope: RopeSpec

    def __post_init__(self) -> None:
        if self.layers > MOST_LAYERS:
            raise UnsupportedModelError(
                f"A model of {self.layers:,} layers is not believed; {MOST_LAYERS:,} are the most."
            )

    @property
    def kv_width(self) -> int:
        """Numbers per token that one layer keeps of keys (and as many of values)."""
        return self.kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Any) -> KVSpec:
        """Read the spec of a `transformers` config.

        Args:
            config: a `PreTrainedConfig` (or anything with the same attributes).

        Raises:
            UnsupportedModelError: the cache of such a model cannot be mapped; the message says why.
        """
        family = str(getattr(config, "model_type", "") or type(config).__name__)
        reason = _why_unsupported(config)
        if reason:
            raise UnsupportedModelError(f"A model of type {family} cannot be mapped: {reason}.")
        try:
            query_heads = int(config.num_attention_heads)
            head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // query_heads)
            spec = cls(
                family=family,
                layers=int(config.num_hidden_layers),
                kv_heads=int(getattr(config, "num_key_value_heads", None) or query_heads),
                query_heads=query_heads,
                head_dim=head_dim,
                hidden_size=int(config.hidden_size),
                vocab_size=int(config.vocab_size),
                max_positions=int(config.max_position_embeddings),
                rope=_rope_spec(config, head_dim),
            )
        except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
            raise UnsupportedModelError(
                f"The config of this {family} model cannot be read: {str(error)[:120]}."
            ) from error
        if (
            min(
                spec.layers,
                spec.kv_heads,
                spec.query_heads,
                spec.head_dim,
                spec.vocab_size,
                spec.max_positions,
            )
            < 1
        ):
            raise UnsupportedModelError(f"The config of this {family} model has a size below 1.")
        return spec

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `from_json` gives an equal spec."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KVSpec:
        """Inverse of `to_json`. Raises KeyError or TypeError when a field is missing or unknown."""
        fields = dict(data)
        return cls(rope=RopeSpec(**fields.pop("rope")), **fields)


def check_pair(source: KVSpec, target: KVSpec) -> None:
    """Refuse a pair that cannot share token ids, as far as the configs show it.

    Layers, heads, head sizes and rotations may all differ: the mapper bridges them. Tokenizers are compared
    by `check_tokenizers` as soon as they are there.

    Raises:
        IncompatiblePairError: the vocabularies differ by more than padding.
    """
    small, large = sorted((source.vocab_size, target.vocab_size))
    if large - small > _PADDING_SHARE * large:
        raise IncompatiblePairError(
            f"The vocabularies have {source.vocab_size:,} and {target.vocab_size:,} entries, "
            "so the two models do not use the same tokens.",
            "Choose two models of one family.",
        )


def check_tokenizers(source: Any, target: Any) -> None:
    """Refuse two tokenizers that give the same text different ids.

    Entries that only one side knows are accepted when they are added tokens (reserved or special ones, and
    padding): ordinary text never uses them.

    Args:
        source, target: `transformers` tokenizers.

    Raises:
        IncompatiblePairError: with counts of what differs.
    """
    vocab_src, vocab_tgt = source.get_vocab(), target.get_vocab()
    common = vocab_src.keys() & vocab_tgt.keys()
    moved = sum(vocab_src[token] != vocab_tgt[token] for token in common)
    added_src, added_tgt = source.get_added_vocab().keys(), target.get_added_vocab().keys()
    only_src, only_tgt = vocab_src.keys() - common - added_src, vocab_tgt.keys() - common - added_tgt
    # One id, two meanings: an added token of one side sits on an id that the other uses for another token.
    token_of_tgt = {index: token for token, index in vocab_tgt.items()}
    clashes = sum(
        1
        for token, index in vocab_src.items()
        if token not in common and token_of_tgt.get(index, token) != token
    )
    if moved or only_src or only_tgt or clashes:
        parts = [
            f"{moved:,} have other ids" if moved else "",
            f"{len(only_src):,} are only in the source" if only_src else "",
            f"{len(only_tgt):,} are only in the target" if only_tgt else "",
            f"{clashes:,} ids mean other tokens" if clashes else "",
        ]
        raise IncompatiblePairError(
            f"The two tokenizers differ: of {len(common):,} shared tokens "
            + "; ".join(filter(None, parts))
            + ".",
            "Choose two models of one family.",
        )
    split = [text for text in _PROBES if _ids(source, text) != _ids(target, text)]
    if split:
        raise IncompatiblePairError(
            f"The two tokenizers have the same tokens but split {len(split)} of {len(_PROBES)} probe texts "
            "differently.",
            "Choose two models of one family.",
        )


def tokenizer_hash(tokenizer: Any) -> str:
    """Identity of a tokenizer by what it does: its vocabulary with ids, and how it splits three probe texts.

    Files are not hashed: the same tokenizer comes as JSON, inside a GGUF file, and re-serialised by other
    library versions.

    Returns:
        `sha256:` and 64 hex digits.
    """
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
    for text in _PROBES:
        digest.update((json.dumps(_ids(tokenizer, text)) + "\n").encode())
    return f"sha256:{digest.hexdigest()}"


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rope_spec(config: Any, head_dim: int) -> RopeSpec:
    values = json.loads(json.dumps(dict(config.rope_parameters)))
    kind = values.pop("rope_type", None) or values.pop("type", "default")
    theta = float(values.pop("rope_theta"))
    rotary_dim = int(head_dim * float(values.get("partial_rotary_factor") or 1.0))
    rotated = getattr(config, "no_rope_layers", None) or ()  # 1 where a layer rotates, 0 where it does not
    unrotated = [layer for layer, flag in enumerate(rotated) if not flag]
    if unrotated:
        values["unrotated_layers"] = unrotated
    return RopeSpec(type=kind, theta=theta, rotary_dim=rotary_dim, parameters=values)


def _rope_type_reason(kind: str) -> str:
    changing = {"dynamic", "longrope", "su"}
    why = "it changes its frequencies while running" if kind in changing else "this kind is not known"
    return f"rotary type {kind!r} is not supported ({why})"


def _why_unsupported(config: Any) -> str:
    """The first reason why such a cache cannot be mapped, as half a sentence; empty when it can."""

    def has(name: str) -> bool:
        return bool(getattr(config, name, None))

    family = getattr(config, "model_type", None)
    if family in _REFUSED_FAMILIES:
        return _REFUSED_FAMILIES[family]
    if has("is_encoder_decoder"):
        return "it is an encoder-decoder"
    if has("text_config") or has("vision_config") or has("audio_config"):
        return "it is multimodal"
    recurrent = [name for name in _RECURRENT if getattr(config, name, None) is not None]
    if recurrent:
        return f"some layers keep a recurrent state instead of keys and values ({recurrent[0]} is set)"
    if has("kv_lora_rank"):
        return "it caches a compressed latent (MLA) instead of keys and values"
    if has("alibi") or getattr(config, "position_embedding_type", None) == "alibi":
        return "it uses ALiBi instead of rotary positions"
    return _why_layers(config) or _why_rope(config)


def _why_layers(config: Any) -> str:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        windowed = kinds & {"sliding_attention", "chunked_attention"}
        what = "a sliding window" if windowed else "layers without full attention (a hybrid)"
        return f"it has {what} ({', '.join(sorted(map(str, kinds)))})"
    window = getattr(config, "sliding_window", None)
    # A window that the longest context does not reach is never in effect.
    unreached = window and window >= (getattr(config, "max_position_embeddings", None) or 0)
    by_layer = getattr(config, "layer_types", None)
    if window and not unreached and not by_layer and getattr(config, "use_sliding_window", True):
        return f"it uses a sliding window of {window:,} tokens"
    if getattr(config, "attention_chunk_size", None):
        return "it attends in chunks"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps attention logits, which the attention used here does not compute"
    for name in ("num_key_value_heads", "num_attention_heads", "head_dim"):
        if isinstance(getattr(config, name, None), (list, tuple)):
            return f"{name} differs between layers"
    if getattr(config, "num_kv_shared_layers", None):
        return "some layers share one cache"
    return ""


def _why_rope(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return "it has no rotary positions"
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return "its rotation differs between layers"
    if "mrope_section" in parameters:
        return "it uses multimodal rotary positions"
    kind = parameters.get("rope_type") or parameters.get("type", "default")
    if kind not in ROPE_TYPES:
        return _rope_type_reason(kind)
    if parameters.get("rope_theta") is None:
        return "its config gives no rope_theta"
    rotated = getattr(config, "no_rope_layers", None)
    if rotated and not all(rotated) and getattr(config, "model_type", None) not in _SOME_UNROTATED:
        return f"{sum(not flag for flag in rotated)} layers have no rotation"
    return ""
