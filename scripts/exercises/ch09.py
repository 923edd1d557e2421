"""Exercises of chapter 9: our solutions, and checkers that tell the common mistakes apart."""

import itertools
import json
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def check_mean_over_ranks(candidate: Callable[[list[Tensor], list[int]], Tensor]) -> None:
    """Holds candidate(means, tokens) against the mean over the tokens themselves."""
    rows = torch.arange(32.0, dtype=torch.float64).view(16, 2).square()  # a gradient for each token

    def answer(tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        means = [part.mean(0) for part in rows[: sum(tokens)].split(tokens)]
        before = [mean.clone() for mean in means]
        found = candidate(means, list(tokens))
        assert all(a.equal(b) for a, b in zip(means, before, strict=True) if a.isfinite().all()), (
            "The gradients that were handed in have changed. They belong to the processes."
        )
        return found, means

    def like(found: Tensor, other: Tensor) -> bool:
        return torch.allclose(found, other, rtol=1e-9, atol=0.0)

    found, means = answer([3, 12, 1])
    assert not like(found, sum(means) / 3), (
        "That is the mean of the means. A token of the process that had one token then counts "
        "twelve times as much as one of the process that had twelve."
    )
    assert not like(found, sum(means)), "That is a sum: with more processes the step would grow."
    assert not like(found, rows.sum(0)), (
        "That is the sum over tokens; the mean over all of them is asked for."
    )
    assert like(found, rows.mean(0)), (
        "Three processes with 3, 12 and 1 tokens: the mean is another."
    )
    assert like(answer([8, 8])[0], rows.mean(0)), "Two equal shares: the mean is another."
    found = answer([3, 0, 13])[0]
    assert not found.isnan().any(), (
        "One process without any token turns the whole gradient into NaN: 0 times NaN is NaN and "
        "not 0."
    )
    assert like(found, rows.mean(0)), "A process without any token changes the mean of the others."


def mean_over_ranks(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Σ nᵣ·meanᵣ / Σ nᵣ over the processes that have tokens."""
    sums = [mean * n for mean, n in zip(means, tokens, strict=True) if n]
    return torch.stack(sums).sum(0) / sum(tokens)


def check_plateau_schedule(candidate: Callable[..., float]) -> None:
    """Looks at all rates of candidate(step, peak, warmup, total, decay): up, level, down to 0."""
    peak, warmup, total, decay = 2.0, 10, 100, 19
    rates = [float(candidate(step, peak, warmup, total, decay)) for step in range(1, total + 60)]

    def near(found: float, wanted: float) -> bool:
        return abs(found - wanted) < 1e-12

    assert rates[0] != 0, (
        "The rate of step 1 is 0: the first batch is computed for nothing. Steps are counted from"
        " 1."
    )
    assert near(rates[0], peak / warmup) and near(rates[warmup // 2 - 1], peak / 2), (
        "The warm-up isn't a straight line that would begin at 0 before step 1."
    )
    assert near(rates[warmup - 1], peak), "At the last step of the warm-up the rate isn't the peak."
    up = [step for step in range(warmup, len(rates)) if rates[step] > rates[step - 1] + 1e-12]
    assert not up, (
        f"At step {up[0] + 1 if up else 0} the rate rises again. Does it count the steps of an "
        "epoch rather than of the run, or follow a cosine past its end?"
    )
    assert min(rates) >= 0, "After the end the rate is negative: the weights would climb."
    level = rates[warmup : total - decay]
    assert all(near(rate, peak) for rate in level), (
        f"The plateau isn't level: {sum(not near(rate, peak) for rate in level)} of its "
        f"{len(level)} steps are below the peak. Only the last `decay` steps fall."
    )
    assert rates[total - 1] > 0, (
        "The rate is 0 at the last step already, which then changes nothing. It is 0 just *after*"
        " the last."
    )
    falls = [
        before - after for before, after in itertools.pairwise(rates[total - decay - 1 : total])
    ]
    assert all(near(fall, peak / (decay + 1)) for fall in falls), (
        "The way down isn't straight from the plateau's last step to zero after the last."
    )
    assert not any(rates[total:]), "After step `total` the rate isn't 0."


def plateau_schedule(step: int, peak: float, warmup: int, total: int, decay: int) -> float:
    """The lowest of three lines, the way up, the level and the way down, and never below 0."""
    return peak * max(0.0, min(step / warmup, 1.0, (total + 1 - step) / (decay + 1)))


def check_running_mean(
    candidate: Callable[[Iterable[dict[str, Tensor]]], dict[str, Tensor]],
) -> None:
    """`candidate(stored)`: an iterator over float16 weights by name, to their mean in float32."""

    def mean_of(*values: float) -> Tensor:
        files = [{"w": torch.full((2,), value, dtype=torch.float16)} for value in values]
        found = candidate(iter(files))["w"]
        assert all(file["w"].eq(value).all() for file, value in zip(files, values, strict=True)), (
            "A checkpoint has changed while you averaged: `+=` writes into the tensor it was given."
        )
        return found

    assert mean_of(40_000, 40_000).isfinite().all(), (
        "The mean of 40,000 and 40,000 overflows. float16 ends at 65,504, and their sum is above "
        "it: add up in float32."
    )
    found = mean_of(4096, 1, 1, 2).float()[0].item()
    assert found not in (513.375, 257.375), (
        "The mean of 4096, 1, 1 and 2 is two by two: the last checkpoint has half of all the "
        "weight."
    )
    assert found != 1024, (
        "The mean of 4096, 1, 1 and 2 is 1024: added to 4096, a 1 is lost, since float16 has "
        "eleven bits."
    )
    assert found == 1025, "The mean of 4096, 1, 1 and 2 is another."
    third = mean_of(1, 1, 2)
    assert third.dtype == torch.float32, (
        "The mean is in float16, as the files are, and has lost its last digits: they are what "
        "averaging is for."
    )
    assert torch.allclose(third.double(), torch.tensor(4 / 3).double(), rtol=1e-6), (
        "The mean of 1, 1 and 2 is right to three digits only: on the way it was in float16."
    )
    assert mean_of(3).tolist() == [3.0, 3.0], "One checkpoint isn't its own mean."
    assert_two_in_memory(candidate)


def assert_two_in_memory(candidate: Callable[[Iterator[dict[str, Tensor]]], Any]) -> None:
    """The second half of the check: how many of eight checkpoints live at the same time."""
    alive: list[weakref.ref] = []
    most = 0

    def stream() -> Iterator[dict[str, Tensor]]:
        nonlocal most
        for value in range(8):
            tensor = torch.full((2,), float(value), dtype=torch.float16)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield {"w": tensor}
            del tensor

    assert candidate(stream())["w"].tolist() == [3.5, 3.5], "The mean of 0 to 7 is another."
    assert most <= 2, f"{most} of 8 checkpoints were in memory at once. Two would have been enough."


def running_mean(stored: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums in double precision, divided by how many there were."""
    count, sums = 0, {}
    for tensors in stored:
        count += 1
        for name, tensor in tensors.items():
            sums[name] = sums.get(name, 0.0) + tensor.double()
    return {name: (total / count).float() for name, total in sums.items()}


def check_resumable_stream(candidate: Callable[[int, int], Any]) -> None:
    """Draws from candidate(count, seed), keeps its state, and goes on in another object."""
    count = 12

    def take(stream: Any, number: int) -> list[int]:
        return [next(stream) for _ in range(number)]

    before = random.getstate(), torch.get_rng_state()
    stream = candidate(count, 1)
    first, second, third = (take(stream, count) for _ in range(3))
    assert all(sorted(one) == list(range(count)) for one in (first, second, third)), (
        "A pass doesn't show each number once."
    )
    assert first != second and second != third, (
        "Two passes have the same order: each epoch would have the same batches."
    )
    assert take(candidate(count, 1), 3 * count) == first + second + third, (
        "The same seed gives another stream: what else does the order hang on?"
    )
    assert take(candidate(count, 2), count) != first, "Another seed gives the same order."
    for drawn in (0, 5, count, 2 * count + 3):
        stream = candidate(count, 1)
        take(stream, drawn)
        state = stream.state()
        wanted = take(stream, 2 * count)
        state = json.loads(
            json.dumps(state)
        )  # as a checkpoint would keep it, after the run went on
        other = candidate(count, 1)
        take(other, 4)
        other.restore(state)
        found, rest = take(other, 2 * count), count - drawn % count
        assert found[:rest] == wanted[:rest], (
            f"Resumed after {drawn} draws, the pass doesn't go on where it was. Do place and order"
            " follow from the state alone, and does the state stay as it was when the stream goes"
            " on?"
        )
        assert found == wanted, (
            f"Resumed after {drawn} draws, the pass goes on right, and the next comes in another "
            "order: what decides it (a generator's state, or the number of the pass) isn't in the"
            " state."
        )
    after = random.getstate(), torch.get_rng_state()
    assert before[0] == after[0] and before[1].equal(after[1]), (
        "A global generator has moved on: dropout would draw otherwise because of your stream."
    )


class SeededStream:
    """0 to `count` − 1, in an order that follows from the seed and the pass's number alone."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed
        self.restore([0, 0])

    def __iter__(self) -> "SeededStream":
        return self

    def __next__(self) -> int:
        if self.place == self.count:
            self.restore([self.number + 1, 0])
        self.place += 1
        return self.order[self.place - 1]

    def state(self) -> list[int]:
        """The number of the pass, and the place in it."""
        return [self.number, self.place]

    def restore(self, state: list[int]) -> None:
        """Go there; the order is made anew, as `epoch_plan` does."""
        self.number, self.place = state
        self.order = list(range(self.count))
        random.Random(f"{self.seed}:{self.number}").shuffle(self.order)


def resumable_stream(count: int, seed: int) -> SeededStream:
    """A stream at its beginning."""
    return SeededStream(count, seed)
