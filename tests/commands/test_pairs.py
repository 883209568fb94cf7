"""`pairs` and `plan`: any two configs, refused by name and reason before any weights are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_config, tiny_tokenizer
from workbench.__main__ import main


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path / "home"))


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def told(capsys: pytest.CaptureFixture[str], small: Path, large: Path) -> dict[str, Any]:
    return asked(capsys, "pairs", "--source", str(small), "--target", str(large))["pairs"][0]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    tiny_config("llama").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


REFUSED = {
    "sliding window": ("mistral", {"sliding_window": 64}, "sliding window"),
    "hybrid": ("jamba", {}, "recurrent"),
    "recurrent": ("mamba2", {}, "recurrent"),
    "MLA": ("deepseek_v3", {}, "MLA"),
    "ALiBi": ("falcon", {"alibi": True}, "ALiBi"),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    "longrope": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48,
                             "long_factor": [2.0] * 48, "partial_rotary_factor": 1.0}, "pad_token_id": 0},
        "longrope",
    ),
    "encoder-decoder": ("t5", {}, "encoder-decoder"),
    "multimodal": ("gemma3", {}, "multimodal"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_that_cannot_be_mapped_are_refused_by_name(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    from transformers import AutoConfig

    model_type, settings, reason = REFUSED[kind]
    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path / "other")
    for pair in ((plain, tmp_path / "other"), (tmp_path / "other", plain)):
        row = told(capsys, *pair)
        assert row["compatible"] is False and reason in row["reason"] and model_type in row["reason"]


def test_two_configs_are_enough_and_tokenizers_count_where_they_are_there(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    tiny_config("qwen3").save_pretrained(other)
    row = told(capsys, plain, other)
    assert row["compatible"] is True and row["tokenizers_compared"] is False and row["matched"] is False
    assert row["kv"]["large"] == {"layers": 3, "kv_heads": 3, "head_dim": 16}
    assert row["weights"]["float32"] == 2 * row["weights"]["bfloat16"] > 0
    tiny_tokenizer().save_pretrained(plain)
    tiny_tokenizer().save_pretrained(other)
    assert told(capsys, plain, other)["tokenizers_compared"] is True
    tiny_tokenizer(words=("Ġkitte",)).save_pretrained(other)
    row = told(capsys, plain, other)
    assert row["compatible"] is False and "tokenizers differ" in row["reason"]


def test_the_catalog_is_known_without_a_hub(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in asked(capsys, "pairs")["pairs"]}
    for name in ("qwen3-0.6b-1.7b", "llama-3.2-1b-3b", "ministral-3-3b-8b", "qwen2.5-coder-0.5b-1.5b"):
        assert rows[name]["compatible"] is True and rows[name]["by_catalog"] is True, name
        assert rows[name]["licence"] and rows[name]["weights"]
    assert rows["llama-3.2-1b-3b"]["gated"] == {"small": True, "large": True}
    assert rows["qwen3-0.6b-1.7b"]["matched"] is True and rows["llama-3.2-1b-3b"]["matched"] is False
    assert main(["pairs"]) == 0
    assert "mismatched" in capsys.readouterr().out


def test_a_plan_is_written_and_shown(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "plan",
        "--source",
        str(plain),
        "--target",
        str(plain),
        "--tokens",
        "100",
        "--large-dtype",
        "float32",
    )
    found = asked(capsys, *arguments, "--out", str(tmp_path / "maps"))
    assert found["needs"]["large"]["dtype"] == "float32" and found["tokens"] == 100
    assert json.loads((tmp_path / "maps" / "large.json").read_text()) == found["maps"]["large"]
    assert main([*arguments]) == 0
    assert "cache of 100" in capsys.readouterr().out
