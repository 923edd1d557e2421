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
# After this chapter you can build the whole Transformer from the parts of chapters 1 to 3, watch a layer work with real numbers,
# train the model in fifteen seconds until it reverses words, and find out which of its parts it needs.
#
# | | |
# |---|---|
# | In the paper | §3.1 (stacks), §3.3 (feed-forward), §3.4 (embeddings and softmax), §5.4 (dropout), Table 3 |
# | Time | 30 minutes to read, 70 with the code; 40 seconds to run on a CPU |
# | Before, after | [Chapter 3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb) · [Chapter 5 · Norms and first steps](ch05_norms_and_first_steps.ipynb) |
#
# *If you read only three cells:* the two layers under "The model on one screen", the loop under "Train it", the picture at the end of
# "Take one part out".
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
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import titled
from scripts.book.exercises import check, runs_on
from scripts.book.figures.model import stacks
from scripts.book.figures.whole import mirror_maps, opened, parts_chart, stage_map
from scripts.book.instruments import scramble
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, torch_attention_state
from scripts.ch03_embeddings_and_positions import Embeddings, PositionalEncoding
from scripts.corpora.reversal import BOS, EOS, EXAMPLE, PAD, VOCAB, reversals, to_ids, to_text

torch.set_default_dtype(torch.float64)  # so that "equal" can be checked to many digits

# %% [markdown]
# ## The map
#
# > **In short.** The encoder reads the source and gives one vector for each of its tokens: the *memory*.
# > The decoder writes the target. Each of its layers looks at what is already written and at the memory.
#
# Both are stacks of N layers of the same form, each with its own weights. The paper has N = 6.

# %%
titled(
    stacks(6),
    "Two stacks and one bridge",
    "From the bottom up. Only the memory crosses over: each of the six decoder layers reads it.",
)

# %% [markdown]
# ## The model on one screen
#
# > **In short.** An encoder layer looks around (self-attention), then works on what it found (feed-forward). A decoder layer has one
# > more step in between: it looks at the source (cross-attention).
#
# Three parts are new. For $x \in \mathbb{R}^{D}$ at one position:
#
# | part | formula | in words |
# |---|---|---|
# | `LayerNorm` | $\gamma \odot \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta$, with mean $\mu$ and variance $\sigma^2$ of the D entries of $x$ | brings each vector to the same scale |
# | `SublayerConnection` | $\mathrm{LayerNorm}(x + \mathrm{Dropout}(f(x)))$ | adds the result of a step $f$ (a *sublayer*) to its input: a *residual connection* |
# | `PositionwiseFeedForward` | $\max(0,\; x W_1 + b_1)\, W_2 + b_2$, with $W_1$ (D, F) and $W_2$ (F, D) | widens, keeps what is positive, narrows again |
#
# The switch `norm_first` moves the LayerNorm to the front: $x + \mathrm{Dropout}(f(\mathrm{LayerNorm}(x)))$. This is *pre-norm*, the form of most later
# models. The paper's text has the form in the table, *post-norm*. Chapter 5 compares them.
#
# **Your turn.** Write `LayerNorm` from its formula. It must agree with PyTorch's, which divides by D, not by D − 1.


# %% tags=["yours"]
class LayerNorm(nn.Module):
    """Each vector shifted to mean 0 and scaled to variance 1, then a learned scale and shift.

    `weight` (D,) starts at 1, `bias` (D,) at 0. The variance is biased; `eps` is under the root.
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
torch.manual_seed(0)
x = (0.1 * torch.randn(2, 5, 8)).requires_grad_()  # so nothing may be changed in place
for eps in (1e-5, 0.1):  # 0.1 is so large that its place matters
    mine, reference = LayerNorm(8, eps), nn.LayerNorm(8, eps)
    torch.testing.assert_close(mine.state_dict(), reference.state_dict())
    scramble(mine)  # random weights, so that none can be forgotten
    reference.load_state_dict(mine.state_dict())
    torch.testing.assert_close(mine(x), reference(x), msg="not nn.LayerNorm's numbers")

# %% [markdown]
# **Your turn.** Write `SublayerConnection`. Dropout acts on what the sublayer gives, never on the road of $x$ itself.


# %% tags=["yours"]
class SublayerConnection(nn.Module):
    """A residual connection around a sublayer, with dropout and LayerNorm (§3.1, §5.4).

    Post-norm, the paper's: LayerNorm(x + Dropout(Sublayer(x))).
    Pre-norm (`norm_first`): x + Dropout(Sublayer(LayerNorm(x))).
    Its parts are `norm`, a LayerNorm, and `dropout`, an nn.Dropout; it keeps `norm_first`, too.
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


