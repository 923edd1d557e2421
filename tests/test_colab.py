"""The one notebook that `make colab` writes: whole, in one namespace, and running anywhere."""

import ast
import builtins
import hashlib
import json
import os
import re
import subprocess
import symtable
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
import pytest
from conftest import CHAPTERS, MODULES, ROOT

from scripts import bound_names, definitions, is_definition
from scripts.book.first_cell import first_cell

sys.path.insert(0, str(ROOT / "docs"))
import colab  # noqa: E402

LIMIT = 20 * 2**20  # bytes; Colab is said to take notebooks of up to 20 MB
START = re.compile(r"# @title A fresh start for chapter (\d+)\n")
FENCE = '''\
"""Refuses other hosts, and the folder FENCED_OFF, to every Python of this environment."""

import os
import sys

HERE = {"", "localhost", "127.0.0.1", "::1", "0.0.0.0", None}


def refuse(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        place = arguments[event != "socket.getaddrinfo"]
        host = place[0] if isinstance(place, tuple) else None if "/" in str(place) else place
        if host not in HERE:
            raise OSError(f"fenced: no way to {host}")
    elif event in ("open", "os.listdir", "os.scandir"):
        path = arguments[0] if isinstance(arguments[0], (str, os.PathLike)) else ""
        if os.path.abspath(path).startswith(os.environ["FENCED_OFF"]):
            raise OSError(f"fenced: {path} is the repository's")


if "FENCED_OFF" in os.environ:
    sys.addaudithook(refuse)
'''
RUN = '''\
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
probe = """import json, resource, sys
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
ours = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "scripts"}
print(json.dumps([sys.path, ours, peak]))"""
notebook.cells.append(nbformat.v4.new_code_cell(probe))
NotebookClient(notebook, timeout=900, kernel_name="python3", coalesce_streams=True).execute()
nbformat.write(notebook, "executed.ipynb")
'''


@pytest.fixture(scope="session")
def written(once) -> Path:
    """The notebook as the command writes it."""
    command = [sys.executable, str(ROOT / "docs/colab.py")]
    write = lambda folder: subprocess.run(  # noqa: E731
        [*command, str(folder / f"{colab.HOME}.ipynb")], cwd=folder, check=True
    )
    return once("one-notebook", write) / f"{colab.HOME}.ipynb"


@pytest.fixture(scope="session")
def notebook(written) -> nbformat.NotebookNode:
    return nbformat.read(written, 4)


def code_of(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def by_chapter(notebook) -> dict[int, list[str]]:
    """The code cells of each chapter; -1 has those before the first."""
    chapters, number = {-1: []}, -1
    for text in code_of(notebook):
        if START.match(text):
            number = int(START.match(text)[1])
            chapters[number] = []
        chapters[number].append(text)
    return chapters


def defined(code: str) -> list[str]:
    """The names that code defines, without imports, in order."""
    return [name for name, _ in definitions(ast.parse(code))]


def test_it_is_valid_and_holds_no_outputs(notebook):
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or not (cell.outputs or cell.execution_count)


def test_it_is_small_enough_and_every_cell_can_travel(written, notebook):
    assert written.stat().st_size < LIMIT
    assert max(len(cell.source) for cell in notebook.cells) < 1.1 * colab.PART


def test_the_same_chapters_give_the_same_bytes(written, tmp_path):
    again = tmp_path / "again.ipynb"
    subprocess.run([sys.executable, str(ROOT / "docs/colab.py"), str(again)], check=True)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (written, again)]
    assert digests[0] == digests[1]


