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
# After this chapter you can make a search many times faster, prove that it finds the same texts, and say from where on each trick pays.
#
# | | |
# |---|---|
# | In the paper | §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 45 with the code; under a minute to run on a CPU |
# | Before, after | [Chapter 12 · Going fast](ch12_going_fast.ipynb) · [Chapter 14 · Leaving home](ch14_leaving_home.ipynb) |
#
# *If you read only three cells:* `write_and_leave`, the map of *A family tree instead of copies*, `Screen`.
#
# Shapes: **B** batch, **T** target length, **D** `d_model`, **V** vocabulary; **K** the beam's width, **k** how many prefixes a sentence has at this step (1 at the first, then K), **L** cached tokens of a sentence, **N** rows of a step (B, or B·k).

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

from scripts import ROOT, Late
from scripts.book.exercises import check
from scripts.book.figures import decoding as figures
from scripts.book.phrases import END, START, every_sentence
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask
from scripts.ch06_training import BOS, EOS, PAD
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import CopiedCache, beam_by_hand, greedy_choice, until_end
from scripts.ch12_going_fast import duel
from scripts.core.models import Trained, load_model
from scripts.core.products import affine, suits_onednn
from scripts.corpora.load import load_corpus

# %%
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

# %% [markdown]
# ## The sum
#
# > **In short.** The same translations, about ten times as fast. Chapter 8's cache gives much of that; this chapter shows the rest.
#
# [The record](../scripts/studies/race_decoding.py) timed chapter 8's searches, which compute every prefix anew, and those of this chapter: 100 sentences of Multi30k on two threads, one round.

# %%
timed = load_record("decoding-speed")
figures.sum_table(timed)

# %% [markdown]
# ## The same translations
#
# [Chapter 8](ch08_decoding.ipynb) wrote its searches to be read. Their fast twins:
#
# | chapters 6 and 8, to read | the fast one | where it stands |
# |---|---|---|
# | `write_one_by_one` | `write_and_leave` | this chapter |
# | `CopiedCache` | `CachedDecoding` | [`scripts/fast/decoding.py`](../scripts/fast/decoding.py) |
# | `greedy_decode`, `beam_search` | `cached_greedy`, `cached_beam_search` | [`scripts/fast/searching.py`](../scripts/fast/searching.py) |
#
# In double precision twins write the same tokens (`tests/test_fast_decoding.py` checks it).
#
# Each trick runs alone against what it replaces, in chapter 12's `duel`: how many times as long the work takes without it. The **control** is a function against itself: what it shows is chance.


# %%
def gain(before: Callable[[], Any], after: Callable[[], Any], rounds: int = 25) -> float:
    """How many times as long `before` takes as `after`: the median of a duel's rounds."""
    return median(duel(before, after, rounds))


def control(work: Callable[[], Any], rounds: int = 25) -> list[float]:
    """Five gains of a function over itself: what chance does."""
    return [gain(work, work, rounds) for _ in range(5)]


# %% [markdown]
# ## Finished sentences leave
#
# > **In short.** A batch goes on until its longest text ends. Rows whose texts have ended are still computed, and thrown away. Let them go.
#
# B texts of $T_1, \dots, T_B$ tokens need $\sum_b T_b$ rows of the decoder. If all stay, $B \cdot \max_b T_b$ are computed. Taking rows out of a cache (`keep`) means copying. Two things keep that cheap:
#
# - **Few rows move.** The last unfinished rows take the places of those that have ended. (`CachedDecoding` copies only those; `ShrinkingCache` below copies all.)
# - **Not at every step.** We wait until at least a tenth of the batch has ended. (Exercise 1 asks for the best share.)


# %%
def close_gaps(going: Tensor) -> Tensor:
    """Which rows of a batch go on, by going (B,): the last of them take the ended ones' places."""
    left = int(going.sum())
    rows = torch.arange(left, device=going.device)
    # Gaps among the first `left` places, and rows behind them that go on: there are as many.
    rows[~going[:left]] = left + going[left:].nonzero().squeeze(1)
    return rows


# %% [markdown]
# The loop is chapter 8's `write_one_by_one`; `live` and the last `if` let rows leave.

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
        left = int(going.sum())
        if left == 0:
            break
        if left <= pack_at * len(live):
            rows = close_gaps(going)
            decoding.keep(rows)
            live, chosen, going = live[rows], chosen[rows], going[rows]
        tokens = chosen.unsqueeze(1)
    return ids[:, : t + 1], total


