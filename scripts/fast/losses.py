"""How a run computes a batch's loss: its path, its precision, compiled or not, with R-Drop.

The settings say what is wanted, the device what there is; `resolved` brings the two together, and
what it decides is part of the run. The result is one function of (model, batch, criterion).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import Batch, LabelSmoothing, batch_loss
from scripts.core.settings import TrainConfig, multiplies_bf16
from scripts.core.static import FEW_SHAPES
from scripts.fast.fast import (
    FAST_PATH,
    PLAIN,
    STATIC,
    FastPath,
    Switches,
    fast_loss,
    switches_for,
)

LossOf = Callable[..., tuple[Tensor, Tensor]]  # of (model, batch, criterion), to two sums
OLD_KERNELS = torch.__version__ < "2.10"  # compared as versions


def precision_on(config: TrainConfig, device: torch.device) -> str:
    """The precision of the products' factors: what `config` asks for, or what suits the device."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if multiplies_bf16(device) else "float32"


def switches_of(config: TrainConfig, device: torch.device) -> Switches:
    """The fast path's switches for a run. In a static or compiled step no shape depends on data."""
    if config.path == "textbook":
        return PLAIN
    if config.compile or config.step in FEW_SHAPES:
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
    step = config.step
    able = device.type == "cuda" and world == 1 and config.fused and not config.compile
    if step == "auto":
        few = able and not config.bpe_dropout
        # Several batches in a step have too many sequences of shapes to record; and before 2.10
        # PyTorch's deterministic kernels can't be recorded.
        records = config.accumulate == 1 and not (config.deterministic and OLD_KERNELS)
        step = ("graphed" if records else "static") if few else "eager"
        if before and (step in FEW_SHAPES) != (before in FEW_SHAPES):
            step = "static" if before in FEW_SHAPES else "eager"
    if step == "graphed" and before and not able:
        step = "static"  # what was recorded on a GPU goes on anywhere
    if step == "graphed" and not able:
        raise ValueError("--step graphed needs one process on a GPU, --fused and no --compile")
    if step != "eager" and config.bpe_dropout:
        raise ValueError(f"--step {step} doesn't work with --bpe_dropout: use --step eager")
    return replace(config, precision=precision_on(config, device), step=step)


def r_drop_loss(
    model: EncoderDecoder,
    batch: Batch,
    criterion: LabelSmoothing,
    weight: float,
    rows_of: LossOf = FAST_PATH.target_rows,
) -> tuple[Tensor, Tensor]:
    """The mean loss of two passes, and their disagreement (Liang et al. 2021, equations 1 to 4).

    Half of the paper's sum, to be comparable with `batch_loss`: ½ (CE₁ + CE₂) and weight/4 times
    KL(p₁‖p₂) + KL(p₂‖p₁), which is Σ (p₁ − p₂)(log p₁ − log p₂). Both passes are one batch of twice
    the sentences: their masks differ, and a GPU starts half as many kernels.
    """
    twice = Batch(*(torch.cat((side, side)) for side in (batch.src, batch.full)))
    x, labels = rows_of(model, twice, criterion)  # (2N, D), (2N,): one pass, then the other
    labels, logits = labels.chunk(2)[0], model.generator(x)  # (N,), (2N, V)
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    first, second = wide.log_softmax(dim=-1).chunk(2)  # (N, V) each
    losses, nlls = zip(*(criterion(one, labels) for one in (first, second)), strict=True)
    apart = ((first.exp() - second.exp()) * (first - second)).sum(dim=-1)  # (N,)
    apart = apart.masked_fill(labels == criterion.padding_idx, 0.0).sum()
    return sum(losses) / 2 + weight / 4 * apart, sum(nlls) / 2


@cache  # each validation asks for its function again, and compiling takes a minute
def compiled(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """`function` with these arguments, rewritten by torch.compile: one object for all callers."""
    return torch.compile(partial(function, **fixed), dynamic=True)


def loss_function_of(config: TrainConfig, device: torch.device, training: bool = False) -> LossOf:
    """How the run computes a batch's loss. Validation has no dropout, and no R-Drop."""
    half, twice = precision_on(config, device) == "bf16", config.r_drop and training
    switches = switches_of(config, device)
    if twice:
        rows_of = FastPath(switches).target_rows
        function, fixed = r_drop_loss, {"weight": config.r_drop, "rows_of": rows_of}
    elif config.path == "textbook":
        function, fixed = batch_loss, {}
    else:
        function, fixed = fast_loss, {"switches": switches}
    loss_of = compiled(function, **fixed) if config.compile else partial(function, **fixed)
    by_hand = switches.half and not twice  # R-Drop uses the plain generator
    return torch.autocast(device.type, torch.bfloat16)(loss_of) if half and not by_hand else loss_of
