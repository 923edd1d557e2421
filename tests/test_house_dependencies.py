"""requirements*.txt (exact), pyproject.toml (ranges) and environment.yml (conda) say the same."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def listed(name: str) -> dict[str, Requirement]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {canonicalize_name(one.name): one for one in wanted}


def exact() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    assert lines[-1] == "-e ." and "-r requirements-run.txt" in lines
    run, rest = listed("requirements-run.txt"), listed("requirements.txt")
    assert not run.keys() & rest.keys()
    return run | rest


def ranges() -> dict[str, Requirement]:
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + sum((extras[one] for one in ("dev", "export", "book")), [])
    return {canonicalize_name(one.name): one for one in map(Requirement, wanted)}


def test_both_lists_name_the_same_packages():
    assert exact().keys() == ranges().keys()


def test_the_peers_of_the_benchmark_are_an_extra_alone():
    peers = {Requirement(one).name for one in PROJECT["optional-dependencies"]["bench"]}
    assert peers == {"transformers", "x-transformers", "ctranslate2"}
    assert peers & exact().keys() == {"ctranslate2"}  # the exports are tested with it


def test_every_exact_version_lies_in_its_range():
    for name, wanted in exact().items():
        (pin,) = wanted.specifier
        assert pin.operator == "=="
        assert ranges()[name].specifier.contains(pin.version), name


def test_installed_versions_are_in_range():
    for name, wanted in ranges().items():
        assert wanted.specifier.contains(metadata.version(name), prereleases=True), name


def test_conda_reads_requirements_and_a_fitting_python():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    python, pip, from_pip = environment["dependencies"]
    assert from_pip == {"pip": ["-r requirements.txt"]} and pip == "pip"
    assert python == f"python{PROJECT['requires-python']}"


WITHOUT_DISTUTILS = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_other(name, path=None, target=None):
    return None if name in sys.argv else find(name, path, target)
PathFinder.find_spec = find_other
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "DistutilsMetaFinder"]
from scripts.book.machine import gpu_rows
print(gpu_rows())
"""


@pytest.mark.parametrize(
    "gone, complains", [(["distutils"], False), (["distutils", "setuptools"], True)]
)
def test_gputil_works_where_the_standard_library_has_no_distutils(gone, complains):
    """Python 3.12 dropped distutils, which GPUtil imports; setuptools brings its own.

    Its .pth file, which does so at the start, isn't read in every folder of packages. Where
    setuptools is missing too, the report says that GPUtil gave no answer.
    """
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DISTUTILS, *gone],
        env=os.environ | {"SETUPTOOLS_USE_DISTUTILS": "local", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ("gave no answer (ModuleNotFoundError)" in done.stdout) is complains, done.stderr
    assert done.returncode == 0


# What Colab had on 2026-11-28, and would have to load again if a range excluded it. GPUtil is no
# part of it, but has no wheel and needs nothing.
COLAB = {
    "torch": "2.11.0+cu128",
    "numpy": "2.1.3",
    "pandas": "2.2.3",
    "altair": "5.5.0",
    "spacy": "3.8.15",
    "sentencepiece": "0.2.2",
    "setuptools": "75.2.0",
    "ipykernel": "6.17.1",
    "GPUtil": "1.4.0",
}


def test_colabs_packages_stay_as_they_are(tmp_path):
    """Asks pip what it would install there. The environment holds names and versions alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    for name, version in COLAB.items():
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text, "utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "bin/python"), "install"]
    options = ["--quiet", "--dry-run", "--only-binary=:all:", "--report", str(tmp_path / "report")]
    done = subprocess.run(
        [*pip, *options, *PROJECT["dependencies"]], capture_output=True, text=True
    )
    assert done.returncode == 0, f"pip needs a package index: {done.stderr}"
    report = json.loads((tmp_path / "report").read_text("utf-8"))
    loaded = {canonicalize_name(one["metadata"]["name"]) for one in report["install"]}
    assert "sacrebleu" in loaded and not loaded & set(map(canonicalize_name, COLAB))


RUN, REST = "-r requirements-run.txt", "-r requirements.txt"


@pytest.mark.parametrize(
    "task, lists",
    [("run", [RUN]), ("translate", [RUN]), ("train", [RUN]), ("setup", [RUN, REST])],
)
def test_make_installs_what_a_task_needs_and_shows_it(tmp_path, task, lists):
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy2(path, tmp_path)
    alone = {"PATH": os.environ["PATH"]}  # without what `make test` was given
    done = subprocess.run(
        ["make", "-n", task], cwd=tmp_path, env=alone, capture_output=True, text=True
    )
    installs = [line for line in done.stdout.splitlines() if " -m pip install " in line]
    assert [line.partition("check ")[2] for line in installs] == lists, done.stderr
    assert not any("quiet" in line for line in installs)
