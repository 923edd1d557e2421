"""The sample corpus: German captions and their English, from a lexicon and a few rules of German.

German differs from English where attention is needed: articles and adjectives agree with case,
gender and number; the finite verb is second in a main clause and last in a subordinate one; a
separable verb's particle stands at the other end (`er hebt den Stein auf`). Each phrase is made in
both languages at once. Words are dealt from shuffled decks, so that none is rare, and about one in
twelve combinations of words is kept for `test_unseen`.
"""

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
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
    english: tuple[str, str, str]  # base, -ing form, past participle
    groups: tuple[str, ...]  # of nouns that can be its object or its subject

    @property
    def name(self) -> str:
        return self.particle + self.infinitive


class Place(NamedTuple):
    """A noun with its preposition, and what English says for being there and for going there."""

    noun: Noun
    preposition: str
    english_at: str
    english_to: str


# The lexicon


def lexicon(parse: Callable[[str], tuple], table: str) -> dict[str, tuple]:
    """From `[name] its entries [name] its entries …`: each name with its entries, parsed."""
    _, *parts = re.split(r"\[(\w+)\]", table)
    return dict(zip(parts[::2], map(parse, parts[1::2]), strict=True))


def two_forms(text: str) -> tuple[str, str]:
    """`Junge/Jungen` as two words; without a `/` they are the same."""
    first, _, second = text.partition("/")
    return first, second or first


def nouns(table: str) -> tuple[Noun, ...]:
    """From `m Hut Hüte hat; …`; `Junge/Jungen` is a weak noun, `man/men` no plural in -s."""
    rows = []
    for entry in table.split(";"):
        gender, german, plural, english = entry.split()
        english = two_forms(english) if "/" in english else (english, english + "s")
        rows.append(Noun(gender, *two_forms(german), plural, *english))
    return tuple(rows)


def adjectives(table: str) -> tuple[Adjective, ...]:
    """From `alt = old, müde/müd = tired`: with the stem if it differs."""
    return tuple(Adjective(*two_forms(german), english) for german, english in word_pairs(table))


def word_pairs(table: str) -> tuple[Pair, ...]:
    """From `heute = today, …`."""
    german_english = (entry.split("=") for entry in table.split(","))
    return tuple((german.strip(), english.strip()) for german, english in german_english)


def english_forms(verb: str) -> tuple[str, str, str]:
    """`pick up` to pick up, picking up, picked up; `throw/thrown away` has its own participle."""
    word, *rest = verb.split()
    base, _, participle = word.partition("/")
    twice = re.fullmatch("[^aeiou]*[aeiou][^aeiouwxy]", base)  # run, running
    stem = base + base[-1] if twice else base.removesuffix("e")
    participle = participle or re.sub("([^aeiou])y$", r"\1i", stem) + "ed"
    forms = (base, re.sub("i$", "y", stem) + "ing", participle)
    return tuple(" ".join((form, *rest)) for form in forms)


def verbs(table: str) -> tuple[Verb, ...]:
    """From `auf|heben hebt aufgehoben = pick up: toy tool; …`.

    `|` ends a separable particle, `*` marks a perfect with sein, `!` a group used in the singular.
    """
    rows = []
    for entry in table.split(";"):
        german, english, groups = re.split("[=:]", entry)
        infinitive, singular, participle = german.split()
        particle, _, stem = infinitive.rpartition("|")
        auxiliary = "sein" if participle.startswith("*") else "haben"
        german = (particle, stem, singular, participle.lstrip("*"), auxiliary)
        rows.append(Verb(*german, english_forms(english), tuple(groups.split())))
    return tuple(rows)


def places(table: str) -> tuple[Place, ...]:
    """From lines `preposition at to: gender noun english, …`."""
    rows = []
    for line in re.sub(r",\n", ",", table.strip()).split("\n"):
        prepositions, entries = line.split(":")
        for entry in entries.split(","):
            gender, name, english = entry.split(maxsplit=2)
            noun = Noun(gender, name, name, "", english, "")
            rows.append(Place(noun, *prepositions.split()))
    return tuple(rows)


