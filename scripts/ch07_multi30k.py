# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 7 · Multi30k
#
# After this chapter you can turn two files of sentences into the batches of numbers that a Transformer is trained on, and you know what each step costs: what a vocabulary can't say, what a subword is, and how much of a batch is padding.
#
# *Attention Is All You Need*, §5.1; Elliott et al. 2016 for the data; Sennrich et al. 2016 for the subwords. About 40 minutes to read; less than a minute to run on a CPU, and no GPU needed.
#
# Previous: [Chapter 6 · Training](ch06_training.ipynb) · Next: [Chapter 8 · Going fast](ch08_going_fast.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. In this chapter the source is German and the target is English.

# %% tags=["bootstrap"]
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "set SERIES_REPOSITORY").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))

# %% [markdown]
# The way from text to tensors has five steps, and this chapter walks them in order:
#
# | step | from | to | section |
# |---|---|---|---|
# | read | two files, or a grammar | pairs of sentences | 1 to 3 |
# | tokenise | a sentence | words, or pieces of words | 4 and 6 |
# | number | a word or a piece | an id between 0 and V − 1 | 5 and 6 |
# | batch | pairs of unequal length | groups of similar length | 7 and 8 |
# | pad | a group of B pairs | ids (B, S) and (B, T+1) | 8 |

# %%
import gzip
import hashlib
import io
import os
import random
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import altair as alt
import pandas as pd
import torch

from scripts.book.charts import bars, heatmap, lines, titled
from scripts.book.exercises import rejection
from scripts.book.records import load_record
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch06_training import BOS, EOS, PAD, UNK, Batch

pd.set_option("display.max_colwidth", None)  # show whole sentences

# %% [markdown]
# ## 1 · Two corpora behind one call
#
# > **In short.** `load_corpus("multi30k")` gives 29,000 real captions. `load_corpus("sample")` gives 6,000 captions that this chapter makes up itself. Everything after that line is the same.
#
# **Multi30k** is the corpus of this series: captions of photographs, English from Flickr, translated into German by professional translators (Elliott et al. 2016). It is small enough for a laptop and real enough to be hard. It has to be downloaded.
#
# **The sample corpus** needs no download, so that the whole series runs offline, in a test, on a train. Its German is correct German, but its world is small: few sentence patterns, no rare words, no surprises. A small model learns it on two CPU cores in about two minutes.
#
# Both are a dictionary from the name of a split to a list of (German, English) pairs. `train` is for learning, `val` for watching the learning, and each test set is looked at when all decisions are made.


# %%
def load_corpus(name: str) -> dict[str, list[tuple[str, str]]]:
    """Both corpora behind one call: "sample" (generated, offline) or "multi30k"; split to pairs."""
    if name == "sample":
        return sample_corpus()
    if name == "multi30k":
        return multi30k()
    raise ValueError(f"unknown corpus {name!r}: choose sample or multi30k")


# %% [markdown]
# ## 2 · A corpus from a grammar
#
# > **In short.** A lexicon, a few rules of German, and shuffled decks of words: out come thousands of sentence pairs that are correct by construction.
#
# Why make a corpus by hand? Because we then *know* what there is to learn. German differs from English in exactly the ways that make attention necessary:
#
# - **agreement**: article and adjective change with gender, case and number: *ein roter Hut*, *einen roten Hut*, *mit einem roten Hut*;
# - **order**: the finite verb is second in a main clause, and last in a subordinate one: *… weil ein Mann den Hut **kauft***;
# - **split verbs**: *er **hebt** den Stein **auf***: the word that completes the verb stands at the other end of the sentence.
#
# To translate *hebt*, a model must look ahead for *auf* (picks up), *hoch* (lifts), or neither. No window of fixed size does that. Attention does.
#
# ### 2.1 · Four kinds of words
#
# Each entry holds the German forms that can't be guessed, and the English ones.


# %%
@dataclass(frozen=True)
class Noun:
    """A German noun and its English translation, each with its plural.

    `oblique` is the accusative and dative singular: the nominative again, but for weak masculine nouns
    (der Junge, den Jungen, dem Jungen).
    """

    gender: str  # "m", "f" or "n"
    singular: str
    oblique: str
    plural: str
    english: str
    english_plural: str


@dataclass(frozen=True)
class Adjective:
    """`base` as a predicate (ist dunkel), `stem` before an ending (ein dunkler Wald)."""

    base: str
    stem: str
    english: str


@dataclass(frozen=True)
class Verb:
    """A verb; `particle` is the part of a separable verb that moves to the end (hebt ... hoch)."""

    particle: str
    infinitive: str  # without the particle; also the third person plural
    singular: str  # third person singular
    participle: str
    auxiliary: str  # "haben" or "sein"
    english: tuple[str, str, str]  # base, -ing form, past participle
    groups: tuple[str, ...]  # groups of nouns that can be its object or its place


@dataclass(frozen=True)
class Place:
    """A noun with its German preposition, and what English says for being there and for going there."""

    noun: Noun
    preposition: str
    english_at: str
    english_to: str


# %% [markdown]
# A lexicon is easiest to check as a table, so it is written as one: a line for each word, German before the semicolon, English after it. These four functions read the tables.


# %%
def table_rows(table: str) -> list[list[list[str]]]:
    """Rows of a table: lines; `;` between fields, `,` between the items of a field."""
    lines = [line for line in table.strip().split("\n") if line.strip()]
    return [[[x.strip() for x in f.split(",")] for f in line.split(";")] for line in lines]


def nouns(table: str) -> tuple[Noun, ...]:
    """Nouns from lines `gender, singular, plural; english, plural` (weak nouns: `Junge/Jungen`)."""
    made = []
    for (gender, singular, plural), (english, english_plural) in table_rows(table):
        nominative, _, oblique = singular.partition("/")
        made.append(
            Noun(gender, nominative, oblique or nominative, plural, english, english_plural)
        )
    return tuple(made)


def adjectives(table: str) -> tuple[Adjective, ...]:
    """Adjectives from items `alt = old` or, where the stem changes, `müde/müd = tired`."""
    made = []
    for item in table.replace("\n", " ").split(","):
        german, english = (x.strip() for x in item.split("="))
        base, _, stem = german.partition("/")
        made.append(Adjective(base, stem or base, english))
    return tuple(made)


def verbs(table: str) -> tuple[Verb, ...]:
    """Verbs from lines `infinitive, singular, participle; base, -ing, participle; groups`.

    `auf|heben` marks a separable verb, `*gerannt` a perfect with sein.
    """
    made = []
    for (infinitive, singular, participle), english, (groups,) in table_rows(table):
        particle, _, stem = infinitive.rpartition("|")
        auxiliary = "sein" if participle.startswith("*") else "haben"
        participle = participle.lstrip("*")
        made.append(
            Verb(
                particle,
                stem,
                singular,
                participle,
                auxiliary,
                tuple(english),
                tuple(groups.split()),
            )
        )
    return tuple(made)


def places(table: str) -> tuple[Place, ...]:
    """Places from lines `preposition gender noun; at, to; english noun`."""
    made = []
    for (german,), (at, to), (english,) in table_rows(table):
        preposition, gender, name = german.split()
        made.append(Place(Noun(gender, name, name, "", english, ""), preposition, at, to))
    return tuple(made)


# %%
hut, junge = nouns("""
    m, Hut, Hüte; hat, hats
    m, Junge/Jungen, Jungen; boy, boys
""")
(aufheben,) = verbs("auf|heben, hebt, aufgehoben; pick up, picking up, picked up; toy tool")
assert (hut.oblique, junge.oblique) == ("Hut", "Jungen")
assert (aufheben.particle, aufheben.infinitive, aufheben.auxiliary) == ("auf", "heben", "haben")
assert adjectives("alt = old, müde/müd = tired")[1] == Adjective("müde", "müd", "tired")

# %% [markdown]
# ### 2.2 · The lexicon
#
# Nouns come in groups, since a verb wants a fitting object: one eats food and repairs vehicles. *Mädchen* and *Kind* stand twice: they are the only people of neuter gender, and the forms that go with neuter nouns shouldn't be rare.

# %%
PEOPLE = nouns("""
    m, Mann, Männer; man, men
    f, Frau, Frauen; woman, women
    m, Junge/Jungen, Jungen; boy, boys
    n, Mädchen, Mädchen; girl, girls
    n, Kind, Kinder; child, children
    n, Mädchen, Mädchen; girl, girls
    n, Kind, Kinder; child, children
    m, Lehrer, Lehrer; teacher, teachers
    f, Ärztin, Ärztinnen; doctor, doctors
    m, Polizist/Polizisten, Polizisten; policeman, policemen
    m, Student/Studenten, Studenten; student, students
    f, Künstlerin, Künstlerinnen; artist, artists
    m, Koch, Köche; chef, chefs
    f, Tänzerin, Tänzerinnen; dancer, dancers
    m, Musiker, Musiker; musician, musicians
    m, Bauer/Bauern, Bauern; farmer, farmers
    f, Verkäuferin, Verkäuferinnen; saleswoman, saleswomen
    m, Bäcker, Bäcker; baker, bakers
    f, Großmutter, Großmütter; grandmother, grandmothers
    m, Großvater, Großväter; grandfather, grandfathers
    m, Clown, Clowns; clown, clowns
    m, Soldat/Soldaten, Soldaten; soldier, soldiers
    f, Kellnerin, Kellnerinnen; waitress, waitresses
    m, Gärtner, Gärtner; gardener, gardeners
    f, Sängerin, Sängerinnen; singer, singers
    m, Sportler, Sportler; athlete, athletes
    f, Touristin, Touristinnen; tourist, tourists
    m, Nachbar/Nachbarn, Nachbarn; neighbor, neighbors
    m, Fischer, Fischer; fisherman, fishermen
    f, Krankenschwester, Krankenschwestern; nurse, nurses
    m, Gast, Gäste; guest, guests
    m, Handwerker, Handwerker; craftsman, craftsmen
""")

# %%
ANIMALS = nouns("""
    m, Hund, Hunde; dog, dogs
    f, Katze, Katzen; cat, cats
    n, Pferd, Pferde; horse, horses
    f, Kuh, Kühe; cow, cows
    f, Ziege, Ziegen; goat, goats
    m, Affe/Affen, Affen; monkey, monkeys
    n, Kaninchen, Kaninchen; rabbit, rabbits
    m, Welpe/Welpen, Welpen; puppy, puppies
    m, Bär/Bären, Bären; bear, bears
    m, Esel, Esel; donkey, donkeys
    n, Schwein, Schweine; pig, pigs
    n, Huhn, Hühner; chicken, chickens
""")

CLOTHES = nouns("""
    m, Hut, Hüte; hat, hats
    f, Mütze, Mützen; cap, caps
    f, Jacke, Jacken; jacket, jackets
    n, Hemd, Hemden; shirt, shirts
    n, Kleid, Kleider; dress, dresses
    m, Rock, Röcke; skirt, skirts
    m, Mantel, Mäntel; coat, coats
    m, Helm, Helme; helmet, helmets
    m, Anzug, Anzüge; suit, suits
    m, Pullover, Pullover; sweater, sweaters
    f, Uniform, Uniformen; uniform, uniforms
    n, Kostüm, Kostüme; costume, costumes
    f, Maske, Masken; mask, masks
    f, Schürze, Schürzen; apron, aprons
""")

FOOD = nouns("""
    m, Apfel, Äpfel; apple, apples
    m, Kuchen, Kuchen; cake, cakes
    f, Suppe, Suppen; soup, soups
    f, Banane, Bananen; banana, bananas
    f, Birne, Birnen; pear, pears
    f, Orange, Orangen; orange, oranges
    f, Tomate, Tomaten; tomato, tomatoes
    f, Wurst, Würste; sausage, sausages
    m, Keks, Kekse; cookie, cookies
    m, Pfannkuchen, Pfannkuchen; pancake, pancakes
""")

# %%
TOYS = nouns("""
    m, Ball, Bälle; ball, balls
    m, Drachen, Drachen; kite, kites
    m, Luftballon, Luftballons; balloon, balloons
    m, Schläger, Schläger; racket, rackets
    f, Puppe, Puppen; doll, dolls
    m, Reifen, Reifen; tire, tires
    m, Stein, Steine; stone, stones
    n, Seil, Seile; rope, ropes
""")

TOOLS = nouns("""
    m, Besen, Besen; broom, brooms
    m, Hammer, Hämmer; hammer, hammers
    f, Säge, Sägen; saw, saws
    f, Schaufel, Schaufeln; shovel, shovels
    m, Eimer, Eimer; bucket, buckets
    f, Leiter, Leitern; ladder, ladders
    f, Kamera, Kameras; camera, cameras
    n, Telefon, Telefone; telephone, telephones
    f, Fahne, Fahnen; flag, flags
    f, Lampe, Lampen; lamp, lamps
    f, Blume, Blumen; flower, flowers
""")

CONTAINERS = nouns("""
    m, Korb, Körbe; basket, baskets
    f, Kiste, Kisten; box, boxes
    m, Koffer, Koffer; suitcase, suitcases
    f, Tasche, Taschen; bag, bags
    f, Flasche, Flaschen; bottle, bottles
    m, Rucksack, Rucksäcke; backpack, backpacks
    n, Paket, Pakete; package, packages
""")

TEXTS = nouns("""
    n, Buch, Bücher; book, books
    f, Zeitung, Zeitungen; newspaper, newspapers
    m, Brief, Briefe; letter, letters
    n, Gedicht, Gedichte; poem, poems
    f, Geschichte, Geschichten; story, stories
""")

# %%
INSTRUMENTS = nouns("""
    f, Gitarre, Gitarren; guitar, guitars
    f, Geige, Geigen; violin, violins
    f, Trommel, Trommeln; drum, drums
    f, Flöte, Flöten; flute, flutes
    n, Klavier, Klaviere; piano, pianos
    f, Trompete, Trompeten; trumpet, trumpets
""")

VEHICLES = nouns("""
    n, Auto, Autos; car, cars
    n, Fahrrad, Fahrräder; bicycle, bicycles
    n, Motorrad, Motorräder; motorcycle, motorcycles
    n, Boot, Boote; boat, boats
    m, Traktor, Traktoren; tractor, tractors
    m, Lastwagen, Lastwagen; truck, trucks
    n, Taxi, Taxis; taxi, taxis
""")

