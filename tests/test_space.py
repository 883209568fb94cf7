"""As a Space: front matter, start-up on a CPU Space and on ZeroGPU, no writable checkout; a Dockerfile with real files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from workbench.ui import zero

ROOT = Path(__file__).resolve().parents[1]


def test_front_matter_names_what_is_installed_and_what_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    head = dict(re.findall(r"^(\w+): (.+)$", text.split("---")[1], re.MULTILINE))
    assert head["sdk"] == "gradio" and head["sdk_version"] == version("gradio")
    assert (ROOT / head["app_file"]).is_file() and head["python_version"].strip('"') >= "3.11"
    assert len(head["short_description"]) <= 60
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    assert pins["gradio"] == head["sdk_version"]


@pytest.mark.parametrize("zero_gpu", [False, True])
def test_the_page_is_built_on_a_space(tmp_path: Path, zero_gpu: bool) -> None:
    """With a stand-in for `spaces`, and in a checkout that nothing may be written into."""
    (tmp_path / "spaces.py").write_text(
        "calls = []\ndef GPU(duration):\n    def wrap(f):\n        calls.append(f)\n        return f\n    return wrap\n"
    )
    code = (
        "import os, sys, builtins\n"
        "root = os.getcwd()\n"
        "def guard(event, args):\n"
        "    if event == 'open' and isinstance(args[0], str) and isinstance(args[1], str):\n"
        "        if set(args[1]) & set('wxa+') and os.path.abspath(args[0]).startswith(root + os.sep):\n"
        "            raise PermissionError(args[0])\n"
        "sys.addaudithook(guard)\n"
        "import app\n"
        "assert app.settings.public and 'torch' not in sys.modules\n"
        "import spaces\n"
        "print(app.settings.device_map, len(spaces.calls), app.gpu() if app.gpu else None)\n"
    )
    environment = os.environ | {
        "SPACE_ID": "someone/page", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1",
        "KV_WORKBENCH_HOME": str(tmp_path / "home"), "SPACES_ZERO_GPU": "true" if zero_gpu else "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    words = done.stdout.split()[-3:]
    assert words[:2] == (["cpu", "1"] if zero_gpu else ["auto", "0"])
    assert (words[2] == "None") == (not zero_gpu)


def test_zero_gpu_without_the_package_still_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACES_ZERO_GPU", "1")
    monkeypatch.setitem(sys.modules, "spaces", None)
    assert zero.on_zero_gpu() and zero.register() is None


def test_the_dockerfile_names_real_files_and_runs_as_nobody_special() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "USER app" in text and "--public" in text and "--host 0.0.0.0" in text
    for name in re.findall(r"(?:python|COPY) ((?:\.ci/)?[\w.]+\.(?:py|txt))", text):
        assert (ROOT / name).is_file(), name
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".git" in ignored and not {"precomputed", "assets", "workbench", ".ci"} & set(ignored)
