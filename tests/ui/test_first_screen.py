"""What the first screen, the replay, the slides and the links are made of: pure functions of saved results."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_plots import EVIL, bench, comparison, evaluation, maps
from tests.ui.recorded import ACCOUNT, recording
from workbench.lab.provenance import save_result
from workbench.lab.summary import Run, gather, key_figures
from workbench.ui import gallery, links, slides
from workbench.ui.replay import replay_value
from workbench.words import TERMS

MANIFEST = {
    "key_layers": [[0, 1], [1, 2]],
    "held_out": {"r2_k": 0.8, "r2_v": 0.7},
    "calibration": {"tokens": 9000},
}


def whole(**changes: Any) -> Run:
    results = {"heads": maps(), "latency": bench(), "quality": evaluation(), "compare": comparison(),
               "recording": recording()}  # fmt: skip
    return Run("pair", EVIL, "up", {**results, **changes}, MANIFEST)


def test_key_figures_are_those_of_the_results() -> None:
    shown = {figure.term: figure.shown for figure in key_figures(whole().results)}
    assert shown["prefill"] == "5.0×" and shown["KL"] == "0.100" and shown["gap recovered"] == "90%"
    assert set(shown) <= set(TERMS) and key_figures({}) == []


def test_a_card_says_what_when_and_where_and_is_inert() -> None:
    text = gallery.card(whole())
    assert "5.0×" in text and "2026-01-01" in text and "a processor" in text
    assert "<img" not in text and "direction=up" in text


def test_the_first_screen_without_any_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "measured_pairs", list)
    text = gallery.welcome()
    assert "Nothing has been measured yet" in text and "<svg" in text


def test_slides_tell_the_story_and_name_what_is_missing() -> None:
    made = slides.slides(whole(), loaded=True, question="why?")
    assert len(made) == 6 and not any(EVIL in each or "<img" in each for each in made)
    assert "500 ms" in made[0] and "80%" in made[1] and "Switch live<" in made[2] and "5.0 times" in made[5]
    bare = slides.slides(Run("p", "t", "down", {}, {}), loaded=False, question="why?")
    assert "bench --save" in bare[0] and "workbench fit" in bare[1] and "loads the models first" in bare[2]
    assert "compare --save" in bare[3] and "heads --save" in bare[4]
    named = slides.slides(Run("embedded", "t", "down", {}, {}), loaded=False, question="why?")
    assert "bench --save --pair embedded --direction down<" in named[0] and "--pair" not in bare[0]


def test_colours_run_from_worst_to_best() -> None:
    assert slides.colour(0.0) == "rgb(68,1,84)" and slides.colour(1.0) == "rgb(253,231,37)"
    scale = {"low": 0.25, "high": 4.0, "log": True, "reverse": True}
    assert slides.position(4.0, scale) == 0.0 and slides.position(0.25, scale) == 1.0
    assert slides.position(1.0, scale) == pytest.approx(0.5)


def test_a_replay_keeps_every_piece_and_its_time() -> None:
    value = replay_value(recording())
    assert value is not None and replay_value(None) is None
    first, second = value["turns"]
    assert first["pieces"] == [[10.0, "one "], [30.0, "two"]] and first["switch"] is None
    assert second["switch"]["ms"] == ACCOUNT["ms"]["total"] and "mapped" in second["switch"]["note"]
    assert "Recorded" in value["label"] and "saved" in second["switch"]["account"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"tab": "heads", "direction": "down", "metric": "r2_v", "layer": "3", "head": "1"},
         ("heads", "down", "r2_v", (3, 1))),
        ({"tab": EVIL, "direction": "sideways", "metric": "x", "layer": "-1", "head": "1"}, (None,) * 4),
        ({"layer": "99999999999999999999", "head": "0"}, (None,) * 4),
        ({"layer": "²", "head": "1"}, (None,) * 4),
        ({"layer": "1"}, (None,) * 4),
    ],
)  # fmt: skip
def test_only_what_there_is_is_taken_from_an_address(
    query: dict[str, str], expected: tuple[Any, ...]
) -> None:
    link = links.read(query, ("chat", "heads"))
    assert (link.tab, link.direction, link.metric, link.head) == expected


def test_an_address_chooses_among_measured_pairs_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = SimpleNamespace(name="other")
    monkeypatch.setattr(links, "measured_pairs", lambda: [(other, "up", tmp_path)])
    engine = SimpleNamespace(start_ref=lambda: SimpleNamespace(name="embedded"))
    for name, wanted in (("other", other), ("qwen3-8b-32b", None), ("../x", None)):
        visit = SimpleNamespace(wanted=None, head=None)
        links.read({"pair": name}, ()).choose(engine, visit)
        assert visit.wanted is wanted


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    save_result(bench(), tmp_path / "latency.json")
    run = gather("pair", "t", "up", tmp_path)
    assert list(run.results) == ["latency"] and run.provenance is not None
    assert run.results["latency"].provenance.origin == "precomputed" and run.manifest == {}


def test_every_word_of_the_screens_has_an_explanation() -> None:
    """`term("…")` with a word that is not in the glossary would fail only when that tab is opened."""
    root = Path(gallery.__file__).parent
    used = {
        word
        for path in root.glob("*.py")
        for word in re.findall(r"\bterm\(\s*['\"]([^'\"]+)['\"]", path.read_text("utf-8"))
    }
    assert used and used <= set(TERMS), used - set(TERMS)
    assert all(text.endswith(".") and len(text) < 180 for text in TERMS.values())
