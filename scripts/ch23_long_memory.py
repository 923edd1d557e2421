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
# # Chapter 23 · Long memory
#
# After this chapter you can say what a long text costs a decoder in bytes, build memories that cost less, say how much each remembers, and compute attention without its T × T weights.
#
# | | |
# |---|---|
# | In the paper | §3.2 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), and Table 1's "restricted" row |
# | Time | 20 minutes to read, 50 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 22 · Today's block](ch22_todays_block.ipynb) · [Chapter 24 · Experts](ch24_experts.ipynb) |
#
# *If you read only three cells:* `write_and_read`, the charts of *Who remembers?*, `tiled_attention`.
#
# Shapes: **B** batch, **S** keys' length, **T** queries' length, **D** `d_model`, **H** heads, **G** groups, $d_k$, $d_v$ the widths of a head's keys and values, $d_c$ a latent's, $d_R$ a rotary key's.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from scripts.book.exercises import check, with_gradients
from scripts.book.figures import since as figures
from scripts.book.instruments import saved_bytes
from scripts.book.records import load_record
from scripts.book.verdict import verdict_line
from scripts.ch01_attention import attention, masked_softmax, subsequent_mask
from scripts.ch02_multi_head_attention import merge_heads, split_heads
from scripts.ch22_todays_block import (
    RIVALS_OF_PARTS,
    RMSNorm,
    block_verdicts,
    rotated,
    token_by_token,
)

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## What a token costs
#
# > **In short.** A decoder keeps a key and a value for every token, head and layer. For a long text, they can need more memory than the weights.
#
# Chapter 8 called them the *cache*. Per token and layer it holds:
#
# | what is kept | numbers | the idea |
# |---|---|---|
# | keys and values of all heads | $2Hd_k$ | chapter 2 |
# | of G groups; one group is *multi-query* | $2Gd_k$ | heads share keys: [chapter 22](ch22_todays_block.ipynb) |
# | a *latent* and a rotary key | $d_c + d_R$ | keys and values are made from a short vector |
#
# **Predict.** DeepSeek-V2 has 236 billion weights, 60 layers and 128 heads of 128. With chapter 2's attention and two bytes a number, how much memory would a text of 100,000 tokens need?

# %%
H, d_k, S = 128, 128, 100_000
kept = {"multi-head": 2 * H * d_k, "with 8 groups": 2 * 8 * d_k, "multi-query": 2 * d_k}
for kind, numbers in (kept | {"latent": 512 + 64}).items():
    size = 60 * numbers * 2  # bytes a token, all layers
    print(f"{kind}: {size / 2**10:,.1f} KiB a token, {S * size / 2**30:,.1f} GiB in all")
print(f"and its weights: {236e9 * 2 / 2**30:,.0f} GiB")

# %% [markdown]
# The text would need 366 GiB; beyond 120,000 tokens the cache needs more than the weights. With that model's latents it needs 6.4 GiB.
#
# These caches grow with the text. A **window** doesn't: it keeps the last $w$ tokens. Nor does a **state**, one matrix per head, into which all tokens write.

