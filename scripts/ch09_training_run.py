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
# After this chapter you can train a translator on real data with one command, on a CPU, a GPU or several, interrupt it, resume it to the last bit, say from a record how good it became, and tell which part of the recipe earned it.
#
# *Attention Is All You Need*, §5 and §6.1. 50 minutes to read, 100 with the code; half a minute to run on a CPU. The runs that it shows took longer, and were recorded.
#
# Previous: [Chapter 8 · Going fast](ch08_going_fast.ipynb) · Next: [Chapter 10 · Decoding and BLEU](ch10_decoding_and_bleu.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary.

# %% tags=["bootstrap"]
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "set SERIES_REPOSITORY").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
ours = runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))

# %%
import bisect
import copy
import io
import json
import math
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import altair as alt
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from scripts import ROOT, runs_folder
from scripts.book.charts import lines, titled
from scripts.book.exercises import check
from scripts.book.figures.runs import (
    free_table,
    history_chart,
    ingredient_chart,
    ingredient_table,
    sample_table,
    score_table,
)
from scripts.book.files import writable, write_whole
from scripts.book.records import load_record, provenance, save_record, sha256
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch06_training import (
    BOS,
    EOS,
    PAD,
    UNK,
    Batch,
    EpochReport,
    LabelSmoothing,
    TrainState,
    batch_loss,
    cosine_rate,
    greedy_decode,
    inverse_sqrt_rate,
    run_epoch,
)
from scripts.ch07_multi30k import (
    BPETokenizer,
    Example,
    encode_pairs,
    make_batch,
    pad_rows,
    source_ids,
    token_batches,
)
from scripts.ch08_going_fast import (
    PLAIN,
    STATIC,
    fast_loss,
    keep_memory,
    multiplies_bf16,
    static_batches,
    static_lengths,
    switches_for,
    target_rows,
)
from scripts.corpora.load import load_corpus
from scripts.engine.cards import model_card, publish
from scripts.engine.checkpoints import (
    keep_newest,
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
from scripts.engine.optimizers import Muon, make_optimizer
from scripts.engine.ranks import ALONE, Poll, Ranks, join_ranks
from scripts.engine.signals import Stopped, StopSignal
from scripts.engine.steps import KINDS, Step, ask_for_determinism, set_rate
from scripts.engine.watching import epoch_bar, gpu_row, in_figures, in_words, tracker_of, write_log
from scripts.studies.verdict import Verdict, pooled_spread, verdicts

# %% [markdown]
# ## One place for every decision
#
# > **In short.** A training run is a function of its settings. Keep them all in one object, and the run can be named, repeated and compared.
#
# The settings below are the whole list. The command line is made from them, the checkpoint carries them, and the record shows them. What is never varied, such as Adam's two betas, stands where it is used.


# %%
@dataclass
class TrainConfig:
    """Everything that decides a training run; each field is an option of the command line."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    layers: int = 3
    """Encoder layers, and as many decoder layers."""
    d_model: int = 256
    """Width of the vectors."""
    d_ff: int = 1024
    """Width inside the feed-forward layers."""
    heads: int = 8
    """Attention heads."""
    vocab: int = 8192
    """Pieces of the joint BPE vocabulary."""
    norm_first: bool = True
    """Pre-norm; the paper is post-norm."""
    tie: Literal["none", "decoder", "all"] = "all"
    """Which embedding tables share storage with the generator."""
    embedding_init: Literal["scaled", "xavier"] = "scaled"
    """Spread of the embedding tables at the start: 1/√d_model, or Xavier's."""
    dropout: float = 0.2
    """Dropout everywhere, attention weights included."""
    smoothing: float = 0.1
    """Label smoothing's epsilon."""
    bpe_dropout: float = 0.0
    """Chance that BPE skips a merge in training: words fall into other pieces each epoch."""
    r_drop: float = 0.0
    """Weight of R-Drop: two passes with different dropout have to agree. Twice the work."""
    epochs: int = 18
    """Passes over the training split."""
    max_tokens: int = 2048
    """Tokens in a batch on either side, padding counted."""
    accumulate: int = 1
    """Batches in an optimizer step, for each process."""
    optimizer: Literal["adam", "muon"] = "adam"
    """Adam for all weights, or Muon for the layers' matrices and Adam for the rest."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """How the learning rate falls after its warm-up."""
    lr: float = 2e-3
    """Peak learning rate."""
    muon_lr: float = 0.02
    """Muon's peak learning rate; the same schedule."""
    warmup: int = 400
    """Steps until the peak."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 1
    """Decides the weights' start, dropout and the batches' order."""
    average: int = 5
    """How many epochs' last weights are averaged at the end; kept if validation BLEU gains."""
    beam: int = 5
    """Beam of the final scores; 1 is greedy decoding."""
    alpha: float = 0.6
    """Length penalty of the final scores."""
    path: Literal["fast", "textbook"] = "fast"
    """How the step is computed: chapter 8's way, or chapters 1 to 6's. The same numbers."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the products' factors; auto: bf16 where the device has such products. Weights are float32."""
    fused: bool = True
    """The optimizer updates all weights in one kernel."""
    compile: bool = False
    """Let torch.compile rewrite the step; it takes a minute first."""
    step: Literal["auto", "eager", "static", "graphed"] = "auto"
    """eager: any shape; static: few, cut on the device; graphed: static, recorded; auto: see below."""
    deterministic: bool = False
    """On a GPU, only kernels that always give the same bits; else a resumed run agrees nearly."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    save_every: int = 200
    """Steps between two saved states; one is saved after each epoch in any case."""
    tracker: Literal["none", "wandb"] = "none"
    """Also send each epoch's row to Weights & Biases."""
    name: str = "small"
    """The run's folder: runs/NAME."""
    publish: str | None = None
    """Also save the model as models/PUBLISH and the record as results/PUBLISH.json."""


# %% [markdown]
# Four presets cover four needs. `sample` learns our generated corpus on any laptop. `small` suits Multi30k: 29,000 sentence pairs feed a few million parameters, not the paper's 65 million. `narrow` is its little sister, for experiments that need many runs. `base` is the paper's own model, for whoever has the GPU; only its warm-up is shorter, or training would be over before.

# %%
PRESETS: dict[str, TrainConfig] = {
    "sample": TrainConfig(
        corpus="sample",
        layers=2,
        d_model=128,
        d_ff=256,
        heads=4,
        vocab=1000,
        dropout=0.0,
        epochs=10,
        max_tokens=1024,
        lr=2e-3,
        warmup=200,
        average=0,
        beam=1,
        precision="float32",  # on every machine: whether it has 16-bit products mustn't matter
        name="sample",
    ),
    "narrow": TrainConfig(
        layers=2,
        d_model=128,
        d_ff=256,
        heads=4,
        vocab=4096,
        dropout=0.1,
        epochs=5,
        lr=3e-3,
        warmup=300,
        average=3,
        name="narrow",
    ),
    "small": TrainConfig(),
    "base": TrainConfig(
        layers=6,
        d_model=512,
        d_ff=2048,
        norm_first=False,
        dropout=0.1,
        schedule="inverse_sqrt",
        lr=7e-4,
        warmup=800,  # of some 2,500 steps; the paper's 4,000 are of 100,000
        max_tokens=4096,
        epochs=20,
        name="base",
    ),
}


# %%
def build_model(config: TrainConfig, vocab: int) -> EncoderDecoder:
    """The model of `config` over `vocab` joint pieces, initialised from the global seed."""
    model = make_model(
        vocab,
        vocab,
        N=config.layers,
        d_model=config.d_model,
        d_ff=config.d_ff,
        h=config.heads,
        dropout=config.dropout,
        norm_first=config.norm_first,
        tie=config.tie,
    )
    if config.embedding_init == "xavier":
        for embed in (model.src_embed, model.tgt_embed):
            nn.init.xavier_uniform_(embed[0].lut.weight)
    return model


# %% [markdown]
# **Predict.** Which of the four is the largest, and how far apart are they?

# %%
table = []
for name, preset in PRESETS.items():
    with torch.device("meta"):  # shapes without storage: counting needs no memory
        size = sum(p.numel() for p in build_model(preset, preset.vocab).parameters())
    table.append(
        {"preset": name, "layers": f"{preset.layers}+{preset.layers}", "d_model": preset.d_model}
    )
    table[-1] |= {"d_ff": preset.d_ff, "heads": preset.heads, "vocabulary": preset.vocab}
    table[-1] |= {"parameters": f"{size:,}"}
pd.DataFrame(table).set_index("preset")

# %% [markdown]
# ## A device, whatever there is
#
# > **In short.** Ask for the best device; fall back to the one that is always there.


# %%
def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" takes a GPU where there is one, each process its own.

    Raises ValueError for a device that this machine lacks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU: use --device cpu or auto")
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # torchrun numbers its processes
    return device


# %%
assert pick_device("cpu") == torch.device("cpu")
assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")

try:
    pick_device("a toaster")
except ValueError as error:
    print(error)

# %% [markdown]
# **Pitfall.** *No way without a GPU.* A training script that calls `torch.cuda.set_device` first and asks later runs on its author's machine and on no other. The mistake shows at once where there is no GPU: the script dies before its first batch. Our check: every function here takes its device as a value, and this notebook, which CI runs on a CPU, trains further down.

# %% [markdown]
# ## Several processes, one training
#
# > **In short.** Each process has the whole model and computes its share of the step. The gradients are averaged, so all take the same step and stay the same.
#
# A process knows its number and how many there are: `Ranks`, in [`scripts/engine/ranks.py`](../scripts/engine/ranks.py). It takes its share of the batches (`share`), and hears what the others have (`gather`, `totals`). Alone it is number 0 of 1, and then each operation does nothing; so the rest of the chapter is written once, for one process and for many.


# %%
assert ALONE.share("abc") == list("abc") and ALONE.totals(1, 2.5) == [1, 2.5]
shares = [Ranks(rank, 3).share(range(8)) for rank in range(3)]
assert sorted(sum(shares, [])) == list(range(8)) and max(map(len, shares)) == 3

# %% [markdown]
# ## From a corpus to batches
#
# > **In short.** Read, learn the vocabulary on the training split alone, encode. Then plan each epoch's batches from the settings and the epoch's number, and from nothing that happened before.
#
# The plan matters more than it seems. If the order of batches came from a random generator that has been running since the start, a resumed run would meet other batches than the uninterrupted one. Here epoch 7 has the same plan whoever asks, and whenever.


# %%
@dataclass
class TrainingData:
    """A corpus, encoded: what a training reads."""

    corpus: dict[str, list[tuple[str, str]]]
    tokenizer: BPETokenizer
    train: list[Example]
    val: list[Example]


# %%
def prepare(config: TrainConfig) -> TrainingData:
    """Read the corpus, learn the BPE on its training split, and encode train and validation."""
    corpus = load_corpus(config.corpus)
    lines = (line for pair in corpus["train"] for line in pair)
    tokenizer = BPETokenizer.train(lines, config.vocab)
    train, val = (encode_pairs(corpus[split], tokenizer) for split in ("train", "val"))
    return TrainingData(corpus, tokenizer, train, val)


# %%
def epoch_plan(
    config: TrainConfig, data: TrainingData, epoch: int, world: int = 1
) -> list[list[list[int]]]:
    """The optimizer steps of one epoch, each a list of `accumulate` × `world` batches of indices.

    It depends on the settings and the epoch alone: a resumed run meets the same. The batches of a step
    are of similar size, so that `world` processes that share them wait little for each other.
    """
    rng = random.Random(f"{config.seed}:{epoch}")
    if config.step in ("static", "graphed"):
        widths = static_lengths(data.train)
        batches = static_batches(data.train, widths, config.max_tokens, rng)
    else:
        batches = token_batches(data.train, config.max_tokens, rng)
    together = config.accumulate * world
    if together == 1:
        return [[batch] for batch in batches]

    def work(batch: list[int]) -> int:
        return sum(len(data.train[i].src) + len(data.train[i].tgt) for i in batch)

    batches.sort(key=work)
    while len(batches) % together:  # the largest is halved until no step lacks a batch
        largest = batches.pop()
        half = len(largest) // 2
        for part in (largest[:half], largest[half:]):
            bisect.insort(batches, part, key=work)
    steps = [batches[at : at + together] for at in range(0, len(batches), together)]
    rng.shuffle(steps)
    return steps


# %%
def batches_of(
    examples: Sequence[Example], plan: list[list[int]], device: torch.device
) -> Iterator[Batch]:
    """The planned batches, padded and moved to `device` one by one."""
    for indices in plan:
        yield make_batch([examples[i] for i in indices]).to(device)


# %%
sample = PRESETS["sample"]
data = prepare(sample)

first, again, second = (epoch_plan(sample, data, epoch) for epoch in (1, 1, 2))
assert first == again  # the same epoch, the same plan
assert first != second  # another epoch, another order
shared = epoch_plan(sample, data, 1, world=2)  # two processes, a batch each
for plan in (second, shared):
    assert sorted(i for step in plan for batch in step for i in batch) == list(
        range(len(data.train))
    )
assert {len(step) for step in shared} == {2}

print(f"{len(data.train):,} training pairs in {len(first)} steps an epoch")

# %% [markdown]
# ### Other pieces each time: BPE-dropout
#
# > **In short.** A word that always falls into the same pieces teaches the model nothing about its parts. Skip some merges at random, and it meets the same word in many spellings.
#
# BPE applies its merges in the order in which it learned them. BPE-dropout (Provilkov et al. 2020) skips each possible merge with probability p, in training alone. With p = 0 it is BPE, which gives the check: the same pieces as SentencePiece, for every sentence.


# %%
class MergeDropout:
    """BPE that skips merges at random (Provilkov et al. 2020, algorithm 1), over a tokenizer's pieces."""

    def __init__(self, tokenizer: BPETokenizer):
        processor = tokenizer.processor
        pieces = [processor.id_to_piece(i) for i in range(len(tokenizer))]
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        # SentencePiece scores a merged piece by the order in which it was learned, 0, −1, −2, …
        self.scores = {piece: processor.get_score(i) for i, piece in enumerate(pieces)}

    def word(self, word: str, p: float, rng: random.Random) -> list[str]:
        """One word, its "▁" included, as pieces."""
        pieces = list(word)
        while True:
            best, at = -math.inf, -1
            for i in range(len(pieces) - 1):
                score = self.scores.get(pieces[i] + pieces[i + 1], -math.inf)
                if score > best and (p == 0 or rng.random() >= p):
                    best, at = score, i
            if at < 0:
                return pieces
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]

    def encode(self, pieces: Iterable[str], p: float, rng: random.Random) -> list[int]:
        """A sentence, given in any pieces, to ids without bos and eos."""
        words = "".join(pieces).replace("▁", " ▁").split(" ")[1:]
        return [self.ids.get(piece, UNK) for w in words for piece in self.word(w, p, rng)]


