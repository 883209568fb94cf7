"""Mappers side by side: the same passages for all, the recipe as published, results that survive JSON, figures."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.conftest import random_ids, tiny_model, tiny_tokenizer
from tests.lab.conftest import random_mapper, texts
from workbench.errors import ArtefactError, InputError
from workbench.kv import artefact
from workbench.kv.cache import layer_tensors, length, new_cache
from workbench.kv.fit import fit
from workbench.kv.forward import forward
from workbench.kv.mapper import KVMapper
from workbench.kv.options import FitOptions
from workbench.lab import mappers
from workbench.lab.arms import zero_cache
from workbench.lab.corpus import passages
from workbench.lab.results import KINDS, MapperTable, finish
from workbench.models.loading import wrap
from workbench.models.pair import PairHost
from workbench.plots import describe, figure


@pytest.fixture(scope="module")
def pair():
    tokenizer = tiny_tokenizer()
    small, large = (
        wrap(tiny_model("qwen2", 2), tokenizer, "small"),
        wrap(tiny_model("llama", 1), tokenizer, "large"),
    )
    default = random_mapper(small.spec, large.spec)
    return PairHost.from_models(
        small, large, {"up": (default, None), "down": (random_mapper(large.spec, small.spec), None)}
    )


def table(pair, **options) -> MapperTable:
    own = mappers.Contestant("default", pair.mapper("up")[0], None)
    exact = mappers.Contestant(
        "other", random_mapper(own.mapper.source, own.mapper.target, seed=5, hold_back=9), None
    )
    settings = {"limit": 4, "context": 40, "following": 6, **options}
    return finish(mappers.stream(pair, "up", [own, exact], texts(), **settings))


def test_each_mapper_is_measured_as_it_is_used_and_costs_are_counted(pair):
    result = table(pair)
    default, other = result.mappers["default"], result.mappers["other"]
    assert (default.anchors, default.hold_back, other.hold_back) == (2, 3, 9)
    assert default.kl.value > 0 and default.kl.value != other.kl.value
    assert default.kl.low <= default.kl.value <= default.kl.high
    mapper = pair.mapper("up")[0]
    prefill = mappers.prefill_flops_per_token(pair.model("large"), 40)
    assert default.map_flops_share == pytest.approx(mapper.flops_per_token / prefill)
    layers = pair.model("large").model.model.layers
    matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim == 2)
    assert prefill == 2 * matrices + 4 * 3 * 4 * 16 * 20
    assert default.artefact_mb == pytest.approx(1e-6 * sum(
        getattr(mapper, f"{kind}_{part}")[t].numel() * size
        for kind in ("key", "value") for part, size in (("weight", 2), ("bias", 4)) for t in range(3)
    ))  # fmt: skip
    assert result.curve == () and default.map_ms > 0
    assert result.fixed["native"].kl.value == 0


def test_an_exact_mapper_recovers_everything(pair):
    large = pair.model("large")
    same = PairHost.from_models(large, large, {"up": (KVMapper.identity(large.spec), None)})
    one = mappers.Contestant("default", same.mapper("up")[0], None)
    result = finish(mappers.stream(same, "up", [one], texts(), limit=3, context=40, following=6, curve=True))
    assert result.mappers["default"].kl.value < 1e-6
    assert result.mappers["default"].gap_recovered.value == pytest.approx(1, abs=1e-3)
    assert all(point.kl.value < 1e-6 for point in result.curve)


def test_the_curve_varies_one_thing_at_a_time_and_survives_json(pair):
    result = table(pair, curve=True, system_prompt=5)
    main = result.mappers["default"]
    assert [p.anchors for p in result.curve if p.hold_back == main.hold_back and not p.label][:6] == [
        0,
        1,
        2,
        4,
        8,
        16,
    ]
    assert [p.anchors for p in result.curve if p.label] == [5]
    assert {p.hold_back for p in result.curve if p.anchors == main.anchors} >= {1, 16, 32}
    again = KINDS["mappers"].from_json(json.loads(json.dumps(result.to_json())))
    assert again == result
    assert "default" in describe(again)
    drawn = figure(again, part="curve")
    assert len(drawn.data) == 2 and "5 (system prompt)" in drawn.data[0].x
    assert len(figure(again).data) == 2


def test_native_layers_are_counted(pair):
    """With all layers native the mapper multiplies nothing, and the cost is a whole prefill."""
    plain = pair.mapper("up")[0]
    compared = [mappers.Contestant(f"m{m}", replace(plain, native_layers=m), None) for m in (0, 1, 3)]
    result = finish(mappers.stream(pair, "up", compared, texts(), limit=4, context=40, following=6))
    none, one, every = (result.mappers[f"m{m}"] for m in (0, 1, 3))
    assert none.native_share == 0 and one.native_share == pytest.approx(1 / 3)
    assert one.map_flops_share == pytest.approx(none.map_flops_share * 2 / 3)
    assert one.cost_share == pytest.approx(one.map_flops_share + 1 / 3)
    assert every.cost_share == pytest.approx(1)
    assert every.kl.value == pytest.approx(0, abs=1e-5) and one.kl.value > 1e-3
    assert "the lowest layer native" in one.form and "native" not in none.form
    again = MapperTable.from_json(json.loads(json.dumps(result.to_json())))
    assert again.mappers["m1"].native_share == one.native_share


def test_the_control_without_information_runs_the_same_layers(pair):
    target = pair.model("large")
    ids, native = random_ids(30), new_cache(3)
    forward(target.model, ids, native, keep=0)
    zero = zero_cache(target, ids, 2, 25, replace(pair.mapper("up")[0], native_layers=2))
    assert length(zero) == 25
    for layer in range(3):
        ours, theirs = layer_tensors(zero, layer)[0], layer_tensors(native, layer)[0]
        same = torch.allclose(ours[:, :, :25], theirs[:, :, :25], atol=1e-4)
        assert same == (layer < 2) and bool(ours[:, :, 2:].any()) == (layer < 2)


def test_what_is_reread_is_counted_and_has_a_curve(pair):
    """With fewer familiar ids more is re-read, down to a prefill; every point says how much it was."""
    plain = pair.mapper("up")[0]
    ids = passages(pair.model("large").tokenizer, texts(), 46, 4)
    counts = Counter(token for passage in ids for token in passage.ids[:40])
    familiar = tuple(token for token, _ in counts.most_common(len(counts) // 2))
    own = mappers.Contestant("default", replace(plain, familiar=familiar), None)
    none = mappers.Contestant("none", plain, None)
    settings = {"limit": 4, "context": 40, "following": 6, "curve": True}
    result = finish(mappers.stream(pair, "up", [own, none], texts(), **settings))
    default = result.mappers["default"]
    inside = [passage.ids[2:37] for passage in ids]
    assert default.reread_share == pytest.approx(
        sum(token not in familiar for part in inside for token in part) / (4 * 40)
    )
    assert 0 < default.reread_share < default.cost_share and result.mappers["none"].reread_share == 0
    points = [point for point in result.curve if point.label == "re-read"]
    shares = [point.reread_share for point in points]
    assert shares == sorted(shares) and shares[0] == 0 and default.reread_share in shares
    assert points[0].kl.value == pytest.approx(result.mappers["none"].kl.value)
    drawn = figure(MapperTable.from_json(json.loads(json.dumps(result.to_json()))), part="curve")
    assert len(drawn.data) == 3 and drawn.data[2].x[0] == "0%"


def test_the_recipe_is_fitted_on_all_tokens_and_kept(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(mappers, "documents", lambda kind: texts(8))
    read = []
    real = mappers.fit
    monkeypatch.setattr(mappers, "fit", lambda *a, **k: read.append(k["state_file"]) or real(*a, **k))
    found = mappers.contestants(pair, "up", ["recipe", "default"], {}, tmp_path, sequences=8)
    assert [one.name for one in found] == ["recipe_k6", "recipe_k8", "default"]
    manifest = artefact.read_manifest(tmp_path / "recipe_k6")
    assert (manifest.anchors, manifest.ridge, manifest.top_k, manifest.selection) == (0, 0.01, 6, "ranked")
    assert manifest.hold_back == found[2].mapper.hold_back
    assert len(set(read)) == 1
    mappers.contestants(pair, "up", ["recipe"], {}, tmp_path)
    assert len(read) == 2  # kept, not fitted again


def test_unknown_names_and_strange_folders_are_refused(pair, tmp_path):
    with pytest.raises(InputError, match="no mapper 'x'"):
        mappers.contestants(pair, "up", ["x"], {}, tmp_path)
    small, large = pair.model("small"), pair.model("large")
    options = FitOptions(8, 48, top_k=1, anchors=2)
    mapper, manifest, _ = fit(large, small, [t.text for t in texts(8)], options, direction="down")
    artefact.save(tmp_path / "down", mapper, manifest)
    with pytest.raises(ArtefactError, match="'down', but 'up'"):
        mappers.contestants(pair, "up", ["y"], {"y": tmp_path / "down"}, tmp_path)


def test_names_on_the_command_line(tmp_path):
    from workbench.commands.mapper_table import _parse

    assert _parse(f"recipe, mine={tmp_path},best") == (["recipe", "mine", "best"], {"mine": tmp_path})
    for wrong in ("nothing", "a=/no/such/folder", " , "):
        with pytest.raises(InputError):
            _parse(wrong)


def test_the_table_for_people_has_every_mapper_and_the_curve(pair):
    from workbench.commands.mapper_table import show_mappers

    shown = show_mappers(json.loads(json.dumps(table(pair, curve=True, system_prompt=5).to_json())))
    for words in ("default", "other", "gap recovered", "native: CE", "5 system prompt"):
        assert words in shown
