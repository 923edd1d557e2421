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
# # Chapter 13 · Decoding fast
#
# After this chapter you can make a search many times faster, check that it finds the same texts, and say for which sizes each trick pays.
#
# | | |
# |---|---|
# | In the paper | §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 45 with the code; a minute or two to run on a CPU |
# | Before, after | [Chapter 12 · Going fast](ch12_going_fast.ipynb) · [Chapter 14 · Leaving home](ch14_leaving_home.ipynb) |
#
# *If you read only three cells:* the map of *A family tree instead of copies*, `write_and_leave`, `Screen`.
#
# Shapes: **B** batch, **T** tokens of a prefix, **D** `d_model`, **V** vocabulary; **K** the beam's width, **k** a sentence's prefixes at this step (1 at the first, then K), **L** cached tokens of all of them, **N** rows of a step (B·k).

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts import Late
from scripts.book.exercises import check
from scripts.book.figures import decoding as figures
from scripts.book.phrases import END, START, every_sentence
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask
from scripts.ch06_training import BOS, EOS, PAD
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import beam_by_hand, greedy_choice, plain_translate, texts_by_cache
from scripts.ch12_going_fast import duel
from scripts.core.models import STUDIED, load_model
from scripts.corpora.load import load_corpus

# %%
torch.set_num_threads(1)

# %% [markdown]
# ## Searches to read, searches to run
#
# > **In short.** The same translations, about ten times as fast: a cache gives over four times (chapter 8), this chapter the rest. 8 bits in every product bring another 1.5 to 1.8, and change a few texts.
#
# Chapters 6 and 8 wrote searches to be read. Each has a fast twin, which in double precision writes the same tokens (tests check it).
#
# | to read | the fast twin |
# |---|---|
# | `write_one_by_one` | `write_and_leave`, below |
# | `CopiedCache` | [`CachedDecoding`](../scripts/fast/decoding.py) |
# | `greedy_decode`, `beam_search` | [`cached_greedy`, `cached_beam_search`](../scripts/fast/searching.py) |
#
# A trick's *gain* is how many times as long the work takes without it. A **control** races a function against itself: it shows what chance does. Times are of 32-bit models, on one thread.


# %%
def gain(before: Callable[[], Any], after: Callable[[], Any], rounds: int = 24) -> float:
    """How many times as long `before` takes as `after`: the median of chapter 12's `duel`."""
    return median(duel(before, after, rounds))


# %% [markdown]
# `ways` collects ways to translate 64 captions by greedy search, in one batch. Each section adds one, with one change more than the last. *The sum* races them. Chapter 8 had two:

# %%
trained = load_model(STUDIED)
captions = [german for german, _ in load_corpus("sample")["test"][:64]]
ways = {
    "every prefix anew": partial(plain_translate, trained, captions),
    "a cache (chapter 8)": partial(texts_by_cache, trained, captions, greedy_choice),
}

# %% [markdown]
# **Predict.** The cache gains over four times. Does anything below gain more?
#
# ## What can be done once
#
# > **In short.** A search takes many small steps, and they repeat work whose result doesn't change. Do it once, before the first step.
#
# `CachedDecoding` does so in three places:
#
# - **One product of three.** Queries, keys and values are products of the same rows. Their tables, joined, take one product.
# - **Tables laid out.** oneDNN multiplies fastest with a table in an order of its own.
# - **Room.** `torch.cat` copies all old keys and values to append new ones: $T(T-1)/2$ positions in T steps. Instead, we keep empty room behind them, and double it when full: fewer than 2T positions are copied.
#
# It also has chapter 12's parts: fused kernels, and an encoder without padding. All that gains 1.9. (`cached_texts`, `pack_at` and our C come below.)

# %%
fast, searching = Late("scripts.fast.decoding"), Late("scripts.fast.searching")
kernels = Late("scripts.fast.kernels")  # imported at first use, as they import this chapter
without_c = patch("scripts.fast.compiled.loaded", lambda name: None)  # as without a compiler
sources = [source_ids(german, trained.tokenizer) for german in captions]
src = pad_rows(sources)
batch = src, padding_mask(src), 60  # (B, S), (B, 1, S), and the most tokens of a text
search = partial(searching.cached_texts, fast.made_ready(trained.model), *batch)
scored = lambda decoding, x: greedy_choice(decoding.logits(x))  # noqa: E731
ways["done once, chapter 12's parts"] = without_c(partial(search, scored, pack_at=0))

