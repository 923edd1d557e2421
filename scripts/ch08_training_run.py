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
# # Chapter 8 · The training run
#
# After this chapter you can train a translator on real data from the command line, watch it learn, interrupt it, resume it, and say from a record how good it became.
#
# *Attention Is All You Need*, §5 and §6.1. About 30 minutes to read; half a minute to run on a CPU. The runs that it shows took longer, and were recorded.
#
# Previous: [Chapter 7 · Going fast](ch07_going_fast.ipynb) · Next: [Chapter 9 · Decoding and BLEU](ch09_decoding_and_bleu.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary.

# %% tags=["bootstrap"]
# Make this chapter at home: the series is in a folder above, installed, or gets cloned beside it.
import os
import subprocess
import sys
from pathlib import Path

here = Path(globals().get("__file__", "notebook")).resolve()
beside = Path("from-attention-to-translation").resolve()
finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
specs = [finder.find_spec("scripts", None) for finder in finders]
installed = [Path(spec.origin).resolve().parents[1] for spec in specs if spec and spec.origin]
homes = [*here.parents, *installed, beside]
root = next((home for home in homes if (home / "scripts/ch01_attention.py").exists()), None)
if root is None:
    address = os.environ.get("SERIES_REPOSITORY", "").removeprefix("git+")
    if not address:
        raise SystemExit("Set SERIES_REPOSITORY to the series' address, such as git+https://…")
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", address, beside], check=True)
    root = beside
sys.path.insert(0, str(root))  # first, so that no other package named scripts shadows ours
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "scripts" and str(root) not in str(getattr(module, "__file__", "")):
        del sys.modules[name]
if root == beside:
    from scripts.first_cell import install_missing

    install_missing()

# In a terminal, with options or under torchrun, this chapter is a command and shows nothing.
if __name__ == "__main__" and "__file__" in globals() and (sys.argv[1:] or "RANK" in os.environ):
    from scripts.ch08_training_run import main

    raise SystemExit(main())

# %%
import csv
import io
import json
import math
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import altair as alt
import pandas as pd
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch05_training import (
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
from scripts.ch06_multi30k import (
    BPETokenizer,
    Example,
    encode_pairs,
    load_corpus,
    make_batch,
    pad_rows,
    source_ids,
    token_batches,
)
from scripts.ch07_going_fast import fast_loss, keep_memory, switches_for
from scripts.charts import lines, titled
from scripts.checkpoints import (
    load_tensors,
    load_training,
    load_weights,
    save_tensors,
    save_training,
    weights,
)
from scripts.records import ROOT, load_record, provenance, save_record, sha256

# %% [markdown]
# ## One place for every decision
#
# > **In short.** A training run is a function of its settings. Keep them all in one object, and the run can be named, repeated and compared.
#
# The settings below are the whole list. The command line is made from them, the checkpoint carries them, and the record shows them. Nothing that matters is decided elsewhere.


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
    dropout: float = 0.15
    """Dropout everywhere, attention weights included."""
    smoothing: float = 0.1
    """Label smoothing's epsilon."""
    epochs: int = 11
    """Passes over the training split."""
    max_tokens: int = 2048
    """Tokens in a batch on either side, padding counted."""
    accumulate: int = 1
    """Batches in an optimizer step."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """How the learning rate falls after its warm-up."""
    lr: float = 1.2e-3
    """Peak learning rate."""
    warmup: int = 400
    """Steps until the peak."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 1
    """Decides the weights' start, dropout and the batches' order."""
    path: Literal["fast", "textbook"] = "fast"
    """How the step is computed: chapter 7's way, or chapters 1 to 5's. The same numbers."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    name: str = "small"
    """The run's folder: runs/NAME."""
    publish: str | None = None
    """Also save the model as models/PUBLISH and the record as results/PUBLISH.json."""


# %% [markdown]
# Three presets cover three needs. `sample` learns our generated corpus on any laptop. `small` suits Multi30k: 29,000 sentence pairs feed a few million parameters, not the paper's 65 million. `base` is the paper's own model, for whoever has the data and the GPU.

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
        name="sample",
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
        warmup=4000,
        max_tokens=4096,
        epochs=20,
        name="base",
    ),
}
STORED_DTYPE = torch.float16  # half the size; every score we report is of the weights as stored


