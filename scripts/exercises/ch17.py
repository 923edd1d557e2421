"""Exercises of chapter 17: our solutions, and checkers that tell the common mistakes apart."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.ch01_attention import subsequent_mask
from scripts.ch07_multi30k import BPETokenizer


def check_bits_from_pieces(candidate: Callable[[float, Sequence[str], Any], float]) -> None:
    """Holds candidate(nats_per_piece, texts, tokenizer) against texts whose pieces are known."""

    class Halves:
        """A tokenizer whose pieces are two characters long; the last one may be shorter."""

        def encode(self, text: str) -> list[int]:
            return [4] * math.ceil(len(text) / 2)

    texts = ["abcdef", "a", "abcdefghijklm"]
    pieces, characters = 3 + 1 + 7, 6 + 1 + 13
    found, bits = candidate(1.7, texts, Halves()), 1.7 / math.log(2)
    each = [bits * (math.ceil(len(x) / 2) + 1) / (len(x) + 1) for x in texts]
    mistakes = {
        "These are nats: a bit is ln 2 nats.": 1.7 * (pieces + 3) / (characters + 3),
        "This is per piece: a piece stands for several characters.": bits,
        "The ends are missing: a model is asked for each text's </s>, too. Count it above and "
        "below.": bits * pieces / characters,
        "The ends are in the sum, but not in the count: divide by characters and ends.": (
            bits * (pieces + 3) / characters
        ),
        "A mean of means: short texts would weigh as much as long ones.": sum(each) / 3,
    }
    for message, value in mistakes.items():
        assert abs(found - value) > 1e-9, message
    wanted = bits * (pieces + 3) / (characters + 3)
    assert abs(found - wanted) < 1e-9, f"1.7 nats a piece should be {wanted:.4f}, not {found:.4f}."


def bits_from_pieces(nats_per_piece: float, texts: Sequence[str], tokenizer: BPETokenizer) -> float:
    """All nats of all texts, in bits, over all characters and ends."""
    pieces = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    characters = sum(len(text) + 1 for text in texts)
    return nats_per_piece * pieces / characters / math.log(2)


def check_packed_mask(candidate: Callable[[Tensor], Tensor]) -> None:
    """Holds the mask candidate(owner) against the definition, place by place."""
    owner = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [0, 1, 1, 1, 1, 1, 1, 1]])
    mask = candidate(owner)
    assert mask.shape == (2, 8, 8), "The shape is (B, T, T): who looks, at whom."
    assert mask.dtype == torch.bool, "A mask is boolean, True where attention is allowed."
    assert not mask.triu(1).any(), "A position sees a later one: the mask must be causal as well."
    itself = mask.diagonal(0, 1, 2)
    assert itself.all(), "A position doesn't see itself, and padding then sees nothing."
    looker, seen = owner[:, :, None], owner[:, None, :]
    padding, other = (looker < 0) | (seen < 0), looker != seen  # (B, T, T)
    sees = mask.tril(-1)  # besides itself
    assert not (sees & padding).any(), "Padding looks at another position: only itself is allowed."
    assert not (sees & other).any(), "A text sees the one before it: their numbers differ."
    enough = mask | ~packed_mask(owner)
    assert enough.all(), "A position doesn't see the beginning of its own text."


def packed_mask(owner: Tensor) -> Tensor:
    """The same text, not later, and no padding; or the position itself.

    The positions have to begin anew with each text, too: else its numbers depend on its neighbours.
    """
    same = owner[:, :, None] == owner[:, None, :]  # (B, T, T)
    seen = same & (owner >= 0)[:, :, None] & subsequent_mask(owner.size(1), owner.device)
    return seen | torch.eye(owner.size(1), dtype=torch.bool, device=owner.device)