# %% [markdown]
# With `pack_at=0` nobody leaves. We translate 64 test sentences of the sample corpus with its small model, both ways. **Predict.** What share of the rows is computed for nothing if all stay?

# %%
sentences = [german for german, _ in load_corpus("sample")["test"][:64]]
trained = load_model(ROOT / "models" / "sample-de-en")
sources = [source_ids(german, trained.tokenizer) for german in sentences]


class ShrinkingCache(CopiedCache):
    """Chapter 8's cache, out of which sources can be taken."""

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token for each source, (B, 1): the logits of the next one, (B, V)."""
        return super().step(tokens.flatten())

    def keep(self, rows: Tensor) -> None:
        """Go on with the sources numbered rows (N,) alone."""
        self.past, self.cross = self.past[:, :, rows], self.cross[:, :, rows]
        self.src_mask = self.src_mask[rows]


@torch.no_grad()
def written(trained: Trained, sources: list, size: int, pack_at: float) -> tuple[list, list]:
    """Greedy texts for encoded sources, in batches of `size`, and the rows x (N, D) of each step."""
    generator, texts, steps = trained.model.generator, [], []
    hook = generator.register_forward_pre_hook(lambda _, inputs: steps.append(inputs[0]))
    for start in range(0, len(sources), size):
        src = pad_rows(sources[start : start + size])
        cache = ShrinkingCache(trained.model, src, padding_mask(src))
        ids, _ = write_and_leave(cache, src, 60, lambda _, x: greedy_choice(x), pack_at)
        texts += [until_end(row) for row in ids.tolist()]
    hook.remove()
    return texts, steps


# %%
texts, all_stay = written(trained, sources, 64, pack_at=0)
left_texts, they_leave = written(trained, sources, 64, PACK_AT)
assert texts == left_texts
per_step = {"all stay": list(map(len, all_stay)), "they leave": list(map(len, they_leave))}
for name, rows in per_step.items():
    idle = 1 - sum(map(len, texts)) / sum(rows)
    print(f"{name}: {sum(rows):,} rows, {idle:.0%} of them for nothing")

# %%
figures.rows_chart(per_step)

# %% [markdown]
# ## Sentences of similar length, side by side
#
# > **In short.** Leaving saves rows, but neither steps nor padding in the source. Sorting by length saves those.
#
# A step costs something however few its rows are: all weights are read, and Python calls every kernel. So the texts of a batch should end together, and long sources tend to have long translations. **Predict.** We translate the 64 sentences in batches of 4, 16 and 32. Which saves more time, sorting or leaving?

# %%
# NBVAL_IGNORE_OUTPUT
by_length = sorted(sources, key=len)
ways = {"they leave": (sources, PACK_AT), "sorted": (by_length, 0), "both": (by_length, PACK_AT)}
gains = {name: {} for name in ways}
for size in (4, 16, 32):
    unchanged = partial(written, trained, sources, size, 0)
    for name, (rows, pack_at) in ways.items():
        gains[name][size] = gain(unchanged, partial(written, trained, rows, size, pack_at), 4)
leaving, ordering, _ = gains.values()
assert min(ordering.values()) > 1.03 and leaving[32] > leaving[4]
figures.gains_chart("leaving", gains, control(unchanged, 4))

# %% [markdown]
# A sorted batch's texts end together, so fewer of its rows can leave early.
#
# ## What can be done once
#
# > **In short.** A search takes many small steps. Do whatever doesn't change once, before the first.
#
# `CachedDecoding` joins the weights of queries, keys and values, so that a step takes one product instead of three. It has *room* for the keys and values to come: `torch.cat` copies all old ones at every step, $T(T-1)/2$ positions in T steps. If a full tensor is replaced by one of twice the size, fewer than 2T are copied.
#
# **Predict.** Chapter 12 dropped joint projections: in training they gained nothing. Why should they gain here, and until how many rows? (Timings from here on are in 32 bits.)

# %%
# NBVAL_IGNORE_OUTPUT
joint, *parts = (nn.Linear(256, n).float().requires_grad_(False) for n in (768, 256, 256, 256))
past, new = torch.randn(2, 32, 8, 257, 32).float().split([256, 1], dim=3)
gains = {"one product of three": {}, "room for the next token": {}}
for n in (1, 4, 16, 64, 256):
    x, old = torch.randn(n, 256).float(), past[..., :n, :]
    apart = partial(lambda x: [part(x) for part in parts], x)
    gains["one product of three"][n] = gain(apart, partial(joint, x))
    room, longer = partial(past[..., :1, :].copy_, new), partial(torch.cat, (old, new), 3)
    gains["room for the next token"][n] = gain(longer, room)
figures.gains_chart("once", gains, control(apart))

# %% [markdown]
# For one row a call costs as much as its product, and three calls pay it three times. For many rows the products take the time, and they are the same: training has thousands.
#
# ## A family tree instead of copies
#
# > **In short.** After each step of a beam, the survivors change places. Don't move their pasts: let each survivor look only at its ancestors.
#
# No key or value has changed, only *whose* it is. So all K prefixes of a sentence share one memory of L tokens, K more at each step, and nothing in it moves. Beside it we keep `ancestors` (B, K, L): does this token belong to that prefix's past? A new token is its own ancestor. A prefix that continues another takes over that one's row.


# %%
class FamilyTree:
    """Whose past the cached tokens are: `ancestors` (B, k, L), True where a token is prefix k's."""

    def __init__(self, sources: int, device: torch.device | None = None):
        self.ancestors = torch.zeros(sources, 1, 0, dtype=torch.bool, device=device)

    def enter(self, k: int) -> None:
        """k new tokens of each sentence, one for each prefix."""
        itself = torch.eye(k, dtype=torch.bool, device=self.ancestors.device)
        itself = itself.expand(len(self.ancestors), k, k)
        self.ancestors = torch.cat((self.ancestors, itself), dim=-1)  # (B, k, L + k)

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, k), of each source's own."""
        where = origin.unsqueeze(-1).expand(-1, -1, self.ancestors.size(-1))
        self.ancestors = self.ancestors.gather(1, where)


