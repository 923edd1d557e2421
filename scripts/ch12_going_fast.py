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
# After this chapter you can make a training step faster, show that it still computes the same numbers, and say what each trick is worth and how sure you are.
#
# | | |
# |---|---|
# | In the paper | §5.1, §5.2, Table 2 |
# | Time | 20 minutes to read, 45 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 11 · Where the time goes](ch11_where_the_time_goes.ipynb) · [Chapter 13 · Decoding fast](ch13_decoding_fast.ipynb) |
#
# *If you read only three cells:* the class `LinearProduct`, the class `LinearCrossEntropy`, the chart of *What each part is worth*.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary; **F** the feed-forward layer's width, **N** rows, one for each real token.

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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function, gradcheck
from torch.autograd.function import once_differentiable

from scripts.book.exercises import check
from scripts.book.figures.speed import duel_frame, race_frame, switches_chart
from scripts.book.instruments import saved_bytes
from scripts.book.records import load_record
from scripts.ch04_encoder_decoder import LayerNorm
from scripts.ch06_training import LabelSmoothing
from scripts.ch11_where_the_time_goes import SMALL, affine

# %%
torch.set_default_dtype(torch.float64)  # so that "the same numbers" means to ten digits

# %% [markdown]
# ## The rules of the game
#
# > **In short.** A faster step must be the same step: the same weights, outputs and gradients. "Faster" is a ratio of two programs' times, measured in turns.
#
# Each trick is a switch of [`scripts/fast/fast.py`](../scripts/fast/fast.py), which is made of this chapter's pieces. For each switch, tests check that outputs and gradients equal the textbook's. (In 16 bits, as bfloat16 or *bf16*, they are held to a bound. Dropout draws other masks, so outputs are compared without it.) A *kernel* is one compiled loop that does a whole operation.
#
# What each is worth is recorded in `results/speed-steps.json`, for one machine and chapter 9's model. **Predict.** Our program was timed in many rounds on this machine. How far apart are the slowest and the fastest?

# %%
record = load_record("speed-steps")
found = record["reports"]["ours"]
print(f"{found['lowest']:,.0f} to {found['highest']:,.0f} target tokens a second")

# %% [markdown]
# They differ by a tenth. So in a *duel* two programs take steps in turn, and in each of five rounds only the ratio of their times counts: a slow moment hits both. Ours races itself *without* one part, and also itself as it is. This last duel, the **control**, shows what chance does, and gives a rule for the others:
#
# - **clear**: every round's ratio is beyond all of the control's. Between equal programs the chance of that is $2/\binom{10}{5} = 1/126$.
# - **likely**: all five are on one side of 1. If order plays no part, chance does that once in 16 times, so one of 20 may well be luck.
# - **can't tell**: everything else.


# %%
def how_sure(rounds: Sequence[float], control: Sequence[float]) -> str:
    """What the ratios of a duel can say, beside those of two programs that are the same."""
    if min(rounds) > max(control) or max(rounds) < min(control):
        return "clear"
    return "likely" if min(rounds) > 1 or max(rounds) < 1 else "can't tell"


# %%
both = {"float32": record["reports"], "bf16": record["half"]["reports"]}
for precision, reports in both.items():
    print(precision, *(f"{ratio:.2f}" for ratio in reports["ours again"]["rounds"]))

# %% [markdown]
# The ratios of equal programs differ by 2 to 3%. In bf16 all five are below 1: the first in turn may be a little faster there.
#
# ## Rows instead of rectangles
#
# > **In short.** Only attention needs to know which tokens form a sentence. Give everything else a plain list of tokens, and padding is gone.
#
# Chapter 7's buckets leave some padding. So a batch becomes rows (N, D), one for each real token. Attention spreads them into a rectangle, and gathers them again.