# %% [markdown]
# To see dropout's place, we let it double in the check.

# %%
scramble(norm := nn.LayerNorm(8))
for norm_first, wanted in ((False, norm(x + 2 * x.sin())), (True, x + 2 * norm(x).sin())):
    connection = SublayerConnection(8, 0.3, norm_first)
    connection.norm.load_state_dict(norm.state_dict())
    assert connection.dropout.p == 0.3 and connection.norm_first == norm_first
    assert isinstance(connection.norm, LayerNorm), "its norm is the LayerNorm above"
    connection.dropout.forward = lambda x: 2 * x
    torch.testing.assert_close(connection(x, torch.sin), wanted, msg=f"wrong: {norm_first=}")

# %% [markdown]
# **Your turn.** Write `PositionwiseFeedForward`: two linear maps with a ReLU between them.


# %% tags=["yours"]
class PositionwiseFeedForward(nn.Module):
    """max(0, x·W₁ + b₁)·W₂ + b₂, the same at each position (§3.3, equation 2).

    Its parts are `expand` (D to F), `contract` (F to D), and `dropout`, an nn.Dropout that follows the ReLU.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.1):
        super().__init__()
        self.expand = nn.Linear(d_model, d_ff)
        self.contract = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) to (B, T, D), through (B, T, d_ff)."""
        return self.contract(self.dropout(self.expand(x).relu()))


# %%
think = PositionwiseFeedForward(8, 16, dropout=0.3)
assert think.dropout.p == 0.3 and len([*think.parameters()]) == 4, "two matrices, two biases"
think.dropout.forward = lambda hidden: 2 * hidden + 1
hidden = F.linear(x, think.expand.weight, think.expand.bias).clamp(min=0)  # (B, T, F)
wanted = F.linear(2 * hidden + 1, think.contract.weight, think.contract.bias)
torch.testing.assert_close(think(x), wanted, msg="not max(0, x W₁ + b₁) W₂ + b₂")


# %% [markdown]
# **The two layers.** An encoder layer calls attention with `x, x, x`: queries, keys and
# values all come from the same vectors. A decoder layer does the same with a causal mask, and then calls attention again with `x, memory, memory`:
# each target position asks, the source answers. So T questions get T answers, which can be added to the T vectors that asked.
#
# `clones` makes the copies. (`[layer] * N` would be *one* layer N times; counting parameters reveals it.)


# %%
def clones(module: nn.Module, N: int) -> nn.ModuleList:
    """N independent copies of `module`."""
    if N < 1:
        raise ValueError(f"N counts from 1, not {N}")
    return nn.ModuleList(copy.deepcopy(module) for _ in range(N))


def count_parameters(module: nn.Module) -> int:
    """How many numbers a module learns; what is shared counts once."""
    return sum(p.numel() for p in module.parameters())


# %% [markdown]
# **Your turn.** Write both layers. Every sublayer has a `SublayerConnection` of its own.