# Mädchen and Kind occur twice: else neuter people would be rare.
NOUNS = lexicon(
    nouns,
    """
    [person] m Mann Männer man/men; f Frau Frauen woman/women; m Junge/Jungen Jungen boy;
        n Mädchen Mädchen girl; n Kind Kinder child/children; n Mädchen Mädchen girl;
        n Kind Kinder child/children; m Lehrer Lehrer teacher; f Ärztin Ärztinnen doctor;
        m Polizist/Polizisten Polizisten policeman/policemen; m Student/Studenten Studenten student;
        f Künstlerin Künstlerinnen artist; m Koch Köche chef; f Tänzerin Tänzerinnen dancer;
        m Musiker Musiker musician; m Bauer/Bauern Bauern farmer;
        f Verkäuferin Verkäuferinnen saleswoman/saleswomen; m Bäcker Bäcker baker;
        f Großmutter Großmütter grandmother; m Großvater Großväter grandfather;
        m Clown Clowns clown; m Soldat/Soldaten Soldaten soldier;
        f Kellnerin Kellnerinnen waitress/waitresses; m Gärtner Gärtner gardener;
        f Sängerin Sängerinnen singer; m Sportler Sportler athlete;
        f Touristin Touristinnen tourist; m Nachbar/Nachbarn Nachbarn neighbor;
        m Fischer Fischer fisherman/fishermen; f Krankenschwester Krankenschwestern nurse;
        m Gast Gäste guest; m Handwerker Handwerker craftsman/craftsmen
    [animal] m Hund Hunde dog; f Katze Katzen cat; n Pferd Pferde horse; f Kuh Kühe cow;
        f Ziege Ziegen goat; m Affe/Affen Affen monkey; n Kaninchen Kaninchen rabbit;
        m Welpe/Welpen Welpen puppy/puppies; m Bär/Bären Bären bear; m Esel Esel donkey;
        n Schwein Schweine pig; n Huhn Hühner chicken
    [clothes] m Hut Hüte hat; f Mütze Mützen cap; f Jacke Jacken jacket; n Hemd Hemden shirt;
        n Kleid Kleider dress/dresses; m Rock Röcke skirt; m Mantel Mäntel coat;
        m Helm Helme helmet; m Anzug Anzüge suit; m Pullover Pullover sweater;
        f Uniform Uniformen uniform; n Kostüm Kostüme costume; f Maske Masken mask;
        f Schürze Schürzen apron
    [food] m Apfel Äpfel apple; m Kuchen Kuchen cake; f Suppe Suppen soup; f Banane Bananen banana;
        f Birne Birnen pear; f Orange Orangen orange; f Tomate Tomaten tomato/tomatoes;
        f Wurst Würste sausage; m Keks Kekse cookie; m Pfannkuchen Pfannkuchen pancake
    [toy] m Ball Bälle ball; m Drachen Drachen kite; m Luftballon Luftballons balloon;
        m Schläger Schläger racket; f Puppe Puppen doll; m Reifen Reifen tire; m Stein Steine stone;
        n Seil Seile rope
    [tool] m Besen Besen broom; m Hammer Hämmer hammer; f Säge Sägen saw;
        f Schaufel Schaufeln shovel; m Eimer Eimer bucket; f Leiter Leitern ladder;
        f Kamera Kameras camera; n Telefon Telefone telephone; f Fahne Fahnen flag;
        f Lampe Lampen lamp; f Blume Blumen flower
    [container] m Korb Körbe basket; f Kiste Kisten box/boxes; m Koffer Koffer suitcase;
        f Tasche Taschen bag; f Flasche Flaschen bottle; m Rucksack Rucksäcke backpack;
        n Paket Pakete package
    [text] n Buch Bücher book; f Zeitung Zeitungen newspaper; m Brief Briefe letter;
        n Gedicht Gedichte poem; f Geschichte Geschichten story/stories
    [instrument] f Gitarre Gitarren guitar; f Geige Geigen violin; f Trommel Trommeln drum;
        f Flöte Flöten flute; n Klavier Klaviere piano; f Trompete Trompeten trumpet
    [vehicle] n Auto Autos car; n Fahrrad Fahrräder bicycle; n Motorrad Motorräder motorcycle;
        n Boot Boote boat; m Traktor Traktoren tractor; m Lastwagen Lastwagen truck;
        n Taxi Taxis taxi
    [building] n Haus Häuser house; m Turm Türme tower; f Brücke Brücken bridge; f Hütte Hütten hut;
        n Schloss Schlösser castle; n Zelt Zelte tent
    [furniture] m Tisch Tische table; m Stuhl Stühle chair; f Bank Bänke bench/benches;
        n Bett Betten bed; n Sofa Sofas sofa; n Regal Regale shelf/shelves;
        m Schrank Schränke cupboard; m Teppich Teppiche carpet
""",
)

