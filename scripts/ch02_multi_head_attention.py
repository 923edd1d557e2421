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
# After this chapter you can say what several heads give that one doesn't, with a number predicted beforehand, build the layer, and check it against PyTorch's.
#
# | | |
# |---|---|
# | In the paper | §3.2.2 (multi-head attention), §3.2.3 (its three uses), Table 3, rows A, of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 50 with the code; seconds to run on a CPU |
# | Before, after | [Chapter 1 · Attention](ch01_attention.ipynb) · [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb) |
#
# *If you read only three cells:* the maps in "Two questions at once", the drawing in "The layer in one picture", the class in "The layer on one screen".
#
# Shapes: **B** batch, **S** source length (what is looked at), **T** target length (what looks), **D** `d_model`, **H** heads, **V** vocabulary; $d_k = D/H$ is the width of one head.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Callable, Sequence

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.book.charts import panels, titled
from scripts.book.exercises import check, outcome, runs_on
from scripts.book.figures.model import layer_diagram
from scripts.book.instruments import count_flops, held_bytes, influence
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.corpora.reversal import FIRST, VOCAB, to_ids, to_text

torch.set_default_dtype(torch.float64)  # so that checks can ask for agreement to many digits

# %% [markdown]
# ## Two questions at once
#
# > **In short.** Each letter of a word is asked two questions. One head has one softmax, so it hands over one blend of the two answers, and a matrix can't take it apart. Two heads hand the answers over separately.
#
# Part I builds a machine that reverses words of the letters a to j: *decaf* becomes *faced*. Here one of a word's six letters is marked, and every letter must name two: the one at the **mirrored** place, as in reversing, and the **marked** one. In *chafed* with the mark on *a*, the first letter must answer *d* and *a*.
#
# A token's vector has width D = 36: its letter and its place, each a 1 among zeros, and sixteen 1s if it is marked. We train PyTorch's own layer, `nn.MultiheadAttention`, with one head of width 36, two of 18, or three of 12: the parameters are equally many. What the heads say passes one matrix on its way out. As a control, we also put a feed-forward network (two matrices, a ReLU between, chapter 4) behind one head.


