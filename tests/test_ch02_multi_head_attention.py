"""Chapter 2: the layer against PyTorch's, its masks, and what it keeps."""

import copy
import math
import re

import pandas as pd
import pytest
import torch
from conftest import ROOT
from torch import nn

from scripts import ch02_multi_head_attention as chapter
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import (
    KeepsDroppedWeights,
    MultiHeadedAttention,
    attention_head_by_head,
    distance_bias,
    torch_attention_state,
)

PADDING = padding_mask(torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]]))  # (B, 1, S)
CAUSAL = subsequent_mask(6)

MISTAKES = {  # in the definitions that the workbook leaves to the reader
    "a bare view": ("x.unflatten(-1, (h, -1)).transpose(1, 2)", "x.view(len(x), h, x.size(1), -1)"),
    "tokens before heads": (".unflatten(-1, (h, -1)).transpose(1, 2)", ".unflatten(-1, (h, -1))"),
    "sentences mixed with heads": (
        "x.unflatten(-1, (h, -1)).transpose(1, 2)",
        "torch.stack(x.chunk(h, -1)).view(-1, h, x.size(1), x.size(2) // h)",
    ),
    "features turned round, and back": ("transpose(1, 2)", "transpose(1, 2).flip(-1)"),
    "joined for one sentence": (
        ".transpose(1, 2).flatten(-2)",
        ".transpose(1, 2).reshape(1, 4, -1)",
    ),
    "joined as they lie": ("x.transpose(1, 2).flatten(-2)", "x.reshape(len(x), x.size(2), -1)"),
    "no dropout": ("attention(q, k, v, mask, self.dropout)", "attention(q, k, v, mask)"),
    "dropout in evaluation": (", self.dropout)", ", lambda w: F.dropout(w, self.dropout.p))"),
    "dropout on the heads": ("merge_heads(x))", "merge_heads(self.dropout(x)))"),
    "dropped weights kept": ("weights.detach()", "self.dropout(weights).detach()"),
    "the graph kept": ("weights.detach()", "weights"),
    "no output projection": ("self.project_output(merge_heads(x))", "merge_heads(x)"),
    "a mask for each sentence taken for one for each head": ("mask.dim() == 3", "False"),
    "masked after the softmax": (
        "attention(q, k, v, mask, self.dropout)",
        "attention(q, k, v, None, self.dropout)\n"
        "        weights = weights if mask is None else weights * mask",
    ),
    "any number of heads": ("if h < 1 or d_model % h:", "if False:"),
    "no mask": ("(q, k, v, mask,", "(q, k, v, None,"),
    "key and value exchanged": ("(q, k, v, mask,", "(q, v, k, mask,"),
    "one projection for two": ("self.project_key(key)", "self.project_query(key)"),
}

pytestmark = pytest.mark.usefixtures("float64")


def pair(h=4, d_model=16):
    """Our layer and PyTorch's with the same weights and non-zero biases."""
    ours = MultiHeadedAttention(h, d_model, dropout=0.0)
    theirs = nn.MultiheadAttention(d_model, h, batch_first=True)
    theirs.load_state_dict(torch_attention_state(ours))
    return ours, theirs


@pytest.mark.parametrize("h", [1, 4, 16])
@pytest.mark.parametrize(
    "length, mask, their_masks",
    [
        (6, None, {}),
        (3, PADDING, {"key_padding_mask": ~PADDING[:, 0]}),
        (6, CAUSAL & PADDING, {"attn_mask": ~CAUSAL[0], "key_padding_mask": ~PADDING[:, 0]}),
    ],
    ids=["no mask", "padding, T=3, S=6", "causal and padding"],
)
def test_equals_torch_layer_forward_and_gradient(h, length, mask, their_masks):
    ours, theirs = pair(h)
    inputs = [torch.randn(2, n, 16, requires_grad=True) for n in (length, 6, 6)]
    output = ours(*inputs, mask)
    reference, weights = theirs(*inputs, average_attn_weights=False, **their_masks)
    torch.testing.assert_close((output, ours.attn), (reference, weights))
    pull = torch.randn_like(output)
    *by_inputs, wq, bq, wk, bk, wv, bv, wo, bo = torch.autograd.grad(
        output, [*inputs, *ours.parameters()], pull
    )
    stacked = (*by_inputs, torch.cat((wq, wk, wv)), torch.cat((bq, bk, bv)), wo, bo)
    expected = torch.autograd.grad(reference, [*inputs, *theirs.parameters()], pull)
    torch.testing.assert_close(stacked, expected)


