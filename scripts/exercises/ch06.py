"""Chapter 6's exercises."""

from collections.abc import Callable, Iterator

import torch
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import exercise, outcome, probe
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import (
    Batch,
    LabelSmoothing,
    batch_loss,
    copy_batches,
    tiny_model,
)


def gradient_of(model: EncoderDecoder) -> torch.Tensor:
    """All gradients of the model as one long vector."""
    return parameters_to_vector(p.grad for p in model.parameters())


def rates(function: Callable, warmup: int, total: int) -> list:
    """From step 0, an error, to two steps after the last."""
    return [outcome(function, step, 0.25, warmup, total) for step in range(total + 3)]


@exercise(
    lambda: [probe(rates, 4, 10), probe(rates, 5, 5)],
    "not the rates of the two straight lines, or step 0 isn't a ValueError",
    "the last step has rate 0 and is wasted: reach 0 one step later",
    lambda step, peak, warmup, total: linear_rate(step, peak, warmup, total - 1),
    "step 0 is accepted: raise a ValueError, or a forgotten + 1 goes unnoticed",
    lambda step, *rest: linear_rate(step, *rest) if step else 0.0,
)
def linear_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Up to `peak` at step `warmup`, then down to 0 just after step `total`, in straight lines."""
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    remaining = max(0, total + 1 - step)  # steps still to be taken, this one included
    return peak * min(step / warmup, remaining / (total + 1 - warmup))


def streamed(function: Callable) -> tuple:
    """A probe: the gradient, the weights, and how many backward passes came before each batch."""
    group = [next(copy_batches(1, rows, seed=1, lengths=(4, 10))) for rows in (8, 4, 1)]
    model, passes, passes_before = tiny_model(d_model=16), [], []
    model.generator.proj.bias.grad = torch.ones_like(model.generator.proj.bias)
    model.generator.proj.bias.register_hook(passes.append)

    def stream() -> Iterator[Batch]:
        for batch in group:
            passes_before.append(len(passes))
            yield batch

    function(model, stream(), LabelSmoothing(0.1))
    return gradient_of(model), parameters_to_vector(model.parameters()), passes_before


@exercise(
    lambda: [streamed],
    "not the gradient of the loss per real target token of all batches, or the weights changed",
    "old gradients are still there, or the sum isn't divided by the number of all tokens",
    lambda model, group, criterion: [batch_loss(model, b, criterion)[0].backward() for b in group],
    "only one batch may be in memory: take the next one after the backward pass of this one",
    lambda model, batches, criterion: streamed_gradient(model, list(batches), criterion),
)
def streamed_gradient(model: EncoderDecoder, batches: Iterator[Batch], criterion) -> None:
    """Adds up gradients of sums, and divides them once the number of tokens is known."""
    model.zero_grad()
    tokens = 0
    for batch in batches:
        loss, _ = batch_loss(model, batch, criterion)
        loss.backward()
        tokens += batch.ntokens
    for p in model.parameters():
        p.grad /= tokens
