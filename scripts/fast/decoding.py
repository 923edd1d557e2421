"""A decoding in progress that computes each token once, fast on a CPU.

Tests hold it equal to chapter 8's whole prefixes. What can be done once is done before the first
step; a beam's prefixes share one cache, and a family tree says which entries each prefix sees.
`fast.searching` searches with it.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import check_length
from scripts.ch04_encoder_decoder import DecoderLayer, EncoderDecoder, EncoderLayer
from scripts.ch08_decoding import attend_to_stored, keys_values_of
from scripts.ch13_decoding_fast import BLOCK, FamilyTree, Screen
from scripts.core.products import suits_onednn
from scripts.fast.fast import FAST, FastPath
from scripts.fast.kernels import (
    MOST_ROWS_OF_BYTES,
    Layers,
    Map,
    attend,
    multiplies_bytes,
    round_rows,
    scale_sums,
)
from scripts.fast.passes import FastLayout

PATH = FastPath(replace(FAST, compiled=False))  # its C is for many rows, and gradients


class Packed:
    """Linear maps of the same rows as one product, with the weights laid out for it beforehand."""

    def __init__(self, *linears: nn.Linear):
        weight = torch.cat([linear.weight.detach() for linear in linears])  # (F, D)
        self.bias = torch.cat([linear.bias.detach() for linear in linears])  # (F,)
        self.table = weight.T.contiguous()  # (D, F)
        self.onednn = suits_onednn(weight)
        if self.onednn:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.few = Map(self.table, self.bias)  # for a few rows

    def __call__(
        self,
        x: Tensor,
        norm: nn.Module | None = None,
        more: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        """norm(x)·Wᵀ + b, plus `more` or cut at 0: x (N, D) to (N, F)."""
        if self.few.takes(x):
            return self.few(x, norm, more, relu)
        return self.many(x, norm, more, relu)

    def many(self, x: Tensor, norm: nn.Module | None, more: Tensor | None, relu: bool) -> Tensor:
        """The same for any number of rows."""
        x = x if norm is None else PATH.norm(norm, x)
        if self.onednn and x.size(0) > 1:  # for one row PyTorch's plain product is faster
            pointwise, after = torch.ops.mkldnn._linear_pointwise, "relu" if relu else "none"
            if more is not None:
                return pointwise.binary(x, more, self.weight, self.bias, "add")
            return pointwise(x, self.weight, self.bias, after, [], "")
        if more is not None:
            return torch.addmm(more, x, self.table).add_(self.bias)
        y = torch.addmm(self.bias, x, self.table)
        return y.relu_() if relu else y


class Packed8(Packed):
    """The same with 8-bit factors: 127 steps for each row of x, and for each output."""

    def __init__(self, *linears: nn.Linear):
        whole, self.units = round_rows(torch.cat([linear.weight.detach() for linear in linears]))
        self.bias = torch.cat([linear.bias.detach() for linear in linears])  # (F,)
        self.few = Map(whole.T, self.bias, self.units)
        # Without VNNI PyTorch's products of bytes are slow, or overflow: those of floats aren't.
        self.table = whole.T if torch.cpu._is_vnni_supported() else whole.T.float()  # (D, F)

    def many(self, x: Tensor, norm: nn.Module | None, more: Tensor | None, relu: bool) -> Tensor:
        """As in `Packed`; the sums of integers are exact."""
        whole, unit = round_rows(x, norm)
        if self.table.dtype == torch.int8:
            sums = torch._int_mm(whole, self.table)  # (N, F)
        else:
            sums = (whole.float() @ self.table).int()
        return scale_sums(sums, unit, self.units, self.bias, more, relu)


PACKED = {"float32": Packed, "int8": Packed8}


def spread_by_heads(rows: Tensor, layout: FastLayout, parts: int, heads: int) -> Tensor:
    """Rows (N, parts·H·d_k) to (parts, B, H, S, d_k). Padding (hidden) gets the first row."""
    B, S = layout.shape
    numbers = torch.arange(len(rows), device=rows.device)
    row_of_cell = numbers.new_zeros(B * S).index_copy_(0, layout.slots, numbers)
    blocks = torch.arange(parts * heads, device=rows.device).view(parts, 1, heads, 1)
    places = row_of_cell.view(B, 1, S) * (parts * heads) + blocks  # (parts, B, H, S), of d_k each
    return F.embedding(places, rows.reshape(len(rows) * parts * heads, -1))


class PreparedLayer:
    """A layer ready for small steps, with the norms before and after sublayers; rows are (N, D)."""

    def __init__(self, layer: EncoderLayer | DecoderLayer, pack: type[Packed]):
        attn, ff = layer.self_attn, layer.feed_forward
        self.before = [part.norm if part.norm_first else None for part in layer.sublayer]
        self.after = [nn.Identity() if part.norm_first else part.norm for part in layer.sublayer]
        self.look_back = pack(attn.project_query, attn.project_key, attn.project_value)
        self.look_back_out = pack(attn.project_output)
        self.heads, self.expand, self.contract = attn.h, pack(ff.expand), pack(ff.contract)
        if hasattr(layer, "src_attn"):  # a decoder's
            self.look_across = pack(layer.src_attn.project_query)
            self.look_across_out = pack(layer.src_attn.project_output)

    def encode(self, x: Tensor, layout: FastLayout, real: Tensor | None) -> Tensor:
        """An encoder layer: the source's rows (N, D) to (N, D); `real` (B, 1, S) hides padding."""
        q, kv = self.look_back(x, self.before[0]).tensor_split([x.size(1)], dim=1)  # (N, D), 2·D
        q = layout.spread(q).flatten(0, 1)  # (B·S, D)
        heads = attend(q, spread_by_heads(kv, layout, 2, self.heads), real)  # (B·S, D)
        heads = layout.gather(heads.unflatten(0, layout.shape))  # (N, D)
        return self.feed_forward(PATH.norm(self.after[0], self.look_back_out(heads, more=x)))

    def decode(
        self, x: Tensor, past: Tensor, family: Tensor | None, source: Tensor, real: Tensor | None
    ) -> Tensor:
        """A decoder layer for k new tokens of each sentence: x (B·k, D) to (B·k, D).

        Their keys and values go into the last k places of `past` (2, B, H, L, d_k). `family`
        (B, k, L) says which places are theirs; `real` (B, 1, S) says so for `source`
        (2, B, H, S, d_k).
        """
        q, kv = self.look_back(x, self.before[0]).tensor_split([x.size(1)], dim=1)  # (B·k, D), 2·D
        kv = kv.unflatten(0, (past.size(1), -1)).unflatten(-1, (2, self.heads, -1))
        past[..., -kv.size(1) :, :] = kv.permute(2, 0, 3, 1, 4)
        heads = attend(q, past, family)  # (B·k, D)
        x = PATH.norm(self.after[0], self.look_back_out(heads, more=x))
        heads = attend(self.look_across(x, self.before[1]), source, real)  # (B·k, D)
        return self.feed_forward(PATH.norm(self.after[1], self.look_across_out(heads, more=x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The last sublayer: x (N, D) to (N, D)."""
        widened = self.expand(x, self.before[-1], relu=True)  # (N, d_ff)
        return PATH.norm(self.after[-1], self.contract(widened, more=x))


def fast_in_8_bits() -> bool:
    """Whether products of bytes are fast: by AVX512-VNNI in PyTorch, or by AVX2 in our C."""
    return torch.cpu._is_vnni_supported() or multiplies_bytes() > MOST_ROWS_OF_BYTES


class PreparedModel:
    """A model made ready for searching: its weights, laid out once; later changes don't count."""

    def __init__(self, model: EncoderDecoder, precision: str = "float32"):
        self.model, self.generator, self.precision = model, model.generator, precision
        self.parts = list(model.modules())  # finding them takes as long as a step of decoding
        pack = PACKED[precision]
        self.readers = [PreparedLayer(layer, pack) for layer in model.encoder.layers]
        self.writers = [PreparedLayer(layer, pack) for layer in model.decoder.layers]
        attentions = [layer.src_attn for layer in model.decoder.layers]
        self.few = Layers(self.writers, model.decoder.norm)  # for a few rows
        self.source_map = pack(*(m for a in attentions for m in (a.project_key, a.project_value)))
        self.vocabulary = pack(model.generator.proj)

    @functools.cached_property
    def screen(self) -> Screen | None:
        """What finds the likeliest token quickly, if the table is large and 8 bits are fast."""
        table, suits = self.generator.proj, self.precision == "float32" and fast_in_8_bits()
        V = len(table.weight)
        fits = suits and self.vocabulary.onednn and V >= 4096 and V % BLOCK == 0
        return Screen(table, Packed8(table)) if fits else None

    def modules(self) -> list[nn.Module]:
        """The model's parts, which `dropout_off` asks for."""
        return self.parts

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's own, not the copies."""
        return self.model.parameters()

    def read(self, src: Tensor, real: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys and values (layers, 2, B, H, S, d_k) of src (B, S), and which are real (B, 1, S)."""
        layout = FastLayout(real, packed=src.is_cpu)
        x = PATH.embed(self.model.src_embed, src, layout)  # (N, D)
        real = None if layout.real is None else layout.real.unsqueeze(1)
        for layer in self.readers:
            x = layer.encode(x, layout, real)
        memory = PATH.norm(self.model.encoder.norm, x)
        L, H = len(self.writers), self.writers[0].heads
        parts = spread_by_heads(self.source_map(memory), layout, 2 * L, H)
        return parts.unflatten(0, (L, 2)), real

    def write(
        self, x: Tensor, past: Tensor, family: Tensor | None, source: Tensor, real: Tensor | None
    ) -> Tensor:
        """The decoder for k new tokens of each sentence: embedded (B·k, D) to last rows (B·k, D).

        As in `PreparedLayer.decode`; `past` and `source` are (layers, 2, B, H, L or S, d_k).
        """
        if self.few.takes(x, past):
            return self.few.decode(x, past, family, source, real)
        for layer, own, read in zip(self.writers, past, source, strict=True):
            x = layer.decode(x, own, family, read, real)
        return PATH.norm(self.model.decoder.norm, x)

    def logits(self, x: Tensor) -> Tensor:
        """The decoder's last rows (N, D) to logits (N, V)."""
        return self.vocabulary(x)


def made_ready(model: nn.Module | PreparedModel, precision: str = "float32") -> Any:
    """A Transformer as a `PreparedModel`; what is one, or can't be, stays as it is."""
    return PreparedModel(model, precision) if hasattr(model, "tgt_embed") else model


class CachedDecoding:
    """A decoding that computes each token once: what chapter 8's `CopiedCache` does."""

    def __init__(self, model: EncoderDecoder | PreparedModel, src: Tensor, src_mask: Tensor | None):
        self.model = made_ready(model)
        real = torch.ones_like(src, dtype=torch.bool) if src_mask is None else src_mask.squeeze(1)
        self.source, self.real = self.model.read(src, real)  # (layers, 2, B, H, S, d_k), (B, 1, S)
        self.past = self.source[..., :0, :]  # nothing yet; it will have room to grow
        self.tree = FamilyTree(len(src), src.device)
        self.length, self.logits = 0, self.model.logits  # steps so far; rows to what may come next

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each prefix by one of tokens (B, k): the decoder's last positions (B·k, D)."""
        embedding, position = self.model.model.tgt_embed
        check_length(self.length + 1, position.pe.size(0))
        x = embedding(tokens).flatten(0, 1) + position.pe[self.length]  # (B·k, D)
        k = tokens.size(1)
        self.tree.enter(k)
        family = None if k == 1 else self.tree.ancestors  # an only child descends from all
        used, room = self.tree.ancestors.size(-1), self.past.size(-2)
        if used > room:  # first for as many steps as the source has tokens, then doubled
            size = max(used, 2 * room or k * (self.source.size(-2) + 4))
            self.past = F.pad(self.past, (0, 0, 0, size - room))
        past = self.past[..., :used, :]  # (layers, 2, B, H, L, d_k)
        self.length += 1
        return self.model.write(x, past, family, self.source, self.real)

    def follow(self, origin: Tensor) -> None:
        """Let the prefixes be those numbered origin (B, k), counted within each source."""
        self.tree.follow(origin)

    def keep(self, rows: Tensor) -> None:
        """Go on with the sources numbered rows (N,); those that move are copied."""
        N = len(rows)
        places = (rows != torch.arange(N, device=rows.device)).nonzero().squeeze(1)
        for x in (self.source, self.past[..., : self.tree.ancestors.size(-1), :]):
            x.index_copy_(2, places, x.index_select(2, rows[places]))
        self.source, self.past = self.source[:, :, :N], self.past[:, :, :N]
        self.tree.ancestors = self.tree.ancestors[rows]
        self.real = None if self.real is None else self.real[rows]


class StackDecoding:
    """Texts of chapter 17's `OneStack` in progress; for `write_and_leave`.

    Layer i keeps in `past` the keys and values of all L tokens so far, (2, B, H, L, d_k).
    """

    def __init__(self, model: nn.Module):
        self.model, self.length = model, 0
        self.past: list[Tensor | None] = [None] * len(model.stack.layers)

    def read(self, ids: Tensor, places: Tensor, mask: Tensor | None = None) -> Tensor:
        """New tokens ids (B, T) at places (B|1, T), mask (B, T, L + T) or all: to (B, T, D)."""
        embedding, position = self.model.embed
        x = embedding(ids) + position.pe[places]  # (B, T, D)
        for i, layer in enumerate(self.model.stack.layers):
            x = layer.sublayer[0](x, functools.partial(self.look, i, layer.self_attn, mask))
            x = layer.sublayer[1](x, layer.feed_forward)
        return self.model.stack.norm(x)

    def look(self, i: int, attn: MultiHeadedAttention, mask: Tensor | None, x: Tensor) -> Tensor:
        """Self-attention of layer i from new x (B, T, D) to all that is cached and to itself."""
        stored = keys_values_of(attn, x)  # (2, B, H, T, d_k)
        if self.past[i] is not None:
            stored = torch.cat((self.past[i], stored), dim=-2)  # (2, B, H, L + T, d_k)
        self.past[i] = stored
        return attend_to_stored(attn, x, stored, None if mask is None else mask.unsqueeze(1))

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each text by one of tokens (B, 1): the last positions (B, D)."""
        self.length += 1
        return self.read(tokens, torch.tensor([[self.length - 1]]))[:, -1]

    def logits(self, x: Tensor) -> Tensor:
        """Last positions x (B, D) to what may come next, (B, V)."""
        return self.model.generator(x)

    def keep(self, rows: Tensor) -> None:
        """Go on with the texts numbered rows (N,) alone."""
        self.past = [stored[:, rows] for stored in self.past]
