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
# After this chapter you can make a search many times faster, check that it finds the same texts, and say when each trick pays.
#
# | | |
# |---|---|
# | In the paper | §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 45 with the code; 90 seconds to run on a CPU |
# | Before, after | [Chapter 12 · Going fast](ch12_going_fast.ipynb) · [Chapter 14 · Leaving home](ch14_leaving_home.ipynb) |
#
# *If you read only three cells:* the family map, `write_and_leave`, `Screen`.
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
from statistics import median
from typing import Any

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
fast = Late("scripts.fast.decoding")  # imported at first use, as it imports this chapter
searching, rivals = Late("scripts.fast.searching"), Late("scripts.fast.copying")

# %% [markdown]
# ## Searches to read, searches to run
#
# > **In short.** Our fast searches write chapter 8's texts, 2 to 3 times as fast as with its cache, and about 10 times as fast as without it (*The sum*).
#
# In double precision these searches ([`searching.py`](../scripts/fast/searching.py)) write the same tokens (tested). Their rivals are in [`copying.py`](../scripts/fast/copying.py).
#
# The *gain* of a trick is the time without it, divided by the time with it. A **control** races a function against itself: its gain shows what chance does. Numbers have 32 bits, and times are of one thread, unless the text says otherwise.


# %%
def gain(before: Callable[[], Any], after: Callable[[], Any], rounds: int = 24) -> float:
    """How many times as long `before` takes as `after`: the median of chapter 12's `duel`."""
    return median(duel(before, after, rounds))


# %%
trained = load_model(STUDIED)
trained.model.requires_grad_(False)
ready = fast.made_ready(trained.model)  # as the next section says
captions = [german for german, _ in load_corpus("sample")["test"][:64]]
src = pad_rows([source_ids(german, trained.tokenizer) for german in captions])  # (B, S)

# %% [markdown]
# **Predict.** Chapter 8's cache makes greedy search 4 to 5 times as fast. Does any trick below gain more?
#
# ## What can be done once
#
# > **In short.** A search takes many small steps. What gives the same result in each is done once, before the first.
#
# [`CachedDecoding`](../scripts/fast/decoding.py), the fast twin of chapter 8's `CopiedCache`, does three things once:
#
# - **Weights in order.** oneDNN, which we ask in place of `F.linear`'s library (chapter 11), wants a matrix's numbers in its own order. We order them once.
# - **One product for three.** Query, key and value are products of the same vector with three matrices. Joined, these take one product.
# - **Room for later tokens.** `torch.cat` copies all keys and values to append new ones, and chapter 8's `stack` copies them again: $T^2$ positions in T steps. We leave room behind them, and double it when it is full: fewer than 2T are copied.
#
# **Experiment.** Does each gain more than the control? We race products of 64 rows, and 24 steps of appending. **Predict.** Which gains most?

# %%
# NBVAL_IGNORE_OUTPUT
attention = trained.model.decoder.layers[0].self_attn
maps = attention.project_query, attention.project_key, attention.project_value
as_stored = rivals.by_onednn(partial(rivals.multiply, maps))
in_order = partial(rivals.multiply, [fast.Packed(linear) for linear in maps])
joined = partial(rivals.multiply, [fast.Packed(*maps)])
new = torch.randn(2, 64, 8, 1, 32)  # a token's keys and values, (2, B, H, 1, d_k)
by_cat, in_room = partial(rivals.append_by_cat, new, 24), partial(rivals.append_in_room, new, 24)
print(f"order gains {gain(as_stored, in_order):.2f}, joining {gain(in_order, joined):.2f}")
print(f"room gains {(room := gain(by_cat, in_room)):.2f}; control {gain(joined, joined):.2f}")
assert room > 1.2

# %% [markdown]
# Room gains most, order and joining about a sixth each.
#
# ## A family tree instead of copies
#
# > **In short.** In a beam search some prefixes are continued twice, others not at all. If each has its own cache, whole caches are copied. Let a sentence's prefixes share one, and note which of its tokens each may use.
#
# Beside the shared cache we keep `ancestors` (B, k, L): True where a cached token belongs to a prefix. A new token is its own ancestor (`enter`). A prefix that continues another one gets a copy of its row of `ancestors` (`follow`): L bytes. With a cache of its own, it would copy 2·T·D numbers in each layer.


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
# In chapter 8's phrase book, after three words a beam of 3 holds *a dog sleeps*, *a dog is* and *the hound sleeps*. `steps` has each step's new tokens, and for each prefix that goes on which of them it continues: after *the a one*, `[1, 0, 0]` lets one prefix continue *a*, and two *the*. **Predict.** Which two of the ten cached tokens belong to no prefix now?

