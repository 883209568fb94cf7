"""Figures of interventions and of single heads hold the numbers of their results."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workbench import plots
from workbench.lab import tables
from workbench.lab.provenance import Provenance
from workbench.lab.results.head_details import HeadDetails, TokenHit
from workbench.lab.results.patch import KINDS, SHARES, HeadPatches, Prediction

ORIGIN = Provenance("2026-01-01T00:00:00+00:00", "a processor", {}, "pair", "up", "s", "t", "r", "r", "m", 10)
CURVES = {"r2_k": 0.1, "output_error": 0.5, "cosine": math.nan, "random": 0.08, "causal": 0.6}


def patches(predicted: bool = True) -> HeadPatches:
    gain = {kind: np.arange(8.0).reshape(4, 2) / 100 for kind in KINDS}
    layer = {kind: np.arange(4.0) for kind in KINDS}
    repair = {name: {str(s): value * s / 10 for s in SHARES} for name, value in CURVES.items()}
    r = {"r2_k": -0.2, "output_error": 0.8, "cosine": math.nan}
    prediction = Prediction(r, r, repair, 5, {str(s): 1 for s in SHARES}) if predicted else None
    return HeadPatches(
        0.2,
        gain,
        gain["kv"],
        gain,
        gain["kv"],
        layer,
        layer,
        {1: 0.1},
        4,
        2,
        3,
        64,
        8,
        4,
        1,
        2.0,
        prediction,
        ORIGIN,
    )


def details() -> HeadDetails:
    share, other = np.full((4, 2, 8), 1 / 8), np.full((4, 2, 8), math.nan)
    place = np.full((4, 2, 3), 0.25)
    place[1, 1, 0] = math.nan
    hits = tuple(tuple((TokenHit("t", 3, "a", "b", "c", 0.5),) for _ in range(2)) for _ in range(4))
    return HeadDetails(
        share,
        other,
        share,
        share,
        (0, 8, 16, 20),
        (4, 8, 4),
        place,
        place,
        share[..., :5],
        share[..., :5],
        hits,
    )


def test_repair_curve_and_correlation() -> None:
    found = patches()
    assert found.prediction is not None and found.prediction.best_metric == "output_error"
    assert found.order()[0] == (3, 1)
    fig = plots.figure(found)
    drawn = {trace.name: trace for trace in fig.data}
    assert list(drawn["random heads"].y) == pytest.approx([0.8, 4, 8, 16])
    assert drawn["Output error in the residual stream"].line.width == 3
    bars = plots.correlation(found).data[1]
    assert bars.x[list(bars.y).index("R² of keys")] == -0.2 and None in bars.x
    text = plots.describe(found)
    assert "layer 3, KV head 1" in text and "50%" in text
    plain = patches(predicted=False)
    assert "costliest head" in plots.describe(plain)
    for bare in (plots.repair(plain), plots.correlation(plain)):
        assert not bare.data
    assert any(row[0] == "gain.kv.3.1" or "gain" in row[0] for row in tables.rows(found)[1])


def test_one_head() -> None:
    fig = plots.directions(details(), 1, 0)
    assert list(fig.data[0].y) == [1 / 8] * 8 and list(fig.data[1].y) == [None] * 8
    assert plots.directions(details(), 1, 0, "value").data[1].name == "error of the values"
    bars = plots.positions(details(), 1, 1)
    assert list(bars.data[0].x) == ["0–7", "8–15", "16–19"] and list(bars.data[0].y) == [None, 0.25, 0.25]
    whole = plots.one_head(details(), 1, 1)
    assert len(whole.data) == 6 and whole.layout.yaxis.type == "log" and whole.layout.yaxis3.type != "log"
