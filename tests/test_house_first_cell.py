"""The first cell: it finds the series, or fetches it, and lets no other package shadow it."""

import ast
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from conftest import CHAPTERS, ROOT

from scripts.book.first_cell import MARK, first_cell, repository, stamp

SHOW = "import scripts.ch01_attention as chapter\n\nprint(chapter.__file__, chapter.HELLO)\n"
CHAPTER = f'# %% [markdown]\n# # Chapter 1\n\n{MARK}pass\n\n# %%\nHELLO = "hello"\n{SHOW}'


@pytest.fixture
def series(tmp_path) -> Path:
    """A series of one tiny chapter, with the real first cell."""
    home = tmp_path / "series"
    (home / "scripts/book").mkdir(parents=True)
    (home / "notebooks").mkdir()
    for name in ("__init__.py", "book/__init__.py", "book/at_home.py", "book/first_cell.py"):
        (home / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    (home / "scripts/ch01_attention.py").write_text(stamp(CHAPTER, "ch01_attention"), "utf-8")
    (home / "pyproject.toml").write_text(
        '[project]\ndependencies = ["series-probe", "torch", "tqdm"]\n'
    )
    return home


@pytest.fixture
def stranger(tmp_path) -> Path:
    """A folder that holds another package named `scripts`."""
    folder = tmp_path / "series-old"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts/__init__.py").write_text("HELLO = 'wrong package'\n")
    return folder


def run(*command, cwd, **environment):
    """Runs a command without this test's own PYTHONPATH; returns the finished process."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SERIES_REPOSITORY")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {k: str(v) for k, v in environment.items()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def notebook(before: str = "") -> str:
    """What a notebook would run, as code for `python -c`, where `__file__` is unknown as well."""
    return f"{before}\n{first_cell()}\n{SHOW}"


def test_a_script_is_not_shadowed(series, stranger):
    done = run(sys.executable, "scripts/ch01_attention.py", cwd=series, PYTHONPATH=stranger)
    assert done.stderr == "" and done.stdout.split() == [
        str(series / "scripts/ch01_attention.py"),
        "hello",
    ]


@pytest.mark.parametrize("before", ["", "import scripts; assert scripts.HELLO == 'wrong package'"])
def test_a_notebook_is_not_shadowed(series, stranger, before):
    code = notebook(before)
    done = run(sys.executable, "-c", code, cwd=series / "notebooks", PYTHONPATH=stranger)
    assert done.stderr == "" and done.stdout.split()[0] == str(series / "scripts/ch01_attention.py")


def test_what_is_already_ours_stays(series):
    code = notebook("import sys; sys.path.insert(0, '..'); import scripts as early")
    code += "import scripts as late; assert late is early"
    done = run(sys.executable, "-c", code, cwd=series / "notebooks")
    assert done.returncode == 0, done.stderr


MIXED = "import scripts; scripts.__path__.append(HOME); "  # as an editable install mixes them
HIDDEN = "the package scripts in {stranger}/scripts hides the series' own in {series}/scripts: "
SHOWN = "this chapter would run its whole show: import scripts.ch01_attention"


@pytest.mark.parametrize("kind", ["package", "namespace"])
@pytest.mark.parametrize(
    "way, says",
    [
        (MIXED + "import scripts.ch01_attention", HIDDEN),
        ("import sys; sys.path.append(HOME); import ch01_attention", f"as ch01_attention, {SHOWN}"),
        (
            "import importlib.util as u; spec = u.spec_from_file_location('one', PATH); "
            "spec.loader.exec_module(u.module_from_spec(spec))",
            f"as one, {SHOWN}",
        ),
        (  # what multiprocessing does in each worker
            "import runpy; runpy.run_path(PATH, run_name='__mp_main__')",
            f"as __mp_main__, {SHOWN}",
        ),
    ],
)
def test_a_chapter_imported_past_its_loader_is_refused(series, stranger, kind, way, says):
    """Erratum 24: its show would run."""
    if kind == "namespace":
        (stranger / "scripts/__init__.py").unlink()
    home = series / "scripts"
    code = f"HOME, PATH = {str(home)!r}, {str(home / 'ch01_attention.py')!r}\n{way}"
    done = run(sys.executable, "-c", code, cwd=stranger)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and says.format(**locals()) in last


def test_a_command_that_another_package_hides_says_so(stranger):
    init = f"__path__.append({str(ROOT / 'scripts')!r})\n"
    (stranger / "scripts/__init__.py").write_text(init)
    done = run(sys.executable, "-m", "scripts.train", "--help", cwd=stranger)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: " + HIDDEN.format(stranger=stranger, series=ROOT))
    assert done.stderr.count("\n") == 1 and "python -P" in done.stderr
    link = stranger / "link"
    link.symlink_to(ROOT)  # by another path, it is the series still
    done = run(sys.executable, "-P", "-m", "scripts.train", "--help", cwd=stranger, PYTHONPATH=link)
    assert done.stdout.startswith("usage: ")


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory) -> Path:
    """An environment that has this one's packages, but neither the series nor `series-probe`."""
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # A path in a .pth file shares the packages; it does not run the editable install of the series.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin/python"


def put(shelf: Path, name: str, version: str, needs: str = "") -> None:
    """Writes a wheel of one empty module."""
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    about += f"Requires-Dist: {needs}\n" if needs else ""
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(shelf / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        for part, text in (("METADATA", about), ("WHEEL", tag), ("RECORD", "")):
            wheel.writestr(f"{name}-{version}.dist-info/{part}", text)


def test_a_bare_notebook_gets_the_series_and_what_is_missing(series, tmp_path, clean_python):
    shelf, desk = tmp_path / "shelf", tmp_path / "desk"
    shelf.mkdir(), desk.mkdir()
    put(shelf, "series_probe", "1.0")
    put(shelf, "series_probe", "2.0", needs="tqdm>=99")  # newer, but would replace what is here
    put(shelf, "tqdm", "99.0")
    git = ["git", "-C", series, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)

    code = notebook("import importlib.metadata as m; tqdm = m.version('tqdm')")
    code += "import series_probe; assert m.version('tqdm') == tqdm"
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": shelf}
    settings["SERIES_REPOSITORY"] = f"git+{series.as_uri()}"
    for turn in ("fetched", "found again"):
        done = run(clean_python, "-c", code, cwd=desk, **settings)
        assert done.returncode == 0, f"{turn}: {done.stderr}"
        assert done.stdout.split()[0].startswith(str(desk / "from-attention-to-translation"))


def test_without_an_address_it_says_what_to_set(tmp_path, clean_python):
    code = notebook().replace(f'"{repository()}"', '"set SERIES_REPOSITORY"')
    done = run(clean_python, "-c", code, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "fatal: repository 'set SERIES_REPOSITORY' does not exist" in done.stderr


def test_the_cell_is_short_and_folds():
    title, *lines = first_cell().strip().splitlines()
    assert title.startswith("# @title ") and sum(map(bool, lines)) <= 8


def test_the_cell_leaves_imports_and_lowercase_names_only():
    for node in ast.walk(ast.parse(first_cell())):
        assert not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assert node.id.islower()


def test_the_formatter_leaves_the_cell_as_it_is(tmp_path):
    script = tmp_path / "chapter.py"
    script.write_text(stamp(CHAPTER, "ch01_attention"), "utf-8")
    for check in (["format", "--check"], ["check", "--extend-ignore=E402"]):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *check,
            "--config",
            ROOT / "pyproject.toml",
            script,
        ]
        subprocess.run(command, check=True)


def test_stamping_twice_changes_nothing_and_keeps_the_rest():
    once = stamp(CHAPTER, "ch01_attention")
    assert stamp(once, "ch01_attention") == once
    assert once.replace(first_cell(), "pass\n") == CHAPTER
    bare = CHAPTER.replace(f"{MARK}pass\n\n", "")
    assert stamp(bare, "ch01_attention") == once


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_chapter_carries_the_cell(path):
    text = path.read_text("utf-8")
    assert stamp(text, path.stem) == text, "run: make notebooks"
