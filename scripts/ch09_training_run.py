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
# After this chapter you can train a translator on real captions, with or without a GPU, and say what makes a run worth trusting.
#
# | | |
# |---|---|
# | In the paper | §5 (training), §6.1 (averaged checkpoints) |
# | Time | 20 minutes to read, 50 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 8 · Decoding](ch08_decoding.ipynb) · [Chapter 10 · Judging](ch10_judging.ipynb) |
#
# *If you read only three cells:* the loop of *The plain run*, the table of *Stopped and resumed*, the captions of *Multi30k, as recorded*.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import copy
import io
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR

from scripts.book.exercises import check
from scripts.book.figures.judging import ingredient_chart
from scripts.book.figures.training import history_chart, sample_table, score_table
from scripts.book.records import load_record
from scripts.book.verdict import Verdict, verdicts
from scripts.ch06_training import LabelSmoothing, batch_loss, cosine_rate, run_epoch, train_step
from scripts.ch07_multi30k import token_batches
from scripts.ch08_decoding import plain_translate
from scripts.core.checkpoints import load_tensors, newest_state, save_tensors, saved_states
from scripts.core.data import TrainingData, batches_of, epoch_plan, prepare
from scripts.core.models import Trained
from scripts.core.optimizers import make_optimizer
from scripts.core.scores import corpus_bleu
from scripts.core.settings import PRESETS, TrainConfig, build_model, pick_device
from scripts.core.steps import Step, losses_on
from scripts.core.training import Diverged, Training

# %% [markdown]
# ## The plain run
#
# > **In short.** All the parts exist: corpus and batches (chapter 7), model (4), training step (6), search (8). One loop joins them.
#
# With a GPU this notebook makes a real run: all of Multi30k and the preset (named settings) `small`, for 18 epochs. Without one it is a toy that takes seconds, on short captions of the sample corpus. The outputs stored here are the toy's.

# %%
gpu = torch.cuda.is_available()
toy = {"layers": 1, "d_model": 64, "d_ff": 128, "vocab": 900, "max_tokens": 256}
toy |= {"epochs": 4, "lr": 7e-3, "warmup": 50}
config = PRESETS["small"] if gpu else replace(PRESETS["sample"], **toy)
device = pick_device("cuda" if gpu else "cpu")
dtype = torch.float32 if gpu else torch.float64
torch.set_default_dtype(dtype)


# %% [markdown]
# **Pitfall: no way without a GPU.** A script that begins with `torch.cuda.set_device(0)` crashes on a laptop. Choose the device once, as a value.

# %%
try:
    print(pick_device("cuda"))
except ValueError as error:
    print(error)

# %% [markdown]
# `prepare` reads the corpus, learns BPE on the training split alone, and encodes the pairs. `epoch_plan` lists the steps. A step is a list of batches, one for each process (here one); a batch is a list of indices of pairs.


# %%
def short_captions(data: TrainingData, most: int, validation: int) -> TrainingData:
    """Only the pairs whose source has at most `most` words, and `validation` of those held out."""
    chosen = []
    for pairs in (data.corpus["train"], data.corpus["val"]):
        chosen.append([i for i, (source, _) in enumerate(pairs) if len(source.split()) <= most])
    train, val = chosen[0], chosen[1][:validation]
    corpus = {"val": [data.corpus["val"][i] for i in val]}
    examples = [data.train[i] for i in train], [data.val[i] for i in val]
    return TrainingData(corpus, data.tokenizer, *examples)


# %%
data = prepare(config) if gpu else short_captions(prepare(config), most=7, validation=60)
plans = {epoch: epoch_plan(config, data, epoch) for epoch in range(1, config.epochs + 1)}
total_steps = sum(map(len, plans.values()))
print(f"{len(data.train):,} pairs, {len(data.tokenizer):,} pieces, {total_steps:,} steps")

# %% [markdown]
# Model, optimizer and schedule are as in chapter 6.

# %%
torch.manual_seed(config.seed)
model = build_model(config, len(data.tokenizer)).to(device)
criterion = LabelSmoothing(config.smoothing)
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
scheduler = LambdaLR(
    optimizer, lambda done: cosine_rate(done + 1, config.lr, config.warmup, total_steps)
)

