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
# # Chapter 12 · Going fast
#
# After this chapter you can make a training step many times as fast, show that it still computes the same numbers, and say what each trick gains and costs.
#
# | | |
# |---|---|
# | In the paper | §5.1, §5.2, Table 2 |
# | Time | 20 minutes to read, 60 with the code; a minute to run on a CPU |
# | Before, after | [Chapter 11 · Where the time goes](ch11_where_the_time_goes.ipynb) · [Chapter 13 · Decoding fast](ch13_decoding_fast.ipynb) |
#
# *If you read only three cells:* the function `duel`, the chart of *The staircase*, the class `LinearCrossEntropy`.
#
# Shapes: **B** batch, **T** target length, **D** `d_model`, **V** vocabulary; **N** rows, one for each real token.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import ctypes
import math
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures import staircase
from scripts.book.instruments import alive_bytes
from scripts.book.records import load_record
from scripts.ch01_attention import attention
from scripts.ch04_encoder_decoder import EncoderDecoder, LayerNorm, make_model
from scripts.ch06_training import BOS, EOS, PAD, Batch, LabelSmoothing, batch_loss
from scripts.ch07_multi30k import Example, make_batch, token_batches
from scripts.core.settings import multiplies_bf16

# %%
torch.set_num_threads(1)
bf16 = multiplies_bf16(torch.device("cpu"))  # has this processor products of 16-bit numbers?

# %% [markdown]
# ## Two programs in turn
#
# > **In short.** "Faster" is a ratio of two programs' times, taken in turns. A program that races itself shows what chance does.
#
# A *duel* times two programs that compute the same numbers. In each round both run once, and only the ratio of their times counts. A slow spell that hits both cancels in the ratio; a round that only one lost hardly moves the median. We count the processor's seconds (`time.process_time`), not the clock's: other programs matter less.
#
# **Your turn.** Write `duel`. Both run once to warm up. Then `before` begins the first round, `after` the second, and so on: whoever runs first leaves data in the cache, which can help or hinder the second.


# %% tags=["yours"]
def duel(before: Callable, after: Callable, rounds: int = 6) -> list[float]:
    """How many times as long `before` takes as `after`, in each of the rounds."""
    before()
    after()
    ratios = []
    for number in range(rounds):
        seconds = [0.0, 0.0]
        for who in (0, 1) if number % 2 == 0 else (1, 0):
            start = time.process_time()
            (before, after)[who]()
            seconds[who] = time.process_time() - start
        ratios.append(seconds[0] / seconds[1])
    return ratios


# %%
turns = []
work = lambda name, size: (turns.append(name), sum(range(size)))  # noqa: E731
ratios = duel(partial(work, "b", 400_000), partial(work, "a", 100_000), rounds=3)
assert "".join(turns) == "ba" + "ba" + "ab" + "ba" and len(ratios) == 3  # warm-up, then rounds
assert 1.5 < np.median(ratios) < 10, "four times the work"

# %% [markdown]
# The contenders train chapter 4's model, with one layer on each side, on 96 made-up pairs as long as Multi30k's. A *lap* takes an optimizer step on each batch.


# %%
VOCAB, ADAM = 8192, {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9}


def random_pair(rng: random.Random) -> Example:
    """Lengths spread as in Multi30k; which words they are plays no part."""
    source = min(50, max(4, round(rng.lognormvariate(math.log(13.5), 0.35))))
    target = round(source * rng.uniform(0.8, 1.2))
    return Example([*range(4, 4 + source), EOS], [BOS, *range(4, 4 + target), EOS])


def live_model() -> EncoderDecoder:
    """The same random weights each time."""
    torch.manual_seed(0)
    return make_model(VOCAB, VOCAB, 1, 128, 512, h=4, dropout=0.1, norm_first=True, tie="all")