THINGS = adjectives("""
    rot = red, blau = blue, grün = green, gelb = yellow, braun = brown, schwarz = black,
    weiß = white, groß = big, klein = small, neu = new, alt = old, schön = beautiful,
    teuer/teur = expensive
""")
ADJECTIVES = lexicon(
    adjectives,
    """
    [person] jung = young, alt = old, müde/müd = tired, fröhlich = cheerful, traurig = sad,
        freundlich = friendly, stark = strong, berühmt = famous, fleißig = diligent,
        hungrig = hungry, glücklich = happy, klug = clever
    [animal] braun = brown, schwarz = black, weiß = white, hungrig = hungry, müde/müd = tired,
        groß = big, klein = small, alt = old, jung = young
    [food] groß = big, klein = small, frisch = fresh, süß = sweet, teuer/teur = expensive
    [text] alt = old, neu = new, schön = beautiful, berühmt = famous
    [building] groß = big, klein = small, neu = new, alt = old, schön = beautiful, weiß = white
""",
) | dict.fromkeys(
    ("clothes", "toy", "tool", "container", "instrument", "vehicle", "furniture"), THINGS
)
CLASHES = {  # an old child, a sweet sausage
    *(("alt", noun) for noun in ("Kind", "Mädchen", "Junge", "Welpe")),
    *(("jung", noun) for noun in ("Großmutter", "Großvater", "Welpe")),
    *(("süß", noun) for noun in ("Wurst", "Suppe", "Tomate")),
}
MOODS = ("müde", "fröhlich", "traurig", "hungrig", "glücklich")  # for "weil das Kind müde ist"

