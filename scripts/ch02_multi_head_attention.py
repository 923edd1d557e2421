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
# After this chapter you can build the Transformer's attention layer, say what each of its matrices is for and why it has several heads, and prove that it computes the same numbers and gradients as PyTorch's.
#
# | | |
# |---|---|
# | In the paper | §3.2.2 (multi-head attention), §3.2.3 (its three uses), Table 3, rows A, of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 50 with the code; some seconds to run on a CPU |
# | Before, after | [Chapter 1 · Attention](ch01_attention.ipynb) · [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb) |
#
# *If you read only three cells:* the drawing in "The layer in one picture", the class in "The layer on one screen", the maps in "Two questions at once".
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
from scripts.book.exercises import check
from scripts.book.figures.model import layer_diagram
from scripts.book.instruments import count_flops, influence
from scripts.ch01_attention import attention, padding_mask, subsequent_mask

torch.set_default_dtype(torch.float64)  # so that checks can ask for agreement to many digits

# %% [markdown]
# ## Query, key and value are roles
#
# > **In short.** A library visitor has a question (the query). Each book has a title on its spine (the key) and pages (the value). You compare the question with the titles, but you take home the pages. In self-attention every token plays all three parts.
#
# The Transformer makes queries, keys and values from token vectors:
#
# $$ Q = X\,W^Q,\qquad K = Y\,W^K,\qquad V = Y\,W^V $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $X$ | (T, D) | the vectors that look |
# | $Y$ | (S, D) | the vectors that are looked at; in self-attention $Y = X$ |
# | $W^Q, W^K, W^V$ | (D, D) | learned, one for each role |
#
# Why not $Q = K = V = X$? Then the score of token $i$ for token $j$ would be $x_i\cdot x_j = x_j\cdot x_i$: interest would always be mutual. And most tokens would look mainly at themselves, since $x_i\cdot x_i = |x_i|^2$ is usually large. With two matrices the score is $x_i\,W^Q {W^K}^{\top} x_j^{\top}$, which need not be symmetric.

# %%
torch.manual_seed(2)
x = torch.randn(6, 32)  # (T, D): six random tokens
w_query, w_key = torch.randn(2, 32, 32) / math.sqrt(32)  # (D, D) each
plain = x @ x.T  # (T, T)
roles = (x @ w_query) @ (x @ w_key).T  # (T, T)
torch.testing.assert_close(plain, plain.T)
assert (roles - roles.T).abs().max() > 1
for name, scores in {"without matrices": plain, "with matrices": roles}.items():
    print(f"{name}: 0 looks at 3 with score {scores[0, 3]:.1f}, 3 at 0 with {scores[3, 0]:.1f}")

# %% [markdown]
# ## The layer in one picture
#
# > **In short.** One head has one softmax, so each token gets one weighted average. Several heads ask several questions at once and get separate answers.
#
# The paper therefore runs H small attentions side by side, the *heads*, each with its own matrices:
#
# $$ \mathrm{MultiHead}(X, Y) = \mathrm{Concat}(\mathrm{head}_0, \dots, \mathrm{head}_{H-1})\,W^O,
# \qquad \mathrm{head}_i = \mathrm{Attention}(X W^Q_i,\; Y W^K_i,\; Y W^V_i) $$
#
# | symbol | shape |
# |---|---|
# | $W^Q_i, W^K_i, W^V_i$ | (D, $d_k$), one of each for every head |
# | $\mathrm{head}_i$ | (T, $d_k$) |
# | $W^O$ | (H·$d_k$, D) = (D, D) |
#
# Side by side, the H matrices $W^Q_i$ are one (D, D) matrix $W^Q$. So we project once for all heads, and give each head its own columns of the result.

# %%
titled(
    layer_diagram(heads=4),
    "Whole tokens go in; only their projections are split",
    "One layer of four heads. Each head takes the parts of its own colour. The four grey matrices are learned.",
    wrap=66,
)

# %% [markdown]
# ## Every head reads the whole token
#
# > **In short.** Each head gets all D features of a token, and a matrix that turns them into $d_k$ new ones.
#
# The layer is often said to cut a token into H slices, but it cuts the *projected* vector. Head 0 owns the first $d_k$ columns of $W^Q$, and each column has D numbers, one for each feature of the token.


