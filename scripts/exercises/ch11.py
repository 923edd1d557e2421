"""Chapter 11's exercises."""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain, cycle

from scripts.book.exercises import exercise, probe
from scripts.ch06_training import BOS, EOS, PAD, Batch
from scripts.ch07_multi30k import Example, make_batch


def batch_of(*words: int) -> Batch:
    """A sentence for each number of target words."""
    return make_batch([Example([4, 4, EOS], [BOS, *[4] * n, EOS]) for n in words])


@exercise(
    lambda: [([batch_of(4, 8, 2), batch_of(5, 5), batch_of(12, 3, 6, 9)], [2.0, 0.5, 1.5])],
    "in 4 seconds the model is asked for 63 tokens: each </s> counts, <s> and padding don't",
    "padding is counted",
    lambda batches, seconds: sum(batch.tgt_y.numel() for batch in batches) / sum(seconds),
    "<s> is counted",
    lambda batches, seconds: sum(b.ntokens + len(b.src) for b in batches) / sum(seconds),
)
def token_rate(batches: list[Batch], seconds: list[float]) -> float:
    """All tokens that the model is asked to predict, divided by all seconds."""
    return sum(int((batch.tgt_y != PAD).sum()) for batch in batches) / sum(seconds)


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
