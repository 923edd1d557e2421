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
# # Chapter 4 · Encoder and decoder
#
# After this chapter you can build the whole Transformer from the parts of chapters 1 to 3, say how many numbers
# it learns and why, and prove that it computes the same as PyTorch's own `nn.Transformer`.
#
# | | |
# |---|---|
# | In the paper | §3.1 (stacks), §3.3 (feed-forward), §3.4 (embeddings and softmax), §5.4 (dropout), Table 3 |
# | Reading | about 50 minutes |
# | Running | under a minute on a CPU; no GPU needed |
# | Before | [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb) |
# | After | [Chapter 6 · Training](ch06_training.ipynb) |
#
# Shapes, here and everywhere: **B** batch, **S** source length, **T** target length, **D** = `d_model`,
# **H** heads, **V** vocabulary. New here: **F** = `d_ff`, the width inside the feed-forward layer, and **N**, the number of layers.

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
import math
import warnings
from collections.abc import Callable
from typing import Literal

import altair as alt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import GREY, heatmap, lines, titled
from scripts.book.exercises import blame, rejection, same_numbers
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import (
    MAX_LEN,
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
)

# %% [markdown]
# Every example below runs in double precision, so that "equal" can be checked to many digits.

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The map
#
# > **In short.** The encoder reads the source sentence and leaves one vector for each source token: the *memory*.
# > The decoder writes the target sentence. Each of its layers looks at what is already written, and at the memory.
#
# Both are stacks of N equal-looking layers; the paper has N = 6. Note the one thing that diagrams of this model often
# blur: the decoder's *first* layer does not see the encoder's first layer. All decoder layers see the same thing,
# the output of the encoder's **last** layer.


# %%
def stack_chart(N: int = 6) -> alt.TopLevelMixin:
    """The two stacks of N layers each, and the memory that every decoder layer reads (Figure 1)."""
    boxes, arrows = [], []

    def box(x: float, y: float, text: str, kind: str) -> None:
        boxes.append({"x": x - 80, "x2": x + 80, "y": y, "y2": y + 22, "text": text, "kind": kind})

    def arrow(*points: tuple[float, float]) -> None:
        name = len(arrows)
        arrows.extend(
            {"x": x, "y": y, "order": i, "arrow": name, "tip": i == len(points) - 1}
            for i, (x, y) in enumerate(points)
        )

    top = 40 + 34 * N  # where the last layer stands
    for x, side, ids in (
        (100, "encoder", "source ids (B, S)"),
        (420, "decoder", "target ids (B, T)"),
    ):
        box(x, 0, ids, "ids")
        box(x, 40, "embedding + position", "ids")
        arrow((x, 22), (x, 38))
        for n in range(1, N + 1):
            box(x, 40 + 34 * n, f"{side} layer {n}", side)
            arrow((x, 28 + 34 * n), (x, 38 + 34 * n))
    box(100, top + 34, "memory (B, S, D)", "memory")
    arrow((100, top + 22), (100, top + 32))
    for n in range(1, N + 1):
        arrow((180, top + 45), (260, top + 45), (260, 51 + 34 * n), (337, 51 + 34 * n))
    box(420, top + 34, "generator", "ids")
    box(420, top + 74, "logits (B, T, V)", "ids")
    arrow((420, top + 22), (420, top + 32))
    arrow((420, top + 56), (420, top + 72))
    return _box_chart(boxes, arrows, width=520, height=top + 110)


def _box_chart(boxes: list[dict], arrows: list[dict], width: int, height: int) -> alt.TopLevelMixin:
    """Labelled boxes and polyline arrows on a canvas of `width` by `height` pixels, y upwards."""
    fills = {"ids": "#EEEEEE", "encoder": "#CFE3F2", "decoder": "#F7D9C4", "memory": "#CDEBDD"}
    fills |= {"attention": "#CFE3F2", "memory attention": "#CDEBDD", "feed-forward": "#F7D9C4"}
    fills |= {"norm": "#F3E3F0", "add": "#FFFFFF"}
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, width], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-12, height - 12], nice=False))
    frame = pd.DataFrame(boxes)
    middle = frame.assign(x=(frame.x + frame.x2) / 2, y=(frame.y + frame.y2) / 2)
    used = list(dict.fromkeys(frame.kind))
    color = alt.Color(
        "kind:N", legend=None, scale=alt.Scale(domain=used, range=[fills[kind] for kind in used])
    )
    rects = (
        alt.Chart(frame)
        .mark_rect(stroke=GREY, strokeWidth=1, cornerRadius=4)
        .encode(x=x, y=y, x2="x2:Q", y2="y2:Q", color=color)
    )
    text = alt.Chart(middle).mark_text(fontSize=12).encode(x=x, y=y, text="text:N")
    wires = pd.DataFrame(arrows)
    path = (
        alt.Chart(wires)
        .mark_line(color=GREY, strokeWidth=1.3)
        .encode(x=x, y=y, detail="arrow:N", order="order:Q")
    )
    steps = wires.groupby("arrow")[["x", "y"]].diff().loc[wires.tip]  # the last leg of each arrow
    tips = wires[wires.tip].assign(angle=[90 * (dx > 0) - 90 * (dx < 0) for dx in steps.x])
    heads = (
        alt.Chart(tips)
        .mark_point(shape="triangle-up", filled=True, size=50, color=GREY, opacity=1)
        .encode(x=x, y=y, angle=alt.Angle("angle:Q", scale=None))
    )
    return alt.layer(path, rects, text, heads).properties(width=width, height=height)


# %%
titled(
    stack_chart(6),
    "Two stacks and one bridge",
    "Read from the bottom. Only the memory, the last encoder layer's output, crosses over; "
    "each of the six decoder layers reads it.",
)

# %% [markdown]
# The rest of the chapter builds this from the inside out: first what holds a deep stack together (residual connections and
# LayerNorm), then the layers, then the stacks, then the whole.
#
# ## Residual connections
#
# > **In short.** A layer doesn't replace its input, it adds a correction to it. So there is always a direct road
# > from the loss back to every layer.
#
# A sublayer $f$ with a residual connection computes
#
# $$ y = x + f(x), \qquad \frac{\partial y}{\partial x} = I + \frac{\partial f}{\partial x}, $$
#
# with $x, y$ of shape (B, T, D) and $f$ keeping that shape. Without the $x +$, the gradient that reaches the bottom of a stack
# is a product of N Jacobians. If each shrinks a vector a little, the product shrinks it exponentially. With it, each factor
# is the identity plus something.
#
# The price: input and output of every sublayer must have the same width. That is why all of them, embeddings included, have
# the one width D (§3.1).


# %%
def input_gradient(depth: int, residual: bool, size: int = 64) -> float:
    """Norm of the gradient at the input of `depth` random tanh layers, per unit at the output."""
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
depths = [1, 2, 4, 8, 12, 16, 20, 24]
reach = pd.DataFrame(
    [
        {"layers": n, "connection": name, "gradient": input_gradient(n, residual)}
        for name, residual in (("with x +", True), ("without", False))
        for n in depths
    ]
)
deepest = reach[reach.layers == 24].set_index("connection").gradient
assert deepest["with x +"] > 1 and deepest["without"] < 1e-5
titled(
    lines(
        reach,
        "layers",
        "gradient",
        "connection",
        y_title="gradient at the input",
        x_title="number of layers",
        log_y=True,
        points=True,
    ),
    "Residual connections carry the gradient",
    "The size of the gradient at the bottom of the stack, for a gradient of size 1 at the top (log scale).",
)

# %% [markdown]
# Each plain layer loses about half of the gradient, so that 24 layers leave about a millionth.
# With residual connections nothing is lost. It even grows somewhat: that is what normalisation is for.
#
# ## LayerNorm
#
# > **In short.** Before (or after) each sublayer, every token's vector is brought to the same scale: mean 0, variance 1. Then
# > the model may stretch and shift each feature as it likes.
#
# For one vector $x \in \mathbb{R}^D$ with entries $x_i$, and learned $\gamma, \beta \in \mathbb{R}^D$,
#
# $$ \mu = \frac1D \sum_i x_i, \qquad \sigma^2 = \frac1D \sum_i (x_i - \mu)^2, \qquad
# \mathrm{LayerNorm}(x)_i = \gamma_i \, \frac{x_i - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta_i . $$
#
# The small $\epsilon$ keeps the root away from 0 for a constant vector. Nothing here looks at another token or another
# sentence: a token's result doesn't depend on its company in the batch, nor on padding.


# %%
class LayerNorm(nn.Module):
    """Each vector shifted to mean 0 and scaled to variance 1, then a learned scale and shift.

    The variance is the biased one and `eps` stands under the root (Ba et al. 2016), so that the
    result is that of `nn.LayerNorm`.
    """

    def __init__(self, features: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., D)."""
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)  # (..., 1) each
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


# %% [markdown]
# Check: against `nn.LayerNorm`, forward and all three gradients, on ordinary, tiny and constant vectors.

# %%
torch.manual_seed(0)
ours, theirs = LayerNorm(16), nn.LayerNorm(16)
for norm in (ours, theirs):
    norm.load_state_dict({"weight": torch.linspace(0.5, 2, 16), "bias": torch.linspace(-1, 1, 16)})
data = torch.cat((torch.randn(4, 16), 1e-3 * torch.randn(4, 16), torch.ones(1, 16)))  # (9, D)
results = []
for norm in (ours, theirs):
    x = data.clone().requires_grad_()
    y = norm(x)
    results.append((y, *torch.autograd.grad(y.sin().sum(), (x, norm.weight, norm.bias))))
for mine, reference in zip(*results, strict=True):
    torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)

# %% [markdown]
# Picture: five tokens, eight features, each token on its own scale. LayerNorm treats each *row* alone.

# %%
torch.manual_seed(4)
scales = torch.tensor([0.3, 1.0, 2.0, 0.5, 1.5]).unsqueeze(1)  # (5, 1)
tokens = torch.randn(5, 8) * scales + torch.tensor([2.0, 0.0, -1.0, -2.0, 1.0]).unsqueeze(1)
normed = LayerNorm(8)(tokens).detach()
torch.testing.assert_close(normed.mean(-1), torch.zeros(5), atol=1e-12, rtol=0)
torch.testing.assert_close(normed.var(-1, correction=0), torch.ones(5), atol=1e-3, rtol=0)
names = [f"token {i}" for i in range(1, 6)]
look = {
    "scheme": "diverging",
    "domain": (-4, 4),
    "cell": 36,
    "digits": 1,
    "column_title": "feature",
}
titled(
    alt.hconcat(
        *[
            heatmap(values, names, **look).properties(title=alt.Title(name, fontSize=13))
            for name, values in (("before", tokens), ("after", normed))
        ]
    ),
    "Before and after LayerNorm",
    "Before: rows differ in level and in spread. After: every row has mean 0 and variance 1; what is left is "
    "the pattern inside the row.",
)

# %% [markdown]
# **Pitfall.** Two slips that look harmless: taking the *unbiased* standard deviation (divide by D − 1, which is what `x.std()`
# does by default), and adding ε to the standard deviation instead of to the variance under the root. The model still
# trains. But it is no LayerNorm: weights can't be carried to or from any other implementation. Notice it by the variance
# of the result, which should be 1 and is (D − 1)/D.


# %%
def wrong_layer_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """The slip: unbiased standard deviation, ε outside the root. Shown to be refused."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)


# %%
torch.manual_seed(0)
rows = []
for size in (8, 16, 64, 512):
    x = torch.randn(200, size)
    right = F.layer_norm(x, (size,))
    torch.testing.assert_close(LayerNorm(size)(x), right)
    wrong = wrong_layer_norm(x)
    rows.append(
        {
            "D": size,
            "variance, ours": LayerNorm(size)(x).var(-1, correction=0).mean().item(),
            "variance, wrong": wrong.var(-1, correction=0).mean().item(),
            "largest difference from nn.LayerNorm": (wrong - right).abs().max().item(),
        }
    )
slips = pd.DataFrame(rows).round(4)
assert (slips.iloc[:, -1] > 1e-3).all()  # never equal, not even at D = 512
slips

# %% [markdown]
# At D = 8 an entry is off by more than a tenth; at D = 512 still by thousandths, which is far more than rounding.
# The second slip alone: a nearly constant vector. With ε under the root, LayerNorm of it is
# small. With 10⁻⁶ outside, even noise of size 10⁻⁴ is blown up to size 1.

