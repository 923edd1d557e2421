"""Brings notebooks and scripts into step: `python -m scripts.book.pairs scripts/ch01_attention.py`.

`make notebooks` and the pre-commit hook do so; the first cell is stamped on the way. Unlike
`jupytext --sync` this never asks which file is newer: an editor may have saved it unchanged. The
side wins that was edited since both agreed, in a commit or after this command ran. If both were,
nothing is written.
"""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jupytext
from jupytext.combine import combine_inputs_with_outputs
from jupytext.config import load_jupytext_configuration_file
from nbformat.reader import NotJSONError

from scripts import ROOT
from scripts.book.files import write_whole
from scripts.book.first_cell import stamp

SCRIPT, NOTEBOOK = "py:percent", "ipynb"  # jupytext's names
CONFIG = load_jupytext_configuration_file(str(ROOT / "jupytext.toml"))


def convert(text: str, kind: str, to: str) -> str:
    """A script or notebook as the other, or as itself in jupytext's form."""
    return jupytext.writes(jupytext.reads(text, kind, config=CONFIG), to, config=CONFIG)


class Chapter:
    """The two files of a chapter, found from the path of either."""

    def __init__(self, path: Path):
        self.root, self.stem = path.absolute().parent.parent, path.stem
        self.paths = {
            SCRIPT: self.root / "scripts" / f"{self.stem}.py",
            NOTEBOOK: self.root / "notebooks" / f"{self.stem}.ipynb",
        }
        self.remembered = self.root / "build" / "pairs" / f"{self.stem}.py"
        self.texts = {k: p.read_text("utf-8") for k, p in self.paths.items() if p.exists()}
        if not self.texts:
            raise ValueError(f"{self} don't exist: name a chapter's script or notebook")
        self.sources = {kind: self.source(text, kind) for kind, text in self.texts.items()}

    def __str__(self) -> str:
        script, notebook = (f"{p.parent.name}/{p.name}" for p in self.paths.values())
        return f"{script} and {notebook}"

    def source(self, text: str, kind: str) -> str:
        """The script that a file's text makes, with today's first cell, without a header.

        Outputs, the kernel's name and blank lines between cells make no difference.
        Raises ValueError if it is not a notebook, or has no cells.
        """
        try:
            script = convert(convert(text, kind, NOTEBOOK), NOTEBOOK, SCRIPT)
        except NotJSONError as error:
            raise ValueError(f"notebooks/{self.stem}.ipynb is not a notebook") from error
        return stamp("".join(script.partition("# %%")[1:]), self.stem)

    def committed(self) -> str | None:
        """The source in the last commit whose sides agree; None without git or such a commit.

        That is not always the last commit: a script may be committed without its notebook.
        """
        places = [f"./{path.relative_to(self.root)}" for path in self.paths.values()]
        for commit in self.git("log", "--format=%h", "--", *places).split():
            texts = (self.git("show", f"{commit}:{place}") for place in places)
            with suppress(ValueError):  # a notebook that was committed broken
                sources = {
                    self.source(*text) for text in zip(texts, self.paths, strict=True) if text[0]
                }
                if len(sources) == 1:
                    return sources.pop()
        return None

    def git(self, *words: str) -> str:
        """What git prints, "" if it fails or is missing."""
        command = ["git", "-C", str(self.root), *words]
        try:
            return subprocess.run(command, capture_output=True, encoding="utf-8").stdout
        except FileNotFoundError:
            return ""

    def last_in_step(self) -> str | None:
        """The source when this command last left both in step, or None."""
        return self.remembered.read_text("utf-8") if self.remembered.exists() else None

    def leading(self) -> str | None:
        """The kind of the file that the other follows, or None if that can't be known."""
        if len(set(self.sources.values())) == 1:  # they are in step, or one is missing
            return next(iter(self.sources))
        for agreed in (self.committed, self.last_in_step):
            before = agreed()
            edited = [kind for kind, source in self.sources.items() if source != before]
            if len(edited) == 1:
                return edited[0]
        return None

    def bring_into_step(self, leading: str) -> None:
        """Write what differs from the leading side. Cells that stay keep their outputs."""
        source = self.sources[leading]
        kind, text = next(iter(self.texts.items()))  # the script, if there is one
        header, *_ = convert(text, kind, SCRIPT).partition("# %%")
        script = header + source
        book = jupytext.reads(script, SCRIPT, config=CONFIG)
        if NOTEBOOK in self.texts:
            stored = jupytext.reads(self.texts[NOTEBOOK], NOTEBOOK, config=CONFIG)
            book = combine_inputs_with_outputs(book, stored, SCRIPT)
        notebook = jupytext.writes(book, NOTEBOOK, config=CONFIG).rstrip() + "\n"
        for kind, path in self.paths.items():
            if path.exists() and path.read_text("utf-8") != self.texts.get(kind):
                raise ValueError(f"{path} was edited meanwhile: run make notebooks again")
        for kind, text in ((SCRIPT, script), (NOTEBOOK, notebook)):
            if text != self.texts.get(kind):
                self.paths[kind].parent.mkdir(exist_ok=True)
                write_whole(self.paths[kind], text.encode())
                print(f"wrote {self.paths[kind].parent.name}/{self.paths[kind].name}")
        self.remembered.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.remembered, source.encode())


def bring_all_into_step(paths: list[Path]) -> None:
    """Bring chapters into step, each named by either file. Raises ValueError, and writes nothing,
    if both files of one were edited.
    """
    chapters = [Chapter(path) for path in {path.stem: path for path in paths}.values()]
    leading = [chapter.leading() for chapter in chapters]
    unclear = [str(chapter) for chapter, kind in zip(chapters, leading, strict=True) if not kind]
    if unclear:
        raise ValueError(
            "can't tell which to follow, since both were edited or never committed: "
            f"{'; '.join(unclear)}. Nothing was written. Bring what you want to keep into one of "
            "the two, delete the other (it is made again), and repeat"
        )
    for chapter, kind in zip(chapters, leading, strict=True):
        chapter.bring_into_step(kind)


if __name__ == "__main__":
    try:
        bring_all_into_step([Path(name) for name in sys.argv[1:]])
    except (ValueError, OSError) as error:
        print("error:", error, file=sys.stderr)
        raise SystemExit(2) from None
