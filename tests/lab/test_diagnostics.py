"""Correlations over saved results of several mappers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.conftest import make_host, texts
from workbench.commands import correlate
from workbench.errors import InputError
from workbench.lab import diagnostics, heads, retention
from workbench.lab.diagnostics import Dot, correlations, summary
from workbench.lab.provenance import save_result
from workbench.lab.results import Figure, finish


def test_r() -> None:
    dots = [
        Dot(str(i), "up", {"cosine": kept * 2 + 1, "r2_k": -kept, "flat": 1.0}, kept)
        for i, kept in enumerate((0.1, 0.5, 0.3, 0.9))
    ]
    r = correlations(dots)
    assert r["cosine"] == pytest.approx(1.0) and r["r2_k"] == pytest.approx(-1.0) and r["flat"] != r["flat"]
    assert list(r)[-1] == "flat"


def test_folders(tmp_path: Path) -> None:
    host = make_host()
    quality = finish(retention.stream(host, "up", texts(2), 2, 20, 4))
    maps = finish(heads.stream(host, "up", texts(2), limit=1, length=24, metrics=["r2_k", "cosine"]))
    folders = []
    for i, kept in enumerate((0.2, 0.4, 0.7)):
        setting = replace(quality.settings[0], gap_recovered=Figure(kept, kept, kept))
        folders.append(tmp_path / f"k{i}")
        save_result(replace(quality, settings=(setting,)), folders[-1] / "quality.json")
        save_result(maps, folders[-1] / "heads.json")
    found = summary(folders)
    assert found["against"] == "gap_recovered" and [dot["kept"] for dot in found["dots"]] == [0.2, 0.4, 0.7]
    assert "cosine" in correlate.show({**found, "r": {"cosine": 0.5, "r2_k": None}})
    with pytest.raises(InputError, match="three"):
        diagnostics.dots(folders[:2])
