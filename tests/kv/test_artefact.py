"""Artefacts: what is saved is what is loaded; everything else is refused, by name, before it is used."""

import errno
import hashlib
import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_model
from tests.kv.test_mapper import low_rank_mapper, random_mapper
from workbench.errors import ArtefactError
from workbench.kv import artefact
from workbench.kv.artefact import MANIFEST, TENSORS
from workbench.kv.manifest import FORMAT, NATIVE_FORMAT, Manifest, ModelIdentity, checksum


@pytest.fixture(scope="module")
def made():
    """A mapper between two tiny models, and its manifest."""
    mapper = random_mapper(tiny_model("llama", 1), tiny_model("llama", 2, num_hidden_layers=4))
    manifest = Manifest(
        direction="up",
        source=ModelIdentity("small", "sha256:aa", mapper.source, "sha256:tok"),
        target=ModelIdentity("large", "sha256:bb", mapper.target, "sha256:tok"),
        objective="plain", top_k=2, ridge=0.01, anchors=4, hold_back=16,
        key_layers=mapper.key_layers, value_layers=mapper.value_layers,
        calibration={"name": "x"}, held_out={"r2_k": 0.5}, versions={"torch": "0"},
    )  # fmt: skip
    return mapper, manifest


@pytest.fixture
def saved(made, tmp_path):
    """The folder of a saved artefact."""
    folder = tmp_path / "mapper"
    artefact.save(folder, *made)
    return folder


def test_round_trip(made, saved):
    mapper, manifest = made
    loaded, read = artefact.load(saved, manifest.source, manifest.target, "up")
    assert read == replace(manifest, tensors_sha256=read.tensors_sha256)
    for name in ("key_weight", "value_weight"):
        for ours, theirs in zip(getattr(loaded, name), getattr(mapper, name), strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(loaded.key_bias, mapper.key_bias, strict=True))
    assert (loaded.key_layers, loaded.anchors, loaded.hold_back) == (mapper.key_layers, 4, 16)


def test_only_two_files_and_no_leftovers(saved, made):
    artefact.save(saved, *made)
    assert sorted(os.listdir(saved)) == [MANIFEST, TENSORS]
    assert os.listdir(saved.parent) == ["mapper"]


def wrong(identity, **changes):
    return replace(identity, **changes)


@pytest.mark.parametrize(
    ("side", "change", "field"),
    [
        ("source", {"revision": "sha256:other"}, "source.revision"),
        ("target", {"revision": "sha256:other"}, "target.revision"),
        ("source", {"tokenizer": "sha256:other"}, "source.tokenizer"),
        ("target", {"spec": {"layers": 5}}, "target.spec.layers"),
        ("target", {"spec": {"family": "qwen3"}}, "target.spec.family"),
        ("source", {"spec": {"rope": {"theta": 77.0}}}, "source.spec.rope"),
    ],
)
def test_another_model_is_refused_by_the_field(made, saved, side, change, field):
    _, manifest = made
    identity = getattr(manifest, side)
    if "spec" in change:
        spec = dict(change["spec"])
        if "rope" in spec:
            spec["rope"] = replace(identity.spec.rope, **spec["rope"])
        change = {"spec": replace(identity.spec, **spec)}
    expected = {"source": manifest.source, "target": manifest.target} | {side: replace(identity, **change)}
    with pytest.raises(ArtefactError, match=field.replace(".", r"\.")):
        artefact.load(saved, expected["source"], expected["target"], "up")


def test_wrong_direction_is_refused(saved):
    with pytest.raises(ArtefactError, match="'up', but 'down' is needed"):
        artefact.load(saved, direction="down")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1), bit=st.integers(0, 7), name=st.sampled_from([TENSORS, MANIFEST]))
def test_one_flipped_bit_is_never_accepted_as_other_numbers(made, tmp_path_factory, position, bit, name):
    """A flip is refused wherever it is."""
    folder = tmp_path_factory.mktemp("flip") / "mapper"
    artefact.save(folder, *made)
    before = artefact.read_manifest(folder)
    blob = bytearray((folder / name).read_bytes())
    index = min(int(position * len(blob)), len(blob) - 1)
    blob[index] ^= 1 << bit
    (folder / name).write_bytes(blob)
    try:
        _, manifest = artefact.load(folder, before.source, before.target, before.direction)
    except ArtefactError:
        return
    assert name == MANIFEST and manifest == before  # the flip was in white space


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.999))
def test_cut_files_are_refused(made, tmp_path_factory, share):
    folder = tmp_path_factory.mktemp("cut") / "mapper"
    artefact.save(folder, *made)
    for name in (TENSORS, MANIFEST):
        blob = (folder / name).read_bytes()
        (folder / name).write_bytes(blob[: int(share * len(blob))])
        with pytest.raises(ArtefactError):
            artefact.load(folder)
        (folder / name).write_bytes(blob)
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes() + b"x")
    with pytest.raises(ArtefactError, match="bytes where"):
        artefact.load(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        b"<!doctype html><title>404</title>",
        pickle.dumps({"key.0.weight": [1, 2]}),
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (9).to_bytes(8, "little") + b"[[[[[[[[[",
    ],
)
def test_other_files_under_the_name_are_refused(saved, content):
    (saved / TENSORS).write_bytes(content)
    with pytest.raises(ArtefactError):
        artefact.load(saved)


