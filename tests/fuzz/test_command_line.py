"""Any arguments: one sentence and exit status 1 or 2, help, or a result; never a traceback, never a hang."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.conftest import examples
from workbench.__main__ import main
from workbench.commands import COMMANDS

OPTIONS = (
    "--pair", "--source", "--target", "--direction", "--mapper", "--device-map", "--max-memory", "--dtype", "--json",
    "--threads", "--out", "--calibration", "--sequences", "--length", "--stride", "--top-k", "--ridge", "--objective",
    "--anchors", "--script", "--seed", "--greedy", "--system", "--text", "--tokens", "--lengths", "--tasks", "--limit",
    "--turns", "--hold-back", "--max-new-tokens", "--temperature", "--help", "--save", "--metrics", "--", "-x",
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        ("embedded", "up", "down", "sideways", "", "0", "-1", "1e309", "nan", "99999999999999999999", "auto", "cuda:7",
         "/dev/null", "/no/such/file", "../..", "cpu=4GiB", "cpu=", "float32", "float8", "a/b@c", "x.gguf", "\x00",
         "<b>", "--", "64,256", "64,,", "\ud800", "é🙂", "[]", "no-such-pair", "Qwen/Qwen3-0.6B")
    ),
    st.integers().map(str),
    st.text(max_size=12),
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The page of arguments is what is tried here: a model that would be loaded is a failure of its own kind."""
    from workbench.errors import ModelUnavailableError
    from workbench.models import embedded, loading, pair

    def no_model(*args: Any, **options: Any) -> Any:
        raise ModelUnavailableError("No model is loaded here.")

    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for module in (loading, pair):
        monkeypatch.setattr(module, "load", no_model)
    monkeypatch.setattr(embedded, "ensure", no_model)


@examples(30, 1_000)
@given(
    command=st.one_of(st.sampled_from(sorted(set(COMMANDS) - {"family"})), st.text(max_size=8)),
    words=st.lists(st.tuples(st.sampled_from(OPTIONS), VALUES), max_size=5),
)
def test_any_arguments(command: str, words: list[tuple[str, str]]) -> None:
    out, err = io.StringIO(), io.StringIO()
    started = time.process_time()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([command, *(part for pair in words for part in pair)])
        except SystemExit as exit_:  # --help
            status = int(exit_.code or 0)
    assert status in (0, 1, 2)
    said = err.getvalue()
    assert "Traceback" not in said
    if status:
        last = [line for line in said.splitlines() if line.strip()]
        assert last or out.getvalue()  # `doctor` prints its findings and says that not all is well
        assert not any("Error:" in line and "(--debug shows where)" in line for line in last), (words, said)
    assert time.process_time() - started < 8  # the first one imports the libraries
