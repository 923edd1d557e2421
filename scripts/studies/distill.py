"""Word-level distillation: a student learns what its teachers would say next, word by word.

Hinton, Vinyals and Dean (2015); for translation Kim and Rush (2016), "Sequence-Level Knowledge
Distillation", section 3.1; from an ensemble Freitag, Al-Onaizan and Sankaran (2017).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scripts.ch08_decoding import dropout_off
from scripts.fast.fast import FAST_PATH


def taught_loss(
    logits: Tensor, labels: Tensor, probs: Tensor, criterion: nn.Module, weight: float
) -> tuple[Tensor, Tensor]:
    """Two sums in nats: (1 − λ) times the criterion's loss plus λ times −Σ q log p, and −log p.

    logits (N, V), labels (N,); q (N, V) are the teachers' `probs`, as they are (temperature 1). By
    a row's logits the gradient is p − (1 − λ) q₀ − λ q, where q₀ is the criterion's target.
    """
    loss, nll = criterion(logits, labels)
    apart = -(probs * logits.float().log_softmax(dim=-1)).sum(dim=-1)  # (N,)
    apart = apart.masked_fill(labels == criterion.padding_idx, 0.0).sum()
    return (1 - weight) * loss + weight * apart, nll


def distill_loss(
    model: nn.Module,
    batch: Any,
    criterion: nn.Module,
    teachers: Sequence[nn.Module],
    weight: float,
    rows_of: Callable[..., tuple[Tensor, Tensor]] = FAST_PATH.target_rows,
) -> tuple[Tensor, Tensor]:
    """A batch's two sums for a student of `teachers`, whose part of the loss is `weight`.

    The teachers' probabilities are averaged, not their logits: a token stays likely if one teacher
    believes in it. Their dropout is off, and no gradient reaches them.
    """
    total: Tensor | float = 0.0
    with torch.no_grad():
        for teacher in teachers:
            with dropout_off(teacher):
                x, _ = rows_of(teacher, batch, criterion)  # (N, D)
                total = total + teacher.generator(x).float().softmax(dim=-1)  # (N, V)
    x, labels = rows_of(model, batch, criterion)  # (N, D), (N,)
    return taught_loss(model.generator(x), labels, total / len(teachers), criterion, weight)