# %%
def build_model(config: TrainConfig, vocab: int) -> EncoderDecoder:
    """The model of `config` over `vocab` joint pieces, initialised from the global seed."""
    return make_model(
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


# %% [markdown]
# **Predict.** Which of the three is the largest, and how far apart are they?

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
    """The device called `name`; "auto" takes a GPU where there is one.

    Raises ValueError for a device that this machine lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU: use --device cpu or auto")
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
# ## From a corpus to batches
#
# > **In short.** Read, learn the vocabulary on the training split alone, encode. Then plan each epoch's batches from the seed and the epoch's number, and from nothing else.
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
def epoch_plan(config: TrainConfig, data: TrainingData, epoch: int) -> list[list[int]]:
    """The batches of one epoch, from the seed and the epoch alone: a resumed run meets the same."""
    return token_batches(data.train, config.max_tokens, random.Random(f"{config.seed}:{epoch}"))


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
assert sorted(i for batch in second for i in batch) == list(range(len(data.train)))  # all, once

print(f"{len(data.train):,} training pairs in {len(first)} batches an epoch")

# %% [markdown]
# ## How fast to learn, and when
#
# > **In short.** Small steps while the model knows nothing, large ones once it has a direction, small ones again to settle.
#
# [Chapter 5](ch05_training.ipynb) derived the paper's schedule, which falls as $1/\sqrt{t}$ and never ends. If the number of steps is known beforehand, one can also come down along a cosine that reaches zero at the end: the last steps are tiny, and the weights settle. Both are here (exercise 1 compares them); $t$ counts optimizer steps from 1.


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
# ## Two ways to the same numbers
#
# > **In short.** The fast path is an argument of the training loop. Nothing else in this chapter knows which one runs.
#
# [Chapter 7](ch07_going_fast.ipynb) made a training step faster by more than half without changing what it computes. A run takes that way unless `--path textbook` asks for the plain one.


# %%
def loss_function_of(
    config: TrainConfig, device: torch.device
) -> Callable[..., tuple[Tensor, Tensor]]:
    """How the run computes a batch's loss: `config.path`, with the switches that suit the device."""
    if config.path == "textbook":
        return batch_loss
    return partial(fast_loss, how=switches_for(device))


# %%
torch.manual_seed(0)
with torch.random.fork_rng():
    model = build_model(replace(sample, dropout=0.0), len(data.tokenizer))
batch = next(batches_of(data.train, epoch_plan(sample, data, 1), torch.device("cpu")))
sums = [
    loss_function_of(replace(sample, path=path), torch.device("cpu"))(
        model, batch, LabelSmoothing()
    )
    for path in ("fast", "textbook")
]
torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=0.0)

# %% [markdown]
# ## A score to steer by
#
# > **In short.** The loss asks whether the model knows the next word of *our* sentence. BLEU asks whether *its own* sentence is any good. We keep the model with the best BLEU.
#
# Translating is the job, so validation translates. `decode_rows` sorts the sentences by length, so that a batch holds equals and little padding, runs a search on each batch, and puts the answers back in order. Here the search is greedy; [chapter 9](ch09_decoding_and_bleu.ipynb) hands it others.


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


# %%
def greedy_translate(trained: Trained, sentences: Sequence[str], batch_size: int = 64) -> list[str]:
    """Translations of `sentences`, in their order, by greedy decoding; long ones are cut."""
    rows = [source_ids(sentence, trained.tokenizer) for sentence in sentences]
    return decode_rows(trained, rows, lambda *given: greedy_decode(*given).tolist(), batch_size)


# %% [markdown]
# BLEU itself is sacreBLEU's: whole texts in, cased, with its own tokenisation ("13a"), and a signature that says so. Chapter 9 takes it apart. A BLEU without its signature is a number without a unit.


