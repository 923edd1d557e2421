"""Writes the whole series as one notebook that needs no other file of the series.

    python docs/colab.py [FILE]     by default build/from_attention_to_translation.ipynb

It has the chapters one after the other, as their scripts have them, without outputs. They share
one namespace, so their imports from each other are dropped. What else they import, and what they
read (records, trained models), travels inside as text: the whole package, unpacked beside the
notebook. The network is needed only for other packages. The same series gives the same bytes.
"""

import ast
import base64
import io
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import jupytext

ROOT = Path(__file__).resolve().parent.parent

HOME = "from_attention_to_translation"  # the notebook's name, and the folder into which it unpacks
CODE = ("pyproject.toml", "scripts/**/*.py", "scripts/**/*.[ch]")
FILES = (*CODE, "results/**/*.json", "models/*-de-en/*")
PART, WIDTH = 1_000_000, 10_000  # characters of packed files in a cell, and in a line
SQUEEZE = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 0, "pb": 0}]

TITLE = """\
# From Attention to Translation

The whole series as one notebook. It starts at a dot product and ends with a Transformer that translates German captions into English. Run it from top to bottom, in Colab (*Runtime, Run all*) or in Jupyter: a CPU is enough, and the network is needed only for packages.

Each chapter is as it is in the series. What took long was run once, and its record travels in this notebook, with two trained models. Only the commands that are quoted (`make …`, `python -m scripts.…`, `torchrun …`) need the repository.

## Contents

"""  # noqa: E501 (prose)
INSTALL = """\
from scripts.book.first_cell import install_missing

install_missing()"""
FRESH = '''\
import pandas as pd
import torch

NEW_KERNEL = {"seed": torch.initial_seed(), "threads": torch.get_num_threads()}


def fresh_start() -> None:
    """Puts back what chapters set, so that each begins as if in its own kernel."""
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(NEW_KERNEL["threads"])
    torch.manual_seed(NEW_KERNEL["seed"])
    pd.reset_option("display.max_colwidth")'''
UNPACK = f'''\
import base64
import importlib
import io
import lzma
import shutil
import sys
import tarfile
from pathlib import Path


def unpack(root: Path) -> None:
    """Writes the files into the folder `root`, from which Python imports `scripts` from now on."""
    shutil.rmtree(root / "scripts", ignore_errors=True)  # an older notebook's
    text = "".join(FILE_PARTS[number] for number in sorted(FILE_PARTS)).replace("\\n", "")
    content = lzma.decompress(base64.b85decode(text))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(root, filter="data")
    for path in root.glob("models/*/*.halves"):
        stored = path.read_bytes()
        whole = bytearray(stored)  # each weight's first byte, then each one's second
        middle = (len(stored) + 1) // 2
        whole[0::2], whole[1::2] = stored[:middle], stored[middle:]
        path.with_suffix("").write_bytes(whole)
        path.unlink()
    for name in [name for name in sys.modules if name.split(".")[0] == "scripts"]:
        del sys.modules[name]  # anything else of that name
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()


unpack(Path("{HOME}").resolve())'''


def replacement(node: ast.stmt) -> str | None:
    """What replaces an import from a chapter; None for any other statement, which stays."""
    if isinstance(node, ast.ImportFrom) and re.match(r"scripts\.ch\d\d_", node.module or ""):
        return "\n".join(f"{name.asname} = {name.name}" for name in node.names if name.asname)
    return None


def at_home(code: str) -> str:
    """Code as it runs below the chapters that it imports from; comments and layout stay."""
    lines = code.splitlines()
    for node in reversed(ast.parse(code).body):
        new = replacement(node)
        if new is not None:
            begin, end = node.lineno - 1, node.end_lineno
            if not new and not any(line.strip() for line in lines[begin - 1 : begin]):
                end += lines[end : end + 1] == [""]  # not two gaps in place of one
            lines[begin:end] = new.splitlines()
    return "\n".join(lines).strip("\n")


def linked(text: str) -> str:
    """Prose whose links stay within the notebook; those to other files become plain words."""
    text = re.sub(r"\]\((ch\d\d)_\w+\.ipynb(?:#[^)]*)?\)", r"](#\1)", text)
    return re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", text)


