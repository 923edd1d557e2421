"""The race to 40 BLEU: what ends a training, what its clock holds, and rules that are broken."""

from dataclasses import replace
from itertools import count

import pytest
from conftest import ROOT
from tiny import RUN, few_pairs

from scripts.book import records
from scripts.book.records import load_record, record_names
from scripts.studies import speedrun
from scripts.studies.speedrun import broken_rules, main, scored, trained_to

RACE = replace(RUN, epochs=3, average=0, save_every=0)
MULTI30K = {"corpus": "multi30k", "languages": "de-en"}
RUNS = [
    {
        "seed": seed,
        "seconds": 500.0,
        "epochs": 8,
        "val_bleu": {"7": 40.2, "8": 41.3},
        "parameters": 7_635_968,
        "precision": "bf16",
        "split": "test_2016_flickr",
        "test_bleu": bleu,
        "signature": speedrun.SIGNATURE + "2.6.0",
    }
    for seed, bleu in ((1, 39.9), (2, 40.3), (3, 40.1))
]
ENTRY = {
    "repeat": "python -m scripts.studies.speedrun --save",
    "device": "CPU, 2 threads",
    "date": "2026-11-29T10:00:00+00:00",
    "by": "you",
    "enough": 41.0,
    "recipe": MULTI30K,
    "runs": RUNS,
}


def with_first(**changes):
    """The entry, its first run changed."""
    return ENTRY | {"runs": [RUNS[0] | changes, *RUNS[1:]]}


@pytest.mark.parametrize(("enough", "epochs"), [(0.0, 2), (101.0, 3)])
def test_validation_ends_a_training_and_the_test_is_read_afterwards(enough, epochs, monkeypatch):
    """The first look is after the second of three epochs; one test split is read, at the end."""
    corpus, read = few_pairs().corpus, []
    evaluate = speedrun.evaluate

    def watched(trained, pairs, *search):
        read.append(next(split for split, known in corpus.items() if known is pairs))
        return evaluate(trained, pairs, *search)

    monkeypatch.setattr(speedrun, "evaluate", watched)
    run = scored(RACE, corpus, enough, looks=2)
    assert run["epochs"] == epochs and [*run["val_bleu"]] == ["2", "3"][: epochs - 1]
    assert read == ["val"] * (epochs - 1) + ["test"]


def test_the_tokenizer_and_the_look_are_inside_of_the_clock(monkeypatch):
    """A clock that only these two move."""
    ticks = count()
    time = [next(ticks)]

    def moving(work):
        def moved(*args):
            time[0] = next(ticks)
            return work(*args)

        return moved

    monkeypatch.setattr(speedrun, "perf_counter", lambda: time[0])
    for name in ("prepare", "evaluate"):
        monkeypatch.setattr(speedrun, name, moving(getattr(speedrun, name)))
    _, run = trained_to(replace(RACE, epochs=1), few_pairs().corpus, 0.0, looks=1)
    assert run["seconds"] == 2


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (ENTRY | {"recipe": MULTI30K | {"corpus": "mine"}}, "Multi30k's training pairs"),
        (ENTRY | {"recipe": MULTI30K | {"languages": "en-de"}}, "Multi30k's training pairs"),
        (ENTRY | {"enough": 41.5}, "validation ends"),
        (with_first(parameters=8_000_001), "at most 8,000,000 parameters"),
        (with_first(seed=2), "seeds 1, 2 and 3"),
        (with_first(val_bleu={}), "validation ends"),
        (with_first(val_bleu={"7": 41.1, "8": 41.3}), "validation ends"),
        (with_first(split="test_2017_flickr"), "the test is"),
        (
            with_first(signature="nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:2"),
            "by sacreBLEU",
        ),
        (with_first(test_bleu=39.5), "at least 40.0 BLEU"),
    ],
)
def test_a_rule_that_is_broken_is_named(record, rule):
    assert broken_rules(ENTRY) == []
    (complaint,) = broken_rules(record)
    assert rule in complaint


@pytest.mark.parametrize("option", ["--average", "--save_every"])
def test_what_would_have_no_effect_is_refused(option, capsys):
    assert main([option, "2"]) == 2
    assert "have to be 0" in capsys.readouterr().err


def test_records_are_entries():
    names = record_names("speedrun-*")
    assert {name: broken_rules(load_record(name)) for name in names} == dict.fromkeys(names, [])


def test_the_check_names_the_record_and_the_table_begins_with_the_fastest(monkeypatch, capsys):
    fast = {"runs": [run | {"seconds": 90.0, "test_bleu": 39.0} for run in RUNS], "by": "me"}
    entries = {"speedrun-cpu-1": ENTRY, "speedrun-cuda-1": ENTRY | fast}
    for module in (speedrun, records):
        monkeypatch.setattr(module, "record_names", lambda pattern: [*entries])
        monkeypatch.setattr(module, "load_record", entries.get)
    assert main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("speedrun-cuda-1: on average at least 40.0")
    monkeypatch.syspath_prepend(ROOT / "docs")
    from readme import speedrun_table

    first, second = speedrun_table().splitlines()[2:]
    assert "| 90 (90, 90, 90) | 39.00 |" in first and "| 500 (500, 500, 500) | 40.10 |" in second


def test_an_entry_is_only_written_if_it_breaks_no_rule(monkeypatch, capsys):
    written = []
    monkeypatch.setattr(speedrun, "load_corpus", lambda *named: {})
    monkeypatch.setattr(speedrun, "save_record", lambda name, record: written.append(name))
    runs = {run["seed"]: run for run in RUNS}
    monkeypatch.setattr(speedrun, "scored", lambda config, *others: runs[config.seed])
    assert main(["--device", "cpu", "--save"]) == 0 and len(written) == 1
    runs[1] = RUNS[0] | {"test_bleu": 39.0}
    assert main(["--device", "cpu", "--save"]) == 1 and len(written) == 1
    assert "at least 40.0 BLEU" in capsys.readouterr().out