def laps(batches, model=None, half=False, fused=None) -> Callable[[], None]:
    """A lap: a training step on each batch; the forward pass in 16 bits if `half`."""
    model, criterion = model or live_model(), LabelSmoothing()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused, **ADAM)

    def lap() -> None:
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss, _ = batch_loss(model, batch, criterion)
            (loss / batch.ntokens).backward()
            optimizer.step()

    return lap


# %% [markdown]
# First the **control**. **Predict.** How far from 1 are the ratios of a program against itself?


# %%
def show(ratios: list[float], what: str, at_least: float = 0.0) -> None:
    """Print a duel's median and range, and check the median."""
    middle = np.median(ratios)
    print(f"duel: {middle:.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f}): {what}")
    assert middle > at_least, "slower than any of our machines: does something else run?"


rng = random.Random(0)
pairs = [random_pair(rng) for _ in range(96)]
to_longest = [make_batch(pairs[i : i + 32]) for i in (0, 32, 64)]
show(duel(lap := laps(to_longest[:1]), lap), "the same again", at_least=0.8)

# %% [markdown]
# The median is near 1, and the range shows what chance does.
#
# ## The staircase
#
# > **In short.** A trick gains speed and costs lines of code: a map shows both.
#
# Each stair changes one thing of the program below it; only *fused parts* also moves to our fast path, `scripts/fast`:
#
# | stair | what changes |
# |---|---|
# | padded to the longest | a batch is as wide as its longest sentence, not 72 tokens, and holds more sentences |
# | sorted by length | a batch has sentences of like length |
# | autocast | products of 16-bit numbers |
# | memory kept | freed memory isn't given back |
# | fused parts | LayerNorm and Adam in one loop each |
# | dropout from 16 bits | cheaper random numbers |
# | loss in chunks | the logits are never all there |
# | rows | no padding outside attention |
# | products by hand | 16 bits between products, too |
# | C | loops of our own for small operations |
#
# We raced them at *full size*: chapter 9's model on Multi30k, on one thread (`python -m scripts.studies.race_training stairs --save`). **Predict.** Place your bets: which three stairs gain most, and which gain nothing that one can see?

# %%
staircase.lines_chart(stairs := load_record("speed-stairs"))

# %% [markdown]
# Fifty-five lines train more than ten times as many tokens a second; nearly half of them are chapter 7's `token_batches`. About a thousand more lines make it about 1.4 times as fast again. (A third of these is `fast.py`, through which the race runs all stairs from *fused parts* on.)
#
# The next table compares each stair with the one below it: median and range of seven rounds. *Fused parts, within scripts/fast* is the same stair with the fast path on both sides. The last row is the control, the finished program against itself. A gain or a loss is *seen* if all seven rounds lie beyond the control's range.

# %%
added = staircase.stairs_table(stairs)
added

# %% [markdown]
# Padding to the longest, 16 bits and sorting gain most. Where the table says *no*, chance could do as much.
#
# Each section now explains a stair, times it or its main part live, and ends with its row.
#
# ## Padding
#
# > **In short.** The cheapest product is the one that you don't compute.
#
# The Annotated Transformer pads each pair to a fixed width, 72. The first stair pads to the batch's longest sentence; the second sorts.


# %%
def loss_and_norm(model: nn.Module, batches: list[Batch]) -> list[float]:
    """All batches' loss, and its gradient's norm, without dropout: what must stay the same."""
    loss = sum(batch_loss(model.eval(), batch, LabelSmoothing())[0] for batch in batches)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)  # clips nothing
    return [loss.item(), norm.item()]


# %%
pad_to = lambda ids, width: F.pad(ids, (0, width - ids.size(1)))  # noqa: E731
to_72 = [Batch(pad_to(b.src, 72), pad_to(b.full, 73)) for b in to_longest]  # targets lose a token
in_buckets = [make_batch([pairs[i] for i in ids]) for ids in token_batches(pairs, 700, rng)]
sums = [loss_and_norm(live_model(), batches) for batches in (to_longest, to_72, in_buckets)]
assert np.allclose(sums, sums[0], rtol=1e-5)
show(duel(laps(to_72), laps(to_longest), 3), "padded to the longest", at_least=1.5)
show(duel(laps(to_longest), laps(in_buckets), 4), "sorted by length", at_least=1.1)
added.loc[["padded to the longest", "sorted by length"]]

