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
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts import Late
from scripts.book.exercises import check
from scripts.book.figures import staircase
from scripts.book.instruments import new_pages
from scripts.book.records import load_record
from scripts.ch01_attention import attention
from scripts.ch04_encoder_decoder import EncoderDecoder, LayerNorm, make_model
from scripts.ch06_training import BOS, EOS, PAD, Batch, LabelSmoothing, batch_loss
from scripts.ch07_multi30k import Example, make_batch, token_batches
from scripts.core.settings import multiplies_bf16

# %%
torch.set_num_threads(1)
bf16 = multiplies_bf16(torch.device("cpu"))  # has this processor products of 16-bit numbers?
COMPILED = Late("scripts.fast.compiled")  # imported at first use: its package imports this

# %% [markdown]
# ## Two programs in turn
#
# > **In short.** "Faster" is a ratio of two programs' times, taken in turns. A program that races itself shows what chance does to the ratio.
#
# A *duel* times two programs that compute the same numbers. In each round both run once, and only the ratio of their times counts: a slow machine stretches both. We count the processor's seconds (`time.process_time`), without other programs'.
#
# **Your turn.** Write `duel`. Both run once to warm up. Then `before` begins the first round, `after` the second, and so on: whoever runs first leaves data in the cache.


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


def count_up(name: str, size: int) -> None:
    turns.append(name)
    sum(range(size))


ratios = duel(partial(count_up, "b", 400_000), partial(count_up, "a", 100_000), rounds=3)
assert "".join(turns) == "ba" + "ba" + "ab" + "ba" and len(ratios) == 3  # warm-up, then rounds
assert 1.5 < np.median(ratios) < 10, "four times the work"

# %% [markdown]
# The programs train chapter 4's model, one layer on each side, on 96 made-up pairs. A *lap* takes a step on each batch.


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


def make_lap(batches, model=None, half=False, fused=None) -> Callable[[], None]:
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
# First the **control**: a program races itself. A median far from 1 would mean that `duel` favours one side. **Predict.** How far from 1 are the ratios?


# %%
def show(ratios: list[float], what: str, at_least: float = 0.0) -> None:
    """Print a duel's median and range, and whether a gain is seen; check the median."""
    middle, low, high = np.median(ratios), min(ratios), max(ratios)
    seen = "" if low > max(control) else ", no gain seen"
    print(f"duel: {middle:.2f} times as fast ({low:.2f} to {high:.2f}{seen}): {what}")
    assert middle > at_least, "slower than any of our machines: does something else run?"


rng = random.Random(0)
pairs = [random_pair(rng) for _ in range(96)]
to_longest = [make_batch(pairs[i : i + 32]) for i in (0, 32, 64)]
lap = make_lap(to_longest[:1])
show(control := duel(lap, lap), "the same again", at_least=0.8)

# %% [markdown]
# What a program gains over itself is chance. So a gain is *seen* only if all its ratios exceed all of these.
#
# ## The staircase
#
# > **In short.** A trick gains speed and costs lines of code. The first 55 lines gain far more than the next 950.
#
# Each stair adds one trick to the program below it:
#
# | stair | the trick |
# |---|---|
# | padded to the longest | a batch is as wide as its longest sentence, not 72 tokens |
# | sorted by length | a batch has sentences of similar length |
# | autocast | 16-bit numbers in products |
# | memory kept | freed memory isn't given back |
# | fused parts | LayerNorm and Adam in one loop each |
# | dropout from 16 bits | fewer random bits |
# | loss in chunks | the logits are never all in memory |
# | rows | no padding outside attention |
# | products by hand | 16 bits between products, too |
# | C, and what calls it | loops of our own for small operations |
#
# We raced them at *full size*: chapter 9's model on Multi30k, on one thread ([record](../results/speed-stairs.json)). **Predict.** Which three stairs gain most?

# %%
staircase.lines_chart(stairs := load_record("speed-stairs"))

# %% [markdown]
# The table compares each stair with the one below it: median and range of seven rounds. In the last row the finished program races itself: the control of these duels.

