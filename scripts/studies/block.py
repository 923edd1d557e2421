"""2017's block, today's, and each part alone (chapters 22 to 24): `scripts.studies.block`.

Every row uses the rate that a sweep found best for it; what counts is three fresh seeds. The two
blocks are also trained three times as long, with dropout chosen for each.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch04_encoder_decoder import EncoderDecoder, EncoderLayer
from scripts.ch06_training import PAD, Batch, LabelSmoothing
from scripts.ch19_ablations import STUDY, StudyRow, drop_positions
from scripts.ch23_long_memory import LatentAttention, masked_linear_attention, near_by
from scripts.ch24_experts import MixtureOfExperts, SparseEncoderLayer, balance_penalty
from scripts.core.settings import TrainConfig
from scripts.studies.rows import one_run
from scripts.studies.runner import Plan, Run, study_command
from scripts.studies.surgery import (
    PartAttention,
    SquaredReLU,
    attend_by,
    exchange,
    feed_by,
    gated,
    norm_by_length,
    renew,
    zero_outputs,
)

BASE = replace(STUDY, epochs=3, dropout=0.0, step="textbook", name="block")
SHORT, LONG = BASE.epochs, 3 * BASE.epochs
LONG_DROPOUTS = (0.0, 0.1)
BALANCE = 0.01  # weight of the experts' balance penalty, added to each token's loss


def parts_loss(
    model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing
) -> tuple[Tensor, Tensor]:
    """Chapter 6's `batch_loss`, in training with each mixture's balance penalty for each token."""
    x = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)  # (B, T, D)
    real = batch.tgt_y != PAD  # (B, T)
    loss, nll = criterion(model.generator(x[real]), batch.tgt_y[real])
    if model.training:
        for part in model.modules():
            if hasattr(part, "visits"):
                penalty = balance_penalty(part.probs, part.visits)
                loss = loss + BALANCE * batch.ntokens * penalty
    return loss, nll


class BlockRow(StudyRow):
    """A row with parts that no fast path knows: steps that change 2017's model, and settings."""

    def __init__(self, *steps: Callable[[EncoderDecoder], None], **changes: Any):
        def take_all(model: EncoderDecoder) -> None:
            for step in steps:
                step(model)

        super().__init__("parts", changes, take_all, "textbook")

    def loss_of(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor]]:
        """The textbook's loss plus the balance penalty."""
        return parts_loss


class WindowedAttention(MultiHeadedAttention):
    """Self-attention in which a position sees only those closer than `window`."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1, window: int = 4):
        super().__init__(h, d_model, dropout)
        self.window = window

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """As in `MultiHeadedAttention`, with everything farther away hidden as well."""
        near = near_by(query.size(1), key.size(1), self.window, query.device)  # (T, S)
        return super().forward(query, key, value, near[None] if mask is None else mask & near)


class LinearAttention(MultiHeadedAttention):
    """Self-attention with elu + 1 in place of the softmax.

    There are no weights to drop or to show: no dropout on them, and nothing in `attn`.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """As in `MultiHeadedAttention`."""
        projects = (self.project_query, self.project_key, self.project_value)
        inputs = zip(projects, (query, key, value), strict=True)
        q, k, v = (split_heads(project(x), self.h) for project, x in inputs)  # (B, H, ·, d_k)
        if mask is None:
            mask = torch.ones(1, 1, key.size(1), dtype=torch.bool, device=key.device)
        return self.project_output(merge_heads(masked_linear_attention(q, k, v, mask[:, None])))


def latent(h: int, d_model: int, dropout: float, rotary: bool = True) -> LatentAttention:
    """Latents of 3/2 d_k, and rotary keys of 1/2 d_k: a cache as small as multi-query's."""
    half = d_model // h // 2
    with warnings.catch_warnings(action="ignore"):  # a rotary key of no numbers has no weights
        return LatentAttention(h, d_model, dropout, 3 * half, half if rotary else 0)


