"""Chapter 0: the picture, the trace of a sentence, the parts."""

import ast
import re
import socket
import tomllib

import pytest
import torch
from conftest import CHAPTERS, ROOT

from scripts.book.figures.start import HEIGHT, WIDTH, architecture
from scripts.ch00_start_here import (
    architecture_chart,
    by_words,
    next_token_probabilities,
)
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import greedy_decode
from scripts.ch07_multi30k import load_corpus, source_ids
from scripts.core.models import load_model

MINE = "Eine Frau mit einem roten Hut liest am Strand ein Buch."
TEXT = "Ein freundlicher Musiker hat einen Hammer mitgenommen."


pytestmark = pytest.mark.usefixtures("float64")


def test_the_first_cell_translates_a_sentence_offline(monkeypatch):
    script = (ROOT / "scripts" / "ch00_start_here.py").read_text("utf-8")
    cells = [cell for cell in script.split("\n# %%")[1:] if not cell.startswith(" [markdown]")]
    assert cells[0].startswith(' tags=["bootstrap"]')
    *steps, shown = ast.parse(cells[1].split("\n", 1)[1]).body

    def no_network(*_, **__):
        raise OSError("this cell asked for a network")

    monkeypatch.setattr(socket, "socket", no_network)
    torch.set_default_dtype(torch.float32)  # as a reader's session begins
    space: dict = {}
    exec(compile(ast.Module(steps, []), "first cell", "exec"), space)
    english = eval(compile(ast.Expression(shown.value), "first cell", "eval"), space)
    assert "Frau" in space["mine"] and "woman" in english.lower()


def test_a_reader_may_put_in_any_sentence():
    script = (ROOT / "scripts" / "ch00_start_here.py").read_text("utf-8")
    assert script.count(MINE) == 1 == script.count(TEXT)
    script = script.replace(MINE, "Zwölf Boxkämpfer jagen ☃ quer über den Sylter Deich! " * 30)
    script = script.replace(TEXT, "Ein Xylophonspieler hat mitgenommen einen Hammer ☃")
    space = {"__name__": "__main__", "__file__": str(ROOT / "scripts" / "ch00_start_here.py")}
    exec(compile(script, "chapter 0", "exec"), space)
    assert space["S"] == len(space["pieces"]) + 1


def test_the_sentence_that_is_followed_is_new_to_the_model_and_translated_rightly():
    assert (TEXT, "A friendly musician has taken along a hammer.") in load_corpus("sample")["test"]
    trained = load_model(ROOT / "models" / "sample-de-en")
    ids = torch.tensor([source_ids(TEXT, trained.tokenizer)])
    assert trained.tokenizer.decode(ids[0].tolist()) == TEXT  # no letter is lost
    written = greedy_decode(trained.model, ids, None, max_len=40)
    target = [trained.tokenizer.processor.id_to_piece(i) for i in written[0].tolist()]
    source = [*trained.tokenizer.pieces(TEXT), "</s>"]
    next_token_probabilities(trained, ids, written)
    attn = trained.model.decoder.layers[-1].src_attn.attn[0].mean(dim=0)
    looks, english, german = by_words(attn, target, source)
    assert " ".join(english) == "A friendly musician has taken along a hammer . </s>"
    assert " ".join(german) == TEXT.replace(".", " . </s>")
    torch.testing.assert_close(looks.sum(dim=1), torch.ones_like(looks[:, 0]))
    most = {word: german[i] for word, i in zip(english, looks.argmax(dim=1).tolist(), strict=True)}
    assert most["taken"] == most["along"] == "mitgenommen" and most["hammer"] == "Hammer"
    stop, end = german.index("."), german.index("</s>")  # the picture's caption gives the weights
    weights = looks[english.index("taken"), stop], looks[english.index("."), end]
    said = [f"{float(weight):.2f}" for weight in weights]
    script = (ROOT / "scripts" / "ch00_start_here.py").read_text("utf-8")
    assert f"\"{said[0]} on the full stop, and '.' puts {said[1]} on </s>.\"" in script


def test_the_picture_has_no_overlaps_and_its_words_fit():
    drawn = architecture()
    boxes = drawn.boxes
    solid = [box for box in boxes if box["fill"] != "frame"]
    for i, a in enumerate(solid):
        assert a["x"] >= 0 and a["x2"] <= WIDTH and a["y"] >= 0 and a["y2"] <= HEIGHT, a["name"]
        for b in solid[i + 1 :]:
            apart_x = a["x2"] <= b["x"] or b["x2"] <= a["x"]
            assert apart_x or a["y2"] <= b["y"] or b["y2"] <= a["y"], (a["name"], b["name"])
        assert 8 * len(a["name"]) <= a["x2"] - a["x"], a["name"]
        assert 6 * len(a["note"]) <= a["x2"] - a["x"], a["note"]
    for text in drawn.words:
        if text["look"] == "beside":
            inside = [
                box["name"]
                for box in solid
                if box["x"] < text["x"] + 7 * len(text["text"])
                and text["x"] < box["x2"]
                and box["y"] < text["y"] + 6
                and text["y"] - 6 < box["y2"]
            ]
            assert not inside, (text["text"], inside)
    for *_, (x, y) in drawn.arrows:  # every arrow leads to a box
        near = [b for b in boxes if b["x"] - 4 <= x <= b["x2"] + 4]
        assert any(b["y"] - 4 <= y <= b["y2"] + 4 for b in near), (x, y)


def test_the_picture_shows_every_part_the_model_has():
    names = [box["name"] for box in architecture().boxes]
    model = make_model(10, 10, N=1, d_model=8, d_ff=16, h=2)
    norms = sum(
        len(layer.sublayer) for stack in (model.encoder, model.decoder) for layer in stack.layers
    )
    assert sum("add & norm" in name for name in names) == norms == 5
    assert names.count("Feed-forward") == 2
    assert sum("attention" in name for name in names) == 3
    assert names.count("no padding") == 2 and names.count("no future") == 1
    assert architecture_chart().to_dict()["layer"]


def test_the_table_of_chapters_has_the_series_parts_and_its_short_way():
    text = (ROOT / "scripts" / "ch00_start_here.py").read_text("utf-8")
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
    rows = re.findall(r"^# \| (\*\*[IV]+ · .+?\*\*|\[\d+ · .+?) \|", text, re.M)
    assert rows == expected
