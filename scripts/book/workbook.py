"""Writes the workbook: `python -m scripts.book.workbook scripts/ch01_attention.py …`.

`make workbook` does so. Cells with the tag `yours` hold the definitions that the reader writes
first. In build/workbook/ each chapter that has such cells lies with them emptied: signatures and
docstrings stay. A class's docstring names the parts that its `__init__`, emptied too, has to make,
since later cells and trained weights ask for them. All else is the chapter's: text, checks,
exercises. The answers are the chapter.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from scripts import ROOT
from scripts.book.files import write_whole

FOLDER = ROOT / "build" / "workbook"
TAG = "yours"
GAP = "raise NotImplementedError  # yours to write"
NOTE = """\
**This is the workbook.** You write {names}, where the code says `NotImplementedError`. \
The docstrings say what each must do, and the cells beneath check it. \
[The chapter]({chapter}) has the answers. Later chapters import ours: you can do each alone."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions of a cell and the methods of its classes, in order."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node)


def emptied(code: str) -> str:
    """A cell's code without the bodies that are the reader's to write."""
    lines = code.split("\n")
    for function in reversed([*functions(ast.parse(code))]):
        first = function.body[0]
        has_docstring = ast.get_docstring(function) is not None
        begin = first.end_lineno if has_docstring else first.lineno - 1
        lines[begin : function.end_lineno] = [" " * first.col_offset + GAP]
    return "\n".join(lines)


def is_yours(cell: NotebookNode) -> bool:
    """Whether a cell holds definitions that the reader writes."""
    return TAG in cell.metadata.get("tags", [])


def names_in(cell: NotebookNode) -> list[str]:
    """What a cell defines."""
    return [node.name for node in ast.parse(cell.source).body if hasattr(node, "name")]


def one_deeper(first_cell: str) -> str:
    """A chapter's first cell for `FOLDER`, which lies one folder deeper than notebooks/."""
    return first_cell.replace(', ".."]', ', "../.."]')


def moved(link: re.Match) -> str:
    """A chapter's link as it leads from `FOLDER` to the same file, or to a chapter's workbook."""
    if link[1].startswith("../"):
        return f"](../{link[1]}"
    tagged = f'"{TAG}"' in (ROOT / "notebooks" / link[1]).read_text("utf-8")
    return link[0] if tagged else f"](../../notebooks/{link[1]}"


def workbook(chapter: NotebookNode, stem: str) -> NotebookNode:
    """A chapter's notebook, emptied and without outputs, as it lies in `FOLDER`."""
    book = nbformat.from_dict(chapter)
    names = [f"`{name}`" for cell in book.cells if is_yours(cell) for name in names_in(cell)]
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if is_yours(cell):
            cell.source = emptied(cell.source)
        elif "bootstrap" in cell.metadata.get("tags", []):
            cell.source = one_deeper(cell.source)
        elif cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((?=\.\./|ch\d\d_)([^)#]+)", moved, cell.source)
    note = NOTE.format(names=", ".join(names), chapter=f"../../notebooks/{stem}.ipynb")
    book.cells.insert(1, nbformat.v4.new_markdown_cell(note, id="workbook"))
    return book


def write_workbook(stem: str, folder: Path = FOLDER) -> None:
    """Write a chapter's workbook, if it has one, and say so. What the reader has begun stays."""
    chapter = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4)
    count = sum(len(names_in(cell)) for cell in chapter.cells if is_yours(cell))
    path = folder / f"{stem}.ipynb"
    if count and path.exists():
        print(f"kept  {path}: delete it to begin again")
    elif count:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{nbformat.writes(workbook(chapter, stem))}\n".encode())
        print(f"wrote {path}: {count} to write")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted((ROOT / "notebooks").glob("ch*.ipynb")):
        write_workbook(Path(name).stem)
