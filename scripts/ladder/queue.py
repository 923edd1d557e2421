"""The queue: what takes hours of one thread, beside other work: `python -m scripts.ladder.queue`.

It does the items that have no record yet, in order, within the hours it is given; `--list`
says what they are. It takes one thread, at the lowest priority. It may be killed at any moment:
the same command then goes on, to the same weights. With `--save` each item's record goes to
results/ as soon as it is there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from scripts.book.command import GOES_ON, Command
from scripts.book.files import writable
from scripts.ladder.agenda import Clock, Settings, listing, serve
from scripts.ladder.climbing import config_of, ladder_items
from scripts.studies.rows import data_of
from scripts.studies.runner import one_thread, step_back


@dataclass
class QueueOptions(Settings):
    """How long, and what."""

    device: torch.device = field(default=torch.device("cpu"), init=False)  # and no other
    hours: float = 1.2
    """When to end. What isn't done then goes on in the next call."""
    save: bool = False
    """Write each record to results/ladder-NAME.json, and not below the folder of runs."""

    prefix = "ladder"
    kind = "cpu"
    reserve = 6.0

    def __post_init__(self):
        self.check([item.name for item in ladder_items(hours=True)])

    def repeat(self, name: str) -> str:
        """The command that does item `name`, and what it needs."""
        tiny = " --tiny true" * self.tiny
        return f"python -m scripts.ladder.queue --only {name}{tiny} --save"


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Inside the block no other queue works in `root`. Raises ValueError if one does already."""
    try:
        held = FileLock(writable(root) / "ladder.lock").acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another queue is at work in {root}") from error
    with held:
        yield


def run_queue(options: QueueOptions) -> int:
    """Do what the options ask for. Returns the exit code."""
    items = ladder_items(hours=True)
    if options.list:
        print(listing(items, options))
        return 0
    step_back()
    one_thread()
    with alone(options.root):
        small = config_of("small-1", options)
        data_of(small.corpus, small.vocab)  # without it every item would fail
        return serve(items, options, Clock(60 * options.hours, options.takes(options.reserve)))


main = Command("scripts.ladder.queue", QueueOptions, run_queue, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
