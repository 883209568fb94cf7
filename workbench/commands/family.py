"""`family`: build the small embedded model again from the large one, as `workbench.models.family` says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the recipe; what is not given here is as `workbench.models.family.FamilyOptions` says."""
    parser.add_argument(
        "--out", type=Path, help="folder of sibling.safetensors and sibling.json (default: in the cache)"
    )
    parser.add_argument("--tokens", type=int, default=500_000, help="tokens to distil on, the whole plan")
    parser.add_argument("--stage", choices=["chats", "layers", "distil", "pack", "all"], default="all")
    parser.add_argument("--resume", action="store_true", help="go on from what a killed run left")
    parser.add_argument(
        "--rate", type=float, help="learning rate (default: the better of two, tried briefly)"
    )
    parser.add_argument("--work", type=Path, help="folder of checkpoints and logs (default: in the cache)")
    parser.add_argument(
        "--start", type=Path, help="folder of a packed sibling to heal further, instead of starting anew"
    )
    parser.add_argument("--kept-layers", type=int, default=20, choices=range(16, 21), metavar="16..20")
    parser.add_argument(
        "--bits",
        type=int,
        nargs="+",
        default=[2, 3, 4],
        help="bits a weight to try when packing (default: 2 3 4)",
    )
    parser.add_argument(
        "--weights", choices=["auto", "last", "average"], default="auto", help="which weights to pack"
    )


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Run the stages."""
    from workbench.models import family

    given = {
        name: value
        for name, value in (("out", args.out), ("work", args.work), ("start", args.start))
        if value is not None
    }
    options = family.FamilyOptions(
        tokens=args.tokens,
        stage=args.stage,
        resume=args.resume,
        rate=args.rate,
        kept=args.kept_layers,
        average={"auto": None, "last": False, "average": True}[args.weights],
        bits=tuple(args.bits),
        **given,
    )
    return family.run(options, progress)


def show(result: dict[str, Any]) -> str:
    """Where it is and how good it is."""
    lines = [f"Saved in {result['out']}"]
    for name, ce in result.get("ce", {}).items():
        parts = ce.items() if isinstance(ce, dict) else [("", ce)]
        lines.append(
            f"{name}: cross-entropy " + ", ".join(f"{kind} {value:.3f}".strip() for kind, value in parts)
        )
    return "\n".join(lines)
