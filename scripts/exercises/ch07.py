"""Chapter 7's exercises: our solutions, and checkers that say what is wrong."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from scripts.book.exercises import compare
from scripts.ch06_training import BOS, EOS, PAD, UNK
from scripts.ch07_multi30k import SPECIALS, Example, padding_share


def word_numbers(splits: dict[str, list[list[str]]], min_freq: int) -> dict[str, int]:
    """Word -> id: the specials, then the training split's words by count."""
    counts = Counter(word for words in splits["train"] for word in words)
    words = [word for word, times in counts.most_common() if times >= min_freq]
    return {word: i for i, word in enumerate([*SPECIALS, *words])}


def check_word_numbers(candidate: Callable[..., dict[str, int]]) -> None:
    """Numbers the words of three small splits."""
    splits = {
        "train": [
            ["rennt", "ein", "Hund"],
            ["ein", "Hund", "schläft"],
            ["ein", "Ball", "trifft", "noch", "ein", "Ball"],
        ],
        "val": [["ein", "Ball", "rollt"]],
        "test": [["eine", "Katze", "schläft"]],
    }
    counts = Counter(word for words in splits["train"] for word in words)
    found = candidate(splits, 1)
    assert isinstance(found, dict), f"return a dictionary, word to id, not a {type(found).__name__}"
    assert [found.get(name) for name in SPECIALS] == [PAD, UNK, BOS, EOS], (
        "the four special entries don't have their ids 0 to 3, on which masks and decoders rely"
    )
    seen = sorted(found.keys() - counts.keys() - set(SPECIALS))
    assert not seen, (
        f"{seen[0]!r} has an id, but is in no training sentence: another split was read, and can "
        "no longer show how often a word is unknown"
    )
    assert counts.keys() <= found.keys(), "with min_freq=1 a word of the training split has no id"
    assert sorted(found.values()) == list(range(len(found))), (
        "the ids have gaps, or two words share one: they are rows of a table, 0 to V − 1"
    )
    ordered = [counts[word] for word in sorted(counts, key=found.__getitem__)]
    assert ordered == sorted(ordered, reverse=True), "a rare word comes before a frequent one"
    twice = candidate(splits, 2).keys() - set(SPECIALS)
    assert not twice & {"schläft", "rennt"}, (
        "with min_freq=2 a word has an id that the training split has only once: were other splits "
        "counted too, or is min_freq ignored?"
    )
    assert twice == {"ein", "Hund", "Ball"}, (
        "with min_freq=2 a word that occurs twice must have an id, be it in one sentence"
    )


def wasted_scores(lengths: Sequence[int], batches: Iterable[Sequence[int]]) -> float:
    """1 − Σ n² / Σ w², where w is the longest row in the sentence's batch."""
    useful = computed = 0
    for batch in batches:
        squares = [lengths[i] ** 2 for i in batch]
        useful += sum(squares)
        computed += len(squares) * max(squares)
    return 1 - useful / computed


def check_wasted_scores(candidate: Callable[..., float]) -> None:
    """Compares with counts by hand for small batches."""
    mistakes = {
        "that is the share of padded cells: a score belongs to two, a query and a key": 1 / 4,
        "that is the useful share: the wasted share is the rest": 20 / 32,
        "only scores between two paddings are counted: one padded side is enough": 4 / 32,
    }
    otherwise = "lengths 2 and 4: the first row needs 2 × 2 scores and gets 4 × 4"
    compare(candidate([2, 4], [[0, 1]]), 12 / 32, mistakes, otherwise)
    found = candidate([1, 2, 10, 10, 10, 10], [[0, 1], [2, 3, 4, 5]])
    mistakes = {"a mean of the batches' shares: add up first, then divide once": 3 / 16}
    otherwise = (
        "a batch of lengths 1 and 2 and a batch of four tens waste 3 of 408 scores: is each batch "
        "as wide as its own longest row?"
    )
    compare(found, 3 / 408, mistakes, otherwise)


