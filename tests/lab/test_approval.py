"""Policies, records and the router's decision; `evaluate` under a policy."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.conftest import make_host, texts
from tests.lab.test_tasks import _short, stories  # noqa: F401
from workbench import approval
from workbench.approval import Approval, Policy
from workbench.chat.conversation import Conversation
from workbench.chat.decode import Sampling
from workbench.chat.handoff import decide
from workbench.chat.policy import judge, verdict
from workbench.commands import common, evaluate
from workbench.errors import InputError
from workbench.lab import corpus, retention, scores
from workbench.lab.approval import approve, save_approval
from workbench.lab.results import finish


@pytest.fixture(scope="module")
def result() -> Any:
    host = make_host(identity=True)
    found = finish(retention.stream(host, "up", texts(3), 3, 30, 8))
    return replace(found, provenance=replace(found.provenance, mapper="a" * 64))


def record(result: Any, **policy: Any) -> Approval:
    return approve(result, Policy(**policy), "tok")


def test_bars_decide(result: Any) -> None:
    good = record(result, bars={"kl": 0.1, "gap_recovered": 0.9})
    assert good.decision == "accept" and not good.missed and "all bars reached" in good.sentence()
    bad = record(result, bars={"kl": 0.1, "worst_retention": 0.9}, when_missed="refuse")
    assert bad.decision == "refuse" and [c.name for c in bad.missed] == ["worst_retention"]
    assert math.isnan(bad.missed[0].value) and "not measured" in bad.sentence()
    assert good.tuple_["mapper"] == "a" * 64 and good.tuple_["direction"] == "up"
    assert set(good.workload) >= {"passages", "tasks", "seed", "anchors", "hold_back"}
    data = json.loads(json.dumps(bad.to_json(), allow_nan=False))
    assert Approval.from_json(data).to_json() == bad.to_json()


def test_decide(result: Any) -> None:
    good, bad = record(result, bars={}), record(result, bars={"kl": -1.0}, when_missed="refuse")
    warned = record(result, bars={"kl": -1.0})
    assert decide(1000, 100, good) == "map" and decide(50, 100, good) == "prefill"
    assert decide(1000, None, good) == "map" == decide(1000, 100, warned)
    assert decide(1000, 100, bad) == "prefill" == decide(1000, 100, None)
    assert "break-even of 100" in verdict(50, 100, good).reason and verdict(1000, 1, warned).warning
    strict = Policy("strict", {"kl": -1.0}, "refuse")
    assert verdict(1000, None, good, strict).how == "prefill", (
        "the policy in force counts, not that of the record"
    )
    assert verdict(1000, None, None, Policy(without_record="accept")).how == "map"


def test_policy_files(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"

    def read(text: str) -> Policy:
        path.write_text(text, encoding="utf-8")
        return approval.read_policy(path)

    assert read('{"name": "x", "bars": {"kl": 0.2}, "when_missed": "refuse"}').bars == {"kl": 0.2}
    for text, word in (
        ("[1]", "object"), ("{", "JSON"), ('{"bar": {}}', "unknown field"), ('{"bars": {"speed": 1}}', "unknown bar"),
        ('{"bars": {"kl": "low"}}', "number"), ('{"when_missed": "shrug"}', "when_missed"), ('{"bars": 3}', "bars"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=word):
            read(text)
    with pytest.raises(InputError, match="Cannot read"):
        approval.read_policy(tmp_path / "none.json")


def test_a_record_is_of_exactly_one_mapper(result: Any, tmp_path: Path) -> None:
    assert "not been evaluated" in approval.load_approval(tmp_path)[1]
    saved = record(result, bars={})
    save_approval(saved, tmp_path)
    sides = {
        side: {"revision": saved.tuple_[f"{side}_revision"], "tokenizer": "tok"}
        for side in ("source", "target")
    }
    manifest = {"tensors_sha256": "a" * 64, "direction": "up", **sides}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert approval.load_approval(tmp_path)[0].to_json() == saved.to_json()
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "tensors_sha256": "b" * 64}))
    assert approval.load_approval(tmp_path) == (
        None,
        "The approval record is of another mapper than the one that is here.",
    )
    (tmp_path / approval.FILE).write_text('{"format": 1}')
    assert "cannot be read" in approval.load_approval(tmp_path)[1]


def test_a_refused_pair_falls_back_visibly() -> None:
    host = make_host()
    chat = Conversation(host, Sampling(max_new_tokens=3))
    list(chat.send("hello"))
    chat.policy = Policy("strict", without_record="refuse")
    account = chat.switch("large")
    assert account.how == "fallback" and account.mapped == 0 and "read again" in account.reason
    list(chat.send("go on"))
    assert chat.messages[-1].how == "fallback"
    assert judge(host, "up", None, 10).how == "map"
    warn = judge(host, "up", Policy("mild", without_record="warn"), 10)
    assert warn.how == "map" and warn.warning


def test_evaluate_with_tasks_and_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(identity=True)
    monkeypatch.setattr(common, "host_from_args", lambda args: (host, "up"))
    monkeypatch.setattr(corpus, "documents", lambda kind: stories(4))
    monkeypatch.setattr(scores.items, "documents", lambda kind: stories(4))
    monkeypatch.setattr(retention, "documents", lambda kind: stories(4))
    policy = tmp_path / "policy.json"
    policy.write_text('{"bars": {"mean_retention": 2.0, "gap_recovered": 0.5}}')
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    options = [
        "--tasks",
        "fact_recall",
        "--limit",
        "4",
        "--passages",
        "3",
        "--context",
        "40",
        "--following",
        "6",
    ]
    found = evaluate.run(parser.parse_args([*options, "--policy", str(policy)]), lambda share, what: None)
    json.dumps(found, allow_nan=False)
    assert found["exit_status"] == 3 and found["missed"] == ["mean_retention"]
    arm = found["tasks"]["fact_recall"]["mapped"]
    assert {"accuracy", "ce", "n", "ci"} <= set(arm) and arm["n"] == 4
    assert found["chance"]["fact_recall"] == 0.25 and found["kl"] < 1e-5
    table = evaluate.show(found)
    assert "fact_recall" in table and "chance" in table and "source" in table
    policy.write_text('{"bars": {"gap_recovered": 0.5}}')
    assert "exit_status" not in evaluate.run(
        parser.parse_args([*options, "--tasks", "none", "--policy", str(policy)]), lambda share, what: None
    )
