"""Chapter 20's exercises."""

import math

from scripts.book.exercises import exercise


@exercise(
    lambda: [(2.0, 50.0, 0.3, loss) for loss in (2.8, 2.0, 1.5)],
    "solve the law for N; no size reaches a loss at or below the floor: return inf",
    "only the part of the loss *above* the floor shrinks: subtract E first",
    lambda floor, scale, alpha, loss: (scale / loss) ** (1 / alpha),
    "that is 1/N: the power has a negative exponent",
    lambda *law: 1 / size_for_loss(*law),
)
def size_for_loss(floor: float, scale: float, alpha: float, loss: float) -> float:
    """(A / (L − E))^(1/α), above the floor."""
    return (scale / (loss - floor)) ** (1 / alpha) if loss > floor else math.inf


@exercise(
    lambda: [(1e18, 406.4, 0.34, 410.7, 0.28), (1e16, 20.0, 0.5, 200.0, 0.25)],
    "at the lowest loss αA/N^α = βB/D^β, with D = C/(6N): the exponent of C is β/(α+β)",
    "that is for C = N·D: a token costs about 6 operations per parameter",
    lambda C, *law: best_size(6 * C, *law),
    "that is the best number of tokens D, not the size N",
    lambda C, *law: C / (6 * best_size(C, *law)),
)
def best_size(C: float, A: float, alpha: float, B: float, beta: float) -> float:
    """αA/N^α = βB/D^β at the best N: there, a slightly larger N gains as much as it costs."""
    return (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (C / 6) ** (beta / (alpha + beta))
