"""What all races share: programs take turns, and ratios are of one round.

A slow moment of the machine hits all programs of a round. So what counts is their ratio in it.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import trange


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of `work()`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(laps: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    """What each of `laps`, by name, returned in each round, after one that warms up.

    Every other round goes backwards, so that no lap is always the first.
    """
    results = {name: [] for name in laps}
    for number in trange(-1, rounds, desc="rounds", leave=False):
        for name in [*laps][:: 1 if number % 2 == 0 else -1]:
            results[name].append(laps[name]())
    return {name: all_rounds[1:] for name, all_rounds in results.items()}


def against(times: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """How many times as long as the reference it took: each round's ratio, and their median."""
    rounds = [round(own / other, 4) for own, other in zip(times, reference, strict=True)]
    return {"times": round(statistics.median(rounds), 4), "rounds": rounds}
