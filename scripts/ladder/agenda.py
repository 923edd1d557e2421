"""An agenda: items in order of worth, done within the minutes given, and continued next time.

An item is done when its record is there. One that is stopped goes on in the next call where this
one ended; one that fails is tried again in the next call, after those never tried. One that needs
what others leave waits for them. The GPU's agenda and the ladder's queue both work this way.
"""

import _thread
import gc
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from scripts import runs_folder
from scripts.book.records import RESULTS, load_record, provenance, save_record
from scripts.core.cards import write_card
from scripts.core.settings import TrainConfig
from scripts.core.signals import Stopped
from scripts.fast.losses import resolved

TRIES = 2  # after this many failures an item is left alone


@dataclass
class Settings:
    """What an agenda's command is asked for: which items, on what, how large.

    And where the items leave their results. Folders and records are known by the agenda's `prefix`.
    Records go to results/ if they are of full size, from the `kind` of device that the agenda is
    for, and are to be saved. All else stays below the folder of runs.
    """

    device: Literal["cuda", "cpu"] = "cuda"
    """A CPU's records stay below runs/, and say what they lack."""
    only: str = ""
    """Names of items, with commas between them, done with what they need; by default all."""
    tiny: bool = False
    """All of it at tiny size, on a few pairs of the sample corpus."""
    list: bool = False
    """Only say what is owed, how long it takes, and what is done."""

    prefix = "gpu"
    kind = "cuda"
    save = True
    reserve = 0.75  # minutes at the end to score a training that has just ended

    def __post_init__(self):
        self.device = torch.device(self.device)

    def check(self, known: Collection[str]) -> None:
        """Raise ValueError if there is no such item."""
        for name in self.names:
            if name not in known:
                raise ValueError(f"unknown item {name!r}: choose from {', '.join(known)}")

    @property
    def names(self):
        """The items asked for; none means all."""
        return [name for name in self.only.split(",") if name]

    @property
    def root(self) -> Path:
        """The folder that holds the items' folders."""
        trial = "" if self.device.type == self.kind else self.device.type
        trial = "tiny" if self.tiny else trial
        return runs_folder() / (f"{self.prefix}-{trial}" if trial else "")

    @property
    def records(self) -> Path:
        """The folder for records."""
        return RESULTS if self.save and self.root == runs_folder() else self.root / "results"

    @property
    def corpus(self) -> str:
        """What items learn from."""
        return "few" if self.tiny else "multi30k"

    @property
    def log(self) -> Path:
        """The file with a line for each item that was begun."""
        return self.root / f"{self.prefix}-log.txt"

    def folder(self, name: str) -> Path:
        """What item `name` resumes from."""
        return self.root / f"{self.prefix}-{name}"

    def record(self, name: str) -> Path:
        """Where item `name` leaves its record."""
        return self.records / f"{self.prefix}-{name}.json"

    def repeat(self, name: str) -> str:
        """The command that does item `name`, and what it needs."""
        where = " --device cpu" if self.device.type == "cpu" else ""
        return f"python -m scripts.gpu --only {name}{where}{' --tiny' if self.tiny else ''}"

    def takes(self, minutes: float) -> float:
        """How many minutes work takes here that takes `minutes` at full size."""
        return minutes / 60 if self.tiny else minutes

    def config(self, config: TrainConfig, name: str) -> TrainConfig:
        """`config` at this size, its precision decided, to be run in `folder(name)`."""
        place = self.folder(name).relative_to(runs_folder()).as_posix()
        config = replace(config, corpus=self.corpus, device=str(self.device), name=place)
        if self.tiny:
            size = {"layers": 1, "d_model": 32, "d_ff": 64, "heads": 2, "vocab": 300}
            size |= {"epochs": 2, "average": 2, "max_tokens": 512, "warmup": 4}
            config = replace(config, **size, beam=2, save_every=2, precision="float32")
        return resolved(config, self.device)


@dataclass(frozen=True)
class Item:
    """What is owed: its name, the minutes it should take, what it is, what makes its record.

    One that `resumes` may be stopped at any moment: it goes on from what it has saved. `needs`
    names items before it whose folders it reads.
    """

    name: str
    minutes: float
    about: str
    make: Callable[[Settings], dict[str, Any]]
    resumes: bool = False
    needs: tuple[str, ...] = ()


