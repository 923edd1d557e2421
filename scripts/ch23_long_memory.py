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
# After this chapter you can say what a long text costs a decoder in bytes, build three ways to pay less, name what each gives up, and compute attention without its T × T weights.
#
# | | |
# |---|---|
# | In the paper | §3.2 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), and Table 1's "restricted" row |
# | Time | 20 minutes to read, 50 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 22 · Today's block](ch22_todays_block.ipynb) · [Chapter 24 · Experts](ch24_experts.ipynb) |
#
# *If you read only three cells:* the chart of *What a token costs*, `delta_attention`, the forward pass of `TiledAttention`.
#
# Shapes: **B** batch, **S** keys' length, **T** queries' length, **D** `d_model`, **H** heads, **G** groups, $d_k$ a head's width, $d_c$ a latent's, $d_R$ a rotary key's.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.optim.lr_scheduler import OneCycleLR

from scripts.book.exercises import check
from scripts.book.figures.since import (
    cache_growth_chart,
    kept_for_backward_chart,
    reach_chart,
    recall_chart,
)
from scripts.book.instruments import influence, saved_bytes
from scripts.book.verdict import verdict_line
from scripts.ch01_attention import attention, masked_softmax, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch22_todays_block import (
    RIVALS_OF_PARTS,
    Attention,
    RMSNorm,
    block_means,
    block_verdicts,
    rotated,
    token_by_token,
)

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## What a token costs
#
# > **In short.** A decoder keeps a key and a value for every token, head and layer, and reads all of them again for each new token. For long texts that memory can outgrow the weights.
#
# What a cache (chapter 8) holds, in numbers per token and layer:
#
# | what is kept | numbers | the idea |
# |---|---|---|
# | keys and values of all heads | $2Hd_k$ | chapter 2 |
# | of G groups; one group is *multi-query* | $2Gd_k$ | heads share keys: [chapter 22](ch22_todays_block.ipynb) |
# | a latent and a rotary key | $d_c + d_R$ | keys and values are made from a short vector: this chapter |
#
# **Predict.** DeepSeek-V2 (2024) has 236 billion weights, 60 layers and 128 heads of 128. With chapter 2's attention and two bytes a number, how much memory would a text of 100,000 tokens need?


# %%
def kept_numbers(h: int, d_k: int, groups: int, latent: int, rotary: int) -> dict[str, int]:
    """Numbers that each kind of self-attention keeps in one layer, for each token that it has read."""
    return {
        "multi-head": 2 * h * d_k,
        "grouped-query": 2 * groups * d_k,
        "multi-query": 2 * d_k,
        "latent": latent + rotary,
    }


# %%
# Eight groups are our assumption, for comparison: DeepSeek-V2 has none.
deepseek = {"h": 128, "d_k": 128, "groups": 8, "latent": 512, "rotary": 64}
for kind, kept in kept_numbers(**deepseek).items():
    per_token = 60 * kept * 2  # bytes, all layers
    print(
        f"{kind}: {per_token / 2**10:,.1f} KiB a token, {1e5 * per_token / 2**30:,.1f} GiB in all"
    )
print(f"and its weights: {236e9 * 2 / 2**30:,.0f} GiB")

# %% [markdown]
# DeepSeek-V2's authors report that latents did better than attention with all heads, and groups worse.
#
# All of these caches grow with the length, T. Two more ideas stop that. A **window** keeps only the last $w$ tokens. **Linear attention** keeps one matrix per head, the *state*.

# %%
lengths, small = range(0, 8193, 256), {"h": 8, "d_k": 64, "groups": 2, "latent": 256, "rotary": 32}
kept = kept_numbers(**small)
numbers = {
    "all heads": [n * kept["multi-head"] for n in lengths],
    "latents": [n * kept["latent"] for n in lengths],
    "groups": [n * kept["grouped-query"] for n in lengths],
    "window": [min(n, 1024) * kept["multi-head"] for n in lengths],
    "state": [8 * 64 * 64 for _ in lengths],
}
mib = {kind: [2 * n / 2**20 for n in counts] for kind, counts in numbers.items()}
cache_growth_chart(lengths, mib)