# %%
noise = 1e-4 * torch.randn(1, 64)
print(f"ours:  largest entry {LayerNorm(64)(noise).abs().max().item():.2f}")
print(f"wrong: largest entry {wrong_layer_norm(noise).abs().max().item():.2f}")
assert LayerNorm(64)(noise).abs().max() < 0.2 < 1 < wrong_layer_norm(noise).abs().max()

# %% [markdown]
# ## Putting them together: post-norm or pre-norm
#
# > **In short.** The paper normalises *after* adding. Most models since normalise *before* the sublayer. One switch
# > chooses, and the difference is larger than it looks.
#
# With a sublayer $f$ and dropout on its result (§5.4), for $x$ of shape (B, T, D):
#
# | | formula | `norm_first` |
# |---|---|---|
# | post-norm, the paper's (§3.1) | $\mathrm{LayerNorm}(x + \mathrm{Dropout}(f(x)))$ | `False` |
# | pre-norm | $x + \mathrm{Dropout}(f(\mathrm{LayerNorm}(x)))$ | `True` |
#
# In pre-norm nothing stands on the road of $x$: it is only ever added to. In post-norm every sublayer's LayerNorm stands
# on that road.


# %%
class SublayerConnection(nn.Module):
    """A residual connection around a sublayer, with dropout and LayerNorm (§3.1, §5.4).

    Post-norm, the paper's: LayerNorm(x + Dropout(Sublayer(x))).
    Pre-norm (`norm_first`): x + Dropout(Sublayer(LayerNorm(x))).
    """

    def __init__(self, size: int, dropout: float, norm_first: bool = False):
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, D) to (B, T, D)."""
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


# %% [markdown]
# Check: both against the formula written out with PyTorch's functions.

# %%
torch.manual_seed(0)
x, matrix = torch.randn(2, 5, 16), torch.randn(16, 16)


def example_sublayer(x: Tensor) -> Tensor:
    """Any function that keeps the shape will do."""
    return (x @ matrix).tanh()


post = F.layer_norm(x + example_sublayer(x), (16,))
pre = x + example_sublayer(F.layer_norm(x, (16,)))
torch.testing.assert_close(SublayerConnection(16, 0.0)(x, example_sublayer), post)
torch.testing.assert_close(SublayerConnection(16, 0.0, norm_first=True)(x, example_sublayer), pre)
assert (post - pre).abs().max() > 0.5  # they are different models

# %% [markdown]
# **Pitfall.** A text that states post-norm over code that runs pre-norm. It happens because the paper's own code changed to
# pre-norm later, and tutorials mixed both. Then a reader debugs a formula that never ran, and weights
# don't fit. A test in one line tells which one a class is: give it a sublayer that returns zeros.
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


class WrongPostNorm(nn.Module):
    """LayerNorm(x + Sublayer(x)), it claims, and computes x + Sublayer(LayerNorm(x))."""

    def __init__(self, size: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, D) to (B, T, D)."""
        return x + self.dropout(sublayer(self.norm(x)))


# %%
assert is_post_norm(SublayerConnection(16, 0.1), 16)
assert not is_post_norm(SublayerConnection(16, 0.1, norm_first=True), 16)
assert not is_post_norm(WrongPostNorm(16, 0.1), 16)  # whatever its docstring says

# %% [markdown]
# ## The feed-forward layer
#
# > **In short.** Attention moves information between positions. The feed-forward layer works on each position alone: widen,
# > keep what is positive, narrow again. Two thirds of an encoder layer's numbers sit here.
#
# $$ \mathrm{FFN}(x) = \max(0,\; x W_1 + b_1)\, W_2 + b_2 $$
#
# with $x \in \mathbb{R}^{D}$ at one position, $W_1$ (D, F), $b_1$ (F), $W_2$ (F, D), $b_2$ (D). The paper has D = 512, F = 2048 (§3.3).


# %%
class PositionwiseFeedForward(nn.Module):
    """max(0, x·W₁ + b₁)·W₂ + b₂ at each position alike (§3.3, equation 2)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1):
        super().__init__()
        self.expand = nn.Linear(d_model, d_ff)
        self.contract = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) to (B, T, D), through (B, T, d_ff)."""
        return self.contract(self.dropout(self.expand(x).relu()))


# %% [markdown]
# Check 1: the paper says that this is two convolutions with kernel size 1. A convolution slides a window over the positions
# and applies the same weights in each; a window of one position is just "the same at each position". So copy the
# weights into `nn.Conv1d` and compare, gradients too. (`Conv1d` wants channels before positions, hence the transposes.)

# %%
torch.manual_seed(0)
feed_forward = PositionwiseFeedForward(16, 64, dropout=0.0)
first, second = nn.Conv1d(16, 64, kernel_size=1), nn.Conv1d(64, 16, kernel_size=1)
for conv, linear in ((first, feed_forward.expand), (second, feed_forward.contract)):
    conv.load_state_dict({"weight": linear.weight.unsqueeze(-1), "bias": linear.bias})

x = torch.randn(2, 5, 16)
by_linear = feed_forward(x)  # (B, T, D)
by_conv = second(first(x.transpose(1, 2)).relu()).transpose(1, 2)  # (B, T, D)
torch.testing.assert_close(by_linear, by_conv)

by_linear.sin().sum().backward()
by_conv.sin().sum().backward()
for conv, linear in ((first, feed_forward.expand), (second, feed_forward.contract)):
    torch.testing.assert_close(conv.weight.grad.squeeze(-1), linear.weight.grad)
    torch.testing.assert_close(conv.bias.grad, linear.bias.grad)

# %% [markdown]
# Check 2: no position influences another. Chapter 1's `influence` said *whether* an output reacts to an input. Here is its
# finer sister, which says *how strongly*: the norm of the Jacobian's block for each pair of positions.


