"""`drift`: what alternating handoffs over many turns add, and when everything should be read again."""

from __future__ import annotations

import argparse
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import add_save_arguments, save, saved_line, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Turns and conversations; the pair and the direction of the first handoff are common to all commands."""
    parser.add_argument(
        "--turns", type=int, default=10, metavar="N", help="handoffs a conversation (default: 10)"
    )
    parser.add_argument("--limit", type=int, default=12, metavar="N", help="conversations (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the told facts and intervals (default: 0)")
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Measure; see `workbench.lab.drift`."""
    from workbench.commands.common import host_from_args
    from workbench.lab import drift
    from workbench.lab.results import finish

    host, direction = host_from_args(args)
    result = finish(drift.stream(host, direction, args.turns, args.limit, args.seed), progress)
    return {**result.to_json(), **save(args, result, host, direction, "drift")}


def show(result: dict[str, Any]) -> str:
    """One row a handoff, and the recommendation."""
    rows = [
        [
            turn["n"], turn["side"], f"{turn['tokens']:.0f}", f"{turn['new']:.0f}",
            f"{shown(turn['kl'])} [{shown(turn['ci']['kl'][0])}, {shown(turn['ci']['kl'][1])}]",
            shown(turn["kl_once"]), shown(turn["top1"]), shown(turn["ce"]), shown(turn["ce_never"]),
            shown(turn["recall"][0]), shown(turn["recall_never"][0]),
        ]
        for turn in result["turns"]
    ]  # fmt: skip
    titles = [
        "handoff", "to", "context", "mapped", "KL", "KL of one switch", "top-1", "CE", "CE never switched",
        "recall", "recall never switched",
    ]  # fmt: skip
    lines = [
        f"{len(result['chats'])} conversations; distances to the same model that read everything itself",
        table(titles, rows),
        result["recommendation"],
    ]
    return "\n".join([*lines, *saved_line(result)])
