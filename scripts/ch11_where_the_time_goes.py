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
# # Chapter 11 · Where the time goes
#
# After this chapter you can predict from two rates of your machine how long a training step takes at least, measure how long it takes, and say where the difference goes.
#
# | | |
# |---|---|
# | In the paper | §4 (Table 1), §5.1, §5.2, §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 40 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 10 · Judging](ch10_judging.ipynb) · [Chapter 12 · Going fast](ch12_going_fast.ipynb) |
#
# *If you read only three cells:* the first three charts.
#
# Shapes: **D** `d_model`, **H** heads, **V** vocabulary, **N** layers on either side, **L** a sentence's length on both sides.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from scripts.book.exercises import check
from scripts.book.figures import speed
from scripts.book.instruments import count_flops, moved_bytes, new_pages, slowest_inside, two_passes
from scripts.book.records import load_record
from scripts.ch01_attention import attention
from scripts.ch04_encoder_decoder import PAPER_VOCAB, EncoderDecoder, LayerNorm, make_model
from scripts.ch06_training import EOS, Batch, LabelSmoothing, batch_loss, train_step
from scripts.core.products import affine

# %% [markdown]
# ## Three questions
#
# > **In short.** Before you make a program faster, know the least time it can take, the time it takes, and where the difference goes.
#
# A training step of chapter 9's model takes about a second on a CPU. Is that good?
#
# Our batches have 2,048 tokens a side. We time PyTorch *as it comes*: a large tensor's memory (32 MiB or more, sometimes less) goes back to the system when the tensor is freed. A program that keeps it (chapter 12) has *memory kept*.


# %%
@dataclass(frozen=True)
class Shape:
    """The sizes of a Transformer, as benchmarks compare them; `N` encoder and `N` decoder layers."""

    N: int = 3
    d_model: int = 256
    d_ff: int = 1024
    h: int = 8
    vocab: int = 8192
    dropout: float = 0.1  # chapter 9: 0.2
    norm_first: bool = True


SMALL = Shape()
BASE = Shape(N=6, d_model=512, d_ff=2048, norm_first=False)  # the paper's, with our vocabulary


# %%
def series_model(shape: Shape) -> EncoderDecoder:
    """Our model of that shape, all tables tied."""
    sizes = {name: size for name, size in asdict(shape).items() if name != "vocab"}
    return make_model(shape.vocab, shape.vocab, tie="all", **sizes)


def parameter_count(shape: Shape) -> int:
    """Weights of our model of that shape."""
    with torch.device("meta"):  # shapes only: nothing is allocated
        return sum(p.numel() for p in series_model(shape).parameters())


# %%
print(f"our model {parameter_count(SMALL):,} weights, the base sizes {parameter_count(BASE):,}")

# %% [markdown]
# ## How many operations?
#
# > **In short.** Almost all of a Transformer's arithmetic is matrix products. List them, and you have its costs.
#
# A *FLOP* is one addition or multiplication of two floating-point numbers (FLOP/s: FLOPs in a second). In the product of an $(i \times j)$ by a $(j \times k)$ matrix, each of the $ik$ results takes $j$ multiplications and as many additions:
#
# $$ \text{FLOPs} = 2\,i\,j\,k $$
#
# Training adds the backward pass. For $Y = XW^\top$, with $X$ $(i \times j)$, $W$ $(k \times j)$ and the gradient $\partial\ell/\partial Y$ $(i \times k)$, it needs
#
# $$ \frac{\partial\ell}{\partial X} = \frac{\partial\ell}{\partial Y}\,W \quad (i \times j), \qquad \frac{\partial\ell}{\partial W} = \Big(\frac{\partial\ell}{\partial Y}\Big)^{\!\top} X \quad (k \times j) $$
#
# two products of the same size. So a step has thrice its forward pass's FLOPs.