# %%
lengths, per_token = range(0, 8193, 256), 2 * 8 * 64  # 8 heads of 64
numbers = {
    "all heads": [n * per_token for n in lengths],
    "latents": [n * (256 + 32) for n in lengths],
    "two groups": [n * per_token // 4 for n in lengths],
    "window": [min(n, 1024) * per_token for n in lengths],
    "state": [8 * 64 * 64 for _ in lengths],
}
assert [kind for kind, own in numbers.items() if own[-1] == own[16]] == ["window", "state"]
figures.cache_growth_chart(lengths, numbers, "Only a window and a state stop growing")

# %% [markdown]
# ## Latent attention
#
# > **In short.** Keep one short vector per token, from which all heads' keys and values can be made. A decoder changes the query instead.
#
# This is multi-head latent attention, MLA ([DeepSeek-V2](https://arxiv.org/abs/2405.04434), §2.1). A token's vector $h_t \in \mathbb{R}^D$ gives a latent $c_t$ of width $d_c \ll 2Hd_k$, and the latent gives each head's key and value:
#
# $$ c_t = \mathrm{norm}(W^{DKV} h_t) \in \mathbb{R}^{d_c}, \qquad k_{t,i} = W^{UK}_i c_t, \qquad v_{t,i} = W^{UV}_i c_t \qquad (i = 1 \dots H) $$
#
# with $W^{DKV}$ $(d_c, D)$, $W^{UK}_i$ and $W^{UV}_i$ $(d_k, d_c)$. Only $c_t$ is kept. A score needs no key, because the matrix can be applied to the query instead:
#
# $$ q_i \cdot k_{t,i} = q_i^\top W^{UK}_i c_t = \big({W^{UK}_i}^\top q_i\big)\cdot c_t $$

# %%
figures.moved_matrix()

# %% [markdown]
# What do the scores of one new token cost, at DeepSeek-V2's sizes and after 4,096 tokens?

# %%
torch.manual_seed(0)
q, c = torch.randn(4, 8), torch.randn(6, 12)  # (H, d_k), (S, d_c)
W = torch.randn(4, 8, 12)  # (H, d_k, d_c)
keys = c @ W.mT  # (H, S, d_k): the matrix on the keys' side
moved = (q.unsqueeze(1) @ W).squeeze(1)  # (H, d_c): on the query's side
torch.testing.assert_close((keys @ q.unsqueeze(-1)).squeeze(-1), moved @ c.mT)

H, d_k, d_c, S = 128, 128, 512, 4096
print(f"keys made: {(S * H * d_k * d_c + S * H * d_k) / 1e9:.2f} billion multiplications")
print(f"query moved: {(H * d_k * d_c + S * H * d_c) / 1e9:.2f} billion")
print(f"keys kept: {S * H * d_k / 1e9:.2f} billion")

# %% [markdown]
# Moving the query takes less than a hundredth of the work. A cache of finished keys would take still less: latents save memory, and often time, as decoding waits for memory. In training nothing is moved, because keys made once serve all queries. In decoding the values' matrix moves, too, and is applied once after the sum: $\sum_t a_t W^{UV}_i c_t = W^{UV}_i \sum_t a_t c_t$, with attention weights $a_t$.
#
# Rotary positions would prevent the move. Between a query at s and a key at t they put a rotation, $q_i^\top R_{t-s} W^{UK}_i c_t$, which differs with the distance: one moved query can't serve all keys. Therefore positions get a small key of their own, shared by all heads: $k^R_t = R_t W^{KR} h_t$, with $W^{KR}$ $(d_R, D)$. Each head's query gets a part $q^R_i$, turned by $R_s$, and both products are added:
#
# $$ \text{score} = \frac{q_i\cdot k_{t,i} + q^R_i\cdot k^R_t}{\sqrt{d_k + d_R}} $$


# %%
class LatentAttention(nn.Module):
    """Keys and values from one vector of `latent` numbers a token, positions in a `rotary` key.

    DeepSeek-V2, §2.1. A rotary key of 0 leaves positions out, as cross-attention must.
    """

    def __init__(self, h: int, d_model: int, dropout=0.1, latent: int = 48, rotary: int = 16):
        super().__init__()
        self.h, self.d_k, self.rotary = h, d_model // h, rotary
        self.project_query = nn.Linear(d_model, h * (self.d_k + rotary), bias=False)
        self.compress = nn.Linear(d_model, latent, bias=False)
        self.norm = RMSNorm(latent)  # as in that model
        self.expand_key = nn.Linear(latent, d_model, bias=False)
        self.expand_value = nn.Linear(latent, d_model, bias=False)
        self.place_key = nn.Linear(d_model, rotary, bias=False) if rotary else None
        self.project_output = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def remember(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """What is kept of x (B, S, D): latents (B, 1, S, d_c) and rotary keys (B, 1, S, d_R)."""
        c = self.norm(self.compress(x)).unsqueeze(1)
        if self.place_key is None:
            return c, c[..., :0]  # a rotary key of no numbers
        return c, rotated(self.place_key(x).unsqueeze(1), start)

    def look(self, query: Tensor, kept: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """query (B, T, D), the last T of the S tokens that were kept; to (B, T, D)."""
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)  # (B, 1, T, S)
        q = split_heads(self.project_query(query), self.h)  # (B, H, T, d_k + d_R)
        q, q_R = q.split([self.d_k, self.rotary], dim=-1)
        q_R = rotated(q_R, kept[0].size(2) - query.size(1))
        way = self.absorbed if query.size(1) == 1 else self.expanded
        return self.project_output(merge_heads(way(q, q_R, *kept, mask)))

    def expanded(self, q: Tensor, q_R: Tensor, c: Tensor, k_R: Tensor, mask) -> Tensor:
        """Keys and values of all heads are made, then chapter 1's attention: to (B, H, T, d_k)."""
        k = split_heads(self.expand_key(c.squeeze(1)), self.h)  # (B, H, S, d_k)
        v = split_heads(self.expand_value(c.squeeze(1)), self.h)  # (B, H, S, d_k)
        k = torch.cat((k, k_R.expand(-1, self.h, -1, -1)), dim=-1)  # (B, H, S, d_k + d_R)
        return attention(torch.cat((q, q_R), dim=-1), k, v, mask, self.dropout)[0]

    def absorbed(self, q: Tensor, q_R: Tensor, c: Tensor, k_R: Tensor, mask) -> Tensor:
        """The query moves to the latents, and their weighted sum moves back: to (B, H, T, d_k)."""
        up_key = self.expand_key.weight.unflatten(0, (self.h, -1))  # (H, d_k, d_c)
        up_value = self.expand_value.weight.unflatten(0, (self.h, -1))  # (H, d_k, d_c)
        scores = (q @ up_key) @ c.mT + q_R @ k_R.mT  # (B, H, T, S)
        weights = masked_softmax(scores / math.sqrt(self.d_k + self.rotary), mask)
        return (self.dropout(weights) @ c) @ up_value.mT

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask=None) -> Tensor:
        """As in `MultiHeadedAttention`; key and value must be the same tensor."""
        if value is not key:
            raise ValueError("latent attention makes keys and values of the same vectors")
        return self.look(query, self.remember(key), mask)


# %% [markdown]
# Check: all at once (`expanded`, for training) and token by token (`absorbed`, for decoding), the outputs agree.

# %%
torch.manual_seed(0)
x, causal = torch.randn(2, 6, 32), subsequent_mask(6)  # (B, T, D), (1, T, T)
layer = LatentAttention(4, 32, 0.0, latent=12, rotary=4)
torch.testing.assert_close(token_by_token(layer, x), layer(x, x, x, causal))
print(f"{sum(part.numel() for part in layer.remember(x[:1, :1]))} numbers a token, not {2 * 32}")

# %% [markdown]
# ## Windows, and some global layers
#
# > **In short.** Most layers see only the nearest words. Distant words arrive through a few that see everything.
#
# With a window, position $i$ sees only keys closer than $w$ ([Beltagy et al. 2020](https://arxiv.org/abs/2004.05150)). In the layer below, each of these has seen its own neighbours. **Predict.** With three layers and a window of 3, how many words back can the last word see? And if the middle layer is *global*, without a window?


# %%
def near_by(T: int, S: int, window: int, device: torch.device | None = None) -> Tensor:
    """(T, S) boolean: is key j closer than `window` to query i? The T queries are the last of S positions."""
    place = torch.arange(S, device=device)
    return (place[S - T :, None] - place).abs() < window


# %%
local, everywhere = near_by(12, 12, window=3).tril().double(), torch.ones(12, 12).tril()
ways = {"one local layer": local, "three local layers": local @ local @ local}
ways["local, global, local"] = local @ everywhere @ local  # from input to output, through all
reaches = {name: count > 0 for name, count in ways.items()}
assert [int(reach[-1].sum()) - 1 for reach in reaches.values()] == [2, 6, 11]
figures.reach_chart(reaches, "Three local layers see 6 words back; with a global one, all")

# %% [markdown]
# N local layers reach $N(w-1)$ words back, here 6. Gemma 3 ([2025](https://arxiv.org/abs/2503.19786)) has five local layers, with a window of 1,024, for each global one. At 131,072 tokens the six keep 17% of six global layers' cache.
#
# ## A state instead of a cache
#
# > **In short.** With a plain product for the softmax's exponential, the sum over all words can be made *before* the query comes.
#
# [Katharopoulos et al. (2020)](https://arxiv.org/abs/2006.16236) write $\phi(q)\cdot\phi(k)$ instead of $e^{q\cdot k}$, with $\phi(x) = \mathrm{elu}(x) + 1 > 0$. Then attention, before the division, is a product of three matrices and may be bracketed either way:

# %%
figures.brackets_picture()

# %% [markdown]
# A decoder sums over $j \le i$, and query i gets
#
# $$ o_i = \frac{\sum_j \big(\phi(q_i)\cdot\phi(k_j)\big)\, v_j}{\sum_j \phi(q_i)\cdot\phi(k_j)} = \frac{M^\top \phi(q_i)}{\phi(q_i)\cdot z}, \qquad M = \sum_j \phi(k_j)\, v_j^\top, \quad z = \sum_j \phi(k_j) $$
#
# The *state* $M$ $(d_k, d_v)$ is a memory. Token j writes $v_j$ under the key $\phi(k_j)$ by *adding*; a query reads.
#
# What if a key comes again with a new value? Adding keeps the sum of both. The **delta rule** ([Schlag et al. 2021](https://arxiv.org/abs/2102.11174); Widrow and Hoff, 1960) first looks up what is stored under the key, and writes only the *difference* to the new value. For keys of length 1 and a rate $\beta \in [0, 1]$, computed from the token, the two memories are (without a denominator)
#
# $$ \text{adding:}\quad M \leftarrow M + \beta\, k\, v^\top, \qquad\qquad \text{delta rule:}\quad M \leftarrow M + \beta\, k\, \big(v - M^\top k\big)^\top $$
#
# With $\beta = 1$ the delta rule replaces the old value; with $\beta = 0$ nothing is written. **Your turn.** Write both memories, token by token.


# %% tags=["yours"]
def write_and_read(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, correct=False) -> Tensor:
    """Each token writes into a state, then reads: adding, or with `correct` the delta rule.

    q, k (..., T, d_k), v (..., T, d_v), rates beta (..., T); to (..., T, d_v).
    """
    state, out = q.new_zeros(*k.shape[:-2], k.size(-1), v.size(-1)), []  # M (..., d_k, d_v)
    for t in range(q.size(-2)):
        query, key, value = (x[..., t, None, :] for x in (q, k, v))  # (..., 1, d) each
        written = value - key @ state if correct else value
        state = state + beta[..., t, None, None] * key.mT @ written
        out.append(query @ state)
    return torch.cat(out, dim=-2)


# %% [markdown]
# **Predict.** "The dog is in the garden. The dog is in the house." The key is *dog*, the value *garden*, then *house*. Ask for the dog: what do adding, the delta rule, and softmax attention without positions answer?

# %%
dog = torch.tensor([[0.6, 0.8, 0.0]])  # length 1
keys, values = dog.expand(2, 3), torch.eye(2)  # (T, d_k), (T, d_v): garden, then house
answers = {
    "adding": write_and_read(keys, keys, values, torch.ones(2)),
    "delta rule": write_and_read(keys, keys, values, torch.ones(2), correct=True),
    "softmax": attention(keys, keys, values)[0],
}
for name, answer in answers.items():
    print(f"{name}: garden {answer[-1, 0]:.1f}, house {answer[-1, 1]:.1f}")
torch.testing.assert_close(answers["adding"][-1], values.sum(0))
half = write_and_read(keys, keys, values, torch.tensor([1.0, 0.5]), correct=True)
torch.testing.assert_close(half[-1], values.mean(0))  # a rate of ½ replaces half

# %% [markdown]
# Adding answers with both values. Softmax without positions can't tell equal keys apart, and answers with their mean. The delta rule says *house*.
#
# ### In chunks
#
# Token by token, a text takes T small steps; the left bracket takes one large step. Models are trained with a mixture ([Yang et al. 2024](https://arxiv.org/abs/2406.06484)): the left bracket inside a *chunk* of tokens, the state between chunks.

# %%
figures.chunks_picture()

# %% [markdown]
# With the delta rule, what token i writes, $u_i$, depends on what earlier tokens of its chunk wrote. If $M$ is the state before the chunk, that is a triangular system,
#
# $$ u_i = \beta_i\Big(v_i - M^\top k_i - \sum_{j<i} (k_i \cdot k_j)\, u_j\Big), $$
#
# which `torch.linalg.solve_triangular` solves at once. Outputs and next state are
#
# $$ o_i = M^\top q_i+\sum_{j\le i}(q_i\cdot k_j)u_j, \qquad M\leftarrow M+\sum_i k_iu_i^\top $$
#
# **Your turn.** Write it.


# %% tags=["yours"]
def in_chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, correct=False, size=64) -> Tensor:
    """What `write_and_read` gives, `size` tokens at a time."""
    state, out = q.new_zeros(*k.shape[:-2], k.size(-1), v.size(-1)), []  # M (..., d_k, d_v)
    chunks = (x.split(size, dim=-2) for x in (q, k, v, beta.unsqueeze(-1)))
    for queries, keys, values, rates in zip(*chunks, strict=True):  # (..., size, d) each
        written = rates * (values - keys @ state if correct else values)
        if correct:
            overlap = rates * (keys @ keys.mT).tril(-1)  # (..., size, size)
            solve = partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)
            written = solve(overlap, written)  # the diagonal of ones is implied
        out.append(queries @ state + (queries @ keys.mT).tril() @ written)
        state = state + keys.mT @ written
    return torch.cat(out, dim=-2)


