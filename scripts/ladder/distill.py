"""Word-level distillation: a student learns what its teachers would say next, word by word.

Hinton, Vinyals and Dean (2015); for translation Kim and Rush (2016), "Sequence-Level Knowledge
Distillation", section 3.1; from an ensemble Freitag, Al-Onaizan and Sankaran (2017).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scripts.ch08_decoding import dropout_off
from scripts.engine.fast import FAST_PATH
from scripts.engine.losses import r_drop_loss


@torch.no_grad()
def ensemble_probs(
    teachers: Sequence[nn.Module],
    batch: Any,
    criterion: nn.Module,
    rows_of: Callable[..., tuple[Tensor, Tensor]] = FAST_PATH.target_rows,
) -> Tensor:
    """The mean of the teachers' probabilities of each next token: (N, V), for `rows_of`'s rows.

    Probabilities are averaged, not logits: a token stays likely if one teacher believes in it.
    Dropout is off, and no gradient goes back. Raises ValueError if there is no teacher.
    """
    if not teachers:
        raise ValueError("an ensemble has at least one model")
    total: Tensor | float = 0.0
    for teacher in teachers:
        with dropout_off(teacher):
            x, _ = rows_of(teacher, batch, criterion)  # (N, D)
            total = total + teacher.generator(x).float().softmax(dim=-1)  # (N, V)
    return total / len(teachers)


class TaughtLoss(nn.Module):
    """A criterion with a teacher: (1 − λ) times the one it is given, plus λ times −Σ q log p.

    q (N, V) are the teacher's probabilities, as they are (temperature 1). By a row's logits the
    gradient is p − (1 − λ) q₀ − λ q, where q₀ is the given criterion's target.
    """

    def __init__(self, criterion: nn.Module, probs: Tensor, weight: float):
        super().__init__()
        self.criterion, self.probs, self.weight = criterion, probs, weight
        self.padding_idx = criterion.padding_idx

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """logits (N, V), labels (N,), to two sums in nats: the mixed loss, and −log p(label)."""
        loss, nll = self.criterion(logits, labels)
        apart = -(self.probs * logits.float().log_softmax(dim=-1)).sum(dim=-1)  # (N,)
        apart = apart.masked_fill(labels == self.padding_idx, 0.0).sum()
        return (1 - self.weight) * loss + self.weight * apart, nll


def distill_loss(
    model: nn.Module,
    batch: Any,
    criterion: nn.Module,
    teachers: Sequence[nn.Module],
    weight: float,
    r_drop: float = 0.0,
    rows_of: Callable[..., tuple[Tensor, Tensor]] = FAST_PATH.target_rows,
) -> tuple[Tensor, Tensor]:
    """A batch's two sums for a student of `teachers`, whose part of the loss is `weight`.

    With `r_drop` both of R-Drop's passes are taught, and have to agree.
    """
    taught = TaughtLoss(criterion, ensemble_probs(teachers, batch, criterion, rows_of), weight)
    if r_drop:
        return r_drop_loss(model, batch, taught, r_drop, rows_of)
    x, labels = rows_of(model, batch, criterion)  # (N, D), (N,)
    return taught(model.generator(x), labels)
