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
# After this chapter you can compute attention by hand, write it in four lines, mask it safely, and show that a head finds by itself where to look.
#
# | | |
# |---|---|
# | In the paper | §3.2.1 (scaled dot-product attention), §3.2.3 (the causal mask), §4 (why self-attention) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 25 minutes to read, 50 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 0 · Start here](ch00_start_here.ipynb) · [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb) |
#
# *If you read only three cells:* the matrices of section 2, the code below them, the maps of section 6.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Iterator, Sequence

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.book.charts import bars, lines, panels, titled
from scripts.book.exercises import check, outcome
from scripts.book.figures.model import matrices_chart, order_maps, saturation_chart
from scripts.book.instruments import count_flops, influence, saved_bytes
from scripts.corpora.reversal import BOS, EXAMPLE, LETTERS, PAD, to_ids

torch.set_default_dtype(torch.float64)  # so that checks can ask for agreement to many digits

# %% [markdown]
# Shapes: $B$ sequences, $T$ places that *look*, $S$ places that are looked *at*, $D$ the width of a token's vector, $d_k$ that of a query
# or key, $d_v$ that of a value; $n = T = S$ when a sequence looks at itself (*self-attention*).

# %% [markdown]
# ## 1. One question, five keys
#
# > **In short.** A place that looks asks a question (its *query*). Each place that is looked at has a *key*. Their dot
# > product says how well they agree, and softmax makes shares of it.
#
# In chapters 1 to 5 we build a machine that writes a word backwards: *decaf* becomes *faced*. To write the first letter of *faced* it
# must look at the last letter of *decaf*, as chapter 0's translator, for *basket*, must look near the end of the German sentence.
#
# Count the places of *decaf* from 0, and let the key of place $p$ be $(p, p^2)$. A query that wants place $m$ is $(2m, -1)$. Then
#
# $$q \cdot k = \sum_{i=1}^{d_k} q_i k_i = 2mp - p^2 = m^2 - (p - m)^2, \qquad q, k \in \mathbb{R}^{2}$$
#
# is largest where $p = m$. The five results are the query's *scores*. Softmax makes them positive and scales them to add up to 1:
#
# $$w_j = \operatorname{softmax}(s)_j = \frac{e^{s_j}}{\sum_{i=1}^{S} e^{s_i}}, \qquad s \in \mathbb{R}^{S}$$
#
# Before softmax, attention divides the scores by $\sqrt{d_k}$, here $\sqrt 2$. Section 3 says why.
#
# **Predict.** The first letter of *faced* asks for place 4: its query is (8, −1). Which five scores does it get? What is the weight of *f*?

# %%
query = [8, -1]
by_hand = pd.DataFrame({"letter": list(EXAMPLE), "key": [(p, p * p) for p in range(5)]})
by_hand["q · k"] = [query[0] * key[0] + query[1] * key[1] for key in by_hand["key"]]
by_hand["÷ √2"] = by_hand["q · k"] / math.sqrt(2)
by_hand["exp"] = [math.exp(score) for score in by_hand["÷ √2"]]
by_hand["weight"] = by_hand["exp"] / by_hand["exp"].sum()
by_hand.round(2)

# %% [markdown]
# The scores are 0, 7, 12, 15 and 16, and *f* gets 0.64. Its neighbour *a* still gets 0.32. A query twice as long doubles every score,
# and *f* gets 0.80: in a dot product length counts.
#
# PyTorch first subtracts the largest score from all, so that no exponential overflows. The weights stay the same: $e^{s+c} = e^c e^s$,
# and $e^c$ cancels.

# %% [markdown]
# ## 2. All five questions at once
#
# > **In short.** Two matrix products with a softmax between them: compare, take shares, mix.
#
# $$\operatorname{Attention}(Q, K, V) = \operatorname{softmax}\!\left(\frac{QK^\top}{\sqrt{d_k}}\right) V$$
#
# | | shape | each row |
# |---|---|---|
# | $Q$ | $(T, d_k)$ | a query |
# | $K$, $V$ | $(S, d_k)$, $(S, d_v)$ | a key, and a *value*: what the place has to give |
# | softmax | $(T, S)$ | the weights of one query; they sum to 1 |
# | result | $(T, d_v)$ | the query's mix of values |
#
# Place $t$ of *faced* wants place $4 - t$ of *decaf*. Here a value is a 1 at its own letter.

