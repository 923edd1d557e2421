"""What a comparison of trainings may say: one spread between seeds, a t test, all rows together.

Holm's steps are written out: SciPy lacks them, and statsmodels is ten megabytes for ten lines.
SciPy is imported where it is used: a bare machine with a GPU trains, and doesn't judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts import Late

pd = Late("pandas")


def pooled_spread(rows: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation within rows, and its degrees of freedom.

    Raises ValueError if no row has two values.
    """
    freedom = sum(len(row) - 1 for row in rows if row)
    if not freedom:
        raise ValueError("no row was run twice: nothing is known about the spread between seeds")
    squares = sum((x - sum(row) / len(row)) ** 2 for row in rows for x in row)
    return math.sqrt(squares / freedom), freedom


def t_exceeded(p: float, freedom: int) -> float:
    """The |t| that chance alone exceeds with probability p: Student's two tails."""
    from scipy.special import stdtrit

    return -stdtrit(freedom, p / 2).item()


def pass_together(p: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of many tests pass together, in the steps of Holm (1979).

    The chance that any passes wrongly is at most `level`, however many there are.
    """
    passed = [False] * len(p)
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] > level / (len(p) - rank):
            break
        passed[i] = True
    return passed


class Verdict(NamedTuple):
    """What the seeds say about a row against the one that it has to beat."""

    difference: float  # the row's mean minus the other's
    low: float  # the true difference's interval, for this row alone: 95% at a level of 0.05
    high: float
    t: float  # in units of its standard error
    p: float  # Student's two tails, for this row alone
    told: bool  # whether it passes, with all rows tested together


def verdicts(
    rows: Mapping[str, Sequence[float]], against: Mapping[str, str], level: float = 0.05
) -> dict[str, Verdict]:
    """Each row of `against` compared with the row that it names; `rows` holds a value for each run.

    One spread serves all rows, so a row of one run can be judged as well. Raises ValueError if
    no row was run twice.
    """
    from scipy.special import stdtr

    spread, freedom = pooled_spread(list(rows.values()))
    reach = t_exceeded(level, freedom)
    alone = []  # each row's figures, for itself
    for name, other in against.items():
        own, rival = rows[name], rows[other]
        difference = sum(own) / len(own) - sum(rival) / len(rival)
        error = spread * math.sqrt(1 / len(own) + 1 / len(rival))
        low, high = difference - reach * error, difference + reach * error
        p = 2 * stdtr(freedom, -abs(difference / error)).item()
        alone.append((difference, low, high, difference / error, p))
    passed = pass_together([figures[-1] for figures in alone], level)
    rows_judged = zip(against, alone, passed, strict=True)
    return {name: Verdict(*figures, together) for name, figures, together in rows_judged}


def verdict_line(row: str, verdict: Verdict, rival: str, score: str = "BLEU") -> str:
    """A row's verdict against its rival, as a line; a higher score is better."""
    word = ("better" if verdict.difference > 0 else "worse") if verdict.told else "within noise"
    interval = f"{verdict.low:+.2f} to {verdict.high:+.2f}"
    return f"{row}: {score} {verdict.difference:+.2f} ({interval}) against {rival}, {word}"


def verdicts_on(runs: pd.DataFrame, against: Mapping[str, str], score: str = "BLEU") -> str:
    """A line for each row of `against`: do its seeds beat its rival's? All rows judged together.

    In `runs` each run has its own line.
    """
    scores = runs.groupby("row")[score.lower()].agg(list)
    judged = verdicts({name: scores[name] for name in (*against, *against.values())}, against)
    lines = (verdict_line(row, judged[row], rival, score) for row, rival in against.items())
    return "\n".join(lines)


def mean_difference(own: pd.Series, other: pd.Series) -> str:
    """The difference of two means, with a 95% interval from these runs alone (Welch's)."""
    from scipy.stats import ttest_ind

    interval = ttest_ind(own, other, equal_var=False).confidence_interval()
    return f"{own.mean() - other.mean():+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"


def errors_saved(own: pd.Series, other: pd.Series, items: int) -> str:
    """How many errors fewer `own` makes than `other` on so many items, with a 95% interval.

    Each has the shares wrong of its runs, by seed; runs of one seed learned from the same items.
    Of the test items' chance it counts the most that can be: as if the two never erred on the
    same one. The chance of a single run isn't known, and isn't counted.
    """
    from scipy.stats import ttest_1samp

    gains = (other if len(own) == len(other) else other.mean()) - own
    of_runs = gains.mean() - ttest_1samp(gains, 0).confidence_interval().low if len(own) > 1 else 0
    of_items = 1.96 * math.sqrt((own.mean() + other.mean()) / items)
    low, high = (gains.mean() + side * math.hypot(of_runs, of_items) for side in (-1, 1))
    return f"{gains.mean():.1%} ({low:.1%} to {high:.1%})"
