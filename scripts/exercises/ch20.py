"""Chapter 20's exercises: our solutions, and checkers that say what is wrong."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

Fit = Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]


def check_size_for_loss(candidate: Callable[[float, float, float, float], float]) -> None:
    """Compares candidate(floor, scale, alpha, loss) with the law itself."""
    close = partial(math.isclose, rel_tol=1e-6)
    for E, A, alpha, N in ((2.0, 50.0, 0.3, 1e6), (0.0, 9.0, 0.1, 3e5), (1.69, 406.4, 0.34, 7e10)):
        loss = E + A / N**alpha
        given, asked = candidate(E, A, alpha, loss), f"E = {E}, A = {A}, α = {alpha}: "
        assert E == 0 or not close(given, (A / loss) ** (1 / alpha)), (
            f"{asked}only the part of the loss *above* the floor shrinks. Subtract E first."
        )
        assert not close(given, 1 / N), f"{asked}that is 1/N: the power has a negative exponent."
        assert close(given, N), f"{asked}a loss of {loss:.3f} is reached at N = {N:g}."
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
    close = partial(math.isclose, rel_tol=1e-3)
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
        given, tokens = candidate(C, A, alpha, B, beta), C / (6 * right)
        assert not close(given, careless), (
            "That is the answer for C = N·D. A token costs about 6 operations per parameter."
        )
        mistaken = close(given, tokens) and not close(tokens, right)
        assert not mistaken, "That is the best number of tokens D, not the size N."
        assert close(given, right), (
            f"At C = {C:g} the lowest loss is at N = {right:.4g}, not {given:.4g}. There "
            "αA/N^α = βB/D^β, with D = C/(6N). So the exponent of C is β/(α+β)."
        )


def best_size(C: float, A: float, alpha: float, B: float, beta: float) -> float:
    """αA/N^α = βB/D^β at the best N: there, a slightly larger N gains as much as it costs."""
    return (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (C / 6) ** (beta / (alpha + beta))


def check_leave_one_out(candidate: Callable[[np.ndarray, np.ndarray, Fit], float]) -> None:
    """Checks candidate(x, losses, fit) with a fit that predicts the mean of what it saw."""
    x = np.array([1.0, 2.0, 4.0, 8.0])
    losses = np.array([4.0, 3.0, 2.5, 2.0])
    seen: list[list[float]] = []

    def fit(x: np.ndarray, losses: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        seen.append([*x])
        return lambda places: np.full(np.shape(places), np.mean(losses))

    given, others = float(candidate(x, losses, fit)), (losses.sum() - losses) / 3
    assert seen != [x.tolist()] * len(seen), "The fit saw every place: nothing was hidden."
    assert sorted(seen) == sorted(x[x != hidden].tolist() for hidden in x), (
        "The fit should be called once for each hidden place, with all the others."
    )
    logs, plain = np.log(losses / others), losses - others
    for wrong, why in (
        (np.sqrt((plain**2).mean()), "The residuals must be of log L, not of L."),
        (abs(logs).mean(), "That is the mean size of the residuals, not the root mean square."),
        (logs.mean(), "With their signs, residuals cancel. Square them first."),
    ):
        assert abs(given - wrong) > 1e-9, why
    wanted = np.sqrt((logs**2).mean())
    assert abs(given - wanted) < 1e-9, (
        f"It should be {wanted:.4f}, not {given:.4f}: the root of the mean of the squares, one for "
        "each hidden place."
    )


def leave_one_out(x: np.ndarray, losses: np.ndarray, fit: Fit) -> float:
    """Each place hidden in turn, and predicted from the others."""
    predicted = []
    for i in range(len(x)):
        kept = np.arange(len(x)) != i
        predicted.append(fit(x[kept], losses[kept])(x[i : i + 1]))
    return np.sqrt((np.log(losses / np.concatenate(predicted)) ** 2).mean()).item()