# %% [markdown]
# ## One line: 16 bits
#
# > **In short.** Where a processor has products of 16-bit numbers, they take half the time or less. Weights, Adam and sums inside products stay in 32 bits.
#
# A bfloat16, or *bf16*, is the first half of a float32: the same range, but 8 binary digits instead of 24. `torch.autocast` rounds both factors of a product to it, and the result. Sums inside a product, LayerNorm and the loss are computed in 32 bits (Micikevicius et al. 2018). So the numbers are the same only up to rounding. Most GPUs and some CPUs (AVX512-BF16, AMX) can do it.

# %%
with torch.autocast("cpu", torch.bfloat16):
    assert np.allclose(loss_and_norm(live_model(), in_buckets), sums[0], rtol=0.01)
show(duel(laps(in_buckets), laps(in_buckets, half=bf16)), "autocast", 1.1 if bf16 else 0.8)
added.loc[["autocast"]]

# %% [markdown]
# Do 16 bits learn as well? We trained chapter 9's `small` in both precisions, twice ([record](../results/precision-multi30k.json), [earlier](../results/archive/precision-multi30k-earlier.json)). The loss is as low. BLEU by beam search is 0.1 and 0.9 lower on validation, and 0 to 0.4 on the test sets. Two pairs can't rule out chance.
#
# ## One call: keep memory
#
# > **In short.** The C library gives a large freed tensor back to the operating system. The next one gets fresh pages, each zeroed first.
#
# glibc, the C library of most Linux systems, can keep what is freed. Its settings hold for the whole process, so the duel switches them back and forth. `USUAL` has its defaults, but the two limits that it raises by itself are at their highest.


# %%
KEPT = {-4: 0, -1: -1, -2: 64 * 2**20, -8: 1}  # M_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX
USUAL = {-4: 65_536, -1: 64 * 2**20, -2: 2**17, -3: 32 * 2**20}  # -3: M_MMAP_THRESHOLD


def keep_memory(settings: dict[int, int] = KEPT) -> bool:
    """Have the C library keep freed memory for the next tensor. False if it isn't glibc."""
    is_glibc = platform.libc_ver()[0] == "glibc"
    return is_glibc and all([ctypes.CDLL(None).mallopt(*pair) == 1 for pair in settings.items()])


# %%
lap = laps(in_buckets, half=bf16)
ratios = duel(lambda: (keep_memory(USUAL), lap()), lambda: (keep_memory(), lap()))
keep_memory()  # for the rest of the chapter
show(ratios, "memory kept", at_least=0.8)
added.loc[["memory kept"]]

# %% [markdown]
# Live, one run of this cell gave 1.4, another 1.0. At full size all programs share a process, so one may use what another has kept. In an [older race](../results/speed-peers.json), with a process each and two threads, the textbook in 16 bits became about 1.27 times as fast, and took 16% more memory.
#
# ## PyTorch's fused parts
#
# > **In short.** A *kernel* is one compiled loop over a tensor. An operation of five kernels reads and writes its numbers five times; one kernel does so once.
#
# Chapter 4's LayerNorm reads or writes a tensor nine times. `F.layer_norm` is one kernel: it does everything while a row is in the cache. `Adam(fused=True)` updates all weights in one pass.


# %%
def become(model: nn.Module, old: type, new: type) -> nn.Module:
    """`model`, whose parts of class `old` compute as `new` from now on; the weights stay."""
    for part in model.modules():
        if type(part) is old:
            part.__class__ = new
    return model


