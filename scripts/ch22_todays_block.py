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
# After this chapter you can read the code of a current language model's layer: you will have written each part as a drop-in for a part of chapters 2 to 4, checked it, and put the block together.
#
# | | |
# |---|---|
# | In the paper | §3 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), revisited |
# | Time | 20 minutes to read, 45 with the code; 15 seconds to run on a CPU |
# | Before, after | [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb) · [Chapter 23 · Long memory](ch23_long_memory.ipynb) |
#
# *If you read only three cells:* `rotated`, `TodaysAttention`, the encoder layer in PyTorch's own functions.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary; **G** groups of heads, **F** the feed-forward layer's width.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import copy
from collections.abc import Callable, Sequence

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.charts import heatmap, titled
from scripts.book.exercises import check
from scripts.book.figures.since import gates_chart, sharpness_chart, spectrum_chart
from scripts.book.figures.understanding import rival_dots
from scripts.book.instruments import scramble
from scripts.book.records import load_record
from scripts.book.verdict import Verdict, verdict_line, verdicts
from scripts.ch01_attention import attention, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import equivariance_gap, shift_matrix
from scripts.ch04_encoder_decoder import (
    EncoderDecoder,
    LayerNorm,
    PositionwiseFeedForward,
    initialise,
    make_model,
)
from scripts.ch06_training import LabelSmoothing, batch_loss
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch19_ablations import drop_positions
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## What changed, and what did not
#
# > **In short.** The plan of 2017 stands: attention, a feed-forward layer, and a residual sum around each. Nearly every *part* has been replaced.
#
# | part of 2017 | chapter | what came after | what its authors claim |
# |---|---|---|---|
# | LayerNorm | 4 | RMSNorm (2019) | fewer operations |
# | feed-forward with ReLU | 4 | SwiGLU (2020), ReLU² (2021) | better results from as many weights |
# | sinusoids, added once | 3 | rotary positions (2021) | scores that depend on distance |
# | a key and a value for each head | 2 | grouped queries (2023) | a smaller cache |
# | scores of any size | 1 | QK-norm (2020, 2023) | better with little data; steadier training |
# | norm after each sum | 4, 5 | norm before each sublayer (chapter 4) | training without a long warm-up |
# | Xavier's start for every matrix | 5 | zeroed outputs (2019) | steadier first steps |
# | Adam | 6 | Muon (2024) | fewer steps |
#
# Llama 3 has RMSNorm, SwiGLU, rotary positions and grouped queries; Qwen3 adds QK-norm.
#
# ### A seam
#
# Chapter 2's layer does three things in one method. We separate them: `remember` makes keys and values (a decoder's cache), `query_heads` makes queries, and `mix` attends. `start`, the position of the first token, is for rotary positions.


# %%
class OpenAttention(MultiHeadedAttention):
    """Chapter 2's layer with its steps as methods, so that each can be replaced: the same numbers."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1):
        super().__init__(h, d_model, dropout)
        self.groups = h  # heads that keys and values have

    def remember(self, key: Tensor, value: Tensor, start: int = 0) -> tuple[Tensor, ...]:
        """What is kept of key and value (B, S, D): two of (B, G, S, d_k)."""
        k = split_heads(self.project_key(key), self.groups)
        return k, split_heads(self.project_value(value), self.groups)

    def query_heads(self, query: Tensor, start: int = 0) -> Tensor:
        """query (B, T, D) to (B, H, T, d_k)."""
        return split_heads(self.project_query(query), self.h)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q (B, H, T, d_k), k and v (B, H, S, d_k), mask (B|1, H|1, T|1, S), to (B, H, T, d_k)."""
        x, weights = attention(q, k, v, mask, self.dropout)
        self.attn = weights.detach()
        return x

    def look(
        self, query: Tensor, kept: Sequence[Tensor], mask: Tensor | None = None, start: int = 0
    ) -> Tensor:
        """query (B, T, D), whose first token stands at `start`, over what was kept: (B, T, D)."""
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)  # (B, 1, T, S)
        x = self.mix(self.query_heads(query, start), *kept, mask)  # (B, H, T, d_k)
        return self.project_output(merge_heads(x))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """As in `MultiHeadedAttention`."""
        return self.look(query, self.remember(key, value), mask)


# %% [markdown]
# `token_by_token` runs a layer as a decoder does, with a cache. Causal attention over the whole text must give the same outputs.


