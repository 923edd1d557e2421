"""Chapter 8: searches against brute force, the cache, the study; the commands with bad input."""

import dataclasses
import functools
import importlib
import itertools
import math
import os

import pytest
import torch
from bruteforce import every_hypothesis, forced_log_probs
from histories import history_gap
from sacrebleu.metrics import CHRF

from scripts import ROOT
from scripts.book.instruments import scramble
from scripts.book.phrases import PhraseBook, every_sentence
from scripts.book.records import load_record, sha256
from scripts.ch01_attention import padding_mask
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, EOS, PAD, greedy_decode
from scripts.ch07_multi30k import BPETokenizer, pad_rows, source_ids
from scripts.ch08_decoding import (
    NEXT_WORD,
    CopiedCache,
    beam_by_hand,
    beam_search,
    drawer,
    dropout_off,
    hypothesis,
    keep_top,
    mbr_choice,
    next_log_probs,
    plain_translate,
    sentence_chrf,
    sharpened,
    until_end,
    write_one_by_one,
    wrong_greedy,
)
from scripts.core.models import STUDIED, Trained, load_model, save_model
from scripts.core.scores import corpus_bleu
from scripts.core.settings import TrainConfig, build_model
from scripts.corpora.load import load_corpus
from scripts.corpora.sample import sample_corpus
from scripts.fast import searching
from scripts.fast.searching import cached_beam_search, cached_sample
from scripts.fast.translating import (
    DecodeOptions,
    decode_hypotheses,
    decode_texts,
    fast_translate,
    translate,
)
from scripts.studies import searches

VOCAB = 6  # the four special ids and two more: small enough to write down all that can be said


def tiny_model(vocab: int = VOCAB, seed: int = 0, dropout: float = 0.0):
    """An untrained model whose distributions are far from flat."""
    torch.manual_seed(seed)
    model = make_model(vocab, vocab, N=1, d_model=16, d_ff=32, h=2, dropout=dropout)
    with torch.no_grad():
        model.generator.proj.weight.mul_(6)
    return model.double().eval()


@pytest.fixture(scope="module")
def sources() -> torch.Tensor:
    return pad_rows([[4, 5, 4, EOS], [5, EOS], [4, 4, 5, 5, 4, EOS]])  # (3, 6)


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    return sample_corpus()["val"]


@pytest.fixture(scope="module")
def trained(lines) -> Trained:
    """An untrained translator with dropout: what matters here is how it is called."""
    tokenizer = BPETokenizer.train((line for pair in lines for line in pair), 300)
    config = TrainConfig(corpus="sample", layers=1, d_model=32, d_ff=32, heads=2, dropout=0.3)
    torch.manual_seed(3)
    return Trained(build_model(config, len(tokenizer)).eval(), tokenizer, config)


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, trained)
    return path


# Searching


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy_decoding(seed, sources):
    model = tiny_model(40, seed)
    mask = padding_mask(sources)
    found = beam_search(model, sources, mask, max_len=12, beam=1)
    for hypotheses, row in zip(
        found, greedy_decode(model, sources, mask, 12).tolist(), strict=True
    ):
        expected = row[: row.index(EOS)] if EOS in row else row
        assert len(hypotheses) == 1 and list(hypotheses[0].ids) == expected


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_wide_beam_finds_what_brute_force_finds(alpha):
    model, src = tiny_model(), torch.tensor([[4, 5, 4, EOS]])
    everything = every_hypothesis(model, src, VOCAB, max_len=3)
    assert math.isclose(sum(math.exp(h.log_prob) for h in everything), 1.0, rel_tol=1e-9)
    best = sorted(everything, key=lambda h: -h.score(alpha))
    found = beam_search(model, src, None, max_len=3, beam=VOCAB**3, alpha=alpha)[0]
    assert [h.ids for h in found] == [h.ids for h in best]
    for ours, theirs in zip(found, best, strict=True):
        assert math.isclose(ours.log_prob, theirs.log_prob, rel_tol=1e-9)
        assert ours.length == theirs.length


@pytest.mark.parametrize("beam", [1, 2, 3, 8])
def test_each_score_is_that_of_its_text(beam, sources):
    model = tiny_model(30, seed=7)
    for src, found in zip(
        sources, beam_search(model, sources, padding_mask(sources), 10, beam), strict=True
    ):
        assert len(found) == beam
        assert [h.score(0.6) for h in found] == sorted((h.score(0.6) for h in found), reverse=True)
        for h in found:
            scored = [*h.ids, EOS][: h.length]
            alone = src[src != PAD].unsqueeze(0)
            forced = forced_log_probs(model, alone, torch.tensor([scored])).item()
            assert math.isclose(forced, h.log_prob, rel_tol=1e-9)


