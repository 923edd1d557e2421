"""An agenda: items in order of worth, done within the minutes given, and gone on with next time.

An item is done when its record is there. One that is stopped goes on in the next call where this
one ended; one that fails is tried once more in the next call, after those never tried. One that
needs what others leave waits for them. The GPU's agenda and the queue of studies both work so.
"""

import _thread
import gc
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from scripts import runs_folder
from scripts.book.files import write_whole
from scripts.book.records import RESULTS, git_commit, load_record, provenance, save_record
from scripts.engine.losses import resolved
from scripts.engine.settings import TrainConfig
from scripts.engine.signals import Stopped

TRIES = 2  # after so many failures an item is left alone


@dataclass(frozen=True)
class Settings:
    """Where items run, how large they are, and where they leave what.

    Only a GPU's records of full size go to results/. All others stay below the folder of runs.
    Another agenda has another `prefix`, by which its folders and records are known.
    """

    device: torch.device
    tiny: bool = False
    prefix = "gpu"

    @property
    def root(self) -> Path:
        """The folder that holds the items' folders."""
        on_a_cpu = "gpu-cpu" if self.device.type == "cpu" else ""
        return runs_folder() / ("gpu-tiny" if self.tiny else on_a_cpu)

    @property
    def records(self) -> Path:
        """The folder for records."""
        return RESULTS if self.root == runs_folder() else self.root / "results"

    @property
    def corpus(self) -> str:
        """What items learn from."""
        return "sample" if self.tiny else "multi30k"

    def folder(self, name: str) -> Path:
        """What item `name` resumes from."""
        return self.root / f"{self.prefix}-{name}"

    def record(self, name: str) -> Path:
        """Where item `name` leaves its record."""
        return self.records / f"{self.prefix}-{name}.json"

    def repeat(self, name: str) -> str:
        """The command that does item `name` alone."""
        where = " --device cpu" if self.device.type == "cpu" else ""
        return f"python -m scripts.gpu --only {name}{where}{' --tiny' if self.tiny else ''}"

    def missed(self) -> list[str]:
        """What a record can't show on this device, whatever it is of."""
        return ["anything of this on a GPU"] if self.device.type == "cpu" else []

    def told(self, minutes: float) -> str:
        """A time in the list."""
        return f"{minutes:5.1f} min"

    def minutes(self, full: float) -> float:
        """How long that which takes `full` minutes on a GPU takes here."""
        return full / 60 if self.tiny else full

    def config(self, config: TrainConfig, name: str) -> TrainConfig:
        """`config` at this size, its precision decided, to be run in `folder(name)`."""
        place = self.folder(name).relative_to(runs_folder()).as_posix()
        config = replace(config, corpus=self.corpus, device=str(self.device), name=place)
        if self.tiny:
            size = {"layers": 1, "d_model": 32, "d_ff": 64, "heads": 2, "vocab": 300}
            epochs, average = (2, 2) if config.average else (1, 0)  # a study's parts are many
            size |= {"epochs": epochs, "average": average, "max_tokens": 512, "warmup": 4}
            config = replace(config, **size, beam=2, save_every=2, precision="float32")
        return resolved(config, self.device)


@dataclass(frozen=True)
class Item:
    """What is owed: its name, the minutes it should take, what it is, what makes its record.

    One that `resumes` may be stopped at any moment, and loses at most a step. `needs` names items
    before it whose folders it reads.
    """

    name: str
    minutes: float
    about: str
    make: Callable[[Settings], dict[str, Any]]
    resumes: bool = False
    needs: tuple[str, ...] = ()


def once(name: str, make: Callable[[Settings], dict[str, Any]]) -> Callable[[Settings], Any]:
    """`make`, which isn't asked where the item's folder holds the record already."""

    def kept_or_made(settings: Settings) -> dict[str, Any]:
        folder = settings.folder(name)
        there = (folder / "record.json").is_file()
        return load_record("record", folder) if there else make(settings)

    return kept_or_made


