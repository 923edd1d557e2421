# %% [markdown]
# # Chapter 4 · Encoder and decoder

# %%
import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import (
    MAX_LEN,
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
)


# %%
def clones(module: nn.Module, N: int) -> nn.ModuleList:
    """N independent copies of `module`."""
    return nn.ModuleList(copy.deepcopy(module) for _ in range(N))


# %%
class LayerNorm(nn.Module):
    """Each vector shifted to mean 0 and scaled to variance 1, then a learned scale and shift.

    The variance is the biased one and `eps` stands under the root (Ba et al. 2016), so that the
    result is that of `nn.LayerNorm`.
    """

    def __init__(self, features: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to (..., D)."""
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)  # (..., 1) each
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


# %%
class SublayerConnection(nn.Module):
    """A residual connection around a sublayer, with dropout and LayerNorm (§3.1, §5.4).

    Post-norm, the paper's: LayerNorm(x + Dropout(Sublayer(x))).
    Pre-norm (`norm_first`): x + Dropout(Sublayer(LayerNorm(x))).
    """

    def __init__(self, size: int, dropout: float, norm_first: bool = False):
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, D) to (B, T, D)."""
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


# %%
class PositionwiseFeedForward(nn.Module):
    """max(0, x·W₁ + b₁)·W₂ + b₂ at each position alike (§3.3, equation 2)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1):
        super().__init__()
        self.expand = nn.Linear(d_model, d_ff)
        self.contract = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) to (B, T, D), through (B, T, d_ff)."""
        return self.contract(self.dropout(self.expand(x).relu()))


# %%
class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in its residual connection (§3.1)."""

    def __init__(
        self,
        size: int,
        self_attn: MultiHeadedAttention,
        feed_forward: PositionwiseFeedForward,
        dropout: float,
        norm_first: bool = False,
    ):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm_first), 2)

    def forward(self, x: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to (B, S, D)."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, src_mask))
        return self.sublayer[1](x, self.feed_forward)


# %%
class Encoder(nn.Module):
    """N encoder layers; pre-norm ends with one more LayerNorm, as its last sum is not yet normed."""

    def __init__(self, layer: EncoderLayer, N: int, norm_first: bool = False):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size) if norm_first else nn.Identity()

    def forward(self, x: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to the memory (B, S, D)."""
        for layer in self.layers:
            x = layer(x, src_mask)
        return self.norm(x)


# %%
class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the memory, then feed-forward (§3.1)."""

    def __init__(
        self,
        size: int,
        self_attn: MultiHeadedAttention,
        src_attn: MultiHeadedAttention,
        feed_forward: PositionwiseFeedForward,
        dropout: float,
        norm_first: bool = False,
    ):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm_first), 3)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, D), memory (B, S, D), src_mask (B, 1, S), tgt_mask (B, T, T), to (B, T, D)."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


# %%
class Decoder(nn.Module):
    """N decoder layers; pre-norm ends with one more LayerNorm."""

    def __init__(self, layer: DecoderLayer, N: int, norm_first: bool = False):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size) if norm_first else nn.Identity()

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, D), memory (B, S, D), src_mask (B, 1, S), tgt_mask (B, T, T), to (B, T, D)."""
        for layer in self.layers:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.norm(x)


# %%
class Generator(nn.Module):
    """Vectors to scores over the vocabulary: the linear map before the softmax (§3.4).

    It returns logits (..., V), not probabilities: the loss and the search apply log-softmax
    themselves, once. `narrow` mirrors an embedding table of another width.
    """

    def __init__(self, d_model: int, vocab: int, width: int | None = None):
        super().__init__()
        width = width or d_model
        self.narrow = nn.Identity() if width == d_model else nn.Linear(d_model, width, bias=False)
        self.proj = nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to logits (..., V)."""
        return self.proj(self.narrow(x))


# %%
class EncoderDecoder(nn.Module):
    """The Transformer: source ids in, one vector for each target position out (Figure 1).

    `generator` turns those vectors into logits; it is called apart, so that a search asks for the
    last position only and the loss for real tokens only.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        src_embed: nn.Module,
        tgt_embed: nn.Module,
        generator: Generator,
    ):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.src_embed = src_embed
        self.tgt_embed = tgt_embed
        self.generator = generator

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """src ids (B, S), src_mask (B, 1, S), to the memory (B, S, D)."""
        return self.encoder(self.src_embed(src), src_mask)

    def decode(
        self,
        memory: Tensor,
        src_mask: Tensor | None,
        tgt: Tensor,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """memory (B, S, D), tgt ids (B, T), tgt_mask (B|1, T, T), to (B, T, D)."""
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """src ids (B, S), tgt ids (B, T), to (B, T, D)."""
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


# %%
def initialise(model: nn.Module) -> None:
    """Xavier-uniform matrices, zero biases; embedding tables N(0, 1/√D), so that × √D gives 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Embeddings):
            nn.init.normal_(module.lut.weight, std=module.d_model**-0.5)


# %%
def tie_weights(model: EncoderDecoder, tie: Literal["none", "decoder", "all"]) -> None:
    """Share storage between the target embedding and the generator, and with "all" the source's too (§3.4)."""
    if tie == "none":
        return
    source, target = model.src_embed[0].lut, model.tgt_embed[0].lut
    model.generator.proj.weight = target.weight
    if tie == "all":
        if source.weight.shape != target.weight.shape:
            raise ValueError(
                f"tying all needs one vocabulary, not {source.num_embeddings} source and "
                f"{target.num_embeddings} target tokens"
            )
        source.weight = target.weight


# %%
def make_model(
    src_vocab: int,
    tgt_vocab: int,
    N: int = 6,
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
    *,
    norm_first: bool = False,
    tie: Literal["none", "decoder", "all"] = "none",
    positions: Literal["sinusoidal", "learned"] = "sinusoidal",
    width: int | None = None,
    max_len: int = MAX_LEN,
) -> EncoderDecoder:
    """A Transformer, the paper's base model unless told otherwise (§3, Table 3).

    `dropout` reaches every dropout there is. `norm_first` chooses pre-norm. `tie` shares the
    embedding tables. `width` is the tables' own width where it differs from `d_model`.
    """
    position = {"sinusoidal": PositionalEncoding, "learned": LearnedPositions}[positions]
    attn = MultiHeadedAttention(h, d_model, dropout)
    ff = PositionwiseFeedForward(d_model, d_ff, dropout)
    copied = copy.deepcopy

    def embed(vocab: int) -> nn.Sequential:
        return nn.Sequential(
            Embeddings(d_model, vocab, width), position(d_model, dropout, max_len)
        )

    model = EncoderDecoder(
        Encoder(EncoderLayer(d_model, attn, ff, dropout, norm_first), N, norm_first),
        Decoder(
            DecoderLayer(d_model, copied(attn), copied(attn), copied(ff), dropout, norm_first),
            N,
            norm_first,
        ),
        embed(src_vocab),
        embed(tgt_vocab),
        Generator(d_model, tgt_vocab, width),
    )
    initialise(model)
    tie_weights(model, tie)  # last: the shared table keeps the embeddings' scale
    return model
