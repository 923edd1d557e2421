"""Chapter 3's exercises: each checker distinguishes mistakes and accepts other right answers."""

import math
from itertools import permutations

import pytest
import torch
from exercising import assert_told_apart

from scripts.book.exercises import check
from scripts.ch01_attention import subsequent_mask
from scripts.ch03_embeddings_and_positions import sinusoids
from scripts.exercises import ch03
from scripts.exercises.ch03 import confused, squared_gap, stretched


def test_another_way_to_write_a_solution_passes_too():
    check(
        lambda distance, d: (sinusoids(50, d)[0] - sinusoids(50, d)[abs(distance)]).square().sum(),
        "squared_gap",
    )
    check(padded_by(lambda table, more: ahead(table, more, table[-1])), "stretched")
    mask = subsequent_mask(4)
    check(lambda layers: confused_anywhere(layers, mask), "confused")


def ahead(table, more, start, turn=lambda step: step):
    step = turn(torch.linalg.lstsq(table[:-1], table[1:], driver="gelsd").solution)
    rows = [start @ torch.linalg.matrix_power(step, k + 1) for k in range(more)]
    return torch.stack(rows) if rows else table[:0]


def padded_by(make):
    """A way to stretch a table (n, D): cut it, or append make(table, number of missing rows)."""
    return lambda table, max_len: torch.cat((table, make(table, max(0, max_len - len(table)))))[
        :max_len
    ]


def overwritten(table, max_len):
    longer = stretched(table, max_len)
    table.zero_()
    return longer


def confused_anywhere(layers, mask, last=True):
    """Like `confused`, but without the mask, or for all outputs instead of the last."""
    x = torch.randn(4, 8)[torch.tensor(list(permutations(range(4))))]  # (24, T, D)
    for layer in layers:
        x = layer(x, x, x, mask)
    x = x[:, -1:] if last else x
    return torch.isclose(x, x[:1]).flatten(1).all(dim=-1).sum().item()


GAP = {
    "dot product": lambda distance, d: (d - squared_gap(distance, d)) / 2,
    "not D": lambda distance, d: d + squared_gap(distance, d),
    "isn't 1": lambda distance, d: 2 - d + squared_gap(distance, d),
    "counts twice": lambda distance, d: (d + squared_gap(distance, d)) / 2,
    "the length, not": lambda distance, d: math.sqrt(squared_gap(distance, d)),
    "which cosine": lambda distance, d: squared_gap(2 * distance, d),
}

STRETCHED = {
    "repeated": padded_by(lambda table, more: table[-1:].expand(more, -1)),
    "begins again": padded_by(lambda table, more: table[:more]),
    "are 0": padded_by(lambda table, more: table.new_zeros(more, table.size(1))),
    "backwards": padded_by(lambda table, more: ahead(table, more, table[-1], torch.t)),
    "don't continue": padded_by(lambda table, more: ahead(table, more, table[0])),
    "max_len rows": lambda table, max_len: table[:max_len],
    "was changed": overwritten,
    "must stay": lambda table, max_len: stretched(table, max_len) * 1.01,
    "cut": lambda table, max_len: stretched(table, max(max_len, len(table))),
    "return a tensor": lambda table, max_len: list(stretched(table, max_len)),
    "sinusoids only": padded_by(
        lambda table, more: sinusoids(len(table) + more, table.size(1))[len(table) :]
    ),
}

CONFUSED = {
    "all 24 orders": lambda layers: 24,
    "the second layer changes nothing": lambda layers: confused_anywhere(layers, None),
    "too few orders agree": lambda layers: confused_anywhere(
        layers, subsequent_mask(4), last=False
    ),
    "are a set": lambda layers: 12,
    "reads outputs": lambda layers: confused(layers[:1]) if len(layers) == 1 else 2,
}


@pytest.mark.parametrize(
    "name, wrong", [("squared_gap", GAP), ("stretched", STRETCHED), ("confused", CONFUSED)]
)
def test_each_mistake_gets_an_answer_of_its_own(name, wrong):
    check = getattr(ch03, f"check_{name}")
    assert_told_apart(check, wrong)
