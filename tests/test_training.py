"""A run that is stopped, killed, torn, choked or poisoned ends as if nothing had happened.

"The same" means bit for bit, timings aside.
"""

import hashlib
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from conftest import ROOT
from tiny import RUN, few_pairs

from scripts.book.records import load_record, sha256
from scripts.core import checkpoints
from scripts.core.cards import model_card
from scripts.core.checkpoints import load_tensors, newest_state, save_tensors, saved_states
from scripts.core.data import TrainingData, epoch_plan
from scripts.core.models import STORED_DTYPE, load_model, save_model
from scripts.core.signals import Stopped, StopSignal
from scripts.core.steps import Step
from scripts.core.training import Diverged, differences, identity
from scripts.fast import losses
from scripts.fast import run as fast_run
from scripts.fast.losses import resolved
from scripts.fast.run import average_if_better, fit, trained_to_end, training_of

CLOCKS = ["seconds", "cpu_seconds"]
# What processes of their own are given.
OWN = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}


def contents(folder: Path) -> dict[str, str]:
    """Every file below `folder` and its SHA-256."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def steps_saved(folder: Path) -> int:
    """The steps of the newest state, 0 if there is none."""
    return max((int(path.stem.removeprefix("state-")) for path in saved_states(folder)), default=0)


def outcome(folder: Path) -> dict[str, Any]:
    """What a finished run must have in common with another: tensors, files, history, all but time.

    A command adds a record and a card, which are dated.
    """
    path, tensors, meta, _ = newest_state(folder)
    for row in meta["history"]:
        for clock in CLOCKS:
            del row[clock]
    parts = {name: digest for name, digest in contents(folder).items() if "epoch-" in name}
    parts["log"] = pd.read_csv(folder / "log.csv").drop(columns=CLOCKS).to_dict("records")
    parts["model"] = sha256(folder / "model.safetensors")
    for name, tensor in tensors.items():
        parts[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    return parts | {"newest": path.name, "meta": meta}


class PowerCut(BaseException):
    """Nothing below catches it: what is on the disk then is what a killed process leaves."""


def cut_after(steps: int, run: Callable[[], Any]) -> None:
    """`run`, until the power fails after that many steps."""
    remaining, whole = iter(range(steps)), Step.run

    def step(*args: Any) -> Any:
        if next(remaining, None) is None:
            raise PowerCut
        return whole(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(Step, "run", step)
        run()


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return few_pairs()


@pytest.fixture(scope="module")
def per_epoch(data) -> int:
    """Steps in the first epoch."""
    return len(epoch_plan(RUN, data, 1))


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory) -> dict[str, Any]:
    """The outcome of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    fit(RUN, data, folder)
    return outcome(folder)


def test_an_epoch_counts_each_real_label_once(data, straight):
    labels = sum(len(example.tgt) - 1 for example in data.train)
    assert [row["tokens"] for row in straight["log"]] == [labels] * len(straight["log"])


@pytest.fixture(scope="module")
def halfway(data, per_epoch, tmp_path_factory) -> Path:
    """A run that broke off in its second epoch; to be copied."""
    folder = tmp_path_factory.mktemp("halfway") / "run"
    cut_after(per_epoch + 7, lambda: fit(RUN, data, folder))
    return folder


@pytest.fixture
def broken(halfway, tmp_path) -> Path:
    """A copy of `halfway` for one test."""
    return shutil.copytree(halfway, tmp_path / "run")


# Killed.


