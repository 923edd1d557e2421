"""The queue: what takes hours of one thread, beside other work: `python -m scripts.studies.queue`.

It does the entries that have no record yet, in order, within the hours it is given; `--list true`
says what they are. It takes one thread, at the lowest priority. Killed at any moment, the same
command goes on to the same weights. With `--save true` each entry's record goes to results/ as soon
as it is there.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.queue"))

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command
from scripts.book.files import writable
from scripts.book.records import RESULTS
from scripts.studies.agenda import Settings, listing, serve
from scripts.studies.ladder import RUNS, config_of, data_of, ladder_items
from scripts.studies.runner import one_thread, step_back

RESERVE = 6.0  # minutes at the end for the scores of a training that is just over


@dataclass(frozen=True)
class QueueSettings(Settings):
    """Where the queue's entries run, and where they leave what."""

    save: bool = False
    prefix = "ladder"

    @property
    def root(self) -> Path:
        """The folder that holds the entries' folders."""
        return runs_folder() / "ladder-tiny" if self.tiny else runs_folder()

    @property
    def records(self) -> Path:
        """The folder for records."""
        return RESULTS if self.save and not self.tiny else self.root / "results"

    def repeat(self, name: str) -> str:
        """The command that does entry `name`, and what it needs."""
        tiny = " --tiny true" * self.tiny
        return f"python -m scripts.studies.queue --only {name}{tiny} --save true"

    def missed(self) -> list[str]:
        """What a record can't show: a processor is what these are for."""
        return []

    def told(self, minutes: float) -> str:
        """A time in the list."""
        return f"{minutes / 60:5.2f} h"


@dataclass
class QueueOptions:
    """How long, and what."""

    hours: float = 1.2
    """When to end. What isn't done then goes on in the next call."""
    only: str = ""
    """Names of entries, with commas between them, done with what they need; else all."""
    list: bool = False
    """Only say what the entries are, how long each takes, and what is done."""
    tiny: bool = False
    """All of it at tiny size, on the sample corpus."""
    save: bool = False
    """Write each record to results/ladder-NAME.json, and not below the folder of runs."""

    def __post_init__(self):
        if not self.hours > 0:
            raise ValueError("hours must be more than 0")
        for name in self.names:
            if name not in RUNS:
                raise ValueError(f"unknown entry {name!r}: choose from {', '.join(RUNS)}")

    @property
    def names(self):
        """The entries asked for; none means all."""
        return [name for name in self.only.split(",") if name]


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Inside the block no other queue works in `root`. Raises ValueError where one does already."""
    import fcntl  # not on Windows

    with open(writable(root) / "ladder.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another queue is at work in {root}") from error
        yield


def run_queue(options: QueueOptions) -> int:
    """What the options ask for. Returns the exit code."""
    items = ladder_items(hours=True)
    settings = QueueSettings(torch.device("cpu"), options.tiny, options.save)
    if options.list:
        print(listing(items, settings))
        return 0
    step_back()
    one_thread()
    with alone(settings.root):
        small = config_of("small-1", settings)
        data_of(small.corpus, small.vocab, settings.tiny)  # without it every entry would fail
        return serve(items, options.names, settings, 60 * options.hours, RESERVE)


main = Command(
    __name__, QueueOptions, run_queue, "Do what takes hours of one thread.", interrupted=GOES_ON
)
