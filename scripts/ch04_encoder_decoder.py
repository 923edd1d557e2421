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
# # Chapter 4 · Encoder and decoder
#
# After this chapter you can build the whole Transformer from the parts of chapters 1 to 3, follow one pass through it shape by
# shape, count the numbers it learns, and prove that it computes the same as PyTorch's own `nn.Transformer`.
#
# | | |
# |---|---|
# | In the paper | §3.1 (stacks), §3.3 (feed-forward), §3.4 (embeddings and softmax), §5.4 (dropout), Table 3 |
# | Time | 30 minutes to read, 65 with the code; some seconds to run on a CPU |
# | Before, after | [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb) · [Chapter 5 · Norms and first steps](ch05_norms_and_first_steps.ipynb) |
#
# *If you read only three cells:* the two layers under "The model on one screen", the table under "One pass, step by step",
# the check under "The same as `nn.Transformer`".
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. New here: **F** = `d_ff`, the width inside the feed-forward layer, and **N**, the number of layers.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Literal

import pandas as pd
import torch
from torch import Tensor, nn

from scripts.book.charts import panels, titled
from scripts.book.exercises import check
from scripts.book.figures.model import stacks
from scripts.book.instruments import influence, scramble, traced
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, torch_attention_state
from scripts.ch03_embeddings_and_positions import Embeddings, PositionalEncoding

torch.set_default_dtype(torch.float64)  # so that "equal" can be checked to many digits

# %% [markdown]
# ## The map
#
# > **In short.** The encoder reads the source sentence and gives one vector for each source token: the *memory*.
# > The decoder writes the target sentence. Each of its layers looks at what is already written and at the memory.
#
# Both are stacks of N layers of the same form, each with its own weights; the paper has N = 6.

# %%
titled(
    stacks(6),
    "Two stacks and one bridge",
    "Read from the bottom. Only the memory, the last encoder layer's output, crosses over; "
    "each of the six decoder layers reads it.",
    wrap=72,
)

# %% [markdown]
# ## The model on one screen
#
# > **In short.** An encoder layer looks around (self-attention), then works on what it found (feed-forward). A decoder layer has one
# > more step in between: it looks at the source (cross-attention).
#
# **The parts.** Three are new. For $x \in \mathbb{R}^{D}$ at one position:
#
# | part | formula | in words |
# |---|---|---|
# | `LayerNorm` | $\gamma \odot \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta$, with mean $\mu$ and variance $\sigma^2$ of the D entries of $x$ | brings each vector to the same scale |
# | `SublayerConnection` | $\mathrm{LayerNorm}(x + \mathrm{Dropout}(f(x)))$ | adds the result of a step (a *sublayer*) to its input: a *residual connection* |
# | `PositionwiseFeedForward` | $\max(0,\; x W_1 + b_1)\, W_2 + b_2$, with $W_1$ (D, F) and $W_2$ (F, D) | widens, keeps what is positive, narrows again |
#
# The switch `norm_first` moves the LayerNorm to the front: $x + \mathrm{Dropout}(f(\mathrm{LayerNorm}(x)))$. This is *pre-norm*, the form of most later
# models; the paper's text has the form in the table, *post-norm*. Chapter 5 compares them.


# %%
class LayerNorm(nn.Module):
    """Each vector shifted to mean 0 and scaled to variance 1, then a learned scale and shift.

    The variance is the biased one and `eps` stands under the root, as in `nn.LayerNorm`.
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
    """max(0, x·W₁ + b₁)·W₂ + b₂, the same at each position (§3.3, equation 2)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1):
        super().__init__()
        self.expand = nn.Linear(d_model, d_ff)
        self.contract = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) to (B, T, D), through (B, T, d_ff)."""
        return self.contract(self.dropout(self.expand(x).relu()))


def clones(module: nn.Module, N: int) -> nn.ModuleList:
    """N independent copies of `module`."""
    if N < 1:
        raise ValueError(f"N counts from 1, not {N}")
    return nn.ModuleList(copy.deepcopy(module) for _ in range(N))


# %% [markdown]
# **The two layers.** An encoder layer calls attention with `x, x, x`: queries, keys and
# values all come from the same vectors. A decoder layer does the same with a causal mask, and then calls attention again with `x, memory, memory`.


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

    def forward(self, x: Tensor, src_mask=None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to (B, S, D)."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, src_mask))
        return self.sublayer[1](x, self.feed_forward)


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

    def forward(self, x: Tensor, memory: Tensor, src_mask=None, tgt_mask=None) -> Tensor:
        """x (B, T, D), memory (B, S, D), src_mask (B, 1, S), tgt_mask (B, T, T), to (B, T, D)."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


