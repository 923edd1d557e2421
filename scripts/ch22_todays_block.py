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
# # Chapter 22 · Today's block
#
# After this chapter you can read the code of a current language model: you will have written one in sixty lines, compared it with a library's, and trained it.
#
# | | |
# |---|---|
# | In the paper | §3 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), revisited |
# | Time | 20 minutes to read, 45 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb) · [Chapter 23 · Long memory](ch23_long_memory.ipynb) |
#
# *If you read only three cells:* `Attention`, `Block`, the chart of *Does QK-norm help at a high rate?*
#
# Shapes: **B** batch, **T** length, **S** keys, **D** `d_model`, **H** heads, **d** the features of a head, **V** vocabulary; **G** groups of heads, **F** the feed-forward layer's width.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from scripts import ROOT
from scripts.book.charts import titled
from scripts.book.exercises import check
from scripts.book.figures import block as figures
from scripts.book.instruments import scramble
from scripts.book.parts import (
    RIVALS_OF_PARTS,
    added_loss,
    block_means,
    block_verdicts,
    counted_runs,
    small_runs,
)
from scripts.book.verdict import verdict_line
from scripts.ch01_attention import attention, subsequent_mask
from scripts.ch02_multi_head_attention import merge_heads, split_heads
from scripts.ch04_encoder_decoder import LayerNorm
from scripts.ch06_training import PAD, LabelSmoothing, batch_loss
from scripts.ch07_multi30k import encode_pairs, make_batch, pad_rows
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## What changed, and what did not
#
# > **In short.** The plan of 2017 stands: attention, a feed-forward layer, and a residual sum around each. Nearly every *part* has been replaced.
#
# | part of 2017 | what came after | what its authors claim |
# |---|---|---|
# | norm after the sum | before it (pre-norm, chapter 5) | training without warm-up |
# | LayerNorm | RMSNorm (2019) | fewer operations |
# | feed-forward layer with ReLU | SwiGLU (2020) | better results from as many weights |
# | sinusoids, added once | rotary positions (2021) | scores that depend on distance |
# | a key and a value for each head | grouped queries (2023) | a smaller cache |
# | scores of any size | QK-norm (2020) | a softmax that saturates less |
# | every matrix begins at random | zeroed outputs (2019) | training without norms |
# | Adam | Muon (2024) | fewer steps |
#
# Llama 3 has RMSNorm, SwiGLU, rotary positions and grouped queries. Qwen3, built here, adds QK-norm. The last two rows are in neither.

# %%
figures.todays_block()

# %% [markdown]
# ## RMSNorm
#
# > **In short.** LayerNorm gives a vector mean 0 and length $\sqrt D$, then a learned scale and shift. RMSNorm leaves out the mean and the shift.
#
# [Zhang and Sennrich (2019)](https://arxiv.org/abs/1910.07467) define, with the usual tiny $\epsilon$ added, for $x, \gamma \in \mathbb{R}^D$:
#
# $$ \mathrm{RMSNorm}(x)_i = \gamma_i\,\frac{x_i}{\sqrt{\frac1D\sum_j x_j^2 + \epsilon}} $$
#
# **Your turn.** Write `RMSNorm`.


# %% tags=["yours"]
class RMSNorm(nn.Module):
    """Each vector scaled to a mean square of 1, then a learned scale (Zhang and Sennrich 2019, eq. 4).

    `weight` (D,) starts at 1; `eps` is under the root.
    """

    def __init__(self, features: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(features)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., D)."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


# %%
torch.manual_seed(0)
x, ours, theirs = torch.randn(5, 16), RMSNorm(16), nn.RMSNorm(16, eps=1e-5)
for norm in (ours, theirs):
    scramble(norm)  # the same noise: with every γ at 1, a forgotten γ would not show
torch.testing.assert_close(ours(x), theirs(x))

# %% [markdown]
# **Predict.** Which norm gives another output for `3 * x`, and which for `x + 3`?

# %%
for norm in (LayerNorm(16, eps=0.0), RMSNorm(16, eps=0.0)):
    moved = [(norm(changed) - norm(x)).abs().max().item() for changed in (3 * x, x + 3)]
    print("{}: 3 * x moves it by {:.2f}, x + 3 by {:.2f}".format(type(norm).__name__, *moved))

