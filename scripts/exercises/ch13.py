"""Exercises of chapter 13: our solutions, and checkers that tell the common mistakes apart."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scripts.book.exercises import blame, same_numbers


def check_decoding_cost(candidate: Callable[[Sequence[int], float, float], float]) -> None:
    """`candidate(lengths, almost, packing)`: rows of every step, and what packing costs."""
    for lengths, almost, packing, wanted, why in (
        ([9, 2, 5, 2], 0.0, 5.0, 36, "the batch is never packed, all rows take every step"),
        ([3, 3], 0.5, 5.0, 6, "after the last step nobody packs an empty batch"),
        ([1, 3], 0.5, 0.0, 4, "a row may leave after its last token, if just `almost` are left"),
        ([1, 2, 8, 8, 8, 8], 0.75, 0.0, 36, "nobody packs while more than `almost` are left"),
        ([1, 1, 1, 1, 2, 9, 9, 9], 0.5, 0.0, 40, "`almost` is a share of the rows still in it"),
        ([1, 1, 2, 9], 0.5, 5.0, 23, "the batch is packed twice, and each time is paid for"),
    ):
        found = candidate(list(lengths), almost, packing)
        given = f"Texts of {lengths} tokens, almost={almost}, packing={packing}"
        assert found == wanted, f"{given}: {why}. That costs {wanted}, and you find {found}."


def decoding_cost(lengths: Sequence[int], almost: float, packing: float) -> float:
    """Step by step, as `write_and_leave` does it.

    Further: for the 64 texts and packing=10, almost=0.65 is cheapest with 1,210 rows. 0.9 costs
    1,231, packing at each ending (1.0) 1,370, and never packing (0.0) 1,856.
    """
    live, cost = len(lengths), 0.0
    for step in range(1, max(lengths) + 1):
        cost += live
        left = sum(length > step for length in lengths)
        if left and left <= almost * live:
            live, cost = left, cost + packing
    return cost


def check_trace_back(candidate: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Holds candidate(tokens, origins), (T, B, K) each, against what goes wrong."""
    T, B, K = 6, 3, 4
    tokens = torch.arange(T * B * K).view(T, B, K)  # each token occurs once: none is mistaken
    origins = torch.randint(K, (T, B, K), generator=torch.Generator().manual_seed(5))
    origins[0] = 0
    parents = torch.cat((origins[1:], torch.arange(K).expand(1, B, K)))  # where each t is read
    found, texts = candidate(tokens, origins), trace_back(tokens, origins)
    if not same_numbers(found, texts):
        mistakes = {
            "These are the tokens of one place, step after step. A prefix changes its place: "
            "follow the origins.": tokens.permute(1, 2, 0),
            "The texts are read from their end. Turn them round.": texts.flip(-1),
            "You go to origins[t] as it stands. Which parent is meant depends on the place where "
            "you are now: look it up there.": tokens.gather(2, parents).permute(1, 2, 0),
        }
        blame(found, mistakes, f"Other texts, or not (B, K, T) = {(B, K, T)}.")


def trace_back(tokens: Tensor, origins: Tensor) -> Tensor:
    """From the last step to the first: read the token at one's place, and go to its origin."""
    _, B, K = tokens.shape
    at = torch.arange(K, device=tokens.device).expand(B, K)
    read = []
    for new, origin in zip(tokens.flip(0), origins.flip(0), strict=True):
        read.append(new.gather(1, at))
        at = origin.gather(1, at)
    return torch.stack(read[::-1], dim=-1)


def check_may_be_largest(candidate: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Holds candidate(rough, error), (N, V) each, against intervals that are easily read."""
    wide = [[5.0, 4.5, 1.0]], [[3.0, 0.25, 1.5]], [[1, 1, 0]]
    two = [[9.0, 1.0], [2.0, 1.0]], [[0.5] * 2] * 2, [[1, 0], [1, 1]]
    for rough, error, wanted, message in (
        ([[5.0, 1.0]], [[1.0, 1.0]], [[1, 0]], "The best-looking token is ruled out."),
        ([[5.0, 4.0]], [[1.0, 0.5]], [[1, 1]], "From 3.5 to 4.5, beside 4 to 6: both may be 4.2."),
        ([[5.0, 3.0]], [[1.0, 1.0]], [[1, 1]], "From 4 to 6 and from 2 to 4: a tie counts."),
        (*wide, "A token up to 2.5 is kept beside one that is at least 4.25: ask all lower ends."),
        (*two, "Each row has its own largest; yours compares tokens of different rows."),
    ):
        found = candidate(torch.tensor(rough), torch.tensor(error))
        assert isinstance(found, Tensor) and found.dtype == torch.bool, "That is no bool tensor."
        assert found.tolist() == wanted, message


def may_be_largest(rough: Tensor, error: Tensor) -> Tensor:
    """Whose upper end reaches the highest lower end of its row."""
    surely = (rough - error).amax(dim=1, keepdim=True)  # (N, 1): what the largest has at least
    return rough + error >= surely
