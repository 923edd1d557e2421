"""requirements.txt (exact), pyproject.toml (ranges) and environment.yml (conda) say the same."""

import os
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


def exact() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    assert lines[-1] == "-e ."
    wanted = [Requirement(line) for line in lines[:-1] if line and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in wanted}


def ranges() -> dict[str, Requirement]:
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + sum(
        (extras[one] for one in ("dev", "track", "export", "book")), []
    )
    return {canonicalize_name(one.name): one for one in map(Requirement, wanted)}


def test_both_lists_name_the_same_packages():
    assert exact().keys() == ranges().keys()


def test_the_peers_of_the_benchmark_are_an_extra_alone():
    peers = {Requirement(one).name for one in PROJECT["optional-dependencies"]["bench"]}
    assert peers == {"transformers", "x-transformers", "ctranslate2"}
    assert peers & exact().keys() == {"ctranslate2"}  # the exports are tested with it


def test_the_tracker_is_an_extra_alone_and_tested():
    tracker = {Requirement(one).name for one in PROJECT["optional-dependencies"]["track"]}
    needed = {Requirement(one).name for one in PROJECT["dependencies"]}
    assert tracker == {"wandb"} and not tracker & needed and tracker <= exact().keys()


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
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def find_other(name, path=None, target=None):
    return None if name == "distutils" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = find_other
import GPUtil
assert isinstance(GPUtil.getGPUs(), list)
"""


@pytest.mark.parametrize("provider, works", [("local", True), ("stdlib", False)])
def test_gputil_works_where_the_standard_library_has_no_distutils(provider, works):
    """Python 3.12 dropped distutils, which GPUtil imports; setuptools brings its own.

    The second case hides setuptools' too, which shows that the hiding works.
    """
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DISTUTILS],
        env=os.environ | {"SETUPTOOLS_USE_DISTUTILS": provider},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) is works, done.stderr
    assert works or "No module named 'distutils'" in done.stderr
