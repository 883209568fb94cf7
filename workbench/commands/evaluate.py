"""`evaluate`: does the target still do its tasks on a mapped cache? All controls beside it, and a policy's bars.

Exit status 3 when a policy was given and one of its bars is missed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.commands.common import table
from workbench.commands.mapper_table import add_mapper_arguments, compare_mappers, show_mappers
from workbench.commands.saving import add_save_arguments, save, saved_line, shown
from workbench.errors import InputError

if TYPE_CHECKING:
    from workbench.approval import Policy
    from workbench.lab.arms import Recipe
    from workbench.lab.results import Evaluation
    from workbench.models.pair import PairHost

DEFAULT_PASSAGES = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the evaluation; the pair and the direction are common to all commands."""
    parser.add_argument(
        "--text",
        "--texts",
        dest="text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts (default: the held-out ones)",
    )
    parser.add_argument("--chats", action="store_true", help="measure on the held-out chats instead")
    parser.add_argument(
        "--tasks", metavar="NAMES",
        help="all, none, or names with commas between (default: all on the held-out texts, none on other texts)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=int, metavar="N", help="items a task (default: 300), and at most so many passages"
    )
    parser.add_argument("--passages", type=int, metavar="N", help="passages for likelihoods (default: 24)")
    parser.add_argument(
        "--recipe", type=Path, metavar="DIR",
        help="a mapper fitted on all tokens, for an arm of the published recipe: no anchors, one token held back",
    )  # fmt: skip
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="bars to reach; exit status 3 when one is missed"
    )
    parser.add_argument("--context", type=int, default=256, help="context tokens (default: 256)")
    parser.add_argument("--following", type=int, default=64, help="tokens to predict (default: 64)")
    parser.add_argument("--anchors", metavar="M,…", help="one number or a grid (default: the mapper's)")
    parser.add_argument("--hold-back", metavar="H,…", help="one number or a grid (default: the mapper's)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    add_mapper_arguments(parser)
    add_save_arguments(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Evaluate; see `workbench.lab.retention`. With a grid the mapper's own setting is the main one."""
    from workbench.approval import Policy, read_policy
    from workbench.commands.common import host_from_args
    from workbench.lab import corpus, retention, scores
    from workbench.lab.results import finish
    from workbench.lab.tasks import DEFAULT_ITEMS
    from workbench.models.catalog import target_side

    anchors, hold_back = _numbers(args.anchors, "--anchors"), _numbers(args.hold_back, "--hold-back")
    if args.text and args.chats:
        raise InputError("--text and --chats exclude each other.", "Give one of them.")
    if args.mappers or args.curve:
        return compare_mappers(args, progress)
    policy = read_policy(args.policy) if args.policy else Policy()
    names = _tasks(args)
    if args.limit is not None and args.limit < 2:
        raise InputError("--limit must be at least 2.")
    host, direction = host_from_args(args)
    recipe = _recipe(args.recipe, host, direction) if args.recipe else None
    texts = corpus.read_files(args.text) if args.text else None
    if args.chats:
        texts = corpus.chats(host.model(target_side(direction), progress).tokenizer)
    settings = None
    if anchors or hold_back:
        mapper, _ = host.mapper(direction)
        grid = [(a, h) for a in anchors or [mapper.anchors] for h in hold_back or [mapper.hold_back]]
        settings = [(mapper.anchors, mapper.hold_back), *grid] if len(grid) > 1 else grid
    passages = args.passages or min(args.limit or DEFAULT_PASSAGES, DEFAULT_PASSAGES if names else 1 << 30)
    share = 0.15 if names else 1.0  # of the progress
    result = finish(
        retention.stream(
            host, direction, texts, passages, args.context, args.following, settings, args.seed, recipe=recipe
        ),
        lambda done, what: progress(done * share, what),
    )
    if names:
        main = result.settings[0]
        tasks = scores.stream(
            host,
            direction,
            names,
            args.limit or DEFAULT_ITEMS,
            args.seed,
            main.anchors,
            main.hold_back,
            recipe,
        )
        result = replace(
            result, scores=finish(tasks, lambda done, what: progress(share + done * (1 - share), what))
        )
    return {
        **result.to_json(),
        **save(args, result, host, direction, "quality"),
        **_decide(args, result, host, direction, policy),
    }


def _decide(
    args: argparse.Namespace, result: Evaluation, host: PairHost, direction: str, policy: Policy
) -> dict[str, Any]:
    """The policy's bars; the record is written beside the mapper with `--save`."""
    from workbench.lab.approval import approve, save_approval
    from workbench.lab.provenance import load_result
    from workbench.models.catalog import target_side

    drift_file = host.mapper_folder(direction) / "drift.json"
    drift = load_result(drift_file, "drift") if drift_file.is_file() else None
    if drift is not None and drift.provenance.mapper != result.provenance.mapper:
        drift = None
    record = approve(result, policy, host.model(target_side(direction)).identity.tokenizer, drift)
    found: dict[str, Any] = {
        "approval": {**record.to_json(), "sentence": record.sentence()},
        "missed": [entry.name for entry in record.missed],
    }
    if args.save and result.scores is not None and result.provenance.mapper:
        found["approval_saved"] = str(save_approval(record, host.mapper_folder(direction)))
    if args.policy and record.missed:
        found["exit_status"] = 3
    return found


def _tasks(args: argparse.Namespace) -> list[str]:
    """Names of the tasks to do.

    Raises:
        InputError: an unknown one.
    """
    from workbench.lab.results.tasks import TASKS

    chosen = args.tasks or ("none" if args.text or args.chats else "all")
    if chosen in ("all", "none"):
        return list(TASKS) if chosen == "all" else []
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    for name in names:
        if name not in TASKS:
            raise InputError(f"There is no task {name[:40]!r}.", f"There are: {', '.join(TASKS)}.")
    return list(dict.fromkeys(names))


def _recipe(folder: Path, host: PairHost, direction: str) -> Recipe:
    """The mapper of the published recipe, verified like any other."""
    from workbench.kv import artefact
    from workbench.lab.arms import Recipe
    from workbench.lab.provenance import models_of

    source, target = models_of(host, direction)
    mapper, _ = artefact.load(folder, source.identity, target.identity, direction)
    return Recipe(mapper.to(target.dtype, target.layer_devices))


def show(result: dict[str, Any]) -> str:
    """Tasks, the worst first; all arms at the main setting; the mapped arm at every setting; the decision."""
    from workbench.lab.results import ARMS

    if "mappers" in result:
        return show_mappers(result)
    rows: list[list[str]] = []
    for name in ARMS:
        if name in result:
            arm = result[name]
            cells = [
                f"{shown(arm[key])} [{shown(arm['ci'][key][0])}, {shown(arm['ci'][key][1])}]"
                for key in ("ce", "kl", "top1")
            ]
            rows.append([name, *cells])
    lines = [
        *_tasks_shown(result),
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
    lines += [f"{arm}: {why}" for arm, why in result["absent"].items()]
    decision = [result["approval"]["sentence"]] if result["tasks"] or "exit_status" in result else []
    return "\n".join(line for line in [*lines, result["note"], *decision, *saved_line(result)] if line)


def _tasks_shown(result: dict[str, Any]) -> list[str]:
    """A table of accuracies, one row a task, the worst first, and what is kept beside the source's own score."""
    from workbench.lab.results import ARMS

    if not result["tasks"]:
        return []
    arms = [arm for arm in ARMS if any(arm in found for found in result["tasks"].values())]
    rows = []
    for name, found in result["tasks"].items():
        cells = [f"{shown(found[arm]['accuracy'])}" if arm in found else "-" for arm in arms]
        low, high = result["task_details"][name]["retention"][1:]
        kept = f"{shown(result['retention'][name])} [{shown(low)}, {shown(high)}]"
        note = "" if result["informative"][name] else "uninformative: the context does not matter"
        rows.append(
            [name, found["native"]["n"], *cells, shown(result["chance"][name], 2), kept,
             shown(result["retention_floor"][name]), note]
        )  # fmt: skip
    titles = ["task", "n", *arms, "chance", "retention", "above chance", ""]
    worst = result["worst_task"]
    end = (
        f"Worst informative task: {worst} keeps {shown(result['retention'][worst])}; mean over the informative ones "
        f"{shown(result['mean_retention'])}."
        if worst
        else "No task is informative: the target does as well without the context."
    )
    return [table(titles, rows), end, ""]


def _numbers(text: str | None, option: str) -> list[int]:
    """Whole numbers with commas between; [] for None.

    Raises:
        InputError: naming the option.
    """
    try:
        return [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} must be whole numbers with commas between, not {text!r}.") from None
