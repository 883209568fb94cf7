"""`bench`: what a handoff costs over context lengths, next to the prefill that it replaces."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import add_save_arguments, save, saved_line, shown
from workbench.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench; the pair and the direction are common to all commands."""
    parser.add_argument(
        "--lengths", default="64,256,1024,4096", help="context lengths (default: 64,256,1024,4096)"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="timed runs per length, at least 5 (default: 9)"
    )
    parser.add_argument("--anchors", type=int, help="first tokens run natively (default: the mapper's)")
    parser.add_argument("--hold-back", type=int, help="last tokens run natively (default: the mapper's)")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="texts (default: the held-out ones)"
    )
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Time; see `workbench.lab.latency`."""
    from workbench.commands.common import host_from_args
    from workbench.lab import corpus, latency
    from workbench.lab.results import finish

    try:
        lengths = [int(part) for part in args.lengths.split(",") if part.strip()]
    except ValueError:
        raise InputError(
            f"--lengths must be whole numbers with commas between, not {args.lengths!r}."
        ) from None
    host, direction = host_from_args(args)
    texts = corpus.read_files(args.text) if args.text else None
    stream = latency.stream(host, direction, lengths, args.repeats, args.anchors, args.hold_back, texts)
    result = finish(stream, progress)
    return {**result.to_json(), **save(args, result, host, direction, "latency")}


def show(result: dict[str, Any]) -> str:
    """A row a length, then what is not in it."""
    columns = (
        ("tokens", "tokens", 0),
        ("map ms", "map_ms", 1),
        ("handoff ms", "handoff_ms", 1),
        ("prefill ms", "prefill_ms", 1),
        ("to first token ms", "prefill_first_ms", 1),
        ("ratio", "ratio", 2),
        ("to first token", "ratio_first_token", 2),
        ("net saving ms", "net_saving_ms", 1),
    )
    rows = [[shown(cell[key], digits) for _, key, digits in columns] for cell in result["cells"]]
    here = result["environment"]
    even = result["break_even_tokens"]
    lines = [
        table([title for title, _, _ in columns], rows),
        "",
        f"ratio: true prefill without the head / whole handoff ({result['anchors']} anchors, hold-back "
        f"{result['hold_back']}); medians of {result['repeats']} interleaved runs",
        f"bare matrix products / mapping: {shown(result['gemm_fraction'], 2)}; loading the artefact: "
        f"{shown(result['load_ms'], 0)} ms cold, {shown(result['load_warm_ms'], 0)} ms warm",
        "break-even: " + ("at no length measured" if even is None else f"{even:.0f} tokens"),
        f"{here['processor']}, {here['threads']} threads, {here['dtype']}",
    ]
    return "\n".join(lines + saved_line(result))
