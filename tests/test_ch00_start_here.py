"""Chapter 0: its first cell, the exchange of rows, its drawing, the parts."""

import ast
import re
import socket
import tomllib

import pytest
import torch
from conftest import CHAPTERS, ROOT

from scripts.ch00_start_here import memory_of, with_row, write_from
from scripts.ch08_decoding import plain_translate
from scripts.core.models import load_model

SCRIPT = (ROOT / "scripts" / "ch00_start_here.py").read_text("utf-8")

pytestmark = pytest.mark.usefixtures("float64")


def test_the_first_cell_translates_a_sentence_offline(monkeypatch):
    cells = [cell for cell in SCRIPT.split("\n# %%")[1:] if not cell.startswith(" [markdown]")]
    *steps, shown = ast.parse(cells[1].split("\n", 1)[1]).body

    def no_network(*_, **__):
        raise OSError("this cell asked for a network")

    monkeypatch.setattr(socket, "socket", no_network)
    torch.set_default_dtype(torch.float32)  # as a reader's session begins
    space: dict = {}
    exec(compile(ast.Module(steps, []), "first cell", "exec"), space)
    english = eval(compile(ast.Expression(shown.value), "first cell", "eval"), space)
    assert "Frau" in space["mine"] and "woman" in english.lower()


@pytest.mark.parametrize("name", ["multi30k-de-en", "sample-de-en"])
def test_writing_from_a_memory_is_greedy_decoding(name):
    trained = load_model(ROOT / "models" / name)
    texts = [f"Ein Mann trägt einen {thing}." for thing in ("Hut", "Korb")]
    memory = memory_of(trained, texts[:1])
    assert write_from(trained, memory, 40) == plain_translate(trained, texts[:1])
    other = memory_of(trained, texts[:1]).flip(-1)
    changed = with_row(memory, other, 2)
    assert torch.equal(changed[:, 2], other[:, 2]) and not torch.equal(changed, memory)
    rest = [row for row in range(memory.size(1)) if row != 2]
    assert torch.equal(changed[:, rest], memory[:, rest])
    with pytest.raises(ValueError):
        memory_of(trained, [texts[0], "Ein Hund."])


PEOPLE = {"Ein Mann": "der", "Eine Frau": "die", "Ein Junge": "der"}
PEOPLE |= {"Ein Mädchen": "das", "Ein Arbeiter": "der", "Ein Kind": "das"}
PLAIN, RELATIVE = "{} trägt {thing}.", "{}, {} {thing} trägt, geht am Strand entlang."


@pytest.mark.audit
@pytest.mark.parametrize("form, kept, turned", [(PLAIN, 68, [20, 63]), (RELATIVE, 62, [10, 10])])
def test_how_far_the_exchange_of_the_verbs_row_reaches(form, kept, turned):
    trained = load_model(ROOT / "models" / "multi30k-de-en")
    trained.model.double()
    lists = re.findall(r'^(?:things|clothes) \+?= "(.+?)(?:, )?"$', SCRIPT, re.M)
    things, clothes = (", ".join(lists[i : i + 2]).split(", ") for i in (0, 2))
    captions = [(pair, thing) for thing in things for pair in PEOPLE.items()]

    def memory(captions):
        return memory_of(trained, [form.format(*pair, thing=thing) for pair, thing in captions])

    with torch.no_grad():
        english = write_from(trained, memory(captions))
        carried = [c for c, en in zip(captions, english, strict=True) if "carrying" in en]
        theirs = memory(carried)
        row = trained.tokenizer.pieces(form.format("Ein Mann", "der", thing="")).index("▁trägt")
        row += form is RELATIVE and 2  # two pieces: the article and the thing
        counts = []
        for garment in clothes[: 12 if form is PLAIN else 1]:
            donors = memory([(pair, garment) for pair, _ in carried])
            changed = write_from(trained, with_row(theirs, donors, row))
            counts.append(sum("wearing" in en for en in changed))
    assert (len(carried), [min(counts), max(counts)]) == (kept, turned)


def test_the_drawing_is_of_the_shipped_translator():
    parts = tomllib.loads((ROOT / "scripts/book/figures/diagrams.toml").read_text("utf-8"))
    words = [part[3] for part in parts["architecture"]["parts"] if part[0] == "box"]
    inside = [word.split(" · ")[0] for word in words]
    first = inside.index("Self-attention")
    pre_norm = inside[first - 1] == "norm" and inside[first + 1] == "add"
    assert pre_norm and load_model(ROOT / "models" / "multi30k-de-en").config.norm_first
    assert inside.count("norm") == 7 and inside.count("add") == 5  # a last norm ends each stack


def test_the_table_of_chapters_has_the_series_parts_and_its_short_way():
    order = tomllib.loads((ROOT / "docs/parts.toml").read_text("utf-8"))
    expected = []
    for part in order["parts"]:
        expected.append(f"**{part['name']}**")
        for path in CHAPTERS[1:]:
            number = int(path.stem[2:4])
            if number in part["chapters"]:
                title = re.search(r"^# # Chapter (\d+ · .+)$", path.read_text("utf-8"), re.M)[1]
                short = " ●" * (number in order["short"])
                expected.append(f"[{title}]({path.stem}.ipynb){short}")
    rows = re.findall(r"^# \| (\*\*[IV]+ · .+?\*\*|\[\d+ · .+?) \|", SCRIPT, re.M)
    assert rows == expected
