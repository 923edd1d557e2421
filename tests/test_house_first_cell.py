"""The first cell: a chapter runs wherever it lies, and fetches the series if it lies alone."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jupytext
import pytest
from conftest import CHAPTERS, ROOT

from scripts.book import first_cell
from scripts.book.address import set_address
from scripts.book.first_cell import MARK, stamp
from scripts.book.workbook import one_deeper
from scripts.core.models import STUDIED

HOME = "from-attention-to-translation"
CHAPTER = "ch02_multi_head_attention"  # it runs in some seconds
WHERE = """
import scripts.ch01_attention, series_probe
print("ran", os.path.realpath(scripts.ch01_attention.__file__))
"""
PIP = """
import pathlib, sys
print("pip", *sys.argv[1:])
pathlib.Path(__file__).with_name("series_probe.py").touch()
"""
EXPECTED = {"pyproject.toml": (1, 0), "CITATION.cff": (1, 0), "README.md": (0, 1)}
PROBE = "import sys; sys.modules['series_probe'] = sys"  # where it is not for pip to bring it


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Path:
    """A repository of the series that is installed nowhere, and needs one more package."""
    home = tmp_path_factory.mktemp("series")
    for name in ("scripts", "notebooks", "results"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "CITATION.cff", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, home)
    shutil.copytree(STUDIED, home / STUDIED.relative_to(ROOT))
    project = (home / "pyproject.toml").read_text("utf-8")
    more = project.replace("dependencies = [\n", 'dependencies = [\n    "series_probe>=1",\n', 1)
    (home / "pyproject.toml").write_text(more, "utf-8")
    git = ["git", "-C", home, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    return home


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A Python that has this one's packages, but not the series."""
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # A path in a .pth file shares the packages; it does not run the editable install of the series.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin/python"


@pytest.fixture
def run(python, tmp_path):
    """Runs code or a file in a folder; pip is another that only says what it was asked for."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/pip.py").write_text(PIP)

    def run(*command, cwd, **environment):
        return subprocess.run(
            [python, *command],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "fake")} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def desk(tmp_path) -> Path:
    """An empty folder, but for a chapter's code as a notebook runs it, and a last cell."""
    (tmp_path / "desk").mkdir()
    code = (ROOT / f"scripts/{CHAPTER}.py").read_text("utf-8")
    (tmp_path / "desk/chapter.py").write_text(code + WHERE, "utf-8")
    return tmp_path / "desk"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["repository", "zip"])
def test_a_chapter_alone_gets_the_series_and_what_is_missing(
    series, run, desk, source, monkeypatch
):
    if source == "repository":  # as `make address` stamps it
        monkeypatch.setattr(first_cell, "repository", series.as_uri)
        code = (desk / "chapter.py").read_text("utf-8")
        (desk / "chapter.py").write_text(stamp(code, CHAPTER), "utf-8")
    else:
        subprocess.run(["make", "colab"], cwd=series, check=True, capture_output=True)
        shutil.copy(series / f"build/{HOME}.zip", desk)
    done = run("chapter.py", cwd=desk)
    assert done.returncode == 0, done.stderr
    place = desk.resolve() / HOME / "scripts/ch01_attention.py"
    assert "pip install --quiet series_probe>=1\n" in done.stdout
    assert done.stdout.endswith(f"ran {place}\n")
    fetched = {path.name for path in (desk / HOME).iterdir()}
    assert fetched >= {"results", "models", "notebooks", "pyproject.toml"}
    again = run("-c", f"{first_cell.first_cell()}{WHERE}", cwd=desk)  # with neither, as in a kernel
    assert again.stdout.endswith(f"ran {place}\n"), again.stderr


@pytest.mark.slow
def test_a_checkout_that_is_not_installed_is_used(series, run, tmp_path):
    script = series / "scripts/ch99_probe.py"
    script.write_text(f"{PROBE}\n{first_cell.first_cell()}{WHERE}", "utf-8")
    as_script = run(script, cwd=tmp_path)  # from anywhere
    in_notebook = run("-c", script.read_text("utf-8"), cwd=series / "notebooks")
    (folder := series / "build/workbook").mkdir(parents=True)
    in_workbook = run("-c", one_deeper(script.read_text("utf-8")), cwd=folder)
    for done in (as_script, in_notebook, in_workbook):
        ran = f"ran {series.resolve() / 'scripts/ch01_attention.py'}\n"
        assert (done.stdout, done.stderr) == (ran, "")
    script.unlink()


@pytest.mark.slow
def test_ours_comes_first(series, run, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/__init__.py").write_text("raise RuntimeError('of another project')")
    code = f"{PROBE}\n{first_cell.first_cell()}{WHERE}"
    ours = run("-c", code, cwd=series / "notebooks", PYTHONPATH=str(tmp_path))
    assert ours.returncode == 0, ours.stderr


def test_alone_and_without_an_address_it_says_what_to_do(run, tmp_path, monkeypatch):
    monkeypatch.setattr(first_cell, "repository", lambda: "")
    done = run("-c", first_cell.first_cell(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Put {HOME}.zip, which `make colab` writes, beside this notebook.\n"


def test_the_cell_has_five_lines_and_every_chapter_carries_it():
    assert len([line for line in first_cell.first_cell().splitlines() if line]) <= 5
    for path in CHAPTERS:
        text = path.read_text("utf-8")
        assert stamp(text, path.stem) == text and text.count(MARK) == 1, "run: make notebooks"


@pytest.mark.slow
def test_an_address_is_set_everywhere_and_taken_away(series, monkeypatch, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(series, copy, ignore=shutil.ignore_patterns("build"))
    for path in [*copy.glob("*/ch[0-9][0-9]_*")]:
        if path.stem != CHAPTER:
            path.unlink()
    monkeypatch.setattr(first_cell, "ROOT", copy)
    files = [copy / name for name in ("pyproject.toml", "CITATION.cff", "README.md")]
    files += [copy / f"scripts/{CHAPTER}.py", copy / f"notebooks/{CHAPTER}.ipynb"]
    set_address("", copy)
    bare = [path.read_text("utf-8") for path in files]
    url = "https://github.com/someone/series"
    for _ in range(2):  # the second time it changes nothing
        set_address(url, copy)
        texts = {path: path.read_text("utf-8") for path in files}
        for path in files:
            links = texts[path].count("research.google.com/github/someone/series/blob/HEAD/")
            addresses = texts[path].count(url)
            assert (addresses, links) == EXPECTED.get(path.name, (1, 1)), path
    counts = [c.execution_count for c in jupytext.read(files[-1]).cells if c.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    set_address("", copy)
    assert bare == [path.read_text("utf-8") for path in files]
    with pytest.raises(ValueError, match="is no address"):
        set_address('https://example.org/"quoted"', copy)
