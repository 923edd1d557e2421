"""Chapter 3's exercises: each checker accepts the solution and tells the common mistakes apart."""

import math

import pytest
import torch

from scripts.book.exercises import rejection
from scripts.ch03_embeddings_and_positions import (
    check_confused,
    check_halves,
    check_squared_gap,
    check_stretched,
    confused_anywhere,
    halves_of,
    padded_by,
    sinusoids,
    sinusoids_by_slices,
    solution_confused,
    solution_halves,
    solution_squared_gap,
    solution_stretched,
)

SOLVED = [
    (check_halves, solution_halves),
    (check_squared_gap, solution_squared_gap),
    (check_stretched, solution_stretched),
    (check_confused, solution_confused),
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


def test_another_way_to_write_a_solution_passes_too():
    check_squared_gap(
        lambda distance, d: (sinusoids(50, d)[0] - sinusoids(50, d)[abs(distance)]).square().sum()
    )
    check_stretched(padded_by(in_one_go))


def in_one_go(table, more):
    step = torch.linalg.lstsq(table[:-1], table[1:], driver="gelsd").solution
    rows = [table[-1] @ torch.linalg.matrix_power(step, k + 1) for k in range(more)]
    return torch.stack(rows) if rows else table[:0]


def halves(length, d_model, slower=2, start=0, first="sin"):
    if d_model % 2:
        raise ValueError
    speeds = 10_000.0 ** (-slower * torch.arange(d_model // 2) / d_model)
    table = halves_of(torch.outer(torch.arange(length) + start, speeds))
    return table if first == "sin" else table.roll(d_model // 2, 1)


def crashes_at_odd(length, d_model):
    table = sinusoids_by_slices(length, d_model)
    return torch.cat((table[:, 0::2], table[:, 1::2]), dim=-1)


HALVES = {
    "take turns": sinusoids,
    "cosines come first": lambda *sizes: halves(*sizes, first="cos"),
    "half as fast": lambda *sizes: halves(*sizes, slower=1),
    "begin at 0": lambda *sizes: halves(*sizes, start=1),
    "other numbers": lambda *sizes: -halves(*sizes),
    "inside a tensor operation": crashes_at_odd,
    "is accepted": lambda length, d: solution_halves(length, d + d % 2)[:, :d],
}

GAP = {
    "dot product": lambda distance, d: (d - solution_squared_gap(distance, d)) / 2,
    "not D": lambda distance, d: d + solution_squared_gap(distance, d),
    "isn't 1": lambda distance, d: 2 - d + solution_squared_gap(distance, d),
    "counts twice": lambda distance, d: (d + solution_squared_gap(distance, d)) / 2,
    "the length, not": lambda distance, d: math.sqrt(solution_squared_gap(distance, d)),
    "which cosine": lambda distance, d: solution_squared_gap(2 * distance, d),
}


def backwards(table, more):
    step = torch.linalg.lstsq(table[:-1], table[1:], driver="gelsd").solution
    return torch.stack([table[-1] @ torch.linalg.matrix_power(step.T, k + 1) for k in range(more)])


def from_the_start(table, more):
    step = torch.linalg.lstsq(table[:-1], table[1:], driver="gelsd").solution
    return torch.stack([table[0] @ torch.linalg.matrix_power(step, k + 1) for k in range(more)])


def overwritten(table, max_len):
    longer = solution_stretched(table, max_len)
    table.zero_()
    return longer


STRETCHED = {
    "repeated": padded_by(lambda table, more: table[-1:].expand(more, -1)),
    "begins again": padded_by(lambda table, more: table[:more]),
    "are 0": padded_by(lambda table, more: table.new_zeros(more, table.size(1))),
    "backwards": padded_by(backwards),
    "from the first row": padded_by(from_the_start),
    "don't go on": padded_by(lambda table, more: table[-more:]),
    "max_len rows": lambda table, max_len: table[:max_len],
    "was changed": overwritten,
    "must stay": lambda table, max_len: solution_stretched(table, max_len) * 1.01,
    "cut": lambda table, max_len: solution_stretched(table, max(max_len, len(table))),
}

CONFUSED = {
    "every order": lambda layers: 24,
    "a second layer changes nothing": lambda layers: confused_anywhere(layers, causal=False),
    "no two agree": lambda layers: confused_anywhere(layers, causal=True, last=False),
    "are a set": lambda layers: 2,
    "reads outputs": lambda layers: 6 if len(layers) == 1 else 2,
}

WRONG = [
    (check_halves, HALVES),
    (check_squared_gap, GAP),
    (check_stretched, STRETCHED),
    (check_confused, CONFUSED),
]


@pytest.mark.parametrize("check, wrong", WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_gets_an_answer_of_its_own(check, wrong):
    answers = {words: rejection(check, candidate) for words, candidate in wrong.items()}
    for words, answer in answers.items():
        assert words in answer, f"{words!r} is not in {answer!r}"
    assert len(set(answers.values())) == len(wrong) >= 2