# %%
def influence_strength(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """How strongly output position t of `function` reacts to input position s: (T, S).

    x (1, S, D), function(x) (1, T, D); the norm of the Jacobian's block for each pair, by autograd.
    """
    jacobian = torch.autograd.functional.jacobian(function, x)  # (1, T, D, 1, S, D)
    return jacobian[0, :, :, 0].norm(dim=(1, 3))  # (T, S)


# %% [markdown]
# **Predict.** Which cells will be empty for the feed-forward layer, for self-attention, for causal self-attention?

# %%
torch.manual_seed(1)
x = torch.randn(1, 6, 16)
attend = MultiHeadedAttention(4, 16, dropout=0.0)
maps = {
    "feed-forward": influence_strength(feed_forward, x),
    "self-attention": influence_strength(lambda x: attend(x, x, x), x),
    "causal self-attention": influence_strength(lambda x: attend(x, x, x, subsequent_mask(6)), x),
}
off_diagonal, later = ~torch.eye(6, dtype=torch.bool), ~subsequent_mask(6)[0]
assert (maps["feed-forward"][off_diagonal] == 0).all()
assert (maps["self-attention"] > 0).all()
assert (maps["causal self-attention"][later] == 0).all()


def influence_chart(maps: dict[str, Tensor]) -> alt.TopLevelMixin:
    """Influence maps side by side, each scaled to its own largest entry."""
    shades = {"cell": 26, "numbers": False, "domain": (0, 1), "value_title": "influence"}
    shades |= {"column_title": "input position", "row_title": "output position"}
    return alt.hconcat(
        *[
            heatmap(m / m.max(), **shades).properties(title=alt.Title(name, fontSize=13))
            for name, m in maps.items()
        ]
    )


titled(
    influence_chart(maps),
    "Who can influence whom",
    "Dark: the output at this row's position reacts strongly to the input at this column's. White: not at all. "
    "Only attention carries anything between positions, and a causal mask only forwards.",
)

# %% [markdown]
# ## A layer of the encoder
#
# > **In short.** Look around (self-attention), then think (feed-forward); each in its own residual connection.
#
# `clones` makes N copies that look alike but own their weights.


# %%
def clones(module: nn.Module, N: int) -> nn.ModuleList:
    """N independent copies of `module`."""
    return nn.ModuleList(copy.deepcopy(module) for _ in range(N))


# %%
class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in its residual connection (§3.1)."""

    def __init__(
        self,
        size: int,
        self_attn: MultiHeadedAttention,
        feed_forward: PositionwiseFeedForward,
        dropout: float,
        norm_first: bool = False,
    ):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm_first), 2)

    def forward(self, x: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to (B, S, D)."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, src_mask))
        return self.sublayer[1](x, self.feed_forward)


# %%
class Encoder(nn.Module):
    """N encoder layers; pre-norm ends with one more LayerNorm, as its last sum is not yet normed."""

    def __init__(self, layer: EncoderLayer, N: int, norm_first: bool = False):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size) if norm_first else nn.Identity()

    def forward(self, x: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to the memory (B, S, D)."""
        for layer in self.layers:
            x = layer(x, src_mask)
        return self.norm(x)


# %% [markdown]
# Why the extra norm at the end of pre-norm? Its output is a plain sum of everything that was ever added, on no particular
# scale. Post-norm's last act is a LayerNorm already, so there a second one is not needed; `nn.Identity` does nothing.
#
# Check: one post-norm layer, step by step, with PyTorch's functions in place of our classes.

# %%
torch.manual_seed(0)
layer = EncoderLayer(
    16, MultiHeadedAttention(4, 16, 0.0), PositionwiseFeedForward(16, 64, 0.0), dropout=0.0
)
x = torch.randn(2, 5, 16)  # (B, S, D)
by_hand = F.layer_norm(x + layer.self_attn(x, x, x), (16,))
by_hand = F.layer_norm(by_hand + layer.feed_forward(by_hand), (16,))
torch.testing.assert_close(layer(x), by_hand)

# %% [markdown]
# The next picture isn't drawn from memory but from the running layer: hooks write down which part is called when. So it can't
# drift away from the code.


# %%
def call_order(layer: nn.Module, *inputs: Tensor) -> list[str]:
    """The names of a layer's parts in the order in which a forward pass finishes them.

    A residual connection (`sublayer.0`, …) is noted twice, when it begins and when it ends.
    """
    order: list[str] = []
    hooks = []
    wanted = ("self_attn", "src_attn", "feed_forward")
    for name, module in layer.named_modules():
        if isinstance(module, SublayerConnection):
            hooks.append(module.register_forward_pre_hook(lambda *_, n=name: order.append(n)))
        if name in wanted or name.startswith("sublayer."):
            hooks.append(module.register_forward_hook(lambda *_, n=name: order.append(n)))
    layer(*inputs)
    for hook in hooks:
        hook.remove()
    return order


def wiring_chart(orders: dict[str, list[str]]) -> alt.TopLevelMixin:
    """Layers side by side as `call_order` recorded them: boxes upwards, residual roads at the right."""
    labels = {
        "self_attn": ("self-attention", "attention"),
        "src_attn": ("cross-attention", "memory attention"),
        "feed_forward": ("feed-forward", "feed-forward"),
        "dropout": ("+", "add"),
        "norm": ("LayerNorm", "norm"),
    }
    boxes, arrows = [], []

    def arrow(*points: tuple[float, float]) -> None:
        number = len({a["arrow"] for a in arrows})
        arrows.extend(
            {"x": x, "y": y, "order": i, "arrow": number, "tip": i == len(points) - 1}
            for i, (x, y) in enumerate(points)
        )

    height = 0
    for column, (title, order) in enumerate(orders.items()):
        x, y = 90 + 190 * column, 34
        boxes.append({"x": x - 80, "x2": x + 80, "y": 0, "y2": 22, "text": title, "kind": "ids"})
        branch = 22.0  # where the running residual road leaves
        for name in order:
            part = name.rsplit(".", 1)[-1]
            if part.isdigit():  # a residual connection begins: its road leaves below the next box
                branch = y - 9
                continue
            text, kind = labels[part]
            half = 12 if kind == "add" else 58
            boxes.append(
                {"x": x - half, "x2": x + half, "y": y, "y2": y + 22, "text": text, "kind": kind}
            )
            arrow((x, y - 12), (x, y - 2))
            if kind == "add":
                arrow((x, branch), (x + 72, branch), (x + 72, y + 11), (x + 15, y + 11))
            if kind == "memory attention":
                arrow((x - 86, y + 11), (x - 61, y + 11))
            y += 34
        arrow((x, y - 12), (x, y))
        height = max(height, y)
    return _box_chart(boxes, arrows, width=190 * len(orders), height=height + 20)


# %%
torch.manual_seed(0)
parts = (MultiHeadedAttention(4, 16, 0.0), PositionwiseFeedForward(16, 64, 0.0))
orders = {
    name: call_order(EncoderLayer(16, *parts, dropout=0.0, norm_first=norm_first), x)
    for name, norm_first in (("post-norm (paper)", False), ("pre-norm", True))
}
first_connection = {name: order[: order.index("self_attn") + 3] for name, order in orders.items()}
assert first_connection["post-norm (paper)"][1:] == [
    "self_attn",
    "sublayer.0.dropout",
    "sublayer.0.norm",
]
assert first_connection["pre-norm"][1:4] == ["sublayer.0.norm", "self_attn", "sublayer.0.dropout"]
titled(
    wiring_chart(orders),
    "An encoder layer, both ways",
    "Read from the bottom. At the right of each column runs the residual road. Left, LayerNorm "
    "stands on it; right, it is free from bottom to top.",
    wrap=60,
)

# %% [markdown]
# **Pitfall.** `nn.ModuleList([layer] * N)` looks like N layers and is one layer, N times: the list holds the same object over
# and over. It runs, it trains, it just has a sixth of the weights. Notice it by counting.


# %%
def wrong_stack(layer: nn.Module, N: int) -> nn.ModuleList:
    """The slip: N references to one layer instead of N layers. Shown to be refused."""
    return nn.ModuleList([layer] * N)


# %%
one = sum(p.numel() for p in layer.parameters())
six = sum(p.numel() for p in clones(layer, 6).parameters())
wrong_six = sum(p.numel() for p in wrong_stack(layer, 6).parameters())
print(f"one layer {one:,} · six clones {six:,} · the wrong six {wrong_six:,}")
assert six == 6 * one and wrong_six == one
assert len({id(part) for part in clones(layer, 6)}) == 6
assert len({id(part) for part in wrong_stack(layer, 6)}) == 1

# %% [markdown]
# ## A layer of the decoder
#
# > **In short.** Three sublayers: look at what is written so far (causal self-attention), look at the source
# > (cross-attention), think (feed-forward).
#
# In cross-attention the *queries* come from the decoder, (B, T, D), and *keys and values* from the memory, (B, S, D). So it
# answers with one vector a target position, whatever the length of the source.


# %%
class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the memory, then feed-forward (§3.1)."""

    def __init__(
        self,
        size: int,
        self_attn: MultiHeadedAttention,
        src_attn: MultiHeadedAttention,
        feed_forward: PositionwiseFeedForward,
        dropout: float,
        norm_first: bool = False,
    ):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm_first), 3)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, D), memory (B, S, D), src_mask (B, 1, S), tgt_mask (B, T, T), to (B, T, D)."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


# %%
class Decoder(nn.Module):
    """N decoder layers; pre-norm ends with one more LayerNorm."""

    def __init__(self, layer: DecoderLayer, N: int, norm_first: bool = False):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size) if norm_first else nn.Identity()

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, D), memory (B, S, D), src_mask (B, 1, S), tgt_mask (B, T, T), to (B, T, D)."""
        for layer in self.layers:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.norm(x)


# %%
torch.manual_seed(0)
parts = (*clones(MultiHeadedAttention(4, 16, 0.0), 2), PositionwiseFeedForward(16, 64, 0.0))
x, memory = torch.randn(1, 6, 16), torch.randn(1, 9, 16)
orders = {
    name: call_order(DecoderLayer(16, *parts, dropout=0.0, norm_first=norm_first), x, memory)
    for name, norm_first in (("post-norm (paper)", False), ("pre-norm", True))
}
assert [name for name in orders["pre-norm"] if "attn" in name or "feed" in name] == [
    "self_attn",
    "src_attn",
    "feed_forward",
]
titled(
    wiring_chart(orders),
    "A decoder layer, both ways",
    "The arrow from the left into cross-attention is the memory. It arrives already normalised, "
    "and is itself never changed by the decoder.",
    wrap=60,
)

# %% [markdown]
# Check: what can a decoder layer's output at position t react to? To target positions up to t, and to the whole memory.

# %%
decoder_layer = DecoderLayer(16, *parts, dropout=0.0)
causal = subsequent_mask(6)
from_target = influence_strength(lambda x: decoder_layer(x, memory, None, causal), x)  # (T, T)
from_memory = influence_strength(
    lambda memory: decoder_layer(x, memory, None, causal), memory
)  # (T, S)
assert (from_target[later] == 0).all() and (from_target[~later] > 0).all()
assert (from_memory > 0).all()
titled(
    influence_chart({"from the target so far": from_target, "from the memory": from_memory}),
    "What one decoder layer sees",
    "Left: nothing from the future. Right: at every step the whole source, here nine tokens.",
)

# %% [markdown]
# ## The generator
#
# > **In short.** One linear map from a vector to a score for each word of the vocabulary.
#
# $\text{logits} = y W + b$ with $y$ (B, T, D), $W$ (D, V), $b$ (V). A softmax turns logits into probabilities. The generator leaves it
# out on purpose: the loss (`F.cross_entropy`) wants logits and applies log-softmax itself; argmax doesn't need it at all.


# %%
class Generator(nn.Module):
    """Vectors to scores over the vocabulary: the linear map before the softmax (§3.4).

    It returns logits (..., V), not probabilities: the loss and the search apply log-softmax
    themselves, once. `narrow` mirrors an embedding table of another width.
    """

    def __init__(self, d_model: int, vocab: int, width: int | None = None):
        super().__init__()
        width = width or d_model
        self.narrow = nn.Identity() if width == d_model else nn.Linear(d_model, width, bias=False)
        self.proj = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to logits (..., V)."""
        return self.proj(self.narrow(x))


# %% [markdown]
# ## The whole model


# %%
class EncoderDecoder(nn.Module):
    """The Transformer: source ids in, one vector for each target position out (Figure 1).

    `generator` turns those vectors into logits; it is called apart, so that a search asks for the
    last position only and the loss for real tokens only.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        src_embed: nn.Module,
        tgt_embed: nn.Module,
        generator: Generator,
    ):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.src_embed = src_embed
        self.tgt_embed = tgt_embed
        self.generator = generator

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """src ids (B, S), src_mask (B, 1, S), to the memory (B, S, D)."""
        return self.encoder(self.src_embed(src), src_mask)

    def decode(
        self,
        memory: Tensor,
        src_mask: Tensor | None,
        tgt: Tensor,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """memory (B, S, D), tgt ids (B, T), tgt_mask (B|1, T, T), to (B, T, D)."""
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """src ids (B, S), tgt ids (B, T), to (B, T, D)."""
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


# %% [markdown]
# `make_model` puts everything together. Two helpers that it calls, `initialise` and `tie_weights`, get their own sections below.


# %%
def initialise(model: nn.Module) -> None:
    """Xavier-uniform matrices, zero biases; embedding tables of spread 1/√D, so that × √D gives 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Embeddings):
            nn.init.normal_(module.lut.weight, std=module.d_model**-0.5)


# %%
def tie_weights(model: EncoderDecoder, tie: Literal["none", "decoder", "all"]) -> None:
    """Share storage between the target embedding and the generator, and with "all" the source's too (§3.4).

    Raises ValueError for another `tie`, or where "all" meets two vocabularies of different sizes.
    """
    if tie not in ("none", "decoder", "all"):
        raise ValueError(f'tie must be "none", "decoder" or "all", not {tie!r}')
    if tie == "none":
        return
    source, target = model.src_embed[0].lut, model.tgt_embed[0].lut
    model.generator.proj.weight = target.weight
    if tie == "all":
        if source.weight.shape != target.weight.shape:
            raise ValueError(
                f"tying all needs one vocabulary, not {source.num_embeddings} source and "
                f"{target.num_embeddings} target tokens"
            )
        source.weight = target.weight


# %%
def make_model(
    src_vocab: int,
    tgt_vocab: int,
    N: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
    *,
    norm_first: bool = False,
    tie: Literal["none", "decoder", "all"] = "none",
    positions: Literal["sinusoidal", "learned"] = "sinusoidal",
    width: int | None = None,
    max_len: int = MAX_LEN,
) -> EncoderDecoder:
    """A Transformer, the paper's base model unless told otherwise (§3, Table 3).

    `dropout` reaches every dropout there is. `norm_first` chooses pre-norm. `tie` shares the
    embedding tables. `width` is the tables' own width where it differs from `d_model`.

    Raises ValueError for sizes or choices that don't fit together.
    """
    kinds = {"sinusoidal": PositionalEncoding, "learned": LearnedPositions}
    if positions not in kinds:
        raise ValueError(f'positions must be "sinusoidal" or "learned", not {positions!r}')
    position = kinds[positions]
    attn = MultiHeadedAttention(h, d_model, dropout)
    ff = PositionwiseFeedForward(d_model, d_ff, dropout)
    copied = copy.deepcopy

    def embed(vocab: int) -> nn.Sequential:
        return nn.Sequential(Embeddings(d_model, vocab, width), position(d_model, dropout, max_len))

    model = EncoderDecoder(
        Encoder(EncoderLayer(d_model, attn, ff, dropout, norm_first), N, norm_first),
        Decoder(
            DecoderLayer(d_model, copied(attn), copied(attn), copied(ff), dropout, norm_first),
            N,
            norm_first,
        ),
        embed(src_vocab),
        embed(tgt_vocab),
        Generator(d_model, tgt_vocab, width),
    )
    initialise(model)
    tie_weights(model, tie)  # last: the shared table keeps the embeddings' scale
    return model


# %% [markdown]
# A small one to play with: 2 + 2 layers, D = 32. Two sentences, the shorter one padded with 0.

# %%
torch.manual_seed(0)
model = make_model(src_vocab=50, tgt_vocab=60, N=2, d_model=32, d_ff=64, h=4, dropout=0.1).eval()
src = torch.tensor([[2, 11, 12, 13, 14, 3], [2, 21, 22, 3, 0, 0]])  # (B, S) ids
tgt = torch.tensor([[2, 31, 32, 33], [2, 41, 42, 0]])  # (B, T) ids
src_mask = padding_mask(src)  # (B, 1, S)
tgt_mask = padding_mask(tgt) & subsequent_mask(tgt.size(1))  # (B, T, T)

memory = model.encode(src, src_mask)
vectors = model(src, tgt, src_mask, tgt_mask)
logits = model.generator(vectors)
assert memory.shape == (2, 6, 32) and vectors.shape == (2, 4, 32) and logits.shape == (2, 4, 60)
torch.testing.assert_close(vectors, model.decode(memory, src_mask, tgt, tgt_mask))

# %% [markdown]
# ### Bad ids are refused
#
# Ids are integers. A float tensor here is nearly always a batch that was normalised or averaged by accident, and booleans are a mask in the wrong
# place. `Embeddings` (chapter 3) says so in one line, and the encoder is not even reached.

# %%
for bad in (src.float(), src > 0, src.to(torch.int16)):
    try:
        model(bad, tgt)
    except TypeError as error:
        print(f"TypeError: {error}")
    else:
        raise AssertionError(f"{bad.dtype} was let through")
torch.testing.assert_close(model(src.int(), tgt.int()), model(src, tgt))  # int32 is fine

# %% [markdown]
# ### Dropout: all of it or none
#
# The paper drops entries in two kinds of places (§5.4): on each sublayer's output, and on the sum of embedding and position;
# later versions of its code also on attention weights and inside the feed-forward layer. `dropout=` must reach *every* one.
#
# **Pitfall.** A factory passes `dropout` on to most parts and forgets the attention, which then keeps its own default of 0.1. Someone
# who asks for `dropout=0.0`, to overfit one batch or to compare two implementations, gets a model that is still random in
# train mode. Notice it by running the model twice.


# %%
def runs_alike(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> bool:
    """Whether two runs in train mode give the same vectors."""
    model.train()
    return torch.equal(model(src, tgt), model(src, tgt))


def wrong_dropout_model(*args, **kwargs) -> EncoderDecoder:
    """The slip: attention modules that never hear of `dropout=0.0`. Shown to be refused."""
    model = make_model(*args, **kwargs)
    for module in model.modules():
        if isinstance(module, MultiHeadedAttention):
            module.dropout = MultiHeadedAttention(module.h, module.h).dropout  # its default: 0.1
    return model


# %%
size = {"N": 2, "d_model": 32, "d_ff": 64, "h": 4, "dropout": 0.0}
torch.manual_seed(0)
assert runs_alike(make_model(50, 60, **size), src, tgt)
assert not runs_alike(wrong_dropout_model(50, 60, **size), src, tgt)
dropouts = [
    m.p
    for m in make_model(50, 60, **size | {"dropout": 0.3}).modules()
    if isinstance(m, nn.Dropout)
]
print(f"{len(dropouts)} dropout layers, all at 0.3: {set(dropouts) == {0.3}}")

# %% [markdown]
# ### Positions are a buffer, not a parameter
#
# The sinusoids are tensors that belong to the model but are never learned. Three places could hold them:
#
# | held as | moves with `.to(device)` | the optimizer changes it | stored in a checkpoint |
# |---|---|---|---|
# | plain attribute | no: crashes on a GPU | no | no |
# | `nn.Parameter` | yes | **yes**: sinusoids no more | yes |
# | buffer, not persistent (ours) | yes | no | no: computed again |

# %%
position = model.src_embed[1]
assert "pe" in dict(position.named_buffers())
assert not list(position.parameters())
assert not any(name.endswith("pe") for name in model.state_dict())
assert copy.deepcopy(position).to(torch.float32).pe.dtype == torch.float32  # it follows the model

learned = make_model(50, 60, **size, positions="learned")
assert isinstance(learned.src_embed[1].pe, nn.Parameter)  # learned positions are the other case

# %% [markdown]
# ## Weight tying
#
# > **In short.** The table that turns words into vectors and the matrix that turns vectors into word scores have the same
# > shape. The paper uses one table for both, and for the source words too (§3.4).
#
# The embedding is a row lookup in $E$ (V, D), and the generator's `nn.Linear` holds its weight as (V, D) too: $\text{logits} = y E^\top + b$.
# A word's score is then the dot product of the model's output with that word's own embedding. Sharing with the source asks for
# *one* vocabulary for both languages. `tie="decoder"` shares target table and generator, `tie="all"` all three.
#
# Tied means: **the same memory**. What one use learns, the other has at once, and gradients of both uses add up.


# %%
def storage_addresses(model: EncoderDecoder) -> tuple[int, int, int]:
    """Where source table, target table and generator matrix lie in memory."""
    tables = (model.src_embed[0].lut, model.tgt_embed[0].lut, model.generator.proj)
    return tuple(table.weight.untyped_storage().data_ptr() for table in tables)


# %%
torch.manual_seed(0)
tied = {tie: make_model(60, 60, **size, tie=tie) for tie in ("none", "decoder", "all")}
rows = []
for tie, variant in tied.items():
    rows.append(
        {
            "tie": tie,
            "tables in memory": len(set(storage_addresses(variant))),
            "parameters": sum(p.numel() for p in variant.parameters()),
        }
    )
sharing = pd.DataFrame(rows)
assert sharing["tables in memory"].tolist() == [3, 2, 1]
assert sharing["parameters"].diff().tolist()[1:] == [-60 * 32, -60 * 32]
sharing

# %% [markdown]
# It stays tied through what a training does: an optimizer step, a deep copy, a change of dtype, saving and loading.

# %%
variant = tied["all"]
twin = copy.deepcopy(variant).to(torch.float32).to(torch.float64)
twin.load_state_dict(variant.state_dict())
loss = F.cross_entropy(twin.generator(twin(src, tgt)).flatten(0, 1), tgt.flatten())
loss.backward()
torch.optim.SGD(twin.parameters(), lr=0.1).step()
assert len(set(storage_addresses(twin))) == 1
assert not torch.equal(
    twin.src_embed[0].lut.weight, variant.src_embed[0].lut.weight
)  # it did learn

# %% [markdown]
# The gradient of a shared table is the sum over its uses. Check: untie a copy, add up its three gradients.

# %%
untied = make_model(60, 60, **size)
untied.load_state_dict(variant.state_dict())  # the same numbers, three tables
grads = {}
for name, m in (("tied", copy.deepcopy(variant)), ("untied", untied)):
    F.cross_entropy(m.generator(m(src, tgt)).flatten(0, 1), tgt.flatten()).backward()
    grads[name] = [
        p.weight.grad for p in (m.src_embed[0].lut, m.tgt_embed[0].lut, m.generator.proj)
    ]
torch.testing.assert_close(grads["tied"][0], sum(grads["untied"]))

# %% [markdown]
# **Pitfall.** Claiming that weights are shared, while nothing is. Either there is no such line, or it is in a branch that never runs,
# or it *copies values* once: equal before the first step, different after it. Comparing values is therefore no test; comparing
# storage is.


# %%
def wrong_tying(model: EncoderDecoder) -> None:
    """The slip: the same numbers copied into three tables. Shown to be refused."""
    with torch.no_grad():
        model.generator.proj.weight.copy_(model.tgt_embed[0].lut.weight)
        model.src_embed[0].lut.weight.copy_(model.tgt_embed[0].lut.weight)


# %%
torch.manual_seed(0)
copied_only = make_model(60, 60, **size)
wrong_tying(copied_only)
assert torch.equal(
    copied_only.generator.proj.weight, copied_only.tgt_embed[0].lut.weight
)  # looks tied
assert len(set(storage_addresses(copied_only))) == 3  # and isn't
F.cross_entropy(
    copied_only.generator(copied_only(src, tgt)).flatten(0, 1), tgt.flatten()
).backward()
torch.optim.SGD(copied_only.parameters(), lr=0.1).step()
assert not torch.equal(copied_only.generator.proj.weight, copied_only.tgt_embed[0].lut.weight)

# %% [markdown]
# Tying everything with two different vocabularies can't be done, and says so:

# %%
try:
    make_model(50, 60, **size, tie="all")
except ValueError as error:
    print(f"ValueError: {error}")
else:
    raise AssertionError("two vocabularies were tied")

# %% [markdown]
# ## Initialisation
#
# > **In short.** A layer should neither amplify nor damp what passes through it, forwards or backwards. For a matrix
# > that means: the more inputs and outputs, the smaller the entries.
#
# If the entries of $x$ are independent with variance 1, and those of $W$ ($n_\text{in}$ to $n_\text{out}$) are independent with mean 0, then each entry of $xW$ has
# variance $n_\text{in}\operatorname{Var}(W)$, and going backwards each gradient entry is multiplied by
# $n_\text{out}\operatorname{Var}(W)$ on average. Both are 1 only if $n_\text{in} = n_\text{out}$. Xavier initialisation (Glorot and Bengio, 2010) takes the middle:
#
# $$ \operatorname{Var}(W) = \frac{2}{n_\text{in} + n_\text{out}}, \qquad W \sim U(-a, a),\; a = \sqrt{\frac{6}{n_\text{in} + n_\text{out}}} . $$
#
# Measured first on a bare stack of square matrices, with no LayerNorm and no residual connection to hide the effect.

# %%
STARTS: dict[str, Callable[[Tensor], object]] = {
    "N(0, 0.1²)": lambda w: nn.init.normal_(w, std=0.1),
    "N(0, 0.02²)": lambda w: nn.init.normal_(w, std=0.02),
    "PyTorch's default": lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
    "Xavier": nn.init.xavier_uniform_,
}


def scale_through(
    start: Callable[[Tensor], object], depth: int = 12, size: int = 512
) -> list[float]:
    """Spread (standard deviation) of the activations after 0, 1, …, `depth` square matrices."""
    torch.manual_seed(0)
    x = torch.randn(64, size)  # (B, D)
    scales = [x.std().item()]
    for _ in range(depth):
        weight = torch.empty(size, size)
        start(weight)
        x = x @ weight.T
        scales.append(x.std().item())
    return scales


# %% [markdown]
# **Predict.** At D = 512, one matrix with entries N(0, 0.1²) multiplies the scale by $0.1\sqrt{512} ≈ 2.26$. PyTorch's default for `nn.Linear` has variance
# $1/(3 n_\text{in})$. What does each make of the scale in twelve steps?

# %%
scales = pd.DataFrame(
    [
        {"matrices": n, "initialisation": name, "scale": scale}
        for name, start in STARTS.items()
        for n, scale in enumerate(scale_through(start))
    ]
)
after_twelve = scales[scales.matrices == 12].set_index("initialisation").scale
assert abs(after_twelve["N(0, 0.1²)"] / (0.1 * 512**0.5) ** 12 - 1) < 0.3
assert 0.5 < after_twelve["Xavier"] < 2
assert abs(after_twelve["PyTorch's default"] / 3**-6 - 1) < 0.3  # √3 lost in each of twelve
titled(
    lines(
        scales,
        "matrices",
        "scale",
        "initialisation",
        x_title="matrices passed",
        y_title="spread of the activations",
        log_y=True,
    ),
    "Xavier keeps the scale",
    "Twelve random 512 × 512 matrices in a row (log scale). Only Xavier's line is flat; entries of size 0.1 gain "
    "a factor of 2.26 a matrix, PyTorch's default loses a factor of 1.73.",
)

# %% [markdown]
# Inside a Transformer LayerNorm and the residual road hide such extremes, so that a badly initialised model still runs, and only
# learns worse. What initialisation sets there is the *share* of each sublayer: how large is what it adds, compared with what
# it is added to?


# %%
def sublayer_shares(model: EncoderDecoder, src: Tensor) -> pd.DataFrame:
    """For each encoder sublayer: the spread of what it adds, over the spread of what it adds it to."""
    rows, hooks = [], []

    def note(connection: nn.Module, inputs: tuple[Tensor, ...], name: str, where: int) -> None:
        x, sublayer = inputs
        if connection.norm_first:
            added = sublayer(connection.norm(x))
        else:
            added = sublayer(x)
        rows.append({"layer": where, "kind": name, "share": (added.std() / x.std()).item()})

    with torch.no_grad():
        for number, layer in enumerate(model.encoder.layers):
            for i, name in enumerate(("self-attention", "feed-forward")):
                where = number + 1
                hook = layer.sublayer[i].register_forward_pre_hook(
                    lambda c, inputs, name=name, where=where: note(c, inputs, name, where)
                )
                hooks.append(hook)
        model.encode(src)
    for hook in hooks:
        hook.remove()
    return pd.DataFrame(rows)


# %%
torch.manual_seed(0)
words = torch.randint(4, 100, (8, 20))  # (B, S) ids
size = {"N": 6, "d_model": 128, "d_ff": 512, "h": 4, "dropout": 0.0}
shares = []
for name in ("Xavier", "PyTorch's default", "N(0, 0.02²)"):
    torch.manual_seed(0)
    started = make_model(100, 100, **size)
    for module in started.modules():
        if isinstance(module, nn.Linear):
            STARTS[name](module.weight.data)
    shares.append(sublayer_shares(started, words).assign(initialisation=name))
shares = pd.concat(shares)
means = shares.groupby(["initialisation", "kind"]).share.mean().unstack()
assert (means.loc["Xavier"] > 2 * means.loc["PyTorch's default"]).all()
assert (means.loc["PyTorch's default"] > 2 * means.loc["N(0, 0.02²)"]).all()


def share_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """One panel a kind of sublayer; a line an initialisation."""
    panels = [
        lines(
            frame[frame.kind == kind],
            "layer",
            "share",
            "initialisation",
            y_title="size of what is added",
            points=True,
            log_y=True,
            width=260,
            height=220,
        ).properties(title=alt.Title(kind, fontSize=13))
        for kind in ("self-attention", "feed-forward")
    ]
    return alt.hconcat(*panels).resolve_scale(y="shared")


titled(
    share_chart(shares),
    "How loudly each sublayer speaks at the start",
    "Six post-norm encoder layers, spread of what a sublayer adds over the spread of what it adds to (log scale). "
    "With entries as small as 0.02 a narrow model's sublayers say next to nothing.",
)

# %% [markdown]
# Embedding tables are no matrices that sum over 512 inputs: a lookup picks *one* row. Their size is set by two uses
# instead. Coming in, the row is multiplied by √D (chapter 3). Going out, when tied, a score is a dot product of D terms. With
# entries of variance 1/D both come out at about 1: that is the reason for the √D, and `initialise` sets it so.

# %%
torch.manual_seed(0)
started = make_model(1000, 1000, N=1, d_model=256, d_ff=512, h=4, dropout=0.0, tie="all")
words = torch.randint(1000, (8, 20))
coming_in = started.src_embed[0](words)
going_out = started.generator(started(words, words))
print(f"embedding spread {coming_in.std():.2f} · logit spread {going_out.std():.2f}")
assert abs(coming_in.std() - 1) < 0.05 and abs(going_out.std() - 1) < 0.1

with torch.no_grad():  # the same with PyTorch's default for nn.Embedding, N(0, 1)
    nn.init.normal_(started.src_embed[0].lut.weight)
    coming_in = started.src_embed[0](words)
    going_out = started.generator(started(words, words))
print(f"with N(0, 1): embedding spread {coming_in.std():.1f} · logit spread {going_out.std():.1f}")
assert coming_in.std() > 15 and going_out.std() > 10

# %% [markdown]
# A logit spread of 16 means a model that is sure of nonsense before it has seen anything.
#
# Check of the formula itself: each matrix of a model has Xavier's spread, each bias is 0, and no two layers are alike.
# The last point isn't obvious: `clones` deep-copies, so right after it all layers *are* alike. They differ because
# `initialise` runs afterwards.

# %%
torch.manual_seed(0)
model = make_model(60, 60, N=6, d_model=128, d_ff=512, h=4)
for module in model.modules():
    if isinstance(module, nn.Linear):
        fan_out, fan_in = module.weight.shape
        assert abs(module.weight.std() / math.sqrt(2 / (fan_in + fan_out)) - 1) < 0.02
        assert (module.bias == 0).all()
first_matrices = [layer.feed_forward.expand.weight for layer in model.encoder.layers]
assert all(not torch.equal(first_matrices[0], other) for other in first_matrices[1:])

# %% [markdown]
# **Pitfall.** Deep copies with a Xavier loop that touches "everything with more than one dimension". Biases have one dimension, so they
# keep what the copying gave them: PyTorch's random default, *the same random numbers in every layer*. Weights differ,
# biases don't, and nobody looks. A bias has no reason to start anywhere but at 0.


# %%
def wrong_initialise(model: nn.Module) -> None:
    """The slip: Xavier for the matrices, and the copied biases left as they are. Shown to be refused."""
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)


def expand_biases(stack: nn.ModuleList) -> Tensor:
    """The first bias of each layer's feed-forward, (N, F)."""
    return torch.stack([layer.feed_forward.expand.bias.detach() for layer in stack])


# %%
torch.manual_seed(0)
parts = (MultiHeadedAttention(4, 32, 0.0), PositionwiseFeedForward(32, 64, 0.0))
wrong_encoder = Encoder(EncoderLayer(32, *parts, dropout=0.0), 6)
wrong_initialise(wrong_encoder)
right_encoder = copy.deepcopy(wrong_encoder)
initialise(right_encoder)

wrong_biases = expand_biases(wrong_encoder.layers)
assert (wrong_biases != 0).all() and (
    wrong_biases == wrong_biases[0]
).all()  # random, six times the same
assert (expand_biases(right_encoder.layers) == 0).all()

# %% [markdown]
# ## Post-norm and pre-norm, measured
#
# Now that there is a model, the switch can be weighed. Both models get the same data at initialisation; we look at each layer of 6 + 6: how large
# are its outputs, and how large is the gradient of its weights?


# %%
def layer_signals(model: EncoderDecoder, src: Tensor, tgt: Tensor, labels: Tensor) -> pd.DataFrame:
    """Each layer's output spread and gradient norm on one batch: src (B, S), tgt and labels (B, T)."""
    layers = [*model.encoder.layers, *model.decoder.layers]
    N = len(model.encoder.layers)
    spread: list[float] = []
    hooks = [m.register_forward_hook(lambda *a: spread.append(a[-1].std().item())) for m in layers]
    model.zero_grad()
    logits = model.generator(model(src, tgt, None, subsequent_mask(tgt.size(1))))  # (B, T, V)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for hook in hooks:
        hook.remove()
    gradient = [
        torch.stack([p.grad.norm() for p in layer.parameters()]).norm().item() for layer in layers
    ]
    place = [f"E{n}" for n in range(1, N + 1)] + [f"D{n}" for n in range(1, len(layers) - N + 1)]
    return pd.DataFrame({"layer": place, "output spread": spread, "gradient norm": gradient})


def signal_chart(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """Output spread and gradient norm by layer, one line a norm placement, encoder and decoder apart."""
    order = list(dict.fromkeys(frame.layer))
    panels = []
    for column in ("output spread", "gradient norm"):
        base = alt.Chart(frame.round(4)).encode(
            x=alt.X("layer:N", sort=order, title="layer", axis=alt.Axis(labelAngle=0)),
            y=alt.Y(f"{column}:Q", title=column, scale=alt.Scale(zero=True)),
            color=alt.Color("placement:N", sort=None, title=None),
            detail="stack:N",
        )
        panels.append(base.mark_line(point={"size": 45}).properties(width=280, height=220))
    return alt.hconcat(*panels)


# %% [markdown]
# **Predict.** In which of the two does the scale grow with depth? In which does the gradient fade on its way down?

# %%
signals = []
for name, norm_first in (("post-norm", False), ("pre-norm", True)):
    torch.manual_seed(0)
    started = make_model(100, 100, **size, norm_first=norm_first)
    batch = torch.randint(4, 100, (3, 16, 12))  # source, target, labels
    signals.append(layer_signals(started, *batch).assign(placement=name))
signals = pd.concat(signals, ignore_index=True)
signals["stack"] = signals.layer.str[0] + signals.placement

by_layer = signals.set_index(["placement", "layer"])
assert (abs(by_layer.loc["post-norm", "output spread"] - 1) < 0.01).all()  # LayerNorm sees to it
growing = by_layer.loc["pre-norm", "output spread"]
assert growing["E6"] > 1.5 * growing["E1"] and growing["D6"] > 1.5 * growing["D1"]
fading = by_layer["gradient norm"]
assert fading["post-norm", "D6"] > 4 * fading["post-norm", "D1"]
assert fading["pre-norm", "D6"] < 1.2 * fading["pre-norm", "D1"]
titled(
    signal_chart(signals),
    "Two placements of one LayerNorm, before any training",
    "E1 to E6 are the encoder's layers, D1 to D6 the decoder's. Post-norm: every output has spread 1, but the decoder's gradient "
    "fades towards its first layers. Pre-norm: outputs grow, gradients are even.",
)

# %% [markdown]
# Post-norm: each layer's LayerNorm rescales the road, so that what the early layers contribute is divided again and again,
# and the gradient with it: the decoder's last layer gets several times the gradient of its first. (The encoder is spared:
# all six decoder layers send it gradient.)
#
# Pre-norm: the sum just grows, each layer's share of it gets smaller, and all layers get about the same gradient
# (Xiong et al., 2020, "On Layer Normalization in the Transformer Architecture").
#
# In practice **pre-norm trains without warm-up, and post-norm wants it**, the more so the deeper the model. Warm-up is a learning
# rate that rises slowly from 0 (chapter 6). A small test: sixty steps of Adam at a constant rate on "copy these six
# symbols", with 6 + 6 layers. Knowing nothing costs ln 10 = 2.30.


# %%
def short_race(norm_first: bool, steps: int = 60, lr: float = 3e-3) -> float:
    """Mean loss of the last ten of `steps` Adam steps without warm-up, on copying six symbols.

    The symbols are ten, so that knowing nothing costs ln 10 = 2.30.
    """
    torch.manual_seed(0)
    model = make_model(12, 12, 6, 32, 64, 4, dropout=0.0, norm_first=norm_first)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-9)
    losses = []
    for _ in range(steps):
        src = torch.randint(2, 12, (16, 6))  # (B, S) ids
        tgt = torch.cat((torch.ones_like(src[:, :1]), src[:, :-1]), dim=1)  # (B, T): shifted right
        logits = model.generator(model(src, tgt, None, subsequent_mask(6)))  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), src.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


