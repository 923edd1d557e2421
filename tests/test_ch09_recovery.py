"""Chapter 9: a run killed, stopped, torn, choked or poisoned ends as if nothing had happened.

The processes are real, and so are their deaths. Torch takes seconds to import, so one process does
it and forks a child for each run (`serve`, below). "The same" means bit for bit, timings aside.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from conftest import ROOT
from test_ch09_training_run import TINY as BASE

from scripts import train
from scripts.book.records import load_record, sha256
from scripts.ch06_training import cosine_rate
from scripts.core import checkpoints
from scripts.core import training as core_training
from scripts.core.cards import model_card
from scripts.core.checkpoints import (
    load_tensors,
    newest_state,
    save_tensors,
    saved_states,
    weights,
)
from scripts.core.data import TrainingData, epoch_plan, prepare
from scripts.core.models import STORED_DTYPE
from scripts.core.settings import PRESETS, TrainConfig
from scripts.core.signals import Stopped, StopSignal
from scripts.core.steps import Step
from scripts.core.training import Diverged, Training, differences, identity
from scripts.fast import losses
from scripts.fast import run as fast_run
from scripts.fast.fast import fast_loss
from scripts.fast.losses import resolved
from scripts.fast.run import fit, trained_to_end

TINY = replace(BASE, max_tokens=256, save_every=4, average=2, name="run")
DATED = {"record.json", "README.md"}  # a finished command adds these, with the date
LONGEST = 60  # seconds until a child that hangs is ended


def few_pairs() -> TrainingData:
    """200 pairs to learn from, 4 to be judged by."""
    whole = prepare(TINY)
    val = whole.corpus["val"][:4]
    corpus = {"train": whole.corpus["train"][:200], "val": val, "test": val}
    return TrainingData(corpus, whole.tokenizer, whole.train[:200], whole.val[:4])


# The process that forks, and what a child does.


def serve() -> None:
    """For each line of JSON, fork a child and print its process ID; its exit code when asked."""
    import jsonargparse  # noqa: F401 (this and the next two: else every child would import them)
    import sacrebleu.metrics  # noqa: F401
    import torch._dynamo  # noqa: F401

    data = few_pairs()
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            work(data, **json.loads(line))
        print(child, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def work(
    data: TrainingData,
    home: str,
    options: list[str],
    file_limit: int | None,
    fatal_write: tuple[int, str] | None,
) -> None:
    """Run the command as a process of its own, in `home`; never returns."""
    signal.alarm(LONGEST)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(Path(home, "stderr"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if file_limit is not None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, hard))
    if fatal_write is not None:
        die_writing(*fatal_write)
    os.environ["SERIES_RUNS"] = str(Path(home, "runs"))
    PRESETS["sample"], fast_run.prepare = TINY, lambda config: data
    sys.argv = ["train.py", "--preset", "sample", *options]
    code = 1
    try:
        code = train.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def die_writing(number: int, when: str) -> None:
    """Have this process killed half-way through its write of that number, or right after it."""
    writes, rename = itertools.count(1), os.replace

    def fatal(partial: Path, path: Path) -> None:
        dies = next(writes) == number
        if dies and when == "half-way":
            os.truncate(partial, partial.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        rename(partial, path)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = fatal


class Workshop:
    """Starts the command in real processes, one at a time."""

    def __init__(self):
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | alone,
        )

    def tell(self, line: str) -> int:
        """Send a line; return the number that comes back."""
        self.server.stdin.write(line + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def start(
        self,
        home: Path,
        *options: str,
        file_limit: int | None = None,
        fatal_write: tuple[int, str] | None = None,
    ) -> int:
        """Start the command; return its process ID, which stays taken until `end`."""
        home.mkdir(exist_ok=True)
        (home / "stderr").unlink(missing_ok=True)
        job = {"home": str(home), "options": options, "file_limit": file_limit}
        return self.tell(json.dumps(job | {"fatal_write": fatal_write}))

    def end(self) -> int:
        """Wait for the process; return its exit code, or minus the signal that killed it."""
        return self.tell("")

    def run(self, home: Path, *options: str, **faults: Any) -> int:
        """Start the command and wait for it."""
        self.start(home, *options, **faults)
        return self.end()


def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def spoken(text: str) -> list[str]:
    """The lines of standard error, without the progress bars."""
    lines = (line.strip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line and not re.match(r"epoch \d+/\d+:", line)]


def said_by(home: Path) -> list[str]:
    """What the last process in `home` said on standard error."""
    return spoken((home / "stderr").read_text())


# What a training leaves behind.


def steps_saved(folder: Path) -> int:
    """The steps of the newest state, 0 if there is none."""
    return max((int(path.stem.removeprefix("state-")) for path in saved_states(folder)), default=0)


def contents(folder: Path) -> dict[str, str]:
    """Every file and its SHA-256."""
    return {path.name: sha256(path) for path in sorted(folder.iterdir())}


def outcome(folder: Path) -> dict[str, Any]:
    """All that a finished run must have in common with another: tensors, files and history."""
    path, tensors, meta, _ = newest_state(folder)
    for row in meta["history"]:
        del row["seconds"], row["cpu_seconds"]
    files = contents(folder)
    kept = {name: files[name] for name in files.keys() - DATED if not name.startswith("state-")}
    kept["log.csv"] = (
        pd.read_csv(folder / "log.csv").drop(columns=["seconds", "cpu_seconds"]).to_dict("records")
    )
    for name, tensor in tensors.items():
        kept[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    return kept | {"newest": path.name, "meta": meta}


class Crash(Exception):
    """The power fails."""


def crash(data: TrainingData, folder: Path, steps: int, config: TrainConfig = TINY) -> Path:
    """Train into `folder` until the power fails after that many steps."""
    remaining, whole = iter(range(steps)), Step.run

    def step(*given: Any) -> Any:
        if next(remaining, None) is None:
            raise Crash
        return whole(*given)

    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Step, "run", step)
        fit(config, data, folder)
    return folder


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return few_pairs()


@pytest.fixture(scope="module")
def per_epoch(data) -> int:
    """Steps in the first epoch."""
    return len(epoch_plan(TINY, data, 1))


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory) -> dict[str, Any]:
    """The outcome of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    fit(TINY, data, folder)
    return outcome(folder)


