"""Chapter 26's exercises."""

import statistics

from scripts.book.exercises import exercise
from scripts.corpora.splits import letters_only

TRAINING = ["Havo makan.", "Selu goralta gura kesel!"]
LENGTHS = [("abcd", "abcdefgh")] * 4 + [("abcd", "ab"), ("abcd", "a" * 25), ("ab", "a" * 12)]


@exercise(
    lambda: [("Gura havo nok makan, nok kesel.", TRAINING), ("", TRAINING), ("Goral 2.", TRAINING)],
    "the words, in small letters and in their order, that no training source has, each once",
    "compare without capitals and full stops: Gura, makan and makan. are no new words",
    lambda text, sources: [w for w in dict.fromkeys(text.split()) if w not in " ".join(sources)],
    "each word once",
    lambda text, sources: [
        word for word in letters_only(text.lower()).split() if unknown_words(word, sources)
    ],
)
def unknown_words(text: str, sources: list[str]) -> list[str]:
    """The words of `text` that are in none of the sources, each once."""
    known = set(letters_only(" ".join(sources).lower()).split())
    words = dict.fromkeys(letters_only(text.lower()).split())
    return [word for word in words if word not in known]


@exercise(
    lambda: [(LENGTHS, 1.5), (LENGTHS, 3.5), (LENGTHS[:4], 1.0)],
    "compare each ratio, target over source, with the median ratio: off by more than the factor",
    "one language may be longer than the other: compare with the median ratio, not with 1",
    lambda pairs, factor: [
        i for i, (a, b) in enumerate(pairs) if max(len(b) / len(a), len(a) / len(b)) > factor
    ],
    "a target may be too short as well as too long",
    lambda pairs, factor: [
        i for i in odd_lengths(pairs, factor) if len(pairs[i][1]) > len(pairs[i][0])
    ],
)
def odd_lengths(pairs: list[tuple[str, str]], factor: float) -> list[int]:
    """The places of pairs whose ratio of lengths is over or under the median by the factor."""
    ratios = [len(target) / len(source) for source, target in pairs]
    middle = statistics.median(ratios)
    off = [max(ratio / middle, middle / ratio) for ratio in ratios]
    return [i for i, times in enumerate(off) if times > factor]