# %%
def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> Any:
    """sacreBLEU, cased and 13a unless `options` say otherwise: `.score` and its `.signature`."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(**options)
    result = metric.corpus_score(list(hypotheses), [list(references)])
    result.signature = str(metric.get_signature())
    return result


# %%
def validate(trained: Trained, data: TrainingData, device: torch.device) -> dict[str, float]:
    """Perplexity (teacher-forced) and greedy BLEU on the validation split."""
    plan = token_batches(data.val, trained.config.max_tokens)
    criterion = LabelSmoothing(trained.config.smoothing)
    loss_of = loss_function_of(trained.config, device)
    batches = batches_of(data.val, plan, device)
    report = run_epoch(batches, trained.model, criterion, loss_of=loss_of)
    sources, references = zip(*data.corpus["val"], strict=True)
    bleu = corpus_bleu(greedy_translate(trained, sources), references).score
    return {"val_loss": report.loss_per_token, "val_ppl": report.perplexity, "val_bleu": bleu}


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
# Weights go into safetensors: a header of names and shapes, then raw numbers. Nothing in it can run, unlike a pickle. Tied tables are one tensor and are stored once. They are rounded to 16 bits, which halves the file; so every score that we report is measured on the model *as loaded from its file*.
#
# [`scripts/checkpoints.py`](../scripts/checkpoints.py) holds the plumbing. It writes to a second name and renames, so that a crash in the middle leaves the old file, not half of the new one.

# %%
STORED_DTYPE = torch.float16  # half the size; every score we report is of the weights as stored


# %%
def save_model(folder: Path, trained: Trained) -> None:
    """Write model.safetensors, tokenizer.model and config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: t.to(STORED_DTYPE) for name, t in weights(trained.model).items()}
    save_tensors(folder / "model.safetensors", stored, {})
    trained.tokenizer.save(folder / "tokenizer.model")
    config = json.dumps(asdict(trained.config), indent=1)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


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
    tokenizer = BPETokenizer.load(folder / "tokenizer.model")
    model = build_model(config, len(tokenizer))
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
# > **In short.** For each epoch: train, validate, log, and keep the model if it is the best so far. Then save everything that the next epoch depends on.
#
# "Everything" is the weights, the optimizer's two moments for each weight, the state of the random generator (dropout draws from it), and the count of steps, from which the learning rate follows. Forget one, and a resumed run goes another way.


# %%
class Training:
    """A run in progress: the model, and all that its next epoch depends on."""

    def __init__(self, config: TrainConfig, data: TrainingData, folder: Path, resume: bool = False):
        torch.manual_seed(config.seed)
        self.config, self.data, self.folder = config, data, folder
        self.device = pick_device(config.device)
        self.model = build_model(config, len(data.tokenizer)).to(self.device)
        self.criterion = LabelSmoothing(config.smoothing)
        self.state = TrainState()
        self.history: list[dict[str, float]] = []
        # Adam with the paper's settings (§5.3). The schedule sets the rate itself: 1.0 × lr_at.
        parameters = [{"params": list(self.model.parameters()), "initial_lr": 1.0}]
        adam = {"betas": (0.9, 0.98), "eps": 1e-9, "fused": config.path == "fast"}
        self.optimizer = torch.optim.Adam(parameters, lr=1.0, **adam)
        self.loss_of = loss_function_of(config, self.device)
        if resume:
            self.restore()
        plans = (epoch_plan(config, data, epoch) for epoch in range(1, config.epochs + 1))
        total = sum(math.ceil(len(plan) / config.accumulate) for plan in plans)
        self.lr_at = learning_rate(config, total)
        self.scheduler = LambdaLR(
            self.optimizer,
            lambda done: self.lr_at(done + 1),  # after `done` steps comes step done + 1
            last_epoch=self.state.steps - 1,
        )

    @property
    def trained(self) -> Trained:
        """The model as it stands, ready to translate."""
        return Trained(self.model, self.data.tokenizer, self.config)

    def train_epoch(self, epoch: int) -> EpochReport:
        """One pass over the training split, under a progress bar."""
        plan = epoch_plan(self.config, self.data, epoch)
        title = f"epoch {epoch}/{self.config.epochs}"
        with tqdm(total=len(plan), desc=title, unit="batch", leave=False) as bar:
            return run_epoch(
                batches_of(self.data.train, plan, self.device),
                self.model,
                self.criterion,
                self.optimizer,
                self.scheduler,
                accumulate=self.config.accumulate,
                clip=self.config.clip,
                loss_of=self.loss_of,
                state=self.state,
                progress=bar,
            )

    def keep(self, row: dict[str, float]) -> None:
        """Log an epoch; save the model if it is the best so far, and the state in any case."""
        if all(row["val_bleu"] > earlier["val_bleu"] for earlier in self.history):
            save_model(self.folder, self.trained)
        self.history.append(row)
        write_log(self.folder, self.history)
        meta = {"state": asdict(self.state), "history": self.history, "run": identity(self.config)}
        save_training(self.folder / "last.safetensors", self.model, self.optimizer, meta)

    def restore(self) -> None:
        """Go back to what `keep` saved last. Raises ValueError where that was another run."""
        path = self.folder / "last.safetensors"
        meta = load_training(path, self.model, self.optimizer)
        wanted = identity(self.config)
        changed = [name for name in wanted if wanted[name] != meta["run"].get(name)]
        if changed:
            raise ValueError(
                f"{path} was trained with another --{changed[0]} ({meta['run'].get(changed[0])}): "
                "resume with the same options, or start anew under another --name"
            )
        self.state, self.history = TrainState(**meta["state"]), meta["history"]


