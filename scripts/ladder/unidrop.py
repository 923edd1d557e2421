"""Dropout of features, of layers and of words, in training alone: UniDrop's three parts.

Wu, Wu, Meng, Xia, Xie, Qin, Dai and Liu, "UniDrop: A Simple yet Effective Technique to Improve
Transformer without Extra Cost" (2021). No part has weights of its own, so the model that is saved
is the one without them. All draw from PyTorch's generator, whose state a training keeps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from scripts.ch06_training import EOS, PAD, Batch

WHOLE = 0.5  # the chance that a sentence loses no word, whatever the rate


@contextmanager
def fewer_features(model: nn.Module, p: float) -> Iterator[None]:
    """Inside the block every attention of `model` drops entries of its queries, keys and values.

    Each with chance `p`, while the model is in training mode, on the fast path alone.
    """
    parts = [part for part in model.modules() if p and hasattr(part, "project_query")]
    try:
        for part in parts:
            part.feature_dropout = p
        yield
    finally:
        for part in parts:
            del part.feature_dropout


@contextmanager
def fewer_layers(model: nn.Module, p: float) -> Iterator[None]:
    """Inside the block each encoder and decoder layer is missing with chance `p` (LayerDrop).

    Fan, Grave and Joulin (2020). The residual road goes on past a missing layer, and nothing is
    scaled: evaluation uses them all. A draw that would leave a stack without any is made again.
    """
    stacks = (model.encoder, model.decoder) if p and model.training else ()
    whole = [stack.layers for stack in stacks]
    try:
        for stack, layers in zip(stacks, whole, strict=True):
            stays = torch.zeros(len(layers), dtype=torch.bool)
            while not stays.any():
                stays = torch.rand(len(layers)) >= p
            stack.layers = nn.ModuleList(compress(layers, stays))
        yield
    finally:
        for stack, layers in zip(stacks, whole, strict=True):
            stack.layers = layers


def drop_words(src: Tensor, p: float, whole: float = WHOLE) -> Tensor:
    """Source ids (B, S) with words missing: padding takes their place, and nothing looks at it.

    A sentence stays whole with chance `whole`; of any other, each token goes with chance `p`. The
    rest keep their positions, and the end of the sentence stays.
    """
    goes = torch.rand(src.shape, device=src.device) < p  # (B, S)
    touched = torch.rand(len(src), 1, device=src.device) >= whole  # (B, 1)
    return src.masked_fill(goes & touched & (src != EOS), PAD)


def with_unidrop(
    loss_of: Callable[..., tuple[Tensor, Tensor]],
    features: float = 0.0,
    layers: float = 0.0,
    words: float = 0.0,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`loss_of` of a model that misses features and layers, on sources that miss words.

    In evaluation it is `loss_of` itself. Passes of R-Drop share the layers and words that are left.
    """

    def dropping(model: nn.Module, batch: Any, criterion: nn.Module) -> tuple[Tensor, Tensor]:
        if words and model.training:
            batch = Batch(drop_words(batch.src, words), batch.full)
        with fewer_features(model, features), fewer_layers(model, layers):
            return loss_of(model, batch, criterion)

    return dropping
