"""Chapter 10's exercises: our solutions, and checkers that say what is wrong."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest

from scripts.book.exercises import same_numbers
from scripts.ch10_judging import BleuParts, ngram_counts, tokens_13a


def check_sign_test(candidate: Callable[[list[float], list[float]], float]) -> None:
    """Compares candidate(first, second) with counted outcomes of coins."""
    wins = [1.0] * 8 + [-1.0] * 2  # 0, 1, 2, 8, 9 or 10 heads of ten: 112 of 1,024
    for gains, right, why in (
        (wins, 112 / 1024, "8 wins, 2 losses: count all at least as uneven, in both directions"),
        ([-gain for gain in wins], 112 / 1024, "8 losses, 2 wins: as uneven as 8 wins, 2 losses"),
        ([*wins, 0.0, 0.0, 0.0, 0.0], 112 / 1024, "Ties are left out"),
        ([1.0, 1.0, -1.0, -1.0], 1, "An even split is no evidence, and no outcome counts twice"),
        ([0.0, 0.0], 1, "If all sentences are ties, nothing is left"),
        ([0.1, 0.1, 90.0], 0.25, "Only the sign of a difference counts, not how *large* it is"),
    ):
        found = candidate([5.0] * len(gains), [5.0 + gain for gain in gains])
        assert same_numbers(found, right), f"{why}: {right:.4f}, not {found:.4f}."


def sign_test(first: list[float], second: list[float]) -> float:
    """The two tails of a binomial with p = 1/2, together at most 1."""
    wins = sum(b > a for a, b in zip(first, second, strict=True))
    losses = sum(b < a for a, b in zip(first, second, strict=True))
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail)


def check_many_references(candidate: Callable[[list[str], list[list[str]]], float]) -> None:
    """Compares candidate(outputs, references) with sacreBLEU."""
    from sacrebleu.metrics import BLEU

    outputs = ["A dog sleeps in the garden.", "Two men play.", "A child jumps into the cold water."]
    one = [["a dog is asleep in the garden."], ["Two women play."], ["A child jumps into water."]]
    stutter = ["in the garden in the garden in the garden a dog sleeps"]
    again = [["in the garden a dog sleeps and sleeps and sleeps again"]]
    three = [["the dog in the garden", "in the garden a dog sleeps", "a dog sleeps in the garden"]]
    of = {n: " ".join("abcdefghi"[:n]) for n in range(4, 10)}  # texts of n words that all match
    own = [of[5], of[8]], [[of[6], of[9]], [of[9], of[4]]]
    pooled = ["a b c d e a b c d e", "f g h i j"], [[of[5]], ["a b c d e f g h i j"]]
    more = [of[5], "x y z w"], [["q", of[5]], ["x y z w"]]
    corpus = "Counts are added over the corpus, of tokens 13a with capitals; the score is 0 to 100"
    for texts, references, why in (
        (outputs, one, corpus),
        (outputs[1:2], one[1:2], "No triple matches, but such zeros are smoothed, as in BleuParts"),
        (stutter, again, "An n-gram matches at most as often as a reference has it"),
        (stutter, three, "For each n-gram the reference with it most often counts, not the sum"),
        ([of[6]], [[of[4], of[7], of[9]]], "Of 4, 7 and 9 words, 7 is closest to 6"),
        ([of[5]], [[of[6], of[4]]], "5 words, references of 6 and 4: in a tie the shorter counts"),
        (*own, "Each output has its own closest reference: here of 6 and of 9 words"),
        (*pooled, "Each sentence is clipped by its own references, before counts are added"),
        (*more, "The first output has two references, the second one"),
    ):
        found = candidate(texts, references)
        right = BLEU().corpus_score(texts, [*zip_longest(*references)]).score
        message = f"{why}. sacreBLEU gives {right:.2f}, you get {found:.2f}."
        assert same_numbers(found, right), message


def many_references(outputs: list[str], references: list[list[str]]) -> float:
    """BLEU of a corpus: counts clipped by the most generous reference, lengths by the closest."""
    matches, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for output, texts in zip(outputs, references, strict=True):
        ours, theirs = tokens_13a(output), [tokens_13a(text) for text in texts]
        for n in range(1, 5):
            found, allowed = ngram_counts(ours, n), Counter()
            for tokens in theirs:
                allowed |= ngram_counts(tokens, n)  # the larger of the two counts
            matches[n - 1] += (found & allowed).total()
            totals[n - 1] += found.total()
        lengths[0] += len(ours)
        lengths[1] += min((abs(len(tokens) - len(ours)), len(tokens)) for tokens in theirs)[1]
    return BleuParts(matches, totals, *lengths).score