# %% [markdown]
# ## A family tree instead of copies
#
# > **In short.** After each step of a beam some prefixes are continued twice, others not at all. With a cache for each, whole caches are copied, though no key or value has changed, only *whose* it is. So let all share one cache, and note whose past each token belongs to.
#
# The shared cache holds L tokens, K more after each step. Beside it we keep `ancestors` (B, k, L): does this token belong to that prefix's past? A new token is its own ancestor (`enter`). A prefix that continues another starts with a copy of its row (`follow`).


# %%
class FamilyTree:
    """Whose past the cached tokens are: `ancestors` (B, k, L), True where a token is prefix k's."""

    def __init__(self, sources: int, device: torch.device | None = None):
        self.ancestors = torch.zeros(sources, 1, 0, dtype=torch.bool, device=device)

    def enter(self, k: int) -> None:
        """k new tokens of each sentence, one for each prefix."""
        itself = torch.eye(k, dtype=torch.bool, device=self.ancestors.device)
        itself = itself.expand(len(self.ancestors), k, k)
        self.ancestors = torch.cat((self.ancestors, itself), dim=-1)  # (B, k, L + k), a byte each

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, k), of each source's own."""
        where = origin.unsqueeze(-1).expand(-1, -1, self.ancestors.size(-1))
        self.ancestors = self.ancestors.gather(1, where)


# %% [markdown]
# In chapter 8's phrase book a beam of 3 ends with *a dog sleeps*, *a dog is*, *the hound sleeps*; `steps` has what it read before. **Predict.** Which two of the ten cached tokens are nobody's ancestors at the end?

# %%
steps = [  # a step's tokens, and which of its prefixes each survivor continues
    ("<s>", [0, 0, 0]),
    ("the a one", [1, 0, 0]),
    ("dog dog hound", [0, 0, 2]),
    ("sleeps is sleeps", [0, 1, 2]),
]
tree, cached = FamilyTree(sources=1), []
for tokens, origin in steps:
    cached += tokens.split()
    tree.enter(len(tokens.split()))
    tree.follow(torch.tensor([origin]))
figures.family_chart(tree.ancestors[0], cached)

# %% [markdown]
# *One* and the second *dog* (of *the dog*): no survivor continues them.
#
# Masked by the tree, attention gives each prefix the same as over its own tokens alone. At step T copying moves 2·K·T·D numbers in each layer, `follow` only K·L bytes. But a mask wastes something, too: it hides *strangers*, tokens of other prefixes, only after each query has met their keys. That is PyTorch's way. Our loop in C (`attend` in [`kernels.c`](../scripts/fast/kernels.c)) skips them. **Predict.** From which beam on does copying win, with PyTorch's attention and with ours?


# %%
def tree_race(K: int, T: int) -> tuple[float, float]:
    """What the tree gains over copying for beams of K prefixes, T tokens each; and a control."""
    steps = torch.randn(T, 2, 2, 8, K, 32)  # keys, values of T steps: B = 2, eight heads, d_k = 32
    shared = torch.cat([*steps], dim=3)  # (2, B, H, T·K, d_k): K tokens a step, side by side
    own = torch.stack([*steps], dim=4).transpose(2, 3).contiguous()  # (2, B, K, H, T, d_k)
    q, tree, sentence = torch.randn(2 * K, 256), FamilyTree(2), torch.arange(2).unsqueeze(1)
    origin = torch.arange(K).expand(2, K)  # all stay
    tree.ancestors = torch.eye(K, dtype=torch.bool).repeat(1, T).expand(2, K, T * K)
    copying = lambda: kernels.attend(q, own[:, sentence, origin].flatten(1, 2), None)  # noqa: E731

    def sharing() -> Tensor:
        tree.follow(origin)
        return kernels.attend(q, shared, tree.ancestors)

    torch.testing.assert_close(copying(), sharing())
    return gain(copying, sharing), gain(copying, copying)