# %%
def two_questions(letters: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (B, 6, 36) and answers (B, 6, 2·VOCAB) for letters' ids (B, 6) and marked places (B,)."""
    names, places = torch.eye(VOCAB), torch.eye(6)
    mark = places[marked].unsqueeze(-1).expand(-1, 6, 16)  # (B, 6, 16)
    tokens = torch.cat([names[letters], places.expand(len(letters), 6, 6), mark], dim=-1)
    at_mark = letters.gather(1, marked.unsqueeze(1)).expand(-1, 6)  # (B, 6): one letter, six times
    return tokens, torch.cat([names[letters.flip(1)], names[at_mark]], dim=-1)


# %%
def train_heads(h: int, asked: int = 2, hidden: int = 0, seed: int = 0) -> nn.ModuleList:
    """A layer of h heads and the network behind it (none if `hidden` = 0), asked one question or two."""
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(36, h, batch_first=True)
    network = [nn.Linear(36, hidden), nn.ReLU(), nn.Linear(hidden, 36)] if hidden else []
    parts = nn.ModuleList([layer, behind := nn.Sequential(*network)])
    optimizer = torch.optim.Adam(parts.parameters(), lr=0.01)
    for _ in range(300):
        letters, marked = torch.randint(FIRST, VOCAB, (64, 6)), torch.randint(6, (64,))
        tokens, answers = two_questions(letters, marked)
        output, first = behind(layer(tokens, tokens, tokens)[0]), slice(asked * VOCAB)
        loss = F.mse_loss(output[..., first], answers[..., first])  # other outputs are free
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return parts


# %% [markdown]
# What can a matrix read from one head's blend $w\,a+(1-w)\,b$ of two answers? They are independent letters of equal variance. Its best guess of $a$ misses the share $(1-w)^2/(w^2+(1-w)^2)$ of that variance, its best guess of $b$ the share $w^2/(w^2+(1-w)^2)$. For $w=1$ these are 0 and 1, for $w=0.9$ they are 0.01 and 0.99, for $w=½$ both are ½: the average is always ½.
#
# In one case of six, the marked letter *is* the mirrored one, and the blend is $a$ for any $w$. At $w=½$ the best matrix for the other cases passes the blend on unchanged, and so is exact here, too. No other $w$ gives that: ½ is best. That leaves 5/6·1/2 = 5/12 of the variance.
#
# **Predict.** So one head should miss 0.417. What will it miss if it is asked one question, or with the network behind it? What do two heads miss, and three?

# %%
torch.manual_seed(1)
letters, marked = torch.randint(FIRST, VOCAB, (2_000, 6)), torch.randint(6, (2_000,))
letters[0], marked[0] = torch.tensor(to_ids("chafed")), 2
tokens, answers = two_questions(letters, marked)
missed, maps = {}, {}
print("heads", "asked", "hidden", sep="\t")
for run in ((1, 1, 0), (1, 2, 0), (1, 2, 144), (2, 2, 0), (3, 2, 0)):
    layer, behind = train_heads(*run)
    output, maps[run] = layer(tokens, tokens, tokens, average_attn_weights=False)
    wanted, output = (x[..., : run[1] * VOCAB] for x in (answers, behind(output)))
    missed[run] = (F.mse_loss(output, wanted) / wanted.var((0, 1)).mean()).item()
    named = [to_text(part[0].argmax(-1)) for part in output.split(VOCAB, dim=-1)]
    print(*run, f"{missed[run]:.2f} missed; chafed becomes {named}", sep="\t")
assert abs(missed.pop((1, 2, 0)) - 5 / 12) < 0.03
assert max(missed.values()) < 0.05

# %% [markdown]
# One head answers one question without error. Asked both, it misses 0.42 of the variance, as predicted, and names wrong letters. A network behind it takes the blend apart: letters are 1s among zeros, so 0.75·a + 0.25·b hides nothing, but no matrix can read both from it. (Without its ReLU the network is a matrix again, and misses 0.42.) Two heads hand the answers over separately: a matrix is enough, and nothing need be untangled. A third repeats one of their maps. (With eight seeds one head misses 0.420 to 0.424, with the network 0.007 to 0.016, all others less than 0.002.)

# %%
pair = maps[1, 2, 0][0, 0], *maps[2, 2, 0][0]  # (T, S) each
only, first, second = (m.detach().round(decimals=1) for m in pair)
sharp = {tuple(m.argmax(-1).tolist()) for m in (first, second, *maps[3, 2, 0][0])}
assert sharp == {(5, 4, 3, 2, 1, 0), (2,) * 6}  # at the mirrored place, and at the mark
assert min(first.amax(-1).min(), second.amax(-1).min()) > 0.7
heads = {"the only head": only, "head 0 of two": first, "head 1 of two": second}
word = ["c", "h", "a*", "f", "e", "d"]
titled(
    panels(heads, word, word, digits=1, value_title="weight"),
    "Two heads learn one question each",
    "Weights after training, mark on a (*). The only head blends both places, which for f are one. Of "
    "two heads, one looks at the mirrored letter and one at the mark.",
)

# %% [markdown]
# ## Query, key and value are roles
#
# > **In short.** A library visitor has a question (the query). Each book has a title (the key) and pages (the value). The visitor compares the question with the titles, but takes home the pages. In self-attention every token plays all three parts.
#
# The Transformer makes queries, keys and values from token vectors:
#
# $$Q=X\,W^Q,\qquad K=Y\,W^K,\qquad V=Y\,W^V$$
#
# $X$, (T, D), are the vectors that look, $Y$, (S, D), those that are looked at; in self-attention $Y=X$. $W^Q, W^K, W^V$, (D, D), are learned.
#
# Why not $Q=K=V=X$? Then every score would be mutual, $x_i\cdot x_j=x_j\cdot x_i$, and most tokens would look at themselves, since $x_i\cdot x_i=|x_i|^2$ is large. With two matrices the score is $x_i\,W^Q{W^K}^{\top}x_j^{\top}$, which need not be symmetric.

# %%
torch.manual_seed(2)
x = torch.randn(6, 32)  # (T, D): six random tokens
w_query, w_key = torch.randn(2, 32, 32) / math.sqrt(32)  # (D, D) each
for name, q, k in (("x alone", x, x), ("matrices", x @ w_query, x @ w_key)):
    scores = q @ k.T / math.sqrt(32)  # (T, T)
    own = (scores.argmax(-1) == torch.arange(6)).sum()  # tokens that look at themselves most
    pair = f"{scores[0, 3]:.1f} from 0 to 3, {scores[3, 0]:.1f} from 3 to 0"
    print(f"{name}: score {pair}; {own} of 6 look at themselves")

# %% [markdown]
# ## The layer in one picture
#
# > **In short.** H small attentions run side by side, the *heads*, each with its own matrices. One more matrix mixes what they say.
#
# $$\mathrm{MultiHead}(X,Y)=\mathrm{Concat}(\mathrm{head}_0,\dots,\mathrm{head}_{H-1})\,W^O,
# \qquad \mathrm{head}_i=\mathrm{Attention}(X W^Q_i,\; Y W^K_i,\; Y W^V_i)$$
#
# Each head has its own $W^Q_i, W^K_i, W^V_i$, (D, $d_k$), and gives (T, $d_k$). $W^O$ is (H·$d_k$, D) = (D, D). Side by side, the H matrices $W^Q_i$ are one (D, D) matrix $W^Q$: we project once, and each head gets its own columns.

# %%
titled(
    layer_diagram(heads=4),
    "Whole tokens go in; only their projections are split",
    "One layer of four heads. Each head takes the parts of its own colour. The four grey matrices are learned.",
    wrap=66,
)

# %% [markdown]
# **Pitfall.** "The layer cuts a token into H slices" is often said. It cuts the *projected* vector, and each column of $W^Q$ reads all D features:

# %%
torch.manual_seed(3)
x = torch.randn(6, 32, requires_grad=True)  # (T, D)
w_query, w_key, w_value = torch.randn(3, 32, 8) / math.sqrt(32)  # one head's: (D, d_k) each
head, _ = attention(x @ w_query, x @ w_key, x @ w_value)  # (T, d_k)
sliced, _ = attention(x[:, :8], x[:, :8], x[:, :8])  # what a slice of the token itself would give
read = [(torch.autograd.grad(y.sum(), x)[0] != 0).any(0).sum().item() for y in (head, sliced)]
print(f"a head reads {read[0]} features; if the token itself were sliced, it would read {read[1]}")

# %% [markdown]
# ## Splitting into heads: view, then transpose
#
# > **In short.** A view cuts the last axis in two: (B, T, D) becomes (B, T, H, $d_k$). A transpose moves the heads in front of the tokens: (B, H, T, $d_k$).
#
# Matrix products act on the last two axes, so one call then computes all heads, each over all tokens.
#
# **Your turn.** Write the split and its inverse.


# %% tags=["yours"]
def split_heads(x: Tensor, h: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H): each head gets its own slice of the features."""
    return x.unflatten(-1, (h, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, d_k) to (B, T, H·d_k): the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


# %% [markdown]
# Each entry is its own address: `1212` belongs to sentence 1, token 2, head 1, feature 2. Here is sentence 0.

# %%
address = torch.cartesian_prod(*map(torch.arange, (2, 4, 2, 3)))  # (B·T·H·d_k, 4)
entries = (address @ torch.tensor([1000, 100, 10, 1])).view(2, 4, 6)  # (B, T, D)
names = [f"token {t}" for t in range(4)]
pd.DataFrame(entries[0], index=names).map("{:03d}".format)

# %% [markdown]
# **Predict.** Which numbers will head 1 hold after the split?

# %%
parts = split_heads(entries, h=2)  # (B, H, T, d_k)
assert parts.shape == (2, 2, 4, 3), "heads stand before tokens: (B, H, T, d_k)"
assert parts[0, 1, 0].tolist() == [10, 11, 12], "sentence 0, head 1, token 0"
assert parts[1, 0, 2].tolist() == [1200, 1201, 1202], "sentence 1, head 0, token 2"
assert torch.equal(merge_heads(parts), entries), "joining undoes splitting"
pd.DataFrame(parts[0, 1], index=names).map("{:03d}".format)

# %% [markdown]
# Head 1 holds each token's second half.
#
# **Pitfall.** `x.view(B, H, T, d_k)` alone gives the same shape, and is wrong. A view takes entries in the order of memory. So "head 0" gets *whole tokens*, the first half of the sentence, and "head 1" the second:


# %%
def split_by_bare_view(x: Tensor, h: int) -> Tensor:
    """The wrong split, kept to be looked at: right shape (B, H, T, d_k), tokens and heads mixed up."""
    return x.view(x.size(0), h, x.size(1), -1)


# %%
wrong_parts = split_by_bare_view(entries, h=2)  # (B, H, T, d_k)
pd.DataFrame(wrong_parts[0, 1], index=[f"row {t}" for t in range(4)]).map("{:03d}".format)

# %% [markdown]
# Under a causal mask, an output may depend only on its own and earlier positions. `influence` shows on which it depends:


# %%
def attend_in_heads(x: Tensor, split: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Causal self-attention in two heads without matrices, (1, T, D) to (1, T, D)."""
    parts = split(x, 2)  # (1, H, T, d_k)
    return merge_heads(attention(parts, parts, parts, subsequent_mask(x.size(1)))[0])


# %%
torch.manual_seed(4)
x = torch.randn(1, 4, 6)  # (B, T, D)
right = influence(lambda x: attend_in_heads(x, split_heads), x) > 0  # (T, T)
wrong = influence(lambda x: attend_in_heads(x, split_by_bare_view), x) > 0  # (T, T)
assert torch.equal(right, subsequent_mask(4)[0])
assert wrong.triu(1).any()
print(f"after the wrong split, {int(wrong.triu(1).sum())} of the 6 future places can be seen")
maps = {"split_heads": right, "split_by_bare_view": wrong}
axes = {"row_title": "output of token", "column_title": "input of token"}
titled(
    panels(maps, **axes, words=("depends", "doesn't"), cell=36),
    "A bare view lets the future in",
    "Left: the causal triangle. Right: outputs 0 and 1 are made of tokens 0 and 2, outputs 2 and 3 of all four.",
    wrap=70,
)

# %% [markdown]
# ## The layer on one screen
#
# > **In short.** Project three times, split, attend in every head at once, join, project once more.
#
# `query`, `key`, `value` are the vectors *before* projection, `q`, `k`, `v` come after it. In shapes, "B|1" means B or 1. Dropout sets each weight to 0 with probability $p$ and divides the others by $1-p$, in training only.
#
# **Your turn.** Chapter 1's `attention(query, key, value, mask, dropout)` returns the mixed values and the weights before dropout. Write the layer around it.


# %% tags=["yours"]
class MultiHeadedAttention(nn.Module):
    """h attentions side by side, each on its own projection of the input (§3.2.2).

    One class serves self-attention (query = key = value), cross-attention (key = value = memory,
    the encoder's output) and causal attention (with a causal mask). It holds `h`, four (D, D)
    linear layers with bias, `project_query`, `project_key`, `project_value` and `project_output`,
    and `dropout`, an nn.Dropout for the weights. After a call `attn` holds the weights
    (B, H, T, S), detached and as they were before dropout.

    Raises ValueError if `d_model` is not a multiple of `h`.
    """

    def __init__(self, h: int, d_model: int, dropout: float = 0.1):
        super().__init__()
        if h < 1 or d_model % h:
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
# The reference computes one head at a time. (`nn.Linear` computes $x\,W^{\top}$, so a head's columns are *rows* of `.weight`.) Instead of joining heads, we *add* what each sends through its own part of $W^O$.


# %%
def attention_head_by_head(
    layer: MultiHeadedAttention, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """What `layer` computes, one head at a time: the slow reference. Shapes as `layer`'s."""
    d_k = query.size(-1) // layer.h
    to_q, to_k, to_v = layer.project_query, layer.project_key, layer.project_value
    total = layer.project_output.bias  # (D,)
    for i in range(layer.h):
        own = slice(i * d_k, (i + 1) * d_k)  # the features of head i
        q = F.linear(query, to_q.weight[own], to_q.bias[own])  # (B, T, d_k)
        k = F.linear(key, to_k.weight[own], to_k.bias[own])  # (B, S, d_k)
        v = F.linear(value, to_v.weight[own], to_v.bias[own])  # (B, S, d_k)
        head = F.scaled_dot_product_attention(q, k, v)  # (B, T, d_k)
        total = total + F.linear(head, layer.project_output.weight[:, own])  # (B, T, D)
    return total


# %%
torch.manual_seed(5)
layer = MultiHeadedAttention(h=4, d_model=32, dropout=0.0)
query, key, value = torch.randn(2, 5, 32), torch.randn(2, 7, 32), torch.randn(2, 7, 32)
reference = attention_head_by_head(layer, query, key, value)
torch.testing.assert_close(layer(query, key, value), reference)
assert layer.attn.shape == (2, 4, 5, 7)  # (B, H, T, S)
assert outcome(MultiHeadedAttention, 5, 32) == "ValueError", "5 heads can't share 32 features"

# %% [markdown]
# Dropout acts on the weights, so a query loses a head as a whole: with a single key each weight is 1, and at $p = ½$ becomes 0 or 2. The second test: one mask reaches every head of its sentence.

# %%
torch.manual_seed(5)
dropping = MultiHeadedAttention(h=4, d_model=32, dropout=0.5)  # in training mode
dropping.project_output = nn.Identity()  # to see the heads unmixed
query, key = torch.randn(1, 50, 32), torch.randn(1, 1, 32)
heads = split_heads(dropping(query, key, key), 4)  # (B, H, T, d_k)
factors = heads / split_heads(dropping.project_value(key), 4)
assert set(factors.round().unique().tolist()) == {0, 2}, "dropout belongs to the weights"
torch.testing.assert_close(factors, factors[..., :1].round().expand(1, 4, 50, 8))
assert (dropping.attn == 1).all(), "attn holds the weights before dropout"
assert not dropping.attn.requires_grad, "attn must be detached, or it keeps the graph alive"
dropping.eval()
assert torch.equal(dropping(query, key, key), dropping(query, key, key)), "no dropout in evaluation"

ids = torch.tensor([[5, 6, 0], [5, 0, 0], [5, 6, 7], [5, 6, 0]])  # as many sentences as heads
mask, x = padding_mask(ids), torch.randn(4, 3, 32)  # (B, 1, S), (B, S, D)
layer(x, x, x, mask)
assert torch.equal(layer.attn != 0, mask.unsqueeze(1).expand(4, 4, 3, 3)), "mask every head alike"
torch.testing.assert_close(layer.attn.sum(-1), torch.ones(4, 4, 3))  # mask before the softmax

# %% [markdown]
# ## The same numbers as PyTorch
#
# > **In short.** Give ours and `nn.MultiheadAttention` the same weights, and outputs and gradients must agree. Then what we found with theirs holds for ours.
#
# PyTorch keeps the three projections in one (3·D, D) matrix, `in_proj_weight`.


# %%
def torch_attention_state(layer: MultiHeadedAttention) -> dict[str, Tensor]:
    """The layer's weights under the names of `nn.MultiheadAttention`."""
    three = (layer.project_query, layer.project_key, layer.project_value)
    return {
        "in_proj_weight": torch.cat([part.weight for part in three]),  # (3D, D)
        "in_proj_bias": torch.cat([part.bias for part in three]),  # (3D,)
        "out_proj.weight": layer.project_output.weight,  # (D, D)
        "out_proj.bias": layer.project_output.bias,  # (D,)
    }


# %%
torch.manual_seed(6)
ours = MultiHeadedAttention(h=4, d_model=32, dropout=0.0)
theirs = nn.MultiheadAttention(32, num_heads=4, batch_first=True)
theirs.load_state_dict(torch_attention_state(ours))

query, memory = (torch.randn(2, n, 32, requires_grad=True) for n in (4, 6))  # (B, T|S, D)
mask = padding_mask(torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]]))  # (B, 1, S)
mine = ours(query, memory, memory, mask)
hidden = ~mask[:, 0]  # (B, S)
reference, weights = theirs(query, memory, memory, hidden, average_attn_weights=False)
torch.testing.assert_close(mine, reference)
torch.testing.assert_close(ours.attn, weights)

