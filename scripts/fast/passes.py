"""The functions of `passes.c` as operations with gradients, in float32 and bfloat16 on a CPU.

They do the small parts of a training step: dropout, LayerNorm, attention, the loss's softmax, each
in one pass over its numbers, on all threads. `suits` says when they can; otherwise `fast.fast`
takes chapter 12's way.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from scripts.ch12_going_fast import DRAWS, DropoutMask, Layout, keep_scale
from scripts.fast import compiled
from scripts.fast.compiled import LANES, fields

BF16 = torch.bfloat16


def suits(x: Tensor, *kinds: torch.dtype) -> bool:
    """Whether the compiled functions can work on x: float32 or bfloat16, or just these kinds."""
    return compiled.works_on("passes", x, *(kinds or (torch.float32, BF16)))


def pass_over(name: str, *arguments: Any) -> None:
    """The compiled function of that name, on all threads."""
    compiled.call("passes", name, *arguments, torch.get_num_threads())


def dropout_at(p: float) -> DropoutMask:
    """A new mask at rate p, as PyTorch's generator decides."""
    seed = int(torch.randint(2**63 - 1, ())) if p else 0
    return DropoutMask(seed, round(p * DRAWS), keep_scale(p))


def dropped(
    x: Tensor, more: Tensor | None, gate: Tensor | None, mask: DropoutMask, kind: torch.dtype
) -> Tensor:
    """What C's `drop` makes of x, as numbers of `kind`."""
    x, more, gate = (part if part is None else part.contiguous() for part in (x, more, gate))
    out = torch.empty_like(x, dtype=kind)
    pass_over("drop", x, x.dtype == BF16, x.numel(), more, gate, mask, out, kind == BF16)
    return out


class Drop(Function):
    """dropout(x), or dropout(relu(x)), plus `more` if there is any; x of any shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor | None, p: float, relu: bool = False) -> Tensor:
        """To the shape of x, in the dtype of `more`, if given, or of x."""
        ctx.mask, ctx.kind = dropout_at(p), x.dtype
        kind = x.dtype if more is None else more.dtype
        out = dropped(x, more, x if relu else None, ctx.mask, kind)
        ctx.save_for_backward(out if relu else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The same mask, drawn again: none was stored."""
        (out,) = ctx.saved_tensors
        # After relu the output is positive only where neither relu nor dropout made it 0.
        mask = ctx.mask if out is None else DropoutMask(0, 0, ctx.mask.scale)
        by_more = grad if ctx.needs_input_grad[1] else None
        return dropped(grad, None, out, mask, ctx.kind), by_more, None, None


class NormRows(Function):
    """LayerNorm of x (N, D), float32, to numbers of `kind`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, kind: torch.dtype
    ) -> Tensor:
        """x (N, D), weight and bias (D,), to (N, D)."""
        x, out = x.contiguous(), torch.empty_like(x, dtype=kind)
        mean, per = x.new_empty(2, len(x))
        pass_over("norm", x, *x.shape, weight, bias, eps, mean, per, out, kind == BF16)
        ctx.save_for_backward(x, weight, mean, per)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias."""
        x, weight, mean, per = ctx.saved_tensors
        grad, by_x, by_both = grad.contiguous(), torch.empty_like(x), x.new_empty(2, x.size(1))
        inputs = (grad, grad.dtype == BF16, x, *x.shape, weight, mean, per)
        pass_over("norm_back", *inputs, by_x, by_both)
        return by_x, *by_both, None, None


class FastLayout(Layout):
    """Chapter 12's `Layout`; or, unless `packed`, all cells have rows, and padding is hidden.

    `full` says that all cells have rows; `real` (B, T) is None if nothing is hidden.
    """

    def __init__(self, real: Tensor, packed: bool):
        self.full = not packed or bool(real.all())
        self.real = None if packed and self.full else real
        if not self.full:
            super().__init__(real)
            return
        # Without a look at the data: a GPU would have to wait for that.
        self.shape, self.slots = real.shape, torch.arange(real.numel(), device=real.device)
        self.positions = self.slots % real.size(1)

    def spread(self, rows: Tensor) -> Tensor:
        """(N, D) to (B, T, D); a cell without a row is 0."""
        return rows.unflatten(0, self.shape) if self.full else super().spread(rows)

    def gather(self, cells: Tensor) -> Tensor:
        """(B, T, D) to (N, D): the way back."""
        return cells.flatten(0, 1) if self.full else super().gather(cells)


def attends(widths: Sequence[int], h: int, places: Sequence[FastLayout]) -> bool:
    """Whether `Attend` can do it: h heads of one fitting width, and all rows are real tokens.

    `widths` are those of queries, keys and values, `places` the layouts of queries and of keys.
    """
    real = all(place.real is None or not place.full for place in places)
    return real and len(set(widths)) == 1 and widths[0] // h % LANES == 0


def starts_of(layout: Layout) -> Tensor:
    """Where each sentence's rows begin, and where the last one's end: (B + 1,)."""
    B, T = layout.shape
    return torch.searchsorted(layout.slots, torch.arange(B + 1) * T)


class Sentences(ctypes.Structure):
    """Which rows are whose, as `passes.c` has it."""

    _fields_ = fields("q_start k_start B H d half causal")


class Heads(ctypes.Structure):
    """Queries, keys and values, or their gradients, as `passes.c` has them."""

    _fields_ = fields("q k v q_row k_row")


def heads_of(rows: Tensor, others: Tensor | None) -> Heads:
    """From rows (N, 3·D) of queries, keys and values; or (N, D) of queries, others (M, 2·D)."""
    D, size = rows.size(1) // (3 if others is None else 1), rows.element_size()
    keys, at = (rows, D) if others is None else (others, 0)
    first = keys.data_ptr() + at * size
    return Heads(rows.data_ptr(), first, first + D * size, rows.stride(0), keys.stride(0))


class Attend(Function):
    """softmax(QKᵀ/√d_k)·V (§3.2.1) from rows to rows, with dropout on the weights; stores none."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        others: Tensor | None,
        starts: tuple[Tensor, Tensor],
        h: int,
        causal: bool,
        p: float,
    ) -> Tensor:
        """Rows as in `heads_of`, to (N, D). `starts`: where each sentence's begin, (B + 1,) twice.

        First for the queries, then for keys and values.
        """
        D = rows.size(1) // (3 if others is None else 1)
        sizes = (len(starts[0]) - 1, h, D // h, rows.dtype == BF16, causal)
        ctx.starts = starts  # C gets their addresses: keep them alive
        ctx.fixed = Sentences(*(start.data_ptr() for start in starts), *sizes), dropout_at(p)
        ctx.save_for_backward(rows, others)
        out = rows.new_empty(len(rows), D)
        pass_over("attend_rows", heads_of(rows, others), *ctx.fixed, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for rows and others; the weights are computed again."""
        by = [None if x is None else x.new_empty(x.shape) for x in ctx.saved_tensors]
        inputs = (heads_of(*ctx.saved_tensors), *ctx.fixed, grad.contiguous())
        pass_over("attend_rows_back", *inputs, heads_of(*by))
        return *by, None, None, None, None


def softmax_rows_(logits: Tensor, minus: float, kind: torch.dtype) -> Tensor:
    """Overwrite logits z (n, V) with softmax(z) − minus; to log Σ exp z, (n, 1), in `kind`."""
    log_z = torch.empty(len(logits), 1, dtype=torch.float32)  # as C writes it
    pass_over("probabilities", logits, logits.dtype == BF16, *logits.shape, minus, log_z)
    return log_z.to(kind)