# %%
def appended(kept: Sequence[Tensor] | None, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What was kept, each (B, G, S, d), with new tokens (B, G, T, d) at its end."""
    if kept is None:
        return tuple(new)
    return tuple(torch.cat(pair, dim=2) for pair in zip(kept, new, strict=True))


def token_by_token(layer: nn.Module, x: Tensor, forgetful: bool = False) -> Tensor:
    """Causal self-attention over x (B, T, D) with a cache, one token at a time: (B, T, D).

    `forgetful` tells each token that it is the first: a fault, to be found.
    """
    kept, out = None, []
    for t, token in enumerate(x.split(1, dim=1)):  # (B, 1, D) each
        start = 0 if forgetful else t
        kept = appended(kept, layer.remember(token, token, start))
        out.append(layer.look(token, kept, None, start))
    return torch.cat(out, dim=1)


# %%
x, causal = torch.randn(2, 6, 32), subsequent_mask(6)  # (B, T, D)
of_2017, opened = MultiHeadedAttention(4, 32, 0.0), OpenAttention(4, 32, 0.0)
opened.load_state_dict(of_2017.state_dict())
assert torch.equal(opened(x, x, x, causal), of_2017(x, x, x, causal))
torch.testing.assert_close(token_by_token(opened, x), opened(x, x, x, causal))

# %% [markdown]
# ## RMSNorm
#
# > **In short.** LayerNorm centres, scales, stretches and shifts. Leave out the centring and the shift, and the vector's length is still under control.
#
# [Zhang and Sennrich (2019)](https://arxiv.org/abs/1910.07467) define, for $x, \gamma \in \mathbb{R}^D$:
#
# $$ \mathrm{RMSNorm}(x)_i = \gamma_i\,\frac{x_i}{\sqrt{\frac1D\sum_j x_j^2 + \epsilon}} $$


# %%
class RMSNorm(nn.Module):
    """Each vector scaled to a mean square of 1, then a learned scale (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, features: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., D)."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


# %% [markdown]
# This is `nn.RMSNorm`. On a vector of mean 0 it is LayerNorm, since the variance is then the mean square. **Predict.** Which of the two norms notices `3 * x`, and which `x + 3`?

# %%
torch.manual_seed(0)
x = torch.randn(5, 16)
torch.testing.assert_close(RMSNorm(16)(x), nn.RMSNorm(16, eps=1e-5)(x))
centred = x - x.mean(-1, keepdim=True)
torch.testing.assert_close(RMSNorm(16)(centred), LayerNorm(16)(x))
for norm in (LayerNorm(16, eps=0.0), RMSNorm(16, eps=0.0)):
    moved = [(norm(changed) - norm(x)).abs().max().item() for changed in (3 * x, x + 3)]
    print("{}: 3 * x moves it by {:.2f}, x + 3 by {:.2f}".format(type(norm).__name__, *moved))

# %% [markdown]
# ## SwiGLU and ReLU²
#
# > **In short.** ReLU lets a hidden unit through or not. A gate, learned from the same input, decides how much of it passes. ReLU² gates itself.
#
# In SwiGLU ([Shazeer 2020](https://arxiv.org/abs/2002.05202)) two maps widen $x$. One of them, passed through $\mathrm{SiLU}(z) = z\,\sigma(z)$, becomes the gate of the other:
#
# $$ \mathrm{SwiGLU}(x) = \big(\mathrm{SiLU}(xW_g) \odot xW_1\big)\,W_2, \qquad W_g, W_1: (D, F'),\quad W_2: (F', D) $$
#
# Its three matrices have as many weights as 2017's two if $F' = \tfrac23 F$.


# %%
class SwiGLU(nn.Module):
    """(SiLU(x·W_g) ⊙ x·W₁)·W₂ at every position, without biases (Shazeer 2020, eq. 6)."""

    def __init__(self, d_model: int, width: int, dropout: float = 0.1):
        super().__init__()
        self.gate = nn.Linear(d_model, width, bias=False)
        self.expand = nn.Linear(d_model, width, bias=False)
        self.contract = nn.Linear(width, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., D), through (..., width)."""
        return self.contract(self.dropout(F.silu(self.gate(x)) * self.expand(x)))


# %% [markdown]
# ReLU² ([So et al. 2021](https://arxiv.org/abs/2109.08668)) needs no third matrix. $\mathrm{ReLU}(z)^2 = \mathrm{ReLU}(z)\cdot z$: the gate and what it gates are the same map.


# %%
class SquaredReLU(PositionwiseFeedForward):
    """max(0, x·W₁ + b₁)²·W₂ + b₂ at every position (So et al. 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., D), through (..., d_ff)."""
        return self.contract(self.dropout(self.expand(x).relu().square()))


# %%
z = torch.linspace(-3, 2, 101)
gates_chart(z, {"SiLU, SwiGLU's gate": F.silu(z), "ReLU²": z.relu().square(), "ReLU": z.relu()})

# %% [markdown]
# ## Rotary positions
#
# > **In short.** Don't add a position to the word. Turn its query and its key by an angle that grows with the position. Then a score sees only the *difference* of the positions.
#
# Rotary position embedding, or RoPE ([Su et al. 2021](https://arxiv.org/abs/2104.09864)), takes the features in pairs, $(x_0, x_1), (x_2, x_3), \dots$, as points in a plane. At position $m$, pair $i$ is turned by the angle $m\omega_i$, with chapter 3's frequencies $\omega_i = 10000^{-2i/d}$ ($d = d_k$, the features of one head). All these turns together are a matrix $R_m$ $(d, d)$, and
#
# $$ (R_m q)^\top (R_n k) = q^\top R_m^\top R_n\,k = q^\top R_{n-m}\,k $$
#
# Values are *not* turned.


# %%
def rotated(x: Tensor, start: int = 0) -> Tensor:
    """Pairs of neighbouring features turned by place times frequency (Su et al. 2021, eq. 34).

    x (..., T, d), d even, whose first token stands at position `start`; to (..., T, d).
    """
    size, kind = x.size(-1), {"device": x.device, "dtype": torch.float64}
    places = torch.arange(start, start + x.size(-2), **kind)  # (T,)
    frequency = 10_000.0 ** -(torch.arange(0, size, 2, **kind) / size)  # (d/2,)
    angle = places.unsqueeze(-1) * frequency  # (T, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]  # (..., T, d/2)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


# %% [markdown]
# Check: chapter 3's `shift_matrix` is $R$, turning the other way. And if all words move by the same amount, no score changes.

# %%
torch.manual_seed(0)
q, k = torch.randn(2, 7, 16)  # (T, d) each
torch.testing.assert_close(rotated(q)[5], shift_matrix(-5, 16) @ q[5])

scores = rotated(q) @ rotated(k).mT  # (T, T)
for start in (1, 10, 200):
    torch.testing.assert_close(rotated(q, start) @ rotated(k, start).mT, scores)


# %% [markdown]
# The drop-in turns queries and keys after the projection. Then a layer sees order: chapter 3's `equivariance_gap` is above 0. Cross-attention isn't turned: "three words back" means nothing from an English word to a German one.


# %%
class RotaryAttention(OpenAttention):
    """Self-attention whose queries and keys are turned by their positions (Su et al. 2021)."""

    def remember(self, key: Tensor, value: Tensor, start: int = 0) -> tuple[Tensor, ...]:
        """Turned keys, and values as they are: (B, H, S, d_k) each."""
        k, v = super().remember(key, value, start)
        return rotated(k, start), v

    def query_heads(self, query: Tensor, start: int = 0) -> Tensor:
        """query (B, T, D) to turned heads (B, H, T, d_k)."""
        return rotated(super().query_heads(query, start), start)


# %%
torch.manual_seed(0)
x, blind, rotary = torch.randn(2, 6, 32), OpenAttention(4, 32, 0.0), RotaryAttention(4, 32, 0.0)
scramble(blind, size=0.2)  # a fresh layer's scores are nearly even
rotary.load_state_dict(blind.state_dict())
assert equivariance_gap(lambda x: blind(x, x, x), x[0, :5]) < 1e-12
assert equivariance_gap(lambda x: rotary(x, x, x), x[0, :5]) > 0.01
full = rotary(x, x, x, causal)
torch.testing.assert_close(token_by_token(rotary, x), full)

# %% [markdown]
# **Predict.** A text repeats one word ten times, and for once the word's query and key are the same vector. What pattern do the scores make?

# %%
same = rotated(torch.ones(10, 32))
pattern = same @ same.mT / 32
titled(
    heatmap(pattern, row_title="query's position", column_title="key's position", cell=26),
    "Equal words, constant diagonals",
    "Scores of ten equal words, 1 where both are turned alike. Each diagonal is one distance; on "
    "the whole they fall. It is symmetric only because query and key are equal here; otherwise +2 "
    "and −2 differ.",
)

# %% [markdown]
# **Pitfall.** There are two layouts. Ours pairs neighbours, as the paper does. Other code, including Hugging Face's Llama, pairs feature $i$ with feature $i + d/2$. Both pass the shift test, but weights trained with one and run with the other give nonsense, without an error. Compare with a *trained* model.
#
# **Pitfall.** With a cache, a token's position has to come from outside. Forget `start`, and every word stands at position 0.


# %%
def rotated_in_halves(x: Tensor, start: int = 0) -> Tensor:
    """The other layout: feature i is paired with feature i + d/2. x (..., T, d) to (..., T, d)."""
    half = x.size(-1) // 2
    paired = torch.stack((x[..., :half], x[..., half:]), dim=-1).flatten(-2)  # i beside i + d/2
    turned = rotated(paired, start)
    return torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)


# %%
halves = rotated_in_halves(q) @ rotated_in_halves(k).mT
torch.testing.assert_close(rotated_in_halves(q, 9) @ rotated_in_halves(k, 9).mT, halves)  # sound …
gap = (halves - scores).abs().max()  # … and another function of the same weights
print(f"the other layout: scores move by up to {gap:.1f}, of {scores.abs().max():.1f}")
gap = (token_by_token(rotary, x, forgetful=True) - full).abs().max()
print(
    f"positions forgotten in the cache: outputs move by up to {gap:.2f}, of {full.abs().max():.2f}"
)

# %% [markdown]
# ## One key for many heads
#
# > **In short.** A decoder keeps a key and a value for each token, head and layer. Let several heads share one key and one value, and that memory shrinks.
#
# Multi-query attention ([Shazeer 2019](https://arxiv.org/abs/1911.02150)) has one head of keys and values for all H heads of queries. Grouped-query attention ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)) has G of them, each for H/G heads of queries. A token then costs $2\,G d_k$ numbers per layer instead of $2\,H d_k$.


# %%
class GroupedAttention(OpenAttention):
    """`groups` heads of keys and values for `h` heads of queries (Shazeer 2019; Ainslie et al. 2023).

    Raises ValueError if `h` is not a multiple of `groups`.
    """

    def __init__(self, h: int, d_model: int, dropout: float = 0.1, groups: int = 1):
        super().__init__(h, d_model, dropout)
        if groups < 1 or h % groups:
            raise ValueError(f"{h} heads can't be dealt out to {groups} groups")
        self.groups = groups
        width = d_model // h * groups
        self.project_key = nn.Linear(d_model, width)
        self.project_value = nn.Linear(d_model, width)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q (B, H, T, d_k), k and v (B, G, S, d_k): neighbouring heads share a group."""
        each = self.h // self.groups
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))  # (B, H, S, d_k)
        return super().mix(q, k, v, mask)


