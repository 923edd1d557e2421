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
# After this chapter you can make a search many times faster, prove that it finds the same texts, and count what each step saves: rows, copies and products.
#
# | | |
# |---|---|
# | In the paper | §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 45 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 12 · Going fast](ch12_going_fast.ipynb) · [Chapter 14 · Leaving home](ch14_leaving_home.ipynb) |
#
# *If you read only three cells:* `write_and_leave`, the matrix of *A family tree instead of copies*, `rounded_product`.
#
# Shapes: **B** batch, **T** target length, **D** `d_model`, **V** vocabulary; **K** the beam's width, **k** how many prefixes a sentence has at this step (1 at the first, then K), **L** cached tokens of a sentence, **N** rows of a step (B, or B·k).

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures.speed import (
    bound_chart,
    decoding_account_chart,
    decoding_speed_chart,
    family_chart,
    race_table,
    rows_chart,
    speed_frame,
)
from scripts.book.phrases import END, START, every_sentence
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask
from scripts.ch06_training import BOS, EOS, PAD
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import (
    NEXT_WORD,
    CopiedCache,
    beam_by_hand,
    greedy_choice,
    until_end,
    write_one_by_one,
)
from scripts.core.models import Trained, load_model
from scripts.corpora.load import load_corpus

# %%
torch.set_default_dtype(torch.float64)

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
# ## Finished sentences leave
#
# > **In short.** A batch goes on until its longest text ends. Rows whose texts have ended are still computed, and thrown away. Let them go.
#
# B texts of $T_1, \dots, T_B$ tokens need $\sum_b T_b$ rows of the decoder. If all stay, $B \cdot \max_b T_b$ are computed. Taking rows out of a cache (`keep`) means copying. Two things keep that cheap:
#
# - **Few rows move** (in `CachedDecoding`). The last unfinished rows take the places of those that have ended.
# - **Not at every step.** We wait until at least a tenth of the batch has ended.


# %%
def close_gaps(going: Tensor) -> Tensor:
    """Which rows of a batch go on, by going (B,): the last of them take the ended ones' places."""
    left = int(going.sum())
    rows = torch.arange(left, device=going.device)
    # Gaps among the first `left` places, and rows behind them that go on: there are as many.
    rows[~going[:left]] = left + going[left:].nonzero().squeeze(1)
    return rows


# %%
going = torch.tensor([True, False, True, True, False, False, True])
print("going on:", going.nonzero().squeeze(1).tolist(), " new batch:", close_gaps(going).tolist())

# %% [markdown]
# In the loop below, `live` and the last `if` are new since chapter 8's `write_one_by_one`. And `choose` sees the decoding and its last positions, since fast choices don't compute all logits.

# %%
ALMOST = 0.9  # a batch is packed again when no more than this share of it is unfinished


