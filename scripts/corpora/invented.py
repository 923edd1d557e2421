"""Ruvel, a language that nobody speaks, and its English: pairs from a seeded grammar.

`Aleni goralka gura velis rolal.`: The girl carried an apple to the big horse. The verb is last and
an adjective follows its noun; a noun's endings say how many there are, and who does what to whom.
Negation, objects that come first, and only definite objects are made on demand. Its code is qru:
ISO 639 keeps qaa to qtz for what has no other.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from scripts.book.command import Command
from scripts.book.files import write_whole

Pair = tuple[str, str]
Construction = Literal["plain", "negation", "object first", "definite"]

# Nouns: Ruvel, English, and the English plural unless it is made with -s.
BEINGS = "selu woman women, torak man men, mine child children, aleni girl, ruvad teacher"
BEINGS += ", okem neighbour, lirel singer, podun baker, havo dog, simek cat, goral horse"
BEINGS += ", tiven bird, zorun fox foxes, kareb guest"
THINGS = "karu book, dumar stone, velis apple, pemo loaf loaves, kuret basket, lumet lamp"
THINGS += ", sarin letter, bolu hat, zine ring, tagol cup, fesil flower, rodam drum, yute box boxes"
PLACES = "hamur house, nerel river, vosta forest, kipen hill, dalun market, orez bridge"
DESCRIBING_BEINGS = "gura big, piri small, noma old, eli young, misel quiet, obat strange"
DESCRIBING_THINGS = "gura big, noma old, varo red, leke white, dosun heavy, nive new"
POSTPOSITIONS = "sil in, mur behind, tena near"
# Verbs: Ruvel's stem; in English the base, the third person and the past.
SEEING = "mak see sees saw, teb find finds found, lim hear hears heard, dron know knows knew"
MEETING = f"{SEEING}, kes follow follows followed, yam call calls called, pil help helps helped"
HANDLING = f"{SEEING}, bud buy buys bought, sen draw draws drew, hof hide hides hid"
HANDLING += ", vit wash washes washed, rol carry carries carried"
MOVING = "num sleep sleeps slept, kel sing sings sang, gof wait waits waited"
MOVING += ", las laugh laughs laughed, rip run runs ran"
GIVING = "dem give gives gave, tov show shows showed, bir bring brings brought"
BEING = "et be is was"
KINDS = ("meeting", "handling", "handling", "giving", "moving", "describing")
VERBS = {"meeting": MEETING, "handling": HANDLING, "giving": GIVING, "moving": MOVING}


def rows(text: str) -> list[list[str]]:
    """The rows of words of a list above."""
    return [row.split() for row in text.split(", ")]


def with_ending(word: str, ending: str) -> str:
    """`word` and `ending`, whose A is a after a word whose last vowel is a, o or u, and else e."""
    *_, last_vowel = [letter for letter in word if letter in "aeiou"]
    return word + ending.replace("A", "a" if last_vowel in "aou" else "e")


class Noun(NamedTuple):
    """A noun and its adjective in both languages; `english` is without an article."""

    stem: str
    adjective: str
    english: str
    plural: bool

    def ruvel(self, ending: str = "") -> str:
        """The phrase in Ruvel: the endings are the noun's, the adjective has none."""
        word = with_ending(self.stem, "rA") if self.plural else self.stem
        return f"{with_ending(word, ending)} {self.adjective}".strip()


def some_noun(rng: random.Random, nouns: str, adjectives: str) -> Noun:
    """One of `nouns`, sometimes several, sometimes with one of `adjectives`."""
    stem, singular, *irregular = rng.choice(rows(nouns))
    plural, described = rng.random() < 0.3, rng.random() < 0.35
    english = [*irregular, f"{singular}s"][0] if plural else singular
    adjective, english_adjective = rng.choice(rows(adjectives)) if described else ("", "")
    return Noun(stem, adjective, f"{english_adjective} {english}".strip(), plural)


def some_object(rng: random.Random, nouns: str, adjectives: str, known: bool) -> Pair:
    """An object: -ta/-te if it is a known one ("the"), else without an ending ("a")."""
    noun = some_noun(rng, nouns, adjectives)
    if known:
        return noun.ruvel("tA"), f"the {noun.english}"
    article = "" if noun.plural else "an " if noun.english[0] in "aeiou" else "a "
    return noun.ruvel(), article + noun.english


def english_verb(forms: list[str], past: bool, plural: bool, negated: bool) -> str:
    """`saw`, `see` or `sees`; `did not see`, `do not see` or `does not see`."""
    base, third, preterite = forms
    if base == "be":
        return ("were" if plural else "was") if past else ("are" if plural else "is")
    if negated:
        return f"{'did' if past else 'do' if plural else 'does'} not {base}"
    return preterite if past else base if plural else third


