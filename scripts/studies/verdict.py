"""What a comparison of trainings may say: one spread between seeds, a t test, all rows together."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


def pooled_spread(rows: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation within rows, and its degrees of freedom.

    Raises ValueError where no row has two values.
    """
    freedom = sum(len(row) - 1 for row in rows if row)
    if not freedom:
        raise ValueError("no row was run twice: nothing is known of the spread between seeds")
    squares = sum((x - sum(row) / len(row)) ** 2 for row in rows for x in row)
    return math.sqrt(squares / freedom), freedom


def student_tails(t: float, freedom: int) -> float:
    """How often chance gives a |t| this large or larger: Student's two tails, by Simpson's rule."""
    # With x = √ν·tan(a) the density becomes cos(a)^(ν−1), up to a constant, on −π/2 < a < π/2.
    end = math.atan(abs(t) / math.sqrt(freedom))

    def area(top: float, pieces: int = 2000) -> float:
        nodes = torch.linspace(0, top, pieces + 1, dtype=torch.float64)
        heights = nodes.cos().clamp_min(0) ** (freedom - 1)
        weights = torch.tensor([1.0, *([4.0, 2.0] * (pieces // 2))], dtype=torch.float64)
        weights[-1] = 1.0
        return (heights * weights).sum().item() * top / pieces / 3

    return max(0.0, 1 - area(end) / area(math.pi / 2))


def pass_together(p: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of many tests pass together, in the steps of Holm (1979).

    The chance that any passes wrongly is at most `level`, however many there are.
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    passed = [False] * len(p)
    for rank, i in enumerate(order):
        if p[i] > level / (len(p) - rank):
            break
        passed[i] = True
    return passed


class Verdict(NamedTuple):
    """What the seeds say of a row against the one that it has to beat."""

    difference: float  # the row's mean minus the other's
    t: float  # in units of its standard error
    p: float  # Student's, for this row alone
    told: bool  # whether it passes, with all rows tested together


def verdicts(
    rows: Mapping[str, Sequence[float]], against: Mapping[str, str], level: float = 0.05
) -> dict[str, Verdict]:
    """Each row of `against` compared with the row that it names; `rows` holds a value for each run.

    One spread serves all rows, so a row of one run can be judged as well. Raises ValueError where
    no row was run twice.
    """
    spread, freedom = pooled_spread(list(rows.values()))
    found = []
    for name, other in against.items():
        ours, theirs = rows[name], rows[other]
        difference = sum(ours) / len(ours) - sum(theirs) / len(theirs)
        t = difference / (spread * math.sqrt(1 / len(ours) + 1 / len(theirs)))
        found.append((difference, t, student_tails(t, freedom)))
    passed = pass_together([p for _, _, p in found], level)
    return {
        name: Verdict(*one, told) for name, one, told in zip(against, found, passed, strict=True)
    }
