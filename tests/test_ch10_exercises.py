"""Chapter 10's exercises: each checker distinguishes the common mistakes."""

import statistics

import pytest
from exercising import assert_told_apart

from scripts.book.exercises import rejection
from scripts.ch10_judging import BleuParts, ngram_counts, tokens_13a
from scripts.exercises import ch10 as ours
from scripts.exercises.ch10 import many_references

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


def unlimited(theirs, n, found):
    known = generous(theirs, n, found)
    return type(found)({gram: times for gram, times in found.items() if gram in known})


def closest(c, lengths):
    return min((abs(n - c), n) for n in lengths)[1]


def closest_listed(c, lengths):
    return min(lengths, key=lambda n: abs(n - c))


def bleu_with(allowed_of=generous, length_of=closest):
    def bleu(outputs, references):
        return parts_of(outputs, references, allowed_of, length_of).score

    return bleu


UNCLIPPED, FIRST_ONLY, ADDED = map(bleu_with, (unlimited, first_alone, added))
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


WRONG = {
    "many_references": {
        mean_of_sentence_bleus: "Counts are added over the corpus",
        ADDED: "not the sum",
        UNCLIPPED: "at most as often",
        from_nothing_to_one: "0 to 100",
        SHORTEST: "7 is closest to 6",
        LISTED: "references of 6 and 4",
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    wrong = {words: candidate for candidate, words in WRONG[name].items()}
    assert_told_apart(getattr(ours, f"check_{name}"), wrong)


def test_one_message_for_more_mistakes():
    assert "most often" in rejection(ours.check_many_references, FIRST_ONLY)
    assert "Counts are added" in rejection(ours.check_many_references, lower_cased)
    assert "7 is closest to 6" in rejection(ours.check_many_references, LONGEST)
