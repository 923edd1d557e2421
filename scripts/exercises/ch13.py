"""Chapter 13's exercises: our solutions, and checkers that say what is wrong."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scripts.book.exercises import compare


def check_decoding_cost(candidate: Callable[[Sequence[int], float, float], float]) -> None:
    """`candidate(lengths, almost, packing)`: rows of every step, and what packing costs."""
    for lengths, almost, wanted, why in (
        ([9, 2, 5, 2], 0.0, 36, "9 steps of 4 rows, and the batch is never packed"),
        ([1, 2, 2, 3, 5, 7], 0.5, 33, "steps of 6, 6, 3, 3, 3, 1 and 1 rows, and two packings"),
        ([2, 3], 1.0, 15, "steps of 2, 2 and 1 rows, and a packing after each but the last"),
    ):
        found = candidate(lengths, almost, 5.0)
        case = f"Texts of {lengths} tokens, almost={almost}, packing=5"
        assert found == wanted, f"{case}: {why}. That costs {wanted}, but you get {found}."


def decoding_cost(lengths: Sequence[int], almost: float, packing: float) -> float:
    """Step by step, as `write_and_leave` does it.

    Further: for the 64 texts and packing=10, almost=0.65 is cheapest with 1,210 rows. 0.9 costs
    1,231, packing whenever a text ends (0.999) 1,240, after each step (1.0) 1,370, and never (0.0)
    1,856.
    """
    live, cost = len(lengths), 0.0
    for step in range(1, max(lengths) + 1):
        cost += live
        left = sum(length > step for length in lengths)
        if left and left <= almost * live:
            live, cost = left, cost + packing
    return cost


def check_trace_back(candidate: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Compares candidate(tokens, origins) with the texts of two small beams."""
    tokens = torch.arange(1, 19).view(3, 2, 3)  # (T, B, K): each token occurs once
    steps = [[0, 0, 0], [0, 0, 0]], [[1, 0, 2], [0, 0, 1]], [[1, 1, 0], [2, 0, 1]]
    origins = torch.tensor(steps)  # (T, B, K)
    found = candidate(tokens, origins)
    texts = [[[1, 8, 13], [1, 8, 14], [2, 7, 15]], [[5, 12, 16], [4, 10, 17], [4, 11, 18]]]
    right = torch.tensor(texts)  # (B, K, T)
    mistakes = {
        "The texts are backwards: you read them from their end.": right.flip(-1),
        "The steps must be the last axis: (B, K, T).": right.movedim(-1, 0),
    }
    otherwise = (
        f"For tokens {tokens.tolist()} and origins {origins.tolist()} the texts are {texts}, but "
        f"you get {found.tolist()}. Look up an origin at the place where you are now."
    )
    compare(found, right, mistakes, otherwise)


def trace_back(tokens: Tensor, origins: Tensor) -> Tensor:
    """From the last step to the first: reads the token at its place, then goes to its origin."""
    at, read = torch.arange(tokens.size(2), device=tokens.device).expand_as(tokens[0]), []
    for new, origin in zip(tokens.flip(0), origins.flip(0), strict=True):
        read.append(new.gather(1, at))
        at = origin.gather(1, at)
    return torch.stack(read[::-1], dim=-1)


def check_may_be_largest(candidate: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Compares candidate(rough, error), (N, V) each, with intervals that are easy to read."""
    ends = "the last is at most 3.5, the second at least 4.3."
    for rough, error, wanted, message in (
        ([[5.0, 1.0]], [[1.0, 1.0]], [[1, 0]], "the best-looking token, and it alone."),
        ([[5.0, 4.0]], [[1.0, 0.5]], [[1, 1]], "4 to 6 and 3.5 to 4.5 overlap: both may be 4.2."),
        ([[5.0, 3.0]], [[1.0, 1.0]], [[1, 1]], "4 to 6 and 2 to 4 both contain 4: a tie counts."),
        ([[5.0, 3.0]], [[0.5, 1.5]], [[1, 1]], "4.5 to 5.5 and 1.5 to 4.5 both contain 4.5."),
        ([[5.0, 4.5, 2.0]], [[3.0, 0.2, 1.5]], [[1, 1, 0]], ends),
        ([[9.0], [2.0]], [[1.0], [1.0]], [[1], [1]], "each row has its own largest."),
    ):
        found = candidate(torch.tensor(rough), torch.tensor(error))
        assert found.dtype == torch.bool, f"return a tensor of bool, not {found}"
        case = f"For rough = {rough} and error = {error}"
        assert found.tolist() == wanted, f"{case}: {message} You get {found.tolist()}."


def may_be_largest(rough: Tensor, error: Tensor) -> Tensor:
    """True if the upper end reaches the highest lower end of the row."""
    surely = (rough - error).amax(dim=1, keepdim=True)  # (N, 1): the largest is at least this
    return rough + error >= surely
