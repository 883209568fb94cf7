"""`bench`: what a handoff costs over context lengths, next to the prefill that it replaces."""

from __future__ import annotations

import argparse
import os
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
        "--repeats", type=int, default=9, help="timed runs per length, at least 9 (default: 9)"
    )
    parser.add_argument("--anchors", type=int, help="first tokens run natively (default: the mapper's)")
    parser.add_argument("--hold-back", type=int, help="last tokens run natively (default: the mapper's)")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="texts (default: the held-out ones)"
    )
    parser.add_argument(
        "--delivered",
        choices=("memory", "file", "no"),
        help="how the mapped cache reaches another process, for the net saving; no: it stays in this one "
        "(default: shared memory where there is some, else a file)",
    )
    parser.add_argument(
        "--handoffs",
        type=int,
        default=10,
        metavar="N",
        help="handoffs that share one artefact load (default: 10)",
    )
    parser.add_argument(
        "--rejection-rate",
        type=float,
        default=0.0,
        metavar="R",
        help="share of handoffs that are rejected (default: 0)",
    )
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="also time mapping and handoff up to 8,000 tokens, for the exponent",
    )
    parser.add_argument(
        "--decode",
        type=int,
        default=0,
        metavar="N",
        help="also decode N tokens, against generate (default: no)",
    )
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Time; see `workbench.lab.latency`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler would write lines of its own
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
    chosen = {"no": "", None: latency.Extras.delivered}.get(args.delivered, args.delivered)
    extras = latency.Extras(True, chosen, args.handoffs, args.rejection_rate, args.scaling, args.decode)
    stream = latency.stream(
        host, direction, lengths, args.repeats, args.anchors, args.hold_back, texts, extras=extras
    )
    result = finish(stream, progress)
    return {**result.to_json(), **save(args, result, host, direction, "latency")}


def show(result: dict[str, Any]) -> str:
    """A row a length, then what it is made of."""
    columns = (
        ("tokens", "tokens", 0),
        ("map ms", "map_ms", 1),
        ("handoff ms", "handoff_ms", 1),
        ("with earlier turns mapped ahead ms", "ahead_handoff_ms", 1),
        ("prefill ms", "prefill_ms", 1),
        ("to first token ms", "prefill_first_ms", 1),
        ("ratio", "ratio", 2),
        ("net saving ms", "net_saving_ms", 1),
        ("peak memory / both caches", "memory_over_caches", 2),
    )
    cells = result["cells"]
    rows = [[shown(cell[key], digits) for _, key, digits in columns] for cell in cells]
    here = result["environment"]
    even = result["break_even_tokens"]
    lines = [
        table([title for title, _, _ in columns], rows),
        "",
        f"ratio: true prefill without the head / whole handoff ({result['anchors']} anchors, hold-back "
        f"{result['hold_back']}); medians of {result['repeats']} interleaved runs",
        *delivery_lines(cells),
        f"bare matrix products / mapping: {shown(result['gemm_fraction'], 2)}; loading the artefact: "
        f"{shown(result['load_ms'], 0)} ms {'cold' if result['load_is_cold'] else '(warm only)'}, "
        f"{shown(result['load_warm_ms'], 0)} ms warm",
        f"exponent over 256 to 8,000 tokens: handoff {shown(result['scaling_exponent'], 2)}, mapping alone "
        f"{shown(result['map_exponent'], 2)}",
        "break-even: " + ("at no length measured" if even is None else f"{even:.0f} tokens"),
        *decode_lines(result["decode"]),
        f"{here['processor']}, {here['threads']} threads, {here['dtype']}",
    ]
    return "\n".join(lines + saved_line(result))


def delivery_lines(cells: list[dict[str, Any]]) -> list[str]:
    """What shipping takes, at the longest context, and what the net saving subtracts."""
    if not cells:
        return []
    cell = cells[-1]
    terms = cell["terms"]
    way = {"memory": "through shared memory", "file": "through a file", "": "none, it stays in this process"}
    lines = [
        f"net saving: prefill - handoff - move - delivery ({way[terms['delivered']]}) - artefact load / "
        f"{terms['handoffs']} - rejected ones ({terms['rejection_rate']:.0%}); per accepted handoff at "
        f"{cell['tokens']:,} tokens {shown(cell['accepted_ms'], 1)} ms"
    ]
    for name, time in cell["deliver_ms"].items():
        lines.append(
            f"delivery {way[name]}, {cell['tokens']:,} tokens, {cell['cache_bytes']:,} bytes: {time:.1f} ms, "
            f"first layer after {cell['deliver_first_ms'][name]:.1f} ms"
        )
    moved = cell["move_ms"]
    lines.append("move between devices: " + ("only one here" if moved is None else f"{moved:.1f} ms"))
    return lines


def decode_lines(decode: dict[str, Any]) -> list[str]:
    """Our loop against generate."""
    if not decode:
        return []
    return [
        f"decoding {decode['tokens']} tokens: {decode['ours']:.1f} tokens/s, generate {decode['generate']:.1f}, "
        f"ratio {decode['ratio']:.2f}; text of every token adds {decode['text_overhead']:.1%}"
    ]