# %% [markdown]
# **The two stacks.** Pre-norm ends with one more LayerNorm, because its output is a plain sum that nothing
# has normalised yet.


# %%
class Encoder(nn.Module):
    """N encoder layers; pre-norm ends with one more LayerNorm."""

    def __init__(self, layer: EncoderLayer, N: int, norm_first: bool = False):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size) if norm_first else nn.Identity()

    def forward(self, x: Tensor, src_mask=None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to the memory (B, S, D)."""
        for layer in self.layers:
            x = layer(x, src_mask)
        return self.norm(x)


class Decoder(nn.Module):
    """N decoder layers; pre-norm ends with one more LayerNorm."""

    def __init__(self, layer: DecoderLayer, N: int, norm_first: bool = False):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size) if norm_first else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, src_mask=None, tgt_mask=None) -> Tensor:
        """x (B, T, D), memory (B, S, D), src_mask (B, 1, S), tgt_mask (B, T, T), to (B, T, D)."""
        for layer in self.layers:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.norm(x)


# %% [markdown]
# **The whole.** The *generator* is one linear map from a vector to a score for each token of the vocabulary: $\text{logits} = y W + b$ with $y$ (B, T, D), $W$ (D, V), $b$ (V).
# It leaves the softmax to the loss (PyTorch's `cross_entropy`); the highest score belongs to the most probable token anyway.
# The model doesn't call the generator, since a translator needs scores for the last position only (chapter 8).


# %%
class Generator(nn.Module):
    """Vectors to scores over the vocabulary: the linear map before the softmax (§3.4).

    It returns logits (..., V), not probabilities.
    """

    def __init__(self, d_model: int, vocab: int):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to logits (..., V)."""
        return self.proj(x)


# %%
class EncoderDecoder(nn.Module):
    """The Transformer: source ids in, one vector for each target position out (Figure 1)."""

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

    def encode(self, src: Tensor, src_mask=None) -> Tensor:
        """src ids (B, S), src_mask (B, 1, S), to the memory (B, S, D)."""
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory: Tensor, src_mask, tgt: Tensor, tgt_mask=None) -> Tensor:
        """memory (B, S, D), tgt ids (B, T), tgt_mask (B|1, T, T), to (B, T, D)."""
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)

    def forward(self, src: Tensor, tgt: Tensor, src_mask=None, tgt_mask=None) -> Tensor:
        """src ids (B, S), tgt ids (B, T), to (B, T, D)."""
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


# %% [markdown]
# `make_model` calls two helpers, which chapter 5 explains.
# `tie_weights` can let embeddings and generator share one table (§3.4).


