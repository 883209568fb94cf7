"""Mappers on disk: `mapper.safetensors` with the matrices, `manifest.json` with everything that says what they are.

A mapper is right for exactly one source, one target, one tokenizer and one direction. So the manifest is compared with
what is loaded, field by field, and a mismatch is refused by name, also when all shapes agree. Files come from strangers:
names, shapes and sizes are checked against the manifest before anything is allocated, sums before anything is used.

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
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from workbench.errors import ArtefactError, UnsupportedModelError
from workbench.kv.mapper import FEATURES, KVMapper, expected_shapes
from workbench.kv.spec import KVSpec

FORMAT = 2  # 1 had full matrices only; such manifests are still read
READABLE = (1, FORMAT)
TENSORS, MANIFEST = "mapper.safetensors", "manifest.json"
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
MANIFEST_LIMIT, HEADER_LIMIT = 4_000_000, 16_000_000


@dataclass(frozen=True)
class ModelIdentity:
    """What exactly a model is: `revision` is a hub commit or a hash of its files, `tokenizer` a hash of its ids."""

    name: str
    revision: str
    spec: KVSpec
    tokenizer: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a mapper but its numbers. `held_out` figures come from tokens that played no part in the fit.

    `features`, `ranks` and `hidden` are the mapper's form (see `KVMapper`); `selection` says how source layers were
    chosen, `polish` how many steps of gradient descent followed the closed form.
    """

    direction: str
    source: ModelIdentity
    target: ModelIdentity
    objective: str
    top_k: int | str
    ridge: float | str
    anchors: int
    hold_back: int
    key_layers: tuple[tuple[int, ...], ...]
    value_layers: tuple[tuple[int, ...], ...]
    calibration: dict[str, Any]
    held_out: dict[str, Any]
    versions: dict[str, str]
    tensors_sha256: str = ""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    format: int = FORMAT
    features: str = "own"
    ranks: tuple[int, ...] = ()
    hidden: int = 0
    selection: str = "ranked"
    polish: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = asdict(self)
        if self.format == 1:
            data = {name: value for name, value in data.items() if name not in _SINCE_2}
        for side in ("source", "target"):
            data[side]["spec"] = getattr(self, side).spec.to_json()
        return data if self.format == 1 else data | {"sum": _sum(data)}

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """The inverse of `to_json`.

        Raises:
            ArtefactError: naming the first field that is missing, unknown or of the wrong type.
        """
        if not isinstance(data, dict):
            raise ArtefactError("The manifest is not a JSON object.")
        data = dict(data)
        stated = data.pop("sum", None)
        if data.get("format") not in READABLE or isinstance(data["format"], bool):
            raise ArtefactError(
                f"The manifest's format is {data.get('format')!r}, this program reads "
                f"{' and '.join(map(str, READABLE))}.",
                "Update the program or fit the mapper again.",
            )
        names = set(cls.__dataclass_fields__) - (set(_SINCE_2) if data["format"] == 1 else set())
        for name in sorted(names ^ set(data)):
            raise ArtefactError(
                f"The manifest has {'no' if name in names else 'an unknown'} field {str(name)[:80]!r}."
            )
        values = dict(data)
        checks: dict[str, type | tuple[type, ...]] = {
            "direction": str, "objective": str, "top_k": (int, str), "ridge": (int, float, str), "anchors": int,
            "hold_back": int, "calibration": dict, "held_out": dict, "versions": dict, "tensors_sha256": str,
            "created": str,
        }  # fmt: skip
        if data["format"] != 1:
            checks |= _SINCE_2
        for name, kind in checks.items():
            if not isinstance(values[name], kind) or isinstance(values[name], bool):
                raise ArtefactError(f"The manifest's field {name!r} has the wrong type.")
        if not 0 <= values["anchors"] <= 1_000_000 or not 1 <= values["hold_back"] <= 1_000_000:
            raise ArtefactError("The manifest's anchors must be 0 or more and hold_back 1 or more.")
        for side in ("source", "target"):
            values[side] = _identity_from_json(side, values[side])
        if "ranks" in values:
            values["ranks"] = tuple(values["ranks"])
            sizes = (*values["ranks"], values["hidden"], values["polish"])
            if not all(type(size) is int and 0 <= size < 2**31 for size in sizes) or 0 in values["ranks"]:
                raise ArtefactError(
                    "The manifest's ranks, hidden and polish must be whole numbers, ranks above 0."
                )
            if values["features"] not in FEATURES:
                raise ArtefactError(f"The manifest's features must be one of: {', '.join(FEATURES)}.")
        for name in ("key_layers", "value_layers"):
            values[name] = _layers_from_json(name, values[name], values["source"].spec, values["target"].spec)
        if data["format"] != 1 and stated != _sum(data):
            raise ArtefactError(
                "The manifest's sum does not fit its fields: it was changed after it was written.",
                "Fetch the mapper again or fit it again.",
            )
        return cls(**values)


