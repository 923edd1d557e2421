"""The three kinds of step: the same weights, no traces, nothing that waits for the device.

A CPU can't record. Here `Recorded` stands in for a GPU: its graph runs the recorded function again,
on the memory that the recording was given, as a replay does.
"""

import copy
import gc
import itertools
import math
import random
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_steps_agree import Recorded
from tiny import random_pairs
from torch.testing import assert_close

from scripts.ch06_training import Batch, LabelSmoothing, batch_loss, train_step
from scripts.ch07_multi30k import make_batch
from scripts.ch11_where_the_time_goes import TINY, series_model
from scripts.core.optimizers import ActAsOne, Muon
from scripts.core.static import static_batches, static_lengths
from scripts.core.steps import GraphedStep, StaticStep, Step, set_rate
from scripts.fast.fast import STATIC, fast_loss

CRITERION = LabelSmoothing(0.1)
KINDS = {"eager": Step, "static": StaticStep, "graphed": Recorded}
PAIRS = random_pairs(60, 14, TINY.vocab)
WIDTHS = static_lengths(PAIRS, 3)


def static_loss(*inputs):
    return fast_loss(*inputs, STATIC)


def a_plan(together=1):
    batches = static_batches(PAIRS, WIDTHS, 64, random.Random(1))
    whole = len(batches) - len(batches) % together
    return [batches[at : at + together] for at in range(0, whole, together)]


def a_model(dtype=torch.float64):
    torch.manual_seed(3)
    return series_model(replace(TINY, dropout=0.0)).to(dtype).train()


def adam(model):
    return torch.optim.Adam([{"params": model.parameters(), "initial_lr": 1.0}], lr=1.0, fused=True)


def muon(model):
    inner = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return ActAsOne(
        Muon([{"params": inner, "initial_lr": 10.0}], lr=1.0),
        torch.optim.Adam([{"params": rest, "initial_lr": 1.0}], lr=1.0, fused=True),
    )


def a_step(kind, model, optimizer, plan, loss_of=static_loss):
    """A step with a plan loaded, on `model` by `optimizer`."""
    shapes = {} if kind == "eager" else {"widths": WIDTHS, "max_tokens": 64}
    step = KINDS[kind](model, CRITERION, optimizer, loss_of, 1.0, **shapes)
    labels = [sum(len(PAIRS[i].tgt) - 1 for batch in group for i in batch) for group in plan]
    step.load(PAIRS, plan, labels)
    return step


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_the_textbooks_steps(kind, together):
    """Other rectangles, fillers and another order of sums: the losses agree to nine digits."""
    plan, model, twin = a_plan(together), a_model(), a_model()
    optimizer, other = adam(model), adam(twin)
    step = a_step(kind, model, optimizer, plan)
    for number in range(len(plan)):
        set_rate(optimizer, 1e-3 * (number + 1))
        step(number)
    for number, (group, figures) in enumerate(zip(plan, step.look(), strict=True)):
        set_rate(other, 1e-3 * (number + 1))
        batches = [make_batch([PAIRS[i] for i in indices]) for indices in group]
        report = train_step(twin, batches, CRITERION, other, clip=1.0)
        expected = (report.loss, report.nll, report.grad_norms[0])
        assert_close(tuple(figures), expected, rtol=1e-9, atol=0.0)
    assert_close(model.state_dict(), twin.state_dict(), rtol=1e-6, atol=1e-9)
    assert step.look() == []
    if kind == "graphed":  # once a shape
        assert len(step.recorded) == len(set(step.shapes)) and (together > 1 or len(plan) > 3)


