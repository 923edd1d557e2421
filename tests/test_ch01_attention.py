"""Chapter 1: attention against PyTorch and brute force, masks, empty rows, and reach."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scripts.book.instruments import influence
from scripts.ch01_attention import (
    LAYER_NAMES,
    attention,
    attention_cost,
    attention_numpy,
    causal_convolution,
    empty_rows_are_silent,
    layer_cost,
    masked_softmax,
    output_and_gradients,
    padding_mask,
    path_length,
    restricted_attention,
    sees_the_future,
    softmax_filled,
    softmax_numpy,
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


def reference(query, key, value, mask=None):
    """One query at a time, in plain Python floats: no softmax, no matrix product."""
    out = torch.zeros(*query.shape[:-1], value.size(-1), dtype=query.dtype)
    full = torch.ones(*query.shape[:-1], key.size(-2), dtype=torch.bool)
    full = full if mask is None else full & mask
    for at in np.ndindex(*query.shape[:-1]):
        allowed = [j for j in range(key.size(-2)) if full[at][j]]
        keys, values = key[at[:-1]], value[at[:-1]]
        powers = [math.exp(float(query[at] @ keys[j]) / math.sqrt(query.size(-1))) for j in allowed]
        for power, j in zip(powers, allowed, strict=True):
            out[at] += power / sum(powers) * values[j]
    return out


@pytest.mark.parametrize("name", MASKS)
def test_attention_equals_pytorch_forward_and_gradient(name):
    heads, mask = random_heads(), MASKS[name]
    ours = output_and_gradients(lambda q, k, v: attention(q, k, v, mask)[0], *heads)
    theirs = output_and_gradients(F.scaled_dot_product_attention, *heads, attn_mask=mask)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["none", "padding", "causal", "both"])
def test_attention_equals_a_loop(name):
    heads = random_heads()
    torch.testing.assert_close(attention(*heads, MASKS[name])[0], reference(*heads, MASKS[name]))


@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 6), (6, 1), (3, 7)])
def test_lengths_may_differ(t, s):
    heads = random_heads(t, s)
    out, weights = attention(*heads)
    assert out.shape == (2, 3, t, 7) and weights.shape == (2, 3, t, s)
    torch.testing.assert_close(out, reference(*heads))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, t, dtype=torch.float64))


FAULTS = {
    "not scaled": lambda q, k, v, m: masked_softmax(q @ k.mT, m) @ v,
    "divided by d_k": lambda q, k, v, m: masked_softmax(q @ k.mT / q.size(-1), m) @ v,
    "softmax over the queries": lambda q, k, v, m: (
        (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~m, -1e9).softmax(-2) @ v
    ),
    "mask turned over": lambda q, k, v, m: attention(q, k, v, m.mT)[0],
    "mask inverted": lambda q, k, v, m: attention(q, k, v, ~m)[0],
    "mask after the softmax": lambda q, k, v, m: attention(q, k, v)[1] * m @ v,
}


@pytest.mark.parametrize("name", FAULTS)
def test_parity_notices_a_planted_fault(name):
    heads, mask = random_heads(), subsequent_mask(5)
    right = F.scaled_dot_product_attention(*heads, attn_mask=mask)
    assert (FAULTS[name](*heads, mask) - right).abs().max() > 0.01


def test_numpy_equals_pytorch():
    q, k, v = (t[0, 0] for t in random_heads(3, 7))
    out, weights = attention_numpy(q.numpy(), k.numpy(), v.numpy())
    torch.testing.assert_close(torch.from_numpy(out), attention(q, k, v)[0])
    torch.testing.assert_close(torch.from_numpy(weights), attention(q, k, v)[1])
    np.testing.assert_allclose(softmax_numpy(np.array([1e4, 1e4])), [0.5, 0.5])


def test_erratum_05_masked_rows_are_zero():
    mask = (padding_mask(torch.tensor([[0, 0, 7, 9]])) & subsequent_mask(4))[0]
    added = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~mask, -math.inf)
    empty = ~mask.any(-1)
    assert empty.tolist() == [True, True, False, False]
    # ours: zeros, finite everywhere, no gradient from what saw nothing
    assert empty_rows_are_silent(lambda s: masked_softmax(s, mask), empty)
    assert empty_rows_are_silent(lambda s: masked_softmax(s, added), empty)
    # −1e9: a uniform row, over what the mask forbids; −∞ alone: NaN
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


def test_empty_rows_pass_gradcheck():
    mask = subsequent_mask(5)[0].tril(-1)
    q, k, v = (t[0, 0].requires_grad_() for t in random_heads())
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask)[0], (q, k, v))
    assert (attention(q, k, v, torch.zeros_like(mask))[0] == 0).all()


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
    assert not sees_the_future(subsequent_mask(6))
    assert sees_the_future(subsequent_mask(6).mT) and sees_the_future(~subsequent_mask(6))


def test_more_padding_changes_nothing():
    q, k, v = random_heads()
    mask = torch.tensor([True] * 5 + [False] * 3)
    longer = [torch.cat([t, 1e3 * torch.randn_like(t[..., :3, :])], dim=-2) for t in (k, v)]
    torch.testing.assert_close(attention(q, *longer, mask)[0], attention(q, k, v)[0])
    assert not torch.allclose(attention(q, *longer)[0], attention(q, k, v)[0])


def test_attention_sees_a_set():
    q, k, v = random_heads()
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(
        attention(q, k[..., order, :], v[..., order, :])[0], attention(q, k, v)[0]
    )


def test_weights_are_those_before_dropout():
    heads = random_heads()
    out, weights = attention(*heads, dropout=lambda w: 0 * w)
    assert (out == 0).all()
    torch.testing.assert_close(weights, attention(*heads)[1])


def test_cost_is_quadratic():
    small, large = attention_cost(64), attention_cost(128)
    assert large["attention"] == 4 * small["attention"] == 4 * 128**2 * 512
    assert large["projections"] == 2 * small["projections"]


HOPS = {
    "recurrent": lambda n: n - 1,
    "convolution, plain": lambda n: math.ceil((n - 1) / 2),
    "convolution, dilated": lambda n: math.ceil(math.log2((n + 1) / 2)),
    "self-attention, restricted": lambda n: math.ceil((n - 1) / 4),
    "self-attention": lambda n: 1,
}


@pytest.mark.parametrize("name", LAYER_NAMES)
def test_paths_and_steps_follow_table_1(name):
    for n in (2, 3, 7, 20):
        assert path_length(name, n) == HOPS[name](n)
    steps = [layer_cost(name, n, 4)["sequential steps"] for n in (8, 16)]
    expected = {"recurrent": [8, 16], "convolution, plain": [1, 1], "convolution, dilated": [1, 1]}
    assert steps == expected.get(name, [2, 2])


def test_restricted_attention_is_attention_under_a_band():
    x = random_heads()[0][0, 0]
    for r in (1, 2, 5):
        band = subsequent_mask(5)[0].triu(1 - r)
        torch.testing.assert_close(restricted_attention(x, r), attention(x, x, x, band)[0])
    assert torch.equal(
        influence(lambda x: restricted_attention(x, 2), x) > 0, subsequent_mask(5)[0].triu(-1)
    )


def test_convolution_reads_only_the_past():
    x, kernel = random_heads()[0][0, 0], torch.randn(8, 8, 2, dtype=torch.float64)
    expected = torch.eye(5, dtype=torch.bool) | torch.eye(5, dtype=torch.bool).roll(3, 0).tril()
    assert torch.equal(
        influence(lambda x: causal_convolution(x, kernel, dilation=3), x) > 0, expected
    )
