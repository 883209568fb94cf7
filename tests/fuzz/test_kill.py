"""kill -9 at any moment of a save, a fit or a chat: the old artefact is whole or the new one is; a fit goes on.

A page whose server was killed in the middle of an answer is told so by the next one, and goes on there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.conftest import tiny_model, tiny_tokenizer
from tests.fuzz.conftest import LONG
from tests.fuzz.test_artefact import made as made
from tests.fuzz.test_artefact import same
from tests.load.client import Server, Visitor
from tests.ui.tiny import text
from workbench.kv import artefact
from workbench.kv.fit import fit
from workbench.kv.options import FitOptions
from workbench.models.catalog import own_artefact_folder, resolve
from workbench.models.loading import load, wrap

SAVES, FITS, CHATS = (50, 20, 10) if LONG else (6, 2, 1)
FORK = multiprocessing.get_context("fork")


def start(target: Any, *arguments: Any) -> Any:
    process = FORK.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def saving(folder: Path, versions: list[Any]) -> None:
    """Saves one version after the other, for ever."""
    torch.set_num_threads(1)
    while True:
        for mapper, manifest in versions:
            artefact.save(folder, mapper, manifest)


def two_versions(made: Any) -> list[Any]:
    mapper, manifest = made[2]
    other = replace(mapper, key_bias=tuple(bias + 1 for bias in mapper.key_bias))
    return [(mapper, manifest), (other, replace(manifest, anchors=7))]


def is_one_of(folder: Path, versions: list[Any]) -> bool:
    mapper, manifest = artefact.load(folder)
    for right, expected in versions:
        if replace(manifest, tensors_sha256="") == replace(expected, tensors_sha256=""):
            return all(torch.equal(a, b) for a, b in zip(mapper.key_bias, right.key_bias, strict=True))
    return False


def test_kills_while_saving(made: Any, tmp_path: Path) -> None:
    versions = two_versions(made)
    folder = tmp_path / "mapper"
    artefact.save(folder, *versions[0])
    moments = random.Random(0)
    for _ in range(SAVES):
        process = start(saving, folder, versions)
        time.sleep(moments.uniform(0.0, 0.15))
        kill(process)
        assert is_one_of(folder, versions)
    artefact.save(folder, *versions[0])
    assert sorted(os.listdir(tmp_path)) == ["mapper"]  # left-overs are swept


def test_two_writers_never_mix(made: Any, tmp_path: Path) -> None:
    versions = two_versions(made)
    folder = tmp_path / "mapper"
    artefact.save(folder, *versions[0])
    writers = [start(saving, folder, [version]) for version in versions]
    try:
        for _ in range(200 if LONG else 25):
            assert is_one_of(folder, versions)
    finally:
        for writer in writers:
            kill(writer)
    assert is_one_of(folder, versions)


def test_kills_while_fitting(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    source, target = (
        wrap(tiny_model("llama", seed, num_hidden_layers=seed + 1), tokenizer, f"m{seed}") for seed in (1, 2)
    )
    options = FitOptions(sequences=10, length=48, top_k=1, anchors=2, hold_back=4)
    texts = [text(60, seed) for seed in range(14)]
    state, folder = tmp_path / "state.safetensors", tmp_path / "mapper"
    torch.set_num_threads(1)
    mapper, manifest, _ = fit(source, target, texts, options, direction="up")
    artefact.save(folder, mapper, manifest)
    expected = artefact.load(folder)

    def fitting() -> None:
        torch.set_num_threads(1)
        slow = lambda share, what: time.sleep(0.01)  # noqa: E731
        made, said, _ = fit(
            source, target, texts, options, direction="up", state_file=state, resume=True, progress=slow
        )
        artefact.save(folder, made, replace(said, created=manifest.created))

    moments = random.Random(1)
    for _ in range(FITS):
        process = start(fitting)
        time.sleep(moments.uniform(0.02, 0.4))
        kill(process)
        ours, _ = artefact.load(folder)
        close(ours, expected[0])
    process = start(fitting)
    process.join(120)
    assert process.exitcode == 0
    close(artefact.load(folder)[0], expected[0])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two models in folders with a mapper, and a home of their own."""
    monkeypatch.setenv("KV_WORKBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOAD_LOG", str(tmp_path / "server.log"))
    tokenizer, models = tiny_tokenizer(), []
    for name, seed in (("small", 1), ("large", 2)):
        tiny_model("llama", seed, max_position_embeddings=4096).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        models.append(load(str(tmp_path / name), dtype="float32", device_map="cpu"))
    refs = [str(tmp_path / name) for name in ("small", "large")]
    options = FitOptions(sequences=8, length=48, top_k=1, anchors=2, hold_back=4)
    mapper, manifest, _ = fit(*models, [text(60, seed) for seed in range(10)], options, direction="up")
    artefact.save(own_artefact_folder(resolve(None, *refs), "up"), mapper, manifest)
    return refs


