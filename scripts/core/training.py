"""A run in progress: its model, and all that its next step depends on.

It saves its state, resumes from it to the bit (on another machine: as that one can), and ends if a
number overflows or it is asked to. Which loss is computed, and how fast, is not its business.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from scripts.book.files import write_whole
from scripts.book.records import device_name, sha256
from scripts.ch06_training import EpochReport
from scripts.core.checkpoints import (
    SavedState,
    load_tensors,
    load_weights,
    newest_state,
    restore_training,
    rng_states,
    save_tensors,
    save_training,
    saved_states,
    set_rng_states,
    weights,
)
from scripts.core.data import TrainingData, epoch_examples, epoch_plan
from scripts.core.models import Trained, load_model, save_model
from scripts.core.ranks import ALONE, Ranks
from scripts.core.settings import TrainConfig, known_settings, learning_rate, plain_config
from scripts.core.signals import Stopped, StopSignal
from scripts.core.static import FEW_SHAPES
from scripts.core.steps import Figures, Step, set_rate
from scripts.core.watching import in_figures, write_log

# Of a `Training`, what its state holds as it is.
IN_STATE = (
    *("steps_taken", "epoch", "done", "seconds", "cpu_seconds"),
    *("history", "origin", "resumed_on"),
)
PLACE = ("name", "device", "save_every")  # where a run is: another place makes no other run
SCORING = ("beam", "alpha")  # of a trained model


def identity(config: TrainConfig, ranks: Ranks = ALONE) -> dict[str, Any]:
    """What makes a run this run: the settings that its weights depend on, and the processes."""
    free = (*PLACE, *SCORING)
    settings = {name: value for name, value in asdict(config).items() if name not in free}
    return settings | {"processes": ranks.world}


def differences(
    meta: Mapping[str, Any], config: TrainConfig, ranks: Ranks = ALONE
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run with this state and `config` differ in: in the recipe, and in the machine.

    Each maps a name to the two values, then and now. The machine may also decide the precision, if
    that was `auto` when the run began, and the kind of step as long as the plan is the same.
    """
    then, now, free = known_settings(meta["run"]), identity(config, ranks), {"deterministic"}
    if meta["asked"]["precision"] == "auto":
        free.add("precision")
    if (then["step"] in FEW_SHAPES) == (config.step in FEW_SHAPES):
        free.add("step")
    recipe, machine = {}, {}
    for name in [name for name in now if then[name] != now[name]]:
        (machine if name in free else recipe)[name] = then[name], now[name]
    return recipe, machine


def refuse_another_recipe(state: SavedState, recipe: dict[str, Any]) -> None:
    """Raise ValueError, with all differences, if the state belongs to a run of another recipe."""
    if recipe:
        names = {name: f"--{name}" for name in recipe} | {"processes": "number of processes"}
        pairs = [f"another {names[n]} ({then}, now {now})" for n, (then, now) in recipe.items()]
        what = f"{state.path} belongs to another configuration, with {', '.join(pairs)}"
        ways = "go on with the same options (a finished run also has --from and more --epochs)"
        raise ValueError(f"{what}: {ways}, or start again under another --name")


def over_ranks(report: EpochReport, ranks: Ranks) -> EpochReport:
    """The report over all processes: sums of losses and of tokens. No token counts twice."""
    loss, nll, tokens = ranks.totals(report.loss, report.nll, report.tokens)
    return EpochReport(loss, nll, int(tokens), report.grad_norms)


class Diverged(ValueError):
    """A loss or a gradient was not finite. It changed nothing."""

    def __init__(self, training: "Training", at: int, figures: Figures):
        saved = saved_states(training.folder)
        good = f"the last good state is {saved[-1]}" if saved else "no state had been saved"
        pairs = [i for batch in training.steps[at] for i in batch]
        number = training.steps_taken - training.done + at + 1
        super().__init__(
            f"step {number} (epoch {training.epoch}, step {at + 1} of it, learning rate "
            f"{training.lr_at(number):.3g}): loss {figures.loss}, gradient's norm {figures.norm}, "
            f"on training pairs {pairs[:5]} and {max(0, len(pairs) - 5)} more; {good}. "
            "Try a lower --lr or --clip"
        )


