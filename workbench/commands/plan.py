"""`plan`: what a pair needs in memory, what this machine has, and where to put it; nothing is loaded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.errors import InputError
from workbench.models.catalog import SIDES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the plan."""
    parser.add_argument(
        "--tokens", type=int, help="length of the context (default: 4096, or the models' limit)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="source layers a target layer (default: all)")
    parser.add_argument(
        "--online", action="store_true", help="ask the model hub for configs that are not here"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write small.json and large.json, for --small-device-map"
    )


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Plan, and write the maps where asked to."""
    from workbench.commands.common import pair_from_args, side_options
    from workbench.models.planner import auto_dtypes, plan_pair

    pair = pair_from_args(args)
    progress(0.1, f"Counting the parameters of {pair.title}")
    own = side_options(args)
    dtypes = auto_dtypes({side: own[side].get("dtype", args.dtype) for side in SIDES})
    found = plan_pair(
        pair, dtypes, tokens=args.tokens, top_k=args.top_k, fetch=args.online or args.source is not None
    )
    result = {"pair": pair.name, **found.to_json()}
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            for side in SIDES:
                (args.out / f"{side}.json").write_text(
                    json.dumps(found.maps[side], indent=1), encoding="utf-8"
                )
        except OSError as error:
            raise InputError(f"Nothing can be written in {args.out.name!r}: {error.strerror}.") from error
        result["out"] = str(args.out)
    return result


def show(result: dict[str, Any]) -> str:
    """Two tables and a sentence."""
    from workbench.models.planner import gigabytes

    rows = [
        (need["side"], need["name"], f"{need['parameters'] / 1e9:.2f} B", need["dtype"], gigabytes(need["weights"]),
         gigabytes(need["cache"]), _where(result["maps"][need["side"]]))
        for need in result["needs"].values()
    ]  # fmt: skip
    cache = f"cache of {result['tokens']:,}"
    needs = table(("side", "model", "parameters", "dtype", "weights", cache, "goes to"), rows)
    mappers = [
        (way, gigabytes(size), gigabytes(result["fit"][way])) for way, size in result["mapper"].items()
    ]
    devices = [
        (device["name"], gigabytes(device["free"]), gigabytes(result["used"].get(device["name"], 0)))
        for device in result["devices"]
    ]
    parts = [
        needs,
        table(("direction", "mapper", "sums of a fit"), mappers),
        table(("device", "free", "planned"), devices),
        result["sentence"],
    ]
    if "out" in result:
        parts.append(f"Device maps: {result['out']}/small.json and {result['out']}/large.json")
    return "\n\n".join(parts)


def _where(places: dict[str, Any]) -> str:
    """Which devices a map names, in order."""
    names = [f"cuda:{place}" if isinstance(place, int) else str(place) for place in places.values()]
    return " + ".join(dict.fromkeys(names))