def sentence(rng: random.Random, construction: Construction) -> Pair:
    """A random sentence in Ruvel and in English."""
    object_first, negated = construction == "object first", construction == "negation"
    kind = rng.choice(("meeting", "handling") if object_first else KINDS[: 5 if negated else 6])
    subject = some_noun(rng, BEINGS, DESCRIBING_BEINGS)
    past = rng.random() < 0.5
    stem, *forms = rng.choice(rows(VERBS.get(kind, BEING)))
    verb = with_ending(stem, "Al" if past else "An")
    middle, english_end = [], []
    if kind == "describing":
        others = [row for row in rows(DESCRIBING_BEINGS) if row[0] != subject.adjective]
        adjective, english_adjective = rng.choice(others)
        middle, english_end = [adjective], [english_adjective]
    if kind in ("meeting", "handling", "giving"):
        things = (BEINGS, DESCRIBING_BEINGS) if kind == "meeting" else (THINGS, DESCRIBING_THINGS)
        known = object_first or construction == "definite" or rng.random() < 0.5
        thing, english_thing = some_object(rng, *things, known)
        middle, english_end = [thing], [english_thing]
    if kind == "giving":
        receiver = some_noun(rng, BEINGS, DESCRIBING_BEINGS)
        middle.insert(0, receiver.ruvel("kA"))
        english_end.append(f"to the {receiver.english}")
    if kind == "moving" or (kind != "describing" and rng.random() < 0.3):
        place, english_place = rng.choice(rows(PLACES))
        postposition, preposition = rng.choice(rows(POSTPOSITIONS))
        middle.insert(0, f"{place} {postposition}")
        english_end.append(f"{preposition} the {english_place}")
    parts = [subject.ruvel(), *middle]
    if object_first:
        parts = [parts[-1], *parts[:-1]]
    ruvel = " ".join([*parts, *["nok"] * negated, verb])
    finite = english_verb(forms, past, subject.plural, negated)
    english = " ".join(["the", subject.english, finite, *english_end])
    return tuple(f"{text[0].upper()}{text[1:]}." for text in (ruvel, english))


def ruvel_pairs(
    count: int = 2000, seed: int = 1, construction: Construction = "plain"
) -> list[Pair]:
    """`count` different pairs of a Ruvel sentence and its English, by `seed`.

    "plain" ones have no negation (`nok` before the verb), and their object follows the subject; so
    do "definite" ones, of which each object has its ending.
    """
    rng, pairs = random.Random(f"{construction}:{seed}"), {}
    while len(pairs) < count:
        pairs[sentence(rng, construction)] = None
    return list(pairs)


def nouns_of(english: str) -> list[str]:
    """The beings and things in an English text, in their order, each in the singular."""
    singulars = {}
    for _, singular, *plural in rows(f"{BEINGS}, {THINGS}"):
        singulars |= dict.fromkeys([singular, *(plural or [f"{singular}s"])], singular)
    return [singulars[word] for word in re.findall(r"\w+", english.lower()) if word in singulars]


def by_object(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """The pairs whose object is a thing, and those whose object is a being other than the actor."""
    parts = {"a thing": [], "a being": []}
    for pair in pairs:
        actor, object_noun = nouns_of(pair[1])
        if object_noun in nouns_of(THINGS):
            parts["a thing"].append(pair)
        elif object_noun != actor:
            parts["a being"].append(pair)
    return parts


def actors(outputs: Sequence[str], pairs: Sequence[Pair]) -> dict[str, float]:
    """Who acts in the outputs, as their first noun says: a share for each.

    An output without a noun counts as another's.
    """
    counts = {"the true actor": 0, "the object": 0, "another": 0}
    for output, (_, reference) in zip(outputs, pairs, strict=True):
        actor, object_noun = nouns_of(reference)
        roles = {object_noun: "the object", actor: "the true actor"}
        counts[roles.get((nouns_of(output) or [""])[0], "another")] += 1
    return {who: count / len(pairs) for who, count in counts.items()}


def negation(english: str) -> tuple[str, str]:
    """The helper of a negated English sentence and the word after "not": did, sing.

    Two empty texts if it has no "not".
    """
    found = re.search(r"(\w+) not (\w+)", english)
    return found.groups() if found else ("", "")


def base_of(form: str) -> str:
    """The base of an English verb's form, bring for brought; empty for what is no such form."""
    bases = {
        word: base
        for text in VERBS.values()
        for _, base, *more in rows(text)
        for word in (base, *more)
    }
    return bases.get(form, "")


def usual_order(source: str) -> str:
    """A sentence whose object comes first, with the object where it usually stands: at the verb.

    Each word keeps its letters, so it is the object that has the capital one.
    """
    *words, verb = source[:-1].split()
    adjectives = {row[0] for row in rows(f"{DESCRIBING_BEINGS}, {DESCRIBING_THINGS}")}
    size = 2 if words[1] in adjectives else 1  # of the object, in words
    return " ".join([*words[size:], *words[:size], verb]) + "."


def crossed(pairs: list[Pair]) -> dict[tuple[str, str], list[Pair]]:
    """Pairs whose object comes first, in eight forms: by who has a capital letter and who is first.

    All other words are in small letters.
    """
    forms = {}
    for source, target in pairs:
        orders = {"the actor": usual_order(source), "the object": source}
        nouns = {first: text.split()[0].lower() for first, text in orders.items()}
        for capital, first in product(["the actor", "both", "neither", "the object"], orders):
            large = [noun for who, noun in nouns.items() if capital in (who, "both")]
            words = orders[first].lower().split()
            text = " ".join(word.capitalize() if word in large else word for word in words)
            forms.setdefault((capital, first), []).append((text, target))
    return forms


@dataclass
class InventedOptions:
    """Which pairs are written, and where."""

    save: str = "ruvel.tsv"
    """The file: a sentence, a tab and its English on each line."""
    sentences: int = 2000
    """How many."""
    seed: int = 1
    """Decides which ones are drawn."""
    construction: Construction = "plain"
    """What each of them has."""


def write_pairs(options: InventedOptions) -> None:
    """Write sentences of Ruvel and their English into a file."""
    pairs = ruvel_pairs(options.sentences, options.seed, options.construction)
    lines = ("\t".join(pair) + "\n" for pair in pairs)
    write_whole(Path(options.save), "".join(lines).encode())
    print(f"wrote {options.save}: {len(pairs):,} pairs")


main = Command("scripts.corpora.invented", InventedOptions, write_pairs)

if __name__ == "__main__":
    raise SystemExit(main())
