"""Your own sentence pairs: read, looked through, split, and saved as a folder that is a corpus.

Nothing is dropped in silence. A `Note` says what was left out, or kept and worth a look, with its
number of pairs and the first two of them.
"""

import codecs
import gzip
import hashlib
import json
import random
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.book.files import writable, write_whole

Pair = tuple[str, str]
SPLITS = ("train", "val", "test")
LONGEST = 256  # tokens that a model takes: chapter 3's MAX_LEN
SHARE, FEWEST, MOST = 0.05, 50, 1000  # of the pairs in each held-out split
REPEATED = 10  # how often new pairs stand among many that a model knows
ENOUGH = 10 * FEWEST  # pairs for fine-tuning, of which some can be held out
NEAR = 0.8  # shared word triples from which two sentences count as one
# How gzip, zip, xz, bzip2 and zstd begin.
PACKED_FILE = re.compile(rb"\x1f\x8b|PK\x03\x04|\xfd7zXZ\0|BZh\d1AY&SY|\x28\xb5\x2f\xfd")
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # before those of 16 bits,
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # which may begin the same
# UTF-8 that was read as Windows-1252: Ã and ¼ for ü, â and € for a dash.
MOJIBAKE = re.compile("[ÂÃÄÅÐÑ][\x80-\xbf\u0152-\u0178\u02c6\u02dc\u2013-\u2122]|â[€„]")


class Example(NamedTuple):
    """A pair and the number of its line, from 1."""

    line: int
    source: str
    target: str


@dataclass(frozen=True)
class Note:
    """What was noticed about some pairs or lines: how many, and the first two of them."""

    what: str
    count: int
    left_out: bool = False
    examples: tuple[Example, ...] = ()


@dataclass
class Report:
    """What became of the pairs that were read."""

    read: int
    notes: list[Note] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """The pairs of each split."""
    inputs: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file's contents, by the option that named it."""
    seed: int = 0

    @property
    def left_out(self) -> int:
        """Pairs that were read and are in no split."""
        return sum(note.count for note in self.notes if note.left_out)


# Files


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, if a text that begins with `head` is marked as that."""
    return next((name for mark, name in MARKS.items() if head.startswith(mark)), None)


def file_bytes(path: str | Path) -> bytes:
    """The contents of a file, unpacked if it is gzip. Raises ValueError if it can't be read."""
    try:
        content = Path(path).read_bytes()
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "a damaged gzip file"
        raise ValueError(f"can't read {str(path)!r}: {reason}") from error
    if PACKED_FILE.match(content):
        raise ValueError(f"{path} is a packed file (zip, xz, …), not text: unpack it first")
    return content


def decoded_lines(content: bytes, name: str) -> tuple[list[str], list[Note]]:
    """The lines of a text, which only a newline ends, and what was odd about their encoding.

    The text is UTF-8, or UTF-16 or UTF-32 with a mark. A line that isn't is read as Windows-1252.
    """
    notes = []
    if encoding := wide_encoding(content):
        content = content.decode(encoding, "replace").encode()
        notes.append(Note(f"lines of {name} were in {encoding.upper()}", content.count(b"\n")))
    lines, guessed = [], 0
    for line in content.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n"):
        try:
            lines.append(line.decode().removesuffix("\r"))
        except UnicodeDecodeError:
            lines.append(line.decode("cp1252", "replace").removesuffix("\r"))
            guessed += 1
    if guessed:
        notes.append(Note(f"lines of {name} aren't UTF-8: read as Windows-1252 (a guess)", guessed))
    return ([] if lines == [""] else lines), notes


def column_pairs(lines: Sequence[str], name: str) -> tuple[list[Pair], list[Note]]:
    """Pairs of tab-separated columns, and what was odd about the tabs.

    A line without a tab is a source without a target. Raises ValueError if no line has one.
    """
    rows = [line.split("\t") for line in lines]
    if not any(len(row) > 1 for row in rows):
        remedy = "put a tab between source and target, or give two files, --source and --target"
        raise ValueError(f"{name} has no line with a tab: {remedy}")
    pairs = [(row[0].strip(), row[1].strip() if len(row) > 1 else "") for row in rows]
    no_tab = [i for i, row in enumerate(rows) if len(row) == 1 and row[0].strip()]
    more = [i for i, row in enumerate(rows) if any(map(str.strip, row[2:]))]
    notes = [
        note_of("lines without a tab: nothing is left for the target", pairs, no_tab),
        note_of("more than two columns: what follows the second isn't read", pairs, more),
    ]
    return pairs, [note for note in notes if note.count]