# %%
for groups in (4, 2, 1):
    sharing = GroupedAttention(4, 32, 0.0, groups)
    full = sharing(x, x, x, causal)
    q, (k, v) = sharing.query_heads(x), sharing.remember(x, x)
    heads = F.scaled_dot_product_attention(q, k, v, causal, enable_gqa=True)  # (B, H, T, d_k)
    torch.testing.assert_close(full, sharing.project_output(merge_heads(heads)))
    torch.testing.assert_close(token_by_token(sharing, x), full)
    print(f"G = {groups}: {k[0, :, 0].numel() + v[0, :, 0].numel()} numbers kept for a token")

# %% [markdown]
# **Pitfall.** `repeat` for `repeat_interleave`. Both make H heads out of G. With `repeat`, a trained model's heads read another group's keys. With G = 1 or G = H there is no difference, so the two easiest tests don't notice.

# %%
k = torch.arange(2).view(1, 2, 1, 1)  # group 0 and group 1
print("repeat:           ", k.repeat(1, 2, 1, 1).flatten().tolist())
print("repeat_interleave:", k.repeat_interleave(2, dim=1).flatten().tolist())

# %% [markdown]
# ## QK-norm
#
# > **In short.** Queries and keys can grow in training until softmax sees only one word. Normalise both, and no score can exceed $\sqrt{d_k}$ times the largest learned scale of each norm.
#
# [Henry et al. (2020)](https://arxiv.org/abs/2010.04245) divided queries and keys by their lengths. [Dehghani et al. (2023)](https://arxiv.org/abs/2302.05442) put a LayerNorm there; large models diverged without it. Our form is Qwen3's: each head's query and key pass through an RMSNorm before they are turned. Their lengths become $\sqrt{d_k}$ (if all $\gamma_i = 1$), so by the Cauchy-Schwarz inequality
#
# $$ \frac{|q \cdot k|}{\sqrt{d_k}} \le \frac{\|q\|\,\|k\|}{\sqrt{d_k}} = \sqrt{d_k} $$
#
# A rotation keeps lengths, so the bound still holds after it.


