"""Training with UniDrop, teachers or minimum risk: another loss for `fast.run.fit`.

The model is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from scripts.core.settings import TrainConfig
from scripts.fast.fast import FastPath
from scripts.fast.losses import loss_function_of, precision_on, switches_of
from scripts.ladder.distill import distill_loss
from scripts.ladder.risk import risk_loss
from scripts.ladder.unidrop import with_unidrop


@dataclass
class LessonConfig(TrainConfig):
    """Everything that decides a training with a lesson: resuming under another is refused."""

    feature_drop: float = 0.0
    """Dropout of queries, keys and values."""
    layer_drop: float = 0.0
    """Chance that a layer is missing from a step."""
    word_drop: float = 0.0
    """Chance that a source word is missing, in about half of the sentences."""
    taught: float = 0.0
    """The teachers' part of the loss; the rest is the corpus's."""
    teachers: str = ""
    """The SHA-256 of each teacher's weights."""
    risk: float = 0.0
    """How much the risk of the beam's texts weighs beside the corpus's loss."""
    candidates: int = 0
    """How many of the beam's texts are judged."""
    sharpness: float = 0.0
    """What their scores are multiplied by to make Q."""
    start: str = ""
    """The SHA-256 of the weights from which the training goes on."""
    mean_of: str = ""
    """The SHA-256 of the weights whose mean is taken, instead of a training."""
    pairs: str = ""
    """The SHA-256 of the training pairs, if they aren't the corpus's own."""

    def __post_init__(self):
        super().__post_init__()
        if self.step == "textbook" and (self.feature_drop or self.taught):
            raise ValueError("feature_drop and taught need the fast path")
        if self.taught and self.r_drop:
            raise ValueError("a taught run can't have r_drop, too")
        if self.layer_drop and self.step == "graphed":
            raise ValueError("a recording has all its layers: layer_drop can't be used with it")


def lesson_loss(
    config: LessonConfig,
    device: torch.device,
    teachers: Sequence[nn.Module] = (),
    training: bool = True,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """How a batch's loss is computed. Raises ValueError if teachers are missing or idle."""
    if bool(teachers) != bool(config.taught):
        raise ValueError(f"{len(teachers)} teachers, and {config.taught:g} of the loss is theirs")
    loss_of = loss_function_of(config, device, training)
    path = FastPath(switches_of(config, device))
    if config.risk:
        return partial(risk_loss, weight=config.risk, sharpness=config.sharpness, path=path)
    if teachers:
        half = precision_on(config, device) == "bf16"
        given = {"teachers": teachers, "weight": config.taught}
        loss_of = partial(distill_loss, **given, rows_of=path.target_rows)
        loss_of = torch.autocast(device.type, torch.bfloat16)(loss_of) if half else loss_of
    return with_unidrop(loss_of, config.feature_drop, config.layer_drop, config.word_drop)