# %%
places = torch.arange(5.0)
K = torch.stack([places, places**2], dim=1)  # (S, d_k) = (5, 2)
Q = torch.stack([2 * (4 - places), -torch.ones(5)], dim=1)  # (T, d_k) = (5, 2)
decaf = torch.tensor([LETTERS.index(letter) for letter in EXAMPLE])  # 3, 4, 2, 0, 5
V = F.one_hot(decaf, 6).double()  # (S, d_v) = (5, 6)
weights = (Q @ K.T / math.sqrt(2)).softmax(dim=-1)  # (T, S) = (5, 5)
mix = weights @ V  # (T, d_v) = (5, 6)

assert torch.allclose(weights[0], torch.tensor(by_hand["weight"]))
assert "".join(LETTERS[i] for i in mix.argmax(dim=-1)) == "faced"
titled(
    matrices_chart(Q, K, weights, V, mix, asking=list("faced"), asked=list(EXAMPLE)),
    "Row by row, the largest share spells faced",
    "Above: five queries times five keys. Below: shares of each row, times the values. The first row is "
    "the one that we did by hand. Attention mixes what is there: no row has any b.",
    wrap=105,
)

# %% [markdown]
# **Your turn.** Write these steps, for any leading dimensions (a batch). Five lines do. The mask is for section 4.


# %% tags=["yours"]
def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(QKᵀ/√d_k)·V for query (..., T, d_k), key (..., S, d_k), value (..., S, d_v).

    Where the boolean `mask`, which broadcasts to (..., T, S), is False, the score becomes −∞.
    Returns the output (..., T, d_v) and the weights (..., T, S).
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))  # (..., T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)  # e^−∞ = 0: no weight
    weights = scores.softmax(dim=-1)  # (..., T, S), each row sums to 1
    return weights @ value, weights  # (..., T, d_v)


# %%
torch.manual_seed(1)
inputs = [torch.randn(2, *shape) for shape in ((3, 4), (5, 4), (5, 6))]  # B = 2, T = 3, S = 5
allowed = torch.rand(2, 3, 5) > 0.4
allowed[..., 0] = True

cases = [([x[0] for x in inputs], allowed[0]), ([x[None] for x in inputs], allowed)]
cases += [(inputs, mask) for mask in (None, allowed, allowed[:1], allowed[:, :1])]
for qkv, mask in cases:
    output, weights = plain_attention(*qkv, mask)
    assert torch.allclose(weights.sum(-1), torch.ones(3)), "softmax over keys: rows sum to 1"
    expected = F.scaled_dot_product_attention(*qkv, attn_mask=mask)
    assert torch.allclose(output, expected), "not PyTorch's: √d_k? True means *may look*?"
none = plain_attention(*inputs, torch.zeros_like(allowed))[1]  # nothing is allowed
assert none.isnan().all(), "fill with −∞, not with a large number: then this is 0/0, NaN"
print("output (B, T, d_v):", tuple(output.shape), " weights (B, T, S):", tuple(weights.shape))

# %% [markdown]
# ## 3. Why divide by $\sqrt{d_k}$
#
# > **In short.** A sum of many random products spreads widely. Divided by its spread, it leaves some weight to every key, and every query
# > something to learn.
#
# If the entries of $q, k \in \mathbb{R}^{d_k}$ are independent with mean 0 and variance 1, so are the products $q_i k_i$. Their
# variances add up: $q \cdot k$ has variance $d_k$ and spread (standard deviation) $\sqrt{d_k}$, 22.6 at $d_k = 512$ (§3.2.1, footnote 4).
#
# We stretch section 1's scores to other spreads; where the chart is live, move the slider.
#
# **Predict.** At a spread of 1, *f* gets 0.38 and *a* 0.32. What do they get at 22.6?

