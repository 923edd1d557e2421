# %% [markdown]
# # Chapter 9 · Decoding and BLEU

# %%
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch05_training import BOS, EOS, PAD
from scripts.ch06_multi30k import load_corpus, pad_rows, read_lines, source_ids
from scripts.ch08_training_run import Trained, corpus_bleu, load_model, pick_device
from scripts.records import ROOT


# %%
@torch.no_grad()
def next_log_probs(
    model: EncoderDecoder, memory: Tensor, src_mask: Tensor | None, ids: Tensor
) -> Tensor:
    """log p(next token | prefix): memory (B, S, D), ids (B, T) from bos on, to (B, V)."""
    mask = subsequent_mask(ids.size(1), ids.device)  # (1, T, T)
    last = model.decode(memory, src_mask, ids, mask)[:, -1]  # (B, D)
    return model.generator(last).log_softmax(dim=-1)  # (B, V)


# %%
@dataclass(frozen=True)
class Hypothesis:
    """One candidate translation: its ids without bos and eos, and its summed log-probability.

    `length` counts the tokens that were scored, eos included.
    """

    ids: tuple[int, ...]
    log_prob: float
    length: int

    def score(self, alpha: float) -> float:
        """log-probability / length^α: with α = 0 short outputs win, with α = 1 it is the mean."""
        return self.log_prob / self.length**alpha


# %%
def hypothesis(ids: Sequence[int], log_prob: float) -> Hypothesis:
    """A Hypothesis from scored ids, which may end in eos."""
    ended = bool(ids) and ids[-1] == EOS
    return Hypothesis(tuple(ids[:-1] if ended else ids), log_prob, len(ids))


# %%
@torch.no_grad()
def beam_search(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    beam: int = 4,
    alpha: float = 0.6,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each source, best first: src (B, S) to B lists of up to `beam`.

    At each step every unfinished prefix is continued by every token, and the `beam` best
    continuations of each sentence are kept. One that ends is set aside with its score. A sentence
    is done when `beam` hypotheses have ended, so that a beam of 1 is greedy decoding.
    """
    was_training = model.training
    model.eval()
    B, device = src.size(0), src.device
    memory = model.encode(src, src_mask)  # (B, S, D)
    memory = memory.repeat_interleave(beam, dim=0)  # (B·K, S, D)
    if src_mask is not None:
        src_mask = src_mask.repeat_interleave(beam, dim=0)  # (B·K, 1, S)
    ids = src.new_full((B * beam, 1), BOS)  # (B·K, 1)
    scores = torch.full((B, beam), -torch.inf, device=device)  # (B, K)
    scores[:, 0] = 0.0  # all K prefixes are alike at first: continue one of them
    finished: list[list[Hypothesis]] = [[] for _ in range(B)]
    done = [False] * B

    for step in range(1, max_len + 1):
        log_probs = next_log_probs(model, memory, src_mask, ids)  # (B·K, V)
        V = log_probs.size(-1)
        total = scores.unsqueeze(-1) + log_probs.view(B, beam, V)  # (B, K, V)
        # 2K candidates: even if K of them end, K unfinished ones remain.
        best, flat = total.view(B, -1).topk(min(2 * beam, beam * V), dim=-1)  # (B, 2K) each
        origin, token = flat // V, flat % V  # (B, 2K) each
        keep_from, keep_token, keep_score = [], [], []
        for b in range(B):
            survivors = []
            rows = zip(best[b].tolist(), origin[b].tolist(), token[b].tolist(), strict=True)
            for rank, (log_prob, k, t) in enumerate(rows):
                if t == EOS or step == max_len:
                    if rank < beam and not done[b] and log_prob > -torch.inf:
                        prefix = ids[b * beam + k, 1:].tolist()
                        finished[b].append(hypothesis([*prefix, t], log_prob))
                elif len(survivors) < beam:
                    survivors.append((b * beam + k, t, log_prob))
            while len(survivors) < beam:  # the last step, or a tiny vocabulary
                survivors.append((b * beam, PAD, -torch.inf))
            done[b] = done[b] or len(finished[b]) >= beam
            keep_from += [s[0] for s in survivors]
            keep_token += [s[1] for s in survivors]
            keep_score += [s[2] for s in survivors]
        if all(done):
            break
        chosen = torch.tensor(keep_from, device=device)  # (B·K,)
        ids = torch.cat((ids[chosen], ids.new_tensor(keep_token).unsqueeze(1)), dim=1)
        scores = scores.new_tensor(keep_score).view(B, beam)
    model.train(was_training)
    best_first = [sorted(found, key=lambda h: h.score(alpha), reverse=True) for found in finished]
    return [found[:beam] for found in best_first]


# %%
@torch.no_grad()
def sample_decode(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Tokens drawn from the model's distribution: src (B, S) to ids (B, ≤ max_len), as `greedy_decode`.

    `temperature` divides the log-probabilities: towards 0 it becomes greedy. `top_k` keeps the k
    likeliest tokens. Raises ValueError for a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    was_training = model.training
    model.eval()
    memory = model.encode(src, src_mask)  # (B, S, D)
    ids = src.new_full((src.size(0), 1), BOS)  # (B, 1)
    ended = torch.zeros(src.size(0), dtype=torch.bool, device=src.device)  # (B,)
    for _ in range(max_len):
        log_probs = next_log_probs(model, memory, src_mask, ids) / temperature  # (B, V)
        if top_k is not None:
            log_probs = keep_top(log_probs, top_k)
        token = torch.multinomial(log_probs.softmax(dim=-1), 1, generator=generator)  # (B, 1)
        ids = torch.cat((ids, token.masked_fill(ended.unsqueeze(1), PAD)), dim=1)
        ended |= token.squeeze(1) == EOS
        if ended.all():
            break
    model.train(was_training)
    return ids[:, 1:]


# %%
def keep_top(log_probs: Tensor, k: int) -> Tensor:
    """(B, V) with all but each row's k largest entries at −∞."""
    threshold = log_probs.topk(min(k, log_probs.size(-1)), dim=-1).values[:, -1:]  # (B, 1)
    return log_probs.masked_fill(log_probs < threshold, -torch.inf)


# %%
def beam_translate(
    trained: Trained,
    sentences: Sequence[str],
    beam: int = 4,
    alpha: float = 0.6,
    batch_size: int = 32,
) -> list[str]:
    """Translations of `sentences`, in their order, by beam search over length-sorted batches."""
    device = next(trained.model.parameters()).device
    rows = [source_ids(sentence, trained.tokenizer) for sentence in sentences]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    out = [""] * len(rows)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        src = pad_rows([rows[i] for i in chosen]).to(device)  # (B, S)
        limit = min(MAX_LEN, 2 * src.size(1) + 10)
        found = beam_search(trained.model, src, padding_mask(src), limit, beam, alpha)
        for i, hypotheses in zip(chosen, found, strict=True):
            out[i] = trained.tokenizer.decode(hypotheses[0].ids)
    return out