# %% [markdown]
# A longer vector changes neither output (ε is 0 here). The shift changes that of RMSNorm, which doesn't subtract the mean.
#
# ## SwiGLU
#
# > **In short.** ReLU lets a hidden unit's number pass or stops it. SwiGLU multiplies the number by another, its *gate*, which is computed from the same input.
#
# [Shazeer (2020)](https://arxiv.org/abs/2002.05202) widens $x$ by two linear maps. One goes through $\mathrm{SiLU}(z) = z\,\sigma(z)$, with $\sigma$ the logistic function, and becomes the gate of the other:
#
# $$ \mathrm{SwiGLU}(x) = \big(\mathrm{SiLU}(xW_g) \odot xW_1\big)\,W_2, \qquad W_g, W_1: (D, F),\quad W_2: (F, D) $$
#
# With $F$ at two thirds of 2017's width, these three matrices have as many weights as 2017's two.

# %%
z = torch.linspace(-3, 2, 101)
units = {f"SwiGLU, W_1 gives {u:g}": F.silu(z) * u for u in (2.0, 1.0, -1.0)}
figures.gates_chart(z, {"ReLU": z.relu()} | units)


# %%
class SwiGLU(nn.Module):
    """(SiLU(x·W_g) ⊙ x·W₁)·W₂ at every position, without biases (Shazeer 2020, eq. 6)."""

    def __init__(self, d_model: int, width: int, dropout: float = 0.0):
        super().__init__()
        self.gate, self.expand = (nn.Linear(d_model, width, bias=False) for _ in range(2))
        self.contract = nn.Linear(width, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., D), through (..., width)."""
        return self.contract(self.dropout(F.silu(self.gate(x)) * self.expand(x)))


# %%
layer = SwiGLU(16, 24)
z, unit = layer.gate(x), layer.expand(x)
hidden = z * F.glu(torch.cat((unit, z), dim=-1))  # PyTorch's `glu` is unit · σ(z)
torch.testing.assert_close(layer(x), layer.contract(hidden))

# %% [markdown]
# ## Rotary positions
#
# > **In short.** Don't add a position to a word's vector. Turn its query and key by an angle that grows with the position. Of two positions a score then sees only the *difference*.
#
# Rotary position embedding, or RoPE ([Su et al. 2021](https://arxiv.org/abs/2104.09864)), takes a head's $d$ features in pairs, each a point in a plane. At position $m$ pair $i$ is turned by the angle $m\omega_i$, with $\omega_i = 10000^{-2i/d}$: chapter 3's frequencies. **Predict.** A query and a key move five places on. What happens to the angle between their arrows (one pair each)?

# %%
places = {"query at 4, key at 1": (4, 1), "query at 9, key at 6": (9, 6)}
arrows = {name: {"query": 0.5 + 0.4 * m, "key": 1.0 + 0.4 * n} for name, (m, n) in places.items()}
before, after = (angles["query"] - angles["key"] for angles in arrows.values())
assert abs(before - after) < 1e-9
titled(
    figures.turning_chart(arrows),
    "Both arrows turn, and the angle between them stays",
    "One pair of features; each place turns an arrow by 0.4 radians.",
)

# %% [markdown]
# The angle stays, since both arrows turn by the same amount. So the arrows' dot product, this pair's part of the score, stays too. For all pairs, let the matrix $R_m$ $(d, d)$ make the turns of position $m$:
#
# $$ (R_m q)^\top (R_n k) = q^\top R_m^\top R_n\,k = q^\top R_{n-m}\,k $$
#
# Values are *not* turned (exercise 3). **Your turn.** Write `rotated`; it pairs feature $i$ with feature $i + d/2$. Complex numbers check it: $(a + b\mathrm{i})\,e^{\mathrm{i}m\omega}$ is the point $(a, b)$, turned by $m\omega$.


# %% tags=["yours"]
def rotated(x: Tensor, start: int = 0) -> Tensor:
    """Each point turned by place times frequency (Su et al. 2021, eq. 34, but halves, not neighbours).

    x (..., T, d), d even, whose first token stands at position `start`; to (..., T, d). Features
    i and i + d/2 are a point.
    """
    half, kind = x.size(-1) // 2, {"device": x.device, "dtype": torch.float64}
    places = torch.arange(start, start + x.size(-2), **kind)
    angle = places.unsqueeze(-1) * 10_000.0 ** -(torch.arange(half, **kind) / half)  # (T, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # (..., T, d/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# %%
torch.manual_seed(0)
q, k = torch.randn(2, 7, 16)  # (T, d) each
angle = torch.arange(3.0, 10.0).unsqueeze(-1) * 10_000.0 ** -(torch.arange(8) / 8)
turned = torch.complex(*q.chunk(2, dim=-1)) * torch.polar(torch.ones(7, 8), angle)
torch.testing.assert_close(rotated(q, start=3), torch.cat((turned.real, turned.imag), dim=-1))
scores = rotated(q) @ rotated(k).mT  # (T, T)
for start in (1, 10, 200):  # the whole text moves, and no score changes
    torch.testing.assert_close(rotated(q, start) @ rotated(k, start).mT, scores)

# %% [markdown]
# ## Grouped queries
#
# > **In short.** While it writes, a decoder keeps the keys and values of earlier tokens: the *cache*. If several heads share one key and one value, the cache shrinks.
#
# In grouped-query attention ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)), H heads of queries share G heads of keys and values. A token then costs $2Gd$ numbers per layer instead of $2Hd$. With G = 1 this is *multi-query* attention ([Shazeer 2019](https://arxiv.org/abs/1911.02150)).

# %%
figures.shared_heads_chart()

# %% [markdown]
# ## QK-norm
#
# > **In short.** Queries and keys can grow in training until softmax gives nearly all weight to one word. QK-norm normalises both; then only learned scales can make scores large.
#
# [Henry et al. (2020)](https://arxiv.org/abs/2010.04245) proposed it; [Dehghani et al. (2023)](https://arxiv.org/abs/2302.05442) trained large models that diverged without it. In Qwen3 each head's query and key pass through an RMSNorm before they are turned. If all $\gamma_i = 1$, both get the length $\sqrt d$, and a turn keeps lengths. By the Cauchy-Schwarz inequality a score is then at most
#
# $$ \frac{|q \cdot k|}{\sqrt d} \le \frac{\|q\|\,\|k\|}{\sqrt d} = \sqrt d $$

# %% [markdown]
# ## Attention, written down
#
# `remember` makes the keys and values of new tokens, and `queries` their queries. In `look` these queries attend to all keys and values kept so far. `forward` does it for a whole text. **Your turn.** Write the four.


# %% tags=["yours"]
class Attention(nn.Module):
    """Causal self-attention with grouped queries, QK-norm and rotary positions.

    It holds `h` and `groups`; the linear layers `project_query`, `project_key`, `project_value` and
    `project_output`, without biases; and an RMSNorm of d features each, `query_norm` and `key_norm`.
    """

    def __init__(self, d_model: int, h: int, groups: int):
        super().__init__()
        self.h, self.groups, d = h, groups, d_model // h
        self.project_query = nn.Linear(d_model, d_model, bias=False)
        self.project_key = nn.Linear(d_model, groups * d, bias=False)
        self.project_value = nn.Linear(d_model, groups * d, bias=False)
        self.project_output = nn.Linear(d_model, d_model, bias=False)
        self.query_norm, self.key_norm = RMSNorm(d), RMSNorm(d)

    def remember(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, T, d) of x (B, T, D), whose first token stands at `start`."""
        k = self.key_norm(split_heads(self.project_key(x), self.groups))
        return rotated(k, start), split_heads(self.project_value(x), self.groups)

    def queries(self, x: Tensor, start: int = 0) -> Tensor:
        """Queries (B, H, T, d) of x (B, T, D), whose first token stands at `start`."""
        return rotated(self.query_norm(split_heads(self.project_query(x), self.h)), start)

    def look(self, x: Tensor, kept: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """x (B, T, D), the last T of the S tokens whose keys and values are `kept`; to (B, T, D)."""
        q = self.queries(x, start=kept[0].size(2) - x.size(1))
        k, v = (part.repeat_interleave(self.h // self.groups, dim=1) for part in kept)
        return self.project_output(merge_heads(attention(q, k, v, mask)[0]))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) to (B, T, D)."""
        return self.look(x, self.remember(x), subsequent_mask(x.size(1), x.device))


# %% [markdown]
# PyTorch's `scaled_dot_product_attention` must give the same outputs, and so must a decoder that reads token by token with a cache.


# %%
def token_by_token(layer: nn.Module, x: Tensor) -> Tensor:
    """Causal self-attention over x (B, T, D) with a cache, one token at a time: (B, T, D)."""
    kept, outputs = (), []
    for place, token in enumerate(x.split(1, dim=1)):  # (B, 1, D) each
        new = layer.remember(token, place)
        kept = [torch.cat(pair, dim=2) for pair in zip(kept, new, strict=True)] if kept else new
        outputs.append(layer.look(token, kept))
    return torch.cat(outputs, dim=1)


# %%
torch.manual_seed(0)
layer, x = Attention(32, h=4, groups=2), torch.randn(2, 6, 32)
scramble(layer, size=0.2)
q = rotated(layer.query_norm(split_heads(layer.project_query(x), 4)))
k = rotated(layer.key_norm(split_heads(layer.project_key(x), 2)))
v = split_heads(layer.project_value(x), 2)
heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # (B, H, T, d)
torch.testing.assert_close(layer(x), layer.project_output(merge_heads(heads)))
torch.testing.assert_close(token_by_token(layer, x), layer(x))
kept = k[0, :, 0].numel() + v[0, :, 0].numel()
print(f"numbers kept of a token: {kept}; with a key and a value for each head: {2 * 32}")

# %% [markdown]
# ## The block, and a language model
#
# > **In short.** The block is: norm, attention, sum; norm, SwiGLU, sum. A language model is an embedding table, a stack of blocks, a norm, and a *generator*, which turns vectors into logits. If the generator is the table itself, the two are *tied*.


# %% tags=["yours"]
class Block(nn.Module):
    """Today's layer, pre-norm. It holds `attention`, `feed_forward`, `attention_norm`, `feed_norm`."""

    def __init__(self, d_model: int, h: int, groups: int, width: int):
        super().__init__()
        self.attention, self.feed_forward = Attention(d_model, h, groups), SwiGLU(d_model, width)
        self.attention_norm, self.feed_norm = RMSNorm(d_model), RMSNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) to (B, T, D)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_norm(x))