# %% [markdown]
# In chapter 8's phrase book a beam of 3 keeps *the*, *a*, *one*, then *a dog*, *the dog*, *the hound*, then *a dog sleeps*, *a dog is*, *the hound sleeps*. **Predict.** Two of the ten cached tokens are nobody's ancestors any more. Which?

# %%
tree, cached = FamilyTree(sources=1), []
steps = {"<s>": [0, 0, 0], "the a one": [1, 0, 0], "dog dog hound": [0, 0, 2]}
steps |= {"sleeps is sleeps": [0, 1, 2]}
for tokens, origin in steps.items():  # origin: which of these prefixes each survivor continues
    tree.enter(len(tokens.split()))
    cached += tokens.split()
    tree.follow(torch.tensor([origin]))
figures.family_chart(tree.ancestors[0], cached)

# %% [markdown]
# Masked by the tree, attention gives each prefix the same as over that prefix's tokens alone. At step T the tree moves only the K·L entries of a sentence's `ancestors`, while copying moves 2·K·T·D numbers in each layer. But a mask hides the products of *strangers*, tokens of other prefixes, only after they are computed: each query meets the keys of all K prefixes. The loop of `attend` in [`kernels.c`](../scripts/fast/kernels.c), which `CachedDecoding` uses, skips them. **Predict.** From which beam on does copying win, with PyTorch's attention and with ours?


# %%
def masked_attend(q: Tensor, past: Tensor, allowed: Tensor | None) -> Tensor:
    """PyTorch's attention of rows q (B·k, H·d_k) over past (2, B, H, L, d_k); allowed (B, k, L)."""
    _, B, H, _, d = past.shape
    heads = q.view(B, -1, H, d).transpose(1, 2)  # (B, H, k, d_k)
    mask = None if allowed is None else allowed.unsqueeze(1)  # (B, 1, k, L)
    return F.scaled_dot_product_attention(heads, *past, mask).transpose(1, 2).reshape(q.shape)


def by_copying(attend: Callable, q: Tensor, past: Tensor, origin: Tensor) -> Tensor:
    """Attention of q (B·K, H·d_k) over past (2, B, K, H, T, d_k), put in the order of origin (B, K)."""
    return attend(q, past[:, torch.arange(len(origin)).unsqueeze(1), origin].flatten(1, 2), None)


