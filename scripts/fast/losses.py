"""Which loss a run computes for a batch: the textbook's, the fast path's, or R-Drop's.

The settings say what is wanted, the device what there is; `resolved` brings the two together, and
what it decides is part of the run.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import Batch, LabelSmoothing, batch_loss
from scripts.core.settings import TrainConfig, multiplies_bf16
from scripts.core.static import FEW_SHAPES
from scripts.fast.fast import FAST, PLAIN, STATIC, FastPath, Switches, fast_loss, switches_for

LossOf = Callable[..., tuple[Tensor, Tensor]]  # of (model, batch, criterion), to two sums
OLD_KERNELS = torch.__version__ < "2.10"  # compared as versions


def precision_on(config: TrainConfig, device: torch.device) -> str:
    """The precision of the products' factors: what `config` asks for, or what suits the device."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if multiplies_bf16(device) else "float32"


def switches_of(config: TrainConfig, device: torch.device) -> Switches:
    """The fast path's switches for a run. In a static step no shape depends on data."""
    if config.step == "textbook":
        return PLAIN
    if config.step in FEW_SHAPES:
        return STATIC
    return switches_for(device, precision_on(config, device) == "bf16")


def resolved(
    config: TrainConfig, device: torch.device, world: int = 1, before: str | None = None
) -> TrainConfig:
    """`config` with its precision and kind of step decided: what a run is, what its record says.

    A run that goes on keeps its plan, which depends on the kind of step that it had `before`: it
    goes on as that or, from batches of few shapes, as what suits the device. Raises ValueError for
    a recording by several processes, as it holds a whole step, and for batches of few shapes with
    BPE-dropout, which changes the lengths each epoch.
    """
    step, able = config.step, device.type == "cuda" and world == 1
    if step == "auto":
        few = able and not config.bpe_dropout
        # Several batches in a step have too many sequences of shapes to record; and before 2.10
        # PyTorch's deterministic kernels can't be recorded.
        records = config.accumulate == 1 and not (config.deterministic and OLD_KERNELS)
        step = ("graphed" if records else "static") if few else "eager"
        if before and (step in FEW_SHAPES) != (before in FEW_SHAPES):
            step = "static" if before in FEW_SHAPES else "eager"
    if step == "graphed" and not able:
        if not before:
            raise ValueError("--step graphed needs one process on a GPU")
        step = "static"  # what was recorded on a GPU goes on anywhere
    if step in FEW_SHAPES and config.bpe_dropout:
        raise ValueError(f"--step {step} doesn't work with --bpe_dropout: use --step eager")
    return replace(config, precision=precision_on(config, device), step=step)


def r_drop_loss(
    model: EncoderDecoder,
    batch: Batch,
    criterion: LabelSmoothing,
    weight: float,
    switches: Switches = FAST,
) -> tuple[Tensor, Tensor]:
    """The mean loss of two passes, and their disagreement (Liang et al. 2021, equations 1 to 4).

    Half of the paper's sum, to be comparable with `batch_loss`: ½ (CE₁ + CE₂) and weight/4 times
    KL(p₁‖p₂) + KL(p₂‖p₁), which is Σ (p₁ − p₂)(log p₁ − log p₂). Both passes are one batch of twice
    the sentences: their masks differ, and a GPU starts half as many kernels.
    """
    twice = Batch(*(torch.cat((side, side)) for side in (batch.src, batch.full)))
    x, labels = FastPath(switches).target_rows(model, twice, criterion)  # (2N, D), (2N,)
    labels, logits = labels.chunk(2)[0], model.generator(x)  # (N,), (2N, V): one pass, then another
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    first, second = wide.log_softmax(dim=-1).chunk(2)  # (N, V) each
    losses, nlls = zip(*(criterion(half, labels) for half in (first, second)), strict=True)
    apart = ((first.exp() - second.exp()) * (first - second)).sum(dim=-1)  # (N,)
    apart = apart.masked_fill(labels == criterion.padding_idx, 0.0).sum()
    return sum(losses) / 2 + weight / 4 * apart, sum(nlls) / 2


def loss_function_of(config: TrainConfig, device: torch.device, training: bool = False) -> LossOf:
    """How the run computes a batch's loss. Validation has no dropout, and no R-Drop."""
    switches, half = switches_of(config, device), precision_on(config, device) == "bf16"
    if config.r_drop and training:
        loss_of = partial(r_drop_loss, weight=config.r_drop, switches=switches)
    elif config.step == "textbook":
        loss_of = batch_loss
    else:
        loss_of = partial(fast_loss, switches=switches)
        half = half and not switches.half  # a CPU's fast path rounds the factors itself
    return torch.autocast(device.type, torch.bfloat16)(loss_of) if half else loss_of
