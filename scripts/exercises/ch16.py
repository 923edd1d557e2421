"""Chapter 16's exercise."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import nn
from torch.nn import functional as F

from scripts.book.exercises import exercise, probe
from scripts.ch02_multi_head_attention import MultiHeadedAttention


@contextmanager
def values_silenced(layer: MultiHeadedAttention, head: int) -> Iterator[None]:
    """A head whose values are all 0 mixes only zeros."""
    rows = [p.detach().unflatten(0, (layer.h, -1))[head] for p in layer.project_value.parameters()]
    before = [tensor.clone() for tensor in rows]
    try:
        for tensor in rows:
            tensor.zero_()
        yield
    finally:
        for tensor, old in zip(rows, before, strict=True):
            tensor.copy_(old)


def silenced(function: Callable, *errors: Exception) -> Iterator:
    """Values and autograd in a block, perhaps with an error; numbers and objects after it."""
    layer = MultiHeadedAttention(h=4, d_model=24, dropout=0.0)
    nn.init.normal_(layer.project_value.bias)
    x, value, own = torch.randn(1, 5, 24), layer.project_value, list(layer.parameters())
    with suppress(KeyError), function(layer, 2):
        yield [F.linear(x, value.weight, value.bias).detach(), torch.is_grad_enabled()]
        for error in errors:
            raise error
    yield [p.detach() for p in layer.parameters()]
    yield all(a is b and a.requires_grad for a, b in zip(own, layer.parameters(), strict=True))


@contextmanager
def unguarded(layer: MultiHeadedAttention, head: int) -> Iterator[None]:
    """Without `finally`."""
    before = copy.deepcopy(layer.state_dict())
    for p in layer.project_value.parameters():
        p.data[6 * head : 6 * head + 6] = 0
    yield
    layer.load_state_dict(before)


exercise(
    values_silenced,
    lambda: [silenced, probe(silenced, KeyError())],
    "silence the head's rows of the matrix *and* the bias, and it alone; autograd stays on; after "
    "the block the same parameters hold the same numbers, and want gradients",
    "nothing changed in W^V and its bias, which all paths read: a hook won't do",
    lambda layer, head: nullcontext(),
    "an error inside the block leaves the head silent: undo it in `finally`",
    unguarded,
)
