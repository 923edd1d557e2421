"""Chapter 1: attention against PyTorch, masks, empty rows, a head that learns."""

import math

import pytest
import torch
import torch.nn.functional as F

from scripts.ch01_attention import (
    attention,
    dictionary_task,
    look_up,
    masked_softmax,
    padding_mask,
    softmax_slope,
    subsequent_mask,
)

IDS = torch.tensor([[4, 5, 6, 7, 8], [4, 5, 6, 0, 0]])
BIAS = torch.linspace(-2, 2, 25, dtype=torch.float64).view(5, 5)
MASKS = {
    "none": None,
    "padding": padding_mask(IDS).unsqueeze(1),
    "causal": subsequent_mask(5),
    "both": padding_mask(IDS).unsqueeze(1) & subsequent_mask(5),
    "bias": BIAS,
    "causal bias": BIAS.masked_fill(~subsequent_mask(5)[0], -math.inf),
}


def random_heads(t: int = 5, s: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, t, 8), (2, 3, s, 8), (2, 3, s, 7)]
    return [torch.randn(n, dtype=torch.float64, generator=generator) for n in shapes]


def output_and_gradients(function, *inputs, **options):
    """The output of `function(*inputs)`, and the gradients of a randomly weighted sum of it."""
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    output = function(*inputs, **options)
    generator = torch.Generator().manual_seed(0)
    pull = torch.randn(output.shape, dtype=output.dtype, generator=generator)
    return output, *torch.autograd.grad((output * pull).sum(), inputs)


@pytest.mark.parametrize("name", MASKS)
def test_attention_equals_pytorch_forward_and_gradient(name):
    heads, mask = random_heads(), MASKS[name]
    ours = output_and_gradients(lambda q, k, v: attention(q, k, v, mask)[0], *heads)
    theirs = output_and_gradients(F.scaled_dot_product_attention, *heads, attn_mask=mask)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 6), (6, 1), (3, 7)])
def test_lengths_may_differ(t, s):
    heads = random_heads(t, s)
    out, weights = attention(*heads)
    assert out.shape == (2, 3, t, 7) and weights.shape == (2, 3, t, s)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*heads))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, t, dtype=torch.float64))


def softmax_filled(scores, mask, fill):
    """The usual shortcut, wrong for a row that allows nothing."""
    return scores.masked_fill(~mask, fill).softmax(dim=-1)


def empty_rows_are_silent(softmax, empty):
    """Do the rows `empty` (T) give output 0 and gradient 0, and is everything finite?"""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, len(empty), 4, dtype=torch.float64, generator=generator).unbind()
    q, k, v = (t.requires_grad_() for t in inputs)
    output = softmax(q @ k.mT) @ v  # (T, 4)
    from_all = torch.autograd.grad(output.sum(), (q, k, v), retain_graph=True)
    from_empty = torch.autograd.grad(output[empty].sum(), (q, k, v))
    finite = all(t.isfinite().all() for t in (output, *from_all))
    return bool(finite and all((t == 0).all() for t in (output[empty], *from_empty)))


def test_erratum_05_masked_rows_are_zero():
    mask = (padding_mask(torch.tensor([[0, 0, 7, 9]])) & subsequent_mask(4))[0]
    added = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~mask, -math.inf)
    empty = ~mask.any(-1)
    assert empty.tolist() == [True, True, False, False]
    # ours: zeros, finite everywhere, no gradient from a row that saw nothing
    assert empty_rows_are_silent(lambda s: masked_softmax(s, mask), empty)
    assert empty_rows_are_silent(lambda s: masked_softmax(s, added), empty)
    # −1e9: a uniform row over what the mask forbids; −∞ alone: NaN
    scores = torch.randn(4, 4, dtype=torch.float64)
    assert (softmax_filled(scores, mask, -1e9)[empty] == 0.25).all()
    assert softmax_filled(scores, mask, -math.inf)[empty].isnan().all()
    assert not empty_rows_are_silent(lambda s: softmax_filled(s, mask, -1e9), empty)
    assert not empty_rows_are_silent(lambda s: softmax_filled(s, mask, -math.inf), empty)
    assert not empty_rows_are_silent(lambda s: (s + added).softmax(-1).nan_to_num(0.0), empty)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_erratum_05_masks_work_in_half_precision(dtype):
    mask = subsequent_mask(4)[0].tril(-1)  # row 0 is empty
    scores = torch.randn(4, 4).to(dtype)
    weights = masked_softmax(scores, mask)
    assert weights.dtype == dtype and weights.isfinite().all() and (weights[0] == 0).all()
    assert (weights[~mask] == 0).all()
    if dtype == torch.float16:
        with pytest.raises(RuntimeError):
            softmax_filled(scores, mask, -1e9)