# %% tags=["yours"]
class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in its residual connection (§3.1).

    It keeps `size`, `self_attn` and `feed_forward`; `sublayer` holds the two connections.
    """

    def __init__(self, size: int, self_attn, feed_forward, dropout: float, norm_first=False):
        super().__init__()
        self.size = size
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout, norm_first), 2)

    def forward(self, x: Tensor, src_mask=None) -> Tensor:
        """x (B, S, D), src_mask (B, 1, S), to (B, S, D)."""
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, src_mask))
        return self.sublayer[1](x, self.feed_forward)


# %% tags=["yours"]
class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the memory, then feed-forward (§3.1).

    It keeps `size`, `self_attn`, `src_attn` and `feed_forward`; `sublayer` holds three connections.
    """

    def __init__(self, size, self_attn, src_attn, feed_forward, dropout: float, norm_first=False):
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
# The check: PyTorch's own layers give the same numbers with the same weights. Only the names differ, and its masks say what to *hide*.


# %%
def torch_layer_state(layer: EncoderLayer | DecoderLayer) -> dict[str, Tensor]:
    """A layer's weights under the names of `nn.TransformerEncoderLayer` or `…DecoderLayer`."""
    parts = {"linear1": layer.feed_forward.expand, "linear2": layer.feed_forward.contract}
    parts |= {f"norm{i}": connection.norm for i, connection in enumerate(layer.sublayer, 1)}
    state = nn.ModuleDict(parts).state_dict()
    for ours, theirs in (("self_attn", "self_attn"), ("src_attn", "multihead_attn")):
        if attn := getattr(layer, ours, None):
            state |= {f"{theirs}.{name}": w for name, w in torch_attention_state(attn).items()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


# %%
torch.manual_seed(0)
source, target, causal = torch.randn(2, 7, 8), torch.randn(2, 5, 8), subsequent_mask(5)
real = padding_mask(torch.tensor([[5, 6, 7, 8, 9, 4, 3], [5, 6, 3, 0, 0, 0, 0]]))  # (B, 1, S)
sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
for norm_first in (False, True):
    attns = clones(MultiHeadedAttention(2, 8, dropout=0.2), 3)
    ffs = clones(PositionwiseFeedForward(8, 16, dropout=0.2), 2)
    encoder = EncoderLayer(8, attns[0], ffs[0], 0.2, norm_first)
    decoder = DecoderLayer(8, attns[1], attns[2], ffs[1], 0.2, norm_first)
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    theirs = [kind(**sizes, norm_first=norm_first).eval() for kind in kinds]
    for mine, reference in zip((encoder, decoder), theirs, strict=True):
        scramble(mine.eval())
        reference.load_state_dict(torch_layer_state(mine))
        same_size = count_parameters(mine) == count_parameters(reference) and mine.size == 8
        assert same_size, "a part is shared, or not registered (use clones), or size isn't kept"
        rates = {part.p for part in mine.modules() if isinstance(part, nn.Dropout)}
        assert rates == {0.2}, "dropout isn't passed on"
    wanted = theirs[0](source, src_key_padding_mask=~real[:, 0])
    torch.testing.assert_close(encoder(source, real), wanted, msg="EncoderLayer is wrong")
    wanted = theirs[1](target, source, ~causal[0], memory_key_padding_mask=~real[:, 0])
    written = decoder(target, source, real, causal)
    torch.testing.assert_close(written, wanted, msg=f"DecoderLayer is wrong: {norm_first=}")

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

    def forward(self, x: Tensor, *others) -> Tensor:
        """x (B, S, D) and src_mask (B, 1, S) to the memory (B, S, D)."""
        for layer in self.layers:
            x = layer(x, *others)
        return self.norm(x)


class Decoder(Encoder):
    """The same of decoder layers: x (B, T, D), memory, src_mask and tgt_mask to (B, T, D)."""


# %% [markdown]
# **The whole.** The *generator* is one linear map from a vector to a score (a *logit*) for each token of the vocabulary.
# The softmax is left to the loss. The model doesn't call the generator itself, since a writer needs scores for the last position only.


# %%
class Generator(nn.Module):
    """Vectors to logits, scores over the vocabulary: the linear map before the softmax (§3.4)."""

    def __init__(self, d_model: int, vocab: int):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) to logits (..., V)."""
        return self.proj(x)


# %%
class EncoderDecoder(nn.Module):
    """The Transformer: source ids in, one vector for each target position out (Figure 1)."""

    def __init__(self, encoder, decoder, src_embed, tgt_embed, generator):
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


def tie_weights(model: EncoderDecoder, tie: str) -> None:
    """Share storage between the target embedding and the generator, and with "all" the source's too (§3.4).

    Raises ValueError for any other `tie`, or if "all" meets two vocabularies of different sizes.
    """
    if tie not in ("none", "decoder", "all"):
        raise ValueError(f'tie must be "none", "decoder" or "all", not {tie!r}')
    source, target = model.src_embed[0].lut, model.tgt_embed[0].lut
    if tie != "none":
        model.generator.proj.weight = target.weight
    if tie == "all":
        if source.weight.shape != target.weight.shape:
            raise ValueError("tying all needs one vocabulary for source and target")
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
    tie: str = "none",
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
# Is it the paper's model? Table 3 says how many millions of numbers its two models learn. They share one vocabulary of about 37,000 pieces of words
# and tie all tables (§5.1). **Predict.** Which kind of part has most of them?

# %%
PAPER_VOCAB = 37_000
for name, D, paper in (("base", 512, 65), ("big", 1024, 213)):
    with torch.device("meta"):  # shapes without numbers
        model = make_model(PAPER_VOCAB, PAPER_VOCAB, 6, D, 4 * D, h=D // 64, tie="all")
    layers = [*model.encoder.layers, *model.decoder.layers]
    thinking = sum(count_parameters(layer.feed_forward) for layer in layers) / 1e6
    total = count_parameters(model) / 1e6
    print(f"{name}: {total:.1f} million (paper: {paper}), {thinking:.1f} in feed-forward layers")

# %% [markdown]
# The feed-forward layers are the largest part of both. Base comes out 3% below the paper's figure and big 0.6% above. No vocabulary
# explains both: base would need 40,700 pieces, big 35,700.
#
# ## One layer opened
#
# > **In short.** A layer is a short chain of steps, each of which you can do by hand. Every step gives one row for each token.
#
# A fresh encoder layer, so small that its numbers fit on the page, reads `decaf`: D = 8, one head, F = 16, pre-norm.
#
# **Predict.** Its attention is random. Will each token look at one token, or at several? And what keeps the six rows apart?

# %%
torch.manual_seed(2)
tiny = make_model(VOCAB, VOCAB, N=1, d_model=8, d_ff=16, h=1, dropout=0.0, norm_first=True)
layer = tiny.encoder.layers[0]
attn, ff = layer.self_attn, layer.feed_forward
source = torch.tensor([[*to_ids(EXAMPLE), EOS]])  # (1, S)

x = tiny.src_embed(source)[0]  # (S, D)
normed = layer.sublayer[0].norm(x)
query, key, value = attn.project_query(normed), attn.project_key(normed), attn.project_value(normed)
scores = query @ key.T / 8**0.5  # (S, S)
weights = scores.softmax(-1)
mixed = attn.project_output(weights @ value)  # (S, D)
between = x + mixed
hidden = ff.expand(layer.sublayer[1].norm(between)).relu()  # (S, F)
narrowed = ff.contract(hidden)  # (S, D)
output = between + narrowed
torch.testing.assert_close(output, layer(tiny.src_embed(source))[0])


# %%
other = ~torch.eye(6, dtype=torch.bool)  # pairs of two different rows
units = F.normalize(torch.stack([x, mixed, output]), dim=-1)  # (3, S, D)
alike = (units @ units.transpose(1, 2))[:, other].mean(1).tolist()
assert alike[1] > 0.7 and max(alike[0], alike[2]) < 0.1
steps = [x, normed, scores, weights, mixed, between, hidden, narrowed, output]
titled(
    opened(steps, [*EXAMPLE, "</s>"]),
    "Attention makes the tokens' rows alike; the sums keep them apart",
    "One encoder layer with random weights, a row for each token. Mean cosine between two rows: "
    f"{alike[0]:.2f} in step 1, {alike[1]:.2f} in step 5, {alike[2]:.2f} in step 9.",
)

# %% [markdown]
# Each looks at several (step 4). So step 5 holds mixtures, and its rows are
# nearly alike. The residual connection keeps most of their difference: step 6 is each token's own vector plus the mixture. (Mean cosines over 40
# random layers: 0.24, 0.72, 0.38; without mixing 0.16 in step 5.)
# The feed-forward layer then works on each row alone, and its ReLU sets half of step 7 to 0.
#
# ## Train it
#
# > **In short.** The source is a word, the target is the same word backwards. The model sees the answer so far and learns to give the next letter.
#
# We take `make_model` with one encoder and one decoder layer: D = 64, F = 128, four heads.
# Chapter 6 explains training properly; this loop is its shortest form. All positions of all words learn in one pass, because of the causal mask:
# position t can't see the letter that it must give.


# %%
def train_to_reverse(model, steps=800, seed=0, lengths=(4, 10), watch=lambda step: None):
    """Train on 64 new words a step, of 4 to 10 letters; the losses. `watch(step)` may look on."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)  # the rate falls to 0
    losses = []
    for step in range(steps):
        watch(step)
        source, target = reversals(64, lengths, generator)  # (B, S), (B, 1 + T)
        written, wanted = target[:, :-1], target[:, 1:]  # the answer so far, and what is next
        vectors = model(source, written, padding_mask(source), subsequent_mask(written.size(1)))
        logits = model.generator(vectors)  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        losses.append(loss.item())
    watch(steps)
    return losses


