"""What became of your own pairs, and the same in words for a terminal: any script, in columns."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Pair = tuple[str, str]
COLUMN = 36  # columns of a terminal for each side of an example


@dataclass(frozen=True)
class Note:
    """What was noticed about some pairs or lines: how many, and the first two of them."""

    what: str
    count: int
    left_out: bool = False
    examples: Sequence[tuple[int, str, str]] = ()
    """Each with the number of its line, from 1; its sides are cut to 80 letters."""

    @classmethod
    def of(
        cls,
        what: str,
        pairs: Mapping[int, Pair] | Sequence[Pair],
        places: Sequence[int],
        left_out: bool = False,
    ) -> "Note":
        """A note on the pairs at `places`."""
        shown = [(i + 1, *(side[:80] for side in pairs[i])) for i in places[:2]]
        return cls(what, len(places), left_out, shown)


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


def width_of(letter: str) -> int:
    """The columns of a terminal that a letter takes: 2 if East Asian, 0 if it joins another."""
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def in_columns(text: str, width: int = COLUMN) -> str:
    """`text` cut and padded to `width` columns; text from right to left turns nothing around it."""
    shown, room = "", width
    for letter in text:
        if width_of(letter) > room - (len(text) > len(shown) + 1):
            shown, room = shown + "…", room - 1
            break
        shown, room = shown + letter, room - width_of(letter)
    if any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in shown):
        shown = f"\u2068{shown}\u2069"  # first strong isolate, and its end
    return shown + " " * room


def note_lines(notes: Iterable[Note]) -> list[str]:
    """A line for each note, and one for each of its examples."""
    lines = []
    for note in notes:
        lines.append(f"{note.count:>9,}  {note.what}")
        for line, source, target in note.examples:
            lines.append(f"{f'line {line:,}':>22}  {in_columns(source)}  {in_columns(target)}")
    return [line.rstrip() for line in lines]


def report_text(report: Report) -> str:
    """The counts, then what was left out and why, then what is worth a look."""
    counts = {"read": report.read, "left out": report.left_out} | report.sizes
    lines = [f"{count:>9,}  {name}" for name, count in counts.items()]
    for title, left_out in (("Left out:", True), ("Worth a look:", False)):
        if notes := [note for note in report.notes if note.left_out == left_out]:
            lines += ["", title, *note_lines(notes)]
    return "\n".join(lines)