def where_they_part(sources: Sequence[str], targets: Sequence[str]) -> int:
    """The line, from 1, near which one of two files of unequal length probably lacks lines.

    Before it, line i fits line i; behind it, line i fits the one that is as many lines further as
    the counts differ. The place is chosen so that lengths in letters differ least in all.
    """
    if len(sources) > len(targets):
        sources, targets = targets, sources
    short, long = (np.log([5.0 + len(line) for line in side]) for side in (sources, targets))
    shift = len(long) - len(short)
    short += np.median(long) - np.median(short)
    straight, shifted = np.abs(short - long[: len(short)]), np.abs(short - long[shift:])
    gains = np.concatenate([[0.0], np.cumsum(straight - shifted)])  # of shifting the lines before
    return int(gains.argmin()) + 1


def line_pairs(sources: Sequence[str], targets: Sequence[str], names: Sequence[str]) -> list[Pair]:
    """Line i of one file with line i of the other. Raises ValueError if they have unequal counts.

    It says where the files seem to part.
    """
    if len(sources) != len(targets):
        counts = " and ".join(
            f"{name} has {len(lines):,} lines"
            for name, lines in zip(names, (sources, targets), strict=True)
        )
        line = where_they_part(sources, targets)
        hint = f"by their lengths, lines stop matching near line {line:,}: look there"
        raise ValueError(f"{counts}; each line needs its translation; {hint}")
    pairs = zip(sources, targets, strict=True)
    return [(source.strip(), target.strip()) for source, target in pairs]


class PairFile(NamedTuple):
    """What a file of pairs, or two of lines, hold."""

    pairs: list[Pair]
    notes: list[Note]
    sha256: str


def read_pairs(path: str | Path, target: str | Path | None = None) -> PairFile:
    """Pairs from one file of two columns with a tab between them, or from two files line by line.

    Raises ValueError, in one line, for a file that can't be read, isn't text or holds no pair, and
    for files of unequal length.
    """
    paths = [path] if target is None else [path, target]
    contents = [file_bytes(part) for part in paths]
    sides = [decoded_lines(content, str(p)) for content, p in zip(contents, paths, strict=True)]
    notes = [note for _, side_notes in sides for note in side_notes]
    for part, (lines, _) in zip(paths, sides, strict=True):
        if not lines:
            raise ValueError(f"{part} is empty")
    if target is None:
        pairs, odd = column_pairs(sides[0][0], str(path))
        notes += odd
    else:
        pairs = line_pairs(sides[0][0], sides[1][0], [str(part) for part in paths])
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    return PairFile(pairs, notes, "+".join(digests))


# What is left out, and what is told


def note_of(
    what: str,
    pairs: Sequence[Pair] | Mapping[int, Pair],
    places: Sequence[int],
    left_out: bool = False,
) -> Note:
    """A note on the pairs at `places`; its examples are cut to 80 letters a side."""
    shown = (Example(i + 1, *(side[:80] for side in pairs[i])) for i in places[:2])
    return Note(what, len(places), left_out, tuple(shown))


def made_visible(pairs: Sequence[Pair]) -> tuple[list[Pair], list[int]]:
    """The pairs without invisible letters and with plain spaces, and where that changed one.

    Invisible is what Unicode calls control or format: zero-width letters, soft hyphens, marks of
    direction. The tokenizer drops them, too (`plain_text`).
    """
    letters = {letter for pair in pairs for side in pair for letter in set(side)}
    kinds = {letter: unicodedata.category(letter) for letter in letters}
    drop = {ord(c): "" for c, kind in kinds.items() if kind in ("Cc", "Cf") and c not in "\t\r"}
    table = drop | {ord(c): " " for c, kind in kinds.items() if kind == "Zs" or c in "\t\r"}
    plain = [tuple(side.translate(table).strip() for side in pair) for pair in pairs]
    return plain, [i for i, pair in enumerate(pairs) if plain[i] != pair]