def anchored(text: str, names: Iterator[str]) -> str:
    """Prose with an anchor before each heading of the first and second level."""
    lines, fenced = [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if re.match(r"##? ", line) and not fenced:
            name = next(names)
            lines += [f'<a id="{name}" name="{name}"></a>', ""]
        lines.append(line)
    return "\n".join(lines)


def anchor_names(chapter: str) -> Iterator[str]:
    """ch03, ch03-1, ch03-2, …"""
    yield chapter
    number = 0
    while True:
        yield f"{chapter}-{(number := number + 1)}"


def prose(text: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code(text: str, **metadata) -> dict:
    cell = {"cell_type": "code", "metadata": metadata, "source": text}
    return cell | {"execution_count": None, "outputs": []}


def folded(title: str, text: str) -> dict:
    """A code cell that shows only its title, in Colab and in Jupyter."""
    hide = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["hide-input"]}
    return code(f"# @title {title}\n{text}", **hide)


def chapter_cells(path: Path) -> Iterator[dict]:
    """A chapter's cells; a fresh start replaces the cell that looked for the series.

    Chapter 0 uses what comes after it, so it keeps its imports from chapters.
    """
    names, number = anchor_names(path.stem[:4]), int(path.stem[2:4])
    for cell in jupytext.read(path).cells:
        text, tags = cell.source, cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            yield prose(anchored(linked(text), names))
            continue
        text = at_home(text) if number else text
        if "bootstrap" in tags:
            yield folded(f"A fresh start for chapter {number}", "fresh_start()")
        elif text:
            yield code(text)


def contents(cells: list[dict]) -> str:
    """The table of contents: chapters, and below each its sections."""
    text = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    found = re.findall(r'<a id="(.+)" name=.*></a>\n\n(#+) (.+)', text)
    rows = (f"{'  ' * (len(level) - 1)}- [{title}](#{name})" for name, level, title in found)
    return "\n".join(rows)


def packed() -> str:
    """The package and the files that chapters read, as text.

    Of a weight's two bytes one, sign and exponent, can be squeezed, if those lie side by side.
    """
    files = {p.relative_to(ROOT).as_posix(): p.read_bytes() for f in FILES for p in ROOT.glob(f)}
    for name in [name for name in files if name.endswith(".safetensors")]:
        content = files.pop(name)
        files[f"{name}.halves"] = content[0::2] + content[1::2]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return base64.b85encode(lzma.compress(stream.getvalue(), filters=SQUEEZE)).decode()


def file_cells() -> Iterator[dict]:
    """The files, in cells that a browser can carry, and the cell that unpacks them."""
    text = packed()
    parts = [text[at : at + PART] for at in range(0, len(text), PART)]
    for number, part in enumerate(parts, 1):
        rows = "\n".join(part[at : at + WIDTH] for at in range(0, len(part), WIDTH))
        start = "FILE_PARTS = {}\n" if number == 1 else ""
        title = f"Files, part {number} of {len(parts)}"
        yield folded(title, f'{start}FILE_PARTS[{number}] = """{rows}"""')
    yield folded(f"Unpack the files into the folder {HOME}", UNPACK)


def setting_up() -> Iterator[dict]:
    """What comes before the chapters."""
    yield from file_cells()
    yield folded("Install the packages that are missing", INSTALL)
    yield folded("How a chapter starts", FRESH)


def series() -> dict:
    """The notebook."""
    chapters = sorted((ROOT / "scripts").glob("ch[0-9][0-9]_*.py"))
    body = [cell for path in chapters for cell in chapter_cells(path)]
    cells = [prose(TITLE + contents(body)), *setting_up(), *body]
    return {
        "cells": [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells)],
        "metadata": {
            "colab": {"name": f"{HOME}.ipynb", "provenance": [], "toc_visible": True},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


if __name__ == "__main__":
    target = Path(sys.argv[1] if sys.argv[1:] else ROOT / f"build/{HOME}.ipynb").resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(series(), ensure_ascii=False, separators=(",\n", ":"))
    target.write_text(text + "\n", "utf-8", newline="\n")
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")
