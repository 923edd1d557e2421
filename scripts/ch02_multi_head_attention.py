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
# # Chapter 2 · Multi-head attention
#
# After this chapter you can build the attention layer of the Transformer, say what each of its matrices is for, and prove that yours computes the same numbers and the same gradients as PyTorch's own.
#
# *Attention Is All You Need*, §3.2.2 and §3.2.3. About 30 minutes to read; some seconds to run on a CPU.
#
# Previous: [Chapter 1 · Attention](ch01_attention.ipynb) · Next: [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length (what is looked at), **T** target length (what looks), **D** `d_model`, **H** heads, **V** vocabulary. In this chapter also $d_k = D/H$, the width of one head.

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
import copy
import gc
import math
import weakref
from collections.abc import Callable, Sequence

import altair as alt
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from scripts.book.charts import heatmap, lines, titled
from scripts.book.exercises import blame, rejection, same_numbers
from scripts.ch01_attention import attention, padding_mask, subsequent_mask

# %% [markdown]
# The examples run in double precision, so that a check can ask for agreement to many digits.

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Query, key and value are roles
#
# > **In short.** A library visitor has a question (the query). Each book has a title on its spine (the key) and pages (the value). You compare the question with the spines, but you carry home the pages. In self-attention every word plays all three parts, and a matrix for each part says how.
#
# Chapter 1 took queries, keys and values as given. Where do they come from? In the Transformer all three are made of the same kind of vector, by three learned matrices:
#
# $$ Q = X\,W^Q,\qquad K = Y\,W^K,\qquad V = Y\,W^V $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $X$ | (T, D) | the vectors that look |
# | $Y$ | (S, D) | the vectors that are looked at; in self-attention $Y = X$ |
# | $W^Q, W^K, W^V$ | (D, D) | learned, one for each role |
#
# Could one do without the matrices and let $Q = K = V = X$? Let us see what is lost. The six vectors below are random stand-ins for six words.

# %%
torch.manual_seed(2)
words = ["a", "small", "dog", "chases", "two", "cats"]
x = torch.randn(1, 6, 32)  # (B, T, D)
to_query, to_key = torch.randn(2, 32, 32) / math.sqrt(32)  # (D, D) each
without_roles = attention(x, x, x)[1]  # (B, T, T)
with_roles = attention(x @ to_query, x @ to_key, x)[1]  # (B, T, T)

# %% [markdown]
# **Predict.** Without matrices, which word does each word look at most? And is "dog looks at cats" as strong as "cats looks at dog"?


# %%
def weight_panels(
    weights: dict[str, Tensor],
    rows: Sequence[str] | None,
    columns: Sequence[str] | None,
    *,
    per_line: int = 4,
    cell: int = 34,
    numbers: bool = False,
    value_title: str = "weight",
) -> alt.ConcatChart:
    """Matrices (T, S) side by side, each under its name, all on one colour scale that begins at 0.

    Rows are queries and columns are keys; the row labels stand at the first panel of each line.
    """
    largest = max(matrix.nan_to_num().max().item() for matrix in weights.values())
    panels = [
        heatmap(
            matrix,
            rows if rows is None or i % per_line == 0 else [""] * len(rows),
            columns,
            domain=(0, largest),
            cell=cell,
            numbers=numbers,
            value_title=value_title,
        ).properties(title=name)
        for i, (name, matrix) in enumerate(weights.items())
    ]
    return alt.concat(*panels, columns=per_line)


# %%
titled(
    weight_panels(
        {"Q = K = X": without_roles[0], "Q = X·W^Q, K = X·W^K": with_roles[0]},
        words,
        words,
        numbers=True,
    ),
    "Without roles, every word looks at itself",
    "Who looks (row) at whom (column). Left: the vectors compared with themselves. "
    "Right: compared through two random matrices.",
)

# %% [markdown]
# On the left the diagonal takes nearly everything: nothing is as similar to a vector as that vector. And $x_i\cdot x_j = x_j\cdot x_i$, so interest is always mutual. With two matrices the score is $x_i\,W^Q\,{W^K}^{\top} x_j^{\top}$, which need not be symmetric: an adjective can look for its noun while the noun looks for its verb.
#
# Both claims are facts about the scores, so they can be checked.

# %%
plain_scores = x @ x.transpose(-2, -1)  # (B, T, T)
role_scores = (x @ to_query) @ (x @ to_key).transpose(-2, -1)  # (B, T, T)
torch.testing.assert_close(plain_scores, plain_scores.transpose(-2, -1))
assert (without_roles[0].argmax(-1) == torch.arange(6)).all()
assert (role_scores - role_scores.transpose(-2, -1)).abs().max() > 1
assert not (with_roles[0].argmax(-1) == torch.arange(6)).all()

# %% [markdown]
# ## Why several heads
#
# > **In short.** One head has one softmax, so its answer is one blend. Who asks two questions at once gets the two answers stirred together. Two heads keep them apart.
#
# Take the verb *bites*. It would like to know who bites and who is bitten. Give *dog* the value $(1, 0)$ and *man* the value $(0, 1)$, and let the verb's query fit the words before and after it equally well.
#
# One head must spread its weights over both. Two heads can each look at one.

# %%
values = {"dog": [1.0, 0.0], "bites": [0.0, 0.0], "man": [0.0, 1.0]}
place = 60.0 * torch.eye(3)  # keys of the three places; 60 makes the softmax all but certain
before, after = torch.eye(3)[0:1], torch.eye(3)[2:3]  # queries (1, 3) that fit one place each

answers = []
for sentence in ("dog bites man", "man bites dog"):
    v = torch.tensor([values[word] for word in sentence.split()])  # (S, d_v)
    one_head = attention(before + after, place, v)[0]  # (1, d_v): looks at both places
    two_heads = torch.cat([attention(q, place, v)[0] for q in (before, after)], -1)  # (1, 2·d_v)
    answers.append((one_head, two_heads))
pd.DataFrame(
    [[str(a.round(decimals=2)[0].tolist()) for a in answer] for answer in answers],
    index=["dog bites man", "man bites dog"],
    columns=["one head", "two heads, side by side"],
)

# %%
torch.testing.assert_close(answers[0][0], answers[1][0])  # one head can't tell who bites whom
assert (answers[0][1] - answers[1][1]).abs().max() > 0.99  # two heads can

# %% [markdown]
# The paper puts it so: averaging inhibits what one head alone could express. Its remedy is not to make the layer bigger, but to cut the D features into H slices and to run one small attention on each.
#
# ## Splitting into heads: view, then transpose
#
# > **In short.** A token's D features are H drawers of $d_k$ features. Splitting relabels the drawers; it moves nothing. Then the head axis goes in front of the token axis, so that each head sees all the tokens.
#
# | step | shape |
# |---|---|
# | the input | (B, T, D) |
# | view: cut the last axis | (B, T, H, $d_k$) |
# | transpose: heads in front | (B, H, T, $d_k$) |
#
# Why must the heads come in front? Because matrix products act on the last two axes. `q @ k.transpose(-2, -1)` multiplies (T, $d_k$) with ($d_k$, S) and treats all axes before as batch. A head is one more batch entry.


