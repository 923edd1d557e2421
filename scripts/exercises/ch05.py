"""Chapter 5's exercises."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import exercise, probe, with_gradients
from scripts.book.instruments import scramble
from scripts.ch04_encoder_decoder import EncoderDecoder, clones, initialise, make_model


@exercise(
    lambda: [probe(with_gradients, (torch.randn(6, 8) / 1000 + 0.5, *torch.randn(2, 8)), 3e-5)],
    "not the numbers of layer_norm, or not its gradients: mean and variance depend on x too",
    "the variance is divided by D − 1; LayerNorm divides by D",
    lambda x, w, b, eps: (x - x.mean(-1, True)) * (x.var(-1, True, True) + eps).rsqrt() * w + b,
    "ε is outside the root, but belongs inside",
    lambda x, w, b, eps: (x - x.mean(-1, True)) / (x.std(-1, False, True) + eps) * w + b,
)
def two_sums_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over x (..., D); the variance is the mean of squares minus the squared mean."""
    mean = x.sum(dim=-1, keepdim=True) / x.size(-1)  # (..., 1)
    variance = x.square().sum(dim=-1, keepdim=True) / x.size(-1) - mean.square()  # (..., 1)
    return (x - mean) * torch.rsqrt(variance + eps) * weight + bias


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


def renumbered(model: EncoderDecoder, change: Callable[[Tensor], object]) -> EncoderDecoder:
    """The model after `change` of all new parameters."""
    for p in new_layers(model).parameters():
        change(p)
    return model


@exercise(
    lambda: [growth],
    "a new model with N layers on each side, the old ones below; what was tied stays tied",
    "the outputs have changed: a new layer adds something. Where does it come from?",
    lambda model, N: renumbered(deepened(model, N), nn.init.normal_),
    "the new layers can never learn: if both factors of a product are 0, so are their gradients",
    lambda model, N: renumbered(deepened(model, N), nn.init.zeros_),
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
