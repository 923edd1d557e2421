"""Chapter 16's exercise: our solution, and a checker that says what is wrong."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch
from torch import nn

from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch16_intervening import heads_silenced

Silencer = Callable[[MultiHeadedAttention, int], AbstractContextManager]


def check_values_silenced(candidate: Silencer) -> None:
    """Compares `with candidate(layer, head):` with a head silenced in the chapter's way."""
    torch.manual_seed(0)
    layer = MultiHeadedAttention(h=4, d_model=16, dropout=0.0).double()
    nn.init.normal_(layer.project_value.bias)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    whole = layer(x, x, x)
    with heads_silenced([(layer, 2)]):
        wanted = layer(x, x, x)

    def as_before() -> bool:
        return all(torch.equal(tensor, kept[name]) for name, tensor in layer.state_dict().items())

    with candidate(layer, 2):
        silent = layer(x, x, x)
    assert not torch.allclose(silent, whole), "Nothing changed: the head still speaks."
    assert as_before(), (
        "After the block the layer must be exactly what it was. Keep a clone: a view changes "
        "with the weights."
    )
    assert torch.allclose(silent, wanted), (
        "The head isn't silent, or another one is too. Its values come from rows i·d_k to "
        "(i + 1)·d_k of the value matrix, *and* from that part of the bias."
    )
    with suppress(KeyError), candidate(layer, 1):
        raise KeyError("an error inside the block")
    assert as_before(), "An error inside the block leaves the head silent: undo it in `finally`."


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
