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
# After this chapter you can start a deep model so that it learns, choose between post-norm and pre-norm, and say
# when warm-up helps.
#
# | | |
# |---|---|
# | In the paper | §3.1 (residual connections and LayerNorm), §3.4 (shared tables), §5.3 (warm-up) |
# | Time | 20 minutes to read, 50 with the code; under a minute to run |
# | Before, after | [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb) · [Chapter 6 · Training](ch06_training.ipynb) |
#
# *If you read only three cells:* the charts under "What the residual connection carries", "Does post-norm need warm-up?" and "At every rate".
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** = `d_model`, **V** vocabulary.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import copy
import math
from itertools import product

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import heatmap, titled
from scripts.book.exercises import check
from scripts.book.figures.model import layer_lines, wirings
from scripts.book.figures.starts import by_rate, collapse, curves_of
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import (
    EncoderDecoder,
    LayerNorm,
    SublayerConnection,
    clones,
    initialise,
    make_model,
)
from scripts.corpora.reversal import PAD, VOCAB, reversals

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The numbers to start with
#
# > **In short.** A matrix should neither amplify nor damp what passes through it, forwards or backwards. So
# > the more inputs and outputs it has, the smaller its entries.
#
# Let the entries of $x$ be independent with mean 0 and variance 1, and those of $W$ ($n_\text{in}$ to $n_\text{out}$) independent with mean 0. An entry of $xW$ sums $n_\text{in}$ products,
# so it has variance $n_\text{in}\operatorname{Var}(W)$. An entry of the gradient on its way back sums $n_\text{out}$ products, so its variance is multiplied by
# $n_\text{out}\operatorname{Var}(W)$. Both factors are 1 only if $n_\text{in} = n_\text{out}$. Xavier initialisation (Glorot and Bengio, 2010) makes their mean 1:
#
# $$ \operatorname{Var}(W) = \frac{2}{n_\text{in} + n_\text{out}}, \qquad W \sim U(-a, a) . $$
#
# **Your turn.** Which $a$ gives that variance? A uniform distribution on $(-a, a)$ has variance $a^2/3$.


# %% tags=["yours"]
def xavier_bound(fan_in: int, fan_out: int) -> float:
    """The a of U(−a, a) whose variance is 2/(fan_in + fan_out)."""
    return math.sqrt(6 / (fan_in + fan_out))


# %%
for fan_in, fan_out in ((512, 512), (512, 64), (64, 2048)):
    largest = nn.init.xavier_uniform_(torch.empty(fan_out, fan_in)).abs().max().item()
    ratio = largest / xavier_bound(fan_in, fan_out)
    assert 0.999 < ratio <= 1, f"{fan_in} to {fan_out}: PyTorch's largest entry is {ratio:.3f} a"

# %% [markdown]
# **Predict.** A signal of spread (standard deviation) 1 goes through twelve 512 × 512 matrices. PyTorch's
# default for `nn.Linear` has variance $1/(3 n_\text{in})$. What spread is left with it, with Xavier's, and with 0.1²?

# %%
torch.manual_seed(0)
for name, std in (("N(0, 0.1²)", 0.1), ("PyTorch's", 1536**-0.5), ("Xavier's", 512**-0.5)):
    x = torch.randn(64, 512)  # (B, D)
    for _ in range(12):
        x = x @ (std * torch.randn(512, 512))
    print(f"{name:10} {x.std().item():12.4f}")

# %% [markdown]
# Xavier's start keeps the signal's size, PyTorch's divides it by 729 ($\sqrt3$ each time), and N(0, 0.1²) multiplies it by some 18,000.
#
# Chapter 4's `initialise` gives all matrices except the tables Xavier's variance, and sets all biases to 0.
#
# **Pitfall.** A Xavier loop over "everything with more than one dimension" leaves out the biases. In copied layers they
# keep PyTorch's random default, the same numbers in every copy.


# %%
def wrong_initialise(model: nn.Module) -> None:
    """The slip: Xavier for the matrices, and the copied biases left as they are."""
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)


layers = clones(nn.Linear(32, 64), 6)
for name, start in (("wrong", wrong_initialise), ("right", initialise)):
    start(layers)
    biases = torch.stack([layer.bias for layer in layers])  # (N, 64)
    print(
        f"{name}: alike in all layers: {bool((biases == biases[0]).all())}, zero: {not biases.any()}"
    )

