"""Mappers on disk: `mapper.safetensors` with the matrices, `manifest.json` with everything that says what they are.

A mapper is right for exactly one source, one target, one tokenizer and one direction. So the manifest is compared with
what is loaded, field by field, and a mismatch is refused by name, also when all shapes agree. Files come from strangers:
names, shapes and sizes are checked against the manifest before anything is allocated, sums before anything is used.

The sum of the tensors is what results, marks and approvals know a mapper by. Native layers change what a mapper does and
none of its tensors, so their number stands in the tensors' file as well, and thereby in the sum.

Saving never leaves a half: both files are written and synced in a temporary folder beside the target, which then takes
the target's name. If a kill falls between the two renames, the next `load` or `save` puts the old folder back.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from workbench.errors import ArtefactError
from workbench.kv.manifest import FORMAT, NATIVE_FORMAT, Manifest, ModelIdentity
from workbench.kv.mapper import KVMapper, expected_shapes

TENSORS, MANIFEST = "mapper.safetensors", "manifest.json"
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
NATIVE, FAMILIAR = "native_layers", "familiar"  # in the header of the tensors, so that their sum is another
MANIFEST_LIMIT, HEADER_LIMIT = 4_000_000, 16_000_000


def save(folder: Path, mapper: KVMapper, manifest: Manifest, dtype: torch.dtype = torch.float16) -> Manifest:
    """Write an artefact; whatever `folder` held before stays whole until the new one is.

    Args:
        folder: where; its parent is created when missing.
        mapper: the matrices.
        manifest: its `tensors_sha256` is filled in here.
        dtype: of the stored matrices; float32 is taken instead where they would overflow.

    Returns:
        The manifest as it was written.

    Raises:
        ArtefactError: when the folder cannot be written.
    """
    tensors = {
        _stored(name): mapper.tensor(name).detach().to("cpu", torch.float32, copy=True).contiguous()
        for name in mapper.shapes()
    }
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ArtefactError(
                f"The tensor {name} has {int((~torch.isfinite(tensor)).sum())} values that are not finite."
            )
    largest = max(float(tensor.abs().max()) for tensor in tensors.values())
    if largest < torch.finfo(dtype).max / 2:
        # Biases stay float32: with large key biases half precision would move every key by the same visible amount.
        tensors = {name: tensor.to(dtype) if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    native = mapper.native_layers
    told = {NATIVE: str(native)} if native else {}
    if mapper.familiar:
        told[FAMILIAR] = _sum_of_ids(mapper.familiar)
    blob = save_tensors(tensors, told or None)
    manifest = replace(
        manifest,
        tensors_sha256=hashlib.sha256(blob).hexdigest(),
        features=mapper.features,
        ranks=tuple(matrix.shape[1] for matrix in mapper.reduce),
        hidden=mapper.hidden,
        familiar=mapper.familiar,
        native_layers=native,
        format=NATIVE_FORMAT if native else min(manifest.format, FORMAT),
    )
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _restore(folder)
            try:
                temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
                temporary.chmod(0o755)
                _write_synced(temporary / TENSORS, blob)
                _write_synced(temporary / MANIFEST, json.dumps(manifest.to_json(), indent=1).encode())
                if folder.exists():
                    os.rename(folder, _old(folder))
                os.rename(temporary, folder)
                _sync_folder(folder.parent)
            finally:
                _restore(folder)  # sweeps as well; a full disk must not stay full of halves
    except OSError as error:
        raise ArtefactError(
            f"The mapper cannot be saved in {folder.name!r}: {error.strerror}.",
            "Choose another folder or make room.",
        ) from error
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, without touching the tensors.

    Raises:
        ArtefactError: when it is missing, too large, no JSON, or has a wrong field.
    """
    folder = Path(folder)
    with _reading(folder):
        return _manifest_of(folder)