@pytest.mark.slow
@pytest.mark.timeout(3600 if LONG else 900)
def test_kills_while_chatting(folders: list[str], tmp_path: Path) -> None:
    arguments = ["--source", folders[0], "--target", folders[1], "--dtype", "float32"]
    mapper = own_artefact_folder(resolve(None, *folders), "up")
    kept = {path: path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()}
    moments = random.Random(2)
    server = Server(arguments)
    try:
        server.wait()
        visitor = Visitor(server.url, 1024)
        for number in range(CHATS):
            before = len(visitor.lines)
            chat = threading.Thread(target=talk, args=(visitor, f"tell me a story, {number}"))
            chat.start()
            until = time.monotonic() + 120
            while "kv-by-" not in str(visitor.lines[before:]):
                assert time.monotonic() < until
                time.sleep(0.05)
            time.sleep(moments.uniform(0.0, 0.5))  # somewhere in the answer
            helpers = children(server.process.pid)
            server.process.kill()
            server.process.wait()
            chat.join(60)
            until = time.monotonic() + 20
            while any(Path(f"/proc/{pid}").exists() for pid in helpers) and time.monotonic() < until:
                time.sleep(0.1)
            assert not any(Path(f"/proc/{pid}").exists() for pid in helpers)  # they end with their server
            assert {
                path: path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()
            } == kept
            server = Server(arguments, server.port)
            server.wait()
            visitor.settings = visitor.fill("run_send", {"Longest answer, in tokens": 8})
            visitor.say("are you there")
            assert "does not hold this chat any more" in visitor.status
            visitor.say("a new beginning")
            assert visitor.texts()[0] == "a new beginning" and len(visitor.texts()) == 2
            visitor.switch("large")
            visitor.say("and on")
            assert "mapped context" in str(visitor.items[-1]) and len(visitor.texts()) == 4
            visitor.settings = visitor.fill("run_send", {"Longest answer, in tokens": 1024})
            visitor.press("clear")
        artefact.load(mapper)
        assert server.tracebacks() == 0
    finally:
        server.end()


def talk(visitor: Visitor, words: str) -> None:
    """Says something; the server may be gone before the answer is."""
    with contextlib.suppress(httpx.HTTPError, ConnectionError):
        visitor.say(words)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [
        int(number)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for number in path.read_text().split()
    ]


def close(ours: Any, theirs: Any) -> None:
    for name in theirs.shapes():
        torch.testing.assert_close(
            ours.tensor(name).float(), theirs.tensor(name).float(), rtol=2e-3, atol=2e-3
        )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_comparison_can_fail(made: Any, tmp_path: Path) -> None:
    versions = two_versions(made)
    artefact.save(
        tmp_path / "mapper", versions[0][0], versions[1][1]
    )  # torn: numbers of one, words of the other
    assert not is_one_of(tmp_path / "mapper", versions)
    assert same(made[2], made[2])
