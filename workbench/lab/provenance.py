"""Where a measured number comes from: machine, versions, models, mapper, texts. Stored with every result.

A figure without its origin is no evidence, so no result exists without a `Provenance`. `origin` says whether
it was measured by the running program or read from a file; a file that was measured with another mapper than
the one that now lies beside it says so in `note`. Saved results are JSON files in the folder of their
mapper: `precomputed/<pair>/<direction>/{compare,heads,latency,quality}.json`. This module does not import
torch at the top.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.models.loading import LoadedModel
    from workbench.models.pair import PairHost

MEASURED = "measured here"
PRECOMPUTED = "precomputed"
PRECOMPUTED_FOLDER = Path(__file__).resolve().parents[2] / "precomputed"
PACKAGES = ("torch", "transformers", "accelerate", "numpy")


@dataclass(frozen=True)
class Provenance:
    """The origin of a result.

    Attributes:
        measured: ISO date and time, UTC.
        where: processor, threads and dtype in words.
        versions: of Python and the libraries.
        pair: name of the pair.
        direction: "up" or "down".
        source: name of the model whose cache is read.
        target: name of the model that takes over.
        source_revision: exact weights.
        target_revision: exact weights.
        mapper: SHA-256 of the mapper's tensors, "" for one that was never saved.
        tokens: measured in all.
        texts: name and SHA-256 of each text.
        origin: "measured here" or "precomputed".
        note: what a reader should know besides, or "".
    """

    measured: str
    where: str
    versions: dict[str, str]
    pair: str
    direction: str
    source: str
    target: str
    source_revision: str
    target_revision: str
    mapper: str
    tokens: int
    texts: tuple[dict[str, str], ...] = ()
    origin: str = MEASURED
    note: str = ""

    def measured_on(self) -> str:
        """How many tokens, of how many texts; the items of tasks stand among the texts as one entry, and are none."""
        texts = sum(text.get("name") != "tasks" for text in self.texts)
        return f"{int(self.tokens):,} tokens" + (
            f" of {texts} text{'s' if texts != 1 else ''}" if texts else ""
        )

    def sentence(self) -> str:
        """For the line under a figure."""
        when = self.measured[:16].replace("T", " ")
        origin = "Measured here" if self.origin == MEASURED else "Precomputed"
        return f"{origin} on {when} UTC, {self.where}.{f' {self.note}' if self.note else ''}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "texts": [dict(text) for text in self.texts]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Provenance:
        """The inverse of `to_json`; unknown keys are ignored."""
        known = {entry.name: data[entry.name] for entry in fields(cls) if entry.name in data}
        known["texts"] = tuple(dict(text) for text in data.get("texts", ()))
        return cls(**known)


@dataclass(frozen=True)
class Environment:
    """The machine that measures.

    Attributes:
        processor: name of the CPU, and of the accelerator in use if there is one.
        threads: that torch computes with.
        dtype: of the models.
        system: operating system and architecture.
        versions: of Python and the libraries.
        date: ISO date and time, UTC.
    """

    processor: str
    threads: int
    dtype: str
    system: str
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    def sentence(self) -> str:
        """Processor, threads and dtype in words."""
        return f"{self.processor}, {self.threads} thread{'s' if self.threads != 1 else ''}, {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def environment(dtype: str, device: str = "cpu") -> Environment:
    """The machine as it is now.

    Args:
        dtype: of the models, "float32" for example.
        device: where the target's first layer lives; a CUDA device is named.
    """
    import torch

    processor = cpu_name()
    if device.startswith("cuda"):
        processor = f"{torch.cuda.get_device_name(device)} with {processor}"
    elif device != "cpu":
        processor = f"{device} of {processor}"
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
    system = f"{platform.system()} {platform.machine()}"
    return Environment(processor, torch.get_num_threads(), dtype, system, versions, now())


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass  # no Linux: platform knows a name there
    return platform.processor() or platform.machine() or "unknown processor"


def now() -> str:
    """ISO date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def text_hash(text: str | Sequence[int]) -> str:
    """SHA-256 of a text, or of token ids as written in decimal with commas between."""
    raw = text if isinstance(text, str) else ",".join(map(str, text))
    return hashlib.sha256(raw.encode("utf-8", "surrogatepass")).hexdigest()