def by_tree(attend: Callable, q: Tensor, past: Tensor, origin: Tensor, tree: FamilyTree) -> Tensor:
    """The same over a shared past (2, B, H, L, d_k), which stays where it is."""
    tree.follow(origin)
    return attend(q, past, tree.ancestors)


# %%
# NBVAL_IGNORE_OUTPUT
kernels = Late("scripts.fast.kernels")
attentions = {"PyTorch's attention": masked_attend, "ours in C": kernels.attend}
gains = {name: {} for name in attentions}
for T in (8, 16, 32, 64):
    for K in (2, 4, 8, 16, 32):  # two sentences, eight heads of 32 numbers
        past, q = torch.randn(2, 2, K, 8, T, 32).float(), torch.randn(2 * K, 256).float()
        tree, stay = FamilyTree(sources=2), torch.arange(K).expand(2, K)
        tree.ancestors = torch.eye(K, dtype=torch.bool).repeat(1, T).expand(2, K, T * K)
        shared = past.permute(0, 1, 3, 4, 2, 5).flatten(3, 4).contiguous()  # (2, B, H, T·K, d_k)
        for name, attend in attentions.items():
            copying = partial(by_copying, attend, q, past, stay)
            sharing = partial(by_tree, attend, q, shared, stay, tree)
            torch.testing.assert_close(copying(), sharing())
            gains[name][K, T] = gain(copying, sharing)
plain, ours = gains.values()
assert plain[4, 64] > 1.1 and plain[32, 64] < 0.9
assert ours[16, 32] > 1.1 or not kernels.takes(q)  # without a compiler ours is PyTorch's
figures.tree_chart(gains, control(copying))

# %% [markdown]
# With a mask copying wins for a beam of 32, and for 16 from 16 tokens on. Our loop moves that border: only a beam of 32 with 64 tokens reaches it.
#
# ## The largest of many logits
#
# > **In short.** A beam wants the 2K best of 8,192 logits (2K, since K of them may end: chapter 8). Take the largest of each block of 64 first, and sort only in the blocks that count.
#
# Take the k blocks with the largest maxima (k is `topk`'s). Each of these k maxima is at least as large as every logit in any other block. So k largest logits lie in these blocks. (Of equal logits `topk` and we may name different ones.)


# %%
BLOCK = 64  # neighbouring logits of which the largest is found first


def best_logits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of logits (N, V) and where they stand, (N, k) each, as `topk` gives.

    The k largest lie in the k blocks with the largest maxima; only those are sorted.
    """
    N, V = logits.shape
    if V % BLOCK or k * BLOCK > V:
        return logits.topk(min(k, V), dim=-1)
    blocks = logits.view(N, V // BLOCK, BLOCK)
    chosen = blocks.amax(dim=-1).topk(k, dim=-1).indices  # (N, k)
    near = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, BLOCK))  # (N, k, 64)
    top, place = near.flatten(1).topk(k, dim=-1)  # (N, k) each
    return top, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK


# %% [markdown]
# Of 8,192 logits, the last `topk(8)` sees 512, after more calls. **Predict.** For which vocabularies do blocks pay? And if we want one logit, or 64?

# %%
# NBVAL_IGNORE_OUTPUT
gains = {f"the largest {k}": {} for k in (1, 8, 64)}
for V in (2**power for power in range(9, 17)):
    logits = torch.randn(32, V).float()
    for k in (1, 8, 64):
        if k * BLOCK <= V:
            assert logits.topk(k).values.equal(best_logits(logits, k)[0])
            whole = partial(logits.topk, k)
            gains[f"the largest {k}"][V] = gain(whole, partial(best_logits, logits, k))
assert gains["the largest 8"][512] < 0.8 and gains["the largest 8"][65536] > 1.5
figures.gains_chart("blocks", gains, control(whole))

# %% [markdown]
# Each of the k blocks is opened, so many of them leave little to save.
#
# ## Few bits propose, a bound decides
#
# > **In short.** Greedy decoding wants one token of 8,192, and no probability. Let a coarse, cheap product propose a few, compute those exactly, and prove that no other can be larger.
#
# The logits are a step's largest product: $x$ (N, D) with the table $W$ (V, D). In whole numbers of 8 bits, the table takes a quarter of float32's memory, and a processor multiplies four numbers in place of one.
#
# **Round.** Each row gets a unit of its own: its largest number becomes 127 of them.


# %%
def in_8_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, D) as whole numbers from −127 to 127, times a unit for each row (N, 1)."""
    unit = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127  # a row of zeros stays one
    return (rows / unit).round(), unit


