"""An approval record out of an evaluation: the figures that a policy's bars are about, and the decision. No torch.

    evaluation + policy -> figures -> checks -> accept | warn | refuse -> `approval.json` beside the mapper

What a policy and a record are stands in `workbench/approval.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.approval import ACCEPT, FILE, Approval, Policy, check
from workbench.lab.provenance import now, save_result, text_hash
from workbench.lab.results.quality import Evaluation


def figures(result: Evaluation, drift: Any = None) -> dict[str, float]:
    """The figures that bars are about; what was not measured is left out.

    Args:
        result: the evaluation, with or without tasks.
        drift: a `Drift`, or None.
    """
    mapped = result.arms()["mapped"]
    found = {"gap_recovered": result.settings[0].gap_recovered.value, "kl": mapped.kl.value}
    scores = result.scores
    if scores is not None:
        good = scores.informative
        found["informative_tasks"] = float(len(good))
        found["items"] = float(min(task.n for task in scores.tasks.values()))
        if good:
            found["mean_retention"] = scores.mean_retention
            found["worst_retention"] = min(task.retention.value for task in good.values())
            found["worst_retention_floor"] = min(task.retention_floor.value for task in good.values())
            apart = all(
                task.arms[arm].accuracy.high < task.arms["mapped"].accuracy.low
                for task in good.values()
                for arm in ("wrong_document", "zero")
            )
            found["controls_below"] = float(apart)
        if "multi_turn_recall" in scores.tasks:
            found["multi_turn_recall"] = scores.tasks["multi_turn_recall"].retention.value
    if drift is not None:
        found["drift_ratio"] = drift.ratio
    return found


def approve(result: Evaluation, policy: Policy, tokenizer: str, drift: Any = None) -> Approval:
    """Decide by a policy.

    Args:
        result: the evaluation of a direction's mapper.
        policy: the bars.
        tokenizer: hash of the target's tokenizer.
        drift: a `Drift`, or None.
    """
    origin, scores = result.provenance, result.scores
    measured = figures(result, drift)
    checks = check(policy, measured)
    workload: dict[str, Any] = {
        "passages": text_hash(json.dumps([p["sha256"] for p in result.passages])),
        "context": result.context,
        "following": result.following,
        "seed": result.seed,
        "tasks": {} if scores is None else {name: task.sha256 for name, task in scores.tasks.items()},
        "items": {} if scores is None else {name: task.n for name, task in scores.tasks.items()},
        "anchors": result.settings[0].anchors,
        "hold_back": result.settings[0].hold_back,
        "where": origin.where,
        "versions": origin.versions,
    }
    return Approval(
        tuple_={
            "pair": origin.pair,
            "direction": origin.direction,
            "source": origin.source,
            "source_revision": origin.source_revision,
            "target": origin.target,
            "target_revision": origin.target_revision,
            "tokenizer": tokenizer,
            "mapper": origin.mapper,
        },
        workload=workload,
        figures=measured,
        policy={
            "name": policy.name,
            "bars": dict(policy.bars),
            "when_missed": policy.when_missed,
            "without_record": policy.without_record,
        },
        checks=checks,
        decision=ACCEPT if all(entry.ok for entry in checks) else policy.when_missed,
        date=now(),
    )


def save_approval(record: Approval, folder: Path) -> Path:
    """Write the record beside the mapper, whole or not at all."""
    return save_result(record, folder / FILE)
