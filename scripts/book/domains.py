"""What settings and texts may be, each stated once: whoever is given something else refuses it.

The ranges hold for commands' options, for the settings of a saved model, and for the functions of
chapters. Where toolkits agree that a value means "off", it does here, too.
"""

import math
import numbers
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args


@dataclass(frozen=True)
class Domain:
    """An interval. Its ends belong to it, unless it is `above` its low or `below` its high end."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    note: str = ""  # what a value at the end means
    infinite: bool = False  # whether infinity is a number like others

    def __contains__(self, value: float) -> bool:
        over = self.low < value if self.above else self.low <= value
        under = value < self.high if self.below else value <= self.high
        return over and under and (self.infinite or math.isfinite(value))

    def __str__(self) -> str:
        """The interval in words."""
        start = f"more than {self.low:,}" if self.above else f"at least {self.low:,}"
        end = f" and {'below' if self.below else 'at most'} {self.high:,}"
        if not self.above and math.isfinite(self.high):
            start, end = f"from {self.low:,}", f" to {'below ' * self.below}{self.high:,}"
        note = f" ({self.note})" if self.note else ""
        return start + end * math.isfinite(self.high) + note


COUNT, POSITIVE, SHARE = Domain(1), Domain(0, above=True), Domain(0, 1)
CHANCE = Domain(0, 1, below=True)
SEED = Domain(0, 2**63 - 1)  # what PyTorch's generators take

DOMAINS: dict[str, Domain] = {
    # A model's sizes: far more than fits, and far less than overflows.
    "layers": Domain(1, 1000),
    "d_model": Domain(2, 2**16),
    "d_ff": Domain(1, 2**20),
    "heads": Domain(1, 2**10),
    "vocab": Domain(5, 2**20, note="the four special pieces and more"),
    # Training.
    "dropout": CHANCE,
    "smoothing": SHARE,
    "bpe_dropout": Domain(0, 1, note="1: single letters"),
    "r_drop": Domain(0, note="0: off"),
    "epochs": Domain(1, 100_000),
    "max_tokens": Domain(1, 2**24),
    "accumulate": Domain(1, 100_000),
    "lr": POSITIVE,
    "muon_lr": POSITIVE,
    "warmup": Domain(0, note="0: none"),
    "clip": Domain(0, note="0: no limit", infinite=True),
    "seed": SEED,
    "average": Domain(0, note="0: off"),
    "save_every": Domain(0, note="0: only after epochs"),
    # The ladder's lessons.
    "taught": SHARE,
    "risk": Domain(0, note="0: off"),
    "candidates": Domain(0, 100, note="0: none"),
    "sharpness": Domain(0),
    # Searching. A wider beam costs memory and, as chapter 8 shows, gains nothing.
    "beam": Domain(1, 100, note="1: greedy"),
    "alpha": Domain(0, 10),
    "temperature": Domain(0, note="0: the likeliest token"),
    "top_k": Domain(0, note="0: off"),
    "top_p": Domain(0, 1, above=True, note="1: off"),
    # How much a study or a race does.
    "sentences": COUNT,
    "seeds": COUNT,
    "base_seeds": COUNT,
    "rounds": COUNT,
    "count": COUNT,
    "hours": POSITIVE,
    "minutes": POSITIVE,
    "workers": Domain(1, 1000),
    "trials": COUNT,
    "samples": COUNT,
}


def in_domain(name: str, value: Any, whole: bool = False) -> Any:
    """`value`, if the setting `name` may have it. Raises ValueError, with the range, if not."""
    kind = numbers.Integral if whole else numbers.Real
    if not isinstance(value, kind) or value not in DOMAINS[name]:
        number = "a whole number, " * (whole and not isinstance(value, kind))
        shown = f"{value:,}" if isinstance(value, numbers.Real) else repr(value)
        raise ValueError(f"{name} must be {number}{DOMAINS[name]}, not {shown}")
    return value


def check_settings(settings: Any) -> None:
    """Raise ValueError if a numeric field of a dataclass has a value outside of its domain."""
    for field in fields(settings):
        kinds, value = {field.type, *get_args(field.type)}, getattr(settings, field.name)
        if kinds & {int, float} and not (value is None and NoneType in kinds):
            in_domain(field.name, value, whole=float not in kinds)


def folder_name(name: str, value: str) -> str:
    """`value`, if it can name one folder or file. Raises ValueError if it can't, or leads away."""
    if not re.fullmatch(r"\w[\w .+=-]{0,99}", value):
        rule = "letters, digits and . _ - + = and spaces, at most 100, a letter or digit first"
        raise ValueError(f"{name} must be a plain name ({rule}), not {value!r}")
    return value


def list_of_texts(name: str, texts: Iterable[str], some: bool = False) -> list[str]:
    """The texts as a list. Raises TypeError for a text, which would be taken letter by letter.

    Raises ValueError for no texts if there have to be `some`.
    """
    if isinstance(texts, str | bytes):
        raise TypeError(f"{name} must be a list of texts, not one text: write [text]")
    texts = list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a list of texts, but it holds {text!r:.80}")
    if some and not texts:
        raise ValueError(f"there are no {name}")
    return texts


def texts_side_by_side(**lists: Iterable[str]) -> list[list[str]]:
    """Lists that belong together, text by text: equally many, and at least one.

    Raises TypeError as `list_of_texts` does, ValueError if lengths differ or there is nothing.
    """
    found = {name: list_of_texts(name, texts, some=True) for name, texts in lists.items()}
    if len({*map(len, found.values())}) > 1:
        sizes = " and ".join(f"{len(texts):,} {name}" for name, texts in found.items())
        raise ValueError(f"there must be as many of each, not {sizes}")
    return list(found.values())