BUILDINGS = nouns("""
    n, Haus, Häuser; house, houses
    m, Turm, Türme; tower, towers
    f, Brücke, Brücken; bridge, bridges
    f, Hütte, Hütten; hut, huts
    n, Schloss, Schlösser; castle, castles
    n, Zelt, Zelte; tent, tents
""")

FURNITURE = nouns("""
    m, Tisch, Tische; table, tables
    m, Stuhl, Stühle; chair, chairs
    f, Bank, Bänke; bench, benches
    n, Bett, Betten; bed, beds
    n, Sofa, Sofas; sofa, sofas
    n, Regal, Regale; shelf, shelves
    m, Schrank, Schränke; cupboard, cupboards
    m, Teppich, Teppiche; carpet, carpets
""")

# %%
NOUNS = {
    "person": PEOPLE,
    "animal": ANIMALS,
    "clothes": CLOTHES,
    "food": FOOD,
    "toy": TOYS,
    "tool": TOOLS,
    "container": CONTAINERS,
    "text": TEXTS,
    "instrument": INSTRUMENTS,
    "vehicle": VEHICLES,
    "building": BUILDINGS,
    "furniture": FURNITURE,
}

# %% [markdown]
# Adjectives belong to groups as well. `CLASHES` lists what would be odd: an old child, a sweet sausage.

# %%
PERSON_ADJECTIVES = adjectives("""
    jung = young, alt = old, müde/müd = tired, fröhlich = cheerful, traurig = sad, freundlich = friendly,
    stark = strong, berühmt = famous, fleißig = diligent, hungrig = hungry, glücklich = happy, klug = clever
""")
ANIMAL_ADJECTIVES = adjectives("""
    braun = brown, schwarz = black, weiß = white, hungrig = hungry, müde/müd = tired,
    groß = big, klein = small, alt = old, jung = young
""")
THING_ADJECTIVES = adjectives("""
    rot = red, blau = blue, grün = green, gelb = yellow, braun = brown, schwarz = black, weiß = white,
    groß = big, klein = small, neu = new, alt = old, schön = beautiful, teuer/teur = expensive
""")
FOOD_ADJECTIVES = adjectives("""
    groß = big, klein = small, frisch = fresh, süß = sweet, teuer/teur = expensive
""")
TEXT_ADJECTIVES = adjectives("""
    alt = old, neu = new, schön = beautiful, berühmt = famous
""")
BUILDING_ADJECTIVES = adjectives("""
    groß = big, klein = small, neu = new, alt = old, schön = beautiful, weiß = white
""")
ADJECTIVES = {
    "person": PERSON_ADJECTIVES,
    "animal": ANIMAL_ADJECTIVES,
    "food": FOOD_ADJECTIVES,
    "text": TEXT_ADJECTIVES,
    "building": BUILDING_ADJECTIVES,
} | {
    g: THING_ADJECTIVES
    for g in ("clothes", "toy", "tool", "container", "instrument", "vehicle", "furniture")
}
CLASHES = {
    *(("alt", noun) for noun in ("Kind", "Mädchen", "Junge", "Welpe")),
    *(("jung", noun) for noun in ("Großmutter", "Großvater", "Welpe")),
    *(("süß", noun) for noun in ("Wurst", "Suppe", "Tomate")),
}
MOODS = ("müde", "fröhlich", "traurig", "hungrig", "glücklich")  # for "weil das Kind müde ist"

# %% [markdown]
# Verbs: infinitive, third person singular, past participle; then English base, *-ing* form and participle; then the groups of nouns that go with it. `|` marks a separable verb, `*` a perfect with *sein* (*ist gerannt*), and `!` a group that is used in the singular only.

# %%
TRANSITIVE_VERBS = verbs("""
    tragen, trägt, getragen; wear, wearing, worn; clothes!
    waschen, wäscht, gewaschen; wash, washing, washed; clothes! vehicle
    an|probieren, probiert, anprobiert; try on, trying on, tried on; clothes!
    aus|ziehen, zieht, ausgezogen; take off, taking off, taken off; clothes!
    werfen, wirft, geworfen; throw, throwing, thrown; toy
    fangen, fängt, gefangen; catch, catching, caught; toy
    essen, isst, gegessen; eat, eating, eaten; food
    probieren, probiert, probiert; taste, tasting, tasted; food
    schneiden, schneidet, geschnitten; cut, cutting, cut; food
    kaufen, kauft, gekauft; buy, buying, bought; food clothes! text
    verkaufen, verkauft, verkauft; sell, selling, sold; clothes! food instrument!
    suchen, sucht, gesucht; look for, looking for, looked for; tool container toy
    verstecken, versteckt, versteckt; hide, hiding, hidden; toy tool container
    halten, hält, gehalten; hold, holding, held; tool toy container instrument!
    auf|heben, hebt, aufgehoben; pick up, picking up, picked up; tool toy container
    hoch|heben, hebt, hochgehoben; lift, lifting, lifted; container toy
    weg|werfen, wirft, weggeworfen; throw away, throwing away, thrown away; toy tool text
    mit|nehmen, nimmt, mitgenommen; take along, taking along, taken along; container tool
    aus|packen, packt, ausgepackt; unpack, unpacking, unpacked; container
    auf|machen, macht, aufgemacht; open, opening, opened; container
    zu|machen, macht, zugemacht; close, closing, closed; container
    reparieren, repariert, repariert; repair, repairing, repaired; vehicle instrument! furniture!
    schieben, schiebt, geschoben; push, pushing, pushed; vehicle
    ziehen, zieht, gezogen; pull, pulling, pulled; vehicle
    parken, parkt, geparkt; park, parking, parked; vehicle
    lesen, liest, gelesen; read, reading, read; text
    vor|lesen, liest, vorgelesen; read aloud, reading aloud, read aloud; text
    schreiben, schreibt, geschrieben; write, writing, written; text
    stimmen, stimmt, gestimmt; tune, tuning, tuned; instrument!
    fotografieren, fotografiert, fotografiert; photograph, photographing, photographed; building! animal vehicle
    malen, malt, gemalt; paint, painting, painted; building! animal furniture!
    an|sehen, sieht, angesehen; look at, looking at, looked at; building! animal text
    bauen, baut, gebaut; build, building, built; building!
    besuchen, besucht, besucht; visit, visiting, visited; person
    umarmen, umarmt, umarmt; hug, hugging, hugged; person
    begrüßen, begrüßt, begrüßt; greet, greeting, greeted; person
    füttern, füttert, gefüttert; feed, feeding, fed; animal
    streicheln, streichelt, gestreichelt; pet, petting, petted; animal
    putzen, putzt, geputzt; clean, cleaning, cleaned; furniture! instrument!
""")

# %%
VERBS = {
    "transitive": TRANSITIVE_VERBS,
    "dative": verbs("""
        helfen, hilft, geholfen; help, helping, helped; person
        danken, dankt, gedankt; thank, thanking, thanked; person
        folgen, folgt, *gefolgt; follow, following, followed; person animal
        zu|hören, hört, zugehört; listen to, listening to, listened to; person
        zu|sehen, sieht, zugesehen; watch, watching, watched; person animal
        zu|winken, winkt, zugewinkt; wave to, waving to, waved to; person
    """),
    "giving": verbs("""
        geben, gibt, gegeben; give, giving, given; toy food tool
        zeigen, zeigt, gezeigt; show, showing, shown; tool text container clothes!
        bringen, bringt, gebracht; bring, bringing, brought; food tool
        leihen, leiht, geliehen; lend, lending, lent; tool text vehicle
        schicken, schickt, geschickt; send, sending, sent; text
    """),
    "playing": verbs("""
        spielen, spielt, gespielt; play, playing, played; instrument!
        üben, übt, geübt; practice, practicing, practiced; instrument!
    """),
    "staying": verbs("""
        sitzen, sitzt, gesessen; sit, sitting, sat; person animal
        stehen, steht, gestanden; stand, standing, stood; person animal
        schlafen, schläft, geschlafen; sleep, sleeping, slept; person animal
        warten, wartet, gewartet; wait, waiting, waited; person animal
        spielen, spielt, gespielt; play, playing, played; person animal
        ein|schlafen, schläft, *eingeschlafen; fall asleep, falling asleep, fallen asleep; person animal
        tanzen, tanzt, getanzt; dance, dancing, danced; person
        singen, singt, gesungen; sing, singing, sung; person
        lachen, lacht, gelacht; laugh, laughing, laughed; person
        weinen, weint, geweint; cry, crying, cried; person
        arbeiten, arbeitet, gearbeitet; work, working, worked; person
        feiern, feiert, gefeiert; celebrate, celebrating, celebrated; person
        frühstücken, frühstückt, gefrühstückt; have breakfast, having breakfast, had breakfast; person
    """),
    "moving": verbs("""
        gehen, geht, *gegangen; walk, walking, walked; person animal
        zurück|gehen, geht, *zurückgegangen; walk back, walking back, walked back; person
        rennen, rennt, *gerannt; run, running, run; person animal
        kommen, kommt, *gekommen; come, coming, come; person animal
        schleichen, schleicht, *geschlichen; sneak, sneaking, sneaked; person animal
        eilen, eilt, *geeilt; hurry, hurrying, hurried; person
    """),
    "lying": verbs("""
        liegen, liegt, gelegen; lie, lying, lain; toy tool text clothes! food toy
        stehen, steht, gestanden; stand, standing, stood; container
    """),
    "laying": verbs("""
        legen, legt, gelegt; lay, laying, laid; toy tool text clothes! food
        stellen, stellt, gestellt; place, placing, placed; container
    """),
}

# %% [markdown]
# Places bring their German preposition, and the two English ones: for being there and for going there.

# %%
PLACES = places("""
    in m Park; in, into; park
    in m Garten; in, into; garden
    in m Wald; in, into; forest
    in m Zoo; in, into; zoo
    in m Hof; in, into; yard
    in m Supermarkt; in, into; supermarket
    in m Keller; in, into; basement
    in f Küche; in, into; kitchen
    in f Schule; in, into; school
    in f Kirche; in, into; church
    in f Stadt; in, into; city
    in f Werkstatt; in, into; workshop
    in f Bibliothek; in, into; library
    in n Museum; in, into; museum
    in n Restaurant; in, into; restaurant
    in n Krankenhaus; in, into; hospital
    in n Wohnzimmer; in, into; living room
    in n Dorf; in, into; village
    auf f Wiese; in, onto; meadow
    auf f Straße; on, onto; street
    auf f Bühne; on, onto; stage
    auf f Insel; on, onto; island
    auf f Terrasse; on, onto; terrace
    auf m Spielplatz; on, onto; playground
    auf m Marktplatz; in, onto; market square
    auf m Berg; on, onto; mountain
    auf m Bahnsteig; on, onto; platform
    auf m Balkon; on, onto; balcony
    auf n Dach; on, onto; roof
    auf n Feld; in, onto; field
    an m Strand; on, to; beach
    an m See; at, to; lake
    an m Fluss; at, to; river
    an n Fenster; at, to; window
""")
INDOORS = ("Museum", "Supermarkt", "Keller", "Küche", "Schule", "Kirche", "Werkstatt", "Bibliothek",
    "Restaurant", "Krankenhaus", "Wohnzimmer", "Bühne", "Balkon", "Fenster", "Bahnsteig")  # fmt: skip
OUTDOOR_PLACES = tuple(place for place in PLACES if place.noun.singular not in INDOORS)

# %%
SPOTS = (
    ("auf", "on"),
    ("unter", "under"),
    ("neben", "next to"),
    ("hinter", "behind"),
    ("vor", "in front of"),
)
TIMES = (
    ("heute", "today"),
    ("jetzt", "now"),
    ("manchmal", "sometimes"),
    ("am Morgen", "in the morning"),
    ("am Nachmittag", "in the afternoon"),
    ("am Abend", "in the evening"),
    ("im Sommer", "in summer"),
    ("im Winter", "in winter"),
    ("am Sonntag", "on Sunday"),
    ("nach dem Essen", "after the meal"),
)
MANNERS = {
    "moving": (
        ("langsam", "slowly"),
        ("leise", "quietly"),
        ("vorsichtig", "carefully"),
        ("plötzlich", "suddenly"),
    ),
    "staying": (("noch", "still"), ("wieder", "again"), ("oft", "often"), ("endlich", "finally")),
}
SAYING = (
    ("glaubt", "glauben", "believes", "believe"),
    ("sagt", "sagen", "says", "say"),
    ("weiß", "wissen", "knows", "know"),
    ("hofft", "hoffen", "hopes", "hope"),
    ("sieht", "sehen", "sees", "see"),
    ("hört", "hören", "hears", "hear"),
    ("denkt", "denken", "thinks", "think"),
    ("träumt", "träumen", "dreams", "dream"),
)

# %% [markdown]
# ### 2.3 · Agreement
#
# > **In short.** In German the article says gender, case and number. The adjective adds what the article has left unsaid.
#
# Three small tables hold everything. After *der* and *dieser*, which show the case themselves, adjectives have the weak endings -e and -en. After *ein*, which may be masculine or neuter, they show the gender (mixed endings). After a number there is no article, and the adjective carries the case (strong endings).

# %%
CASES = ("nominative", "accusative", "dative")
DETERMINERS = {  # a row a case: masculine, feminine, neuter, plural
    "der": (
        ("der", "die", "das", "die"),
        ("den", "die", "das", "die"),
        ("dem", "der", "dem", "den"),
    ),
    "dieser": (
        ("dieser", "diese", "dieses", "diese"),
        ("diesen", "diese", "dieses", "diese"),
        ("diesem", "dieser", "diesem", "diesen"),
    ),
    "ein": (("ein", "eine", "ein"), ("einen", "eine", "ein"), ("einem", "einer", "einem")),
}
QUANTITIES = {  # plural only: nominative, accusative, dative
    "zwei": ("two", "zwei", "zwei", "zwei"),
    "drei": ("three", "drei", "drei", "drei"),
    "vier": ("four", "vier", "vier", "vier"),
    "fünf": ("five", "fünf", "fünf", "fünf"),
    "viele": ("many", "viele", "viele", "vielen"),
    "einige": ("some", "einige", "einige", "einigen"),
    "mehrere": ("several", "mehrere", "mehrere", "mehreren"),
}
WORDS_BEFORE = {
    "singular": ("ein", "ein", "ein", "ein", "der", "dieser"),
    "plural": ("der", "dieser", *QUANTITIES),
}
CONTRACTIONS = {"in dem": "im", "an dem": "am", "in das": "ins", "an das": "ans"}