# %% [markdown]
# Linear attention is adding with positive features. For the denominator, each token writes a 1 beside its value.


# %%
def positive(x: Tensor) -> Tensor:
    """The feature map elu(x) + 1: every feature above 0 (Katharopoulos et al. 2020, eq. 7)."""
    return F.elu(x) + 1


def linear_attention(q: Tensor, k: Tensor, v: Tensor, memory=write_and_read) -> Tensor:
    """The causal right bracket, by either form of a memory: q, k, v (..., T, d) to (..., T, d)."""
    q, k, ones = positive(q), positive(k), torch.ones_like(q[..., 0])
    mixed = memory(q, k, F.pad(v, (0, 1), value=1.0), ones)  # (..., T, d + 1)
    return mixed[..., :-1] / mixed[..., -1:]


def masked_linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The left bracket, for any mask (..., T|1, S): weights (..., T, S), zeros where nothing is seen."""
    weights = positive(q) @ positive(k).mT * mask  # (..., T, S)
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0) @ v


# %% [markdown]
# Check: all forms have the same outputs and gradients, also where the last chunk is shorter.

# %%
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 12, 8)  # (B, H, T, d) each
rows, fives = (q, F.normalize(k, dim=-1), v, torch.rand(2, 4, 12)), partial(in_chunks, size=5)
for correct in (False, True):
    results = [with_gradients(form, rows, correct) for form in (write_and_read, fives)]
    torch.testing.assert_close(*results)
whole = with_gradients(masked_linear_attention, (q, k, v), subsequent_mask(12))
for form in (write_and_read, fives):
    torch.testing.assert_close(with_gradients(linear_attention, (q, k, v), form), whole)

# %% [markdown]
# ## Who remembers?
#
# > **In short.** A memory that keeps something of each token recalls every value. A state recalls some, a larger one more. Up to a limit, the delta rule finds a key's second value; adding can't.
#
# In *multi-query associative recall* ([Arora et al. 2023](https://arxiv.org/abs/2312.04927)) a text gives each of some keys a value, then asks for the keys in any order. In other texts each key comes twice, and its second value counts.


# %%
ONCE, TWICE = "each key once", "each key twice"


def recall_texts(
    count: int, length: int, pairs: int, text: str = ONCE, keys: int = 256, values: int = 64
) -> tuple[Tensor, Tensor]:
    """Texts (count, length) of `pairs` pairs and then queries, and each query's answer.

    Keys are the tokens from 0 on, values those after them. In a text TWICE half as many keys get a
    value each, then another one, which counts.
    """
    different = pairs if text == ONCE else pairs // 2
    own = torch.rand(count, keys).argsort(dim=-1)[:, :different].repeat(1, pairs // different)
    told = torch.randint(values, (count, pairs))
    asked = torch.randint(pairs - different, pairs, (count, length - 2 * pairs))
    told_pairs = torch.stack((own, keys + told), dim=-1).flatten(1)  # key, value, key, value, …
    return torch.cat((told_pairs, own.gather(1, asked)), dim=1), told.gather(1, asked)


# %%
torch.manual_seed(258)
ids, _ = recall_texts(1, 13, pairs=4, keys=8, values=10)
figures.recall_picture(ids[0].tolist(), pairs=4, keys=8)

# %% [markdown]
# Our model has embeddings, a layer of memory with one head of width d, and a linear layer for the answer. A value must be stored under the key before it, so the model reads each token's embedding beside its predecessor's. There are no positions.


# %%
class Recaller(nn.Module):
    """One layer of memory with a head of width d: a window of 2d, latents of d/2, or a d × d state.

    They also differ in latents' maps and states' features: positive ones in linear attention, in
    the others unit lengths and rates. Embeddings have d numbers, unless `embedding` says.
    """

    def __init__(self, kind: str, d: int, keys=256, values=64, embedding: int | None = None):
        super().__init__()
        self.kind, width = kind, embedding or d
        self.embed = nn.Embedding(keys + values, width)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.query = nn.Linear(2 * width, d, bias=False)  # a token beside its predecessor
        self.compress, kept = nn.Identity(), 2 * width
        if kind == "latent":
            kept = d // 2
            self.compress = nn.Sequential(nn.Linear(2 * width, kept, bias=False), RMSNorm(kept))
        self.key, self.value = (nn.Linear(kept, d, bias=False) for _ in range(2))
        self.rate = nn.Linear(2 * width, 1)  # β: how much a token writes into a state
        self.norm, self.answer = RMSNorm(d), nn.Linear(d, values, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) to logits of values (B, T, values)."""
        x = self.embed(ids)
        x = torch.cat((x, F.pad(x, (0, 0, 1, -1))), dim=-1)  # (B, T, 2 · width)
        c = self.compress(x)
        q, k, v, beta = self.query(x), self.key(c), self.value(c), self.rate(x).sigmoid()
        if self.kind in ("softmax", "latent"):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, T, d)
        elif self.kind == "window":
            near = near_by(q.size(1), q.size(1), window=2 * q.size(-1)).tril()
            mixed = F.scaled_dot_product_attention(q, k, v, near)
        elif self.kind == "linear":
            mixed = linear_attention(q, k, v, memory=in_chunks)
        else:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            mixed = in_chunks(q, k, v, beta.squeeze(-1), correct=self.kind == "delta rule")
        return self.answer(self.norm(mixed))


