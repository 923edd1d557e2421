"""Chapter 24: a mixture of experts by loop, its gradients, its padding, what of it is stored."""

import pytest
import torch

from scripts.ch01_attention import padding_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch24_experts import MixtureOfExperts, SparseEncoderLayer

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


def test_experts_have_dropout():
    layer, x = MixtureOfExperts(6, 10, 1.0, experts=4, top=2, shared=1), torch.randn(5, 6)
    assert not layer(x).any() and layer.eval()(x).any()


def test_padding_is_neither_routed_nor_counted():
    layer = MixtureOfExperts(6, 10, 0.0, experts=4, top=2, shared=1)
    x, real = torch.randn(2, 5, 6), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    alone, probs, visits = layer(x[real]), layer.probs, layer.visits
    assert visits.sum() == 2 * 7
    padded = x.clone().requires_grad_()
    y = layer(padded, real)
    close(y[real], alone)
    close(layer.probs, probs)
    assert torch.equal(layer.visits, visits) and (y[~real] == 0).all()
    (slope,) = torch.autograd.grad(y.sin().sum() + layer.probs.sin().sum(), padded)
    assert (slope[~real] == 0).all() and (slope[real] != 0).any()


def test_a_layer_passes_its_mask_on():
    mixture = MixtureOfExperts(8, 6, 0.0, experts=4)
    layer = SparseEncoderLayer(8, MultiHeadedAttention(2, 8, 0.0), mixture, 0.0)
    src, x = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]), torch.randn(2, 4, 8)
    y = layer(x, padding_mask(src))
    assert mixture.visits.sum() == 2 * 6
    close(y[1:, :2], layer(x[1:, :2], padding_mask(src[1:, :2])))
    close(layer(x), layer(x, torch.ones(2, 1, 4, dtype=torch.bool)))


def test_the_bias_is_stored_and_not_learned():
    layer = MixtureOfExperts(6, 10)
    assert "bias" in layer.state_dict() and "bias" not in dict(layer.named_parameters())
