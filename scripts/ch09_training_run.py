# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 9 · The training run
#
# After this chapter you have written a trainer that can be killed at any moment, and you can say what makes a run worth trusting.
#
# | | |
# |---|---|
# | In the paper | §5 (training), §6.1 (averaged checkpoints) |
# | Time | 20 minutes to read, 60 with the code; a minute to run on a CPU |
# | Before, after | [Chapter 8 · Decoding](ch08_decoding.ipynb) · [Chapter 10 · Judging](ch10_judging.ipynb) |
#
# *If you read only three cells:* the class `Resumable`, the kill in *Killed in the middle*, the table of *What if it forgets?*

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import functools
import hashlib
import json
import os
import random
import subprocess  # noqa: F811 (the first cell is no part of the chapter)
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import patch

import pandas as pd
import safetensors.torch
import torch
from torch import Tensor, nn

from scripts import ROOT, runs_folder
from scripts.book.exercises import check, outcome
from scripts.book.figures import training as figures
from scripts.book.records import load_record
from scripts.ch06_training import Batch, EpochReport, LabelSmoothing, batch_loss, train_step
from scripts.ch07_multi30k import token_batches
from scripts.ch08_decoding import plain_translate
from scripts.core.checkpoints import load_tensors, save_tensors
from scripts.core.data import TrainingData, batches_of, prepare
from scripts.core.models import Trained, load_model, save_model
from scripts.core.scores import corpus_bleu
from scripts.core.settings import PRESETS, TrainConfig, build_model, learning_rate, pick_device

# %% [markdown]
# ## A translator is born
#
# > **In short.** The model goes 18 times through 29,000 captions, and noise becomes a translator.
#
# We trained chapter 0's translator, *the shipped model*, again, and kept each epoch's weights. The settings are the preset `small`: 3 + 3 layers, width 256, 7.6 million weights. BLEU scores translations from 0 to 100, by how many of their sequences of one to four words the references also have, and by their length ([chapter 10](ch10_judging.ipynb)). **Predict.** On one thread of a CPU its steps took 28 minutes. After how many did it have half of its final BLEU?

# %%
record, epochs_record = load_record("multi30k-de-en"), load_record("epochs-multi30k")
history = figures.epochs_table(epochs_record, shipped=record)
roof = epochs_record["captions"][4]
history["translation"] = roof["after"].values()
print(roof["source"], roof["reference"], sep="\n")
history.loc[[1, 2, 4, 8, 18], ["minutes", "BLEU", "translation"]].round(1)

# %%
assert history.BLEU[2] > history.BLEU[18] / 2 and history.BLEU.diff().idxmin() == 11
assert (history.loc[11] < history.loc[10])[["training loss", "validation loss"]].all()
figures.history_chart(history, "Half the BLEU comes in two epochs; in epoch 11 it falls", case=11)

# %% [markdown]
# The run had half after three minutes. (The training loss is higher at first, as a mean over a whole epoch, with dropout.)
#
# ## The run
#
# > **In short.** A run joins what earlier chapters made: the model (4), the training step (6), batches (7) and search (8). And it counts how far it has come.
#
# With a GPU this notebook trains such a model. Without one it trains a toy without dropout, on 1,200 captions of the *sample corpus*, which [chapter 7](ch07_multi30k.ipynb)'s rules make. Stored outputs are the toy's.

# %%
gpu = torch.cuda.is_available()
torch.set_default_dtype(torch.float32 if gpu else torch.float64)  # checks ask for many digits
ONE_LAYER = replace(PRESETS["sample"], layers=1, heads=2, vocab=900, max_tokens=256, device="cpu")
TINY_RUN = replace(
    ONE_LAYER, d_model=32, d_ff=64, dropout=0.1, epochs=2, warmup=10, lr=5e-3, save_every=2
)
TOY = replace(ONE_LAYER, d_model=64, d_ff=128, epochs=6, warmup=50, lr=7e-3)


@functools.cache
def sample_pairs(count: int = 300, held_out: int = 4) -> TrainingData:
    """The sample corpus's first `count` training pairs, and `held_out` of each other split."""
    data = prepare(TINY_RUN)
    corpus = {split: pairs[:held_out] for split, pairs in data.corpus.items()}
    return TrainingData(corpus, data.tokenizer, data.train[:count], data.val[:held_out])


