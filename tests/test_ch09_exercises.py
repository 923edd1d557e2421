"""Chapter 9's exercises: each checker distinguishes mistakes and accepts other right answers."""

import itertools
import random

import numpy as np
import pytest
import torch
from exercising import assert_told_apart, rejection
from torch import Tensor

from scripts.book.exercises import check
from scripts.exercises import ch09 as ours
from scripts.exercises.ch09 import mean_over_ranks

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


# A stream that can be resumed


def stream_of(order_of, goes_on=True):
    """A `resumable_stream` whose passes have the orders order_of(count, seed, number)."""

    def stream(count, seed, drawn):
        while True:
            number, place = divmod(drawn, count) if goes_on else (0, drawn % count)
            yield from order_of(count, seed, number)[place:]
            drawn += count - place

    return stream


def shuffled(count, *seeds):
    return random.Random(str(seeds)).sample(range(count), count)


def by_one_generator(skips):
    """One generator for all passes. Resumed, it skips all draws, or only the last pass's."""

    def stream(count, seed, drawn):
        rng, left = random.Random(seed), drawn if skips else drawn % count
        while True:
            order = rng.sample(range(count), count)
            yield from order[left:]
            left = max(0, left - count)

    return stream


def with_replacement(count, seed, number):
    return random.Random(f"{seed}:{number}").choices(range(count), k=count)


def seeds_everything(count, seed, number):
    random.seed(f"{seed}:{number}")
    return random.sample(range(count), count)


def by_torchs_generator(count, seed, number):
    torch.manual_seed(1000 * seed + number)
    return torch.randperm(count).tolist()


def by_numpys_generator(count, seed, number):
    np.random.seed(1000 * seed + number)
    return np.random.permutation(count).tolist()


def another_order_once_resumed(count, seed, drawn):
    """It finishes the pass correctly, but then leaves out the next."""
    rest = -drawn % count
    yield from itertools.islice(ours.resumable_stream(count, seed, drawn), rest)
    yield from ours.resumable_stream(count, seed, drawn + rest + (count if rest else 0))


# The likeliest mistakes


def mean_of_rank_means(means: list[Tensor], tokens: list[int]) -> Tensor:
    """What DistributedDataParallel does to means."""
    return sum(means) / len(means)


def weighed_means(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Right until a process has no tokens."""
    return sum(mean * n for mean, n in zip(means, tokens, strict=True)) / sum(tokens)


def hiding_all_nan(means, tokens):
    shares = [n / sum(tokens) for n in tokens]
    return sum(m.nan_to_num() * share for m, share in zip(means, shares, strict=True))


WRONG = {
    "mean_over_ranks": {
        mean_of_rank_means: "get [414.",
        weighed_means: "0 times NaN",
        sum_of_means: "get [1243.",
        sum_over_tokens: "get [4960.",
        in_place: "`means` itself was changed",
        forgetting_one: "get [270.",
        hiding_all_nan: "your mean hides it",
    },
    "resumable_stream": {
        stream_of(with_replacement): "lacks or repeats",
        stream_of(lambda count, seed, number: shuffled(count, seed)): "the same batches",
        stream_of(lambda count, *_: random.Random().sample(range(count), count)): "what else",
        stream_of(lambda count, seed, number: shuffled(count, number)): "Another seed gives",
        lambda count, seed, drawn: ours.resumable_stream(count, seed, 0): "after 5 draws, it",
        by_one_generator(skips=False): "in a later pass",
        stream_of(seeds_everything): "Python's global generator",
        stream_of(by_torchs_generator): "PyTorch's global generator",
        stream_of(by_numpys_generator): "NumPy's global generator",
        stream_of(lambda count, seed, number: shuffled(count, seed + number)): "don't just add",
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    wrong = {words: candidate for candidate, words in WRONG[name].items()}
    assert_told_apart(getattr(ours, f"check_{name}"), wrong)


def test_what_goes_on_wrong_after_the_pass_is_found_as_well():
    assert "in a later pass" in rejection(ours.check_resumable_stream, another_order_once_resumed)


def test_other_right_answers_pass():
    """A checker asks for the right result, not for our way to it."""

    def by_weights(means, tokens):
        shares = torch.tensor(tokens) / sum(tokens)
        return torch.einsum("rd,r->d", torch.stack(means)[shares > 0], shares[shares > 0])

    check(by_weights, "mean_over_ranks")
    check(by_one_generator(skips=True), "resumable_stream")
