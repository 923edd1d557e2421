"""2017's block, today's, and each part alone (chapters 22 to 24): `scripts.studies.block`.

Every row uses the rate that a sweep found best for it; what counts is three fresh seeds. The two
blocks are also trained three times as long, with dropout chosen for each.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from scripts import ch22_todays_block as ch22
from scripts.ch04_encoder_decoder import EncoderDecoder, EncoderLayer
from scripts.ch06_training import PAD, Batch, LabelSmoothing
from scripts.ch19_ablations import STUDY, StudyRow, drop_positions
from scripts.ch23_long_memory import LatentAttention, LinearAttention, WindowedAttention
from scripts.ch24_experts import MixtureOfExperts, SparseEncoderLayer, balance_penalty
from scripts.core.settings import TrainConfig
from scripts.studies.rows import one_run
from scripts.studies.runner import Plan, Run, study_command

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


def latent(h: int, d_model: int, dropout: float, rotary: bool = True) -> LatentAttention:
    """Latents of 3/2 d_k, and rotary keys of 1/2 d_k: a cache as small as multi-query's."""
    half = d_model // h // 2
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

    ch22.exchange(model, EncoderLayer, sparse)


def attends(kind: Callable[..., Any], groups: int | None = None) -> Callable[..., None]:
    """The step that replaces self-attention."""
    return partial(ch22.attend_by, kind=kind, groups=groups)


def feeds(make: Callable[..., Any]) -> Callable[..., None]:
    """The step that replaces feed-forward layers."""
    return partial(ch22.feed_by, make=make)


def swaps(old: type, kind: Callable[..., Any], **more: Any) -> Callable[..., None]:
    """The step that replaces attention of exactly the kind `old`, which can be cross-attention."""

    def make(_: str, part: Any) -> Any:
        return kind(part.h, part.project_query.in_features, part.dropout.p, **more)

    return partial(ch22.exchange, kind=old, make=make)


OLD, NEW = "2017", "today"
ROWS = {
    OLD: BlockRow(),
    NEW: BlockRow(ch22.renew),
    "RMSNorm": BlockRow(ch22.norm_by_length),
    "SwiGLU": BlockRow(feeds(ch22.gated)),
    "ReLU²": BlockRow(feeds(ch22.SquaredReLU)),
    "rotary": BlockRow(attends(ch22.RotaryAttention), drop_positions),
    "QK-norm": BlockRow(attends(partial(ch22.NormedAttention, groups=BASE.heads))),
    "zeroed outputs": BlockRow(ch22.zero_outputs),
    "Muon": BlockRow(optimizer="muon"),
    "today, Muon": BlockRow(ch22.renew, optimizer="muon"),
    "today, not zeroed": BlockRow(
        attends(ch22.TodaysAttention, 2), feeds(ch22.gated), ch22.norm_by_length, drop_positions
    ),
    "grouped-query": BlockRow(attends(ch22.GroupedAttention, 2)),
    "multi-query": BlockRow(attends(ch22.GroupedAttention, 1)),
    "multi-query, across too": BlockRow(
        attends(ch22.GroupedAttention, 1),
        swaps(ch22.OpenAttention, ch22.GroupedAttention, groups=1),
    ),
    "latent, decoder alone": BlockRow(
        attends(ch22.RotaryAttention),
        lambda model: swaps(ch22.RotaryAttention, latent)(model.decoder),
        drop_positions,
    ),
    "latent": BlockRow(attends(latent), drop_positions),
    "latent, across too": BlockRow(
        attends(latent), swaps(ch22.OpenAttention, latent, rotary=False), drop_positions
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


main = study_command("scripts.studies.block", BASE, plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