def determiner(word: str, case: str, gender: str) -> str:
    """The form of `ein`, `der`, `dieser` or a quantity; `gender` is m, f, n or "p" for the plural."""
    row = CASES.index(case)
    if word in QUANTITIES:
        return QUANTITIES[word][1 + row]
    return DETERMINERS[word][row]["mfnp".index(gender)]


def ending(word: str, case: str, gender: str) -> str:
    """Ending of an adjective after the determiner `word`: weak after der/dieser, mixed after ein, strong after a quantity."""
    if gender == "p":
        return "e" if word in QUANTITIES and case != "dative" else "en"
    if case == "dative" or (case == "accusative" and gender == "m"):
        return "en"
    if word == "ein":
        return {"m": "er", "f": "e", "n": "es"}[gender]
    return "e"


def noun_form(noun: Noun, case: str, plural: bool) -> str:
    """The noun in its case; a dative plural takes -n unless it ends in -n or -s."""
    if not plural:
        return noun.singular if case == "nominative" else noun.oblique
    if case == "dative" and noun.plural[-1] not in "ns":
        return noun.plural + "n"
    return noun.plural


# %% [markdown]
# A phrase is made in both languages at once, so German and English can't drift apart.


# %%
@dataclass(frozen=True)
class Phrase:
    """The same thing in both languages, and the pairs of words that it combines."""

    german: str
    english: str
    plural: bool = False
    noun: Noun | None = None
    pairs: tuple[tuple[str, str], ...] = ()


def join_words(*parts: str) -> str:
    """The parts that aren't empty, with spaces between them."""
    return " ".join(part for part in parts if part)


def with_article(english: str) -> str:
    """`a` or `an` before an English noun phrase."""
    vowel = english[0] in "aeiou" and not english.startswith("uni")
    return ("an " if vowel else "a ") + english


def noun_phrase(
    word: str, adjective: Adjective | None, noun: Noun, case: str, plural: bool
) -> Phrase:
    """Determiner, adjective and noun in agreement: `einen roten Hut`, `den zwei kleinen Kindern`."""
    gender = "p" if plural else noun.gender
    described = adjective.stem + ending(word, case, gender) if adjective else ""
    german = join_words(determiner(word, case, gender), described, noun_form(noun, case, plural))
    english = join_words(
        adjective.english if adjective else "", noun.english_plural if plural else noun.english
    )
    if word == "ein":
        english = with_article(english)
    elif word == "der":
        english = "the " + english
    elif word == "dieser":
        english = ("these " if plural else "this ") + english
    else:
        english = QUANTITIES[word][0] + " " + english
    pairs = ((adjective.base, noun.singular),) if adjective else ()
    return Phrase(german, english, plural, noun, pairs)


# %% [markdown]
# **Check.** The forms of a few phrases, against a grammar book's tables. Before you look: what happens to *Junge* when he isn't the subject?

# %%
forms = {
    ("ein", "rot", "Hut"): "ein roter Hut, einen roten Hut, einem roten Hut",
    ("der", "rot", "Jacke"): "die rote Jacke, die rote Jacke, der roten Jacke",
    ("ein", "rot", "Kleid"): "ein rotes Kleid, ein rotes Kleid, einem roten Kleid",
    ("dieser", "müde", "Junge"): "dieser müde Junge, diesen müden Jungen, diesem müden Jungen",
    ("zwei", "müde", "Kind"): "zwei müde Kinder, zwei müde Kinder, zwei müden Kindern",
    ("der", "alt", "Gast"): "die alten Gäste, die alten Gäste, den alten Gästen",
}
adjective_of = {a.base: a for group in ADJECTIVES.values() for a in group}
noun_of = {n.singular: n for group in NOUNS.values() for n in group}
for (word, adjective, noun), expected in forms.items():
    plural = word in QUANTITIES or expected.startswith("die alten")
    made = [
        noun_phrase(word, adjective_of[adjective], noun_of[noun], case, plural).german
        for case in CASES
    ]
    assert made == expected.split(", "), made
pd.DataFrame([expected.split(", ") for expected in forms.values()], columns=CASES)

# %% [markdown]
# A preposition asks for a case. *in*, *auf*, *an*, *unter* … ask for the dative when something **is** there and for the accusative when something **goes** there. English has different prepositions for that (in, into), German a different article. Some pairs melt into one word: *in dem* is *im*.


# %%
def prepositional(preposition: str, phrase: Phrase, english: str) -> Phrase:
    """`in dem Park` is said `im Park`."""
    first, _, rest = phrase.german.partition(" ")
    start = f"{preposition} {first}"
    german = join_words(CONTRACTIONS.get(start, start), rest)
    return Phrase(german, f"{english} {phrase.english}", pairs=phrase.pairs)


def place_phrase(place: Place, case: str) -> Phrase:
    """Being there takes the dative (im Park), going there the accusative (in den Park)."""
    there = noun_phrase("der", None, place.noun, case, plural=False)
    return prepositional(
        place.preposition, there, place.english_at if case == "dative" else place.english_to
    )


# %%
park = PLACES[0]
there, thither = place_phrase(park, "dative"), place_phrase(park, "accusative")
assert (there.german, there.english) == ("im Park", "in the park")
assert (thither.german, thither.english) == ("in den Park", "into the park")

# %% [markdown]
# ### 2.4 · Clauses: where the verb goes
#
# > **In short.** A German verb has two halves. In a main clause the finite half is second and the other half is last. In a subordinate clause both stand last, together.
#
# | | second | … | last |
# |---|---|---|---|
# | present, separable | Der Mann **hebt** | den Stein | **auf** |
# | perfect | Der Mann **hat** | den Stein | **aufgehoben** |
# | with *will*, *kann*, *wird*, *muss* | Der Mann **will** | den Stein | **aufheben** |
# | subordinate | …, weil der Mann | den Stein | **aufhebt** |
#
# "Second" counts phrases, not words. If another phrase comes first, the subject moves behind the verb: *Heute **hebt** der Mann den Stein auf*.

# %%
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


@dataclass(frozen=True)
class Clause:
    """Who does what: subject, verb, tense and the phrases between the verb and its end."""

    subject: Phrase
    verb: Verb
    tense: str
    middle: tuple[Phrase, ...]
    manner: tuple[str, str] = ("", "")

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return self.subject.pairs + tuple(p for phrase in self.middle for p in phrase.pairs)


# %%
def verb_parts(clause: Clause) -> tuple[str, str]:
    """The finite verb, and what waits at the end of a main clause: `hebt`/`hoch`, `hat`/`gekauft`."""
    verb, plural = clause.verb, clause.subject.plural
    if clause.tense == "present":
        return (verb.infinitive if plural else verb.singular), verb.particle
    if clause.tense == "perfect":
        return AUXILIARIES[verb.auxiliary][plural], verb.participle
    return AUXILIARIES[clause.tense][plural], verb.particle + verb.infinitive


def verb_second(clause: Clause, front: str = "") -> str:
    """A German main clause: one phrase, the finite verb, the rest, and the verb's other half last."""
    finite, end = verb_parts(clause)
    middle = [clause.manner[0], *(phrase.german for phrase in clause.middle)]
    if front:
        return join_words(front, finite, clause.subject.german, *middle, end)
    return join_words(clause.subject.german, finite, *middle, end)


def verb_last(clause: Clause, subject: str | None = None) -> str:
    """A German subordinate clause: the finite verb stands last, rejoined with its particle."""
    finite, end = verb_parts(clause)
    last = end + finite if clause.tense == "present" else join_words(end, finite)
    middle = [clause.manner[0], *(phrase.german for phrase in clause.middle)]
    return join_words(clause.subject.german if subject is None else subject, *middle, last)


# %% [markdown]
# English is simpler: one order for every clause.


# %%
def english_verb(clause: Clause) -> str:
    """`is buying`, `has bought`, `wants to buy`."""
    verb, plural, manner = clause.verb, clause.subject.plural, clause.manner[1]
    if clause.tense == "present":
        return join_words("are" if plural else "is", manner, verb.english[1])
    name = verb.auxiliary if clause.tense == "perfect" else clause.tense
    form = AUXILIARIES[name]
    return join_words(form[2 + plural], manner, verb.english[form[4]])


def english_clause(clause: Clause, subject: str | None = None) -> str:
    """English keeps one order: subject, verb, the rest."""
    start = clause.subject.english if subject is None else subject
    return join_words(start, english_verb(clause), *(phrase.english for phrase in clause.middle))


# %% [markdown]
# **Check.** One clause, in every place that German has for it.

# %%
man = noun_phrase("der", None, noun_of["Mann"], "nominative", plural=False)
stone = noun_phrase("der", None, noun_of["Stein"], "accusative", plural=False)
lifts = Clause(man, aufheben, "present", (stone,))
shown = pd.DataFrame(
    [
        ("present", verb_second(lifts), english_clause(lifts)),
        ("fronted", verb_second(lifts, "heute"), "today, " + english_clause(lifts)),
        ("subordinate", "weil " + verb_last(lifts), "because " + english_clause(lifts)),
        *(
            (tense, verb_second(clause), english_clause(clause))
            for tense in ("perfect", "wollen")
            for clause in [replace(lifts, tense=tense)]
        ),
    ],
    columns=["clause", "German", "English"],
)
assert list(shown["German"]) == [
    "der Mann hebt den Stein auf",
    "heute hebt der Mann den Stein auf",
    "weil der Mann den Stein aufhebt",
    "der Mann hat den Stein aufgehoben",
    "der Mann will den Stein aufheben",
]
shown

# %% [markdown]
# ### 2.5 · Dealing sentences
#
# Drawing each word at random leaves some words rare: with a few hundred draws, luck decides. A card player's way is fairer. A **deck** holds every word once; it is shuffled and dealt, and shuffled again when it is empty. After many rounds every word has come up equally often.


