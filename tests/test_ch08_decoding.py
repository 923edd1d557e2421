"""Chapter 8: searches against brute force, draws, the cache, the record; `evaluate`."""

import dataclasses
import functools
import math
import os

import pytest
import torch
from bruteforce import every_hypothesis, forced_log_probs
from sacrebleu.metrics import CHRF

from scripts import ROOT, evaluate
from scripts.book.phrases import PhraseBook, every_sentence
from scripts.book.records import load_record, sha256
from scripts.ch01_attention import padding_mask
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, EOS, PAD, greedy_decode
from scripts.ch07_multi30k import BPETokenizer, pad_rows, source_ids
from scripts.ch08_decoding import (
    NEXT_WORD,
    CopiedCache,
    beam_search,
    drawer,
    dropout_off,
    greedy_choice,
    hypothesis,
    keep_top,
    mbr_choice,
    next_log_probs,
    plain_translate,
    sentence_chrf,
    sharpened,
    texts_by_cache,
    until_end,
    write_one_by_one,
)
from scripts.core.models import STUDIED, Trained, load_model, save_model
from scripts.core.scores import corpus_bleu
from scripts.core.settings import TrainConfig, build_model
from scripts.corpora.load import load_corpus
from scripts.fast.translating import DecodeOptions, decode_hypotheses, fast_translate, translate
from scripts.studies import searches

VOCAB = 6  # the four special ids and two more: small enough to write down all that can be said
SOURCES = pad_rows([[4, 5, 4, EOS], [5, EOS], [4, 4, 5, 5, 4, EOS]])  # (3, 6)
MASK = padding_mask(SOURCES)
BOOK, ANYTHING = PhraseBook(NEXT_WORD), torch.tensor([[EOS]])
SHIPPED = ROOT / "models" / "sample-de-en"


def tiny_model(vocab: int = VOCAB, seed: int = 0):
    """An untrained model whose distributions are far from flat."""
    torch.manual_seed(seed)
    model = make_model(vocab, vocab, N=1, d_model=16, d_ff=32, h=2, dropout=0.0)
    with torch.no_grad():
        model.generator.proj.weight.mul_(6)
    return model.double().eval()


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    return load_corpus("sample")["val"]


@pytest.fixture(scope="module")
def untrained(lines) -> Trained:
    """A translator with dropout: what matters here is how it is called."""
    tokenizer = BPETokenizer.train((line for pair in lines for line in pair), 300)
    config = TrainConfig(corpus="sample", layers=1, d_model=32, d_ff=32, heads=2, dropout=0.3)
    torch.manual_seed(3)
    return Trained(build_model(config, len(tokenizer)).eval(), tokenizer, config)


# Searching


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_wide_beam_finds_what_brute_force_finds(alpha):
    model, src = tiny_model(), torch.tensor([[4, 5, 4, EOS]])
    everything = every_hypothesis(model, src, VOCAB, max_len=3)
    assert math.isclose(sum(math.exp(h.log_prob) for h in everything), 1.0, rel_tol=1e-9)
    ranked = sorted(everything, key=lambda h: -h.log_prob / h.length**alpha)
    beam = beam_search(model, src, None, max_len=3, beam=VOCAB**3, alpha=alpha)[0]
    assert [(h.ids, h.length) for h in beam] == [(h.ids, h.length) for h in ranked]
    log_probs = [h.log_prob for h in ranked]
    assert [h.log_prob for h in beam] == pytest.approx(log_probs, rel=1e-9)


@pytest.mark.parametrize("beam", [1, 3, 8])
def test_each_score_is_that_of_its_text_and_a_batch_changes_nothing(beam):
    model = tiny_model(30, seed=7)
    together = beam_search(model, SOURCES, MASK, 10, beam)
    for src, hypotheses in zip(SOURCES, together, strict=True):
        alone = src[src != PAD].unsqueeze(0)  # without padding
        scores = [h.score(0.6) for h in hypotheses]
        assert len(scores) == beam and scores == sorted(scores, reverse=True)
        for h in hypotheses:
            scored = torch.tensor([[*h.ids, EOS][: h.length]])
            forced = forced_log_probs(model, alone, scored).item()
            assert h.length <= 10 and math.isclose(forced, h.log_prob, rel_tol=1e-9)
        by_itself = beam_search(model, alone, None, 10, beam)[0]
        assert [h.ids for h in by_itself] == [h.ids for h in hypotheses]


# Sampling


def test_sampling_follows_the_sharpened_distribution():
    src = ANYTHING.expand(20_000, 1)
    ids, _ = write_one_by_one(
        BOOK.step, src, 1, drawer(0.5, generator=torch.Generator().manual_seed(0))
    )
    drawn = torch.bincount(ids[:, 0], minlength=len(BOOK.words)) / len(src)  # (V,)
    squared = BOOK.log_table[BOS].exp() ** 2  # p^(1/T) with T = 1/2, not yet a distribution
    torch.testing.assert_close(drawn.double(), squared / squared.sum(), atol=0.012, rtol=0)


