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
# After this chapter you can say why a model of twelve layers trains at all, choose between post-norm and pre-norm, and check a
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
# Chapter 4 showed *what* the Transformer computes. Some of its parts are there mainly so that it can learn: residual connections, LayerNorm, and the numbers that it starts with. Shapes as before: **B** batch, **T** tokens,
# **D** = `d_model`, **V** vocabulary, **N** layers.

# %% tags=["bootstrap"]
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "set SERIES_REPOSITORY").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
ours = runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))

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
# > **In short.** A layer doesn't replace its input, it adds a correction to it. So the gradient
# > has a direct road from the loss back to every layer.
#
# A sublayer $f$ with a residual connection computes
#
# $$ y = x + f(x), \qquad \frac{\partial y}{\partial x} = I + \frac{\partial f}{\partial x}, $$
#
# with $x, y$ of shape (B, T, D). Without the $x +$, the gradient that reaches the bottom of a stack
# is a product of N Jacobians. If each shrinks a vector a little, the product shrinks it exponentially. With it, each factor
# is the identity plus something.


# %%
def input_gradient(depth: int, residual: bool, size: int = 64) -> float:
    """Size of the gradient at the input of `depth` random tanh layers, for size 1 at the output."""
    torch.manual_seed(0)
    start = torch.randn(32, size, requires_grad=True)  # (B, D)
    x = start
    for _ in range(depth):
        change = nn.Linear(size, size)(x).tanh()  # (B, D)
        x = x + change if residual else change
    x.backward(torch.randn_like(x))
    return start.grad.norm().item() / math.sqrt(start.numel())


# %% [markdown]
# **Predict.** Twenty-four layers, PyTorch's default initialisation. How much of the gradient reaches the input with, and how
# much without the residual connection?

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
# Without the road the gradient is lost. With it nothing is lost; it even grows, since each layer adds something.
# In post-norm, though, LayerNorms stand on the road (see below).
#
# ## LayerNorm
#
# > **In short.** Every token's vector is brought to the same scale: mean 0, variance 1. Then the model may stretch and shift each feature
# > as it likes.
#
# Chapter 4 gave the formula; its variance is the mean of the D squares, $\sigma^2 = \frac1D \sum_i (x_i - \mu)^2$.
# Nothing in it looks at another token or sentence, as batch normalisation does. So a token's result doesn't depend on the batch or on padding. The small $\epsilon$ keeps the root away from 0 for a constant vector.
#
# Check: against `nn.LayerNorm`, result and gradients, on ordinary, tiny and constant vectors.

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
# **Pitfall.** Two slips that look harmless: the *unbiased* standard deviation (divide by D − 1, which is what `x.std()`
# does by default), and ε added to the standard deviation instead of to the variance under the root. The model still
# trains. But weights can't be carried to or from any other implementation. Notice the first slip by the variance of the result: it
# should be 1, and is (D − 1)/D. The second shows only where a vector is nearly constant.


