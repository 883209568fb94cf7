"""Bad artefacts are refused before anything is allocated: within 50 ms of processor time, with memory flat."""

from __future__ import annotations

import hashlib
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from tests.conftest import tiny_model
from tests.kv.test_mapper import random_mapper
from workbench.errors import ArtefactError
from workbench.kv import artefact
from workbench.kv.artefact import MANIFEST, TENSORS
from workbench.kv.manifest import Manifest, ModelIdentity, checksum

SECONDS, BYTES = 0.05, 2_000_000
Header = dict[str, Any]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    mapper = random_mapper(tiny_model("llama", 1), tiny_model("llama", 2, num_hidden_layers=4))
    sides = {
        name: ModelIdentity(name, f"sha256:{name}", spec, "sha256:tok")
        for name, spec in (("source", mapper.source), ("target", mapper.target))
    }
    manifest = Manifest(
        direction="up", **sides, objective="plain", top_k=2, ridge=0.01, anchors=4, hold_back=16,
        key_layers=mapper.key_layers, value_layers=mapper.value_layers, calibration={}, held_out={}, versions={},
    )  # fmt: skip
    artefact.save(tmp_path / "mapper", mapper, manifest)
    return tmp_path / "mapper"


def with_header(change: Callable[[Header], Any]) -> Callable[[bytes], bytes]:
    """The file with another header before the same numbers."""

    def changed(blob: bytes) -> bytes:
        size = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + blob[8 + size :]

    return changed


def quickly_refused(folder: Path, words: str) -> None:
    """Refused; the best of three tries counts, as the machine may be busy."""
    times = []
    for _ in range(3):
        started = time.process_time()
        with pytest.raises(ArtefactError, match=words):
            artefact.load(folder)
        times.append(time.process_time() - started)
    assert min(times) < SECONDS
    tracemalloc.start()
    with pytest.raises(ArtefactError):
        artefact.load(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BYTES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((lambda blob, n=n: blob[:n], "cut off|bytes where") for n in (0, 1, 7, 8, 9, 100, 2_000, 20_000)),
        (lambda blob: blob[:-1], "bytes where"),
        (lambda blob: blob + b"x", "bytes where"),
        (lambda blob: (2**63).to_bytes(8, "little") + blob[8:], "cut off"),
        (lambda blob: (2**64 - 1).to_bytes(8, "little") + blob[8:], "cut off"),
        (with_header(lambda h: h.pop("key.0.weight")), "no tensor 'key.0.weight'"),
        (with_header(lambda h: h.update(extra=h["key.0.bias"])), "unknown tensor 'extra'"),
        (with_header(lambda h: h["key.0.bias"].update(shape=[0, 2**60])), "key.0.bias"),
        (
            with_header(lambda h: h.update({f"t{i}": h["key.0.bias"] for i in range(100_000)})),
            "far more than",
        ),
        (with_header(lambda h: (h.clear(), h.update(__metadata__={"a": "b"}))), "no tensor"),
    ],
)
def test_bad_tensor_files(saved: Path, change: Callable[[bytes], bytes], words: str) -> None:
    path = saved / TENSORS
    path.write_bytes(change(path.read_bytes()))
    quickly_refused(saved, words)


def test_a_sparse_file_of_ten_gigabytes(saved: Path) -> None:
    os.truncate(saved / TENSORS, 10 * 2**30)
    quickly_refused(saved, "bytes where")


def rewritten(folder: Path, **changes: Any) -> None:
    """Another manifest, with a sum that fits."""
    data = json.loads((folder / MANIFEST).read_text()) | changes
    del data["sum"]
    (folder / MANIFEST).write_text(json.dumps(data | {"sum": checksum(data)}))


def test_a_manifest_of_absurdly_many_layers(saved: Path) -> None:
    target = json.loads((saved / MANIFEST).read_text())["target"]
    target["spec"]["layers"] = 2_000
    rewritten(saved, target=target, key_layers=[[0]] * 2_000, value_layers=[[0]] * 2_000)
    quickly_refused(saved, r"target\.spec")


def test_values_that_are_not_finite_are_refused_with_their_number(saved: Path) -> None:
    tensors = load_file(saved / TENSORS)
    tensors["key.0.bias"][:3] = float("nan")
    tensors["key.0.bias"][3] = float("inf")
    blob = save_tensors(tensors)
    (saved / TENSORS).write_bytes(blob)
    rewritten(saved, tensors_sha256=hashlib.sha256(blob).hexdigest())
    with pytest.raises(ArtefactError, match=r"key\.0\.bias has 4 values that are not finite"):
        artefact.load(saved)


def test_a_folder_and_a_link_in_place_of_either_file(saved: Path) -> None:
    for name in (TENSORS, MANIFEST):
        original = (saved / name).read_bytes()
        for make in (Path.mkdir, lambda path: path.symlink_to("/etc/passwd"), os.mkfifo):
            (saved / name).unlink()
            make(saved / name)
            quickly_refused(saved, "not a plain file")
            (saved / name).rmdir() if name and (saved / name).is_dir() else (saved / name).unlink()
            (saved / name).write_bytes(original)
    artefact.load(saved)
