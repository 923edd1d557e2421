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
# After this chapter you can predict a training step's least time from two rates of your machine, measure the step, and say where the rest of its time goes.
#
# | | |
# |---|---|
# | In the paper | §4 (Table 1), §5.1, §5.2, §6.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 40 with the code; a minute to run on a CPU |
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
from scripts.book.processes import in_new_process
from scripts.book.records import load_record
from scripts.ch01_attention import attention
from scripts.ch04_encoder_decoder import PAPER_VOCAB, EncoderDecoder, LayerNorm, make_model
from scripts.ch06_training import EOS, Batch, LabelSmoothing, batch_loss, train_step
from scripts.core.products import affine

# %% [markdown]
# ## Three questions
#
# > **In short.** How long must a program take? How long does it take? Where does the difference go?
#
# A training step of chapter 9's model takes a second or two on a CPU. Is that good?
#
# Our batches have 2,048 tokens a side. We time PyTorch *as it comes*, without chapter 12's changes.


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
# two products of the same size. So a step has three times its forward pass's FLOPs.


# %%
@dataclass(frozen=True)
class Product:
    """`times` equal matrix products (batch, i, j) @ (batch, j, k) in the forward pass."""

    batch: int
    i: int
    j: int
    k: int
    times: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of batch·i·j·k, all `times` together."""
        return 2 * self.batch * self.i * self.j * self.k * self.times

    @property
    def bytes(self) -> int:
        """Traffic in float32 where each factor is read once and the result written once."""
        return 4 * self.batch * (self.i * self.j + self.j * self.k + self.i * self.k) * self.times


# %%
def forward_products(shape: Shape, lengths: Sequence[tuple[int, int]]) -> list[Product]:
    """All matrix products of one forward pass over sentences of these (source, target) lengths."""
    D, N = shape.d_model, shape.N
    sources, targets = np.sum(lengths, axis=0).tolist()  # rows
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


def random_batch(shape: Shape, sentences: int, source: int, target: int) -> Batch:
    """Random sentences of `source` and `target` tokens, without padding."""
    ids = torch.randint(EOS + 1, shape.vocab, (sentences, source + target + 1))
    return Batch(ids[:, :source], ids[:, source:])


tiny_step = series_model(TINY), random_batch(TINY, 6, 7, 10), LabelSmoothing(0.1)
forward = count_flops(lambda: batch_loss(*tiny_step))
both = count_flops(lambda: batch_loss(*tiny_step)[0].backward())
assert 3 * forward == both == step_flops(TINY, [(7, 10)] * 6)
print(f"{forward:,} FLOPs forward, {both:,} with the backward pass")

# %% [markdown]
# ### A rule of thumb
#
# Each weight of a matrix takes part in one multiplication and one addition for each token, and in twice as many in the backward pass. (Looking up embeddings costs none. We count their table, since it is also the logits' matrix.) With $P$ weights and $n$ tokens on each side:
#
# $$ \text{FLOPs of a step} \approx 6\,P\,n $$
#
# **Predict.** The rule ignores attention's own products (scores, weights · V). How far off is it for 128 pairs of 16 tokens?

# %%
even = [(16, 16)] * 128  # a full batch: 2,048 tokens a side
P, exact = parameter_count(SMALL), step_flops(SMALL, even)
print(f"{P:,} weights; {exact / 1e9:.1f} billion FLOPs, {6 * P * 2048 / 1e9:.1f} by the rule")

# %% [markdown]
# It is half a percent low: attention's own products are 1%, but it counts biases and LayerNorm's weights.
#
# ## How many bytes?
#
# > **In short.** Numbers come from memory. What counts is how much is done with each byte.
#
# The *arithmetic intensity* of an operation is
#
# $$ I = \frac{\text{FLOPs}}{\text{bytes read and written}} $$
#
# A product of two $m \times m$ matrices in float32 has $2m^3$ FLOPs and $3m^2$ numbers of 4 bytes: $I = m/6$. A sum of two tensors has one FLOP for each twelve bytes, $I = 1/12$, at any size.
#
# ## Two rates of a machine
#
# > **In short.** A machine is two numbers: how many FLOPs it does, and how many bytes it moves, in a second.
#
# On a CPU PyTorch has two libraries for products. `F.linear` takes one (on x86 Intel's MKL); our `affine(…, onednn)` can ask the other, oneDNN. We count with the faster one's rate.
#
# The first call loads code, so we don't time it. Disturbances only make calls longer, so we take the shortest of several. One thread we time by the processor's clock: it stands still while other programs run.


# %%
def best_seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The shortest of several runs, after one that isn't timed; of one thread, the CPU's time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    return min(timeit.repeat(function, timer=clock, number=1, repeat=repeats))


def matrix_rates(kind: torch.dtype = torch.float32, repeats: int = 5) -> list[float]:
    """FLOP/s of two squares' product by `F.linear`, by oneDNN; chapter 12's is of bfloat16, too."""
    a, b = torch.randn(2, 2048, 2048, dtype=torch.float32).to(kind)
    calls = [partial(affine, a, b, None, onednn) for onednn in (False, True)]
    return [2 * 2048**3 / best_seconds(call, repeats) for call in calls]


def memory_bandwidth() -> float:
    """Bytes a second of adding a tensor too large for most caches to another: read, read, write."""
    a, b = torch.ones(2, 2**26, dtype=torch.float32)  # 256 MiB each
    return 3 * a.nbytes / best_seconds(lambda: a.add_(b))


# %% [markdown]
# The machine that last ran this notebook, with one thread:

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
# The two limits meet at the *ridge*, $I = r/w$. Left of it memory sets the limit (*memory-bound*), right of it arithmetic (*compute-bound*). An operation need not reach its limit.


# %%
def roof_seconds(flops: float, size: float, rate: float, bandwidth: float) -> float:
    """Least seconds of operations, each of which does so many FLOPs and moves `size` bytes."""
    return np.maximum(flops / rate, size / bandwidth)


# %% [markdown]
# ### The operations of our step
#
# Now the operations of chapters 1 to 6, for a full batch. Six can be called in a second way: a chain of operations as one *fused* call, a product by oneDNN. For what isn't a product we count a few FLOPs for each number; another count would move a dot along the roof's slope.


# %%
TOKENS = 2048  # of one side of a full batch
CHAPTER = "scripts.ch11_where_the_time_goes"


@dataclass
class Operation:
    """An operation of our step: what one call costs at least, and one or two ways to call it."""

    times: float  # calls in a step
    flops: int
    bytes: int  # each number read once, each result written once
    call: Callable[[], object]  # as chapters 1 to 6 do
    fused: Callable[[], object] | None = None  # of a product: by oneDNN
    passes: int = 0  # that the step's floor counts; 0: it says free


def linear(times: int, inputs: int, outputs: int) -> Operation:
    """A batch's rows times weights: by `F.linear`, and by oneDNN."""
    product = Product(1, TOKENS, inputs, outputs)
    x, weight = torch.randn(TOKENS, inputs), torch.randn(outputs, inputs)
    calls = [partial(affine, x, weight, None, onednn) for onednn in (False, True)]
    return Operation(times, product.flops, product.bytes, *calls, passes=3)


