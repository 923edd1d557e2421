"""Chapter 22's exercises."""

import torch
from torch import Tensor

from scripts.book.exercises import exercise


@exercise(
    lambda: [(torch.randn(2, 2, 5, 3), 6), (torch.randn(2, 1, 5, 3), 4)],
    "some heads have keys of no group, or of the wrong group",
    "heads take turns, 0, 1, 0, 1, …: that is `repeat`; neighbours must share: 0, 0, 0, 1, 1, 1",
    lambda k, h: k.repeat(1, h // k.size(1), 1, 1),
    "each head has the keys of the first group",
    lambda k, h: k[:, :1].expand(-1, h, -1, -1),
)
def shared_heads(k: Tensor, h: int) -> Tensor:
    """A new axis for the heads that share a group, then both axes joined."""
    each = h // k.size(1)
    return k.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2)


@exercise(
    lambda: [(torch.randn(24, 24), 3)],
    "each head keeps its rows: first come the even ones (0, 2, 4, …), then the odd ones",
    "a row has moved into another head: take the halves of each head's d_k features, not of all D",
    lambda weight, h: half_layout(weight, 1),
    "that is the way back to the paper's layout",
    lambda weight, h: weight.unflatten(0, (h, 2, -1)).transpose(1, 2).flatten(0, 2),
)
def half_layout(weight: Tensor, h: int) -> Tensor:
    """Rows (H, pairs, 2) become (H, 2, pairs): in each head the even ones, then the odd ones."""
    return weight.unflatten(0, (h, -1, 2)).transpose(1, 2).flatten(0, 2)