class OutOfTime(BaseException):
    """The minutes are over, or somebody asked the process to end, and no training is running.

    No Exception, so that nobody takes it for a failure.
    """

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class Clock:
    """The minutes of a call. In a `with` block it rings twice, by what SIGTERM does.

    At the first ring, `reserve` minutes before the end, a training saves its state and stops; what
    else is running, such as the scores of one that is over, may use the reserve. At the second ring
    it ends, too, by OutOfTime.
    """

    def __init__(
        self, minutes: float, reserve: float = 0.0, now: Callable[[], float] = time.monotonic
    ):
        self.reserve, self.now, self.rings = reserve, now, 0
        self.end = now() + 60 * minutes
        self.timers: list[threading.Timer] = []

    def left(self) -> float:
        """Minutes until the end."""
        return (self.end - self.now()) / 60

    def __enter__(self) -> "Clock":
        self.before = signal.signal(signal.SIGTERM, self.answer)
        for minutes in (self.left() - self.reserve, self.left()):
            self.timers.append(threading.Timer(60 * max(0.0, minutes), self.ring))
            self.timers[-1].daemon = True
            self.timers[-1].start()
        return self

    def __exit__(self, *_: Any) -> None:
        for timer in self.timers:
            timer.cancel()
        signal.signal(signal.SIGTERM, self.before)

    def ring(self) -> None:
        """The main thread gets a SIGTERM. It comes from inside, so it can't kill the process."""
        self.rings += 1
        _thread.interrupt_main(signal.SIGTERM)

    def answer(self, number: int, frame: Any) -> None:
        """What SIGTERM does while no training listens for it."""
        if self.rings != 1:  # the second ring, or a signal that isn't ours
            raise OutOfTime(number)


def fits(item: Item, settings: Settings, clock: Clock) -> bool:
    """Whether to begin `item` now. One that resumes wants a minute before the first ring."""
    if item.resumes:
        return clock.left() - clock.reserve >= settings.minutes(1.0)
    return clock.left() >= settings.minutes(item.minutes)


def is_done(item: Item, settings: Settings) -> bool:
    """Whether the item's record is there."""
    return settings.record(item.name).is_file()


def at_hand(name: str, settings: Settings) -> bool:
    """Whether what the item left is on this machine: a record may have come without its model."""
    return (settings.folder(name) / "record.json").is_file()


def lacks(item: Item, settings: Settings) -> list[str]:
    """The items that must be done on this machine before this one can begin."""
    return [name for name in item.needs if not at_hand(name, settings)]


def failures(settings: Settings) -> dict[str, dict[str, Any]]:
    """What has failed so far, by the item's name: the reason, and how often."""
    path = settings.root / f"{settings.prefix}-failed.json"
    return load_record(path.stem, path.parent) if path.is_file() else {}


def remember(name: str, why: str, settings: Settings) -> None:
    """Note that an item failed, or, where `why` is empty, that it no longer does."""
    failed = failures(settings)
    tries = tried(settings)[name] + 1
    if why or failed.pop(name, None):
        if why:
            failed[name] = {"failed": why, "tries": tries, "commit": git_commit()}
        save_record(f"{settings.prefix}-failed", failed, settings.root)


def tried(settings: Settings) -> Counter[str]:
    """How often each item has failed."""
    return Counter({name: one["tries"] for name, one in failures(settings).items()})


def asked_for(items: Sequence[Item], names: Sequence[str], settings: Settings) -> list[Item]:
    """The items `names` that aren't done, and before them what they need and isn't at hand.

    So what is done is done again where its folder went with a machine, and another needs it.
    """
    waiting: list[Item] = []
    needed: set[str] = set()
    for item in reversed(items):  # what is needed stands before what needs it
        lost = item.name in needed and not at_hand(item.name, settings)
        if lost or (item.name in names and not is_done(item, settings)):
            waiting.insert(0, item)
            needed |= {*item.needs}
    return waiting


def owed(items: Sequence[Item], settings: Settings) -> list[Item]:
    """What is to be done, in order: never tried before failed once; failed twice is left alone."""
    tries = tried(settings)
    hopeful = [item.name for item in items if tries[item.name] < TRIES]
    waiting = [one for one in asked_for(items, hopeful, settings) if one.name in hopeful]
    return sorted(waiting, key=lambda item: tries[item.name])  # stable: else as they stand