# %%
def initialise(model: nn.Module) -> None:
    """Xavier-uniform matrices, zero biases; embedding tables of standard deviation 1/√D."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Embeddings):
            nn.init.normal_(module.lut.weight, std=module.d_model**-0.5)


def tie_weights(model: EncoderDecoder, tie: Literal["none", "decoder", "all"]) -> None:
    """Share storage between the target embedding and the generator, and with "all" the source's too (§3.4).

    Raises ValueError for any other `tie`, or if "all" meets two vocabularies of different sizes.
    """
    if tie not in ("none", "decoder", "all"):
        raise ValueError(f'tie must be "none", "decoder" or "all", not {tie!r}')
    if tie == "none":
        return
    source, target = model.src_embed[0].lut, model.tgt_embed[0].lut
    model.generator.proj.weight = target.weight
    if tie == "all":
        if source.weight.shape != target.weight.shape:
            sizes = f"{source.num_embeddings} source and {target.num_embeddings} target tokens"
            raise ValueError(f"tying all needs one vocabulary, not {sizes}")
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
) -> EncoderDecoder:
    """A Transformer, the paper's base model unless told otherwise (§3, Table 3).

    `dropout` goes to every part. Raises ValueError for sizes or choices that don't fit together.
    """
    attn = clones(MultiHeadedAttention(h, d_model, dropout), 3)
    ff = clones(PositionwiseFeedForward(d_model, d_ff, dropout), 2)

    def embed(vocab: int) -> nn.Sequential:
        return nn.Sequential(Embeddings(d_model, vocab), PositionalEncoding(d_model, dropout))

    model = EncoderDecoder(
        Encoder(EncoderLayer(d_model, attn[0], ff[0], dropout, norm_first), N, norm_first),
        Decoder(DecoderLayer(d_model, attn[1], attn[2], ff[1], dropout, norm_first), N, norm_first),
        embed(src_vocab),
        embed(tgt_vocab),
        Generator(d_model, tgt_vocab),
    )
    initialise(model)
    tie_weights(model, tie)  # last: the shared table keeps the embeddings' scale
    return model


# %% [markdown]
# ## One pass, step by step
#
# > **In short.** Between the embeddings and the generator, every step takes D numbers per token and gives D numbers. So the
# > result can be added to the input.
#
# We take a small model: 2 + 2 layers, D = 32, 50 source words and 60 target words. Two sentence pairs are padded with 0 to S = 6 and T = 4.

# %%
size = {"N": 2, "d_model": 32, "d_ff": 64, "h": 4, "dropout": 0.0}
torch.manual_seed(0)
model = make_model(src_vocab=50, tgt_vocab=60, **size).eval()
src = torch.tensor([[2, 11, 12, 13, 14, 3], [2, 21, 22, 3, 0, 0]])  # (B, S) ids
tgt = torch.tensor([[2, 31, 32, 33], [2, 41, 42, 0]])  # (B, T) ids
src_mask = padding_mask(src)  # (B, 1, S)
tgt_mask = padding_mask(tgt) & subsequent_mask(tgt.size(1))  # (B, T, T)

# %% [markdown]
# While the model runs, `traced` notes what each step reads and what it gives, masks left out. A step inside another, such as
# `self_attn` in `sublayer.0`, is listed first.
#
# **Predict.** Cross-attention has three inputs: query, key and value. What are their shapes? In which steps does the number 60 appear?

# %%
steps = r"\w+_embed\.\d|.+_attn|.+\.feed_forward|.+\.sublayer\.\d|generator"
with traced(model, steps) as rows:
    model.generator(model(src, tgt, src_mask, tgt_mask))
for name, read, given in rows:
    print(f"{name:32}{read:33}{given}")

# %% [markdown]
# Cross-attention, `src_attn`, reads (2, 4, 32) once and (2, 6, 32) twice: the query comes from the target, key and value from the memory.
#
# ## Why keys and values come from the memory
#
# > **In short.** The target asks, the source answers. Each target position gets one answer, whatever the length of the source.
#
# There are T queries, so attention gives T vectors, which can be added to the decoder's T vectors. With queries from the memory there would be S answers,
# which can't be added. With keys and values from the target, nothing from the source would come in.
#
# The memory doesn't depend on the target. So a translator that writes word by word computes it **once** and reads it at each step
# (chapter 8). We check this with targets of growing length: the last vector must be the one that a pass over the whole target gives there.

# %%
memory = model.encode(src, src_mask)  # (B, S, D)
at_once = model(src, tgt, src_mask, subsequent_mask(4))  # (B, T, D)
for t in range(1, 5):
    so_far = model.decode(memory, src_mask, tgt[:, :t], subsequent_mask(t))  # (B, t, D)
    torch.testing.assert_close(so_far[:, -1], at_once[:, t - 1])
weights = model.decoder.layers[0].src_attn.attn  # (B, H, T, S)
print("weights of cross-attention:", tuple(weights.shape))

# %% [markdown]
# So training can be fast: with the causal mask, one pass gives what T separate passes would.
#
# ## Why a feed-forward layer
#
# > **In short.** Attention decides who listens to whom; what it does to the vectors themselves is linear. The feed-forward layer works
# > on each position alone, and isn't linear.
#
# Attention's result is a weighted sum of values, and the values are a linear map of $x$. Only the *weights* depend on $x$ in a nonlinear way. With fixed weights and no LayerNorms, even six attention layers
# with their residual connections are one linear map with a bias.
#
# For such a map, $f(a + b) - f(a) - f(b) + f(0) = 0$ for all $a$ and $b$. We fix the weights by taking queries
# and keys from other vectors, and print how far from 0 this sum is, as a share of $f(a + b)$:

# %%
torch.manual_seed(0)
attends = [MultiHeadedAttention(4, 16, dropout=0.0) for _ in range(6)]
thinks = [PositionwiseFeedForward(16, 64, dropout=0.0) for _ in range(6)]
looks, a, b = torch.randn(3, 1, 5, 16)  # three of (1, T, D)


def stack_of_mixers(x: Tensor, thinks: list) -> Tensor:
    """Six attentions whose weights `looks` decides, each followed by its part of `thinks`."""
    for attend, think in zip(attends, thinks, strict=True):
        x = x + attend(looks, looks, x)
        x = x + think(x)
    return x


for name, parts in (("attention only", [torch.zeros_like] * 6), ("with feed-forward", thinks)):
    f = partial(stack_of_mixers, thinks=parts)
    bend = f(a + b) - f(a) - f(b) + f(torch.zeros_like(a))
    print(f"{name:18} {(bend.norm() / f(a + b).norm()).item():.4f}")

# %% [markdown]
# The feed-forward layers move nothing between positions: `influence` (chapter 1) is 0 off the diagonal.

# %%
from_position = influence(thinks[0], a)  # (T, T)
assert (from_position.diagonal() > 0).all() and from_position.count_nonzero() == 5

# %% [markdown]
# ## Nothing from the future, nothing from padding
#
# > **In short.** What the model says at position t depends on the whole source and on the target up to t. And a sentence gets the same
# > result alone as in a batch with longer ones.
#
# The masks do this in each layer; we check the whole model. If the future leaked, the training loss
# would fall fast but translation would fail, since there the future doesn't exist yet.

# %%
torch.manual_seed(1)
source, target = torch.randint(4, 50, (1, 7)), torch.randint(4, 60, (1, 5))
embedded, causal = model.tgt_embed(target), subsequent_mask(5)
memory = model.encode(source)
seen = {
    "from the target": influence(lambda x: model.decoder(x, memory, None, causal), embedded),
    "from the source": influence(
        lambda x: model.decoder(embedded, model.encoder(x), None, causal), model.src_embed(source)
    ),
}
assert (seen["from the target"][~causal[0]] == 0).all()
assert (seen["from the target"][causal[0]] > 0).all() and (seen["from the source"] > 0).all()
titled(
    panels(
        {name: strength / strength.max() for name, strength in seen.items()},
        row_title="output position",
        column_title="input position",
        value_title="influence",
        numbers=False,
    ),
    "The whole target so far, the whole source",
    "White: no influence at all. The model's output at a target position (row) reacts to no later target token, "
    "and to every source token. Each map is scaled to its largest entry.",
    wrap=72,
)

# %% [markdown]
# Now we append four pads to source and target.

# %%
short = model(source, target, None, causal)
pad = nn.ConstantPad1d((0, 4), 0)
long_src, long_tgt, long_causal = pad(source), pad(target), subsequent_mask(9)
masked = model(long_src, long_tgt, padding_mask(long_src), padding_mask(long_tgt) & long_causal)
unmasked = model(long_src, long_tgt, None, long_causal)
for name, padded in (("with padding masks", masked), ("without", unmasked)):
    print(f"{name:18} largest change {(padded[:, :5] - short).abs().max().item():.4f}")
torch.testing.assert_close(masked[:, :5], short)

# %% [markdown]
# The source's mask does the work here. Pads at the end of the *target* are already hidden by the causal mask.
#
# ## Two slips in putting it together
#
# **Pitfall.** `nn.ModuleList([layer] * 6)` looks like six layers but is one layer six times. It runs and trains, with a sixth of the weights.
# Counting reveals it.


# %%
def count_parameters(module: nn.Module) -> int:
    """How many numbers a module learns; what is shared counts once."""
    return sum(p.numel() for p in module.parameters())


layer = model.encoder.layers[0]
print("one layer:          ", count_parameters(layer))
print("six clones:         ", count_parameters(clones(layer, 6)))
print("six times one layer:", count_parameters(nn.ModuleList([layer] * 6)))

# %% [markdown]
# **Pitfall.** `make_model` passes `dropout` on to every part. A factory that forgets the attention leaves it at its own default, 0.1:
# with `dropout=0.0` the model is still random in train mode. Two runs reveal it.


# %%
forgetful = copy.deepcopy(model)
for part in forgetful.modules():
    if isinstance(part, MultiHeadedAttention):
        part.dropout = nn.Dropout(0.1)
for name, one in (("dropout=0.0 everywhere", model), ("forgotten in attention", forgetful)):
    one.train()
    same = torch.equal(one(src, tgt), one(src, tgt))
    print(f"{name}: two runs give {'the same vectors' if same else 'different vectors'}")

# %% [markdown]
# ## Counting the parameters
#
# > **In short.** Everything is a matrix with a bias, or a LayerNorm. So the count is a short sum, and a check on the code.
#
# | part | numbers | how often |
# |---|---|---|
# | attention | $4(D^2 + D)$: query, key, value, output | N in the encoder, 2N in the decoder |
# | feed-forward | $DF + F + FD + D$ | 2N |
# | LayerNorm | $2D$ | 2N in the encoder, 3N in the decoder; pre-norm: 2 more |
# | tables: two embeddings, the generator's matrix | $VD$ | 3 if not tied, 1 if all are tied |
# | generator's bias | $V$ | 1 |


# %%
def parameters_by_hand(
    vocab: int, N: int, d_model: int, d_ff: int, *, tie: str = "all", norm_first: bool = False
) -> dict[str, int]:
    """How many numbers each kind of part learns, by arithmetic alone (one vocabulary for both sides)."""
    D, tables = d_model, {"none": 3, "decoder": 2, "all": 1}[tie]
    return {
        "attention": 3 * N * 4 * (D * D + D),
        "feed-forward": 2 * N * (D * d_ff + d_ff + d_ff * D + D),
        "LayerNorm": (5 * N + 2 * norm_first) * 2 * D,
        "embeddings and generator": tables * vocab * D + vocab,
    }


# %% [markdown]
# The paper's English-German models share one vocabulary of about 37,000 pieces of words (§5.1) and tie all tables; their
# sizes are in Table 3. The third row below has the sizes of chapter 9's model, which is pre-norm and so has two LayerNorms more.
#
# **Predict.** Which part is the largest in *base*? And in the small one?

# %%
PAPER_VOCAB = 37_000
counted = []
for name, vocab, N, D, d_ff, h, paper in (
    ("base", PAPER_VOCAB, 6, 512, 2048, 8, "65"),
    ("big", PAPER_VOCAB, 6, 1024, 4096, 16, "213"),
    ("small", 8192, 3, 256, 1024, 8, ""),
):
    by_hand = parameters_by_hand(vocab, N, D, d_ff)
    with torch.device("meta"):
        by_code = count_parameters(make_model(vocab, vocab, N, D, d_ff, h, tie="all"))
    assert by_code == sum(by_hand.values())
    millions = {part: round(n / 1e6, 2) for part, n in by_hand.items()}
    total = round(by_code / 1e6, 1)
    counted.append({"model": name} | millions | {"all": total, "paper": paper})
pd.DataFrame(counted).rename(columns={"all": "all, millions", "paper": "paper, millions"})

# %% [markdown]
# The feed-forward layers are the largest part in all three. Base comes out 3% below the paper's figure and big 1% above; the paper doesn't say
# how it counted, or its vocabulary's exact size.
#
# ## The same as `nn.Transformer`
#
# > **In short.** Copy our weights into PyTorch's Transformer. If every output and every gradient agrees, then each formula above
# > means what the field means by it.
#
# As in chapter 2, PyTorch stacks query, key and value matrices, and its masks say what to **hide**. It also puts a final LayerNorm on both
# stacks, *even for post-norm*, where the paper has none. We remove it.


# %%
def torch_layer_state(layer: EncoderLayer | DecoderLayer) -> dict[str, Tensor]:
    """A layer's weights under the names of `nn.TransformerEncoderLayer` or `…DecoderLayer`."""
    state = {}
    for ours, theirs in (("self_attn", "self_attn"), ("src_attn", "multihead_attn")):
        if attn := getattr(layer, ours, None):
            state |= {f"{theirs}.{name}": w for name, w in torch_attention_state(attn).items()}
    named = {"linear1": layer.feed_forward.expand, "linear2": layer.feed_forward.contract}
    named |= {f"norm{i + 1}": part.norm for i, part in enumerate(layer.sublayer)}
    for theirs, module in named.items():
        state[f"{theirs}.weight"], state[f"{theirs}.bias"] = module.weight, module.bias
    return {name: tensor.detach().clone() for name, tensor in state.items()}


