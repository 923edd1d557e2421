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
# # Chapter 12 · Ablations and scaling
#
# After this chapter you can take a model apart one piece at a time, say which piece earned its place and which difference is only chance, fit a scaling law with its uncertainty, and know how far it may be trusted.
#
# *Attention Is All You Need*, §6.2 and Table 3. About 45 minutes to read; half a minute to run on a CPU. The runs that it shows took longer, and were recorded.
#
# Previous: [Chapter 11 · Variants](ch11_variants.ipynb) · Next: [Chapter 13 · Since 2017](ch13_since_2017.ipynb)
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
    from scripts.ch12_ablations_and_scaling import main

    raise SystemExit(main())

# %%
import copy
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import LearnedPositions
from scripts.ch04_encoder_decoder import EncoderDecoder, SublayerConnection, clones
from scripts.ch05_training import LabelSmoothing, run_epoch, train_step
from scripts.ch06_multi30k import token_batches
from scripts.ch07_going_fast import fast_loss, keep_memory, switches_for
from scripts.ch08_training_run import (
    PRESETS,
    TrainConfig,
    Trained,
    TrainingData,
    batches_of,
    build_model,
    corpus_bleu,
    epoch_plan,
    identity,
    learning_rate,
    loss_function_of,
    make_optimizer,
    paired_p,
    pick_device,
    plain_translate,
    prepare,
    writable,
)
from scripts.ch09_decoding_and_bleu import translate
from scripts.checkpoints import write_whole
from scripts.records import ROOT, provenance, save_record

# %%
STUDY = replace(
    PRESETS["narrow"],
    d_model=64,
    d_ff=256,
    heads=4,
    vocab=2000,
    epochs=1,
    max_tokens=1024,
    lr=4.2e-3,
    warmup=100,
    average=0,
    precision="float32",
    device="cpu",
    name="study",
)


# %%
def attentions(model: nn.Module) -> Iterator[MultiHeadedAttention]:
    """Every attention of the model."""
    return (part for part in model.modules() if isinstance(part, MultiHeadedAttention))


# %%
def drop_positions(model: EncoderDecoder, sides: Sequence[str] = ("src", "tgt")) -> None:
    """Let the positions add nothing: the sinusoids become zeros, on the sides named."""
    for side in sides:
        getattr(model, f"{side}_embed")[1].pe.zero_()


def learn_positions(model: EncoderDecoder) -> None:
    """A learned table in the sinusoids' place, one on each side (the paper's Table 3, row E)."""
    for embed in (model.src_embed, model.tgt_embed):
        sinusoids = embed[1]
        embed[1] = LearnedPositions(sinusoids.pe.size(1), sinusoids.dropout.p)


# %%
class WithoutResidual(SublayerConnection):
    """The connection without its road past the sublayer: norm and dropout stay, x + … goes."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, D) to (B, T, D)."""
        if self.norm_first:
            return self.dropout(sublayer(self.norm(x)))
        return self.norm(self.dropout(sublayer(x)))


def drop_residuals(model: EncoderDecoder) -> None:
    """Every residual connection becomes one without its x + …"""
    for layer in (*model.encoder.layers, *model.decoder.layers):
        old = layer.sublayer[0]
        new = WithoutResidual(layer.size, old.dropout.p, old.norm_first)
        layer.sublayer = clones(new, len(layer.sublayer))


# %%
class Times(nn.Module):
    """A parametrization: the weight that the layer uses is `factor` times the one it learns."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, scaled; any shape."""
        return self.factor * weight


def drop_scale(model: EncoderDecoder) -> None:
    """Attention without 1/√d_k: queries √d_k times as long, so that the division undoes just that."""
    for attn in attentions(model):
        d_k = attn.project_query.out_features // attn.h
        for name in ("weight", "bias"):
            parametrize.register_parametrization(attn.project_query, name, Times(math.sqrt(d_k)))