class Training:
    """A run in progress. `take` takes its steps; once in `every` it is asked what they found.

    `resume` goes on from the newest state in `folder`, or from the state that is given: that of a
    run which this one lengthens. `asked` is `config` before the machine decided what was `auto`.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        take: Step,
        ranks: Ranks = ALONE,
        resume: bool | SavedState = False,
        asked: TrainConfig | None = None,
    ):
        self.asked = asdict(asked or config)
        self.config, self.data, self.folder, self.ranks = config, data, folder, ranks
        self.model, self.optimizer, self.take, self.device = model, optimizer, take, take.device
        self.steps_taken = 0  # by the optimizer, in all epochs
        self.history: list[dict[str, float]] = []
        self.epoch, self.done = 1, 0  # the epoch in progress, and its steps that are done
        self.report = EpochReport()  # of the epoch in progress
        # Its time by the wall's clock, and by the processor's, which stops while others use it.
        self.seconds = self.cpu_seconds = 0.0
        self.origin: dict[str, Any] = {}  # the run that this one lengthens
        self.resumed_on: list[dict[str, Any]] = []  # where it went on, not the same to the bit
        self.every = 1 if self.device.type == "cpu" else 50  # on a GPU asking means waiting
        if resume:
            self.restore(newest_state(folder) if resume is True else resume)
        total = sum(len(self.plan(epoch)) for epoch in range(1, config.epochs + 1))
        self.lr_at = learning_rate(config, total)

    @property
    def trained(self) -> Trained:
        """The model as it is now, ready to translate, with plain settings."""
        return Trained(self.model, self.data.tokenizer, plain_config(self.config))

    def plan(self, epoch: int) -> list[list[list[int]]]:
        """The steps of an epoch for all processes."""
        return epoch_plan(self.config, self.data, epoch, self.ranks.world)

    def train_epoch(self, stop: StopSignal | None = None) -> EpochReport:
        """The rest of the current epoch, under a progress bar; `stop` is heeded at each look."""
        self.load()
        self.model.train()
        title = f"epoch {self.epoch}/{self.config.epochs}"
        shown = {"unit": "step", "leave": False, "disable": not self.ranks.first}
        with tqdm(total=len(self.steps), initial=self.done, desc=title, **shown) as bar:
            while self.done < len(self.steps):
                start, cpu = time.perf_counter(), time.process_time()
                self.step()
                over, due = self.done == len(self.steps), self.due()
                looks = over or due or self.done % self.every == 0
                if looks:
                    self.look()
                self.seconds += time.perf_counter() - start
                self.cpu_seconds += time.process_time() - cpu
                if looks:
                    bar.set_postfix(in_figures(self), refresh=False)  # shown with the next update
                bar.update()
                if due and not over:
                    self.save()
                if looks and stop is not None:
                    self.heed(stop)
        return over_ranks(self.report, self.ranks)

    def due(self) -> bool:
        """Whether to save now. On a GPU, where steps are short and states large, it is rare."""
        every = self.config.save_every * self.every
        return bool(every) and self.done % every == 0

    def load(self) -> None:
        """Make the current epoch's plan, and hand this process's share of it to `take`."""
        self.steps = self.plan(self.epoch)
        self.examples = epoch_examples(self.config, self.data, self.epoch)
        # DistributedDataParallel takes the mean over processes; times `world` it is the sum.
        per = [self.labels(step) / self.ranks.world for step in self.steps]
        self.take.load(self.examples, [self.ranks.share(step) for step in self.steps], per)

    def labels(self, step: list[list[int]]) -> int:
        """The target tokens of these batches."""
        return sum(len(self.examples[i].tgt) - 1 for batch in step for i in batch)

    def step(self) -> None:
        """The next optimizer step: this process's share of the batches, divided by all labels."""
        set_rate(self.optimizer, self.lr_at(self.steps_taken + 1))
        self.take(self.done)
        self.done += 1
        self.steps_taken += 1

    def look(self) -> None:
        """Add what the last steps found to the report. Raises Diverged if one wasn't finite."""
        looked = self.take.look()
        for at, figures in enumerate(looked, self.done - len(looked)):
            if not figures.finite:
                raise Diverged(self, at, figures)
            tokens = self.labels(self.ranks.share(self.steps[at]))
            self.report += EpochReport(figures.loss, figures.nll, tokens, [figures.norm])

    def end_epoch(self, row: dict[str, float]) -> None:
        """Log an epoch; keep its model if it is the best so far, and the state in any case."""
        if not self.history:  # no model without a state: a kill between them could not go on
            self.save()
        best = all(standing(row) > standing(earlier) for earlier in self.history)
        self.history.append(row)
        if self.ranks.first:
            if best:
                save_model(self.folder, self.trained)
            if self.config.average:
                path = self.folder / f"epoch-{self.epoch:03d}.safetensors"
                save_tensors(path, weights(self.model), {})
                best_path = best_weights(self.folder, self.history)  # a mean may replace its model
                for old in saved_states(self.folder, "epoch")[: -self.config.average]:
                    if old != best_path:
                        old.unlink(missing_ok=True)
            write_log(self.folder, self.history)
        self.next_epoch()
        self.save()

    def next_epoch(self) -> None:
        """Begin the next epoch's counts."""
        self.epoch, self.done = self.epoch + 1, 0
        self.report = EpochReport()
        self.seconds = self.cpu_seconds = 0.0

    def heed(self, stop: StopSignal) -> None:
        """Save and leave if any process was asked to stop: all of them after the same step."""
        if number := max(self.ranks.gather(stop.number)):
            self.save()
            raise Stopped(number, self.steps_taken)

    def save(self) -> None:
        """Write the state, from which `restore` goes on as if the run had never stopped."""
        self.look()
        reports = self.ranks.gather(asdict(self.report))
        rngs = self.ranks.gather(rng_states(self.device))
        if self.ranks.first:
            meta = {name: getattr(self, name) for name in IN_STATE}
            meta |= {"reports": reports, "run": identity(self.config, self.ranks)}
            meta |= {"asked": self.asked, "device": device_name(self.device)}
            save_training(self.folder, self.steps_taken, self.model, self.optimizer, rngs, meta)

    def restore(self, state: SavedState) -> None:
        """Go on from `state`: of this run or, if it is in another folder, of one to lengthen.

        Says so if another machine makes the rest differ in bits. Raises ValueError, which names all
        differences, if that was another run.
        """
        for complaint in state.complaints:
            tqdm.write(f"{complaint}: going on from {state.path.name} instead")
        meta, before = state.meta, state.path.parent
        recipe, machine = differences(meta, self.config, self.ranks)
        lengthens = before != self.folder
        if lengthens:
            epochs, _ = recipe.pop("epochs", (self.config.epochs, 0))
            if meta["epoch"] <= epochs:
                raise ValueError(f"{before} isn't finished: first go on there with --resume")
            if self.config.epochs <= epochs:
                raise ValueError(f"{before} has {epochs} epochs: give more by --epochs")
        refuse_another_recipe(state, recipe)
        rngs = restore_training(state.tensors, state.path, self.model, self.optimizer)
        luck = random.Random(f"{self.config.seed}:{meta['steps_taken']}:{self.ranks.rank}")
        set_rng_states(rngs[self.ranks.rank], self.device, otherwise=luck.getrandbits(63))
        for name in IN_STATE:
            setattr(self, name, meta[name])
        if lengthens:
            digest = sha256(before / "model.safetensors")
            self.origin = {"run": before.name, "epochs": epochs, "weights_sha256": digest}
        self.asked["precision"] = meta["asked"]["precision"]
        self.report = EpochReport(**meta["reports"][self.ranks.rank])
        here = device_name(self.device)
        if meta["device"] != here:
            machine["device"] = meta["device"], here
        if machine and self.epoch <= self.config.epochs:  # else no step is left
            self.resumed_on.append({"step": self.steps_taken, "device": here, "changes": machine})
            changes = [f"{name} {then}, now {now}" for name, (then, now) in machine.items()]
            if self.ranks.first:
                tqdm.write(f"from here on not the same to the bit: {'; '.join(changes)}")

    def take_over(self, folder: Path) -> None:
        """Bring what a longer run needs beside its state: the best model, the weights to average.

        The model comes last: a run that has a state and no model takes over again.
        """
        if self.ranks.first:
            for path in saved_states(folder, "epoch"):
                write_whole(self.folder / path.name, path.read_bytes())
        self.save()
        if self.ranks.first:
            with torch.random.fork_rng(devices=[]):  # a new model draws its weights
                model = load_model(folder).model
            best = best_weights(folder, self.history)
            if best.is_file():  # the model in `folder` may be a mean
                load_weights(model, load_tensors(best)[0], best)
            save_model(self.folder, replace(self.trained, model=model))


def standing(row: dict[str, float]) -> tuple[float, float]:
    """What an epoch is judged by: validation BLEU, and the loss where that is equal (often 0)."""
    return row["val_bleu"], -row["val_ppl"]


def best_weights(folder: Path, history: list[dict[str, float]]) -> Path:
    """Where `folder` has the weights of the best epoch, if they are to be averaged."""
    standings = [*map(standing, history)]
    return folder / f"epoch-{1 + standings.index(max(standings)):03d}.safetensors"


def refuse_to_replace(folder: Path) -> None:
    """Raise ValueError, which names the ways on, if `folder` holds anything that was trained."""
    if saved_states(folder) or (folder / "model.safetensors").is_file():
        ways = "go on with --resume, lengthen what is finished by --from, choose another --name"
        raise ValueError(f"{folder} holds a run or a model: {ways}, or replace it by --overwrite")


def start_anew(folder: Path) -> None:
    """Clear away a run's states, and what is said of its model; that stays until there is a new."""
    for path in (*saved_states(folder), *saved_states(folder, "epoch")):
        path.unlink()
    for name in ("record.json", "README.md", "log.csv"):
        (folder / name).unlink(missing_ok=True)