@pytest.fixture(scope="module")
def halfway(data, per_epoch, tmp_path_factory) -> Path:
    """A run that broke off in its second epoch; to be copied."""
    return crash(data, tmp_path_factory.mktemp("halfway") / "run", per_epoch + 7)


@pytest.fixture
def broken(halfway, tmp_path) -> Path:
    """A copy of `halfway` for one test."""
    return shutil.copytree(halfway, tmp_path / "run")


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    shop = Workshop()
    yield shop
    shop.server.stdin.close()
    shop.server.wait(timeout=LONGEST)


@pytest.fixture(scope="module")
def straight_command(workshop, tmp_path_factory) -> dict[str, Any]:
    """The outcome of a command that nothing happened to."""
    home = tmp_path_factory.mktemp("straight-command")
    assert workshop.run(home) == 0
    return outcome(home / "runs/run")


# Killed.


def test_ten_kills_in_a_row_change_nothing(workshop, straight_command, tmp_path):
    """kill -9 at random moments: ten processes die, the eleventh ends where one alone would."""
    luck, folder = random.Random(8), tmp_path / "runs/run"
    for kill in range(10):
        saved, more = steps_saved(folder), luck.choice((0, 1, 1, 2)) if kill else 0
        pid = workshop.start(tmp_path, "--save_every", "1", *["--resume"] * bool(saved))
        until(lambda goal=saved + more: steps_saved(folder) >= goal)
        time.sleep(luck.uniform(0.0, 0.05) if kill else 0.0)
        os.kill(pid, signal.SIGKILL)
        assert workshop.end() == -signal.SIGKILL
        assert kill or not saved_states(folder)  # the first dies before anything is saved
    assert steps_saved(folder) > 0 and not (folder / "record.json").exists()
    assert workshop.run(tmp_path, "--resume") == 0
    assert outcome(folder) == straight_command


