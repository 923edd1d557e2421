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
# # Chapter 5 · Norms and first steps
#
# After this chapter you can explain why a model of twelve layers trains at all, choose between post-norm and pre-norm, and check a
# model's numbers before its first step.
#
# | | |
# |---|---|
# | In the paper | §3.1 (residual connections and LayerNorm), §3.4 (shared tables), §5.3 (warm-up) |
# | Time | 20 minutes to read, 50 with the code; under a minute to run on a CPU |
# | Before, after | [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb) · [Chapter 6 · Training](ch06_training.ipynb) |
#
# *If you read only three cells:* the chart under "A road for the gradient", the table under "A table's first numbers", the chart under "Signals through twelve layers".
#
# Shapes as before: **B** batch, **T** tokens, **D** = `d_model`, **V** vocabulary, **N** layers.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import titled
from scripts.book.exercises import check
from scripts.book.figures.model import decades, layer_lines, wirings
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import (
    EncoderDecoder,
    EncoderLayer,
    LayerNorm,
    PositionwiseFeedForward,
    SublayerConnection,
    clones,
    initialise,
    make_model,
)

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## A road for the gradient
#
# > **In short.** A layer doesn't replace its input: it adds a correction to it. So the gradient
# > has a direct road from the loss back to every layer.
#
# A sublayer $f$ with a residual connection computes
#
# $$ y = x + f(x), \qquad \frac{\partial y}{\partial x} = I + \frac{\partial f}{\partial x}, $$
#
# with $x, y$ of shape (B, T, D). Without the $x +$, the gradient at the bottom of a stack
# has gone through N Jacobians $\partial f/\partial x$. If each shrinks it a little, it shrinks exponentially with N. With the $x +$, each factor
# is the identity plus something.


# %%
def input_gradient(depth: int, residual: bool) -> float:
    """Size of the gradient at the input of `depth` random tanh layers, for size 1 at the output."""
    torch.manual_seed(0)
    start = torch.randn(32, 64, requires_grad=True)  # (B, D)
    x = start
    for _ in range(depth):
        change = nn.Linear(64, 64)(x).tanh()  # (B, D)
        x = x + change if residual else change
    x.backward(torch.randn_like(x))
    return start.grad.norm().item() / math.sqrt(start.numel())


# %% [markdown]
# **Predict.** How much of the gradient reaches the input of twenty-four layers with residual connections, and without?

# %%
reach = pd.DataFrame(
    [
        {"layers": n, "connection": name, "gradient": input_gradient(n, residual)}
        for name, residual in (("with x +", True), ("without", False))
        for n in (1, 4, 8, 12, 16, 20, 24)
    ]
)
for name in ("with x +", "without"):
    sizes = reach[reach.connection == name].set_index("layers").gradient
    a_layer = (sizes[24] / sizes[1]) ** (1 / 23)
    print(f"{name:9} at the input {sizes[24]:.1e} · a layer multiplies by {a_layer:.2f}")
titled(
    decades(reach, "layers", "gradient", "connection", range(-6, 2, 2), range(0, 25, 4)),
    "Residual connections carry the gradient",
    "The size of the gradient at the bottom of the stack, for a gradient of size 1 at the top (log scale).",
    wrap=72,
)

# %% [markdown]
# With the road the gradient even grows, since each layer adds something. Without, a layer leaves about $1/\sqrt3$ of it. That is PyTorch's start; Xavier's (below) would leave 0.2 after 24 layers.
#
# ## LayerNorm
#
# > **In short.** Every token's vector is brought to the same scale: mean 0, variance 1. Then the model may stretch and shift each feature.
#
# Chapter 4 gave the formula; its variance is the mean of the D squares, $\sigma^2 = \frac1D \sum_i (x_i - \mu)^2$.
# LayerNorm looks at no other token, so a token's result doesn't depend on the batch or on padding. The small $\epsilon$ keeps the root above 0 for a constant vector.
# Ours agrees with `nn.LayerNorm`, gradients included:

