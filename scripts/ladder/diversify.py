"""Data diversification: models of both directions translate the training pairs again.

Nguyen, Joty, Wu and Aw, "Data Diversification: A Simple Strategy For Neural Machine Translation"
(2020). With k forward and k backward models each pair comes in up to 2k + 1 wordings, and nothing
is read that wasn't in the training split.
"""

import hashlib
import json
from collections.abc import Sequence

from scripts.core.data import TrainingData, with_pairs


def diversified(
    data: TrainingData,
    forward: Sequence[Sequence[str]] = (),
    reverse: Sequence[Sequence[str]] = (),
) -> TrainingData:
    """`data` with more training pairs: the real ones first, then what the models wrote.

    Each of `forward` holds a model's translation of every source, which becomes a target; each of
    `reverse` one of every target, which becomes a source. A pair is kept once, however many wrote
    it, and what a model wrote only if it is `sound`. Validation and tests stay as people wrote
    them. Raises ValueError if a model wrote too many texts, or too few.
    """
    real = data.corpus["train"]
    sources, targets = zip(*real, strict=True)
    made: list[tuple[str, str]] = []
    for texts in forward:
        made += zip(sources, texts, strict=True)
    for texts in reverse:
        made += zip(texts, targets, strict=True)
    once = dict.fromkeys([*real, *filter(sound, made)])  # in the order in which they came
    return with_pairs(data, list(once))


def sound(pair: tuple[str, str]) -> bool:
    """Whether no side is empty or too long: over three times the other's words, plus five."""
    short, long = sorted(len(side.split()) for side in pair)
    return short > 0 and long <= 3 * short + 5


def pairs_sha256(data: TrainingData) -> str:
    """What identifies these training pairs: the SHA-256 of their texts, in hex."""
    text = json.dumps(data.corpus["train"], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
