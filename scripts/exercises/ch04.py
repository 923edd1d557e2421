"""Chapter 4's exercises."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.book.exercises import exercise


@exercise(
    lambda: [(1, 4, 6), (3, 8, 20)],
    "a layer has 4 + 2 matrices with biases, and two LayerNorms, each with a scale and a shift",
    "a layer lacks 4D numbers: LayerNorms learn scale and shift, attention's matrices have biases",
    lambda N, D, F: encoder_parameters(N, D, F) - N * 4 * D,
    "only matrices are counted: biases and LayerNorms are missing",
    lambda N, D, F: encoder_parameters(N, D, F) - N * (9 * D + F),
)
def encoder_parameters(N: int, d_model: int, d_ff: int) -> int:
    """Attention, feed-forward and two LayerNorms, N times.

    With F = 4D the matrices have 4D² + 2·4D² = 12D² numbers per layer; all else has 13D.
    """
    attention = 4 * (d_model * d_model + d_model)
    feed_forward = d_model * d_ff + d_ff + d_ff * d_model + d_model
    return N * (attention + feed_forward + 2 * 2 * d_model)


def parts(norm_first: bool) -> tuple:
    """Input and simple parts, of which no two are alike."""
    norms = [lambda x: F.layer_norm(x, (8,)), lambda x: 2 * F.layer_norm(x, (8,))]
    return torch.randn(2, 5, 8), lambda x: x.cumsum(1), torch.sin, norms, norm_first


@exercise(
    lambda: [parts(False), parts(True)],
    "not the layer that the formula gives: is x added back, and is each part in its place?",
    "that is pre-norm: in post-norm the sum is normalised",
    lambda x, attend, think, norms, norm_first: layer_from_parts(x, attend, think, norms, True),
    "that is post-norm: in pre-norm a sublayer's input is normalised",
    lambda x, attend, think, norms, norm_first: layer_from_parts(x, attend, think, norms, False),
)
def layer_from_parts(
    x: Tensor, attend: Callable, think: Callable, norms: list[Callable], norm_first: bool
) -> Tensor:
    """An encoder layer (B, S, D) to (B, S, D): post-norm, or pre-norm with `norm_first`."""
    for sublayer, norm in zip((attend, think), norms, strict=True):
        x = x + sublayer(norm(x)) if norm_first else norm(x + sublayer(x))
    return x
