"""Chapter 12's exercises."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.book.exercises import exercise, probe, with_gradients
from scripts.book.instruments import most_alive
from scripts.ch01_attention import attention, subsequent_mask


def by_block_mask(q, k, v, lengths: Sequence[int], causal: bool) -> Tensor:
    """All scores, most of them hidden."""
    mask = torch.block_diag(*[torch.ones(n, n) for n in lengths]).bool()
    return attention(q, k, v, mask.tril() if causal else mask)[0]


@exercise(
    lambda: [
        probe(with_gradients, torch.randn(3, 13, 5), [4, 1, 6, 2], False),
        probe(with_gradients, torch.randn(3, 13, 5), [4, 1, 6, 2], True),
        lambda f: most_alive(f, *torch.randn(3, 192, 4), [64, *[2] * 64], True) < 480_000,
    ],
    "not softmax(QKᵀ/√d)·V within each sentence (causal, if asked for), or not its gradients",
    "a sentence looks at other sentences",
    lambda q, k, v, lengths, causal: packed_attention(q, k, v, [len(q)], causal),
    "too much memory: no score between sentences, or of padding, should be computed",
    by_block_mask,
)
def packed_attention(q, k, v, lengths: Sequence[int], causal: bool) -> Tensor:
    """Sentence by sentence: no score is computed that nobody needs."""
    outputs = []
    for part in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        mask = subsequent_mask(len(part[0]), q.device)[0] if causal else None  # (T, T)
        outputs.append(attention(*part, mask)[0])
    return torch.cat(outputs)