# %%
def to_torch_transformer(model: EncoderDecoder, final_norms: bool = False) -> nn.Transformer:
    """PyTorch's own Transformer with `model`'s weights; embeddings and generator stay outside.

    `final_norms`: keep both final LayerNorms of a post-norm model, which the paper doesn't have.
    """
    layer = model.encoder.layers[0]
    norm_first = layer.sublayer[0].norm_first
    with warnings.catch_warnings():  # it warns that pre-norm can't use its nested tensors
        warnings.simplefilter("ignore")
        theirs = nn.Transformer(
            d_model=layer.size,
            nhead=layer.self_attn.h,
            num_encoder_layers=len(model.encoder.layers),
            num_decoder_layers=len(model.decoder.layers),
            dim_feedforward=layer.feed_forward.expand.out_features,
            dropout=layer.sublayer[0].dropout.p,
            layer_norm_eps=layer.sublayer[0].norm.eps,
            batch_first=True,
            norm_first=norm_first,
        )
    for ours, other in ((model.encoder, theirs.encoder), (model.decoder, theirs.decoder)):
        for mine, reference in zip(ours.layers, other.layers, strict=True):
            reference.load_state_dict(torch_layer_state(mine))
        if norm_first:
            other.norm.load_state_dict(ours.norm.state_dict())
        elif not final_norms:
            other.norm = None
    return theirs.train(model.training)


