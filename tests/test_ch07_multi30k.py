"""Chapter 7: the corpora, their files, words, subwords and batches."""

import gzip
import hashlib
import http.server
import os
import random
import re
import socket
import threading
from collections import Counter

import pooch
import pytest
import torch

from scripts import ch07_multi30k as ch07
from scripts.book.records import load_record
from scripts.ch06_training import BOS, EOS, PAD, UNK
from scripts.ch07_multi30k import (
    ADJECTIVES,
    CASES,
    NOUNS,
    PLACES,
    VERBS,
    BPETokenizer,
    Clause,
    Example,
    build_vocab,
    encode_pairs,
    load_corpus,
    make_batch,
    multi30k_file,
    noun_phrase,
    pad_rows,
    padding_share,
    parallel,
    place_phrase,
    read_lines,
    sample_corpus,
    sentence_batches,
    source_ids,
    token_batches,
    unknown_rate,
    word_tokenizer,
)
from scripts.studies.corpus import multi30k_facts

ADJECTIVE = {a.base: a for group in ADJECTIVES.values() for a in group}
NOUN = {n.singular: n for group in NOUNS.values() for n in group}
VERB = {v.particle + v.infinitive: v for group in VERBS.values() for v in group}


@pytest.fixture(scope="module")
def corpus():
    return load_corpus("sample")


@pytest.fixture(scope="module")
def bpe(corpus):
    return BPETokenizer.train([text for pair in corpus["train"] for text in pair], 300)


# The grammar


@pytest.mark.parametrize(
    ("word", "adjective", "noun", "plural", "expected"),
    [
        ("ein", "alt", "Mann", False, "ein alter Mann/einen alten Mann/einem alten Mann"),
        ("ein", "alt", "Frau", False, "eine alte Frau/eine alte Frau/einer alten Frau"),
        ("ein", "alt", "Haus", False, "ein altes Haus/ein altes Haus/einem alten Haus"),
        ("der", "alt", "Mann", False, "der alte Mann/den alten Mann/dem alten Mann"),
        ("der", "alt", "Frau", False, "die alte Frau/die alte Frau/der alten Frau"),
        ("der", "alt", "Haus", False, "das alte Haus/das alte Haus/dem alten Haus"),
        ("der", "alt", "Haus", True, "die alten Häuser/die alten Häuser/den alten Häusern"),
        ("dieser", "neu", "Hut", False, "dieser neue Hut/diesen neuen Hut/diesem neuen Hut"),
        ("dieser", "neu", "Buch", False, "dieses neue Buch/dieses neue Buch/diesem neuen Buch"),
        ("dieser", "neu", "Buch", True,
         "diese neuen Bücher/diese neuen Bücher/diesen neuen Büchern"),
        ("zwei", "rot", "Apfel", True, "zwei rote Äpfel/zwei rote Äpfel/zwei roten Äpfeln"),
        ("viele", "rot", "Auto", True, "viele rote Autos/viele rote Autos/vielen roten Autos"),
        ("mehrere", "müde", "Frau", True,
         "mehrere müde Frauen/mehrere müde Frauen/mehreren müden Frauen"),
        ("ein", "teuer", "Ball", False, "ein teurer Ball/einen teuren Ball/einem teuren Ball"),
        ("der", "jung", "Soldat", False,
         "der junge Soldat/den jungen Soldaten/dem jungen Soldaten"),
        ("ein", "klug", "Nachbar", False,
         "ein kluger Nachbar/einen klugen Nachbarn/einem klugen Nachbarn"),
        ("ein", "braun", "Bär", False, "ein brauner Bär/einen braunen Bären/einem braunen Bären"),
        ("der", None, "Kind", True, "die Kinder/die Kinder/den Kindern"),
        ("einige", None, "Clown", True, "einige Clowns/einige Clowns/einigen Clowns"),
    ],
)  # fmt: skip
def test_declension(word, adjective, noun, plural, expected):
    described = ADJECTIVE.get(adjective)
    made = [noun_phrase(word, described, NOUN[noun], case, plural).german for case in CASES]
    assert made == expected.split("/")


