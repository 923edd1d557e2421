# %% [markdown]
# # Chapter 2 · Multi-head attention

# %%
from torch import Tensor, nn

from scripts.ch01_attention import attention


# %%
def split_heads(x: Tensor, h: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H): each head gets its own slice of the features."""
    return x.unflatten(-1, (h, -1)).transpose(1, 2)


# %%
def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, d_k) to (B, T, H·d_k): the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


# %%
class MultiHeadedAttention(nn.Module):
    """h attentions side by side, each on its own projection of the input (§3.2.2).

    One class serves self-attention (query = key = value), cross-attention (key = value = memory)
    and causal attention (with a causal mask). After a call `attn` holds the weights (B, H, T, S),
    detached and as they were before dropout.

    Raises ValueError where `d_model` is not a multiple of `h`.
    """

    def __init__(self, h: int, d_model: int, dropout: float = 0.1):
        super().__init__()
        if d_model % h:
            raise ValueError(f"d_model {d_model} is not a multiple of the number of heads {h}")
        self.h = h
        self.project_query = nn.Linear(d_model, d_model)
        self.project_key = nn.Linear(d_model, d_model)
        self.project_value = nn.Linear(d_model, d_model)
        self.project_output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        self.attn: Tensor | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """query (B, T, D), key and value (B, S, D), mask (B|1, T|1, S) or (B|1, H|1, T|1, S); to (B, T, D)."""
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)  # (B, 1, T, S): the same for every head
        q = split_heads(self.project_query(query), self.h)  # (B, H, T, d_k)
        k = split_heads(self.project_key(key), self.h)  # (B, H, S, d_k)
        v = split_heads(self.project_value(value), self.h)  # (B, H, S, d_k)
        x, weights = attention(q, k, v, mask, self.dropout)  # (B, H, T, d_k), (B, H, T, S)
        self.attn = weights.detach()
        return self.project_output(merge_heads(x))  # (B, T, D)