class FusedNorm(LayerNorm):
    """Chapter 4's LayerNorm in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


# %%
fused_model = lambda: become(live_model(), LayerNorm, FusedNorm)  # noqa: E731
assert np.allclose(loss_and_norm(fused_model(), in_buckets), sums[0], rtol=1e-5)
with_fused = laps(in_buckets, fused_model(), half=bf16, fused=True)
show(duel(laps(in_buckets, half=bf16), with_fused, 10), "fused parts")
added.loc[["fused parts", "fused parts, within scripts/fast"]]

# %% [markdown]
# Attention has a fused form, too, `scaled_dot_product_attention`. **Predict.** What does it gain here?

# %%
qkv = torch.randn(3, 64, 4, 16, 32, requires_grad=True)  # each (B, H, T, d_k)
plain = lambda: attention(*qkv, dropout=F.dropout)[0].sum().backward()  # noqa: E731
fused = lambda: F.scaled_dot_product_attention(*qkv, dropout_p=0.5).sum().backward()  # noqa: E731
show(duel(plain, fused), "attention, alone")

# %% [markdown]
# It gains nothing: a **dead end**. On a GPU, in 16 bits and without a mask of one's own, the function is FlashAttention (Dao et al. 2022), which keeps no scores in memory. Its kernel for CPUs has no dropout, so here it falls back to plain operations.
#
# ## `torch.compile`
#
# > **In short.** PyTorch's compiler fuses small operations by itself, in one line.
#
# `torch.compile(f)` records the operations of `f`, and writes and compiles C++ that does them in few passes. Our whole step takes it a minute or two, so here is a piece: LayerNorm, ReLU and dropout. **Predict.** Which of two rates of dropout, 0 and 0.1, gains more?


# %%
norm, x = LayerNorm(512).requires_grad_(False), torch.randn(1024, 512)
piece = lambda x, p: F.dropout(norm(x).relu(), p)  # noqa: E731
if shutil.which("g++"):
    compiled = torch.compile(piece)
    for p in (0.0, 0.1):
        show(duel(partial(piece, x, p), partial(compiled, x, p), 20), f"compiled, dropout {p}")
else:
    print("duel: skipped, as there is no C++ compiler")

# %% [markdown]
# Without dropout the single pass is several times as fast. With dropout most of the gain is lost: random numbers take most of the time, and the C++ makes them one at a time (`normalized_rand_cpu` in [its source](https://github.com/pytorch/pytorch/blob/main/torch/_inductor/codegen/cpp.py)).
#
# ## What dropout costs
#
# > **In short.** On our AMD processors dropout spends most of its time on making random numbers.
#
# A mask needs only a yes or a no. So we have `random_` make 64 bits at once, and cut them into four numbers of 16. An entry is dropped if its number is among the $p\cdot 65{,}536$ lowest, rounded.


# %%
DRAWS = 2**16  # the values of 16 random bits


def keep_mask(shape: torch.Size, p: float, like: Tensor) -> Tensor:
    """1 where an entry stays and 0 where dropout takes it: `shape`, in the dtype of `like`."""
    bits = torch.empty(math.ceil(math.prod(shape) / 4), dtype=torch.int64).random_(-(2**63), None)
    draws = bits.view(torch.int16)[: math.prod(shape)]  # −32,768 to 32,767
    return (draws >= round(p * DRAWS) - DRAWS // 2).to(like.dtype).view(shape)


def keep_scale(p: float) -> float:
    """What the kept entries are multiplied by, so that the mean stays: 1/(1 − p), p as rounded."""
    return 1 / (1 - round(p * DRAWS) / DRAWS)


class BitDropout(nn.Dropout):
    """Dropout from 16 random bits an entry."""

    def forward(self, x: Tensor) -> Tensor:
        mask = keep_mask(x.shape, self.p, x) * keep_scale(self.p) if self.training else 1
        return x * mask


# %%
x, drop, from_bits = torch.ones(1000, 1000), nn.Dropout(0.25), BitDropout(0.25)
dropped = from_bits(x)
assert abs((dropped == 0).double().mean() - 0.25) < 0.003 and abs(dropped.mean() - 1) < 0.005
show(duel(partial(drop, x), partial(from_bits, x), 20), "a mask, alone")
with_bits = laps(in_buckets, become(fused_model(), nn.Dropout, BitDropout), bf16, fused=True)
show(duel(with_fused, with_bits, 10), "dropout from 16 bits")
added.loc[["dropout from 16 bits"]]

# %% [markdown]
# Dropout is a small part of a step, so little of this gain is left.
#
# ## Memory: a loss that never holds all logits
#
# > **In short.** The logits are the largest tensor of the step. Make a few rows at a time, and overwrite them. That saves memory, not time.
#
# For 2,048 targets and 8,192 words the logits $z = XW^\top + b$ take 64 MiB. The gradients of the smoothed loss (chapter 6) are:
#
# $$ \frac{\partial\ell}{\partial z} = P - Y,\qquad \frac{\partial\ell}{\partial X} = (P - Y)\,W,\qquad \frac{\partial\ell}{\partial W} = (P - Y)^\top X $$
#
# with $P = \mathrm{softmax}(z)$ and $Y = (1-\varepsilon)\,\mathrm{onehot}(y) + \varepsilon/V$. Each row adds its own part, which needs its own logits alone. So a loop makes `chunk` rows of logits at a time, overwrites them with $P - Y$, and adds the products to the gradients.
#
# A `Function` is an operation whose backward pass we write ourselves; `ctx` keeps what it needs: here, the gradients themselves.
#
# **Your turn.** Write `forward`.


# %% tags=["yours"]
class LinearCrossEntropy(torch.autograd.Function):
    """The generator's product and the smoothed loss in one."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, smoothing, chunk):
        """x (N, D), weight (V, D), bias (V,), labels (N,), to `LabelSmoothing`'s two sums."""
        keep, eps_each = 1 - smoothing, smoothing / len(weight)
        nll = uniform = 0.0  # the loss at the labels, and at all words alike
        by_x, by_weight, by_bias = map(torch.zeros_like, (x, weight, bias))
        parts = [tensor.split(chunk) for tensor in (x, labels[:, None], by_x)]
        for rows, label, by_rows in zip(*parts, strict=True):
            logits = F.linear(rows, weight, bias)  # z (n, V)
            log_z = logits.logsumexp(dim=1, keepdim=True)  # log Σ exp z, (n, 1)
            nll += (log_z - logits.gather(1, label)).sum()
            uniform += (log_z - logits.mean(dim=1, keepdim=True)).sum()
            logits.sub_(log_z).exp_().sub_(eps_each)  # P − ε/V, in place
            logits.scatter_add_(1, label, torch.full_like(log_z, -keep))  # P − Y
            by_rows += logits @ weight
            by_weight += logits.T @ rows
            by_bias += logits.sum(0)
        ctx.save_for_backward(by_x, by_weight, by_bias)
        ctx.mark_non_differentiable(nll)
        return keep * nll + smoothing * uniform, nll

    @staticmethod
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        """The gradients that `forward` saved, times the loss's own."""
        return *(saved * grad for saved in ctx.saved_tensors), None, None, None


