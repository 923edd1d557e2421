"""Chapter 24's exercises."""

import math

import torch
from torch import Tensor

from scripts.book.exercises import exercise, with_gradients


@exercise(
    lambda: [
        (torch.randn(7, 5), 2),
        (torch.randn(7, 5), 1),
        lambda function: with_gradients(lambda x: function(x, 2)[1], [torch.randn(7, 5)]),
    ],
    "not the indices of the largest logits, likeliest first, then the weights, with a gradient",
    "weights sum to less than 1: divide by the sum of what is left, token by token",
    lambda logits, top: logits.softmax(-1).topk(top)[::-1],
    "with top = 1 every weight is 1, so the router never learns: leave the probability as it is",
    lambda logits, top: (logits.topk(top).indices, logits.topk(top).values.softmax(-1)),
)
def router(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """A softmax over the best only: the same as one over all, divided by the sum of the best."""
    best, chosen = logits.topk(top, dim=-1)
    return chosen, best.softmax(-1) if top > 1 else logits.softmax(-1).gather(-1, chosen)


CROWD = torch.tensor([[0, 1]] * 6)  # six tokens, all to experts 0 and 1


@exercise(
    lambda: [(CROWD, 4, 1.0), (CROWD, 4, 1.1), (CROWD, 2, 1.0)],
    "an expert has room for factor · N·k / E visits, rounded up at the end, and drops the others",
    "that is the number of dropped visits: return their share of all visits",
    lambda chosen, *rest: dropped_share(chosen, *rest) * chosen.numel(),
    "the room is for visits, N·k of them, not for tokens",
    lambda chosen, experts, factor: dropped_share(chosen, 2 * experts, factor),
)
def dropped_share(chosen: Tensor, experts: int, factor: float) -> float:
    """The visits beyond the room, summed over the experts, divided by all visits."""
    room = math.ceil(factor * chosen.numel() / experts)
    visits = chosen.flatten().bincount(minlength=experts)
    return (visits - room).clamp(min=0).sum().item() / chosen.numel()
