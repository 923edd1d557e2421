"""Chapter 9's exercises: each checker takes our solution, and tells the common mistakes apart."""

import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from exercising import assert_told_apart
from torch import Tensor

from scripts.book.exercises import rejection
from scripts.ch06_training import cosine_rate, inverse_sqrt_rate
from scripts.exercises import ch09 as ours
from scripts.exercises.ch09 import SeededStream, mean_over_ranks, plateau_schedule, running_mean

# A mean over unequal shares


def sum_of_means(means, tokens):
    return sum(means)


def sum_over_tokens(means, tokens):
    return sum(mean * n for mean, n in zip(means, tokens, strict=True) if n)


def in_place(means, tokens):
    for mean, n in zip(means, tokens, strict=True):
        mean *= n
    return sum(mean for mean, n in zip(means, tokens, strict=True) if n) / sum(tokens)


def forgetting_one(means, tokens):
    return mean_over_ranks(means[:-1], tokens[:-1])


# Warm-up, plateau, decay


def past_the_cosine(step, peak, warmup, total, decay):
    """Half a cosine, and then the other half: up again."""
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.6, (step - warmup) / (total - warmup))))


def into_the_negative(step, peak, warmup, total, decay):
    return peak * min(step / warmup, 1.0, (total + 1 - step) / (decay + 1))


def falling_at_once(step, peak, warmup, total, decay):
    return cosine_rate(step, peak, warmup, total)


def zero_at_the_last(step, peak, warmup, total, decay):
    return peak * max(0.0, min(step / warmup, 1.0, (total - step) / decay))


def curved_at_the_end(step, peak, warmup, total, decay):
    if step <= total - decay:
        return plateau_schedule(step, peak, warmup, total, decay)
    return peak * max(0.0, (total + 1 - step) / (decay + 1)) ** 2


def never_ending(step, peak, warmup, total, decay):
    line = peak * min(step / warmup, 1.0, (total + 1 - min(step, total)) / (decay + 1))
    return line


def not_a_line_up(step, peak, warmup, total, decay):
    return plateau_schedule(step, peak, warmup, total, decay) * min(1, step / warmup)


def short_of_the_peak(step, peak, warmup, total, decay):
    return min(plateau_schedule(step, peak, warmup, total, decay), 0.9 * peak)


# A mean that fits into memory


def all_at_once(stored):
    files = list(stored)
    return {n: torch.stack([file[n].float() for file in files]).mean(0) for n in files[0]}


def in_the_files_type(stored):
    """Stays within two, and within float16, by weighing each before it is added."""
    return {name: mean.half() for name, mean in running_mean(stored).items()}


def small_steps_in_float16(stored):
    mean = {}
    for count, tensors in enumerate(stored, start=1):
        for name, tensor in tensors.items():
            before = mean.get(name, torch.zeros_like(tensor))
            mean[name] = before + (tensor - before) / count
    return {name: tensor.float() for name, tensor in mean.items()}


def spoiling_the_first(stored):
    count, sums = 0, None
    for tensors in stored:
        count += 1
        if sums is None:
            sums = tensors
        else:
            for name, tensor in tensors.items():
                sums[name] += tensor
    return {name: total.float() / count for name, total in sums.items()}


def overflowing_one_by_one(stored):
    count, sums = 0, {}
    for tensors in stored:
        count += 1
        for name, tensor in tensors.items():
            sums[name] = sums.get(name, 0) + tensor
    return {name: total.float() / count for name, total in sums.items()}


# A stream that can be resumed


class SameOrder(SeededStream):
    def restore(self, state):
        super().restore([0, state[1]])


class Unseeded(SeededStream):
    def restore(self, state):
        super().restore(state)
        random.Random().shuffle(self.order)


class SeedlessStream(SeededStream):
    def __init__(self, count, seed):
        super().__init__(count, 0)


class WithReplacement(SeededStream):
    def restore(self, state):
        super().restore(state)
        rng = random.Random(f"{self.seed}:{self.number}")
        self.order = rng.choices(range(self.count), k=self.count)


class Aliased(SeededStream):
    """The state is the object's own list, and runs on with it."""

    def __init__(self, count, seed):
        self.shared = [0, 0]
        super().__init__(count, seed)

    def __next__(self):
        drawn = super().__next__()
        self.shared[:] = [self.number, self.place]
        return drawn

    def state(self):
        return self.shared


class Meddling(SeededStream):
    """Seeds the generator that dropout draws from."""

    def restore(self, state):
        torch.manual_seed(self.seed)
        super().restore(state)


# The likeliest mistakes


def mean_of_rank_means(means: list[Tensor], tokens: list[int]) -> Tensor:
    """what DistributedDataParallel does to means."""
    return sum(means) / len(means)


def weighed_means(means: list[Tensor], tokens: list[int]) -> Tensor:
    """right until somebody has nothing."""
    return sum(mean * n for mean, n in zip(means, tokens, strict=True)) / sum(tokens)


def restarting_cosine(step: int, peak: float, warmup: int, total: int, decay: int) -> float:
    """each epoch, here half of the run, begins with its own step 1."""
    epoch = total // 2
    return cosine_rate((step - 1) % epoch + 1, peak, warmup, epoch)