# %%
# NBVAL_IGNORE_OUTPUT
sizes = [(K, T) for T in (8, 16, 32, 64) for K in (2, 4, 8, 16, 32)]
plain, ours = ({size: race(*size) for size in sizes} for race in (without_c(tree_race), tree_race))
assert plain[4, 32][0] > 1.1 and plain[32, 32][0] < 0.9
assert ours[16, 32][0] > 1.1 or not kernels.takes(torch.ones(1))  # else ours is PyTorch's
figures.tree_chart({"PyTorch's attention": plain, "ours in C": ours})

# %% [markdown]
# With a mask copying wins for a beam of 32, and for 16 when texts are long. With our loop it wins nowhere. Greedy search has no strangers, but the loop is faster there, too (1.15 times):

# %%
ways["attention in C"] = partial(search, scored, pack_at=0)

# %% [markdown]
# ## Finished sentences leave
#
# > **In short.** A batch goes on until its longest text ends. Until then the finished ones are computed for nothing. So let them leave (a gain of 1.3).
#
# Texts of 5, 9 and 12 tokens need 26 rows of the decoder. If all stay, 36 are computed. But to take sentences out of a cache (`keep`) means to copy it. Two things keep that cheap:
#
# - **Few rows move.** The last unfinished rows take the places of the finished ones.
# - **Not at every step.** We wait until at least a tenth of the batch has finished. (Exercise 1 asks for the best share.)


# %%
def close_gaps(going: Tensor) -> Tensor:
    """Which rows of a batch go on, by going (B,): the last of them take the ended ones' places."""
    count = int(going.sum())
    rows = torch.arange(count, device=going.device)
    # Gaps among the first `count` places, and rows behind them that go on: there are as many.
    rows[~going[:count]] = count + going[count:].nonzero().squeeze(1)
    return rows


# %% [markdown]
# New in chapter 8's `write_one_by_one` are `live`, the sources in the batch, and the last `if`, which lets the others leave.

# %%
PACK_AT = 0.9  # a batch is packed again when at most this share of it is unfinished


def write_and_leave(
    decoding: Any, src: Tensor, max_len: int, choose: Callable[..., Any], pack_at: float = PACK_AT
) -> tuple[Tensor, Tensor]:
    """One text for each source: ids (B, ≤ max_len), padded after eos, and their log-probabilities (B,).

    `choose` gives tokens (N,) and log-probabilities (N,), or None, for the decoding and its x (N, D).
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
            total[live] += log_probs.masked_fill(~going, 0.0)
        going &= chosen != EOS
        unfinished = int(going.sum())
        if unfinished == 0:
            break
        if unfinished <= pack_at * len(live):
            rows = close_gaps(going)
            decoding.keep(rows)
            live, chosen, going = live[rows], chosen[rows], going[rows]
        tokens = chosen.unsqueeze(1)
    return ids[:, : t + 1], total


# %% [markdown]
# `cached_texts` calls it with a `CachedDecoding`. With `pack_at=0` nobody leaves. **Predict.** What share of the rows is then computed for nothing?


# %%
def written(model: Any, sources: Sequence, size: int, pack_at: float) -> tuple[list, list]:
    """Greedy texts for encoded sources, in batches of `size`, and the rows x (N, D) of each step."""
    texts, steps = [], []

    def choose(decoding: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        steps.append(x)
        return greedy_choice(decoding.logits(x))

    for start in range(0, len(sources), size):
        src = pad_rows(sources[start : start + size])
        ids, _ = searching.cached_texts(model, src, padding_mask(src), 60, choose, pack_at)
        texts += [row[row != PAD].tolist() for row in ids]
    return texts, steps


# %%
precise = load_model(STUDIED)
precise.model.double()  # counts that are the same on every machine
texts, all_stay = written(precise.model, sources, 64, pack_at=0)
texts_of_leavers, they_leave = written(precise.model, sources, 64, PACK_AT)
assert texts == texts_of_leavers
ways["finished sentences leave"] = partial(search, scored)

# %%
figures.rows_chart({"all stay": all_stay, "they leave": they_leave}, texts)

# %% [markdown]
# ## Sentences of similar length, side by side
#
# > **In short.** In a mixed batch the short texts wait for the longest. Long sources tend to have long translations. So sort them by length first, and a batch's texts end nearly together.
#
# A step costs time even for one row, as it reads all weights. So fewer steps help, too. **Predict.** In batches of 16, which saves rows, and which steps: sorting or leaving?

# %%
orders = {"in the file's order": sources, "sorted by length": sorted(sources, key=len)}
for order, rows in orders.items():
    for way, pack_at in {"all stay": 0, "they leave": PACK_AT}.items():
        _, steps = written(precise.model, rows, 16, pack_at)
        print(f"{order}, {way}: {len(steps)} steps, {sum(map(len, steps)):,} rows")

# %% [markdown]
# Leaving saves nearly all rows that the texts don't need. Sorting saves steps; rows only if nobody leaves.
#
# ## The largest of many logits
#
# > **In short.** A beam wants the 2K best of 8,192 logits (2K, since K of them may end: chapter 8), and `topk` searches all of them. Take the largest of each block of 64 first, and search only the blocks that can hold one of the best.
#
# For the m largest, take the m blocks with the largest maxima. Each of these m maxima is at least as large as every logit in any other block. So m largest logits lie in these blocks.


# %%
BLOCK = 64  # neighbouring logits of which the largest is found first


def best_logits(logits: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m largest of each row of logits (N, V) and where they stand, (N, m) each, as `topk` gives.

    They lie in the m blocks with the largest maxima. Where these are half of the row, `topk`
    searches all of it. (Of equal logits it may name others.)
    """
    N, V = logits.shape
    if V % BLOCK or 2 * m * BLOCK >= V:
        return logits.topk(min(m, V), dim=-1)
    blocks = logits.view(N, V // BLOCK, BLOCK)
    chosen = blocks.amax(dim=-1).topk(m, dim=-1).indices  # (N, m)
    near = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, BLOCK))  # (N, m, 64)
    top, place = near.flatten(1).topk(m, dim=-1)  # (N, m) each
    return top, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK


