"""Chapter 20's exercises: each checker distinguishes the common mistakes."""

import math

import numpy as np
import pytest
from exercising import assert_told_apart

from scripts.book.exercises import check
from scripts.exercises import ch20 as ours
from scripts.exercises.ch20 import best_size


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


def ratio_inverted(C, A, alpha, B, beta):
    return (beta * B / (alpha * A) * (C / 6) ** beta) ** (1 / (alpha + beta))


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


def predicting(place):
    """Predicts at place(x, i, kept) instead of at x[i]."""

    def by_place(x, losses, fit):
        out = []
        for i in range(len(x)):
            kept = np.arange(len(x)) != i
            out.append(np.mean(fit(x[kept], losses[kept])(place(x, i, kept))))
        return np.sqrt(np.square(np.log(losses / out)).mean())

    return by_place


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
        "αA/N^α = βB/D^β": ratio_inverted,
        "number of tokens": lambda C, *law: C / (6 * best_size(C, *law)),
        "6 operations": lambda C, *law: best_size(6 * C, *law),
    },
    "leave_one_out": {
        "of log L": of_losses,
        "mean size": lambda *given: abs(residuals(*given)).mean().item(),
        "cancel": lambda *given: residuals(*given).mean().item(),
        "nothing was hidden": nothing_hidden,
        "once for each": only_the_last,
        "not at i": predicting(lambda x, i, kept: i),
        "not 0.3416": predicting(lambda x, i, kept: x[kept]),
        "It should be": lambda *given: np.sqrt(np.square(residuals(*given)).sum()).item(),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    assert_told_apart(getattr(ours, f"check_{name}"), WRONG[name])


def test_a_fit_may_be_given_lists_and_asked_for_one_place():
    def one_by_one(x, losses, fit):
        out = []
        for i in range(len(x)):
            seen = [j for j in range(len(x)) if j != i]
            predict = fit([x[j] for j in seen], [losses[j] for j in seen])
            out.append(np.log(losses[i] / predict(x[i])))
        return np.sqrt(np.square(out).mean())

    check(one_by_one, "leave_one_out")
