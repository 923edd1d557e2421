"""Chapter 5's exercises: each checker distinguishes mistakes and accepts other right answers."""

import copy

import pytest
import torch
from exercising import assert_told_apart
from torch import nn

from scripts.book.exercises import check
from scripts.ch04_encoder_decoder import clones, make_model
from scripts.ch05_norms_and_first_steps import wrong_layer_norm
from scripts.exercises.ch05 import (
    check_deepened,
    check_two_sums_norm,
    deepened,
    last_steps,
    two_sums_norm,
)


def deepened_by(change):
    """A way to deepen: copies of the top layer, with `change` applied to each."""

    def deepen(model, N):
        model = copy.deepcopy(model)
        for stack in (model.encoder, model.decoder):
            for layer in clones(stack.layers[-1], N - len(stack.layers)):
                change(layer)
                stack.layers.append(layer)
        return model

    return deepen


def all_to_zero(module):
    for p in module.parameters():
        nn.init.zeros_(p)


def quiet(layer):
    for step in last_steps(layer):
        all_to_zero(step)


def without_values(layer):
    """Another way to silence attention: its values are 0, not W^O."""
    for part in (layer.self_attn, getattr(layer, "src_attn", layer.self_attn)):
        all_to_zero(part.project_value)
        nn.init.zeros_(part.project_output.bias)
    all_to_zero(layer.feed_forward.contract)


def by_half_the_formula(x, w, b, eps):
    """Σ (x − μ)² = Σ x² − μ Σ x."""
    total, squares = x.sum(-1, True), (x * x).sum(-1, True)
    variance = (squares - total * total / len(w)) / len(w)
    return (x - total / len(w)) / (variance + eps).sqrt() * w + b


def test_another_way_to_write_a_solution_passes_too():
    check(by_half_the_formula, "two_sums_norm")
    for way in (deepened_by(quiet), deepened_by(without_values), filled_from_the_old):
        check(way, "deepened")


def filled_from_the_old(model, N):
    """A new model, of the default dtype, into which the old numbers are loaded."""
    deep = make_model(11, 11, N, 8, 16, 2, 0.0, norm_first=True, tie="all")
    deep.load_state_dict(model.state_dict(), strict=False)
    for stack in (deep.encoder, deep.decoder):
        for layer in stack.layers[2:]:
            quiet(layer)
    return deep


def test_two_sums_go_wrong_far_from_zero():
    x = 10_000 + torch.randn(100, 64, dtype=torch.float32)  # spread 1
    ones = torch.ones(64)
    right = nn.functional.layer_norm(x.double(), (64,))
    assert (two_sums_norm(x, ones, 0 * ones, 1e-5) - right).nan_to_num(9).abs().max() > 0.5


def normed(x, w, b, eps, correction=0, center=True):
    mean, spread = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=correction)
    if not center:
        mean, spread = 0, x.square().mean(-1, keepdim=True)
    return (x - mean) * (spread + eps).rsqrt() * w + b


def detached(x, w, b, eps):
    mean = x.mean(-1, keepdim=True).detach()
    return (x - mean) * (x.var(-1, keepdim=True, correction=0).detach() + eps).rsqrt() * w + b


NORM = {
    "LayerNorm divides by D": lambda *given: normed(*given, correction=1),
    "but belongs inside": lambda x, w, b, eps: (
        (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + eps) * w + b
    ),
    "both of the chapter's slips": lambda x, w, b, eps: wrong_layer_norm(x, eps) * w + b,
    "ε is missing": lambda x, w, b, eps: normed(x, w, b, 0.0),
    "the mean isn't subtracted": lambda *given: normed(*given, center=False),
    "not by its root": lambda x, w, b, eps: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps) * w + b
    ),
    "not the numbers": lambda x, w, b, eps: normed(x, w, 0 * b, eps),
    "no gradient reaches": lambda *given: normed(*given).detach(),
    "their part is missing": detached,
    "two sums alone": normed,
}


def untied(model, N):
    deep = deepened(model, N)
    deep.generator.proj.weight = nn.Parameter(deep.generator.proj.weight.clone())
    return deep


def in_place(model, N):
    deep = deepened(model, N)
    model.encoder, model.decoder = deep.encoder, deep.decoder
    return model


def same_layer_twice(model, N):
    deep = deepened(model, N)
    for stack in (deep.encoder, deep.decoder):
        stack.layers[3] = stack.layers[2]
    return deep


def sharing(model, N):
    deep = deepened(model, N)
    deep.encoder.layers[0] = model.encoder.layers[0]
    return deep


def from_below(model, N):
    deep = deepened(model, N)
    for stack in (deep.encoder, deep.decoder):
        stack.layers = nn.ModuleList([*stack.layers[2:], *stack.layers[:2]])
    return deep


DEEP = {
    "make a new model": in_place,
    "would change both": sharing,
    "on top of them": from_below,
    "two old ones": lambda model, N: copy.deepcopy(model),
    "adds something": deepened_by(lambda layer: None),
    "were tied": untied,
    "as many parameters": same_layer_twice,
    "never learn": deepened_by(all_to_zero),
}

WRONG = [(check_two_sums_norm, NORM), (check_deepened, DEEP)]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    assert_told_apart(check, wrong)
