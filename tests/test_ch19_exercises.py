"""Chapter 19's exercises: each checker distinguishes the common mistakes."""

import copy

import pytest
import torch
from exercising import assert_told_apart
from torch import nn

from scripts.book.exercises import check
from scripts.book.verdict import pass_together
from scripts.ch04_encoder_decoder import clones
from scripts.ch06_training import LabelSmoothing, batch_loss
from scripts.ch19_ablations import patient, two_sentences
from scripts.exercises import ch19 as ours
from scripts.exercises.ch19 import holm, shared_layers


def without_the_largest_so_far(ps):
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted = [0.0] * len(ps)
    for k, i in enumerate(order):
        adjusted[i] = min(1.0, ps[i] * (len(ps) - k))
    return adjusted


def only_the_one_before(ps):
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    raised = [0.0, *(ps[i] * (len(ps) - k) for k, i in enumerate(order))]
    adjusted = [0.0] * len(ps)
    for k, i in enumerate(order, start=1):
        adjusted[i] = min(1.0, max(raised[k - 1 : k + 1]))
    return adjusted


def above_one(ps):
    return [
        max(adjusted, p * 2) if p > 0.7 else adjusted
        for p, adjusted in zip(ps, holm(ps), strict=True)
    ]


def copied_layers(model):
    """Looks the same before the first step, but isn't."""
    model.encoder.layers = clones(model.encoder.layers[0], len(model.encoder.layers))


def one_layer_only(model):
    model.encoder.layers = nn.ModuleList([model.encoder.layers[0]])


def the_last_layer(model):
    layers = model.encoder.layers
    model.encoder.layers = nn.ModuleList([layers[-1]] * len(layers))


def both_stacks(model):
    shared_layers(model)
    model.decoder.layers = nn.ModuleList([model.decoder.layers[0]] * len(model.decoder.layers))


def on_a_copy(model):
    shared_layers(copy.deepcopy(model))


WRONG = {
    "false_alarms": {
        "just be added": lambda rows, level: rows * level,
        "at least one": lambda rows, level: (1 - level) ** rows,
        "happens in": lambda rows, level: level,
    },
    "holm": {
        "Bonferroni": lambda ps: [min(1.0, p * len(ps)) for p in ps],
        "of ps": lambda ps: sorted(holm(ps)),
        "largest so far": without_the_largest_so_far,
        "should become": only_the_one_before,
        "values went in": lambda ps: [0.0],
        "above 1": above_one,
    },
    "shared_layers": {
        "copies": copied_layers,
        "3 layers deep": one_layer_only,
        "first layer": the_last_layer,
        "decoder": both_stacks,
        "Change it in place": on_a_copy,
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    assert_told_apart(getattr(ours, f"check_{name}"), WRONG[name])


def test_adjusted_values_say_what_the_steps_say():
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        ps = (torch.rand(8, generator=rng, dtype=torch.float64) ** 4).tolist()
        for level in (0.01, 0.05, 0.2):
            assert [p <= level for p in holm(ps)] == pass_together(ps, level)


def test_adjusted_values_may_be_rounded():
    check(lambda ps: torch.tensor(holm(ps), dtype=torch.float32), "holm")


@pytest.mark.parametrize("operate, alike", [(shared_layers, True), (copied_layers, False)])
def test_layers_that_are_shared_stay_alike_after_a_step(operate, alike):
    model = patient(operate, layers=3)
    batch_loss(model, two_sentences(), LabelSmoothing(0.1))[0].backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    layers = model.encoder.layers
    pairs = zip(layers[0].parameters(), layers[2].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) == alike