# %%
@dataclass(frozen=True)
class Product:
    """`times` equal matrix products (n, i, j) @ (n, j, k) in the forward pass."""

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
    D, N = shape.d_model, shape.N
    sources, targets = (sum(side) for side in zip(*lengths, strict=True))  # rows
    listed = [
        Product(1, targets, D, D, 2 * N),  # cross-attention's queries and outputs
        Product(1, sources, D, 2 * D, N),  # its keys and values
        Product(1, targets, D, shape.vocab),  # logits
    ]
    for rows in (sources, targets):
        for i, j in ((D, 3 * D), (D, D), (D, shape.d_ff), (shape.d_ff, D)):
            listed.append(Product(1, rows, i, j, N))  # self-attention and feed-forward
    for s, t in lengths:
        for queries, keys in ((s, s), (t, t), (t, s)):  # encoder, decoder, from one to the other
            listed.append(Product(shape.h, queries, D // shape.h, keys, N))  # scores
            listed.append(Product(shape.h, queries, keys, D // shape.h, N))  # weights · V
    return listed


# %%
def step_flops(shape: Shape, lengths: Sequence[tuple[int, int]]) -> int:
    """FLOPs of a training step's products: each forward product has two of its size backward."""
    return 3 * sum(product.flops for product in forward_products(shape, lengths))


# %% [markdown]
# PyTorch counts products as they happen. Our list must agree to the last FLOP.


# %%
TINY = Shape(N=2, d_model=16, d_ff=32, h=2, vocab=50)


def random_batch(shape: Shape, sentences: int, length: int) -> Batch:
    """Random sentences of `length` tokens on both sides, without padding."""
    ids = torch.randint(EOS + 1, shape.vocab, (2, sentences, length + 1))
    return Batch(ids[0, :, 1:], ids[1])


tiny_step = series_model(TINY), random_batch(TINY, 6, 10), LabelSmoothing(0.1)
forward = count_flops(lambda: batch_loss(*tiny_step))
both = count_flops(lambda: batch_loss(*tiny_step)[0].backward())
assert 3 * forward == both == step_flops(TINY, [(10, 10)] * 6)
print(f"{forward:,} FLOPs forward, {both:,} with the backward pass")

# %% [markdown]
# ### A rule of thumb
#
# Each weight of a matrix takes part in one multiplication and one addition for each token, and in twice as many in the backward pass. (Looking up costs nothing: the rule fits since our one table is also the logits' matrix.) With $P$ weights and $n$ tokens on each side:
#
# $$ \text{FLOPs of a step} \approx 6\,P\,n $$
#
# **Predict.** The rule ignores attention's own products (scores, weights · V). How far off is it for 128 pairs of 16 tokens?

# %%
even = [(16, 16)] * 128  # a full batch: 2,048 tokens a side
exact, rule = step_flops(SMALL, even), 6 * parameter_count(SMALL) * 2048
print(f"{exact / 1e9:.1f} billion FLOPs counted, {rule / 1e9:.1f} by the rule")

# %% [markdown]
# By half a percent: it leaves out attention's own products, 1%, but counts biases and LayerNorm's weights.
#
# ## How many bytes?
#
# > **In short.** Numbers come from memory. What counts is how much is done with each byte.
#
# The *arithmetic intensity* of an operation is
#
# $$ I = \frac{\text{FLOPs}}{\text{bytes read and written}} $$
#
# A product of two $n \times n$ matrices in float32 has $2n^3$ FLOPs and $3n^2$ numbers of 4 bytes: $I = n/6$, which grows with $n$. A sum of two tensors has one FLOP for each twelve bytes, $I = 1/12$, at any size.
#
# ## Two rates of a machine
#
# > **In short.** A machine is two numbers: how many FLOPs it does, and how many bytes it moves, in a second.
#
# On a CPU PyTorch has two libraries for products. `F.linear` takes one (on x86 Intel's MKL); our `affine(…, onednn)` can ask the other, oneDNN.
#
# A first call loads code, so it isn't timed. Disturbances only make calls longer: we take the shortest of several, on one thread by the processor's seconds, not the clock's.


# %%
def best_seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The shortest of several runs, after one that isn't timed; of one thread, the CPU's time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    return min(timeit.repeat(function, timer=clock, number=1, repeat=repeats))


def matrix_rates(kind: torch.dtype = torch.float32, repeats: int = 5) -> list[float]:
    """FLOP/s of the product of two squares of 2,048 in `kind`: by `F.linear`, by oneDNN."""
    a, b = torch.randn(2, 2048, 2048, dtype=torch.float32).to(kind)
    calls = [partial(affine, a, b, None, onednn) for onednn in (False, True)]
    return [2 * 2048**3 / best_seconds(call, repeats) for call in calls]


def memory_bandwidth() -> float:
    """Bytes a second of adding a tensor too large for most caches to another: read, read, write."""
    a, b = torch.ones(2, 2**26, dtype=torch.float32)  # 256 MiB each
    return 3 * a.nbytes / best_seconds(lambda: a.add_(b))


# %% [markdown]
# The machine that last ran this notebook:

# %%
# NBVAL_IGNORE_OUTPUT
torch.set_num_threads(1)
speeds = np.array([*matrix_rates(repeats=10), memory_bandwidth()])
rates = speeds[:2].max(), speeds[2]
print("F.linear {:.0f}, oneDNN {:.0f} billion FLOP/s; {:.0f} billion bytes/s".format(*speeds / 1e9))

# %% [markdown]
# ## The roofline
#
# > **In short.** An operation takes at least as long as the slower of its parts: multiplying numbers, or moving them.
#
# With the rate $r$ in FLOP/s and the bandwidth $w$ in bytes a second, if the machine computes and moves at the same time:
#
# $$ \text{seconds} \;\ge\; \max\Big(\frac{\text{FLOPs}}{r},\; \frac{\text{bytes}}{w}\Big)
#    \qquad\Longleftrightarrow\qquad \text{speed} = \frac{\text{FLOPs}}{\text{seconds}} \;\le\; \min\big(r,\; w\cdot I\big) $$
#
# The two limits meet at the *ridge*, $I = r/w$. An operation left of it is *memory-bound*: its limit is the memory. One right of it is *compute-bound*.


# %%
def roof_seconds(flops: float, size: float, rate: float, bandwidth: float) -> float:
    """Least seconds of operations, each of which does so many FLOPs and moves `size` bytes."""
    return np.maximum(flops / rate, size / bandwidth)


# %% [markdown]
# ### The operations of our step
#
# Now the operations of chapters 1 to 6, for a full batch. Most have a second way, which we call *fused*: one call of PyTorch, or for a product, oneDNN. For what isn't a product FLOPs are a convention, a few for each number (that moves a dot along the slanted roof).


# %%
TOKENS = 2048  # of one side of a full batch


def linear(times: int, inputs: int, outputs: int) -> tuple:
    """A row of the table below: a batch's rows times weights, by `F.linear` and by oneDNN."""
    product = Product(1, TOKENS, inputs, outputs)
    x, weight = torch.randn(TOKENS, inputs), torch.randn(outputs, inputs)
    calls = [partial(affine, x, weight, None, onednn) for onednn in (False, True)]
    return times, product.flops, product.bytes, *calls


# %%
D, L, V, heads, model = SMALL.d_model, 16, SMALL.vocab, SMALL.h, series_model(SMALL)
x, y, logits = (torch.randn(TOKENS, width) for width in (D, D, V))
q, k, v = torch.randn(3, TOKENS // L, heads, L, D // heads)
mask = torch.ones(TOKENS // L, 1, 1, L, dtype=torch.bool)
labels, criterion = torch.randint(EOS + 1, V, (TOKENS,)), LabelSmoothing(0.1)
attend, sdpa = (partial(f, q, k, v, mask) for f in (attention, F.scaled_dot_product_attention))
norm, fused_norm, dropout = LayerNorm(D), nn.LayerNorm(D), nn.Dropout(SMALL.dropout)
batch_loss(model, random_batch(SMALL, 2, L), criterion)[0].backward()  # for Adam: any gradients
adam, fused_adam = (torch.optim.Adam(model.parameters(), 1e-4, fused=f) for f in (None, True))

# %% [markdown]
# The three encoder and three decoder layers have nine attentions and six feed-forward networks: 15 residual sums and, with two at the end, 17 LayerNorms.

# %%
ADAM_BYTES = 4 * 7  # a weight: itself, its averages and gradient are read; all but the last written
n, P = x.numel(), parameter_count(SMALL)
drops = 17 + 6 * SMALL.d_ff / D + 9 * heads * L / D  # of x's size, of d_ff, of weights
columns = ["times", "FLOPs", "bytes", "call", "fused"]  # in a step; of one call; the two ways
listed = {
    "projection": linear(9 * 4, D, D),
    "feed-forward": linear(6 * 2, D, SMALL.d_ff),
    "logits": linear(1, D, V),
    "attention": (9, 4 * L * n, 16 * n, attend, sdpa),
    "LayerNorm": (17, 8 * n, 8 * n, partial(norm, x), partial(fused_norm, x)),
    "residual sum": (15, n, 12 * n, partial(torch.add, x, y), None),
    "dropout": (drops, 2 * n, 8 * n, partial(dropout, x), None),
    "loss": (1, 5 * logits.numel(), 4 * logits.numel(), partial(criterion, logits, labels), None),
    "Adam": (1, 12 * P, ADAM_BYTES * P, adam.step, fused_adam.step),
}
operations = pd.DataFrame.from_dict(listed, orient="index", columns=columns)
linears, products = operations.index[:3], operations.index[:4]
assert 3 * (operations["times"] * operations["FLOPs"])[products].sum() == step_flops(SMALL, even)

# %% [markdown]
# **Predict.** Which operations are far below their roof? Can one be above it?

# %%
# NBVAL_IGNORE_OUTPUT
operations["roof"] = roof_seconds(operations["FLOPs"], operations["bytes"], *rates)
with torch.no_grad():
    operations["seconds"] = operations["call"].map(best_seconds)
    operations["fused seconds"] = operations["fused"].map(best_seconds, na_action="ignore")
gain = operations["seconds"] / operations["fused seconds"]
assert gain["LayerNorm"] > 1.5 and (gain["attention"] < 1.5 or new_pages(attend) > 100)
speed.roofline_chart(operations, *rates)

# %% [markdown]
# Attention is at the ridge; left of it everything is memory-bound. Yet few reach their roof: LayerNorm, the loss, dropout and attention stay far below, the residual sum is above. And `F.linear` is half as fast as oneDNN.
#
# ## Why the dots are where they are
#
# > **In short.** Guess what holds an operation up, say what would refute the guess, and measure that alone.
#
# **Narrow instructions?** On this page's processor, an AMD, oneDNN calculates with 512 bits at a time. We guess that Intel's MKL uses only 256. Then oneDNN must be nearly as slow when it may use no more. It is: started with `ONEDNN_MAX_CPU_ISA=AVX2`, this notebook prints 116 for oneDNN.
#
# **Too many bytes?** Chapter 4's LayerNorm is a chain: variance and mean, a difference, two products, a sum. Each link reads and writes tensors. If so, it takes as many times the fused call's time as it moves times the least bytes.
#
# **One slow link?** PyTorch's profiler times each operation, without those that it calls: its *self* time.

# %%
# NBVAL_IGNORE_OUTPUT
chains = operations.loc[["Adam", "LayerNorm", "attention", "dropout", "loss"]]
with torch.no_grad():
    moved, slowest = chains["call"].map(moved_bytes), chains["call"].map(slowest_inside)
inside = pd.DataFrame(slowest.tolist(), chains.index, ["slowest link", "its share"])
inside["bytes / least"], inside["time / fused"] = moved / chains["bytes"], gain[chains.index]
ways = partial(torch.var_mean, x, -1), lambda: (x - x.mean(-1, keepdim=True)).square().mean(-1)
link, means = map(best_seconds, ways)
assert {"aten::var_mean", "aten::bernoulli_"} <= set(inside["slowest link"]) and link > 2 * means
print(f"var_mean {1e3 * link:.2f} ms, a mean and a mean of squares {1e3 * means:.2f} ms")
inside.round(2)

# %% [markdown]
# - *Adam*: too many bytes, 2.6 times the least, in about as many times the time.
# - *LayerNorm*: one slow link, `var_mean`. A mean, and the mean of the squared differences, move more bytes and take a twentieth.
# - *Attention*: the fused call moves the least bytes, and is no faster where no memory is new. Our slowest link is many products of small matrices (`bmm`), (16, 32) by (32, 16).
# - *Dropout*: most of it is drawing random numbers, which count as neither FLOPs nor bytes.
# - *The loss*: one strange link: subtracting each row's maximum (`sub`).
#
# ### Bandwidth by size
#
# **Above the roof?** The residual sum's numbers may have stayed in the *cache*, a small, faster memory inside the processor. If so, larger tensors fall to the roof. If we count too many bytes, sums of any size lie above.
#
# **New memory?** `x + y` makes a new tensor, `torch.add(x, y, out=z)` fills one that exists. **Predict.** Does it matter?


# %%
# NBVAL_IGNORE_OUTPUT
rows = []
for count in (2**power for power in range(16, 26)):
    a, b, kept = torch.ones(3, count)
    sums = partial(torch.add, a, b, out=kept), partial(torch.add, a, b)
    rows.append((kept.nbytes, *(3 * kept.nbytes / best_seconds(call) for call in sums)))
sweep = pd.DataFrame(rows, columns=["result", "sum, kept result", "sum, new result"])
assert sweep["sum, kept result"].max() > 1.3 * sweep["sum, kept result"].iloc[-1]
speed.bandwidth_chart(sweep, rates[1])

# %% [markdown]
# It was the cache (three tensors share it): only small tensors move faster than memory can. (Below the dashed line, since a separate result is first read, too: a fourth transfer.) But a *new* result of 64 MiB takes several times as long as a kept one.
#
# **Case: the slow subtraction.** *Symptom*: in the loss, a subtraction takes longer than exponentials. *Suspect*: its result is new, 64 MiB. *Instrument*: the system counts each *page* (mostly 4 KiB) of memory that it hands to a program.

# %%
# NBVAL_IGNORE_OUTPUT
calls = partial(torch.sub, logits, 1), partial(torch.sub, logits, 1, out=logits.clone())
(new, kept), (pages, kept_pages) = map(best_seconds, calls), map(new_pages, calls)
assert pages < 10_000 or new > 1.5 * kept  # some systems keep pages
print(f"new result {new:.3f} s, {pages:,} new pages; kept result {kept:.3f} s, {kept_pages:,}")
step = partial(train_step, model, [random_batch(SMALL, len(even), L)], criterion, adam, 1.0)
step()  # the first takes more
step_pages, price = new_pages(step), (new - kept) / max(pages, 1)
print(f"a step: {step_pages:,} new pages, at that price {step_pages * price:.2f} s")

# %% [markdown]
# *Culprit*: pages. The system clears each before it hands it out. A step's are seven tensors of the logits' size. From 32 MiB on (the chart's cliff) the C library gives memory back after each use. The logits' product pays this, too, so it lies lower in the first chart.
#
# ## The floor of a step
#
# > **In short.** Put every product on the roof, let the optimizer touch each weight, and count the rest as free.
#
# Softmax, dropout, LayerNorm and sums could be done to numbers that pass by anyway. Adam must visit each weight, gradient and average. (All of it from memory, not from the cache.)


# %%
def least_seconds(shape: Shape, lengths: Sequence, rate: float, bandwidth: float) -> float:
    """A step's floor: products at the roof, at `rate` FLOP/s and `bandwidth` bytes/s, and Adam."""
    products = forward_products(shape, lengths)
    at_roof = sum(roof_seconds(p.flops, p.bytes, rate, bandwidth) for p in products)
    return 3 * at_roof + ADAM_BYTES * parameter_count(shape) / bandwidth


# %% [markdown]
# ### The paper's step
#
# The paper's base model took 0.4 seconds a step on eight P100 GPUs (§5.2), with about 25,000 tokens a side in a batch (§5.1), an eighth of them on each GPU. A P100 does 9.5 TFLOP/s (§6.1, footnote 5) and moves 732 GB/s by its data sheet. We assume sentences of 25 tokens, and no exchange of gradients. **Predict.** What share of those 0.4 seconds is the floor?

# %%
paper = replace(BASE, vocab=PAPER_VOCAB)
paper_floor = least_seconds(paper, [(25, 25)] * 125, 9.5e12, 732e9)
print(f"floor {paper_floor:.2f} s of 0.40 s: {paper_floor / 0.4:.0%}")

# %% [markdown]
# ## Where the time goes
#
# > **In short.** Predict a step from its parts, then measure the whole.
#
# Another prediction of a step is the sum of its operations, each measured alone, forward and backward. If the step takes longer, our list lacks something, or operations slow each other. **Predict.** Which operation's backward pass is almost free?

# %%
# NBVAL_IGNORE_OUTPUT
calls, forward = operations["call"].drop("Adam"), operations["seconds"]  # Adam: no backward pass
both = calls.map(two_passes).map(best_seconds).reindex(forward.index, fill_value=forward["Adam"])
ratio, parts = both / forward - 1, operations["times"] * both
assert ratio["dropout"] < 0.5
floor = least_seconds(SMALL, even, *rates)
print(f"floor {floor:.2f} s, sum of the parts {parts.sum():.2f} s")
ratio.drop("Adam").sort_values().round(1).to_frame("backward / forward")

# %% [markdown]
# Dropout's, which draws no numbers, and the sum's, which hands its gradient on. A product's takes about two forward passes.
#
# **Predict.** How many seconds does a step take, and what takes most of those beyond the floor?

# %%
# NBVAL_IGNORE_OUTPUT
whole = best_seconds(step, repeats=4)
assert 0.5 < parts.sum() / whole < 1.2 and whole > 1.2 * floor
passes = pd.Series(dict.fromkeys(products, 3) | {"Adam": 1})  # that the floor has of each
beyond = parts.sub(passes * operations["times"] * operations["roof"], fill_value=0)
beyond = beyond.rename(dict.fromkeys(linears, "products")).groupby(level=0).sum()
saved = (operations["times"] * (forward - operations["fused seconds"]))[linears].sum()
print(f"a step {whole:.2f} s, {whole / floor:.1f} floors; oneDNN would save {saved:.2f} s forward")
speed.beyond_chart(floor, beyond, whole)

# %% [markdown]
# About half of the time beyond the floor goes to products. Most of that is the library's: oneDNN would save a third of it in the forward pass alone, which has a third of the products. Then come the loss (new memory), dropout (random numbers) and LayerNorm. The list lacks embeddings, biases, ReLU, clipping, copies, sums of gradients, and Python.
#
# `results/speed-steps.json` repeats this on another machine, with two threads and real captions. **Predict** from the pages' price: what is keeping memory worth?

# %%
record = load_record("speed-steps")
for name, words in {"textbook": "as it comes", "textbook, memory kept": "memory kept"}.items():
    seconds = record["reports"][name]["seconds_per_step"]
    print(f"{words:12}{seconds:.2f} s, {seconds / record['floor_seconds']:.1f} floors")

# %% [markdown]
# It saves 12%, as the pages' price foretold (0.18 of 1.50 s).
#
# ## How cost grows
#
# > **In short.** Change one size only. On two logarithmic axes a straight line is a power law; its slope is the exponent.
#
# `results/speed-growth.json` is of another machine, as it comes. One size varies, the others stay at 32 tokens a sentence, 2,048 tokens a side, D = 256, 3 + 3 layers. **Predict** the slopes of time.

# %%
points = pd.DataFrame(load_record("speed-growth")["points"])
speed.growth_chart(points[points["path"] == "textbook"])

# %% [markdown]
# - *Length*: at a fixed number of tokens Table 1's $O(L^2 D)$ a sentence grows with $L$ only, and the projections outweigh it: 15% more FLOPs from 8 to 256. Time grows by half: attention's FLOPs are slow (first chart).
# - *Width*: the FLOPs' slope grows from 1.5 towards 2 (the logits' part, $DV$, grows only with $D$). Time's stays below it. So a wider model uses a machine better.
#
# ## Summary
#
# - A product takes $2ijk$ FLOPs, a step three times its forward pass: about $6\,P\,n$ in all.
# - A machine has two rates, and an operation's intensity decides which can be its limit: its roof.
# - Operations miss their roofs for reasons that one can test: the library (products), one slow link (LayerNorm, dropout), new memory (the loss), bytes (Adam).
# - The floor is every product at the roof plus Adam's traffic.
# - At a fixed number of tokens length costs little, and width most.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A stopwatch for a GPU
#
# *code · difficulty ●●○ · worth ●●● · 15 minutes*
#
# A GPU takes orders and returns at once; `wait()` returns when all of them are done. The first call is slow, and now and then something disturbs one. Write `stopwatch(work, wait, clock, rounds)`: the median over `rounds` of the seconds that one `work()` takes, by `clock()`, after one call that isn't timed. (`solution("stopwatch")` shows ours.)


# %%
def stopwatch(work: Callable, wait: Callable, clock: Callable, rounds: int) -> float:
    """The median seconds of one `work()`, warmed up and waited for."""
    ...


check(stopwatch)

# %% [markdown]
# ### Exercise 2 · A machine on paper
#
# *think · difficulty ●●○ · worth ●●● · 20 minutes*
#
# A GPU does 60 TFLOP/s in float32 and moves 3 TB/s.
#
# 1. From what intensity on is its arithmetic the limit?
# 2. What is the floor of a training step of `BASE` (48.3 million weights) with 128 pairs of 16 tokens?
# 3. It decodes *one* sentence, one token at a time, so that a feed-forward product is (1, 512) by (512, 2,048). What share of its rate can it reach? How many sentences at a time would keep its arithmetic busy?
#
# <details><summary>An answer</summary>
#
# 1. 60 / 3 = 20 FLOPs per byte.
# 2. $6 \cdot 48.3\cdot10^6 \cdot 2048 = 5.9\cdot10^{11}$ FLOPs, 9.9 ms; Adam's $28 \cdot 48.3\cdot10^6$ bytes, 0.5 ms: 10.4 ms. `least_seconds` says 10.7 ms, since attention's own products are limited by memory.
# 3. Each weight (4 bytes) is read for 2 FLOPs: half a FLOP per byte. That allows 2.5% of the rate. With n sentences the intensity is nearly n/2. It passes 20 at n = 45.
#
# </details>
#
# Next: [Chapter 12 · Going fast](ch12_going_fast.ipynb)
