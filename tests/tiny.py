"""A tiny model's sizes, and padded batches for it, shared by several tests."""

import random

import torch

from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch06_training import BOS, EOS, Batch
from scripts.ch07_multi30k import Example, make_batch

SMALL = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
SRC = torch.tensor([[2, 11, 12, 13, 14, 15, 3], [2, 21, 22, 3, 0, 0, 0]])  # (B, S)
TGT = torch.tensor([[2, 31, 32, 33, 34], [2, 41, 42, 0, 0]])  # (B, T)


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """SRC's mask (2, 1, 7) and TGT's (2, 5, 5)."""
    return padding_mask(SRC), padding_mask(TGT) & subsequent_mask(TGT.size(1))


def random_pairs(count: int, longest: int, vocab: int) -> list[Example]:
    """Pairs of up to `longest` random words on either side."""
    rng = random.Random(0)

    def words() -> list[int]:
        return rng.choices(range(EOS + 1, vocab), k=rng.randint(1, longest))

    return [Example([*words(), EOS], [BOS, *words(), EOS]) for _ in range(count)]


def example_batch(vocab: int) -> Batch:
    """Six random pairs of unequal lengths, padded."""
    return make_batch(random_pairs(6, 9, vocab))
