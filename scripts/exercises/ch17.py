"""Chapter 17's exercises: our solutions, and checkers that say what is wrong."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.book.exercises import compare
from scripts.ch01_attention import subsequent_mask
from scripts.ch07_multi30k import BPETokenizer


def check_bits_from_pieces(candidate: Callable[[float, Sequence[str], Any], float]) -> None:
    """Checks candidate(nats_per_piece, texts, tokenizer) on texts whose pieces are known."""

    class Halves:
        """A tokenizer whose pieces are two characters long; the last one may be shorter."""

        def encode(self, text: str) -> list[int]:
            return [4] * math.ceil(len(text) / 2)

    texts = ["ab def", "ä", "abcdefghijkl"]
    pieces, characters = 3 + 1 + 6, 6 + 1 + 12
    found, bits = candidate(1.7, texts, Halves()), 1.7 / math.log(2)
    each = [bits * (math.ceil(len(x) / 2) + 1) / (len(x) + 1) for x in texts]
    wanted = bits * (pieces + 3) / (characters + 3)
    above, below = bits * (pieces + 3) / characters, bits * pieces / (characters + 3)
    mistakes = {
        "These are nats: a bit is ln 2 nats.": wanted * math.log(2),
        "This is per piece: a piece has several characters.": bits,
        "The ends are missing: a model is asked for each text's </s> too. Count it as a piece and "
        "as a character.": bits * pieces / characters,
        "The ends count as pieces, but not as characters: divide by characters plus ends.": above,
        "The ends count as characters, but not as pieces: `encode` leaves them out.": below,
        "Those are bytes: ä is one character.": bits * (pieces + 3) / (characters + 1 + 3),
        "A mean of means: short texts would count as much as long ones.": sum(each) / 3,
    }
    otherwise = f"1.7 nats a piece should give {wanted:.4f}, not {found:.4f}."
    compare(found, wanted, mistakes, otherwise)


def bits_from_pieces(nats_per_piece: float, texts: Sequence[str], tokenizer: BPETokenizer) -> float:
    """All nats of all texts, in bits, divided by all characters and ends."""
    pieces = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    characters = sum(len(text) + 1 for text in texts)
    return nats_per_piece * pieces / characters / math.log(2)


def check_packed_mask(candidate: Callable[[Tensor], Tensor]) -> None:
    """Compares the mask candidate(owner) with the definition, place by place."""
    owner = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [0, 1, 1, 1, 1, 1, 1, 1]])
    mask = candidate(owner)
    assert mask.shape == (2, 8, 8), "The shape must be (B, T, T): who looks, and at whom."
    assert mask.dtype == torch.bool, "The mask must be boolean: True where attention is allowed."
    assert not mask.triu(1).any(), "A position sees a later one: the mask must be causal as well."
    itself = mask.diagonal(0, 1, 2)
    assert itself.all(), "A position doesn't see itself: then padding sees nothing."
    looker, seen = owner[:, :, None], owner[:, None, :]
    padding, other = (looker < 0) | (seen < 0), looker != seen  # (B, T, T)
    sees = mask.tril(-1)  # besides itself
    assert not (sees & padding).any(), "Padding looks at another position: it may only see itself."
    assert not (sees & other).any(), "A text sees the one before it: their numbers differ."
    enough = mask | ~packed_mask(owner)
    assert enough.all(), "A position doesn't see all that comes before it in its own text."


def packed_mask(owner: Tensor) -> Tensor:
    """Allowed: the same text, not later, and no padding; or the position itself.

    Positions must start again with each text, too: otherwise its result depends on its place. And
    no text's `</s>` may be asked for the next one's `<s>`.
    """
    same = owner[:, :, None] == owner[:, None, :]  # (B, T, T)
    seen = same & (owner >= 0)[:, :, None] & subsequent_mask(owner.size(1), owner.device)
    return seen | torch.eye(owner.size(1), dtype=torch.bool, device=owner.device)
