"""Sets the series' public address everywhere it is written: `make address URL=https://…`.

The one place is pyproject.toml. From there it gets into the citation, the README and each chapter:
the first cell fetches the series from it, and a link opens the chapter in Colab if the address is
on GitHub. An empty address takes all of it away again.
"""

import re
import sys
from pathlib import Path

from scripts import ROOT
from scripts.book.files import write_whole
from scripts.book.first_cell import in_colab
from scripts.book.pairs import bring_all_into_step

BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"


def rewrite(path: Path, pattern: str, text: str) -> None:
    """Put `text` where `pattern` fits in a file. Raises ValueError if it is not there."""
    old = path.read_text("utf-8")
    new, count = re.subn(pattern, lambda _: text, old, count=1, flags=re.MULTILINE)
    if not count:
        raise ValueError(f"{path.name} has no place for the address")
    write_whole(path, new.encode())


def set_address(url: str, root: Path = ROOT) -> None:
    """Write `url`, or "" for none, into the files of the series in `root`.

    Raises ValueError if it is no address that git can fetch from.
    """
    if url and not re.fullmatch(r"(https?|ssh|file)://[^\s\"'\\{}]+", url):
        raise ValueError(f"{url} is no address such as https://github.com/name/series")
    line = f'Repository = "{url}"\n' if url else ""
    rewrite(root / "pyproject.toml", r"(?<=^\[project\.urls\]\n)(Repository = .*\n)?", line)
    line = f'repository-code: "{url}"\n' if url else ""
    rewrite(root / "CITATION.cff", r"(?<=^license: MIT\n)(repository-code: .*\n)?", line)
    link = in_colab("ch00_start_here")
    badge = f"| {BADGE.format(link=link)} " if link else "| "
    rewrite(root / "README.md", r"^\| (\[!.*?\)\]\(.*?\) )?(?=In Colab \|)", badge)
    bring_all_into_step(sorted((root / "scripts").glob("ch[0-9][0-9]_*.py")))


if __name__ == "__main__":
    try:
        set_address(sys.argv[1])
    except (ValueError, OSError) as error:
        print("error:", error, file=sys.stderr)
        raise SystemExit(2) from None
