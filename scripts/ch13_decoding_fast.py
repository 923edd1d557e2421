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
# | Time | 20 minutes to read, 45 with the code; two minutes to run on a CPU |
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
from scripts.core.products import affine
from scripts.corpora.load import load_corpus

# %%
torch.set_num_threads(1)

# %% [markdown]
# ## Searches to read, searches to run
#
# > **In short.** The same translations, about 3 times as fast as with chapter 8's cache, and 9 to 15 times as fast as without it (*The sum*). Rounding every product to 8 bits gains more, but changes some texts.
#
# Chapters 6 and 8 wrote searches to be read. Each has a fast twin, which in double precision writes the same tokens (tests check it).
#
# | to read | the fast twin |
# |---|---|
# | `write_one_by_one` | `write_and_leave`, below |
# | `CopiedCache` | [`CachedDecoding`](../scripts/fast/decoding.py) |
# | `greedy_decode`, `beam_search` | [`cached_greedy`, `cached_beam_search`](../scripts/fast/searching.py) |
#
# A trick's *gain* is how many times as long the work takes without it. A **control** races a function against itself: it shows what chance does. Times are of 32-bit models, on one thread unless the text says two.


# %%
def gain(before: Callable[[], Any], after: Callable[[], Any], rounds: int = 24) -> float:
    """How many times as long `before` takes as `after`: the median of chapter 12's `duel`."""
    return median(duel(before, after, rounds))


# %% [markdown]
# `ways` collects ways to translate 64 captions by greedy search, in one batch. Most sections add one, on top of the last. *The sum* races them. Chapter 8 had two:

# %%
trained = load_model(STUDIED)
trained.model.requires_grad_(False)
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
# - **One product of three.** Queries, keys and values are products of the same rows. Their weight matrices (*tables*), joined, take one product.
# - **Tables laid out.** oneDNN wants a table's numbers in an order of its own. They are put into it once.
# - **Room.** `torch.cat` copies all old keys and values to append new ones: $T(T-1)/2$ positions in T steps. Instead, we keep empty room behind them, and double it when full: fewer than 2T positions are copied.
#
# It also has chapter 12's parts: fused kernels, and an encoder without padding.
#
# Chapter 8 multiplied by `F.linear`, so by another library (chapter 11). To see what oneDNN gains alone, we first give it to chapter 8's cache. Two later tricks are still off: our loops in C (`without_c`), and sentences that leave (`pack_at=0`).

# %%
by_onednn = patch.object(nn.Linear, "forward", lambda m, x: affine(x, m.weight, m.bias, True))
ways["products by oneDNN"] = by_onednn(ways["a cache (chapter 8)"])

# %%
fast, searching = Late("scripts.fast.decoding"), Late("scripts.fast.searching")
kernels = Late("scripts.fast.kernels")  # imported at first use, as they import this chapter
without_c = patch("scripts.fast.compiled.loaded", lambda name: None)  # as without a compiler
src = pad_rows([source_ids(german, trained.tokenizer) for german in captions])
batch = src, padding_mask(src), 60  # (B, S), (B, 1, S), and the most tokens of a text
ready = fast.made_ready(trained.model)
search = partial(searching.cached_texts, ready, *batch)
scored = lambda decoding, x: greedy_choice(decoding.logits(x))  # noqa: E731
ways["done once, chapter 12's parts"] = without_c(partial(search, scored, pack_at=0))

# %% [markdown]
# ## A family tree instead of copies
#
# > **In short.** After each step of a beam some prefixes are continued twice, others not at all. With a cache for each, whole caches are copied, though no key or value has changed. So let all prefixes share one cache, and note which of its tokens each may use.
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
# In chapter 8's phrase book a beam of 3 ends with *a dog sleeps*, *a dog is*, *the hound sleeps*. `steps` has each step's tokens, and which of them go on. **Predict.** Which two of the ten cached tokens are nobody's ancestors at the end?