# %%
torch.manual_seed(0)
ours, theirs = LayerNorm(16), nn.LayerNorm(16)
data = torch.cat((torch.randn(4, 16), 1e-3 * torch.randn(4, 16), torch.ones(1, 16)))  # (9, D)
results = []
for norm in (ours, theirs):
    norm.load_state_dict({"weight": torch.linspace(0.5, 2, 16), "bias": torch.linspace(-1, 1, 16)})
    x = data.clone().requires_grad_()
    y = norm(x)
    results.append((y, *torch.autograd.grad(y.sin().sum(), (x, norm.weight, norm.bias))))
torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)

# %% [markdown]
# **Pitfall.** Two slips look harmless: the *unbiased* standard deviation (dividing by D − 1, the default of `x.std()`),
# and ε added to the standard deviation instead of to the variance under the root. The model still
# trains, but its weights fit no other implementation.


# %%
def wrong_layer_norm(x: Tensor, eps: float = 1e-6, correction: int = 1) -> Tensor:
    """The slips: unbiased standard deviation, ε outside the root. Shown as a mistake."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=correction) + eps)


# %% [markdown]
# **Predict.** The input is noise of size 10⁻⁴. How large are the entries of the output with
# ε = 10⁻⁵ under the root, and with 10⁻⁶ outside?

# %%
torch.manual_seed(0)
for size in (8, 512):
    x = torch.randn(200, size)
    wrong = wrong_layer_norm(x)
    off = (wrong - F.layer_norm(x, (size,))).abs().max()
    variance = wrong.var(-1, correction=0).mean()
    print(f"D = {size:3}: variance {variance:.4f} instead of 1, largest error {off:.4f}")
noise = 1e-4 * torch.randn(1, 64)
slip = wrong_layer_norm(noise, correction=0).abs().max()  # the second slip alone
print(f"noise: ours {LayerNorm(64)(noise).abs().max().item():.2f}, ε outside {slip:.2f}")

# %% [markdown]
# The first slip leaves (D − 1)/D of the variance. For the second: the noise's largest entry is 2.3 times its size. With ε under the root we divide by $\sqrt{10^{-8} + 10^{-5}}$ = 0.0032, and it stays small: 0.07. With ε outside
# we divide by $10^{-4} + 10^{-6}$, and the noise becomes a full signal: 2.32.
#
# ## Before or after
#
# > **In short.** The paper normalises *after* adding (post-norm). Most models since normalise *before* the
# > sublayer (pre-norm, `norm_first`).

# %%
titled(
    wirings(),
    "Where the LayerNorm stands",
    "An encoder layer, read from the bottom. In post-norm each LayerNorm stands on the road of x; in pre-norm "
    "the road is free from bottom to top.",
    wrap=60,
)

# %% [markdown]
# **Pitfall.** A text may state post-norm above code that runs pre-norm. One test distinguishes the two: give the class a sublayer that returns zeros. Pre-norm must return $x$ itself, post-norm LayerNorm($x$).

# %%
x = 3 * torch.randn(4, 7, 16) + 1
post, pre = (SublayerConnection(16, 0.1, norm_first) for norm_first in (False, True))
torch.testing.assert_close(post(x, torch.zeros_like), F.layer_norm(x, (16,)))
assert torch.equal(pre(x, torch.zeros_like), x)

# %% [markdown]
# ## The numbers to start with
#
# > **In short.** A layer should neither amplify nor damp what passes through it, forwards or backwards. So
# > the more inputs and outputs a matrix has, the smaller its entries.
#
# If the entries of $x$ are independent with variance 1, and those of $W$ ($n_\text{in}$ to $n_\text{out}$) independent with mean 0, each entry of $xW$ has
# variance $n_\text{in}\operatorname{Var}(W)$. Going backwards, the variance of the gradient is multiplied by
# $n_\text{out}\operatorname{Var}(W)$. Both can be 1 only if $n_\text{in} = n_\text{out}$. Xavier initialisation (Glorot and Bengio, 2010) is a compromise:
#
# $$ \operatorname{Var}(W) = \frac{2}{n_\text{in} + n_\text{out}}, \qquad W \sim U(-a, a),\; a = \sqrt{\frac{6}{n_\text{in} + n_\text{out}}} . $$
#
# **Predict.** A signal of spread (standard deviation) 1 goes through twelve 512 × 512 matrices. Entries of spread 0.1 multiply its scale by $0.1\sqrt{512} ≈ 2.26$ each time. PyTorch's
# default for `nn.Linear` has variance $1/(3 n_\text{in})$. What spread is left with each, and with Xavier?

# %%
starts = {
    "N(0, 0.1²)": lambda w: nn.init.normal_(w, std=0.1),
    "PyTorch's default": lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
    "Xavier": nn.init.xavier_uniform_,
}
for name, start in starts.items():
    torch.manual_seed(0)
    x = torch.randn(64, 512)  # (B, D)
    for _ in range(12):
        weight = torch.empty(512, 512)
        start(weight)
        x = x @ weight.T
    print(f"{name:18} {x.std().item():12.4f}")

# %% [markdown]
# PyTorch's default loses a factor of $\sqrt3$ each time, 729 in twelve. `initialise` gives all matrices except the tables Xavier's variance, and sets all biases to 0.
#
# **Pitfall.** A Xavier loop over "everything with more than one dimension" leaves out the biases. In copied layers they
# keep PyTorch's random default instead of 0, the same numbers in every copy.


# %%
def wrong_initialise(model: nn.Module) -> None:
    """The slip: Xavier for the matrices, and the copied biases left as they are."""
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)


torch.manual_seed(0)
parts = (MultiHeadedAttention(4, 32, 0.0), PositionwiseFeedForward(32, 64, 0.0))
layers = clones(EncoderLayer(32, *parts, dropout=0.0), 6)
for name, start in (("wrong", wrong_initialise), ("right", initialise)):
    start(layers)
    biases = torch.stack([layer.feed_forward.expand.bias for layer in layers])  # (N, F)
    alike, zero = bool((biases == biases[0]).all()), bool((biases == 0).all())
    print(f"{name}: biases alike in all six layers: {alike}, all zero: {zero}")

# %% [markdown]
# Equal biases do little harm: the matrices differ, so the layers learn different things.
#
# ## One table, three uses
#
# > **In short.** The table that turns words into vectors has the shape of the matrix that turns vectors into word
# > scores. The paper uses one for both, and for the source words too (§3.4).
#
# With the table $E$ (V, D) in the generator, $\text{logits} = y E^\top + b$: a word's score is the dot product of the model's output with
# that word's own embedding.
#
# Tied means **the same memory**, so the gradients of all uses add up.


# %%
def storage_addresses(model: EncoderDecoder) -> tuple[int, int, int]:
    """Where source table, target table and generator matrix lie in memory."""
    tables = (model.src_embed[0].lut, model.tgt_embed[0].lut, model.generator.proj)
    return tuple(table.weight.untyped_storage().data_ptr() for table in tables)


size = {"N": 2, "d_model": 32, "d_ff": 64, "h": 4, "dropout": 0.0}
torch.manual_seed(0)
tied, untied = make_model(60, 60, **size, tie="all"), make_model(60, 60, **size)
untied.load_state_dict(tied.state_dict())  # the same numbers in three tables
src, tgt = torch.randint(4, 60, (2, 8, 6))  # (B, S), (B, T) ids
gradients = []
for one in (tied, untied):
    F.cross_entropy(one.generator(one(src, tgt)).flatten(0, 1), tgt.flatten()).backward()
    uses = (one.src_embed[0].lut, one.tgt_embed[0].lut, one.generator.proj)
    gradients.append([use.weight.grad for use in uses])
torch.testing.assert_close(gradients[0][0], sum(gradients[1]))
print("tables in memory:", *(len(set(storage_addresses(one))) for one in (tied, untied)))

# %% [markdown]
# **Pitfall.** Weights may be called shared when they are only equal, as in `untied`. So compare storage, not values.

# %%
for name, one in (("tied", tied), ("copied", untied)):
    pair = one.generator.proj.weight, one.tgt_embed[0].lut.weight
    after = [weight - 0.1 * weight.grad for weight in pair]  # as a step of SGD would make them
    print(f"{name}: equal before the step: {torch.equal(*pair)}, after it: {torch.equal(*after)}")

# %% [markdown]
# ## A table's first numbers
#
# > **In short.** A tied table is looked up and is the generator's matrix. One spread suits both uses: $1/\sqrt D$.
#
# A lookup picks *one* row and sums over nothing, so Xavier's formula, which counts V "outputs", doesn't apply. In the embedding, the row is multiplied
# by $\sqrt D$ (chapter 3). In the generator, a score is a dot product of D terms with a vector of variance 1. With entries of variance $1/D$, embeddings and
# logits both have a spread of about 1.
#
# A model that knows nothing has a loss of $\ln V$. If logits are independent $N(0, s^2)$ with a small $s$, then
# $\ln \sum_j e^{z_j} ≈ \ln V + s^2/2$, which is about the first loss.
#
# **Predict.** V = 5000, so $\ln V$ = 8.52; D = 128. What will the first loss be for a table drawn from N(0, 1), PyTorch's default for `nn.Embedding`?

# %%
tables = {
    "N(0, 1/D), ours": lambda w: nn.init.normal_(w, std=w.size(1) ** -0.5),
    "N(0, 1), PyTorch's default": nn.init.normal_,
    "Xavier of (V, D)": nn.init.xavier_uniform_,
}
torch.manual_seed(0)
model = make_model(5000, 5000, N=1, d_model=128, d_ff=256, h=4, dropout=0.0, tie="all")
src, tgt, labels = torch.randint(4, 5000, (3, 16, 12))  # (B, T) ids each
rows = []
for name, start in tables.items():
    start(model.generator.proj.weight.data)  # tied: all three tables
    logits = model.generator(model(src, tgt, None, subsequent_mask(12))).detach()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    spreads = {"embeddings": model.src_embed[0](src).std(), "logits": logits.std(), "loss": loss}
    rows.append({"table": name} | {key: round(value.item(), 2) for key, value in spreads.items()})
assert abs(rows[0]["loss"] - math.log(5000) - 0.5) < 0.3
pd.DataFrame(rows)

# %% [markdown]
# With N(0, 1), $s = \sqrt{128}$ isn't small, and the formula (72.5) can't be trusted. The vector of the word just read is still in the output, and
# the table is tied, so the model is sure of that word before any training. With Xavier's entries the loss is near $\ln V$, but the embeddings are far smaller
# than the positions added to them (0.7 in root mean square). If the first loss of a training is much above
# $\ln V + \frac12$, something is already wrong.
#
# ## Signals through twelve layers
#
# > **In short.** The place of the LayerNorm decides how large a layer's output is, and how much gradient the layer gets.


# %%
def layer_signals(model: EncoderDecoder, src: Tensor, tgt: Tensor, labels: Tensor) -> pd.DataFrame:
    """Each layer's output spread, the gradient's norm there, and the share of it common to all positions.

    src, tgt and labels are (B, T) ids.
    """
    stacks = {"E": model.encoder.layers, "D": model.decoder.layers}
    names = [f"{side}{n}" for side, layers in stacks.items() for n in range(1, len(layers) + 1)]
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda *call: outputs.append(call[-1]))
        for layers in stacks.values()
        for layer in layers
    ]
    logits = model.generator(model(src, tgt, None, subsequent_mask(tgt.size(1))))  # (B, T, V)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    gradients = torch.autograd.grad(loss, outputs)  # of (B, T, D) each
    for hook in hooks:
        hook.remove()
    columns = {
        "output spread": [x.std().item() for x in outputs],
        "gradient": [g.norm().item() for g in gradients],
        "common": [
            (g.mean(1, keepdim=True).expand_as(g).norm() / g.norm()).item() ** 2 for g in gradients
        ],
    }
    return pd.DataFrame({"layer": names} | columns)


# %% [markdown]
# **Predict.** Two untrained models differ only in the LayerNorm's place. In which do the outputs grow with depth? In which does the gradient fade on its way down?

# %%
size = {"N": 6, "d_model": 128, "d_ff": 512, "h": 4, "dropout": 0.0}
signals = []
for name, norm_first in (("post-norm", False), ("pre-norm", True)):
    torch.manual_seed(0)
    model = make_model(100, 100, **size, norm_first=norm_first)
    batch = torch.randint(4, 100, (3, 16, 12))  # source, target, labels
    signals.append(layer_signals(model, *batch).assign(placement=name))
    by_layer = signals[-1].set_index("layer")
    for column in ("output spread", "gradient"):
        ratio = by_layer.loc["D6", column] / by_layer.loc["D1", column]
        print(f"{name:9} {column:13} D6 / D1 = {ratio:.1f}")
signals = pd.concat(signals, ignore_index=True)
titled(
    layer_lines(signals, ["output spread", "gradient"], "placement"),
    "Two placements of one LayerNorm, before any training",
    "E1 to E6 are the encoder's layers, D1 to D6 the decoder's. Left: what a layer gives. "
    "Right: the gradient that arrives at its output.",
    wrap=76,
)

# %% [markdown]
# In post-norm's decoder, the sum $x + f(x)$ has a spread above 1. Each LayerNorm divides the sum and its gradient by that spread, three times a layer.
# So the gradient fades, to an eighth.
#
# In pre-norm nothing is divided, so the outputs grow. The gradient that arrives at the last layer also arrives at the first, plus what the sublayers send back: all
# gradients lie within a factor of three.
#
# In post-norm's encoder the gradient doesn't fade. At the start the attention weights are nearly even, so attention takes means. Backwards, a mean passes on what all positions have in common. The decoder sends almost the same gradient to
# all source positions, so here the sublayers make up for what the norms take. In the decoder each position has its own gradient. The share common to all positions is:

# %%
common = signals[signals.placement == "post-norm"].set_index("layer").common
print(f"at E6 {common['E6']:.2f} · at D6 {common['D6']:.2f}")
assert common["E6"] > 0.8 and common["D6"] < 0.3

# %% [markdown]
# ## First steps
#
# > **In short.** Placement and warm-up decide how fast a deep model learns in its first steps.
#
# In warm-up the learning rate rises slowly from 0. We run a race: forty steps of Adam (chapter 6 explains both) on "copy these six
# symbols", with 6 + 6 layers and a rate of 0.003.


# %%
def short_race(norm_first: bool, warmup: int, seed: int) -> float:
    """Mean loss of the last ten of forty Adam steps, on copying six of ten symbols."""
    torch.manual_seed(seed)
    model = make_model(12, 12, 6, 32, 64, 4, dropout=0.0, norm_first=norm_first)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    losses = []
    for step in range(1, 41):
        optimizer.param_groups[0]["lr"] = 0.003 * min(1, step / warmup)
        src = torch.randint(2, 12, (16, 6))  # (B, S) ids
        tgt = torch.cat((torch.ones_like(src[:, :1]), src[:, :-1]), dim=1)  # (B, T): shifted right
        logits = model.generator(model(src, tgt, None, subsequent_mask(6)))  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), src.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


# %% [markdown]
# **Predict.** A model that knows nothing has a loss of ln 10 = 2.30. In which order will the three contenders end, and will three seeds agree?

# %%
contenders = {  # norm_first, warm-up
    "pre-norm, no warm-up": (True, 1),
    "post-norm, warm-up": (False, 25),
    "post-norm, no warm-up": (False, 1),
}
ends = []
for name, (norm_first, warmup) in contenders.items():
    ends.append([short_race(norm_first, warmup, seed) for seed in range(3)])
    print(f"{name:22} {min(ends[-1]):.1f} to {max(ends[-1]):.1f} over three seeds")
assert max(ends[0]) < min(ends[1]) - 0.1 and max(ends[1]) < min(ends[2])  # no seed disagrees

# %% [markdown]
# At this size and this rate, pre-norm learns without warm-up, and warm-up helps post-norm. Xiong
# et al. (2020) report the same for full training runs. It is not a law: in chapter 19's full runs, with two layers a side, dropping warm-up
# costs both about the same.
#
# ## Summary
#
# - A residual connection gives the gradient a direct road; without it, each layer takes its toll.
# - LayerNorm brings each token's vector to mean 0 and variance 1, with the *biased* variance and ε under the root.
# - Post-norm holds outputs at spread 1, and its decoder's gradient fades downwards. In pre-norm outputs grow, and gradients differ little.
# - Matrices start with Xavier's variance, biases at 0, tables with variance 1/D. With tied tables the first loss is then about ln V + ½.
#
# ## What the paper did that we don't
#
# - `make_model`'s default is the post-norm of the paper's text; the models that we train from chapter 7 on are pre-norm.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · LayerNorm from two sums
#
# *code · difficulty ●●○ · worth ●●○ · 15 minutes*
#
# A fast LayerNorm keeps two sums of each vector, $\sum x_i$ and $\sum x_i^2$. Write `two_sums_norm`, which computes mean and variance from
# these two alone. It must be `nn.LayerNorm`'s function, gradients included. And when does it fail, although the algebra is right?
# `solution("two_sums_norm")` shows ours.


# %%
def two_sums_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over x (..., D), by the sums of its entries and of their squares."""
    ...


