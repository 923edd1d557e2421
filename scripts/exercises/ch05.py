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
    "not the numbers of layer_norm (ε is inside the root), or not its gradients",
    "the variance is divided by D − 1; LayerNorm divides by D",
    lambda x, w, b, eps: (x - x.mean(-1, True)) * (x.var(-1, True, True) + eps).rsqrt() * w + b,
    "right even at a mean of 10⁹, where two sums can't be: use the two sums alone",
    lambda x, w, b, eps: F.layer_norm(x, (8,), w, b, eps),
)


def deepened(model: EncoderDecoder, N: int) -> EncoderDecoder:
    """A copy of a pre-norm model with new layers on top that add nothing yet.

    Zero are the matrices whose results a layer adds to its x: each W^O, and the feed-forward's W₂.
    """
    model = copy.deepcopy(model)  # a copy of the whole: what is tied stays tied
    for stack in (model.encoder, model.decoder):
        for layer in clones(stack.layers[0], N - len(stack.layers)):
            initialise(layer)
            for name, p in layer.named_parameters():
                if "project_output" in name or "contract" in name:
                    nn.init.zeros_(p)
            stack.layers.append(layer)
    return model


def new_layers(model: EncoderDecoder) -> nn.ModuleList:
    """All but the first two of each side."""
    return nn.ModuleList([*model.encoder.layers[2:], *model.decoder.layers[2:]])


def growth(function: Callable) -> Iterator:
    """Is the model as it was, does the deeper one hold and say the same, and can it learn?"""
    model = make_model(11, 11, 2, 8, 16, 2, 0.0, norm_first=True, tie="all")
    scramble(model)
    src, tgt = torch.randint(1, 11, (2, 3, 5))  # (B, S) and (B, T)
    before, deep = model.generator(model(src, tgt)), function(model, 4)
    output = deep.generator(deep(src, tgt))
    output.logsumexp(-1).sum().backward()
    yield all(p.grad is None for p in model.parameters()) and len(model.encoder.layers)
    yield parameters_to_vector(deep.encoder.layers[:2].parameters()), len(list(deep.parameters()))
    yield torch.allclose(output, before)
    matrices = [[p for p in layer.parameters() if p.dim() > 1] for layer in new_layers(deep)]
    yield [any(p.grad is not None and p.grad.any() for p in own) for own in matrices]


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
    "there must be N layers on each side, the old ones below; the model itself must stay as it "
    "was, and share no weights with the new one, in which what was tied stays tied",
    "the outputs have changed: a new layer adds something. Where does it come from?",
    with_new_numbers(nn.init.normal_),
    "the new layers can never learn: if both factors of a product are 0, so are their gradients",
    with_new_numbers(nn.init.zeros_),
)