def length_outliers(pairs: Sequence[Pair]) -> list[int]:
    """Where one side is absurdly long for the other: by a factor of 3, against the median ratio.

    Ten letters are added to each side, so that short sentences have their freedom. Corpora whose
    ratios spread widely get more room: five robust standard deviations.
    """
    ratios = np.log([(len(source) + 10) / (len(target) + 10) for source, target in pairs])
    off = np.abs(ratios - np.median(ratios))
    return np.flatnonzero(off > max(np.log(3), 5 * 1.4826 * np.median(off))).tolist()


def probable_tokens(text: str) -> float:
    """About how many pieces a text has: a piece is two letters or more, in text without spaces one.

    That is on the safe side: what is kept is seldom longer than the model takes.
    """
    return len(text) / (2 if " " in text else 1)


def swapped(pairs: Sequence[Pair]) -> list[int]:
    """Where the sides fit better the other way round, by the columns' own pairs of letters.

    A text's score is the mean log-ratio of its letter pairs' frequencies in the two columns; a pair
    is told if its sides differ by at least half of what is usual, the wrong way.
    """
    sides = [
        [list(zip(f" {text}", f"{text} ", strict=True)) for text in side]
        for side in zip(*pairs, strict=True)
    ]
    counts = [Counter(gram for grams in side for gram in grams) for side in sides]
    known = counts[0].keys() | counts[1].keys()
    sums = [count.total() + len(known) for count in counts]
    odds = {g: np.log((counts[0][g] + 1) / sums[0] * sums[1] / (counts[1][g] + 1)) for g in known}
    scores = [[sum(map(odds.get, grams)) / len(grams) for grams in side] for side in sides]
    apart = np.subtract(*scores)
    return np.flatnonzero(apart < -np.median(apart) / 2).tolist() if np.median(apart) > 0 else []


class Cleaned(NamedTuple):
    """The pairs to keep, in order; their places in the file; what was left out or looks odd."""

    pairs: list[Pair]
    places: list[int]
    notes: list[Note]


def clean_pairs(pairs: Sequence[Pair]) -> Cleaned:
    """The pairs to keep, made plain, with a note on each kind of what was left out or looks odd.

    A pair that is left out counts once, for the first reason that holds.
    """
    pairs = list(pairs)
    plain, changed = made_visible(pairs)
    notes = [note_of("invisible letters or unusual spaces: made plain", plain, changed)]
    keep = list(range(len(plain)))

    def leave_out(what: str, places: Iterable[int]) -> None:
        nonlocal keep
        gone = set(places)
        notes.append(note_of(what, plain, [i for i in keep if i in gone], left_out=True))
        keep = [i for i in keep if i not in gone]

    leave_out("a side is empty", [i for i in keep if not all(plain[i])])
    leave_out("both sides are equal", [i for i in keep if plain[i][0] == plain[i][1]])
    first = {plain[i]: i for i in reversed(keep)}
    leave_out("the same pair again", [i for i in keep if first[plain[i]] != i])
    if keep:
        odd = length_outliers([plain[i] for i in keep])
        leave_out("one side is absurdly long for the other", [keep[at] for at in odd])
    too_long = [i for i in keep if max(map(probable_tokens, plain[i])) > LONGEST]
    leave_out(f"too long: more than about {LONGEST} tokens", too_long)
    kept = [plain[i] for i in keep]
    if kept:
        notes += told(kept, keep)
    return Cleaned(kept, keep, [note for note in notes if note.count])


def told(kept: Sequence[Pair], places: Sequence[int]) -> list[Note]:
    """Notes on pairs that are kept and worth a look; `places` are theirs in the file."""
    spoilt = [i for i, pair in enumerate(kept) if any(map(MOJIBAKE.search, pair))]
    targets = defaultdict(set)
    for source, target in kept:
        targets[source].add(target)
    several = [i for i, (source, _) in enumerate(kept) if len(targets[source]) > 1]
    letters = Counter(letter for pair in kept for side in pair for letter in side)
    rare = {letter for letter, count in letters.items() if count < 3}
    with_rare = [i for i, pair in enumerate(kept) if not rare.isdisjoint("".join(pair))]
    some = " ".join(sorted(rare)[:10])
    kinds = {
        "letters that went through a wrong encoding (Ã¼ for ü)": spoilt,
        "the source has other targets, too": several,
        f"{len(rare)} of {len(letters)} letters occur once or twice ({some})": with_rare,
        "the sides look swapped": swapped(kept),
    }
    by_place = dict(zip(places, kept, strict=True))
    return [note_of(what, by_place, [places[i] for i in at]) for what, at in kinds.items()]


