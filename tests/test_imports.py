"""Imports go downwards only, those inside of functions and for type checkers too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import workbench

ROOT = Path(workbench.__file__).parent
LEVELS = (  # each may import its own level and those before it
    {"errors", "words"},
    {"approval"},
    {"kv", "models"},
    {"chat"},
    {"lab"},
    {"plots"},
    {"report"},
    {"commands"},
    {"ui", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def imported(source: str) -> Iterator[str]:
    """The part of the package that each import statement of a module names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "relative imports are not used here"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in named if name.startswith("workbench."))


def upward(part: str, source: str) -> list[str]:
    """What a module of this part imports from above."""
    return [name for name in imported(source) if LEVEL[name] > LEVEL[part]]


def test_no_module_imports_from_above() -> None:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        part = relative.parts[0].removesuffix(".py")
        if part != "__init__" and (names := upward(part, path.read_text(encoding="utf-8"))):
            found[str(relative)] = names
    assert not found


def test_the_rule_sees_every_kind_of_import() -> None:
    assert upward("chat", "from workbench.lab.approval import Policy") == ["lab"]
    assert upward("chat", "def f():\n    from workbench import lab, ui") == ["lab", "ui"]
    assert upward("kv", "if TYPE_CHECKING:\n    import workbench.chat.held") == ["chat"]
    assert not upward("lab", "import workbench.chat.policy, json\nfrom workbench import errors")
