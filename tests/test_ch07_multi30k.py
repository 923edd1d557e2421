"""Chapter 7: words, subwords and batches, and what is recorded about Multi30k."""

import io
import os
import random
import re
import socket
import unicodedata
from collections import Counter

import pytest
import torch
from sentencepiece import SentencePieceTrainer
from torchtext.data import functional

from scripts import ROOT
from scripts import ch07_multi30k as ch07
from scripts.book.records import load_record
from scripts.ch06_training import BOS, EOS, PAD, UNK
from scripts.ch07_multi30k import (
    BPETokenizer,
    Example,
    build_vocab,
    encode_pairs,
    learn_merges,
    make_batch,
    merge_pair,
    merge_steps,
    pad_rows,
    padding_share,
    padding_table,
    source_ids,
    token_batches,
    unknown_rate,
    word_tokenizer,
)
from scripts.core.data import split_anew
from scripts.corpora.load import load_corpus
from scripts.studies import corpus as study


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
    words = {name: [split(de) for de, _ in corpus[name]] for name in ("train", "test")}
    few = words["train"][:100]
    honest, leaky = build_vocab(few), build_vocab(few + words["test"])
    expected = Counter(w for s in words["test"] for w in s)
    known = {w for s in few for w in s}
    missing = sum(n for w, n in expected.items() if w not in known) / sum(expected.values())
    assert [honest.stoi[name] for name in ch07.SPECIALS] == [PAD, UNK, BOS, EOS]
    assert all(honest.stoi[word] == UNK for word in expected.keys() - known)  # a look adds a word
    assert unknown_rate(words["test"], honest) == pytest.approx(missing) and missing > 0.05
    assert unknown_rate(words["test"], leaky) == 0  # the wrong version
    assert set(build_vocab([["a", "a", "b"]], 2).itos[4:]) == {"a"}


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
    assert len(bpe) == 300
    assert [bpe.processor.id_to_piece(i) for i in range(4)] == list(ch07.SPECIALS)
    texts = [text for s in ("test", "test_unseen") for pair in corpus[s][:50] for text in pair]
    for text in texts:
        assert bpe.decode(bpe.encode(text)) == text
        assert "".join(bpe.pieces(text)).replace("▁", " ").strip() == text
    bpe.save(tmp_path / "tokenizer.model")
    assert BPETokenizer.load(tmp_path / "tokenizer.model").model == bpe.model
    ids = bpe.encode("Ein Hund.")
    assert bpe.decode([BOS, *ids, PAD, EOS, *ids]) == "Ein Hund."
    assert bpe.decode(torch.tensor([BOS, *ids, EOS])) == "Ein Hund."
    # torchtext's helpers give the same for a saved model
    processor = functional.load_sp_model(str(tmp_path / "tokenizer.model"))
    assert list(functional.sentencepiece_tokenizer(processor)(texts)) == [*map(bpe.pieces, texts)]
    assert list(functional.sentencepiece_numericalizer(processor)(texts)) == [
        *map(bpe.encode, texts)
    ]


def test_the_shipped_tokenizer_is_of_the_training_split_alone(corpus):
    """Trained on it again, each piece is the same; with the validation split one differs.

    The bytes of the model aren't compared: SentencePiece 0.2.2 writes other ones.
    """
    train, val = ([t for pair in corpus[s] for t in pair] for s in ("train", "val"))

    def ranked(bpe: BPETokenizer) -> list[tuple[str, float]]:
        known = bpe.processor
        return [(known.id_to_piece(i), known.get_score(i)) for i in range(len(bpe))]

    shipped = ranked(BPETokenizer.load(ROOT / "models/sample-de-en/tokenizer.model"))
    assert ranked(BPETokenizer.train(train, 1000)) == shipped
    assert ranked(BPETokenizer.train(train + val, 1000)) != shipped


def test_a_tokenizer_learns_from_plain_text(corpus):
    texts = [text for pair in corpus["train"][:300] for text in pair]
    strange = [text.replace("e", "\xade\u2060").replace(" ", "\u2003") for text in texts]
    assert BPETokenizer.train(strange, 200).model == BPETokenizer.train(texts, 200).model


