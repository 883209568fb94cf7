"""Two devices and offloaded layers: weights, matrices and caches stand where each layer computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from workbench.chat.handoff import gate, hand_over
from workbench.commands.common import side_options
from workbench.kv.cache import layer_tensors, new_cache
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.models import loading
from workbench.models.catalog import resolve
from workbench.models.devices import layer_devices
from workbench.models.loading import load, wrap
from workbench.models.pair import PairHost

CPU, OTHER = (
    torch.device("cpu"),
    torch.device("meta"),
)  # meta stands for a second device: it has shapes, no numbers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "placement",
    [
        {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu",
         "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"},
        {"model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk",
         "model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "cpu"},
    ],
)  # fmt: skip
def test_layers_on_disk_give_native_logits_through_the_path(
    checkpoint: Path, tmp_path: Path, placement: dict[str, str]
) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps(placement))
    model = load(str(checkpoint), device_map=str(file), dtype="float32")
    assert model.layer_devices == (CPU,) * 3 and model.device == CPU
    ids = random_ids(30)
    native = forward(tiny_model("llama"), ids, new_cache(3))
    torch.testing.assert_close(forward(model.model, ids, new_cache(3)), native, rtol=1e-4, atol=1e-4)
    assert gate(model, ids).ok
    own, nothing = new_cache(3), tuple(torch.zeros_like(w) for w in KVMapper.identity(model.spec).key_weight)
    forward(model.model, ids, own, keep=0)
    mapper = replace(KVMapper.identity(model.spec), key_weight=nothing, value_weight=nothing, native_layers=3)
    logits, account = hand_over(ids, own, model, new_cache(3), mapper, model, 2, 3)
    torch.testing.assert_close(logits, native, rtol=1e-4, atol=1e-4)
    assert account.native_layers == 3


def test_mapped_keys_and_values_land_on_their_layers_device() -> None:
    model = wrap(tiny_model("qwen3"), tiny_tokenizer(), "tiny")
    ids, source = random_ids(20), new_cache(3)
    forward(model.model, ids, source, keep=0)
    places = (CPU, OTHER, OTHER)
    mapper = KVMapper.identity(model.spec).to(None, places)
    assert tuple(weight.device for weight in mapper.key_weight) == places
    target = new_cache(3)
    mapper.map_into(source, target, 0, 20, model.rotary, model.rotary)
    for layer, place in enumerate(places):
        assert all(tensor.device == place for tensor in layer_tensors(target, layer))
    torch.testing.assert_close(layer_tensors(target, 0)[0], layer_tensors(source, 0)[0], rtol=1e-4, atol=1e-5)
    # And the other way: a source whose layers lie on two devices feeds every target layer.
    spread = new_cache(3)
    for layer, place in enumerate((OTHER, CPU, OTHER)):
        spread.update(*(tensor.to(place) for tensor in layer_tensors(source, layer)), layer)
    all_layers = ((0, 1, 2),) * 3
    weight, bias = (torch.zeros(3 * model.spec.kv_width, model.spec.kv_width),) * 3, mapper.key_bias
    mixed = replace(KVMapper.identity(model.spec), key_layers=all_layers, value_layers=all_layers, key_weight=weight,
                    value_weight=weight, key_bias=bias, value_bias=bias).to(None, places)  # fmt: skip
    target = new_cache(3)
    mixed.to(None, (OTHER,) * 3).map_into(spread, target, 0, 20, model.rotary, model.rotary)
    assert layer_tensors(target, 2)[0].device == OTHER


def test_devices_of_layers_are_those_of_accelerates_hooks() -> None:
    """As accelerate leaves a model that is spread over two GPUs with the last layer offloaded to memory."""

    def hook(device: Any, offload: bool) -> Any:
        return SimpleNamespace(execution_device=device, offload=offload)

    blocks = []
    for device, offload in ((0, False), (1, True), ("cuda:1", True)):
        block = torch.nn.Linear(2, 2, device="cpu" if not offload else "meta")
        block._hf_hook = hook(device, offload)
        blocks.append(block)
    model = SimpleNamespace(base_model=SimpleNamespace(layers=blocks))
    assert layer_devices(model, 3)[1:] == (torch.device("cuda", 1), torch.device("cuda", 1))


def test_each_model_has_its_own_map_and_dtype(checkpoint: Path, tmp_path: Path) -> None:
    arguments = SimpleNamespace(small_dtype="float32", large_dtype="bfloat16", large_device_map="cpu")
    options = side_options(arguments)  # type: ignore[arg-type]
    assert options == {"small": {"dtype": "float32"}, "large": {"dtype": "bfloat16", "device_map": "cpu"}}
    host = PairHost(resolve(None, str(checkpoint), str(checkpoint)), dtype="float16", by_side=options)
    assert host.model("small").dtype == torch.float32 and host.model("large").dtype == torch.bfloat16


def test_the_folder_for_offloaded_layers_is_not_made_without_need() -> None:
    assert loading.offload_folder("auto", None) is None
    assert loading.offload_folder({"": "cpu"}, None) is None
    assert loading.offload_folder({"": "disk"}, None) == loading.offload_folder("auto", {"cpu": "1GB"})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_over_two_gpus(checkpoint: Path) -> None:
    placement = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1,
                 "model.layers.2": 1, "model.norm": 1, "lm_head": 1}  # fmt: skip
    model = load(str(checkpoint), device_map=placement, dtype="float32")
    assert [device.index for device in model.layer_devices] == [0, 1, 1]
    ids = random_ids(40)
    assert gate(model, ids).ok
    own, mapped = new_cache(3), new_cache(3)
    forward(model.model, ids, own, keep=0)
    hand_over(ids, own, model, mapped, KVMapper.identity(model.spec).to(None, model.layer_devices), model)
    for layer, device in enumerate(model.layer_devices):
        assert layer_tensors(mapped, layer)[0].device == device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_on_a_gpu_passes_the_gate(checkpoint: Path, dtype: str) -> None:
    model = load(str(checkpoint), device_map="cuda:0", dtype=dtype)
    assert gate(model, random_ids(40)).ok