# %%
unit = torch.tensor(by_hand["q · k"], dtype=torch.float64)  # 0, 7, 12, 15, 16
unit = (unit - unit.mean()) / unit.std(correction=0)  # spread 1
even, sharp = unit.softmax(-1), (unit * 22.6).softmax(-1)
assert even[-1] < 0.4 and sharp[-1] > 0.97
titled(
    saturation_chart(unit, list(EXAMPLE), spread=22.6),
    "At a spread of 22.6 one letter takes 98%",
    "Softmax of five scores at a spread of 22.6; at 1, f gets 38%. Where the chart is live, a slider sets it.",
)

# %% [markdown]
# At 22.6, *f* gets 0.98 and *a* 0.02: softmax is *saturated*. Its derivative is
#
# $$\frac{\partial w_i}{\partial s_j} = w_i\,(\mathbb{1}[i = j] - w_j)$$
#
# With one weight near 1 all these are near 0. But on its way to the query the gradient is multiplied by the keys, undivided 22.6 times as
# strongly. So we measure it at the query: 200 random questions, each to 16 places.
#
# Queries and keys are made by learned matrices, $x W^Q$ and $x W^K$. With Xavier's start, which this series uses, the entries of a $(D, D)$
# matrix have variance $1/D$; with that of `nn.Linear`, $1/(3D)$.
#
# **Predict.** Undivided, does a query get more gradient, or less?

# %%
torch.manual_seed(0)
x_query, x_key, value, pull = (torch.randn(200, n, 512) for n in (1, 16, 16, 1))
little, measured, curves = "queries under 1/10 of the mean", {}, []
for start, fill in {"Xavier": nn.init.xavier_uniform_, "nn.Linear": nn.Identity()}.items():
    W_Q, W_K = (fill(nn.Linear(512, 512).weight.detach()) for _ in range(2))
    q, k = F.linear(x_query, W_Q).requires_grad_(), F.linear(x_key, W_K)
    for name, root in {"undivided": 1, "divided by √d_k": math.sqrt(512)}.items():
        scores = q @ k.mT / root  # (200, 1, 16)
        (at_query,) = torch.autograd.grad(scores.softmax(-1) @ value, q, pull)
        sizes = at_query.norm(dim=-1).flatten().sort().values  # (200,)
        row = {"spread": scores.detach().std(), "mean gradient": sizes.mean()}
        measured[f"{start}, {name}"] = row | {little: (sizes < sizes.mean() / 10).sum()}
        share = {"query, sorted": range(200), "gradient ÷ mean": sizes / sizes.mean()}
        curves.append(pd.DataFrame(share | {"scores": name}))
measured = pd.DataFrame(measured).T.astype(float).round(2)

starved = measured[little].tolist()
assert (abs(measured["spread"] / [math.sqrt(512), 1, math.sqrt(512) / 3, 1 / 3] - 1) < 0.06).all()
assert starved[0] > 100 and starved[2] > 40 and starved[1] == starved[3] == 0
measured

# %%
titled(
    lines(pd.concat(curves[:2]), "query, sorted", "gradient ÷ mean", "scores", height=200),
    "Undivided, a few queries take most of the gradient; divided, it is shared",
    "Xavier's start. The gradient's size at 200 queries, sorted, as a multiple of its mean.",
)

# %% [markdown]
# The mean is larger: a few queries get huge gradients. With Xavier's start 120 of 200 get under a tenth of it; divided, none is under a tenth of its own, smaller mean. Dividing
# makes the gradient even, not large.
#
# With PyTorch's start the divided scores spread by only 1/3: nearly a plain average.

# %% [markdown]
# ## 4. Masks: who may look at whom
#
# > **In short.** A mask is a table of yes and no: rows look, columns are looked at. **True means allowed.** Elsewhere the score is −∞, and
# > $e^{-\infty} = 0$.
#
# **The padding mask** hides the pad tokens, id 0, that fill up short words of a batch. One row serves all queries: $(B, 1, S)$.
#
# **The causal mask.** In training, a decoder is given the whole target, but place $i$ may look only at places $0 \dots i$: $(1, T, T)$. It
# may see *itself*, for it predicts the letter *after* it.
#
# **Your turn.** Write both, a line each.


