"""Trains a row of a study, a model that differs from the base in one thing, and scores it.

Each epoch is validated, and the weights of the best one are kept. The chapters say which rows
there are; each study's plan says which are trained, at which rate and with which seeds.
"""

import copy
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from scripts import runs_folder
from scripts.book.files import writable
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import Batch, EpochReport, LabelSmoothing
from scripts.ch07_multi30k import make_batch, token_batches
from scripts.ch08_decoding import plain_translate
from scripts.ch19_ablations import StudyRow
from scripts.core.checkpoints import load_tensors, load_weights, save_tensors, weights
from scripts.core.data import TrainingData, batches_of, prepare, with_pairs
from scripts.core.models import Trained
from scripts.core.optimizers import make_optimizer
from scripts.core.scores import corpus_bleu
from scripts.core.settings import TrainConfig, learning_rate
from scripts.core.steps import Figures, Step, set_rate
from scripts.fast.losses import LossOf
from scripts.fast.translating import fast_translate
from scripts.studies.runner import SWEEPS, Run

PATIENCE = 3  # epochs without a better validation loss after which a run ends

CPU = torch.device("cpu")
Losses = list[float]  # nats per token after each epoch


# Training.


def fit_best(
    model: nn.Module,
    config: TrainConfig,
    epochs: Sequence[Sequence[Any]],
    batch_of: Callable[[Any], Any],
    validate: Callable[[], float],
    loss_of: LossOf,
) -> tuple[Losses, Losses]:
    """Train on a batch of each part of each epoch; the model ends with its best epoch's weights.

    Returns two losses for each epoch: what `validate` says, and that of training as it goes. It
    ends after `PATIENCE` epochs that are no better. Raises FloatingPointError if a loss or a
    gradient overflows.
    """
    optimizer, criterion = make_optimizer(config, model), LabelSmoothing(config.smoothing)
    rate_at = learning_rate(config, sum(map(len, epochs)))
    take = Step(model, criterion, optimizer, loss_of, config.clip)
    losses, trained, best, step = [], [], {}, 0
    for parts in epochs:
        model.train()
        report = EpochReport()
        for batch in map(batch_of, parts):
            step += 1
            set_rate(optimizer, rate_at(step))
            figures = Figures(*take.run([batch], batch.ntokens).tolist())
            if not figures.finite:
                raise FloatingPointError(f"loss {figures.loss}, gradient's norm {figures.norm}")
            report += EpochReport(figures.loss, figures.nll, batch.ntokens)
        trained.append(report.nll / report.tokens)
        losses.append(validate())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the validation loss is {losses[-1]}")
        if losses[-1] == min(losses):
            best = copy.deepcopy(model.state_dict())
        if len(losses) - losses.index(min(losses)) > PATIENCE:
            break
    model.load_state_dict(best)
    return losses, trained


@torch.no_grad()
def nats(model: nn.Module, batches: Iterable[Any], loss_of: LossOf) -> float:
    """Mean loss per token of `batches`, not smoothed, dropout off."""
    model.eval()
    total = EpochReport()
    for batch in batches:
        loss, nll = loss_of(model, batch, LabelSmoothing(0.0))
        total += EpochReport(loss.item(), nll.item(), batch.ntokens)
    return total.nll / total.tokens


def validation_loss(
    model: EncoderDecoder, row: StudyRow, config: TrainConfig, data: TrainingData
) -> float:
    """Nats per token on the validation split, not smoothed."""
    batches = batches_of(data.val, token_batches(data.val, 2048), CPU)
    return nats(model, batches, row.loss_of(config))


def train_row(
    row: StudyRow, config: TrainConfig, data: TrainingData
) -> tuple[EncoderDecoder, Losses, Losses]:
    """Train one model; return it, with its best epoch's weights, and the losses of `fit_best`."""
    torch.manual_seed(config.seed)
    model = row.build(config, len(data.tokenizer))
    orders = [random.Random(f"{config.seed}:{epoch}") for epoch in range(1, config.epochs + 1)]
    epochs = [token_batches(data.train, config.max_tokens, order) for order in orders]
    loss_of = row.loss_of(config)

    def batch_of(part: Sequence[int]) -> Batch:
        return make_batch([data.train[i] for i in part])

    def validate() -> float:
        return validation_loss(model, row, config, data)

    return model, *fit_best(model, config, epochs, batch_of, validate, loss_of)


