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
# After this chapter you can start a deep model so that it learns, choose between post-norm and pre-norm, and tell what warm-up does from
# what a lower learning rate does.
#
# | | |
# |---|---|
# | In the paper | §3.1 (residual connections and LayerNorm), §3.4 (shared tables), §5.3 (warm-up) |
# | Time | 20 minutes to read, 50 with the code; under a minute to run on a CPU |
# | Before, after | [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb) · [Chapter 6 · Training](ch06_training.ipynb) |
#
# *If you read only three cells:* the charts under "A road for the gradient", "Warm-up, or a lower rate?" and "At every rate".
#
# Shapes as before: **B** batch, **S** source length, **T** target length, **D** = `d_model`, **V** vocabulary, **N** layers.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import copy
import math
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import heatmap, lines, titled
from scripts.book.exercises import check
from scripts.book.figures.model import decades, layer_lines, wirings
from scripts.book.figures.starts import by_rate
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import (
    EncoderDecoder,
    LayerNorm,
    PositionwiseFeedForward,
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
# Let the entries of $x$ be independent with variance 1, and those of $W$ ($n_\text{in}$ to $n_\text{out}$) independent with mean 0. An entry of $xW$ sums $n_\text{in}$ products,
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
# **Predict.** A signal of spread (standard deviation) 1 goes through twelve 512 × 512 matrices. Entries of spread 0.1 multiply its scale by $0.1\sqrt{512} ≈ 2.26$ each time. PyTorch's
# default for `nn.Linear` has variance $1/(3 n_\text{in})$. What spread is left with each, and with Xavier?

# %%
starts = {
    "N(0, 0.1²)": lambda w: nn.init.normal_(w, std=0.1),
    "PyTorch's": lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
    "Xavier's": nn.init.xavier_uniform_,
}
for name, start in starts.items():
    torch.manual_seed(0)
    x = torch.randn(64, 512)  # (B, D)
    for _ in range(12):
        x = x @ start(torch.empty(512, 512)).T
    print(f"{name:10} {x.std().item():12.4f}")

# %% [markdown]
# Xavier's start keeps the signal's size. PyTorch's loses a factor of $\sqrt3$ each time, 729 in twelve. N(0, 0.1²) multiplies it by some 18,000.
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


layers = clones(PositionwiseFeedForward(32, 64, 0.0), 6)
for name, start in (("wrong", wrong_initialise), ("right", initialise)):
    start(layers)
    biases = torch.stack([layer.expand.bias for layer in layers])  # (N, 64)
    alike, zero = bool((biases == biases[0]).all()), bool((biases == 0).all())
    print(f"{name}: biases alike in all six layers: {alike}, all zero: {zero}")

# %% [markdown]
# ## A road for the gradient
#
# > **In short.** A layer doesn't replace its input: it adds a correction to it. So the gradient
# > has a direct road from the loss back to every layer.
#
# A sublayer $f$ with a residual connection computes
#
# $$ y = x + f(x), \qquad \frac{\partial y}{\partial x} = I + \frac{\partial f}{\partial x} . $$
#
# Without the $x +$, the gradient at the bottom of a stack
# has gone through N Jacobians $\partial f/\partial x$. If each shrinks it a little, it shrinks exponentially with N. With the $x +$, each factor
# is the identity plus something.
#
# **Your turn.** How much of a gradient gets through a stack? PyTorch's `torch.autograd.grad(y, x, upstream)` needs the gradient that arrives at y.


# %% tags=["yours"]
def input_gradient(stack: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor) -> float:
    """The norm of the gradient at x for the gradient `upstream` at y = stack(x), over upstream's.

    x and `upstream` are (B, D), y too. x itself is left as it is.
    """
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(stack(x), x, upstream)  # (B, D)
    return (gradient.norm() / upstream.norm()).item()


# %%
torch.manual_seed(0)
x, upstream, weight = torch.randn(3, 8, 8)
by_hand = (upstream * (1 - (x @ weight).tanh() ** 2)) @ weight.T  # (B, D)
for _ in range(2):  # a second call must not add to the first
    error = input_gradient(lambda x: (x @ weight).tanh(), x, upstream) * upstream.norm()
    assert abs(error - by_hand.norm()) < 1e-9, (
        "not the gradient of this upstream, by the chain rule"
    )

# %% [markdown]
# **Predict.** Two things could keep a gradient alive: the $x +$ and the start. We cross them. How much reaches the input of 24 layers in each of the four stacks?


# %%
def tanh_stack(x: Tensor, depth: int, residual: bool, start: Callable[[Tensor], Tensor]) -> Tensor:
    """x (B, D) through `depth` layers of a random matrix and tanh, each added to its input or not."""
    for _ in range(depth):
        change = (x @ start(torch.empty(x.size(1), x.size(1))).T).tanh()  # (B, D)
        x = x + change if residual else change
    return x


# %%
rows = []
for name, residual in (("with x +", True), ("without", False)):
    for start in ("Xavier's", "PyTorch's"):
        for n in (1, 4, 8, 12, 16, 20, 24):
            torch.manual_seed(0)
            x, upstream = torch.randn(2, 32, 64)  # (B, D) each
            stack = partial(tanh_stack, depth=n, residual=residual, start=starts[start])
            size = input_gradient(stack, x, upstream)
            rows.append({"layers": n, "gradient": size, "stack": f"{name}, {start}"})
reach = pd.DataFrame(rows)
deepest = reach[reach.layers == 24].set_index("stack").gradient
print(deepest.map("{:.1e}".format).to_string())
titled(
    decades(reach, "layers", "gradient", "stack", range(-6, 2, 2), range(0, 25, 4)),
    "TODO",
    "The size of the gradient at the bottom of the stack, for a gradient of size 1 at the top (log scale).",
    wrap=72,
)

# %% [markdown]
# TODO
#
# ## LayerNorm
#
# > **In short.** Every token's vector is brought to the same scale: mean 0, variance 1. Then the model may stretch and shift each feature.
#
# Chapter 4 gave the formula; its variance is the mean of the D squares, $\sigma^2 = \frac1D \sum_i (x_i - \mu)^2$.
# LayerNorm looks at no other token, so a token's result doesn't depend on the batch or on padding. The small $\epsilon$ keeps the root above 0 for a constant vector.

# %%
torch.manual_seed(0)
vectors = torch.tensor([[0.1], [1.0], [3.0]]) * torch.randn(3, 8) + torch.tensor(
    [[0.0], [4.0], [0.0]]
)
normed = LayerNorm(8)(vectors).detach()
both = torch.cat((vectors, normed))  # (6, D)
assert both[3:].abs().max() < 2.5 and both[:3].abs().amax(1).max() > 5
titled(
    heatmap(
        both,
        [f"{when} {i}" for when in ("before", "after") for i in (1, 2, 3)],
        column_title="feature",
        scheme="diverging",
        numbers=True,
        digits=1,
    ),
    "Small, shifted or large: after LayerNorm all three vectors have one scale",
    "Each row is one token's vector of eight numbers.",
)

# %% [markdown]
# **Pitfall.** Two slips look harmless: the *unbiased* standard deviation (dividing by D − 1, the default of `x.std()`),
# and ε added to the standard deviation instead of to the variance under the root. The model still
# trains, but its weights fit no other implementation.
#
# **Predict.** The input is noise of size 10⁻⁴. How large are the entries of the output with
# ε = 10⁻⁵ under the root, and with 10⁻⁶ outside?


# %%
def wrong_layer_norm(x: Tensor, eps: float = 1e-6, correction: int = 1) -> Tensor:
    """The slips: unbiased standard deviation, ε outside the root. Shown as a mistake."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=correction) + eps)


torch.manual_seed(0)
for size in (8, 512):
    variance = wrong_layer_norm(torch.randn(200, size)).var(-1, correction=0).mean()
    print(f"D = {size:3}: variance {variance:.4f} instead of 1")
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
    "In pre-norm nothing stands on the road of x",
    "An encoder layer, read from the bottom. In post-norm each LayerNorm stands on the road; in pre-norm "
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
# TODO deep model


# %%
ALL_SMALL = "attn feed_forward generator"  # words that name every linear map


class WithoutResidual(SublayerConnection):
    """The same without its x +."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, D) to (B, T, D)."""
        return sublayer(self.norm(x)) if self.norm_first else self.norm(sublayer(x))


def deep_model(
    norm_first: bool, small: str = "", residual: bool = True, seed: int = 0
) -> EncoderDecoder:
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
            layer.sublayer = clones(WithoutResidual(32, 0.0, norm_first), len(layer.sublayer))
    return model.float()


# %% [markdown]
# **Predict.** Of four untrained models, two are post-norm and two pre-norm; two have Xavier's start and two PyTorch's. In which do the outputs grow with depth? In which does the gradient fade on its way down?


# %%
def layer_signals(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> pd.DataFrame:
    """Each layer's output spread, and the gradient's norm there, in the first step on src and tgt.

    src (B, S) and tgt (B, T) are words and their reversals, padded. The loss is cross-entropy.
    """
    mask, causal = padding_mask(src), subsequent_mask(tgt.size(1) - 1)
    x, y, outputs = model.src_embed(src), model.tgt_embed(tgt[:, :-1]), {}
    for n, layer in enumerate(model.encoder.layers, 1):
        x = outputs[f"E{n}"] = layer(x, mask)  # (B, S, D)
    memory = model.encoder.norm(x)
    for n, layer in enumerate(model.decoder.layers, 1):
        y = outputs[f"D{n}"] = layer(y, memory, mask, causal)  # (B, T − 1, D)
    logits = model.generator(model.decoder.norm(y))  # (B, T − 1, V)
    loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)
    gradients = torch.autograd.grad(loss, list(outputs.values()))
    sizes = {"output spread": [x.std().item() for x in outputs.values()]}
    return pd.DataFrame(
        {"layer": list(outputs)} | sizes | {"gradient": [g.norm().item() for g in gradients]}
    )


# %%
signals = []
for start, small in (("Xavier's", ""), ("PyTorch's", ALL_SMALL)):
    for place, norm_first in (("post-norm", False), ("pre-norm", True)):
        model = deep_model(norm_first, small)
        batch = reversals(32, (4, 6), torch.Generator().manual_seed(0))
        signals.append(layer_signals(model, *batch).assign(model=f"{place}, {start}"))
        gradient = signals[-1].set_index("layer").gradient
        print(f"{place:9} {start:9} gradient at D6 / D1 = {gradient['D6'] / gradient['D1']:.1f}")
titled(
    layer_lines(pd.concat(signals), ["output spread", "gradient"], "model"),
    "Only post-norm with Xavier's start loses its gradient down the decoder",
    "Before any training. E1 to E6 are the encoder's layers, D1 to D6 the decoder's. Left: what a layer gives. "
    "Right: the gradient that arrives at its output.",
    wrap=76,
)

# %% [markdown]
# TODO signals
#
# ## One table, three uses
#
# > **In short.** The table that turns words into vectors has the shape of the matrix that turns vectors into word
# > scores. The paper uses one for both, and for the source words too (§3.4).
#
# With the table $E$ (V, D) in the generator, $\text{logits} = y E^\top + b$: a word's score is the dot product of the model's output with
# that word's own embedding. Tied means **the same memory**, so the gradients of all uses add up.
#
# **Pitfall.** Weights may be called shared when they are only equal. So compare storage, not values: after one step, copies differ.


# %%
def storage_addresses(model: EncoderDecoder) -> tuple[int, int, int]:
    """Where source table, target table and generator matrix lie in memory."""
    tables = (model.src_embed[0].lut, model.tgt_embed[0].lut, model.generator.proj)
    return tuple(table.weight.untyped_storage().data_ptr() for table in tables)


tied, copied = (make_model(60, 60, 1, 32, 64, 4, 0.0, tie=tie) for tie in ("all", "none"))
copied.load_state_dict(tied.state_dict())  # the same numbers in three tables
for name, model in (("tied", tied), ("copied", copied)):
    print(f"{name}: {len(set(storage_addresses(model)))} in memory")

# %% [markdown]
# A tied table is looked up *and* multiplied. One spread suits both uses: $1/\sqrt D$. A lookup picks one row and sums over nothing, so Xavier's formula doesn't apply. The row is multiplied
# by $\sqrt D$ (chapter 3). In the generator, a score is a dot product of D terms with a vector of variance 1. With entries of variance $1/D$, embeddings and
# logits both have a spread of about 1.
#
# A model that knows nothing has a loss of $\ln V$. If logits are independent $N(0, s^2)$ with a small $s$, then
# $\ln \sum_j e^{z_j} ≈ \ln V + s^2/2$, which is about the first loss.
#
# **Predict.** V = 5000, so $\ln V$ = 8.52; D = 128. What will the first loss be for a table drawn from N(0, 1), PyTorch's default for `nn.Embedding`?

# %%
torch.manual_seed(0)
model = make_model(5000, 5000, 1, 128, 256, 4, 0.0, tie="all")
src, tgt, labels = torch.randint(4, 5000, (3, 16, 12))  # (B, T) ids each
for name, std in (("1/√D, ours", 128**-0.5), ("1, PyTorch's default", 1.0)):
    nn.init.normal_(model.generator.proj.weight.data, std=std)  # tied: all three tables
    logits = model.generator(model(src, tgt, None, subsequent_mask(12))).detach()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    print(f"spread {name:20} logits {logits.std().item():5.1f}, first loss {loss:5.1f}")

# %% [markdown]
# With N(0, 1), $s = \sqrt{128}$ isn't small, and the formula (72.5) can't be trusted. If the first loss of a training is much above
# $\ln V + \frac12$, something is already wrong.
#
# ## Warm-up, or a lower rate?
#
# > **In short.** TODO
#
# In *warm-up* the learning rate rises slowly from 0 (§5.3). It is said to rescue post-norm. We train the paper's six and six layers, narrow ones, on this part's task, reversing words: `decaf` becomes `faced`. A word has 4 to 6 letters, so a model can learn within 200 steps. The optimizer is Adam; chapter 6 explains it.
#
# **Your turn.** One step of training.


# %% tags=["yours"]
def reversal_step(
    model: EncoderDecoder, optimizer: torch.optim.Optimizer, src: Tensor, tgt: Tensor
) -> float:
    """One step on words src (B, S) and their reversals tgt (B, T), padded; returns its loss.

    The decoder reads tgt without its last id and must say tgt without its first. The loss is the
    cross-entropy in nats, the mean over all labels but `PAD`. Masks: padding in the source, the
    future in the target. Gradients of an earlier step are cleared.
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
for step in (1, 2):
    parts = []
    for s, t in zip(src, tgt, strict=True):
        s, t = s[s != PAD][None], t[t != PAD][None]  # (1, S), (1, T)
        logits = by_hand.generator(by_hand(s, t[:, :-1], None, subsequent_mask(t.size(1) - 1)))
        parts.append(F.cross_entropy(logits[0], t[0, 1:], reduction="none"))  # (T − 1,)
    loss = torch.cat(parts).mean()
    gradients = torch.autograd.grad(loss, list(by_hand.parameters()))
    with torch.no_grad():
        for p, gradient in zip(by_hand.parameters(), gradients, strict=True):
            p -= 0.5 * gradient
    error = abs(reversal_step(model, optimizer, src, tgt) - loss.item())
    assert error < 1e-9, f"step {step}: the loss is off by {error:.4f}"
for mine, p in zip(model.parameters(), by_hand.parameters(), strict=True):
    assert torch.allclose(mine, p), "after two steps: are old gradients cleared?"


# %%
def first_steps(
    model: EncoderDecoder, rate: float, warmup: int = 1, seed: int = 0, steps: int = 160
) -> list[float]:
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
# **Predict.** A model that knows only how often each id comes has a loss of TODO. Three runs have the rate 0.004. Which of them will learn?

# %%
# NBVAL_IGNORE_OUTPUT
curves = {
    "post-norm": first_steps(deep_model(norm_first=False), 0.004),
    "post-norm, warm-up": first_steps(deep_model(norm_first=False), 0.004, warmup=40),
    "pre-norm": first_steps(deep_model(norm_first=True), 0.004),
}
end = {name: sum(losses[-20:]) / 20 for name, losses in curves.items()}
for name, loss in end.items():
    print(f"{name:20} {loss:.2f}")

# %% [markdown]
# TODO
#
# **Predict.** TODO

# %%
# NBVAL_IGNORE_OUTPUT
for name, norm_first in (("post-norm, small start", False), ("pre-norm, small start", True)):
    curves[name] = first_steps(deep_model(norm_first, ALL_SMALL), 0.004)
frame = pd.DataFrame(curves).groupby(lambda step: step // 20 * 20 + 10).mean()
frame = frame.rename_axis("step").reset_index().melt("step", var_name="model", value_name="loss")
titled(
    lines(frame, "step", "loss", "model", zero=True),
    "With a small start, post-norm needs no warm-up",
    "Means of twenty steps, all at the rate 0.004.",
)

# %%
end = {name: sum(losses[-20:]) / 20 for name, losses in curves.items()}
assert end["pre-norm"] < end["post-norm, warm-up"] < end["post-norm"], "TODO"
assert end["post-norm, small start"] < 0.5

# %% [markdown]
# ## At every rate
#
# TODO

# %%
record = pd.DataFrame(load_record("first-steps-reversal")["runs"])
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
# 2. In post-norm with N = 6 the decoder's gradient fades from D6 to D1 by the factor that the chart's cell prints. By what factor will it fade from D18 to D1 with N = 18? Then run it.
#
# <details><summary>An answer</summary>
#
# 1. The Jacobians are $I + \frac12 J$ and $\frac12 (I + J)$. The first product contains $I$ itself, so the gradient arrives. The second
#    is $2^{-24}$ = 6·10⁻⁸ times that of a free road.
# 2. TODO
#
# </details>
#
# Next: [Chapter 6 · Training](ch06_training.ipynb)