# %%
class NormedAttention(GroupedAttention):
    """Attention with grouped queries and QK-norm: an RMSNorm on each head's query and key."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1, groups: int = 1):
        super().__init__(h, d_model, dropout, groups)
        self.query_norm, self.key_norm = RMSNorm(d_model // h), RMSNorm(d_model // h)

    def remember(self, key: Tensor, value: Tensor, start: int = 0) -> tuple[Tensor, ...]:
        """Normed keys, and values as they are: (B, G, S, d_k) each."""
        k, v = super().remember(key, value, start)
        return self.key_norm(k), v

    def query_heads(self, query: Tensor, start: int = 0) -> Tensor:
        """query (B, T, D) to normed heads (B, H, T, d_k)."""
        return self.query_norm(super().query_heads(query, start))


class TodaysAttention(RotaryAttention, NormedAttention):
    """Self-attention with grouped queries, QK-norm and rotary positions, in this order."""


# %% [markdown]
# **Predict.** We multiply the weights that make queries and keys by 1 to 16. What happens to the largest attention weight, with and without QK-norm?

# %%
torch.manual_seed(0)
text, sure, plain = torch.randn(1, 32, 64), [], RotaryAttention(4, 64, 0.0)  # (B, T, D)
initialise(plain)  # as in chapter 5
normed = TodaysAttention(4, 64, 0.0, groups=4)
normed.load_state_dict(plain.state_dict(), strict=False)  # the same layer, except for the norms
for name, of in {"without": plain, "QK-norm": normed}.items():
    for size in (1, 2, 4, 8, 16):
        layer = copy.deepcopy(of)
        with torch.no_grad():
            for p in (*layer.project_query.parameters(), *layer.project_key.parameters()):
                p *= size
            layer(text, text, text)
        sure.append({"times": size, "attention": name, "weight": layer.attn.amax(-1).mean().item()})
sure = pd.DataFrame(sure)
print(sure.pivot(index="attention", columns="times", values="weight").round(2).to_string())
sharpness_chart(sure)

# %% [markdown]
# ## Outputs that begin at zero
#
# > **In short.** Start each sublayer's last matrix at zero. Then, in a pre-norm model, every fresh layer passes its input on unchanged.
#
# A sublayer adds $f(x)W$ to $x$. Fixup ([Zhang et al. 2019](https://arxiv.org/abs/1901.09321)) starts with $W = 0$. $W$ can still learn: its gradient is $f(x)^\top$ times the gradient that arrives. The weights before it follow a step later.


# %%
def zero_outputs(model: nn.Module) -> None:
    """Sets to zero what each attention and feed-forward layer adds at the start."""
    for name, part in model.named_modules():
        if name.endswith(("project_output", "contract")):
            for p in part.parameters():
                nn.init.zeros_(p)


# %%
torch.manual_seed(0)
fresh = make_model(30, 30, N=6, d_model=32, d_ff=64, h=4, dropout=0.0, norm_first=True).eval()
src, tgt = torch.randint(4, 30, (2, 7)), torch.randint(4, 30, (2, 5))  # (B, S), (B, T)
zero_outputs(fresh)
torch.testing.assert_close(fresh.encode(src, None), fresh.encoder.norm(fresh.src_embed(src)))
fresh.generator(fresh(src, tgt, None, subsequent_mask(5))).sin().sum().backward()  # any loss
feed = fresh.decoder.layers[0].feed_forward
assert feed.contract.weight.grad.abs().max() > 0 and (feed.expand.weight.grad == 0).all()

# %% [markdown]
# **Pitfall.** Zeroing *both* matrices of a layer. Each waits for the other: with $f(x) = 0$ and $W = 0$ both gradients stay 0 for ever.

# %%
nn.init.zeros_(feed.expand.weight)
nn.init.zeros_(feed.expand.bias)
fresh.zero_grad()
fresh.generator(fresh(src, tgt, None, subsequent_mask(5))).sin().sum().backward()
dead = [p.grad.abs().max().item() for p in (feed.expand.weight, feed.contract.weight)]
print("largest gradients of a layer that was zeroed twice:", dead)

# %% [markdown]
# ## Muon
#
# > **In short.** A gradient matrix has a few strong directions and many weak ones. Gradient descent steps mostly along the strong ones. Adam evens out single numbers; Muon evens out directions.
#
# Every matrix is a sum $U\Sigma V^\top = \sum_i \sigma_i u_i v_i^\top$, in which the $u_i$ are perpendicular unit vectors, and so are the $v_i$. The *singular value* $\sigma_i \ge 0$ says how strongly the matrix acts in direction i. Muon ([Jordan et al. 2024](https://kellerjordan.github.io/posts/muon/)) takes as this matrix the running average of a weight's gradients. Its step is $U V^\top$, the same directions with equal strength, times $\sqrt{\max(1, \text{rows}/\text{columns})}$ (not in the code below). No decomposition is needed: since $(XX^\top)X = U\Sigma^3 V^\top$, an odd polynomial changes the singular values and leaves $U$ and $V$ alone. This one brings the values near 1 in five rounds; small ones grow fast, at the price of not settling at 1:
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


# %% [markdown]
# Take a real gradient, of one feed-forward matrix (256, 128) of the shipped small model, over 64 sentences. **Predict.** How many of its 128 singular values hold 90% of $\sum_i \sigma_i^2$?

# %%
trained = load_model(ROOT / "models" / "sample-de-en", "cpu")
model, pairs = trained.model.double().eval(), load_corpus("sample")["test"][:64]
loss, _ = batch_loss(model, make_batch(encode_pairs(pairs, trained.tokenizer)), LabelSmoothing(0.1))
gradient = torch.autograd.grad(loss, model.decoder.layers[0].feed_forward.expand.weight)[0]
U, S, Vh = torch.linalg.svd(gradient, full_matrices=False)
share = S.square().cumsum(0) / S.square().sum()
signs = torch.linalg.svdvals(gradient.sign()).square()  # Adam's first step: as far for each number
adams = signs.cumsum(0) / signs.sum()
for name, part in {"the gradient": share, "Adam's first step": adams}.items():
    print(f"{int((part < 0.9).sum()) + 1} of {len(S)} directions hold 90% of the square of {name}")

step = orthogonalised(gradient)
after = (U.mT @ step @ Vh.mT).diagonal()  # what became of each singular value
torch.testing.assert_close(step, (U * after) @ Vh)  # the directions are the same
low, high = after[:-1].min(), after[:-1].max()
print(f"all but the last now lie between {low:.2f} and {high:.2f}; the last: {after[-1]:.2f}")

# %%
spectrum_chart({"gradient": S / S[0], "after five rounds": after})

# %% [markdown]
# Muon is for matrices inside the layers; embeddings, norms and biases stay with Adam. [`optimizers.py`](../scripts/core/optimizers.py) has the whole optimizer.

# %% [markdown]
# ## The block of today
#
# > **In short.** Take chapter 4's Transformer and exchange its parts.
#
# Self-attention gets everything above, but only the decoder's has groups.


# %%
def exchange(model: nn.Module, kind: type, make: Callable[[str, nn.Module], nn.Module]) -> None:
    """Replace every part of exactly this kind by a fresh one, `make(its name, the part)`."""
    for name, part in list(model.named_modules()):
        if type(part) is kind:
            parent, _, last = name.rpartition(".")
            new = make(name, part)
            initialise(new)
            setattr(model.get_submodule(parent), last, new)


def attend_by(model: nn.Module, kind: Callable[..., nn.Module], groups: int | None = None) -> None:
    """Let self-attention be `kind(H, D, dropout)`; cross-attention is 2017's, opened.

    `groups`, if the kind has them, are the decoder's: an encoder keeps no cache, so it keeps all
    its heads.
    """

    def make(name: str, old: nn.Module) -> nn.Module:
        sizes = (old.h, old.project_query.in_features, old.dropout.p)
        if name.endswith("src_attn"):
            return OpenAttention(*sizes)
        if groups is None:
            return kind(*sizes)
        return kind(*sizes, groups=old.h if name.startswith("encoder") else groups)

    exchange(model, MultiHeadedAttention, make)


def feed_by(model: nn.Module, make: Callable[[int, int, float], nn.Module]) -> None:
    """Let each feed-forward layer be `make(D, F, dropout)`, of the old one's sizes."""
    exchange(
        model,
        PositionwiseFeedForward,
        lambda _, old: make(old.expand.in_features, old.expand.out_features, old.dropout.p),
    )


