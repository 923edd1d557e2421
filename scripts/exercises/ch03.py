"""Chapter 3's exercises: our solutions, and checkers that say what is wrong."""

from collections.abc import Callable
from itertools import permutations

import torch
from torch import Tensor, nn

from scripts.book.exercises import compare
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import speeds


def exact_table(length: int, d_model: int) -> Tensor:
    """The sinusoids (length, D) in float64, whatever the default dtype is."""
    angle = torch.outer(torch.arange(length).double(), speeds(d_model))  # (length, D/2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)


def squared_gap(distance: int, d_model: int) -> float:
    """‖PE_p − PE_q‖² at p − q = distance: D/2 + D/2 − 2 Σ cos(distance · ω_i)."""
    return (2 - 2 * torch.cos(distance * speeds(d_model))).sum().item()


def check_squared_gap(candidate: Callable[[int, int], float]) -> None:
    """Compares candidate(distance, d_model) with two rows of a table."""
    for d_model, distance in ((16, 7), (2, 1), (64, 40), (16, -7)):
        table = exact_table(60, d_model)
        a, b = table[10], table[10 + distance]
        gap, product = (a - b).square().sum(), a @ b
        too_long = 2 * (d_model - product)
        mistakes = {
            "that is the dot product: a squared gap also needs the rows' own lengths": product,
            "a row's squared length is D/2, not D: sin² + cos² is 1 for each pair": too_long,
            "a row's squared length isn't 1: it is 1 for each of the D/2 pairs": 2 - 2 * product,
            "the cross term counts twice: (a − b)² = a² − 2ab + b²": d_model - product,
            "that is the length, not its square": gap.sqrt(),
        }
        otherwise = "not the table's numbers: which cosine belongs to which pair?"
        compare(candidate(distance, d_model), gap, mistakes, otherwise)


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


def check_stretched(candidate: Callable[[Tensor, int], Tensor]) -> None:
    """Lets the candidate continue sinusoids, whose further rows are known, and cut a table.

    Then it compares the continuation of a table of noise with ours.
    """
    for d_model in (4, 8):
        table = exact_table(40, d_model)
        given = table[:24].clone()
        step = torch.linalg.lstsq(given[:-1], given[1:], driver="gelsd").solution  # (D, D)
        back = [given[-1] @ torch.linalg.matrix_power(step.T, k) for k in range(1, 17)]
        mistakes = {
            "the last row is repeated: those positions look the same": given[-1:].expand(16, -1),
            "the table begins again: position 24 looks like position 0": given[:16],
            "the new rows are 0: they say nothing about the position": torch.zeros_like(table[24:]),
            "the hands turn backwards: the map is for rows, so use row @ map": torch.stack(back),
        }
        got = candidate(given, 40)
        assert got.shape == table.shape, "the table must have max_len rows of the old width"
        assert torch.equal(got[:24], given), "the learned rows must stay exactly the same"
        otherwise = "the new rows don't continue the pattern of the old ones"
        compare(got[24:], table[24:], mistakes, otherwise, atol=1e-6)
        assert torch.equal(candidate(given, 10), given[:10]), (
            "a shorter table must be the old one, cut"
        )
    noise = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(candidate(noise, 32), stretched(noise, 32), atol=1e-6), (
        "right for sinusoids only: fit one map from each row of the given table to the next"
    )


@torch.no_grad()
def confused(layers: list[MultiHeadedAttention]) -> int:
    """How many of the 24 orders of four tokens have the last output of the first order."""
    first = layers[0].project_query.weight
    tokens = torch.randn(4, first.size(1), dtype=first.dtype)
    x = tokens[torch.tensor(list(permutations(range(4))))]  # (24, T, D)
    for layer in layers:
        x = layer(x, x, x, subsequent_mask(4))  # (24, T, D)
    return torch.isclose(x[:, -1], x[:1, -1]).all(dim=-1).sum().item()


def check_confused(candidate: Callable[[list[MultiHeadedAttention]], int]) -> None:
    """Compares the counts with those derived by hand, for one layer and for two."""
    torch.manual_seed(0)
    layers = [MultiHeadedAttention(2, 8, dropout=0.0).double() for _ in range(2)]
    for weight in nn.ModuleList(layers).parameters():
        nn.init.normal_(weight, std=0.7)  # sharp heads: plain averages would soon all agree
    found = [candidate(layers[:n]) for n in (1, 2)]
    assert found[0] != 24, "all 24 orders agree: compare only the last output, not a sum or a set"
    assert found[0] >= 6, (
        "too few orders agree after one layer: compare the *last* output, up to rounding, and "
        "count the first order too"
    )
    assert found[0] == 6, (
        "wrong after one layer: the last token is the query, and those before it are a set"
    )
    assert found[1] != 6, (
        "the second layer changes nothing: it must read the first one's outputs, both need the "
        "causal mask, and the last output counts, not the first"
    )
    assert found[1] == 1, (
        "wrong after two layers: the second reads outputs that depend on what came before"
    )
    nn.init.zeros_(layers[0].project_value.weight)
    assert candidate(layers[:1]) == 24, (
        "if W^V is 0, each layer says the same to all, and all 24 orders agree: return what you "
        "count, and add nothing to the layer's outputs"
    )
