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
# # Chapter 8 · Going fast
#
# After this chapter you can say how fast a training step could be on your machine, how fast it is, and where the difference goes. And you have a second path through the very same model that gives the same numbers, sooner.
#
# *Attention Is All You Need*, §5.1 to §5.4, as a machine sees it. 50 minutes to read, 100 with the code; half a minute to run on a CPU. The timings that it shows were recorded, each with its command.
#
# Previous: [Chapter 7 · Multi30k](ch07_multi30k.ipynb) · Next: [Chapter 9 · The training run](ch09_training_run.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. In this chapter **N** counts rows: the real tokens of one side of a batch.

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
import bisect
import ctypes
import itertools
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from scripts.book.charts import titled
from scripts.book.exercises import check
from scripts.book.figures.speed import (
    account_chart,
    flops_chart,
    growth_chart,
    peers_chart,
    peers_frame,
    roofline_chart,
    switches_chart,
    switches_frame,
)
from scripts.book.instruments import count_flops, saved_bytes, scramble
from scripts.book.records import load_record
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import (
    check_length,
)
from scripts.ch04_encoder_decoder import (
    Decoder,
    EncoderDecoder,
    Generator,
    LayerNorm,
    PositionwiseFeedForward,
    SublayerConnection,
    make_model,
)
from scripts.ch06_training import (
    BOS,
    EOS,
    PAD,
    Batch,
    LabelSmoothing,
    batch_loss,
)
from scripts.ch07_multi30k import (
    Example,
    make_batch,
    pad_rows,
)

# %% [markdown]
# The checks run in double precision, so that "the same numbers" can mean the same to ten digits. Real trainings, and all timings here, are in single precision.

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The rule of the game
#
# > **In short.** Count first, then predict, then change one thing, then measure, then look back. And whatever you change: the same weights, the same outputs, the same gradients.
#
# Speed that changes the numbers is a different model, and a different model needs a new experiment. So each step of this chapter is a switch, and each switch is held against the plain path of chapters 1 to 6 before it is timed. There is no second model class. The fast path is a set of functions that walk through the modules you know, and use their weights. (One switch, the last, rounds the factors of products to 16 bits. It is held against a bound.)
#
# We work on the model that chapter 9 trains: 3+3 layers, D = 256, feed-forward 1,024, 8 heads, V = 8,192, all tables tied, in batches of 2,048 tokens a side.


# %%
@dataclass(frozen=True)
class Shape:
    """The sizes of a Transformer, as benchmarks compare them; `N` encoder and `N` decoder layers."""

    N: int = 3
    d_model: int = 256
    d_ff: int = 1024
    h: int = 8
    vocab: int = 8192
    dropout: float = 0.1
    norm_first: bool = True


SMALL = Shape()
BASE = Shape(N=6, d_model=512, d_ff=2048, norm_first=False)


def series_model(shape: Shape) -> EncoderDecoder:
    """Our model of that shape, all tables tied."""
    sizes = asdict(shape)
    vocab = sizes.pop("vocab")
    return make_model(vocab, vocab, tie="all", **sizes)


# %% [markdown]
# ## The limit first
#
# > **In short.** A machine does two things: it multiplies, and it moves numbers. Count both for one training step, divide by what the machine can do, and you know the time that no cleverness beats.
#
# ### How many operations?
#
# A product of an $(i \times j)$ by a $(j \times k)$ matrix takes $i\cdot j\cdot k$ multiplications and as many additions: $2ijk$ operations. Almost all the work of a Transformer is of this kind, so the list of its products is the list of its costs. The backward pass costs twice as much again: for $Y = XW^\top$ it needs $\partial\ell/\partial X$ and $\partial\ell/\partial W$, two products of the same size.


# %%
@dataclass(frozen=True)
class Product:
    """`times` matrix products (n, i, j) @ (n, j, k) of the forward pass."""

    name: str
    n: int
    i: int
    j: int
    k: int
    times: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of n·i·j·k, all `times` together."""
        return 2 * self.n * self.i * self.j * self.k * self.times

    @property
    def bytes(self) -> int:
        """Traffic in float32 where each factor is read once and the result written once."""
        return 4 * self.n * (self.i * self.j + self.j * self.k + self.i * self.k) * self.times


# %%
def forward_products(shape: Shape, lengths: Sequence[tuple[int, int]]) -> list[Product]:
    """All matrix products of one forward pass over sentences of these (source, target) lengths."""
    D, F, N = shape.d_model, shape.d_ff, shape.N
    sources, targets = (sum(side) for side in zip(*lengths, strict=True))  # rows
    listed = [
        Product("Q, K, V of the source", 1, sources, D, 3 * D, N),
        Product("Q, K, V of the target", 1, targets, D, 3 * D, N),
        Product("cross-attention's Q", 1, targets, D, D, N),
        Product("cross-attention's K, V", 1, sources, D, 2 * D, N),
        Product("heads to output, source", 1, sources, D, D, N),
        Product("heads to output, target", 1, targets, D, D, 2 * N),
        Product("feed-forward, out", 1, sources, D, F, N),
        Product("feed-forward, out", 1, targets, D, F, N),
        Product("feed-forward, back", 1, sources, F, D, N),
        Product("feed-forward, back", 1, targets, F, D, N),
        Product("logits", 1, targets, D, shape.vocab),
    ]
    head = D // shape.h
    for s, t in lengths:
        for queries, keys in ((s, s), (t, t), (t, s)):
            listed.append(Product("scores", shape.h, queries, head, keys, N))
            listed.append(Product("weights · V", shape.h, queries, keys, head, N))
    return listed


# %%
def step_flops(shape: Shape, lengths: Sequence[tuple[int, int]]) -> int:
    """Operations of a training step's products: each forward product has two of its size backward."""
    return 3 * sum(product.flops for product in forward_products(shape, lengths))


# %% [markdown]
# PyTorch can count, too: `FlopCounterMode` watches the products as they happen (chapter 1). The hand count and the counter must agree to the last operation, on the plain path, where every padded cell is multiplied.


# %%
def example_batch(vocab: int, seed: int = 0) -> Batch:
    """Six random pairs of unequal lengths, padded: the checks' batch."""
    rng = random.Random(seed)
    pairs = [(rng.randint(2, 9), rng.randint(2, 9)) for _ in range(6)]
    ids = lambda n: [rng.randrange(EOS + 1, vocab) for _ in range(n)]  # noqa: E731
    return make_batch([Example([*ids(s), EOS], [BOS, *ids(t), EOS]) for s, t in pairs])


TINY = Shape(N=2, d_model=16, d_ff=32, h=2, vocab=50)
batch = example_batch(TINY.vocab)
plain_model = series_model(TINY)
padded = [(batch.src.size(1), batch.tgt.size(1))] * len(
    batch.src
)  # every row is as long as the longest
criterion = LabelSmoothing(0.1)
counted = count_flops(lambda: batch_loss(plain_model, batch, criterion)[0].backward())
assert counted == step_flops(TINY, padded)

real = [
    (int(s), int(t))
    for s, t in zip((batch.src != PAD).sum(1), (batch.tgt_y != PAD).sum(1), strict=True)
]
print(f"{counted:,} operations, of which {step_flops(TINY, real):,} are for real tokens")

# %% [markdown]
# **Predict.** In the real model, which of these is the most expensive: attention (scores and weights), the feed-forward layers, or the logits?


