"""Chapter 9's exercises."""

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
