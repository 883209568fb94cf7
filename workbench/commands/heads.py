"""`heads`: how well each layer and head of the target is mapped, on held-out text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import add_save_arguments, save, saved_line, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the measurement; the pair and the direction are common to all commands."""
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="texts (default: the held-out ones)"
    )
    parser.add_argument("--metrics", metavar="NAME,…", help="only these (default: all)")
    parser.add_argument("--limit", type=int, default=8, help="passages to measure on (default: 8)")
    parser.add_argument("--length", type=int, default=512, help="tokens a passage (default: 512)")
    parser.add_argument("--anchors", type=int, help="first tokens left native (default: the mapper's)")
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Measure; see `workbench.lab.heads`."""
    from workbench.commands.common import host_from_args
    from workbench.lab import corpus, heads
    from workbench.lab.results import finish

    host, direction = host_from_args(args)
    texts = corpus.read_files(args.text) if args.text else None
    metrics = [name.strip() for name in args.metrics.split(",")] if args.metrics else None
    result = finish(
        heads.stream(host, direction, texts, args.limit, args.length, args.anchors, metrics), progress
    )
    return {**result.to_json(), **save(args, result, host, direction, "heads")}


def show(result: dict[str, Any]) -> str:
    """Per metric the mean of each layer and of all, and the worst head."""
    from workbench.lab.results import METRICS

    names = list(result["metrics"])
    rows = []
    for layer in range(result["layers"]):
        cells = [[value for value in result["metrics"][name][layer] if value is not None] for name in names]
        rows.append([layer, *(shown(sum(cell) / len(cell) if cell else None) for cell in cells)])
    rows.append(["all", *(shown(result["means"][name]) for name in names)])
    lines = [table(["layer", *names], rows), ""]
    for name in names:
        values = [
            (value, layer, head)
            for layer, row in enumerate(result["metrics"][name])
            for head, value in enumerate(row)
            if value is not None
        ]
        if values:
            value, layer, head = min(values) if METRICS[name].better == "high" else max(values)
            lines.append(f"worst {name}: {value:.3f} in layer {layer}, {METRICS[name].per} head {head}")
    lines.append(
        f"{result['tokens']} tokens of {result['texts']} passages, the first {result['anchors']} of each "
        f"left out; {result['features']} parameters per output"
    )
    return "\n".join(lines + saved_line(result))
