"""Greedy, sampled and beam search over `fast.decoding`: finished sentences leave the batch.

They find what chapter 8's plain searches find; chapter 13 explains what makes them fast.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scripts.ch06_training import BOS, EOS
from scripts.ch08_decoding import Hypothesis, drawer, dropout_off, hypothesis
from scripts.ch13_decoding_fast import PACK_AT, close_gaps, hope, write_and_leave
from scripts.fast.decoding import CachedDecoding
from scripts.fast.kernels import best_of_rows

ROWS_NEAR = 128  # prefixes whose logits are computed and used together
SCREEN_FROM = 8  # rows: with fewer the whole product is as fast as the screen


def best_next(decoding: CachedDecoding, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens after x (N, D): their log-probabilities and ids, (N, k) each."""
    parts = [best_of_rows(decoding.logits(rows), k) for rows in x.split(ROWS_NEAR)]
    tops, ids, totals = map(torch.cat, zip(*parts, strict=True))
    return tops - totals, ids


def likeliest(decoding: CachedDecoding, x: Tensor) -> tuple[Tensor, None]:
    """The choice of greedy decoding: last positions x (N, D) to tokens (N,)."""
    screen = getattr(decoding.model, "screen", None)  # one stack has none
    if len(x) >= SCREEN_FROM and screen is not None:
        return screen.largest(x), None
    return best_of_rows(decoding.logits(x), 1, total=False)[1].squeeze(1), None


def cached_texts(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    choose: Callable[..., Any],
    pack_at: float = PACK_AT,
) -> tuple[Tensor, Tensor]:
    """Chapter 13's `write_and_leave` with a cached decoding of src (B, S)."""
    with dropout_off(model), torch.inference_mode():
        decoding = CachedDecoding(model, src, src_mask)
        ids, log_probs = write_and_leave(decoding, src, max_len, choose, pack_at)
    return ids.clone(), log_probs.clone()  # ordinary tensors again


def cached_greedy(model: nn.Module, src: Tensor, src_mask: Tensor | None, max_len: int) -> Tensor:
    """What `greedy_decode` gives, computing each token once: src (B, S) to ids (B, ≤ max_len)."""
    return cached_texts(model, src, src_mask, max_len, likeliest)[0]


def cached_sample(
    model: nn.Module, src: Tensor, src_mask: Tensor | None, max_len: int, *draws: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Texts by chapter 8's `drawer`, which takes what follows, and their log-probabilities."""
    draw = drawer(*draws, **named)
    return cached_texts(model, src, src_mask, max_len, lambda decoding, x: draw(decoding.logits(x)))


class Search:
    """A beam search over a batch: what is unfinished in tensors, what is finished in lists."""

    def __init__(self, decoding: CachedDecoding, src: Tensor, max_len: int, beam: int):
        self.decoding, self.max_len, self.beam = decoding, max_len, beam
        self.live = list(range(len(src)))  # which sources are in the batch
        self.finished: list[list[Hypothesis]] = [[] for _ in self.live]
        self.over = [False] * len(src)  # which sources are done
        self.tokens = src.new_full((len(src), 1), BOS)  # (B, k)
        self.ids = src.new_empty(len(src), 1, 0)  # (B, k, T)
        self.scores = torch.zeros(len(src), 1, device=src.device)  # (B, k)

    def advance(self, final: bool) -> bool:
        """One step: every prefix by every token; the best K that don't end go on.

        Returns whether any has ended.
        """
        B, k = self.tokens.shape
        x = self.decoding.step(self.tokens)  # (B·k, D)
        log_probs, tokens = best_next(self.decoding, x, 2 * self.beam)  # (B·k, C) each
        C = log_probs.size(-1)
        total = (log_probs.view(B, k, C) + self.scores.unsqueeze(-1)).view(B, k * C)
        # Twice as many as go on: each prefix ends in one way, so at most K of them end.
        best, place = total.topk(min(2 * self.beam, k * C), dim=-1)  # (B, width) each
        tokens, origin = tokens.view(B, k * C).gather(1, place), place // C  # of which prefix
        ends = tokens == EOS
        ended = final or bool(ends.any())
        if ended:
            self.set_aside(best, origin, tokens, ends | final)
            # Those that go on, best first, then the ended ones, as impossible fillers.
            best = best.masked_fill(ends, -math.inf)
            order = ends.int().argsort(dim=-1, stable=True)
            best, tokens, origin = (x.gather(1, order) for x in (best, tokens, origin))
        self.scores, self.tokens = best[:, : self.beam], tokens[:, : self.beam]  # (B, K)
        origin = origin[:, : self.beam]
        prefixes = self.ids.gather(1, origin.unsqueeze(-1).expand(-1, -1, self.ids.size(-1)))
        self.ids = torch.cat((prefixes, self.tokens.unsqueeze(-1)), dim=-1)  # (B, K, T)
        self.decoding.follow(origin)
        return ended

    def set_aside(self, best: Tensor, origin: Tensor, tokens: Tensor, ends: Tensor) -> None:
        """Enter the candidates (B, width) that end, and are among the best K, into the lists."""
        ended = (ends & best.isfinite())[:, : self.beam]
        rows, columns = ended.nonzero(as_tuple=True)
        texts = self.ids[rows, origin[rows, columns]]  # (N, T)
        texts = torch.cat((texts, tokens[rows, columns].unsqueeze(1)), dim=1)
        log_probs = best[rows, columns].tolist()
        for row, text, log_prob in zip(rows.tolist(), texts.tolist(), log_probs, strict=True):
            if not self.over[self.live[row]]:
                self.finished[self.live[row]].append(hypothesis(text, log_prob))

    def undecided(self, alpha: float, exact: bool) -> list[bool]:
        """Which rows of the batch have sentences that aren't done."""
        bounds = hope(self.scores.max(dim=1).values, self.max_len, alpha).tolist()
        for source, bound in zip(self.live, bounds, strict=True):
            enough = len(self.finished[source]) >= self.beam
            if enough and exact:
                enough = sorted(h.score(alpha) for h in self.finished[source])[-self.beam] >= bound
            self.over[source] |= enough or bound == -math.inf  # nothing is left to continue
        return [not self.over[source] for source in self.live]

    def keep(self, going: list[bool]) -> None:
        """Go on with these rows of the batch only."""
        rows = close_gaps(torch.tensor(going, device=self.ids.device))
        self.live = [self.live[row] for row in rows.tolist()]
        self.tokens, self.ids, self.scores = (x[rows] for x in (self.tokens, self.ids, self.scores))
        self.decoding.keep(rows)


@torch.inference_mode()
def cached_beam_search(
    model: nn.Module,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    beam: int = 4,
    alpha: float = 0.6,
    exact: bool = False,
) -> list[list[Hypothesis]]:
    """What chapter 8's `beam_search` gives, computing each token once: same arguments and results.

    A sentence is done when `beam` hypotheses have ended; with `exact`, when in addition nothing in
    the beam can still overtake one of the best `beam`. Raises ValueError for a beam below 1.
    """
    if beam < 1:
        raise ValueError(f"a beam holds at least 1 hypothesis, not {beam}")
    with dropout_off(model):
        search = Search(CachedDecoding(model, src, src_mask), src, max_len, beam)
        for step in range(1, max_len + 1):
            if not (search.advance(final=step == max_len) or exact):
                continue  # nothing ended
            going = search.undecided(alpha, exact)
            if not any(going):
                break
            if sum(going) <= PACK_AT * len(going):  # moving the others' caches has a cost, too
                search.keep(going)
    return [sorted(ended, key=lambda h: -h.score(alpha))[:beam] for ended in search.finished]