# %% [markdown]
# ## LayerNorm
#
# > **In short.** Every token's vector is brought to the same scale: mean 0, variance 1. Then the model may stretch and shift each feature.
#
# Chapter 4 gave the formula; its variance is the mean of the D squares, $\sigma^2 = \frac1D \sum_i (x_i - \mu)^2$.
# LayerNorm looks at no other token, so a token's result doesn't depend on the batch or on padding.

# %%
torch.manual_seed(0)
scale, shift = torch.tensor([[0.2, 1, 3], [0, 4, 0]]).unsqueeze(-1)  # (3, 1) each
vectors = scale * torch.randn(3, 8) + shift  # (3, D)
both = torch.cat((vectors, LayerNorm(8)(vectors).detach()))  # (6, D)
names = [f"{kind}{norm}" for norm in ("", ", normed") for kind in ("small", "shifted", "large")]
titled(
    heatmap(both, names, scheme="diverging", digits=1),
    "After LayerNorm, small, shifted and large vectors have one scale",
    "Each row is a token's vector: three of them, and below the same three after LayerNorm.",
    wrap=64,
)

# %% [markdown]
# **Pitfall.** Two slips look harmless: the *unbiased* standard deviation (dividing by D − 1, the default of `x.std()`),
# and ε added to the standard deviation instead of to the variance under the root. The model
# trains, but other implementations compute something else with its weights.
#
# **Predict.** The input is noise of size 10⁻⁴. How large are the entries of the output with
# ε = 10⁻⁵ under the root, and with 10⁻⁶ outside?