# %%
steps = [  # a step's tokens, and which of them each survivor continues
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
# Masked by the tree, attention gives each prefix the same as over its own tokens alone. At step T copying moves up to 2·K·T·D numbers in each layer, `follow` only K·L bytes. PyTorch's attention hides *strangers*, tokens of other prefixes, only after each query has met their keys. Our loop in C (`attend` in [`kernels.c`](../scripts/fast/kernels.c)) skips them.
#
# The rival, [`copying_beam_search`](../scripts/fast/copying.py), gives each prefix a cache of its own, with the source's keys and values, and copies only what moves. **Predict.** Does the tree gain more in narrow beams, or in wide ones?

# %%
# NBVAL_IGNORE_OUTPUT
copying = Late("scripts.fast.copying").copying_beam_search
sharing = searching.cached_beam_search
stay = patch("scripts.fast.searching.PACK_AT", 0)  # no sentence leaves
small_batch = src[:8], padding_mask(src[:8]), 60
for K in (2, 8, 32):
    by_tree = stay(partial(sharing, ready, *small_batch, K))
    gained = gain(partial(copying, ready, *small_batch, K), by_tree, 6)  # its sentences stay, too
    print(f"beam of {K}: the tree gains {gained:.2f}; control {gain(by_tree, by_tree, 6):.2f}")
assert gained > 1.1  # the widest

# %% [markdown]
# More in wide ones, with our loop in C. (The rival also reads the source's keys and values once for each prefix. So the copies aren't the only cause.)
#
# ## Finished sentences leave
#
# > **In short.** A batch goes on until its longest text ends. So let finished ones leave.
#
# Texts of 5, 9 and 12 tokens need 26 rows of the decoder. If all stay, 36 are computed. But to take sentences out of a cache (`keep`) means to copy it. Two things keep it cheap:
#
# - **Few rows move.** The last unfinished rows take the places of the finished ones.
# - **Not at every step.** We wait until at least a tenth of the batch has finished.


# %%
def close_gaps(going: Tensor) -> Tensor:
    """Which rows of a batch go on, by going (B,): the last of them take the ended ones' places."""
    count = int(going.sum())
    rows = torch.arange(count, device=going.device)
    # Gaps among the first `count` places, and rows behind them that go on: there are as many.
    rows[~going[:count]] = count + going[count:].nonzero().squeeze(1)
    return rows


# %% [markdown]
# New beside chapter 8's `write_one_by_one`: `live` names the sources in the batch, and the last `if` lets the others leave. `choose` gets the decoding and its last layer's rows x (N, D): it decides which logits it needs.

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
# `cached_texts` calls it with a `CachedDecoding`. **Predict.** If all stay, what share of the rows is computed for nothing?


# %%
def written(model: Any, src: Tensor, pack_at: float) -> tuple[list, list]:
    """Greedy texts for sources src (B, S), and the rows x (N, D) of each step."""
    steps = []

    def choose(decoding: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        steps.append(x)
        return greedy_choice(decoding.logits(x))

    ids, _ = searching.cached_texts(model, src, padding_mask(src), 60, choose, pack_at)
    return [row[row != PAD].tolist() for row in ids], steps


# %%
precise = load_model(STUDIED)
precise.model.double().requires_grad_(False)  # counts that are the same on every machine
texts, all_stay = written(precise.model, src, pack_at=0)
_, they_leave = written(precise.model, src, PACK_AT)
ways["finished sentences leave"] = without_c(partial(search, scored))

# %%
figures.rows_chart({"all stay": all_stay, "they leave": they_leave}, texts)

# %% [markdown]
# 900 rows do, in place of 1,408. Next comes our C: its attention, and one call for all layers when few rows are left:

# %%
ways["our C"] = partial(search, scored)

# %% [markdown]
# ## The largest of many logits
#
# > **In short.** A beam wants the 2K best of 8,192 logits (2K, since K of them may end: chapter 8), and `topk` searches all of them. Take the largest of each block of 64 first, and search only the blocks that can hold one of the best.
#
# For the m largest, take the m blocks with the largest maxima. Each of these m maxima is at least as large as every logit in any other block. So m largest logits lie in these blocks.


# %%
BLOCK = 64  # neighbouring logits of which the largest is found first


def best_logits(logits: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m largest of each row of logits (N, V) and where they stand, (N, m) each, as `topk` gives.

    They lie in the m blocks with the largest maxima. (Of equal logits `topk` may name others.)
    """
    N, V = logits.shape
    if V % BLOCK or 8 * m * BLOCK > V:  # the blocks would be over an eighth of the row
        return logits.topk(min(m, V), dim=-1)
    blocks = logits.view(N, V // BLOCK, BLOCK)
    chosen = blocks.amax(dim=-1).topk(m, dim=-1).indices  # (N, m)
    near = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, BLOCK))  # (N, m, 64)
    top, place = near.flatten(1).topk(m, dim=-1)  # (N, m) each
    return top, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK


# %% [markdown]
# For the 8 largest of 8,192 logits, the last `topk` searches 512, but there are more calls. **Predict.** From which vocabulary on do blocks pay? And for the 64 largest?

# %%
# NBVAL_IGNORE_OUTPUT
gains = {"top 8": {}, "top 64": {}, "control": {}}
for V in (2**power for power in range(9, 17)):
    logits = torch.randn(32, V)
    for m in (8, 64):
        gains[f"top {m}"][V] = gain(partial(logits.topk, m), partial(best_logits, logits, m))
    gains["control"][V] = gain(partial(logits.topk, m), partial(logits.topk, m))
assert gains["top 8"][65536] > 1.5
figures.gains_chart("blocks", gains)

# %% [markdown]
# For 8 they pay from 4,096 logits on, for 64 from 32,768. Below, `best_logits` calls `topk`. (Put 4 for the 8 in its `if`, and blocks lose at 2,048.) With a C compiler our searches use `best_of_rows`: blocks, and the sum that probabilities need, in C.
#
# Greedy search needs no probabilities, only the largest logit:

# %%
ways["no probabilities"] = partial(search, lambda run, x: (run.logits(x).argmax(dim=1), None))

# %% [markdown]
# ## Few bits propose, a bound decides
#
# > **In short.** Greedy decoding wants one token, but computes exact logits for all 8,192. Compute coarse ones instead, which is cheap. Then compute exactly only the few that may be the largest, and prove that no other can be.
#
# The logits are a step's largest product: $x$ (N, D) with the table $W$ (V, D). In 8 bits a processor multiplies four numbers in place of one.
#
# **Round.** Each row has a unit: its largest absolute value, divided by 127. Each number becomes a whole number of units. Whole numbers are multiplied and added without any error; we multiply by the units at the end.


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
        if len(rows) > BLOCK * len(x):  # too many to compute one by one
            return (x @ self.weight.T + self.bias).argmax(dim=1)
        exact = torch.linalg.vecdot(F.embedding(places, self.weight), x[rows]) + self.bias[places]
        best = exact.new_full((len(x),), -torch.inf).scatter_reduce_(0, rows, exact, "amax")
        wins = exact == best[rows]
        return places.new_zeros(len(x)).index_copy_(0, rows[wins], places[wins])


# %% [markdown]
# **Check.** In our captions' rows no error may exceed the bound. **Predict.** How often is the best-looking token wrong? How many tokens are left over?

# %%
x = torch.cat(they_leave)  # (N, D)
layer = precise.model.generator.proj
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
# [`Packed8`](../scripts/fast/decoding.py) is this product with the processor's instructions for 8 bits; `Packed`, its rival, multiplies in 32 bits. **Predict.** For how many rows does the screen pay?

# %%
# NBVAL_IGNORE_OUTPUT
layer = trained.model.generator.proj  # in 32 bits
best = lambda product, x: kernels.best_of_rows(product(x), 1, total=False)[1][:, 0]  # noqa: E731
screen = Screen(layer, fast.Packed8(layer))
by_32 = partial(best, fast.Packed(layer))
finders = {"8 bits": partial(best, screen.coarse), "with a proof": screen.largest, "control": by_32}
gains = {name: {} for name in finders}
for N in (1, 2, 4, 8, 16, 32, 64, 128):
    rows = x[:N].float()
    assert screen.largest(rows).equal(by_32(rows))
    for name, find in finders.items():
        gains[name][N] = gain(partial(by_32, rows), partial(find, rows), 96)
assert gains["with a proof"][128] > 1.1 or not fast.fast_in_8_bits()
figures.gains_chart("screen", gains)

# %% [markdown]
# The proof costs about half of what 8 bits gain. (Up to 16 rows our C multiplies 8 bits, above PyTorch.) It pays from 8 rows on, so our greedy search uses it from there. A beam can't: it wants probabilities, whose denominator needs every logit.

# %%
ways["few bits propose"] = partial(search, searching.likeliest)

# %% [markdown]
# ## Eight bits in every product
#
# > **In short.** All other products still multiply 32 bits. Round what goes into every product with a table, and give up the proof. That is about 1.5 to 1.8 times as fast (*Against others*), but some texts change.
#
# **Predict.** How many of 64 texts change?

# %%
rounded = load_model(STUDIED)
rounded.model.double()
for part in rounded.model.modules():
    if isinstance(part, nn.Linear):
        part.forward = partial(product_in_8_bits, part)
translated = [texts_by_cache(model, captions, greedy_choice) for model in (precise, rounded)]
changed = [triple for triple in zip(captions, *translated, strict=True) if triple[1] != triple[2]]
print(f"{len(changed)} of {len(captions)} change. Two of them (source, exact, 8 bits):\n")
print(*map("\n".join, changed[:2]), sep="\n\n")

# %% [markdown]
# Both were wrong before. `Packed8` rounds in the same way, fast. `python -m scripts.translate` uses it where 8 bits are fast.

# %%
model_8 = fast.made_ready(trained.model, "int8")
ways["8 bits in every product"] = partial(searching.cached_greedy, model_8, *batch)

# %% [markdown]
# ## The sum
#
# > **In short.** The cache gains most. All exact ways write the same texts.

# %%
beams = {
    "a cache for each prefix": without_c(partial(copying, ready, *batch)),
    "a family tree": without_c(stay(partial(sharing, ready, *batch))),
    "finished sentences leave": without_c(partial(sharing, ready, *batch)),
    "our C": partial(sharing, ready, *batch),
    "8 bits in every product": partial(sharing, model_8, *batch),
}
plain, cached, onednn, *others, _ = ways.values()  # the last, in 8 bits, changes texts
expected = plain()
assert cached() == onednn() == expected
for way in others:
    assert [trained.tokenizer.decode(row) for row in way()[0].tolist()] == expected
expected, *others, _ = [[best.ids for best, *_ in way()] for way in beams.values()]
assert all(texts == expected for texts in others)

# %%
# NBVAL_IGNORE_OUTPUT
races = []
for contest, rounds in ((ways, 8), (beams, 3)):
    first, _, *others = contest.values()
    gains = {new: gain(contest[old], contest[new], rounds) for old, new in pairwise(contest)}
    controls = [gain(way, way, rounds) for way in others]
    races.append((gains, gain(first, others[-1], 2), controls))
assert max(races[0][0], key=races[0][0].get) == "a cache (chapter 8)"
figures.waterfall_chart(*races)

# %% [markdown]
# On two threads, by the clock, one round of 100 sentences ([the record](../results/decoding-speed.json)): about 9 times as fast as chapter 8 without a cache for greedy search, 12 for a beam of 4; in 8 bits 14 and 20.
#
# ## When may a beam stop?
#
# > **In short.** Chapter 8's beam stops after K endings, and can miss a better text that is still being written. So ask how good such a text can become, and go on while it can win.
#
# A phrase book for which that rule fails, with a beam of 2 and α = 0. **Predict.** Which text is the best of all? Does the beam drop it?

# %%
phrases = {START: {"so": 0.45, END: 0.40, "no": 0.15}, "so": {"be": 1.0}, "be": {"it": 1.0}}
phrases |= {"it": {END: 1.0}, "no": {END: 1.0}}
ended, beam_steps = beam_by_hand(phrases, beam=2)
print("ended:", ended, " still being written:", *beam_steps[-1][2][0])
print("best of all:", every_sentence(phrases)[0])

# %% [markdown]
# The beam never dropped the best text: it stopped too early. An unfinished prefix has a log-probability $s \le 0$. What follows can only lower it, and the divisor $T^\alpha$ is largest at the length limit. So no text that begins with this prefix can score above
#
# $$\text{hope} = \frac{s}{T_{\max}^{\,\alpha}}$$
#
# If the K-th best finished score is at least the hope of the best prefix in the beam, nothing in the beam can become one of the K best. (A prefix that the beam has dropped might still have led to a better one.)


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
# 38 texts change, for a fifth to a third more time. The +0.34 BLEU may be chance.
#
# ## Against others
#
# > **In short.** On whole files ours is clearly faster than CTranslate2, a C++ program, in 8 bits with a beam (1.2 times); the other speeds differ by about a tenth at most. Sentence by sentence, ours is slower.
#
# On two threads, in turns. CTranslate2 gets the fastest of five batch sizes; its time includes ids to pieces and back. Ours takes as few batches as memory allows.

# %%
figures.race_table(timed)

# %% [markdown]
# *Rounds*: our speed over CTranslate2's, the lowest and the highest of five rounds. No control ran, but ours in 8 bits with a beam leads in every round.
#
# *Same texts*: as ours in 32 bits. In 8 bits 4 to 6 of ours in a hundred change, and BLEU by less than 0.2.
#
# **One sentence at a time**, each step has few rows. Milliseconds on one thread (p50: the median of 200 sentences; p99: one in a hundred takes longer):

# %%
figures.alone_table(timed)

# %% [markdown]
# ## Summary
#
# - Do once what doesn't change between steps.
# - Finished sentences leave the batch.
# - A beam's cache needn't move: a matrix of ancestors says who may use which token.
# - To find the largest of many logits, look at blocks first, or let few bits propose and a bound decide.
# - K endings don't prove that a beam is done. A bound on its best prefix does.
#
# ## What the paper did that we don't
#
# It allows an output as long as the input plus 50 (§6.1). Ours allows twice the batch's longest input plus 10.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong. `solution`, from `scripts.book.exercises`, shows ours.
#
# ### Exercise 1 · When to pack
#
# *code · difficulty ●○○ · worth ●●○ · 15 minutes*
#
# `write_and_leave` packs when at most `pack_at` of the batch's rows are unfinished. Suppose that packing costs as much as `packing` rows. What does a batch cost whose texts have `lengths` tokens? Count the rows of every step, and the packings; after the last step nothing is packed. *Further:* for our 64 `texts` and `packing=10`, which `pack_at` is cheapest? (`solution("decoding_cost")`)


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
# A beam needn't copy its ids either. Keep each step's tokens (B, K) and origins (B, K), and read the texts at the end. `tokens[t, b, j]` continues the prefix that stood at place `origins[t, b, j]` after step t − 1. `origins[0]` is all zero, for `<s>`. Return the texts (B, K, T) of the last step's K prefixes. (`solution("trace_back")`)


# %%
def trace_back(tokens: Tensor, origins: Tensor) -> Tensor:
    """Tokens and origins (T, B, K) of a beam to the texts (B, K, T) of its last prefixes."""
    ...


check(trace_back)

# %% [markdown]
# Next: [Chapter 14 · Leaving home](ch14_leaving_home.ipynb)