# %%
block = Block(32, h=4, groups=2, width=48)
scramble(block, size=0.2)
y = x + block.attention(F.rms_norm(x, (32,), block.attention_norm.weight, 1e-5))
z = F.rms_norm(y, (32,), block.feed_norm.weight, 1e-5)
torch.testing.assert_close(block(x), y + block.feed_forward(z))


# %%
class LanguageModel(nn.Module):
    """N blocks of these `sizes` between a table and a generator: one matrix, if `tie`."""

    def __init__(self, vocab: int, N: int, d_model: int, tie: bool = True, **sizes: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.blocks = nn.Sequential(*(Block(d_model, **sizes) for _ in range(N)))
        self.norm = RMSNorm(d_model)
        self.generator = nn.Linear(d_model, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=d_model**-0.5)
        if tie:
            self.generator.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) to logits (B, T, V)."""
        return self.generator(self.norm(self.blocks(self.embed(ids))))


# %% [markdown]
# The six definitions have 61 lines without docstrings; `attention` is chapter 1's. Are they Qwen3? With the same random weights, Qwen3 in Hugging Face's `transformers` must give the same logits.


# %%
def qwen3_logits(model: LanguageModel, ids: Tensor) -> Tensor:
    """What `transformers`' Qwen3 makes of ids (B, T) with the weights of a tied `model`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    block, (vocab, d_model) = model.blocks[0], model.embed.weight.shape
    config = Qwen3Config(  # released ones: base 1,000,000, ε 1e-6, heads of their own size
        vocab_size=vocab,
        hidden_size=d_model,
        intermediate_size=len(block.feed_forward.gate.weight),
        num_hidden_layers=len(model.blocks),
        num_attention_heads=block.attention.h,
        num_key_value_heads=block.attention.groups,
        head_dim=d_model // block.attention.h,
        rms_norm_eps=block.attention_norm.eps,
        tie_word_embeddings=True,
    )
    library = Qwen3ForCausalLM(config).to(model.embed.weight.dtype).eval()
    with torch.no_grad():
        for theirs, ours in zip(library.parameters(), model.parameters(), strict=True):
            theirs.copy_(ours)  # the parameters stand in the same order
        return library(ids).logits


