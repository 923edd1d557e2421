"""Chapter 7's exercises."""

from collections.abc import Iterable, Sequence
from io import StringIO

from scripts.book.exercises import exercise
from scripts.ch07_multi30k import padding_share


@exercise(
    lambda: [("a\nb\u2028c\nd",), ("a\nb\n\nc\x85\nd\n",), ("a\r\nb\r\n",), ("a\n\nb c\n",), ("",)],
    "the first line, from 0, that splitlines cuts once more; None if there is none",
    "a strange character at the end of a line adds a line, too, an empty one",
    lambda text: next((i for i, s in enumerate(text.split("\n")) if len(s.splitlines()) > 1), None),
    "that counts the lines that splitlines makes: we look for the one that it cuts",
    lambda text: len(text.splitlines()),
)
def first_shift(text: str) -> int | None:
    """The number of the first line that `splitlines` cuts before its end, or None."""
    lines = enumerate(StringIO(text, newline="\n"))  # each with its newline, where it has one
    return next((i for i, line in lines if len(line.splitlines()) > 1), None)


@exercise(
    lambda: [([2, 4], [[0, 1]]), ([1, 2, 10, 10, 10, 10], [[0, 1], [2, 3, 4, 5]])],
    "each row computes w × w scores, w the longest in its own batch, and needs n × n",
    "that is the share of padded cells: a score belongs to two, a query and a key",
    lambda lengths, batches: padding_share([(n, n) for n in lengths], batches),
    "a mean of the batches' shares: add up first, then divide once",
    lambda lengths, batches: sum(wasted_scores(lengths, [b]) for b in batches) / len(batches),
)
def wasted_scores(lengths: Sequence[int], batches: Iterable[Sequence[int]]) -> float:
    """1 − Σ n² / Σ w², where w is the longest row in the sentence's batch."""
    useful = computed = 0
    for batch in batches:
        squares = [lengths[i] ** 2 for i in batch]
        useful += sum(squares)
        computed += len(squares) * max(squares)
    return 1 - useful / computed