config = PRESETS["small"] if gpu else TOY
data = prepare(config) if gpu else sample_pairs(1200, held_out=60)

# %% [markdown]
# After each epoch we look at captions that the run doesn't train on. The loss scores each next word, given the reference so far; BLEU scores whole sentences that the model wrote itself. `val_ppl` is the exponential of the loss without smoothing.


# %%
def validate(
    trained: Trained,
    data: TrainingData,
    loss_of: Callable[..., tuple[Tensor, Tensor]] = batch_loss,  # the engine has faster ones
    translate: Callable[[Trained, Sequence[str]], list[str]] = plain_translate,
) -> dict[str, float]:
    """Smoothed loss and plain perplexity, given the references, and greedy BLEU: on validation."""
    plan = token_batches(data.val, trained.config.max_tokens)
    criterion, total = LabelSmoothing(trained.config.smoothing), EpochReport()
    trained.model.eval()
    with torch.no_grad():
        for batch in batches_of(data.val, plan, trained.device):
            loss, nll = loss_of(trained.model, batch, criterion)
            total += EpochReport(loss.item(), nll.item(), batch.ntokens)
    sources, references = zip(*data.corpus["val"], strict=True)
    bleu = corpus_bleu(translate(trained, sources), references).score
    return {"val_loss": total.loss_per_token, "val_ppl": total.perplexity, "val_bleu": bleu}