def trace(
    host: PairHost, direction: str, tokens: int, texts: Iterable[tuple[str, str | Sequence[int]]]
) -> Provenance:
    """The provenance of what is measured now with a host's models and mapper.

    Args:
        host: holds both models and the mapper of `direction`, loads what is missing.
        direction: "up" or "down".
        tokens: measured in all.
        texts: (name, text or token ids) of each text.
    """
    source, target = models_of(host, direction)
    _, manifest = host.mapper(direction)
    here = environment(dtype_name(target.dtype), str(target.device))
    return Provenance(
        measured=here.date,
        where=here.sentence(),
        versions=here.versions,
        pair=host.pair.name,
        direction=direction,
        source=source.name,
        target=target.name,
        source_revision=source.identity.revision,
        target_revision=target.identity.revision,
        mapper=manifest.tensors_sha256 if manifest is not None else "",
        tokens=tokens,
        texts=tuple({"name": name, "sha256": text_hash(text)} for name, text in texts),
    )


def models_of(host: PairHost, direction: str) -> tuple[LoadedModel, LoadedModel]:
    """(source, target) of a direction, loaded now if they are not yet.

    Raises:
        InputError: no such direction.
    """
    from workbench.models.catalog import source_side, target_side

    return host.model(source_side(direction)), host.model(target_side(direction))


def dtype_name(dtype: Any) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def save_result(result: Any, path: Path) -> Path:
    """Write a result as JSON, whole or not at all.

    Args:
        result: a dataclass with `to_json`.
        path: the file; its folder is made.

    Raises:
        InputError: when the file cannot be written.
    """
    text = json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return write_text(text + "\n", path)


def write_text(text: str, path: Path) -> Path:
    """Write a text file, whole or not at all.

    Raises:
        InputError: when the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(
            f"Cannot write {path.name}: {error.strerror or error}.", "Give another file or folder."
        ) from None
    return path


def load_result(path: Path, kind: str) -> Any:
    """Read a result that `save_result` wrote.

    Args:
        path: the file.
        kind: "compare", "heads", "latency" or "quality".

    Raises:
        InputError: when the file is missing, damaged or of another kind.
    """
    from workbench.lab.results import KINDS, as_precomputed

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        result = KINDS[kind].from_json(data)
    except FileNotFoundError:
        raise InputError(f"There is no saved result {path.name}.", "Measure it first.") from None
    except OSError as error:
        raise InputError(f"Cannot read {path.name}: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path.name} holds no {kind} result ({type(error).__name__}).", "Measure it again."
        ) from None
    return as_precomputed(result, _mismatch(path.parent, result.provenance))


def load_precomputed(pair: str, direction: str, kind: str, folder: Path | None = None) -> Any | None:
    """A saved result of a pair, or None when there is none.

    Args:
        pair: name in the catalog.
        direction: "up" or "down".
        kind: "compare", "heads", "latency" or "quality".
        folder: of the mapper, where it is not the one that comes with the project.

    Raises:
        InputError: when the file is there but damaged.
    """
    path = (folder or PRECOMPUTED_FOLDER / pair / direction) / f"{kind}.json"
    return load_result(path, kind) if path.is_file() else None


def _mismatch(folder: Path, provenance: Provenance) -> str:
    """A sentence when the mapper in the folder is not the one that was measured, else ""."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        same = manifest["tensors_sha256"] == provenance.mapper
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # no mapper here to compare with
    return "" if same else "It was measured with another mapper than the one that is here now."
