"""Chapter 9's exercises: our solutions, and checkers that say what is wrong."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.book.exercises import same_numbers


def check_mean_over_ranks(candidate: Callable[[list[Tensor], list[int]], Tensor]) -> None:
    """Compares candidate(means, tokens) with the mean over the tokens themselves."""
    rows = torch.arange(32.0, dtype=torch.float64).view(16, 2).square()  # a gradient for each token
    for tokens in ([3, 12, 1], [3, 0, 13], [0, 3, 13]):
        means = [part.mean(0) for part in rows.split(tokens)]
        found = candidate(means, tokens)
        assert not found.isnan().any(), (
            "A process without tokens makes all NaN: 0 times NaN is NaN."
        )
        assert same_numbers(found, rows.mean(0)), (
            f"For shares of {tokens} tokens the mean over all is {rows.mean(0).tolist()}, but you "
            f"get {found.tolist()}. In a mean of means the tokens of a small share count more."
        )
    assert candidate([rows[0], rows[1] * torch.nan], [1, 1]).isnan().all(), (
        "A process *with* tokens has NaN, and your mean hides it. Leave out only those with none."
    )


def mean_over_ranks(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Σ nᵣ·meanᵣ / Σ nᵣ over the processes that have tokens."""
    return sum(mean * n for mean, n in zip(means, tokens, strict=True) if n) / sum(tokens)


def check_resumable_stream(candidate: Callable[[int, int, int], Iterator[int]]) -> None:
    """Compares resumed streams of candidate(count, seed, drawn) with one long stream."""

    def take(number: int, seed: int = 1, drawn: int = 0) -> list[int]:
        return list(islice(candidate(12, seed, drawn), number))

    before = global_generators()
    whole = take(36)
    first, second = whole[:12], whole[12:24]
    for holds, message in (
        (sorted(first) == sorted(second) == [*range(12)], "A pass lacks or repeats a number."),
        (first != second, "Two passes have the same order: epochs would have the same batches."),
        (take(36) == whole, "The same seed gives a different stream: what else decides the order?"),
        (take(12, seed=2) != first, "Another seed gives the same order."),
        (
            take(12, seed=2) != second,
            "Seed 2 begins with seed 1's second pass: don't just add the seed and the pass.",
        ),
        (take(7, drawn=5) == whole[5:12], "Resumed after 5 draws, it doesn't go on where it was."),
        (take(19, drawn=17) == whole[17:], "Resumed in a later pass, it goes on with a wrong one."),
    ):
        assert holds, message
    for name, state in global_generators().items():
        assert state == before[name], f"{name}'s global generator was used or seeded."


def global_generators() -> dict[str, Any]:
    """The state of each, by its library."""
    numpy = np.random.get_state(legacy=False)["state"]
    numpy["key"] = numpy["key"].tolist()
    return {"Python": random.getstate(), "PyTorch": torch.get_rng_state().tolist(), "NumPy": numpy}


def resumable_stream(count: int, seed: int, drawn: int) -> Iterator[int]:
    """The order of each pass follows from the seed and the pass's number alone."""
    while True:
        number, place = divmod(drawn, count)
        yield from random.Random(f"{seed}:{number}").sample(range(count), count)[place:]
        drawn += count - place
