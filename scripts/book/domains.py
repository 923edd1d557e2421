"""What settings and texts may be, each stated once: whoever is given something else refuses it.

The ranges hold for commands' options, for the settings of a saved model, and for the functions of
chapters. Where toolkits agree that a value means "off", it does here, too.
"""

import math
import numbers
import re
from collections.abc import Iterable
from dataclasses import fields
from types import NoneType
from typing import Any, get_args

# A range in words, as an error says it; in parentheses what a value at its end means. Infinity is
# outside of each, unless it says otherwise.
DOMAINS = {
    # A model's sizes: far more than fits, and far less than overflows.
    "layers": "from 1 to 1,000",
    "d_model": "from 2 to 65,536",
    "d_ff": "from 1 to 1,048,576",
    "heads": "from 1 to 1,024",
    "vocab": "from 5 to 1,048,576 (the four special pieces and more)",
    # Training.
    "dropout": "from 0 to below 1",
    "smoothing": "from 0 to 1",
    "bpe_dropout": "from 0 to 1 (1: single letters)",
    "r_drop": "at least 0 (0: off)",
    "epochs": "from 1 to 100,000",
    "max_tokens": "from 1 to 16,777,216",
    "accumulate": "from 1 to 100,000",
    "lr": "more than 0",
    "muon_lr": "more than 0",
    "warmup": "at least 0 (0: none)",
    "clip": "at least 0 or infinite (0: no limit)",
    "seed": f"from 0 to {2**63 - 1:,}",  # what PyTorch's generators take
    "average": "at least 0 (0: off)",
    "save_every": "at least 0 (0: only after epochs)",
    "risk": "at least 0 (0: off)",
    # Searching. A wider beam costs memory and, as chapter 8 shows, gains nothing.
    "beam": "from 1 to 100 (1: greedy)",
    "alpha": "from 0 to 10",
    "temperature": "at least 0 (0: the likeliest token)",
    "top_k": "at least 0 (0: off)",
    "top_p": "more than 0 and at most 1 (1: off)",
    # How much a study or a race does.
    "sentences": "at least 1",
    "hours": "more than 0",
    "minutes": "more than 0",
    "workers": "from 1 to 1,000",
    "enough": "from 0 to 100",
    "looks": "at least 1",
}
RANGE = re.compile(r"(from|at least|more than) ([\d,]+)(?: (to below|to|and at most) ([\d,]+))?")


def in_range(value: float, words: str) -> bool:
    """Whether a number is in a range of `DOMAINS`."""
    start, low, end, high = RANGE.match(words).groups()
    low, high = (int(bound.replace(",", "")) if bound else math.inf for bound in (low, high))
    over = value > low if start == "more than" else value >= low
    below = end == "to below" or (high == math.inf and "infinite" not in words)
    return over and (value < high if below else value <= high)


def in_domain(name: str, value: Any, whole: bool = False) -> Any:
    """`value`, if the setting `name` may have it. Raises ValueError, with the range, if not."""
    kind = numbers.Integral if whole else numbers.Real
    if not isinstance(value, kind) or not in_range(value, DOMAINS[name]):
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
    if some and not texts:
        raise ValueError(f"there are no {name}")
    return texts


def texts_side_by_side(**lists: Iterable[str]) -> list[list[str]]:
    """Lists that belong together, text by text: equally many, and at least one.

    Raises TypeError as `list_of_texts` does, ValueError if lengths differ or there is nothing.
    """
    checked = {name: list_of_texts(name, texts, some=True) for name, texts in lists.items()}
    if len({*map(len, checked.values())}) > 1:
        sizes = " and ".join(f"{len(texts):,} {name}" for name, texts in checked.items())
        raise ValueError(f"there must be as many of each, not {sizes}")
    return list(checked.values())