# %% tags=["yours"]
def padding_mask(ids: Tensor, pad: int = 0) -> Tensor:
    """Mask of real tokens: ids (B, S) to a boolean (B, 1, S), True where the token is not `pad`."""
    return (ids != pad).unsqueeze(-2)


def subsequent_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Causal mask: position i may look at positions 0..i and at nothing later (§3.2.3).

    Returns a boolean (1, size, size) on `device`, True where attention is allowed.
    """
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


# %%
faced, dab = [BOS, *to_ids("faced")], [BOS, *to_ids("dab"), PAD, PAD]
targets = torch.tensor([faced, dab])  # (B, T) = (2, 6)
pads, causal = padding_mask(targets), subsequent_mask(6)  # (2, 1, 6), (1, 6, 6)
hidden = nn.Transformer.generate_square_subsequent_mask(6).isinf()  # PyTorch's: −∞ where hidden

assert pads.dtype == causal.dtype == torch.bool, "True and False, not numbers"
assert pads.tolist() == [[[True] * 6], [[True] * 4 + [False] * 2]], "True for real tokens"
assert torch.equal(padding_mask(targets, BOS)[:, 0], targets != BOS), "`pad` may be another id"
assert torch.equal(causal, ~hidden.unsqueeze(0)), "place i sees 0 to i, itself too"
assert subsequent_mask(2, device="meta").device.type == "meta", "made on `device`"

tokens = ["<s>", *"dab", "<pad>", "<pad>"]
shown = {"padding": pads[1].expand(6, 6), "causal": causal[0], "joined by &": (pads & causal)[1]}
titled(
    panels(shown, tokens, tokens, cell=28),
    "A padding mask hides columns, a causal mask hides the future",
    "The target dab in a batch with faced. Joined, each place sees the real tokens up to itself.",
    wrap=95,
)

# %% [markdown]
# Does a mask really hide? If output $i$ doesn't depend on input $j$, its derivative by it is exactly 0. `influence(f, x)` gives the size
# of this derivative for all pairs.
#
# **Predict.** A *query* that is a pad still looks at letters. Can what it sees reach a real place?

# %%
torch.manual_seed(2)
x = torch.randn(6, 4)  # the six tokens of dab's row; query, key and value are all x
assert (influence(lambda x: plain_attention(x, x, x)[0], x) > 0).all()  # everyone sees everyone
for mask in (causal[0], pads[1].expand(6, 6)):
    depends = influence(lambda x, mask=mask: plain_attention(x, x, x, mask)[0], x) > 0  # (6, 6)
    assert torch.equal(depends, mask | torch.eye(6).bool())  # a query depends on itself
reaches = depends[pads[1, 0]][:, ~pads[1, 0]]  # from pads to real places: (4, 2)
print("a real place depends on a pad:", reaches.any().item())

# %% [markdown]
# It can't: as a key the pad is hidden, in every layer, and the loss skips it (chapter 6). So pad queries may stay unmasked.
# Compare `influence` with the table that you *meant*, and it finds `triu` for `tril`, or True for "hide", as in `nn.MultiheadAttention`.

# %% [markdown]
# ## 5. A case: everything is NaN
#
# > **In short.** A row that may look at nothing divides 0 by 0. It should give zeros, and no gradient.
#
# **Symptom.** A training runs well; then the loss is NaN, and stays so. One word of that batch is filled up on the *left*:
# `<pad> <pad> f a`. **Suspects:** the learning rate, large numbers, the mask. **Instrument:** look for the first NaN, layer by layer.
#
# **Predict.** Padding and causal mask are joined. Which rows are NaN after one layer, and which after two?

# %%
left = torch.tensor([[PAD, PAD, *to_ids("fa")]])  # (1, 4)
left_mask = (padding_mask(left) & subsequent_mask(4))[0]  # (4, 4)
torch.manual_seed(4)
x = torch.randn(4, 8)
for layer in (1, 2):
    x, _ = plain_attention(x, x, x, left_mask)
    print(f"after layer {layer}: NaN in rows", x.isnan().any(-1).nonzero().flatten().tolist())

# %% [markdown]
# **Culprit.** After one layer rows 0 and 1 are NaN: they may look at nothing, and their shares are 0/0. After two layers all rows are, for
# a weight of 0 times a value of NaN is NaN.
#
# **Pitfall.** The usual cure is −10⁹ instead of −∞.
#
# **Predict.** Which weights does row 0 get from −10⁹?

# %%
torch.manual_seed(4)
left_scores = torch.randn(4, 4)
eye = torch.eye(4)
filled = {
    "filled with −1e9": left_scores.masked_fill(~left_mask, -1e9).softmax(-1),
    "filled with −∞": left_scores.masked_fill(~left_mask, -math.inf).softmax(-1),
    "PyTorch": F.scaled_dot_product_attention(left_scores, eye, eye, left_mask, scale=1.0),
}
uniform, undefined, empty = (weights[:2] for weights in filled.values())
assert (uniform == 0.25).all() and undefined.isnan().all() and (empty == 0).all()

left_tokens = ["<pad>", "<pad>", "f", "a"]
titled(
    panels(filled, left_tokens, left_tokens, cell=44, domain=(0, 1), value_title="weight"),
    "−1e9 makes an empty row look at everything, −∞ makes it NaN",
    "Rows 0 and 1 may look at nothing. Left: plain averages, over pads and the forbidden future. "
    "Middle: 0/0. Right: zeros, as scaled_dot_product_attention gives. The other rows agree.",
    wrap=95,
)

# %% [markdown]
# All scores of row 0 are equal, so each gets 1/4: it looks at pads and into the future, silently. (The Annotated Transformer fills with
# −10⁹; in float16 PyTorch refuses to.) `F.scaled_dot_product_attention` gives zeros; `nn.MultiheadAttention`, asked for weights, gives NaN.
#
# **Your turn.** Write a softmax whose empty rows are 0, and `attention`, which the rest of the series uses. A trick: fill a second time,
# *after* the softmax. What `masked_fill` fills gets no gradient, so NaN passes neither forwards nor back.


# %% tags=["yours"]
def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension of `scores` (..., T, S) that sees only allowed positions.

    `mask` broadcasts to `scores`: boolean (True = allowed), or a float that is added (−inf = never).
    Without a mask it is the softmax.
    A row with nothing to attend to gives zeros, and zero gradients, never NaN. A NaN among the
    allowed scores stays NaN: it is a bug elsewhere.
    Raises TypeError for an integer mask, which could mean either.
    """
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.is_floating_point():
        scores, mask = scores + mask, mask > -math.inf
    elif mask.dtype != torch.bool:
        raise TypeError(f"a mask is boolean (True = allowed) or float (added), not {mask.dtype}")
    hidden = ~mask
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)  # an empty row is NaN
    return weights.masked_fill(hidden, 0.0)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout=None
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, softmax(QKᵀ/√d_k)·V (§3.2.1, equation 1).

    query (..., T, d_k), key (..., S, d_k), value (..., S, d_v); `mask` as in `masked_softmax`.
    `dropout`, a function (chapter 2), changes the weights that mix the values. Returns the
    output (..., T, d_v) and the weights (..., T, S) as they were before `dropout`.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))  # (..., T, S)
    weights = masked_softmax(scores, mask)  # (..., T, S), each row sums to 1, or to 0
    kept = weights if dropout is None else dropout(weights)  # (..., T, S)
    return kept @ value, weights  # (..., T, d_v)