def test_what_is_left_to_draw_from():
    flat = torch.zeros(2, 5)  # ties: a threshold would keep all five
    assert keep_top(flat, 2).isfinite().sum(dim=1).tolist() == [2, 2]
    p = sharpened(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 1.0)
    for temperature in (0.0, 1e-300):  # the limit of small temperatures
        assert sharpened(p, temperature).tolist() == [[0, 0, 0, 1]]
    for bad in ({"temperature": -1}, {"temperature": 1, "top_k": -1}):
        with pytest.raises(ValueError):
            sharpened(flat, **bad)


# What the well-known page gets wrong


def test_erratum_15_decoders_switch_dropout_off(untrained, lines):
    texts = [source for source, _ in lines[:2]]
    calm, greedy = fast_translate(untrained, texts, beam=2), plain_translate(untrained, texts)
    untrained.model.train()
    try:
        assert fast_translate(untrained, texts, beam=2) == calm
        assert plain_translate(untrained, texts) == greedy
        with pytest.raises(RuntimeError), dropout_off(untrained.model):
            assert not untrained.model.training
            raise RuntimeError
        assert all(part.training for part in untrained.model.modules())  # it comes back
        wrong = {str(texts_by_cache(untrained, texts, greedy_choice)) for _ in range(3)}
        assert len(wrong) > 1  # the same sentence, but different answers
    finally:
        untrained.model.eval()


def test_erratum_17_greedy_is_batched_and_stops():
    src = ANYTHING.expand(7, 1)
    ours = greedy_decode(BOOK, src, None, max_len=30)
    assert ours.shape == (7, 4)  # a sentence of three words and eos, then it stops
    assert (ours[:, -1] == EOS).all() and (ours[:, :-1] != EOS).all()


# Minimum Bayes risk


def test_minimum_bayes_risk_is_brute_force_over_all_sentences():
    utility = functools.cache(sentence_chrf)
    sentences = [(" ".join(words[:-1]), p) for words, p in every_sentence(NEXT_WORD)]
    expected = {t: sum(p * utility(t, o) for o, p in sentences) for t, _ in sentences}
    copies = [text for text, p in sentences for _ in range(round(10_000 * p))]
    assert mbr_choice(copies, utility) == max(expected, key=expected.get) == "the dog is sleeping"


# The cache


def test_one_token_at_a_time_with_the_cache_is_greedy_decoding():
    model = tiny_model(30, seed=18)  # its texts end at different times
    with torch.no_grad():
        cache = CopiedCache(model, SOURCES, MASK)
        written, log_probs = write_one_by_one(cache.step, SOURCES, 12, greedy_choice)
    assert torch.equal(written, greedy_decode(model, SOURCES, MASK, 12)) and (written == PAD).any()
    for src, row, log_prob in zip(SOURCES, written.tolist(), log_probs.tolist(), strict=True):
        text = torch.tensor([until_end(row)])
        forced = forced_log_probs(model, src[src != PAD].unsqueeze(0), text)
        assert math.isclose(forced.item(), log_prob, rel_tol=1e-9)


# The record


def test_the_study_scores_the_empty_output_and_ranks_by_the_penalty(monkeypatch):
    shipped = load_model(SHIPPED)
    rows = [[5, 6, 7, EOS], [8, EOS], [9, 10, EOS]]
    for row, log_prob in zip(rows, searches.empty_log_probs(shipped, rows, size=2), strict=True):
        memory = shipped.model.encode(torch.tensor([row]), None)
        alone = next_log_probs(shipped.model, memory, None, torch.tensor([[BOS]]))[0, EOS].item()
        assert math.isclose(alone, log_prob, rel_tol=1e-4)
    short, long = hypothesis([4, EOS], -1.0), hypothesis([4, 5, 6, EOS], -1.5)
    monkeypatch.setattr(searches, "decode_hypotheses", lambda *_, nbest: [[short, long], []])
    best = searches.searched(None, [], [5], [0.0, 1.0])
    assert [best[5, alpha][0] for alpha in (0.0, 1.0)] == [short, long]
    assert best[5, 0.0][1].ids == ()


def test_the_record_is_of_the_shipped_model_and_the_chapter_quotes_its_example():
    record = load_record("searches-multi30k")
    choices = load_record("choices-multi30k")
    shipped = sha256(STUDIED / "model.safetensors")
    assert record["weights_sha256"] == choices["weights_sha256"] == shipped
    *_, log_p, per_token, vote = choices["choices"]
    assert log_p["highest"] < min(per_token["lowest"], vote["lowest"])
    plain, penalised = ([b for b in record["beams"] if b["alpha"] == a] for a in (0, 0.6))
    ratios = [b["length_ratio"] for b in plain]
    assert ratios == sorted(ratios, reverse=True)
    for score in ("bleu", "chrf2"):
        assert penalised[0][score] == min(b[score] for b in penalised)
    assert plain[2]["beam"] == 5 and plain[2]["empty_likelier"] == round(14 / 300, 4)
    if os.environ.get("MULTI30K_DIR"):
        source, _ = load_corpus("multi30k")["val"][record["example"]["line"] - 1]
        chapter = (ROOT / "scripts" / "ch08_decoding.py").read_text(encoding="utf-8")
        assert f"*{source.rstrip('.')}*" in chapter
        assert record["example"]["beam 100, alpha 0"] == '".'