def is_done(name: str, settings: Settings) -> bool:
    """Whether the item's record is there."""
    return settings.record(name).is_file()


def at_hand(name: str, settings: Settings) -> bool:
    """Whether what the item left is on this machine: a record may have come without its model."""
    return (settings.folder(name) / "record.json").is_file()


def lacks(item: Item, settings: Settings) -> list[str]:
    """The items that must be done on this machine before this one can begin."""
    return [name for name in item.needs if not at_hand(name, settings)]


# What happened so far.


def log_text(settings: Settings) -> str:
    """The log's lines, of all calls."""
    return settings.log.read_text("utf-8") if settings.log.is_file() else ""


def note(name: str, end: str, seconds: float, settings: Settings) -> None:
    """Add a line to the log, and print it: how an item that was begun has ended."""
    line = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}  {name}  {end}  {seconds:.1f} s"
    settings.root.mkdir(parents=True, exist_ok=True)
    with open(settings.log, "a", encoding="utf-8") as log:
        log.write(line + "\n")
    print(line, flush=True)


def failures(settings: Settings) -> Counter[str]:
    """How often each item has failed since it was last done, according to the log."""
    failed: Counter[str] = Counter()
    for name, end in re.findall(r"^\S+ \S+  (\S+)  (done|failed)", log_text(settings), re.M):
        failed[name] = failed[name] + 1 if end == "failed" else 0
    return failed


def owed(items: Sequence[Item], settings: Settings) -> list[Item]:
    """What is to be done: all, those never tried before those that failed; or what is asked for.

    What failed too often is left alone unless it is asked for. What is needed and isn't at hand
    comes along: even what is done, if its folder is gone with a machine.
    """
    failed, names, waiting, needed = failures(settings), settings.names, [], set()
    for item in reversed(items):  # what is needed comes before what needs it
        wanted = (not names or item.name in names) and not is_done(item.name, settings)
        wanted |= item.name in needed and not at_hand(item.name, settings)
        if wanted and (names or failed[item.name] < TRIES):
            waiting.insert(0, item)
            needed |= {*item.needs}
    return waiting if names else sorted(waiting, key=lambda item: failed[item.name])


def listing(items: Sequence[Item], settings: Settings) -> str:
    """What is owed, what isn't, and how long each should take: a line for each."""

    def row(name: str, minutes: float, state: str, about: str = "") -> str:
        time = f"{minutes:.1f} min" if minutes < 60 else f"{minutes / 60:.2f} h"
        return f"{name:<16} {time:>9}  {state:<8}  {about}".rstrip()

    failed, rows, total = failures(settings), [], 0.0
    for item in items:
        state = "waits" if lacks(item, settings) else "owed"
        state = "begun" if settings.folder(item.name).is_dir() else state
        if failed[item.name]:
            state = "failed" if failed[item.name] < TRIES else "given up"
        state = "done" if is_done(item.name, settings) else state
        minutes = settings.takes(item.minutes)
        total += 0.0 if state in ("done", "given up") else minutes
        rows.append(row(item.name, minutes, state, item.about))
    return "\n".join([*rows, row("owed", total, "in all")])


# The work.


class OutOfTime(SystemExit):
    """The minutes are over, or a signal came from outside, and no training is running.

    Not an Exception, so that nothing takes it for a failure. Its code is the call's.
    """


