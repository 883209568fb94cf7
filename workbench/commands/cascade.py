"""`cascade`: from which uncertainty of the small model on the large one should take over."""

from __future__ import annotations

import argparse
from typing import Any

from workbench.commands.saving import add_save_arguments, save, saved_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many answers, how long, and which share is to be taken over."""
    parser.add_argument("--limit", type=int, default=32, metavar="N", help="answers (default: 32)")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="longest answer (default: 48)")
    parser.add_argument(
        "--share", type=float, default=0.3, help="of answers that the large model takes over (default: 0.3)"
    )
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Calibrate; see `workbench.lab.cascade`. Always of the direction up: the small model answers first."""
    from workbench.commands.common import host_from_args
    from workbench.lab import cascade
    from workbench.lab.results import finish

    host, _ = host_from_args(args)
    result = finish(cascade.stream(host, args.limit, args.tokens, args.share), progress)
    return {**result.to_json(), **save(args, result, host, "up", "cascade")}


def show(result: dict[str, Any]) -> str:
    """The sentence, and where it was saved."""
    return "\n".join([result["sentence"], *saved_line(result)])
