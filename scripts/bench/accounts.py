"""Where the time of some work goes: PyTorch's profiler, its operations booked by kind.

The caller chooses the kinds. Our functions in C appear as FILE::NAME. What the profiler doesn't
see is Python.
"""

import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile, record_function

from scripts.fast import compiled

Kinds = Mapping[str, str]  # each with patterns of operations' names; the first that fits counts


def kind_of(operation: str, kinds: Kinds) -> str | None:
    """The kind under which an operation is booked; None if no pattern fits."""
    for kind, patterns in kinds.items():
        if any(fnmatchcase(operation, pattern) for pattern in patterns.split()):
            return kind
    return None


def account(work: Callable[[], object], kinds: Kinds, rest: str) -> dict[str, float]:
    """Seconds of `work()` by kind; under `rest` what the wall clock saw beyond their sum."""
    call = compiled.call

    def seen(file: str, name: str, *given: Any) -> None:
        with record_function(f"{file}::{name}"):
            call(file, name, *given)

    watched = profile(activities=[ProfilerActivity.CPU])
    with patch.object(compiled, "call", seen), watched as profiler:
        start = time.perf_counter()  # the profiler's own start and end take longer than a step
        work()
        total = time.perf_counter() - start
    seconds = dict.fromkeys(kinds, 0.0)
    for event in profiler.key_averages():
        if kind := kind_of(event.key, kinds):
            seconds[kind] += event.self_cpu_time_total / 1e6
    return seconds | {rest: max(0.0, total - sum(seconds.values()))}
