# %% [markdown]
# # Chapter 7 · Going fast

# %%
import ctypes
import importlib
import json
import math
import os
import platform
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from tqdm import tqdm

from scripts.ch01_attention import attention, saved_bytes, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import (
    MAX_LEN,
    Embeddings,
    PositionalEncoding,
    check_length,
)
from scripts.ch04_encoder_decoder import (
    Decoder,
    EncoderDecoder,
    Generator,
    PositionwiseFeedForward,
    SublayerConnection,
    make_model,
)
from scripts.ch05_training import BOS, EOS, PAD, Batch, LabelSmoothing, batch_loss
from scripts.ch06_multi30k import (
    FIXED_WIDTH,
    BPETokenizer,
    Example,
    encode_pairs,
    load_corpus,
    make_batch,
    pad_rows,
    token_batches,
)
from scripts.records import ROOT, provenance, save_record


# %%
@dataclass(frozen=True)
class Switches:
    """Which steps of this chapter the forward and backward pass take. Whatever is on, the numbers stay.

    All on is `FAST`, all off is `PLAIN`: the textbook's own operations, called from here.
    """

    targets_only: bool = True  # logits only where there is a target
    packed: bool = True  # rows for real tokens only
    fused_norm: bool = True  # LayerNorm in one kernel
    joint_projections: bool = True  # one product for Q, K and V; one for all cross-attention's K, V
    attention: Literal["textbook", "sdpa", "ours"] = "ours"
    loss: Literal["textbook", "torch", "ours"] = "ours"
    random_bits: bool = True  # dropout masks from 16 random bits an entry
    onednn: bool = True


FAST = Switches()
PLAIN = Switches(False, False, False, False, "textbook", "textbook", False, False)


# %%
class Layout:
    """Which cells of a padded rectangle (B, T) get a row of their own, and where the rows go.

    `slots` (N,) is each row's cell, b·T + t, in reading order; `positions` (N,) its t. With
    `packed` only real cells have rows, else all. `bias` (B, 1, 1, T) is −inf at padding keys.
    """

    def __init__(self, real: Tensor, packed: bool):
        self.shape = real.shape
        self.full = not packed or bool(real.all())
        cells = torch.arange(real.numel(), device=real.device)
        self.slots = cells if self.full else cells[real.flatten()]
        self.positions = self.slots % real.size(1)
        self.bias = None
        if not real.all():
            hidden = torch.zeros(real.shape, device=real.device).masked_fill_(~real, -math.inf)
            self.bias = hidden[:, None, None, :].to(torch.get_default_dtype())

    def rows(self, rectangle: Tensor) -> Tensor:
        """(B, T) to (N,): the cells that have rows."""
        return rectangle.reshape(-1)[self.slots]

    def spread(self, rows: Tensor) -> Tensor:
        """(N, D) to (B, T, D); a cell without a row is 0."""
        if not self.full:
            cells = rows.new_zeros(self.shape.numel(), rows.size(-1))  # (B·T, D)
            rows = cells.index_add(0, self.slots, rows)
        return rows.unflatten(0, self.shape)

    def gather(self, cells: Tensor) -> Tensor:
        """(B, T, D) to (N, D): the way back."""
        rows = cells.flatten(0, 1)  # (B·T, D)
        return rows if self.full else rows.index_select(0, self.slots)


# %%
def dropout_rate(module: nn.Module) -> float:
    """The rate that the module's own dropout applies now: 0 in evaluation."""
    return module.dropout.p if module.training else 0.0


# %%
DRAWS = 2**16  # the values of 16 random bits


