"""Chapter 18's exercise: our solution, and a checker that says what is wrong."""

from collections.abc import Callable

import torch
from torch import Tensor

from scripts.ch06_training import BOS, EOS, PAD, UNK


def check_hide_words(
    candidate: Callable[[Tensor, Tensor, int, torch.Generator], tuple[Tensor, Tensor]],
) -> None:
    """Runs candidate(ids, starts, gap, generator) on one long sentence and counts."""
    generator = torch.Generator().manual_seed(0)
    T, gap = 20_000, 99
    ids = torch.randint(EOS + 1, 90, (T,), generator=generator)
    ids[::100], ids[50::100], ids[0], ids[-1] = UNK, EOS, BOS, EOS
    special = ids <= EOS
    starts = (torch.rand(T, generator=generator) < 0.5) | special | special.roll(1)
    hidden, labels = candidate(ids, starts, gap, generator.manual_seed(1))
    asked = labels != PAD
    assert asked.any() and not asked[special].any(), (
        "Nothing is asked, or a special token is: where nothing is asked, the label must be PAD."
    )
    assert torch.equal(labels[asked], ids[asked]), "A label isn't the token that was there."
    assert (hidden[asked] == gap).all(), (
        "A label asks for a piece that isn't hidden: labels must be PAD where nothing is hidden."
    )
    assert torch.equal(hidden[~asked], ids[~asked]), "A piece was hidden, but its label is PAD."
    words = starts.long().cumsum(0) - 1  # (T,): each piece's word
    count = torch.bincount(words, weights=asked.double())
    whole = (count == 0) | (count == torch.bincount(words))
    assert whole.all(), (
        "Only a part of a word is hidden: the rest gives it away. Draw once per word."
    )
    share = float((count > 0).double().mean())
    assert abs(share - 0.15) < 0.02, f"{share:.0%} of the words are hidden, not 15%."
    again, other = (candidate(ids, starts, gap, generator.manual_seed(n))[0] for n in (1, 2))
    drawn = torch.equal(again, hidden) and not torch.equal(other, hidden)
    assert drawn, "Draw by `generator`: one seed must hide the same words, another seed others."


def hide_words(
    ids: Tensor, starts: Tensor, gap: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One draw per word, used for all its pieces."""
    word = starts.long().cumsum(0) - 1  # (T,)
    draw = torch.rand(int(word[-1]) + 1, generator=generator)  # (words,)
    chosen = (draw[word] < 0.15) & (ids > EOS)  # (T,)
    return ids.masked_fill(chosen, gap), ids.masked_fill(~chosen, PAD)
