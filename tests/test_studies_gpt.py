"""Chapter 17's study: tables, PPM, and models of characters, each with what it has to beat."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from test_studies_runner import simulated

from scripts.ch06_training import LabelSmoothing
from scripts.ch07_multi30k import Example, make_batch
from scripts.ch17_small_gpt import KneserNey, asked_next, gram_counts, stack_loss
from scripts.corpora.load import load_corpus
from scripts.studies import gpt
from scripts.studies.rows import SEEDS, SWEEP
from scripts.studies.runner import these


@pytest.fixture
def few(monkeypatch):
    """Some pairs of the sample corpus, in every split."""
    corpus = {name: pairs[:40] for name, pairs in load_corpus("sample").items()}
    monkeypatch.setattr(gpt, "load_corpus", lambda name: corpus)
    gpt.letters_of.cache_clear()
    yield corpus
    gpt.letters_of.cache_clear()


def test_tables_are_counted_on_training_and_asked_elsewhere(few):
    found = gpt.work(asdict(gpt.BASE) | {"corpus": "sample"}, {"row": gpt.COUNTS})["orders"]
    assert [row["order"] for row in found] == [*gpt.ORDERS]
    data, rows = gpt.letters_of("sample")
    three = KneserNey(gram_counts(rows["train"], 3), len(data.tokenizer))
    nats = sum(three.nats(row) for row in rows["val"])
    bits = nats / math.log(2) / sum(len(row) - 1 for row in rows["val"])
    assert found[2]["val"] == pytest.approx(bits, abs=1e-4)
    assert found[2]["entries"] == sum(map(len, three.tables))


def test_ppm_packs_what_it_has_seen_before(few):
    setting = asdict(gpt.BASE) | {"corpus": "sample"}
    before = gpt.work(setting, {"row": gpt.PPM})["orders"]
    few["val"][:] = few["train"]
    seen = gpt.work(setting, {"row": gpt.PPM})["orders"]
    for new, known in zip(before, seen, strict=True):
        assert 0 < known["val"] < 0.6 * new["val"] and known["test"] == new["test"]


def test_the_loss_is_chapter_17s(float64):
    rows = [[2, 5, 6, 7, 3], [2, 8, 3]]
    row = gpt.LanguageRow("gpt")
    torch.manual_seed(0)
    config = replace(gpt.BASE, d_model=16, d_ff=32, dropout=0.0, precision="float32")
    model = row.build(config, 12).double()
    batch = make_batch([Example([], ids) for ids in rows])
    found = row.loss_of(config)(model, batch, LabelSmoothing(0.0))
    torch.testing.assert_close(found, stack_loss(model, asked_next(rows), LabelSmoothing(0.0)))


def test_a_model_learns_and_is_scored_where_it_counts(few):
    small = replace(gpt.BASE, corpus="sample", layers=1, d_model=16, d_ff=16, warmup=2)
    setting = asdict(replace(small, epochs=2, precision="float32"))
    wanted = {"row": gpt.MODEL, "epochs": 2, "dropout": 0.0, "lr": 0.01}
    swept = gpt.work(setting, wanted | {"seed": SWEEP})
    counts = gpt.work(setting, wanted | {"seed": 1})
    assert swept["losses"][0] > swept["losses"][1] and "samples" not in swept
    assert counts["val"] == pytest.approx(counts["loss"] / math.log(2), abs=1e-3)
    assert set(counts["samples"]) == {"0.5", "0.8", "1", "1.5"} and 0 < counts["test"] < 12


def test_each_dropouts_rate_is_swept_first_and_the_best_of_all_goes_on():
    rates = {0.0: 0.008, 0.1: 0.016, 0.2: 0.032}

    def loss(one):
        far = abs(one["lr"] - rates[one["dropout"]]) if "lr" in one else 0
        return 1 + far + abs(one.get("dropout", 0) - 0.1)

    runs = simulated(gpt.wanted_runs, loss)
    models = these(runs, row=gpt.MODEL)
    assert {run["epochs"] for run in models[:9]} == {gpt.SHORT}
    counted = these(models, epochs=gpt.BASE.epochs)
    assert [(run["dropout"], run["lr"], run["seed"]) for run in counted] == [
        (0.1, 0.016, seed) for seed in SEEDS
    ]