# %%
def split_heads(x: Tensor, h: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H): each head gets its own slice of the features."""
    return x.unflatten(-1, (h, -1)).transpose(1, 2)


# %%
def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, d_k) to (B, T, H·d_k): the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


# %% [markdown]
# To see where each entry goes, we write its address on it. The entry `213` belongs to token 2, head 1, feature 3. Here are 4 tokens of 6 features, to be split into 2 heads of 3.


# %%
def labelled_entries(tokens: int, heads: int, features: int) -> Tensor:
    """(1, T, H·d_k) of whole numbers whose digits are the address: token, head, feature."""
    token = 100 * torch.arange(tokens).view(-1, 1, 1)
    head = 10 * torch.arange(heads).view(1, -1, 1)
    return (token + head + torch.arange(features)).view(1, tokens, heads * features)


# %%
entries = labelled_entries(tokens=4, heads=2, features=3)  # (1, 4, 6)
pd.DataFrame(entries[0], index=[f"token {t}" for t in range(4)]).map("{:03d}".format)

# %% [markdown]
# **Predict.** Which numbers will head 1 hold after the split?

# %%
pd.DataFrame(split_heads(entries, h=2)[0, 1], index=[f"token {t}" for t in range(4)]).map(
    "{:03d}".format
)

# %% [markdown]
# Head 1 holds every entry whose middle digit is 1, one row for each token. That is the definition, so we check it entry by entry against a loop that does nothing clever.

# %%
parts = split_heads(entries, h=2)  # (1, 2, 4, 3)
for token in range(4):
    for head in range(2):
        for feature in range(3):
            assert parts[0, head, token, feature] == entries[0, token, head * 3 + feature]
assert torch.equal(merge_heads(parts), entries)  # joining undoes splitting
assert parts.data_ptr() == entries.data_ptr()  # the same memory: nothing was copied

# %% [markdown]
# The last line says why this is fast. A tensor is a block of memory plus *strides*: how far to step for the next entry along each axis. View and transpose rewrite the steps and leave the block alone.

# %%
steps = {
    "(B, T, D)": entries,
    "view to (B, T, H, d_k)": entries.view(1, 4, 2, 3),
    "transpose to (B, H, T, d_k)": parts,
}
pd.DataFrame(
    [[str(tuple(t.shape)), str(t.stride())] for t in steps.values()],
    index=list(steps),
    columns=["shape", "strides"],
)

# %% [markdown]
# **Pitfall.** Why two steps? `x.view(B, H, T, d_k)` gives the same shape at once, runs without a word, and is wrong. A view never moves entries: it deals them out in the order in which they lie in memory, and there the tokens come first. So "head 0" gets *whole tokens*, the first half of the sentence, and "head 1" the second half.


# %%
def split_by_bare_view(x: Tensor, h: int) -> Tensor:
    """The wrong split, kept to be looked at: right shape (B, H, T, d_k), tokens and heads mixed up."""
    return x.view(x.size(0), h, x.size(1), -1)


# %%
def merge_without_transpose(x: Tensor) -> Tensor:
    """The wrong join, kept to be looked at: right shape (B, T, H·d_k), heads and tokens mixed up."""
    return x.reshape(x.size(0), x.size(2), -1)


# %%
def split_rows(x: Tensor, h: int) -> pd.DataFrame:
    """Where each entry of the labelled x (1, T, D) goes, for both ways to split: one row an entry."""
    ways = {"view + transpose": split_heads(x, h), "bare view": split_by_bare_view(x, h)}
    return pd.DataFrame(
        [
            (f"{way}: head {head}", row, column, f"{label:03d}", f"token {label // 100}")
            for way, heads in ways.items()
            for head, matrix in enumerate(heads[0].tolist())
            for row, labels in enumerate(matrix)
            for column, label in enumerate(labels)
        ],
        columns=["panel", "row", "feature", "entry", "token"],
    )


# %%
def split_chart(x: Tensor, h: int) -> alt.FacetChart:
    """The entries of each head, coloured by the token they came from, for both ways to split."""
    table = split_rows(x, h)
    axis = {"labelAngle": 0, "ticks": False, "domain": False}
    base = alt.Chart(table).encode(
        x=alt.X("feature:O", title="feature of the head", axis=alt.Axis(**axis)),
        y=alt.Y("row:O", title="row of the head", axis=alt.Axis(**axis)),
    )
    colours = alt.Scale(range=["#9ecae1", "#fdae6b", "#a1d99b", "#d4b9da"])  # light: text on top
    squares = base.mark_rect(stroke="white").encode(
        color=alt.Color("token:N", title="came from", scale=colours)
    )
    labels = base.mark_text().encode(text="entry:N")
    panel = alt.Facet("panel:N", sort=list(table["panel"].unique()), title=None)
    return (
        alt.layer(squares, labels).properties(width=125, height=135).facet(facet=panel, columns=4)
    )


# %%
where = split_rows(entries, h=2).groupby("panel")["token"].nunique()
assert (where.filter(like="transpose") == 4).all()  # right: a head sees all four tokens
assert (where.filter(like="bare") == 2).all()  # wrong: a head sees two of them
titled(
    split_chart(entries, h=2),
    "Same shape, other contents",
    "The two on the left are right: each head has one row of every token. "
    "The two on the right are wrong: a head has only half of the tokens.",
)

# %% [markdown]
# How would you notice in a model? Not by the shapes, and not by a crash. Ask instead *which outputs depend on which inputs*. In self-attention every output must depend on every input, and under a causal mask on its own position and the earlier ones, nothing else.


# %%
def depends_on(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(T, S) boolean: does output t of `f` depend on input s? x is (1, S, D), f(x) is (1, T, D).

    Measured: an entry is True where some derivative of output t by input s is not zero.
    """
    slopes = torch.autograd.functional.jacobian(lambda x: f(x)[0], x)  # (T, D, 1, S, D)
    return slopes.abs().amax(dim=(1, 2, 4)) > 0


# %%
def attend_in_heads(
    x: Tensor,
    h: int,
    split: Callable[[Tensor, int], Tensor],
    merge: Callable[[Tensor], Tensor],
    mask: Tensor | None = None,
) -> Tensor:
    """Self-attention without projections, x (1, T, D) to (1, T, D), with a choice of split and merge."""
    parts = split(x, h)  # (1, H, T, d_k)
    return merge(attention(parts, parts, parts, mask)[0])


# %%
torch.manual_seed(0)
x = torch.randn(1, 4, 6)
causal = subsequent_mask(4)
reach = {
    "right": depends_on(lambda x: attend_in_heads(x, 2, split_heads, merge_heads, causal), x),
    "split by bare view": depends_on(
        lambda x: attend_in_heads(x, 2, split_by_bare_view, merge_heads, causal), x
    ),
    "merge without transpose": depends_on(
        lambda x: attend_in_heads(x, 2, split_heads, merge_without_transpose, causal), x
    ),
    "both wrong": depends_on(
        lambda x: attend_in_heads(x, 2, split_by_bare_view, merge_without_transpose, causal), x
    ),
}
assert torch.equal(reach["right"], causal[0])  # exactly the causal triangle
for wrong in ("split by bare view", "merge without transpose"):
    assert (reach[wrong] & ~causal[0]).any()  # the future leaks in
assert not (reach["both wrong"] & ~causal[0]).any()  # no leak …
assert not reach["both wrong"][2, 0]  # … but token 2 never sees token 0

# %% [markdown]
# **Predict.** All four ran with a causal mask. Which of the pictures is a lower triangle?

