"""`harness`: tasks of a hub, or of your own, through lm-evaluation-harness, arm by arm.

Needs `pip install -r requirements-eval.txt`, and a network or a filled cache for tasks of the hub.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from workbench.commands.common import table
from workbench.commands.saving import shown
from workbench.errors import InputError

PAPER = "arc_challenge,hellaswag,winogrande,mmlu,gsm8k,wikitext"
ARMS = "native,mapped,source,no_context"
LOWER_IS_BETTER = ("word_perplexity",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tasks and arms; the pair and the direction are common to all commands."""
    parser.add_argument("--tasks", default=PAPER, metavar="NAMES", help=f"of the harness (default: {PAPER})")
    parser.add_argument("--arms", default=ARMS, metavar="NAMES", help=f"default: {ARMS}")
    parser.add_argument("--limit", type=int, metavar="N", help="items a task (default: all)")
    parser.add_argument(
        "--fewshot", type=int, metavar="K", help="examples before each item (default: the task's)"
    )
    parser.add_argument(
        "--include-path", type=Path, metavar="DIR", help="folder with task definitions of your own"
    )
    parser.add_argument("--anchors", type=int, metavar="M", help="default: the mapper's")
    parser.add_argument("--hold-back", type=int, metavar="H", help="default: the mapper's")
    parser.add_argument("--seed", type=int, default=0, help="of the few-shot examples (default: 0)")
    parser.add_argument("--online", action="store_true", help="let the harness fetch data sets from the hub")


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Run every arm through the harness, on the same items."""
    if not args.online:
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise InputError(
            "lm-evaluation-harness is not installed.", "Install it: pip install -r requirements-eval.txt"
        ) from None
    from workbench.commands.common import host_from_args
    from workbench.lab.harness import MappedCacheLM, accuracies
    from workbench.lab.provenance import trace

    host, direction = host_from_args(args)
    arms = [arm.strip() for arm in args.arms.split(",") if arm.strip()]
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not {"native", "mapped", "source"} <= set(arms):
        raise InputError(
            "The arms native, mapped and source are always needed: nothing is kept without them."
        )
    manager = TaskManager(include_path=str(args.include_path) if args.include_path else None)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise InputError(f"The harness has no task {unknown[0][:40]!r}.", "Name one, or give --include-path.")
    tasks: dict[str, dict[str, Any]] = {}
    details: dict[str, Any] = {}
    for number, arm in enumerate(arms):
        progress(number / len(arms), f"arm {arm}")
        model = MappedCacheLM(host, direction, arm, args.anchors, args.hold_back)
        found = lm_eval.simple_evaluate(
            model=model, tasks=names, num_fewshot=args.fewshot, limit=args.limit, task_manager=manager,
            random_seed=args.seed, numpy_random_seed=args.seed, torch_random_seed=args.seed,
            fewshot_random_seed=args.seed, bootstrap_iters=0, log_samples=True,
        )  # fmt: skip
        for task, metric, value in accuracies(found):
            n = found.get("n-samples", {}).get(task, {}).get("effective")
            key = "accuracy" if metric not in LOWER_IS_BETTER else "perplexity"
            tasks.setdefault(task, {})[arm] = {key: value, "metric": metric, "n": n}
            details[task] = {
                "version": found.get("versions", {}).get(task),
                "n_shot": found.get("n-shot", {}).get(task),
                "hash": found.get("task_hashes", {}).get(task),
            }
    retention = {
        task: each["mapped"]["accuracy"] / each["native"]["accuracy"]
        for task, each in tasks.items()
        if "accuracy" in each.get("native", {}) and each["native"]["accuracy"]
    }
    return {
        "tasks": tasks,
        "retention": retention,
        "worst_task": min(retention, key=retention.__getitem__) if retention else None,
        "task_details": details,
        "harness": lm_eval.__version__,
        "seed": args.seed,
        "provenance": trace(host, direction, 0, [(task, task) for task in tasks]).to_json(),
    }


def show(result: dict[str, Any]) -> str:
    """One row a task, the worst first."""
    arms = list(dict.fromkeys(arm for each in result["tasks"].values() for arm in each))
    order = sorted(result["tasks"], key=lambda task: result["retention"].get(task, 2.0))
    rows = []
    for task in order:
        each = result["tasks"][task]
        cells = [
            shown(each[arm].get("accuracy", each[arm].get("perplexity"))) if arm in each else "-"
            for arm in arms
        ]
        rows.append(
            [
                task,
                each["native"]["metric"],
                each["native"]["n"],
                *cells,
                shown(result["retention"].get(task)),
            ]
        )
    return table(["task", "metric", "n", *arms, "retention"], rows)
