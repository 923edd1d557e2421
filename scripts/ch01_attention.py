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
# # Chapter 1 · Attention
#
# After this chapter you can compute attention by hand, write it in a few lines of code, mask it safely, and train a head that learns where to look.
#
# | | |
# |---|---|
# | In the paper | §3.2.1 (scaled dot-product attention), §3.2.3 (the causal mask), §4 (why self-attention) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 25 minutes to read, 50 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 0 · Start here](ch00_start_here.ipynb) · [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb) |
#
# *If you read only three cells:* the table of *Attention by hand*, the code of *The same on one screen*, the maps of *A head that learns*.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.book.charts import bars, heatmap, lines, panels, titled
from scripts.book.exercises import check
from scripts.book.figures.model import hand_chart, saturation_chart
from scripts.book.instruments import count_flops, influence, saved_bytes

# %% [markdown]
# Letters as in [chapter 0](ch00_start_here.ipynb): $B$ sentences, $T$ words that *look*, $S$ words that are looked *at*. New are $d_k$, the
# width of a query or key, $d_v$, the width of a value, and $n = T = S$, when a sentence looks at itself (*self-attention*).

# %% [markdown]
# ## 1. Dot products measure similarity
#
# > **In short.** Multiply two lists of numbers entry by entry and add up. Agreement makes the sum large, disagreement makes it negative.
#
# $$q \cdot k = \sum_{i=1}^{d_k} q_i k_i = \lVert q \rVert \, \lVert k \rVert \cos\theta, \qquad q, k \in \mathbb{R}^{d_k}$$
#
# where $\theta$ is the angle between them. With queries as rows of $Q$ and keys as rows of $K$, $QK^\top$ $(T, S)$ holds all dot products.
# Six words have three made-up features: alive, toy, big.
#
# **Predict.** Which has the largest dot product with *dog* (2, 0, 1): dog itself, *puppy* (2, 1, −1), or *horse* (2, 0, 2)?

# %%
words = ["dog", "puppy", "horse", "ball", "doll", "house"]
alive_toy_big = [[2, 0, 1], [2, 1, -1], [2, 0, 2], [-1, 2, -1], [0, 2, -1], [-2, 0, 2]]
features = np.array(alive_toy_big, dtype=np.float64)  # (6, 3)
similarity = features @ features.T  # (6, 6)

lengths = np.linalg.norm(features, axis=1)  # (6,)
cosine = similarity / np.outer(lengths, lengths)  # (6, 6)
print("most similar to dog by dot product:", words[similarity[0].argmax()])
print("most similar to dog by angle:      ", words[cosine[0].argmax()])
titled(
    heatmap(similarity, words, words, value_title="dot product", scheme="diverging", digits=0),
    "A dog is closest to a horse",
    "Dot products of six hand-made vectors. In the first row the dog scores 5 with itself and 6 with the horse. "
    "The puppy, small and half a toy, agrees with the doll as much as with the dog.",
)

# %% [markdown]
# **Pitfall.** *A dot product is not the cosine.* It also rewards length, and the horse's vector is long. Attention keeps
# the plain dot product, so length makes a score larger, up or down.

# %% [markdown]
# ## 2. Softmax turns scores into shares
#
# > **In short.** Scores can be any numbers. Softmax makes them positive and scales them to add up to 1.
#
# $$\operatorname{softmax}(s)_j = \frac{e^{s_j}}{\sum_{m=1}^{S} e^{s_m}}, \qquad s \in \mathbb{R}^{S}$$
#
# Adding the same $c$ to every score changes nothing, because $e^{s+c} = e^c e^s$ and $e^c$ cancels. So we may subtract the largest score
# first, and no exponential can overflow.


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

with np.errstate(all="ignore"):  # as the formula is written: e^1000 is too large for a float64
    assert np.isnan(np.exp(scores + 1000) / np.exp(scores + 1000).sum()).all()
print("softmax(0, 2, 1) =", softmax_numpy(scores).round(4))

# %% [markdown]
# **Pitfall.** *Softmax as the formula is written* computes ∞/∞ for large scores, which is NaN.

