"""Chapter 16's exercise: our solution, and a checker that says what is wrong."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.ch02_multi_head_attention import MultiHeadedAttention

Silencer = Callable[[MultiHeadedAttention, int], AbstractContextManager]


def check_values_silenced(candidate: Silencer) -> None:
    """Looks at the values, by the layer's numbers, inside `with candidate(layer, head):`."""
    torch.manual_seed(0)
    layer = MultiHeadedAttention(h=4, d_model=24, dropout=0.0).double()
    nn.init.normal_(layer.project_value.bias)
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}

    def values() -> Tensor:
        return F.linear(x, layer.project_value.weight, layer.project_value.bias).detach()

    whole = values()
    wanted = whole.clone()
    wanted[..., 12:18] = 0  # head 2

    def as_before() -> bool:
        return all(torch.equal(tensor, kept[name]) for name, tensor in layer.state_dict().items())

    own, block = list(layer.parameters()), candidate(layer, 2)
    assert isinstance(block, AbstractContextManager), (
        "`with` can't use what your function gives: put @contextmanager above it."
    )
    with block:
        silent, gradients = values(), torch.is_grad_enabled()
    assert gradients, "no_grad must end before `yield`: whoever uses the block may want gradients."
    assert not torch.allclose(silent, whole), (
        "Nothing changed in W^V and its bias, which all paths read: a hook won't do."
    )
    assert as_before(), (
        "After the block the layer must be exactly what it was. Keep a clone: a view changes "
        "with the weights."
    )
    assert all(a is b and a.requires_grad for a, b in zip(own, layer.parameters(), strict=True)), (
        "After the block the parameters must be the same objects, and want gradients as before: an "
        "optimizer holds them."
    )
    assert torch.allclose(silent, wanted), (
        "The head isn't silent, or another one is too. Its values come from rows i·d_k to "
        "(i + 1)·d_k of the value matrix, *and* from that part of the bias."
    )
    try:
        with candidate(layer, 1):
            raise KeyError("an error inside the block")
        raise AssertionError("An error inside the block is lost: use `finally` without `except`.")
    except KeyError:
        assert as_before(), (
            "An error inside the block leaves the head silent: undo it in `finally`."
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
