"""Exercises of chapter 11: our solutions, and checkers that tell the common mistakes apart."""

import statistics
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

from scripts.ch06_training import BOS, EOS, PAD, Batch
from scripts.ch07_multi30k import Example, make_batch


def check_token_rate(candidate: Callable[[list[Batch], list[float]], float]) -> None:
    """`candidate(batches, seconds)`: real target tokens a second over all batches together."""
    batches = [
        make_batch([Example([4, EOS], [BOS, *[4] * words, EOS]) for words in lengths])
        for lengths in ((4, 8, 2), (5, 5), (12, 3, 6, 9))
    ]
    found = 4 * float(candidate(batches, [2.0, 0.5, 1.5]))
    assert abs(found - 63) < 1e-6, (
        "In all 4 seconds 63 tokens are asked: each </s>, and no <s> and no padding. Your rate "
        f"makes {found:.1f} of them. Divide all tokens by all seconds."
    )


def token_rate(batches: list[Batch], seconds: list[float]) -> float:
    """All that the model is asked to predict, by all the time."""
    return sum(int((batch.tgt_y != PAD).sum()) for batch in batches) / sum(seconds)


class PretendDevice:
    """A device with a clock of its own, in seconds: `work` gives an order, `wait` waits for all.

    Orders take `durations`, the last of which stays; to give one takes `launch`.
    """

    launch = 2**-10

    def __init__(self, *durations: float):
        self.durations = chain(durations, repeat(durations[-1]))
        self.now = self.done = 0.0

    def work(self) -> None:
        self.now += self.launch
        self.done = max(self.now, self.done) + next(self.durations)

    def wait(self) -> None:
        self.now = max(self.now, self.done)

    def clock(self) -> float:
        return self.now


def check_stopwatch(candidate: Callable[..., float]) -> None:
    """Holds candidate(work, wait, clock, rounds) against a device whose times are known."""
    disturbed = (5.0, *(0.25, 0.5, 9.0, 0.5, 0.25) * 20)  # each five in a row have one median
    for durations, rounds, wanted, why in (
        ((0.25,), 1, 0.25, "You timed the order alone. Wait before you read the clock again"),
        ((5.0, 0.25), 1, 0.25, "The first call is in your time. Wait until it is done"),
        (disturbed, 5, 0.5, "The median of 0.25, 0.5, 9, 0.5 and 0.25 seconds is another"),
    ):
        device = PretendDevice(*durations)
        found = candidate(device.work, device.wait, device.clock, rounds)
        assert abs(found - wanted) < 0.03, f"{why}: {wanted}, and you find {found:.2f}."


def stopwatch(
    work: Callable[[], Any], wait: Callable[[], Any], clock: Callable[[], float], rounds: int
) -> float:
    """Warm up, then wait, time, wait: the median."""
    work()
    times = []
    for _ in range(rounds):
        wait()
        start = clock()
        work()
        wait()
        times.append(clock() - start)
    return statistics.median(times)
