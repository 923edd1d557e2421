# %% [markdown]
# # Chapter 1 · Attention

# %%
import math
from collections.abc import Callable

import torch
from torch import Tensor


# %%
def subsequent_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Causal mask: position i may look at positions 0..i and at nothing later (§3.2.3).

    Returns a boolean (1, size, size), True where attention is allowed.
    """
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


# %%
def padding_mask(ids: Tensor, pad: int = 0) -> Tensor:
    """Mask of real tokens: ids (B, S) to a boolean (B, 1, S), True where the token is not `pad`."""
    return (ids != pad).unsqueeze(-2)


# %%
def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension of `scores` (..., T, S) that sees only allowed positions.

    `mask` broadcasts to `scores`: boolean (True = allowed), or a float that is added (−inf = never).
    A row with nothing to attend to gives zeros, and zero gradients, never NaN.
    """
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
        empty = ~mask.any(dim=-1, keepdim=True)  # (..., T, 1)
    else:
        scores = scores + mask
        empty = (mask == -math.inf).all(dim=-1, keepdim=True)  # (..., T, 1)
    # A row of −inf alone would be 0/0. Give it any finite scores, then silence its weights.
    weights = scores.masked_fill(empty, 0.0).softmax(dim=-1)  # (..., T, S)
    return weights.masked_fill(empty, 0.0)


# %%
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, softmax(QKᵀ/√d_k)·V (§3.2.1, equation 1).

    query (..., T, d_k), key (..., S, d_k), value (..., S, d_v); `mask` as in `masked_softmax`.
    Returns the output (..., T, d_v) and the weights (..., T, S) as they were before `dropout`.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))  # (..., T, S)
    weights = masked_softmax(scores, mask)  # (..., T, S), each row sums to 1
    kept = weights if dropout is None else dropout(weights)  # (..., T, S)
    return kept @ value, weights  # (..., T, d_v)
