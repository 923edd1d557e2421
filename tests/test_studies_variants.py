"""The study of chapter 17: its command and its record."""

import json

import pytest

from scripts.book.records import load_record
from scripts.corpora.load import load_corpus
from scripts.studies import variants


def test_a_run_that_is_done_is_only_read(tmp_path):
    calls = []
    for settings in ({"layers": 2}, {"layers": 2}, {"layers": 4}):
        score = variants.once(
            tmp_path / "a", settings, lambda: {"bits": calls.append(1) or len(calls)}
        )
        assert score == {"bits": len(calls)}
    assert len(calls) == 2  # other settings are another run
    kept = json.loads((tmp_path / "a/score.json").read_text())
    assert kept == {"settings": {"layers": 4}, "score": {"bits": 2}}


def test_the_command_says_what_it_does_not_understand(capsys):
    for words in ([], ["chess"], ["gpt", "--seeds", "x"], ["gpt", "--layers", "3"]):
        assert variants.main(words) == 2
    assert "gpt" in capsys.readouterr().err


@pytest.fixture
def few(monkeypatch, tmp_path):
    """A few pairs of the sample corpus, and a folder of runs that is empty."""
    corpus = {name: pairs[:12] for name, pairs in load_corpus("sample").items()}
    for module in ("engine.data", "studies.variants"):
        monkeypatch.setattr(f"scripts.{module}.load_corpus", lambda name: corpus)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))


def test_a_mini_gpt_trains_and_is_scored(few):
    options = variants.VariantOptions("gpt", "sample", seeds=1, epochs=1)
    found = variants.study_gpt(options)
    assert variants.study_gpt(options) == found
    assert [row["order"] for row in found["ngrams"]] == list(range(1, 11))
    (run,) = found["runs"]
    assert 0 < run["test"] < 12 and set(run["samples"]) == {"0.5", "0.8", "1", "1.5"}


def test_the_recorded_training_had_one_rate_for_all_weights():
    """As on record: Muon's matrices had the rate of the rest. Chapter 17 says so."""
    config = variants.GPT_CONFIGS["multi30k"]
    assert config.optimizer == "muon" and config.muon_lr == config.lr
    recorded = load_record("variants-gpt-multi30k")["config"]
    assert {name: getattr(config, name) for name in recorded} == recorded


def test_the_record_names_its_command():
    record = load_record("variants-gpt-multi30k")
    assert record["repeat"].startswith("python -m scripts.studies.variants gpt")
    assert record["corpus"] == "multi30k" and len(record["commit"]) >= 40
