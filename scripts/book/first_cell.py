"""The first code cell of every chapter, which finds the series wherever the chapter is opened.

`make notebooks` stamps the cell into every chapter. Change it here, never in a chapter. The
series' address is in pyproject.toml, at [project.urls].
"""

import importlib
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement  # every Jupyter has it

from scripts import ROOT

MARK = '# %% tags=["bootstrap"]\n'
CELL = """\
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "@REPOSITORY@").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
ours = runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))
"""


def repository() -> str:
    """The series' public address from pyproject.toml, or "" if it has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "")


def first_cell() -> str:
    """The cell's code."""
    return CELL.replace("@REPOSITORY@", repository() or "set SERIES_REPOSITORY")


def stamp(script: str, chapter: str) -> str:
    """A chapter's script with the cell in its place, or put after the first markdown cell."""
    starts = [match.start() for match in re.finditer(r"^# %%.*\n", script, re.MULTILINE)]
    if not starts:
        raise ValueError(
            f"{chapter} has no cells: a chapter begins with a markdown cell, # %% [markdown]"
        )
    starts.append(len(script))
    begin = script.find(MARK)
    if begin < 0:
        begin = end = starts[1]
    else:
        end = starts[starts.index(begin) + 1]
    return f"{script[:begin]}{MARK}{first_cell()}\n{script[end:]}".rstrip() + "\n"


def installed_in_range(needed: Requirement) -> str:
    """The version that is here, as a constraint that keeps it; "" if it is none that serves."""
    try:
        version = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return ""
    fits = needed.specifier.contains(version, prereleases=True)
    return f"{needed.name}=={version}" if fits else ""


def install_missing() -> None:
    """What the first cell does after it has fetched the series: what is here and serves, stays.

    The kernel is not installed: it is running.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = [one for one in project["dependencies"] if not one.startswith("ipykernel")]
    libraries = [one for one in needed if one != "setuptools"]  # which a newer torch may replace
    kept = [installed_in_range(Requirement(one)) for one in libraries]
    print("installing what is missing (a minute or two)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(kept), "utf-8")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        subprocess.run([*pip, *needed], check=True)
    importlib.invalidate_caches()  # what was just installed can be imported without a restart