VERBS = lexicon(
    verbs,
    """
    [transitive] tragen trägt getragen = wear/worn: clothes!;
        waschen wäscht gewaschen = wash: clothes! vehicle;
        an|probieren probiert anprobiert = try on: clothes!;
        aus|ziehen zieht ausgezogen = take/taken off: clothes!;
        werfen wirft geworfen = throw/thrown: toy; fangen fängt gefangen = catch/caught: toy;
        essen isst gegessen = eat/eaten: food; probieren probiert probiert = taste: food;
        schneiden schneidet geschnitten = cut/cut: food;
        kaufen kauft gekauft = buy/bought: food clothes! text;
        verkaufen verkauft verkauft = sell/sold: clothes! food instrument!;
        suchen sucht gesucht = look for: tool container toy;
        verstecken versteckt versteckt = hide/hidden: toy tool container;
        halten hält gehalten = hold/held: tool toy container instrument!;
        auf|heben hebt aufgehoben = pick up: tool toy container;
        hoch|heben hebt hochgehoben = lift: container toy;
        weg|werfen wirft weggeworfen = throw/thrown away: toy tool text;
        mit|nehmen nimmt mitgenommen = take/taken along: container tool;
        aus|packen packt ausgepackt = unpack: container;
        auf|machen macht aufgemacht = open: container; zu|machen macht zugemacht = close: container;
        reparieren repariert repariert = repair: vehicle instrument! furniture!;
        schieben schiebt geschoben = push: vehicle; ziehen zieht gezogen = pull: vehicle;
        parken parkt geparkt = park: vehicle; lesen liest gelesen = read/read: text;
        vor|lesen liest vorgelesen = read/read aloud: text;
        schreiben schreibt geschrieben = write/written: text;
        stimmen stimmt gestimmt = tune: instrument!;
        fotografieren fotografiert fotografiert = photograph: building! animal vehicle;
        malen malt gemalt = paint: building! animal furniture!;
        an|sehen sieht angesehen = look at: building! animal text;
        bauen baut gebaut = build/built: building!; besuchen besucht besucht = visit: person;
        umarmen umarmt umarmt = hug: person; begrüßen begrüßt begrüßt = greet: person;
        füttern füttert gefüttert = feed/fed: animal;
        streicheln streichelt gestreichelt = pet: animal;
        putzen putzt geputzt = clean: furniture! instrument!
    [helping] helfen hilft geholfen = help: person; danken dankt gedankt = thank: person;
        folgen folgt *gefolgt = follow: person animal; zu|hören hört zugehört = listen to: person;
        zu|sehen sieht zugesehen = watch: person animal; zu|winken winkt zugewinkt = wave to: person
    [giving] geben gibt gegeben = give/given: toy food tool;
        zeigen zeigt gezeigt = show/shown: tool text container clothes!;
        bringen bringt gebracht = bring/brought: food tool;
        leihen leiht geliehen = lend/lent: tool text vehicle;
        schicken schickt geschickt = send/sent: text
    [playing] spielen spielt gespielt = play: instrument!; üben übt geübt = practice: instrument!
    [staying] sitzen sitzt gesessen = sit/sat: person animal;
        stehen steht gestanden = stand/stood: person animal;
        schlafen schläft geschlafen = sleep/slept: person animal;
        warten wartet gewartet = wait: person animal; spielen spielt gespielt = play: person animal;
        ein|schlafen schläft *eingeschlafen = fall/fallen asleep: person animal;
        tanzen tanzt getanzt = dance: person; singen singt gesungen = sing/sung: person;
        lachen lacht gelacht = laugh: person; weinen weint geweint = cry: person;
        arbeiten arbeitet gearbeitet = work: person; feiern feiert gefeiert = celebrate: person;
        frühstücken frühstückt gefrühstückt = have/had breakfast: person
    [moving] gehen geht *gegangen = walk: person animal;
        zurück|gehen geht *zurückgegangen = walk back: person;
        rennen rennt *gerannt = run/run: person animal;
        kommen kommt *gekommen = come/come: person animal;
        schleichen schleicht *geschlichen = sneak: person animal; eilen eilt *geeilt = hurry: person
    [lying] liegen liegt gelegen = lie/lain: toy tool text clothes! food toy;
        stehen steht gestanden = stand/stood: container
    [laying] legen legt gelegt = lay/laid: toy tool text clothes! food;
        stellen stellt gestellt = place: container
""",
)

PLACES = places("""
    in in into: m Park park, m Garten garden, m Wald forest, m Zoo zoo, m Hof yard,
        m Supermarkt supermarket, m Keller basement, f Küche kitchen, f Schule school,
        f Kirche church, f Stadt city, f Werkstatt workshop, f Bibliothek library,
        n Museum museum, n Restaurant restaurant, n Krankenhaus hospital,
        n Wohnzimmer living room, n Dorf village
    auf in onto: f Wiese meadow
    auf on onto: f Straße street, f Bühne stage, f Insel island, f Terrasse terrace,
        m Spielplatz playground
    auf in onto: m Marktplatz market square
    auf on onto: m Berg mountain, m Bahnsteig platform, m Balkon balcony, n Dach roof
    auf in onto: n Feld field
    an on to: m Strand beach
    an at to: m See lake, m Fluss river, n Fenster window
""")
INDOORS = """
    Museum Supermarkt Keller Küche Schule Kirche Werkstatt Bibliothek Restaurant Krankenhaus
    Wohnzimmer Bühne Balkon Fenster Bahnsteig
"""
OUTDOORS = tuple(place for place in PLACES if place.noun.singular not in INDOORS.split())


