"""Chapter 7's exercises."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from scripts.book.exercises import exercise, outcome
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import Example, padding_share


@exercise(
    lambda: [("a\nb\u2028c\nd",), ("a\nb\n\nc\x85\nd\n",), ("a\r\nb\r\n",), ("a\n\nb c\n",), ("",)],
    "the first line, from 0, that splitlines cuts once more; None if there is none",
    "a strange character at the end of a line adds a line, too, an empty one",
    lambda text: next((i for i, s in enumerate(text.split("\n")) if len(s.splitlines()) > 1), None),
    "that counts the lines that splitlines makes: we look for the one that it cuts",
    lambda text: len(text.splitlines()),
)
def first_shift(text: str) -> int | None:
    """The first line that `splitlines` cuts although it holds no newline."""
    lines = enumerate(text.split("\n"))
    return next((i for i, line in lines if len(f"{line}\n".splitlines()) > 1), None)


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


def batched(function: Callable, *lengths: tuple[int, int], seed: int = 0) -> list[list[int]]:
    """Batches of at most 256 cells, for pairs of so many source and target tokens."""
    examples = [Example([EOS] * source, [BOS] * target) for source, target in lengths]
    return function(examples, 256, random.Random(seed))


def batching(function: Callable) -> Iterator:
    """Which examples; cells; padding and fullness; order and draws; what fits and what doesn't."""
    lengths = [(2 + n % 17, 2 + n % 17 + n % 3) for n in range(300)]
    batches, again, other = (batched(function, *lengths, seed=seed) for seed in (0, 0, 1))
    yield sorted(i for batch in batches for i in batch)
    widths = [[max(lengths[i][side] for i in batch) for side in (0, 1)] for batch in batches]
    cells = [len(batch) * sum(pair) for batch, pair in zip(batches, widths, strict=True)]
    yield max(cells) <= 256
    yield padding_share(lengths, batches) < 0.15 and sum(cells) > 0.8 * 256 * len(cells)
    first, last = sorted((widths[:5], widths[-5:]))
    yield [batches == again, batches == other, max(first) <= min(last)]
    yield [outcome(batched, function, (source, 100)) for source in (156, 157)]


@exercise(
    lambda: [batching],
    "full batches of similar lengths, in any order; a pair too long by itself is a ValueError",
    "a batch has too many cells: padding counts, and both sides are in memory",
    lambda examples, budget, rng: budget_batches(examples, 2 * budget, rng),
    "the order must depend on rng: the same seed gives the same batches, another seed others",
    lambda examples, budget, rng: budget_batches(examples, budget, random.Random(1)),
)
def budget_batches(examples: Sequence[Example], max_tokens: int, rng) -> list[list[int]]:
    """Indices in batches whose two rectangles together hold at most `max_tokens` cells."""
    order = list(range(len(examples)))
    rng.shuffle(order)
    order.sort(key=lambda i: (len(examples[i].tgt), len(examples[i].src)))
    batches: list[list[int]] = [[]]
    longest = [0, 0]
    for i in order:
        pair = [len(examples[i].src), len(examples[i].tgt)]
        if sum(pair) > max_tokens:
            raise ValueError(f"a pair of {pair} tokens does not fit into a batch of {max_tokens}")
        longest = list(map(max, longest, pair))
        if (len(batches[-1]) + 1) * sum(longest) > max_tokens:
            batches.append([])
            longest = pair
        batches[-1].append(i)
    rng.shuffle(batches)
    return batches