# %% [markdown]
# To see what it can do, let it write: always the letter with the highest score, and each one is read again at the next step. The memory is computed
# **once**, because it doesn't depend on the target.


# %%
@torch.no_grad()
def write_reversal(model: EncoderDecoder, source: Tensor) -> Tensor:
    """The model's own answers to source (B, S): ids (B, 1 + S), from `BOS` on."""
    src_mask = padding_mask(source)
    memory = model.encode(source, src_mask)
    target = torch.full((len(source), 1), BOS)
    for _ in range(source.size(1)):  # as many letters, and `EOS`
        vectors = model.decode(memory, src_mask, target, subsequent_mask(target.size(1)))
        target = torch.cat([target, model.generator(vectors[:, -1:]).argmax(-1)], dim=1)
    return target


def share_reversed(model: EncoderDecoder, length: int = 10, words: int = 1_000) -> float:
    """How many of so many new words the model reverses without a mistake, as a share."""
    source, target = reversals(words, (length, length), torch.Generator().manual_seed(1_000))
    return (write_reversal(model, source) == target).all(dim=1).double().mean().item()


def reversed_by(model: EncoderDecoder, word: str) -> str:
    """What the model writes for a word of the letters a to j."""
    return to_text(write_reversal(model, torch.tensor([[*to_ids(word), EOS]]))[0])


