"""Instruments that several chapters use: what depends on what, and what a computation costs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


def influence(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """How strongly each position of `function(x)` reacts to each position of `x`: (T, S).

    `function` maps x (S, d) to (T, d'), or (1, S, d) to (1, T, d'). An entry is the norm of the
    derivatives of output t by input s, by autograd: exactly 0 where t can't depend on s.
    """
    batched = x.dim() == 3
    jacobian = torch.autograd.functional.jacobian(function, x.detach())
    if batched:
        jacobian = jacobian[0, :, :, 0]  # (1, T, d', 1, S, d) -> (T, d', S, d)
    return jacobian.norm(dim=(1, 3))


def count_flops(function: Callable[..., object], *inputs: Tensor) -> int:
    """Additions and multiplications in the products and convolutions of `function(*inputs)`."""
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


def saved_bytes(function: Callable[..., object], *inputs: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass of `function(*inputs)`.

    Each storage counts once.
    """
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Holding it keeps its address unique; with its graph it would keep itself alive for ever.
        kept[storage._cdata] = (storage.nbytes(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(*inputs)
    return sum(size for size, _ in kept.values())
