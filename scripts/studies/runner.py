"""Many short trainings that answer one question: what is missing is run, what is done is on record.

A plan says which runs are wanted, given those that are done: so rates are swept, and the best one
is used in the runs that count. The record is rewritten after each run, and is all that the next
call needs, on any machine.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from filelock import FileLock

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command
from scripts.book.files import writable, write_whole
from scripts.book.records import RESULTS, git_commit, load_record, provenance, save_record
from scripts.ch12_going_fast import keep_memory
from scripts.core.settings import known_settings

SWEEP, SEEDS = 0, (1, 2, 3)  # the seed that chooses a rate isn't one of those that count
SWEEPS = (SWEEP, 10)  # those of a finer sweep

Run = dict[str, Any]  # what identifies it (its row, its rate, its seed), and then what it gave
Work = Callable[[Mapping[str, Any], Run], Run]  # of a setting and a task: a run that is wanted


def these(runs: Sequence[Run], **values: Any) -> list[Run]:
    """The runs that have all these values."""
    return [run for run in runs if values.items() <= run.items()]


def kept_at(path: Path, key: Run, make: Callable[[], Run]) -> Run:
    """`key` and what `make()` gave with it, from `path`; made now if it isn't there.

    Of several processes that want it at once, one makes it, and the others wait.
    """
    with FileLock(writable(path.parent) / f"{path.name}.lock"):
        content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if not key.items() <= content.items():
            content = key | make()
            write_whole(path, json.dumps(content, ensure_ascii=False).encode())
    return content


def step_back() -> None:
    """The lowest priority for this process and those it starts; on Linux for its session, too."""
    os.nice(19)
    with suppress(OSError):  # no such file, or not ours to write
        Path(f"/proc/{os.getpid()}/autogroup").write_text("19")


def one_thread() -> None:
    """What one process of many does: it uses one thread, and keeps the memory that it frees."""
    torch.set_num_threads(1)
    keep_memory()


class Plan(list[Run]):
    """The runs wanted so far, given those that are done: others wait for a sweep to end.

    A place is what identifies a row: no rate and no seed.
    """

    def __init__(self, runs: Sequence[Run]):
        super().__init__()
        self.runs = runs

    def sweep(self, place: Run, start: float, by: str = "loss") -> Run | None:
        """`place` with the rate whose `by` is lowest; None while more runs are wanted.

        It tries `start`, half and twice that, and goes on beyond the best, until that has worse
        ones on both sides. Raises ValueError if all runs diverged.
        """
        swept = these(self.runs, **place, seed=SWEEP)
        done = {run["lr"]: run for run in swept if math.log2(run["lr"] / start).is_integer()}
        rates, best = {start / 2, start, 2 * start}, None
        if rates <= done.keys():
            whole = [run for run in done.values() if run["loss"] is not None]
            best = min(whole, key=itemgetter(by))["lr"]
            rates |= {best / 2, 2 * best}
        self += [place | {"seed": SWEEP, "lr": rate} for rate in sorted(rates)]
        return place | {"lr": best} if rates <= done.keys() else None

    def finer(self, place: Run | None, step: int = 0) -> Run | None:
        """`place` with its best rate in steps of √2 from its own; None while more runs are wanted.

        The mean loss of two seeds decides. It goes on to a better neighbour, while there is one.
        """
        if place is None:
            return None
        steps = (step, step - 1, step + 1)
        tried = {k: place | {"lr": float(f"{place['lr'] * 2 ** (k / 2):.3g}")} for k in steps}
        self += [rated | {"seed": seed} for rated in tried.values() for seed in SWEEPS]
        losses = {k: self.swept_loss(rated) for k, rated in tried.items()}
        if None in losses.values():
            return None
        best = min(losses, key=losses.__getitem__)  # the first, of equal ones
        return tried[step] if best == step else self.finer(place, best)

    def swept_loss(self, rated: Run) -> float | None:
        """The mean loss of a finer sweep's seeds, infinite if one diverged; None until all ran."""
        runs = [run for seed in SWEEPS for run in these(self.runs, **rated, seed=seed)]
        if len(runs) < len(SWEEPS):
            return None
        return fmean(math.inf if run["loss"] is None else run["loss"] for run in runs)

    def best(self, places: Sequence[Run], start: float) -> Run | None:
        """The place whose swept loss is lowest, with its rate; None until all sweeps are over."""
        swept = [self.sweep(place, start) for place in places]
        if None in swept:
            return None
        return min(swept, key=lambda place: these(self.runs, **place, seed=SWEEP)[0]["loss"])

    def seeds(self, place: Run | None, seeds: Sequence[int] = SEEDS) -> None:
        """The runs that count, once the place's rate is known."""
        self += [place | {"seed": seed} for seed in seeds if place]


