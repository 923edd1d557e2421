"""Chapters 19 and 20: their study trains in order, stops where it should, and resumes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from scripts.ch19_ablations import (
    STUDY,
    STUDY_ROWS,
    THE_BASE,
    StudyRow,
    judged,
    patient,
    row_losses,
)
from scripts.ch20_scaling import FRACTIONS, WIDTHS, part_of, sized
from scripts.corpora.load import load_corpus
from scripts.engine.data import prepare
from scripts.engine.models import load_model
from scripts.studies import ablations as study
from scripts.studies import rows
from scripts.studies.ablations import (
    ONE_OF_EACH,
    StudyOptions,
    StudyRun,
    main,
    run_study,
    study_runs,
)
from scripts.studies.rows import PATIENCE, train_row


@pytest.fixture(scope="module")
def tiny_data():
    """300 pairs of the sample corpus, 20 to validate."""
    data = prepare(replace(STUDY, corpus="sample", vocab=500))
    corpus = {"train": data.corpus["train"][:300], "val": data.corpus["val"][:20]}
    return replace(data, corpus=corpus, train=data.train[:300], val=data.val[:20])


@pytest.fixture
def tiny_study(tiny_data, tmp_path, monkeypatch):
    """A study of four rows, two sizes and two parts, which writes below a temporary folder."""
    names = (THE_BASE, "no residual", "d_k 4", "no positions")
    monkeypatch.setattr(study, "STUDY_ROWS", {name: STUDY_ROWS[name] for name in names})
    monkeypatch.setattr(study, "ONE_OF_EACH", names[1:2])
    monkeypatch.setattr(study, "WIDTHS", (16, 32, 48))
    monkeypatch.setattr(study, "FRACTIONS", (1, 8))
    monkeypatch.setattr(study, "PART_WIDTH", 16)
    small = replace(STUDY, d_model=32, d_ff=32, warmup=3)
    monkeypatch.setattr(study, "STUDY", small)
    monkeypatch.setattr(study, "prepare", lambda config: tiny_data)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    kept = {}
    monkeypatch.setattr(study, "save_record", lambda name, record: kept.update({name: record}))
    return kept


def test_the_study_resumes_where_it_stopped(tiny_study, monkeypatch):
    options = StudyOptions(corpus="sample", seeds=1, base_seeds=2, save=True)
    monkeypatch.setattr(study, "paired_difference", lambda *texts: SimpleNamespace(p=0.25))
    trained = []

    def tired(run, data):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((run.name, run.config.seed))
        return study_run(run, data)

    study_run = study.study_run
    monkeypatch.setattr(study, "study_run", tired)
    with pytest.raises(KeyboardInterrupt):
        run_study(options)
    partial = json.loads(json.dumps(tiny_study["ablations-sample"]))
    assert [len(row["runs"]) for row in partial["rows"].values()] == [1, 0, 0, 0]
    assert len(tiny_study["scaling-sample"]["sizes"]) == 2  # the base and one more

    later = []
    monkeypatch.setattr(
        study,
        "study_run",
        lambda run, data: later.append((run.name, run.config.seed)) or study_run(run, data),
    )
    ablations, scaling = run_study(options)
    wanted = [(run.name, run.config.seed) for run in study_runs(options)]
    assert trained + later == wanted and len(wanted) == len(set(wanted)) == 9
    assert tiny_study == {"ablations-sample": ablations, "scaling-sample": scaling}
    rows = ablations["rows"]
    assert rows[THE_BASE]["runs"][0] == partial["rows"][THE_BASE]["runs"][0] | {"p": None}
    assert [len(row["runs"]) for row in rows.values()] == [2, 1, 1, 1]
    assert all(run["p"] == 0.25 for name in rows if name != THE_BASE for run in rows[name]["runs"])
    assert {point["d_model"] for point in scaling["sizes"]} == {16, 32, 48}
    assert [point["share"] for point in scaling["parts"]] == [8, 1]
    assert scaling["parts"][0]["train_tokens"] * 6 < scaling["parts"][1]["train_tokens"]
    assert [point["share"] for point in scaling["once"]] == [8, 1]
    assert [len(point["losses"]) for point in scaling["once"]] == [1, 1]
    assert len(scaling["parts"][0]["losses"]) > 1 == len(scaling["parts"][1]["losses"])
    assert scaling["once"][1] == scaling["parts"][1] == scaling["sizes"][0]  # all pairs, once
    assert not any("translations" in run for row in rows.values() for run in row["runs"])

    monkeypatch.setattr(study, "study_run", lambda run, data: pytest.fail("nothing is missing"))
    again, _ = run_study(options)
    assert again["rows"] == rows
    collected, _ = run_study(
        replace(options, epochs=2, train=False)
    )  # another study: nothing there
    assert all(row["runs"] == [] for row in collected["rows"].values())


def test_every_row_is_decoded_by_the_same_search():
    """What the engine's cache can't walk gets a beam of 4, too: the same model, the same texts."""
    trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
    data = SimpleNamespace(corpus={"val": load_corpus("sample")["val"][:30]})
    scores = [
        study.translated(StudyRun("a row", StudyRow("base", way=way), STUDY), trained, data)
        for way in ("fast", "apart")
    ]
    assert scores[0] == scores[1] and scores[0]["bleu"] > 20


def test_a_run_that_diverges_is_on_record_without_a_loss(tiny_study, monkeypatch):
    def burst(row, config, data):
        if row.operate is not None:
            raise FloatingPointError("loss nan, gradient's norm inf")
        return patient(), [2.0 + 0.1 * config.seed], [2.5]

    monkeypatch.setattr(study, "train_row", burst)
    monkeypatch.setattr(
        study,
        "translated",
        lambda run, trained, data: {"bleu": 1.0, "translations": ["a"] * 20},
    )
    monkeypatch.setattr(study, "paired_difference", lambda *texts: SimpleNamespace(p=0.5))
    record, _ = run_study(StudyOptions(corpus="sample", seeds=1, base_seeds=2))
    (run,) = record["rows"]["no residual"]["runs"]
    assert run["loss"] is None and "nan" in run["diverged"]
    assert list(judged(record).index) == []  # nothing to compare
    assert list(row_losses(record)) == [THE_BASE]


def test_training_stops_when_patience_is_at_its_end_and_keeps_the_best(tiny_data, monkeypatch):
    wanted = [3.0, 2.5, 2.0, 2.2, 2.1, 2.4, 1.0]
    seen = []

    def scripted(model, row, config, data):
        seen.append([p.detach().clone() for p in model.parameters()])
        return wanted[len(seen) - 1]

    monkeypatch.setattr(rows, "validation_loss", scripted)
    config = replace(STUDY, d_model=16, d_ff=16, heads=2, epochs=7, warmup=2)
    model, losses, trained = train_row(StudyRow("base"), config, part_of(tiny_data, 10))
    assert losses == wanted[: 3 + PATIENCE]  # the 1.0 is never seen
    assert len(trained) == len(losses) and trained[-1] < trained[0]
    assert all(map(torch.equal, model.parameters(), seen[2]))
    assert not all(map(torch.equal, model.parameters(), seen[-1]))


def test_the_order_is_worth_something_wherever_it_stops():
    runs = study_runs(StudyOptions(seeds=2, base_seeds=3))
    names = [(run.name, run.config.seed) for run in runs]
    assert names[0] == (THE_BASE, 1) and len(set(names)) == len(names)
    assert len({json.dumps(run.key, sort_keys=True) for run in runs}) == len(runs)
    assert len({run.slug for run in runs}) == len(runs)
    per_seed = len(STUDY_ROWS) + len(WIDTHS) - 1 + 2 * (len(FRACTIONS) - 1)
    assert len(runs) == 2 * per_seed + 1  # and the base's third seed
    first = [seed for _, seed in names[:per_seed]]
    assert set(first) == {1, 2, 3} and [s for s in first if s > 1] == [2, 3]
    assert set(ONE_OF_EACH) < set(STUDY_ROWS)
    bases = [run for run in runs if run.row.group == "size" and run.config.d_model == STUDY.d_model]
    assert not bases  # the base is that size


def test_the_base_is_the_size_of_its_width():
    assert replace(STUDY, **sized(STUDY.d_model)) == STUDY
    assert sized(16)["lr"] == 2 * STUDY.lr and sized(256)["lr"] == STUDY.lr / 2


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
