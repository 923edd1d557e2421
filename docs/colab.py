"""Writes the whole series as one notebook that needs no other file of the series.

    python docs/colab.py [FILE]     by default build/from_attention_to_translation.ipynb

The chapters stand in it one after the other, as their scripts have them, without outputs. They
share one namespace, so their imports from each other go. What they read (records, trained models)
travels inside as text. The network is needed for packages alone. The same chapters give the same
bytes.
"""

import ast
import base64
import inspect
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
sys.path.insert(0, str(ROOT))
from scripts import bound_names, is_definition  # noqa: E402
from scripts.book.first_cell import install, packages  # noqa: E402

HOME = "from_attention_to_translation"  # the notebook's name, and the folder that it unpacks beside
FILES = ("results/*.json", "models/*-de-en/*")  # what chapters read
MODULES = {
    "charts": "How charts look",
    "checkpoints": "How checkpoints are saved and loaded",
    "records": "How records are saved and loaded",
}
PART, WIDTH = 1_000_000, 10_000  # characters of packed files in a cell, and in a line
SQUEEZE = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 0, "pb": 0}]

TITLE = """\
# From Attention to Translation

The whole series as one notebook. It starts at a dot product and ends with a Transformer that translates German captions into English. Run it from top to bottom, in Colab (*Runtime, Run all*) or in Jupyter: a CPU is enough, and the network is needed for packages alone.

Each chapter is as it stands in the series. What took long was run once, and its record travels in this notebook, beside two trained models. Only the commands that are quoted (`make …`, `python -m scripts.…`, `torchrun …`) need the repository.

## Contents

"""  # noqa: E501 (prose)
INSTALL = """\
import importlib
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


@INSTALL@


install(@NEEDED@)"""
FRESH = '''\
import random

import numpy as np
import pandas as pd
import torch

NEW_KERNEL = {"seed": torch.initial_seed(), "threads": torch.get_num_threads()}


def fresh_start() -> None:
    """Puts back what chapters set, so that each begins as in a kernel of its own."""
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(NEW_KERNEL["threads"])
    torch.manual_seed(NEW_KERNEL["seed"])
    np.random.seed(None)
    random.seed()
    pd.reset_option("display.max_colwidth")'''
UNPACK = '''\
import base64
import io
import lzma
import tarfile


def unpack() -> None:
    """Writes the files into `ROOT`, a folder beside this notebook."""
    text = "".join(FILE_PARTS[number] for number in sorted(FILE_PARTS)).replace("\\n", "")
    content = lzma.decompress(base64.b85decode(text))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(ROOT, filter="data")
    for path in ROOT.glob("models/*/*.halves"):
        stored = path.read_bytes()
        whole = bytearray(stored)  # each weight's first byte, then each one's second
        middle = (len(stored) + 1) // 2
        whole[0::2], whole[1::2] = stored[:middle], stored[middle:]
        path.with_suffix("").write_bytes(whole)
        path.unlink()


unpack()'''
AHEAD = """\
# The same code stands, cell by cell, in the chapters below, which define it anew.
exec(compile((ROOT / "ahead.py").read_text("utf-8"), ROOT / "ahead.py", "exec"))"""