def _sum(data: dict[str, Any]) -> str:
    """A checksum of all other fields, as they are after a way through JSON."""
    plain = json.loads(json.dumps(data))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


_SINCE_2: dict[str, type | tuple[type, ...]] = {
    "features": str, "ranks": (list, tuple), "hidden": int, "selection": str, "polish": int,
}  # fmt: skip
"""Fields that format 1 did not have, with their types."""


def _identity_from_json(side: str, data: Any) -> ModelIdentity:
    if not isinstance(data, dict) or set(data) != {"name", "revision", "spec", "tokenizer"}:
        raise ArtefactError(f"The manifest's field {side!r} must have name, revision, spec and tokenizer.")
    if not all(isinstance(data[name], str) for name in ("name", "revision", "tokenizer")):
        raise ArtefactError(f"The manifest's field {side!r} has a wrong type inside.")
    try:
        spec = KVSpec.from_json(data["spec"])
        sizes = (
            spec.layers,
            spec.kv_heads,
            spec.query_heads,
            spec.head_dim,
            spec.vocab_size,
            spec.max_positions,
        )
        if not all(type(size) is int and 0 < size < 2**31 for size in sizes):
            raise ValueError("a size is no positive whole number")
    except (TypeError, ValueError, KeyError, AttributeError, UnsupportedModelError) as error:
        raise ArtefactError(f"The manifest's field '{side}.spec' cannot be read.") from error
    return ModelIdentity(data["name"], data["revision"], spec, data["tokenizer"])


def _layers_from_json(name: str, data: Any, source: KVSpec, target: KVSpec) -> tuple[tuple[int, ...], ...]:
    good = isinstance(data, list) and len(data) == target.layers
    good = good and all(isinstance(chosen, list) and 0 < len(chosen) <= source.layers for chosen in data)
    if not good or not all(type(i) is int and 0 <= i < source.layers for chosen in data for i in chosen):
        raise ArtefactError(f"The manifest's field {name!r} must list source layers for each target layer.")
    return tuple(tuple(chosen) for chosen in data)


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
    blob = save_tensors(tensors)
    manifest = replace(
        manifest,
        tensors_sha256=hashlib.sha256(blob).hexdigest(),
        features=mapper.features,
        ranks=tuple(matrix.shape[1] for matrix in mapper.reduce),
        hidden=mapper.hidden,
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
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a number of absurd length
        raise ArtefactError(f"The {MANIFEST} of {folder.name!r} is not readable JSON.") from error
    return Manifest.from_json(data)


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
        _check_header(path, {_stored(name): shape for name, shape in names.items()})
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
    )  # fmt: skip
    return mapper, manifest


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


def _check_header(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Compare names, dtypes, shapes and the file's size with the manifest before anything is allocated.

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
    header.pop("__metadata__", None)
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