def write_and_leave(
    decoding: Any,
    src: Tensor,
    max_len: int,
    choose: Callable[[Any, Tensor], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor]:
    """One text for each source: ids (B, ≤ max_len), padded after eos, and their log-probabilities (B,).

    `choose` takes the decoding and its last positions x (N, D); it gives tokens (N,), and their
    log-probabilities if it knows them.
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
        if left <= ALMOST * len(live):
            rows = close_gaps(going)
            decoding.keep(rows)
            live, chosen, going = live[rows], chosen[rows], going[rows]
        tokens = chosen.unsqueeze(1)
    return ids[:, : t + 1], total


# %% [markdown]
# Both loops translate 64 test sentences of the sample corpus with its small model. **Predict.** What share of the rows does the plain loop compute for nothing?

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


def watched(
    leave: bool, trained: Trained, sources: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[Tensor]]:
    """What a loop writes for encoded sources, greedily, and the rows (N, D) of each step."""
    src, seen = pad_rows(sources), []
    max_len, generator = 2 * src.size(1) + 10, trained.model.generator
    hook = generator.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        cache = ShrinkingCache(trained.model, src, padding_mask(src))
        if leave:
            ids, _ = write_and_leave(cache, src, max_len, lambda _, logits: greedy_choice(logits))
        else:
            ids, _ = write_one_by_one(cache.step, src, max_len, greedy_choice)
    hook.remove()
    return [until_end(row) for row in ids.tolist()], seen


# %%
plain_texts, all_stay = watched(False, trained, sources)
texts, they_leave = watched(True, trained, sources)
assert texts == plain_texts  # the same translations
needed = sum(map(len, texts))
per_step = {"all stay": list(map(len, all_stay)), "they leave": list(map(len, they_leave))}
for name, rows in per_step.items():
    print(f"{name}: {sum(rows):,} rows, {1 - needed / sum(rows):.0%} of them for nothing")

# %%
rows_chart(per_step)

# %% [markdown]
# ## Sentences of similar length, side by side
#
# > **In short.** Leaving saves rows, but neither steps nor padding in the source. Sorting by length saves those.
#
# A step costs something however few its rows are: all weights are read, and Python calls every kernel. So the texts of a batch should end together, and long sources tend to have long translations. **Predict.** We translate the same 64 sentences in four batches, as they come and sorted by length. What does sorting save: rows, steps or padding?

# %%
orders = {"as they come": sources, "sorted": sorted(sources, key=len)}
table = {}
for order, rows in orders.items():
    batches = [rows[i : i + 16] for i in range(0, len(rows), 16)]
    padded = sum(len(batch) * max(map(len, batch)) for batch in batches)
    steps = [x for batch in batches for x in watched(True, trained, batch)[1]]
    table[order] = {
        "rows of the decoder": f"{sum(map(len, steps)):,}",
        "steps": len(steps),
        "padding in the source": f"{1 - sum(map(len, rows)) / padded:.0%}",
    }
pd.DataFrame(table)

# %% [markdown]
# ## What can be done once
#
# > **In short.** A search takes many small steps. Do whatever doesn't change once, before the first.
#
# What `CachedDecoding` prepares:
#
# | done once | instead of |
# |---|---|
# | the weights of queries, keys and values joined | three small products at every step |
# | keys and values of the source, for all layers in one product | a product for each layer |
# | room for keys and values to come | a longer tensor at every step |
#
# `torch.cat` copies the old tensor: $T(T-1)/2$ positions in T steps. A tensor with places to spare takes the new ones without a copy. When it is full, it is replaced by one of twice the size: fewer than 2T positions are copied in all.
#
# ## A family tree instead of copies
#
# > **In short.** After each step of a beam, the survivors change places. Don't move their pasts: let each survivor look only at its ancestors.
#
# Chapter 8's cache would have to be copied into the new order. But no key or value has changed, only *whose* it is. So all K prefixes of a sentence share one memory of L tokens, K more at each step, and nothing in it moves. Beside it we keep `ancestors` (B, K, L): does this token belong to that prefix's past? A new token is its own ancestor. A prefix that continues another takes over that one's row.


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
# Take chapter 8's phrase book, with a beam of 3. First *the*, *a*, *one* survive, then *a dog*, *the dog*, *the hound*, then *a dog sleeps*, *a dog is*, *the hound sleeps*. **Predict.** Two of the ten cached tokens are nobody's ancestors any more. Which?

# %%
tree, cached = FamilyTree(sources=1), []
steps = [  # tokens read; then, for each survivor, which of these prefixes it continues
    (["<s>"], [0, 0, 0]),
    (["the", "a", "one"], [1, 0, 0]),
    (["dog", "dog", "hound"], [0, 0, 2]),
    (["sleeps", "is", "sleeps"], None),
]
for tokens, origin in steps:
    tree.enter(len(tokens))
    cached += tokens
    if origin is not None:
        tree.follow(torch.tensor([origin]))
family = tree.ancestors[0]  # (3, 10)
pasts = [" ".join(cached[i] for i in row.nonzero().squeeze(1)) for row in family]
print(*pasts, sep="\n")
nobodys = (~family.any(dim=0)).nonzero().squeeze(1).tolist()
print("nobody's:", [f"{cached[i]} ({i})" for i in nobodys])

# %%
family_chart(family, pasts, cached)

# %% [markdown]
# Masked by the tree, attention gives each prefix the same as over that prefix's tokens alone.
#
# What does the tree cost? At step T it moves only the K·L entries of a sentence's `ancestors`, while copying moves 2·K·T·D numbers in each layer. But it multiplies K times as much: each query meets the keys of all K prefixes. Multiplying costs a processor less than moving, so we expect copying to win only for very wide beams (not measured).
#
# ## The largest of many logits
#
# > **In short.** A beam wants the 2K best of 8,192 logits. Take the largest of each block of 64 first, and sort only in the blocks that count.
#
# The k largest logits (k is `topk`'s) lie in the k blocks with the largest maxima: each of these k maxima is larger than every logit in any other block.
#
# A beam compares log-probabilities of *different* prefixes, so it also needs each row's log-sum-exp. The largest logit $z^*$ is taken out, so that no power overflows. We know it already:
#
# $$\log\sum_v e^{z_v} = z^* + \log\sum_v e^{z_v - z^*},\qquad z^* = \max_v z_v$$


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


def log_sum_exp(logits: Tensor, largest: Tensor) -> Tensor:
    """log Σ exp of each row of logits (N, V), whose largest (N, 1) is known: (N, 1)."""
    return largest + (logits - largest).exp_().sum(dim=-1, keepdim=True).log_()


# %%
logits = torch.randn(50, 1024, generator=torch.Generator().manual_seed(0))
assert all(map(torch.equal, best_logits(logits, 8), logits.topk(8, dim=-1)))
maxima, near = 8192 // BLOCK, 8 * BLOCK
print(f"of 8,192 logits, topk(8) sees {maxima + near}: {maxima} maxima and {near} in eight blocks")

# %% [markdown]
# ## Few bits propose, a bound decides
#
# > **In short.** Greedy decoding wants one token of 8,192, and no probability. Let a coarse, cheap product propose a few, compute those exactly, and prove that no other can be larger.
#
# The logits are a step's largest product: $x$ (N, D) with the table $W$ (V, D). In whole numbers of 8 bits, the table takes a quarter of float32's memory, and a processor multiplies four numbers in place of one. How large can the error be? With $\hat x$ and $\hat w$ for the rounded rows:
#
# $$x\cdot w - \hat x\cdot\hat w = x\cdot(w-\hat w) + (x-\hat x)\cdot\hat w$$
#
# and a dot product is never larger than the product of the two lengths (Cauchy and Schwarz):
#
# $$ |x\cdot w - \hat x\cdot\hat w| \;\le\; \lVert x\rVert\,\lVert w-\hat w\rVert + \lVert x-\hat x\rVert\,\lVert\hat w\rVert \;=\; e $$
#
# With the table's largest $\lVert w-\hat w\rVert$ and $\lVert\hat w\rVert$, a row has one bound $e$ for all tokens. A token whose coarse value, $\hat x\cdot\hat w$, lies more than $2e$ below the best can't be the largest, not even if it is $e$ too small and the best $e$ too large.


# %%
def in_8_bits(x: Tensor) -> tuple[Tensor, float]:
    """x rounded to whole numbers from −127 to 127, and the unit they are counted in."""
    unit = x.abs().max().item() / 127 or 1.0
    return (x / unit).round_(), unit


# %% [markdown]
# The Multi30k model translates our 64 sentences. **Predict.** How often is the best-looking token the wrong one? How many tokens does the bound leave over?

# %%
shipped = load_model(ROOT / "models" / "multi30k-de-en")
_, steps = watched(write_and_leave, shipped, [source_ids(g, shipped.tokenizer) for g in sentences])
x, layer = torch.cat(steps), shipped.model.generator.proj  # (N, D)
table, bias = layer.weight.detach(), layer.bias.detach()  # (V, D), (V,)
(whole_x, unit_x), (whole_w, unit_w) = in_8_bits(x), in_8_bits(table)
rough, exact = unit_x * unit_w * (whole_x @ whole_w.T) + bias, x @ table.T + bias  # (N, V)
lost = (table - unit_w * whole_w).norm(dim=1).max()  # ‖w − ŵ‖ at most
size = (unit_w * whole_w).norm(dim=1).max()  # ‖ŵ‖ at most
error = x.norm(dim=1) * lost + (x - unit_x * whole_x).norm(dim=1) * size  # (N,)
assert ((rough - exact).abs() <= error.unsqueeze(1)).all()
may_win = rough >= (rough.amax(dim=1) - 2 * error).unsqueeze(1)  # (N, V)
best = exact.argmax(dim=1)  # (N,)
assert may_win.gather(1, best.unsqueeze(1)).all()  # the largest is never ruled out
left, misled = may_win.sum(dim=1), (rough.argmax(dim=1) != best).nonzero().squeeze(1)
print(f"the best-looking token is wrong for {len(misled)} of {len(x)} rows")
print(f"left over of {len(table):,} tokens: {left.double().mean():.1f} a row, {left.max()} at most")

# %%
bound_chart(rough[misled[0]], exact[misled[0]], error[misled[0]].item())

# %% [markdown]
# The few that are left over are cheap to compute exactly.
#
# [`Screen`](../scripts/fast/decoding.py) does this with real 8-bit products (the cell above used floating point), if these are *exact* (on some processors their sums overflow) and *fast* (PyTorch's are slow on processors without instructions for them, AVX512-VNNI). Only greedy search can use the bound: a beam needs every logit, for the log-sum-exp.
#
# ## Eight bits in every product
#
# > **In short.** Give up the proof, and round what goes into *every* product to 8 bits. It is much faster, and a few texts change.
#
# One unit for all of $W$ wastes bits: a row of small weights is rounded in the steps of the largest. So each row of $x$ (N, D) gets a unit $u_n$ of its own, and each row of a weight matrix $W$ (F outputs, D inputs) a unit $s_f$. The units can be taken out of the sum:
#
# $$ y_{nf} \;\approx\; u_n\, s_f \sum_d q_{nd}\, p_{fd} + b_f, \qquad u_n = \frac{\max_d |x_{nd}|}{127}, \quad q_{nd} = \operatorname{round}\!\left(\frac{x_{nd}}{u_n}\right) $$
#
# and $p$ is $W$ rounded in the same way. The sum of whole numbers is exact: only the rounding loses anything.


# %%
def row_units(rows: Tensor) -> Tensor:
    """What one of 127 steps is worth in each of the rows (N, D): (N, 1)."""
    return rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127  # a row of zeros stays one


def rounded_product(x: Tensor, weight: Tensor, unit_x: Tensor, unit_w: Tensor) -> Tensor:
    """x·Wᵀ of whole numbers: x (N, D), weight (F, D); units (N, 1) and (F, 1), or one number; to (N, F)."""
    whole_x, whole_w = (x / unit_x).round(), (weight / unit_w).round()
    return unit_x * unit_w.mT * (whole_x @ whole_w.T)


# %% [markdown]
# We take the logits' product again, without the bias. **Predict.** How much smaller is the error with a unit for each row?

# %%
exact = x @ table.T  # (N, V)
ways = {"one unit": lambda m: row_units(m).amax(0, True), "a unit for each row": row_units}
for name, units in ways.items():
    error = rounded_product(x, table, units(x), units(table)) - exact
    print(f"{name}: {error.norm() / exact.norm():.2%} of the product's size")

# %% [markdown]
# **Pitfall: one unit for the whole batch.** PyTorch's `quantized.linear_dynamic` rounds a whole batch in the steps of its largest number. Then a sentence's translation depends on its neighbours. Here one row gets a neighbour that is ten times as large:

# %%
alone, crowded = x[:1], torch.cat((x[:1], 10 * x[1:2]))
for name, units in ways.items():
    before, after = (
        rounded_product(m, table, units(m), row_units(table))[0] for m in (alone, crowded)
    )
    change = (after - before).norm() / before.norm()
    print(f"{name}: the first row's product changes by {change:.1%}")

# %% [markdown]
# `Packed8` in [`scripts/fast/decoding.py`](../scripts/fast/decoding.py) does this with `torch._int_mm`; attention, norms and residual sums stay in 32 bits. `python -m scripts.translate` uses it by default where such products are exact and fast.
#
# What do 8 bits cost the Multi30k model in BLEU? (Beam 1 is greedy.)

# %%
timed = load_record("decoding-speed")
pd.DataFrame(timed["scores"]).pivot(index=["split", "beam"], columns="program", values="bleu")

# %% [markdown]
# Less than 0.2, up or down.
#
# ## When may a beam stop?
#
# > **In short.** Chapter 8's rule stops after K endings, and can miss a better text that is still unfinished. A bound on what such texts can reach makes the stop safe.
#
# Here is a phrase book for which that rule fails, with a beam of 2 and α = 0. **Predict.** Which text is the best of all? Does the beam drop it?

# %%
LATE: dict[str, dict[str, float]] = {
    START: {"so": 0.45, END: 0.40, "no": 0.15},
    "so": {"be": 1.0},
    "be": {"it": 1.0},
    "it": {END: 1.0},
    "no": {END: 1.0},
}

# %%
found, steps = beam_by_hand(LATE, beam=2)
print("found:", [(" ".join(words), round(p, 2)) for words, p in found])
(words, p), *_ = steps[-1][2]  # the prefixes when it stopped
print("still being written:", " ".join(words), f"({p:.2f})")
best_text, best_p = every_sentence(LATE)[0]
print("best of all:", " ".join(best_text), f"({best_p:.2f})")

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
# **Pitfall.** Dividing by the length *so far* looks natural, but is no bound: with α > 0 a prefix that adds likely tokens improves its score. We try all prefixes of chapter 8's phrase book, for four α:

# %%
broken, tried = dict.fromkeys(("by the length limit", "by the length so far"), 0), 0
for words, p in every_sentence(NEXT_WORD):  # the last word is </s>
    so_far = 0.0
    for t, (before, word) in enumerate(pairwise((START, *words)), start=1):
        so_far += math.log(NEXT_WORD[before][word])
        for alpha in (0.0, 0.3, 0.6, 1.0):
            score, tried = math.log(p) / len(words) ** alpha, tried + 1
            for rule, length in zip(broken, (10, t), strict=True):  # 10: the limit
                broken[rule] += score > hope(so_far, length, alpha) + 1e-12
print(f"of {tried} (sentence, prefix, α) the text beats the hope in: {broken}")

# %% [markdown]
# `cached_beam_search(…, exact=True)` stops by this rule, as does `python -m scripts.translate --exact`. On 1,000 Multi30k sentences, with a beam of 4 and α = 0.6:

# %%
raced = speed_frame(timed).set_index(["program", "beam"]).sort_index()
usual, patient = (raced.loc[(name, 4)] for name in ("ours, float32", "ours, exact stop"))
changed = timed["sentences"] - patient["same_as_ours"]
slower = usual["sentences_per_second"] / patient["sentences_per_second"]
better = patient["bleu"] - usual["bleu"]
print(f"{changed:.0f} of 1,000 texts change, in {slower:.2f} times the time; BLEU {better:+.2f}")

# %% [markdown]
# The gain in BLEU isn't tested against chance (chapter 10).
#
# ## Against others
#
# > **In short.** On the record's machine ours keeps up with CTranslate2, a C++ program made for this, on whole files. One sentence at a time, ours is slower.
#
# In the [race](../scripts/studies/race_decoding.py) the programs translate 1,000 sentences of Multi30k, sorted by length, in turns, in five rounds. CTranslate2 gets the batch size that was fastest for it on 300 of them, of five tried; ours are cut by estimated cost. What counts is the ratio: our speed over CTranslate2's at the same precision, in the same round. **Predict.** How many times as fast as in 32 bits is our search in 8?

# %%
decoding_speed_chart(timed)

# %%
race_table(timed)

# %%
speed = pd.DataFrame(timed["reports"]).set_index(["sentences", "program", "beam"])
speed = speed["sentences_per_second"]
for beam, name in ((1, "greedy"), (4, "beam 4")):
    gain = speed[1000, "ours, int8", beam] / speed[1000, "ours, float32", beam]
    whole = speed[100, "ours, int8", beam] / speed[100, "textbook", beam]
    print(f"{name}: {gain:.1f} times as fast as 32 bits, {whole:.0f} times as fast as the textbook")

# %% [markdown]
# - **In 8 bits** 4 to 6 texts in a hundred change (*same texts*: as ours in 32 bits).
# - **The textbook** recomputes each prefix (100 sentences, one round). A cache, this chapter's ideas, a batch for each core and 8 bits together give the last factor of each line (with the beam, larger batches, too).
#
# **One sentence at a time**, all weights are read for one row, or four, and each call from Python costs as much as a small product. So steps of few rows take another path: one call of [C](../scripts/fast/kernels.py) runs all layers of the decoder. Milliseconds for a sentence, on one thread (p50 is the median of 200 sentences; one in a hundred takes longer than p99):

# %%
alone = pd.DataFrame(timed["one_at_a_time"]).set_index(["program", "beam"])
waits = alone["p50"].unstack()  # programs by beam
for bits in ("float32", "int8"):
    ratio = waits.loc[f"ours, {bits}"] / waits.loc[f"CTranslate2, {bits}"]
    print(f"{bits}: {ratio[1]:.1f} times as long as CTranslate2 greedy, {ratio[4]:.1f} with a beam")
alone[["p50", "p99"]].round().astype(int).unstack()

# %% [markdown]
# CTranslate2 has no Python inside; in ours Python still chooses the beam's tokens.
#
# ## Where the time goes now
#
# > **In short.** In 8 bits products are little more than a quarter of the time. Rounding, attention and copies take most of the rest.
#
# The profiler's account, in large batches:

# %%
decoding_account_chart(timed, "ours, int8")

# %% [markdown]
# ## Summary
#
# - Finished sentences leave the batch. Sorting by length saves steps and padding.
# - A beam's cache needn't move: a matrix of ancestors says whose it is.
# - To find the largest logit, look at blocks first, or let few bits propose and a bound decide.
# - With 8 bits in every product, a few texts change.
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
# `write_and_leave` packs when at most `almost` of the batch's rows are unfinished. Suppose that packing costs as much as `packing` rows. What does a batch cost whose texts have `lengths` tokens? Count the rows of every step, and the packings; after the last step nothing is packed. *Further:* for our 64 `texts` and `packing=10`, which `almost` is cheapest? (`solution("decoding_cost")` shows ours.)


# %%
def decoding_cost(lengths: Sequence[int], almost: float, packing: float) -> float:
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
# In `Screen` one outlier makes all rounding coarse. Give each token of the table a unit of its own, and it has a bound of its own: `rough` (N, V) may be wrong by up to `error` (N, V). Return True for exactly those that may be their row's largest, ties included. (`solution("may_be_largest")` shows ours.)


# %%
def may_be_largest(rough: Tensor, error: Tensor) -> Tensor:
    """Coarse values (N, V), each wrong by up to error (N, V): who may be the largest, (N, V) of bool."""
    ...


check(may_be_largest)

# %% [markdown]
# Next: [Chapter 14 · Leaving home](ch14_leaving_home.ipynb)
