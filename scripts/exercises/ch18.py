"""Chapter 18's exercise."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from scripts.book.exercises import exercise
from scripts.ch06_training import BOS, EOS, PAD


def hiding(function: Callable) -> Iterator:
    """What is hidden and asked in a long sentence: no special token, whole words, how many."""
    ids = torch.randint(EOS + 1, 90, (20_000,))
    ids[::50], ids[25::50], ids[-1] = BOS, EOS, EOS
    starts = (torch.rand(20_000) < 0.5) | (ids <= EOS) | (ids <= EOS).roll(1)
    draws = [function(ids, starts, 99, torch.Generator().manual_seed(n)) for n in (1, 1, 2)]
    hidden, labels = draws[0]
    asked, word = labels != PAD, starts.long().cumsum(0) - 1  # (T,)
    yield torch.equal(labels, ids * asked), torch.equal(hidden, ids.masked_fill(asked, 99))
    asked_pieces, pieces = torch.bincount(word, weights=asked.double()), torch.bincount(word)
    yield ((asked_pieces == 0) | (asked_pieces == pieces)).all(), (ids[asked] > EOS).all()
    yield 0.13 < (asked_pieces > 0).double().mean() < 0.17
    yield [torch.equal(hidden, again) for again, _ in draws[1:]]


@exercise(
    lambda: [hiding],
    "hide 15% of the words, drawn by `generator`, no special token, and ask for what is hidden",
    "only a part of a word is hidden: the rest gives it away; draw once per word",
    lambda ids, starts, *rest: hide_words(ids, starts | True, *rest),
    "a label asks for a piece that isn't hidden: labels must be PAD where nothing is hidden",
    lambda ids, *rest: (hide_words(ids, *rest)[0], ids),
)
def hide_words(ids: Tensor, starts: Tensor, gap: int, generator) -> tuple[Tensor, Tensor]:
    """One draw per word, used for all its pieces."""
    word = starts.long().cumsum(0) - 1  # (T,)
    draw = torch.rand(int(word[-1]) + 1, generator=generator)  # (words,)
    chosen = (draw[word] < 0.15) & (ids > EOS)  # (T,)
    return ids.masked_fill(chosen, gap), ids.masked_fill(~chosen, PAD)