# %% [markdown]
# ## Latent attention
#
# > **In short.** Don't keep keys and values. Keep one short vector from which all heads' keys and values can be made. While decoding, don't even make them: move that work to the query.
#
# This is multi-head latent attention, MLA ([DeepSeek-V2](https://arxiv.org/abs/2405.04434), §2.1). For a token $h_t \in \mathbb{R}^D$ and a latent width $d_c \ll 2Hd_k$:
#
# $$ c_t = \mathrm{norm}(W^{DKV} h_t) \in \mathbb{R}^{d_c}, \qquad k_{t,i} = W^{UK}_i c_t, \qquad v_{t,i} = W^{UV}_i c_t \qquad (i = 1 \dots H) $$
#
# with $W^{DKV}$ $(d_c, D)$, $W^{UK}_i$ and $W^{UV}_i$ $(d_k, d_c)$. ($D$ for down, $U$ for up; the norm is chapter 22's RMSNorm.) Only $c_t$ is kept. A score needs no key, since the matrix can change sides. It is then applied once per query instead of once per key. The same holds for the values, with attention weights $a_t$:
#
# $$ q_i \cdot k_{t,i} = q_i^\top W^{UK}_i c_t = \big({W^{UK}_i}^\top q_i\big)\cdot c_t, \qquad \sum_t a_{t}\, W^{UV}_i c_t = W^{UV}_i \sum_t a_{t}\, c_t $$
#
# So while decoding, this is multi-query attention: the latent is the one key and the one value. But a score then costs $d_c$ products per head instead of $d_k$. That pays off for a single new token, but not in training, where keys made once serve all queries.
#
# Rotary positions would spoil this. For a query at position s, a rotation stands in between, $q_i^\top R_{t-s} W^{UK}_i c_t$, a different one for each distance, so the matrix can't move to the query once for all keys. So positions get a small key of their own, made from the token and shared by all heads: $k^R_t = R_t W^{KR} h_t$, with $W^{KR}$ $(d_R, D)$. Each head's query has a matching part $q^R_i$, turned by the query's own position:
#
# $$ \text{score} = \frac{q_i\cdot k_{t,i} + q^R_i\cdot k^R_t}{\sqrt{d_k + d_R}} $$