# %%
class Dealer:
    """Deals from shuffled decks, so that every word of a deck comes up equally often."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.decks: dict[str, list] = {}

    def deal(self, name: str, items):
        """The next item of the deck `name`; when it runs out, `items` are shuffled anew."""
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
        number = "plural" if plural else "singular"
        word = self.deal(f"{number} {case}", WORDS_BEFORE[number])
        adjective = None
        if self.chance(describe):
            form = ending(word, case, "p" if plural else noun.gender)
            adjective = self.deal(f"{group} adjective -{form}", ADJECTIVES[group])
            if (adjective.base, noun.singular) in CLASHES:
                adjective = None
        return noun_phrase(word, adjective, noun, case, plural)

    def object(self, verb: Verb, case: str, describe: float = 0.5) -> Phrase:
        """An object that suits the verb; the pair of the two is noted."""
        group = self.deal(verb.particle + verb.infinitive, verb.groups)
        phrase = self.phrase(group, case, describe)
        pair = (verb.particle + verb.infinitive, phrase.noun.singular)
        return replace(phrase, pairs=(*phrase.pairs, pair))

    def place(self, case: str, group: str = "person") -> Phrase:
        """A place, to be at (dative) or to go to (accusative); animals stay outdoors."""
        where = OUTDOOR_PLACES if group == "animal" else PLACES
        return place_phrase(self.deal(f"place {group} {case}", where), case)

    def spot(self, case: str) -> Phrase:
        """A spot near a piece of furniture: `unter dem Tisch`, or `unter den Tisch` for going there."""
        preposition, english = self.deal("spot", SPOTS)
        return prepositional(
            preposition,
            noun_phrase("der", None, self.deal("spot noun", NOUNS["furniture"]), case, False),
            english,
        )

    def tense(self, verb: Verb, tenses: tuple[str, ...]) -> str:
        """A tense: every verb gets its share of each."""
        return self.deal(f"{verb.particle}{verb.infinitive} {tenses}", tenses)

    def manner(self, kind: str, tense: str) -> tuple[str, str]:
        """Sometimes, in the present tense, a word for how or when it is done."""
        if tense == "present" and self.chance(0.4):
            return self.deal("manner " + kind, MANNERS[kind])
        return "", ""


# %%
dealer = Dealer(random.Random(0))
dealt = Counter(dealer.deal("numbers", ("zwei", "drei", "vier", "fünf")) for _ in range(400))
assert set(dealt.values()) == {100}  # exactly even; random draws would not be

# %% [markdown]
# Eight kinds of clauses differ in the cases that their verbs ask for.


# %%
def transitive(deal: Dealer, tenses: tuple[str, ...]) -> Clause:
    """`Der Mann kauft einen roten Hut`: an object in the accusative."""
    verb = deal.deal("transitive", VERBS["transitive"])
    tense = deal.tense(verb, tenses)
    return Clause(
        deal.phrase("person", "nominative"), verb, tense, (deal.object(verb, "accusative", 0.6),)
    )


def helping(deal: Dealer, tenses: tuple[str, ...]) -> Clause:
    """`Das Mädchen hilft dem alten Mann`: verbs whose object is in the dative."""
    verb = deal.deal("dative", VERBS["dative"])
    tense = deal.tense(verb, tenses)
    return Clause(deal.phrase("person", "nominative"), verb, tense, (deal.object(verb, "dative"),))


def giving(deal: Dealer, tenses: tuple[str, ...]) -> Clause:
    """`Die Frau gibt dem Kind einen Apfel`: to whom in the dative, then what in the accusative."""
    verb = deal.deal("giving", VERBS["giving"])
    tense = deal.tense(verb, tenses)
    receiver = deal.phrase("person", "dative", 0.3)
    return Clause(
        deal.phrase("person", "nominative", 0.3),
        verb,
        tense,
        (receiver, deal.object(verb, "accusative", 0.4)),
    )


def playing(deal: Dealer, tenses: tuple[str, ...]) -> Clause:
    """`Der Musiker spielt auf einer alten Geige`: German plays on an instrument, English plays it."""
    verb = deal.deal("playing", VERBS["playing"])
    tense = deal.tense(verb, tenses)
    thing = deal.object(verb, "dative", 0.6)
    on = Phrase("auf " + thing.german, thing.english, pairs=thing.pairs)
    return Clause(deal.phrase("person", "nominative"), verb, tense, (on,))


# %%
def staying(deal: Dealer, tenses: tuple[str, ...]) -> Clause:
    """`Zwei Kinder spielen im Park`: where, in the dative."""
    verb = deal.deal("staying", VERBS["staying"])
    tense = deal.tense(verb, tenses)
    group = deal.deal("staying " + verb.particle + verb.infinitive, verb.groups)
    subject = deal.phrase(group, "nominative", 0.6)
    return Clause(
        subject, verb, tense, (deal.place("dative", group),), deal.manner("staying", tense)
    )


def moving(deal: Dealer, tenses: tuple[str, ...]) -> Clause:
    """`Der Hund rennt in den Wald`: whither, in the accusative."""
    verb = deal.deal("moving", VERBS["moving"])
    tense = deal.tense(verb, tenses)
    group = deal.deal("moving " + verb.particle + verb.infinitive, verb.groups)
    subject = deal.phrase(group, "nominative", 0.6)
    return Clause(
        subject, verb, tense, (deal.place("accusative", group),), deal.manner("moving", tense)
    )


def lying(deal: Dealer, tenses: tuple[str, ...]) -> Clause:
    """`Der Ball liegt unter dem Tisch`: where, in the dative."""
    verb = deal.deal("lying", VERBS["lying"])
    group = deal.deal("lying " + verb.infinitive, verb.groups)
    return Clause(deal.phrase(group, "nominative", 0.9), verb, "present", (deal.spot("dative"),))


def laying(deal: Dealer, tenses: tuple[str, ...]) -> Clause:
    """`Das Kind legt den Ball unter den Tisch`: whither, in the accusative."""
    verb = deal.deal("laying", VERBS["laying"])
    tense = deal.tense(verb, tenses)
    middle = (deal.object(verb, "accusative", 0.3), deal.spot("accusative"))
    return Clause(deal.phrase("person", "nominative", 0.3), verb, tense, middle)


# %% [markdown]
# And seven kinds of sentences are made of them. Each function returns the German, the English, and the pairs of words that met in it (adjective and noun, verb and object). We need those pairs in a moment.

# %%
CLAUSES = (
    (transitive,) * 4 + (staying,) * 3 + (lying,) * 3 + (helping, giving, playing, moving, laying)
)
SHORT_CLAUSES = (
    transitive,
    transitive,
    transitive,
    helping,
    staying,
    staying,
    moving,
    lying,
    lying,
)


def plain(deal: Dealer) -> tuple[str, str, tuple]:
    """One main clause."""
    clause = deal.deal("clause", CLAUSES)(deal, TENSES)
    return verb_second(clause), english_clause(clause), clause.pairs


def fronted(deal: Dealer) -> tuple[str, str, tuple]:
    """`Im Park liest eine Frau ein Buch`: a time or a place first, so the subject follows the verb."""
    build = deal.deal("fronted", (transitive, transitive, transitive, helping, giving, playing))
    if deal.chance(0.5):
        where = deal.place("dative")
        front, english = where.german, where.english
        clause = build(deal, TENSES)
    else:
        front, english = deal.deal("time", TIMES)
        clause = build(deal, PRESENT_OR_FUTURE)
    return verb_second(clause, front), f"{english}, {english_clause(clause)}", clause.pairs


def accompanied(deal: Dealer) -> tuple[str, str, tuple]:
    """`Eine Frau mit einem blauen Hut ...`: mit takes the dative."""
    build = deal.deal("accompanied", (transitive, transitive, helping, playing))
    clause = build(deal, TENSES)
    group = deal.deal("with", ("clothes", "container", "tool"))
    thing = deal.phrase(group + "!", "dative", 0.8)
    who = clause.subject
    subject = replace(
        who,
        german=f"{who.german} mit {thing.german}",
        english=f"{who.english} with {thing.english}",
        pairs=who.pairs + thing.pairs,
    )
    whole = replace(clause, subject=subject)
    return verb_second(whole), english_clause(whole), whole.pairs


# %%
def meanwhile(deal: Dealer) -> tuple[str, str, tuple]:
    """`..., während ...`, or the subordinate clause first: then the main clause begins with its verb."""
    main = deal.deal("main", SHORT_CLAUSES)(deal, PRESENT)
    side = deal.deal("side", SHORT_CLAUSES)(deal, PRESENT)
    pairs = main.pairs + side.pairs
    if deal.chance(0.4):
        german = verb_second(main, f"während {verb_last(side)},")
        return german, f"while {english_clause(side)}, {english_clause(main)}", pairs
    german = f"{verb_second(main)}, während {verb_last(side)}"
    return german, f"{english_clause(main)} while {english_clause(side)}", pairs


def because(deal: Dealer) -> tuple[str, str, tuple]:
    """`..., weil das Kind müde ist` or `..., weil der Mann einen Hut gekauft hat`."""
    main = deal.deal("main", SHORT_CLAUSES)(deal, PRESENT)
    if deal.chance(0.5):
        group = deal.deal("because group", ("person", "person", "animal"))
        who = deal.phrase(group, "nominative", 0.0)
        moods = [adjective for adjective in ADJECTIVES[group] if adjective.base in MOODS]
        how = deal.deal(group + " mood", moods)
        german = f"{who.german} {how.base} {'sind' if who.plural else 'ist'}"
        english = f"{who.english} {'are' if who.plural else 'is'} {how.english}"
        pairs = main.pairs
    else:
        side = deal.deal("side", SHORT_CLAUSES)(deal, TENSES)
        german, english, pairs = verb_last(side), english_clause(side), main.pairs + side.pairs
    return f"{verb_second(main)}, weil {german}", f"{english_clause(main)} because {english}", pairs


# %%
def saying(deal: Dealer) -> tuple[str, str, tuple]:
    """`Der Koch glaubt, dass die Suppe ...`: a clause with dass."""
    one, many, english_one, english_many = deal.deal("saying", SAYING)
    who = deal.phrase("person", "nominative", 0.4)
    side = deal.deal("side", SHORT_CLAUSES)(deal, TENSES)
    german = f"{who.german} {many if who.plural else one}, dass {verb_last(side)}"
    english = (
        f"{who.english} {english_many if who.plural else english_one} that {english_clause(side)}"
    )
    return german, english, who.pairs + side.pairs


def relative(deal: Dealer) -> tuple[str, str, tuple]:
    """`Ein Mann, der einen roten Hut trägt, liest ein Buch`: the pronoun agrees, its verb stands last."""
    main = deal.deal("relative main", (transitive, transitive, helping, playing))(deal, PRESENT)
    side = replace(transitive(deal, PRESENT), subject=main.subject)
    plural, noun = main.subject.plural, main.subject.noun
    pronoun = determiner("der", "nominative", "p" if plural else noun.gender)
    subject = Phrase(
        f"{main.subject.german}, {verb_last(side, pronoun)},",
        english_clause(side, main.subject.english + " who"),
        plural,
        noun,
        side.pairs,
    )
    whole = replace(main, subject=subject)
    return verb_second(whole), english_clause(whole), whole.pairs


SENTENCES = (
    (plain,) * 4 + (fronted,) * 3 + (because, saying, relative, accompanied) * 2 + (meanwhile,)
)

# %% [markdown]
# One of each kind:

# %%
dealer = Dealer(random.Random(1))
kinds = (plain, fronted, meanwhile, because, saying, relative, accompanied)
pd.DataFrame([kind(dealer)[:2] for kind in kinds], columns=["German", "English"])

# %% [markdown]
# ### 2.6 · Four splits that don't overlap
#
# > **In short.** `test` asks: new sentences from known combinations. `test_unseen` asks: known words in combinations that were never seen. The difference between the two scores says how much was learned by heart.
#
# About one in twelve pairs of words is **held out**. A checksum decides, so the choice is the same on every machine. A sentence with a held-out pair can only go to `test_unseen`. If *traurig* and *Koch* is such a pair, the training set has many sad people and many chefs, but no sad chef.
#
# A last rule keeps out words that are too rare to be learned.


# %%
def is_held_out(pair: tuple[str, str]) -> bool:
    """True for about one in twelve pairs of words: they appear in `test_unseen` only."""
    return zlib.crc32(" ".join(pair).encode()) % 12 == 0


def as_sentence(sentence: str) -> str:
    """A capital letter first, a full stop last."""
    return sentence[0].upper() + sentence[1:] + "."


def generate_sentences(seed: int) -> Iterator[tuple[str, str, bool]]:
    """German, English, and whether a held-out pair occurs; endless, no sentence of either language twice."""
    deal = Dealer(random.Random(seed))
    seen = set()
    while True:
        german, english, pairs = deal.deal("sentence", SENTENCES)(deal)
        german, english = as_sentence(german), as_sentence(english)
        if not 5 <= len(german.split()) <= 14 or german in seen or english in seen:
            continue
        seen.update((german, english))
        yield german, english, any(is_held_out(pair) for pair in pairs)


# %%
def caption_words(pair: tuple[str, str]) -> list[str]:
    """The words of a sentence pair, lower case; German ones marked, so that `in` and `in` are two."""
    german, english = (re.findall(r"\w+", text.lower()) for text in pair)
    return ["de:" + word for word in german] + english


def without_rare_words(pairs: list[tuple[str, str]], least: int = 11) -> list[tuple[str, str]]:
    """The pairs whose every word occurs at least `least` times among the pairs that remain."""
    split = [(pair, caption_words(pair)) for pair in pairs]
    while True:
        counts = Counter(word for _, found in split for word in found)
        kept = [row for row in split if all(counts[word] >= least for word in row[1])]
        if len(kept) == len(split):
            return [pair for pair, _ in kept]
        split = kept


# %%
SAMPLE_SIZES = {"train": 6000, "val": 300, "test": 400, "test_unseen": 300}


def sample_corpus(seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Splits 'train', 'val', 'test', 'test_unseen' -> list of (german, english) sentence pairs."""
    total = sum(SAMPLE_SIZES[name] for name in ("train", "val", "test"))
    known, held_out = [], []
    for german, english, unseen in generate_sentences(seed):
        (held_out if unseen else known).append((german, english))
        if len(known) == total * 10 // 9:
            break
    known = without_rare_words(known)
    corpus, start = {}, 0
    for name in ("train", "val", "test"):
        corpus[name] = known[start : start + SAMPLE_SIZES[name]]
        start += SAMPLE_SIZES[name]
    learned = {word for pair in corpus["train"] for word in caption_words(pair)}
    understood = [pair for pair in held_out if learned.issuperset(caption_words(pair))]
    corpus["test_unseen"] = understood[: SAMPLE_SIZES["test_unseen"]]
    return corpus


# %% [markdown]
# And here it is, through the call of section 1:

# %%
corpus = load_corpus("sample")
pd.DataFrame(corpus["train"][:8], columns=["German", "English"])

# %% [markdown]
# **Check.** Everything that was promised, counted from the outside, on the finished text.

# %%
german, english = (Counter() for _ in range(2))
for pair in corpus["train"]:
    for words, sentence in zip((german, english), pair, strict=True):
        words.update(re.findall(r"\w+", sentence.lower()))
assert len(set(corpus["train"])) >= 4000
assert len(german) >= 400 and len(english) >= 400
assert min(german.values()) >= 8 and min(english.values()) >= 8  # no rare words

for side in (0, 1):  # no sentence stands in two splits, in either language
    sentences = [pair[side] for pairs in corpus.values() for pair in pairs]
    assert len(sentences) == len(set(sentences))
assert sample_corpus() == corpus  # the same seed makes the same corpus
pd.DataFrame(
    {
        "split": list(corpus),
        "pairs": [len(pairs) for pairs in corpus.values()],
        "German words": [sum(len(de.split()) for de, _ in pairs) for pairs in corpus.values()],
    }
)

# %% [markdown]
# **Picture.** The English training text knows nothing of our bookkeeping, so let us count there: how often does each adjective stand right before each noun? *Predict:* one pair in twelve should be empty. Which ones, the text can't tell in advance, the checksum can.


# %%
def adjective_noun_counts(
    pairs: list[tuple[str, str]], adjectives: Sequence[Adjective], things: Sequence[Noun]
) -> list[list[int]]:
    """How often each adjective stands right before each noun in the English sentences."""
    found = Counter()
    for _, sentence in pairs:
        tokens = re.findall(r"\w+", sentence.lower())
        found.update(zip(tokens, tokens[1:], strict=False))
    return [
        [found[a.english, n.english] + found[a.english, n.english_plural] for n in things]
        for a in adjectives
    ]


def combinations_chart(counts: list[list[int]], rows: list[str], columns: list[str]):
    """A heatmap of the counts of combinations."""
    chart = heatmap(
        counts,
        rows,
        columns,
        row_title="adjective",
        column_title="noun",
        value_title="times in train",
        numbers=True,
        digits=0,
    )
    return titled(
        chart,
        "Combinations that the training set never shows",
        "Each row and each column is well filled, so every word is learned. The zeros are the "
        "held-out pairs: they occur in test_unseen only.",
    )


# %%
people = [noun for noun in PEOPLE if noun.singular in
          ("Mann", "Frau", "Lehrer", "Koch", "Clown", "Gast", "Bauer", "Ärztin", "Soldat", "Fischer")]  # fmt: skip
counts = adjective_noun_counts(corpus["train"], PERSON_ADJECTIVES, people)
for row, adjective in zip(counts, PERSON_ADJECTIVES, strict=True):
    for count, noun in zip(row, people, strict=True):
        assert (count == 0) == is_held_out((adjective.base, noun.singular))
combinations_chart(counts, [a.english for a in PERSON_ADJECTIVES], [n.english for n in people])

# %% [markdown]
# ## 3 · Real captions: fetch, check, read
#
# > **In short.** A file from the internet is a guess until its checksum is right. Text is bytes until its encoding is right. Two files are a corpus only if line *i* of one is the translation of line *i* of the other.
#
# Multi30k is eight gzip files. If the environment variable `MULTI30K_DIR` names a folder that holds them, they are read from there. If not, `pooch` downloads them from the corpus's repository on GitHub, once, into the user's cache. Either way their SHA-256 must be the one that stands here.

# %%
MULTI30K_URL = "https://github.com/multi30k/dataset/raw/master/data/task1/raw/"
MULTI30K_SPLITS = ("train", "val", "test_2016_flickr", "test_2017_flickr")
MULTI30K_SHA256 = {
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2017_flickr.de.gz": "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee",
    "test_2017_flickr.en.gz": "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074",
}


# %%
def multi30k_file(name: str) -> Path:
    """The path of one gzip file of Multi30k: in `MULTI30K_DIR` if that is set, else downloaded.

    Raises FileNotFoundError where it can be had from neither, ValueError where its checksum is
    wrong; both say what to do.
    """
    folder = os.environ.get("MULTI30K_DIR")
    if folder:
        path = Path(folder) / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: point MULTI30K_DIR at the gzip files")
    else:
        path = download_multi30k(name)
    if hashlib.sha256(path.read_bytes()).hexdigest() != MULTI30K_SHA256[name]:
        raise ValueError(f"{path} is damaged (wrong SHA-256): delete it and fetch it again")
    return path


