"""The sample corpus: its German, its splits, and that it stays the same."""

import hashlib
import random
import re
from collections import Counter

import pytest

from scripts.corpora.load import load_corpus
from scripts.corpora.sample import (
    ADJECTIVES,
    CASES,
    NOUNS,
    PLACES,
    VERBS,
    Clause,
    english_clause,
    generate_sentences,
    is_held_out,
    noun_phrase,
    place_phrase,
    sample_corpus,
    verb_last,
    verb_second,
)

ADJECTIVE = {a.base: a for group in ADJECTIVES.values() for a in group}
NOUN = {n.singular: n for group in NOUNS.values() for n in group}
VERB = {verb.name: verb for group in VERBS.values() for verb in group}


@pytest.fixture(scope="module")
def corpus():
    return load_corpus("sample")


# Determiner, adjective and noun (* in the plural): nominative/accusative/dative
DECLENSION = """
ein alt Mann: ein alter Mann/einen alten Mann/einem alten Mann
ein alt Frau: eine alte Frau/eine alte Frau/einer alten Frau
ein alt Haus: ein altes Haus/ein altes Haus/einem alten Haus
der alt Mann: der alte Mann/den alten Mann/dem alten Mann
der alt Frau: die alte Frau/die alte Frau/der alten Frau
der alt Haus: das alte Haus/das alte Haus/dem alten Haus
der alt Haus*: die alten Häuser/die alten Häuser/den alten Häusern
dieser neu Hut: dieser neue Hut/diesen neuen Hut/diesem neuen Hut
dieser neu Buch: dieses neue Buch/dieses neue Buch/diesem neuen Buch
dieser neu Buch*: diese neuen Bücher/diese neuen Bücher/diesen neuen Büchern
zwei rot Apfel*: zwei rote Äpfel/zwei rote Äpfel/zwei roten Äpfeln
viele rot Auto*: viele rote Autos/viele rote Autos/vielen roten Autos
mehrere müde Frau*: mehrere müde Frauen/mehrere müde Frauen/mehreren müden Frauen
ein teuer Ball: ein teurer Ball/einen teuren Ball/einem teuren Ball
der jung Soldat: der junge Soldat/den jungen Soldaten/dem jungen Soldaten
ein klug Nachbar: ein kluger Nachbar/einen klugen Nachbarn/einem klugen Nachbarn
ein braun Bär: ein brauner Bär/einen braunen Bären/einem braunen Bären
der - Kind*: die Kinder/die Kinder/den Kindern
einige - Clown*: einige Clowns/einige Clowns/einigen Clowns
"""


@pytest.mark.parametrize("row", DECLENSION.strip().split("\n"))
def test_declension(row):
    words, forms = row.split(": ")
    word, adjective, name = words.split()
    noun, plural = NOUN[name.rstrip("*")], name.endswith("*")
    phrases = (noun_phrase(word, ADJECTIVE.get(adjective), noun, case, plural) for case in CASES)
    assert [phrase.german for phrase in phrases] == forms.split("/")


PLACED = """
Park: im Park/in den Park
Museum: im Museum/ins Museum
Küche: in der Küche/in die Küche
Strand: am Strand/an den Strand
Fenster: am Fenster/ans Fenster
Dach: auf dem Dach/auf das Dach
"""


def test_places_take_dative_for_being_and_accusative_for_going():
    place = {place.noun.singular: place for place in PLACES}
    for name, forms in (row.split(": ") for row in PLACED.strip().split("\n")):
        phrases = [place_phrase(place[name], case) for case in ("dative", "accusative")]
        assert [phrase.german for phrase in phrases] == forms.split("/")
    assert place_phrase(place["Museum"], "dative").english == "in the museum"
    assert place_phrase(place["Museum"], "accusative").english == "into the museum"


def test_verb_positions():
    woman = noun_phrase("ein", None, NOUN["Frau"], "nominative", plural=False)
    women = noun_phrase("zwei", None, NOUN["Frau"], "nominative", plural=True)
    hat = noun_phrase("ein", ADJECTIVE["rot"], NOUN["Hut"], "accusative", plural=False)
    child = noun_phrase("der", None, NOUN["Kind"], "dative", plural=False)

    for subject, verb, tense, thing, second, last, english in (
        (woman, "anprobieren", "present", hat, "eine Frau probiert einen roten Hut an",
         "eine Frau einen roten Hut anprobiert", "a woman is trying on a red hat"),
        (women, "ausziehen", "perfect", hat, "zwei Frauen haben einen roten Hut ausgezogen",
         "zwei Frauen einen roten Hut ausgezogen haben", "two women have taken off a red hat"),
        (woman, "folgen", "perfect", child, "eine Frau ist dem Kind gefolgt",
         "eine Frau dem Kind gefolgt ist", "a woman has followed the child"),
        (women, "zuhören", "wollen", child, "zwei Frauen wollen dem Kind zuhören",
         "zwei Frauen dem Kind zuhören wollen", "two women want to listen to the child"),
    ):  # fmt: skip
        clause = Clause(subject, VERB[verb], tense, (thing,))
        made = verb_second(clause), verb_last(clause), english_clause(clause)
        assert made == (second, last, english)
    fronted = Clause(woman, VERB["kaufen"], "werden", (hat,))
    assert verb_second(fronted, "morgen") == "morgen wird eine Frau einen roten Hut kaufen"