# %%
tokens = [f"token {t}" for t in range(4)]
titled(
    alt.concat(
        *[
            heatmap(
                matrix,
                tokens if name == "right" else [""] * 4,
                tokens,
                cell=32,
                words=("depends", "does not"),
            ).properties(title=name)
            for name, matrix in reach.items()
        ]
    ),
    "Who depends on whom, under a causal mask",
    "Does the output (row) depend on the input (column)? Only the first picture is the causal "
    "triangle.",
)

# %% [markdown]
# The last one is the nastiest. Two mistakes cancel as far as the mask is concerned, nothing leaks, the loss goes down, and the sentence has been cut in two: the second half never sees the first.
#
# **Pitfall, a friendly one.** On the way back the transposed tensor no longer lies in memory in order, and `view` refuses it. `reshape` and `flatten` copy where they must. Whoever silences the error by leaving the transpose out has the third picture.

# %%
try:
    parts.transpose(1, 2).transpose(1, 2).view(1, 4, 6)
except RuntimeError as error:
    print("view:", str(error).split(":")[0].split(" (")[0])
assert torch.equal(parts.transpose(1, 2).reshape(1, 4, 6), entries)

# %% [markdown]
# ## The layer
#
# > **In short.** Project three times, split, attend in every head at once, join, project once more.
#
# $$ \mathrm{MultiHead}(X, Y) = \mathrm{Concat}(\mathrm{head}_1, \dots, \mathrm{head}_H)\,W^O,
# \qquad \mathrm{head}_i = \mathrm{Attention}(X W^Q_i,\; Y W^K_i,\; Y W^V_i) $$
#
# | symbol | shape |
# |---|---|
# | $W^Q_i, W^K_i, W^V_i$ | (D, $d_k$), one of each for every head |
# | $\mathrm{head}_i$ | (T, $d_k$) |
# | $W^O$ | (H·$d_k$, D) = (D, D) |
#
# The H matrices $W^Q_i$, set side by side, are one (D, D) matrix. So one `nn.Linear(D, D)` serves all heads, and `split_heads` hands each head its columns.


# %%
class MultiHeadedAttention(nn.Module):
    """h attentions side by side, each on its own projection of the input (§3.2.2).

    One class serves self-attention (query = key = value), cross-attention (key = value = memory)
    and causal attention (with a causal mask). After a call `attn` holds the weights (B, H, T, S),
    detached and as they were before dropout.

    Raises ValueError where `d_model` is not a multiple of `h`.
    """

    def __init__(self, h: int, d_model: int, dropout: float = 0.1):
        super().__init__()
        if d_model % h:
            raise ValueError(f"d_model {d_model} is not a multiple of the number of heads {h}")
        self.h = h
        self.project_query = nn.Linear(d_model, d_model)
        self.project_key = nn.Linear(d_model, d_model)
        self.project_value = nn.Linear(d_model, d_model)
        self.project_output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        self.attn: Tensor | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """query (B, T, D), key and value (B, S, D), mask (B|1, T|1, S) or (B|1, H|1, T|1, S); to (B, T, D)."""
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)  # (B, 1, T, S): the same for every head
        q = split_heads(self.project_query(query), self.h)  # (B, H, T, d_k)
        k = split_heads(self.project_key(key), self.h)  # (B, H, S, d_k)
        v = split_heads(self.project_value(value), self.h)  # (B, H, S, d_k)
        x, weights = attention(q, k, v, mask, self.dropout)  # (B, H, T, d_k), (B, H, T, S)
        self.attn = weights.detach()
        return self.project_output(merge_heads(x))  # (B, T, D)


# %% [markdown]
# The check follows the formula to the letter: one head after the other, each with its own slice of the matrices, and PyTorch's attention in the middle. Instead of joining the heads and multiplying by $W^O$, it *adds* what each head sends through its own rows of $W^O$. That is the same sum written differently, and a good way to think of the layer: the heads' answers are added up.


# %%
def attention_head_by_head(
    layer: MultiHeadedAttention, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """What `layer` computes, one head at a time: the slow reference. Shapes as `layer`'s."""
    d_k = query.size(-1) // layer.h
    total = layer.project_output.bias  # (D,)
    for i in range(layer.h):
        part = slice(i * d_k, (i + 1) * d_k)  # the features of head i
        q, k, v = (
            x @ linear.weight[part].T + linear.bias[part]  # (B, T or S, d_k)
            for x, linear in (
                (query, layer.project_query),
                (key, layer.project_key),
                (value, layer.project_value),
            )
        )
        head = F.scaled_dot_product_attention(q, k, v)  # (B, T, d_k)
        total = total + head @ layer.project_output.weight[:, part].T  # (B, T, D)
    return total


# %%
torch.manual_seed(3)
layer = MultiHeadedAttention(h=4, d_model=32, dropout=0.0)
query, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)  # (B, T, D), (B, S, D)
torch.testing.assert_close(
    layer(query, memory, memory), attention_head_by_head(layer, query, memory, memory)
)
assert layer.attn.shape == (2, 4, 5, 7)  # (B, H, T, S)
torch.testing.assert_close(layer.attn.sum(-1), torch.ones(2, 4, 5))  # each row sums to 1

# %% [markdown]
# D must be a multiple of H, or there is no equal split. The layer says so when it is made, not later in a view.

# %%
try:
    MultiHeadedAttention(h=6, d_model=32)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# ## One class, three uses
#
# > **In short.** Who asks, who answers, and what is hidden: those are the arguments. The layer doesn't change.
#
# | use | query | key and value | mask | where (Chapter 4) |
# |---|---|---|---|---|
# | self-attention | source (B, S, D) | source | padding (B, 1, S) | encoder |
# | causal self-attention | target (B, T, D) | target | causal (1, T, T), and padding | decoder |
# | cross-attention | target (B, T, D) | memory (B, S, D) | padding of the source (B, 1, S) | decoder, looking at the encoder's output |
#
# Here is one untrained layer in all three uses, on a German source of five tokens (the last is padding) and an English target of six.

# %%
torch.manual_seed(4)
source = ["ein", "Hund", "jagt", "Katzen", "<pad>"]
target = ["<s>", "a", "dog", "is", "chasing", "cats"]
src, tgt = torch.randn(1, 5, 32), torch.randn(1, 6, 32)  # (B, S, D), (B, T, D)
src_mask = padding_mask(torch.tensor([[5, 6, 7, 8, 0]]))  # (B, 1, S)
tgt_mask = subsequent_mask(6)  # (1, T, T)
layer = MultiHeadedAttention(h=4, d_model=32, dropout=0.0)

encoded = layer(src, src, src, src_mask)  # (B, S, D)
self_weights = layer.attn  # (B, H, S, S)
decoded = layer(tgt, tgt, tgt, tgt_mask)  # (B, T, D)
causal_weights = layer.attn  # (B, H, T, T)
crossed = layer(tgt, src, src, src_mask)  # (B, T, D)
cross_weights = layer.attn  # (B, H, T, S)

# %% [markdown]
# **Predict.** What is the shape of the weights in cross-attention? Which cells are exactly zero in each of the three?

# %%
assert encoded.shape == (1, 5, 32) and decoded.shape == crossed.shape == (1, 6, 32)
assert cross_weights.shape == (1, 4, 6, 5)  # (B, H, T, S): rows are target, columns are source
assert (self_weights[..., 4] == 0).all() and (cross_weights[..., 4] == 0).all()  # padding
assert (causal_weights.triu(1) == 0).all()  # the future