# %% [markdown]
# ## 3. Attention by hand
#
# > **In short.** Each word asks a question (its *query*). Each word holds up a sign (its *key*). If question and sign agree, the asker
# > takes a large share of what that word has to give (its *value*).
#
# $$\operatorname{Attention}(Q, K, V) = \operatorname{softmax}\!\left(\frac{QK^\top}{\sqrt{d_k}}\right) V$$
#
# | | shape | each row |
# |---|---|---|
# | $Q$ | $(T, d_k)$ | the query of a word that looks |
# | $K$, $V$ | $(S, d_k)$, $(S, d_v)$ | the key and the value of a word that is looked at |
# | softmax | $(T, S)$ | the weights of a word that looks; they sum to 1 |
# | result | $(T, d_v)$ | that word's mix of values |
#
# In *a red ball*, a word's key says what kind of word it is, and its query what kind it looks for: *ball* looks for an adjective. The value
# says what the thing looks like. Here $d_k = 4$.

# %%
phrase = ["a", "red", "ball"]
#        article, adjective, noun, singular
queries = [[1, 0, 2, 1], [0, 1, 3, 1], [0, 2, 1, 1]]  # (3, 4)
keys = [[2, 0, 0, 1], [0, 2, 0, 1], [0, 0, 2, 1]]  # (3, 4)
#       redness, roundness
values = [[0, 0], [4, 0], [0, 4]]  # (3, 2)

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

print(f"ball's output: redness {ball[0]:.4f}, roundness {ball[1]:.4f}")
steps.round(4)

# %% [markdown]
# *ball* went in as a round thing without a colour. It comes out as a *red* round thing.

# %% [markdown]
# ## 4. The same on one screen
#
# > **In short.** Two matrix products with a softmax between them.


