"""Executes notebooks and stores their outputs: `python -m scripts.book.execute notebooks/….ipynb`.

`make notebooks` does so. No times of day go into the file, and of a progress bar only its last
state, which is all that a preview shows: `jupyter nbconvert --execute` has no option for that.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from scripts.book.files import write_whole


def execute(path: Path) -> None:
    """Run a notebook from top to bottom in its folder, and rewrite it.

    Raises if a cell does, and ValueError if someone edited a cell meanwhile: their edit stays.
    """
    book = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in book.cells]
    for cell in book.cells:
        cell.metadata.pop("execution", None)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        book, timeout=None, resources=resources, record_timing=False, coalesce_streams=True
    )
    client.execute()
    if [cell.source for cell in nbformat.read(path, as_version=4).cells] != sources:
        raise ValueError(f"{path} was edited while it ran; nothing was stored: run make notebooks")
    write_whole(path, f"{nbformat.writes(book)}\n".encode())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            execute(Path(name))
        except ValueError as error:
            print("error:", error, file=sys.stderr)
            raise SystemExit(2) from None
