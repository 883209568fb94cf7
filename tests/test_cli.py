"""The command line: one JSON object last, one sentence for an error, exit status, a fast `--help`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_model, tiny_tokenizer
from workbench.__main__ import main
from workbench.commands import COMMANDS
from workbench.errors import WorkbenchError
from workbench.kv import artefact
from workbench.kv.manifest import Manifest
from workbench.kv.mapper import KVMapper
from workbench.models.loading import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    identity = load(str(path), dtype="float32", device_map="cpu").identity
    for direction in ("up", "down"):
        mapper = KVMapper.identity(identity.spec)
        names = ("key_weight", "key_bias", "value_weight", "value_bias")
        mapper = replace(mapper, **{name: tuple(t.clone() for t in getattr(mapper, name)) for name in names})
        manifest = Manifest(
            direction, identity, identity, "plain", 1, 0.01, 0, 1, mapper.key_layers, mapper.value_layers,
            {"name": "none"}, {"r2_k": 1.0, "r2_v": 1.0}, {},
        )  # fmt: skip
        artefact.save(path.parent / direction, mapper, manifest)
    return path


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path / "home"))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRANSFORMERS_VERBOSITY", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, os.environ.get(name, "1") if "VERB" not in name else "error")


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object of the last line, and standard error."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    return status, json.loads(lines[-1]) if lines and "--json" in arguments else {}, err


def models(folder: Path, *, mapper: str = "up") -> list[Any]:
    return ["--source", folder, "--target", folder, "--mapper", folder.parent / mapper, "--dtype", "float32"]


def script(tmp_path: Path, turns: Any) -> Path:
    path = tmp_path / "script.json"
    path.write_text(turns if isinstance(turns, str) else json.dumps(turns))
    return path


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, workbench.__main__ as m\n"
        "for name in [[], *[[n] for n in sys.argv[1].split(',')]]:\n"
        "    try: m.main([*name, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'gradio', 'numpy'} & set(sys.modules), sys.modules.keys()\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(COMMANDS)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 10
    assert all(name in done.stdout for name in COMMANDS)


def test_converse_switches_and_its_last_line_is_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [
        {"say": "hello"},
        {"on": "large", "how": "mapped"},
        {"say": "more"},
        {"say": "back", "on": "small", "how": "mapped"},
        {"say": "again", "on": "large", "how": "prefill"},
    ]
    options = ["--max-new-tokens", "5", "--json", "--measure-prefill"]
    status, result, err = run(
        capsys, "converse", "--script", script(tmp_path, turns), *models(folder), *options
    )
    assert status == 0, err
    played = result["turns"]
    assert [turn["side"] for turn in played] == ["small", "large", "large", "small", "large"]
    assert played[0]["account"] is None and played[0]["how"] == "native"
    switched = played[1]
    assert (switched["text"], switched["token_ids"], switched["how"]) == ("", [], "mapped")
    assert switched["account"]["prefill_source"] == "measured"
    assert played[2]["account"] == switched["account"] and played[2]["how"] == "mapped"
    assert played[3]["account"]["how"] == "fallback"  # only one direction has a mapper
    assert played[4]["account"]["how"] == "prefill"
    for turn in (turn for turn in played if turn["account"]):
        account = turn["account"]
        assert account["reused"] + account["mapped"] + account["native"] == account["tokens"]
    # An exact mapper changes nothing: the same texts come from one model alone.
    alone = [{"say": turn["say"]} for turn in turns if "say" in turn]
    _, solo, _ = run(capsys, "converse", "--script", script(tmp_path, alone), *models(folder), *options)
    assert [t["text"] for t in solo["turns"]] == [t["text"] for t in played if t["token_ids"]]
    assert solo["token_ids"] == result["token_ids"]
    assert "warn" not in err.lower() and "Traceback" not in err


def test_the_table_shows_badges_and_accounts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"say": "hello"}, {"say": "more", "on": "large"}]
    path = script(tmp_path, turns)
    assert main(["converse", "--script", str(path), "--max-new-tokens", "3", *map(str, models(folder))]) == 0
    out = capsys.readouterr().out
    assert "[tiny, native]" in out and "-- tiny -> tiny: mapped; reused 0, mapped" in out


def test_direction_down_starts_with_the_large_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, [{"say": "hi"}, {"say": "ho", "on": "small"}])
    arguments = [*models(folder, mapper="down"), "--direction", "down", "--max-new-tokens", "2", "--json"]
    status, result, err = run(capsys, "converse", "--script", path, *arguments)
    assert status == 0, err
    assert [turn["side"] for turn in result["turns"]] == ["large", "small"]
    assert result["turns"][1]["account"]["how"] == "mapped"


def test_doctor_of_a_pair_of_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, _ = run(capsys, "doctor", *models(folder), "--json")
    checks = {check["name"]: check for check in result["checks"]}
    assert status == 1 and result["ok"] is False  # one direction has no mapper
    assert not checks["mapper down"]["ok"] and "no mapper" in checks["mapper down"]["detail"]
    for name in ("versions", "devices", "dtype", "weights small", "gate small", "gate large", "mapper up"):
        assert checks[name]["ok"], checks[name]
    assert "verified against both models" in checks["mapper up"]["detail"]
    assert "asked for" in checks["dtype"]["detail"]


def test_doctor_without_weights_says_how_to_get_them(capsys: pytest.CaptureFixture[str]) -> None:
    status, result, _ = run(capsys, "doctor", "--json")
    checks = {check["name"]: check for check in result["checks"]}
    assert status == 1 and not checks["weights large"]["ok"] and "gate large" not in checks
    assert "--fetch" in checks["weights large"]["detail"]


def test_pairs_lists_the_catalog(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, _ = run(capsys, "pairs", "--json")
    assert status == 0 and result["pairs"][0]["name"] == "embedded"
    assert set(result["pairs"][0]) >= {"name", "source", "target", "compatible", "reason", "artefacts"}
    status, result, _ = run(capsys, "pairs", "--json", "--source", folder, "--target", folder)
    assert [(p["compatible"], p["reason"]) for p in result["pairs"]] == [(True, "")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "nonsense"),
        (["converse"], "--script"),
        (["converse", "--script", "missing.json"], "missing.json"),
        (["converse", "--script", "x", "--pair", "nope"], "no pair 'nope'"),
        (["converse", "--script", "x", "--source", "a"], "Only one"),
        (["pairs", "--direction", "left"], "left"),
        (["pairs", "--threads", "0"], "--threads"),
        (["doctor", "--mapper", "nowhere"], "'nowhere'"),
        (["fit", "--polish-text", "more.txt"], "--polish "),
        (["fit", "--polish", "9", "--polish-text", "more.txt"], "more.txt"),
    ],
)
def test_wrong_input_is_one_sentence_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("place", ["file", "file/mapper", "/proc/mapper"])
def test_what_cannot_be_saved_is_told_before_the_fit_starts(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.models import pair

    monkeypatch.setattr(pair, "load", None)  # no model is loaded for this
    (tmp_path / "file").write_text("x")
    assert main(["fit", "--out", str(tmp_path / place)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--out" in err and str(tmp_path) not in err


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ("not json", "JSON"), ("[" * 100_000, "JSON"), ([], "at least one"), ({"say": "x"}, "list"),
        (["x"], "Turn 1"),
        ([{"say": 1}], "Turn 1"), ([{"say": "x", "to": "large"}], "'to'"),
        ([{"say": "x"}, {"say": " "}], "Turn 2"),
        ([{"say": "x", "on": "medium"}], "small or large"), ([{"how": "mapped"}], "neither"),
    ],
)  # fmt: skip
def test_bad_scripts_are_refused_before_a_model_is_loaded(
    tmp_path: Path, turns: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["converse", "--script", str(script(tmp_path, turns))]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_a_failure_is_status_1_and_a_traceback_needs_debug(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.commands import converse

    def fail(error: Exception) -> None:
        def run(*arguments: Any) -> Any:
            raise error

        monkeypatch.setattr(converse, "run", run)

    path = str(script(tmp_path, [{"say": "x"}]))
    fail(WorkbenchError("It did not work."))
    assert main(["converse", "--script", path]) == 1
    assert capsys.readouterr().err == "It did not work.\n"
    fail(RuntimeError("can't allocate memory: you tried to allocate 4096 bytes. Error code 12"))
    assert main(["converse", "--script", path]) == 1
    assert capsys.readouterr().err == "There was not enough memory for this (4096 bytes were asked for).\n"
    fail(ZeroDivisionError("one\ntwo"))
    assert main(["converse", "--script", path]) == 1
    assert capsys.readouterr().err == "ZeroDivisionError: one two (--debug shows where).\n"
    assert main(["converse", "--script", path, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_artefact_of_another_pair_is_a_visible_fallback(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    tiny_model("llama", seed=9).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    path = script(tmp_path, [{"say": "hi"}, {"say": "ho", "on": "large"}])
    arguments = [
        "--source",
        folder,
        "--target",
        other,
        "--mapper",
        folder.parent / "up",
        "--dtype",
        "float32",
    ]
    status, result, _ = run(
        capsys, "converse", "--script", path, *arguments, "--max-new-tokens", "2", "--json"
    )
    account = result["turns"][1]["account"]
    assert status == 0 and account["how"] == "fallback" and "target.revision" in account["reason"]


def test_every_option_of_family_reaches_the_recipe(monkeypatch):
    """The command once lacked an option that the recipe read, so that it could not run at all."""
    from workbench.models import family

    asked = []
    monkeypatch.setattr(family, "run", lambda options, progress: asked.append(options) or {"out": "x"})
    assert main(["family", "--stage", "pack", "--bits", "3", "--weights", "average", "--tokens", "7"]) == 0
    assert (asked[0].stage, asked[0].bits, asked[0].average, asked[0].tokens) == ("pack", (3,), True, 7)