def norm_by_length(model: nn.Module) -> None:
    """Let each norm be an RMSNorm."""
    exchange(model, LayerNorm, lambda _, old: RMSNorm(len(old.weight)))


def gated(d_model: int, d_ff: int, dropout: float) -> nn.Module:
    """SwiGLU with as many weights as 2017's layer of width `d_ff`."""
    return SwiGLU(d_model, round(2 * d_ff / 3), dropout)


def renew(model: EncoderDecoder, groups: int = 2) -> None:
    """Give a fresh pre-norm Transformer the parts of today, in place; what is tied stays tied."""
    attend_by(model, TodaysAttention, groups=groups)
    feed_by(model, gated)
    norm_by_length(model)
    drop_positions(model)  # they are inside attention
    zero_outputs(model)


# %%
with torch.device("meta"):
    old, new = (
        make_model(2048, 2048, 2, 128, 256, 4, norm_first=True, tie="all") for _ in range(2)
    )
    renew(new)
for name, model in {"2017": old, "today": new}.items():
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters")
less_by_groups = 2 * 2 * (128 + 1) * 64  # layers, k and v, inputs and a bias, saved
print(f"{less_by_groups:,} of the difference are grouped keys' and values'")

# %% [markdown]
# Check: an encoder layer must equal one made of PyTorch's own functions.