def keep_mask(shape: torch.Size, p: float, like: Tensor) -> Tensor:
    """1 where an entry stays and 0 where dropout takes it: `shape`, in the dtype of `like`.

    An entry is taken where 16 random bits, read as a number, are below p·65,536, so that p is
    rounded to 1/65,536. One 64-bit draw serves four entries.
    """
    entries = math.prod(shape)
    draws = torch.empty(-(-entries // 4), dtype=torch.int64, device=like.device)
    bits = draws.random_(-(2**63), None).view(torch.int16)[:entries]
    kept = torch.empty(entries, dtype=like.dtype, device=like.device)
    return torch.ge(bits, round(p * DRAWS) - DRAWS // 2, out=kept).view(shape)


def keep_scale(p: float) -> float:
    """What the kept entries are multiplied by, so that the mean stays: 1/(1 − p), p as rounded."""
    return 1 / (1 - round(p * DRAWS) / DRAWS)


# %%
def dropped(x: Tensor, p: float, how: Switches) -> Tensor:
    """Dropout of x at rate p."""
    if p and how.random_bits:
        return x * keep_mask(x.shape, p, x) * keep_scale(p)
    return F.dropout(x, p, training=p > 0)


def dropped_sum(x: Tensor, y: Tensor, p: float, how: Switches) -> Tensor:
    """x + dropout(y): the end of every sublayer, in one kernel."""
    if p and how.random_bits:
        return torch.addcmul(x, y, keep_mask(y.shape, p, y), value=keep_scale(p))
    return x + F.dropout(y, p, training=p > 0)


# %%
def affine(x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool) -> Tensor:
    """x·Wᵀ + b: x (N, D), weight (F, D), to (N, F), without a gradient; by oneDNN where it can."""
    if onednn and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class OneDnnLinear(Function):
    """`F.linear` with oneDNN's product for the result and for the gradient by x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """x (N, D), weight (F, D), bias (F,), to (N, F)."""
        ctx.save_for_backward(x, weight)
        return affine(x, weight, bias, onednn=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by x, weight and bias."""
        x, weight = ctx.saved_tensors
        return affine(grad, weight.T, None, onednn=True), grad.T @ x, grad.sum(0)


def product(x: Tensor, weight: Tensor, bias: Tensor, how: Switches) -> Tensor:
    """x·Wᵀ + b."""
    return OneDnnLinear.apply(x, weight, bias) if how.onednn else F.linear(x, weight, bias)


def linear(layer: nn.Linear, x: Tensor, how: Switches) -> Tensor:
    """What `layer` computes."""
    return product(x, layer.weight, layer.bias, how)


# %%
class ReluDropout(Function):
    """Dropout(relu(x)) without its factor 1/(1 − p), overwriting x.

    Keeps no mask: an entry of the result is 0 where relu or dropout took it, and there alone the
    gradient stops.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """x (...) to the same shape."""
        ctx.mark_dirty(x)
        x.relu_()
        if p:
            x.mul_(keep_mask(x.shape, p, x))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, where the result isn't 0."""
        (result,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, result, 0.0), None


def feed_forward(layer: PositionwiseFeedForward, x: Tensor, how: Switches) -> Tensor:
    """What `layer` computes: x (N, D) to (N, D)."""
    p = dropout_rate(layer)
    hidden = linear(layer.expand, x, how)  # (N, d_ff)
    if not how.random_bits:
        return linear(layer.contract, F.dropout(hidden.relu(), p, training=p > 0), how)
    hidden = ReluDropout.apply(hidden, p)
    # The factor is put on the weights: they are fewer than the activations.
    return product(hidden, layer.contract.weight * keep_scale(p), layer.contract.bias, how)


# %%
def normed(norm: nn.Module, x: Tensor, how: Switches) -> Tensor:
    """What `norm` computes; x (N, D) to (N, D)."""
    if how.fused_norm and not isinstance(norm, nn.Identity):
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return norm(x)


def residual(
    connection: SublayerConnection, x: Tensor, sublayer: Callable[[Tensor], Tensor], how: Switches
) -> Tensor:
    """What `connection` computes around `sublayer`: x (N, D) to (N, D)."""
    p = dropout_rate(connection)
    if connection.norm_first:
        return dropped_sum(x, sublayer(normed(connection.norm, x, how)), p, how)
    return normed(connection.norm, dropped_sum(x, sublayer(x), p, how), how)


# %%
class AttentionCore(Function):
    """softmax(QKᵀ/√d_k + bias)·V with dropout on the weights, and its gradient, by five products.

    Kept for the way back: Q, K, V, the weights and the mask, and nothing besides (§3.2.1, eq. 1).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float) -> Tensor:
        """q (B, H, T, d_k), k and v (B, H, S, d_k), bias broadcast to (B, H, T, S); to q's shape."""
        shape, ctx.p = q.shape, p
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B·H, T or S, d_k), contiguous
        weights = scaled_product(q, k.mT, q.size(-1) ** -0.5)  # (B·H, T, S)
        if bias is not None:
            weights.view(*shape[:3], -1).add_(bias)
        torch.softmax(weights, dim=-1, out=weights)
        kept = keep_mask(weights.shape, p, weights) if p else None
        ctx.save_for_backward(q, k, v, weights, kept)
        dropped = weights if kept is None else weights * kept
        return scaled_product(dropped, v, keep_scale(p)).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v, each of its own shape."""
        q, k, v, weights, kept = ctx.saved_tensors
        heads = grad.shape[:2]
        grad = grad.flatten(0, 1)  # (B·H, T, d_k)
        dropped = weights if kept is None else weights * kept
        grad_v = scaled_product(dropped.mT, grad, keep_scale(ctx.p))
        grad_weights = scaled_product(grad, v.mT, keep_scale(ctx.p))  # (B·H, T, S)
        if kept is not None:
            grad_weights *= kept
        # softmax: ∂ℓ/∂scores = w ⊙ (∂ℓ/∂w − Σ w·∂ℓ/∂w)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        scale = q.size(-1) ** -0.5
        grad_q = scaled_product(grad_scores, k, scale)
        grad_k = scaled_product(grad_scores.mT, q, scale)
        return *(x.unflatten(0, heads) for x in (grad_q, grad_k, grad_v)), None, None


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a @ b, with the scale inside the product: (n, i, j), (n, j, k) to (n, i, k)."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)


# %%
def attend(
    layer: MultiHeadedAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    how: Switches,
) -> Tensor:
    """The heads' work without projections: q (B, T, D), k and v (B, S, D), to (B, T, D)."""
    q, k, v = (split_heads(x, layer.h) for x in (q, k, v))  # (B, H, T or S, d_k)
    p = dropout_rate(layer)
    if how.attention == "ours":
        return merge_heads(AttentionCore.apply(q, k, v, bias, p))
    if how.attention == "sdpa":
        return merge_heads(F.scaled_dot_product_attention(q, k, v, bias, dropout_p=p))
    return merge_heads(attention(q, k, v, bias, layer.dropout)[0])


def project(
    x: Tensor, linears: Sequence[nn.Linear], layout: Layout, how: Switches
) -> Sequence[Tensor]:
    """Each of the linear maps applied to x (N, D) and spread to (B, T, D); as one product, if asked."""
    if not how.joint_projections:
        return [layout.spread(linear(x)) for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])  # (sum of outputs, D)
    bias = torch.cat([linear.bias for linear in linears])
    return layout.spread(product(x, weight, bias, how)).chunk(len(linears), dim=-1)


# %%
def self_attention(
    layer: MultiHeadedAttention, x: Tensor, layout: Layout, bias: Tensor | None, how: Switches
) -> Tensor:
    """What `layer` computes from x to x: (N, D) to (N, D)."""
    linears = (layer.project_query, layer.project_key, layer.project_value)
    q, k, v = project(x, linears, layout, how)  # (B, T, D) each
    return linear(layer.project_output, layout.gather(attend(layer, q, k, v, bias, how)), how)


def cross_attention(
    layer: MultiHeadedAttention,
    x: Tensor,
    layout: Layout,
    keys_and_values: tuple[Tensor, Tensor],
    bias: Tensor | None,
    how: Switches,
) -> Tensor:
    """What `layer` computes from x (N, D) to the memory, whose keys and values (B, S, D) are given."""
    q = layout.spread(linear(layer.project_query, x, how))  # (B, T, D)
    heads = attend(layer, q, *keys_and_values, bias, how)  # (B, T, D)
    return linear(layer.project_output, layout.gather(heads), how)


# %%
def embed(modules: nn.Sequential, ids: Tensor, layout: Layout, how: Switches) -> Tensor:
    """What embedding and positions compute, row by row: ids (B, T) to (N, D)."""
    embedding, position = modules
    check_length(ids.size(1), position.pe.size(0))
    words = embedding(layout.rows(ids))  # (N, D)
    places = F.embedding(layout.positions, position.pe)  # (N, D)
    return dropped(words + places, dropout_rate(position), how)


def encode_rows(model: EncoderDecoder, src: Tensor, layout: Layout, how: Switches) -> Tensor:
    """`model.encode` row by row: src (B, S) to the memory (N, D)."""
    x = embed(model.src_embed, src, layout, how)
    for layer in model.encoder.layers:
        look = partial(self_attention, layer.self_attn, layout=layout, bias=layout.bias, how=how)
        x = residual(layer.sublayer[0], x, look, how)
        x = residual(layer.sublayer[1], x, partial(feed_forward, layer.feed_forward, how=how), how)
    return normed(model.encoder.norm, x, how)


def memory_keys_and_values(
    decoder: Decoder, memory: Tensor, layout: Layout, how: Switches
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every decoder layer's cross-attention, from memory (N, D) to (B, S, D)."""
    attentions = [layer.src_attn for layer in decoder.layers]
    linears = [linear for a in attentions for linear in (a.project_key, a.project_value)]
    parts = project(memory, linears, layout, how)
    return list(zip(parts[::2], parts[1::2], strict=True))


def decode_rows_of(
    model: EncoderDecoder,
    memory: Tensor,
    src_layout: Layout,
    tgt: Tensor,
    layout: Layout,
    how: Switches,
) -> Tensor:
    """`model.decode` row by row: memory (N_src, D) and tgt (B, T) to (N, D)."""
    keys_and_values = memory_keys_and_values(model.decoder, memory, src_layout, how)
    length = tgt.size(1)
    future = memory.new_full((length, length), -math.inf).triu(1)  # (T, T): padding comes later
    x = embed(model.tgt_embed, tgt, layout, how)
    for layer, pair in zip(model.decoder.layers, keys_and_values, strict=True):
        look = partial(self_attention, layer.self_attn, layout=layout, bias=future, how=how)
        cross = partial(
            cross_attention,
            layer.src_attn,
            layout=layout,
            keys_and_values=pair,
            bias=src_layout.bias,
            how=how,
        )
        x = residual(layer.sublayer[0], x, look, how)
        x = residual(layer.sublayer[1], x, cross, how)
        x = residual(layer.sublayer[2], x, partial(feed_forward, layer.feed_forward, how=how), how)
    return normed(model.decoder.norm, x, how)


# %%
class LinearCrossEntropy(Function):
    """The generator's product and the smoothed loss in one, a few rows at a time.

    The logits (N, V) never exist as a whole, and the smoothed targets not at all: with
    p = softmax(z), ∂ℓ/∂z = p − (1 − ε)·onehot(y) − ε/V, and only p needs the vocabulary's width.
    The gradients are made on the way forward, while a chunk of logits is still in the cache.
    """

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
    ) -> tuple[Tensor, Tensor]:
        """x (N, D), weight (V, D), bias (V,), labels (N,); to the sums of `LabelSmoothing`."""
        wanted = any(ctx.needs_input_grad)
        mean_weight, mean_bias = weight.mean(0), bias.mean()  # the mean logit is x·w̄ + b̄
        grads = [torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)]
        nll, spread = x.new_zeros(()), x.new_zeros(())
        for start in range(0, x.size(0), chunk):
            rows = x[start : start + chunk]  # (n, D)
            logits = affine(rows, weight, bias, onednn)  # (n, V)
            right = logits.gather(1, labels[start : start + chunk, None]).squeeze(1)  # (n,)
            highest = logits.amax(1)
            p = torch.softmax(logits, dim=1, out=logits)
            log_z = highest - p.amax(1).log()  # the largest p is exp(highest − log Z)
            nll += (log_z - right).sum()
            spread += (log_z - rows @ mean_weight - mean_bias).sum()
            if wanted:
                grads[0][start : start + chunk] = affine(p, weight.T, None, onednn)
                grads[1].addmm_(p.T, rows)
                grads[2] += p.sum(0)
        if wanted:
            subtract_targets(grads, x, weight, labels, smoothing)
            ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(nll)
        return (1 - smoothing) * nll + smoothing * spread, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients from the way forward, times the loss's own."""
        return *(stored * grad for stored in ctx.saved_tensors), None, None, None, None