def test_lexicon_is_consistent():
    translations = {}
    for noun in NOUN.values():
        assert noun.gender in "mfn" and noun.singular[0].isupper() and noun.plural[0].isupper()
        assert translations.setdefault(noun.english, noun.singular) == noun.singular
    for verb in VERB.values():
        assert verb.infinitive.endswith("n") and verb.singular.endswith("t")
        assert verb.participle.startswith(verb.particle)
        assert verb.english[1].split()[0].endswith("ing")
    for noun, word in (("Uniform", "a uniform"), ("Apfel", "an apple"), ("Hut", "a hat")):
        assert noun_phrase("ein", None, NOUN[noun], "nominative", plural=False).english == word


# What shipped models and stored outputs rest on: a change here means training them again.
DIGESTS = {
    "train": "26c2bd69ba2e92c6830d7321c305c537",
    "val": "d0bbaecf4e44518f19b2d17b24ced87d",
    "test": "6e92ac4adf647a13e2ead1bf605e5ff6",
    "test_unseen": "3f010e70cd70403052046d7bd956c9ef",
}


def test_the_sentences_stay_the_same_byte_for_byte(corpus):
    for split, pairs in corpus.items():
        text = "".join(f"{german}\t{english}\n" for german, english in pairs)
        assert hashlib.sha256(text.encode()).hexdigest().startswith(DIGESTS[split]), split


def test_sample_corpus_is_what_it_promises(corpus):
    assert len(set(corpus["train"])) >= 4000
    counts = [Counter(), Counter()]
    for pair in corpus["train"]:
        for side in (0, 1):
            counts[side].update(re.findall(r"\w+", pair[side].lower()))
    for side in (0, 1):
        assert len(counts[side]) >= 400 and min(counts[side].values()) >= 8
        sentences = [pair[side] for pairs in corpus.values() for pair in pairs]
        assert len(sentences) == len(set(sentences))  # no sentence occurs twice
        for split in ("val", "test", "test_unseen"):
            words = {w for pair in corpus[split] for w in re.findall(r"\w+", pair[side].lower())}
            assert words <= set(counts[side])
    for pairs in corpus.values():
        for german, english in pairs:
            assert german[0].isupper() and german.endswith(".") and english.endswith(".")
            assert 5 <= len(german.split()) <= 14
    kinds = {"während", "weil", "dass"}  # there are plenty of verb-final clauses
    assert all(counts[0][word] > 100 for word in kinds)


def combined(sentences, pattern):
    """The (adjective, noun) pairs that fit the pattern in the English, in German base forms."""
    adjectives = {a.english: a.base for group in ADJECTIVES.values() for a in group}
    nouns = {x: n.singular for n in NOUN.values() for x in (n.english, n.english_plural)}
    found = []
    for _, english in sentences:
        words = (match.groupdict() for match in re.finditer(pattern, english.lower()))
        found += [(adjectives.get(word["how"], ""), nouns.get(word["what"], "")) for word in words]
    return [pair for pair in found if all(pair)]


BEFORE = r"\b(?P<how>\w+) (?=(?P<what>\w+))"  # a sad chef
AFTER = r"(?P<what>\w+) (?:is|are) (?P<how>\w+)\.$"  # because the chef is sad


@pytest.mark.parametrize(("order", "rare"), [(BEFORE, 30), (AFTER, 5)])
def test_unseen_combinations_are_unseen(corpus, order, rare):
    """Counted from the English text alone: `a sad chef`, and `because the chef is sad`."""
    assert len(combined(corpus["train"], order)) > 10 * rare
    for split in ("train", "val", "test"):
        assert not any(map(is_held_out, combined(corpus[split], order)))
    assert len([*filter(is_held_out, combined(corpus["test_unseen"], order))]) > rare


def test_the_split_of_unseen_sentences_is_what_the_grammar_marks(corpus):
    flags = {}
    for german, _, held_out in generate_sentences(0):
        flags[german] = held_out
        if len(flags) > 9000:
            break
    assert all(flags[german] for german, _ in corpus["test_unseen"])


def test_sample_corpus_depends_on_its_seed_alone(corpus):
    state = random.getstate()
    assert sample_corpus.__wrapped__() == corpus
    assert sample_corpus(1)["train"] != corpus["train"]
    assert random.getstate() == state  # the global generator is left alone