# %%
torch.manual_seed(0)
model, ids = LanguageModel(300, 3, 64, h=4, groups=2, width=160), torch.randint(300, (2, 40))
scramble(model, size=0.2)
logits = model(ids).detach()  # (B, T, V)
print(f"{logits.numel():,} logits, from {logits.min():.1f} to {logits.max():.1f}")
if find_spec("transformers"):  # `make bench` installs it
    torch.testing.assert_close(qwen3_logits(model, ids), logits, atol=1e-5, rtol=0)

# %% [markdown]
# All logits agree to 0.00001: the library computes norms and angles in 32 bits. With 64 they agree to $10^{-12}$ (`pytest -m audit tests/test_ch22_todays_block.py`).
#
# ### A case: two layouts
#
# The paper and Meta's Llama pair neighbours, features $2i$ and $2i + 1$. Hugging Face pairs $i$ with $i + d/2$. **Predict.** Which of our checks would notice the other layout: the shift of the text, the cache, or the comparison with Qwen3?


# %%
def rotated_in_pairs(x: Tensor, start: int = 0) -> Tensor:
    """The paper's layout: features 2i and 2i + 1 are a point. x (..., T, d) to (..., T, d)."""
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return torch.stack(rotated(halves, start).chunk(2, dim=-1), dim=-1).flatten(-2)