def torch_vectors(
    theirs: nn.Transformer, model: EncoderDecoder, src: Tensor, tgt: Tensor
) -> Tensor:
    """What `nn.Transformer` makes of src (B, S) and tgt (B, T), with `model`'s embeddings: (B, T, D)."""
    return theirs(
        model.src_embed(src),
        model.tgt_embed(tgt),
        tgt_mask=~subsequent_mask(tgt.size(1))[0],  # True = hidden
        src_key_padding_mask=src == 0,
        tgt_key_padding_mask=tgt == 0,
        memory_key_padding_mask=src == 0,
    )


# %% [markdown]
# We compare gradients by taking a step: both models subtract their gradients from their weights. If all weights are still equal afterwards, so was each
# gradient. The embeddings serve both models, so we compare their gradients directly.


# %%
def assert_parity(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> None:
    """Raise AssertionError if an output or a gradient isn't `nn.Transformer`'s; 0 pads src and tgt."""
    model = copy.deepcopy(model)
    theirs = to_torch_transformer(model)
    tgt_mask = padding_mask(tgt) & subsequent_mask(tgt.size(1))
    mine = model(src, tgt, padding_mask(src), tgt_mask)  # (B, T, D)
    reference = torch_vectors(theirs, model, src, tgt)
    close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)
    close(mine, reference)

    tables = [model.src_embed[0].lut.weight, model.tgt_embed[0].lut.weight]
    losses = [vectors[tgt != 0].sin().sum() for vectors in (mine, reference)]  # no pads
    close(*(torch.autograd.grad(loss, tables, retain_graph=True) for loss in losses))
    sum(losses).backward()
    with torch.no_grad():
        for p in (*model.encoder.parameters(), *model.decoder.parameters(), *theirs.parameters()):
            p -= p.grad
    close(to_torch_transformer(model).state_dict(), theirs.state_dict())


