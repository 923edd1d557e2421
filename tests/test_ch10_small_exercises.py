"""Chapter 10's smaller exercise: the checker accepts the solution and distinguishes mistakes."""

import math

import pytest
import torch
from exercising import assert_told_apart

from scripts.exercises import ch10 as ours
from scripts.exercises.ch10 import sign_test


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def any_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def split(first, second):
    """Wins, losses and their sum."""
    pairs = list(zip(first, second, strict=True))
    wins, losses = (sum(sign * b > sign * a for a, b in pairs) for sign in (1, -1))
    return wins, losses, wins + losses


def tail(n, most):
    return sum(math.comb(n, k) for k in range(most + 1)) / 2**n


def one_sided(first, second):
    wins, losses, n = split(first, second)
    return tail(n, min(wins, losses))


def strictly_further(first, second):
    wins, losses, n = split(first, second)
    return 2 * tail(n, min(wins, losses) - 1)


def just_this_split(first, second):
    wins, losses, n = split(first, second)
    return 2 * math.comb(n, min(wins, losses)) / 2**n


def ties_count_as_coins(first, second):
    wins, losses, n = split(first, second)
    n = len(first)
    return min(1.0, 2 * tail(n, n - max(wins, losses)))


def above_one(first, second):
    return 2 * one_sided(first, second)


def undecided(first, second):
    wins, losses, n = split(first, second)
    return sign_test(first, second) if n else 0.5


def weighs(first, second):
    """The right answer, but the smallest differences count as ties."""
    largest = max((abs(b - a) for a, b in zip(first, second, strict=True)), default=0)
    second = [a if abs(b - a) < largest / 100 else b for a, b in zip(first, second, strict=True)]
    return sign_test(first, second)


def test_mistakes_in_the_sign_test_are_told_apart():
    wrong = {
        "directions: 0.1094, not 0.0547": one_sided,
        "directions: 0.1094, not 0.0215": strictly_further,
        "directions: 0.1094, not 0.0879": just_this_split,
        "Ties are left out": ties_count_as_coins,
        "no outcome counts twice": above_one,
        "nothing is left": undecided,
        "Only the sign": weighs,
        "at least as uneven, in both directions: 0.1094, not 0.5": lambda first, second: 0.5,
    }
    assert_told_apart(ours.check_sign_test, wrong)