# %%
torch.manual_seed(0)
q, k = torch.randn(2, 7, 16)
pairs = rotated_in_pairs(q) @ rotated_in_pairs(k).mT
torch.testing.assert_close(rotated_in_pairs(q, 9) @ rotated_in_pairs(k, 9).mT, pairs)  # sound …
gap = (pairs - rotated(q) @ rotated(k).mT).abs().max()  # … and another function
print(f"the other layout: scores move by up to {gap:.1f}, of {pairs.abs().max():.1f}")

# %% [markdown]
# Of these three, only the comparison with Qwen3 does. Each layout alone is right. But weights trained with one give wrong scores in the other, without an error. Exercise 2 carries them over.
#
# ## Does QK-norm help at a high rate?
#
# > **In short.** Train a small model at four learning rates, the last too high. Take one part back to 2017, and train again.
#
# [Wortsman et al. (2023)](https://arxiv.org/abs/2309.14322) report that QK-norm helps at high learning rates. We try it with two blocks and the sample corpus's English captions. If QK-norm helps, then without it the training loss (*loss* below) at the highest rate is higher. Taking back RMSNorm or SwiGLU is the control.
#
# Is the reason a softmax that gives nearly all weight to one word? Then attention becomes sharp without QK-norm. Its *sharpness* is a position's largest attention weight, averaged over positions, heads and blocks. We measure it every tenth step and keep the largest.
#
# **Predict.** How sharp does attention become at 0.04, without QK-norm and with it?


# %%
TAKEN_BACK = ("Qwen3", "no QK-norm", "LayerNorm", "ReLU")
RATES = (0.005, 0.01, 0.02, 0.04)


def small_model(part: str, vocab: int) -> LanguageModel:
    """Qwen3 with two blocks of width 64, or the same with this part of 2017 in the blocks."""
    model = LanguageModel(vocab, 2, 64, tie="untied" not in part, h=4, groups=2, width=128)
    for block in model.blocks:
        if part == "no QK-norm":
            block.attention.query_norm = block.attention.key_norm = nn.Identity()
        elif part == "LayerNorm":
            block.attention_norm, block.feed_norm = nn.LayerNorm(64), nn.LayerNorm(64)
        elif part == "ReLU":  # as many weights
            block.feed_forward = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 64))
    return model


# %%
def sharpness(model: LanguageModel, ids: Tensor) -> float:
    """A position's largest attention weight: mean of ids (B, T), heads and blocks.

    The first position is left out, because it sees itself alone.
    """
    x, means = model.embed(ids), []
    for block in model.blocks:
        layer, y = block.attention, block.attention_norm(x)
        k, v = (
            part.repeat_interleave(layer.h // layer.groups, dim=1) for part in layer.remember(y)
        )
        weights = attention(layer.queries(y), k, v, subsequent_mask(ids.size(1)))[1]  # (B, H, T, T)
        means.append(weights[:, :, 1:].amax(dim=-1).mean().item())
        x = block(x)
    return sum(means) / len(means)


# %%
def train_small(
    model: LanguageModel, rate: float, seed: int, rows: Sequence, steps: int = 60, slow: float = 1.0
) -> Iterator[float]:
    """Train at this peak rate, 16 rows a step; give each step's loss, nats a piece.

    The matrices that make queries and keys learn at `slow` times the rate.
    """
    rng, groups = random.Random(seed), ([], [])
    for name, weight in model.named_parameters():
        groups[name.endswith(("query.weight", "key.weight"))].append(weight)
    adam = torch.optim.Adam([{"params": group} for group in groups])
    schedule = OneCycleLR(adam, [rate, slow * rate], steps, pct_start=0.2, cycle_momentum=False)
    for _ in range(steps):
        ids = pad_rows(rng.sample(rows, 16))  # (B, T+1)
        logits = model(ids[:, :-1]).flatten(0, 1)  # (B·T, V)
        loss = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=PAD)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        yield loss.item()


# %%
def swept(
    make: Callable, parts: Sequence, seeds: Sequence = (1,), rates: Sequence = RATES, **how: float
) -> pd.DataFrame:
    """The models that `make` makes of `parts`, trained at each of `rates` with each of `seeds`.

    `loss` is the mean of the last ten steps, `sharpness` the largest of every tenth step.
    """
    trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
    pairs = encode_pairs(load_corpus("sample")["train"], trained.tokenizer)
    rows = sorted((pair.tgt for pair in pairs), key=len)[:2000]  # the shortest captions, in ids
    asked = torch.tensor(rows[-64:])[:, :-1]  # every position has a next piece to predict
    runs = []
    for part, rate, seed in itertools.product(parts, rates, seeds):
        torch.manual_seed(seed)
        model, losses, sharp = make(part, len(trained.tokenizer)).float(), [], []
        for loss in train_small(model, rate, seed, rows, **how):
            losses.append(loss)
            if len(losses) % 10 == 0:
                sharp.append(sharpness(model, asked))
        runs.append((part, rate, seed, sum(losses[-10:]) / 10, max(sharp)))
    return pd.DataFrame(runs, columns=["part", "rate", "seed", "loss", "sharpness"])