# %%
def wrong_layer_norm(x: Tensor, eps: float = 1e-6, correction: int = 1) -> Tensor:
    """The slips: unbiased standard deviation, ε outside the root. Shown as a mistake."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=correction) + eps)


torch.manual_seed(0)
noise = 1e-4 * torch.randn(1, 64)
slip = wrong_layer_norm(noise, correction=0).abs().max()  # the second slip alone
print(f"noise: ours {LayerNorm(64)(noise).abs().max().item():.2f}, ε outside {slip:.2f}")

# %% [markdown]
# The first slip leaves (D − 1)/D of the variance. For the second: with ε under the root we divide by $\sqrt{10^{-8} + 10^{-5}}$ = 0.0032, and noise stays small. With ε outside
# we divide by $10^{-4} + 10^{-6}$, and the noise becomes a full signal.
#
# ## Before or after
#
# > **In short.** The paper normalises *after* adding (post-norm). Most models since normalise *before* the
# > sublayer (pre-norm, `norm_first`).

# %%
titled(
    wirings(),
    "In pre-norm no LayerNorm stands on the road of x",
    "An encoder layer, read from the bottom. In post-norm each LayerNorm stands on the road; in pre-norm "
    "the road is free from bottom to top.",
    wrap=60,
)

# %% [markdown]
# **Pitfall.** A text may state post-norm above code that runs pre-norm. A test: give the class a sublayer that returns zeros. Pre-norm must return $x$ itself, post-norm LayerNorm($x$).

# %%
x = 3 * torch.randn(4, 7, 16) + 1
post, pre = (SublayerConnection(16, 0.1, norm_first) for norm_first in (False, True))
torch.testing.assert_close(post(x, torch.zeros_like), F.layer_norm(x, (16,)))
assert torch.equal(pre(x, torch.zeros_like), x)

# %% [markdown]
# ## What the residual connection carries
#
# > **In short.** A sublayer doesn't replace its input: it adds a correction to it. The gradient gets a
# > direct road back. We measure what else is kept.
#
# A sublayer $f$ with a residual connection computes
#
# $$ y = x + f(x), \qquad \frac{\partial y}{\partial x} = I + \frac{\partial f}{\partial x} . $$
#
# The $I$ is the gradient's road. But forwards, too, $x$ carries something: what distinguishes one position from the others. Attention gives means over positions, and means differ less than their terms.
#
# **Your turn.** Measure how different the positions of a sequence are.


# %% tags=["yours"]
def difference(x: Tensor) -> Tensor:
    """What is left of x (B, T, D) without the mean over its T positions: a norm, as share of x's.

    It is 0 if the positions of each sequence are alike, whatever the sequences of the batch are.
    """
    return (x - x.mean(1, keepdim=True)).norm() / x.norm()


# %%
alike = torch.randn(5, 1, 4).expand(5, 7, 4)  # each sequence repeats one vector
assert difference(alike) < 1e-9, "positions are alike; sequences and features needn't be"
apart = torch.tensor([[[1.0, 0], [-1, 0], [0, 0]], [[0, 4]] * 3])  # two words, (2, 3, 2)
assert abs(difference(apart) - 0.2) < 1e-9, "√((1² + 1²) / (1² + 1² + 3 · 4²)) is 1/5"

# %% [markdown]
# Our model has the paper's depth, but is narrow. `small` gives some or all linear maps PyTorch's start for `nn.Linear`, whose numbers are smaller than Xavier's, and `residual=False` takes the $x +$ away.


# %%
ALL_SMALL = "attn feed_forward generator"  # words that name every linear map


class NoResidual(SublayerConnection):
    """The same without its x +: x (B, T, D) to (B, T, D)."""

    def forward(self, x: Tensor, sublayer) -> Tensor:
        return sublayer(self.norm(x)) if self.norm_first else self.norm(sublayer(x))


def deep_model(norm_first: bool, small="", residual=True, seed=0) -> EncoderDecoder:
    """Six and six layers of D = 32 for words, in float32.

    A linear map starts as PyTorch starts it, with smaller numbers than Xavier's, if a word of
    `small` is part of its name. Biases start at 0.
    """
    torch.manual_seed(seed)
    model = make_model(VOCAB, VOCAB, 6, 32, 64, 4, dropout=0.0, norm_first=norm_first)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and any(word in name for word in small.split()):
            nn.init.kaiming_uniform_(part.weight, a=math.sqrt(5))
    for layer in (*model.encoder.layers, *model.decoder.layers):
        if not residual:
            layer.sublayer = clones(NoResidual(32, 0.0, norm_first), len(layer.sublayer))
    return model.float()


# %%
def layer_signals(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> pd.DataFrame:
    """How different the positions are after each layer, and the norm of the loss's gradient there.

    src (B, S) and tgt (B, T) are words of one length and their reversals; E0 and D0 are the
    embeddings, E1, D1, … the layers' outputs. The loss is the cross-entropy of the labels.
    """
    x, y = model.src_embed(src), model.tgt_embed(tgt[:, :-1])
    states, causal = {"E0": x}, subsequent_mask(y.size(1))
    for n, layer in enumerate(model.encoder.layers, 1):
        x = states[f"E{n}"] = layer(x)  # (B, S, D)
    memory, states["D0"] = model.encoder.norm(x), y
    for n, layer in enumerate(model.decoder.layers, 1):
        y = states[f"D{n}"] = layer(y, memory, None, causal)  # (B, T − 1, D)
    logits = model.generator(model.decoder.norm(y))  # (B, T − 1, V)
    loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(states.values()))
    differences = [difference(x).item() for x in states.values()]
    columns = {"difference": differences, "gradient": [g.norm().item() for g in gradients]}
    return pd.DataFrame({"layer": list(states)} | columns)


# %% [markdown]
# **Predict.** The $x +$ or the start could keep positions different. We cross them. Which encoders do so through six layers?

# %%
batch, parts = reversals(32, (6, 6), torch.Generator().manual_seed(0)), []
for residual, small, norm_first in product((True, False), ("", ALL_SMALL), (False, True)):
    name = ("pre-norm, " if norm_first else "post-norm, ") + ("PyTorch's" if small else "Xavier's")
    model = deep_model(norm_first, small, residual).double()
    parts.append(layer_signals(model, *batch).assign(model=name, residual=residual))
signals = pd.concat(parts)
encoders = signals[signals.layer.str.startswith("E")]
last = encoders[encoders.layer.isin(["E4", "E5", "E6"])].groupby("residual").difference
assert last.min()[True] > 0.1 and last.max()[False] < 1e-8
titled(
    collapse(encoders),
    "Without residual connections all positions become alike",
    "Untrained encoders, post-norm and pre-norm, from both starts: four lines with the x +, four without "
    "(log scale, cut at 1e-8).",
)

# %% [markdown]
# The $x +$ decides. Without it positions are alike after four layers, from either start, in pre-norm, too (Dong et al., 2021). Such a memory doesn't tell *where* a letter stood.
#
# **Predict.** Now the decoders, with $x +$. In which do positions stay most different, and where does the gradient fade on its way down?

# %%
kept = signals[signals.residual & signals.layer.str.startswith("D")]
at = kept.set_index(["model", "layer"])
fade = at.gradient.xs("D6", level="layer") / at.gradient.xs("D1", level="layer")
d6 = at.xs("D6", level="layer").assign(fade=fade)
print(d6[["difference", "fade"]].round(2).sort_values("difference"))
worst, others = d6.loc["post-norm, Xavier's"], d6.drop("post-norm, Xavier's")
assert worst.difference < 0.1 and others.difference.min() > 0.25
assert worst.fade > 5 and others.fade.max() < 2
titled(
    layer_lines(kept, ["difference", "gradient"], "model"),
    "From Xavier's start, post-norm's decoder makes positions alike and loses gradient",
    "Before training. Left: difference of positions after each decoder layer. Right: gradient there.",
    wrap=76,
)

# %% [markdown]
# Left: at D6 the difference is 2% in post-norm from Xavier's start, 42% in pre-norm, and 60% or more from PyTorch's. Right: post-norm from Xavier's start loses most gradient (`fade`): D1 gets a seventh of D6's. That needn't hurt: Adam rescales each weight's gradient.
#
# ## One table, three uses
#
# > **In short.** One table can turn words into vectors and vectors into word scores; the source words can use it, too (§3.4).
#
# With the table $E$ (V, D) in the generator, $\text{logits} = y E^\top + b$: a score is the dot product of the output with
# the word's own embedding. Tied means **the same memory**, so the gradients of all uses add up.
#
# Which spread should its numbers have? A lookup sums over nothing, so Xavier's formula doesn't apply. It multiplies the row
# by $\sqrt D$ (chapter 3). In the generator, a score is a dot product of D terms with a vector of variance 1. With variance $1/D$, embeddings and
# logits both have a spread of about 1, and post-norm's first loss is about $\ln V + \frac12$.
#
# **Pitfall.** Weights may be called shared when they are only equal. So compare storage, not values.


# %%
def storage_addresses(model: EncoderDecoder) -> tuple[int, int, int]:
    """Where source table, target table and generator matrix lie in memory."""
    tables = (model.src_embed[0].lut, model.tgt_embed[0].lut, model.generator.proj)
    return tuple(table.weight.untyped_storage().data_ptr() for table in tables)


tied, copied = (make_model(60, 60, 1, 32, 64, 4, 0.0, tie=tie) for tie in ("all", "none"))
copied.load_state_dict(tied.state_dict())  # the same numbers in three tables
for name, model in (("tied", tied), ("copied", copied)):
    print(f"{name}: tables in memory: {len(set(storage_addresses(model)))}")

# %% [markdown]
# The copy's tables are equal, but no longer after a step.
#
# ## Does post-norm need warm-up?
#
# > **In short.** Warm-up, the LayerNorm's place and the start are three knobs. We turn one at a time.
#
# In *warm-up* the learning rate rises slowly from 0 (§5.3). It is known to rescue post-norm (Xiong et al., 2020). The deep models reverse words: `decaf` becomes `faced`. The optimizer is Adam (chapter 6).
#
# **Your turn.** Write one step of training.


# %% tags=["yours"]
def reversal_step(model: EncoderDecoder, optimizer, src: Tensor, tgt: Tensor) -> float:
    """One step on words src (B, S) and their reversals tgt (B, T), padded; its loss as a number.

    The decoder reads tgt without its last id and must say tgt without its first. The loss is the
    cross-entropy in nats, the mean over all labels but `PAD`. Masks: padding in the source, the
    future in the target. Gradients of an earlier step are cleared. The model gives vectors, its
    `generator` makes logits of them.
    """
    causal = subsequent_mask(tgt.size(1) - 1)
    logits = model.generator(model(src, tgt[:, :-1], padding_mask(src), causal))  # (B, T − 1, V)
    loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# %% [markdown]
# The check takes two steps of gradient descent by hand, each word alone and without padding.

# %%
torch.manual_seed(0)
by_hand = make_model(VOCAB, VOCAB, 1, 16, 32, 2, 0.0)
model, (src, tgt) = copy.deepcopy(by_hand), reversals(4, (2, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
sum(p.sum() for p in model.parameters()).backward()  # gradients left over from earlier
for step in (1, 2):
    parts = []
    for s, t in zip(src, tgt, strict=True):
        s, t = s[s != PAD][None], t[t != PAD][None]  # (1, S), (1, T)
        logits = by_hand.generator(by_hand(s, t[:, :-1], None, subsequent_mask(t.size(1) - 1)))
        parts.append(F.cross_entropy(logits[0], t[0, 1:], reduction="none"))  # (T − 1,)
    loss = torch.cat(parts).mean()
    gradients = torch.autograd.grad(loss, list(by_hand.parameters()))
    for p, gradient in zip(by_hand.parameters(), gradients, strict=True):
        p.data -= 0.5 * gradient
    off = reversal_step(model, optimizer, src, tgt) - loss.item()
    assert isinstance(off, float), "the loss as a number: a tensor keeps its whole graph"
    assert abs(off) < 1e-9, f"step {step}: the loss is off by {off:.4f}: PAD, masks, shift?"
    same = map(torch.allclose, model.parameters(), by_hand.parameters())
    assert all(same), f"step {step} differs: is it taken, are old gradients cleared?"
assert model.training, "training goes on: the model stays in train mode"


# %%
def first_steps(model, rate: float, warmup=1, seed=0, steps=120) -> list[float]:
    """Train with Adam, each step on 32 new words of 4 to 6 letters; the loss of each step.

    The learning rate rises to `rate` in `warmup` steps and stays. `seed` chooses the words.
    """
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    words, losses = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        adam.param_groups[0]["lr"] = rate * min(1, step / warmup)
        losses.append(reversal_step(model, adam, *reversals(32, (4, 6), words)))
    return losses


# %% [markdown]
# A model that only counts places and reads nothing pays ln 10 nats for each letter, five on average, and ln 3 for the length. Over six labels that is 2.1 each.
#
# **Predict.** Three runs begin with Xavier's start, at the rate 0.004: post-norm, post-norm with warm-up, and pre-norm. Which will learn to read?

# %%
# NBVAL_IGNORE_OUTPUT
curves = {
    "post-norm": first_steps(deep_model(norm_first=False), 0.004),
    "post-norm, warm-up": first_steps(deep_model(norm_first=False), 0.004, warmup=40),
    "pre-norm": first_steps(deep_model(norm_first=True), 0.004),
}
blind = (5 * math.log(10) + math.log(3)) / 6  # nats, if nothing is read
print(f"{blind:.2f}", {name: round(sum(losses[-20:]) / 20, 2) for name, losses in curves.items()})

# %% [markdown]
# Here post-norm without warm-up doesn't even reach the loss of counting places. With warm-up it learns to read, slowly; pre-norm needs none. So the LayerNorm's place seems to decide.
#
# **Predict.** The same rate, no warm-up, but PyTorch's start: how far will post-norm get, and pre-norm?

# %%
# NBVAL_IGNORE_OUTPUT
for name, norm_first in (("post-norm, PyTorch's", False), ("pre-norm, PyTorch's", True)):
    curves[name] = first_steps(deep_model(norm_first, ALL_SMALL), 0.004)
titled(
    curves_of(curves | {"reads nothing": [blind] * 120}, every=20),
    "From PyTorch's start, post-norm learns without warm-up",
    "A point is the mean of the twenty steps around it. All at the rate 0.004.",
)

# %%
end = {name: sum(losses[-20:]) / 20 for name, losses in curves.items()}
assert end["pre-norm"] + 0.5 < end["post-norm, warm-up"] < end["post-norm"] - 0.1
assert max(end["post-norm, PyTorch's"], end["pre-norm, PyTorch's"]) < end["pre-norm"] - 0.1

# %% [markdown]
# From PyTorch's start post-norm falls behind pre-norm for a while, then both end below Xavier's pre-norm. Here the start did more than place or warm-up.
#
# ## At every rate
#
# > **In short.** One rate and seed prove little. The record crosses placement, start and warm-up at three rates, three seeds each; the five runs above have ten.
#
# **Predict.** Does warm-up help post-norm more than pre-norm? At which of the three rates?

# %%
record = pd.DataFrame(load_record("first-steps-reversal")["runs"])
record["start"] = record.small.map({"": "Xavier's start", ALL_SMALL: "PyTorch's start"})
record["place"] = record.norm_first.map({False: "post-norm", True: "pre-norm"})
record["model"] = record.place + record.warmup.map({1: "", 40: ", warm-up"})
grid = record[record.residual & record.start.notna()]
means = grid.groupby(["start", "place", "rate", "warmup"]).loss.mean().unstack()
print("what warm-up gains:", (means[1] - means[40]).unstack().round(2), sep="\n")
best = means.groupby(["start", "place"]).min()  # each with its better rate
assert (best[1] - best[40]).abs().max() < 0.1
titled(
    by_rate(grid, "start", "model", blind),
    "At the best of three rates, warm-up gains none of the four models 0.1",
    "Thin lines: seeds; thick: their means; dashed: a model that reads nothing. The last twenty of 120 steps.",
)

# %% [markdown]
# Warm-up gains most where the rate is too high: at 0.008 post-norm 0.4 nats from Xavier's start and 1.3 from PyTorch's, pre-norm 0.2 and 0.0. At 0.001 it costs up to 0.3, for forty of 120 steps are slower.
# At the best of these three rates it gains each model less than 0.1. So here it doesn't cure post-norm: it makes too high a rate bearable, and post-norm meets such a rate sooner.
# Chapter 19's translators do gain from it at their best rates, but equally: post-norm 0.17 nats, pre-norm 0.18.
#
# The start matters more: each at its best rate, post-norm ends at 1.5 from Xavier's, 0.9 above pre-norm, and at 0.2 from PyTorch's, level with it.
#
# Without residual connections (at 0.001, with warm-up) the means are 2.05 to 2.13, as if they read nothing.
#
# Also on record: post-norm at 0.004, without warm-up, with PyTorch's start in one kind of part. **Predict.** Which part alone helps most: the attentions, the feed-forward networks, or the generator?

# %%
alone = record[record.residual & (record.rate == 0.004) & (record.warmup == 1) & (record.seed < 3)]
models = [deep_model(run.norm_first, run.small, seed=run.seed) for run in alone.itertuples()]
before = [layer_signals(model, *batch).difference.iloc[-1] for model in models]  # at D6
rows = alone.assign(difference=before).groupby(["place", "small"])[["difference", "loss"]].mean()
rows.sort_values("difference").round(2)

# %% [markdown]
# Attention's: post-norm ends at 1.1, between Xavier's 2.1 and the 0.2 with PyTorch's start everywhere. The feed-forward networks or the generator alone gain little. Different positions go with learning, but don't decide: pre-norm from Xavier's start has less difference and learns better.
#
# ## Summary
#
# - Xavier's variance, $2/(n_\text{in} + n_\text{out})$, keeps a signal's size if as many numbers go in as out. Biases start at 0, tables with variance 1/D.
# - LayerNorm brings each token's vector to mean 0 and variance 1, with the *biased* variance and ε under the root.
# - Without the $x +$ all positions become alike within four layers, whatever the start.
# - From Xavier's start, post-norm's decoder makes positions alike too, more slowly, and learns worse than pre-norm at every rate. PyTorch's start in the attentions helps it; in all parts, at its best rate, it ends level with pre-norm.
# - Warm-up helps where the rate is too high, which post-norm meets sooner. At the best of three rates, no model here needs it.
#
# ## What the paper did that we don't
#
# - `make_model`'s default is the post-norm of the paper's text; the models that we train from chapter 7 on are pre-norm.
# - The paper doesn't say what its matrices start with.
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
# ### Exercise 3 · Which of attention's matrices?
#
# *code · difficulty ●○○ · worth ●●● · 10 minutes*
#
# Which of attention's four matrices must start small? Try `deep_model(False, "project_query project_key")` and `deep_model(False, "project_value project_output")`. Measure the difference at D6, predict which will learn at 0.004 without warm-up, and train both.
#
# <details><summary>An answer</summary>
#
# With small values and outputs the difference is 0.34 to 0.50 (four seeds), with small queries and keys 0.01 to 0.05. Queries and keys decide *which* mean is added, values and outputs how much of it. Three seeds ended at 0.7, 1.5, 1.8 with small values and outputs, at 2.0, 2.1, 1.8 with small queries and keys: two agree.
#
# </details>
#
# Next: [Chapter 6 · Training](ch06_training.ipynb)
