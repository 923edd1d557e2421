"""The study of chapter 17: `python -m scripts.studies.variants gpt`.

A run that is done is kept below the folder of runs and only read when the command is given again,
so that it goes on where it was interrupted.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.variants"))

import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.records import provenance, save_record
from scripts.ch06_training import UNK, LabelSmoothing, train_step
from scripts.ch07_multi30k import (
    Example,
    token_batches,
)
from scripts.ch08_decoding import dropout_off
from scripts.ch12_going_fast import keep_memory
from scripts.ch17_small_gpt import (
    Characters,
    KneserNey,
    OneStack,
    asked_next,
    bits_per_character,
    gram_counts,
    row_nats,
)
from scripts.corpora.load import load_corpus
from scripts.engine.losses import LossOf
from scripts.engine.optimizers import make_optimizer
from scripts.engine.scores import held_out_splits
from scripts.engine.settings import TrainConfig, learning_rate, pick_device
from scripts.engine.steps import set_rate
from scripts.studies.gpt import samples_of
from scripts.studies.runner import Run, kept_at
from scripts.studies.stacks import fast_stack_loss, one_stack

Rows = dict[str, list[list[int]]]  # a split's texts in characters

ORDERS = range(1, 11)  # of the n-gram models

# What a record tells of a config.
SHOWN = ("layers", "d_model", "d_ff", "heads", "vocab", "dropout", "epochs", "max_tokens")
SHOWN += ("optimizer", "lr")


@dataclass
class VariantOptions:
    """What is trained."""

    what: Literal["gpt"] = "gpt"
    """The study, of which this is the last one."""
    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    seeds: int = 2
    """Runs of each kind: their spread is the noise."""
    epochs: int | None = None
    """Passes over the training split; by default the chapter's."""
    device: str = "cpu"
    """Where they run."""
    save: bool = False
    """Keep the result as results/variants-gpt-CORPUS.json, which the chapter shows."""

    @property
    def folder(self) -> Path:
        """What holds the folders of runs."""
        return runs_folder() / f"variants-{self.corpus}"

    def of(self, config: TrainConfig) -> TrainConfig:
        """`config` as these options want it."""
        return replace(config, device=self.device, epochs=self.epochs or config.epochs)


def once(folder: Path, settings: Run, work: Callable[[], Run]) -> Run:
    """What `work` gives, kept as folder/score.json and, for the same settings, read from there."""
    found = kept_at(folder / "score.json", {"settings": settings}, lambda: {"score": work()})
    return found["score"]


def runs_of(
    options: VariantOptions, kinds: dict[str, tuple[TrainConfig, Callable[..., Run]]]
) -> dict[str, list[Run]]:
    """The runs of each kind, with every seed."""
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    wanted = itertools.product(range(1, options.seeds + 1), kinds.items())
    for seed, (kind, (config, work)) in wanted:
        config = replace(config, seed=seed)
        slug = "-".join(map(str, (re.sub(r"\W+", "-", kind), config.epochs, seed)))
        score = once(options.folder / slug, asdict(config), partial(work, config))
        runs[kind].append({"seed": seed} | score)
        tqdm.write(f"{slug}: {score['val']} on validation")
    return runs


def shown(config: TrainConfig, but: str = "") -> dict[str, Any]:
    """What a record tells of a config."""
    return {name: getattr(config, name) for name in SHOWN if name != but}


def train_variant(
    model: nn.Module,
    config: TrainConfig,
    plan: Callable[[int], list[list[int]]],
    batch_of: Callable[[list[int]], Any],
    loss_of: LossOf,
    validate: Callable[[nn.Module], dict[str, float]],
) -> list[dict[str, float]]:
    """Train by `config`'s optimizer, schedule, smoothing and epochs; a row for each epoch.

    `validate`, with dropout off, adds to the row.
    """
    device = next(model.parameters()).device
    optimizer = make_optimizer(config, model)
    rate_at = learning_rate(config, config.epochs * len(plan(1)))
    criterion, history, step = LabelSmoothing(config.smoothing), [], 0
    for epoch in range(1, config.epochs + 1):
        model.train()
        nll = tokens = 0.0
        for indices in tqdm(plan(epoch), f"epoch {epoch}", leave=False, disable=None):
            step += 1
            set_rate(optimizer, rate_at(step))
            batch = batch_of(indices).to(device)
            report = train_step(model, [batch], criterion, optimizer, config.clip, loss_of)
            nll, tokens = nll + report.nll, tokens + report.tokens
        row = {"epoch": epoch, "train_nats": round(nll / tokens, 4)}
        with dropout_off(model), torch.no_grad():
            history.append(row | validate(model))
    return history