# %%
class LatentAttention(nn.Module):
    """Keys and values from one short vector per token, positions in a rotary key beside it (DeepSeek-V2, §2.1).

    `latent` is d_c and `rotary` is d_R; 0 leaves positions out, as cross-attention must. One query
    is answered without making keys (`absorbed`), several with (`expanded`): the same numbers.
    """

    def __init__(
        self, h: int, d_model: int, dropout: float = 0.1, latent: int = 48, rotary: int = 16
    ):
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
        """What is kept of x (B, S, D): latents (B, 1, S, d_c) and turned keys (B, 1, S, d_R)."""
        c = self.norm(self.compress(x)).unsqueeze(1)
        nothing = self.place_key is None
        return c, c[..., :0] if nothing else rotated(self.place_key(x).unsqueeze(1), start)

    def look(self, query: Tensor, kept: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """query (B, T, D), the last T of the S tokens that were kept; to (B, T, D)."""
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)  # (B, 1, T, S)
        q = split_heads(self.project_query(query), self.h)  # (B, H, T, d_k + d_R)
        q, to_turn = q.split([self.d_k, self.rotary], dim=-1)
        way = self.absorbed if query.size(1) == 1 else self.expanded
        x = way(q, rotated(to_turn, kept[0].size(2) - query.size(1)), *kept, mask)  # (B, H, T, d_k)
        return self.project_output(merge_heads(x))

    def expanded(
        self, q: Tensor, turned: Tensor, c: Tensor, place: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Keys and values of all heads are made, then chapter 1's attention: for training."""
        k = split_heads(self.expand_key(c.squeeze(1)), self.h)  # (B, H, S, d_k)
        v = split_heads(self.expand_value(c.squeeze(1)), self.h)  # (B, H, S, d_k)
        k = torch.cat((k, place.expand(-1, self.h, -1, -1)), dim=-1)  # (B, H, S, d_k + d_R)
        return attention(torch.cat((q, turned), dim=-1), k, v, mask, self.dropout)[0]

    def absorbed(
        self, q: Tensor, turned: Tensor, c: Tensor, place: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The queries go to the latents' space, and the answers come back: for decoding."""
        up_key = self.expand_key.weight.unflatten(0, (self.h, -1))  # (H, d_k, d_c)
        up_value = self.expand_value.weight.unflatten(0, (self.h, -1))  # (H, d_k, d_c)
        scores = (q @ up_key) @ c.mT + turned @ place.mT  # (B, H, T, S)
        weights = masked_softmax(scores / math.sqrt(self.d_k + self.rotary), mask)
        return (self.dropout(weights) @ c) @ up_value.mT  # (B, H, T, d_k)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """As in `MultiHeadedAttention`; key and value must be the same tensor."""
        if value is not key:
            raise ValueError("latent attention makes keys and values of the same vectors")
        return self.look(query, self.remember(key), mask)


# %% [markdown]
# Check: reading with a cache (the absorbed way) and the whole text at once (the expanded way) must agree.

# %%
torch.manual_seed(0)
x, causal = torch.randn(2, 6, 32), subsequent_mask(6)  # (B, T, D), (1, T, T)
latent = LatentAttention(4, 32, 0.0, latent=12, rotary=4)
torch.testing.assert_close(token_by_token(latent, x), latent(x, x, x, causal))

token, sizes = torch.randn(1, 1, 32), {"h": 4, "d_k": 8, "groups": 2, "latent": 12, "rotary": 4}
layers = {
    "multi-head": Attention(32, h=4, groups=4),
    "grouped-query": Attention(32, h=4, groups=2),
    "multi-query": Attention(32, h=4, groups=1),
    "latent": latent,
}
for kind, layer in layers.items():
    kept = sum(part.numel() for part in layer.remember(token))
    assert kept == kept_numbers(**sizes)[kind]
    print(f"{kind}: {kept} numbers a token")

# %% [markdown]
# What does the latent give up? DeepSeek-V2's 512 numbers replace $2 \cdot 128 \cdot 128 = 32{,}768$. But those were made from a vector of 5,120, so the space shrinks only tenfold.
#
# ## Windows, and some global layers
#
# > **In short.** Let most layers see only the nearest words. Distant words arrive through a few layers that see everything.
#
# With a window, position $i$ sees the keys closer than $w$ (Longformer, [Beltagy et al. 2020](https://arxiv.org/abs/2004.05150)). Work grows with $Tw$, not with $T^2$. What lies outside isn't lost at once: each neighbour saw *its* neighbours. So N layers reach $N(w-1)$ words back.


# %%
def near_by(T: int, S: int, window: int, device: torch.device | None = None) -> Tensor:
    """(T, S) boolean: is key j closer than `window` to query i? The T queries are the last of S positions."""
    if window < 1:
        raise ValueError(f"a window has at least 1 position, not {window}")
    place = torch.arange(S, device=device)
    return (place[S - T :, None] - place).abs() < window


class WindowedAttention(MultiHeadedAttention):
    """Self-attention in which a position sees only those closer than `window` (Beltagy et al. 2020)."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1, window: int = 4):
        super().__init__(h, d_model, dropout)
        self.window = window

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """As in `MultiHeadedAttention`, with everything farther away hidden as well."""
        near = near_by(query.size(1), key.size(1), self.window, query.device)  # (T, S)
        return super().forward(query, key, value, near[None] if mask is None else mask & near)


# %% [markdown]
# (Our layer still computes all scores.)
#
# Check: a decoder that *keeps* only the last $w$ tokens gives the same outputs as the whole text at once.

# %%
torch.manual_seed(0)
x, causal = torch.randn(2, 12, 32), subsequent_mask(12)
local, out = WindowedAttention(4, 32, 0.0, window=3), []
for t in range(12):
    kept = x[:, max(0, t - 2) : t + 1]  # (B, 3, D) at most
    out.append(local(kept[:, -1:], kept, kept))
torch.testing.assert_close(torch.cat(out, dim=1), local(x, x, x, causal))

# %% [markdown]
# **Predict.** With three layers and a window of 3, how far back can the last word see? And if the middle layer is global?


# %%
def reach_of(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Which of the words x (T, D) reach which outputs of causal layers with residual roads: (T, T) boolean."""
    mask = subsequent_mask(len(x))

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x[None], x[None], x[None], mask)[0]
        return x

    return influence(run, x) > 0


# %%
everywhere = MultiHeadedAttention(4, 32, 0.0)
reaches = {
    "one local layer": reach_of([local], x[0]),
    "three local layers": reach_of([local] * 3, x[0]),
    "local, global, local": reach_of([local, everywhere, local], x[0]),
}
for name, seen in reaches.items():
    print(f"{name}: the last word can know of {int(seen[-1].sum())} words, itself included")
reach_chart(reaches)

# %% [markdown]
# Gemma 3 ([2025](https://arxiv.org/abs/2503.19786)) has five local layers, with a window of 1,024, for each global one.

# %%
for n in (1_024, 8_192, 131_072):
    share = (5 * min(n, 1024) + n) / (6 * n)
    print(f"{n:,} tokens: {share:.0%} of the cache of six global layers")

# %% [markdown]
# ## Linear attention
#
# > **In short.** Replace the exponential in the softmax by a plain product, and the sum over all words can be made *before* the query comes. Then one small matrix is the whole memory.
#
# [Katharopoulos et al. (2020)](https://arxiv.org/abs/2006.16236) write $\phi(q)\cdot\phi(k)$ instead of $e^{q\cdot k}$, with $\phi(x) = \mathrm{elu}(x) + 1 > 0$. A product of three matrices may be bracketed either way, $(QK^\top)V = Q(K^\top V)$. For query i:
#
# $$ o_i = \frac{\sum_j \big(\phi(q_i)\cdot\phi(k_j)\big)\, v_j}{\sum_j \phi(q_i)\cdot\phi(k_j)} = \frac{M^\top \phi(q_i)}{\phi(q_i)\cdot z}, \qquad M = \sum_j \phi(k_j)\, v_j^\top, \quad z = \sum_j \phi(k_j) $$
#
# On the right no T × T matrix is left. The state $M$ is $(d_k, d_v)$ and $z$ is $(d_k)$, whatever the length. If the sums run over $j \le i$, this is a recurrence: each token *adds* to $M$.


# %%
def positive(x: Tensor) -> Tensor:
    """The feature map elu(x) + 1: every feature above 0 (Katharopoulos et al. 2020, eq. 7)."""
    return F.elu(x) + 1


def masked_linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The left side, for any mask (..., T|1, S): weights (..., T, S), zeros where nothing is seen."""
    weights = positive(q) @ positive(k).mT * mask  # (..., T, S)
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The right side, all keys seen and summed first: q (..., T, d), k and v (..., S, d); to (..., T, d)."""
    q, k = positive(q), positive(k)
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1))


