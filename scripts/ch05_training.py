# %% [markdown]
# # Chapter 5 · Training

# %%
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm

from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import EncoderDecoder

# %%
PAD, UNK, BOS, EOS = 0, 1, 2, 3  # the special ids, the same in every chapter


# %%
class Batch:
    """Padded source and target ids with their masks, ready for teacher forcing.

    src (B, S); the full target (B, T+1) is split into the decoder's input `tgt` (B, T), which
    lacks the last token, and the labels `tgt_y` (B, T), which lack the first.
    src_mask (B, 1, S) hides padding; tgt_mask (B, T, T) hides padding and the future.
    `ntokens` counts the labels that are real: what a loss is divided by.
    """

    def __init__(self, src: Tensor, tgt: Tensor, pad: int = PAD):
        self.src = src
        self.src_mask = padding_mask(src, pad)
        self.tgt = tgt[:, :-1]
        self.tgt_y = tgt[:, 1:]
        causal = subsequent_mask(self.tgt.size(1), tgt.device)
        self.tgt_mask = padding_mask(self.tgt, pad) & causal
        self.ntokens = int((self.tgt_y != pad).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        moved = object.__new__(Batch)
        for name, part in vars(self).items():
            setattr(moved, name, part.to(device) if isinstance(part, Tensor) else part)
        return moved


# %%
class LabelSmoothing(nn.Module):
    """Cross-entropy against (1 − ε) on the label and ε spread evenly over all V tokens (§5.4).

    The same as `nn.CrossEntropyLoss(label_smoothing=ε, ignore_index=padding_idx, reduction="sum")`.
    The call returns two sums over the real tokens: the smoothed loss, which is descended, and the
    plain negative log-likelihood, which is reported, since only its exponential is a perplexity.
    """

    def __init__(self, smoothing: float = 0.1, padding_idx: int = PAD):
        super().__init__()
        self.smoothing = smoothing
        self.padding_idx = padding_idx

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """logits (..., V), labels (...), to two scalars in nats."""
        log_z = logits.logsumexp(dim=-1)  # (...)
        nll = log_z - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)  # (...): −log p(label)
        spread = log_z - logits.mean(dim=-1)  # (...): −log p, averaged over the vocabulary
        smoothed = (1 - self.smoothing) * nll + self.smoothing * spread  # (...)
        real = labels != self.padding_idx  # (...)
        return smoothed[real].sum(), nll[real].sum()


# %%
def rate(step: int, model_size: int, factor: float = 1.0, warmup: int = 4000) -> float:
    """The paper's learning rate at `step` = 1, 2, …: linear warm-up, then 1/√step (§5.3, eq. 3)."""
    if step < 1:
        raise ValueError(f"steps count from 1, as in the paper, not {step}")
    return factor * model_size**-0.5 * min(step**-0.5, step * warmup**-1.5)


# %%
def inverse_sqrt_rate(step: int, peak: float, warmup: int) -> float:
    """The paper's curve, named by its peak: `peak` at `step` = `warmup`, then falling as 1/√step."""
    return peak * min(step / warmup, math.sqrt(warmup / step))


# %%
def cosine_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Linear warm-up to `peak`, then half a cosine down to zero just after step `total`."""
    if step <= warmup:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / (total + 1 - warmup))
    return peak * 0.5 * (1 + math.cos(math.pi * done))


# %%
@dataclass
class TrainState:
    """What a training has done so far; a run makes its own, so that none inherits another's."""

    steps: int = 0  # optimizer steps
    sentences: int = 0
    tokens: int = 0  # target tokens, padding not counted