after = {}  # epoch -> its weights
for epoch, plan in plans.items():
    batches = batches_of(data.train, [batch for step in plan for batch in step], device)
    report = run_epoch(batches, model, criterion, optimizer, scheduler, clip=config.clip)
    after[epoch] = copy.deepcopy(model.state_dict())
    print(f"epoch {epoch}: training loss {report.loss_per_token:.2f}")

# %% [markdown]
# BLEU scores translations from 0 to 100 by the runs of one to four words that they share with the references, with a penalty for short texts ([chapter 10](ch10_judging.ipynb)). **Predict.** How many of the validation captions are exactly right?

# %%
trained = Trained(model, data.tokenizer, config)
sources, references = zip(*data.corpus["val"], strict=True)
translations = plain_translate(trained, sources)
score = corpus_bleu(translations, references)
print(f"validation BLEU, greedy: {score.score:.1f}")
exact = sum(map(str.__eq__, translations, references))
print(f"{exact} of {len(references)} captions exactly as in the reference")
pd.set_option("display.max_colwidth", None)  # whole sentences
pd.DataFrame({"source": sources, "reference": references, "translation": translations})[:6]

# %% [markdown]
# One of these six is right; the others are broken, or read well and say something else. (BLEU on captions made by a grammar can't be compared with BLEU on real ones.) A run of hours needs more, so we let this loop fail in one way after another, and fix it.
#
# ## Which epoch to keep
#
# > **In short.** A loss doesn't say how well the model translates. So let it translate new sentences after each epoch, and keep the weights that did best.
#
# Here are three epochs of the real run, whose model ships with the series. After epoch 11 both losses were lower than ever. **Predict.** How much BLEU do its weights lose against those of epoch 10?

# %%
record = load_record("multi30k-de-en")
history = pd.DataFrame(record["history"]).set_index("epoch")
print(f"{history.val_bleu[10] - history.val_bleu[11]:.1f} BLEU")
history.loc[[10, 11, 12], ["train_loss", "val_loss", "val_bleu"]].round(2)

# %% [markdown]
# The loss asks about the next word after a perfect prefix; BLEU asks about a whole sentence of the model's own words. (What happened in epoch 11 isn't on record.)


# %%
def validate(
    trained: Trained,
    data: TrainingData,
    loss_of: Callable[..., tuple[Tensor, Tensor]] = batch_loss,
    translate: Callable[[Trained, Sequence[str]], list[str]] = plain_translate,
) -> dict[str, float]:
    """Perplexity (teacher-forced) and greedy BLEU on the validation split."""
    plan = token_batches(data.val, trained.config.max_tokens)
    criterion = LabelSmoothing(trained.config.smoothing)
    batches = batches_of(data.val, plan, trained.device)
    report = losses_on(batches, trained.model, criterion, loss_of)
    sources, references = zip(*data.corpus["val"], strict=True)
    bleu = corpus_bleu(translate(trained, sources), references).score
    return {"val_loss": report.loss_per_token, "val_ppl": report.perplexity, "val_bleu": bleu}


# %% [markdown]
# The loss is the smoothed one, so the perplexity isn't its exponential. The toy's last two epochs:

# %%
rows = {}
for epoch, weights_then in list(after.items())[-2:]:
    model.load_state_dict(weights_then)
    rows[epoch] = validate(trained, data)
best = max(rows, key=lambda epoch: rows[epoch]["val_bleu"])
model.load_state_dict(after[best])
print(f"kept: epoch {best}")
pd.DataFrame(rows).T.rename_axis("epoch").round(2)

# %% [markdown]
# **Pitfall: a maximum flatters.** The best of many scores was partly lucky. So report a test set's score, taken once, at the end. **Predict.** Eighteen models of 40 BLEU each are measured with a random error of 0.5. What score does the best seem to have, on average?

# %%
torch.manual_seed(0)
measured = 40 + 0.5 * torch.randn(10_000, 18)  # ten thousand such contests
print(f"{measured.max(dim=1).values.mean():.1f}")