def recurrent_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The causal right side as a recurrence, q, k and v (..., T, d): a state of one size."""
    q, k, out = positive(q), positive(k), []
    state, total = 0.0, 0.0  # M (..., d, d) and z (..., d, 1)
    for t in range(q.size(-2)):
        key, value = k[..., t, None, :], v[..., t, None, :]  # (..., 1, d)
        state, total = state + key.mT @ value, total + key.mT
        out.append(q[..., t, None, :] @ state / (q[..., t, None, :] @ total))
    return torch.cat(out, dim=-2)


class LinearAttention(MultiHeadedAttention):
    """Self-attention with elu + 1 in place of the softmax (Katharopoulos et al. 2020).

    There are no weights to drop or to show: no dropout on them, and nothing in `attn`.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """As in `MultiHeadedAttention`; without a mask, in time linear in the length."""
        projects = (self.project_query, self.project_key, self.project_value)
        inputs = zip(projects, (query, key, value), strict=True)
        q, k, v = (split_heads(project(x), self.h) for project, x in inputs)  # (B, H, ·, d_k)
        if mask is None:
            return self.project_output(merge_heads(linear_attention(q, k, v)))
        return self.project_output(merge_heads(masked_linear_attention(q, k, v, mask[:, None])))


# %%
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 12, 8)  # (B, H, T, d) each
torch.testing.assert_close(recurrent_attention(q, k, v), masked_linear_attention(q, k, v, causal))
all_seen = torch.ones_like(causal)
torch.testing.assert_close(linear_attention(q, k, v), masked_linear_attention(q, k, v, all_seen))
print("three forms, the same numbers")

# %% [markdown]
# ### From adding to correcting: the delta rule
#
# > **In short.** The state is a small memory: value $v$ is written under key $k$. Plain linear attention only adds. The delta rule first looks up what is stored under the key, and writes the *difference*.
#
# Leave out the denominator and $\phi$, and give the keys length 1. Writing is then $M \leftarrow M + k v^\top$, and reading is $M^\top q$. Schlag et al. ([2021](https://arxiv.org/abs/2102.11174)) correct instead of adding, with a rate $\beta \in [0, 1]$ that a layer computes from the token:
#
# $$ M \;\leftarrow\; M + \beta\, k\, \big(v - M^\top k\big)^\top $$
#
# With $\beta = 1$ the old value is replaced; with $\beta = 0$ nothing is written. (This is a gradient step on $\tfrac12\lVert M^\top k - v\rVert^2$, the *delta rule* of Widrow and Hoff, 1960.)


