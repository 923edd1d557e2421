"""Sphinx extension: recall cards at each chapter's end, and a page of all; cards.js plans them."""

import hashlib
import html
import json
import re
import tomllib
from functools import cache
from pathlib import Path

from contents import parts

CARDS = Path(__file__).resolve().parents[1] / "cards.toml"
LAST_WORDS = r"(?m)^(?=Next: |## Goodbye)"  # the cards come before them
INTRODUCTION = """## Recall\n
Answer in your own words, then unfold and compare. [All cards](../docs/cards.md) are on one page.
"""


@cache
def cards(path: Path = CARDS) -> dict[int, list[dict[str, str]]]:
    """Each chapter's cards. Raises ValueError if one hasn't three to five, all with an answer."""
    found = {int(n): some for n, some in tomllib.loads(path.read_text("utf-8")).items()}
    for number in (int(one.stem[2:4]) for part in parts().values() for one in part):
        some = found.get(number, [])
        whole = all(card.keys() == {"question", "answer"} and all(card.values()) for card in some)
        if not 3 <= len(some) <= 5 or not whole:
            raise ValueError(f"{path.name}: chapter {number} needs 3 to 5 questions with answers")
    return found


def folded(number: int, title: str = "") -> str:
    """A chapter's cards in Markdown, after a title."""
    lines = [f'<div class="cards" data-chapter="{number}">\n', title]
    for card in cards()[number]:
        name = hashlib.sha256(card["question"].encode()).hexdigest()[:8]
        question = html.escape(card["question"]).replace("&#x27;", "&rsquo;")
        lines.append(f'<details class="recall" id="card-{name}"><summary>{question}</summary>\n')
        lines.append(f"{card['answer']}\n\n</details>\n")
    return re.sub(r"\bd_k\b", "d<sub>k</sub>", "\n".join([*lines, "</div>\n"]))


def read_source(app, docname, source):
    """Before a page is read: put its cards into it."""
    if docname.startswith("notebooks/"):
        notebook = json.loads(source[0])
        last = notebook["cells"][-1]
        before, *after = re.split(LAST_WORDS, "".join(last["source"]), maxsplit=1)
        last["source"] = "\n\n".join([before, INTRODUCTION, folded(int(docname[12:14])), *after])
        source[0] = json.dumps(notebook)
    elif docname == "docs/cards":
        chapters = [one for part in parts().values() for one in part]
        titles = [f"**[{one.name}](../notebooks/{one.stem}.ipynb)**\n" for one in chapters]
        source[0] += "\n".join(folded(number, title) for number, title in enumerate(titles))


def setup(app):
    app.connect("source-read", read_source, priority=600)  # after a notebook's other changes
    return {"parallel_read_safe": True, "parallel_write_safe": True}
