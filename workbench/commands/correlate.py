"""`correlate`: which head metric foretells what a mapper keeps, over saved results of several mappers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The mappers' folders, each with what `heads` and `evaluate` saved there."""
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="folder with heads.json and quality.json"
    )


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Read and correlate; see `workbench.lab.diagnostics`."""
    from workbench.lab.diagnostics import summary

    return summary(args.folders)


def show(result: dict[str, Any]) -> str:
    """r of every metric, the strongest first, then a row a mapper."""
    names = list(result["r"])
    rows = [
        [dot["name"], dot["direction"], shown(dot["kept"]), *(shown(dot[name]) for name in names)]
        for dot in result["dots"]
    ]
    rows.append(["r", f"n={result['n']}", "", *(shown(result["r"][name], 2) for name in names)])
    return table(["mapper", "direction", result["against"], *names], rows)
