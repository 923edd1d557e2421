"""Chapter 7: words, subwords and batches, and the figures of Multi30k."""

import os
import random
import re
import socket
import unicodedata
from collections import Counter

import pytest
import torch

from scripts import ROOT
from scripts.book.records import load_record
from scripts.ch06_training import BOS, EOS, PAD, UNK
from scripts.ch07_multi30k import (
    SPECIALS,
    BPETokenizer,
    build_vocab,
    encode_pairs,
    merge_steps,
    padding_share,
    padding_table,
    source_ids,
    token_batches,
    unknown_rate,
    word_tokenizer,
)
from scripts.core.data import split_anew
from scripts.corpora.load import load_corpus
from scripts.studies.corpus import multi30k_facts


@pytest.fixture(scope="module")
def corpus():
    return load_corpus("sample")


@pytest.fixture(scope="module")
def bpe(corpus):
    return BPETokenizer.train([text for pair in corpus["train"] for text in pair], 300)


# Words and subwords


def test_erratum_18_vocabulary_of_the_training_split_alone(corpus):
    """A vocabulary that has seen the test split reports no unknown words, whatever the truth."""
    split = word_tokenizer("de")
    few, test = (
        [split(german) for german, _ in pairs] for pairs in (corpus["train"][:100], corpus["test"])
    )
    honest, leaky = build_vocab(few), build_vocab(few + test)
    known, counts = {w for words in few for w in words}, Counter(w for words in test for w in words)
    missing = sum(n for w, n in counts.items() if w not in known) / counts.total()
    assert [honest[name] for name in SPECIALS] == [PAD, UNK, BOS, EOS]
    assert unknown_rate(test, honest) == pytest.approx(missing) and missing > 0.05
    assert unknown_rate(test, leaky) == 0  # the wrong version
    assert [*build_vocab([["a", "a", "b"]], 2)][4:] == ["a"]


