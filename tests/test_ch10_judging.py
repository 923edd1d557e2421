"""Chapter 10's measures: BLEU, chrF, the significance test, the records."""

import math
import random

import numpy as np
import pytest
import torch

from scripts import ROOT
from scripts.book.records import load_record, sha256
from scripts.ch06_training import EOS
from scripts.ch07_multi30k import source_ids
from scripts.ch10_judging import (
    BleuParts,
    bleu_parts,
    lossy,
    paired_difference,
    sentence_parts,
    swapped_differences,
    tokens_13a,
)
from scripts.core.models import Trained, load_model
from scripts.core.scores import corpus_bleu
from scripts.corpora.load import load_corpus
from scripts.fast.translating import DecodeOptions, decode_hypotheses
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
        assert (ours.output_length, ours.reference_length) == (theirs.sys_len, theirs.ref_len)


def test_erratum_20_bleu_is_measured_on_whole_texts(pairs):
    references = [english for _, english in pairs[:50]]
    outputs = [english.lower().replace("gray", "grey") for english in references]
    ours = corpus_bleu(outputs, references)
    assert "case:mixed" in ours.signature and "tok:13a" in ours.signature
    wrong = corpus_bleu([o.lower() for o in outputs], [r.lower() for r in references])
    assert wrong.score > ours.score + 1  # a lower-cased figure overlooks the missing capitals


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
    counts = sentence_parts([first, second], references)
    ours = paired_difference(counts, tosses=60, draws=5, seed=7)
    rng = np.random.default_rng(7)
    drawn = rng.choice(12, size=(5, 12))  # the draws of the sentences come first
    tosses = rng.integers(2, size=(60, 12))

    def difference(one, other, references=references):
        return corpus_bleu(other, references).score - corpus_bleu(one, references).score

    swaps = [difference(*dealt(first, second, toss)) for toss in tosses]
    np.testing.assert_allclose(swapped_differences(counts, tosses), swaps, atol=1e-9)
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
        counts = sentence_parts([outputs, outputs], texts)
        itself = paired_difference(counts, tosses=50, draws=20)
        assert itself.p == 1.0 and itself.difference == itself.low == itself.high == 0
    with pytest.raises(ValueError, match="shorter|longer"):
        sentence_parts([texts, texts[1:]], texts)


# The study behind the record


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
    """Its weights, and what its scores are made of."""
    record = load_record("decoding-multi30k")
    searches = record["beam_against_greedy"]["sentence_parts"].values()
    sums = [sum(np.loadtxt(lines, dtype=int)).tolist() for lines in searches]
    scores = [BleuParts(s[:4], s[4:8], *s[8:]).score for s in sums]
    assert [round(score, 2) for score in scores] == [row["bleu"] for row in record["beams"]]
    folder = ROOT / "models" / record["model"]
    assert record["weights_sha256"] == sha256(folder / "model.safetensors")