def test_places_take_dative_for_being_and_accusative_for_going():
    phrases = {
        place.noun.singular: (place_phrase(place, "dative"), place_phrase(place, "accusative"))
        for place in PLACES
    }
    german = {name: tuple(phrase.german for phrase in both) for name, both in phrases.items()}
    assert german["Park"] == ("im Park", "in den Park")
    assert german["Museum"] == ("im Museum", "ins Museum")
    assert german["Küche"] == ("in der Küche", "in die Küche")
    assert german["Strand"] == ("am Strand", "an den Strand")
    assert german["Fenster"] == ("am Fenster", "ans Fenster")
    assert german["Dach"] == ("auf dem Dach", "auf das Dach")
    assert [phrase.english for phrase in phrases["Museum"]] == ["in the museum", "into the museum"]


def test_verb_positions():
    woman = noun_phrase("ein", None, NOUN["Frau"], "nominative", plural=False)
    women = noun_phrase("zwei", None, NOUN["Frau"], "nominative", plural=True)
    hat = noun_phrase("ein", ADJECTIVE["rot"], NOUN["Hut"], "accusative", plural=False)
    child = noun_phrase("der", None, NOUN["Kind"], "dative", plural=False)

    def forms(subject, verb, tense, thing):
        clause = Clause(subject, VERB[verb], tense, (thing,))
        return ch07.verb_second(clause), ch07.verb_last(clause), ch07.english_clause(clause)

    assert forms(woman, "anprobieren", "present", hat) == (
        "eine Frau probiert einen roten Hut an",
        "eine Frau einen roten Hut anprobiert",
        "a woman is trying on a red hat",
    )
    assert forms(women, "ausziehen", "perfect", hat) == (
        "zwei Frauen haben einen roten Hut ausgezogen",
        "zwei Frauen einen roten Hut ausgezogen haben",
        "two women have taken off a red hat",
    )
    assert forms(woman, "folgen", "perfect", child) == (
        "eine Frau ist dem Kind gefolgt",
        "eine Frau dem Kind gefolgt ist",
        "a woman has followed the child",
    )
    assert forms(women, "zuhören", "wollen", child) == (
        "zwei Frauen wollen dem Kind zuhören",
        "zwei Frauen dem Kind zuhören wollen",
        "two women want to listen to the child",
    )
    fronted = Clause(woman, VERB["kaufen"], "werden", (hat,))
    assert ch07.verb_second(fronted, "morgen") == "morgen wird eine Frau einen roten Hut kaufen"


def test_lexicon_is_consistent():
    for noun in NOUN.values():
        assert noun.gender in "mfn" and noun.singular[0].isupper() and noun.plural[0].isupper()
    translations = {}
    for noun in NOUN.values():
        assert translations.setdefault(noun.english, noun.singular) == noun.singular
    for verb in VERB.values():
        assert verb.infinitive.endswith("n") and verb.singular.endswith("t")
        assert verb.participle.startswith(verb.particle)
        assert verb.english[1].split()[0].endswith("ing")
    for noun, word in (("Uniform", "a uniform"), ("Apfel", "an apple"), ("Hut", "a hat")):
        assert noun_phrase("ein", None, NOUN[noun], "nominative", plural=False).english == word


def test_sample_corpus_is_what_it_promises(corpus):
    assert len(set(corpus["train"])) >= 4000
    counts = [Counter(), Counter()]
    for pair in corpus["train"]:
        for side in (0, 1):
            counts[side].update(re.findall(r"\w+", pair[side].lower()))
    for side in (0, 1):
        assert len(counts[side]) >= 400 and min(counts[side].values()) >= 8
        sentences = [pair[side] for pairs in corpus.values() for pair in pairs]
        assert len(sentences) == len(set(sentences))  # no sentence twice, in no split
        for split in ("val", "test", "test_unseen"):
            words = {w for pair in corpus[split] for w in re.findall(r"\w+", pair[side].lower())}
            assert words <= set(counts[side])
    for pairs in corpus.values():
        for german, english in pairs:
            assert german[0].isupper() and german.endswith(".") and english.endswith(".")
            assert 5 <= len(german.split()) <= 14
    kinds = {"während", "weil", "dass"}  # verb-final clauses are there, and plenty
    assert all(counts[0][word] > 100 for word in kinds)


