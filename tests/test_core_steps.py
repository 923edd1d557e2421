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

from scripts.ch06_training import EOS, PAD, Batch, LabelSmoothing, batch_loss, train_step
from scripts.ch07_multi30k import make_batch
from scripts.ch11_where_the_time_goes import TINY, series_model
from scripts.core import steps
from scripts.core.optimizers import ActAsOne, Muon
from scripts.core.static import (
    ResidentCorpus,
    longer_side,
    static_batches,
    static_lengths,
)
from scripts.core.steps import GraphedStep, StaticStep, Step, set_rate
from scripts.fast.fast import STATIC, fast_loss

CRITERION = LabelSmoothing(0.1)


def static_loss(*given):
    return fast_loss(*given, STATIC)


KINDS = {"eager": Step, "static": StaticStep, "graphed": Recorded}


PAIRS = random_pairs(60, 14, TINY.vocab)
WIDTHS = static_lengths(PAIRS, 3)


def a_plan(together=1):
    batches = static_batches(PAIRS, WIDTHS, 64, random.Random(1))
    whole = len(batches) - len(batches) % together
    return [batches[at : at + together] for at in range(0, whole, together)]


def labels(plan):
    return [sum(len(PAIRS[i].tgt) - 1 for batch in step for i in batch) for step in plan]


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


def a_step(kind, model, optimizer, loss_of=static_loss, clip=1.0):
    given = (model, CRITERION, optimizer, loss_of, clip)
    if kind == "eager":
        return Step(*given)
    return KINDS[kind](*given, widths=WIDTHS, max_tokens=64)


def trained(kind, plan):
    """The model after the plan, by Adam, and what its steps found."""
    model = a_model()
    optimizer = adam(model)
    step = a_step(kind, model, optimizer)
    step.load(PAIRS, plan, labels(plan))
    for number in range(len(plan)):
        set_rate(optimizer, 1e-3 * (number + 1))
        step(number)
    return model, step.look()


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_the_textbooks_steps(kind, together):
    """Other rectangles, fillers and another order of sums: the losses agree to nine digits."""
    plan = a_plan(together)
    found_model, found = trained(kind, plan)
    model = a_model()
    optimizer = adam(model)
    for number, (group, figures) in enumerate(zip(plan, found, strict=True)):
        set_rate(optimizer, 1e-3 * (number + 1))
        batches = [make_batch([PAIRS[i] for i in indices]) for indices in group]
        report = train_step(model, batches, CRITERION, optimizer, clip=1.0)
        wanted = (report.loss, report.nll, report.grad_norms[0])
        assert_close(tuple(figures), wanted, rtol=1e-9, atol=0.0)
    assert_close(model.state_dict(), found_model.state_dict(), rtol=1e-6, atol=1e-9)


def test_a_recording_is_made_once_a_shape():
    plan = a_plan(2)
    step = a_step("graphed", model := a_model(), adam(model))
    with mock.patch.object(step, "record", wraps=step.record) as record:
        for _ in range(2):
            step.load(PAIRS, plan, labels(plan))
            for number in range(len(plan)):
                step(number)
    shapes = {tuple(sorted(step.shapes[number])) for number in range(len(plan))}
    assert record.call_count == len(step.recorded) >= len(shapes) > 1
    assert {width for key in step.recorded for width, _ in key} <= set(WIDTHS)


@pytest.mark.parametrize("make", [adam, muon])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waits", [True, False])
def test_a_step_that_is_not_finite_changes_nothing_nor_do_those_after_it(kind, make, waits):
    model = a_model(dtype=torch.float32)
    optimizer = make(model)
    wrong = {"at": 2, "seen": 0}

    def loss_of(*given):
        loss, nll = static_loss(*given)
        wrong["seen"] += 1
        return (loss * math.nan if wrong["seen"] == wrong["at"] + 1 else loss), nll

    step = a_step(kind, model, optimizer, loss_of)
    if not waits:  # as on a GPU: the optimizer itself has to skip
        step.asks = False
        for part in getattr(optimizer, "parts", (optimizer,)):
            part.found_inf = step.bad
    plan = a_plan()[:1] * 5  # one shape: one recording
    step.load(PAIRS, plan, labels(plan))
    set_rate(optimizer, 1e-2)
    if kind == "graphed":
        wrong["at"] += 3  # the warm-up's calls; a replay calls, too
    for number in range(2):
        step(number)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for number in range(2, 5):
        step(number)
    found = step.look()
    assert [figures.finite for figures in found[:3]] == [True, True, False]
    after = model.state_dict(), optimizer.state_dict()["state"]
    assert_close(after, before, rtol=0.0, atol=0.0)
    assert not any(torch.isnan(p).any() for p in model.parameters())