def attempt(item: Item, settings: Settings) -> str:
    """Do `item` and write its record, in its folder and among the records, with its provenance.

    Returns what went wrong, in one line; "" if nothing did. Raises OSError where the disk is full,
    Stopped or OutOfTime where it was stopped.
    """
    command = settings.repeat(item.name)
    try:
        record = item.make(settings)
        not_run = [*dict.fromkeys(settings.missed() + record.get("not_run", []))]
        record = {**provenance(command, settings.device), **record, "not_run": not_run}
        record |= {"command": command, "repeat": command}  # a training names the command it knows
        save_record("record", record, settings.folder(item.name))
        save_record(settings.record(item.name).stem, record, settings.records)
    except Exception as error:
        # A bare OSError, and no special case such as a missing file, is a full disk.
        if isinstance(error, (Stopped, BrokenPipeError)) or type(error) is OSError:
            raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return ""


def answers(device: torch.device) -> bool:
    """Whether `device` still computes. After some faults a GPU does no more for this process."""
    gc.collect()  # what a failed item held is free only now
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            if torch.cuda.current_stream() != torch.cuda.default_stream():
                return False  # a recording broke off
        return torch.rand(2, device=device).sum().item() >= 0.0  # its generator breaks with it
    except RuntimeError:
        return False


class Log:
    """A line for each item that was begun, in PREFIX-log.txt and on the terminal."""

    def __init__(self, settings: Settings):
        self.path = settings.root / f"{settings.prefix}-log.txt"

    def text(self) -> str:
        """All lines so far."""
        return self.path.read_text("utf-8") if self.path.is_file() else ""

    def add(self, name: str, what: str, seconds: float) -> None:
        """One more line."""
        line = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}  {name}  {what}  {seconds:.1f} s"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, f"{self.text()}{line}\n".encode())
        print(line, flush=True)


def work(
    items: Sequence[Item], settings: Settings, clock: Clock, after: Callable[[], Any] = lambda: None
) -> int:
    """Do `items` in their order as far as the clock lets; `after` is called after each.

    Returns the exit code: 0, or 128 + the signal where one stopped it that isn't the clock's, or 2
    where a failure took the GPU along.
    """
    log = Log(settings)
    for item in items:
        if lacks(item, settings) or not fits(item, settings, clock):
            continue
        start = clock.now()
        try:
            why = attempt(item, settings)
        except (Stopped, OutOfTime) as stop:
            log.add(item.name, "stopped: goes on next time", clock.now() - start)
            after()
            if clock.rings == 0:
                return 128 + stop.number
            continue
        remember(item.name, why, settings)
        log.add(item.name, f"failed: {why}" if why else "done", clock.now() - start)
        after()
        if not answers(settings.device):
            print(f"after {item.name} the GPU no longer answers this process", file=sys.stderr)
            return 2
    return 0


def serve(
    items: Sequence[Item],
    names: Sequence[str],
    settings: Settings,
    minutes: float,
    reserve: float,
    after: Callable[[], Any] = lambda: None,
) -> int:
    """Do what is owed of `items` while the minutes last, or `names` alone; say what is left.

    What is asked for by name is done even if it failed too often. `reserve` are the minutes at the
    end for the scores of a training that is just over. Returns the exit code, as `work`.
    """
    waiting = asked_for(items, names, settings) if names else owed(items, settings)
    after()  # what was made before comes along; and a folder that won't do is found now
    with Clock(minutes, settings.minutes(reserve)) as clock:
        try:
            code = work(waiting, settings, clock, after)
        except OutOfTime as stop:  # between two items
            code = 0 if clock.rings else 128 + stop.number
    rest = [item for item in waiting if not is_done(item, settings)]
    for item in rest:
        if needs := lacks(item, settings):
            print(f"{item.name} waits for {', '.join(needs)}")
    goes_on = f"the same command goes on with: {', '.join(item.name for item in rest)}"
    print(goes_on if rest else "nothing asked for is owed any more")
    return code


def listing(items: Sequence[Item], settings: Settings) -> str:
    """What is owed, what isn't, and how long each should take: a line an item."""
    tries, lines, total = tried(settings), [], 0.0
    for item in items:
        minutes = settings.minutes(item.minutes)
        state = "waits" if lacks(item, settings) else "owed"
        state = "begun" if settings.folder(item.name).is_dir() else state
        if tries[item.name]:
            state = "failed" if tries[item.name] < TRIES else "given up"
        if is_done(item, settings):
            state = "done"
        total += 0.0 if state in ("done", "given up") else minutes
        lines.append(f"{item.name:<16} {settings.told(minutes)}  {state:<8}  {item.about}")
    return "\n".join([*lines, f"{'owed':<16} {settings.told(total)} in all"])
