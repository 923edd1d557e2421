"""Chapter 20's exercises: each checker distinguishes the common mistakes."""

import math

import numpy as np
import pytest
from exercising import assert_told_apart

from scripts.exercises import ch20 as ours
from scripts.exercises.ch20 import best_size, leave_one_out, size_for_loss


def floor_forgotten(floor, scale, alpha, loss):
    return (scale / loss) ** (1 / alpha)


def upside_down(floor, scale, alpha, loss):
    return ((loss - floor) / scale) ** (1 / alpha)


def power_not_root(floor, scale, alpha, loss):
    return (scale / (loss - floor)) ** alpha


def below_the_floor(floor, scale, alpha, loss):
    return (scale / abs(loss - floor)) ** (1 / alpha) if loss != floor else math.inf


def at_the_floor(floor, scale, alpha, loss):
    return (scale / (loss - floor)) ** (1 / alpha)


def exchanged(C, A, alpha, B, beta):
    """β/(α+β) and α/(α+β) confused: right only if they are equal."""
    return (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (C / 6) ** (alpha / (alpha + beta))


def residuals(x, losses, fit):
    out = []
    for i in range(len(x)):
        kept = np.arange(len(x)) != i
        out.append(np.log(losses[i] / fit(x[kept], losses[kept])(x[i : i + 1])[0]))
    return np.array(out)


def of_losses(x, losses, fit):
    out = []
    for i in range(len(x)):
        kept = np.arange(len(x)) != i
        out.append(losses[i] - fit(x[kept], losses[kept])(x[i : i + 1])[0])
    return np.sqrt(np.square(out).mean()).item()


def nothing_hidden(x, losses, fit):
    return np.sqrt(np.square(np.log(losses / fit(x, losses)(x))).mean()).item()


def only_the_last(x, losses, fit):
    return abs(np.log(losses[-1:] / fit(x[:-1], losses[:-1])(x[-1:])).item())


WRONG = {
    "size_for_loss": {
        "Subtract E": floor_forgotten,
        "negative exponent": upside_down,
        "is reached at N": power_not_root,
        "No size reaches": below_the_floor,
        "raises": at_the_floor,
    },
    "best_size": {
        "exponent of C": exchanged,
        "number of tokens": lambda C, *law: C / (6 * best_size(C, *law)),
        "6 operations": lambda C, *law: best_size(6 * C, *law),
    },
    "leave_one_out": {
        "of log L": of_losses,
        "mean size": lambda *given: abs(residuals(*given)).mean().item(),
        "cancel": lambda *given: residuals(*given).mean().item(),
        "nothing was hidden": nothing_hidden,
        "once for each": only_the_last,
        "It should be": lambda *given: np.sqrt(np.square(residuals(*given)).sum()).item(),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    assert_told_apart(getattr(ours, f"check_{name}"), WRONG[name])


def test_the_size_and_the_law_are_each_others_inverse():
    for size in np.geomspace(1e3, 1e9, 7).tolist():
        assert math.isclose(size_for_loss(2.0, 50.0, 0.3, 2 + 50 / size**0.3), size, rel_tol=1e-6)


def test_hidden_places_are_harder_than_seen_ones():
    x, rng = np.geomspace(1e4, 1e6, 9), np.random.default_rng(0)
    losses = 50 / x**0.3 * np.exp(0.01 * rng.standard_normal(9))

    def fit(x, losses):
        line = np.polyfit(np.log(x), np.log(losses), 2)
        return lambda places: np.exp(np.polyval(line, np.log(places)))

    assert leave_one_out(x, losses, fit) > 1.2 * nothing_hidden(x, losses, fit)
