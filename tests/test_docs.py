"""What the documents say is true: their commands exist, their links lead somewhere, their words are explained.

Commands that need models or minutes are only parsed, with the real parsers, so a renamed option fails here; the
light ones are run. What a heavy command does is tested where it lives.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from workbench.__main__ import Parser, main
from workbench.commands import COMMANDS
from workbench.commands.common import add_common_arguments

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
LIGHT = {"pairs", "report"}  # need neither weights nor minutes


def commands(path: Path) -> list[str]:
    """Every line of every bash block, and in blocks without a language those that are commands of the project.

    Continued lines are joined, comments left out.
    """
    found = []
    for kind, block in re.findall(r"```(\w*)\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
        if kind not in ("", "bash", "sh", "console"):
            continue
        said: dict[str, str] = {}
        for line in re.sub(r"\\\n", " ", block).replace("; make", "\nmake").splitlines():
            if variable := re.fullmatch(r'([A-Z]+)="(.*)"', line):
                said[variable[1]] = variable[2]
                continue
            line = re.sub(r"\$([A-Z]+)\b", lambda found, said=said: said.get(found[1], found[0]), line)
            if not kind and not re.match(
                r"(\.venv/bin/)?python (-m workbench|app\.py)|make |.* -m workbench ", line
            ):
                continue
            words = shlex.split(line, comments=True)
            if words:
                found.append(shlex.join(words[1:] if words[0] == "$" else words))
    return found


ALL = [(path.name, line) for path in DOCUMENTS for line in commands(path)]


@pytest.mark.parametrize(("document", "line"), ALL, ids=[f"{name}: {line[:60]}" for name, line in ALL])
def test_every_command_can_be_given(document: str, line: str, tmp_path: Path) -> None:
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", word)]
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{re.escape(words[1])}:", makefile, re.M), f"{document}: no target {words[1]}"
    elif words[:2] == [".venv/bin/python", "app.py"] or words[:2] == ["python", "app.py"]:
        parse_app(words[2:])
    elif "workbench" in words and words[0] in {"accelerate", "torchrun"}:
        parse_command(words[words.index("workbench") + 1 :])
    elif words[1:3] == ["-m", "workbench"]:
        parse_command(words[3:])
        if words[3] in LIGHT and not {"--source", "--mapper", "--compare", "--online"} & set(words):
            assert (
                main([*words[3:], *(["--out", str(tmp_path / "r.html")] if words[3] == "report" else [])])
                == 0
            )
    elif words[0].endswith("python") and words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if word.startswith("tests/"))
    else:
        assert words[0] in {"apt-get", "git", "pip", "cd", "docker", "export"}, f"{document}: {line}"


def parse_command(words: list[str]) -> Any:
    """Parses a sub-command with its own options; raises when one of them does not exist."""
    path, takes_pair, _ = COMMANDS[words[0]]
    parser = Parser(prog=words[0])
    importlib.import_module(path).add_arguments(parser)
    add_common_arguments(parser, takes_pair)
    return parser.parse_args(words[1:])


def parse_app(words: list[str]) -> None:
    """The page's own parser, read out of its file: importing it would build the page."""
    source = (ROOT / "app.py").read_text(encoding="utf-8")
    parse = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "parse")
    space: dict[str, Any] = {}
    head = (
        "from __future__ import annotations\nimport argparse, os\nfrom workbench.ui.settings import Settings\n"
        "from workbench.commands.common import add_side_arguments, side_options\n"
        "from workbench.ui.zero import on_zero_gpu\n"
    )
    exec(compile(head + str(ast.get_source_segment(source, parse)), "app.py", "exec"), space)
    space["parse"](words)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        place, _, anchor = target.partition("#")
        assert not place or (path.parent / place).exists(), f"{path.name}: {target}"
        assert place or anchor in headings, f"{path.name}: {target}"


def test_every_command_is_in_the_documents() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert not [name for name in COMMANDS if f"workbench {name}" not in text and f"`{name}" not in text]


def test_the_licence_is_the_same_everywhere() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")[:300]
    assert "license: Apache-2.0" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert "license: apache-2.0" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_metric_of_the_screens_is_defined() -> None:
    from workbench.lab.results import METRICS

    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8") + (
        (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
        if (ROOT / "docs" / "heads.md").exists()
        else ""
    )
    assert not [name for name in METRICS if f"`{name}`" not in text]


def test_the_demo_script_can_be_played() -> None:
    from workbench.commands.converse import read_script

    turns = read_script(ROOT / "assets" / "scripts" / "demo.json")
    assert {turn.get("on") for turn in turns} >= {"small", "large"}
    assert json.dumps(turns)