def product_in_8_bits(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """What computes x·Wᵀ + b, (N, D) to (N, V), from rounded rows of x and W."""
    whole_w, unit_w = in_8_bits(linear.weight.detach())  # (V, D), (V, 1)
    fast = torch.cpu._is_vnni_supported()  # elsewhere slow, or sums overflow: 32 bits serve as well
    table = whole_w.to(torch.int8 if fast else torch.float32).T  # a float32 is exact up to 2²⁴

    def product(x: Tensor) -> Tensor:
        whole, unit = in_8_bits(x)
        sums = (torch._int_mm if fast else torch.mm)(whole.to(table.dtype), table)  # (N, V)
        return sums * (unit * unit_w.mT) + linear.bias

    return product


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
        peaks = blocks.amax(dim=-1)  # (N, V / 64)
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
# **Check.** The Multi30k model translates our 64 sentences. No error may exceed the bound. **Predict.** How often is the best-looking token the wrong one? How many tokens are left over?

# %%
shipped = load_model(ROOT / "models" / "multi30k-de-en")
_, steps = written(shipped, [source_ids(g, shipped.tokenizer) for g in sentences], 64, PACK_AT)
x, layer = torch.cat(steps), shipped.model.generator.proj.requires_grad_(False)  # (N, D)
screen = Screen(layer, product_in_8_bits(layer))
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
# In 32 bits oneDNN multiplies many rows, with a table laid out beforehand. The screen has to beat that. **Predict.** From how many rows on does it pay?

# %%
# NBVAL_IGNORE_OUTPUT
layer.float()  # what translates has 32 bits
screen, onednn = Screen(layer, product_in_8_bits(layer)), suits_onednn(layer.weight)
table = torch.ops.mkldnn._reorder_linear_weight(layer.weight) if onednn else layer.weight
whole = lambda x: best_logits(affine(x, table, layer.bias, onednn), 1)[1].squeeze(1)  # noqa: E731
ways = {"8 bits": lambda x: best_logits(screen.coarse(x), 1), "with a proof": screen.largest}
gains = {name: {} for name in ways}
for N in (1, 4, 16, 64, 128):
    rows = x[:N].float()
    assert screen.largest(rows).equal(whole(rows))
    for name, way in ways.items():
        gains[name][N] = gain(partial(whole, rows), partial(way, rows))
_, proved = gains.values()
assert proved[128] > proved[4] or not torch.cpu._is_vnni_supported()
figures.gains_chart("screen", gains, control(partial(whole, rows)))

# %% [markdown]
# The proof takes a dozen small calls, which weigh less beside a product of many rows. So the engine screens no steps of eight rows or fewer. And only greedy search can use the bound: a beam needs every logit, for the log-sum-exp.
#
# ## Eight bits in every product
#
# > **In short.** Give up the proof, and round what goes into *every* product to 8 bits. It is 1.5 to 1.8 times as fast in the race below, and a few texts change.
#
# `product_in_8_bits` takes the units of both rows out of the sum. The sum of whole numbers is exact: only the rounding loses anything.
#
# `Packed8` in [`scripts/fast/decoding.py`](../scripts/fast/decoding.py) does this in every product; attention, norms and residual sums stay in 32 bits. `python -m scripts.translate` uses it by default where it is fast.
#
# ## When may a beam stop?
#
# > **In short.** Chapter 8's rule stops after K endings, and can miss a better text that is still unfinished. A bound on what such texts can reach makes the stop safe.
#
# A phrase book for which that rule fails, with a beam of 2 and α = 0. **Predict.** Which text is the best of all? Does the beam drop it?

# %%
phrases = {START: {"so": 0.45, END: 0.40, "no": 0.15}, "so": {"be": 1.0}, "be": {"it": 1.0}}
phrases |= {"it": {END: 1.0}, "no": {END: 1.0}}
ended, steps = beam_by_hand(phrases, beam=2)
(words, p), *_ = steps[-1][2]  # the prefixes when it stopped
print("ended:", ended, " still being written:", words, p)
print("best of all:", every_sentence(phrases)[0])

# %% [markdown]
# The beam never dropped the best text: it stopped too early. An unfinished prefix has a log-probability $s \le 0$. What follows can only lower it, and the divisor $T^\alpha$ is largest at the length limit. So no text that begins with this prefix can score above
#
# $$\text{hope} = \frac{s}{T_{\max}^{\,\alpha}}$$
#
# If the K-th best finished score is at least the hope of the best prefix in the beam, nothing in the beam can enter the list any more. (What was already dropped may still be better.)


# %%
def hope(log_prob: float | Tensor, max_len: int, alpha: float) -> float | Tensor:
    """The score that no text can exceed if it begins with a prefix of this log-probability."""
    return log_prob / max_len**alpha


# %% [markdown]
# **Pitfall.** Dividing by the length *so far* looks natural, but is no bound. With α = 1, a prefix of two tokens and $s=-2$ would hope for −1. Eight more tokens of probability 0.9 lower $s$ to −2.84, and raise the score to −0.28.
#
# `cached_beam_search(…, exact=True)` stops by this rule, as does `python -m scripts.translate --exact`. On 1,000 Multi30k sentences, with a beam of 4 and α = 0.6:

# %%
figures.stop_table(timed)

# %% [markdown]
# ## Against others
#
# > **In short.** On whole files ours beats CTranslate2, a C++ program, in five races of eight, and loses one. Sentence by sentence, it is slower.
#
# In the record the programs translate sentences of Multi30k, sorted by length, on two threads, in turns, in five rounds. CTranslate2 gets the batch size that was fastest for it on 300 of them, of five tried; ours are cut by estimated cost. What counts is the ratio of speeds at the same precision, in the same round.

# %%
figures.pace_chart(timed)

# %%
figures.race_table(timed)

# %% [markdown]
# In 8 bits 4 to 6 of our texts in a hundred change (*same texts*: as in 32), and our BLEU by less than 0.2.
#
# **One sentence at a time**, each call from Python costs as much as a product. So steps of few rows take another path: one call of [C](../scripts/fast/kernels.py) runs all layers of the decoder. Milliseconds for a sentence, on one thread (p50 is the median of 200 sentences; one in a hundred takes longer than p99):

# %%
figures.alone_table(timed)

# %% [markdown]
# ## Summary
#
# - Finished sentences leave the batch. Sorting by length lets them end together.
# - A beam's cache needn't move: a matrix of ancestors says whose it is. With a mask that pays for narrow beams; where strangers are skipped, for wide ones, too.
# - To find the largest of many logits, look at blocks first, or let few bits propose and a bound decide.
# - With 8 bits in every product, a few texts change.
# - K endings don't prove that a beam is done. A bound on its best prefix does.
#
# ## What the paper did that we don't
#
# It allows an output as long as the input plus 50 (§6.1). Ours allows twice the batch's longest input plus 10, so a text that doesn't end depends on its neighbours, too.
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
# A beam needn't copy its ids either. Keep each step's tokens (B, K) and origins (B, K), and read the texts at the end. `tokens` (T, B, K): `tokens[t, b, j]` continues the prefix that stood at place `origins[t, b, j]` after step t − 1. `origins[0]` is all zero, for `<s>`. Return the texts (B, K, T) of the last step's K prefixes. (`solution("trace_back")` shows ours.)


# %%
def trace_back(tokens: Tensor, origins: Tensor) -> Tensor:
    """Tokens and origins (T, B, K) of a beam to the texts (B, K, T) of its last prefixes."""
    ...


check(trace_back)

# %% [markdown]
# ### Exercise 3 · A bound for each token
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# In `Screen` the worst row of the table sets the bound of all tokens. Give each token a bound of its own: `rough` (N, V) may be wrong by up to `error` (N, V). Return True for exactly those that may be their row's largest, ties included. (`solution("may_be_largest")` shows ours.)


# %%
def may_be_largest(rough: Tensor, error: Tensor) -> Tensor:
    """Coarse values (N, V), each wrong by up to error (N, V): who may be the largest, (N, V) of bool."""
    ...


check(may_be_largest)

# %% [markdown]
# Next: [Chapter 14 · Leaving home](ch14_leaving_home.ipynb)