def rewrite_header(folder, change):
    """Put another header before the same tensor bytes."""
    blob = (folder / TENSORS).read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    (folder / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + size :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.pop("key.0.weight"), "no tensor 'key.0.weight'"),
        (lambda h: h.update(extra=h["key.0.bias"]), "unknown tensor 'extra'"),
        (lambda h: h["value.1.bias"].update(shape=[0, 2**60]), "value.1.bias"),
        (lambda h: h["value.1.bias"].update(dtype="I64"), "value.1.bias"),
        (lambda h: h["value.1.bias"].update(dtype=["F16"]), "value.1.bias"),
        (
            lambda h: h.update({f"t{i}": h["key.0.bias"] for i in range(100_000)}),
            "far more than 16 tensors need",
        ),
    ],
)
def test_header_tricks_are_refused_by_name(saved, change, message):
    rewrite_header(saved, change)
    with pytest.raises(ArtefactError, match=message):
        artefact.load(saved)


def test_overlapping_offsets_and_absurd_numbers_are_refused(saved):
    rewrite_header(saved, lambda h: h["value.1.bias"].update(data_offsets=h["key.0.bias"]["data_offsets"]))
    path = saved / MANIFEST
    data = json.loads(path.read_text())
    data["tensors_sha256"] = hashlib.sha256((saved / TENSORS).read_bytes()).hexdigest()
    with pytest.raises(ArtefactError, match="manifest's sum does not fit"):
        Manifest.from_json(data)
    del data["sum"]
    with pytest.raises(ArtefactError, match="manifest's sum does not fit"):
        Manifest.from_json(data)
    path.write_text(json.dumps(data | {"sum": checksum(data)}))
    with pytest.raises(ArtefactError, match="no valid safetensors"):
        artefact.load(saved)
    for number in ("1" * 5000, "NaN", "-Infinity"):
        path.write_text('{"format": ' + number + "}")
        with pytest.raises(ArtefactError, match="not readable JSON"):
            artefact.load(saved)


def test_links_pipes_and_huge_sparse_files_are_refused_at_once(saved):
    path = saved / TENSORS
    path.rename(saved / "elsewhere")
    path.symlink_to(saved / "elsewhere")
    with pytest.raises(ArtefactError, match="not a plain file"):
        artefact.load(saved)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArtefactError, match="not a plain file"):
        artefact.load(saved)
    path.unlink()
    (saved / "elsewhere").rename(path)
    os.truncate(path, 10 * 2**30)
    with pytest.raises(ArtefactError, match="bytes where"):
        artefact.load(saved)


def test_values_that_are_not_finite_are_neither_saved_nor_loaded(made, tmp_path):
    mapper, manifest = made
    broken = (torch.full_like(mapper.key_bias[0], float("nan")), *mapper.key_bias[1:])
    with pytest.raises(ArtefactError, match=r"key\.0\.bias has"):
        artefact.save(tmp_path / "mapper", replace(mapper, key_bias=broken), manifest)
    assert not (tmp_path / "mapper").exists()


@pytest.mark.parametrize("call", range(1, 7))
def test_a_full_disk_leaves_the_old_artefact_and_nothing_else(made, saved, monkeypatch, call):
    before, calls = artefact.load(saved)[1], []
    for name in ("fsync", "rename"):
        real = getattr(os, name)

        def failing(*arguments, real=real):
            calls.append(real)
            if len(calls) == call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, name, failing)
    with pytest.raises(ArtefactError, match="No space left on device"):
        artefact.save(saved, made[0], replace(made[1], anchors=9))
    monkeypatch.undo()
    assert os.listdir(saved.parent) == ["mapper"]
    assert artefact.load(saved)[1] == before