def subtract_targets(
    grads: list[Tensor], x: Tensor, weight: Tensor, labels: Tensor, smoothing: float
) -> None:
    """Subtract what q = (1 − ε)·onehot(y) + ε/V adds to the gradients by x, weight and bias."""
    rows, vocab = len(x), len(weight)
    by_x, by_weight, by_bias = grads
    certain = 1 - smoothing
    by_x.sub_(weight[labels], alpha=certain).sub_(weight.mean(0), alpha=smoothing)
    by_weight.index_add_(0, labels, x, alpha=-certain).sub_(x.sum(0), alpha=smoothing / vocab)
    counts = torch.bincount(labels, minlength=vocab).to(by_bias.dtype)
    by_bias.sub_(counts, alpha=certain).sub_(smoothing * rows / vocab)


# %%
ROWS_AT_ONCE = 512  # 512 × 8,192 logits are 16 MiB: they stay in the last cache


def rows_loss(
    generator: Generator, x: Tensor, labels: Tensor, criterion: LabelSmoothing, how: Switches
) -> tuple[Tensor, Tensor]:
    """`criterion(generator(x), labels)`: x (N, D), labels (N,), to two sums in nats."""
    if how.loss == "textbook":
        return criterion(generator(x), labels)
    x, proj = generator.narrow(x), generator.proj
    if how.loss == "torch":
        smoothed = F.linear_cross_entropy(
            x,
            proj.weight,
            labels,
            linear_bias=proj.bias,
            reduction="sum",
            ignore_index=PAD,
            label_smoothing=criterion.smoothing,
            options=nn.LinearCrossEntropyOptions(),
        )
        return smoothed, smoothed.detach()
    smoothing = criterion.smoothing
    return LinearCrossEntropy.apply(
        x, proj.weight, proj.bias, labels, smoothing, ROWS_AT_ONCE, how.onednn
    )