# %%
class Run:
    """A training in progress: the model, and how far it has come."""

    def __init__(self, config: TrainConfig, data: TrainingData):
        torch.manual_seed(config.seed)
        self.config, self.data, self.device = config, data, pick_device(config.device)
        self.model = build_model(config, len(data.tokenizer)).to(self.device)
        self.trained = Trained(self.model, data.tokenizer, config)  # it translates
        self.criterion = LabelSmoothing(config.smoothing)
        adam = {"betas": (0.9, 0.98), "eps": 1e-9, "fused": True}
        self.optimizer = torch.optim.Adam(self.model.parameters(), **adam)
        self.epoch, self.done, self.steps_taken = 1, 0, 0  # `done` counts this epoch's steps
        self.report, self.history = EpochReport(), []  # this epoch's sums; a row for each before
        total_steps = sum(len(self.plan(epoch)) for epoch in range(1, config.epochs + 1))
        self.rate = learning_rate(config, total_steps)  # of step 1, 2, …

    def plan(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, as indices of training pairs."""
        rng = random.Random(f"{self.config.seed}:{epoch}")
        return token_batches(self.data.train, self.config.max_tokens, rng)

    def step(self, batch: Batch) -> None:
        """One optimizer step."""
        optimizer, clip = self.optimizer, self.config.clip
        optimizer.param_groups[0]["lr"] = self.rate(self.steps_taken + 1)
        self.report += train_step(self.model, [batch], self.criterion, optimizer, clip)
        self.done, self.steps_taken = self.done + 1, self.steps_taken + 1

    def train_epoch(self, until: int | None = None) -> None:
        """The steps of the epoch in progress that are left, or those up to step `until`."""
        self.model.train()
        plan = self.plan(self.epoch)[self.done : until]
        for batch in batches_of(self.data.train, plan, self.device):
            self.step(batch)

    def end_epoch(self) -> None:
        """Validate, and go on to the next epoch."""
        row = {"epoch": self.epoch, "train_loss": self.report.loss_per_token}
        self.history.append(row | validate(self.trained, self.data))
        self.epoch, self.done, self.report = self.epoch + 1, 0, EpochReport()

    def fit(self) -> None:
        """All epochs that are left."""
        while self.epoch <= self.config.epochs:
            self.train_epoch()
            self.end_epoch()


# %% [markdown]
# ## Files that lie
#
# > **In short.** A file may be cut short, or change on the disk. Write it whole or not at all, with a checksum.
#
# A *safetensors* file holds names and shapes, then bare numbers. We save weights of 0.02 in one, then change one bit. **Predict.** Does loading complain?

# %%
content = bytearray(safetensors.torch.save({"weights": torch.full((1000,), 0.02)}))
content[-1] ^= 64  # one bit, of the last weight's exponent
print("the last two weights:", safetensors.torch.load(bytes(content))["weights"][-2:].tolist())

# %% [markdown]
# Loading doesn't complain. And a process that dies while it writes leaves half a file in place of a good one. Two habits help:
#
# - **A checksum.** The file begins with the 32 bytes of a SHA-256 of all that follows: a line of JSON for plain numbers, then the tensors as safetensors packs them.
# - **A second name.** We write under another name, ask the system to bring it to the disk (`os.fsync`), then rename, which happens in one moment. So a file with the right name is whole, even if our process dies; with `fsync` even after a power cut.
#
# **Your turn.** Write both functions.


# %% tags=["yours"]
def write_state(path: Path, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write a file whole or not at all: its SHA-256 (32 bytes), JSON, a newline, safetensors.

    It is written as `path` with ".partial" added, brought to the disk, then renamed.
    """
    content = json.dumps(numbers).encode() + b"\n" + safetensors.torch.save(tensors)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(hashlib.sha256(content).digest() + content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


# %% tags=["yours"]
def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_state` wrote: tensors and numbers. Raises ValueError if a byte has changed."""
    stored = path.read_bytes()
    checksum, content = stored[:32], stored[32:]
    if hashlib.sha256(content).digest() != checksum:
        raise ValueError(f"{path.name} is damaged")
    numbers, packed = content.split(b"\n", 1)
    return safetensors.torch.load(packed), json.loads(numbers)


# %% [markdown]
# The check makes `os.fsync` fail, and asks for the old file. Then it changes each byte, and cuts at each place.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "state")
    write_state(path, {"x": torch.arange(12)}, {"step": 3})
    good = path.read_bytes()
    with patch("os.fsync", side_effect=InterruptedError), suppress(InterruptedError):
        write_state(path, {"x": torch.zeros(1)}, {})
    assert path.read_bytes() == good, "the old file is replaced before the new one is on the disk"
    tensors, numbers = read_state(path)
    assert tensors["x"].equal(torch.arange(12)) and numbers == {"step": 3}
    for i in range(len(good)):
        for spoiled in (good[:i], good[:i] + bytes([good[i] ^ 64]) + good[i + 1 :]):
            path.write_bytes(spoiled)
            assert outcome(read_state, path) == "ValueError", f"read, though spoiled at byte {i}"

# %% [markdown]
# ## The trainer
#
# > **In short.** A state holds all that changes from step to step. So a resumed run ends with the same bits as one that never stopped, on the same machine, with the same code and threads.
#
# Many scripts save only `model.state_dict()`. The next step depends on more.

# %%
figures.saved_run()

# %% [markdown]
# Adam keeps `step`, `exp_avg` and `exp_avg_sq` in `optimizer.state[weight]`. `done` counts the steps of this epoch. `torch.get_rng_state()` is the random generator's state. (A GPU has another generator, which only the engine saves.)
#
# First we train a tiny model without interruption, to compare with. It has dropout, so forgetting the generator shows.


# %%
PROGRESS = ("epoch", "done", "steps_taken", "history")


def all_weights(run: Run) -> Tensor:
    """The model's weights as one vector."""
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


straight = Run(TINY_RUN, sample_pairs())
straight.fit()

# %% [markdown]
# **Your turn.** `Resumable` hands out the state of a run, and takes it back.


# %% tags=["yours"]
class Resumable(Run):
    """A run whose state can be taken, and put into another."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the next step depends on: copied tensors, and numbers that JSON can hold.

        Tensors are the weights by name, "exp_avg of NAME" and so on, and "random". Numbers are
        those of PROGRESS, and `report` as a dictionary.
        """
        tensors = {"random": torch.get_rng_state()}
        for name, weight in self.model.named_parameters():
            tensors[name] = weight.detach().clone()
            for slot, value in self.optimizer.state[weight].items():
                tensors[f"{slot} of {name}"] = value.clone()
        numbers = {name: getattr(self, name) for name in PROGRESS}
        return tensors, numbers | {"report": asdict(self.report)}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Become the run whose `state` this is."""
        for name, weight in self.model.named_parameters():
            weight.copy_(tensors[name])
            for slot in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors[f"{slot} of {name}"].to(self.device, copy=True)
                self.optimizer.state[weight][slot] = value
        for name in PROGRESS:
            setattr(self, name, numbers[name])
        self.report = EpochReport(**numbers["report"])
        torch.set_rng_state(tensors["random"])


# %% [markdown]
# The check takes a state in epoch 2 and trains on. Then another run starts from that state.

# %%
first, second = (Resumable(TINY_RUN, sample_pairs()) for _ in range(2))
first.train_epoch()
first.end_epoch()
first.train_epoch(until=7)
tensors, numbers = first.state()
numbers = json.loads(json.dumps(numbers))  # as from a file
first.fit()
second.load(tensors, numbers)
second.fit()
assert all_weights(second).equal(all_weights(straight)), "a part of the state is lost"
assert second.history == straight.history

# %% [markdown]
# **Your turn.** `Trainer` adds a folder. A state is saved at each epoch's end, and within an epoch after every `save_every` steps (0: only at its end). Its name counts the steps so far: state-000120. The newest two stay, as one may be damaged: `resume` renames it to state-000120.damaged. Whenever BLEU is the best so far, `save_model` also writes the model (in float16).


# %% tags=["yours"]
class Trainer(Resumable):
    """A run that goes on where it was stopped. Its files are in `folder`, which it makes."""

    def __init__(self, config: TrainConfig, data: TrainingData, folder: Path):
        super().__init__(config, data)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def saved(self) -> list[Path]:
        """The states in the folder, oldest first."""
        return sorted(self.folder.glob("state-*[0-9]"))

    def save(self) -> None:
        """Write the state; the newest two stay."""
        write_state(self.folder / f"state-{self.steps_taken:06d}", *self.state())
        for old in self.saved()[:-2]:
            old.unlink()

    def resume(self) -> Path | None:
        """Go on from the newest good file, and return its path; without one, stay at the start."""
        for path in reversed(self.saved()):
            try:
                self.load(*read_state(path))
                return path
            except ValueError as error:
                print(error)
                path.replace(path.with_suffix(".damaged"))  # else it would count as one of two

    def step(self, batch: Batch) -> None:
        """One optimizer step, then a state if `done` is a multiple of `save_every`."""
        super().step(batch)
        if self.config.save_every and self.done % self.config.save_every == 0:
            self.save()

    def end_epoch(self) -> None:
        """Validate, keep the model if it is the best so far, and save the state."""
        super().end_epoch()
        *earlier, last = [row["val_bleu"] for row in self.history]
        if last > max(earlier, default=-1):
            save_model(self.folder, self.trained)
        self.save()


# %% [markdown]
# The check stops a run, damages the newest file, and goes on.

# %%
with tempfile.TemporaryDirectory() as folder:
    stopped = Trainer(TINY_RUN, sample_pairs(), Path(folder, "run"))
    assert stopped.resume() is None, "there is nothing to resume from"
    stopped.train_epoch()
    stopped.end_epoch()
    after_first = all_weights(stopped).half()
    stopped.train_epoch(until=7)
    newest = stopped.saved()[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = Trainer(TINY_RUN, sample_pairs(), Path(folder, "run"))
    torch.manual_seed(12345)  # whatever happened in between
    print("stopped after step 34, goes on from", resumed.resume().name)
    resumed.fit()
    assert all_weights(resumed).equal(all_weights(straight)), "a part of the state is lost"
    assert resumed.history == straight.history and len(resumed.saved()) == 2
    again = Trainer(TINY_RUN, sample_pairs(), Path(folder, "run"))
    assert again.resume() == again.saved()[-1] and again.epoch == 3, "go on from the newest state"
    assert again.history == straight.history, "save after the epoch's row is written"
    kept = nn.utils.parameters_to_vector(load_model(Path(folder, "run")).model.parameters())
    assert kept.half().equal(after_first), "epoch 1 translates best here"

# %% [markdown]
# The resumed run equals the one that never stopped. Now the toy, or with a GPU the real run. **Predict.** How many of 60 validation captions will it translate exactly?

# %%
workplace = tempfile.TemporaryDirectory()
folder = runs_folder() / "chapter-9" if gpu else Path(workplace.name)
trainer = Trainer(config, data, folder)
trainer.resume()  # where it was, if this notebook was interrupted
trainer.fit()
pd.DataFrame(trainer.history).set_index("epoch").round(2)

# %%
pd.set_option("display.max_colwidth", None)  # whole sentences
best = load_model(folder, trainer.device)
captions = pd.DataFrame(data.corpus["val"], columns=["source", "reference"])
captions["translation"] = plain_translate(best, captions.source)
print((captions.translation == captions.reference).sum(), "exactly as in the reference")
captions[:4]

# %% [markdown]
# Ten are exact. Others aren't English, or read well and are wrong: the baker *can play a bottle*.
#
# ## Killed in the middle
#
# > **In short.** `kill -9` gives no time for anything. What is on the disk has to be enough.
#
# Another process trains the tiny model, two epochs of 27 steps. We kill it after step 31. Then a new `Trainer` goes on. The control, `ForgetsAll`, finds the file and loads nothing. Before each we set another seed: from the old one `ForgetsAll` would repeat the whole run. **Predict.** How many weights of each will differ from the straight run's?

# %%
CHILD = """
import sys; from pathlib import Path; import torch; torch.set_default_dtype({})
from scripts.ch09_training_run import TINY_RUN, Trainer, sample_pairs
trainer = Trainer(TINY_RUN, sample_pairs(), Path(sys.argv[1]))
trainer.resume(); trainer.fit()
"""


def killed_run(folder: Path, step: int, seconds: float = 0.0) -> int:
    """Train in another process, killed `seconds` after its state at `step`; its exit code."""
    name = f"state-{step:06d}"
    code = CHILD.format(torch.get_default_dtype())
    child = subprocess.Popen([sys.executable, "-c", code, folder], cwd=ROOT)
    while child.poll() is None and not any(p.name >= name for p in folder.glob("state-*[0-9]")):
        time.sleep(0.01)
    time.sleep(seconds)
    child.kill()
    return child.wait()


class ForgetsAll(Trainer):
    """The control: it finds the state, and stays at the start."""

    def load(self, *_: Any) -> None: ...


# %%
with tempfile.TemporaryDirectory() as place:
    killed = Path(place, "killed")
    assert killed_run(killed, step=31) != 0
    for kind in (ForgetsAll, Trainer):
        resumed = kind(TINY_RUN, sample_pairs(), copytree(killed, Path(place, kind.__name__)))
        torch.manual_seed(12345)  # else a run from the start draws as the first run did
        assert resumed.resume() and resumed.steps_taken < straight.steps_taken
        print(f"{kind.__name__} starts in epoch {resumed.epoch}.", end=" ")
        resumed.fit()
        differs = all_weights(resumed) != all_weights(straight)
        print(f"In the end {differs.double().mean():.0%} of {len(differs):,} weights differ.")
        assert differs.any() == (kind is ForgetsAll)

# %% [markdown]
# ### What if it forgets?
#
# Seven runs train the toy's last epoch again, from the state before it. One forgets nothing. The others forget
#
# - *steps*: the count of steps is 0 again, so the rate warms up again;
# - *Adam*: its averages start anew;
# - *epoch*: the number is 1, 2 or 3, so the batches are others;
# - *all three*: only the weights are kept.
#
# (The toy has no dropout, so its generator decides nothing.) **Predict.** Which single part costs most BLEU?


# %%
def last_epoch_again(run: Trainer, adam: bool = True, **changed: int) -> dict[str, float]:
    """Train the last epoch again, with Adam's averages or without, and with `changed` numbers."""
    tensors, numbers = read_state(run.saved()[-2])  # `save_every` is longer than an epoch
    run.load(tensors, numbers | changed)
    if not adam:
        run.optimizer.state.clear()  # the next step makes new averages, of 0
    run.train_epoch()
    last_rate = run.rate(run.steps_taken) / run.config.lr  # as a share of the peak
    return {"last_rate": last_rate, "val_bleu": validate(run.trained, run.data)["val_bleu"]}


# %%
run = Trainer(TOY, sample_pairs(1200, held_out=60), Path(workplace.name))
run.resume()
run.fit()  # only with a GPU the toy is still to train
rows = {
    "nothing": last_epoch_again(run),
    "steps": last_epoch_again(run, steps_taken=0),
    "Adam": last_epoch_again(run, adam=False),
    **{f"epoch (is {n})": last_epoch_again(run, epoch=n) for n in (1, 2, 3)},
    "all three": last_epoch_again(run, adam=False, epoch=1, steps_taken=0),
}
table = pd.DataFrame(rows).T.rename_axis("forgotten").round(1)
assert table.val_bleu["steps"] < table.val_bleu["nothing"] - 5
table

# %% [markdown]
# The count of steps costs most here: the last epoch ends while the rate is near its peak, not 0. Over eight seeds (`replace(TOY, seed=n)`; not on record) that costs 8 to 24 BLEU. Without Adam's averages, or with other batches, BLEU changes by −1.9 to +3.0: on 60 captions that may be chance. (Lost after epoch 1, the count would leave the last rate at 8% of the peak.)
#
# ## When a number isn't one
#
# > **In short.** One loss that is NaN ("not a number") spoils the weights. Check before a weight moves.
#
# **Predict.** A loop takes one step on a loss that is NaN. How many weights survive? And with chapter 6's `train_step`, which checks loss and gradient first?

# %%
victim = Run(TINY_RUN, sample_pairs())
before = all_weights(victim)
victim.criterion.smoothing = torch.nan  # so every loss is NaN
with suppress(FloatingPointError):
    victim.train_epoch()
print("with the check all weights are as before:", all_weights(victim).equal(before))
(batch,) = batches_of(victim.data.train, [[0, 1, 2]], victim.device)
batch_loss(victim.model, batch, victim.criterion)[0].backward()
victim.optimizer.step()
print(f"without it {all_weights(victim).isfinite().sum()} of {len(before):,} survive")

# %% [markdown]
# Two saves later both kept states would hold NaN. From an earlier state a run meets the same batch again: look at it, or lower the rate.
#
# ## Which epoch to keep
#
# > **In short.** Keep the weights that translate new sentences best. But their score was partly lucky.
#
# Eighteen models all deserve 40 BLEU. Each measurement has its own random error, with a standard deviation of 0.5. **Predict.** What does the best seem to have?

# %%
torch.manual_seed(0)
scores = 40 + 0.5 * torch.randn(100_000, 18)  # so many such contests
print(f"the best of 18 equal models seems to have {scores.max(dim=1).values.mean():.1f}")

# %% [markdown]
# A maximum flatters. So never choose an epoch by the test set. Score the chosen model on it once, at the end.

# %%
split = "test_2016_flickr" if gpu else "test"
sources, references = zip(*data.corpus[split], strict=True)
score = corpus_bleu(plain_translate(best, sources), references).score
print(f"{split}, {len(sources):,} captions: BLEU {score:.1f}")

# %% [markdown]
# ## Case · Epoch 11
#
# > **In short.** In epoch 11 BLEU falls by 3.7 while both losses fall: some outputs don't end. Five late steps of long sentences have a part in it, and so have the steps around them.
#
# **Symptom.** `length ratio` divides the length of all outputs by that of all references. `loops` counts the outputs, of 1,014, that say the same four times in a row. In the last column these end where they begin to repeat themselves.

# %%
fall = epochs_record["fall"]
figures.symptoms_table(epochs_record)

# %% [markdown]
# The loops are few and cost much. With loops cut, epoch 11 has 2.0 BLEU more, and the beam's fall, 39.9 to 38.8, is gone. Others run on without a loop, as this one of the five that grew most:

# %%
example = fall["examples"][3]
for text in ("source", "before", "after"):
    print(f"{text}: {example[text][:200]}")

# %% [markdown]
# The losses don't show this: they see references only.
#
# **When?** We train epoch 11 again, go on into epoch 12, and translate after every fifth step.

# %%
figures.fall_chart(fall, "As outputs grow BLEU falls by 5, and is soon back")

# %% [markdown]
# From step 240 to 255 BLEU falls by 5.2. Five steps later it is back. At step 240 BLEU without its brevity penalty is 41.9. If outputs only grew, by wrong words, each n-gram precision would sink as the n-grams grow in number, and BLEU to 34.0 ([test](../tests/test_ch09_training_run.py)). At step 255 it is 35.1: some added words are right.
#
# Between steps 240 and 246 outputs begin to grow, and the fall goes on for nine more. Of steps 241 to 246 all but 242 are *long steps*: of the last 20 steps they have the longest sentences, with 21 to 43 English tokens on average. In no other epoch's second half do six steps in a row average more than 25.
#
# ### Suspect 1: chance
#
# Is the fall bad luck? Then with other captions, other rounding or other dropout BLEU shouldn't fall.
#
# - *Captions*: over draws of captions, the fall's 95% interval is 2.0 to 5.3 BLEU ([chapter 10](ch10_judging.ipynb)), though we chose the deepest of 17 changes.
# - *Rounding*: [an earlier repetition](../results/archive/epochs-multi30k-earlier.json) falls in the same epoch, by 2.5.
# - *Dropout*: the shipped run, whose dropout was other from the first step, falls by 3.2. And we train epoch 11 with three draws, each time from the state after epoch 10: all fall (first panel below).
#
# So it isn't chance alone.
#
# ### Suspect 2: the long steps
#
# If they are guilty, BLEU shouldn't fall when they come at the epoch's start. As a control, we move the five steps before them there instead. **Predict.** Which move prevents the fall?

# %%
names = ["as it came", "five others first", "long steps first"]
figures.controls_chart(fall, names, "With the long steps first BLEU doesn't fall")

# %% [markdown]
# Moving the long steps prevents the fall (we looked only at the epoch's end). Moving five others doesn't. So it matters here that they come late.
#
# ### Suspect 3: the order of the others
#
# Are late long steps enough? Then BLEU should end as low whatever comes before and after them. We swap the nine steps before them with the nine after. Then we shuffle all steps before them, in two ways. **Predict.** What does BLEU do at step 250, and at 255?

# %%
names = ["as it came", "neighbours swapped", "shuffled before", "shuffled again"]
figures.controls_chart(fall, names, "In three other orders BLEU ends over 5 higher on average")

# %% [markdown]
# Late long steps aren't enough. With swapped neighbours BLEU falls by 2.2, and is back at step 255. After the shuffles it changes by −1.5 to +0.9: the long steps may leave a small trace.
#
# ### Verdict
#
# Chance alone doesn't explain the fall. Here it matters that the long steps come late, and what comes before them.
#
# **What we don't know**
#
# - Does any new order prevent the fall? Of four with the long steps late, only *five others first* falls in full.
# - From other states? All orders start from one. From that after epoch 11 five late long steps did nothing (40.6 for 40.7; one draw of the earlier repetition).
# - Do other long sentences do the same? A GPU run ([record](../results/gpu-small-1.json)) has long steps at the same place, with other sentences. It doesn't fall.
# - Why did epoch 5 fall by 2.1 without such steps? (With loops cut it doesn't fall.)
#
# **For your own runs.** One epoch's BLEU is a snapshot: five steps later this fall was over. Don't stop for it. Look at the outputs' length, and wait.
#
# ## Averaging checkpoints
#
# > **In short.** A mean over more steps than a fall lasts hides the fall. In epoch 11 older weights do nearly as well.
#
# The paper averages its base model's last 5 checkpoints, saved every ten minutes (§6.1): $\bar\theta = \frac1K \sum_k \theta_k$. **Your turn.**


# %% tags=["yours"]
def average_checkpoints(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean, weight by weight, of several saved models, in float32 (§6.1).

    `load_tensors(path)[0]` has a model's weights by name.
    """
    loaded = [load_tensors(path)[0] for path in paths]
    return {
        name: torch.stack([tensors[name].float() for tensors in loaded]).mean(dim=0)
        for name in loaded[0]
    }


# %%
with tempfile.TemporaryDirectory() as folder:
    paths = [Path(folder, f"{i}.safetensors") for i in range(3)]
    for path, size in zip(paths, (0, 3000, 12000), strict=True):  # float16 ends below 75,000
        save_tensors(path, {"weight": size * torch.arange(6).half()}, {})
    assert average_checkpoints(paths)["weight"].equal(5000 * torch.arange(6).float())

# %% [markdown]
# **Experiment.** Does the fall of epoch 11 survive in a mean over its last steps? If the weights only jitter from step to step, a mean of 5 stays high. If they drift the same way for ten steps, only a mean over more than ten stays high. We train the epoch again, and translate with means of its last weights. Epochs 10, 12 and 18 are controls. (The scores are averages over three draws of dropout.) **Predict.**

# %%
figures.means_table(epochs_record["means"]).round(1)

# %% [markdown]
# Means of 5 and 10 fall, too. A mean of 20, with some weights from before the fall, hides it. But such a mean is also older: the weights after step 245, the middle of these twenty, alone have 39.2. In epoch 10 a mean of 10 gains 1.0, in epoch 12 next to nothing. In epoch 18 no mean changes anything, as the rate ends at 0.
#
# Nearer to the paper's is a mean over epochs. In the shipped run the mean of the last five has 41.2, the best epoch 41.3.
#
# ## Several processes
#
# > **In short.** Each GPU takes a batch of its own. Average the gradients over tokens, not over processes.
#
# Let process $r$ of $R$ have $n_r$ target tokens and the summed loss $L_r$. The gradient of the whole step is $g = \sum_r \nabla L_r \,/ \sum_r n_r$. `DistributedDataParallel` replaces each gradient by its *mean* over the processes. So each process divides its $L_r$ by $\frac1R \sum_r n_r$, and the $R$ cancels in the mean. A process that divides by its own $n_r$ makes a mean of means: chapter 6's example missed the gradient by 48%.
#
# ## The engine does the same, faster
#
# ```bash
# python -m scripts.train --preset sample           # minutes on a CPU
# python -m scripts.train --preset small            # Multi30k: half an hour of a CPU
# python -m scripts.train --preset small --resume   # after an interruption
# torchrun --nproc-per-node=4 -m scripts.train --preset small --max_tokens 512
# ```
#
# The engine's [`Training`](../scripts/core/training.py) is our `Trainer` and more: it refuses to resume with other settings, and shares steps among processes. With its [step](../scripts/core/steps.py) `textbook`, our `train_step`, a run ends with `Trainer`'s weights, bit for bit ([test](../tests/test_ch09_training_run.py)). Chapter 12 adds three faster steps.
#
# **Pitfall.** Each process has a batch of `--max_tokens`. So for the same recipe four processes take a quarter of the 2,048 each.
#
# This repeats the shipped model's recipe ([record](../results/multi30k-de-en.json)); `bleu` is by a beam of 5:

# %%
print(record["repeat"].partition(" --publish")[0])
pd.DataFrame(record["test"]).T[["bleu", "bleu_greedy"]].astype(float).round(1)

# %% [markdown]
# ## Summary
#
# - A state holds all that the next step depends on: killed, and resumed on a CPU from another random state, a run ends with the same bits.
# - Give files a checksum, write them whole, and keep the previous one. Check for NaN before a weight moves.
# - Validate by translating, keep the best epoch, test once at the end.
#
# ## What the paper did that we don't
#
# - It trained its base model for 100,000 steps.
# - It used post-norm and the inverse-square-root rate; our `small` is pre-norm, with a cosine.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A mean over unequal shares
#
# *code · difficulty ●○○ · worth ●●● · 10 minutes*
#
# Each process hands in the *mean* gradient over its own target tokens, and how many these were. Write `mean_over_ranks(means, tokens)`: the mean over all tokens. Some processes may have no sentence: their count is 0, and their mean is NaN. Leave these out, and no others: the NaN of a process with tokens must show. (`solution("mean_over_ranks")` shows ours.)


# %%
def mean_over_ranks(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Each process's mean gradient (D,) and token count, to the mean over all tokens."""
    ...


check(mean_over_ranks)

# %% [markdown]
# ### Exercise 2 · Your own runs
#
# *project · difficulty ●●○ · worth ●●● · 60 minutes*
#
# - Run `python -m scripts.train --preset sample --name a`, then `--name b`. Kill the second with `kill -9` during epoch 3, and go on with `--resume`. Do both `model.safetensors` have the same `sha256sum`?
# - Train the sample model with `--average 5`, and again with `--schedule inverse_sqrt` too. After which does averaging gain more?
#
# Next: [Chapter 10 · Judging](ch10_judging.ipynb)