# %%
# NBVAL_IGNORE_OUTPUT
live = swept(small_model, TAKEN_BACK)
live.pivot(index="part", columns="rate", values=["loss", "sharpness"]).round(2)

# %% [markdown]
# In these single runs attention without QK-norm becomes sharp. Is that what harms? Let queries and keys learn at a quarter of the rate (`slow=0.25`): attention stays soft. If sharpness is the whole reason, leaving out QK-norm then does no harm.
#
# The record [`block-rates.json`](../results/block-rates.json) (`python -m scripts.studies.block_rates --save`) has eight seeds of each, and of slowed models:

# %%
compared = ["Qwen3", "no QK-norm", "Qwen3, slowed", "no QK-norm, slowed", "LayerNorm", "ReLU"]
added, sharp = added_loss(compared), small_runs("sharpness")[compared]  # rows: (rate, seed)
at_high = added.loc[0.04].agg(["mean", "sem", "min", "max"]).T
at_high.assign(sharpness=sharp.loc[0.04].mean()).round(2)

# %%
figures.rates_chart(
    {"loss minus Qwen3's, nats": added[compared[:4]], "sharpness": sharp[compared[:4]]},
    "Without QK-norm a high rate harms, even where attention doesn't become sharp",
    "Dots are eight seeds, curves their means. Left: loss of the last ten of 60 steps, against "
    "Qwen3 (slowed, if the model is) with the same rate and seed.",
)

# %% [markdown]
# **What we see.** At 0.04 the loss without QK-norm is higher with each seed, by 0.26 nats on average. Taking back RMSNorm or SwiGLU does no harm. Sharpness is 0.93 without QK-norm, and 0.52 with it. With slow queries and keys it is 0.47, but 0.14 nats remain (seven of eight seeds).
#
# **What it means.** Sharp attention doesn't explain it all. At 0.005 QK-norm costs 0.05 nats. There attention is sharper with it, because it lengthens a fresh model's short queries and keys.
#
# ## Outputs that begin at zero
#
# > **In short.** Start each sublayer's last matrix at zero. Then a fresh block passes on its input unchanged.
#
# A sublayer adds $f(x)W$ to $x$. Fixup ([Zhang et al. 2019](https://arxiv.org/abs/1901.09321)) starts with $W = 0$. $W$ can still learn: its gradient is $f(x)^\top$ times the gradient that arrives.


# %%
def zero_outputs(model: LanguageModel) -> None:
    """Set to zero what each attention and feed-forward layer adds at the start."""
    for block in model.blocks:
        nn.init.zeros_(block.attention.project_output.weight)
        nn.init.zeros_(block.feed_forward.contract.weight)


# %% [markdown]
# Such blocks first pass on the vector of the word just read. With tied tables the generator compares it with every word's vector, and finds this word again. So the model will predict it, nearly always wrongly.
#
# Does this first guess do harm? Two controls lack it. *Untied*, the generator has its own table. *Flipped*, every second scale of the last norm starts at −1: half the terms of the word's own logit are then negative. If zeroed outputs harm these as well, the guess isn't the reason. **Predict.** How much probability does each model give the word just read?


# %%
STARTS = ("Qwen3", "zeroed", "untied", "untied, zeroed", "flipped", "flipped, zeroed")


def started_model(start: str, vocab: int) -> LanguageModel:
    """The small Qwen3 with one of STARTS."""
    model = small_model(start, vocab)
    if "flipped" in start:
        model.norm.weight.data[::2] = -1  # every second scale γ of the last norm
    if "zeroed" in start:
        zero_outputs(model)
    return model


# %%
ids = torch.arange(1000).view(50, 20)
for start in STARTS:
    torch.manual_seed(0)
    probabilities = started_model(start, 1000)(ids).softmax(dim=-1)
    again = probabilities.gather(-1, ids.unsqueeze(-1)).mean()
    print(f"{start}: {again:.1%} for the word just read")

# %% [markdown]
# Of the zeroed models only the first expects the word again. What do zeroed outputs add to the loss (eight seeds), and does it last?

