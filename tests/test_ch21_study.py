"""The study of chapter 21: fine-tuning, and a command that goes on where it stopped."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from scripts import ROOT
from scripts.book.figures.learning import recipe_chart
from scripts.book.records import sha256
from scripts.ch06_training import BOS
from scripts.ch07_multi30k import encode_pairs
from scripts.ch20_scaling import ONE_PASS, part_of
from scripts.corpora.load import load_corpus
from scripts.engine.data import TrainingData
from scripts.engine.models import Trained, load_model
from scripts.engine.settings import build_model
from scripts.studies import learning
from scripts.studies.learning import (
    GREEDY_BACK,
    MINIMUM_RISK,
    ONE_PART,
    RECIPE_ROWS,
    REVERSE,
    SAMPLED_BACK,
    RecipeOptions,
    RecipeStudy,
    cross_entropy,
    fine_tuned,
    main,
    minimum_risk,
    run_recipes,
    words_each,
)


@pytest.fixture(scope="module")
def few():
    """Forty pairs of the sample corpus, eight to validate, in the shipped model's pieces."""
    tokenizer = load_model(ROOT / "models" / "sample-de-en").tokenizer
    pairs = load_corpus("sample")["train"][:40]
    corpus = {"train": pairs, "val": pairs[:8]}
    encoded = [encode_pairs(corpus[split], tokenizer) for split in ("train", "val")]
    return TrainingData(corpus, tokenizer, *encoded)


def test_words_are_counted_without_punctuation():
    assert words_each(["A man, a plan.", "a"]) == 2.5


def novice_of(few):
    torch.manual_seed(0)
    config = replace(ONE_PASS, d_model=16, d_ff=16, heads=2, corpus="sample")
    model = build_model(config, len(few.tokenizer)).eval()
    return Trained(model, few.tokenizer, config)


def test_fine_tuning_works_on_a_copy_and_meets_the_same_sentences(few):
    novice = novice_of(few)
    options = RecipeOptions(risk_steps=3, risk_sentences=4, risk_lr=1e-2)
    before = copy.deepcopy(novice.model.state_dict())
    met: dict[str, list] = {"one": [], "two": [], "other": []}

    def loss(name):
        def of(model, examples):
            met[name].append(list(examples))
            assert not model.training
            return cross_entropy(novice.config)(model, examples)

        return of

    for name, seed in (("one", 1), ("two", 1), ("other", 2)):
        model = fine_tuned(novice, few.train, loss(name), options, seed)
        assert any(
            not torch.equal(p, q)
            for p, q in zip(model.parameters(), novice.model.parameters(), strict=True)
        )
    assert met["one"] == met["two"] != met["other"]
    assert [len(examples) for examples in met["one"]] == [4, 4, 4]
    assert all(torch.equal(t, before[n]) for n, t in novice.model.state_dict().items())


def test_minimum_risk_lowers_the_risk_of_its_own_draws(few):
    novice = novice_of(few)
    options = RecipeOptions(
        candidates=6, sharpness=0.3, risk_steps=12, risk_sentences=4, risk_lr=2e-3
    )
    loss = minimum_risk(few.tokenizer, options, 1)
    model = fine_tuned(novice, few.train[:4], loss, options, 1)

    def judged(model):
        with torch.no_grad():
            return sum(
                minimum_risk(few.tokenizer, options, seed)(model, few.train[:4]).item()
                for seed in range(5)
            )

    assert judged(model) < judged(novice.model)


# The command


@pytest.fixture
def tiny_recipes(few, tmp_path, monkeypatch):
    """A world with forty pairs and models of width 16, which writes below a temporary folder."""
    small = replace(ONE_PASS, d_model=16, d_ff=16, heads=2, layers=1, warmup=2)
    monkeypatch.setattr(learning, "ONE_PASS", small)
    monkeypatch.setattr(learning, "prepare", lambda config: few)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    kept = {}
    monkeypatch.setattr(
        learning,
        "save_record",
        lambda name, record: kept.update({name: json.loads(json.dumps(record))}),
    )
    return kept


OPTIONS = RecipeOptions(
    corpus="sample", seeds=1, epochs=1, risk_steps=2, risk_sentences=2, candidates=2, save=True
)


