"""What a pair needs, and where it is put: checked against models that are really there, on imagined machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import random_ids, tiny_config, tiny_model, tiny_tokenizer
from workbench.chat.handoff import gate
from workbench.errors import InputError
from workbench.kv.cache import nbytes, new_cache
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.models.catalog import PAIRS
from workbench.models.loading import load
from workbench.models.planner import Device, ModelSize, cache_bytes, mapper_bytes, plan, plan_pair
from workbench.models.presets import PRESETS

GB = 10**9
NAMES, BF16 = {"small": "s", "large": "l"}, {"small": "bfloat16", "large": "bfloat16"}

# Published numbers of parameters: what the shapes in the catalog must come to.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}


@pytest.mark.parametrize("ref", PUBLISHED)
def test_presets_have_as_many_parameters_as_their_models(ref: str) -> None:
    assert ModelSize.of(PRESETS[ref].config()).parameters == PUBLISHED[ref]


def test_every_pair_of_the_catalog_has_both_presets() -> None:
    for pair in list(PAIRS.values())[1:]:
        assert pair.small in PRESETS and pair.large in PRESETS


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_are_those_of_the_model(kind: str, tied: bool) -> None:
    model = tiny_model(kind, tie_word_embeddings=tied)
    size = ModelSize.of(model.config)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.layers == tuple(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    cache = new_cache(size.spec.layers)
    forward(model, random_ids(33), cache, keep=0)
    assert cache_bytes(size.spec, 33, 4) == nbytes(cache)
    identity = KVMapper.identity(size.spec)
    assert mapper_bytes(size.spec, size.spec, 1, 4) == identity.nbytes


def sizes(small: str = "Qwen/Qwen3-0.6B", large: str = "Qwen/Qwen3-8B") -> dict[str, ModelSize]:
    return {"small": ModelSize.of(PRESETS[small].config()), "large": ModelSize.of(PRESETS[large].config())}


def planned(*free: tuple[str, float], **options: Any) -> Any:
    return plan(sizes(), NAMES, BF16, [Device(name, int(gb * GB)) for name, gb in free], **options)


def test_one_large_gpu_takes_both_whole() -> None:
    found = planned(("cuda:0", 80), ("cpu", 64), ("disk", 500))
    assert found.maps == {"large": {"": 0}, "small": {"": 0}} and found.fits
    assert found.used["cuda:0"] > found.needs["large"].weights + found.needs["small"].weights
    assert found.needs["large"].weights == 2 * 8_190_735_360 and "Fits" in found.sentence


def test_two_gpus_split_the_large_model_between_layers() -> None:
    found = planned(("cuda:1", 12), ("cuda:0", 12), ("cpu", 64), ("disk", 500), tokens=1024, top_k=6)
    places = found.maps["large"]
    by_layer = [places[f"model.layers.{layer}"] for layer in range(36)]
    assert by_layer == sorted(by_layer, key=[1, 0].index) and set(by_layer) == {0, 1}  # in order, never back
    assert places["model.embed_tokens"] == places["lm_head"] == 1
    assert found.used["cuda:0"] < 12 * GB and found.used["cuda:1"] < 12 * GB and found.fits


def test_too_small_a_gpu_goes_on_in_memory_then_on_disk_then_says_no() -> None:
    found = planned(("cuda:0", 10), ("cpu", 64), ("disk", 500))
    assert set(found.maps["large"].values()) == {0, "cpu"} and found.fits
    found = planned(("cpu", 14), ("disk", 500))
    assert set(found.maps["large"].values()) == {"cpu", "disk"} and not found.fits
    assert "disk" in found.sentence
    found = planned(("cpu", 14), ("disk", 1))
    assert not found.fits and "no place" in found.sentence
    found = planned(("cpu", 0.5), ("disk", 0))
    assert not found.fits and found.maps["large"] == {"": "cpu"}
    with pytest.raises(InputError):
        planned(("cpu", 64), tokens=0)


def test_a_proposed_map_loads_as_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    size = ModelSize.of(tiny_config("llama"))
    most = (
        1_500_000_000 + (size.edge + size.layers[0] + 9_000) * 4
    )  # the reserve, all outside the layers, one layer
    devices = [Device("cpu", most), Device("disk", GB)]
    float32 = {"small": "float32", "large": "float32"}
    places = plan({"small": size, "large": size}, NAMES, float32, devices, tokens=1, top_k=1).maps["large"]
    assert list(places.values()).count("disk") == 2
    (tmp_path / "large.json").write_text(json.dumps(places))
    assert gate(
        load(str(folder), device_map=str(tmp_path / "large.json"), dtype="float32"), random_ids(30)
    ).ok


def test_a_pair_that_is_not_here_is_planned_from_the_catalog() -> None:
    found = plan_pair(
        PAIRS["llama-3.1-8b-70b"], BF16, devices=[Device("cuda:0", 200 * GB), Device("cpu", 8 * GB)]
    )
    assert found.tokens == 4096 and found.needs["large"].parameters == 70_553_706_496
    json.dumps(found.to_json())
