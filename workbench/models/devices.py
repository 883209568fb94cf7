"""Where a model runs and in which dtype: `choose_dtype` decides and can say why; device maps as accelerate takes them."""

from __future__ import annotations

import functools
import json
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from workbench.errors import InputError, UnsupportedModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# --- dtype ---


def choose_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype for `--dtype auto`, and why.

    Half precision only pays where the processor multiplies it natively: emulated bfloat16 on a CPU is far slower
    than float32, and torch answers "supported" there all the same, so the instruction set is looked up as well.
    """
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU multiplies bfloat16 natively"
        return torch.float16, "the GPU has no native bfloat16"
    if device.type == "mps":
        return torch.float16, "Apple GPUs are fastest in float16"
    if device.type == "cpu":
        flag = cpu_bfloat16_flag()
        if flag and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return torch.bfloat16, f"the processor multiplies bfloat16 natively ({flag})"
        return torch.float32, "the processor has no native bfloat16, which would be emulated and slow"
    return torch.float32, f"nothing better is known for {device.type}"


@functools.cache  # asked at every training step
def cpu_bfloat16_flag() -> str:
    """The instruction set that multiplies bfloat16 natively, "" when there is none or it cannot be told."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").lower().split())
    except OSError:
        return "Apple silicon" if platform.system() == "Darwin" and platform.machine() == "arm64" else ""
    return next((flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in words), "")


def resolve_dtype(dtype: str, device: torch.device) -> tuple[torch.dtype, str]:
    """`--dtype` -> torch dtype and the reason."""
    if dtype == "auto":
        return choose_dtype(device)
    if dtype not in DTYPES:
        raise InputError(f"There is no dtype {dtype!r}.", f"Use auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype], "asked for"


# --- devices ---


def parse_device_map(device_map: str | dict[str, Any]) -> str | dict[str, Any]:
    """A name as it is, a `.json` file as the dict inside it.

    Raises:
        InputError: a device or file that does not exist, or a file that is no device map.
    """
    if isinstance(device_map, dict):
        return device_map
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return device_map
    if device_map.endswith(".json"):
        path = Path(device_map)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raise InputError(f"The device map {path.name!r} cannot be read as JSON.") from None
        good = isinstance(data, dict) and data and all(isinstance(v, (str, int)) for v in data.values())
        if not good:
            raise InputError(f"The device map {path.name!r} must be an object of module names and devices.")
        for device in data.values():
            if device != "disk":
                _check_device(device)
        return dict(data)
    _check_device(device_map)
    return device_map


def _check_device(name: str | int) -> None:
    """Raises `InputError` unless the device exists here."""
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except (RuntimeError, ValueError):
        raise InputError(f"{name!r} is no device.", "Use auto, cpu, cuda:0 or a JSON file.") from None
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if not here.get(device.type, False) or (device.index or 0) >= count:
        raise InputError(f"This machine has no device {str(device)!r}.", "Use --device-map auto or cpu.")


def parse_max_memory(text: str | dict[Any, Any] | None) -> dict[int | str, str] | None:
    """ "cpu=4GiB,0=10GiB" -> {"cpu": "4GiB", 0: "10GiB"}.

    Raises:
        InputError: when it is written otherwise.
    """
    if not text or isinstance(text, dict):
        return text or None
    memory: dict[int | str, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(cpu|mps|\d+)\s*=\s*(\d+(?:\.\d+)?\s*[KMG]i?B)\s*", part, re.IGNORECASE)
        if not match:
            raise InputError(f"{part.strip()!r} is no memory limit.", "Write for example cpu=4GiB,0=10GiB.")
        device = match[1].lower()
        memory[int(device) if device.isdigit() else device] = match[2].replace(" ", "")
    return memory


def first_device(placement: str | dict[str, Any]) -> torch.device:
    """The device that most of the work will be done on."""
    if isinstance(placement, dict):
        devices = [value for value in placement.values() if value not in ("cpu", "disk")]
        value = devices[0] if devices else "cpu"
        return torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    if placement not in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.device(placement)
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def offload_folder(placement: str | dict[str, Any], memory: dict[Any, Any] | None) -> str | None:
    """Where layers that fit on no device may be written, None when none can be; gone when the process ends."""
    to_disk = memory is not None or (isinstance(placement, dict) and "disk" in placement.values())
    return _offload_folder().name if to_disk else None


@functools.cache
def _offload_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kv-workbench-offload-")


def layer_devices(model: Any, layers: int) -> tuple[torch.device, ...]:
    """Per layer, the device that its keys and values are on while it runs.

    An offloaded layer's weights are `meta` tensors that accelerate's hook brings to its execution device for
    each call; the cache stays on that device.

    Raises:
        UnsupportedModelError: `meta` weights that no hook will bring.
    """
    return tuple(_device_of(model.base_model.layers[layer], layer) for layer in range(layers))


def _device_of(block: Any, layer: int) -> torch.device:
    for module in block.modules():
        execution = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if execution is not None and getattr(module._hf_hook, "offload", False):
            return torch.device("cuda", execution) if isinstance(execution, int) else torch.device(execution)
    device: torch.device = next(block.parameters()).device
    if device.type == "meta":
        raise UnsupportedModelError(
            f"The weights of layer {layer} are not on any device.",
            "Give the model more memory with --max-memory.",
        )
    return device
