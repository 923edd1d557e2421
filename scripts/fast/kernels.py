"""The functions of `kernels.c`, on tensors: compiled once for this machine, if it has a compiler.

Each does a small part of a decoding step in one pass, where PyTorch takes several. Without a
compiler, on a GPU and in double precision, each goes PyTorch's way.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.ch02_multi_head_attention import merge_heads
from scripts.ch13_decoding_fast import BLOCK, best_logits
from scripts.fast import compiled
from scripts.fast.compiled import LANES, P, fields

# How many rows, and how many numbers in them, count as few: for more, other products are faster.
MOST_ROWS, MOST_NUMBERS = 8, 8192
MOST_ROWS_OF_BYTES, MOST_BYTES = 32, 131072

# In what follows C gets addresses, so Python must keep the tensors alive: `held` does.


def takes(x: Tensor) -> bool:
    """Whether the compiled functions can work on numbers like these."""
    return compiled.works_on("kernels", x, torch.float32)


def multiplies_bytes() -> int:
    """How many rows of bytes the compiled functions multiply faster than PyTorch does."""
    library = compiled.loaded("kernels")
    return 0 if library is None else P.in_dll(library, "multiplies_bytes").value or 0


class Norm(ctypes.Structure):
    """A LayerNorm, or none, as `kernels.c` has it."""

    _fields_ = [*fields("weight bias"), ("eps", ctypes.c_float)]


def norm_of(norm: nn.Module | None) -> Norm:
    """The same norm; the caller must keep its weights alive."""
    if norm is None or isinstance(norm, nn.Identity):
        return Norm()
    return Norm(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)


class Past(ctypes.Structure):
    """Keys and values, and which of them may be seen, as `kernels.c` has them."""

    _fields_ = fields("keys values layer sentence head L masks may")

    def __init__(self, past: Tensor, allowed: Tensor | None):
        """From past (layers, 2, B, H, L, d_k), or that of one layer; allowed (B, k or 1, L)."""
        *_, to_values, sentence, head, _, _ = past.stride()
        keys = past.data_ptr()
        self.held = None if allowed is None else allowed.contiguous()
        mask = () if allowed is None else (allowed.size(1), self.held.data_ptr())
        strides = (past.stride(0), sentence, head)
        values = keys + to_values * past.element_size()
        super().__init__(keys, values, *strides, past.size(-2), *mask)


def takes_heads(q: Tensor, past: Tensor) -> bool:
    """Whether the compiled attention can work on queries and keys like these."""
    return past.size(-1) % LANES == 0 and past.size(-1) <= 16 * LANES and takes(q)


def attend(q: Tensor, past: Tensor, allowed: Tensor | None) -> Tensor:
    """softmax(QKᵀ/√d_k)·V for a few queries (§3.2.1, eq. 1): rows q (B·k, H·d_k) to (B·k, H·d_k).

    Keys and values are past (2, B, H, L, d_k), contiguous in the last two dimensions. `allowed`
    (B, k or 1, L) says at which keys a query may look: at least one.
    """
    _, B, H, _, d = past.shape
    if not takes_heads(q, past):
        heads = q.unflatten(0, (B, -1)).unflatten(-1, (H, d)).transpose(1, 2)  # (B, H, k, d_k)
        mask = None if allowed is None else allowed.unsqueeze(1)  # (B, 1, k or 1, L)
        return merge_heads(F.scaled_dot_product_attention(heads, *past, mask)).flatten(0, 1)
    out, sizes = q.new_empty(q.shape), (B, len(q) // B, H, d // LANES)
    compiled.call("kernels", "attend", q, q.stride(0), Past(past, allowed), 0, *sizes, out)
    return out


def round_rows(x: Tensor, norm: nn.Module | None = None) -> tuple[Tensor, Tensor]:
    """x (N, D), or norm(x), to bytes (N, D), at most ±127, and units (N,): x ≈ unit·bytes."""
    if not takes(x):
        x = x if norm is None else norm(x)
        most = x.abs().amax(dim=1)  # (N,)
        per = torch.where(most > 0, 127 / most, 0.0)
        return (x * per.unsqueeze(1)).round_().to(torch.int8), most / 127
    x = x.contiguous()
    whole, unit = torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x))
    compiled.call("kernels", "round_rows", x, *x.shape, norm_of(norm), whole, unit)
    return whole, unit


def scale_sums(
    sums: Tensor, unit: Tensor, units: Tensor, bias: Tensor, more: Tensor | None, relu: bool
) -> Tensor:
    """unit·units·sums + bias, plus `more` or cut at 0: unit (N,), units (F,), sums (N, F) int32."""
    if not takes(unit):
        y = torch.addcmul(bias, sums * unit.unsqueeze(1), units)
        y = y if more is None else y.add_(more)
        return y.relu_() if relu else y
    out = unit.new_empty(sums.shape)
    compiled.call("kernels", "scale_sums", sums, *sums.shape, unit, units, bias, more, relu, out)
    return out


def log_sum_exp(logits: Tensor, largest: Tensor) -> Tensor:
    """log Σ exp of each row of logits (N, V), whose largest (N, 1) is known: (N, 1)."""
    return largest + (logits - largest).exp_().sum(dim=-1, keepdim=True).log_()


def best_of_rows(
    logits: Tensor, k: int, total: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The k or V largest of each row of logits (N, V), their places, and, if asked, log Σ exp."""
    (N, V), k = logits.shape, min(k, logits.size(1))
    if not takes(logits):
        suits = V % BLOCK == 0 and 8 * k * BLOCK <= V  # at most an eighth of the row is left
        top, place = best_logits(logits, k) if suits else logits.topk(k)
        return top, place, log_sum_exp(logits, top[:, :1]) if total else None
    logits, top = logits.contiguous(), logits.new_empty(N, k)
    place, sums = torch.empty(N, k, dtype=torch.long), logits.new_empty(N, 1) if total else None
    compiled.call("kernels", "best_of_rows", logits, N, V, k, top, place, sums)
    return top, place, sums


