"""A tiny model's sizes, padded batches for it, and a run that takes a second."""

import random
from dataclasses import replace
from functools import cache
from statistics import mode

import torch
from torch import nn

from scripts.book.instruments import scramble
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch06_training import BOS, EOS, Batch
from scripts.ch07_multi30k import BPETokenizer, Example, encode_pairs, make_batch
from scripts.core.data import TrainingData
from scripts.core.settings import PRESETS
from scripts.corpora.load import load_corpus

SMALL = {"N": 2, "d_model": 16, "d_ff": 32, "h": 4, "dropout": 0.0}
SRC = torch.tensor([[2, 11, 12, 13, 14, 15, 3], [2, 21, 22, 3, 0, 0, 0]])  # (B, S)
TGT = torch.tensor([[2, 31, 32, 33, 34], [2, 41, 42, 0, 0]])  # (B, T)

# A run of two short epochs, with something of everything: dropout, saved states, averages.
SIZES = {"layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "vocab": 300, "dropout": 0.1}
RUN = replace(PRESETS["sample"], **SIZES, epochs=2, max_tokens=512, warmup=10, device="cpu")
RUN = replace(RUN, average=2, save_every=4, name="run")
SPLITS = ("train", "val")  # those that a run encodes


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """SRC's mask (2, 1, 7) and TGT's (2, 5, 5)."""
    return padding_mask(SRC), padding_mask(TGT) & subsequent_mask(TGT.size(1))


def shaken(layer: nn.Module) -> nn.Module:
    """The layer, its scores far from even, so that a slip shows."""
    scramble(layer, size=0.2)
    return layer


def random_pairs(count: int, longest: int, vocab: int) -> list[Example]:
    """Pairs of up to `longest` random words on either side."""
    rng = random.Random(0)

    def words() -> list[int]:
        return rng.choices(range(EOS + 1, vocab), k=rng.randint(1, longest))

    return [Example([*words(), EOS], [BOS, *words(), EOS]) for _ in range(count)]


def example_batch(vocab: int) -> Batch:
    """Six random pairs of unequal lengths, padded."""
    return make_batch(random_pairs(6, 9, vocab))


@cache
def few_pairs() -> TrainingData:
    """160 pairs to learn from and 300 pieces: the same in every process that asks.

    The sources of a held-out split are equally long: a decoder that finds no end runs as far as the
    longest source in its batch allows, and two processes make other batches than one.
    """
    whole = load_corpus("sample")
    corpus = {"train": whole["train"][:160]}
    tokenizer = BPETokenizer.train((line for pair in corpus["train"] for line in pair), RUN.vocab)
    for split, size in {"val": 3, "test": 2, "test_unseen": 2}.items():
        lengths = [len(tokenizer.encode(german)) for german, _ in whole[split]]
        same = [i for i, length in enumerate(lengths) if length == mode(lengths)]
        corpus[split] = [whole[split][i] for i in same[:size]]
    return TrainingData(corpus, tokenizer, *(encode_pairs(corpus[s], tokenizer) for s in SPLITS))