def test_a_batch_gives_what_each_sentence_gives_alone(sources):
    model = tiny_model(30, seed=1)
    together = beam_search(model, sources, padding_mask(sources), 10, beam=3)
    for src, found in zip(sources, together, strict=True):
        alone = beam_search(model, src[src != PAD].unsqueeze(0), None, 10, beam=3)[0]
        assert [h.ids for h in alone] == [h.ids for h in found]


@pytest.mark.parametrize("beam", [1, 2, 3, 4])
def test_tensors_search_as_the_plain_python_does(beam):
    book = PhraseBook(NEXT_WORD)
    by_hand, _ = beam_by_hand(NEXT_WORD, beam)
    found = beam_search(book, torch.tensor([[EOS]]), None, 10, beam, alpha=0.0)[0]
    assert [book.text(h.ids) for h in found] == [" ".join(words[:-1]) for words, _ in by_hand]
    for h, (_, p) in zip(found, by_hand, strict=True):
        assert math.isclose(math.exp(h.log_prob), p, rel_tol=1e-9)


def test_a_beam_that_keeps_only_the_best_k_loses_its_way():
    """With only K candidates kept, one that ends costs a prefix: here "b", the better one."""
    table = {
        "<s>": {"</s>": 0.5, "a": 0.3, "b": 0.2},
        "a": {"</s>": 0.1, "x": 0.3, "y": 0.3, "z": 0.3},
        "b": {"x": 1.0},
    }
    book = PhraseBook(table)
    found = beam_search(book, torch.tensor([[EOS]]), None, 5, beam=2, alpha=0.0)[0]
    assert [book.text(h.ids) for h in found] == ["", "b x"]


def test_the_length_limit_holds_and_a_beam_needs_room(sources):
    model = tiny_model(30)
    for limit in (1, 2, 5):
        for found in beam_search(model, sources, padding_mask(sources), limit, beam=3):
            assert found and all(h.length <= limit for h in found)
    with pytest.raises(ValueError, match="at least 1"):
        beam_search(model, sources, None, 5, beam=0)


# Sampling


def test_sampling_follows_the_sharpened_distribution():
    book, src = PhraseBook(NEXT_WORD), torch.full((20_000, 1), EOS)
    ids, _ = write_one_by_one(book, src, 1, drawer(0.5, generator=torch.Generator().manual_seed(0)))
    drawn = torch.bincount(ids[:, 0], minlength=len(book.words)) / len(src)  # (V,)
    squared = book.log_table[BOS].exp() ** 2  # p^(1/T) with T = 1/2, not yet a distribution
    torch.testing.assert_close(drawn.double(), squared / squared.sum(), atol=0.012, rtol=0)
    assert not torch.allclose(drawn.double(), book.log_table[BOS].exp(), atol=0.03)  # T = 1 differs


def test_draws_from_the_phrase_book_come_with_its_probabilities():
    book, many = PhraseBook(NEXT_WORD), torch.full((5_000, 1), EOS)
    probability = {" ".join(words): p for words, p in every_sentence(NEXT_WORD)}
    draw = drawer(generator=torch.Generator().manual_seed(0))
    ids, log_probs = write_one_by_one(book, many, 10, draw)
    drawn = [book.text(until_end(row)) for row in ids.tolist()]
    shares = {text: drawn.count(text) / len(drawn) for text in probability}
    assert max(abs(shares[text] - p) for text, p in probability.items()) < 0.025
    assert math.isclose(log_probs[0].exp(), probability[drawn[0]])


def test_a_low_temperature_or_a_single_choice_is_greedy(sources):
    model = tiny_model(30, seed=2)
    mask = padding_mask(sources)
    greedy = greedy_decode(model, sources, mask, 10)
    for how in ({"temperature": 1e-300}, {"top_k": 1}, {"temperature": 5.0, "top_k": 1}):
        assert torch.equal(cached_sample(model, sources, mask, 10, **how)[0], greedy)


