"""Chapter 6's exercises: each checker accepts the solution and tells the common mistakes apart."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import rejection
from scripts.ch06_training import (
    BOS,
    EOS,
    PAD,
    Batch,
    LabelSmoothing,
    batch_loss,
    check_linear_rate,
    check_reversed_target,
    check_smoothing_towards,
    check_streamed_gradient,
    copy_batches,
    cosine_rate,
    gradient_all_at_once,
    gradient_mistakes,
    inverse_sqrt_rate,
    mean_of_means_gradient,
    rate,
    rates_used,
    smoothed_targets,
    smoothing_among_others,
    smoothing_by,
    smoothing_over_v_minus_2,
    solution_linear_rate,
    solution_reversed_target,
    solution_smoothing_towards,
    solution_streamed_gradient,
    tiny_model,
)

SOLVED = [
    (check_linear_rate, solution_linear_rate),
    (check_smoothing_towards, solution_smoothing_towards),
    (check_streamed_gradient, solution_streamed_gradient),
    (check_reversed_target, solution_reversed_target),
]


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("check, solution", SOLVED, ids=lambda f: f.__name__)
def test_a_solution_passes(check, solution):
    assert check(solution) is None


def one_by_one(src):
    target = torch.full((src.size(0), src.size(1) + 1), PAD)
    for row, ids in zip(target, src.tolist(), strict=True):
        symbols = ids[: ids.index(EOS)]
        row[: len(symbols) + 2] = torch.tensor([BOS, *reversed(symbols), EOS])
    return target


def test_another_way_to_write_a_solution_passes_too():
    check_reversed_target(one_by_one)
    check_smoothing_towards(smoothing)


def shifted(step, peak, warmup, total, by=0):
    return solution_linear_rate(step + by, peak, warmup, total) if step + by > 0 else 0.0


def unguarded(step, peak, warmup, total):
    if step < 1:
        raise ValueError
    return peak * min(step / warmup, (total + 1 - step) / (total + 1 - warmup))


LINEAR = {
    "one late": lambda n, *rest: shifted(n, *rest, by=-1),
    "is wasted": lambda n, peak, warmup, total: (
        peak * min(n / warmup, max(0, total - n) / max(1, total - warmup))
    ),
    "jumps": lambda n, peak, warmup, total: (
        peak * (n / warmup if n <= warmup else 1 - n / (total + 1))
    ),
    "cosine": cosine_rate,
    "1/√n": lambda n, peak, warmup, total: inverse_sqrt_rate(n, peak, warmup),
    "warm-up is missing": lambda n, peak, warmup, total: (
        peak * min(1, (total + 1 - n) / (total + 1 - warmup))
    ),
    "other rates": lambda n, *rest: shifted(n, *rest, by=1),
    "would climb": unguarded,
    "step 0": lambda n, *rest: shifted(n, *rest),
}


def smoothing(logits, labels, prior, smoothing, real=None, total=1.0, entropy=0.0):
    """The definition, product by product, with one thing changed."""
    real = labels != PAD if real is None else real
    q = (1 - smoothing) * F.one_hot(labels, len(prior)) + smoothing * prior
    log_p = logits.log_softmax(-1)
    loss = -torch.where(q > 0, q * log_p, 0.0) + entropy * torch.special.xlogy(q, q)
    return loss.sum(-1)[real].sum() / total


def floored(logits, labels, prior, epsilon):
    """A forbidden word costs a large number instead of nothing."""
    floor = logits.log_softmax(-1).clamp(min=-1e4)
    q = (1 - epsilon) * F.one_hot(labels, len(prior)) + epsilon * (prior + 1e-5 * (prior == 0))
    exact = (1 - epsilon) * F.one_hot(labels, len(prior)) + epsilon * prior
    q = torch.where(floor <= -1e4, q, exact)
    return -(q * floor).sum(-1)[labels != PAD].sum()


TOWARDS = {
    "not to 1/V": lambda logits, labels, prior, e: LabelSmoothing(e)(logits, labels)[0],
    "is left out": smoothing_among_others,
    "divergence": lambda *given: smoothing(*given, entropy=1.0),
    "padding is counted": lambda logits, labels, *rest: smoothing(
        logits, labels, *rest, real=labels >= 0
    ),
    "a mean": lambda logits, labels, *rest: smoothing(
        logits, labels, *rest, total=(labels != PAD).sum()
    ),
    "swapped": lambda logits, labels, prior, e: smoothing(logits, labels, prior, 1 - e),
    "nothing is smoothed": lambda logits, labels, prior, e: smoothing(logits, labels, prior, 0.0),
    "another loss": lambda logits, labels, prior, e: smoothing_over_v_minus_2(logits, labels, e),
    "0 · ∞": smoothing_by(lambda q, logits: q * logits.log_softmax(-1)),
    "must cost nothing": floored,
    "its gradient is NaN": smoothing_by(
        lambda q, logits: torch.special.xlogy(q, logits.softmax(-1))
    ),
}


def divided(by):
    """Sums of losses, divided in the end by what `by` makes of the group."""

    def gradient(model, batches, criterion):
        model.zero_grad()
        group = list(batches)
        for batch in group:
            batch_loss(model, batch, criterion)[0].backward()
        for p in model.parameters():
            p.grad /= by(group)

    return gradient


def kept(model, batches, criterion):
    old = [p.grad.clone() for p in model.parameters()]
    solution_streamed_gradient(model, batches, criterion)
    for p, grad in zip(model.parameters(), old, strict=True):
        p.grad += grad


def only_last(model, batches, criterion):
    solution_streamed_gradient(model, list(batches)[-1:], criterion)


def stepping(model, batches, criterion):
    solution_streamed_gradient(model, batches, criterion)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def sum_of_means(model, batches, criterion):
    group = list(batches)
    mean_of_means_gradient(model, group, criterion)
    for p in model.parameters():
        p.grad *= len(group)


def plain(model, batches, criterion):
    solution_streamed_gradient(model, batches, LabelSmoothing(0.0))


STREAMED = {
    "a mean of means": lambda model, batches, criterion: mean_of_means_gradient(
        model, list(batches), criterion
    ),
    "a sum of means": sum_of_means,
    "a sum over tokens": divided(lambda group: 1),
    "by the batches": divided(len),
    "padding": divided(lambda group: sum(batch.tgt_y.numel() for batch in group)),
    "before is still": kept,
    "only the last": only_last,
    "a step was taken": stepping,
    "p.grad is empty": lambda model, *_: model.zero_grad(),
    "another gradient": plain,
    "one backward pass": gradient_all_at_once,
}

REVERSED = {
    "padding was turned": lambda src: F.pad(src.flip(1), (1, 0), value=BOS),
    "copy task": lambda src: F.pad(src, (1, 0), value=BOS),
    "stop at once": lambda src: F.pad(
        src.gather(1, ((src > 0).sum(1, keepdim=True) - 1 - torch.arange(6)) % 6)
        * (torch.arange(6) < (src > 0).sum(1, keepdim=True)),
        (1, 0),
        value=BOS,
    ),
    "start symbol is missing": lambda src: solution_reversed_target(src)[:, 1:],
    "never stop": lambda src: solution_reversed_target(src).where(
        solution_reversed_target(src) != EOS, PAD
    ),
    "another target": lambda src: F.pad(solution_reversed_target(src), (0, 1)),
    "integers": lambda src: solution_reversed_target(src).double(),
}

WRONG = [
    (check_linear_rate, LINEAR),
    (check_smoothing_towards, TOWARDS),
    (check_streamed_gradient, STREAMED),
    (check_reversed_target, REVERSED),
]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    answers = {words: rejection(check, candidate) for words, candidate in wrong.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(wrong) >= 2


def test_the_answers_on_paper():
    peak = max(rate(n, 64, factor=0.003 * math.sqrt(64 * 50), warmup=50) for n in range(1, 200))
    assert math.isclose(peak, 3e-3)
    best = [smoothed_targets(torch.tensor([5]), 14, e).max().item() for e in (0.0, 0.3)]
    assert [round(1 / p, 2) for p in best] == [1.0, 1.39]


def test_wrong_gradients_are_all_different():
    group = list(copy_batches(2, 3, seed=0, lengths=(2, 6)))
    found = gradient_mistakes(tiny_model(0), group, LabelSmoothing(0.1))
    apart = torch.cdist(torch.stack(list(found.values())), torch.stack(list(found.values())))
    assert (apart + torch.eye(len(found))).min() > 1e-3


def test_the_solutions_fit_the_chapter():
    used = rates_used(lambda done: solution_linear_rate(done + 1, 1.0, 3, 8), 9)
    assert max(used) == used[2] == 1.0 and used[7] > 0 == used[8]
    batch = next(copy_batches(1, 4, seed=2))
    turned = Batch(batch.src, solution_reversed_target(batch.src))
    assert turned.ntokens == batch.ntokens and (turned.tgt[:, 0] == BOS).all()
    model = tiny_model(1)
    solution_streamed_gradient(model, iter([turned]), LabelSmoothing(0.1))
    assert parameters_to_vector(p.grad for p in model.parameters()).isfinite().all()