def trained_model(
    config: TrainConfig,
    model_of: Callable[[], nn.Module],
    examples: Sequence[Example],
    batch_of: Callable[[list[int]], Any],
    loss_of: LossOf,
    validate: Callable[[nn.Module], dict[str, float]],
) -> tuple[nn.Module, Run]:
    """`model_of()`, trained on batches of `examples`; with it, its size and its history."""
    torch.manual_seed(config.seed)
    model = model_of().to(pick_device(config.device))

    def plan(epoch: int) -> list[list[int]]:
        rng = random.Random(f"{config.seed}:{epoch}")
        return token_batches(examples, config.max_tokens, rng)

    history = train_variant(model, config, plan, batch_of, loss_of, validate)
    return model, {"parameters": sum(p.numel() for p in model.parameters()), "history": history}


# Language models.

GPT_CONFIGS = {
    "sample": TrainConfig(
        corpus="sample", layers=2, d_model=64, d_ff=256, heads=4, dropout=0.0, smoothing=0.0,
        epochs=1, max_tokens=2048, lr=4e-3, warmup=50,
    ),
    "multi30k": TrainConfig(
        corpus="multi30k", layers=4, d_model=128, d_ff=512, heads=4, dropout=0.0, smoothing=0.0,
        epochs=8, max_tokens=2048, optimizer="muon", lr=3e-3, muon_lr=3e-3, warmup=200,
    ),
}  # fmt: skip


def ngram_bits(rows: Rows, vocab: int) -> list[dict[str, float]]:
    """Bits per character of each order's model, counted on rows["train"], on all other rows."""
    counts, found = gram_counts(rows["train"], max(ORDERS)), []
    for order in ORDERS:
        model = KneserNey(counts[:order], vocab)
        found.append({"order": order, "entries": sum(map(len, model.tables))})
        for name in rows:
            if name != "train":
                nats = [model.nats(row) for row in rows[name]]
                found[-1][name] = round(bits_per_character(nats, rows[name]), 4)
    return found


def gpt_run(config: TrainConfig, characters: Characters, rows: Rows, test: str) -> Run:
    """Train, score and sample one mini-GPT."""

    def bits(model: OneStack, name: str) -> float:
        return round(bits_per_character(row_nats(model, rows[name]), rows[name]), 4)

    start = time.perf_counter()
    model, found = trained_model(
        config,
        partial(one_stack, config, len(characters), positions="learned", max_len=256),
        [Example([], row) for row in rows["train"]],
        lambda indices: asked_next([rows["train"][i] for i in indices]),
        fast_stack_loss,
        lambda model: {"val_bits": bits(model, "val")},
    )
    return found | {
        "val": found["history"][-1]["val_bits"],
        test: bits(model, test),
        "samples": samples_of(model, characters, rows["train"]),
        "seconds": round(time.perf_counter() - start),
    }


def study_gpt(options: VariantOptions) -> dict[str, Any]:
    """Mini-GPTs and n-gram models on the English captions; what the record says of them."""
    corpus = load_corpus(options.corpus)
    characters = Characters([english for _, english in corpus["train"]])
    size, test = len(characters), held_out_splits(corpus)[0]
    rows = {
        name: [characters.encode(english[:250]) for _, english in corpus[name]]
        for name in ("train", "val", test)
    }
    home, config = options.folder / "ngrams", options.of(GPT_CONFIGS[options.corpus])
    ngrams = once(home, {"characters": size}, lambda: {"rows": ngram_bits(rows, size)})
    work = partial(gpt_run, characters=characters, rows=rows, test=test)
    return {
        "test": test,
        "alphabet": "".join(characters.alphabet),
        "predicted": {name: sum(len(row) - 1 for row in part) for name, part in rows.items()},
        "unknown": {name: sum(row.count(UNK) for row in part) for name, part in rows.items()},
        "ngrams": ngrams["rows"],
        "config": shown(config, but="vocab"),
        "runs": runs_of(options, {"gpt": (config, work)})["gpt"],
    }


def study(options: VariantOptions) -> dict[str, Any]:
    """One of `STUDIES` as a record, saved if the options say so."""
    if pick_device(options.device).type == "cpu":
        keep_memory()
    found = study_gpt(options)
    command = as_typed(__name__, options, places=("what",))
    record = {**provenance(command, pick_device(options.device)), "corpus": options.corpus, **found}
    if options.save:
        save_record(f"variants-gpt-{options.corpus}", record)
    return record


main = Command(
    __name__,
    VariantOptions,
    study,
    "Train a small GPT and what it has to beat.",
    places={"what": "The study."},
    interrupted=GOES_ON,
)
