"""Chapter 23's exercises: our solutions, and checkers that say what is wrong."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.book.exercises import compare, same_numbers
from scripts.book.instruments import MostAlive
from scripts.ch23_long_memory import delta_attention, tiles

Tile = tuple[Tensor, Tensor]  # scores (n,) and values (n, d)


def check_online_softmax(candidate: Callable[[Iterator[Tile]], Tensor]) -> None:
    """Compares candidate(parts) with a softmax over everything at once, and weighs it."""
    generator = torch.Generator().manual_seed(0)
    scores, v = (torch.randn(size, generator=generator).double() for size in ((12,), (12, 4)))
    falling = 2 * scores.sort(descending=True).values
    low, hidden = falling - 1000, falling.clone()
    hidden[:4] = -math.inf

    def agrees(scores: Tensor, size: int = 4) -> bool:
        try:
            found = candidate((scores[part].clone(), v[part].clone()) for part in tiles(12, size))
        except ArithmeticError:  # by `math.exp`
            return False
        return same_numbers(found, scores.softmax(0) @ v)

    assert agrees(falling, 12), "Wrong even if one tile holds everything: give softmax(scores) @ v."
    cases = {
        "Right for one tile, wrong for three. Add up the tiles' sums: neither the mean of their "
        "softmaxes nor the last one is the softmax of all.": falling,
        "Right while the largest score comes first, wrong when the maximum rises: shrink what was "
        "added before, sum and mixture, by e^(old maximum − new maximum).": falling.flip(0),
        "Scores near 1,000 overflow: subtract the running maximum.": falling + 1000,
        "Scores near −1,000 all give 0: the running maximum must start at −∞, not at 0.": low,
        "The maximum may also fall: keep the larger of the old one and the tile's.": falling
        - 1000 * (torch.arange(12) >= 4),
        "A first tile with only −∞ gives NaN: −∞ − (−∞) is not a number. Skip it.": hidden,
        "A tile with some hidden keys still counts: skip it only if all are hidden.": torch.where(
            torch.arange(12) < 5, -math.inf, falling
        ),
    }
    for message, scores in cases.items():
        assert agrees(scores), message
    with MostAlive() as memory:
        candidate((torch.randn(16), torch.randn(16, 4)) for _ in range(64))
    assert memory.most < 64 * 16 * (1 + 4) * v.itemsize / 2, (
        "More than half of all tiles are still in memory. Take one, update the sums, let it go."
    )


def online_softmax(parts: Iterator[Tile]) -> Tensor:
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


def check_gated_delta(candidate: Callable[..., Tensor]) -> None:
    """Compares candidate(q, k, v, alpha, beta) with the rule, and with common mistakes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 6, 4, generator=generator).double()
    k, (alpha, beta) = F.normalize(k, dim=-1), torch.rand(2, 6, generator=generator).double()
    ones = torch.ones_like(alpha)
    early, after = fading(q, k, v, ones, beta, early=True), fading(q, k, v, alpha, beta, after=True)
    found = candidate(q, k, v, ones, beta)
    assert found.shape == v.shape, "The result must be one (T, d) tensor."
    mistakes = {
        "With alpha = 1 it should be the delta rule. Yours only adds, and never looks up what is "
        "stored under the key.": fading(q, k, v, ones, beta, correct=0.0),
        "Each token reads before it has written: write first, then read.": early,
    }
    otherwise = "With alpha = 1 it isn't the delta rule: write M + β k (v − Mᵀk)ᵀ, then read Mᵀq."
    compare(found, delta_attention(q, k, v, beta), mistakes, otherwise)
    mistakes = {
        "Nothing fades: alpha isn't used.": delta_attention(q, k, v, beta),
        "The correction looks at the state before it faded. Fade first, then look up what is "
        "stored under the key.": fading(q, k, v, alpha, beta, stale=True),
        "What was just written fades too. Fade first, then write.": after,
    }
    given = q, k, v, alpha, beta
    otherwise = "Wrong for alpha below 1: first M ← α M, then the delta rule's step."
    compare(candidate(*given), gated_delta(*given), mistakes, otherwise)


def fading(q, k, v, alpha, beta, correct=1.0, stale=False, after=False, early=False) -> Tensor:
    """The gated delta rule, with a mistake for each argument that isn't the default."""
    state, out = torch.zeros(k.size(1), v.size(1), dtype=v.dtype), []
    for t in range(len(v)):
        before = state
        old = state if after else alpha[t] * state
        missing = v[t] - correct * k[t] @ (state if stale else old)
        state = old + beta[t] * torch.outer(k[t], missing)
        state = alpha[t] * state if after else state
        out.append(q[t] @ (before if early else state))
    return torch.stack(out)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Fade, look up, write the difference, read."""
    state, out = torch.zeros(k.size(1), v.size(1), dtype=v.dtype), []
    for t in range(len(v)):
        state = alpha[t] * state
        state = state + beta[t] * torch.outer(k[t], v[t] - k[t] @ state)
        out.append(q[t] @ state)
    return torch.stack(out)