# %%
staircase.stairs_table(stairs)

# %% [markdown]
# Padding to the longest, 16 bits and sorting gain most. Where the table says *no*, chance alone could do as much.
#
# From *fused parts* on, the race ran our library's versions of the tricks (`scripts/fast`). All other lines of these files count in the last stair; 339 of them are C.
#
# ## Padding
#
# > **In short.** The cheapest product is the one that isn't computed.
#
# The Annotated Transformer pads each sentence to a fixed width, 72 tokens. The model computes padding like words, and throws the results away. At fixed weights a stair must not change the loss of all pairs, nor its gradient. We first compare this loss and the gradient's norm.


# %%
def loss_and_norm(model: nn.Module, batches: list[Batch]) -> list[float]:
    """All batches' loss, and its gradient's norm, without dropout: what must stay the same."""
    loss = sum(batch_loss(model.eval(), batch, LabelSmoothing())[0] for batch in batches)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)  # clips nothing
    return [loss.item(), norm.item()]


# %%
def widened(ids: Tensor, width: int) -> Tensor:
    return F.pad(ids, (0, width - ids.size(1)), value=PAD)


to_72 = [Batch(widened(b.src, 72), widened(b.full, 73)) for b in to_longest]  # targets lose a token
by_length = [make_batch([pairs[i] for i in ids]) for ids in token_batches(pairs, 700, rng)]
sums = [loss_and_norm(live_model(), batches) for batches in (to_longest, to_72, by_length)]
assert np.allclose(sums, expected := sums[0], rtol=1e-5)

# %%
show(duel(make_lap(to_72), make_lap(to_longest), 3), "padded to the longest", at_least=1.5)
show(duel(make_lap(to_longest), make_lap(by_length), 4), "sorted by length", at_least=1.1)

# %% [markdown]
# Loss and norm stay, and both stairs make a lap much faster. At full size padding fell from 78% of a batch to 45%, and sorting left 1% (the same record). Real tokens explain 2.6 and 1.8 of the two gains. Attention's work grows with the square of the width, which may be the rest of the first. Sorting keeps the sum over all pairs, not each step's gradient: one step now sees short sentences, another long ones.
#
# ## One line: 16 bits
#
# > **In short.** Our processor multiplies 16-bit numbers about twice as fast as 32-bit ones. Weights and Adam stay in 32 bits.
#
# A bfloat16, or *bf16*, is the first half of a float32: it has the same range, but 8 binary digits instead of 24. `torch.autocast` rounds both factors of a product to bf16, and its result. The sums inside a product, LayerNorm and the loss are computed in 32 bits (Micikevicius et al. 2018); attention's softmax is not, on a CPU. So the numbers are the same only up to rounding. Most GPUs and some CPUs (AVX512-BF16, AMX) have such products.

# %%
with torch.autocast("cpu", torch.bfloat16):
    assert np.allclose(loss_and_norm(live_model(), by_length), expected, rtol=0.01)
what, at_least = ("autocast", 1.1) if bf16 else ("skipped: no 16-bit products here", 0.8)
show(duel(make_lap(by_length), make_lap(by_length, half=bf16)), what, at_least)

# %% [markdown]
# Do 16 bits learn as well? In two pairs of trainings with our own 16-bit step the loss was as low, and BLEU on the test of 2016 0.3 and 0.4 lower ([record](../results/precision-multi30k.json), [earlier](../results/archive/precision-multi30k-earlier.json)). Two pairs can't tell this from chance.
#
# ## One call: keep memory
#
# > **In short.** The C library gives a large freed tensor's memory back to the operating system. The next tensor gets new pages, which the system clears first.
#
# In chapter 11 new pages took most of the loss's time. What do they cost a whole step? glibc, the C library of most Linux systems, can keep freed memory. Its usual limit rises to 32 MiB as a program runs; larger tensors are always given back (`USUAL`). So we make a batch of 40 pairs, whose logits, as 32-bit numbers, are larger.
#
# The settings hold for the whole process. So each program takes four laps: only the first pays for what the other gave back. If the pages go and the time stays, pages cost little.