# %%
post_norm, pre_norm = short_race(norm_first=False), short_race(norm_first=True)
assert pre_norm < post_norm - 0.3
assert post_norm > 0.8 * math.log(10)  # hardly anything learned yet
print("after 60 steps pre-norm leads by more than 0.3 nats a symbol")

# %% [markdown]
# Pre-norm is well on its way, while post-norm has hardly left the start: it still pays more than 80% of ln 10.
#
# Why then does anyone use post-norm? With warm-up it trains well, and at six layers it often ends a little better. Our
# default is the paper's; `norm_first=True` is one word away, and the training chapters say which one they use.
#
# ## Counting the parameters
#
# > **In short.** Everything is a matrix with a bias, or a LayerNorm. So the count is a short sum, and a check on the code.
#
# | part | numbers | how often |
# |---|---|---|
# | attention | $4(D^2 + D)$: query, key, value, output | N in the encoder, 2N in the decoder |
# | feed-forward | $DF + F + FD + D$ | 2N |
# | LayerNorm | $2D$ | 2N in the encoder, 3N in the decoder; pre-norm: 2 more |
# | embedding tables | $VD$ | 3 if not tied, 1 if all are tied |
# | generator's bias | $V$ | 1 |


# %%
def parameters_by_hand(
    vocab: int, N: int, d_model: int, d_ff: int, *, tie: str = "all", norm_first: bool = False
) -> dict[str, int]:
    """How many numbers each kind of part learns, by arithmetic alone (one vocabulary for both sides)."""
    D, tables = d_model, {"none": 3, "decoder": 2, "all": 1}[tie]
    return {
        "attention": 3 * N * 4 * (D * D + D),
        "feed-forward": 2 * N * (D * d_ff + d_ff + d_ff * D + D),
        "LayerNorm": (5 * N + 2 * norm_first) * 2 * D,
        "embeddings and generator": tables * vocab * D + vocab,
    }