def test_additive_masks_one_for_all_heads_or_one_each():
    ours, theirs = pair()
    x = torch.randn(2, 6, 16)
    each = torch.randn(2, 4, 6, 6)  # (B, H, T, S)
    expected, _ = theirs(x, x, x, attn_mask=each.flatten(0, 1))
    torch.testing.assert_close(ours(x, x, x, each), expected)
    shared = torch.randn(2, 6, 6)  # (B, T, S)
    expected, _ = theirs(x, x, x, attn_mask=shared.repeat_interleave(4, dim=0))
    torch.testing.assert_close(ours(x, x, x, shared), expected)
    ours(x, x, x, CAUSAL.double())  # zeros and ones as floats are a nudge, not a mask
    assert (ours.attn.triu(1) > 0).any()


def test_distance_bias_by_loop():
    bias = distance_bias(5, [0.5, 2.0])
    for h, slope in enumerate([0.5, 2.0]):
        expected = [[-slope * abs(t - s) for s in range(5)] for t in range(5)]
        assert bias[0, h].tolist() == expected


def test_dropout_falls_on_the_weights_and_only_while_training():
    layer = MultiHeadedAttention(4, 16, dropout=1.0)
    inputs = [torch.randn(2, n, 16) for n in (3, 7, 7)]
    torch.testing.assert_close(layer(*inputs), layer.project_output.bias.expand(2, 3, -1))
    torch.testing.assert_close(layer.eval()(*inputs), attention_head_by_head(layer, *inputs))
    assert MultiHeadedAttention(4, 16).dropout.p == 0.1


def test_heads_must_divide_d_model():
    with pytest.raises(ValueError, match="32 is not a multiple of the number of heads 6"):
        MultiHeadedAttention(6, 32)


def test_erratum_06_kept_weights_sum_to_one_and_hold_no_graph():
    x = torch.randn(4, 20, 16)
    right, wrong = (
        kind(4, 16, dropout=0.1) for kind in (MultiHeadedAttention, KeepsDroppedWeights)
    )
    for layer in (right, wrong):
        assert layer(x, x, x).requires_grad
    torch.testing.assert_close(right.attn.sum(-1), torch.ones(4, 4, 20))
    assert not right.attn.requires_grad
    copy.deepcopy(right)
    assert (wrong.attn.sum(-1) - 1).abs().max() > 0.1 and wrong.attn.requires_grad
    with pytest.raises(RuntimeError):
        copy.deepcopy(wrong)


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_mistake_in_the_readers_code_fails_a_check_before_the_comparison_with_torch(mistake):
    text = (ROOT / "scripts/ch02_multi_head_attention.py").read_text("utf-8")
    right, wrong = MISTAKES.get(mistake, ("", ""))
    assert right in text
    start, end = "## Splitting into heads", "## The same numbers as PyTorch"
    part = text[text.index(start) : text.index(end)]
    cells = [cell for cell in re.split(r"(?m)^# %%", part)[1:] if not cell.startswith(" [mark")]
    space = dict(vars(chapter))
    space.update(pd=pd, math=math, titled=lambda chart, *_, **__: chart)
    code = "\n".join(cell.split("\n", 1)[1] for cell in cells)
    run = lambda: exec(code.replace(right, wrong) if mistake else code, space)  # noqa: E731
    if mistake is None:
        run()
    else:
        with pytest.raises((AssertionError, RuntimeError)):
            run()


@pytest.mark.audit
@pytest.mark.parametrize("seed", range(8))
def test_what_is_said_of_eight_seeds(seed, monkeypatch):
    torch.manual_seed(1)
    letters, marked = torch.randint(4, 14, (2_000, 6)), torch.randint(6, (2_000,))
    tokens, answers = chapter.two_questions(letters, marked)

    def missed(h, asked, hidden=0):
        """The share of the variance that is missed, and that of the letters that are named."""
        layer, behind = chapter.train_heads(h, asked, hidden, seed)
        wanted = answers[..., : asked * 14]
        output = behind(layer(tokens, tokens, tokens)[0])[..., : asked * 14]
        named, right = (x.unflatten(-1, (asked, 14)).argmax(-1) for x in (output, wanted))
        error = (output - wanted).square().mean() / wanted.var((0, 1)).mean()
        return error.item(), (named == right).double().mean().item()

    assert 0.4195 < missed(1, 2)[0] < 0.4245
    share, named = missed(1, 2, 144)
    assert 0.0065 < share < 0.0165 and named > 0.999
    assert max(missed(1, 1), missed(2, 2), missed(3, 2))[0] < 0.002
    monkeypatch.setattr(nn, "ReLU", nn.Identity)
    assert 0.415 < missed(1, 2, 144)[0] < 0.425
