"""Chapter 4's exercises: each checker accepts the solution and tells the common mistakes apart."""

import copy

import pytest
import torch
from torch import nn

from scripts.book.exercises import rejection
from scripts.ch04_encoder_decoder import (
    EncoderLayer,
    MultiHeadedAttention,
    PositionwiseFeedForward,
    all_to_zero,
    check_deepened,
    check_encoder_parameters,
    check_fresh_stack,
    check_layer_from_parts,
    check_two_sums_norm,
    clones,
    copied_stack,
    deepened_by,
    initialise,
    last_steps,
    layer_mistakes,
    scramble,
    solution_deepened,
    solution_encoder_parameters,
    solution_fresh_stack,
    solution_layer_from_parts,
    solution_two_sums_norm,
    wrong_layer_norm,
    wrong_stack,
)

SOLVED = [
    (check_encoder_parameters, solution_encoder_parameters),
    (check_two_sums_norm, solution_two_sums_norm),
    (check_layer_from_parts, solution_layer_from_parts),
    (check_fresh_stack, solution_fresh_stack),
    (check_deepened, solution_deepened),
]


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("check, solution", SOLVED, ids=lambda f: f.__name__)
def test_a_solution_passes(check, solution):
    assert check(solution) is None


def quiet(layer):
    for step in last_steps(layer):
        all_to_zero(step)


def test_another_way_to_write_a_solution_passes_too():
    check_two_sums_norm(lambda x, w, b, eps: nn.functional.layer_norm(x, w.shape, w, b, eps))
    check_deepened(deepened_by(quiet))


COUNT = {
    "has a bias": lambda N, D, F: N * (4 * D * D + 2 * D * F + 4 * D),
    "learns too": lambda N, D, F: solution_encoder_parameters(N, D, F) - N * 4 * D,
    "one LayerNorm for each": lambda N, D, F: solution_encoder_parameters(N, D, F) - N * 2 * D,
    "fourth matrix": lambda N, D, F: solution_encoder_parameters(N, D, F) - N * (D * D + D),
    "widens and narrows": lambda N, D, F: solution_encoder_parameters(N, D, F) - N * (F * D + D),
    "there are N": lambda N, D, F: solution_encoder_parameters(1, D, F),
    "too few": lambda N, D, F: N,
    "too many": lambda N, D, F: solution_encoder_parameters(N, D, F) + 2 * D,
}


def normed(x, w, b, eps, correction=0, center=True, dim=-1):
    mean, spread = x.mean(dim, keepdim=True), x.var(dim, keepdim=True, correction=correction)
    if not center:
        mean, spread = 0, x.square().mean(dim, keepdim=True)
    return (x - mean) * (spread + eps).rsqrt() * w + b


def detached(x, w, b, eps):
    mean = x.mean(-1, keepdim=True).detach()
    return (x - mean) * (x.var(-1, keepdim=True, correction=0).detach() + eps).rsqrt() * w + b


NORM = {
    "the biased one": lambda *given: normed(*given, correction=1),
    "ε stands outside the root": lambda x, w, b, eps: (
        (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + eps) * w + b
    ),
    "both of the chapter's slips": lambda x, w, b, eps: wrong_layer_norm(x, eps) * w + b,
    "ε is missing": lambda x, w, b, eps: normed(x, w, b, 0.0),
    "the mean is left in": lambda *given: normed(*given, center=False),
    "one vector at a time": lambda *given: normed(*given, dim=(0, 1, 2)),
    "not by its root": lambda x, w, b, eps: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps) * w + b
    ),
    "in the wrong order": lambda x, w, b, eps: normed(x, w, b * w, eps),
    "other numbers": lambda x, w, b, eps: normed(x, w, 0 * b, eps),
    "no gradient reaches": lambda *given: normed(*given).detach(),
    "lacks their part": detached,
}


def wired(which, after=False):
    """The wiring that the message with `which` is about; with `after`, post-norm stays right."""

    def layer(x, attend, think, norms, norm_first):
        if after and not norm_first:
            return solution_layer_from_parts(x, attend, think, norms, norm_first)
        one, two = norms
        first = one(x) + attend(one(x))
        return {
            "no road": two(think(one(attend(x)))),
            "side by side": two(one(x + attend(x)) + think(x)),
            "one norm": one(one(x + attend(x)) + think(one(x + attend(x)))),
            "norm on the road": two(first) + think(two(first)),
        }[which]

    return layer


LAYER = {
    "that is pre-norm": lambda *parts: solution_layer_from_parts(*parts[:4], True),
    "that is post-norm": lambda *parts: solution_layer_from_parts(*parts[:4], False),
    "isn't added back": wired("no road"),
    "used first": lambda x, a, t, norms, flag: solution_layer_from_parts(
        x, a, t, norms[::-1], flag
    ),
    "both sublayers read x": wired("side by side"),
    "one LayerNorm serves": wired("one norm"),
    "the normed x": wired("norm on the road", after=True),
    "another layer": lambda x, a, t, norms, flag: solution_layer_from_parts(x, t, a, norms, flag),
}


def shared_tensors(make, N):
    stack = solution_fresh_stack(make, N)
    for layer in stack:
        layer.contract.weight = stack[0].contract.weight
    return stack


def initialised(make, N):
    stack = solution_fresh_stack(make, N)
    initialise(stack)
    for i, layer in enumerate(stack):
        nn.init.constant_(layer.expand.bias, i)
    return stack


STACK = {
    "plain list": lambda make, N: [make() for _ in range(N)],
    "N layers": lambda make, N: nn.ModuleList([make()]),
    "one layer, N times": lambda make, N: wrong_stack(make(), N),
    "share tensors": shared_tensors,
    "same numbers": lambda make, N: clones(make(), N),
    "the biases don't": copied_stack,
    "other numbers": initialised,
}


def untied(model, N):
    deep = solution_deepened(model, N)
    deep.generator.proj.weight = nn.Parameter(deep.generator.proj.weight.clone())
    return deep


def in_place(model, N):
    deep = solution_deepened(model, N)
    model.encoder, model.decoder = deep.encoder, deep.decoder
    return model


def same_layer_twice(model, N):
    deep = solution_deepened(model, N)
    for stack in (deep.encoder, deep.decoder):
        stack.layers[3] = stack.layers[2]
    return deep


DEEP = {
    "make a new model": in_place,
    "two old ones": lambda model, N: copy.deepcopy(model),
    "adds something": deepened_by(lambda layer: None),
    "were tied": untied,
    "as many parameters": same_layer_twice,
    "never learn": deepened_by(all_to_zero),
}

WRONG = [
    (check_encoder_parameters, COUNT),
    (check_two_sums_norm, NORM),
    (check_layer_from_parts, LAYER),
    (check_fresh_stack, STACK),
    (check_deepened, DEEP),
]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    answers = {words: rejection(check, candidate) for words, candidate in wrong.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(wrong) >= 2


@pytest.mark.parametrize("norm_first", [False, True])
def test_every_wrong_wiring_differs_from_the_layer_and_from_the_others(norm_first):
    torch.manual_seed(0)
    parts = (MultiHeadedAttention(2, 8, 0.0), PositionwiseFeedForward(8, 16, 0.0))
    layer = EncoderLayer(8, *parts, 0.0, norm_first)
    scramble(layer, size=0.3)
    x = torch.randn(2, 5, 8)
    results = torch.stack([layer(x), *layer_mistakes(layer, x).values()]).flatten(1)
    apart = torch.cdist(results, results) + torch.eye(len(results))
    assert apart.min() > 0.1
