"""Chapter 3's exercises."""

from itertools import permutations

import torch
from torch import Tensor, nn

from scripts.book.exercises import exercise
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import sinusoids, speeds


@exercise(
    lambda: [(7, 16), (-1, 2)],
    "not the table's numbers: which cosine belongs to which pair?",
    "that is the dot product: a squared gap also needs the rows' own lengths",
    lambda distance, d_model: (d_model - squared_gap(distance, d_model)) / 2,
    "a row's squared length is D/2, not D: sin² + cos² is 1 for each pair",
    lambda distance, d_model: squared_gap(distance, d_model) + d_model,
)
def squared_gap(distance: int, d_model: int) -> float:
    """‖PE_p − PE_q‖² at p − q = distance: D/2 + D/2 − 2 Σ cos(distance · ω_i)."""
    return (2 - 2 * torch.cos(distance * speeds(d_model))).sum().item()


@exercise(
    lambda: [(sinusoids(24, 8), 40), (sinusoids(24, 8), 10), (torch.randn(24, 4), 32)],
    "learned rows stay; each new one is the row before @ one map, fitted to all the learned rows",
    "the last row is repeated: those positions look the same",
    lambda table, n: torch.cat((table, table[-1:].expand(n - len(table), -1))),
    "a shorter table must be the old one, cut",
    lambda table, n: stretched(table, max(n, len(table))),
)
def stretched(table: Tensor, max_len: int) -> Tensor:
    """table (n, D) and further rows, each made from the one before by one map: (max_len, D).

    Worthless if no single map leads from row to row, as in a table of noise. With n - 1 <= D any
    table is fitted exactly, which says nothing.
    """
    step = torch.linalg.lstsq(table[:-1], table[1:], driver="gelsd").solution  # (D, D)
    rows = list(table[:max_len])
    while len(rows) < max_len:
        rows.append(rows[-1] @ step)
    return torch.stack(rows)


def stacks() -> list[tuple[list[MultiHeadedAttention]]]:
    """A layer, then two layers."""
    layers = [MultiHeadedAttention(2, 8, dropout=0.0) for _ in range(2)]
    for weight in nn.ModuleList(layers).parameters():
        nn.init.normal_(weight, std=0.7)  # sharp heads: plain averages would soon all agree
    return [(layers[:1],), (layers,)]


@exercise(
    stacks,
    "compare the *last* output, up to rounding, of all 24 orders",
    "the second layer changes nothing: it reads the first's outputs, and both are causal",
    lambda layers: confused(layers[:1]),
    "the first order agrees with itself: count it, too",
    lambda layers: confused(layers) - 1,
)
@torch.no_grad()
def confused(layers: list[MultiHeadedAttention]) -> int:
    """How many of the 24 orders of four tokens have the last output of the first order."""
    tokens = torch.randn(4, layers[0].project_query.in_features)
    x = tokens[torch.tensor(list(permutations(range(4))))]  # (24, T, D)
    for layer in layers:
        x = layer(x, x, x, subsequent_mask(4))  # (24, T, D)
    return torch.isclose(x[:, -1], x[:1, -1]).all(dim=-1).sum().item()
