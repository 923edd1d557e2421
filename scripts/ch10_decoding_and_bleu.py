# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 10 · Decoding and BLEU
#
# After this chapter you can turn a trained model's probabilities into sentences in three ways, fast, take the model to other programs, measure how good its sentences are, and say exactly what the measured number means.
#
# *Attention Is All You Need*, §6.1 (beam search, length penalty, averaged checkpoints, BLEU). 90 minutes to read, 180 with the code; half a minute to run on a CPU.
#
# Previous: [Chapter 9 · The training run](ch09_training_run.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **V** vocabulary. In this chapter also **K**, the width of the beam.
#
# Its searches are at work in three commands:
#
# ```
# python -m scripts.translate "Ein Hund schläft." --beam 4
# python -m scripts.translate --input german.txt --nbest 3
# python -m scripts.evaluate --corpus sample --split test --beam 1
# python -m scripts.export FOLDER --format onnx
# ```

# %% tags=["bootstrap"]
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "set SERIES_REPOSITORY").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
ours = runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))

# %%
import bisect
import copy
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures.decoding import (
    alpha_chart,
    alpha_frame,
    beam_tree,
    beam_tree_chart,
    decoding_account_chart,
    decoding_speed_chart,
    speed_frame,
    temperature_chart,
)
from scripts.book.figures.judging import (
    beam_chart,
    beam_sweep_chart,
    brevity_chart,
    chance_chart,
    length_chart,
    penalty_sweep_chart,
    rare_word_chart,
    sentence_table,
)
from scripts.book.instruments import scramble
from scripts.book.records import load_record
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import MAX_LEN, check_length
from scripts.ch04_encoder_decoder import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderDecoder,
    EncoderLayer,
    LayerNorm,
    make_model,
)
from scripts.ch06_training import BOS, EOS, PAD, UNK, greedy_decode
from scripts.ch07_multi30k import encode_pairs, make_batch, pad_rows, source_ids, word_tokenizer
from scripts.ch08_going_fast import (
    FAST,
    Layout,
    affine,
    embed,
    normed,
    scaled_product,
    suits_onednn,
    switches_for,
)
from scripts.ch09_training_run import (
    Hypothesis,
    Trained,
    average_checkpoints,
    beam_search,
    build_model,
    corpus_bleu,
    dropout_off,
    hypothesis,
    load_model,
    next_log_probs,
    sift,
)
from scripts.corpora.load import load_corpus
from scripts.engine.checkpoints import save_tensors, weights

# %% [markdown]
# ## A model proposes, a search decides
#
# > **In short.** The trained model never writes a sentence. Asked "what comes next?", it gives every word a probability. To write, somebody has to choose, word after word. How to choose is this chapter's question.
#
# The probability of a whole target sentence $y = (y_1, \dots, y_T)$, where $y_T$ is `</s>`, is a product, and its logarithm a sum:
#
# $$\log p(y \mid x) = \sum_{t=1}^{T} \log p(y_t \mid y_1, \dots, y_{t-1}, x)$$
#
# Products of many small numbers underflow; sums of logarithms don't. So all that follows adds logarithms. One step asks the decoder for its last position only: that is `next_log_probs` of [chapter 9](ch09_training_run.ipynb), which needed a search to report its scores. This chapter explains what chapter 9 used.
#
# To *see* a search work we want a model so small that we can check it by hand. Here is one: a phrase book. It knows nine words, and the next word depends on the last word alone. It has the same three parts as our Transformer (`encode`, `decode`, `generator`), so every decoder of this chapter runs on it unchanged.

# %%
START, END = "<s>", "</s>"
NEXT_WORD: dict[str, dict[str, float]] = {
    START: {"the": 0.45, "a": 0.40, "one": 0.15},
    "the": {"dog": 0.40, "hound": 0.35, "puppy": 0.25},
    "a": {"dog": 0.80, "hound": 0.20},
    "one": {"dog": 0.90, "hound": 0.10},
    "dog": {"sleeps": 0.50, "is": 0.45, END: 0.05},
    "hound": {"sleeps": 0.70, "is": 0.30},
    "puppy": {"sleeps": 0.70, "is": 0.30},
    "is": {"sleeping": 0.95, END: 0.05},
    "sleeps": {END: 1.0},
    "sleeping": {END: 1.0},
}


