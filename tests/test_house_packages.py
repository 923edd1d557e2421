"""Modules: names that are made once and shadow nothing, a complete wheel, few dependencies."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from conftest import CHAPTERS, MODULES, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import definitions

PACKAGES = sorted(path.parent for path in MODULES if path.name == "__init__.py")
SERIES = "from-attention-to-translation"


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def python(*arguments, cwd: Path, **environment) -> subprocess.CompletedProcess:
    """Runs Python without this test's own PYTHONPATH."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)


def test_nothing_in_scripts_shadows_another_module():
    """`python scripts/chNN_topic.py` puts scripts/ first on the path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = sum(project["optional-dependencies"].values(), project["dependencies"])
    listed = {Requirement(line).name.replace("-", "_").lower() for line in needed}
    installed = {name for name, by in packages_distributions().items() if set(by) != {SERIES}}
    own = {path.stem for path in (ROOT / "scripts").iterdir()} - {"__init__", "__pycache__"}
    assert not sorted(own & (sys.stdlib_module_names | listed | installed))


def test_every_folder_of_modules_is_a_package_that_imports_nothing():
    assert {path.parent for path in MODULES} == set(PACKAGES)
    for package in PACKAGES:
        if package != ROOT / "scripts":
            body = ast.parse((package / "__init__.py").read_text("utf-8")).body
            assert len(body) == 1 and ast.get_docstring(ast.Module(body, [])), package.name


def test_the_root_is_found_in_one_place():
    climbs = re.compile(r"__file__.*(\.parent\.parent|\.parents\b)")
    found = [path for path in MODULES if climbs.search(path.read_text("utf-8"))]
    assert found == [ROOT / "scripts/__init__.py"]


def test_public_names_of_chapters_core_and_fast_are_made_once():
    homes: dict[str, Path] = {}
    rooms = [p for p in MODULES if p in CHAPTERS or p.parent.name in ("core", "fast")]
    for path in [p for p in rooms if p.stem != "ch25_one_page"]:  # which says all of it again
        for name in {name for name, _ in definitions(ast.parse(path.read_text("utf-8")))}:
            if not name.startswith("_"):
                assert name not in homes, f"{name} is defined in {homes[name]} and in {path}"
                homes[name] = path
    assert {"attention", "save_training"} <= homes.keys()


def test_plain_modules_never_ask_for_a_chapters_class():
    """In a notebook that class is `__main__`'s, and the answer would be no."""
    texts = "\n".join(path.read_text("utf-8") for path in CHAPTERS)
    classes = set(re.findall(r"^class (\w+)", texts, re.MULTILINE))
    for path in (path for path in MODULES if path not in CHAPTERS):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                    named = {part.id for part in ast.walk(kinds) if isinstance(part, ast.Name)}
                case ast.MatchClass(cls=ast.Name(id=name)):
                    named = {name}
                case _:
                    continue
            assert not named & classes, f"{path}, line {node.lineno}: {named & classes}"


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_each_package_works_from_it(tmp_path):
    """An editable install would hide what the wheel lacks, so each says where it is from."""
    source, wheel = tmp_path / "source", tmp_path / "unpacked"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "scripts", source / "scripts", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", "."]
    done = python("-m", "pip", "wheel", *options, source, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extractall(wheel)
    found = {path.relative_to(wheel) for path in wheel.glob("scripts/**/*.py")}
    assert found == {path.relative_to(ROOT) for path in MODULES}
    others = {p for p in (ROOT / "scripts").rglob("*.*") if p.suffix not in (".py", ".pyc")}
    assert others and all((wheel / path.relative_to(ROOT)).is_file() for path in others)

    some = [max(package.glob("*.py")) for package in PACKAGES]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    )
    done = python("-c", code, *map(dotted, some), cwd=wheel)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(wheel / path.relative_to(ROOT)) for path in some]


ONLY_TO_RUN = """
import importlib, os, sys

sys.modules |= dict.fromkeys(os.environ["GONE"].split())  # to import one of them is an error
for name in sys.argv[1:]:
    importlib.import_module(name)

import torch
from scripts.ch01_attention import pd
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import Batch, LabelSmoothing
from scripts.fast.fast import fast_loss

model = make_model(20, 20, N=1, d_model=8, d_ff=16, h=2)
words = torch.randint(4, 20, (3, 6))
loss, _ = fast_loss(model, Batch(words, words), LabelSmoothing(0.1))
loss.backward()
try:
    pd.DataFrame({})
except ModuleNotFoundError as error:
    print(error)
"""


def needed_to_run() -> set[str]:
    """The distributions that requirements-run.txt installs, and what those need."""
    text = (ROOT / "requirements-run.txt").read_text("utf-8")
    found, asked = set(), re.findall(r"^\w[\w-]*", text, re.M)
    while asked:
        name = canonicalize_name(asked.pop())
        if name not in found:
            found.add(name)
            needed = map(Requirement, requires(name) or ())
            asked += [n.name for n in needed if not n.marker or n.marker.evaluate()]
    return found


def test_running_needs_what_make_run_installs_and_nothing_else():
    """`core`, `fast`, `train` and `gpu` import, and a model learns, on a bare machine."""
    kept = needed_to_run() | {SERIES}
    gone = {
        name
        for name, by in packages_distributions().items()
        if not {*map(canonicalize_name, by)} & kept
    }
    assert {"altair", "pandas", "spacy", "torchtext", "scipy", "vl_convert"} <= gone
    light = re.compile(r"scripts\.((corpora|core|fast)\.\w+|train|translate|evaluate|gpu)")
    names = [name for name in map(dotted, MODULES) if light.fullmatch(name)]
    assert {"scripts.train", "scripts.gpu", "scripts.corpora.load"} <= {*names}
    done = python("-c", ONLY_TO_RUN, *names, cwd=ROOT, GONE=" ".join(gone))
    assert done.returncode == 0 and "import of pandas halted" in done.stdout, done.stderr
