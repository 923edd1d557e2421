"""`python -m scripts.book.pairs`: what someone edited wins, whichever file is newer."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_output

from scripts.book.first_cell import MARK, first_cell
from scripts.book.pairs import NOTEBOOK, SCRIPT, Chapter, bring_all_into_step

STEMS = ("ch01_one", "ch02_two")
TEXT = f"# %% [markdown]\n# # Title\n\n{MARK}pass\n\n# %%\nfirst = 1\n\n# %%\nsecond = 2\n"


@pytest.fixture
def series(tmp_path):
    """Two chapters, whose cells have outputs, committed; two first cells are to be stamped."""
    (tmp_path / "scripts").mkdir()
    for stem in STEMS:
        (tmp_path / f"scripts/{stem}.py").write_text(TEXT, "utf-8")
        chapter = Chapter(tmp_path / f"scripts/{stem}.py")
        chapter.bring_into_step(SCRIPT)
        book = nbformat.read(chapter.paths[NOTEBOOK], 4)
        for cell in book.cells[2:]:
            cell.outputs = [new_output("stream", text=f"of {cell.source}")]
        nbformat.write(book, chapter.paths[NOTEBOOK])
        chapter.remembered.unlink()
    git(tmp_path, "init")
    git(tmp_path, "add", "scripts", "notebooks")
    git(tmp_path, "commit", "-m", "Two chapters")
    return tmp_path


def git(folder, *words):
    who = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)


def files(series):
    return sorted(path for path in series.glob("[sn]*/*") if path.is_file())


def edit(series, name, old, new):
    """Replace words in a file and make it the oldest of all."""
    path = series / name
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    os.utime(path, (0, 0))


def save(path):
    """As an editor saves a notebook that was run in another kernel."""
    book = nbformat.read(path, 4)
    book.metadata.kernelspec = {"name": "python3", "display_name": ".venv (3.12)"}
    book.cells[-1].outputs[0].text = "another output"
    nbformat.write(book, path)


def step(series):
    bring_all_into_step([series / f"scripts/{stem}.py" for stem in STEMS])
    return [path.read_text("utf-8") for path in files(series)]


def outputs(series):
    """The outputs of the first chapter's last two cells."""
    book = nbformat.read(series / f"notebooks/{STEMS[0]}.ipynb", 4)
    return [[output.text for output in cell.outputs] for cell in book.cells[2:]]


@pytest.mark.parametrize("committed", [False, True], ids=["", "committed"])
@pytest.mark.parametrize("name", ["scripts/ch01_one.py", "notebooks/ch01_one.ipynb"])
def test_the_edited_side_wins_though_the_other_is_newer(series, name, committed):
    save(series / "notebooks/ch01_one.ipynb")
    edit(series, name, "first = 1", "first = 10")
    if committed:  # without the other side
        git(series, "commit", "-am", "An edit")
    step(series)
    for file in files(series)[::2]:  # of the first chapter
        assert "first = 10" in file.read_text("utf-8")
    assert outputs(series)[1] == ["another output"]
    edit(series, name, "first = 10", "first = 100")  # again, and nothing was committed
    step(series)
    for file in files(series)[::2]:
        assert "first = 100" in file.read_text("utf-8")


@pytest.mark.parametrize("edits", [[], ["scripts/ch01_one.py", "notebooks/ch01_one.ipynb"]])
def test_what_agrees_is_left_alone(series, edits):
    for name in edits:
        edit(series, name, "first = 1", "first = 10")
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files(series)]
    step(series)
    assert before == [(path.read_bytes(), path.stat().st_mtime_ns) for path in files(series)]


def test_two_edits_are_refused_before_anything_is_written(series):
    for stem in STEMS:
        edit(series, f"scripts/{stem}.py", "first = 1", "first = 10")
    edit(series, "notebooks/ch02_two.ipynb", "second = 2", "second = 20")
    before = [path.read_bytes() for path in files(series)]
    command = [sys.executable, "-m", "scripts.book.pairs", *map(str, files(series))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1 and "ch01_one" not in done.stderr
    assert "scripts/ch02_two.py and notebooks/ch02_two.ipynb" in done.stderr
    assert before == [path.read_bytes() for path in files(series)]
    (series / "notebooks/ch02_two.ipynb").unlink()  # as the message says
    assert sum("first = 10" in text for text in step(series)) == 4


def test_a_new_first_cell_is_no_edit(series):
    stale = first_cell().splitlines()[0]
    edit(series, "scripts/ch01_one.py", stale, "# an older first cell")
    edit(series, "notebooks/ch01_one.ipynb", stale, "# an older first cell")
    git(series, "commit", "-am", "As it was before the address changed")
    edit(series, "notebooks/ch01_one.ipynb", "first = 1", "first = 10")
    texts = step(series)
    assert sum("first = 10" in text for text in texts) == 2
    assert sum(stale in text for text in texts) == 4


@pytest.mark.parametrize("kept", ["scripts", "notebooks"])
def test_without_git_only_a_missing_side_is_made(series, kept):
    shutil.rmtree(series / ".git")
    for path in files(series):
        if path.parent.name == kept:
            edit(series, path, "second = 2", "second = 20")
    with pytest.raises(ValueError, match="scripts/ch01_one.py and notebooks/ch01_one.ipynb; "):
        step(series)
    for path in files(series):
        if path.parent.name != kept:
            path.unlink()
    assert sum("second = 20" in text for text in step(series)) == 4
