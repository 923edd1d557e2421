"""Chapter 7's exercises: each checker takes our solution, and tells the common mistakes apart."""

import random

import pytest

from scripts import ch07_multi30k as ch07
from scripts.book.exercises import rejection
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import Example, merge_pair, solution_word_numbers, token_batches


def padded_twice(examples, max_tokens, rng):
    """Fills the last batch up with sentences that had their turn."""
    batches = ch07.solution_budget_batches(examples, max_tokens, rng)
    return [*batches[:-1], [*batches[-1], batches[0][0]]]


def unsorted_batches(examples, max_tokens, rng):
    """One sentence length after another, as they come: within the budget, and mostly padding."""
    size = max_tokens // max(len(e.src) + len(e.tgt) for e in examples)
    order = list(range(len(examples)))
    rng.shuffle(order)
    return ch07.sentence_batches(order, size)


def one_by_one(examples, max_tokens, rng):
    order = list(range(len(examples)))
    rng.shuffle(order)
    return [[i] for i in order]


def silent_batches(examples, max_tokens, rng):
    """Leaves out what fits no batch, and says nothing."""
    some = [i for i, e in enumerate(examples) if len(e.src) + len(e.tgt) <= max_tokens]
    found = ch07.solution_budget_batches([examples[i] for i in some], max_tokens, rng)
    return [[some[i] for i in batch] for batch in found]


def ignoring_the_seed(examples, max_tokens, rng):
    return ch07.solution_budget_batches(examples, max_tokens, random.Random(0))


def of_the_global_generator(examples, max_tokens, rng):
    return ch07.solution_budget_batches(examples, max_tokens, random)


def from_short_to_long(examples, max_tokens, rng):
    def width(batch):
        sides = [(len(examples[i].src), len(examples[i].tgt)) for i in batch]
        return sum(map(max, zip(*sides, strict=True)))

    return sorted(ch07.solution_budget_batches(examples, max_tokens, rng), key=width)


def leftmost_pair_first(word, merges):
    pieces = (*word, "</w>")
    while found := [pair for pair in zip(pieces, pieces[1:], strict=False) if pair in merges]:
        pieces = merge_pair(pieces, found[0])
    return list(pieces)


def each_merge_once(word, merges):
    pieces = [*word, "</w>"]
    for a, b in merges:
        for i in range(len(pieces) - 1):
            if (pieces[i], pieces[i + 1]) == (a, b):
                pieces[i : i + 2] = [a + b]
                break
    return pieces


def without_mark_letters(word, merges):
    return ch07.solution_apply_merges(word[:-1], merges)


def renumbered(splits, min_freq):
    """Specials at the end, as if they were words."""
    numbers = solution_word_numbers(splits, min_freq)
    return {word: (i - 4) % len(numbers) for word, i in numbers.items()}


def above_the_bound(splits, min_freq):
    """`min_freq` itself left outside, but for 1."""
    return solution_word_numbers(splits, min_freq if min_freq == 1 else min_freq + 1)


def alphabetical(splits, min_freq):
    numbers = solution_word_numbers(splits, min_freq)
    words = sorted(numbers.keys() - set(ch07.SPECIALS))
    return {word: i for i, word in enumerate([*ch07.SPECIALS, *words])}


def with_holes(splits, min_freq):
    return {word: i + (i > 5) for word, i in solution_word_numbers(splits, min_freq).items()}


def too_long_rows(ids, max_len):
    return [[*ids[at : at + max_len], EOS] for at in range(0, max(1, len(ids)), max_len)]


def with_an_empty_end(ids, max_len):
    room = max_len - 1
    return [[*ids[at : at + room], EOS] for at in range(0, len(ids) + 1, room)]


def useful(lengths, batches):
    return 1 - ch07.solution_wasted_scores(lengths, batches)


def both_padded(lengths, batches):
    """Scores between a padded query and a padded key alone."""
    wasted = total = 0
    for batch in batches:
        widest = max(lengths[i] for i in batch)
        wasted += sum((widest - lengths[i]) ** 2 for i in batch)
        total += len(batch) * widest**2
    return wasted / total


def as_wide_as_the_corpus(lengths, batches):
    return 1 - sum(n * n for n in lengths) / (len(lengths) * max(lengths) ** 2)


WRONG = {
    "word_numbers": {
        ch07.leaky_numbers: "test set was read",
        ch07.leaky_counts: "leak as well, of counts",
        renumbered: "ids 0 to 3",
        above_the_bound: "bound itself inside",
        alphabetical: "how often a word occurs",
        with_holes: "holes",
    },
    "split_rows": {
        ch07.marked_then_split: "don't end with </s>",
        ch07.first_row_only: "never translated",
        too_long_rows: "takes a place as well",
        with_an_empty_end: "say anything",
    },
    "apply_merges": {
        ch07.longest_pieces: "learned first",
        ch07.unmarked_pieces: "no '</w>' at its end",
        each_merge_once: "isn't applied twice",
        without_mark_letters: "letters were lost",
    },
    "wasted_scores": {
        ch07.wasted_cells: "a square",
        ch07.mean_of_batch_shares: "divide once",
        useful: "useful share",
        both_padded: "One padded partner",
        as_wide_as_the_corpus: "wide as its own longest row",
    },
    "budget_batches": {
        token_batches: "longer side fits alone",
        ch07.forgetful_batches: "in no batch",
        ch07.batches_by_real_tokens: "real tokens fit",
        padded_twice: "in two places",
        unsorted_batches: "share batches",
        one_by_one: "far from full",
        from_short_to_long: "sorted by length",
        ignoring_the_seed: "Another seed gives the same",
        of_the_global_generator: "where else does chance",
        silent_batches: "nobody is told",
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_the_solution_passes(name):
    check, solution = (getattr(ch07, f"{kind}_{name}") for kind in ("check", "solution"))
    assert check(solution) is None


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    check = getattr(ch07, f"check_{name}")
    answers = {wrong: rejection(check, wrong) for wrong in WRONG[name]}
    for wrong, words in WRONG[name].items():
        assert words in answers[wrong], (wrong.__name__, answers[wrong])
    assert len(set(answers.values())) == len(answers)


def test_other_right_answers_pass():
    """A checker asks for the thing, not for our way to it."""

    def in_learned_order(word, merges):
        pieces = (*word, "</w>")
        for pair in merges:
            pieces = merge_pair(pieces, pair)
        return pieces

    def counted_score_by_score(lengths, batches):
        wasted = total = 0
        for batch in batches:
            widest = max(lengths[i] for i in batch)
            for i in batch:
                real = [at < lengths[i] for at in range(widest)]
                wasted += sum(not (q and k) for q in real for k in real)
                total += widest**2
        return wasted / total

    ch07.check_apply_merges(in_learned_order)
    ch07.check_wasted_scores(counted_score_by_score)
    assert "leftmost" in rejection(ch07.check_apply_merges, leftmost_pair_first)


def test_a_row_is_cut_from_nothing_else():
    rows = ch07.solution_split_rows(list(range(10, 40)), 11)
    assert rows == [[*range(10, 20), EOS], [*range(20, 30), EOS], [*range(30, 40), EOS]]


def test_the_budget_counts_both_rectangles():
    examples = [Example([EOS] * 3, [BOS] * 5)] * 7
    found = ch07.solution_budget_batches(examples, 24, random.Random(0))
    assert sorted(map(len, found)) == [1, 3, 3]