def fast_loss(
    model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing, how: Switches = FAST
) -> tuple[Tensor, Tensor]:
    """`batch_loss` by the fast path: the same model, the same two sums, the same gradients."""
    is_target = batch.tgt_y != criterion.padding_idx  # (B, T)
    src_layout = Layout(batch.src != criterion.padding_idx, how.packed)
    layout = Layout(is_target, how.packed)
    memory = encode_rows(model, batch.src, src_layout, how)
    x = decode_rows_of(model, memory, src_layout, batch.tgt, layout, how)  # (N, D)
    labels = layout.rows(batch.tgt_y)
    if how.targets_only and layout.full:
        real = layout.rows(is_target)
        x, labels = x[real], labels[real]
    return rows_loss(model.generator, x, labels, criterion, how)


# %%
def keep_memory() -> bool:
    """Have the C library keep freed memory for the next tensor. False where it isn't glibc."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mmap_max, trim_threshold, top_pad = -4, -1, -2  # the names of mallopt(3)
    libc = ctypes.CDLL(None)
    settings = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 64 * 2**20))
    return all([libc.mallopt(name, value) == 1 for name, value in settings])


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


def series_model(shape: Shape) -> EncoderDecoder:
    """Our model of that shape, all tables tied."""
    sizes = asdict(shape)
    vocab = sizes.pop("vocab")
    return make_model(vocab, vocab, tie="all", **sizes)


# %%
class TorchTransformer(nn.Module):
    """`nn.Transformer` with chapter 3's embedding around it: batch to logits (B, T, V)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed = nn.Sequential(
            Embeddings(shape.d_model, shape.vocab), PositionalEncoding(shape.d_model, shape.dropout)
        )
        nn.init.normal_(self.embed[0].lut.weight, std=shape.d_model**-0.5)
        self.body = nn.Transformer(
            shape.d_model,
            shape.h,
            shape.N,
            shape.N,
            shape.d_ff,
            shape.dropout,
            batch_first=True,
            norm_first=shape.norm_first,
        )
        self.generator = nn.Linear(shape.d_model, shape.vocab)
        self.generator.weight = self.embed[0].lut.weight

    def forward(self, batch: Batch) -> Tensor:
        """Logits of every target position."""
        padding = batch.src == PAD
        x = self.body(
            self.embed(batch.src),
            self.embed(batch.tgt),
            tgt_mask=~subsequent_mask(batch.tgt.size(1))[0],
            src_key_padding_mask=padding,
            tgt_key_padding_mask=batch.tgt == PAD,
            memory_key_padding_mask=padding,
        )
        return self.generator(x)


class Marian(nn.Module):
    """Hugging Face's `MarianMTModel`: batch to logits (B, T, V)."""

    def __init__(self, shape: Shape):
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        sides = {}
        for side in ("encoder", "decoder"):
            sides[f"{side}_layers"] = shape.N
            sides[f"{side}_ffn_dim"] = shape.d_ff
            sides[f"{side}_attention_heads"] = shape.h
        drops = ("dropout", "attention_dropout", "activation_dropout")
        config = MarianConfig(
            vocab_size=shape.vocab,
            d_model=shape.d_model,
            activation_function="relu",
            max_position_embeddings=MAX_LEN,
            scale_embedding=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            forced_eos_token_id=EOS,
            decoder_start_token_id=BOS,
            use_cache=False,
            **sides,
            **dict.fromkeys(drops, shape.dropout),
        )
        self.body = MarianMTModel(config)

    def forward(self, batch: Batch) -> Tensor:
        """Logits of every target position."""
        return self.body(
            input_ids=batch.src,
            attention_mask=(batch.src != PAD).long(),
            decoder_input_ids=batch.tgt,
            use_cache=False,
        ).logits


class XTransformers(nn.Module):
    """x-transformers' encoder and decoder, tables tied: batch to logits (B, T, V)."""

    def __init__(self, shape: Shape):
        super().__init__()
        from x_transformers import XTransformer

        sides = {}
        for side in ("enc", "dec"):
            sides |= {
                f"{side}_num_tokens": shape.vocab,
                f"{side}_max_seq_len": MAX_LEN,
                f"{side}_depth": shape.N,
                f"{side}_heads": shape.h,
                f"{side}_attn_dim_head": shape.d_model // shape.h,
                f"{side}_ff_mult": shape.d_ff / shape.d_model,
                f"{side}_attn_dropout": shape.dropout,
                f"{side}_ff_dropout": shape.dropout,
                f"{side}_emb_dropout": shape.dropout,
                f"{side}_attn_flash": True,
            }
        self.body = XTransformer(dim=shape.d_model, tie_token_emb=True, **sides)
        self.body.decoder.net.to_logits.weight = self.body.encoder.token_emb.emb.weight

    def forward(self, batch: Batch) -> Tensor:
        """Logits of every target position."""
        real = batch.src != PAD
        memory = self.body.encoder(batch.src, mask=real, return_embeddings=True)
        return self.body.decoder.net(
            batch.tgt, mask=batch.tgt != PAD, context=memory, context_mask=real
        )