def test_unseen_combinations_are_unseen(corpus):
    """Counted from the English text alone, where the adjective stands right before its noun."""
    adjectives = {a.english: a.base for group in ADJECTIVES.values() for a in group}
    nouns = {x: n.singular for n in NOUN.values() for x in (n.english, n.english_plural)}
    found = {split: set() for split in corpus}
    for split, pairs in corpus.items():
        for _, english in pairs:
            words = re.findall(r"\w+", english.lower())
            found[split].update(
                (adjectives[a], nouns[n])
                for a, n in zip(words, words[1:], strict=False)
                if a in adjectives and n in nouns
            )
    known = found["train"] | found["val"] | found["test"]
    assert not any(ch07.is_held_out(pair) for pair in known)
    assert sum(ch07.is_held_out(pair) for pair in found["test_unseen"]) > 30
    flags = {}
    for german, _, held_out in ch07.generate_sentences(0):
        flags[german] = held_out
        if len(flags) > 9000:
            break
    assert all(flags[german] for german, _ in corpus["test_unseen"])


def test_sample_corpus_depends_on_its_seed_alone(corpus):
    state = random.getstate()
    assert sample_corpus() == corpus
    assert sample_corpus(1)["train"] != corpus["train"]
    assert random.getstate() == state  # the global generator is left alone


def test_load_corpus_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="choose sample or multi30k"):
        load_corpus("wmt14")


