"""Chapter 2's exercises."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import exercise, probe, with_gradients
from scripts.book.instruments import scramble
from scripts.ch02_multi_head_attention import MultiHeadedAttention


@exercise(
    lambda: [(torch.arange(48).view(2, 4, 6), 2), (torch.arange(128).view(2, 4, 16), 4)],
    "not (B, H, T, d_k) with features h·d_k to (h + 1)·d_k in head h",
    "heads hold whole tokens: the entries were split in memory order",
    lambda x, h: x.view(len(x), h, x.size(1), -1),
    "the token axis is before the heads: no token would see another",
    lambda x, h: x.unflatten(-1, (h, -1)),
)
def slice_heads(x: Tensor, h: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H), head by head. `stack` copies; `split_heads` shares memory."""
    d_k = x.size(-1) // h
    return torch.stack([x[..., i * d_k : (i + 1) * d_k] for i in range(h)], dim=1)


@exercise(
    lambda: [probe(with_gradients, [torch.randn(3, n)], 6, 9) for n in (5, 25)],
    "not (1, H, T, S) with a number of the table for each distance; clamp those beyond R",
    "left and right are swapped: a key's distance is its place minus the query's",
    lambda table, T, S: relative_bias(table.flip(1), T, S),
    "the table gets no gradient, so nothing would be learned",
    lambda table, T, S: relative_bias(table.detach(), T, S),
)
def relative_bias(table: Tensor, T: int, S: int) -> Tensor:
    """Additive mask (1, H, T, S) from a table (H, 2R + 1): one number per head and distance."""
    reach = table.size(1) // 2
    distance = torch.arange(S) - torch.arange(T).unsqueeze(1)  # (T, S)
    return table[:, distance.clamp(-reach, reach) + reach].unsqueeze(0)  # (1, H, T, S)


def removal(function: Callable, *heads: int) -> list:
    """A smaller layer, its output, and all numbers of the old one after the new one's changed."""
    smaller = layer = MultiHeadedAttention(4, 12, dropout=0.0)
    for i in heads:
        smaller = function(smaller, i)
    output = smaller(*torch.randn(3, 2, 5, 12))
    numbers = parameters_to_vector(smaller.parameters())
    scramble(smaller)
    return [smaller.h, numbers, output, parameters_to_vector(layer.parameters())]


@exercise(
    lambda: [probe(removal, 2), probe(removal, 0, 0)],
    "a head owns d_k rows of three matrices and of their biases, and d_k columns of the fourth",
    "the wrong head is gone",
    lambda layer, i: without_head(layer, (i + 1) % layer.h),
    "the given layer itself became smaller: change a copy",
    lambda layer, i: layer.__dict__.update(without_head(layer, i).__dict__) or layer,
)
@torch.no_grad()
def without_head(layer: MultiHeadedAttention, i: int) -> MultiHeadedAttention:
    """A new layer without head i: its rows of W^Q, W^K, W^V and its columns of W^O are gone."""
    layer = copy.deepcopy(layer)
    rows = torch.arange(len(layer.project_query.weight))  # (H·d_k,)
    others = rows.view(layer.h, -1)[torch.arange(layer.h) != i].flatten()
    for linear in (layer.project_query, layer.project_key, layer.project_value):
        linear.weight = nn.Parameter(linear.weight[others].clone())
        linear.bias = nn.Parameter(linear.bias[others].clone())
    layer.project_output.weight = nn.Parameter(layer.project_output.weight[:, others].clone())
    layer.h -= 1
    return layer