def test_killed_in_any_write(data, straight, tmp_path):
    """The nth process dies in its nth write, half-way or right after; the last one gets through."""
    rename, folder = os.replace, tmp_path / "run"
    torn: set[str] = set()
    for number in itertools.count(1):
        writes = itertools.count(1)

        def fatal(partial: Path, path: Path, number: int = number, writes: Any = writes) -> None:
            dies = next(writes) == number
            if dies and number % 2:
                os.truncate(partial, partial.stat().st_size // 2)
                torn.add(path.name.partition("-")[0])
                raise PowerCut
            rename(partial, path)
            if dies:
                raise PowerCut

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", fatal)
            try:
                fit(RUN, data, folder, resume=bool(saved_states(folder)), overwrite=True)
                break
            except PowerCut:
                continue
    assert number > 4 and len(torn) > 1
    assert outcome(folder) == straight


DRIVER = """
import sys, time
from tiny import RUN, few_pairs
from scripts import train
from scripts.core.settings import PRESETS
from scripts.core.training import Training
from scripts.fast import run

pause, step, data = float(sys.argv.pop(1)), Training.step, few_pairs()
run.prepare, PRESETS["sample"] = lambda *given: data, RUN

def slowly(*args):  # so that a signal comes while it works
    time.sleep(pause)
    step(*args)

Training.step = slowly
raise SystemExit(train.main())
"""


def started(home: Path, *options: str, pause: float = 0.0, launch: Any = ()) -> subprocess.Popen:
    """The command as a process of its own, or under `launch`, with its runs in `home`."""
    driver = home / "driver.py"
    driver.write_text(DRIVER)
    return subprocess.Popen(
        [sys.executable, *launch, driver, str(pause), "--preset", "sample", *options],
        env=os.environ | OWN | {"SERIES_RUNS": str(home)},
        **dict.fromkeys(("stdout", "stderr"), subprocess.PIPE),
        encoding="utf-8",
    )


def until(condition: Callable[[], Any], process: subprocess.Popen) -> None:
    """Wait until `condition` holds, or the process has ended."""
    deadline = time.monotonic() + 240
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.mark.audit
def test_ten_kills_in_a_row_change_nothing(straight, tmp_path):
    """kill -9 at random moments: ten processes die, the eleventh ends where one alone would."""
    luck, folder = random.Random(8), tmp_path / "run"
    for _ in range(10):
        saved, more = steps_saved(folder), luck.choice((0, 1, 1, 2))
        process = started(tmp_path, "--save_every", "1", *["--resume"] * bool(saved), pause=0.05)
        until(lambda goal=saved + more: steps_saved(folder) >= max(1, goal), process)
        time.sleep(luck.uniform(0.0, 0.1))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = started(tmp_path, "--resume")
    assert "BLEU" in process.communicate()[0] and process.returncode == 0
    assert outcome(folder) == straight


# Asked to stop.


@pytest.mark.parametrize("moment", ["first step", "epoch's last", "run's last", "validation"])
def test_stopping_at_any_moment_changes_nothing(
    data, straight, per_epoch, tmp_path, monkeypatch, moment
):
    """The signal comes within that step, or while the first epoch is validated."""
    last = straight["meta"]["steps_taken"]
    at = {"epoch's last": per_epoch, "run's last": last}.get(moment, 1)  # which call is hit
    place, name = (fast_run, "validate") if moment == "validation" else (Step, "run")
    calls, whole = itertools.count(1), getattr(place, name)

    def signalled(*args: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*args)

    monkeypatch.setattr(place, name, signalled)
    steps = per_epoch if moment == "validation" else at
    with pytest.raises(Stopped, match=f"SIGTERM after step {steps}, and saved"):
        fit(RUN, data, tmp_path)
    assert steps_saved(tmp_path) == steps
    fit(RUN, data, tmp_path, resume=True)
    assert outcome(tmp_path) == straight


def test_a_second_signal_acts_at_once():
    """One Ctrl-C waits for the step to end, two don't; afterwards the handlers are as before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.number == signal.SIGINT
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


RECIPES = {
    "muon, pieces": {"optimizer": "muon", "bpe_dropout": 0.1},
    "accumulated R-Drop": {"accumulate": 2, "max_tokens": 256, "r_drop": 1.0},
    "static": {"step": "static", "dropout": 0.2},
}


@pytest.mark.parametrize("changes", RECIPES.values(), ids=RECIPES)
def test_every_recipe_resumes_exactly(data, tmp_path, changes, monkeypatch):
    """Whatever an ingredient remembers from step to step is in the state; no step is repeated."""
    config = replace(RUN, epochs=1, save_every=3, **changes)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(config, data, whole)
    cut_after(5, lambda: fit(config, data, cut))
    assert steps_saved(cut) == 3
    steps, take = itertools.count(), Step.run
    monkeypatch.setattr(Step, "run", lambda *args: (next(steps), take(*args))[1])
    fit(config, data, cut, resume=True)
    assert next(steps) == steps_saved(whole) - 3
    assert outcome(cut) == outcome(whole)


@pytest.mark.parametrize("field", [field.name for field in fields(RUN)])
def test_a_resume_refuses_every_other_recipe(field):
    """Except in where it runs, and what scores it; how steps are computed is told, not refused."""
    value = getattr(RUN, field)
    other = not value if isinstance(value, bool) else 1 if value == 0 else value * 2
    other = "en-de" if field == "languages" else other
    recipe, machine = differences(
        {"run": identity(RUN), "asked": asdict(RUN)}, replace(RUN, **{field: other})
    )
    if field in ("name", "device", "save_every", "beam", "alpha"):
        assert not recipe and not machine
    elif field in ("deterministic", "step"):
        assert not recipe and machine == {field: (value, other)}
    else:
        assert recipe == {field: (value, other)} and not machine


# Gone on elsewhere.


def test_a_gpus_run_goes_on_without_one(data, tmp_path, monkeypatch, capsys):
    """It keeps its plan, takes the precision that there is, and says so; its card does, too."""
    monkeypatch.setattr(losses, "multiplies_bf16", lambda device: False)
    auto = replace(RUN, epochs=1, optimizer="muon", step="auto", precision="auto")
    cut_after(9, lambda: fit(replace(auto, step="static"), data, tmp_path))
    path, tensors, meta, _ = newest_state(tmp_path)
    meta["run"] |= {"step": "graphed", "precision": "bf16"}
    meta |= {"asked": asdict(auto), "device": "NVIDIA H200"}
    save_tensors(path, tensors | {"rng.0.cuda": torch.zeros(16, dtype=torch.uint8)}, meta)
    training = trained_to_end(auto, data, tmp_path, resume=True)
    assert (training.config.step, training.config.precision) == ("static", "float32")
    assert training.steps_taken == len(epoch_plan(training.config, data, 1))
    (where,) = training.resumed_on
    assert where["step"] == 8 and {*where["changes"]} == {"step", "precision", "device"}
    assert "not the same to the bit: precision bf16, now float32" in capsys.readouterr().out
    record = load_record("sample-de-en") | {"resumed_on": training.resumed_on}
    assert "After step 8 it went on elsewhere: precision bf16, then" in model_card(record)


def test_a_cpus_run_goes_on_with_a_gpu(monkeypatch):
    """A plan of any shapes stays, one of few is recorded if the GPU can; and dropout is seeded."""
    gpu, auto = torch.device("cuda"), replace(RUN, precision="auto")
    monkeypatch.setattr(losses, "multiplies_bf16", lambda device: True)
    for before, after in {"eager": "eager", "static": "graphed", "graphed": "graphed"}.items():
        config = resolved(auto, gpu, before=before)
        assert (config.step, config.precision) == (after, "bf16")
        meta = {"run": identity(replace(RUN, step=before)), "asked": asdict(auto)}
        recipe, machine = differences(meta, config)
        assert not recipe and machine.keys() == {"precision", *["step"] * (before != after)}
    monkeypatch.setattr(torch.cuda, "manual_seed", seed := Mock())
    checkpoints.set_rng_states({"cpu": torch.get_rng_state()}, gpu, otherwise=7)
    seed.assert_called_once_with(7)


# Torn.


def truncate(path: Path) -> None:
    """Damage a state as an interrupted copy would: `test_core_files` has more ways."""
    os.truncate(path, 2 * path.stat().st_size // 3)


def test_a_torn_state_gives_way_to_the_one_before(data, broken, straight, capsys):
    """Resuming says which file is no good, goes on from the other, and ends the same way."""
    before, newest = saved_states(broken)
    truncate(newest)
    fit(RUN, data, broken, resume=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "going on" in line]
    assert newest.name in line and f"going on from {before.name}" in line
    assert outcome(broken) == straight


def test_without_a_good_state_resuming_is_refused_in_one_line(data, broken, tmp_path):
    for path in saved_states(broken):
        truncate(path)
    before = contents(broken)
    with pytest.raises(ValueError, match="no good checkpoint") as caught:
        fit(RUN, data, broken, resume=True)
    assert "\n" not in str(caught.value) and contents(broken) == before
    assert all(path.name in str(caught.value) for path in saved_states(broken))
    with pytest.raises(FileNotFoundError, match="run without --resume first"):
        fit(RUN, data, tmp_path / "empty", resume=True)


# Poisoned.


def endless_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The loss is a number, but its gradient isn't."""
    loss.register_hook(lambda gradient: gradient * math.inf)
    return loss


@pytest.mark.parametrize("poison", [lambda loss: loss * math.nan, endless_gradient])
def test_what_is_not_a_number_never_reaches_the_weights(
    data, straight, per_epoch, tmp_path, monkeypatch, poison
):
    """The run ends before the step changes anything: in memory, on disk, or for a resumed run."""
    at, calls, before, fast_loss = per_epoch + 6, itertools.count(1), {}, losses.fast_loss

    def poisoned(model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        loss, nll = fast_loss(model, *args, **options)
        if not (model.training and next(calls) == at):
            return loss, nll
        weights = [p.detach().clone() for p in model.parameters()]
        before.update(model=model, weights=weights, disk=contents(tmp_path))
        return poison(loss), nll

    with monkeypatch.context() as patch, pytest.raises(Diverged) as caught:
        patch.setattr(losses, "fast_loss", poisoned)
        fit(RUN, data, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"step {at} (epoch 2, step 6 of it, ") and "\n" not in message
    assert f"on training pairs {epoch_plan(RUN, data, 2)[5][0][:5]}" in message
    assert str(tmp_path / f"state-{per_epoch + 4:08d}.safetensors") in message
    assert all(map(torch.equal, before["model"].parameters(), before["weights"]))
    assert contents(tmp_path) == before["disk"] and "model.safetensors" in before["disk"]
    fit(RUN, data, tmp_path, resume=True)
    assert outcome(tmp_path) == straight


def test_a_look_now_and_then_finds_what_a_look_each_step_does(data, tmp_path):
    """As on a GPU: the same report, and the step that went wrong. States are rarer there."""
    reports = []
    for every, saved in ((1, 8), (3, 0)):
        training = training_of(replace(RUN, clip=0.5, smoothing=0.2), data, tmp_path)
        training.every = every
        reports.append(training.train_epoch())
        assert steps_saved(tmp_path) == saved  # each 4 or 12 steps
        for path in saved_states(tmp_path):
            path.unlink()
    assert reports[0] == reports[1] and len(reports[0].grad_norms) == training.done
    assert (training.take.clip, training.take.criterion.smoothing) == (0.5, 0.2)
    honest, calls, before = training.take.loss_of, itertools.count(1), training.steps_taken

    def poisoned(*args: Any) -> Any:
        loss, nll = honest(*args)
        return (loss * math.nan if next(calls) == 2 else loss), nll

    training.epoch, training.done, training.take.loss_of = 2, 0, poisoned
    with pytest.raises(Diverged, match=rf"^step {before + 2} \(epoch 2, step 2 of it"):
        training.train_epoch()
    training.take.pending.append(torch.full((3,), math.nan))
    with pytest.raises(Diverged):
        training.save()  # nothing that went wrong is ever saved
    assert next(calls) == 4 and not saved_states(tmp_path)


# Begun again, and kept.


def test_a_run_is_replaced_only_if_asked(data, broken, straight):
    """Nor does a mistake in the options delete anything. Resuming a finished run does nothing."""
    before = contents(broken)
    with pytest.raises(ValueError, match="go on with --resume"):
        fit(RUN, data, broken)
    with pytest.raises(ValueError, match="no device"):
        fit(replace(RUN, device="toaster"), data, broken, overwrite=True)
    assert contents(broken) == before
    for name in ("epoch-003.safetensors", checkpoints.STATE.format(99)):  # of a longer run
        (broken / name).touch()
    for way in ({"overwrite": True}, {"resume": True}):
        fit(RUN, data, broken, **way)
        assert outcome(broken) == straight


@pytest.mark.parametrize(
    ("bleus", "mean_bleu"), [((1.0, 3.0, 2.0), 4.0), ((1.0, 3.0, 2.0), 2.5), ((3.0, 1.0, 2.0), 2.5)]
)
def test_what_a_run_keeps(data, tmp_path, monkeypatch, bleus, mean_bleu):
    """The last two states, weights of the last and best epochs, a readable log; and as its model
    the better of best epoch and mean, by validation BLEU, which is made up here."""
    few, config = replace(data, train=data.train[:60]), replace(RUN, epochs=3, save_every=2)
    scores, figures = iter([*bleus, mean_bleu]), {"val_loss": 1.0, "val_ppl": 1.0}
    monkeypatch.setattr(fast_run, "validate", lambda *_: figures | {"val_bleu": next(scores)})
    history = fit(config, few, tmp_path)
    best = 1 + bleus.index(3.0)
    epochs = {f"epoch-00{number}.safetensors" for number in {best, 2, 3}}
    states = {path.name for path in saved_states(tmp_path)}
    model = {"model.safetensors", "tokenizer.model", "config.json"}
    assert contents(tmp_path).keys() == model | epochs | states | {"log.csv"}
    lengths = [len(epoch_plan(config, few, epoch)) for epoch in (1, 2, 3)]
    within = (lengths[2] - 1) // config.save_every * config.save_every
    steps = (sum(lengths[:2]) + within, sum(lengths))
    assert states == {checkpoints.STATE.format(number) for number in steps}
    assert pd.read_csv(tmp_path / "log.csv").to_dict("records") == history

    def weights_of(epoch: int) -> dict[str, torch.Tensor]:
        return load_tensors(tmp_path / f"epoch-00{epoch}.safetensors")[0]

    stored = load_tensors(tmp_path / "model.safetensors")[0]
    for name, tensor in weights_of(best).items():
        assert stored[name].equal(tensor.to(STORED_DTYPE))
    if mean_bleu < 3:  # another machine had found a mean better, and stored it
        other = load_model(tmp_path)
        torch.nn.init.zeros_(next(other.model.parameters()))
        save_model(tmp_path, other)
    chosen = average_if_better(config, few, tmp_path, history)
    assert chosen == {"best epoch": 3.0, "mean of the last 2": mean_bleu}
    candidates = [weights_of(best)] if mean_bleu < 3 else [weights_of(2), weights_of(3)]
    for name, tensor in load_tensors(tmp_path / "model.safetensors")[0].items():
        expected = torch.stack([weights[name] for weights in candidates]).mean(dim=0)
        torch.testing.assert_close(tensor, expected.to(STORED_DTYPE), rtol=2e-3, atol=1e-5)
