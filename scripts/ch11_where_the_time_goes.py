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
# | In the paper | §4 (Table 1), §5.1, §5.2, §6.1 (Table 2) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 40 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 10 · Judging](ch10_judging.ipynb) · [Chapter 12 · Going fast](ch12_going_fast.ipynb) |
#
# *If you read only three cells:* the first three charts.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary; **F** = `d_ff`, **N** layers, **L** a sentence's length on both sides.

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
# > **In short.** Before you make a program faster, know the least time it can take, the time it takes, and what it does in between.
#
# A training step of our model takes about a second on a CPU. Is that good?
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
# two products of the same size. So a step has three times the FLOPs of its forward pass.


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
    D, N = shape.d_model, shape.N
    sources, targets = (sum(side) for side in zip(*lengths, strict=True))  # rows
    listed = [
        Product("cross-attention's queries and outputs", 1, targets, D, D, 2 * N),
        Product("its keys and values", 1, sources, D, 2 * D, N),
        Product("logits", 1, targets, D, shape.vocab),
    ]
    for rows in (sources, targets):
        for i, j in ((D, 3 * D), (D, D), (D, shape.d_ff), (shape.d_ff, D)):
            listed.append(Product("self-attention and feed-forward", 1, rows, i, j, N))
    for s, t in lengths:
        for queries, keys in ((s, s), (t, t), (t, s)):  # encoder, decoder, from one to the other
            listed.append(Product("scores", shape.h, queries, D // shape.h, keys, N))
            listed.append(Product("weights · V", shape.h, queries, keys, D // shape.h, N))
    return listed


# %%
def step_flops(shape: Shape, lengths: Sequence[tuple[int, int]]) -> int:
    """FLOPs of a training step's products: each forward product has two of its size backward."""
    return 3 * sum(product.flops for product in forward_products(shape, lengths))


# %% [markdown]
# PyTorch counts the products as they happen, and our list must agree to the last FLOP.


# %%
TINY = Shape(N=2, d_model=16, d_ff=32, h=2, vocab=50)


def random_batch(shape: Shape, sentences: int, length: int) -> Batch:
    """Random sentences of `length` tokens on both sides, without padding."""
    ids = torch.randint(EOS + 1, shape.vocab, (2, sentences, length + 1))
    return Batch(ids[0, :, 1:], ids[1])


tiny_step = series_model(TINY), random_batch(TINY, 6, 10), (criterion := LabelSmoothing(0.1))
forward = count_flops(lambda: batch_loss(*tiny_step))
both = count_flops(lambda: batch_loss(*tiny_step)[0].backward())
assert 3 * forward == both == step_flops(TINY, [(10, 10)] * 6)
print(f"{forward:,} FLOPs forward, {both:,} with the backward pass")

# %% [markdown]
# ### A rule of thumb
#
# Each weight of a matrix takes part in one multiplication and one addition for each token, and in twice as many in the backward pass. With $P$ weights and $n$ tokens on each side:
#
# $$ \text{FLOPs of a step} \approx 6\,P\,n $$
#
# **Predict.** The rule ignores attention's own products (scores, weights · V). How far off is it for 128 pairs of 16 tokens?

# %%
even = [(16, 16)] * 128  # a full batch: 2,048 tokens a side
exact, rule = step_flops(SMALL, even), 6 * parameter_count(SMALL) * 2048
print(f"{exact / 1e9:.1f} billion FLOPs counted, {rule / 1e9:.1f} by the rule")

# %% [markdown]
# Half a percent: it misses attention's own products, 1%, but $P$ includes biases and LayerNorm's weights.
#
# ## How many bytes?
#
# > **In short.** Numbers must come from memory before they are multiplied. What counts is how much is done with each byte.
#
# The *arithmetic intensity* of an operation is
#
# $$ I = \frac{\text{FLOPs}}{\text{bytes read and written}} $$
#
# A product of two $n \times n$ matrices in float32 has $2n^3$ FLOPs and $3n^2$ numbers of 4 bytes: $I = n/6$, which grows with $n$. A sum of two tensors has one FLOP for each twelve bytes, $I = 1/12$, at any size.
#
# ## Two rates of a machine
#
# > **In short.** A machine is two numbers: how many FLOPs it does in a second, and how many bytes it moves.
#
# PyTorch has more than one way to multiply on a CPU. `F.linear` chooses; our `affine(x, weight, bias, onednn)` can ask the library oneDNN.
#
# A first call loads code and fetches memory, so it isn't timed. Disturbances only make calls longer, so we take the shortest of several. On one thread we count the processor's seconds, not the clock's: other programs matter little.


# %%
def best_seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The shortest of several runs, after one that isn't timed; of one thread, the CPU's time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    return min(timeit.repeat(function, timer=clock, number=1, repeat=repeats))


def matrix_rate(kind: torch.dtype = torch.float32, repeats: int = 5) -> float:
    """FLOP/s of this machine's best product in `kind`: squares of 1,024 and 2,048, both ways."""
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
torch.set_num_threads(1)
rates = this_rate, this_bandwidth = matrix_rate(repeats=10), memory_bandwidth()
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
# The two limits meet at the *ridge*, $I = r/w$. An operation left of it is *memory-bound*: arithmetic waits for memory. One right of it is *compute-bound*.


# %%
def roof_seconds(flops: float, size: float, rate: float, bandwidth: float) -> float:
    """Least seconds of operations, each of which does so many FLOPs and moves `size` bytes."""
    return np.maximum(flops / rate, size / bandwidth)


# %% [markdown]
# ### The operations of our step
#
# Now the code of chapters 1 to 6, at the sizes of a full batch. Beside it stands what gives the same result: one call of PyTorch (*fused*), or oneDNN's product. FLOPs of other than products are a convention: a few for each number.


# %%
TOKENS = 2048  # of one side of a full batch
ADAM_BYTES = 4 * 7  # a weight: itself, its averages and gradient are read; all but the last written


def linear(inputs: int, outputs: int) -> tuple:
    """A product with a batch's rows: numbers, FLOPs and bytes a number, `F.linear` and oneDNN's."""
    product, x = Product("", 1, TOKENS, inputs, outputs), torch.randn(TOKENS, inputs)
    calls = [partial(affine, x, torch.randn(outputs, inputs), None, way) for way in (False, True)]
    return x.numel(), 2 * outputs, product.bytes / x.numel(), *calls


# %%
D, L, V, heads, model = SMALL.d_model, 16, SMALL.vocab, SMALL.h, series_model(SMALL)
x, y, wide, logits = (torch.randn(TOKENS, width) for width in (D, D, SMALL.d_ff, V))
q, k, v = torch.randn(3, TOKENS // L, heads, L, D // heads)
mask = torch.ones(TOKENS // L, 1, 1, L, dtype=torch.bool)
labels = torch.randint(EOS + 1, V, (TOKENS,))
norm, fused_norm, dropout = LayerNorm(D), nn.LayerNorm(D), nn.Dropout(SMALL.dropout)
attentions = [partial(f, q, k, v, mask) for f in (attention, F.scaled_dot_product_attention)]
fused_loss = partial(F.cross_entropy, logits, labels, label_smoothing=0.1, reduction="sum")
for weight in (weights := list(model.parameters())):
    weight.grad = torch.randn_like(weight)
adam, fused_adam = (torch.optim.Adam(weights, lr=1e-4, fused=fused).step for fused in (None, True))

# %%
listed = {  # times in a step, numbers, FLOPs and bytes a number, calls
    "projection": (36, *linear(D, D)),
    "feed-forward, out": (6, *linear(D, SMALL.d_ff)),
    "feed-forward, back": (6, *linear(SMALL.d_ff, D)),
    "logits": (1, *linear(D, V)),
    "attention": (9, x.numel(), 4 * L, 16, *attentions),
    "LayerNorm": (17, x.numel(), 8, 8, partial(norm, x), partial(fused_norm, x)),
    "residual sum": (15, x.numel(), 1, 12, partial(torch.add, x, y), None),
    "ReLU": (6, wide.numel(), 1, 8, partial(torch.relu, wide), None),
    # in d_ff: 6 of that width, 17 of D = d_ff / 4, 9 of heads · L = d_ff / 8
    "dropout": (6 + 17 / 4 + 9 / 8, wide.numel(), 2, 8, partial(dropout, wide), None),
    "loss": (1, logits.numel(), 5, 4, partial(criterion, logits, labels), fused_loss),
    "Adam": (1, parameter_count(SMALL), 12, ADAM_BYTES, adam, fused_adam),
}
rows = [(times, n * flops, n * size, *calls) for times, n, flops, size, *calls in listed.values()]
operations = pd.DataFrame(rows, list(listed), ["times", "FLOPs", "bytes", "call", "fused"])
products = operations.index[:5]
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
assert gain["LayerNorm"] > 1.5
speed.roofline_chart(operations, *rates)

# %% [markdown]
# Most are memory-bound, yet few are held up by memory: LayerNorm, the loss and dropout stay far below the roof, and the residual sum is above it.
#
# ## Why the dots are where they are
#
# > **In short.** Guess what holds an operation up, say what would refute the guess, and measure that alone.
#
# **Too many bytes?** Chapter 4's LayerNorm is a chain: variance and mean, a difference, two products, a sum. Each link reads and writes tensors. If that makes it slow, a chain's time is to the fused call's as its bytes are to the least.
#
# **One slow link?** PyTorch's profiler times each operation. *Self* time leaves out the operations that it calls. We want the most self time.

# %%
# NBVAL_IGNORE_OUTPUT
chains = operations.loc[["Adam", "LayerNorm", "dropout", "loss"]]
with torch.no_grad():
    moved, slowest = (chains["call"].map(look) for look in (moved_bytes, slowest_inside))
inside = pd.DataFrame(slowest.tolist(), chains.index, ["slowest link", "its share"])
inside["bytes / least"], inside["time / fused"] = moved / chains["bytes"], gain[chains.index]
assert {"aten::var_mean", "aten::bernoulli_"} <= set(inside["slowest link"])
assert moved_bytes(operations["fused"]["loss"]) / chains["bytes"]["loss"] > 3.9
inside.round(2)

# %% [markdown]
# - *Adam*: the guess holds. It moves 2.6 times the least bytes, in about as many times the time.
# - *LayerNorm*: refuted. It moves 4.5 times the least bytes, but takes far longer. Most of it is one link, `var_mean`.
# - *Dropout*: most of it is drawing random numbers, which count as neither FLOPs nor bytes.
# - *The loss*: the fused call is a chain, too, and moves 4 times the least. But one of our links is a riddle: inside `logsumexp`, subtracting each row's maximum (`sub`) takes longest.
#
# ### Bandwidth by size
#
# **Above the roof?** The residual sum's numbers may have stayed in the *cache*, a small, faster memory inside the processor. If so, larger tensors must fall to the roof. If we count too many bytes instead, sums of any size lie above.
#
# **New memory?** `x + y` makes a new tensor, `torch.add(x, y, out=z)` fills one that exists. **Predict.** Does it matter?


# %%
# NBVAL_IGNORE_OUTPUT
rows = []
for count in (2**power for power in range(16, 26)):
    a, b, result = torch.ones(3, count)
    sums = partial(torch.add, a, b, out=result), partial(torch.add, a, b)
    rows.append((12 * count, *(12 * count / best_seconds(call) for call in sums)))
sweep = pd.DataFrame(rows, columns=["touched", "sum, kept result", "sum, new result"])
assert sweep["sum, kept result"].max() > 1.3 * sweep["sum, kept result"].iloc[-1]
speed.bandwidth_chart(sweep, this_bandwidth)

# %% [markdown]
# The cache it is: small tensors move faster than memory can, large ones fall to the roof or below. But a large *new* result costs several times the sum (here from 64 MiB on).
#
# **Case: the slow subtraction.** *Symptom*: in the loss, a subtraction takes longer than exponentials. *Suspect*: its result is new, 64 MiB. *Instrument*: the system counts each *page* (mostly 4 KiB) that it hands to a program.

# %%
# NBVAL_IGNORE_OUTPUT
kept, table = torch.empty_like(logits), torch.randn(D, V)
subtract, multiply = partial(torch.sub, logits, 1), partial(torch.mm, x, table)
calls = {"subtraction, new result": subtract, "kept result": partial(subtract, out=kept)}
calls |= {"logits' product, new": multiply, "kept": partial(multiply, out=kept)}
calls = pd.Series(calls)
costs = pd.DataFrame({"seconds": calls.map(best_seconds), "new pages": calls.map(new_pages)})
price, pages = costs.iloc[0] - costs.iloc[1]
assert pages < 10_000 or price > 0.5 * costs["seconds"].iloc[1]  # some systems keep pages
costs.round(3)

# %% [markdown]
# *Culprit*: pages. The system clears each before it hands it out; a large tensor's go back when it is freed. The logits are such a tensor, too: into a kept one, their product is faster by about the same price. A program can keep freed memory (chapter 12): *memory kept*, otherwise *as it comes*.
#
# ## The floor of a step
#
# > **In short.** Put every product on the roof, let the optimizer touch each weight, and count the rest as free.
#
# Softmax, dropout, LayerNorm and sums could be done while numbers pass by anyway. Adam must visit each weight, its gradient and its averages (from the cache, it can be faster).


# %%
def least_seconds(shape: Shape, lengths: Sequence, rate: float, bandwidth: float) -> float:
    """A step's floor: products at the roof, at `rate` FLOP/s and `bandwidth` bytes/s, and Adam."""
    products = forward_products(shape, lengths)
    at_roof = sum(roof_seconds(p.flops, p.bytes, rate, bandwidth) for p in products)
    return 3 * at_roof + ADAM_BYTES * parameter_count(shape) / bandwidth


# %% [markdown]
# ### The paper's step
#
# The paper's base model took 0.4 seconds a step on eight P100 GPUs (§5.2), with about 25,000 tokens a side in a batch (§5.1), an eighth of them on each GPU. A P100 does 9.5 TFLOP/s (§6.1, footnote 5) and moves 732 GB/s by its data sheet. We assume sentences of 25 tokens without padding, and no exchange of gradients. **Predict.** What share of those 0.4 seconds is the floor?

# %%
paper = replace(BASE, vocab=PAPER_VOCAB)
paper_floor = least_seconds(paper, eighth := [(25, 25)] * 125, 9.5e12, 732e9)
print(f"floor {paper_floor:.2f} s of 0.40 s: {paper_floor / 0.4:.0%}")
print(f"100,000 steps: {100_000 * 8 * step_flops(paper, eighth):.1e} FLOPs counted")

# %% [markdown]
# Table 2's $3.3\cdot10^{18}$ FLOPs are no count: 12 hours × 8 GPUs × 9.5 TFLOP/s is what the GPUs *could* have done.
#
# ## Where the time goes
#
# > **In short.** Predict a step from its parts, then measure the whole.
#
# Two predictions for a step of your machine: the floor, and the sum of all operations, each measured alone, forward and backward. If the sum is below the step, the list lacks something, or an operation takes longer among others. **Predict.** Which operation's backward pass is almost free?

# %%
# NBVAL_IGNORE_OUTPUT
forward, calls = operations["seconds"], operations["call"].drop("Adam")  # which has no backward
backward = calls.map(two_passes).map(best_seconds) - forward
assert backward["dropout"] < 0.5 * forward["dropout"]
account = pd.DataFrame({"forward": forward, "backward": backward}).mul(operations["times"], axis=0)
floor, parts = least_seconds(SMALL, even, *rates), account.sum().sum()
print(f"floor {floor:.2f} s, sum of the parts {parts:.2f} s")
(backward / forward).dropna().round(1).to_frame("backward / forward").T

# %% [markdown]
# A product's takes about two forward passes, as its FLOPs say. Dropout's is almost free: it draws no numbers.
#
# **Predict.** How many seconds does a step take? Write it down.

# %%
# NBVAL_IGNORE_OUTPUT
optimizer = torch.optim.Adam(weights, lr=1e-4)
step = partial(train_step, model, [random_batch(SMALL, len(even), L)], criterion, optimizer, 1.0)
whole, step_pages = best_seconds(step, repeats=4), new_pages(step)
assert 0.5 < parts / whole < 1.2 and whole > 1.2 * floor
print(f"a step {whole:.2f} s: {whole / floor:.1f} floors; the parts are {parts / whole:.0%} of it")
print(f"{step_pages:,} new pages in it, at that price {price * step_pages / max(pages, 1):.2f} s")
least = 3 * (operations["times"] * operations["roof"])[products]
least["Adam"] = operations["roof"]["Adam"]
speed.step_account_chart(account, least, whole)

# %% [markdown]
# Here over half of the excess over the floor is products: forward, oneDNN is twice as fast.
#
# `results/speed-steps.json` repeats this on another machine, with two threads and real captions. **Predict** from the pages' price: what is keeping memory worth?

# %%
record = load_record("speed-steps")
for name, words in {"textbook": "as it comes", "textbook, memory kept": "memory kept"}.items():
    seconds = record["reports"][name]["seconds_per_step"]
    print(f"{words:12}{seconds:.2f} s, {seconds / record['floor_seconds']:.1f} floors")

# %% [markdown]
# It is worth 12% of the step.
#
# ## How cost grows
#
# > **In short.** Change one size, keep the others, and make both axes logarithmic. A straight line is a power law, and its slope is the exponent. Where it bends, each place has its own slope.
#
# The paper's Table 1 gives self-attention $O(L^2 D)$ operations in each layer. That leaves out the projections, $O(L D^2)$.
#
# Here are costs of another machine, as they come (`results/speed-growth.json`). One axis is varied, the others stay in the middle: 32 tokens a sentence, 2,048 tokens a side, D = 256, 3 + 3 layers. Memory is what autograd keeps for the backward pass. **Predict** the slopes of time along the four axes.

# %%
names = {"seconds": "time", "bytes": "memory", "flops": "FLOPs"}
points = pd.DataFrame(load_record("speed-growth")["points"]).rename(columns=names)
points, costs = points[points["path"] == "textbook"], list(names.values())
logs = np.log(points[["value", *costs]]).groupby(points["axis"]).diff().dropna()
slopes = logs[costs].div(logs["value"], axis=0)  # between neighbouring values
assert slopes["time"].groupby(points["axis"]).last().idxmax() == "width"
speed.growth_chart(points.assign(slope=slopes["time"]), costs)

# %%
slopes.groupby(points["axis"], sort=False).agg(["first", "last"]).round(1)

# %% [markdown]
# The first and last slopes. Only the FLOPs along the tokens are a power law. (Time is noisy: the middle setting took 0.95 to 1.08 s. That moves a slope over a doubling by 0.2, depth's last by 0.5.)
#
# - *Tokens.* Memory begins flatter and comes to 1: 30 MB are fixed, the weights.
# - *Depth.* Layers outgrow the logits, whose cost is fixed: the FLOPs' slope rises towards 1.
# - *Width.* The FLOPs' slope lies between 1, for the logits, and 2, for the layers. Time begins at 0.6. Below 1, some of it doesn't grow with $D$ (the loss has rows of V numbers). Time grows more slowly than the FLOPs, so a wider model uses a machine better.
# - *Length.* Time and memory rise faster than the FLOPs: softmax and dropout aren't counted, and autograd keeps H weights for each pair of tokens.
#
# ## Summary
#
# - A product takes $2ijk$ FLOPs, a step three times its forward pass: about $6\,P\,n$ in all.
# - A machine has two rates, and an operation's intensity decides which can be its limit: its roof.
# - Operations miss their roofs for reasons that one can test: another library (products), more bytes than needed (Adam), one slow link (LayerNorm, dropout), new memory (loss, logits).
# - The floor is every product at the roof plus Adam's traffic. On the record's machine our step took 4.1 floors as it comes, 3.7 with memory kept.
# - At a fixed number of tokens, length costs little (here up to 256). From D = 256 on, time grows most with width.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A stopwatch for a GPU
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
# ### Exercise 2 · A machine on paper
#
# *think · difficulty ●●○ · worth ●●● · 20 minutes*
#
# A GPU does 60 TFLOP/s in float32 and moves 3 TB/s. First with a pencil:
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
