"""2017's block, today's, and each part alone (chapters 22 to 24): `scripts.studies.block`.

Every row uses the rate that a sweep found best for it; what counts is three fresh seeds. The two
blocks are also trained three times as long, with dropout chosen for each. Runs on record aren't
repeated, so the work can be done in pieces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from scripts.ch04_encoder_decoder import EncoderDecoder, EncoderLayer
from scripts.ch06_training import PAD, Batch, LabelSmoothing
from scripts.ch19_ablations import STUDY, StudyRow, drop_positions
from scripts.ch22_todays_block import (
    GroupedAttention,
    NormedAttention,
    OpenAttention,
    RotaryAttention,
    SquaredReLU,
    TodaysAttention,
    attend_by,
    exchange,
    feed_by,
    gated,
    norm_by_length,
    renew,
    zero_outputs,
)
from scripts.ch23_long_memory import LatentAttention, LinearAttention, WindowedAttention
from scripts.ch24_experts import MixtureOfExperts, SparseEncoderLayer
from scripts.core.settings import TrainConfig
from scripts.studies.rows import Wanted, one_run
from scripts.studies.runner import Run, study_command

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
            if hasattr(part, "penalty"):
                loss = loss + BALANCE * batch.ntokens * part.penalty
    return loss, nll


class BlockRow(StudyRow):
    """A row with parts that no fast path knows: steps that change 2017's model, and settings."""

    def __init__(self, *steps: Callable[[EncoderDecoder], None], **changes: Any):
        super().__init__("parts", changes, partial(all_done, steps), "textbook")

    def loss_of(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor]]:
        """The textbook's loss plus the balance penalty."""
        return parts_loss


def all_done(steps: Sequence[Callable[[EncoderDecoder], None]], model: EncoderDecoder) -> None:
    """Apply all steps to the model, in order."""
    for step in steps:
        step(model)


def normed(h: int, d_model: int, dropout: float) -> NormedAttention:
    """QK-norm alone: as many keys as queries."""
    return NormedAttention(h, d_model, dropout, groups=h)


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

    def told(_: str, old: Any) -> SparseEncoderLayer:
        road = old.sublayer[0]
        return SparseEncoderLayer(
            old.size, old.self_attn, old.feed_forward, road.dropout.p, road.norm_first
        )

    exchange(model, EncoderLayer, told)


def attention(
    kind: Callable[..., Any], groups: int | None = None
) -> Callable[[EncoderDecoder], None]:
    """The step that replaces self-attention."""
    return partial(attend_by, kind=kind, groups=groups)


def like(kind: Callable[..., Any], **more: Any) -> Callable[[str, Any], Any]:
    """A function that makes a `kind` with an attention's sizes."""
    return lambda _, old: kind(old.h, old.project_query.in_features, old.dropout.p, **more)


def across(kind: Callable[..., Any], **more: Any) -> Callable[[EncoderDecoder], None]:
    """The step that replaces cross-attention, after self-attention has been replaced."""
    return partial(exchange, kind=OpenAttention, make=like(kind, **more))


def latents_where_a_cache_is(model: EncoderDecoder) -> None:
    """Replace rotary attention with latents, in the decoder alone."""
    exchange(model.decoder, RotaryAttention, like(latent))


OLD, NEW = "2017", "today"
ROWS = {
    OLD: BlockRow(),
    NEW: BlockRow(renew),
    "RMSNorm": BlockRow(norm_by_length),
    "SwiGLU": BlockRow(partial(feed_by, make=gated)),
    "ReLU²": BlockRow(partial(feed_by, make=SquaredReLU)),
    "rotary": BlockRow(attention(RotaryAttention), drop_positions),
    "QK-norm": BlockRow(attention(normed)),
    "zeroed outputs": BlockRow(zero_outputs),
    "Muon": BlockRow(optimizer="muon"),
    "today, Muon": BlockRow(renew, optimizer="muon"),
    "today, not zeroed": BlockRow(
        attention(TodaysAttention, groups=2),
        partial(feed_by, make=gated),
        norm_by_length,
        drop_positions,
    ),
    "grouped-query": BlockRow(attention(GroupedAttention, groups=2)),
    "multi-query": BlockRow(attention(GroupedAttention, groups=1)),
    "multi-query, across too": BlockRow(
        attention(GroupedAttention, groups=1), across(GroupedAttention, groups=1)
    ),
    "latent, decoder alone": BlockRow(
        attention(RotaryAttention), latents_where_a_cache_is, drop_positions
    ),
    "latent": BlockRow(attention(latent), drop_positions),
    "latent, across too": BlockRow(attention(latent), across(latent, rotary=False), drop_positions),
    "window of 4": BlockRow(attention(partial(WindowedAttention, window=4))),
    "linear attention": BlockRow(attention(LinearAttention)),
    "experts": BlockRow(partial(feed_by, make=experts), leave_padding_out),
}


def wanted_runs(runs: Sequence[Run]) -> list[Run]:
    """All that is wanted so far: both blocks, then each part alone, then both blocks for longer."""
    plan, rates = Wanted(runs), {}
    for row in (OLD, NEW):
        place = {"row": row, "epochs": SHORT, "dropout": BASE.dropout}
        lower, upper = (plan.sweep(start, **place) for start in (BASE.lr, 2 * BASE.lr))
        rates[row] = None if lower is None else upper  # at least four rates
        plan.seeds(rates[row], **place)
    if None in rates.values():
        return plan.wanted
    for row in ROWS:
        if row not in rates:
            place = {"row": row, "epochs": SHORT, "dropout": BASE.dropout}
            plan.seeds(plan.sweep(rates[OLD], **place), **place)
    for row, rate in rates.items():
        places = [{"row": row, "epochs": LONG, "dropout": dropout} for dropout in LONG_DROPOUTS]
        if best := plan.best(rate, places):
            plan.seeds(best.pop("lr"), **best)
    return plan.wanted


def work(setting: Mapping[str, Any], wanted: Run) -> Run:
    """One run of the study."""
    return one_run(ROWS[wanted["row"]], setting, wanted)


main = study_command("scripts.studies.block", BASE, wanted_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