# %%
added = added_loss(["zeroed", "untied, zeroed", "flipped, zeroed"])
added["zeroed, 240 steps"] = added_loss(["zeroed"], steps=240)
added.groupby("rate").agg(["mean", "sem"]).round(2).T

# %%
figures.rates_chart(
    {"loss added by zeroed outputs, nats": added},
    "Zeroed outputs harm only where they repeat the word just read, and not for long",
    "Dots are eight seeds, curves their means: loss of the last ten of 60 steps, or of 240.",
)

# %% [markdown]
# **What we see.** In 60 steps zeroed outputs cost the tied model up to 0.5 nats, and in 240 at most 0.03. The untied and the flipped model gain at every rate, on average.
#
# **What it means.** Zeroing gains, the less the higher the rate. But tied and zeroed, a model starts by repeating: against either control this guess costs 0.4 to 0.7 nats at every rate. At 0.005 the two cancel.
#
# ## Muon
#
# > **In short.** A gradient matrix has a few strong directions and many weak ones. Gradient descent steps mostly along the strong ones, as does Adam's first step. Muon steps along all of them about equally.
#
# Every matrix is a sum $U\Sigma V^\top = \sum_i \sigma_i u_i v_i^\top$, in which the $u_i$ are perpendicular unit vectors, and so are the $v_i$. The *singular value* $\sigma_i \ge 0$ says how strongly the matrix acts in direction i. Muon ([Jordan et al. 2024](https://kellerjordan.github.io/posts/muon/)) takes the gradients' running average, replaces every $\sigma_i$ by 1, and steps by the result, $UV^\top$, times a factor for its shape.
#
# No decomposition is needed. Since $(XX^\top)X = U\Sigma^3 V^\top$, an odd polynomial changes only the singular values. Five rounds of this one bring all but tiny ones roughly to 1:
#
# $$ X \leftarrow 3.4445\,X - 4.7750\,(XX^\top)X + 2.0315\,(XX^\top)^2X $$


# %%
def orthogonalised(matrix: Tensor) -> Tensor:
    """A matrix (a, b) with its singular values moved near 1 (Jordan et al. 2024)."""
    if len(matrix) > matrix.size(1):  # the smaller side gives the products
        return orthogonalised(matrix.mT).mT
    x = matrix / matrix.norm()  # no singular value above 1
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def muon_step(weight: Tensor, gradient: Tensor, average: Tensor, rate: float, keep: float = 0.95):
    """Move a weight (a, b), and the running average of its gradients, in place."""
    average.lerp_(gradient, 1 - keep)
    ahead = gradient.lerp(average, keep)  # the newest gradient counts once more (Nesterov)
    weight -= rate * max(1, len(weight) / weight.size(1)) ** 0.5 * orthogonalised(ahead)


# %% [markdown]
# Take the shipped small translator's loss on 64 sentences, and the gradients of its four widening feed-forward matrices (256, 128). **Predict.** How many of the 128 singular values hold 90% of $\sum_i \sigma_i^2$?

# %%
trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
translator, pairs = trained.model.double().eval(), load_corpus("sample")["test"][:64]
batch, criterion = make_batch(encode_pairs(pairs, trained.tokenizer)), LabelSmoothing(0.1)
loss, _ = batch_loss(translator, batch, criterion)
layers = [*translator.encoder.layers, *translator.decoder.layers]
gradients = torch.autograd.grad(loss, [layer.feed_forward.expand.weight for layer in layers])
for gradient in gradients:
    U, S, Vh = torch.linalg.svd(gradient, full_matrices=False)
    share = S.square().cumsum(0) / S.square().sum()
    print(f"{int((share < 0.9).sum()) + 1} of {len(S)} directions hold 90% of the squares' sum")

# %%
step = orthogonalised(gradient)
after = (U.mT @ step @ Vh.mT).diagonal()  # what became of each singular value
torch.testing.assert_close(step, (U * after) @ Vh)  # the directions are the same
print(f"after: {after[:-1].min():.2f} to {after[:-1].max():.2f}, and the last {after[-1]:.2f}")

# %% [markdown]
# Adam's first step is the gradient's sign, number by number. How far does it go along the same directions?

# %%
adam = (U.mT @ gradient.sign() @ Vh.mT).diagonal().abs()
figures.spectrum_chart(
    {"gradient": S / S[0], "its sign (Adam)": adam / adam[0], "Muon's step": after},
    "Muon's step is even, but for the last direction; Adam's first isn't",
)

