"""The study of chapter 21: what each row learns from, and the models that others need."""

import math
from dataclasses import asdict, replace
from functools import partial

import pytest

from scripts.ch21_learning_from_models import TO_BEAT
from scripts.studies import recipes
from scripts.studies.recipes import (
    ALL,
    GREEDY,
    MORE,
    PART,
    REVERSE,
    RISK,
    SAMPLED,
    TAUGHT,
    word_facts,
)
from scripts.studies.rows import SEEDS, SWEEP, part_indices
from scripts.studies.runner import these
from scripts.studies.tuning import Tuning

SETTING = asdict(
    replace(recipes.BASE, corpus="sample", d_model=16, d_ff=16, heads=2, layers=1, epochs=1)
)


@pytest.fixture
def few(forty_pairs, monkeypatch, tmp_path):
    """Forty pairs, of which ten are known, short trainings, and an empty folder of runs."""
    monkeypatch.setattr(recipes, "data_of", lambda corpus, vocab: forty_pairs)
    monkeypatch.setattr(recipes, "SHARE", 4)
    monkeypatch.setattr(recipes, "PASSES", (1, 2))
    short = partial(Tuning, steps=2, sentences=2, candidates=2)
    monkeypatch.setattr(recipes, "Tuning", short)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    recipes.teacher_texts.cache_clear()
    yield forty_pairs
    recipes.teacher_texts.cache_clear()


def place(row, seed=1):
    more = {"reverse_lr": 2e-3} if row in (GREEDY, SAMPLED) else {}
    more |= {"before_lr": 2e-3} if row in (MORE, RISK) else {}
    return {"row": row, "lr": 1e-3, "seed": seed} | more


def test_word_facts_are_right_where_they_are_known():
    entropy = round(2 * math.log(2) / 6, 4)
    assert word_facts(["a b", "a c"]) == {"words": 4, "types": 3, "entropy": entropy}
    assert word_facts(["A man, a plan."])["types"] == 3  # without punctuation


def test_what_each_row_learns_from(few):
    known = part_indices(40, 4)
    read = {row: recipes.read_by(SETTING, place(row))[0] for row in (ALL, PART, REVERSE, GREEDY)}
    assert read[ALL] is few
    people = [few.corpus["train"][i] for i in known]
    assert read[PART].corpus["train"] == people
    assert read[REVERSE].corpus["train"] == [(english, german) for german, english in people]
    back = read[GREEDY].corpus["train"]
    assert [pair for i, pair in enumerate(back) if i in known] == people
    assert [e for _, e in back] == [e for _, e in few.corpus["train"]]  # people wrote this side
    taught, said = recipes.read_by(SETTING, place(TAUGHT))
    assert [g for g, _ in taught.corpus["train"]] == [g for g, _ in few.corpus["train"]]
    assert said["teacher"]["model"] == "sample-de-en" and said["train_bleu"] > 50


def test_a_model_that_others_need_is_trained_once(few, monkeypatch):
    first = recipes.kept_model(SETTING, REVERSE, 2e-3, 1)
    with monkeypatch.context() as patch:
        patch.setattr(recipes, "train_row", None)  # training would fail now
        again = recipes.kept_model(SETTING, REVERSE, 2e-3, 1)
        texts = recipes.reverse_texts(SETTING, place(GREEDY, SWEEP))
        assert len(texts) == 30 and texts == recipes.reverse_texts(SETTING, place(GREEDY))
        assert texts != recipes.reverse_texts(SETTING, place(SAMPLED))
        with pytest.raises(TypeError):
            recipes.kept_model(SETTING, REVERSE, 2e-3, 2)  # another seed
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("row", [ALL, TAUGHT, PART, REVERSE, SAMPLED, MORE, RISK])
def test_each_row_is_scored_where_it_counts(few, row):
    found = recipes.work(SETTING, place(row))
    assert {"loss", "bleu", "chrf", "risk", "words"} <= {*found}
    assert ("loss_teacher" in found) == (row in (ALL, TAUGHT))
    assert ("back_bleu" in found) == (row == SAMPLED)
    swept = recipes.work(SETTING, place(row, SWEEP))
    assert ("risk" in swept) == (row in (MORE, RISK))  # the score that chooses its rate


def test_what_others_need_comes_first_and_each_row_has_its_sweep():
    runs = []
    while missing := [one for one in recipes.wanted_runs(runs) if not these(runs, **one)]:
        first = missing[0]
        loss = 1 + abs(first["lr"] - 2 * recipes.BASE.lr) + abs(first.get("epochs", 16) - 16)
        runs.append(first | {"loss": loss, "risk": 1 + abs(first["lr"] - recipes.TUNING_LR / 2)})
    for row in (ALL, PART, REVERSE, TAUGHT, GREEDY, SAMPLED, MORE, RISK):
        counted = [run for run in these(runs, row=row) if run["seed"] != SWEEP]
        best = recipes.TUNING_LR / 2 if row in (MORE, RISK) else 2 * recipes.BASE.lr
        assert [(run["seed"], run["lr"]) for run in counted] == [(seed, best) for seed in SEEDS]
        assert len(these(runs, row=row, seed=SWEEP)) >= 3
    assert {run["epochs"] for run in these(runs, row=PART, seed=SWEEP)} == {8, 16, 32}
    assert {run["epochs"] for run in these(runs, row=PART) if run["seed"]} == {16}  # the best
    assert {run["reverse_lr"] for run in these(runs, row=GREEDY)} == {2 * recipes.BASE.lr}
    assert {run["before_lr"] for run in these(runs, row=RISK)} == {2 * recipes.BASE.lr}
    assert {*TO_BEAT, *TO_BEAT.values()} < {run["row"] for run in runs}
