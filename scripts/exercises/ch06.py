"""Chapter 6's exercises: our solutions, and checkers that say what is wrong."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import compare
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import (
    BOS,
    EOS,
    PAD,
    Batch,
    LabelSmoothing,
    batch_loss,
    copy_batches,
    cosine_rate,
    gradient_of,
    tiny_model,
    train_step,
)


def linear_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Up to `peak` at step `warmup`, then down to 0 just after step `total`, in straight lines."""
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    left = max(0, total + 1 - step)  # steps still to be taken, this one included
    return peak * min(step / warmup, left / (total + 1 - warmup))


def check_linear_rate(candidate: Callable[[int, float, int, int], float]) -> None:
    """Compares each step's rate with the two straight lines; then tries steps outside."""
    for warmup, total in ((4, 10), (1, 5), (5, 5)):
        steps = range(1, total + 2)
        up = torch.tensor([n / warmup for n in steps]).double()
        down = torch.tensor([(total + 1 - n) / (total + 1 - warmup) for n in steps]).double()
        early = torch.tensor([(total - n) / max(1, total - warmup) for n in steps]).double()
        right = torch.minimum(up, down)  # the lower line holds
        cosine = torch.tensor([cosine_rate(n, 1.0, warmup, total) for n in steps]).double()
        late, wasted = F.pad(right[:-1], (1, 0)), torch.minimum(up, early).clamp(min=0)
        mistakes = {
            "the first step has rate 0, and all rates are one step late: steps count from 1": late,
            "the last step has rate 0 and is wasted: reach 0 one step later": wasted,
            "the rate falls like a cosine, not in a straight line": cosine,
            "the warm-up is missing": down.clamp(max=1),
        }
        got = [float(candidate(n, 0.25, warmup, total)) / 0.25 for n in steps]
        compare(got, right, mistakes, "not the rates of the two straight lines")
        after = candidate(total + 3, 0.25, warmup, total)
        assert after == 0, (
            "after the last step the rate isn't 0: a rate below 0 would make the loss rise"
        )
    try:
        candidate(0, 0.25, 4, 10)
    except ValueError:
        return
    except Exception as error:
        raise AssertionError(f"step 0 raises {error!r}: raise a ValueError") from error
    raise AssertionError(
        "step 0 is accepted: raise a ValueError, or a forgotten + 1 goes unnoticed"
    )


def streamed_gradient(
    model: EncoderDecoder, batches: Iterator[Batch], criterion: LabelSmoothing
) -> None:
    """Adds up gradients of sums, and divides them once the number of tokens is known."""
    model.zero_grad()
    tokens = 0
    for batch in batches:
        loss, _ = batch_loss(model, batch, criterion)
        loss.backward()
        tokens += batch.ntokens
    for p in model.parameters():
        p.grad /= tokens


def check_streamed_gradient(
    candidate: Callable[[EncoderDecoder, Iterator[Batch], LabelSmoothing], None],
) -> None:
    """Compares with `train_step`'s gradient; looks at the weights and at each batch's turn."""
    sizes = ((8, 10), (4, 5), (1, 1))  # rows, and the length of the shortest
    group = [next(copy_batches(1, n, seed=1, lengths=(short, 10))) for n, short in sizes]
    group = [Batch(F.pad(b.src, (1, 0), value=EOS + 1), b.full) for b in group]  # not as many
    model, criterion = tiny_model(d_model=16).double(), LabelSmoothing(0.1)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    alone = []
    for part in ([batch] for batch in group):
        train_step(model, part, criterion, still)
        alone.append(gradient_of(model))
    train_step(model, group, criterion, still)
    right, tokens = gradient_of(model), sum(batch.ntokens for batch in group)
    read = sum((batch.src != PAD).sum() for batch in group)
    mistakes = {
        "a mean of means: a token of a small batch counts more than others": sum(alone) / 3,
        "a sum of means: it grows with the number of batches": sum(alone),
        "the sum over all tokens: divide it by their number at the end": right * tokens,
        "divided by the source's tokens: only labels have a loss": right * tokens / read,
        "only the last batch counts: add each batch's gradient to those before": (
            alone[-1] * group[-1].ntokens / tokens
        ),
    }
    before = parameters_to_vector(model.parameters()).detach().clone()
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    passes: list[Tensor] = []
    taken: list[int] = []  # how many backward passes came before each batch

    def stream() -> Iterator[Batch]:
        for batch in group:
            taken.append(len(passes))
            yield batch

    hook = model.generator.proj.bias.register_hook(passes.append)
    candidate(model, stream(), criterion)
    hook.remove()
    assert torch.equal(parameters_to_vector(model.parameters()), before), (
        "the weights have changed: take no step"
    )
    assert all(p.grad is not None for p in model.parameters()), (
        "p.grad is None after your last line. (An iterator gives its batches only once.)"
    )
    got = gradient_of(model)
    assert got.isfinite().all(), "what was in p.grad before is still there"
    otherwise = "not the gradient of the smoothed loss per real token of all batches"
    compare(got, right, mistakes, otherwise)
    assert taken == [0, 1, 2], (
        "only one batch may be in memory: take the next one after the backward pass of this one"
    )


def reversed_target(src: Tensor) -> Tensor:
    """(B, S) symbols, </s>, padding to (B, S+1) <s>, symbols backwards, </s>, padding."""
    count = (src > EOS).sum(dim=1, keepdim=True)  # (B, 1), the symbols of each row
    place = torch.arange(src.size(1), device=src.device).expand_as(src)  # (B, S)
    mirrored = src.gather(1, (count - 1 - place).clamp(min=0))  # (B, S), right where a symbol is
    return F.pad(torch.where(place < count, mirrored, src), (1, 0), value=BOS)


def check_reversed_target(candidate: Callable[[Tensor], Tensor]) -> None:
    """Compares candidate(src) with lists that are reversed one by one."""
    rows = [[5, 6, 7], [8, 9], [4, 5, 6, 13, 8], [12]]

    def tensor(rows: list[list[int]]) -> Tensor:
        return torch.tensor([row + [PAD] * (7 - len(row)) for row in rows])

    src = tensor([[*row, EOS] for row in rows])[:, :6]  # (B, S)
    right = tensor([[BOS, *row[::-1], EOS] for row in rows])  # (B, S+1)
    copied, padding_too = (F.pad(ids, (1, 0), value=BOS) for ids in (src, src.flip(1)))
    end_first = tensor([[BOS, EOS, *row[::-1]] for row in rows])
    mistakes = {
        "nothing is reversed: that is the copy task": copied,
        "the padding was reversed too: it must stay at the end": padding_too,
        "the end symbol comes first: the model would learn to stop at once": end_first,
        "the start symbol is missing: the decoder has nothing to read at first": right[:, 1:],
        "the end symbol is missing: decoding would never stop": right.where(right != EOS, PAD),
    }
    got = candidate(src)
    compare(got, right, mistakes, "the target must be <s>, the symbols backwards, </s>, padding")
    assert got.dtype == src.dtype, "ids must stay integers"
