"""Batches of few shapes, cut out of a corpus that lives on the device.

Nothing here makes a GPU wait: no count, no copy. `core.steps` takes steps on them.
"""

import bisect
import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.ch06_training import EOS, PAD, Batch
from scripts.ch07_multi30k import Example, pad_rows

FEW_SHAPES = ("static", "graphed")  # the kinds of a step whose batches are these


def longer_side(example: Example) -> int:
    """Tokens of the longer side: the width that the pair needs."""
    return max(len(example.src), len(example.tgt) - 1)


def static_lengths(examples: Sequence[Example], shapes: int = 8) -> list[int]:
    """The `shapes` widths that hold all examples with the fewest padded cells.

    Exact, by dynamic programming over the widths that occur. After k rounds `best[i]` has, for the
    pairs of the i narrowest widths, the fewest cells in at most k widths, and those widths.
    """
    widths, counts = zip(*sorted(Counter(map(longer_side, examples)).items()), strict=True)
    below = [0, *accumulate(counts)]  # pairs among the i narrowest widths
    best = {0: (0, ())}  # how many widths are served: (cells, the widths chosen)
    for _ in range(min(shapes, len(widths))):
        with_one_more = dict(best)
        for end in range(1, len(widths) + 1):
            for start, (cells, chosen) in best.items():
                if start < end:
                    total = cells + (below[end] - below[start]) * widths[end - 1]
                    if total < with_one_more.get(end, (math.inf,))[0]:
                        with_one_more[end] = (total, (*chosen, widths[end - 1]))
        best = with_one_more
    return list(best[len(widths)][1])


class ResidentCorpus:
    """A corpus on the device, from which batches are cut; `width` is that of the widest.

    The last row is the filler: a source of one eos, so that attention has a key, and no target.
    """

    def __init__(self, examples: Sequence[Example], device: torch.device | str, width: int):
        rows, self.filler = [*examples, Example([EOS], [PAD, PAD])], len(examples)
        src, full = pad_rows([e.src for e in rows]), pad_rows([e.tgt for e in rows])
        self.src = F.pad(src, (0, width - src.size(1)), value=PAD).to(device)  # (n + 1, S)
        self.full = F.pad(full, (0, width + 1 - full.size(1)), value=PAD).to(device)  # (…, T + 1)

    def batch(self, rows: Tensor, width: int) -> Batch:
        """The pairs of these rows (B,), `width` tokens a side."""
        return Batch(self.src[rows, :width], self.full[rows, : width + 1])


def narrowest(widths: Sequence[int], side: int) -> int:
    """The narrowest of the `widths`, in rising order, that holds `side` tokens."""
    return widths[bisect.bisect_left(widths, side)]


def static_batches(
    examples: Sequence[Example], widths: Sequence[int], max_tokens: int, rng: random.Random
) -> list[list[int]]:
    """An epoch's batches: every pair once, each batch of pairs that need the same width."""
    if widths[-1] > max_tokens:
        raise ValueError(
            f"a sentence of {widths[-1]} tokens does not fit {max_tokens} a batch: raise max_tokens"
        )
    groups: dict[int, list[int]] = {width: [] for width in widths}
    order = list(range(len(examples)))
    rng.shuffle(order)
    for i in order:
        groups[narrowest(widths, longer_side(examples[i]))].append(i)
    batches = []
    for width, group in groups.items():
        size = max_tokens // width
        batches += [group[at : at + size] for at in range(0, len(group), size)]
    rng.shuffle(batches)
    return batches