# %%
class PhraseBook(nn.Module):
    """A stand-in for a trained model: p(next word | last word) comes from a table.

    It has the three parts that a decoder asks for, `encode`, `decode` and `generator`, and it ignores
    the source. `words` lists the vocabulary by id; a word without a row ends the sentence.
    """

    def __init__(self, next_words: Mapping[str, Mapping[str, float]] = NEXT_WORD):
        super().__init__()
        rest = dict.fromkeys(word for row in next_words.values() for word in row if word != END)
        self.words = ["<pad>", "<unk>", START, END, *rest]
        table = torch.zeros(len(self.words), len(self.words), dtype=torch.float64)  # (V, V)
        for i, word in enumerate(self.words):
            for following, p in next_words.get(word, {END: 1.0}).items():
                table[i, self.words.index(following)] = p
        self.register_buffer("log_table", table.log())
        self.generator = nn.Identity()

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """src (B, S) to a memory that nobody reads, (B, S, 1)."""
        return torch.zeros(*src.shape, 1, dtype=torch.float64)

    def decode(
        self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """tgt (B, T) to log-probabilities (B, T, V), of which position t looks at token t alone."""
        return self.log_table[tgt]

    def text(self, ids: Iterable[int]) -> str:
        """Ids as words."""
        return " ".join(self.words[i] for i in ids)


# %%
book = PhraseBook()
anything = torch.tensor([[EOS]])  # (1, 1): the phrase book doesn't read its source
log_probs = next_log_probs(book, book.encode(anything), None, torch.tensor([[BOS]]))  # (1, V)
assert math.isclose(log_probs.exp().sum().item(), 1.0)
for word, p in zip(book.words, log_probs[0].exp().tolist(), strict=True):
    if p > 0:
        print(f"p({word} | <s>) = {p:.2f}")

# %% [markdown]
# ## Greedy decoding, and where it goes wrong
#
# > **In short.** Take the likeliest word, write it down, ask again. Fast, simple, and short-sighted: like a hiker who always takes the steepest path up and ends on the wrong hill.
#
# [Chapter 6](ch06_training.ipynb) wrote `greedy_decode` for the copy task: $\hat y_t = \arg\max_w\, p(w \mid \hat y_{<t}, x)$. It takes a whole batch (B, S) and stops when every row has written `</s>`.
#
# **Predict.** Follow the table above from `<s>`. Which sentence does greedy decoding write? Is there a likelier one?


# %%
def every_sentence(
    next_words: Mapping[str, Mapping[str, float]],
) -> list[tuple[tuple[str, ...], float]]:
    """All sentences of a table of words with their probabilities, likeliest first."""
    finished, unfinished = [], [((), 1.0)]
    while unfinished:
        words, p = unfinished.pop()
        for word, q in next_words[words[-1] if words else START].items():
            (finished if word == END else unfinished).append(((*words, word), p * q))
    return sorted(finished, key=lambda sentence: -sentence[1])


# %%
greedy_ids = greedy_decode(book, anything, None, max_len=10)  # (1, T)
greedy_text = book.text(greedy_ids[0].tolist())
all_sentences = every_sentence(NEXT_WORD)
assert math.isclose(sum(p for _, p in all_sentences), 1.0)

print("greedy: ", greedy_text)
for words, p in all_sentences[:4]:
    print(f"p = {p:.3f}  {' '.join(words)}")

# %% [markdown]
# Greedy decoding writes "the dog sleeps", since "the" is the likeliest first word. But after "the" the model hesitates between three nouns, and after "a" it doesn't. "a dog sleeps" is almost twice as likely. The first choice can't be taken back.

# %%
probability = {" ".join(words): p for words, p in all_sentences}
assert greedy_text == "the dog sleeps </s>"
assert max(probability, key=probability.get) == "a dog sleeps </s>"
assert probability["a dog sleeps </s>"] > 1.7 * probability[greedy_text]

# %% [markdown]
# **Pitfall.** The first version that one writes decodes a *single* sentence for a *fixed* number of steps. Two things go wrong. It asks the model far too often: each sentence alone, and long after its end. And it returns whatever the model says after `</s>`, where it was never trained: trailing garbage. You notice it by sentences that end twice.


# %%
def wrong_greedy(model: EncoderDecoder, src: Tensor, steps: int) -> Tensor:
    """Greedy decoding as it is often written first: always `steps` tokens. src (1, S) to (1, steps)."""
    memory = model.encode(src, None)  # (1, S, D)
    ids = torch.full((1, 1), BOS)  # (1, 1)
    for _ in range(steps):
        token = next_log_probs(model, memory, None, ids).argmax(dim=-1, keepdim=True)  # (1, 1)
        ids = torch.cat((ids, token), dim=1)  # (1, T+1)
    return ids[:, 1:]


# %%
def tokens_after_end(ids: Tensor) -> int:
    """How many tokens of ids (B, T) stand after their row's first eos and are not padding."""
    after = (ids == EOS).long().cumsum(dim=1) - (ids == EOS).long() > 0  # (B, T)
    return int((after & (ids != PAD)).sum())


# %%
def count_calls(module: nn.Module, action: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """How often `module` was called while `action` ran, and what that returned."""
    calls = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        result = action()
    finally:
        handle.remove()
    return len(calls), result


# %%
sixteen = anything.expand(16, 1)  # (16, 1)
our_calls, ours = count_calls(book.generator, lambda: greedy_decode(book, sixteen, None, 30))
wrong_calls, wrong = count_calls(
    book.generator, lambda: torch.cat([wrong_greedy(book, row.unsqueeze(0), 30) for row in sixteen])
)
print(f"ours:  {our_calls:3} calls, {tokens_after_end(ours):3} tokens after the end")
print(f"wrong: {wrong_calls:3} calls, {tokens_after_end(wrong):3} tokens after the end")
assert our_calls == 4 and wrong_calls == 16 * 30
assert torch.equal(ours, wrong[:, :4]) and tokens_after_end(ours) == 0
assert tokens_after_end(wrong) == 16 * 26  # the same check fails on the wrong version

# %% [markdown]
# ## Beam search
#
# > **In short.** Keep not one unfinished sentence but the K best. Like a group that explores a maze together: at each fork all ways are tried, and only the K most promising go on.
#
# At each step every one of the K prefixes is continued by every one of the V words. That makes K·V candidates, and the K likeliest survive. K = 1 is greedy decoding; K = ∞ would be an exhaustive search. Here it is in plain Python, over our table:


# %%
def beam_by_hand(
    next_words: Mapping[str, Mapping[str, float]], beam: int, max_len: int = 10
) -> tuple[list[tuple[tuple[str, ...], float]], pd.DataFrame]:
    """Beam search over a table of words, in plain Python.

    Returns the finished sentences with their probabilities, likeliest first, and every candidate
    that was weighed on the way: its words, its probability, and its fate.
    """
    prefixes: list[tuple[tuple[str, ...], float]] = [((), 1.0)]
    finished, weighed = [], []
    for _ in range(max_len):
        candidates = [
            ((*words, word), p * q)
            for words, p in prefixes
            for word, q in next_words[words[-1] if words else START].items()
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        ended = [c for c in candidates[:beam] if c[0][-1] == END]
        prefixes = [c for c in candidates if c[0][-1] != END][:beam]
        for c in candidates:
            fate = "ends" if c in ended else "kept" if c in prefixes else "dropped"
            weighed.append({"words": c[0], "p": c[1], "fate": fate})
        finished += ended
        if len(finished) >= beam or not prefixes:
            break
    return sorted(finished, key=lambda f: -f[1])[:beam], pd.DataFrame(weighed)


# %% [markdown]
# **Predict.** With K = 2, which two first words survive? Which of the two leads to the winner?

# %%
best_two, weighed = beam_by_hand(NEXT_WORD, beam=2)
for words, p in best_two:
    print(f"p = {p:.4f}  {' '.join(words)}")
assert [" ".join(words) for words, _ in best_two] == ["a dog sleeps </s>", "a dog is sleeping </s>"]


# %%
beam_tree_chart(beam_tree(weighed))

# %% [markdown]
# The beam kept "a", though "the" was likelier, and that was enough. A beam is no guarantee: a path that starts too badly is dropped however well it would end.
#
# Now the real thing: whole batches, on tensors, with any model. `beam_search` stands in [chapter 9](ch09_training_run.ipynb), in the section "A score to steer by". Have its cell open beside this table. Each line of `beam_by_hand` has its place there:
#
# | by hand, one sentence | on tensors, B sentences |
# |---|---|
# | `prefixes`: up to K tuples of words | `ids` (B·K, T): K rows for each sentence |
# | their probabilities `p` | `scores` (B, K): log-probabilities |
# | `p * q` for every next word | `scores` + `next_log_probs`: (B, K, V), all of them at once |
# | sort the candidates | `topk` over a sentence's K·V candidates, laid out in one row |
# | a candidate's tuple names its prefix | place ÷ V is the prefix, the remainder is the token |
# | `ended` and `prefixes` | `sift` parts one from the other |
# | a finished tuple with its `p` | a `Hypothesis`: ids, summed log-probability, and how many tokens were scored |
#
# Two lines have no partner by hand. At the first step all K rows of a sentence hold the same `<s>`. Were they all continued, the beam would fill with K copies of one text; so one row starts at score 0 and the others at −∞. And `dropout_off` switches the model to evaluation while the search runs. What happens without it is a pitfall further down.
#
# **Pitfall.** Of each sentence's candidates `sift` is given the best **2K**, not the best K. Up to K of them may end with `</s>` and leave the beam; the other K keep it full. With the best K alone, each ending costs the beam a prefix. Nothing crashes: the beam just grows narrower. Here K = 2, and the best candidate ends.

# %%
three_candidates = [(math.log(p), 0, token) for p, token in ((0.5, EOS), (0.3, 4), (0.2, 5))]
ended, going = sift(three_candidates, beam=2, final=False)
assert ended == three_candidates[:1] and going == three_candidates[1:]  # two go on, as they should
_, too_few = sift(three_candidates[:2], beam=2, final=False)
assert [p > -math.inf for p, _, _ in too_few] == [True, False]  # of the best K alone, one goes on

# %% [markdown]
# Three checks of the whole search. First: on the phrase book it finds what the plain Python finds, for several widths. Second: a beam of 1 is greedy decoding, here on an untrained Transformer and a padded batch.

# %%
for beam in (1, 2, 3, 4):
    by_hand, _ = beam_by_hand(NEXT_WORD, beam)
    found = beam_search(book, anything, None, max_len=10, beam=beam, alpha=0.0)[0]
    assert [f"{book.text(h.ids)} </s>" for h in found] == [" ".join(words) for words, _ in by_hand]
    for h, (_, p) in zip(found, by_hand, strict=True):
        assert math.isclose(math.exp(h.log_prob), p, rel_tol=1e-9)

# %%
torch.manual_seed(0)
tiny = make_model(6, 6, N=1, d_model=16, d_ff=32, h=2, dropout=0.0).double().eval()
with torch.no_grad():
    tiny.generator.proj.weight.mul_(6)  # far from uniform, so that there is something to find
src = pad_rows([[4, 5, 4, EOS], [5, EOS], [4, 4, 5, EOS]])  # (3, 4)
greedy_rows = greedy_decode(tiny, src, padding_mask(src), 8).tolist()
beam_rows = beam_search(tiny, src, padding_mask(src), 8, beam=1)
for row, found in zip(greedy_rows, beam_rows, strict=True):
    assert list(found[0].ids) == (row[: row.index(EOS)] if EOS in row else row)

# %% [markdown]
# Third, the strongest: brute force. With 6 tokens and at most 3 steps, all that this model can say fits into a list. We score each text by teacher forcing, in one pass as in training. That is an independent way to the same number. The probabilities must sum to 1, and a beam wide enough to drop nothing must return the same texts in the same order.


# %%
@torch.no_grad()
def forced_log_probs(model: EncoderDecoder, src: Tensor, ids: Tensor) -> Tensor:
    """The summed log-probability of each row of ids (N, T), given one source, src (1, S): (N,).

    By teacher forcing: whole sequences in one pass, as in training and unlike a search. Where a row
    ends, its eos is scored as well; nothing is padded.
    """
    with dropout_off(model):
        memory = model.encode(src, None).expand(len(ids), -1, -1)  # (N, S, D)
        tgt = torch.cat((torch.full_like(ids[:, :1], BOS), ids[:, :-1]), dim=1)  # (N, T)
        x = model.decode(memory, None, tgt, subsequent_mask(tgt.size(1)))  # (N, T, D)
        log_probs = model.generator(x).log_softmax(dim=-1)  # (N, T, V)
    return log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).sum(dim=-1)  # (N,)


# %%
def every_hypothesis(
    model: EncoderDecoder, src: Tensor, vocab: int, max_len: int
) -> list[Hypothesis]:
    """All that can be written in `max_len` tokens, scored by teacher forcing. Tiny models only."""
    found = []
    for length in range(1, max_len + 1):
        written = [
            ids
            for ids in itertools.product(range(vocab), repeat=length)
            if EOS not in ids[:-1] and (ids[-1] == EOS or length == max_len)
        ]
        log_probs = forced_log_probs(model, src, torch.tensor(written)).tolist()
        found += [hypothesis(ids, p) for ids, p in zip(written, log_probs, strict=True)]
    return found


# %%
one = src[:1]  # (1, 4)
everything = every_hypothesis(tiny, one, vocab=6, max_len=3)
assert math.isclose(sum(math.exp(h.log_prob) for h in everything), 1.0)

for alpha in (0.0, 0.6, 1.0):
    ranked = sorted(everything, key=lambda h: -h.score(alpha))
    found = beam_search(tiny, one, None, max_len=3, beam=6**3, alpha=alpha)[0]
    assert [h.ids for h in found] == [h.ids for h in ranked]
    for ours, theirs in zip(found, ranked, strict=True):
        assert math.isclose(ours.log_prob, theirs.log_prob, rel_tol=1e-9)
print(f"{len(everything)} possible texts, and the same ranking from both.")

# %% [markdown]
# ## Length: why the score is divided
#
# > **In short.** Every further word costs probability. So the likeliest sentence tends to be too short. Dividing by a power of the length makes up for it.
#
# A log-probability is a sum of T negative numbers: it falls with every word. We rank finished hypotheses by
#
# $$\text{score}(y) = \frac{\log p(y \mid x)}{T^{\alpha}}$$
#
# With α = 0 the plain log-probability counts, with α = 1 the mean per token. The paper uses α = 0.6.
#
# **Predict.** "a dog sleeps" has p = 0.16 with 4 tokens (`</s>` counts), "a dog is sleeping" has p = 0.137 with 5. From which α on does the longer one win?


# %%
short, long = (
    math.log(probability[f"{text} </s>"]) for text in ("a dog sleeps", "a dog is sleeping")
)
turning_point = math.log(long / short) / math.log(5 / 4)  # where long / 5^α = short / 4^α
print(f"The longer one wins from alpha = {turning_point:.2f} on.")
for alpha in (turning_point - 0.01, turning_point + 0.01):
    best = beam_search(book, anything, None, 10, beam=4, alpha=alpha)[0][0]
    assert book.text(best.ids) == ("a dog sleeps" if alpha < turning_point else "a dog is sleeping")

alpha_chart(alpha_frame(probability))

# %% [markdown]
# ## Compute once: the cache
#
# > **In short.** Our searches so far run the whole prefix through the decoder at every step, and throw all but the last position away. But a causal decoder's earlier positions never change. Keep what later steps will ask of them, and a step costs one token instead of t.
#
# What does a later position ask of an earlier one? Its key and its value, in each layer, and nothing else (chapter 2). So each layer keeps two tensors that grow by one row a step. Cross-attention's keys and values come from the source alone: they are computed before the first step and never change. All K beams of a sentence read the *same* copy of them.
#
# | | without a cache | with one |
# |---|---|---|
# | decoder positions computed for T tokens | $1 + 2 + \dots + T = T(T+1)/2$ | $T$ |
# | keys and values of the source, S positions, each layer | T times (and K times that) | once |
# | kept between steps, per layer | nothing | $2 T D$ numbers a beam, $2 S D$ a sentence |
#
# A search should not care which way its probabilities come. So we give the two ways the same four methods, and write each search once. `step` continues every prefix by a token; `logits` turns what it returns into scores of the next; `follow` rearranges the prefixes (a beam search needs that); `keep` drops finished sentences. First the way without a cache, which is what the formula says and runs on the phrase book too:


# %%
class PrefixDecoding:
    """A decoding in progress by the formula: every step runs the whole prefixes through the decoder.

    It holds k prefixes for each of B sources; k is 1 at first.
    """

    def __init__(self, model: nn.Module, src: Tensor, src_mask: Tensor | None):
        self.model, self.src_mask = model, src_mask
        self.memory = model.encode(src, src_mask)  # (B, S, D)
        self.ids = src.new_empty(len(src), 1, 0)  # (B, k, T)

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each prefix by one of tokens (B, k): the decoder's last positions (B·k, D)."""
        self.ids = torch.cat((self.ids, tokens.unsqueeze(-1)), dim=-1)  # (B, k, T)
        k, mask = tokens.size(1), self.src_mask
        memory = self.memory.repeat_interleave(k, dim=0)  # (B·k, S, D)
        if mask is not None:
            mask = mask.repeat_interleave(k, dim=0)  # (B·k, 1, S)
        causal = subsequent_mask(self.ids.size(-1), self.ids.device)  # (1, T, T)
        return self.model.decode(memory, mask, self.ids.flatten(0, 1), causal)[:, -1]

    def logits(self, x: Tensor) -> Tensor:
        """Last positions x (N, D) to what may come next, (N, V)."""
        return self.model.generator(x)

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, k), of each source's own."""
        self.ids = self.ids.gather(1, origin.unsqueeze(-1).expand(-1, -1, self.ids.size(-1)))

    def keep(self, rows: Tensor) -> None:
        """Go on with the sources numbered rows (N,) alone."""
        self.memory, self.ids = self.memory[rows], self.ids[rows]
        if self.src_mask is not None:
            self.src_mask = self.src_mask[rows]


# %% [markdown]
# Now the way with a cache, with some care for the machine. A step is small, and there are many: what can be done once is done before the first of them. oneDNN, whose products chapter 8 chose, keeps matrices in an order of its own; it gets each one in that order once, instead of with every call. And while it writes a product it can add what comes next in a Transformer anyway, a ReLU or the residual.


# %%
class Packed:
    """Linear maps of the same rows as one product, with the weights laid out for it beforehand."""

    def __init__(self, *linears: nn.Linear):
        self.weight = torch.cat([linear.weight.detach() for linear in linears])  # (F, D)
        self.bias = torch.cat([linear.bias.detach() for linear in linears])  # (F,)
        self.onednn = suits_onednn(self.weight)
        if self.onednn:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x·Wᵀ + b: x (N, D) to (N, F)."""
        return affine(x, self.weight, self.bias, self.onednn)

    def relu(self, x: Tensor) -> Tensor:
        """max(0, x·Wᵀ + b), in one pass where oneDNN does it: x (N, D) to (N, F)."""
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "relu", [], "")
        return self(x).relu_()

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        """x·Wᵀ + b + y, in one pass where oneDNN does it: x (N, D) and y (N, F) to (N, F)."""
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise.binary(x, y, self.weight, self.bias, "add")
        return self(x).add_(y)


# %%
x, y, layer = torch.randn(7, 12), torch.randn(7, 20), nn.Linear(12, 20)
for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
    x, y, layer = x.to(dtype), y.to(dtype), layer.to(dtype)
    with torch.no_grad():
        pairs = [
            (Packed(layer)(x), layer(x)),
            (Packed(layer).relu(x), layer(x).relu()),
            (Packed(layer).plus(x, y), layer(x) + y),
            (Packed(layer, layer)(x), torch.cat((layer(x), layer(x)), dim=-1)),
        ]
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=close, atol=close)

# %% [markdown]
# A layer in that form, of the encoder or of the decoder. Its attention is chapter 8's without dropout, one matrix for each head of each sentence. One thing there is a surprise. Over fewer than 16 columns PyTorch's softmax goes number by number, since 16 numbers fill a register, and the smallest of batched products take a slow path, too. Most captions are shorter than that. So nothing here is ever narrower than `WIDE`: a few columns of padding, hidden like all padding, make attention *faster*. (Time `torch.softmax` over 12 and over 16 columns with chapter 8's `best_seconds`.)


# %%
WIDE = 16  # columns that attention has at least: float32 numbers in the widest registers


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """softmax(QKᵀ/√d_k + hidden)·V: q (B, H, T, d_k), k and v (B, H, S, d_k), to rows (B·T, D).

    `hidden` broadcasts to (B, H, T, S): −∞ where a query must not look, else 0 (§3.2.1, eq. 1).
    """
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B·H, T or S, d_k)
    weights = scaled_product(q, k.mT, q.size(-1) ** -0.5)  # (B·H, T, S)
    if hidden is not None:
        weights.view(*shape[:3], -1).add_(hidden)
    heads = torch.bmm(torch.softmax(weights, dim=-1, out=weights), v)  # (B·H, T, d_k)
    return merge_heads(heads.view(shape)).flatten(0, 1)


def spread_by_heads(rows: Tensor, layout: Layout, parts: int, heads: int) -> Tensor:
    """Rows (N, parts·H·d_k) to (parts, B, H, S, d_k). Padding, which is hidden, gets the first row."""
    B, S = layout.shape
    number = torch.arange(len(rows), device=rows.device)
    number = number.new_zeros(B * S).index_copy_(0, layout.slots, number)  # of each cell's row
    blocks = torch.arange(parts * heads, device=rows.device).view(parts, 1, heads, 1)
    places = number.view(B, 1, S) * (parts * heads) + blocks  # (parts, B, H, S): of pieces of d_k
    return F.embedding(places, rows.view(len(rows) * parts * heads, -1))


class PreparedLayer:
    """A layer of the encoder or decoder, made ready for many small steps; rows are (N, D)."""

    def __init__(self, layer: EncoderLayer | DecoderLayer):
        attn = layer.self_attn
        self.connections, self.heads = layer.sublayer, attn.h
        self.look_back = Packed(attn.project_query, attn.project_key, attn.project_value)
        self.look_back_out = Packed(attn.project_output)
        if isinstance(layer, DecoderLayer):
            self.look_across = Packed(layer.src_attn.project_query)
            self.look_across_out = Packed(layer.src_attn.project_output)
        self.expand = Packed(layer.feed_forward.expand)
        self.contract = Packed(layer.feed_forward.contract)

    def into(self, sublayer: int, x: Tensor) -> Tensor:
        """What a sublayer gets to see of x: the normalised x, or x itself where the norm comes after."""
        connection = self.connections[sublayer]
        return normed(connection.norm, x, FAST) if connection.norm_first else x

    def out_of(self, sublayer: int, x: Tensor) -> Tensor:
        """What leaves the residual sum x."""
        connection = self.connections[sublayer]
        return x if connection.norm_first else normed(connection.norm, x, FAST)

    def queries_keys_values(self, parts: Tensor) -> Tensor:
        """What `look_back` gives, as (B, T, 3·D), to (3, B, H, T, d_k)."""
        return parts.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def encode(self, x: Tensor, layout: Layout, padding: Tensor | None) -> Tensor:
        """An encoder layer: the source's rows (N, D) to (N, D)."""
        parts = spread_by_heads(self.look_back(self.into(0, x)), layout, 3, self.heads)
        heads = attend_by_heads(*parts, padding)  # (B·S, D)
        heads = layout.gather(heads.unflatten(0, layout.shape))  # (N, D)
        return self.feed_forward(1, self.out_of(0, self.look_back_out.plus(heads, x)))

    def decode(
        self,
        x: Tensor,
        slots: Tensor,
        past: Tensor,
        hidden: Tensor | None,
        source: Tensor,
        padding: Tensor | None,
    ) -> Tensor:
        """A decoder layer for k new tokens of each sentence: x (B·k, D) to (B·k, D).

        Their keys and values go into `slots` (2, B, H, k, d_k), a part of `past` (2, B, H, L, d_k), of
        which `hidden` hides what isn't theirs; `source` (2, B, H, S, d_k) is hidden by `padding`.
        """
        B = source.size(1)
        parts = self.look_back(self.into(0, x)).unflatten(0, (B, -1))  # (B, k, 3·D)
        parts = self.queries_keys_values(parts)  # (3, B, H, k, d_k)
        slots.copy_(parts[1:])
        heads = attend_by_heads(parts[0], *past, hidden)  # (B·k, D)
        x = self.out_of(0, self.look_back_out.plus(heads, x))
        q = self.look_across(self.into(1, x)).unflatten(0, (B, -1))  # (B, k, D)
        heads = attend_by_heads(split_heads(q, self.heads), *source, padding)
        return self.feed_forward(2, self.out_of(1, self.look_across_out.plus(heads, x)))

    def feed_forward(self, sublayer: int, x: Tensor) -> Tensor:
        """The last sublayer: x (N, D) to (N, D)."""
        widened = self.expand.relu(self.into(sublayer, x))  # (N, d_ff)
        return self.out_of(sublayer, self.contract.plus(widened, x))


# %% [markdown]
# And the whole model. `read` runs the encoder and leaves what the decoder will ask for: keys and values of the source for each of its layers, from one product.


# %%
class PreparedModel(nn.Module):
    """A model made ready for searching: the same weights, laid out once. Later changes don't reach it.

    It has the model's own `encode`, `decode` and `generator` as well, for who goes by the formula.
    """

    def __init__(self, model: EncoderDecoder):
        super().__init__()
        self.model, self.generator = model, model.generator
        self.encode, self.decode = model.encode, model.decode
        self.readers = [PreparedLayer(layer) for layer in model.encoder.layers]
        self.writers = [PreparedLayer(layer) for layer in model.decoder.layers]
        attentions = [layer.src_attn for layer in model.decoder.layers]
        self.source_map = Packed(*(m for a in attentions for m in (a.project_key, a.project_value)))
        self.vocabulary = Packed(model.generator.proj)

    @functools.cached_property
    def screen(self) -> "Screen | None":
        """What finds the likeliest token quickly (see below), where the table is large and products are exact."""
        V = len(self.generator.proj.weight)
        suits = V >= 4096 and V % BLOCK == 0 and self.vocabulary.onednn and exact_in_8_bits()
        return Screen(self.generator.proj) if suits else None

    def read(self, src: Tensor, real: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys and values of src (B, S) for all layers, (layers, 2, B, H, S, d_k); the bias that hides padding."""
        layout = Layout(real, switches_for(src.device).packed)
        x = embed(self.model.src_embed, src, layout, FAST)  # (N, D)
        padding = layout.bias(x.dtype)  # (B, 1, 1, S), or None
        for layer in self.readers:
            x = layer.encode(x, layout, padding)
        memory = normed(self.model.encoder.norm, x, FAST)
        L, H = len(self.writers), self.writers[0].heads
        parts = spread_by_heads(self.source_map(memory), layout, 2 * L, H)
        return parts.unflatten(0, (L, 2)), padding

    def logits(self, x: Tensor) -> Tensor:
        """The decoder's last rows (N, D) to logits (N, V)."""
        return self.vocabulary(self.generator.narrow(x))


# %% [markdown]
# Last, a beam's difficulty. After each step the survivors are rearranged: the second prefix may now continue what was the first. The usual remedy copies the whole cache into the new order, every step. But nothing in the cache is wrong; only *whose* it is has changed. So we leave it where it is and note the family tree instead: `ancestors` (B, k, L) says which of a sentence's L cached tokens are in the past of which prefix, and self-attention is masked by it. All k prefixes of a sentence then look at one common memory, which makes one larger product out of k small ones.


# %%
class CachedDecoding:
    """A decoding in progress that computes each token once: the same methods as `PrefixDecoding`."""

    def __init__(self, model: EncoderDecoder | PreparedModel, src: Tensor, src_mask: Tensor | None):
        self.model = model if isinstance(model, PreparedModel) else PreparedModel(model)
        real = torch.ones_like(src, dtype=torch.bool) if src_mask is None else src_mask.squeeze(1)
        lacking = max(0, WIDE - src.size(1))
        src, real = F.pad(src, (0, lacking), value=PAD), F.pad(real, (0, lacking))
        self.source, self.padding = self.model.read(src, real)  # (layers, 2, B, H, S, d_k)
        layers, _, B, H, _, d_k = self.source.shape
        self.past = self.source.new_zeros(layers, 2, B, H, 0, d_k)  # with room to grow
        self.ancestors = real.new_empty(B, 1, 0)  # (B, k, L)
        self.length = 0  # steps so far

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each prefix by one of tokens (B, k): the decoder's last positions (B·k, D)."""
        embedding, position = self.model.model.tgt_embed
        check_length(self.length + 1, position.pe.size(0))
        x = embedding(tokens).flatten(0, 1) + position.pe[self.length]  # (B·k, D)
        k, used = tokens.size(1), self.ancestors.size(-1) + tokens.size(1)
        hidden = self.family(k)
        self.make_room(used, k)
        slots = self.past[..., used - k : used, :]  # (layers, 2, B, H, k, d_k)
        past = self.past[..., : max(WIDE, used), :]
        for layer, *own in zip(self.model.writers, slots, past, self.source, strict=True):
            x = layer.decode(x, *own[:2], hidden, own[2], self.padding)
        self.length += 1
        return normed(self.model.model.decoder.norm, x, FAST)

    def logits(self, x: Tensor) -> Tensor:
        """Last positions x (N, D) to what may come next, (N, V)."""
        return self.model.logits(x)

    def family(self, k: int) -> Tensor | None:
        """Enter k new tokens a sentence into the tree; the bias (B, 1, k, L) that hides all but ancestors."""
        B, used = len(self.ancestors), self.ancestors.size(-1) + k
        itself = torch.eye(k, dtype=torch.bool, device=self.ancestors.device)
        self.ancestors = torch.cat((self.ancestors, itself.expand(B, k, k)), dim=-1)  # (B, k, L)
        if k == 1 and used >= WIDE:  # an only child descends from all
            return None
        # Columns without a token are nobody's.
        related = F.pad(self.ancestors, (0, max(0, WIDE - used)))
        hidden = self.source.new_zeros(related.shape).masked_fill_(~related, -math.inf)
        return hidden.unsqueeze(1)

    def make_room(self, used: int, k: int) -> None:
        """Room for as many steps of k tokens as the source has; after that it doubles."""
        room = self.past.size(-2)
        if used > room:
            size = max(WIDE, used, 2 * room or k * (self.source.size(-2) + 4))
            more = self.past.new_zeros(*self.past.shape[:-2], size, self.past.size(-1))
            more[..., :room, :] = self.past
            self.past = more

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, k), of each source's own."""
        where = origin.unsqueeze(-1).expand(-1, -1, self.ancestors.size(-1))
        self.ancestors = self.ancestors.gather(1, where)

    def keep(self, rows: Tensor) -> None:
        """Go on with the sources numbered rows (N,) alone. Only those that change their place are copied."""
        N = len(rows)
        places = (rows != torch.arange(N, device=rows.device)).nonzero().squeeze(1)
        for x in (self.source, self.past[..., : self.ancestors.size(-1), :]):
            x.index_copy_(2, places, x.index_select(2, rows[places]))
        self.source, self.past = self.source[:, :, :N], self.past[:, :, :N]
        self.ancestors = self.ancestors[rows]
        if self.padding is not None:
            self.padding = self.padding[rows]


# %%
def decoding_of(
    model: nn.Module, src: Tensor, src_mask: Tensor | None
) -> PrefixDecoding | CachedDecoding:
    """A decoding of src (B, S): with a cache where the model is a Transformer, else by the formula."""
    ours = isinstance(model, EncoderDecoder | PreparedModel)
    kind = CachedDecoding if ours else PrefixDecoding
    return kind(model, src, src_mask)


# %% [markdown]
# Check: both ways, through the same random history of steps, rearrangements and dropped sentences. The logits must agree at each step, on a pre-norm and a post-norm model. And the control: a cache that forgets to `follow` gives other numbers.


# %%
@torch.no_grad()
def history_gap(model: EncoderDecoder, forgetful: bool = False, steps: int = 6) -> float:
    """The largest difference of log-probabilities, with and without a cache, along a random history."""
    src = pad_rows([[4, 5, 4, EOS], [5, EOS], [4, 4, 5, EOS]])  # (3, 4)
    ways = [way(model, src, padding_mask(src)) for way in (CachedDecoding, PrefixDecoding)]
    tokens, gap = torch.full((3, 1), BOS), 0.0
    for step in range(steps):
        mine, theirs = (way.logits(way.step(tokens)).log_softmax(dim=-1) for way in ways)
        gap = max(gap, (mine - theirs).abs().max().item())
        origin = torch.randint(tokens.size(1), (len(tokens), 3))  # (B, 3)
        ways[1].follow(origin)
        ways[0].follow(torch.arange(3).expand_as(origin) if forgetful and step else origin)
        if step == 2:
            for way in ways:
                way.keep(torch.tensor([2, 0]))
        tokens = torch.randint(4, 6, (2 if step >= 2 else 3, 3))
    return gap


# %%
torch.manual_seed(0)
for norm_first in (True, False):
    small = make_model(6, 6, N=2, d_model=16, d_ff=32, h=2, dropout=0.0, norm_first=norm_first)
    small = small.double().eval()
    scramble(small)  # so that no bias is 0, where a forgotten one would not show
    assert history_gap(small) < 1e-12
    assert history_gap(small, forgetful=True) > 1e-3
    assert history_gap(small.float()) < 1e-4  # by oneDNN

# %% [markdown]
# ### The largest of many logits
#
# At every step a search asks for the largest of V = 8,192 logits, or for the few largest. `argmax` and `topk` walk through a row number by number; the maximum of a block is a vector instruction. So take the maximum of each block of 64 first: the k largest logits lie in the k blocks with the largest maxima. Only those are sorted.
#
# And the logits themselves: 512 prefixes have 16 MB of them, more than a core's share of the cache. Each pass over them would go to memory. So they are computed for 128 prefixes at a time, and used while they are near. A beam needs their log-sum-exp as well, since log-probabilities of different prefixes are compared. PyTorch's `exp2` is quicker than its `exp` (try it with chapter 8's `best_seconds`), so we sum powers of two:
#
# $$\log\sum_v e^{z_v} = z^* + \log\sum_v 2^{(z_v - z^*)\,\log_2 e},\qquad z^* = \max_v z_v$$


# %%
BLOCK = 64  # neighbouring logits of which the largest is found first


def best_logits(logits: Tensor, k: int, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """The k largest of each row of logits (N, V) and where they stand, (N, k) each, as `topk` gives.

    The k largest lie in the k blocks with the largest maxima; only those are sorted.
    """
    N, V = logits.shape
    if V % block or k * block > V:
        return logits.topk(min(k, V), dim=-1)
    blocks = logits.view(N, V // block, block)
    chosen = blocks.amax(dim=-1).topk(k, dim=-1).indices  # (N, k)
    near = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, block))  # (N, k, block)
    top, place = near.flatten(1).topk(k, dim=-1)  # (N, k) each
    return top, chosen.gather(1, place // block) * block + place % block


def log_sum_exp(logits: Tensor, largest: Tensor) -> Tensor:
    """log Σ exp of each row of logits (N, V), whose largest (N, 1) is known: (N, 1)."""
    powers = (logits - largest).mul_(math.log2(math.e)).exp2_()  # (N, V)
    return largest + powers.sum(dim=-1, keepdim=True).log_()


ROWS_NEAR = 128  # prefixes whose logits are computed and used together


def best_next(
    decoding: PrefixDecoding | CachedDecoding, x: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens after last positions x (N, D): their log-probabilities and ids, (N, k) each."""
    found = []
    for rows in x.split(ROWS_NEAR):
        logits = decoding.logits(rows)  # (n, V)
        top, ids = best_logits(logits, k)
        found.append((top - log_sum_exp(logits, top[:, :1]), ids))
    tops, ids = zip(*found, strict=True)
    return torch.cat(tops), torch.cat(ids)


# %%
logits = torch.randn(50, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
for k in (1, 2, 8, 16):
    for mine, theirs in zip(best_logits(logits, k), logits.topk(k, dim=-1), strict=True):
        assert torch.equal(mine, theirs)
largest = logits.amax(dim=-1, keepdim=True)
torch.testing.assert_close(log_sum_exp(logits, largest), logits.logsumexp(-1, keepdim=True))

# %% [markdown]
# ### The largest, without computing them all
#
# > **In short.** Greedy decoding needs one token out of 8,192, and no probability. Let a coarse, cheap product propose a few; compute those exactly; and prove that no other can be larger.
#
# That last product is the largest of a step. Rounded to 8 bits, its table $W$ takes a quarter of the memory, and a processor multiplies four such numbers in the room of one. Rounding makes mistakes, and how large they can be follows from Cauchy and Schwarz. With $\hat x$ and $\hat w$ for the rounded row and column,
#
# $$ |x\cdot w - \hat x\cdot\hat w| \;\le\; \lVert x\rVert\,\lVert w-\hat w\rVert + \lVert x-\hat x\rVert\,\lVert\hat w\rVert $$
#
# So a token whose coarse value lies more than two such bounds below the best coarse value can't be the largest: even if it were as much too small as possible, and the best as much too large. All others are computed in full precision, and the largest of them is the answer, always that of the full product. They are few, as the check below counts. (Where they are very many, all are computed. What it costs stands in the account of our time, further down.)
#
# The proof needs 8-bit products that are exact, and not every processor adds them without overflow. So that is tried first.


# %%
@functools.cache
def exact_in_8_bits() -> bool:
    """Whether this machine's products of 8-bit integers are there and exact, in the worst case too."""
    ones = torch.ones(64, 64, dtype=torch.int8)
    try:
        sums = [torch._int_mm(a * ones, b * ones) for a in (127, -127) for b in (127, -127)]
    except (AttributeError, RuntimeError):
        return False
    return all((x.abs() == 127 * 127 * 64).all() for x in sums)


class Screen:
    """Finds the largest of a linear map's outputs: 8 bits propose, a bound decides."""

    def __init__(self, linear: nn.Linear):
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()  # (V, D), (V,)
        self.unit = self.weight.abs().max().item() / 127
        whole = (self.weight / self.unit).round()  # from −127 to 127
        self.table = whole.to(torch.int8).T  # (D, V)
        self.lost = (self.weight - self.unit * whole).norm(dim=1).max().item()  # ‖w − ŵ‖ at most
        self.size = (self.unit * whole).norm(dim=1).max().item()  # ‖ŵ‖ at most

    def roughly(self, x: Tensor) -> tuple[Tensor, float, Tensor]:
        """x (N, D) to coarse outputs: integers (N, V), their unit, and by how much they may be wrong (N,)."""
        grid = x.abs().max().item() / 127 or 1.0
        whole = (x / grid).round_()
        rest = torch.sub(x, whole, alpha=grid)  # x − x̂
        error = torch.linalg.vector_norm(x, dim=1) * self.lost
        error += torch.linalg.vector_norm(rest, dim=1) * self.size
        unit = grid * self.unit
        rough = torch._int_mm(whole.to(torch.int8), self.table)  # (N, V)
        rough += (self.bias / unit).round_().to(torch.int32)  # wrong by half a unit
        return rough, unit, 1.001 * error + unit  # a little more, for what float32 itself rounds

    def candidates(self, rough: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """What may be the largest of coarse outputs (N, V) that are wrong by up to error (N,): rows, places (P,)."""
        blocks = rough.unflatten(1, (-1, BLOCK))  # (N, V / 64, 64)
        peaks = blocks.amax(dim=-1)  # (N, V / 64)
        least = peaks.amax(dim=-1) - (2 * error).ceil().to(rough.dtype)  # (N,)
        rows, block = (peaks >= least.unsqueeze(1)).nonzero(as_tuple=True)
        near = blocks[rows, block] >= least[rows].unsqueeze(1)  # (number of blocks, 64)
        which, column = near.nonzero(as_tuple=True)
        return rows[which], block[which] * BLOCK + column

    def largest(self, x: Tensor, outputs: Callable[[Tensor], Tensor]) -> Tensor:
        """Where the largest output of each row of x (N, D) stands, (N,); `outputs` computes all of them."""
        rough, unit, error = self.roughly(x)
        rows, places = self.candidates(rough, error / unit)  # (P,) each
        if len(rows) > BLOCK * len(x):  # hardly anything is excluded
            return best_logits(outputs(x), 1)[1].squeeze(1)
        exact = torch.linalg.vecdot(F.embedding(places, self.weight), x[rows]) + self.bias[places]
        best = exact.new_full((len(x),), -math.inf).scatter_reduce_(0, rows, exact, "amax")
        wins = exact == best[rows]
        return places.new_zeros(len(x)).index_copy_(0, rows[wins], places[wins])


# %% [markdown]
# Check: the same place as the full product's, on a table with an outlier, which makes the rounding coarse; and the bound holds for every single entry. Without the bound, the best-looking token would often be the wrong one.


# %%
if exact_in_8_bits():
    torch.manual_seed(0)
    table, x = nn.Linear(48, 4096, dtype=torch.float32), torch.randn(64, 48, dtype=torch.float32)
    with torch.no_grad():
        table.weight.mul_(2)
        table.weight[5, 3] = 2.0  # sets the unit for all
        screen, full = Screen(table), table(x)
        rough, unit, error = screen.roughly(x)
        wrong = (rough * unit - full).abs() / error.unsqueeze(1)  # as a share of the bound
        assert 0.05 < wrong.max() <= 1
        assert torch.equal(screen.largest(x, table), full.argmax(dim=1))
        assert not torch.equal(rough.argmax(dim=1), full.argmax(dim=1))  # believed: wrong somewhere
        left, _ = screen.candidates(rough, error / unit)
        assert len(x) < len(left) < 40 * len(x)  # of 4,096 each, even with the outlier

# %% [markdown]
# ### Greedy, and any other choice of one
#
# With one prefix a sentence, greedy decoding and sampling differ in one function: `choose`. A finished sentence leaves the batch, and the last one of the batch takes its place, so that nobody else has to move. We wait until a tenth is done: a few rows too many cost less than packing at every step.


# %%
ALMOST = 0.9  # a batch is packed anew when no more than this share of it is unfinished


def close_gaps(going: Tensor) -> Tensor:
    """Which of a batch's rows go on, where going (B,) says so: the last ones take the places of the ended."""
    left = int(going.sum())
    rows = torch.arange(left, device=going.device)
    rows[~going[:left]] = left + going[left:].nonzero().squeeze(1)
    return rows


def write_one_by_one(
    decoding: PrefixDecoding | CachedDecoding,
    src: Tensor,
    max_len: int,
    choose: Callable[[Any, Tensor], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor]:
    """One text for each source: ids (B, ≤ max_len), padded after eos, and their log-probabilities (B,).

    `choose` takes the decoding and its last positions x (N, D); it gives tokens (N,), and their
    log-probabilities where it knows them.
    """
    ids = src.new_full((len(src), max_len), PAD)  # (B, max_len)
    total = torch.zeros(len(src), dtype=torch.float64, device=src.device)  # (B,)
    live = torch.arange(len(src), device=src.device)  # which sources are in the batch
    going = torch.ones_like(live, dtype=torch.bool)  # which of those haven't ended
    tokens = src.new_full((len(src), 1), BOS)
    for t in range(max_len):
        chosen, log_probs = choose(decoding, decoding.step(tokens))
        ids[live, t] = chosen.masked_fill(~going, PAD)
        if log_probs is not None:
            total[live] += log_probs.masked_fill(~going, 0.0).to(total.dtype)
        going &= chosen != EOS
        left = int(going.sum())
        if left == 0:
            break
        if left <= ALMOST * len(live):
            rows = close_gaps(going)
            decoding.keep(rows)
            live, chosen, going = live[rows], chosen[rows], going[rows]
        tokens = chosen.unsqueeze(1)
    return ids[:, : t + 1], total


# %%
def likeliest(decoding: PrefixDecoding | CachedDecoding, x: Tensor) -> tuple[Tensor, None]:
    """The choice of greedy decoding: last positions x (N, D) to tokens (N,)."""
    if isinstance(decoding, CachedDecoding) and decoding.model.screen is not None:
        model = decoding.model
        return model.screen.largest(model.generator.narrow(x), model.vocabulary), None
    return best_logits(decoding.logits(x), 1)[1].squeeze(1), None


def cached_greedy(
    model: EncoderDecoder, src: Tensor, src_mask: Tensor | None, max_len: int
) -> Tensor:
    """What `greedy_decode` gives, computing each token once: src (B, S) to ids (B, ≤ max_len)."""
    with dropout_off(model), torch.inference_mode():
        ids, _ = write_one_by_one(decoding_of(model, src, src_mask), src, max_len, likeliest)
    return ids.clone()  # an ordinary tensor again


# %%
assert torch.equal(cached_greedy(book, sixteen, None, 30), greedy_decode(book, sixteen, None, 30))
assert torch.equal(
    cached_greedy(tiny, src, padding_mask(src), 8), greedy_decode(tiny, src, padding_mask(src), 8)
)

# %% [markdown]
# ### A beam in tensors, with a cache
#
# The search is that of chapter 9. Three things are new, and none changes what is found:
#
# - **The first step has one prefix.** All K beams would hold the same `<s>`. So we compute it once, and let the first `follow` make K of one.
# - **Fewer candidates.** Of each prefix only the 2K likeliest continuations can be among the sentence's 2K best. `best_logits` finds those; K · 2K candidates are left of K · V.
# - **Finished sentences leave** the batch, as above.


# %% [markdown]
# ### When may a beam stop?
#
# > **In short.** The usual rule stops after K endings. It is fast, and it can miss a better text that was still being written. A bound on what the unfinished ones can still reach makes the stop safe.
#
# An unfinished prefix has log-probability $s \le 0$. Whatever follows can only lower the sum, and the divisor $T^\alpha$ is largest at the length limit. So no text that begins with it can score above $s / T_{\max}^{\alpha}$. If the K-th best finished score is at least that for the best prefix in the beam, nothing in the beam can enter the list any more: that is `exact=True`. (With α > 0 the bound is generous and costs some steps more. With α = 0 it is simply $s$.)


# %%
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


# %%
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
    """What chapter 9's `beam_search` gives, computing each token once: the same arguments and results.

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


# %% [markdown]
# ## Sampling
#
# > **In short.** Don't search: throw a die that is loaded as the model says. You get variety instead of the one safest sentence.
#
# A *temperature* τ sharpens or flattens the die:
#
# $$q(w) \propto p(w)^{1/\tau}$$
#
# τ < 1 favours the likely words (τ → 0 is greedy decoding), τ > 1 the unlikely ones. Two more settings take the unlikely sides off. With *top-k*, only the k likeliest words may be drawn. The *nucleus* (top-p, Holtzman et al. 2020) keeps the fewest words whose probabilities sum to at least p: one where the model is sure, hundreds where it isn't.


# %%
def keep_top(log_probs: Tensor, k: int) -> Tensor:
    """(B, V) with all but each row's k largest entries at −∞."""
    if k < 1:
        raise ValueError(f"top_k must be at least 1, not {k}")
    top = log_probs.topk(min(k, log_probs.size(-1)), dim=-1)  # (B, k)
    return torch.full_like(log_probs, -torch.inf).scatter(-1, top.indices, top.values)


# %%
def keep_nucleus(log_probs: Tensor, p: float) -> Tensor:
    """(B, V) with all but the fewest likeliest entries that sum to at least p at −∞ (Holtzman et al. 2020)."""
    if not 0 < p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {p}")
    ordered, place = log_probs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()  # what the likelier ones sum to
    return ordered.masked_fill(before >= p, -torch.inf).gather(-1, place.argsort(dim=-1))


# %%
def sharpened(
    log_probs: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Log-probabilities (B, V) to the probabilities (B, V) that are drawn from.

    `temperature` divides the log-probabilities; then `top_k` keeps the k likeliest tokens, and
    `top_p` the fewest that sum to that much. Raises ValueError for a temperature that is not
    positive, a `top_k` below 1, or a `top_p` outside of (0, 1].
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    log_probs = log_probs.double()  # so that the smallest temperatures neither overflow nor vanish
    best = log_probs.max(dim=-1, keepdim=True).values  # (B, 1)
    log_probs = ((log_probs - best) / temperature).log_softmax(dim=-1)
    if top_k is not None:
        log_probs = keep_top(log_probs, top_k).log_softmax(dim=-1)
    if top_p is not None:
        log_probs = keep_nucleus(log_probs, top_p)
    return log_probs.softmax(dim=-1)


# %%
def sample_decode(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens drawn from the model's distribution: src (B, S) to ids (B, ≤ max_len), as `greedy_decode`.

    With them comes each text's log-probability (B,) under the model as it is, whatever sharpened the
    draw. `temperature`, `top_k` and `top_p` are those of `sharpened`. Dropout is off while it runs.
    """

    def draw(decoding: PrefixDecoding | CachedDecoding, x: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = decoding.logits(x).log_softmax(dim=-1)  # (N, V)
        p = sharpened(log_probs, temperature, top_k, top_p)  # (N, V)
        tokens = torch.multinomial(p, 1, generator=generator)  # (N, 1)
        return tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)

    with dropout_off(model), torch.inference_mode():
        ids, log_probs = write_one_by_one(decoding_of(model, src, src_mask), src, max_len, draw)
    return ids.clone(), log_probs.clone()


# %%
first_word = book.log_table[BOS].unsqueeze(0)  # (1, V)
by_temperature = {t: sharpened(first_word, t)[0] for t in (0.25, 0.5, 1.0, 2.0)}

# 0.45² : 0.40² : 0.15², brought to a sum of 1
by_hand = torch.tensor([0.45, 0.40, 0.15], dtype=torch.float64) ** 2
torch.testing.assert_close(by_temperature[0.5][4:7], by_hand / by_hand.sum())
assert torch.equal(
    sharpened(first_word, 1.0, top_k=2)[0] > 0, keep_top(first_word, 2)[0].isfinite()
)
for p, kept in ((0.4, 1), (0.44, 1), (0.46, 2), (0.84, 2), (0.86, 3), (1.0, 3)):  # 0.45, 0.40, 0.15
    assert int((sharpened(first_word, 1.0, top_p=p)[0] > 0).sum()) == kept


# %%
temperature_chart(by_temperature, book.words)

# %% [markdown]
# Check: draw the first word 20,000 times. The shares must follow the sharpened probabilities. The second line is a control: the same check fails against the probabilities of τ = 1, which is what you get if the temperature is forgotten.

# %%
many = torch.full((20_000, 1), EOS)
draws = sample_decode(
    book, many, None, max_len=1, temperature=0.5, generator=torch.Generator().manual_seed(0)
)[0]
shares = torch.bincount(draws[:, 0], minlength=len(book.words)).double() / len(many)  # (V,)
torch.testing.assert_close(shares, by_temperature[0.5], atol=0.015, rtol=0)
assert (shares - by_temperature[1.0]).abs().max() > 0.05

cold, _ = sample_decode(tiny, src, padding_mask(src), 8, temperature=1e-6)
assert torch.equal(cold, greedy_decode(tiny, src, padding_mask(src), 8))

# %% [markdown]
# Sampling serves where many answers are good: stories, dialogue, training data. For translation, where one faithful sentence is wanted, a search is the better choice.
#
# ## From ids to text: detokenisation
#
# > **In short.** The model writes pieces of words. Readers, and BLEU, want the plain text back, every space and full stop in its place.
#
# Word-level tokenisers lose the spaces: does "dog ." mean "dog." or "dog ."? A detokeniser has to guess. SentencePiece keeps each space as a visible mark `▁` inside its pieces, so undoing it is exact: join, then turn the marks into spaces.
#
# From here on we use the small model that ships with the series. [Chapter 9](ch09_training_run.ipynb) trained it on the generated corpus of [Chapter 7](ch07_multi30k.ipynb).

# %%
trained = load_model(ROOT / "models" / "sample-de-en")
corpus = load_corpus("sample")
test_pairs = corpus["test"][:40]

# %%
english = test_pairs[0][1]
pieces = trained.tokenizer.pieces(english)
print(" ".join(pieces))
print(trained.tokenizer.decode(trained.tokenizer.encode(english)))
assert "".join(pieces).replace("▁", " ").strip() == english

texts = [text for pair in corpus["test"] for text in pair]
assert all(trained.tokenizer.decode(trained.tokenizer.encode(text)) == text for text in texts)

# %% [markdown]
# ## Translating
#
# Now the parts come together. `search_rows` sorts the sentences by length, so that a batch holds little padding, and puts the answers back into the order of the questions. The output may be at most twice as long as the source plus 10 tokens: a model that has lost its way stops there.


# %%
MAX_BEAM = 100  # wider costs memory and, as this chapter shows, buys nothing


@dataclass
class DecodeOptions:
    """How to search for a translation; each field is an option of the command line.

    Raises ValueError for a setting that makes no sense.
    """

    beam: int = 4
    """Hypotheses kept at each step; 1 is greedy decoding."""
    alpha: float = 0.6
    """Length penalty: a score is divided by length^alpha."""
    sample: bool = False
    """Draw each token instead of searching for the best text."""
    temperature: float = 1.0
    """With --sample: below 1 likely tokens gain, above 1 unlikely ones."""
    top_k: int | None = None
    """With --sample: draw from the k likeliest tokens only."""
    top_p: float | None = None
    """With --sample: draw from the fewest tokens that sum to this much probability."""
    exact: bool = False
    """Stop a beam only when nothing in it can overtake what has ended."""
    seed: int = 0
    """With --sample: decides the draws."""

    def __post_init__(self):
        if not 1 <= self.beam <= MAX_BEAM:
            raise ValueError(f"beam must be from 1 to {MAX_BEAM}, not {self.beam}")
        if not 0 <= self.alpha <= 10:
            raise ValueError(f"alpha must be from 0 to 10, not {self.alpha}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")
        if not self.sample and (self.temperature, self.top_k, self.top_p) != (1, None, None):
            raise ValueError("temperature, top_k and top_p are for sampling: add --sample")

    def sampler(self, device: torch.device) -> Callable[..., list[list[Hypothesis]]]:
        """The draw that these options describe: one hypothesis for each source of a batch."""
        how = (self.temperature, self.top_k, self.top_p)
        generator = torch.Generator(device).manual_seed(self.seed)

        def draw(model, src, src_mask, max_len):
            ids, log_probs = sample_decode(model, src, src_mask, max_len, *how, generator)
            rows = zip(map(until_end, ids.tolist()), log_probs.tolist(), strict=True)
            return [[hypothesis(text, log_prob)] for text, log_prob in rows]

        return draw

    def search(self, device: torch.device) -> Callable[..., list[list[Hypothesis]]]:
        """The search that these options describe: hypotheses, best first, for each source of a batch."""
        if self.sample:
            return self.sampler(device)
        how = {"beam": self.beam, "alpha": self.alpha, "exact": self.exact}
        return partial(cached_beam_search, **how)

    def in_words(self) -> str:
        """The search in words, for a line of output."""
        if self.sample:
            top = f", top {self.top_k}" if self.top_k else ""
            top += f", nucleus {self.top_p:g}" if self.top_p else ""
            return f"sampled at temperature {self.temperature:g}{top}, seed {self.seed}"
        return "greedy" if self.beam == 1 else f"beam {self.beam}, alpha {self.alpha:g}"


def until_end(ids: Sequence[int]) -> list[int]:
    """The ids of a padded row up to its first eos, which is kept."""
    return list(ids[: ids.index(EOS) + 1]) if EOS in ids else list(ids)


# %% [markdown]
# A corpus is cut into batches of similar length, as in training. On a CPU the batches are dealt out to as many threads as PyTorch may use, and each thread computes alone. That beats all threads working on one product at a time: nobody waits for anybody between two products, and the small operations between them run side by side as well.


# %%
CELLS_READ = 2**13  # source positions of a batch, padding included: enough to keep a core busy
PREFIXES = 1024  # that are continued together
CELLS_SEEN = 2**15  # prefixes times source positions: what attention's memory grows with
STEP_COST = (
    16  # what a step costs besides its prefixes, in prefixes: weights are read, kernels called
)


def cut_by_cost(lengths: Sequence[int], width: int, most: float) -> list[int]:
    """Where to cut `lengths`, longest first, for as few batches as cost at most `most` and fit in memory.

    Gives each batch's end. A batch of n sources up to L tokens long, `width` prefixes each, costs
    its tokens times `width`, and `STEP_COST` for each of about L steps.
    """
    ends, start, tokens = [], 0, 0
    for i, length in enumerate(lengths):
        longest, count = lengths[start], i + 1 - start
        cells, prefixes = count * longest, count * width
        fits = cells <= CELLS_READ and prefixes <= PREFIXES and cells * width <= CELLS_SEEN
        cheap = (tokens + length) * width + STEP_COST * longest <= most
        if i > start and not (fits and cheap):
            ends.append(i)
            start, tokens = i, 0
        tokens += length
    return [*ends, len(lengths)]


def length_batches(rows: Sequence[Sequence[int]], width: int, cores: int = 1) -> list[list[int]]:
    """Indices of `rows` in batches of similar length, the longest first; `width` prefixes for each row.

    There are as few batches as memory's bounds allow, but as many for each core, and the dearest is
    as cheap as it can be: found by bisection. So the cores finish together.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    lengths = [len(rows[i]) for i in order]
    batches = cores * math.ceil(len(cut_by_cost(lengths, width, math.inf)) / cores)
    low, high = 0, sum(lengths) * width + STEP_COST * max(lengths, default=0)
    while high - low > 1:
        middle = (low + high) // 2
        enough = len(cut_by_cost(lengths, width, middle)) <= batches
        low, high = (low, middle) if enough else (middle, high)
    ends = cut_by_cost(lengths, width, high)
    return [order[a:b] for a, b in itertools.pairwise([0, *ends]) if a < b]


# %%
def on_threads(work: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
    """`work(job)` of each job, in order: each on one thread, and as many at once as PyTorch may use."""
    threads = torch.get_num_threads()
    if threads == 1 or len(jobs) == 1:
        return [work(job) for job in jobs]
    alone = partial(torch.set_num_threads, 1)
    try:
        with ThreadPoolExecutor(min(threads, len(jobs)), initializer=alone) as pool:
            return list(pool.map(work, jobs))
    finally:
        torch.set_num_threads(threads)


# %%
def search_rows(
    model: EncoderDecoder,
    rows: Sequence[Sequence[int]],
    search: Callable[[EncoderDecoder, Tensor, Tensor, int], Sequence[Any]],
    width: int = 1,
) -> list[Any]:
    """What `search` finds for each encoded source, in their order; None for one without any token.

    `search` takes (model, src (B, S), src_mask (B, 1, S), max_len) and gives a result for each source,
    of which it continues `width` prefixes at once. An output is at most twice its source plus 10 tokens.
    """
    device = next(model.parameters()).device
    some = [i for i, row in enumerate(rows) if len(row) > 1]
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    batches = length_batches([rows[i] for i in some], width, cores)
    ready = PreparedModel(model) if isinstance(model, EncoderDecoder) else model

    def find(batch: list[int]) -> Sequence[Any]:
        src = pad_rows([rows[some[i]] for i in batch]).to(device)  # (B, S)
        return search(ready, src, padding_mask(src), min(MAX_LEN, 2 * src.size(1) + 10))

    found: list[Any] = [None] * len(rows)
    with dropout_off(model):  # once for all threads: none may switch it back on for the others
        answers = on_threads(find, batches) if device.type == "cpu" else map(find, batches)
    for batch, results in zip(batches, answers, strict=True):
        for i, result in zip(batch, results, strict=True):
            found[some[i]] = result
    return found


# %%
def decode_hypotheses(
    trained: Trained, rows: Sequence[Sequence[int]], options: DecodeOptions, nbest: int = 1
) -> list[list[Hypothesis]]:
    """Up to `nbest` hypotheses for each encoded source, best first; none for one without any token."""
    width = 1 if options.sample else options.beam
    found = search_rows(trained.model, rows, options.search(trained.device), width)
    return [(hypotheses or [])[:nbest] for hypotheses in found]


# %%
def decode_texts(
    trained: Trained, rows: Sequence[Sequence[int]], options: DecodeOptions
) -> list[str]:
    """The best text for each encoded source, in their order; what has no token becomes the empty text."""
    if options.beam > 1 or options.sample:
        found = decode_hypotheses(trained, rows, options)
        return [trained.tokenizer.decode(best[0].ids) if best else "" for best in found]
    ids = search_rows(trained.model, rows, cached_greedy)  # nobody asks for its probabilities
    return ["" if row is None else trained.tokenizer.decode(row.tolist()) for row in ids]


# %%
def translate(
    trained: Trained, sentences: Sequence[str], options: DecodeOptions | None = None
) -> list[str]:
    """Translations of `sentences`, in their order; a text without any token stays empty.

    Raises ValueError for a text of more than `MAX_LEN` tokens, eos included: the model has no
    positions for it.
    """
    rows = [[*trained.tokenizer.encode(sentence), EOS] for sentence in sentences]
    for number, row in enumerate(rows, start=1):
        if len(row) > MAX_LEN:
            raise ValueError(
                f"sentence {number} has {len(row)} tokens, and the model takes {MAX_LEN}: split it"
            )
    return decode_texts(trained, rows, options or DecodeOptions())


# %%
def beam_translate(
    trained: Trained, sentences: Sequence[str], beam: int = 4, alpha: float = 0.6
) -> list[str]:
    """`translate` by beam search: a short name for what is asked most."""
    return translate(trained, sentences, DecodeOptions(beam=beam, alpha=alpha))


# %%
def default_model() -> Path:
    """The folder of the best model that ships: Multi30k's if it is there, else the sample corpus's."""
    best, small = (ROOT / "models" / f"{corpus}-de-en" for corpus in ("multi30k", "sample"))
    return best if (best / "model.safetensors").is_file() else small


# %%
questions = ["Ein Hund schläft im Garten.", "", "Der Pirat kauft einen roten Hut."]
for question, answer in zip(questions, translate(trained, questions), strict=True):
    print(f"{question!r} → {answer!r}")
assert translate(trained, questions)[1] == ""

try:
    translate(trained, ["Hund " * 10_000])
except ValueError as error:
    assert "takes 256" in str(error)
else:
    raise AssertionError("10,000 words were taken")

# %% [markdown]
# No pirate occurs in the corpus. His pieces `P`, `ir`, `at` do, in other words, and the model makes the best of them. It never says "I don't know this word".
#
# Here are sentences from the test split, which the model never saw, with their references. Read them before you look at any score.

# %%
sources, references = (list(side) for side in zip(*test_pairs, strict=True))
outputs = translate(trained, sources)
pd.set_option("display.max_colwidth", None)
pd.DataFrame({"source": sources, "reference": references, "output": outputs})[:8]

# %% [markdown]
# **Pitfall.** Dropout belongs to training. A model that nobody switched to `.eval()` drops random parts of its vectors while it translates. Nothing crashes. The sentences just come out different, and worse, each time. Don't rely on the caller's memory: our decoders switch dropout off themselves, and put it back as it was.


# %%
def wrong_translate(trained: Trained, sentences: Sequence[str]) -> list[str]:
    """Greedy decoding that forgets `.eval()`: in train mode dropout strikes at every step."""
    out = []
    with torch.no_grad():
        for sentence in sentences:
            src = torch.tensor([source_ids(sentence, trained.tokenizer)])  # (1, S)
            out.append(trained.tokenizer.decode(wrong_greedy(trained.model, src, 40)[0].tolist()))
    return out


# %% [markdown]
# Our small model was trained without dropout, so we give it some here, as most models have, and leave it in train mode.

# %%
careless = build_model(replace(trained.config, dropout=0.3), len(trained.tokenizer))
careless.load_state_dict(trained.model.state_dict())
careless.train()  # what a model is right after it was built
forgetful = Trained(careless, trained.tokenizer, trained.config)

two = [source for source, _ in test_pairs[:2]]
random_texts, our_texts = set(), set()
for seed in range(2):
    torch.manual_seed(seed)
    random_texts.add(tuple(wrong_translate(forgetful, two)))
    our_texts.add(tuple(translate(forgetful, two, DecodeOptions(beam=1))))

assert len(random_texts) > 1  # the wrong version: another answer each time
assert len(our_texts) == 1  # ours: the same, though nobody called .eval()
assert our_texts == {tuple(translate(trained, two, DecodeOptions(beam=1)))}
assert careless.training  # and the caller's mode is untouched
print("Without .eval(): several different answers. With our decoders: one.")

# %% [markdown]
# ## BLEU, by hand
#
# > **In short.** How many of the output's words, pairs, triples and quadruples of words also stand in a human's translation? And is the output long enough to be allowed to ask?
#
# BLEU (Papineni et al. 2002) compares outputs with references. Its parts, summed over the *whole corpus*:
#
# 1. An **n-gram** is a run of n words. $p_n$ is the share of the output's n-grams that the reference has too. Each counts at most as often as it stands in the reference.
# 2. Short outputs have it easy: a single sure word has precision 100%. The **brevity penalty** makes up for that. With c tokens of output and r tokens of reference, it is $\text{BP} = \min(1, e^{\,1 - r/c})$.
# 3. $\text{BLEU} = 100 \cdot \text{BP} \cdot (p_1\, p_2\, p_3\, p_4)^{1/4}$: a geometric mean, so one zero makes all zero (sacreBLEU smooths that away for short texts, and so do we).


# %%
def tokens_13a(text: str) -> list[str]:
    """The words that sacreBLEU's tokeniser "13a" counts: split at spaces, punctuation split off."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()(text).split()


def ngram_counts(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    """Each run of n tokens, and how often it occurs."""
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


# %%
@dataclass
class BleuParts:
    """What BLEU is made of, summed over a whole corpus; index n − 1 is about n-grams."""

    matches: list[int]  # n-grams of the output that the reference has as well
    totals: list[int]  # n-grams of the output
    output_length: int  # tokens
    reference_length: int  # tokens

    @property
    def precisions(self) -> list[float]:
        """Share of matches, in percent; the k-th order without any counts as 1/2^k of a match."""
        empty, out = 0, []
        for match, total in zip(self.matches, self.totals, strict=True):
            empty += match == 0
            out.append(100 * (match or 0.5**empty) / total if total else 0.0)
        return out

    @property
    def brevity_penalty(self) -> float:
        """1 for an output at least as long as the reference, else exp(1 − r/c)."""
        if self.output_length == 0:
            return 0.0
        return min(1.0, math.exp(1 - self.reference_length / self.output_length))

    @property
    def score(self) -> float:
        """The geometric mean of the precisions times the brevity penalty, from 0 to 100."""
        if not any(self.matches) or not all(self.totals):
            return 0.0
        mean = sum(math.log(p) for p in self.precisions) / len(self.precisions)
        return self.brevity_penalty * math.exp(mean)


# %%
def bleu_parts(
    outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]], order: int = 4
) -> BleuParts:
    """BLEU's parts for tokenised outputs with one reference each (Papineni et al. 2002)."""
    matches, totals = [0] * order, [0] * order
    for output, reference in zip(outputs, references, strict=True):
        for n in range(1, order + 1):
            found, wanted = ngram_counts(output, n), ngram_counts(reference, n)
            matches[n - 1] += (
                found & wanted
            ).total()  # a repeated n-gram counts as often as wanted
            totals[n - 1] += found.total()
    lengths = (sum(map(len, texts)) for texts in (outputs, references))
    return BleuParts(matches, totals, *lengths)


# %%
three_references = [
    "A dog is sleeping in the garden.",
    "Two men are playing guitar on a stage.",
    "A child in a red jacket jumps into the water.",
]
three_outputs = [
    "A dog sleeps in the garden.",
    "Two men are playing guitar on the stage.",
    "A child in a red jacket jumps into the pool.",
]
print(tokens_13a(three_outputs[0]))
print(" · ".join(" ".join(pair) for pair in ngram_counts(tokens_13a(three_outputs[0]), 2)))

# %% [markdown]
# **Predict.** The outputs have 7 + 9 + 11 = 27 tokens. How many of them find their match? How many of the 24 pairs? (Only "sleeps", one "the" and "pool" are wrong. Each wrong word spoils up to two pairs.)

# %%
parts = bleu_parts(
    *([tokens_13a(text) for text in side] for side in (three_outputs, three_references))
)
table = pd.DataFrame(
    {
        "n": range(1, 5),
        "matches": parts.matches,
        "n-grams of the output": parts.totals,
        "precision in %": [round(p, 2) for p in parts.precisions],
    }
)
print(table.to_string(index=False))
print(
    f"\nc = {parts.output_length}, r = {parts.reference_length}, BP = {parts.brevity_penalty:.4f}"
)
print(f"BLEU = {parts.score:.2f}")
assert parts.matches[:2] == [24, 18] and parts.totals == [27, 24, 21, 18]

# %% [markdown]
# Check: sacreBLEU (Post 2018), the field's common program, finds the same, part by part. It also gives a *signature*, which names everything that changes the number: case, tokeniser, smoothing, version.

# %%
theirs = corpus_bleu(three_outputs, three_references)
assert (parts.matches, parts.totals) == (theirs.counts, theirs.totals)
assert math.isclose(parts.brevity_penalty, theirs.bp)
assert math.isclose(parts.score, theirs.score, rel_tol=1e-9)
print(theirs.signature.split("|version")[0])


# %%
brevity_chart({i / 50: BleuParts([1], [1], i, 50).brevity_penalty for i in range(10, 76)})

# %% [markdown]
# **Pitfall.** Matches must be *clipped*. Without the "at most as often", an output that repeats one sure word is perfect.

# %%
stutter, reference = ["the"] * 7, ["the", "cat", "is", "on", "the", "mat"]
unclipped = sum(word in reference for word in stutter) / len(stutter)
clipped = bleu_parts([stutter], [reference])
assert unclipped == 1.0  # the wrong version gives full marks
assert (clipped.matches[0], clipped.totals[0]) == (2, 7)
print(f"precision of 'the the the the the the the': {clipped.precisions[0]:.1f}%, not 100%")

# %% [markdown]
# ### The same from torchtext
#
# torchtext 0.6 has a BLEU as well, `bleu_score`. Many course notebooks call it. It takes lists of tokens, with a *list* of references for each, and gives a number from 0 to 1 in single precision. On the same tokens it is our formula.
#
# **Predict.** An output of 5 words has two references, of 4 and of 6 words. Should BLEU depend on which of them is listed first? Does it?


# %%
def torchtext_bleu(
    outputs: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> float:
    """torchtext's BLEU, from 0 to 1, of tokenised outputs with a list of references each."""
    from torchtext.data.metrics import bleu_score

    return bleu_score(outputs, references)


# %%
out_tokens, ref_tokens = (
    [tokens_13a(text) for text in side] for side in (three_outputs, three_references)
)
same_tokens = torchtext_bleu(out_tokens, [[tokens] for tokens in ref_tokens])
assert math.isclose(100 * same_tokens, parts.score, rel_tol=1e-6)
print(f"torchtext: {100 * same_tokens:.2f}, by hand: {parts.score:.2f}")

# %% [markdown]
# On a whole corpus the two agree. They part in four places:
#
# - **Tokens.** It compares what it is given. Glue the full stop to the last word and the number changes.
# - **Smoothing.** One n-gram order without a match, and it says 0. sacreBLEU counts half a match, then a quarter, and so on.
# - **Several references.** Both take the reference length that is closest to the output's. At a tie sacreBLEU takes the shorter one (our tests show it), torchtext the one that was listed first: its BLEU depends on the order of the references.
# - **Nesting.** Forget the inner list, and every *word* counts as a reference, every letter as a token. There is no error.

# %%
glued = torchtext_bleu([o.split() for o in three_outputs], [[r.split()] for r in three_references])
assert abs(100 * glued - parts.score) > 1

short_output, short_reference = "a b c x d e f", "a b c y d e f"  # three in a row, never four
hard = torchtext_bleu([short_output.split()], [[short_reference.split()]])
smooth = corpus_bleu([short_output], [short_reference]).score
assert hard == 0 and smooth > 10

five, four, six = (list("abcdefg"[:n]) for n in (5, 4, 6))
one_way, other_way = (torchtext_bleu([five], [order]) for order in ([four, six], [six, four]))
assert one_way == 1 and math.isclose(other_way, math.exp(1 - 6 / 5), rel_tol=1e-6)

forgotten = torchtext_bleu(out_tokens, ref_tokens)  # the wrong version: one list too few
assert forgotten == 0
print(f"13a tokens {100 * same_tokens:.1f}, split at spaces {100 * glued:.1f}")
print(f"no match of order 4: {hard:.0f}; smoothed by sacreBLEU: {smooth:.1f}")
print(f"references of 4 and 6 words: {100 * one_way:.0f}; of 6 and 4: {100 * other_way:.0f}")
print(f"inner list forgotten: {forgotten:.0f}")

# %% [markdown]
# So we report sacreBLEU's. A zero is how most people notice; the third difference nobody notices.

# %% [markdown]
# ## One output, many numbers
#
# **Pitfall.** A score that was never computed is no score, and one without a signature can't be compared. Many tutorials quote the paper's BLEU beside their own code without measuring it. Others report a figure that looks like BLEU and isn't: the share of right tokens under teacher forcing (the model sees the reference's words all along), BLEU of lower-cased text, of sub-word pieces, or a mean over sentences.
#
# **Predict.** The first four figures below come from the same three outputs, the last two from those outputs in capitals. Which figure is the highest?

# %%
sentence_scores = [
    corpus_bleu([o], [r]).score for o, r in zip(three_outputs, three_references, strict=True)
]
shouted = [output.upper() for output in three_outputs]
as_pieces, reference_pieces = (
    [" ".join(trained.tokenizer.pieces(text)) for text in side]
    for side in (three_outputs, three_references)
)
figures = {
    "BLEU: cased, 13a, whole corpus": theirs.score,
    "BLEU of the pieces": corpus_bleu(
        as_pieces, reference_pieces, tokenize="none", force=True
    ).score,
    "BLEU of the letters": corpus_bleu(three_outputs, three_references, tokenize="char").score,
    "mean of the sentences' BLEU": sum(sentence_scores) / 3,
    "output in capitals, cased": corpus_bleu(shouted, three_references).score,
    "output in capitals, lower-cased": corpus_bleu(shouted, three_references, lowercase=True).score,
}
for name, score in figures.items():
    print(f"{name:33} {score:5.1f}")

ours = figures["BLEU: cased, 13a, whole corpus"]
assert all(abs(score - ours) > 1 for name, score in list(figures.items())[1:5])
assert math.isclose(figures["output in capitals, lower-cased"], ours)  # it can't see the shouting

# %% [markdown]
# Only the first row is what papers of today report, and what this series reports. Teacher-forced accuracy is not even about a translation. Here is the check on our model: the share of reference tokens that it ranks first, *given the reference's own beginning*. A model that guesses every next token well may still drift when it has to live with its own words.


# %%
@torch.no_grad()
def forced_accuracy(trained: Trained, pairs: Sequence[tuple[str, str]]) -> float:
    """Share of the reference's tokens that are ranked first, given the reference's own beginning."""
    batch = make_batch(encode_pairs(list(pairs), trained.tokenizer))
    with dropout_off(trained.model):
        x = trained.model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)  # (B, T, D)
    right = trained.model.generator(x).argmax(dim=-1) == batch.tgt_y  # (B, T)
    return right[batch.tgt_y != PAD].double().mean().item()


# %%
accuracy = forced_accuracy(trained, test_pairs)
bleu = corpus_bleu(outputs, references)
whole = sum(o == r for o, r in zip(outputs, references, strict=True)) / len(outputs)
assert bleu.score > 90 and accuracy > 0.9
assert 100 * accuracy - 100 * whole > 3  # the tokens, yet not the sentences
print(f"{len(outputs)} test sentences: BLEU {bleu.score:.0f}")
print(f"tokens right, given the reference so far: {accuracy:.0%}")
print(f"sentences right from start to end: {whole:.0%}")

# %% [markdown]
# ### A BLEU that teacher forcing wrote
#
# **Pitfall.** The next step of the same mistake looks even more like a score. Take the model's first choice at every place of the *reference*, join the choices to a text, and give that to sacreBLEU. It costs one pass and no search. But every choice was made after the human's words, and the text cannot lose its way.


# %%
@torch.no_grad()
def forced_texts(
    trained: Trained, pairs: Sequence[tuple[str, str]], batch_size: int = 32
) -> list[str]:
    """The wrong version of translating: each place's likeliest token, given the reference before it."""
    out = []
    for start in range(0, len(pairs), batch_size):
        batch = make_batch(encode_pairs(list(pairs[start : start + batch_size]), trained.tokenizer))
        batch = batch.to(trained.device)
        with dropout_off(trained.model):
            x = trained.model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)  # (B, T, D)
        first = trained.model.generator(x).argmax(dim=-1)  # (B, T)
        first = first.masked_fill(batch.tgt_y == PAD, EOS)  # behind the reference's end: nothing
        out += [trained.tokenizer.decode(row) for row in first.tolist()]
    return out


def shaken(trained: Trained, spread: float, seed: int = 0) -> Trained:
    """A worse model: noise of `spread` times its own standard deviation on every matrix of a copy."""
    model = copy.deepcopy(trained.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p += spread * p.std() * torch.randn(p.shape, generator=generator)
    return Trained(model, trained.tokenizer, trained.config)


# %% [markdown]
# **Predict.** Two models: ours, which is nearly always sure, and a copy with noise on its weights, which errs often. For which of the two is the teacher-forced figure further from the truth?

# %%
weak = shaken(trained, 0.4)
for name, some in (("ours", trained), ("shaken", weak)):
    real = corpus_bleu(translate(some, sources, DecodeOptions(beam=1)), references)
    flattered = corpus_bleu(forced_texts(some, test_pairs), references)
    if some is weak:
        assert flattered.score > real.score + 5
    verdict = "5 points too high or more" if flattered.score > real.score + 5 else "within 5 points"
    print(f"{name}: teacher-forced 'BLEU' is {verdict}")
    # Whoever guesses, the texts are as long as the human's:
    assert abs(flattered.sys_len / flattered.ref_len - 1) < 0.05

# %% [markdown]
# One wrong word leads to the next, but only where the model has to read its own words. So the figure flatters the weak model most, and a bad start of training looks good. How to notice: ask for the outputs' lengths. A search gets them wrong sometimes. Teacher forcing has the references' lengths nearly, whatever the model.
#
# ### Text that somebody has tokenised
#
# **Pitfall.** A pipeline with spaCy has its texts as lists of lower-cased tokens. It is tempting to join them with spaces on *both* sides and score that. The comparison is then fair in itself, but the number is another one: spaCy cuts "T-shirt" in three, and every piece may match. Two papers with different tokenisers can't be compared at all.

# %%
hyphens = ("A man in a black-and-white T-shirt rides a motor-bike.",)
hyphens_reference = ("A man in a black-and-white T-shirt rides a dirt-bike.",)
spaced, spaced_reference = (
    [" ".join(word_tokenizer("en")(text.lower())) for text in side]
    for side in (hyphens, hyphens_reference)
)
as_it_should = corpus_bleu(hyphens, hyphens_reference)
as_tokens = corpus_bleu(spaced, spaced_reference, tokenize="none", force=True)
print(spaced[0])
print(f"{as_it_should.score:.1f}  {as_it_should.signature.split('|version')[0]}")
print(f"{as_tokens.score:.1f}  {as_tokens.signature.split('|version')[0]}")
assert as_tokens.score > as_it_should.score + 5

# %% [markdown]
# The same output, and a much better number. How to notice: the signature says `tok:none`. And sacreBLEU warns where a hundred lines end in " .", unless somebody silenced it with `force`, as we just did.
#
# ### chrF: letters instead of words
#
# > **In short.** BLEU gives nothing for "dogs" where the reference has "dog". chrF compares runs of letters, so a nearly right word is nearly right.
#
# chrF (Popović 2015) removes the spaces and counts n-grams of *letters*, for n from 1 to 6. It asks both ways: $P$ is the share of the output's n-grams that the reference has, $R$ the share of the reference's that the output has, each the mean over n. The figure is
#
# $$\text{chrF}_\beta = 100 \cdot \frac{(1 + \beta^2)\, P R}{\beta^2 P + R}, \qquad \beta = 2$$
#
# so what is missing weighs more than what is too much, and it needs no brevity penalty and no tokeniser. It is never 0 for a sentence that shares a few letters, which makes it the better judge of *single* sentences. Its figures run higher than BLEU's. The two can't be compared.


# %%
def chrf_by_hand(
    outputs: Sequence[str], references: Sequence[str], order: int = 6, beta: float = 2.0
) -> float:
    """chrF of a corpus, from 0 to 100: n-grams of letters, one reference each (Popović 2015)."""
    precisions, recalls = [], []
    for n in range(1, order + 1):
        match = found = wanted = 0
        for sides in zip(outputs, references, strict=True):
            ours, theirs = (ngram_counts("".join(text.split()), n) for text in sides)
            match += (ours & theirs).total()
            found += ours.total() if theirs else 0  # a reference too short for n judges nothing
            wanted += theirs.total()
        if found and wanted:
            precisions.append(match / found)
            recalls.append(match / wanted)
    if not any(precisions):
        return 0.0
    p, r = (sum(shares) / len(shares) for shares in (precisions, recalls))
    return 100 * (1 + beta**2) * p * r / (beta**2 * p + r)


def corpus_chrf(outputs: Sequence[str], references: Sequence[str]) -> Any:
    """sacreBLEU's chrF2 with its defaults: `.score` and its `.signature`."""
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    result = metric.corpus_score(list(outputs), [list(references)])
    result.signature = str(metric.get_signature())
    return result


# %%
near, far = ["Two dogs run."], ["Two cats sit."]
target = ["Two dog runs."]
for text in (near, far):
    bleu, chrf = corpus_bleu(text, target).score, corpus_chrf(text, target).score
    print(f"{text[0]:14} BLEU {bleu:4.1f}  chrF2 {chrf:4.1f}")
    assert math.isclose(chrf, chrf_by_hand(text, target), rel_tol=1e-9)
assert corpus_bleu(near, target).score == corpus_bleu(far, target).score  # BLEU sees no difference
assert corpus_chrf(near, target).score > corpus_chrf(far, target).score + 20
assert math.isclose(
    chrf_by_hand(three_outputs, three_references),
    corpus_chrf(three_outputs, three_references).score,
    rel_tol=1e-9,
)
print(corpus_chrf(three_outputs, three_references).signature.split("|version")[0])

# %% [markdown]
# ## Is the difference real?
#
# > **In short.** Other test sentences would have given other numbers. How far apart might the two systems be then? *Draw sentences anew*, from ours. And could two equal systems seem so far apart? *Toss a coin for each sentence* and let heads swap the two outputs.
#
# Two systems translate the same N sentences, and their BLEU differs by $d = \text{BLEU}_2 - \text{BLEU}_1$. These are two questions, and each has its own answer:
#
# 1. **The interval**, by *paired bootstrap*: draw N of the sentences with repetition and score *both* systems on this draw. The differences of a thousand draws scatter around $d$, as those of a thousand test sets would. The interval goes from where 2.5% of them lie below to where 2.5% lie above.
# 2. **The p**, by *approximate randomisation* (Noreen 1989; Riezler and Maxwell 2005). If the two systems are equal, it is pure chance which of them wrote which of a sentence's two outputs. So swap them where a coin shows heads, and score again. With $R$ trials of N coins, and $d^*_r$ the difference in trial r,
#
# $$p = \frac{1 + \#\{r : |d^*_r| \ge |d|\}}{1 + R}$$
#
# It counts both signs, since nobody knew before which system would be ahead. The 1 stands for the outputs as they were, which chance might have dealt as well; so p is never 0. A system against itself has $d^* = d = 0$ in each trial, and p is exactly 1.
#
# BLEU is made of sums over sentences: $\mathbf{a}_i$ and $\mathbf{b}_i$ hold what sentence i adds to the ten sums of either system. Swaps by coins $c_i \in \{0, 1\}$ make the first system's sums $\sum_i \mathbf{a}_i + \sum_i c_i (\mathbf{b}_i - \mathbf{a}_i)$. For all trials at once that is one product of matrices, (R, N) times (N, 10).


# %%
def sentence_parts(outputs: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """What each sentence adds to BLEU's sums: (N, 10), 4 matches, 4 totals and 2 lengths a row."""
    from sacrebleu.metrics import BLEU

    metric, rows = BLEU(), []
    for output, reference in zip(outputs, references, strict=True):
        one = metric.corpus_score([output], [[reference]])
        rows.append([*one.counts, *one.totals, one.sys_len, one.ref_len])
    return np.array(rows, dtype=np.int64).reshape(-1, 10)


def bleu_of_sums(sums: np.ndarray) -> np.ndarray:
    """BLEU of each row of sums: (R, 10) to (R,)."""
    return np.array([BleuParts(s[:4], s[4:8], s[8], s[9]).score for s in sums.tolist()])


def bleu_of_draws(counts: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """BLEU of each draw: counts (N, 10), draws (R, n) of row numbers, to (R,)."""
    return bleu_of_sums(np.stack([counts[draw].sum(axis=0) for draw in draws]))


def swapped_differences(counts: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """BLEU of the second minus the first after swaps: counts (2, N, 10), coins (R, N) of 0 and 1, to (R,)."""
    first, second = counts
    moved = coins @ (second - first)  # (R, 10)
    return bleu_of_sums(second.sum(0) - moved) - bleu_of_sums(first.sum(0) + moved)


def randomisation_p(swapped: np.ndarray, difference: float) -> float:
    """The share of swaps (R,) that part equals as far as `difference`, which itself counts as one."""
    as_far = np.abs(swapped) >= abs(difference) - 1e-9  # the same in other digits is the same
    return float((1 + as_far.sum()) / (1 + len(swapped)))


# %%
@dataclass(frozen=True)
class PairedDifference:
    """How far two systems' BLEU differ, and what chance in the sentences has to say to it."""

    difference: float  # BLEU of the second minus BLEU of the first
    low: float  # 2.5% of the draws are below
    high: float  # 2.5% of the draws are above
    p: float  # how often equals differ so far or further, in either direction
    draws: tuple[float, ...]  # the difference in each draw of the sentences
    swaps: tuple[float, ...]  # the difference in each trial of the coins


def paired_difference(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[str],
    trials: int = 10_000,
    samples: int = 1000,
    seed: int = 12345,
) -> PairedDifference:
    """Compare two systems' outputs for the same sentences: an interval from draws, p from swaps.

    `samples` draws of the sentences (paired bootstrap), `trials` tosses of a coin for each (Noreen
    1989). Raises ValueError for no sentences, or for systems that translated another number of them.
    """
    if not references:
        raise ValueError("no sentences: nothing to draw from")
    counts = np.stack(
        [sentence_parts(texts, references) for texts in (first, second)]
    )  # (2, N, 10)
    rng, size = np.random.default_rng(seed), len(references)
    draws = rng.choice(size, size=(samples, size))  # (samples, N), with repetition
    before, after = (bleu_of_draws(one, draws) for one in counts)  # (samples,) each
    swaps = swapped_differences(counts, rng.integers(2, size=(trials, size)))  # (trials,)
    difference = float(np.diff(bleu_of_sums(counts.sum(axis=1)))[0])
    low, high = np.percentile(after - before, [2.5, 97.5]).tolist()
    p = randomisation_p(swaps, difference)
    return PairedDifference(
        difference, low, high, p, tuple((after - before).tolist()), tuple(swaps.tolist())
    )


# %% [markdown]
# **Predict.** Greedy decoding against our beam, on 40 sentences, most of which the model gets right. In how many sentences do they differ? What will p be: below the customary 0.05, or above?

# %%
greedy_outputs = translate(trained, sources, DecodeOptions(beam=1))
compared = paired_difference(greedy_outputs, outputs, references)
differing = sum(a != b for a, b in zip(greedy_outputs, outputs, strict=True))
print(f"{differing} of {len(outputs)} translations differ")
print(f"the beam: {compared.difference:+.2f} BLEU, p = {compared.p:.2f}")
print(f"95% of the draws lie between {compared.low:+.2f} and {compared.high:+.2f}")
assert compared.p > 0.05 and compared.low <= 0 <= compared.high

# %% [markdown]
# Three sentences leave the coins little to say. There are eight outcomes: with none or all of them swapped the distance is the measured one, so p can't be below a quarter. Here two are better by greedy decoding and one by the beam, and they nearly cancel each other. Any other outcome sets the systems further apart, so p is 1.
#
# Check: swap the texts themselves, and let sacreBLEU score them. The two systems in the other order give the same p. And a system against itself has p = 1.


# %%
def dealt(
    first: Sequence[str], second: Sequence[str], coins: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Two systems' outputs, swapped where a coin shows 1: fair coins make the two equal."""
    both = zip(first, second, coins, strict=True)
    swapped = [(b, a) if coin else (a, b) for a, b, coin in both]
    return [a for a, _ in swapped], [b for _, b in swapped]


# %%
coins = np.random.default_rng(0).integers(2, size=(20, len(references)))  # (20, N)
both_parts = np.stack([sentence_parts(texts, references) for texts in (greedy_outputs, outputs)])
for toss, quick in zip(coins, swapped_differences(both_parts, coins), strict=True):
    one, other = dealt(greedy_outputs, outputs, toss)
    slow = corpus_bleu(other, references).score - corpus_bleu(one, references).score
    assert math.isclose(quick, slow, abs_tol=1e-9)
assert paired_difference(outputs, greedy_outputs, references).p == compared.p
itself = paired_difference(outputs, outputs, references, trials=100, samples=100)
assert itself.p == 1 and itself.difference == itself.low == itself.high == 0

# %% [markdown]
# **Pitfall.** *A p that finds equals different.* sacreBLEU's own paired bootstrap answers with a p, too. Ask it about a system and itself: 1/1001, the smallest p that a thousand draws can give. It counts only what is *further* apart than the measured difference, and nothing is further than 0 from 0. And it has a second fault. Let $d_b$ be the difference in a draw of its bootstrap. To learn how far apart chance sets equal systems, it subtracts the mean of $|d_b|$ from each $|d_b|$, where it should subtract the mean of $d_b$ from each $d_b$; what is left is too small, and so is p. (Koehn 2004, who is cited for it, counts in how many draws the better system wins. That is another statistic.)
#
# **Predict.** Two systems lose a fifth of the words each, by chance. We deal their outputs out by coins, two hundred times: that makes two hundred pairs of *equals*. How many of them does each test call different, at 5%? Ten would be right.


# %%
def sacrebleu_p(
    first: Sequence[str], second: Sequence[str], references: Sequence[str], samples: int = 1000
) -> float:
    """What sacreBLEU's paired bootstrap calls p: here to be looked at, not to be used."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    systems, metrics = [("1", list(first)), ("2", list(second))], {"BLEU": BLEU()}
    test = PairedTest(systems, metrics, [list(references)], test_type="bs", n_samples=samples)
    return test()[1]["BLEU"][1].p_value


def lossy(texts: Sequence[str], share: float, rng: np.random.Generator) -> list[str]:
    """The texts without a `share` of their words, which chance chooses."""
    return [" ".join(w for w in text.split() if rng.random() >= share) for text in texts]


# %%
assert sacrebleu_p(outputs, outputs, references) == 1 / 1001  # a system and itself
rng = np.random.default_rng(0)
two_systems = [lossy(references, 0.2, rng) for _ in range(2)]
coins = rng.integers(2, size=(200, len(references)))  # (200, N)
alarms = Counter()
for trial, toss in enumerate(coins):
    equals = dealt(*two_systems, toss)
    ours = paired_difference(*equals, references, trials=199, samples=1, seed=trial)
    alarms["swaps"] += ours.p <= 0.05
    alarms["sacreBLEU's bootstrap"] += sacrebleu_p(*equals, references, samples=199) <= 0.05
for name, count in alarms.items():
    print(f"{name}: {count} of {len(coins)} pairs of equals are called different")
assert alarms["swaps"] <= 16 < 20 <= alarms["sacreBLEU's bootstrap"]

# %% [markdown]
# **Pitfall.** *Two intervals instead of one.* If each system gets its own interval from its own draws and the two overlap, that says little: hard sentences are hard for both, and that part of the scatter cancels in the difference. So draw once, and score both.

# %%
size = len(references)
own_draws = [np.random.default_rng(seed).choice(size, (1000, size)) for seed in (0, 1)]
alone = [bleu_of_draws(*given) for given in zip(both_parts, own_draws, strict=True)]
unpaired, paired = float(np.std(alone[1] - alone[0])), float(np.std(compared.draws))
assert unpaired > 1.5 * paired
print(f"the difference's scatter grows {unpaired / paired:.1f} times when each draws for itself")

# %% [markdown]
# ## Does a wider beam help?
#
# Look into the beam of one test sentence first. Its four hypotheses, best first:

# %%
summer = "Im Sommer spielt ein Nachbar auf einer roten Gitarre."
summer_ids = torch.tensor([source_ids(summer, trained.tokenizer)])  # (1, S)
for h in beam_search(trained.model, summer_ids, None, max_len=60, beam=4)[0]:
    print(f"log p = {h.log_prob:5.1f}, {h.length:2} tokens: {trained.tokenizer.decode(h.ids)}")

# %% [markdown]
# The first is right and far ahead. Among the others stands one without a verb: each token costs something, so what leaves one out saves something. A wide beam finds such stumps, and the smaller α is, the better are their chances.
#
# **Predict.** What will BLEU do when the beam grows from 1 to 8?


# %%
def beam_scores(
    trained: Trained, pairs: Sequence[tuple[str, str]], alpha: float = 0.6
) -> pd.DataFrame:
    """BLEU on `pairs` for beams of 1, 2, 4 and 8, rounded to one decimal."""
    sources, references = zip(*pairs, strict=True)
    rows = []
    for beam in (1, 2, 4, 8):
        outputs = translate(trained, sources, DecodeOptions(beam=beam, alpha=alpha))
        name = "greedy (K = 1)" if beam == 1 else f"K = {beam}"
        rows.append({"beam": name, "BLEU": round(corpus_bleu(outputs, references).score, 1)})
    return pd.DataFrame(rows)


# %%
by_beam = beam_scores(trained, test_pairs)
assert by_beam["BLEU"].max() - by_beam["BLEU"].min() < 5
beam_chart(by_beam)

# %% [markdown]
# The grammar is regular and the model is nearly always sure, so greedy decoding already finds good sentences. What else a beam finds scores higher, but isn't better. On real text a beam of about 4 is a common choice, the paper's too. Beyond a moderate width quality falls (Koehn and Knowles 2017): the search lays bare that the model's favourite isn't the best translation.
#
# ## Recorded scores
#
# These were a few sentences. Here are the records of the two models that ship, each on the whole of its test splits: by the search that the row names, and by greedy decoding. The second was trained on Multi30k, real captions of photographs.

# %%
for name in ("sample-de-en", "multi30k-de-en"):
    for split, score in load_record(name)["test"].items():
        found = f"{score['search']:17} BLEU {score['bleu']:.1f}, greedy {score['bleu_greedy']:.1f}"
        print(f"{name:15} {split:17} {found}  {score['signature']}")

# %% [markdown]
# Real captions are far harder than our grammar. A human would not reach 100 either: there are many good translations, and only one of them is the reference. Some of the recorded translations, the first of the test set, not the best:

# %%
samples = load_record("multi30k-de-en")["samples"]
assert "Boon terrier" in samples[1]["translation"] and "illuminum" in samples[6]["translation"]
assert "spraying a board" in samples[2]["translation"]  # it should be broken
pd.DataFrame(samples)[:7]

# %% [markdown]
# The frame of most sentences is right. Rare words often aren't: a Boston Terrier becomes a Boon terrier, an igloo an illuminum, and a board is not broken but sprayed.
#
# To score that model yourself, by the record's search (this needs the corpus, see [Chapter 7](ch07_multi30k.ipynb)):
#
# ```
# python -m scripts.evaluate --model models/multi30k-de-en --split test_2016_flickr --beam 5
# ```

# %% [markdown]
# ## An analysis on record
#
# > **In short.** One number says how good. It doesn't say at what. So: vary the search, sort the sentences, and read the worst ones.
#
# The sample corpus is too easy for that. What follows looks at the model trained on Multi30k, over a whole test set. It takes minutes and needs the corpus, so it was done once, by `python -m scripts.studies.judging --save true`, and is on record. First some of its tools.


# %%
def ranked_texts(
    trained: Trained, found: Sequence[Sequence[Hypothesis]], alpha: float
) -> list[str]:
    """Each source's best hypothesis at length penalty `alpha`, as text; none is the empty text."""
    best = (max(some, key=lambda h: h.score(alpha), default=None) for some in found)
    return [trained.tokenizer.decode(h.ids) if h else "" for h in best]


# %% [markdown]
# Each width of the beam takes a search of its own. The length penalty is cheaper: it plays no part *while* our search runs, it only ranks what has ended. So must we search anew for every α? Two searches suffice, one at the smallest α and one at the largest.
#
# Why two: $\log|\text{score}|$ is $\log|\log p| - \alpha \log T$, a straight line over α for each hypothesis, and the winner is the lowest line. Say one wins only in between. Then whatever beats it at the small end is shorter than it, and whatever beats it at the large end is longer: two separate groups. At most 2K − 1 hypotheses ever end. So one of the groups has fewer than K members, and at that end our hypothesis is among the K best.

# %%
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)


def penalty_sweep(
    trained: Trained,
    rows: Sequence[Sequence[int]],
    alphas: Sequence[float] = ALPHAS,
    beam: int = 5,
) -> dict[float, list[str]]:
    """The outputs of a beam search at each length penalty, from two searches, at the two ends."""
    ends = [
        decode_hypotheses(trained, rows, DecodeOptions(beam=beam, alpha=alpha), nbest=beam)
        for alpha in (min(alphas), max(alphas))
    ]
    both = [[*low, *high] for low, high in zip(*ends, strict=True)]
    return {alpha: ranked_texts(trained, both, alpha) for alpha in alphas}


# %%
few = test_pairs[:8]
few_rows = [source_ids(source, trained.tokenizer) for source, _ in few]
ranked_anew = penalty_sweep(trained, few_rows, alphas=(0.0, 0.6, 1.4), beam=3)
for alpha, texts in ranked_anew.items():
    assert texts == beam_translate(trained, [source for source, _ in few], beam=3, alpha=alpha)
print("Two searches, and the answers of three.")

# %% [markdown]
# Next, buckets. Is BLEU the same for short and long sentences? And what becomes of words that were rare in training? For the second we ask for each word of the reference whether the output has it too: its *recall*, by how often the word occurs in the training split.


# %%
LENGTH_EDGES = (1, 8, 11, 14, 18)  # words of the source: where each bucket begins
FREQUENCY_EDGES = (0, 1, 3, 10, 100)  # occurrences in training: where each bucket begins


def bucket_labels(edges: Sequence[int]) -> list[str]:
    """The buckets' names: from each edge to just below the next, the last one open.

    >>> bucket_labels((0, 1, 3))
    ['0', '1–2', '3+']
    """
    inner = itertools.pairwise(edges)
    return [str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in inner] + [f"{edges[-1]}+"]


def bucket_of(value: int, edges: Sequence[int]) -> str:
    """The name of the bucket that holds `value`. Raises ValueError below the first edge."""
    if value < edges[0]:
        raise ValueError(f"{value} is below the first bucket, which begins at {edges[0]}")
    return bucket_labels(edges)[bisect.bisect_right(edges, value) - 1]


# %%
def bleu_by_length(
    sources: Sequence[str],
    outputs: Sequence[str],
    references: Sequence[str],
    samples: int = 1000,
) -> list[dict[str, Any]]:
    """BLEU of the sentences of each source length, and where 95% of resampled test sets lie.

    A length is a number of words between spaces. Buckets without a sentence are left out.
    """
    counts = sentence_parts(outputs, references)  # (N, 10)
    names = [bucket_of(max(1, len(source.split())), LENGTH_EDGES) for source in sources]
    rng, table = np.random.default_rng(0), []
    for name in bucket_labels(LENGTH_EDGES):
        (inside,) = np.nonzero(np.array(names) == name)
        if not len(inside):
            continue
        draws = rng.choice(inside, size=(samples, len(inside)), replace=True)
        low, high = np.percentile(bleu_of_draws(counts, draws), [2.5, 97.5])
        bleu = bleu_of_draws(counts, inside[None])[0]
        row = {"bleu": bleu, "low": low, "high": high}
        row = {key: round(float(value), 2) for key, value in row.items()}
        table.append({"words": name, "sentences": len(inside)} | row)
    return table


# %%
def plain_words(text: str) -> list[str]:
    """The words of a text, lower-cased and without punctuation."""
    return [token for token in tokens_13a(text.lower()) if any(map(str.isalnum, token))]


def recall_by_frequency(
    outputs: Sequence[str], references: Sequence[str], training: Iterable[str]
) -> list[dict[str, Any]]:
    """For each bucket of training frequency: the reference's words, and how many the output has.

    A word counts as found at most as often as the output has it. `sentences` are those whose rarest
    word falls into the bucket, `bleu` is theirs (None without any).
    """
    seen = Counter(word for text in training for word in plain_words(text))
    labels = bucket_labels(FREQUENCY_EDGES)
    words, found, rarest = Counter(), Counter(), {label: [] for label in labels}
    for i, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        wanted, given = (Counter(plain_words(text)) for text in (reference, output))
        for word, times in wanted.items():
            label = bucket_of(seen[word], FREQUENCY_EDGES)
            words[label] += times
            found[label] += min(times, given[word])
        if wanted:
            rarest[bucket_of(min(seen[word] for word in wanted), FREQUENCY_EDGES)].append(i)
    table = []
    for label in labels:
        sides = [[texts[i] for i in rarest[label]] for texts in (outputs, references)]
        row = {"frequency": label, "words": words[label], "found": found[label]}
        row["recall"] = round(found[label] / words[label], 4) if words[label] else None
        row["sentences"] = len(rarest[label])
        row["bleu"] = round(corpus_bleu(*sides).score, 2) if rarest[label] else None
        table.append(row)
    return table


# %% [markdown]
# By hand: "dog" occurs twice in this training text, "igloo" never. The output has one of the two dogs, and no igloo.

# %%
by_hand = recall_by_frequency(["A dog."], ["A dog, a dog, an igloo."], ["a dog", "A dog! An a a a"])
found_of = {row["frequency"]: (row["found"], row["words"]) for row in by_hand}
assert found_of == {"0": (0, 1), "1–2": (1, 3), "3–9": (1, 2), "10–99": (0, 0), "100+": (0, 0)}
assert [row["sentences"] for row in by_hand] == [1, 0, 0, 0, 0]  # its rarest word is the igloo
pd.DataFrame(by_hand)[["frequency", "words", "found"]][:3]


# %%
def beam_against_greedy(
    greedy: Sequence[str], beam: Sequence[str], references: Sequence[str]
) -> dict[str, Any]:
    """The comparison for the record: its figures, and histograms of the draws and of the swaps."""
    compared = paired_difference(greedy, beam, references)

    def tenths(differences: Sequence[float]) -> list[dict[str, float]]:
        steps = Counter(math.floor(10 * d) for d in differences)  # a tenth of a point each
        return [{"from": at / 10, "draws": steps[at]} for at in sorted(steps)]

    return {
        **{key: round(getattr(compared, key), 4) for key in ("difference", "low", "high", "p")},
        "differing": sum(a != b for a, b in zip(greedy, beam, strict=True)),
        "histogram": tenths(compared.draws),
        "histogram_of_swaps": tenths(compared.swaps),
    }


# %% [markdown]
# ### How wide a beam?
#
# **Predict.** The shipped model translates a test set of real captions. How much BLEU does a beam of 5 add to greedy decoding? And a beam of 12 to that? What do they cost?


# %%
analysis = load_record("decoding-multi30k")
print(f"{analysis['model']}, {analysis['sentences']:,} sentences of {analysis['split']}")
beam_sweep_chart(analysis)

# %%
beam_table = pd.DataFrame(analysis["beams"]).set_index("beam")
beam_table.columns = ["BLEU", "lower-cased", "chrF2", "length ratio", "time, greedy = 1"]
assert beam_table["BLEU"][2:].min() > beam_table["BLEU"][1] + 1.2  # a second hypothesis pays,
assert beam_table["BLEU"][2:].max() - beam_table["BLEU"][2:].min() < 0.4  # a third hardly
assert beam_table["length ratio"].is_monotonic_decreasing
beam_table

# %% [markdown]
# The second hypothesis brings almost the whole gain, 1.4 BLEU. From K = 2 to K = 12 BLEU moves by a third of a point, up and down, which is less than chance would do; chrF2 says the same. What grows steadily is the time, and what falls steadily is the length of the outputs: a wider beam finds more of the short texts that are likely only because they are short.
#
# Is the gain more than chance? The comparison from above, on these outputs:


# %%
against = analysis["beam_against_greedy"]
print(f"the beam of 5: {against['difference']:+.2f} BLEU, p = {against['p']:.4f}")
print(f"95% of the draws lie between {against['low']:+.2f} and {against['high']:+.2f}")
assert against["p"] == round(1 / 10_001, 4)  # the smallest that 10,000 trials can give
assert min(step["from"] for step in against["histogram"]) > 0
chance_chart(analysis)

# %% [markdown]
# It is more than chance: none of ten thousand swaps parts equals so far, so p is the smallest that ten thousand can give. And of a thousand draws of the sentences none favours greedy decoding.
#
# ### Which length penalty?
#
# **Predict.** α = 0 favours short outputs, α = 1.4 long ones. Where is BLEU best, and how long are the outputs there, compared with the references?


# %%
by_alpha = pd.DataFrame(analysis["penalties"]).set_index("alpha")
assert by_alpha["length_ratio"][1.4] > by_alpha["length_ratio"][0.0]
assert abs(by_alpha["bleu"][0.6] - beam_table["BLEU"][5]) < 0.02  # two ways to one search
assert (
    by_alpha["bleu"][1.4] - by_alpha["bleu"][0.4]
    < 0.5
    < by_alpha["bleu"][0.6] - by_alpha["bleu"][0]
)
best_alpha = by_alpha["bleu"].idxmax()
print(
    f"best: alpha = {best_alpha}, BLEU {by_alpha['bleu'].max():.2f}; at 0.6: {by_alpha['bleu'][0.6]:.2f}"
)
penalty_sweep_chart(analysis)

# %% [markdown]
# Our outputs are 4% too short at α = 0.6, so BLEU rises as α does, all the way to 1.4. But slowly: between 0.4 and 1.4 it gains less than half a point. Without any penalty (α = 0) it loses half a point.
#
# **Pitfall.** *Choosing α here.* This chart is drawn on the test set, to show how α works. To choose α from it and then to report that best BLEU is to train on the test set with one parameter. Choose on the validation split, as chapter 9 chooses its epoch, and report what that choice gives here.
#
# ### Long sentences, short sentences
#
# **Predict.** Are long sentences harder? By how much?


# %%
assert sum(row["sentences"] for row in analysis["lengths"]) == analysis["sentences"]
*shorter, longest = analysis["lengths"]
assert longest["high"] < min(row["low"] for row in shorter)  # beyond the spreads
assert max(row["low"] for row in shorter) < min(row["high"] for row in shorter)  # these overlap
length_chart(analysis)

# %% [markdown]
# Up to 17 words length makes no difference that exceeds the spreads. The 51 longest sentences are another matter: a dozen BLEU lower, beyond any overlap. The training captions have few that long, and a long sentence has more places to go wrong at.
#
# ### Rare words
#
# A word-level model has a plain answer to a word it never met: `<unk>`. Ours spells every word in pieces, so no word is unknown to it. But can it *translate* a word that it never saw?
#
# **Predict.** Of the reference's words that occur 100 times or more in training, the output contains what share? And of those that never occur?


# %%
counted = pd.DataFrame(analysis["frequencies"])[["found", "words"]]
rare, common = counted[:3].sum(), counted[4:].sum()  # fewer than 10 times; 100 times or more
assert common["found"] / common["words"] > 2 * rare["found"] / rare["words"]
missed = counted["words"] - counted["found"]
assert 0.6 < missed.iloc[-1] / missed.sum() < 0.65
rare_word_chart(analysis)

# %%
unseen, few, *_, known = analysis["frequencies"]
assert (unseen["found"], unseen["words"], few["found"], few["words"]) == (0, 144, 4, 160)
assert 0.2 < (unseen["sentences"] + few["sentences"]) / analysis["sentences"] < 0.25
assert max(unseen["bleu"], few["bleu"]) < 0.51 * known["bleu"]
rarest = pd.DataFrame(analysis["frequencies"])[["frequency", "sentences", "bleu"]]
rarest.columns = ["the rarest word's frequency", "sentences", "BLEU"]
rarest.dropna()

# %% [markdown]
# Of the words that training showed a hundred times or more, the model finds three in four; of those seen three to nine times, one in five; of those seen once or twice, 4 of 160; of those never seen, none of 144. Almost a quarter of the sentences contain a word seen fewer than three times, and BLEU there is half of what it is where all words are common. Still, more than 60% of all words that are missed are common ones: there are many of them, and another word for the same thing counts as a miss, too. BPE removes the unknown *symbol*, not the ignorance. A new name can be copied piece by piece, a new noun has to be guessed.
#
# ### The worst and the best
#
# Numbers done, read. These are the ends of the list when the sentences are sorted by chrF2, which is gentler to single sentences than BLEU.


# %%
sentence_table(analysis, "worst")

# %%
sentence_table(analysis, "best")

# %%
print(
    f"{analysis['exact']} of {analysis['sentences']:,} outputs are the reference, letter by letter"
)

# %% [markdown]
# Low scores come in two kinds. In one the model is wrong: asked for Mayan ruins, the Dalai Lama, a spotlight or a cave explorer, words it never learned, it composes a word from pieces or a fluent sentence about something else. In the other it is right, and the reference says the same in other words. "Children fight over the ball" is a good translation of its source, and the second worst of a thousand. There the score is wrong. Only reading tells the two apart.
#
# ### What else is called BLEU
#
# The pitfalls from above, on real outputs. All but the last are scores of the *same* texts.
#
# **Predict.** Which of them come out higher than the first row, and which lower?

# %%
figures = analysis["figures"]
for name, score in figures.items():
    print(f"{name:31} {score:5.1f}")
headline = figures["BLEU: cased, 13a, whole corpus"]
assert abs(figures["teacher-forced"] - beam_table["BLEU"][1]) < 0.5
assert 23 < figures["letters"] - headline < 24.5
assert headline == beam_table["BLEU"][5]
assert figures["lower-cased"] > headline and figures["letters"] > headline + 5
assert figures["spaCy's tokens, lower-cased"] >= figures["spaCy's tokens"]

# %% [markdown]
# The same texts, seven scores, from 40 to 65: not a letter of the output has changed. The last row is of other texts, the teacher-forced ones. On this model it is close to the greedy BLEU, by no merit of its own: on the shaken model above it was far too high. A wrong measure isn't wrong by the same amount each time, or one could subtract it.

# %% [markdown]
# ## Averaging checkpoints
#
# > **In short.** The last few checkpoints of a training jitter around a good point. Their mean lies nearer to it than each of them.
#
# The paper averages the last 5 checkpoints of its base models, and 20 of the big ones: $\bar\theta = \frac1n \sum_i \theta_i$, weight by weight. [Chapter 9](ch09_training_run.ipynb) defined `average_checkpoints`. A good test of any mean is that equal things have themselves as their mean.

# %%
folder = Path(tempfile.mkdtemp())
stored = ROOT / "models" / "sample-de-en" / "model.safetensors"
same = average_checkpoints([stored] * 3)
for name, weight in weights(trained.model).items():
    torch.testing.assert_close(same[name], weight.detach(), rtol=0, atol=0)

checkpoints = []
for number, value in enumerate((1.0, 2.0, 6.0)):
    checkpoints.append(folder / f"{number}.safetensors")
    save_tensors(checkpoints[-1], {"w": torch.full((2,), value)}, {})
print(average_checkpoints(checkpoints)["w"])
torch.testing.assert_close(average_checkpoints(checkpoints)["w"], torch.full((2,), 3.0))
shutil.rmtree(folder)

# %% [markdown]
# Does it help? Chapter 9 measured it in every run: greedy BLEU on the validation split, of the best epoch and of the mean of the last ones. No model has to be trained for this table; it stands in the records.
#
# **Predict.** Our rate falls to zero along a cosine, so the last epochs hardly move. What is left for the mean to gain?


# %%
def averaging_table() -> pd.DataFrame:
    """Validation BLEU of the best epoch and of the mean of the last, for every recorded run."""
    shipped, recipe = (load_record(name) for name in ("multi30k-de-en", "recipe-multi30k"))
    best, mean = shipped["chosen_by_val_bleu"].values()
    config = shipped["config"]
    rows = [("the shipped model", config["seed"], config["epochs"], config["average"], best, mean)]
    config = recipe["config"]
    rows += [
        (name, run["seed"], config["epochs"], config["average"], run["best"], run["mean of epochs"])
        for name, row in recipe["rows"].items()
        for run in row["runs"]
    ]
    columns = ["run", "seed", "epochs", "averaged", "best epoch", "mean of the last"]
    table = pd.DataFrame(rows, columns=columns)
    table["change"] = table["mean of the last"] - table["best epoch"]
    return table.round(2)


# %%
averaged = averaging_table()
lost = (averaged["change"] < 0).sum()
print(f"the mean is worse than the best epoch in {lost} of {len(averaged)} runs")
assert lost > len(averaged) / 2
changes = averaged["change"]
assert changes.iloc[0] > changes.iloc[1:].mean()  # least is lost where the run was long
averaged

# %% [markdown]
# Here it gains nothing. In a run of five epochs the last three are no jitter around a point: the model is still on its way, and the mean lies behind it. After eighteen epochs the mean is as good as the best epoch, nearly, and no better. The paper's rate falls slowly, as the inverse square root, and its checkpoints were written every ten minutes: that is where one expects a mean to help, and an exercise of chapter 9 asks you to measure it. Chapter 9 tries the mean in every run, and keeps what validation BLEU prefers.

# %% [markdown]
# **Pitfall.** Code for averaging is often written once and never run. A popular version hands several tensors to `torch.sum`, which takes one: it raises a `TypeError` at the first call. Another one averages two by two as the files come in. It passes the test with equal checkpoints, so test with unequal ones as well: the last file gets half of all the weight.


# %%
def wrong_average(tensors: Sequence[Tensor]) -> Tensor:
    """Averages as they come in, two by two: the last one gets half of all the weight."""
    mean = tensors[0]
    for tensor in tensors[1:]:
        mean = (mean + tensor) / 2
    return mean


# %%
values = [torch.full((2,), value) for value in (1.0, 2.0, 6.0)]
try:
    torch.sum(*values)
except TypeError:
    print("torch.sum of several tensors: TypeError")
else:
    raise AssertionError("torch.sum took several tensors")
assert torch.equal(wrong_average(values[:1] * 3), values[0])  # equal ones: looks right
assert not torch.allclose(wrong_average(values), torch.full((2,), 3.0))  # unequal ones: wrong

# %% [markdown]
# ## Leaving home: ONNX and CTranslate2
#
# > **In short.** A trained model is a few million numbers and a list of simple operations. Written down in a format that others read, it runs without PyTorch: on a phone, in a browser, in a server written in C++. The search stays behind, so the host has to bring one.
#
# Two formats stand for two bargains.
#
# - **ONNX** is a list of operations: multiply these, add those. Any runtime for ONNX executes any model. It knows nothing of translation, so the host writes the loop.
# - **CTranslate2** knows what a Transformer is. It wants no operations, only our weights under its names. It brings a fast beam search of its own. A model that it doesn't know, it can't run.
#
# ### ONNX: two graphs
#
# A graph has no loop that lasts until `</s>`. So we export one *step*, and the host repeats it. To make a step cheap, nothing is computed twice. Keys and values of the memory are the same at every step: the encoder's graph computes them once. Keys and values of earlier tokens don't change either, as no position looks ahead: a step takes them as input, `past`, and returns them with its own added, `present`. This is what is called a KV cache. For N layers, R rows (sentences, or the prefixes of a beam) and T earlier tokens:
#
# $$ \text{encoder}: (\text{src}, \text{mask}) \mapsto \text{cross} \qquad \text{step}: (\text{token}, T, \text{past}, \text{cross}, \text{mask}) \mapsto (\text{logits}, \text{present}) $$
#
# Both caches have the same shape, with keys first and values second: cross (N, 2, R, H, S, d_k), past (N, 2, R, H, T, d_k).
#
# The two modules below own no weights. They call the parts of our model in another order, with the `attention` of [chapter 1](ch01_attention.ipynb).


# %%
def keys_values_of(layer: MultiHeadedAttention, x: Tensor) -> Tensor:
    """What `layer` looks at in x (R, S, D): its keys and its values, (2, R, H, S, d_k)."""
    both = (layer.project_key(x), layer.project_value(x))  # (R, S, D) each
    return torch.stack([split_heads(part, layer.h) for part in both])


def attend_to_stored(
    layer: MultiHeadedAttention, x: Tensor, stored: Tensor, mask: Tensor | None = None
) -> Tensor:
    """`layer` at x (R, 1, D), with keys and values that are at hand, (2, R, H, S, d_k): (R, 1, D)."""
    query = split_heads(layer.project_query(x), layer.h)  # (R, H, 1, d_k)
    found, _ = attention(query, stored[0], stored[1], mask)  # (R, H, 1, d_k)
    return layer.project_output(merge_heads(found))


# %%
class OnnxEncoder(nn.Module):
    """The encoder, and what every decoder layer's cross-attention makes of its memory."""

    def __init__(self, model: EncoderDecoder):
        super().__init__()
        self.model = model

    def forward(self, src: Tensor, src_mask: Tensor) -> Tensor:
        """src (B, S), src_mask (B, 1, S), to cross (N, 2, B, H, S, d_k)."""
        memory = self.model.encode(src, src_mask)  # (B, S, D)
        layers = self.model.decoder.layers
        return torch.stack([keys_values_of(layer.src_attn, memory) for layer in layers])


# %%
class OnnxDecoderStep(nn.Module):
    """One token further: what the decoder says after `tokens`, given what it kept of those before."""

    def __init__(self, model: EncoderDecoder):
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, position: Tensor, past: Tensor, cross: Tensor, src_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """tokens (R, 1), position (1,), past (N, 2, R, H, T, d_k), cross (N, 2, R, H, S, d_k),
        src_mask (R, 1, S); to logits (R, V) and present (N, 2, R, H, T+1, d_k)."""
        embed, positions = self.model.tgt_embed
        x = embed(tokens) + positions.pe[position]  # (R, 1, D)
        present = []
        for n, layer in enumerate(self.model.decoder.layers):
            x, grown = self.through_layer(layer, x, past[n], cross[n], src_mask.unsqueeze(1))
            present.append(grown)
        x = self.model.decoder.norm(x)[:, -1]  # (R, D)
        return self.model.generator(x), torch.stack(present)

    @staticmethod
    def through_layer(
        layer: DecoderLayer, x: Tensor, past: Tensor, cross: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x (R, 1, D) through one layer: (R, 1, D), and its past with this token's added."""
        grown = past

        def look_back(x: Tensor) -> Tensor:
            nonlocal grown
            grown = torch.cat((past, keys_values_of(layer.self_attn, x)), dim=-2)
            return attend_to_stored(layer.self_attn, x, grown)  # no mask: all of it is earlier

        x = layer.sublayer[0](x, look_back)
        x = layer.sublayer[1](x, lambda x: attend_to_stored(layer.src_attn, x, cross, mask))
        return layer.sublayer[2](x, layer.feed_forward), grown


# %% [markdown]
# PyTorch writes ONNX by *recording*: it runs the module once on an example and notes each operation. (There is a newer way, `dynamo=True`, which reads the Python code instead. It is where PyTorch is heading. For these two graphs it gave the same numbers, but took many times as long, and a package more.) A recording knows only what it saw. Sizes that may vary have to be named, and everything else is frozen.


# %%
def step_example(model: EncoderDecoder, R: int, S: int, T: int) -> dict[str, Tensor]:
    """Random inputs of a decoder step, by name: R rows, S source tokens, T earlier tokens."""
    layers, vocab = model.decoder.layers, model.generator.proj.out_features
    heads, d_k = layers[0].self_attn.h, layers[0].size // layers[0].self_attn.h
    draw = torch.Generator().manual_seed(0)  # its own: exporting must not disturb anyone's
    return {
        "tokens": torch.randint(vocab, (R, 1), generator=draw),
        "position": torch.tensor([T]),
        "past": torch.randn(len(layers), 2, R, heads, T, d_k, generator=draw),
        "cross": torch.randn(len(layers), 2, R, heads, S, d_k, generator=draw),
        "src_mask": torch.ones(R, 1, S, dtype=torch.bool),
    }


# %%
def record_graph(
    module: nn.Module, inputs: dict[str, Tensor], outputs: list[str], sizes: dict[str, dict]
) -> Any:
    """`module` as an ONNX graph (a ModelProto), recorded on example `inputs`.

    `sizes` names for each input and output the dimensions that may vary.
    Raises ValueError where the package onnx is missing.
    """
    need_packages("onnx")
    import onnx

    graph, device = io.BytesIO(), next(module.parameters()).device
    with warnings.catch_warnings(), dropout_off(module):
        # Tracing warns of every length it freezes, and of its age. The checks at other lengths answer.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(value.to(device) for value in inputs.values()),
            graph,
            input_names=list(inputs),
            output_names=outputs,
            dynamic_axes=sizes,
            opset_version=17,
            dynamo=False,
        )
    return onnx.load_from_string(graph.getvalue())


def encoder_graph(model: EncoderDecoder) -> Any:
    """`OnnxEncoder` as a graph, for any B and S."""
    ones = torch.ones(2, 5, dtype=torch.int64)
    inputs = {"src": ones, "src_mask": padding_mask(ones)}
    sizes = {"src": {0: "B", 1: "S"}, "src_mask": {0: "B", 2: "S"}, "cross": {2: "B", 4: "S"}}
    return record_graph(OnnxEncoder(model), inputs, ["cross"], sizes)


def step_graph(model: EncoderDecoder, kind: type[OnnxDecoderStep] = OnnxDecoderStep) -> Any:
    """`OnnxDecoderStep`, or another `kind` of it, as a graph, for any R, S and T."""
    sizes = {"tokens": {0: "R"}, "src_mask": {0: "R", 2: "S"}, "logits": {0: "R"}}
    sizes |= {"past": {2: "R", 4: "T"}, "cross": {2: "R", 4: "S"}, "present": {2: "R", 4: "T+1"}}
    inputs = step_example(model, R=3, S=5, T=2)
    return record_graph(kind(model), inputs, ["logits", "present"], sizes)


# %%
def need_packages(*names: str, extra: str = "export") -> None:
    """Raise ValueError, with the remedy, where one of these packages is missing."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(f"{absent[0]} is not installed: pip install -e '.[{extra}]'")


# %% [markdown]
# Both graphs use the embedding table, the largest tensor of all. ONNX lets a graph point into another file, so all large tensors go into one, `weights.bin`, each content once.


# %%
def save_graphs(folder: Path, graphs: Mapping[str, Any]) -> None:
    """Write ONNX graphs into `folder` by name, and their large tensors, equal ones once, to weights.bin."""
    from onnx.external_data_helper import set_external_data

    places: dict[bytes, int] = {}
    with open(folder / "weights.bin", "wb") as file:
        for name, graph in graphs.items():
            for tensor in graph.graph.initializer:
                content = tensor.raw_data
                if len(content) < 1024:
                    continue  # small ones stay in the graph, where the runtime may need them early
                if content not in places:
                    file.write(bytes(-file.tell() % 64))  # aligned, so that a runtime can map it
                    places[content] = file.tell()
                    file.write(content)
                set_external_data(tensor, "weights.bin", places[content], len(content))
                tensor.ClearField("raw_data")
            (folder / name).write_bytes(graph.SerializeToString())


def export_onnx(trained: Trained, folder: Path) -> None:
    """Write encoder.onnx, decoder_step.onnx, weights.bin, tokenizer.model and config.json.

    Float32, plain operations of opset 17; the graphs' inputs and outputs are those of `OnnxEncoder`
    and `OnnxDecoderStep`. Files of these names are replaced.
    Raises ValueError where the package onnx is missing.
    """
    model, layers = trained.model, trained.model.decoder.layers
    graphs = {"encoder.onnx": encoder_graph(model), "decoder_step.onnx": step_graph(model)}
    config = {
        "layers": len(layers),
        "heads": layers[0].self_attn.h,
        "d_k": layers[0].size // layers[0].self_attn.h,
        "vocab": model.generator.proj.out_features,
        "max_len": model.tgt_embed[1].pe.size(0),
        **{"pad": PAD, "unk": UNK, "bos": BOS, "eos": EOS},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_graphs(folder, graphs)
    trained.tokenizer.save(folder / "tokenizer.model")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


# %% [markdown]
# This is all that a host needs to translate. Nothing in it is PyTorch. In a browser, `onnxruntime-web` has the same two calls. A beam needs one line more: after each step the rows of `past` are put in the order of the prefixes that survived, `past[:, :, chosen]`.


# %%
def onnx_session(graph: Path | bytes) -> Any:
    """ONNX Runtime with a graph, a file or its bytes, on one thread: a step is too small to share."""
    need_packages("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def onnx_greedy(folder: Path, rows: Sequence[Sequence[int]], max_len: int) -> list[list[int]]:
    """Greedy decoding of encoded sources by the files of `export_onnx`: each row's ids, without eos."""
    import numpy as np

    config = json.loads((folder / "config.json").read_text("utf-8"))
    files = [folder / name for name in ("encoder.onnx", "decoder_step.onnx")]
    encoder, step = map(onnx_session, files)
    longest, pad = max(map(len, rows)), config["pad"]
    src = np.array([[*row, *[pad] * (longest - len(row))] for row in rows])  # (B, S)
    src_mask = (src != pad)[:, None]  # (B, 1, S)
    (cross,) = encoder.run(None, {"src": src, "src_mask": src_mask})  # (N, 2, B, H, S, d_k)

    past = cross[..., :0, :]  # (N, 2, B, H, 0, d_k): nothing yet
    tokens = np.full((len(rows), 1), config["bos"])  # (B, 1)
    ids = np.empty((len(rows), 0), dtype=np.int64)  # (B, T)
    while ids.shape[1] < max_len and not (ids == config["eos"]).any(axis=1).all():
        now = {"tokens": tokens, "position": np.array([ids.shape[1]]), "past": past}
        logits, past = step.run(None, {**now, "cross": cross, "src_mask": src_mask})
        tokens = logits.argmax(axis=-1)[:, None]  # (B, 1)
        ids = np.concatenate((ids, tokens), axis=1)
    ends = [[*row, config["eos"]].index(config["eos"]) for row in ids.tolist()]
    return [row[:end] for row, end in zip(ids.tolist(), ends, strict=True)]


# %% [markdown]
# ### CTranslate2: names for names
#
# CTranslate2's `TransformerSpec` is an empty Transformer with named places for weights. We fill them. Three things differ from ours and are settled here: it stacks the projections of query, key and value into one matrix; it multiplies embeddings by √d_model by itself, as we do; and it would make up positions with all sines first, so it gets our table.


# %%
def fill_linear(spec: Any, *layers: nn.Linear) -> None:
    """Give CTranslate2's linear layer the weights of ours; several are stacked, outputs first."""
    spec.weight = torch.cat([layer.weight.detach().float().cpu() for layer in layers])
    spec.bias = torch.cat([layer.bias.detach().float().cpu() for layer in layers])


def fill_norm(spec: Any, norm: LayerNorm) -> None:
    """Give CTranslate2's LayerNorm the weights of ours."""
    spec.gamma, spec.beta = (part.detach().float().cpu() for part in (norm.weight, norm.bias))


def fill_layer(spec: Any, layer: EncoderLayer | DecoderLayer) -> None:
    """Give a layer of CTranslate2's encoder or decoder the weights of ours."""
    own = layer.self_attn
    fill_linear(
        spec.self_attention.linear[0], own.project_query, own.project_key, own.project_value
    )
    fill_linear(spec.self_attention.linear[1], own.project_output)
    fill_norm(spec.self_attention.layer_norm, layer.sublayer[0].norm)
    if isinstance(layer, DecoderLayer):
        cross = layer.src_attn
        fill_linear(spec.attention.linear[0], cross.project_query)
        fill_linear(spec.attention.linear[1], cross.project_key, cross.project_value)
        fill_linear(spec.attention.linear[2], cross.project_output)
        fill_norm(spec.attention.layer_norm, layer.sublayer[1].norm)
    fill_linear(spec.ffn.linear_0, layer.feed_forward.expand)
    fill_linear(spec.ffn.linear_1, layer.feed_forward.contract)
    fill_norm(spec.ffn.layer_norm, layer.sublayer[-1].norm)


# %%
def fill_stack(spec: Any, embed: nn.Sequential, stack: Encoder | Decoder) -> None:
    """Give CTranslate2's encoder or decoder our table, our positions and our layers."""
    table = spec.embeddings[0] if isinstance(stack, Encoder) else spec.embeddings
    table.weight = embed[0].lut.weight.detach().float().cpu()
    spec.position_encodings.encodings = embed[1].pe.detach().float().cpu()
    for part, layer in zip(spec.layer, stack.layers, strict=True):
        fill_layer(part, layer)
    if isinstance(stack.norm, LayerNorm):  # pre-norm
        fill_norm(spec.layer_norm, stack.norm)


def export_ctranslate2(trained: Trained, folder: Path) -> None:
    """Write model.bin, config.json, the vocabulary and tokenizer.model for CTranslate2.

    Float32, tied tables once; `ctranslate2.Translator(folder, compute_type="int8")` may round it on
    loading. Sources are pieces without `</s>`, which it adds. Its score is ours, the log-probability
    over length^α with `</s>` counted, where its `length_penalty` is our `alpha` and its
    `min_decoding_length` is 0.
    Files of these names are replaced. Raises ValueError where the package ctranslate2 is missing.
    """
    need_packages("ctranslate2")
    from ctranslate2.specs import TransformerSpec

    model, config, processor = trained.model, trained.config, trained.tokenizer.processor
    spec = TransformerSpec.from_config(config.layers, config.heads, pre_norm=config.norm_first)
    fill_stack(spec.encoder, model.src_embed, model.encoder)
    fill_stack(spec.decoder, model.tgt_embed, model.decoder)
    fill_linear(spec.decoder.projection, model.generator.proj)

    pieces = [processor.id_to_piece(i) for i in range(len(trained.tokenizer))]
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    unk, bos, eos = (pieces[i] for i in (UNK, BOS, EOS))
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = unk, bos, eos
    spec.config.decoder_start_token, spec.config.add_source_eos = bos, True
    spec.config.layer_norm_epsilon = model.encoder.layers[0].sublayer[0].norm.eps

    spec.validate()
    spec.optimize()  # stores equal tensors once: this finds our tied tables
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    trained.tokenizer.save(folder / "tokenizer.model")


# %% [markdown]
# Its defaults are not ours. Its beam is 2 and its α is 1. It wants at least one token before `</s>`, and shares out the chance of an early `</s>` among the other tokens, so that even its scores shift a little. Told ours, it finds what we find.


# %%
def ctranslate2_search(
    folder: Path,
    pieces: Sequence[Sequence[str]],
    max_len: int,
    beam: int = 1,
    alpha: float = 0.6,
) -> list[list[str]]:
    """The best translation of each source by the files of `export_ctranslate2`, all in pieces."""
    need_packages("ctranslate2")
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), compute_type="float32")
    found = translator.translate_batch(
        [list(row) for row in pieces],
        beam_size=beam,
        length_penalty=alpha,
        max_decoding_length=max_len,
        min_decoding_length=0,
    )
    return [result.hypotheses[0] for result in found]


# %% [markdown]
# Now the check. Twenty test sentences go through three programs: ours, ONNX Runtime and CTranslate2. They add in another order, so the last bits differ; the tokens must not.
#
# **Predict.** Every step chooses among a thousand pieces. In how many of the twenty sentences will rounding tip a choice?

# %%
folder = Path(tempfile.mkdtemp())
rows = [source_ids(source, trained.tokenizer) for source, _ in test_pairs[:20]]
src = pad_rows(rows)
ours = greedy_decode(trained.model, src, padding_mask(src), max_len=60).tolist()  # (20, T)
our_texts = [trained.tokenizer.decode(row) for row in ours]
try:
    need_packages("onnx", "onnxruntime", "ctranslate2")
except ValueError as error:
    print(error)
else:
    export_onnx(trained, folder / "onnx")
    found = onnx_greedy(folder / "onnx", rows, max_len=60)
    assert found == [row[: row.index(EOS)] for row in ours]
    size = (folder / "onnx" / "weights.bin").stat().st_size
    assert size < 1.1 * 4 * sum(weight.numel() for weight in weights(trained.model).values())

    export_ctranslate2(trained, folder / "ctranslate2")
    pieces = [trained.tokenizer.pieces(source) for source, _ in test_pairs[:20]]
    found = ctranslate2_search(folder / "ctranslate2", pieces, max_len=60)
    processor = trained.tokenizer.processor
    assert [list(map(processor.piece_to_id, row)) for row in found] == [
        row[: row.index(EOS)] for row in ours
    ]
    print(f"{len(rows)} sentences, three programs, the same tokens:")
    print(processor.decode(found[0]))
shutil.rmtree(folder)

# %% [markdown]
# None. Where two tokens are almost equally likely, rounding may well decide; but greedy decoding seldom meets such a tie. The tests repeat this on 200 sentences of each shipped model, and for beams of 4: there CTranslate2's best is ours too.
#
# **Pitfall.** *What a recording freezes.* A Python number in the module's code becomes a constant in the graph. If the position passes through `int()`, every token stands for ever where the example's stood. No error: the export succeeds, the shapes fit, and the sentences are fluent nonsense. It even passes a test at the recorded position.


# %%
class FrozenPosition(OnnxDecoderStep):
    """The slip: `int` turns the position into a number, which the recording keeps."""

    def forward(self, tokens: Tensor, position: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(tokens, torch.tensor([int(position)]), *rest)


# %%
def graph_gap(model: EncoderDecoder, graph: Any, R: int, S: int, T: int) -> float:
    """The largest difference between a step's graph and `OnnxDecoderStep` at these sizes."""
    inputs = step_example(model, R, S, T)
    with torch.no_grad(), dropout_off(model):
        wanted = OnnxDecoderStep(model)(**inputs)
    session = onnx_session(graph.SerializeToString())
    taken = {part.name for part in session.get_inputs()}
    given = {name: value.numpy() for name, value in inputs.items() if name in taken}
    pairs = zip(session.run(None, given), wanted, strict=True)
    return max((torch.from_numpy(found) - right).abs().max().item() for found, right in pairs)


# %%
try:
    need_packages("onnx", "onnxruntime")
except ValueError as error:
    print(error)
else:
    graph = step_graph(trained.model)  # recorded at R = 3, S = 5, T = 2
    frozen = step_graph(trained.model, FrozenPosition)
    for T in (0, 1, 2, 7):
        right, wrong = (graph_gap(trained.model, g, R=4, S=9, T=T) < 1e-4 for g in (graph, frozen))
        print(f"{T} earlier tokens: ours {'right' if right else 'wrong'}", end=", ")
        print(f"frozen {'right' if wrong else 'wrong'}")
        assert right and wrong == (T == 2)

# %% [markdown]
# `python -m scripts.export FOLDER` writes both formats, each into a folder of its own. It needs the packages of `pip install -e '.[export]'`.

# %% [markdown]
# ## Against others
#
# > **In short.** The same weights, the same sentences in the same order, the same two cores. How many sentences a second, and where does the time go?
#
# Six programs translate a test set, end to end from token ids to token ids: the textbook's path, with `nn.Transformer` or our own modules, both recomputing the prefix; ours; Hugging Face's `MarianMTModel.generate`, which has a cache; and CTranslate2, a decoder written in C++ for this purpose, in float32 and with weights rounded to 8 bits. All get batches of similar length. All but Marian run our weights, so their BLEU shows that they did the same work. Marian knows no pre-norm; it gets the same sizes with random weights, and is made to write as many tokens as our longest output of the batch.


# %% [markdown]
# The race was run by a command (`make bench-decode`), on two threads, and is on record.
#
# **Predict.** The textbook's path recomputes the prefix. How many times faster is a decoder with a cache? And what does a program in C++ still have over one in PyTorch?

# %%
EXACT = "ours, exact stop"  # differs for a beam alone
timed = load_record("decoding-speed")
print(timed["repeat"])
decoding_speed_chart(timed)

# %%
raced = speed_frame(timed)
raced.set_index(["program", "beam"])

# %%
per_second = raced.set_index(["program", "beam"])["sentences_per_second"]
bleu_of = raced.set_index(["program", "beam"])["bleu"]
for beam in (1, 4):
    same = ["textbook", "nn.Transformer", "CTranslate2 float32", "ours"]
    assert len({bleu_of[name, beam] for name in same}) == 1  # the same weights, the same work
    assert per_second["ours", beam] > 2 * per_second["MarianMTModel", beam]
    assert per_second["ours", beam] > 10 * per_second["textbook", beam]
    ladder = ["nn.Transformer", "MarianMTModel", "ours", "CTranslate2 int8"]
    first_step, *later = (
        per_second[b, beam] / per_second[a, beam] for a, b in itertools.pairwise(ladder)
    )
    assert first_step > max(later)  # the cache is the largest step
    print(
        f"beam {beam}: {per_second['ours', beam] / per_second['textbook', beam]:.0f} times the textbook, "
        f"{per_second['ours', beam] / per_second['CTranslate2 float32', beam]:.2f} times CTranslate2 float32"
    )
    assert 0.9 < per_second["ours", beam] / per_second["CTranslate2 float32", beam] < 1.1
    assert (
        1.7 < per_second["CTranslate2 int8", beam] / per_second["CTranslate2 float32", beam] < 2.1
    )
    assert abs(bleu_of["CTranslate2 int8", beam] - bleu_of["ours", beam]) < 0.15

# %% [markdown]
# With a cache the same weights write more than ten times as many sentences a second, and more than twice as many as the best peer in PyTorch, which has a cache too. CTranslate2, written in C++ for nothing but this, is within a tenth of ours. Rounding the weights to 8 bits buys it nearly another factor of two; one text in twenty then comes out differently, and BLEU moves by a tenth of a point. (Our greedy search rounds to 8 bits as well, but only to know where to look.)
#
# Two programs that close deserve more rounds. `python -m scripts.bench.decoding --duel true --rounds 15` lets the two race alone, in turns as before:

# %%
duel = load_record("decoding-duel")
print(duel["repeat"])
alone = speed_frame(duel).set_index(["program", "beam"])["sentences_per_second"]
ahead = {beam: alone["ours", beam] / alone["CTranslate2 float32", beam] for beam in (1, 4)}
for beam, ratio in ahead.items():
    print(f"beam {beam}: {ratio:.2f} times CTranslate2 float32")
assert 1 <= ahead[1] < 1.15 and 0.9 <= ahead[4] < 1.05

# %% [markdown]
# Level in greedy decoding, and less than a tenth behind with a beam. No proof shortens a beam's work: it compares log-probabilities of different prefixes, so it needs every logit, and their sum.
#
# The race has answered two more questions on the way. In double precision all ways write the same tokens, and the tests say so. In single precision another order of sums might decide a tie differently. And the exact stop: what does it cost, and what does it find?

# %%
same_as_ours = raced.set_index(["program", "beam"])["same_as_ours"]
count = timed["sentences"]
for beam in (1, 4):
    for name in ("textbook", "nn.Transformer", "CTranslate2 float32"):
        print(f"beam {beam}, {name}: {same_as_ours[name, beam]:.0f} of {count} texts as ours")
        assert same_as_ours[name, beam] == count
changed, slower = count - same_as_ours[EXACT, 4], per_second["ours", 4] / per_second[EXACT, 4]
better = bleu_of[EXACT, 4] - bleu_of["ours", 4]
print(f"exact stop: {changed:.0f} other texts in {slower:.2f} times the time, BLEU {better:+.2f}")
assert 0.02 < changed / count < 0.06 and 1.1 < slower < 1.4 and 0 < better < 0.5

# %% [markdown]
# No tie in two thousand searches: float32 is precise enough here. And the usual rule is not quite what it seems. With a penalty of 0.6 a text that ends late can still win; to wait for it takes a sixth more time, changes four texts in a hundred, and gains a little BLEU, since the late texts are longer. It is a better search, at a price, and `--exact` switches it on.
#
# Where does our own time go? The profiler is asked on one thread, and its hundreds of rows are booked under a few headings:

# %%
decoding_account_chart(timed)

# %%
for beam, name in (("1", "greedy"), ("4", "beam 4")):
    spent = dict(timed["accounts"][beam])
    floor = timed["flops"][beam] / spent.pop("matrix_rate")
    whole = sum(spent.values())
    print(f"{name}: products at the matrix rate would take {floor / whole:.0%} of the time")
    print("   ", ", ".join(f"{kind} {seconds / whole:.0%}" for kind, seconds in spent.items()))
    assert 0.55 < floor / whole < 0.7
    assert beam == "4" or spent["products"] + spent["8-bit product"] < floor
    assert spent["attention"] == max(
        v for k, v in spent.items() if k not in ("products", "Python and the rest")
    )

# %% [markdown]
# So more than half of the time is arithmetic that no program can avoid (but for the greedy search's logits). The products run a little below the rate, since a step has few rows and finds its weights in a far cache. Attention comes next: it multiplies little, but reads all keys and values for every new token, and that is a matter of memory. The rest is many small things, each a few hundred times a batch: finding the best tokens, copying, and Python, which calls the kernels one by one. (The profiler takes its own time, and books it there.)

# %% [markdown]
# ## The command
#
# > **In short.** Others build upon a command. So it keeps three promises: one line out for each line in, whatever the lines hold; each answer as soon as there is one; and one clear line, never a traceback, where something is wrong.
#
# `python -m scripts.translate` takes texts as arguments, a file (`--input`), or standard input, and prints translations alone, with scores (`--scores`), or with the runners-up (`--nbest`). `python -m scripts.evaluate` measures a model on a corpus, or on two files.

# %% [markdown]
# ## Summary
#
# - A model gives probabilities; a search makes a sentence of them. Log-probabilities add up.
# - Greedy decoding takes the best word each time and can't go back. It must work in batches and stop at `</s>`.
# - Beam search keeps K prefixes and weighs 2K candidates. K = 1 is greedy; K wide enough is brute force, and ours equals both.
# - Likelihood favours short outputs; dividing by $T^\alpha$ balances that.
# - A cache keeps keys and values, so that a step computes one token. Each search is written once and runs with or without it; a beam's family tree replaces copying.
# - Stopping after K endings is a habit; a bound on what is unfinished makes it safe.
# - Sampling draws instead of searching, with a temperature, top-k or a nucleus.
# - Dropout must be off. Our decoders see to it.
# - BLEU is four clipped n-gram precisions and a brevity penalty, over a whole corpus of plain text. Report it with its signature.
# - A difference needs an interval, by drawing the sentences anew, and a p, by swapping outputs. Ask a test for its p between equals before you trust it. And a score needs somebody who reads the worst outputs.
#
# ## What the paper did that we don't
#
# - Its length penalty is that of Wu et al. (2016), $((5 + T)/6)^\alpha$; ours is $T^\alpha$. Both are 1 for α = 0 and grow alike.
# - It stops at input length + 50; we stop at twice the input length + 10.
# - It averages checkpoints for its reported scores. Ours are of single checkpoints unless a record says otherwise.
# - Its BLEU (27.3 and 28.4 for English to German) predates sacreBLEU and was computed on tokenised text. It can't be compared with ours: other languages, other data, other tokenisation.

# %% [markdown]
# ## Exercises

# %% [markdown]
# ### Exercise 1 · A phrase book that misleads
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# In our phrase book greedy decoding misses the likeliest sentence, and a beam of 2 finds it. Write a worse one: `misleading_table()` gives a table like `NEXT_WORD` in which a beam of 2 fails as well, and a beam of 3 succeeds. `solution("misleading_table")` shows ours.


# %%
def misleading_table() -> dict[str, dict[str, float]]:
    """A table like NEXT_WORD: beams of 1 and 2 miss its likeliest sentence, 3 finds it."""
    ...


check(misleading_table)

# %% [markdown]
# ### Exercise 2 · The paper's length penalty
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# The paper (§6.1) divides a log-probability not by $T^\alpha$ but by Wu et al.'s (2016) $\frac{(5 + T)^\alpha}{(5 + 1)^\alpha}$, with $T$ the number of tokens that were scored. Write `wu_penalty(found, alpha)` for chapter 9's `Hypothesis`. `solution("wu_penalty")` shows ours.
#
# *Further:* rank the hypotheses of a beam by it. Does any translation of this chapter change? Short texts are treated more mildly than by $T^\alpha$: where do the two part most?


# %%
def wu_penalty(found: Hypothesis, alpha: float) -> float:
    """The hypothesis's log-probability over ((5 + T)/6)^α."""
    ...


check(wu_penalty)

# %% [markdown]
# ### Exercise 3 · Typical sampling
#
# *code · difficulty ●●● · worth ●○○ · 25 minutes*
#
# The nucleus keeps the likeliest words. People rarely say the likeliest word, nor a very unlikely one: they say what is about as surprising as one expects. *Typical* sampling (Meister et al. 2023) keeps the words whose surprise $-\log p(w)$ is nearest to the distribution's entropy $H = -\sum_w p(w) \log p(w)$: the fewest such words that sum to at least `mass`. Write `typical_words(log_probs, mass, temperature)`: log-probabilities (B, V) to the probabilities (B, V) that are drawn from. The temperature comes first, as in `sharpened`. A word that was ruled out, with log-probability −∞, stays at 0. `solution("typical_words")` shows ours.


# %%
def typical_words(log_probs: Tensor, mass: float, temperature: float = 1.0) -> Tensor:
    """(B, V) to (B, V): what is drawn from, the typical words alone."""
    ...


check(typical_words)

# %% [markdown]
# ### Exercise 4 · BLEU with several references
#
# *code · difficulty ●●○ · worth ●●● · 25 minutes*
#
# A sentence has more than one good translation, and BLEU was made for several references. Write `many_references(outputs, references)`, 0 to 100, for lists of texts: `references[i]` is the list of all references of `outputs[i]`. An n-gram may match as often as it stands in the reference that has it *most* often; the reference length is that of the reference *closest* in length to the output, at a tie the shorter one. All else is as in this chapter, whole corpus, tokens 13a. `solution("many_references")` shows ours.
#
# *Further:* take this chapter's outputs, replace every "the" by "a", and compute BLEU. Then shuffle the words of each output. Which hurts more, and why?


# %%
def many_references(outputs: list[str], references: list[list[str]]) -> float:
    """BLEU of a corpus, 0 to 100, with several references for each output."""
    ...


check(many_references)

# %% [markdown]
# ### Exercise 5 · The cache as everyone has it
#
# *code · difficulty ●●● · worth ●●○ · 45 minutes*
#
# `CachedDecoding.follow` moves the family tree and not the cache. Write the usual way: each of the B · k prefixes has keys and values of its own, and `follow` copies them into the new order. Write a class with the four methods of `PrefixDecoding`, and `copied_cache(model, src, src_mask)` that makes an object of it: its log-probabilities are the same, and it computes each token once. `solution("copied_cache")` shows ours.


# %%
def copied_cache(model: EncoderDecoder, src: Tensor, src_mask: Tensor | None) -> Any:
    """A decoding at its beginning, with `step`, `logits`, `follow` and `keep`."""
    ...


check(copied_cache)

# %% [markdown]
# ### Exercise 6 · Where the rest of the time goes
#
# *project · difficulty ●●○ · worth ●●○ · 60 minutes*
#
# Profile `search_rows` with `torch.profiler` on one thread. Which share do products take, and what are the three largest of the others? Which of them could be one pass? Then hand exercise 5's cache to `Search`, and time it against `CachedDecoding` for beams of 1, 4 and 16: from which beam on does copying cost more than looking at one common memory?
#
# Next: [Chapter 11 · Looking inside](ch11_looking_inside.ipynb)
