"""Chapter 12's exercises: our solutions, and checkers that say what is wrong."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scripts.book.exercises import compare, same_numbers
from scripts.book.instruments import MostAlive
from scripts.ch01_attention import attention, subsequent_mask


def check_packed_attention(candidate: Callable[..., Tensor]) -> None:
    """Compares candidate(q, k, v, lengths, causal) with our own, and with common mistakes."""
    torch.manual_seed(7)
    lengths, qkv = [4, 1, 6, 2], torch.randn(3, 13, 5, dtype=torch.float64)
    for causal, sees in ((False, "does not see"), (True, "sees")):
        found = candidate(*qkv.clone(), lengths, causal)
        ahead = f"With causal={causal} a row {sees} what follows it in its own sentence."
        mistakes = {
            "A sentence looks at other sentences.": packed_attention(*qkv, [13], causal),
            ahead: packed_attention(*qkv, lengths, not causal),
        }
        otherwise = "The result isn't softmax(QKᵀ/√d)·V within each sentence."
        compare(found, packed_attention(*qkv, lengths, causal), mistakes, otherwise)
    leaves = qkv.clone().requires_grad_()
    slopes = [
        torch.autograd.grad(way(*leaves, lengths, True).sin().sum(), leaves)[0]
        for way in (candidate, packed_attention)
    ]
    assert same_numbers(*slopes), "The gradient of q, k or v is wrong."
    lengths = [64, *[2] * 64]
    with MostAlive() as memory:
        candidate(*torch.randn(3, sum(lengths), 4), lengths, True)
    assert memory.most / qkv.element_size() < 60_000, (
        "Too much memory: no score between sentences, or of padding, should be computed."
    )


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], causal: bool
) -> Tensor:
    """Sentence by sentence: no score is computed that nobody needs."""
    outputs = []
    for part in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        mask = subsequent_mask(len(part[0]), q.device)[0] if causal else None  # (T, T)
        outputs.append(attention(*part, mask)[0])
    return torch.cat(outputs)


def check_chunked_z_loss(candidate: Callable[..., Tensor]) -> None:
    """`candidate(x, weight, bias, chunk)`: Σ (log Z)² and its gradients, in little memory."""
    torch.manual_seed(8)
    x, *given = (torch.randn(s, dtype=torch.float64) for s in ((7, 4), (11, 4), (11,)))
    for size, message in (
        (1, "with several chunks. Add up all, including the shorter last one"),
        (1000, "for logits of about 1,000. Their exp overflows; logsumexp avoids that"),
    ):
        leaves = [t.clone().requires_grad_() for t in (size * x, *given)]
        wanted, found = F.linear(*leaves).logsumexp(1).square().sum(), candidate(*leaves, 3)
        assert found.requires_grad, "The loss has no gradient."
        assert same_numbers(found, wanted), f"The loss is wrong {message}."
        grads = [
            torch.autograd.grad(3 * y, leaves, materialize_grads=True) for y in (found, wanted)
        ]
        for name, a, b in zip(("x", "weight", "bias"), *grads, strict=True):
            wrong = f"The gradient of 3 times the loss with respect to {name} is wrong."
            assert same_numbers(a, b), wrong
    leaves = [torch.ones(s, requires_grad=True) for s in ((128, 4), (512, 4), (512,))]
    with MostAlive() as memory:
        candidate(*leaves, 2).backward()
    assert memory.most / leaves[0].itemsize < 128 * 512 / 2, (
        "More than half of all logits are in memory at once. Let each chunk's go before the next "
        "are made, in the backward pass too."
    )


def chunked_z_loss(x: Tensor, weight: Tensor, bias: Tensor, chunk: int) -> Tensor:
    """Each chunk's logits are thrown away, and computed again in the backward pass."""

    def part(rows: Tensor) -> Tensor:
        return F.linear(rows, weight, bias).logsumexp(1).square().sum()

    return sum(checkpoint(part, rows, use_reentrant=False) for rows in x.split(chunk))