check(two_sums_norm)

# %% [markdown]
# <details><summary>When does it fail?</summary>
#
# When the mean is large compared with the spread. A float32 has seven digits. With a mean of 10,000 and a spread of 1, the squares are near $10^8$ and their
# difference is 1: the digits that matter are gone.
#
# </details>
#
# ### Exercise 2 · A deeper model that starts where the shallow one ended
#
# *code · difficulty ●●● · worth ●●● · 30 minutes*
#
# Write `deepened`: a new pre-norm model with N layers on each side that computes exactly what the trained `model` computes. The new layers come on top of
# the old ones and can learn. Which numbers of a pre-norm layer must be 0 for it to be the identity? Which must *not* be? And why is there no
# such trick for post-norm? `solution("deepened")` shows ours.


# %%
def deepened(model: EncoderDecoder, N: int) -> EncoderDecoder:
    """A copy of a pre-norm model with new layers on top that add nothing yet."""
    ...


check(deepened)

# %% [markdown]
# <details><summary>Why not for post-norm?</summary>
#
# In pre-norm, a sublayer that returns 0 leaves $x$ alone. Its last matrix and bias must be 0, but not what comes before them: the
# gradient of $W_2$ is a product with what comes out of $W_1$. In post-norm, LayerNorm$(x + 0)$ isn't $x$, unless $x$ is
# already normalised and γ and β are still 1 and 0.
#
# </details>
#
# ### Exercise 3 · Free roads
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# 1. Replace $x + f(x)$ by $x + \frac12 f(x)$, and by $\frac12 (x + f(x))$. Which of them is still a free road? By what factor does the other
#    shrink the gradient in 24 layers?
# 2. In post-norm with N = 6 the decoder's gradient fades by 8 from D6 to D1. By what factor will it fade from D18 to D1 with N = 18? Then run it.
#
# <details><summary>An answer</summary>
#
# 1. The Jacobians are $I + \frac12 J$ and $\frac12 (I + J)$. The first product contains $I$ itself, so the gradient arrives. The second
#    is $2^{-24}$ = 6·10⁻⁸ times that of a free road.
# 2. With the same factor in each layer it would be $8.3^{17/5}$, some 1,300. We measured about 320: the factor is smaller further down.
#
# </details>
#
# Next: [Chapter 6 · Training](ch06_training.ipynb)
