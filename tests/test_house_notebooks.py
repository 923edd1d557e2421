"""Notebooks and scripts are pairs; what is stored was executed; every chart is a picture."""

import base64
import functools
import os
import re
import subprocess
import sys

import jupytext
import nbformat
import pytest
import warm
from conftest import CHAPTERS, ROOT
from jupytext.config import load_jupytext_configuration_file
from saying import HIDDEN, NO_NETWORK

from scripts.book.charts import VEGALITE

BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STEMS = [path.stem for path in BOOKS]
MOST_IGNORED = 4  # cells whose output nbval may ignore: timings, devices, dropout
TESTS = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "tests").glob("test_*.py")))
RAN = {*re.findall(r'ran\("(ch\d\d)"\)', TESTS)}  # run headless by the tests of their sentences


@functools.cache
def read(stem):
    return nbformat.read(ROOT / f"notebooks/{stem}.ipynb", as_version=4)


def code_cells(stem):
    cells = (cell for cell in read(stem).cells if cell.cell_type == "code")
    return [cell for cell in cells if cell.source.strip()]


def outputs(stem):
    return [(cell, output) for cell in code_cells(stem) for output in cell.outputs]


def test_every_chapter_is_a_notebook_and_a_script():
    assert [path.stem for path in CHAPTERS] == STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_the_pair_is_in_step(stem):
    """`jupytext --test` passes on a drifted pair, so the notebook is converted and compared."""
    config = load_jupytext_configuration_file(str(ROOT / "jupytext.toml"))
    converted = jupytext.writes(read(stem), "py:percent", config=config)
    script = (ROOT / f"scripts/{stem}.py").read_text("utf-8")
    assert from_first_cell(converted) == from_first_cell(script), "run: make notebooks"


def from_first_cell(script):
    """A script without its header, which is jupytext's own."""
    return script[script.index("# %%") :].splitlines()


@pytest.mark.parametrize("stem", STEMS)
def test_every_code_cell_was_executed_in_order(stem):
    """nbval runs a cell without an execution count, but does not compare it."""
    counts = [cell.execution_count for cell in code_cells(stem)]
    assert counts == list(range(1, len(counts) + 1)), "run: make notebooks"


@pytest.mark.parametrize("stem", STEMS)
def test_the_first_cell_shows_nothing(stem):
    (first,) = (c for c in code_cells(stem) if "bootstrap" in c.metadata.get("tags", []))
    assert not first.outputs


@pytest.mark.parametrize("stem", STEMS)
def test_no_output_is_an_error_or_a_remote_script(stem):
    for cell, output in outputs(stem):
        assert output.output_type != "error", cell.source
        html = str(output.get("data", {}).get("text/html", ""))
        assert "<script" not in html and "http" not in html, cell.source


@pytest.mark.parametrize("stem", STEMS)
def test_every_chart_is_a_picture_with_title_and_caption(stem):
    charts = [o.data for _, o in outputs(stem) if any("vegalite" in k for k in o.get("data", {}))]
    for data in charts:
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
        title = data[VEGALITE]["title"]
        assert title["text"] and title["subtitle"]
        assert sum(map(len, data[VEGALITE].get("datasets", {}).values())) <= 5_000
    assert charts, "the chapter has no chart"


@pytest.mark.parametrize("stem", STEMS)
def test_outputs_name_no_machine(stem):
    for cell, output in outputs(stem):
        data = output.get("data", {})
        text = f"{output.get('text', '')}{data.get('text/plain', '')}{data.get('text/html', '')}"
        for trace in ("/home/", "/root/", "/Users/", str(ROOT)):
            assert trace not in text, cell.source


@pytest.mark.parametrize("stem", STEMS)
def test_the_notebook_is_small(stem):
    assert (ROOT / f"notebooks/{stem}.ipynb").stat().st_size < 3 * 2**20


def tiresome(output):
    """Why a reader would skip this output in a preview such as GitHub's, or None."""
    text = output.get("text", "")
    data = output.get("data", {})
    if "\r" in text.rstrip("\r\n") or text.count("%|") > 1:
        return "a bar drawn over and over"  # a preview shows all its states
    if len(text.splitlines()) > 40 or max(map(len, text.splitlines()), default=0) > 240:
        return "a wall of text"
    if set(data) == {"text/plain"}:
        plain = data["text/plain"]
        if plain.startswith("{") or len(plain) > 600:
            return "a raw value"
    if data.get("text/html", "").count("<tr") > 40:
        return "a table without an end"
    return None


@pytest.mark.parametrize("stem", STEMS)
def test_it_reads_well_where_it_is_only_shown(stem):
    for cell, output in outputs(stem):
        assert tiresome(output) is None, f"{tiresome(output)}: {cell.source[:200]}"


def test_what_tires_a_reader_is_found():
    bad = [
        {"text": "\r 0%|   |\r 50%|###  |\r100%|######|\n"},
        {"text": "word " * 100},
        {"text": "line\n" * 100},
        {"data": {"text/plain": "{'a': 1}"}},
        {"data": {"text/plain": "Table", "text/html": "<tr></tr>" * 50}},
    ]
    assert len({tiresome(output) for output in bad}) == 4
    assert None not in map(tiresome, bad)
    assert tiresome({"text": "100%|######|\n"}) is None
    assert tiresome({"data": {"text/plain": "tensor([1., 2.])"}}) is None


def test_few_outputs_are_ignored():
    marked = [
        (stem, cell.source.splitlines()[0])
        for stem in STEMS
        for cell in code_cells(stem)
        if "NBVAL_" in cell.source or "nbval-" in str(cell.metadata.get("tags"))
    ]
    assert all(line == "# NBVAL_IGNORE_OUTPUT" for _, line in marked), marked
    assert len(marked) <= MOST_IGNORED, marked


@pytest.fixture(scope="module")
def server():
    """Runs scripts in other processes, without display, GPU or network."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*HIDDEN, "PYTHONPATH"):
            patch.delenv(name, raising=False)
        with warm.server(CUDA_VISIBLE_DEVICES="", **NO_NETWORK) as ask:
            yield ask


@pytest.mark.parametrize(
    "path", [path for path in CHAPTERS if path.stem[:4] not in RAN], ids=lambda path: path.stem
)
def test_the_script_runs_headless(path, server, tmp_path):
    """No display, no question, no network, no file left behind: exit code 0."""
    desk, log = tmp_path / "desk", tmp_path / "log.txt"
    desk.mkdir()
    assert server(desk, log, path) == 0, log.read_text("utf-8")[-2000:]
    assert not list(desk.iterdir()), "a show leaves files in the working directory"


def test_a_script_runs_from_its_own_command():
    """As above, but by `python`, which has to import everything."""
    done = subprocess.run([sys.executable, str(CHAPTERS[3])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.audit
@pytest.mark.parametrize("stem", STEMS)
def test_every_cell_can_be_run_twice(stem, tmp_path):
    """Each cell, the same again, then the next: none raises, each time it shows what is stored."""
    twice = enumerate(cell for cell in code_cells(stem) for _ in range(2))
    cells = [nbformat.NotebookNode(cell, id=str(number)) for number, cell in twice]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "twice.ipynb")
    sanitize = f"--nbval-sanitize-with={ROOT / 'tests/nbval_sanitize.cfg'}"
    kept = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "twice.ipynb",
            "--nbval",
            "--nbval-current-env",
            sanitize,
            "--color=no",
        ],
        env=kept | NO_NETWORK | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
