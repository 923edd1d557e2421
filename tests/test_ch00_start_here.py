"""Chapter 0: its first cell, the exchange of rows, its drawing, the parts."""

import ast
import re
import socket
import tomllib

import pytest
import torch
from conftest import CHAPTERS, ROOT

from scripts.ch00_start_here import memory_of, wearing_gap, with_rows, write_from
from scripts.ch06_training import BOS
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
    changed = with_rows(memory, other, [2, 4])
    assert torch.equal(changed[:, [2, 4]], other[:, [2, 4]]) and not torch.equal(changed, memory)
    rest = [row for row in range(memory.size(1)) if row not in (2, 4)]
    assert torch.equal(changed[:, rest], memory[:, rest])
    with pytest.raises(ValueError):
        memory_of(trained, [texts[0], "Ein Hund."])


def test_the_gap_is_that_of_the_translators_own_probabilities():
    trained = load_model(ROOT / "models" / "multi30k-de-en")
    memory = memory_of(trained, ["Ein Mann trägt einen Hut.", "Ein Mann trägt einen Korb."])
    begun = torch.tensor([[BOS, *trained.tokenizer.encode("A man is")]] * 2)
    with torch.no_grad():
        p = trained.model.generator(
            trained.model.decode(memory, None, begun, torch.ones(1, 4, 4).tril() > 0)[:, -1]
        )
        p = p.softmax(dim=-1)[:, [180, 993]]
        gap = wearing_gap(trained, memory, begun)
    pieces = [trained.tokenizer.processor.id_to_piece(i) for i in (180, 993)]
    assert pieces == ["▁wearing", "▁carrying"] and gap[0] > 3 and gap[1] < -2
    torch.testing.assert_close(gap, (p[:, 0] / p[:, 1]).log())
    with torch.no_grad():  # the verb's row from the hat: "by a hair"
        changed = with_rows(memory[1:], memory[:1], [2])
        assert wearing_gap(trained, changed, begun[:1]).item() == pytest.approx(0.21, abs=0.01)


def test_what_it_makes_of_pensions_and_chairs_and_whose_row_changes_most():
    trained = load_model(ROOT / "models" / "multi30k-de-en")
    german, english = re.search(
        r"From \*(.+?)\*, about pensions, it makes \*(.+?)\*", SCRIPT
    ).groups()
    assert plain_translate(trained, [german]) == [english]
    chairs = [f"{who} trägt einen Stuhl." for who in ("Ein Mann", "Eine Frau", "Ein Kind")]
    assert all("wearing" in english for english in plain_translate(trained, chairs))
    memory, hat = memory_of(
        trained, [f"Ein Mann trägt einen {thing}." for thing in ("Korb", "Hut")]
    )
    change = (hat - memory).norm(dim=-1) / memory.norm(dim=-1)  # (S,)
    assert change.argsort(descending=True)[:2].tolist() == [4, 2] and 0.3 < change[2] < 0.4
    assert (change > 0.03).all()


PEOPLE = {"Ein Mann": "A man", "Eine Frau": "A woman", "Ein Junge": "A boy"}
PEOPLE |= {"Ein Mädchen": "A girl", "Ein Arbeiter": "A worker", "Ein Kind": "A child"}
RELATIVE = dict(zip(PEOPLE, ["der", "die", "der", "das", "der", "das"], strict=True))
GARMENTS = "einen Helm, eine Jacke, einen Mantel, eine Brille, ein Kleid, ein Hemd, einen Schal, "
GARMENTS += "eine Maske, eine Uniform, eine Krawatte, eine Hose"


def shares(trained, form, english, garment, exchanges):
    """How much of the way from load to garment each exchange of rows goes, up and down."""
    lists = re.findall(r'^things \+?= "(.+?)(?:, )?"$', SCRIPT, re.M)
    pairs = [(who, what) for what in ", ".join(lists).split(", ") for who in PEOPLE]

    def memory(garment=None):
        texts = [form.format(who, RELATIVE[who], thing=garment or what) for who, what in pairs]
        return memory_of(trained, texts)

    begun = [[BOS, *trained.tokenizer.encode(PEOPLE[who] + english)] for who, _ in pairs]
    loads, worn, begun = memory(), memory(garment), torch.tensor(begun)
    low, high = (wearing_gap(trained, m, begun) for m in (loads, worn))
    way, result = (high - low).mean(), []
    for rows in exchanges:
        up = wearing_gap(trained, with_rows(loads, worn, rows), begun) - low
        down = high - wearing_gap(trained, with_rows(worn, loads, rows), begun)
        result.append([(up.mean() / way).item(), (down.mean() / way).item()])
    return result


@pytest.mark.audit
def test_with_other_garments_verb_and_thing_share_the_decision_too():
    trained = load_model(ROOT / "models" / "multi30k-de-en")
    trained.model.double()
    with torch.no_grad():
        found = torch.tensor(
            [
                shares(trained, "{} trägt {thing}.", " is", garment, [[2], [4], [2, 4], [3]])
                for garment in GARMENTS.split(", ")
            ]
        )  # (garments, exchanges, 2)
    verb, thing, both, article = found.unbind(dim=1)
    assert [round(x.item(), 2) for x in (verb.min(), verb.max())] == [0.31, 0.54]
    assert [round(x.item(), 2) for x in (thing.min(), thing.max())] == [0.38, 0.58]
    assert both.min() > 0.84 and article.max() < 0.11


@pytest.mark.audit
def test_in_a_relative_clause_the_comma_holds_more_than_the_verb():
    trained = load_model(ROOT / "models" / "multi30k-de-en")
    trained.model.double()
    form = "{}, {} {thing} trägt, geht am Strand entlang."
    pieces = trained.tokenizer.pieces(form.format("Ein Mann", "der", thing="einen Korb"))
    assert [pieces[i] for i in (2, 5, 6)] == [",", "▁Korb", "▁trägt"]
    with torch.no_grad():
        comma, thing, verb = shares(trained, form, "", "einen Hut", [[2], [5], [6]])
    assert min(thing) > 0.45 and max(thing) < 0.55 and min(verb) > 0.06 and max(verb) < 0.13
    assert min(comma) > max(verb)


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
