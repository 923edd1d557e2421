"""The walk's page in headless Chromium: numbers, the tour, every stop, keys, a phone."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from browsing import chromium, run_script, serving
from conftest import ROOT
from test_living import SENTENCES, build

from scripts.core.models import DEFAULT_MODEL

WALK = ROOT / "docs" / "walk"
STOPS = ["pieces", "embed", "qkv", "scores", "softmax", "mix", "residual", "feedforward"]
STOPS += ["causal", "cross", "decoderff", "logits", "choice"]
OWN = "Eine Frau trägt einen roten Hut."
# Layer, head, step and stop of some states; the sentences take turns.
PLACES = [(i % 3, (3 * i + 1) % 8, i % 4, stop) for i, stop in enumerate(STOPS)]
CALLS = [
    [
        "stop",
        {"sentence": SENTENCES[i % 5], "layer": layer, "head": head, "step": step, "stop": stop},
    ]
    for i, (layer, head, step, stop) in enumerate(PLACES)
]


@pytest.fixture(scope="module")
def living(once) -> Path:
    """The living page as the site has it, with the walk beside it."""
    made = once("living", lambda folder: build.build(DEFAULT_MODEL, folder / "x/y"))

    def lay_out(folder: Path) -> None:
        build.build_walk(shutil.copytree(made / "x/y", folder / "site/living"))

    return once("walk", lay_out) / "site/living"


def test_the_page_is_small_whole_and_of_this_house(living):
    walk = living.with_name("walk")
    assert sum(path.stat().st_size for path in walk.iterdir()) < 200e3
    worker = (walk / "sw.js").read_text("utf-8")
    for name in re.findall(r'"(.+?)",?\n', worker):
        assert name == "./" or (walk / name).is_file(), name
    for path in walk.iterdir():
        text = path.read_text("utf-8")
        assert f'"{path.name}"' in worker or path.name == "sw.js"
        assert not re.findall(r"https?://(?!www.w3.org)", text), path.name
        for name in re.findall(r'(?:from|import|src=|href=) ?"(\.\.?/living/.+?|\./.+?)"', text):
            assert (walk / name).resolve().is_file(), f"{path.name}: {name}"


def plain(answer: dict) -> dict:
    """A script's answer without the marks that keep a label's direction to itself."""
    return json.loads(re.sub(r"\\u206[89]", "", json.dumps(answer)))


@pytest.fixture(scope="module")
def visit(living):
    """What a reader sees. LIVING_PICTURES=folder keeps the screenshots."""
    with serving(living.parent) as home:
        request = {"chromium": chromium(), "url": f"{home}walk/", "calls": CALLS, "sentence": OWN}
        request["pictures"] = os.environ.get("LIVING_PICTURES")
        return plain(run_script(WALK / "browser.mjs", request=request))


@pytest.mark.audit
def test_a_browser_computes_what_node_does(visit, living):
    """Bit by bit: so what test_walk.py finds in Node holds for the page, too."""
    assert (
        visit["calls"]
        == run_script(WALK / "node.mjs", str(living), request={"calls": CALLS})["calls"]
    )


@pytest.mark.audit
def test_a_browser_has_no_complaint_and_nothing_sticks_out(visit):
    assert visit["complaints"] == []
    assert len(visit["axe"]) == 8 and not any(visit["axe"].values()), visit["axe"]
    assert max(visit["wider"]) <= 0


@pytest.mark.audit
def test_the_tour_is_walked_there_and_back_by_keyboard(visit):
    assert 8 <= len(visit["tour"]) <= 10 and visit["tour"] == visit["back"]
    assert visit["tabs"] < 10
    assert len({one["tour"] for one in visit["tour"]}) == len(visit["tour"])
    first = visit["tour"][0]
    assert re.search(r"“carrying”. It gives it 77.\d %", first["text"])
    assert [visit["focusBack"], visit["focus"]] == ["tour-next", "title"]  # never lost
    assert visit["left"]["tour"] is None and visit["left"]["cell"] == visit["back"][0]["cell"]


@pytest.mark.audit
def test_every_stop_shows_its_numbers_quickly(visit):
    assert [stop["id"] for stop in visit["stops"]] == STOPS
    for number, stop in enumerate(visit["stops"], 1):
        assert f"stop={stop['id']}&" in stop["address"]
        assert stop["title"].startswith(f"{number} · ")
        assert stop["current"].startswith(f"{number} ")
        assert stop["cell"] and stop["lines"] and min(stop["drawn"]) > 100
    times = sorted(stop["took"] for stop in visit["stops"])
    assert (
        visit["times"]["first"] < 20_000 and times[len(times) // 2] < 500
    )  # 5 s and 0.1 s if idle


@pytest.mark.audit
def test_a_cell_is_chosen_by_keys_and_followed(visit):
    assert len(set(visit["cells"])) == 4  # three keys, three other cells
    value = visit["cells"][-1].rsplit(" = ", 1)[1]
    assert visit["spoken"] == f"Korb, Ein: {value}"
    assert "[4, 0].item()" in visit["code"] and len(visit["table"]) == 7
    assert "stop=softmax" in visit["followed"]["address"]
    assert visit["returned"]["cell"] == visit["cells"][-1]
    assert visit["offline"] == visit["returned"]


@pytest.mark.audit
def test_a_probability_leads_back_to_an_id(visit):
    assert visit["way"][0].startswith("probability of “carrying” = 0.77")
    assert visit["way"][-1].startswith("id of ") and 10 < len(visit["way"]) < 60


@pytest.mark.audit
def test_ones_own_sentence_and_a_finger(visit):
    assert visit["tokens"] == ["A", "woman", "is", "wearing", "a", "red", "hat", ".", "</s>"]
    assert visit["chosen"] == "woman"
    assert "trägt" in visit["tapped"] and "Mann" in visit["tapped"]


@pytest.mark.audit
def test_where_it_cannot_work_the_page_says_so(visit):
    assert "The model failed" in visit["trouble"]["no weights"]
    assert "didn't run" in visit["trouble"]["no script"]
