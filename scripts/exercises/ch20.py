"""Chapter 20's exercises: our solutions, and checkers that say what is wrong."""

import math
from collections.abc import Callable

import numpy as np

from scripts.book.exercises import compare

Fit = Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]


def check_size_for_loss(candidate: Callable[[float, float, float, float], float]) -> None:
    """Compares candidate(floor, scale, alpha, loss) with the law itself."""
    for E, A, alpha, N in ((2.0, 50.0, 0.3, 1e6), (0.0, 9.0, 0.1, 3e5), (1.69, 406.4, 0.34, 7e10)):
        loss = E + A / N**alpha
        all_of_it = (A / loss) ** (1 / alpha)
        mistakes = {
            "Only the part of the loss *above* the floor shrinks. Subtract E first.": all_of_it,
            "That is 1/N: the power has a negative exponent.": 1 / N,
        }
        otherwise = f"E = {E}, A = {A}, α = {alpha}: a loss of {loss:.3f} is reached at N = {N:g}."
        compare(candidate(E, A, alpha, loss), N, mistakes, otherwise)
    for loss in (2.0, 1.5):
        try:
            given = candidate(2.0, 50.0, 0.3, loss)
        except ArithmeticError as error:
            raise AssertionError(f"A loss of {loss} at a floor of 2 raises {error!r}.") from None
        unreached = f"No size reaches {loss} if the floor is 2: return {math.inf}, not {given}."
        assert given == math.inf, unreached


def size_for_loss(floor: float, scale: float, alpha: float, loss: float) -> float:
    """(A / (L − E))^(1/α), above the floor."""
    return (scale / (loss - floor)) ** (1 / alpha) if loss > floor else math.inf


def check_best_size(candidate: Callable[[float, float, float, float, float], float]) -> None:
    """Compares candidate(C, A, alpha, B, beta) with a search over sizes."""
    grid = np.geomspace(10, 1e14, 200_001)
    for C, A, alpha, B, beta in (
        (1e18, 406.4, 0.34, 410.7, 0.28),
        (1e16, 20.0, 0.5, 200.0, 0.25),
        (1e15, 50.0, 0.3, 80.0, 0.3),
    ):
        right, careless = (
            grid[(A * grid**-alpha + B * (C / (per * grid)) ** -beta).argmin()].item()
            for per in (6.0, 1.0)
        )
        given = candidate(C, A, alpha, B, beta)
        mistakes = {
            "That is for C = N·D. A token costs about 6 operations per parameter.": careless,
            "That is the best number of tokens D, not the size N.": C / (6 * right),
        }
        otherwise = (
            f"At C = {C:g} the lowest loss is at N = {right:.4g}, not {given:.4g}. There "
            "αA/N^α = βB/D^β, with D = C/(6N). So the exponent of C is β/(α+β)."
        )
        compare(given, right, mistakes, otherwise, rtol=1e-3)


def best_size(C: float, A: float, alpha: float, B: float, beta: float) -> float:
    """αA/N^α = βB/D^β at the best N: there, a slightly larger N gains as much as it costs."""
    return (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (C / 6) ** (beta / (alpha + beta))


def check_leave_one_out(candidate: Callable[[np.ndarray, np.ndarray, Fit], float]) -> None:
    """Checks candidate(x, losses, fit) with a fit that predicts the mean of what it saw + x/10."""
    x = np.array([1.0, 2.0, 4.0, 8.0])
    losses = np.array([4.0, 3.0, 2.5, 2.0])
    seen: list[list[float]] = []

    def fit(x: np.ndarray, losses: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        seen.append(sorted(x))
        return lambda places: np.mean(losses) + 0.1 * np.asarray(places)

    given, others = float(candidate(x, losses, fit)), (losses.sum() - losses) / 3
    assert seen != [x.tolist()] * len(seen), "The fit saw every place: nothing was hidden."
    assert sorted(seen) == sorted(x[x != hidden].tolist() for hidden in x), (
        "The fit should be called once for each hidden place, with all the others."
    )

    def residuals(places: np.ndarray) -> np.ndarray:
        return np.log(losses / (others + 0.1 * places))

    def size(residuals: np.ndarray) -> float:
        return np.sqrt((residuals**2).mean())

    wanted = size(residuals(x))
    mistakes = {
        "The residuals must be of log L, not of L.": size(losses - others - 0.1 * x),
        "That is the mean size, not the root mean square.": abs(residuals(x)).mean(),
        "With their signs, residuals cancel. Square them first.": residuals(x).mean(),
        "Predict at the hidden place, x[i], not at i.": size(residuals(np.arange(4))),
    }
    otherwise = (
        f"It should be {wanted:.4f}, not {given:.4f}: the root of the mean of the squares, one "
        "for each hidden place."
    )
    compare(given, wanted, mistakes, otherwise)


def leave_one_out(x: np.ndarray, losses: np.ndarray, fit: Fit) -> float:
    """Each place hidden in turn, and predicted from the others."""
    predicted = []
    for i in range(len(x)):
        kept = np.arange(len(x)) != i
        predicted.append(fit(x[kept], losses[kept])(x[i : i + 1]))
    return np.sqrt((np.log(losses / np.concatenate(predicted)) ** 2).mean()).item()