def test_the_recipes_resume_where_they_stopped_and_nothing_is_done_twice(tiny_recipes, monkeypatch):
    done, stop_at = [], [4]

    def counted(name):
        real = getattr(learning, name)

        def call(*given):
            if len(done) == stop_at[0]:
                raise KeyboardInterrupt
            done.append(name)
            return real(*given)

        monkeypatch.setattr(learning, name, call)

    counted("train_row")
    counted("fine_tuned")
    with pytest.raises(KeyboardInterrupt):
        run_recipes(OPTIONS)
    partial = tiny_recipes["earlier-recipes-sample"]
    assert [len(row["runs"]) for row in partial["rows"].values()] == [1, 1, 1, 0, 0, 0, 0]
    stop_at[0] = -1
    record = run_recipes(OPTIONS)
    # base, part, reverse, back, sampled back, taught; and the two rows of fine-tuning
    assert done == ["train_row"] * 6 + ["fine_tuned"] * 2
    assert tiny_recipes["earlier-recipes-sample"] == json.loads(json.dumps(record))
    rows = record["rows"]
    assert list(rows) == list(RECIPE_ROWS) and all(len(row["runs"]) == 1 for row in rows.values())
    for name, row in partial["rows"].items():
        assert not row["runs"] or row == rows[name]
    for name in ("train_row", "fine_tuned", "load_model", "translate"):
        monkeypatch.setattr(learning, name, lambda *given: pytest.fail("nothing is missing"))
    assert run_recipes(OPTIONS)["rows"] == rows


def test_another_setting_is_another_run_but_only_of_the_rows_that_it_decides(
    tiny_recipes, monkeypatch
):
    first = run_recipes(OPTIONS)
    trained = []
    real = learning.fine_tuned
    monkeypatch.setattr(learning, "train_row", lambda *given: pytest.fail("these rows stay"))
    monkeypatch.setattr(learning, "fine_tuned", lambda *given: trained.append(1) or real(*given))
    second = run_recipes(replace(OPTIONS, sharpness=0.5))
    assert len(trained) == 1  # minimum risk alone
    for name in RECIPE_ROWS:
        if name != MINIMUM_RISK:
            assert second["rows"][name] == first["rows"][name]


def test_the_record_says_what_was_run(tiny_recipes):
    record = run_recipes(OPTIONS)
    *start, said = record["repeat"].partition("python -m scripts.studies.learning ")
    assert start[0] == "" and main.parse(said.split()) == OPTIONS
    assert record["teacher"]["weights_sha256"] == sha256(
        ROOT / "models/sample-de-en/model.safetensors"
    )
    assert record["train_pairs"] == 40 and record["options"]["share"] == 4
    assert record["teacher"]["train_bleu"] > 50  # it has learned these pairs
    for row in record["rows"].values():
        (run,) = row["runs"]
        assert {"bleu", "chrf", "loss", "loss_teacher", "steps", "seconds"} <= set(run)
        assert not {"translations", "key", "p"} & set(run)  # seeds judge: `verdicts`
    for name in (GREEDY_BACK, SAMPLED_BACK):
        (back,) = record["reverse"][name]
        assert back["facts"]["words"] >= 0 and "texts" not in back
    assert len(record["reverse"]["runs"]) == 1
    recipe_chart(record).to_dict()


def test_a_part_is_passed_over_as_many_times_more(tiny_recipes):
    study = RecipeStudy(OPTIONS)
    passes = {name: study.config(name, 1).epochs for name in (*RECIPE_ROWS, REVERSE)}
    assert {name for name, count in passes.items() if count == 4} == {ONE_PART, REVERSE}
    assert set(passes.values()) == {1, 4}
    assert len(study.data_of(ONE_PART, 1).train) == 10
    assert study.data_of(REVERSE, 1).train[0].tgt == [
        BOS,
        *part_of(study.data, 4).train[0].src,
    ]
    keys = [json.dumps(study.key(name, seed)) for name in RECIPE_ROWS for seed in (1, 2)]
    assert len(set(keys)) == len(keys)
    paths = {study.path(name, seed) for name in (*RECIPE_ROWS, REVERSE) for seed in (1, 2)}
    assert len(paths) == 2 * (len(RECIPE_ROWS) + 1)


def test_mistakes_end_with_two(capsys):
    assert main(["--seeds", "many"]) == 2 and main(["recipe"]) == 2
    assert "recipe" in capsys.readouterr().err
    assert main.parse(["--teacher_beam", "4"]) == RecipeOptions(teacher_beam=4)
    assert main.parse(["--share", "8"]) == RecipeOptions(share=8)
