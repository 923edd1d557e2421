"""Chapter 24: a mixture of experts by loop, its padding, its balance, and what of it is stored."""

import pytest
import torch

from scripts.ch01_attention import padding_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import make_model
from scripts.ch24_experts import (
    MixtureOfExperts,
    SparseEncoderLayer,
    active_parameters,
    balance_penalty,
    move_bias,
)

close = torch.testing.assert_close

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("top", [1, 2, 3])
def test_a_mixture_by_loop_and_its_gradients(top):
    layer, x = MixtureOfExperts(6, 10, 0.0, experts=4, top=top, shared=2), torch.randn(11, 6)
    by_loop = []
    for row in x:
        p = (layer.router.weight @ row).softmax(0)
        best = p.argsort(descending=True)[:top].tolist()
        whole = sum(p[e] for e in best) if top > 1 else 1.0
        mixed = sum(p[e] / whole * layer.experts[e](row) for e in best)
        by_loop.append(mixed + layer.shared[0](row) + layer.shared[1](row))
    outputs = layer(x), torch.stack(by_loop)
    parameters = list(layer.parameters())
    gradients = [
        torch.autograd.grad(y.sin().sum(), parameters, materialize_grads=True) for y in outputs
    ]
    close(*outputs)
    close(*gradients)
    assert gradients[0][0].abs().max() > 1e-4  # the router learns, with a single expert, too


def test_a_mixture_drops_nobody_and_a_bias_chooses_but_doesnt_weigh():
    layer, x = MixtureOfExperts(6, 10, 0.0, experts=4, top=2, shared=0), torch.randn(1, 20, 6)
    layer.bias[3] = layer.bias[1] = 50.0  # all to the same two
    y = layer(x)
    assert layer.visits.tolist() == [0, 20, 0, 20]
    p = (x @ layer.router.weight.T).softmax(-1)[..., [1, 3], None]
    both = torch.stack((layer.experts[1](x), layer.experts[3](x)), dim=-2)
    close(y, (p * both).sum(-2) / p.sum(-2))
    assert layer(x[:, :0]).shape == (1, 0, 6)


def test_experts_have_dropout():
    layer, x = MixtureOfExperts(6, 10, 1.0, experts=4, top=2, shared=1), torch.randn(5, 6)
    assert not layer(x).any() and layer.eval()(x).any()


# Padding


def test_padding_is_neither_routed_nor_counted():
    layer = MixtureOfExperts(6, 10, 0.0, experts=4, top=2, shared=1)
    x, real = torch.randn(2, 5, 6), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    alone, penalty, visits = layer(x[real]), layer.penalty, layer.visits
    assert visits.sum() == 2 * 7
    padded = x.clone().requires_grad_()
    y = layer(padded, real)
    close(y[real], alone)
    close(layer.penalty, penalty)
    assert torch.equal(layer.visits, visits) and (y[~real] == 0).all()
    (slope,) = torch.autograd.grad(y.sin().sum() + layer.penalty, padded)
    assert (slope[~real] == 0).all() and (slope[real] != 0).any()


def test_a_layer_passes_its_mask_on():
    mixture = MixtureOfExperts(8, 6, 0.0, experts=4)
    layer = SparseEncoderLayer(8, MultiHeadedAttention(2, 8, 0.0), mixture, 0.0)
    src, x = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]), torch.randn(2, 4, 8)
    y = layer(x, padding_mask(src))
    assert mixture.visits.sum() == 2 * 6
    close(y[1:, :2], layer(x[1:, :2], padding_mask(src[1:, :2])))
    close(layer(x), layer(x, torch.ones(2, 1, 4, dtype=torch.bool)))


# Balance


def test_the_balance_penalty_and_whom_it_pulls_down():
    logits = torch.randn(30, 5, requires_grad=True)
    probs, visits = logits.softmax(-1), torch.tensor([20, 0, 7, 30, 3])
    by_loop = sum(v / 60 * probs[:, e].mean() for e, v in enumerate(visits.tolist()))
    close(balance_penalty(probs, visits), 5 * by_loop)
    to_the_first = balance_penalty(probs, torch.tensor([30, 0, 0, 0, 0]))
    (slope,) = torch.autograd.grad(to_the_first, logits)
    assert (slope[:, 0] > 0).all() and (slope[:, 1:] < 0).all()


def test_the_idle_are_raised_and_the_bias_is_stored():
    layer = MixtureOfExperts(6, 10, experts=3, top=1)
    layer.visits = torch.tensor([9, 3, 0])
    move_bias(layer, speed=0.5)
    assert layer.bias.tolist() == [-0.5, 0.5, 0.5]
    assert "bias" in layer.state_dict() and "bias" not in dict(layer.named_parameters())


# Counting


def test_active_parameters():
    model = make_model(11, 11, N=1, d_model=8, d_ff=16, h=2)
    total = sum(p.numel() for p in model.parameters())
    assert active_parameters(model) == total  # without experts nothing is idle
    model.encoder.layers[0].feed_forward = MixtureOfExperts(8, 6, experts=5, top=2, shared=1)
    total = sum(p.numel() for p in model.parameters())
    assert total - active_parameters(model) == 3 * 3 * 8 * 6  # three idle, three matrices each