# Splits


def words_of(text: str) -> list[str]:
    """What near-duplicates are compared by: words without case, punctuation and digits.

    A text without spaces is compared letter by letter.
    """
    words = re.findall(r"[^\W\d_]+", text.lower())
    return words if len(words) > 1 and " " in text else list("".join(words) or text)


def triples(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Every three words in a row; of a shorter text, all of it."""
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


class Nearness:
    """Finds sentences that nearly equal one of `texts`.

    That is: the same words in any order, or at least `NEAR` of all their word triples in common
    (their Jaccard index). A sentence with fewer triples than that is only compared by its words.
    """

    def __init__(self, texts: Iterable[str]):
        listed = [words_of(text) for text in texts]
        self.bags = {tuple(sorted(words)) for words in listed}
        self.triples = [triples(words) for words in listed]
        self.places = defaultdict(list)
        for i, own in enumerate(self.triples):
            for triple in own:
                self.places[triple].append(i)

    def __contains__(self, text: str) -> bool:
        words = words_of(text)
        if tuple(sorted(words)) in self.bags:
            return True
        own = triples(words)
        # Of the triples of a near one, at least `NEAR` are known: the rarest tell whom to compare.
        known = sorted((self.places[triple] for triple in own if triple in self.places), key=len)
        if len(known) < NEAR * len(own):
            return False
        rivals = {i for places in known[: len(known) - int(NEAR * len(own)) + 1] for i in places}
        return any(len(own & self.triples[i]) >= NEAR * len(own | self.triples[i]) for i in rivals)


def split_pairs(
    pairs: Sequence[Pair],
    seed: int = 0,
    valid: Sequence[Pair] | None = None,
    test: Sequence[Pair] | None = None,
    apart: Sequence[Pair] = (),
) -> tuple[dict[str, list[Pair]], list[int]]:
    """Splits 'train', 'val' and 'test', and the places of pairs that are in none of them.

    `valid` and `test` are used as they are, if given; else they are drawn by `seed`: 5% each, at
    least 50, at most 1,000. A pair leaves train if either side nearly equals one that is held out,
    or one of those that are to stay `apart`. Raises ValueError if there are too few pairs.
    """
    held = {"val": valid, "test": test}
    to_draw = [name for name, given in held.items() if given is None]
    size = min(max(FEWEST, round(SHARE * len(pairs))), MOST)
    if len(pairs) <= len(to_draw) * size:
        need = f"{len(pairs):,} pairs are too few to hold {size} out for each of"
        raise ValueError(f"{need} {' and '.join(to_draw)}: give more, or --valid and --test")
    order = list(range(len(pairs)))
    random.Random(f"split:{seed}").shuffle(order)
    drawn: set[int] = set()
    for name in to_draw:
        places = sorted(order[len(drawn) : len(drawn) + size])
        held[name] = [pairs[i] for i in places]
        drawn.update(places)
    near = [Nearness(side) for side in zip(*held["val"], *held["test"], *apart, strict=True)]
    rest = [i for i in range(len(pairs)) if i not in drawn]
    twins = [i for i in rest if any(pairs[i][side] in near[side] for side in (0, 1))]
    train = [pairs[i] for i in sorted({*rest} - {*twins})]
    if not train:
        raise ValueError("every pair nearly equals one that is held out: give other pairs")
    return {"train": train} | {name: list(part) for name, part in held.items()}, twins


# From files to a folder that is a corpus


@dataclass
class PairOptions:
    """Where your own pairs are."""

    pairs: str | None = None
    """A file of your own pairs: source, tab, target on each line; gzip is fine."""
    source: str | None = None
    """A file of source sentences, with --target in place of --pairs."""
    target: str | None = None
    """Their translations, line by line."""
    valid: str | None = None
    """Pairs to validate on, as one file or as SOURCE,TARGET; by default some are held out."""
    test: str | None = None
    """Pairs to test on, in the same way."""

    @property
    def files(self) -> dict[str, list[str]]:
        """The files by the option that named them. Raises ValueError if they don't fit together."""
        if (self.source is None) != (self.target is None):
            raise ValueError("--source and --target belong together: give both")
        if self.pairs is not None and self.source is not None:
            raise ValueError("either --pairs or --source and --target, not both")
        named = {"pairs": [self.pairs] if self.pairs is not None else [self.source, self.target]}
        for option in ("valid", "test"):
            if (value := getattr(self, option)) is not None:
                named[option] = [value] if Path(value).is_file() else value.split(",")
        if named["pairs"] == [None, None]:
            if len(named) > 1:
                raise ValueError("--valid and --test go with --pairs, or --source and --target")
            return {}
        if any(len(paths) > 2 for paths in named.values()):
            raise ValueError("--valid and --test take one file of pairs, or SOURCE,TARGET")
        return named


class OwnPairs(NamedTuple):
    """Your own pairs: split, and what became of them."""

    splits: dict[str, list[Pair]]
    report: Report


def own_pairs(
    files: Mapping[str, Sequence[str]],
    seed: int = 0,
    before: Mapping[str, Sequence[Pair]] | None = None,
) -> OwnPairs:
    """Read, look through and split your own pairs; `files` are those of `PairOptions`.

    `before` are the splits of a model to fine-tune: what it was judged by stays held out, and
    judges again. Raises ValueError, in one line, if that can't be done.
    """
    read = {option: read_pairs(*paths) for option, paths in files.items()}
    cleaned = clean_pairs(read["pairs"].pairs)
    held = {name: made_visible(read[name].pairs)[0] for name in ("valid", "test") if name in read}
    if before:
        tests = [pair for name in before if name.startswith("test") for pair in before[name]]
        judges = {"valid": before["val"], "test": tests}
        held = judges | held | {"apart": [*before["val"], *tests]}
    splits, twins = split_pairs(cleaned.pairs, seed, **held)
    by_place = dict(zip(cleaned.places, cleaned.pairs, strict=True))
    twins = [cleaned.places[i] for i in twins]
    notes = [note for part in read.values() for note in part.notes] + cleaned.notes
    if twins:
        notes.append(note_of("nearly equal to a held-out sentence", by_place, twins, True))
    if before:
        notes.append(repeat_new(splits["train"], before["train"]))
    notes = sorted((note for note in notes if note.count), key=lambda note: not note.left_out)
    sizes = {name: len(pairs) for name, pairs in splits.items()}
    digests = {option: part.sha256 for option, part in read.items()}
    return OwnPairs(splits, Report(len(read["pairs"].pairs), notes, sizes, digests, seed))


def repeat_new(train: list[Pair], known: Sequence[Pair]) -> Note:
    """Repeat the pairs of `train` that aren't `known`, if they are few among others that are.

    A model would hardly meet fifty new sentences among thousands: chapter 26 tries it.
    """
    old = {*known}
    new = [pair for pair in train if pair not in old]
    few = 10 * len(new) <= len(train)
    train += (REPEATED - 1) * new * few
    text = f"new pairs, {REPEATED} times each in train among those that the model knows"
    return Note(text, len(new) * few)


def save_pairs(folder: Path, own: OwnPairs) -> None:
    """Write train.tsv, val.tsv, test.tsv and, when they are there, report.json into `folder`."""
    writable(folder)
    (folder / "report.json").unlink(missing_ok=True)
    for name, pairs in own.splits.items():
        text = "".join(f"{source}\t{target}\n" for source, target in pairs)
        write_whole(folder / f"{name}.tsv", text.encode())
    text = json.dumps(asdict(own.report), indent=1, ensure_ascii=False)
    write_whole(folder / "report.json", (text + "\n").encode())


def saved_report(folder: Path) -> dict[str, Any] | None:
    """The report beside saved pairs, as a dictionary; None if there is none."""
    path = folder / "report.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def is_corpus(folder: str | Path) -> bool:
    """Whether `folder` holds what a run needs of a corpus."""
    parts = ("train.tsv", "val.tsv", "test*.tsv")
    return all(any(Path(folder).glob(part)) for part in parts)


def load_pairs(folder: str | Path) -> dict[str, list[Pair]]:
    """The splits in a folder: train.tsv, val.tsv, and each test*.tsv. Raises ValueError."""
    folder = Path(folder)
    if not is_corpus(folder):
        remedy = f"python -m scripts.corpora.inspect --pairs FILE --save {folder} makes them"
        raise ValueError(f"{folder} lacks train.tsv, val.tsv or test.tsv: {remedy}")
    tests = sorted(path.stem for path in folder.glob("test*.tsv"))
    return {name: read_pairs(folder / f"{name}.tsv").pairs for name in ("train", "val", *tests)}