# %%
def download_multi30k(name: str) -> Path:
    """Fetch one file into the user's cache, with pooch: three tries more, a progress bar, a checksum.

    Raises FileNotFoundError where the download fails and ValueError where what came is damaged.
    """
    import pooch

    fetcher = pooch.create(
        path=pooch.os_cache("from-attention-to-translation"),
        base_url=MULTI30K_URL,
        registry={name: f"sha256:{MULTI30K_SHA256[name]}"},
        retry_if_failed=3,
    )
    otherwise = "put the files in a folder and set MULTI30K_DIR to it, or use the `sample` corpus"
    try:
        return Path(fetcher.fetch(name, progressbar=True))
    except ValueError as error:
        raise ValueError(
            f"{name} came damaged from {MULTI30K_URL} (wrong SHA-256): try again, or {otherwise}"
        ) from error
    except Exception as error:
        raise FileNotFoundError(
            f"could not download {name} ({type(error).__name__}): go online, or {otherwise}"
        ) from error


# %% [markdown]
# **Pitfall.** Tutorials age at their edges. The Annotated Transformer's text is as good as ever, but a reader who runs it today stops at the data: the host that its torchtext version asks for is gone, that torchtext can't be installed beside a current PyTorch, and spaCy's language models have to be downloaded although only their tokenisers are used. What we do instead: files with a checksum and two ways to get them, a corpus that needs neither, a torchtext in pure Python, and `spacy.blank` (section 4).
#
# Reading has pitfalls of its own. Python's `str.splitlines` is the obvious way to get lines, but it also splits at characters that are no line ends in a text file, such as U+2028 or U+0085. One of those in one of the two files, and from there on every German line has the wrong English partner. So only `\n` separates lines here.


# %%
def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, gzip or plain; only a newline separates them.

    Raises FileNotFoundError for a missing file, ValueError for a truncated gzip file and for text
    that is not UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing or no file: check the path")
    data = path.read_bytes()
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode("utf-8")
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or not gzip: fetch it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): convert it first") from error
    return text.removesuffix("\n").split("\n")


def parallel(source: list[str], target: list[str], name: str) -> list[tuple[str, str]]:
    """Line i of one list with line i of the other, stripped.

    Raises ValueError where the two differ in length: then no line can be trusted.
    """
    if len(source) != len(target):
        raise ValueError(
            f"{name}: {len(source)} source lines but {len(target)} target lines; "
            "the two files must correspond line by line"
        )
    return [(s.strip(), t.strip()) for s, t in zip(source, target, strict=True)]


def multi30k() -> dict[str, list[tuple[str, str]]]:
    """The four splits of Multi30k, German to English."""
    return {
        split: parallel(
            *(read_lines(multi30k_file(f"{split}.{x}.gz")) for x in ("de", "en")), split
        )
        for split in MULTI30K_SPLITS
    }


# %%
text = "Ein Hund\u2028rennt.\nEine Katze schläft.\n"
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "captions.de.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert len(read_lines(path)) == 2
assert len(text.splitlines()) == 3  # the wrong version: one line too many, all pairs shifted

# %% [markdown]
# What does a broken file get? One line that names the cause and the remedy. Here are five broken files.


# %%
def complaint(action: Callable, *arguments) -> str:
    """The kind and the message of the error that `action(*arguments)` raises."""
    try:
        action(*arguments)
    except (ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


# %%
with tempfile.TemporaryDirectory() as folder:
    good = gzip.compress(b"Zwei Hunde spielen auf der Wiese.\n" * 50)
    named = {name: Path(folder) / name for name in ("cut.de.gz", "latin1.de", "train.de.gz")}
    named["cut.de.gz"].write_bytes(good[:-20])
    named["latin1.de"].write_bytes("Ein Mann läuft.\n".encode("latin-1"))
    named["train.de.gz"].write_bytes(good)
    before = os.environ.get("MULTI30K_DIR")
    os.environ["MULTI30K_DIR"] = folder
    complaints = [
        complaint(multi30k_file, "val.de.gz"),
        complaint(multi30k_file, "train.de.gz"),
        complaint(read_lines, named["cut.de.gz"]),
        complaint(read_lines, named["latin1.de"]),
        complaint(parallel, ["Ein Hund.", "Eine Katze."], ["A dog."], "val"),
    ]
    if before is None:
        del os.environ["MULTI30K_DIR"]
    else:
        os.environ["MULTI30K_DIR"] = before
    complaints = [line.replace(folder + os.sep, "…/") for line in complaints]
assert all("\n" not in line for line in complaints)
print("\n".join(complaints))

# %% [markdown]
# ### Facts of the real corpus
#
# This notebook runs without a network, so what it says of Multi30k comes from a **record**: `results/multi30k-corpus.json`, made once, by the command `python -m scripts.studies.corpus --save true`, from the real files. A test makes it anew where the files are at hand, and compares. The charts below set it beside the sample corpus.

# %%
CORPUS_RECORD = "multi30k-corpus"
facts = load_record(CORPUS_RECORD)
pd.DataFrame({"split": list(facts["pairs"]), "pairs": list(facts["pairs"].values())})

# %% [markdown]
# **Picture.** Count each word of the training text, and sort the words from frequent to rare. *Predict* the two shapes: a text that people wrote, and a text from shuffled decks.


# %%
def word_ranks(sentences: Iterable[str], points: int = 16) -> dict[str, int]:
    """How often the word at rank 1, 2, 4, 8, … occurs; the last entry is the rarest word."""
    counts = Counter(word for s in sentences for word in re.findall(r"\w+", s.lower()))
    ordered = sorted(counts.values(), reverse=True)
    ranks = [2**i for i in range(points) if 2**i < len(ordered)] + [len(ordered)]
    return {str(rank): ordered[rank - 1] for rank in ranks}


def ranks_chart(ranks: dict[str, dict[str, int]]) -> alt.TopLevelMixin:
    """Frequency over rank, one curve for each corpus, both axes logarithmic."""
    frame = pd.DataFrame(
        [
            (name, int(rank), times)
            for name, found in ranks.items()
            for rank, times in found.items()
        ],
        columns=["corpus", "rank", "times"],
    )
    chart = lines(
        frame, "rank", "times", "corpus", log_x=True, log_y=True, points=True,
        x_title="rank of the German word", y_title="times in train",
    )  # fmt: skip
    return titled(
        chart,
        "Real text has a long tail, the sample corpus has none",
        "Multi30k falls along a line down to thousands of words that occur once (Zipf's law). The "
        "sample corpus stops at its last word, which still occurs eight times or more.",
    )


# %%
sample_ranks = word_ranks(german for german, _ in corpus["train"])
assert min(sample_ranks.values()) >= 8 and min(facts["ranks"].values()) == 1
ranks_chart({"sample": sample_ranks, "Multi30k": facts["ranks"]})

# %% [markdown]
# ## 4 · Words: spaCy's tokeniser
#
# > **In short.** A tokeniser cuts a sentence into words and marks. It's more than splitting at spaces, and less than understanding.
#
# *"Der Mann, der lacht."* split at spaces gives *Mann,* and *lacht.*, words with a comma and a full stop glued on. Each of them would be a word of its own, unrelated to *Mann* and *lacht*. spaCy's rules cut marks off, and know where not to: *z.B.* and *U.S.* keep their dots, *don't* falls into *do* and *n't*.
#
# `spacy.blank("de")` is a tokeniser and nothing else: no model to download. It is imported inside the function, because it takes a second and who trains on subwords doesn't need it.


# %%
@cache
def word_tokenizer(language: str) -> Callable[[str], list[str]]:
    """spaCy's rule-based tokeniser for "de" or "en": a function from a text to its words."""
    import spacy

    nlp = spacy.blank(language)
    return lambda text: [token.text for token in nlp.tokenizer(text) if not token.is_space]


# %%
examples = {
    "de": ["Der Mann, der lacht, trägt z.B. einen Hut.", "Wie geht's? Gut!"],
    "en": ["The man who's laughing doesn't wear a hat.", "He's from the U.S. (really)."],
}
cut = []
for language, sentences in examples.items():
    for sentence in sentences:
        tokens = word_tokenizer(language)(sentence)
        assert "".join(tokens) == sentence.replace(" ", "")  # nothing lost, nothing added
        cut.append(" | ".join(tokens))
print("\n".join(cut))

# %% [markdown]
# ## 5 · A vocabulary, from the training split alone
#
# > **In short.** A vocabulary numbers the words it has met. Every other word becomes `<unk>`, and a model can only guess what stood there.
#
# torchtext's `Vocab` counts words and numbers them from frequent to rare. The first four numbers are reserved, the same in every chapter: 0 pads, 1 is the unknown word, 2 begins a sentence and 3 ends it. Words that occur fewer than `min_freq` times are left out.

# %%
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")


def build_vocab(sentences: Iterable[list[str]], min_freq: int = 1):
    """A torchtext `Vocab` of the words in `sentences`: of the training split, and of nothing else."""
    from torchtext.vocab import Vocab

    counts = Counter(word for words in sentences for word in words)
    return Vocab(counts, min_freq=min_freq, specials=list(SPECIALS))


def unknown_rate(sentences: Iterable[list[str]], vocab) -> float:
    """The share of words, between 0 and 1, that `vocab` doesn't know."""
    words = [word for sentence in sentences for word in sentence]
    return sum(word not in vocab.stoi for word in words) / len(words)


# %%
split_german = word_tokenizer("de")
words_of = {
    split: [split_german(german) for german, _ in corpus[split]]
    for split in ("train", "val", "test")
}
vocab = build_vocab(words_of["train"])
assert [vocab.stoi[name] for name in SPECIALS] == [PAD, UNK, BOS, EOS]
assert vocab.itos[vocab.stoi["Hund"]] == "Hund"
missing = "Quantencomputer"
assert missing not in vocab.stoi and vocab.stoi[missing] == UNK
print(f"{len(vocab)} entries; the first: {' '.join(vocab.itos[:12])}")

# %% [markdown]
# **Pitfall.** Build the vocabulary from training, validation and test text together. It's one line, it even seems thrifty, and The Annotated Transformer does it. But then the test set has no unknown words *by construction*: the model's input table has a row for each of them. The row was never trained, so the translation isn't better. What is lost is the measurement: how often will a user's sentence hold a word that we have never seen? The test set can't answer any more, because its answer is always zero.
#
# The sample corpus has no rare words, so let us look at parts of it: a vocabulary from the first 50, 100, 200, … training sentences. *Predict* both curves before you run the cell.


# %%
def unknown_curve(words_of: dict[str, list[list[str]]], sizes: Sequence[int]) -> pd.DataFrame:
    """Unknown words in the test split, for vocabularies of the first n training sentences.

    "train only" is the honest vocabulary; "all splits" has seen validation and test as well.
    """
    rows = []
    for size in sizes:
        train = words_of["train"][:size]
        leaky = train + words_of["val"] + words_of["test"]
        for name, sentences in (("train only", train), ("all splits (wrong)", leaky)):
            rate = unknown_rate(words_of["test"], build_vocab(sentences))
            rows.append((name, size, round(rate, 4)))
    return pd.DataFrame(rows, columns=["vocabulary from", "sentences", "unknown"])


def unknown_chart(curve: pd.DataFrame) -> alt.TopLevelMixin:
    """Both curves of `unknown_curve`."""
    chart = lines(
        curve, "sentences", "unknown", "vocabulary from", log_x=True, zero=True, points=True,
        x_title="training sentences", y_title="unknown words in the test split (share)",
    )  # fmt: skip
    return titled(
        chart,
        "A vocabulary that has seen the test set can't tell what it doesn't know",
        "Honestly counted, small training sets miss many words. With the test set inside the "
        "vocabulary the rate is zero at every size, whatever the truth.",
    )


# %%
curve = unknown_curve(words_of, (50, 100, 200, 400, 800, 1600, 3200, 6000))
honest = curve[curve["vocabulary from"] == "train only"]["unknown"].tolist()
leaky = curve[curve["vocabulary from"] != "train only"]["unknown"]
assert honest[0] > 0.1 and honest == sorted(honest, reverse=True)  # it falls as data grow
assert (leaky == 0).all()  # the wrong version reports nothing, ever
unknown_chart(curve)

# %% [markdown]
# And on real text, from the record: German words of test_2016 that the vocabulary doesn't know. With `min_freq=2`, as one often does, each word that was seen once is unknown as well.

# %%
unknown = pd.DataFrame(facts["unknown"])
assert unknown["all splits (wrong)"][0] == 0
assert (unknown["train only"] > unknown["all splits (wrong)"] + 0.01).all()
unknown.assign(
    **{name: unknown[name].map("{:.2%}".format) for name in ("train only", "all splits (wrong)")}
)

# %% [markdown]
# Around one word in thirty: about one in every three sentences has a hole. German makes it worse, since it writes compounds as one word, and anyone may make a new one: *Feuerwehrmann*, *Feuerwehrwagen*, *Feuerwehrwagenfahrer*. The remedy is to stop counting words.

# %% [markdown]
# ## 6 · Subwords: byte-pair encoding
#
# > **In short.** Start from letters. Again and again, glue the pair of neighbours that is most frequent. Frequent words become one piece; rare words fall into pieces that are known.
#
# That is byte-pair encoding (Sennrich et al. 2016), and the paper uses it (§5.1). With $c(a, b)$ the number of times that piece $a$ stands right before piece $b$ inside a word, one step merges
#
# $$(a^*, b^*) = \operatorname*{arg\,max}_{(a,b)}\; c(a, b)$$
#
# everywhere, and the merged piece joins the vocabulary. After $m$ merges the vocabulary has $V = 4 + \lvert\text{letters}\rvert + m$ entries: you choose $V$, and it won't grow with the corpus.
#
# The whole learner is a dozen lines.


# %%
def learn_merges(words: dict[str, int], merges: int) -> list[tuple[str, str]]:
    """The first `merges` merges of byte-pair encoding, for words with their frequencies.

    Each word ends with the mark "</w>". Of equally frequent pairs the first met wins.
    Sennrich et al. 2016, algorithm 1.
    """
    split = {(*word, "</w>"): times for word, times in words.items()}
    learned = []
    for _ in range(merges):
        counts = Counter()
        for pieces, times in split.items():
            for pair in zip(pieces, pieces[1:], strict=False):
                counts[pair] += times
        best = max(counts, key=counts.__getitem__)
        learned.append(best)
        split = {merge_pair(pieces, best): times for pieces, times in split.items()}
    return learned


def merge_pair(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`pieces` with each occurrence of `pair`, from left to right, glued together."""
    merged, i = [], 0
    while i < len(pieces):
        width = 2 if pieces[i : i + 2] == pair else 1
        merged.append("".join(pieces[i : i + width]))
        i += width
    return tuple(merged)


# %% [markdown]
# **Check.** The example of the paper by Sennrich and others: *low* 5 times, *lower* 2, *newest* 6, *widest* 3. Which pair is merged first? Count before you look: *e s* occurs 6 + 3 times.

# %%
merges = learn_merges({"low": 5, "lower": 2, "newest": 6, "widest": 3}, merges=10)
expected = ["es", "est", "est</w>", "lo", "low", "ne", "new", "newest</w>", "low</w>", "wi"]
assert ["".join(pair) for pair in merges] == expected  # as published
print(" → ".join(a + "+" + b for a, b in merges))

# %% [markdown]
# For real work there is SentencePiece: the same idea, in fast C++. It treats the space as a letter of its own (shown as ▁), so that text can be put together again exactly. We train one **joint** model on both languages: names, numbers and cognates like *Park* get the same piece on both sides, and source, target and generator can share one table (chapter 4, weight tying).


# %%
class BPETokenizer:
    """Joint byte-pair encoding of German and English, by SentencePiece (Sennrich et al. 2016).

    Ids 0 to 3 are pad, unk, bos and eos. `model` is the trained model, serialised.
    """

    def __init__(self, model: bytes):
        from sentencepiece import SentencePieceProcessor

        self.model = model
        self.processor = SentencePieceProcessor(model_proto=model)

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn `vocab_size` pieces from `lines`: of the training split alone."""
        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            num_threads=1,  # the same model on every machine
            minloglevel=2,
        )
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: Path) -> "BPETokenizer":
        """The tokenizer that `save` wrote."""
        return cls(Path(path).read_bytes())

    def save(self, path: Path) -> None:
        """Write the SentencePiece model."""
        Path(path).write_bytes(self.model)

    def __len__(self) -> int:
        return self.processor.get_piece_size()

    def pieces(self, text: str) -> list[str]:
        """The pieces that `text` falls into; "▁" marks a word's start."""
        return self.processor.encode(text, out_type=str)

    def encode(self, text: str) -> list[int]:
        """Text to ids, without bos and eos."""
        return self.processor.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to plain text; ends at the first eos, and leaves out pad and bos."""
        kept = []
        for i in ids:
            if i == EOS:
                break
            if i not in (PAD, BOS):
                kept.append(int(i))
        return self.processor.decode(kept)


# %%
text_of = {split: [text for pair in corpus[split] for text in pair] for split in corpus}
bpe = {size: BPETokenizer.train(text_of["train"], size) for size in (100, 250, 500, 1000, 1500)}
bpe_1000 = bpe[1000]

# %% [markdown]
# **Check.** The special ids are ours; text survives the round trip; training twice gives the same bytes; decoding stops at `</s>`.

# %%
assert len(bpe_1000) == 1000
names = [bpe_1000.processor.id_to_piece(i) for i in (PAD, UNK, BOS, EOS)]
assert names == list(SPECIALS)
for text in text_of["test"] + text_of["test_unseen"]:
    assert bpe_1000.decode(bpe_1000.encode(text)) == text
assert BPETokenizer.train(text_of["train"], 250).model == bpe[250].model
hello = bpe_1000.encode("Der Hund rennt.")
assert bpe_1000.decode([BOS, *hello, EOS, *hello, PAD]) == "Der Hund rennt."

# %% [markdown]
# What does a word become as the vocabulary grows? *Predict:* which of these words is a single piece first? The last two words occur nowhere in the sample corpus.


# %%
def pieces_table(words: Sequence[str], tokenizers: dict[int, BPETokenizer]) -> pd.DataFrame:
    """A row a word, a column a vocabulary: the pieces that the word falls into."""
    columns = {
        f"V = {size}": [" ".join(tokenizer.pieces(word)) for word in words]
        for size, tokenizer in tokenizers.items()
    }
    return pd.DataFrame({"word": words} | columns)


# %%
watched = ["Hund", "Großvater", "Krankenschwester", "fotografieren", "Hundehütte", "Gartenzaun"]
pieces_table(watched, {size: bpe[size] for size in (100, 500, 1000)})

# %% [markdown]
# No `<unk>` anywhere, though *Gartenzaun* is new: that is the point. The same on real text, from the record: Multi30k with 1,024, 4,096 and 8,192 pieces. Long compounds fall into parts that mean something, and this is how a model can translate a compound that it has never met.

# %%
real = pd.DataFrame({"word": facts["words"]} | {f"V = {v}": p for v, p in facts["pieces"].items()})
assert real.columns.tolist() == ["word", "V = 1024", "V = 4096", "V = 8192"]
real

# %% [markdown]
# **Picture.** A larger vocabulary makes shorter sentences, and attention's cost grows with the square of the length (chapter 1). But each entry is a row of D numbers to be learned, and rare pieces are learned badly. Where does the curve flatten?


# %%
def tokens_per_sentence(texts: Sequence[str], tokenizer: BPETokenizer) -> float:
    """The mean number of pieces in a text."""
    return sum(len(tokenizer.encode(text)) for text in texts) / len(texts)


def vocabulary_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """Tokens per sentence over vocabulary size, for each corpus and language."""
    chart = lines(
        frame, "V", "tokens", "text", log_x=True, zero=True, points=True,
        x_title="entries in the vocabulary (V)", y_title="tokens per test sentence",
    )  # fmt: skip
    return titled(
        chart,
        "More pieces, shorter sentences, with diminishing returns",
        "Each doubling of V saves less than the one before. The sample corpus has few words: 1,500 "
        "pieces bring it to 14 tokens a sentence, for which real text needs about 8,000.",
    )


# %%
rows = [
    (f"sample, {name}", size, tokens_per_sentence([p[side] for p in corpus["test"]], tokenizer))
    for side, name in enumerate(("German", "English"))
    for size, tokenizer in bpe.items()
]
rows += [(f"Multi30k, {name}", int(v), n) for name in ("German", "English")
         for v, n in facts["tokens"][name].items()]  # fmt: skip
sizes = pd.DataFrame(rows, columns=["text", "V", "tokens"])
for _, group in sizes.groupby("text"):
    steps = group["tokens"].diff().dropna()
    assert (steps < 0).all() and steps.is_monotonic_increasing  # falls, ever more slowly
vocabulary_chart(sizes)

# %% [markdown]
# ### The same through torchtext
#
# torchtext's helpers for SentencePiece read a saved model; their pieces and ids are the ones that `BPETokenizer` gives.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "tokenizer.model"
    bpe_1000.save(path)
    from torchtext.data.functional import (
        load_sp_model,
        sentencepiece_numericalizer,
        sentencepiece_tokenizer,
    )

    processor = load_sp_model(str(path))
    assert BPETokenizer.load(path).model == bpe_1000.model
sentences = text_of["test"][:20]
assert list(sentencepiece_tokenizer(processor)(sentences)) == [
    bpe_1000.pieces(s) for s in sentences
]
assert list(sentencepiece_numericalizer(processor)(sentences)) == [
    bpe_1000.encode(s) for s in sentences
]

# %% [markdown]
# **Pitfall.** torchtext can train a model too (`generate_sp_model`), but it can't choose the special ids. SentencePiece's own are `<unk>` 0, `<s>` 1, `</s>` 2, and no padding at all. Batches padded with 0 and masked where they are 0 then hide every unknown word, and a decoder that stops at 3 stops at some letter. Nothing crashes. So we train with SentencePiece itself and say which ids we want.


# %%
def with_default_ids(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """The wrong version: the same model with SentencePiece's own special ids."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        num_threads=1,
        minloglevel=2,
    )
    return BPETokenizer(model.getvalue())


