"""What all commands share: the pair, the direction, where to run, how results and progress are written."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import InputError
from workbench.models.catalog import DIRECTIONS, EMBEDDED_PAIR, SIDES, PairRef, resolve, source_side
from workbench.models.sources import is_local

if TYPE_CHECKING:
    from workbench.models.pair import PairHost

Progress = Callable[[float, str], None]


def add_common_arguments(parser: argparse.ArgumentParser, takes_pair: bool) -> None:
    """Options of every command; those that choose models only where a command takes a pair."""
    if takes_pair:
        group = parser.add_argument_group("models")
        group.add_argument(
            "--pair", metavar="NAME", help=f"a pair of the catalog (default: {EMBEDDED_PAIR.name})"
        )
        group.add_argument("--source", metavar="X", help="folder, GGUF file or hub id, instead of a pair")
        group.add_argument("--target", metavar="Y", help="the model that --source hands over to")
        for side in ("source", "target"):
            group.add_argument(
                f"--{side}-adapter", metavar="DIR", help=f"PEFT adapter over --{side} (folder or hub id)"
            )
        group.add_argument(
            "--direction", choices=DIRECTIONS, default="up", help="up: small (source) to large (target)"
        )
        group.add_argument(
            "--mapper",
            type=Path,
            metavar="DIR",
            help="mapper of this direction, instead of the usual one; `identity`: the source's cache unmapped",
        )
        group.add_argument(
            "--device-map", default="auto", help="auto, cpu, cuda:0 or a JSON file (default: auto)"
        )
        group.add_argument("--max-memory", metavar="LIMITS", help="for example cpu=4GiB,0=10GiB")
        group.add_argument(
            "--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)"
        )
        add_side_arguments(group)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    group.add_argument("--debug", action="store_true", help="show tracebacks and warnings")
    group.add_argument("--threads", type=int, metavar="N", help="processor threads (default: all cores)")


def add_side_arguments(group: Any) -> None:
    """`--small-device-map` and so on, for a parser or a group of one; read by `side_options`."""
    for side in SIDES:
        for option, what in (("device-map", "MAP"), ("max-memory", "LIMITS"), ("dtype", "DTYPE")):
            group.add_argument(
                f"--{side}-{option}", metavar=what, help=f"--{option} for the {side} model alone"
            )


def prepare_environment(args: argparse.Namespace) -> None:
    """Set what libraries read when they are imported; so this runs before they are.

    The hub is switched off when nothing that is asked for could need it: a machine without network then never
        waits.
    """
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise InputError("--threads must be between 1 and 1024.")
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not args.debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
        warnings.simplefilter("ignore")
    pair = pair_from_args(args) if hasattr(args, "pair") else EMBEDDED_PAIR
    if is_local(pair.small) and is_local(pair.large) and not getattr(args, "online", False):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def host_from_args(args: argparse.Namespace) -> tuple[PairHost, str]:
    """The pair that the arguments mean, with nothing loaded yet, and the direction.

    Raises:
        InputError: arguments that contradict each other or name nothing.
    """
    from workbench.models.pair import IDENTITY, PairHost

    pair = pair_from_args(args)
    source_side(args.direction)
    if args.mapper is not None and args.mapper != IDENTITY and not args.mapper.is_dir():
        raise InputError(
            f"There is no mapper folder {args.mapper.name!r}.", "Give the folder with manifest.json."
        )
    mappers = {args.direction: args.mapper} if args.mapper is not None else None
    host = PairHost(pair, args.device_map, args.dtype, args.max_memory, mappers, by_side=side_options(args))
    return host, args.direction


def pair_from_args(args: argparse.Namespace) -> PairRef:
    """The pair that the arguments name, adapters included.

    Raises:
        InputError: arguments that contradict each other or name nothing.
    """
    refs = {}
    for side in ("source", "target"):
        ref, adapter = getattr(args, side), getattr(args, f"{side}_adapter", None)
        if adapter is not None and ref is None:
            raise InputError(f"--{side}-adapter needs --{side}, the model below it.")
        refs[side] = f"{ref}+{adapter}" if adapter is not None else ref
    return resolve(args.pair, refs["source"], refs["target"], args.direction)


def side_options(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Where the two models differ in device map, memory limits and dtype."""
    names = ("device_map", "max_memory", "dtype")
    given = {side: {name: getattr(args, f"{side}_{name}", None) for name in names} for side in SIDES}
    return {side: {k: v for k, v in values.items() if v is not None} for side, values in given.items()}


class StderrProgress:
    """Progress on standard error: a line that renews itself on a terminal, now and then a line elsewhere."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._terminal = sys.stderr.isatty()
        self._seconds = 0.1 if self._terminal else seconds
        self._last = ("", -math.inf)
        self._open = False

    def __call__(self, share: float, what: str) -> None:
        """Report.

        Args:
            share: how much is done, 0 to 1.
            what: what is being done.
        """
        now, (last_what, last_time) = time.monotonic(), self._last
        if now - last_time < self._seconds and (self._terminal or what == last_what):
            return
        self._last = (what, now)
        line = f"{share:4.0%} {' '.join(what.split())[:90]}"
        if self._terminal:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
            self._open = True
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line, so that what follows starts on an empty one."""
        if self._open:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._open = False


def jsonable(value: Any) -> Any:
    """Plain JSON types: numbers that are not finite become null, tuples lists, paths text."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "tolist"):  # arrays and their scalars
        return jsonable(value.tolist())
    return str(value)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text, the last one as wide as it likes."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
