"""Your own sentence pairs, split without twins, and saved as a folder that is a corpus."""

import json
import random
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.book.files import writable, write_whole
from scripts.corpora.pairs import clean_pairs, made_visible, read_pairs
from scripts.corpora.report import Note, Pair, Report

SHARE, FEWEST, MOST = 0.05, 50, 1000  # of the pairs in each held-out split
REPEATED = 10  # how often new pairs stand among many that a model knows
NEAR = 0.8  # shared word triples from which two sentences count as one
BESIDE = "pairs"  # the folder beside a model, and the corpus that its settings name


class OwnPairs(NamedTuple):
    """Your own pairs: split, and what became of them."""

    splits: dict[str, list[Pair]]
    report: Report


def letters_only(text: str) -> str:
    """`text` with a space for all but letters and what is written on them, as Hindi's vowels.

    Regular expressions don't know those: `\\w` would take a boy, लड़का, for a girl, लड़की. Digits
    go, too, so texts of nothing else are equal. Of several ways to write a letter, as é with one
    sign or two, there remains one (NFKC).
    """
    signs = unicodedata.normalize("NFKC", text)
    return "".join(sign if unicodedata.category(sign)[0] in "LM" else " " for sign in signs)


def words_of(text: str) -> list[str]:
    """Words without case, punctuation and digits; of a text without spaces, its letters."""
    words = letters_only(text.lower()).split()
    return words if len(words) > 1 and " " in text else list("".join(words) or text)


def triples(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Every three words in a row; of a shorter text, all of it."""
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def near_duplicates(texts: Mapping[int, str], held_out: Iterable[str]) -> set[int]:
    """The places of the texts that nearly equal one that is held out.

    That is: the same words in any order, or at least `NEAR` of all their word triples in common
    (their Jaccard index). A sentence with fewer triples than that is only compared by its words.
    """
    held = [words_of(text) for text in held_out]
    bags = {tuple(sorted(words)) for words in held}
    sizes = [len(triples(words)) for words in held]
    having = defaultdict(list)  # the held-out texts that have a triple
    for i, words in enumerate(held):
        for triple in triples(words):
            having[triple].append(i)
    near = set()
    for place, text in texts.items():
        words = words_of(text)
        own = triples(words)
        shared = Counter(i for triple in own & having.keys() for i in having[triple])
        overlap = (n / (len(own) + sizes[i] - n) for i, n in shared.items())
        if tuple(sorted(words)) in bags or max(overlap, default=0) >= NEAR:
            near.add(place)
    return near


def split_pairs(
    pairs: Sequence[Pair],
    seed: int = 0,
    valid: Sequence[Pair] | None = None,
    test: Sequence[Pair] | None = None,
    apart: Sequence[Pair] = (),
) -> tuple[dict[str, list[Pair]], set[int]]:
    """Splits 'train', 'val' and 'test', and the places of pairs that are in none of them.

    `valid` and `test` are used as they are, if given; else they are drawn by `seed`: 5% each, at
    least 50, at most 1,000. A pair leaves train if either side nearly equals one that is held out,
    or one of those that are to stay `apart`. Raises ValueError if there are too few pairs.
    """
    held = {"val": valid, "test": test}
    to_draw = [name for name, part in held.items() if part is None]
    size = min(max(FEWEST, round(SHARE * len(pairs))), MOST)
    if len(pairs) <= len(to_draw) * size:
        need = f"{len(pairs):,} pairs are too few to hold {size} out for each of"
        raise ValueError(f"{need} {' and '.join(to_draw)}: give more, or --valid and --test")
    rest = list(range(len(pairs)))
    random.Random(f"split:{seed}").shuffle(rest)
    for name in to_draw:
        held[name], rest = [pairs[i] for i in sorted(rest[:size])], rest[size:]
    twins = set()
    for side, held_out in enumerate(zip(*held["val"], *held["test"], *apart, strict=True)):
        twins |= near_duplicates({i: pairs[i][side] for i in rest}, held_out)
    train = [pairs[i] for i in sorted({*rest} - twins)]
    if not train:
        raise ValueError("every pair nearly equals one that is held out: give other pairs")
    return {"train": train} | {name: list(part) for name, part in held.items()}, twins


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
        train = [path for path in (self.pairs, self.source, self.target) if path is not None]
        named = {"pairs": train}
        for option in ("valid", "test"):
            if (value := getattr(self, option)) is not None:
                named[option] = [value] if Path(value).is_file() else value.split(",")
        if named == {"pairs": []}:
            return {}
        if len(train) != (1 if self.pairs is not None else 2):
            raise ValueError("give either --pairs, or --source and --target, both")
        if any(len(paths) > 2 for paths in named.values()):
            raise ValueError("--valid and --test take one file of pairs, or SOURCE,TARGET")
        return named


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
    kept, notes = clean_pairs(read["pairs"].pairs)
    held = {name: made_visible(read[name].pairs) for name in ("valid", "test") if name in read}
    if before:
        tests = [pair for name in before if name.startswith("test") for pair in before[name]]
        judges = {"valid": before["val"], "test": tests}
        held = judges | held | {"apart": [*before["val"], *tests]}
    splits, twins = split_pairs([*kept.values()], seed, **held)
    for part in read.values():
        notes += part.notes
    twins = [place for i, place in enumerate(kept) if i in twins]
    notes.append(Note.of("nearly equal to a held-out sentence", kept, twins, left_out=True))
    if before:
        notes.append(repeat_new(splits["train"], {*before["train"]}))
    notes = sorted((note for note in notes if note.count), key=lambda note: not note.left_out)
    sizes = {name: len(pairs) for name, pairs in splits.items()}
    digests = {option: part.sha256 for option, part in read.items()}
    return OwnPairs(splits, Report(len(read["pairs"].pairs), notes, sizes, digests, seed))


def repeat_new(train: list[Pair], known: Collection[Pair]) -> Note:
    """Repeat the pairs of `train` that aren't `known`, if they are few among others that are.

    A model would hardly meet fifty new sentences among thousands: chapter 26 tries it.
    """
    new = [pair for pair in train if pair not in known]
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


def is_corpus(folder: str | Path) -> bool:
    """Whether `folder` holds what a run needs of a corpus."""
    return all(any(Path(folder).glob(f"{part}.tsv")) for part in ("train", "val", "test*"))


def load_pairs(folder: str | Path) -> dict[str, list[Pair]]:
    """The splits in a folder: train.tsv, val.tsv, and each test*.tsv. Raises ValueError."""
    if not is_corpus(folder):
        remedy = f"python -m scripts.corpora.inspect --pairs FILE --save {folder} makes them"
        raise ValueError(f"{folder} lacks train.tsv, val.tsv or test.tsv: {remedy}")
    names = ["train", "val", *sorted(path.stem for path in Path(folder).glob("test*.tsv"))]
    return {name: read_pairs(Path(folder, f"{name}.tsv")).pairs for name in names}


def saved_pairs(folder: str | Path) -> OwnPairs:
    """The splits in a folder, and the report beside them, or one of their sizes alone."""
    splits, path = load_pairs(folder), Path(folder, "report.json")
    sizes = {name: len(pairs) for name, pairs in splits.items()}
    if not path.is_file():
        return OwnPairs(splits, Report(sum(sizes.values()), sizes=sizes))
    report = Report(**json.loads(path.read_text("utf-8")))
    report.notes = [Note(**note) for note in report.notes]
    return OwnPairs(splits, report)
