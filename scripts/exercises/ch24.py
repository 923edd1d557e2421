"""Chapter 24's exercises: our solutions, and checkers that say what is wrong."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from scripts.book.exercises import compare, same_numbers


def check_router(candidate: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> None:
    """Compares candidate(logits, top) with the chapter's formula."""
    logits = 2 * torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).double()
    logits.requires_grad_()

    def routed(top: int) -> tuple[Tensor, Tensor]:
        chosen, share = candidate(logits, top)
        shapes = f"Seven tokens and top = {top}: both shapes must be (7, {top})."
        assert chosen.shape == share.shape == (7, top), shapes
        return chosen, share

    chosen, share = routed(2)
    ranked = logits.argsort(descending=True)
    assert not torch.equal(chosen, ranked.flip(-1)[:, :2]), "These are the least likely experts."
    likeliest = torch.equal(chosen, ranked[:, :2])
    assert likeliest, (
        "First come the indices of the experts with the largest logits, the likeliest first; then "
        "their weights."
    )
    assert share.requires_grad, (
        "No gradient flows from the weights to the logits: `item`, `tolist` and `detach` cut it."
    )
    sums = share.sum(-1)
    assert (sums < 1.0001).all(), "The weights of a token must sum to 1, not to more."
    assert (sums > 0.9999).all(), (
        "The weights of a token sum to less than 1: a softmax over all experts was cut off after "
        "the best two. Divide by the sum of what is left, token by token."
    )
    odds = (logits.gather(-1, chosen) * torch.tensor([1.0, -1.0]).double()).sum(-1).exp()
    assert same_numbers(share[:, 0] / share[:, 1], odds), (
        "The weights sum to 1, but their ratio isn't that of the softmax: normalise probabilities, "
        "not logits."
    )
    alone = routed(1)[1]
    assert not same_numbers(alone, torch.ones(7, 1)), (
        "With top = 1 every weight is 1, whatever the logits are: no gradient, and the router "
        "never learns. Leave the probability as it is if top = 1."
    )
    right = same_numbers(alone, logits.softmax(-1).amax(-1, keepdim=True))
    assert right, (
        "With top = 1 the weight must be the chosen expert's probability among all experts."
    )


def router(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """A softmax over the best only: the same as one over all, divided by the sum of the best."""
    best, chosen = logits.topk(top, dim=-1)
    return chosen, best.softmax(-1) if top > 1 else logits.softmax(-1).gather(-1, chosen)


def check_dropped_share(candidate: Callable[[Tensor, int, float], float]) -> None:
    """Compares candidate(chosen, experts, factor) with cases that are easy to count."""
    even, crowd = torch.arange(12).view(6, 2) % 4, torch.tensor([[0, 1]] * 6)
    cases = {
        "Six tokens, two visits each, four experts: there is room for three visits at each, and "
        "all fit. The room is for visits, N·k of them, not for tokens.": (even, 4, 1.0, 0),
        "All six tokens visit experts 0 and 1, and there is room for three at each: six of the "
        "visits are dropped. A full expert's visits don't go to an empty one.": (crowd, 4, 1.0, 6),
        "1.1 · 12 / 4 is 3.3, rounded up: there is room for four at each.": (crowd, 4, 1.1, 4),
        "With two experts in all there is room for six at each: all fit.": (crowd, 2, 1.0, 0),
        "1.5 · 12 / 5 is 3.6, rounded up at the end: room for four at each.": (crowd, 5, 1.5, 4),
    }
    for message, (chosen, experts, factor, right) in cases.items():
        number = {"That is the number of dropped visits. Return their share of all visits.": right}
        compare(candidate(chosen, experts, factor), right / 12, number, message)


def dropped_share(chosen: Tensor, experts: int, factor: float) -> float:
    """The visits beyond the room, summed over the experts, divided by all visits."""
    room = math.ceil(factor * chosen.numel() / experts)
    visits = chosen.flatten().bincount(minlength=experts)
    return (visits - room).clamp(min=0).sum().item() / chosen.numel()
