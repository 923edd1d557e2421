"""What all races share: programs take turns, ratios are of one round, and where the time goes.

A slow moment of the machine hits all programs of a round. So what counts is their ratio in it.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import trange

from scripts.fast import compiled


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


def account(
    work: Callable[[], object], kinds: Mapping[str, str], rest: str, count: int = 1
) -> dict[str, float]:
    """Seconds of `work()` by kind, over `count`; under `rest` the wall clock's beyond their sum.

    A kind is some patterns of operations' names; the first that fits an operation has its time.
    What PyTorch's profiler doesn't see is Python. Our functions in C appear as FILE::NAME.
    """
    call = compiled.call

    def seen(file: str, name: str, *parts: Any) -> None:
        with record_function(f"{file}::{name}"):
            call(file, name, *parts)

    watched = profile(activities=[ProfilerActivity.CPU])
    with patch.object(compiled, "call", seen), watched as profiler:
        total = seconds_of(work)  # the profiler's own start and end take longer than a step
    seconds = dict.fromkeys(kinds, 0.0)
    for event in profiler.key_averages():
        for kind, patterns in kinds.items():
            if any(fnmatchcase(event.key, pattern) for pattern in patterns.split()):
                seconds[kind] += event.self_cpu_time_total / 1e6
                break
    seconds |= {rest: max(0.0, total - sum(seconds.values()))}
    return {kind: round(time / count, 5) for kind, time in seconds.items()}