def imports(text: str) -> Iterator[str]:
    """What a cell imports, anywhere in it, as dotted paths."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_only_chapter_0_imports_from_chapters(notebook):
    """What the others define is above; what else the package has is imported as usual."""
    kept = set()
    for chapter, texts in by_chapter(notebook).items():
        names = {name for text in texts for name in imports(text)}
        assert chapter == 0 or not any(name.startswith("scripts.ch") for name in names)
        kept |= names
    assert {
        "scripts.ROOT",
        "scripts.book.charts.titled",
        "scripts.ch01_attention.padding_mask",
    } < kept


def test_every_definition_is_there_once_and_in_reading_order(notebook):
    wanted = [name for path in CHAPTERS for name in defined(path.read_text("utf-8"))]
    cells = by_chapter(notebook)
    del cells[-1]
    assert list(cells) == [int(path.stem[2:4]) for path in CHAPTERS]
    found = [name for texts in cells.values() for text in texts for name in defined(text)]
    assert found == wanted


def test_comments_and_prose_survive(notebook):
    """Every line of every chapter is there, except imports from chapters and first cells."""
    kept = {line for cell in notebook.cells for line in cell.source.splitlines()}
    for path in CHAPTERS:
        for cell in jupytext.read(path).cells:
            if "bootstrap" in cell.metadata.get("tags", []):
                continue
            if cell.cell_type == "markdown":
                wanted = set(colab.linked(cell.source).splitlines())
            else:
                gone = [n for n in ast.parse(cell.source).body if colab.replacement(n) is not None]
                numbers = {i for n in gone for i in range(n.lineno, n.end_lineno + 1)}
                lines = enumerate(cell.source.splitlines(), 1)
                wanted = {line for number, line in lines if number not in numbers}
            assert wanted - {""} <= kept, path.stem


def test_contents_and_links_lead_to_headings(notebook):
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    anchors = re.findall(r'<a id="([^"]+)" name="\1"></a>\n\n#', "\n".join(prose))
    assert len(anchors) == len(set(anchors))
    contents = re.findall(r"\]\(#([^)]+)\)", prose[0])
    assert contents == anchors and {path.stem[:4] for path in CHAPTERS} <= set(anchors)
    for text in prose:
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors)
        assert not re.search(r"\]\((?!https?:|#)[\w./]+\)", re.sub(r"`[^`]*`|\$[^$]*\$", "", text))
    headings = sum(
        len(re.findall(r"^##? ", re.sub(r"(?s)```.*?```", "", cell.source), re.MULTILINE))
        for path in CHAPTERS
        for cell in jupytext.read(path).cells
        if cell.cell_type == "markdown"
    )
    assert len(anchors) == headings


def test_no_name_is_missing(notebook, tmp_path):
    """Not even in functions that the show never calls. Chapter 0 needs nothing from below it."""
    chapters = by_chapter(notebook)
    start = [text for text in chapters.pop(-1) if "FILE_PARTS[" not in text]
    for name, texts in {
        "start.py": start + chapters[0],
        "series.py": sum(chapters.values(), start),
    }.items():
        (tmp_path / name).write_text("FILE_PARTS = {}\n" + "\n\n".join(texts), "utf-8")
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
        done = subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def stored(node: ast.stmt) -> set[str]:
    """The names that a statement of the show binds at the top level."""
    names, waiting = set(), [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            names.add(part.name)
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            names.update(bound_names(part))
        elif isinstance(part, ast.Name) and isinstance(part.ctx, (ast.Store, ast.Del)):
            names.add(part.id)
        elif not isinstance(
            part, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        ):
            names.update(filter(None, [getattr(part, "name", None)]))
            waiting += ast.iter_child_nodes(part)
    return names


def globals_of_functions(nodes: list[ast.stmt]) -> set[str]:
    """The global names that functions and classes look up when they run."""
    table = symtable.symtable(ast.unparse(ast.Module(nodes, [])), "cell", "exec")
    names, waiting = set(), list(table.get_children())
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        names |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
    return names


def identity(node: ast.stmt, name: str, chapter: int) -> str:
    """What a definition's name stands for: an import's dotted path, else the chapter's own.

    A chapter's own is the same here and in the package, from which chapter 0 imports it.
    """
    if isinstance(node, ast.ImportFrom):
        whole = next(f"{node.module}.{n.name}" for n in node.names if (n.asname or n.name) == name)
        found = re.fullmatch(r"scripts\.ch(\d\d)_\w+\.(\w+)", whole)
        return f"chapter {int(found[1])}: {found[2]}" if found else whole
    if isinstance(node, ast.Import):
        return next(n.name if n.asname else name for n in node.names)
    return f"chapter {chapter}: {name}"


def collisions(chapters: dict[int, list[str]]) -> list[str]:
    """Definitions that are replaced while a function or a later chapter's show needs them."""
    kinds, made = defaultdict(set), dict.fromkeys(dir(builtins), (-2, 0))
    needed, taken, shown = set(), [], defaultdict(list)
    for chapter, texts in chapters.items():
        for place, text in enumerate(texts):
            body = ast.parse(text).body
            defining = [node for node in body if is_definition(node)]
            needed |= globals_of_functions(defining)
            for node in body:
                if node in defining:
                    for name in bound_names(node):
                        kinds[name].add(identity(node, name, chapter))
                        made.setdefault(name, (chapter, place))
                        shown[name].append((chapter, place, "bound"))
                    continue
                names = stored(node)
                for part in ast.walk(node):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                        shown[part.id].append((chapter, place, "used"))
                for name in names:
                    shown[name].append((chapter, place, "bound"))
                    if name in made:
                        taken.append((chapter, name))
    wrong = [
        f"{name}: {sorted(of)}" for name, of in kinds.items() if name in needed and len(of) > 1
    ]
    for chapter, name in taken:
        later = sorted(use for use in shown[name] if use[0] > chapter)
        first = {of: event for of, _, event in reversed(later)}
        if name in needed or "used" in first.values():
            wrong.append(f"chapter {chapter} binds {name}, which others need")
    return sorted(set(wrong))