# %%
def attention_numpy(
    query: np.ndarray, key: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Attention for query (T, d_k), key (S, d_k), value (S, d_v): output (T, d_v), weights (T, S)."""
    scores = query @ key.T / math.sqrt(query.shape[-1])  # (T, S)
    weights = softmax_numpy(scores)  # (T, S), each row sums to 1
    return weights @ value, weights  # (T, d_v)


# %% [markdown]
# **Predict.** An output is a mix of the three values, with positive shares that sum to 1. In a plot of the values, where must it lie?

# %%
q, k, v = (np.array(rows, dtype=np.float64) for rows in (queries, keys, values))
output, numpy_weights = attention_numpy(q, k, v)  # (3, 2), (3, 3)
np.testing.assert_allclose(output[2], ball)  # the row that we did by hand

assert np.allclose(numpy_weights.sum(axis=1), 1)
print(
    f"smallest weight {numpy_weights.min():.4f} > 0: each output lies inside the values' triangle"
)
titled(
    hand_chart(numpy_weights, v, output, phrase, ("redness", "roundness")),
    "Attention can mix what is there; it cannot invent",
    "Left: ball (bottom row) gives most of its attention to red. Right: every output lies inside the triangle "
    "that the three values span.",
    wrap=95,
)

# %% [markdown]
# PyTorch adds gradients, and leading dimensions for batches. The rest of the series uses this function:


# %%
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout=None
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
# Section 6 explains the masks of `masked_softmax`, section 7 its last two lines. Dropout comes in chapter 2.


# %%
def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension of `scores` (..., T, S) that sees only allowed positions.

    `mask` broadcasts to `scores`: boolean (True = allowed), or a float that is added (−inf = never).
    A row with nothing to attend to gives zeros, and zero gradients, never NaN.
    Raises TypeError for an integer mask, which could mean either.
    """
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
        empty = ~mask.any(dim=-1, keepdim=True)  # (..., T, 1)
    elif mask.is_floating_point():
        scores = scores + mask
        empty = (mask == -math.inf).all(dim=-1, keepdim=True)  # (..., T, 1)
    else:
        raise TypeError(f"a mask is boolean (True = allowed) or float (added), not {mask.dtype}")
    weights = scores.masked_fill(empty, 0.0).softmax(dim=-1)  # (..., T, S)
    return weights.masked_fill(empty, 0.0)


# %% [markdown]
# We compare `attention` with NumPy and PyTorch, gradients included:

# %%
torch.manual_seed(1)
shapes = ((2, 3, 4), (2, 5, 4), (2, 5, 6))  # (B, T, d_k), (B, S, d_k), (B, S, d_v)
inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
ours, weights = attention(*inputs)
theirs = F.scaled_dot_product_attention(*inputs)

torch.testing.assert_close(ours, theirs)
pull = torch.randn_like(ours)  # a random weight for each entry of the output
slopes = [torch.autograd.grad((result * pull).sum(), inputs) for result in (ours, theirs)]
torch.testing.assert_close(*slopes)
for b in range(2):
    expected, _ = attention_numpy(*(x[b].detach().numpy() for x in inputs))
    np.testing.assert_allclose(ours[b].detach(), expected)
print("output (B, T, d_v):", tuple(ours.shape), "weights (B, T, S):", tuple(weights.shape))

# %% [markdown]
# **Pitfall.** *Softmax over the wrong axis.* With `dim=-2` the queries compete for a key, not the keys for a query. The shapes fit.
# Each **row** of the weights must sum to 1.

# %%
wrong = (inputs[0] @ inputs[1].mT / math.sqrt(4)).softmax(dim=-2)  # (B, T, S) too
print("rows of the right weights sum to", weights[0].sum(-1).detach().numpy().round(4))
print("rows of the wrong weights sum to", wrong[0].sum(-1).detach().numpy().round(4))

# %% [markdown]
# ## 5. Why divide by $\sqrt{d_k}$
#
# > **In short.** A sum of many random products spreads widely. Dividing by its spread keeps softmax from giving everything to one key.
#
# If the entries of $q, k \in \mathbb{R}^{d_k}$ are independent with mean 0 and variance 1, so are the products $q_i k_i$. Variances of
# independent terms add up: $q \cdot k$ has variance $d_k$ and spread (standard deviation) $\sqrt{d_k}$. At $d_k = 512$ a typical score is
# ±22.6 (§3.2.1, footnote 4).


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
# A wide spread is bad because softmax *saturates*. The derivative of $w = \operatorname{softmax}(s)$ is
#
# $$\frac{\partial w_i}{\partial s_j} = w_i\,(\mathbb{1}[i = j] - w_j)$$
#
# If one weight is near 1 and the others near 0, all these derivatives are near 0. Then hardly any gradient reaches the scores, or the
# queries and keys behind them. The sum of the diagonal, the *slope* $\sum_i w_i (1 - w_i)$, measures what gets through. We stretch four
# scores of spread 1 by a growing factor.


# %%
def softmax_slope(weights: Tensor) -> Tensor:
    """How strongly weights (..., S) react to scores, Σ w(1−w): 1 − 1/S if even, 0 if one-hot."""
    return (weights * (1 - weights)).sum(-1)


# %%
unit = torch.tensor([3.0, 1.0, -1.0, -3.0], dtype=torch.float64) / math.sqrt(5)  # spread 1
spread = torch.logspace(-1, 1.5, 51, dtype=torch.float64)  # 0.1 to 32
stretched = (spread.unsqueeze(-1) * unit).softmax(-1)  # (51, 4)
print("factor 1:   ", unit.softmax(-1).numpy().round(4))
print("factor 22.6:", (22.6 * unit).softmax(-1).numpy().round(4))
titled(
    saturation_chart(spread, stretched, softmax_slope(stretched), wide=math.sqrt(512)),
    "Softmax saturates: at spread 22.6 one key takes everything",
    "Left: with spread 1 (first dashed line) all four keys get some weight; with spread 22.6 (second) "
    "one gets all. Right: there the slope is 0, and no gradient reaches the scores.",
    wrap=95,
)

# %% [markdown]
# Now random queries and 16 keys, as in a fresh model, with scores divided in three ways:

# %%
torch.manual_seed(0)
q = torch.randn(500, 1, 512, dtype=torch.float64)
k = torch.randn(500, 16, 512, dtype=torch.float64)
measured = {}
for name, divisor in {"q · k": 1, "q · k / √d_k": math.sqrt(512), "q · k / d_k": 512}.items():
    scores = (q @ k.mT)[:, 0] / divisor  # (500, 16)
    weights = scores.softmax(-1)
    row = {"spread": scores.std(), "largest weight": weights.amax(-1).mean()}
    measured[name] = row | {"slope": softmax_slope(weights).mean()}
measured = pd.DataFrame(measured).T.astype(float)

assert abs(measured.spread["q · k"] / math.sqrt(512) - 1) < 0.05  # theory: 22.6
assert abs(measured.spread["q · k / √d_k"] - 1) < 0.05  # theory: 1
measured.round(2)

# %% [markdown]
# **Pitfall.** *Dividing by $d_k$* (last row). All weights are nearly 1/16 = 0.06: the head starts as a plain average. The slope per *score*
# is the largest here, but the scores react 22.6 times less to queries and keys than in the row above. Notice it by the spread of a
# *fresh* model's scores, which should be near 1.

# %% [markdown]
# ## 6. Masks: who may look at whom
#
# > **In short.** A mask is a table of yes and no: rows look, columns are looked at. A "no" sets that score to −∞, and $e^{-\infty} = 0$: no
# > weight.
#
# Masks here are boolean, **True where attention is allowed**.
#
# **The padding mask.** Short sentences of a batch are filled up with a pad token, id 0, that no word may look at. Every query sees the same
# keys, so one row is enough: $(B, 1, S)$.


# %%
def padding_mask(ids: Tensor, pad: int = 0) -> Tensor:
    """Mask of real tokens: ids (B, S) to a boolean (B, 1, S), True where the token is not `pad`."""
    return (ids != pad).unsqueeze(-2)


# %% [markdown]
# **The causal mask.** In training, a decoder is given the whole target sentence, but position $i$ may look only at positions
# $0 \dots i$, not at the words that it predicts: $(1, T, T)$.


# %%
def subsequent_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Causal mask: position i may look at positions 0..i and at nothing later (§3.2.3).

    Returns a boolean (1, size, size), True where attention is allowed.
    """
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


# %%
sentence = ["<s>", "a", "red", "ball"]
for i, row in enumerate(subsequent_mask(4)[0]):
    seen = " ".join(word for word, allowed in zip(sentence, row, strict=True) if allowed)
    then = (sentence + ["</s>"])[i + 1]
    print(f"row {i}: {sentence[i]:>4} may look at  {seen:<15}  to predict  {then}")

# %% [markdown]
# A position may see *itself*: row $i$ predicts the word *after* word $i$.

# %%
ids = torch.tensor([[2, 7, 8, 9, 0, 0]])  # <s> a red ball <pad> <pad>: (B=1, S=6)
pads = padding_mask(ids)  # (1, 1, 6)
causal = subsequent_mask(6)  # (1, 6, 6)
both = pads & causal  # (1, 6, 6)
tokens = sentence + ["<pad>", "<pad>"]

shown = {"padding": pads.expand(1, 6, 6)[0], "causal": causal[0], "both, joined by &": both[0]}
titled(
    panels(shown, tokens, tokens, cell=28),
    "A padding mask hides columns, a causal mask hides the future",
    "Joined, each position sees the real words up to itself.",
)

# %% [markdown]
# Does a mask really hide? If output $i$ doesn't depend on input $j$, its derivative by that input is exactly 0. `influence(f, x)` gives
# the size of this derivative for all pairs.

# %%
torch.manual_seed(2)
x = torch.randn(6, 4, dtype=torch.float64)  # six tokens; query, key and value are all x

assert (influence(lambda x: attention(x, x, x)[0], x) > 0).all()  # everyone sees everyone
assert torch.equal(influence(lambda x: attention(x, x, x, causal[0])[0], x) > 0, causal[0])
turned = influence(lambda x: attention(x, x, x, causal[0].mT)[0], x)
assert turned.triu(1).any()  # the pitfall below is noticed

# %% [markdown]
# **Pitfall.** *The mask turned over.* Rows and columns are swapped, or True means "hide" to one function and "allow" to the next. Then the
# answer can be copied from the input. Notice it with `influence`: nothing to the right of the diagonal may have a gradient.
#
# **Why pad *queries* may be left unmasked.** A pad asks too. But as a key it is hidden in every layer, and the loss skips its
# prediction (chapter 6). So its answer never reaches a real word:

# %%
real = pads[0, 0]  # (6,): four real tokens, two pads
padded = influence(lambda x: attention(x, x, x, pads[0])[0], x) > 0  # (6, 6)
assert not padded[real][:, ~real].any()  # no real word depends on a pad
assert padded[~real][:, real].all()  # the pads do look at real words

# %% [markdown]
# ## 7. The row that may look at nothing
#
# > **In short.** Nothing to look at, nothing seen: the output is zero.
#
# Such rows occur when pad queries are masked too, when a batch is padded on the *left* under a causal mask, and when a source sentence
# is empty.
#
# **Predict.** In `<pad> <pad> a ball`, with a causal mask, rows 0 and 1 may look at nothing. Forbidden scores are usually set to −10⁹, or
# to −∞, before the softmax. What does each put into row 0?

# %%
torch.manual_seed(4)
left_mask = (padding_mask(torch.tensor([[0, 0, 7, 9]])) & subsequent_mask(4))[0]  # (4, 4)
left_scores = torch.randn(4, 4, dtype=torch.float64)
filled = {
    "filled with −1e9": left_scores.masked_fill(~left_mask, -1e9).softmax(-1),
    "filled with −∞": left_scores.masked_fill(~left_mask, -math.inf).softmax(-1),
    "masked_softmax": masked_softmax(left_scores, left_mask),
}
for name, table in filled.items():
    print(f"{name:>16}: row 0 is", table[0].numpy().round(4))
    torch.testing.assert_close(table[2:], filled["masked_softmax"][2:])  # other rows agree

# %%
left_tokens = ["<pad>", "<pad>", "a", "ball"]
titled(
    panels(filled, left_tokens, left_tokens, cell=44, domain=(0, 1), value_title="weight"),
    "Two rows that may look at nothing",
    "Left: −1e9 makes them plain averages, over pads and over the forbidden future. "
    "Middle: 0/0. Right: nothing allowed, nothing seen. The other rows agree.",
    wrap=90,
)

# %% [markdown]
# **Pitfall.** *Masking with −10⁹*, as The Annotated Transformer does. It fails in two ways:
#
# 1. **An empty row becomes uniform:** all its scores are equal.
# 2. **Half precision.** The largest float16 is 65,504. PyTorch refuses to fill with −10⁹; in an added mask −10⁹ becomes −∞, and an empty
#    row becomes NaN.
#
# After a bare −∞, `nan_to_num` (NaN becomes 0) repairs the output, but not always the gradient. So `masked_softmax` gives an empty row harmless
# scores *before* the softmax and sets its weights to 0 after it (`gradcheck` compares with finite differences):

# %%
torch.manual_seed(6)
small = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
empty_rows = attention(*small, left_mask)[0][:2]  # (2, 3)

assert (empty_rows == 0).all()
assert all((g == 0).all() for g in torch.autograd.grad(empty_rows.sum(), small))
assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, left_mask)[0], small)
assert masked_softmax(left_scores.half(), left_mask).isfinite().all()  # in half precision, too

# %% [markdown]
# ## 8. A head that learns
#
# > **In short.** Nobody tells a head where to look. It is told the right answer, and the gradient teaches it where to look.
#
# A model *learns* its queries and keys: each word has a vector $x$ of $D$ numbers, and two matrices $W^Q, W^K$ $(D, d_k)$ turn it into a
# query $x W^Q$ or a key $x W^K$. Such a pair of matrices (chapter 2 adds a third, for values) is a **head**.
#
# Our task is a dictionary: five German words look at their English translations, in another order, and each must find its own.
# All word vectors are random and fixed, so at first a word and its translation have *nothing* in common.
#
# An English word's value has a single 1, at the word's own place. So the output is a share for each English word. The loss is
# $-\ln w_y$, with $w_y$ the share of the right word $y$. By section 5, $\partial\,\text{loss} / \partial s_j = w_j - \mathbb{1}[j = y]$: a
# step pushes the right word's score up and the others down.


# %%
def dictionary_task(sentences: int, vocab: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Words asked for and words there, (B, S) each: the same words, all different, in two orders."""
    there = torch.rand(sentences, vocab, dtype=torch.float64).argsort(-1)[:, :length]
    return there[:, torch.randperm(length)], there


def look_up(
    asked: Tensor, there: Tensor, x_asked: Tensor, x_there: Tensor, w_q: Tensor, w_k: Tensor
) -> tuple[Tensor, Tensor]:
    """One head: words asked (B, T) look at words there (B, S). Output (B, T, V), weights (B, T, S).

    x_asked and x_there (V, D) are the two languages' word vectors, w_q and w_k (D, d_k) the head.
    """
    value = F.one_hot(there, len(x_there)).to(x_there)  # (B, S, V)
    return attention(x_asked[asked] @ w_q, x_there[there] @ w_k, value)


# %% [markdown]
# Both matrices start small, so the first weights are nearly even.
#
# **Predict.** What is the loss before training?

# %%
pairs = "Anna Anna, Peter Peter, sieht sees, sucht seeks, große big, kleine small, Hunde dogs, "
pairs += "Katzen cats, Bälle balls, heute today, morgen tomorrow, oft often"
german, english = zip(*(pair.split() for pair in pairs.split(", ")), strict=True)
asking = ["heute", "sieht", "Anna", "große", "Hunde"]
standing = ["Anna", "sees", "big", "dogs", "today"]
asked_ids = torch.tensor([[german.index(word) for word in asking]])  # (1, 5)
there_ids = torch.tensor([[english.index(word) for word in standing]])  # (1, 5)

# %%
torch.manual_seed(0)
tables = torch.randn(2, 12, 16, dtype=torch.float64)  # (2, V, D): random, and never changed
w_q = (0.1 * torch.randn(16, 8, dtype=torch.float64)).requires_grad_()  # (D, d_k)
w_k = (0.1 * torch.randn(16, 8, dtype=torch.float64)).requires_grad_()  # (D, d_k)
losses, right, maps = [], [], {}
for step in range(201):
    if step in (0, 15, 200):
        _, weights = look_up(asked_ids, there_ids, *tables, w_q, w_k)  # (1, 5, 5)
        maps[f"after {step} steps" if step else "before training"] = weights[0].detach()
    asked, there = dictionary_task(64, vocab=12)  # (64, 5) each
    output, _ = look_up(asked, there, *tables, w_q, w_k)  # (64, 5, V)
    loss = -output.gather(-1, asked.unsqueeze(-1)).log().mean()
    to_q, to_k = torch.autograd.grad(loss, (w_q, w_k))
    with torch.no_grad():
        w_q -= 0.2 * to_q
        w_k -= 0.2 * to_k
    losses.append(loss.item())
    right.append((output.argmax(-1) == asked).double().mean().item())

print(f"loss before: {losses[0]:.2f}; −ln(1/5) = {math.log(5):.2f}")
print(f"right answers before: {right[0]:.0%}, in the last 20 steps: {np.mean(right[-20:]):.0%}")

# %% [markdown]
# Every step draws new combinations of the twelve words, so it is also a test (not of new words).

# %%
place = [standing.index(english[i]) for i in asked_ids[0]]  # where each translation stands
found = [table[range(5), place] for table in maps.values()]  # three times: the weights on it
assert (found[0] - 0.2).abs().max() < 0.1 and (found[-1] > 0.9).all()
titled(
    panels(maps, asking, standing, cell=37, domain=(0, 1), value_title="weight", per_line=3),
    "The head finds out where to look",
    "Each row is a German word; its weights over the English words sum to 1. Trained on right "
    "answers alone, they go to where the answer stands.",
    wrap=95,
)

# %%
titled(
    lines(
        pd.DataFrame({"step": range(201), "loss": losses}), "step", "loss", zero=True, height=180
    ),
    "The loss falls from ln 5, an even guess among five",
    "One head, two matrices of 16 × 8 numbers, 200 steps of plain gradient descent.",
)

# %% [markdown]
# ## 9. What it costs
#
# > **In short.** Every word looks at every word. Twice the length: four times the work of the two products, and four times the weights.
#
# The product of an $(a, b)$ and a $(b, c)$ matrix takes $2abc$ operations. With $n$ words and width $D$ in all heads together, attention
# needs $2n^2D$ for $QK^\top$ and as much for the mix: $4n^2D$. The four projections around it, such as $x W^Q$, are $D \times D$ each
# (chapter 2) and need $8nD^2$. PyTorch can count them on the `meta` device, where tensors have a shape but no numbers.
#
# **Predict.** A caption has about 16 tokens. At $D = 512$, how large is attention's share of this layer's work?

# %%
D, heads, shares = 512, 8, []
for n in (16, 64, 256, 1024, 4096):
    qkv = [torch.empty(heads, n, D // heads, device="meta", requires_grad=True) for _ in range(3)]
    x, w = torch.empty(n, D, device="meta"), torch.empty(D, D, device="meta")
    attending, projecting = count_flops(attention, *qkv), 4 * count_flops(torch.mm, x, w)
    assert attending == 4 * n * n * D and projecting == 8 * n * D * D
    assert saved_bytes(attention, *qkv) == 4 * (heads * n * n + 3 * n * D)  # weights; q, k and v
    shares.append({"length": f"n = {n:,}", "share": attending / (attending + projecting)})

print(f"attention's share at n = 16: {shares[0]['share']:.1%}")
titled(
    bars(
        pd.DataFrame(shares),
        "length",
        "share",
        value_title="attention's share",
        number_format=".1~%",
    ),
    "1.5% of this layer's work for a caption, 80% at 4,096 words",
    "Attention's share, counted at D = 512; the rest are the projections. At n = 2D = 1,024 they are equal.",
)

# %% [markdown]
# Memory is the harder limit: for the backward pass attention keeps $n^2$ weights per head.
#
# **Pitfall.** *"Attention is quadratic, so attention is what is slow."* For sentences its share of the operations is small, and a share of
# operations is not a share of *time*, which chapter 11 measures.

# %% [markdown]
# ## 10. Beside recurrence and convolution
#
# > **In short.** Recurrence passes a word along from neighbour to neighbour. A convolution jumps a few places. Attention looks straight
# > across.
#
# The paper's Table 1 compares layers of width $D$, without attention's projections. A convolution sees $k$ places, restricted attention $r$. Sequential steps must wait for
# each other; a path leads from one position to another.
#
# | layer | operations | sequential steps | longest path |
# |---|---|---|---|
# | self-attention | $O(n^2 D)$ | $O(1)$ | $O(1)$ |
# | recurrent | $O(n D^2)$ | $O(n)$ | $O(n)$ |
# | convolutional | $O(k n D^2)$ | $O(1)$ | $O(\log_k n)$ |
# | self-attention, restricted | $O(r n D)$ | $O(1)$ | $O(n/r)$ |
#
# The path $\log_k n$ is that of *dilated* convolutions, which skip places; plain ones need $(n-1)/(k-1)$ layers. To count a path, we
# multiply masks: the product says what two layers in a row let through.

# %%
n = 17
before = subsequent_mask(n)[0].double()  # all layers here look back only
layers = {
    "recurrent": before.triu(-1),  # itself and its left neighbour
    "plain convolution, k = 3": before.triu(-2),
    "restricted attention, r = 5": before.triu(-4),
    "self-attention": before,
}
heard = {}
for name, layer in layers.items():
    powers = [torch.matrix_power(layer, hops) for hops in range(5)]  # (n, n) each
    heard[name] = torch.stack([power[-1] > 0 for power in powers])  # (5, n)
assert [int(table[-1].sum()) for table in heard.values()] == [5, 9, 17, 17]
titled(
    panels(
        heard,
        [str(hops) for hops in range(5)],
        per_line=2,
        cell=14,
        row_title="hops",
        column_title="input position",
        words=("has reached the last word", "has not"),
    ),
    "Self-attention reaches every word in one hop",
    "Which of 17 words the last one has heard of. A hop is a layer; for recurrence it is a step in time.",
)

# %% [markdown]
# ## Summary
#
# - Attention compares queries with keys, turns each row of scores into shares, and mixes the values.
# - A fresh model's scores spread like $\sqrt{d_k}$. Dividing by it keeps softmax's gradient alive.
# - Masks are True where attention is allowed. A row that may look at nothing gives zeros, and no gradient.
# - Attention costs $4n^2D$ operations, and ours keeps $n^2$ weights per head.
#
# ## What the paper did that we don't
#
# It compares dot products with *additive* attention, which is slower. Exercise 3 builds it.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong. `solution`, from `scripts.book.exercises`, shows our function and answers the questions.

# %% [markdown]
# ### Exercise 1 · A query that insists
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Give *a* in *a red ball* the query $(s, 0, 0, 0)$, such that its weight on itself is exactly `share`. How large is $s$ for 0.5, 0.99,
# 0.9999? What would a weight of 1 need? `solution("insisting_query")` shows ours.


# %%
def insisting_query(share: float) -> list[float]:
    """Four numbers (s, 0, 0, 0) that give *a* the weight `share` on itself."""
    ...


check(insisting_query)

# %% [markdown]
# ### Exercise 2 · A window, and one with gaps
# *code · difficulty ●●○ · worth ●●● · 15 minutes*
#
# Write a mask in which position $i$ may look at $r$ positions: itself, $i - \text{gap}$, $i - 2\,\text{gap}$, …, as far as they exist.
# Then think: stack layers with $r = 3$ and gaps $1, 3, 9, \dots$ After how many layers has position $n - 1$ heard of position 0?
# `solution("window_mask")` shows ours.


# %%
def window_mask(n: int, r: int, gap: int = 1) -> Tensor:
    """Boolean (1, n, n): position i sees itself, i - gap, …: r positions at most."""
    ...


check(window_mask)

# %% [markdown]
# ### Exercise 3 · Additive attention
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# Bahdanau's attention scores a pair with a small network instead of a dot product:
#
# $$\text{score}(q, k) = u^\top \tanh(W q + M k), \qquad W\ (a, d_q),\ M\ (a, d_k),\ u\ (a)$$
#
# Write it for query $(T, d_q)$, key $(S, d_k)$, value $(S, d_v)$ and any leading dimensions, the same in all three, with masks as in `attention`. Why is it slower
# in practice than a dot product? What would happen without the tanh? `solution("additive_attention")` shows ours.


# %%
def additive_attention(query, key, value, w, m, u, mask=None) -> tuple[Tensor, Tensor]:
    """Output (..., T, d_v) and weights (..., T, S), from scores uᵀ tanh(Wq + Mk)."""
    ...


check(additive_attention)

# %% [markdown]
# ### Exercise 4 · Attention that keeps nothing
# *code · difficulty ●●● · worth ●●● · 45 minutes*
#
# `blocks` is an iterator over pairs of key $(s, d_k)$ and value $(s, d_v)$, with any $s \geq 1$. They
# come only once, and may not be kept. For a query $(T, d_k)$, return the output $(T, d_v)$ that `attention` gives for all keys and values
# at once. `solution("streaming_attention")` shows ours.
#
# A hint: the mix is a sum divided by a sum, and both can grow block by block. What must be done to the two sums when a score turns up that
# is larger than all before? (This method, due to Milakov and Gimelshein, is the core of FlashAttention.)


# %%
def streaming_attention(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention's output (T, d_v) from key and value blocks that pass once; memory for one block."""
    ...


check(streaming_attention)

# %% [markdown]
# Next: [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb)