# %% [markdown]
# For the 8 largest of 8,192 logits, the last `topk` searches 512, but there are more calls. **Predict.** From which vocabulary on do blocks pay? And for the largest alone, or for 64?

# %%
# NBVAL_IGNORE_OUTPUT
gains = {f"top {m}": {} for m in (1, 8, 64)} | {"control": {}}
for V in (2**power for power in range(9, 17)):
    logits = torch.randn(32, V)
    for m in (1, 8, 64):
        gains[f"top {m}"][V] = gain(partial(logits.topk, m), partial(best_logits, logits, m))
    gains["control"][V] = gain(partial(logits.topk, m), partial(logits.topk, m))
assert gains["top 1"][512] < 0.8 and gains["top 8"][65536] > 1.5
figures.gains_chart("blocks", gains)

# %% [markdown]
# For the largest alone they pay from 2,048 logits on, for 8 from 4,096, for 64 only from 32,768. With a C compiler our searches use `best_of_rows`, which takes blocks, too, but in one pass. In a beam of 4 that is 6% of the time (*accounts* in [the record](../results/decoding-speed.json)).
#
# Greedy search needs only the largest logit, and no probabilities (a gain of 1.07):

# %%
by_blocks = lambda decoding, x: (best_logits(decoding.logits(x), 1)[1][:, 0], None)  # noqa: E731
ways["only the largest, by blocks"] = partial(search, by_blocks)

# %% [markdown]
# ## Few bits propose, a bound decides
#
# > **In short.** Greedy decoding wants one token, but computes exact logits for all 8,192. Compute coarse ones instead, which is cheap. Then compute exactly only the few that may be the largest, and prove that no other can be. (The whole search gains 1.06.)
#
# The logits are a step's largest product: $x$ (N, D) with the table $W$ (V, D). In 8 bits the table takes a quarter of the memory, and a processor multiplies four numbers in place of one.
#
# **Round.** Each row has its unit: its largest number becomes 127 units. Whole numbers are multiplied and added without any error; the units come last.