def parameters_by_code(model: EncoderDecoder) -> dict[str, int]:
    """The same, counted on a model; a tied table counts once."""
    counts = dict.fromkeys(
        ("attention", "feed-forward", "LayerNorm", "embeddings and generator"), 0
    )
    for name, parameter in model.named_parameters():  # names a shared parameter once
        if "attn" in name:
            counts["attention"] += parameter.numel()
        elif "feed_forward" in name:
            counts["feed-forward"] += parameter.numel()
        elif "norm" in name:
            counts["LayerNorm"] += parameter.numel()
        else:
            counts["embeddings and generator"] += parameter.numel()
    return counts


# %% [markdown]
# The paper's models share one BPE vocabulary of about 37,000 tokens (§5.1) and tie all tables. Its Table 3 lists 65 million
# parameters for *base* and 213 million for *big*. To count a model of that size we needn't have the memory for it: on
# PyTorch's `meta` device tensors have a shape and no content.

# %%
PAPER_VOCAB = (
    37_000  # English-German: "a shared source-target vocabulary of about 37000 tokens", §5.1
)
PAPER_ROWS = {  # Table 3: N, d_model, d_ff, heads, parameters in millions
    "base": (6, 512, 2048, 8, 65),
    "big": (6, 1024, 4096, 16, 213),
}


def count_table(vocab: int = PAPER_VOCAB) -> pd.DataFrame:
    """Table 3's base and big, counted by hand and by code, beside the paper's figures."""
    rows = []
    for name, (N, d_model, d_ff, h, millions) in PAPER_ROWS.items():
        by_hand = parameters_by_hand(vocab, N, d_model, d_ff)
        with torch.device("meta"):
            by_code = parameters_by_code(make_model(vocab, vocab, N, d_model, d_ff, h, tie="all"))
        if by_hand != by_code:
            raise ValueError(f"the formula says {by_hand}, the model has {by_code}")
        total = sum(by_hand.values())
        layers = total - by_hand["embeddings and generator"]
        rows.append(
            {
                "model": name,
                "by hand": f"{total:,}",
                "by code": f"{sum(by_code.values()):,}",
                "in millions": round(total / 1e6, 1),
                "paper, millions": millions,
                "vocabulary that would match": f"{round((millions * 1e6 - layers) / (d_model + 1)):,}",
            }
        )
    return pd.DataFrame(rows)


# %%
counted = count_table()
assert counted["in millions"].tolist() == [63.1, 214.3]
assert (abs(counted["in millions"] / counted["paper, millions"] - 1) < 0.03).all()
counted

# %% [markdown]
# Base comes out 3% below the paper's figure and big less than 1% above. No single vocabulary would give both: the last column shows
# which one each row would need. So the paper's figures are rounded or counted a little differently (its code has no
# biases in attention, for one: some tens of thousands, not two million). We say what we counted and leave it there.


