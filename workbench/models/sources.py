"""Where a reference leads, checked before any library reads the files.

Files may come from strangers. So a folder is refused when it has no safetensors weights, when its shard index points out
of the folder, when a weight file is no plain file, when another file is too large to be what it is called, or when the
model would need code of its own; a GGUF file is walked over first (`gguf_check.py`). A hub id is asked for once, with a
short time limit: the library itself tries for half a minute, and "misspelt", "gated" and "offline" are three different
sentences.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.errors import InputError, ModelUnavailableError, UnsupportedModelError
from workbench.kv.spec import MOST_LAYERS
from workbench.models import adapter
from workbench.models.gguf_check import check_gguf

Progress = Callable[[float, str], None]
EMBEDDED = {
    "embedded:large": "SmolLM2-135M-Instruct (30 layers)",
    "embedded:small": "SmolLM2 sibling ({layers} layers)",
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
HUB_SECONDS = 5
JSON_LIMIT = 50_000_000
HEADER_LIMIT = 100_000_000
# What libraries read whole beside the weights.
SIDE_FILES = ("*.json", "*.jinja", "tokenizer*", "vocab*", "merges*", "additional_chat_templates/*")


@dataclass(frozen=True)
class Source:
    """Files that can be loaded: where, their name, exactly which, and how to ask transformers for them.

    `adapter` is the folder of a PEFT adapter to be merged into them, "" for none.
    """

    path: str
    name: str
    revision: str
    arguments: dict[str, Any] = field(default_factory=dict)
    adapter: str = ""


def locate(
    ref: str, progress: Progress | None = None, *, config_only: bool = False, fetch: bool = True
) -> Source:
    """Find and check the files of a reference.

    Args:
        ref: "embedded:…", a folder, a GGUF file or a hub id with an optional "@revision"; "BASE+ADAPTER" puts a PEFT
            adapter over it (see `adapter.py`).
        progress: for the embedded family, which may be fetched and built here.
        config_only: the config will do; weights are not hashed, and not built.
        fetch: False looks on this machine only.

    Raises:
        InputError: no reference at all, or files that are refused.
        ModelUnavailableError: missing, misspelt, gated or offline.
    """
    ref = ref.strip()
    if ref.startswith("embedded:"):
        return _embedded(ref, progress, config_only or not fetch)
    base, over = adapter.split(ref)
    if over:
        return _adapted(base, over, progress, config_only, fetch)
    path = Path(ref).expanduser()
    try:
        there = bool(ref) and path.exists()
    except OSError:  # a name that no file can have
        there = False
    if there:
        return (
            _gguf(path, progress, config_only)
            if path.suffix.lower() == ".gguf"
            else _folder(path, config_only)
        )
    if (
        not ref
        or ref.startswith((".", "/", "~"))
        or path.suffix.lower() == ".gguf"
        or not HUB_ID.fullmatch(ref)
    ):
        raise ModelUnavailableError(
            f"There is no folder, GGUF file or model called {path.name[:100]!r}.",
            "Give a folder, a GGUF file, or a hub id like owner/name.",
        )
    name, _, revision = ref.partition("@")
    return _hub(name, revision or None, fetch)


def is_local(ref: str) -> bool:
    """Whether a reference needs no model hub."""
    try:
        base, over = adapter.split(ref)
        if over:
            return is_local(base) and Path(over).expanduser().exists()
        return ref.startswith(("embedded:", ".", "/", "~")) or Path(ref).exists()
    except (
        OSError,
        ValueError,
        InputError,
    ):  # too long for a path, no path at all, or an adapter without a base
        return False


def _adapted(base: str, over: str, progress: Progress | None, config_only: bool, fetch: bool) -> Source:
    """A base with an adapter: the base's files, and a revision over both."""
    below = locate(base, progress, config_only=config_only, fetch=fetch)
    folder = Path(over).expanduser()
    if not (folder / adapter.CONFIG).is_file():
        if folder.exists() or over.startswith((".", "/", "~")) or not HUB_ID.fullmatch(over):
            raise ModelUnavailableError(
                f"{folder.name[:100]!r} is no folder with an adapter ({adapter.CONFIG})."
            )
        folder = _hub_adapter(over, fetch)
    revision = f"sha256:{hashlib.sha256(f'{below.revision} {adapter.check(folder)}'.encode()).hexdigest()}"
    name = f"{below.name} + {Path(over.partition('@')[0]).name}"
    return replace(below, name=name, revision="config only" if config_only else revision, adapter=str(folder))