def test_top_k_keeps_exactly_k():
    flat = torch.zeros(2, 5)  # ties: a threshold would keep all five
    assert torch.equal(keep_top(flat, 2).isfinite().sum(dim=1), torch.tensor([2, 2]))
    p = sharpened(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 1.0, top_k=2)
    torch.testing.assert_close(p, torch.tensor([[0, 0, 1, math.e]]).double() / (1 + math.e))
    assert torch.equal(sharpened(p, 1.0, top_k=0, top_p=1.0), sharpened(p, 1.0))  # both off
    assert sharpened(p, 0.0).tolist() == [[0, 0, 0, 1]]  # the limit of small temperatures
    for bad in ({"temperature": -1}, {"temperature": math.nan}, {"temperature": 1, "top_k": -1}):
        with pytest.raises(ValueError):
            sharpened(flat, **bad)


def test_samples_repeat_with_their_seed(trained, lines):
    """On any number of threads, too."""
    texts = [source for source, _ in lines[:5]]

    def drawn(seed: int, threads: int) -> list[str]:
        torch.set_num_threads(threads)
        return translate(trained, texts, DecodeOptions(sample=True, seed=seed))

    assert drawn(1, 1) == drawn(1, 2) == drawn(1, 2) != drawn(2, 1)


# What the well-known page gets wrong


def test_erratum_15_decoders_switch_dropout_off(trained, lines):
    texts = [source for source, _ in lines[:4]]
    calm = translate(trained, texts)
    greedy = translate(trained, texts, DecodeOptions(beam=1))
    trained.model.train()
    try:
        for seed in range(3):
            torch.manual_seed(seed)
            assert translate(trained, texts) == calm
            assert translate(trained, texts, DecodeOptions(beam=1)) == greedy
            assert plain_translate(trained, texts) == greedy
        assert trained.model.training and all(part.training for part in trained.model.modules())
        wrong = []
        for seed in range(3):
            torch.manual_seed(seed)
            rows = [torch.tensor([source_ids(text, trained.tokenizer)]) for text in texts]
            wrong.append(str([wrong_greedy(trained.model, row, 40) for row in rows]))
        assert len(set(wrong)) > 1  # the same sentences, but different answers
    finally:
        trained.model.eval()


def test_dropout_comes_back_after_an_error(trained):
    trained.model.train()
    try:
        with pytest.raises(RuntimeError), dropout_off(trained.model):
            assert not trained.model.training
            raise RuntimeError
        assert all(part.training for part in trained.model.modules())
    finally:
        trained.model.eval()


def test_erratum_17_greedy_is_batched_and_stops():
    book = PhraseBook(NEXT_WORD)
    src = torch.full((7, 1), EOS)
    ours = greedy_decode(book, src, None, max_len=30)
    assert ours.shape == (7, 4)  # a sentence of three words and eos, then it stops
    assert (ours[:, -1] == EOS).all() and (ours[:, :-1] != EOS).all()
    wrong = torch.cat([wrong_greedy(book, row.unsqueeze(0), 30) for row in src])
    assert torch.equal(wrong[:, :4], ours) and wrong.shape == (7, 30)
    assert (wrong[:, 4:] == EOS).all()  # 26 tokens too many, and separate calls for each row


# Minimum Bayes risk


@functools.cache
def utility(text, other):
    return sentence_chrf(text, other)


def test_minimum_bayes_risk_is_brute_force_over_all_sentences():
    sentences = [(" ".join(words[:-1]), p) for words, p in every_sentence(NEXT_WORD)]
    expected = {t: sum(p * utility(t, o) for o, p in sentences) for t, _ in sentences}
    copies = [text for text, p in sentences for _ in range(round(10_000 * p))]
    assert mbr_choice(copies, utility) == max(expected, key=expected.get) == "the dog is sleeping"


def test_what_was_drawn_twice_counts_twice():
    same = lambda a, b: float(a == b)  # noqa: E731
    assert mbr_choice(["a", "b", "b", "c"], same) == "b"
    one_way = lambda a, b: float((a, b) == ("long", "short"))  # noqa: E731
    assert mbr_choice(["short", "long"], one_way) == "long"  # the other is the reference


# The cache


def test_one_token_at_a_time_with_the_cache_is_greedy_decoding(sources):
    model, mask = tiny_model(30, seed=4), padding_mask(sources)
    with torch.no_grad():
        found, _ = write_one_by_one(
            CopiedCache(model, sources, mask),
            sources,
            12,
            lambda decoding, x: (decoding.logits(x).argmax(dim=-1), None),
        )
    assert torch.equal(found, greedy_decode(model, sources, mask, 12))