# %% [markdown]
# In a fresh model all biases are 0 and all LayerNorms are alike,
# so the outputs would hide a bias that was never copied. Therefore `scramble` first adds a little noise to every parameter.

# %%
for norm_first in (False, True):
    torch.manual_seed(0)
    model = make_model(50, 60, **size, norm_first=norm_first)
    scramble(model)
    assert_parity(model, src, tgt)
    print(f"norm_first={norm_first}: outputs and all gradients equal nn.Transformer's")

# %% [markdown]
# **Pitfall.** On *fresh* weights, post-norm agrees with a plain `nn.Transformer(norm_first=False)` to several digits, although
# PyTorch has two more LayerNorms than the paper: normalising twice is nearly the same as once while all scales are 1. After some
# training it is a different model.

# %%
torch.manual_seed(0)
model = make_model(50, 60, **size)
for state, noise in (("fresh", 0.0), ("scrambled", 0.1)):
    scramble(model, size=noise)
    plain = to_torch_transformer(model, final_norms=True)
    gap = (torch_vectors(plain, model, src, tgt) - model(src, tgt, src_mask, tgt_mask)).abs().max()
    print(f"{state:9} largest difference from the plain nn.Transformer {gap.item():.4f}")

# %% [markdown]
# ## Summary
#
# - The encoder turns the source into the memory, once per sentence. In cross-attention, keys and values come from the memory, queries from the target.
# - Attention moves information between positions; the feed-forward layer works on each alone, and isn't linear.
# - No output sees a later target token, and none at a real token sees a pad.
# - Outputs and gradients equal those of `nn.Transformer`.
#
# ## What the paper did that we don't
#
# - The paper's formulas have no biases in the attention projections (chapter 2), and its code none in the generator. Ours has both.
# - We also use dropout on attention weights and inside the feed-forward layer, as the paper's later code and `nn.Transformer` do.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Count an encoder
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Write `encoder_parameters`: how many numbers a post-norm encoder of N layers learns, by arithmetic alone. Then show
# on paper that with F = 4D it is close to $12 N D^2$. `solution("encoder_parameters")` shows ours.