# %%
def epoch_examples(config: TrainConfig, data: TrainingData, epoch: int) -> list[Example]:
    """The training split as this epoch sees it: with BPE-dropout in other pieces than the last."""
    if config.bpe_dropout == 0:
        return data.train
    rng = random.Random(f"pieces:{config.seed}:{epoch}")
    dropout, cut = MergeDropout(data.tokenizer), data.tokenizer.pieces
    examples = []
    for source, target in data.corpus["train"]:
        src, tgt = (dropout.encode(cut(text), config.bpe_dropout, rng) for text in (source, target))
        # A caption that falls into too many pieces keeps its end.
        examples.append(Example([*src[: MAX_LEN - 1], EOS], [BOS, *tgt[: MAX_LEN - 1], EOS]))
    return examples


# %%
merges, rng = MergeDropout(data.tokenizer), random.Random(0)
for pair in data.corpus["train"][:500]:
    for text in pair:
        assert merges.encode(data.tokenizer.pieces(text), 0.0, rng) == data.tokenizer.encode(text)

word = "▁verkauft"
print("as it is:     ", " ".join(merges.word(word, 0.0, rng)))
for _ in range(3):
    print("with p = 0.3: ", " ".join(merges.word(word, 0.3, rng)))
assert all("".join(merges.word(word, 0.5, rng)) == word for _ in range(100))  # nothing is lost

# %% [markdown]
# ## How fast to learn, and when
#
# > **In short.** Small steps while the model knows nothing, large ones once it has a direction, small ones again to settle.
#
# [Chapter 6](ch06_training.ipynb) derived the paper's schedule, which falls as $1/\sqrt{t}$ and never ends. If the number of steps is known beforehand, one can also come down along a cosine that reaches zero at the end: the last steps are tiny, and the weights settle. Both are here (exercise 6 compares them); $t$ counts optimizer steps from 1.