# %%
torch.manual_seed(6)
small = [torch.randn(2, 4, size, requires_grad=True) for size in (3, 3, 5)]  # query, key, value
added = torch.randn(4, 4).masked_fill(~left_mask, -math.inf).requires_grad_()
for mask in (None, left_mask, added):
    inputs = small if mask is not added else [*small, added]
    ours, weights = attention(*small, mask)
    theirs = F.scaled_dot_product_attention(*small, attn_mask=mask)
    assert torch.allclose(ours, theirs), "not PyTorch's output: scale, mask, or the empty rows?"
    pull = torch.randn_like(ours)  # a random weight for each entry of the output
    slopes = [torch.autograd.grad(result, inputs, pull) for result in (ours, theirs)]
    assert all(map(torch.allclose, *slopes)), "not PyTorch's gradients: does NaN get back?"

dropped, weights = attention(*small, left_mask, dropout=torch.triu)  # drops weights, too
assert torch.allclose(dropped, weights.triu() @ small[2]), "`dropout` changes the weights"
assert torch.allclose(weights[:, 2:].sum(-1), torch.ones(2, 2)), "returned: weights before dropout"
usual, low = (masked_softmax(left_scores - shift, left_mask) for shift in (0, 1e6))
assert torch.allclose(usual, low), "low scores, too: fill with −∞"
assert masked_softmax(left_scores.half(), left_mask).isfinite().all(), "half precision, too"
bug = masked_softmax(left_scores * math.nan, left_mask)[3, 2:]
assert bug.isnan().all(), "don't hide real NaNs"
refused = outcome(masked_softmax, left_scores, left_mask.long())  # the error's name
assert refused == "TypeError", "an integer mask could mean either: raise TypeError"
print("the same numbers and gradients as PyTorch's")

