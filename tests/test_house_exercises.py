"""Exercises: each has a stub in its chapter, a checker and a solution that the checker accepts."""

import ast
import importlib
import re

import pytest
import torch
from conftest import CHAPTERS, ROOT

from scripts.book.exercises import FOLDER, check, is_stub, names_in

MODULES = sorted(FOLDER.glob("ch*.py"))
TEXTS = {path.stem[:4]: path.read_text("utf-8") for path in CHAPTERS}
EXERCISES = [(path.stem, name) for path in MODULES for name in names_in(path)]
IMPORT = re.compile(r"^\s*(from|import) scripts(\.| import )exercises", re.MULTILINE)
WORTH = r"# \*(think|code|project) · difficulty [●○]{3} · worth [●○]{3} · \d+ minutes\*"


def test_names_are_unique():
    names = [name for _, name in EXERCISES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chapter, name", EXERCISES)
def test_a_checker_accepts_our_solution(chapter, name, dtype, capsys):
    torch.set_default_dtype(dtype)
    check(getattr(importlib.import_module(f"scripts.exercises.{chapter}"), name))
    assert capsys.readouterr().out == "" and torch.get_default_dtype() == dtype


@pytest.mark.parametrize("chapter, name", EXERCISES)
def test_a_chapter_has_the_stub_and_the_module_the_rest(chapter, name):
    text = TEXTS[chapter]
    assert re.search(rf"^check\({name}\)$", text, re.MULTILINE)
    assert f'`solution("{name}")`' in text
    stubs = [n for n in ast.parse(text).body if getattr(n, "name", "") == name]
    scope: dict = {}
    for stub in stubs:
        assert ast.get_docstring(stub), f"{name}: the stub doesn't say what is wanted"
        stub.args.defaults, stub.returns, stub.decorator_list = [], None, []
        for argument in ast.walk(stub.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        exec(compile(ast.Module([stub], []), name, "exec"), scope)
        assert is_stub(scope[name]), f"{name}: the stub holds the answer"


@pytest.mark.parametrize("chapter", sorted({chapter for chapter, _ in EXERCISES}))
def test_each_says_how_hard_it_is_what_it_is_worth_and_how_long_it_takes(chapter):
    text = TEXTS[chapter]
    assert text.count("\n# ### Exercise ") == len(re.findall(WORTH, text)) >= 3


@pytest.mark.parametrize("chapter", sorted(TEXTS))
def test_no_stored_notebook_prints_a_solution(chapter):
    calls = [n for n in ast.walk(ast.parse(TEXTS[chapter])) if isinstance(n, ast.Call)]
    assert not [c for c in calls if getattr(c.func, "id", "") == "solution"]


def test_no_other_module_imports_exercises():
    """They import chapters: the imports would be circular."""
    for path in (ROOT / "scripts").rglob("*.py"):
        if FOLDER not in path.parents:
            assert not IMPORT.search(path.read_text("utf-8")), path
