"""Chapter 2's exercises: each checker distinguishes the common mistakes."""

import copy

import pytest
import torch
from exercising import assert_told_apart, rejection
from torch import nn

from scripts.ch02_multi_head_attention import distance_bias, split_by_bare_view, split_heads
from scripts.exercises.ch02 import (
    check_relative_bias,
    check_slice_heads,
    check_without_head,
    relative_bias,
    without_head,
)


def places(T, S):
    return torch.arange(S) - torch.arange(T).unsqueeze(1)


SLICES = {
    "memory order": split_by_bare_view,
    "every H-th": lambda x, h: x.unflatten(-1, (-1, h)).movedim(-1, 1),
    "before the heads": lambda x, h: x.unflatten(-1, (h, -1)),
    "not (B, H": lambda x, h: split_heads(x, h).flip(1),
}

BIAS = {
    "are swapped": lambda table, T, S: relative_bias(table.flip(1), T, S),
    "has a sign": lambda table, T, S: table[
        :, (places(T, S).abs() + table.size(1) // 2).clamp(max=table.size(1) - 1)
    ][None],
    "other end": lambda table, T, S: table[:, (places(T, S) + table.size(1) // 2) % table.size(1)][
        None
    ],
    "wrong distance": lambda table, T, S: relative_bias(table.roll(1, 1), T, S),
    "the shape must be": lambda table, T, S: relative_bias(table, T, S)[0],
    "no gradient": lambda table, T, S: relative_bias(table.detach(), T, S),
}


def in_place(layer, i):
    with torch.no_grad():
        layer.project_value.weight[3 * i : 3 * i + 3] = 0
    return layer


def silenced(layer, i):
    layer = copy.deepcopy(layer)
    layer.project_output.weight.data[:, 3 * i : 3 * i + 3] = 0
    return layer


def shifted_output(layer, i):
    """W^O keeps the wrong heads' columns: not those whose rows the other matrices keep."""
    smaller = without_head(layer, i)
    output = without_head(layer, (i + 1) % layer.h).project_output
    smaller.project_output.weight = nn.Parameter(output.weight)
    return smaller


def too_small(layer, i):
    smaller = without_head(layer, i)
    smaller.project_key.bias = None
    return smaller


def own_dropout(layer, i):
    smaller = without_head(layer, i)
    smaller.dropout = nn.Dropout(0.1)
    return smaller


def shared_bias(layer, i):
    smaller = without_head(layer, i)
    smaller.project_output.bias = layer.project_output.bias
    return smaller


@torch.no_grad()
def with_width(layer, i, d_k):
    """`without_head` for a given width of heads; the `out_features` stay what they were."""
    layer = copy.deepcopy(layer)
    width = layer.project_query.out_features
    kept = [j for j in range(width) if j // d_k != i]
    for linear in (layer.project_query, layer.project_key, layer.project_value):
        linear.weight.data, linear.bias.data = linear.weight[kept], linear.bias[kept]
    layer.project_output.weight.data = layer.project_output.weight[:, kept]
    layer.h -= 1
    return layer


HEADS = {
    "changed": in_place,
    "must be 3": silenced,
    "the wrong head is gone: 3 instead of 0": lambda layer, i: without_head(layer, 3 - i),
    "heads have changed": shifted_output,
    "wrong shape": too_small,
    "another dropout": own_dropout,
    "share a tensor": shared_bias,
    "second head": lambda layer, i: with_width(
        layer, i, layer.project_query.in_features // layer.h
    ),
}

WRONG = [
    (check_slice_heads, SLICES),
    (check_relative_bias, BIAS),
    (check_without_head, HEADS),
]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    assert_told_apart(check, wrong)


def test_widths_must_follow_the_weights():
    stale = rejection(check_without_head, lambda layer, i: with_width(layer, i, 3))
    assert "in_features and out_features" in stale


def test_a_fixed_penalty_is_one_of_the_tables_that_could_be_learned():
    slopes = [0.0, 0.5, 2.0]
    table = -torch.arange(-4, 5).abs() * torch.tensor(slopes).unsqueeze(1)
    torch.testing.assert_close(relative_bias(table, 5, 5), distance_bias(5, slopes))
