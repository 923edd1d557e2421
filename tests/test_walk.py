"""The walk: its numbers are Python's, its formulas add up, its code gives what it shows.

The page's own JavaScript runs in Node, and again in headless Chromium: there also the tour, every
stop, keys, a phone.
"""

import base64
import copy
import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import chromium, run_script, serving
from conftest import ROOT
from docutils.nodes import make_id
from test_living import SENTENCES, build
from torch import Tensor, nn

from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import BOS, EOS, greedy_decode
from scripts.ch07_multi30k import source_ids
from scripts.core.models import DEFAULT_MODEL, load_model

WALK = ROOT / "docs" / "walk"
STOPS = ["pieces", "embed", "qkv", "scores", "softmax", "mix", "residual", "feedforward"]
STOPS += ["causal", "cross", "decoderff", "logits", "choice"]
# The page adds up in 64 bits and keeps 32. PyTorch adds up in 32, so that more rounding gathers
# through six layers. Measured on these sentences, as shares of a tensor's largest number: the page
# is at most 3e-7 from the model in float64, PyTorch's float32 at most 2e-6 from both. Other
# processors add in another order.
EXACT, ROUNDED = 1e-6, 1e-5


# A state for each sentence and stop: all layers, five heads and steps.
STATES = [
    {"sentence": text, "layer": i % 3, "head": (3 * i + 1) % 8, "step": 2 * i, "stop": stop}
    for i, text in enumerate(SENTENCES)
    for stop in STOPS
]
OWN = "Eine Frau trägt einen roten Hut."


@pytest.fixture(scope="module")
def trained():
    return load_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def living(once) -> Path:
    """The living page as the site has it, with the walk beside it."""
    made = once("living", lambda folder: build.build(DEFAULT_MODEL, folder / "x/y"))

    def lay_out(folder: Path) -> None:
        build.build_walk(shutil.copytree(made / "x/y", folder / "site/living"))

    return once("walk", lay_out) / "site/living"


@pytest.fixture(scope="module")
def read(living) -> list[dict[str, Any]]:
    """What the page makes of each sentence, with every tensor."""
    return run_script(WALK / "node.mjs", str(living), request={"read": SENTENCES})["read"]


def python_trace(model: nn.Module, src: list[int], tgt: list[int]) -> dict[str, Tensor]:
    """Every tensor of the walk by its name there, rows first, as hooks on the model see them."""
    found: dict[str, Tensor] = {}
    names = {"src_embed.0": "source.embedding", "src_embed.1": "source.embedded"}
    names |= {"tgt_embed.0": "target.embedding", "tgt_embed.1": "target.embedded"}
    names |= {"encoder.norm": "memory", "decoder.norm": "decoder.norm", "generator": "logits"}
    for side in ("encoder", "decoder"):
        kinds = {"self_attn": "self", "src_attn": "cross"}
        for n, layer in enumerate(getattr(model, side).layers):
            ours, theirs = f"{side}.{n}", f"{side}.layers.{n}"
            for i in range(len(layer.sublayer)):
                names[f"{theirs}.sublayer.{i}.norm"] = f"{ours}.norm{i + 1}"
                names[f"{theirs}.sublayer.{i}"] = f"{ours}.residual{i + 1}"
            for name, kind in kinds.items():
                if hasattr(layer, name):
                    names[f"{theirs}.{name}"] = f"{ours}.{kind}.out"
                    for role in ("query", "key", "value", "output"):
                        names[f"{theirs}.{name}.project_{role}"] = f"{ours}.{kind}.{role}"
            names[f"{theirs}.feed_forward"] = f"{ours}.ff.out"
            names[f"{theirs}.feed_forward.contract"] = f"{ours}.ff.contract"

    def keep(name: str):
        def hook(module, inputs, output):
            if name.endswith((".output", ".contract")):
                inside = {"output": "mix", "contract": "hidden"}[name.rsplit(".")[-1]]
                found[name.rsplit(".", 1)[0] + f".{inside}"] = inputs[0][0]
            else:
                found[name] = output[0]

        return hook

    hooks = [
        m.register_forward_hook(keep(names[n])) for n, m in model.named_modules() if n in names
    ]
    source, target = torch.tensor([src]), torch.tensor([tgt])
    causal = subsequent_mask(len(tgt))
    with torch.no_grad():
        model.generator(model(source, target, None, causal))
    for hook in hooks:
        hook.remove()
    heads = model.encoder.layers[0].self_attn.h
    for name in [name for name in found if name.endswith(".mix")]:
        at = name.removesuffix(".mix")
        for part in ("query", "key", "value", "mix"):
            found[f"{at}.{part}"] = found[f"{at}.{part}"].unflatten(-1, (heads, -1))  # (T, H, d_k)
        query, key = found[f"{at}.query"], found[f"{at}.key"]
        scores = torch.einsum("thd,shd->ths", query, key) / math.sqrt(query.size(-1))
        found[f"{at}.scores"] = scores
        if at.startswith("decoder") and at.endswith("self"):
            found[f"{at}.masked"] = scores.masked_fill(~causal[0].unsqueeze(1), -math.inf)
        side, n, kind = at.split(".")
        attn = getattr(
            getattr(model, side).layers[int(n)], {"self": "self_attn", "cross": "src_attn"}[kind]
        )
        found[f"{at}.weights"] = attn.attn[0].transpose(0, 1)  # (T, H, S)
    found["probabilities"] = found["logits"].softmax(-1)
    found["source.ids"], found["target.ids"] = source[0], target[0]
    for side, embed, ids in (("source", model.src_embed, src), ("target", model.tgt_embed, tgt)):
        found[f"{side}.position"] = embed[1].pe[: len(ids)]
    return found


