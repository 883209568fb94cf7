"""`pairs`: the catalog, what is compatible with what by the configs, and which mappers are there."""

from __future__ import annotations

import argparse
from typing import Any

from workbench.commands.common import table
from workbench.models.catalog import DIRECTIONS, PAIRS, has_artefact, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option of its own; with --pair or --source and --target only that pair is shown."""
    parser.add_argument(
        "--online", action="store_true", help="ask the model hub for configs that are not here"
    )


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Compatibility is null where a config is neither here nor asked for."""
    from workbench.models.catalog import pair_compatibility

    one = args.pair is not None or args.source is not None or args.target is not None
    chosen = [resolve(args.pair, args.source, args.target, args.direction)] if one else list(PAIRS.values())
    rows = []
    for done, pair in enumerate(chosen):
        progress(done / len(chosen), f"Reading the configs of {pair.name}")
        found = pair_compatibility(pair, fetch=args.online or args.source is not None)
        rows.append(
            {
                "name": pair.name,
                "title": pair.title,
                "source": pair.source(args.direction),
                "target": pair.target(args.direction),
                "compatible": found.compatible,
                "reason": found.reason,
                "artefacts": [direction for direction in DIRECTIONS if has_artefact(pair, direction)],
            }
        )
    return {"pairs": rows}


def show(result: dict[str, Any]) -> str:
    """One line a pair."""
    words = {True: "yes", False: "no", None: "unknown"}
    rows = [
        (
            p["name"],
            p["source"],
            p["target"],
            words[p["compatible"]],
            " ".join(p["artefacts"]) or "-",
            p["reason"],
        )
        for p in result["pairs"]
    ]
    return table(("name", "source", "target", "compatible", "mappers", "why not"), rows)
