"""The report on your own pairs in words, for a terminal: any script, in columns."""

import unicodedata
from collections.abc import Iterable

from scripts.corpora.pairs import Note, Report

COLUMN = 36  # columns of a terminal for each side of an example


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
    """The counts, then what was left out and why, then what is kept and worth a look."""
    counts = {"read": report.read, "left out": report.left_out} | report.sizes
    lines = [f"{count:>9,}  {name}" for name, count in counts.items()]
    for title, left_out in (("Left out:", True), ("Kept, and worth a look:", False)):
        if notes := [note for note in report.notes if note.left_out == left_out]:
            lines += ["", title, *note_lines(notes)]
    return "\n".join(lines)
