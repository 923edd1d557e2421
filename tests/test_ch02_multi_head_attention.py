"""Chapter 2: the layer against PyTorch's, its masks, its heads, and what it keeps."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scripts.ch02_multi_head_attention as chapter
from scripts.book.instruments import influence
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import (
    KeepsDroppedWeights,
    MultiHeadedAttention,
    attention_head_by_head,
    distance_bias,
    merge_heads,
    split_by_bare_view,
    split_heads,
    torch_attention_state,
    train_heads,
    two_questions,
)

IDS = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]])
PADDING, CAUSAL = padding_mask(IDS), subsequent_mask(6)


pytestmark = pytest.mark.usefixtures("float64")


def pair(h=4, d_model=16):
    """Our layer and PyTorch's with the same weights and non-zero biases."""
    ours = MultiHeadedAttention(h, d_model, dropout=0.0)
    theirs = nn.MultiheadAttention(d_model, h, batch_first=True)
    theirs.load_state_dict(torch_attention_state(ours))
    return ours, theirs


def parity_gap(ours, theirs, length, mask, their_masks):
    """Largest difference in outputs, weights, and gradients of inputs and parameters."""
    inputs = [torch.randn(2, n, 16, requires_grad=True) for n in (length, 6, 6)]
    mine = ours(*inputs, mask)
    other, weights = theirs(*inputs, average_attn_weights=False, **their_masks)
    probe = torch.randn_like(mine)
    left, right = (
        torch.autograd.grad((out * probe).sum(), [*inputs, *layer.parameters()])
        for out, layer in ((mine, ours), (other, theirs))
    )
    *by_inputs, wq, bq, wk, bk, wv, bv, wo, bo = left
    stacked = *by_inputs, torch.cat((wq, wk, wv)), torch.cat((bq, bk, bv)), wo, bo
    pairs = [(mine, other), (ours.attn, weights), *zip(stacked, right, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("h", [1, 4, 16])
@pytest.mark.parametrize(
    "length, mask, their_masks",
    [
        (6, None, {}),
        (3, PADDING, {"key_padding_mask": ~PADDING[:, 0]}),
        (6, CAUSAL, {"attn_mask": ~CAUSAL[0]}),
        (6, CAUSAL & PADDING, {"attn_mask": ~CAUSAL[0], "key_padding_mask": ~PADDING[:, 0]}),
    ],
    ids=["no mask", "padding, T=3, S=6", "causal", "both"],
)
def test_equals_torch_layer_forward_and_gradient(h, length, mask, their_masks):
    assert parity_gap(*pair(h), length, mask, their_masks) < 1e-12


def unscaled(q, k, v, mask, dropout):
    return attention(q * math.sqrt(q.size(-1)), k, v, mask, dropout)


def mask_forgotten(q, k, v, mask, dropout):
    return attention(q, k, v, None, dropout)


def merge_without_transpose(x):
    return x.reshape(x.size(0), x.size(2), -1)


@pytest.mark.parametrize(
    "name, fault",
    [
        ("attention", unscaled),
        ("attention", mask_forgotten),
        ("split_heads", split_by_bare_view),
        ("merge_heads", merge_without_transpose),
    ],
)
def test_parity_notices_a_planted_fault(monkeypatch, name, fault):
    monkeypatch.setattr(chapter, name, fault)
    assert parity_gap(*pair(), 6, CAUSAL, {"attn_mask": ~CAUSAL[0]}) > 0.01


def test_additive_masks_one_for_all_heads_or_one_each():
    ours, theirs = pair()
    x = torch.randn(2, 6, 16)
    each = torch.randn(2, 4, 6, 6)  # (B, H, T, S)
    expected, _ = theirs(x, x, x, attn_mask=each.flatten(0, 1))
    torch.testing.assert_close(ours(x, x, x, each), expected)

    shared = torch.randn(2, 6, 6)  # (B, T, S)
    expected, _ = theirs(x, x, x, attn_mask=shared.repeat_interleave(4, dim=0))
    torch.testing.assert_close(ours(x, x, x, shared), expected)

    as_float = torch.zeros(1, 6, 6).masked_fill(~CAUSAL, -math.inf)
    torch.testing.assert_close(ours(x, x, x, as_float), ours(x, x, x, CAUSAL))
    ours(x, x, x, CAUSAL.double())  # zeros and ones as floats are a nudge, not a mask
    assert (ours.attn.triu(1) > 0).any()


def test_distance_bias_by_loop():
    bias = distance_bias(5, [0.5, 2.0])
    for h, slope in enumerate([0.5, 2.0]):
        for t in range(5):
            for s in range(5):
                assert bias[0, h, t, s] == -slope * abs(t - s)


def test_a_query_with_nothing_to_see_gets_zero_weights_and_finite_gradients():
    layer = MultiHeadedAttention(4, 16, dropout=0.0)
    x = torch.randn(2, 6, 16, requires_grad=True)
    mask = CAUSAL.clone()
    mask[:, 2] = False
    out = layer(x, x, x, mask)
    out.square().sum().backward()
    assert (layer.attn[:, :, 2] == 0).all()
    torch.testing.assert_close(out[:, 2], layer.project_output.bias.expand(2, -1))
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_split_goes_where_the_loop_says_and_merge_comes_back():
    x = torch.arange(60).view(2, 5, 6)
    parts, wrong = split_heads(x, 3), split_by_bare_view(x, 3)
    by_loop = torch.stack([x[:, :, 2 * i : 2 * i + 2] for i in range(3)], dim=1)
    assert torch.equal(parts, by_loop)
    assert torch.equal(merge_heads(parts), x)
    assert parts.data_ptr() == x.data_ptr()  # nothing was copied
    assert wrong.shape == parts.shape and not torch.equal(wrong, by_loop)
    assert not torch.equal(merge_without_transpose(parts), x)


def test_dependence_is_the_mask_and_wrong_reshapes_break_it(monkeypatch):
    x, causal = torch.randn(1, 4, 8), subsequent_mask(4)
    layer = MultiHeadedAttention(2, 8, dropout=0.0)

    def reach(mask=causal):
        return influence(lambda x: layer(x, x, x, mask), x) > 0

    assert torch.equal(reach(), causal[0])
    assert reach(None).all()
    for split, merge in [
        (split_by_bare_view, merge_heads),
        (split_heads, merge_without_transpose),
        (split_by_bare_view, merge_without_transpose),  # leaks nothing, yet cuts the sentence
    ]:
        monkeypatch.setattr(chapter, "split_heads", split)
        monkeypatch.setattr(chapter, "merge_heads", merge)
        assert not torch.equal(reach(), causal[0])


def test_memory_is_a_set_and_padding_is_invisible():
    layer = MultiHeadedAttention(4, 16, dropout=0.0)
    query, memory = torch.randn(2, 3, 16), torch.randn(2, 6, 16)
    out = layer(query, memory, memory, PADDING)
    order = torch.randperm(6)
    shuffled = memory[:, order]
    torch.testing.assert_close(layer(query, shuffled, shuffled, PADDING[..., order]), out)
    elsewhere = memory.masked_fill(~PADDING.transpose(1, 2), 100.0)
    torch.testing.assert_close(layer(query, elsewhere, elsewhere, PADDING), out)


def test_dropout_falls_on_the_weights_and_only_while_training():
    layer = MultiHeadedAttention(4, 16, dropout=1.0)
    inputs = [torch.randn(2, n, 16) for n in (3, 7, 7)]
    torch.testing.assert_close(layer(*inputs), layer.project_output.bias.expand(2, 3, -1))
    torch.testing.assert_close(layer.attn.sum(-1), torch.ones(2, 4, 3))
    torch.testing.assert_close(layer.eval()(*inputs), attention_head_by_head(layer, *inputs))
    assert layer.attn.shape == (2, 4, 3, 7)
    assert MultiHeadedAttention(4, 16).dropout.p == 0.1


def test_heads_must_divide_d_model():
    with pytest.raises(ValueError, match="32 is not a multiple of the number of heads 6"):
        MultiHeadedAttention(6, 32)


def test_the_task_asks_for_the_token_before_and_the_marked_one():
    tokens, wanted, marked = two_questions(3)
    assert tokens.shape == (3, 6, 12) and wanted.shape == (3, 6, 10)
    for n in range(3):
        assert tokens[n, :, 11].nonzero().flatten().tolist() == [marked[n]]
        for t in range(6):
            assert tokens[n, t, 5:11].argmax() == t
            assert torch.equal(wanted[n, t, :5], tokens[n, (t - 1) % 6, :5])
            assert torch.equal(wanted[n, t, 5:], tokens[n, marked[n], :5])


def test_one_head_does_not_catch_up_with_two_by_training_longer():
    layers = train_heads(1, steps=300), train_heads(2)
    tokens, wanted, _ = two_questions(1_000)
    one, two = (F.mse_loss(f(tokens, tokens, tokens)[..., :10], wanted) for f in layers)
    assert two < 0.01 and abs(one - 5 / 12) < 0.03


def test_erratum_06_kept_weights_sum_to_one_and_hold_no_graph():
    x = torch.randn(4, 20, 16)
    for kind, is_right in ((MultiHeadedAttention, True), (KeepsDroppedWeights, False)):
        layer = kind(4, 16, dropout=0.1).train()
        assert layer(x, x, x).requires_grad
        off = (layer.attn.sum(-1) - 1).abs().max()
        assert bool(off < 1e-12) is is_right
        assert layer.attn.requires_grad is not is_right
        if is_right:
            copy.deepcopy(layer)
        else:
            with pytest.raises(RuntimeError):
                copy.deepcopy(layer)

    zeros = torch.zeros(1_000, 10, 8)  # every true row is 10 equal weights
    wrong, right = KeepsDroppedWeights(4, 8, dropout=0.1), MultiHeadedAttention(4, 8, dropout=0.1)
    for layer in (wrong, right):
        layer(zeros[:, :1], zeros, zeros)
    theory = math.sqrt(0.1 / 0.9 / 10)  # the spread of a row's sum after dropout
    assert wrong.attn.sum(-1).std().item() == pytest.approx(theory, rel=0.15)
    assert right.attn.sum(-1).std() < 1e-12


def test_the_wrong_version_differs_only_in_what_it_keeps():
    right, wrong = MultiHeadedAttention(4, 16, 0.1), KeepsDroppedWeights(4, 16, 0.1)
    wrong.load_state_dict(right.state_dict())
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(right.eval()(x, x, x, CAUSAL), wrong.eval()(x, x, x, CAUSAL))