# %%
shapes, labels = ((7, 4), (11, 4), (11,)), torch.tensor([3, 1, 10, 2, 5, 5, 9])
leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
in_chunks = lambda *w: LinearCrossEntropy.apply(*w, labels, 0.1, 3)  # noqa: E731
torch.testing.assert_close(in_chunks(*leaves), LabelSmoothing(0.1)(F.linear(*leaves), labels))
assert torch.autograd.gradcheck(lambda *w: in_chunks(*w)[0], leaves)  # chapter 1

# %% [markdown]
# Now memory, through loss and backward pass, for 1,024 rows. **Predict.** How many tensors of 32 MiB, the logits' size, does the textbook hold at once?

# %%
# NBVAL_IGNORE_OUTPUT
x, labels = torch.randn(1024, 128, requires_grad=True), torch.arange(1, 1025)
proj = live_model().generator.proj
library_loss = partial(F.cross_entropy, label_smoothing=0.1, reduction="sum")
ways = {
    "textbook": lambda: LabelSmoothing()(proj(x), labels)[0],
    "F.cross_entropy": lambda: library_loss(proj(x), labels),
    "loss in chunks": lambda: LinearCrossEntropy.apply(x, *proj.parameters(), labels, 0.1, 256)[0],
}
backward = lambda way: ways[way]().backward()  # noqa: E731
staircase.memory_chart({way: alive_bytes(backward, way) for way in ways}, 1024 * VOCAB * 4)

