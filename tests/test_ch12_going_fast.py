"""Chapter 12: what the loss in chunks holds, and dropout in C."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from scripts.ch06_training import LabelSmoothing
from scripts.ch12_going_fast import LinearCrossEntropy, SeededDropout
from scripts.fast import compiled


def test_the_loss_in_chunks_is_the_textbooks_for_large_logits_too():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((9, 4), (11, 4), (11,)))
    x, labels = 400 * x, torch.arange(9)
    expected = LabelSmoothing(0.1, padding_idx=-1)(F.linear(x, weight, bias), labels)
    losses = LinearCrossEntropy.apply(x, weight, bias, labels, 0.1, 4)
    torch.testing.assert_close(losses, expected)


def peak_bytes(function):
    """The most bytes that `function()` holds at once, besides what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes))


def test_the_loss_holds_two_chunks_of_logits_where_the_textbooks_holds_five_tensors_of_them():
    rows, V, chunk = 512, 2048, 128
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((rows, 8), (V, 8), (V,))]
    labels = torch.arange(1, rows + 1)
    textbook = lambda: LabelSmoothing(0.1)(F.linear(*leaves), labels)[0].backward()  # noqa: E731
    in_chunks = lambda: LinearCrossEntropy.apply(  # noqa: E731
        *leaves, labels, 0.1, chunk
    )[0].backward()
    for rows_held, loss in ((5 * rows, textbook), (2 * chunk, in_chunks)):
        assert rows_held <= peak_bytes(loss) / (4 * V) < rows_held + chunk / 2


@pytest.mark.skipif(compiled.loaded("passes") is None, reason="no C compiler")
def test_dropout_in_c_has_the_gradient_of_an_expanded_one_too():
    x = torch.ones(300, 7, requires_grad=True)
    out = SeededDropout.apply(x, 0.25)
    out.sum().backward()  # a gradient of one number, which all places share
    assert x.grad.equal(out)