# %% [markdown]
# There are $10^{10}$ words of ten letters, so those of `share_reversed` are new to the model.
#
# **Predict.** How many of the 800 steps does it need until `decaf` becomes `faced`? And which of the letters will be right first?


# %%
def fresh_model(seed: int = 0, h: int = 4) -> EncoderDecoder:
    """The small model, untrained: N = 1, D = 64, F = 128; in float32, which is faster."""
    torch.manual_seed(seed)
    return make_model(VOCAB, VOCAB, 1, 64, 128, h, dropout=0.0, norm_first=True).to(torch.float32)


# %%
# NBVAL_IGNORE_OUTPUT
LONG_WORD = "abcdefghij"
model, maps = fresh_model(), {}


def look_on(step: int) -> None:
    """Now and then: what the model writes, and where its decoder looks."""
    if step in (0, 25, 50, 75, 100, 150, 200, 400, 800):
        pairs = [f"{word} -> {reversed_by(model, word):8}" for word in (EXAMPLE, LONG_WORD)]
        print(f"step {step:3}:", *pairs)
        maps[step] = model.decoder.layers[0].src_attn.attn[0].mean(0)  # (T, S), of LONG_WORD


losses = train_to_reverse(model, watch=look_on)
right = share_reversed(model)
print(f"new ten-letter words reversed without a mistake: {right:.1%}, last loss {losses[-1]:.4f}")
assert right > 0.95 and (maps[800][:10].argmax(-1) == torch.arange(10).flip(0)).sum() >= 7
titled(
    mirror_maps({f"step {step}": maps[step] for step in (0, 50, 100, 800)}, LONG_WORD),
    "An anti-diagonal appears: the last letter first",
    "Cross-attention, mean of four heads, as the model writes ten letters and </s>.",
)

