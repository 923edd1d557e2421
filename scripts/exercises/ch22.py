"""Chapter 22's exercises: our solutions, and checkers that say what is wrong."""

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor

from scripts.book.exercises import compare, same_numbers
from scripts.ch02_multi_head_attention import distance_bias, split_heads
from scripts.ch22_todays_block import rotated, rotated_in_halves


def check_shared_heads(candidate: Callable[[Tensor, int], Tensor]) -> None:
    """Compares candidate(k, h) with the keys that each head should have."""
    k = torch.arange(60.0).view(2, 2, 5, 3)  # (B, G, S, d_k), no number occurs twice
    found = candidate(k, 6)
    shape = "For six heads of two groups the shape must be (2, 6, 5, 3)."
    assert found.shape == (2, 6, 5, 3), shape
    mistakes = {
        "Heads take turns, 0, 1, 0, 1, …: that is `repeat`. Neighbours must share: 0, 0, 0, 1, "
        "1, 1. With one group, or one per head, you would not notice.": k[:, [0, 1] * 3],
        "Every head reads the first group.": k[:, [0] * 6],
    }
    otherwise = "Some heads have keys of no group, or of the wrong group."
    compare(found, k[:, [0, 0, 0, 1, 1, 1]], mistakes, otherwise)
    single = same_numbers(candidate(k[:, :1], 4), k[:, [0] * 4])
    assert single, "With one group, all heads must read it."
    names = inspect.unwrap(candidate).__code__.co_names
    assert "repeat_interleave" not in names, "It is right. Now do it without `repeat_interleave`."


def shared_heads(k: Tensor, h: int) -> Tensor:
    """A new axis for the heads that share a group, then both axes joined."""
    each = h // k.size(1)
    return k.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2)


def check_half_layout(candidate: Callable[[Tensor, int], Tensor]) -> None:
    """Compares the scores of both layouts, after candidate(weight, h)."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 24, 24, generator=generator, dtype=torch.float64)  # query's, key's
    x, h, d_k = torch.randn(1, 5, 24, generator=generator, dtype=torch.float64), 3, 8
    moved = [candidate(weight, h) for weight in weights]
    kept = all(weight.shape == (24, 24) for weight in moved)
    assert kept, "The result must have the weight's shape, (24, 24)."
    same = (moved[0][:, None] == weights[0]).all(-1).tolist()  # which row is where
    places = [row.index(True) if any(row) else -1 for row in same]
    once = sorted(places) == list(range(24))
    assert once, "Each row of the weight must occur once, unchanged: only the order changes."
    assert places != list(range(24)), (
        "Nothing was moved. The program would turn features 0 and 4 of a head as one pair, but "
        "they belong to different pairs: nonsense, without an error."
    )
    assert all(i // d_k == at // d_k for at, i in enumerate(places)), (
        "A row has moved into another head. Take the halves of each head's d_k features, not of "
        "all D."
    )

    def scores(turn: Callable[[Tensor], Tensor], query: Tensor, key: Tensor) -> Tensor:
        q, k = (turn(split_heads(x @ weight.T, h)) for weight in (query, key))
        return q @ k.mT  # (1, H, T, T)

    assert same_numbers(scores(rotated_in_halves, *moved), scores(rotated, *weights)), (
        "Each head kept its rows, but in the wrong order. First come the even ones (0, 2, 4, …), "
        "then the odd ones (1, 3, 5, …). Yours may be the way back to our layout."
    )


def half_layout(weight: Tensor, h: int) -> Tensor:
    """Rows (H, pairs, 2) become (H, 2, pairs): in each head the even ones, then the odd ones."""
    return weight.unflatten(0, (h, -1, 2)).transpose(1, 2).flatten(0, 2)


def check_alibi_bias(candidate: Callable[[int, int, int], Tensor]) -> None:
    """Compares candidate(h, T, S) with the formula, entry by entry."""
    h, T, S = 3, 2, 5

    def by_hand(sign: int = -1, first: int = S - T, shift: int = 1, steps: float = 8) -> Tensor:
        slopes = [2.0 ** (-steps * (n + shift) / h) for n in range(h)]
        far = [[abs(first + i - j) for j in range(S)] for i in range(T)]
        return sign * torch.tensor([[[m * d for d in row] for row in far] for m in slopes])

    def hidden(filler: float) -> Tensor:
        return by_hand().masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), filler)

    found = candidate(h, T, S)
    assert found.shape == (h, T, S), "The shape must be (h, T, S)."
    mistakes = {
        "The sign is wrong: it prefers far words. A penalty lowers the score.": by_hand(sign=1),
        "The queries are the last T of the S positions, not the first.": by_hand(first=0),
        "The slopes begin at 2^(−8/h), for head 1; yours begin at 1.": by_hand(shift=0),
        "The slopes go down to 2^(−8) whatever h is; yours are 1/2, 1/4, …": by_hand(steps=h),
        "The heads are in reverse: head 1 has the steepest slope.": by_hand().flip(0),
    }
    mistakes |= {
        "Don't hide later keys: that is the causal mask's task.": hidden(-math.inf),
        "Later keys have a penalty, too: a distance is never below 0.": hidden(0),
    }
    otherwise = "The penalty is slope times distance; the distance is |i − j|."
    compare(found, by_hand(), mistakes, otherwise)


def alibi_bias(h: int, T: int, S: int) -> Tensor:
    """Chapter 2's bias with the paper's slopes, cut to the last T queries."""
    return distance_bias(S, [2.0 ** (-8 * n / h) for n in range(1, h + 1)])[0, :, S - T :]
