"""Chapter 5's exercises."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import exercise, with_gradients
from scripts.book.instruments import scramble
from scripts.ch04_encoder_decoder import EncoderDecoder, clones, initialise, make_model
from scripts.ch05_norms_and_first_steps import storage_addresses


def two_sums_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over x (..., D); the variance is the mean of squares minus the squared mean."""
    mean = x.sum(dim=-1, keepdim=True) / x.size(-1)  # (..., 1)
    variance = x.square().sum(dim=-1, keepdim=True) / x.size(-1) - mean.square()  # (..., 1)
    return (x - mean) * torch.rsqrt(variance + eps) * weight + bias


def norm_cases() -> list[Callable]:
    """Small vectors, for which ε matters; then far from 0, where two sums must fail."""
    x, weight, bias = 1e-3 * torch.randn(2, 6, 8) + 0.5, torch.rand(8) + 0.5, torch.randn(8)
    far = (x + 1e9, weight, bias, 3e-5)  # its squares leave no digits for the variance
    return [
        lambda function: with_gradients(function, (x, weight, bias), 3e-5),
        lambda function: torch.allclose(function(*far), F.layer_norm(far[0], (8,), *far[1:]), 0.01),
    ]


exercise(
    two_sums_norm,
    norm_cases,
    "not the numbers of layer_norm, or not its gradients: mean and variance depend on x too",
    "the variance is divided by D − 1; LayerNorm divides by D",
    lambda x, w, b, eps: (x - x.mean(-1, True)) * (x.var(-1, True, True) + eps).rsqrt() * w + b,
    "ε is outside the root, but belongs inside",
    lambda x, w, b, eps: (x - x.mean(-1, True)) / (x.std(-1, False, True) + eps) * w + b,
    "right even at a mean of 10⁹, where two sums can't be: use the two sums alone",
    lambda x, w, b, eps: F.layer_norm(x, (8,), w, b, eps),
)


def last_steps(layer: nn.Module) -> list[nn.Linear]:
    """The matrices whose results a layer adds to its x: each W^O, and the feed-forward's W₂."""
    names = ("contract", "project_output")
    return [part for name, part in layer.named_modules() if name.endswith(names)]


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


def new_layers(model: EncoderDecoder) -> nn.ModuleList:
    """All but the first two of each side."""
    return nn.ModuleList([*model.encoder.layers[2:], *model.decoder.layers[2:]])


def growth(function: Callable) -> Iterator:
    """Does the deeper model share nothing, hold the old one, say the same, and learn?"""
    model = make_model(11, 11, 2, 8, 16, 2, 0.0, norm_first=True, tie="all")
    scramble(model)
    src, tgt = torch.randint(1, 11, (2, 3, 5))  # (B, S) and (B, T)
    before, deep = model.generator(model(src, tgt)), function(model, 4)
    output = deep.generator(deep(src, tgt))
    F.cross_entropy(output.flatten(0, 1), tgt.flatten()).backward()
    addresses = {p.data_ptr() for p in model.parameters()}
    shared = any(p.data_ptr() in addresses for p in deep.parameters())
    yield shared or not torch.equal(model.generator(model(src, tgt)), before)
    yield parameters_to_vector(deep.encoder.layers[:2].parameters())
    yield sum(p.numel() for p in deep.parameters()), len(set(storage_addresses(deep)))
    yield torch.allclose(output, before)
    parts = [part for layer in new_layers(deep) for part in layer.children()]
    grads = [[p.grad for p in part.parameters() if p.dim() > 1] for part in parts]
    yield [any(grad is not None and grad.any() for grad in some) for some in grads]


def with_new_numbers(change: Callable[[Tensor], object]) -> Callable:
    """A wrong function: it does `change` to all new parameters."""

    def deepen(model: EncoderDecoder, N: int) -> EncoderDecoder:
        deep = deepened(model, N)
        for p in new_layers(deep).parameters():
            change(p)
        return deep

    return deepen


exercise(
    deepened,
    lambda: [growth],
    "there must be N layers on each side, the old ones below; they say the same as before, can "
    "learn, and what was tied must stay tied",
    "the outputs have changed: a new layer adds something. Where does it come from?",
    with_new_numbers(nn.init.normal_),
    "the new layers can never learn: if both factors of a product are 0, so are their gradients",
    with_new_numbers(nn.init.zeros_),
    "the model itself was changed, or shares weights with the new one: make a new model",
    lambda model, N: model.__dict__.update(deepened(model, N).__dict__) or model,
)
