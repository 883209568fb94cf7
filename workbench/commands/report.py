"""`report`: everything that was saved for a pair and direction, as one HTML file that opens offline."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write, and what to compare with; the pair and the direction are common to all commands."""
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file (default: out/report-PAIR-DIRECTION.html)"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OTHER",
        help="put another run beside it: a mapper's folder with saved results, or an earlier report",
    )  # fmt: skip


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Gather, draw, write; no model is loaded."""
    from workbench import report
    from workbench.lab.provenance import write_text
    from workbench.models.catalog import artefact_folder, resolve

    pair = resolve(args.pair, args.source, args.target, args.direction)
    folder = args.mapper or artefact_folder(pair, args.direction)
    if not folder.is_dir():
        raise InputError(
            f"There is no mapper for {pair.title}, {args.direction}.", "Fit one first, or give --mapper."
        )
    progress(0.1, "Reading the saved results")
    mine = report.gather(pair.name, pair.title, args.direction, folder)
    other = report.load_other(args.compare, mine) if args.compare else None
    progress(0.5, "Drawing")
    text = report.render(mine, other, args.compare.name if args.compare else "other")
    out = args.out or Path("out") / f"report-{pair.name}-{args.direction}.html"
    write_text(text, out)
    return {
        "out": str(out),
        "bytes": out.stat().st_size,
        "results": list(mine.results),
        "compared": other is not None,
        "problems": list(mine.problems),
    }


def show(result: dict[str, Any]) -> str:
    """What was written."""
    lines = [f"{result['out']} ({result['bytes']:,} bytes): {', '.join(result['results'])}"]
    return "\n".join([*lines, *result["problems"]])
