# %% [markdown]
# # Chapter 6 · Multi30k

# %%
import gzip
import hashlib
import io
import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch05_training import BOS, EOS, PAD, UNK, Batch

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
    """Fetch one file into the user's cache, with pooch: three tries, a progress bar, a checksum."""
    import pooch

    fetcher = pooch.create(
        path=pooch.os_cache("from-attention-to-translation"),
        base_url=MULTI30K_URL,
        registry={name: f"sha256:{MULTI30K_SHA256[name]}"},
        retry_if_failed=3,
    )
    try:
        return Path(fetcher.fetch(name, progressbar=True))
    except Exception as error:
        raise FileNotFoundError(
            f"could not download {name} ({type(error).__name__}): go online, or put the files in "
            "a folder and set MULTI30K_DIR to it, or use the `sample` corpus"
        ) from error


# %%
def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, gzip or plain; only a newline separates them.

    Raises ValueError for a truncated gzip file and for text that is not UTF-8.
    """
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


# %%
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


# %%
def multi30k() -> dict[str, list[tuple[str, str]]]:
    """The four splits of Multi30k, German to English."""
    return {
        split: parallel(
            *(read_lines(multi30k_file(f"{split}.{x}.gz")) for x in ("de", "en")), split
        )
        for split in MULTI30K_SPLITS
    }


# %%
def load_corpus(name: str) -> dict[str, list[tuple[str, str]]]:
    """Both corpora behind one call: "sample" (generated, offline) or "multi30k"; split to pairs."""
    if name == "sample":
        return sample_corpus()
    if name == "multi30k":
        return multi30k()
    raise ValueError(f"unknown corpus {name!r}: choose sample or multi30k")


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
@dataclass(frozen=True)
class Example:
    """One encoded pair: source ids + eos, and bos + target ids + eos."""

    src: list[int]
    tgt: list[int]


# %%
def source_ids(text: str, tokenizer: BPETokenizer, max_len: int = MAX_LEN) -> list[int]:
    """The ids of a source sentence and its eos; a longer one is cut so that eos stays."""
    return tokenizer.encode(text)[: max_len - 1] + [EOS]


# %%
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
def pad_rows(rows: Sequence[Sequence[int]], pad: int = PAD) -> torch.Tensor:
    """Rows of ids of unequal length to one (B, longest) int64 tensor."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


# %%
def make_batch(examples: Sequence[Example]) -> Batch:
    """Examples to a padded `Batch`."""
    return Batch(pad_rows([e.src for e in examples]), pad_rows([e.tgt for e in examples]))


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
NOUNS = {
    "person": nouns("""
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
    """),
    "animal": nouns("""
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
    """),
    "clothes": nouns("""
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
    """),
    "food": nouns("""
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
    """),
    "toy": nouns("""
        m, Ball, Bälle; ball, balls
        m, Drachen, Drachen; kite, kites
        m, Luftballon, Luftballons; balloon, balloons
        m, Schläger, Schläger; racket, rackets
        f, Puppe, Puppen; doll, dolls
        m, Reifen, Reifen; tire, tires
        m, Stein, Steine; stone, stones
        n, Seil, Seile; rope, ropes
    """),
    "tool": nouns("""
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
    """),
    "container": nouns("""
        m, Korb, Körbe; basket, baskets
        f, Kiste, Kisten; box, boxes
        m, Koffer, Koffer; suitcase, suitcases
        f, Tasche, Taschen; bag, bags
        f, Flasche, Flaschen; bottle, bottles
        m, Rucksack, Rucksäcke; backpack, backpacks
        n, Paket, Pakete; package, packages
    """),
    "text": nouns("""
        n, Buch, Bücher; book, books
        f, Zeitung, Zeitungen; newspaper, newspapers
        m, Brief, Briefe; letter, letters
        n, Gedicht, Gedichte; poem, poems
        f, Geschichte, Geschichten; story, stories
    """),
    "instrument": nouns("""
        f, Gitarre, Gitarren; guitar, guitars
        f, Geige, Geigen; violin, violins
        f, Trommel, Trommeln; drum, drums
        f, Flöte, Flöten; flute, flutes
        n, Klavier, Klaviere; piano, pianos
        f, Trompete, Trompeten; trumpet, trumpets
    """),
    "vehicle": nouns("""
        n, Auto, Autos; car, cars
        n, Fahrrad, Fahrräder; bicycle, bicycles
        n, Motorrad, Motorräder; motorcycle, motorcycles
        n, Boot, Boote; boat, boats
        m, Traktor, Traktoren; tractor, tractors
        m, Lastwagen, Lastwagen; truck, trucks
        n, Taxi, Taxis; taxi, taxis
    """),
    "building": nouns("""
        n, Haus, Häuser; house, houses
        m, Turm, Türme; tower, towers
        f, Brücke, Brücken; bridge, bridges
        f, Hütte, Hütten; hut, huts
        n, Schloss, Schlösser; castle, castles
        n, Zelt, Zelte; tent, tents
    """),
    "furniture": nouns("""
        m, Tisch, Tische; table, tables
        m, Stuhl, Stühle; chair, chairs
        f, Bank, Bänke; bench, benches
        n, Bett, Betten; bed, beds
        n, Sofa, Sofas; sofa, sofas
        n, Regal, Regale; shelf, shelves
        m, Schrank, Schränke; cupboard, cupboards
        m, Teppich, Teppiche; carpet, carpets
    """),
}

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

