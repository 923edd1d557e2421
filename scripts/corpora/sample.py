"""The sample corpus: German captions and their English, from lexicon.toml and rules of German.

German differs from English where attention is needed: articles and adjectives agree with case,
gender and number; the finite verb is second in a main clause and last in a subordinate one; a
separable verb's particle stands at the other end (`er hebt den Stein auf`). Each phrase is made in
both languages at once. Words are dealt from shuffled decks, so that none is rare, and about one in
twelve combinations of words is kept for `test_unseen`.
"""

import random
import re
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

Pair = tuple[str, str]


class Noun(NamedTuple):
    """`oblique`: accusative and dative; the nominative, except in weak nouns (Junge, Jungen)."""

    gender: str  # "m", "f" or "n"
    singular: str
    oblique: str
    plural: str
    english: str
    english_plural: str


class Adjective(NamedTuple):
    """`base` as a predicate (ist dunkel), `stem` before an ending (ein dunkler Wald)."""

    base: str
    stem: str
    english: str


class Verb(NamedTuple):
    """A verb; `particle` is the part of a separable verb that moves to the end (hebt ... auf)."""

    particle: str
    infinitive: str  # without the particle; also the third person plural
    singular: str  # third person singular
    participle: str
    auxiliary: str  # "haben" or "sein"
    english: list[str]  # base, -ing form, past participle
    groups: list[str]  # of nouns that can be its object or its subject

    @property
    def name(self) -> str:
        return self.particle + self.infinitive


class Place(NamedTuple):
    """A noun with its preposition, and what English says for being there and for going there."""

    preposition: str
    english_at: str
    english_to: str
    gender: str
    name: str
    english: str
    outdoors: bool


# The lexicon

LEXICON = tomllib.loads(Path(__file__).with_name("lexicon.toml").read_text("utf-8"))
NOUNS = {group: [Noun(*row) for row in rows] for group, rows in LEXICON["nouns"].items()}
DESCRIBING = LEXICON["adjectives"]
ADJECTIVES = {
    group: [Adjective(*row) for row in DESCRIBING.get(group, DESCRIBING["things"])]
    for group in NOUNS
}
VERBS = {kind: [Verb(*row) for row in rows] for kind, rows in LEXICON["verbs"].items()}
PLACES = [Place(*row) for row in LEXICON["places"]]
OUTDOORS = [place for place in PLACES if place.outdoors]

# Agreement

CASES = ("nominative", "accusative", "dative")
ARTICLES = {  # nominative, accusative, dative: masculine, feminine, neuter, plural
    "der": "der die das die, den die das die, dem der dem den",
    "dieser": "dieser diese dieses diese, diesen diese dieses diese, diesem dieser diesem diesen",
    "ein": "ein eine ein, einen eine ein, einem einer einem",
}
QUANTITIES = dict(LEXICON["quantities"])  # before plurals
WORDS_BEFORE = (("ein",) * 4 + ("der", "dieser"), ("der", "dieser", *QUANTITIES))  # one, several
CONTRACTIONS = {"in dem": "im", "an dem": "am", "in das": "ins", "an das": "ans"}


class Phrase(NamedTuple):
    """The same thing in both languages, and the combinations of words that it holds."""

    german: str
    english: str
    pairs: tuple[Pair, ...] = ()
    noun: Noun | None = None
    plural: bool = False


def join_words(*parts: str) -> str:
    """The parts that aren't empty, with spaces between them."""
    return " ".join(part for part in parts if part)


def determiner(word: str, case: str, gender: str) -> str:
    """The form of `ein`, `der`, `dieser` or a quantity; `gender` is m, f, n or "p", the plural."""
    if word in QUANTITIES:
        return word + "n" if case == "dative" and word.endswith("e") else word
    return ARTICLES[word].split(",")[CASES.index(case)].split()["mfnp".index(gender)]


def ending(word: str, case: str, gender: str) -> str:
    """An adjective's ending: weak after der, dieser; mixed after ein; strong after a quantity."""
    if gender == "p":
        return "e" if word in QUANTITIES and case != "dative" else "en"
    if case == "dative" or (case == "accusative" and gender == "m"):
        return "en"
    return {"m": "er", "f": "e", "n": "es"}[gender] if word == "ein" else "e"