# %%
def set_d_k(model: EncoderDecoder, d_k: int) -> None:
    """Queries and keys of `d_k` numbers a head; values keep D/H (the paper's Table 3, rows B)."""
    for attn in attentions(model):
        for name in ("project_query", "project_key"):
            layer = nn.Linear(attn.project_query.in_features, attn.h * d_k)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
            setattr(attn, name, layer)


# %%
@dataclass(frozen=True)
class StudyRow:
    """A row of the study: which settings change, and what is done to the built model."""

    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    operate: Callable[[EncoderDecoder], None] | None = None
    way: Literal["fast", "apart", "textbook"] = "fast"

    def config(self, base: TrainConfig, **more: Any) -> TrainConfig:
        """`base` with this row's settings, and `more`."""
        return replace(base, **(self.changes | more))

    def build(self, config: TrainConfig, vocab: int) -> EncoderDecoder:
        """The row's model over `vocab` pieces, from the global seed."""
        model = build_model(config, vocab)
        if self.operate is not None:
            self.operate(model)
        return model

    def loss_of(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor]]:
        """How this row's loss is computed: the fast path, if that can see what was changed."""
        device = pick_device(config.device)
        if self.way == "apart":  # projections of different widths can't be one product
            how = replace(switches_for(device), joint_projections=False)
            return partial(fast_loss, how=how)
        path = "textbook" if self.way == "textbook" else config.path
        return loss_function_of(replace(config, path=path), device)


# %%
THE_BASE = "the study's base"
STUDY_ROWS: dict[str, StudyRow] = {
    THE_BASE: StudyRow("base"),
    "1 head": StudyRow("A", {"heads": 1}),
    "2 heads": StudyRow("A", {"heads": 2}),
    "8 heads": StudyRow("A", {"heads": 8}),
    "16 heads": StudyRow("A", {"heads": 16}),
    "d_k 4": StudyRow("B", {}, partial(set_d_k, d_k=4), "apart"),
    "d_k 8": StudyRow("B", {}, partial(set_d_k, d_k=8), "apart"),
    "1 layer": StudyRow("C", {"layers": 1}),
    "4 layers": StudyRow("C", {"layers": 4}),
    "d_model 32": StudyRow("C", {"d_model": 32}),
    "d_model 128": StudyRow("C", {"d_model": 128}),
    "d_ff 64": StudyRow("C", {"d_ff": 64}),
    "d_ff 512": StudyRow("C", {"d_ff": 512}),
    "no dropout": StudyRow("D", {"dropout": 0.0}),
    "dropout 0.2": StudyRow("D", {"dropout": 0.2}),
    "no smoothing": StudyRow("D", {"smoothing": 0.0}),
    "smoothing 0.2": StudyRow("D", {"smoothing": 0.2}),
    "learned positions": StudyRow("E", {}, learn_positions),
    "no positions": StudyRow("ours", {}, drop_positions),
    "no positions in the encoder": StudyRow("ours", {}, partial(drop_positions, sides=("src",))),
    "no positions in the decoder": StudyRow("ours", {}, partial(drop_positions, sides=("tgt",))),
    "no residual": StudyRow("ours", {}, drop_residuals, "textbook"),
    "no √d_k": StudyRow("ours", {}, drop_scale),
    "no warm-up": StudyRow("ours", {"warmup": 1}),
    "post-norm": StudyRow("ours", {"norm_first": False}),
    "post-norm, no warm-up": StudyRow("ours", {"norm_first": False, "warmup": 1}),
}

ONE_OF_EACH = (
    "no positions",
    "no residual",
    "no √d_k",
    "post-norm, no warm-up",
    "learned positions",
    "1 head",
    "no dropout",
    "1 layer",
    "no warm-up",
    "16 heads",
    "d_k 4",
    "post-norm",
    "no smoothing",
    "d_model 32",
)

# %%
WIDTHS = (12, 16, 24, 32, 48, 64, 96, 128)  # d_model of the eight sizes
FRACTIONS = (1, 2, 4, 8, 16, 32, 64)  # 1/1, 1/2, … of the training pairs
PART_WIDTH = 32  # of the model that is trained on parts of the data
MOST_EPOCHS = 32  # passes over a part


