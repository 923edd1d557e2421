"""Chapter 17's exercises."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from scripts.book.exercises import exercise
from scripts.ch01_attention import subsequent_mask
from scripts.ch07_multi30k import BPETokenizer

HALVES = SimpleNamespace(encode=lambda text: text[::2])  # pieces of two characters or one


@exercise(
    lambda: [(1.7, ["ab def", "ä", "abcdefghijkl"], HALVES)],
    "count each text's </s> as a piece and as a character; add up all texts before you divide",
    "these are nats: a bit is ln 2 nats",
    lambda *inputs: bits_from_pieces(*inputs) * math.log(2),
    "this is per piece: a piece has several characters",
    lambda nats, texts, tokenizer: nats / math.log(2),
)
def bits_from_pieces(nats_per_piece: float, texts: Sequence[str], tokenizer: BPETokenizer) -> float:
    """All nats of all texts, in bits, divided by all characters and ends."""
    pieces = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    characters = sum(len(text) + 1 for text in texts)
    return nats_per_piece * pieces / characters / math.log(2)


@exercise(
    lambda: [(torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [0, 1, 1, 1, 1, 1, 1, 1]]),)],
    "a position must see itself and, unless it is padding, all that comes before it in its text",
    "a text sees the one before it: their numbers differ",
    lambda owner: packed_mask(torch.zeros_like(owner)),
    "a position sees a later one: the mask must be causal as well",
    lambda owner: packed_mask(owner) | packed_mask(owner).mT,
)
def packed_mask(owner: Tensor) -> Tensor:
    """Allowed: the same text, not later, and no padding; or the position itself.

    Positions must start again with each text, too: otherwise its result depends on its place. And
    no text's `</s>` may be asked for the next one's `<s>`.
    """
    same = owner[:, :, None] == owner[:, None, :]  # (B, T, T)
    seen = same & (owner >= 0)[:, :, None] & subsequent_mask(owner.size(1), owner.device)
    return seen | torch.eye(owner.size(1), dtype=torch.bool, device=owner.device)
