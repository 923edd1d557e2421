"""Executes notebooks and stores their outputs: `python -m scripts.book.execute notebooks/….ipynb`.

`make notebooks` does so. No times of day go into the file, and of a progress bar only its last
state, which is all that a preview shows: `jupyter nbconvert --execute` has no option for that.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> None:
    """Run a notebook from top to bottom in its folder, and rewrite it. Raises if a cell does."""
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        cell.metadata.pop("execution", None)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        book, timeout=None, resources=resources, record_timing=False, coalesce_streams=True
    )
    client.execute()
    nbformat.write(book, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        execute(Path(name))
