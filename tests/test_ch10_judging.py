"""Chapter 10's measures: BLEU, chrF, the significance test, what flatters, the record."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from scripts import ROOT
from scripts.book.records import load_record, sha256
from scripts.ch01_attention import padding_mask
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import source_ids
from scripts.ch08_decoding import dropout_off, next_log_probs
from scripts.ch10_judging import (
    bleu_parts,
    chrf_by_hand,
    forced_texts,
    lossy,
    paired_difference,
    randomisation_p,
    sacrebleu_p,
    tokens_13a,
)
from scripts.core.models import Trained, load_model
from scripts.core.scores import corpus_bleu, corpus_chrf
from scripts.corpora.load import load_corpus
from scripts.fast.translating import DecodeOptions, decode_hypotheses, translate
from scripts.studies.judging import QUOTED, bleu_by_length, recall_by_frequency
from scripts.studies.searches import searched, texts_of


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    return load_corpus("sample")["test"]


@pytest.fixture(scope="module")
def weak() -> Trained:
    """A model that is often unsure: the small one that ships, with noise in its matrices."""
    trained = load_model(ROOT / "models" / "sample-de-en")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trained.model.parameters():
            if p.dim() > 1:
                p += 0.4 * p.std() * torch.randn(p.shape, generator=generator)
    return trained


# BLEU and chrF


@pytest.mark.parametrize(("alphabet", "size"), [("abc", 1), ("abcdefghij", 20), ("ab.,!'-", 8)])
def test_bleu_by_hand_equals_sacrebleu(alphabet, size):
    rng = random.Random(0)
    for _ in range(10):
        outputs, references = (
            [" ".join(rng.choices(alphabet, k=rng.randrange(12))) for _ in range(size)]
            for _ in range(2)
        )
        theirs = corpus_bleu(outputs, references)
        ours = bleu_parts(*([tokens_13a(text) for text in side] for side in (outputs, references)))
        assert math.isclose(ours.score, theirs.score, rel_tol=1e-9, abs_tol=1e-9)
        assert (ours.matches, ours.totals) == (theirs.counts, theirs.totals)
        assert ours.brevity_penalty == pytest.approx(theirs.bp)


def test_erratum_20_bleu_is_measured_on_whole_texts(pairs):
    references = [english for _, english in pairs[:50]]
    outputs = [english.lower().replace("gray", "grey") for english in references]
    ours = corpus_bleu(outputs, references)
    assert "case:mixed" in ours.signature and "tok:13a" in ours.signature
    wrong = corpus_bleu([o.lower() for o in outputs], [r.lower() for r in references])
    assert wrong.score > ours.score + 1  # a lower-cased figure overlooks the missing capitals


@pytest.mark.parametrize(("letters", "size"), [("ab", 1), ("abc ", 3), ("abcdefgh  ", 20)])
def test_chrf_by_hand_equals_sacrebleu(letters, size):
    rng = random.Random(0)
    for _ in range(10):
        outputs, references = (
            ["".join(rng.choices(letters, k=rng.randrange(0, 15))) for _ in range(size)]
            for _ in range(2)
        )
        theirs = corpus_chrf(outputs, references)
        assert chrf_by_hand(outputs, references) == pytest.approx(theirs.score, rel=1e-9)
        assert "nc:6" in theirs.signature


# Is the difference real?

WORDS = ["a", "the", "man", "dog", "cat", "runs", "sits", "in", "red", "blue", "park", "two"]


def made_up(sentences: int, rates: tuple[float, ...], seed: int) -> tuple[list[str], ...]:
    """References of random words, and for each rate a system that loses that share of them."""
    rng = np.random.default_rng(seed)
    references = [" ".join(rng.choice(WORDS, rng.integers(6, 15))) for _ in range(sentences)]
    return references, *(lossy(references, rate, rng) for rate in rates)


def dealt(first: list[str], second: list[str], coins: np.ndarray) -> tuple[list[str], list[str]]:
    """Two systems' outputs, swapped where a coin shows 1: fair coins make the systems equal."""
    both = zip(first, second, coins, strict=True)
    swapped = [(b, a) if coin else (a, b) for a, b, coin in both]
    return [a for a, _ in swapped], [b for _, b in swapped]


def test_p_agrees_with_swapping_the_texts_themselves():
    references, first, second = made_up(12, (0.2, 0.15), 3)
    ours = paired_difference(first, second, references, trials=60, samples=5, seed=7)
    rng = np.random.default_rng(7)
    drawn = rng.choice(12, size=(5, 12))  # the draws of the sentences come first
    tosses = rng.integers(2, size=(60, 12))

    def difference(one, other, references=references):
        return corpus_bleu(other, references).score - corpus_bleu(one, references).score

    swaps = [difference(*dealt(first, second, toss)) for toss in tosses]
    np.testing.assert_allclose(ours.swaps, swaps, atol=1e-9)
    draws = [
        difference(*([t[i] for i in draw] for t in (first, second, references))) for draw in drawn
    ]
    np.testing.assert_allclose(ours.draws, draws, atol=1e-9)
    assert (ours.low, ours.high) == pytest.approx(tuple(np.percentile(draws, (2.5, 97.5))))
    measured = difference(first, second)
    assert ours.difference == pytest.approx(measured)
    assert ours.p == (1 + sum(abs(d) >= abs(measured) - 1e-9 for d in swaps)) / 61
    assert 0.05 < ours.p < 0.95  # otherwise this would be too easy