def test_a_file_that_is_replaced_while_in_use_changes_nothing(saved):
    mapper, _ = artefact.load(saved)
    before = [bias.clone() for bias in mapper.key_bias]
    path = saved / TENSORS
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(a, b) for a, b in zip(mapper.key_bias, before, strict=True))


def test_a_kill_between_the_renames_loses_nothing(made, saved):
    saved.rename(saved.parent / ".mapper.old")
    (saved.parent / ".mapper.new-abc").mkdir()
    artefact.load(saved)
    assert os.listdir(saved.parent) == ["mapper"]


def test_weights_too_large_for_half_precision_keep_float32(made, tmp_path):
    mapper, manifest = made
    big = replace(mapper, key_weight=(mapper.key_weight[0] * 1e6, *mapper.key_weight[1:]))
    artefact.save(tmp_path / "mapper", big, manifest)
    loaded, _ = artefact.load(tmp_path / "mapper")
    torch.testing.assert_close(loaded.key_weight[0], big.key_weight[0])


def test_unknown_format_and_fields_are_named(saved):
    path = saved / MANIFEST
    data = json.loads(path.read_text())
    rope = data["source"]["spec"]["rope"] | {"type": "defautt"}
    for change, message in (
        ({"format": 99}, "format is 99"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"anchors": True}, "'anchors' has the wrong type"),
        ({"key_layers": [[99]] * 4}, "'key_layers'"),
        ({"source": {}}, "'source'"),
        ({"source": data["source"] | {"spec": data["source"]["spec"] | {"layers": "3"}}}, r"source\.spec"),
        ({"target": data["target"] | {"spec": data["target"]["spec"] | {"head_dim": -1}}}, r"target\.spec"),
        ({"source": data["source"] | {"spec": data["source"]["spec"] | {"rope": rope}}}, r"source\.spec"),
    ):
        path.write_text(json.dumps(data | change))
        with pytest.raises(ArtefactError, match=message):
            artefact.load(saved)


@pytest.mark.parametrize(("features", "hidden"), [("own", 0), ("both", 0), ("both", 5)])
def test_low_rank_mappers_survive_saving(made, tmp_path, features, hidden):
    mapper = low_rank_mapper(
        tiny_model("llama", 1), tiny_model("llama", 2, num_hidden_layers=4), features, hidden=hidden
    )
    manifest = replace(made[1], key_layers=mapper.key_layers, value_layers=mapper.value_layers)
    artefact.save(tmp_path / "mapper", mapper, manifest)
    loaded, read = artefact.load(tmp_path / "mapper")
    assert (read.format, read.features, read.hidden) == (FORMAT, features, hidden)
    assert read.ranks == (7,) * len(mapper.reduce)
    for name in mapper.shapes():
        torch.testing.assert_close(loaded.tensor(name).float(), mapper.tensor(name), rtol=2e-3, atol=1e-3)


def test_a_manifest_of_format_1_still_loads_and_stays_one(made, saved):
    """Format 1 had full matrices only and did not say so."""
    path = saved / MANIFEST
    data = json.loads(path.read_text())
    for name in ("features", "ranks", "hidden", "selection", "polish", "familiar", "sum"):
        del data[name]
    path.write_text(json.dumps(data | {"format": 1}))
    mapper, manifest = artefact.load(saved)
    assert (manifest.format, mapper.features, mapper.reduce) == (1, "own", ())
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    path.write_text(json.dumps(data | {"format": 2}))
    with pytest.raises(ArtefactError, match="no field 'features'"):
        artefact.load(saved)


def test_a_manifest_of_format_2_still_loads_and_stays_one(saved):
    """Format 2 re-read nothing."""
    path = saved / MANIFEST
    data = json.loads(path.read_text()) | {"format": 2}
    del data["familiar"], data["sum"]
    path.write_text(json.dumps(data | {"sum": checksum(data)}))
    mapper, manifest = artefact.load(saved)
    assert (manifest.format, mapper.familiar) == (2, ())
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_familiar_ids_survive_saving(made, tmp_path):
    mapper, manifest = made
    artefact.save(tmp_path / "mapper", replace(mapper, familiar=(5, 3, 200)), manifest)
    loaded, read = artefact.load(tmp_path / "mapper")
    assert loaded.familiar == read.familiar == (5, 3, 200)
    assert loaded.rare([3, 4, 5, 6], 0, 4) == [1, 3] and loaded.rare([3, 4, 5, 6], 2, 3) == []