# %%
for way in ("F.cross_entropy", "loss in chunks"):
    torch.testing.assert_close(ways[way](), ways["textbook"](), rtol=1e-5, atol=0.0)
    show(duel(partial(backward, "textbook"), partial(backward, way), rounds=4), way + ", alone")
added.loc[["loss in chunks"]]

# %% [markdown]
# Chunks save hardly any time, and nearly half the memory: the finished program takes 443 MiB, and 793 with the textbook's loss ([record](../results/speed-steps.json)). In time `F.cross_entropy` wins, but it returns the smoothed loss alone; our training also reports the plain one.
#
# ## Rows instead of rectangles
#
# > **In short.** Only attention and positions need to know where sentences begin. Give all else a plain list of tokens, and padding is gone.
#
# Sorting leaves some padding, and where the order is given, one can't sort. So a batch becomes rows (N, D), one for each real token: chapter 4's layers take them as they are. Attention alone spreads them into a rectangle, and gathers them again.
#
# **Your turn.** Write `Layout`.


# %% tags=["yours"]
class Layout:
    """Which cells of a padded rectangle (B, T) are real; each of these has a row.

    `shape` is (B, T), `slots` (N,) each row's cell b·T + t, `positions` (N,) its t.
    """

    def __init__(self, real: Tensor):
        self.shape = real.shape
        self.slots = torch.where(real.flatten())[0]
        self.positions = self.slots % real.size(1)

    def rows(self, rectangle: Tensor) -> Tensor:
        """(B, T) to (N,): the cells that have rows."""
        return rectangle.reshape(-1)[self.slots]

    def spread(self, rows: Tensor) -> Tensor:
        """(N, D) to (B, T, D); a cell without a row is 0."""
        cells = rows.new_zeros(self.shape.numel(), rows.size(-1))  # (B·T, D)
        return cells.index_add_(0, self.slots, rows).unflatten(0, self.shape)

    def gather(self, cells: Tensor) -> Tensor:
        """(B, T, D) to (N, D): the way back."""
        return cells.flatten(0, 1).index_select(0, self.slots)


# %%
real = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()  # (B, T): lengths 2, 1 and 3
layout, x = Layout(real), torch.randn(6, 4)  # rows (N, D)
cells = layout.spread(x)  # (B, T, D)
assert layout.positions.tolist() == [0, 1, 0, 0, 1, 2] and layout.rows(real).all()
assert cells[1, 0].equal(x[2]) and not cells[~real].any() and layout.gather(cells).equal(x)


# %%
layout = Layout(real := to_longest[0].tgt_y != PAD)
layer, cells = live_model().eval().encoder.layers[0].feed_forward, torch.randn(*layout.shape, 128)
by_rows = lambda: layout.spread(layer(layout.gather(cells)))  # noqa: E731
torch.testing.assert_close(layout.gather(by_rows()), layout.gather(layer(cells)))
ratios = duel(lambda: layer(cells).sum().backward(), lambda: by_rows().sum().backward())
print(f"padding: {1 - real.double().mean():.0%} here, {stairs['padding']['rows']:.1%} at full size")
show(ratios, "a feed-forward layer alone, by rows")
added.loc[["rows", "products by hand"]]