# %%
torch.manual_seed(0)
translator = make_model(60, 60, 2, 32, 48, 4, dropout=0.0, norm_first=True, tie="all").eval()
renew(translator)
scramble(translator, size=0.1)  # or its outputs would be 0
layer, x = translator.encoder.layers[0], torch.randn(2, 7, 32)
attend, feed, (first, second) = layer.self_attn, layer.feed_forward, layer.sublayer
y = F.rms_norm(x, (32,), first.norm.weight, 1e-5)
projects = (attend.project_query, attend.project_key, attend.project_value)
q, k, v = (split_heads(project(y), 4) for project in projects)  # (B, H, T, d_k) each
q = rotated(F.rms_norm(q, (8,), attend.query_norm.weight, 1e-5))
k = rotated(F.rms_norm(k, (8,), attend.key_norm.weight, 1e-5))
y = x + attend.project_output(merge_heads(F.scaled_dot_product_attention(q, k, v)))
z = F.rms_norm(y, (32,), second.norm.weight, 1e-5)
y = y + feed.contract(F.silu(feed.gate(z)) * feed.expand(z))
torch.testing.assert_close(layer(x, None), y)

# %%
attend = translator.decoder.layers[0].self_attn
torch.testing.assert_close(token_by_token(attend, x), attend(x, x, x, subsequent_mask(7)))
kept = sum(part[0, :, 0].numel() for part in attend.remember(x, x))
print(f"{kept} numbers kept for a token; 2017's attention keeps {2 * 32}")

