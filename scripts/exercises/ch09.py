"""Chapter 9's exercises."""

import random
from collections.abc import Callable, Iterator
from itertools import count as counting
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor

from scripts.book.exercises import exercise, same


def mean_over_ranks(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Σ nᵣ·meanᵣ / Σ nᵣ over the processes that have tokens."""
    return sum(mean * n for mean, n in zip(means, tokens, strict=True) if n) / sum(tokens)


def shared_out(*tokens: int) -> tuple[list[Tensor], list[int]]:
    """Each token has a gradient (2,); the shares have so many tokens."""
    return [part.mean(0) for part in torch.randn(16, 2).split(tokens)], list(tokens)


NAN_WITH_TOKENS = ([torch.ones(2), torch.tensor([1.0, torch.nan])], [1, 1])
exercise(
    mean_over_ranks,
    lambda: [shared_out(3, 12, 1), shared_out(3, 0, 13), shared_out(0, 3, 13), NAN_WITH_TOKENS],
    "not the mean over all tokens of all processes",
    "a mean of means: the tokens of a small share count more",
    lambda means, tokens: sum(means) / len(means),
    "a process without tokens makes all NaN: 0 times NaN is NaN",
    lambda means, tokens: sum(m * n for m, n in zip(means, tokens, strict=True)) / sum(tokens),
    "a process *with* tokens has NaN, and your mean hides it: leave out only those with none",
    lambda means, tokens: mean_over_ranks([mean.nan_to_num() for mean in means], tokens),
)


def resumable_stream(count: int, seed: int, drawn: int) -> Iterator[int]:
    """The order of each pass follows from the seed and the pass's number alone."""
    while True:
        number, place = divmod(drawn, count)
        yield from random.Random(f"{seed}:{number}").sample(range(count), count)[place:]
        drawn += count - place


def streaming(function: Callable) -> Iterator:
    """Is each pass whole, in its own order, by the seed, resumable? Are generators untouched?"""

    def take(number: int, seed: int = 1, drawn: int = 0) -> list[int]:
        return list(islice(function(12, seed, drawn), number))

    def global_states() -> list:
        return [random.getstate(), np.random.get_state()[1], torch.get_rng_state()]

    before, drawn = global_states(), take(36)
    yield [sorted(drawn[at : at + 12]) for at in (0, 12)]
    yield drawn[:12] == drawn[12:24]
    yield take(36) == drawn
    yield [take(12, seed=2) == drawn[at : at + 12] for at in (0, 12)]
    yield [take(9, drawn=at) == drawn[at : at + 9] for at in (5, 17)]
    yield same(global_states(), before)


exercise(
    resumable_stream,
    lambda: [streaming],
    "each number once a pass, in an order that seed and pass decide, and no global generator",
    "two passes have the same order: epochs would have the same batches",
    lambda count, seed, drawn: islice(
        cycle(random.Random(seed).sample(range(count), count)), drawn, None
    ),
    "seed 2 begins with seed 1's second pass: don't just add the seed and the pass",
    lambda count, seed, drawn: islice(
        (i for n in counting(seed) for i in random.Random(n).sample(range(count), count)),
        drawn,
        None,
    ),
    "resumed after some draws, it doesn't go on where it was",
    lambda count, seed, drawn: resumable_stream(count, seed, 0),
)