PEERS = {
    "nn.Transformer": TorchTransformer,
    "MarianMTModel": Marian,
    "x-transformers": XTransformers,
}


def peer_loss(model: nn.Module, batch: Batch, criterion: LabelSmoothing) -> tuple[Tensor, Tensor]:
    """The smoothed loss as a user of PyTorch would write it, summed over the real tokens."""
    loss = F.cross_entropy(
        model(batch).flatten(0, 1),
        batch.tgt_y.flatten(),
        ignore_index=PAD,
        label_smoothing=criterion.smoothing,
        reduction="sum",
    )
    return loss, loss.detach()


# %%
@dataclass(frozen=True)
class Contender:
    """What a benchmark times: a model, how it is fed, and how it is run."""

    model: str = "series"  # or one of PEERS
    batches: Literal["fixed", "random", "buckets"] = "buckets"
    how: dict[str, Any] | None = None  # our switches; None is the textbook's own code
    keep_memory: bool = False
    fused_adam: bool = False
    set_to_none: bool = True
    threads: int = 2
    compiled: bool = False
    shape: dict[str, Any] | None = None  # what differs from SMALL


PACKAGES = {"MarianMTModel": ("transformers",), "x-transformers": ("x_transformers",)}


# %%
def loss_function(contender: Contender) -> Callable[..., tuple[Tensor, Tensor]]:
    """What the contender minimises: (model, batch, criterion) to two sums."""
    loss_of = peer_loss if contender.model in PEERS else batch_loss
    if contender.how is not None:
        loss_of = partial(fast_loss, how=Switches(**contender.how))
    return torch.compile(loss_of, dynamic=True) if contender.compiled else loss_of


