"""`python -m scripts.book.execute` stores what a preview can show: no times, no states."""

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from scripts.book.execute import execute

BAR = """\
import sys
for share in (0, 50, 100):
    print(f"\\r{share:3}%", end="", file=sys.stderr, flush=True)
"""

EDITOR = """\
import nbformat
book = nbformat.read("book.ipynb", 4)
book.cells[-1].source += "  # edited"
nbformat.write(book, "book.ipynb")
"""


@pytest.fixture
def book(tmp_path):
    """A notebook with a progress bar, and times from an earlier run."""
    cells = [new_code_cell(BAR), new_code_cell("open('here.txt').read()")]
    cells[0].metadata["execution"] = {"iopub.execute_input": "2017-06-12T00:00:00Z"}
    nbformat.write(new_notebook(cells=cells), tmp_path / "book.ipynb")
    (tmp_path / "here.txt").write_text("found", "utf-8")
    return tmp_path / "book.ipynb"


def test_the_last_state_of_a_bar_is_stored_and_no_time(book):
    execute(book)
    bar, reading = nbformat.read(book, 4).cells
    (output,) = bar.outputs
    assert "100%" in output.text and "50%" not in output.text
    assert "execution" not in bar.metadata and "execution" not in reading.metadata
    assert reading.outputs[0].data["text/plain"] == "'found'"  # it runs in its folder
    assert [bar.execution_count, reading.execution_count] == [1, 2]


def test_a_cell_that_raises_leaves_the_file_alone(book):
    (book.parent / "here.txt").unlink()
    before = book.read_bytes()
    with pytest.raises(CellExecutionError):
        execute(book)
    assert book.read_bytes() == before


def test_an_edit_made_while_it_ran_stays(book):
    """As by an editor: here a cell stands for it, and adds a line to the last cell."""
    stored = nbformat.read(book, 4)
    stored.cells.insert(0, new_code_cell(EDITOR))
    nbformat.write(stored, book)
    with pytest.raises(ValueError, match="book.ipynb was edited while it ran"):
        execute(book)
    assert nbformat.read(book, 4).cells[-1].source.endswith("# edited")