# %%
def features_read(head: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How many features of x (1, T, D) can change the output (1, T, d_k) of `head`."""
    slopes = torch.autograd.functional.jacobian(head, x)  # (1, T, d_k, 1, T, D)
    return int((slopes != 0).flatten(end_dim=-2).any(dim=0).sum())


# %%
torch.manual_seed(3)
x = torch.randn(1, 6, 32)  # (B, T, D)
w_query, w_key, w_value = torch.randn(3, 32, 8) / math.sqrt(32)  # one head's: (D, d_k) each
real = features_read(lambda x: attention(x @ w_query, x @ w_key, x @ w_value)[0], x)
sliced = features_read(lambda x: attention(x[..., :8], x[..., :8], x[..., :8])[0], x)
assert (real, sliced) == (32, 8)
print(f"a head reads {real} features; if the token itself were sliced, it would read {sliced}")

# %% [markdown]
# ## Splitting into heads: view, then transpose
#
# > **In short.** A view cuts the last axis in two: (B, T, D) becomes (B, T, H, $d_k$). A transpose moves the heads in front of the tokens: (B, H, T, $d_k$). So each head sees all the tokens.
#
# Why in front? Matrix products act on the last two axes and treat all earlier axes as batch. So one call computes all heads.


# %%
def split_heads(x: Tensor, h: int) -> Tensor:
    """(B, T, D) to (B, H, T, D/H): each head gets its own slice of the features."""
    return x.unflatten(-1, (h, -1)).transpose(1, 2)


# %%
def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, d_k) to (B, T, H·d_k): the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


# %% [markdown]
# To see where each entry goes, we write its address on it: `212` belongs to token 2, head 1, feature 2.

# %%
token, head, feature = torch.arange(4), torch.arange(2), torch.arange(3)
entries = 100 * token[:, None, None] + 10 * head[:, None] + feature  # (T, H, d_k)
entries = entries.view(1, 4, 6)  # (B, T, D)
names = [f"token {t}" for t in range(4)]
pd.DataFrame(entries[0], index=names).map("{:03d}".format)

# %% [markdown]
# **Predict.** Which numbers will head 1 hold after the split?

# %%
parts = split_heads(entries, h=2)  # (B, H, T, d_k)
assert (parts[0, 1] // 10 % 10 == 1).all()  # head 1 holds all entries whose middle digit is 1 …
assert torch.equal(parts[0, 1] // 100, token[:, None].expand(4, 3))  # … one token in each row
assert torch.equal(merge_heads(parts), entries)  # joining undoes splitting
pd.DataFrame(parts[0, 1], index=names).map("{:03d}".format)

# %% [markdown]
# **Pitfall.** `x.view(B, H, T, d_k)` alone gives the same shape, and is wrong. A view doesn't move entries. It takes them in the order of memory, token by token. So "head 0" gets *whole tokens*, the first half of the sentence, and "head 1" the second half:


# %%
def split_by_bare_view(x: Tensor, h: int) -> Tensor:
    """The wrong split, kept to be looked at: right shape (B, H, T, d_k), tokens and heads mixed up."""
    return x.view(x.size(0), h, x.size(1), -1)


# %%
wrong_parts = split_by_bare_view(entries, h=2)  # (B, H, T, d_k)
pd.DataFrame(wrong_parts[0, 1], index=[f"row {t}" for t in range(4)]).map("{:03d}".format)

# %% [markdown]
# How would you notice? Under a causal mask, an output may depend only on its own position and earlier ones. Chapter 1's `influence` shows what it depends on:


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
titled(
    panels(
        {"split_heads": right, "split_by_bare_view": wrong},
        row_title="output of token",
        column_title="input of token",
        words=("depends", "doesn't"),
        cell=36,
    ),
    "A bare view lets the future in",
    "Left: the causal triangle. Right: row 0 of head 0 is half of token 0, row 0 of head 1 half of token 2. "
    "Output 0 joins the two. Rows 1 are the other halves: so output 1 sees tokens 0 and 2, not itself.",
    wrap=70,
)

# %% [markdown]
# ## The layer on one screen
#
# > **In short.** Project three times, split, attend in every head at once, join, project once more.
#
# The arguments `query`, `key`, `value` are the vectors *before* projection, as in PyTorch; `q`, `k`, `v` come after it. In shapes, "B|1" means B or 1. Dropout sets each weight to 0 with probability $p$ and divides the others by $1-p$, in training only.


# %%
class MultiHeadedAttention(nn.Module):
    """h attentions side by side, each on its own projection of the input (§3.2.2).

    One class serves self-attention (query = key = value), cross-attention (key = value = memory,
    the encoder's output) and causal attention (with a causal mask). After a call `attn` holds the
    weights (B, H, T, S), detached and as they were before dropout.

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
# To check the class, we compute one head at a time. (`nn.Linear` computes $x\,W^{\top}$, so a head's columns are *rows* of `.weight`.) Instead of joining the heads and multiplying by $W^O$, we *add* what each head sends through its own part of $W^O$. That is the same sum: the layer adds up its heads' answers.


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
torch.testing.assert_close(
    layer(query, key, value), attention_head_by_head(layer, query, key, value)
)
assert layer.attn.shape == (2, 4, 5, 7)  # (B, H, T, S)
torch.testing.assert_close(layer.attn.sum(-1), torch.ones(2, 4, 5))  # each row sums to 1

# %% [markdown]
# ## The same numbers as PyTorch
#
# > **In short.** PyTorch ships this layer as `nn.MultiheadAttention`. Give both the same weights, and outputs and gradients must agree.
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

query = torch.randn(2, 4, 32, requires_grad=True)  # (B, T, D)
memory = torch.randn(2, 6, 32, requires_grad=True)  # (B, S, D)
mask = padding_mask(torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]]))  # (B, 1, S)
mine = ours(query, memory, memory, mask)
reference, weights = theirs(
    query, memory, memory, key_padding_mask=~mask[:, 0], average_attn_weights=False
)
torch.testing.assert_close(mine, reference)
torch.testing.assert_close(ours.attn, weights)