# %% [markdown]
# ## On record
#
# > **In short.** Alone, rotary positions and Muon are ahead of 2017's block, and zeroed outputs are behind. The whole block is ahead, too, and further ahead without zeroed outputs, or with Muon. For the other parts, no difference in BLEU is detected.
#
# The record of all this is [`block-multi30k.json`](../results/block-multi30k.json) (`python -m scripts.studies.block --save`). The base is chapter 19's (two layers of width 64, without dropout), with three passes over Multi30k instead of five. A sweep gave each row its rate. The scores are of three other seeds. BLEU, with a beam of 4, is that of the validation captions, whose loss also chose rate and pass.
#
# *Today* is the whole block, trained with Adam. (*Today, not zeroed* and chapter 23's *latent, decoder alone* came later, to explain the others.) **Predict.** Which part alone helps most? And is the block better than its best part?

# %%
OF_THIS_CHAPTER = {  # each row, and the one that it has to beat
    **dict.fromkeys(("RMSNorm", "SwiGLU", "ReLU²", "rotary", "QK-norm"), "2017"),
    **dict.fromkeys(("grouped-query", "multi-query", "zeroed outputs", "Muon", "today"), "2017"),
    "today, not zeroed": "today",
    "today, Muon": "today",
}
RIVALS_OF_PARTS = OF_THIS_CHAPTER | {  # and those of chapters 23 and 24
    "multi-query, across too": "multi-query",
    "latent, decoder alone": "rotary",  # which the encoder has
    "latent": "latent, decoder alone",
    "latent, across too": "latent",
    "window of 4": "2017",
    "linear attention": "2017",
    "experts": "SwiGLU",
}


def block_runs(epochs: int = 3) -> pd.DataFrame:
    """The runs on record of so many passes; `first` and `last` are training losses of a pass."""
    runs = pd.DataFrame(load_record("block-multi30k")["runs"])
    runs = runs[(runs["seed"] > 0) & (runs["epochs"] == epochs)]  # seed 0 chose what suits a row
    first, last = runs["trained"].str[0], runs["trained"].str[-1]
    return runs.assign(first=first, last=last, **{"log p": -runs["loss"]})


def block_means(rows: Sequence[str], epochs: int = 3) -> pd.DataFrame:
    """A line for each row of so many passes: rate, and its runs' mean losses (nats) and BLEU."""
    digits = {"lr": 4, "first": 2, "last": 3, "loss": 3, "bleu": 1}
    return block_runs(epochs).groupby("row")[[*digits]].mean().loc[[*rows]].round(digits)


def block_verdicts(score: str = "bleu") -> dict[str, Verdict]:
    """Each row of three passes against its rival, all tested together; more is better."""
    scores = block_runs().groupby("row")[score].agg(list).to_dict()
    return verdicts(scores, RIVALS_OF_PARTS)


# %%
runs, said, by_loss = block_runs(), block_verdicts(), block_verdicts("log p")
shown = ["2017", *OF_THIS_CHAPTER]
titled(
    rival_dots(runs[runs["row"].isin(shown)], OF_THIS_CHAPTER, title="validation BLEU, beam of 4"),
    "Rotary positions and Muon help; zeroed outputs don't",
    "Each point is a run, the tick a row's mean, the open diamond the mean that it has to beat.",
)

# %%
for row, rival in OF_THIS_CHAPTER.items():
    print(verdict_line(row, said[row], rival))