# %% [markdown]
# ## 6. A head that learns where to look
#
# > **In short.** Nobody tells a head where to look. It is told the right letter, and the gradient does the rest.
#
# Now nothing is made by hand. Each letter and each place has a vector of $D = 32$ random numbers that never change, and a *head* has three
# learned matrices:
#
# - place $t$ of the answer asks with its own vector times $W^Q$;
# - at place $p$ of the word, $x$ is its letter's vector plus the place's; key and value are $x W^K$ and $x W^V$;
# - a learned *readout* turns the mix into ten scores, one for each letter.
#
# The loss is cross-entropy: $-\ln$ of the share that softmax gives the right letter's score. Places appear nowhere in it.


# %%
class LetterHead(nn.Module):
    """One head that writes five letters, each made of what it sees of a word of five letters."""

    def __init__(self, d_model: int = 32, d_k: int = 16):
        super().__init__()
        self.register_buffer("letters", torch.randn(len(LETTERS), d_model))
        self.register_buffer("places", torch.randn(5, d_model))  # of the word's letters
        self.register_buffer("asking", torch.randn(5, d_model))  # places of the answer
        self.project_query = nn.Linear(d_model, d_k, bias=False)
        self.project_key = nn.Linear(d_model, d_k, bias=False)
        self.project_value = nn.Linear(d_model, d_k, bias=False)
        self.readout = nn.Linear(d_k, len(LETTERS))

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Words (B, 5), as numbers of letters, to logits (B, 5, 10) and weights (B, 5, 5)."""
        x = self.letters[words] + self.places  # (B, S, D)
        query = self.project_query(self.asking)  # (T, d_k), the same for every word
        mix, weights = attention(query, self.project_key(x), self.project_value(x))
        return self.readout(mix), weights


def train_letter_head(order: Sequence[int], seed: int = 0, without: str = "") -> LetterHead:
    """A head that has learned to write a word's letters in `order`, from the right letters alone.

    `without` names a buffer that is set to 0, "asking" or "places", or is "learning to look".
    """
    torch.manual_seed(seed)
    head = LetterHead().to(torch.float32)
    if without == "learning to look":  # W^Q and W^K stay as they began
        for projection in (head.project_query, head.project_key):
            projection.requires_grad_(False)
    elif without:
        head.get_buffer(without).zero_()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)  # chapter 6
    for _ in range(400):
        words = torch.randint(len(LETTERS), (64, 5))
        logits, _ = head(words)
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, order].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head


@torch.no_grad()
def letters_right(head: LetterHead, words: Tensor, order: Sequence[int]) -> tuple[float, float]:
    """The share of right letters, and the least weight that any word gives to the right place."""
    logits, weights = head(words)
    right_letters = (logits.argmax(-1) == words[:, order]).double().mean().item()
    return right_letters, weights[:, range(5), order].min().item()


# %% [markdown]
# We judge it on *all* 100,000 words of five letters; training shows at most 25,600. And we take one thing out at a time: without questions
# (vectors of 0) the weights are even; without the word's places a key can't say where it is. Last, $W^Q$ and $W^K$
# stay as they began.
#
# With even weights a head sees only how often each letter occurs. Its best answer is the commonest letter, five times: of *deede* three
# letters are right.
#
# **Predict.** How many percent of all letters does each of the four heads get right?

# %%
BACKWARDS = [4, 3, 2, 1, 0]
every_word = torch.cartesian_prod(*[torch.arange(len(LETTERS))] * 5)  # (100,000, 5)
commonest = F.one_hot(every_word, len(LETTERS)).sum(1).amax(-1)  # (100,000,)
counting = commonest.double().mean().item() / 5

trained = [train_letter_head(BACKWARDS, seed) for seed in range(8)]
results = [letters_right(head, every_word, BACKWARDS) for head in trained]
shares = {"a head that looks": min(share for share, _ in results)}
for gone in ("asking", "places", "learning to look"):
    blind = [train_letter_head(BACKWARDS, seed, gone) for seed in range(8)]
    shares[f"without {gone}"] = max(letters_right(head, every_word, BACKWARDS)[0] for head in blind)
for name, share in (shares | {"counting letters": counting}).items():
    print(f"{name:>24}: {share:.0%} of letters right")

assert shares["without learning to look"] < 0.8 < 0.999 < shares["a head that looks"]
assert all(abs(shares[f"without {gone}"] - counting) < 0.002 for gone in ("asking", "places"))
assert min(least for _, least in results) > 0.95  # the least weight on the right place

# %% [markdown]
# Without questions or places it is 36%, what counting gives; without learning to look, the best of eight seeds gets 62%. The head that
# looks gets over 99.9% right, with each of eight seeds.
#
# **Predict.** Where does it look for the first letter? And where, had the answers been in another order?

# %%
orders = {"backwards": BACKWARDS, "forwards": [0, 1, 2, 3, 4], "shuffled": [2, 0, 4, 1, 3]}
machines = {name: train_letter_head(order) for name, order in orders.items()}
torch.manual_seed(0)
machines = {"untrained": LetterHead().to(torch.float32)} | machines
maps = {name: head(decaf[None])[1][0].detach() for name, head in machines.items()}  # (5, 5) each
written = {name: [EXAMPLE[p] for p in orders.get(name, BACKWARDS)] for name in maps}

for name, order in orders.items():
    right, least = letters_right(machines[name], every_word, order)
    assert right > 0.999 and least > 0.95  # the least weight on the right place
titled(
    order_maps(maps, written, list(EXAMPLE)),
    "The head finds each letter's place; the loss never named it",
    "Each row is a letter to be written, each column a letter of decaf; weights to one digit. The same "
    "code, shown other answers, learns another map.",
    wrap=105,
)

# %% [markdown]
# For the first letter it looks at the last place, with over 0.95 of the weight in every word; in another order it looks elsewhere. No more
# letters right than without learning to look (62%), or one map for two orders, would have refuted that looking is learned.

# %% [markdown]
# ## 7. What it costs
#
# > **In short.** Every place looks at every place. Twice the length: four times the work in the two products, and
# > four times the weights.
#
# The product of an $(a, b)$ and a $(b, c)$ matrix takes $2abc$ operations. At width $D$ in all heads together, $QK^\top$ takes $2n^2D$ and
# the mix as much: $4n^2D$. The four projections around it, $D \times D$ each (chapter 2), take $8nD^2$.
#
# **Predict.** A caption has about 16 tokens. At $D = 512$, which share of this work is attention's two products?

# %%
D, heads, shares = 512, 8, []
for n in (16, 64, 256, 1024, 4096):  # on the device "meta" tensors have a shape, but no numbers
    qkv = [torch.empty(heads, n, D // heads, device="meta", requires_grad=True) for _ in range(3)]
    x, w = torch.empty(n, D, device="meta"), torch.empty(D, D, device="meta")
    attending, projecting = count_flops(attention, *qkv), 4 * count_flops(torch.mm, x, w)
    assert attending == 4 * n * n * D and projecting == 8 * n * D * D
    assert saved_bytes(attention, *qkv) == 8 * (heads * n * n + 3 * n * D)  # weights; q, k and v
    shares.append({"length": f"n = {n:,}", "share": attending / (attending + projecting)})

titled(
    bars(pd.DataFrame(shares), "length", "share", number_format=".1~%"),
    "The two products: 1.5% of attention's work for a caption, 80% at 4,096 tokens",
    "Counted at D = 512; the rest are the four projections. At n = 2D = 1,024 they are equal.",
)

# %% [markdown]
# For a caption it is 1.5% of operations, not of time (chapter 11); of a layer with its feed-forward part it is less.
# Memory grows as fast: for its backward pass this code keeps $n^2$ weights per head.
#
# The paper's Table 1 leaves out attention's projections. A convolution sees $c$ places; sequential steps wait for each other.
#
# | layer | operations | sequential steps | longest path |
# |---|---|---|---|
# | self-attention | $O(n^2 D)$ | $O(1)$ | $O(1)$ |
# | recurrent | $O(n D^2)$ | $O(n)$ | $O(n)$ |
# | convolutional (dilated) | $O(c\, n D^2)$ | $O(1)$ | $O(\log_c n)$ |

# %% [markdown]
# ## Summary
#
# - Attention compares queries with keys, makes shares of the scores, and mixes the values.
# - Undivided random scores spread like $\sqrt{d_k}$: a few queries get huge gradients, many almost none.
# - Masks are True where attention is allowed. An empty row gives zeros, and no gradient.
# - A head learns where to look from right answers alone.
# - Attention's products take $4n^2D$ operations; this code keeps $n^2$ weights per head.
#
# ## What the paper did that we don't
#
# It compares dot products with *additive* attention: exercise 2.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong. `solution`, from `scripts.book.exercises`, shows ours.

# %% [markdown]
# ### Exercise 1 · A window, and one with gaps
# *code · difficulty ●●○ · worth ●●● · 15 minutes*, `solution("window_mask")`
#
# Write a mask in which position $i$ may look at $r$ positions: itself, $i - \text{gap}$, $i - 2\,\text{gap}$, …, as far as they exist.
# Then think: after how many layers with $r = 3$ and gaps $1, 3, 9, \dots$ has position $n - 1$ heard of position 0?


# %%
def window_mask(n: int, r: int, gap: int = 1) -> Tensor:
    """Boolean (1, n, n): position i sees itself, i - gap, …: r positions at most."""
    ...


check(window_mask)

# %% [markdown]
# ### Exercise 2 · Additive attention
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*, `solution("additive_attention")`
#
# Bahdanau's attention scores a pair with a small network instead of a dot product:
#
# $$\text{score}(q, k) = u^\top \tanh(W q + M k), \qquad W\ (a, d_q),\ M\ (a, d_k),\ u\ (a)$$
#
# Write it for query $(T, d_q)$, key $(S, d_k)$, value $(S, d_v)$ and any leading dimensions, the same in all three, with masks as in
# `attention`. Why is it slower than a dot product? What would happen without the tanh?


# %%
def additive_attention(query, key, value, w, m, u, mask=None) -> tuple[Tensor, Tensor]:
    """Output (..., T, d_v) and weights (..., T, S), from scores uᵀ tanh(Wq + Mk)."""
    ...


check(additive_attention)

# %% [markdown]
# ### Exercise 3 · Attention that keeps nothing
# *code · difficulty ●●● · worth ●●● · 45 minutes*, `solution("streaming_attention")`
#
# `blocks` is an iterator over pairs of key (a few rows, $d_k$) and value (as many rows, $d_v$). They come only once, and may not be kept.
# For a query $(T, d_k)$, return the output $(T, d_v)$ that `attention` gives for all of them at once.
#
# A hint: the mix is a sum divided by a sum, and both can grow block by block. What if a score is larger than all before? (This method, due
# to Milakov and Gimelshein, is the core of FlashAttention.)


# %%
def streaming_attention(query: Tensor, blocks: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention's output (T, d_v) from key and value blocks that pass once; memory for one block."""
    ...


check(streaming_attention)

# %% [markdown]
# Next: [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb)