class Clock:
    """The minutes of a call. In a `with` block it rings twice, as SIGTERM does.

    At the first ring, `reserve` minutes before the end, a training saves its state and stops; what
    else is running, such as the scoring of one that has ended, may use the reserve. At the second
    ring that ends, too, by OutOfTime.
    """

    def __init__(self, minutes: float, reserve: float, now: Callable[[], float] = time.monotonic):
        self.reserve, self.now, self.rings, self.unanswered = reserve, now, 0, False
        self.end, self.over = now() + 60 * minutes, threading.Event()

    def left(self) -> float:
        """Minutes until the end."""
        return (self.end - self.now()) / 60

    def fits(self, item: Item, settings: Settings) -> bool:
        """Whether to begin `item` now. One that resumes needs a minute before the first ring."""
        if item.resumes:
            return self.left() - self.reserve >= settings.takes(1.0)
        return self.left() >= settings.takes(item.minutes)

    def __enter__(self) -> "Clock":
        self.before = signal.signal(signal.SIGTERM, self.answer)
        threading.Thread(target=self.run, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        signal.signal(signal.SIGTERM, self.before)

    def run(self) -> None:
        """Ring at both times, unless all is over before then."""
        for early in (self.reserve, 0.0):
            if not self.over.wait(60 * max(0.0, self.left() - early)):
                self.ring()

    def ring(self) -> None:
        """The main thread gets a SIGTERM. It comes from inside, so it can't kill the process."""
        self.rings, self.unanswered = self.rings + 1, True
        _thread.interrupt_main(signal.SIGTERM)

    def answer(self, number: int, frame: Any) -> None:
        """What SIGTERM does while no training listens for it."""
        if self.rings != 1 or not self.unanswered:  # the second ring, or a signal that isn't ours
            raise OutOfTime(self.code(number))
        self.unanswered = False

    def code(self, number: int) -> int:
        """The exit code of a call that signal `number` stopped: 0 if it was a ring."""
        ours, self.unanswered = self.unanswered, False
        return 0 if ours else 128 + number


def attempt(item: Item, settings: Settings) -> str:
    """Do `item` and write its record, in its folder and among the records, with its provenance.

    If one that doesn't resume has a record in its folder, that is taken. Returns "done", or what
    went wrong, in one line. Raises OSError if the disk is full, Stopped or OutOfTime.
    """
    command, folder = settings.repeat(item.name), settings.folder(item.name)
    lacking = ["anything of this on a GPU"] if settings.device.type != settings.kind else []
    try:
        kept = not item.resumes and at_hand(item.name, settings)
        record = provenance(command, settings.device)  # first: names the code that runs
        record |= load_record("record", folder) if kept else item.make(settings)
        record["repeat"] = command
        record["not_run"] = [*dict.fromkeys([*lacking, *record.get("not_run", [])])]
        if "test" in record:
            write_card(folder, record)
        save_record("record", record, folder)
        save_record(settings.record(item.name).stem, record, settings.records)
    except Exception as error:
        # A bare OSError, not a special case such as a missing file, is a full disk.
        if isinstance(error, (Stopped, BrokenPipeError)) or type(error) is OSError:
            raise
        traceback.print_exc()
        return "failed: " + " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return "done"


def answers(device: torch.device) -> bool:
    """Whether `device` still computes. After some faults a GPU is lost for this process."""
    gc.collect()  # what a failed item held is free only now
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            if torch.cuda.current_stream() != torch.cuda.default_stream():
                return False  # a recording broke off
        return torch.rand(2, device=device).sum().item() >= 0.0  # its generator breaks with it
    except RuntimeError:
        return False


def do(item: Item, settings: Settings, clock: Clock, after: Callable[[], Any]) -> int:
    """Attempt `item`, note how that ended, and call `after`.

    Returns the code of the call's exit if it ends now, else 0: 128 + the signal if one that
    isn't the clock's stopped it, 2 if the GPU is gone.
    """
    start, end, code = clock.now(), "stopped: goes on next time", 0
    try:
        end = attempt(item, settings)
    except Stopped as stop:
        code = clock.code(stop.number)
    except OutOfTime as stop:
        code = stop.code
    note(item.name, end, clock.now() - start, settings)
    after()
    if not code and not answers(settings.device):
        print(f"after {item.name} the GPU no longer answers this process", file=sys.stderr)
        return 2
    return code


def serve(
    items: Sequence[Item], settings: Settings, clock: Clock, after: Callable[[], Any] = lambda: None
) -> int:
    """Do what is owed of `items` as far as the clock allows, and say what is left.

    Returns the exit code, as `do`.
    """
    waiting, code = owed(items, settings), 0
    after()  # what was made before comes along; an unusable folder shows now
    try:
        with clock:
            for item in waiting:
                if not (code or lacks(item, settings)) and clock.fits(item, settings):
                    code = do(item, settings, clock, after)
    finally:
        rest = [item.name for item in waiting if not is_done(item.name, settings)]
        goes_on = f"the same command goes on with: {', '.join(rest)}"
        print(goes_on if rest else "nothing asked for is owed any more")
        failed = failures(settings)
        if lost := [name for name in failed if failed[name] >= TRIES and name not in rest]:
            print(f"failed too often: {', '.join(lost)}; --only NAME tries again")
    return code