# %%
def in_8_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (…, D) as whole numbers from −127 to 127, times a unit for each row (…, 1)."""
    unit = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127  # a row of zeros stays one
    return (rows / unit).round(), unit


def product_in_8_bits(linear: nn.Linear, x: Tensor) -> Tensor:
    """x·Wᵀ + b, (…, D) to (…, V), from rounded rows of x and W."""
    (whole, unit), (whole_w, unit_w) = in_8_bits(x), in_8_bits(linear.weight.detach())
    sums = whole @ whole_w.T  # (…, V): exact, as floats hold whole numbers up to 2²⁴
    return sums * (unit * unit_w.T) + linear.bias


# %% [markdown]
# **Derive.** How wrong can it be? With $\hat x$ and $\hat w$ for the rounded rows, the error is $x\cdot(w-\hat w) + (x-\hat x)\cdot\hat w$. A dot product is never larger than the product of the two lengths (Cauchy and Schwarz):
#
# $$ |x\cdot w - \hat x\cdot\hat w| \;\le\; \lVert x\rVert\,\lVert w-\hat w\rVert + \lVert x-\hat x\rVert\,\lVert\hat w\rVert \;\le\; e $$
#
# With the table's largest $\lVert w-\hat w\rVert$ and $\lVert\hat w\rVert$, a row has one bound $e$ for all tokens. **Bound.** A token whose coarse value lies more than $2e$ below the best can't be the largest, not even if it is $e$ too small and the best $e$ too large.


# %%
class Screen:
    """Finds the largest of a linear map's outputs: `coarse(x)` proposes, a bound decides."""

    def __init__(self, linear: nn.Linear, coarse: Callable[[Tensor], Tensor]):
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()  # (V, D), (V,)
        whole, unit = in_8_bits(self.weight)
        self.lost = (self.weight - unit * whole).norm(dim=1).max()  # ‖w − ŵ‖ at most
        self.size, self.coarse = (unit * whole).norm(dim=1).max(), coarse  # ‖ŵ‖ at most

    def error(self, x: Tensor) -> Tensor:
        """How wrong the coarse outputs of x (N, D) can be: e for each row, (N, 1)."""
        whole, unit = in_8_bits(x)
        lengths, lost = (rows.norm(dim=1, keepdim=True) for rows in (x, x - unit * whole))
        return 1.001 * (lengths * self.lost + lost * self.size)  # norms are rounded, too

    def candidates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which outputs of x (N, D) may be their row's largest: rows and places, (P,) each."""
        blocks = self.coarse(x).unflatten(1, (-1, BLOCK))  # (N, V / 64, 64)
        peaks = blocks.amax(dim=-1)  # (N, V / 64): few, so we look at them first
        least = peaks.amax(dim=1, keepdim=True) - 2 * self.error(x)  # (N, 1)
        rows, block = (peaks >= least).nonzero(as_tuple=True)
        which, column = (blocks[rows, block] >= least[rows]).nonzero(as_tuple=True)
        return rows[which], block[which] * BLOCK + column

    def largest(self, x: Tensor) -> Tensor:
        """The place of the largest output for each row of x (N, D): (N,)."""
        rows, places = self.candidates(x)
        if len(rows) > BLOCK * len(x):  # hardly anything is excluded
            return (x @ self.weight.T + self.bias).argmax(dim=1)
        exact = torch.linalg.vecdot(F.embedding(places, self.weight), x[rows]) + self.bias[places]
        best = exact.new_full((len(x),), -torch.inf).scatter_reduce_(0, rows, exact, "amax")
        wins = exact == best[rows]
        return places.new_zeros(len(x)).index_copy_(0, rows[wins], places[wins])


# %% [markdown]
# **Check.** In our captions' rows no error may exceed the bound. **Predict.** How often is the best-looking token wrong? How many tokens are left over?

# %%
x, layer = torch.cat(they_leave), precise.model.generator.proj.requires_grad_(False)  # x (N, D)
screen = Screen(layer, partial(product_in_8_bits, layer))
coarse, exact, error = screen.coarse(x), layer(x), screen.error(x)  # (N, V) twice, (N, 1)
share = ((coarse - exact).abs() / error).max()
assert share <= 1
misled = (coarse.argmax(dim=1) != exact.argmax(dim=1)).nonzero().squeeze(1)
print(f"largest error: {share:.2f} of its bound; misled in {len(misled)} of {len(x)} rows")
counts = screen.candidates(x)[0].bincount()
print(f"left over of 8,192 tokens: {counts.double().mean():.1f} a row, {counts.max()} at most")

