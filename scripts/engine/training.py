"""A run in progress: its model, and all that its next step depends on.

It saves its state, resumes from it to the bit, and ends if a number overflows or it is asked to.
Which loss is computed, and how fast, is not its business.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from scripts.ch06_training import EpochReport
from scripts.engine.checkpoints import (
    keep_newest,
    newest_state,
    restore_training,
    rng_states,
    save_tensors,
    save_training,
    saved_states,
    set_rng_states,
    weights,
)
from scripts.engine.data import TrainingData, epoch_examples, epoch_plan
from scripts.engine.models import Trained, save_model
from scripts.engine.ranks import ALONE, Poll, Ranks
from scripts.engine.settings import TrainConfig, learning_rate, plain_config
from scripts.engine.signals import Stopped, StopSignal
from scripts.engine.steps import Figures, Step, set_rate
from scripts.engine.watching import in_figures, write_log

# In a state, as they are.
KEPT = ("steps_taken", "epoch", "done", "seconds", "cpu_seconds", "history")


def identity(config: TrainConfig, ranks: Ranks = ALONE) -> dict[str, Any]:
    """A run's identity: all settings except where it runs and what it writes and reports."""
    free = ("device", "name", "publish", "tracker", "save_every", "beam", "alpha")
    kept = {name: value for name, value in asdict(config).items() if name not in free}
    return kept | {"processes": ranks.world}


def over_ranks(report: EpochReport, ranks: Ranks) -> EpochReport:
    """The report over all processes: sums of losses and of tokens. No token counts twice."""
    loss, nll, tokens = ranks.totals(report.loss, report.nll, report.tokens)
    return EpochReport(loss, nll, int(tokens), report.grad_norms)


class Diverged(ValueError):
    """A loss or a gradient was not finite. It changed nothing."""

    def __init__(self, training: "Training", at: int, found: Figures):
        saved = saved_states(training.folder)
        good = f"the last good state is {saved[-1]}" if saved else "no state had been saved"
        pairs = [i for batch in training.steps[at] for i in batch]
        number = training.steps_taken - training.done + at + 1
        super().__init__(
            f"step {number} (epoch {training.epoch}, step {at + 1} of it, learning rate "
            f"{training.lr_at(number):.3g}): loss {found.loss}, gradient's norm {found.norm}, on "
            f"training pairs {pairs[:5]} and {max(0, len(pairs) - 5)} more; {good}. "
            "Try a lower --lr or --clip"
        )


