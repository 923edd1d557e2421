"""Chapter 1: attention against PyTorch's, masks, rows with nothing to see."""

import math

import pytest
import torch
import torch.nn.functional as F

from scripts.ch01_attention import attention, masked_softmax, padding_mask, subsequent_mask

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

pytestmark = pytest.mark.usefixtures("float64")


def random_heads(t: int = 5, s: int = 5) -> list[torch.Tensor]:
    """Query (2, 3, T, 8), key (2, 3, S, 8) and value (2, 3, S, 7)."""
    return [torch.randn(2, 3, *size, requires_grad=True) for size in ((t, 8), (s, 8), (s, 7))]


@pytest.mark.parametrize("name", MASKS)
def test_attention_equals_pytorch_forward_and_gradient(name):
    """The gradient of a mask that is added, too: it may be learned."""
    heads, mask = random_heads(), MASKS[name]
    inputs = heads
    if mask is not None and mask.is_floating_point():
        inputs = [*heads, mask := mask.clone().requires_grad_()]
    outputs = attention(*heads, mask)[0], F.scaled_dot_product_attention(*heads, attn_mask=mask)
    torch.testing.assert_close(*outputs)
    pull = torch.randn_like(outputs[0])
    torch.testing.assert_close(*(torch.autograd.grad(out, inputs, pull) for out in outputs))


def softmax_filled(scores, mask, fill):
    """The usual shortcut, wrong for a row that allows nothing."""
    return scores.masked_fill(~mask, fill).softmax(dim=-1)


def empty_rows_are_silent(softmax, empty):
    """Do the rows `empty` (T) give output 0 and gradient 0, and is everything finite?"""
    q, k, v = (torch.randn(len(empty), 4, requires_grad=True) for _ in range(3))
    output = softmax(q @ k.mT) @ v  # (T, 4)
    from_all = torch.autograd.grad(output.sum(), (q, k, v), retain_graph=True)
    from_empty = torch.autograd.grad(output[empty].sum(), (q, k, v))
    finite = all(t.isfinite().all() for t in (output, *from_all))
    return bool(finite and all((t == 0).all() for t in (output[empty], *from_empty)))


def test_erratum_05_masked_rows_are_zero():
    mask = (padding_mask(torch.tensor([[0, 0, 7, 9]])) & subsequent_mask(4))[0]
    added = torch.zeros(4, 4).masked_fill(~mask, -math.inf)
    empty = ~mask.any(-1)
    for either in (mask, added):
        assert empty_rows_are_silent(lambda s, m=either: masked_softmax(s, m), empty)
    half = masked_softmax(torch.randn(4, 4).half(), mask)  # in which −1e9 can't be written
    assert half.dtype == torch.float16 and (half[~mask] == 0).all() and half.isfinite().all()
    with pytest.raises(RuntimeError, match="overflow"):
        torch.randn(4, 4).half().masked_fill(~mask, -1e9)
    for fill in (-1e9, -math.inf):  # the wrong versions: even weights, and NaN
        assert not empty_rows_are_silent(lambda s, x=fill: softmax_filled(s, mask, x), empty)


def test_a_real_nan_stays_visible_and_reaches_no_other_row():
    scores, mask = torch.randn(4, 4), subsequent_mask(4)[0]
    scores[2, 1] = math.nan
    assert masked_softmax(scores, mask).isnan().any(-1).tolist() == [False, False, True, False]


def test_pytorch_gives_an_empty_row_zeros_or_nan():
    """What the chapter says of both: the second, where its weights are asked for."""
    mask, x = subsequent_mask(3)[0].tril(-1), torch.randn(1, 3, 4)
    assert (F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[0, 0] == 0).all()
    layer = torch.nn.MultiheadAttention(4, 1, batch_first=True)
    assert layer(x, x, x, attn_mask=~mask)[0][0, 0].isnan().all()
    assert layer(x, x, x, attn_mask=~mask, need_weights=False)[0].isfinite().all()


def test_integer_masks_are_refused():
    with pytest.raises(TypeError, match="boolean"):
        attention(*random_heads(), torch.ones(5, 5, dtype=torch.long).tril())


def test_masks():
    assert padding_mask(IDS).tolist() == [[[True] * 5], [[True, True, True, False, False]]]
    assert padding_mask(IDS, pad=4)[0].tolist() == [[False, True, True, True, True]]
    hidden = torch.nn.Transformer.generate_square_subsequent_mask(6) == -math.inf
    assert torch.equal(subsequent_mask(6), ~hidden.unsqueeze(0))