def test_a_phrase_book_is_its_own_decoding_in_progress():
    book, tgt = PhraseBook(NEXT_WORD), torch.tensor([[2, 4], [2, 6]])
    last = book.decode(book.encode(tgt), None, tgt)[:, -1]
    assert torch.equal(book.logits(book.step(tgt[:, -1:])), last)


def test_a_cache_grows_by_one_position_a_step():
    model = small_model()
    src = pad_rows([[4, 5, EOS], [6, EOS]])
    with torch.no_grad():
        cache = CopiedCache(model, src, padding_mask(src))
        for step in range(1, 5):
            cache.step(torch.full((2, 1), BOS))
            assert cache.past.shape == (2, 2, 2, 2, step, 8)
            assert cache.cross.shape == (2, 2, 2, 2, 3, 8)


class MixedFamilies(CopiedCache):
    """Mistakes a prefix's number for a row's."""

    def follow(self, origin):
        self.copy_rows(origin.flatten())


class MaskStays(CopiedCache):
    """Drops a sentence but keeps its mask."""

    def keep(self, rows):
        mask = self.src_mask
        super().keep(rows)
        self.src_mask = mask[: len(self.src_mask)]


def small_model(seed=1):
    torch.manual_seed(seed)
    model = make_model(9, 9, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).double().eval()
    scramble(model, seed, 0.3)
    return model


@pytest.mark.parametrize("kind", [MixedFamilies, MaskStays])
def test_a_wrong_cache_shows_along_a_history(kind):
    model = small_model()
    assert history_gap(model) < 1e-11 and history_gap(model, kind) > 1e-3


def test_the_copied_cache_serves_the_search(monkeypatch):
    """A beam search finds the same texts with it."""
    model, src = small_model(), pad_rows([[4, 5, 6, EOS], [5, EOS], [6, 6, EOS]])
    wanted = beam_search(model, src, padding_mask(src), 12, 3, 0.6)
    monkeypatch.setattr(searching, "CachedDecoding", CopiedCache)
    found = cached_beam_search(model, src, padding_mask(src), 12, 3, 0.6)
    assert [[h.ids for h in hs] for hs in found] == [[h.ids for h in hs] for hs in wanted]


# The study


@pytest.fixture(scope="module")
def shipped():
    return load_model(ROOT / "models" / "sample-de-en")


def test_the_empty_output_is_scored_as_a_search_would(shipped):
    rows = [[5, 6, 7, EOS], [8, EOS], [9, 10, EOS]]
    found = searches.empty_log_probs(shipped, rows, size=2)
    for row, log_prob in zip(rows, found, strict=True):
        memory = shipped.model.encode(torch.tensor([row]), None)
        alone = next_log_probs(shipped.model, memory, None, torch.tensor([[BOS]]))[0, EOS].item()
        assert math.isclose(alone, log_prob, rel_tol=1e-4)


def test_a_seed_decides_what_is_drawn_on_any_number_of_threads(shipped):
    rows, drawn = [[5, 6, 7, EOS], [8, 9, EOS]], []
    for count in (1, 2):
        torch.set_num_threads(count)
        drawn.append(searches.drawn_texts(shipped, rows, range(3), temperature=1.0))
    assert drawn[0] == drawn[1] and len(set(map(tuple, drawn[0]))) == 3


def test_the_ranking_is_by_the_penalty(monkeypatch):
    short, long = hypothesis([4, EOS], -1.0), hypothesis([4, 5, 6, EOS], -1.5)
    monkeypatch.setattr(searches, "decode_hypotheses", lambda *_, nbest: [[short, long], []])
    found = searches.searched(None, [], [5], [0.0, 1.0])
    assert [found[5, alpha][0] for alpha in (0.0, 1.0)] == [short, long]
    assert found[5, 0.0][1].ids == ()


@pytest.fixture(scope="module")
def record():
    return load_record("searches-multi30k")


def test_the_record_is_of_the_model_that_ships(record):
    assert record["weights_sha256"] == sha256(STUDIED / "model.safetensors")
    assert record["split"] == "val" and "+changes" not in record["commit"]
    module, *options = record["repeat"].removeprefix("python -m ").split()
    assert module == searches.__name__ and searches.main.parse(options).save
    assert searches.main.parse(options).sentences == record["sentences"]


