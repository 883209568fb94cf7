"""Approval: an exact tuple and a workload are approved, or they are not: the policy's bars and the record. No torch.

    policy -> bars -> checks -> accept | warn | refuse -> `approval.json` beside the mapper

The unit is (source revision, target revision, tokenizer, direction, mapper) and what it was evaluated on; a record of
another mapper or of other weights approves nothing. A policy is a JSON file:

    {"name": "…", "bars": {"mean_retention": 0.95, "worst_retention": 0.9, …},
     "when_missed": "refuse" | "warn", "without_record": "refuse" | "warn" | "accept"}

Bars that are left out are not checked; a bar whose figure was not measured is missed. A refused pair is still served, by
a true prefill, and says so. `lab/approval.py` makes a record out of an evaluation, `chat/policy.py` acts on it.
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
        data["figures"] = {name: _or_none(value) for name, value in self.figures.items()}
        data["checks"] = [{**entry, "value": _or_none(entry["value"])} for entry in data["checks"]]
        return {"format": 1, **data}

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
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
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


def _or_none(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def _shown(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.3g}"
