"""Chapter 0: its first cell, the trace of a sentence, the parts."""

import ast
import re
import socket
import tomllib

import pytest
import torch
from conftest import CHAPTERS, ROOT

from scripts.ch00_start_here import by_words, next_token_probabilities
from scripts.ch06_training import greedy_decode
from scripts.ch07_multi30k import load_corpus, source_ids
from scripts.core.models import load_model

SCRIPT = (ROOT / "scripts" / "ch00_start_here.py").read_text("utf-8")
TEXT = "Ein freundlicher Musiker hat einen Hammer mitgenommen."


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


@pytest.mark.parametrize("text", [TEXT, "Ein Xylophonspieler ☃ hat mitgenommen!"])
def test_attention_between_words_follows_the_pieces(text):
    trained = load_model(ROOT / "models" / "sample-de-en")
    ids = torch.tensor([source_ids(text, trained.tokenizer)])
    written = greedy_decode(trained.model, ids, None, max_len=40)
    target = [trained.tokenizer.processor.id_to_piece(i) for i in written[0].tolist()]
    next_token_probabilities(trained, ids, written)
    attn = trained.model.decoder.layers[-1].src_attn.attn[0].mean(dim=0)
    looks, english, german = by_words(attn, target, [*trained.tokenizer.pieces(text), "</s>"])
    torch.testing.assert_close(looks.sum(dim=1), torch.ones_like(looks[:, 0]))
    assert len(looks) == len(english) and looks.size(1) == len(german)
    if text == TEXT:  # new to the model; the picture's caption gives two of the weights
        assert (text, "A friendly musician has taken along a hammer.") in load_corpus("sample")[
            "test"
        ]
        assert " ".join(english) == "A friendly musician has taken along a hammer . </s>"
        assert " ".join(german) == text.replace(".", " . </s>")
        most = dict(zip(english, (german[i] for i in looks.argmax(dim=1)), strict=True))
        assert most["taken"] == most["along"] == "mitgenommen" and most["hammer"] == "Hammer"
        stop = looks[english.index("taken"), german.index(".")]
        end = looks[english.index("."), german.index("</s>")]
        caption = f"\"{stop:.2f} on the full stop, and '.' puts {end:.2f} on </s>.\""
        assert caption in SCRIPT


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
