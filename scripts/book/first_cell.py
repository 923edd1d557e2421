"""The first code cell of every chapter, which finds the series wherever the chapter is opened.

`make notebooks` stamps the cell into every chapter. Change it here, never in a chapter. The
series' address is in pyproject.toml, at [project.urls]: `make address` sets it.
"""

import re
import tomllib

from scripts import ROOT

MARK = '# %% tags=["bootstrap"]\n'
CELL = """\
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    FETCH
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing
"""
BY_GIT = 'subprocess.run(["git", "clone", "{address}", home], check=True)'
BY_HAND = 'sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")'
COLAB = "https://colab.research.google.com/github/{place}/blob/HEAD/notebooks/{chapter}.ipynb"


def repository() -> str:
    """The series' public address from pyproject.toml, or "" if it has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "")


def in_colab(chapter: str) -> str:
    """The link that opens a chapter in Colab; "" if the series' address is not on GitHub."""
    on_github = re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)(\.git)?/?", repository())
    return COLAB.format(place=on_github[1], chapter=chapter) if on_github else ""


def first_cell() -> str:
    """The cell's code."""
    address = repository()
    return CELL.replace("FETCH", BY_GIT.format(address=address) if address else BY_HAND)


def stamp(script: str, chapter: str) -> str:
    """A chapter's script with today's cell, put after the first markdown cell if it had none, and
    with today's link to Colab in the table of its header.

    Raises ValueError if the script has no cells.
    """
    cells = re.split(r"^(?=# %%)", script, flags=re.MULTILINE)
    if len(cells) < 2:
        raise ValueError(
            f"{chapter} has no cells: a chapter begins with a markdown cell, # %% [markdown]"
        )
    header = re.sub(r"^# \| Open \|.*\n", "", cells[1], flags=re.MULTILINE)
    if link := in_colab(chapter):
        row = f"# | Open | [in Colab]({link}) |\n"
        header = re.sub(r"((?:^# \|.*\n)+)", rf"\1{row}", header, count=1, flags=re.MULTILINE)
    rest = [cell for cell in cells[2:] if not cell.startswith(MARK)]
    return "".join([cells[0], header, f"{MARK}{first_cell()}\n", *rest]).rstrip() + "\n"