@pytest.mark.parametrize("make", [adam, muon])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waits", [True, False])
def test_a_step_that_is_not_finite_changes_nothing_nor_do_those_after_it(kind, make, waits):
    model, calls = a_model(dtype=torch.float32), itertools.count()
    optimizer = make(model)
    wrong = 2 + 3 * (kind == "graphed")  # the warm-up calls, too; a replay calls again

    def loss_of(*inputs):
        loss, nll = static_loss(*inputs)
        return (loss * math.nan if next(calls) == wrong else loss), nll

    step = a_step(kind, model, optimizer, a_plan()[:1] * 5, loss_of)  # one shape: one recording
    if not waits:  # as on a GPU: the optimizer itself has to skip
        step.asks = False
        for part in getattr(optimizer, "parts", (optimizer,)):
            part.found_inf = step.bad
    set_rate(optimizer, 1e-2)
    for number in range(2):
        step(number)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for number in range(2, 5):
        step(number)
    assert [figures.finite for figures in step.look()[:3]] == [True, True, False]
    after = model.state_dict(), optimizer.state_dict()["state"]
    assert_close(after, before, rtol=0.0, atol=0.0)


def test_all_recordings_share_one_pool_and_nothing_is_collected_meanwhile():
    """With a GPU's calls replaced by some that note what they get."""
    pools, streams = [], []

    @contextmanager
    def graph(recorded, pool=None):
        pools.append(pool)
        recorded.pool.return_value = pool or object()
        yield

    calls = {"current_stream": lambda: "the current", "set_stream": streams.append}
    step = a_step("graphed", model := a_model(), adam(model), a_plan())
    with mock.patch.multiple(torch.cuda, CUDAGraph=mock.Mock, graph=graph, **calls):
        for _ in range(3):
            _, collecting = GraphedStep.capture(step, lambda: torch.tensor(float(gc.isenabled())))
            assert not collecting
        assert pools[0] is None and pools[1] is pools[2] is step.pool is not None
        with pytest.raises(ZeroDivisionError):
            GraphedStep.capture(step, lambda: 1 / 0)
    assert gc.isenabled() and streams == ["the current"] * 4  # also after the failure


def test_an_optimizer_that_is_not_fused_is_asked_first():
    """It takes no `found_inf`, and fails if given one."""
    with torch.device("meta"):
        model = series_model(TINY)
    for fused, asks in ((False, True), (None, False)):
        optimizer = SimpleNamespace(param_groups=[{"fused": fused}])
        step = Step(model, CRITERION, optimizer, static_loss)
        assert step.asks == asks and hasattr(optimizer, "found_inf") != asks


@pytest.mark.parametrize("loss_of", [static_loss, batch_loss])
def test_nothing_in_a_step_waits_for_the_data(loss_of):
    """On the meta device numbers don't exist, so a decision that depends on them raises."""
    with torch.device("meta"):
        model = series_model(replace(TINY, dropout=0.1)).train()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer = Muon([{"params": matrices, "initial_lr": 1.0}], lr=torch.ones(()))
        set_rate(optimizer, 0.1)
        step = Step(model, CRITERION, optimizer, loss_of, 1.0)
        assert not step.asks and optimizer.found_inf is step.bad
        group = [Batch(torch.ones(4, 6).long(), torch.ones(4, 7).long()) for _ in range(2)]
        figures = step.run(group, torch.ones(()))
        with pytest.raises((RuntimeError, NotImplementedError)):
            figures.tolist()  # to look is to wait


def test_static_batches_have_every_pair_once_in_few_shapes():
    """And nothing is sent within a step: what it needs has been on the device since `load`."""
    plan = a_plan()
    assert sorted(itertools.chain.from_iterable(step[0] for step in plan)) == list(range(60))
    step = a_step("static", model := a_model(), adam(model), plan)
    assert len(set(step.shapes)) <= len(WIDTHS)
    assert all(rows * width <= 64 for ((width, rows),) in step.shapes)
    with mock.patch.object(step, "sent", side_effect=AssertionError("sent in a step")):
        step(0)
    with pytest.raises(ValueError, match="another object"):
        step.load(PAIRS[:5], [], [])
    with pytest.raises(ValueError, match=f"{WIDTHS[-1]} tokens does not fit"):
        static_batches(PAIRS, WIDTHS, WIDTHS[-1] - 1, random.Random(1))