# %%
class Layout:
    """Which cells of a padded rectangle (B, T) have rows: with `packed` the real ones, else all.

    `slots` (N,) is each row's cell, b·T + t, in reading order; `positions` (N,) its t.
    """

    def __init__(self, real: Tensor, packed: bool):
        self.shape = real.shape
        self.full = not packed or bool(real.all())
        cells = torch.arange(real.numel(), device=real.device)
        self.slots = cells if self.full else cells[real.flatten()]
        self.positions = self.slots % real.size(1)
        self.real = None if packed and self.full else real  # without padding, nothing is hidden

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores so that padding keys get no weight: (B, 1, 1, T)."""
        if self.real is None:
            return None
        return torch.where(self.real, 0.0, -math.inf).to(dtype)[:, None, None, :]

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
real = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()  # (B, T): lengths 2, 1 and 3
layout = Layout(real, packed=True)
print("cells:", layout.slots.tolist(), " places:", layout.positions.tolist())
x = torch.randn(6, 4)  # rows (N, D)
torch.testing.assert_close(layout.gather(layout.spread(x)), x)  # there and back

# %%
duels = duel_frame(both, how_sure)
duels.loc["rows"]

# %% [markdown]
# The first column is the median ratio. Each line compares the finished program, including the C code below, with the same without this part. (Without rows attention also takes a slower path, which flatters this line.)
#
# ## One kernel for LayerNorm
#
# > **In short.** Five operations that each pass over the tensor cost more than four times the traffic of one.
#
# Chapter 4's LayerNorm reads the tensor five times (mean and variance, a difference, two products, a sum) and writes it four times. `F.layer_norm` does it all while a row is in the cache.

# %%
torch.manual_seed(0)
norm = LayerNorm(16)
norm.load_state_dict({"weight": torch.linspace(0.5, 2, 16), "bias": torch.linspace(-1, 1, 16)})
x = torch.randn(5, 16)  # (N, D)
fused = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
torch.testing.assert_close(fused, norm(x), rtol=1e-12, atol=1e-12)
duels.loc["LayerNorm in one kernel"]

# %% [markdown]
# ## Products by another library
#
# > **In short.** Several libraries multiply matrices: ask which is faster *here*.
#
# On x86 `F.linear` uses MKL for float32; chapter 11's `affine` reaches oneDNN.
#
# A `Function` is an operation whose backward pass we write ourselves. `forward` keeps in `ctx` what will be needed. `backward` gets the gradient of the result and returns one for each argument: `None` for flags.


# %%
class LinearProduct(Function):
    """`F.linear` in the dtype of x, by oneDNN if asked; weights and their gradients keep theirs."""

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
        """Gradients with respect to x, weight and bias."""
        x, weight = ctx.saved_tensors
        by_x = affine(grad, weight.T, None, ctx.onednn)  # grad·W: affine transposes
        # The same product either way; it is quicker with the wider factor in front.
        by_weight = (x.T @ grad).T if grad.size(1) < x.size(1) else grad.T @ x
        return by_x, by_weight.to(ctx.kind), grad.sum(0).to(ctx.kind), None


# %% [markdown]
# `gradcheck` (chapter 1) checks our formulas in float64; a test compares oneDNN's results in float32.

# %%
leaves = [torch.randn(*shape, requires_grad=True) for shape in ((7, 12), (20, 12), (20,))]
assert gradcheck(lambda *given: LinearProduct.apply(*given, True), leaves)

# %% [markdown]
# We also tried *joint projections*: Q, K and V in one `F.linear`.

# %%
duels.loc[["oneDNN's products", "joint projections"]]

# %% [markdown]
# Don't expect float32's 1.4 elsewhere: MKL is Intel's, and this processor AMD's. In bf16 PyTorch calls oneDNN itself. Joint projections aren't clear of the control, so we removed them.
#
# ## What dropout costs
#
# > **In short.** Dropout's arithmetic costs almost nothing. Its random numbers are the most expensive numbers of the step.
#
# **Predict.** The hidden rows of one feed-forward layer come from a product of a billion operations. How long does their dropout take, beside that product?

# %%
seconds = {operation["operation"]: operation["seconds"] for operation in record["operations"]}
for name in ("feed-forward, out", "dropout", "dropout, 16 bits"):
    print(f"{name}: {1000 * seconds[name]:.1f} ms")

# %% [markdown]
# Nearly twice as long. `F.dropout` draws a random number for each entry, but a mask needs only a yes or a no. We cut 64 random bits into four numbers of 16 (the third line): an entry is dropped if its number is below $p\cdot 65{,}536$, rounded.


# %%
DRAWS = 2**16  # the values of 16 random bits


def keep_mask(shape: torch.Size, p: float, like: Tensor) -> Tensor:
    """1 where an entry stays and 0 where dropout takes it: `shape`, in the dtype of `like`."""
    entries = math.prod(shape)
    seed = int(torch.randint(2**63 - 1, ()))  # from PyTorch's generator; NumPy's makes bits faster
    bits = np.random.SFC64(seed).random_raw(-(-entries // 4)).view(np.uint16)[:entries]
    return torch.from_numpy(bits >= round(p * DRAWS)).to(like.dtype).view(shape)


def keep_scale(p: float) -> float:
    """What the kept entries are multiplied by, so that the mean stays: 1/(1 − p), p as rounded."""
    return 1 / (1 - round(p * DRAWS) / DRAWS)


# %%
print(f"float32, no dropout: {record['reports']['no dropout at all']['times']:.2f} times as long")
duels.loc["dropout from 16 bits"]

# %% [markdown]
# Now a step without any dropout is hardly shorter (the first line).
#
# ## Attention by hand
#
# > **In short.** If you write attention's backward pass yourself, only five things are stored: Q, K, V, the weights and the mask.
#
# Shapes: $Q$, the result $O$ and its gradient $G = \partial\ell/\partial O$ (B·H, T, d_k); $K$, $V$ (B·H, S, d_k); $Z$, $A$, $M$ (B·H, T, S).
#
# With the scores $Z = QK^\top/\sqrt{d_k} + \text{bias}$, the weights $A = \mathrm{softmax}(Z)$, the dropout mask $M$ of zeros and ones, and $c = 1/(1-p)$:
#
# $$ O = c\,(A \odot M)\,V $$
#
# $$ \frac{\partial\ell}{\partial V} = c\,(A\odot M)^\top G,\qquad
#    \frac{\partial\ell}{\partial A} = c\,(G V^\top)\odot M,\qquad
#    \frac{\partial\ell}{\partial Z} = A\odot\Big(\frac{\partial\ell}{\partial A} - \sum_{s} A_{\cdot s}\,\frac{\partial\ell}{\partial A_{\cdot s}}\Big) $$
#
# $$ \frac{\partial\ell}{\partial Q} = \frac{1}{\sqrt{d_k}}\,\frac{\partial\ell}{\partial Z}\,K,\qquad
#    \frac{\partial\ell}{\partial K} = \frac{1}{\sqrt{d_k}}\,\Big(\frac{\partial\ell}{\partial Z}\Big)^{\!\top} Q $$
#
# The sum runs over a row of $A$.


# %%
def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a @ b, with the scale inside the product: (n, i, j), (n, j, k) to (n, i, k)."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)  # 0: unread


# %%
class AttentionCore(Function):
    """softmax(QKᵀ/√d_k + bias)·V (§3.2.1) with dropout on the weights, and its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float) -> Tensor:
        """q (B, H, T, d_k), k and v (B, H, S, d_k), bias broadcast to (B, H, T, S); to the shape of q."""
        B, H, T, d_k = q.shape
        ctx.p = p
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B·H, T or S, d_k), contiguous
        wide = torch.promote_types(q.dtype, torch.float32)  # softmax is for 32 bits and more
        weights = scaled_product(q, k.mT, d_k**-0.5).to(wide)  # (B·H, T, S)
        if bias is not None:
            weights.view(B, H, T, -1).add_(bias)
        torch.softmax(weights, dim=-1, out=weights)
        kept = keep_mask(weights.shape, p, q) if p else None
        ctx.save_for_backward(q, k, v, weights, kept)
        thinned = weights.to(q.dtype) if kept is None else weights.to(q.dtype) * kept
        return scaled_product(thinned, v, keep_scale(p)).unflatten(0, (B, H))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v, each of its own shape."""
        q, k, v, weights, kept = ctx.saved_tensors
        heads, grad, c = grad.shape[:2], grad.flatten(0, 1), keep_scale(ctx.p)  # grad (B·H, T, d_k)
        thinned = weights.to(q.dtype) if kept is None else weights.to(q.dtype) * kept
        by_v = scaled_product(thinned.mT, grad, c)
        by_weights = scaled_product(grad, v.mT, c)  # (B·H, T, S)
        if kept is not None:
            by_weights *= kept
        wide, scale = weights.dtype, q.size(-1) ** -0.5
        by_scores = torch._softmax_backward_data(by_weights.to(wide), weights, -1, wide)  # ∂ℓ/∂Z
        by_scores = by_scores.to(q.dtype)
        by_q, by_k = scaled_product(by_scores, k, scale), scaled_product(by_scores.mT, q, scale)
        return *(x.unflatten(0, heads) for x in (by_q, by_k, by_v)), None, None


# %%
torch.manual_seed(1)
q, k, v = (torch.randn(2, 2, n, 3, requires_grad=True) for n in (4, 5, 5))  # (B, H, T or S, d_k)
mask = torch.zeros(2, 1, 1, 5)
mask[0, ..., 3:] = -math.inf  # padding
pytorchs = F.scaled_dot_product_attention(q, k, v, mask)
torch.testing.assert_close(AttentionCore.apply(q, k, v, mask, 0.0), pytorchs)
for p in (0.0, 0.3):

    def core(*qkv: Tensor) -> Tensor:
        torch.manual_seed(0)  # gradcheck calls this many times, and needs the same mask each time
        return AttentionCore.apply(*qkv, mask, p)  # noqa: B023

    assert gradcheck(core, (q, k, v))
duels.loc["attention by hand"]

# %% [markdown]
# "Without it" is PyTorch's `F.scaled_dot_product_attention`. Its fast kernel for CPUs has no dropout, so plain operations take its place.
#
# ## A loss that never holds all logits
#
# > **In short.** The logits are the largest tensor of the step. Make a few rows at a time, and overwrite them.
#
# For 2,048 targets and 8,192 words the logits $z = XW^\top + b$ take 64 MiB. The gradients of the smoothed loss (chapter 6) are:
#
# $$ \frac{\partial\ell}{\partial z} = P - Y,\qquad \frac{\partial\ell}{\partial X} = (P - Y)\,W,\qquad \frac{\partial\ell}{\partial W} = (P - Y)^\top X $$
#
# with $P = \mathrm{softmax}(z)$ and $Y = (1-\varepsilon)\,\mathrm{onehot}(y) + \varepsilon/V$. Only $P$ is a full matrix (N, V). The labels are one entry a row, and $\varepsilon/V$ is the same everywhere: from each row of $\partial\ell/\partial X$ it subtracts $\varepsilon\,\bar w$, where $\bar w$ (D,) is the mean row of $W$. So a loop makes `chunk` rows of logits at a time, and does this to them:
#
# 1. overwrite them with $P$;
# 2. subtract $1-\varepsilon$ at each label;
# 3. take the two products.
#
# So the gradients are ready before the backward pass begins.


# %%
def probabilities_(logits: Tensor, wide: torch.dtype) -> Tensor:
    """Overwrite logits z (n, V) with their softmax; log Σ exp z of each row, (n, 1), in `wide`."""
    log_z = logits.to(wide).logsumexp(dim=1, keepdim=True)  # (n, 1)
    logits.copy_((logits - log_z).exp_())
    return log_z


# %%
class LinearCrossEntropy(Function):
    """The generator's product and the smoothed loss in one; gradients are made if `wanted`."""

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
        overwrite: Callable[..., Tensor] = probabilities_,
    ) -> tuple[Tensor, Tensor]:
        """x (N, D), weight (V, D), bias (V,), labels (N,); to the two sums of `LabelSmoothing`."""
        kind, certain = weight.dtype, 1 - smoothing
        factors, offset = weight.to(x.dtype), bias.to(x.dtype)
        mean_weight, mean_bias = weight.mean(0), bias.mean()  # the mean logit is x·w̄ + b̄
        nll, spread = weight.new_zeros(()), weight.new_zeros(())
        by_x, by_weight, by_bias = (torch.zeros_like(t, dtype=kind) for t in (x, weight, bias))
        chunks = (t.split(chunk) for t in (x, labels[:, None], by_x))
        for rows, label, by_rows in zip(*chunks, strict=True):
            logits = affine(rows, factors, offset, onednn)  # (n, V)
            right = logits.gather(1, label).to(kind)  # (n, 1)
            log_z = overwrite(logits, kind)  # (n, 1); the logits are P now
            nll += (log_z - right).sum()
            spread += (log_z.squeeze(1) - rows.to(kind) @ mean_weight - mean_bias).sum()
            if wanted:
                # Before the products: later it would be a small difference of two rounded numbers.
                at_label = ((right - log_z).exp() - certain).to(x.dtype)
                logits.scatter_(1, label, at_label)
                by_rows.copy_(affine(logits, factors.T, None, onednn))
                by_weight += logits.T @ rows
                by_bias += logits.sum(0)
        if wanted:  # and −ε/V in each entry of ∂ℓ/∂z
            by_x -= smoothing * mean_weight
            by_weight -= smoothing / len(weight) * x.sum(0, dtype=kind)
            by_bias -= smoothing / len(weight) * len(x)
            ctx.save_for_backward(by_x.to(x.dtype), by_weight, by_bias)
        ctx.mark_non_differentiable(nll)
        return certain * nll + smoothing * spread, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that `forward` stored, times the loss's own."""
        return *(stored * grad for stored in ctx.saved_tensors), *[None] * 6


