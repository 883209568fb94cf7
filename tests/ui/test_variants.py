"""The part of the Quality tab on mapper variants: figure, menu, table, files, report, all from saved results."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_plots import EVIL, ORIGIN
from workbench import plots, report
from workbench.lab import tables
from workbench.lab.provenance import save_result
from workbench.lab.results import Figure, Variant, Variants
from workbench.lab.summary import gather
from workbench.ui import variants as part

NOTHING = Figure(math.nan, math.nan, math.nan)


def saved(direction: str = "up", informative: bool = True) -> Variants:
    """Five mappers, of which one re-reads; the cosine foretells retention, attention KL the KL."""
    shift = 0.0 if direction == "up" else 0.05
    found = []
    for i, kept in enumerate((0.2, 0.5, 0.6, 0.9, 0.95)):
        metrics = {"cosine": kept + shift, "attention_kl": (1 - kept) ** 3, "r2_k": -float(i % 2)}
        retention = Figure(kept, kept - 0.1, kept + 0.1) if informative else NOTHING
        kl = Figure((1 - kept) ** 3, 0.0, 1.0)
        settings = {"k": 4, "ridge": 0.01, "rank": 0, "objective": EVIL, "noise": 0.1}
        found.append(Variant(f"v{i}", settings, metrics, retention, kl, Figure(kept, kept, kept), {}, i == 4))
    tasks = {"fact_recall": Figure(0.8, 0.7, 0.9)}
    counts = {"head_tokens": 100, "following_tokens": 64, "fact_recall": 40}
    origin = replace(ORIGIN, direction=direction)
    return Variants(
        tuple(found), tasks, tasks, tasks, {"fact_recall": informative}, counts, 48, 0, 9.0, origin
    )


BOTH = [saved("up"), saved("down")]


def test_the_figure_has_a_symbol_a_group_and_says_r() -> None:
    fig = plots.variants(BOTH)
    assert [trace.name for trace in fig.data] == ["pair, small → large", "pair, large → small"]
    assert fig.data[0].marker.symbol[0] != fig.data[1].marker.symbol[0]
    assert fig.data[0].marker.symbol[-1] == "circle-open" and fig.layout.xaxis.title.text.startswith(
        "Attention output"
    )
    assert "8 mappers" in fig.layout.annotations[0].text and next(iter(fig.data[0].y)) == 0.2
    text = json.dumps(json.loads(fig.to_json()), ensure_ascii=False)
    assert "<img" not in text and "noise 10%" in text
    against = plots.variants(BOTH, "attention_kl", "minus_kl")
    assert against.layout.yaxis.autorange == "reversed" and "r = -1.00" in against.layout.annotations[0].text
    empty = plots.variants(saved(informative=False))
    assert "no r" in empty.layout.annotations[0].text and empty.data[0].y[0] is None


def test_in_a_sentence_a_table_and_a_report(tmp_path: Path) -> None:
    one = BOTH[0]
    assert "R² of keys against retention" in plots.describe(one, "r2_k")
    assert "foretells it best: r = 1.00" in plots.describe(one, "r2_k")
    head, rows = tables.rows(one)
    assert len(rows) == 5 and {"cosine", "retention_low", "kl", "noise"} <= set(head)
    folder = save_result(one, tmp_path / "up" / "variants.json").parent
    text = report.render(gather("pair", "Pair", "up", folder), library="")
    assert "Which diagnostic foretells what is kept" in text and "<img" not in text


def test_the_menu_opens_on_the_best_metric_and_says_so() -> None:
    metric, choices = part.choose(BOTH, None, "retention")
    assert metric == "cosine" and choices[0] == (
        "Attention output, mean cosine – foretells it best",
        "cosine",
    )
    assert part.choose(BOTH, "r2_k", "retention")[0] == "r2_k"
    assert part.choose(BOTH, EVIL, "minus_kl")[0] == "attention_kl"
    assert "mean cosine</b>" in part.lead(BOTH, "retention") and "8 mappers" in part.lead(BOTH, "retention")
    none = [saved(informative=False)]
    assert "too few mappers" in part.lead(none, "retention") and part.choose(none, None, "retention")[0]
    assert "does not count" in part.view(none, "retention")


def test_the_table_has_every_metric_and_the_papers_figures() -> None:
    page = part.view(BOTH, "retention")
    for word in ("r, pair, small → large", "Attention pattern, KL", "r of R² with retention -0.20", "cosine +0.57",
                 "40 items of planted fact", "rank correlation", "1.00 <span"):  # fmt: skip
        assert word in page, word
    assert "r, pair" not in part.view(BOTH[:1], "retention")


@pytest.mark.parametrize("format", ["html", "svg", "png", "csv", "json"])
def test_files(format: str) -> None:
    made = part.variants_file(BOTH, "cosine", "retention", format)
    assert made["name"].endswith(f".{format}")
    if format == "csv":
        rows = list(csv.DictReader(io.StringIO(made["text"])))
        assert len(rows) == 10 and {row["direction"] for row in rows} == {"up", "down"}
    elif format == "json":
        assert len(json.loads(made["text"])["results"]) == 2
    elif format == "html":
        assert "Attention output" in made["text"] and "<img" not in made["text"]
    else:
        assert made["height"] > 100 and json.loads(made["figure"])["data"]


def test_every_pair_and_direction_is_found_and_a_page_without_results_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(name="other")
    save_result(BOTH[1], tmp_path / "variants.json")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "variants.json").write_text("{")
    places = [(other, "down", tmp_path), (other, "up", tmp_path / "broken")]
    monkeypatch.setattr(part, "measured_pairs", lambda: places)
    monkeypatch.setattr(part, "visit_of", lambda engine, key: (key, None))
    mine: dict[str, Any] = {"up": BOTH[0]}
    monkeypatch.setattr(part, "saved", lambda engine, key, way, kind: (mine.get(way), ""))
    engine: Any = SimpleNamespace(
        look=lambda visit: SimpleNamespace(ref=SimpleNamespace(name="pair")), sentence=str, settings=None
    )
    groups, problems = part.everything(engine, None)
    assert [group.provenance.direction for group in groups] == ["up", "down"] and len(problems) == 1
    tab = part.VariantsPart(engine)
    for name in ("lead", "menus", "metric", "outcome", "figure", "origin", "table"):
        setattr(tab, name, name)
    shown = tab.open(None, None, "retention")
    assert (
        shown["figure"]["visible"]
        and shown["metric"]["value"] == "cosine"
        and "holds no variants" in shown["lead"]
    )
    mine.clear()
    places.clear()
    shown = tab.open(None, "cosine", "nonsense")
    assert not shown["figure"]["visible"] and not shown["table"] and "Not measured yet" in shown["lead"]