# %%
def count_chart() -> alt.TopLevelMixin:
    """Where the parameters of three models sit."""
    sizes = {
        "base": (PAPER_VOCAB, 6, 512, 2048),
        "big": (PAPER_VOCAB, 6, 1024, 4096),
        "small, for Multi30k": (8192, 3, 256, 1024),
        "small, not tied": (8192, 3, 256, 1024),
    }
    rows = []
    for name, size in sizes.items():
        counts = parameters_by_hand(*size, tie="none" if "not tied" in name else "all")
        total = sum(counts.values())
        rows += [
            {"model": f"{name} ({total / 1e6:.1f} M)", "part": part, "share": n / total, "order": i}
            for i, (part, n) in enumerate(counts.items())
        ]
    frame = pd.DataFrame(rows).round(4)
    return (
        alt.Chart(frame)
        .mark_bar(size=30)
        .encode(
            x=alt.X(
                "share:Q",
                title="share of the parameters",
                axis=alt.Axis(format="%"),
                scale=alt.Scale(domain=[0, 1]),
            ),
            y=alt.Y("model:N", sort=None, title=None),
            color=alt.Color("part:N", sort=None, title=None, legend=alt.Legend(orient="bottom")),
            order="order:Q",
        )
        .properties(width=460, height=190)
    )


not_tied = parameters_by_hand(8192, 3, 256, 1024, tie="none")
assert not_tied["embeddings and generator"] > 0.5 * sum(not_tied.values())
titled(
    count_chart(),
    "Where the numbers sit",
    "Feed-forward takes the most, LayerNorm too little to be seen. Not tied, the three tables would be more than "
    "half of the small model.",
)

# %% [markdown]
# And a sweep, so that the formula isn't right at two points only:

# %%
for vocab, N, d_model, d_ff in ((17, 1, 8, 12), (101, 3, 16, 40)):
    for tie in ("none", "decoder", "all"):
        for norm_first in (False, True):
            options = {"tie": tie, "norm_first": norm_first}
            counted_model = make_model(vocab, vocab, N, d_model, d_ff, 4, **options)
            by_hand = parameters_by_hand(vocab, N, d_model, d_ff, **options)
            assert parameters_by_code(counted_model) == by_hand
            assert sum(by_hand.values()) == sum(p.numel() for p in counted_model.parameters())

# %% [markdown]
# ## The same as `nn.Transformer`
#
# > **In short.** Copy our weights into PyTorch's Transformer. If every output and every gradient agrees, then each formula above is
# > what the field means by it.
#
# Three things differ in the packaging, and each is a place to go wrong:
#
# - PyTorch stacks query, key and value matrices into one `in_proj_weight` (3D, D).
# - Its masks say what to **hide** (True = ignore), ours what to **allow**.
# - It puts a final LayerNorm on both stacks, *also for post-norm*, where the paper has none. We take it off.


# %%
def to_torch_transformer(model: EncoderDecoder, final_norms: bool | None = None) -> nn.Transformer:
    """PyTorch's own Transformer with `model`'s weights; embeddings and generator stay outside.

    `final_norms`: keep the LayerNorms at the ends of the stacks; by default where `model` has them.
    """
    layer = model.encoder.layers[0]
    norm_first = layer.sublayer[0].norm_first
    if final_norms is None:
        final_norms = norm_first
    with warnings.catch_warnings():  # it remarks that pre-norm can't use its nested tensors
        warnings.simplefilter("ignore")
        theirs = nn.Transformer(
            d_model=layer.size,
            nhead=layer.self_attn.h,
            num_encoder_layers=len(model.encoder.layers),
            num_decoder_layers=len(model.decoder.layers),
            dim_feedforward=layer.feed_forward.expand.out_features,
            dropout=layer.sublayer[0].dropout.p,
            layer_norm_eps=layer.sublayer[0].norm.eps,
            batch_first=True,
            norm_first=norm_first,
        )
    for ours, copy_ in zip(
        [*model.encoder.layers, *model.decoder.layers],
        [*theirs.encoder.layers, *theirs.decoder.layers],
        strict=True,
    ):
        copy_.load_state_dict(torch_layer_state(ours))
    for ours, copy_ in ((model.encoder, theirs.encoder), (model.decoder, theirs.decoder)):
        if norm_first:
            copy_.norm.load_state_dict(ours.norm.state_dict())
        elif not final_norms:
            copy_.norm = None
    return theirs.train(model.training)


def torch_layer_state(layer: EncoderLayer | DecoderLayer) -> dict[str, Tensor]:
    """A layer's weights under the names of `nn.TransformerEncoderLayer` or `…DecoderLayer`."""
    state = {}
    for ours, name in (("self_attn", "self_attn"), ("src_attn", "multihead_attn")):
        attn = getattr(layer, ours, None)
        if attn is not None:
            stacked = (attn.project_query, attn.project_key, attn.project_value)
            state[f"{name}.in_proj_weight"] = torch.cat(
                [part.weight for part in stacked]
            )  # (3D, D)
            state[f"{name}.in_proj_bias"] = torch.cat([part.bias for part in stacked])  # (3D,)
            state[f"{name}.out_proj.weight"] = attn.project_output.weight
            state[f"{name}.out_proj.bias"] = attn.project_output.bias
    feed_forward = {"linear1": layer.feed_forward.expand, "linear2": layer.feed_forward.contract}
    norms = {f"norm{i + 1}": part.norm for i, part in enumerate(layer.sublayer)}
    for name, module in (feed_forward | norms).items():
        state[f"{name}.weight"], state[f"{name}.bias"] = module.weight, module.bias
    return {name: tensor.detach().clone() for name, tensor in state.items()}


# %%
def scramble(model: nn.Module, seed: int = 0, size: float = 0.1) -> None:
    """Move every parameter a little, so that no bias is 0 and no LayerNorm is trivial."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def torch_vectors(
    theirs: nn.Transformer, model: EncoderDecoder, src: Tensor, tgt: Tensor, pad: int = 0
) -> Tensor:
    """What `nn.Transformer` makes of src (B, S) and tgt (B, T), with `model`'s embeddings: (B, T, D)."""
    return theirs(
        model.src_embed(src),
        model.tgt_embed(tgt),
        tgt_mask=~subsequent_mask(tgt.size(1))[0],  # True = hidden
        src_key_padding_mask=src == pad,
        tgt_key_padding_mask=tgt == pad,
        memory_key_padding_mask=src == pad,
    )


# %% [markdown]
# Check: both placements; source and target of different lengths, both padded; outputs and the gradients of *all* parameters.
# Scrambling first matters: with fresh weights all biases are 0 and all LayerNorms alike, and a bias left uncopied would pass.

# %%
src = torch.tensor([[2, 11, 12, 13, 14, 15, 3], [2, 21, 22, 3, 0, 0, 0]])  # (B, S)
tgt = torch.tensor([[2, 31, 32, 33, 34], [2, 41, 42, 0, 0]])  # (B, T)
src_mask, tgt_mask = padding_mask(src), padding_mask(tgt) & subsequent_mask(5)
size = {"N": 3, "d_model": 32, "d_ff": 64, "h": 4, "dropout": 0.0}
for norm_first in (False, True):
    torch.manual_seed(0)
    model = make_model(50, 60, **size, norm_first=norm_first)
    scramble(model)
    theirs = to_torch_transformer(model)
    mine = model(src, tgt, src_mask, tgt_mask)
    reference = torch_vectors(theirs, model, src, tgt)
    torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)

    # padded target positions carry no loss; everything else does
    model.zero_grad()
    reference[tgt != 0].sin().sum().backward()
    table_gradient = model.src_embed[0].lut.weight.grad.clone()
    model.zero_grad()
    mine[tgt != 0].sin().sum().backward()
    torch.testing.assert_close(model.src_embed[0].lut.weight.grad, table_gradient)
    pairs = zip(
        [*model.encoder.layers, *model.decoder.layers],
        [*theirs.encoder.layers, *theirs.decoder.layers],
        strict=True,
    )
    for layer, reference_layer in pairs:
        gradients = copy.deepcopy(layer)  # a layer whose "weights" are the gradients
        for holder, p in zip(gradients.parameters(), layer.parameters(), strict=True):
            holder.data = p.grad
        for name, gradient in torch_layer_state(gradients).items():
            wanted = reference_layer.get_parameter(name).grad
            torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-9)
    print(f"norm_first={norm_first}: outputs and all gradients equal nn.Transformer's")

# %% [markdown]
# **Pitfall.** Comparing post-norm with a plain `nn.Transformer(norm_first=False)` on *fresh* weights passes to five digits, although
# PyTorch has two LayerNorms more than the paper: normalising twice is nearly the same as once while all gains are 1. After some
# training it is another model. Which is why we scrambled:

# %%
torch.manual_seed(0)
model = make_model(50, 60, **size)
for state in ("fresh", "scrambled"):
    if state == "scrambled":
        scramble(model)
    plain = to_torch_transformer(model, final_norms=True)
    gap = (torch_vectors(plain, model, src, tgt) - model(src, tgt, src_mask, tgt_mask)).abs().max()
    print(f"{state}: largest difference from the plain nn.Transformer {gap.item():.4f}")
    assert gap < 1e-3 if state == "fresh" else gap > 0.1

# %% [markdown]
# ## Causality
#
# > **In short.** What the model says at position t may depend on the target up to t. Change a later word: nothing before it may move.
#
# This is the property on which training rests. If the future leaks, the loss falls beautifully, and decoding is garbage, since
# there the future doesn't exist yet.


# %%
def first_change(
    model: EncoderDecoder, src: Tensor, tgt: Tensor, at: int, causal: bool = True
) -> int:
    """Replace the target id at position `at`; the first position whose output differs."""
    mask = subsequent_mask(tgt.size(1)) if causal else None
    changed = tgt.clone()
    changed[:, at] = (changed[:, at] + 1) % model.tgt_embed[0].lut.num_embeddings
    differs = (model(src, tgt, None, mask) - model(src, changed, None, mask)).abs().amax(dim=(0, 2))
    return int((differs > 1e-9).nonzero()[0])


# %% [markdown]
# **Predict.** We change the word at position 3 of 6. Where does the output first differ, with the causal mask, and without?

# %%
torch.manual_seed(0)
model = make_model(50, 60, **size).eval()
source, target = torch.randint(4, 50, (1, 7)), torch.randint(4, 60, (1, 6))
print("with the mask:   ", first_change(model, source, target, at=3))
print("without the mask:", first_change(model, source, target, at=3, causal=False))
for at in range(6):
    assert first_change(model, source, target, at) == at
    assert first_change(model, source, target, at, causal=False) == 0  # the check can fail


# %%
def target_influence(model: EncoderDecoder, src: Tensor, tgt: Tensor, causal: bool) -> Tensor:
    """How the whole decoder's output at t reacts to the target embedding at s: (T, T)."""
    mask = subsequent_mask(tgt.size(1)) if causal else None
    memory = model.encode(src).detach()
    return influence_strength(
        lambda x: model.decoder(x, memory, None, mask), model.tgt_embed(tgt).detach()
    )


influences = {
    "with the causal mask": target_influence(model, source, target, causal=True),
    "without": target_influence(model, source, target, causal=False),
}
assert (influences["with the causal mask"][later] == 0).all()
assert (influences["without"][later] > 0).all()
titled(
    influence_chart(influences),
    "The whole decoder is causal",
    "Left: the future, above the diagonal, has no influence at all, through three layers. Right: without the mask each "
    "position sees the answer that it should predict.",
)

# %% [markdown]
# ## Padding changes nothing
#
# > **In short.** A sentence must get the same result alone and in a batch with longer ones.
#
# Padding is there to make the batch a rectangle. The masks must see to it that no real token ever looks at it. What
# happens *at* the padded positions doesn't matter: nobody reads them.


# %%
def padding_effect(
    model: EncoderDecoder, src: Tensor, tgt: Tensor, extra: int, mask: bool = True
) -> float:
    """Largest change of real positions' outputs when `extra` pads are appended to src and tgt."""

    def run(src: Tensor, tgt: Tensor) -> Tensor:
        causal = subsequent_mask(tgt.size(1))
        if mask:
            return model(src, tgt, padding_mask(src), padding_mask(tgt) & causal)
        return model(src, tgt, None, causal)

    short = run(src, tgt)
    long = run(F.pad(src, (0, extra)), F.pad(tgt, (0, extra)))
    return (long[:, : tgt.size(1)] - short).abs().max().item()