# %%
def delta_attention(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The delta rule: q, k, v (..., T, d), keys of length 1, rates beta (..., T); to (..., T, d)."""
    state, out = q.new_zeros(*k.shape[:-2], k.size(-1), v.size(-1)), []  # M (..., d_k, d_v)
    for t in range(q.size(-2)):
        key, value, rate = k[..., t, None, :], v[..., t, None, :], beta[..., t, None, None]
        missing = value - key @ state  # (..., 1, d): what is not stored under this key yet
        state = state + rate * key.mT @ missing
        out.append(q[..., t, None, :] @ state)
    return torch.cat(out, dim=-2)


# %%
def in_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, size: int = 64, correct: bool = False
) -> Tensor:
    """The adding memory, or with `correct` the delta rule, `size` tokens at a time.

    q, k (..., T, d_k), v (..., T, d_v), rates beta (..., T); to (..., T, d_v).
    """
    state, out = q.new_zeros(*k.shape[:-2], k.size(-1), v.size(-1)), []  # M (..., d_k, d_v)
    parts = (x.split(size, dim=-2) for x in (q, k, v, beta.unsqueeze(-1)))
    for q, k, v, beta in zip(*parts, strict=True):
        written = beta * (v - k @ state if correct else v)  # (..., size, d_v)
        if correct:  # and minus what this chunk's earlier tokens have written under its key
            overlap = (beta * (k @ k.mT)).tril(-1)  # (..., size, size)
            written = torch.linalg.solve_triangular(
                overlap, written, upper=False, unitriangular=True
            )
        out.append(q @ state + (q @ k.mT).tril() @ written)
        state = state + k.mT @ written
    return torch.cat(out, dim=-2)


def linear_in_chunks(q: Tensor, k: Tensor, v: Tensor, size: int = 64) -> Tensor:
    """Causal linear attention in chunks; a column of ones beside the values carries z."""
    q, k, ones = positive(q), positive(k), q.new_ones(q.shape[:-1])
    mixed = in_chunks(q, k, F.pad(v, (0, 1), value=1.0), ones, size)
    return mixed[..., :-1] / mixed[..., -1:]


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
class Recaller(nn.Module):
    """One layer of memory, with one head of width d, between a table and an answer.

    A token's input is its own embedding and its predecessor's. A window has 2d tokens, a latent
    d/2 numbers, a state d × d. All else is the same for each `kind`.
    """

    def __init__(self, kind: str, d: int, keys: int = 256, values: int = 64):
        super().__init__()
        self.kind, width = kind, d // 2 if kind == "latent" else 2 * d
        self.embed = nn.Embedding(keys + values, d)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.query = nn.Linear(2 * d, d, bias=False)
        self.compress = nn.Linear(2 * d, width, bias=False) if kind == "latent" else nn.Identity()
        self.latent_norm = RMSNorm(width) if kind == "latent" else nn.Identity()
        self.key, self.value = (nn.Linear(width, d, bias=False) for _ in range(2))
        self.rate = nn.Linear(2 * d, 1)  # how much a token writes: for adding and the delta rule
        self.norm, self.answer = RMSNorm(d), nn.Linear(d, values, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) to logits of values (B, T, values)."""
        x = self.embed(ids)
        x = torch.cat((x, F.pad(x, (0, 0, 1, -1))), dim=-1)  # (B, T, 2d): itself, its predecessor
        c = self.latent_norm(self.compress(x))
        q, k, v, beta = self.query(x), self.key(c), self.value(c), self.rate(x).sigmoid()
        return self.answer(self.norm(self.mixed(q, k, v, beta.squeeze(-1))))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """What the memory answers: q, k, v (B, T, d), beta (B, T), to (B, T, d)."""
        if self.kind in ("softmax", "latent"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "window":
            near = near_by(q.size(1), q.size(1), 2 * q.size(-1)).tril()
            return F.scaled_dot_product_attention(q, k, v, near)
        if self.kind == "linear":
            return linear_in_chunks(q, k, v)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return in_chunks(q, k, v, beta, correct=self.kind == "delta rule")


# %%
def pair_counts(length: int) -> list[int]:
    """4, 8, 16, … pairs, up to a quarter of the length."""
    return [2**i for i in range(2, length.bit_length() - 2)]


def learn_to_recall(
    kind: str, rate: float, seed: int, text: str = ONCE, length: int = 128, d: int = 16, steps=200
) -> Recaller:
    """A memory trained on texts that grow: `steps` each of 32, 64, … up to `length` tokens."""
    torch.manual_seed(seed)
    model, lengths = Recaller(kind, d).float(), [2**i for i in range(5, length.bit_length())]
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
# **Predict.** "The dog is in the garden. The dog is in the house." The key is *dog* both times, the value is *garden*, then *house*. Ask for the dog: what do adding, the delta rule, and softmax attention without positions answer?

# %%
garden, house = torch.eye(2)
dog = torch.tensor([[0.6, 0.8, 0.0]])  # length 1
keys, values = dog.expand(2, 3), torch.stack((garden, house))  # (T, d_k), (T, d_v)
plain = keys @ (keys.mT @ values)  # (T, d_v): all added up
delta = delta_attention(keys, keys, values, torch.ones(2))
softmax = attention(keys, keys, values)[0]
for name, answer in {"adding": plain, "delta rule": delta, "softmax": softmax}.items():
    print(f"{name}: garden {answer[-1, 0]:.1f}, house {answer[-1, 1]:.1f}")
torch.testing.assert_close(delta[-1], house)
torch.testing.assert_close(plain[-1], garden + house)

# %% [markdown]
# Softmax can't distinguish equal keys either; positions have to help it.
#
# **Predict.** We write N pairs with random keys into a state of 16 × 16, then read all of them back. How does the error grow with N? (An error of 1 is as bad as answering zero.) For comparison there are the best state of this size (by least squares), softmax attention with the scores $q \cdot k$ (at most 1), and *sharp softmax* with 20 times these scores.


# %%
def recall_errors(pairs: int) -> dict[str, float]:
    """Mean relative error of `pairs` values read back under their keys, for each memory."""
    torch.manual_seed(pairs)
    k, v = F.normalize(torch.randn(2, 20, pairs, 16), dim=-1)  # (draws, N, d) each
    asked = torch.cat((k, k), dim=1)  # write them all, then read: a rate of 0 writes nothing
    rates = torch.tensor([1.0, 0.0]).repeat_interleave(pairs)  # (2N,), the same in each draw
    answers = {
        "sharp softmax": (20 * k @ k.mT).softmax(-1) @ v,
        "best state": k @ torch.linalg.lstsq(k, v).solution,
        "softmax": (k @ k.mT).softmax(-1) @ v,
        "delta rule": delta_attention(asked, asked, torch.cat((v, v), dim=1), rates)[:, pairs:],
        "adding": k @ (k.mT @ v),
    }
    return {name: (found - v).norm(dim=-1).mean().item() for name, found in answers.items()}


# %%
recalled = {n: recall_errors(n) for n in (1, 2, 4, 8, 12, 16, 24, 32)}
for n in (4, 16, 32):
    print(f"{n} pairs:", ", ".join(f"{name} {e:.2f}" for name, e in recalled[n].items()))
recall_chart(recalled)

# %% [markdown]
# The delta rule's error grows well before 16 pairs, because a write with $\beta = 1$ also changes what overlapping keys read.
#
# Qwen3-Next (2025) keeps one layer of full attention for every three of *Gated DeltaNet* ([Yang et al. 2025](https://arxiv.org/abs/2412.06464)), whose state also fades (exercise 1).
#
# ## FlashAttention
#
# > **In short.** The T × T weights are only an intermediate result, and a large one. Take a tile of queries and of keys at a time, keep a running softmax, and the large matrix never exists.
#
# The ideas so far change the function. This one gives the same numbers with less memory. Tiles, and weights computed again in the backward pass, come from [Dao et al. 2022](https://arxiv.org/abs/2205.14135). The order of our loops comes from [Dao 2023](https://arxiv.org/abs/2307.08691).
#
# The obstacle is the softmax. It needs the largest score and the sum over *all* keys, and a tile has only some of them. Both can be corrected later. For one query, after some tiles, let $m$ be the largest score so far, $\ell = \sum_j e^{s_j - m}$ and $a = \sum_j e^{s_j - m} v_j$. Before the first tile, $m = -\infty$ and the sums are 0. A new tile with scores $s'$ gives
#
# $$ m' = \max(m, \max_j s'_j), \qquad \ell \leftarrow e^{m - m'}\ell + \sum_j e^{s'_j - m'}, \qquad a \leftarrow e^{m - m'}a + \sum_j e^{s'_j - m'} v_j $$
#
# and then $m \leftarrow m'$. At the end the output is $a/\ell$. **Predict.** Four scores come in two tiles: 1, 3, then 6, 2. By what factor must the first tile's sum shrink?

# %%
first, second = torch.tensor([1.0, 3.0]), torch.tensor([6.0, 2.0])
m, new_m = first.max(), torch.cat((first, second)).max()
total = (first - m).exp().sum()
shrink = (m - new_m).exp()
new_total = shrink * total + (second - new_m).exp().sum()
torch.testing.assert_close(
    (second - new_m).exp() / new_total, torch.cat((first, second)).softmax(0)[2:]
)
print(f"the first tile's sum: {total:.4f}, times {shrink:.4f}; with the second: {new_total:.4f}")
print(f"nothing shrunk: {total + (second - new_m).exp().sum():.4f}")

# %% [markdown]
# **Pitfall.** *Forgetting to shrink.* If the largest score happens to be in the first tile, the factor is $e^0 = 1$, and the mistake doesn't show. So a test needs scores that rise from tile to tile.
#
# For the backward pass, keep q, k, v, the output and one number per query: $L_i = m + \log \ell$. From it each tile's weights are computed *again*, $p_{ij} = e^{s_{ij} - L_i}$. Let $\partial/\partial v_j$ be the loss's gradient with respect to $v_j$. With the outputs $o_i = a/\ell$, their gradients $g_i$, and $\delta_i = g_i \cdot o_i$:
#
# $$ \frac{\partial}{\partial v_j} = \sum_i p_{ij}\, g_i, \qquad \frac{\partial}{\partial s_{ij}} = p_{ij}\,(g_i\cdot v_j - \delta_i), \qquad \frac{\partial}{\partial q_i} = \frac1{\sqrt{d}}\sum_j \frac{\partial}{\partial s_{ij}}\, k_j, \qquad \frac{\partial}{\partial k_j} = \frac1{\sqrt{d}}\sum_i \frac{\partial}{\partial s_{ij}}\, q_i $$
#
# The softmax's own gradient has a sum over all keys, $\sum_j p_{ij}\,(g_i\cdot v_j)$, which no tile knows. But it equals $g_i\cdot o_i = \delta_i$, which is known.


# %%
def tiles(length: int, size: int) -> list[slice]:
    """`length` positions cut into pieces of `size`; the last may be shorter."""
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


def tile_scores(q: Tensor, k: Tensor, rows: slice, causal: bool, size: int) -> Iterator:
    """The tiles of keys that the queries `rows` may see: (columns, scores (..., rows, columns))."""
    for columns in tiles(k.size(-2), size):
        if causal and columns.start >= rows.stop:
            return  # wholly in the future: never computed
        scores = q[..., rows, :] @ k[..., columns, :].mT * q.size(-1) ** -0.5
        if causal:
            i = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1)
            j = torch.arange(columns.start, columns.stop, device=q.device)
            scores = scores.masked_fill(j > i, -math.inf)
        yield columns, scores


# %%
class TiledAttention(Function):
    """softmax(QKᵀ/√d)·V without the T × S matrix, forward and backward (Dao 2023).

    apply(q, k, v, causal, size): q (..., T, d), k and v (..., S, d), tiles of `size` tokens;
    `causal` needs T = S. To (..., T, d). In the paper's backward pass the loops are the other way round.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, size: int) -> Tensor:
        """Tile by tile, with a running maximum (m), sum (ℓ) and mixture (a)."""
        outputs, log_sums = [], []
        for rows in tiles(q.size(-2), size):
            best = q.new_full((*q.shape[:-2], rows.stop - rows.start, 1), -math.inf)
            total, mixed = torch.zeros_like(best), torch.zeros_like(q[..., rows, :])
            for columns, scores in tile_scores(q, k, rows, causal, size):
                higher = torch.maximum(best, scores.amax(-1, keepdim=True))
                weights, shrink = (scores - higher).exp(), (best - higher).exp()
                total = shrink * total + weights.sum(-1, keepdim=True)
                mixed = shrink * mixed + weights @ v[..., columns, :]
                best = higher
            outputs.append(mixed / total)
            log_sums.append(best + total.log())
        out, log_sum = torch.cat(outputs, dim=-2), torch.cat(log_sums, dim=-2)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.how = causal, size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v; each tile's weights are computed again."""
        q, k, v, out, log_sum = ctx.saved_tensors
        causal, size = ctx.how
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
        delta = (grad * out).sum(-1, keepdim=True)  # (..., T, 1)
        for rows in tiles(q.size(-2), size):
            g = grad[..., rows, :]
            for columns, scores in tile_scores(q, k, rows, causal, size):
                weights = (scores - log_sum[..., rows, :]).exp()  # (..., rows, columns)
                by_score = weights * (g @ v[..., columns, :].mT - delta[..., rows, :])
                by_score = by_score * q.size(-1) ** -0.5
                grad_v[..., columns, :] += weights.mT @ g
                grad_q[..., rows, :] += by_score @ k[..., columns, :]
                grad_k[..., columns, :] += by_score.mT @ q[..., rows, :]
        return grad_q, grad_k, grad_v, None, None


# %%
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 2, 11, 8)  # (B, H, T, d) each
for causal, size in itertools.product((False, True), (1, 3, 4, 64)):
    results = []
    for attend, how in (
        (TiledAttention.apply, (causal, size)),
        (F.scaled_dot_product_attention, (None, 0.0, causal)),  # no mask, no dropout
    ):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        y = attend(*given, *how)
        results.append((y, *torch.autograd.grad(y.sin().sum(), given)))
    torch.testing.assert_close(*results)
