"""Trains a row of a study, a model that differs from the base in one thing, and scores it.

Each epoch is validated, and the weights of the best one are kept. Which rows there are is said by
the chapters; which of them are trained, at which rate and with which seeds, by each study's plan.
"""

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import LabelSmoothing, run_epoch
from scripts.ch07_multi30k import token_batches
from scripts.ch08_decoding import plain_translate
from scripts.ch19_ablations import StudyRow
from scripts.ch20_scaling import part_of
from scripts.engine.data import TrainingData, batches_of, epoch_plan, prepare
from scripts.engine.models import Trained
from scripts.engine.optimizers import make_optimizer
from scripts.engine.scores import corpus_bleu
from scripts.engine.settings import TrainConfig, learning_rate, pick_device
from scripts.engine.translating import fast_translate
from scripts.studies.runner import Run, best_rate, sweep, these

PATIENCE = 3  # epochs without a better validation loss after which a run ends
SWEEP, SEEDS = 0, (1, 2, 3)  # the seed that chooses a rate isn't one of those that count


def validation_loss(
    model: EncoderDecoder, row: StudyRow, config: TrainConfig, data: TrainingData
) -> float:
    """Nats per token on the validation split, not smoothed."""
    batches = batches_of(data.val, token_batches(data.val, 2048), pick_device(config.device))
    report = run_epoch(batches, model, LabelSmoothing(0.0), loss_of=row.loss_of(config))
    return report.nll / report.tokens


def train_row(
    row: StudyRow, config: TrainConfig, data: TrainingData
) -> tuple[EncoderDecoder, list[float], list[float]]:
    """Train one model; it with the weights of its best epoch, then two losses after each epoch.

    Those are nats per token: of validation, and of training as it went. Raises FloatingPointError
    where a loss or a gradient overflowed.
    """
    torch.manual_seed(config.seed)
    device = pick_device(config.device)
    model = row.build(config, len(data.tokenizer)).to(device)
    optimizer, criterion = make_optimizer(config, model), LabelSmoothing(config.smoothing)
    plans = [epoch_plan(config, data, epoch) for epoch in range(1, config.epochs + 1)]
    rate_at = learning_rate(config, sum(map(len, plans)))
    scheduler = LambdaLR(optimizer, lambda done: rate_at(done + 1))
    how = {"clip": config.clip, "loss_of": row.loss_of(config), "accumulate": config.accumulate}
    losses: list[float] = []
    trained: list[float] = []
    best: dict[str, Tensor] = {}
    for plan in plans:
        batches = batches_of(data.train, [batch for step in plan for batch in step], device)
        report = run_epoch(batches, model, criterion, optimizer, scheduler, **how)
        trained.append(report.nll / report.tokens)
        losses.append(validation_loss(model, row, config, data))
        if losses[-1] == min(losses):
            best = copy.deepcopy(model.state_dict())
        if len(losses) - losses.index(min(losses)) > PATIENCE:
            break
    model.load_state_dict(best)
    return model, losses, trained


def translations(row: StudyRow, trained: Trained, sources: Sequence[str]) -> list[str]:
    """Translations by a beam of 4."""
    # The engine's cache walks the standard model; what it can't see decodes by the formula.
    decode = fast_translate if row.way == "fast" else plain_translate
    return decode(trained, sources, beam=4)


@functools.cache
def data_of(corpus: str, vocab: int, share: int = 1) -> TrainingData:
    """What runs of a study read, of the training pairs 1/`share`; a worker prepares it once."""
    if share > 1:
        return part_of(data_of(corpus, vocab), share)
    return prepare(TrainConfig(corpus=corpus, vocab=vocab))


def one_run(
    row: StudyRow,
    setting: Mapping[str, Any],
    wanted: Run,
    translate: Callable[[StudyRow, Trained, Sequence[str]], list[str]] = translations,
) -> Run:
    """Train a row in a study's setting, with what is wanted; its losses in nats, and its BLEU.

    `loss` is the best of validation, and None where the run diverged. Runs of a sweep or of a share
    of the pairs are not translated.
    """
    start = time.perf_counter()
    changes = {key: value for key, value in wanted.items() if key in setting}
    config = row.config(TrainConfig(**setting), **changes)
    data = data_of(config.corpus, config.vocab, wanted.get("share", 1))
    found: Run = {"loss": None}
    try:
        model, losses, trained = train_row(row, config, data)
    except FloatingPointError as error:
        found["diverged"] = str(error)
    else:
        found["loss"] = round(min(losses), 5)
        found |= {"losses": [round(loss, 5) for loss in losses]}
        found |= {"trained": [round(loss, 5) for loss in trained]}
        if wanted["seed"] != SWEEP and "share" not in wanted:
            sources, references = zip(*data.corpus["val"], strict=True)
            texts = translate(row, Trained(model, data.tokenizer, config), sources)
            found["bleu"] = round(corpus_bleu(texts, references).score, 2)
    return found | {"seconds": round(time.perf_counter() - start)}


class Wanted:
    """A plan in the making: the runs wanted by now, of which some wait for a sweep to end."""

    def __init__(self, runs: Sequence[Run]):
        self.runs, self.wanted = runs, []

    def sweep(self, start: float, **place: Any) -> float | None:
        """The best rate of the row at `place`, once it is known; until then its runs are wanted."""
        place |= {"seed": SWEEP}
        done = these(self.runs, **place)
        rates = sweep(done, start)
        self.wanted += [place | {"lr": rate} for rate in rates]
        return best_rate(done) if {*rates} <= {run["lr"] for run in done} else None

    def seeds(self, rate: float | None, **place: Any) -> None:
        """The runs that count, once the rate is known."""
        if rate is not None:
            self.wanted += [place | {"lr": rate, "seed": seed} for seed in SEEDS]
