"""The study of chapter 21: what each row learns from, the models that others need, fine-tuning."""

import copy
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from scripts.book.instruments import scramble
from scripts.ch01_attention import subsequent_mask
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import pad_rows
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu
from scripts.core.settings import build_model
from scripts.studies import recipes
from scripts.studies.recipes import (
    ALL,
    GREEDY,
    MORE,
    PART,
    REVERSE,
    RISK,
    SAMPLED,
    SHORT,
    SHUFFLED,
    TAUGHT,
    distinct_candidates,
    sequence_log_probs,
)
from scripts.studies.rows import part_indices
from scripts.studies.runner import SWEEP

CONFIG = replace(recipes.BASE, corpus="sample", d_model=16, d_ff=16, heads=2, layers=1, epochs=1)
SETTING = asdict(CONFIG)


@pytest.fixture
def few(forty_pairs, monkeypatch, tmp_path):
    """Forty pairs, of which ten are known, short trainings, and an empty folder of runs."""
    monkeypatch.setattr(recipes, "data_of", lambda corpus, vocab: forty_pairs)
    changes = {"SHARE": 4, "PASSES": (1, 2), "STEPS": 2, "SENTENCES": 2, "CANDIDATES": 2}
    for name, value in changes.items():
        monkeypatch.setattr(recipes, name, value)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    monkeypatch.setattr(recipes, "teacher_texts", recipes.teacher_texts.__wrapped__)  # no cache
    return forty_pairs


def task(row, seed=1):
    more = {"reverse_lr": 2e-3} if row in (GREEDY, SAMPLED) else {}
    more |= {"before_lr": 2e-3} if row in (MORE, RISK) else {}
    return {"row": row, "lr": 1e-3, "seed": seed} | more


def test_words_are_counted_without_punctuation():
    assert recipes.mean_words(["A man, a plan.", "Well-known"]) == 2.5


def test_what_each_row_learns_from(few):
    known, people = part_indices(40, 4), few.corpus["train"]
    rows = (ALL, PART, REVERSE, GREEDY, SHUFFLED, TAUGHT)
    read = {row: recipes.read_by(SETTING, task(row)) for row in rows}
    pairs = {row: data.corpus["train"] for row, (data, _) in read.items()}
    assert pairs[ALL] is people and pairs[PART] == [people[i] for i in known]
    assert pairs[REVERSE] == [(english, german) for german, english in pairs[PART]]
    assert [pairs[GREEDY][i] for i in known] == pairs[PART]
    assert [e for _, e in pairs[GREEDY]] == [e for _, e in people]  # people wrote this side
    mixed, english = zip(*pairs[SHUFFLED], strict=True)
    german, own = zip(*people, strict=True)
    assert english == own and sorted(mixed) == sorted(german)
    moved = {i for i in range(40) if mixed[i] != german[i]}
    assert moved.isdisjoint(known) and len(moved) > 20
    assert [g for g, _ in pairs[TAUGHT]] == [g for g, _ in people]
    assert read[TAUGHT][1]["teacher"]["model"] == "sample-de-en"
    assert corpus_bleu([e for _, e in pairs[TAUGHT]], own).score > 50


def test_a_model_that_others_need_is_trained_once(few, monkeypatch):
    first = recipes.kept_model(SETTING, REVERSE, 2e-3, 1)
    monkeypatch.setattr(recipes, "train_row", None)  # training would fail now
    again = recipes.kept_model(SETTING, REVERSE, 2e-3, 1)
    assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))
    wanted = ((GREEDY, SWEEP), (GREEDY, 1), (SAMPLED, 1))  # sweeps use the first that counts
    swept, greedy, sampled = (recipes.read_by(SETTING, task(*row))[1] for row in wanted)
    assert swept == greedy != sampled
    with pytest.raises(TypeError):
        recipes.kept_model(SETTING, REVERSE, 2e-3, 2)  # another seed


@pytest.mark.parametrize("row", [TAUGHT, PART, SHORT, REVERSE, SAMPLED, MORE, RISK])
def test_each_row_is_scored_where_it_counts(few, row):
    run = recipes.work(SETTING, task(row))
    assert {"loss", "bleu", "chrf", "risk", "words", "other_loss", "distinct"} <= {*run}
    assert ("loss_teacher" in run) == (row in (ALL, TAUGHT))
    assert ("back_bleu" in run) == (row == SAMPLED)
    swept = recipes.work(SETTING, task(row, SWEEP))
    assert ("risk" in swept) == (row in (MORE, RISK))  # the score that chooses its rate