# %%
@dataclass
class EpochReport:
    """Sums over one pass of the data, from which the means are taken once, at the end."""

    loss: float = 0.0  # smoothed, in nats
    nll: float = 0.0  # not smoothed, in nats
    tokens: int = 0
    grad_norms: list[float] = field(default_factory=list)  # before clipping, one an optimizer step

    @property
    def loss_per_token(self) -> float:
        """Smoothed loss in nats a token."""
        return self.loss / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the unsmoothed loss a token: among how many tokens the model still hesitates."""
        return math.exp(self.nll / self.tokens)


# %%
def grouped(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """`batches` in lists of `size`; the last list is shorter where they do not come out even."""
    source = iter(batches)
    while group := list(islice(source, size)):
        yield group


# %%
def batch_loss(
    model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing
) -> tuple[Tensor, Tensor]:
    """Smoothed loss and negative log-likelihood of one batch, both summed over its real tokens."""
    x = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)  # (B, T, D)
    return criterion(model.generator(x), batch.tgt_y)


# %%
def train_step(
    model: EncoderDecoder,
    group: list[Batch],
    criterion: LabelSmoothing,
    optimizer: torch.optim.Optimizer,
    clip: float = math.inf,
) -> EpochReport:
    """One optimizer step on the mean loss per token of all the batches in `group`.

    Each batch's sum is divided by the *group's* tokens before its backward pass, so the gradient is
    that of one large batch, however unequal the parts are.
    """
    optimizer.zero_grad(set_to_none=True)
    report = EpochReport(tokens=sum(batch.ntokens for batch in group))
    for batch in group:
        loss, nll = batch_loss(model, batch, criterion)
        (loss / report.tokens).backward()
        report.loss += loss.item()
        report.nll += nll.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    report.grad_norms.append(norm.item())
    optimizer.step()
    return report


# %%
def run_epoch(
    batches: Iterable[Batch],
    model: EncoderDecoder,
    criterion: LabelSmoothing,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: LambdaLR | None = None,
    *,
    accumulate: int = 1,
    clip: float = math.inf,
    state: TrainState | None = None,
    progress: tqdm | None = None,
) -> EpochReport:
    """One pass over `batches`: training with an optimizer, evaluation (no gradients) without.

    `accumulate` batches make one optimizer step, and the schedule advances once a step. `clip`
    bounds the gradient's norm. `state` is counted up in place. `progress` advances by one a batch.
    """
    training = optimizer is not None
    model.train(training)
    total = EpochReport()
    for group in grouped(batches, accumulate):
        if training:
            report = train_step(model, group, criterion, optimizer, clip)
            if scheduler is not None:
                scheduler.step()
        else:
            report = evaluate_group(model, group, criterion)
        total.loss += report.loss
        total.nll += report.nll
        total.tokens += report.tokens
        total.grad_norms += report.grad_norms
        if state is not None:
            state.steps += training
            state.sentences += sum(batch.src.size(0) for batch in group)
            state.tokens += report.tokens
        if progress is not None:
            progress.set_postfix(loss=f"{total.loss_per_token:.3f}", ppl=f"{total.perplexity:.1f}")
            progress.update(len(group))
    return total


# %%
@torch.no_grad()
def evaluate_group(
    model: EncoderDecoder, group: list[Batch], criterion: LabelSmoothing
) -> EpochReport:
    """The losses of a few batches, without gradients."""
    report = EpochReport()
    for batch in group:
        loss, nll = batch_loss(model, batch, criterion)
        report.loss += loss.item()
        report.nll += nll.item()
        report.tokens += batch.ntokens
    return report


# %%
@torch.no_grad()
def greedy_decode(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int = BOS,
    end_symbol: int = EOS,
) -> Tensor:
    """The likeliest token, again and again: src (B, S) to ids (B, ≤ max_len), without the start.

    Each row ends with `end_symbol`, unless `max_len` tokens came first, and is padded after it. The
    loop stops when every row has ended. Dropout is off while it runs.
    """
    was_training = model.training
    model.eval()
    memory = model.encode(src, src_mask)  # (B, S, D)
    ids = src.new_full((src.size(0), 1), start_symbol)  # (B, 1)
    ended = torch.zeros(src.size(0), dtype=torch.bool, device=src.device)  # (B,)
    for _ in range(max_len):
        mask = subsequent_mask(ids.size(1), ids.device)  # (1, T, T)
        last = model.decode(memory, src_mask, ids, mask)[:, -1]  # (B, D)
        token = model.generator(last).argmax(dim=-1)  # (B,)
        ids = torch.cat((ids, token.masked_fill(ended, PAD).unsqueeze(1)), dim=1)  # (B, T+1)
        ended |= token == end_symbol
        if ended.all():
            break
    model.train(was_training)
    return ids[:, 1:]