def experts(d_model: int, d_ff: int, dropout: float) -> MixtureOfExperts:
    """Eight experts, of which each token visits two, and a shared one: as much work as before."""
    count, top, shared = 8, 2, 1
    visited = top + shared  # gated, three matrices each; the router takes its share
    width = round(2 * d_ff / (3 * visited) - count / (3 * visited))
    return MixtureOfExperts(d_model, width, dropout, count, top, shared)


def leave_padding_out(model: EncoderDecoder) -> None:
    """Tell the encoder's mixtures which positions hold words.

    Batches are sorted by their targets, so the decoder sees next to no padding (0.06%).
    """

    def sparse(_: str, old: Any) -> SparseEncoderLayer:
        road = old.sublayer[0]
        return SparseEncoderLayer(
            old.size, old.self_attn, old.feed_forward, road.dropout.p, road.norm_first
        )

    exchange(model, EncoderLayer, sparse)


def attends(
    kind: Callable[..., Any], groups: int | None = None, across: bool = False
) -> Callable[..., None]:
    """The step that replaces self-attention, or cross-attention."""
    return partial(attend_by, kind=kind, groups=groups, across=across)


def feeds(make: Callable[..., Any]) -> Callable[..., None]:
    """The step that replaces feed-forward layers."""
    return partial(feed_by, make=make)


def latent_in_decoder(model: EncoderDecoder) -> None:
    """Latents in the decoder's self-attention; in the encoder's, rotary positions alone."""
    attend_by(model.encoder, turned)
    attend_by(model.decoder, latent)


turned = partial(PartAttention, rotary=True)
OLD, NEW = "2017", "today"
ROWS = {
    OLD: BlockRow(),
    NEW: BlockRow(renew),
    "RMSNorm": BlockRow(norm_by_length),
    "SwiGLU": BlockRow(feeds(gated)),
    "ReLU²": BlockRow(feeds(SquaredReLU)),
    "rotary": BlockRow(attends(turned), drop_positions),
    "QK-norm": BlockRow(attends(partial(PartAttention, normed=True))),
    "zeroed outputs": BlockRow(zero_outputs),
    "Muon": BlockRow(optimizer="muon"),
    "today, Muon": BlockRow(renew, optimizer="muon"),
    "today, not zeroed": BlockRow(partial(renew, zeroed=False)),
    "grouped-query": BlockRow(attends(PartAttention, 2)),
    "multi-query": BlockRow(attends(PartAttention, 1)),
    "multi-query, across too": BlockRow(
        attends(PartAttention, 1), attends(PartAttention, 1, across=True)
    ),
    "latent, decoder alone": BlockRow(latent_in_decoder, drop_positions),
    "latent": BlockRow(attends(latent), drop_positions),
    "latent, across too": BlockRow(
        attends(latent), attends(partial(latent, rotary=False), across=True), drop_positions
    ),
    "window of 4": BlockRow(attends(partial(WindowedAttention, window=4))),
    "linear attention": BlockRow(attends(LinearAttention)),
    "experts": BlockRow(feeds(experts), leave_padding_out),
}


def plan_runs(plan: Plan) -> None:
    """Both blocks, then each part alone, then both blocks for longer."""
    places = {row: {"row": row, "epochs": SHORT, "dropout": BASE.dropout} for row in ROWS}
    blocks = {}
    for row in (OLD, NEW):
        lower, upper = (plan.sweep(places[row], start) for start in (BASE.lr, 2 * BASE.lr))
        blocks[row] = lower and upper  # at least four rates
        plan.seeds(blocks[row])
    if None in blocks.values():
        return
    for row in [row for row in ROWS if row not in blocks]:
        plan.seeds(plan.sweep(places[row], blocks[OLD]["lr"]))
    for row, block in blocks.items():
        longer = [places[row] | {"epochs": LONG, "dropout": dropout} for dropout in LONG_DROPOUTS]
        plan.seeds(plan.best(longer, block["lr"]))


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One run of the study."""
    return one_run(ROWS[task["row"]], setting, task)


main = study_command("scripts.studies.block", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
