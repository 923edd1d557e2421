"""The workbook: its answers are the chapter; what is left empty, or is wrong, a check finds."""

import ast
import re
import sys
import types

import nbformat
import pytest
import torch
from conftest import CHAPTERS, ROOT

from scripts.book.workbook import (
    FOLDER,
    GAP,
    emptied,
    is_yours,
    names_in,
    workbook,
    write_workbook,
)


def read(stem):
    return nbformat.read(ROOT / f"notebooks/{stem}.ipynb", as_version=4)


def breaks(stem):
    """A chapter's pairs in tests/breaks.txt: a part of our text, and what it becomes."""
    text = (ROOT / "tests/breaks.txt").read_text("utf-8")
    (own,) = re.findall(rf"^{stem[:4]}\n((?:[-+].*\n)+)", text, re.MULTILINE)
    return re.findall(r"- (.*)\n\+ ?(.*)\n", own)


# Chapter 25 says all of it again, on one page; its only check is its training, of minutes.
TAGGED = [path.stem for path in CHAPTERS if any(map(is_yours, read(path.stem).cells))]
STEMS = [stem for stem in TAGGED if not stem.startswith("ch25")]
each_workbook = pytest.mark.parametrize("stem", STEMS)


def signatures(code):
    """Everything of a cell but its functions' bodies: names, arguments, docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Expr(ast.Constant(ast.get_docstring(node)))]
    return ast.dump(tree)


@each_workbook
def test_filled_in_from_the_chapter_it_is_the_chapter(stem):
    chapter, book = read(stem), workbook(read(stem), stem)
    note = book.cells.pop(1)
    nbformat.validate(book)
    for asked, answer in zip(book.cells, chapter.cells, strict=True):
        if is_yours(asked):
            assert all(f"`{name}`" in note.source for name in names_in(answer))
            assert signatures(asked.source) == signatures(answer.source)
            assert asked.source.count(GAP) >= len(names_in(answer))
        else:  # the first cell and links change
            source = asked.source.replace("../../notebooks/", "").replace("../../", "../")
            assert source.replace('"../.."', '".."') == answer.source
        assert not asked.get("outputs") and asked.get("execution_count") is None
    text = "".join(cell.source for cell in [note, *book.cells] if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)#:]+)[)#]", text):
        there = (FOLDER / link).resolve()
        assert there.stem in TAGGED if there.parent == FOLDER else there.exists(), link


@each_workbook
def test_a_class_says_what_its_parts_are_called(stem):
    """Its `__init__` is empty, and later cells and trained weights ask for them."""
    for tree in (ast.parse(cell.source) for cell in read(stem).cells if is_yours(cell)):
        for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            starts = [ast.unparse(f) for f in node.body if getattr(f, "name", "") == "__init__"]
            parts = re.findall(r"\bself\.(\w+)(?:: [^=]+)? =", "".join(starts))
            lacking = {part for part in parts if f"`{part}`" not in ast.get_docstring(node)}
            assert not lacking, f"{stem}: the docstring of {node.name} doesn't name {lacking}"


def test_what_the_reader_began_stays(tmp_path, capsys):
    for _ in range(2):
        for path in CHAPTERS:
            write_workbook(path.stem, tmp_path)
    said = capsys.readouterr().out
    written = sorted(tmp_path.iterdir())
    assert said.count("wrote ") == said.count("kept ") == len(written) >= len(STEMS)


def definitions(code):
    """By name, the text of each definition of a cell."""
    nodes = [node for node in ast.parse(code).body if hasattr(node, "name")]
    return {node.name: ast.get_source_segment(code, node) for node in nodes}


def variants(stem, code):
    """The cell with each of its definitions left empty, and with each of its breaks."""
    for name, text in definitions(code).items():
        yield f"{name} is empty", code.replace(text, emptied(text))
        wrong = [pair for pair in breaks(stem) if pair[0] in text]
        assert wrong, f"tests/breaks.txt has no wrong version of {stem}'s {name}"
        for old, new in wrong:
            assert text.count(old) == 1, f"{name} has more than one {old}"
            broken = text.replace(old, new)
            ast.parse(broken)
            yield f"{name}: {old} became {new}", code.replace(text, broken)


def failure(cells, namespace):
    """The exception that running `cells` ends with, or None."""
    try:
        for code in cells:
            exec(compile(code, "<cell>", "exec"), namespace)
    except Exception as error:
        return error
    return None


def beneath(cells, i):
    """The code of the few cells under cell `i` that have to find its faults.

    Definitions that are the reader's and follow at once come along; at the next one it ends.
    """
    rest = range(i + 1, min(i + 5, len(cells)))
    new = (j for j in rest if is_yours(cells[j]) and not is_yours(cells[j - 1]))
    return [cell.source for cell in cells[i + 1 : min(new, default=rest.stop)]]


@pytest.mark.slow
@each_workbook
def test_empty_or_broken_a_check_beneath_it_fails(stem, monkeypatch):
    module = types.ModuleType("a_workbook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace, missed = vars(module), []
    cells = [cell for cell in read(stem).cells if cell.cell_type == "code"][1:]
    yours = [i for i, cell in enumerate(cells) if is_yours(cell)]
    for old, _ in breaks(stem):
        assert any(old in cells[i].source for i in yours), f"nothing to write in {stem} has {old}"
    for i, cell in enumerate(cells[: yours[-1] + 1]):
        for what, code in variants(stem, cell.source) if i in yours else ():
            kept, state, dtype = dict(namespace), torch.get_rng_state(), torch.get_default_dtype()
            if failure([code, *beneath(cells, i)], namespace) is None:
                missed.append(what)
            namespace.clear()
            namespace.update(kept)
            torch.set_rng_state(state)
            torch.set_default_dtype(dtype)
        assert failure([cell.source], namespace) is None
    assert not missed, "no check finds:\n" + "\n".join(missed)