def test_a_learned_bias_gets_its_gradient():
    bias = BIAS.clone().requires_grad_()
    heads = random_heads()
    ours = torch.autograd.grad(attention(*heads, bias)[0].pow(2).sum(), bias)
    out = F.scaled_dot_product_attention(*heads, attn_mask=bias)
    torch.testing.assert_close(ours, torch.autograd.grad(out.pow(2).sum(), bias))


def test_integer_masks_are_refused():
    with pytest.raises(TypeError, match="boolean"):
        attention(*random_heads(), torch.ones(5, 5, dtype=torch.long).tril())


def test_masks():
    assert padding_mask(IDS).tolist() == [[[True] * 5], [[True, True, True, False, False]]]
    assert padding_mask(IDS, pad=4)[0].tolist() == [[False, True, True, True, True]]
    hidden = torch.nn.Transformer.generate_square_subsequent_mask(6) == -math.inf
    assert torch.equal(subsequent_mask(6)[0], ~hidden)


def test_more_padding_changes_nothing():
    q, k, v = random_heads()
    mask = torch.tensor([True] * 5 + [False] * 3)
    longer = [torch.cat([t, 1e3 * torch.randn_like(t[..., :3, :])], dim=-2) for t in (k, v)]
    torch.testing.assert_close(attention(q, *longer, mask)[0], attention(q, k, v)[0])
    assert not torch.allclose(attention(q, *longer)[0], attention(q, k, v)[0])


def test_weights_are_those_before_dropout():
    heads = random_heads()
    out, weights = attention(*heads, dropout=lambda w: 0 * w)
    assert (out == 0).all()
    torch.testing.assert_close(weights, attention(*heads)[1])


def test_a_saturated_softmax_stops_the_gradient_to_scores_and_not_to_values():
    generator = torch.Generator().manual_seed(0)
    raw = 22.6 * torch.randn(200, 16, dtype=torch.float64, generator=generator)
    assert (
        softmax_slope(raw.softmax(-1)).mean() < 0.1 < softmax_slope((raw / 22.6).softmax(-1)).min()
    )
    scores = torch.tensor([[300.0, 0.0, -300.0]], dtype=torch.float64, requires_grad=True)
    value = torch.randn(3, 2, dtype=torch.float64, generator=generator).requires_grad_()
    output = (scores.softmax(-1) @ value).sum()
    to_scores, to_values = torch.autograd.grad(output, (scores, value))
    assert to_scores.abs().max() < 1e-9 and to_values.abs().max() == 1
    weights = torch.rand(5, dtype=torch.float64, generator=generator).softmax(-1)
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), weights.log())
    torch.testing.assert_close(jacobian.trace(), softmax_slope(weights))


def test_the_heads_task_and_its_answers():
    torch.manual_seed(0)
    asked, there = dictionary_task(40, vocab=7, length=4)
    assert torch.equal(asked.sort().values, there.sort().values) and not torch.equal(asked, there)
    assert all(len(set(row)) == 4 for row in there.tolist())
    tables = torch.eye(7, dtype=torch.float64).expand(2, 7, 7)
    sure, even = 100 * torch.eye(7, dtype=torch.float64), torch.zeros(7, 3, dtype=torch.float64)
    output, weights = look_up(asked, there, *tables, sure, sure)  # a word's vector matches itself
    torch.testing.assert_close(output, F.one_hot(asked, 7).double())
    torch.testing.assert_close(weights, (asked.unsqueeze(-1) == there.unsqueeze(-2)).double())
    assert (look_up(asked, there, *tables, even, even)[1] == 1 / 4).all()
    swapped = torch.stack((tables[0], tables[1].roll(1, 0)))  # the second table is for the keys
    assert not torch.allclose(look_up(asked, there, *swapped, sure, sure)[0], output)
