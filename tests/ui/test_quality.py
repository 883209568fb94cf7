"""The Quality tab's tables and figures of tasks and drift, and the chat's badge and tally, as the page gets them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lab.conftest import make_host, texts
from tests.lab.test_drift import CHATS
from tests.lab.test_tasks import _short, stories  # noqa: F401
from workbench import plots
from workbench.approval import Policy
from workbench.chat.cascade import Tally
from workbench.lab import approval, drift, retention, scores
from workbench.lab.provenance import load_result, save_result
from workbench.lab.results import finish
from workbench.ui import chat_view, quality


@pytest.fixture(scope="module")
def host() -> Any:
    return make_host(identity=True)


def test_tasks_on_the_screen(host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scores.items, retention):
        monkeypatch.setattr(module, "documents", lambda kind: stories(4))
    *steps, result = quality.evaluation(host, "up", 2, None, 2, None)
    assert all(0 <= step.fraction <= 1 for step in steps) and steps[-1].fraction == 1.0
    page = quality.tasks_view(result.scores) + quality.task_lead(result.scores)
    for word in (
        "Next sentence",
        "chance",
        "retention",
        "source",
        "wrong document",
        "recipe:",
        "No task is informative",
    ):
        assert word in page, word
    saved = load_result(save_result(result, tmp_path / "quality.json"), "quality")
    assert saved.scores.to_json()["tasks"] == result.scores.to_json()["tasks"]
    fig = plots.figure(result.scores)
    assert {trace.name for trace in fig.data} >= {"native", "mapped", "chance"}
    assert "Planted fact" in plots.describe(result.scores)


def test_drift_on_the_screen(host: Any, tmp_path: Path) -> None:
    result = finish(drift.stream(host, "up", turns=2, limit=1, chats=CHATS))
    page = quality.drift_view(result)
    assert "1, to large" in page and "2, to small" in page and "switch" in page
    fig = plots.figure(load_result(save_result(result, tmp_path / "drift.json"), "drift"))
    assert [trace.name for trace in fig.data] == ["after all handoffs so far", "after one switch"]
    assert "handoff 2" in plots.describe(result)


def test_the_badge_says_what_was_decided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from workbench.ui import measuring

    monkeypatch.setattr(measuring, "results_folder", lambda engine, visit, direction: tmp_path / direction)
    assert chat_view.approval_view(None, None).count("not evaluated") == 4  # label and text, both directions
    result = finish(retention.stream(make_host(identity=True), "up", texts(3), 2, 20, 4))
    record = approval.approve(result, Policy(bars={"kl": -1.0}, when_missed="refuse"), "tok")
    approval.save_approval(record, tmp_path / "up")
    sides = {
        s: {"revision": record.tuple_[f"{s}_revision"], "tokenizer": "tok"} for s in ("source", "target")
    }
    manifest = {"tensors_sha256": record.tuple_["mapper"], "direction": "up", **sides}
    (tmp_path / "up" / "manifest.json").write_text(json.dumps(manifest))
    page = chat_view.approval_view(None, None)
    assert "not approved" in page and "the bar -1" in page and page.count("not evaluated") == 2


def test_the_tally_and_a_replaced_answer() -> None:
    assert chat_view.tally_view(None) == "" == chat_view.tally_view(Tally())
    tally = Tally(questions=4, taken_over=1, mapped=321, small_ms=100.0, small_tokens=20)
    assert "<b>1</b> of <b>4</b>" in chat_view.tally_view(
        tally
    ) and "nothing is known" in chat_view.tally_view(tally)
    tally.large_tokens, tally.large_ms, tally.switch_ms, tally.prefill_ms = 10, 300.0, 50.0, 200.0
    page = chat_view.tally_view(tally)
    assert "450 ms</b> saved against always" in page and "150 ms</b> saved against reading" in page
    message = SimpleNamespace(
        role="assistant", side="large", model="m", how="mapped", token_ids=[1], tokens_per_second=None, reused=0,
        native=0, rerun=0, stopped=False, notice="", text="new", uncertainty=0.5, replaced="<b>old</b>", doubt=3.0,
    )  # fmt: skip
    foot = chat_view.message_item(1, message, growing=False)["foot"]
    assert "took over" in foot and "3.00 nats" in foot and "&lt;b&gt;old" in foot
