# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: notebooks//ipynb,scripts//py:percent
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
# # Chapter 1 · Attention
#
# After this chapter you can compute attention by hand, write it in fifteen lines that survive every mask, and say what it costs.
#
# | | |
# |---|---|
# | In the paper | §3.2.1 (scaled dot-product attention), §3.2.3 (the causal mask), §4 (why self-attention) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 40 minutes to read, under a minute to run on a CPU; a GPU is not needed |
# | Before, after | [Chapter 0 · Start here](ch00_start_here.ipynb) · [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb) |

# %% tags=["bootstrap"]
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "set SERIES_REPOSITORY").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))

# %%
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterator

import altair as alt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.book.charts import GREY, PALETTE, heatmap, lines, rounded, titled
from scripts.book.exercises import blame, rejection, same_numbers
from scripts.book.instruments import count_flops, influence, saved_bytes

# %% [markdown]
# **Shapes.** The whole series uses one set of letters:
#
# | letter | meaning | letter | meaning |
# |---|---|---|---|
# | $B$ | sentences in a batch | $D$ | width of the model, `d_model` |
# | $S$ | source length: the tokens that are looked *at* | $H$ | heads (chapter 2) |
# | $T$ | target length: the tokens that *look* | $V$ | words in the vocabulary |
#
# This chapter adds $d_k$, the width of a query or key, and $d_v$, the width of a value. Where one sentence looks at itself,
# $T = S$, and we call both $n$.

# %% [markdown]
# ## 1. Dot products measure similarity
#
# > **In short.** Write each word as a list of numbers. Multiply two lists entry by entry and add up. Agreement makes the sum
# > large, disagreement makes it negative.
#
# For two vectors $q, k \in \mathbb{R}^{d_k}$:
#
# $$q \cdot k = \sum_{i=1}^{d_k} q_i k_i = \lVert q \rVert \, \lVert k \rVert \cos\theta$$
#
# where $\theta$ is the angle between them. For $T$ queries and $S$ keys at once, stacked as rows of $Q$ $(T, d_k)$ and
# $K$ $(S, d_k)$, all $T \times S$ dot products are one matrix product: $QK^\top$ $(T, S)$.
#
# Here are six words with three features that we made up: is it alive, is it a toy, is it big?

# %%
words = ["dog", "puppy", "horse", "ball", "doll", "house"]
features = np.array(
    [  # alive, toy, big
        [2, 0, 1],
        [2, 1, -1],
        [2, 0, 2],
        [-1, 2, -1],
        [0, 2, -1],
        [-2, 0, 2],
    ],
    dtype=np.float64,
)  # (6, 3)
similarity = features @ features.T  # (6, 6)

for i in range(6):
    for j in range(6):
        assert similarity[i, j] == sum(features[i, f] * features[j, f] for f in range(3))

# %% [markdown]
# **Predict.** Which word is most similar to *dog*: dog itself, puppy, or horse? Look along the first row.

# %%
titled(
    heatmap(
        similarity,
        words,
        words,
        value_title="dot product",
        scheme="diverging",
        domain=(-8, 8),
        digits=0,
    ),
    "Dot products of six hand-made word vectors",
    "Animals agree with animals, toys with toys. A house is everything that a puppy is not. "
    "The first row holds a surprise: a dog is closest to a horse.",
)

# %% [markdown]
# **Pitfall.** *A dot product is not the cosine.* It also rewards length. The horse's vector is longer than the dog's, so the
# dog scores 6 with the horse and only 5 with itself. Divide by both lengths and the surprise is gone: nothing is closer to a
# vector than itself. Attention keeps the plain dot product: a model may *use* the length, to make a word easy to find.

# %%
lengths = np.linalg.norm(features, axis=1)  # (6,)
cosine = similarity / np.outer(lengths, lengths)  # (6, 6)

assert words[similarity[0].argmax()] == "horse"  # by dot product
assert words[cosine[0].argmax()] == "dog"  # by angle
assert (cosine.argmax(axis=1) == np.arange(6)).all()

# %% [markdown]
# ## 2. Softmax turns scores into shares
#
# > **In short.** Scores can be any numbers. Softmax makes them positive and lets them add up to 1, so that they can share
# > out attention. The highest score gets the most.
#
# For scores $s \in \mathbb{R}^{S}$, one for each key:
#
# $$\operatorname{softmax}(s)_j = \frac{e^{s_j}}{\sum_{m=1}^{S} e^{s_m}}$$
#
# Adding the same number to every score changes nothing, since $e^{s+c} = e^c e^s$ and $e^c$ cancels. We use that freedom:
# subtract the largest score first, and no exponential can overflow.


