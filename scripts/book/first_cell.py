"""The first code cell of every chapter, which makes the chapter at home wherever it is opened.

`python -m scripts.book.first_cell` stamps the cell into every chapter; `make notebooks` does so.
Change it here, never in a chapter. The series' address stands in pyproject.toml, at [project.urls].
"""

import importlib
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from scripts import ROOT

MARK = '# %% tags=["bootstrap"]\n'
CELL = """\
# Make this chapter at home: the series is in a folder above, installed, or gets cloned beside it.
import os
import subprocess
import sys
from pathlib import Path

here = Path(globals().get("__file__", "notebook")).resolve()
beside = Path("from-attention-to-translation").resolve()
finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
specs = [finder.find_spec("scripts", None) for finder in finders]
installed = [Path(spec.origin).resolve().parents[1] for spec in specs if spec and spec.origin]
homes = [*here.parents, *installed, beside]
root = next((home for home in homes if (home / "scripts/ch01_attention.py").exists()), None)
if root is None:
    address = os.environ.get("SERIES_REPOSITORY", "@REPOSITORY@").removeprefix("git+")
    if not address:
        raise SystemExit("Set SERIES_REPOSITORY to the series' address, such as git+https://…")
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", address, beside], check=True)
    root = beside
sys.path.insert(0, str(root))  # first, so that no other package named scripts shadows ours
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "scripts" and str(root) not in str(getattr(module, "__file__", "")):
        del sys.modules[name]
if root == beside:
    from scripts.book.first_cell import install_missing

    install_missing()
"""


def repository() -> str:
    """The series' public address from pyproject.toml, or "" while it has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "")


def first_cell() -> str:
    """The cell's code."""
    return CELL.replace("@REPOSITORY@", repository())


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


def packages() -> list[str]:
    """What chapters need by pyproject.toml, but for the kernel: that is running."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [one for one in project["dependencies"] if not one.startswith("ipykernel")]


def install(needed: list[str]) -> None:
    """Installs what is needed and isn't here; the torch that is here stays."""
    try:
        keep = f"torch=={metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        keep = ""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text(keep, "utf-8")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        subprocess.run([*pip, *needed], check=True)
    importlib.invalidate_caches()  # what was just installed can be imported without a restart


def install_missing() -> None:
    """What the first cell does after it has fetched the series."""
    install(packages())


if __name__ == "__main__":
    for path in sorted((ROOT / "scripts").glob("ch[0-9][0-9]_*.py")):
        before = path.read_text("utf-8")
        after = stamp(before, path.stem)
        if after != before:
            path.write_text(after, "utf-8")
            print(f"stamped {path.name}")
