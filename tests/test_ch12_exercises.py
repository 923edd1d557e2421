"""Chapter 12's exercises: checkers distinguish common mistakes and accept other right answers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exercising import assert_told_apart, rejection
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from scripts.book.exercises import check
from scripts.ch01_attention import attention, subsequent_mask
from scripts.exercises import ch12 as ours
from scripts.exercises.ch12 import chunked_z_loss, packed_attention

# Attention without spreading


def unscaled(q, k, v, lengths, causal):
    return packed_attention(q * q.size(-1) ** 0.5, k, v, lengths, causal)


def always_causal(q, k, v, lengths, causal):
    return packed_attention(q, k, v, lengths, True)


# Another loss in chunks


def without_the_rest(x, weight, bias, chunk):
    """Only whole chunks, unless there is none."""
    whole = len(x) // chunk * chunk or len(x)
    return chunked_z_loss(x[:whole], weight, bias, chunk)


def naive_exp(x, weight, bias, chunk):
    def piece(rows, weight, bias):
        return F.linear(rows, weight, bias).exp().sum(1).log().square().sum()

    parts = x.split(chunk)
    return sum(checkpoint(piece, rows, weight, bias, use_reentrant=False) for rows in parts)


# The likeliest mistakes


def open_packing(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], causal: bool) -> Tensor:
    """The pack is one long sentence."""
    return attention(q, k, v, subsequent_mask(len(q))[0] if causal else None)[0]


def packing_that_sees_ahead(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], causal: bool
) -> Tensor:
    """Blocks without a triangle in them."""
    return packed_attention(q, k, v, lengths, causal=False)


class DeafZLoss(Function):
    """Ignores the gradient that comes from above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = F.linear(x, weight, bias)
        by_logits = 2 * logits.logsumexp(1, keepdim=True) * logits.softmax(1)
        ctx.save_for_backward(by_logits @ weight, by_logits.T @ x, by_logits.sum(0))
        return logits.logsumexp(1).square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


def looped_z_loss(x: Tensor, weight: Tensor, bias: Tensor, chunk: int) -> Tensor:
    """Forward in chunks, but autograd remembers all of them."""
    parts = (F.linear(rows, weight, bias) for rows in x.split(chunk))
    return sum(logits.logsumexp(1).square().sum() for logits in parts)


def whole_z_loss(x: Tensor, weight: Tensor, bias: Tensor, chunk: int) -> Tensor:
    """One checkpoint around all chunks, so that the backward pass makes all logits again."""
    return checkpoint(looped_z_loss, x, weight, bias, chunk, use_reentrant=False)


def few_chunks_z_loss(x: Tensor, weight: Tensor, bias: Tensor, chunk: int) -> Tensor:
    """`Tensor.chunk` takes how many chunks there are, not how long they are."""
    return chunked_z_loss(x, weight, bias, -(-len(x) // chunk))


def deaf_z_loss(x, weight, bias, chunk):
    return DeafZLoss.apply(x, weight, bias)


WRONG = {
    "packed_attention": {
        open_packing: "looks at other sentences",
        packing_that_sees_ahead: "causal=True a row sees what follows",
        always_causal: "causal=False a row does not see what follows",
        unscaled: "The result isn't softmax",
    },
    "chunked_z_loss": {
        deaf_z_loss: "gradient of 3 times the loss with respect to x",
        looped_z_loss: "half of all logits",
        without_the_rest: "the shorter last one",
        naive_exp: "overflow",
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    wrong = {words: candidate for candidate, words in WRONG[name].items()}
    assert_told_apart(getattr(ours, f"check_{name}"), wrong)


@pytest.mark.parametrize("candidate", [whole_z_loss, few_chunks_z_loss])
def test_all_logits_at_once_are_noticed_in_the_backward_pass_too(candidate):
    assert "half of all logits" in rejection(ours.check_chunked_z_loss, candidate)


def test_other_right_answers_pass():
    """A checker asks for the result, not for our way to it."""

    def sentence_by_sentence(q, k, v, lengths, causal):
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        outs = []
        for query, key, value in parts:
            scores = query @ key.T / query.size(-1) ** 0.5
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            outs.append(scores.softmax(-1) @ value)
        return torch.cat(outs)

    def by_one_matrix(x, weight, bias, chunk):
        """The bias as one more column of the weights: gradients flow through `cat`."""
        ones = torch.ones_like(x[:, :1])
        both = torch.cat((weight, bias[:, None]), 1), torch.zeros_like(bias)
        return chunked_z_loss(torch.cat((x, ones), 1), *both, chunk)

    def into_a_zero(x, weight, bias, chunk):
        total = torch.zeros(())
        for rows in x.split(chunk):
            total += chunked_z_loss(rows, weight, bias, chunk)
        return total

    class ByAutograd(Function):
        """All gradients are made in the forward pass, by autograd: it keeps logits for a moment."""

        @staticmethod
        def forward(ctx, x, weight, bias, chunk):
            ours = [t.detach().requires_grad_() for t in (x, weight, bias)]
            losses = []
            with torch.enable_grad():
                for start in range(0, len(x), chunk):
                    rows = ours[0][start : start + chunk]
                    losses.append(F.linear(rows, *ours[1:]).logsumexp(1).square().sum())
                    losses[-1].backward()
                    losses[-1] = losses[-1].detach()
            ctx.save_for_backward(*(t.grad for t in ours))
            return sum(losses)

        @staticmethod
        def backward(ctx, grad):
            return *(stored * grad for stored in ctx.saved_tensors), None

    check(sentence_by_sentence, "packed_attention")
    for right in (ByAutograd.apply, by_one_matrix, into_a_zero):
        check(right, "chunked_z_loss")


def test_the_z_loss_has_its_gradient():
    shapes = ((5, 3), (7, 3), (7,))
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *inputs: chunked_z_loss(*inputs, 2), given)
