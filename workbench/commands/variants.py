"""`variants`: fit many variants of a mapper, measure them, and say which head metric foretells what is kept."""

from __future__ import annotations

import argparse
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import add_save_arguments, save, saved_line, shown
from workbench.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much to measure and to fit on; the pair and the direction are common to all commands."""
    parser.add_argument(
        "--limit", type=int, default=80, metavar="N",
        help="items a task, and at most so many passages (default: 80; never more than 12 passages)",
    )  # fmt: skip
    parser.add_argument(
        "--sequences", type=int, default=48, metavar="N", help="pieces of text to fit on (default: 48)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of items, noise and intervals (default: 0)")
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Fit what is missing and measure; see `workbench.lab.variants`."""
    from workbench.commands.common import host_from_args
    from workbench.lab import variant_fits, variants
    from workbench.lab.results import finish
    from workbench.models.place import home

    if args.limit < 2:
        raise InputError("--limit must be at least 2.")
    host, direction = host_from_args(args)
    keep = home() / "mappers" / host.pair.name / f"{direction}-variants-{args.sequences}"
    fitted = variant_fits.candidates(
        host, direction, keep, args.sequences, args.seed, lambda share, what: progress(0.25 * share, what)
    )
    result = finish(
        variants.stream(host, direction, fitted, None, args.limit, args.sequences, seed=args.seed),
        lambda share, what: progress(0.25 + 0.75 * share, what),
    )
    return {**result.to_json(), **save(args, result, host, direction, "variants")}


def show(result: dict[str, Any]) -> str:
    """A row a variant, then r of every metric with both outcomes, the most telling first."""
    metrics = list(result["correlations"]["retention"])
    rows = [
        [one["name"], shown(one["retention"][0]), shown(one["kl"][0]), shown(one["gap_recovered"][0]),
         *(shown(one["metrics"][name]) for name in metrics)]
        for one in result["variants"]
    ]  # fmt: skip
    counts = result["counts"]
    asked = ", ".join(
        f"{counts[task]} items of {task}{'' if yes else ' (uninformative)'}"
        for task, yes in result["informative"].items()
    )
    lines = [
        f"{len(result['variants'])} variants; {counts['head_tokens']} tokens for the heads, "
        f"{counts['following_tokens']} of following text, {asked}; {result['seconds']:.0f} s of measuring",
        table(["variant", "retention", "KL", "gap recovered", *metrics], rows),
    ]
    for outcome, said in (("retention", "retention"), ("minus_kl", "-KL")):
        found = result["correlations"][outcome]
        rows = [
            [name, each["n"], *(_r(each[kind]) for kind in ("pearson", "spearman"))]
            for name, each in found.items()
        ]
        lines += ["", f"with {said}; the best is {result['best'][outcome] or 'none'}"]
        lines.append(table(["metric", "variants", "Pearson's r", "Spearman's r"], rows))
    paper = ", ".join(f"{name[2:]} {value:+.2f}" for name, value in result["published"].items())
    lines += ["", f"The paper (arXiv 2608.03893) found with retention: {paper}."]
    return "\n".join([*lines, *saved_line(result)])


def _r(figure: list[float | None]) -> str:
    value, low, high = (shown(x, 2) for x in figure)
    return f"{value} [{low}, {high}]"
