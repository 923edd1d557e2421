"""One direction: imports point down, as pyproject.toml says; names are made once."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHAPTERS, MODULES, ROOT

from scripts import definitions

LINT = Path(sys.executable).with_name("lint-imports")


def breaches(folder: Path) -> str:
    """What import-linter finds in the series in `folder`; "" if all imports point down."""
    command = [str(LINT), "--config", "pyproject.toml", "--no-cache"]
    surroundings = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True)
    return done.stdout if done.returncode else ""


def test_imports_point_down():
    assert not breaches(ROOT)


@pytest.mark.audit
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/settings", "import scripts.fast.fast"),
        ("ch05_norms_and_first_steps", "from scripts.ch06_training import Batch"),
        ("fast/run", "def late():\n    from scripts.studies import runner"),
        ("book/charts", "from scripts.corpora import load"),
        ("newroom", ""),
    ],
)
def test_a_planted_breach_is_found(tmp_path, module, line):
    """Also inside a function; and a module that has no layer yet."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with open(tmp_path / f"scripts/{module}.py", "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    assert module.split("/")[0] in breaches(tmp_path)


def test_public_names_of_chapters_core_and_fast_are_made_once():
    homes: dict[str, Path] = {}
    rooms = [p for p in MODULES if p in CHAPTERS or p.parent.name in ("core", "fast")]
    for path in rooms:
        for name in {name for name, _ in definitions(ast.parse(path.read_text("utf-8")))}:
            if not name.startswith("_"):
                assert name not in homes, f"{name} is defined in {homes[name]} and in {path}"
                homes[name] = path
    assert {"attention", "save_training"} <= homes.keys()


def chapters_classes() -> set[str]:
    """The classes that chapters define."""
    texts = "\n".join(path.read_text("utf-8") for path in CHAPTERS)
    return set(re.findall(r"^class (\w+)", texts, re.MULTILINE))


def test_plain_modules_never_ask_for_a_chapters_class():
    """In a notebook that class is `__main__`'s, and the answer would be no."""
    classes = chapters_classes()
    for path in (path for path in MODULES if path not in CHAPTERS):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                    named = {part.id for part in ast.walk(kinds) if isinstance(part, ast.Name)}
                case ast.MatchClass(cls=ast.Name(id=name)):
                    named = {name}
                case _:
                    continue
            assert not named & classes, f"{path}, line {node.lineno}: {named & classes}"