def test_the_record_holds_what_the_chapter_reads(record):
    assert [row["beam"] for row in record["beams"]] == [b for b in searches.BEAMS for _ in (0, 1)]
    wide = [row["log_prob"] for row in record["beams"] if row["alpha"] == 0]
    assert all(b > a - 0.05 for a, b in itertools.pairwise(wide))
    assert [row["samples"] for row in record["mbr"]] == list(searches.CANDIDATES)
    texts = [value for value in record["example"].values() if isinstance(value, str)]
    assert len(texts) <= 3


def test_the_record_says_what_the_chapter_says(record):
    """The figures in the chapter's prose."""
    plain, normed = ({r["beam"]: r for r in record["beams"] if r["alpha"] == a} for a in (0, 0.6))
    assert 0.5 < plain[5]["bleu"] - plain[100]["bleu"] < 0.6
    assert max(normed.values(), key=lambda row: row["bleu"])["beam"] == 100
    assert round(plain[5]["log_prob"]) == round(plain[100]["log_prob"]) == -5
    assert round(math.log(0.1 / 8192), 1) == -11.3 and plain[100]["empty_likelier"] == 0.03
    losses = [plain[1]["bleu"] - row["bleu"] for row in record["sampling"]]  # against greedy
    assert min(losses) > 0 and round(losses[-1]) == 14 and 8 < losses[-2] < 8.1
    votes = record["mbr"][-1]
    assert 0.3 < votes["bleu"] - normed[5]["bleu"] < 0.4 and votes["samples"] == 32
    assert round(votes["chrf2"] - normed[5]["chrf2"], 1) == 1.3


@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
def test_the_quoted_caption_is_the_one_on_record(record):
    source, reference = load_corpus("multi30k")["val"][record["example"]["line"] - 1]
    chapter = (ROOT / "scripts" / "ch08_decoding.py").read_text(encoding="utf-8")
    assert f"# - source: *{source}*\n# - reference: *{reference}*\n" in chapter


# Translating


def test_order_is_kept_and_empty_stays_empty(trained, lines):
    texts = [source for source, _ in lines[:6]]
    mixed = [texts[0], "", *texts[1:3], "  \t", *texts[3:], "\u3000"]
    out = translate(trained, mixed, DecodeOptions(beam=2))
    assert out[1] == out[4] == out[8] == ""
    alone = translate(trained, texts, DecodeOptions(beam=2))
    assert [t for i, t in enumerate(out) if i not in (1, 4, 8)] == alone
    assert translate(trained, []) == []


def test_the_fast_searches_find_what_the_plain_ones_find(trained, lines):
    texts = [source for source, _ in lines[:20]]
    torch.set_num_threads(1)  # one batch: this model never stops, so the batch limits its texts
    assert translate(trained, texts, DecodeOptions(beam=1)) == plain_translate(trained, texts)
    by_beam = fast_translate(trained, texts, beam=3, alpha=0.8)
    assert by_beam == plain_translate(trained, texts, beam=3, alpha=0.8)


def test_a_text_that_is_too_long_is_refused(trained):
    with pytest.raises(ValueError, match="sentence 2 has .* takes 256"):
        translate(trained, ["Ein Hund.", "Hund " * 10_000])


# The command