@pytest.mark.parametrize("name", ["multi30k-de-en", "ladder-all-mean-3", "sample-de-en"])
def test_text_that_looks_the_same_has_the_same_ids_and_normal_text_keeps_its_own(name, corpus):
    bpe = BPETokenizer.load(ROOT / "models" / name / "tokenizer.model")
    kinds = {kind: [] for kind in ("Cc", "Zs", "Zl", "Zp")}
    for code in range(0x110000):
        kinds.get(unicodedata.category(chr(code)), []).append(chr(code))
    spaces = [*kinds["Zs"], *kinds["Zl"], *kinds["Zp"], *"\t\n\v\f\r\x1c\x1f\x85\u2800"]
    unseen = set(kinds["Cc"]) - set(map(chr, [*range(9, 14), *range(28, 32), 0x85]))
    unseen |= set(
        "\xad\u034f\u061c\u180e\u200b\u200c\u200d\u200f\u202e\u2060\u2069\u3164\ufe0f\ufeff"
    )
    unseen |= set("\u115f\ufe00\uffa0\ufff0\ufff9\U0001d173\U000e0001\U000e0100\U000e0fff")
    looks = [f"{before}Fuß{c}ball{after}" for c in unseen for before, after in [("", ""), (c, c)]]
    same = {"Fußball": looks, "Ein Hund": [f"{c}Ein{c}{c}Hund{c}" for c in spaces]}
    same |= {"für": ["fu\u200d\u0308r"], "A-B-C": ["A\u2010B\u2011C"], "A–B": ["A\u2212B"]}
    same |= {"geht’s,": ["geht\xb4s\u201a", "geht\u02bcs,"], "STRAßE": ["STRA\u1e9eE"]}
    for plain, others in same.items():
        for text in others:
            assert bpe.encode(text) == bpe.encode(plain), ascii(text)
            assert bpe.pieces(text) == bpe.pieces(plain), ascii(text)
        assert split_anew(others, bpe, 0.0, 1) == split_anew([plain] * len(others), bpe, 0.0, 1)
    pairs = [pair for split in corpus.values() for pair in split]
    if os.environ.get("MULTI30K_DIR"):
        real = load_corpus("multi30k")
        pairs += real["val"] + real["test_2016_flickr"] + real["test_2017_flickr"]
    lines = [text for pair in pairs for text in pair]
    assert [*map(bpe.encode, lines)] == bpe.processor.encode(lines)  # what SentencePiece says alone


def test_default_special_ids_would_mask_unknown_words(corpus):
    """By default, SentencePiece says 0 for what it doesn't know, and ends with 2."""
    texts = [text for pair in corpus["train"][:500] for text in pair]
    strange = "Ein Mann im Café."
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", vocab_size=200,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    wrong = BPETokenizer(model.getvalue())
    assert PAD in wrong.encode(strange)
    assert wrong.processor.eos_id() != EOS and wrong.processor.pad_id() == -1
    assert len(wrong.processor.id_to_piece(EOS)) == 2  # the first merge
    ours = BPETokenizer.train(texts, 200).encode(strange)
    assert UNK in ours and PAD not in ours


def test_learn_merges_takes_the_most_frequent_pair():
    words = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
    split = {(*word, "</w>"): n for word, n in words.items()}
    merges = learn_merges(words, 10)
    assert ["".join(pair) for pair in merges] == [
        "es", "est", "est</w>", "lo", "low", "ne", "new", "newest</w>", "low</w>", "wi"
    ]  # fmt: skip
    for merge in merges:
        counts = Counter()
        for pieces, n in split.items():
            for i in range(len(pieces) - 1):
                counts[pieces[i], pieces[i + 1]] += n
        assert counts[merge] == max(counts.values())
        split = {merge_pair(pieces, merge): n for pieces, n in split.items()}
        assert {"".join(p) for p in split} == {w + "</w>" for w in words}
    # applied to the words they were learned from, the merges give the same pieces
    rank = {a + b: i for i, (a, b) in enumerate(merges)}
    assert [tuple(merge_steps([*word, "</w>"], rank)[-1]) for word in words] == list(split)
    assert merge_pair(("a", "a", "a"), ("a", "a")) == ("aa", "a")


def test_merge_steps_are_sentencepieces(bpe, corpus):
    rank = {bpe.processor.id_to_piece(i): i for i in range(4, len(bpe))}
    for german, _ in corpus["test"][:40]:
        steps = merge_steps("▁" + german.replace(" ", "▁"), rank)
        assert steps[-1] == bpe.pieces(german)
        assert [len(step) for step in steps] == list(range(len(steps[0]), len(steps[-1]) - 1, -1))


# Examples and batches


def test_erratum_19_a_cut_sentence_keeps_its_end(bpe, corpus):
    german, english = (" ".join([text] * 10) for text in corpus["train"][0])
    (example,) = encode_pairs([(german, english)], bpe, max_len=16)
    assert len(example.src) == 16 and example.src[-1] == EOS
    assert len(example.tgt) == 17 and example.tgt[0] == BOS and example.tgt[-1] == EOS
    assert example.src[:-1] == bpe.encode(german)[:15] == source_ids(german, bpe, 16)[:-1]
    assert EOS not in [BOS, *bpe.encode(english), EOS][:16]  # the wrong version


