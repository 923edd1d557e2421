"""Chapter 10's exercises: each checker distinguishes the common mistakes."""

import math
import statistics

from exercising import assert_told_apart, rejection

from scripts.ch10_judging import BleuParts, ngram_counts, tokens_13a
from scripts.exercises import ch10 as ours
from scripts.exercises.ch10 import many_references, sign_test

# The sign test


def split(first, second):
    """Wins, losses and their sum."""
    pairs = list(zip(first, second, strict=True))
    wins, losses = (sum(sign * b > sign * a for a, b in pairs) for sign in (1, -1))
    return wins, losses, wins + losses


def tail(n, most):
    return sum(math.comb(n, k) for k in range(most + 1)) / 2**n


def one_sided(first, second):
    wins, losses, n = split(first, second)
    return tail(n, min(wins, losses))


def strictly_further(first, second):
    wins, losses, n = split(first, second)
    return 2 * tail(n, min(wins, losses) - 1)


def just_this_split(first, second):
    wins, losses, n = split(first, second)
    return 2 * math.comb(n, min(wins, losses)) / 2**n


def ties_count_as_coins(first, second):
    wins, losses, n = split(first, second)
    n = len(first)
    return min(1.0, 2 * tail(n, n - max(wins, losses)))


def above_one(first, second):
    return 2 * one_sided(first, second)


def undecided(first, second):
    wins, losses, n = split(first, second)
    return sign_test(first, second) if n else 0.5


def weighs(first, second):
    """The right answer, but the smallest differences count as ties."""
    largest = max((abs(b - a) for a, b in zip(first, second, strict=True)), default=0)
    second = [a if abs(b - a) < largest / 100 else b for a, b in zip(first, second, strict=True)]
    return sign_test(first, second)


def test_mistakes_in_the_sign_test_are_told_apart():
    wrong = {
        "directions: 0.1094, not 0.0547": one_sided,
        "directions: 0.1094, not 0.0215": strictly_further,
        "directions: 0.1094, not 0.0879": just_this_split,
        "Ties are left out": ties_count_as_coins,
        "no outcome counts twice": above_one,
        "nothing is left": undecided,
        "Only the sign": weighs,
        "at least as uneven, in both directions: 0.1094, not 0.5": lambda first, second: 0.5,
    }
    assert_told_apart(ours.check_sign_test, wrong)


# BLEU with several references


def parts_of(outputs, references, allowed_of, length_of):
    matches, totals, c, r = [0] * 4, [0] * 4, 0, 0
    for output, texts in zip(outputs, references, strict=True):
        ours, theirs = tokens_13a(output), [tokens_13a(text) for text in texts]
        for n in range(1, 5):
            found = ngram_counts(ours, n)
            matches[n - 1] += (found & allowed_of(theirs, n, found)).total()
            totals[n - 1] += found.total()
        c, r = c + len(ours), r + length_of(len(ours), [len(tokens) for tokens in theirs])
    return BleuParts(matches, totals, c, r)


def generous(theirs, n, found):
    allowed = ngram_counts(theirs[0], n)
    for tokens in theirs[1:]:
        allowed |= ngram_counts(tokens, n)
    return allowed


def added(theirs, n, found):
    return sum((ngram_counts(tokens, n) for tokens in theirs[1:]), ngram_counts(theirs[0], n))


def first_alone(theirs, n, found):
    return ngram_counts(theirs[0], n)


def best_alone(theirs, n, found):
    """The one reference with the most matches."""
    return max((ngram_counts(tokens, n) for tokens in theirs), key=lambda c: (found & c).total())


def unlimited(theirs, n, found):
    known = generous(theirs, n, found)
    return type(found)({gram: times for gram, times in found.items() if gram in known})


def closest(c, lengths):
    return min((abs(n - c), n) for n in lengths)[1]


def closest_in_all(outputs, references):
    """One reference length for the corpus: the closest sum."""
    parts = parts_of(outputs, references, generous, closest)
    sums = [sum(len(tokens_13a(text)) for text in texts) for texts in zip(*references, strict=True)]
    c = sum(len(tokens_13a(output)) for output in outputs)
    return BleuParts(parts.matches, parts.totals, c, closest(c, sums)).score


def closest_listed(c, lengths):
    return min(lengths, key=lambda n: abs(n - c))


def bleu_with(allowed_of=generous, length_of=closest):
    def bleu(outputs, references):
        return parts_of(outputs, references, allowed_of, length_of).score

    return bleu


def unsmoothed(outputs, references):
    parts = parts_of(outputs, references, generous, closest)
    return parts.score if all(parts.matches) else 0.0


UNCLIPPED, FIRST_ONLY, ADDED = map(bleu_with, (unlimited, first_alone, added))
BEST_ALONE = bleu_with(best_alone)
SHORTEST = bleu_with(length_of=lambda c, lengths: min(lengths))
LONGEST = bleu_with(length_of=lambda c, lengths: max(lengths))
LISTED = bleu_with(length_of=closest_listed)


def from_nothing_to_one(outputs, references):
    return many_references(outputs, references) / 100


def lower_cased(outputs, references):
    lower = [[text.lower() for text in texts] for texts in references]
    return many_references([output.lower() for output in outputs], lower)


def mean_of_sentence_bleus(outputs: list[str], references: list[list[str]]) -> float:
    """The mean of the sentences' own BLEUs."""
    pairs = zip(outputs, references, strict=True)
    return statistics.mean(many_references([one], [texts]) for one, texts in pairs)


def test_mistakes_with_many_references_are_told_apart():
    wrong = {
        "Counts are added over the corpus": mean_of_sentence_bleus,
        "not the sum": ADDED,
        "at most as often": UNCLIPPED,
        "0 to 100": from_nothing_to_one,
        "such zeros are smoothed": unsmoothed,
        "7 is closest to 6": SHORTEST,
        "references of 6 and 4": LISTED,
        "its own closest": closest_in_all,
    }
    assert_told_apart(ours.check_many_references, wrong)
    # Some messages serve more mistakes.
    for one in (FIRST_ONLY, BEST_ALONE):
        assert "most often" in rejection(ours.check_many_references, one)
    assert "Counts are added" in rejection(ours.check_many_references, lower_cased)
    assert "7 is closest to 6" in rejection(ours.check_many_references, LONGEST)