# %%
figures.bound_chart(coarse[misled[0]], exact[misled[0]], error[misled[0]].item())

# %% [markdown]
# The best-looking token is rarely wrong. `Packed8` uses the processor's instructions for 8 bits; its rival `Packed` multiplies 32. **Predict.** For how many rows does the screen pay?

# %%
# NBVAL_IGNORE_OUTPUT
layer = trained.model.generator.proj.requires_grad_(False)  # in 32 bits
best = lambda product, x: kernels.best_of_rows(product(x), 1, total=False)[1][:, 0]  # noqa: E731
screen = Screen(layer, fast.Packed8(layer))
by_32, by_8 = partial(best, fast.Packed(layer)), partial(best, screen.coarse)
finders = {"8 bits": by_8, "with a proof": screen.largest, "control": by_32}
gains = {name: {} for name in finders}
for N in (1, 2, 4, 8, 16, 32, 64, 128):
    rows = x[:N].float()
    assert screen.largest(rows).equal(by_32(rows))
    for name, find in finders.items():
        gains[name][N] = gain(partial(by_32, rows), partial(find, rows), 96)
assert gains["with a proof"][128] > 1.1 or not fast.fast_in_8_bits()
figures.gains_chart("screen", gains)

# %% [markdown]
# Our greedy search uses it from 4 rows on (at 32 it gains nothing). A beam can't: it wants probabilities, whose denominator needs every logit.

# %%
ways["few bits propose"] = partial(search, searching.likeliest)

# %% [markdown]
# ## Eight bits in every product
#
# > **In short.** All other products still multiply 32 bits. Round what goes into every product with a table, and give up the proof. That is 1.5 to 1.8 times as fast (*Against others*), and a few texts change.
#
# Attention, norms and sums stay as they are. **Predict.** How many of 64 texts change?

# %%
rounded = load_model(STUDIED)
rounded.model.double()
for part in rounded.model.modules():
    if isinstance(part, nn.Linear):
        part.forward = partial(product_in_8_bits, part)
translated = [texts_by_cache(model, captions, greedy_choice) for model in (precise, rounded)]
changed = [texts for texts in zip(captions, *translated, strict=True) if texts[1] != texts[2]]
print(f"{len(changed)} of {len(captions)} change. Two of them:\n")
print(*map("\n".join, changed[:2]), sep="\n\n")

# %% [markdown]
# Both were wrong before, too. `Packed8` computes the same, fast. `python -m scripts.translate` uses it where that is so.

# %%
model_8 = fast.made_ready(trained.model, "int8")
ways["8 bits in every product"] = partial(searching.cached_greedy, model_8, *batch)

# %% [markdown]
# ## The sum
#
# > **In short.** The cache gains most, then what is done once, and 8 bits.

# %%
# NBVAL_IGNORE_OUTPUT
gains = {name: gain(ways[before], ways[name], 8) for before, name in pairwise(ways)}
assert max(gains, key=gains.get) == "a cache (chapter 8)"
first, _, *others = ways.values()
controls = [gain(way, way, 8) for way in others]
figures.waterfall_chart(gains, gain(first, others[-1], 4), controls)

# %% [markdown]
# By the clock, on two threads and 100 sentences, [the record](../results/decoding-speed.json) has 8.6 times as fast for greedy search in 32 bits, 11.5 for a beam of 4; in 8 bits 14.5 and 20.1.
#
# ## When may a beam stop?
#
# > **In short.** Chapter 8's beam stops after K endings, and can miss a better text that is still being written. So ask how good such a text can become, and go on while it can win.
#
# A phrase book for which that rule fails, with a beam of 2 and α = 0. **Predict.** Which text is the best of all? Does the beam drop it?

# %%
phrases = {START: {"so": 0.45, END: 0.40, "no": 0.15}, "so": {"be": 1.0}, "be": {"it": 1.0}}
phrases |= {"it": {END: 1.0}, "no": {END: 1.0}}
ended, steps = beam_by_hand(phrases, beam=2)
print("ended:", ended, " still being written:", *steps[-1][2][0])  # the best prefix at its stop
print("best of all:", every_sentence(phrases)[0])

