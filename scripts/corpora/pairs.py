"""Your own sentence pairs: read from files, and looked through.

Nothing is dropped in silence: a `Note` says what was left out, or kept and worth a look.
"""

import codecs
import gzip
import hashlib
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scripts.corpora.report import Note, Pair

LONGEST = 256  # tokens that a model takes: chapter 3's MAX_LEN
# How gzip, zip, xz, bzip2 and zstd begin.
PACKED_FILE = re.compile(rb"\x1f\x8b|PK\x03\x04|\xfd7zXZ\0|BZh\d1AY&SY|\x28\xb5\x2f\xfd")
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # before those of 16 bits,
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # which may begin the same
# UTF-8 that was read as Windows-1252: Ã and ¼ for ü, â and € for a dash.
MOJIBAKE = re.compile("[ÂÃÄÅÐÑ][\x80-\xbf\u0152-\u0178\u02c6\u02dc\u2013-\u2122]|â[€„]")


class PairFile(NamedTuple):
    """What a file of pairs, or two of lines, hold."""

    pairs: list[Pair]
    notes: list[Note]
    sha256: str


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

    The text is UTF-8, or UTF-16 or UTF-32 with a mark; a line that isn't is read as Windows-1252.
    Raises ValueError if there is none.
    """
    lines, notes, guessed = [], [], 0
    if encoding := wide_encoding(content):
        content = content.decode(encoding, "replace").encode()
        notes.append(Note(f"lines of {name} were in {encoding.upper()}", content.count(b"\n")))
    content = content.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n")
    if not content:
        raise ValueError(f"{name} is empty")
    for line in content.split(b"\n"):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            text, guessed = line.decode("cp1252", "replace"), guessed + 1
        lines.append(text.removesuffix("\r"))
    if guessed:
        notes.append(Note(f"lines of {name} aren't UTF-8: read as Windows-1252 (a guess)", guessed))
    return lines, notes


def column_pairs(lines: Sequence[str], name: str) -> tuple[list[Pair], list[Note]]:
    """Pairs of tab-separated columns, and what was odd about the tabs.

    A line without a tab is a source without a target. Raises ValueError if no line has one.
    """
    rows = [[part.strip() for part in line.split("\t")] for line in lines]
    if all(len(row) == 1 for row in rows):
        remedy = "put a tab between source and target, or give two files, --source and --target"
        raise ValueError(f"{name} has no line with a tab: {remedy}")
    pairs = [(source, targets[0] if targets else "") for source, *targets in rows]
    no_tab = [i for i, row in enumerate(rows) if len(row) == 1 and row[0]]
    more = [i for i, row in enumerate(rows) if any(row[2:])]
    return pairs, [
        Note.of("lines without a tab: nothing is left for the target", pairs, no_tab),
        Note.of("more than two columns: what follows the second isn't read", pairs, more),
    ]


def where_they_part(sources: Sequence[str], targets: Sequence[str]) -> int:
    """The line, from 1, near which one of two files of unequal length probably lacks lines.

    Before it, line i fits line i; behind it, line i fits the one that is as many lines further as
    the counts differ. The place is chosen so that lengths in letters differ least in all.
    """
    short, long = (
        np.log([5.0 + len(line) for line in side]) for side in sorted((sources, targets), key=len)
    )
    shift = len(long) - len(short)
    short += np.median(long) - np.median(short)
    straight, shifted = np.abs(short - long[: len(short)]), np.abs(short - long[shift:])
    gains = np.concatenate([[0.0], np.cumsum(straight - shifted)])  # of shifting the lines before
    return int(gains.argmin()) + 1


def read_pairs(*paths: str | Path) -> PairFile:
    """Pairs from one file of two columns with a tab between them, or from two files line by line.

    Raises ValueError, in one line, for a file that can't be read, isn't text or holds no pair, and
    for files of unequal length: it says where they seem to part.
    """
    contents, names = [file_bytes(path) for path in paths], [str(path) for path in paths]
    texts, notes = zip(*map(decoded_lines, contents, names), strict=True)
    if len(paths) == 1:
        pairs, odd_tabs = column_pairs(*texts, *names)
    elif len(texts[0]) == len(texts[1]):
        pairs, odd_tabs = [(a.strip(), b.strip()) for a, b in zip(*texts, strict=True)], []
    else:
        counts = (f"{n} has {len(lines):,} lines" for n, lines in zip(names, texts, strict=True))
        hint = f"by their lengths, lines stop matching near line {where_they_part(*texts):,}"
        remedy = f"each line needs its translation; {hint}: look there"
        raise ValueError(f"{' and '.join(counts)}; {remedy}")
    digests = "+".join(hashlib.sha256(content).hexdigest() for content in contents)
    return PairFile(pairs, [note for note in sum(notes, odd_tabs) if note.count], digests)


def made_visible(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs without invisible letters and with plain spaces.

    Invisible is what Unicode calls control or format: zero-width letters, soft hyphens, marks of
    direction. The tokenizer drops them, too (`plain_text`).
    """
    letters = {letter for pair in pairs for side in pair for letter in side}
    kinds = {c: "Zs" if c in "\t\r" else unicodedata.category(c) for c in letters}
    instead = {"Cc": "", "Cf": "", "Zs": " "}
    table = {ord(c): instead[kind] for c, kind in kinds.items() if kind in instead}
    return [tuple(side.translate(table).strip() for side in pair) for pair in pairs]


