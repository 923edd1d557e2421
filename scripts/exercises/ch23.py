"""Chapter 23's exercise."""

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.book.exercises import exercise
from scripts.ch23_long_memory import write_and_read


@exercise(
    lambda: [(*torch.randn(3, 6, 4) / 2, *torch.rand(2, 6))],
    "first M ← α M, then look up what the faded state holds: M + β k (v − Mᵀk)ᵀ; then read Mᵀq",
    "each token reads before it has written: write first, then read",
    lambda q, *rest: F.pad(gated_delta(q.roll(-1, 0), *rest)[:-1], (0, 0, 1, 0)),
    "nothing fades: alpha isn't used",
    lambda q, k, v, alpha, beta: write_and_read(q, k, v, beta, correct=True),
)
def gated_delta(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Fade, look up, write the difference, read."""
    state, out = torch.zeros(k.size(1), v.size(1), dtype=v.dtype), []
    for t in range(len(v)):
        state = alpha[t] * state
        state = state + beta[t] * torch.outer(k[t], v[t] - k[t] @ state)
        out.append(q[t] @ state)
    return torch.stack(out)