# %%
torch.manual_seed(2)
leaves = [torch.randn(*shape, requires_grad=True) for shape in ((7, 4), (11, 4), (11,))]
labels, textbook = torch.randint(0, 11, (7,)), LabelSmoothing(0.1, padding_idx=-1)
chunked = lambda *w: LinearCrossEntropy.apply(*w, labels, 0.1, 3, False, True)  # noqa: E731
torch.testing.assert_close(chunked(*leaves), textbook(F.linear(*leaves), labels))
assert gradcheck(lambda *w: chunked(*w)[0], leaves)

# %% [markdown]
# **Predict.** For 2,048 rows and 8,192 columns in single precision: how much does the textbook's loss keep for the backward pass, and how much does ours?

# %%
proj, labels = nn.Linear(SMALL.d_model, SMALL.vocab, dtype=torch.float32), torch.arange(2048)
x = torch.randn(2048, SMALL.d_model, dtype=torch.float32, requires_grad=True)
given = (x, proj.weight, proj.bias, labels, 0.1, 512, False)
kept = {
    "textbook": saved_bytes(lambda: LabelSmoothing(0.1)(proj(x), labels)),
    "ours": saved_bytes(lambda: LinearCrossEntropy.apply(*given, True)),
}
print(*(f"{name}: {size / 2**20:.0f} MiB" for name, size in kept.items()), sep="\n")
for precision, reports in both.items():
    mib = [reports[name]["peak_bytes"] / 2**20 for name in ("ours", "without loss in chunks")]
    print(f"whole step in {precision}: {mib[0]:,.0f} MiB at most; {mib[1]:,.0f} without it")
