"""Greedy, sampled and beam search over `engine.decoding`: finished sentences leave the batch.

They find what chapter 8's plain searches find; chapter 13 tells what makes them fast.
"""

import math

import torch
from torch import Tensor

from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS, EOS
from scripts.ch08_decoding import Hypothesis, drawer, dropout_off, hypothesis
from scripts.ch13_decoding_fast import ALMOST, close_gaps, write_and_leave
from scripts.engine.decoding import CachedDecoding, PrefixDecoding, PreparedModel, decoding_of
from scripts.engine.kernels import best_of_rows

ROWS_NEAR = 128  # prefixes whose logits are computed and used together


def best_next(
    decoding: PrefixDecoding | CachedDecoding, x: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens after x (N, D): their log-probabilities and ids, (N, k) each."""
    found = []
    for rows in x.split(ROWS_NEAR):
        top, ids, total = best_of_rows(decoding.logits(rows), k)
        found.append((top - total, ids))
    tops, ids = zip(*found, strict=True)
    return torch.cat(tops), torch.cat(ids)


def likeliest(decoding: PrefixDecoding | CachedDecoding, x: Tensor) -> tuple[Tensor, None]:
    """The choice of greedy decoding: last positions x (N, D) to tokens (N,)."""
    model = decoding.model
    if getattr(model, "screen", None) is not None:
        return model.screen.largest(model.generator.narrow(x), model.vocabulary), None
    return best_of_rows(decoding.logits(x), 1, total=False)[1].squeeze(1), None


def cached_greedy(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor | None, max_len: int
) -> Tensor:
    """What `greedy_decode` gives, computing each token once: src (B, S) to ids (B, ≤ max_len)."""
    with dropout_off(model), torch.inference_mode():
        ids, _ = write_and_leave(decoding_of(model, src, src_mask), src, max_len, likeliest)
    return ids.clone()  # an ordinary tensor again


def cached_sample(
    model: EncoderDecoder | PreparedModel,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Texts drawn by chapter 8's `drawer`; their log-probabilities are the model's own."""
    draw = drawer(temperature, top_k, top_p, generator)
    with dropout_off(model), torch.inference_mode():
        decoding = decoding_of(model, src, src_mask)
        ids, log_probs = write_and_leave(decoding, src, max_len, draw)
    return ids.clone(), log_probs.clone()


class Search:
    """A beam search over a batch: what is unfinished in tensors, what is finished in lists."""

    def __init__(
        self, decoding: PrefixDecoding | CachedDecoding, src: Tensor, max_len: int, beam: int
    ):
        self.decoding, self.max_len, self.beam = decoding, max_len, beam
        self.live = list(range(len(src)))  # which sources are in the batch
        self.finished: list[list[Hypothesis]] = [[] for _ in self.live]
        self.over = [False] * len(src)  # which sources are done
        self.tokens = src.new_full((len(src), 1), BOS)  # (B, k)
        self.ids = src.new_empty(len(src), 1, 0)  # (B, k, T)
        self.scores = torch.zeros(len(src), 1, device=src.device)  # (B, k)
        self.ranks = torch.arange(2 * beam, device=src.device)  # of a sentence's candidates

    def advance(self, final: bool) -> None:
        """One step: every prefix by every token, the best K of what doesn't end go on."""
        B, k = self.tokens.shape
        x = self.decoding.step(self.tokens)  # (B·k, D)
        log_probs, tokens = best_next(self.decoding, x, 2 * self.beam)  # (B·k, C) each
        log_probs = log_probs.view(B, k, -1)  # (B, k, C)
        total = (self.scores.unsqueeze(-1) + log_probs).flatten(1)  # (B, k·C)
        width = min(2 * self.beam, total.size(1))
        best, place = total.topk(width, dim=-1)  # (B, width) each
        origin = place // log_probs.size(-1)  # which prefix
        tokens = tokens.view(B, -1).gather(1, place)  # which token
        ends = (tokens == EOS) | final
        self.set_aside(best, origin, tokens, ends & (self.ranks[:width] < self.beam))
        # Those that go on, best first, then the ended ones, which fill the room as impossible.
        order = (self.ranks[:width] + width * (tokens == EOS)).argsort(dim=-1)[:, : self.beam]
        gone = (tokens == EOS).gather(1, order)
        self.scores = best.gather(1, order).masked_fill(gone, -math.inf)
        self.tokens, origin = tokens.gather(1, order), origin.gather(1, order)  # (B, K) each
        self.ids = torch.cat((self.prefixes(origin), self.tokens.unsqueeze(-1)), dim=-1)
        self.decoding.follow(origin)

    def prefixes(self, origin: Tensor) -> Tensor:
        """The ids (B, n, T) of the prefixes numbered origin (B, n)."""
        return self.ids.gather(1, origin.unsqueeze(-1).expand(-1, -1, self.ids.size(-1)))

    def set_aside(self, best: Tensor, origin: Tensor, tokens: Tensor, ended: Tensor) -> None:
        """Enter the candidates that ended (B, C) into their sentences' lists."""
        rows, columns = (ended & best.isfinite()).nonzero(as_tuple=True)
        texts = self.ids[rows, origin[rows, columns]]  # (N, T)
        texts = torch.cat((texts, tokens[rows, columns].unsqueeze(1)), dim=1).tolist()
        for row, text, log_prob in zip(
            rows.tolist(), texts, best[rows, columns].tolist(), strict=True
        ):
            if not self.over[self.live[row]]:
                self.finished[self.live[row]].append(hypothesis(text, log_prob))

    def undecided(self, alpha: float, exact: bool) -> list[bool]:
        """Which rows of the batch have sentences that aren't done."""
        hopes = (self.scores.max(dim=1).values / self.max_len**alpha).tolist()
        for source, hope in zip(self.live, hopes, strict=True):
            enough = len(self.finished[source]) >= self.beam
            if enough and exact:
                enough = self.worst(source, alpha) >= hope
            self.over[source] |= enough or hope == -math.inf  # nothing is left to continue
        return [not self.over[source] for source in self.live]

    def worst(self, source: int, alpha: float) -> float:
        """The score of the K-th best hypothesis that this source has."""
        return sorted((h.score(alpha) for h in self.finished[source]), reverse=True)[self.beam - 1]

    def keep(self, going: list[bool]) -> None:
        """Go on with these rows of the batch alone."""
        rows = close_gaps(torch.tensor(going, device=self.ids.device))
        self.live = [self.live[row] for row in rows.tolist()]
        self.tokens, self.ids, self.scores = (x[rows] for x in (self.tokens, self.ids, self.scores))
        self.decoding.keep(rows)


@torch.inference_mode()
def cached_beam_search(
    model: EncoderDecoder,
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
        search = Search(decoding_of(model, src, src_mask), src, max_len, beam)
        for step in range(1, max_len + 1):
            search.advance(final=step == max_len)
            going = search.undecided(alpha, exact)
            if not any(going):
                break
            if sum(going) <= ALMOST * len(going):
                search.keep(going)
    return [sorted(found, key=lambda h: -h.score(alpha))[:beam] for found in search.finished]