# %%
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -2, -3, -4, -8  # malloc.h
KEPT = {MMAP_MAX: 0, TRIM_THRESHOLD: -1, TOP_PAD: 2**26, ARENA_MAX: 1}
USUAL = {MMAP_MAX: 2**16, TRIM_THRESHOLD: 2**26, MMAP_THRESHOLD: 2**25, TOP_PAD: 2**17}


def keep_memory(settings: dict[int, int] = KEPT) -> bool:
    """Have the C library keep freed memory for the next tensor. False if it isn't glibc."""
    is_glibc = platform.libc_ver()[0] == "glibc"
    return is_glibc and all([ctypes.CDLL(None).mallopt(*pair) == 1 for pair in settings.items()])


# %%
lap = make_lap([make_batch(pairs[:40])], half=bf16)


def four_laps(settings: dict[int, int]) -> None:
    keep_memory(settings)
    for _ in range(4):
        lap()


as_usual, with_memory_kept = partial(four_laps, USUAL), partial(four_laps, KEPT)
show(duel(as_usual, with_memory_kept, rounds=3), "memory kept", at_least=0.8)
pages = {"memory kept": new_pages(with_memory_kept), "as usual": new_pages(as_usual)}
print(f"duel: new pages in four laps: {pages}")
assert not keep_memory() or pages["memory kept"] < pages["as usual"] / 2  # and memory stays kept

# %% [markdown]
# With memory kept the new pages go, and the laps are faster. The price: at full size the textbook's process takes 15% more memory ([record](../results/speed-peers.json)).
#
# ## PyTorch's fused parts
#
# > **In short.** A *kernel* is one compiled loop over a tensor. Each reads and writes its numbers; a *fused* kernel does several kernels' work in one pass.
#
# Five kernels of chapter 4's LayerNorm pass over the whole tensor, one of them slowly (`var_mean`, chapter 11). `F.layer_norm` is one kernel. `Adam(fused=True)` updates all weights in one pass.


# %%
def become(model: nn.Module, old: type, new: type) -> nn.Module:
    """`model`, whose parts of class `old` compute as `new` from now on; the weights stay."""
    for part in model.modules():
        if type(part) is old:
            part.__class__ = new  # the same weights, another forward
    return model