duels.loc["loss in chunks"]

# %% [markdown]
# Both keep 10 MiB: the textbook keeps rows and weights, ours their gradients. The textbook also keeps the logits. The whole step saves more: in its backward pass the textbook's loss holds five tensors as large as the logits, 320 MiB.
#
# ## One pass, in C
#
# > **In short.** PyTorch's kernels run one after the other, and each reads and writes all numbers. A loop of our own does in one pass what several did.
#
# The C behind [`passes.py`](../scripts/fast/passes.py) has this chapter's formulas as loops over rows. A machine without a C compiler uses the code above. The C can do two things that PyTorch's operations can't:
#
# - **Dropout keeps no mask.** The backward pass draws the same bits again.
# - **Attention stays with its rows.** The numbers of one head of one sentence fit into the nearest cache. The backward pass computes the weights again.
#
# A generator without a state can draw the bits of any place again. Philox (Salmon et al. 2011) makes 128 bits from a *counter*, here the place of the number, and a *key*, the seed.


# %%
def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10: four words of 32 bits, from a counter of four and a key of two."""
    a, b, c, d = counter
    for i in range(10):
        first, second = key[0] + i * 0x9E3779B9, key[1] + i * 0xBB67AE85
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c  # 64 bits each
        words = (y >> 32) ^ b ^ first, y, (x >> 32) ^ d ^ second, x
        a, b, c, d = (word % 2**32 for word in words)
    return [a, b, c, d]


# %%
authors_answer = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
assert philox([0, 0, 0, 0], [0, 0]) == authors_answer
for place in ([0, 0, 0, 0], [1, 0, 0, 0]):  # neighbours, with nothing in common
    print(*(f"{word:08x}" for word in philox(place, [0, 0])))
duels.loc["small things in C"]

# %% [markdown]
# "Without it" is the code above, without the C.
#
# ## bfloat16
#
# > **In short.** On most of today's GPUs and a few CPUs, products of 16-bit numbers cost a fraction of those of 32-bit numbers. Use 16 bits for products only.
#
# bfloat16, or bf16, is the first half of a float32: the same range, but 8 binary digits instead of 24. A product rounds three times (both factors and the result) and sums in 32 bits. Everything else stays in 32 bits (Micikevicius et al. 2018; PyTorch's `autocast` does much the same).
#
# **Predict.** By the profiler, products are three quarters of our step in float32. In bf16 this machine does a large product at twice the rate. How many times as long does a step take in float32 as in bf16?

# %%
account = pd.DataFrame(record["accounts"])  # seconds of a step by kind, as in chapter 11
products = account.loc[["matrix products", "attention's products"]].sum() / account.sum()
peers = load_record("speed-peers")
gain, wide = peers["matrix_rate_bf16"] / peers["matrix_rate"], peers["reports"]["ours, float32"]
most = 1 / (1 - products["float32"] + products["float32"] / gain)
print(f"{products['float32']:.0%} at {gain:.1f} times the rate: about {most:.2f} times")
print(f"measured: {wide['times']:.2f} ({min(wide['rounds']):.2f} to {max(wide['rounds']):.2f})")

# %% [markdown]
# More than the estimate: in bf16 products take little more than a third of their time in float32, not half. The rest shrinks as well.
#
# Does the model learn as much? Chapter 9's `small` was trained to the end in both, with one seed, on the same machine. An earlier pair is from another machine, before our C was written.

# %%
pair, earlier = (load_record(f"precision-multi30k{end}") for end in ("", "-earlier"))
print(f"all steps of the training: {pair['times_as_fast']['seconds']:.2f} times as long in float32")
bleu = {}
runs = pair["runs"] | {f"{name}, earlier": run for name, run in earlier["runs"].items()}
for name, run in runs.items():
    bleu[name] = {"val": run["chosen_by_val_bleu"]["best epoch"]}
    bleu[name] |= {split: test["bleu"] for split, test in run["test"].items()}
    bleu[name]["val. nats"] = run["history"][-1]["val_loss"]
pd.DataFrame(bleu).T.round(2)

# %% [markdown]
# In bf16 the loss is as low in both pairs. BLEU is 0 to 0.9 lower, never higher. Two pairs with one seed can't say whether that is chance. The trainings' ratio, 1.65, is less than the step's; they didn't take turns.
#
# ## Around the step
#
# > **In short.** Three settings are outside the model: memory, the optimizer's kernel, and threads.
#
# **Freed memory.** The C library returns a large freed tensor to the operating system. The next one gets fresh pages, each zeroed first. Four settings of glibc keep what is freed.


# %%
def keep_memory() -> bool:
    """Have the C library keep freed memory for the next tensor. False if it isn't glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    settings = {  # by the numbers of mallopt(3)
        -4: 0,  # M_MMAP_MAX
        -1: -1,  # M_TRIM_THRESHOLD: never
        -2: 64 * 2**20,  # M_TOP_PAD
        -8: 1,  # M_ARENA_MAX: a thread's own heap is given back when it shrinks
    }
    return all([ctypes.CDLL(None).mallopt(*setting) == 1 for setting in settings.items()])