# %%
wrong = with_default_ids(text_of["train"], 250)
café = "Ein Mann im Café."  # é occurs nowhere in the sample corpus
assert UNK in bpe[250].encode(café) and PAD not in bpe[250].encode(café)
assert PAD in wrong.encode(café)  # the mask would hide it, as if there were nothing
assert wrong.processor.eos_id() != EOS and wrong.processor.pad_id() == -1

# %% [markdown]
# Note in passing what this shows: subwords still have an `<unk>`, for letters that the training text doesn't hold. It is just very rare.
#
# ## 7 · From pairs to examples
#
# > **In short.** The source ends with `</s>`. The target begins with `<s>` and ends with `</s>`: the first says "begin", the last teaches the model to stop.
#
# A sentence that is too long for the positional encoding (chapter 3) has to be cut. Where, is a trap.


# %%
@dataclass(frozen=True)
class Example:
    """One encoded pair: source ids + eos, and bos + target ids + eos."""

    src: list[int]
    tgt: list[int]


def source_ids(text: str, tokenizer: BPETokenizer, max_len: int = MAX_LEN) -> list[int]:
    """The ids of a source sentence and its eos; a longer one is cut so that eos stays."""
    return tokenizer.encode(text)[: max_len - 1] + [EOS]


def encode_pairs(
    pairs: list[tuple[str, str]], tokenizer: BPETokenizer, max_len: int = MAX_LEN
) -> list[Example]:
    """Every pair as an `Example` of at most `max_len` tokens a side."""
    return [
        Example(
            source_ids(source, tokenizer, max_len),
            [BOS, *tokenizer.encode(target)[: max_len - 1], EOS],
        )
        for source, target in pairs
    ]


# %%
source, target = corpus["train"][0]
(example,) = encode_pairs([(source, target)], bpe_1000)
assert example.src[-1] == EOS and (example.tgt[0], example.tgt[-1]) == (BOS, EOS)
assert bpe_1000.decode(example.src) == source
assert bpe_1000.decode(example.tgt) == target
print(source, "→", example.src)

# %% [markdown]
# **Pitfall.** Add `<s>` and `</s>` first and cut afterwards, as The Annotated Transformer does: a long sentence then loses its `</s>`. On the target side the model is shown sentences that don't end, and learns that running on is fine. Cut first, end afterwards.


# %%
def cut_at_the_end(ids: list[int], max_len: int) -> list[int]:
    """The wrong version: the marks first, then the cut."""
    return [BOS, *ids, EOS][:max_len]


# %%
long_pair = (" ".join([source] * 8), " ".join([target] * 8))
(short,) = encode_pairs([long_pair], bpe_1000, max_len=24)
assert len(short.src) == 24 and short.src[-1] == EOS
assert len(short.tgt) == 25 and short.tgt[-1] == EOS  # the decoder reads 24 and predicts 24
wrong_tgt = cut_at_the_end(bpe_1000.encode(long_pair[1]), max_len=24)
assert EOS not in wrong_tgt  # the wrong version never ends

# %% [markdown]
# **Picture.** How long are sentences, in tokens? This decides how much padding there will be: if all had the same length, there would be none.


# %%
def length_shares(lengths: Iterable[int]) -> dict[str, float]:
    """The share of sentences of each length; the keys are lengths."""
    counts = Counter(lengths)
    total = sum(counts.values())
    return {str(n): round(counts[n] / total, 5) for n in range(1, max(counts) + 1)}


def lengths_chart(shares: dict[str, dict[str, float]]) -> alt.TopLevelMixin:
    """One curve of length shares for each text."""
    frame = pd.DataFrame(
        [(name, int(n), share) for name, found in shares.items() for n, share in found.items()],
        columns=["text", "tokens", "share"],
    )
    chart = lines(
        frame, "tokens", "share", "text", zero=True,
        x_title="tokens in a training sentence, </s> included", y_title="share of sentences",
    )  # fmt: skip
    return titled(
        chart,
        "Real captions have a long tail, and the tail sets the padding",
        "Most captions of Multi30k have 10 to 20 tokens, a few more than 40. One such sentence in "
        "a batch makes every other row as long as itself.",
    )


# %%
train = encode_pairs(corpus["train"], bpe_1000)
shares = {
    "sample, German": length_shares(len(e.src) for e in train),
    "sample, English": length_shares(len(e.tgt) - 1 for e in train),
} | {f"Multi30k, {name}": found for name, found in facts["lengths"].items()}
assert all(abs(sum(found.values()) - 1) < 1e-3 for found in shares.values())
lengths_chart(shares)

# %% [markdown]
# ## 8 · Batches
#
# > **In short.** A tensor is a rectangle; sentences are not. Padding fills the rest, and the machine computes it all. Put sentences of similar length together, and there is little to fill.
#
# A batch of pairs becomes two rectangles of ids, (B, S) and (B, T+1), as wide as the longest row. `Batch` (chapter 6) adds the masks, and splits the target into what the decoder reads and what it should say.