class FusedNorm(LayerNorm):
    """Chapter 4's LayerNorm in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


# %%
def fused_model() -> EncoderDecoder:
    return become(live_model(), LayerNorm, FusedNorm)


assert np.allclose(loss_and_norm(fused_model(), by_length), expected, rtol=1e-5)
with_fused = make_lap(by_length, fused_model(), half=bf16, fused=True)
show(duel(make_lap(by_length, half=bf16), with_fused, 10), "fused parts")

# %% [markdown]
# Attention has a fused form: `F.scaled_dot_product_attention`. On a GPU it can be FlashAttention (Dao et al. 2022). **Predict.** What does it gain here, without dropout and with it?


# %%
qkv = torch.randn(3, 64, 4, 16, 32, requires_grad=True)  # each (B, H, T, d_k)


def attention_by_parts(p: float) -> None:
    attention(*qkv, dropout=partial(F.dropout, p=p))[0].sum().backward()


def fused_attention(p: float) -> None:
    F.scaled_dot_product_attention(*qkv, dropout_p=p).sum().backward()


for p in (0.0, 0.1):
    ratios = duel(partial(attention_by_parts, p), partial(fused_attention, p), 20)
    show(ratios, f"attention alone, dropout {p}")

# %% [markdown]
# Without dropout it is faster. With dropout it gains nothing: PyTorch's fused kernel for CPUs has none, so plain operations run. We train with dropout, so here it is a **dead end**.
#
# ## `torch.compile`
#
# > **In short.** PyTorch's compiler fuses small operations, in one line. Which gain, only a race can tell.
#
# `torch.compile(f)` records the operations of `f`, then writes and compiles C++ that does them in few passes. A whole step compiles long, so here are three pieces. **Predict.** Which gains most: chapter 4's LayerNorm with ReLU, PyTorch's, or dropout?

# %%
norm, x = LayerNorm(512).requires_grad_(False), torch.randn(1024, 512)
pieces = {"LayerNorm and ReLU": lambda: norm(x).relu(), "dropout": lambda: F.dropout(x, 0.1)}
pieces["F.layer_norm and ReLU"] = lambda: F.layer_norm(x, x.shape[-1:]).relu()
if shutil.which("g++"):  # which the compiler needs
    for name, piece in pieces.items():
        show(duel(piece, torch.compile(piece), 20), f"{name}, compiled")

# %% [markdown]
# LayerNorm and ReLU become one kernel, many times as fast. Most of this is `var_mean`: beside PyTorch's norm, which avoids it, too, the compiler gains far less. Dropout gets *slower*: the C++ makes its random numbers one at a time.
#
# ## What dropout costs
#
# > **In short.** Dropout needs only a yes or a no for each number: 16 random bits are enough.
#
# `random_`, from −2⁶³ without an upper end, makes 64 bits at once. We cut them into four numbers of 16. An entry is dropped if its number is among the $p\cdot 65{,}536$ lowest, rounded.


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
show(duel(partial(drop, x), partial(from_bits, x), 20), "dropout alone, from 16 bits")
with_bits = make_lap(by_length, become(fused_model(), nn.Dropout, BitDropout), bf16, fused=True)
show(duel(with_fused, with_bits, 10), "dropout from 16 bits")

# %% [markdown]
# Dropout alone becomes several times as fast: most of its time went into random numbers. A small step gains little by it; at full size it was 1.13.
#
# ## Memory: a loss that never holds all logits
#
# > **In short.** The logits are the largest tensor of a step. Make a few rows of them at a time, and overwrite them.
#
# With logits $z = XW^\top + b$ the gradients of the smoothed loss (chapter 6) are:
#
# $$ \frac{\partial\ell}{\partial z} = P - Y,\qquad \frac{\partial\ell}{\partial X} = (P - Y)\,W,\qquad \frac{\partial\ell}{\partial W} = (P - Y)^\top X $$
#
# with $P = \mathrm{softmax}(z)$ and $Y = (1-\varepsilon)\,\mathrm{onehot}(y) + \varepsilon/V$. Each row of $P - Y$ needs its own logits alone. So a loop makes `chunk` rows of logits at a time, overwrites them with $P - Y$, and adds the two products to the gradients.
#
# A `Function` is an operation whose backward pass we write ourselves. Its `ctx` keeps what that pass needs: the finished gradients.
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
            logits = F.linear(rows, weight, bias).to(weight.dtype)  # z (n, V), for sums in 32 bits
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
shapes, labels = ((7, 4), (11, 4), (11,)), torch.tensor([3, 1, PAD, 2, 5, 10, 9])
leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
real = labels != PAD

in_chunks = lambda x, w, b: LinearCrossEntropy.apply(x[real], w, b, labels[real], 0.1, 3)  # noqa: E731
torch.testing.assert_close(in_chunks(*leaves), LabelSmoothing(0.1)(F.linear(*leaves), labels))
assert torch.autograd.gradcheck(lambda *leaves: in_chunks(*leaves)[0], leaves)  # chapter 1

# %% [markdown]
# Every label counts, so padding must be taken out before. We measure the memory of 1,024 rows, forward and backward. **Predict.** How many tensors of the logits' size does the textbook's loss hold at once?

# %%
# NBVAL_IGNORE_OUTPUT
x, labels = torch.randn(1024, 128, requires_grad=True), torch.arange(1, 1025)
proj = live_model().generator.proj
library_loss = partial(F.cross_entropy, label_smoothing=0.1, reduction="sum")
losses = {
    "textbook": lambda: LabelSmoothing()(proj(x), labels)[0],
    "F.cross_entropy": lambda: library_loss(proj(x), labels),
    "loss in chunks": lambda: LinearCrossEntropy.apply(x, *proj.parameters(), labels, 0.1, 256)[0],
}
staircase.memory_chart(losses, logits=1024 * VOCAB * 4)

# %%
backward = lambda name: losses[name]().backward()  # noqa: E731
for name in ("F.cross_entropy", "loss in chunks"):
    torch.testing.assert_close(losses[name](), losses["textbook"](), rtol=1e-5, atol=0.0)
    show(duel(partial(backward, "textbook"), partial(backward, name), rounds=4), f"{name}, alone")
with torch.autocast("cpu", torch.bfloat16):
    in_16_bits = losses["loss in chunks"](), losses["textbook"]()
torch.testing.assert_close(*in_16_bits, rtol=1e-4, atol=0.0)

# %% [markdown]
# The textbook's loss holds five, PyTorch's three: it is one line, and the faster here. Chunks hold less than one. They buy memory: without them the finished program takes 1.8 times as much ([record](../results/speed-steps.json), 16 bits).
#
# ## Rows instead of rectangles
#
# > **In short.** Only attention and positions need to know where a sentence begins. All other layers can take a list of real tokens, without padding.
#
# Where batches can't be sorted, they keep their padding. So a batch becomes rows (N, D), one for each real token. Attention spreads them into a rectangle, and gathers them again.
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
show(ratios, f"a feed-forward layer alone, by rows; {1 - real.double().mean():.0%} was padding")

# %% [markdown]
# This batch isn't sorted, so rows gain much. At full size 1% was padding, and no gain was seen. Nor was one for *products by hand*: `LinearProduct` in [`scripts/fast`](../scripts/fast/fast.py) keeps rows in 16 bits where autocast converts back and forth.
#
# ## Last, C
#
# > **In short.** Where no library has the loop that you need, write it. It takes the most code for its gain, so it comes last.
#
# `BitDropout` makes bits, compares, converts and multiplies twice: five passes, and a mask kept for the backward pass. A loop of our own needs one pass and no mask ([`passes.c`](../scripts/fast/passes.c)):

# %%
print(COMPILED.source("passes", "drop"))

# %% [markdown]
# `draw` makes the bits from a seed and the block's number `b` alone (Salmon et al. 2011). So the backward pass draws the *same* bits again, and only the seed is kept. `gate` and `more`, for ReLU and the residual, are null here. `PARALLEL` shares the blocks among threads, `SIMD` computes 8 or 16 numbers at once.
#
# [`compiled.call`](../scripts/fast/compiled.py) compiles the file, loads it, and hands C the tensors' addresses.


# %%
class DropoutMask(ctypes.Structure):
    """C's struct `Dropout`: which bits are drawn, and how many of the 65,536 values say no."""

    _fields_ = [("seed", ctypes.c_uint64), ("limit", ctypes.c_int64), ("scale", ctypes.c_float)]