# %%
def wrong_layer_norm(x: Tensor, eps: float = 1e-6, correction: int = 1) -> Tensor:
    """The slips: unbiased standard deviation, ε outside the root. Shown to be refused."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=correction) + eps)


# %% [markdown]
# **Predict.** Noise of size 10⁻⁴ comes in. How large are the entries that come out, with
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
# The largest entry is 2.3 times the noise's size. Under the root we divide by $\sqrt{10^{-8} + 10^{-5}}$ = 0.0032: the noise stays small, 0.07. Outside
# we divide by $10^{-4} + 10^{-6}$: the noise becomes a full signal, 2.32. The place does it, not the value: 10⁻⁵ outside would give 2.1.
#
# ## Before or after
#
# > **In short.** The paper normalises *after* adding. Most models since normalise *before* the sublayer. One switch
# > chooses (`norm_first`), and the difference is larger than it looks.

# %%
titled(
    wirings(),
    "Where the LayerNorm stands",
    "An encoder layer, read from the bottom. In post-norm each LayerNorm stands on the road of x; in pre-norm "
    "the road is free from bottom to top.",
    wrap=60,
)

# %% [markdown]
# **Pitfall.** A text that states post-norm over code that runs pre-norm, because the paper's own code changed to
# pre-norm later. Then a reader debugs a formula that never ran, and weights
# don't fit. One test tells which one a class is: give it a sublayer that returns zeros.
# Pre-norm must return $x$ itself, post-norm must return LayerNorm($x$).


# %%
def is_post_norm(connection: nn.Module, size: int) -> bool:
    """Whether a residual connection normalises its sum, found out by a sublayer that adds nothing.

    Raises ValueError where it is neither post-norm nor pre-norm.
    """
    x = 3 * torch.randn(4, 7, size) + 1
    y = connection.eval()(x, torch.zeros_like)
    if torch.allclose(y, F.layer_norm(x, (size,)), atol=1e-5):
        return True
    if torch.equal(y, x):
        return False
    raise ValueError("neither LayerNorm(x + f(x)) nor x + f(LayerNorm(x))")


assert is_post_norm(SublayerConnection(16, 0.1), 16)
assert not is_post_norm(SublayerConnection(16, 0.1, norm_first=True), 16)

# %% [markdown]
# ## The numbers to start with
#
# > **In short.** A layer should neither amplify nor damp what passes through it, forwards or backwards. For a matrix
# > that means: the more inputs and outputs, the smaller the entries.
#
# If the entries of $x$ are independent with variance 1, and those of $W$ ($n_\text{in}$ to $n_\text{out}$) are independent with mean 0, then each entry of $xW$ has
# variance $n_\text{in}\operatorname{Var}(W)$. Going backwards, the variance of the gradient is multiplied by
# $n_\text{out}\operatorname{Var}(W)$. Both are 1 only if $n_\text{in} = n_\text{out}$. Xavier initialisation (Glorot and Bengio, 2010) takes the middle:
#
# $$ \operatorname{Var}(W) = \frac{2}{n_\text{in} + n_\text{out}}, \qquad W \sim U(-a, a),\; a = \sqrt{\frac{6}{n_\text{in} + n_\text{out}}} . $$
#
# **Predict.** Twelve matrices of 512 × 512 in a row, nothing else. Entries of spread (standard deviation) 0.1 multiply the scale by $0.1\sqrt{512} ≈ 2.26$ each time. PyTorch's
# default for `nn.Linear` has variance $1/(3 n_\text{in})$. What is left of a spread of 1 after twelve?

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
# PyTorch's default loses a factor of $\sqrt3$ each time, 729 in twelve. In a Transformer, LayerNorm and the road hide this: the model
# runs, and only learns worse. `initialise` gives all matrices but the tables Xavier's variance, and sets all biases to 0.
#
# **Pitfall.** Deep copies, and then a Xavier loop that touches "everything with more than one dimension". Biases have one dimension, so they
# keep what the copying gave them: PyTorch's random default, the same random numbers in every layer, in place of 0.


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
# Being alike does little harm, zero or not: the matrices differ, so the layers learn different things. What is lost is the start that was
# asked for, with biases of 0.
#
# ## One table, three uses
#
# > **In short.** The table that turns words into vectors and the matrix that turns vectors into word scores have the same
# > shape. The paper uses one table for both, and for the source words too (§3.4).
#
# The embedding is a row lookup in $E$ (V, D), and the generator's `nn.Linear` holds its weight as (V, D) too: $\text{logits} = y E^\top + b$.
# A word's score is then the dot product of the model's output with that word's own embedding. Sharing with the source asks for
# *one* vocabulary for both languages. In `make_model`, `tie="decoder"` shares target table and generator, `tie="all"` all three.
#
# Tied means: **the same memory**. What one use learns, the other has at once, and the gradients of all uses add up.


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
# **Pitfall.** Claiming that weights are shared, while they are only equal, as in `untied`. That lasts until the
# first step. So compare storage, not values.

# %%
for name, one in (("tied", tied), ("copied", untied)):
    pair = one.generator.proj.weight, one.tgt_embed[0].lut.weight
    before = torch.equal(*pair)
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    print(f"{name}: equal before the step: {before}, after it: {torch.equal(*pair)}")

# %% [markdown]
# ## A table's first numbers
#
# > **In short.** A table is looked up, and is the generator's matrix. One spread suits both: $1/\sqrt D$.
#
# A lookup doesn't sum over inputs, it picks *one* row. So Xavier's formula, which counts V "outputs", has nothing to say about it. Coming in, the row is multiplied
# by $\sqrt D$ (chapter 3). Going out, a score is a dot product of D terms with a vector of variance 1. With entries of variance $1/D$, embeddings and
# logits both have a spread of about 1.
#
# Knowing nothing costs $\ln V$. If logits are independent $N(0, s^2)$ with a small $s$, the first loss is about $\ln V + s^2/2$, as
# $\ln \sum_j e^{z_j} ≈ \ln V + s^2/2$.
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
# With N(0, 1), $s = \sqrt{128}$ isn't small, and the formula's 72.5 isn't to be trusted: here one score decides, that of the word just read. Its vector is still in the output, and
# the table is tied; so the model is sure of it before any training. With Xavier's entries the loss is near $\ln V$, but the embeddings are far smaller
# than the positions added to them: sines and cosines, 0.7 in root mean square. A first loss much above $\ln V + \frac12$ means that something is wrong already: it is the first
# number to look at in any training.
#
# ## Signals through twelve layers
#
# > **In short.** Where the LayerNorm stands decides how large each layer's output is, and how much gradient it gets.
#
# Both models, 6 + 6 layers, get the same batch before any training. We note for each layer how large its output is, and how large the gradient is
# that arrives there.


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
# **Predict.** In which of the two does the scale grow with depth? In which does the gradient fade on its way down?

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
    "E1 to E6 are the encoder's layers, D1 to D6 the decoder's. Left: what a layer gives. Right: the gradient that arrives at its output.",
    wrap=76,
)

# %% [markdown]
# Post-norm, decoder: the sum $x + f(x)$ has a spread above 1. Each LayerNorm divides it, and its gradient, by that spread, three times a layer.
# The sublayers send gradient back too, but less than is lost. The last layer gets eight times the gradient of the first.
#
# Pre-norm: nothing divides the road. So what arrives at the last layer arrives at the first as well, plus what the sublayers send back: all its gradients lie
# within a factor of three.
#
# Post-norm's encoder doesn't fade. At the start the weights of attention are nearly even: attention takes means. So the decoder sends almost the same gradient to
# all source positions. Backwards, a mean passes on what all positions have in common, and cancels what
# differs: so here the sublayers make up for what the norms take. In the decoder each position has a gradient of its own. The share that is common to all positions:

# %%
common = signals[signals.placement == "post-norm"].set_index("layer").common
print(f"at E6 {common['E6']:.2f} · at D6 {common['D6']:.2f}")
assert common["E6"] > 0.8 and common["D6"] < 0.3

# %% [markdown]
# ## First steps
#
# > **In short.** Placement and warm-up decide how fast a deep model learns in its first steps.
#
# Warm-up is a learning rate that rises slowly from 0 (chapter 6). A race: forty steps of Adam on "copy these six
# symbols", 6 + 6 layers, learning rate 0.003. Post-norm runs twice: without warm-up, and with 25 steps of it.


# %%
def short_race(norm_first: bool, warmup: int, seed: int, steps: int = 40) -> float:
    """Mean loss of the last ten of `steps` Adam steps, on copying six of ten symbols."""
    torch.manual_seed(seed)
    model = make_model(12, 12, 6, 32, 64, 4, dropout=0.0, norm_first=norm_first)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    losses = []
    for step in range(1, steps + 1):
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
# **Predict.** Knowing nothing costs ln 10 = 2.30. In which order will the three contenders end, and will three seeds agree?

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
# The seeds agree. At this size and this rate: pre-norm starts without warm-up, and warm-up helps post-norm. Xiong
# et al. (2020) report the same for full trainings. It is not a law: in chapter 19's full trainings, of two layers a side, both
# lose about the same without warm-up, and post-norm ends 0.15 nats behind.
#
# ## Summary
#
# - A residual connection gives the gradient a direct road; without it 24 layers left a millionth.
# - LayerNorm brings each token's vector to mean 0 and variance 1, with the *biased* variance and ε under the root.
# - Post-norm holds outputs at spread 1, and the decoder's gradient fades downwards. Pre-norm lets outputs grow, and its gradients differ by less than a factor of three.
# - Matrices start with Xavier's variance, biases at 0, tables with variance 1/D. The first loss is then about ln V + ½.
# - Tied tables are the same memory.
#
# ## What the paper did that we don't
#
# - Its text is post-norm, its code moved to pre-norm later. `make_model`'s default follows the text; the models that we train from chapter 7 on are pre-norm.
# - The paper doesn't say how its matrices start. Its code scaled them by the mean of inputs and outputs, which is what
#   Xavier does.
#
# ## Exercises
#
# ### Exercise 1 · LayerNorm from two sums
#
# *code · difficulty ●●○ · worth ●●○ · 15 minutes*
#
# A fast LayerNorm keeps two sums of each vector, $\sum x_i$ and $\sum x_i^2$. Write `two_sums_norm`, which computes mean and variance from
# these two alone. It must be `nn.LayerNorm`'s function, gradients included. And when does it go wrong, although the algebra is right?
# `solution("two_sums_norm")` shows ours.


# %%
def two_sums_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over x (..., D), by the sums of its entries and of their squares."""
    ...


check(two_sums_norm)

# %% [markdown]
# <details><summary>When does it go wrong?</summary>
#
# Where the mean is large beside the spread. A float32 has seven digits. With a mean of 10,000 and a spread of 1 the squares are near $10^8$ and their
# difference is 1: the digits that were wanted are gone. Kernels that read once update mean and variance with each entry instead (Welford's method).
#
# </details>
#
# ### Exercise 2 · A deeper model that starts where the shallow one ended
#
# *code · difficulty ●●● · worth ●●● · 30 minutes*
#
# Make a trained pre-norm model deeper, without starting over. Write `deepened`: a new model with N
# layers on each side that computes exactly what `model` computes. The new layers come on top of
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
# In pre-norm a sublayer that returns 0 leaves $x$ alone. Its last matrix and bias must be 0, and what comes before must not: the
# gradient of $W_2$ is a product with what comes out of $W_1$. In post-norm LayerNorm$(x + 0)$ isn't $x$, unless $x$ is
# normed already and γ and β are still 1 and 0.
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
