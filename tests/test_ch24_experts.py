"""Chapter 24: a mixture of experts by loop, its padding, its balance, and what of it is stored."""

import copy

import pytest
import torch
from saying import ran

from scripts.ch01_attention import padding_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import make_model
from scripts.ch22_todays_block import SwiGLU
from scripts.ch24_experts import (
    MixtureOfExperts,
    SparseEncoderLayer,
    active_parameters,
    balance_penalty,
    move_bias,
)
from scripts.exercises.ch24 import dropped_share

close = torch.testing.assert_close

pytestmark = pytest.mark.usefixtures("float64")


def test_one_expert_is_the_dense_layer():
    dense, lone = SwiGLU(6, 10, 0.0), MixtureOfExperts(6, 10, 0.0, experts=1, top=1, shared=0)
    lone.experts[0].load_state_dict(dense.state_dict())
    x = torch.randn(2, 5, 6)
    assert torch.equal(lone(x), dense(x))
    gradients = [
        torch.autograd.grad(part(x).sin().sum(), list(of.parameters()))
        for part, of in ((lone, lone.experts[0]), (dense, dense))
    ]
    close(*gradients)


@pytest.mark.parametrize("top", [1, 2, 3])
def test_a_mixture_by_loop(top):
    layer, x = MixtureOfExperts(6, 10, 0.0, experts=4, top=top, shared=2), torch.randn(11, 6)
    for row, found in zip(x, layer(x), strict=True):
        p = (layer.router.weight @ row).softmax(0)
        best = p.argsort(descending=True)[:top].tolist()
        whole = sum(p[e] for e in best) if top > 1 else 1.0
        wanted = sum(p[e] / whole * layer.experts[e](row) for e in best)
        close(found, wanted + layer.shared[0](row) + layer.shared[1](row))


@pytest.mark.parametrize("top", [1, 2])
def test_the_router_learns(top):
    layer = MixtureOfExperts(6, 10, 0.0, experts=4, top=top, shared=0)
    layer(torch.randn(11, 6)).sin().sum().backward()
    assert layer.router.weight.grad.abs().max() > 1e-4


def test_a_mixture_drops_nobody_and_knows_no_order():
    layer, x = MixtureOfExperts(6, 10, 0.0, experts=4, top=2, shared=0), torch.randn(1, 20, 6)
    order = torch.randperm(20)
    close(layer(x[:, order]), layer(x)[:, order])
    layer.bias[3] = layer.bias[1] = 50.0  # all to the same two
    y = layer(x)
    assert layer.visits.tolist() == [0, 20, 0, 20]
    p = (x @ layer.router.weight.T).softmax(-1)[..., [1, 3], None]  # the bias isn't in the weights
    both = torch.stack((layer.experts[1](x), layer.experts[3](x)), dim=-2)
    close(y, (p * both).sum(-2) / p.sum(-2))
    y.sum().backward()
    assert (layer.experts[0].gate.weight.grad == 0).all()  # no token came, nothing to learn
    assert layer(x[:, :0]).shape == (1, 0, 6)


def test_experts_have_dropout():
    layer, x = MixtureOfExperts(6, 10, 1.0, experts=4, top=2, shared=1), torch.randn(5, 6)
    assert (layer(x) == 0).all()
    assert (layer.eval()(x) != 0).any()


# Padding


def test_padding_is_neither_routed_nor_counted():
    layer = MixtureOfExperts(6, 10, 0.0, experts=4, top=2, shared=1)
    x, real = torch.randn(2, 5, 6), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    alone = layer(x[real])
    penalty, visits = layer.penalty, layer.visits
    assert visits.sum() == 2 * 7
    padded = x.clone().requires_grad_()
    y = layer(padded, real)
    close(y[real], alone)
    close(layer.penalty, penalty)
    assert torch.equal(layer.visits, visits) and (y[~real] == 0).all()
    (slope,) = torch.autograd.grad(y.sin().sum() + layer.penalty, padded)
    assert (slope[~real] == 0).all() and (slope[real] != 0).any()
    close(layer(x, torch.ones(2, 5, dtype=torch.bool)), layer(x))