probe = torch.randn_like(mine)  # a different weight for each entry, so that no gradient hides
grads = [torch.autograd.grad((y * probe).sum(), (query, memory)) for y in (mine, reference)]
torch.testing.assert_close(*grads)

# %% [markdown]
# **Pitfall.** `nn.MultiheadAttention` has three habits. In its boolean masks True means *hidden*, hence the `~`. The weights that it returns are *averaged over the heads*, unless you ask otherwise. Without `batch_first=True` it reads (T, B, D), and mixes sentences.
#
# ## One class, three uses
#
# | use (in chapter 4) | query | key and value | mask | weights |
# |---|---|---|---|---|
# | self-attention (encoder) | source (B, S, D) | source | padding (B, 1, S) | (B, H, S, S) |
# | causal self-attention (decoder) | target (B, T, D) | target | causal (1, T, T), and padding | (B, H, T, T) |
# | cross-attention (decoder) | target (B, T, D) | memory (B, S, D) | padding of the source (B, 1, S) | (B, H, T, S) |
#
# **Predict.** The source has five tokens, the last of them padding; the target has six. How many rows has the output of cross-attention, and how many of a head's weights are exactly zero?

# %%
torch.manual_seed(7)
source, target = torch.randn(1, 5, 32), torch.randn(1, 6, 32)  # (B, S, D), (B, T, D)
output = layer(target, source, source, padding_mask(torch.tensor([[5, 6, 7, 8, 0]])))
print(f"output {tuple(output.shape)}, zeros: {(layer.attn == 0).sum(dim=(0, 2, 3)).tolist()}")

