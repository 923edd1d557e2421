"""The running example of chapters 1 to 5: a word of the letters a to j, and the same backwards.

`decaf` becomes `faced`. The ids are those of all the series' corpora: 0 fills, 2 begins, 3 ends;
letters follow from 4 on.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PAD, BOS, EOS = 0, 2, 3
LETTERS = "abcdefghij"
FIRST = 4  # the id of "a"
VOCAB = FIRST + len(LETTERS)
EXAMPLE = "decaf"


def to_ids(word: str) -> list[int]:
    """The ids of a word's letters, in order. Raises ValueError for any letter but a to j."""
    return [FIRST + LETTERS.index(letter) for letter in word]


def to_text(ids: Iterable[int]) -> str:
    """The letters up to the first `EOS`; `BOS` and `PAD` are left out, an unknown id is "?"."""
    letters = ""
    for i in map(int, ids):
        if i == EOS:
            break
        if i not in (PAD, BOS):
            letters += LETTERS[i - FIRST] if FIRST <= i < VOCAB else "?"
    return letters


def reversals(
    count: int, lengths: tuple[int, int] = (4, 10), generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Random words and their reversals, as sources (count, S) and targets (count, T).

    A word has from `lengths[0]` to `lengths[1]` letters, each length as likely as another. A
    source ends with `EOS`; a target begins with `BOS`, too; both are filled up with `PAD`.
    """
    shortest, longest = lengths
    sizes = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    words = [torch.randint(FIRST, VOCAB, (size,), generator=generator) for size in sizes]
    begin, end = torch.tensor([BOS]), torch.tensor([EOS])
    sources = [torch.cat((word, end)) for word in words]
    targets = [torch.cat((begin, word.flip(0), end)) for word in words]
    return tuple(pad_sequence(rows, True, PAD) for rows in (sources, targets))