def contender_step(contender: Contender) -> tuple[nn.Module, Callable[[Batch], float]]:
    """The contender's model, and a function that makes one full optimizer step on a batch."""
    torch.manual_seed(0)
    torch.set_num_threads(contender.threads)
    if contender.keep_memory:
        keep_memory()
    shape = replace(SMALL, **(contender.shape or {}))
    model = PEERS[contender.model](shape) if contender.model in PEERS else series_model(shape)
    loss_of = loss_function(contender)
    criterion = LabelSmoothing(0.1)
    adam = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9}
    optimizer = torch.optim.Adam(model.parameters(), fused=contender.fused_adam or None, **adam)
    model.train()

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=contender.set_to_none)
        loss, _ = loss_of(model, batch, criterion)
        (loss / batch.ntokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item() / batch.ntokens

    return model, step


# %%
def serve(contender: Contender, batches_file: str) -> None:
    """A contender in a process of its own: reads batch numbers, writes what each step took.

    A line in is the number of a batch, a line out the JSON of the step's seconds and its loss. When
    the input ends, a last line tells the memory and the parameters.
    """
    replies, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    batches = [
        batch_as(contender.batches, [Example(*pair) for pair in pairs])
        for pairs in json.loads(Path(batches_file).read_text(encoding="utf-8"))
    ]
    for package in PACKAGES.get(contender.model, ()):
        importlib.import_module(package)  # now, so that its own memory isn't counted
    before = peak_bytes()
    model, step = contender_step(contender)
    for line in sys.stdin:
        batch = batches[int(line)]
        start = time.perf_counter()
        loss = step(batch)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": loss}), file=replies, flush=True)
    size = sum(p.numel() for p in model.parameters())
    report = {"peak_bytes": peak_bytes() - before, "parameters": size}
    print(json.dumps(report), file=replies, flush=True)


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# %%
def batch_as(kind: str, examples: Sequence[Example]) -> Batch:
    """The examples as one batch: padded to the longest of them, or to `FIXED_WIDTH` if "fixed"."""
    if kind != "fixed":
        return make_batch(examples)
    sides = ([e.src for e in examples], [e.tgt for e in examples])
    # The target is one longer: its input and its labels are both FIXED_WIDTH wide.
    filler = ([PAD] * FIXED_WIDTH, [PAD] * (FIXED_WIDTH + 1))
    return Batch(*(pad_rows([*side, more])[:-1] for side, more in zip(sides, filler, strict=True)))


def batches_to_time(
    kind: str, examples: Sequence[Example], max_tokens: int, count: int, seed: int = 0
) -> list[list[Example]]:
    """`count` batches of at most `max_tokens` a side, padding counted, made as `kind` says."""
    rng = random.Random(seed)
    if kind == "buckets":
        plan = token_batches(examples, max_tokens, rng)
        return [[examples[i] for i in batch] for batch in plan[:count]]
    examples = [e for e in examples if max(len(e.src), len(e.tgt) - 1) <= FIXED_WIDTH]
    batches = []
    while len(batches) < count:
        batch: list[Example] = []
        width = FIXED_WIDTH if kind == "fixed" else 0
        while True:
            example = rng.choice(examples)
            width = max(width, len(example.src), len(example.tgt) - 1)
            if width * (len(batch) + 1) > max_tokens:
                break
            batch.append(example)
        batches.append(batch)
    return batches


# %%
@dataclass
class BenchOptions:
    """What a benchmark runs on."""

    corpus: Literal["auto", "sample", "multi30k"] = "auto"
    """Where batches come from: Multi30k if MULTI30K_DIR is set, else the sample corpus."""
    rounds: int = 7
    """Passes over the batches; the median counts."""
    count: int = 4
    """Batches of a pass."""
    max_tokens: int = 2048
    """Tokens in a batch on either side, padding counted."""
    save: bool = False
    """Write the record into results/."""


# %%
class Worker:
    """A contender's process, and what its steps have taken so far."""

    def __init__(self, contender: Contender, batches: list[list[Example]], folder: Path):
        path = folder / f"{contender.batches}.json"
        path.write_text(json.dumps([[(e.src, e.tgt) for e in batch] for batch in batches]))
        self.tokens = [
            sum(len(e.tgt) - 1 for e in batch) for batch in batches
        ]  # a pass's, by batch
        self.rates: list[float] = []
        code = "import json, sys; from scripts.ch07_going_fast import Contender, serve; "
        code += "serve(Contender(**json.loads(sys.argv[1])), sys.argv[2])"
        arguments = [sys.executable, "-c", code, json.dumps(asdict(contender)), str(path)]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def step(self, number: int) -> float:
        """Seconds of one optimizer step on batch `number`."""
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self.reply()["seconds"]

    def reply(self) -> dict[str, float]:
        """The process's next line. Raises RuntimeError where it died."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a benchmark's process died: its complaint stands above")
        return json.loads(line)

    def round(self) -> None:
        """One pass over the batches; notes real target tokens a second."""
        seconds = sum(self.step(number) for number in range(len(self.tokens)))
        self.rates.append(sum(self.tokens) / seconds)

    def finish(self) -> dict[str, float]:
        """End the process: what was measured, medians with their spread."""
        self.process.stdin.close()
        report = self.reply()
        self.process.wait()
        middle = statistics.median(self.rates)
        return {
            "tokens_per_second": round(middle, 1),
            "lowest": round(min(self.rates), 1),
            "highest": round(max(self.rates), 1),
            "seconds_per_step": round(sum(self.tokens) / len(self.tokens) / middle, 4),
            **report,
        }


def race(
    contenders: dict[str, Contender], examples: Sequence[Example], options: BenchOptions
) -> tuple[dict[str, dict[str, float]], list[float], dict[str, list[list[Example]]]]:
    """Time all contenders in turns: their reports, the matrix rates between, and what each was fed."""
    feeds = {
        kind: batches_to_time(kind, examples, options.max_tokens, options.count)
        for kind in dict.fromkeys(contender.batches for contender in contenders.values())
    }
    fed = {name: feeds[contender.batches] for name, contender in contenders.items()}
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            name: Worker(contender, fed[name], Path(folder))
            for name, contender in contenders.items()
        }
        for worker in tqdm(workers.values(), desc="warm-up"):
            worker.round()
            worker.rates.clear()
        rates = []
        for _ in tqdm(range(options.rounds), desc="rounds"):
            rates.append(matrix_rate())
            for worker in workers.values():
                worker.round()
        return {name: worker.finish() for name, worker in workers.items()}, rates, fed


# %%
@dataclass(frozen=True)
class Product:
    """`times` matrix products (n, i, j) @ (n, j, k) of the forward pass."""

    name: str
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


def forward_products(shape: Shape, lengths: Sequence[tuple[int, int]]) -> list[Product]:
    """All matrix products of one forward pass over sentences of these (source, target) lengths."""
    D, F, N = shape.d_model, shape.d_ff, shape.N
    sources, targets = (sum(side) for side in zip(*lengths, strict=True))  # rows
    listed = [
        Product("Q, K, V of the source", 1, sources, D, 3 * D, N),
        Product("Q, K, V of the target", 1, targets, D, 3 * D, N),
        Product("cross-attention's Q", 1, targets, D, D, N),
        Product("cross-attention's K, V", 1, sources, D, 2 * D, N),
        Product("heads to output, source", 1, sources, D, D, N),
        Product("heads to output, target", 1, targets, D, D, 2 * N),
        Product("feed-forward, out", 1, sources, D, F, N),
        Product("feed-forward, out", 1, targets, D, F, N),
        Product("feed-forward, back", 1, sources, F, D, N),
        Product("feed-forward, back", 1, targets, F, D, N),
        Product("logits", 1, targets, D, shape.vocab),
    ]
    head = D // shape.h
    for s, t in lengths:
        for queries, keys in ((s, s), (t, t), (t, s)):
            listed.append(Product("scores", shape.h, queries, head, keys, N))
            listed.append(Product("weights · V", shape.h, queries, keys, head, N))
    return listed


def step_flops(shape: Shape, lengths: Sequence[tuple[int, int]]) -> int:
    """Operations of a training step's products: each forward product has two of its size backward."""
    return 3 * sum(product.flops for product in forward_products(shape, lengths))


# %%
def least_seconds(
    shape: Shape, lengths: Sequence[tuple[int, int]], rate: float, bandwidth: float
) -> float:
    """The time under which no step can be: every product at the roof, and Adam's traffic.

    All else (softmax, dropout, LayerNorm, sums) is taken to cost nothing, as if it happened while
    the numbers pass by. `rate` is in operations a second, `bandwidth` in bytes a second.
    """
    products = forward_products(shape, lengths)
    at_roof = 3 * sum(max(p.flops / rate, p.bytes / bandwidth) for p in products)
    return at_roof + ADAM_BYTES * parameter_count(shape) / bandwidth


ADAM_BYTES = (
    4 * 7
)  # a weight's gradient, value and two moments are read, all but the gradient written


def parameter_count(shape: Shape) -> int:
    """Weights of our model of that shape."""
    with torch.device("meta"):
        return sum(p.numel() for p in series_model(shape).parameters())


# %%
def best_seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The shortest of several runs: what the machine can, when nothing disturbs it."""
    function()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def matrix_rate(repeats: int = 5) -> float:
    """Operations a second of this machine's best float32 product: squares of 1,024 and 2,048."""
    best = 0.0
    for n in (1024, 2048):
        a, b = torch.randn(n, n), torch.randn(n, n)
        for onednn in (False, True):
            seconds = best_seconds(lambda: affine(a, b, None, onednn), repeats)  # noqa: B023
            best = max(best, 2 * n**3 / seconds)
    return best


def memory_bandwidth(megabytes: int = 256) -> float:
    """Bytes a second of adding a tensor too large for any cache to another: read, read, write."""
    a, b = torch.ones(2, megabytes * 2**18)
    return 3 * a.nbytes / best_seconds(lambda: a.add_(b))


# %%
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


# %%
def waterfall_contenders() -> tuple[dict[str, Contender], dict[str, Contender]]:
    """The chapter's steps, each on top of the ones before; and what was tried and not kept."""
    steps = {
        "every row padded to 72": Contender(batches="fixed"),
        "length buckets": Contender(),
        "freed memory is kept": Contender(keep_memory=True),
    }
    how = PLAIN
    for name, change in (
        ("logits only at targets", {"targets_only": True}),
        ("rows for real tokens only", {"packed": True}),
        ("LayerNorm in one kernel", {"fused_norm": True}),
        ("Q, K, V in one product", {"joint_projections": True}),
        ("attention by hand", {"attention": "ours"}),
        ("loss in chunks", {"loss": "ours"}),
        ("dropout from 16 bits", {"random_bits": True}),
        ("oneDNN's products", {"onednn": True}),
    ):
        how = replace(how, **change)
        steps[name] = Contender(how=asdict(how), keep_memory=True)
    fast = replace(steps["oneDNN's products"], fused_adam=True)
    steps["Adam in one kernel"] = fast
    losers = {
        "PyTorch's attention": replace(fast, how=asdict(replace(FAST, attention="sdpa"))),
        "logits as a whole": replace(fast, how=asdict(replace(FAST, loss="textbook"))),
        "PyTorch's linear cross-entropy": replace(fast, how=asdict(replace(FAST, loss="torch"))),
        "gradients set to zero": replace(fast, set_to_none=False),
        "freed memory is given back": replace(fast, keep_memory=False),
        "one thread": replace(fast, threads=1),
        "no dropout at all": replace(fast, shape={"dropout": 0.0}),
        "textbook, torch.compile": Contender(keep_memory=True, compiled=True),
    }
    return steps, losers


def peer_contenders() -> dict[str, Contender]:
    """Our two paths and the peers, each fed in three ways; and with freed memory kept."""
    fast = Contender(how=asdict(FAST), fused_adam=True, keep_memory=True)
    contenders = {}
    for batches in ("fixed", "random", "buckets"):
        for model in ("textbook", *PEERS):
            name = "series" if model == "textbook" else model
            contenders[f"{model}, {batches}"] = Contender(name, batches)
    contenders["ours, random"] = replace(fast, batches="random")
    contenders["ours, buckets"] = fast
    for model in PEERS:
        contenders[f"{model}, buckets, memory kept"] = Contender(model, keep_memory=True)
    return contenders


# %%
def bench_examples(corpus: str, vocab: int) -> tuple[str, list[Example]]:
    """The name of the corpus that is read, and its training pairs in `vocab` BPE pieces."""
    if corpus == "auto":
        corpus = "multi30k" if "MULTI30K_DIR" in os.environ else "sample"
    pairs = load_corpus(corpus)["train"]
    lines = (line for pair in pairs for line in pair)
    # The sample corpus is too small for 8,192 pieces. The model keeps that size all the same.
    pieces = vocab if corpus == "multi30k" else min(vocab, 1000)
    return corpus, encode_pairs(pairs, BPETokenizer.train(lines, pieces))


# %%
def race_record(
    contenders: dict[str, Contender], options: BenchOptions, shape: Shape = SMALL
) -> dict[str, Any]:
    """Race `contenders` and put it on record: the reports, and how much of the machine each used."""
    corpus, examples = bench_examples(options.corpus, shape.vocab)
    reports, rates, feeds = race(contenders, examples, options)
    rate = statistics.median(rates)
    for name, report in reports.items():
        lengths = [[(len(e.src), len(e.tgt) - 1) for e in batch] for batch in feeds[name]]
        flops = sum(step_flops(shape, batch) for batch in lengths) / len(lengths)
        report["mfu"] = round(flops / report["seconds_per_step"] / rate, 4)
    return {
        "corpus": corpus,
        "shape": asdict(shape),
        "max_tokens": options.max_tokens,
        "batches": options.count,
        "rounds": options.rounds,
        "matrix_rate": round(rate),
        "matrix_rates": [round(r) for r in rates],
        "contenders": {name: asdict(contender) for name, contender in contenders.items()},
        "reports": reports,
    }


def bench_peers(options: BenchOptions) -> dict[str, Any]:
    """Our two paths against nn.Transformer, MarianMTModel and x-transformers, each fed three ways."""
    return race_record(peer_contenders(), options)


def bench_steps(options: BenchOptions) -> dict[str, Any]:
    """The chapter's steps one after another, what lost, and this machine's limits."""
    steps, losers = waterfall_contenders()
    operations = measured_operations()
    bandwidth = memory_bandwidth()
    record = race_record(steps | losers, options)
    examples = bench_examples(options.corpus, SMALL.vocab)[1]
    batches = batches_to_time("buckets", examples, options.max_tokens, options.count)
    lengths = [[(len(e.src), len(e.tgt) - 1) for e in batch] for batch in batches]
    rate = record["matrix_rate"]
    floors = [least_seconds(SMALL, batch, rate, bandwidth) for batch in lengths]
    return record | {
        "steps": list(steps),
        "losers": list(losers),
        "bandwidth": round(bandwidth),
        "operations": operations,
        "floor_seconds": round(statistics.mean(floors), 4),
        "account": account(Contender(how=asdict(FAST), fused_adam=True), batches),
        "account_textbook": account(Contender(), batches),
    }


def bench_base(options: BenchOptions) -> dict[str, Any]:
    """The paper's base model: the textbook path and ours, and where the time of ours goes."""
    shape = {name: value for name, value in asdict(BASE).items() if value != asdict(SMALL)[name]}
    fast = Contender(how=asdict(FAST), fused_adam=True, keep_memory=True, shape=shape)
    record = race_record({"textbook": Contender(shape=shape), "ours": fast}, options, BASE)
    examples = bench_examples(options.corpus, BASE.vocab)[1]
    batches = batches_to_time("buckets", examples, options.max_tokens, options.count)
    return record | {"account": account(fast, batches)}


# %%
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "mkldnn::_linear_pointwise"),
    "attention's products": ("aten::bmm", "aten::baddbmm"),
    "softmax, attention's and the loss's": ("softmax", "aten::amax", "logsumexp", "aten::exp"),
    "random bits": ("aten::random_", "aten::bernoulli_"),
    "copies": (
        "aten::copy_",
        "aten::cat",
        "index",
        "scatter",
        "gather",
        "aten::fill_",
        "aten::zero",
    ),
    "LayerNorm": ("layer_norm", "var_mean"),
    "Adam and clipping": ("adam", "addcdiv", "lerp", "norm", "foreach"),
}