def test_erratum_27_no_download_for_tokenisers_and_sample(monkeypatch):
    """The sample corpus and both tokenisers need no network."""

    def refuse(*_, **__):
        raise AssertionError("something opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    word_tokenizer.cache_clear()
    assert word_tokenizer("de")("Der Mann, der lacht.") == ["Der", "Mann", ",", "der", "lacht", "."]
    assert word_tokenizer("en")("It doesn't matter.") == ["It", "does", "n't", "matter", "."]
    assert set(load_corpus("sample")) == {"train", "val", "test", "test_unseen"}


def test_bpe_ids_round_trip_and_files(bpe, corpus, tmp_path):
    assert [bpe.processor.id_to_piece(i) for i in range(4)] == list(SPECIALS) and len(bpe) == 300
    for text in (text for pair in corpus["test"][:50] for text in pair):
        assert bpe.decode(bpe.encode(text)) == text
        assert "".join(bpe.pieces(text)).replace("▁", " ").strip() == text
    ids = bpe.encode("Ein Hund.")
    assert bpe.decode(torch.tensor([BOS, *ids, PAD, EOS, *ids])) == "Ein Hund."
    assert UNK in bpe.encode("½") and PAD not in bpe.encode("½")  # as it would be by default
    bpe.save(tmp_path / "tokenizer.model")
    assert BPETokenizer.load(tmp_path / "tokenizer.model").model == bpe.model


def test_a_tokenizer_learns_from_plain_text(corpus):
    texts = [text for pair in corpus["train"][:300] for text in pair]
    strange = [text.replace("e", "\xade\u2060").replace(" ", "\u2003") for text in texts]
    assert BPETokenizer.train(strange, 200).model == BPETokenizer.train(texts, 200).model


def test_text_that_looks_the_same_has_the_same_ids_and_normal_text_keeps_its_own(corpus):
    bpe = BPETokenizer.load(ROOT / "models/multi30k-de-en/tokenizer.model")
    letters = list(map(chr, range(0x110000)))
    spaces = [c for c in letters if unicodedata.category(c) in ("Zs", "Zl", "Zp")]
    spaces += "\t\n\v\f\r\x1c\x1f\x85\u2800"
    unseen = {c for c in letters if unicodedata.category(c) == "Cc"} - {*spaces, "\x1d", "\x1e"}
    unseen |= set("\xad\u034f\u061c\u115f\u180e\u200b\u200c\u200d\u200f\u202e\u2060\u2069\u3164")
    unseen |= set("\ufe00\ufe0f\ufeff\uffa0\ufff0\ufff9\U0001d173\U000e0001\U000e0fff")
    alike = {
        "Fußball": [f"{before}Fuß{c}ball{before}" for c in unseen for before in ("", c)],
        "Ein Hund": [f"{c}Ein{c}{c}Hund{c}" for c in spaces],
        "für": ["fu\u200d\u0308r"],
        "A-B-C": ["A\u2010B\u2011C"],
        "A–B": ["A\u2212B"],
        "geht’s,": ["geht\xb4s\u201a", "geht\u02bcs,"],
        "STRAßE": ["STRA\u1e9eE"],
    }
    for plain, others in alike.items():
        for text in others:
            assert bpe.pieces(text) == bpe.pieces(plain), ascii(text)
        for encode in (bpe.encode, lambda text: split_anew([text], bpe, 0.0, 1)[0]):
            assert {tuple(encode(text)) for text in others} == {tuple(encode(plain))}
    normal = [text for split in corpus.values() for pair in split for text in pair]
    assert [*map(bpe.encode, normal)] == bpe.processor.encode(normal)  # SentencePiece's own


def test_merge_steps_are_sentencepieces(bpe, corpus):
    rank = {bpe.processor.id_to_piece(i): i for i in range(4, len(bpe))}
    for german, _ in corpus["test"][:40]:
        steps = merge_steps("▁" + german.replace(" ", "▁"), rank)
        assert steps[-1] == bpe.pieces(german)


# Examples and batches


def test_erratum_19_a_cut_sentence_keeps_its_end(bpe, corpus):
    german, english = (" ".join([text] * 10) for text in corpus["train"][0])
    (example,) = encode_pairs([(german, english)], bpe, max_len=16)
    assert example.src == [*bpe.encode(german)[:15], EOS] == source_ids(german, bpe, 16)
    assert example.tgt == [BOS, *bpe.encode(english)[:15], EOS]


def test_erratum_19_buckets_waste_a_fraction_of_fixed_width(bpe, corpus):
    """Padding every pair to 72 tokens is far from minimal; length buckets come close."""
    examples = encode_pairs(corpus["train"], bpe)
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    fixed, shuffled, ours = padding_table(examples, 2048).values()
    assert fixed == pytest.approx(1 - sum(map(sum, lengths)) / (2 * 72 * len(lengths)), abs=1e-4)
    buckets = token_batches(examples, 2048, random.Random(0))
    assert ours == pytest.approx(padding_share(lengths, buckets), abs=1e-4)
    assert ours < 0.1 and shuffled > 2 * ours and fixed > 0.5


# The record


def test_what_the_prose_says_of_the_record():
    """Each typo and number that chapter 7 names is in the record."""
    prose = (ROOT / "scripts/ch07_multi30k.py").read_text("utf-8")
    prose = re.sub(r"\s+", " ", re.sub(r"(?m)^# ?", "", prose))
    facts = load_record("multi30k-corpus")
    captions = {line: f"{german} {english}" for line, german, english in facts["captions"]}
    for line, words in {
        1691: "keiner Hund", 5070: "kletter", 5120: "A Oklahoma football player",
        12678: "stadning", 15574: "Hintrgrund", 16663: "@@", 25222: "plying a guitar",
    }.items():  # fmt: skip
        assert words.lower() in captions[line].lower() and words.lower() in prose.lower()
    rows = facts["unknown"]
    assert all(row["left out"] > row["BLEU marked"] for row in rows)
    near = [row for row in rows if (row["language"], row["min_freq"]) != ("de", 20)]
    assert all(round(abs(row["BLEU marked"] - row["formula"]), 2) <= 0.5 for row in near)
    assert [[row["leaky %"], row["unknown %"]] for row in rows][5] == [1.25, 2.05]
    generator = 2 * 256 * 8192 * (facts["tokens"]["English"]["8192"] + 1) / 1e6
    assert round(generator / facts["operations"]["8192"], 2) == 0.27 and "takes 27% of" in prose
    assert facts["longest"] == 53 and "the longest has 53 tokens" in prose


@pytest.mark.audit
@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
def test_the_record_is_made_anew():
    facts = load_record("multi30k-corpus")
    fresh = multi30k_facts()
    assert {key: facts[key] for key in fresh} == fresh