# %% [markdown]
# **Adam.** `torch.optim.Adam` passes over all weights many times; with `fused=True`, once. **Threads.** We use one for each core. **Predict.** How many times as long does a step take with one thread instead of two?

# %%
print(f"one thread: {record['reports']['one thread']['times']:.2f} times as long")
duels.loc[["freed memory kept", "the fused Adam"]]

# %% [markdown]
# Less than twice: Python runs on one core in any case, and two cores share one memory.
#
# ## What each part is worth
#
# > **In short.** Most parts are worth their code. If products are fast, everything else counts more.

# %%
switches_chart(duels.reset_index())

# %% [markdown]
# For three of 20 duels we can't tell. That doesn't mean "worth nothing": seeing one percent takes more rounds. In bf16 five parts are worth more than in float32, in every round: LayerNorm, attention, the loss, dropout, and C.
#
# **Predict.** How many times as long as ours in float32 does the textbook's code take for a real token: padded to 72, in buckets, in buckets with freed memory kept?

# %%
names = ["textbook, padded to 72", "textbook", "textbook, memory kept"]
race_frame(record["reports"]).loc[names].round(2)

# %% [markdown]
# Padded to 72, as in The Annotated Transformer, the textbook's code takes five times as long as in buckets. All this chapter's tricks together are worth a factor of 2.2 in float32, and 4.7 with bf16 (README's table of speed).
#
# ## Where the time goes now
#
# > **In short.** Products are three quarters of our step in float32. In bf16 they are cheap, and little more than half.
#
# This is chapter 11's account of a step, in milliseconds, with freed memory kept. **Predict** which rows shrink.