# %% [markdown]
# The output has six rows, as the *query*. The padded token is hidden in each of them: six zeros.
#
# A mask of numbers is *added* to the scores, and may have a head axis: (B|1, H|1, T|1, S). Here a head lowers a score by the distance times its own slope (Press et al. 2021):


# %%
def distance_bias(length: int, slopes: Sequence[float]) -> Tensor:
    """Additive mask (1, H, T, S) that lowers a score by slope times distance, one slope per head."""
    place = torch.arange(length)
    distance = (place[:, None] - place).abs()  # (T, S)
    return -torch.tensor(slopes).view(1, -1, 1, 1) * distance


# %%
same = torch.ones(1, 6, 32)  # six equal tokens: only the bias is left to decide
layer(same, same, same, distance_bias(6, [0.0, 0.25, 1.0, 4.0]))
torch.testing.assert_close(layer.attn, distance_bias(6, [0.0, 0.25, 1.0, 4.0]).softmax(-1))
print("token 0 gives itself, head by head:", [round(w, 2) for w in layer.attn[0, :, 0, 0].tolist()])

# %% [markdown]
# ## Keeping the weights to look at
#
# > **In short.** For pictures the layer keeps its last weights, from before dropout and detached from the graph.
#
# **Pitfall.** If you keep what is multiplied with the values, two things go wrong:


# %%
class KeepsDroppedWeights(MultiHeadedAttention):
    """The wrong way, kept to be measured: `attn` is what dropout put out, with its graph."""

    def forward(self, query, key, value, mask=None):
        """As in `MultiHeadedAttention`, without masks."""
        projected = self.project_query(query), self.project_key(key), self.project_value(value)
        q, k, v = (split_heads(x, self.h) for x in projected)  # (B, H, T|S, d_k)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1)  # (B, H, T, S)
        self.attn = kept = self.dropout(weights)  # the mistake
        return self.project_output(merge_heads(kept @ v))


# %% [markdown]
# **Predict.** We call both layers once and throw the output away. How much memory does each still hold?

# %%
torch.manual_seed(8)
x = torch.randn(4, 64, 128)  # (B, T, D)
for kind in (MultiHeadedAttention, KeepsDroppedWeights):
    layer = kind(h=8, d_model=128, dropout=0.1)
    held = held_bytes(layer, x, x, x) / 2**20  # by the graph, after the output is gone
    right = bool((layer.attn.sum(-1) - 1).abs().max() < 1e-9)
    assert right == (held == 0)
    print(f"{kind.__name__}: its graph holds {held:.0f} MiB; rows sum to 1: {right}")

# %% [markdown]
# Our graph is gone. The other holds 3 MiB for 256 tokens until the next call. And `copy.deepcopy` fails: "Only Tensors created explicitly by the user … support the deepcopy protocol".
#
# ## What several heads cost
#
# > **In short.** Several heads need as many multiplications and parameters as one, for they share the D projected features.
#
# | multiplications | one head of width D | H heads of width D/H |
# |---|---|---|
# | projections | $2TD^2+2SD^2$ | $2TD^2+2SD^2$ |
# | scores $QK^{\top}$ | $TSD$ | $H\cdot TS\cdot D/H=TSD$ |
# | weights times values | $TSD$ | $TSD$ |
#
# Only the attention weights grow, to H·T·S. PyTorch's counter agrees at the paper's D=512:

