"""Named pairs, what arguments mean, and what configs say about a pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import tiny_config
from workbench.errors import InputError
from workbench.models import catalog
from workbench.models.catalog import PAIRS, PairRef, artefact_folder, pair_compatibility, resolve


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def saved(folder: Path, kind: str = "llama", **overrides) -> str:
    tiny_config(kind, **overrides).save_pretrained(folder)
    return str(folder)


def test_names_are_unique_and_the_embedded_pair_is_the_default() -> None:
    assert len(PAIRS) == len(catalog._ALL)
    assert resolve().name == "embedded" == next(iter(PAIRS))
    assert all(pair.small != pair.large for pair in PAIRS.values())
    assert "qwen3-0.6b-1.7b" in PAIRS and "llama-3.1-8b-70b" in PAIRS


def test_directions_swap_the_roles() -> None:
    pair = PAIRS["embedded"]
    assert (pair.source("up"), pair.target("up")) == ("embedded:small", "embedded:large")
    assert (pair.source("down"), pair.target("down")) == ("embedded:large", "embedded:small")
    with pytest.raises(InputError, match="sideways"):
        pair.source("sideways")
    assert catalog.direction_to("large") == "up" and catalog.direction_to("small") == "down"


def test_source_and_target_make_a_pair_of_their_own() -> None:
    pair = resolve(source="/models/My Small/", target="b/large.gguf")
    assert (pair.small, pair.large, pair.name) == ("/models/My Small/", "b/large.gguf", "My-Small--large")
    assert "/models" not in pair.title
    assert resolve(source="Qwen/Qwen3-0.6B", target="Qwen/Qwen3-1.7B") is PAIRS["qwen3-0.6b-1.7b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"pair": "nope"}, "no pair 'nope'"), ({"source": "a"}, "Only one"), ({"target": "a"}, "Only one"),
     ({"pair": "embedded", "source": "a", "target": "b"}, "exclude"), ({"direction": "left"}, "left")],
)  # fmt: skip
def test_arguments_that_mean_nothing_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(**arguments)


def test_a_name_cannot_leave_its_folder() -> None:
    for name in ("../up", "a/b", "", ".hidden"):
        with pytest.raises(InputError):
            PairRef(name, "a", "b", "")
    assert resolve(source="..", target="../..").name == "model--model"


def test_an_own_artefact_goes_before_the_shipped_one(own_home: Path) -> None:
    pair = PAIRS["embedded"]
    assert artefact_folder(pair, "up") == catalog.PRECOMPUTED / "embedded" / "up"
    (own_home / "mappers" / "embedded" / "up").mkdir(parents=True)
    assert artefact_folder(pair, "up") == own_home / "mappers" / "embedded" / "up"
    assert artefact_folder(pair, "down") == catalog.PRECOMPUTED / "embedded" / "down"
    assert not catalog.has_artefact(pair, "up")


def test_compatibility_comes_from_configs_alone(tmp_path: Path) -> None:
    small, large = saved(tmp_path / "s"), saved(tmp_path / "l", "qwen3")
    found = pair_compatibility(PairRef("p", small, large, ""))
    assert found.compatible is True and found.reason == ""
    assert (found.small.family, found.large.family) == ("llama", "qwen3")
    other = saved(tmp_path / "o", vocab_size=5000)
    found = pair_compatibility(PairRef("p", small, other, ""))
    assert found.compatible is False and "320" in found.reason and "5,000" in found.reason
    sliding = saved(tmp_path / "w", "mistral", sliding_window=16)
    found = pair_compatibility(PairRef("p", small, sliding, ""))
    assert found.compatible is False and "mistral" in found.reason and "sliding" in found.reason
    found = pair_compatibility(PairRef("p", small, str(tmp_path / "nothing"), ""))
    assert found.compatible is None and "nothing" in found.reason and str(tmp_path) not in found.reason
    found = pair_compatibility(PAIRS["qwen3-0.6b-1.7b"], fetch=False)
    assert found.compatible is True and found.by_catalog and found.matched
    found = pair_compatibility(PairRef("p", "nobody/nothing", "nobody/more", ""), fetch=False)
    assert found.compatible is None and "not on this machine" in found.reason