def test_no_chapter_takes_a_name_that_others_need(notebook):
    assert not collisions(by_chapter(notebook))


@pytest.mark.parametrize(
    "first, second, wrong",
    [
        ("def f(): return g()\ndef g(): pass", "g = 1", ["chapter 2 binds g, which others need"]),
        ("def g(): pass", "g = 1", []),
        ("def g(): pass\ng = 1", "print(g())", ["chapter 1 binds g, which others need"]),
        ("def g(): pass\nfor g in 'ab': pass", "g = 2\nprint(g)", []),
        ("from a import g\ndef f(): g", "import g", ["g: ['a.g', 'g']"]),
        ("import a.b as g\ndef f(): g", "from a import b as g", []),
        ("def f(): return sum([1])", "sum = 1", ["chapter 2 binds sum, which others need"]),
        ("g = 1", "def g(): pass\ndef f(): g()", []),
        ("def g(): pass\ndef f(): g()", "[g for g in 'ab']", []),
        ("from scripts.ch02_b import g\ndef f(): g()", "def g(): pass", []),
        (
            "from scripts.ch03_c import g\ndef f(): g()",
            "def g(): pass",
            ["g: ['chapter 2: g', 'chapter 3: g']"],
        ),
    ],
)
def test_collisions_are_found(first, second, wrong):
    assert collisions({-1: [], 1: [first], 2: [second]}) == wrong


@pytest.mark.parametrize(
    "code, wanted",
    [
        ("import os\nfrom scripts.ch01_a import b\n\nb()", "import os\n\nb()"),
        (
            "import os\n\nfrom scripts.ch01_a import (\n    b,\n    c as d,\n)\n# why\nd()",
            "import os\n\nd = c\n# why\nd()",
        ),
        ("from scripts.ch01_a import b", ""),
        ("from scripts.book.a import b", "from scripts.book.a import b"),
        ("from scripts import a", "from scripts import a"),
        (
            "import os\n\nfrom scripts.ch01_a import b\n\n\ndef f():\n    pass",
            "import os\n\n\ndef f():\n    pass",
        ),
        (
            'x = """\nfrom scripts.ch01_a import b\n"""',
            'x = """\nfrom scripts.ch01_a import b\n"""',
        ),
    ],
)
def test_imports_between_chapters_go_and_nothing_else(code, wanted):
    assert colab.at_home(code) == wanted


STRANGER = """
import sys, types
sys.modules["scripts"] = types.ModuleType("scripts")
FILE_PARTS = {}
"""
UNPACKED = """
import scripts.ch01_attention, scripts.core.checkpoints
from scripts import ROOT
for module in (scripts, scripts.ch01_attention, scripts.core.checkpoints):
    assert module.__file__.startswith(str(ROOT)), module.__file__
assert not (ROOT / "scripts/gone.py").exists()
assert (ROOT / "results").is_dir() and (ROOT / "models/sample-de-en/model.safetensors").is_file()
print(ROOT)
"""


def test_the_package_is_unpacked_beside_the_notebook_and_found_first(notebook, tmp_path):
    """What an older notebook left is removed, and so is another package of that name."""
    (tmp_path / colab.HOME / "scripts").mkdir(parents=True)
    (tmp_path / colab.HOME / "scripts/gone.py").touch()
    cells = [text for text in by_chapter(notebook)[-1] if "FILE_PARTS" in text]
    (tmp_path / "cells.py").write_text("\n".join([STRANGER, *cells, UNPACKED]), "utf-8")
    done = run(sys.executable, "cells.py", cwd=tmp_path, env={**os.environ})
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / colab.HOME}\n"), done.stderr


