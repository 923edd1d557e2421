"""Chapter 11's exercises."""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain, cycle

from scripts.book.exercises import exercise, probe


def timed(function: Callable, *durations: float) -> float:
    """The result for a device whose first order takes 5 seconds, and each further one a duration.

    `work` only gives the order; `wait` waits until all are done.
    """
    orders, clock = chain([5.0], cycle(durations)), [0.0, 0.0]  # now, and when all are done

    def work() -> None:
        clock[1] = max(clock) + next(orders)

    def wait() -> None:
        clock[0] = max(clock)

    return round(function(work, wait, lambda: clock[0], len(durations)), 1)


@exercise(
    lambda: [probe(timed, 0.2), probe(timed, 0.2, 0.5, 9.0, 0.5), probe(timed, 0.2, 0.4, 0.8, 9.0)],
    "not the median of the rounds (of four rounds, the middle two's mean)",
    "the first call is in your time: let it end before you start",  # here, it does nothing
    lambda work, *rest: stopwatch(partial(next, chain([0], iter(work, 0))), *rest),
    "you timed only the order: wait before you read the clock again",
    lambda work, wait, *rest: stopwatch(work, lambda: None, *rest),
)
def stopwatch(work: Callable, wait: Callable, clock: Callable, rounds: int) -> float:
    """Warms up; then each round waits, works and waits again: the median."""
    work()
    times = []
    for _ in range(rounds):
        wait()
        start = clock()
        work()
        wait()
        times.append(clock() - start)
    return statistics.median(times)
