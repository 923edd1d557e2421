"""Fine-tuning by cross-entropy and by minimum risk, for chapter 21's recipes."""

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import LabelSmoothing
from scripts.ch07_multi30k import Example, make_batch, pad_rows
from scripts.ch21_learning_from_models import (
    chrf_risks,
    distinct_candidates,
    risk_of_candidates,
    sequence_log_probs,
)
from scripts.core.models import Trained
from scripts.core.optimizers import make_optimizer
from scripts.core.settings import TrainConfig, pick_device
from scripts.fast.losses import loss_function_of

TuningLoss = Callable[[EncoderDecoder, Sequence[Example]], Tensor]  # of a model and some pairs


@dataclass(frozen=True)
class Tuning:
    """How a trained model goes on."""

    lr: float = 5e-4  # of the first step; it falls linearly to zero
    steps: int = 200
    sentences: int = 16  # in a step
    candidates: int = 8  # draws for each source
    sharpness: float = 0.05  # the α of Q


def minimum_risk(trained: Trained, how: Tuning, seed: int) -> TuningLoss:
    """A loss for `fine_tuned`: the mean risk of freshly drawn candidates (Shen et al. 2016)."""
    tokenizer, device = trained.tokenizer, pick_device(trained.config.device)
    generator = torch.Generator(device).manual_seed(seed)

    def loss(model: EncoderDecoder, examples: Sequence[Example]) -> Tensor:
        src = pad_rows([e.src for e in examples]).to(device)  # (B, S)
        limit = min(MAX_LEN, src.size(1) + 10)
        references = [e.tgt[1:] for e in examples]
        drawn = (how.candidates, limit, generator, references)
        candidates = distinct_candidates(model, src, *drawn)
        risks: list[float] = []
        for texts, example in zip(candidates, examples, strict=True):
            reference = tokenizer.decode(example.tgt)
            risks += chrf_risks([tokenizer.decode(ids) for ids in texts], reference)
        log_probs = sequence_log_probs(model, src, candidates)  # (N,)
        marks, counts = log_probs.new_tensor(risks), [len(texts) for texts in candidates]
        return risk_of_candidates(log_probs, marks, counts, how.sharpness).mean()

    return loss


def cross_entropy(config: TrainConfig) -> TuningLoss:
    """A loss for `fine_tuned`: the base's own, per token."""
    device = pick_device(config.device)
    loss_of, criterion = loss_function_of(config, device), LabelSmoothing(config.smoothing)

    def loss(model: EncoderDecoder, examples: Sequence[Example]) -> Tensor:
        batch = make_batch(examples).to(device)
        return loss_of(model, batch, criterion)[0] / batch.ntokens

    return loss


def fine_tuned(
    trained: Trained,
    train: Sequence[Example],
    loss_of: TuningLoss,
    how: Tuning,
    seed: int,
) -> EncoderDecoder:
    """A copy of the model after `how.steps` steps on `loss_of`; a seed decides the sentences."""
    model = copy.deepcopy(trained.model).eval()  # no dropout: Q is the model that is drawn from
    optimizer = make_optimizer(trained.config, model)
    total, size = how.steps, how.sentences
    scheduler = LambdaLR(optimizer, lambda done: how.lr * (1 - done / total))
    order = list(range(len(train)))
    random.Random(f"risk:{seed}").shuffle(order)
    for step in range(total):
        chosen = [order[(step * size + i) % len(order)] for i in range(size)]
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, [train[i] for i in chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), trained.config.clip or math.inf)
        optimizer.step()
        scheduler.step()
    return model