def account(contender: Contender, batches: list[list[Example]]) -> dict[str, float]:
    """Seconds of a step by kind of operation, from PyTorch's profiler, and the rest."""
    from torch.profiler import ProfilerActivity, profile

    step = contender_step(contender)[1]
    padded = [make_batch(batch) for batch in batches]
    for batch in padded:
        step(batch)
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in padded:
            step(batch)
    total = time.perf_counter() - start
    seconds = dict.fromkeys([*KINDS, "sums, relu, dropout's products"], 0.0)
    for event in profiler.key_averages():
        if "::" in event.key and event.key.split("::")[0] in ("aten", "mkldnn"):
            seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    seconds["Python and autograd"] = max(0.0, total - sum(seconds.values()))
    return {kind: round(value / len(padded), 5) for kind, value in seconds.items()}


def kind_of(operation: str) -> str:
    """The kind under which `account` books an operation."""
    for kind, names in KINDS.items():
        if any(name in operation if "::" not in name else name == operation for name in names):
            return kind
    return "sums, relu, dropout's products"


# %%
AXES = {
    "length": [8, 16, 32, 64, 128, 256],
    "tokens": [256, 512, 1024, 2048, 4096, 8192],
    "width": [64, 128, 256, 512, 768],
    "depth": [1, 2, 3, 6, 9, 12],
}


