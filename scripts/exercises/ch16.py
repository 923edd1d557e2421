"""Chapter 16's exercise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import exercise, probe
from scripts.ch02_multi_head_attention import MultiHeadedAttention


def silenced(function: Callable, *errors: Exception) -> Iterator:
    """Values and autograd in a block, perhaps with an error; the numbers after it."""
    layer, x = MultiHeadedAttention(h=4, d_model=24, dropout=0.0), torch.randn(1, 5, 24)
    nn.init.normal_(layer.project_value.bias)
    with suppress(KeyError), function(layer, 2):
        value = layer.project_value
        yield F.linear(x, value.weight, value.bias).detach(), torch.is_grad_enabled()
        for error in errors:
            raise error
    yield parameters_to_vector(layer.parameters()), [p.requires_grad for p in layer.parameters()]


@exercise(
    lambda: [silenced, probe(silenced, KeyError())],
    "silence its rows of W^V *and* its bias; autograd stays on; `finally` restores all",
    "nothing changed in W^V and its bias, which all paths read: a hook won't do",
    lambda layer, head: nullcontext(),
    "another head is silent: the head's rows begin at head · d_k",
    lambda layer, head: values_silenced(layer, head - 1),
)
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
