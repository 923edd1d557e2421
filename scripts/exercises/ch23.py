"""Chapter 23's exercises."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.book.exercises import exercise
from scripts.book.instruments import most_alive
from scripts.ch23_long_memory import delta_attention


def tile_cases() -> list:
    """Rising scores, large ones, very small ones, a hidden tile; then the memory."""
    rising, v = 2 * torch.randn(12).sort().values, torch.randn(12, 4)
    hidden = rising.where(torch.arange(12) >= 5, -math.inf)
    many = ((torch.randn(16), torch.randn(16, 4)) for _ in range(64))  # 40 KiB
    tries = (rising, rising + 1000, rising - 1000, hidden)
    cases = [(zip(scores.split(4), v.split(4), strict=True),) for scores in tries]
    return [*cases, lambda function: most_alive(function, many) < 20 * 2**10]


@exercise(
    tile_cases,
    "wrong for some tiles: subtract the running maximum, from −∞ on; when it rises, sum and "
    "mixture shrink by e^(old − new); a tile of −∞ alone is skipped, even the first",
    "add up the tiles' sums: the mean of their softmaxes isn't the softmax of all",
    lambda parts: torch.stack([scores.softmax(0) @ v for scores, v in parts]).mean(0),
    "more than half of all tiles are still in memory: take one, update the sums, let it go",
    lambda parts: online_softmax(iter(list(parts))),
)
def online_softmax(parts: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """The running maximum, sum and mixture; a tile without a visible key is skipped."""
    best, total, mixed = -math.inf, 0.0, 0.0
    for scores, v in parts:
        higher = max(best, scores.max().item())
        if higher == -math.inf:
            continue
        weights, shrink = (scores - higher).exp(), math.exp(best - higher)
        total, mixed = shrink * total + weights.sum(), shrink * mixed + weights @ v
        best = higher
    return mixed / total


@exercise(
    lambda: [(*torch.randn(3, 6, 4) / 2, *torch.rand(2, 6))],
    "first M ← α M, then look up what the faded state holds: M + β k (v − Mᵀk)ᵀ; then read Mᵀq",
    "each token reads before it has written: write first, then read",
    lambda q, *rest: F.pad(gated_delta(q.roll(-1, 0), *rest)[:-1], (0, 0, 1, 0)),
    "nothing fades: alpha isn't used",
    lambda q, k, v, alpha, beta: delta_attention(q, k, v, beta),
)
def gated_delta(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Fade, look up, write the difference, read."""
    state, out = torch.zeros(k.size(1), v.size(1), dtype=v.dtype), []
    for t in range(len(v)):
        state = alpha[t] * state
        state = state + beta[t] * torch.outer(k[t], v[t] - k[t] @ state)
        out.append(q[t] @ state)
    return torch.stack(out)
