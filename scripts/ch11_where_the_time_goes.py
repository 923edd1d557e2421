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
# After this chapter you can say how long a training step must take at least, how long it takes, and where the difference goes.
#
# | | |
# |---|---|
# | In the paper | §4 (Table 1), §5.1, §5.2, §6.1 (Table 2) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 40 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 10 · Judging](ch10_judging.ipynb) · [Chapter 12 · Going fast](ch12_going_fast.ipynb) |
#
# *If you read only three cells:* the bars of *A rule of thumb*, the dots of *The roofline*, the bars of *Where the time goes*.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary; **F** = `d_ff`, **N** layers, **L** a sentence's length on both sides.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import os
import timeit
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from scripts.book.exercises import check
from scripts.book.figures.speed import flops_chart, growth_chart, roofline_chart, step_account_chart
from scripts.book.instruments import count_flops
from scripts.book.records import load_record
from scripts.ch04_encoder_decoder import PAPER_VOCAB, EncoderDecoder, make_model
from scripts.ch06_training import BOS, EOS, Batch, LabelSmoothing, batch_loss, train_step
from scripts.ch07_multi30k import Example, make_batch

# %%
torch.set_default_dtype(torch.float64)  # for the checks; whatever is timed here is in float32

# %% [markdown]
# ## Three questions
#
# > **In short.** Before you make a program faster, know the least time that it can take, the time it takes, and what it does in between.
#
# A training step of our model takes 0.65 seconds on the machine of this chapter's record. Is that good?
#
# We use chapter 9's model in batches of 2,048 tokens a side; only dropout is 0.1 here, not 0.2. `BASE` has the sizes of the paper's base model, with our vocabulary.


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


# %%
def series_model(shape: Shape) -> EncoderDecoder:
    """Our model of that shape, all tables tied."""
    sizes = asdict(shape)
    vocab = sizes.pop("vocab")
    return make_model(vocab, vocab, tie="all", **sizes)


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
# **Predict.** How many times the FLOPs of the forward product does PyTorch count for forward and backward together?

