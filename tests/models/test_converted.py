"""A GGUF file becomes a checkpoint once, keeps its hash, and gives what the file gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import random_ids, tiny_model
from workbench.kv.cache import new_cache
from workbench.kv.forward import forward
from workbench.models import converted, gguf_check, sources
from workbench.models.loading import load, read_spec


def write_gguf(path: Path, model: Any, dtype: Any) -> None:
    """A tiny Llama as llama.cpp stores it: query and key rows permuted, a byte vocabulary."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(0x100 + i) for i in range(config.vocab_size - 3)]
    letters.append(letters[0] + letters[1])
    writer.add_token_list([*letters, "<s>", "</s>"])
    writer.add_token_types([1] * len(letters) + [3, 3])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(config.vocab_size - 2)
    writer.add_eos_token_id(config.vocab_size - 1)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stem = f"blk.{layer}.{names[part]}"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                count = heads if part.endswith("q_proj") else kv_heads
                rows = tensor.reshape(count, 2, tensor.shape[0] // count // 2, -1)
                tensor = rows.transpose(1, 2).reshape(tensor.shape)
        else:
            stem = names[stem]
        kind = dtype if tensor.dim() > 1 else torch.float32
        writer.add_tensor(f"{stem}.weight", tensor.to(kind).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gguf_file_is_converted_once_and_keeps_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path / "home"))
    model, path = tiny_model("llama", head_dim=16), tmp_path / "tiny.gguf"
    write_gguf(path, model, dtype)
    assert read_spec(str(path))[0].layers == 3  # the config alone converts nothing
    assert not (tmp_path / "home").exists()
    loaded = load(str(path), dtype="float32", device_map="cpu")
    ids = random_ids(40)
    expected = forward(model, ids, new_cache(3))
    torch.testing.assert_close(forward(loaded.model, ids, new_cache(3)), expected, rtol=2e-2, atol=2e-2)
    assert loaded.identity.revision == f"sha256:{sources.sha256_of_file(path)}" and loaded.name == "tiny"
    assert converted.stored_dtype(path) == dtype
    monkeypatch.setattr(gguf_check, "ask", lambda *_, **__: pytest.fail("it was read again"))
    monkeypatch.setattr(converted, "convert", lambda *_: pytest.fail("it was converted again"))
    gguf_check._check.cache_clear()
    again = load(str(path), dtype="float32", device_map="cpu")
    assert again.identity == loaded.identity and read_spec(str(path))[0] == loaded.spec
    assert torch.equal(forward(again.model, ids, new_cache(3)), forward(loaded.model, ids, new_cache(3)))


def test_precision_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    def of(*kinds: str) -> torch.dtype:
        tensors = [SimpleNamespace(tensor_type=SimpleNamespace(name=kind), shape=(2, 2)) for kind in kinds]
        monkeypatch.setattr("gguf.GGUFReader", lambda _: SimpleNamespace(tensors=tensors))
        return converted.stored_dtype(Path("x"))

    assert of("F32") == torch.float32 and of("F16", "F32") == torch.float16
    assert of("Q4_K", "Q6_K") == of("BF16") == of("F16", "Q8_0") == torch.bfloat16