def trained_once(
    name: str, model: nn.Module, config: TrainConfig, train: Callable[[], nn.Module]
) -> nn.Module:
    """What `train()` gives, a model that other runs need, too; or a fresh `model` with its weights.

    They are kept below the folder of runs, and read only if they are of the same `config`. Of
    several processes that want them at once, one trains, and the others wait.
    """
    path, key = writable(runs_folder() / "kept") / f"{name}.safetensors", asdict(config)
    with FileLock(f"{path}.lock"):
        if path.is_file() and load_tensors(path)[1] == key:
            load_weights(model, load_tensors(path)[0], path)
        else:
            model = train()
            save_tensors(path, weights(model), key)
    return model


# Data.


def part_indices(count: int, share: int) -> list[int]:
    """Which 1/`share` of `count` pairs are a part, in order; smaller parts lie in larger ones."""
    order = list(range(count))
    random.Random("parts").shuffle(order)
    return sorted(order[: count // share])


def part_of(data: TrainingData, share: int) -> TrainingData:
    """1/`share` of the training pairs, as `part_indices` chooses them; the rest as it is."""
    indices = part_indices(len(data.train), share)
    return with_pairs(data, [data.corpus["train"][i] for i in indices])


@cache
def data_of(corpus: str, vocab: int, share: int = 1) -> TrainingData:
    """What runs of a study read, 1/`share` of the training pairs; each worker prepares it once."""
    if share > 1:
        return part_of(data_of(corpus, vocab), share)
    return prepare(TrainConfig(corpus=corpus, vocab=vocab))


# Runs.


def bleu(row: StudyRow, trained: Trained, data: TrainingData) -> Run:
    """The BLEU of a beam of 4 on the validation split."""
    # The fast cache knows only the standard model; other models decode by the formula.
    decode = fast_translate if row.way == "fast" else plain_translate
    sources, references = zip(*data.corpus["val"], strict=True)
    return {"bleu": round(corpus_bleu(decode(trained, sources, beam=4), references).score, 2)}


def outcome(train: Callable[[], tuple[Any, Losses, Losses]], score: Callable[[Any], Run]) -> Run:
    """What a run gave: its losses in nats, what `score` says of the model, and its seconds.

    `train` gives the model and the losses of `fit_best`. `loss` is the best of validation; a run
    that diverged has None, and nothing else.
    """
    start = time.perf_counter()
    try:
        model, losses, trained = train()
    except FloatingPointError:
        return {"loss": None}
    losses, trained = ([round(loss, 5) for loss in each] for each in (losses, trained))
    run = {"loss": min(losses), "losses": losses, "trained": trained} | score(model)
    return run | {"seconds": round(time.perf_counter() - start)}


def one_run(
    row: StudyRow,
    setting: Mapping[str, Any],
    task: Run,
    score: Callable[[StudyRow, Trained, TrainingData], Run] = bleu,
    data: TrainingData | None = None,
) -> Run:
    """Train a row in a study's setting, changed as the task says, on its corpus or other `data`.

    Runs of a sweep or of a share of the pairs aren't scored. Muon steps at Adam's rate.
    """
    changes = {key: value for key, value in task.items() if key in setting}
    config = row.config(TrainConfig(**setting), **changes)
    config = replace(config, muon_lr=config.lr)
    data = data or data_of(config.corpus, config.vocab, task.get("share", 1))

    def scored(model: EncoderDecoder) -> Run:
        counts = task["seed"] not in SWEEPS and "share" not in task
        return score(row, Trained(model, data.tokenizer, config), data) if counts else {}

    return outcome(partial(train_row, row, config, data), scored)
