"""Chapter 18's study: what classifiers are given, how they learn, and what they begin from."""

import random
from dataclasses import asdict, replace

import pytest
import torch
from test_studies_runner import simulated

from scripts.ch06_training import BOS, EOS
from scripts.ch18_one_stack import NumberClassifier, share_right
from scripts.corpora.gaps import gap_item
from scripts.corpora.load import load_corpus
from scripts.studies import classify
from scripts.studies.rows import SWEEP
from scripts.studies.runner import these
from scripts.studies.stacks import one_stack

SMALL = replace(
    classify.BASE, corpus="sample", vocab=300, layers=1, d_model=16, d_ff=16, heads=2, epochs=1
)


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Some pairs of the sample corpus, short trainings, and an empty folder of runs."""
    corpus = {name: pairs[:400] for name, pairs in load_corpus("sample").items()}
    monkeypatch.setattr(classify, "load_corpus", lambda name: corpus)
    monkeypatch.setattr(classify, "MASKED", SMALL)
    monkeypatch.setattr(classify, "ROUND", 64)
    monkeypatch.setattr(classify, "ROUNDS", 3)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    classify.gaps_of.cache_clear()
    yield classify.gaps_of("sample", 300)
    classify.gaps_of.cache_clear()


def test_a_caption_is_read_with_one_gap(few):
    items = [gap_item("Zwei Hunde laufen durch den Park."), gap_item("Ein Mann sitzt da.")]
    batch = classify.labelled(items, few.tokenizer)
    assert batch.plural.tolist() == [1, 0] and batch.ntokens == 2
    assert ((batch.ids == len(few.tokenizer)).sum(1) == 1).all()
    assert (batch.ids[:, 0] == BOS).all() and ((batch.ids == EOS).sum(1) == 1).all()


def test_the_loss_is_minus_log_p_of_the_right_number(few, float64):
    torch.manual_seed(0)
    model = NumberClassifier(one_stack(SMALL, len(few.tokenizer) + 1), len(few.tokenizer)).eval()
    torch.nn.init.normal_(model.head.weight)
    batch = classify.labelled(few.items["val"][:6], few.tokenizer)
    p = model(batch.ids).sigmoid()
    right = torch.where(batch.plural.bool(), p, 1 - p)
    torch.testing.assert_close(
        classify.number_loss(model, batch, None)[0], -right.log().sum(), check_dtype=False
    )


def test_a_round_has_every_caption_equally_often():
    for count in (10, 500):
        order = [i for part in classify.drawn(count, random.Random(0)) for i in part]
        times = max(1, classify.ROUND // count)
        assert sorted(order) == sorted([*range(count)] * times)


def test_the_masked_model_is_trained_once_and_is_where_the_pretrained_begin(few, monkeypatch):
    first = classify.masked_model(SMALL, few)
    with monkeypatch.context() as patch:
        patch.setattr(classify, "fit_best", None)  # training would fail now
        again = classify.masked_model(SMALL, few)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    begun = []
    monkeypatch.setattr(
        classify, "fit_best", lambda model, *rest: begun.append(model) or ([1.0], [1.0])
    )
    for row in (classify.PRETRAINED, classify.SCRATCH):
        wanted = {"row": row, "labels": 50, "lr": 1e-3, "seed": 1}
        classify.work(asdict(SMALL), wanted)
    assert [
        all(map(torch.equal, first.parameters(), model.encoder.parameters())) for model in begun
    ] == [True, False]


@pytest.mark.parametrize("row", [classify.BAG, classify.SCRATCH, classify.PRETRAINED])
def test_each_kind_learns_from_the_same_captions(few, row, monkeypatch):
    drawn, met = random.Random(3).sample(few.items["train"], 60), []
    for name in ("bag_run", "encoder_run"):
        kind = getattr(classify, name)
        monkeypatch.setattr(
            classify, name, lambda *given, kind=kind: met.extend(given) or kind(*given)
        )
    found = classify.work(asdict(SMALL), {"row": row, "labels": 60, "lr": 5e-3, "seed": 3})
    assert drawn in met and len({*drawn}) > 40
    assert all(0.3 < found[name] <= 1 for name in ("val", "test"))


def test_an_encoder_learns_a_few_captions_by_heart(few, monkeypatch):
    some = few.items["train"][:16]
    monkeypatch.setattr(classify, "ROUND", 640)
    seen = {}
    monkeypatch.setattr(classify, "shares", lambda logits, items: seen.update(right=logits(some)))
    monkeypatch.setattr(classify, "found_by", lambda train, score: score(train()[0]))
    always_best = replace(few, items=few.items | {"val": some})
    config = replace(SMALL, d_model=32, lr=1e-2, dropout=0.0)
    classify.encoder_run(config, always_best, some, pretrained=False)
    assert {item.plural for item in some} == {True, False}
    assert share_right(seen["right"], some) > 0.9


def test_a_bag_says_what_it_was_judged_on(few):
    found = classify.bag_run(few, few.items["train"][:60])
    test = few.items["test"]
    hard = [item for item in test if {"mit", "von", "auf"} & {*item.before}]
    assert found["captions"]["test"] == len(test) > found["captions"]["misled"] >= len(hard)
    assert found["labelled"] == 60 and found["singular"] == sum(not i.plural for i in test)
    assert found["penalty"] in classify.PENALTIES


def test_each_encoder_has_its_sweep_for_each_number_of_labels():
    runs = simulated(classify.wanted_runs, lambda one: abs(one.get("lr", 0) - classify.BASE.lr))
    for row in (classify.SCRATCH, classify.PRETRAINED):
        for labels in classify.LABELS:
            place = these(runs, row=row, labels=labels)
            assert len({run["lr"] for run in place if run["seed"] == SWEEP}) == 3
            counted = [run for run in place if run["seed"] != SWEEP]
            assert [run["seed"] for run in counted] == [*classify.DRAWS]
    assert len(these(runs, row=classify.BAG)) == len(classify.LABELS) * len(classify.DRAWS)
