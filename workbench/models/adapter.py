"""A PEFT adapter over a base model: `BASE+ADAPTER`, or the adapter's folder, which names its base.

The adapter is merged into the weights when they are loaded, so everything behind sees an ordinary model. Base and
adapter have one geometry: the base's cache, taken over unmapped, is the baseline that a mapper has to beat
(`--mapper identity`). Only LoRA adapters (DoRA and rsLoRA among them) in safetensors are read: prompt and prefix
tuning put tokens into the cache that no text stands for.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

from workbench.errors import InputError, ModelUnavailableError, UnsupportedModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def split(ref: str) -> tuple[str, str]:
    """A reference as (base, adapter); the adapter is "" for a model without one.

    Raises:
        InputError: a folder with an adapter that does not name its base.
    """
    path = Path(ref).expanduser()
    try:
        if (path / CONFIG).is_file() and not (path / "config.json").is_file():
            return base_of(path), ref
        if path.exists():
            return ref, ""
    except OSError:  # a name that no file can have
        return ref, ""
    base, plus, adapter = ref.rpartition("+")
    return (base.strip(), adapter.strip()) if plus and base.strip() and adapter.strip() else (ref, "")


def base_of(folder: Path) -> str:
    """The base that an adapter names.

    Raises:
        InputError: it names none.
    """
    from workbench.models.sources import read_json

    base = read_json(folder / CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise InputError(f"The adapter {folder.name!r} does not name its base.", "Write BASE+ADAPTER.")
    return base


def check(folder: Path) -> str:
    """Looks at an adapter's files before any library does.

    Returns:
        `sha256:…` over both files.

    Raises:
        InputError: a file is missing, cut off, or no plain file.
        UnsupportedModelError: another kind of adapter.
    """
    from workbench.models.sources import check_safetensors, read_json, sha256_of_file

    kind = read_json(folder / CONFIG).get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"The adapter {folder.name!r} is of the kind {str(kind)[:40]!r}, and only LoRA can be merged into weights."
        )
    if not (folder / WEIGHTS).is_file() and (folder / "adapter_model.bin").is_file():
        raise InputError(f"The adapter {folder.name!r} has only pickled weights, which are never read.")
    check_safetensors(folder / WEIGHTS)
    sums = [f"{name} {sha256_of_file(folder / name)}" for name in (CONFIG, WEIGHTS)]
    return "sha256:" + hashlib.sha256("\n".join(sums).encode()).hexdigest()


def merged(model: Any, folder: Path) -> Any:
    """The base model with the adapter's weights added to its own.

    Args:
        model: the base, loaded; is changed.
        folder: of an adapter that `check` has passed.

    Raises:
        ModelUnavailableError: `peft` is not installed, the adapter does not fit, or layers are offloaded.
    """
    try:
        from peft import LoraConfig, PeftModel
    except ImportError:
        raise ModelUnavailableError(
            "An adapter needs the package peft, which is not installed.",
            "Install it with `pip install peft`.",
        ) from None
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ModelUnavailableError(
            f"The adapter {folder.name!r} cannot be merged, because some layers are offloaded.",
            "Give the model more memory with --max-memory.",
        )
    from workbench.models.sources import read_json

    data = read_json(folder / CONFIG)
    data.pop("auto_mapping", None)  # would name a class to import
    try:
        config = LoraConfig.from_peft_type(**data)
        config.inference_mode = True
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")  # else they stay as they are drawn
            adapted = PeftModel.from_pretrained(model, str(folder), config=config, use_safetensors=True)
        return adapted.merge_and_unload(safe_merge=True)
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelUnavailableError(
            f"The adapter {folder.name!r} does not fit its base: {first.replace(str(folder), folder.name)[:200]}."
        ) from error