def noun_phrase(
    word: str, adjective: Adjective | None, noun: Noun, case: str, plural: bool
) -> Phrase:
    """Determiner, adjective and noun in agreement: `einen roten Hut`, `zwei kleinen Kindern`."""
    gender = "p" if plural else noun.gender
    name = noun.singular if case == "nominative" else noun.oblique
    if plural:
        name = noun.plural + ("n" if case == "dative" and noun.plural[-1] not in "ns" else "")
    described = adjective.stem + ending(word, case, gender) if adjective else ""
    english = noun.english_plural if plural else noun.english
    english = f"{adjective.english} {english}" if adjective else english
    before = {"der": "the", "dieser": "these" if plural else "this"} | QUANTITIES
    before["ein"] = "an" if re.match("(?!uni)[aeiou]", english) else "a"
    german = join_words(determiner(word, case, gender), described, name)
    pairs = ((adjective.base, noun.singular),) if adjective else ()
    return Phrase(german, f"{before[word]} {english}", pairs, noun, plural)


def prepositional(preposition: str, phrase: Phrase, english: str) -> Phrase:
    """`in dem Park` becomes `im Park`."""
    first, _, rest = phrase.german.partition(" ")
    start = f"{preposition} {first}"
    german = join_words(CONTRACTIONS.get(start, start), rest)
    return Phrase(german, f"{english} {phrase.english}", phrase.pairs)


# Clauses

AUXILIARIES = {  # German singular, plural; English singular, plural; which English form follows
    "haben": ("hat", "haben", "has", "have", 2),
    "sein": ("ist", "sind", "has", "have", 2),
    "wollen": ("will", "wollen", "wants to", "want to", 0),
    "werden": ("wird", "werden", "will", "will", 0),
    "können": ("kann", "können", "can", "can", 0),
    "müssen": ("muss", "müssen", "must", "must", 0),
}
TENSES = ("present",) * 3 + ("perfect",) * 4 + ("wollen", "werden", "können", "müssen")
PRESENT = ("present",)
PRESENT_OR_FUTURE = ("present", "present", "present", "werden")


class Clause(NamedTuple):
    """Who does what: subject, verb, tense and the phrases between the verb and its end."""

    subject: Phrase
    verb: Verb
    tense: str
    middle: tuple[Phrase, ...]
    manner: Pair = ("", "")

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return sum((phrase.pairs for phrase in self.middle), self.subject.pairs)


def verb_parts(clause: Clause) -> Pair:
    """The finite verb, and what stands last in a main clause: `hebt`/`auf`, `hat`/`gekauft`."""
    verb, plural = clause.verb, clause.subject.plural
    if clause.tense == "present":
        return (verb.infinitive if plural else verb.singular), verb.particle
    if clause.tense == "perfect":
        return AUXILIARIES[verb.auxiliary][plural], verb.participle
    return AUXILIARIES[clause.tense][plural], verb.name


def verb_second(clause: Clause, front: str = "") -> str:
    """A German main clause: one phrase, the finite verb, the rest, and the verb's other half."""
    finite, end = verb_parts(clause)
    subject = clause.subject.german
    start = (front, finite, subject) if front else (subject, finite)
    return join_words(*start, clause.manner[0], *(p.german for p in clause.middle), end)


def verb_last(clause: Clause, subject: str = "") -> str:
    """A German subordinate clause: the finite verb stands last, rejoined with its particle."""
    finite, end = verb_parts(clause)
    last = end + finite if clause.tense == "present" else join_words(end, finite)
    start = subject or clause.subject.german
    return join_words(start, clause.manner[0], *(p.german for p in clause.middle), last)


def english_clause(clause: Clause, subject: str = "") -> str:
    """English keeps one order: subject, verb (`is buying`, `has bought`), the rest."""
    verb, plural = clause.verb, clause.subject.plural
    if clause.tense == "present":
        finite, main = "are" if plural else "is", verb.english[1]
    else:
        form = AUXILIARIES[verb.auxiliary if clause.tense == "perfect" else clause.tense]
        finite, main = form[2 + plural], verb.english[form[4]]
    start = subject or clause.subject.english
    return join_words(start, finite, clause.manner[1], main, *(p.english for p in clause.middle))