# %% [markdown]
# `decaf` comes out right after 100 to 200 steps. The beginning and the end come first, the middle last: after 70 steps of eight trainings, given the right beginning,
# the first of eight letters is right in at least 95% of the words, `</s>` in 74%, the sixth letter in at most 62%.
# The first letter to write stands beside `</s>` in the source. For each later one the model must look
# one place further left, and in nearly every row of the last map it does.
#
# ## One decoder layer opened
#
# > **In short.** The generator can read the vector after any sublayer. What would the model write there?
#
# The code is `DecoderLayer.forward`, line by line, in the trained model, for 500 words of ten letters.
#
# **Predict.** Before cross-attention the model must guess, since only that sees the source. What is left for the feed-forward layer?

# %%
# NBVAL_IGNORE_OUTPUT
source, target = reversals(500, (10, 10), torch.Generator().manual_seed(5))
written, wanted = target[:, :-1], target[:, 1:]  # (500, T)
layer, causal = model.decoder.layers[0], subsequent_mask(written.size(1))
with torch.no_grad():
    memory = model.encode(source)
    start = model.tgt_embed(written)  # (500, T, D)
    looked_back = layer.sublayer[0](start, lambda x: layer.self_attn(x, x, x, causal))
    looked_across = layer.sublayer[1](looked_back, lambda x: layer.src_attn(x, memory, memory))
    end = layer.sublayer[2](looked_across, layer.feed_forward)
    torch.testing.assert_close(end, layer(start, memory, None, causal))
    vectors = torch.stack([start, looked_back, looked_across, end])  # (4, 500, T, D)
    hits = model.generator(model.decoder.norm(vectors)).argmax(-1) == wanted  # (4, 500, T)
whole = hits.all(-1).double().mean(1).tolist()  # words without a mistake
assert max(whole[:2]) < 0.01 < whole[2] <= whole[3] and hits[2, :, :10].double().mean() > 0.9
titled(
    stage_map(hits.double().mean(1)),
    "Cross-attention brings the letters, feed-forward corrects the rest",
    f"Right of 500 words, by place. Whole words: {', '.join(f'{share:.0%}' for share in whole)}.",
)

# %% [markdown]
# The end of the word. No word has eleven letters, so self-attention already says `</s>` there. After cross-attention half of the words have lost it (the generator was trained to read the last row only), and feed-forward corrects it.
# (Trainings differ: in eight, 48 to 95% of the words are right before it.)
# The model *uses* its feed-forward layer. Does it *need* it?
#
# ## Take one part out
#
# > **In short.** To find out what a part is for, train without it, and change nothing else.


# %%
SUBLAYERS = ["encoder self-attention", "decoder self-attention", "cross-attention", "feed-forward"]
PARTS = ["positions", "several heads", "causal mask", "residuals", "LayerNorms", *SUBLAYERS]


def nothing(x: Tensor, *others, **masks) -> Tensor:
    """In place of a sublayer: it adds 0."""
    return torch.zeros_like(x)


