"""The bench runs its jobs and derives its figures; nothing here depends on how long anything took."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.conftest import texts
from workbench.errors import Cancelled, InputError
from workbench.lab import latency
from workbench.lab.results import LatencyBench, LatencyCell, Step, finish
from workbench.models.pair import PairHost


def test_a_bench_over_two_lengths(host: PairHost) -> None:
    items = list(latency.stream(host, "up", [48, 24, 48], repeats=5, texts=texts(1)))
    bench = items[-1]
    assert [cell.tokens for cell in bench.cells] == [24, 48]
    for cell in bench.cells:
        assert set(cell.samples) == set(latency.JOBS) and all(
            len(runs) == 5 for runs in cell.samples.values()
        )
        assert cell.handoff_ms == sorted(cell.samples["handoff"])[2]
        assert {"map_product", "hold_back", "total"} <= set(cell.parts)
        assert cell.ratio == cell.prefill_ms / cell.handoff_ms
    assert bench.load_ms is None, "this mapper was never saved"
    steps = [item for item in items if isinstance(item, Step)]
    assert [step.fraction for step in steps] == sorted(step.fraction for step in steps)
    assert len(steps[-1].partial.cells) == 1 and steps[-1].fraction == 1.0
    assert bench.environment["threads"] >= 1 and bench.environment["versions"]["torch"]
    assert LatencyBench.from_json(bench.to_json()).to_json() == bench.to_json()


def test_every_job_starts_a_round_in_turn(host: PairHost, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in latency.JOBS:
        real = getattr(latency._Jobs, f"_{name}")

        def noted(self: latency._Jobs, name: str = name, real: object = real) -> object:
            order.append(name)
            return real(self)  # type: ignore[operator]

        monkeypatch.setattr(latency._Jobs, f"_{name}", noted)
    finish(latency.stream(host, "up", [16], repeats=5, texts=texts(1)))
    rounds = [order[i : i + len(latency.JOBS)] for i in range(0, len(order), len(latency.JOBS))]
    assert len(rounds) == 6 and all(sorted(entry) == sorted(latency.JOBS) for entry in rounds)
    assert {entry[0] for entry in rounds} == set(latency.JOBS)


def test_figures_that_are_derived(host: PairHost) -> None:
    base = finish(latency.stream(host, "up", [16], repeats=5, texts=texts(1)))

    def cell(tokens: int, handoff: float, prefill: float) -> LatencyCell:
        return LatencyCell(tokens, handoff / 2, handoff, prefill, prefill + 1, handoff / 4)

    bench = replace(base, cells=(cell(64, 30, 20), cell(256, 40, 60), cell(1024, 100, 400)))
    assert bench.cells[2].ratio == 4 and bench.cells[2].net_saving_ms == 300
    assert bench.cells[2].ratio_first_token == 4.01
    assert bench.gemm_fraction == 0.5
    assert bench.break_even == pytest.approx(64 + 192 * 10 / 30)
    assert replace(base, cells=(cell(64, 10, 20),)).break_even == 0
    assert replace(base, cells=(cell(64, 30, 20),)).break_even is None
    assert math.isnan(replace(base, cells=()).gemm_fraction)


def test_stopping_and_wrong_input(host: PairHost) -> None:
    with pytest.raises(Cancelled):
        list(latency.stream(host, "up", [16], texts=texts(1), should_stop=lambda: True))
    for options in ({"lengths": []}, {"lengths": [1]}, {"lengths": [10**6]}, {"lengths": [16], "repeats": 4}):
        with pytest.raises(InputError):
            list(latency.stream(host, "up", texts=texts(1), **options))  # type: ignore[arg-type]


def test_dropping_the_page_cache_of_a_missing_file_is_no_fault(tmp_path: Path) -> None:
    latency.drop_from_page_cache(tmp_path / "nothing")