# %%
appended = (0, 1, 2, 3, 4, 6, 8, 12, 16)
effect = {
    mask: [padding_effect(model, source, target, n, mask) for n in appended]
    for mask in (True, False)
}
assert max(effect[True]) < 1e-9
assert min(effect[False][1:]) > 1e-2  # without the mask it shows
pads = pd.DataFrame(
    [
        {"pads": n, "masks": "with padding mask" if mask else "without", "change": round(change, 4)}
        for mask, changes in effect.items()
        for n, change in zip(appended, changes, strict=True)
    ]
)
titled(
    lines(
        pads,
        "pads",
        "change",
        "masks",
        x_title="pads appended",
        y_title="largest change of a real output",
        zero=True,
        points=True,
    ),
    "A sentence doesn't notice its padding",
    "With the mask the outputs at real positions don't change at all; without it, one pad is enough.",
)

# %% [markdown]
# The source mask alone does the work here: pads at the *end* of the target lie in the future of every real token, so the causal mask
# hides them already.
#
# ## What an untrained model says
#
# > **In short.** Almost nothing about every word: near-uniform probabilities, and a loss near ln V. A known starting point is
# > the first check of any training.

# %%
torch.manual_seed(1)
vocab = 1000
model = make_model(vocab, vocab, N=2, d_model=64, d_ff=128, h=4, dropout=0.0, tie="all").eval()
sentence = torch.randint(4, vocab, (1, 8))  # (1, S) ids
written = torch.tensor([[2]])  # (1, 1): only <s>, the start
for _ in range(8):  # the most likely next word, eight times; chapter 6 makes this a function
    states = model(sentence, written, None, subsequent_mask(written.size(1)))
    written = torch.cat((written, model.generator(states[:, -1]).argmax(-1, keepdim=True)), dim=1)
print("source:", sentence[0].tolist())
print("output:", written[0].tolist())

# %% [markdown]
# Not a word of sense, and one word over and over: with tied tables, whatever was just put in gets a high score. Now the
# probabilities behind it:

# %%
batch_src, batch_tgt = torch.randint(4, vocab, (2, 32, 10))  # two of (B, 10) ids
with torch.no_grad():
    states = model(batch_src, batch_tgt[:, :-1], None, subsequent_mask(9))  # (B, 9, D)
    logits = model.generator(states)  # (B, 9, V)
loss = F.cross_entropy(logits.flatten(0, 1), batch_tgt[:, 1:].flatten()).item()
print(f"loss {loss:.2f} · ln V = {math.log(vocab):.2f} · ln V + 1/2 = {math.log(vocab) + 0.5:.2f}")
assert abs(loss - math.log(vocab) - 0.5) < 0.3

# %% [markdown]
# The half is no accident: if logits are N(0, 1), the expected loss is ln V + ½, as E[ln Σ exp z] ≈ ln V + ½. Untied, with
# smaller logits, it comes closer to ln V. Much more than that at the first step means: something is wrong already.


# %%
def rank_chart(probabilities: Tensor) -> alt.TopLevelMixin:
    """Sorted probabilities (V,), the uniform distribution beside them."""
    ordered = probabilities.sort(descending=True).values
    ranks = torch.unique(torch.logspace(0, math.log10(len(ordered)), 60).round().long())
    rows = [
        {"rank": int(r), "of": "untrained model", "p": ordered[r - 1].item()} for r in ranks
    ] + [{"rank": int(r), "of": "uniform, 1/V", "p": 1 / len(ordered)} for r in ranks]
    return lines(
        pd.DataFrame(rows),
        "rank",
        "p",
        "of",
        x_title="word, by rank (log scale)",
        y_title="probability (log scale)",
        log_x=True,
        log_y=True,
    )


next_word = logits[0, -1].softmax(-1)
assert next_word.max() < 20 / vocab
titled(
    rank_chart(next_word),
    "An untrained model's next word",
    "All thousand words from the likeliest to the least. The likeliest has ten times its fair share; a trained model gives one word nearly everything.",
)

# %% [markdown]
# ## Summary
#
# - A sublayer sits in a residual connection, $x + f(x)$: the gradient always has a direct road.
# - LayerNorm brings each token's vector to mean 0 and variance 1, with the *biased* variance and ε under the root.
# - Post-norm (the paper's) holds the scale at 1, but the decoder's gradient fades downwards. Pre-norm lets the scale grow,
#   keeps gradients even, and trains without warm-up.
# - Attention moves information between positions; the feed-forward layer, a 1×1 convolution, works on each alone.
# - The decoder's layers read the target so far and the encoder's last output, the memory.
# - Tied tables are the same memory. Matrices start with Xavier's variance, biases at 0, tables with variance 1/D.
# - Base has 63.1 million parameters with 37,000 tied tokens (paper: 65), big 214.3 (paper: 213).
# - The model equals `nn.Transformer`, is causal, and doesn't notice padding.
#
# ## What the paper did that we don't
#
# - Its code (tensor2tensor) had no biases in the attention projections. §3.2.2 writes plain matrices too. PyTorch's attention has biases, and
#   so do we, to be comparable.
# - Its published *code* moved to pre-norm soon after the paper, whose text and figure say post-norm. Our default follows the text.
# - The paper doesn't say how its matrices start. Its code scaled them by the mean of inputs and outputs, which is what
#   Xavier does.
# - The paper drops attention weights and the feed-forward's inside only in later versions of its code; the text (§5.4) names sublayer outputs and embeddings.
#   We drop in all four places, as `nn.Transformer` does.
# - Its generator has no bias in the code. Ours has one, V numbers, starting at 0.
#
# ## Exercises
#
# Six, from a warm-up to a project. [Chapter 1](ch01_attention.ipynb) says how the checkers work: they are silent when your
# function is right, and otherwise say what is wrong.
#
# ### Exercise 1 *warm-up* · Count an encoder
#
# Write `encoder_parameters(N, d_model, d_ff)`: how many numbers a post-norm encoder of N layers learns, by arithmetic alone. Show
# that with F = 4D it is close to $12 N D^2$. For which vocabulary does the tied table weigh as much as all layers of *base*,
# encoder and decoder?


# %%
def check_encoder_parameters(candidate: Callable[[int, int, int], int]) -> None:
    """Holds candidate(N, d_model, d_ff) against encoders that are built, without memory, and counted."""
    for N, D, F_ in ((1, 4, 6), (3, 8, 20)):
        with torch.device("meta"):
            layer = EncoderLayer(D, MultiHeadedAttention(2, D), PositionwiseFeedForward(D, F_), 0.1)
            stack = Encoder(layer, N)
        sizes = {name: p.numel() for name, p in layer.named_parameters()}
        forgotten = {
            "bias": "each matrix has a bias, one number for each of its outputs",
            "norm": "LayerNorm learns too: a scale and a shift for each feature",
            "sublayer.1.norm": "a layer has one LayerNorm for each of its two sublayers",
            "output": "attention's fourth matrix is missing: where do the joined heads go?",
            "contract": "half of the feed-forward is missing: it widens and narrows again",
        }
        left = {
            said: N * sum(n for name, n in sizes.items() if part not in name)
            for part, said in forgotten.items()
        }
        left[forgotten["bias"]] += N * 2 * D  # LayerNorm's shifts are called biases too
        whole = sum(p.numel() for p in stack.parameters())
        left["that is one layer; there are N"] = whole // N
        got = candidate(N, D, F_)
        if got != whole:
            mistakes = {said: torch.tensor(float(count)) for said, count in left.items()}
            blame(torch.tensor(float(got)), mistakes, "too few" if got < whole else "too many")


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_encoder_parameters(N: int, d_model: int, d_ff: int) -> int:
    """Attention, feed-forward and two LayerNorms, N times."""
    attention = 4 * (d_model * d_model + d_model)
    feed_forward = d_model * d_ff + d_ff + d_ff * d_model + d_model
    return N * (attention + feed_forward + 2 * 2 * d_model)


check_encoder_parameters(solution_encoder_parameters)
assert abs(solution_encoder_parameters(6, 512, 2048) / (12 * 6 * 512**2) - 1) < 0.005
in_layers = sum(parameters_by_hand(0, 6, 512, 2048).values())
print(f"a table of {in_layers / 512:,.0f} words weighs as much as the layers of base")

# %% [markdown]
# The four matrices of attention have $4D^2$ numbers and the feed-forward $2DF = 8D^2$; biases and LayerNorms are some thousandths.
# Whoever forgets them hears:

# %%
print(rejection(check_encoder_parameters, lambda N, D, F: N * (4 * D * D + 2 * D * F + 4 * D)))
print(
    rejection(
        check_encoder_parameters,
        lambda N, D, F: solution_encoder_parameters(N, D, F) - N * 4 * D,
    )
)

# %% [markdown]
# ### Exercise 2 *code* · LayerNorm from two sums
#
# A fast LayerNorm reads each vector once and keeps two sums, $\sum x_i$ and $\sum x_i^2$. Write `two_sums_norm(x, weight, bias, eps)`
# for x (…, D) that computes mean and variance from these two alone. It must be `nn.LayerNorm`'s function, gradients included.
# And when does it go wrong, although the algebra is right?


