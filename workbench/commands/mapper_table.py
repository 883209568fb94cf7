"""`evaluate --mappers`: the published recipe, the pair's own mapper and others on the same texts, in one table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import save, saved_line, shown
from workbench.errors import InputError

DEFAULT_PASSAGES = 24


def add_mapper_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that turn `evaluate` into a comparison of mappers."""
    group = parser.add_argument_group("comparing mappers")
    group.add_argument(
        "--mappers", metavar="NAMES",
        help="recipe, default, best or NAME=FOLDER with commas between; what has no folder yet is fitted and kept",
    )  # fmt: skip
    group.add_argument(
        "--curve", action="store_true", help="the default over anchors and over hold-backs as well"
    )
    group.add_argument(
        "--sequences",
        type=int,
        default=96,
        help="pieces of text for mappers that are fitted now (default: 96)",
    )
    group.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder for them (default: with your other mappers)"
    )


def compare_mappers(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Fit what is missing, measure everything in one run; see `workbench.lab.mappers`."""
    from workbench.chat.shared import common_beginning
    from workbench.commands.common import host_from_args
    from workbench.lab import corpus, mappers
    from workbench.lab.results import finish
    from workbench.models.catalog import target_side
    from workbench.models.embedded import home

    names, folders = _parse(args.mappers or "default")
    host, direction = host_from_args(args)
    keep = args.keep or home() / "mappers" / host.pair.name / f"{direction}-compared"
    keep.mkdir(parents=True, exist_ok=True)
    texts = corpus.read_files(args.text) if args.text else None
    tokenizer = host.model(target_side(direction), progress).tokenizer
    system_prompt = 0
    if args.chats:
        texts = corpus.chats(tokenizer)
        system_prompt = len(common_beginning(tokenizer)) if args.curve else 0
    fitted = mappers.contestants(
        host, direction, names, folders, keep, args.sequences,
        progress=lambda share, what: progress(0.5 * share, what),
    )  # fmt: skip
    result = finish(
        mappers.stream(
            host, direction, fitted, texts, args.passages or args.limit or DEFAULT_PASSAGES, args.context,
            args.following, args.seed, args.curve, system_prompt,
        ),
        lambda share, what: progress(0.5 + 0.5 * share, what),
    )  # fmt: skip
    return {**result.to_json(), **save(args, result, host, direction, "mappers")}


def show_mappers(result: dict[str, Any]) -> str:
    """The table, the curve below it."""
    lines = [
        f"{len(result['passages'])} passages of {result['context']} context tokens, {result['following']} to predict",
        "; ".join(
            f"{name.replace('_', ' ')}: CE {shown(result[name]['ce'])}, KL {shown(result[name]['kl'])}"
            for name in ("native", "source", "no_context")
        ),
        table(
            ["mapper", "KL", "top-1", "gap recovered", "% of prefill", "% re-read", "% native layers", "ms", "MB",
             "anchors", "hold-back", "form"],
            [
                [
                    name, f"{shown(entry['kl'])} [{shown(entry['ci']['kl'][0])}, {shown(entry['ci']['kl'][1])}]",
                    shown(entry["top1"]), shown(entry["gap_recovered"]), shown(100 * entry["map_flops_share"], 1),
                    shown(100 * entry["reread_share"], 1), shown(100 * entry["native_share"], 1),
                    shown(entry["map_ms"], 0), shown(entry["artefact_mb"], 1), entry["anchors"], entry["hold_back"],
                    entry["form"],
                ]
                for name, entry in result["mappers"].items()
            ],
        ),
    ]  # fmt: skip
    if result["curve"]:
        rows = [
            [f"{point['anchors']} {point['label']}".strip(), point["hold_back"],
             shown(100 * point["reread_share"], 1), *(shown(point[name]) for name in ("kl", "top1", "gap_recovered"))]
            for point in result["curve"]
        ]  # fmt: skip
        lines += ["", table(["anchors", "hold-back", "% re-read", "KL", "top-1", "gap recovered"], rows)]
    return "\n".join([*lines, *saved_line(result)])


def _parse(text: str) -> tuple[list[str], dict[str, Path]]:
    """Names in order, and the folders of those that have one.

    Raises:
        InputError: a name that is unknown, or a folder that is not there.
    """
    from workbench.lab.mappers import NAMES, RECIPES

    names, folders = [], {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, given, folder = part.partition("=")
        if not given and name not in NAMES and name not in RECIPES:
            raise InputError(f"There is no mapper {name!r}.", f"Use {', '.join(NAMES)}, or NAME=FOLDER.")
        if given:
            if not name or not Path(folder).is_dir():
                raise InputError(f"There is no mapper folder {folder!r}.", "Give NAME=FOLDER.")
            folders[name] = Path(folder)
        names.append(name)
    if not names:
        raise InputError("--mappers names none.", f"Use {', '.join(NAMES)}, or NAME=FOLDER.")
    return names, folders