def replacement(node: ast.stmt) -> str | None:
    """What stands for a statement in the one notebook; None where it stays as it is."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "scripts":
        return "\n".join(f"{name.asname} = {name.name}" for name in node.names if name.asname)
    if isinstance(node, ast.Assign) and "__file__" in ast.unparse(node.value):
        return f'{ast.unparse(node.targets)} = Path("{HOME}").resolve()'
    return None


def at_home(code: str) -> str:
    """Code as it runs in the one notebook; comments and layout stay."""
    lines = code.splitlines()
    for node in reversed(ast.parse(code).body):
        new = replacement(node)
        if new is not None:
            begin, end = node.lineno - 1, node.end_lineno
            if not new and not any(line.strip() for line in lines[begin - 1 : begin]):
                end += lines[end : end + 1] == [""]  # no two gaps where there was one
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
    """A code cell that shows its title alone, in Colab and in Jupyter."""
    hide = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["hide-input"]}
    return code(f"# @title {title}\n{text}", **hide)


def chapter_cells(path: Path) -> Iterator[dict]:
    """A chapter's cells; a fresh start stands where it looked for the series."""
    names = anchor_names(path.stem[:4])
    for cell in jupytext.read(path).cells:
        text, tags = cell.source, cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            yield prose(anchored(linked(text), names))
        elif "bootstrap" in tags:
            yield folded(f"A fresh start for chapter {int(path.stem[2:4])}", "fresh_start()")
        elif "hide-input" in tags:
            yield folded("A solution", at_home(text).removeprefix("# A solution\n"))
        elif at_home(text):
            yield code(at_home(text), **({"tags": tags} if tags else {}))


def contents(cells: list[dict]) -> str:
    """The table of contents: chapters, and below each its sections."""
    text = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    found = re.findall(r'<a id="(.+)" name=.*></a>\n\n(#+) (.+)', text)
    rows = (f"{'  ' * (len(level) - 1)}- [{title}](#{name})" for name, level, title in found)
    return "\n".join(rows)


def sources(pattern: str) -> Iterator[tuple[ast.stmt, str]]:
    """The definitions of the scripts that fit `pattern`, each with its source."""
    for path in sorted((ROOT / "scripts").glob(pattern)):
        lines = path.read_text("utf-8").splitlines()
        for node in filter(is_definition, ast.parse("\n".join(lines)).body):
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            yield node, "\n".join(lines[first - 1 : node.end_lineno])


def bound(node: ast.stmt) -> list[str]:
    """The names that a definition or an import at the top level makes."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(name.asname or name.name).split(".")[0] for name in node.names]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name for target in targets for name in bound_names(target)]


def needs(node: ast.stmt) -> set[str]:
    """The names that a definition takes from elsewhere."""
    parts = list(ast.walk(node))
    names = [part for part in parts if isinstance(part, ast.Name)]
    own = {part.arg for part in parts if isinstance(part, ast.arg)}
    own |= {part.id for part in names if isinstance(part.ctx, ast.Store)}
    return {part.id for part in names} - own


def ahead() -> str:
    """What chapter 0 uses and later chapters define, and all that this rests on, in their order."""
    later = [(node, text) for node, text in sources("ch[0-9]*.py") if replacement(node) is None]
    maker = {name: entry for entry in reversed(later) for name in bound(entry[0])}
    first = [node for node, _ in sources("ch00_*.py") if replacement(node) is not None]
    wanted, kept = [name for node in first for name in bound(node)], set()
    while wanted:
        node, text = maker.get(wanted.pop(), (None, ""))
        if node and text not in kept:
            kept.add(text)
            wanted += needs(node)
    return "\n\n".join(dict.fromkeys(text for _, text in later if text in kept)) + "\n"


def packed() -> str:
    """The files that chapters read, and `ahead.py`, as text.

    Of a weight's two bytes one, sign and exponent, can be squeezed, if such stand side by side.
    """
    files = {p.relative_to(ROOT).as_posix(): p.read_bytes() for f in FILES for p in ROOT.glob(f)}
    for name in [name for name in files if name.endswith(".safetensors")]:
        content = files.pop(name)
        files[f"{name}.halves"] = content[0::2] + content[1::2]
    files["ahead.py"] = ahead().encode()
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
    text = INSTALL.replace("@INSTALL@", inspect.getsource(install).strip())
    text = text.replace("@NEEDED@", json.dumps(packages(), indent=4))
    yield folded("Install the packages that are missing", text)
    for name, title in MODULES.items():
        yield folded(title, at_home((ROOT / f"scripts/{name}.py").read_text("utf-8")))
    yield from file_cells()
    yield folded("How a chapter starts", FRESH)
    yield folded("Ahead of time: what chapter 0 uses and later chapters build", AHEAD)


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