class Training:
    """A run in progress. `take` takes its steps; once in `every` it is asked what they found."""

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        take: Step,
        ranks: Ranks = ALONE,
        resume: bool = False,
    ):
        self.config, self.data, self.folder, self.ranks = config, data, folder, ranks
        self.model, self.optimizer, self.take, self.device = model, optimizer, take, take.device
        self.steps_taken = 0  # by the optimizer, in all epochs
        self.history: list[dict[str, float]] = []
        self.epoch, self.done = 1, 0  # the epoch in progress, and its steps that are done
        self.report = EpochReport()  # of the epoch in progress, and its time by two clocks
        self.seconds = self.cpu_seconds = 0.0
        self.every = 1 if self.device.type == "cpu" else 50  # on a GPU asking means waiting
        self.saved = time.monotonic()  # when the last state was written
        self.poll = Poll(ranks)
        if resume:
            self.restore()
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
        """The rest of the current epoch, under a progress bar; `stop` is heeded after each step."""
        self.load()
        self.model.train()
        title = f"epoch {self.epoch}/{self.config.epochs}"
        how = {"unit": "step", "leave": False, "disable": not self.ranks.first}
        with tqdm(total=len(self.steps), initial=self.done, desc=title, **how) as bar:
            while self.done < len(self.steps):
                start, cpu = time.perf_counter(), time.process_time()
                self.step()
                over, due = self.done == len(self.steps), self.due()
                looks = self.done % self.every == 0 or due or over
                if looks:
                    self.look()
                self.seconds += time.perf_counter() - start
                self.cpu_seconds += time.process_time() - cpu  # a pause doesn't count here
                if looks:
                    bar.set_postfix(in_figures(self), refresh=False)  # shown with the next update
                bar.update()
                if due and not over:
                    self.save()
                if stop is not None:
                    self.heed(stop)
        return over_ranks(self.report, self.ranks)

    def due(self) -> bool:
        """Whether to save now. On a GPU steps are short and states large: at most every 30 s."""
        clocked = self.device.type != "cpu" and self.ranks.world == 1  # several clocks may disagree
        short = clocked and time.monotonic() - self.saved < 30
        return self.done % self.config.save_every == 0 and not short

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
        found = self.take.look()
        for at, figures in enumerate(found, self.done - len(found)):
            if not figures.finite:
                raise Diverged(self, at, figures)
            tokens = self.labels(self.ranks.share(self.steps[at]))
            self.report += EpochReport(figures.loss, figures.nll, tokens, [figures.norm])

    def end_epoch(self, row: dict[str, float]) -> None:
        """Log an epoch; keep its model if it is the best so far, and the state in any case."""
        best = all(row["val_bleu"] > earlier["val_bleu"] for earlier in self.history)
        self.history.append(row)
        if self.ranks.first:
            if best:
                save_model(self.folder, self.trained)
            if self.config.average:
                path = self.folder / f"epoch-{self.epoch:03d}.safetensors"
                save_tensors(path, weights(self.model), {})
                keep_newest(saved_states(self.folder, "epoch"), self.config.average)
            write_log(self.folder, self.history)
        self.epoch, self.done = self.epoch + 1, 0
        self.report = EpochReport()
        self.seconds = self.cpu_seconds = 0.0
        self.save()

    def heed(self, stop: StopSignal) -> None:
        """Save and leave if asked to stop: all processes after the same step."""
        if asked := self.poll(stop.number):
            self.save()
            raise Stopped(asked, self.steps_taken)

    def save(self) -> None:
        """Write the state, from which `restore` goes on as if the run had never stopped."""
        self.look()
        reports = self.ranks.gather(asdict(self.report))
        rngs = self.ranks.gather(rng_states(self.device))
        if self.ranks.first:
            meta = {name: getattr(self, name) for name in KEPT}
            meta |= {"reports": reports, "run": identity(self.config, self.ranks)}
            save_training(self.folder, self.steps_taken, self.model, self.optimizer, rngs, meta)
        self.saved = time.monotonic()

    def restore(self) -> None:
        """Go back to the newest good state. Raises ValueError if that was another run."""
        path, tensors, meta, complaints = newest_state(self.folder)
        for complaint in complaints:
            tqdm.write(f"{complaint}: going on from {path.name} instead")
        for name, value in identity(self.config, self.ranks).items():
            if (then := meta["run"].get(name, value)) != value:  # older states don't name all
                what = "number of processes" if name == "processes" else f"--{name}"
                raise ValueError(
                    f"{path} belongs to another configuration, with another {what} ({then}): "
                    "resume with the same options, or start again under another --name"
                )
        rngs = restore_training(tensors, path, self.model, self.optimizer)
        set_rng_states(rngs[self.ranks.rank], self.device)
        for name in KEPT:
            setattr(self, name, meta[name])
        self.report = EpochReport(**meta["reports"][self.ranks.rank])


def start_anew(folder: Path) -> None:
    """Clear away a finished run's states. Raises ValueError if a run waits to be resumed."""
    try:
        meta = newest_state(folder).meta
        waits = meta["epoch"] <= meta["run"]["epochs"]
    except (FileNotFoundError, KeyError, ValueError):
        waits = False  # nothing that could be resumed
    if waits:
        raise ValueError(
            f"{folder} holds a run that stopped after step {meta['steps_taken']}: "
            "go on with --resume, or choose another --name"
        )
    for path in (*saved_states(folder), *saved_states(folder, "epoch")):
        path.unlink()