def test_killed_in_any_write(workshop, tmp_path):
    """Near the end of a run, the nth process dies half-way through its nth write.

    What it left of a file does no harm. Nor does dying right after the last state is written.
    """
    few = ("--average", "1", "--save_every", "20")
    straight, killed, other = (tmp_path / name for name in ("straight", "killed", "other"))
    assert workshop.run(straight, *few) == 0
    # Two states, the first epoch's six files, and a state in the second epoch.
    assert workshop.run(killed, *few, fatal_write=(9, "after")) == -signal.SIGKILL
    shutil.copytree(killed, other)
    torn: list[str] = []
    for number in itertools.count(1):
        code = workshop.run(killed, *few, "--resume", fatal_write=(number, "half-way"))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        partials = {path.stem for path in (killed / "runs/run").glob("*.partial")}
        torn += partials - set(torn)
    last = saved_states(straight / "runs/run")[-1].name
    assert {"epoch-002.safetensors", "log.csv", last, "record.json"} <= set(torn)
    fatal = (1 + torn.index(last), "after")
    assert workshop.run(other, *few, "--resume", fatal_write=fatal) == -signal.SIGKILL
    assert steps_saved(other / "runs/run") == steps_saved(straight / "runs/run")
    assert workshop.run(other, *few, "--resume") == 0
    for home in (killed, other):
        assert outcome(home / "runs/run") == outcome(straight / "runs/run")


# Asked to stop.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_that_is_asked_to_stop_saves_first(
    workshop, straight_command, tmp_path, number, code
):
    """The state is saved because of the signal: no other save is due within an epoch."""
    folder, rare = tmp_path / "runs/run", ("--save_every", "1000")
    pid = workshop.start(tmp_path, *rare)
    bar = tmp_path / "stderr"
    until(lambda: bar.is_file() and bar.stat().st_size)  # the first epoch has begun
    os.kill(pid, number)
    assert workshop.end() == code
    steps = steps_saved(folder)
    (line,) = said_by(tmp_path)
    assert f"stopped by {number.name} after step {steps}, and saved" in line and "--resume" in line
    assert 0 < steps < straight_command["meta"]["steps_taken"]
    assert workshop.run(tmp_path, "--resume") == 0
    assert outcome(folder) == straight_command


@pytest.mark.parametrize("moment", ["first step", "epoch's last", "run's last", "validation"])
def test_stopping_at_any_moment_changes_nothing(
    data, straight, per_epoch, tmp_path, monkeypatch, moment
):
    """The signal comes within that step, or while the first epoch is validated."""
    total = straight["meta"]["steps_taken"]
    at = {"first step": 1, "epoch's last": per_epoch, "run's last": total}.get(moment, 1)
    place, name = (fast_run, "validate") if moment == "validation" else (Step, "run")
    calls, whole = itertools.count(1), getattr(place, name)

    def signalled(*given: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*given)

    monkeypatch.setattr(place, name, signalled)
    steps = per_epoch if moment == "validation" else at
    with pytest.raises(Stopped, match=f"SIGTERM after step {steps}, and saved"):
        fit(TINY, data, tmp_path)
    assert steps_saved(tmp_path) == steps
    fit(TINY, data, tmp_path, resume=True)
    assert outcome(tmp_path) == straight


