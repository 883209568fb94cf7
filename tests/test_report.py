"""Exports and reports: nothing from outside is asked for, nothing that was written runs, formulas are dead."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_plots import EVIL, ORIGIN, bench, comparison, evaluation, maps
from workbench import plots, report
from workbench.__main__ import main
from workbench.chat.transcript import markdown
from workbench.lab import tables
from workbench.lab.provenance import save_result
from workbench.lab.summary import gather, key_figures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Saved results of all four kinds with a manifest."""
    place = tmp_path / "up"
    for kind, result in (
        ("heads", maps()),
        ("latency", bench()),
        ("quality", evaluation()),
        ("compare", comparison()),
    ):
        save_result(result, place / f"{kind}.json")
    (place / "manifest.json").write_text(json.dumps({"tensors_sha256": "m", "note": EVIL}))
    return place


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\n=1"])
def test_cells_that_start_a_formula_are_plain(text: str) -> None:
    written = next(csv.reader(io.StringIO(tables.csv_text([text], []))))
    assert written[0].startswith("'")
    assert tables.plain_cell(-1.5) == -1.5 and tables.plain_cell("a=b") == "a=b"


def test_tables_hold_the_numbers() -> None:
    head, rows = tables.rows(maps(), "r2_k")
    assert head[-1] == "value" and len(rows) == maps().metrics["r2_k"].size
    assert rows[0][-1] == pytest.approx(float(maps().metrics["r2_k"][0, 0]), nan_ok=True)
    head, rows = tables.rows(bench())
    assert [row[0] for row in rows] == [cell.tokens for cell in bench().cells]
    head, rows = tables.rows(evaluation())
    assert {"native", "mapped"} <= {row[2] for row in rows}
    head, rows = tables.rows(comparison())
    assert len(rows) == len(comparison().pieces["prefill"])
    assert "nan" not in tables.csv_text(*tables.rows(maps())).lower()

    class New:
        def to_json(self) -> dict[str, Any]:
            return {"turns": [{"n": 1, "kl": 0.5}], "provenance": {"x": 1}}

    assert tables.rows(New()) == (["path", "value"], [["turns[0].n", 1], ["turns[0].kl", 0.5]])


def test_a_report_is_whole_and_inert(folder: Path) -> None:
    run = gather("pair", "A pair", "up", folder)
    assert list(run.results) and not run.problems
    text = report.render(run, library=report.MARKER)
    assert EVIL not in text and "<img" not in text
    assert (
        not re.search(r"""(?:src|href)=["'](?!data:|https://arxiv\.org/abs/)""", text)
        and "@import" not in text
    )
    assert not re.search(r"<(?!a )[^>]*arxiv\.org", text), "an address to read, nothing that is fetched"
    for word in (
        "What mapping keeps",
        "What the switch costs",
        "Where this was measured",
        "References",
        "tensors_sha256",
    ):
        assert word in text
    drawn = re.findall(r'data-of="([\w-]+)"', text)
    assert drawn and all(f'id="{name}"' in text for name in drawn)
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S):
        json.loads(data)
    whole = report.render(run)
    assert len(whole) > 3_000_000 and report.MARKER not in whole and whole.count("<script>") == 2


def test_a_report_stands_beside_a_folder_and_beside_a_report(folder: Path, tmp_path: Path) -> None:
    run = gather("pair", "A pair", "up", folder)
    first = tmp_path / "first.html"
    first.write_text(report.render(run, library=report.MARKER), encoding="utf-8")
    for place in (folder, first):
        other = report.load_other(place, run)
        assert key_figures(other.results) == key_figures(run.results)
        text = report.render(run, other, "the other", report.MARKER)
        assert text.count("the other") > len(run.results)
        rows = text.count('<div class="beside')
        assert rows == len(maps().metrics) + 3, "each figure stands in one row with that of the other run"
        drawn = re.findall(r'<div class="beside.*?(?=<div class="beside|<details)', text, re.S)
        assert all(row.count('class="figure"') == 2 for row in drawn) and len(drawn) == rows
    with pytest.raises(Exception, match="no report"):
        report.load_other(folder / "manifest.json", run)


def test_long_tables_stay_folded_on_paper() -> None:
    head = ["n"]
    assert "data-long" not in report._table(head, [[n] for n in range(report.LONGEST_PRINTED)])
    assert "data-long" in report._table(head, [[n] for n in range(report.LONGEST_PRINTED + 1)])
    assert '<td class="long">' in report._table(head, [["a" * 64]]) and "long" not in report._table(
        head, [["a b " * 30]]
    )


def test_a_damaged_result_is_named_and_the_rest_is_shown(folder: Path) -> None:
    (folder / "heads.json").write_text("{}")
    run = gather("pair", "A pair", "up", folder)
    assert "heads.json" in run.problems[0] and "latency" in run.results
    assert "heads.json" in report.render(run, library=report.MARKER)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.html"
    assert (
        main(["report", "--mapper", str(folder), "--out", str(out), "--compare", str(folder), "--json"]) == 0
    )
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["out"] == str(out) and said["bytes"] == out.stat().st_size and said["compared"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["report", "--mapper", str(empty), "--out", str(out)]) == 2
    assert "Nothing was saved" in capsys.readouterr().err


def test_no_torch_is_needed() -> None:
    names = "workbench.report, workbench.chat.transcript, workbench.lab.tables"
    code = f"import sys, {names}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_conversation_as_markdown_is_literal() -> None:
    account = {"source": "a|b", "target": "c", "how": "fallback", "tokens": 9, "reused": 0, "mapped": 0, "native": 9,
               "anchors": 0, "hold_back": 0, "ms": {"total": 3.0}, "prefill_ms": None, "prefill_source": "",
               "reason": "no *mapper*"}  # fmt: skip
    data = {
        "pair": "p", "side": "large", "system": None, "sampling": {"greedy": True}, "token_ids": [1, 2],
        "messages": [{"role": "user", "text": "# not a heading\n<b>x</b>", "account": None},
                     {"role": "assistant", "text": "fine", "account": account, "model": "m_1", "side": "large",
                      "how": "fallback"}],
        "accounts": [account],
    }  # fmt: skip
    text = markdown(data)
    assert ">     # not a heading" in text and "a\\|b" in text and "no \\*mapper\\*" in text
    assert not re.search(r"^# not", text, re.M)


def test_on_paper_is_dark_on_white() -> None:
    figure = report.on_paper(plots.heads(maps(), "r2_k"))
    assert figure.layout.paper_bgcolor == "#ffffff" and figure.layout.font.color == "#1f2733"
    assert np.isfinite(figure.layout.height) and ORIGIN.pair == "pair"