def sized(width: int) -> dict[str, Any]:
    """The settings that change with the size: widths, and a rate that falls as 1/√D (§5.3, eq. 3)."""
    rate = STUDY.lr * math.sqrt(STUDY.d_model / width)
    return {"d_model": width, "d_ff": 4 * width, "lr": round(rate, 6)}


def part_of(data: TrainingData, share: int) -> TrainingData:
    """1/`share` of the training pairs, each smaller part inside the larger; the rest as it is."""
    order = list(range(len(data.train)))
    random.Random("parts").shuffle(order)
    kept = sorted(order[: len(order) // share])
    train = [data.train[i] for i in kept]
    pairs = [data.corpus["train"][i] for i in kept]
    return replace(data, corpus=data.corpus | {"train": pairs}, train=train)


def layer_parameters(model: EncoderDecoder) -> int:
    """Parameters of encoder and decoder: all but the tables and the generator, as Kaplan et al. count."""
    return sum(p.numel() for part in (model.encoder, model.decoder) for p in part.parameters())


# %%
PATIENCE = 3  # epochs without a better validation loss after which a run ends


@torch.no_grad()
def validation_loss(model: EncoderDecoder, row: StudyRow, config: TrainConfig, data: TrainingData):
    """Nats per token on the validation split, not smoothed."""
    batches = batches_of(data.val, token_batches(data.val, 2048), pick_device(config.device))
    report = run_epoch(batches, model, LabelSmoothing(0.0), loss_of=row.loss_of(config))
    return report.nll / report.tokens


def train_row(
    row: StudyRow, config: TrainConfig, data: TrainingData
) -> tuple[EncoderDecoder, list[float]]:
    """Train one model; it with the weights of its best epoch, and the validation loss after each.

    Raises FloatingPointError where a loss or a gradient overflowed.
    """
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    model = row.build(config, len(data.tokenizer)).to(device)
    optimizer, criterion = make_optimizer(config, model), LabelSmoothing(config.smoothing)
    plans = [epoch_plan(config, data, epoch) for epoch in range(1, config.epochs + 1)]
    rate_at = learning_rate(config, sum(map(len, plans)))
    scheduler = LambdaLR(optimizer, lambda done: rate_at(done + 1))
    loss_of, losses = row.loss_of(config), []
    best: dict[str, Tensor] = {}
    for plan in plans:
        model.train()
        for step in plan:
            batches = list(batches_of(data.train, step, device))
            train_step(model, batches, criterion, optimizer, config.clip, loss_of)
            scheduler.step()
        losses.append(validation_loss(model, row, config, data))
        if losses[-1] == min(losses):
            best = copy.deepcopy(model.state_dict())
        if len(losses) - losses.index(min(losses)) > PATIENCE:
            break
    model.load_state_dict(best)
    return model, losses


# %%
@dataclass(frozen=True)
class StudyRun:
    """One training of the study: a row, or a size, or a share of the data, with its seed."""

    name: str
    row: StudyRow
    config: TrainConfig
    share: int = 1  # trains on 1/share of the pairs

    @property
    def slug(self) -> str:
        """A name for its folder."""
        plain = self.name.lower().replace("√", "root ").replace("1/", "part ")
        return re.sub(r"[^a-z0-9]+", "-", plain) + f"-{self.config.seed}"

    @property
    def key(self) -> dict[str, Any]:
        """What makes the run the run it is: a finished run is reused only where this is the same."""
        return identity(self.config) | {"share": self.share, "row": self.name}


# %%
@dataclass
class StudyOptions:
    """What `study` runs; each field is an option of the command line."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    seeds: int = 2
    """Runs of each row, size and share."""
    base_seeds: int = 3
    """Runs of the base."""
    epochs: int = STUDY.epochs
    """Passes over the training split."""
    device: str = "cpu"
    """Where they run."""
    train: bool = True
    """Train what is missing; false: put on record what is there."""
    save: bool = False
    """Rewrite results/ablations-CORPUS.json and results/scaling-CORPUS.json after each run."""


def study_runs(options: StudyOptions) -> list[StudyRun]:
    """Every training asked for, in an order that is worth something wherever it stops.

    The base, the sizes and shares, the base's other seeds, one row of each kind, the remaining rows;
    then the next seed.
    """
    base = replace(STUDY, corpus=options.corpus, epochs=options.epochs, device=options.device)

    def row_run(name: str, seed: int) -> StudyRun:
        row = STUDY_ROWS[name]
        return StudyRun(name, row, row.config(base, seed=seed))

    def scaling_runs(seed: int) -> Iterator[StudyRun]:
        for width in WIDTHS:
            if width != base.d_model:  # that is the base itself
                row = StudyRow("size", sized(width))
                yield StudyRun(f"width {width}", row, row.config(base, seed=seed))
        for share in FRACTIONS[1:]:
            passes = min(MOST_EPOCHS, share * base.epochs)
            row = StudyRow("data", sized(PART_WIDTH) | {"epochs": passes})
            yield StudyRun(f"1/{share} of the pairs", row, row.config(base, seed=seed), share)

    runs = []
    for seed in range(1, options.seeds + 1):
        runs += [row_run(THE_BASE, seed), *scaling_runs(seed)]
        if seed == 1:
            runs += [row_run(THE_BASE, other) for other in range(2, options.base_seeds + 1)]
        rest = [name for name in STUDY_ROWS if name not in ONE_OF_EACH]
        runs += [row_run(name, seed) for name in (*ONE_OF_EACH, *rest)]
    return list({(run.name, run.config.seed): run for run in runs}.values())


# %%
def translated(run: StudyRun, trained: Trained, data: TrainingData) -> dict[str, Any]:
    """Greedy translations of the validation split, and their BLEU."""
    sources, references = zip(*data.corpus["val"], strict=True)
    # Chapter 9's cache walks the standard model; what it can't see decodes by the formula.
    decode = translate if run.row.way == "fast" else plain_translate
    texts = decode(trained, sources)
    return {"bleu": round(corpus_bleu(texts, references).score, 3), "translations": texts}


def store_score(run: StudyRun, score: dict[str, Any], folder: Path) -> None:
    """Write a run's score, from which `stored_score` reads it."""
    path = writable(folder / run.slug) / "score.json"
    write_whole(path, json.dumps(score, ensure_ascii=False).encode())


def stored_score(run: StudyRun, folder: Path) -> dict[str, Any] | None:
    """The score of a run that was finished earlier with the same settings, or None."""
    path = folder / run.slug / "score.json"
    score = json.loads(path.read_text("utf-8")) if path.is_file() else None
    return score if score and score["key"] == run.key else None


def study_run(run: StudyRun, data: TrainingData) -> dict[str, Any]:
    """Train one run and score it on the validation split; where it diverged, the loss is None."""
    start, part = time.perf_counter(), part_of(data, run.share)
    score = {"key": run.key, "seed": run.config.seed, "loss": None}
    try:
        model, losses = train_row(run.row, run.config, part)
    except FloatingPointError as error:
        score["diverged"] = str(error)
    else:
        score |= {
            "loss": round(min(losses), 5),
            "losses": [round(loss, 5) for loss in losses],
            "parameters": sum(p.numel() for p in model.parameters()),
            "layer_parameters": layer_parameters(model),
            "train_tokens": sum(len(example.tgt) - 1 for example in part.train),
        }
        if run.name in STUDY_ROWS:
            score |= translated(run, Trained(model, data.tokenizer, run.config), data)
    score["seconds"] = round(time.perf_counter() - start)
    return score


# %%
def brief(score: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What of a run's score goes on record."""
    return {k: v for k, v in score.items() if k not in ("key", "translations")} | more


def study_records(
    options: StudyOptions,
    done: dict[tuple[str, int], tuple[StudyRun, dict[str, Any]]],
    data: TrainingData,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The records of ablation and scaling, of the runs that are `done` by name and seed."""
    command = f"python scripts/ch12_ablations_and_scaling.py study --corpus {options.corpus}"
    command += f" --seeds {options.seeds} --base_seeds {options.base_seeds}"
    command += f" --epochs {options.epochs} --save true"
    base = replace(STUDY, corpus=options.corpus, epochs=options.epochs, device=options.device)
    opening = provenance(command, pick_device(options.device)) | {
        "corpus": options.corpus,
        "train_pairs": len(data.train),
        "config": asdict(base),
    }
    rows: dict[str, Any] = {}
    for name, row in STUDY_ROWS.items():
        runs = [score for (of, _), (_, score) in done.items() if of == name]
        rows[name] = {
            "group": row.group,
            "changes": row.changes | ({"model": name} if row.operate else {}),
            "runs": [brief(score) for score in sorted(runs, key=lambda score: score["seed"])],
        }
    sizes, parts = [], []
    for run, score in done.values():
        if run.name == THE_BASE or run.row.group == "size":
            sizes.append(brief(score, d_model=run.config.d_model, lr=run.config.lr))
        if run.config.d_model == PART_WIDTH and run.row.group in ("size", "data"):
            parts.append(brief(score, share=run.share, epochs=run.config.epochs))
    sizes.sort(key=lambda point: (point["d_model"], point["seed"]))
    parts.sort(key=lambda point: (-point["share"], point["seed"]))
    return opening | {"rows": rows}, opening | {"sizes": sizes, "parts": parts}


# %%
def run_study(options: StudyOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train whatever is missing, one run after the other; the two records."""
    if pick_device(options.device).type == "cpu":
        keep_memory()
    data = prepare(replace(STUDY, corpus=options.corpus))  # no row changes what is read
    folder = ROOT / "runs" / f"study-{options.corpus}-{options.epochs}"
    done: dict[tuple[str, int], tuple[StudyRun, dict[str, Any]]] = {}
    for run in study_runs(options):
        score = stored_score(run, folder)
        if score is None and options.train:
            score = study_run(run, data)
            store_score(run, score, folder)
            loss, seconds = score["loss"] or math.nan, score["seconds"]
            tqdm.write(f"{run.name}, seed {run.config.seed}: loss {loss:.4f}, {seconds} s")
        if score is not None:
            done[run.name, run.config.seed] = run, score
            if options.save and options.train:
                save_study(options.corpus, study_records(options, done, data))
    compare_translations(done, data, folder)
    records = study_records(options, done, data)
    if options.save:
        save_study(options.corpus, records)
    return records


def save_study(corpus: str, records: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Write both records into results/."""
    for name, record in zip(("ablations", "scaling"), records, strict=True):
        save_record(f"{name}-{corpus}", record)


def compare_translations(
    done: dict[tuple[str, int], tuple[StudyRun, dict[str, Any]]], data: TrainingData, folder: Path
) -> None:
    """Give each row's score its p against the base with the same seed: chapter 8's paired bootstrap."""
    references = [english for _, english in data.corpus["val"]]
    for (_, seed), (run, score) in done.items():
        base = done.get((THE_BASE, seed), (None, {}))[1]
        if "translations" in score and "translations" in base and "p" not in score:
            given = (base["translations"], score["translations"], references)
            score["p"] = None if score is base else round(paired_p(*given), 4)
            store_score(run, score, folder)


# %%
def parse_study(argv: Sequence[str]) -> StudyOptions:
    """`study` and its options. Raises ValueError for what it does not understand."""
    from jsonargparse import ArgumentError, ArgumentParser

    if list(argv[:1]) != ["study"]:
        raise ValueError(f"unknown task {' '.join(argv[:1])!r}: this chapter knows study")
    parser = ArgumentParser(prog="ch12_ablations_and_scaling.py study", exit_on_error=False)
    parser.add_class_arguments(StudyOptions)
    try:
        return StudyOptions(**parser.parse_args(list(argv[1:])).as_dict())
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command: `study` trains what is missing. Returns the exit code, 2 for a mistake or a fault."""
    try:
        run_study(parse_study(list(sys.argv[1:] if argv is None else argv)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted: the same command goes on with the run that was broken off",
            file=sys.stderr,
        )
        return 130
    return 0
