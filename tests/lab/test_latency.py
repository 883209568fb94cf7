"""The bench runs its jobs and derives its figures; nothing here depends on how long anything took."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from tests.lab.conftest import make_host, texts
from workbench.errors import Cancelled, InputError
from workbench.lab import latency
from workbench.lab.delivery import ways
from workbench.lab.estimate import saved_prefill_times
from workbench.lab.memory import peak_bytes
from workbench.lab.provenance import load_precomputed, save_result
from workbench.lab.results import LatencyBench, LatencyCell, Step, finish
from workbench.lab.results.latency import Terms, exponent
from workbench.models.pair import PairHost


def test_a_bench_over_two_lengths(host: PairHost, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = latency.Extras(scaling=True, decode=3, rejection_rate=0.25, handoffs=4)
    monkeypatch.setattr(latency, "SCALING_LENGTHS", (24, 64, 10**6))
    monkeypatch.setattr(latency, "other_device", lambda model: torch.device("cpu"))
    items = list(latency.stream(host, "up", [48, 24, 48], texts=texts(1), extras=extras))
    bench = items[-1]
    assert [cell.tokens for cell in bench.cells] == [24, 48]
    for cell in bench.cells:
        assert set(cell.samples) == set(latency.JOBS) and all(
            len(runs) == 9 for runs in cell.samples.values()
        )
        assert cell.handoff_ms == sorted(cell.samples["handoff"])[4]
        assert {"cache", "map_product", "ends", "total"} <= set(cell.parts)
        assert cell.cache_bytes == 3 * 2 * 2 * 16 * 4 * cell.tokens and set(cell.deliver_ms) == set(ways())
        assert cell.peak_bytes and cell.peak_bytes > cell.cache_bytes + cell.source_bytes
        assert cell.ahead_handoff_ms and cell.turn_tokens == cell.tokens // 2 and cell.move_ms is not None
        assert cell.ratio == cell.prefill_ms / cell.handoff_ms
    assert bench.load_ms is None, "this mapper was never saved"
    steps = [item for item in items if isinstance(item, Step)]
    assert [step.fraction for step in steps] == sorted(step.fraction for step in steps)
    assert len(steps[-1].partial.cells) == 2 and steps[-1].fraction == 1.0
    assert [point[0] for point in bench.scaling] == [64] and bench.decode["same_tokens"]
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
    alone = latency.Extras(deliver=False, delivered="")
    finish(latency.stream(host, "up", [16], texts=texts(1), extras=alone))
    jobs = [name for name in latency.JOBS if name not in ("memory", "file", "move")]
    rounds = [order[i : i + len(jobs)] for i in range(0, 10 * len(jobs), len(jobs))]
    assert all(sorted(entry) == sorted(jobs) for entry in rounds)
    assert {entry[0] for entry in rounds} == set(jobs)


def test_figures_that_are_derived(host: PairHost) -> None:
    base = finish(latency.stream(host, "up", [16], texts=texts(1), extras=latency.Extras(False, "")))

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


def test_the_net_saving_subtracts_everything(host: PairHost) -> None:
    cell = LatencyCell(
        1000, 40, 100, 900, 910, 30, move_ms=5, deliver_ms={"memory": 20, "file": 80},
        terms=Terms(load_ms=300, handoffs=10, rejection_rate=0.2, delivered="memory"),
    )  # fmt: skip
    attempt = 100 + 30 + 0.8 * 25 + 0.2 * 900
    assert cell.attempt_ms == pytest.approx(attempt)
    assert cell.net_saving_ms == pytest.approx(900 - attempt)
    assert cell.accepted_ms == pytest.approx(attempt / 0.8)
    assert cell.ratio == 9
    assert replace(cell, terms=Terms()).net_saving_ms == 900 - 100 - 5
    assert LatencyCell.from_json(cell.to_json()) == cell
    assert exponent([(n, 3.0 * n**1.5) for n in (256, 1024, 8000)]) == pytest.approx(1.5)
    assert math.isnan(exponent([(256, 1.0), (1024, 2.0)]))


def test_files_of_earlier_versions_still_load() -> None:
    old = load_precomputed("embedded", "up", "latency")
    if old is None:
        pytest.skip("no saved bench here")
    data = old.to_json()
    for name in ("load_is_cold", "scaling", "decode", "scaling_exponent", "map_exponent"):
        data.pop(name)
    first = {entry.name for entry in fields(LatencyCell)[:8]}
    data["cells"] = [{name: cell[name] for name in first} for cell in data["cells"]]
    bench = LatencyBench.from_json(data)
    assert [cell.tokens for cell in bench.cells] == [cell.tokens for cell in old.cells]
    assert bench.cells[-1].net_saving_ms == bench.cells[-1].prefill_ms - bench.cells[-1].handoff_ms


def test_only_a_bench_of_this_machine_gives_estimates(host: PairHost, tmp_path: Path) -> None:
    bench = finish(latency.stream(host, "up", [16], texts=texts(1), extras=latency.Extras(False, "")))
    fresh = make_host()
    fresh._folders = {"up": tmp_path, "down": tmp_path / "none"}
    assert saved_prefill_times(fresh) == {}
    save_result(bench, tmp_path / "latency.json")
    assert saved_prefill_times(fresh) == {"large": [(16, bench.cells[0].prefill_first_ms)]}
    for name, other in (("processor", "abacus"), ("threads", 99), ("dtype", "float16")):
        save_result(replace(bench, environment=bench.environment | {name: other}), tmp_path / "latency.json")
        assert saved_prefill_times(fresh) == {}
    (tmp_path / "latency.json").write_text("{}")
    assert saved_prefill_times(fresh) == {}, "a damaged file is told elsewhere"


def test_wrong_extras() -> None:
    for wrong in (
        {"rejection_rate": 1.0}, {"rejection_rate": -0.1}, {"handoffs": 0}, {"delivered": "pigeon"}, {"decode": -1},
        {"deliver": False},
    ):  # fmt: skip
        with pytest.raises(InputError):
            latency.Extras(**wrong)  # type: ignore[arg-type]


def test_peak_memory_counts_what_is_held_at_once() -> None:
    def work() -> torch.Tensor:
        torch.zeros(1000, dtype=torch.uint8)  # gone before the next one is made
        kept = torch.zeros(100_000, dtype=torch.uint8)
        torch.zeros(50_000, dtype=torch.uint8)
        return kept

    peak = peak_bytes(work, [torch.device("cpu")])
    assert peak is not None and 150_000 <= peak < 151_500


def test_stopping_and_wrong_input(host: PairHost) -> None:
    with pytest.raises(Cancelled):
        list(latency.stream(host, "up", [16], texts=texts(1), should_stop=lambda: True))
    for options in ({"lengths": []}, {"lengths": [1]}, {"lengths": [10**6]}, {"lengths": [16], "repeats": 8}):
        with pytest.raises(InputError):
            list(latency.stream(host, "up", texts=texts(1), **options))  # type: ignore[arg-type]


def test_dropping_the_page_cache_of_a_missing_file_is_no_fault(tmp_path: Path) -> None:
    assert latency.drop_from_page_cache(tmp_path / "nothing") is False
