"""Chapter 15's exercise."""

import torch
from torch import Tensor

from scripts.book.exercises import exercise


@exercise(
    lambda: [(torch.randn(3, 2, 5, 5).mul(2).softmax(-1),)],
    "not the product of the layers' mean maps, each half map, half identity",
    "the layers are in the wrong order: layer 2 looks at what layer 1 made, so it is on the left",
    lambda maps: rollout(maps.flip(0)),
    "the identity is missing: half of a position comes from the residual connection",
    lambda maps: torch.linalg.multi_dot([*maps.mean(1).flip(0)]),
)
def rollout(maps: Tensor) -> Tensor:
    """The product of the layers' mean maps, each mixed with the identity."""
    eye = torch.eye(maps.size(-1), dtype=maps.dtype)
    reached = eye
    for layer in maps.mean(1):
        reached = (layer + eye) / 2 @ reached
    return reached
