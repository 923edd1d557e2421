"""Minimum risk on a beam's texts: against chapter 21's teaching form, and what a run does."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import ROOT
from torch.testing import assert_close

from scripts.ch06_training import EOS, LabelSmoothing
from scripts.ch07_multi30k import encode_pairs, make_batch, pad_rows
from scripts.ch21_learning_from_models import risk_of_candidates, sequence_log_probs
from scripts.core.checkpoints import weights
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.fast.fast import FAST, PLAIN, FastPath, fast_loss
from scripts.fast.run import training_of
from scripts.ladder import climbing, risk
from scripts.ladder.climbing import RungTraining
from scripts.ladder.queue import QueueOptions
from scripts.ladder.risk import (
    Judged,
    RiskTraining,
    StartedTraining,
    bleu_risks,
    risk_loss,
    text_rows,
)

TEXTS = [[[7, 9, 30], [8]], [[5, 6, 7, 8, 9, 10]], [[40, 41], [42], [43, 44, 45]]]


@pytest.fixture(scope="module")
def trained():
    return load_model(ROOT / "models" / "sample-de-en")


@pytest.fixture(scope="module")
def pairs(trained):
    return encode_pairs(load_corpus("sample")["train"][:3], trained.tokenizer)


@pytest.fixture(scope="module")
def batch(pairs) -> Judged:
    full, counts = [], []
    for pair, texts in zip(pairs, TEXTS, strict=True):
        full += [pair.tgt, *([pair.tgt[0], *ids, EOS] for ids in texts)]
        counts.append(1 + len(texts))
    risks = torch.tensor([0, 0.3, 0.9, 0, 0.5, 0, 0.1, 0.2, 0.8])
    return Judged(pad_rows([pair.src for pair in pairs]), pad_rows(full), counts, risks)


def test_a_run_begins_with_the_weights_it_is_given_and_resumes_with_its_own(
    trained, forty_pairs, tmp_path
):
    config = replace(trained.config, max_tokens=256, device="cpu")
    kind = partial(StartedTraining, start=ROOT / "models/sample-de-en/model.safetensors")
    training = training_of(config, forty_pairs, tmp_path, kind=kind)
    given = weights(trained.model)
    assert all(found.equal(given[name]) for name, found in weights(training.model).items())
    training.load()
    training.step()
    training.save()
    own = weights(training.model)
    assert not any(found.equal(given[name]) for name, found in own.items())
    again = training_of(config, forty_pairs, tmp_path, resume=True, kind=kind)
    assert all(found.equal(own[name]) for name, found in weights(again.model).items())


@pytest.mark.parametrize(("name", "kind"), [("onward-1", RungTraining), ("risk-1", RiskTraining)])
def test_a_rungs_start_reaches_its_training(name, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    kinds, settings = [], QueueOptions()
    monkeypatch.setattr(climbing, "learned", lambda *_, kind, loss_for: kinds.append(kind) or [])
    climbing.trained_by(name, climbing.config_of(name, settings), None, settings, [])
    start = ROOT / "models/multi30k-de-en/model.safetensors"
    assert (kinds[0].func, kinds[0].keywords["start"]) == (kind, start)


def test_owners_and_references(batch):
    assert batch.owner.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert batch.given.nonzero().flatten().tolist() == [0, 3, 5]


@pytest.mark.parametrize("switches", [FAST, PLAIN], ids=["fast", "plain"])
def test_loss_and_gradient_are_those_of_chapter_21_beside_cross_entropy(
    trained, pairs, batch, switches
):
    """On rows and on rectangles; each source's risk counts once for each token of its reference."""
    model, criterion = trained.model.eval(), LabelSmoothing(0.1)
    expected, nll = fast_loss(model, make_batch(pairs), criterion)
    log_probs = sequence_log_probs(model, batch.src, [[[*t, EOS] for t in ts] for ts in TEXTS])
    lengths = torch.tensor([len(t) + 1 for ts in TEXTS for t in ts])
    risks = batch.risks[~batch.given]
    found = risk_of_candidates(log_probs / lengths**risk.ALPHA, risks, [2, 1, 3], 6.0)  # (B,)
    expected = expected + 150 * sum(r * (len(p.tgt) - 1) for r, p in zip(found, pairs, strict=True))
    weights = list(model.parameters())
    slopes = torch.autograd.grad(expected, weights)
    loss, same = risk_loss(model, batch, criterion, 150.0, 6.0, FastPath(switches))
    assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    assert_close(same, nll, rtol=1e-5, atol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(loss, weights), slopes, strict=True):
        assert_close(ours, theirs, rtol=1e-3, atol=2e-3)


def test_a_source_is_read_once_however_many_texts_it_has(trained, batch, monkeypatch):
    read, encode = [], FastPath.encode
    monkeypatch.setattr(
        FastPath,
        "encode",
        lambda path, m, src, at: read.append(len(src)) or encode(path, m, src, at),
    )
    text_rows(trained.model, batch)
    assert read == [3]


def test_a_risk_is_one_minus_the_sentences_bleu():
    reference = "a dog runs over the green grass ."
    perfect, near, far = bleu_risks([reference, "a dog runs over grass .", "two men"], reference)
    assert perfect == pytest.approx(0) and 0 < near < far == pytest.approx(1, abs=0.02)
    # One word differs of eight: 7/8 of the words, (5+1)/(7+1) of the pairs, 4/7, 3/6.
    (one,) = bleu_risks(["a dog runs over the red grass ."], reference)
    assert one == pytest.approx(1 - (7 / 8 * 6 / 8 * 4 / 7 * 3 / 6) ** 0.25, abs=1e-6)