# %%
def identity(config: TrainConfig) -> dict[str, Any]:
    """The settings that make a run the run it is: all but where it runs and where it writes."""
    kept = asdict(config)
    for name in ("device", "name", "publish"):
        del kept[name]
    return kept


# %%
def write_log(folder: Path, history: list[dict[str, float]]) -> None:
    """The history so far as log.csv, for a spreadsheet or a plot."""
    with open(folder / "log.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=history[0].keys())
        writer.writeheader()
        writer.writerows(history)


# %%
def fit(
    config: TrainConfig, data: TrainingData, folder: Path, resume: bool = False
) -> list[dict[str, float]]:
    """Train as `config` says; return the history, a row an epoch.

    `folder` gets the best model (by validation BLEU) and the last state. With `resume` the run
    goes on after the last epoch saved, as if nothing had happened.
    """
    training = Training(config, data, folder, resume)
    for epoch in range(len(training.history) + 1, config.epochs + 1):
        start = time.perf_counter()
        report = training.train_epoch(epoch)
        seconds = time.perf_counter() - start
        row = {
            "epoch": epoch,
            "lr": training.lr_at(training.state.steps),
            "train_loss": report.loss_per_token,
            "train_ppl": report.perplexity,
            "grad_norm": sum(report.grad_norms) / len(report.grad_norms),
            "tokens": report.tokens,
            "seconds": seconds,
            **validate(training.trained, data, training.device),
        }
        tqdm.write(
            f"epoch {epoch}/{config.epochs}  loss {row['train_loss']:.3f}  "
            f"val ppl {row['val_ppl']:.2f}  val BLEU {row['val_bleu']:.1f}  {seconds:.0f} s"
        )
        training.keep(row)
    return training.history


# %% [markdown]
# **Predict.** We train a tiny model for two epochs in one go. Then we train another for one epoch, throw it away, and resume from its file for the second. How far apart are the two sets of weights?

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

    interrupted = Training(tiny, few, broken)
    interrupted.train_epoch(1)
    interrupted.keep(history[0])
    del interrupted  # the power fails
    resumed = fit(tiny, few, broken, resume=True)

    unbroken, mended = (load_tensors(run / "last.safetensors")[0] for run in (straight, broken))
    try:
        fit(replace(tiny, d_ff=128), few, broken, resume=True)
    except ValueError as error:
        refused = str(error)

# %%
assert all(unbroken[name].equal(mended[name]) for name in unbroken)  # bit for bit
assert resumed[1]["train_loss"] == history[1]["train_loss"] < history[0]["train_loss"]
assert "another configuration" in refused

print(f"{len(unbroken)} tensors, weights and optimizer, the same to the last bit")

# %% [markdown]
# They are the same, bit for bit. This is a strong check: a forgotten random state, a plan that depends on history, a schedule that starts over, each would break it. And it trained on whatever device this machine has been told to use, a CPU in our tests.

# %% [markdown]
# ## On record
#
# > **In short.** A number that nobody can trace is a rumour. Each run leaves a record: command, commit, date, machine, versions, settings, history, scores, and translations to look at.
#
# The test sets are read once, at the end, by the model as loaded from its file.


# %%
def evaluate(trained: Trained, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Translate `pairs` greedily: BLEU, cased and lower-cased, signatures, and the translations."""
    sources, references = zip(*pairs, strict=True)
    hypotheses = greedy_translate(trained, sources)
    cased = corpus_bleu(hypotheses, references)
    lower = corpus_bleu(hypotheses, references, lowercase=True)
    return {
        "bleu": round(cased.score, 2),
        "signature": cased.signature,
        "bleu_lowercased": round(lower.score, 2),
        "signature_lowercased": lower.signature,
        "translations": hypotheses,
    }


# %%
def held_out_splits(corpus: dict[str, list[tuple[str, str]]]) -> list[str]:
    """The names of a corpus's test splits, in order."""
    return [split for split in corpus if split.startswith("test")]


# %%
def make_record(
    config: TrainConfig, data: TrainingData, folder: Path, history: list[dict[str, float]]
) -> dict[str, Any]:
    """Test the saved model, as anyone who loads it would, and put the run on record."""
    device = pick_device(config.device)
    trained = load_model(folder, device)
    tests = {name: evaluate(trained, data.corpus[name]) for name in held_out_splits(data.corpus)}
    translations = [test.pop("translations") for test in tests.values()][0]
    pairs = data.corpus[held_out_splits(data.corpus)[0]]
    samples = [
        {"source": source, "reference": reference, "translation": translation}
        for (source, reference), translation in zip(pairs[:10], translations[:10], strict=True)
    ]
    # A resumed run is the run that was never interrupted, so its command is that one's.
    options = [option for option in sys.argv[1:] if option != "--resume"]
    command = shlex.join(["python", "scripts/ch08_training_run.py", *options])
    return {
        **provenance(command, device),
        "config": asdict(config),
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "weights_sha256": sha256(folder / "model.safetensors"),
        "seconds": round(sum(row["seconds"] for row in history)),
        "best_epoch": max(history, key=lambda row: row["val_bleu"])["epoch"],
        "history": [{k: round(v, 5) for k, v in row.items()} for row in history],
        "test": tests,
        "samples": samples,
    }


# %%
def model_card(record: dict[str, Any]) -> str:
    """README.md of a saved model: what it is, what made it, how good it is."""
    config, tests = record["config"], record["test"]
    scores = "\n".join(
        f"| {split} | {test['bleu']:.1f} | {test['bleu_lowercased']:.1f} | `{test['signature']}` |"
        for split, test in tests.items()
    )
    return f"""# German to English, trained on {config["corpus"]}

A Transformer of {record["parameters"]:,} parameters ({config["layers"]}+{config["layers"]} layers,
d_model {config["d_model"]}), from chapter 8 of *From Attention to Translation*. Stored in float16.

| test set | BLEU | lower-cased | signature of the first |
|---|---|---|---|
{scores}

Made by `{record["command"]}` on {record["device"]} in {record["seconds"] / 60:.0f} minutes of training
(commit `{record["commit"][:12]}`, {record["date"][:10]}). It translates short image captions; it
knows nothing else, and it repeats the biases of its captions.
"""


# %%
def publish(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Copy a run's model to models/NAME and its record to results/NAME.json."""
    shipped = writable(ROOT / "models" / name)
    for part in ("model.safetensors", "tokenizer.model", "config.json", "README.md"):
        (shipped / part).write_bytes((folder / part).read_bytes())
    save_record(name, record)


# %%
def report(record: dict[str, Any]) -> str:
    """What a training came to: BLEU on each test split and a few translations, for the terminal."""
    lines = [
        f"{split}: BLEU {test['bleu']:.1f}  ({test['signature']})"
        for split, test in record["test"].items()
    ]
    for sample in record["samples"][:5]:
        lines += ["", f"  source       {sample['source']}"]
        lines += [
            f"  reference    {sample['reference']}",
            f"  translation  {sample['translation']}",
        ]
    return "\n".join(lines)


# %% [markdown]
# ## The command
#
# The same chapter is a program. With options, the script hands over to `main`:
#
# ```bash
# python scripts/ch08_training_run.py --preset sample                       # minutes on a CPU
# python scripts/ch08_training_run.py --preset small --corpus multi30k      # a GPU, or patience
# python scripts/ch08_training_run.py --preset small --dropout 0.2 --name wetter
# python scripts/ch08_training_run.py --preset small --resume               # after an interruption
# ```
#
# Each field of `TrainConfig` is an option; `--help` lists them. What a run writes is in `runs/NAME`: the best model, the last state, `log.csv` and `record.json`. A mistake gets one line that says what to do, and nothing is half-written.


# %%
def option_parser(defaults: TrainConfig) -> Any:
    """A parser of `--preset`, `--resume` and each field of TrainConfig, made from the dataclass."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="ch08_training_run.py",
        description="Train a Transformer from German to English.",
        exit_on_error=False,
    )
    parser.add_argument("--preset", default="small", help=", ".join(PRESETS))
    parser.add_argument("--resume", action="store_true", help="Go on where runs/NAME stopped.")
    parser.add_class_arguments(TrainConfig)
    parser.set_defaults(asdict(defaults))
    return parser


# %%
def parse_arguments(argv: Sequence[str] | None = None) -> tuple[TrainConfig, bool]:
    """The command line to a TrainConfig, and whether to resume: a preset, then any field changed.

    Raises ValueError for what it does not understand.
    """
    from jsonargparse import ArgumentError

    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        preset = option_parser(TrainConfig()).parse_args(argv).preset
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}: choose from {', '.join(PRESETS)}")
        chosen = option_parser(PRESETS[preset]).parse_args(argv).as_dict()
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    del chosen["preset"]
    resume = chosen.pop("resume")
    return TrainConfig(**chosen), resume


# %%
def writable(folder: Path) -> Path:
    """`folder`, made where it is missing. Raises ValueError where it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"can't write to {folder} ({error.strerror}): choose another --name"
        ) from error
    return folder


# %%
def run(config: TrainConfig, resume: bool = False) -> dict[str, Any]:
    """Train, test and record one configuration; the record is in runs/NAME and is returned."""
    device = pick_device(config.device)
    if config.path == "fast" and device.type == "cpu":
        keep_memory()
    data = prepare(config)
    folder = writable(ROOT / "runs" / config.name)
    if config.publish:
        writable(ROOT / "models" / config.publish)  # better told now than after the training
    pairs, pieces = len(data.train), len(data.tokenizer)
    print(f"{config.corpus}: {pairs:,} training pairs, {pieces:,} BPE pieces, on {device}")
    history = fit(config, data, folder, resume)
    record = make_record(config, data, folder, history)
    save_record("record", record, folder)
    (folder / "README.md").write_text(model_card(record), encoding="utf-8")
    if config.publish:
        publish(folder, config.publish, record)
    return record


# %%
def main(argv: Sequence[str] | None = None) -> int:
    """The command: train as asked and print BLEU and translations. Returns the exit code."""
    try:
        print(report(run(*parse_arguments(argv))))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command with --resume goes on", file=sys.stderr)
        return 130
    return 0


# %%
chosen, resume = parse_arguments(["--preset", "sample", "--epochs", "3"])
assert not resume and chosen == replace(PRESETS["sample"], epochs=3)

for mistake in (
    ["--preset", "smal"],
    ["--layerz", "3"],
    ["--layers", "three"],
    ["--device", "a toaster"],
):
    try:
        pick_device(parse_arguments(mistake)[0].device)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## What the recorded runs show
#
# The two models that ship with the series were trained by that command. Their records are in [`results/`](../results/); the charts below only draw them.


# %%
def history_chart(name: str, title: str, caption: str) -> alt.HConcatChart:
    """Validation BLEU and perplexity by epoch, from the record `results/NAME.json`."""
    frame = pd.DataFrame(load_record(name)["history"])
    both = frame.melt("epoch", ["train_ppl", "val_ppl"], "split", "perplexity")
    both["split"] = both["split"].map({"train_ppl": "training", "val_ppl": "validation"})
    size = {"points": True, "width": 250, "height": 220}
    ppl = lines(both, "epoch", "perplexity", "split", log_y=True, **size)
    bleu = lines(frame, "epoch", "val_bleu", y_title="validation BLEU", zero=True, **size)
    return titled(bleu | ppl, title, caption)


# %%
def score_table(*names: str) -> pd.DataFrame:
    """Test scores of recorded runs: cased sacreBLEU, lower-cased beside it."""
    rows = [
        {
            "model": name,
            "test set": split,
            "BLEU": test["bleu"],
            "lower-cased": test["bleu_lowercased"],
        }
        for name in names
        for split, test in load_record(name)["test"].items()
    ]
    return pd.DataFrame(rows).set_index("model")


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
# The real thing: 29,000 pairs of captions. This model is narrower than the `small` preset (width 192, 4,096 pieces), so that two CPU cores can train it while you have lunch. Its command stands in its record, and its weights are in [`models/multi30k-de-en`](../models/multi30k-de-en).

# %%
record = load_record("multi30k-de-en")
print(record["command"])
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
def sample_table(name: str, count: int = 4) -> pd.DataFrame:
    """The first translations on record, each under its source and beside its reference."""
    samples = load_record(name)["samples"][:count]
    rows = [(i + 1, what, sample[what]) for i, sample in enumerate(samples) for what in sample]
    return pd.DataFrame(rows, columns=["caption", "what", "text"]).set_index(["caption", "what"])


# %%
pd.set_option("display.max_colwidth", None)  # whole sentences
sample_table("multi30k-de-en")

# %%
history = pd.DataFrame(record["history"])
by_bleu, by_loss = history["val_bleu"].idxmax(), history["val_ppl"].idxmin()
assert history.loc[by_bleu, "epoch"] == record["best_epoch"]
assert by_bleu < by_loss  # validation loss would have chosen another epoch
history.loc[[by_bleu, by_loss], ["epoch", "val_ppl", "val_bleu"]].round(2).set_index("epoch")

# %% [markdown]
# The pitfall from above, in this run: BLEU and loss choose different epochs. Here the two are close, since the learning rate is almost zero by then.

# %% [markdown]
# ## Summary
#
# - A run is a function of one `TrainConfig`; the command line, the checkpoint and the record all carry it.
# - Plan each epoch from the seed and its number. Then resuming can be exact, and a check can demand it.
# - Validate by translating. Keep the checkpoint with the best BLEU, not with the lowest loss.
# - Save tensors as data, whole or not at all; score the model as it is loaded from its file.
# - A score goes with its signature, its command and its commit.
#
# ## What the paper did that we don't
#
# - It trained 100,000 steps on eight GPUs with 25,000 tokens a side in a batch. We take a few thousand steps of 2,048.
# - It used post-norm with the inverse-square-root schedule. Our small preset is pre-norm, which needs less warm-up (chapter 4), with a cosine.
# - It averaged its last checkpoints. `average_checkpoints` is here; exercise 5 measures what it does.
#
# ## Exercises
#
# 1. Train the sample model with `--schedule inverse_sqrt` and the same number of epochs. What does validation BLEU lose?
# 2. Set `--norm_first false` with `--warmup 1`. Which epoch tells you that something is wrong?
# 3. Use `--accumulate 4 --max_tokens 512` beside `--max_tokens 2048`. Chapter 5 proved the gradients equal; why do the runs still differ?
# 4. Remove `torch.set_rng_state` from `scripts/checkpoints.py`. Which check of this chapter fails, and with `--dropout 0`?
# 5. Average the last three checkpoints of a run of yours. Save one an epoch, then compare validation BLEU before and after.