CHANGED = """
first = torch.rand(3)
torch.set_default_dtype(torch.float64), torch.set_num_threads(NEW_KERNEL["threads"] + 1)
pd.set_option("display.max_colwidth", None)
fresh_start()
assert torch.get_default_dtype() == torch.float32 and torch.rand(3).equal(first)
assert torch.get_num_threads() == NEW_KERNEL["threads"]
assert pd.get_option("display.max_colwidth") == 50
"""


def test_a_chapter_starts_as_in_a_new_kernel():
    subprocess.run([sys.executable, "-c", colab.FRESH + CHANGED], check=True)


def test_chapters_set_nothing_that_a_fresh_start_leaves():
    calls = set()
    for path in CHAPTERS:
        show = [n for n in ast.parse(path.read_text("utf-8")).body if not is_definition(n)]
        for node in (part for statement in show for part in ast.walk(statement)):
            if isinstance(node, ast.Call):
                calls.add(ast.unparse(node)[:50])
    settings = re.compile(
        r"(torch|pd|np|random|warnings|alt)\.[\w.]*(set_|seed|filter|enable|use_)"
    )
    found = {re.sub(r"\(\w+[.\w]*\)", "()", call) for call in calls if settings.match(call)}
    assert found == {
        "torch.set_default_dtype()",
        "torch.manual_seed()",
        "pd.set_option('display.max_colwidth', None)",
    }


# What follows runs in a clean environment outside the repository.


def environment(home: Path, **more: str) -> dict[str, str]:
    """A bare environment: the empty folder as HOME, and how this machine's pip reaches packages."""
    home.mkdir(parents=True, exist_ok=True)
    kept = re.compile(r"PATH|LANG|LC_\w+|PIP_\w+|\w+_proxy|\w+_PROXY|SSL_\w+|OMP_\w+|GOMP_\w+")
    return {k: v for k, v in os.environ.items() if kept.fullmatch(k)} | {"HOME": str(home), **more}


def fenced(home: Path, **more: str) -> dict[str, str]:
    return environment(home, FENCED_OFF=str(ROOT), **more)


def install(folder: Path, first_cells: str) -> None:
    """Makes an environment in which those cells install the tested versions, and fences it in."""
    subprocess.run([sys._base_executable, "-m", "venv", "--clear", str(folder)], check=True)
    lists = "".join(path.read_text("utf-8") for path in ROOT.glob("requirements*.txt"))
    pins = re.sub(r"^-.*", "", lists, flags=re.MULTILINE)
    (folder / "pins.txt").write_text(pins, "utf-8")
    (folder / "install.py").write_text(first_cells, "utf-8")
    # According to its documentation, "no" tells pip not to compile: imports will do that.
    how = {"PIP_CONSTRAINT": str(folder / "pins.txt"), "PIP_NO_COMPILE": "no"}
    online = environment(folder / "home", **how)
    runner = ["-m", "pip", "install", "--quiet", "ipykernel", "nbclient"]
    for command in (runner, [str(folder / "install.py")]):
        python = str(folder / "bin/python")
        subprocess.run([python, *command], cwd=folder / "home", env=online, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "fence.py").write_text(FENCE, "utf-8")
    (packages / "fence.pth").write_text("import fence\n", "utf-8")


@pytest.fixture(scope="session")
def clean_python(once, notebook) -> Path:
    """The clean environment's Python."""
    first = by_chapter(notebook)[-1]
    assert first[-2].endswith(colab.INSTALL)
    folder = once("clean", lambda folder: install(folder, "\n\n".join(first[:-1])))
    return folder / "bin/python"


def run(python: Path, *arguments, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


FENCED = [  # what is tried, and what is said then
    ("import urllib.request as u; u.urlopen('http://example.org')", "no way to example.org"),
    ("import socket; socket.create_connection(('192.0.2.1', 80))", "no way to 192.0.2.1"),
    (f"open({str(ROOT / 'README.md')!r})", "is the repository's"),
    (f"import os; os.listdir({str(ROOT / 'scripts')!r})", "is the repository's"),
    (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', "
        "'import socket; socket.getaddrinfo(\"example.org\", 80)'], check=True)",
        "no way to example.org",
    ),
    (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "socket.create_connection(s.getsockname())",
        "",
    ),
    ("import importlib.util as u; assert u.find_spec('scripts') is None", ""),
]


def test_the_fence_holds(clean_python, tmp_path):
    """One test, so that only one worker waits while the environment is made."""
    for code, complaint in FENCED:
        done = run(clean_python, "-c", code, cwd=tmp_path, env=fenced(tmp_path / "home"))
        assert complaint in done.stderr and bool(done.returncode) == bool(complaint), done.stderr


def told(cell) -> str:
    """What a cell printed or showed, as text; progress bars go to standard error."""
    kept = [o for o in cell.outputs if o.get("name") != "stderr"]
    return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in kept)


