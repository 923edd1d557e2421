"""Chapter 6's exercises: each checker distinguishes the common mistakes."""

import pytest
import torch
import torch.nn.functional as F
from exercising import assert_told_apart

from scripts.book.exercises import check
from scripts.ch06_training import BOS, EOS, PAD, LabelSmoothing, batch_loss, cosine_rate
from scripts.exercises.ch06 import (
    check_linear_rate,
    check_reversed_target,
    check_streamed_gradient,
    linear_rate,
    reversed_target,
    streamed_gradient,
)


def one_by_one(src):
    target = torch.full((src.size(0), src.size(1) + 1), PAD)
    for row, ids in zip(target, src.tolist(), strict=True):
        symbols = ids[: ids.index(EOS)]
        row[: len(symbols) + 2] = torch.tensor([BOS, *reversed(symbols), EOS])
    return target


def test_another_way_to_write_a_solution_passes_too():
    check(one_by_one, "reversed_target")


def shifted(step, peak, warmup, total, by=0):
    return linear_rate(step + by, peak, warmup, total) if step + by > 0 else 0.0


def unguarded(step, peak, warmup, total):
    if step < 1:
        raise ValueError
    return peak * min(step / warmup, (total + 1 - step) / (total + 1 - warmup))


LINEAR = {
    "one step late": lambda n, *rest: shifted(n, *rest, by=-1),
    "is wasted": lambda n, peak, warmup, total: (
        peak * min(n / warmup, max(0, total - n) / max(1, total - warmup))
    ),
    "cosine": cosine_rate,
    "warm-up is missing": lambda n, peak, warmup, total: (
        peak * min(1, (total + 1 - n) / (total + 1 - warmup))
    ),
    "not the rates": lambda n, *rest: shifted(n, *rest, by=1),
    "make the loss rise": unguarded,
    "step 0": lambda n, *rest: shifted(n, *rest),
}


def means(average):
    """The gradient of a sum of means, or of their average."""

    def gradient(model, batches, criterion):
        model.zero_grad()
        group = list(batches)
        for batch in group:
            loss = batch_loss(model, batch, criterion)[0] / batch.ntokens
            (loss / len(group) if average else loss).backward()

    return gradient


def undivided(model, batches, criterion):
    model.zero_grad()
    for batch in batches:
        batch_loss(model, batch, criterion)[0].backward()


def added_up(forget):
    """Gradients of sums; what was there is forgotten before each batch, or never."""

    def gradient(model, batches, criterion):
        tokens = 0
        for batch in batches:
            if forget:
                model.zero_grad()
            batch_loss(model, batch, criterion)[0].backward()
            tokens += batch.ntokens
        for p in model.parameters():
            p.grad /= tokens

    return gradient


def stepping(model, batches, criterion):
    streamed_gradient(model, batches, criterion)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def counted_first(model, batches, criterion):
    """Nothing is left of the iterator for the gradients."""
    model.zero_grad()
    tokens = sum(batch.ntokens for batch in batches)
    for batch in batches:
        (batch_loss(model, batch, criterion)[0] / tokens).backward()


def all_at_once(model, batches, criterion):
    streamed_gradient(model, list(batches), criterion)


STREAMED = {
    "a mean of means": means(average=True),
    "a sum of means": means(average=False),
    "the sum over all tokens": undivided,
    "before is still": added_up(forget=False),
    "only the last": added_up(forget=True),
    "take no step": stepping,
    "p.grad is None": counted_first,
    "not the gradient": lambda model, batches, _: streamed_gradient(
        model, batches, LabelSmoothing(0.0)
    ),
    "only one batch": all_at_once,
}


def end_turned_too(src):
    count = (src > PAD).sum(1, keepdim=True)
    turned = src.gather(1, (count - 1 - torch.arange(6)).clamp(min=0))
    return F.pad(turned * (torch.arange(6) < count), (1, 0), value=BOS)


def in_place(src):
    src.copy_(reversed_target(src)[:, 1:])
    return F.pad(src, (1, 0), value=BOS)


REVERSED = {
    "padding was reversed": lambda src: F.pad(src.flip(1), (1, 0), value=BOS),
    "copy task": lambda src: F.pad(src, (1, 0), value=BOS),
    "stop at once": end_turned_too,
    "start symbol is missing": lambda src: reversed_target(src)[:, 1:],
    "never stop": lambda src: reversed_target(src).where(reversed_target(src) != EOS, PAD),
    "the target must be": lambda src: F.pad(reversed_target(src), (0, 1)),
    "integers": lambda src: reversed_target(src).double(),
    "`src` itself was changed": in_place,
}

WRONG = [
    (check_linear_rate, LINEAR),
    (check_streamed_gradient, STREAMED),
    (check_reversed_target, REVERSED),
]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    assert_told_apart(check, wrong)
