# %% [markdown]
# # Chapter 3 · Embeddings and positions

# %%
import math

import torch
from torch import Tensor, nn

# %%
MAX_LEN = 256  # the longest sequence of tokens that the series' models take


# %%
class Embeddings(nn.Module):
    """Token ids to vectors, scaled by √d_model (§3.4).

    `width` is the table's own width; where it differs from `d_model`, a linear map (no bias)
    leads from one to the other. `lut` is the table (V, width).

    Raises TypeError for ids that are not integers.
    """

    def __init__(self, d_model: int, vocab: int, width: int | None = None):
        super().__init__()
        width = width or d_model
        self.d_model = d_model
        self.lut = nn.Embedding(vocab, width)
        self.widen = nn.Identity() if width == d_model else nn.Linear(width, d_model, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) of int64 or int32, to (B, T, D)."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"token ids must be int64 or int32, not {ids.dtype}")
        return self.widen(self.lut(ids)) * math.sqrt(self.d_model)  # (B, T, D)


# %%
def sinusoids(length: int, d_model: int) -> Tensor:
    """PE[pos, 2i] = sin(pos / 10000^(2i/D)), PE[pos, 2i+1] = cos of the same (§3.5): (length, D).

    Raises ValueError for an odd `d_model`: each sine needs its cosine.
    """
    if d_model % 2:
        raise ValueError(f"sinusoidal positions need an even d_model, not {d_model}")
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)  # (length, 1)
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model  # (D/2,)
    angle = position * 10_000.0**-exponent  # (length, D/2)
    waves = torch.stack((angle.sin(), angle.cos()), dim=-1)  # (length, D/2, 2)
    return waves.flatten(-2).to(torch.get_default_dtype())  # (length, D): sin, cos, sin, cos, …


# %%
def check_length(length: int, max_len: int) -> None:
    """Raise ValueError where a sequence of `length` tokens is longer than `max_len`."""
    if length > max_len:
        raise ValueError(f"a sequence of {length} tokens is longer than the maximum of {max_len}")


# %%
class PositionalEncoding(nn.Module):
    """Adds the sinusoids to the embeddings, then dropout (§3.5, §5.4). Learns nothing.

    Raises ValueError for an input longer than `max_len`.
    """

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = MAX_LEN):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        # A buffer follows the model to its device; not persistent, since it can be computed again.
        self.register_buffer("pe", sinusoids(max_len, d_model), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (B, T, D), whose first token stands at position `start`, to (B, T, D)."""
        end = start + x.size(1)
        check_length(end, self.pe.size(0))
        return self.dropout(x + self.pe[start:end])  # (B, T, D)


# %%
class LearnedPositions(nn.Module):
    """Adds one learned vector a position (the paper's Table 3, row E), then dropout.

    Raises ValueError for an input longer than `max_len`.
    """

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = MAX_LEN):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.pe = nn.Parameter(torch.empty(max_len, d_model))
        nn.init.normal_(self.pe, std=0.02)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (B, T, D), whose first token stands at position `start`, to (B, T, D)."""
        end = start + x.size(1)
        check_length(end, self.pe.size(0))
        return self.dropout(x + self.pe[start:end])  # (B, T, D)