def test_a_layer_passes_its_mask_on():
    layer = SparseEncoderLayer(
        8, MultiHeadedAttention(2, 8, 0.0), MixtureOfExperts(8, 6, 0.0, experts=4), 0.0
    )
    src, x = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]), torch.randn(2, 4, 8)
    y = layer(x, padding_mask(src))
    assert layer.feed_forward.visits.sum() == 2 * 6
    close(y[1:, :2], layer(x[1:, :2], padding_mask(src[1:, :2])))
    close(layer(x), layer(x, torch.ones(2, 1, 4, dtype=torch.bool)))


# Balance


def test_the_balance_penalty():
    probs, visits = torch.randn(30, 5).softmax(-1), torch.tensor([20, 0, 7, 30, 3])
    by_loop = sum(v / 60 * probs[:, e].mean() for e, v in enumerate(visits.tolist()))
    close(balance_penalty(probs, visits), 5 * by_loop)
    even = torch.full((10, 5), 0.2)
    close(balance_penalty(even, torch.full((5,), 2)), torch.tensor(1.0))
    for top in (1, 2):  # the most is E/k
        favourites = (torch.arange(5) < top).long()
        sure = (favourites / top).expand(10, 5)
        close(balance_penalty(sure, 10 * favourites), torch.tensor(5.0 / top))


def test_the_penalty_pulls_the_favourite_down():
    logits = torch.randn(30, 5, requires_grad=True)
    visits = torch.tensor([30, 0, 0, 0, 0])  # all to the first
    (slope,) = torch.autograd.grad(balance_penalty(logits.softmax(-1), visits), logits)
    assert (slope[:, 0] > 0).all() and (slope[:, 1:] < 0).all()


def test_the_idle_are_raised():
    layer = MixtureOfExperts(6, 10, experts=3, top=1)
    layer.visits = torch.tensor([9, 3, 0])
    move_bias(layer, speed=0.5)
    assert layer.bias.tolist() == [-0.5, 0.5, 0.5]


def test_the_bias_is_stored_with_the_weights_and_is_no_parameter():
    layer = MixtureOfExperts(6, 10, 0.0, experts=3, top=1)
    layer.bias[:] = torch.tensor([0.0, 5.0, 0.0])
    assert "bias" in layer.state_dict() and "bias" not in dict(layer.named_parameters())
    again = MixtureOfExperts(6, 10, 0.0, experts=3, top=1)
    again.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = torch.randn(9, 6)
    assert torch.equal(again(x), layer(x)) and again.visits.tolist() == [0, 9, 0]


# Counting


def test_active_parameters():
    model = make_model(11, 11, N=1, d_model=8, d_ff=16, h=2)
    total = sum(p.numel() for p in model.parameters())
    assert active_parameters(model) == total  # without experts nothing is idle
    layer = MixtureOfExperts(8, 6, experts=5, top=2, shared=1)
    model.encoder.layers[0].feed_forward = layer
    total = sum(p.numel() for p in model.parameters())
    assert total - active_parameters(model) == 3 * 3 * 8 * 6  # three idle, three matrices each


# What the chapter says.


def test_what_the_chapter_says():
    said = ran("ch24")
    in_use, late = said.in_use, said.late
    assert in_use["none"] <= 4 and {in_use[n] for n in in_use if n != "none"} == {8}
    assert max(late["penalty"].max(), late["bias"].max()) < 0.2
    errors = [error for name, (_, _, error) in said.routings.items() if "0" not in name]
    assert max(errors) < 1.1 * min(errors) and said.moved > 0.2
    x, layers = torch.randn(256, 16) + 1.0, {n: layer for n, (_, layer, _) in said.routings.items()}
    dropped = {n: dropped_share(layer.route(x)[1], 8, 1.25) for n, layer in layers.items()}
    assert 0.4 < dropped["none"] < 0.6 and max(dropped["penalty"], dropped["bias"]) < 0.03
