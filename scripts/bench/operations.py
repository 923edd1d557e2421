"""Typical operations of a training step, each alone: what the roofline of chapter 11 shows.

FLOPs of what is no product are a convention, and bytes the least that must move. How much of a
step each takes is `scripts.bench.accounts`' business.
"""

import torch
import torch.nn.functional as F
from torch import nn

from scripts.ch11_where_the_time_goes import (
    ADAM_BYTES,
    SMALL,
    Product,
    Shape,
    best_seconds,
    parameter_count,
)
from scripts.ch12_going_fast import keep_mask


def measured_operations(shape: Shape = SMALL, tokens: int = 2048, length: int = 16) -> list[dict]:
    """Typical operations of a step, alone: operations, least bytes and seconds of each."""
    D, V, sentences = shape.d_model, shape.vocab, tokens // length
    x, wide, logits = (
        torch.randn(tokens, D),
        torch.randn(tokens, shape.d_ff),
        torch.randn(tokens, V),
    )
    heads = torch.randn(sentences * shape.h, length, D // shape.h)
    weights = torch.randn(sentences * shape.h, length, length)
    labels = torch.randint(1, V, (tokens,))
    norm = nn.LayerNorm(D)
    maps = {n: torch.randn(n, D) for n in (3 * D, shape.d_ff, V)}
    back = torch.randn(D, shape.d_ff)
    weight = [torch.randn(parameter_count(shape), requires_grad=True)]
    weight[0].grad = torch.randn_like(weight[0])
    adam = torch.optim.Adam(weight, fused=True)

    def product(name: str, n: int, i: int, j: int, k: int) -> dict:
        p = Product(name, n, i, j, k)
        return {"operation": name, "flops": p.flops, "bytes": p.bytes}

    def passing(name: str, numbers: int, flops: int, arrays: float) -> dict:
        return {"operation": name, "flops": flops * numbers, "bytes": int(4 * arrays * numbers)}

    cases = [
        (product("Q, K, V", 1, tokens, D, 3 * D), lambda: F.linear(x, maps[3 * D])),
        (
            product("feed-forward, out", 1, tokens, D, shape.d_ff),
            lambda: F.linear(x, maps[shape.d_ff]),
        ),
        (product("feed-forward, back", 1, tokens, shape.d_ff, D), lambda: F.linear(wide, back)),
        (product("logits", 1, tokens, D, V), lambda: F.linear(x, maps[V])),
        (product("scores", len(heads), length, D // shape.h, length), lambda: heads @ heads.mT),
        (passing("softmax of scores", weights.numel(), 5, 2), lambda: weights.softmax(-1)),
        (passing("LayerNorm", x.numel(), 8, 2), lambda: norm(x)),
        (passing("residual sum", x.numel(), 1, 3), lambda: x + x),
        (passing("dropout", wide.numel(), 2, 2.25), lambda: F.dropout(wide, 0.1)),
        (
            passing("dropout, 16 bits", wide.numel(), 2, 2.5),
            lambda: wide * keep_mask(wide.shape, 0.1, wide),
        ),
        (passing("cross-entropy", logits.numel(), 5, 1), lambda: F.cross_entropy(logits, labels)),
        (passing("Adam", weight[0].numel(), 12, ADAM_BYTES / 4), adam.step),
    ]
    with torch.no_grad():
        return [row | {"seconds": best_seconds(call)} for row, call in cases]