def _embedded(ref: str, progress: Progress | None, present_only: bool) -> Source:
    if ref not in EMBEDDED:
        raise InputError(f"There is no embedded model {ref!r}.", "Use embedded:small or embedded:large.")
    from workbench.models import embedded

    which: Any = ref.partition(":")[2]
    if present_only and not embedded.is_present(which):
        raise ModelUnavailableError(
            f"The embedded {which} model is not on this machine yet.",
            "Get it with `python -m workbench doctor --fetch`.",
        )
    path = embedded.ensure(which, progress)
    layers = json.loads((path / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    name = EMBEDDED[ref].format(layers=layers)
    return Source(str(path), name, embedded.identity(which), {"local_files_only": True})


def _folder(path: Path, config_only: bool) -> Source:
    if not path.is_dir():
        raise InputError(f"{path.name!r} is neither a folder nor a GGUF file.")
    config = read_json(path / "config.json")
    check_config(config, path.name)
    check_side_files(path)
    revision = "config only"
    if not config_only:
        weights = check_weights(path)
        parts = [path / "config.json", *weights]
        sums = [f"{part.name} {sha256_of_file(part)}" for part in parts]
        revision = "sha256:" + hashlib.sha256("\n".join(sums).encode()).hexdigest()
    return Source(str(path), path.resolve().name, revision, {"local_files_only": True})


def _gguf(path: Path, progress: Progress | None, config_only: bool) -> Source:
    from workbench.models import converted

    plain_file(path)
    sha256 = sha256_of_file(path) if not config_only or converted.any_of(path) else ""
    if not (
        sha256 and converted.is_present(path, sha256)
    ):  # else the same bytes were checked when it was built
        check_gguf(path)
        if config_only:
            arguments = {"gguf_file": path.name, "local_files_only": True}
            return Source(str(path.parent), path.stem, "config only", arguments)
    folder = converted.ensure(path, sha256, progress)
    revision = "config only" if config_only else f"sha256:{sha256}"
    return Source(str(folder), path.stem, revision, {"local_files_only": True})


def check_config(config: Any, name: str) -> None:
    """Refuse a model that transformers does not know itself, whose code would have to be run, or of absurdly many layers.

    `auto_map` on a known type is ignored by transformers, so it does no harm. Layers are counted before any library
    makes a list of them.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        why = (
            "brings code of its own, which is never run"
            if isinstance(config, dict) and "auto_map" in config
            else (f"is of the type {str(kind)[:60]!r}, which is not known here")
        )
        raise UnsupportedModelError(f"{name} {why}.", "Choose a model that transformers supports itself.")
    most = max(_layers_in(config), default=0)
    if most > MOST_LAYERS:
        raise UnsupportedModelError(
            f"The config of {name} says {most:,} layers, and {MOST_LAYERS:,} are the most here."
        )


def _layers_in(config: dict[str, Any]) -> Iterator[int]:
    """Every number of layers in a config, those of its parts too."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _layers_in(value)
        elif "layers" in key and isinstance(value, int):
            yield value


def check_side_files(folder: Path) -> None:
    """Refuse a folder in which a tokenizer, template or config is too large to be one: libraries would read it whole.

    Raises:
        InputError: naming the file.
    """
    for pattern in SIDE_FILES:
        for file in folder.glob(pattern):
            if file.is_file() and file.stat().st_size > JSON_LIMIT:
                raise InputError(f"{file.name} in {folder.name!r} is larger than {JSON_LIMIT:,} bytes.")


def check_weights(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted by name.

    Raises:
        InputError: there are none, a file is no plain file or is cut, or the shard index points elsewhere.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise InputError(f"The shard index of {folder.name!r} has no weight_map.")
        names = {name for name in shards.values() if isinstance(name, str)}
        bad = next(
            (n for n in shards.values() if not isinstance(n, str) or not re.fullmatch(r"[\w][\w.-]*", n)),
            None,
        )
        if bad is not None:
            raise InputError(
                f"The shard index of {folder.name!r} points to {str(bad)[:80]!r}, which is no plain name."
            )
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        why = "only pickled weights, which are never read" if others else "no weights (*.safetensors)"
        raise InputError(f"The folder {folder.name!r} has {why}.", "Give a folder with safetensors files.")
    for file in files:
        check_safetensors(file)
    return files


def check_safetensors(path: Path) -> None:
    """Refuse a file whose first bytes cannot be those of a safetensors file, by what it is instead."""
    plain_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        if head.startswith(b"version https://git-lfs"):
            raise InputError(
                f"{path.name} is a Git LFS pointer, not the weights.", "Fetch it with `git lfs pull`."
            )
        length = int.from_bytes(head[:8], "little")
        if size < 10 or length < 2 or length > min(size - 8, HEADER_LIMIT) or head[8:9] != b"{":
            raise InputError(f"{path.name} is cut off, or is no safetensors file.")
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
            good = not ends or 8 + length + max(ends) == size
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            good = False
    if not good:
        raise InputError(f"{path.name} is cut off, or is no safetensors file.")


def plain_file(path: Path) -> None:
    """Refuse pipes, devices, folders and dangling links; the hub's cache is links to plain files."""
    try:
        good = stat.S_ISREG(path.stat().st_mode)
    except OSError:
        good = False
    if not good:
        raise InputError(f"{path.name[:100]!r} is missing, or no plain file.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small plain file.

    Raises:
        InputError: it is missing, too large, or no object.
    """
    plain_file(path)
    if path.stat().st_size > JSON_LIMIT:
        raise InputError(f"{path.name} is larger than {JSON_LIMIT:,} bytes.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InputError(f"{path.name} in {path.parent.name!r} is no JSON object.")
    return data


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256; read again only when the file has changed."""
    info = path.stat()
    return _sha256(path.resolve(), info.st_size, info.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- hub ---


def _hub(name: str, revision: str | None, fetch: bool) -> Source:
    """A model on the hub, pinned to a commit; from the local cache when the hub cannot be reached."""
    commit = _commit_of(name, revision, fetch)
    offline = commit is None
    commit = commit or _cached_commit(name, revision)
    if commit is None:
        raise _absent(name, fetch)
    return Source(name, name, commit, {"revision": commit, "local_files_only": offline})


def _commit_of(name: str, revision: str | None, fetch: bool, file: str = "config.json") -> str | None:
    return (
        _commit(name, revision, file)
        if fetch and os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0")
        else None
    )


def _hub_adapter(ref: str, fetch: bool) -> Path:
    """The folder of an adapter on the hub, pinned to a commit; only its two files are fetched."""
    from huggingface_hub import snapshot_download

    name, _, revision = ref.partition("@")
    commit = _commit_of(name, revision or None, fetch, adapter.CONFIG)
    offline = commit is None
    commit = commit or _cached_commit(name, revision or None, adapter.CONFIG)
    if commit is None:
        raise _absent(name, fetch)
    try:
        folder = snapshot_download(
            name,
            revision=commit,
            allow_patterns=[adapter.CONFIG, adapter.WEIGHTS],
            local_files_only=offline or not fetch,
        )
    except Exception as error:
        raise _absent(name, fetch) from error
    return Path(folder)


def _absent(name: str, fetch: bool) -> ModelUnavailableError:
    """The sentence for what is not here when the hub was not asked, or did not answer."""
    if not fetch:
        return ModelUnavailableError(f"{name} is not on this machine.")
    return ModelUnavailableError(
        f"{name} is not on this machine, and the model hub cannot be reached.",
        "Connect once, or give a folder with its files.",
    )


def _commit(name: str, revision: str | None, file: str = "config.json") -> str | None:
    """The commit that a model's files have on the hub now; None when the hub cannot be reached.

    Raises:
        ModelUnavailableError: misspelt, gated, or a revision that is not there.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        meta = get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=HUB_SECONDS)
    except GatedRepoError as error:
        raise ModelUnavailableError(
            f"{name} is gated.", "Accept its terms on its page and log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailableError(
            f"There is no model called {name} on the hub, or it is private.", "Check the spelling."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelUnavailableError(f"{name} has no revision {revision!r}.", "Check the spelling.") from error
    except EntryNotFoundError as error:
        raise ModelUnavailableError(f"{name} is no model that can be loaded: it has no {file}.") from error
    except Exception:  # every kind of network trouble; what is in the local cache may still do
        return None
    return meta.commit_hash


def _cached_commit(name: str, revision: str | None, file: str = "config.json") -> str | None:
    """The commit of a model in the local hub cache, None when it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file, revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None
