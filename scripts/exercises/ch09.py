"""Chapter 9's exercises."""

import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice

import torch
from torch import Tensor

from scripts.book.exercises import exercise

NAN = torch.tensor([torch.nan, 1.0])


@exercise(
    lambda: [(list(torch.randn(2, 2)), [3, 13]), ([NAN, torch.ones(2)], [0, 3]), ([NAN], [1])],
    "not the mean over all tokens of all processes; the NaN of a process with tokens must stay",
    "a mean of means: the tokens of a small share count more",
    lambda means, tokens: sum(means) / len(means),
    "a process without tokens makes all NaN: 0 times NaN is NaN",
    lambda means, tokens: sum(m * n for m, n in zip(means, tokens, strict=True)) / sum(tokens),
)
def mean_over_ranks(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Σ nᵣ·meanᵣ / Σ nᵣ over the processes that have tokens."""
    return sum(mean * n for mean, n in zip(means, tokens, strict=True) if n) / sum(tokens)


def streaming(function: Callable) -> Iterator:
    """Is each pass whole, in its own order, by the seed, resumable? Are generators untouched?"""

    def take(number: int, seed: int = 1, drawn: int = 0) -> list[int]:
        return list(islice(function(12, seed, drawn), number))

    before, drawn = random.getstate(), take(36)
    passes = [drawn[:12], drawn[12:24]]
    yield [sorted(numbers) for numbers in passes], passes[0] == passes[1]
    yield take(36) == drawn, take(12, seed=2) in passes, random.getstate() == before
    yield [take(9, drawn=start) == drawn[start : start + 9] for start in (5, 17)]


@exercise(
    lambda: [streaming],
    "each number once a pass, in an order that seed and pass alone decide, but not their sum",
    "two passes have the same order: epochs would have the same batches",
    lambda n, seed, drawn: islice(cycle(random.Random(seed).sample(range(n), n)), drawn, None),
    "resumed after some draws, it doesn't go on where it was",
    lambda count, seed, drawn: resumable_stream(count, seed, 0),
)
def resumable_stream(count: int, seed: int, drawn: int) -> Iterator[int]:
    """The order of each pass follows from the seed and the pass's number alone."""
    while True:
        number, place = divmod(drawn, count)
        yield from random.Random(f"{seed}:{number}").sample(range(count), count)[place:]
        drawn += count - place