def test_erratum_19_buckets_waste_a_fraction_of_fixed_width(bpe, corpus):
    """Padding every pair to 72 tokens is far from minimal; length buckets come close."""
    examples = encode_pairs(corpus["train"], bpe)
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    fixed, shuffled, ours = padding_table(examples, 2048).values()
    assert fixed == pytest.approx(1 - sum(map(sum, lengths)) / (2 * 72 * len(lengths)), abs=1e-4)
    buckets = token_batches(examples, 2048, random.Random(0))
    assert ours == pytest.approx(padding_share(lengths, buckets), abs=1e-4)
    assert ours < 0.1 and shuffled > 2 * ours and fixed > 0.5


@pytest.mark.parametrize("seed", range(5))
def test_token_batches(seed):
    rng = random.Random(seed)
    examples = [Example([5] * rng.randint(1, 40), [5] * rng.randint(2, 40)) for _ in range(300)]
    limit = rng.choice((40, 128, 1000))
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    for order in (None, random.Random(seed)):
        batches = token_batches(examples, limit, order)
        assert sorted(i for batch in batches for i in batch) == list(range(300))
        assert all(len(batch) * max(max(lengths[i]) for i in batch) <= limit for batch in batches)
    rows = [pad_rows([getattr(examples[i], side) for i in batch])
            for batch in batches for side in ("src", "tgt")]  # fmt: skip
    pads, cells = sum(int((r == PAD).sum()) for r in rows), sum(r.numel() for r in rows)
    assert padding_share(lengths, batches) == pytest.approx(pads / cells)
    first, again, other = (token_batches(examples, limit, random.Random(n)) for n in (1, 1, 2))
    assert first == again != other
    ordered, mixed = (
        [len(examples[b[-1]].tgt) for b in token_batches(examples, limit, order)]
        for order in (None, random.Random(1))
    )
    assert ordered == sorted(ordered) and mixed != sorted(mixed)  # from short to long, or at random
    with pytest.raises(ValueError, match="does not fit 39 a batch"):
        token_batches([Example([5] * 40, [5])], 39)


def test_make_batch_pads_and_shifts():
    batch = make_batch(
        [Example([7, 8, EOS], [BOS, 9, EOS]), Example([7, EOS], [BOS, 9, 9, 9, EOS])]
    )
    assert batch.src.tolist() == [[7, 8, EOS], [7, EOS, PAD]] and batch.src.dtype == torch.int64
    assert batch.tgt.tolist() == [[BOS, 9, EOS, PAD], [BOS, 9, 9, 9]]
    assert batch.tgt_y.tolist() == [[9, EOS, PAD, PAD], [9, 9, 9, EOS]]
    assert batch.ntokens == 6


# The record


def test_multi30k_record_is_consistent():
    facts = load_record("multi30k-corpus")
    assert facts["pairs"] == {
        "train": 29000, "val": 1014, "test_2016_flickr": 1000, "test_2017_flickr": 1000
    }  # fmt: skip
    for pieces in facts["pieces"].values():
        assert [p.replace("▁", "").replace(" ", "") for p in pieces] == facts["words"]
    for shares in facts["lengths"].values():
        assert sum(shares.values()) == pytest.approx(1, abs=2e-3)
    assert all(0 < share < 1 for share in facts["padding"].values())
    assert len(facts["captions"]) == 20  # a few quoted sentences, no more
    assert [line for line, *_ in facts["captions"]][-8:] == list(study.PICKED)
    assert "scripts.studies.corpus" in facts["command"] and facts["commit"] and facts["versions"]


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
    for shares in facts["lengths"].values():
        assert round(10 * sum(shares[str(n)] for n in range(8, 14))) == 6
    assert round(100 * facts["unknown"][0]["train only"]) == 3
    assert round(4 * facts["unknown"][0]["sentences"]) == 1
    _, shuffled, bucketed = facts["padding"].values()
    assert f"from {shuffled:.0%} to {bucketed:.0%}" in prose


def test_multi30k_record_agrees_with_the_corpus():
    """The shipped tokenizer's pieces; if the files are at hand, all that is recorded."""
    facts = load_record("multi30k-corpus")
    bpe = BPETokenizer.load(ROOT / "models/multi30k-de-en/tokenizer.model")
    assert facts["pieces"]["8192"] == [" ".join(bpe.pieces(word)) for word in facts["words"]]
    if os.environ.get("MULTI30K_DIR"):
        fresh = study.multi30k_facts()
        assert {key: facts[key] for key in fresh} == fresh
