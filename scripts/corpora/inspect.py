"""What is in your own pairs, before you train: `python -m scripts.corpora.inspect --pairs FILE`.

It counts, says what would be left out and why, and shows what looks odd. With --save it writes the
splits into a folder, which is a corpus from then on: `python -m scripts.train --corpus FOLDER`.
"""

from dataclasses import dataclass
from pathlib import Path

from scripts.book.command import Command
from scripts.corpora.report import report_text
from scripts.corpora.splits import PairOptions, own_pairs, save_pairs


@dataclass
class InspectOptions(PairOptions):
    """What to look through."""

    seed: int = 0
    """Decides which pairs are held out."""
    save: str | None = None
    """A folder to write the splits and the report to."""


def run_inspect(options: InspectOptions) -> None:
    """Look through your own pairs: what is left out and why, and what looks odd."""
    if not options.files:
        raise ValueError("there is nothing to look through: give --pairs, or --source and --target")
    own = own_pairs(options.files, options.seed)
    print(report_text(own.report))
    if options.save is not None:
        save_pairs(Path(options.save), own)
        print(f"\n{options.save} is a corpus now: python -m scripts.train --corpus {options.save}")


main = Command("scripts.corpora.inspect", InspectOptions, run_inspect)

if __name__ == "__main__":
    raise SystemExit(main())