# %%
def learning_rate(config: TrainConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate at step 1, 2, … as `config` asks for it."""
    if config.schedule == "cosine":
        return lambda step: cosine_rate(step, config.lr, config.warmup, total_steps)
    return lambda step: inverse_sqrt_rate(step, config.lr, config.warmup)


# %%
def schedule_chart(steps: int = 3000) -> alt.Chart:
    """Both schedules of `TrainConfig`, with the small preset's peak and warm-up."""
    rows = []
    for schedule in ("cosine", "inverse_sqrt"):
        lr_at = learning_rate(replace(PRESETS["small"], schedule=schedule), steps)
        for step in range(1, steps + 1, 20):
            rows.append({"step": step, "learning rate": lr_at(step), "schedule": schedule})
    return titled(
        lines(pd.DataFrame(rows), "step", "learning rate", "schedule"),
        "Two ways to come down from the same peak",
        "Both warm up for 400 steps. The cosine reaches zero at the last step; the paper's inverse "
        "square root is still at more than a third of its peak there.",
    )


lr_at = learning_rate(PRESETS["small"], 3000)
assert lr_at(400) == PRESETS["small"].lr == max(map(lr_at, range(1, 3001)))
assert lr_at(3000) < 1e-3 * lr_at(400)
schedule_chart()

# %% [markdown]
# ### Which way to step: Adam, or Muon
#
# Adam (§5.3) scales each weight's step by that weight's own history. It doesn't know that the weights of a layer form a matrix. Muon (Jordan et al. 2024) does: it takes the mean gradient as a matrix, and makes all its singular values about 1, so that the step goes equally far in every direction that the gradient has, the rare ones included. That is for the matrices *inside* the layers; embedding tables, biases and norms stay with Adam.
#
# A polynomial iteration (Newton and Schulz's) pushes all singular values towards 1 at once, with products alone. It is content with "about 1", so 16 bits do. Both optimizers are in [`scripts/engine/optimizers.py`](../scripts/engine/optimizers.py). `ActAsOne` lets the two act as one, since a step calls one optimizer.

# %% [markdown]
# What Muon does to a gradient with singular values from 1 down to 1/1000:

# %%
torch.manual_seed(0)
matrix = nn.Parameter(torch.zeros(32, 32))
left, right = (torch.linalg.qr(torch.randn(32, 32)).Q for _ in range(2))
matrix.grad = left @ torch.diag(torch.logspace(0, -3, 32)) @ right
Muon([matrix], lr=1.0).step()
stretched = torch.linalg.svdvals(matrix.detach())
assert stretched.max() < 1.5 and (stretched > 0.5).sum() >= 24  # all but the smallest are near 1

model = build_model(replace(sample, layers=1), len(data.tokenizer))
groups = make_optimizer(replace(sample, optimizer="muon"), model).param_groups
by_muon, by_adam = (sum(p.numel() for p in group["params"]) for group in groups)
assert by_muon + by_adam == sum(p.numel() for p in model.parameters())
print(f"Muon steps {by_muon:,} weights, Adam {by_adam:,}")

# %% [markdown]
# ## How a step is computed
#
# > **In short.** Path, precision, compiling and R-Drop decide one function, a batch's loss. The kind of step decides who calls it.
#
# [Chapter 8](ch08_going_fast.ipynb) made a training step faster by more than half without changing what it computes. A run takes that way unless `--path textbook` asks for the plain one.


# %% [markdown]
# Four more choices are made here, each an option:
#
# - **Precision.** Products of bfloat16 numbers, which have float32's range and three good digits, are several times faster where the device has instructions for them: most GPUs of today, few CPUs. `--precision auto` asks; what it decides is part of the run, so that a resume on another machine can't change it unnoticed. Weights, sums and losses stay in float32. On a GPU `torch.autocast` does this, on a CPU chapter 8's switch `half`.
# - **`--step`** says where batches come from and who launches the kernels: `eager`, any shape, one kernel at a time; `static`, few shapes, cut out of a corpus on the device; `graphed`, the same recorded and replayed ([chapter 8](ch08_going_fast.ipynb)). `auto` takes `graphed` on a GPU, and `eager` on a CPU, with several processes, BPE-dropout or compiling. Few shapes are other batches, so a run keeps its kind.
# - **`--compile true`** hands the loss to torch.compile, which fuses small operations. It needs a minute first, and shapes that don't depend on the data; so it takes the static switches of chapter 8.
# - **R-Drop** (Wu, Li et al. 2021). Two passes over the same batch drop different units and give two distributions $p_1, p_2$ for each word. Both are trained on the word, and to agree:
#
# $$L = \tfrac12 (\mathrm{CE}_1 + \mathrm{CE}_2) + \tfrac{\alpha}{4}\,\big(\mathrm{KL}(p_1\|p_2) + \mathrm{KL}(p_2\|p_1)\big)$$
#
# A step then costs twice as much. Without dropout the two passes are the same, and R-Drop must be the plain loss: that is its check.


# %%
def r_drop_loss(
    model: EncoderDecoder,
    batch: Batch,
    criterion: LabelSmoothing,
    weight: float,
    rows_of: Callable[..., tuple[Tensor, Tensor]] = target_rows,
) -> tuple[Tensor, Tensor]:
    """The mean loss of two passes, and their disagreement (Wu, Li et al. 2021, equations 1 to 4).

    Half of the paper's sum, so that it compares with `batch_loss`: ½ (CE₁ + CE₂) and weight/4 times
    KL(p₁‖p₂) + KL(p₂‖p₁), which is Σ (p₁ − p₂)(log p₁ − log p₂).
    """
    rows = [rows_of(model, batch, criterion) for _ in range(2)]  # other masks, other rows (N, D)
    labels = rows[0][1]  # (N,)
    logits = [model.generator(x) for x, _ in rows]  # (N, V) each
    wide = [z.float() if z.dtype == torch.bfloat16 else z for z in logits]
    log_probs = [z.log_softmax(dim=-1) for z in wide]  # (N, V) each
    losses, nlls = zip(*(criterion(one, labels) for one in log_probs), strict=True)
    first, second = log_probs
    apart = ((first.exp() - second.exp()) * (first - second)).sum(dim=-1)  # (N,)
    apart = apart.masked_fill(labels == criterion.padding_idx, 0.0).sum()
    return sum(losses) / 2 + weight / 4 * apart, sum(nlls) / 2


# %%
OLD_KERNELS = torch.__version__ < "2.10"  # compared as versions


def resolved(config: TrainConfig, device: torch.device, world: int = 1) -> TrainConfig:
    """`config` with its precision and kind of step decided: what a run is, what its record says.

    A recording holds one process's whole step, so several processes don't take it. Batches of few
    shapes know of no BPE-dropout, which makes other lengths each epoch. Raises ValueError for those.
    """
    step = config.step
    alone = world == 1 and not config.compile
    if step == "auto":
        few = device.type == "cuda" and alone and config.fused and not config.bpe_dropout
        # Several batches in a step come in too many sequences to record; and before 2.10 PyTorch's
        # deterministic kernels can't be recorded.
        records = config.accumulate == 1 and not (config.deterministic and OLD_KERNELS)
        step = ("graphed" if records else "static") if few else "eager"
    if step == "graphed" and not (alone and device.type == "cuda" and config.fused):
        raise ValueError("--step graphed is for one process on a GPU, --fused and not --compile")
    if step != "eager" and config.bpe_dropout:
        raise ValueError(f"--step {step} can't be had with --bpe_dropout: use --step eager")
    return replace(config, precision=precision_on(config, device), step=step)


def precision_on(config: TrainConfig, device: torch.device) -> str:
    """The precision of the products' factors: what `config` asks for, or what suits the device."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if multiplies_bf16(device) else "float32"


@cache  # each validation asks for its function anew, and compiling takes a minute
def compiled(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """`function` with these arguments, rewritten by torch.compile: one object, whoever asks."""
    return torch.compile(partial(function, **fixed), dynamic=True)


def loss_function_of(
    config: TrainConfig, device: torch.device, training: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """How the run computes a batch's loss: its path, its precision, compiled or not, R-Drop or not.

    Without dropout R-Drop has nothing to compare, so validation leaves it out.
    """
    half = precision_on(config, device) == "bf16"
    switches = switches_for(device, half)
    if config.compile or config.step in ("static", "graphed"):  # no rows by the data's number
        switches = STATIC
    if config.path == "textbook":
        switches = PLAIN
    function, fixed = (
        (batch_loss, {}) if config.path == "textbook" else (fast_loss, {"how": switches})
    )
    if config.r_drop and training:
        rows_of = partial(target_rows, how=switches)
        function, fixed = r_drop_loss, {"weight": config.r_drop, "rows_of": rows_of}
    loss_of = compiled(function, **fixed) if config.compile else partial(function, **fixed)
    by_hand = switches.half and not (config.r_drop and training)  # R-Drop asks the plain generator
    return partial(in_bf16, loss_of, device.type) if half and not by_hand else loss_of


def in_bf16(loss_of: Callable[..., tuple[Tensor, Tensor]], kind: str, *given: Any) -> Any:
    """`loss_of(*given)` with products in bfloat16 on a device of this kind; sums stay in float32."""
    with torch.autocast(kind, torch.bfloat16):
        return loss_of(*given)


# %%
torch.manual_seed(0)
with torch.random.fork_rng():
    model = build_model(replace(sample, dropout=0.0), len(data.tokenizer))
batch = next(batches_of(data.train, epoch_plan(sample, data, 1)[0], torch.device("cpu")))
sums = [
    loss_function_of(replace(sample, path=path), torch.device("cpu"))(
        model, batch, LabelSmoothing()
    )
    for path in ("fast", "textbook")
]
torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=0.0)

agreed = r_drop_loss(model, batch, LabelSmoothing(), weight=5.0)
torch.testing.assert_close(
    agreed, sums[0], rtol=1e-5, atol=0.0
)  # no dropout: nothing to disagree on
half = loss_function_of(replace(sample, precision="bf16"), torch.device("cpu"))
rounded_sums = half(model, batch, LabelSmoothing())
torch.testing.assert_close(
    rounded_sums, sums[0], rtol=2e-2, atol=0.0
)  # three digits in each product
assert rounded_sums[0].dtype == torch.float32

# %% [markdown]
# ## A score to steer by
#
# > **In short.** The loss asks whether the model knows the next word of *our* sentence. BLEU asks whether *its own* sentence is any good. We keep the model with the best BLEU.
#
# Translating is the job, so validation translates. `decode_rows` sorts the sentences by length, so that a batch holds equals and little padding, runs a search on each batch, and puts the answers back in order. Here the search is greedy; [chapter 10](ch10_decoding_and_bleu.ipynb) hands it others.


# %%
@dataclass
class Trained:
    """A model with what it takes to use it."""

    model: EncoderDecoder
    tokenizer: BPETokenizer
    config: TrainConfig

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return next(self.model.parameters()).device


# %%
def decode_rows(
    trained: Trained,
    rows: Sequence[Sequence[int]],
    search: Callable[[EncoderDecoder, Tensor, Tensor, int], Sequence[Sequence[int]]],
    batch_size: int = 64,
) -> list[str]:
    """Encoded sources to texts, in their order, by `search` over batches of similar length.

    `search` takes (model, src (B, S), src_mask (B, 1, S), max_len) and gives each source's ids. What
    holds no token but eos becomes the empty text, without asking the model.
    """
    order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: len(rows[i]))
    out = [""] * len(rows)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        src = pad_rows([rows[i] for i in chosen]).to(trained.device)  # (B, S)
        limit = min(MAX_LEN, 2 * src.size(1) + 10)  # a caption grows little in translation
        found = search(trained.model, src, padding_mask(src), limit)
        for i, ids in zip(chosen, found, strict=True):
            out[i] = trained.tokenizer.decode(ids)
    return out


# %% [markdown]
# While it trains, a model is judged by greedy decoding, which is fast. Its final score comes from **beam search**: keep the K likeliest unfinished translations at each step, not one. [Chapter 10](ch10_decoding_and_bleu.ipynb) explains it by hand, draws its tree and proves it against brute force; here is the code, since we need it to report.


# %%
@torch.no_grad()
def next_log_probs(
    model: EncoderDecoder, memory: Tensor, src_mask: Tensor | None, ids: Tensor
) -> Tensor:
    """log p(next token | prefix): memory (B, S, D), ids (B, T) from bos on, to (B, V)."""
    mask = subsequent_mask(ids.size(1), ids.device)  # (1, T, T)
    last = model.decode(memory, src_mask, ids, mask)[:, -1]  # (B, D)
    return model.generator(last).log_softmax(dim=-1)  # (B, V)


# %%
@dataclass(frozen=True)
class Hypothesis:
    """One candidate translation: its ids without bos and eos, and its summed log-probability.

    `length` counts the tokens that were scored, eos included.
    """

    ids: tuple[int, ...]
    log_prob: float
    length: int

    def score(self, alpha: float) -> float:
        """log-probability / length^α: with α = 0 short outputs win, with α = 1 it is the mean."""
        return self.log_prob / self.length**alpha


# %%
def hypothesis(ids: Sequence[int], log_prob: float) -> Hypothesis:
    """A Hypothesis from scored ids, which may end in eos."""
    ended = bool(ids) and ids[-1] == EOS
    return Hypothesis(tuple(ids[:-1] if ended else ids), log_prob, len(ids))


# %%
@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every part is as it was, even after an error."""
    was_training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in was_training:
            part.training = True


# %%
def sift(
    candidates: Iterable[tuple[float, int, int]], beam: int, final: bool
) -> tuple[list[tuple[float, int, int]], list[tuple[float, int, int]]]:
    """Part one sentence's candidates, best first, into those that end and the `beam` that go on.

    A candidate is (log-probability, number of the prefix it continues, token). Only the `beam` best
    may end. At the `final` step all of those do. Where too few go on, impossible ones fill the room.
    """
    ended, going = [], []
    for rank, (log_prob, origin, token) in enumerate(candidates):
        if token == EOS or final:
            if rank < beam and log_prob > -math.inf:
                ended.append((log_prob, origin, token))
        elif len(going) < beam:
            going.append((log_prob, origin, token))
    return ended, going + [(-math.inf, 0, PAD)] * (beam - len(going))


# %%
@torch.no_grad()
def beam_search(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    beam: int = 4,
    alpha: float = 0.6,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each source, best first: src (B, S) to B lists of up to `beam`.

    At each step every unfinished prefix is continued by every token, and the `beam` best
    continuations of each sentence are kept. One that ends is set aside with its score. A sentence
    is done when `beam` hypotheses have ended, so that a beam of 1 is greedy decoding. Dropout is off
    while it runs. `alpha` is the length penalty (after Wu et al. 2016; §6.1 uses a beam of 4 and 0.6).
    """
    if beam < 1:
        raise ValueError(f"a beam holds at least 1 hypothesis, not {beam}")
    with dropout_off(model):
        B, K, device = src.size(0), beam, src.device
        memory = model.encode(src, src_mask).repeat_interleave(K, dim=0)  # (B·K, S, D)
        if src_mask is not None:
            src_mask = src_mask.repeat_interleave(K, dim=0)  # (B·K, 1, S)
        ids = src.new_full((B * K, 1), BOS)  # (B·K, 1)
        scores = memory.new_full((B, K), -torch.inf)  # (B, K)
        scores[:, 0] = 0.0  # all K prefixes are alike at first: continue one of them
        finished: list[list[Hypothesis]] = [[] for _ in range(B)]
        for step in range(1, max_len + 1):
            log_probs = next_log_probs(model, memory, src_mask, ids)  # (B·K, V)
            V = log_probs.size(-1)
            total = scores.unsqueeze(-1) + log_probs.view(B, K, V)  # (B, K, V)
            # 2K candidates: even if K of them end, K unfinished ones remain.
            best, flat = total.view(B, -1).topk(min(2 * K, K * V), dim=-1)  # (B, 2K) each
            rows = zip(best.tolist(), (flat // V).tolist(), (flat % V).tolist(), strict=True)
            kept = []
            for b, row in enumerate(rows):
                ended, going = sift(zip(*row, strict=True), K, final=step == max_len)
                if len(finished[b]) < K:  # else this sentence is done
                    for log_prob, k, token in ended:
                        prefix = ids[b * K + k, 1:].tolist()
                        finished[b].append(hypothesis([*prefix, token], log_prob))
                kept += [(log_prob, b * K + k, token) for log_prob, k, token in going]
            if all(len(found) >= K for found in finished):
                break
            log_prob, origin, token = zip(*kept, strict=True)  # B·K each
            chosen = torch.tensor(origin, device=device)  # (B·K,)
            ids = torch.cat((ids[chosen], ids.new_tensor(token).unsqueeze(1)), dim=1)
            scores = scores.new_tensor(log_prob).view(B, K)
    return [sorted(found, key=lambda h: -h.score(alpha))[:beam] for found in finished]


# %%
def searcher(
    beam: int = 1, alpha: float = 0.6
) -> Callable[[EncoderDecoder, Tensor, Tensor, int], list[Sequence[int]]]:
    """Greedy decoding, or the best of a beam, as `decode_rows` wants it."""

    def search(model, src, src_mask, max_len):
        if beam == 1:
            return greedy_decode(model, src, src_mask, max_len).tolist()
        found = beam_search(model, src, src_mask, max_len, beam, alpha)
        return [hypotheses[0].ids if hypotheses else () for hypotheses in found]

    return search


# %%
def plain_translate(
    trained: Trained, sentences: Sequence[str], beam: int = 1, alpha: float = 0.6
) -> list[str]:
    """Translations of `sentences`, in their order, greedy or by beam search; long ones are cut."""
    rows = [source_ids(sentence, trained.tokenizer) for sentence in sentences]
    size = 64 if beam == 1 else 32
    if trained.device.type == "cuda":  # its time goes into launches: as many for a large batch
        size = 1024 // beam
    return decode_rows(trained, rows, searcher(beam, alpha), size)


# %% [markdown]
# BLEU itself is sacreBLEU's: whole texts in, cased, with its own tokenisation ("13a"), and a signature that says so. Chapter 10 takes it apart. A BLEU without its signature is a number without a unit.


# %%
def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> Any:
    """sacreBLEU, cased and 13a unless `options` say otherwise: `.score` and its `.signature`."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(**options)
    result = metric.corpus_score(list(hypotheses), [list(references)])
    result.signature = str(metric.get_signature())
    return result


# %%
def validate(
    trained: Trained, data: TrainingData, device: torch.device, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Perplexity (teacher-forced) and greedy BLEU on the validation split, shared among `ranks`."""
    plan = ranks.share(token_batches(data.val, trained.config.max_tokens))
    criterion = LabelSmoothing(trained.config.smoothing)
    loss_of = loss_function_of(trained.config, device)
    report = run_epoch(
        batches_of(data.val, plan, device), trained.model, criterion, loss_of=loss_of
    )
    whole = over_ranks(report, ranks)
    sources, references = zip(*data.corpus["val"], strict=True)
    translations = ranks.woven(plain_translate(trained, ranks.share(sources)))
    bleu = corpus_bleu(translations, references).score
    return {"val_loss": whole.loss_per_token, "val_ppl": whole.perplexity, "val_bleu": bleu}


def over_ranks(report: EpochReport, ranks: Ranks) -> EpochReport:
    """The report over all processes: sums of losses and of tokens, so that no token counts twice."""
    loss, nll, tokens = ranks.totals(report.loss, report.nll, report.tokens)
    return EpochReport(loss, nll, int(tokens), report.grad_norms)


# %%
references = [english for _, english in data.corpus["val"][:50]]
perfect = corpus_bleu(references, references)
shouted = corpus_bleu([line.upper() for line in references], references)
assert perfect.score > 99.99  # a text against itself
assert shouted.score < 5  # cased: case counts
assert corpus_bleu([line.upper() for line in references], references, lowercase=True).score > 99.99
print(perfect.signature)

# %% [markdown]
# **Pitfall.** *Choosing the checkpoint by validation loss.* The loss asks about the next word of a perfect prefix, and it punishes a confident mistake without limit. A translation is built on the model's own prefix, and a confident model can translate well. So the two need not be at their best in the same epoch. Steer by the measure that you will report. The log of every run has both columns: compare.

# %% [markdown]
# ## What is kept
#
# > **In short.** A model is weights, a tokenizer and settings. Keep the three together, write each file whole or not at all, and never store code.
#
# Weights go into safetensors: a header of names and shapes, then raw numbers. Nothing in it can run, unlike a pickle. Tied tables are one tensor and are stored once. They are rounded to 16 bits, which halves the file; so every test score on record is measured on the model *as loaded from its file*.
#
# [`scripts/engine/checkpoints.py`](../scripts/engine/checkpoints.py) holds the plumbing. It writes to a second name and renames, so that a crash in the middle leaves the old file, not half of the new one.

# %%
STORED_DTYPE = torch.float16  # half the size; every score we report is of the weights as stored


# %%
def save_model(folder: Path, trained: Trained) -> None:
    """Write model.safetensors, tokenizer.model and config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(asdict(trained.config), indent=1)
    write_whole(folder / "config.json", (config + "\n").encode())
    write_whole(folder / "tokenizer.model", trained.tokenizer.model)
    stored = {name: t.to(STORED_DTYPE) for name, t in weights(trained.model).items()}
    save_tensors(folder / "model.safetensors", stored, {})


# %%
def load_model(folder: Path, device: torch.device | str = "cpu") -> Trained:
    """What `save_model` wrote, in float32 and ready to translate.

    Raises FileNotFoundError or ValueError, with the remedy, where a file is missing or unfit.
    """
    folder = Path(folder)
    missing = [n for n in ("config.json", "tokenizer.model") if not (folder / n).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} holds no {missing[0]}: train a model, or name another")
    try:
        config = TrainConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a TrainConfig: {error}") from error
    try:
        tokenizer = BPETokenizer.load(folder / "tokenizer.model")
        model = build_model(config, len(tokenizer))
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder} can't be loaded ({reason}): train it again") from error
    path = folder / "model.safetensors"
    load_weights(model, load_tensors(path)[0], path)
    return Trained(model.to(device).eval(), tokenizer, config)


# %%
torch.manual_seed(0)
tiny = replace(sample, layers=1, d_model=32, d_ff=64, heads=2, epochs=2, warmup=20, device="cpu")
untrained = Trained(build_model(tiny, len(data.tokenizer)).eval(), data.tokenizer, tiny)

with tempfile.TemporaryDirectory() as folder:
    save_model(Path(folder), untrained)
    loaded = load_model(Path(folder))
    # Truncate the file as a full disk would, and look at what the reader is told.
    path = Path(folder, "model.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    try:
        load_model(Path(folder))
    except ValueError as error:
        print(str(error).replace(folder, "FOLDER"))

assert loaded.config == tiny
assert loaded.model.tgt_embed[0].lut.weight is loaded.model.generator.proj.weight  # still tied
for before, after in zip(untrained.model.parameters(), loaded.model.parameters(), strict=True):
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-6)  # 16 bits: three good digits

# %% [markdown]
# ### Averaging checkpoints
#
# The paper averages the weights of its last 5 or 20 checkpoints (§6.1). The idea: late in training the weights wander around a good point, and the mean of several stops is nearer to it than each of them. Averaging copies of one checkpoint must change nothing, which makes a good check.


# %%
def average_checkpoints(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The mean, weight by weight, of several saved models, in float32 (§6.1)."""
    loaded = [load_tensors(path)[0] for path in paths]
    return {
        name: torch.stack([tensors[name].float() for tensors in loaded]).mean(dim=0)
        for name in loaded[0]
    }


# %%
with tempfile.TemporaryDirectory() as folder:
    paths = [Path(folder, f"{i}.safetensors") for i in range(3)]
    numbers = [torch.full((2,), float(i)) for i in range(3)]
    for path, number in zip(paths, numbers, strict=True):
        save_tensors(path, {"weight": number}, {})
    assert average_checkpoints([paths[1]] * 4)["weight"].equal(numbers[1])  # identity
    assert average_checkpoints(paths)["weight"].equal(torch.tensor([1.0, 1.0]))  # the mean

# %% [markdown]
# ## The run
#
# > **In short.** For each epoch: train, validate, log, and keep the model if it is the best so far. On the way, save everything that the next step depends on. The run itself is short; what surrounds it is what makes it worth trusting.
#
# ### A step that several processes share
#
# Each process computes the losses of its own batches. What is wanted is the mean over *all* tokens of the step:
#
# $$\nabla = \frac{\sum_r \nabla L_r}{\sum_r n_r}$$
#
# with $L_r$ the summed loss of process $r$ and $n_r$ its tokens. PyTorch's `DistributedDataParallel` (DDP) replaces each gradient by its mean over the processes, while the backward pass is still running. So each divides its sum by $\frac{1}{R}\sum_r n_r$ and not by its own $n_r$: the $R$ cancels. Since everybody can compute everybody's plan, everybody knows $\sum_r n_r$ without asking.
#
# **Pitfall.** *The mean of means.* Dividing by the process's own tokens is the obvious thing, and almost right: a token in a small share then counts more than one in a large share. Loss curves look the same. Our test compares two processes with one, in double precision: 20 steps agree to nine digits with our divisor, and don't with the obvious one ([`tests/test_ch09_processes.py`](../tests/test_ch09_processes.py)).
#
# DDP acts when a module's `forward` is called. Our loss calls the model's parts, so we make a module of the loss:


# %%
class StepLoss(nn.Module):
    """A batch's loss as a module around the model, so that DistributedDataParallel can hold it."""

    def __init__(
        self, model: EncoderDecoder, loss_of: Callable[..., Any], criterion: LabelSmoothing
    ):
        super().__init__()
        self.model, self.loss_of, self.criterion = model, loss_of, criterion

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch's two sums."""
        return self.loss_of(self.model, batch, self.criterion)


# %% [markdown]
# **Predict.** Two processes share a step: one has 3 captions, the other 12. How far is the mean of their means from the right gradient, in percent of its length?


# %%
def share_gradient(indices: Sequence[int], per: float) -> Tensor:
    """The gradient, as one vector, of these pairs' summed loss divided by `per`, in double precision."""
    twin = copy.deepcopy(model).double()
    (batch,) = batches_of(data.train, [list(indices)], torch.device("cpu"))
    (batch_loss(twin, batch, LabelSmoothing())[0] / per).backward()
    return torch.cat([p.grad.flatten() for p in twin.parameters()])


pairs = list(range(15))
parts = [pairs[:3], pairs[3:]]
tokens = [sum(len(data.train[i].tgt) - 1 for i in part) for part in parts]
whole_step = share_gradient(pairs, sum(tokens))
ours = sum(share_gradient(part, sum(tokens) / 2) for part in parts) / 2  # DDP takes the mean
obvious = sum(share_gradient(part, n) for part, n in zip(parts, tokens, strict=True)) / 2

torch.testing.assert_close(ours, whole_step, rtol=1e-10, atol=1e-12)
astray = ((obvious - whole_step).norm() / whole_step.norm()).item()
assert astray > 0.05
print(f"tokens {tokens}: the mean of means is {astray:.0%} of the gradient's length astray")

# %% [markdown]
# And the processes have to wait for the slowest. `epoch_plan` sorts batches by their tokens before it puts them together; here is what that saves.


# %%
def waiting(plan: list[list[list[int]]]) -> float:
    """The share of the processes' time spent waiting, if time is tokens: 1 − mean/max, over all steps."""
    work = [
        [sum(len(data.train[i].src) + len(data.train[i].tgt) for i in batch) for batch in step]
        for step in plan
    ]
    return 1 - sum(map(sum, work)) / sum(len(step) * max(step) for step in work)


flat = [batch for step in epoch_plan(sample, data, 1) for batch in step]
as_they_come = [flat[at : at + 4] for at in range(0, len(flat) - 3, 4)]
by_size = epoch_plan(sample, data, 1, world=4)
print(
    f"4 processes wait {waiting(as_they_come):.1%} of the time as batches come, {waiting(by_size):.1%} by size"
)
assert waiting(by_size) < waiting(as_they_come) / 2

# %% [markdown]
# ### What makes a state complete
#
# A resumed run shall be the run that was never interrupted, to the last bit. So a state holds all that the next step depends on: the weights, the optimizer's two moments for each weight, the count of steps (the learning rate follows from it), the epoch and the step within it (the batches follow from these and the seed), the sums of the epoch's report, and the state of each process's random generator, from which dropout draws. Forget one, and a resumed run goes another way.
#
# On a GPU there is a limit to this. Some of its kernels add up in whatever order their parts are done, and then two runs of the same program differ in the last bit, resumed or not. `--deterministic true` asks PyTorch for kernels that don't; the promise of the last bit is made for CPUs, and for GPUs with that option.
#
# The settings are in it as well. To resume with others would be another run, and is refused. These may differ:


# %%
def identity(config: TrainConfig, ranks: Ranks = ALONE) -> dict[str, Any]:
    """What makes a run the run it is: all settings but where it runs, what it writes and reports."""
    kept = asdict(config)
    for name in ("device", "name", "publish", "tracker", "save_every", "average", "beam", "alpha"):
        del kept[name]
    return kept | {"processes": ranks.world}


# %% [markdown]
# Three things happen to a long run, and each has an answer in [`scripts/engine/checkpoints.py`](../scripts/engine/checkpoints.py):
#
# - **It is killed** (`kill -9`, a power cut). A state is written to a second name, flushed, and renamed: it is there whole or not at all. The steps since the last state are computed again.
# - **A file is spoiled** later, by a disk or a copy that broke off. Each state carries a checksum. Where the newest doesn't fit its own, the one before is used, and you are told.
# - **The disk is full.** The half-written file is removed, the run ends with one line that says so, and all that was saved before is untouched.
#
# And often a run is *asked* to stop: you press Ctrl-C, or a cluster sends SIGTERM and grants some seconds. The handler ([`scripts/engine/signals.py`](../scripts/engine/signals.py)) only makes a note. The step in progress ends, its state is saved, and then the run leaves. (Of several processes one may be asked. It tells the others with the next step, so that nobody has to wait, and all leave after the same one.)


# %% [markdown]
# ### When a number overflows
#
# A learning rate that is too high, a broken batch, a bug: some loss becomes infinite or NaN ("not a number"). If that reaches the weights, all of them are NaN one step later, and so is every later checkpoint. So loss and gradient are looked at *before* a weight moves, as chapter 6's `train_step` does. A GPU skips such a step, and all after it, by itself; the program asks once in 50 steps whether all went well, since each question makes it wait. The error below says where in the run it happened.


# %%
class Diverged(Exception):
    """A loss or a gradient was not finite. Nothing was changed by it."""

    def __init__(self, training: "Training", at: int, what: str):
        saved = saved_states(training.folder)
        good = f"the last good state is {saved[-1]}" if saved else "no state had been saved"
        pairs = [i for batch in training.steps[at] for i in batch]
        number = training.state.steps - training.done + at + 1
        super().__init__(
            f"step {number} (epoch {training.epoch}, step {at + 1} of it, learning rate "
            f"{training.lr_at(number):.3g}): {what}, on training pairs {pairs[:5]} and "
            f"{max(0, len(pairs) - 5)} more; {good}. Try a lower --lr or --clip"
        )


# %% [markdown]
# ### Watching
#
# The bar shows loss, learning rate and tokens a second. Each epoch adds a row to `log.csv`, which pandas reads; on a GPU the row has its load, memory and temperature from GPUtil. A GPU whose load is far below 1 is waiting for the CPU. `--tracker wandb` sends the same rows to Weights & Biases, if you have that package and want it; by default nothing leaves the machine. All of it is in [`scripts/engine/watching.py`](../scripts/engine/watching.py).


# %% [markdown]
# ### The training itself


# %%
EPOCH_WEIGHTS = "epoch-{:03d}.safetensors"  # an epoch's last weights, for averaging


class Training:
    """A run in progress: the model, and all that its next step depends on.

    It looks at what the steps found once in `every` steps: on a GPU that means to wait for it.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        folder: Path,
        resume: bool = False,
        ranks: Ranks = ALONE,
    ):
        torch.manual_seed(config.seed)
        self.device = pick_device(config.device)
        if self.device.index is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a recording is made on the current one
        config = resolved(config, self.device, ranks.world)
        if config.deterministic and self.device.type == "cuda":
            ask_for_determinism()
        self.config, self.data, self.folder, self.ranks = config, data, folder, ranks
        self.model = build_model(config, len(data.tokenizer)).to(self.device)
        self.criterion = LabelSmoothing(config.smoothing)
        self.optimizer = make_optimizer(config, self.model)
        self.state = TrainState()
        self.history: list[dict[str, float]] = []
        self.epoch, self.done = 1, 0  # the epoch in progress, and its steps that are done
        self.report = EpochReport()  # of the epoch in progress, and its time by two clocks
        self.seconds = self.cpu_seconds = 0.0
        self.every = 1 if self.device.type == "cpu" else 50
        self.saved = time.monotonic()  # when the last state was written
        if ranks.world > 1:
            torch.manual_seed(config.seed + ranks.rank)  # the weights are alike, the dropout not
        if resume:
            self.restore()
        total = sum(len(self.plan(epoch)) for epoch in range(1, config.epochs + 1))
        self.lr_at = learning_rate(config, total)
        self.loss_of = loss_function_of(config, self.device, training=True)
        self.poll = Poll(ranks)
        self.take = self.stepper()

    def stepper(self) -> Step:
        """What takes the steps: of the configured kind, over all processes."""
        shared = None
        if self.ranks.world > 1:
            on = [self.device.index] if self.device.type == "cuda" else None
            module = StepLoss(self.model, self.loss_of, self.criterion)
            # The positions' table is a buffer, the same for all: nothing to send about.
            shared = DistributedDataParallel(module, device_ids=on, broadcast_buffers=False)
            self.loss_of = lambda model, batch, criterion: shared(batch)
        # Looked up at each step, so that it can be changed, as the accident below does.
        loss_of: Callable[..., Any] = lambda *given: self.loss_of(*given)  # noqa: E731
        given = (self.model, self.criterion, self.optimizer, loss_of, self.config.clip)
        if self.config.step == "eager":
            take = Step(*given)
        else:
            widths, rows = static_lengths(self.data.train), self.config.max_tokens
            take = KINDS[self.config.step](*given, widths=widths, max_tokens=rows)
        if shared is not None:
            take.without_sync = shared.no_sync
        return take

    @property
    def trained(self) -> Trained:
        """The model as it stands, ready to translate."""
        return Trained(self.model, self.data.tokenizer, self.config)

    def plan(self, epoch: int) -> list[list[list[int]]]:
        """The steps of an epoch for all processes."""
        return epoch_plan(self.config, self.data, epoch, self.ranks.world)

    def train_epoch(self, stop: "StopSignal | None" = None) -> EpochReport:
        """The rest of the current epoch, under a progress bar; `stop` is heeded after each step."""
        plan = self.load()
        self.model.train()
        with epoch_bar(self, len(plan)) as bar:
            while self.done < len(plan):
                start, cpu = time.perf_counter(), time.process_time()
                self.step()
                over, due = self.done == len(plan), self.due()
                if self.done % self.every == 0 or due or over:
                    self.look()
                bar.set_postfix(in_figures(self), refresh=False)  # shown with the next update
                bar.update()
                self.seconds += time.perf_counter() - start
                self.cpu_seconds += time.process_time() - cpu  # a pause doesn't count here
                if due and not over:
                    self.save()
                if stop is not None:
                    self.heed(stop)
        return over_ranks(self.report, self.ranks)

    def due(self) -> bool:
        """Whether to save now. On a GPU steps are short and states large: not before 30 seconds."""
        short = self.device.type != "cpu" and time.monotonic() - self.saved < 30
        return self.done % self.config.save_every == 0 and not short

    def load(self) -> list[list[list[int]]]:
        """Make the current epoch's plan, and hand this process's share of it to the stepper."""
        self.steps = self.plan(self.epoch)
        self.examples = epoch_examples(self.config, self.data, self.epoch)
        # DistributedDataParallel takes the mean over processes; times `world` it is the sum.
        per = [self.labels(step) / self.ranks.world for step in self.steps]
        self.take.load(self.examples, [self.ranks.share(step) for step in self.steps], per)
        return self.steps

    def labels(self, step: list[list[int]]) -> int:
        """The target tokens of these batches."""
        return sum(len(self.examples[i].tgt) - 1 for batch in step for i in batch)

    def step(self) -> None:
        """The next optimizer step: this process's share of the batches, weighed by all labels."""
        step = self.steps[self.done]
        set_rate(self.optimizer, self.lr_at(self.state.steps + 1))
        self.take(self.done)
        self.done += 1
        self.state.steps += 1
        self.state.sentences += sum(map(len, step))
        self.state.tokens += self.labels(step)

    def look(self) -> None:
        """Add what the last steps found to the report. Raises Diverged where one wasn't finite."""
        found = self.take.look()
        for at, figures in enumerate(found, self.done - len(found)):
            if not figures.finite:
                what = f"loss {figures.loss}, gradient's norm {figures.norm}"
                raise Diverged(self, at, what)
            self.report.loss += figures.loss
            self.report.nll += figures.nll
            self.report.tokens += self.labels(self.ranks.share(self.steps[at]))
            self.report.grad_norms.append(figures.norm)

    def end_epoch(self, row: dict[str, float]) -> None:
        """Log an epoch; keep its model if it is the best so far, and the state in any case."""
        best = all(row["val_bleu"] > earlier["val_bleu"] for earlier in self.history)
        self.history.append(row)
        if self.ranks.first:
            if best:
                save_model(self.folder, self.trained)
            if self.config.average:
                path = self.folder / EPOCH_WEIGHTS.format(self.epoch)
                save_tensors(path, weights(self.model), {})
                keep_newest(self.epoch_weights(), self.config.average)
            write_log(self.folder, self.history)
        self.epoch, self.done = self.epoch + 1, 0
        self.report = EpochReport()
        self.seconds = self.cpu_seconds = 0.0
        self.save()

    def epoch_weights(self) -> list[Path]:
        """The weights kept for averaging, oldest epoch first."""
        return sorted(self.folder.glob("epoch-*.safetensors"))

    def heed(self, stop: "StopSignal") -> None:
        """Save and leave where somebody asked to stop: all processes after the same step."""
        if asked := self.poll(stop.number):
            self.save()
            raise Stopped(asked, self.state.steps)

    def save(self) -> None:
        """Write the state, from which `restore` goes on as if nothing had happened."""
        self.look()
        reports = self.ranks.gather(asdict(self.report))
        rngs = self.ranks.gather(rng_states(self.device))
        if not self.ranks.first:
            return
        meta = {
            "epoch": self.epoch,
            "done": self.done,
            "reports": reports,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "state": asdict(self.state),
            "history": self.history,
            "run": identity(self.config, self.ranks),
        }
        save_training(self.folder, self.state.steps, self.model, self.optimizer, rngs, meta)
        self.saved = time.monotonic()

    def restore(self) -> None:
        """Go back to the newest good state. Raises ValueError where that was another run."""
        path, tensors, meta, complaints = newest_state(self.folder)
        for complaint in complaints:
            tqdm.write(f"{complaint}: going on from {path.name} instead")
        wanted = identity(self.config, self.ranks)
        sizes = {"layers", "d_model", "d_ff", "heads", "vocab", "tie"}
        changed = [name for name in wanted if wanted[name] != meta["run"].get(name)]
        if changed and not sizes & set(changed):
            what = "number of processes" if changed[0] == "processes" else f"--{changed[0]}"
            raise ValueError(
                f"{path} was trained with another {what} ({meta['run'].get(changed[0])}): "
                "resume with the same options, or start anew under another --name"
            )
        rngs = restore_training(tensors, path, self.model, self.optimizer)
        set_rng_states(rngs[self.ranks.rank], self.device)
        self.epoch, self.done, self.history = meta["epoch"], meta["done"], meta["history"]
        self.state = TrainState(**meta["state"])
        self.seconds, self.cpu_seconds = meta["seconds"], meta["cpu_seconds"]
        self.report = EpochReport(**meta["reports"][self.ranks.rank])


# %%
def fit(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    resume: bool = False,
    ranks: Ranks = ALONE,
    kind: Callable[..., Training] = Training,
) -> list[dict[str, float]]:
    """Train as `config` says; return the history, a row an epoch. `kind` makes the `Training`.

    `folder` gets the best model (by validation BLEU), the last two states, and the last epochs'
    weights for averaging. With `resume` the run goes on after the last step saved, as if nothing
    had happened. Raises Stopped where somebody asked it to stop, Diverged where a number overflowed.
    """
    if ranks.first and not resume:
        start_anew(folder)
    training = kind(config, data, folder, resume, ranks)
    quiet = replace(config, tracker="none")
    with StopSignal() as stop, tracker_of(config if ranks.first else quiet, folder) as track:
        while training.epoch <= config.epochs:
            report = training.train_epoch(stop)
            row = {
                "epoch": training.epoch,
                "lr": training.lr_at(training.state.steps),
                "train_loss": report.loss_per_token,
                "train_ppl": report.perplexity,
                "grad_norm": sum(report.grad_norms) / len(report.grad_norms),
                "tokens": report.tokens,
                "seconds": training.seconds,
                "cpu_seconds": training.cpu_seconds,
                **gpu_row(training.device),
                **validate(training.trained, data, training.device, ranks),
            }
            if ranks.first:
                tqdm.write(in_words(row, config.epochs))
                track(row)
            training.end_epoch(row)
            training.heed(stop)
        training.poll.answer()  # before the processes part
    return training.history


# %%
def start_anew(folder: Path) -> None:
    """Clear away a finished run's states. Raises ValueError where a run waits to be resumed."""
    try:
        _, _, meta, _ = newest_state(folder)
    except (FileNotFoundError, ValueError):
        pass  # nothing that could be resumed
    else:
        if meta["epoch"] <= meta["run"]["epochs"]:
            raise ValueError(
                f"{folder} holds a run that stopped after step {meta['state']['steps']}: "
                "go on with --resume, or choose another --name"
            )
    for path in (*saved_states(folder), *folder.glob("epoch-*.safetensors")):
        path.unlink()


# %% [markdown]
# ### At the end: the best epoch, or the mean of the last
#
# Two candidates, and validation BLEU decides between them. Averaging pays where the weights still wander: after a constant or slowly falling learning rate. A cosine ends so gently that its last weights differ little.


# %%
def average_if_better(config: TrainConfig, data: TrainingData, folder: Path) -> dict[str, float]:
    """Validation BLEU of the best epoch and of the last epochs' mean; the better one stays saved."""
    trained = load_model(folder, pick_device(config.device))
    _, _, meta, _ = newest_state(folder)
    scores = {"best epoch": max(row["val_bleu"] for row in meta["history"])}
    paths = sorted(folder.glob("epoch-*.safetensors"))[-config.average :]
    if config.average > 1 and len(paths) > 1:
        load_weights(trained.model, average_checkpoints(paths), paths[-1])
        name = f"mean of the last {len(paths)}"
        scores[name] = validate(trained, data, trained.device)["val_bleu"]
        if scores[name] > scores["best epoch"]:
            save_model(folder, trained)
    return {name: round(score, 5) for name, score in scores.items()}


# %% [markdown]
# **Predict.** We train a tiny model for two epochs in one go. Then we train another, lose it before its first epoch is over, and resume from the last state that it saved. How far apart are the two sets of weights?

# %%
# NBVAL_IGNORE_OUTPUT
val = data.corpus["val"][:20]
few = TrainingData({"val": val}, data.tokenizer, data.train[:600], data.val[:20])
tiny = replace(tiny, dropout=0.1)  # so that the state of the random generator matters


with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):  # without the bars
    straight, broken = Path(folder, "straight"), Path(folder, "broken")
    straight.mkdir()
    broken.mkdir()
    history = fit(tiny, few, straight)

    interrupted = Training(replace(tiny, save_every=2), few, broken)
    interrupted.train_epoch()  # saves every second step
    del interrupted  # the power fails before the epoch is over
    resumed = fit(tiny, few, broken, resume=True)

    unbroken, mended = (newest_state(run)[1] for run in (straight, broken))
    try:
        fit(replace(tiny, d_ff=128), few, broken, resume=True)
    except ValueError as error:
        refused = str(error)

# %%
assert unbroken.keys() == mended.keys()
assert all(unbroken[name].equal(mended[name]) for name in unbroken)  # bit for bit
assert resumed[1]["train_loss"] == history[1]["train_loss"] < history[0]["train_loss"]
assert "another configuration" in refused

print(f"{len(unbroken)} tensors, weights and optimizer, the same to the last bit")

# %% [markdown]
# They are the same, bit for bit. This is a strong check: a forgotten random state, a plan that depends on history, a schedule that starts over, each would break it. And it trained on a CPU, where the last bit is promised. The tests go further: they kill a real process ten times at random moments, fill the disk, and send signals ([`tests/test_ch09_recovery.py`](../tests/test_ch09_recovery.py)).
#
# Now two accidents. One bit of the newest state changes; and a loss becomes NaN.

# %%
with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
    training = Training(replace(tiny, save_every=2), few, Path(folder))
    training.train_epoch()
    *_, older, newest = saved_states(Path(folder))
    spoiled = bytearray(newest.read_bytes())
    spoiled[-1000] ^= 1  # one bit
    newest.write_bytes(spoiled)
    found, _, meta, complaints = newest_state(Path(folder))
    assert found == older and meta["done"] < training.done

    before = [p.detach().clone() for p in training.model.parameters()]
    honest = training.loss_of
    training.loss_of = lambda *given: tuple(math.nan * sums for sums in honest(*given))
    training.epoch, training.done = 2, 0
    try:
        training.train_epoch()
    except Diverged as error:
        diverged = str(error)
    assert all(map(torch.equal, before, training.model.parameters()))  # no weight has moved

    print(complaints[0].replace(folder, "FOLDER"))
    print(diverged.replace(folder, "FOLDER"))

# %% [markdown]
# ## On record
#
# > **In short.** A number that nobody can trace is a rumour. Each run leaves a record: command, commit, date, machine, versions, settings, history, scores, and translations to look at.
#
# The test sets are read once, at the end, by the model as loaded from its file. From the record [`scripts/engine/cards.py`](../scripts/engine/cards.py) writes the model's card: data, recipe, scores, and what the model can't do.


# %%
def evaluate(
    trained: Trained, pairs: list[tuple[str, str]], beam: int = 1, alpha: float = 0.6
) -> dict[str, Any]:
    """Translate `pairs`: BLEU, cased and lower-cased, signatures, and the translations."""
    sources, references = zip(*pairs, strict=True)
    hypotheses = plain_translate(trained, sources, beam, alpha)
    cased = corpus_bleu(hypotheses, references)
    lower = corpus_bleu(hypotheses, references, lowercase=True)
    return {
        "search": f"beam {beam}, alpha {alpha:g}" if beam > 1 else "greedy",
        "bleu": round(cased.score, 2),
        "signature": cased.signature,
        "bleu_lowercased": round(lower.score, 2),
        "signature_lowercased": lower.signature,
        "translations": hypotheses,
    }


def evaluate_both(
    trained: Trained, pairs: list[tuple[str, str]], beam: int, alpha: float
) -> dict[str, Any]:
    """`evaluate` by the search asked for, with greedy BLEU beside it."""
    scores = evaluate(trained, pairs, beam, alpha)
    greedy = evaluate(trained, pairs) if beam > 1 else scores
    return scores | {"bleu_greedy": greedy["bleu"]}


# %%
def held_out_splits(corpus: dict[str, list[tuple[str, str]]]) -> list[str]:
    """The names of a corpus's test splits, in order."""
    return [split for split in corpus if split.startswith("test")]


# %%
def make_record(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    history: list[dict[str, float]],
    chosen: dict[str, float],
) -> dict[str, Any]:
    """Test the saved model, as anyone who loads it would, and put the run on record."""
    device = pick_device(config.device)
    trained = load_model(folder, device)
    search = (config.beam, config.alpha)
    splits = held_out_splits(data.corpus)
    tests = {name: evaluate_both(trained, data.corpus[name], *search) for name in splits}
    translations = [test.pop("translations") for test in tests.values()][0]
    samples = [
        {"source": source, "reference": reference, "translation": translation}
        for (source, reference), translation in zip(
            data.corpus[splits[0]][:10], translations[:10], strict=True
        )
    ]
    # A resumed run is the run that was never interrupted, so its command is that one's.
    options = [option for option in sys.argv[1:] if option != "--resume"]
    command = shlex.join(["python", "-m", "scripts.train", *options])
    return {
        **provenance(command, device),
        "config": asdict(config),
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "weights_sha256": sha256(folder / "model.safetensors"),
        "seconds": round(sum(row["seconds"] for row in history)),
        "best_epoch": max(history, key=lambda row: row["val_bleu"])["epoch"],
        "chosen_by_val_bleu": chosen,
        "history": [{k: round(v, 5) for k, v in row.items()} for row in history],
        "test": tests,
        "samples": samples,
    }


# %% [markdown]
# ## The command
#
# What this chapter defines is at work in a command:
#
# ```bash
# python -m scripts.train --preset sample                       # a minute or two on a CPU
# python -m scripts.train --preset small --corpus multi30k      # a GPU, or patience
# python -m scripts.train --preset small --dropout 0.3 --name wetter
# python -m scripts.train --preset small --resume               # after an interruption
# ```
#
# Each field of `TrainConfig` is an option; `--help` lists them. `make train PRESET=small CORPUS=multi30k` is the second line. What a run writes is in `runs/NAME`: the best model, the last two states, the last epochs' weights, `log.csv`, the model card and `record.json`. A mistake gets one line that says what to do, and nothing is half-written.
#
# ### On a GPU
#
# With a GPU the products are computed in bfloat16, by autocast, and so they are on a CPU that has the instructions (`--precision float32` switches it off); weights, sums and the optimizer stay in float32. `--compile true` lets torch.compile rewrite the step. The optimizer is fused either way, until `--fused false`. The `sample` preset is float32 everywhere, so that its numbers depend on the machine as little as they can.
#
# ### On several GPUs, or several machines
#
# The same command, started by `torchrun`, which starts a process for each GPU and tells each its number:
#
# ```bash
# torchrun --nproc-per-node=4 -m scripts.train --preset small --corpus multi30k
# ```
#
# On two machines with four GPUs each, the same line on both, but for the machine's own number. The first one's address and a free port are where they meet; both need the repository and the corpus:
#
# ```bash
# # on the first machine, whose address is 10.0.0.1
# torchrun --nnodes=2 --node-rank=0 --master-addr=10.0.0.1 --master-port=29500 --nproc-per-node=4 \
#     -m scripts.train --preset small --corpus multi30k
# # on the second
# torchrun --nnodes=2 --node-rank=1 --master-addr=10.0.0.1 --master-port=29500 --nproc-per-node=4 \
#     -m scripts.train --preset small --corpus multi30k
# ```
#
# The first process of the first machine writes; `runs/NAME` is there. (To resume, all machines must see that folder: put it on a shared disk.) Without GPUs the same works over gloo: `torchrun --nproc-per-node=2 -m scripts.train --preset sample --device cpu`.
#
# **Pitfall.** *More processes are another recipe.* Four processes with `--max_tokens 2048` step on 8,192 tokens at a time, and take a quarter of the steps. That can be better or worse, but it isn't the same run. Divide `--max_tokens` by the number of processes to get the old batch back.


# %%
def run(config: TrainConfig, resume: bool = False) -> dict[str, Any] | None:
    """Train, test and record one configuration; the record is in runs/NAME and is returned.

    Under torchrun every process comes here; only the first writes, speaks and returns a record.
    """
    device = pick_device(config.device)
    with join_ranks(device) as ranks:
        config = resolved(config, device, ranks.world)
        if config.path == "fast" and device.type == "cpu":
            keep_memory()
        if not ranks.first:
            dist.barrier()  # the first process downloads, the others find it done
        data = prepare(config)
        folder = runs_folder() / config.name
        if ranks.first:
            writable(folder)
            if config.publish:
                writable(
                    ROOT / "models" / config.publish
                )  # better told now than after the training
            if ranks.world > 1:
                dist.barrier()
            pairs, pieces = len(data.train), len(data.tokenizer)
            print(f"{config.corpus}: {pairs:,} training pairs, {pieces:,} BPE pieces, on {device}")
        history = fit(config, data, folder, resume, ranks)
    return finish(config, data, folder, history) if ranks.first else None


# %%
def finish(
    config: TrainConfig, data: TrainingData, folder: Path, history: list[dict[str, float]]
) -> dict[str, Any]:
    """After the last epoch: choose the weights, score them, write record and card, publish."""
    chosen = average_if_better(config, data, folder)
    record = make_record(config, data, folder, history, chosen)
    save_record("record", record, folder)
    write_whole(folder / "README.md", model_card(record).encode())
    if config.publish:
        publish(folder, config.publish, record)
    return record


# %% [markdown]
# ## What each ingredient is worth
#
# > **In short.** Change one thing, keep the rest, train again, with more than one seed. What doesn't exceed the spread between seeds is not known.
#
# A recipe is a list of habits, and each of them was once somebody's measurement on other data. Ours:
#
# - **Label smoothing 0.1** (§5.4). Aim at 90%, not at certainty. Perplexity gets worse, BLEU should get better.
# - **Dropout** (Srivastava et al. 2014). 29,000 pairs can be learned by heart; noise makes that harder. How much depends on how long one trains.
# - **Tied tables** (§3.4; Press and Wolf 2017). One table serves the source, the target and the output. On little data that is as good as more data for each.
# - **Their spread, 1/√D at the start.** Times √D it enters the model at spread 1; as the output table it makes logits of spread 1. Xavier's rule for a table of V rows is several times smaller.
# - **Pre-norm** (chapter 5): trains without a long warm-up.
# - **A high peak rate after a short warm-up.** Few steps are affordable, so each should go far.
# - **BPE-dropout 0.1**, **R-Drop** (weight 1, at twice the work) and **Muon**: above; untested on this corpus, as far as we know.
# - **Selecting by BLEU**, **averaging**, **a beam**: these need no training of their own, so each run measures them.
#
# `python -m scripts.studies.ingredients --save true`, or `make ablate`, trains the `narrow` preset with one ingredient changed at a time, with the same number of epochs. It looks at the validation split alone; the test sets are for the model that is reported. It can be interrupted, and goes on where it stopped.


# %% [markdown]
# ## Against the clock
#
# > **In short.** How long from prepared tokens to a BLEU of 40? One number that a GPU, a kernel, an optimizer and a recipe all have to answer for.
#
# The clock counts the steps. It stands still while the model is scored and an epoch is planned. What is done once, starting the GPU, compiling and recording, is timed apart. The run ends with the first epoch whose greedy translations of the *validation* split are half a BLEU above the target (or else with the last). Only then is test_2016_flickr read, once, and says whether 40 was reached: a run that looked at the test after each epoch would choose its model by it.
#
# `python -m scripts.studies.speedrun --preset small` runs it; `--help` lists the rest. **It has no record yet.** `python -m scripts.gpu` (`make gpu`) does it, and all else that waits for a GPU, in order of worth and in as many minutes as one has: whether all kinds of steps agree, this recipe with three seeds, this race, how a training step gets faster there stage by stage, some other recipes, and the base model. `--list` says what is owed.

# %% [markdown]
# ## What the recorded runs show
#
# The two models that ship with the series were trained by that command. Their records are in [`results/`](../results/); the charts below only draw them.


# %% [markdown]
# ### The sample corpus
#
# Two test sets: `test` is drawn like the training data; `test_unseen` pairs adjectives with nouns and verbs with objects that never met in training. **Predict:** will the second be harder, and by how much?

# %%
history_chart(
    "sample-de-en",
    "The sample corpus is learned in minutes",
    "Left: validation BLEU. Right: perplexity on a logarithmic axis; 1 would be certainty. "
    "A grammar has no surprises left once it is known, so both come close to perfect.",
)

# %%
score_table("sample-de-en")


# %% [markdown]
# ### Multi30k
#
# The real thing: 29,000 pairs of captions, and the `small` preset, trained on a CPU. Its command stands in its record, its weights and its model card are in [`models/multi30k-de-en`](../models/multi30k-de-en).

# %%
record = load_record("multi30k-de-en")
print(record["repeat"])
print(f"{record['seconds'] / 60:.0f} min of training: {record['device']}")

# %% [markdown]
# **Predict.** On the sample corpus both perplexities fell towards 1. Where will validation perplexity end here, and why not at 1?

# %%
history_chart(
    "multi30k-de-en",
    "Multi30k: the model learns to translate captions",
    "Left: BLEU of its own translations of the validation split. Right: the perplexities part, as the "
    "model comes to know its training captions better than new ones.",
)

# %%
score_table("multi30k-de-en")

# %% [markdown]
# Four captions of test_2016_flickr, and what the model makes of them. Read them all before you trust a single number.


# %%
pd.set_option("display.max_colwidth", None)  # whole sentences
sample_table("multi30k-de-en")

# %%
for how, bleu in record["chosen_by_val_bleu"].items():
    print(f"validation BLEU, greedy, {how}: {bleu:.1f}")
history = pd.DataFrame(record["history"])
by_bleu, by_loss = history["val_bleu"].idxmax(), history["val_ppl"].idxmin()
assert history.loc[by_bleu, "epoch"] == record["best_epoch"]
by_epoch = history.set_index("epoch")[["val_ppl", "val_bleu"]]
assert by_epoch.val_ppl[11] < by_epoch.val_ppl[10]  # the loss says better,
assert by_epoch.val_bleu[11] < by_epoch.val_bleu[10] - 2  # and BLEU says much worse
by_epoch.loc[[10, 11, 12, *sorted({by_loss + 1, by_bleu + 1})]].round(2)

# %% [markdown]
# The pitfall from above, in this run: from epoch 10 to 11 perplexity fell, and BLEU lost three points; an epoch later they were back, and more. At the end the two agree, or nearly, since the learning rate is almost zero by then. Averaging gained nothing after the cosine, so the best epoch was kept.

# %% [markdown]
# ### The ingredients
#
# **Predict.** Eight rows, each with one thing changed. Which three matter most when there are only five epochs? Does any of them *gain* anything?

# %%
ingredients = load_record("recipe-multi30k")
print(ingredients["repeat"])
ingredient_chart(ingredients)


# %%
def ingredient_verdicts(record: dict[str, Any]) -> dict[str, Verdict]:
    """What the seeds say of each changed row's validation BLEU against the recipe's."""
    rows = {name: [run["best"] for run in row["runs"]] for name, row in record["rows"].items()}
    changed = [name for name, row in record["rows"].items() if row["changes"]]
    return verdicts(rows, dict.fromkeys(changed, "the recipe"))


ingredient_table(ingredients, ingredient_verdicts(ingredients))

# %% [markdown]
# Is that more than another seed would do? The spread between seeds is estimated from all rows that were run more than once, each around its own mean. The column p is Student's: how often seeds alone would part a row from the recipe so far or further. A row of one run (BPE-dropout, R-Drop) can be judged by the spread of the others, only less sharply.
#
# Eight rows are eight chances of a false alarm, so the bar is higher for each. The smallest p must be below 0.05/8, the next one below 0.05/7, and so on, up to the first that isn't (Holm 1979). The rule is in [`verdict.py`](../scripts/studies/verdict.py); [chapter 13](ch13_ablations_and_scaling.ipynb) explains it. (Other validation *sentences* would have given other scores as well. That is another chance, and chapter 10 measures it.)


# %%
def beyond_noise(record: dict[str, Any]) -> dict[str, str]:
    """What made a difference: the rows that differ by more than seeds do, all rows tested together."""
    return {
        name: "better" if verdict.difference > 0 else "worse"
        for name, verdict in ingredient_verdicts(record).items()
        if verdict.told
    }


# %%
scores_of_rows = [[run["best"] for run in row["runs"]] for row in ingredients["rows"].values()]
spread, freedom = pooled_spread(scores_of_rows)
print(f"spread between seeds: {spread:.2f} BLEU, {freedom} degrees of freedom")
for name, verdict in beyond_noise(ingredients).items():
    runs = len(ingredients["rows"][name]["runs"])
    print(f"{name}: {verdict} than the recipe, beyond noise (runs: {runs})")
assert beyond_noise(ingredients) == {
    "dropout 0.3": "worse",
    "peak rate / 4": "worse",
    "BPE-dropout 0.1": "worse",
}
by_seeds = ingredient_verdicts(ingredients)
assert by_seeds["peak rate / 4"].difference < -10 and by_seeds["dropout 0.3"].difference < -6
assert -4 < by_seeds["BPE-dropout 0.1"].difference < -3
for name in ("Muon", "Xavier's tables"):  # would pass alone, and don't among eight
    assert 0.01 < by_seeds[name].p < 0.02 and 1.3 < abs(by_seeds[name].difference) < 1.45
assert all(by_seeds[name].p > 0.05 for name in ("no label smoothing", "post-norm", "R-Drop 1"))

# %% [markdown]
# With five epochs, a peak rate of a quarter costs more than 10 BLEU, a dropout of 0.3 more than 6, BPE-dropout more than 3 (in its one run). All three are statements about *short* training, where the model has no time to learn by heart. Two rows are open: Muon is 1.4 ahead, Xavier's tables are 1.4 behind. Alone either would pass, with p between 0.01 and 0.02; among eight it doesn't. A third seed might tell. Label smoothing, post-norm and R-Drop stay too near to what another seed would do. (The model that ships was trained with Adam, before Muon's row was known. Exercise 6 has the next step.)
#
# And what needs no training:

# %%
free_table(ingredients)

# %% [markdown]
# ## Summary
#
# - A run is a function of one `TrainConfig`; the command line, the checkpoint and the record all carry it.
# - Plan each epoch from the seed and its number. Then resuming can be exact, and a check can demand it.
# - Validate by translating. Keep the checkpoint with the best BLEU, not with the lowest loss.
# - A state holds everything that the next step depends on, is written whole or not at all, and carries a checksum. The proof is that a killed run ends with the same bits.
# - Several processes share a step by tokens, not by batches. The mean of means is another gradient.
# - An ingredient is worth what exceeds the spread between seeds.
# - Score the model as it is loaded from its file.
# - A score goes with its signature, its command and its commit.
#
# ## What the paper did that we don't
#
# - It trained 100,000 steps on eight GPUs with 25,000 tokens a side in a batch. We take a few thousand steps of 2,048.
# - It used post-norm with the inverse-square-root schedule. Our small preset is pre-norm, which needs less warm-up (chapter 5), with a cosine.
# - It averaged its last checkpoints, always. We let validation BLEU decide.
# - It says nothing of seeds: its ablations (Table 3) are single runs.

# %% [markdown]
# ## Exercises

# %% [markdown]
# ### Exercise 1 · A mean over unequal shares
#
# *code · difficulty ●○○ · worth ●●● · 10 minutes*
#
# Each of several processes hands in the *mean* gradient over its own target tokens, and how many these were. Write `mean_over_ranks(means, tokens)`: the mean over all tokens of all processes. A process that found no sentence left has 0 tokens, and its mean is 0/0, NaN. `solution("mean_over_ranks")` shows ours.


# %%
def mean_over_ranks(means: list[Tensor], tokens: list[int]) -> Tensor:
    """Each process's mean gradient (D,) and token count, to the mean over all tokens."""
    ...


check(mean_over_ranks)

# %% [markdown]
# ### Exercise 2 · Warm-up, plateau, decay
#
# *code · difficulty ●●○ · worth ●●○ · 15 minutes*
#
# A cosine has to know its end from the first step. A newer schedule (Zhai et al. 2022, Hu et al. 2024) doesn't: a linear warm-up to the peak at step $w$, then a plateau, and only the last $d$ steps fall, in a straight line that reaches zero just after step `total`, as our cosine does. So one can train on, and decide later when to end. Write `plateau_schedule(step, peak, warmup, total, decay)`, steps counted from 1; after `total` it is 0. `solution("plateau_schedule")` shows ours.


# %%
def plateau_schedule(step: int, peak: float, warmup: int, total: int, decay: int) -> float:
    """The rate of `step`, counted from 1: up to the peak, level, and down to 0 after `total`."""
    ...


check(plateau_schedule)

# %% [markdown]
# ### Exercise 3 · A mean that fits into memory
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# `average_checkpoints` holds all checkpoints at once. Twenty of a large model won't fit. Write `running_mean(stored)`: `stored` is an iterator that can be gone through once and doesn't say how many will come, each a dictionary of float16 tensors as `save_model` stores them. Give their mean, weight by weight, in float32, with no more than two of them in memory at a time. `solution("running_mean")` shows ours.


# %%
def running_mean(stored: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """float16 weights by name, seen once, to their mean in float32."""
    ...


check(running_mean)

# %% [markdown]
# ### Exercise 4 · A stream that can be resumed
#
# *code · difficulty ●●● · worth ●●○ · 30 minutes*
#
# Most corpora don't fit into memory, and are read as an endless stream. Write a class for it, and `resumable_stream(count, seed)` that makes an object of it. Such an object gives with `next` the numbers 0 to `count` − 1, each once a pass, every pass in an order of its own that the seed decides. `state()` is small enough for a checkpoint's JSON, and `restore(state)` makes any stream of the same count and seed go on exactly there. Python's and PyTorch's global generators stay untouched. `solution("resumable_stream")` shows ours.


# %%
def resumable_stream(count: int, seed: int) -> Any:
    """A new stream of 0 to `count` − 1 in passes, with `next`, `state()` and `restore(state)`."""
    ...


check(resumable_stream)

# %% [markdown]
# ### Exercise 5 · Equal, or nearly
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Each pair nearly agrees. What differs, and why?
#
# 1. `--accumulate 4 --max_tokens 512` beside `--max_tokens 2048`. Chapter 6 proved the gradients equal; why do the runs still differ?
# 2. `torchrun --nproc-per-node=2 … --max_tokens 512` beside one process with `--max_tokens 512 --accumulate 2`. They take the same steps. Do their losses agree in every digit? In which do they not?
# 3. The chapter as it is, beside one without `torch.set_rng_state` in `scripts/engine/checkpoints.py`. Which check fails? And if the run has `--dropout 0`?
#
# <details><summary>Answers</summary>
#
# 1. The gradient is the same for the same sentences. But a bucket of 2,048 tokens and four buckets of 512 hold other sentences, and they are shuffled otherwise; so each step sees another sample. With dropout the masks differ as well.
# 2. The sentences of a step are the same, and so is the divisor. Sums are taken in another order, which shows in the last digits of float32 and grows slowly. With dropout more than that: each process draws from a generator of its own.
# 3. The one that interrupts a run and asks for the same bits: the resumed run draws other dropout masks. Without dropout nothing draws from that generator after the weights have been made, and the fault hides. A check of resuming needs dropout.
#
# </details>

# %% [markdown]
# ### Exercise 6 · Your own runs
#
# *project · difficulty ●●○ · worth ●●○ · 60 minutes*
#
# Choose one, write down what you expect, then train.
#
# - Train the sample model with `--schedule inverse_sqrt` and the same number of epochs. What does validation BLEU lose? With `--average 5` as well: does averaging gain more than it did after the cosine, and why?
# - Build exercise 2's schedule into `learning_rate`, and train twice as long from the end of its plateau. What does the second run save?
# - Set `--norm_first false` with `--warmup 1`. Which epoch tells you that something is wrong?
# - Start `make run`, kill it with `kill -9` in the middle of an epoch, and go on with `--resume`. Compare the weights' SHA-256 with that of an undisturbed run. Then overwrite a byte of the newest state, and resume again.
# - Train `--preset small --optimizer muon` on Multi30k, and once more with half the epochs. Is Muon's lead of five short epochs real, and does it last, or does it only arrive earlier?
