"""The rival of chapter 13's family tree: a beam search in which each prefix has its own cache."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from scripts.ch08_decoding import Hypothesis
from scripts.fast.decoding import CachedDecoding
from scripts.fast.searching import cached_beam_search


class OwnCaches(CachedDecoding):
    """A decoding whose rows are prefixes; caches are copied to those who continue them."""

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each prefix by one of tokens (B, k): the decoder's last positions (B·k, D)."""
        return super().step(tokens.reshape(-1, 1))

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, K), counted within each source."""
        B, count = len(origin), self.past.size(2)
        origin = (torch.arange(B).unsqueeze(1) * (count // B) + origin).flatten()  # (B·K,)
        if len(origin) != count:  # after the first step: one prefix becomes K
            self.source, self.past = self.source[:, :, origin], self.past[:, :, origin]
            self.real = None if self.real is None else self.real[origin]
            self.tree.ancestors = self.tree.ancestors[origin]
        else:  # the source's keys and values stay; only prefixes that move are copied
            moved = (origin != torch.arange(count)).nonzero().squeeze(1)
            past = self.past[..., : self.length, :]
            past.index_copy_(2, moved, past.index_select(2, origin[moved]))


def copying_beam_search(*search: Any) -> list[list[Hypothesis]]:
    """`cached_beam_search` by `OwnCaches`, in which all sentences stay to the end."""
    with (
        patch("scripts.fast.searching.CachedDecoding", OwnCaches),
        patch("scripts.fast.searching.PACK_AT", 0),
    ):
        return cached_beam_search(*search)
