"""A training with UniDrop and teachers: chapter 9's, with another loss. The model is the same."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scripts.ch08_going_fast import STATIC, switches_for, target_rows
from scripts.ch09_training_run import (
    TrainConfig,
    Trained,
    Training,
    in_bf16,
    loss_function_of,
    precision_on,
)
from scripts.engine.distill import distill_loss
from scripts.engine.unidrop import drop_features, with_unidrop


@dataclass
class LessonConfig(TrainConfig):
    """Everything that decides a training with a lesson: a resume under another is refused."""

    feature_drop: float = 0.0
    """Dropout of queries, keys and values."""
    layer_drop: float = 0.0
    """Chance that a layer is missing from a step."""
    word_drop: float = 0.0
    """Chance that a source's word is missing, in every other sentence."""
    taught: float = 0.0
    """The teachers' part of the loss; the rest is the corpus's."""
    teachers: str = ""
    """The SHA-256 of each teacher's weights."""
    pairs: str = ""
    """The SHA-256 of the training pairs, where they aren't the corpus's own."""

    def __post_init__(self):
        if self.path == "textbook" and (self.feature_drop or self.taught):
            raise ValueError("feature_drop and taught are for --path fast")
        if self.layer_drop and self.step == "graphed":
            raise ValueError("a recording has all its layers: layer_drop can't be had with it")


def plain_config(config: TrainConfig) -> TrainConfig:
    """The settings that a model is saved with."""
    names = [field.name for field in fields(TrainConfig)]
    return TrainConfig(**{name: getattr(config, name) for name in names})


def lesson_of(config: TrainConfig) -> dict[str, Any]:
    """What `config` has beyond a TrainConfig, and isn't off."""
    plain = asdict(plain_config(config))
    return {name: value for name, value in asdict(config).items() if value and name not in plain}


def lesson_loss(
    config: LessonConfig, device: torch.device, teachers: Sequence[nn.Module] = ()
) -> Callable[..., tuple[Tensor, Tensor]]:
    """How a batch's loss is computed. Raises ValueError where teachers are missing or idle."""
    if bool(teachers) != bool(config.taught):
        raise ValueError(f"{len(teachers)} teachers, and {config.taught:g} of the loss is theirs")
    loss_of = loss_function_of(config, device, training=True)
    if teachers:
        half = precision_on(config, device) == "bf16"
        how = STATIC if config.step != "eager" else switches_for(device, half)
        rows_of = partial(target_rows, how=how)
        given = {"teachers": teachers, "weight": config.taught, "r_drop": config.r_drop}
        loss_of = partial(distill_loss, **given, rows_of=rows_of)
        loss_of = partial(in_bf16, loss_of, device.type) if half else loss_of
    return with_unidrop(loss_of, config.layer_drop, config.word_drop)


class LessonTraining(Training):
    """A run in progress whose loss is the lesson's."""

    def __init__(self, *given: Any, teachers: Sequence[nn.Module] = (), **named: Any):
        super().__init__(*given, **named)
        drop_features(self.model, self.config.feature_drop)
        self.loss_of = lesson_loss(self.config, self.device, teachers)

    @property
    def trained(self) -> Trained:
        """The model as it stands; once saved, nobody sees how it learned."""
        return Trained(self.model, self.data.tokenizer, plain_config(self.config))