# %%
D, L, V, size = SMALL.d_model, 16, SMALL.vocab, TOKENS * SMALL.d_model  # size of x
x, y, logits = (torch.randn(TOKENS, width) for width in (D, D, V))
model, criterion, labels = series_model(SMALL), LabelSmoothing(0.1), torch.arange(TOKENS)
heads = torch.randn(3, TOKENS // L, SMALL.h, L, D // SMALL.h)  # queries, keys, values
mask = torch.ones(TOKENS // L, 1, 1, L, dtype=torch.bool)
attend, sdpa = (partial(f, *heads, mask) for f in (attention, F.scaled_dot_product_attention))
norm, fused_norm, dropout = LayerNorm(D), nn.LayerNorm(D), nn.Dropout(SMALL.dropout)
batch_loss(model, random_batch(SMALL, 2, L, L), criterion)[0].backward()  # for Adam: any gradients
adam, fused_adam = (torch.optim.Adam(model.parameters(), 1e-4, fused=f) for f in (None, True))

# %% [markdown]
# The three encoder and three decoder layers have nine attentions and six feed-forward networks: 15 residual sums and, with two at the end, 17 LayerNorms. The first three rows are *linear maps*: products with weights.

# %%
ADAM_BYTES = 4 * 7  # a weight: itself, its averages and gradient are read; all but the last written
# Dropouts in tensors of x's size: after sublayers and embeddings, in feed-forward, of weights.
drops = 15 + 2 + 6 * SMALL.d_ff / D + 9 * SMALL.h * L / D
rows = {
    "projection": linear(9 * 4, D, D),
    "feed-forward": linear(6 * 2, D, SMALL.d_ff),
    "logits": linear(1, D, V),
    "attention": Operation(9, 4 * L * size, 16 * size, attend, sdpa, passes=3),
    "LayerNorm": Operation(17, 8 * size, 8 * size, partial(norm, x), partial(fused_norm, x)),
    "residual sum": Operation(15, size, 12 * size, partial(torch.add, x, y)),
    "dropout": Operation(drops, 2 * size, 8 * size, partial(dropout, x)),
    "loss": Operation(1, 5 * TOKENS * V, 4 * TOKENS * V, partial(criterion, logits, labels)),
    "Adam": Operation(1, 12 * P, ADAM_BYTES * P, adam.step, fused_adam.step, passes=1),
}
operations = pd.DataFrame(map(vars, rows.values()), index=list(rows))
assert 3 * (operations["times"] * operations["flops"])[:4].sum() == step_flops(SMALL, even)

# %% [markdown]
# **Predict.** Which operations are far below their roof? Can one be above it?

# %%
# NBVAL_IGNORE_OUTPUT
operations["roof"] = roof_seconds(operations["flops"], operations["bytes"], *rates)
with torch.no_grad():
    operations["seconds"] = operations["call"].map(best_seconds)
    operations["fused seconds"] = operations["fused"].map(best_seconds, na_action="ignore")
gain = operations["seconds"] / operations["fused seconds"]
assert gain["LayerNorm"] > 1.5
speed.roofline_chart(operations, *rates)

# %% [markdown]
# LayerNorm, the loss, dropout and attention stay under a fifth of their roof. The residual sum is above it. `F.linear` is half as fast as oneDNN.
#
# ## Why the dots are where they are
#
# > **In short.** Guess what holds an operation up, say what would refute the guess, and measure that alone.
#
# - *Narrow instructions* (linear maps). On this page's processor, an AMD, oneDNN calculates with 512 bits at a time. We guess that MKL uses only 256. Refuted if oneDNN stays fast with at most 256. (It reads this limit when it starts, so we ask a new process.)
# - *Too many bytes* (Adam, attention). A chain moves `bytes / least` times the least bytes, and takes `time / fused` times its fused call's time. Refuted if one is over 1.5 times the other.
# - *One slow link* (LayerNorm, dropout, loss). PyTorch's profiler times each operation of a chain alone. Refuted if none has most of the time.

# %%
# NBVAL_IGNORE_OUTPUT
_, narrow = in_new_process(f"{CHAPTER}.matrix_rates()", ONEDNN_MAX_CPU_ISA="AVX2")
print(f"oneDNN with at most 256 bits: {narrow / 1e9:.0f} billion FLOP/s")
chains = operations.loc[["Adam", "LayerNorm", "attention", "dropout", "loss"]]
moved = chains["call"].drop("loss").map(moved_bytes)  # it can't see inside `logsumexp`
slowest = map(slowest_inside, chains["call"])
inside = pd.DataFrame(slowest, chains.index, ["slowest link", "its share"])
inside["bytes / least"], inside["time / fused"] = moved / chains["bytes"], gain[chains.index]
assert {"aten::var_mean", "aten::bernoulli_"} <= set(inside["slowest link"])
inside.round(2)

# %% [markdown]
# | | Guess | Evidence |
# |---|---|---|
# | linear maps | narrow instructions | with 256 bits oneDNN, too, is hardly faster than `F.linear` |
# | Adam | too many bytes | 2.6 times the least, about 3 times the time |
# | attention | too many bytes: *refuted* | the fused call needs less than half, and is hardly faster |
# | LayerNorm | one slow link | variance and mean: most of the time, a ninth of the bytes |
# | dropout | one slow link | drawing random numbers: most of the time |
# | loss | one slow link | strangely a subtraction, `sub` |
#
# Attention's cause stays open. Half of its time is `bmm`, two products of 1,024 small matrices.
#
# ### Bandwidth by size
#
# **Above the roof?** The sum's numbers may have stayed in the *cache*, a small, faster memory inside the processor. Then the sum gets slower once its tensors outgrow the cache.
#
# **New memory?** `x + y` makes a new tensor, `torch.add(x, y, out=z)` fills one that exists, `x.add_(y)` works in place. **Predict.** Does it matter?


# %%
# NBVAL_IGNORE_OUTPUT
rows = []
for count in (2**power for power in range(16, 26)):
    a, b, kept = torch.ones(3, count)
    sums = partial(a.add_, b), partial(torch.add, a, b, out=kept), partial(torch.add, a, b)
    rows.append((kept.nbytes, *(3 * kept.nbytes / best_seconds(call) for call in sums)))
sweep = pd.DataFrame(rows, columns=["result", "in place", "kept result", "new result"])
assert sweep["in place"].max() > 1.3 * sweep["in place"].iloc[-1]
speed.bandwidth_chart(sweep, rates[1])

# %% [markdown]
# It was the cache: in place, the sum's speed falls to about a third. Into another tensor it has half to three quarters of that speed, into a *new* one of 32 MiB and more about a tenth.
#
# ### Case: the slow subtraction
#
# *Symptom*: in the loss, `logsumexp` subtracts from each row its largest number. That takes longer than the exponentials. *Suspect*: the result is a new tensor of 64 MiB; the exponentials are written over it. *Instrument*: the system counts each *page* (mostly 4 KiB) of memory that it hands to a program.
#
# *Control*: the same loss with *memory kept*: a freed tensor's stays for the next one. If new memory isn't the culprit, the loss takes as long as before. (The two variables are of Linux's glibc. On macOS both rows are alike.)


# %%
def loss_costs() -> tuple[float, int]:
    """Seconds and new pages of the loss and its backward pass."""
    logits, labels = torch.randn(TOKENS, SMALL.vocab), torch.arange(TOKENS)
    loss = two_passes(partial(LabelSmoothing(0.1), logits, labels))
    return best_seconds(loss), new_pages(loss)


# %%
# NBVAL_IGNORE_OUTPUT
settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
plain, kept = (in_new_process(f"{CHAPTER}.loss_costs()", **changed) for changed in ({}, settings))
assert plain[0] > 1.5 * kept[0] or plain[1] < 10 * (1 + kept[1])  # where memory is always kept
pd.DataFrame([plain, kept], ["as it comes", "memory kept"], ["loss, s", "new pages"]).round(3)

# %% [markdown]
# *Culprit*: new pages. The system clears each before it hands it out. The loss and its backward pass make six tensors of the logits' size. With memory kept they take a quarter of their time.
#
# ## The floor of a step
#
# > **In short.** A step's floor: its products at their roof, and Adam's numbers read and written once. The rest counts as free.
#
# Softmax, dropout, LayerNorm and sums could be done while a product's numbers are in the processor anyway. Adam must visit each weight, gradient and average. We let all numbers come from memory; free bytes would lower our floor by 1%.


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
paper_floor = least_seconds(replace(BASE, vocab=PAPER_VOCAB), [(25, 25)] * 125, 9.5e12, 732e9)
print(f"floor {paper_floor:.2f} s of 0.40 s: {paper_floor / 0.4:.0%}")

# %% [markdown]
# A third. Ours comes next.
#
# ## Where the time goes
#
# > **In short.** Predict a step from its parts, then measure the whole.
#
# We measure each operation alone, forward and backward, as often as it occurs. From that we subtract its part of the floor. **Predict.** How many floors does a step take? Which operations take most beyond the floor?

# %%
# NBVAL_IGNORE_OUTPUT
both = operations["call"].drop("Adam").map(two_passes).map(best_seconds)  # Adam has one pass
operations["total"] = operations["times"] * both.combine_first(operations["seconds"])
operations["beyond"] = operations.eval("total - times * passes * roof")
floor = least_seconds(SMALL, even, *rates)
step = partial(train_step, model, [random_batch(SMALL, len(even), L, L)], criterion, adam, 1.0)
whole = best_seconds(step, repeats=4)
assert 0.5 < operations["total"].sum() / whole < 1.2 and whole > 1.2 * floor
speed.beyond_chart(operations, floor, whole)

# %% [markdown]
# So our step isn't good: three to four floors. Half of the excess is linear maps: their floor has oneDNN's rate, twice `F.linear`'s.
#
# The parts explain nearly all of it. The grey rest is what our list lacks (embeddings, biases, ReLU, clipping), and what an operation takes more or less in a step than alone.
#
# ## How cost grows
#
# > **In short.** Change one size only, and compare what FLOPs predict with what time does.
#
# `results/speed-growth.json` is of another machine with two threads, as it comes but for a fused Adam. The other sizes stay at 32 tokens a sentence, 2,048 a side, D = 256, 3 + 3 layers. **Predict.** Which costs more: 32 times the length (and a 32nd as many sentences), or 12 times the width?

# %%
speed.growth_chart(load_record("speed-growth")["points"])

# %% [markdown]
# *Width* costs more. FLOPs grow with $D^2$, but the logits' and attention's with $D$: 62 times, not 144. Time grows more slowly still. So a wider model uses a machine better.
#
# *Length*: attention takes $O(L^2 D)$ a sentence (Table 1). Longer sentences are fewer here, so a batch's attention grows with $L$ only. The linear maps don't grow and outweigh it: FLOPs grow by 15%. Yet time grows by half. *Suspects*: attention, and the dropout of its weights, $L^2$ numbers a head.

# %%
# NBVAL_IGNORE_OUTPUT
q, k, v = torch.randn(3, TOKENS // 256, SMALL.h, 256, D // SMALL.h)
calls = partial(attention, q, k, v, q.new_ones(256).bool()), partial(dropout, q @ k.mT)
attentions, dropouts = (9 * best_seconds(two_passes(call)) for call in calls)
print(f"at 256 tokens: nine attentions {attentions:.2f} s, their dropouts {dropouts:.2f} s")
assert attentions > 3 * operations["total"]["attention"]

# %% [markdown]
# Both: they would add over a third to this page's step, from 16 tokens to 256. So did the record's, with 15% of noise: its same step takes 0.95 to 1.08 s.
#
# ## Summary
#
# - A product takes $2ijk$ FLOPs, a step three times its forward pass: about $6\,P\,n$ in all.
# - A machine has two rates. An operation's intensity decides which can be its limit.
# - Operations miss their roofs for reasons that one can guess and test.
# - At 2,048 tokens, up to 256 a sentence, width costs more than length.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A stopwatch for a GPU
#
# *code · difficulty ●●○ · worth ●●● · 15 minutes*
#
# A GPU takes orders and returns at once; `wait()` returns when all of them are done. The first call is slow. Write `stopwatch(work, wait, clock, rounds)`: the median over `rounds` of the seconds that one `work()` takes, by `clock()`, after one call that isn't timed. (`solution("stopwatch")` shows ours.)


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
# 2. $6 \cdot 48.3\cdot10^6 \cdot 2048 = 5.9\cdot10^{11}$ FLOPs, 9.9 ms; Adam's $28 \cdot 48.3\cdot10^6$ bytes, 0.5 ms: 10.3 ms. `least_seconds` says 10.7 ms, since attention's own products are limited by memory.
# 3. Each weight (4 bytes) is read for 2 FLOPs: half a FLOP per byte. That allows 2.5% of the rate. With n sentences the intensity is nearly n/2. It passes 20 at n = 45.
#
# </details>
#
# Next: [Chapter 12 · Going fast](ch12_going_fast.ipynb)