def command(name: str, *argv: str, capsys) -> tuple[int, list[str], str]:
    """Exit code, lines of output, and what went to standard error."""
    code = importlib.import_module(f"scripts.{name}").main(argv)
    captured = capsys.readouterr()
    return code, captured.out.split("\n")[:-1], captured.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["evaluate", "sing"], "unrecognized"),
        (["export", "x", "y"], "unrecognized"),
        (["translate", "x", "--volume", "11"], "unrecognized"),
        (["translate", "x", "--beam", "0"], "beam must be from 1"),
        (["translate", "x", "--beam", "many"], "beam"),
        (["translate", "x", "--alpha", "nan"], "alpha"),
        (["translate", "x", "--alpha", "0,6"], "with a decimal point"),
        (["translate", "-5 Grad", "-Hund"], "put -- before it"),
        (["translate", "-heute"], "put -- before it"),
        (["translate", "x", "--top_k", "3"], "add --sample"),
        (["translate", "x", "--sample", "--seed", "-1"], "seed"),
        (["translate", "x", "--model", "no/such/folder"], "no config.json"),
        (["translate", "x", "--device", "abacus"], "unknown device"),
        (["evaluate", "--split", "none"], "choose from train"),
        (["evaluate", "--corpus", "bible"], "--corpus must be sample or multi30k, not bible"),
    ],
)
def test_bad_commands_get_one_line(argv, says, folder, capsys):
    if "--model" not in argv:
        argv = [*argv, "--model", str(folder)]
    code, out, err = command(*argv, capsys=capsys)
    assert (code, out) == (2, [])
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_evaluate_scores_with_a_signature(folder, trained, lines, monkeypatch, capsys):
    pairs = lines[:12]
    monkeypatch.setattr("scripts.evaluate.load_corpus", lambda name: {"val": [], "test": pairs})
    given = ("--model", str(folder), "--beam", "1")
    code, out, _ = command("evaluate", *given, capsys=capsys)
    outputs = translate(trained, [s for s, _ in pairs], DecodeOptions(beam=1))
    score = corpus_bleu(outputs, [t for _, t in pairs])
    assert code == 0 and out[0].startswith(
        f"test: BLEU {score.score:.2f}  greedy  ({score.signature})"
    )
    references = [t for _, t in pairs]
    lower = corpus_bleu(outputs, references, lowercase=True)
    assert out[1] == f"test: lower-cased BLEU {lower.score:.2f}  ({lower.signature})"
    chrf = CHRF()
    letters = chrf.corpus_score(outputs, [references]).score
    assert out[2] == f"test: chrF2 {letters:.2f}  ({chrf.get_signature()})"
    assert "case:lc" in out[1] and "nc:6" in out[2]
    assert f"  reference    {pairs[0][1]}" in out


def test_evaluate_compares_two_models_text_by_text(folder, lines, monkeypatch, capsys):
    """With itself a model has no difference; with another, chapter 10's, our BLEU minus theirs."""
    pairs, other = lines[:12], ROOT / "models" / "sample-de-en"
    monkeypatch.setattr("scripts.evaluate.load_corpus", lambda name: {"val": [], "test": pairs})
    given = ("--model", str(folder), "--beam", "1", "--against")
    _, out, _ = command("evaluate", *given, str(folder), capsys=capsys)
    chance = "(95% of draws: +0.00 to +0.00; p = 1.0000)"
    assert out[3] == f"test: +0.00 BLEU against {folder}  greedy  {chance}"
    code, out, _ = command("evaluate", *given, str(other), capsys=capsys)
    sources, references = zip(*pairs, strict=True)
    both = [
        translate(load_model(one, "cpu"), sources, DecodeOptions(beam=1)) for one in (folder, other)
    ]
    ours, theirs = (corpus_bleu(texts, references).score for texts in both)
    assert code == 0 and ours < theirs
    assert out[3].startswith(f"test: {ours - theirs:+.2f} BLEU against {other}  greedy  (")


def test_a_model_brings_its_own_search(shipped):
    config = dataclasses.replace(shipped.config, beam=5, alpha=3.0)
    own = dataclasses.replace(shipped, config=config)
    texts = [source for source, _ in sample_corpus()["val"][:40]]
    by_itself = decode_hypotheses(
        own, rows := [source_ids(text, own.tokenizer) for text in texts], DecodeOptions(), nbest=4
    )
    told = DecodeOptions(beam=5, alpha=3.0)
    assert by_itself == decode_hypotheses(shipped, rows, told, nbest=4)
    assert by_itself != decode_hypotheses(shipped, rows, DecodeOptions(beam=5), nbest=4)
    assert decode_texts(own, rows, DecodeOptions()) == decode_texts(shipped, rows, told)
    assert DecodeOptions().of(own).in_words() == "beam 5, alpha 3"
    assert DecodeOptions(beam=2, alpha=0.0).of(own) == DecodeOptions(beam=2, alpha=0.0)
    assert DecodeOptions().of(shipped).in_words() == "greedy"  # as its card says


def test_options_are_checked_in_python_too():
    assert DecodeOptions(4, 0.6).in_words() == "beam 4, alpha 0.6"
    assert DecodeOptions(4, 0.6, exact=True).in_words() == "beam 4, alpha 0.6, exact stop"
    assert dataclasses.replace(DecodeOptions(), beam=1).in_words() == "greedy"
    with pytest.raises(ValueError, match="beam"):
        DecodeOptions(beam=0)