# %%
def pair_counts(length: int) -> list[int]:
    """4, 8, 16, … pairs, up to a quarter of the length."""
    return [2**i for i in range(2, length.bit_length() - 2)]


# %%
def learn_to_recall(
    kind: str, rate: float, seed: int, text=ONCE, length=128, d=16, steps=200, embedding=None
) -> Recaller:
    """A memory trained on texts that grow: `steps` each of 32, 64, … up to `length` tokens."""
    torch.manual_seed(seed)
    model = Recaller(kind, d, embedding=embedding).float()
    lengths = [2**i for i in range(5, length.bit_length())]
    optimizer = torch.optim.Adam(model.parameters())
    total = steps * len(lengths)
    schedule = OneCycleLR(optimizer, rate, total, pct_start=0.1, cycle_momentum=False)
    for step in range(total):
        n, choice = lengths[step // steps], pair_counts(lengths[step // steps])
        pairs = choice[int(torch.randint(len(choice), ()))]
        ids, answers = recall_texts(2048 // n, n, pairs, text)
        loss = F.cross_entropy(model(ids)[:, 2 * pairs :].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def recall_scores(model: Recaller, length: int = 128, text: str = ONCE) -> dict[int, tuple]:
    """For each number of pairs, over 16 new texts: the share of right answers, and nats."""
    torch.manual_seed(1_000_003)  # the same texts for each memory, none of them seen
    scores = {}
    for pairs in pair_counts(length):
        ids, answers = recall_texts(16, length, pairs, text)
        logits = model(ids)[:, 2 * pairs :].flatten(0, 1)
        right = (logits.argmax(-1) == answers.flatten()).double().mean().item()
        scores[pairs] = right, F.cross_entropy(logits, answers.flatten()).item()
    return scores


# %% [markdown]
# In d dimensions at most d keys are orthogonal. With more, a read also brings parts of other keys' values.
#
# **Predict.** With d = 16 and texts of 128 tokens, which memories recall 32 pairs? Where each key comes twice, which of softmax, adding and the delta rule answers with the second value? A state that recalls all 32 shows that 16 × 16 is large enough.

# %%
runs = pd.DataFrame(load_record("recall-pairs")["runs"]).query("seed > 0").reset_index()
rates = runs.query("d == 32").groupby(["text", "kind"])["lr"].first()  # from a sweep
for text, pairs, share in ((ONCE, 32, 0.95), (TWICE, 8, 0.7)):
    able = []
    for kind, rate in rates[text].items():
        model = learn_to_recall(kind, rate, seed=1, text=text)
        if recall_scores(model, text=text)[pairs][0] > share:
            able.append(kind)
    print(f"{text}, more than {share:.0%} of {pairs} pairs: {', '.join(able)}")

# %% [markdown]
# Only softmax and latents recall the 32 pairs; only the delta rule finds second values. The record repeats this with texts of 512 tokens, d = 32, three seeds, and for each memory the best rate of a sweep ([`recall-pairs.json`](../results/recall-pairs.json)).


# %%
right = pd.DataFrame([*runs["right"]]).rename(columns=int)  # a column for each number of pairs
mean = right.groupby([runs[name] for name in ("text", "d", "steps", "kind")]).mean()
once = mean.loc[ONCE, 32, 200].to_dict("index")
twice = mean.loc[TWICE, 32, 200].to_dict("index")
assert min(once["softmax"][128], once["latent"][128]) > 0.99
found, reference = twice["delta rule"], once["delta rule"]
assert max(*twice["softmax"].values(), *twice["adding"].values()) < 0.6
assert min(found[n] for n in (4, 8, 16, 32, 64)) > 0.75 and found[128] < twice["softmax"][128]
assert max(abs(found[n] - reference[n]) for n in found) < 0.03
twice["delta rule, keys once"] = reference
figures.recall_chart(
    {ONCE: once, TWICE: twice},
    "Softmax recalls every value; only the delta rule finds a second one, up to 32 keys",
    "Right answers in texts of 512 tokens, means of three seeds; no model has positions. A guess "
    "is right in 2%. Latents have the line of softmax (dashed). On the right, n pairs are n/2 keys; "
    "few keys ask for few values, so softmax's ups and downs are chance.",
    dashed=["softmax", "delta rule, keys once"],
)

# %% [markdown]
# - **Softmax and latents** recall every value. They keep 64 and 16 numbers a token.
# - **The window** answers while it sees the pair among its 64 tokens, and otherwise guesses.
# - **A state** of 32 × 32 recalls nearly all values of 8 keys, and of 128 keys about half or fewer.
# - **The delta rule** gains nothing where each key comes once. Where it comes twice, neither adding nor softmax without positions can know which value was second: at best about half of their answers are right. The delta rule finds it with 2 to 32 keys; at 64 it is below softmax, which guesses between two values. Its recall follows the pairs *written*, within 3 points: a replaced value frees no room that can be seen.
# - **Softmax that prefers near keys**, outside this race, finds over 90% of 8 keys' second values in one training ([test](../tests/test_ch23_long_memory.py)).
#
# ### Is it the state's size?
#
# A larger d enlarges all of the model, and a small state may only need more training. We add two controls: a state of 16 × 16 in a model with embeddings of 64, as in the largest, and one of 32 × 32 trained for three times the steps. If one does as well as the next larger state, size isn't the limit.

# %%
states = {f"{d} × {d}": mean.loc[ONCE, d, 200, "delta rule"] for d in (16, 32, 64)}
wide = (runs["kind"] == "delta rule, embeddings of 64") & (runs["lr"] == 0.02)  # at 0.04: less
states["16 × 16, embeddings of 64"] = right[wide].mean()
states["32 × 32, 3 times the steps"] = mean.loc[ONCE, 32, 600, "delta rule"]
small, usual, large, wider, longer = (own[64] for own in states.values())
assert wider - small < (usual - small) / 2 and longer - usual < (large - usual) / 2
figures.recall_chart(
    {"the delta rule, each key once": states},
    "A larger state helps more than a wider model or longer training",
    "Right answers in texts of 512 tokens, means of three seeds. The two controls are dashed.",
    dashed=[kind for kind in states if "," in kind],
)

# %% [markdown]
# At 64 keys the 16 × 16 state gains 7 points from wider embeddings, and 48 by growing to 32 × 32, which gains over twice as much from growing again as from longer training. (At 128 we forecast under 10 points from longer training; it was 10.3.) Each state recalls over 90% of d keys, and under 84% of 2d. So mostly the state's size limits recall.
#
# ## FlashAttention
#
# > **In short.** Take a tile of queries and of keys at a time, keep a running softmax, and the T × T weights never exist.
#
# FlashAttention computes softmax attention with less memory ([Dao et al. 2022](https://arxiv.org/abs/2205.14135); [Dao 2023](https://arxiv.org/abs/2307.08691)).
#
# The softmax needs the largest score and the sum over *all* keys, but both can be corrected later. For one query, after some tiles, let $m$ be the largest score so far, $\ell = \sum_j e^{s_j - m}$ and $a = \sum_j e^{s_j - m} v_j$. Before the first tile, $m = -\infty$ and the sums are 0. A new tile with scores $s'$ gives
#
# $$ m' = \max(m, \max_j s'_j), \qquad \ell \leftarrow e^{m - m'}\ell + \sum_j e^{s'_j - m'}, \qquad a \leftarrow e^{m - m'}a + \sum_j e^{s'_j - m'} v_j $$
#
# and then $m \leftarrow m'$. At the end the output is $a/\ell$. **Predict.** Six scores come in three tiles: 1 and 3, then 6 and 2, then 4 and 5. By what factor must the sum so far shrink when the second comes, and when the third?

# %%
m, total, steps = torch.tensor(-math.inf), torch.tensor(0.0), []
scores = torch.tensor([1.0, 3, 6, 2, 4, 5]).split(2)
for tile in scores:
    higher = torch.maximum(m, tile.max())
    shrink = (m - higher).exp()
    m, total = higher, shrink * total + (tile - higher).exp().sum()
    steps.append({"m": m.item(), "total": total.item(), "shrink": shrink.item()})
torch.testing.assert_close(m + total.log(), torch.cat(scores).logsumexp(0))
figures.tiles_picture(steps, [tile.tolist() for tile in scores])

# %% [markdown]
# The first tile's sum shrinks by $e^{3-6} = 0.05$, because the maximum rises from 3 to 6. The third tile has no larger score, so the sum stays. **Your turn.** Write it for all queries.


# %% tags=["yours"]
def tiled_attention(q: Tensor, k: Tensor, v: Tensor, size: int, causal=False) -> tuple:
    """softmax(QKᵀ/√d)·V without the T × S matrix (Dao 2023), by tiles of `size` queries and keys.

    q (..., T, d), k and v (..., S, d); `causal` needs T = S. To (..., T, d), and each query's
    logarithm of Σ exp(score), (..., T, 1).
    """
    outputs, log_sums = [], []
    for rows in torch.arange(q.size(-2), device=q.device).split(size):
        best = torch.full_like(q[..., rows, :1], -math.inf)  # m
        total, mixed = torch.zeros_like(best), torch.zeros_like(q[..., rows, :])  # ℓ and a
        for columns in torch.arange(k.size(-2), device=q.device).split(size):
            if causal and columns[0] > rows[-1]:
                break  # wholly in the future: never read
            scores = q[..., rows, :] @ k[..., columns, :].mT * q.size(-1) ** -0.5
            if causal:
                scores = scores.masked_fill(columns > rows.unsqueeze(-1), -math.inf)
            higher = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - higher).exp(), (best - higher).exp()
            total = shrink * total + weights.sum(-1, keepdim=True)
            mixed = shrink * mixed + weights @ v[..., columns, :]
            best = higher
        outputs.append(mixed / total)
        log_sums.append(best + total.log())
    return torch.cat(outputs, dim=-2), torch.cat(log_sums, dim=-2)


# %% [markdown]
# Check: the outputs are chapter 1's. With one number per query, $L = m + \log \ell$, the weights can be made again: $p_{ij} = e^{s_{ij} - L_i}$.

# %%
torch.manual_seed(0)
q, k, v = 3 * torch.randn(3, 2, 2, 11, 8)  # (B, H, T, d) each
for causal, size in itertools.product((False, True), (1, 3, 4, 64)):
    out, log_sum = tiled_attention(q, k, v, size, causal)
    right, weights = attention(q, k, v, subsequent_mask(11) if causal else None)
    torch.testing.assert_close(out, right)
    scores = (q @ k.mT / 8**0.5).masked_fill(weights == 0, -math.inf)
    torch.testing.assert_close((scores - log_sum).exp(), weights)

# %% [markdown]
# The backward pass needs these weights. A *kernel*, one function for the whole operation, keeps only q, k, v, the output and $L$, and makes each tile's weights again.
#
# **Predict.** For a text twice as long, how many times as much do PyTorch's kernel and a plain softmax keep?


# %%
def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, as one would write it down."""
    scores = q @ k.mT / math.sqrt(q.size(-1))
    future = ~subsequent_mask(q.size(-2), q.device)
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v


def backward_mib(way: Callable[..., Tensor], n: int) -> float:
    """MiB kept for the backward pass by `way`(q, k, v), with 8 heads of 64 at length n, in float32."""
    heads = [torch.zeros(1, 8, n, 64, dtype=torch.float32, requires_grad=True) for _ in range(3)]
    return saved_bytes(way, *heads) / 2**20


# %%
kernel = partial(F.scaled_dot_product_attention, is_causal=True)
ways, lengths = {"plain softmax": plain, "kernel": kernel}, (256, 512, 1024, 2048)
mib = {name: {n: backward_mib(way, n) for n in lengths} for name, way in ways.items()}
plain_mib, kernel_mib = (own[2048] for own in mib.values())
assert round(plain_mib) == 144 and round(kernel_mib) == 16
figures.kept_for_backward_chart(
    mib,
    f"At 2,048 tokens plain softmax keeps {plain_mib / kernel_mib:.0f} times as much as the kernel",
)

# %% [markdown]
# From 1,024 to 2,048 tokens the kernel's memory doubles; plain softmax's grows 3.7 times, to 144 MiB. Of these, 128 are *one* T × T matrix per head, the weights.
#
# The paper gains time, too: a tile fits into a GPU's small fast memory, where making weights again is cheaper than fetching them.
#
# ## On short captions
#
# > **In short.** Groups (in both stacks) and latents in the decoder show no loss; the intervals allow about 1 BLEU. Latents in the encoder lose.
#
# Chapter 22's record has these layers in a translator of short captions. Windows and linear attention are in both stacks. Latents bring rotary positions: their first row has to beat *rotary*, each further one the row before.

# %%
said, rows = block_verdicts(), ["grouped-query", "multi-query", "latent, decoder alone", "latent"]
for row in (*rows, "latent, across too", "window of 4", "linear attention"):
    print(verdict_line(row, said[row], RIVALS_OF_PARTS[row]))

# %% [markdown]
# In the encoder, without a cache to shrink, latents cost 1.8 BLEU, in cross-attention another 2.8. A window of 4 gains 1.6; we didn't test why.
#
# ## Summary
#
# - A cache grows with the text; groups and latents make it smaller.
# - A state never grows, and its size limits what it recalls. The delta rule finds a key's new value; adding can't. Replacing freed no room.
# - Softmax can be computed in tiles, if what was added shrinks whenever the maximum rises. A kernel keeps no T × T matrix.
#
# ## What these papers did that we don't
#
# Qwen3-Next (2025) keeps one layer of full attention for every three of *Gated DeltaNet* ([Yang et al. 2025](https://arxiv.org/abs/2412.06464)).
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A memory that fades
#
# *code · difficulty ●○○ · worth ●●● · 15 minutes*
#
# Gated DeltaNet lets the state fade before each write: first $M \leftarrow \alpha M$, with $\alpha \in [0, 1]$, then the delta rule's step on the *faded* state. Write it for one sequence: q, k, v (T, d), alpha and beta (T,), to (T, d). (`solution("gated_delta")` shows ours.)


# %%
def gated_delta(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule's outputs (T, d)."""
    ...


check(gated_delta)

# %% [markdown]
# ### Exercise 2 · Why a key of its own
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Why doesn't latent attention keep rotated keys $R_t W^{UK} c_t$? And why may one rotary key serve all heads?
#
# <details><summary>An answer</summary>
#
# Rotated keys would take $Hd_k$ numbers a token. With $c_t$ alone, a query at s needs $q^\top R_{t-s} W^{UK}$ for each t: as much work as making the keys. One rotary key for all heads is multi-query attention, for the part of the score that depends on position.
#
# </details>
#
# Next: [Chapter 24 · Experts](ch24_experts.ipynb)