# %%
def softmax_numpy(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis: positive numbers (..., S) that sum to 1."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))  # (..., S), the largest is 1
    return powers / powers.sum(axis=-1, keepdims=True)


# %%
scores = np.array([0.0, 2.0, 1.0])
by_hand = [math.exp(s) / (math.exp(0) + math.exp(2) + math.exp(1)) for s in scores]

np.testing.assert_allclose(softmax_numpy(scores), by_hand)
np.testing.assert_allclose(softmax_numpy(scores + 1000), by_hand)  # a shift changes nothing
np.testing.assert_allclose(softmax_numpy(scores), torch.tensor(scores).softmax(-1).numpy())
print("softmax(0, 2, 1) =", softmax_numpy(scores).round(4))

# %% [markdown]
# **Pitfall.** *Softmax as the formula is written.* $e^{1000}$ is larger than any float64, so the plain formula computes
# ∞/∞ and returns NaN. Nothing is raised; the NaN spreads through everything that comes after it.

# %%
with np.errstate(all="ignore"):
    plain = np.exp(scores + 1000) / np.exp(scores + 1000).sum()

assert np.isnan(plain).all() and np.isfinite(softmax_numpy(scores + 1000)).all()

# %% [markdown]
# ## 3. Attention by hand on three words
#
# > **In short.** Each word asks a question (its *query*). Each word holds up a sign (its *key*). Where question and sign
# > agree, the asker takes a large share of what that word has to give (its *value*).
#
# $$\operatorname{Attention}(Q, K, V) = \operatorname{softmax}\!\left(\frac{QK^\top}{\sqrt{d_k}}\right) V$$
#
# | symbol | shape | |
# |---|---|---|
# | $Q$ | $(T, d_k)$ | a query for each word that looks |
# | $K$ | $(S, d_k)$ | a key for each word that is looked at |
# | $V$ | $(S, d_v)$ | a value for each word that is looked at |
# | $QK^\top / \sqrt{d_k}$ | $(T, S)$ | scores |
# | softmax of it, row by row | $(T, S)$ | weights; each row sums to 1 |
# | the result | $(T, d_v)$ | a mix of values for each word that looks |
#
# Our sentence is *a red ball*. A key says what kind of word it is. A query says what kind it looks for: *ball* looks for an
# adjective. A value says what the word looks like. Here $d_k = 4$, so $\sqrt{d_k} = 2$, and $d_v = 2$.

# %%
phrase = ["a", "red", "ball"]
#        article, adjective, noun, singular
queries = [[1, 0, 2, 1], [0, 1, 3, 1], [0, 2, 1, 1]]  # (3, 4)
keys = [[2, 0, 0, 1], [0, 2, 0, 1], [0, 0, 2, 1]]  # (3, 4)
#       redness, roundness
values = [[0, 0], [4, 0], [0, 4]]  # (3, 2)

# %% [markdown]
# Now *ball* looks at the three words. Plain Python, one row for each key, one column for each step.

# %%
query = queries[2]  # ball's
steps = pd.DataFrame({"key of": phrase})
steps["q · k"] = [sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
steps["÷ √4"] = steps["q · k"] / math.sqrt(4)
steps["exp"] = [math.exp(s) for s in steps["÷ √4"]]
steps["weight"] = steps["exp"] / sum(steps["exp"])
steps["weight × redness"] = [w * v[0] for w, v in zip(steps["weight"], values, strict=True)]
steps["weight × roundness"] = [w * v[1] for w, v in zip(steps["weight"], values, strict=True)]
ball = [sum(steps["weight × redness"]), sum(steps["weight × roundness"])]

assert math.isclose(sum(steps["weight"]), 1)
print(f"ball's output: redness {ball[0]:.4f}, roundness {ball[1]:.4f}")
steps.round(4)

# %% [markdown]
# *ball* went in as a round thing without a colour, value (0, 4). It comes out as a *red* round thing. Two details:
#
# - All three words are singular, so that feature adds 1 to every score. Softmax ignores a shift: the feature changes nothing.
# - The weights 0.09, 0.6652, 0.2447 are `softmax(0, 2, 1)` from above, for the same reason.

# %% [markdown]
# ## 4. The same in NumPy, then in PyTorch
#
# > **In short.** Two matrix products with a softmax between them.


# %%
def attention_numpy(
    query: np.ndarray, key: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scaled dot-product attention without a mask, for one sentence (§3.2.1, equation 1).

    query (T, d_k), key (S, d_k), value (S, d_v). Returns output (T, d_v) and weights (T, S).
    """
    scores = query @ key.T / math.sqrt(query.shape[-1])  # (T, S)
    weights = softmax_numpy(scores)  # (T, S), each row sums to 1
    return weights @ value, weights  # (T, d_v)


# %%
q, k, v = (np.array(rows, dtype=np.float64) for rows in (queries, keys, values))
output, numpy_weights = attention_numpy(q, k, v)  # (3, 2), (3, 3)

np.testing.assert_allclose(output[2], ball)  # the row that we did by hand
np.testing.assert_allclose(numpy_weights[2], steps["weight"])

# %% [markdown]
# **Predict.** The output is a mix with positive shares that sum to 1. Where must it lie, seen from the three values?


# %%
def mixture_chart(values: np.ndarray, outputs: np.ndarray, names: list[str]) -> alt.LayerChart:
    """Values (S, 2) as the corners of an outline, outputs (S, 2) as points among them."""
    corners = pd.DataFrame(values, columns=["x", "y"]).assign(word=names, what="value (in)")
    mixed = pd.DataFrame(outputs, columns=["x", "y"]).assign(word=names, what="output (mixed)")
    hull = pd.concat([corners, corners[:1]]).assign(order=range(len(names) + 1))
    room = alt.Scale(domain=[-0.4, 4.6], nice=False)
    axis = alt.Axis(values=[0, 1, 2, 3, 4], format="d")
    x = alt.X("x:Q", title="redness", scale=room, axis=axis)
    y = alt.Y("y:Q", title="roundness", scale=room, axis=axis)
    kinds = alt.Scale(domain=["value (in)", "output (mixed)"], range=PALETTE[:2])
    base = alt.Chart(rounded(pd.concat([corners, mixed]))).encode(x=x, y=y)
    base = base.encode(color=alt.Color("what:N", title=None, scale=kinds))
    outline = alt.Chart(hull).mark_line(color="#BBBBBB", strokeWidth=1.5)
    return alt.layer(
        outline.encode(x=x, y=y, order="order:Q"),
        base.mark_point(filled=True, size=90, opacity=1),
        base.transform_filter("datum.what == 'value (in)'")
        .mark_text(align="left", dx=8, dy=-9)
        .encode(text="word:N"),
        base.transform_filter("datum.what != 'value (in)'")
        .mark_text(align="center", dy=16)
        .encode(text="word:N"),
    ).properties(width=250, height=250)


# %%
assert (numpy_weights > 0).all() and np.allclose(
    numpy_weights.sum(axis=1), 1
)  # so: inside the triangle
titled(
    alt.hconcat(
        heatmap(
            numpy_weights,
            phrase,
            phrase,
            row_title="who looks (query)",
            column_title="at whom (key)",
            value_title="weight",
            domain=(0, 1),
            cell=64,
        ),
        mixture_chart(v, output, phrase),
        spacing=50,
    ).resolve_scale(color="independent"),
    "Attention by hand: a red ball",
    "Left: ball (bottom row) gives most of its attention to red. Right: every output lies inside the triangle "
    "that the three values span. Attention can mix what is there; it cannot invent.",
    wrap=100,
)

# %% [markdown]
# PyTorch says it in the same words. It adds two things that we need from here on: leading dimensions, so that a whole batch
# goes through at once, and gradients.

# %%
torch.manual_seed(1)
x_query = torch.randn(2, 3, 4, dtype=torch.float64)  # (B, T, d_k)
x_key = torch.randn(2, 5, 4, dtype=torch.float64)  # (B, S, d_k)
x_value = torch.randn(2, 5, 6, dtype=torch.float64)  # (B, S, d_v)

batch_scores = x_query @ x_key.transpose(-2, -1) / math.sqrt(4)  # (B, T, S)
batch_weights = batch_scores.softmax(dim=-1)  # (B, T, S)
batch_output = batch_weights @ x_value  # (B, T, d_v)

for b in range(2):
    expected, _ = attention_numpy(x_query[b].numpy(), x_key[b].numpy(), x_value[b].numpy())
    np.testing.assert_allclose(batch_output[b].numpy(), expected)
torch.testing.assert_close(batch_output, F.scaled_dot_product_attention(x_query, x_key, x_value))
print("output (B, T, d_v):", tuple(batch_output.shape))

# %% [markdown]
# **Pitfall.** *Softmax over the wrong axis.* `dim=-2` lets the *queries* compete for a key instead of the keys for a query.
# The shapes fit, nothing complains, and a model trains, badly. Notice it by the sums: each **row** of the weights must sum to 1.

# %%
wrong_axis = batch_scores.softmax(dim=-2)  # (B, T, S) too

assert torch.allclose(batch_weights.sum(-1), torch.ones(2, 3, dtype=torch.float64))
assert not torch.allclose(wrong_axis.sum(-1), torch.ones(2, 3, dtype=torch.float64))

# %% [markdown]
# One more fact, which chapter 3 has to deal with. Attention looks into a *set*. Shuffle keys and values together, and every
# query gets the same answer. Word order is not there at all.

# %%
order = torch.tensor([4, 2, 0, 3, 1])
shuffled = F.scaled_dot_product_attention(x_query, x_key[:, order], x_value[:, order])
torch.testing.assert_close(shuffled, batch_output)

# %% [markdown]
# ## 5. Why divide by $\sqrt{d_k}$
#
# > **In short.** Add up many random products and the sum grows. Dividing by its spread keeps softmax from shouting one answer.
#
# If the entries of $q, k \in \mathbb{R}^{d_k}$ are independent with mean 0 and variance 1, each product $q_i k_i$ has mean 0
# and variance 1. Variances of independent terms add up, so $q \cdot k$ has mean 0 and variance $d_k$. Its spread (standard
# deviation) is $\sqrt{d_k}$: at $d_k = 512$ a typical score is ±22 (§3.2.1, footnote 4).


# %%
def score_variance(d_k: int, samples: int = 10_000) -> float:
    """Variance of q·k over random q, k of size `d_k`; theory says `d_k`."""
    q, k = torch.randn(2, samples, d_k, dtype=torch.float64)
    return (q * k).sum(-1).var().item()


# %%
torch.manual_seed(0)
for d_k in (4, 64, 512):
    assert abs(score_variance(d_k) / d_k - 1) < 0.1

# %% [markdown]
# Why is a wide spread bad? Because softmax *saturates*. Let $w = \operatorname{softmax}(s)$. Its derivative is
#
# $$\frac{\partial w_i}{\partial s_j} = w_i\,(\mathbb{1}[i = j] - w_j)$$
#
# Once one weight is near 1 and the others near 0, every such product is near 0. The gradient stops there, and the layers
# below learn nothing. We measure what gets through by the sum of the diagonal, $\sum_i w_i (1 - w_i)$.


# %%
def softmax_slope(weights: Tensor) -> Tensor:
    """How strongly weights (..., S) answer their scores, Σ w(1−w) (...): 1 − 1/S when uniform, 0 when one-hot."""
    return (weights * (1 - weights)).sum(-1)


# %%
some_scores = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64)
jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), some_scores)  # (4, 4)
torch.testing.assert_close(jacobian.trace(), softmax_slope(some_scores.softmax(-1)))

# %% [markdown]
# **Predict.** Take four evenly spaced scores with spread 1, and multiply them by a growing factor. What will the four weights
# be at factor 22, the spread without scaling at $d_k = 512$?


# %%
def saturation_chart(width: int = 280) -> alt.HConcatChart:
    """Four evenly spaced scores, stretched: their softmax weights, and the slope that is left."""
    unit = torch.tensor([3.0, 1.0, -1.0, -3.0], dtype=torch.float64) / math.sqrt(5)  # spread 1
    spread = torch.logspace(-1, 1.5, 51, dtype=torch.float64)  # 0.1 to 32
    weights = (spread.unsqueeze(-1) * unit).softmax(-1)  # (51, 4)
    names = ["highest score", "second", "third", "lowest"]
    frame = pd.DataFrame(weights.numpy(), columns=names).assign(spread=spread.numpy())
    slope = pd.DataFrame({"spread": spread.numpy(), "slope": softmax_slope(weights).numpy()})
    marks = pd.DataFrame(
        {"spread": [1.0, math.sqrt(512)], "label": ["divided", "not divided, d_k = 512"]}
    )
    rule = alt.Chart(rounded(marks)).encode(x="spread:Q")
    dashes = rule.mark_rule(strokeDash=[5, 4], color=GREY)
    label = rule.mark_text(align="right", dx=-5, dy=4, color=GREY, baseline="top")
    label = label.encode(text="label:N", y=alt.value(0))
    options = dict(x_title="spread of the scores", log_x=True, width=width)
    long = frame.melt("spread", var_name="key", value_name="weight")
    left = lines(long, "spread", "weight", "key", **options)
    right = lines(slope, "spread", "slope", y_title="slope left, Σ w(1 − w)", **options)
    for chart in (left, right):
        chart.encoding.x.scale = alt.Scale(type="log", domain=[0.1, 32], nice=False)
    right = right.encode(color=alt.value(PALETTE[-1]))
    return alt.hconcat(left + dashes, right + dashes + label)


# %%
titled(
    saturation_chart(),
    "Softmax saturates",
    "Left: with spread 1 (first dashed line) all four keys have a say; with spread 22 (second) "
    "one takes everything. Right: there the slope is 0, and so is every gradient behind it.",
    wrap=100,
)

# %% [markdown]
# That was the theory for four chosen scores. Now random queries and keys, as in a fresh model: 16 keys, growing $d_k$, with
# the division and without.


# %%
def measure_scaling(
    d_k: int, power: float, keys: int = 16, samples: int = 2_000
) -> dict[str, float]:
    """Random queries against random keys, scores divided by d_k^power: their spread and the slope left."""
    q = torch.randn(samples, d_k, dtype=torch.float64)
    k = torch.randn(samples, keys, d_k, dtype=torch.float64)
    scores = torch.einsum("nd,nkd->nk", q, k) / d_k**power  # (samples, keys)
    slope = softmax_slope(scores.softmax(-1)).mean().item()
    return {"d_k": d_k, "spread": scores.std().item(), "slope": slope}


# %%
torch.manual_seed(0)
variants = {"q · k": 0.0, "q · k / √d_k": 0.5, "q · k / d_k": 1.0}
measured = pd.DataFrame(
    {"scores": name} | measure_scaling(d_k, power)
    for name, power in variants.items()
    for d_k in (1, 4, 16, 64, 256, 512)
)
at_512 = measured[measured.d_k == 512].set_index("scores")

assert abs(at_512.spread["q · k"] / math.sqrt(512) - 1) < 0.05  # theory: 22.6
assert abs(at_512.spread["q · k / √d_k"] - 1) < 0.05  # theory: 1
assert at_512.slope["q · k / √d_k"] > 10 * at_512.slope["q · k"]
at_512[["spread", "slope"]].round(2)

# %%
titled(
    alt.hconcat(
        lines(
            measured,
            "d_k",
            "spread",
            "scores",
            y_title="spread of the scores",
            log_x=True,
            log_y=True,
            points=True,
            width=270,
        ),
        lines(
            measured,
            "d_k",
            "slope",
            "scores",
            y_title="slope left, Σ w(1 − w)",
            log_x=True,
            zero=True,
            points=True,
            width=270,
        ),
    ),
    "The division by √d_k, measured",
    "Left: raw scores spread like √d_k (both axes are logarithmic), divided ones stay at 1 for every width. "
    "Right: without the division hardly any gradient is left at d_k = 512.",
    wrap=100,
)

# %% [markdown]
# **Pitfall.** *Dividing by the wrong thing.* Dividing by $d_k$ instead of $\sqrt{d_k}$ (the green line) makes the spread
# shrink to 0.04 at 512: the slope is fine, but the weights are all but equal, and the layer starts out as a plain average.
# Dividing by $\sqrt{D}$ where a head is only $d_k = D/H$ wide does the same, milder: spread $1/\sqrt{H}$. Notice it by the
# spread, which must be 1.

# %%
torch.manual_seed(0)
assert at_512.spread["q · k / d_k"] < 0.05
assert abs(math.sqrt(score_variance(64) / 512) - 1 / math.sqrt(8)) < 0.02  # D = 512, H = 8

# %% [markdown]
# ## 6. Masks: who may look at whom
#
# > **In short.** A mask is a table of yes and no, a row for each word that looks, a column for each word that is looked at.
# > A "no" gives that pair weight 0.
#
# $$\text{scores}_{ij} \leftarrow \begin{cases} \text{scores}_{ij} & \text{if } \text{mask}_{ij} \\ -\infty & \text{otherwise} \end{cases}
# \qquad e^{-\infty} = 0$$
#
# Masks here are boolean, **True where attention is allowed**, as in `F.scaled_dot_product_attention`. (`nn.MultiheadAttention`
# and `nn.Transformer` mean the opposite by True.) There are two kinds.
#
# **The padding mask.** Sentences in a batch differ in length. Short ones are filled up with a pad token, id 0, that nobody
# may look at. Every query sees the same keys, so one row is enough: $(B, 1, S)$.


# %%
def padding_mask(ids: Tensor, pad: int = 0) -> Tensor:
    """Mask of real tokens: ids (B, S) to a boolean (B, 1, S), True where the token is not `pad`."""
    return (ids != pad).unsqueeze(-2)


# %% [markdown]
# **The causal mask.** A decoder writes from left to right. While it learns, the whole target sentence lies before it, and a
# position must not peek at the words that it has to predict. So position $i$ may look at positions $0 \dots i$: $(1, T, T)$.


# %%
def subsequent_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Causal mask: position i may look at positions 0..i and at nothing later (§3.2.3).

    Returns a boolean (1, size, size), True where attention is allowed.
    """
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


# %% [markdown]
# ### What `subsequent_mask` means
#
# The name is about what is *hidden*: the subsequent positions. The table says what is *allowed*. Read it row by row:

# %%
sentence = ["<s>", "a", "red", "ball"]
for i, row in enumerate(subsequent_mask(4)[0]):
    seen = " ".join(word for word, allowed in zip(sentence, row, strict=True) if allowed)
    then = (sentence + ["</s>"])[i + 1]
    print(f"row {i}: {sentence[i]:>4} may look at  {seen:<15}  to predict  {then}")

# %% [markdown]
# A position sees *itself*, and that is no cheating: the input is shifted by one, so row $i$ predicts the word *after* word
# $i$. The leading 1 stands for "the same for every sentence of the batch". The two masks join with `&`, by broadcasting:
# $(B, 1, S)$ with $(1, T, T)$ gives $(B, T, T)$.

# %%
ids = torch.tensor([[2, 7, 8, 9, 0, 0]])  # <s> a red ball <pad> <pad>: (B=1, S=6)
pads = padding_mask(ids)  # (1, 1, 6)
causal = subsequent_mask(6)  # (1, 6, 6)
both = pads & causal  # (1, 6, 6)
tokens = sentence + ["<pad>", "<pad>"]


# %%
def mask_charts(masks: dict[str, Tensor], tokens: list[str], cell: int = 30) -> alt.HConcatChart:
    """Boolean masks, each broadcast to (T, T), side by side under their names."""
    n = len(tokens)
    drawn = []
    for name, mask in masks.items():
        labels = tokens if not drawn else [""] * n  # the rows are the same: label them once
        title = "who looks (query)" if not drawn else ""
        chart = heatmap(
            mask.expand(1, n, n)[0],
            labels,
            tokens,
            row_title=title,
            column_title="at whom (key)",
            cell=cell,
        )
        drawn.append(chart.properties(title=name))
    return alt.hconcat(*drawn, spacing=15)


# %%
assert both.shape == (1, 6, 6) and both[0, 5].tolist() == [True] * 4 + [False] * 2
titled(
    mask_charts({"padding": pads, "causal": causal, "both, joined by &": both}, tokens),
    "Masks",
    "A padding mask hides columns. A causal mask hides what lies right of the diagonal. Joined, each "
    "position sees the real words up to itself. The pads' own rows stay open: we come to that.",
    wrap=100,
)

# %% [markdown]
# ### The masked softmax
#
# All of the care goes into one small function. It takes a boolean mask, or a *float* mask that is added to the scores (0 for
# yes, −∞ for no, anything between for "rather not"). Beware of 0/1 masks from elsewhere: as floats they would be added, as a
# mild bias. Integers it refuses. Section 7 explains its last three lines.


# %%
def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension of `scores` (..., T, S) that sees only allowed positions.

    `mask` broadcasts to `scores`: boolean (True = allowed), or a float that is added (−inf = never).
    A row with nothing to attend to gives zeros, and zero gradients, never NaN.
    Raises TypeError for an integer mask, which could mean either.
    """
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"a mask is boolean (True = allowed) or float (added), not {mask.dtype}")
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
        empty = ~mask.any(dim=-1, keepdim=True)  # (..., T, 1)
    else:
        scores = scores + mask
        empty = (mask == -math.inf).all(dim=-1, keepdim=True)  # (..., T, 1)
    # A row of −inf alone would be 0/0. Give it any finite scores, then silence its weights.
    weights = scores.masked_fill(empty, 0.0).softmax(dim=-1)  # (..., T, S)
    return weights.masked_fill(empty, 0.0)


# %% [markdown]
# And with it, the function that the rest of the series stands on.


# %%
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, softmax(QKᵀ/√d_k)·V (§3.2.1, equation 1).

    query (..., T, d_k), key (..., S, d_k), value (..., S, d_v); `mask` as in `masked_softmax`.
    Returns the output (..., T, d_v) and the weights (..., T, S) as they were before `dropout`.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))  # (..., T, S)
    weights = masked_softmax(scores, mask)  # (..., T, S), each row sums to 1
    kept = weights if dropout is None else dropout(weights)  # (..., T, S)
    return kept @ value, weights  # (..., T, d_v)


# %% [markdown]
# How do we *know* that a mask hides? Ask the gradient. If output $i$ does not depend on input $j$ at all, then
# $\partial\,\text{output}_i / \partial\,\text{input}_j$ is exactly 0. This little instrument serves us to the end of the chapter.


# %%
torch.manual_seed(2)
x = torch.randn(
    6, 4, dtype=torch.float64
)  # six tokens, self-attention: query, key and value are all x

assert (influence(lambda x: attention(x, x, x)[0], x) > 0).all()  # everyone sees everyone
assert torch.equal(influence(lambda x: attention(x, x, x, causal[0])[0], x) > 0, causal[0])

# %% [markdown]
# **Pitfall.** *The mask turned over.* `triu` for `tril`, or rows and columns swapped, or True meaning "hide" to one function
# and "allow" to the next. Training then looks wonderful, since the answer is in the input, and translations are rubbish.
# Notice it with the instrument: nothing right of the diagonal may have a gradient.


# %%
def sees_the_future(mask: Tensor) -> bool:
    """Does self-attention under `mask` (1, T, T) let any position depend on a later one?"""
    x = torch.randn(mask.size(-1), 4, dtype=torch.float64)
    return influence(lambda x: attention(x, x, x, mask[0])[0], x).triu(1).any().item()


# %%
assert not sees_the_future(subsequent_mask(6))
assert sees_the_future(subsequent_mask(6).mT)  # turned over
assert sees_the_future(~subsequent_mask(6))  # True read as "hide"
assert sees_the_future(subsequent_mask(6).double())  # 0/1 as floats: added, not obeyed

# %% [markdown]
# ### Why pad *queries* may be left unmasked
#
# Our padding mask hides pad *columns*. The pad *rows* stay: a pad asks a question too, and gets an answer. Is that a leak? No.
# Nobody reads the answer. As a key, a pad is hidden in every layer. As a prediction, the loss skips it (chapter 6). So what a
# pad holds cannot reach a real word, neither forward nor backward:

# %%
torch.manual_seed(3)
real = pads[0, 0]  # (6,): four real tokens, two pads
other = torch.where(real.unsqueeze(-1), x, torch.randn_like(x))  # the same words, other pads

padded = influence(lambda x: attention(x, x, x, pads[0])[0], x) > 0  # (6, 6)
assert not padded[real][:, ~real].any()  # no real word depends on a pad
assert padded[~real][:, real].all()  # the pads look at real words, and nobody minds
torch.testing.assert_close(
    attention(other, other, other, pads[0])[0][real], attention(x, x, x, pads[0])[0][real]
)
assert not torch.allclose(
    attention(other, other, other)[0][real], attention(x, x, x)[0][real]
)  # unmasked: they do

# %% [markdown]
# To hide the pad rows as well would buy nothing, and it would leave rows in which *nothing* is allowed. What should such a
# row give? That is the next question.

# %% [markdown]
# ## 7. −10⁹, −∞, and the row that may look at nothing
#
# > **In short.** Nothing to look at, nothing seen: the answer is zero. A large negative number says "look at everyone alike"
# > instead, and a bare −∞ says NaN.
#
# Such rows do occur. Pad a batch on the *left*, add the causal mask, and the first pads see pads only. An empty source
# sentence does it too. Three ways to fill the forbidden places:


# %%
def softmax_filled(scores: Tensor, mask: Tensor, fill: float) -> Tensor:
    """Softmax with forbidden scores set to `fill`: the usual shortcut, wrong for a row that allows nothing."""
    return scores.masked_fill(~mask, fill).softmax(dim=-1)


# %% [markdown]
# **Predict.** `<pad> <pad> a ball`, padded on the left, with a causal mask. Rows 0 and 1 may look at nothing. What will each
# version put there?

# %%
torch.manual_seed(4)
left_ids = torch.tensor([[0, 0, 7, 9]])
left_mask = (padding_mask(left_ids) & subsequent_mask(4))[0]  # (4, 4), rows 0 and 1 all False
left_scores = torch.randn(4, 4, dtype=torch.float64)
left_tokens = ["<pad>", "<pad>", "a", "ball"]
fillings = {
    "filled with −1e9": softmax_filled(left_scores, left_mask, -1e9),
    "filled with −∞": softmax_filled(left_scores, left_mask, -math.inf),
    "masked_softmax": masked_softmax(left_scores, left_mask),
}

assert (fillings["filled with −1e9"][:2] == 0.25).all()  # all alike: pads, and the future
assert fillings["filled with −∞"][:2].isnan().all()
assert (fillings["masked_softmax"][:2] == 0).all()
for table in fillings.values():
    torch.testing.assert_close(table[2:], fillings["masked_softmax"][2:])  # other rows agree


# %%
def weight_charts(tables: dict[str, Tensor], tokens: list[str]) -> alt.HConcatChart:
    """Attention weights (T, S) side by side under their names, on one colour scale."""
    drawn = []
    for name, table in tables.items():
        labels = tokens if not drawn else [""] * len(tokens)
        title = "who looks" if not drawn else ""
        chart = heatmap(
            table,
            labels,
            tokens,
            row_title=title,
            column_title="at whom",
            value_title="weight",
            domain=(0, 1),
            cell=42,
        )
        drawn.append(chart.properties(title=name))
    return alt.hconcat(*drawn, spacing=15)


# %%
titled(
    weight_charts(fillings, left_tokens),
    "Two rows that may look at nothing",
    "Left: −1e9 makes them plain averages, over pads and over the forbidden future. "
    "Middle: 0/0. Right: nothing allowed, nothing seen. The other rows agree.",
    wrap=90,
)

# %% [markdown]
# **Pitfall.** *Masking with −10⁹*, as The Annotated Transformer does, and much code after it. It bites in two ways:
#
# 1. **An empty row becomes uniform.** When every score is −10⁹, all are equal again, and softmax shares out 1/S to each,
#    forbidden ones included. It looks like an ordinary output. Nothing warns you.
# 2. **Half precision.** The largest float16 is 65,504. PyTorch refuses to fill with −10⁹; added as a float mask it rounds to −∞.
#
# **And a bare −∞** is not enough: $e^{-\infty} / \sum e^{-\infty} = 0/0$. Cleaning up afterwards with `nan_to_num` repairs
# the output and not always the gradient: what flows back through the softmax is 0 × NaN. So `masked_softmax` acts *before*
# the softmax: an empty row gets harmless finite scores, and its weights are then set to 0. No NaN is ever made, so none can
# spread. The check below demands all of it: zeros, finite gradients, and no gradient from an empty row.


# %%
def empty_rows_are_silent(softmax: Callable[[Tensor], Tensor], empty: Tensor) -> bool:
    """Do rows `empty` (T) give output 0 and gradient 0, and everything finite? `softmax` maps scores (T, S) to weights."""
    generator = torch.Generator().manual_seed(0)
    n = len(empty)
    q, k, v = torch.randn(3, n, 4, dtype=torch.float64, generator=generator).unbind()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    output = softmax(q @ k.mT) @ v  # (T, 4)
    from_all = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    from_empty = torch.autograd.grad(output[empty].sum(), inputs)
    finite = all(t.isfinite().all() for t in (output, *from_all))
    silent = all((t == 0).all() for t in (output[empty], *from_empty))
    return bool(finite and silent)


# %%
float_mask = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~left_mask, -math.inf)
nothing_allowed = ~left_mask.any(-1)  # (4,): rows 0 and 1
versions = {
    "fill −1e9": lambda s: softmax_filled(s, left_mask, -1e9),
    "fill −∞": lambda s: softmax_filled(s, left_mask, -math.inf),
    "add −∞, then nan_to_num": lambda s: (s + float_mask).softmax(-1).nan_to_num(0.0),
    "masked_softmax, boolean": lambda s: masked_softmax(s, left_mask),
    "masked_softmax, float": lambda s: masked_softmax(s, float_mask),
}
verdict = {
    name: empty_rows_are_silent(version, nothing_allowed) for name, version in versions.items()
}

assert [name for name, silent in verdict.items() if silent] == [
    "masked_softmax, boolean",
    "masked_softmax, float",
]
pd.DataFrame(
    {
        "version": verdict.keys(),
        "empty rows silent": ["yes" if ok else "no" for ok in verdict.values()],
    }
)

# %% [markdown]
# In half precision:

# %%
half = left_scores.half()
try:
    softmax_filled(half, left_mask, -1e9)
    refused = False
except RuntimeError:  # "value cannot be converted to type ... without overflow"
    refused = True

assert refused and torch.finfo(torch.float16).max == 65504
assert torch.tensor(-1e9).half() == -math.inf  # added as a mask: −∞, and then NaN
assert masked_softmax(half, left_mask).isfinite().all()
assert masked_softmax(half, left_mask).dtype == torch.float16

# %% [markdown]
# ## 8. Held against PyTorch
#
# > **In short.** The library has the same function, written for speed. Ours must agree with it: outputs and gradients, without
# > a mask and with each kind.
#
# We compare the output, and then the gradients for query, key and value of a random weighted sum of the output, in which
# every entry counts differently.


# %%
def output_and_gradients(
    function: Callable[..., Tensor], *inputs: Tensor, **options
) -> tuple[Tensor, ...]:
    """The output of `function(*inputs, **options)`, then its gradients for `inputs` under random output weights."""
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    output = function(*inputs, **options)
    generator = torch.Generator().manual_seed(0)
    pull = torch.randn(output.shape, dtype=output.dtype, generator=generator)
    return output, *torch.autograd.grad((output * pull).sum(), inputs)


# %%
torch.manual_seed(5)
q4 = torch.randn(2, 3, 5, 8, dtype=torch.float64)  # (B, H, T, d_k)
k4 = torch.randn(2, 3, 5, 8, dtype=torch.float64)  # (B, H, S, d_k), here S = T for the causal mask
v4 = torch.randn(2, 3, 5, 7, dtype=torch.float64)  # (B, H, S, d_v)
batch_ids = torch.tensor([[4, 5, 6, 7, 8], [4, 5, 6, 0, 0]])
pad4 = padding_mask(batch_ids).unsqueeze(1)  # (B, 1, 1, S): the same for every head
lean = torch.randn(5, 5, dtype=torch.float64)  # a float mask: a bias on every pair
cases = {
    "no mask": None,
    "padding": pad4,
    "causal": subsequent_mask(5),
    "padding and causal": pad4 & subsequent_mask(5),
    "float bias": lean,
    "float bias, causal": lean.masked_fill(~subsequent_mask(5)[0], -math.inf),
}
for mask in cases.values():
    ours = output_and_gradients(lambda q, k, v, m=mask: attention(q, k, v, m)[0], q4, k4, v4)
    theirs = output_and_gradients(F.scaled_dot_product_attention, q4, k4, v4, attn_mask=mask)
    torch.testing.assert_close(ours, theirs)
print(f"{len(cases)} kinds of mask: output and three gradients equal")

# %% [markdown]
# And against no library at all: `gradcheck` compares our gradients with finite differences, here on a mask with empty rows.

# %%
torch.manual_seed(6)
small = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, left_mask)[0], small)

# %% [markdown]
# ## 9. What it costs
#
# > **In short.** Every word looks at every word. Twice the length, four times the work, and four times the memory.
#
# A product of an $(a, b)$ and a $(b, c)$ matrix takes $abc$ multiplications and as many additions: $2abc$ operations. With
# $n$ words and width $D$ in all heads together, attention needs $2n^2D$ for $QK^\top$ and $2n^2D$ for the mix: $4n^2D$.
# Around it stand four projections (chapter 2), $D \times D$ each: $8nD^2$. PyTorch can count operations as it runs. On the
# `meta` device, which knows shapes and holds no numbers, counting costs nothing.


# %%
def attention_cost(n: int, d_model: int = 512, h: int = 8) -> dict[str, int]:
    """What `h` heads of self-attention cost at length `n`, counted, in operations and bytes (float32)."""
    shape = (h, n, d_model // h)
    heads = [torch.empty(shape, device="meta", requires_grad=True) for _ in range(3)]
    x, w = torch.empty(n, d_model, device="meta"), torch.empty(d_model, d_model, device="meta")
    return {
        "n": n,
        "attention": count_flops(attention, *heads),
        "projections": 4 * count_flops(torch.mm, x, w),
        "bytes kept": saved_bytes(attention, *heads),
    }


# %%
costs = pd.DataFrame(attention_cost(n) for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192))
for row in costs.itertuples():
    assert row.attention == 4 * row.n**2 * 512
    assert row.projections == 8 * row.n * 512**2
    assert row._4 == 4 * (8 * row.n**2 + 3 * row.n * 512)  # float32: the weights, and q, k, v

# %% [markdown]
# **Predict.** A German caption has about a dozen words. At $D = 512$, how much of the work is attention itself?


# %%
def cost_chart(costs: pd.DataFrame, width: int = 260) -> alt.HConcatChart:
    """Operations and memory of self-attention against length, both axes logarithmic."""
    work = pd.DataFrame(
        {
            "n": costs["n"],
            "attention, 4n²D": costs["attention"] / 1e9,
            "projections, 8nD²": costs["projections"] / 1e9,
        }
    ).melt("n", var_name="part", value_name="work")
    memory = pd.DataFrame(
        {
            "n": costs["n"],
            "all that is kept": costs["bytes kept"] / 2**20,
            "q, k and v alone": 12 * costs["n"] * 512 / 2**20,
        }
    ).melt("n", var_name="part", value_name="memory")
    options = dict(x_title="length n", log_x=True, log_y=True, points=True, width=width)
    left = lines(work, "n", "work", "part", y_title="billions of operations", **options)
    right = lines(memory, "n", "memory", "part", y_title="MiB kept for backward", **options)
    return alt.hconcat(left, right, spacing=40).resolve_scale(color="independent")


# %%
crossing = costs[costs.attention == costs.projections]
assert crossing["n"].tolist() == [1024]  # 4n²D = 8nD² at n = 2D
titled(
    cost_chart(costs).configure_legend(orient="bottom"),
    "Cost against length, counted (D = 512, 8 heads)",
    "Left: attention overtakes the projections at n = 2D = 1024 words. For captions of a dozen words it hardly "
    "counts. Right: the n × n weights soon drown everything else: 2 GiB for one layer at n = 8192.",
    wrap=100,
)

# %% [markdown]
# **Pitfall.** *"Attention is quadratic, so attention is what is slow."* For sentences it is not: at $n = 16$ it does 1.5% of the
# work of this layer. Count before you optimise.
#
# **Pitfall.** *"A mask saves work."* Ours does not. Every score is computed, and half of them are then thrown away.

# %%
short = costs.iloc[0]
share = short.attention / (short.attention + short.projections)
assert round(share, 3) == 0.015 and costs["bytes kept"].iloc[-1] > 2 * 2**30
print(f"attention's share at n = 16: {share:.1%}")
meta = torch.empty(64, 32, device="meta")
causal_meta = subsequent_mask(64, device="meta")[0]
assert count_flops(attention, meta, meta, meta, causal_meta) == count_flops(
    attention, meta, meta, meta
)

# %% [markdown]
# And the clock? It depends on the machine, so the tests do not compare this cell's output. We take the processor's time, which
# counts only our own work. Expect a ratio near 4, and more where the weights outgrow the cache: then memory sets the pace.

# %%
# NBVAL_IGNORE_OUTPUT
seconds = {}
for length in (256, 512, 1024):
    clock_x = torch.randn(4, length, 64)
    attention(clock_x, clock_x, clock_x)  # warm up
    laps = []
    for _ in range(5):
        start = time.process_time()
        attention(clock_x, clock_x, clock_x)
        laps.append(time.process_time() - start)
    seconds[length] = min(laps)
    ratio = f", {seconds[length] / seconds[length // 2]:.1f} times as long" if length > 256 else ""
    print(f"n = {length:4}: {seconds[length] * 1000:6.1f} ms{ratio}")

# %% [markdown]
# ## 10. Beside recurrence and convolution
#
# > **In short.** A recurrent layer passes the word along, neighbour to neighbour. A convolution jumps a few places. Attention
# > looks straight across.
#
# The paper's Table 1 compares layers by three numbers: the operations, the steps that must wait for each other, and the
# longest way that a signal has to go between two positions. Long ways are hard to learn. With length $n$, width $d$, kernel
# $k$ and neighbourhood $r$:
#
# | layer | operations | sequential steps | longest path |
# |---|---|---|---|
# | self-attention | $O(n^2 d)$ | $O(1)$ | $O(1)$ |
# | recurrent | $O(n d^2)$ | $O(n)$ | $O(n)$ |
# | convolution, plain (ConvS2S) | $O(k n d^2)$ | $O(1)$ | $O(n/k)$ |
# | convolution, dilated (ByteNet) | $O(k n d^2)$ | $O(1)$ | $O(\log_k n)$ |
# | self-attention, restricted | $O(r n d)$ | $O(1)$ | $O(n/r)$ |
#
# We take none of it on trust. Here are the layers, all causal, each a function from $(n, d)$ to $(n, d)$.


# %%
def recurrent_layer(x: Tensor, w_state: Tensor, w_input: Tensor) -> Tensor:
    """Elman's recurrence over x (n, d): state_i = tanh(state_(i−1)·w_state + x_i·w_input), weights (d, d)."""
    state = x.new_zeros(1, x.size(-1))
    states = []
    for row in x.split(1):  # (1, d) each: no step can start before the last one has ended
        state = torch.tanh(state @ w_state + row @ w_input)
        states.append(state)
    return torch.cat(states)  # (n, d)


# %%
def causal_convolution(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Convolution over x (n, d), weight (d, d, k): position i reads i, i−dilation, i−2·dilation, ..."""
    reach = (weight.size(-1) - 1) * dilation
    return F.conv1d(F.pad(x.T, (reach, 0)), weight, dilation=dilation).T  # (n, d)


# %%
def restricted_attention(x: Tensor, r: int) -> Tensor:
    """Causal self-attention over x (n, d) in which position i reads only the r positions i−r+1..i (§4)."""
    windows = F.pad(x, (0, 0, r - 1, 0)).unfold(0, r, 1).transpose(1, 2)  # (n, r, d)
    first = torch.arange(len(x), device=x.device).unsqueeze(-1) - (r - 1)  # (n, 1)
    inside = first + torch.arange(r, device=x.device) >= 0  # (n, r): before the sentence is nothing
    return attention(x.unsqueeze(1), windows, windows, inside.unsqueeze(1))[0].squeeze(1)  # (n, d)


# %%
torch.manual_seed(7)
x = torch.randn(10, 4, dtype=torch.float64)
w_state, w_input = torch.randn(2, 4, 4, dtype=torch.float64)
kernel = torch.randn(4, 4, 3, dtype=torch.float64)

library = torch.nn.RNN(4, 4, bias=False, dtype=torch.float64)  # hidden weights stored transposed
with torch.no_grad():
    library.weight_hh_l0.copy_(w_state.T)
    library.weight_ih_l0.copy_(w_input.T)
torch.testing.assert_close(recurrent_layer(x, w_state, w_input), library(x)[0])

taps = [
    F.pad(x, (0, 0, 2 * j, 0))[:10] @ kernel[:, :, 2 - j].T for j in range(3)
]  # shifted by 0, 2, 4
torch.testing.assert_close(causal_convolution(x, kernel, dilation=2), sum(taps))

near = subsequent_mask(10)[0].triu(-3)  # i−3..i
torch.testing.assert_close(restricted_attention(x, r=4), attention(x, x, x, near)[0])

# %% [markdown]
# **Operations**, counted and compared with the formulas (an operation is now a multiplication with its addition, as in the
# table). **Sequential steps**, measured in the autograd graph, which remembers what waited for what: we look for the longest
# chain of matrix products from the output back to the input.


# %%
def longest_chain(output: Tensor) -> int:
    """The most matrix products (or convolutions) that had to be computed one after another to make `output`."""
    depth: dict[object, int] = {}
    stack = [output.grad_fn]
    while stack:
        node = stack[-1]
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        waiting = [parent for parent in parents if parent not in depth]
        if waiting:
            stack += waiting
            continue
        is_product = any(kind in node.name().lower() for kind in ("mmbackward", "convolution"))
        depth[stack.pop()] = max((depth[p] for p in parents), default=0) + is_product
    return depth[output.grad_fn]


# %%
LAYER_NAMES = (
    "recurrent",
    "convolution, plain",
    "convolution, dilated",
    "self-attention, restricted",
    "self-attention",
)


def make_layer(name: str, d: int, k: int = 3, r: int = 5) -> Callable[..., Tensor]:
    """One of LAYER_NAMES with random weights: a function of x (n, d) and of the layer's number, for dilation."""
    w_state, w_input = torch.randn(2, d, d, dtype=torch.float64) / math.sqrt(d)
    kernel = torch.randn(d, d, k, dtype=torch.float64) / math.sqrt(d * k)
    return {
        "recurrent": lambda x, number=0: recurrent_layer(x, w_state, w_input),
        "convolution, plain": lambda x, number=0: causal_convolution(x, kernel),
        "convolution, dilated": lambda x, number=0: causal_convolution(x, kernel, 2**number),
        "self-attention, restricted": lambda x, number=0: restricted_attention(x, r),
        "self-attention": lambda x, number=0: attention(x, x, x, subsequent_mask(len(x))[0])[0],
    }[name]


# %%
def layer_cost(name: str, n: int, d: int) -> dict[str, int]:
    """Multiply-adds and longest chain of products of one layer at length `n`, width `d`, both measured."""
    x = torch.randn(n, d, dtype=torch.float64, requires_grad=True)
    layer = make_layer(name, d)
    return {"operations": count_flops(layer, x) // 2, "sequential steps": longest_chain(layer(x))}


# %%
n, d, kernel_size, near_by = 64, 16, 3, 5
formulas = {
    "recurrent": 2 * n * d * d,
    "convolution, plain": kernel_size * n * d * d,
    "convolution, dilated": kernel_size * n * d * d,
    "self-attention, restricted": 2 * near_by * n * d,
    "self-attention": 2 * n * n * d,
}
layer_costs = {name: layer_cost(name, n, d) for name in LAYER_NAMES}

for name in LAYER_NAMES:
    assert layer_costs[name]["operations"] == formulas[name]
    twice = layer_cost(name, 2 * n, d)
    assert twice["operations"] == (4 if name == "self-attention" else 2) * formulas[name]
    steps_grow = twice["sequential steps"] > layer_costs[name]["sequential steps"]
    assert steps_grow == (name == "recurrent")  # all others: the same number at any length

# %% [markdown]
# **Path length**, measured with `influence`: stack layers until the last output has a gradient at the first input. The number
# of layers is the number of hops that the signal needed.
#
# A recurrent layer does all of its hops inside one layer. To count them we run it differently: *every* position at once takes
# one step from its left neighbour's state, and we repeat. After $n$ such rounds the result is that of the recurrent layer
# (checked below). So a round is a hop.


# %%
def make_hop(name: str, x: Tensor) -> Callable[[Tensor, int], Tensor]:
    """One hop of one of LAYER_NAMES: maps all states (n, d) to the next, given the hop's number; `x` is the input."""
    if name != "recurrent":
        return make_layer(name, x.size(-1))
    w_state, w_input = torch.randn(2, x.size(-1), x.size(-1), dtype=x.dtype) / math.sqrt(x.size(-1))
    return recurrent_round(x, w_state, w_input)


def recurrent_round(x: Tensor, w_state: Tensor, w_input: Tensor) -> Callable[[Tensor, int], Tensor]:
    """All positions of `recurrent_layer` take one step at once: state_i from the old state_(i−1) and x_i."""

    def round_(states: Tensor, number: int = 0) -> Tensor:
        left = F.pad(states, (0, 0, 1, 0))[:-1]  # (n, d), the first has no left neighbour
        return torch.tanh(left @ w_state + x @ w_input)

    return round_


# %%
states = x
one_round = recurrent_round(x, w_state, w_input)
for _ in range(len(x)):
    states = one_round(states)
torch.testing.assert_close(states, recurrent_layer(x, w_state, w_input))


# %%
def reaches(name: str, n: int) -> Iterator[Tensor]:
    """After 0, 1, 2, ... hops: which of `n` inputs have a gradient at the last output, boolean (n,)."""
    torch.manual_seed(0)
    x = torch.randn(n, 4, dtype=torch.float64, requires_grad=True)
    hop, states = make_hop(name, x), x
    for number in itertools.count():
        (gradient,) = torch.autograd.grad(states[-1].sum(), x, retain_graph=True)  # (n, 4)
        yield (gradient != 0).any(-1)
        states = hop(states, number)


# %%
def reach_table(name: str, n: int, hops: int) -> Tensor:
    """The first `hops + 1` rows of `reaches(name, n)`: boolean (hops + 1, n)."""
    return torch.stack(list(itertools.islice(reaches(name, n), hops + 1)))


# %%
def path_length(name: str, n: int) -> int:
    """Hops until the last of `n` outputs has a gradient at the first input, found by trying."""
    return next(hops for hops, reached in enumerate(reaches(name, n)) if reached[0])


# %% [markdown]
# **Predict.** 17 words, kernel 3. After four hops, how many words does the last position see through plain convolutions, and
# how many through dilated ones (dilation 1, 2, 4, 8, as in ByteNet)?


# %%
def reach_chart(n: int = 17, hops: int = 4, cell: int = 12) -> alt.VConcatChart:
    """For each layer type: which inputs reach the last output after each number of hops."""
    drawn = []
    for name in LAYER_NAMES:
        chart = heatmap(
            reach_table(name, n, hops),
            [str(i) for i in range(hops + 1)],
            row_title="hops",
            column_title="input position",
            cell=cell,
            words=("reaches the last output", "does not"),
        )
        drawn.append(chart.properties(title=name))
    return alt.concat(*drawn, columns=2, spacing=18)


# %%
seen_after_4 = {name: int(reach_table(name, 17, 4)[-1].sum()) for name in LAYER_NAMES}

assert seen_after_4["recurrent"] == 5
assert seen_after_4["convolution, plain"] == 9
assert seen_after_4["convolution, dilated"] == 17
assert path_length("self-attention", 17) == 1
titled(
    reach_chart(),
    "What the last position has heard of, hop by hop",
    "Measured by gradient. Top row of each: before the first hop the last position knows only itself. Recurrence adds one "
    "word a hop, a plain convolution two, restricted attention four; dilation doubles; self-attention sees all at once.",
    wrap=80,
)

# %%
paths = pd.DataFrame(
    {"layer": name, "n": n, "hops": path_length(name, n)}
    for name in LAYER_NAMES
    for n in (4, 8, 16, 32, 64)
)
expected_hops = {
    "recurrent": lambda n: n - 1,
    "convolution, plain": lambda n: math.ceil((n - 1) / 2),  # each adds k − 1 = 2
    "convolution, dilated": lambda n: math.ceil(
        math.log2((n - 1) / 2 + 1)
    ),  # L of them add 2(2^L − 1)
    "self-attention, restricted": lambda n: math.ceil((n - 1) / 4),  # each adds r − 1 = 4
    "self-attention": lambda n: 1,
}
for row in paths.itertuples():
    assert row.hops == expected_hops[row.layer](row.n)

# %%
titled(
    lines(
        paths,
        "n",
        "hops",
        "layer",
        x_title="distance: length n",
        y_title="hops",
        log_x=True,
        log_y=True,
        points=True,
    ),
    "The longest path between two positions",
    "Measured: hops until the first word has a gradient at the last output. Straight rising lines grow with n, "
    "the bent one like log n. Self-attention needs one hop at any distance.",
)

# %% [markdown]
# All together, the paper's Table 1 with measured numbers in it:

# %%
table_1 = pd.DataFrame(
    {"layer": name} | layer_costs[name] | {"longest path": path_length(name, 64)}
    for name in LAYER_NAMES
).set_index("layer")
print(f"n = {n}, d = {d}, k = {kernel_size}, r = {near_by}")
table_1

# %% [markdown]
# With $n = 64$ and $d = 16$ attention is the *most* expensive: $n > d$. In the paper's models $d = 512$ and sentences have
# some 30 words: $n < d$, and the order turns. The chains differ from the paper's $O(1)$ only by constants: self-attention
# has two products in a row.

# %%
sentence_costs = {name: layer_cost(name, 32, 512)["operations"] for name in LAYER_NAMES}
assert (
    sentence_costs["self-attention"]
    < sentence_costs["recurrent"]
    < sentence_costs["convolution, plain"]
)
print(
    f"n = 32, d = 512: a recurrent layer does {sentence_costs['recurrent'] // sentence_costs['self-attention']} times the work"
)

# %% [markdown]
# ## Summary
#
# - Attention compares each query with each key by a dot product, turns the scores of a row into shares that sum to 1, and
#   mixes the values with them. It looks into a set: order is not there.
# - Scores spread like $\sqrt{d_k}$. Divided by it, they keep spread 1, and softmax keeps a gradient.
# - Masks are boolean, True where attention is allowed. A padding mask hides columns, a causal mask what lies right of the diagonal.
# - A row that may look at nothing gives zeros, and no gradient. −10⁹ gives an average, a bare −∞ gives NaN.
# - It costs $4n^2D$ operations and keeps $n^2$ weights a head. Any two words are one hop apart.
#
# ## What the paper did that we don't
#
# - The paper compares dot-product with *additive* attention (a small network scores each pair) and keeps the first for its
#   speed. We build only that one; exercise 4 builds the other.
# - Restricted self-attention is in its Table 1 as an idea for later. We have it here to measure it, and then leave it.
#
# ## Exercises
#
# From warm-up to project. A *think* exercise wants a pencil. A *code* exercise comes with a checker, `check_…`: write a function
# and hand it over. If the function is right, the checker says nothing. If not, it raises an `AssertionError` that says what is wrong
# and hints at why. Below it a solution is folded away, then comes a wrong candidate and what the checker has to say to it.
# `rejection` fetches that answer, here and in the chapters to come. The other two are the checkers' own: `same_numbers` compares
# numbers, and `blame` finds out which known mistake makes exactly the numbers that a candidate made.


# %% [markdown]
# ### Exercise 1 *warm-up* · A query that insists
#
# Give *a* in *a red ball* the query $(s, 0, 0, 0)$. The larger $s$, the more *a* looks at itself. Write `insisting_query(share)`,
# which returns these four numbers such that *a*'s weight on itself is exactly `share`. How large is $s$ for 0.5, for 0.99, for
# 0.9999? What does a weight of 1 ask for?


# %%
def check_insisting_query(candidate: Callable[[float], list[float]]) -> None:
    """Puts the four numbers candidate(share) before the keys of *a red ball* and reads the weight off."""
    key = torch.tensor([[2, 0, 0, 1], [0, 2, 0, 1], [0, 0, 2, 1]], dtype=torch.float64)  # (S, d_k)
    for share in (0.5, 0.9, 0.99, 0.9999):
        query = torch.as_tensor(candidate(share), dtype=torch.float64)
        assert query.shape == (4,), "a query is compared with keys of four numbers: give it four"
        assert not query[1:].any(), "only the first number may differ from 0"
        if not same_numbers(attention(query[None], key, key)[1][0, 0], torch.tensor(share)):
            mistakes = {
                "true without the division by √d_k: with it, a score is half of q · k": key @ query,
                "two other words take part: a score of 0 is e⁰ = 1 in the softmax": key[:2]
                @ query
                / 2,
            }
            mistakes = {message: s.softmax(-1)[0] for message, s in mistakes.items()}
            blame(
                torch.tensor(share),
                mistakes,
                "the weight isn't the share: solve softmax's formula for s",
            )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_insisting_query(share: float) -> list[float]:
    """The score is s·2/√4 = s, the two others are 0: share = eˢ / (eˢ + 2)."""
    return [math.log(2 * share / (1 - share)), 0.0, 0.0, 0.0]


check_insisting_query(solution_insisting_query)
for share in (0.5, 0.99, 0.9999):
    print(f"share {share}: s = {solution_insisting_query(share)[0]:.4f}")

# %% [markdown]
# Each further nine costs about $\ln 10 = 2.3$, and a weight of exactly 1 an infinite score. Softmax says *almost*, never *only*.
# The mistake of dividing the sum among two words instead of three:

# %%
print(
    rejection(check_insisting_query, lambda share: [math.log(share / (1 - share)), 0.0, 0.0, 0.0])
)

# %% [markdown]
# ### Exercise 2 *think* · Another spread
#
# In section 5, draw keys and queries from a uniform distribution between −1 and 1 instead. By what must you divide so that the
# scores have spread 1? And what does that say about dividing by $\sqrt{d_k}$ in a *trained* model?
#
# <details><summary>An answer</summary>
#
# The variance of such an entry is 1/3, that of a product of two is 1/9, and that of the sum $d_k/9$. So divide by $\sqrt{d_k}/3$.
# The factor $\sqrt{d_k}$ is right for entries with variance 1. A trained model has other entries: it learns their size, and with it
# how sharp each head looks. The division sees to it that it *starts* with a slope.
#
# </details>

# %% [markdown]
# ### Exercise 3 *code* · A window, and one with gaps
#
# Write `window_mask(n, r, gap)`: a boolean $(1, n, n)$ in which position $i$ may look at $r$ positions and no others: itself,
# $i - \text{gap}$, $i - 2\,\text{gap}$, …, as far as they exist. With `gap=1` it is the restricted attention of section 10, as a mask.
#
# Then think: stack layers with $r = 3$ and gaps $1, 3, 9, \dots$ After how many layers has position $n - 1$ heard of position 0?


# %%
def check_window_mask(candidate: Callable[[int, int, int], Tensor]) -> None:
    """Holds the mask candidate(n, r, gap) against the definition, place by place."""
    for n, r, gap in ((6, 6, 1), (7, 3, 1), (9, 3, 2), (4, 6, 1), (5, 1, 1)):
        mask = candidate(n, r, gap)
        assert mask.shape == (1, n, n), "the shape is (1, n, n): one row for each word that looks"
        assert mask.dtype == torch.bool, "numbers would be added to the scores: a mask is boolean"
        seen = [[any(i - m * gap == j for m in range(r)) for j in range(n)] for i in range(n)]
        wanted = torch.tensor(seen)  # (n, n)
        assert not torch.equal(mask[0], ~wanted), (
            "turned over: True means *may look* in this series"
        )
        assert not mask[0].triu(1).any(), (
            "a position sees a later one: the window must look back only"
        )
        assert mask[0].diagonal().all(), (
            "a position doesn't see itself: row 0 is left with nothing, and the place counts among the r"
        )
        back = torch.arange(n).unsqueeze(1) - torch.arange(n)  # (n, n), how far j lies behind i
        assert not (mask[0] & (back > (r - 1) * gap)).any(), (
            "a position sees too far: it is itself one of the r, so it looks back r − 1 times"
        )
        assert not (mask[0] & (back % gap != 0)).any(), "the places between the gaps are open too"
        assert torch.equal(mask[0], wanted), "a place is missing: the window is too narrow"


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_window_mask(n: int, r: int, gap: int = 1) -> Tensor:
    """Boolean (1, n, n): how far j lies behind i must be one of 0, gap, …, (r − 1)·gap."""
    back = torch.arange(n).unsqueeze(1) - torch.arange(n)  # (n, n)
    return ((back >= 0) & (back <= (r - 1) * gap) & (back % gap == 0)).unsqueeze(0)


check_window_mask(solution_window_mask)
torch.manual_seed(8)
x = torch.randn(28, 4, dtype=torch.float64)
far = x.requires_grad_()
for layers in (1, 2, 3):
    far = attention(far, far, far, solution_window_mask(28, 3, 3 ** (layers - 1))[0])[0]
    for position, heard in ((3**layers - 1, True), (3**layers, False)):
        (gradient,) = torch.autograd.grad(far[position].sum(), x, retain_graph=True)
        assert gradient[0].any().item() == heard

# %% [markdown]
# $L$ layers look back over $2(1 + 3 + \dots + 3^{L-1}) = 3^L - 1$ places, so $\lceil \log_3 n \rceil$ layers are enough. It is the
# paper's $\log_k n$ for a convolution of width $k$, reached by attention. Now the usual slip, a window that is one too wide:

# %%
print(
    rejection(
        check_window_mask,
        lambda n, r, gap: subsequent_mask(n).triu(-r * gap),
    )
)

# %% [markdown]
# And a mask that leaves out the position itself, `tril(-1)`. With `masked_softmax` its row 0 would give zeros; with −10⁹ it would be
# an average over the whole sentence, the future included:

# %%
print(
    rejection(check_window_mask, lambda n, r, gap: torch.ones(1, n, n, dtype=torch.bool).tril(-1))
)

# %% [markdown]
# ### Exercise 4 *code* · Additive attention
#
# Bahdanau's attention scores a pair by a small network instead of a dot product:
#
# $$\text{score}(q, k) = u^\top \tanh(W q + M k), \qquad W\ (a, d_q),\ M\ (a, d_k),\ u\ (a)$$
#
# It lets a query and a key have different widths. Write `additive_attention(query, key, value, w, m, u, mask=None)` for query
# $(T, d_q)$, key $(S, d_k)$, value $(S, d_v)$ and any leading dimensions. It returns output and weights, and treats a mask
# as `attention` does. Count its operations with `count_flops`. Why is it slower in practice than a dot product, although it
# grows alike? What would become of it without the tanh?


# %%
def additive_scores(query: Tensor, key: Tensor, w: Tensor, m: Tensor, u: Tensor) -> Tensor:
    """Scores (T, S) of additive attention for query (T, d_q) and key (S, d_k), one pair at a time."""
    rows = [torch.stack([torch.tanh(w @ q + m @ k).dot(u) for k in key]) for q in query]
    return torch.stack(rows)


def check_additive_attention(candidate: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Holds weights and output against scores made pair by pair; then a mask, then a batch."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (5, 4), (5, 2), (6, 4), (6, 4), (6,))  # query, key, value, w, m, u
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    query, key, value, w, m, u = inputs
    output, weights = candidate(*inputs)
    assert weights.shape == (3, 5), "the weights are (T, S): one for each pair of query and key"
    scores = additive_scores(query, key, w, m, u)  # (T, S)
    flat = (key @ m.T @ u).expand(3, 5)
    mistakes = {
        "the columns sum to 1, but the keys compete for a query: rows must": scores.mT.softmax(
            -1
        ).mT,
        "all queries get the same weights: without a bend, q only shifts its row": flat.softmax(-1),
        "W is for the query and M for the key": additive_scores(query, key, m, w, u).softmax(-1),
        "divided by √a: tanh bounds every term, nothing grows": (scores / math.sqrt(6)).softmax(-1),
        "divided by √d_k: these scores are no sums over d_k products": (scores / 2).softmax(-1),
    }
    if not same_numbers(weights, scores.softmax(-1)):
        blame(weights, mistakes, "other weights than the formula's, taken pair by pair")
    assert same_numbers(output, weights @ value), (
        "the weights are right; the output isn't their mix of values"
    )
    mask = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
    masked = candidate(*inputs, mask)[1]
    assert not masked.isnan().any(), "NaN: in a row that may look at nothing, −∞ alone gives 0/0"
    assert not masked[1].any(), "a row that may look at nothing has weights: −10⁹ for all is a tie"
    assert same_numbers(masked, masked_softmax(scores, mask)), (
        "what a mask forbids must get weight 0"
    )
    batch = candidate(torch.stack((query, -query)), key, value, w, m, u)[0]  # (B, T, d_v)
    assert same_numbers(batch[0], output), (
        "a batch of queries is answered otherwise than one by one"
    )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w: Tensor,
    m: Tensor,
    u: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (..., T, d_v) and weights (..., T, S), from scores uᵀ tanh(Wq + Mk)."""
    pairs = (query @ w.T).unsqueeze(-2) + (key @ m.T).unsqueeze(-3)  # (..., T, S, a)
    scores = torch.einsum("...a,a->...", pairs.tanh(), u)  # (..., T, S)
    weights = masked_softmax(scores, mask)  # (..., T, S)
    return weights @ value, weights


check_additive_attention(solution_additive_attention)
n, d = 32, 64
shapes = ((n, d), (n, d), (n, d), (d, d), (d, d), (d,))  # query, key, value, w, m, u
meta = [torch.empty(shape, device="meta") for shape in shapes]
projections = 2 * 2 * n * d * d
assert count_flops(solution_additive_attention, *meta) == 4 * n * n * d + projections
assert count_flops(attention, *meta[:3]) == 4 * n * n * d

# %% [markdown]
# <details><summary>An answer</summary>
#
# With all widths alike, both take $4n^2D$ operations; the additive one adds its two projections, $4nD^2$. Not counted is the tanh, of
# which $n^2 a$ are taken. Worse, the sum of a query and a key is made for each pair: $n^2 a$ numbers go to memory and come back, where a
# dot product adds up its $d_k$ terms on the way and writes $n^2$ numbers. Without the tanh the score is
# $u^\top W q + u^\top M k$. Within one row, the first term is the same for all keys, and softmax ignores a shift:
#
# </details>

# %%
print(
    rejection(
        check_additive_attention,
        lambda q, k, v, w, m, u: (None, ((q @ w.T @ u)[:, None] + k @ m.T @ u).softmax(-1)),
    )
)

# %% [markdown]
# The pitfalls of sections 4 and 7 are caught too, softmax over the wrong axis and −10⁹ as a mask:


# %%
def additive_variant(softmax: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Additive attention with another way from scores (T, S) and a mask to weights (T, S)."""

    def attend(query, key, value, w, m, u, mask=None):
        scores = ((query @ w.T).unsqueeze(-2) + (key @ m.T).unsqueeze(-3)).tanh() @ u  # (..., T, S)
        weights = softmax(scores, torch.tensor(True) if mask is None else mask)
        return weights @ value, weights

    return attend


# %%
for softmax in (
    lambda scores, mask: scores.softmax(dim=-2),
    lambda scores, mask: softmax_filled(scores, mask, -1e9),
    lambda scores, mask: softmax_filled(scores, mask, -math.inf),
):
    print(rejection(check_additive_attention, additive_variant(softmax)))

# %% [markdown]
# ### Exercise 5 *think* · What one mix can't tell apart
#
# A query gets *one* mix back. Change the three values of *a red ball* so that *ball*'s output stays the same although the words
# differ. What can one attention not tell apart?
#
# <details><summary>An answer</summary>
#
# *ball*'s weights are $w = (0.09, 0.6652, 0.2447)$. Any change $\delta_j$ of the values with $\sum_j w_j \delta_j = 0$ is invisible:
# add 1 to the redness of *red* and take $w_2 / w_3 = e$ from that of *ball*. A very red thing beside a pale ball looks like a red thing
# beside a ball. Three values go in, one comes out; what each of them was, is gone. Chapter 2 answers with several heads.
#
# </details>

# %% [markdown]
# ### Exercise 6 *project* · Attention that keeps nothing
#
# Section 9 says that attention keeps $n^2$ weights. Must it? Write `streaming_attention(query, blocks)` for a query $(T, d_k)$.
# `blocks` is an iterator over pairs of key $(s, d_k)$ and value $(s, d_v)$, where $s$ may differ from block to block. They come once, and
# may not be kept. Return what `attention` returns as output, $(T, d_v)$, if it had all keys and values at once.
#
# A hint: the mix is a sum divided by a sum, and both can grow block by block. The largest score, which keeps the
# exponentials small, isn't known until the end. What must be done to the two sums when a larger one turns up? (This
# recurrence, due to Milakov and Gimelshein, is the core of FlashAttention.)


# %%
def passing_blocks(key: Tensor, value: Tensor, sizes: tuple[int, ...]) -> Iterator[tuple]:
    """Yields key and value in blocks of `sizes`; asserts that at most the newest is still held."""
    seen: list[weakref.ref] = []
    for k, v in zip(key.split(sizes), value.split(sizes), strict=True):
        k, v = k.clone(), v.clone()
        kept = sum(old() is not None for old in seen[:-2])
        assert not kept, "a block is held when the next but one is asked for: keep sums, not blocks"
        seen += [weakref.ref(k), weakref.ref(v)]
        yield k, v
        del k, v


def check_streaming_attention(candidate: Callable[[Tensor, Iterator[tuple]], Tensor]) -> None:
    """Holds the streamed output against `attention`, in blocks of several sizes, and for huge scores."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (12, 4), (12, 2))  # query, key, value
    query, key, value = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    for sizes in ((12,), (1,) * 12, (5, 4, 3)):
        first, last = key.split(sizes)[0], key.split(sizes)[-1]
        got = candidate(query, passing_blocks(key, value, sizes))
        if same_numbers(got, attention(query, key, value)[0]):
            continue
        parts = [attention(query, k, v)[0] for k, v in passing_blocks(key, value, sizes)]
        mistakes = {
            "the scores aren't divided by √d_k": attention(2 * query, key, value)[0],
            "only the last block counts": attention(query, last, value[-len(last) :])[0],
            "only the first block counts": attention(query, first, value[: len(first)])[0],
            "each block gets a softmax of its own, and they are averaged: a block's own sum must count": torch.stack(
                parts
            ).mean(0),
        }
        blame(got, mistakes, "right for no block sizes, or not for all: rescale both sums alike")
    for scale in (-400, 400):  # scores in the hundreds, the largest first or last
        steep = key * torch.linspace(1, 2, 12).unsqueeze(1).double() * scale
        got = candidate(query, passing_blocks(steep, value, (5, 4, 3)))
        assert not got.isnan().any(), (
            "NaN for large scores: e to the score overflows, subtract the largest"
        )
        assert same_numbers(got, attention(query, steep, value)[0]), (
            "wrong for large scores: when a larger one turns up, what is summed so far must shrink"
        )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_streaming_attention(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention's output (T, d_v) from key and value blocks that pass once; memory for one block."""
    largest = query.new_full((len(query), 1), -math.inf)  # (T, 1), the largest score so far
    mix, total = 0.0, 0.0  # Σ e^(s − largest)·v (T, d_v) and Σ e^(s − largest) (T, 1)
    for key, value in blocks:
        scores = query @ key.T / math.sqrt(query.size(-1))  # (T, s)
        newest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
        shrink, powers = (largest - newest).exp(), (scores - newest).exp()
        mix = mix * shrink + powers @ value
        total = total * shrink + powers.sum(dim=-1, keepdim=True)
        largest = newest
    return mix / total


check_streaming_attention(solution_streaming_attention)

# %% [markdown]
# Both sums are measured against the largest score so far. When a larger one turns up, both shrink by the same factor, and their
# quotient never notices. Three candidates that don't get it right: an average of the blocks' own attentions, sums without
# the subtraction, and one that keeps everything.


# %%
def unguarded_sums(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Streaming attention as the formula is written, (T, d_v): right until an exponential overflows."""
    mix, total = 0.0, 0.0
    for key, value in blocks:
        powers = (query @ key.T / math.sqrt(query.size(-1))).exp()  # (T, s)
        mix, total = mix + powers @ value, total + powers.sum(dim=-1, keepdim=True)
    return mix / total


# %%
for candidate in (
    lambda q, blocks: torch.stack([attention(q, k, v)[0] for k, v in blocks]).mean(0),
    unguarded_sums,
    lambda q, blocks: attention(q, *map(torch.cat, zip(*blocks, strict=True)))[0],
):
    print(rejection(check_streaming_attention, candidate))

# %% [markdown]
# Next: [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb)