def drop_in_c(x: Tensor, mask: DropoutMask) -> Tensor:
    """Dropout of x (float32) by C's `drop`, on one thread."""
    x, gate, more, half, threads = x.contiguous(), None, None, False, 1
    out = torch.empty_like(x)
    COMPILED.call("passes", "drop", x, half, x.numel(), more, gate, mask, out, half, threads)
    return out


class SeededDropout(torch.autograd.Function):
    """Dropout that keeps a seed instead of a mask."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:
        ctx.mask = DropoutMask(int(torch.randint(2**63 - 1, ())), round(p * DRAWS), keep_scale(p))
        return drop_in_c(x, ctx.mask)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return drop_in_c(grad, ctx.mask), None


# %%
x, drop = torch.randn(1024, 512, requires_grad=True), BitDropout(0.1)
if COMPILED.loaded("passes"):
    out = SeededDropout.apply(x, 0.1)
    torch.testing.assert_close(out, torch.where(out == 0, 0.0, x * keep_scale(0.1)))
    assert abs((out == 0).double().mean() - 0.1) < 0.005
    out.backward(x.detach())  # a gradient as large as x, through the same mask
    assert x.grad.equal(out)
    show(duel(lambda: drop(x), lambda: SeededDropout.apply(x, 0.1), 20), "dropout, in C", 1.2)
else:
    print("duel: skipped, as there is no C compiler")

# %% [markdown]
# The fast path has such loops for LayerNorm, softmax and attention, too. Tests hold its outputs and gradients equal to the textbook's.
#
# ## A factor isn't the trick's own
#
# > **In short.** "How many times as fast?" asks about a trick *and* a program.
#
# Another race took one trick at a time out of the finished program, with two threads, in 32 bits and in 16 ([record](../results/speed-steps.json)). If a factor were the trick's own, both would find the same. In 16 bits the step takes half as long. **Predict.** Which factors grow there, and which shrink? (*ms*: milliseconds saved. In C's place run PyTorch's dropout and attention, and chapter 4's LayerNorm.)

# %%
staircase.savings(load_record("speed-steps"))

# %% [markdown]
# (C's attention needs rows, so without rows neither runs. In 16 bits the control itself leans by 2%.) **Where a trick saves as much of a shorter step, its factor grows.** The first four do. **Where 16 bits do a trick's work, its factor shrinks.** oneDNN is a library whose 32-bit products are faster here than PyTorch's usual ones; for 16 bits PyTorch takes it anyway.
#
# ### Against others
#
# We raced the textbook's step and those of three libraries' models against ours: the same size and batches, 16 bits, two threads ([record](../results/speed-peers.json), [compiled](../results/speed-compiled.json)). In multiples of ours:

# %%
staircase.peers_table(load_record("speed-peers"), load_record("speed-compiled"))

# %% [markdown]
# Ours is the fastest. `torch.compile` makes two of the four slower, and none faster. The next, x-transformers compiled, takes 1.7 times as long and 1.4 times the memory. Ours alone has the fused Adam, worth 1 to 3% against the control above.
#
# ## A GPU
#
# > **In short.** A GPU computes what a CPU asks for, kernel by kernel. In a small model the kernels are short.
#
# For each kernel the CPU runs Python, prepares its gradient, and *launches* it. On an H200 we timed the same model's step in five stages. New are:
#
# - **Fused parts, nothing waits.** LayerNorm, Adam and attention are PyTorch's fused ones. Python never waits for a number from the GPU.
# - **Few shapes.** The corpus lies on the GPU. Each pair is padded to the narrowest of eight widths that fits ([`static.py`](../scripts/core/static.py)).
# - **Recorded.** A whole [step](../scripts/core/steps.py) is recorded once for each shape, and then launched at once: a **CUDA graph**.
#
# **Predict.** Which stage gains most?

# %%
(stages := staircase.stages_table(load_record("gpu-waterfall-small")["stages"]))

# %% [markdown]
# The recording makes a step nine times as fast: the CPU's work for a kernel takes longer than the kernel. It takes nearly twice the memory ([record](../results/gpu-waterfall-small.json)). 16 bits gain nothing.

# %%
staircase.launches_chart(stages)

# %% [markdown]
# ## To 40 BLEU
#
# From nothing to a translator on two cores: tokenizer, training and validation, with three seeds. The recipe has a narrower model, and [Muon](ch10_judging.ipynb) for Adam. Can you be faster ([rules and recipe](../docs/speedrun.md))?

# %%
for run in load_record("speedrun-cpu-1")["runs"]:
    print(f"{run['seconds']:.0f} seconds, {run['epochs']} epochs, BLEU {run['test_bleu']:.1f}")

# %% [markdown]
# ## Summary
#
# - A trick counts if it computes the same numbers, up to rounding, and its ratios lie beyond the control's.
# - Begin with what costs few lines: padding, 16 bits, kept memory, fused parts, sorting, dropout from 16 bits. 55 lines make a step 15 times as fast, the next 950 only 1.4 times.
# - Ask what a fused operation does with *your* settings: on a CPU dropout rules out PyTorch's fast attention.
# - On a GPU a small model waits for launches: recording a step makes it nine times as fast.
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
# The control: a program against itself, in the same order. If it finds 1.02, too, that is the order's. Alternate, or swap the two and race again.
#
# </details>
#
# Next: [Chapter 13 · Decoding fast](ch13_decoding_fast.ipynb)