def _manifest_of(folder: Path) -> Manifest:
    path = folder / MANIFEST
    _check_plain_file(path)
    if path.stat().st_size > MANIFEST_LIMIT:
        raise ArtefactError(f"The {MANIFEST} of {folder.name!r} is larger than {MANIFEST_LIMIT} bytes.")
    try:
        data = json.loads(path.read_text("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a number of absurd length
        raise ArtefactError(f"The {MANIFEST} of {folder.name!r} is not readable JSON.") from error
    return Manifest.from_json(data)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")  # Python's reader would take NaN and Infinity


def load(
    folder: Path,
    source: ModelIdentity | None = None,
    target: ModelIdentity | None = None,
    direction: str | None = None,
) -> tuple[KVMapper, Manifest]:
    """Read and verify an artefact.

    Args:
        folder: holds the two files.
        source: the model whose cache will be read; compared when given.
        target: the model whose cache will be written; compared when given.
        direction: "up" or "down"; compared when given.

    Returns:
        The mapper, in the dtype it is stored in, on the CPU, and its manifest.

    Raises:
        ArtefactError: naming the field that does not fit, or what is damaged.
    """
    folder = Path(folder)
    with _reading(folder):
        manifest = _manifest_of(folder)
        verify(manifest, source, target, direction)
        path = folder / TENSORS
        _check_plain_file(path)
        names = _expected_shapes(manifest)
        _check_header(path, {_stored(name): shape for name, shape in names.items()}, manifest)
        blob = path.read_bytes()
    if hashlib.sha256(blob).hexdigest() != manifest.tensors_sha256:
        raise ArtefactError(
            f"The field tensors_sha256 of {folder.name!r} does not fit {TENSORS}: the file was changed or belongs to "
            "another manifest.",
            "Fit the mapper again or fetch it again.",
        )
    try:
        tensors = load_tensors(blob)
    except SafetensorError as error:  # offsets that overlap or lie outside, say
        raise ArtefactError(f"{TENSORS} of {folder.name!r} is no valid safetensors file.") from error
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ArtefactError(
                f"The tensor {name} has {int((~torch.isfinite(tensor)).sum())} values that are not finite."
            )

    def column(field: str) -> tuple[Tensor, ...]:
        return tuple(tensors[_stored(name)] for name in names if name.startswith(f"{field}["))

    mapper = KVMapper(
        manifest.source.spec, manifest.target.spec, manifest.key_layers, manifest.value_layers,
        column("key_weight"), column("key_bias"), column("value_weight"), column("value_bias"),
        manifest.anchors, manifest.hold_back, manifest.features, column("reduce"), column("mlp"),
        manifest.familiar, manifest.native_layers,
    )  # fmt: skip
    return mapper, manifest


def save_with_native_layers(folder: Path, out: Path, layers: int) -> Manifest:
    """Save a mapper again so that the lowest layers run natively; with 0 layers all are mapped again.

    Args:
        folder: of the mapper.
        out: where; may be the same.
        layers: how many.

    Returns:
        The manifest as it was written; the mapper has another sum now.

    Raises:
        ArtefactError: the mapper cannot be read or written, or its target does not have so many layers.
    """
    mapper, manifest = load(folder)
    if not 0 <= layers <= mapper.target.layers:
        raise ArtefactError(f"The target has {mapper.target.layers} layers, so {layers} cannot run natively.")
    return save(out, replace(mapper, native_layers=layers), manifest, mapper.key_weight[0].dtype)


def verify(
    manifest: Manifest, source: ModelIdentity | None, target: ModelIdentity | None, direction: str | None
) -> None:
    """Compare a manifest with what is loaded.

    Raises:
        ArtefactError: naming the first field that differs, and both values.
    """
    if direction and manifest.direction != direction:
        raise ArtefactError(
            f"This mapper's direction is {manifest.direction!r}, but {direction!r} is needed."
        )
    for side, expected in (("source", source), ("target", target)):
        if expected is None:
            continue
        stored: ModelIdentity = getattr(manifest, side)
        if stored.spec.family != expected.spec.family:
            _refuse(f"{side}.spec.family", stored.spec.family, expected.spec.family)
        for name, value in expected.spec.to_json().items():
            if stored.spec.to_json()[name] != value:
                _refuse(f"{side}.spec.{name}", stored.spec.to_json()[name], value)
        for name in ("tokenizer", "revision"):
            if getattr(stored, name) != getattr(expected, name):
                _refuse(f"{side}.{name}", f"{getattr(stored, name)} ({stored.name})",
                        f"{getattr(expected, name)} ({expected.name})")  # fmt: skip


def _refuse(name: str, stored: object, loaded: object) -> None:
    raise ArtefactError(
        f"The mapper does not belong to these models: its {name} is {_short(stored)}, the loaded model's is "
        f"{_short(loaded)}.",
        "Use the models it was fitted on, or fit a mapper for these.",
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "…"


def _expected_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    try:
        return expected_shapes(
            manifest.source.spec, manifest.target.spec, manifest.key_layers, manifest.value_layers,
            manifest.features, manifest.ranks, manifest.hidden,
        )  # fmt: skip
    except ValueError as error:
        raise ArtefactError(f"The manifest contradicts itself: {error}.") from error


def _stored(name: str) -> str:
    """The name of a mapper's tensor in the file: `key_weight[3]` -> `key.3.weight`, `mlp[0]` -> `mlp.0`."""
    field, _, index = name.rstrip("]").partition("[")
    kind, _, part = field.partition("_")
    return f"{kind}.{index}.{part}" if part else f"{kind}.{index}"


def _check_plain_file(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise ArtefactError(f"There is no {path.name} in {path.parent.name!r}.") from error
    if not stat.S_ISREG(mode):
        raise ArtefactError(f"{path.name} in {path.parent.name!r} is not a plain file.")


def _sum_of_ids(ids: tuple[int, ...]) -> str:
    return hashlib.sha256(str(ids).encode()).hexdigest()


def _check_header(path: Path, shapes: dict[str, tuple[int, ...]], manifest: Manifest) -> None:
    """Compare names, dtypes, shapes, what runs natively and the file's size with the manifest before anything is allocated.

    Raises:
        ArtefactError: naming what differs.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        if header_length > min(size - 8, HEADER_LIMIT) or header_length < 2:
            raise ArtefactError(f"{path.name} is cut off, or is no safetensors file.")
        if header_length > 4_096 + 512 * len(shapes):  # three times what names, shapes and offsets take
            raise ArtefactError(
                f"{path.name} has a header of {header_length:,} bytes, far more than {len(shapes)} tensors need."
            )
        try:
            header = json.loads(file.read(header_length))
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a number of absurd length
            raise ArtefactError(f"{path.name} is no safetensors file: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise ArtefactError(f"{path.name} is no safetensors file: its header is not an object.")
    told = header.pop("__metadata__", None) or {}
    if not isinstance(told, dict) or told.get(NATIVE, "0") != str(manifest.native_layers):
        raise ArtefactError(
            f"{path.name} was not saved with {manifest.native_layers} native layers, as the manifest says."
        )
    if FAMILIAR in told and told[FAMILIAR] != _sum_of_ids(manifest.familiar):  # older files do not tell
        raise ArtefactError(f"{path.name} was saved with other familiar ids than the manifest's.")
    for name in sorted(set(header) ^ set(shapes)):
        raise ArtefactError(
            f"{path.name} has {'no' if name in shapes else 'an unknown'} tensor {name[:80]!r}."
        )
    total = 0
    for name, shape in shapes.items():
        entry = header[name]
        if (
            not isinstance(entry, dict)
            or str(entry.get("dtype")) not in DTYPES
            or entry.get("shape") != list(shape)
        ):
            raise ArtefactError(f"The tensor {name} of {path.name} does not have shape {shape}.")
        total += math.prod(shape) * DTYPES[str(entry["dtype"])]
    if size != 8 + header_length + total:
        raise ArtefactError(f"{path.name} has {size} bytes where {8 + header_length + total} are expected.")


def _write_synced(path: Path, blob: bytes) -> None:
    with path.open("wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _old(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.old"


def _restore(folder: Path) -> None:
    """After a kill between the two renames of `save` the old folder is all there is: give it its name back."""
    if _old(folder).exists() and not folder.exists():
        os.rename(_old(folder), folder)
    _sweep(folder)


def _sweep(folder: Path) -> None:
    """Remove what a killed save left behind; only called under the lock."""
    shutil.rmtree(_old(folder), ignore_errors=True)
    for leftover in folder.parent.glob(f".{folder.name}.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Both files belong to one save: nobody writes meanwhile, and what a kill left behind is put right first."""
    if not folder.exists() and _old(folder).exists():
        with _locked(folder):
            _restore(folder)
    if not folder.parent.is_dir():
        yield  # what is missing will be said
        return
    with _locked(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(folder: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """One writer at a time; the lock is on the parent folder and goes with the process, so a kill leaves nothing."""
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)
