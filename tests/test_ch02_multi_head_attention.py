"""Chapter 2: the layer against PyTorch's, its masks, its heads, and what it keeps."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scripts.ch02_multi_head_attention as chapter
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import (
    KeepsDroppedWeights,
    MultiHeadedAttention,
    attend_in_heads,
    attention_head_by_head,
    attention_multiplications,
    bytes_held,
    counted_multiplications,
    depends_on,
    distance_bias,
    labelled_entries,
    load_torch_attention,
    merge_heads,
    merge_without_transpose,
    row_sum_spread,
    split_by_bare_view,
    split_heads,
)

IDS = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]])
PADDING, CAUSAL = padding_mask(IDS), subsequent_mask(6)


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def pair(h=4, d_model=16):
    """Our layer and PyTorch's with the same weights, biases not zero."""
    theirs = nn.MultiheadAttention(d_model, h, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = MultiHeadedAttention(h, d_model, dropout=0.0)
    load_torch_attention(ours, theirs)
    return ours, theirs


def parity_gap(ours, theirs, length, mask, their_masks):
    """Greatest difference of outputs, weights and of the gradients by query and memory."""
    query = torch.randn(2, length, 16, requires_grad=True)
    memory = torch.randn(2, 6, 16, requires_grad=True)
    mine = ours(query, memory, memory, mask)
    other, weights = theirs(query, memory, memory, average_attn_weights=False, **their_masks)
    probe = torch.randn_like(mine)
    grads = [torch.autograd.grad((y * probe).sum(), (query, memory)) for y in (mine, other)]
    pairs = [(mine, other), (ours.attn, weights), *zip(*grads, strict=True)]
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


@pytest.mark.parametrize("fault", [unscaled, mask_forgotten])
def test_parity_notices_a_planted_fault_in_attention(monkeypatch, fault):
    monkeypatch.setattr(chapter, "attention", fault)
    assert parity_gap(*pair(), 6, CAUSAL, {"attn_mask": ~CAUSAL[0]}) > 0.01


def test_parity_notices_a_planted_fault_in_the_split(monkeypatch):
    monkeypatch.setattr(chapter, "split_heads", split_by_bare_view)
    assert parity_gap(*pair(), 6, None, {}) > 0.01


def test_torch_layers_boolean_masks_mean_the_opposite():
    ours, theirs = pair()
    turned_round = {"key_padding_mask": PADDING[:, 0]}
    assert not parity_gap(ours, theirs, 6, PADDING, turned_round) < 0.01  # or NaN


def test_additive_masks_one_for_all_heads_or_one_each():
    ours, theirs = pair()
    x = torch.randn(2, 6, 16)
    each = torch.randn(2, 4, 6, 6)  # (B, H, T, S)
    expected, _ = theirs(x, x, x, attn_mask=each.flatten(0, 1))
    torch.testing.assert_close(ours(x, x, x, each), expected)

    shared = torch.randn(2, 6, 6)  # (B, T, S)
    q, k, v = (
        split_heads(p(x), 4) for p in (ours.project_query, ours.project_key, ours.project_value)
    )
    reference = F.scaled_dot_product_attention(q, k, v, attn_mask=shared[:, None])
    torch.testing.assert_close(
        ours(x, x, x, shared), ours.project_output(reference.transpose(1, 2).flatten(-2))
    )

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
    x = labelled_entries(tokens=5, heads=3, features=2)
    parts, wrong = split_heads(x, 3), split_by_bare_view(x, 3)
    by_loop = torch.stack([x[:, :, 2 * i : 2 * i + 2] for i in range(3)], dim=1)
    assert torch.equal(parts, by_loop)
    assert torch.equal(merge_heads(parts), x)
    assert wrong.shape == parts.shape and not torch.equal(wrong, by_loop)
    assert not torch.equal(merge_without_transpose(parts), x)


def test_dependence_is_the_mask_and_wrong_reshapes_break_it():
    x, causal = torch.randn(1, 4, 8), subsequent_mask(4)
    layer = MultiHeadedAttention(2, 8, dropout=0.0)
    assert torch.equal(depends_on(lambda x: layer(x, x, x, causal), x), causal[0])
    assert depends_on(lambda x: layer(x, x, x), x).all()
    for split, merge in [
        (split_by_bare_view, merge_heads),
        (split_heads, merge_without_transpose),
        (split_by_bare_view, merge_without_transpose),
    ]:
        reach = depends_on(
            lambda x, s=split, m=merge: attend_in_heads(x, 2, s, m, causal),
            x,
        )
        assert not torch.equal(reach, causal[0])


def test_equals_one_head_at_a_time():
    layer = MultiHeadedAttention(4, 16, dropout=0.0)
    query, memory = torch.randn(2, 3, 16), torch.randn(2, 7, 16)
    reference = attention_head_by_head(layer, query, memory, memory)
    torch.testing.assert_close(layer(query, memory, memory), reference)
    assert layer.attn.shape == (2, 4, 3, 7)


def test_memory_is_a_set_and_padding_is_invisible():
    layer = MultiHeadedAttention(4, 16, dropout=0.0)
    query, memory = torch.randn(2, 3, 16), torch.randn(2, 6, 16)
    out = layer(query, memory, memory, PADDING)
    order = torch.randperm(6)
    shuffled = memory[:, order]
    torch.testing.assert_close(layer(query, shuffled, shuffled, PADDING[..., order]), out)
    elsewhere = memory.masked_fill(~PADDING.transpose(1, 2), 100.0)
    torch.testing.assert_close(layer(query, elsewhere, elsewhere, PADDING), out)


def test_gradients_by_finite_differences():
    layer = MultiHeadedAttention(2, 4, dropout=0.0)
    query = torch.randn(1, 2, 4, requires_grad=True)
    memory = torch.randn(1, 3, 4, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, m: layer(q, m, m), (query, memory))


def test_heads_must_divide_d_model():
    with pytest.raises(ValueError, match="32 is not a multiple of the number of heads 6"):
        MultiHeadedAttention(6, 32)


def test_heads_are_free():
    query, memory = torch.randn(1, 5, 16), torch.randn(1, 7, 16)
    for h in (1, 2, 8):
        layer = MultiHeadedAttention(h, 16, dropout=0.0)
        assert sum(p.numel() for p in layer.parameters()) == 4 * (16 * 16 + 16)
        counted = counted_multiplications(layer, query, memory)
        assert counted == attention_multiplications(5, 7, 16)


def test_erratum_06_kept_weights_sum_to_one_and_hold_no_graph():
    x = torch.randn(4, 20, 16)
    for kind, is_right in ((MultiHeadedAttention, True), (KeepsDroppedWeights, False)):
        layer = kind(4, 16, dropout=0.1).train()
        out = layer(x, x, x)
        assert out.requires_grad
        off = (layer.attn.sum(-1) - 1).abs().max()
        assert bool(off < 1e-12) is is_right
        assert layer.attn.requires_grad is not is_right
        assert (bytes_held(kind(4, 16), x) == 0) is is_right
        if is_right:
            copy.deepcopy(layer)
        else:
            with pytest.raises(RuntimeError):
                copy.deepcopy(layer)
    theory = math.sqrt(0.1 / 0.9 / 10)
    wrong = row_sum_spread(KeepsDroppedWeights(4, 8, dropout=0.1), 10)
    assert wrong == pytest.approx(theory, rel=0.15)
    assert row_sum_spread(MultiHeadedAttention(4, 8, dropout=0.1), 10) < 1e-12


def test_the_wrong_version_differs_only_in_what_it_keeps():
    right, wrong = MultiHeadedAttention(4, 16, 0.1), KeepsDroppedWeights(4, 16, 0.1)
    wrong.load_state_dict(right.state_dict())
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(right.eval()(x, x, x, CAUSAL), wrong.eval()(x, x, x, CAUSAL))