print("outputs and gradients agree: causal or not, tiles of 1, 3, 4 and 64")

# %% [markdown]
# **Predict.** For a text twice as long, how many times as much does autograd keep for the backward pass, with tiles and with chapter 1's attention?


# %%
def backward_mib(way: Callable[..., Tensor], n: int) -> float:
    """MiB kept for the backward pass by `way`(q, k, v), with 8 heads of 64 at length n, in float32."""
    kind = {"device": "meta", "dtype": torch.float32, "requires_grad": True}
    heads = [torch.empty(1, 8, n, 64, **kind) for _ in range(3)]
    return saved_bytes(way, *heads) / 2**20


# %%
ways = {
    "textbook": lambda q, k, v: attention(q, k, v, subsequent_mask(q.size(-2), q.device))[0],
    "tiles": lambda q, k, v: TiledAttention.apply(q, k, v, True, 128),
}
mib = {
    name: {n: backward_mib(way, n) for n in (256, 512, 1024, 2048)} for name, way in ways.items()
}
for name, sizes in mib.items():
    print(
        f"{name}: {sizes[2048]:.1f} MiB at 2,048 tokens, {sizes[2048] / sizes[1024]:.1f} times 1,024's"
    )
kept_for_backward_chart(mib)

# %% [markdown]
# The textbook's 272 MiB are two T × T matrices per head (256), the mask (4), and q, k and v (12). Only q, k and v grow twofold, not fourfold, hence the 3.8.
#
# We didn't measure time: in plain PyTorch each tile still goes through the main memory. The paper's point is the GPU's small fast memory. A tile fits into it, and computing weights again there is cheaper than fetching them. `F.scaled_dot_product_attention` has that kernel, if masks and device allow it.
#
# ## On short captions
#
# > **In short.** In the decoder's self-attention, no loss from groups or latents can be told from chance. In the encoder and in cross-attention, latents lose. A window is ahead of 2017's attention.
#
# Chapter 22's record has these layers, too. On average a caption has 18 or 19 pieces, so there is little to remember. Groups are in the decoder's self-attention (in one row in cross-attention, too); windows and linear attention also in the encoder's. Latents bring rotary positions: their first row has to beat *rotary*, each further row the one before. **Predict.** Which loses most? Does it matter which attention keeps less?