# %% [markdown]
# The beam never dropped the best text: it stopped too early. An unfinished prefix has a log-probability $s \le 0$. What follows can only lower it, and the divisor $T^\alpha$ is largest at the length limit. So no text that begins with this prefix can score above
#
# $$\text{hope} = \frac{s}{T_{\max}^{\,\alpha}}$$
#
# If the K-th best finished score is at least the hope of the best prefix in the beam, nothing in the beam can enter the list. (A prefix that the beam has dropped might still have led to a better one.)


# %%
def hope(log_prob: float | Tensor, max_len: int, alpha: float) -> float | Tensor:
    """The score that no text can exceed if it begins with a prefix of this log-probability."""
    return log_prob / max_len**alpha


# %% [markdown]
# **Pitfall.** Dividing by the length *so far* looks natural, but is no bound. With α = 1, a prefix of two tokens and $s=-2$ would hope for −1. Eight more tokens of probability 0.9 lower $s$ to −2.84, and raise the score to −0.28.
#
# `cached_beam_search(…, exact=True)` stops by this rule. On 1,000 Multi30k sentences, with a beam of 4 and α = 0.6:

# %%
timed = load_record("decoding-speed")
figures.stop_table(timed)

# %% [markdown]
# 38 texts change, for 28% more time. Whether +0.34 BLEU is chance isn't tested here.
#
# ## Against others
#
# > **In short.** On whole files ours is clearly faster than CTranslate2, a C++ program, in 8 bits with a beam (1.2 times); the other medians are within 7%. Sentence by sentence, ours is slower.
#
# Both translate Multi30k, on two threads, in turns. CTranslate2 gets its fastest batch size of five, and its time includes turning ids into pieces and back. Ours takes as few batches as memory allows.

# %%
figures.pace_chart(timed)

# %%
figures.race_table(timed)

# %% [markdown]
# *Same texts*: as ours in 32 bits. In 8 bits 4 to 6 of ours in a hundred change, and BLEU by less than 0.2.
#
# **One sentence at a time**, a step has few rows. Then one call of [C](../scripts/fast/kernels.py) runs all layers of the decoder. Milliseconds on one thread (p50: the median of 200 sentences; p99: one in a hundred takes longer):

# %%
figures.alone_table(timed)

# %% [markdown]
# ## Summary
#
# - Do once what doesn't change between steps.
# - Finished sentences leave the batch. Sorting by length lets them end together.
# - A beam's cache needn't move: a matrix of ancestors says whose it is.
# - To find the largest of many logits, look at blocks first, or let few bits propose and a bound decide.
# - K endings don't prove that a beam is done. A bound on its best prefix does.
#
# ## What the paper did that we don't
#
# It allows an output as long as the input plus 50 (§6.1). Ours allows twice the batch's longest input plus 10.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · When to pack
#
# *code · difficulty ●○○ · worth ●●○ · 15 minutes*
#
# `write_and_leave` packs when at most `pack_at` of the batch's rows are unfinished. Suppose that packing costs as much as `packing` rows. What does a batch cost whose texts have `lengths` tokens? Count the rows of every step, and the packings; after the last step nothing is packed. *Further:* for our 64 `texts` and `packing=10`, which `pack_at` is cheapest? (`solution("decoding_cost")` shows ours.)


# %%
def decoding_cost(lengths: Sequence[int], pack_at: float, packing: float) -> float:
    """Rows computed for texts of `lengths` tokens, plus `packing` each time that the batch is packed."""
    ...


check(decoding_cost)

# %% [markdown]
# ### Exercise 2 · Back through the family
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# A beam needn't copy its ids either. Keep each step's tokens (B, K) and origins (B, K), and read the texts at the end. `tokens[t, b, j]` continues the prefix that stood at place `origins[t, b, j]` after step t − 1. `origins[0]` is all zero, for `<s>`. Return the texts (B, K, T) of the last step's K prefixes. (`solution("trace_back")` shows ours.)


# %%
def trace_back(tokens: Tensor, origins: Tensor) -> Tensor:
    """Tokens and origins (T, B, K) of a beam to the texts (B, K, T) of its last prefixes."""
    ...


check(trace_back)

# %% [markdown]
# Next: [Chapter 14 · Leaving home](ch14_leaving_home.ipynb)
