"""The Fit tab's handlers without a browser: verdicts, estimates, texts, options, stop and resume."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import tiny_config
from workbench.errors import InputError, ModelUnavailableError
from workbench.kv.options import FitOptions
from workbench.lab.calibration import calibration_texts
from workbench.models.catalog import resolve
from workbench.ui.engine import Engine
from workbench.ui.fit import TYPED, FitTab
from workbench.ui.fit_form import number_or_word
from workbench.ui.fit_work import RemainingTime, fit_and_save
from workbench.ui.jobs import StopFlag
from workbench.ui.settings import Settings


@pytest.fixture
def tab(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FitTab:
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path / "home"))
    return FitTab(Engine(Settings(), tiny))


def test_a_verdict_says_what_is_known_and_an_estimate_what_it_takes(tab: FitTab, tmp_path: Path) -> None:
    assert "can be paired" in tab.told("tiny", "", "")
    text = tab.told_fetching("tiny", "", "", "up", 16, 256, "all")
    assert "Estimate" in text and "4,096" in text
    told = tab.told("llama-3.2-1b-3b", "", "")
    assert "as far as the catalog knows" in told and "not equally wide" in told and "Llama 3.2" in told
    for name, kind in (("small", "llama"), ("large", "qwen3")):
        tiny_config(kind).save_pretrained(tmp_path / name)
    typed = (TYPED, str(tmp_path / "small"), str(tmp_path / "large"))
    text = tab.told_fetching(*typed, "down", 16, 256, "2")
    assert "Fits" in text and "sums in memory" in text
    assert "number, all or auto" in tab.told_fetching(*typed, "down", 16, 256, "few")
    tiny_config("mistral", sliding_window=16).save_pretrained(tmp_path / "large")
    assert "sliding window" in tab.told_fetching(*typed, "up", 16, 256, "2")


def test_numbers_and_words() -> None:
    assert number_or_word(" All ", "x", int) == 10**6 and number_or_word("auto", "x", float) is None
    assert number_or_word("0.5", "x", float) == 0.5
    with pytest.raises(InputError, match="ridge"):
        number_or_word("", "The ridge", float)


def test_calibration_texts_come_from_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calibration_texts(None, 10)[1] == "built-in calibration text"
    (tmp_path / "own.txt").write_text("some words " * 50)
    assert calibration_texts([tmp_path / "own.txt"], 10)[1] == "own.txt"
    fineweb = [Path("fineweb-edu")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        calibration_texts(fineweb, 10)
    rows = [{"text": "x" * 60}] * 100
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *a, **k: iter(rows)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailableError, match="HF_HUB_OFFLINE"):
        calibration_texts(fineweb, 10)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    texts, name = calibration_texts(fineweb, 20)
    assert len(texts) == 2 and name.startswith("FineWeb-Edu")

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(ModelUnavailableError, match="ConnectionError"):
        calibration_texts(fineweb, 20)


def test_a_fit_that_was_stopped_goes_on_and_saves(tab: FitTab, tmp_path: Path) -> None:
    from tests.ui.tiny import text
    from workbench.errors import Cancelled

    (tmp_path / "own.txt").write_text("\n\n".join(text(120, seed) for seed in range(16)))
    options = FitOptions(sequences=16, length=96, top_k=10**6, rank=4, objective="attention", anchors=2)
    ref, seen = tab.engine.start_ref(), []
    arguments = (tab.engine, ref, "up", options, [str(tmp_path / "own.txt")])
    stop = StopFlag()

    def post(item: Any) -> None:
        seen.append(item[0])
        if sum("sequences" in text for text in seen) == 4:
            stop.set()

    with pytest.raises(Cancelled):
        fit_and_save(*arguments, post, stop)
    host, gate, report = fit_and_save(*arguments, seen.append, StopFlag())
    assert gate.ok and report.tokens > 100 and host.pair == ref
    assert (tmp_path / "home" / "mappers" / "tiny" / "up" / "manifest.json").is_file()


def test_remaining_time_is_told_once_it_can_be() -> None:
    clock = RemainingTime()
    assert clock.after(0.5) == ""
    clock.start()
    clock._started -= 60  # type: ignore[operator]
    assert clock.after(0.5) == ", about 60 s left" and clock.after(0.9) == ""
    clock._started -= 600  # type: ignore[operator]
    assert "min left" in clock.after(0.5)


def test_a_typed_pair_is_the_one_that_is_used(tab: FitTab) -> None:
    assert tab._ref(TYPED, "a/b", "c/d") == resolve(None, "a/b", "c/d")
    with pytest.raises(InputError, match="Name both"):
        tab._ref(TYPED, "a/b", " ")