also = [row for row in OF_THIS_CHAPTER if by_loss[row].told and not said[row].told]
print("told apart by the loss alone:", also)
block_means(shown)

# %% [markdown]
# *first* and *last* are the training losses of the first and last pass, and *loss* is the validation loss, in nats per piece. The verdicts are on BLEU, with all nineteen rows of three passes, those of chapters 23 and 24 included, tested together.
#
# - **Rotary positions** gain 3.0 BLEU, as much as two more passes give 2017's block (30.1, chapter 19's base).
# - **Zeroed outputs** cost 2.4. One possible reason, untested: our tables are tied, so a fresh model tends to predict the word it has just read, and with zeroed outputs nothing disturbs that.
# - **The block** is 1.4 below rotary positions alone (not tested). Without zeroed outputs it gains 2.5 and is 1.1 above rotary alone, a difference that wouldn't pass with the nineteen. With Muon, zeroed outputs included, it is another 3.0 higher.
# - **SwiGLU** lowers the validation loss by 0.08 nats, which passes the test. Its 0.8 BLEU doesn't.
# - **RMSNorm, ReLU², QK-norm, grouped and multi-query attention:** no difference is detected by either measure. That they lose nothing isn't shown either: each interval is 1.7 BLEU wide.
#
# ### Three times as long
#
# The two blocks also got nine passes. For each, the rate was chosen again, and a dropout of 0 or 0.1. **Predict.** Does the lead of today's block grow or shrink?

# %%
scores = block_runs(epochs=9).groupby("row")["bleu"].agg(list).to_dict()
longer = verdicts(scores, {"today": "2017"})["today"]
print(verdict_line("today", said["today"], "2017"), "(three passes)")
print(verdict_line("today", longer, "2017"), "(nine)")
block_means(["2017", "today"], epochs=9)

# %% [markdown]
# The lead grows by 1.3 ± 1.2 BLEU, tested like one row's gain: borderline. In training loss it grows from 0.15 nats to 0.21, but in validation loss by only 0.02 ± 0.04.
#
# *What the record can't say:* what these parts do in a large model, or in longer training; nor whether Muon gains on today's block because of zeroed outputs or in spite of them.
#
# ## Summary
#
# - RMSNorm is LayerNorm without centring and shift. SwiGLU gates one map of the input by another.
# - Rotary positions turn queries and keys, so a score sees only the difference of positions.
# - Grouped queries shrink the cache. QK-norm bounds the scores.
# - Zeroed outputs make a fresh pre-norm layer the identity. Muon makes a step's singular values nearly equal.
#
# ## What these papers did that we don't
#
# They judged these parts in larger models. Today's language models are decoders alone, mostly without biases.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Who shares with whom
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# From the keys of G groups make keys for h heads, as `GroupedAttention` needs them: neighbouring heads share. Do it without `repeat_interleave`. (`solution("shared_heads")` shows ours.)


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
# You have weights trained with our layout, and a program with the other one (`rotated_in_halves`). Give the query's or key's weight (D, D) with its rows in another order, so that the program computes the same scores with h heads. (`solution("half_layout")` shows ours.)


# %%
def half_layout(weight: Tensor, h: int) -> Tensor:
    """The rows of a weight (D, D), reordered within each of h heads for the layout in halves."""
    ...


check(half_layout)

# %% [markdown]
# ### Exercise 3 · No positions, but a penalty
#
# *code · difficulty ●○○ · worth ●●○ · 15 minutes*
#
# ALiBi ([Press et al. 2021](https://arxiv.org/abs/2108.12409)) has no positions, and lowers each score by slope times distance, $m_n\,|i-j|$. Head $n = 1 \dots h$ has the slope $m_n = 2^{-8n/h}$. Write what is *added* to the scores (h, T, S). (`solution("alibi_bias")` shows ours.)


# %%
def alibi_bias(h: int, T: int, S: int) -> Tensor:
    """What ALiBi adds to the scores of h heads: (h, T, S), the queries at the last T positions."""
    ...


check(alibi_bias)

# %% [markdown]
# ### Exercise 4 · What isn't turned
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Why are values not turned? An RMSNorm whose scales are all 1 may stand before the rotation or after it. Why may one with learned scales stand only before it?
#
# <details><summary>An answer</summary>
#
# The attention weights already know the distance. Turned values would make the output depend on *where* in the text the words stand. A rotation keeps lengths, so with scales of 1 both orders agree. Learned scales Γ stretch each feature differently, and after the turn they would undo the property: $q^\top R_m^\top \Gamma_q \Gamma_k R_n k$ no longer depends on $n - m$ alone.
#
# </details>
#
# Next: [Chapter 23 · Long memory](ch23_long_memory.ipynb)
