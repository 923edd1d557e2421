"""Modules beside the chapters: names that shadow nothing, a complete wheel, few dependencies."""

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
from conftest import MODULES, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = sorted(path.parent for path in MODULES if path.name == "__init__.py")
OURS = "from-attention-to-translation"


def python(*arguments, cwd: Path, **environment) -> subprocess.CompletedProcess:
    """Runs Python without this test's own PYTHONPATH."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)


def taken_names() -> set[str]:
    """The names of others' modules: the standard library's, and every dependency's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    listed = {re.match(r"[\w-]+", one)[0].replace("-", "_").lower() for one in wanted}
    installed = {name for name, by in packages_distributions().items() if set(by) != {OURS}}
    return sys.stdlib_module_names | listed | installed


def test_nothing_in_scripts_shadows_another_module():
    """`python scripts/chNN_topic.py` puts scripts/ first on the path."""
    taken = taken_names()
    assert {"inspect", "torch", "x_transformers", "pytest"} <= taken
    own = {path.stem for path in MODULES if path.parent == ROOT / "scripts"}
    own |= {path.name for path in (ROOT / "scripts").iterdir() if path.is_dir()}
    shadowing = sorted(own & taken - {"__init__", "__pycache__"})
    assert not shadowing


def test_the_packages_themselves_import_nothing():
    for package in PACKAGES:
        if package != ROOT / "scripts":
            body = ast.parse((package / "__init__.py").read_text("utf-8")).body
            more = [ast.unparse(node) for node in body[1:]]
            assert ast.get_docstring(ast.Module(body, [])) and not more, package.name


def test_every_folder_of_modules_is_a_package():
    assert {path.parent for path in MODULES} == set(PACKAGES)


def climbs(tree: ast.AST) -> bool:
    """Whether code goes two folders up, or more, from its own file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("parent", "parents"):
            text = ast.unparse(node)
            if "__file__" in text and re.search(r"\.parent\.parent$|\.parents$", text):
                return True
    return False


def test_the_root_is_found_in_one_place():
    """What the first cell runs is exempt: it runs before the series can be imported."""
    assert climbs(ast.parse("HOME = Path(__file__).resolve().parents[2]"))
    assert not climbs(ast.parse("HERE = Path(__file__).parent"))
    found = [path for path in MODULES if climbs(ast.parse(path.read_text("utf-8")))]
    assert found == [ROOT / "scripts/__init__.py", ROOT / "scripts/book/at_home.py"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The folder of the series' unpacked wheel, built from a copy of what it needs."""
    home = tmp_path_factory.mktemp("wheel")
    source, unpacked = home / "source", home / "unpacked"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "scripts", source / "scripts", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", "."]
    done = python("-m", "pip", "wheel", *options, source, cwd=home)
    assert done.returncode == 0, done.stderr
    (path,) = home.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(unpacked)
    return unpacked


def test_the_wheel_holds_every_module(wheel):
    found = {path.relative_to(wheel) for path in wheel.glob("scripts/**/*.py")}
    assert found == {path.relative_to(ROOT) for path in MODULES}
    for other in ("fast/kernels.c",):
        assert (wheel / "scripts" / other).is_file()


def test_every_package_and_a_module_of_each_comes_from_the_wheel(wheel):
    """An editable install would hide what the wheel lacks, so each says where it is from."""
    names = [".".join(package.relative_to(ROOT).parts) for package in PACKAGES]
    for package, name in list(zip(PACKAGES, names, strict=True)):
        modules = sorted(p.stem for p in package.glob("*.py") if p.stem != "__init__")
        names += [f"{name}.{module}" for module in modules[:1]]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    )
    done = python("-c", code, *names, cwd=wheel)
    assert done.returncode == 0, done.stderr
    homes = done.stdout.splitlines()
    assert len(homes) == len(names) and all(home.startswith(str(wheel)) for home in homes)


ONLY_TO_RUN = """
import importlib, os, sys
from importlib.machinery import PathFinder

GONE = os.environ["GONE"].split()
find = PathFinder.find_spec

def find_other(name, path=None, target=None):
    return None if name.split(".")[0] in GONE else find(name, path, target)

PathFinder.find_spec = find_other
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name)
assert not {name.split(".")[0] for name in sys.modules} & {*GONE}
"""
A_STEP = """
import torch
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import Batch, LabelSmoothing
from scripts.fast.fast import fast_loss

torch.manual_seed(0)
model = make_model(20, 20, N=1, d_model=8, d_ff=16, h=2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
words = torch.randint(4, 20, (3, 6))
for step in range(2):
    loss, _ = fast_loss(model, Batch(words, words), LabelSmoothing(0.1))
    print(loss.item())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
A_CALL = """
from scripts.ch01_attention import pd
try:
    pd.DataFrame({})
except ModuleNotFoundError as error:
    assert error.name == "pandas"
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
            wanted = map(Requirement, requires(name) or ())
            asked += [one.name for one in wanted if not one.marker or one.marker.evaluate()]
    return found


def light() -> list[str]:
    """The modules that must do with what requirements-run.txt installs."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in MODULES]
    names = [".".join(path.parts) for path in paths if path.name != "__init__"]
    wanted = r"scripts\.(corpora\.|engine\.|(train|translate|evaluate|gpu|bench\.gpu)$)"
    return [one for one in names if re.match(wanted, one)]


def test_running_needs_what_make_run_installs_and_nothing_else():
    here = packages_distributions().items()
    kept = needed_to_run() | {OURS}
    gone = {name for name, by in here if not {*map(canonicalize_name, by)} & kept}
    assert {"altair", "pandas", "spacy", "torchtext", "scipy", "IPython", "wandb"} <= gone
    names = ["scripts.ch09_training_run", *light()]
    assert {"scripts.core.checkpoints", "scripts.studies.waterfall", "scripts.corpora.load"} <= {
        *names
    }
    done = python("-c", ONLY_TO_RUN + A_STEP + A_CALL, *names, cwd=ROOT, GONE=" ".join(gone))
    assert done.returncode == 0, done.stderr
    *imported, first, second, complaint = done.stdout.splitlines()
    assert imported == names and float(second) < float(first)
    assert complaint == "No module named 'pandas'"


def test_what_draws_is_imported_where_something_is_drawn():
    code = """
import sys
from scripts import translate
from scripts.book.charts import bars, titled
print(*(name in sys.modules for name in ("altair", "pandas")))
import pandas as pd
titled(bars(pd.DataFrame({"a": ["x"], "b": [1]}), "a", "b"), "A title", "A caption")
print("altair" in sys.modules)
"""
    done = python("-c", code, cwd=ROOT)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr


def test_what_comes_late_is_the_package_itself():
    from scripts import Late

    late = Late("json")
    assert late.dumps is sys.modules["json"].dumps and sys.modules["json"] is not late
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        Late("a_package_that_nobody_has").Chart()