@pytest.fixture
def novice(few):
    torch.manual_seed(0)
    return Trained(build_model(CONFIG, len(few.tokenizer)).eval(), few.tokenizer, CONFIG)


def test_fine_tuning_works_on_a_copy_and_meets_the_same_sentences(few, novice):
    before, met = copy.deepcopy(novice.model.state_dict()), []
    cross_entropy = recipes.cross_entropy(CONFIG)

    def loss(model, examples):
        met[-1].append(list(examples))
        assert not model.training
        return cross_entropy(model, examples)

    for seed in (1, 1, 2):
        met.append([])
        model = recipes.fine_tuned(novice, few.train, loss, 1e-2, seed)
        assert not all(map(torch.equal, model.parameters(), novice.model.parameters()))
    assert met[0] == met[1] != met[2] and [len(examples) for examples in met[0]] == [2, 2]
    assert all(torch.equal(t, before[n]) for n, t in novice.model.state_dict().items())


def test_minimum_risk_lowers_the_risk_of_its_own_draws(few, novice, monkeypatch):
    for name, value in {"STEPS": 12, "SENTENCES": 4, "CANDIDATES": 6, "SHARPNESS": 0.3}.items():
        monkeypatch.setattr(recipes, name, value)
    some = few.train[:4]

    @torch.no_grad()
    def risk(model):
        return sum(recipes.minimum_risk(novice, seed)(model, some).item() for seed in range(5))

    model = recipes.fine_tuned(novice, some, recipes.minimum_risk(novice, 1), 2e-3, 1)
    assert risk(model) < risk(novice.model)


# Candidates and their probabilities


@pytest.fixture
def toy(float64):
    """A model of 6 tokens in double precision."""
    model = make_model(6, 6, N=1, d_model=16, d_ff=24, h=2, dropout=0.0).eval()
    scramble(model)
    return model


def test_log_probs_and_their_gradients_are_those_of_each_pair_alone(toy):
    sources = [[4, 5, EOS], [5, EOS], [4, 4, 5, 5, EOS]]
    candidates = [[(5, 4, EOS), (EOS,)], [(4, 0, 5, 5)], [(0, 0, EOS), (5, EOS), (1, 2, 4, EOS)]]
    together = sequence_log_probs(toy, pad_rows(sources), candidates)
    alone = []
    for source, texts in zip(sources, candidates, strict=True):
        for text in texts:
            tgt = torch.tensor([[BOS, *text[:-1]]])
            x = toy(torch.tensor([source]), tgt, None, subsequent_mask(len(text)))
            labels = torch.tensor(text)
            alone.append(-F.cross_entropy(toy.generator(x[0]), labels, reduction="sum"))
    alone = torch.stack(alone)
    torch.testing.assert_close(together, alone)
    gradients = [
        torch.autograd.grad(log_probs.sin().sum(), list(toy.parameters()))
        for log_probs in (together, alone)
    ]
    torch.testing.assert_close(*gradients)


def test_candidates_are_distinct_and_begin_with_the_reference(toy):
    src, references = pad_rows([[4, 5, EOS], [5, EOS]]), [[5, 4, EOS], [4, EOS]]
    settings = toy, src, 60, 3
    candidates = distinct_candidates(*settings, torch.Generator().manual_seed(0), references)
    alone = distinct_candidates(*settings, torch.Generator().manual_seed(0))
    for texts, drawn, reference in zip(candidates, alone, references, strict=True):
        assert texts[0] == tuple(reference)
        assert len(set(texts)) == len(texts) < 60  # sixty draws, most of them equal
        assert set(drawn) | {tuple(reference)} == set(texts)
        assert all(EOS not in text[:-1] and (text[-1] == EOS or len(text) == 3) for text in texts)


def test_the_candidates_of_a_source_are_drawn_for_it(toy, monkeypatch):
    def sources_again(model, src, mask, max_len, generator):
        return torch.cat((src, torch.arange(len(src)).unsqueeze(1)), dim=1), None

    monkeypatch.setattr(recipes, "cached_sample", sources_again)
    src = torch.tensor([[4, 4], [5, 5]])
    candidates = distinct_candidates(toy, src, 2, 3, torch.Generator())
    assert candidates == [[(4, 4, 0), (4, 4, 1)], [(5, 5, 2), (5, 5, 3)]]