# %%
print(*(f"{name}: {share:.0%} is products" for name, share in products.items()), sep="\n")
(1000 * account.T.assign(all=account.sum()).T).round().astype(int)

# %% [markdown]
# Products get faster with the other library, and in bf16 with smaller factors. The rest falls from 278 ms to 90 in float32: random bits, LayerNorm, softmax, attention and most sums are now 36 ms in C. Without the profiler, a step takes 0.33 s: 1.9 times chapter 11's floor. The textbook's takes 3.7 times.
#
# ## Against others
#
# > **In short.** The same batches on the same machine, in turns; for each program, the best of the settings that were tried.
#
# The others run in float32 and under `autocast`, as they come and with freed memory kept. The batches' size is tuned for none of them. Not everything is equal: ours has the fused Adam; MarianMTModel and x-transformers have 1.5% more weights; and x-transformers has no biases in its attention, no dropout after a sublayer, and GELU instead of ReLU.

# %%
raced = race_frame(peers["reports"]).sort_values("times as long as ours")
raced.groupby(lambda name: name.split(",")[0], sort=False).head(1).round(2)  # each one's best

# %% [markdown]
# This is one model on one machine. `make bench` repeats the race on yours.
#
# ## On a GPU
#
# > **In short.** A GPU finishes one small task before Python asks for the next. So ask less often.
#
# The CPU *launches* each kernel, and the launch can take longer than the kernel. Each decision that depends on the data ("how many rows are real?") makes the CPU wait for the GPU. So there we use **few static shapes**: each pair goes into the narrowest of eight widths that fits, [chosen](../scripts/core/static.py) so that padding is least. For each shape a whole optimizer [step](../scripts/core/steps.py) is recorded once, and launched as a whole: a **CUDA graph**.
#
# On a borrowed H200 we timed the small model's step in five stages, in turns; each adds something to the one before (`python -m scripts.studies.waterfall small`). **Predict.** Which stage gains most?

