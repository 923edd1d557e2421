"""Where the time of some work goes: PyTorch's profiler, its operations booked by kind.

The caller chooses the kinds. What the profiler doesn't see is Python, or code of ours that is no
operation.
"""

import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

Kinds = Mapping[str, str]  # each with patterns of operations' names; the first that fits counts


def kind_of(operation: str, kinds: Kinds) -> str | None:
    """The kind under which an operation is booked; None where no pattern fits."""
    for kind, patterns in kinds.items():
        if any(fnmatchcase(operation, pattern) for pattern in patterns.split()):
            return kind
    return None


def account(work: Callable[[], object], kinds: Kinds, rest: str) -> dict[str, float]:
    """Seconds of `work()` by kind; under `rest` what the wall clock saw beyond their sum."""
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    total = time.perf_counter() - start
    seconds = dict.fromkeys(kinds, 0.0)
    for event in profiler.key_averages():
        if kind := kind_of(event.key, kinds):
            seconds[kind] += event.self_cpu_time_total / 1e6
    return seconds | {rest: max(0.0, total - sum(seconds.values()))}
