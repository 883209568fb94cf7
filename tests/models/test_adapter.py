"""PEFT adapters over a base, and the text part of a Ministral 3: loaded, identified, mapped, or refused in words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from workbench.chat.handoff import hand_over
from workbench.errors import IncompatiblePairError, InputError, ModelUnavailableError, UnsupportedModelError
from workbench.kv.cache import new_cache
from workbench.kv.forward import forward
from workbench.models import adapter
from workbench.models.catalog import resolve
from workbench.models.loading import load, read_spec
from workbench.models.pair import IDENTITY, PairHost
from workbench.models.sources import is_local, locate


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-base"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with random weights, as peft itself saves it."""
    peft = pytest.importorskip("peft", reason="no peft: pip install -r requirements-dev.txt")
    model = tiny_model("llama")
    model.config._name_or_path = model.name_or_path = str(base)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    folder = tmp_path_factory.mktemp("adapters") / "tiny-lora"
    adapted.save_pretrained(folder)
    return folder


def test_a_folder_or_base_plus_adapter_is_the_adapted_model(base: Path, lora: Path) -> None:
    peft = pytest.importorskip("peft")
    alone = load(str(lora), dtype="float32", device_map="cpu")
    both = load(f"{base}+{lora}", dtype="float32", device_map="cpu")
    plain = load(str(base), dtype="float32", device_map="cpu")
    ids = random_ids(20)
    expected = (
        peft.PeftModel.from_pretrained(tiny_model("llama"), str(lora))
        .eval()(torch.tensor([ids]))
        .logits[0, -1:]
    )
    for model in (alone, both):
        assert model.name == "tiny-base + tiny-lora" and model.spec == plain.spec
        torch.testing.assert_close(forward(model.model, ids, new_cache(3)), expected, rtol=1e-4, atol=1e-4)
    assert alone.identity.revision == both.identity.revision != plain.identity.revision
    assert not torch.allclose(forward(plain.model, ids, new_cache(3)), expected, atol=1e-2)
    assert is_local(f"{base}+{lora}") and not is_local(f"owner/name+{lora}")
    assert resolve(None, str(base), f"{base}+{lora}").name == "tiny-base--tiny-base-tiny-lora"


def test_the_unmapped_cache_is_the_baseline_of_a_base_and_its_adapter(
    base: Path, lora: Path, tmp_path: Path
) -> None:
    host = PairHost(
        resolve(None, str(base), str(lora)), "cpu", "float32", mappers={"up": IDENTITY, "down": IDENTITY}
    )
    source, target, ids = host.model("small"), host.model("large"), random_ids(40)
    cache = new_cache(3)
    forward(source.model, ids, cache, keep=0)
    mapped = new_cache(3)
    logits, account = hand_over(ids, cache, target, mapped, host.mapper("up")[0], source)
    native = forward(target.model, ids, new_cache(3))
    assert account.mapped == 40 - 4 - 16
    assert float((logits - native).abs().max()) > 0.0  # it is a baseline, not the truth
    other = tmp_path / "other"
    tiny_model("qwen3").save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    host = PairHost(resolve(None, str(base), str(other)), "cpu", "float32", mappers={"up": IDENTITY})
    with pytest.raises(IncompatiblePairError, match="unmapped"):
        host.mapper("up")


def test_adapters_that_cannot_be_used_are_refused_in_words(
    base: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spoilt"
    folder.mkdir()
    for file in lora.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / adapter.CONFIG).read_text())

    def spoil(**changes: Any) -> str:
        (folder / adapter.CONFIG).write_text(json.dumps(config | changes))
        return f"{base}+{folder}"

    with pytest.raises(UnsupportedModelError, match="PREFIX_TUNING"):
        locate(spoil(peft_type="PREFIX_TUNING"))
    with pytest.raises(InputError, match="does not name its base"):
        spoil(base_model_name_or_path=None)
        locate(str(folder))
    with pytest.raises(ModelUnavailableError, match="does not fit"):
        load(spoil(r=7), dtype="float32", device_map="cpu")
    spoil()
    tensors = load_file(folder / adapter.WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, folder / adapter.WEIGHTS)
    with pytest.raises(ModelUnavailableError, match="missing adapter keys"):
        load(f"{base}+{folder}", dtype="float32", device_map="cpu")
    (folder / adapter.WEIGHTS).write_bytes(b"PK" * 20)
    with pytest.raises(InputError, match="no safetensors"):
        locate(f"{base}+{folder}")
    (folder / adapter.WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(InputError, match="pickled"):
        locate(f"{base}+{folder}")
    with pytest.raises(ModelUnavailableError, match="no folder with an adapter"):
        locate(f"{base}+{tmp_path}/nothing")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelUnavailableError, match="pip install peft"):
        load(str(lora), dtype="float32", device_map="cpu")


def test_the_text_part_of_a_ministral_3(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = AutoConfig.for_model(
        "ministral3", vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    vision = AutoConfig.for_model("pixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2, image_size=28, patch_size=14, head_dim=16)  # fmt: skip
    config = AutoConfig.for_model(
        "mistral3", text_config=text.to_dict(), vision_config=vision.to_dict(), tie_word_embeddings=False
    )
    torch.manual_seed(1)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path / "vl")
    tiny_tokenizer().save_pretrained(tmp_path / "vl")
    assert read_spec(str(tmp_path / "vl"))[0].family == "ministral3"
    loaded = load(str(tmp_path / "vl"), dtype="float32", device_map="cpu")
    ids = random_ids(12)
    expected = whole(torch.tensor([ids])).logits[0, -1:]
    torch.testing.assert_close(forward(loaded.model, ids, new_cache(2)), expected, rtol=1e-4, atol=1e-4)
    raw = json.loads((tmp_path / "vl" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "vl" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match="-BF16"):
        read_spec(str(tmp_path / "vl"))
