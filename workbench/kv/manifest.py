"""What a mapper is: the manifest beside its matrices, and the identity of the two models that it belongs to.

Manifests come from strangers: every field is checked for its name, type and range, and all together have a checksum.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from workbench.errors import ArtefactError, UnsupportedModelError
from workbench.kv.mapper import FEATURES
from workbench.kv.spec import KVSpec

FORMAT = 3  # 1 had full matrices only, 2 no familiar ids; such manifests are still read
NATIVE_FORMAT = 4  # with native layers: a reader that knew nothing of them would map more than was meant
READABLE = (1, 2, FORMAT, NATIVE_FORMAT)


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
    chosen, `polish` how many steps of gradient descent followed the closed form. `familiar` are the token ids for which
    mapping suffices, `native_layers` the number of lowest layers that are not mapped (see `KVMapper`).
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
    familiar: tuple[int, ...] = ()
    native_layers: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = asdict(self)
        data = {name: value for name, value in data.items() if name not in _later(self.format)}
        for side in ("source", "target"):
            data[side]["spec"] = getattr(self, side).spec.to_json()
        return data if self.format == 1 else data | {"sum": checksum(data)}

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
        names = set(cls.__dataclass_fields__) - set(_later(data["format"]))
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
        checks |= {name: kind for name, kind in (_SINCE_2 | _SINCE_3 | _SINCE_4).items() if name in names}
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
        if "familiar" in values:
            values["familiar"] = _ids_from_json(values["familiar"], values["target"].spec.vocab_size)
        layers = values["target"].spec.layers
        if "native_layers" in values and not 1 <= values["native_layers"] <= layers:
            raise ArtefactError(f"The manifest's native_layers must be 1 to {layers}, the target's layers.")
        for name in ("key_layers", "value_layers"):
            values[name] = _layers_from_json(name, values[name], values["source"].spec, values["target"].spec)
        if data["format"] != 1 and stated != checksum(data):
            raise ArtefactError(
                "The manifest's sum does not fit its fields: it was changed after it was written.",
                "Fetch the mapper again or fit it again.",
            )
        return cls(**values)


def checksum(data: dict[str, Any]) -> str:
    """A checksum of all other fields, as JSON writes them."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


_SINCE_2: dict[str, type | tuple[type, ...]] = {
    "features": str, "ranks": (list, tuple), "hidden": int, "selection": str, "polish": int,
}  # fmt: skip
"""Fields that format 1 did not have, with their types."""
_SINCE_3: dict[str, type | tuple[type, ...]] = {"familiar": (list, tuple)}
"""Fields that formats 1 and 2 did not have, with their types."""
_SINCE_4: dict[str, type | tuple[type, ...]] = {"native_layers": int}
"""Fields that formats 1 to 3 did not have, with their types."""


def _later(version: int) -> dict[str, type | tuple[type, ...]]:
    """Fields that came after a format."""
    return {1: _SINCE_2 | _SINCE_3 | _SINCE_4, 2: _SINCE_3 | _SINCE_4, 3: _SINCE_4}.get(version, {})


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


def _ids_from_json(data: Any, vocabulary: int) -> tuple[int, ...]:
    good = all(type(i) is int and 0 <= i < vocabulary for i in data) and len(set(data)) == len(data)
    if not good:
        raise ArtefactError("The manifest's familiar ids must be different ids of the target's vocabulary.")
    return tuple(data)


def _layers_from_json(name: str, data: Any, source: KVSpec, target: KVSpec) -> tuple[tuple[int, ...], ...]:
    good = isinstance(data, list) and len(data) == target.layers
    good = good and all(isinstance(chosen, list) and 0 < len(chosen) <= source.layers for chosen in data)
    if not good or not all(type(i) is int and 0 <= i < source.layers for chosen in data for i in chosen):
        raise ArtefactError(f"The manifest's field {name!r} must list source layers for each target layer.")
    return tuple(tuple(chosen) for chosen in data)