def test_native_layers_survive_saving_and_change_the_sum(made, saved, tmp_path):
    """Only then is the format a new one: a reader that knows nothing of them must not read on."""
    mapper, manifest = made
    plain = artefact.read_manifest(saved)
    assert plain.format == FORMAT and "native_layers" not in json.loads((saved / MANIFEST).read_text())
    artefact.save_with_native_layers(saved, saved, 2)
    loaded, read = artefact.load(saved, manifest.source, manifest.target, "up")
    assert (loaded.native_layers, read.native_layers, read.format) == (2, 2, NATIVE_FORMAT)
    assert loaded.flops_per_token < mapper.flops_per_token
    other = artefact.save_with_native_layers(saved, tmp_path / "other", 3)
    assert len({plain.tensors_sha256, read.tensors_sha256, other.tensors_sha256}) == 3
    assert artefact.load(saved)[0].native_layers == 2
    artefact.save_with_native_layers(saved, saved, 0)  # the tensors of those layers are still there
    again, back = artefact.load(saved)
    assert back == plain and again.native_layers == 0
    for layers in (-1, 5):
        with pytest.raises(ArtefactError, match="has 4 layers"):
            artefact.save_with_native_layers(saved, saved, layers)


def test_tensors_of_another_number_of_native_layers_are_refused(saved):
    """The manifest alone cannot change what a sum stands for."""
    path = saved / MANIFEST
    data = json.loads(path.read_text()) | {"format": NATIVE_FORMAT, "native_layers": 1}
    del data["sum"]
    path.write_text(json.dumps(data | {"sum": checksum(data)}))
    with pytest.raises(ArtefactError, match="not saved with 1 native layers"):
        artefact.load(saved)


def test_other_familiar_ids_are_another_mapper_and_cannot_be_swapped(made, tmp_path):
    """What is re-read is part of what was measured and approved."""
    mapper, manifest = made
    sums = {}
    for name, ids in (("none", ()), ("few", (3, 1)), ("more", (3, 1, 2))):
        sums[name] = artefact.save(tmp_path / name, replace(mapper, familiar=ids), manifest).tensors_sha256
        assert artefact.load(tmp_path / name)[0].familiar == ids
    assert len(set(sums.values())) == 3
    path = tmp_path / "few" / MANIFEST
    data = json.loads(path.read_text()) | {"familiar": [3, 1, 2]}
    del data["sum"]
    path.write_text(json.dumps(data | {"sum": checksum(data)}))
    with pytest.raises(ArtefactError, match="other familiar ids"):
        artefact.load(tmp_path / "few")


@pytest.mark.parametrize(
    ("value", "message"),
    [(-1, "must be 1 to 4"), (5, "must be 1 to 4"), (0, "must be 1 to 4"), (True, "wrong type"), ("2", "wrong type"),
     (None, "no field 'native_layers'")],
)  # fmt: skip
def test_native_layers_in_a_manifest_are_checked(saved, value, message):
    artefact.save_with_native_layers(saved, saved, 2)
    path = saved / MANIFEST
    data = json.loads(path.read_text())
    del data["sum"], data["native_layers"]
    data |= {} if value is None else {"native_layers": value}
    path.write_text(json.dumps(data | {"sum": checksum(data)}))
    with pytest.raises(ArtefactError, match=message):
        artefact.load(saved)
    data |= {"format": FORMAT, "native_layers": 2}
    path.write_text(json.dumps(data | {"sum": checksum(data)}))
    with pytest.raises(ArtefactError, match="unknown field 'native_layers'"):
        artefact.load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"familiar": [1, 1]}, "familiar"),
        ({"familiar": [-1]}, "familiar"),
        ({"familiar": [10**9]}, "familiar"),
        ({"familiar": [True]}, "familiar"),
        ({"familiar": [[1]]}, "familiar"),
        ({"familiar": "1"}, "'familiar' has the wrong type"),
        ({"ranks": [0]}, "ranks above 0"),
        ({"ranks": [2**40]}, "ranks"),
        ({"ranks": [7, 7, 7]}, "contradicts itself"),
        ({"ranks": [[7]]}, "ranks"),
        ({"hidden": -1}, "hidden"),
        ({"features": "x"}, "features must be"),
        ({"features": 3}, "'features' has the wrong type"),
        ({"ranks": [7, 7]}, "has no tensor|unknown tensor|contradicts itself"),
    ],
)
def test_forms_in_a_manifest_are_checked(saved, change, message):
    path = saved / MANIFEST
    data = json.loads(path.read_text()) | change
    del data["sum"]
    path.write_text(json.dumps(data | {"sum": checksum(data)}))
    with pytest.raises(ArtefactError, match=message):
        artefact.load(saved)