def test_a_system_does_not_differ_from_itself(pairs):
    texts = [english for _, english in pairs[:10]]
    for outputs in ([""] * 10, [text[:9] for text in texts]):
        itself = paired_difference(outputs, outputs, texts, trials=50, samples=20)
        assert itself.p == 1.0 and itself.difference == itself.low == itself.high == 0
    with pytest.raises(ValueError, match="not 9 outputs and 10 references"):
        paired_difference(texts, texts[1:], texts)


def test_the_same_in_other_digits_counts_as_far():
    assert randomisation_p(np.array([0.3, -0.3, 0.1]), 0.1 + 0.2) == 3 / 4
    assert randomisation_p(np.array([0.1, -0.2]), 5.0) == 1 / 3  # never 0


def test_sacrebleus_p_is_as_the_pitfall_says(monkeypatch):
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    references, first, _ = made_up(40, (0.2, 0.2), 2)
    assert sacrebleu_p(first, first, references, samples=99) == 1 / 100  # "significant"


# What flatters


def test_forced_texts_are_the_first_choices_after_the_references_words(weak, pairs):
    expected = []
    for source, reference in pairs[:4]:
        src = torch.tensor([source_ids(source, weak.tokenizer)])  # (1, S)
        tgt = [BOS, *weak.tokenizer.encode(reference)]
        with torch.no_grad(), dropout_off(weak.model):
            mask = padding_mask(src)
            memory = weak.model.encode(src, mask)
            steps = [
                next_log_probs(weak.model, memory, mask, torch.tensor([tgt[:t]])).argmax().item()
                for t in range(1, len(tgt) + 1)
            ]
        expected.append(weak.tokenizer.decode(steps))
    assert forced_texts(weak, pairs[:4], batch_size=3) == expected
    sources, references = zip(*pairs[:24], strict=True)
    real = corpus_bleu(translate(weak, sources, DecodeOptions(beam=1)), references).score
    assert corpus_bleu(forced_texts(weak, pairs[:24]), references).score > real + 5


# The study behind the record


def test_the_lengths_partition_the_sentences(pairs):
    sources, references = map(list, zip(*pairs, strict=True))
    outputs = lossy(references, 0.1, np.random.default_rng(0))
    rows = bleu_by_length(sources, outputs, references, samples=30)
    assert sum(row["sentences"] for row in rows) == len(pairs) and len(rows) > 2
    for row in rows:
        low, _, high = row["words"].rstrip("+").partition("–")
        inside = [int(low) <= len(source.split()) <= int(high or 99) for source in sources]
        chosen = [itertools.compress(texts, inside) for texts in (outputs, references)]
        assert row["bleu"] == round(corpus_bleu(*map(list, chosen)).score, 2)
        assert row["low"] <= row["bleu"] <= row["high"]


def test_recall_by_frequency_on_a_hand_made_example():
    training = ["Cat cat. CAT", "rare", *["the"] * 120, *["often"] * 10]
    references = ["The cat, the rare cat!", "Often the unseen."]
    outputs = ["the the the cat", "the unseen, unseen often"]
    rows = {row["frequency"]: row for row in recall_by_frequency(outputs, references, training)}
    counts = {name: (row["found"], row["words"]) for name, row in rows.items()}
    assert counts == {"0": (1, 1), "1–2": (0, 1), "3–9": (1, 2), "10–99": (1, 1), "100+": (3, 3)}
    assert rows["3–9"]["recall"] == 0.5


def test_ranking_anew_equals_searching_anew(weak, pairs):
    rows = [[EOS], *(source_ids(source, weak.tokenizer) for source, _ in pairs[:8])]
    alphas = (0.0, 0.4, 1.4)
    best = searched(weak, rows, [4], alphas)
    for alpha in alphas:
        anew = decode_hypotheses(weak, rows, DecodeOptions(beam=4, alpha=alpha))
        assert [h.ids for h in best[4, alpha]] == [some[0].ids if some else () for some in anew]
        assert texts_of(weak, best[4, alpha])[0] == ""  # nothing in, nothing out
    assert best[4, 0.0] != best[4, 1.4]


def test_the_record_is_of_the_model_that_ships():
    """Its weights, and what it writes for the quoted sentences."""
    record = load_record("decoding-multi30k")
    folder = ROOT / "models" / record["model"]
    assert record["weights_sha256"] == sha256(folder / "model.safetensors")
    quoted = record["worst"][:QUOTED]
    sources = [row["source"] for row in quoted]
    outputs = translate(load_model(folder), sources, DecodeOptions(beam=5))
    same = sum(output == row["output"] for output, row in zip(outputs, quoted, strict=True))
    assert same >= len(quoted) - 1  # another machine may round one near-tie the other way
