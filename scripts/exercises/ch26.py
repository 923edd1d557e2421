"""Chapter 26's exercises."""

import statistics

from scripts.book.exercises import exercise

TRAINING = [["▁Havo", "▁makan"], ["▁Selu", "▁tok", "em"]]
TEXTS = [["▁n", "ok", "▁makan", "▁n", "em"], [], ["▁Selu", "tok"]]
LENGTHS = [("abcd", "abcdefgh")] * 4 + [("abcd", "ab"), ("abcd", "a" * 25), ("ab", "a" * 12)]


@exercise(
    lambda: [(text, TRAINING) for text in TEXTS],
    "the pieces, in their order, that no training source has, each once",
    "compare pieces, not letters: ok is no piece of the sources, though ▁tok is one",
    lambda text, sources: [p for p in dict.fromkeys(text) if p not in str(sources)],
    "each piece once",
    lambda text, sources: [piece for piece in text if unseen_pieces([piece], sources)],
)
def unseen_pieces(text: list[str], sources: list[list[str]]) -> list[str]:
    """The pieces of `text` that are in none of the sources, each once."""
    seen = {piece for source in sources for piece in source}
    return [piece for piece in dict.fromkeys(text) if piece not in seen]


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
