"""A model's tiny sizes, and a padded batch for it, that several tests share."""

import torch

from scripts.ch01_attention import padding_mask, subsequent_mask

SMALL = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
SRC = torch.tensor([[2, 11, 12, 13, 14, 15, 3], [2, 21, 22, 3, 0, 0, 0]])  # (B, S)
TGT = torch.tensor([[2, 31, 32, 33, 34], [2, 41, 42, 0, 0]])  # (B, T)


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """SRC's mask (2, 1, 7) and TGT's (2, 5, 5)."""
    return padding_mask(SRC), padding_mask(TGT) & subsequent_mask(TGT.size(1))