def counted_from_zero(step: int, peak: float, warmup: int, total: int, decay: int) -> float:
    """the optimizer's first step has rate 0."""
    return plateau_schedule(step - 1, peak, warmup, total, decay)


def mean_in_float16(stored: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """the sum has the type of its parts."""
    files = list(stored)
    return {name: (sum(file[name] for file in files) / len(files)).float() for name in files[0]}


def mean_two_by_two(stored: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """(mean so far + next) / 2."""
    mean: dict[str, Tensor] = {}
    for tensors in stored:
        mean = {name: (mean.get(name, t.float()) + t.float()) / 2 for name, t in tensors.items()}
    return mean


class ForgetfulStream(SeededStream):
    """the state lacks the generator's."""

    def __init__(self, count: int, seed: int):
        self.count, self.rng, self.place = count, random.Random(seed), 0
        self.order = self.rng.sample(range(count), count)

    def __next__(self) -> int:
        if self.place == self.count:
            self.order, self.place = self.rng.sample(range(self.count), self.count), 0
        self.place += 1
        return self.order[self.place - 1]

    def state(self) -> list[Any]:
        return [self.order, self.place]

    def restore(self, state: list[Any]) -> None:
        self.order, self.place = state


class OrderlessStream(ForgetfulStream):
    """only how far it was."""

    def state(self) -> list[Any]:
        return [self.place]

    def restore(self, state: list[Any]) -> None:
        (self.place,) = state


WRONG = {
    "mean_over_ranks": {
        mean_of_rank_means: "mean of the means",
        weighed_means: "0 times NaN",
        sum_of_means: "step would grow",
        sum_over_tokens: "sum over tokens",
        in_place: "belong to the processes",
        forgetting_one: "the mean is another",
    },
    "plateau_schedule": {
        restarting_cosine: "At step 51 the rate rises again",
        past_the_cosine: "At step 101 the rate rises again",
        counted_from_zero: "first batch is computed for nothing",
        into_the_negative: "would climb",
        falling_at_once: "plateau isn't level",
        zero_at_the_last: "at the last step already",
        curved_at_the_end: "isn't straight",
        never_ending: "After step `total`",
        not_a_line_up: "warm-up isn't a straight line",
        short_of_the_peak: "isn't the peak",
    },
    "running_mean": {
        mean_in_float16: "overflows",
        mean_two_by_two: "half of all the weight",
        all_at_once: "8 of 8 checkpoints",
        in_the_files_type: "is in float16",
        spoiling_the_first: "writes into the tensor",
    },
    "resumable_stream": {
        ForgetfulStream: "the pass goes on right, and the next",
        OrderlessStream: "the pass doesn't go on where it was",
        SameOrder: "same batches",
        Unseeded: "what else does the order hang on",
        SeedlessStream: "Another seed gives the same order",
        WithReplacement: "each number once",
        Meddling: "dropout would draw otherwise",
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    wrong = {words: candidate for candidate, words in WRONG[name].items()}
    assert_told_apart(getattr(ours, f"check_{name}"), wrong)


def test_more_ways_to_go_wrong():
    """Mistakes whose message another one has already."""
    assert "overflows" in rejection(ours.check_running_mean, overflowing_one_by_one)
    assert "three digits only" in rejection(ours.check_running_mean, small_steps_in_float16)
    assert "stay as it was" in rejection(ours.check_resumable_stream, Aliased)


def test_other_right_answers_pass():
    """A checker asks for the thing, not for our way to it."""

    def by_weights(means, tokens):
        shares = [n / sum(tokens) for n in tokens]
        return sum(m.nan_to_num() * share for m, share in zip(means, shares, strict=True))

    def by_cases(step, peak, warmup, total, decay):
        if step > total:
            return 0.0
        if step <= warmup:
            return peak * step / warmup
        left = total - step
        return peak if left >= decay else peak * (left + 1) / (decay + 1)

    def by_updates(stored):
        mean = {}
        for count, tensors in enumerate(stored, start=1):
            for name, tensor in tensors.items():
                before = mean.get(name, torch.zeros_like(tensor, dtype=torch.float64))
                mean[name] = before + (tensor - before) / count
        return {name: tensor.float() for name, tensor in mean.items()}

    class Kept(ForgetfulStream):
        """A generator that runs along, with its state in the state."""

        def state(self):
            return [list(self.order), self.place, self.rng.getstate()]

        def restore(self, state):
            self.order, self.place, (version, internal, rest) = state
            self.rng.setstate((version, tuple(internal), rest))

    ours.check_mean_over_ranks(by_weights)
    ours.check_plateau_schedule(by_cases)
    ours.check_running_mean(by_updates)
    ours.check_resumable_stream(Kept)


def test_the_plateau_agrees_with_the_series_schedules_where_they_meet():
    for step in range(1, 11):  # all warm up alike
        wanted = cosine_rate(step, 3.0, 10, 50), inverse_sqrt_rate(step, 3.0, 10)
        assert wanted == pytest.approx([plateau_schedule(step, 3.0, 10, 50, 5)] * 2)
    assert plateau_schedule(51, 3.0, 10, 50, 5) == cosine_rate(51, 3.0, 10, 50) == 0