def test_a_second_signal_acts_at_once():
    """One Ctrl-C waits for the step to end, two don't; afterwards the handlers are as before."""
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.number == signal.SIGINT
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second one was ignored")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, ours)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "muon"},
        {"bpe_dropout": 0.1},
        {"r_drop": 1.0},
        {"accumulate": 3},
        {"step": "static", "dropout": 0.2},
        {"path": "textbook", "schedule": "inverse_sqrt"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_recipe_resumes_exactly(data, tmp_path, changes):
    """Whatever an ingredient remembers from step to step is in the state."""
    config = replace(TINY, epochs=1, save_every=3, **changes)
    (tmp_path / "straight").mkdir()
    history = fit(config, data, tmp_path / "straight")
    folder = crash(data, tmp_path / "broken", 5, config)
    assert steps_saved(folder) == 3
    resumed = fit(config, data, folder, resume=True)
    assert outcome(folder) == outcome(tmp_path / "straight")
    clocks = {"seconds": 0, "cpu_seconds": 0}
    assert [row | clocks for row in resumed] == [row | clocks for row in history]


# Gone on elsewhere.


def moved(path: Path, kind: str) -> None:
    """Make a state of static steps on a CPU one that a GPU might have left."""
    _, tensors, meta, _ = newest_state(path)
    meta["run"] |= {"step": "graphed", "precision": "bf16"}
    meta["asked"] = meta.get("asked", {}) | {"step": "auto", "precision": "auto"}
    meta["device"] = "NVIDIA H200"
    for name in ("asked", "device", "origin", "resumed_on") * (kind == "older"):
        meta.pop(name, None)  # as before states said what was asked for, and where
    tensors["rng.0.cuda"] = torch.zeros(16, dtype=torch.uint8)
    save_tensors(saved_states(path)[-1], tensors, meta)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("new", {}),
        ("older", {}),
        ("new", {"step": "graphed"}),
        ("new", {"fused": False, "path": "textbook", "deterministic": True}),
    ],
    ids=["auto", "older", "graphed", "others"],
)
def test_a_gpus_run_goes_on_without_one(
    data, tmp_path, monkeypatch, capsys, kind, words, optimizer
):
    """The same words do: it keeps its plan, takes the precision that there is, and says so."""
    monkeypatch.setattr(losses, "multiplies_bf16", lambda device: False)
    config = replace(TINY, epochs=1, optimizer=optimizer)
    folder = crash(data, tmp_path / "run", 9, replace(config, step="static"))
    moved(folder, kind)
    words = {"step": "auto", "precision": "auto"} | words
    with monkeypatch.context() as patch, pytest.raises(Crash):  # and is stopped once more
        patch.setattr(Training, "end_epoch", lambda *_: (_ for _ in ()).throw(Crash))
        fit(replace(config, **words), data, folder, resume=True)
    (line,) = [s for s in capsys.readouterr().out.splitlines() if "not the same to the bit" in s]
    device = "device cuda, now cpu" if kind == "older" else "device NVIDIA H200, now CPU"
    for said in ("step graphed, now static", "precision bf16, now float32", device):
        assert said in line
    training = trained_to_end(replace(config, **words), data, folder, resume=True)
    assert (training.config.step, training.config.precision) == ("static", "float32")
    assert training.steps_taken == len(epoch_plan(replace(config, step="graphed"), data, 1))
    (where,) = training.resumed_on
    assert where["step"] == 8 and where["changes"]["step"] == ["graphed", "static"]
    assert where["changes"].keys() == {"device", "step", "precision"} | words.keys()
    record = load_record("sample-de-en") | {"resumed_on": training.resumed_on}
    assert "After step 8 it went on elsewhere: " in model_card(record)


def test_a_cpus_run_goes_on_with_a_gpu(monkeypatch):
    """A plan of any shapes stays, one of few is recorded if the GPU can; and dropout is seeded."""
    gpu, auto = torch.device("cuda"), replace(TINY, precision="auto")
    monkeypatch.setattr(losses, "multiplies_bf16", lambda device: True)
    kinds = {"eager": "eager", "static": "graphed", "graphed": "graphed"}
    for before, after in kinds.items():
        found = resolved(auto, gpu, before=before)
        assert (found.step, found.precision) == (after, "bf16")
        meta = {"run": identity(replace(TINY, step=before)), "asked": asdict(auto)}
        recipe, machine = differences(meta, found)
        assert not recipe and machine.keys() == {"precision", *["step"] * (before != after)}
    assert resolved(replace(auto, fused=False), gpu, before="graphed").step == "static"
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    checkpoints.set_rng_states({"cpu": torch.get_rng_state()}, gpu, otherwise=7)
    assert seeds == [7]


