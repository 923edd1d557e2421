"""Chapter 7's exercises: each checker distinguishes mistakes and accepts other right answers."""

import random

import numpy as np
import pytest
import torch
from exercising import assert_told_apart

from scripts.book.exercises import check
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import SPECIALS, Example, padding_share, token_batches
from scripts.exercises import ch07
from scripts.exercises.ch07 import budget_batches, wasted_scores, word_numbers


def leaky_numbers(splits, min_freq):
    return word_numbers({"train": sum(splits.values(), [])}, min_freq)


def leaky_counts(splits, min_freq):
    """Training's words, counted in all splits."""
    known = {word for words in splits["train"] for word in words}
    everything = [[w for w in words if w in known] for words in sum(splits.values(), [])]
    return word_numbers({"train": everything}, min_freq)


def renumbered(splits, min_freq):
    """Specials at the end, as if they were words."""
    numbers = word_numbers(splits, min_freq)
    return {word: (i - 4) % len(numbers) for word, i in numbers.items()}


def above_the_bound(splits, min_freq):
    return word_numbers(splits, min_freq if min_freq == 1 else min_freq + 1)


def unsorted_numbers(splits, min_freq):
    """In the order in which the words appear."""
    known = word_numbers(splits, min_freq)
    words = dict.fromkeys(w for words in splits["train"] for w in words if w in known)
    return {word: i for i, word in enumerate([*SPECIALS, *words])}


def with_holes(splits, min_freq):
    return {word: i + (i > 5) for word, i in word_numbers(splits, min_freq).items()}


def useful(lengths, batches):
    return 1 - wasted_scores(lengths, batches)


def wasted_cells(lengths, batches):
    return padding_share([(n, n) for n in lengths], batches)


def mean_of_batch_shares(lengths, batches):
    return sum(wasted_scores(lengths, [batch]) for batch in batches) / len(batches)


def both_padded(lengths, batches):
    """Only the scores between a padded query and a padded key."""
    wasted = total = 0
    for batch in batches:
        widest = max(lengths[i] for i in batch)
        wasted += sum((widest - lengths[i]) ** 2 for i in batch)
        total += len(batch) * widest**2
    return wasted / total


def as_wide_as_the_corpus(lengths, batches):
    return 1 - sum(n * n for n in lengths) / (len(lengths) * max(lengths) ** 2)


def forgetful_batches(examples, max_tokens, rng):
    """A batch is handed out when the next one begins, so the last never is."""
    return budget_batches(examples, max_tokens, rng)[:-1]


def batches_by_real_tokens(examples, max_tokens, rng):
    batches, total = [[]], 0
    for i in sorted(range(len(examples)), key=lambda i: len(examples[i].src)):
        tokens = len(examples[i].src) + len(examples[i].tgt)
        if total + tokens > max_tokens:
            batches, total = [*batches, []], 0
        batches[-1].append(i)
        total += tokens
    rng.shuffle(batches)
    return batches


def batches_by_longest_pair(examples, max_tokens, rng):
    """Takes the longest sum of a source and its target for the sum of the longest."""
    batches, longest = [[]], 0
    for i in sorted(range(len(examples)), key=lambda i: len(examples[i].src)):
        pair = len(examples[i].src) + len(examples[i].tgt)
        longest = max(longest, pair)
        if longest * (len(batches[-1]) + 1) > max_tokens:
            batches, longest = [*batches, []], pair
        batches[-1].append(i)
    rng.shuffle(batches)
    return batches


def half_for_each_side(examples, max_tokens, rng):
    return token_batches(examples, max_tokens // 2, rng)


def padded_twice(examples, max_tokens, rng):
    """Fills up the last batch with a sentence that has already had its turn."""
    batches = budget_batches(examples, max_tokens, rng)
    return [*batches[:-1], [*batches[-1], batches[0][0]]]


def unsorted_batches(examples, max_tokens, rng):
    size = max_tokens // max(len(e.src) + len(e.tgt) for e in examples)
    order = rng.sample(range(len(examples)), len(examples))
    return [order[i : i + size] for i in range(0, len(order), size)]


def one_by_one(examples, max_tokens, rng):
    return [[i] for i in rng.sample(range(len(examples)), len(examples))]


def silent_batches(examples, max_tokens, rng):
    """Leaves out what fits no batch, and says nothing."""
    some = [i for i, e in enumerate(examples) if len(e.src) + len(e.tgt) <= max_tokens]
    found = budget_batches([examples[i] for i in some], max_tokens, rng)
    return [[some[i] for i in batch] for batch in found]


def with_an_empty_one(examples, max_tokens, rng):
    return [*budget_batches(examples, max_tokens, rng), []]


def ignoring_the_seed(examples, max_tokens, rng):
    return budget_batches(examples, max_tokens, random.Random(0))


def of_the_global_generator(examples, max_tokens, rng):
    return budget_batches(examples, max_tokens, random)


def from_short_to_long(examples, max_tokens, rng):
    """By their targets alone, so the widths of both sides aren't quite in order."""
    batches = budget_batches(examples, max_tokens, rng)
    return sorted(batches, key=lambda batch: max(len(examples[i].tgt) for i in batch))


WRONG = {
    "word_numbers": {
        leaky_numbers: "another split was read",
        leaky_counts: "were other splits",
        renumbered: "ids 0 to 3",
        above_the_bound: "occurs twice",
        unsorted_numbers: "before a frequent one",
        with_holes: "gaps",
    },
    "wasted_scores": {
        wasted_cells: "padded cells",
        mean_of_batch_shares: "divide once",
        useful: "useful share",
        both_padded: "one padded side",
        as_wide_as_the_corpus: "wide as its own longest row",
    },
    "budget_batches": {
        token_batches: "longer side alone would fit",
        forgetful_batches: "in no batch",
        batches_by_real_tokens: "real tokens would fit",
        batches_by_longest_pair: "a batch takes",
        half_for_each_side: "but is refused",
        padded_twice: "in two places",
        unsorted_batches: "share batches",
        one_by_one: "far from full",
        from_short_to_long: "sorted by length",
        ignoring_the_seed: "another seed gives the same",
        of_the_global_generator: "what else is random",
        with_an_empty_one: "a batch is empty",
        silent_batches: "raise a ValueError",
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    check = getattr(ch07, f"check_{name}")
    assert_told_apart(check, {words: wrong for wrong, words in WRONG[name].items()})


def test_another_right_answer_passes():
    """A checker asks for the right result, not for our way to it."""

    def score_by_score(lengths, batches):
        wasted = total = 0
        for batch in batches:
            widest = max(lengths[i] for i in batch)
            for i in batch:
                real = [at < lengths[i] for at in range(widest)]
                wasted += sum(not (q and k) for q in real for k in real)
                total += widest**2
        return wasted / total

    def by_masks(lengths, batches):
        """In numbers of the default dtype."""
        useful = total = 0
        for batch in batches:
            width = torch.tensor([lengths[i] for i in batch])
            real = torch.arange(int(width.max())) < width[:, None]
            both = real[:, :, None] & real[:, None, :]
            useful, total = useful + both.sum(), total + both.numel()
        return (1 - useful / total).item()

    check(score_by_score, "wasted_scores")
    check(by_masks, "wasted_scores")
    check(lambda *given: float(np.float32(wasted_scores(*given))), "wasted_scores")


def test_the_budget_counts_both_rectangles():
    examples = [Example([EOS] * 3, [BOS] * 5)] * 7
    found = budget_batches(examples, 24, random.Random(0))
    assert sorted(map(len, found)) == [1, 3, 3]
