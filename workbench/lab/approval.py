"""Approval: an exact tuple and a workload are approved, or they are not. No torch.

    evaluation + policy -> checks -> accept | warn | refuse -> `approval.json` beside the mapper

The unit is (source revision, target revision, tokenizer, direction, mapper) and what it was evaluated on; a record of
another mapper or of other weights approves nothing. A policy is a JSON file:

    {"name": "…", "bars": {"mean_retention": 0.95, "worst_retention": 0.9, …},
     "when_missed": "refuse" | "warn", "without_record": "refuse" | "warn" | "accept"}

Bars that are left out are not checked; a bar whose figure was not measured is missed. A refused pair is still served, by
a true prefill, and says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import InputError
from workbench.lab.provenance import now, save_result, text_hash
from workbench.lab.results.common import jsonable
from workbench.lab.results.quality import Evaluation

FILE = "approval.json"
ACCEPT, WARN, REFUSE = "accept", "warn", "refuse"
LARGEST = 1_000_000  # bytes of a policy or a record

BARS: dict[str, tuple[str, bool]] = {
    "mean_retention": ("mean retention over the informative tasks", True),
    "worst_retention": ("retention of the worst informative task", True),
    "worst_retention_floor": ("the same with chance set to 0", True),
    "multi_turn_recall": ("multi-turn recall against native", True),
    "informative_tasks": ("number of tasks in which the context matters", True),
    "items": ("items of the smallest task", True),
    "controls_below": ("wrong-document and zero arms below mapped, intervals apart (1: yes)", True),
    "gap_recovered": ("share of the context's worth that is kept, in likelihood", True),
    "kl": ("mean KL to the target's own cache, nats", False),
    "drift_ratio": ("KL after the last switch over the KL of one switch", False),
}
"""Bars: name -> (what it is, whether more is better)."""


@dataclass(frozen=True)
class Policy:
    """What a pair must reach.

    Attributes:
        name: for people.
        bars: name of a figure -> least value, or largest where less is better.
        when_missed: decision when a bar is missed, "refuse" or "warn".
        without_record: decision for a pair without a record, "refuse", "warn" or "accept".
    """

    name: str = "default"
    bars: Mapping[str, float] = field(
        default_factory=lambda: {"mean_retention": 0.95, "worst_retention": 0.9, "controls_below": 1.0}
    )
    when_missed: str = WARN
    without_record: str = WARN

    def __post_init__(self) -> None:
        """Raises `InputError`, naming what is wrong."""
        for name, bar in self.bars.items():
            if name not in BARS:
                raise InputError(
                    f"The policy has an unknown bar {name[:40]!r}.", f"There are: {', '.join(BARS)}."
                )
            if isinstance(bar, bool) or not isinstance(bar, (int, float)) or not math.isfinite(bar):
                raise InputError(f"The policy's bar {name!r} must be a number.")
        if self.when_missed not in (WARN, REFUSE):
            raise InputError("The policy's when_missed must be warn or refuse.")
        if self.without_record not in (ACCEPT, WARN, REFUSE):
            raise InputError("The policy's without_record must be accept, warn or refuse.")


def read_policy(path: Path) -> Policy:
    """A policy file.

    Raises:
        InputError: missing, no JSON, or with a field that is wrong.
    """
    data = _read(path, "policy")
    unknown = sorted(set(data) - {"name", "bars", "when_missed", "without_record"})
    if unknown:
        raise InputError(f"The policy has an unknown field {unknown[0][:40]!r}.")
    if not isinstance(data.get("bars", {}), dict):
        raise InputError("The policy's bars must be an object of names and numbers.")
    return Policy(**data)


@dataclass(frozen=True)
class Check:
    """One bar: what is asked, what was measured (NaN: was not), and whether it is reached."""

    name: str
    bar: float
    value: float
    ok: bool


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


def check(policy: Policy, measured: Mapping[str, float]) -> tuple[Check, ...]:
    """Every bar of a policy against what was measured."""
    checks = []
    for name, bar in policy.bars.items():
        value = measured.get(name, math.nan)
        ok = value >= bar if BARS[name][1] else value <= bar
        checks.append(Check(name, float(bar), value, bool(ok)))
    return tuple(checks)


@dataclass(frozen=True)
class Approval:
    """The record.

    Attributes:
        tuple_: pair, direction, source, target, both revisions, tokenizer, mapper (SHA-256): what is approved.
        workload: hashes of what was measured, items, anchors, hold-back, seed.
        figures: what was measured.
        policy: name, bars and decisions of the policy.
        checks: every bar.
        decision: "accept", "warn" or "refuse".
        date: ISO, UTC.
    """

    tuple_: dict[str, str]
    workload: dict[str, Any]
    figures: dict[str, float]
    policy: dict[str, Any]
    checks: tuple[Check, ...]
    decision: str
    date: str

    @property
    def missed(self) -> tuple[Check, ...]:
        """The bars that are not reached."""
        return tuple(entry for entry in self.checks if not entry.ok)

    def sentence(self) -> str:
        """For a badge's tip and the account: the decision, why, when."""
        words = {ACCEPT: "Approved", WARN: "Approved with a warning", REFUSE: "Not approved"}
        why = "; ".join(
            f"{BARS[c.name][0]} is {_shown(c.value)}, the bar {_shown(c.bar)}" for c in self.missed
        )
        return f"{words[self.decision]} on {self.date[:10]}{': ' + why if why else ', all bars reached'}."

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = asdict(self)
        data["tuple"] = data.pop("tuple_")
        return jsonable({"format": 1, **data})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Approval:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is no record.
        """
        if data["format"] != 1 or data["decision"] not in (ACCEPT, WARN, REFUSE):
            raise ValueError("unknown format or decision")
        checks = tuple(
            Check(str(c["name"]), float(c["bar"]), math.nan if c["value"] is None else float(c["value"]), c["ok"] is True)
            for c in data["checks"]
            if c["name"] in BARS
        )  # fmt: skip
        return cls(
            {str(k): str(v) for k, v in data["tuple"].items()},
            dict(data["workload"]),
            {str(k): math.nan if v is None else float(v) for k, v in data["figures"].items()},
            dict(data["policy"]),
            checks,
            data["decision"],
            str(data["date"]),
        )


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


def load_approval(folder: Path) -> tuple[Approval | None, str]:
    """The record beside a mapper.

    Returns:
        (record, "") when there is one for exactly this mapper, else (None, why not).
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return None, "This pair has not been evaluated against a policy yet."
    try:
        record = Approval.from_json(_read(path, "approval record"))
        manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
        stored = {
            "mapper": manifest["tensors_sha256"],
            "direction": manifest["direction"],
            "source_revision": manifest["source"]["revision"],
            "target_revision": manifest["target"]["revision"],
            "tokenizer": manifest["target"]["tokenizer"],
        }
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, "The approval record of this pair cannot be read."
    for name, value in stored.items():
        if record.tuple_.get(name) != value:
            return (
                None,
                f"The approval record is of another {name.replace('_', ' ')} than the one that is here.",
            )
    return record, ""


def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        if os.stat(path).st_size > LARGEST:
            raise InputError(f"The {what} {path.name!r} is too large.")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"Cannot read the {what} {path.name!r}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise InputError(f"The {what} {path.name!r} is no JSON.", "Check the file.") from None
    if not isinstance(data, dict):
        raise InputError(f"The {what} {path.name!r} must be a JSON object.")
    return data


def _shown(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.3g}"