look = {"domain": (0, 1), "cell": 36, "value_title": "weight"}
titled(
    alt.hconcat(
        heatmap(self_weights[0, 0], source, source, **look).properties(title="self"),
        heatmap(causal_weights[0, 0], target, target, **look).properties(title="causal"),
        heatmap(cross_weights[0, 0], target, source, **look).properties(title="cross"),
    ),
    "One layer, three uses",
    "Head 0, untrained. Rows look, columns are looked at. The padding's column is zero in the "
    "first and the last picture, the future is zero in the second.",
)

# %% [markdown]
# Cross-attention is where two lengths meet: the weights are (T, S), and the output has the length of the *query*. The memory acts as a set. Shuffle its rows, and the mask with them, and nothing changes. (Chapter 3 is about what to do when order matters.)

# %%
order = torch.tensor([3, 0, 4, 2, 1])
torch.testing.assert_close(layer(tgt, src[:, order], src[:, order], src_mask[..., order]), crossed)

# %% [markdown]
# The padded *queries* are left alone, as nobody reads what they find: as keys they are masked everywhere, and the loss of Chapter 6 skips them. What must hold is that real positions don't notice the padding at all. So we cut the padding off and compare.

# %%
torch.testing.assert_close(
    layer(src[:, :4], src[:, :4], src[:, :4]), layer(src, src, src, src_mask)[:, :4]
)

# %% [markdown]
# ## The same numbers as PyTorch
#
# > **In short.** PyTorch ships this layer as `nn.MultiheadAttention`. Give both the same weights, and outputs and gradients must agree to the last few digits.
#
# PyTorch keeps the three projections in one (3·D, D) matrix, `in_proj_weight`: query on top, then key, then value. Copying is a matter of cutting it in three.


# %%
@torch.no_grad()
def load_torch_attention(ours: MultiHeadedAttention, theirs: nn.MultiheadAttention) -> None:
    """Copy the weights of `theirs`, made with the same h and d_model, into `ours`."""
    weights = [*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight]  # four of (D, D)
    biases = [*theirs.in_proj_bias.chunk(3), theirs.out_proj.bias]  # four of (D,)
    linears = (ours.project_query, ours.project_key, ours.project_value, ours.project_output)
    for linear, weight, bias in zip(linears, weights, biases, strict=True):
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)