probe = torch.randn_like(mine)  # a different weight for each entry, so that no gradient hides
grads = torch.autograd.grad((mine * probe).sum(), (query, memory, *ours.parameters()))
wanted = torch.autograd.grad((reference * probe).sum(), (query, memory, *theirs.parameters()))
by_query, by_memory, wq, bq, wk, bk, wv, bv, wo, bo = grads
stacked = by_query, by_memory, torch.cat((wq, wk, wv)), torch.cat((bq, bk, bv)), wo, bo
torch.testing.assert_close(stacked, wanted)
print(f"outputs, weights and {len(grads)} gradients agree")

# %% [markdown]
# **Pitfall.** `nn.MultiheadAttention` has three habits. In its boolean masks True means *hidden*, the opposite of ours, hence the `~`. The weights that it returns are *averaged over the heads*, unless you ask otherwise. Without `batch_first=True` it reads (T, B, D), and mixes sentences. A comparison with B, T and S all different shows each.
#
# ## One class, three uses
#
# > **In short.** Who asks, who answers, and what is hidden: those are the arguments. The layer doesn't change.
#
# | use (where, in chapter 4) | query | key and value | mask | weights |
# |---|---|---|---|---|
# | self-attention (encoder) | source (B, S, D) | source | padding (B, 1, S) | (B, H, S, S) |
# | causal self-attention (decoder) | target (B, T, D) | target | causal (1, T, T), and padding | (B, H, T, T) |
# | cross-attention (decoder) | target (B, T, D) | memory (B, S, D) | padding of the source (B, 1, S) | (B, H, T, S) |
#
# **Predict.** The source has five tokens, the last of them padding; the target has six. In cross-attention, what shape does the output have? How many of each head's weights are exactly zero?

# %%
torch.manual_seed(7)
source, target = torch.randn(1, 5, 32), torch.randn(1, 6, 32)  # (B, S, D), (B, T, D)
real, causal = padding_mask(torch.tensor([[5, 6, 7, 8, 0]])), subsequent_mask(6)
uses = {
    "self": (source, source, source, real),
    "causal": (target, target, target, causal),
    "cross": (target, source, source, real),
}
for use, arguments in uses.items():
    output = tuple(layer(*arguments).shape)
    hidden = int((layer.attn[0, 0] == 0).sum())
    print(f"{use:7}output {output}, weights {tuple(layer.attn.shape)}, zeros in a head: {hidden}")

# %% [markdown]
# The output has the length of the *query*. The padded token is hidden as a key, in every row.
#
# A mask of numbers is *added* to the scores. It may also have a head axis: (B|1, H|1, T|1, S). For example, we lower each score by the distance times a slope, different for each head (Press et al. 2021):


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
# ## Two questions at once
#
# > **In short.** A task asks each token two questions. One head gets one blend of the two answers. Two heads keep them apart, each with its own map.
#
# Each example has six tokens. A token's vector holds five random numbers (its *value*), its place, and a mark, which only one token carries. Every token must output two values: that of the token *before* it (before the first comes the last) and that of the *marked* token.


