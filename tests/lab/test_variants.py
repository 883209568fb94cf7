"""Mapper variants: what is fitted, what is shared, correlations against counting by hand, the command, the figures."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.conftest import make_host, texts
from tests.lab.test_tasks import _short, stories  # noqa: F401
from workbench.commands import common
from workbench.commands import variants as command
from workbench.errors import Cancelled, InputError
from workbench.kv import artefact
from workbench.lab import heads, mappers, scores, variant_fits, variants
from workbench.lab.provenance import load_result
from workbench.lab.results import KINDS, Figure, Step, Variant, Variants, finish
from workbench.lab.results.correlation import ranks
from workbench.lab.results.variants import best, correlation, correlations
from workbench.models.pair import PairHost


@pytest.fixture(scope="module")
def host() -> PairHost:
    return make_host()


def spoilt(host: PairHost, shares: tuple[float, ...] = (0.0, 0.3, 1.0)) -> list[variant_fits.Candidate]:
    """The pair's own mapper with more and more noise."""
    own = host.mapper("up")[0]
    return [
        variant_fits.Candidate(f"noise_{share:g}", variant_fits.noisy(own, share, 0), {"noise": share})
        for share in shares
    ]


def measured(host: PairHost, **options: Any) -> Variants:
    settings = {"limit": 4, "length": 40, "following": 6, **options}
    return finish(variants.stream(host, "up", spoilt(host), stories(9), **settings))


def dot(name: str, metric: float, kept: float, reread: bool = False) -> Variant:
    figure, nothing = Figure(kept, kept - 0.1, kept + 0.1), Figure(math.nan, math.nan, math.nan)
    metrics = {"cosine": metric, "attention_kl": metric, "r2_k": 1.0}
    return Variant(name, {"k": 2, "noise": 0.1}, metrics, figure, Figure(1 - kept, 0, 1), nothing, {}, reread)


def test_a_variant_has_the_same_numbers_as_when_it_is_measured_alone(host: PairHost) -> None:
    result = measured(host)
    only = spoilt(host)[1]
    alone = PairHost.from_models(
        host.model("small"), host.model("large"), {"up": (only.mapper, None)}, name="alone"
    )
    documents = stories(9)
    maps = finish(heads.stream(alone, "up", documents[::3], 4, 40))
    one = result.variants[1]
    for name in variants.MEASURED:
        assert one.metrics[name] == pytest.approx(float(maps.metrics[name].mean()), rel=1e-4), name
    others = [text for number, text in enumerate(documents) if number % 3]
    asked = finish(scores.stream(alone, "up", list(variants.TASKS), 4, texts=others))
    for task in variants.TASKS:
        assert one.accuracy[task] == asked.tasks[task].arms["mapped"].accuracy
        assert result.native[task] == asked.tasks[task].arms["native"].accuracy
        assert result.source[task] == asked.tasks[task].arms["source"].accuracy
        assert result.no_context[task] == asked.tasks[task].arms["no_context"].accuracy
    own = mappers.Contestant("one", only.mapper, None)
    table = finish(mappers.stream(alone, "up", [own], others, 4, 40, 6))
    assert one.kl == table.mappers["one"].kl and one.gap_recovered == table.mappers["one"].gap_recovered
    assert result.counts["fact_recall"] == 4 and result.counts["head_tokens"] == maps.tokens


def test_nothing_native_is_computed_again_for_another_variant(
    host: PairHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []  # a cache each
    run_all = variants.Plan.run_all
    monkeypatch.setattr(
        variants.Plan,
        "run_all",
        lambda self, model, caches: runs.extend(caches) or run_all(self, model, caches),
    )
    measured(host)
    contexts = len(variants.items.build(host.model("large").tokenizer, variants.TASKS, 4, 0, stories(9)[1:]))
    assert len(runs) == contexts * (3 + 3), "native, source, no_context once each, and the three variants"


def test_variants_survive_json_and_say_what_is_best(host: PairHost) -> None:
    result = measured(host)
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    again = KINDS["variants"].from_json(data)
    assert again.to_json() == result.to_json()
    assert data["best"]["minus_kl"] == best(correlations(result.variants, "minus_kl")) != ""
    assert data["correlations"]["minus_kl"]["cosine"]["n"] == 3 and data["published"]["r_cosine"] == 0.57


def test_it_can_be_stopped_and_refuses_what_cannot_be_measured(host: PairHost) -> None:
    steps = variants.stream(
        host, "up", spoilt(host), stories(9), 4, length=40, following=6, should_stop=lambda: True
    )
    with pytest.raises(Cancelled):
        list(steps)
    steps = variants.stream(host, "up", spoilt(host), stories(9), 4, length=40, following=6)
    fractions = [item.fraction for item in steps if isinstance(item, Step)]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1.0)
    with pytest.raises(InputError, match="At least 2"):
        list(variants.stream(host, "up", spoilt(host), stories(9), 1))


