"""Notebooks and scripts are pairs; what is stored was executed; every chart is a picture."""

import base64
import functools
import os
import subprocess
import sys

import jupytext
import nbformat
import pytest
from conftest import CHAPTERS, ROOT

from scripts.book.look import VEGALITE
from scripts.book.pairs import CONFIG

STEMS = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
MOST_IGNORED = 36  # cells whose output nbval may ignore: timings, devices, dropout, live training
HEADLESS = [path for path in CHAPTERS if path.stem[:4] in ("ch03", "ch08", "ch14")]
HIDDEN = ("DISPLAY", "WAYLAND_DISPLAY", "MULTI30K_DIR", "RANK", "PYTHONPATH")
ALONE = {name: value for name, value in os.environ.items() if name not in HIDDEN}
ALONE |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # no network
ALONE |= {"CUDA_VISIBLE_DEVICES": ""}
each_notebook = pytest.mark.parametrize("stem", STEMS)


@functools.cache
def read(stem):
    return nbformat.read(ROOT / f"notebooks/{stem}.ipynb", as_version=4)


def code_cells(stem):
    return [cell for cell in read(stem).cells if cell.cell_type == "code" and cell.source.strip()]


def outputs(stem):
    return [(cell, output) for cell in code_cells(stem) for output in cell.outputs]


def test_every_chapter_is_a_notebook_and_a_script():
    assert [path.stem for path in CHAPTERS] == STEMS


@each_notebook
def test_the_pair_is_in_step(stem):
    """`jupytext --test` passes on a drifted pair, so the notebook is converted and compared."""
    converted = jupytext.writes(read(stem), "py:percent", config=CONFIG)
    script = (ROOT / f"scripts/{stem}.py").read_text("utf-8")
    headless = [text[text.index("# %%") :].splitlines() for text in (converted, script)]
    assert headless[0] == headless[1], "run: make notebooks"


@each_notebook
def test_every_code_cell_was_executed_in_order(stem):
    """nbval runs a cell without an execution count, but does not compare it."""
    counts = [cell.execution_count for cell in code_cells(stem)]
    assert counts == list(range(1, len(counts) + 1)), "run: make notebooks"


@each_notebook
def test_every_chart_is_a_picture_with_title_and_caption(stem):
    charts = [o.data for _, o in outputs(stem) if any("vegalite" in k for k in o.get("data", {}))]
    for data in charts:
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
        title = data[VEGALITE]["title"]
        assert title["text"] and title["subtitle"]
        assert sum(map(len, data[VEGALITE].get("datasets", {}).values())) <= 5_000
    assert charts, "the chapter has no chart"
    assert (ROOT / f"notebooks/{stem}.ipynb").stat().st_size < 3 * 2**20  # GitHub's preview ends


def unfit(output):
    """Why an output should not be stored, or None."""
    text, data = output.get("text", ""), output.get("data", {})
    plain, html = data.get("text/plain", ""), data.get("text/html", "")
    lines = text.splitlines()
    reasons = {
        "an error": output.output_type == "error",
        "a remote script": "<script" in html or "http" in html,
        "a path of this machine": any(
            path in text + plain + html for path in ("/home/", "/root/", "/Users/", str(ROOT))
        ),
        "a bar drawn over and over": "\r" in text.rstrip("\r\n") or text.count("%|") > 1,
        "a wall of text": len(lines) > 40 or max(map(len, lines), default=0) > 240,
        "a raw value": set(data) == {"text/plain"} and (plain[:1] == "{" or len(plain) > 600),
        "a table without an end": html.count("<tr") > 40,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


@each_notebook
def test_it_reads_well_where_it_is_only_shown(stem):
    for cell, output in outputs(stem):
        assert unfit(output) is None, f"{unfit(output)}: {cell.source[:200]}"
        assert "bootstrap" not in cell.metadata.get("tags", [])  # the first cell shows nothing


def test_few_outputs_are_ignored():
    marked = [
        (stem, cell.source.splitlines()[0])
        for stem in STEMS
        for cell in code_cells(stem)
        if "NBVAL_" in cell.source or "nbval-" in str(cell.metadata.get("tags"))
    ]
    assert all(line == "# NBVAL_IGNORE_OUTPUT" for _, line in marked), marked
    assert len(marked) <= MOST_IGNORED, marked


@pytest.mark.slow
@pytest.mark.parametrize("path", HEADLESS, ids=lambda path: path.stem)
def test_the_script_runs_headless(path, tmp_path):
    """No display, no question, no network, no file left behind. nbval runs all the others."""
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, path], cwd=tmp_path, env=ALONE, **quiet)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(tmp_path.iterdir()), "a show leaves files in the working directory"


@pytest.mark.audit
@each_notebook
def test_every_cell_can_be_run_twice(stem, tmp_path):
    """Each cell, the same again, then the next: none raises, each time it shows what is stored."""
    twice = enumerate(cell for cell in code_cells(stem) for _ in range(2))
    cells = [nbformat.NotebookNode(cell, id=str(number)) for number, cell in twice]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "twice.ipynb")
    sanitize = f"--nbval-sanitize-with={ROOT / 'tests/nbval_sanitize.cfg'}"
    command = [sys.executable, "-m", "pytest", "twice.ipynb", "--nbval", "--nbval-current-env"]
    environment = ALONE | {"PYTHONPATH": str(ROOT)}
    kept = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, sanitize, "--color=no"], **kept)
    assert done.returncode == 0, done.stdout[-4000:]
