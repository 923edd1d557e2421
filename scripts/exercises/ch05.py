"""Chapter 5's exercises: our solutions, and checkers that say what is wrong."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import compare, same_numbers
from scripts.book.instruments import scramble
from scripts.ch04_encoder_decoder import (
    DecoderLayer,
    EncoderDecoder,
    EncoderLayer,
    clones,
    initialise,
    make_model,
)
from scripts.ch05_norms_and_first_steps import storage_addresses


def two_sums_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over x (..., D); the variance is the mean of squares minus the squared mean."""
    mean = x.sum(dim=-1, keepdim=True) / x.size(-1)  # (..., 1)
    variance = x.square().sum(dim=-1, keepdim=True) / x.size(-1) - mean.square()  # (..., 1)
    return (x - mean) * torch.rsqrt(variance + eps) * weight + bias


def check_two_sums_norm(candidate: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> None:
    """Compares with layer_norm, on ordinary and small vectors, and where two sums must fail."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=generator) + 0.5  # (B, T, D)
    x[:, 3:] *= 1e-3  # small vectors, for which ε matters
    weight, bias = torch.linspace(0.5, 2, 8).double(), torch.linspace(-1, 1, 8).double()
    eps, leaves = 3e-5, [tensor.requires_grad_() for tensor in (x, weight, bias)]
    right = F.layer_norm(x, (8,), weight, bias, eps)
    middle = x - x.mean(-1, keepdim=True)
    spread, unbiased = (x.var(-1, keepdim=True, correction=c) for c in (0, 1))
    both = unbiased.sqrt() + eps
    mistakes = {
        "the variance is divided by D − 1; LayerNorm divides by D": (unbiased + eps).sqrt(),
        "ε is outside the root, but belongs inside": spread.sqrt() + eps,
        "ε is outside the root, and D − 1 inside: both of the chapter's slips": both,
        "ε is missing: a constant vector would be divided by 0": spread.sqrt(),
        "divided by the variance, not by its root": spread + eps,
    }
    mistakes = {said: middle / scale * weight + bias for said, scale in mistakes.items()}
    mistakes["the mean isn't subtracted"] = (
        x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias
    )
    got = candidate(x, weight, bias, eps)
    compare(got, right, mistakes, "not the numbers of layer_norm")
    assert got.requires_grad, "no gradient reaches x"
    slopes = [
        torch.autograd.grad(y.sin().sum(), leaves, materialize_grads=True) for y in (got, right)
    ]
    assert all(map(same_numbers, slopes[0][1:], slopes[1][1:])), "weight and bias must learn, too"
    assert same_numbers(slopes[0][0], slopes[1][0]), (
        "wrong gradient: mean and variance depend on x too, and their part is missing"
    )
    far = x.detach() + 1e9  # its squares leave no digits for the variance
    got, right = candidate(far, weight, bias, eps), F.layer_norm(far, (8,), weight, bias, eps)
    assert not torch.allclose(got, right, atol=0.01), (
        "right even at a mean of 10⁹, where two sums can't be: use the two sums alone"
    )


def last_steps(layer: EncoderLayer | DecoderLayer) -> list[nn.Linear]:
    """The matrices whose results a layer adds to its x: each W^O, and the feed-forward's W₂."""
    names = ("contract", "project_output")
    return [
        getattr(part, name) for part in layer.modules() for name in names if hasattr(part, name)
    ]


def deepened(model: EncoderDecoder, N: int) -> EncoderDecoder:
    """A copy of a pre-norm model with new layers on top that add nothing yet."""
    model = copy.deepcopy(model)  # a copy of the whole: what is tied stays tied
    for stack in (model.encoder, model.decoder):
        for layer in clones(stack.layers[0], N - len(stack.layers)):
            initialise(layer)
            for step in last_steps(layer):
                nn.init.zeros_(step.weight)
                nn.init.zeros_(step.bias)
            stack.layers.append(layer)
    return model


def check_deepened(candidate: Callable[[EncoderDecoder, int], EncoderDecoder]) -> None:
    """Compares outputs, sizes, tied tables, and the gradients of the new layers."""
    torch.manual_seed(0)
    model = make_model(11, 11, 2, 8, 16, 2, 0.0, norm_first=True, tie="all").double()
    scramble(model)
    before = copy.deepcopy(model.state_dict())
    src, tgt = torch.randint(1, 11, (2, 3, 5))  # (B, S) and (B, T)
    right = model.generator(model(src, tgt))
    deep = candidate(model, 4)
    now = model.state_dict()
    kept = now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)
    assert deep is not model and kept, "the model itself was changed: make a new model"
    places = [{p.data_ptr() for p in one.parameters()} for one in (model, deep)]
    assert places[0].isdisjoint(places[1]), (
        "the new model uses weights of the old one: its training would change both"
    )
    new = [*deep.encoder.layers[2:], *deep.decoder.layers[2:]]
    assert len(new) == 4, "there must be N layers on each side: two old ones, two new ones"
    grown = [*model.encoder.layers, *model.decoder.layers]
    below = [*deep.encoder.layers[:2], *deep.decoder.layers[:2]]
    numbers = [parameters_to_vector(nn.ModuleList(part).parameters()) for part in (below, grown)]
    assert same_numbers(*numbers), (
        "the first two layers of each side must be the old ones: new layers come on top of them"
    )
    got = deep.generator(deep(src, tgt))
    assert same_numbers(got, right), (
        "the outputs have changed: a new layer adds something. Where does it come from?"
    )
    assert len(set(storage_addresses(deep))) == 1, (
        "the embedding tables were tied, and no longer are"
    )
    wanted = sum(p.numel() for layer in (model, *grown) for p in layer.parameters())
    assert sum(p.numel() for p in deep.parameters()) == wanted, (
        "the new layers don't have as many parameters as the old ones: does one appear twice?"
    )
    F.cross_entropy(got.flatten(0, 1), tgt.flatten()).backward()
    parts = [part for layer in new for part in layer.children() if part is not layer.sublayer]
    matrices = [[p for p in part.parameters() if p.dim() > 1] for part in parts]
    assert all(any(p.grad is not None and p.grad.any() for p in some) for some in matrices), (
        "the new layers can never learn: if both factors of a product are 0, so are their gradients"
    )
