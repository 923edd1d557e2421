"""Chapter 15's exercise: our solution, and a checker that says what is wrong."""

from collections.abc import Callable

import torch
from torch import Tensor

from scripts.book.exercises import compare


def check_rollout(candidate: Callable[[Tensor], Tensor]) -> None:
    """Compares candidate(maps) with the product written out, for three random layers."""
    draws = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 2, 5, 5, generator=draws, dtype=torch.float64).mul(2).softmax(-1)
    means = maps.mean(1)
    first, second, third = (means + torch.eye(5, dtype=torch.float64)) / 2
    right, bare = third @ second @ first, means[2] @ means[1] @ means[0]
    mean = (first + second + third) / 3
    mistakes = {
        "The layers are in the wrong order: layer 2 looks at what layer 1 made, so the later layer "
        "is on the left.": first @ second @ third,
        "The identity is missing: half of a position comes from the residual connection.": bare,
        "The identity was added, but not half and half: the rows sum to more than 1.": 8 * right,
        "That is a mean over the layers. What one passes on, the next mixes again: multiply.": mean,
        "Rows and columns are exchanged: a row belongs to the position that looks.": right.T,
        "The maps are multiplied cell by cell. Use the product of matrices.": first
        * second
        * third,
    }
    otherwise = "This isn't the matrix for three layers of two heads."
    compare(candidate(maps), right, mistakes, otherwise)


def rollout(maps: Tensor) -> Tensor:
    """The product of the layers' mean maps, each mixed with the identity."""
    eye = torch.eye(maps.size(-1), dtype=maps.dtype)
    reached = eye
    for layer in maps.mean(1):
        reached = (layer + eye) / 2 @ reached
    return reached