# %%
def flop_shares(shape: Shape, lengths: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The share of each kind of product in a step's operations."""
    kinds = {
        "logits": ("logits",),
        "feed-forward": ("feed-forward",),
        "projections of attention": ("Q", "cross", "heads"),
        "scores and weights · V": ("scores", "weights"),
    }
    products = forward_products(shape, lengths)
    total = sum(p.flops for p in products)
    return {
        kind: sum(p.flops for p in products if p.name.startswith(names)) / total
        for kind, names in kinds.items()
    }


# %%
even = [(16, 16)] * 128  # a full batch: 2,048 tokens a side
shares = flop_shares(SMALL, even)
assert abs(sum(shares.values()) - 1) < 1e-12
assert shares["logits"] > shares["scores and weights · V"] * 20
flops_chart(shares)

# %% [markdown]
# At caption length the famous quadratic attention is a rounding error. A quarter of the work is the last product, the logits: with 8,192 columns it is the largest matrix in the model. We will come back to it.
#
# ### How many bytes?
#
# Each operation reads its inputs and writes its result. If it does a lot of arithmetic per byte, the multipliers are the limit; if it does little, the memory is. Their ratio, operations per byte, is called the *arithmetic intensity*. Below the intensity (rate ÷ bandwidth) a machine starves.
#
# Two numbers describe the machine. We measure them rather than look them up: what counts is what PyTorch reaches here. On a CPU it has two libraries that multiply, MKL and oneDNN; the machine's rate is that of the faster one.


# %%
def suits_onednn(x: Tensor) -> bool:
    """Whether oneDNN multiplies x here: 32 or 16 bits on a CPU, and not on every processor."""
    known = x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "cpu"
    return known and torch.backends.mkldnn.is_available()


def affine(
    x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool, relu: bool = False
) -> Tensor:
    """x·Wᵀ + b: x (N, D), weight (F, D), to (N, F), without a gradient; by oneDNN where it can."""
    if onednn and suits_onednn(x):
        then = "relu" if relu else "none"
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")
    y = F.linear(x, weight, bias)
    return y.relu_() if relu else y


# %%
def best_seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The shortest of several runs: what the machine can, when nothing disturbs it."""
    function()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def matrix_rate(kind: torch.dtype = torch.float32, repeats: int = 5) -> float:
    """Operations a second of this machine's best product in `kind`: squares of 1,024 and 2,048."""
    best = 0.0
    for n in (1024, 2048):
        a, b = torch.randn(2, n, n, dtype=torch.float32).to(kind)
        for onednn in (False, True):
            seconds = best_seconds(lambda: affine(a, b, None, onednn), repeats)  # noqa: B023
            best = max(best, 2 * n**3 / seconds)
    return best


def memory_bandwidth(megabytes: int = 256) -> float:
    """Bytes a second of adding a tensor too large for any cache to another: read, read, write."""
    a, b = torch.ones(2, megabytes * 2**18, dtype=torch.float32)
    return 3 * a.nbytes / best_seconds(lambda: a.add_(b))


# %%
# NBVAL_IGNORE_OUTPUT
multiply_rate, bandwidth = matrix_rate(repeats=2), memory_bandwidth()
print(
    f"this machine: {multiply_rate / 1e9:.0f} billion operations and {bandwidth / 1e9:.0f} billion bytes a second"
)
print(f"above {multiply_rate / bandwidth:.1f} operations a byte the multipliers are the limit")

# %% [markdown]
# Now the operations of our step, each alone, on the machine of the record `results/speed-steps.json`. The command that made it is `python -m scripts.bench.training steps`; it measures, too, everything else that this chapter shows of single steps.


# %%
def measured_operations(shape: Shape = SMALL, tokens: int = 2048, length: int = 16) -> list[dict]:
    """Typical operations of a step, alone: operations, least bytes and seconds of each."""
    D, V, sentences = shape.d_model, shape.vocab, tokens // length
    x, wide, logits = (
        torch.randn(tokens, D),
        torch.randn(tokens, shape.d_ff),
        torch.randn(tokens, V),
    )
    heads = torch.randn(sentences * shape.h, length, D // shape.h)
    weights = torch.randn(sentences * shape.h, length, length)
    labels = torch.randint(1, V, (tokens,))
    norm = nn.LayerNorm(D)
    maps = {n: torch.randn(n, D) for n in (3 * D, shape.d_ff, V)}
    back = torch.randn(D, shape.d_ff)
    weight = [torch.randn(parameter_count(shape), requires_grad=True)]
    weight[0].grad = torch.randn_like(weight[0])
    adam = torch.optim.Adam(weight, fused=True)

    def product(name: str, n: int, i: int, j: int, k: int) -> dict:
        p = Product(name, n, i, j, k)
        return {"operation": name, "flops": p.flops, "bytes": p.bytes}

    def passing(name: str, numbers: int, flops: int, arrays: float) -> dict:
        return {"operation": name, "flops": flops * numbers, "bytes": int(4 * arrays * numbers)}

    cases = [
        (product("Q, K, V", 1, tokens, D, 3 * D), lambda: F.linear(x, maps[3 * D])),
        (
            product("feed-forward, out", 1, tokens, D, shape.d_ff),
            lambda: F.linear(x, maps[shape.d_ff]),
        ),
        (product("feed-forward, back", 1, tokens, shape.d_ff, D), lambda: F.linear(wide, back)),
        (product("logits", 1, tokens, D, V), lambda: F.linear(x, maps[V])),
        (product("scores", len(heads), length, D // shape.h, length), lambda: heads @ heads.mT),
        (passing("softmax of scores", weights.numel(), 5, 2), lambda: weights.softmax(-1)),
        (passing("LayerNorm", x.numel(), 8, 2), lambda: norm(x)),
        (passing("residual sum", x.numel(), 1, 3), lambda: x + x),
        (passing("dropout", wide.numel(), 2, 2.25), lambda: F.dropout(wide, 0.1)),
        (
            passing("dropout, 16 bits", wide.numel(), 2, 2.5),
            lambda: wide * keep_mask(wide.shape, 0.1, wide),
        ),
        (passing("cross-entropy", logits.numel(), 5, 1), lambda: F.cross_entropy(logits, labels)),
        (passing("Adam", weight[0].numel(), 12, ADAM_BYTES / 4), adam.step),
    ]
    with torch.no_grad():
        return [row | {"seconds": best_seconds(call)} for row, call in cases]


# %%
record = load_record("speed-steps")
print(record["device"])
print(
    f"{record['matrix_rate'] / 1e9:.0f} billion operations and {record['bandwidth'] / 1e9:.0f} billion bytes a second"
)
roofline_chart(record)

# %% [markdown]
# The products lie at the flat roof, or close below it; the logits are the farthest from it, because their 64 MiB are fresh memory each time. Everything else lies far to the left, where the memory is the limit, and dropout lies far *below* the roof: there is nothing about it that a machine must do so slowly. A few points lie above the sloping roof. Their numbers were still in the cache from the run before, and never came from memory.
#
# So the floor of a step is easy to state: all products at the flat roof, plus the optimizer, which must touch every weight; and the rest for free, done while the numbers pass by anyway.


# %%
def least_seconds(
    shape: Shape, lengths: Sequence[tuple[int, int]], rate: float, bandwidth: float
) -> float:
    """The time under which no step can be: every product at the roof, and Adam's traffic.

    All else (softmax, dropout, LayerNorm, sums) is taken to cost nothing, as if it happened while
    the numbers pass by. `rate` is in operations a second, `bandwidth` in bytes a second.
    """
    products = forward_products(shape, lengths)
    at_roof = 3 * sum(max(p.flops / rate, p.bytes / bandwidth) for p in products)
    return at_roof + ADAM_BYTES * parameter_count(shape) / bandwidth


ADAM_BYTES = (
    4 * 7
)  # a weight's gradient, value and two moments are read, all but the gradient written


def parameter_count(shape: Shape) -> int:
    """Weights of our model of that shape."""
    with torch.device("meta"):
        return sum(p.numel() for p in series_model(shape).parameters())


# %%
def step_seconds(record: dict[str, Any], name: str) -> float:
    """Median seconds of a contender's step on record."""
    return record["reports"][name]["seconds_per_step"]


def step_rate(record: dict[str, Any], name: str) -> float:
    """Median real target tokens a second of a contender on record."""
    return record["reports"][name]["tokens_per_second"]


floor, textbook = record["floor_seconds"], step_seconds(record, "textbook, memory kept")
print(
    f"floor {floor:.2f} seconds, textbook {textbook:.2f} seconds: {textbook / floor:.1f} times the floor"
)

# %% [markdown]
# That factor is what we can win. Where does the time go? PyTorch's profiler tells us; its hundreds of rows are booked under a few headings.


# %%


account_chart(
    {"textbook": record["accounts"]["textbook"]},
    "A step of the textbook path",
    "Seconds of one step of 2,048 tokens a side, by kind of operation. Only the first two bars are arithmetic "
    "that must be done; random bits are dropout's.",
)

# %% [markdown]
# **Predict.** Before you read on, choose three bars to attack, and guess what each can give.
#
# ## The switches
#
# All steps that follow are fields of one object. `PLAIN` has all of them off; `FAST`, all on that keep the numbers. The last one, `half`, rounds them, and comes at the end.


# %%
@dataclass(frozen=True)
class Switches:
    """Which steps of this chapter the forward and backward pass take.

    `FAST` has all on that keep the numbers, `PLAIN` none: the textbook's own operations, called from
    here.
    """

    packed: bool = True  # rows for real tokens only
    fused_norm: bool = True  # LayerNorm in one kernel
    joint_projections: bool = True  # one product for Q, K and V; one for all cross-attention's K, V
    attention: Literal["textbook", "sdpa", "ours"] = "ours"
    loss: Literal["textbook", "ours"] = "ours"
    random_bits: bool = True  # dropout masks from 16 random bits an entry
    onednn: bool = True  # oneDNN's products; which library is faster depends on the machine
    half: bool = False  # products of 16-bit factors; all else stays in 32 bits


FAST = Switches()
PLAIN = Switches(False, False, False, "textbook", "textbook", False, False)

# %% [markdown]
# ## Rows instead of rectangles
#
# > **In short.** Only attention needs to know which tokens form a sentence. Everything else treats tokens one by one, so give it a plain list of them, and padding is gone.
#
# Chapter 7 made batches of similar length, which removes most of the padding. What is left goes when the batch stops being a rectangle: embedding, LayerNorm, projections, feed-forward, generator and loss work on rows $(N, D)$, one for each real token. For attention the rows are spread into a rectangle, and gathered again after it. These are copies. Where nearly all cells are real, they cost more than the padding does; so rows are for batches of which at least an eighth is padding (`rows_pay`, further down).


# %%
class Layout:
    """Which cells of a padded rectangle (B, T) get a row of their own, and where the rows go.

    `slots` (N,) is each row's cell, b·T + t, in reading order; `positions` (N,) its t. With
    `packed` only real cells have rows, else all, and then nothing here depends on the data.
    """

    def __init__(self, real: Tensor, packed: bool):
        self.shape = real.shape
        self.full = not packed or bool(real.all())
        cells = torch.arange(real.numel(), device=real.device)
        self.slots = cells if self.full else cells[real.flatten()]
        self.positions = self.slots % real.size(1)
        self.real = None if packed and self.full else real  # where no padding is, nothing is hidden

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores so that padding keys get no weight: (B, 1, 1, T)."""
        if self.real is None:
            return None
        zeros = torch.zeros(self.shape, dtype=dtype, device=self.real.device)
        return zeros.masked_fill_(~self.real, -math.inf)[:, None, None, :]

    def rows(self, rectangle: Tensor) -> Tensor:
        """(B, T) to (N,): the cells that have rows."""
        return rectangle.reshape(-1)[self.slots]

    def spread(self, rows: Tensor) -> Tensor:
        """(N, D) to (B, T, D); a cell without a row is 0."""
        if not self.full:
            cells = rows.new_zeros(self.shape.numel(), rows.size(-1))  # (B·T, D)
            rows = cells.index_add_(0, self.slots, rows)
        return rows.unflatten(0, self.shape)

    def gather(self, cells: Tensor) -> Tensor:
        """(B, T, D) to (N, D): the way back."""
        rows = cells.flatten(0, 1)  # (B·T, D)
        return rows if self.full else rows.index_select(0, self.slots)


# %%
layout = Layout(batch.src != PAD, packed=True)
rectangle = torch.randn(*batch.src.shape, 3)  # (B, S, 3)
rows = layout.gather(rectangle)  # (N, 3)
assert len(rows) == (batch.src != PAD).sum()
torch.testing.assert_close(rows, rectangle[batch.src != PAD])
assert (layout.spread(rows)[batch.src == PAD] == 0).all()
torch.testing.assert_close(layout.gather(layout.spread(rows)), rows)  # there and back
# Each is the other's transpose, ⟨spread(x), y⟩ = ⟨x, gather(y)⟩: that's why gradients come out right.
other = torch.randn_like(rectangle)
torch.testing.assert_close((layout.spread(rows) * other).sum(), (rows * layout.gather(other)).sum())


# %%
def rows_chart(batch: Batch) -> alt.TopLevelMixin:
    """The cells of a padded batch, each real one with the number of its row."""
    layout = Layout(batch.src != PAD, packed=True)
    numbers = {slot: str(row) for row, slot in enumerate(layout.slots.tolist())}
    width = batch.src.size(1)
    frame = pd.DataFrame(
        {
            "pair": cell // width,
            "position": cell % width,
            "row": numbers.get(cell, ""),
            "cell": "a row" if cell in numbers else "padding",
        }
        for cell in range(batch.src.numel())
    )
    base = alt.Chart(frame).encode(
        x=alt.X("position:O", axis=alt.Axis(labelAngle=0)), y=alt.Y("pair:O")
    )
    colours = alt.Scale(domain=["a row", "padding"], range=["#9ecae1", "#EEEEEE"])
    squares = base.mark_rect(stroke="white").encode(
        color=alt.Color("cell:N", scale=colours, title=None)
    )
    chart = alt.layer(squares, base.mark_text().encode(text="row:N"))
    return titled(
        chart.properties(width=alt.Step(38), height=alt.Step(32)),
        "A rectangle, and the rows that are computed",
        "Each blue cell is a real token and has a row, in reading order; the others are padding and have none. "
        "Only attention sees the rectangle.",
    )


rows_chart(batch)

# %% [markdown]
# ## One kernel for LayerNorm
#
# > **In short.** Five operations that each read and write the whole tensor cost five times the traffic of one.
#
# Chapter 4's LayerNorm is a mean and variance, a difference, a product with the root, a scale and a shift. `F.layer_norm` does them while a row is in registers. Nothing else changes.


# %%
def normed(norm: nn.Module, x: Tensor, how: Switches) -> Tensor:
    """What `norm` computes; x (N, D) to (N, D)."""
    if how.fused_norm and not isinstance(norm, nn.Identity):
        x = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    else:
        x = norm(x)
    return x.bfloat16() if how.half else x


# %%
norm = LayerNorm(16)
norm.load_state_dict({"weight": torch.linspace(0.5, 2, 16), "bias": torch.linspace(-1, 1, 16)})
x = torch.randn(5, 16)
torch.testing.assert_close(normed(norm, x, FAST), norm(x), rtol=1e-12, atol=1e-12)

# %% [markdown]
# ## The same product from another library
#
# > **In short.** Multiplying matrices is a solved problem, and solved more than once. Ask who is faster here.
#
# For single precision PyTorch always takes MKL, and no public function lets you choose. oneDNN was faster for $XW^\top$ and for the gradient $GW$ (with $G = \partial\ell/\partial Y$) on the machine of our first records, and is slower on that of today's, which the chart further down shows. For the weights' gradient $G^\top X$ it gained nothing, so that stays with MKL; exercise 6 asks you to look again. The operator in `affine`, above, is the one that `torch.compile` calls. Its name begins with an underscore, and the switch is there to be turned off.
#
# The product below gives its result in the dtype of `x`, while weights keep their own. That will matter when `x` has 16 bits.


# %%
class LinearProduct(Function):
    """`F.linear` in the dtype of x, by oneDNN if asked; the weights keep theirs, and so their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, onednn: bool) -> Tensor:
        """x (N, D), weight (F, D), bias (F,), to (N, F) in the dtype of x."""
        ctx.kind, ctx.onednn = weight.dtype, onednn
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return affine(x, weight, bias.to(x.dtype), onednn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by x, weight and bias."""
        return *linear_gradients(grad, *ctx.saved_tensors, ctx.kind, ctx.onednn), None


def linear_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, kind: torch.dtype, onednn: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient (N, F) of x·Wᵀ + b: those by x (N, D), weight (F, D) and bias (F,).

    The last two come in the dtype `kind`.
    """
    by_x = affine(grad, weight.T, None, onednn)
    # The same product either way; it is quicker with the wider factor in front.
    narrow = grad.size(1) < x.size(1)
    by_weight = (x.T @ grad).T if narrow else grad.T @ x
    return by_x, by_weight.to(kind), grad.sum(0).to(kind)


def product(x: Tensor, weight: Tensor, bias: Tensor, how: Switches) -> Tensor:
    """x·Wᵀ + b in the dtype of x."""
    if how.onednn or how.half:
        return LinearProduct.apply(x, weight, bias, how.onednn)
    return F.linear(x, weight, bias)


def linear(layer: nn.Linear, x: Tensor, how: Switches) -> Tensor:
    """What `layer` computes."""
    return product(x, layer.weight, layer.bias, how)


# %%
x, layer = torch.randn(7, 12, dtype=torch.float32), nn.Linear(12, 20, dtype=torch.float32)
torch.testing.assert_close(affine(x, layer.weight, layer.bias, onednn=True), layer(x))
inputs = [t.double().detach().requires_grad_() for t in (x, layer.weight, layer.bias)]
assert torch.autograd.gradcheck(
    lambda *given: LinearProduct.apply(*given, True), inputs
)  # numerically, entry by entry

# %% [markdown]
# ## Fewer, larger products
#
# > **In short.** One large product beats three small ones: the input is read once, and the machine's rhythm is broken less often.
#
# The queries, keys and values of self-attention come from the same rows, so their three maps are one map with three times the columns. For cross-attention more is possible: *every* decoder layer takes its keys and values from the same memory, so all layers' maps are one product, before the decoder starts.


# %%
def project(
    x: Tensor, linears: Sequence[nn.Linear], layout: Layout, how: Switches
) -> Sequence[Tensor]:
    """Each of the linear maps applied to x (N, D) and spread to (B, T, D); as one product, if asked."""
    if not how.joint_projections:
        return [layout.spread(linear(layer, x, how)) for layer in linears]
    weight = torch.cat([linear.weight for linear in linears])  # (sum of outputs, D)
    bias = torch.cat([linear.bias for linear in linears])
    return layout.spread(product(x, weight, bias, how)).chunk(len(linears), dim=-1)


def memory_keys_and_values(
    decoder: Decoder, memory: Tensor, layout: Layout, how: Switches
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every decoder layer's cross-attention, from memory (N, D) to (B, S, D)."""
    attentions = [layer.src_attn for layer in decoder.layers]
    linears = [linear for a in attentions for linear in (a.project_key, a.project_value)]
    parts = project(memory, linears, layout, how)
    return list(zip(parts[::2], parts[1::2], strict=True))


# %%
attn = plain_model.encoder.layers[0].self_attn
x = torch.randn(layout.slots.numel(), TINY.d_model)
linears = [attn.project_query, attn.project_key, attn.project_value]
for joint, apart in zip(
    project(x, linears, layout, FAST), project(x, linears, layout, PLAIN), strict=True
):
    torch.testing.assert_close(joint, apart, rtol=1e-12, atol=1e-12)


# %% [markdown]
# ## What dropout costs
#
# > **In short.** Dropout's arithmetic is nothing. Its random numbers are the most expensive numbers of the step.
#
# A step of our model drops from some 24 million entries, and PyTorch's generator on a CPU runs on one core. (So does NumPy's SFC64, which is twice as fast. PyTorch's draws its seed.) `F.dropout` takes a draw for each entry. But a mask needs a yes or a no, not 24 digits. We take 64 random bits at a time, and cut them into four numbers of 16 bits: an entry is dropped if its number, of 0 to 65,535, is below $p\cdot 65{,}536$ (as signed numbers both are 32,768 less). The rate is then rounded to 1/65,536; the factor $1/(1-p)$ uses the rate as rounded, so the mean is exact.


# %%
DRAWS = 2**16  # the values of 16 random bits


def random_words(count: int, device: torch.device) -> Tensor:
    """`count` times 64 random bits, int64; what comes follows from PyTorch's own generator.

    On a CPU that draws a seed alone: NumPy's SFC64 makes the bits in half of the time.
    """
    if device.type != "cpu":
        return torch.empty(count, dtype=torch.int64, device=device).random_(-(2**63), None)
    seed = int(torch.randint(2**63 - 1, ()))
    return torch.from_numpy(np.random.SFC64(seed).random_raw(count).view(np.int64))


def keep_mask(shape: torch.Size, p: float, like: Tensor) -> Tensor:
    """1 where an entry stays and 0 where dropout takes it: `shape`, in the dtype of `like`.

    An entry is taken where 16 random bits, read as a number, are below p·65,536, so that p is
    rounded to 1/65,536. One 64-bit draw serves four entries.
    """
    entries = math.prod(shape)
    bits = random_words(-(-entries // 4), like.device).view(torch.int16)[:entries]
    kept = torch.empty(entries, dtype=like.dtype, device=like.device)
    return torch.ge(bits, round(p * DRAWS) - DRAWS // 2, out=kept).view(shape)


def keep_scale(p: float) -> float:
    """What the kept entries are multiplied by, so that the mean stays: 1/(1 − p), p as rounded."""
    return 1 / (1 - round(p * DRAWS) / DRAWS)


# %%
torch.manual_seed(3)
entries = 400_000
for p in (0.1, 0.3, 0.5):
    mask = keep_mask((entries,), p, torch.empty(0))
    spread = math.sqrt(p * (1 - p) / entries)  # standard deviation of the share that is dropped
    for part in (mask, *mask.view(-1, 4).T):  # as a whole, and each of the four numbers of a draw
        sigma = spread * math.sqrt(entries / part.numel())
        assert abs((1 - part.mean().item()) - p) < 5 * sigma
    neighbours = mask.view(-1, 4).T.corrcoef() - torch.eye(4)
    assert neighbours.abs().max() < 5 / math.sqrt(
        entries / 4
    )  # the four know nothing of each other
    assert abs(mask.mean().item() * keep_scale(p) - 1) < 5 * spread / (1 - p)  # the mean stays

# %% [markdown]
# **Pitfall: 63 random bits.** `tensor.random_()` without bounds fills an int64 with numbers from 0 to $2^{63}-1$. The sign bit is never set. Cut such a draw into four, and one of the four has a bit that is always 0: read as a signed number it is never negative. With $p = 0.1$ it is then *never* dropped.

# %%
draws = torch.empty(entries // 4, dtype=torch.int64).random_()  # the wrong version
dropped_shares = (
    (draws.view(torch.int16).view(-1, 4) < round(0.1 * DRAWS) - DRAWS // 2).double().mean(0)
)
assert dropped_shares.min() == 0  # a quarter of the network has no dropout at all
assert (dropped_shares > 0.09).sum() == 3

# %% [markdown]
# The masks are applied where something else passes by. The end of a sublayer is $x + \mathrm{dropout}(y)$: one kernel, `addcmul`. In the feed-forward layer dropout follows relu, and both put zeros. So the result itself tells the backward pass where the gradient stops, and no mask is kept. The factor goes on the second weight matrix.


# %%
def dropout_rate(module: nn.Module) -> float:
    """The rate that the module's own dropout applies now: 0 in evaluation."""
    return module.dropout.p if module.training else 0.0


def dropped(x: Tensor, p: float, how: Switches) -> Tensor:
    """Dropout of x at rate p."""
    if p and how.random_bits:
        return x * keep_mask(x.shape, p, x) * keep_scale(p)
    return F.dropout(x, p, training=p > 0)


def dropped_sum(x: Tensor, y: Tensor, p: float, how: Switches) -> Tensor:
    """x + dropout(y): the end of every sublayer, in one kernel."""
    if p and how.random_bits:
        kept = keep_mask(y.shape, p, y)
        if y.dtype == x.dtype:
            return torch.addcmul(x, y, kept, value=keep_scale(p))
        return torch.add(x, y * kept, alpha=keep_scale(p))
    return x + F.dropout(y, p, training=p > 0)


# %%
class LinearReluDropout(Function):
    """Dropout(relu(x·Wᵀ + b)) without its factor 1/(1 − p).

    Keeps no mask: an entry of the result is 0 where relu or dropout took it, and there alone the
    gradient stops.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, p: float, onednn: bool
    ) -> Tensor:
        """x (N, D), weight (F, D), bias (F,), to (N, F) in the dtype of x."""
        ctx.kind, ctx.onednn = weight.dtype, onednn
        weight = weight.to(x.dtype)
        y = affine(x, weight, bias.to(x.dtype), onednn, relu=True)
        if p:
            y.mul_(keep_mask(y.shape, p, y))
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients by x, weight and bias, from where the result isn't 0."""
        x, weight, y = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grad, y, 0.0)
        return *linear_gradients(grad, x, weight, ctx.kind, ctx.onednn), None, None


def feed_forward(layer: PositionwiseFeedForward, x: Tensor, how: Switches) -> Tensor:
    """What `layer` computes: x (N, D) to (N, D)."""
    p, expand = dropout_rate(layer), layer.expand
    if not how.random_bits:
        hidden = linear(expand, x, how).relu()  # (N, d_ff)
        return linear(layer.contract, F.dropout(hidden, p, training=p > 0), how)
    hidden = LinearReluDropout.apply(x, expand.weight, expand.bias, p, how.onednn)
    # The factor is put on the weights: they are fewer than the activations.
    return product(hidden, layer.contract.weight * keep_scale(p), layer.contract.bias, how)


# %% [markdown]
# `gradcheck` compares a backward pass with numerical derivatives, entry by entry. Dropout must then draw the same mask each time.


# %%
def seeded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with the same random numbers at every call."""

    def call(*inputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return function(*inputs)

    return call


torch.manual_seed(4)
leaves = [torch.randn(*shape, requires_grad=True) for shape in ((6, 8), (5, 8), (5,))]
assert torch.autograd.gradcheck(seeded(lambda *w: LinearReluDropout.apply(*w, 0.3, False)), leaves)
ff = plain_model.encoder.layers[0].feed_forward.train()
x = torch.randn(20_000, TINY.d_model)
mean, again = (feed_forward(ff, x, how).mean(0) for how in (FAST, PLAIN))
ff.eval()
torch.testing.assert_close(feed_forward(ff, x, FAST), ff(x))  # dropout off: the same
assert (mean - again).abs().max() < 0.02  # dropout on: the same on average

# %% [markdown]
# ## Attention by hand
#
# > **In short.** Six small products, two on the way forward and four back, one softmax, one mask. Write the backward pass yourself, and nothing is stored or copied that it doesn't need.
#
# With the scores $Z = QK^\top/\sqrt{d_k} + \text{bias}$, the weights $A = \mathrm{softmax}(Z)$, the dropout mask $M$ of zeros and ones, and $c = 1/(1-p)$:
#
# $$ O = c\,(A \odot M)\,V $$
#
# $$ \frac{\partial\ell}{\partial V} = c\,(A\odot M)^\top G,\qquad
#    \frac{\partial\ell}{\partial A} = c\,(G V^\top)\odot M,\qquad
#    \frac{\partial\ell}{\partial Z} = A\odot\Big(\frac{\partial\ell}{\partial A} - \sum_s A_s\,\frac{\partial\ell}{\partial A_s}\Big) $$
#
# $$ \frac{\partial\ell}{\partial Q} = \frac{1}{\sqrt{d_k}}\,\frac{\partial\ell}{\partial Z}\,K,\qquad
#    \frac{\partial\ell}{\partial K} = \frac{1}{\sqrt{d_k}}\,\Big(\frac{\partial\ell}{\partial Z}\Big)^{\!\top} Q $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $Q$, $O$, $G = \partial\ell/\partial O$ | (B·H, T, d_k) | queries, output, and the output's gradient |
# | $K, V$ | (B·H, S, d_k) | keys, values |
# | $Z, A, M$ | (B·H, T, S) | scores, weights, dropout mask |
#
# The scale goes into the product, where it is free; the softmax overwrites the scores. This is the textbook order of things, not FlashAttention: at 16 tokens the weights are small, and it would save nothing to make them piece by piece.


# %%
class AttentionCore(Function):
    """softmax(QKᵀ/√d_k + bias)·V with dropout on the weights, and its gradient, by six products.

    Kept for the way back: Q, K, V, the weights and the mask, and nothing besides (§3.2.1, eq. 1).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float) -> Tensor:
        """q (B, H, T, d_k), k and v (B, H, S, d_k), bias broadcast to (B, H, T, S); to (B, H, T, d_k)."""
        shape, ctx.p = q.shape, p
        wide = torch.promote_types(q.dtype, torch.float32)  # softmax is for 32 bits and more
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B·H, T or S, d_k), contiguous
        weights = scaled_product(q, k.mT, q.size(-1) ** -0.5).to(wide)  # (B·H, T, S)
        if bias is not None:
            weights.view(*shape[:3], -1).add_(bias)
        torch.softmax(weights, dim=-1, out=weights)
        kept = keep_mask(weights.shape, p, q) if p else None
        ctx.save_for_backward(q, k, v, weights, kept)
        thinned = weights.to(q.dtype) if kept is None else weights.to(q.dtype) * kept
        return scaled_product(thinned, v, keep_scale(p)).unflatten(0, shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v, each of its own shape."""
        q, k, v, weights, kept = ctx.saved_tensors
        heads = grad.shape[:2]
        grad = grad.flatten(0, 1)  # (B·H, T, d_k)
        thinned = weights.to(q.dtype) if kept is None else weights.to(q.dtype) * kept
        grad_v = scaled_product(thinned.mT, grad, keep_scale(ctx.p))
        grad_weights = scaled_product(grad, v.mT, keep_scale(ctx.p))  # (B·H, T, S)
        if kept is not None:
            grad_weights *= kept
        # softmax: ∂ℓ/∂scores = w ⊙ (∂ℓ/∂w − Σ w·∂ℓ/∂w)
        wide = weights.dtype
        grad_scores = torch._softmax_backward_data(grad_weights.to(wide), weights, -1, wide)
        grad_scores, scale = grad_scores.to(q.dtype), q.size(-1) ** -0.5
        grad_q = scaled_product(grad_scores, k, scale)
        grad_k = scaled_product(grad_scores.mT, q, scale)
        return *(x.unflatten(0, heads) for x in (grad_q, grad_k, grad_v)), None, None


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a @ b, with the scale inside the product: (n, i, j), (n, j, k) to (n, i, k)."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)


# %%
torch.manual_seed(1)
q, k, v = (torch.randn(2, 2, n, 3, requires_grad=True) for n in (4, 5, 5))  # (B, H, T or S, d_k)
bias = torch.zeros(2, 1, 1, 5)
bias[0, ..., 3:] = -math.inf  # padding
torch.testing.assert_close(AttentionCore.apply(q, k, v, bias, 0.0), attention(q, k, v, bias)[0])
torch.testing.assert_close(
    AttentionCore.apply(q, k, v, bias, 0.0), F.scaled_dot_product_attention(q, k, v, bias)
)
assert torch.autograd.gradcheck(lambda q, k, v: AttentionCore.apply(q, k, v, bias, 0.0), (q, k, v))


assert torch.autograd.gradcheck(
    seeded(lambda q, k, v: AttentionCore.apply(q, k, v, bias, 0.3)), (q, k, v)
)

# %% [markdown]
# PyTorch has the same operation as `F.scaled_dot_product_attention`, and on a GPU, or without dropout, you should use that. On a CPU its fast kernel can't drop weights: with dropout it falls back to a chain of plain operations. The chart below times it as the step without attention by hand.
#
# ## A loss that never sees the vocabulary's width twice
#
# > **In short.** The logits are the largest tensor of the step, and are needed for a moment only. Make a few rows, take from them what loss and gradients need, and overwrite them.
#
# For 2,048 targets the logits take 64 MiB; their softmax, the smoothed targets and the gradient take as much again, each. But look at the gradient of the smoothed loss (chapter 6): $\partial\ell/\partial z = p - q$, with $q = (1-\varepsilon)\,\mathrm{onehot}(y) + \varepsilon/V$. Only $p$ is a full matrix. The rest is known beforehand: one entry a row, and a constant. With $z = XW^\top + b$ and $p = \mathrm{softmax}(z)$ (no longer dropout's rate), row $v$ of $W$ for the word $v$, and $x_n$ the row of $X$ for the target $n$ of N:
#
# $$ \frac{\partial\ell}{\partial X} = pW - (1-\varepsilon)\,W_y - \varepsilon\,\bar w,\qquad
#    \frac{\partial\ell}{\partial W_v} = \sum_n p_{nv}\,x_n - (1-\varepsilon)\sum_{n:\,y_n = v} x_n - \frac{\varepsilon}{V}\sum_n x_n,\qquad
#    \frac{\partial\ell}{\partial b_v} = \sum_n p_{nv} - (1-\varepsilon)\,\#\{n: y_n = v\} - \frac{\varepsilon}{V} N $$
#
# where $W_y$ holds the labels' rows of $W$, and $\bar w$ is the mean row. Even the mean logit, which the smoothed loss needs, is $x\cdot\bar w + \bar b$, without a pass over V numbers. So the loop below holds 512 rows of logits at a time. It overwrites them with $e^{z - \max z}$, which is $p$ but for a divisor per row; subtracts $1-\varepsilon$ (times that divisor) at each label; takes two products, whose narrow results are divided; and moves on. The gradients are ready before the backward pass begins.


# %%
class LinearCrossEntropy(Function):
    """The generator's product and the smoothed loss in one, a few rows at a time.

    The logits (N, V) never exist as a whole, and the smoothed targets not at all: with
    p = softmax(z), ∂ℓ/∂z = p − (1 − ε)·onehot(y) − ε/V, and only p needs the vocabulary's width.
    The gradients, if `wanted`, are made on the way forward, while a chunk of logits is in the cache.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        smoothing: float,
        chunk: int,
        onednn: bool,
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        """x (N, D), weight (V, D), bias (V,), labels (N,); to the sums of `LabelSmoothing`.

        Products have the dtype of x, sums that of the weights.
        """
        kind, certain, vocab = weight.dtype, 1 - smoothing, len(weight)
        factors, offset = weight.to(x.dtype), bias.to(x.dtype)
        mean_weight, mean_bias = weight.mean(0), bias.mean()  # the mean logit is x·w̄ + b̄
        nll, spread = weight.new_zeros(()), weight.new_zeros(())
        by_x = torch.empty_like(x, dtype=kind)
        by_weight, by_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        for start in range(0, len(x), chunk):
            stretch = slice(start, start + chunk)
            rows, wide, label = x[stretch], x[stretch].to(kind), labels[stretch, None]
            logits = affine(rows, factors, offset, onednn)  # (n, V)
            right = logits.gather(1, label).to(kind)  # (n, 1)
            highest, total = exponentials_(logits, kind)  # (n, 1) each
            log_z = highest + total.log()
            nll += (log_z - right).sum()
            spread += (log_z.squeeze(1) - wide @ mean_weight - mean_bias).sum()
            if not wanted:
                continue
            # The logits are now p·total; at the labels they become (p − (1 − ε))·total, here and not
            # after the product, which is rounded. Dividing the (n, D) results is cheaper.
            logits.scatter_(1, label, ((right - highest).exp() - certain * total).to(x.dtype))
            by_x[stretch] = (
                affine(logits, factors.T, None, onednn) / total - smoothing * mean_weight
            )
            by_weight += logits.T @ (wide / total).to(x.dtype)
            by_bias += (logits.T @ (1 / total).to(x.dtype)).squeeze(1)
        if wanted:  # and ε/V from each entry of ∂ℓ/∂z
            by_weight -= smoothing / vocab * x.sum(0, dtype=kind)
            by_bias -= smoothing / vocab * len(x)
            ctx.save_for_backward(by_x.to(x.dtype), by_weight, by_bias)
        ctx.mark_non_differentiable(nll)
        return certain * nll + smoothing * spread, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients from the way forward, times the loss's own."""
        return *(stored * grad for stored in ctx.saved_tensors), *[None] * 5


def exponentials_(logits: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Overwrite logits z (n, V) with exp(z − max z); the maxima and the rows' sums, (n, 1) each.

    Computed in the dtype `wide`, 64 rows at a time: what lies between stays in the nearest cache.
    """
    highest, total = torch.empty(2, len(logits), 1, dtype=wide, device=logits.device)
    for part, high, summed in zip(*(t.split(64) for t in (logits, highest, total)), strict=True):
        z = part.to(wide)
        torch.amax(z, 1, keepdim=True, out=high)
        torch.sum(z.sub_(high).exp_(), 1, keepdim=True, out=summed)
        if z is not part:
            part.copy_(z)
    return highest, total


# %%
torch.manual_seed(2)
x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((7, 4), (11, 4), (11,)))
labels = torch.randint(0, 11, (7,))


def chunked(
    x: Tensor, weight: Tensor, bias: Tensor, chunk: int, smoothing: float = 0.1
) -> tuple[Tensor, Tensor]:
    """`LinearCrossEntropy` on the labels above."""
    return LinearCrossEntropy.apply(x, weight, bias, labels, smoothing, chunk, False, True)


smoothing_loss = LabelSmoothing(0.1, padding_idx=-1)
for chunk in (1, 3, 7, 100):
    torch.testing.assert_close(
        chunked(x, weight, bias, chunk), smoothing_loss(F.linear(x, weight, bias), labels)
    )
assert torch.autograd.gradcheck(lambda *inputs: chunked(*inputs, chunk=3)[0], (x, weight, bias))

# Logits of a thousand: a naive exp would overflow.
huge = 1000 * x
torch.testing.assert_close(
    chunked(huge, weight, bias, 3), smoothing_loss(F.linear(huge, weight, bias), labels)
)

# %%
ROWS_AT_ONCE = 512  # 512 × 8,192 logits are 16 MiB: they stay in the last cache


def rows_loss(
    generator: Generator, x: Tensor, labels: Tensor, criterion: LabelSmoothing, how: Switches
) -> tuple[Tensor, Tensor]:
    """`criterion(generator(x), labels)`: x (N, D), labels (N,), to two sums in nats."""
    x, proj = generator.narrow(x), generator.proj
    if how.loss == "textbook":
        return criterion(linear(proj, x, how), labels)
    smoothing = criterion.smoothing
    return LinearCrossEntropy.apply(
        x,
        proj.weight,
        proj.bias,
        labels,
        smoothing,
        ROWS_AT_ONCE,
        how.onednn,
        torch.is_grad_enabled(),
    )


# %% [markdown]
# **Predict.** For 2,048 rows and 8,192 columns in single precision: how much does the backward pass keep in memory by the textbook's loss, and how much by ours?


# %%
def loss_memory(how: Switches, rows: int = 2048) -> int:
    """Bytes that the loss on `rows` targets keeps for its backward pass, in single precision."""
    generator = Generator(SMALL.d_model, SMALL.vocab).float()
    x = torch.randn(rows, SMALL.d_model, dtype=torch.float32, requires_grad=True)
    labels = torch.randint(EOS, SMALL.vocab, (rows,))
    return saved_bytes(lambda: rows_loss(generator, x, labels, LabelSmoothing(0.1), how))


kept = {how.loss: loss_memory(how) for how in (PLAIN, FAST)}
assert kept["textbook"] > 3 * kept["ours"]
print(*(f"{name}: {size / 2**20:.0f} MiB" for name, size in kept.items()), sep="\n")

# %% [markdown]
# This is what is kept for the way back; on the way forward the textbook's loss needs more for a moment. Its 64 MiB are one matrix of logits, and 10 MiB the output's weights and rows. Ours keeps two finished gradients, 8 MiB by the weights and 2 MiB by the rows.

# %% [markdown]
# ## Put together
#
# What remains is to walk through the modules in the order of chapter 4, with rows. Each function below does what the module of its first argument does.


# %%
def residual(
    connection: SublayerConnection, x: Tensor, sublayer: Callable[[Tensor], Tensor], how: Switches
) -> Tensor:
    """What `connection` computes around `sublayer`: x (N, D) to (N, D)."""
    p = dropout_rate(connection)
    if connection.norm_first:
        return dropped_sum(x, sublayer(normed(connection.norm, x, how)), p, how)
    return normed(connection.norm, dropped_sum(x, sublayer(x), p, how), how)


def attend(
    layer: MultiHeadedAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    how: Switches,
    causal: bool = False,
) -> Tensor:
    """The heads' work without projections: q (B, T, D), k and v (B, S, D), to (B, T, D).

    `causal` says that `bias` hides the future and nothing else. PyTorch's fastest kernel knows that
    mask by name; one that is given as numbers rules the kernel out.
    """
    features = getattr(layer, "feature_dropout", 0.0) if layer.training else 0.0  # UniDrop's
    q, k, v = (dropped(x, features, how) for x in (q, k, v))
    q, k, v = (split_heads(x, layer.h) for x in (q, k, v))  # (B, H, T or S, d_k)
    p = dropout_rate(layer)
    if how.attention == "ours":
        return merge_heads(AttentionCore.apply(q, k, v, bias, p))
    if how.attention == "sdpa":
        mask = None if causal or bias is None else bias.to(q.dtype)
        heads = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=causal)
        return merge_heads(heads)
    return merge_heads(attention(q, k, v, bias, layer.dropout)[0])


def self_attention(
    layer: MultiHeadedAttention,
    x: Tensor,
    layout: Layout,
    bias: Tensor | None,
    how: Switches,
    causal: bool = False,
) -> Tensor:
    """What `layer` computes from x to x: (N, D) to (N, D)."""
    linears = (layer.project_query, layer.project_key, layer.project_value)
    q, k, v = project(x, linears, layout, how)  # (B, T, D) each
    heads = attend(layer, q, k, v, bias, how, causal)
    return linear(layer.project_output, layout.gather(heads), how)


def cross_attention(
    layer: MultiHeadedAttention,
    x: Tensor,
    layout: Layout,
    keys_and_values: tuple[Tensor, Tensor],
    bias: Tensor | None,
    how: Switches,
) -> Tensor:
    """What `layer` computes from x (N, D) to the memory, whose keys and values (B, S, D) are given."""
    q = layout.spread(linear(layer.project_query, x, how))  # (B, T, D)
    heads = attend(layer, q, *keys_and_values, bias, how)  # (B, T, D)
    return linear(layer.project_output, layout.gather(heads), how)


# %%
def embed(modules: nn.Sequential, ids: Tensor, layout: Layout, how: Switches) -> Tensor:
    """What embedding and positions compute, row by row: ids (B, T) to (N, D)."""
    embedding, position = modules
    check_length(ids.size(1), position.pe.size(0))
    words = embedding(layout.rows(ids))  # (N, D)
    places = F.embedding(layout.positions, position.pe)  # (N, D)
    return dropped(words + places, dropout_rate(position), how)


def encode_rows(model: EncoderDecoder, src: Tensor, layout: Layout, how: Switches) -> Tensor:
    """`model.encode` row by row: src (B, S) to the memory (N, D)."""
    x = embed(model.src_embed, src, layout, how)
    bias = layout.bias(x.dtype)
    for layer in model.encoder.layers:
        look = partial(self_attention, layer.self_attn, layout=layout, bias=bias, how=how)
        x = residual(layer.sublayer[0], x, look, how)
        x = residual(layer.sublayer[1], x, partial(feed_forward, layer.feed_forward, how=how), how)
    return normed(model.encoder.norm, x, how)


def decode_rows_of(
    model: EncoderDecoder,
    memory: Tensor,
    src_layout: Layout,
    tgt: Tensor,
    layout: Layout,
    how: Switches,
) -> Tensor:
    """`model.decode` row by row: memory (N_src, D) and tgt (B, T) to (N, D)."""
    keys_and_values = memory_keys_and_values(model.decoder, memory, src_layout, how)
    x, length = embed(model.tgt_embed, tgt, layout, how), tgt.size(1)
    padding = src_layout.bias(x.dtype)
    future = None  # (T, T), added to scores: padding comes later. PyTorch's attention makes its own
    if how.attention != "sdpa":
        future = x.new_full((length, length), -math.inf).triu(1)
    for layer, pair in zip(model.decoder.layers, keys_and_values, strict=True):
        look = partial(
            self_attention, layer.self_attn, layout=layout, bias=future, how=how, causal=True
        )
        cross = partial(
            cross_attention,
            layer.src_attn,
            layout=layout,
            keys_and_values=pair,
            bias=padding,
            how=how,
        )
        x = residual(layer.sublayer[0], x, look, how)
        x = residual(layer.sublayer[1], x, cross, how)
        x = residual(layer.sublayer[2], x, partial(feed_forward, layer.feed_forward, how=how), how)
    return normed(model.decoder.norm, x, how)


# %%
def rows_pay(real: Tensor) -> bool:
    """Whether so much of a rectangle (B, T) is padding that rows are worth their copies: an eighth."""
    return int(real.sum()) < 7 / 8 * real.numel()


def target_rows(
    model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing, how: Switches = FAST
) -> tuple[Tensor, Tensor]:
    """What the generator gets to see: the decoder's rows (N, D), and their labels (N,)."""
    is_source, is_target = (ids != criterion.padding_idx for ids in (batch.src, batch.tgt_y))
    src_layout = Layout(is_source, how.packed and rows_pay(is_source))
    layout = Layout(is_target, how.packed and rows_pay(is_target))
    memory = encode_rows(model, batch.src, src_layout, how)
    x = decode_rows_of(model, memory, src_layout, batch.tgt, layout, how)  # (N, D)
    labels = layout.rows(batch.tgt_y)
    if layout.full and how.loss == "ours":  # which knows of no padding
        real = layout.rows(is_target)
        x, labels = x[real], labels[real]
    return x, labels


def fast_loss(
    model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing, how: Switches = FAST
) -> tuple[Tensor, Tensor]:
    """`batch_loss` by the fast path: the same model, the same two sums, the same gradients."""
    x, labels = target_rows(model, batch, criterion, how)
    return rows_loss(model.generator, x, labels, criterion, how)


# %% [markdown]
# And the check of checks: each switch alone, each combination on the way from all off to all on, pre-norm and post-norm, against the path of chapters 1 to 6. Outputs, and the gradient of every weight, in double precision. (oneDNN has none of that: its products are held against MKL's in float32, above and in the tests.)


# %%
def loss_and_gradients(
    loss_of: Callable[..., tuple[Tensor, Tensor]], model: EncoderDecoder, batch: Batch
) -> dict[str, Tensor]:
    """The two sums of the loss, and the gradient of every weight."""
    model.zero_grad()
    loss, nll = loss_of(model, batch, LabelSmoothing(0.1))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "nll": nll.detach()} | gradients


def each_switch() -> list[Switches]:
    """From all off to all on one by one, each alone on and alone off, and PyTorch's attention."""
    on, off = ({k: v for k, v in asdict(how).items() if k != "half"} for how in (FAST, PLAIN))
    alone = [replace(PLAIN, **{name: value}) for name, value in on.items()]
    without = [replace(FAST, **{name: value}) for name, value in off.items()]
    sdpa = [replace(how, attention="sdpa") for how in (PLAIN, FAST)]
    steps = [PLAIN]
    for name, value in on.items():
        steps.append(replace(steps[-1], **{name: value}))
    return list(dict.fromkeys([*steps, *alone, *without, *sdpa]))


checked = 0
for norm_first in (True, False):
    torch.manual_seed(5)
    model = series_model(replace(TINY, norm_first=norm_first)).eval()
    scramble(model)  # biases start at 0, where a forgotten one would not show
    expected = loss_and_gradients(batch_loss, model, batch)
    for how in each_switch():
        found = loss_and_gradients(partial(fast_loss, how=how), model, batch)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        checked += 1
print(f"{checked} combinations: the same loss, likelihood and gradients, to ten digits")

# %% [markdown]
# With dropout on, the two paths draw different masks, so only their distributions can agree: the mean of many losses, and their spread.

# %%
torch.manual_seed(6)
model = series_model(replace(TINY, dropout=0.2)).train()
with torch.no_grad():
    losses = {
        name: torch.stack([loss_of(model, batch, criterion)[0] for _ in range(200)]) / batch.ntokens
        for name, loss_of in (("textbook", batch_loss), ("ours", fast_loss))
    }
gap = (losses["textbook"].mean() - losses["ours"].mean()).abs()
error = torch.stack([values.std() / math.sqrt(200) for values in losses.values()]).norm()
assert gap < 4 * error
assert 0.7 < losses["ours"].std() / losses["textbook"].std() < 1.4

# %% [markdown]
# ## Sixteen bits
#
# > **In short.** Where a processor has instructions for them, products of 16-bit numbers cost a fraction of those of 32. Round the factors and the result of a product, and keep all else in 32 bits.
#
# bfloat16 is the first half of a float32: the same range, and 8 digits of base 2 in place of 24. Rounding a number to it moves it by at most $u = 2^{-8}$ of itself. Let $\hat x_i$ and $\hat w_i$ be the rounded factors of a product. Its sum is kept in 32 bits, and the result $y$ is rounded once more, so
#
# $$ y = \mathrm{round}\Big(\sum_i \hat x_i \hat w_i\Big), \qquad \Big|y - \sum_i x_i w_i\Big| \;\le\; \big((1+u)^3 - 1\big) \sum_i |x_i w_i| \;\approx\; 3u \sum_i |x_i w_i| $$
#
# and mostly the errors cancel. The switch `half` does this and no more: the factors of products are rounded, and what goes straight into the next product stays so. Weights, the residual sum, LayerNorm, softmax, the loss and the optimizer have 32 bits; a weight's gradient is the rounded result of a product, and is added up in 32. (PyTorch's `autocast` follows the same idea, operation by operation. It can't be told of our own functions.)
#
# Newer processors have the instructions; `multiplies_bf16` asks. Elsewhere the same code runs, slower than in float32.


# %%
def multiplies_bf16(device: torch.device) -> bool:
    """Whether `device` has instructions for bfloat16 products: most GPUs of today, few CPUs."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    ask = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # PyTorch 2.6 and newer
    return bool(ask and ask())


HALF = replace(FAST, half=True)

# %% [markdown]
# The bound, on a product and on its two gradients, entry by entry:

# %%
torch.manual_seed(7)
x, weight, grad = (
    torch.randn(*shape, dtype=torch.float32) for shape in ((40, 64), (48, 64), (40, 48))
)
leaves = [x.bfloat16().requires_grad_(), weight.clone().requires_grad_()]
y = LinearProduct.apply(*leaves, torch.zeros(48, dtype=torch.float32), True)
y.backward(grad.bfloat16())
unit = 2.0**-8
for found, a, b in (
    (y, x, weight.T),
    (leaves[0].grad, grad, weight),
    (leaves[1].grad, grad.T, x),
):
    # A little more than (1 + u)³ − 1: sums in 32 bits round, too.
    error, most = (found - a @ b).abs(), (3 * unit + 4 * unit**2) * (a.abs() @ b.abs())
    assert (error <= most).all()
    assert (error > most / 100).any()  # and the bound isn't idle
assert y.dtype == torch.bfloat16 and leaves[1].grad.dtype == torch.float32

# %% [markdown]
# **Predict.** The whole model has many such products, one behind the other. How far is its loss from that in 32 bits: in the second digit, the third, the fourth?

# %%
torch.manual_seed(9)
model = series_model(replace(TINY, d_model=64, d_ff=128, dropout=0.0)).float()
exact = loss_and_gradients(fast_loss, model, batch)
halved = loss_and_gradients(partial(fast_loss, how=HALF), model, batch)
off = (halved["nll"] / exact["nll"] - 1).abs().item()
flat = [
    torch.cat([sums[name].flatten() for name, _ in model.named_parameters()])
    for sums in (exact, halved)
]
apart = ((flat[1] - flat[0]).norm() / flat[0].norm()).item()
less = "less" if off < 1e-3 and apart < 0.03 else "more"
print(f"loss off by {less} than a thousandth; the gradient, as one vector, by {less} than 3%")
assert off < 1e-3 and apart < 8 * unit  # the gradient, as one vector

# %% [markdown]
# The errors of a long sum cancel, and the loss is the mean of many. Gradients are noisier: three good digits in, two out. That is little beside what another batch would change.
#
# ## Around the step
#
# Three settings are not in the model at all.
#
# **Freed memory.** When PyTorch frees a tensor of many megabytes, the C library gives it back to the operating system; the next one comes fresh, page by page, each page zeroed by the kernel. A 64 MiB result is then up to 16,384 page faults. Four settings tell the library to keep what is freed, and to keep it in one heap, from which all threads may take. It works on Linux with glibc, and costs memory.


# %%
def keep_memory() -> bool:
    """Have the C library keep freed memory for the next tensor. False where it isn't glibc."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mmap_max, trim_threshold, top_pad, arena_max = -4, -1, -2, -8  # the names of mallopt(3)
    libc = ctypes.CDLL(None)
    settings = (
        (mmap_max, 0),
        (trim_threshold, 2**31 - 1),
        (top_pad, 64 * 2**20),
        (arena_max, 1),  # one heap for all threads: a thread's own is given back when it shrinks
    )
    return all([libc.mallopt(name, value) == 1 for name, value in settings])


# %% [markdown]
# **Adam in one kernel.** `torch.optim.Adam` makes a dozen passes over all weights; with `fused=True`, one. And `zero_grad(set_to_none=True)`, the default today, is right: the first gradient is then stored, not added to zeros.
#
# **Threads.** Use as many as there are cores, and let them spin for a moment before they sleep (`OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=20000`, as the Makefile does). A thread that sleeps at once wakes up late, several hundred times a step.
#
# ## What each step is worth
#
# Speeds of single runs mislead: the machine has slow moments. So two programs step in turns over the same real batches, and what counts is the ratio of their times, round by round ([`scripts/bench/training.py`](../scripts/bench/training.py)). Here our path races against itself without one of its parts. A dot is the median of the rounds, the line goes from the lowest to the highest. **Predict** which part is worth most in 32 bits, and which in 16.


# %%


switches_chart(record)

# %% [markdown]
# *Dropout's random numbers* are worth most in both precisions, and more in 16 bits, where everything else has shrunk. *LayerNorm in one kernel* and *the loss in chunks* pay in both as well; the loss saves a good third of the memory besides. *Attention by hand*, *the fused Adam* and *kept memory* pay in 16 bits, and can't be told from noise in 32. Neither can *joint projections*, in either precision, nor *rows*: the buckets leave so little padding that the rectangles stay. And *oneDNN's products* cost time in float32: they were the faster ones on another maker's processor, where earlier records come from, and on this one MKL is. So a switch is worth asking for on each machine.

# %%
worth = switches_frame(record).set_index(["without", "precision"])
in_both = ["dropout from 16 bits", "LayerNorm in one kernel", "loss in chunks"]
in_16_bits = ["attention by hand", "the fused Adam", "freed memory kept"]
for precision in ("float32", "bfloat16"):
    one = worth.xs(precision, level="precision")
    assert one["times"].idxmax() == in_both[0] and (one.loc[in_both, "low"] > 1).all()
    unsure = one.loc[["joint projections", "rows"]]
    assert (unsure["low"] < 1).all() and (unsure["high"] > 1).all()
    sure = one.loc[in_16_bits, "low"] > 1
    assert sure.all() if precision == "bfloat16" else not sure.any()
assert worth.loc[("oneDNN's products", "float32"), "high"] < 1
lean, whole = (record["reports"][name]["peak_bytes"] for name in ("ours", "without loss in chunks"))
assert lean < 0.65 * whole

# %% [markdown]
# And what no switch decides: batches, memory, threads, dropout, and PyTorch's own compiler on the textbook's code.

# %%
others = [
    "textbook, padded to 72",
    "textbook",
    "textbook, memory kept",
    "textbook, torch.compile",
    "one thread",
    "no dropout at all",
]
pd.DataFrame(
    {"times as long as ours": {name: round(record["reports"][name]["times"], 2) for name in others}}
)

# %% [markdown]
# Batching comes first: with every row padded to 72, as The Annotated Transformer has them, the same textbook code takes about five times as long for a real token as in buckets. `torch.compile` of the textbook's loss, with memory kept, is about as fast as the plain code with memory kept: what it fuses was cheap, and what was dear it doesn't touch. And of dropout about a tenth of our step is left.

# %%
times = {name: record["reports"][name]["times"] for name in others}
assert 4.5 < times["textbook, padded to 72"] / times["textbook"] < 5.5
assert abs(times["textbook, torch.compile"] / times["textbook, memory kept"] - 1) < 0.1
assert 0.85 < times["no dropout at all"] < 0.95
account_chart(
    record["accounts"],
    "Where the time went, and where it goes now",
    "Seconds of one step, by kind of operation, from the profiler. Random bits, LayerNorm and sums shrink by our code, the products in 16 bits. Copies and Python do not.",
)

# %% [markdown]
# ## Against others
#
# > **In short.** Same architecture, same batches, same machine, in turns; each program in both precisions, and with the settings that everybody can have.
#
# Three implementations that people use, of the same size: `nn.Transformer`, Hugging Face's `MarianMTModel`, and x-transformers. Each gets the loss from `F.cross_entropy` and PyTorch's Adam, as its users would. (x-transformers has no biases in its attention, no dropout after a sublayer, and GELU; we leave it as it is.) Each runs as it comes, with freed memory kept, and both of these under `autocast`. The batches are chapter 7's buckets; what counts is *real* target tokens.
#
# ```bash
# make bench                                  # this comparison, on your machine
# python -m scripts.bench.training steps      # the section before
# python -m scripts.bench.training base       # the paper's base model
# python -m scripts.bench.training growth     # the section after this one
# ```


# %%
peers = load_record("speed-peers")
print(peers["repeat"])
print(peers["device"])
peers_chart(peers)

# %%
peers_frame(peers).set_index(["program", "precision", "setting"]).drop(columns=["low", "high"])

# %%
times = {name: report["times"] for name, report in peers["reports"].items()}
memory = {name: report["peak_bytes"] for name, report in peers["reports"].items()}
rivals = [name for name in times if not name.startswith(("ours", "textbook"))]
in_float32 = [name for name in rivals if name.endswith(", float32")]
at_best = [name for name in rivals if name.endswith("bf16, memory kept")]
print(f"ours in float32: {times['ours, float32']:.2f} times as long as in 16 bits")
print(f"the best of the others as it comes: {min(times[name] for name in in_float32):.2f} times")
print(
    f"and at its best, in 16 bits with memory kept: {min(times[name] for name in at_best):.2f} times"
)
assert times["ours, float32"] > 1.7 and min(times[name] for name in at_best) > 1.5
kept_float32 = [name for name in rivals if name.endswith("float32, memory kept")]
assert 1.15 < min(times[name] for name in kept_float32) / times["ours, float32"] < 1.3
assert 5 < peers["matrix_rate_bf16"] / peers["matrix_rate"] < 7
assert 0.1 < peers["reports"]["ours, bf16"]["mfu"] < 0.2
halved_account = record["accounts"]["bf16"]
products = halved_account["matrix products"] + halved_account["attention's products"]
assert 0.2 < products / sum(halved_account.values()) < 0.3
assert max(memory["ours, bf16"], memory["ours, float32"]) < min(memory[name] for name in rivals)

# %% [markdown]
# The best of the others is x-transformers, which does a little less work (see above). At its best, with the settings that everybody can have, it takes half as long again as ours in 16 bits. In float32, memory kept on both sides, it takes a fifth longer than ours in float32. Our peak of memory is the lowest, since the logits never exist as a whole.
#
# The last column is the *model FLOPs utilisation*: the operations of the real tokens, counted by hand, over the time of the whole step, as a share of the rate of a large square product in the same precision and the same run. The rate in 16 bits is six times that in 32. At that rate all our products would take a seventh of the step; in fact they take about a quarter, and the rest is copies, sums and Python.
#
# How much 16 bits give depends on the processor: on one whose products gain less, all ratios are smaller.
#
# ### The base model
#
# The textbook's path and ours in float32, on the paper's base model (6+6 layers, D = 512), in batches of 4,096 tokens; an earlier record of another machine. Its products are larger, so a larger share of the time is arithmetic.


# %%
base = load_record("speed-base")
used = {name: report["mfu"] for name, report in base["reports"].items()}
assert used["ours"] >= 0.6
print(*(f"{name}: {share:.0%} of the matrix rate" for name, share in used.items()), sep="\n")
account_chart(
    {"ours": base["account"]},
    "A step of the base model, on our path",
    "Seconds by kind of operation. Nearly all of the time is products.",
)

# %% [markdown]
# The remainder is accounted for: some of it is the small bars, and some that the products themselves run below the rate of a large square one.

# %%
products = base["account"]["matrix products"] + base["account"]["attention's products"]
in_products = products / sum(base["account"].values())
print(
    f"{in_products:.0%} of the time is products, at {used['ours'] / in_products:.0%} of the matrix rate"
)
assert in_products > 0.8

# %% [markdown]
# ## How it grows
#
# > **In short.** Turn one knob, leave the others, and draw both axes as logarithms. The slope is the exponent.
#
# Theory first. At a fixed number of tokens the linear layers don't care about the length, and attention's own products grow with it. Tokens: everything in proportion. Width: the layers' products grow as D², the logits and the tables with V·D. Depth: in proportion, but for the logits. So **predict** the four exponents of time, given that our models are small.


# %%
AXES = {
    "length": [8, 16, 32, 64, 128, 256],
    "tokens": [256, 512, 1024, 2048, 4096, 8192],
    "width": [64, 128, 256, 512, 768],
    "depth": [1, 2, 3, 6, 9, 12],
}


def growth_setting(axis: str, value: int) -> tuple[Shape, int, int]:
    """Shape, sentences and length of a step where one axis is set and the others stay in the middle."""
    length = value if axis == "length" else 32
    tokens = value if axis == "tokens" else 2048
    shape = SMALL
    if axis == "width":
        shape = replace(shape, d_model=value, d_ff=4 * value)
    if axis == "depth":
        shape = replace(shape, N=value)
    return shape, tokens // length, length


# %%


growth = load_record("speed-growth")
print(f"{growth['date'][:10]}, in float32, on an earlier machine: {growth['device']}")
growth_chart(growth)


# %%
def fitted_exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """The b of cost ≈ a·valueᵇ: least squares on the logarithms."""
    x, y = (torch.tensor(list(v), dtype=torch.float64).log() for v in (values, costs))
    return (((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()).item()


def growth_table(record: dict[str, Any]) -> pd.DataFrame:
    """Fitted exponents of time and memory along each axis and by each path, beside the operations'."""
    frame = pd.DataFrame(record["points"])
    rows = []
    for (axis, path), group in frame.groupby(["axis", "path"], sort=False):
        exponents = [
            fitted_exponent(group["value"], group[cost]) for cost in ("seconds", "bytes", "flops")
        ]
        rows.append([axis, path, *(f"{e:.2f}" for e in exponents)])
    return pd.DataFrame(rows, columns=["axis", "path", "time", "memory", "operations (theory)"])


assert abs(fitted_exponent([1, 2, 4, 8], [3, 12, 48, 192]) - 2) < 1e-12
growth_table(growth).set_index(["axis", "path"])

# %% [markdown]
# *Length* hardly matters here, as the theory says: from 8 to 256 tokens the operations grow by 15%. Time grows by more, since scores and softmax are passes over memory; the quadratic term is on its way, and at a few thousand tokens it would rule. *Tokens* cost in proportion, with a small fixed share. *Width* is where the two paths differ most. The operations grow with an exponent between 1, for the logits, and 2, for the layers; the textbook's time grows more slowly, because at small widths it is busy with everything but products. In width, the closer a path is to the floor, the closer its exponent comes to that of the operations. *Depth* stays below 1, as the logits are there at any depth.

# %%
exponent = {
    (row["axis"], row["path"]): float(row["time"]) for _, row in growth_table(growth).iterrows()
}
theory = fitted_exponent(
    AXES["width"],
    [step_flops(growth_setting("width", w)[0], [(32, 32)] * 64) for w in AXES["width"]],
)
assert exponent["width", "textbook"] < exponent["width", "ours"] < theory
assert exponent["length", "ours"] < 0.2 and 0.8 < exponent["tokens", "ours"] < 1.1

# %% [markdown]
# ## On a GPU
#
# > **In short.** A GPU has the opposite trouble. Its multipliers are so fast that it has done one small task before Python has asked for the next. There, speed means asking less often.
#
# A *kernel* is one program that the GPU runs, such as a product or a sum. To *launch* it, the CPU sends an order, which takes it some microseconds. A step of ours is many hundreds of kernels, and most of them are done sooner than that. Rows of varying number, which save padding, make every step another shape; and each decision that depends on the data ("how many rows are real?") makes the CPU wait for the GPU. So on a GPU we go the other way:
#
# - **bf16** for the products, by autocast, with weights and sums in float32;
# - **PyTorch's attention**, which has fast kernels there, dropout included;
# - **few static shapes**: each pair goes into the narrowest of eight widths; the widths are chosen so that padding is least, exactly, by dynamic programming;
# - **the corpus on the device**, once: 29,000 pairs are some tens of megabytes;
# - **CUDA graphs**: a CUDA graph is a list of kernels that was recorded once and is launched as one. We record one whole optimizer step for each of the eight shapes (with `--accumulate`, for each sequence of shapes). Each recording costs time and memory; hence so few.
#
# (PyTorch's `varlen_attn` takes packed rows as they are, but it has no dropout on the attention weights. So it is another training, and we leave it.)
#
# The code below runs on any device, and tests check it on a CPU. **No GPU has run it yet**: what is said here of speed is what we expect. `python -m scripts.gpu` will tell.


# %%
@dataclass
class Rectangles:
    """Source ids (B, S) and the full target (B, T+1), and what a loss reads of them; no counts.

    A `Batch` counts its labels, and to count is to wait for the device.
    """

    src: Tensor
    full: Tensor

    @property
    def tgt(self) -> Tensor:
        """What the decoder reads (B, T)."""
        return self.full[:, :-1]

    @property
    def tgt_y(self) -> Tensor:
        """What it must say (B, T)."""
        return self.full[:, 1:]

    @property
    def src_mask(self) -> Tensor:
        """Hides padding (B, 1, S)."""
        return padding_mask(self.src, PAD)

    @property
    def tgt_mask(self) -> Tensor:
        """Hides padding and the future (B, T, T)."""
        return padding_mask(self.tgt, PAD) & subsequent_mask(self.tgt.size(1), self.tgt.device)


def longer_side(example: Example) -> int:
    """Tokens of the longer side: the width that the pair needs."""
    return max(len(example.src), len(example.tgt) - 1)


def static_lengths(examples: Sequence[Example], shapes: int = 8) -> list[int]:
    """The `shapes` widths that hold all examples with the fewest padded cells.

    Exact, by dynamic programming over the widths that occur. After k rounds `best[i]` has, for the
    pairs of the i narrowest of them, the fewest cells in at most k widths, and those widths.
    """
    widths = sorted({longer_side(e) for e in examples})
    counts = Counter(longer_side(e) for e in examples)
    below = [0, *accumulate(counts[w] for w in widths)]  # pairs among the i narrowest widths
    best = {0: (0, ())}  # how many widths are served: (cells, the widths chosen)
    for _ in range(min(shapes, len(widths))):
        with_one_more = dict(best)
        for end in range(1, len(widths) + 1):
            for start, (cells, chosen) in best.items():
                if start < end:
                    total = cells + (below[end] - below[start]) * widths[end - 1]
                    if total < with_one_more.get(end, (math.inf,))[0]:
                        with_one_more[end] = (total, (*chosen, widths[end - 1]))
        best = with_one_more
    return list(best[len(widths)][1])


# %%
rng = random.Random(1)
some = [Example([EOS] * rng.randint(3, 30), [BOS] * rng.randint(4, 32)) for _ in range(400)]
widths = static_lengths(some, shapes=3)
sides = sorted(longer_side(e) for e in some)


def cells(widths: Sequence[int], sides: Sequence[int]) -> int:
    """Cells of all rows when each is padded to the narrowest width that holds it."""
    return sum(next(w for w in widths if side <= w) for side in sides)


# The dynamic programme against all choices of three widths.
every = itertools.combinations(sorted(set(sides)), 3)
assert cells(widths, sides) == min(cells(c, sides) for c in every if c[-1] == sides[-1])
real = sum(len(e.src) + len(e.tgt) - 1 for e in some)
padding = {n: 1 - real / (2 * cells(static_lengths(some, n), sides)) for n in (1, 2, 4, 8)}
for number, share in padding.items():
    print(f"{share:.0%} of the cells are padding if there are {number} widths")  # both sides


# %%
class ResidentCorpus:
    """A corpus that lives on the device: a batch is cut out of it, and nothing crosses the bus.

    `width` is that of the widest batch, which holds every pair. The last row is the filler: a source of one eos, so that
    attention has a key, and no target.
    """

    def __init__(self, examples: Sequence[Example], device: torch.device | str, width: int):
        rows, self.filler = [*examples, Example([EOS], [PAD, PAD])], len(examples)
        sides = (pad_rows([e.src for e in rows]), pad_rows([e.tgt for e in rows]))
        wide = [F.pad(x, (0, width - x.size(1) + i), value=PAD) for i, x in enumerate(sides)]
        self.src, self.full = (x.to(device) for x in wide)  # (n + 1, S), (n + 1, T + 1)

    def batch(self, rows: Tensor, width: int) -> Rectangles:
        """The pairs of these rows (B,), `width` tokens a side."""
        return Rectangles(self.src[rows, :width], self.full[rows, : width + 1])


# %%
def narrowest(widths: Sequence[int], side: int) -> int:
    """The narrowest of the `widths`, in rising order, that holds `side` tokens."""
    return widths[bisect.bisect_left(widths, side)]


def static_batches(
    examples: Sequence[Example], widths: Sequence[int], max_tokens: int, rng: random.Random
) -> list[list[int]]:
    """An epoch's batches: every pair once, each batch of pairs that take the same of the widths."""
    groups: dict[int, list[int]] = {width: [] for width in widths}
    order = list(range(len(examples)))
    rng.shuffle(order)
    for i in order:
        groups[narrowest(widths, longer_side(examples[i]))].append(i)
    batches = []
    for width, group in groups.items():
        size = max_tokens // width
        batches += [group[at : at + size] for at in range(0, len(group), size)]
    rng.shuffle(batches)
    return batches


# %% [markdown]
# Of the switches three stay on. Rows and our loss choose cells by the data, and our attention, the 16-bit dropout and oneDNN were written for a CPU.

# %%
STATIC = replace(PLAIN, fused_norm=True, joint_projections=True, attention="sdpa")

# %% [markdown]
# The step itself is in [`scripts/engine/steps.py`](../scripts/engine/steps.py), in three kinds: `eager` (any shape, kernel by kernel), `static` (few shapes, out of the resident corpus) and `graphed` (static, recorded and replayed). No kind waits for the device: the loss stays there until somebody asks for it, and a step that isn't finite is skipped on the device itself. Before a recording three warm-up steps run that change nothing; after it the random generator is put back. So, given the same batches, all kinds take the same steps. Tests hold them equal to the textbook's, with a stand-in for the recording; the first thing that `python -m scripts.gpu` does is to ask a real GPU.


# %% [markdown]
# ## In the next chapter
#
# Chapter 9 trains with the fast path unless told otherwise: `--path textbook` goes back. The loop sees one argument, the function that gives the loss. A model's weights are the same kind either way; the settings remember which path a run took.


# %%
def switches_for(device: torch.device, half: bool = False) -> Switches:
    """The switches that suit a device: `FAST` on a CPU; static and PyTorch's own kernels on a GPU.

    With `half` a CPU multiplies 16-bit factors (on a GPU that is autocast's business).
    """
    if device.type != "cpu":
        return STATIC
    return HALF if half else FAST


assert switches_for(torch.device("cpu")) == FAST
assert not switches_for(torch.device("cuda")).packed

# %% [markdown]
# ## Summary
#
# - Count operations and bytes, measure the machine's two rates, and you have a floor. Progress is measured over it.
# - Padding is the largest waste, and batching removes most of it. Rows remove the rest.
# - Products are near the roof from the start. What can be won is everything around them: random numbers, copies, fresh memory, passes over wide tensors.
# - A backward pass by hand keeps only what it needs, and `gradcheck` proves it.
# - A switch counts only if outputs and gradients stay the same.
#
# ## What the paper did that we don't
#
# - It trained on eight P100 GPUs with 25,000 tokens a side in a batch. Ours are 2,048, so on a GPU we expect launches, and not products, to be the limit.
# - It reports training cost in operations (Table 2), as the product of time, GPUs and their rated speed. We count the operations that were useful.

# %% [markdown]
# ## Exercises

# %% [markdown]
# ### Exercise 1 · Tokens a second
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Every benchmark of this chapter reports real target tokens a second: what the model is asked to predict, `</s>` included, padding not. Write `token_rate(batches, seconds)` for a list of `Batch` and the seconds that each took. `solution("token_rate")` shows ours.


# %%
def token_rate(batches: list[Batch], seconds: list[float]) -> float:
    """Real target tokens a second over all batches together."""
    ...


check(token_rate)

# %% [markdown]
# ### Exercise 2 · A stopwatch for a GPU
#
# *code · difficulty ●●○ · worth ●●● · 15 minutes*
#
# A GPU takes orders and returns at once; `wait()` returns when all of them are done. The first call of anything is slow (kernels are loaded, memory is fetched), and now and then something disturbs. Write `stopwatch(work, wait, clock, rounds)`: the median over `rounds` of the seconds that one `work()` takes, by `clock()`, after one call that isn't timed. The checker has a pretend device with a clock of its own, so its times are exact. `solution("stopwatch")` shows ours.


# %%
def stopwatch(work: Callable, wait: Callable, clock: Callable, rounds: int) -> float:
    """The median seconds of one `work()`, warmed up and waited for."""
    ...


check(stopwatch)

# %% [markdown]
# ### Exercise 3 · Attention without spreading
#
# *code · difficulty ●●○ · worth ●●○ · 15 minutes*
#
# Our path spreads rows into a rectangle for attention. Kernels for long sentences don't: they keep all sentences of a batch in one list of rows, one behind the other, and each row may look at its own sentence alone. Write `packed_attention(q, k, v, lengths, causal)` for one head: `q`, `k`, `v` (N, d) with N the sum of `lengths`, to (N, d); with `causal` a row sees itself and what comes before it in its sentence. (Plain operations will do: what counts is who sees whom.) `solution("packed_attention")` shows ours.


# %%
def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """Rows (N, d) of sentences of these lengths, one behind the other, to (N, d)."""
    ...


check(packed_attention)

# %% [markdown]
# ### Exercise 4 · Another loss in chunks
#
# *code · difficulty ●●● · worth ●●○ · 40 minutes*
#
# Large models add a small loss that keeps the logits from drifting, the *z-loss* (Chowdhery et al. 2022): $\sum_n (\log Z_n)^2$ with $Z_n = \sum_v e^{z_{nv}}$. It needs all logits, and `LinearCrossEntropy` has just thrown them away. Write `chunked_z_loss(x, weight, bias, chunk)` for x (N, D), weight (V, D), bias (V,), which never holds more than `chunk` rows of logits, backward pass included. First derive $\partial\ell/\partial z$; it has two factors. `solution("chunked_z_loss")` shows ours.


# %%
def chunked_z_loss(x: Tensor, weight: Tensor, bias: Tensor, chunk: int) -> Tensor:
    """Σ (log Z)² for x (N, D), weight (V, D), bias (V,), with `chunk` rows of logits at a time."""
    ...


check(chunked_z_loss)

# %% [markdown]
# ### Exercise 5 · What would a check notice?
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Break the chapter in your head first, then in the code.
#
# 1. In `AttentionCore.backward`, use `weights` where `thinned` stands. Does `gradcheck` without dropout notice? With it?
# 2. Take 8 random bits an entry in `keep_mask` rather than 16. Which rate does p = 0.1 become, and does a check of this chapter notice?
#
# <details><summary>Answers</summary>
#
# 1. Without dropout the two are the same tensor, and nothing can notice. With it the gradient of V goes through weights that were dropped, and `gradcheck` fails at once. That is why both are checked.
# 2. 26/256, about 0.1016. Most likely none does: with 400,000 entries five standard deviations are 0.0024, and the rate is off by 0.0016. The mean stays right, since the factor uses the rate as rounded. Four times as many entries would tell.
#
# </details>

# %% [markdown]
# ### Exercise 6 · Your own machine
#
# *project · difficulty ●●○ · worth ●●○ · 60 minutes*
#
# The records of this chapter are another machine's. Choose one, predict, then measure with exercise 2's stopwatch.
#
# - Draw the roofline: `python -m scripts.bench.training steps`. Which operations changed sides of the bend?
# - Set `ROWS_AT_ONCE` to 64, to 4,096, and time the loss. Why is there a best value?
# - With one thread instead of two the time should double. The chart of what was not kept has the measured factor. Where does the difference come from?
# - Time `affine(grad.T, x.T, None, onednn)` with both libraries for a gradient of 2,048 × 1,024 and an input of 2,048 × 256. Which one would you take?
# - Put exercise 3's rows in place of `Layout.spread` and `gather`. At which length does the mask of blocks, which is N × N, cost more than the rectangle?