# %%
said, rows = block_verdicts(), ["grouped-query", "multi-query", "multi-query, across too"]
rows += ["latent, decoder alone", "latent", "latent, across too", "window of 4", "linear attention"]
for row in rows:
    print(verdict_line(row, said[row], RIVALS_OF_PARTS[row]))
block_means(["2017", "rotary", *rows])

# %% [markdown]
# - **Groups and multi-query.** In the decoder's self-attention no loss is detected; up to 1.2 BLEU may be hidden. With one group in cross-attention, too, BLEU is 1.2 lower. The row's own interval leaves 0 out, but among nineteen the row doesn't pass.
# - **Latents** keep as little as multi-query, 32 numbers per token: $d_c = 24$ and $d_R = 8$. In the decoder alone they can't be told from *rotary*. In the encoder, which has no cache to shrink, they cost 1.8, and in cross-attention another 2.8.
# - **A window of 4** (in the encoder 3 to each side) is 1.6 ahead of 2017's attention. The reason may be that it distinguishes near from far, as rotary positions do (untested).
# - **Linear attention** can't be told from softmax.
#
# *What the record can't say:* anything about long texts, for which all this was made.
#
# ## Summary
#
# - A cache costs $2Hd_k$ numbers per token and layer; groups make it $2Gd_k$, latents $d_c + d_R$.
# - Latents work because a matrix can move from the key to the query. A rotation can't, so positions have a key of their own.
# - Windows keep $w$ tokens. N layers reach at most $N(w-1)$ words back.
# - Linear attention keeps one matrix. The delta rule corrects what is stored there under a key. For keys of $d$ numbers a state holds at most $d$ arbitrary pairs exactly.
# - Softmax can be computed in tiles if what was added is shrunk whenever the maximum rises.
#
# ## What these papers did that we don't
#
# DeepSeek-V2 compresses queries, too. FlashAttention is a GPU kernel, with masks and dropout; ours is its algorithm.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A memory that fades
#
# *code · difficulty ●○○ · worth ●●● · 15 minutes*
#
# Gated DeltaNet lets the whole state fade before each write: first $M \leftarrow \alpha M$, with $\alpha \in [0, 1]$, then the delta rule's step, which corrects what the *faded* state holds. Write it for one sequence: q, k, v (T, d), alpha and beta (T,), to (T, d). (`solution("gated_delta")` shows ours.)


