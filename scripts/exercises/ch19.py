"""Chapter 19's exercises."""

import copy
from collections.abc import Callable, Sequence

from torch import nn
from torch.nn.utils import parameters_to_vector

from scripts.book.exercises import exercise
from scripts.ch04_encoder_decoder import EncoderDecoder, clones
from scripts.ch19_ablations import patient


@exercise(
    lambda: [(25, 0.05), (1, 0.05)],
    "not the chance that at least one of the rows gives an alarm",
    "chances of events that can happen together can't just be added",
    lambda rows, level: rows * level,
    "that is the chance of no alarm at all: find that of at least one",
    lambda rows, level: (1 - level) ** rows,
)
def false_alarms(rows: int, level: float) -> float:
    """1 − the probability that no row gives an alarm."""
    return 1 - (1 - level) ** rows


@exercise(
    lambda: [([0.04, 0.001, 0.03, 0.015, 0.08],), ([0.9, 0.8],)],
    "none may be less than that of a smaller p, nor above 1",
    "that is Bonferroni: the k-th smallest is multiplied by m − k + 1, not every p by m",
    lambda ps: [min(1.0, p * len(ps)) for p in ps],
    "the right values, but sorted: return them in the order of ps",
    lambda ps: sorted(holm(ps)),
)
def holm(ps: Sequence[float]) -> list[float]:
    """Goes up from the smallest, and never falls below what was reached."""
    adjusted, reached = [0.0] * len(ps), 0.0
    for k, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        reached = max(reached, min(1.0, ps[i] * (len(ps) - k)))
        adjusted[i] = reached
    return adjusted


def sharing(function: Callable) -> list:
    """For both sides the number of places, and all different parameters in them."""
    model = patient(layers=3)
    function(model)
    sides = (model.encoder.layers, model.decoder.layers)
    return [(len(side), parameters_to_vector(side.parameters())) for side in sides]


@exercise(
    lambda: [sharing],
    "the encoder keeps three places, all with its first layer, and the decoder is left alone",
    "the layers are equal, but copies: one step of training makes them differ",
    lambda model: setattr(model.encoder, "layers", clones(model.encoder.layers[0], 3)),
    "nothing is shared in the model that you were given: change it in place",
    lambda model: shared_layers(copy.deepcopy(model)),
)
def shared_layers(model: EncoderDecoder) -> None:
    """The first layer in every place; PyTorch counts a repeated module once."""
    layers = model.encoder.layers
    model.encoder.layers = nn.ModuleList([layers[0]] * len(layers))