# %%
def input_gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Gradients by `inputs` of a weighted sum of `output`, whose weights differ for each entry."""
    probe = torch.linspace(-1, 1, output.numel()).view_as(output)
    return list(torch.autograd.grad((output * probe).sum(), inputs, retain_graph=True))


# %% [markdown]
# Six cases: with and without padding and causal masks, T equal to S and not, and an additive mask (more of that soon). Where the mask says what may be seen, PyTorch's layer wants to be told what may *not*, hence the `~`. A wrong answer in any entry, or in any gradient, stops the cell.

# %%
torch.manual_seed(5)
theirs = nn.MultiheadAttention(32, num_heads=4, batch_first=True)
nn.init.normal_(theirs.in_proj_bias)  # they start at 0, where a forgotten bias would not show
nn.init.normal_(theirs.out_proj.bias)
ours = MultiHeadedAttention(h=4, d_model=32, dropout=0.0)
load_torch_attention(ours, theirs)

padding = padding_mask(torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]]))  # (B, 1, S)
causal = subsequent_mask(6)  # (1, T, T)
nudge = torch.randn(1, 4, 6, 6)  # (1, H, T, S), float
cases = {
    "self": (6, None, {}),
    "self, padding": (6, padding, {"key_padding_mask": ~padding[:, 0]}),
    "self, causal": (6, causal, {"attn_mask": ~causal[0]}),
    "self, causal and padding": (
        6,
        causal & padding,
        {"attn_mask": ~causal[0], "key_padding_mask": ~padding[:, 0]},
    ),
    "cross, T = 4, S = 6, padding": (4, padding, {"key_padding_mask": ~padding[:, 0]}),
    "self, additive, one mask a head": (
        6,
        nudge,
        {"attn_mask": nudge.repeat(2, 1, 1, 1).flatten(0, 1)},
    ),
}
for length, mask, their_masks in cases.values():
    query, memory = torch.randn(2, length, 32), torch.randn(2, 6, 32)  # (B, T, D), (B, S, D)
    if length == 6:
        memory = query
    query.requires_grad_(), memory.requires_grad_()
    mine = ours(query, memory, memory, mask)
    reference, their_weights = theirs(
        query, memory, memory, average_attn_weights=False, **their_masks
    )
    torch.testing.assert_close(mine, reference)
    torch.testing.assert_close(ours.attn, their_weights)

    parameters = [*ours.parameters()]
    in_weight, in_bias, out_weight, out_bias = theirs.parameters()
    grads = input_gradients(mine, query, memory, *parameters)
    expected = input_gradients(reference, query, memory, in_weight, in_bias, out_weight, out_bias)
    torch.testing.assert_close(grads[:2], expected[:2])  # by the inputs
    torch.testing.assert_close(torch.cat(grads[2:8:2]), expected[2])  # by W^Q, W^K, W^V
    torch.testing.assert_close(torch.cat(grads[3:8:2]), expected[3])  # by their biases
    torch.testing.assert_close(grads[8:], expected[4:])  # by W^O and its bias
print(f"outputs, weights and gradients agree in {len(cases)} cases:", *cases, sep="\n  ")

# %% [markdown]
# **Pitfall.** Boolean masks mean opposite things in two corners of PyTorch. In `F.scaled_dot_product_attention`, and in this series, True means *may be seen*. In `nn.MultiheadAttention`, `key_padding_mask` and boolean `attn_mask`, True means *hidden*. Both accept the wrong one without a word.
#
# **Predict.** We hand our causal mask to `nn.MultiheadAttention` as it is. What does the first word see? And the last?

# %%
x = torch.randn(1, 6, 32)
_, right = theirs(x, x, x, attn_mask=~causal[0])
_, wrong = theirs(x, x, x, attn_mask=causal[0])

titled(
    weight_panels({"attn_mask=~causal": right[0], "attn_mask=causal": wrong[0]}, words, words),
    "One forgotten ~",
    "Weights of nn.MultiheadAttention. Turned round, the mask shows each word its future only, "
    "and the last word nothing: its row (grey) is NaN.",
)

# %%
ours(x, x, x, causal)
torch.testing.assert_close(right, ours.attn.mean(1))  # averaged over the heads
assert (right.triu(1) == 0).all()
assert (wrong[:, :-1].tril() == 0).all() and (wrong[:, :-1].triu(1).sum(-1) > 0.99).all()
assert wrong[:, -1].isnan().all()

# %% [markdown]
# How to notice: NaN at once if some row is left with nothing. A padding mask turned round gives no NaN; it attends to the padding alone. The dependence test from above finds both.
#
# Two more traps in the same layer: the weights that it returns are *averaged over the heads* unless you ask with `average_attn_weights=False`, and without `batch_first=True` it takes (T, B, D), so that a (B, T, D) batch is silently mixed across sentences.
#
# ## Masks that add
#
# > **In short.** A boolean mask says yes or no. A float mask is added to the scores: −∞ says no, 0 says yes, anything between is a nudge.
#
# $$ \mathrm{softmax}\left(\frac{QK^{\top}}{\sqrt{d_k}} + M\right)V, \qquad M \text{ broadcasts to (B, H, T, S)} $$
#
# Boolean masks are the special case $M \in \{0, -\infty\}$. `MultiHeadedAttention` takes either, of three axes (B|1, T|1, S) for all heads alike, or of four (B|1, H|1, T|1, S) for each head its own.

# %%
torch.manual_seed(6)
x = torch.randn(1, 6, 32)
as_float = torch.zeros(1, 6, 6).masked_fill(~causal, -math.inf)  # (1, T, S)
torch.testing.assert_close(ours(x, x, x, as_float), ours(x, x, x, causal))

# %% [markdown]
# What is a nudge good for? For instance, to prefer neighbours: subtract from each score the distance times a slope, another slope for each head. (Press et al. 2021 build their positions so.) With equal keys, only the nudge is left to decide.


# %%
def distance_bias(length: int, slopes: Sequence[float]) -> Tensor:
    """Additive mask (1, H, T, S) that lowers a score by slope times distance, one slope a head."""
    place = torch.arange(length)
    distance = (place[:, None] - place).abs()  # (T, S)
    return -torch.tensor(slopes).view(1, -1, 1, 1) * distance


# %%
slopes = [0.0, 0.25, 1.0, 4.0]
same = torch.ones(1, 6, 32)
ours(same, same, same, distance_bias(6, slopes))
near = ours.attn[0]  # (H, T, S)
torch.testing.assert_close(near, distance_bias(6, slopes)[0].softmax(-1))
torch.testing.assert_close(near[0], torch.full((6, 6), 1 / 6))  # slope 0: all alike
assert (near[1:, 0].diff(dim=-1) < 0).all()  # the first word: the farther, the less

titled(
    weight_panels(
        {f"slope {s:g}": w for s, w in zip(slopes, near, strict=True)}, words, words, cell=24
    ),
    "The steeper the slope, the closer the look",
    "Weights of four heads whose keys are all equal, each with its own distance penalty.",
)

# %% [markdown]
# **Pitfall.** A causal mask made as `torch.tril(torch.ones(T, T))` looks right when printed: ones where one may look, zeros where not. But it is a *float* mask, so it is added. The past gets a nudge of +1 and the future stays open.

# %%
looks_right = torch.ones(1, 6, 6).tril()  # float, not bool
ours(x, x, x, looks_right)
share_of_future = ours.attn.triu(1).sum(-1)[..., 0].mean().item()
assert share_of_future > 0.3  # word 0 gives its future a good share
ours(x, x, x, looks_right.bool())
assert (ours.attn.triu(1) == 0).all()  # the same ones and zeros as booleans: no leak

# %% [markdown]
# ## Keeping the weights to look at
#
# > **In short.** Everyone wants to see the attention maps, so the layer keeps the last weights. What it keeps should be a note, not a chain: detached from the graph, and as they were before dropout.
#
# During training, dropout sets each weight to 0 with probability $p$ and divides the others by $1-p$. A row that summed to 1 now sums to 1 only on average. For a row $w$ of S weights the sum has the variance
#
# $$ \operatorname{Var}\Big[\sum_s \tilde w_s\Big] = \frac{p}{1-p}\sum_s w_s^2, $$
#
# which for a uniform row is $\frac{p}{(1-p)\,S}$.
#
# **Pitfall.** A layer that keeps the weights *after* dropout, and with their graph, goes wrong twice. Here it is, as a subclass.


# %%
class KeepsDroppedWeights(MultiHeadedAttention):
    """The wrong way, kept to be measured: `attn` is stored after dropout and with its graph."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """As in `MultiHeadedAttention`."""
        dropped: list[Tensor] = []

        def dropout(weights: Tensor) -> Tensor:
            dropped.append(self.dropout(weights))
            return dropped[0]

        q, k, v = (
            split_heads(project(x), self.h)
            for project, x in (
                (self.project_query, query),
                (self.project_key, key),
                (self.project_value, value),
            )
        )
        x, _ = attention(q, k, v, mask, dropout)
        self.attn = dropped[0]
        return self.project_output(merge_heads(x))


# %% [markdown]
# First wrong: the rows. We measure the spread of the row sums over many rows and hold it against the formula. (The layer is fed zeros, so that every true row is uniform.)


# %%
def row_sum_spread(layer: MultiHeadedAttention, length: int, rows: int = 4_000) -> float:
    """Standard deviation of the kept weights' row sums, for uniform rows of `length`, while training."""
    layer.train()
    zeros = torch.zeros(rows // layer.h, length, layer.project_query.in_features)
    layer(zeros[:, :1], zeros, zeros)
    return layer.attn.sum(-1).std().item()


# %%
torch.manual_seed(7)
for p, length in ((0.1, 5), (0.1, 20), (0.3, 10)):
    keeps_dropped = KeepsDroppedWeights(h=4, d_model=8, dropout=p)
    theory = math.sqrt(p / (1 - p) / length)
    assert abs(row_sum_spread(keeps_dropped, length) / theory - 1) < 0.1
    assert row_sum_spread(MultiHeadedAttention(h=4, d_model=8, dropout=p), length) < 1e-12

# %%
lengths = range(2, 51)
spread = pd.DataFrame(
    [
        (s, 1 + sign * math.sqrt(p / (1 - p) / s), f"dropout {p}", sign)
        for p in (0.1, 0.3)
        for s in lengths
        for sign in (-1, 1)
    ],
    columns=["S", "row sum", "dropout", "sign"],
)
titled(
    lines(spread[spread["sign"] > 0], "S", "row sum", "dropout")
    + lines(spread[spread["sign"] < 0], "S", "row sum", "dropout"),
    "A map kept after dropout does not add up",
    "Typical range (one standard deviation on either side) of the sum of a uniform row of S "
    "weights, kept after dropout. Kept before dropout, the sum is 1, always.",
)

# %% [markdown]
# Second wrong: the memory. A tensor with a graph keeps alive all that the backward pass would need. The layer holds it until its next call, even where the output was thrown away long ago. We count the bytes that autograd still keeps after such a call.


# %%
class Saved:
    """A tensor that autograd has put aside for the backward pass."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


# %%
def bytes_held(layer: MultiHeadedAttention, x: Tensor) -> int:
    """Bytes that autograd still holds after `layer(x, x, x)`, though its output was dropped."""
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def put_aside(tensor: Tensor) -> Saved:
        saved = Saved(tensor.detach())  # with its graph it would keep itself alive
        alive.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(put_aside, lambda saved: saved.tensor):
        layer(x, x, x)  # the output is dropped at once
    gc.collect()
    return sum(saved.tensor.nbytes for saved in alive)


# %%
x = torch.randn(4, 32, 64)
one_map = 4 * 8 * 32 * 32 * 8  # B·H·T·S numbers of 8 bytes
assert bytes_held(MultiHeadedAttention(h=8, d_model=64), x) == 0
assert bytes_held(KeepsDroppedWeights(h=8, d_model=64), x) > one_map

# %% [markdown]
# Ours holds the map itself, which was the point, and nothing else. The other also holds the inputs, the projected queries and keys, the weights and the dropout mask. And since a tensor in the middle of a graph can't be copied, `copy.deepcopy` of a model that has run once fails with it (Chapter 4 copies layers, Chapter 10 averages them).

# %%
for kind, works in ((MultiHeadedAttention, True), (KeepsDroppedWeights, False)):
    layer = kind(h=8, d_model=64)
    layer(x, x, x)
    assert layer.attn.requires_grad is not works
    try:
        copy.deepcopy(layer)
        copied = True
    except RuntimeError:
        copied = False
    assert copied is works

# %% [markdown]
# ## What several heads cost
#
# > **In short.** The same as one. The heads share out D features among them; they don't get D each.
#
# Count the multiplications for one sentence, T queries and S keys:
#
# | part | one head of width D | H heads of width D/H |
# |---|---|---|
# | projections of Q and of the output | $2\,T D^2$ | $2\,T D^2$ |
# | projections of K and V | $2\,S D^2$ | $2\,S D^2$ |
# | scores $QK^{\top}$ | $T S D$ | $H \cdot T S \cdot D/H = T S D$ |
# | weights times values | $T S D$ | $T S D$ |
# | parameters | $4(D^2 + D)$ | $4(D^2 + D)$ |
#
# One thing does grow: each head has a map of its own, so there are H·T·S weights to store.
#
# **Predict.** How many parameters has the layer of the paper's base model, D = 512? Does it matter that H = 8?


# %%
def attention_multiplications(T: int, S: int, D: int) -> int:
    """Multiplications of one `MultiHeadedAttention` call for one sentence, as the table counts them."""
    return 2 * T * D**2 + 2 * S * D**2 + 2 * T * S * D


# %%
def counted_multiplications(layer: nn.Module, query: Tensor, memory: Tensor) -> int:
    """The same, counted by PyTorch while `layer` runs; it counts an addition with each."""
    with FlopCounterMode(display=False) as counter:
        layer(query, memory, memory)
    return counter.get_total_flops() // 2


# %%
query, memory = torch.randn(1, 48, 512), torch.randn(1, 64, 512)  # (1, T, D), (1, S, D)
costs = []
for h in (1, 2, 4, 8, 16, 32):
    layer = MultiHeadedAttention(h, d_model=512, dropout=0.0)
    counted = counted_multiplications(layer, query, memory)
    parameters = sum(p.numel() for p in layer.parameters())
    assert counted == attention_multiplications(T=48, S=64, D=512)
    assert parameters == 4 * (512**2 + 512)
    costs.append((h, f"{512 // h}", f"{parameters:,}", f"{counted:,}", f"{layer.attn.numel():,}"))
pd.DataFrame(
    costs, columns=["heads", "d_k", "parameters", "multiplications", "weights kept"]
).set_index("heads")

# %% [markdown]
# So more heads are free, but not without limit: each gets narrower. In the paper's Table 3 (row A) one head reaches 24.9 BLEU on the development set, 4 heads 25.5, 8 and 16 heads 25.8, and 32 heads, of width 16 each, 25.4.
#
# ## Eight heads before training
#
# > **In short.** A fresh layer looks at everything a little. Its heads differ only by the chance of their first weights.
#
# How flat should the maps be? PyTorch draws the weights of `nn.Linear` uniformly from $\pm 1/\sqrt{D}$, that is with variance $1/(3D)$. Inputs of variance 1 then give queries and keys of variance about $1/3$, and scores of variance $1/9$: a typical score is ±⅓, and a typical weight lies within a factor $e^{1/3} \approx 1.4$ of $1/S$.
#
# **Predict.** Will the eight heads of one layer look alike?

# %%
torch.manual_seed(8)
eight_words = ["two", "young", "dogs", "play", "with", "a", "red", "ball"]
layer = MultiHeadedAttention(h=8, d_model=512, dropout=0.0)
x = torch.randn(1, 8, 512)
layer(x, x, x)
heads = layer.attn[0]  # (H, T, S)

q, k = split_heads(layer.project_query(x), 8), split_heads(layer.project_key(x), 8)
score_spread = (q @ k.transpose(-2, -1) / math.sqrt(64)).std().item()
assert abs(score_spread - 1 / 3) < 0.05
typical = (heads > math.exp(-1 / 3) / 8) & (heads < math.exp(1 / 3) / 8)  # (H, T, S)
assert typical.double().mean() > 0.65

titled(
    weight_panels({f"head {i}": w for i, w in enumerate(heads)}, eight_words, eight_words, cell=18),
    "Eight heads that have learned nothing yet",
    "Attention weights of an untrained layer. Most lie between 0.09 and 0.17, about "
    "an eighth, and no two heads agree.",
)

# %% [markdown]
# To say "no two heads agree" with a number: correlate the maps of each pair of heads, after taking 1/8 off every weight. And to say "near uniform" with one: the entropy of a row, divided by the greatest possible, $\ln S$.

# %%
pairs = torch.corrcoef(heads.flatten(1))  # (H, H)
off_diagonal = pairs[~torch.eye(8, dtype=torch.bool)]
entropy = -(heads * heads.log()).sum(-1) / math.log(8)  # (H, T), 1 is uniform
assert off_diagonal.abs().max() < 0.5
assert entropy.min() > 0.9 and entropy.max() < 1
print(f"mean entropy {entropy.mean():.2f} of 1, mean correlation {off_diagonal.mean():.2f}")

# %% [markdown]
# That is worth remembering when you look at maps of *trained* models in later chapters: what is more pointed than this, or more alike than this, was learned.
#
# ## Summary
#
# - Query, key and value are three roles of a vector, each with its own matrix. Without the matrices every word would look at itself, and interest would be mutual.
# - One head gives one blend. Several heads ask several questions at once, for the same number of parameters and multiplications.
# - Splitting is `view` to (B, T, H, $d_k$) and then `transpose` to (B, H, T, $d_k$). A bare view has the right shape and the wrong contents.
# - One class is self-attention, causal attention and cross-attention: only its arguments differ. The output has the query's length, the weights are (B, H, T, S).
# - Boolean masks here mean *may be seen*, as in `F.scaled_dot_product_attention`; `nn.MultiheadAttention` means the opposite. Float masks are added.
# - Kept weights are detached and from before dropout, so that their rows sum to 1 and they hold no memory but their own.
# - With copied weights the layer agrees with PyTorch's in outputs, weights and gradients.
#
# ## What the paper did that we don't
#
# - The paper's formulas have no bias terms in the projections. We keep them, as `nn.MultiheadAttention` does: 2,048 parameters out of a million in the base layer.
# - The paper lets keys and values have different widths $d_k$ and $d_v$. In all its models but those of Table 3's row B both are D/H, as here.
#
# ## Exercises
#
# Six, from a warm-up to a project. [Chapter 1](ch01_attention.ipynb) says how the checkers work: they are silent when your function is right, and otherwise say what is wrong.
#
# ### Exercise 1 *warm-up* · Split by slicing
#
# Write `slice_heads(x, h)`, which does what `split_heads` does, for x of shape (B, T, D), but with slices of the last axis and `torch.stack`. Then compare the strides, and `data_ptr()`, of both results. Which of them shares memory with `x`?


# %%
def check_slice_heads(candidate: Callable[[Tensor, int], Tensor]) -> None:
    """Asks candidate(x, h) for labelled entries, whose digits say where each one must be."""
    for tokens, h, d_k in ((4, 2, 3), (4, 4, 4), (3, 1, 5)):
        one = labelled_entries(tokens, h, d_k)  # (1, T, D)
        x = torch.cat((one, 1_000 + one))  # (B, T, D)
        right = split_heads(x, h)  # (B, H, T, d_k)
        mistakes = {
            "heads hold whole tokens: the entries were dealt out in memory order": x.view_as(right),
            "a head takes every H-th feature; its slice should be consecutive": x.unflatten(
                -1, (-1, h)
            ).movedim(-1, 1),
            "the tokens stand before the heads: each would attend alone": x.unflatten(-1, (h, -1)),
        }
        got = candidate(x, h)
        if not same_numbers(got, right):
            blame(got, mistakes, "not (B, H, T, d_k) with features h·d_k to (h + 1)·d_k in head h")


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_slice_heads(x: Tensor, h: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H), head by head."""
    d_k = x.size(-1) // h
    return torch.stack([x[..., i * d_k : (i + 1) * d_k] for i in range(h)], dim=1)


check_slice_heads(solution_slice_heads)
views, copies = split_heads(entries, 2), solution_slice_heads(entries, 2)
assert views.data_ptr() == entries.data_ptr() and views.stride() == (24, 3, 6, 1)
assert copies.data_ptr() != entries.data_ptr() and copies.stride() == (24, 12, 3, 1)

# %% [markdown]
# `split_heads` shares memory: its steps jump over the other heads' features. `stack` copies, and each head then lies in one piece. The chapter's pitfall is the first thing that the checker looks for; another one cuts the features into strips the wrong way round.

# %%
print(rejection(check_slice_heads, split_by_bare_view))
print(rejection(check_slice_heads, lambda x, h: x.unflatten(-1, (-1, h)).movedim(-1, 1)))

# %% [markdown]
# ### Exercise 2 *think* · A mask with two axes
#
# Pass `subsequent_mask(6)[0]`, a mask of shape (T, T), to the layer. Why does it work? For which B, T and S would a *padding* mask of shape (B, S) run and be wrong?
#
# <details><summary>An answer</summary>
#
# Broadcasting lines shapes up from the right: (T, T) meets the scores (B, H, T, S) on their last two axes, and that is what it means. A padding mask (B, S) is read in the same way, as (T, S). With B = 1 it is right by luck. With B = T it runs, and the mask of *sentence* b is applied to *query* b of every sentence. With any other B it raises. So a test with a batch of one, or with as many sentences as tokens, finds nothing; choose sizes that all differ.
#
# </details>

# %% [markdown]
# ### Exercise 3 *code* · A bias for each distance
#
# `distance_bias` prefers neighbours by a fixed rule. A model could also *learn* what it prefers (Shaw et al. 2018; T5): a table of shape (H, 2R + 1) holds one number for each head and each signed distance from −R to R. Key j seen from query i has the distance j − i: column 0 of the table is for keys R places to the left, column R for the query's own place. All that is further away shares the outermost number. Write `relative_bias(table, T, S)`, the additive mask of shape (1, H, T, S). Gradients must reach the table.


# %%
def check_relative_bias(candidate: Callable[[Tensor, int, int], Tensor]) -> None:
    """Holds the mask candidate(table, T, S) against a lookup, place by place; then asks for gradients."""
    for h, reach, T, S in ((2, 2, 4, 4), (3, 2, 6, 9), (1, 3, 3, 2)):
        table = torch.arange(h * (2 * reach + 1)).view(h, -1) / 10.0  # (H, 2R + 1)
        table = table.double().requires_grad_()
        bias = candidate(table, T, S)
        assert bias.shape == (1, h, T, S), "the shape is (1, H, T, S): alike for all sentences"
        apart = torch.arange(S) - torch.arange(T).unsqueeze(1)  # (T, S), j − i
        inside = apart.clamp(-reach, reach)
        mistakes = {
            "left and right are swapped: a key's distance is its place minus the query's": reach
            - inside,
            "left and right get the same number: the distance has a sign": reach + inside.abs(),
            "far keys take numbers from the table's other end: bound the distance": (apart + reach)
            % (2 * reach + 1),
        }
        mistakes = {said: table[:, columns].unsqueeze(0) for said, columns in mistakes.items()}
        if not same_numbers(bias, table[:, reach + inside].unsqueeze(0)):
            blame(bias, mistakes, "a number of the table stands at the wrong distance")
        assert bias.requires_grad, "the table gets no gradient, so nothing would be learned"


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_relative_bias(table: Tensor, T: int, S: int) -> Tensor:
    """Additive mask (1, H, T, S) from a table (H, 2R + 1) of one number a head and signed distance."""
    reach = table.size(1) // 2
    distance = torch.arange(S) - torch.arange(T).unsqueeze(1)  # (T, S)
    return table[:, distance.clamp(-reach, reach) + reach].unsqueeze(0)  # (1, H, T, S)


check_relative_bias(solution_relative_bias)
fall = -torch.arange(-5, 6).abs() * torch.tensor(slopes).unsqueeze(1)  # (H, 11)
torch.testing.assert_close(solution_relative_bias(fall, 6, 6), distance_bias(6, slopes))

# %% [markdown]
# The last line: `distance_bias` is one of the tables that could be learned. Two wrong ones. In Python a negative index counts from the end, so the second raises nothing.

# %%
print(
    rejection(
        check_relative_bias,
        lambda table, T, S: solution_relative_bias(table.flip(1), T, S),
    )
)
print(
    rejection(
        check_relative_bias,
        lambda table, T, S: table[
            :, (torch.arange(S) - torch.arange(T).unsqueeze(1) + table.size(1) // 2) % table.size(1)
        ].unsqueeze(0),
    )
)

# %% [markdown]
# ### Exercise 4 *think* · What the matrices can say
#
# 1. Give `project_query` and `project_key` the same weights and biases. Which matrix becomes symmetric in self-attention, the scores or the weights?
# 2. Let D = 512 and H = 512. Each head has one feature. What can a head with $d_k = 1$ express as a map?
#
# <details><summary>An answer</summary>
#
# The scores: $q_i \cdot k_j = q_j \cdot k_i$ when both projections are one. The weights aren't, as each row is divided by its own sum.
#
# With $d_k = 1$ the score is a product of two numbers, $s_{ij} = q_i k_j$: a matrix of rank 1. All queries with $q_i > 0$ rank the keys in the same order, those with $q_i < 0$ in the opposite one; $|q_i|$ only says how sharply. "Look at your left neighbour" asks for another key first in every row, and is out of reach. With rank 2 it isn't: think of directions on a circle.
#
# </details>

# %% [markdown]
# ### Exercise 5 *code* · Take out a head
#
# Write `without_head(layer, i)`: a *new* `MultiHeadedAttention` with one head less that computes what `layer` would if head i sent nothing. It must be smaller, not merely silent, and must leave `layer` as it is. Which rows or columns of which matrices belong to a head?


# %%
def silenced(layer: MultiHeadedAttention, i: int) -> MultiHeadedAttention:
    """A copy of `layer` of the same size, in which W^O doesn't listen to head i."""
    layer = copy.deepcopy(layer)
    d_k = layer.project_query.out_features // layer.h
    with torch.no_grad():
        layer.project_output.weight[:, i * d_k : (i + 1) * d_k] = 0
    return layer


def check_without_head(
    candidate: Callable[[MultiHeadedAttention, int], MultiHeadedAttention],
) -> None:
    """Takes each head out of a layer of four and compares with the layer in which it is silenced."""
    torch.manual_seed(0)
    layer = MultiHeadedAttention(h=4, d_model=12, dropout=0.0).double()
    before = copy.deepcopy(layer.state_dict())
    query, memory = torch.randn(2, 5, 12).double(), torch.randn(2, 7, 12).double()
    wanted = [silenced(layer, i)(query, memory, memory) for i in range(4)]
    for i in range(4):
        smaller = candidate(layer, i)
        kept = all(torch.equal(now, before[name]) for name, now in layer.state_dict().items())
        assert kept and smaller is not layer, "the layer itself was changed: work on a copy"
        assert smaller.h == 3, "it still splits into four heads: tell it that there are three"
        sizes = [sum(p.numel() for p in one.parameters()) for one in (layer, smaller)]
        assert sizes[0] - sizes[1] == 3 * (12 + 1) * 3 + 12 * 3, (
            "a head owns d_k rows of three matrices, their biases, and d_k columns of W^O; no more, no less"
        )
        mistakes = {
            f"another head is gone: not {i}, but {j}": wanted[j] for j in range(4) if j != i
        }
        got = smaller(query, memory, memory)
        if not same_numbers(got, wanted[i]):
            blame(
                got,
                mistakes,
                "the other heads answer otherwise than before: what they own must stay",
            )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
@torch.no_grad()
def solution_without_head(layer: MultiHeadedAttention, i: int) -> MultiHeadedAttention:
    """A new layer without head i: its rows of W^Q, W^K, W^V and its columns of W^O are gone."""
    layer = copy.deepcopy(layer)
    width = layer.project_query.out_features  # H·d_k
    kept = torch.arange(width).view(layer.h, -1)[torch.arange(layer.h) != i].flatten()
    for linear in (layer.project_query, layer.project_key, layer.project_value):
        linear.weight = nn.Parameter(linear.weight[kept].clone())
        linear.bias = nn.Parameter(linear.bias[kept].clone())
        linear.out_features = len(kept)
    out = layer.project_output
    out.weight, out.in_features = nn.Parameter(out.weight[:, kept].clone()), len(kept)
    layer.h -= 1
    return layer


check_without_head(solution_without_head)

# %% [markdown]
# `split_heads` doesn't ask how wide a head is, and `attention` divides by the root of what it gets: $d_k$ stays 3, and nothing else has to change. Two wrong candidates: one is silent but not smaller, one counts the heads from the other end.

# %%
print(rejection(check_without_head, silenced))
print(rejection(check_without_head, lambda layer, i: solution_without_head(layer, 3 - i)))

# %% [markdown]
# ### Exercise 6 *project* · Many queries, one key
#
# Multi-query attention (Shazeer 2019) keeps H query heads but makes only one key and one value, which all heads share. Write `multi_query(x, memory, w_query, w_key, w_value, w_output, h, mask=None)` for x (B, T, D), memory (B, S, D), `w_query` and `w_output` (D, D), `w_key` and `w_value` (D, $d_k$), used as `x @ w_query`, without biases. It returns (B, T, D), and takes masks (B|1, T|1, S) as our layer does. Copy no key: broadcasting can share it. Which of the counts in the cost table shrink? (Chapter 14 comes back to it.)
#
# The checker's reference is our own layer. What must its matrices look like to be a multi-query layer?


# %%
def multi_query_layer(
    w_query: Tensor, w_key: Tensor, w_value: Tensor, w_output: Tensor, h: int
) -> MultiHeadedAttention:
    """The multi-head layer whose heads all have the same key and value matrices, (D, d_k) each."""
    layer = MultiHeadedAttention(h, len(w_query), dropout=0.0).to(w_query.dtype)
    shared = (w_query.T, w_key.T.repeat(h, 1), w_value.T.repeat(h, 1), w_output.T)  # (D, D) each
    names = ("project_query", "project_key", "project_value", "project_output")
    for name, weight in zip(names, shared, strict=True):
        nn.init.zeros_(getattr(layer, name).bias)
        getattr(layer, name).weight = nn.Parameter(weight, requires_grad=False)
    return layer


def check_multi_query(candidate: Callable[..., Tensor]) -> None:
    """Compares with the multi-head layer that repeats one key and value matrix; with masks and without."""
    torch.manual_seed(0)
    x, memory = torch.randn(2, 5, 8).double(), torch.randn(2, 7, 8).double()  # (B, T, D), (B, S, D)
    matrices = [torch.randn(8, width).double() for width in (8, 4, 4, 8)]  # H = 2, d_k = 4
    w_query, *others = matrices
    got = candidate(x, memory, *matrices, 2)
    assert got.shape == x.shape, "the output has the shape of the query, (B, T, D)"
    alone = candidate(x[:, :1], memory, *matrices, 2)
    assert same_numbers(got[:, :1], alone), (
        "a query's answer depends on its neighbours: a split or join mixes up tokens and heads"
    )
    named = {
        "the scores aren't divided by √d_k": multi_query_layer(2 * w_query, *others, 2),
        "divided by √D, but a head's dot product has only d_k terms": multi_query_layer(
            w_query / math.sqrt(2), *others, 2
        ),
        "key and value are swapped": multi_query_layer(*[matrices[i] for i in (0, 2, 1, 3)], 2),
    }
    right = multi_query_layer(*matrices, 2)
    mistakes = {said: layer(x, memory, memory) for said, layer in named.items()}
    if not same_numbers(got, right(x, memory, memory)):
        blame(
            got,
            mistakes,
            "other numbers than a multi-head layer whose key and value heads are all one",
        )
    mask = torch.arange(7).expand(2, 1, 7) < torch.tensor([7, 4]).view(2, 1, 1)  # (B, 1, S)
    by_head = right(x, memory, memory, mask.unsqueeze(0))
    mistakes = {
        "sentence b's mask went to head b: a mask (B, T, S) needs an axis for the heads": by_head
    }
    got = candidate(x, memory, *matrices, 2, mask)
    if not same_numbers(got, right(x, memory, memory, mask)):
        blame(got, mistakes, "right without a mask, wrong with one")


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_multi_query(
    x: Tensor,
    memory: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    w_output: Tensor,
    h: int,
    mask: Tensor | None = None,
) -> Tensor:
    """H query heads over x (B, T, D), one key and value head over memory (B, S, D); to (B, T, D)."""
    query = split_heads(x @ w_query, h)  # (B, H, T, d_k)
    key = (memory @ w_key).unsqueeze(1)  # (B, 1, S, d_k), shared by broadcasting
    value = (memory @ w_value).unsqueeze(1)  # (B, 1, S, d_k)
    mask = mask if mask is None else mask.unsqueeze(1)  # (B, 1, T, S)
    return merge_heads(attention(query, key, value, mask)[0]) @ w_output


check_multi_query(solution_multi_query)

# %% [markdown]
# The parameters shrink from $4D^2$ to $2D^2 + 2D\,d_k$, and so do the projections of K and V. The scores don't: each head still has a map of its own. What shrinks most is what a decoder must *keep* while it writes, one key and one value of width $d_k$ a token instead of H. That is what it was invented for. Now a split by a bare view, a division by $\sqrt D$, and a mask that lacks the axis for the heads:


# %%
def multi_query_variant(
    split: Callable[[Tensor, int], Tensor] = split_heads, stretch: float = 1.0
) -> Callable[..., Tensor]:
    """Multi-query attention with another split or scale, and a mask that is passed on as it comes."""

    def attend(x, memory, w_query, w_key, w_value, w_output, h, mask=None):
        query = split(x @ w_query, h) * stretch  # (B, H, T, d_k)
        key, value = (memory @ w_key).unsqueeze(1), (memory @ w_value).unsqueeze(1)
        return merge_heads(attention(query, key, value, mask)[0]) @ w_output

    return attend


# %%
print(rejection(check_multi_query, multi_query_variant(split=split_by_bare_view)))
print(rejection(check_multi_query, multi_query_variant(stretch=math.sqrt(4 / 8))))
print(rejection(check_multi_query, multi_query_variant()))

# %% [markdown]
# Next: [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb)