class Map(ctypes.Structure):
    """A linear map for a few rows, as `kernels.c` has it."""

    _fields_ = [*fields("weight bias units sums"), ("D", ctypes.c_int64), ("F", ctypes.c_int64)]

    def __init__(self, table: Tensor, bias: Tensor, units: Tensor | None = None):
        """From a table (D, F) and a bias (F,); with `units` (F,), the table holds bytes.

        `most` says how many rows are few: 0 if this machine can't multiply it.
        """
        (D, F), sums = table.shape, None
        if units is None:
            fits, most, numbers = D % 4 == 0, MOST_ROWS, MOST_NUMBERS
        else:
            fits, most, numbers = D % 8 == 0 and F % 16 == 0, multiplies_bytes(), MOST_BYTES
        if most <= MOST_ROWS_OF_BYTES:
            most = min(most, numbers // max(D, F))
        self.most = most if fits and takes(bias) else 0
        if self.most and units is not None:
            sums = table.sum(0, dtype=torch.int32)
            table = table.T.reshape(F // 16, 16, D // 4, 4).transpose(1, 2).contiguous()
        self.held = (table, bias, units, sums)
        super().__init__(*(None if x is None else x.data_ptr() for x in self.held), D, F)

    def takes(self, x: Tensor) -> bool:
        """Whether x (N, D) has few rows."""
        return x.size(0) <= self.most and takes(x)

    def __call__(
        self, x: Tensor, norm: nn.Module | None, more: Tensor | None, relu: bool
    ) -> Tensor:
        """norm(x)·W + b, plus `more` or cut at 0: a few rows x (N, D) to (N, F)."""
        x, out = x.contiguous(), x.new_empty(x.size(0), self.F)
        compiled.call("kernels", "apply", self, norm_of(norm), x, x.size(0), more, relu, out)
        return out


MAPS = ("look_back", "look_back_out", "look_across", "look_across_out", "expand", "contract")


class Layer(ctypes.Structure):
    """Norms and maps of a `fast.decoding.PreparedLayer`, as `kernels.c` has them."""

    _fields_ = [("before", Norm * 3), ("after", Norm * 3), *((name, Map) for name in MAPS)]

    def __init__(self, layer: Any):
        norms = [(Norm * 3)(*map(norm_of, side)) for side in (layer.before, layer.after)]
        super().__init__(*norms, *(getattr(layer, name).few for name in MAPS))


class Layers:
    """A decoder's layers and the norm after them, for a few rows."""

    def __init__(self, layers: Sequence[Any], last: nn.Module):
        most = min(getattr(layer, name).few.most for layer in layers for name in MAPS)
        self.most = min(most, MOST_ROWS_OF_BYTES)
        self.layers, self.last = (Layer * len(layers))(*map(Layer, layers)), norm_of(last)
        self.held = layers, last

    def takes(self, x: Tensor, past: Tensor) -> bool:
        """Whether x (N, D) has few rows, with heads that `attend` takes."""
        return x.size(0) <= self.most and takes_heads(x, past)

    def decode(
        self, x: Tensor, past: Tensor, family: Tensor | None, source: Tensor, real: Tensor | None
    ) -> Tensor:
        """What `PreparedModel.write` gives; x is overwritten."""
        _, _, B, H, _, d = past.shape
        layers, sizes = (self.layers, len(self.layers), self.last), (B, len(x) // B, H, d // LANES)
        pasts = Past(past, family), Past(source, real)
        compiled.call("kernels", "decode_layers", *layers, x, *sizes, *pasts)
        return x
