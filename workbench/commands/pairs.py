"""`pairs`: the catalog, what is compatible with what by the configs, what it needs, and which mappers are there."""

from __future__ import annotations

import argparse
from typing import Any

from workbench.commands.common import table
from workbench.models.catalog import DIRECTIONS, PAIRS, SIDES, has_artefact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option of its own; with --pair or --source and --target only that pair is shown."""
    parser.add_argument(
        "--online", action="store_true", help="ask the model hub for configs that are not here"
    )


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Compatibility is null where a config is neither here nor asked for nor known to the catalog."""
    from workbench.commands.common import pair_from_args

    one = args.pair is not None or args.source is not None or args.target is not None
    chosen = [pair_from_args(args)] if one else list(PAIRS.values())
    rows = []
    for done, pair in enumerate(chosen):
        progress(done / len(chosen), f"Reading the configs of {pair.name}")
        rows.append(_row(pair, args.direction, fetch=args.online or args.source is not None))
    result: dict[str, Any] = {"pairs": rows}
    if one and rows[0]["compatible"]:
        result["plan"] = _plan(chosen[0], args, fetch=args.online or args.source is not None)
    return result


def _row(pair: Any, direction: str, *, fetch: bool) -> dict[str, Any]:
    from workbench.models.catalog import pair_compatibility
    from workbench.models.presets import PRESETS

    found = pair_compatibility(pair, fetch=fetch)
    specs = {"small": found.small, "large": found.large}
    presets = {side: PRESETS.get(pair.ref(side).partition("@")[0]) for side in SIDES}
    return {
        "name": pair.name,
        "title": pair.title,
        "source": pair.source(direction),
        "target": pair.target(direction),
        "compatible": found.compatible,
        "reason": found.reason,
        "by_catalog": found.by_catalog,
        "tokenizers_compared": found.tokenizers,
        "matched": found.matched,
        "kv": {
            side: {"layers": spec.layers, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
            for side, spec in specs.items()
            if spec is not None
        },
        "licence": {side: preset.licence for side, preset in presets.items() if preset is not None},
        "gated": {side: preset.gated for side, preset in presets.items() if preset is not None},
        "weights": _weights(pair) if found.compatible else {},
        "artefacts": [direction for direction in DIRECTIONS if has_artefact(pair, direction)],
    }


def _weights(pair: Any) -> dict[str, int]:
    """Bytes of both models' weights by dtype; {} where a model cannot be counted."""
    from workbench.errors import WorkbenchError
    from workbench.models.planner import ITEM_BYTES, pair_sizes

    try:
        parameters = sum(size.parameters for size in pair_sizes(pair, fetch=False).values())
    except WorkbenchError:
        return {}
    return {dtype: parameters * item for dtype, item in ITEM_BYTES.items()}


def _plan(pair: Any, args: argparse.Namespace, *, fetch: bool) -> str:
    """One sentence about this machine, or why there is none."""
    from workbench.commands.common import side_options
    from workbench.errors import WorkbenchError
    from workbench.models.planner import auto_dtypes, plan_pair

    own = side_options(args)
    try:
        dtypes = auto_dtypes({side: own[side].get("dtype", args.dtype) for side in SIDES})
        return plan_pair(pair, dtypes, fetch=fetch).sentence
    except WorkbenchError as error:
        return str(error)


def show(result: dict[str, Any]) -> str:
    """One line a pair."""
    from workbench.models.planner import gigabytes

    words = {True: "yes", False: "no", None: "unknown"}
    shapes = {True: "matched", False: "mismatched", None: "-"}
    rows = []
    for p in result["pairs"]:
        kv = [f"{k['layers']} x {k['kv_heads']} x {k['head_dim']}" for k in p["kv"].values()]
        licences = " / ".join(dict.fromkeys(p["licence"].values())) or "-"
        rows.append(
            (
                p["name"],
                p["source"],
                p["target"],
                words[p["compatible"]],
                " ".join(p["artefacts"]) or "-",
                " and ".join(kv) or "-",
                shapes[p["matched"]],
                gigabytes(p["weights"]["bfloat16"]) if p["weights"] else "-",
                licences + (" (gated)" if any(p["gated"].values()) else ""),
                p["reason"] or "-",
            )
        )
    headers = ("name", "source", "target", "compatible", "mappers", "layers x KV heads x size", "KV width")
    lines = [table((*headers, "bfloat16", "licence", "why not"), rows)]
    if any(p["by_catalog"] for p in result["pairs"]):
        lines.append(
            "Shapes of models that are not here are the catalog's; --online reads their own configs."
        )
    if "plan" in result:
        lines.append(result["plan"])
    return "\n".join(lines)
