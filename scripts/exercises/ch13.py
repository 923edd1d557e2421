"""Chapter 13's exercises."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.book.exercises import exercise


@exercise(
    lambda: [([9, 2, 5, 2], 0.0, 5.0), ([1, 2, 2, 3, 5, 7], 0.5, 5.0), ([2, 3], 1.0, 5.0)],
    "each step costs a row for each text in the batch, finished or not, and each packing its price",
    "when all texts have ended, nothing is packed any more",
    lambda lengths, pack_at, packing: decoding_cost(lengths, pack_at, packing) + packing,
    "the batch is never packed",
    lambda lengths, pack_at, packing: decoding_cost(lengths, 0.0, packing),
)
def decoding_cost(lengths: Sequence[int], pack_at: float, packing: float) -> float:
    """Step by step, as `write_and_leave` does it.

    For the 64 texts and packing=10, pack_at=0.844 is cheapest with 987 rows. 0.9 costs
    990, packing whenever a text ends (0.999) 1,011, after each step (1.0) 1,101, and never (0.0)
    1,408.
    """
    live, cost = len(lengths), 0.0
    for step in range(1, max(lengths) + 1):
        cost += live
        unfinished = sum(length > step for length in lengths)
        if unfinished and unfinished <= pack_at * live:
            live, cost = unfinished, cost + packing
    return cost


ORIGINS = [[[0, 0, 0], [0, 0, 0]], [[1, 0, 2], [0, 0, 1]], [[1, 1, 0], [2, 0, 1]]]  # (T, B, K)


@exercise(
    lambda: [(torch.arange(1, 19).view(3, 2, 3), torch.tensor(ORIGINS))],
    "not the texts (B, K, T): look up an origin at the place where you are now",
    "the texts are backwards: you read them from their end",
    lambda tokens, origins: trace_back(tokens, origins).flip(-1),
    "the origins change nothing: the last step's prefixes weren't always in these places",
    lambda tokens, origins: tokens.movedim(0, -1),
)
def trace_back(tokens: Tensor, origins: Tensor) -> Tensor:
    """From the last step to the first: reads the token at its place, then goes to its origin."""
    place, read = torch.arange(tokens.size(2), device=tokens.device).expand_as(tokens[0]), []
    for new, origin in zip(tokens.flip(0), origins.flip(0), strict=True):
        read.append(new.gather(1, place))
        place = origin.gather(1, place)
    return torch.stack(read[::-1], dim=-1)
