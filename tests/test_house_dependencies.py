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
EXTRAS = PROJECT["optional-dependencies"]
PARTS = ("", "-run")  # of requirements.txt


def by_name(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def exact() -> dict[str, Requirement]:
    lines = [(ROOT / f"requirements{end}.txt").read_text("utf-8").splitlines() for end in PARTS]
    assert lines[0][-1] == "-e ." and "-r requirements-run.txt" in lines[0]
    rest, run = (by_name([line for line in part if line and line[0] not in "#-"]) for part in lines)
    assert not run.keys() & rest.keys()
    return run | rest


RANGES = by_name(
    PROJECT["dependencies"] + [line for name in EXTRAS if name != "bench" for line in EXTRAS[name]]
)


def test_both_lists_name_the_same_packages_in_versions_that_fit():
    assert exact().keys() == RANGES.keys()
    for name, pinned in exact().items():
        (pin,) = pinned.specifier
        assert pin.operator == "=="
        assert RANGES[name].specifier.contains(pin.version), name
        assert RANGES[name].specifier.contains(metadata.version(name), prereleases=True), name


def test_gputil_comes_with_a_distutils():
    """Python 3.12 dropped distutils, which GPUtil imports; setuptools brings its own."""
    assert {"gputil", "setuptools"} <= RANGES.keys()


def test_conda_reads_requirements_and_a_fitting_python():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    python, pip, from_pip = environment["dependencies"]
    assert from_pip == {"pip": ["-r requirements.txt"]} and pip == "pip"
    assert python == f"python{PROJECT['requires-python']}"


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


@pytest.mark.audit
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
    command = [*pip, *options, *PROJECT["dependencies"]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"pip needs a package index: {done.stderr}"
    report = json.loads((tmp_path / "report").read_text("utf-8"))
    loaded = {canonicalize_name(package["metadata"]["name"]) for package in report["install"]}
    assert "sacrebleu" in loaded and not loaded & set(map(canonicalize_name, COLAB))


@pytest.mark.parametrize("task, parts", [("translate", ["-run"]), ("setup", ["-run", ""])])
def test_make_installs_what_a_task_needs_and_shows_it(tmp_path, task, parts):
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy2(path, tmp_path)
    alone = {"PATH": os.environ["PATH"], "TEXT": "Ein Hund."}  # without what `make test` was given
    done = subprocess.run(
        ["make", "-n", task], cwd=tmp_path, env=alone, capture_output=True, text=True
    )
    installs = [line for line in done.stdout.splitlines() if " -m pip install " in line]
    lists = [f"-r requirements{part}.txt" for part in parts]
    assert [line.partition("check ")[2] for line in installs] == lists, done.stderr