# Torn.


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def spoil(path: Path, how: str) -> None:
    """Damage a state as a disk, or an interrupted copy, would."""
    size = path.stat().st_size
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    if how == "truncated":
        os.truncate(path, size * 2 // 3)
    elif how == "empty":
        os.truncate(path, 0)
    else:
        where = {"data": (header + size) // 2, "header": header // 2, "length": 1}
        flip(path, where[how])


@pytest.mark.parametrize("how", ["truncated", "empty", "data", "header", "length"])
def test_a_torn_state_gives_way_to_the_one_before(data, broken, straight, capsys, how):
    """Resuming says which file is no good, goes on from the other, and ends the same way."""
    before, newest = saved_states(broken)
    spoil(newest, how)
    fit(TINY, data, broken, resume=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "going on" in line]
    assert newest.name in line and f"going on from {before.name}" in line
    assert outcome(broken) == straight


def test_the_thousandth_epoch_comes_after_the_one_before(tmp_path):
    names = [f"epoch-{number:03d}.safetensors" for number in (998, 999, 1000)]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in saved_states(tmp_path, "epoch")] == names


def test_a_mistake_in_the_options_deletes_nothing(data, tmp_path):
    """A finished run's states stay until another one really begins."""
    fit(TINY, data, tmp_path)
    kept = contents(tmp_path)
    with pytest.raises(ValueError):
        fit(replace(TINY, heads=3), data, tmp_path)
    assert contents(tmp_path) == kept


def test_without_a_good_state_resuming_is_refused_in_one_line(data, broken, tmp_path):
    for path, how in zip(saved_states(broken), ("data", "truncated"), strict=True):
        spoil(path, how)
    kept = contents(broken)
    with pytest.raises(ValueError, match="no good checkpoint") as caught:
        fit(TINY, data, broken, resume=True)
    assert "\n" not in str(caught.value)
    assert all(path.name in str(caught.value) for path in saved_states(broken))
    assert contents(broken) == kept
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="run without --resume first"):
        fit(TINY, data, tmp_path / "empty", resume=True)


# Out of room.


def test_a_full_disk_costs_nothing_that_was_saved(workshop, straight_command, tmp_path):
    """A limit on file size stands in for a full disk: the system refuses the same write call."""
    folder = tmp_path / "runs/run"
    pid = workshop.start(tmp_path)
    until((folder / "log.csv").is_file)  # the second epoch is about to begin
    began = steps_saved(folder)
    until(lambda: steps_saved(folder) > began)
    os.kill(pid, signal.SIGKILL)
    assert workshop.end() == -signal.SIGKILL
    for partial in folder.glob("*.partial"):
        partial.unlink()
    kept, newest = contents(folder), saved_states(folder)[-1]
    limit = newest.stat().st_size // 2
    assert workshop.run(tmp_path, "--resume", file_limit=limit) == 2
    (line,) = said_by(tmp_path)
    assert line.startswith("error: could not write ") and "--resume" in line
    assert os.strerror(errno.EFBIG) in line and "state-" in line
    assert contents(folder) == kept
    for path in folder.glob("*.safetensors"):
        load_tensors(path)
    assert workshop.run(tmp_path, "--resume") == 0
    assert outcome(folder) == straight_command


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, call):
    """The disk may refuse as late as the flush or the rename: the old content stays."""
    path = tmp_path / "file"
    checkpoints.write_whole(path, b"old")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(os, call, refuse)
        checkpoints.write_whole(path, b"new and longer")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    checkpoints.write_whole(path, b"new and longer")
    assert path.read_bytes() == b"new and longer" and list(tmp_path.iterdir()) == [path]


# Poisoned.


def endless_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The loss is a number, but its gradient isn't."""
    loss.register_hook(lambda gradient: gradient * math.inf)
    return loss


POISONS = {
    "nan": lambda loss: loss * math.nan,
    "infinity": lambda loss: loss * math.inf,
    "gradient": endless_gradient,
}


