"""Chapter 0: the bottleneck, the picture, the trace of a sentence, the report on the machine."""

import ast
import math
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import CHAPTERS, ROOT

from scripts.ch00_start_here import (
    architecture_chart,
    architecture_parts,
    gpu_rows,
    machine_report,
    next_token_probabilities,
    random_rotation,
    read_into_one_vector,
    recall_by_attention,
    recall_from_one_vector,
)
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, greedy_decode


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


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


def test_the_reader_is_the_sum_of_turned_words():
    rotation = random_rotation(6, torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(6))
    words = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2))
    power = [torch.linalg.matrix_power(rotation, 3 - t) for t in range(4)]
    expected = sum(words[:, t] @ power[t].T for t in range(4))
    torch.testing.assert_close(read_into_one_vector(words, rotation), expected)


def test_one_vector_recalls_what_fits_and_no_more():
    rotation = random_rotation(16, torch.Generator().manual_seed(0))
    table = torch.eye(16)  # orthogonal words: one alone is always found
    alone = torch.arange(16).unsqueeze(1)
    assert recall_from_one_vector(table, alone, rotation) == 1
    crowd = torch.randint(16, (50, 64), generator=torch.Generator().manual_seed(3))
    assert recall_from_one_vector(table, crowd, rotation) < 0.5
    assert recall_by_attention(table, crowd) == 1


def test_a_forgetful_reader_loses_the_first_words():
    """The rotation matters: with a shrinking matrix, undone in the same way, more is lost."""
    generator = torch.Generator().manual_seed(4)
    rotation, table = random_rotation(64, generator), torch.randn(200, 64, generator=generator)
    ids = torch.randint(200, (50, 12), generator=generator)
    assert recall_from_one_vector(table, ids, rotation) > recall_from_one_vector(
        table, ids, 0.5 * rotation
    )


def test_all_steps_at_once_give_the_choices_of_one_after_the_other():
    torch.manual_seed(5)
    model = make_model(30, 30, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).eval()
    src = torch.randint(4, 30, (1, 7))
    written = greedy_decode(model, src, None, max_len=9)
    trained = SimpleNamespace(model=model)
    probabilities = next_token_probabilities(trained, src, written)
    assert probabilities.shape == (1, written.size(1), 30)
    assert torch.equal(probabilities.argmax(-1), written)
    for t in range(written.size(1)):  # each row, computed alone from its own prefix
        prefix = torch.cat((torch.tensor([[BOS]]), written[:, :t]), dim=1)
        logits = model.generator(model(src, prefix, None, None if t == 0 else causal(t + 1)))
        torch.testing.assert_close(probabilities[0, t], logits[0, -1].softmax(-1))


def causal(size: int) -> torch.Tensor:
    return torch.ones(1, size, size, dtype=torch.bool).tril()


def test_the_picture_has_no_overlaps_and_its_words_fit():
    boxes, arrows, labels = architecture_parts()
    solid = [box for box in boxes if box["kind"] != "layer"]
    for i, a in enumerate(solid):
        assert a["x"] >= 0 and a["x2"] <= 760 and a["y"] >= 0 and a["y2"] <= 764, a["name"]
        for b in solid[i + 1 :]:
            apart_x = a["x2"] <= b["x"] or b["x2"] <= a["x"]
            assert apart_x or a["y2"] <= b["y"] or b["y2"] <= a["y"], (a["name"], b["name"])
        assert 8 * len(a["name"]) <= a["x2"] - a["x"], a["name"]
        assert 6 * len(a["note"]) <= a["x2"] - a["x"], a["note"]
    for text in labels:
        if text["style"] == "shape":
            inside = [
                box["name"]
                for box in solid
                if box["x"] < text["x"] + 7 * len(text["text"])
                and text["x"] < box["x2"]
                and box["y"] < text["y"] + 6
                and text["y"] - 6 < box["y2"]
            ]
            assert not inside, (text["text"], inside)
    tips = [leg for leg in arrows if leg["tip"]]
    assert len(tips) == len({leg["arrow"] for leg in arrows})
    for tip in tips:  # every arrow leads to a box
        near = [b for b in boxes if b["x"] - 4 <= tip["x"] <= b["x2"] + 4]
        assert any(b["y"] - 4 <= tip["y"] <= b["y2"] + 4 for b in near), tip


def test_the_picture_shows_every_part_the_model_has():
    names = [box["name"] for box in architecture_parts()[0]]
    model = make_model(10, 10, N=1, d_model=8, d_ff=16, h=2)
    norms = sum(
        len(layer.sublayer) for stack in (model.encoder, model.decoder) for layer in stack.layers
    )
    assert names.count("add & norm") == norms == 5
    assert names.count("Feed-forward") == 2
    assert sum("attention" in name for name in names) == 3
    assert names.count("no padding") == 2 and names.count("no future") == 1
    assert architecture_chart().to_dict()["layer"]


def test_links_lead_to_chapters_that_exist_and_name_all_of_them():
    text = (ROOT / "scripts" / "ch00_start_here.py").read_text("utf-8")
    for path in CHAPTERS:
        if path.stem != "ch00_start_here":
            assert f"({path.stem}.ipynb)" in text, path.stem
    import re

    for link in set(re.findall(r"\((ch\d\d_\w+)\.ipynb\)", text)):
        assert (ROOT / "scripts" / f"{link}.py").exists(), link


def fake_gputil(monkeypatch, answer):
    module = ModuleType("GPUtil")
    module.getGPUs = answer
    monkeypatch.setitem(sys.modules, "GPUtil", module)


def gpu(number: int, name: str, load: float):
    return SimpleNamespace(id=number, name=name, load=load, memoryUsed=1024.0, memoryTotal=24576.0)


def test_report_names_every_gpu_with_memory_and_load(monkeypatch):
    fake_gputil(monkeypatch, lambda: [gpu(0, "Fake 4090", 0.37), gpu(1, "Fake MIG", math.nan)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_rows() == [
        ("GPU 0", "Fake 4090, 1,024 of 24,576 MiB in use, load 37%"),
        ("GPU 1", "Fake MIG, 1,024 of 24,576 MiB in use, load not reported"),
    ]


def test_report_says_plainly_that_there_is_no_gpu(monkeypatch):
    fake_gputil(monkeypatch, lambda: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ((part, found),) = gpu_rows()
    assert part == "GPU" and "none found" in found
    report = machine_report()
    assert list(report["part"]) == ["Python", "PyTorch", "CPU threads", "GPU"]
    assert report.loc[1, "found"] == torch.__version__


def test_report_warns_where_torch_cannot_use_the_gpu(monkeypatch):
    fake_gputil(monkeypatch, lambda: [gpu(0, "Fake 4090", 0.0)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "runs on the CPU" in gpu_rows()[-1][1]


def test_report_survives_a_broken_driver(monkeypatch):
    def broken():
        raise ValueError("invalid literal for int(): 'NVIDIA-SMI has failed'")

    fake_gputil(monkeypatch, broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = gpu_rows()
    assert rows[0] == ("GPUtil", "gave no answer (ValueError)") and "none found" in rows[1][1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Fake H200")
    assert gpu_rows()[1:] == [("GPU 0", "Fake H200")]


def test_report_survives_without_gputil(monkeypatch):
    monkeypatch.setitem(sys.modules, "GPUtil", None)  # makes the import fail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_rows()[0][0] == "GPUtil" and "none found" in gpu_rows()[1][1]
