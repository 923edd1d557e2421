"""Chapter 4's Transformer with parts of chapter 22 in place of its own: for the rows of `block`."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from scripts.ch01_attention import attention
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch04_encoder_decoder import (
    EncoderDecoder,
    LayerNorm,
    PositionwiseFeedForward,
    initialise,
)
from scripts.ch19_ablations import drop_positions
from scripts.ch22_todays_block import RMSNorm, SwiGLU, rotated


class PartAttention(MultiHeadedAttention):
    """Chapter 2's layer, any mask, with the parts of chapter 22 that are asked for.

    `groups` heads of keys and values (all h without it), an RMSNorm on each query and key if
    `normed`, queries and keys turned by their positions if `rotary`.
    """

    def __init__(
        self,
        h: int,
        d_model: int,
        dropout: float = 0.1,
        groups: int | None = None,
        normed: bool = False,
        rotary: bool = False,
    ):
        super().__init__(h, d_model, dropout)
        self.groups, self.rotary = groups or h, rotary
        width = d_model // h * self.groups
        self.project_key, self.project_value = nn.Linear(d_model, width), nn.Linear(d_model, width)
        norm = partial(RMSNorm, d_model // h) if normed else nn.Identity
        self.query_norm, self.key_norm = norm(), norm()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """As in `MultiHeadedAttention`."""
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)  # (B, 1, T, S)
        q = self.query_norm(split_heads(self.project_query(query), self.h))  # (B, H, T, d_k)
        k = self.key_norm(split_heads(self.project_key(key), self.groups))  # (B, G, S, d_k)
        v = split_heads(self.project_value(value), self.groups)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        each = self.h // self.groups
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))  # (B, H, S, d_k)
        return self.project_output(merge_heads(attention(q, k, v, mask, self.dropout)[0]))


class SquaredReLU(PositionwiseFeedForward):
    """max(0, x·W₁ + b₁)²·W₂ + b₂ at every position (So et al. 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., D), through (..., d_ff)."""
        return self.contract(self.dropout(F.relu(self.expand(x)).square()))


def exchange(model: nn.Module, kind: type, make: Callable[[str, nn.Module], nn.Module]) -> None:
    """Replace every part of exactly this kind by `make(its name, the part)`, fresh or the same."""
    for name, part in list(model.named_modules()):
        if type(part) is kind:
            parent, _, last = name.rpartition(".")
            new = make(name, part)
            if new is not part:
                initialise(new)
                setattr(model.get_submodule(parent), last, new)


def attend_by(
    model: nn.Module,
    kind: Callable[..., nn.Module],
    groups: int | None = None,
    across: bool = False,
) -> None:
    """Let self-attention be `kind(H, D, dropout)`, or with `across` cross-attention alone.

    `groups`, if the kind has them, are the decoder's: an encoder keeps no cache, so it keeps all
    its heads.
    """

    def make(name: str, old: nn.Module) -> nn.Module:
        sizes = (old.h, old.project_query.in_features, old.dropout.p)
        if name.endswith("src_attn") != across:
            return old
        if groups is None:
            return kind(*sizes)
        return kind(*sizes, groups=old.h if name.startswith("encoder") else groups)

    exchange(model, MultiHeadedAttention, make)


def feed_by(model: nn.Module, make: Callable[[int, int, float], nn.Module]) -> None:
    """Let each feed-forward layer be `make(D, F, dropout)`, of the old one's sizes."""
    exchange(
        model,
        PositionwiseFeedForward,
        lambda _, old: make(old.expand.in_features, old.expand.out_features, old.dropout.p),
    )


def norm_by_length(model: nn.Module) -> None:
    """Let each norm be an RMSNorm."""
    exchange(model, LayerNorm, lambda _, old: RMSNorm(len(old.weight)))


def gated(d_model: int, d_ff: int, dropout: float) -> nn.Module:
    """SwiGLU with as many weights as 2017's layer of width `d_ff`."""
    return SwiGLU(d_model, round(2 * d_ff / 3), dropout)


def zero_outputs(model: nn.Module) -> None:
    """Set to zero what each attention and feed-forward layer adds at the start."""
    for name, part in model.named_modules():
        if name.endswith(("project_output", "contract")):
            for p in part.parameters():
                nn.init.zeros_(p)


def renew(model: EncoderDecoder, zeroed: bool = True) -> None:
    """Give a fresh pre-norm Transformer all parts of today, in place; what is tied stays tied."""
    attend_by(model, partial(PartAttention, normed=True, rotary=True), groups=2)
    feed_by(model, gated)
    norm_by_length(model)
    drop_positions(model)  # they are inside attention
    if zeroed:
        zero_outputs(model)
