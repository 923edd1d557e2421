"""Typical operations of a training step, each alone: what the roofline of chapter 11 shows.

FLOPs of what isn't a product are a convention, and bytes the least that must move. How much of a
step each takes is `scripts.bench.accounts`' business.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.ch11_where_the_time_goes import (
    ADAM_BYTES,
    SMALL,
    Product,
    best_seconds,
    parameter_count,
)
from scripts.ch12_going_fast import keep_mask


def measured_operations() -> list[dict]:
    """Typical operations of a small step, alone: operations, least bytes and seconds of each."""
    n, length, D, W, V, H = 2048, 16, SMALL.d_model, SMALL.d_ff, SMALL.vocab, SMALL.h
    x, wide, logits = (torch.randn(n, width) for width in (D, W, V))
    y = torch.randn_like(x)
    heads, others = torch.randn(2, n // length * H, length, D // H)
    weights = torch.randn(n // length * H, length, length)
    labels = torch.randint(1, V, (n,))
    norm = nn.LayerNorm(D)
    to_qkv, to_wide, to_logits = (torch.randn(width, D) for width in (3 * D, W, V))
    back = torch.randn(D, W)
    weight = torch.randn(parameter_count(SMALL), requires_grad=True)
    weight.grad = torch.randn_like(weight)
    adam = torch.optim.Adam([weight], fused=True)

    def product(*sizes: Any) -> dict:
        p = Product(*sizes)
        return {"operation": p.kind, "flops": p.flops, "bytes": p.bytes}

    def moving(name: str, over: Tensor, flops: int, arrays: float) -> dict:
        size = over.numel()
        return {"operation": name, "flops": flops * size, "bytes": int(4 * arrays * size)}

    cases = [
        (product("Q, K, V", 1, n, D, 3 * D), lambda: F.linear(x, to_qkv)),
        (product("feed-forward, out", 1, n, D, W), lambda: F.linear(x, to_wide)),
        (product("feed-forward, back", 1, n, W, D), lambda: F.linear(wide, back)),
        (product("logits", 1, n, D, V), lambda: F.linear(x, to_logits)),
        (product("scores", len(heads), length, D // H, length), lambda: heads @ others.mT),
        (moving("softmax of scores", weights, 5, 2), lambda: weights.softmax(-1)),
        (moving("LayerNorm", x, 8, 2), lambda: norm(x)),
        (moving("residual sum", x, 1, 3), lambda: x + y),
        (moving("dropout", wide, 2, 2.25), lambda: F.dropout(wide, 0.1)),
        (moving("dropout, 16 bits", wide, 2, 2.5), lambda: wide * keep_mask(wide.shape, 0.1, wide)),
        (moving("cross-entropy", logits, 5, 1), lambda: F.cross_entropy(logits, labels)),
        (moving("Adam", weight, 12, ADAM_BYTES / 4), adam.step),
    ]
    with torch.no_grad():
        return [row | {"seconds": best_seconds(call)} for row, call in cases]
