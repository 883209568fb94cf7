"""`evaluate`: how well following text is predicted from a mapped cache, with controls beside it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import add_save_arguments, save, saved_line, shown
from workbench.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the evaluation; the pair and the direction are common to all commands."""
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="texts (default: the held-out ones)"
    )
    parser.add_argument("--chats", action="store_true", help="measure on the held-out chats instead")
    parser.add_argument("--limit", type=int, default=24, help="passages (default: 24)")
    parser.add_argument("--context", type=int, default=256, help="context tokens (default: 256)")
    parser.add_argument("--following", type=int, default=64, help="tokens to predict (default: 64)")
    parser.add_argument("--anchors", metavar="M,…", help="one number or a grid (default: the mapper's)")
    parser.add_argument("--hold-back", metavar="H,…", help="one number or a grid (default: the mapper's)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Evaluate; see `workbench.lab.retention`. With a grid the mapper's own setting is the main one."""
    from workbench.commands.common import host_from_args
    from workbench.lab import corpus, retention
    from workbench.lab.results import finish
    from workbench.models.catalog import target_side

    anchors, hold_back = _numbers(args.anchors, "--anchors"), _numbers(args.hold_back, "--hold-back")
    if args.text and args.chats:
        raise InputError("--text and --chats exclude each other.", "Give one of them.")
    host, direction = host_from_args(args)
    texts = corpus.read_files(args.text) if args.text else None
    if args.chats:
        texts = corpus.chats(host.model(target_side(direction), progress).tokenizer)
    settings = None
    if anchors or hold_back:
        mapper, _ = host.mapper(direction)
        grid = [(a, h) for a in anchors or [mapper.anchors] for h in hold_back or [mapper.hold_back]]
        settings = [(mapper.anchors, mapper.hold_back), *grid] if len(grid) > 1 else grid
    stream = retention.stream(
        host, direction, texts, args.limit, args.context, args.following, settings, args.seed
    )
    result = finish(stream, progress)
    return {**result.to_json(), **save(args, result, host, direction, "quality")}


def show(result: dict[str, Any]) -> str:
    """All arms at the main setting, then the mapped arm at every setting."""
    from workbench.lab.results import ARMS

    rows = []
    for name in ARMS:
        if name in result:
            arm = result[name]
            cells = [
                f"{shown(arm[key])} [{shown(arm['ci'][key][0])}, {shown(arm['ci'][key][1])}]"
                for key in ("ce", "kl", "top1")
            ]
            rows.append([name, *cells])
    lines = [
        f"{len(result['passages'])} passages of {result['context']} context tokens, "
        f"{result['following']} to predict; {result['anchors']} anchors, hold-back {result['hold_back']}",
        table(["arm", "CE", "KL to native", "top-1"], rows),
        f"gap recovered: {shown(result['gap_recovered'])}",
    ]
    if len(result["settings"]) > 1:
        grid = []
        for entry in result["settings"]:
            mapped, wrong = entry["arms"]["mapped"], entry["arms"]["wrong_document"]
            figures = (mapped["ce"], mapped["kl"], mapped["top1"], entry["gap_recovered"], wrong["kl"])
            grid.append([entry["anchors"], entry["hold_back"], *map(shown, figures)])
        titles = ["anchors", "hold-back", "CE", "KL", "top-1", "gap recovered", "KL wrong document"]
        lines += ["", table(titles, grid)]
    return "\n".join([*lines, result["note"], *saved_line(result)])


def _numbers(text: str | None, option: str) -> list[int]:
    """Whole numbers with commas between; [] for None.

    Raises:
        InputError: naming the option.
    """
    try:
        return [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} must be whole numbers with commas between, not {text!r}.") from None
