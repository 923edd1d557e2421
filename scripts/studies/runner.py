"""Many short trainings that answer one question: what is missing is run, what is done is on record.

A plan says which runs are wanted, given those that are done: so rates are swept, and the best one
is used in the runs that count. The record is rewritten after each run, and is all that the next
call needs, on any machine.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.files import writable, write_whole
from scripts.book.records import RESULTS, git_commit, load_record, provenance, save_record
from scripts.ch12_going_fast import keep_memory
from scripts.core.settings import TrainConfig, known_settings, pick_device, plain_config

Run = dict[str, Any]  # what identifies it (its row, its rate, its seed), and then what was found
Plan = Callable[[Sequence[Run]], Sequence[Run]]
Work = Callable[[Mapping[str, Any], Run], Run]


@dataclass(frozen=True)
class Study:
    """A question: its record's name, what all runs share, which are wanted, what does one.

    `work` gets the setting and what is wanted. It runs in another process, so it has to be a
    module's function.
    """

    name: str
    setting: Mapping[str, Any]
    plan: Plan
    work: Work

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Those wanted so far that aren't among `runs`."""
        found: list[Run] = []
        for wanted in self.plan(runs):
            if not these([*runs, *found], **wanted):  # a plan may name one twice
                found.append(wanted)
        return found


def these(runs: Sequence[Run], **wanted: Any) -> list[Run]:
    """The runs that have all these values."""
    return [run for run in runs if wanted.items() <= run.items()]


def best_rate(runs: Sequence[Run], by: str = "loss") -> float:
    """The rate of the run in which `by` is lowest; one that diverged has none.

    Raises ValueError if all have diverged.
    """
    return min((run for run in runs if run["loss"] is not None), key=lambda run: run[by])["lr"]


def sweep(runs: Sequence[Run], start: float, by: str = "loss") -> list[float]:
    """The rates to try: `start` and its neighbours by a factor of two, then on beyond the best.

    `runs` are those done so far. The sweep is over when no rate is missing from them: then the best
    rate has worse ones on both sides.
    """
    rates, tried = {start / 2, start, 2 * start}, {run["lr"] for run in runs}
    if rates <= tried:
        best = best_rate(runs, by)
        rates |= {best / 2, 2 * best}
    return sorted(rates)


def begun(study: Study, command: str, folder: Path) -> dict[str, Any]:
    """The study's record so far; a new one if there is none.

    Raises ValueError if it is of another setting.
    """
    with suppress(FileNotFoundError):
        record = load_record(study.name, folder)
        if known_settings(record["setting"]) != study.setting:
            path = folder / f"{study.name}.json"
            raise ValueError(f"{path} holds a study in another setting: move it away")
        return record
    device = pick_device(study.setting.get("device", "cpu"))
    return {**provenance(command, device), "setting": study.setting, "runs": []}


def kept_at(path: Path, given: Run, make: Callable[[], Run]) -> Run:
    """`given` and what `make()` gave with it, from `path`; made now if it isn't there.

    Of several processes that want it at once, one makes it, and the others wait.
    """
    with FileLock(writable(path.parent) / f"{path.name}.lock"):
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if not given.items() <= found.items():
            found = given | make()
            write_whole(path, json.dumps(found, ensure_ascii=False).encode())
    return found


def lesson_of(config: TrainConfig) -> Run:
    """What `config` has beyond a TrainConfig and that isn't off."""
    plain = asdict(plain_config(config))
    return {name: value for name, value in asdict(config).items() if value and name not in plain}


def on_record(path: Path, config: TrainConfig) -> Run | None:
    """The record at `path`, if any. Raises ValueError if it isn't of `config`'s run."""
    if not path.is_file():
        return None
    found = load_record(path.stem, path.parent)
    ours = asdict(plain_config(config)) | lesson_of(config)
    if "val_bleu_by_alpha" in found:
        ours["alpha"] = found["config"]["alpha"]  # validation chose it
    if known_settings(found["config"]) | found.get("lesson", {}) != ours:
        raise ValueError(f"{path.parent} holds another run: move it away")
    return found


def step_back() -> None:
    """The lowest priority for this process and those it starts; on Linux for its session, too."""
    os.nice(19)
    group = Path(f"/proc/{os.getpid()}/autogroup")
    with suppress(OSError):  # no such file, or not ours to write
        if group.exists():
            group.write_text("19")


def one_thread() -> None:
    """What one process of many does: it uses one thread, and keeps the memory that it frees."""
    torch.set_num_threads(1)
    keep_memory()


@dataclass
class Hours:
    """How long, how many at once, and where to."""

    hours: float = 1.2
    """No run begins after this many hours. The same command goes on with what is missing."""
    workers: int = 2
    """Runs at once, each on one thread at the lowest priority."""
    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    save: bool = False
    """Keep the record in results/, and not below the folder of runs."""


def go_on(options: Hours, module: str, base: TrainConfig, plan: Plan, work: Work) -> dict[str, Any]:
    """Do what is missing of a study in `base`'s setting, as far as the hours allow; its record.

    `module` is the command's, and the record is named after it.
    """
    setting = asdict(replace(base, corpus=options.corpus))
    study = Study(f"{module.rpartition('.')[2]}-{options.corpus}", setting, plan, work)
    folder = RESULTS if options.save else runs_folder() / "results"
    step_back()
    one_thread()  # also here: the record says how many a run had
    command = as_typed(module, Hours(corpus=options.corpus))  # whatever the hours of each call
    return complete(study, command, folder, options.hours, options.workers)


def complete(
    study: Study, command: str, folder: Path, hours: float, workers: int = 1
) -> dict[str, Any]:
    """Do what is missing, `workers` runs at once, and begin none after `hours`; the record.

    Raises ValueError if what is on record is in another setting.
    """
    record, end = begun(study, command, folder), time.monotonic() + 3600 * hours
    code = {"commit": git_commit()}  # what workers import, whatever is committed meanwhile
    running: dict[Future, Run] = {}
    with ProcessPoolExecutor(workers, get_context("spawn"), one_thread) as pool:
        while True:
            missing = study.missing(record["runs"])
            waiting = [wanted for wanted in missing if wanted not in running.values()]
            if time.monotonic() < end:
                for wanted in waiting[: workers - len(running)]:
                    running[pool.submit(study.work, study.setting, wanted)] = wanted
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done = running.pop(future) | future.result() | code
                record["runs"].append(done)
                save_record(study.name, record, folder)
                print(done, flush=True)
    print(f"{len(record['runs'])} runs are on record, {len(missing)} more are wanted so far")
    return record


def study_command(module: str, base: TrainConfig, plan: Plan, work: Work) -> Command:
    """The command of the study that is the module of this name."""

    def run(options: Hours) -> None:
        """Train what is missing of a study, as far as the hours allow."""
        go_on(options, module, base, plan, work)

    return Command(module, Hours, run, interrupted=GOES_ON)