# %%
def two_questions(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """n examples: tokens (n, 6, 12), wanted outputs (n, 6, 10), place of the mark (n,)."""
    values, marked = torch.randn(n, 6, 5), torch.randint(6, (n,))
    place = torch.eye(6).expand(n, 6, 6)  # one-hot
    mark = torch.eye(6)[marked].unsqueeze(-1)  # (n, 6, 1)
    before = values.roll(1, dims=1)  # (n, 6, 5)
    there = values[torch.arange(n), marked].unsqueeze(1).expand(n, 6, 5)
    return torch.cat([values, place, mark], -1), torch.cat([before, there], -1), marked


# %%
def train_heads(h: int, steps: int = 150) -> MultiHeadedAttention:
    """A layer of width 12 and h heads, trained on `two_questions`."""
    torch.manual_seed(0)
    layer = MultiHeadedAttention(h, d_model=12, dropout=0.0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(steps):
        tokens, wanted, _ = two_questions(64)
        loss = F.mse_loss(layer(tokens, tokens, tokens)[..., :10], wanted)  # 10 of 12 outputs
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layer


# %% [markdown]
# We compare one head of width 12 with two of width 6, at the same cost.
#
# What can one head do? It gets a blend $w\,a + (1-w)\,b$ of the two values, independent and of variance 1, and $W^O$ must recover both from it. The best linear guess of $a$ has the mean squared error $(1-w)^2/(w^2+(1-w)^2)$, that of $b$ has $w^2/(w^2+(1-w)^2)$: together 1, so ½ on average, whatever $w$ is. Only if the marked token *is* the one before, in one case of six, is $a = b$; then $w = ½$ makes no error, so it is the best choice.
#
# **Predict.** What error will one head reach? And two?

# %%
trained = {h: train_heads(h) for h in (1, 2)}
torch.manual_seed(1)
tokens, wanted, marked = two_questions(2_000)
losses = {h: F.mse_loss(f(tokens, tokens, tokens)[..., :10], wanted) for h, f in trained.items()}
assert abs(losses[1] - 5 / 12) < 0.03 and losses[2] < 0.003
print(f"one head {losses[1]:.2f} (expected 5/6 · 1/2 = {5 / 12:.2f}), two heads {losses[2]:.2f}")

# %%
maps = trained[2].attn  # (B, H, T, S)
example = int((marked == 3).nonzero()[0])  # one in which token 3 carries the mark
one, (first, second) = trained[1].attn[example, 0], maps[example]
most = {tuple(m.argmax(-1).tolist()) for m in (first, second)}
assert most == {(5, 0, 1, 2, 3, 4), (3,) * 6}  # on the token before, and on the marked one
heads = {"the only head": one, "head 0 of two": first, "head 1 of two": second}
places = ["0", "1", "2", "3*", "4", "5"]
titled(
    panels(
        {name: m.round(decimals=2) for name, m in heads.items()},
        places,
        places,
        cell=30,
        numbers=False,
        value_title="weight",
    ),
    "Two heads learn one question each",
    "Attention weights after training; token 3 carries the mark (*). The only head blends the token "
    "before and the marked one; each of the two heads has a sharp map of its own.",
)

# %% [markdown]
# In large models few heads are so easy to read.
#
# ## Keeping the weights to look at
#
# > **In short.** For pictures like these the layer keeps its last weights, detached from the graph and as they were before dropout.
#
# **Pitfall.** A layer that keeps the weights *after* dropout, with their graph, fails in two ways. Its rows don't sum to 1, and the graph stays in memory long after the output is gone:


# %%
class KeepsDroppedWeights(MultiHeadedAttention):
    """The wrong way, kept to be measured: `attn` is what dropout put out, with its graph."""

    def forward(self, query, key, value, mask=None):
        """As in `MultiHeadedAttention`."""
        kept = []
        hook = self.dropout.register_forward_hook(lambda module, inputs, out: kept.append(out))
        output = super().forward(query, key, value, mask)
        hook.remove()
        self.attn = kept[0]
        return output


# %%
torch.manual_seed(8)
x = torch.randn(4, 20, 64)
for kind in (MultiHeadedAttention, KeepsDroppedWeights):
    layer = kind(h=8, d_model=64, dropout=0.1)
    layer(x, x, x)
    sums_to_one = bool((layer.attn.sum(-1) - 1).abs().max() < 1e-9)
    print(f"{kind.__name__}: rows sum to 1: {sums_to_one}, a graph: {layer.attn.requires_grad}")
    assert sums_to_one is not layer.attn.requires_grad

# %% [markdown]
# To notice it, add up a row in training mode, or call `copy.deepcopy` on a model that has run once: the copy fails.
#
# ## What several heads cost
#
# > **In short.** Several heads need as many multiplications as one, because they share the D projected features.
#
# The multiplications for one sentence, T queries and S keys:
#
# | part | one head of width D | H heads of width D/H |
# |---|---|---|
# | projections of Q and of the output | $2\,T D^2$ | $2\,T D^2$ |
# | projections of K and V | $2\,S D^2$ | $2\,S D^2$ |
# | scores $QK^{\top}$ | $T S D$ | $H \cdot T S \cdot D/H = T S D$ |
# | weights times values | $T S D$ | $T S D$ |
# | parameters | $4(D^2 + D)$ | $4(D^2 + D)$ |
#
# One thing grows: each head has its own map, so there are H·T·S attention weights. PyTorch's counter agrees with the table at the paper's D = 512:

# %%
T, S, D = 48, 64, 512
query, memory = torch.randn(1, T, D), torch.randn(1, S, D)
for h in (1, 8, 32):
    layer = MultiHeadedAttention(h, D, dropout=0.0)
    products = count_flops(layer, query, memory, memory) // 2  # it counts an addition with each
    parameters = sum(p.numel() for p in layer.parameters())
    assert products == 2 * T * D**2 + 2 * S * D**2 + 2 * T * S * D
    assert parameters == 4 * (D**2 + D)
    print(f"{h:2} heads: {parameters:,} parameters, {products:,} multiplications")

# %% [markdown]
# But the more heads, the narrower each is. In the paper's Table 3 one head reaches 24.9 BLEU (a score for translations, chapter 10) on the development set, 8 or 16 heads 25.8, and 32 heads, of width 16 each, 25.4.
#
# ## Summary
#
# - Every head reads all D features of each token; only the projected vector is split, by `view` and then `transpose`.
# - One head gives one blend. Several heads answer several questions, at the same cost.
# - One class serves self-attention, causal attention and cross-attention, and agrees with PyTorch's.
#
# ## What the paper did that we don't
#
# - The projections in the paper's formulas have no biases. Ours do, as in `nn.MultiheadAttention`.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Split by slicing
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Write `slice_heads(x, h)`, which does what `split_heads` does, for x of shape (B, T, D), but with slices of the last axis and `torch.stack`. Then compare both results' strides and `data_ptr()` with those of x: which shares its memory? `solution("slice_heads")` shows ours.


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
# 1. Let D = 512 and H = 512. Each head has one feature. Which maps are out of its reach?
# 2. In "Two questions at once" let the wanted output be the *sum* of the two values. Does the task still need two heads? And for their difference?
#
# <details><summary>An answer</summary>
#
# 1. With $d_k = 1$ the score is a product of two numbers, $q_i k_j$. All queries with $q_i > 0$ rank the keys in the same order, those with $q_i < 0$ in the opposite one. "Look at the token before" wants a different key first in every row, and is out of reach. With $d_k = 2$ it isn't: think of directions on a circle.
# 2. The sum needs only one: weights of ½ and ½, and a $W^O$ that doubles. The difference needs two, since weights are never negative.
#
# </details>

# %% [markdown]
# ### Exercise 3 · A bias for each distance
#
# *code · difficulty ●●○ · worth ●●● · 20 minutes*
#
# `distance_bias` is a fixed rule. A model could also *learn* which distances it prefers (as T5 does): a table of shape (H, 2R + 1) holds one number for each head and each signed distance from −R to R. Key j seen from query i has the distance j − i: column 0 is for keys R places to the left, column R for the query's own place. All keys further away share the outermost number. Write `relative_bias(table, T, S)`, the additive mask of shape (1, H, T, S). Gradients must reach the table. `solution("relative_bias")` shows ours.


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
# Write `without_head(layer, i)`: a *new* `MultiHeadedAttention` with one head fewer that computes what `layer` would if head i sent nothing. It must be smaller, not merely silent, and must leave `layer` as it is. Which rows or columns of which matrices belong to a head? ($d_k$ stays, and a second head can be taken out.) `solution("without_head")` shows ours.


# %%
def without_head(layer: MultiHeadedAttention, i: int) -> MultiHeadedAttention:
    """A new layer without head i: its parts of W^Q, W^K, W^V and of W^O are gone."""
    ...


check(without_head)

# %% [markdown]
# Next: [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb)
