"""Chapter 13's race: the programs do the same work, and the figures mean what they say."""

import importlib.util
import itertools
import json
from functools import partial

import pytest
import torch

from scripts import ROOT
from scripts.bench import decoding
from scripts.book.figures.speed import decoding_speed_chart, speed_frame
from scripts.book.records import load_record
from scripts.ch06_training import EOS
from scripts.ch07_multi30k import source_ids
from scripts.ch14_leaving_home import export_ctranslate2
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.fast import compiled, translating


@pytest.fixture(scope="module")
def trained():
    return load_model(ROOT / "models" / "sample-de-en", "cpu")


@pytest.fixture(scope="module")
def rows(trained):
    pairs = load_corpus("sample")["test"][:40]
    return sorted((source_ids(german, trained.tokenizer) for german, _ in pairs), key=len)[::-1]


@pytest.mark.parametrize("beam", [1, 4])
def test_the_programs_write_the_same_texts(trained, rows, tmp_path, beam):
    export_ctranslate2(trained, tmp_path)
    ways = {
        "textbook": partial(decoding.textbook, trained),
        "CTranslate2": decoding.CTranslate2(trained, tmp_path, "float32", 1),
        "ours": partial(decoding.ours, trained, "float32"),
    }
    texts = {
        name: [trained.tokenizer.decode(list(ids)) for ids in way(rows, beam)]
        for name, way in ways.items()
    }
    for name in ways:
        assert texts[name] == texts["ours"], name


def test_a_rival_gets_the_batches_that_are_fastest_for_it(trained, rows, tmp_path, monkeypatch):
    export_ctranslate2(trained, tmp_path)
    rival = decoding.CTranslate2(trained, tmp_path, "int8", 1)
    wanted = {1: 64, 4: 32}
    monkeypatch.setattr(
        decoding, "taken", lambda work: abs(rival.batch[work.args[1]] - wanted[work.args[1]])
    )
    rival.tune(rows)
    assert rival.batch == wanted


def test_turns_are_taken_and_the_median_counts(trained, monkeypatch):
    clock, now = [], [0.0]
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: now[0])
    costs = {"ours, float32": 2.0, "CTranslate2, float32": 1.0}

    def way(name):
        def run(rows, beam):
            clock.append((name, beam))
            now[0] += costs[name] * beam * (10 if len(clock) <= 4 else 1)  # round 1 warms up
            return [[4, EOS]] * 6

        return run

    ways = {name: way(name) for name in costs}
    reports = decoding.race(ways, [([4, EOS], "a")] * 6, trained, rounds=3, threads=1)
    assert clock[:4] == [(name, beam) for beam in (1, 4) for name in costs] and len(clock) == 16
    frame = speed_frame({"reports": reports, "sentences": 6}).set_index(["program", "beam"])
    assert frame.loc[("ours, float32", 1), "sentences_per_second"] == 3.0
    assert frame.loc[("CTranslate2, float32", 4), "sentences_per_second"] == 1.5
    for column in ("ratio", "lowest", "highest"):
        assert (frame.loc["ours, float32", column] == 0.5).all()
    assert (frame["same_as_ours"] == 6).all()


def test_one_at_a_time_the_first_stands_apart(monkeypatch):
    times = itertools.chain([0.5], itertools.cycle([0.01]))
    monkeypatch.setattr(decoding, "taken", lambda work: next(times))
    found = decoding.one_at_a_time({"ours": lambda rows, beam: None}, [[4, EOS]] * 30)
    assert found[0] == {"program": "ours", "beam": 1, "first": 500.0, "p50": 10.0, "p99": 10.0}


def test_the_account_sees_the_compiled_functions(trained, rows, monkeypatch):
    monkeypatch.setattr(translating, "fast_in_8_bits", lambda: True)  # or it is refused
    spent = decoding.decoding_account(partial(decoding.ours, trained, "int8", rows, 4))
    assert min(spent[kind] for kind in ("8-bit products", "best tokens", "copies")) > 0
    if compiled.loaded("kernels") is not None:
        assert spent["attention"] > 0 and spent["rounding and scaling"] > 0
        assert compiled.call.__module__ == "scripts.fast.compiled"  # unwrapped again


@pytest.mark.parametrize("has", [True, False])
def test_what_the_processor_lacks_is_left_out_and_named(has, trained, monkeypatch, capsys):
    """And such a record doesn't take the place of a whole one."""
    raced, saved = [], {}

    def race(ways, pairs, trained, *given):
        raced.extend(ways)
        report = {"sentences": len(pairs), "seconds": [1.0, 1.0]}
        return [report | {"program": name, "beam": beam} for name in ways for beam in (1, 4)]

    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has)
    monkeypatch.setattr(decoding, "open_model", lambda options: trained)
    monkeypatch.setattr(decoding, "race", race)
    monkeypatch.setattr(decoding, "save_record", saved.__setitem__)
    monkeypatch.setattr(decoding.CTranslate2, "tune", lambda rival, rows: None)
    for slow in ("one_at_a_time", "scores", "decoding_account"):
        monkeypatch.setattr(decoding, slow, lambda *given: [])
    assert decoding.main(["--sentences", "8", "--save", "true"]) == 0
    ((name, record),) = saved.items()
    assert name == ("decoding-speed" if has else "decoding-speed-float32")
    assert record["left_out"] == ([] if has else ["ours, int8"])
    assert ("ours, int8" in raced) is has
    assert {"ours, float32", "CTranslate2, float32", "CTranslate2, int8"} <= {*raced}
    assert ("left out" in capsys.readouterr().out) is not has


def test_the_chart_comes_from_a_record():
    drawn = json.loads(decoding_speed_chart(load_record("decoding-speed")).to_json())
    assert sum(len(rows) for rows in drawn["datasets"].values()) == 9  # the exact stop only once


def test_a_missing_program_gets_one_line(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert decoding.main([]) == 2
    error = capsys.readouterr().err
    assert "pip install -e '.[bench]'" in error and error.count("\n") == 1


def test_the_race_on_record_is_won_as_told():
    """Level with CTranslate2 or ahead of it, at the same precision; BLEU close to 32 bits'."""
    record = load_record("decoding-speed")
    frame = speed_frame(record).set_index(["program", "beam"])
    for beam in (1, 4):
        assert frame.loc[("ours, float32", beam), "ratio"] >= 1.0
        assert frame.loc[("ours, int8", beam), "ratio"] >= 1.0
    scores = {(r["split"], r["program"], r["beam"]): r["bleu"] for r in record["scores"]}
    for (split, program, beam), bleu in scores.items():
        assert abs(bleu - scores[split, "ours, float32", beam]) < 0.2, (split, program, beam)
