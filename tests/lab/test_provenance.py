"""Saved results: whole or not at all, marked as precomputed, and honest about another mapper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.conftest import texts
from workbench.errors import InputError
from workbench.lab import compare, heads, provenance
from workbench.lab.provenance import load_precomputed, load_result, save_result
from workbench.lab.results import finish
from workbench.models.pair import PairHost


def test_saved_and_loaded(host: PairHost, tmp_path: Path) -> None:
    result = finish(compare.stream(host, "up", texts(1)[0].text[:80], tokens=3))
    assert result.provenance.origin == "measured here" and result.provenance.sentence().startswith(
        "Measured here"
    )
    assert (result.provenance.source, result.provenance.target) == ("small", "large")
    save_result(result, tmp_path / "new" / "compare.json")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["compare.json"]
    again = load_precomputed("any", "up", "compare", tmp_path / "new")
    assert again.provenance.origin == "precomputed" and again.texts == result.texts
    assert again.provenance.sentence().startswith("Precomputed on ") and not again.provenance.note
    assert load_precomputed("any", "up", "heads", tmp_path / "new") is None
    assert load_precomputed("no-such-pair", "down", "heads") is None


def test_another_mapper_beside_the_result_is_told(host: PairHost, tmp_path: Path) -> None:
    maps = finish(heads.stream(host, "up", texts(1), limit=1, length=30, metrics=["r2_k"]))
    maps = replace(maps, provenance=replace(maps.provenance, mapper="aa"))
    path = save_result(maps, tmp_path / "heads.json")
    (tmp_path / "manifest.json").write_text(json.dumps({"tensors_sha256": "aa"}))
    assert load_result(path, "heads").provenance.note == ""
    (tmp_path / "manifest.json").write_text(json.dumps({"tensors_sha256": "bb"}))
    assert "another mapper" in load_result(path, "heads").provenance.sentence()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"layers": 3}', "null", '{"provenance": 3}'])
def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, content: str) -> None:
    for kind in ("compare", "heads", "latency", "quality"):
        path = tmp_path / f"{kind}.json"
        path.write_text(content)
        with pytest.raises(InputError) as caught:
            load_result(path, kind)
        assert str(tmp_path) not in str(caught.value)


def test_missing_and_unwritable(host: PairHost, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        load_result(tmp_path / "none.json", "heads")
    (tmp_path / "file").write_text("")
    maps = finish(heads.stream(host, "up", texts(1), limit=1, length=30, metrics=["r2_k"]))
    with pytest.raises(InputError):
        save_result(maps, tmp_path / "file" / "heads.json")


def test_the_environment_names_the_processor() -> None:
    here = provenance.environment("float32")
    assert here.processor and here.threads >= 1 and "float32" in here.sentence()
    assert set(here.versions) >= {"python", "torch", "transformers"}
    assert provenance.text_hash([1, 2]) == provenance.text_hash("1,2")


def test_a_saved_result_says_so_in_all_its_parts() -> None:
    """The tasks have an origin of their own, which must not go on claiming that they were measured here."""
    saved = load_precomputed("embedded", "up", "quality")
    assert saved.provenance.origin == saved.scores.provenance.origin == "precomputed"


def test_json_nested_absurdly_deep_is_damage_like_any_other(tmp_path: Path) -> None:
    """Python's reader raises `RecursionError` for it, which is no `ValueError`; a page must open all the same."""
    from workbench import approval
    from workbench.lab.marks import load_marks, marks_path
    from workbench.lab.summary import read_manifest

    for path in (
        tmp_path / "heads.json",
        tmp_path / "manifest.json",
        marks_path(tmp_path),
        tmp_path / approval.FILE,
    ):
        path.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"heads\.json holds no heads result"):
        load_result(tmp_path / "heads.json", "heads")
    assert read_manifest(tmp_path) == {} and load_marks(tmp_path, "x").heads == ()
    assert approval.load_approval(tmp_path)[0] is None


def test_the_items_of_tasks_are_no_text() -> None:
    """A line under a figure of tasks must not say that all items come from one text."""
    texts = ({"name": "a", "sha256": ""}, {"name": "tasks", "sha256": ""})
    origin = provenance.Provenance("", "", {}, "p", "up", "s", "t", "", "", "", tokens=1234)
    assert replace(origin, texts=texts).measured_on() == "1,234 tokens of 1 text"
    assert replace(origin, texts=texts[1:]).measured_on() == "1,234 tokens"
    assert replace(origin, texts=texts[:1] * 2).measured_on() == "1,234 tokens of 2 texts"
