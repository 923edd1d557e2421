"""Chapter 12: how sure a duel is, and what the loss in chunks holds."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from scripts.ch06_training import LabelSmoothing
from scripts.ch12_going_fast import AttentionCore, LinearCrossEntropy, how_sure, keep_scale


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ([1.2, 1.3, 1.25], "clear"),
        ([0.7, 0.8, 0.85], "clear"),
        ([1.1, 1.3, 1.25], "likely"),  # touches the control
        ([0.95, 0.7, 0.8], "likely"),
        ([1.0, 1.3, 1.25], "can't tell"),
    ],
)
def test_a_line_is_as_sure_as_its_weakest_round(rounds, verdict):
    for order in (rounds, rounds[::-1]):
        assert how_sure(order, [0.9, 1.0, 1.1]) == verdict


@pytest.mark.parametrize("with_gradients", [True, False])
def test_the_loss_in_chunks_is_the_textbooks_for_large_logits_too(with_gradients):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((9, 4), (11, 4), (11,)))
    x, labels = 400 * x, torch.arange(9)
    expected = LabelSmoothing(0.1, padding_idx=-1)(F.linear(x, weight, bias), labels)
    losses = LinearCrossEntropy.apply(x, weight, bias, labels, 0.1, 4, False, with_gradients)
    torch.testing.assert_close(losses, expected)


def test_attentions_dropout_takes_weights_and_not_outputs():
    """If V is the identity, the output is the dropped weights: 0, or the weight over 1 − p."""
    torch.manual_seed(3)
    q, k = torch.randn(2, 50, 2, 16, 8, dtype=torch.float64)
    v = torch.eye(16, dtype=torch.float64).expand(50, 2, 16, 16)
    plain, dropped = (AttentionCore.apply(q, k, v, None, p) for p in (0.0, 0.25))
    stays = dropped != 0
    torch.testing.assert_close(dropped[stays], (plain * keep_scale(0.25))[stays])
    assert abs(stays.double().mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / stays.numel())


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
        *leaves, labels, 0.1, chunk, False, True
    )[0].backward()
    for rows_held, loss in ((5 * rows, textbook), (2 * chunk, in_chunks)):
        assert rows_held <= peak_bytes(loss) / (4 * V) < rows_held + chunk / 2
