"""Where measuring commands save what they found: beside the mapper that was measured, or in a named file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.models.pair import PairHost


def add_save_arguments(parser: argparse.ArgumentParser) -> None:
    """`--save` and `--out`."""
    parser.add_argument("--save", action="store_true", help="save the result for the page, beside the mapper")
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the result in this file")


def save(args: argparse.Namespace, result: Any, host: PairHost, direction: str, kind: str) -> dict[str, str]:
    """Save a result when that was asked for.

    Args:
        args: with `save` and `out`.
        result: what was measured.
        host: the pair that it was measured with.
        direction: "up" or "down".
        kind: "compare", "heads", "latency" or "quality": the name of the file beside the mapper.

    Returns:
        {"saved": file}, or {} when nothing was saved.
    """
    from workbench.lab.provenance import save_result

    path = args.out or (host.mapper_folder(direction) / f"{kind}.json" if args.save else None)
    return {} if path is None else {"saved": str(save_result(result, path))}


def saved_line(result: dict[str, Any]) -> list[str]:
    """A line for people, or none."""
    return [f"Saved as {result['saved']}"] if "saved" in result else []


def shown(value: float | None, digits: int = 3) -> str:
    """A number for a table; what could not be computed is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"