# %%
T, S, D = 48, 64, 512
query, memory = torch.randn(1, T, D), torch.randn(1, S, D)
for h in (1, 8, 32):
    layer = MultiHeadedAttention(h, D, dropout=0.0)
    products = count_flops(layer, query, memory, memory) // 2  # it counts an addition with each
    assert products == 2 * T * D**2 + 2 * S * D**2 + 2 * T * S * D
    print(f"{h:2} heads: {products:,} multiplications")

# %% [markdown]
# But the more heads, the narrower each is. In the paper's Table 3 one head reaches 24.9 BLEU (a score for translations, chapter 10), 8 or 16 heads 25.8, and 32 heads, of width 16, 25.4.
#
# ## Milestone · Your layer translates
#
# > **In short.** `runs_on` puts your layer into chapter 9's translator.

# %%
runs_on(MultiHeadedAttention)

# %% [markdown]
# **Predict.** And with the bare view?

# %%
runs_on(split_heads=split_by_bare_view)

# %% [markdown]
# No error appears, but little of the German is left.
#
# ## Summary
#
# - One head gives one blend, from which a matrix can't recover two answers; two heads hand over both, with as many multiplications.
# - Every head reads all D features of each token; only the projected vector is split, by view and transpose.
# - One class serves all three uses, and agrees with PyTorch's.
#
# ## What the paper did that we don't
#
# - Our projections have biases, as in `nn.MultiheadAttention`.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Split by slicing
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Write `slice_heads(x, h)`, which does what `split_heads` does, with slices of the last axis and `torch.stack`. Then compare both results' `data_ptr()` with x's: which shares its memory? `solution("slice_heads")` shows ours.


