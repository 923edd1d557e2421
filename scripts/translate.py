"""Translate texts, or lines of a file or a pipe: `python -m scripts.translate "Ein Hund schläft."`.

It keeps three promises: one line out for each line in, whatever the lines hold; each answer as soon
as there is one; and one clear line, never a traceback, if something is wrong.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Literal

from scripts.book.command import Command
from scripts.core.models import Trained
from scripts.fast.lines import row_groups, text_stream
from scripts.fast.translating import FULL, ModelOptions, decode_hypotheses, open_model


@dataclass
class TranslateOptions(ModelOptions):
    """What to translate, and what to print."""

    text: list[str] = field(default_factory=list)
    """Texts; each line of them gives a line of output."""
    input: str | None = None
    """A file to translate, one sentence a line; by default standard input."""
    precision: Literal["auto", "float32", "int8"] = "auto"
    """Of products; auto: int8 if that is exact and fast, but float32 with --sample."""
    scores: bool = False
    """Print TEXT, a tab, SCORE: log-probability / length^alpha."""

    def __post_init__(self):
        super().__post_init__()
        if self.text and self.input is not None:
            raise ValueError("either texts or --input, not both")


def best_texts(
    trained: Trained, rows: Sequence[Sequence[int]], options: TranslateOptions, first: int = 0
) -> list[tuple[str, float]]:
    """The best text of each of the lines from number `first`, and its score; else "" and 0.0.

    No text holds a line end. A draw depends on seed, line and number alone.
    """
    if options.sample:
        seeds = [(options.seed + first + i) % 2**63 for i in range(len(rows))]
        each = zip(rows, seeds, strict=True)
        results = [decode_hypotheses(trained, [r], replace(options, seed=n))[0] for r, n in each]
    else:
        results = decode_hypotheses(trained, rows, options)
    decode, alpha = trained.tokenizer.decode, options.of(trained).alpha
    return [
        (" ".join(decode(best[0].ids).splitlines()), best[0].score(alpha)) if best else ("", 0.0)
        for best in results
    ]


def open_input(options: TranslateOptions) -> contextlib.AbstractContextManager[BinaryIO]:
    """What to translate, as bytes. Raises ValueError or OSError if it can't be read."""
    if options.text:
        return text_stream(options.text)
    if options.input is not None:
        return open(options.input, "rb")
    if sys.stdin is None:
        raise ValueError("there is no standard input: give texts, or --input FILE")
    return contextlib.nullcontext(sys.stdin.buffer)  # not ours to close


def run_translate(options: TranslateOptions) -> None:
    """Translate texts, or lines of a file or a pipe: one line out for each line in."""
    done = 0
    with open_input(options) as stream:
        trained = open_model(options)
        for rows in row_groups(trained, stream):
            best = best_texts(trained, rows, options, first=done)
            printed = [f"{text}\t{score:.4f}" if options.scores else text for text, score in best]
            # One write, newline and all: Ctrl-C must not come between a line and its end.
            print("\n".join(printed) + "\n", end="", flush=True)
            done += len(rows)


main = Command(
    "scripts.translate",
    TranslateOptions,
    run_translate,
    places={"text": "Texts, each a line of output; without any, --input or stdin."},
    memory=FULL,
)

if __name__ == "__main__":
    raise SystemExit(main())