# %%
def gated_delta(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule's outputs (T, d)."""
    ...


check(gated_delta)

# %% [markdown]
# ### Exercise 2 · Softmax in one pass
#
# *code · difficulty ●●○ · worth ●●● · 20 minutes*
#
# You wrote this for keys and values in chapter 1 (`streaming_attention`). New here are hidden tiles. Whoever did it needs 10 minutes.
#
# You get an iterator over tiles, each a pair of scores (n,) and values (n, d). Return softmax(all scores) · all values, (d,), holding only one tile at a time. A score of −∞ is a hidden key. A whole tile may be hidden, even the first (beware of −∞ − (−∞)), but not every score is. (`solution("online_softmax")` shows ours.)


# %%
def online_softmax(parts: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """The softmax's mixture (d,) of tiles of scores (n,) and values (n, d), in one pass."""
    ...


check(online_softmax)

# %% [markdown]
# ### Exercise 3 · Why a key of its own
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Latent attention gives positions a separate small key. Why not keep turned keys $R_n W^{UK} c$? And why may one such key serve all heads, while each head's query has a turned part of its own?
#
# <details><summary>An answer</summary>
#
# Turned keys would take their full $Hd_k$ numbers. If only $c$ is kept, a query at position $m$ needs $q^\top R_{n-m} W^{UK}$ for each distance: as much work as making the keys.
#
# One key for all heads is multi-query attention, for the part of the score that depends on position. How much a head cares, and at which distance, is in the query's part.
#
# </details>
#
# Next: [Chapter 24 · Experts](ch24_experts.ipynb)
