"""The fast path through the chapters' model: the same weights, outputs and gradients, faster.

`FastPath` walks through the modules of chapter 4 row by row, with the tricks of chapter 12; it owns
no weights. A switch for each trick says whether it is taken, so that each can be compared with the
textbook's way and timed alone. It trains; `fast.decoding` decodes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import check_length
from scripts.ch04_encoder_decoder import (
    EncoderDecoder,
    Generator,
    PositionwiseFeedForward,
    SublayerConnection,
)
from scripts.ch06_training import Batch, LabelSmoothing
from scripts.ch11_where_the_time_goes import affine
from scripts.ch12_going_fast import Layout, LinearCrossEntropy, keep_mask, keep_scale, softmax_
from scripts.fast import passes
from scripts.fast.passes import Attend, Drop, NormRows

BYTES_AT_ONCE = 16 * 2**20  # of logits: they stay in the last-level cache


@dataclass(frozen=True)
class Switches:
    """Which of chapter 12's tricks the forward and backward pass take.

    In `FAST` all are on that keep the numbers, in `PLAIN` none: the textbook's own operations,
    called from here. `HALF` rounds the factors of products; `STATIC` has what suits a GPU.
    """

    packed: bool = True  # rows for real tokens only
    fused_norm: bool = True  # LayerNorm in one kernel
    attention: Literal["ours", "sdpa"] = "ours"  # which without C is the textbook's
    loss: Literal["textbook", "ours"] = "ours"
    random_bits: bool = True  # dropout masks from 16 random bits an entry
    onednn: bool = True  # oneDNN's products; which library is faster depends on the machine
    compiled: bool = True  # norm, attention, dropout and the loss's softmax in C, if it compiles
    half: bool = False  # products of 16-bit factors; all else stays in 32 bits


FAST = Switches()
PLAIN = Switches(
    packed=False,
    fused_norm=False,
    loss="textbook",
    random_bits=False,
    onednn=False,
    compiled=False,
)
HALF = replace(FAST, half=True)
# Packed rows and our loss choose cells by the data, and a GPU would have to wait for that; our
# attention, dropout's 16 bits and oneDNN were written for a CPU.
STATIC = replace(PLAIN, fused_norm=True, attention="sdpa")


def switches_for(device: torch.device, half: bool = False) -> Switches:
    """The switches that suit a device: `FAST` on a CPU; static and PyTorch's own kernels on a GPU.

    With `half` a CPU multiplies 16-bit factors (on a GPU that is autocast's business).
    """
    if device.type != "cpu":
        return STATIC
    return HALF if half else FAST


def dropout_rate(module: nn.Module) -> float:
    """The rate that the module's own dropout applies now: 0 in evaluation."""
    return module.dropout.p if module.training else 0.0


class LinearProduct(Function):
    """`F.linear` in the dtype of x, by oneDNN if asked; weights and their gradients keep theirs.

    On x86 `F.linear` takes MKL for float32, which is the slower one on AMD's processors.
    """

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


@cache
def loss_in_chunks(onednn: bool, in_c: bool) -> type[LinearCrossEntropy]:
    """Chapter 12's loss, with oneDNN's products and the softmax in C, if asked."""

    class Loss(LinearCrossEntropy):
        product = staticmethod(partial(affine, onednn=onednn))
        softmax_ = staticmethod(passes.softmax_rows_ if in_c else softmax_)

    return Loss


class FastPath:
    """The model's modules, computed by these switches: each method does what its module does."""

    def __init__(self, switches: Switches = FAST):
        self.switches = switches

    def in_c(self, x: Tensor, *kinds: torch.dtype) -> bool:
        """Whether the compiled functions are wanted, and can work on x."""
        return self.switches.compiled and passes.suits(x, *kinds)

    def norm(self, norm: nn.Module, x: Tensor, wide: bool = False) -> Tensor:
        """x (N, D) to (N, D); in 16 bits if products are, for one comes next, unless `wide`."""
        kind = torch.bfloat16 if self.switches.half and not wide else x.dtype
        if not self.switches.fused_norm or isinstance(norm, nn.Identity):
            return norm(x).to(kind)
        if self.in_c(x, torch.float32):
            return NormRows.apply(x, norm.weight, norm.bias, norm.eps, kind)
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps).to(kind)

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """x·Wᵀ + b in the dtype of x."""
        if self.switches.onednn or self.switches.half:
            return LinearProduct.apply(x, layer.weight, layer.bias, self.switches.onednn)
        return F.linear(x, layer.weight, layer.bias)

    def project(self, x: Tensor, *linears: nn.Linear) -> Tensor:
        """Linear maps of x (N, D), side by side: (N, sum of their outputs)."""
        return torch.cat([self.linear(layer, x) for layer in linears], dim=1)

    def dropped(self, x: Tensor, p: float) -> Tensor:
        """Dropout of x at rate p."""
        if p and self.switches.random_bits:
            if self.in_c(x):
                return Drop.apply(x, None, p)
            return x * keep_mask(x.shape, p, x) * keep_scale(p)
        return F.dropout(x, p, training=p > 0)

    def dropped_sum(self, x: Tensor, y: Tensor, p: float) -> Tensor:
        """x + dropout(y): the end of every sublayer."""
        if self.switches.random_bits and self.in_c(x, torch.float32) and self.in_c(y):
            return Drop.apply(y, x, p)
        return x + self.dropped(y, p)

    def feed_forward(self, layer: PositionwiseFeedForward, x: Tensor) -> Tensor:
        """x (N, D) to (N, D)."""
        p, hidden = dropout_rate(layer), self.linear(layer.expand, x)  # (N, d_ff)
        if self.switches.random_bits and self.in_c(hidden):  # relu and dropout in one pass
            return self.linear(layer.contract, Drop.apply(hidden, None, p, True))
        return self.linear(layer.contract, self.dropped(hidden.relu(), p))

    def residual(
        self, connection: SublayerConnection, x: Tensor, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`connection` around `sublayer`: x (N, D) to (N, D)."""
        p, norm = dropout_rate(connection), connection.norm
        if connection.norm_first:
            return self.dropped_sum(x, sublayer(self.norm(norm, x)), p)
        factor = x.bfloat16() if self.switches.half else x  # for products; the sum stays wide
        return self.norm(norm, self.dropped_sum(x, sublayer(factor), p), wide=True)

    def attend(
        self,
        layer: MultiHeadedAttention,
        rows: Tensor,
        others: Tensor | None,
        places: tuple[Layout, Layout],
        bias: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """The heads' work without projections, from rows to (N, D).

        The rows are queries, keys and values (N, 3·D); or queries (N, D), and `others` keys and
        values (M, 2·D). `places` are the layouts of queries and of keys. Hides padding; or, if
        `causal`, the future (padding comes later); or what `bias`, added to the scores, says.
        """
        parts = (layer.project_query, layer.project_key, layer.project_value)
        widths = [len(part.weight) for part in parts]  # D each, as a rule
        in_c = self.switches.attention == "ours" and self.in_c(rows) and bias is None
        if in_c and passes.attends(widths, layer.h, places):
            starts = tuple(passes.starts_of(place) for place in places)
            return Attend.apply(rows, others, starts, layer.h, causal, dropout_rate(layer))
        if others is None:
            cells = places[0].spread(rows).split(widths, dim=-1)  # (B, T, D) each
        else:
            keys = places[1].spread(others).split(widths[1:], dim=-1)  # (B, S, D) each
            cells = (places[0].spread(rows), *keys)
        if bias is None and not causal and (real := places[1].real) is not None:
            wide = torch.promote_types(rows.dtype, torch.float32)
            bias = torch.where(real, 0.0, -math.inf).to(wide)[:, None, None, :]  # (B, 1, 1, S)
        return places[0].gather(self.attend_cells(layer, *cells, bias, causal))

    def attend_cells(
        self,
        layer: MultiHeadedAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """The same for rectangles: q (B, T, D), k and v (B, S, D), to (B, T, D).

        PyTorch's fastest kernel takes the causal mask by name; a mask of numbers rules it out.
        """
        q, k, v = (split_heads(x, layer.h) for x in (q, k, v))  # (B, H, T or S, d_k)
        p, causal = dropout_rate(layer), causal and bias is None
        if self.switches.attention == "sdpa":
            mask = None if bias is None else bias.to(q.dtype)
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=causal)
            return merge_heads(heads)
        if causal:
            wide, T = torch.promote_types(q.dtype, torch.float32), q.size(-2)
            bias = q.new_full((T, T), -math.inf, dtype=wide).triu(1)
        scores = q * q.size(-1) ** -0.5 @ k.mT  # (B, H, T, S)
        scores = scores if bias is None else scores + bias
        weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1)
        return merge_heads(self.dropped(weights.to(q.dtype), p) @ v)

    def self_attention(
        self,
        layer: MultiHeadedAttention,
        layout: Layout,
        x: Tensor,
        bias: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """From x to x: (N, D) to (N, D)."""
        rows = self.project(x, layer.project_query, layer.project_key, layer.project_value)
        heads = self.attend(layer, rows, None, (layout, layout), bias, causal)  # of (N, 3·D)
        return self.linear(layer.project_output, heads)

    def cross_attention(
        self,
        layer: MultiHeadedAttention,
        memory: Tensor,
        places: tuple[Layout, Layout],
        x: Tensor,
    ) -> Tensor:
        """From x (N, D) to the memory (M, D)."""
        others = self.project(memory, layer.project_key, layer.project_value)  # (M, 2·D)
        heads = self.attend(layer, self.linear(layer.project_query, x), others, places)
        return self.linear(layer.project_output, heads)

    def embed(self, modules: nn.Sequential, ids: Tensor, layout: Layout) -> Tensor:
        """Embedding and positions, row by row: ids (B, T) to (N, D)."""
        embedding, position = modules
        check_length(ids.size(1), position.pe.size(0))
        words = embedding(layout.rows(ids))  # (N, D)
        places = F.embedding(layout.positions, position.pe)  # (N, D)
        return self.dropped(words + places, dropout_rate(position))

    def encode(self, model: EncoderDecoder, src: Tensor, layout: Layout) -> Tensor:
        """`model.encode`: src (B, S) to the memory (N, D)."""
        x = self.embed(model.src_embed, src, layout)
        for layer in model.encoder.layers:
            x = self.residual(
                layer.sublayer[0], x, partial(self.self_attention, layer.self_attn, layout)
            )
            x = self.residual(layer.sublayer[1], x, partial(self.feed_forward, layer.feed_forward))
        return self.norm(model.encoder.norm, x)

    def decode(
        self,
        model: EncoderDecoder,
        memory: Tensor,
        src_layout: Layout,
        tgt: Tensor,
        layout: Layout,
    ) -> Tensor:
        """`model.decode`: memory (N_src, D) and tgt (B, T) to (N, D)."""
        x, places = self.embed(model.tgt_embed, tgt, layout), (layout, src_layout)
        for layer in model.decoder.layers:
            look = partial(self.self_attention, layer.self_attn, layout, causal=True)
            cross = partial(self.cross_attention, layer.src_attn, memory, places)
            x = self.residual(layer.sublayer[0], x, look)
            x = self.residual(layer.sublayer[1], x, cross)
            x = self.residual(layer.sublayer[2], x, partial(self.feed_forward, layer.feed_forward))
        return self.norm(model.decoder.norm, x)

    def target_rows(
        self, model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing
    ) -> tuple[Tensor, Tensor]:
        """What the generator gets to see: the decoder's rows (N, D), and their labels (N,)."""
        is_source, is_target = (ids != criterion.padding_idx for ids in (batch.src, batch.tgt_y))
        src_layout, layout = (Layout(real, self.switches.packed) for real in (is_source, is_target))
        memory = self.encode(model, batch.src, src_layout)
        x = self.decode(model, memory, src_layout, batch.tgt, layout)  # (N, D)
        labels = layout.rows(batch.tgt_y)
        if layout.full and self.switches.loss == "ours":  # which knows nothing of padding
            real = layout.rows(is_target)
            x, labels = x[real], labels[real]
        return x, labels

    def rows_loss(
        self, generator: Generator, x: Tensor, labels: Tensor, criterion: LabelSmoothing
    ) -> tuple[Tensor, Tensor]:
        """`criterion(generator(x), labels)`: x (N, D), labels (N,), to two sums in nats."""
        proj = generator.proj
        # Our loss makes gradients at once, and can't see that nobody wants them.
        if self.switches.loss == "textbook" or not torch.is_grad_enabled():
            return criterion(self.linear(proj, x), labels)
        chunk = max(1, BYTES_AT_ONCE // (len(proj.weight) * x.element_size()))  # rows
        loss = loss_in_chunks(self.switches.onednn, self.in_c(x))
        return loss.apply(x, proj.weight, proj.bias, labels, criterion.smoothing, chunk)


FAST_PATH = FastPath()


def fast_loss(
    model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing, switches: Switches = FAST
) -> tuple[Tensor, Tensor]:
    """`batch_loss` by the fast path: the same model, the same two sums, the same gradients."""
    path = FastPath(switches)
    x, labels = path.target_rows(model, batch, criterion)
    return path.rows_loss(model.generator, x, labels, criterion)