# %%
def encoder_parameters(N: int, d_model: int, d_ff: int) -> int:
    """How many numbers an encoder of N layers learns; embeddings not counted."""
    ...


check(encoder_parameters)

# %% [markdown]
# ### Exercise 2 · A layer from parts
#
# *code · difficulty ●●○ · worth ●●● · 15 minutes*
#
# Write an encoder layer made of functions that all keep the shape (B, S, D). `attend(x)` is the self-attention, `think(x)` the feed-forward, `norms` the
# LayerNorms of the first and of the second sublayer. With `norm_first=False` it is the paper's layer, with True the pre-norm one. No dropout.
# `solution("layer_from_parts")` shows ours.


# %%
def layer_from_parts(
    x: Tensor, attend: Callable, think: Callable, norms: list[Callable], norm_first: bool
) -> Tensor:
    """x (B, S, D) to (B, S, D): post-norm, or pre-norm with `norm_first`."""
    ...


check(layer_from_parts)

# %% [markdown]
# ### Exercise 3 · A stack of fresh layers
#
# *code · difficulty ●○○ · worth ●●○ · 5 minutes*
#
# `clones` copies one layer, numbers and all, and `initialise` must then make the copies differ. Write `fresh_stack`, which
# needs no such repair: `make()` builds a layer, and the result holds N layers in a form that PyTorch sees, none of which starts with the
# numbers of another. `solution("fresh_stack")` shows ours.


# %%
def fresh_stack(make: Callable[[], nn.Module], N: int) -> nn.ModuleList:
    """N layers, each built from scratch."""
    ...


check(fresh_stack)

# %% [markdown]
# ### Exercise 4 · What a check can see
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Break the copying on purpose: swap key and value in `torch_attention_state` (chapter 2), or put zeros in place of `linear1.bias` in
# `torch_layer_state`. Which of these two faults do the *outputs* in `assert_parity` show? And which would they show without `scramble`?
#
# <details><summary>An answer</summary>
#
# With `scramble`, both. Without it, swapped matrices still show, since they differ from the start. A forgotten bias doesn't: biases start at 0, so
# the outputs agree. Only the step shows it: PyTorch's bias has moved by its gradient, and the broken function again puts zeros in its place.
#
# </details>
#
# Next: [Chapter 5 · Norms and first steps](ch05_norms_and_first_steps.ipynb)
