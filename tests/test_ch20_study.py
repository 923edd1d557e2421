"""Chapter 20's study trains in order, stops where it should, and resumes; how rows are trained."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from scripts.ch19_ablations import StudyRow
from scripts.ch20_scaling import FRACTIONS, ONE_PASS, PART_WIDTH, WIDTHS, part_of, sized
from scripts.corpora.load import load_corpus
from scripts.engine.data import prepare
from scripts.engine.models import load_model
from scripts.studies import ablations as study
from scripts.studies import rows
from scripts.studies.ablations import StudyOptions, main, run_study, study_runs
from scripts.studies.rows import PATIENCE, train_row, translations


@pytest.fixture(scope="module")
def tiny_data():
    """300 pairs of the sample corpus, 20 to validate."""
    data = prepare(replace(ONE_PASS, corpus="sample", vocab=500))
    corpus = {"train": data.corpus["train"][:300], "val": data.corpus["val"][:20]}
    return replace(data, corpus=corpus, train=data.train[:300], val=data.val[:20])


@pytest.fixture
def tiny_study(tiny_data, tmp_path, monkeypatch):
    """A study of three sizes and two parts, which writes below a temporary folder."""
    monkeypatch.setattr(study, "WIDTHS", (16, 32, 48))
    monkeypatch.setattr(study, "FRACTIONS", (1, 8))
    monkeypatch.setattr(study, "PART_WIDTH", 16)
    small = replace(ONE_PASS, d_model=32, d_ff=32, warmup=3)
    monkeypatch.setattr(study, "ONE_PASS", small)
    monkeypatch.setattr(study, "prepare", lambda config: tiny_data)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    kept = {}
    monkeypatch.setattr(study, "save_record", lambda name, record: kept.update({name: record}))
    return kept


def test_the_study_resumes_where_it_stopped(tiny_study, monkeypatch):
    options = StudyOptions(corpus="sample", seeds=1, save=True)
    trained = []

    def tired(run, data):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append((run.name, run.config.seed))
        return study_run(run, data)

    study_run = study.study_run
    monkeypatch.setattr(study, "study_run", tired)
    with pytest.raises(KeyboardInterrupt):
        run_study(options)
    partial = json.loads(json.dumps(tiny_study["scaling-sample"]))
    assert [point["d_model"] for point in partial["sizes"]] == [16, 32]

    later = []
    monkeypatch.setattr(
        study,
        "study_run",
        lambda run, data: later.append((run.name, run.config.seed)) or study_run(run, data),
    )
    scaling = run_study(options)
    wanted = [(run.name, run.config.seed) for run in study_runs(options)]
    assert trained + later == wanted and len(wanted) == len(set(wanted)) == 5
    assert tiny_study == {"scaling-sample": scaling}
    assert scaling["sizes"][:2] == partial["sizes"]
    assert {point["d_model"] for point in scaling["sizes"]} == {16, 32, 48}
    assert [point["share"] for point in scaling["parts"]] == [8, 1]
    assert scaling["parts"][0]["train_tokens"] * 6 < scaling["parts"][1]["train_tokens"]
    assert [point["share"] for point in scaling["once"]] == [8, 1]
    assert [len(point["losses"]) for point in scaling["once"]] == [1, 1]
    assert len(scaling["parts"][0]["losses"]) > 1 == len(scaling["parts"][1]["losses"])
    assert scaling["once"][1] == scaling["parts"][1] == scaling["sizes"][0]  # all pairs, once

    monkeypatch.setattr(study, "study_run", lambda run, data: pytest.fail("nothing is missing"))
    assert run_study(options)["sizes"] == scaling["sizes"]
    collected = run_study(replace(options, epochs=2, train=False))  # another study: nothing there
    assert collected["sizes"] == []


def test_a_run_that_diverges_is_on_record_without_a_loss(tiny_study, monkeypatch):
    def burst(*given):
        raise FloatingPointError("loss nan, gradient's norm inf")

    monkeypatch.setattr(study, "train_row", burst)
    record = run_study(StudyOptions(corpus="sample", seeds=1))
    assert all(run["loss"] is None and "nan" in run["diverged"] for run in record["sizes"])


def test_every_row_is_decoded_by_the_same_search():
    """What the engine's cache can't walk gets a beam of 4, too: the same model, the same texts."""
    trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
    sources = [german for german, _ in load_corpus("sample")["val"][:30]]
    texts = [translations(StudyRow("base", way=way), trained, sources) for way in ("fast", "apart")]
    assert texts[0] == texts[1] and len(set(texts[0])) > 20


def test_training_stops_when_patience_is_at_its_end_and_keeps_the_best(tiny_data, monkeypatch):
    wanted = [3.0, 2.5, 2.0, 2.2, 2.1, 2.4, 1.0]
    seen = []

    def scripted(model, row, config, data):
        seen.append([p.detach().clone() for p in model.parameters()])
        return wanted[len(seen) - 1]

    monkeypatch.setattr(rows, "validation_loss", scripted)
    config = replace(ONE_PASS, d_model=16, d_ff=16, heads=2, epochs=7, warmup=2)
    model, losses, trained = train_row(StudyRow("base"), config, part_of(tiny_data, 10))
    assert losses == wanted[: 3 + PATIENCE]  # the 1.0 is never seen
    assert len(trained) == len(losses) and trained[-1] < trained[0]
    assert all(map(torch.equal, model.parameters(), seen[2]))
    assert not all(map(torch.equal, model.parameters(), seen[-1]))


def test_the_rate_runs_down_over_the_steps_that_are_made(tiny_data, monkeypatch):
    """Several batches in a step are one step."""
    real, totals, steps = rows.learning_rate, [], []

    def counted(config, total):
        totals.append(total)
        return lambda step: steps.append(step) or real(config, total)(step)

    monkeypatch.setattr(rows, "learning_rate", counted)
    config = replace(ONE_PASS, d_model=16, d_ff=16, heads=2, max_tokens=256, accumulate=2)
    train_row(StudyRow("base"), config, part_of(tiny_data, 5))
    assert totals == [max(steps) - 1] and totals[0] > 1  # one more is asked for, and not made


def test_runs_are_told_apart():
    runs = study_runs(StudyOptions(seeds=2))
    assert len({json.dumps(run.key, sort_keys=True) for run in runs}) == len(runs)
    assert len({run.slug for run in runs}) == len(runs)
    assert len(runs) == 2 * (len(WIDTHS) + 2 * (len(FRACTIONS) - 1)) and PART_WIDTH in WIDTHS


def test_the_base_is_the_size_of_its_width():
    assert replace(ONE_PASS, **sized(ONE_PASS.d_model)) == ONE_PASS
    assert sized(16)["lr"] == 2 * ONE_PASS.lr and sized(256)["lr"] == ONE_PASS.lr / 2


def test_parts_lie_inside_each_other(tiny_data):
    parts = {share: part_of(tiny_data, share) for share in (1, 3, 9)}
    texts = {share: set(part.corpus["train"]) for share, part in parts.items()}
    assert [len(part.train) for part in parts.values()] == [300, 100, 33]
    assert texts[9] < texts[3] < texts[1]
    assert all(part.val is tiny_data.val for part in parts.values())
    pieces = tiny_data.tokenizer.encode(parts[9].corpus["train"][5][1])
    assert parts[9].train[5].tgt[1:-1] == pieces  # the pair and its encoding stay together


def test_mistakes_end_with_two(capsys):
    assert main(["--seeds", "many"]) == 2 and main(["studie"]) == 2
    assert "studie" in capsys.readouterr().err
    assert main.parse(["--epochs", "4"]) == StudyOptions(epochs=4)
