"""Rivals of chapter 13's searches: what a trick is raced against, and the race."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from scripts.ch08_decoding import Hypothesis
from scripts.core.products import affine
from scripts.fast.decoding import CachedDecoding
from scripts.fast.searching import cached_beam_search

# The conditions of a search, which `with` switches on.
as_it_is = nullcontext()
by_onednn = patch.object(nn.Linear, "forward", lambda m, x: affine(x, m.weight, m.bias, True))
without_c = patch("scripts.fast.compiled.loaded", lambda name: None)  # as without a compiler
Condition = AbstractContextManager
Search = Callable[[], Any]


def found_by(condition: Condition, search: Search) -> Any:
    """What a search finds under a condition."""
    with condition:
        return search()


def race(ways: Mapping[str, tuple[Condition, Search]], rounds: int = 6) -> dict[str, list[float]]:
    """Each way's CPU seconds, by round: all take turns, in every other round backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in [*ways][:: (-1) ** number]:
            start = time.process_time()
            found_by(*ways[name])
            seconds[name].append(time.process_time() - start)
    return seconds


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


def staying_beam_search(*search: Any) -> list[list[Hypothesis]]:
    """`cached_beam_search`, in which all sentences stay to the end."""
    with patch("scripts.fast.searching.PACK_AT", 0):
        return cached_beam_search(*search)


def copying_beam_search(*search: Any) -> list[list[Hypothesis]]:
    """`staying_beam_search` by `OwnCaches`."""
    with patch("scripts.fast.searching.CachedDecoding", OwnCaches):
        return staying_beam_search(*search)