def test_r_by_hand() -> None:
    x, y = [1.0, 2.0, 4.0, 8.0, 3.0], [2.0, 1.0, 5.0, 5.0, 4.0]
    mx, my = sum(x) / 5, sum(y) / 5
    sxy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    sxx, syy = sum((a - mx) ** 2 for a in x), sum((b - my) ** 2 for b in y)
    found = correlation(tuple(zip(x, y, strict=True)))
    assert found.pearson.value == pytest.approx(sxy / math.sqrt(sxx * syy)) and found.n == 5
    assert found.pearson.low <= found.pearson.value <= found.pearson.high
    assert list(ranks(torch.tensor(y).numpy())) == [1, 0, 3.5, 3.5, 2]
    by_ranks = correlation(tuple(zip([0, 1, 3, 4, 2], [1, 0, 3.5, 3.5, 2], strict=True)))
    assert found.spearman.value == pytest.approx(by_ranks.pearson.value)
    cubed = correlation(tuple((a**3, b) for a, b in zip(x, y, strict=True)))
    assert cubed.spearman == found.spearman and cubed.pearson != found.pearson
    assert not math.isfinite(correlation(((1.0, 2.0), (2.0, 3.0))).pearson.value)
    with_gap = correlation((*zip(x, y, strict=True), (math.nan, 1.0)))
    assert with_gap == found


def test_the_best_metric_points_the_right_way_and_re_reading_does_not_count() -> None:
    dots = [dot(str(i), value, value) for i, value in enumerate((0.1, 0.4, 0.5, 0.9))]
    found = correlations([*dots, dot("shipped", 0.1, 5.0, reread=True)], "retention")
    assert found["cosine"].n == 4 and found["cosine"].pearson.value == pytest.approx(1.0)
    assert list(found) == ["cosine", "attention_kl", "r2_k"] and best(found) == "cosine"
    assert found["attention_kl"].pearson.value == pytest.approx(1.0), "less would be better, so it misleads"
    turned = correlations(
        [dot(one.name, 1 - one.metrics["cosine"], one.retention.value) for one in dots], "minus_kl"
    )
    assert best(turned) == "attention_kl" and not math.isfinite(turned["r2_k"].pearson.value)
    assert best(correlations(dots[:2], "retention")) == ""


def test_fits_come_from_one_reading_an_objective_and_are_kept(
    host: PairHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappers, "documents", lambda kind: texts(8))
    fitted = {name: variant_fits.FITTED[name] for name in ("k1", "ridge_1", "rank_32", "plain_k1")}
    monkeypatch.setattr(variant_fits, "FITTED", fitted)
    sums: list[Path] = []
    real = mappers.fit
    monkeypatch.setattr(mappers, "fit", lambda *a, **k: sums.append(k["state_file"]) or real(*a, **k))
    own = replace(host.mapper("up")[0], familiar=(1, 2, 3), native_layers=1)
    reading = PairHost.from_models(host.model("small"), host.model("large"), {"up": (own, None)})
    found = variant_fits.candidates(reading, "up", tmp_path, sequences=8)
    names = [one.name for one in found]
    assert names == [*fitted, "default", "noise_2", "noise_5", "noise_10", "noise_20", "shipped"]
    assert [path.stem for path in sums] == ["attention"] * 3 + ["plain"]
    assert not list(tmp_path.glob("*.sums*")), "sums are large, and not needed any more"
    assert [one.name for one in found if one.mapper.familiar or one.reread] == ["shipped"]
    assert [one.name for one in found if one.mapper.native_layers] == ["shipped"]
    manifest = artefact.read_manifest(tmp_path / "ridge_1")
    assert (manifest.ridge, manifest.objective, manifest.anchors) == (1.0, "attention", own.anchors)
    assert found[2].settings["rank"] == 32 and found[2].mapper.reduce
    assert [one.name for one in variant_fits.candidates(host, "up", tmp_path, 8)] == names[:-1]
    assert len(sums) == 4, "kept, not fitted again"


def test_noise_is_as_large_as_it_says_and_the_same_every_time(host: PairHost) -> None:
    own = host.mapper("up")[0]
    spoilt_once, again = (variant_fits.noisy(own, 0.1, 7) for _ in range(2))
    for before, after, same in zip(own.key_weight, spoilt_once.key_weight, again.key_weight, strict=True):
        assert torch.equal(after, same)
        share = float((after - before).square().mean().sqrt() / before.square().mean().sqrt())
        assert share == pytest.approx(0.1, rel=0.1)
    assert spoilt_once.key_bias is own.key_bias


def test_the_command(host: PairHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(common, "host_from_args", lambda args: (host, "up"))
    monkeypatch.setattr(mappers, "documents", lambda kind: texts(8))
    monkeypatch.setattr(variants, "documents", lambda kind: stories(9))
    monkeypatch.setattr(variants, "LENGTH", 40)
    monkeypatch.setattr(variant_fits, "FITTED", {"k1": {"top_k": 1}})
    monkeypatch.setattr(host, "mapper_folder", lambda direction: tmp_path / direction)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    told: list[float] = []
    args = parser.parse_args(["--limit", "3", "--sequences", "8", "--save"])
    result = command.run(args, lambda share, what: told.append(share))
    assert told == sorted(told) and 0 <= told[0] < told[-1] <= 1
    assert load_result(tmp_path / "up" / "variants.json", "variants").to_json()["counts"] == result["counts"]
    page = command.show(json.loads(json.dumps(common.jsonable(result))))
    for word in ("noise_20", "Spearman", "with -KL; the best is", "3 items of fact_recall", "cosine +0.57"):
        assert word in page, word
    with pytest.raises(InputError):
        command.run(parser.parse_args(["--limit", "1"]), None)