# %%
waterfall = load_record("gpu-waterfall-small")
stages = pd.DataFrame(waterfall["stages"]).T
stages["ms per step"] = 1000 * stages["seconds_per_step"]
stages[["times", "ms per step", "mfu"]].astype(float).round(3)

# %% [markdown]
# `times` is the median ratio to the last stage. 16-bit factors gain nothing, since products weren't what took the time. The recording gains most: the same launches take a ninth of the time, since they no longer wait for Python. Still, the share of the card's 16-bit rate that is useful work, `mfu`, is 2.5%: this model is too small for such a card.
#
# ## Summary
#
# - A trick counts if it computes the same numbers (in 16 bits: within a bound), and if its ratio is clear of the control's. The fused Adam's isn't; it is one argument, so it stays.
# - Batching by length is worth a factor of 5; all tricks together 2.2 in float32, and 4.7 with bf16.
# - A backward pass by hand keeps only what it needs, and `gradcheck` tests it.
# - bf16 makes products cheap; then everything else counts, and should take one pass each.
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
def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """Rows (N, d) of sentences of these lengths, one after the other, to (N, d)."""
    ...


check(packed_attention)

# %% [markdown]
# ### Exercise 2 · Another loss in chunks
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# The *z-loss* keeps logits from drifting (Chowdhery et al. 2022): $\sum_n (\log Z_n)^2$ with $Z_n = \sum_v e^{z_{nv}}$. Write `chunked_z_loss(x, weight, bias, chunk)` for x (N, D), weight (V, D), bias (V,), which never holds more than `chunk` rows of logits, backward pass included. A `Function` as above can do it. `checkpoint(part, rows, use_reentrant=False)` of `torch.utils.checkpoint` is shorter: it forgets what lies within `part(rows)`, and computes it again in the backward pass. (`solution("chunked_z_loss")` shows ours.)


# %%
def chunked_z_loss(x: Tensor, weight: Tensor, bias: Tensor, chunk: int) -> Tensor:
    """Σ (log Z)² for x (N, D), weight (V, D), bias (V,), with `chunk` rows of logits at a time."""
    ...


check(chunked_z_loss)

# %% [markdown]
# ### Exercise 3 · What would a check notice?
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# 1. In `AttentionCore.backward`, use `weights` where `thinned` stands. Does `gradcheck` without dropout notice? With it?
# 2. Take 8 random bits an entry in `keep_mask` rather than 16. Which rate does p = 0.1 become? Suppose that a test counts how many of 400,000 entries are dropped, and allows five standard deviations: does it notice?
#
# <details><summary>Answers</summary>
#
# 1. Without dropout the two are the same tensor, and nothing can notice. With it the gradient of V goes through dropped weights, and `gradcheck` fails.
# 2. 26/256, about 0.1016. Most likely not: five standard deviations are 0.0024, and the rate is off by 0.0016.
#
# </details>
#
# Next: [Chapter 13 · Decoding fast](ch13_decoding_fast.ipynb)
