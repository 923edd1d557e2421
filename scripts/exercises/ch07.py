"""Chapter 7's exercises."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from scripts.book.exercises import exercise, outcome, probe
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import SPECIALS, Example, padding_share


def numbered(function: Callable, min_freq: int) -> list:
    """Ids, specials, words, and how often each occurs: equals may have any order."""
    texts = {"train": "rennt ein Hund schläft ein Hund noch ein", "val": "ein Ball schläft"}
    splits = {split: [text.split()] for split, text in texts.items()}
    numbers, counts = function(splits, min_freq), Counter(texts["train"].split())
    words = sorted(numbers, key=numbers.get)
    return [sorted(numbers.values()), words[:4], sorted(words), [counts[word] for word in words]]


@exercise(
    lambda: [probe(numbered, 1), probe(numbered, 2)],
    "not the specials, then the training split's words from frequent to rare, with ids 0 to V − 1",
    "the four special entries don't have their ids 0 to 3, on which masks and decoders rely",
    lambda *inputs: {word: (i - 4) % 9 for word, i in word_numbers(*inputs).items()},
    "another split was read, and can no longer show how often a word is unknown",
    lambda splits, min_freq: word_numbers({"train": sum(splits.values(), [])}, min_freq),
)
def word_numbers(splits: dict[str, list[list[str]]], min_freq: int) -> dict[str, int]:
    """Word -> id: the specials, then the training split's words by count."""
    counts = Counter(word for words in splits["train"] for word in words)
    words = [word for word, times in counts.most_common() if times >= min_freq]
    return {word: i for i, word in enumerate([*SPECIALS, *words])}


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
