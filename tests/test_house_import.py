"""The definitions-only import: a chapter's definitions arrive, its show isn't run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHAPTERS, ROOT

PROBE = """\
# %% [markdown]
# # A chapter

# %%
import math
from dataclasses import dataclass

WIDTH, DEPTH = 4, 2
NAMES: tuple[str, ...] = ("a", "b")
AB = "too short for a constant"
small = 1
print("show", small)
if True:
    HIDDEN = 1


# %%
@dataclass
class Point:
    x: int = WIDTH


def crash():
    raise RuntimeError("wrong")


# %%
for _ in range(2):
    print("show")
"""


@pytest.fixture
def series(tmp_path) -> Path:
    """A series of one small chapter, with the real import hook."""
    (tmp_path / "scripts").mkdir()
    hook = (ROOT / "scripts/__init__.py").read_bytes()
    (tmp_path / "scripts/__init__.py").write_bytes(hook)
    (tmp_path / "scripts/ch99_probe.py").write_text(PROBE, "utf-8")
    return tmp_path


def python(*arguments, cwd):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True)


def test_only_definitions_arrive(series):
    code = "import scripts.ch99_probe as p; print(sorted(n for n in vars(p) if n[0] != '_'))"
    done = python("-c", code, cwd=series)
    wanted = ["DEPTH", "NAMES", "Point", "WIDTH", "crash", "dataclass", "math"]
    assert (done.stdout, done.stderr) == (f"{wanted}\n", "")


@pytest.mark.parametrize("way", [["scripts/ch99_probe.py"], ["-m", "scripts.ch99_probe"]])
def test_the_script_itself_runs_everything(series, way):
    done = python(*way, cwd=series)
    assert (done.returncode, done.stdout) == (0, "show 1\nshow\nshow\n")


def test_a_traceback_points_at_the_right_line(series):
    done = python("-c", "import scripts.ch99_probe as p; p.crash()", cwd=series)
    line = PROBE.splitlines().index('    raise RuntimeError("wrong")') + 1
    assert f'scripts/ch99_probe.py", line {line}, in crash' in done.stderr


def test_no_bytecode_is_shared_with_a_plain_import(series):
    python("-c", "import scripts.ch99_probe", cwd=series)
    assert not list(series.glob("scripts/__pycache__/ch99*"))
    plain = python("-c", "import ch99_probe", cwd=series / "scripts")
    assert plain.stdout.startswith("show 1")
    again = python("-c", "import scripts.ch99_probe as p; p.Point; p.math", cwd=series)
    assert (again.stdout, again.stderr) == ("", "")


IMPORT_QUIETLY = """
import importlib, socket, subprocess, sys

class NoNetwork(socket.socket):
    def connect(self, *_):
        raise AssertionError("importing a chapter opened a connection")
    connect_ex = connect

def no_process(*_, **__):
    raise AssertionError("importing a chapter started a process")

socket.socket = NoNetwork
import torch, altair, pandas, spacy  # what these do on import is theirs
subprocess.Popen = no_process
import vl_convert
vl_convert.vegalite_to_png = no_process
generator, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
for name in sys.argv[1:]:
    chapter = importlib.import_module(f"scripts.{name}")
    for key, value in vars(chapter).items():
        if not key.startswith("__"):
            kind = "definition" if callable(value) or type(value).__name__ in %r else "other"
            print(name, key, kind)
assert torch.equal(generator, torch.random.get_rng_state()) and dtype == torch.get_default_dtype()
"""


def test_importing_every_chapter_is_silent_and_leaves_only_definitions():
    """Erratum 24: in the original, an example runs on import in every worker."""
    names = [path.stem for path in CHAPTERS]
    code = IMPORT_QUIETLY % (["module", "Late", "TypeVar", "_GenericAlias", "UnionType"],)
    done = python("-c", code, *names, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(len(line) == 3 for line in lines), "a chapter printed something"
    assert {name for name, _, _ in lines} == set(names)
    odd = [(name, key) for name, key, kind in lines if kind == "other" and not key.isupper()]
    assert not odd