def poison(patch: pytest.MonkeyPatch, kind: str, at: int) -> None:
    """Spoil the loss of the training step of that number."""
    steps, loss_of = itertools.count(1), fast_loss

    def poisoned(model: torch.nn.Module, *given: Any, **how: Any) -> Any:
        loss, nll = loss_of(model, *given, **how)
        now = model.training and next(steps) == at
        return (POISONS[kind](loss) if now else loss), nll

    patch.setattr(losses, "fast_loss", poisoned)


def in_memory(training: Training) -> dict[str, Any]:
    """Copies of what a step may change."""
    state = training.optimizer.state_dict()["state"]
    slots = {f"{i} {slot}": tensor for i, held in state.items() for slot, tensor in held.items()}
    tensors = weights(training.model) | slots
    return {name: tensor.detach().tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", POISONS)
def test_what_is_not_a_number_never_reaches_the_weights(
    data, straight, per_epoch, tmp_path, monkeypatch, kind
):
    """The run ends before the step changes anything: in memory, on disk, or for a resumed run."""
    at, seen, step = per_epoch + 6, {}, Training.step

    def watched(training: Training, *given: Any) -> None:
        if training.steps_taken == at - 1:
            seen.update(training=training, memory=in_memory(training), disk=contents(tmp_path))
        step(training, *given)

    with monkeypatch.context() as patch, pytest.raises(Diverged) as caught:
        poison(patch, kind, at)
        patch.setattr(Training, "step", watched)
        fit(TINY, data, tmp_path)
    plans = [epoch_plan(TINY, data, epoch) for epoch in (1, 2)]
    rate = cosine_rate(at, TINY.lr, TINY.warmup, sum(map(len, plans)))
    message = str(caught.value)
    assert message.startswith(f"step {at} (epoch 2, step 6 of it, learning rate {rate:.3g})")
    assert f"on training pairs {plans[1][5][0][:5]}" in message
    assert str(tmp_path / f"state-{per_epoch + 4:08d}.safetensors") in message
    assert "\n" not in message
    assert in_memory(seen["training"]) == seen["memory"]
    assert contents(tmp_path) == seen["disk"] and "model.safetensors" in seen["disk"]
    fit(TINY, data, tmp_path, resume=True)
    assert outcome(tmp_path) == straight


def test_a_diverged_command_says_so_in_one_line(data, tmp_path, monkeypatch, capsys):
    """Exit code 2; at the first step there is nothing to go back to, and the message says so."""
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(fast_run, "prepare", lambda config: data)
    monkeypatch.setitem(PRESETS, "sample", TINY)
    poison(monkeypatch, "nan", 1)
    assert train.main(["--preset", "sample"]) == 2
    (line,) = spoken(capsys.readouterr().err)
    assert line.startswith("error: step 1 (epoch 1") and "no state had been saved" in line
    assert contents(tmp_path / "runs/run") == {}


# Begun again, and kept.


def test_a_run_that_waits_is_not_overwritten(data, broken, straight):
    kept = contents(broken)
    with pytest.raises(ValueError, match="stopped after step .* --resume") as caught:
        fit(TINY, data, broken)
    assert "\n" not in str(caught.value) and contents(broken) == kept
    fit(TINY, data, broken, resume=True)
    assert outcome(broken) == straight


def test_a_finished_run_is_begun_anew(data, straight, tmp_path):
    """Nothing is left of the longer run before it, and resuming a finished run does nothing."""
    fit(replace(TINY, epochs=3, save_every=0), data, tmp_path)  # 0: only after epochs
    fit(TINY, data, tmp_path, overwrite=True)
    assert outcome(tmp_path) == straight
    kept = contents(tmp_path)
    fit(TINY, data, tmp_path, resume=True)
    assert contents(tmp_path) == kept


def test_a_run_that_ends_after_its_first_model_goes_on(data, straight, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(core_training, "write_log", Mock(side_effect=OSError))
        fit(replace(TINY, save_every=0), data, tmp_path)
    fit(TINY, data, tmp_path, resume=True)
    assert outcome(tmp_path) == straight


@pytest.mark.parametrize("bleus", [(1.0, 3.0, 2.0), (3.0, 1.0, 2.0)])
def test_what_a_run_keeps(data, tmp_path, monkeypatch, bleus):
    """The best model, the last two states, weights of the last and best epochs, a readable log."""
    config, bleu, validate = replace(TINY, epochs=3), iter(bleus), fast_run.validate
    monkeypatch.setattr(
        fast_run, "validate", lambda *given: validate(*given) | {"val_bleu": next(bleu)}
    )
    history = fit(config, data, tmp_path)
    model = {"model.safetensors", "tokenizer.model", "config.json"}
    best_at = 1 + bleus.index(3.0)
    epochs = {f"epoch-00{number}.safetensors" for number in {best_at, 2, 3}}
    states = {path.name for path in saved_states(tmp_path)}
    assert contents(tmp_path).keys() == model | epochs | states | {"log.csv"}
    lengths = [len(epoch_plan(config, data, epoch)) for epoch in (1, 2, 3)]
    within = (lengths[2] - 1) // TINY.save_every * TINY.save_every
    steps = (sum(lengths[:2]) + within, sum(lengths))
    assert states == {checkpoints.STATE.format(number) for number in steps}
    log = pd.read_csv(tmp_path / "log.csv")
    assert log.to_dict("records") == history and list(log["epoch"]) == [1, 2, 3]
    newest, last = newest_state(tmp_path), tmp_path / "epoch-003.safetensors"
    best = tmp_path / f"epoch-00{best_at}.safetensors"
    stored = load_tensors(tmp_path / "model.safetensors")[0]
    for name, tensor in load_tensors(best)[0].items():
        assert stored[name].equal(tensor.to(STORED_DTYPE))
    for name, tensor in load_tensors(last)[0].items():
        assert newest.tensors[f"model.{name}"].equal(tensor)


# Files.

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def some_tensors() -> dict[str, torch.Tensor]:
    """Tensors of each dtype, with 0-dimensional, empty and transposed ones among them."""
    numbers = 100 * torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    tensors = {str(dtype).removeprefix("torch."): numbers.to(dtype) for dtype in DTYPES}
    scalars = {f"one {name}": tensor[1, 2].clone() for name, tensor in tensors.items()}
    return tensors | scalars | {"none": numbers[:0].clone(), "transposed": numbers.T.clone()}


def test_tensors_come_back_as_they_were(tmp_path):
    meta = {"rate": 0.1, "text": "Mädchen", "list": [1, None]}
    save_tensors(tmp_path / "file", some_tensors(), meta)
    loaded, told = load_tensors(tmp_path / "file")
    assert told == meta and loaded.keys() == some_tensors().keys()
    for name, tensor in some_tensors().items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].equal(tensor)


def test_the_same_tensors_make_the_same_file(tmp_path):
    """Else a file's SHA-256, which records carry, would say nothing about what is in it."""
    for i in range(8):
        save_tensors(tmp_path / str(i), some_tensors(), {"text": "Mädchen"})
    assert len(set(contents(tmp_path).values())) == 1


def test_any_flipped_bit_is_noticed(tmp_path):
    """50 positions in the header and 50 in the data, a random bit at each."""
    path, luck = tmp_path / "file", random.Random(0)
    save_tensors(path, some_tensors(), {"text": "Mädchen"})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*luck.sample(range(header), 50), *luck.sample(range(header, len(whole)), 50)]
    for at in places:
        path.write_bytes(whole)
        flip(path, at, luck.randrange(8))
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            load_tensors(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("count", "left"), [(2, ["3", "4"]), (0, []), (9, ["0", "1", "2", "3", "4"])]
)
def test_only_the_newest_are_kept(tmp_path, count, left):
    paths = [tmp_path / str(i) for i in range(5)]
    for path in paths:
        path.touch()
    checkpoints.keep_newest(paths, count)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


if __name__ == "__main__":
    serve()