def length_outliers(pairs: Mapping[int, Pair]) -> list[int]:
    """Where one side is absurdly long for the other: by a factor of 3, against the median ratio.

    Ten letters are added to each side, so that short sentences have their freedom. Corpora whose
    ratios spread widely get more room: five robust standard deviations.
    """
    if not pairs:
        return []
    ratios = np.log([(len(a) + 10) / (len(b) + 10) for a, b in pairs.values()])
    off = np.abs(ratios - np.median(ratios))
    return np.array([*pairs])[off > max(np.log(3), 5 * 1.4826 * np.median(off))].tolist()


def swapped(pairs: Mapping[int, Pair]) -> list[int]:
    """Where the sides fit better the other way round, by the columns' own pairs of letters.

    A text's score is the mean log-ratio of its letter pairs' frequencies in the two columns; a pair
    is told if its sides differ by at least half of what is usual, the wrong way.
    """
    grams = [[list(zip(f" {s}", f"{s} ", strict=True)) for s in pair] for pair in pairs.values()]
    counts = [Counter(gram for pair in grams for gram in pair[side]) for side in (0, 1)]
    odds = {g: np.log((counts[0][g] + 1) / (counts[1][g] + 1)) for g in counts[0] | counts[1]}
    apart = [np.subtract(*(sum(map(odds.get, s)) / len(s) for s in pair)) for pair in grams]
    usual = np.median(apart) if apart else 0
    return [i for i, gap in zip(pairs, apart, strict=True) if gap < -usual / 2 < 0]


def clean_pairs(pairs: Sequence[Pair]) -> tuple[dict[int, Pair], list[Note]]:
    """The pairs to keep, made plain, by their place, and what was left out or looks odd.

    A pair that is left out counts once, for the first reason that holds.
    """
    kept = dict(enumerate(made_visible(pairs)))
    changed = [i for i, pair in enumerate(pairs) if kept[i] != pair]
    notes = [Note.of("invisible letters or unusual spaces: made plain", kept, changed)]

    def leave_out(what: str, places: Sequence[int]) -> None:
        nonlocal kept
        notes.append(Note.of(what, kept, places, left_out=True))
        kept = {i: kept[i] for i in sorted(kept.keys() - {*places})}

    leave_out("a side is empty", [i for i, pair in kept.items() if not all(pair)])
    leave_out("both sides are equal", [i for i, (a, b) in kept.items() if a == b])
    first = {pair: i for i, pair in reversed(kept.items())}
    leave_out("the same pair again", [i for i, pair in kept.items() if first[pair] != i])
    leave_out("one side is absurdly long for the other", length_outliers(kept))
    # On the safe side, a piece has two letters, and one in a text without spaces.
    size = {i: max(len(s) / (2 if " " in s else 1) for s in pair) for i, pair in kept.items()}
    leave_out(f"too long: more than about {LONGEST} tokens", [i for i in kept if size[i] > LONGEST])
    return kept, [note for note in notes + oddities(kept) if note.count]


def oddities(kept: Mapping[int, Pair]) -> list[Note]:
    """What is worth a look among pairs that are kept."""
    targets = defaultdict(set)
    for source, target in kept.values():
        targets[source].add(target)
    letters = Counter(letter for pair in kept.values() for letter in "".join(pair))
    rare = {letter for letter, count in letters.items() if count < 3}
    some = f"lines with rare letters: {len(rare)} of {len(letters)} occur once or twice"
    wrong = "letters that went through a wrong encoding (Ã¼ for ü)"
    signs = {
        wrong: lambda a, b: MOJIBAKE.search(f"{a} {b}"),
        "the source has other targets, too": lambda a, b: len(targets[a]) > 1,
        f"{some} ({' '.join(sorted(rare)[:10])})": lambda a, b: not rare.isdisjoint(a + b),
    }
    return [
        *(Note.of(w, kept, [i for i in kept if sign(*kept[i])]) for w, sign in signs.items()),
        Note.of("the sides look swapped", kept, swapped(kept)),
    ]
