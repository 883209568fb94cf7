"""The measuring commands on the tiny pair: promised keys, saved files, tables, bad input."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.lab.conftest import make_host, texts
from workbench.commands import bench, common, compare, evaluate, heads
from workbench.errors import InputError
from workbench.kv import artefact
from workbench.kv.manifest import Manifest
from workbench.lab.marks import load_marks
from workbench.lab.provenance import load_result
from workbench.models.pair import PairHost


@pytest.fixture(scope="module")
def host() -> PairHost:
    return make_host()


@pytest.fixture
def call(host: PairHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command as the command line would, on the tiny pair; returns (JSON object, table)."""
    monkeypatch.setattr(common, "host_from_args", lambda args: (host, "up"))
    text = tmp_path / "text.txt"
    text.write_text("\n%%\n".join(document.text for document in texts(3)), encoding="utf-8")

    def run(module: ModuleType, *options: str) -> tuple[dict[str, Any], str]:
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        result = module.run(parser.parse_args([*options, "--text", str(text)]), lambda share, what: None)
        json.dumps(result, allow_nan=False)
        return result, module.show(result)

    return run


def test_compare(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "saved" / "compare.json"
    result, table = call(compare, "--tokens", "6", "--context", "50", "--out", str(out))
    assert {"kl", "top1", "first_divergence"} <= set(result)
    assert set(result["texts"]) == {"mapped", "prefill", "source"} and result["context_tokens"] == 50
    assert "true prefill" in table and result["saved"] == str(out)
    assert load_result(out, "compare").mean_kl() == pytest.approx(result["kl"])


def test_heads(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "heads.json"
    result, table = call(
        heads, "--limit", "2", "--length", "40", "--metrics", "r2_k,cosine", "--out", str(out)
    )
    assert {"layers", "heads", "metrics", "tokens"} <= set(result) and set(result["metrics"]) == {
        "r2_k",
        "cosine",
    }
    assert len(result["metrics"]["cosine"]) == result["layers"] == 3
    assert "worst cosine" in table and load_result(out, "heads").tokens == result["tokens"]
    result, table = call(heads, "--limit", "1", "--length", "40", "--head", "2,1")
    assert (
        result["head"]["layer"] == 2 and len(result["head"]["tokens"]) == 10 and "layer 2, KV head 1" in table
    )
    for wrong in (("--head", "3,0"), ("--head", "x"), ("--patch", "--metrics", "r2_k"), ("--hold-back", "0")):
        with pytest.raises(InputError):
            call(heads, "--limit", "1", "--length", "40", *wrong)


def test_heads_patch(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path))
    out = tmp_path / "heads.json"
    options = ("--limit", "1", "--length", "40", "--patch", "--context", "24", "--following", "4")
    result, table = call(heads, *options, "--out", str(out))
    assert {"layers", "heads", "metrics", "tokens", "rank_correlation", "repair", "best_metric"} <= set(
        result
    )
    assert {"random", "causal", result["best_metric"]} <= set(result["repair"])
    assert set(result["repair"]["random"]) == {"1", "5", "10", "20"} and "best metric" in table
    saved = load_result(tmp_path / "heads-patch.json", "patch")
    assert (
        saved.prediction.best_metric == result["best_metric"]
        and load_result(out, "heads").details is not None
    )
    assert not (tmp_path / "patch").exists() or not list((tmp_path / "patch").iterdir())


def test_bench(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "latency.json"
    result, table = call(
        bench,
        "--lengths",
        "16,24",
        "--repeats",
        "9",
        "--decode",
        "4",
        "--rejection-rate",
        "0.1",
        "--out",
        str(out),
    )
    assert {"cells", "load_ms", "gemm_fraction", "environment"} <= set(result)
    keys = {"tokens", "map_ms", "handoff_ms", "prefill_ms", "ratio", "net_saving_ms"}
    assert all(keys <= set(cell) for cell in result["cells"])
    assert result["decode"]["same_tokens"] and "generate" in table and "delivery" in table
    assert "break-even" in table and len(load_result(out, "latency").cells) == 2
    with pytest.raises(InputError):
        call(bench, "--lengths", "many")


def test_evaluate(call: Any, tmp_path: Path) -> None:
    out = tmp_path / "quality.json"
    options = (
        "--limit",
        "3",
        "--context",
        "30",
        "--following",
        "8",
        "--anchors",
        "0,2",
        "--hold-back",
        "1,4",
    )
    result, table = call(evaluate, *options, "--out", str(out))
    assert {"tasks", "kl", "top1", "gap_recovered", "retention", "retention_floor", "worst_task"} <= set(
        result
    )
    assert all("ce" in result[arm] for arm in ("native", "source", "no_context"))
    assert [(s["anchors"], s["hold_back"]) for s in result["settings"]] == [
        (2, 3),
        (0, 1),
        (0, 4),
        (2, 1),
        (2, 4),
    ]
    assert "gap recovered" in table and load_result(out, "quality").to_json()["kl"] == result["kl"]
    with pytest.raises(InputError):
        call(evaluate, "--chats")
    with pytest.raises(InputError):
        call(evaluate, "--anchors", "some")


def test_heads_run_natively(
    call: Any, tmp_path: Path, host: PairHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved beside the mapper or in its place, with the marks; what was measured of the map goes along."""
    folder, options = tmp_path / "mapper", ("--limit", "2", "--context", "24", "--following", "4")
    source, target = host.model("small"), host.model("large")
    mapper, _ = host.mapper("up")
    manifest = Manifest(
        "up", source.identity, target.identity, "plain", 2, 0.01, mapper.anchors, mapper.hold_back,
        mapper.key_layers, mapper.value_layers, {}, {}, {},
    )  # fmt: skip
    artefact.save(folder, mapper, manifest)
    (folder / "heads.json").write_text("{}")
    own = PairHost.from_models(source, target, {"up": artefact.load(folder)})
    monkeypatch.setattr(common, "host_from_args", lambda args: (own, "up"))
    monkeypatch.setattr(own, "mapper_folder", lambda direction: folder)
    result, table = call(heads, *options, "--restore", "0,1,2.1", "--native", str(tmp_path / "native"))
    assert result["native"]["layers"] == 2 and "runs the lowest 2 layers natively" in table
    saved, read = artefact.load(tmp_path / "native", source.identity, target.identity, "up")
    assert saved.native_layers == 2 and read.tensors_sha256 == result["native"]["mapper"]
    marked = load_marks(tmp_path / "native", read.tensors_sha256)
    assert len(marked.heads) == 5 and marked.gain is not None and marked.gain.native_layers == 2
    assert (tmp_path / "native" / "heads.json").read_text() == "{}"
    assert artefact.load(folder)[0].native_layers == 0
    call(heads, *options, "--restore", "0", "--native", str(folder))
    assert artefact.load(folder)[0].native_layers == 1 and (folder / "heads.json").is_file()
    for wrong in (["--restore", "1", "--native", str(folder)], ["--native", str(folder)], ["--mark"]):
        with pytest.raises(InputError):
            call(heads, *options, *wrong)


def test_heads_restore(call: Any, tmp_path: Path, host: PairHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "mapper_folder", lambda direction: tmp_path)
    options = ("--limit", "2", "--context", "24", "--following", "4")
    result, table = call(heads, *options, "--restore", "0,1,2.1", "--mark")
    told = result["restored"]
    assert told["heads_restored"] == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 1]] and told["native_layers"] == 2
    assert 0 <= told["kl"] < told["base_kl"] and "can be run natively" in table
    again, _ = call(heads, *options, "--restore", "marked")
    assert again["restored"]["kl"] == pytest.approx(told["kl"], rel=1e-4)
    everything, _ = call(heads, *options, "--restore", "0,1,2")
    assert everything["restored"]["kl"] == pytest.approx(0.0, abs=1e-5)
    mapper, manifest = host.mapper("up")
    other = replace(mapper, key_weight=tuple(w + 1 for w in mapper.key_weight))
    loaded = {tmp_path / "same": (mapper, manifest), tmp_path / "worse": (other, manifest)}
    monkeypatch.setattr("workbench.kv.artefact.load", lambda folder, *names: loaded[folder])
    again, table = call(heads, *options, "--restore", "0,1", "--refit", str(tmp_path / "same"))
    assert again["restored"]["refit_kl"] == pytest.approx(again["restored"]["base_kl"], rel=1e-4)
    assert "as the other mapper makes them" in table
    again, _ = call(heads, *options, "--restore", "0,1", "--refit", str(tmp_path / "worse"))
    assert again["restored"]["refit_kl"] != pytest.approx(again["restored"]["base_kl"], rel=1e-2)
    for wrong in ("9", "1.x", "0.7"):
        with pytest.raises(InputError):
            call(heads, *options, "--restore", wrong)