# %%
def check_two_sums_norm(candidate: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> None:
    """Compares with PyTorch's layer_norm on ordinary and on small vectors, and the gradients by x."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=generator) + 0.5  # (B, T, D)
    x[:, 3:] *= 1e-3  # small vectors, for which ε counts
    weight, bias = torch.linspace(0.5, 2, 8).double(), torch.linspace(-1, 1, 8).double()
    eps, x = 1e-5, x.requires_grad_()
    right = F.layer_norm(x, (8,), weight, bias, eps)
    middle = x - x.mean(-1, keepdim=True)
    spread, unbiased = (x.var(-1, keepdim=True, correction=c) for c in (0, 1))
    mistakes = {
        "the variance is divided by D − 1; LayerNorm's is the biased one": middle
        * (unbiased + eps).rsqrt(),
        "ε stands outside the root": middle / (spread.sqrt() + eps),
        "ε outside, and D − 1 inside: both of the chapter's slips": middle
        / (unbiased.sqrt() + eps),
        "ε is missing: a constant vector would be divided by 0": middle * spread.rsqrt(),
        "the mean is left in": x * (x.square().mean(-1, keepdim=True) + eps).rsqrt(),
        "a mean over all tokens: LayerNorm looks at one vector at a time": (x - x.mean())
        * (x.var(correction=0) + eps).rsqrt(),
        "divided by the variance, not by its root": middle / (spread + eps),
    }
    got = candidate(x, weight, bias, eps)
    if not same_numbers(got, right):
        mistakes = {said: y * weight + bias for said, y in mistakes.items()}
        mistakes["scale and shift come in the wrong order"] = (right - bias) + bias * weight
        blame(got, mistakes, "other numbers than layer_norm's")
    assert got.requires_grad, "no gradient reaches x"
    slopes = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (got, right)]
    assert same_numbers(*slopes), "mean and variance depend on x too: the gradient lacks their part"


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_two_sums_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over x (..., D); the variance is the mean of squares less the square of the mean."""
    mean = x.sum(dim=-1, keepdim=True) / x.size(-1)  # (..., 1)
    variance = x.square().sum(dim=-1, keepdim=True) / x.size(-1) - mean.square()  # (..., 1)
    return (x - mean) * torch.rsqrt(variance + eps) * weight + bias


check_two_sums_norm(solution_two_sums_norm)
torch.manual_seed(0)
far_off = 10_000 + torch.randn(100, 64, dtype=torch.float32)  # spread 1, far from 0
by_sums = far_off.square().mean(-1) - far_off.mean(-1).square()
assert (by_sums - far_off.var(-1, correction=0)).abs().max() > 0.5  # noise, even below 0

# %% [markdown]
# It goes wrong where the mean is large beside the spread. A float32 has seven digits, the squares are near $10^8$, and their
# difference is 1: the digits that were wanted are gone. Kernels that need one pass only use Welford's recurrence instead.
# The chapter's wrong version, and a LayerNorm that forgets that its statistics depend on x:

# %%
print(rejection(check_two_sums_norm, lambda x, w, b, eps: wrong_layer_norm(x, eps) * w + b))
print(
    rejection(
        check_two_sums_norm,
        lambda x, w, b, eps: (
            (x - x.mean(-1, keepdim=True).detach())
            * (x.var(-1, keepdim=True, correction=0).detach() + eps).rsqrt()
            * w
            + b
        ),
    )
)

# %% [markdown]
# ### Exercise 3 *code* · A layer from parts
#
# Write `layer_from_parts(x, attend, think, norms, norm_first)`: an encoder layer made of functions that all keep the shape
# (B, S, D). `attend` is the self-attention, `think` the feed-forward, `norms` the LayerNorms of the first and of the second
# sublayer. With `norm_first=False` it is the paper's layer, with True the pre-norm one. No dropout.


# %%
def one_norm(layer: EncoderLayer) -> EncoderLayer:
    """A copy of `layer` whose two sublayers share the first one's LayerNorm."""
    layer = copy.deepcopy(layer)
    layer.sublayer[1].norm = layer.sublayer[0].norm
    return layer


def layer_mistakes(layer: EncoderLayer, x: Tensor) -> dict[str, Tensor]:
    """What wrong wirings of `layer`'s parts make of x (B, S, D), by the message that explains each."""
    attend, think = lambda x: layer.self_attn(x, x, x), layer.feed_forward
    one, two = (connection.norm for connection in layer.sublayer)
    switched, crossed = copy.deepcopy(layer), copy.deepcopy(layer)
    for connection in switched.sublayer:
        connection.norm_first = not connection.norm_first
    crossed.sublayer = crossed.sublayer[::-1]
    shared = {
        "the second sublayer's LayerNorm is used first": crossed(x),
        "one LayerNorm serves both sublayers; each has its own": one_norm(layer)(x),
    }
    if not layer.sublayer[0].norm_first:
        return shared | {
            "that is pre-norm: in post-norm the LayerNorm is taken of the sum": switched(x),
            "x isn't added back: the gradient has no direct road": two(think(one(attend(x)))),
            "both sublayers read x: the second must read what the first made": two(
                one(x + attend(x)) + think(x)
            ),
        }
    first = one(x) + attend(one(x))
    return shared | {
        "that is post-norm: in pre-norm only what enters a sublayer is normed": switched(x),
        "x isn't added back: the gradient has no direct road": think(two(attend(one(x)))),
        "both sublayers read x: the second must read what the first made": x
        + attend(one(x))
        + think(two(x)),
        "the normed x is added back: then a LayerNorm stands on the road": two(first)
        + think(two(first)),
    }


def check_layer_from_parts(candidate: Callable[..., Tensor]) -> None:
    """Compares with `EncoderLayer`, post-norm and then pre-norm, made of the same parts."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64)  # (B, S, D)
    for norm_first in (False, True):
        parts = (MultiHeadedAttention(2, 8, 0.0), PositionwiseFeedForward(8, 16, 0.0))
        layer = EncoderLayer(8, *parts, 0.0, norm_first).double()
        scramble(layer, size=0.3)
        attend = lambda x, layer=layer: layer.self_attn(x, x, x)  # noqa: E731
        norms = [connection.norm for connection in layer.sublayer]
        got = candidate(x, attend, layer.feed_forward, norms, norm_first)
        if not same_numbers(got, layer(x)):
            blame(got, layer_mistakes(layer, x), "another layer than the formula's")


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_layer_from_parts(
    x: Tensor,
    attend: Callable[[Tensor], Tensor],
    think: Callable[[Tensor], Tensor],
    norms: list[Callable[[Tensor], Tensor]],
    norm_first: bool,
) -> Tensor:
    """An encoder layer (B, S, D) to (B, S, D): post-norm, or pre-norm with `norm_first`."""
    for sublayer, norm in zip((attend, think), norms, strict=True):
        x = x + sublayer(norm(x)) if norm_first else norm(x + sublayer(x))
    return x


check_layer_from_parts(solution_layer_from_parts)

# %%
print(rejection(check_layer_from_parts, lambda *parts: solution_layer_from_parts(*parts[:4], True)))
print(
    rejection(
        check_layer_from_parts,
        lambda x, attend, think, norms, _: norms[1](think(norms[0](attend(x)))),
    )
)

# %% [markdown]
# ### Exercise 4 *code* · A stack of fresh layers
#
# `clones` copies one layer, numbers and all, and `initialise` repairs what that leaves behind. Write `fresh_stack(make, N)`, which
# needs no repair: `make()` builds a layer, and the result holds N layers as PyTorch should see them, none of which starts with the
# numbers of another.


# %%
def check_fresh_stack(candidate: Callable[[Callable[[], nn.Module], int], nn.Module]) -> None:
    """Looks at identity, memory, and first numbers of three layers made by the candidate."""
    torch.manual_seed(0)

    def make() -> PositionwiseFeedForward:
        return PositionwiseFeedForward(4, 6)

    stack = candidate(make, 3)
    assert isinstance(stack, nn.Module), (
        "a plain list hides its layers: parameters(), .to() and state_dict() don't look inside"
    )
    layers = list(stack)
    assert len(layers) == 3, "there must be N layers"
    assert len({id(layer) for layer in layers}) == 3, (
        "one layer, N times: it has the parameters of one, and every step trains them for all"
    )
    places = {p.data_ptr() for p in stack.parameters()}
    assert len(places) == 3 * 4, "the layers are N, but they share tensors"
    weights = torch.stack([layer.expand.weight for layer in layers])
    biases = torch.stack([layer.expand.bias for layer in layers])
    if (weights[1:] == weights[0]).all():
        raise AssertionError("the layers start with the same numbers: a deep copy copies those too")
    assert not (biases[1:] == biases[0]).all(), (
        "the weights differ, the biases don't: all layers have the same random ones"
    )
    torch.manual_seed(0)
    assert same_numbers(layers[0].expand.weight, make().expand.weight), (
        "other numbers than make() draws: how a layer starts is its own business"
    )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_fresh_stack(make: Callable[[], nn.Module], N: int) -> nn.ModuleList:
    """N layers, each built anew."""
    return nn.ModuleList(make() for _ in range(N))


check_fresh_stack(solution_fresh_stack)

# %% [markdown]
# Three pitfalls of this chapter: one layer N times, deep copies, and deep copies after the Xavier loop that passes over biases.


# %%
def copied_stack(make: Callable[[], nn.Module], N: int) -> nn.ModuleList:
    """Deep copies, then Xavier for whatever has two dimensions; the biases stay copies."""
    stack = clones(make(), N)
    wrong_initialise(stack)
    return stack


# %%
for candidate in (
    lambda make, N: wrong_stack(make(), N),
    lambda make, N: clones(make(), N),
    copied_stack,
):
    print(rejection(check_fresh_stack, candidate))

# %% [markdown]
# ### Exercise 5 *think* · Free roads, and what a check can see
#
# 1. Let `input_gradient` run with $x + \frac12 f(x)$ and with $\frac12 (x + f(x))$. Which of them is still a free road?
# 2. Break `to_torch_transformer` on purpose: swap key and value, or forget a bias. Which of the checks notices? Would it have
#    noticed on fresh weights, without `scramble`?
# 3. Set `N=18` in the comparison of post-norm and pre-norm. Before you do: by what factor will the decoder's gradient fade?
#
# <details><summary>An answer</summary>
#
# 1. The Jacobians are $I + \frac12 J$ and $\frac12 (I + J)$. The first product contains $I$ itself, so the gradient arrives. The second
#    is $2^{-N}$ times a free road: at 24 layers one part in 17 million.
# 2. Swapped matrices differ from the start, so the outputs do: noticed either way. A bias starts at 0, and LayerNorm's scale and shift at
#    1 and 0. A forgotten one changes nothing on fresh weights, and the check passes. That is what `scramble` is for.
# 3. If fading is a product over layers, three times the layers cost the third power: six or seven becomes some 300. Run it,
#    and compare: with what you guessed, and with pre-norm.
#
# </details>

# %% [markdown]
# ### Exercise 6 *project* · A deeper model that starts where the shallow one ended
#
# A small pre-norm model is trained; now you want it deeper, without starting over. Write `deepened(model, N)`: a new model with N
# layers on each side that computes exactly what `model` computes, and whose new layers can learn. The new layers come on top of
# the old ones. Which numbers of a pre-norm layer must be 0 for it to be the identity? Which must *not* be? And why is there no
# such trick for post-norm?


# %%
def last_steps(layer: EncoderLayer | DecoderLayer) -> list[nn.Linear]:
    """The matrices whose results a layer adds to its x: W^O of each attention, W₂ of the feed-forward."""
    kinds = (MultiHeadedAttention, PositionwiseFeedForward)
    parts = [part for part in layer.modules() if isinstance(part, kinds)]
    return [getattr(part, "contract", None) or part.project_output for part in parts]


def check_deepened(candidate: Callable[[EncoderDecoder, int], EncoderDecoder]) -> None:
    """Compares outputs, sizes, tied tables, and the gradients of the new layers."""
    torch.manual_seed(0)
    model = make_model(11, 11, 2, 8, 16, 2, 0.0, norm_first=True, tie="all").double()
    scramble(model)
    before = copy.deepcopy(model.state_dict())
    src, tgt = torch.randint(1, 11, (2, 3, 5))  # (B, S) and (B, T)
    right = model.generator(model(src, tgt))
    deep = candidate(model, 4)
    now = model.state_dict()
    kept = now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)
    assert deep is not model and kept, "the model itself was changed: make a new model"
    new = [*deep.encoder.layers[2:], *deep.decoder.layers[2:]]
    assert len(new) == 4, "there must be N layers on each side: two old ones, two new ones"
    got = deep.generator(deep(src, tgt))
    assert same_numbers(got, right), (
        "other outputs than before: a new layer adds something. What must it add? Where does that come from?"
    )
    assert len(set(storage_addresses(deep))) == 1, "the tables were tied, and aren't any more"
    tensors = {p.data_ptr() for p in deep.parameters()}
    assert len(tensors) == len(list(deep.parameters())), "layers share tensors: they can't differ"
    grew = sum(p.numel() for p in deep.parameters()) - sum(p.numel() for p in model.parameters())
    grown = [*model.encoder.layers, *model.decoder.layers]
    assert grew == sum(p.numel() for layer in grown for p in layer.parameters()), (
        "the new layers have not as many parameters as old ones: do they appear more than once?"
    )
    F.cross_entropy(got.flatten(0, 1), tgt.flatten()).backward()
    dead = [step for layer in new for step in last_steps(layer) if not step.weight.grad.any()]
    assert not dead, (
        "the new layers can never learn: where both factors are 0, so are both gradients"
    )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_deepened(model: EncoderDecoder, N: int) -> EncoderDecoder:
    """A copy of a pre-norm model with new layers on top that add nothing yet."""
    model = copy.deepcopy(model)  # one copy of all: what is tied stays tied
    for stack in (model.encoder, model.decoder):
        for layer in clones(stack.layers[0], N - len(stack.layers)):
            initialise(layer)
            for step in last_steps(layer):
                nn.init.zeros_(step.weight)
                nn.init.zeros_(step.bias)
            stack.layers.append(layer)
    return model


check_deepened(solution_deepened)

# %% [markdown]
# In pre-norm a sublayer that returns 0 leaves $x$ alone. Its last matrix and bias must be 0, and everything before must not: the
# gradient of $W_2$ is a product with what comes out of $W_1$. Post-norm has no such layer, since LayerNorm$(x + 0)$ isn't
# $x$, unless $x$ is normed already and γ and β have never moved. Copying the top layer, and zeroing everything:


# %%
def deepened_by(change: Callable[[nn.Module], None]) -> Callable[..., EncoderDecoder]:
    """A way to deepen: copies of the top layer, with `change` applied to each."""

    def deepen(model: EncoderDecoder, N: int) -> EncoderDecoder:
        model = copy.deepcopy(model)
        for stack in (model.encoder, model.decoder):
            for layer in clones(stack.layers[-1], N - len(stack.layers)):
                change(layer)
                stack.layers.append(layer)
        return model

    return deepen


# %%
def all_to_zero(module: nn.Module) -> None:
    """Every number that `module` learns becomes 0."""
    for p in module.parameters():
        nn.init.zeros_(p)


# %%
print(rejection(check_deepened, deepened_by(lambda layer: None)))
print(rejection(check_deepened, deepened_by(all_to_zero)))

# %% [markdown]
# Next: [Chapter 6 · Training](ch06_training.ipynb)