# %%
def pad_rows(rows: Sequence[Sequence[int]], pad: int = PAD) -> torch.Tensor:
    """Rows of ids of unequal length to one (B, longest) int64 tensor."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def make_batch(examples: Sequence[Example]) -> Batch:
    """Examples to a padded `Batch`."""
    return Batch(pad_rows([e.src for e in examples]), pad_rows([e.tgt for e in examples]))


# %%
batch = make_batch(train[:4])
width = max(len(e.src) for e in train[:4])
assert batch.src.shape == (4, width) and batch.src.dtype == torch.int64
for row, e in zip(batch.src.tolist(), train[:4], strict=True):
    assert row == e.src + [PAD] * (width - len(e.src))
assert batch.ntokens == sum(len(e.tgt) - 1 for e in train[:4])

# %% [markdown]
# With rows of lengths $n_1, …, n_B$, the share of the rectangle that is padding is
#
# $$\text{padding} = 1 - \frac{\sum_i n_i}{B \cdot \max_i n_i}.$$
#
# For an epoch we add up the tokens and the rectangles of all batches, both sides, before we divide.


# %%
def padding_share(lengths: Sequence[tuple[int, int]], batches: Iterable[Sequence[int]]) -> float:
    """The share of padding, between 0 and 1, in batches of indices.

    `lengths` holds each pair's (source, target) length; padding counts on both sides.
    """
    tokens = cells = 0
    for batch in batches:
        for side in (0, 1):
            found = [lengths[i][side] for i in batch]
            tokens += sum(found)
            cells += len(found) * max(found)
    return 1 - tokens / cells


# %%
few = [range(0, 8), range(8, 20)]
pair_lengths = [(len(e.src), len(e.tgt)) for e in train]
real_cells = total_cells = 0
for indices in few:  # counted once more, in real tensors
    for rows in ([train[i].src for i in indices], [train[i].tgt for i in indices]):
        ids = pad_rows(rows)
        real_cells += int((ids != PAD).sum())
        total_cells += ids.numel()
assert abs(padding_share(pair_lengths, few) - (1 - real_cells / total_cells)) < 1e-12

# %% [markdown]
# Four ways to make batches:
#
# - **fixed width**: every row padded to 72 tokens, as The Annotated Transformer's code does, while its text says that padding is minimal;
# - **random order**: shuffle, cut into batches of equal count, pad each to its own longest row;
# - **sorted**: order by length, then cut. Little padding. But every epoch has the same batches, and goes from short to long: the last thing that the model sees, every time, is long sentences;
# - **length buckets by tokens**: shuffle, sort by length, cut so that a batch holds so many *tokens* rather than so many sentences, then shuffle the batches.
#
# Batches of so many tokens, from pairs of similar length, are what the paper uses, with about 25,000 source and 25,000 target tokens in a batch (§5.1). Short sentences come in batches of many rows and long ones in batches of few, so that all batches cost about the same.


# %%
def token_batches(
    examples: Sequence[Example], max_tokens: int, rng: random.Random | None = None
) -> list[list[int]]:
    """Indices of `examples` in batches of similar length, at most `max_tokens` a side with padding.

    With `rng`, equal lengths are mixed and the batches come in random order: for training. Without,
    they go from short to long. Raises ValueError where one example alone is too long.
    """
    order = list(range(len(examples)))
    if rng is not None:
        rng.shuffle(order)  # the sort is stable, so that this order remains among equals
    order.sort(key=lambda i: (len(examples[i].tgt), len(examples[i].src)))
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = 0
    for i in order:
        length = max(len(examples[i].src), len(examples[i].tgt))
        if length > max_tokens:
            raise ValueError(f"a sentence of {length} tokens does not fit {max_tokens} a batch")
        longest = max(longest, length)
        if longest * (len(batch) + 1) > max_tokens:
            batches.append(batch)
            batch, longest = [], length
        batch.append(i)
    if batch:
        batches.append(batch)
    if rng is not None:
        rng.shuffle(batches)
    return batches


# %%
def sentence_batches(order: Sequence[int], size: int) -> list[list[int]]:
    """`order` cut into batches of `size` sentences, whatever their length; the last may be smaller."""
    return [list(order[i : i + size]) for i in range(0, len(order), size)]


# %% [markdown]
# **Check.** Every example is in exactly one batch; no batch exceeds its tokens; two epochs differ; a sentence that fits no batch is an error and isn't dropped in silence.

# %%
buckets = token_batches(train, 2048, random.Random(0))
assert sorted(i for batch in buckets for i in batch) == list(range(len(train)))
for batch in buckets:
    assert len(batch) * max(max(pair_lengths[i]) for i in batch) <= 2048
assert buckets == token_batches(train, 2048, random.Random(0))
assert buckets != token_batches(train, 2048, random.Random(1))
print(complaint(token_batches, train, 8))

# %% [markdown]
# **Pitfall.** "It's only padding, the mask hides it." The mask hides it from the *result*. The machine multiplies the zeros all the same. *Predict* the four shares before you run the next cell.

# %%
FIXED_WIDTH = 72


def padding_table(lengths: Sequence[tuple[int, int]], max_tokens: int) -> dict[str, float]:
    """The padding share of four ways to batch pairs of these (source, target) lengths."""
    dummies = [Example([EOS] * source, [EOS] * target) for source, target in lengths]
    buckets = token_batches(dummies, max_tokens, random.Random(0))
    size = round(len(lengths) / len(buckets))  # as many batches as the buckets make
    shuffled = list(range(len(lengths)))
    random.Random(0).shuffle(shuffled)
    by_length = sorted(shuffled, key=lambda i: (lengths[i][1], lengths[i][0]))
    tokens = sum(min(n, FIXED_WIDTH) for pair in lengths for n in pair)
    shares = {
        "fixed width of 72": 1 - tokens / (2 * FIXED_WIDTH * len(lengths)),
        "random order": padding_share(lengths, sentence_batches(shuffled, size)),
        "sorted by length": padding_share(lengths, sentence_batches(by_length, size)),
        "length buckets": padding_share(lengths, buckets),
    }
    return {name: round(share, 4) for name, share in shares.items()}


def padding_chart(tables: dict[str, dict[str, float]]) -> alt.TopLevelMixin:
    """Bars of padding shares, a panel for each corpus."""
    panels = [
        bars(
            pd.DataFrame({"batching": list(table), "padding": list(table.values())}),
            "batching",
            "padding",
            value_title="share of the batch that is padding",
            number_format=".0%",
            width=420,
        ).properties(title=corpus_name)
        for corpus_name, table in tables.items()
    ]
    return titled(
        alt.vconcat(*panels, spacing=24),
        "What the machine computes for nothing",
        "A fixed width wastes most of the work, and random order more than half of it on real "
        "captions. Equal lengths together waste little, and buckets keep the batches random.",
    )


# %%
padding = {"sample": padding_table(pair_lengths, 2048), "Multi30k": facts["padding"]}
for table in padding.values():
    assert table["fixed width of 72"] > 0.6
    assert table["fixed width of 72"] > table["random order"] > 2 * table["length buckets"]
    assert table["length buckets"] < 0.1
padding_chart(padding)

# %% [markdown]
# **Picture.** The target side of two batches, 16 rows each, as the machine sees it: on the left in random order, on the right from a bucket.


# %%
def batch_mask(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """True where a row holds a token and False where it holds padding, (B, `width`)."""
    return torch.tensor([[i < len(row) for i in range(width)] for row in rows])


def batches_chart(random_rows: list, bucket_rows: list) -> alt.TopLevelMixin:
    """Two batches side by side: tokens dark, padding pale."""
    panels = [
        heatmap(
            batch_mask(rows, max(map(len, rows))),
            row_title="sentence",
            column_title="position",
            words=("token", "padding"),
            cell=13,
        ).properties(title=name)
        for name, rows in (("random order", random_rows), ("length bucket", bucket_rows))
    ]
    return titled(
        alt.hconcat(*panels, spacing=30),
        "One long sentence widens the whole batch",
        "Each row is a sentence. In the random batch most rows end early, and the rest is padding. "
        "In the bucket all rows end together.",
    )


# %%
random_rows = [train[i].tgt for i in range(16)]
typical = sorted(buckets, key=lambda batch: len(train[batch[0]].tgt))[len(buckets) // 2]
bucket_rows = [train[i].tgt for i in typical[:16]]
filled = [float(batch_mask(rows, max(map(len, rows))).double().mean())
          for rows in (random_rows, bucket_rows)]  # fmt: skip
assert filled[0] < 0.9 < filled[1]
batches_chart(random_rows, bucket_rows)

# %% [markdown]
# ## 9 · How the facts of Multi30k were recorded
#
# The record that this chapter's charts show was made from the real files. `python -m scripts.studies.corpus --save true` makes it anew; with `MULTI30K_DIR` set, `make test` computes all of it again and compares.

# %% [markdown]
# ## Summary
#
# - A corpus is pairs of lines that correspond. Check the checksum, the encoding and the line counts, or the error shows up as a bad model.
# - The vocabulary and the subword model are built from the training split alone. Otherwise the test set can't tell what is unknown.
# - Byte-pair encoding gives an open vocabulary of a size that you choose. Choose the special ids as well.
# - Cut a long sentence first, then end it with `</s>`.
# - Batch by tokens, in buckets of similar length: the same sentences, a fraction of the padding.
#
# ## What the paper did that we don't
#
# - WMT 2014: 4.5 million pairs for German and 36 million for French, where Multi30k has 29,000.
# - About 37,000 shared subwords for English to German (32,000 word pieces for French); we use 8,192, or 1,000 for the sample corpus.
# - Batches of about 25,000 source and 25,000 target tokens on eight GPUs; ours have some thousands.

# %% [markdown]
# ## Exercises
#
# Six, from a warm-up to a project. [Chapter 1](ch01_attention.ipynb) says how the checkers work: they are silent when your function is right, and otherwise say what is wrong.

# %% [markdown]
# ### Exercise 1 *warm-up* · Number the words
#
# Write what torchtext did for us: `numbers(splits, min_freq)` takes tokenised sentences by split, `{"train": …, "val": …, "test": …}`, and gives a dictionary from a word to its id. The four `SPECIALS` come first, then the words from frequent to rare (equals in any order). Words that occur fewer than `min_freq` times have no id.


# %%
def check_word_numbers(candidate: Callable[..., dict[str, int]]) -> None:
    """`candidate(splits, min_freq)` gives word → id: of the training split, specials first, then by count."""
    splits = {
        "train": [["ein", "Hund", "rennt"], ["ein", "Hund", "schläft"], ["ein", "Ball"]],
        "val": [["ein", "Ball", "rollt"]],
        "test": [["eine", "Katze", "schläft"]],
    }
    counts = Counter(word for words in splits["train"] for word in words)
    found = candidate(splits, 1)
    assert [found.get(name) for name in SPECIALS] == [PAD, UNK, BOS, EOS], (
        "The four special entries don't have their ids 0 to 3. Masks and decoders of every chapter rely on them."
    )
    seen = sorted(found.keys() - counts.keys() - set(SPECIALS))
    assert not seen, (
        f"{seen[0]!r} has an id, and no training sentence holds it. So the test set was read, and can no longer "
        "say how often a word is unknown."
    )
    assert counts.keys() <= found.keys(), "With min_freq=1 a word of the training split has no id."
    assert sorted(found.values()) == list(range(len(found))), (
        "The ids have holes, or two words share one. An id is a row of the embedding table: 0 to V − 1, each once."
    )
    ordered = [counts[word] for word in sorted(counts, key=found.__getitem__)]
    assert ordered == sorted(ordered, reverse=True), (
        "A rare word stands before a frequent one. The order is by how often a word occurs in training."
    )
    twice = candidate(splits, 2).keys() - set(SPECIALS)
    assert not twice & {"schläft", "Ball"}, (
        "With min_freq=2 a word is known that training has once: its second occurrence is in another split. "
        "That is a leak as well, of counts rather than of words."
    )
    assert twice == {"ein", "Hund"}, (
        "With min_freq=2 the words aren't those that occur twice or more: is the bound itself inside?"
    )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_word_numbers(splits: dict[str, list[list[str]]], min_freq: int) -> dict[str, int]:
    """Word → id: the specials, then the training split's words by count."""
    counts = Counter(word for words in splits["train"] for word in words)
    words = [word for word, times in counts.most_common() if times >= min_freq]
    return {word: i for i, word in enumerate([*SPECIALS, *words])}


check_word_numbers(solution_word_numbers)

# %% [markdown]
# Section 5's pitfall as a candidate, all splits in one vocabulary; and its quieter sister, which takes the words from training and the *counts* from everywhere.


# %%
def leaky_numbers(splits: dict[str, list[list[str]]], min_freq: int) -> dict[str, int]:
    """The wrong version: whatever occurs anywhere has an id."""
    everything = [words for found in splits.values() for words in found]
    return solution_word_numbers({"train": everything}, min_freq)


def leaky_counts(splits: dict[str, list[list[str]]], min_freq: int) -> dict[str, int]:
    """The wrong version: training's words, counted in all splits."""
    known = {word for words in splits["train"] for word in words}
    everything = [[w for w in words if w in known] for found in splits.values() for words in found]
    return solution_word_numbers({"train": everything}, min_freq)


for wrong in (leaky_numbers, leaky_counts):
    print(f"{wrong.__name__}: {rejection(check_word_numbers, wrong)}")

# %% [markdown]
# ### Exercise 2 *code* · Split, don't cut
#
# `source_ids` cuts a source that is too long, and what was behind the cut is never translated. Split it instead: `split(ids, max_len)` takes ids without marks, and gives as few rows as possible, each of at most `max_len` ids. Every row ends with `</s>`, and without their `</s>` the rows are the ids again. No ids make one row, `[EOS]`.


