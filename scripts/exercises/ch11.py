"""Exercises of chapter 11: our solutions, and checkers that tell the common mistakes apart."""

import statistics
from collections.abc import Callable
from typing import Any

from scripts.ch06_training import BOS, EOS, PAD, Batch
from scripts.ch07_multi30k import Example, make_batch


def check_token_rate(candidate: Callable[[list[Batch], list[float]], float]) -> None:
    """`candidate(batches, seconds)`: real target tokens a second over all batches together."""
    sizes = [[(3, 4), (9, 8), (5, 2)], [(4, 5), (4, 5)], [(2, 12), (7, 3), (6, 6), (1, 9)]]
    batches = [
        make_batch([Example([4] * s + [EOS], [BOS] + [4] * t + [EOS]) for s, t in pairs])
        for pairs in sizes
    ]
    seconds = [2.0, 0.5, 1.5]
    time = sum(seconds)
    real = [sum(t + 1 for _, t in pairs) for pairs in sizes]
    padded = sum(b.tgt_y.numel() for b in batches)
    inputs = sum(int((b.tgt != PAD).sum()) for b in batches)
    rates = statistics.mean(n / s for n, s in zip(real, seconds, strict=True))
    found = float(candidate(batches, list(seconds)))
    for mistake, message in (
        (padded / time, "Padding is counted. The more of it there is, the better it would look."),
        (inputs / time, "The decoder's input is counted. What is asked has </s>, and no <s>."),
        (rates, "That is the mean of the batches' rates. Divide all tokens by all seconds."),
    ):
        assert abs(found - mistake) > 1e-9, message
    assert abs(found - sum(real) / time) < 1e-9, "The rate is another: tokens by seconds."


def token_rate(batches: list[Batch], seconds: list[float]) -> float:
    """All that the model is asked to predict, by all the time."""
    return sum(int((batch.tgt_y != PAD).sum()) for batch in batches) / sum(seconds)


class PretendDevice:
    """A device with a clock of its own: `work` gives an order, and the device is done later.

    `durations` are the seconds of each order; the last stays. To give one takes `launch` seconds.
    """

    launch = 2**-10

    def __init__(self, *durations: float):
        self.durations, self.now, self.done = list(durations), 0.0, 0.0

    def work(self) -> None:
        """Give an order."""
        self.now += self.launch
        seconds = self.durations.pop(0) if self.durations[1:] else self.durations[0]
        self.done = max(self.now, self.done) + seconds

    def wait(self) -> None:
        """Until all orders are done."""
        self.now = max(self.now, self.done)

    def clock(self) -> float:
        """Seconds since the device was switched on."""
        return self.now


def check_stopwatch(candidate: Callable[..., float]) -> None:
    """Holds candidate(work, wait, clock, rounds) against a device whose times are known."""
    disturbed = (0.25, 0.5, 9.0, 0.5, 0.25) * 20  # each five in a row have the same median
    for durations, rounds, lowest, highest, why in (
        ((0.25,), 1, 0.2, 9, "You timed the order alone. Wait before you read the clock again."),
        ((5.0, 0.25), 1, 0.2, 0.3, "The first call is in your time. Wait until it is done."),
        ((5.0, *disturbed), 5, 0, 1, "One disturbed round moved your time far. The median stays."),
        ((5.0, *disturbed), 5, 0.3, 1, "That is the shortest round, not the machine's usual."),
        ((5.0, *disturbed), 5, 0.49, 0.51, "The median of the rounds is another."),
    ):
        device = PretendDevice(*durations)
        found = candidate(device.work, device.wait, device.clock, rounds)
        assert lowest < found < highest, why


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
