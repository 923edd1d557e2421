"""The studies of chapters 17 and 18: their fast loss, their command and their records."""

import json
from dataclasses import replace

import pytest
import torch

from scripts import ROOT
from scripts.book.instruments import scramble
from scripts.book.records import RESULTS, load_record
from scripts.ch06_training import BOS, EOS, LabelSmoothing
from scripts.ch07_multi30k import Example
from scripts.ch17_small_gpt import asked_next, make_stack, stack_loss
from scripts.ch18_one_stack import asked_hidden, asked_pairs
from scripts.corpora.load import load_corpus
from scripts.studies import variants

SIZES = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
EXAMPLES = [
    Example([5, 6, 7, 8, 9, EOS], [BOS, 8, 9, EOS]),
    Example([5, EOS], [BOS, 8, 9, 10, 11, 12, EOS]),
]


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_the_fast_road_gives_the_same_sums_and_gradients(norm_first, positions, float64):
    torch.manual_seed(2)
    model = make_stack(20, **SIZES, norm_first=norm_first, positions=positions)
    scramble(model)
    draw = torch.Generator().manual_seed(0)
    for batch in (
        asked_next([[BOS, 5, 6, EOS], [BOS, EOS]]),
        asked_hidden([[BOS, *range(4, 18), EOS], [BOS, *[5, 6, 7] * 5, EOS]], 19, draw),
        asked_pairs(EXAMPLES, "causal"),
        asked_pairs(EXAMPLES, "prefix"),
    ):
        assert batch.ntokens
        found = []
        for loss_of in (stack_loss, variants.fast_stack_loss):
            model.zero_grad()
            sums = loss_of(model, batch, LabelSmoothing(0.1))
            sums[0].backward()
            found.append([*sums, *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


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


def test_a_translator_trains_and_is_scored(few, monkeypatch):
    """Every kind, for a few steps, by the study's own code."""
    config = variants.translator_config
    monkeypatch.setattr(
        variants,
        "translator_config",
        lambda corpus, kind: replace(config(corpus, kind), vocab=110, d_model=16, d_ff=32),
    )
    options = variants.VariantOptions("translate", "sample", seeds=1, epochs=1)
    found = variants.compare_translators(options)
    assert variants.compare_translators(options) == found
    counts = [part["runs"][0]["parameters"] for part in found["kinds"].values()]
    assert max(counts) - min(counts) == 3 * 16
    for part in found["kinds"].values():
        assert part["runs"][0]["history"][0]["val_nats"] < 7


def test_the_recorded_trainings_had_one_rate_for_all_weights():
    """As on record: Muon's matrices had the rate of the rest. Chapter 17 says so."""
    configs = [variants.GPT_CONFIGS["multi30k"]]
    configs += [variants.translator_config("multi30k", kind) for kind in variants.TRANSLATORS]
    for config in configs:
        assert config.optimizer == "muon" and config.muon_lr == config.lr
    recorded = load_record("variants-gpt-multi30k")["config"]
    assert {name: getattr(configs[0], name) for name in recorded} == recorded


RECORDS = ("gpt-multi30k", "translate-multi30k")


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_names_its_command(name):
    what, corpus = name.split("-")
    record = load_record(f"variants-{name}")
    assert record["repeat"].startswith(f"python -m scripts.studies.variants {what}")
    assert record["corpus"] == corpus and len(record["commit"]) >= 40
    assert ("--corpus sample" in record["repeat"]) == (corpus == "sample")
    text = (RESULTS / f"variants-{name}.json").read_text("utf-8")
    assert str(ROOT) not in text
