"""Products of matrices on a CPU, by whichever library one asks for."""

import torch
import torch.nn.functional as F
from torch import Tensor


def suits_onednn(x: Tensor) -> bool:
    """Whether oneDNN multiplies x here: 32 or 16 bits on a CPU, and not on every processor."""
    if x.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if x.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # false without AVX-512
    return x.dtype == torch.float32


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool) -> Tensor:
    """x·Wᵀ + b: x (n, D), weight (F, D), to (n, F), without a gradient; by oneDNN where it can."""
    if onednn and suits_onednn(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
