"""Chapter 1's exercises."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from scripts.book.exercises import exercise, normal
from scripts.book.instruments import most_alive
from scripts.ch01_attention import attention, masked_softmax


@exercise(
    lambda: [(6, 3, 1), (9, 3, 2), (4, 6, 1)],
    "not the window: position i sees itself and looks back in steps of `gap`, r positions at most",
    "the mask is inverted: in this series True means *may look*",
    lambda n, r, gap: ~window_mask(n, r, gap),
    "a position sees too far: it is itself one of the r, so it looks back r − 1 times",
    lambda n, r, gap: window_mask(n, r + 1, gap),
)
def window_mask(n: int, r: int, gap: int = 1) -> Tensor:
    """Boolean (1, n, n): i sees j if i − j is one of 0, gap, …, (r − 1)·gap.

    L layers with r = 3 and gaps 1, 3, 9, … look back over 2·(1 + 3 + … + 3^(L−1)) = 3^L − 1
    places, so log₃ n layers, rounded up, are enough: the paper's log_k n, reached by attention.
    """
    back = torch.arange(n).unsqueeze(1) - torch.arange(n)  # (n, n)
    return ((back >= 0) & (back <= (r - 1) * gap) & (back % gap == 0)).unsqueeze(0)


MASK = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])


@exercise(
    lambda: [
        normal((3, 3, 4), (3, 5, 4), (3, 5, 2), (6, 4), (6, 4), (6,)),  # a batch as large as T
        [*normal((3, 4), (5, 4), (5, 2), (6, 4), (6, 4), (6,)), MASK],
    ],
    "not the weights that the formula gives, or not the values mixed by them; masks count, too",
    "all queries get the same weights: without tanh, q only shifts its row",  # small x: tanh x = x
    lambda q, k, v, w, m, u, *mask: additive_attention(q, k, v, w / 1e5, m / 1e5, u * 1e5, *mask),
    "W and M are swapped: W is for the query, M for the key",
    lambda q, k, v, w, m, u, *mask: additive_attention(q, k, v, m, w, u, *mask),
)
def additive_attention(query, key, value, w, m, u, mask=None) -> tuple[Tensor, Tensor]:
    """Output (..., T, d_v) and weights (..., T, S), from scores uᵀ tanh(Wq + Mk).

    For each pair it writes `a` numbers to memory, a dot product only one. Without the tanh the
    score is uᵀWq + uᵀMk. Within a row the first term is the same for all keys, and softmax ignores
    a shift: all queries get the same weights.
    """
    pairs = (query @ w.T).unsqueeze(-2) + (key @ m.T).unsqueeze(-3)  # (..., T, S, a)
    weights = masked_softmax(pairs.tanh() @ u, mask)  # (..., T, S)
    return weights @ value, weights


def streaming_cases() -> list:
    """Usual scores; scores far below, then far above 0; then the memory."""
    query, key, value = torch.rand(3, 4), *normal((12, 4), (12, 2))
    steep = 4000 * key.abs() * torch.linspace(1, 2, 12).unsqueeze(1)
    many = ((torch.randn(16, 4), torch.randn(16, 2)) for _ in range(64))  # 48 KiB
    cases = [(query, zip(k.split(5), value.split(5), strict=True)) for k in (key, -steep, steep)]
    return [*cases, lambda function: most_alive(function, query, many) < 24 * 2**10]


@exercise(
    streaming_cases,
    "wrong for some blocks, or NaN for scores far from 0: subtract each query's largest score so "
    "far; when a larger one comes, both sums must shrink by the same factor",
    "the blocks' outputs are averaged: add up both sums over all blocks",
    lambda query, blocks: torch.stack([attention(query, *b)[0] for b in blocks]).mean(0),
    "more than half of all keys and values are in memory at once: keep sums, not blocks",
    lambda query, blocks: attention(query, *map(torch.cat, zip(*blocks, strict=True)))[0],
)
def streaming_attention(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention's output (T, d_v) from key and value blocks that pass once.

    Both sums are measured against the largest score so far. When a larger one turns up, both
    shrink by the same factor, and their quotient stays the same.
    """
    largest = query.new_full((len(query), 1), -math.inf)  # (T, 1), the largest score so far
    mix, total = 0.0, 0.0  # Σ e^(s − largest)·v (T, d_v) and Σ e^(s − largest) (T, 1)
    for key, value in blocks:
        scores = query @ key.T / math.sqrt(query.size(-1))  # (T, s)
        newest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
        shrink, powers = (largest - newest).exp(), (scores - newest).exp()
        mix = mix * shrink + powers @ value
        total = total * shrink + powers.sum(dim=-1, keepdim=True)
        largest = newest
    return mix / total
