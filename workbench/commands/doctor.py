"""`doctor`: is everything there, does it belong together, and does the handoff path give native logits?"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from workbench.commands.common import table
from workbench.errors import ModelUnavailableError, WorkbenchError
from workbench.models.catalog import DIRECTIONS, SIDES

if TYPE_CHECKING:
    from workbench.models.pair import PairHost

GATE_TEXT = "The harbour was quiet, and the last boat of the day had just come in. " * 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option of its own."""
    parser.add_argument("--fetch", action="store_true", help="fetch and build weights that are missing")


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """All checks, in the order in which they depend on each other; one that fails does not end the others."""
    from workbench.commands.common import host_from_args

    host, _ = host_from_args(args)
    checks: list[dict[str, Any]] = []

    def check(name: str, what: Callable[[], str]) -> bool:
        try:
            checks.append({"name": name, "ok": True, "detail": what()})
        except WorkbenchError as error:
            checks.append({"name": name, "ok": False, "detail": str(error)})
        except Exception as error:  # a doctor reports everything, also what nobody thought of
            if args.debug:
                raise
            checks.append({"name": name, "ok": False, "detail": f"{type(error).__name__}: {error}"})
        return bool(checks[-1]["ok"])

    check("versions", versions)
    check("devices", devices)
    check("dtype", lambda: dtype_and_why(args))
    check("memory", lambda: memory(host, args))
    present = [check(f"weights {side}", partial(weights, host, side, args.fetch, progress)) for side in SIDES]
    for side, there in zip(SIDES, present, strict=True):
        if there:
            check(f"gate {side}", partial(gate_of, host, side, progress))
    for direction in DIRECTIONS:
        check(f"mapper {direction}", partial(mapper_of, host, direction, all(present)))
    return {"ok": all(c["ok"] for c in checks), "pair": host.pair.name, "checks": checks}


def show(result: dict[str, Any]) -> str:
    """One line a check."""
    rows = [("ok" if c["ok"] else "FAILED", c["name"], c["detail"]) for c in result["checks"]]
    end = "Everything is in order." if result["ok"] else "Something is missing; see the lines marked FAILED."
    return f"{table(('', 'check', 'detail'), rows)}\n{end}"


def versions() -> str:
    """Python and the libraries that results depend on."""
    names = ("torch", "transformers", "accelerate", "safetensors", "gradio")
    return ", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])


def devices() -> str:
    """What can compute here."""
    import torch

    found = [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"]
    found += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return ", ".join(found + (["mps"] if torch.backends.mps.is_available() else []))


def dtype_and_why(args: argparse.Namespace) -> str:
    """The dtype that models would be loaded in."""
    from workbench.models.devices import first_device, parse_device_map, resolve_dtype

    dtype, reason = resolve_dtype(args.dtype, first_device(parse_device_map(args.device_map)))
    return f"{str(dtype).removeprefix('torch.')}: {reason}"


def memory(host: PairHost, args: argparse.Namespace) -> str:
    """What both models, their caches and mappers need, and whether this machine has it."""
    from workbench.commands.common import side_options
    from workbench.models.planner import auto_dtypes, plan_pair

    own = side_options(args)
    dtypes = auto_dtypes({side: own[side].get("dtype", args.dtype) for side in SIDES})
    try:
        found = plan_pair(host.pair, dtypes)
    except ModelUnavailableError:
        return "not known, because a model is not here and not in the catalog"
    if not found.fits:
        raise WorkbenchError(found.sentence)
    return f"{found.sentence} Contexts of {found.tokens:,} tokens."


def weights(host: PairHost, side: str, fetch: bool, progress: Any) -> str:
    """Where one side's weights come from; with `fetch` they are there afterwards."""
    from workbench.models.sources import locate

    ref = host.pair.ref(side)
    if not fetch:
        source = locate(ref, config_only=True, fetch=False)
        return f"{source.name} is on this machine"
    model = host.model(side, progress)
    return f"{model.name}, {model.identity.revision[:19]}"


def gate_of(host: PairHost, side: str, progress: Any) -> str:
    """The model's own cache through the handoff path against its native logits."""
    from workbench.chat.handoff import gate

    model = host.model(side, progress)
    with host.holding_lane():
        result = gate(model, model.tokenizer.encode(GATE_TEXT, add_special_tokens=False)[:64])
    if not result.ok:
        raise WorkbenchError(
            f"{model.name} does not give its native logits (largest difference {result.max_abs_error:.2g})."
        )
    where = ", ".join(sorted({str(device) for device in model.layer_devices}))
    return f"{model.name} on {where}: largest difference of a log-probability {result.max_abs_error:.1e}"


def mapper_of(host: PairHost, direction: str, loaded: bool) -> str:
    """The artefact of a direction; compared with the models where they are there."""
    from workbench.kv import artefact

    manifest = (
        host.mapper(direction)[1]
        if loaded
        else artefact.load(host.mapper_folder(direction), direction=direction)[1]
    )
    if manifest is None:
        return "none: the source's cache is taken over unmapped"
    r2 = ", ".join(
        f"{name} {value:.3f}"
        for name in ("r2_k", "r2_v")
        if isinstance(value := manifest.held_out.get(name), float)
    )
    against = (
        "verified against both models"
        if loaded
        else "whole; not compared with the models, which are not here"
    )
    return f"{against}; held out: {r2}" if r2 else against