# %% [markdown]
# ### Averaging checkpoints
#
# > **In short.** Late in training the weights jitter around a good point. The mean of several checkpoints may be nearer to it.
#
# The paper averages its base model's last 5 checkpoints (§6.1), weight by weight: $\bar\theta = \frac1K \sum_k \theta_k$.


# %%
def average_checkpoints(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The mean, weight by weight, of several saved models, in float32 (§6.1)."""
    loaded = [load_tensors(path)[0] for path in paths]
    return {
        name: torch.stack([tensors[name].float() for tensors in loaded]).mean(dim=0)
        for name in loaded[0]
    }


# %% [markdown]
# **Pitfall: the average that was never run.** The Annotated Transformer averages over `model.params()`, which raises an `AttributeError`. So run ours once, on three files.

# %%
with tempfile.TemporaryDirectory() as folder:
    paths = [Path(folder, f"{i}.safetensors") for i in range(3)]
    weights = {"weight": torch.arange(6, dtype=torch.float32)}
    for i, path in enumerate(paths):
        save_tensors(path, {"weight": i * weights["weight"]}, {})
    torch.testing.assert_close(average_checkpoints(paths), weights)

# %% [markdown]
# We compare the mean with the best epoch (which has an advantage: the same score chose it). The mean is over the last 5 of 18 epochs for the shipped model, and over the last 3 of 5 in the short runs of *What each ingredient is worth*. **Predict.** Our rate falls to zero along a cosine. How much jitter is left to remove?

# %%
recipe = load_record("recipe-multi30k")
chosen = record["chosen_by_val_bleu"]
shipped = chosen["mean of the last 5"] - chosen["best epoch"]
short_runs = [run for row in recipe["rows"].values() for run in row["runs"]]
short = [run["mean of epochs"] - run["best"] for run in short_runs]
worse = sum(change < 0 for change in [shipped, *short])
print(f"the mean is worse than the best epoch in {worse} of {1 + len(short)} runs")
print(f"{shipped:+.1f} BLEU for the shipped model, {sum(short) / len(short):+.1f} for short runs")
print("a short run, by epoch:", recipe["rows"]["the recipe"]["runs"][0]["history"])

# %% [markdown]
# For the shipped model nothing is left to gain. The short runs can't tell: their mean includes epoch 3, when BLEU was still lower by points. The paper's rate falls slowly, as $1/\sqrt n$, so a mean is expected to help there.
#
# ## Stopped and resumed
#
# > **In short.** A resumed run should end as if it had never been interrupted, to the last bit.
#
# Many scripts save only `model.state_dict()`. Here is a small run whose state has four parts: weights, optimizer, count of steps, and the generator that shuffles the batches.

# %%
tiny = replace(config, layers=1, d_model=32, d_ff=64, heads=2, dropout=0.0, epochs=2, device="cpu")
tiny = replace(tiny, max_tokens=256, warmup=10, lr=5e-3, average=0)
tiny = replace(tiny, step="eager")  # batches of any shape, as in our loop; chapter 12 has others
few = TrainingData({}, data.tokenizer, data.train[:300], [])


# %%
class SmallRun:
    """A run on a CPU, and all that its next epoch depends on."""

    def __init__(self):
        torch.manual_seed(tiny.seed)
        self.model = build_model(tiny, len(few.tokenizer))
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9)
        self.order = random.Random(tiny.seed)  # shuffles the batches of every epoch in turn
        self.steps = 0

    def epoch(self) -> None:
        """One pass over the few pairs; the rate follows from the count of steps."""
        plan = token_batches(few.train, tiny.max_tokens, self.order)
        for batch in batches_of(few.train, plan, torch.device("cpu")):
            self.steps += 1
            rate = cosine_rate(self.steps, tiny.lr, tiny.warmup, tiny.epochs * len(plan))
            self.optimizer.param_groups[0]["lr"] = rate
            train_step(self.model, [batch], LabelSmoothing(), self.optimizer, tiny.clip)

    def vector(self) -> Tensor:
        """All weights as one vector."""
        return parameters_to_vector(self.model.parameters()).detach()


# %% [markdown]
# One run goes through both epochs. The others start from a copy made after the first epoch, with some part reset. How far from the first run's weights do they end, in percent of the distance that those moved in all? **Predict.** Which part is missed most?

# %%
straight = SmallRun()
start = straight.vector()
straight.epoch()
saved = copy.deepcopy(straight)  # stands for a file with all four parts
straight.epoch()

astray = {}
for forgotten in ("nothing", "order", "steps", "optimizer", "order, steps, optimizer"):
    resumed = copy.deepcopy(saved)
    if "order" in forgotten:
        resumed.order.seed(tiny.seed)
    if "steps" in forgotten:
        resumed.steps = 0
    if "optimizer" in forgotten:
        resumed.optimizer.state.clear()
    resumed.epoch()
    distance = (resumed.vector() - straight.vector()).norm() / (straight.vector() - start).norm()
    astray[forgotten] = f"{distance.item():.0%}"
pd.Series(astray, name="ends astray by").rename_axis("forgotten").to_frame()

# %% [markdown]
# The count of steps is missed most: the rate warms up again and ends at 78% of its peak, when it should fall to 0. The last row is the script that saves only the weights.
#
# A state must hold all that the next step depends on:
#
# - the weights, and the optimizer's averages;
# - the number of steps done, from which the learning rate follows;
# - the epoch and the step within it, from which the batches follow;
# - the random generators' states, from which dropout draws;
# - the settings that change a step (resuming with others is refused).
#
# [`Training`](../scripts/core/training.py), the class behind `python -m scripts.train`, saves all this after each epoch and every `save_every` steps. It needn't save the generator that shuffles the batches: `epoch_plan` seeds a new one from the run's seed and the epoch's number. The `Step` below is chapter 6's `train_step`.


# %%
def new_training(config: TrainConfig, data: TrainingData, folder: Path, resume=False) -> Training:
    """A `Training` with the plain loss, new or resumed, put together from its parts."""
    torch.manual_seed(config.seed)
    model = build_model(config, len(data.tokenizer))
    optimizer = make_optimizer(config, model)
    take = Step(model, LabelSmoothing(config.smoothing), optimizer, batch_loss, config.clip)
    return Training(config, data, folder, model, optimizer, take, resume=resume)


# %%
def train_all(training: Training) -> None:
    """Train to the end, without validation."""
    while training.epoch <= training.config.epochs:
        training.train_epoch()
        training.end_epoch({"val_bleu": 0.0})


# %% [markdown]
# **Pitfall: a check that can't see.** Without dropout, training draws no random numbers after the initial weights, and a forgotten generator goes unnoticed. So this check has dropout. One run goes through; the other dies between two saved states, and is resumed. **Predict.** How far apart do they end?

# %%
drops = replace(tiny, dropout=0.1, save_every=3)
with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):  # no progress bar
    whole, broken = Path(folder, "whole"), Path(folder, "broken")
    whole.mkdir()
    broken.mkdir()
    train_all(new_training(drops, few, whole))

    interrupted = new_training(drops, few, broken)
    interrupted.load()  # the first epoch's batches
    for _ in range(8):
        interrupted.step()  # one optimizer step: `done` counts the epoch's
        if interrupted.due():  # every `save_every` steps
            interrupted.save()
    lost = interrupted.done - newest_state(broken).meta["done"]
    del interrupted  # the power fails

    torch.manual_seed(12345)  # whatever happened in between
    train_all(new_training(drops, few, broken, resume=True))
    unbroken, mended = (newest_state(run).tensors for run in (whole, broken))
assert unbroken.keys() == mended.keys()
assert all(unbroken[name].equal(mended[name]) for name in unbroken)
print(f"{lost} steps were computed twice, and all {len(unbroken)} tensors have the same bits")

# %% [markdown]
# Equal bits are promised on CPUs; on a GPU, ask for them with `--deterministic`.
#
# ## Files that lie
#
# > **In short.** A file may be cut short, or change on the disk. Write it whole or not at all, give it a checksum, and keep the previous one.
#
# We save a table of our toy with safetensors alone, and change one bit of the file. **Predict.** Does loading complain?

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "weights.safetensors")
    save_file({"table": model.src_embed[0].lut.weight.detach().cpu()}, path)
    largest = [load_file(path)["table"].abs().max().item()]
    spoiled = bytearray(path.read_bytes())
    spoiled[-1] ^= 64  # one bit, of the last weight's exponent
    path.write_bytes(spoiled)
    largest += [load_file(path)["table"].abs().max().item()]
print(f"loaded; the largest weight was {largest[0]:.1f}, and is above 1e30: {largest[1] > 1e30}")

# %% [markdown]
# It doesn't, and the table is worthless. So `save_tensors` ([`checkpoints.py`](../scripts/core/checkpoints.py)) adds a SHA-256 checksum over names, shapes, bytes and settings. It writes under a second name, then renames, and the last two states are kept. The same accident again:

# %%
with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
    training = new_training(replace(drops, save_every=4), few, Path(folder))
    training.train_epoch()
    newest = saved_states(Path(folder))[-1]
    spoiled = bytearray(newest.read_bytes())
    spoiled[-1] ^= 64
    newest.write_bytes(spoiled)
    found = newest_state(Path(folder))
    print(found.complaints[0].replace(folder, "FOLDER"))
    print("going on from", found.path.name)

# %% [markdown]
# ## When a number isn't one
#
# > **In short.** One loss that is NaN ("not a number") makes nearly all weights NaN. Check before a weight moves, and say where it happened.
#
# **Predict.** A loop that doesn't check takes a step on such a loss. How many weights survive?

# %%
victim = copy.deepcopy(model)
adam = torch.optim.Adam(victim.parameters(), lr=1e-3)
(batch,) = batches_of(data.train, [[0, 1, 2]], device)
(math.nan * batch_loss(victim, batch, criterion)[0]).backward()
adam.step()
left = parameters_to_vector(victim.parameters())
print(f"{left.isfinite().sum()} of {len(left):,} weights")

# %% [markdown]
# Only those of one hidden feature, which was 0 at every token: there ReLU passes on nothing, not even NaN. `Step` checks loss and gradient first, and `Training` says where it happened:

# %%
with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
    training = new_training(tiny, few, Path(folder))
    training.save()
    before = [p.detach().clone() for p in training.model.parameters()]
    training.take.loss_of = lambda *given: [math.nan * total for total in batch_loss(*given)]
    try:
        training.train_epoch()
    except Diverged as error:
        print(str(error).replace(folder, "FOLDER"))
    assert all(map(torch.equal, before, training.model.parameters()))  # no weight has moved

# %% [markdown]
# ### Asked to stop
#
# Ctrl-C, or a cluster's SIGTERM, *asks* a run to stop. The handler ([`signals.py`](../scripts/core/signals.py)) only makes a note: the run finishes its step, saves its state, and ends.
#
# ## Several processes
#
# > **In short.** Each GPU takes a share of the step's sentences. The gradients must be averaged over tokens, not over processes.
#
# Let process $r$ of $R$ have $n_r$ target tokens and the summed loss $L_r$. The gradient of the whole step is
#
# $$ g = \frac{\sum_r \nabla L_r}{\sum_r n_r} $$
#
# PyTorch's `DistributedDataParallel` (DDP) replaces each gradient by its *mean* over the processes. So each process divides its $L_r$ by $\frac1R \sum_r n_r$, and the $R$ cancels in the mean. All have the same `epoch_plan`, so each can count the whole step's tokens.
#
# **Pitfall: the mean of means.** Chapter 6 met it in accumulation; here it happens if each process divides by its own $n_r$. **Predict.** One of two processes has 3 captions, the other 12. How far off is the mean of their means?

# %%
torch.manual_seed(0)
judge = build_model(tiny, len(few.tokenizer)).double()


def share_gradient(indices: Sequence[int], per: float) -> Tensor:
    """The gradient, as one vector, of these pairs' summed loss divided by `per`."""
    judge.zero_grad()
    (batch,) = batches_of(few.train, [list(indices)], torch.device("cpu"))
    (batch_loss(judge, batch, LabelSmoothing())[0] / per).backward()
    return parameters_to_vector(p.grad for p in judge.parameters())


# %%
shares = [range(3), range(3, 15)]
tokens = [sum(len(few.train[i].tgt) - 1 for i in share) for share in shares]
at_once = share_gradient(range(15), sum(tokens))
by_tokens = sum(share_gradient(share, sum(tokens) / 2) for share in shares) / 2  # DDP's mean
by_means = sum(share_gradient(share, n) for share, n in zip(shares, tokens, strict=True)) / 2
torch.testing.assert_close(by_tokens, at_once, rtol=1e-10, atol=1e-12)
off_by = ((by_means - at_once).norm() / at_once.norm()).item()
print(f"tokens {tokens}: the mean of means is {off_by:.0%} of the gradient's length off")

# %% [markdown]
# ## The command
#
# ```bash
# python -m scripts.train --preset sample           # minutes on a CPU
# python -m scripts.train --preset small            # Multi30k: 17 to 95 minutes of steps (H200: 22 seconds)
# python -m scripts.train --preset small --resume   # after an interruption
# ```
#
# A run writes into `runs/NAME`: the best model (its numbers rounded to 16 bits), the last two states, `log.csv`, a model card, and `record.json` with the command, settings and scores.
#
# The command computes the same step faster than our loop (chapter 12). `torchrun` starts a process for each GPU:
#
# ```bash
# torchrun --nproc-per-node=4 -m scripts.train --preset small
# torchrun --nproc-per-node=2 -m scripts.train --preset sample --device cpu
# ```
#
# **Pitfall: more processes are another recipe.** `--max_tokens 2048` limits one batch. A step of four processes has four batches, up to 8,192 tokens, and an epoch has a quarter of the steps. Divide `--max_tokens` by four for steps of the old size.
#
# ## Multi30k, as recorded
#
# > **In short.** Look at curves, then scores, then sentences.
#
# The command printed below repeats the shipped model's training ([record](../results/multi30k-de-en.json)). **Predict.** A model that always knew the next piece would have perplexity 1. At what perplexity does validation end, and why not at 1?

# %%
print(record["repeat"])
print(f"{record['seconds'] / 60:.0f} minutes of training on {record['device']}")
print(f"validation perplexity at the end: {history.val_ppl.iloc[-1]:.1f}")
history_chart(
    "multi30k-de-en",
    "BLEU settles in the last third, and the perplexities part",
    "Epoch 11's dip is the one from above. Training, though measured with dropout, ends lower: "
    "the model knows those captions better than new ones.",
)

# %% [markdown]
# Each caption can be translated in several ways, and the model can't know which was chosen. And data is scarce.

# %%
score_table("multi30k-de-en")

# %% [markdown]
# The first figure is by beam search. Chapter 10 asks how far to trust it. Four captions of test_2016_flickr:

# %%
sample_table("multi30k-de-en")

# %% [markdown]
# Three translations are wrong: "throwing", "Boon", "spraying".
#
# ## What each ingredient is worth
#
# > **In short.** Change one thing, and train with more than one seed. A difference within the spread between seeds means nothing.
#
# [`ingredients.py`](../scripts/studies/ingredients.py) (`make ablate`) changes one thing at a time in the preset `narrow`: Multi30k, five epochs, dropout and smoothing 0.1, pre-norm, Adam with a peak rate of 0.003.
#
# - *Xavier's tables*: embeddings drawn by Xavier's rule, not with spread $1/\sqrt D$.
# - *BPE-dropout* (Provilkov et al. 2020) skips merges at random, so a word splits into different pieces each epoch ([`data.py`](../scripts/core/data.py)).
# - *R-Drop 1* (Liang, Wu et al. 2021; 1 is its weight) sends each batch through the model twice, and asks the two passes, with different dropout, to agree ([`losses.py`](../scripts/fast/losses.py)).
# - *Muon* (Jordan et al. 2024) makes each matrix's step nearly orthogonal: about equally long in every direction ([`optimizers.py`](../scripts/core/optimizers.py)).
# - The other four change a setting named above: smoothing, dropout, norm, rate.
#
# The rows that were run more than once give one spread between seeds for all. With it, Student's t test computes p: how often seeds alone would separate a row so far from the recipe. Alone, a row would pass with p below 0.05. But eight rows are eight chances of a false alarm, so the smallest p must be below 0.05/8, the next below 0.05/7, and so on, until one fails (Holm 1979; [`verdict.py`](../scripts/book/verdict.py)).


# %%
def ingredient_verdicts(record: dict[str, Any]) -> dict[str, Verdict]:
    """What the seeds say of each changed row's validation BLEU against the recipe's."""
    rows = {name: [run["best"] for run in row["runs"]] for name, row in record["rows"].items()}
    changed = [name for name, row in record["rows"].items() if row["changes"]]
    return verdicts(rows, dict.fromkeys(changed, "the recipe"))


# %% [markdown]
# **Predict.** Which ingredients matter most in only five epochs? Does any of them *gain* something?

# %%
by_seeds = ingredient_verdicts(recipe)
told = {name for name, verdict in by_seeds.items() if verdict.told}
for name in ("Muon", "Xavier's tables"):
    print(f"{name}: p = {by_seeds[name].p:.3f}")
ingredient_chart(recipe, "Three changes do harm; no gain can be told from chance", told)

# %% [markdown]
# Three do harm, perhaps because five epochs are too few: dropout 0.3 and BPE-dropout hold back a model that hardly overfits yet, and a quarter of the rate learns too slowly. (BPE-dropout and R-Drop had one run each.) Muon and Xavier's tables would each pass alone. Here three rows come before them, so the bar is 0.05/5, and they fail.
#
# ## Summary
#
# - Validate by translating, keep the best epoch, test once at the end.
# - A state holds all that the next step depends on. The proof: a resumed run ends with the same bits.
# - Give files a checksum, write them whole, and keep the previous one. Check for NaN before a weight moves.
# - Average gradients over tokens. Believe an ingredient's effect only beyond the spread between seeds.
#
# ## What the paper did that we don't
#
# - It trained its base model for 100,000 steps.
# - It used post-norm and the inverse-square-root rate. Our `small` is pre-norm, with a cosine.
# - It averaged the checkpoints of its final models (§6.1), and says nothing about seeds.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A mean over unequal shares
#
# *code · difficulty ●○○ · worth ●●● · 10 minutes*
#
# Each of several processes hands in the *mean* gradient over its own target tokens, and how many these were. Write `mean_over_ranks(means, tokens)`: the mean over all tokens of all processes. A process (but not all) may be left without a sentence: 0 tokens, and its mean is 0/0, NaN; any other NaN must stay visible. (`solution("mean_over_ranks")` shows ours.)


# %%
def mean_over_ranks(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Each process's mean gradient (D,) and token count, to the mean over all tokens."""
    ...


check(mean_over_ranks)

# %% [markdown]
# ### Exercise 2 · A stream that can be resumed
#
# *code · difficulty ●●○ · worth ●●○ · 15 minutes*
#
# Large corpora are read as an endless stream. Write `resumable_stream(count, seed, drawn)`: an iterator over 0 to `count` − 1, each number once a pass, every pass in its own order, which the seed decides and no other seed shares. It begins after the first `drawn` numbers of that stream, so a checkpoint needs to hold nothing else. Global generators stay untouched. (`solution("resumable_stream")` shows ours.)


# %%
def resumable_stream(count: int, seed: int, drawn: int) -> Iterator[int]:
    """0 to `count` − 1 in endless shuffled passes, starting after the first `drawn` numbers."""
    ...


check(resumable_stream)

# %% [markdown]
# ### Exercise 3 · Your own runs
#
# *project · difficulty ●●○ · worth ●●● · 60 minutes*
#
# Choose one. Write down what you expect, then train.
#
# - Run `python -m scripts.train --preset sample --name a`, then the same with `--name b`. Kill the second with `kill -9` during an epoch, and go on with `--resume`. Do both `model.safetensors` have the same `sha256sum`?
# - Train the sample model with `--average 5`, and again with `--schedule inverse_sqrt` too. After which does averaging gain more, and why?
#
# Next: [Chapter 10 · Judging](ch10_judging.ipynb)