def growth_setting(axis: str, value: int) -> tuple[Shape, int, int]:
    """Shape, sentences and length of a step where one axis is set and the others stay in the middle."""
    length = value if axis == "length" else 32
    tokens = value if axis == "tokens" else 2048
    shape = SMALL
    if axis == "width":
        shape = replace(shape, d_model=value, d_ff=4 * value)
    if axis == "depth":
        shape = replace(shape, N=value)
    return shape, tokens // length, length


def growth_point(axis: str, value: int, how: dict[str, Any] | None) -> dict[str, Any]:
    """Seconds, kept memory and operations of a step at one place of one axis."""
    shape, sentences, length = growth_setting(axis, value)
    contender = Contender(how=how, fused_adam=True, keep_memory=True, shape=asdict(shape))
    model, step = contender_step(contender)
    ids = torch.randint(EOS + 1, shape.vocab, (2, sentences, length + 1))
    batch = Batch(ids[0, :, 1:], ids[1])
    loss_of = loss_function(contender)
    return {
        "axis": axis,
        "value": value,
        "path": "ours" if how else "textbook",
        "seconds": best_seconds(lambda: step(batch), repeats=4),
        "bytes": saved_bytes(lambda: loss_of(model, batch, LabelSmoothing(0.1))),
        "flops": step_flops(shape, [(length, length)] * sentences),
    }


def bench_growth(options: BenchOptions) -> dict[str, Any]:
    """Seconds and memory of a step along four axes, by both paths; random ids, all rows full."""
    points = [
        growth_point(axis, value, how)
        for axis, values in AXES.items()
        for value in tqdm(values, desc=axis)
        for how in (None, asdict(FAST))
    ]
    return {"shape": asdict(SMALL), "points": points}


# %%
BENCHMARKS = {
    "peers": bench_peers,
    "steps": bench_steps,
    "base": bench_base,
    "growth": bench_growth,
}


def parse_command(argv: Sequence[str] | None = None) -> tuple[str, BenchOptions]:
    """The command line: which benchmark, and its options. Raises ValueError for what it can't read."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(
        prog="ch07_going_fast.py",
        description="Time a training step: against peers, step by step, and as it grows.",
        exit_on_error=False,
    )
    parser.add_argument("benchmark", choices=list(BENCHMARKS))
    parser.add_class_arguments(BenchOptions)
    try:
        chosen = parser.parse_args(list(sys.argv[1:] if argv is None else argv)).as_dict()
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return chosen.pop("benchmark"), BenchOptions(**chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: run a benchmark, print it, and save it if asked. Returns the exit code."""
    try:
        name, options = parse_command(argv)
        record = BENCHMARKS[name](options)
        if options.save:
            words = ["python", "scripts/ch07_going_fast.py", *sys.argv[1:]]
            save_record(f"speed-{name}", provenance(shlex.join(words), "cpu") | record)
        print(summary(record))
    except (ValueError, RuntimeError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def summary(record: dict[str, Any]) -> str:
    """A record's table for the terminal."""
    if "points" in record:
        return pd.DataFrame(record["points"]).to_string(index=False)
    table = pd.DataFrame(record["reports"]).T
    table["peak MiB"] = table.pop("peak_bytes") / 2**20
    rate = record["matrix_rate"] / 1e9
    return (
        f"{table.round(2).to_string()}\nmatrix rate {rate:.0f} GFLOP/s, corpus {record['corpus']}"
    )
