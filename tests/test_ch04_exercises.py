"""Chapter 4's exercises: each checker distinguishes the common mistakes."""

import pytest
from exercising import assert_told_apart, rejection
from torch import nn

from scripts.ch04_encoder_decoder import clones
from scripts.exercises.ch04 import (
    check_encoder_parameters,
    check_fresh_stack,
    check_layer_from_parts,
    encoder_parameters,
    layer_from_parts,
)

COUNT = {
    "has a bias": lambda N, D, F: N * (4 * D * D + 2 * D * F + 4 * D),
    "lacks 4D": lambda N, D, F: encoder_parameters(N, D, F) - N * 4 * D,
    "a LayerNorm is missing": lambda N, D, F: encoder_parameters(N, D, F) - N * 2 * D,
    "fourth matrix": lambda N, D, F: encoder_parameters(N, D, F) - N * (D * D + D),
    "widens and narrows": lambda N, D, F: encoder_parameters(N, D, F) - N * (F * D + D),
    "only matrices": lambda N, D, F: N * (4 * D * D + 2 * D * F),
    "feed-forward's two": lambda N, D, F: encoder_parameters(N, D, F) - N * (D + F),
    "after the last layer": lambda N, D, F: encoder_parameters(N, D, F) + 2 * D,
    "there are N": lambda N, D, F: encoder_parameters(1, D, F),
    "too few": lambda N, D, F: N,
    "too many": lambda N, D, F: 2 * encoder_parameters(N, D, F),
}


def wired(which, after=False):
    """The wrong wiring called `which`; with `after`, post-norm stays right."""

    def layer(x, attend, think, norms, norm_first):
        if after and not norm_first:
            return layer_from_parts(x, attend, think, norms, norm_first)
        one, two = norms
        first = one(x) + attend(one(x))
        return {
            "no road": two(think(one(attend(x)))),
            "side by side": two(one(x + attend(x)) + think(x)),
            "one norm": one(one(x + attend(x)) + think(one(x + attend(x)))),
            "norm on the road": two(first) + think(two(first)),
        }[which]

    return layer


def in_place(x, attend, think, norms, norm_first):
    x += attend(x)
    return x


LAYER = {
    "`x` itself was changed": in_place,
    "that is pre-norm": lambda *parts: layer_from_parts(*parts[:4], True),
    "that is post-norm": lambda *parts: layer_from_parts(*parts[:4], False),
    "isn't added back": wired("no road"),
    "used first": lambda x, a, t, norms, flag: layer_from_parts(x, a, t, norms[::-1], flag),
    "both sublayers read x": wired("side by side"),
    "one LayerNorm serves": wired("one norm"),
    "the normalised x": wired("norm on the road", after=True),
    "not the layer": lambda x, a, t, norms, flag: layer_from_parts(x, t, a, norms, flag),
}


def copied(make, N):
    """Deep copies, with new numbers for the matrices only."""
    stack = clones(make(), N)
    for p in stack.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    return stack


def two_alike(make, N):
    """All differ from the first, but the others not from each other."""
    return nn.ModuleList([make(), *clones(make(), N - 1)])


STACK = {
    "plain list": lambda make, N: [make() for _ in range(N)],
    "N layers": lambda make, N: nn.ModuleList([make()]),
    "one layer, N times": lambda make, N: nn.ModuleList([make()] * N),
    "same numbers": lambda make, N: clones(make(), N),
    "the biases don't": copied,
}


WRONG = [
    (check_encoder_parameters, COUNT),
    (check_layer_from_parts, LAYER),
    (check_fresh_stack, STACK),
]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    assert_told_apart(check, wrong)


def test_two_of_three_alike_are_found():
    assert "same numbers" in rejection(check_fresh_stack, two_alike)