@dataclass(frozen=True)
class Study:
    """A question: its record's name, what all runs share, what plans them, and what does one.

    `plan` adds to a Plan. `work` runs in another process, so it has to be a module's function.
    """

    name: str
    setting: Mapping[str, Any]
    plan: Callable[[Plan], None]
    work: Work

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Those wanted so far that aren't among `runs`."""
        plan, missing = Plan(runs), []
        self.plan(plan)
        for task in plan:
            if not these([*runs, *missing], **task):  # a plan may name one twice
                missing.append(task)
        return missing

    def record(self, command: str, folder: Path) -> dict[str, Any]:
        """What is on record so far; a new record if there is none.

        Raises ValueError if the record's setting differs from this one in anything.
        """
        path = folder / f"{self.name}.json"
        if not path.is_file():
            return {**provenance(command), "setting": self.setting, "runs": []}
        record = load_record(self.name, folder)
        if not self.setting.items() <= known_settings(record["setting"]).items():
            raise ValueError(f"{path} holds a study in another setting: move it away")
        return record

    def go_on(self, command: str, folder: Path, hours: float, workers: int = 1) -> dict[str, Any]:
        """Do what is missing, `workers` runs at once, and begin none after `hours`; the record."""
        record, end = self.record(command, folder), time.monotonic() + 3600 * hours
        code = {"commit": git_commit()}  # what workers import, whatever is committed meanwhile
        running: dict[Future, Run] = {}
        with ProcessPoolExecutor(workers, get_context("spawn"), one_thread) as pool:
            while True:
                missing = self.missing(record["runs"])
                waiting = [task for task in missing if task not in running.values()]
                if time.monotonic() < end:
                    for task in waiting[: workers - len(running)]:
                        running[pool.submit(self.work, self.setting, task)] = task
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future) | future.result() | code
                    record["runs"].append(run)
                    save_record(self.name, record, folder)
                    print(run, flush=True)
        if not missing:  # a finer rate has replaced some
            plan = Plan(record["runs"])
            self.plan(plan)
            record["runs"] = [
                run
                for run in plan.runs
                if run.get("seed", 0) not in SEEDS or any(t.items() <= run.items() for t in plan)
            ]
            save_record(self.name, record, folder)
        print(f"{len(record['runs'])} runs are on record, {len(missing)} more are wanted so far")
        return record


@dataclass
class Hours:
    """How long, how many at once, and where to."""

    hours: float = 1.2
    """No run begins after this many hours. The same command goes on with what is missing."""
    workers: int = 2
    """Runs at once, each on one thread at the lowest priority."""
    save: bool = False
    """Keep the record in results/, and not below the folder of runs."""


def study_command(
    module: str, setting: Mapping[str, Any], plan: Callable[[Plan], None], work: Work
) -> Command:
    """The command of the study that is the module of this name; the setting names its corpus."""

    def run(options: Hours) -> dict[str, Any]:
        """Train what is missing of a study, as far as the hours allow."""
        name = f"{module.rpartition('.')[2].replace('_', '-')}-{setting['corpus']}"
        study = Study(name, setting, plan, work)
        folder = RESULTS if options.save else runs_folder() / "results"
        step_back()
        one_thread()  # also here: the record says how many a run had
        command = f"python -m {module} --save"  # whatever the hours of each call
        return study.go_on(command, folder, options.hours, options.workers)

    return Command(module, Hours, run, interrupted=GOES_ON)
