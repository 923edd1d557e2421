"""The sample corpus: its splits, what is unseen in them, and that it stays the same."""

import hashlib
import random
import re

import pytest

from scripts.corpora.load import FEW, load_corpus
from scripts.corpora.sample import ADJECTIVES, NOUNS, is_held_out, sample_corpus

ADJECTIVE = {a.base: a for group in ADJECTIVES.values() for a in group}
NOUN = {n.singular: n for group in NOUNS.values() for n in group}


@pytest.fixture(scope="module")
def corpus():
    return load_corpus("sample")


# What shipped models and stored outputs rest on: a change here means training them again.
DIGESTS = {
    "train": "26c2bd69ba2e92c6830d7321c305c537",
    "val": "d0bbaecf4e44518f19b2d17b24ced87d",
    "test": "6e92ac4adf647a13e2ead1bf605e5ff6",
    "test_unseen": "3f010e70cd70403052046d7bd956c9ef",
}


def test_the_sentences_stay_the_same_byte_for_byte(corpus):
    assert corpus.keys() == DIGESTS.keys()
    for split, pairs in corpus.items():
        text = "".join(f"{german}\t{english}\n" for german, english in pairs)
        assert hashlib.sha256(text.encode()).hexdigest().startswith(DIGESTS[split]), split


def combined(sentences, pattern):
    """The (adjective, noun) pairs that fit the pattern in the English, in German base forms."""
    adjectives = {a.english: a.base for a in ADJECTIVE.values()}
    nouns = {x: n.singular for n in NOUN.values() for x in (n.english, n.english_plural)}
    matches = (m for _, english in sentences for m in re.finditer(pattern, english.lower()))
    pairs = [(adjectives.get(m["how"], ""), nouns.get(m["what"], "")) for m in matches]
    return [pair for pair in pairs if all(pair)]


BEFORE = r"\b(?P<how>\w+) (?=(?P<what>\w+))"  # a sad chef
AFTER = r"(?P<what>\w+) (?:is|are) (?P<how>\w+)\.$"  # because the chef is sad


@pytest.mark.parametrize(("order", "rare"), [(BEFORE, 30), (AFTER, 5)])
def test_unseen_combinations_are_unseen(corpus, order, rare):
    """Counted from the English text alone: `a sad chef`, and `because the chef is sad`."""
    assert len(combined(corpus["train"], order)) > 10 * rare
    for split in ("train", "val", "test"):
        assert not any(map(is_held_out, combined(corpus[split], order)))
    assert len([*filter(is_held_out, combined(corpus["test_unseen"], order))]) > rare


def test_the_corpus_depends_on_its_seed_and_few_are_its_shortest(corpus):
    state = random.getstate()
    assert sample_corpus(1)["train"] != corpus["train"]
    assert random.getstate() == state  # the global generator is left alone
    few = load_corpus("few")
    assert {split: len(pairs) for split, pairs in few.items()} == {
        "train": FEW, "val": 4, "test": 4, "test_unseen": 4
    }  # fmt: skip
    lengths = sorted(len(german) for german, _ in corpus["train"])
    assert sorted(len(german) for german, _ in few["train"]) == lengths[:FEW]