SPOTS = word_pairs("auf=on, unter=under, neben=next to, hinter=behind, vor=in front of")
TIMES = word_pairs("""
    heute = today, jetzt = now, manchmal = sometimes, am Morgen = in the morning,
    am Nachmittag = in the afternoon, am Abend = in the evening, im Sommer = in summer,
    im Winter = in winter, am Sonntag = on Sunday, nach dem Essen = after the meal
""")
MANNERS = {
    "moving": word_pairs("langsam=slowly, leise=quietly, vorsichtig=carefully, plötzlich=suddenly"),
    "staying": word_pairs("noch=still, wieder=again, oft=often, endlich=finally"),
}
SAYING = word_pairs("""
    glaubt glauben = believes believe, sagt sagen = says say, weiß wissen = knows know,
    hofft hoffen = hopes hope, sieht sehen = sees see, hört hören = hears hear,
    denkt denken = thinks think, träumt träumen = dreams dream
""")

# Agreement

CASES = ("nominative", "accusative", "dative")
ARTICLES = {  # nominative, accusative, dative: masculine, feminine, neuter, plural
    "der": "der die das die, den die das die, dem der dem den",
    "dieser": "dieser diese dieses diese, diesen diese dieses diese, diesem dieser diesem diesen",
    "ein": "ein eine ein, einen eine ein, einem einer einem",
}
MANY = "zwei=two, drei=three, vier=four, fünf=five, viele=many, einige=some, mehrere=several"
QUANTITIES = dict(word_pairs(MANY))  # before plurals
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


def place_phrase(place: Place, case: str) -> Phrase:
    """Being there takes the dative (im Park), going there the accusative (in den Park)."""
    there = noun_phrase("der", None, place.noun, case, plural=False)
    english = place.english_at if case == "dative" else place.english_to
    return prepositional(place.preposition, there, english)


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
            if (adjective.base, noun.singular) in CLASHES:
                adjective = None
        return noun_phrase(word, adjective, noun, case, plural)

    def object(self, verb: Verb, case: str, describe: float = 0.5) -> Phrase:
        """An object that suits the verb; the pair of the two is noted."""
        phrase = self.phrase(self.deal(verb.name, verb.groups), case, describe)
        return phrase._replace(pairs=(*phrase.pairs, (verb.name, phrase.noun.singular)))

    def place(self, case: str, group: str = "person") -> Phrase:
        """A place, to be at (dative) or to go to (accusative); animals stay outdoors."""
        where = OUTDOORS if group == "animal" else PLACES
        return place_phrase(self.deal(f"place {group} {case}", where), case)

    def spot(self, case: str) -> Phrase:
        """Near a piece of furniture: `unter dem Tisch`, or `unter den Tisch` for going there."""
        preposition, english = self.deal("spot", SPOTS)
        noun = self.deal("spot noun", NOUNS["furniture"])
        return prepositional(preposition, noun_phrase("der", None, noun, case, False), english)

    def clause(self, kind: str, tenses: tuple[str, ...]) -> Clause:
        """A clause whose verb is of `kind`: it decides which phrases follow, in which case."""
        verb = self.deal(kind, VERBS[kind])
        if kind == "lying":  # Der Ball liegt unter dem Tisch
            subject = self.phrase(self.deal("lying " + verb.name, verb.groups), "nominative", 0.9)
            return Clause(subject, verb, "present", (self.spot("dative"),))
        tense = self.deal(f"{verb.name} {tenses}", tenses)
        if kind in MANNERS:  # Zwei Kinder spielen im Park. Der Hund rennt in den Wald
            group = self.deal(f"{kind} {verb.name}", verb.groups)
            subject = self.phrase(group, "nominative", 0.6)
            where = self.place("dative" if kind == "staying" else "accusative", group)
            often = tense == "present" and self.chance(0.4)
            manner = self.deal("manner " + kind, MANNERS[kind]) if often else ("", "")
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
        front, english = deal.deal("time", TIMES)
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
    how = deal.deal(group + " mood", [a for a in ADJECTIVES[group] if a.base in MOODS])
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
    german, english = deal.deal("saying", SAYING)
    who = deal.phrase("person", "nominative", 0.4)
    side = deal.short("side", TENSES)
    german = f"{who.german} {german.split()[who.plural]}, dass {verb_last(side)}"
    english = f"{who.english} {english.split()[who.plural]} that {english_clause(side)}"
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