def as_tensor(numbers: str, shape: list[int]) -> Tensor:
    """What node.mjs makes of a Float32Array."""
    return torch.frombuffer(bytearray(base64.b64decode(numbers)), dtype=torch.float32).view(shape)


def assert_near(found: Tensor, wanted: Tensor, tolerance: float, name: str) -> None:
    """`tolerance` is a share of the largest number that is wanted."""
    wanted = wanted.double()
    scale = wanted[wanted.isfinite()].abs().max().item()
    torch.testing.assert_close(
        found.double(), wanted, rtol=0, atol=tolerance * scale, msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.parametrize("number", range(5))
def test_every_tensor_is_pythons(read, trained, number):
    one = read[number]
    assert one["ids"] == source_ids(SENTENCES[number], trained.tokenizer)
    limit = 2 * len(one["ids"]) + 10
    written = greedy_decode(trained.model, torch.tensor([one["ids"]]), None, limit)[0].tolist()
    assert one["target"] == [BOS, *written] and written[-1] == EOS
    assert one["text"] == trained.tokenizer.decode(written)
    exact = copy.deepcopy(trained.model).double()
    for model, tolerance in ((trained.model, ROUNDED), (exact, EXACT)):
        wanted = python_trace(model, one["ids"], one["target"][:-1])
        assert one["trace"].keys() == wanted.keys()
        for name, tensor in one["trace"].items():
            assert_near(as_tensor(tensor["data"], tensor["shape"]), wanted[name], tolerance, name)


def test_what_the_model_does_not_know_is_said(living):
    asked = {"read": ["", "Ein ☃ läuft. " + 8 * "Ein Hund läuft über die Wiese. "]}
    nothing, snow = run_script(WALK / "node.mjs", str(living), request=asked)["read"]
    assert nothing["srcPieces"] == ["</s>"] and not nothing["note"]
    assert len(snow["srcPieces"]) == 40 and snow["srcPieces"][-1] == "</s>"
    assert "first 39 pieces" in snow["note"] and "never met “\u2068☃\u2069”" in snow["note"]


def test_the_walk_refuses_a_model_that_it_cannot_open(tmp_path):
    for name, places in (("living", {}), ("other", {"encoder.norm.weight", "generator.proj.bias"})):
        (tmp_path / name).mkdir()
        model = {"weights": {"places": dict.fromkeys(places)}}
        (tmp_path / name / "model.json").write_text(json.dumps(model), "utf-8")
        with pytest.raises(ValueError, match="the walk (needs|looks for)"):
            build.build_walk(tmp_path / name)
    (tmp_path / "living/model.json").write_text(json.dumps(model), "utf-8")
    (tmp_path / "walk").mkdir()
    with pytest.raises(ValueError, match="holds something else"):
        build.build_walk(tmp_path / "living")


# --- Stops ---


def calls(living: Path, name: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    request = {"calls": [[name, state] for state in asked]}
    return run_script(WALK / "node.mjs", str(living), request=request)["calls"]


@pytest.fixture(scope="module")
def shown(living) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each state with the stop that the page shows for it."""
    return [*zip(STATES, calls(living, "stop", STATES), strict=True)]


def test_the_stops_show_every_tensor(shown, read):
    assert [stop["id"] for _, stop in shown[: len(STOPS)]] == STOPS
    names = {view["name"] for _, stop in shown for view in stop["views"]}
    assert names >= read[0]["trace"].keys()
    for _, stop in shown:
        for view in stop["views"]:
            assert len(view["rowLabels"]) == view["rows"] and len(view["colLabels"]) == view["cols"]


def test_each_stops_code_gives_its_numbers(shown, trained, monkeypatch):
    monkeypatch.setattr("scripts.core.models.load_model", lambda folder: trained)  # once is enough
    for state, stop in shown:
        names: dict[str, Any] = {}
        with torch.no_grad():  # the code switches gradients off for good
            exec(stop["code"], names)
            for view in stop["views"]:
                found = as_tensor(view["data"], [view["rows"], view["cols"]])
                wanted = eval(view["python"], names)
                wanted = wanted if wanted.dim() == 2 else wanted.unsqueeze(1)
                assert_near(found, wanted, ROUNDED, f"{state} {view['name']}")


def test_the_choice_is_the_next_token(shown, read):
    found = [(state["step"], stop["views"][-1]) for state, stop in shown if stop["id"] == "choice"]
    for one, (step, view) in zip(read, found, strict=True):
        assert view["name"] == "probabilities" and view["rowLabels"][0] == one["tgtPieces"][step]
        shares = as_tensor(view["data"], [12])
        assert (shares.diff() <= 0).all() and 0.1 < shares.sum() <= 1


def test_the_chapters_have_the_sections_that_stops_link_to(shown):
    for _, stop in shown[: len(STOPS)]:
        chapter = stop["chapter"]
        text = (ROOT / "scripts" / f"{chapter['file']}.py").read_text("utf-8")
        headings = re.findall(r"^# ##+ (.*)", text, re.MULTILINE)
        assert chapter["anchor"] in {make_id(heading) for heading in headings}, chapter
        assert f"# # Chapter {int(chapter['number'])} · {chapter['title']}" in text


# --- Cells ---


def cells(shown) -> list[dict[str, Any]]:
    """States with a cell: corners and random places of every view."""
    draw, found = random.Random(5), []
    for state, stop in shown:
        for view in stop["views"]:
            rows, cols = view["rows"], view["cols"]
            places = {(0, cols - 1), (rows - 1, 0)}
            places |= {(draw.randrange(rows), draw.randrange(cols))}
            found += [
                state | {"cell": {"tensor": view["name"], "row": r, "col": c}}
                for r, c in sorted(places)
            ]
    return found


@pytest.fixture(scope="module")
def inspected(living, shown):
    asked = cells(shown)
    return [*zip(asked, calls(living, "inspect", asked), strict=True)]


def test_a_stops_code_prints_the_chosen_number(living, inspected, trained, monkeypatch, capsys):
    monkeypatch.setattr("scripts.core.models.load_model", lambda folder: trained)
    asked = [
        *{
            (state["stop"], state["cell"]["tensor"]): (state, cell) for state, cell in inspected
        }.values()
    ]
    programs = calls(living, "code", [state for state, _ in asked])
    for (state, cell), program in zip(asked, programs, strict=True):
        with torch.no_grad():
            exec(program, {})
        printed = float(capsys.readouterr().out.split("\n")[-2])
        assert printed == pytest.approx(float(cell["value"]), rel=1e-3, abs=1e-4), state


def value_of(formula: str) -> float:
    """One side of a formula as the page writes it, such as "0.5 · (−2) + … (3 more: 0.1)"."""
    formula = re.sub(r"· 10000\^|^q · k = |^[μσ] = ", "", formula)
    formula = re.sub(r"… \([\d,]+ more: (.+?)\)", r"(\1)", formula)
    formula = re.sub(r" \[.*?\](?= \+|$)", "", formula)  # a piece's name
    formula = re.sub(
        r"·10(⁻?)([⁰¹²³⁴⁵⁶⁷⁸⁹]+)",
        lambda m: "e" + "-" * len(m[1]) + "".join(str("⁰¹²³⁴⁵⁶⁷⁸⁹".index(c)) for c in m[2]),
        formula,
    )
    for ours, theirs in (
        ("−", "-"),
        ("∞", "inf"),
        ("·", "*"),
        ("÷", "/"),
        ("e^", "exp"),
        ("^", "**"),
    ):
        formula = formula.replace(ours, theirs)
    formula = re.sub(r"√(\d+)", r"sqrt(\1)", formula)
    return eval(
        formula,
        {
            "exp": math.exp,
            "sqrt": math.sqrt,
            "sin": math.sin,
            "cos": math.cos,
            "max": max,
            "inf": math.inf,
        },
    )


def test_the_parts_of_each_number_add_up(inspected):
    for state, cell in inspected:
        parts, value = [float(x) for x in cell["parts"]], float(cell["value"])
        if math.isinf(value):
            assert parts == [value]
            continue
        total = sum(parts) / cell["over"]
        total = total if cell["atLeast"] is None else max(cell["atLeast"], total)
        size = sum(map(abs, parts)) / cell["over"]
        assert total == pytest.approx(value, rel=1e-6, abs=1e-6 * size + 1e-30), state


def test_each_formula_is_true_as_it_is_written(inspected):
    count = 0
    for state, cell in inspected:
        for line in cell["lines"]:
            assert line["say"]
            if " = " not in line["math"] or line["math"].startswith("μ"):
                continue
            left, right = line["math"].rsplit(" = ", 1)
            near = 0.02 + 0.02 * abs(
                value_of(right)
            )  # each number in it is rounded to three places
            assert value_of(left) == pytest.approx(value_of(right), abs=near), (state, line)
            count += 1
        if cell["lines"][-1]["math"] not in ("", "−∞"):
            last = value_of(cell["lines"][-1]["math"].rsplit("= ", 1)[1])
            assert last == pytest.approx(cell["value"], abs=1e-3 * max(1, abs(cell["value"]))), (
                state
            )
    assert count > 1000


def test_what_made_a_number_says_that_it_makes_it(living, inspected):
    asked, back = [], []
    for state, cell in inspected:
        for area in cell["madeFrom"]:
            place = {"tensor": area["tensor"], **area["cell"]}
            asked.append(
                state
                | {"cell": place, "layer": area.get("layer", state["layer"]), "stop": area["stop"]}
            )
            back.append((state, area))
    assert len(asked) > 1000
    for (state, area), cell in zip(back, calls(living, "inspect", asked), strict=True):
        assert area["tensor"].endswith(".W") or bool(re.search(r", layer \d$", area["title"])) == (
            "layer" in area
        )
        assert "layer" not in area or f".{area['layer']}." in area["tensor"]
        assert cell["value"] is not None, area
        (row, col), name = (state["cell"][part] for part in ("row", "col")), state["cell"]["tensor"]
        own = [one for one in cell["makes"] if one["tensor"] == name]
        assert own, (state, area, cell["makes"])
        (first, last), (left, right) = own[0]["rows"], own[0]["cols"]
        assert first <= row <= last and left <= col <= right, (state, own)


# --- The page, in a browser ---


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
        request = {
            "chromium": chromium(),
            "url": f"{home}walk/",
            "calls": [["stop", state] for state in STATES],
            "sentence": OWN,
        }
        request["pictures"] = os.environ.get("LIVING_PICTURES")
        return plain(run_script(WALK / "browser.mjs", request=request))


@pytest.mark.audit
def test_a_browser_computes_what_node_does(visit, shown):
    """Bit by bit, for five sentences at every stop: so what holds in Node holds for the page."""
    assert visit["calls"] == [stop for _, stop in shown]


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
    assert all(part in visit["tapped"] for part in ("trägt", "Mann", "q · k ="))


@pytest.mark.audit
def test_where_it_cannot_work_the_page_says_so(visit):
    assert "The model failed" in visit["trouble"]["no weights"]
    assert "didn't run" in visit["trouble"]["no script"]