# %%
VERBS = {
    "transitive": verbs("""
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
    """),
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
CLASHES = {
    *(("alt", noun) for noun in ("Kind", "Mädchen", "Junge", "Welpe")),
    *(("jung", noun) for noun in ("Großmutter", "Großvater", "Welpe")),
    *(("süß", noun) for noun in ("Wurst", "Suppe", "Tomate")),
}
MOODS = ("müde", "fröhlich", "traurig", "hungrig", "glücklich")
INDOORS = ("Museum", "Supermarkt", "Keller", "Küche", "Schule", "Kirche", "Werkstatt", "Bibliothek",
    "Restaurant", "Krankenhaus", "Wohnzimmer", "Bühne", "Balkon", "Fenster", "Bahnsteig")  # fmt: skip
OUTDOOR_PLACES = tuple(place for place in PLACES if place.noun.singular not in INDOORS)

# %%
CASES = ("nominative", "accusative", "dative")
DETERMINERS = {  # by (case): masculine, feminine, neuter, plural
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


# %%
@dataclass(frozen=True)
class Phrase:
    """The same thing in both languages, and the pairs of words that it combines."""

    german: str
    english: str
    plural: bool = False
    noun: Noun | None = None
    pairs: tuple[tuple[str, str], ...] = ()


def join(*parts: str) -> str:
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
    german = join(determiner(word, case, gender), described, noun_form(noun, case, plural))
    english = join(
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


def prepositional(preposition: str, phrase: Phrase, english: str) -> Phrase:
    """`in dem Park` is said `im Park`."""
    first, _, rest = phrase.german.partition(" ")
    start = f"{preposition} {first}"
    german = join(CONTRACTIONS.get(start, start), rest)
    return Phrase(german, f"{english} {phrase.english}", pairs=phrase.pairs)


def place_phrase(place: Place, case: str) -> Phrase:
    """Being there takes the dative (im Park), going there the accusative (in den Park)."""
    there = noun_phrase("der", None, place.noun, case, plural=False)
    return prepositional(
        place.preposition, there, place.english_at if case == "dative" else place.english_to
    )


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


def verb_parts(clause: Clause) -> tuple[str, str]:
    """The finite verb, and what waits at the end of a main clause: `hebt`/`hoch`, `hat`/`gekauft`."""
    verb, plural = clause.verb, clause.subject.plural
    if clause.tense == "present":
        return (verb.infinitive if plural else verb.singular), verb.particle
    if clause.tense == "perfect":
        return AUXILIARIES[verb.auxiliary][plural], verb.participle
    return AUXILIARIES[clause.tense][plural], verb.particle + verb.infinitive


def english_verb(clause: Clause) -> str:
    """`is buying`, `has bought`, `wants to buy`."""
    verb, plural, manner = clause.verb, clause.subject.plural, clause.manner[1]
    if clause.tense == "present":
        return join("are" if plural else "is", manner, verb.english[1])
    name = verb.auxiliary if clause.tense == "perfect" else clause.tense
    form = AUXILIARIES[name]
    return join(form[2 + plural], manner, verb.english[form[4]])


def verb_second(clause: Clause, front: str = "") -> str:
    """A German main clause: one phrase, the finite verb, the rest, and the verb's other half last."""
    finite, end = verb_parts(clause)
    middle = [clause.manner[0], *(phrase.german for phrase in clause.middle)]
    if front:
        return join(front, finite, clause.subject.german, *middle, end)
    return join(clause.subject.german, finite, *middle, end)


def verb_last(clause: Clause, subject: str | None = None) -> str:
    """A German subordinate clause: the finite verb stands last, rejoined with its particle."""
    finite, end = verb_parts(clause)
    last = end + finite if clause.tense == "present" else join(end, finite)
    middle = [clause.manner[0], *(phrase.german for phrase in clause.middle)]
    return join(clause.subject.german if subject is None else subject, *middle, last)


def english_clause(clause: Clause, subject: str | None = None) -> str:
    """English keeps one order: subject, verb, the rest."""
    start = clause.subject.english if subject is None else subject
    return join(start, english_verb(clause), *(phrase.english for phrase in clause.middle))


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


# %%
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


SENTENCES = (
    (plain,) * 4 + (fronted,) * 3 + (because, saying, relative, accompanied) * 2 + (meanwhile,)
)


# %%
def is_held_out(pair: tuple[str, str]) -> bool:
    """True for about one in twelve pairs of words: they appear in `test_unseen` only."""
    return zlib.crc32(" ".join(pair).encode()) % 12 == 0


def finish(sentence: str) -> str:
    """A capital letter first, a full stop last."""
    return sentence[0].upper() + sentence[1:] + "."


SAMPLE_SIZES = {"train": 6000, "val": 300, "test": 400, "test_unseen": 300}


def generate_sentences(seed: int) -> Iterator[tuple[str, str, bool]]:
    """German, English, and whether a held-out pair occurs; endless, no sentence of either language twice."""
    deal = Dealer(random.Random(seed))
    seen = set()
    while True:
        german, english, pairs = deal.deal("sentence", SENTENCES)(deal)
        german, english = finish(german), finish(english)
        if not 5 <= len(german.split()) <= 14 or german in seen or english in seen:
            continue
        seen.update((german, english))
        yield german, english, any(is_held_out(pair) for pair in pairs)


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