# Files


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_missing_file_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("MULTI30K_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        multi30k_file("train.de.gz")
    assert "MULTI30K_DIR" in one_line(error) and "train.de.gz" in one_line(error)
    with pytest.raises(FileNotFoundError) as error:
        read_lines(tmp_path / "nothing.de")
    assert "nothing.de" in one_line(error)


def test_a_wrong_checksum_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("MULTI30K_DIR", str(tmp_path))
    (tmp_path / "val.en.gz").write_bytes(gzip.compress(b"A dog runs.\n"))
    with pytest.raises(ValueError) as error:
        multi30k_file("val.en.gz")
    assert "SHA-256" in one_line(error) and "fetch it again" in one_line(error)


@pytest.mark.parametrize("damage", ["cut", "noise", "flipped"])
def test_a_damaged_gzip_file_says_so(tmp_path, damage):
    data = bytearray(gzip.compress(random.Random(0).randbytes(400).hex().encode()))
    if damage == "cut":
        data = data[:-30]
    elif damage == "noise":
        data = bytearray(b"this is not gzip at all")
    else:
        data[len(data) // 2] ^= 255
    path = tmp_path / "train.de.gz"
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        read_lines(path)
    assert "truncated or not gzip" in one_line(error)


def test_text_that_is_not_utf8_says_so(tmp_path):
    path = tmp_path / "train.de"
    path.write_bytes("Ein Mann läuft.\n".encode("latin-1"))
    with pytest.raises(ValueError) as error:
        read_lines(path)
    assert "not UTF-8 (byte 10)" in one_line(error)


def test_files_of_different_lengths_say_so():
    with pytest.raises(ValueError) as error:
        parallel(["Ein Hund.", "Eine Katze."], ["A dog."], "val")
    assert "val: 2 source lines but 1 target lines" in one_line(error)
    assert parallel([" a "], ["b\r"], "x") == [("a", "b")]


def test_only_a_newline_separates_lines(tmp_path):
    text = "a\u2028b\x85c\x0cd\ne\n"
    path = tmp_path / "text.de"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_lines(path) == ["a\u2028b\x85c\x0cd", "e"]
    assert len(text.splitlines()) == 5  # the wrong version shifts every later pair


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A web server on this machine that serves one file, and `download_multi30k` pointed at it."""
    content = gzip.compress(b"Ein Hund rennt.\n")
    served = {"data": content, "requests": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served["requests"] += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(served["data"])))
            self.end_headers()
            self.wfile.write(served["data"])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("MULTI30K_DIR", raising=False)
    monkeypatch.setattr(ch07, "MULTI30K_URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setitem(ch07.MULTI30K_SHA256, "val.de.gz", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    yield served
    server.shutdown()
    server.server_close()


def test_a_download_is_checked_and_kept(host):
    path = multi30k_file("val.de.gz")
    assert read_lines(path) == ["Ein Hund rennt."]
    assert multi30k_file("val.de.gz") == path and host["requests"] == 1


def test_a_damaged_download_is_tried_again_and_then_refused(host):
    host["data"] = host["data"][:-5] + b"12345"
    with pytest.raises(ValueError) as error:
        multi30k_file("val.de.gz")
    assert "damaged" in one_line(error) and "MULTI30K_DIR" in one_line(error)
    assert host["requests"] == 4


def test_offline_says_what_to_do(host, monkeypatch):
    monkeypatch.setattr(ch07, "MULTI30K_URL", "http://127.0.0.1:9/")  # nothing listens there
    with pytest.raises(FileNotFoundError) as error:
        multi30k_file("val.de.gz")
    assert all(hint in one_line(error) for hint in ("go online", "MULTI30K_DIR", "sample"))


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
    assert unknown_rate(words["test"], honest) == pytest.approx(missing) and missing > 0.05
    assert unknown_rate(words["test"], leaky) == 0  # the wrong version
    assert [honest.stoi[name] for name in ch07.SPECIALS] == [PAD, UNK, BOS, EOS]


def test_erratum_27_no_download_for_tokenisers_and_sample(monkeypatch):
    """The sample corpus and both tokenisers need no network."""

    def refuse(*_, **__):
        raise AssertionError("something opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    word_tokenizer.cache_clear()
    assert word_tokenizer("de")("Der Mann, der lacht.") == ["Der", "Mann", ",", "der", "lacht", "."]
    assert word_tokenizer("en")("It doesn't matter.") == ["It", "does", "n't", "matter", "."]
    assert "Mann," in ["Der", "Mann,", "der", "lacht."]  # the wrong version glues marks to words
    assert set(load_corpus("sample")) == {"train", "val", "test", "test_unseen"}


def test_bpe_ids_round_trip_and_files(bpe, corpus, tmp_path):
    assert len(bpe) == 300
    assert [bpe.processor.id_to_piece(i) for i in range(4)] == list(ch07.SPECIALS)
    for pair in corpus["test"][:50] + corpus["test_unseen"][:50]:
        for text in pair:
            assert bpe.decode(bpe.encode(text)) == text
            assert "".join(bpe.pieces(text)).replace("▁", " ").strip() == text
    bpe.save(tmp_path / "tokenizer.model")
    assert BPETokenizer.load(tmp_path / "tokenizer.model").encode("Ein Hund.") == bpe.encode(
        "Ein Hund."
    )
    ids = bpe.encode("Ein Hund.")
    assert bpe.decode([BOS, *ids, PAD, EOS, *ids]) == "Ein Hund."
    assert bpe.decode(torch.tensor([BOS, *ids, EOS])) == "Ein Hund."


def test_default_special_ids_would_mask_unknown_words(corpus):
    texts = [text for pair in corpus["train"][:500] for text in pair]
    strange = "Ein Mann im Café."
    assert PAD in ch07.with_default_ids(texts, 200).encode(strange)  # the wrong version
    ours = BPETokenizer.train(texts, 200).encode(strange)
    assert UNK in ours and PAD not in ours


def test_learn_merges_takes_the_most_frequent_pair():
    words = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
    split = {(*word, "</w>"): n for word, n in words.items()}
    for merge in ch07.learn_merges(words, 10):
        counts = Counter()
        for pieces, n in split.items():
            for i in range(len(pieces) - 1):
                counts[pieces[i], pieces[i + 1]] += n
        assert counts[merge] == max(counts.values())
        before = sum(n * len(pieces) for pieces, n in split.items())
        split = {ch07.merge_pair(pieces, merge): n for pieces, n in split.items()}
        assert before - sum(n * len(p) for p, n in split.items()) == counts[merge]
        assert {"".join(p) for p in split} == {w + "</w>" for w in words}


# Examples and batches


def test_erratum_19_a_cut_sentence_keeps_its_end(bpe, corpus):
    german, english = (" ".join([text] * 10) for text in corpus["train"][0])
    (example,) = encode_pairs([(german, english)], bpe, max_len=16)
    assert len(example.src) == 16 and example.src[-1] == EOS
    assert len(example.tgt) == 17 and example.tgt[0] == BOS and example.tgt[-1] == EOS
    assert example.src[:-1] == bpe.encode(german)[:15] == source_ids(german, bpe, 16)[:-1]
    assert EOS not in ch07.cut_at_the_end(bpe.encode(english), 16)  # the wrong version


def test_erratum_19_buckets_waste_a_fraction_of_fixed_width(bpe, corpus):
    """Padding every pair to 72 tokens is far from minimal; length buckets nearly are."""
    examples = encode_pairs(corpus["train"], bpe)
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    buckets = token_batches(examples, 2048, random.Random(0))
    fixed = 1 - sum(map(sum, lengths)) / (2 * 72 * len(lengths))
    ours = padding_share(lengths, buckets)
    order = random.Random(0).sample(range(len(examples)), len(examples))
    shuffled = padding_share(lengths, sentence_batches(order, len(examples) // len(buckets)))
    assert ours < 0.1 and shuffled > 2 * ours and fixed > 0.5


def test_padding_share_counts_padding_of_real_tensors():
    rng = random.Random(0)
    examples = [Example([5] * rng.randint(1, 20), [5] * rng.randint(2, 20)) for _ in range(50)]
    batches = token_batches(examples, 100, rng)
    pads = cells = 0
    for batch in batches:
        for side in ("src", "tgt"):
            ids = pad_rows([getattr(examples[i], side) for i in batch])
            pads += int((ids == PAD).sum())
            cells += ids.numel()
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    assert padding_share(lengths, batches) == pytest.approx(pads / cells)


@pytest.mark.parametrize("seed", range(5))
def test_token_batches(seed):
    rng = random.Random(seed)
    examples = [Example([5] * rng.randint(1, 40), [5] * rng.randint(2, 40)) for _ in range(300)]
    limit = rng.choice((40, 128, 1000))
    length = [max(len(e.src), len(e.tgt)) for e in examples]
    for order in (None, random.Random(seed)):
        batches = token_batches(examples, limit, order)
        assert sorted(i for batch in batches for i in batch) == list(range(300))
        assert all(len(batch) * max(length[i] for i in batch) <= limit for batch in batches)
    assert token_batches(examples, limit, random.Random(1)) == token_batches(
        examples, limit, random.Random(1)
    )
    longest = [len(examples[b[-1]].tgt) for b in token_batches(examples, limit)]
    assert longest == sorted(longest)  # without a generator: from short to long
    with pytest.raises(ValueError, match="does not fit 39 a batch"):
        token_batches([Example([5] * 40, [5])], 39)


def test_make_batch_pads_and_shifts():
    batch = make_batch(
        [Example([7, 8, EOS], [BOS, 9, EOS]), Example([7, EOS], [BOS, 9, 9, 9, EOS])]
    )
    assert batch.src.tolist() == [[7, 8, EOS], [7, EOS, PAD]]
    assert batch.tgt.tolist() == [[BOS, 9, EOS, PAD], [BOS, 9, 9, 9]]
    assert batch.tgt_y.tolist() == [[9, EOS, PAD, PAD], [9, 9, 9, EOS]]
    assert batch.ntokens == 6


# The record


def test_multi30k_record_is_consistent():
    facts = load_record(ch07.CORPUS_RECORD)
    assert facts["pairs"] == {
        "train": 29000, "val": 1014, "test_2016_flickr": 1000, "test_2017_flickr": 1000
    }  # fmt: skip
    assert set(facts["pairs"]) == set(ch07.MULTI30K_SPLITS)
    for pieces in facts["pieces"].values():
        assert [p.replace("▁", "").replace(" ", "") for p in pieces] == facts["words"]
    for shares in facts["lengths"].values():
        assert sum(shares.values()) == pytest.approx(1, abs=2e-3)
    assert all(0 < share < 1 for share in facts["padding"].values())
    times = list(facts["ranks"].values())
    assert times == sorted(times, reverse=True)
    assert "record_multi30k" in facts["command"] and facts["commit"] and facts["versions"]


def test_multi30k_record_agrees_with_the_corpus():
    """Where the files are at hand, everything recorded is computed anew; else sizes are checked."""
    facts = load_record(ch07.CORPUS_RECORD)
    if not os.environ.get("MULTI30K_DIR"):
        assert sum(facts["pairs"].values()) == 32014
        return
    fresh = multi30k_facts()
    assert {key: facts[key] for key in fresh} == fresh
