"""Chapter 11's exercises: our solutions, and checkers that say what is wrong."""

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
        "In 4 seconds the model is asked for 63 tokens: each </s> counts, <s> and padding don't. "
        f"At your rate it would be {found:.1f}. Divide all tokens by all seconds."
    )


def token_rate(batches: list[Batch], seconds: list[float]) -> float:
    """All tokens that the model is asked to predict, divided by all seconds."""
    return sum(int((batch.tgt_y != PAD).sum()) for batch in batches) / sum(seconds)


class PretendDevice:
    """A device with a clock of its own, in seconds: `work` gives an order, `wait` waits for all.

    Orders take `durations`, the last of which repeats; giving one takes `launch`.
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
    """Checks candidate(work, wait, clock, rounds) on a device whose times are known."""
    disturbed = (5.0, *(0.25, 0.5, 9.0, 0.5, 0.25) * 20)  # any five in a row have the same median
    even = (5.0, *(0.25, 0.5, 1.0, 9.0) * 20)  # and any four
    for durations, rounds, wanted, why in (
        ((5.0, 0.25), 1, 0.25, "The first call is in your time. Let it end before you start"),
        (disturbed, 5, 0.5, "That isn't the median of 0.25, 0.5, 9, 0.5 and 0.25 seconds"),
        (even, 4, 0.75, "Of four rounds the median is the middle two's mean"),
    ):
        device = PretendDevice(*durations)
        found = candidate(device.work, device.wait, device.clock, rounds)
        if found < 0.03:
            why = "You timed only the order. Wait before you read the clock again"
        assert abs(found - wanted) < 0.03, f"{why}: {wanted} s, but you get {found:.2f} s."


def stopwatch(
    work: Callable[[], Any], wait: Callable[[], Any], clock: Callable[[], float], rounds: int
) -> float:
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
