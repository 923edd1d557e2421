"""The parts of the series and their chapters, from docs/parts.toml and the chapters' scripts."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
SCRIPTS = DOCS.parent / "scripts"


class Chapter(NamedTuple):
    """What the cell with a chapter's title says."""

    stem: str  # of its script and its notebook
    name: str  # number and title, and ● on the short way
    promise: str  # what a reader knows after it
    reading: str  # minutes to read
    coding: str  # minutes with the code
    running: str  # what it takes to run, in words


def chapter(path: Path, short: list[int]) -> Chapter:
    """The chapter of a script. Raises ValueError if its first cell lacks what we look for."""
    cells = path.read_text("utf-8").split("\n# %%")
    cell = next(cell for cell in cells if "\n# # Chapter " in cell)
    cell = re.sub(r"^# ?", "", cell, flags=re.MULTILINE)
    title = re.search(r"^# Chapter (\d+) · (.+)\n\n((?:.+\n)+)", cell, re.MULTILINE)
    times = re.search(r"(\d+) minutes to read, (\d+) with the code; (.+?) to run", cell)
    if not title or not times:
        raise ValueError(f"{path.name} doesn't give a number, title, promise and times")
    promise = title[3].strip().replace("\n", " ").removeprefix("After this chapter ")
    name = f"{title[1]} · {title[2]}" + " ●" * (int(title[1]) in short)
    return Chapter(path.stem, name, promise[0].upper() + promise[1:], *times.groups())


def parts() -> dict[str, list[Chapter]]:
    """The chapters of each part. Raises ValueError if a chapter is in no part, or in two."""
    order = tomllib.loads((DOCS / "parts.toml").read_text("utf-8"))
    scripts = {int(path.name[2:4]): path for path in sorted(SCRIPTS.glob("ch[0-9][0-9]_*.py"))}
    if [n for part in order["parts"] for n in part["chapters"]] != [*scripts]:
        raise ValueError("docs/parts.toml doesn't name the chapters in order, each once")
    return {
        part["name"]: [chapter(scripts[n], order["short"]) for n in part["chapters"]]
        for part in order["parts"]
    }