class Dealer:
    """Deals words from shuffled decks, so that every word of a deck comes up equally often.

    The order in which it draws is part of the corpus: another order makes other sentences.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.decks: dict[str, list] = {}

    def deal(self, name: str, items):
        """The next item of the deck `name`; when it runs out, `items` are shuffled again."""
        deck = self.decks.setdefault(name, [])
        if not deck:
            deck.extend(items)
            self.rng.shuffle(deck)
        return deck.pop()

    def chance(self, share: float) -> bool:
        """True with probability `share`."""
        return self.rng.random() < share

    def phrase(self, group: str, case: str, describe: float = 0.5) -> Phrase:
        """A noun phrase about something of `group` (`clothes!`: never in the plural)."""
        plural = not group.endswith("!") and self.chance(0.3)
        group = group.rstrip("!")
        noun = self.deal(f"{group} {case} {plural}", NOUNS[group])
        word = self.deal(f"{plural} {case}", WORDS_BEFORE[plural])
        adjective = None
        if self.chance(describe):
            form = ending(word, case, "p" if plural else noun.gender)
            adjective = self.deal(f"{group} adjective -{form}", ADJECTIVES[group])
            if noun.singular in LEXICON["clashes"].get(adjective.base, []):
                adjective = None
        return noun_phrase(word, adjective, noun, case, plural)

    def object(self, verb: Verb, case: str, describe: float = 0.5) -> Phrase:
        """An object that suits the verb; the pair of the two is noted."""
        phrase = self.phrase(self.deal(verb.name, verb.groups), case, describe)
        return phrase._replace(pairs=(*phrase.pairs, (verb.name, phrase.noun.singular)))

    def place(self, case: str, group: str = "person") -> Phrase:
        """A place: im Park (dative), in den Park (accusative); animals stay outdoors."""
        where = OUTDOORS if group == "animal" else PLACES
        place = self.deal(f"place {group} {case}", where)
        noun = Noun(place.gender, place.name, place.name, "", place.english, "")
        english = place.english_at if case == "dative" else place.english_to
        there = noun_phrase("der", None, noun, case, plural=False)
        return prepositional(place.preposition, there, english)

    def spot(self, case: str) -> Phrase:
        """Near a piece of furniture: `unter dem Tisch`, or `unter den Tisch` for going there."""
        preposition, english = self.deal("spot", LEXICON["spots"])
        noun = self.deal("spot noun", NOUNS["furniture"])
        return prepositional(preposition, noun_phrase("der", None, noun, case, False), english)

    def clause(self, kind: str, tenses: tuple[str, ...]) -> Clause:
        """A clause whose verb is of `kind`: it decides which phrases follow, in which case."""
        verb = self.deal(kind, VERBS[kind])
        if kind == "lying":  # Der Ball liegt unter dem Tisch
            subject = self.phrase(self.deal("lying " + verb.name, verb.groups), "nominative", 0.9)
            return Clause(subject, verb, "present", (self.spot("dative"),))
        tense = self.deal(f"{verb.name} {tenses}", tenses)
        if kind in LEXICON["manners"]:  # Zwei Kinder spielen im Park. Der Hund rennt in den Wald
            group = self.deal(f"{kind} {verb.name}", verb.groups)
            subject = self.phrase(group, "nominative", 0.6)
            where = self.place("dative" if kind == "staying" else "accusative", group)
            manner = ("", "")
            if tense == "present" and self.chance(0.4):
                manner = self.deal("manner " + kind, LEXICON["manners"][kind])
            return Clause(subject, verb, tense, (where,), manner)
        if kind == "laying":  # Das Kind legt den Ball unter den Tisch
            middle = (self.object(verb, "accusative", 0.3), self.spot("accusative"))
            return Clause(self.phrase("person", "nominative", 0.3), verb, tense, middle)
        if kind == "giving":  # Die Frau gibt dem Kind einen Apfel
            receiver = self.phrase("person", "dative", 0.3)
            subject = self.phrase("person", "nominative", 0.3)
            return Clause(subject, verb, tense, (receiver, self.object(verb, "accusative", 0.4)))
        if kind == "playing":  # Der Musiker spielt auf einer alten Geige: English plays it
            thing = self.object(verb, "dative", 0.6)
            on = Phrase("auf " + thing.german, thing.english, thing.pairs)
            return Clause(self.phrase("person", "nominative"), verb, tense, (on,))
        subject = self.phrase("person", "nominative")
        if kind == "helping":  # Das Mädchen hilft dem alten Mann
            return Clause(subject, verb, tense, (self.object(verb, "dative"),))
        return Clause(subject, verb, tense, (self.object(verb, "accusative", 0.6),))

    def short(self, deck: str, tenses: tuple[str, ...] = PRESENT) -> Clause:
        """One of two clauses of a sentence, its kind from a deck of its own."""
        return self.clause(self.deal(deck, SHORT_CLAUSES), tenses)


# Sentences

FRONTED = ("transitive",) * 3 + ("helping", "giving", "playing")
CLAUSES = ("transitive",) * 4 + ("staying",) * 3 + ("lying",) * 3
CLAUSES += ("helping", "giving", "playing", "moving", "laying")
SHORT_CLAUSES = ("transitive",) * 3 + ("helping", "staying", "staying", "moving", "lying", "lying")


def plain(deal: Dealer) -> Phrase:
    """One main clause."""
    clause = deal.clause(deal.deal("clause", CLAUSES), TENSES)
    return Phrase(verb_second(clause), english_clause(clause), clause.pairs)


def fronted(deal: Dealer) -> Phrase:
    """`Im Park liest eine Frau ein Buch`: a time or a place first, so the subject follows."""
    kind = deal.deal("fronted", FRONTED)
    if deal.chance(0.5):
        front, english, *_ = deal.place("dative")
        clause = deal.clause(kind, TENSES)
    else:
        front, english = deal.deal("time", LEXICON["times"])
        clause = deal.clause(kind, PRESENT_OR_FUTURE)
    german = verb_second(clause, front)
    return Phrase(german, f"{english}, {english_clause(clause)}", clause.pairs)


def accompanied(deal: Dealer) -> Phrase:
    """`Eine Frau mit einem blauen Hut ...`: mit takes the dative."""
    kind = deal.deal("accompanied", ("transitive", "transitive", "helping", "playing"))
    clause = deal.clause(kind, TENSES)
    group = deal.deal("with", ("clothes", "container", "tool"))
    who, thing = clause.subject, deal.phrase(group + "!", "dative", 0.8)
    german, english = f"{who.german} mit {thing.german}", f"{who.english} with {thing.english}"
    subject = who._replace(german=german, english=english, pairs=who.pairs + thing.pairs)
    whole = clause._replace(subject=subject)
    return Phrase(verb_second(whole), english_clause(whole), whole.pairs)


def meanwhile(deal: Dealer) -> Phrase:
    """`..., während ...`, or that first: then the main clause begins with its verb."""
    main, side = deal.short("main"), deal.short("side")
    pairs = main.pairs + side.pairs
    if deal.chance(0.4):
        german = verb_second(main, f"während {verb_last(side)},")
        return Phrase(german, f"while {english_clause(side)}, {english_clause(main)}", pairs)
    german = f"{verb_second(main)}, während {verb_last(side)}"
    return Phrase(german, f"{english_clause(main)} while {english_clause(side)}", pairs)


def mood(deal: Dealer) -> Phrase:
    """`das Kind müde ist`: an adjective after its noun. The pair of the two is noted here, too."""
    group = deal.deal("because group", ("person", "person", "animal"))
    who = deal.phrase(group, "nominative", 0.0)
    how = deal.deal(group + " mood", [a for a in ADJECTIVES[group] if a.base in LEXICON["moods"]])
    german = f"{who.german} {how.base} {'sind' if who.plural else 'ist'}"
    english = f"{who.english} {'are' if who.plural else 'is'} {how.english}"
    return Phrase(german, english, pairs=((how.base, who.noun.singular),))


def because(deal: Dealer) -> Phrase:
    """`..., weil das Kind müde ist` or `..., weil der Mann einen Hut gekauft hat`."""
    main = deal.short("main")
    if deal.chance(0.5):
        reason = mood(deal)
    else:
        side = deal.short("side", TENSES)
        reason = Phrase(verb_last(side), english_clause(side), side.pairs)
    german = f"{verb_second(main)}, weil {reason.german}"
    english = f"{english_clause(main)} because {reason.english}"
    return Phrase(german, english, main.pairs + reason.pairs)


def saying(deal: Dealer) -> Phrase:
    """`Der Koch glaubt, dass die Suppe ...`: a clause with dass."""
    one, several, one_english, several_english = deal.deal("saying", LEXICON["saying"])
    who = deal.phrase("person", "nominative", 0.4)
    side = deal.short("side", TENSES)
    says, says_english = (several, several_english) if who.plural else (one, one_english)
    german = f"{who.german} {says}, dass {verb_last(side)}"
    english = f"{who.english} {says_english} that {english_clause(side)}"
    return Phrase(german, english, who.pairs + side.pairs)


def relative(deal: Dealer) -> Phrase:
    """`Ein Mann, der einen Hut trägt, liest ein Buch`: the pronoun agrees, its verb is last."""
    kind = deal.deal("relative main", ("transitive", "transitive", "helping", "playing"))
    main = deal.clause(kind, PRESENT)
    who = main.subject
    side = deal.clause("transitive", PRESENT)._replace(subject=who)
    pronoun = determiner("der", "nominative", "p" if who.plural else who.noun.gender)
    german = f"{who.german}, {verb_last(side, pronoun)},"
    english = english_clause(side, who.english + " who")
    subject = who._replace(german=german, english=english, pairs=side.pairs)
    whole = main._replace(subject=subject)
    return Phrase(verb_second(whole), english_clause(whole), whole.pairs)


SENTENCES = (plain,) * 4 + (fronted,) * 3 + (because, saying, relative, accompanied) * 2
SENTENCES += (meanwhile,)

# Splits


def is_held_out(pair: Pair) -> bool:
    """True for about one in twelve pairs of words, by a checksum: the same on every machine."""
    return zlib.crc32(" ".join(pair).encode()) % 12 == 0


def generate_sentences(seed: int) -> Iterator[tuple[str, str, bool]]:
    """German, English, and whether it is unseen; endless, no sentence of either language twice."""
    deal = Dealer(random.Random(seed))
    earlier = set()
    while True:
        sentence = deal.deal("sentence", SENTENCES)(deal)
        german, english = (text[0].upper() + text[1:] + "." for text in sentence[:2])
        if 5 <= len(german.split()) <= 14 and earlier.isdisjoint((german, english)):
            earlier.update((german, english))
            yield german, english, any(map(is_held_out, sentence.pairs))


def caption_words(pair: Pair) -> list[str]:
    """The words of a sentence pair, lower case; German ones marked: `in` and `in` are two."""
    german, english = (re.findall(r"\w+", text.lower()) for text in pair)
    return ["de:" + word for word in german] + english


def without_rare_words(pairs: list[Pair]) -> list[Pair]:
    """The pairs whose every word occurs at least 11 times among the pairs that remain.

    They become train, val and test, so in train alone a word may occur a few times less.
    """
    rows = [(pair, caption_words(pair)) for pair in pairs]
    while True:
        counts = Counter(word for _, words in rows for word in words)
        common = [row for row in rows if all(counts[word] >= 11 for word in row[1])]
        if len(common) == len(rows):
            return [pair for pair, _ in rows]
        rows = common


SAMPLE_SIZES = {"train": 6000, "val": 300, "test": 400, "test_unseen": 300}


@cache  # it takes seconds, and many callers ask
def sample_corpus(seed: int = 0) -> dict[str, list[Pair]]:
    """Splits 'train', 'val', 'test', 'test_unseen' -> list of (german, english) sentence pairs."""
    total = sum(SAMPLE_SIZES[name] for name in ("train", "val", "test"))
    known, held_out = [], []
    for german, english, unseen in generate_sentences(seed):
        (held_out if unseen else known).append((german, english))
        if len(known) == total * 10 // 9:
            break
    rest = iter(without_rare_words(known))
    corpus = {name: [*islice(rest, SAMPLE_SIZES[name])] for name in ("train", "val", "test")}
    learned = {word for pair in corpus["train"] for word in caption_words(pair)}
    understood = [pair for pair in held_out if learned.issuperset(caption_words(pair))]
    return corpus | {"test_unseen": understood[: SAMPLE_SIZES["test_unseen"]]}
