"""Figures hold the numbers of their results, show strangers' text literally, and can be put in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench import plots
from workbench.lab.provenance import Provenance, load_precomputed
from workbench.lab.results import (
    METRICS,
    Arm,
    Comparison,
    Evaluation,
    Figure,
    HeadMaps,
    LatencyBench,
    LatencyCell,
    Setting,
)
from workbench.lab.results.latency import Terms

EVIL = '<img src=x onerror="alert(1)">\u202e\u200b%{x}'
ORIGIN = Provenance("2026-01-01T00:00:00+00:00", "a processor", {}, "pair", "up", "s", "t", "r", "r", "m", 10)
ACCOUNT: dict[str, Any] = {
    "source": EVIL, "target": "large", "how": "mapped", "tokens": 100, "reused": 0, "mapped": 80,
    "native": 20, "anchors": 4, "hold_back": 16, "reason": "", "prefill_ms": 90.0,
    "prefill_source": "measured",
    "ms": {"anchors": 5.0, "map_strip": 1.0, "map_product": 4.0, "map_rotate": 2.0, "hold_back": 6.0,
           "total": 20.0},
}  # fmt: skip


def maps() -> HeadMaps:
    values = {name: np.full((4, 2 if m.per == "kv" else 6), 0.5) for name, m in METRICS.items()}
    values["r2_k"][1, 1] = np.nan
    values["r2_k"][3, 0] = -7.0
    values["k_error_in_q"][2, 1] = 64.0
    return HeadMaps(values, 4, 2, 6, 100, 2, 4, 385, ORIGIN)


def bench() -> LatencyBench:
    samples = {"handoff": (9.0, 10.0, 11.0, 30.0, 10.0)}
    cells = (LatencyCell(64, 5, 10, 20, 21, 4, {}, samples), LatencyCell(1024, 50, 100, 500, 520, 40))
    return LatencyBench(cells, 12.0, 8.0, 4, 16, 5, {}, ORIGIN)


def comparison() -> Comparison:
    return Comparison(
        context="c",
        context_tokens=9,
        names={"mapped": EVIL, "prefill": EVIL, "source": "s"},
        token_ids={"mapped": (1, 2, 9), "prefill": (1, 2, 3), "source": (1, 7, 7)},
        pieces={"mapped": ("a", "b", "z"), "prefill": ("a", "\n", EVIL), "source": ("a", "q", "q")},
        kl={"mapped": (0.0, 0.1, 0.5), "source": (0.2, 1.0, 2.0)},
        top1={"mapped": (True, True, False), "source": (True, False, False)},
        finished=dict.fromkeys(("mapped", "prefill", "source"), False),
        done=True,
        account=ACCOUNT,
        provenance=ORIGIN,
    )


def evaluation() -> Evaluation:
    def arm(ce: float, kl: float) -> Arm:
        return Arm(Figure(ce, ce - 0.1, ce + 0.2), Figure(kl, kl, kl + 0.1), Figure(0.9, 0.8, 1.0), 4)

    fixed = {"native": arm(3, 0), "source": arm(4, 0.7), "no_context": arm(5, 0.9)}
    arms = {"mapped": arm(3.2, 0.1), "zero": arm(4.5, 0.8), "wrong_document": arm(4.4, 0.7)}
    return Evaluation(
        fixed,
        (Setting(4, 1, arms, Figure(0.9, 0.8, 1.0)),),
        ({"name": "a", "sha256": "b"},),
        256,
        64,
        0,
        ORIGIN,
    )


ALL = [maps(), bench(), comparison(), evaluation(), ACCOUNT]


@pytest.mark.parametrize("result", ALL, ids=lambda result: type(result).__name__)
def test_every_figure_reads_on_any_background(result: Any) -> None:
    fig = plots.figure(result)
    data = json.loads(fig.to_json())
    assert (
        data["data"] and data["layout"]["paper_bgcolor"] == data["layout"]["plot_bgcolor"] == "rgba(0,0,0,0)"
    )
    assert data["layout"]["font"]["color"] == plots.TEXT and data["layout"]["height"] > 100
    assert data["layout"]["xaxis"]["gridcolor"] == plots.GRID
    text = json.dumps(data, ensure_ascii=False)
    assert "<img" not in text and "\u202e" not in text and "\u200b" not in text


@pytest.mark.parametrize("result", ALL, ids=lambda result: type(result).__name__)
def test_every_figure_in_one_sentence(result: Any) -> None:
    sentence = plots.describe(result)
    assert sentence.endswith(".") and "\n" not in sentence and "nan" not in sentence


@pytest.mark.parametrize("metric", METRICS)
def test_heatmaps_have_fixed_scales_and_true_values_in_the_hover(metric: str) -> None:
    fig = plots.heads(maps(), metric)
    heat, kind = fig.data[0], METRICS[metric]
    assert (heat.zmin, heat.zmax) == (kind.low, kind.high)
    assert len(heat.z) == 4 and len(heat.z[0]) == (2 if kind.per == "kv" else 6)
    if metric == "r2_k":
        assert "-7.000" in heat.text[3][0] and "does not vary" in heat.text[1][1]
        assert (fig.data[1].x[0], fig.data[1].y[0]) == (1, 1), "the head without a value is crossed out"
    if metric == "k_error_in_q":
        assert heat.z[2][1] == 6.0 and "64.000" in heat.text[2][1]


def test_latency_bars_and_ratio() -> None:
    fig = plots.latency(bench())
    assert list(fig.data[1].y) == [10, 100] and list(fig.data[-1].y) == [2.0, 5.0]
    assert list(fig.data[1].error_y.array) == [1.0, 0.0]
    assert list(plots.latency(replace(bench(), cells=())).data[0].y) == []


def test_the_parts_of_a_handoff_add_up_with_what_comes_on_top() -> None:
    cell = replace(
        bench().cells[0],
        parts={"map_product": 4.0, "ends": 5.0, "total": 10.0},
        move_ms=1.0,
        deliver_ms={"memory": 3.0},
        terms=Terms(load_ms=20.0, handoffs=10, rejection_rate=0.5, delivered="memory"),
    )
    fig = plots.latency_parts(replace(bench(), cells=(cell,)))
    assert sum(bar.customdata[0] for bar in fig.data) == pytest.approx(
        10 + 0.5 * 4 + 2 + 0.5 * cell.prefill_ms
    )
    assert sum(bar.y[0] for bar in fig.data) == pytest.approx(100)
    assert "delivered to another process 1.5 ms" in plots.describe_parts(replace(bench(), cells=(cell,)))
    assert plots.describe_parts(replace(bench(), cells=())) == "Nothing measured yet."


def test_tokens_that_would_differ_are_marked() -> None:
    fig = plots.comparison(comparison())
    assert list(fig.data[0].y) == [0.0, 0.1, 0.5]
    assert list(fig.data[1].x) == [2] and list(fig.data[3].x) == [1, 2]
    assert fig.layout.xaxis.ticktext[1] == "⏎"
    assert "first differs at token 3" in plots.describe(comparison())


def test_intervals_of_the_arms() -> None:
    fig = plots.quality(evaluation())
    assert list(fig.data[0].y)[:2] == ["native", "mapped"] and fig.data[0].x[1] == 3.2
    assert fig.data[0].error_x.array[1] == pytest.approx(0.2) and fig.data[0].error_x.arrayminus[
        1
    ] == pytest.approx(0.1)


def test_an_account_says_where_its_prefill_is_from() -> None:
    fig = plots.account(ACCOUNT)
    assert fig.data[-1].name == "true prefill, measured" and fig.data[-1].x[0] == 90
    assert sum(bar.x[0] for bar in fig.data[:-1]) == pytest.approx(20.0), "with the rest as its own part"
    estimated = plots.account(ACCOUNT | {"prefill_source": "estimated"})
    assert (
        estimated.data[-1].name == "true prefill, estimated"
        and estimated.data[-1].marker.pattern.shape == "/"
    )
    fallback = ACCOUNT | {"how": "fallback", "reason": "no mapper.", "ms": {"prefill": 90.0, "total": 90.0}}
    assert len(plots.account(fallback).data) == 1
    assert plots.describe(fallback).startswith("Fallback to a true prefill (no mapper)")


def test_names_of_tasks_are_literal() -> None:
    scores = load_precomputed("embedded", "up", "quality").scores
    spoilt = replace(scores, tasks={EVIL: next(iter(scores.tasks.values()))})
    assert plots.figure(spoilt).layout.yaxis.ticktext[0].startswith("&lt;img")


def test_literal_text() -> None:
    assert plots.safe("a<b>\n\u200b") == "a&lt;b&gt;⏎⟨U+200B⟩"
    assert len(plots.safe("x" * 100, 10)) == 10


def test_saved_results_are_drawn_without_torch() -> None:
    """The page shows precomputed figures before any model library is there."""
    code = (
        "import sys; import workbench.plots, workbench.lab.corpus, workbench.lab.provenance as p; "
        "p.load_precomputed('embedded', 'up', 'heads'); "
        "sys.exit(bool({'torch', 'transformers', 'gradio'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