# %%
def check_split_rows(candidate: Callable[[list[int], int], list[list[int]]]) -> None:
    """`candidate(ids, max_len)` gives the fewest rows of at most `max_len` that each end with eos."""
    for count in (0, 1, 6, 7, 8, 14, 15, 30):
        ids, max_len = list(range(10, 10 + count)), 8
        rows = [list(row) for row in candidate(list(ids), max_len)]
        case = f"{count} ids, max_len {max_len}: "
        assert rows and all(rows), case + "there is no row, or an empty one."
        open_end = [row for row in rows if row[-1] != EOS]
        assert not open_end, case + (
            f"{len(open_end)} of {len(rows)} rows don't end with </s>. To the model such a row is a sentence that "
            "goes on: was the mark added before the cut?"
        )
        assert all(row.count(EOS) == 1 for row in rows), case + "a row has more than one </s>."
        longest = max(map(len, rows))
        assert longest <= max_len, case + (
            f"a row has {longest} ids. The mark at the end takes a place as well."
        )
        joined = [i for row in rows for i in row if i != EOS]
        assert joined == ids, case + (
            f"the rows hold {len(joined)} of the ids, or hold them in another order. What is lost here is never "
            "translated, and nothing crashes."
        )
        fewest = max(1, -(-count // (max_len - 1)))
        assert len(rows) == fewest, case + (
            f"{len(rows)} rows where {fewest} do. Does the last one say anything, or are rows left unfilled?"
        )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_split_rows(ids: list[int], max_len: int) -> list[list[int]]:
    """`ids` in rows of at most `max_len`, each with its own eos."""
    room = max_len - 1
    return [[*ids[at : at + room], EOS] for at in range(0, max(1, len(ids)), room)]


check_split_rows(solution_split_rows)

# %% [markdown]
# Section 7's pitfall once more: the mark first, then the knife. And the cut of this chapter itself, which ends well and loses the rest.


# %%
def marked_then_split(ids: list[int], max_len: int) -> list[list[int]]:
    """The wrong version: only the last row has an end."""
    marked = [*ids, EOS]
    return [marked[at : at + max_len] for at in range(0, len(marked), max_len)]


def first_row_only(ids: list[int], max_len: int) -> list[list[int]]:
    """The wrong version: cut as `source_ids` does."""
    return [[*ids[: max_len - 1], EOS]]


for wrong in (marked_then_split, first_row_only):
    print(f"{wrong.__name__}: {rejection(check_split_rows, wrong)}")

# %% [markdown]
# ### Exercise 3 *code* · Apply the merges
#
# Section 6 *learned* merges. Now use them: `apply(word, merges)` gives the pieces of a word that may be new, its end marked with `</w>`. Each merge was learned on what the merges before it had made of the words, so there is one right order.
#
# *Further:* learn a separate SentencePiece model for each language, 500 pieces each, and compare tokens per sentence with the joint model of 1,000. Who gains?


# %%
def check_apply_merges(candidate: Callable[..., Sequence[str]]) -> None:
    """`candidate(word, merges)` gives the pieces of `word` and "</w>", as the merges were learned."""
    one = [("a", "n")]
    pieces = list(candidate("anana", one))
    assert pieces != ["an", "an", "a"], (
        "'anana' has no '</w>' at its end. 'est' inside a word and 'est' at its end are two different pieces."
    )
    assert "".join(pieces) == "anana</w>", (
        "Joined, the pieces of 'anana' aren't 'anana</w>': letters were lost, or came in twice."
    )
    assert pieces == ["an", "an", "a", "</w>"], (
        "The merge a+n occurs twice in 'anana', and isn't applied twice."
    )
    assert list(candidate("aaa", [("a", "a")])) == ["aa", "a", "</w>"], (
        "'aaa' with the merge a+a: go from left to right, and a letter that has been glued is used up."
    )
    assert list(candidate("abc", [("b", "c"), ("a", "b"), ("ab", "c")])) == ["a", "bc", "</w>"], (
        "'abc' with the merges b+c, a+b, ab+c falls into other pieces. Neither the longest piece nor the leftmost "
        "pair comes first, but the merge that was learned first."
    )
    words = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
    merges = learn_merges(words, merges=10)
    for word in (*words, "lowest", "newer", "wide", "nest", "owl"):
        expected: tuple[str, ...] = (*word, "</w>")
        for pair in merges:
            expected = merge_pair(expected, pair)
        assert tuple(candidate(word, merges)) == expected, (
            f"{word!r} falls into other pieces than training's own steps would make of it."
        )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_apply_merges(word: str, merges: Sequence[tuple[str, str]]) -> list[str]:
    """The pieces of `word`: of all pairs that stand there, always the one that was learned first."""
    rank = {pair: i for i, pair in reversed(list(enumerate(merges)))}
    pieces: tuple[str, ...] = (*word, "</w>")
    while known := [pair for pair in zip(pieces, pieces[1:], strict=False) if pair in rank]:
        pieces = merge_pair(pieces, min(known, key=rank.__getitem__))
    return list(pieces)


check_apply_merges(solution_apply_merges)
assert solution_apply_merges("lowest", merges) == ["low", "est</w>"]

# %% [markdown]
# It is tempting to forget the order, and to take the longest piece that is in the vocabulary. That is another tokeniser (WordPiece does so), and a model that was trained on BPE's pieces meets strangers.


# %%
def longest_pieces(word: str, merges: Sequence[tuple[str, str]]) -> list[str]:
    """The wrong version: from the left, always the longest piece there is."""
    known, rest, pieces = {a + b for a, b in merges}, word + "</w>", []
    while rest:
        width = next((n for n in range(len(rest), 1, -1) if rest[:n] in known), 1)
        width = len(rest) if rest == "</w>" else width
        pieces, rest = [*pieces, rest[:width]], rest[width:]
    return pieces


def unmarked_pieces(word: str, merges: Sequence[tuple[str, str]]) -> list[str]:
    """The wrong version: nothing says where the word ends."""
    pieces = tuple(word)
    for pair in merges:
        pieces = merge_pair(pieces, pair)
    return list(pieces)


for wrong in (longest_pieces, unmarked_pieces):
    print(f"{wrong.__name__}: {rejection(check_apply_merges, wrong)}")

# %% [markdown]
# ### Exercise 4 *code* · What padding costs attention
#
# Everywhere else a padded cell costs as much as a real one. In attention it costs more: $n$ tokens have $n^2$ scores (chapter 1), and a padded rectangle of width $w$ has $w^2$ a row. Write `wasted(lengths, batches)`: the share of one side's self-attention scores that have a padded query or a padded key. `lengths` holds the sentences' lengths, `batches` lists of indices.


# %%
def check_wasted_scores(candidate: Callable[..., float]) -> None:
    """`candidate(lengths, batches)`: the share, 0 to 1, of T × T scores that padding has a part in."""
    found = candidate([2, 4], [[0, 1]])
    assert abs(found - 1 / 4) > 1e-12, (
        "For lengths 2 and 4 you count padded cells. A score belongs to two cells, a query and a key: a square."
    )
    assert abs(found - 20 / 32) > 1e-12, "That is the useful share. What is asked for is the rest."
    assert abs(found - 4 / 32) > 1e-12, (
        "For lengths 2 and 4 only scores between two paddings are counted. One padded partner is enough."
    )
    assert abs(found - 12 / 32) < 1e-12, (
        "Lengths 2 and 4 in one batch: the first row needs 2 × 2 scores and gets 4 × 4."
    )
    assert abs(candidate([5, 5, 5], [[0, 1], [2]])) < 1e-12, (
        "Where all rows are equally long nothing is padding, and nothing is wasted."
    )
    lengths, batches = [1, 2, 10, 10, 10, 10], [[0, 1], [2, 3, 4, 5]]
    found = candidate(lengths, batches)
    assert abs(found - 3 / 16) > 1e-12, (
        "That is the mean of the batches' shares. A small batch then weighs as much as a large one: add up first, "
        "divide once."
    )
    assert abs(found - 3 / 408) < 1e-12, (
        "A batch of lengths 1 and 2, and one of four tens, waste 3 of 408 scores. Is each batch as wide as its own "
        "longest row, and no wider?"
    )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_wasted_scores(lengths: Sequence[int], batches: Iterable[Sequence[int]]) -> float:
    """1 − Σ n² / Σ w², w the longest row of a sentence's batch."""
    useful = computed = 0
    for batch in batches:
        squares = [lengths[i] ** 2 for i in batch]
        useful += sum(squares)
        computed += len(squares) * max(squares)
    return 1 - useful / computed


check_wasted_scores(solution_wasted_scores)
by_order = {
    "random order": sentence_batches(range(len(train)), 128),
    "length buckets": buckets,
}
for name, found in by_order.items():
    widths = [t for _, t in pair_lengths]  # the target side
    cells, scores = (
        padding_share([(t, t) for t in widths], found),
        solution_wasted_scores(widths, found),
    )
    print(
        f"{name}: padding is {cells:.0%} of the cells, and has a part in {scores:.0%} of the scores"
    )

# %% [markdown]
# Three answers that look right: the share of cells, the mean over batches, and the part that is *not* wasted.


# %%
def wasted_cells(lengths: Sequence[int], batches: Iterable[Sequence[int]]) -> float:
    """The wrong version: the padding share of the cells."""
    return padding_share([(n, n) for n in lengths], batches)


def mean_of_batch_shares(lengths: Sequence[int], batches: Iterable[Sequence[int]]) -> float:
    """The wrong version: each batch's share, and then their mean."""
    shares = [solution_wasted_scores(lengths, [batch]) for batch in batches]
    return sum(shares) / len(shares)


for wrong in (wasted_cells, mean_of_batch_shares):
    print(f"{wrong.__name__}: {rejection(check_wasted_scores, wrong)}")

# %% [markdown]
# ### Exercise 5 *code* · A budget for both sides
#
# `token_batches` limits the longer side. Memory pays for both: write `batch_up(examples, max_tokens, rng)` so that rows × (longest source + longest target) of each batch is at most `max_tokens`, padding counted. Every example is in exactly one batch, batches hold sentences of similar length, and they come in an order that `rng`, a `random.Random`, decides. An example that is too long by itself is a `ValueError`.
#
# *Further:* shuffling before the sort makes equal lengths change places from epoch to epoch. Measure how many pairs of sentences share a batch in two epochs, with and without it.


# %%
def budget_examples(count: int = 300) -> list[Example]:
    """Random pairs of unequal lengths for the next checker."""
    rng, pairs = random.Random(6), []
    for _ in range(count):
        source = min(30, 2 + int(rng.expovariate(0.12)))
        pairs.append(Example([EOS] * source, [BOS] * max(2, source + rng.randint(-2, 3))))
    return pairs


def check_budget_batches(candidate: Callable[..., list[list[int]]]) -> None:
    """`candidate(examples, max_tokens, rng)`: indices in batches of similar length within the budget."""
    examples, budget = budget_examples(), 256
    batches = candidate(examples, budget, random.Random(0))
    times = Counter(i for batch in batches for i in batch)
    lost = len(examples) - len(times)
    assert not lost, (
        f"{lost} of {len(examples)} examples are in no batch. Does the one that is still being filled at the end "
        "get out, and the one that no longer fitted get in?"
    )
    assert max(times.values()) == 1, "Some example is in two places, so one epoch shows it twice."
    sides = [[(len(examples[i].src), len(examples[i].tgt)) for i in batch] for batch in batches]
    real = max(sum(s + t for s, t in batch) for batch in sides)
    longer = max(len(batch) * max(map(max, batch)) for batch in sides)
    widths = [sum(map(max, zip(*batch, strict=True))) for batch in sides]
    largest = max(len(batch) * width for batch, width in zip(sides, widths, strict=True))
    assert largest <= budget or real > budget or longer <= budget // 2, (
        f"The real tokens fit, but with padding a batch takes {largest} of {budget}. A row is as wide as the "
        "longest in its batch."
    )
    assert largest <= budget or longer > budget, (
        f"A batch takes {largest} of {budget}: the longer side fits alone. Source and target are both in memory."
    )
    assert largest <= budget, f"A batch takes {largest} of {budget}, padding counted."
    pad = padding_share([(len(e.src), len(e.tgt)) for e in examples], batches)
    assert pad < 0.15, f"{pad:.0%} is padding: short and long sentences share batches."
    assert len(batches) < 1.2 * sum(s + t for batch in sides for s, t in batch) / budget / (
        1 - pad
    ), "The batches are far from full: more steps for the same work."
    check_budget_order(candidate, examples, budget, widths)


def check_budget_order(
    candidate: Callable[..., list[list[int]]],
    examples: list[Example],
    budget: int,
    widths: list[int],
) -> None:
    """The second half of `check_budget_batches`: the order of the batches, and what fits no batch."""
    assert widths not in (sorted(widths), sorted(widths, reverse=True)), (
        "The batches come sorted by length: each epoch ends with its longest (or shortest) sentences."
    )
    first, again, other = (candidate(examples, budget, random.Random(seed)) for seed in (0, 0, 1))
    assert first == again, "The same seed gives other batches: where else does chance come in?"
    assert first != other, "Another seed gives the same batches: every epoch would be alike."
    try:
        candidate([*examples, Example([EOS] * 200, [BOS] * 100)], budget, random.Random(0))
    except ValueError:
        return
    raise AssertionError("A pair of 200 and 100 tokens fits no batch of 256, and nobody is told.")


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_budget_batches(
    examples: Sequence[Example], max_tokens: int, rng: random.Random
) -> list[list[int]]:
    """Indices in batches whose two rectangles together hold at most `max_tokens` cells."""
    order = list(range(len(examples)))
    rng.shuffle(order)
    order.sort(key=lambda i: (len(examples[i].tgt), len(examples[i].src)))
    batches: list[list[int]] = [[]]
    longest = [0, 0]
    for i in order:
        pair = [len(examples[i].src), len(examples[i].tgt)]
        if sum(pair) > max_tokens:
            raise ValueError(f"a pair of {pair} tokens does not fit {max_tokens} a batch")
        longest = list(map(max, longest, pair))
        if (len(batches[-1]) + 1) * sum(longest) > max_tokens:
            batches.append([])
            longest = pair
        batches[-1].append(i)
    rng.shuffle(batches)
    return batches


check_budget_batches(solution_budget_batches)

# %% [markdown]
# The batcher of this chapter, which limits each side; one that forgets the batch it was filling when the sentences ran out; and one that counts tokens where the machine counts cells.


# %%
def forgetful_batches(
    examples: Sequence[Example], max_tokens: int, rng: random.Random
) -> list[list[int]]:
    """The wrong version: a batch is handed out when the next one begins. The last has no next."""
    return solution_budget_batches(examples, max_tokens, rng)[:-1]


def batches_by_real_tokens(
    examples: Sequence[Example], max_tokens: int, rng: random.Random
) -> list[list[int]]:
    """The wrong version: as many as fit if there were no padding."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].src))
    batches, total = [[]], 0
    for i in order:
        tokens = len(examples[i].src) + len(examples[i].tgt)
        if total + tokens > max_tokens:
            batches, total = [*batches, []], 0
        batches[-1].append(i)
        total += tokens
    rng.shuffle(batches)
    return batches


for wrong in (token_batches, forgetful_batches, batches_by_real_tokens):
    print(f"{wrong.__name__}: {rejection(check_budget_batches, wrong)}")

# %% [markdown]
# ### Exercise 6 *project* · The grammar, read and extended
#
# Find sentences of the sample corpus in which *sieht* becomes *is looking at*, *is watching* and *sees*. What must the model look at to tell them apart, and how many words away is it?
#
# Then add the object relative clause to the grammar (*der Hut, **den** der Mann trägt*). Which case does the pronoun have, and which word does it agree with? The checks of section 2.6 must still pass, and those of agreement should learn the new case. Train chapter 9's sample model on the larger grammar: does `test_unseen` suffer?
#
# <details><summary>An answer to the first part</summary>
#
# What stands after the verb tells them apart: *sieht … an* is *is looking at*, *sieht … zu* is *is watching*, and *sieht, dass …* is *sees*. Between the verb and its particle stand the object and whatever describes it, so the particle is three to seven words away; *dass* is the very next word. In a subordinate clause verb and particle are one word (*ansieht*). The pronoun of the relative clause takes gender and number from the noun before it, and its case from its role in the clause: here the accusative.
#
# </details>
#
# Next: [Chapter 8 · Going fast](ch08_going_fast.ipynb)
