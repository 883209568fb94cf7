"""Two processes that share the reading fit the mapper that one process fits."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workbench.kv import distributed
from workbench.kv.moments import Moments

SCRIPT = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from tests.conftest import tiny_model, tiny_tokenizer
from workbench.kv import distributed
from workbench.kv.fit import fit
from workbench.kv.options import FitOptions
from workbench.models.loading import wrap
tokenizer = tiny_tokenizer()
source = wrap(tiny_model("llama", 1, num_hidden_layers=2), tokenizer, "source")
target = wrap(tiny_model("llama", 2, num_hidden_layers=2), tokenizer, "target")
texts = [" ".join(f"word{(i * j) % 97} the water is on {j}" for j in range(120)) for i in range(1, 9)]
options = FitOptions(sequences=32, length=48, top_k=2, ridge=0.01, objective=sys.argv[3])
try:
    with distributed.joined():
        mapper, manifest, report = fit(source, target, texts, options, direction="up")
    tensors = {name: mapper.tensor(name) for name in mapper.shapes()}
    counts = [report.tokens, report.heldout_tokens, report.chosen_tokens, report.r2_k, report.r2_v]
    torch.save((tensors, counts), sys.argv[2])
except distributed.ShareDone:
    print("share done")
"""


def run(out: Path, objective: str, processes: int) -> list[str]:
    """The script in so many processes; returns what each wrote."""
    root = str(Path(__file__).resolve().parents[2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for rank in range(processes):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, "-c", SCRIPT, root, str(out), objective]
        started.append(
            subprocess.Popen(
                command,
                env=os.environ | place | {"PYTHONPATH": root},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    told = []
    for process in started:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors[-2000:]
        told.append(output.strip())
    return told


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["attention"])  # everything that can be gathered is
def test_two_processes_fit_what_one_fits(
    tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["", str(Path(__file__).resolve().parents[2]), str(tmp_path / "one"), objective]
    )
    exec(SCRIPT, {})
    assert run(tmp_path / "two", objective, 2) == ["", "share done"]
    (one, counts), (two, shared) = (torch.load(tmp_path / name, weights_only=True) for name in ("one", "two"))
    assert counts[:3] == shared[:3] and counts[0] > 500, json.dumps([counts, shared])
    assert counts[3:] == pytest.approx(shared[3:], abs=1e-3)
    for name, tensor in one.items():
        scale = tensor.abs().max()
        assert (tensor - two[name]).abs().max() <= 2e-3 * scale, name


def test_sums_about_another_point_are_the_sums_from_the_start() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(500, 6, generator=generator) + 30, torch.randn(500, 4, generator=generator) - 20
    weight = torch.rand(500, generator=generator)
    whole, first, second = Moments(6, 4), Moments(6, 4), Moments(6, 4)
    whole.add(x, y, weight)
    first.add(x[:200], y[:200], weight[:200])
    second.add(x[200:] + 0, y[200:], weight[200:])
    for part in (first, second, whole):
        part.flush()
    assert not torch.allclose(first.shift_x, second.shift_x, atol=1e-3)
    second.move_to(first.shift_x, first.shift_y)
    for name in ("sum_x", "sum_y", "sum_xx", "sum_xy", "sum_yy", "mass"):
        setattr(first, name, getattr(first, name) + getattr(second, name))
    everything, columns = slice(None), torch.arange(6)
    torch.testing.assert_close(first.mean_x, whole.mean_x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(first.cov_xx(columns), whole.cov_xx(columns), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        first.cov_xy(columns, everything), whole.cov_xy(columns, everything), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(first.var_y(everything), whole.var_y(everything), rtol=1e-5, atol=1e-5)


def test_alone_everything_is_mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.world() == (0, 1) and all(map(distributed.mine, range(40)))
    assert distributed.collect({}) and distributed.own(tmp_path) == tmp_path and distributed.device() is None
    shares = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        shares.append([index for index in range(50) if distributed.mine(index)])
        assert (distributed.own(tmp_path / "sums") == tmp_path / "sums") == (rank == 0)
    assert sorted(index for share in shares for index in share) == list(range(50)) and shares[1][:8] == list(
        range(8, 16)
    )