# %%
torch.manual_seed(0)
x, w = torch.randn(32, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
forward = count_flops(lambda: x @ w.T)
both = count_flops(lambda: (x @ w.T).sum().backward())
assert forward == 2 * 32 * 16 * 64
print(f"{forward:,} forward, {both:,} with the backward pass: {both / forward:.0f} times as many")

# %% [markdown]
# The backward pass has two products of the same size, so a step costs three times its forward pass.


# %%
@dataclass(frozen=True)
class Product:
    """`times` matrix products (n, i, j) @ (n, j, k) of one kind in the forward pass."""

    kind: str
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
    D, hidden, N = shape.d_model, shape.d_ff, shape.N
    sources, targets = (sum(side) for side in zip(*lengths, strict=True))  # rows
    listed = [
        Product("projections of attention", 1, sources, D, 3 * D, N),  # Q, K, V
        Product("projections of attention", 1, targets, D, 3 * D, N),
        Product("projections of attention", 1, targets, D, D, N),  # cross-attention's Q
        Product("projections of attention", 1, sources, D, 2 * D, N),  # its K, V
        Product("projections of attention", 1, sources, D, D, N),  # heads to output
        Product("projections of attention", 1, targets, D, D, 2 * N),
        Product("feed-forward", 1, sources, D, hidden, N),
        Product("feed-forward", 1, targets, D, hidden, N),
        Product("feed-forward", 1, sources, hidden, D, N),
        Product("feed-forward", 1, targets, hidden, D, N),
        Product("logits", 1, targets, D, shape.vocab),
    ]
    head = D // shape.h
    for s, t in lengths:
        for queries, keys in ((s, s), (t, t), (t, s)):  # encoder, decoder, from one to the other
            listed.append(Product("scores and weights · V", shape.h, queries, head, keys, N))
            listed.append(Product("scores and weights · V", shape.h, queries, keys, head, N))
    return listed


# %%
def step_flops(shape: Shape, lengths: Sequence[tuple[int, int]]) -> int:
    """FLOPs of a training step's products: each forward product has two of its size backward."""
    return 3 * sum(product.flops for product in forward_products(shape, lengths))


# %% [markdown]
# PyTorch counts the products as they happen, padding included, and our list must agree to the last FLOP.


# %%
TINY = Shape(N=2, d_model=16, d_ff=32, h=2, vocab=50)
lengths = [(9, 10), (3, 8), (10, 10), (7, 10), (8, 7), (5, 8)]  # with </s>
batch = make_batch([Example([7] * s, [BOS] + [7] * t) for s, t in lengths])
plain_model, criterion = series_model(TINY), LabelSmoothing(0.1)
as_padded = [(batch.src.size(1), batch.tgt.size(1))] * len(batch.src)  # (S, T) of every row
counted = count_flops(lambda: batch_loss(plain_model, batch, criterion)[0].backward())
assert counted == step_flops(TINY, as_padded)
print(f"{counted:,} FLOPs")

# %% [markdown]
# Softmax, LayerNorm, dropout, sums and Adam aren't counted.
#
# ### A rule of thumb
#
# Each weight of a matrix takes part in one multiplication and one addition for each token, and in twice as many in the backward pass. With $P$ weights and $n$ tokens on each side:
#
# $$ \text{FLOPs of a step} \approx 6\,P\,n $$
#
# **Predict.** The rule ignores attention's own products (scores, weights · V). How far off is it, for 128 pairs of 16 tokens?

# %%
even = [(16, 16)] * 128  # a full batch: 2,048 tokens a side
exact, rule = step_flops(SMALL, even), 6 * parameter_count(SMALL) * 2048
print(f"{exact / 1e9:.1f} billion FLOPs counted, {rule / 1e9:.1f} by the rule")

# %% [markdown]
# It is off by half a percent: it misses attention's own products, 1%, but $P$ includes biases and LayerNorm's weights, which belong to no matrix product.
#
# **Predict.** Which takes the most FLOPs: the feed-forward layers, attention's projections (Q, K, V and the output), the logits, or attention's own products?


# %%
def flop_shares(shape: Shape, lengths: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The share of each kind of product in a step's FLOPs."""
    flops = Counter()
    for product in forward_products(shape, lengths):
        flops[product.kind] += product.flops
    return {kind: count / flops.total() for kind, count in flops.most_common()}


# %%
shares = flop_shares(SMALL, even)
flops_chart(shares)

# %% [markdown]
# More than a quarter is one product, the logits.
#
# **Pitfall: FLOPs are not seconds.** An operation without any product can take longer than a large product.
#
# ## How many bytes?
#
# > **In short.** Numbers must come from memory before they are multiplied. What counts is how much is done with each byte.
#
# The *arithmetic intensity* of an operation is
#
# $$ I = \frac{\text{FLOPs}}{\text{bytes read and written}} $$
#
# A product of two $n \times n$ matrices in float32 has $2n^3$ FLOPs and $3n^2$ numbers of 4 bytes: $I = n/6$, which grows with $n$. A sum of two tensors has one FLOP for each twelve bytes, $I = 1/12$, at any size. **Predict.** What is the intensity of the product for the scores, if each head has 16 queries and 16 keys of 32 numbers?

# %%
tokens = 2048  # of one side
products = {
    "feed-forward product": Product("", 1, tokens, SMALL.d_model, SMALL.d_ff),
    "scores": Product("", 128 * SMALL.h, 16, SMALL.d_model // SMALL.h, 16),
}
work = {name: (p.flops, p.bytes) for name, p in products.items()}
work["residual sum"] = (tokens * SMALL.d_model, 3 * 4 * tokens * SMALL.d_model)  # x + y
for name, (flops, size) in work.items():
    print(f"{name:22}{flops / 1e6:7.1f}M FLOPs {size / 1e6:5.1f}M bytes {flops / size:6.2f} a byte")

# %% [markdown]
# ## Two rates of a machine
#
# > **In short.** A machine is two numbers: how many FLOPs it does in a second, and how many bytes it moves.
#
# On a CPU, PyTorch has two libraries that multiply: MKL (or another), which `F.linear` usually calls in float32, and oneDNN. `affine` uses either. (You may skip its body.)


# %%
def suits_onednn(x: Tensor) -> bool:
    """Whether oneDNN multiplies x here: 32 or 16 bits on a CPU, and not on every processor."""
    if x.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if x.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # false without AVX-512
    return x.dtype == torch.float32


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool) -> Tensor:
    """x·Wᵀ + b: x (n, D), weight (F, D), to (n, F), without a gradient; by oneDNN where it can."""
    if onednn and suits_onednn(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


# %% [markdown]
# A first call loads code and fetches memory, so it isn't timed. Disturbances only make calls longer, so we take the shortest of several.


# %%
def best_seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The shortest of several runs, after one that isn't timed: what the machine can."""
    function()
    return min(timeit.repeat(function, number=1, repeat=repeats))


def matrix_rate(kind: torch.dtype = torch.float32, repeats: int = 5) -> float:
    """FLOP/s of this machine's best product in `kind`: squares of 1,024 and 2,048, both libraries."""
    best = 0.0
    for n in (1024, 2048):
        a, b = torch.randn(2, n, n, dtype=torch.float32).to(kind)
        for onednn in (False, True):
            seconds = best_seconds(lambda: affine(a, b, None, onednn), repeats)  # noqa: B023
            best = max(best, 2 * n**3 / seconds)
    return best


def memory_bandwidth() -> float:
    """Bytes a second of adding a tensor too large for most caches to another: read, read, write."""
    a, b = torch.ones(2, 2**26, dtype=torch.float32)  # 256 MiB each
    return 3 * a.nbytes / best_seconds(lambda: a.add_(b))


# %% [markdown]
# This is the machine that last ran the notebook:

# %%
# NBVAL_IGNORE_OUTPUT
this_rate, this_bandwidth = matrix_rate(repeats=2), memory_bandwidth()
print(f"{this_rate / 1e9:.0f} billion FLOP/s, {this_bandwidth / 1e9:.0f} billion bytes/s")

# %% [markdown]
# ## The roofline
#
# > **In short.** An operation takes at least as long as the slower of its two parts: multiplying numbers, or moving them. Its intensity decides which.
#
# With the rate $r$ in FLOP/s and the bandwidth $w$ in bytes a second, if the machine computes and moves at the same time:
#
# $$ \text{seconds} \;\ge\; \max\Big(\frac{\text{FLOPs}}{r},\; \frac{\text{bytes}}{w}\Big)
#    \qquad\Longleftrightarrow\qquad \text{speed} = \frac{\text{FLOPs}}{\text{seconds}} \;\le\; \min\big(r,\; w\cdot I\big) $$
#
# Below the intensity $I = r/w$ the processor's arithmetic waits for memory.


# %%
def roof_seconds(flops: float, size: float, rate: float, bandwidth: float) -> float:
    """Least seconds of an operation that does so many FLOPs and moves `size` bytes."""
    return max(flops / rate, size / bandwidth)


# %% [markdown]
# Take a machine with round numbers: 400 billion FLOP/s and 40 billion bytes a second. **Predict.** The feed-forward product has 2,048 times as many FLOPs as the residual sum. How many times as long does it take?

# %%
rates = 400e9, 40e9
took = {name: roof_seconds(flops, size, *rates) for name, (flops, size) in work.items()}
print(f"{took['feed-forward product'] / took['residual sum']:.0f} times as long")

# %% [markdown]
# Memory limits the sum, arithmetic the product.
#
# Now the machine of the record `results/speed-steps.json`: two threads of a CPU, in float32. Each operation of our step ran alone. (`scripts/studies/race_training.py` defines the FLOPs of what isn't a product.) Bytes count each factor once (the sum was `x + x`: it counts as two). **Predict.** Which operations are far below the roof? Can one be above it?

# %%
record = load_record("speed-steps")
record["operations"] = [o for o in record["operations"] if "16 bits" not in o["operation"]]
r, w = record["matrix_rate"], record["bandwidth"]
print(f"{r / 1e9:.0f} billion FLOP/s, {w / 1e9:.0f} billion bytes/s: {r / w:.0f} FLOPs a byte")
roofline_chart(record)

# %% [markdown]
# As shares: the roof's time divided by the time taken. (*Out* and *back* are the feed-forward layer's two products, both of the forward pass.)

# %%
for o in record["operations"]:
    share = roof_seconds(o["flops"], o["bytes"], r, w) / o["seconds"]
    print(f"{o['operation']:20}{share:5.0%} of the roof")

# %% [markdown]
# - *Large products* reach less than half of the flat roof. `F.linear` uses MKL, but the roof is the faster library's, here most likely oneDNN.
# - *The residual sum* lies above the sloping roof, which is for numbers from memory. The sum's were most likely still in the *cache*, a small, much faster memory inside the processor.
# - *Adam* lies above it, too, with tensors too large for most caches. We don't know why.
# - *LayerNorm, softmax, scores* move no more bytes than the sum, yet take three to five times as long. So memory isn't what holds them up.
# - *Dropout* draws a random number for each element, which counts as neither FLOPs nor bytes.

# %% [markdown]
# ## The floor of a step
#
# > **In short.** Put every product on the roof, let the optimizer touch each weight, and count the rest as free.
#
# Softmax, dropout, LayerNorm and sums could be done while the numbers pass by anyway. Adam can't: it must visit each weight, its gradient and its averages.


# %%
ADAM_BYTES = 4 * 7  # a weight: itself, its averages and gradient are read; all but the last written


def least_seconds(
    shape: Shape, lengths: Sequence[tuple[int, int]], rate: float, bandwidth: float
) -> float:
    """A step's floor: products at the roof, at `rate` FLOP/s and `bandwidth` bytes/s, and Adam."""
    products = forward_products(shape, lengths)
    at_roof = sum(roof_seconds(p.flops, p.bytes, rate, bandwidth) for p in products)
    return 3 * at_roof + ADAM_BYTES * parameter_count(shape) / bandwidth


# %%
floor_of_even = least_seconds(SMALL, even, r, w)
print(f"{step_flops(SMALL, even) / r:.3f} seconds of FLOPs, {floor_of_even:.3f} with the traffic")

# %% [markdown]
# This floor is for float32 numbers that come from memory.
#
# The record's three batches of real captions have fewer real tokens than `even`, so a lower floor. **Predict.** How many times the floor does the code of chapters 1 to 6 take? (The C library keeps freed memory here: chapter 12 says how.)

# %%
floor = record["floor_seconds"]
textbook = record["reports"]["textbook, memory kept"]["seconds_per_step"]
print(f"floor {floor:.2f} s, a step {textbook:.2f} s: {textbook / floor:.1f} times the floor")

# %% [markdown]
# ### The paper's step
#
# The paper's base model took 0.4 seconds a step on eight P100 GPUs (§5.2), with about 25,000 tokens a side in a batch (§5.1), an eighth of them on each GPU. A P100 does 9.5 TFLOP/s (§6.1, footnote 5) and moves 732 GB/s by its data sheet. We assume sentences of 25 tokens without padding, and leave out the exchange of gradients. **Predict.** What share of those 0.4 seconds is the floor?

# %%
paper = replace(BASE, vocab=PAPER_VOCAB)
eighth = [(25, 25)] * 125  # 3,125 tokens a side
paper_floor = least_seconds(paper, eighth, 9.5e12, 732e9)
print(f"floor {paper_floor:.2f} s of 0.40 s: {paper_floor / 0.4:.0%}")
print(f"100,000 steps: {100_000 * 8 * step_flops(paper, eighth):.1e} FLOPs counted")

# %% [markdown]
# Table 2's $3.3\cdot10^{18}$ FLOPs are not a count: they are 12 hours × 8 GPUs × 9.5 TFLOP/s, what the GPUs *could* have done.
#
# ## Where the time goes
#
# > **In short.** A profiler notes when each operation begins and ends. Sum by kind, and compare each kind with its floor.
#
# PyTorch's profiler shows operations within operations: `aten::linear` calls `aten::addmm`. *Total* time includes all that an operation calls, *self* time doesn't. So add up self times. Here are the six operations with the most self time in one step. (`addmm` are the forward pass's products, `mm` those of the backward pass.)

# %%
# NBVAL_IGNORE_OUTPUT
torch.manual_seed(0)
model = series_model(SMALL).float()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
ids = torch.randint(EOS + 1, SMALL.vocab, (2, 32, 17))
batch = Batch(ids[0, :, 1:], ids[1])  # 32 sentences of 16 tokens: a quarter of a full batch
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints when it starts and stops
train_step(model, [batch], criterion, optimizer, clip=1.0)  # a first step is slower
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    train_step(model, [batch], criterion, optimizer, clip=1.0)
events = profiler.key_averages()
busiest = sorted(events, key=lambda e: e.self_cpu_time_total, reverse=True)[:6]
pd.DataFrame(
    [(e.key, e.count, e.self_cpu_time_total / 1e3, e.cpu_time_total / 1e3) for e in busiest],
    columns=["operation", "calls", "self, ms", "total, ms"],
).round(1)

# %% [markdown]
# The record did this with whole batches, and grouped the operations. **Predict.** By FLOPs, products are everything. What share of the time do they take? (Much of the loss, LayerNorm and Adam is booked under "sums".)

# %%
booked = dict(record["accounts"]["textbook"])
booked["products"] = booked.pop("matrix products") + booked.pop("attention's products")
booked["random bits of dropout"] = booked.pop("PyTorch's random bits")
del booked["our functions in C"]  # chapter 12's: this path has none
of_adam = ADAM_BYTES * parameter_count(SMALL) / w
least = {"products": floor - of_adam, "Adam and clipping": of_adam}
step_total = sum(booked.values())
print(f"products: {booked['products'] / step_total:.0%} of the step's {step_total:.2f} seconds")
step_account_chart(booked, least)

# %% [markdown]
# Without the profiler a step took 0.65 seconds. The profiler adds time to each call, so kinds with many small calls look larger than they are. Of the time above the floor, it books:

# %%
over = {kind: seconds - least.get(kind, 0.0) for kind, seconds in booked.items()}
for kind, seconds in sorted(over.items(), key=lambda item: -item[1])[:5]:
    print(f"{seconds / sum(over.values()):5.0%}  {kind}")

# %% [markdown]
# Products stay below the roof, and some multiply padding. This list is chapter 12's plan.
#
# ## How cost grows
#
# > **In short.** Change one size, keep the others, and make both axes logarithmic. A straight line is a power law, and its slope is the exponent.
#
# The paper's Table 1 gives self-attention $O(L^2 D)$ operations in each layer. That leaves out the projections. With them and $d_\text{ff} = 4D$, one token on each side takes, in the forward pass:
#
# $$ N\,\underbrace{(24D^2 + 4LD)}_{\text{encoder layer}} + N\,\underbrace{(32D^2 + 8LD)}_{\text{decoder layer}} + \underbrace{2VD}_{\text{logits}} \quad\text{FLOPs.} $$
#
# From the length $L = \tfrac{14}{3} D + V/(6N)$ on, the terms with L (attention's own products) are more than half of the FLOPs. **Predict.** What length is that for our model, and for the base sizes?


# %%
for name, shape in {"our model": SMALL, "base sizes": BASE}.items():
    half = 14 * shape.d_model / 3 + shape.vocab / (6 * shape.N)
    print(f"{name}: half of the FLOPs at {half:,.0f} tokens")

# %% [markdown]
# Now the measured costs of another machine, in `results/speed-growth.json`. One axis is varied, and the others stay in the middle: 32 tokens a sentence, 2,048 tokens a side, D = 256, 3 + 3 layers. Memory is what autograd keeps for the backward pass. **Predict** the exponents of the FLOPs, and of the time, along the four axes.

# %%
points = pd.DataFrame(load_record("speed-growth")["points"])
points = points[points["path"] == "textbook"]
points = points.rename(columns={"seconds": "time", "bytes": "memory", "flops": "FLOPs"})
costs = ["time", "memory", "FLOPs"]
growth_chart(points, costs)

# %%
slopes = {  # of the line through the logarithms, by least squares
    axis: np.polyfit(np.log(along["value"]), np.log(along[costs]), 1)[0]
    for axis, along in points.groupby("axis", sort=False)
}
pd.DataFrame(slopes, index=costs).T.round(2)

# %% [markdown]
# - *Tokens.* All grow nearly in proportion; a small part (Adam, Python; of memory the weights) is fixed.
# - *Depth.* All exponents are below 1, since the logits cost the same at any depth.
# - *Width.* The FLOPs' exponent lies between 1, for the logits, and 2, for the layers. Time grows more slowly, since elementwise work grows only as $D$. So a wider model uses a machine better.
# - *Length.* Time and memory grow more than the FLOPs do: softmax, which isn't counted, passes over memory, and autograd keeps H weights for each pair of tokens.
#
# ## Summary
#
# - A product takes $2ijk$ FLOPs, a step three times its forward pass: about $6\,P\,n$ in all.
# - A machine has two rates, and an operation's intensity decides which can be its limit.
# - The floor is every product at the roof plus Adam's traffic. Our step takes 3.7 times that, mostly for slow products, random bits and elementwise passes.
# - At a fixed number of tokens, length costs little. Time and FLOPs grow most with width.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Tokens a second
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# The benchmarks of the next chapters report real target tokens a second: what the model is asked to predict, with `</s>`, without padding. Write `token_rate(batches, seconds)` for a list of `Batch` and the seconds that each took. (`solution("token_rate")` shows ours.)


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
# A GPU takes orders and returns at once; `wait()` returns when all of them are done. The first call is slow, and now and then something disturbs one. Write `stopwatch(work, wait, clock, rounds)`: the median over `rounds` of the seconds that one `work()` takes, by `clock()`, after one call that isn't timed. The checker pretends to be a device with a clock of its own. (`solution("stopwatch")` shows ours.)


# %%
def stopwatch(work: Callable, wait: Callable, clock: Callable, rounds: int) -> float:
    """The median seconds of one `work()`, warmed up and waited for."""
    ...


check(stopwatch)

# %% [markdown]
# ### Exercise 3 · A machine on paper
#
# *think · difficulty ●●○ · worth ●●● · 20 minutes*
#
# A GPU does 60 TFLOP/s in float32 and moves 3 TB/s. First with a pencil, then with this chapter's functions:
#
# 1. From what intensity on is its arithmetic the limit?
# 2. What is the floor of a training step of `BASE` (48.3 million weights) with 128 pairs of 16 tokens?
# 3. It decodes *one* sentence, one token at a time, so that a feed-forward product is (1, 512) by (512, 2,048). What share of its rate can it reach? How many sentences at a time would keep its arithmetic busy?
#
# <details><summary>An answer</summary>
#
# 1. 60 / 3 = 20 FLOPs per byte.
# 2. $6 \cdot 48.3\cdot10^6 \cdot 2048 = 5.9\cdot10^{11}$ FLOPs, 9.9 ms; Adam's $28 \cdot 48.3\cdot10^6$ bytes, 0.5 ms: 10.4 ms. `least_seconds` says 10.7 ms, since attention's own products are limited by memory.
# 3. Each weight (4 bytes) is read for 2 FLOPs: half a FLOP per byte. That allows 1.5 TFLOP/s, 2.5% of the rate. With n sentences the weights are read once for all, and the intensity is nearly n/2. It passes 20 at n = 45.
#
# </details>
#
# Next: [Chapter 12 · Going fast](ch12_going_fast.ipynb)