# %%
steps = [
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
# *One* and the second *dog* belong to none.
#
# Masked by `ancestors`, attention gives each prefix what its own tokens alone would give.
#
# **Experiment.** Is one shared cache faster than one for each prefix? One rival shares nothing: it copies the past of prefixes that move, and reads the source once for each. Two more share past or source alone. If copying and reading cost little, gains are near 1. **Predict.** Are they larger in narrow or in wide beams?

# %%
# NBVAL_IGNORE_OUTPUT
small_batch = src[:8], padding_mask(src[:8]), 60  # sentences, and the most tokens of a text
for K, rounds in ((2, 6), (8, 4), (32, 2)):
    search = partial(rivals.best_texts, ready, *small_batch, K, pack_at=0)  # all stay
    ways = {shared: partial(search, by=kind) for shared, kind in rivals.SHARED.items()}
    gains = rivals.gains_over_first(ways, rounds)
    print(f"beam of {K}:", ", ".join(f"{shared} {gained:.2f}" for shared, gained in gains.items()))
assert gains["past and source"] > 1.1  # the widest

# %% [markdown]
# The wider the beam, the more sharing gains; at 32 past and source help.
#
# ## Finished sentences leave
#
# > **In short.** A batch goes on until its longest text ends. Let finished sentences leave.
#
# Texts of 5, 9 and 12 tokens need 26 rows of the decoder, one for each token. If all stay, 3 · 12 = 36 are computed. But if sentences leave, keys and values of others must move into their places (`keep`). Two rules keep that cheap:
#
# - **Few rows move.** The last unfinished sentences take the places of the finished ones (`close_gaps`).
# - **Not at every step.** We wait until at least a tenth of the batch has finished (`PACK_AT`).


# %%
def close_gaps(going: Tensor) -> Tensor:
    """Which rows of a batch go on, by going (B,): the last of them take the ended ones' places."""
    count = int(going.sum())
    rows = torch.arange(count, device=going.device)
    # Gaps among the first `count` places, and rows behind them that go on: there are as many.
    rows[~going[:count]] = count + going[count:].nonzero().squeeze(1)
    return rows


# %% [markdown]
# New beside chapter 8's `write_one_by_one`: `live` has the numbers of the sentences in the batch, and the last `if` lets finished sentences leave. `choose` now gets rows x, not logits, so that it may skip some (*Few bits propose*).

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
# **Experiment.** We count each step's rows; with a `pack_at` of 0 all stay. **Predict.** What share of the rows is then for nothing?


# %%
def written(model: Any, src: Tensor, pack_at: float) -> tuple[list, list]:
    """Greedy texts for sources src (B, S), and the rows x (N, D) of each step."""
    rows_of_steps = []  # kept, as the screen below needs them

    def choose(decoding: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        rows_of_steps.append(x)
        return greedy_choice(decoding.logits(x))

    ids, _ = searching.cached_texts(model, src, padding_mask(src), 60, choose, pack_at)
    return [row[row != PAD].tolist() for row in ids], rows_of_steps


# %%
precise = load_model(STUDIED)
precise.model.double().requires_grad_(False)  # counts that are the same on every machine
texts, all_stay = written(precise.model, src, pack_at=0)
_, they_leave = written(precise.model, src, PACK_AT)
figures.rows_chart({"all stay": all_stay, "they leave": they_leave}, texts)

# %% [markdown]
# If all stay, 37% of the rows are for nothing. Time falls less than rows do (*The sum*): the encoder's work and the number of steps stay the same.
#
# ## The largest of many logits
#
# > **In short.** A beam search wants the 2K largest of 8,192 logits (chapter 8), and `topk` searches all of them. Take the largest of each block of 64 first, and search only blocks that can hold one of the best.
#
# For the m largest logits, take the m blocks with the largest maxima. Each of these m maxima is at least as large as every logit in any other block. So m largest logits lie in these blocks.


# %%
BLOCK = 64  # neighbouring logits of which the largest is found first


def best_logits(logits: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m largest of each row of logits (N, V), V a multiple of BLOCK, and their places: (N, m) each."""
    blocks = logits.unflatten(1, (-1, BLOCK))  # (N, V / 64, 64)
    chosen = blocks.amax(dim=-1).topk(min(m, blocks.size(1)), dim=-1).indices  # (N, ≤ m)
    near = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, BLOCK))  # (N, ≤ m, 64)
    top, place = near.flatten(1).topk(m, dim=-1)  # (N, m) each
    return top, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK


# %% [markdown]
# **Experiment.** For the 8 largest of 8,192 logits, the last `topk` searches 512 numbers. But `best_logits` takes more calls than `topk` alone. **Predict.** From how many logits on is it faster? And for the 64 largest?

# %%
# NBVAL_IGNORE_OUTPUT
block_gains = {"the 8 largest": {}, "the 64 largest": {}, "control": {}}
for V in (2**power for power in range(9, 17)):
    logits = torch.randn(32, V)
    for m in (8, 64):
        by_topk = partial(logits.topk, m)
        block_gains[f"the {m} largest"][V] = gain(by_topk, partial(best_logits, logits, m))
    block_gains["control"][V] = gain(by_topk, by_topk)
assert block_gains["the 8 largest"][65536] > 1.5 and block_gains["the 64 largest"][512] < 1
figures.gains_chart("blocks", block_gains)

# %% [markdown]
# Blocks gain from about 4,096 logits on for the 8 largest, between 16,384 and 32,768 for the 64.
#
# ## Few bits propose, a bound decides
#
# > **In short.** Greedy decoding wants one token, but computes 8,192 exact logits. Compute cheap, coarse ones, and exact ones only for the few tokens that may be the largest. A bound on the error rules out all others.
#
# The logits are the largest product of a step: $x$ (N, D) with the weights $W$ (V, D). In 8 bits an instruction multiplies four times as many numbers, and $W$ takes 2 MB in place of 8.
#
# **Round.** Each row of $x$ and $W$ has a unit: its largest absolute value, divided by 127. Each number becomes a whole number of units. Their products and sums have no error; we multiply by the units at the end.


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
# **Derive.** How wrong can a coarse logit be? Let $w$ be a row of $W$, and $\hat x$ and $\hat w$ the rounded rows. The error is $x\cdot(w-\hat w) + (x-\hat x)\cdot\hat w$. A dot product is never larger than the product of the two lengths (Cauchy and Schwarz), so
#
# $$ |x\cdot w - \hat x\cdot\hat w| \;\le\; \lVert x\rVert\,\lVert w-\hat w\rVert + \lVert x-\hat x\rVert\,\lVert\hat w\rVert \;\le\; e $$
#
# With the largest $\lVert w-\hat w\rVert$ and $\lVert\hat w\rVert$ of all rows of $W$, one bound $e$ holds for all logits of a row $x$.
#
# **Bound.** A token whose coarse logit lies more than $2e$ below the best can't be the largest, not even if its own is $e$ too small and the best $e$ too large.


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
# **Experiment.** No error exceeds its bound, unless our code is wrong. But a loose bound leaves many tokens over. **Predict**, for our captions' 900 rows: what share of its bound is the largest error? In how many rows is the largest coarse logit a wrong token's? How many of 8,192 tokens are left over?

# %%
last_rows = torch.cat(they_leave)  # (N, D)
proj_64 = precise.model.generator.proj  # in 64 bits
screen_64 = Screen(proj_64, partial(product_in_8_bits, proj_64))
coarse, exact = screen_64.coarse(last_rows), proj_64(last_rows)  # (N, V) each
error = screen_64.error(last_rows)  # (N, 1)
share = ((coarse - exact).abs() / error).max()
assert share <= 1
misled = (coarse.argmax(dim=1) != exact.argmax(dim=1)).nonzero().squeeze(1)
print(f"largest error: {share:.2f} of its bound")
print(f"the largest coarse logit is of a wrong token in {len(misled)} of {len(exact)} rows")
left_over = screen_64.candidates(last_rows)[0].bincount()
print(f"left over: {left_over.double().mean():.1f} tokens a row, {left_over.max()} at most")

# %%
figures.bound_chart(coarse[misled[0]], exact[misled[0]], error[misled[0]], trained.tokenizer)

# %% [markdown]
# Coarse logits alone choose 5 wrong tokens. No error is a fifth of its bound: Cauchy and Schwarz assume the worst directions, and random ones give about $1/\sqrt D = 1/16$. Still, about 4 exact logits a row find the right token.
#
# **Experiment.** [`Packed8`](../scripts/fast/decoding.py) is this product with the processor's instructions for 8 bits. But the bound and the exact logits may cost more than 8 bits save. **Predict.** From how many rows on do they cost less?

# %%
# NBVAL_IGNORE_OUTPUT
proj_32 = trained.model.generator.proj
screen_32 = Screen(proj_32, fast.Packed8(proj_32))
by_32, by_8 = (partial(rivals.largest, by) for by in (fast.Packed(proj_32), screen_32.coarse))
screen_gains = {"8 bits": {}, "8 bits, bound and exact logits": {}, "control": {}}
for N in (1, 2, 4, 8, 16, 32, 64, 128):
    rows = last_rows[:N].float()
    assert screen_32.largest(rows).equal(by_32(rows))
    for name, find in zip(screen_gains, (by_8, screen_32.largest, by_32), strict=True):
        screen_gains[name][N] = gain(partial(by_32, rows), partial(find, rows), 48)
assert screen_gains["8 bits, bound and exact logits"][128] > 1.1 or not fast.fast_in_8_bits()
figures.gains_chart("screen", screen_gains, searching.SCREEN_FROM)

# %% [markdown]
# For one row the bound and the exact logits cost more than 8 bits save, for 128 rows nearly a quarter of it. So greedy search uses the screen from 8 rows on. A beam search can't: it wants probabilities, and their denominator needs every logit.
#
# ## Eight bits in every product
#
# > **In short.** Round the factors of every product with weights, and give up the bound. That is 1.5 to 2 times as fast in batches, and 2 to 3 times for one sentence alone (*The sum*, *Against others*), but some texts change.
#
# **Predict.** How many of 64 texts change?

# %%
rounded = load_model(STUDIED)
for part in rounded.model.double().modules():
    if isinstance(part, nn.Linear):
        part.forward = partial(product_in_8_bits, part)
exact_texts = texts_by_cache(precise, captions, greedy_choice)
rounded_texts = texts_by_cache(rounded, captions, greedy_choice)
changed = [i for i in range(len(captions)) if exact_texts[i] != rounded_texts[i]]
print(f"{len(changed)} of {len(captions)} texts change. Two of them:")
for i in changed[:2]:
    print(f"\nsource: {captions[i]}\nexact:  {exact_texts[i]}\n8 bits: {rounded_texts[i]}")

# %% [markdown]
# Both exact texts are wrong, too: these sentences aren't like the model's training data. This product is an imitation: the program's own product (`Packed8`) changes other texts (*The sum*).
#
# ## The sum
#
# > **In short.** The cache gains most, the other exact tricks together 2 to 3. All exact ways write the same texts.
#
# Each of `ways` translates our captions greedily, with one trick more than the way before; `beams` has a beam of 4. `by_onednn` gives all products to oneDNN, `without_c` turns our compiled loops off, and `read_fast` gives chapter 8's search chapter 12's encoder.

# %%
by_cache = partial(texts_by_cache, trained, captions, greedy_choice)
engine, engine_8 = rivals.engine(trained), rivals.engine(trained, "int8")
by_engine = partial(rivals.fast_texts, engine, captions)
ways = {
    "every prefix anew": partial(plain_translate, trained, captions),
    "a cache (chapter 8)": by_cache,
    "products by oneDNN": rivals.by_onednn(by_cache),
    "encoder without padding": partial(rivals.read_fast, engine, captions),
    "work done once, fused kernels": rivals.without_c(partial(by_engine, rivals.scored, 0)),
    "finished sentences leave": rivals.without_c(partial(by_engine, rivals.scored)),
    "our loops in C": partial(by_engine, rivals.scored),
    "no probabilities": partial(by_engine, rivals.unscored),
    "few bits propose": partial(by_engine, searching.likeliest),
    "8 bits in every product": partial(rivals.fast_texts, engine_8, captions, searching.likeliest),
}

# %%
batch = src, padding_mask(src), 60
by_beam = partial(rivals.best_texts, ready, *batch)
beams = {
    "a cache for each prefix": rivals.without_c(partial(by_beam, by=rivals.OwnCaches, pack_at=0)),
    "past and source shared": rivals.without_c(partial(by_beam, pack_at=0)),
    "finished sentences leave": rivals.without_c(by_beam),
    "our loops in C": by_beam,
    "8 bits in every product": partial(rivals.best_texts, engine_8.model, *batch),
}

# %%
# NBVAL_IGNORE_OUTPUT
for contest in (ways, beams):
    *exact, in_bytes = [search() for search in contest.values()]
    assert all(texts == exact[0] for texts in exact)
    print("8 bits change", sum(a != b for a, b in zip(exact[0], in_bytes, strict=True)), "texts")

# %%
# NBVAL_IGNORE_OUTPUT
figures.waterfall_chart(rivals.race(ways), rivals.race(beams, rounds=4))

# %% [markdown]
# No trick gains more than the cache. Then come 8 bits. In greedy search C and few bits gain a tenth each, no probabilities no more than the control. With a beam the control is nearly as large as what our C gains.
#
# ## When may a beam stop?
#
# > **In short.** Chapter 8's beam stops after K endings, while a better text may be unfinished. Ask how good that text can become, and go on while it can win.
#
# For this phrase book that rule fails, with a beam of 2 and α = 0. **Predict.** Which text is the likeliest? Does the beam drop it?

# %%
phrases = {START: {"so": 0.45, END: 0.40, "no": 0.15}, "so": {"be": 1.0}, "be": {"it": 1.0}}
phrases |= {"it": {END: 1.0}, "no": {END: 1.0}}
ended, beam_steps = beam_by_hand(phrases, beam=2)
print("ended:", ended, " still being written:", *beam_steps[-1][2][0])
print("best of all:", every_sentence(phrases)[0])

# %% [markdown]
# *So be it* is the likeliest. The beam doesn't drop it, but stops too early.
#
# An unfinished prefix has a log-probability $s \le 0$. Later tokens can only lower it, and the score's divisor $T^\alpha$ is largest at the length limit $T_{\max}$. So no text that begins with this prefix can score above
#
# $$\text{hope} = \frac{s}{T_{\max}^{\,\alpha}}$$
#
# If the K-th best finished score is at least the hope of the best prefix in the beam, none can become one of the K best.


# %%
def hope(log_prob: float | Tensor, max_len: int, alpha: float) -> float | Tensor:
    """The score that no text can exceed if it begins with a prefix of this log-probability."""
    return log_prob / max_len**alpha


# %% [markdown]
# **Pitfall.** Dividing by the length *so far* gives no bound. With α = 1, two tokens with $s=-2$ would hope for −1, but eight more of probability 0.9 raise the score to −0.28.
#
# `cached_beam_search(…, exact=True)` stops by this bound. On 1,000 Multi30k sentences, with a beam of 4 and α = 0.6 ([the record](../results/decoding-speed.json)):

# %%
timed = load_record("decoding-speed")
figures.stop_table(timed)

# %% [markdown]
# The bound finds a higher score for 38 texts, and takes a quarter more time. That BLEU rises by 0.3 may be chance.
#
# ## Against others
#
# > **In short.** On 300 and 1,000 sentences ours is 1.1 to 1.3 times as fast as CTranslate2, a C++ program (medians). One sentence at a time, ours is 1.1 to 1.4 times as slow in 32 bits, and its median a little faster in 8 bits.
#
# Both have the same weights, processor and two threads, and take turns for five rounds. CTranslate2 gets the fastest of five batch sizes for the 300; its time includes ids to pieces and back, a small part.

# %%
figures.race_chart(timed)

# %%
figures.race_table(timed)

# %% [markdown]
# *Other texts*: those unlike ours in 32 bits. In 8 bits, 35 to 62 of 1,000 texts change, and BLEU by at most 0.1.
#
# **One sentence at a time.** Milliseconds on one thread, the median of 199 sentences:

# %%
figures.alone_table(timed)

# %% [markdown]
# ## Summary
#
# - Finished sentences leave: it pays where a batch's texts differ in length.
# - A beam's prefixes share past and source: the wider the beam, the more it pays.
# - Blocks, or few bits and a bound, find the largest logits sooner.
# - 8 bits in every product gain most for one sentence alone, but change some texts.
# - K endings don't prove that a beam is done. A bound on its best prefix does.
#
# ## What the paper did that we don't
#
# It allows an output as long as the input plus 50 (§6.1). Our translator allows twice the batch's longest input plus 10.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong. `solution`, from `scripts.book.exercises`, shows ours.
#
# ### Exercise 1 · When to pack
#
# *code · difficulty ●○○ · worth ●●○ · 15 minutes*
#
# Suppose that in `write_and_leave` packing costs as much as `packing` rows. What does a batch cost whose texts have `lengths` tokens? Count the rows of every step, and the packings; after the last step nothing is packed. Which `pack_at` is cheapest for our 64 `texts`, with a `packing` of 10? (`solution("decoding_cost")`)


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
# A beam needn't copy its ids either: keep each step's tokens and origins, (B, K) each, and read the texts at the end. `tokens[t, b, j]` continues the prefix at place `origins[t, b, j]` after step t − 1. `origins[0]` is all zero, for `<s>`. Return the texts (B, K, T) of the last step's K prefixes. (`solution("trace_back")`)


# %%
def trace_back(tokens: Tensor, origins: Tensor) -> Tensor:
    """Tokens and origins (T, B, K) of a beam to the texts (B, K, T) of its last prefixes."""
    ...


check(trace_back)

# %% [markdown]
# Next: [Chapter 14 · Leaving home](ch14_leaving_home.ipynb)
