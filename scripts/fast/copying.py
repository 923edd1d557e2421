"""Rivals of chapter 13's searches: what a trick is raced against, and the race."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.ch01_attention import padding_mask
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import CopiedCache, greedy_choice, texts_by_cache
from scripts.core.models import Trained
from scripts.core.products import affine
from scripts.fast.decoding import CachedDecoding, PreparedModel, made_ready
from scripts.fast.kernels import best_of_rows
from scripts.fast.searching import PACK_AT, cached_beam_search, cached_texts

Search = Callable[..., Any]

# Each takes a search, and gives the same search under a condition.
by_onednn = patch.object(nn.Linear, "forward", lambda m, x: affine(x, m.weight, m.bias, True))
without_c = patch("scripts.fast.compiled.loaded", lambda name: None)  # as without a compiler


def race(ways: Mapping[str, Search], rounds: int = 6) -> dict[str, list[float]]:
    """Each way's CPU seconds, by round: all take turns, in every other round backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in [*ways][:: (-1) ** number]:
            start = time.process_time()
            ways[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def gains_over_first(ways: Mapping[str, Search], rounds: int) -> dict[str, float]:
    """What each way gains over the first, which finds the same, by medians over rounds."""
    found = [way() for way in ways.values()]
    assert all(texts == found[0] for texts in found), "a trick changes texts"
    first, *others = map(median, race(ways, rounds).values())
    return {name: first / other for name, other in zip([*ways][1:], others, strict=True)}


def multiply(maps: Iterable[Callable[[Tensor], Tensor]], rows: int = 64) -> None:
    """The products of `rows` vectors with each of the maps, a hundred times."""
    x = torch.randn(rows, 256)
    for _ in range(100):
        for linear in maps:
            linear(x)


def append_by_cat(new: Tensor, steps: int) -> Tensor:
    """The tokens new (…, 1, d_k), appended `steps` times: what was there is copied each time."""
    past = new[..., :0, :]
    for _ in range(steps):
        past = torch.cat((past, new), dim=-2)
    return past


def append_in_room(new: Tensor, steps: int) -> Tensor:
    """The same, but into room behind them, which is doubled when it is full."""
    past = new.clone()
    for t in range(steps):
        if t == past.size(-2):
            past = F.pad(past, (0, 0, 0, t))
        past[..., t : t + 1, :] = new
    return past[..., :steps, :]


def largest(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The places (N,) of the largest logits that a product gives for rows x (N, D)."""
    return best_of_rows(product(x), 1, total=False)[1].squeeze(1)


def scored(decoding: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens (N,) and their log-probabilities (N,), from x (N, D)."""
    return greedy_choice(decoding.logits(x))


def unscored(decoding: Any, x: Tensor) -> tuple[Tensor, None]:
    """The likeliest tokens alone."""
    return decoding.logits(x).argmax(dim=1), None


def engine(trained: Trained, precision: str = "float32") -> Trained:
    """The same, with its model made ready."""
    return replace(trained, model=made_ready(trained.model, precision))


class ReadFast(CopiedCache):
    """Chapter 8's cache of sources that the fast encoder reads: its model is made ready."""

    def __init__(self, ready: PreparedModel, src: Tensor, src_mask: Tensor):
        self.model, self.src_mask = ready.model, src_mask
        self.cross, _ = ready.read(src, src_mask.squeeze(1))
        self.past = self.cross[..., :0, :]


def read_fast(prepared: Trained, sentences: Sequence[str]) -> list[str]:
    """Chapter 8's texts by `ReadFast`, products by oneDNN, without our C, of a model made ready."""
    with by_onednn, without_c, patch("scripts.ch08_decoding.CopiedCache", ReadFast):
        return texts_by_cache(prepared, sentences, greedy_choice)


def fast_texts(
    prepared: Trained, sentences: Sequence[str], choose: Search, pack_at: float = PACK_AT
) -> list[str]:
    """What chapter 8's `texts_by_cache` gives, by a model that is made ready."""
    src = pad_rows([source_ids(sentence, prepared.tokenizer) for sentence in sentences])  # (B, S)
    ids, _ = cached_texts(prepared.model, src, padding_mask(src), 60, choose, pack_at)
    return [prepared.tokenizer.decode(row) for row in ids.tolist()]


class OwnPast(CachedDecoding):
    """A decoding whose rows are prefixes; caches are copied to those who continue them."""

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each prefix by one of tokens (B, k): the decoder's last positions (B·k, D)."""
        return super().step(tokens.reshape(-1, 1))

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, K), counted within each source."""
        B, count = len(origin), self.past.size(2)
        origin = (torch.arange(B).unsqueeze(1) * (count // B) + origin).flatten()  # (B·K,)
        if len(origin) != count:  # after the first step: one prefix becomes K
            self.past, self.tree.ancestors = self.past[:, :, origin], self.tree.ancestors[origin]
        else:  # only prefixes that move are copied
            moved = (origin != torch.arange(count)).nonzero().squeeze(1)
            past = self.past[..., : self.length, :]
            past.index_copy_(2, moved, past.index_select(2, origin[moved]))


class OwnSource(CachedDecoding):
    """A decoding that reads the source's keys and values once for each prefix."""

    def follow(self, origin: Tensor) -> None:
        """As in `CachedDecoding`; after the first step, each prefix gets its source."""
        copies = origin.numel() // self.source.size(2)
        if copies > 1:
            self.source = self.source.repeat_interleave(copies, dim=2)
            self.real = None if self.real is None else self.real.repeat_interleave(copies, dim=0)
        super().follow(origin)


class OwnCaches(OwnSource, OwnPast):
    """A decoding whose prefixes share nothing."""


SHARED = {  # what a beam's prefixes share; the first and the last are the same
    "nothing": OwnCaches,
    "past": OwnSource,
    "source": OwnPast,
    "past and source": CachedDecoding,
    "control": OwnCaches,
}


def best_texts(
    *search: Any, by: type[CachedDecoding] = CachedDecoding, pack_at: float = PACK_AT
) -> list[list[int]]:
    """The best texts' ids, by `cached_beam_search` with a kind of decoding and a `pack_at`."""
    by_this = patch("scripts.fast.searching.CachedDecoding", by)
    with by_this, patch("scripts.fast.searching.PACK_AT", pack_at):
        return [best.ids for best, *_ in cached_beam_search(*search)]