def test_all_recordings_share_one_pool():
    """With a GPU's calls replaced by some that note what they are given."""
    pools = []

    class Graph:
        def pool(self):
            return self.own

    @contextmanager
    def graph(made, pool=None):
        pools.append(pool)
        made.own = pool or object()
        yield

    streams, now = [], mock.Mock(return_value="the current")
    calls = {"current_stream": now, "set_stream": streams.append}
    step = a_step("graphed", model := a_model(), adam(model))
    with mock.patch.multiple(torch.cuda, CUDAGraph=Graph, graph=graph, **calls):
        for _ in range(3):
            GraphedStep.capture(step, lambda: torch.full((3,), float(gc.isenabled())))
        assert pools[0] is None and pools[1] is pools[2] is step.pool is not None
        _, found = GraphedStep.capture(step, lambda: torch.full((3,), float(gc.isenabled())))
        assert not found.any()  # nothing is collected while it records
        with pytest.raises(ZeroDivisionError):
            GraphedStep.capture(step, lambda: 1 / 0)
    assert gc.isenabled() and streams == ["the current"] * 5  # also after the failure


def test_an_optimizer_that_is_not_fused_is_asked_first():
    """It takes no `found_inf`, and fails if given one."""
    with torch.device("meta"):
        model = series_model(TINY)
    for fused, asks in ((False, True), (None, False)):
        optimizer = SimpleNamespace(param_groups=[{"fused": fused}])
        step = Step(model, CRITERION, optimizer, static_loss)
        assert step.asks == asks and hasattr(optimizer, "found_inf") != asks


@pytest.mark.parametrize("path", ["fast", "textbook"])
def test_nothing_in_a_step_waits_for_the_data(path):
    """On the meta device numbers don't exist, so a decision that depends on them raises."""
    with torch.device("meta"):
        model = series_model(replace(TINY, dropout=0.1)).train()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer = Muon([{"params": matrices, "initial_lr": 1.0}], lr=torch.ones(()))
        set_rate(optimizer, 0.1)
        step = Step(model, CRITERION, optimizer, static_loss if path == "fast" else batch_loss, 1.0)
        assert not step.asks and optimizer.found_inf is step.bad
        group = [Batch(torch.ones(4, 6).long(), torch.ones(4, 7).long()) for _ in range(2)]
        found = step.run(group, torch.ones(()))
        assert found.shape == (3,)
        with pytest.raises((RuntimeError, NotImplementedError)):
            found.tolist()  # to look is to wait


def test_an_epoch_crosses_to_the_device_at_once():
    """A static step sends nothing: what it needs has been there since `load`."""
    plan = a_plan()
    step = a_step("static", model := a_model(), adam(model))
    step.load(PAIRS, plan, labels(plan))
    with mock.patch.object(step, "sent", side_effect=AssertionError("sent in a step")):
        for number in range(len(plan)):
            step(number)
    resident = step.corpus
    step.load(PAIRS, plan[::-1], labels(plan[::-1]))
    assert step.corpus is resident
    with pytest.raises(ValueError, match="another object"):
        step.load(PAIRS[:5], [], [])


def test_the_resident_corpus_gives_back_every_pair():
    corpus = ResidentCorpus(PAIRS, "cpu", WIDTHS[-1])
    for width in WIDTHS:
        fitting = [i for i, pair in enumerate(PAIRS) if longer_side(pair) <= width]
        batch = corpus.batch(torch.tensor([*fitting, corpus.filler]), width)
        assert batch.src.shape == batch.tgt.shape == batch.tgt_y.shape == (len(fitting) + 1, width)
        for row, i in enumerate(fitting):
            assert [t for t in batch.src[row].tolist() if t != PAD] == PAIRS[i].src
            assert [t for t in batch.full[row].tolist() if t != PAD] == PAIRS[i].tgt
        assert batch.src[-1].tolist() == [EOS] + [PAD] * (width - 1)  # a key for attention
        assert (batch.tgt_y[-1] == PAD).all()  # and nothing to learn


def test_static_batches_have_every_pair_once_in_few_shapes():
    plan = a_plan()
    assert sorted(itertools.chain.from_iterable(step[0] for step in plan)) == list(range(60))
    step = a_step("static", model := a_model(), adam(model))
    step.load(PAIRS, plan, labels(plan))
    assert len(set(step.shapes)) <= len(WIDTHS)
    assert all(rows * width <= 64 for ((width, rows),) in step.shapes)
    with pytest.raises(ValueError, match=f"{WIDTHS[-1]} tokens does not fit"):
        static_batches(PAIRS, WIDTHS, WIDTHS[-1] - 1, random.Random(1))