# %% [markdown]
# The live batch is in random order. At full size sorting has left little padding. *Products by hand*, `LinearProduct` in [`scripts/fast`](../scripts/fast/fast.py), keeps rows in 16 bits where autocast converts back and forth. C builds on both.
#
# ## Last, C
#
# > **In short.** Where no library has the loop that you need, write it. It is the most code for the gain, so it comes last.
#
# `BitDropout` makes bits, compares, converts and multiplies twice: five passes, and a mask kept for the backward pass. A loop of our own needs one pass and no mask, and draws several numbers at once. It is in [`passes.c`](../scripts/fast/passes.c):

# %%
source = ROOT / "scripts" / "fast" / "passes.c"
start = (code := source.read_text("utf-8")).index("/* dropout(x) of")
print(code[start : code.index("\n}\n", start) + 2])

# %% [markdown]
# `draw` makes the bits from a seed and the block's number `b` alone (Salmon et al. 2011). So the backward pass draws the *same* bits again, and nothing is kept. `gate` and `more` are for ReLU and the residual; here they are null. `PARALLEL` lets threads share the blocks. `SIMD` lets the processor compute 8 or 16 numbers at once.
#
# A C function is a call away: compile the file, load it, pass addresses.


# %%
def dropout_in_c(library: ctypes.CDLL, x: Tensor, p: float) -> Tensor:
    """Dropout of x (float32) by `drop`, on one thread."""
    seed, out = int(torch.randint(2**63 - 1, ())), torch.empty_like(x)
    mask = np.array((seed, round(p * DRAWS), keep_scale(p)), "i8, i8, f4").ctypes  # C's struct
    half, null, threads = False, None, 1  # 32 bits; neither `more` nor `gate`
    library.drop.argtypes = [ctypes.c_void_p] * 9  # addresses, and integers of 64 bits
    library.drop(x.data_ptr(), half, x.numel(), null, null, mask, out.data_ptr(), half, threads)
    return out


# %%
with tempfile.TemporaryDirectory() as folder:
    command = f"cc -O3 -march=native -fno-math-errno -fopenmp-simd -shared -fPIC -o {folder}/c.so"
    built = subprocess.run(f"{command} '{source}' -lm", shell=True, capture_output=True)
    library = None if built.returncode else ctypes.CDLL(f"{folder}/c.so")
if library:
    x, drop = torch.randn(1024, 512), BitDropout(0.1)
    out = dropout_in_c(library, x, 0.1)
    torch.testing.assert_close(out, torch.where(out == 0, 0.0, x * keep_scale(0.1)))
    assert abs((out == 0).double().mean() - 0.1) < 0.005
    show(duel(lambda: drop(x), lambda: dropout_in_c(library, x, 0.1), 20), "dropout, in C", 1.2)
else:
    print("duel: skipped, as there is no C compiler")
added.loc[["C"]]

# %% [markdown]
# The fast path has C loops for LayerNorm, the loss's softmax and attention, too. Tests hold its outputs and gradients equal to the textbook's.
#
# ## From the other end
#
# > **In short.** What a trick gains depends on the tricks that are there already.
#
# Now take one stair out of the finished program. How many times as long does a step take? This [older race](../results/speed-steps.json) is by the clock, with two threads, in a fixed order: its control is 0.98. For *fused parts* we put back chapter 4's LayerNorm only, not its Adam. **Predict.** Is *dropout from 16 bits* worth more at this end?

# %%
staircase.both_ends(added, steps := load_record("speed-steps"))

# %% [markdown]
# It is worth more. The record has the finished program in 32 bits, too, where a step takes twice as long. **Predict.** Of which step does the stair save more milliseconds?

# %%
staircase.savings(steps, "dropout from 16 bits")

