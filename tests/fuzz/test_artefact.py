"""Mutants of artefacts: refused with one sentence, quickly, or exactly what was saved; never anything else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import tiny_model
from tests.fuzz.conftest import examples
from tests.fuzz.mutate import bytes_of, json_of
from tests.kv.test_mapper import random_mapper
from workbench.errors import ArtefactError
from workbench.kv import artefact
from workbench.kv.artefact import MANIFEST, TENSORS
from workbench.kv.manifest import Manifest, ModelIdentity, checksum

SECONDS = 2.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A saved artefact, its bytes, what loading it gives, and a folder for mutants."""
    mapper = random_mapper(tiny_model("llama", 1), tiny_model("llama", 2, num_hidden_layers=4))
    identity = {"source": mapper.source, "target": mapper.target}
    manifest = Manifest(
        direction="up",
        **{name: ModelIdentity(name, f"sha256:{name}", spec, "sha256:tok") for name, spec in identity.items()},
        objective="plain", top_k=2, ridge=0.01, anchors=4, hold_back=16,
        key_layers=mapper.key_layers, value_layers=mapper.value_layers,
        calibration={"name": "x"}, held_out={"r2_k": 0.5}, versions={"torch": "0"},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("fuzz") / "mapper"
    artefact.save(folder, mapper, manifest)
    files = {name: (folder / name).read_bytes() for name in (TENSORS, MANIFEST)}
    return folder, files, artefact.load(folder)


def same(loaded: Any, expected: Any) -> bool:
    (ours, manifest), (theirs, right) = loaded, expected
    names = ours.shapes()
    return manifest == right and all(torch.equal(ours.tensor(n), theirs.tensor(n)) for n in names)


def attempt(made: Any, **changed: bytes) -> None:
    folder, files, expected = made
    for name, original in files.items():
        (folder / name).write_bytes(changed.get(name.replace(".", "_"), original))
    started = time.process_time()
    try:
        loaded = artefact.load(folder)
    except ArtefactError as error:
        assert "\n" not in str(error) and str(Path(folder).parent) not in str(error)
    else:
        assert same(loaded, expected)
    assert time.process_time() - started < SECONDS


@examples(60, 6_000)
@given(data=st.data())
def test_mutants_of_the_tensors(made: Any, data: Any) -> None:
    attempt(made, mapper_safetensors=data.draw(bytes_of(made[1][TENSORS])))


@examples(40, 4_000)
@given(data=st.data())
def test_mutants_of_the_header(made: Any, data: Any) -> None:
    blob = made[1][TENSORS]
    size = int.from_bytes(blob[:8], "little")
    header = json.dumps(data.draw(json_of(json.loads(blob[8 : 8 + size])))).encode()
    rest = data.draw(st.sampled_from((blob[8 + size :], b"", blob[8 + size :] + b"\0" * 64)))
    attempt(made, mapper_safetensors=len(header).to_bytes(8, "little") + header + rest)


@examples(60, 1_200)
@given(data=st.data())
def test_mutants_of_the_manifest(made: Any, data: Any) -> None:
    attempt(made, manifest_json=json.dumps(data.draw(json_of(json.loads(made[1][MANIFEST])))).encode())


@examples(40, 800)
@given(data=st.data())
def test_mutants_of_the_manifest_as_bytes(made: Any, data: Any) -> None:
    attempt(made, manifest_json=data.draw(bytes_of(made[1][MANIFEST])))


@examples(40, 800)
@given(data=st.data())
def test_fields_are_checked_also_where_the_sum_fits(made: Any, data: Any) -> None:
    """Whoever writes a sum that fits gets no more than a manifest that says something else in words."""
    original = {name: value for name, value in json.loads(made[1][MANIFEST]).items() if name != "sum"}
    changed = data.draw(json_of(original))
    try:
        manifest = Manifest.from_json(changed | {"sum": checksum(changed)})
    except ArtefactError as error:
        assert "\n" not in str(error)
        return
    again = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert repr(again) == repr(manifest)