@pytest.mark.audit
@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k")
def test_the_empty_text_wins_where_sources_are_long():
    """It beats a beam of 5 for 14 of 300: none in the shorter half, 12 in the longest quarter."""
    trained = load_model(STUDIED)
    sources, _ = zip(*load_corpus("multi30k")["val"][:300], strict=True)
    rows = sorted((source_ids(source, trained.tokenizer) for source in sources), key=len)
    best = searches.searched(trained, rows, [5], [0.0])[5, 0.0]
    empty = searches.empty_log_probs(trained, rows)
    likelier = [e > h.log_prob + 1e-4 for e, h in zip(empty, best, strict=True)]
    assert (sum(likelier[:150]), sum(likelier[150:225]), sum(likelier[225:])) == (0, 2, 12)


@pytest.mark.audit
@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k")
def test_dropout_left_on_costs_two_to_three_points():
    trained = load_model(STUDIED)
    pairs = sorted(load_corpus("multi30k")["val"][:300], key=lambda pair: len(pair[0]))
    sources, references = zip(*pairs, strict=True)

    def bleu() -> float:
        texts = [
            texts_by_cache(trained, sources[i : i + 100], greedy_choice) for i in (0, 100, 200)
        ]
        return corpus_bleu(sum(texts, []), references).score

    calm = bleu()
    trained.model.train()
    for seed in range(3):
        torch.manual_seed(seed)
        assert 1.5 < calm - bleu() < 3.5


# Translating


def test_order_is_kept_and_empty_stays_empty(lines):
    shipped = load_model(SHIPPED)
    mixed = [lines[0][0], "", lines[1][0], "  \t", lines[2][0], "\u3000"]
    alone = [plain_translate(shipped, [text], beam=2)[0] for text in mixed]
    assert alone[1::2] == [""] * 3
    assert plain_translate(shipped, mixed, beam=2) == alone
    assert translate(shipped, mixed, DecodeOptions(beam=2)) == alone
    with pytest.raises(ValueError, match="sentence 2 has .* takes 256"):
        translate(shipped, ["Ein Hund.", "Hund " * 10_000])


def test_a_model_brings_its_own_search(lines):
    shipped = load_model(SHIPPED)
    config = dataclasses.replace(shipped.config, beam=5, alpha=3.0)
    own = dataclasses.replace(shipped, config=config)
    rows = [source_ids(text, own.tokenizer) for text, _ in lines[:40]]
    by_itself = decode_hypotheses(own, rows, DecodeOptions(), nbest=4)
    assert by_itself == decode_hypotheses(shipped, rows, DecodeOptions(5, 3.0), nbest=4)
    assert by_itself != decode_hypotheses(shipped, rows, DecodeOptions(5), nbest=4)
    assert DecodeOptions().of(own).in_words() == "beam 5, alpha 3"
    assert DecodeOptions(beam=2, alpha=0.0).of(own) == DecodeOptions(beam=2, alpha=0.0)
    assert DecodeOptions().of(shipped).in_words() == "greedy"  # as its card says


# The command `evaluate`


def test_evaluate_scores_and_compares_text_by_text(untrained, lines, monkeypatch, capsys, tmp_path):
    """With itself a model has no difference; with another, chapter 10's, our BLEU minus theirs."""
    save_model(tmp_path, untrained)
    pairs = lines[:12]
    sources, references = zip(*pairs, strict=True)
    monkeypatch.setattr(evaluate, "load_corpus", lambda *named: {"val": [], "test": pairs})

    def scored(against) -> list[str]:
        assert evaluate.main(["--model", str(tmp_path), "--beam=1", "--against", str(against)]) == 0
        return capsys.readouterr().out.split("\n")

    ours, theirs = (
        translate(load_model(folder, "cpu"), sources, DecodeOptions(beam=1))
        for folder in (tmp_path, SHIPPED)
    )
    cased, lower = (corpus_bleu(ours, references, lowercase=low) for low in (False, True))
    letters = CHRF().corpus_score(ours, [references]).score
    by_case, in_lower, by_letters, against, *samples = scored(tmp_path)
    assert by_case == f"test: BLEU {cased.score:.2f}  greedy  ({cased.signature})"
    assert in_lower == f"test: lower-cased BLEU {lower.score:.2f}  ({lower.signature})"
    assert by_letters.startswith(f"test: chrF2 {letters:.2f}  (")
    assert against.startswith("test: +0.00 BLEU against") and against.endswith("p = 1.0000)")
    assert f"  reference    {references[0]}" in samples
    difference = cased.score - corpus_bleu(theirs, references).score
    assert difference < 0
    assert scored(SHIPPED)[3].startswith(f"test: {difference:+.2f} BLEU against {SHIPPED}  greedy")