# %% [markdown]
# It saves nearly the same of both. **The shorter the step, the larger the factor.**
#
# **A stair carries what stands on it.** C's dropout works on these bits: without them it is off, too, and the factor counts both. Likewise C's LayerNorm needs *fused parts*, its softmax the chunks, its attention the rows.
#
# **Against others.** An [older race](../results/speed-peers.json) has three libraries' models, all in 16 bits, memory kept. A step of x-transformers takes 1.8 times as long as ours, Hugging Face's MarianMTModel's 1.9, PyTorch's `nn.Transformer`'s 2.0 and the textbook's 2.2, with 2.2 to 2.6 times the memory. Ours alone has the fused Adam; x-transformers drops out in fewer places.
#
# ## A GPU
#
# > **In short.** A GPU finishes one small task before Python asks for the next. So ask less often.
#
# On a GPU the CPU *launches* each kernel, and for a small model the launch takes longer than the kernel. On an H200 we timed the same model's step in five stages: `python -m scripts.studies.waterfall small`. New are:
#
# - **Fused parts, nothing waits.** LayerNorm, Adam and attention are PyTorch's fused ones. Python never reads a number from the GPU: the CPU would have to wait for it.
# - **Few shapes.** The corpus lies on the GPU. Each pair goes into the narrowest of eight widths that fits, [chosen](../scripts/core/static.py) so that padding is least.
# - **Recorded.** A whole [step](../scripts/core/steps.py) is recorded once for each shape, and then launched at once: a **CUDA graph**.
#
# **Predict.** Which stage gains most?

# %%
stages = staircase.stages_table(load_record("gpu-waterfall-small")["stages"])
stages

# %% [markdown]
# A factor is the median of five rounds' ratios to the stage before, so it isn't quite the quotient of two times. The recording brings 9, and takes nearly twice the memory ([record](../results/gpu-waterfall-small.json)). *Few shapes* gains in some rounds and loses in others; 16 bits lose in all.

# %%
staircase.launches_chart(stages)

# %% [markdown]
# ## To 40 BLEU
#
# From nothing to a translator on two cores: tokenizer, training and validation, with three seeds. Can you be faster ([rules and recipe](../docs/speedrun.md))?

# %%
for run in load_record("speedrun-cpu-1")["runs"]:
    print(f"{run['seconds']:.0f} seconds, {run['epochs']} epochs, BLEU {run['test_bleu']:.1f}")

# %% [markdown]
# ## Summary
#
# - A trick counts if it computes the same numbers, up to rounding, and if its ratios lie beyond the control's.
# - Begin with what costs few lines: padding, 16 bits, fused parts. Then sort, in 26. A thousand more lines bring about 1.4.
# - Ask what a fused operation does with *your* settings: on a CPU dropout rules out PyTorch's fast attention.
# - A trick's factor depends on how long the rest takes, and on what stands on it.
# - On a GPU a small model waits for launches: a recording is worth nine times.
#
# **What the paper did that we don't.** It took 25,000 tokens a side for a batch (§5.1), on eight GPUs (§5.2).
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Attention without spreading
#
# *code · difficulty ●●○ · worth ●●○ · 15 minutes*
#
# Some kernels for attention never spread rows, nor compute a score that no sentence needs. Write `packed_attention(q, k, v, lengths, causal)` for one head: `q`, `k`, `v` (N, d) with N the sum of `lengths`, to (N, d). Each row sees its own sentence; with `causal`, only itself and what comes before it there. (`solution("packed_attention")` shows ours.)


# %%
def packed_attention(q, k, v, lengths: list[int], causal: bool) -> Tensor: ...


check(packed_attention)

# %% [markdown]
# ### Exercise 2 · What would you ask to see?
#
# *think · difficulty ●○○ · worth ●●○ · 5 minutes*
#
# A friend's `duel` always runs `before` first, and finds a trick that is worth 1.02. What would you ask to see?
#
# <details><summary>Answer</summary>
#
# The control: a program against itself, in the same order. In the race of *From the other end* all five of its ratios were below 1, by 1 to 4%.
#
# </details>
#
# Next: [Chapter 13 · Decoding fast](ch13_decoding_fast.ipynb)