def without(*parts: str, seed: int = 0) -> EncoderDecoder:
    """The small model, untrained, that lacks `parts`. Raises ValueError if one isn't in PARTS."""
    if unknown := {*parts} - {*PARTS}:
        raise ValueError(f"no part {unknown.pop()!r}: choose from {', '.join(PARTS)}")
    model = fresh_model(seed, h=1 if "several heads" in parts else 4)
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    if "positions" in parts:
        model.src_embed[1] = model.tgt_embed[1] = nn.Identity()
    if "causal mask" in parts:  # it is handed over, but not used
        attend = decoder.self_attn.forward
        decoder.self_attn.forward = lambda query, key, value, mask: attend(query, key, value)
    if "residuals" in parts:
        for connection in (*encoder.sublayer, *decoder.sublayer):
            connection.forward = lambda x, sublayer, norm=connection.norm: sublayer(norm(x))
    if "LayerNorms" in parts:
        for norm in [module for module in model.modules() if isinstance(module, LayerNorm)]:
            norm.forward = lambda x: x
    if "encoder self-attention" in parts:
        encoder.self_attn.forward = nothing
    if "decoder self-attention" in parts:
        decoder.self_attn.forward = nothing
    if "cross-attention" in parts:
        decoder.src_attn.forward = nothing
    if "feed-forward" in parts:
        encoder.feed_forward.forward = decoder.feed_forward.forward = nothing
    return model


# %% [markdown]
# We take out the causal mask. **Predict.** Will the loss end higher or lower than with the mask? And what will the model write?

# %%
# NBVAL_IGNORE_OUTPUT
for parts, steps in ((["causal mask"], 800), (["causal mask", "cross-attention"], 300)):
    lacking = without(*parts)  # try any other of PARTS
    losses = train_to_reverse(lacking, steps)
    print(f"without {parts}: loss {losses[-1]:.4f}; {EXAMPLE} -> {reversed_by(lacking, EXAMPLE)!r}")
    assert losses[-1] < 0.01 and share_reversed(lacking) == 0

# %% [markdown]
# The loss goes to 0, and not one word comes out right. The model cheats: the letter that position t must give stands at t + 1 of what it reads, and
# without the mask it copies it from there. It doesn't even need the source, as the second training shows. When it writes for itself, nothing stands at t + 1 yet.
# So the loss measured another task than ours. When a loss is too good, look at the output.
#
# Now all parts, each in three trainings of 800 steps. ("Several heads" leaves one head, as wide as the four together.) Where one missing part leaves only some words right, the worst
# training also gets 1,600 steps: does the model fail, or learn more slowly?
#
# **Predict.** A model without positions sees its source as a bag of letters. What share of the four-letter words can it reverse at most?

# %%
runs = load_record("parts-reversal")["runs"]
shares = [run["right"]["4"] for run in runs if run["without"] == ["positions"]]
print(f"four letters without positions: {min(shares):.1%} to {max(shares):.1%} of the words right")
assert max(shares) < 715 / 10_000 + 0.02

# %% [markdown]
# At most 7.15% of all words. It gives one answer to each bag of letters, and of the words with the same letters at most one is right. There are
# $\binom{13}{4} = 715$ bags and 10,000 words; a sample of 1,000 strays by about 0.8 points. The trainings reach this bound: they know the letters and guess their order.

# %%
longest = {(*run["without"], run["seed"]): run["right"]["10"] for run in runs}  # the last counts
alone = {part: [longest[part, seed] for seed in range(3)] for part in PARTS}
failing = [part for part in PARTS if max(alone[part]) == 0]
spared = [part for part in PARTS if min(alone[part]) > 0.95]
assert len(failing) == 3 and len(spared) == 4 and longest[(*spared, 0)] < 0.95
titled(
    parts_chart(runs),
    "Taken out one at a time, three parts are needed, two help, four aren't missed",
    "A dot is a training without that part. Left: new ten-letter words; dashed: 95%.",
)