SHOWN = CHAPTERS[::4]  # nbval runs every show; here all definitions run, and these chapters' shows


def with_few_shows(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with all its definitions, but only the shows of the chapters `SHOWN`."""
    shown, keeps = {int(path.stem[2:4]) for path in SHOWN}, True
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if start := START.match(cell.source):
                keeps = int(start[1]) in shown
            if not keeps:
                body = [node for node in ast.parse(cell.source).body if is_definition(node)]
                cell.source = ast.unparse(ast.Module(body, []))
    return notebook


def test_it_runs_from_an_empty_folder_and_says_what_the_chapters_say(
    written, clean_python, tmp_path
):
    desk = tmp_path / "desk"
    desk.mkdir()
    nbformat.write(with_few_shows(nbformat.read(written, 4)), desk / written.name)
    (tmp_path / "run.py").write_text(RUN, "utf-8")
    done = run(
        clean_python, tmp_path / "run.py", written.name, cwd=desk, env=fenced(tmp_path / "home")
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert {path.name for path in desk.iterdir()} == {written.name, "executed.ipynb", colab.HOME}

    executed = nbformat.read(desk / "executed.ipynb", 4).cells
    path, ours, peak = json.loads(executed.pop().outputs[0].text)
    assert not any(part.startswith(str(ROOT)) for part in path)
    assert {"scripts", "scripts.book.charts", "scripts.core.checkpoints"} <= ours.keys()
    assert all(place.startswith(str(desk / colab.HOME)) for place in ours.values())
    assert peak < 8 * 2**20  # KiB; a free Colab has 12 GB
    carried = {path for pattern in colab.FILES for path in ROOT.glob(pattern)}
    assert carried > {*MODULES, *(ROOT / "scripts/engine").glob("*.[ch]")}
    for name in carried:
        assert (desk / colab.HOME / name.relative_to(ROOT)).read_bytes() == name.read_bytes()

    found = {cell.source: told(cell) for cell in executed if cell.cell_type == "code"}
    compared = 0
    for chapter in SHOWN:
        for cell in nbformat.read(ROOT / f"notebooks/{chapter.stem}.ipynb", 4).cells:
            if cell.get("outputs") and "NBVAL_IGNORE_OUTPUT" not in cell.source:
                text = cell.source if chapter == CHAPTERS[0] else colab.at_home(cell.source)
                if text in found:  # other tests compare scripts and notebooks
                    assert found[text] == told(cell), f"{chapter.stem}:\n{text}"
                    compared += 1
    assert compared > 75


def as_repository(folder: Path) -> None:
    """Copies the series to `folder`, as a repository that can be cloned."""
    for path in [ROOT / "pyproject.toml", *MODULES]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)


IMPORTS = """
import scripts
print(scripts.__file__)
for imports in IMPORTS:
    exec(imports, {})
"""


def test_a_chapter_alone_fetches_the_series_and_imports_what_it_needs(clean_python, tmp_path):
    """All first cells are the same, so one process fetches for all."""
    series = tmp_path / "series"
    as_repository(series)
    chapters = [ast.parse(path.read_text("utf-8")).body for path in CHAPTERS]
    imports = [
        "\n".join(ast.unparse(n) for n in body if isinstance(n, (ast.Import, ast.ImportFrom)))
        for body in chapters
    ]
    code = f"{first_cell()}\nIMPORTS = {imports!r}\n{IMPORTS}"
    (tmp_path / "desk").mkdir()
    env = fenced(tmp_path / "home", SERIES_REPOSITORY=f"git+{series.as_uri()}")
    done = run(clean_python, "-c", code, cwd=tmp_path / "desk", env=env)
    assert done.returncode == 0, done.stderr
    place = tmp_path / "desk/from-attention-to-translation/scripts/__init__.py"
    assert done.stdout.split() == [str(place)]