def budget_batches(
    examples: Sequence[Example], max_tokens: int, rng: random.Random
) -> list[list[int]]:
    """Indices in batches whose two rectangles together hold at most `max_tokens` cells."""
    order = list(range(len(examples)))
    rng.shuffle(order)
    order.sort(key=lambda i: (len(examples[i].tgt), len(examples[i].src)))
    batches: list[list[int]] = [[]]
    longest = [0, 0]
    for i in order:
        pair = [len(examples[i].src), len(examples[i].tgt)]
        if sum(pair) > max_tokens:
            raise ValueError(f"a pair of {pair} tokens does not fit into a batch of {max_tokens}")
        longest = list(map(max, longest, pair))
        if (len(batches[-1]) + 1) * sum(longest) > max_tokens:
            batches.append([])
            longest = pair
        batches[-1].append(i)
    rng.shuffle(batches)
    return batches


def check_budget_batches(candidate: Callable[..., list[list[int]]]) -> None:
    """Batches 300 random pairs: each once, within the budget, nearly full, in random order."""
    rng, examples, budget = random.Random(4), [], 256
    for _ in range(300):
        source = min(30, 2 + int(rng.expovariate(0.12)))
        examples.append(Example([EOS] * source, [BOS] * max(2, source + rng.randint(-2, 3))))
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    batches = candidate(examples, budget, random.Random(0))
    lists = isinstance(batches, list) and all(isinstance(batch, list) for batch in batches)
    assert lists and all(hasattr(i, "__index__") for batch in batches for i in batch), (
        "return a list of batches, each a list of indices"
    )
    times = Counter(i for batch in batches for i in batch)
    assert len(times) == len(examples), (
        f"{len(examples) - len(times)} examples are in no batch: is the last batch, "
        "only partly full, missing?"
    )
    assert max(times.values()) == 1, "an example is in two places: one epoch would show it twice"
    assert all(batches), "a batch is empty"
    sides = [list(zip(*(lengths[i] for i in batch), strict=True)) for batch in batches]
    widths = [max(source) + max(target) for source, target in sides]
    cells = [len(batch) * width for batch, width in zip(batches, widths, strict=True)]
    longer = max(len(source) * max(*source, *target) for source, target in sides)
    real = max(sum(source) + sum(target) for source, target in sides)
    if max(cells) > budget:
        why = "the longer side alone would fit, but both are in memory" if longer <= budget else ""
        why = "its real tokens would fit, but padding counts too" if real <= budget else why
        raise AssertionError(
            f"a batch takes {max(cells)} cells, but the limit is {budget}: {why or 'too many'}"
        )
    assert padding_share(lengths, batches) < 0.15, (
        "short and long sentences share batches: too much padding"
    )
    assert sum(cells) > 0.8 * budget * len(batches), (
        "the batches are far from full: an epoch would take more steps"
    )
    third = len(widths) // 3
    narrow, wide = sorted((widths[:third], widths[-third:]), key=max)
    assert max(narrow) > min(wide), (
        "the batches are sorted by length: each epoch ends with its longest or shortest sentences"
    )
    first, again, other = (candidate(examples, budget, random.Random(seed)) for seed in (0, 0, 1))
    assert first == again, (
        "the same seed gives different batches: what else is random, besides rng?"
    )
    assert first != other, "another seed gives the same batches: every epoch would be the same"
    small = [Example([EOS] * 5, [BOS] * 5)] * 48
    for pairs, most, why in (
        ([Example([EOS] * 8, [BOS] * 8)] * 32, 2, "is a batch of exactly the limit allowed?"),
        ([Example([EOS] * 60, [BOS] * 4), *small], 5, "does each begin with widths of its own?"),
    ):
        made = len(candidate(pairs, budget, random.Random(0)))
        assert made <= most, f"{len(pairs)} pairs fit into {most} batches, not only {made}: {why}"
    refused = []
    for source in (156, 157):
        try:
            candidate([*examples, Example([EOS] * source, [BOS] * 100)], budget, random.Random(0))
        except ValueError:
            refused.append(source)
    assert 156 not in refused, "a pair of 156 and 100 tokens fits a batch of 256, but is refused"
    assert refused, "a pair of 157 and 100 tokens fits no batch of 256: raise a ValueError"
