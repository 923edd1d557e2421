"""Chapter 10's exercises."""

import math
from collections import Counter

from scripts.book.exercises import exercise
from scripts.ch10_judging import BleuParts, ngram_counts, tokens_13a


@exercise(
    lambda: [([5] * 5, [8, 6, 6, 6, 4]), ([5] * 5, [3, 4, 4, 6, 5]), ([5] * 2, [6, 4])],
    "count the outcomes that are at least as uneven, none of them twice; even splits give 1",
    "count all outcomes at least as uneven, in both directions",
    lambda first, second: sign_test(first, second) / 2,
    "ties are left out, not counted as losses",
    lambda first, second: sign_test([a + 0.5 for a in first], second),
)
def sign_test(first: list[float], second: list[float]) -> float:
    """The two tails of a binomial with p = 1/2, together at most 1."""
    wins = sum(b > a for a, b in zip(first, second, strict=True))
    losses = sum(b < a for a, b in zip(first, second, strict=True))
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail)


OUTPUTS = ["Two men play.", "a b c d e", "in the x in the y in the", "f g h i j"]
REFERENCES = [["Two women play."], ["a b c d e f", "a b c d"]]  # in a tie the shorter one counts
REFERENCES += [["in the garden a dog", "the dog in the garden in a park"], ["f g h i j a b c d e"]]


@exercise(
    lambda: [(OUTPUTS, REFERENCES), (OUTPUTS[1:2], REFERENCES[1:2])],
    "not sacreBLEU's score: clip sentence by sentence; in a tie the shorter reference is closest",
    "only the first reference counts",
    lambda outputs, references: many_references(outputs, [texts[:1] for texts in references]),
    "for each n-gram the reference with it most often counts, not all together",
    lambda outputs, references: many_references(outputs, [[" ".join(r)] for r in references]),
)
def many_references(outputs: list[str], references: list[list[str]]) -> float:
    """BLEU of a corpus: counts clipped by the most generous reference, lengths by the closest."""
    matches, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for output, texts in zip(outputs, references, strict=True):
        words, word_lists = tokens_13a(output), [tokens_13a(text) for text in texts]
        for n in range(1, 5):
            counts, allowed = ngram_counts(words, n), Counter()
            for tokens in word_lists:
                allowed |= ngram_counts(tokens, n)  # the larger of the two counts
            matches[n - 1] += (counts & allowed).total()
            totals[n - 1] += counts.total()
        lengths[0] += len(words)
        lengths[1] += min((abs(len(tokens) - len(words)), len(tokens)) for tokens in word_lists)[1]
    return BleuParts(matches, totals, *lengths).score