# %% [markdown]
# Why does one direction stay behind? The gradient is a sum over words, $\sum \delta y^\top$, where the matrix reads $y$ and $\delta$ is the gradient of what it gives. So a direction that no $y$ has gets none. Here $y$ comes from a LayerNorm: $y_i = \gamma_i n_i + \beta_i$ with $\sum_i n_i = 0$. So $y$'s part along $1/\gamma$ is the same for every word, and with this $\beta$ near 0:

# %%
norm = layers[-1].sublayer[2].norm
unseen = F.normalize(1 / norm.weight, dim=0)
print(f"cosine: {abs(Vh[-1] @ unseen):.4f}, and every y's part along it: {norm.bias @ unseen:.3f}")

# %% [markdown]
# Embeddings, norms and biases stay with Adam ([`optimizers.py`](../scripts/core/optimizers.py)).
#
# ## On record
#
# > **In short.** A translator's BLEU judges each part.
#
# [`block-multi30k.json`](../results/block-multi30k.json) (`python -m scripts.studies.block --save`) has chapter 19's translator (tied tables, three passes over Multi30k).
#
# - *2017* has the norm before each sublayer. Rows not named *today* change one part.
# - *Today* changes all but the optimizer. In cross-attention it changes only the norm and the output matrix, which it zeroes.
# - Keys are shared in the decoder's self-attention alone.
# - In Muon's rows Adam has the same rate.
# - One seed chose each row's rate, and three others count. *Better* and *worse* hold for the record's nineteen comparisons together (Holm's test); each interval is for its row alone.
#
# **Predict.** Which part alone gains most BLEU?

# %%
rows = list(RIVALS_OF_PARTS)[:11]  # those of this chapter
figures.parts_chart(
    counted_runs(), ["2017", *rows], "Alone, rotary gains most; of all, today's block with Muon"
)

# %%
judged, rates = block_verdicts(), block_means(rows)["lr"]
for row in rows:
    print(f"{verdict_line(row, judged[row], RIVALS_OF_PARTS[row])}; rate {rates[row]}")

# %% [markdown]
# - **Alone,** rotary positions gain 3.0 BLEU and Muon 1.5. Zeroed outputs cost 2.4. In a fresh translator they raise the probability of the word just read, from about 2% to about 25% (`pytest tests/test_studies_block.py -k guess`). Whether this is the reason wasn't tested.
# - **Together,** the parts of *today* gain 1.6 over *2017*, less than rotary alone; after nine passes they gain 2.9 (not tested). Not zeroed, *today* gains 2.5 more.
# - **With Muon,** *today* is 5.5 above *today* with Adam, and 7.1 above *2017* (not tested). Muon without zeroing wasn't run.
# - **In BLEU, no difference is detected** for RMSNorm, SwiGLU, QK-norm, grouped and multi-query attention. (SwiGLU's validation loss is 0.08 lower.)
#
# ## Summary
#
# - Rotary positions let a score see only the difference of positions.
# - QK-norm bounds the scores, up to learned scales. For 60 steps it makes too high a rate less harmful.
# - Tied and zeroed, a model starts by repeating. In 60 steps this costs our small model 0.4 to 0.7 nats, in 240 hardly anything.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Who shares with whom
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# From the keys of G groups make keys for h heads, as `Attention` needs them: neighbouring heads share. Do it without `repeat_interleave`. (`solution("shared_heads")` shows ours.)


# %%
def shared_heads(k: Tensor, h: int) -> Tensor:
    """Keys of G groups (B, G, S, d_k) for h heads (B, h, S, d_k): neighbours share."""
    ...


check(shared_heads)

# %% [markdown]
# ### Exercise 2 · From one layout to the other
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# A model was trained with the paper's layout (`rotated_in_pairs`). Reorder the rows of a query's or key's weight (D, D), so that `rotated` makes the same scores with h heads. (`solution("half_layout")` shows ours.)


# %%
def half_layout(weight: Tensor, h: int) -> Tensor:
    """The rows of a weight (D, D), reordered within each of h heads for `rotated`."""
    ...


check(half_layout)

# %% [markdown]
# ### Exercise 3 · What isn't turned
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Why are values not turned? An RMSNorm whose scales are all 1 may stand before the rotation or after it. Why may one with learned scales stand only before it?
#
# <details><summary>An answer</summary>
#
# The attention weights already know the distance. Turned values would make the output depend on *where* the words stand. A rotation keeps lengths, so with scales of 1 both orders agree. Learned scales Γ after the turn would undo the property: $q^\top R_m^\top \Gamma_q \Gamma_k R_n k$ no longer depends on $n - m$ alone.
#
# </details>
#
# Next: [Chapter 23 · Long memory](ch23_long_memory.ipynb)