# %%
def slice_heads(x: Tensor, h: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H), head by head."""
    ...


check(slice_heads)

# %% [markdown]
# ### Exercise 2 · What a head can say
#
# *think · difficulty ●●○ · worth ●●○ · 15 minutes*
#
# 1. Let D = H = 512: each head has one feature. Which maps can such a head never learn?
# 2. In "Two questions at once" let the wanted output be the *sum* of the two answers. Does a matrix still need two heads? And for their difference?
#
# <details><summary>An answer</summary>
#
# 1. With $d_k=1$ the score is a product of two numbers, $q_ik_j$. All queries with $q_i>0$ rank the keys in one order, those with $q_i<0$ in the opposite one. "Look at the mirrored place" wants a different key first in every row, and is out of reach. With $d_k=2$ it isn't: think of directions on a circle.
# 2. The sum needs only one: weights of ½ and ½, and a $W^O$ that doubles. The difference needs two, since weights are never negative.
#
# </details>

# %% [markdown]
# ### Exercise 3 · A bias for each distance
#
# *code · difficulty ●●○ · worth ●●● · 20 minutes*
#
# `distance_bias` is a fixed rule. A model can also *learn* which distances it prefers (as T5 does): a table (H, 2R + 1) holds one number for each head and each distance from −R to R. Key j seen from query i has the distance j − i: column R is the query's own place. Farther keys share the outermost number. Write `relative_bias(table, T, S)`, the additive mask of shape (1, H, T, S). Gradients must reach the table. `solution("relative_bias")` shows ours.


# %%
def relative_bias(table: Tensor, T: int, S: int) -> Tensor:
    """Additive mask (1, H, T, S) from a table (H, 2R + 1): one number per head and distance."""
    ...


check(relative_bias)

# %% [markdown]
# ### Exercise 4 · Take out a head
#
# *code · difficulty ●●● · worth ●●● · 30 minutes*
#
# Write `without_head(layer, i)`: a *new* `MultiHeadedAttention` with one head fewer that computes what `layer` would if head i sent nothing. It must leave `layer` as it is. Which rows or columns of which matrices belong to a head? ($d_k$ stays, and a second head can be taken out.) `solution("without_head")` shows ours.


# %%
def without_head(layer: MultiHeadedAttention, i: int) -> MultiHeadedAttention:
    """A new layer without head i: its parts of W^Q, W^K, W^V and of W^O are gone."""
    ...


check(without_head)

# %% [markdown]
# Next: [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb)