# %% [markdown]
# - **Nothing works without** cross-attention, positions or the causal mask. Without cross-attention the loss stays at $(7\ln 10 + \ln 7)/8 = 2.26$: a guess among ten
#   letters and seven lengths.
# - **Slower**, in this one layer, without residuals: 91% in the worst training, but all words after 1,600 steps; and without the encoder's self-attention: 62%, then 92%.
# - **Not missed**, one at a time, are several heads, LayerNorms, the decoder's self-attention and the feed-forward layers: at least 99% of the words come out
#   right: the other parts suffice. With all four out, 81, 94 and 100%: together they are missed a little.
#   Reversing moves letters and computes nothing from them. Chapter 19 takes parts out of a translator.
#
# **Why the encoder looks around.** Even without self-attention each letter has its place, but not its distance from the end. Is that all that
# self-attention tells here? **Predict.** If so, what happens without it when all words have ten letters?

# %%
same_length = without("encoder self-attention")
train_to_reverse(same_length, steps=200, lengths=(10, 10))
print("nearly all words right" if share_reversed(same_length) > 0.95 else "many words wrong")

# %% [markdown]
# Nearly all words come out right, after a quarter of the steps. This fits: where the length is known, nobody needs to tell it.
#
# ## Milestone · Your layers translate
#
# > **In short.** Now all layers of chapter 9's translator are yours.

# %%
runs_on(LayerNorm, SublayerConnection, PositionwiseFeedForward, EncoderLayer, DecoderLayer)

# %% [markdown]
# **Predict.** What will it write if the memory is all zeros?


# %%
class DeafDecoderLayer(DecoderLayer):
    """A decoder layer whose memory (B, S, D) is silent: zeros."""

    def forward(self, x: Tensor, memory: Tensor, src_mask=None, tgt_mask=None) -> Tensor:
        return super().forward(x, torch.zeros_like(memory), src_mask, tgt_mask)


runs_on(DecoderLayer=DeafDecoderLayer)

# %% [markdown]
# It writes one English sentence, whatever the German is.
#
# ## Summary
#
# - The encoder turns the source into the memory, once. In cross-attention, keys and values come from the memory, queries from the target.
# - A sublayer adds to its input; it doesn't replace it. Our layers give the same numbers as PyTorch's, in post-norm and in pre-norm.
# - Fifteen seconds of training make a model that reverses words it has never seen.
# - A loss can be fooled. And what a trained model uses isn't always what it needs.
#
# ## What the paper did that we don't
#
# - The paper's formulas have no biases in the attention projections (chapter 2), and its code none in the generator. Ours has both.
# - We also use dropout on attention weights and inside the feed-forward layer, as the paper's later code and `nn.Transformer` do.
#   `make_model` hands `dropout` to every part: an attention with its own default would make training with `dropout=0.0` random.
# - `nn.Transformer` puts a final LayerNorm on both stacks even in post-norm, where the paper has none. Without these two, it agrees with ours (the tests compare outputs and gradients).
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
# ### Exercise 2 · What a check can see
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# The checks against PyTorch first add noise to all weights (`scramble`). Suppose they didn't. Which of two faults in `torch_layer_state` would they miss:
# `norm1` and `norm2` swapped, or zeros in place of `linear1.bias`?
#
# <details><summary>An answer</summary>
#
# The swapped norms: all LayerNorms start with the same numbers, ones and zeros, so a swap changes nothing. The zeros would be noticed, because `nn.Linear` starts with random biases.
# After `make_model`, whose `initialise` sets biases to 0, they would be missed, too.
#
# </details>
#
# ### Exercise 3 · Another task
#
# *project · difficulty ●●○ · worth ●●● · 20 minutes*
#
# Let the model *sort* the letters: `decaf` becomes `acdef`. In `train_to_reverse`, sort the letters of each target. Which part can be spared now,
# though it couldn't be for reversing? Predict, then try `without`.
#
# <details><summary>An answer</summary>
#
# The positions, since the answer depends only on the bag. Without them, 350 steps sorted nearly all ten-letter words.
#
# </details>
#
# Next: [Chapter 5 · Norms and first steps](ch05_norms_and_first_steps.ipynb)
