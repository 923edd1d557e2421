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


def random_ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    """`count` random ids of words."""
    return [rng.randrange(EOS + 1, vocab) for _ in range(count)]


def example_batch(vocab: int) -> Batch:
    """Six random pairs of unequal lengths, padded."""
    rng = random.Random(0)
    pairs = [(rng.randint(2, 9), rng.randint(2, 9)) for _ in range(6)]
    sides = [(random_ids(rng, s, vocab), random_ids(rng, t, vocab)) for s, t in pairs]
    return make_batch([Example([*src, EOS], [BOS, *tgt, EOS]) for src, tgt in sides])
