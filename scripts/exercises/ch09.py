"""Exercises of chapter 9: our solutions, and checkers that tell the common mistakes apart."""

import random
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from scripts.book.exercises import blame, same_numbers


def check_mean_over_ranks(candidate: Callable[[list[Tensor], list[int]], Tensor]) -> None:
    """Holds candidate(means, tokens) against the mean over the tokens themselves."""
    rows = torch.arange(32.0, dtype=torch.float64).view(16, 2).square()  # a gradient for each token
    for tokens in ([3, 12, 1], [3, 0, 13]):
        means = [part.mean(0) for part in rows.split(tokens)]
        given = torch.stack(means)
        found = candidate(means, tokens)
        assert torch.stack(means).allclose(given, equal_nan=True), (
            "The gradients that were handed in have changed. They belong to the processes."
        )
        assert not found.isnan().any(), (
            "One process without any token turns the whole gradient into NaN: 0 times NaN is NaN."
        )
        if not same_numbers(found, rows.mean(0)):
            mistakes = {
                "That is the mean of the means. A token of the process that had one token then "
                "counts twelve times as much as one of the process that had twelve.": given.mean(0),
                "That is a sum: with more processes the step would grow.": given.sum(0),
                "That is the sum over tokens; the mean is asked for.": rows.sum(0),
            }
            blame(found, mistakes, f"Shares of {tokens} tokens: the mean over all is another.")


def mean_over_ranks(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Σ nᵣ·meanᵣ / Σ nᵣ over the processes that have tokens."""
    sums = [mean * n for mean, n in zip(means, tokens, strict=True) if n]
    return torch.stack(sums).sum(0) / sum(tokens)


def check_resumable_stream(candidate: Callable[[int, int, int], Iterator[int]]) -> None:
    """Holds what candidate(count, seed, drawn) goes on with against one long stream."""

    def take(number: int, seed: int = 1, drawn: int = 0) -> list[int]:
        return list(islice(candidate(12, seed, drawn), number))

    before = random.getstate(), torch.get_rng_state()
    whole = take(36)
    first, second = whole[:12], whole[12:24]
    for holds, message in (
        (sorted(first) == sorted(second) == [*range(12)], "A pass doesn't show each number once."),
        (first != second, "Two passes have the same order: each epoch would have equal batches."),
        (take(36) == whole, "The same seed gives another stream: what else decides the order?"),
        (take(12, seed=2) != first, "Another seed gives the same order."),
        (take(7, drawn=5) == whole[5:12], "Resumed after 5 draws, it doesn't go on where it was."),
        (take(24, drawn=12) == whole[12:], "Resumed after a whole pass, it isn't in the second."),
        (take(20, drawn=5) == whole[5:25], "Resumed after 5 draws, the next pass is another."),
        (random.getstate() == before[0], "Python's global generator was used, or seeded."),
        (torch.equal(torch.get_rng_state(), before[1]), "PyTorch's generator deals dropout, too."),
    ):
        assert holds, message


def resumable_stream(count: int, seed: int, drawn: int) -> Iterator[int]:
    """The order of each pass follows from the seed and the pass's number alone."""
    while True:
        number, place = divmod(drawn, count)
        order = list(range(count))
        random.Random(f"{seed}:{number}").shuffle(order)
        yield from order[place:]
        drawn += count - place
