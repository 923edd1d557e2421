"""Exercises of chapter 12: our solutions, and checkers that tell the common mistakes apart."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scripts.book.exercises import blame, same_numbers
from scripts.book.instruments import saved_bytes
from scripts.ch01_attention import attention, subsequent_mask


def check_packed_attention(candidate: Callable[..., Tensor]) -> None:
    """Holds candidate(q, k, v, lengths, causal) against our own, and against what goes wrong."""
    torch.manual_seed(7)
    lengths = [4, 1, 6, 2]
    qkv = torch.randn(3, sum(lengths), 5, dtype=torch.float64)
    for causal in (False, True):
        found = candidate(*qkv, lengths, causal)
        if not same_numbers(found, packed_attention(*qkv, lengths, causal)):
            sees = "sees" if causal else "does not see"
            mistakes = {
                "A sentence looks at its neighbour. Rows lie side by side in memory, and that is "
                "all they share.": packed_attention(*qkv, [sum(lengths)], causal),
                f"With causal={causal} a row {sees} what follows it in its own "
                "sentence.": packed_attention(*qkv, lengths, not causal),
            }
            blame(found, mistakes, "The mix (N, d) is another: in each sentence softmax(QKᵀ/√d)·V.")


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], causal: bool
) -> Tensor:
    """Attention under a mask of blocks: a row and a column that belong to the same sentence."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))  # (N,)
    mask = numbers[:, None] == numbers[None, :]  # (N, N)
    if causal:
        mask = mask & subsequent_mask(len(numbers))[0]
    return attention(q, k, v, mask)[0]


def check_chunked_z_loss(candidate: Callable[..., Tensor]) -> None:
    """`candidate(x, weight, bias, chunk)`: Σ (log Z)² and its gradients, the logits never kept."""
    torch.manual_seed(8)
    given = [torch.randn(s, dtype=torch.float64) for s in ((7, 4), (11, 4), (11,))]
    for chunk, size, message in (
        (7, 1, "in one chunk"),
        (3, 1, "with several chunks. Each adds to it, the last and shorter one too"),
        (3, 1000, "for logits of a thousand. Their exp overflows; logsumexp takes care of them"),
    ):
        leaves = [t.clone().requires_grad_() for t in (size * given[0], *given[1:])]
        wanted, found = F.linear(*leaves).logsumexp(1).square().sum(), candidate(*leaves, chunk)
        assert torch.allclose(found, wanted), f"The loss is wrong {message}."
        made = torch.autograd.grad(3 * found, leaves, materialize_grads=True)
        right = torch.autograd.grad(3 * wanted, leaves)
        for name, a, b in zip(("x", "weight", "bias"), made, right, strict=True):
            assert torch.allclose(a, b), f"The gradient of 3 times the loss by {name} is wrong."
    leaves = [torch.ones(s, requires_grad=True) for s in ((64, 4), (512, 4), (512,))]
    assert saved_bytes(lambda: candidate(*leaves, 8)) < 64 * 512 * leaves[0].itemsize / 2, (
        "For the way back more than half of all logits are kept: autograd remembers each chunk."
    )


def chunked_z_loss(x: Tensor, weight: Tensor, bias: Tensor, chunk: int) -> Tensor:
    """Each chunk's logits are thrown away, and computed again on the way back."""

    def part(rows: Tensor) -> Tensor:
        return F.linear(rows, weight, bias).logsumexp(1).square().sum()

    return sum(checkpoint(part, rows, use_reentrant=False) for rows in x.split(chunk))
