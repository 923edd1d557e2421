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
# # Chapter 3 · Embeddings and positions
#
# After this chapter you can turn token ids into vectors that attention can work with, say why they are multiplied by $\sqrt{d_{model}}$, and prove that without positions attention cannot tell *dog bites man* from *man bites dog*.
#
# *Attention Is All You Need*, §3.4 and §3.5. About 25 minutes to read; some seconds to run on a CPU.
#
# Previous: [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb) · Next: [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. Here T is the length of whichever sequence is being embedded.

# %% tags=["bootstrap"]
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "set SERIES_REPOSITORY").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))

# %%
import math
from collections.abc import Callable
from itertools import permutations

import altair as alt
import pandas as pd
import torch
from torch import Tensor, nn

from scripts.book.charts import bars, heatmap, lines, titled
from scripts.book.exercises import blame, rejection, same_numbers
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention

# %%
MAX_LEN = 256  # the longest sequence of tokens that the series' models take

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## From ids to vectors
#
# > **In short.** A table has one row for each token of the vocabulary. To embed a token is to copy its row.
#
# A token is a number, its *id*: 5 might be *dog*. The number itself means nothing; 6 is no bigger a dog. So each id gets a vector of its own, which training is free to move.
#
# $$ \mathrm{embed}(i) = E_i\,\sqrt{D} \;=\; \mathrm{onehot}(i)\,E\,\sqrt{D} $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | ids | (B, T) | whole numbers from 0 to V−1 |
# | $E$ | (V, D) | the table, learned |
# | $\mathrm{onehot}(i)$ | (V,) | zeros, and a 1 at place $i$ |
# | result | (B, T, D) | one vector for each token |
#
# The second form says that an embedding is a linear layer without bias, applied to one-hot vectors. Nobody computes it so: a product with V − 1 zeros is a slow way to copy a row.


# %%
class Embeddings(nn.Module):
    """Token ids to vectors, scaled by √d_model (§3.4).

    `width` is the table's own width; where it differs from `d_model`, a linear map (no bias)
    leads from one to the other. `lut` is the table (V, width).

    Raises TypeError for ids that are not integers.
    """

    def __init__(self, d_model: int, vocab: int, width: int | None = None):
        super().__init__()
        width = width or d_model
        self.d_model = d_model
        self.lut = nn.Embedding(vocab, width)
        self.widen = nn.Identity() if width == d_model else nn.Linear(width, d_model, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) of int64 or int32, to (B, T, D)."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"token ids must be int64 or int32, not {ids.dtype}")
        return self.widen(self.lut(ids)) * math.sqrt(self.d_model)  # (B, T, D)


# %%
torch.manual_seed(0)
embed = Embeddings(d_model=4, vocab=6)
ids = torch.tensor([[5, 2, 0, 2]])  # (B, T)
one_hot = torch.eye(6)[ids]  # (B, T, V)
vectors = embed(ids)  # (B, T, D)
torch.testing.assert_close(vectors, one_hot @ embed.lut.weight * math.sqrt(4))

vectors.sum().backward()
touched = embed.lut.weight.grad.abs().sum(-1) > 0  # (V,)
assert touched.tolist() == [True, False, True, False, False, True]  # only rows that were looked up

# %%
limit = embed.lut.weight.abs().max().item() * 2
look = {"scheme": "diverging", "domain": (-limit, limit), "cell": 40}
token_names = [f"id {i}" for i in ids[0].tolist()]
titled(
    alt.hconcat(
        heatmap(one_hot[0], token_names, cell=40, digits=0).properties(title="one-hot (T, V)"),
        heatmap(embed.lut.weight * 2, [f"row {i}" for i in range(6)], **look).properties(
            title="table × √D (V, D)"
        ),
        heatmap(vectors[0], token_names, **look).properties(title="vectors (T, D)"),
    ).resolve_scale(color="independent"),
    "To embed is to pick rows",
    "Left times middle is right: each 1 copies one row of the table. The id 2 occurs twice and "
    "gets the same vector twice.",
)

# %% [markdown]
# **Pitfall.** Ids must be integers all the way. It is tempting to accept a float tensor and to cast it back, as ids often pass through NumPy or a mixed-precision block. But floats are spaced: in half precision, whole numbers above 2,048 are rounded, and the word becomes *another word*, without an error.
#
# **Predict.** What does id 2049 become after a visit to float16? And 30,001?

# %%
before = torch.tensor([2047, 2049, 5001, 30001])
after = before.half().long()
pd.DataFrame({"id": before, "after float16": after}).set_index("id")

# %% [markdown]
# So `Embeddings` refuses what is not an integer, and names the type. An id outside the table is an `IndexError` of PyTorch's on the CPU (on a GPU it is a "device-side assert" that points at a later line: run it on the CPU to find it).

# %%
assert (before != after).sum() == 3
try:
    embed(torch.tensor([[1.0, 2.0]]))
except TypeError as error:
    print("TypeError:", error)
try:
    embed(torch.tensor([[6]]))
except IndexError as error:
    print("IndexError:", error)

# %% [markdown]
# ## Why multiply by √d_model
#
# > **In short.** The table's entries are small, because the same table also serves at the model's end. The positions that will be added are not small. The factor lifts the words to the positions' height.
#
# This is asked again and again, so let us measure. The paper shares the table E with the last linear layer (§3.4, our Chapter 4). There, each score is a dot product of D terms, and for scores of about ±1 the entries of E need a variance of $1/D$. A row of E then has length
#
# $$ \|E_i\| \approx \sqrt{D \cdot \tfrac1D} = 1. $$
#
# A position vector, as we shall see, is D/2 pairs of a sine and a cosine, and $\sin^2 + \cos^2 = 1$, so that its length is exactly $\sqrt{D/2}$. At D = 512 that is 16. Added as it is, the word would be a whisper beside its own place number. Times $\sqrt{D}$, its length is $\sqrt{D} \approx 22.6$.
#
# Positions need their definition here; the explanation follows below.


# %%
def sinusoids(length: int, d_model: int) -> Tensor:
    """PE[pos, 2i] = sin(pos / 10000^(2i/D)), PE[pos, 2i+1] = cos of the same (§3.5): (length, D).

    Raises ValueError for an odd `d_model`: each sine needs its cosine.
    """
    if d_model % 2:
        raise ValueError(f"sinusoidal positions need an even d_model, not {d_model}")
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)  # (length, 1)
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model  # (D/2,)
    angle = position * 10_000.0**-exponent  # (length, D/2)
    waves = torch.stack((angle.sin(), angle.cos()), dim=-1)  # (length, D/2, 2)
    return waves.flatten(-2).to(torch.get_default_dtype())  # (length, D): sin, cos, sin, cos, …


# %%
def small_table(vocab: int, d_model: int) -> Embeddings:
    """`Embeddings` whose table is drawn with variance 1/D, as Chapter 4 does it."""
    embed = Embeddings(d_model, vocab)
    nn.init.normal_(embed.lut.weight, std=d_model**-0.5)
    return embed


# %%
def lengths(d_model: int) -> dict[str, float]:
    """Mean length of word vectors, before and after scaling, and of position vectors."""
    embed = small_table(200, d_model)
    ids = torch.arange(200)
    with torch.no_grad():
        return {
            "word × √D": embed(ids).norm(dim=-1).mean().item(),
            "position": sinusoids(200, d_model).norm(dim=-1).mean().item(),
            "word, unscaled": embed.lut(ids).norm(dim=-1).mean().item(),
        }


# %%
torch.manual_seed(1)
sizes = (16, 32, 64, 128, 256, 512, 1024)
rows = pd.DataFrame(
    [(d, kind, length) for d in sizes for kind, length in lengths(d).items()],
    columns=["D", "vector", "length"],
)
for d, kind, length in rows.itertuples(index=False):
    theory = {"word × √D": d**0.5, "position": (d / 2) ** 0.5, "word, unscaled": 1.0}[kind]
    assert abs(length / theory - 1) < 0.05
titled(
    lines(rows, "D", "length", "vector", points=True).encode(
        x=alt.X(
            "D:Q",
            scale=alt.Scale(type="log", base=2, domain=(16, 1024)),
            axis=alt.Axis(values=list(sizes), format="d"),
        ),
        y=alt.Y("length:Q", scale=alt.Scale(type="log", domain=(0.8, 40))),
    ),
    "Words and positions, before and after √D",
    "Length of a vector against the model's width. Unscaled, words stay at 1 while positions grow "
    "as √(D/2). Scaled, the word is always √2 times as long as its position.",
)

# %% [markdown]
# What does that do to meaning? Take a word $a$ at places 3 and 9, and another word $b$ at place 3, and compare directions by their cosine. In "same word" only the place differs; in "same place" only the word does.
#
# **Predict.** Without the factor, which pair is more alike?

# %%
torch.manual_seed(2)
embed = small_table(vocab=400, d_model=512)
places = sinusoids(16, 512)  # (16, D)
similar = nn.CosineSimilarity(dim=-1)
alike = []
with torch.no_grad():
    for name, words in (("unscaled", embed.lut.weight), ("× √D", embed(torch.arange(400)))):
        a, b = words[:200], words[200:]  # (200, D) each
        same_word = similar(a + places[3], a + places[9]).mean().item()
        same_place = similar(a + places[3], b + places[3]).mean().item()
        alike += [
            (f"{name}: same word, other place", same_word, name),
            (f"{name}: other word, same place", same_place, name),
        ]
alike = pd.DataFrame(alike, columns=["pair", "cosine", "table"])

assert alike["cosine"][1] > 0.99  # unscaled: two different words look the same
assert alike["cosine"][1] > alike["cosine"][0]
assert alike["cosine"][2] > 0.8 > 0.4 > alike["cosine"][3]  # scaled: the word leads
titled(
    bars(alike, "pair", "cosine", number_format=".2f", color="table"),
    "The factor lets the word speak",
    "Mean cosine over 200 pairs of words, D = 512. Unscaled, two different words at one place "
    "are all but identical. Scaled, a word is most like itself.",
)

# %% [markdown]
# The factor could as well be part of the table: draw it with variance 1 and leave the factor out. Then it could not be shared with the last layer. And a factor *with* a table of variance 1, which is what `nn.Embedding` starts from, would overdo it: words of length D = 512 beside positions of length 16. Scale and initialisation belong together; Chapter 4's `initialise` sees to it.
#
# ## A table narrower than the model
#
# > **In short.** A large vocabulary makes a large table. A narrow table and one linear map to D are cheaper.
#
# With a width W other than D, the table is (V, W), and a matrix $M$ of (W, D) leads to the model. (Lan et al. 2019 do this in ALBERT.)
#
# $$ \mathrm{embed}(i) = E_i\,M\,\sqrt{D}, \qquad VW + WD \text{ parameters instead of } VD $$

# %%
torch.manual_seed(3)
narrow = Embeddings(d_model=32, vocab=100, width=8)
ids = torch.arange(100).view(4, 25)  # (B, T)
torch.testing.assert_close(
    narrow(ids), narrow.lut.weight[ids] @ narrow.widen.weight.T * math.sqrt(32)
)
assert narrow(ids).shape == (4, 25, 32)
assert sum(p.numel() for p in narrow.parameters()) == 100 * 8 + 8 * 32
assert torch.linalg.matrix_rank(narrow(ids).flatten(0, 1)) == 8

# %% [markdown]
# The last line is the price: however wide the model, the words lie in a space of 8 dimensions. What does it save?


# %%
def table_parameters(vocab: int, d_model: int, width: int | None = None) -> int:
    """Parameters of `Embeddings(d_model, vocab, width)`."""
    return vocab * d_model if width in (None, d_model) else vocab * width + width * d_model


# %%
for width in (None, 4, 16, 24):
    module = Embeddings(16, 50, width)
    assert sum(p.numel() for p in module.parameters()) == table_parameters(50, 16, width)

savings = pd.DataFrame(
    [
        (width, table_parameters(vocab, 512, width) / 1e6, f"V = {vocab:,}")
        for vocab in (37_000, 8_000)
        for width in (32, 64, 128, 256, 384, 500)
    ],
    columns=["table width W", "million parameters", "vocabulary"],
)
titled(
    lines(savings, "table width W", "million parameters", "vocabulary", points=True, zero=True),
    "A narrow table saves most where the vocabulary is large",
    "Parameters of table and projection for D = 512. The paper's vocabulary has about 37,000 "
    "tokens: 18.9 million at full width, 4.8 million at W = 128.",
)

# %%
assert round(table_parameters(37_000, 512) / 1e6, 1) == 18.9
assert round(table_parameters(37_000, 512, 128) / 1e6, 1) == 4.8

# %% [markdown]
# ## Attention cannot see order
#
# > **In short.** Attention treats its input as a bag. Shuffle the words and you get the same outputs, shuffled.
#
# Let $P$ be a (T, T) permutation matrix, so that $PX$ is X with its rows shuffled. Scores and values shuffle along, and the softmax of a row doesn't care about the order of its columns:
#
# $$ \mathrm{softmax}\!\left(PXW^Q\,(PXW^K)^{\top}\right) PXW^V
# = P\;\mathrm{softmax}\!\left(XW^Q\,(XW^K)^{\top}\right) P^{\top}P\,XW^V
# = P \cdot \mathrm{Attention}(X), $$
#
# since $P^{\top}P = I$. This is called *permutation-equivariant*. Everything else in an encoder (feed-forward, LayerNorm, residuals) works on each position alone, so the whole encoder is equivariant too.
#
# That is a claim about all orders, and for five tokens there are only 120. So we try them all.


# %%
def equivariance_gap(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """How far `f` is from permutation-equivariant: max |f(Px) − P·f(x)| over all T! orders.

    x is (T, D) with T at most 6 or so; `f` maps (B, T, D) to (B, T, D).
    """
    orders = torch.tensor(list(permutations(range(len(x)))))  # (T!, T)
    with torch.no_grad():
        shuffled_first = f(x[orders])  # (T!, T, D)
        shuffled_after = f(x[None])[0][orders]  # (T!, T, D)
    return (shuffled_first - shuffled_after).abs().max().item()


# %% [markdown]
# The candidates: our attention layer; a three-layer encoder, for which we take PyTorch's (Chapter 4 builds its own and proves it equal); both again with positions added; and the attention layer with a causal mask.
#
# **Predict.** Which of the five can see order?

# %%
torch.manual_seed(4)
x = torch.randn(5, 16)  # (T, D): five tokens
attend = MultiHeadedAttention(h=4, d_model=16, dropout=0.0)
encoder = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32, dropout=0.0, batch_first=True),
    num_layers=3,
    enable_nested_tensor=False,
)
places, causal = sinusoids(5, 16), subsequent_mask(5)
gaps = {
    "attention": equivariance_gap(lambda x: attend(x, x, x), x),
    "encoder": equivariance_gap(encoder, x),
    "attention with positions": equivariance_gap(
        lambda x: attend(x + places, x + places, x + places), x
    ),
    "encoder with positions": equivariance_gap(lambda x: encoder(x + places), x),
    "attention, causal mask": equivariance_gap(lambda x: attend(x, x, x, causal), x),
}
assert gaps["attention"] < 1e-12 and gaps["encoder"] < 1e-12
assert min(list(gaps.values())[2:]) > 0.1
pd.DataFrame(
    [(name, "no" if gap < 1e-12 else "yes") for name, gap in gaps.items()],
    columns=["", "sees order?"],
).set_index("")

# %% [markdown]
# The last line is a surprise to many. A causal mask *does* tell the positions apart: the first token sees one, the second sees two, and so on. A decoder without positions has something to go by; an encoder has nothing at all.
#
# What it means for language: here are two sentences, embedded without positions and sent through the encoder.

# %%
torch.manual_seed(5)
words = {"dog": torch.randn(16), "bites": torch.randn(16), "man": torch.randn(16)}


def outputs_by_word(sentence: str, places: Tensor) -> dict[str, Tensor]:
    """The encoder's output (D,) for each word of the sentence; `places` (T, D) is added first."""
    names = sentence.split()
    x = torch.stack([words[name] for name in names])  # (T, D)
    with torch.no_grad():
        return dict(zip(names, encoder((x + places)[None])[0], strict=True))


changes = []
for name, places in (("no positions", torch.zeros(3, 16)), ("positions", sinusoids(3, 16))):
    one = outputs_by_word("dog bites man", places)
    two = outputs_by_word("man bites dog", places)
    changes += [(f"{w}, {name}", (one[w] - two[w]).norm().item(), name) for w in words]
changes = pd.DataFrame(changes, columns=["word", "change", "input"])
assert (changes["change"][:3] < 1e-12).all() and (changes["change"][3:] > 0.1).all()
titled(
    bars(changes, "word", "change", color="input", number_format=".2f"),
    "Dog bites man, man bites dog",
    "How much each word's output changes when the sentence is turned round. Without positions "
    "nothing changes: the encoder could not know who bites.",
)

# %% [markdown]
# So the position must be put into the vectors themselves.
#
# ## Sinusoidal positions
#
# > **In short.** A clock tells the time with a fast hand and a slow one. Here D/2 hands turn at D/2 speeds, and where they all stand together says which position it is.
#
# $$ PE_{(pos,\,2i)} = \sin\!\big(pos\cdot\omega_i\big), \qquad
# PE_{(pos,\,2i+1)} = \cos\!\big(pos\cdot\omega_i\big), \qquad \omega_i = 10000^{-2i/D} $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $pos$ | 0 … length−1 | the position |
# | $i$ | 0 … D/2−1 | which pair, that is, which hand |
# | $\omega_i$ | (D/2,) | its speed; the wavelength $2\pi/\omega_i$ goes from $2\pi$ to almost $10000\cdot2\pi$ |
# | $PE$ | (length, D) | added to the embeddings |
#
# `sinusoids` above computes it. The check is a double loop over Python's own `math`.

# %%
table = sinusoids(40, 10)
for pos in range(40):
    for i in range(5):
        angle = pos / 10_000 ** (2 * i / 10)
        assert math.isclose(table[pos, 2 * i], math.sin(angle), abs_tol=1e-12)
        assert math.isclose(table[pos, 2 * i + 1], math.cos(angle), abs_tol=1e-12)

# %%
titled(
    heatmap(
        sinusoids(60, 64),
        row_title="position",
        column_title="feature",
        value_title="value",
        scheme="diverging",
        domain=(-1, 1),
        numbers=False,
    ),
    "Each row is a position's signature",
    "The fast hands on the left change from row to row. Those on the right hardly move within a "
    "sentence: there the sine stays near 0 and the cosine near 1.",
)

# %% [markdown]
# **Predict.** Feature 0 repeats about every six positions. How long does feature 8 of 64 take?

# %%
length, d_model = 60, 64
table = sinusoids(length, d_model)
curves = pd.DataFrame(
    [
        (pos, table[pos, feature].item(), f"feature {feature}")
        for feature in (0, 1, 8, 16)
        for pos in range(length)
    ],
    columns=["position", "value", "feature"],
)
titled(
    lines(curves, "position", "value", "feature", width=560),
    "Four columns of the heatmap as curves",
    "Features 0 and 1 are the sine and cosine of one hand, a quarter turn apart. Feature 8 is slower "
    "by 10,000^(8/64), about three times, feature 16 ten times.",
)

# %% [markdown]
# A sine changes sign twice in each wavelength. Counting the changes over a long stretch measures the wavelength, and it must be $2\pi\cdot10000^{2i/D}$.

# %%
stretch = sinusoids(20_000, 64)[:, 0:40:8]  # (20000, 5): the sines of features 0, 8, 16, 24, 32
sign_changes = (stretch[1:].sign() != stretch[:-1].sign()).sum(0)  # (5,)
for feature, changes_seen in zip(range(0, 40, 8), sign_changes.tolist(), strict=True):
    wavelength = 2 * math.pi * 10_000 ** (feature / 64)
    assert abs(changes_seen - 2 * 20_000 / wavelength) <= 2

# %% [markdown]
# **Pitfall.** Each sine needs its cosine, so D must be even. A table that is filled by slices, every second column from 0 with sines and every second from 1 with cosines, works for even widths and crashes for odd ones: there is one column of cosines too many. The message speaks of sizes, not of the cause. Here is that version, and what each says at D = 7.


# %%
def sinusoids_by_slices(length: int, d_model: int) -> Tensor:
    """The fragile way, kept to be looked at: right for an even `d_model`, a crash for an odd one."""
    speeds = 10_000.0 ** -(torch.arange(0, d_model, 2) / d_model)  # (D/2 rounded up,)
    angle = torch.outer(torch.arange(length).double(), speeds)
    table = torch.empty(length, d_model)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
    return table


# %%
torch.testing.assert_close(sinusoids_by_slices(20, 8), sinusoids(20, 8))
for make in (sinusoids_by_slices, sinusoids):
    try:
        make(20, 7)
    except (RuntimeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")

# %% [markdown]
# **Pitfall.** Compute the angles in high precision and round the *result*. A model trained in bfloat16 is tempted to count its positions in bfloat16 too, and that type has no odd numbers above 256.

# %%
counted = torch.arange(512).bfloat16().long()
assert (counted != torch.arange(512)).sum() == 128  # these have become their neighbours
assert sinusoids(512, 64).bfloat16().double().unique(dim=0).shape[0] == 512  # ours: all distinct

# %% [markdown]
# ## Adding them
#
# > **In short.** Positions are *added* to the embeddings, not appended, and the sum goes through dropout (§5.4).
#
# $$ x_{pos} = E_{i_{pos}}\sqrt{D} + PE_{pos}, \qquad x \text{ of shape (B, T, D)} $$
#
# Adding costs no width. The sum can be taken apart again because D is large: there is room for words and positions to lie in nearly perpendicular directions, and the matrices of the heads can pick out either.
#
# First a small guard, for sequences longer than the table.


# %%
def check_length(length: int, max_len: int) -> None:
    """Raise ValueError where a sequence of `length` tokens is longer than `max_len`."""
    if length > max_len:
        raise ValueError(f"a sequence of {length} tokens is longer than the maximum of {max_len}")


# %%
class PositionalEncoding(nn.Module):
    """Adds the sinusoids to the embeddings, then dropout (§3.5, §5.4). Learns nothing.

    Raises ValueError for an input longer than `max_len`.
    """

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = MAX_LEN):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        # A buffer follows the model to its device; not persistent, since it can be computed again.
        self.register_buffer("pe", sinusoids(max_len, d_model), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (B, T, D), whose first token stands at position `start`, to (B, T, D)."""
        end = start + x.size(1)
        check_length(end, self.pe.size(0))
        return self.dropout(x + self.pe[start:end])  # (B, T, D)


# %%
torch.manual_seed(6)
add_positions = PositionalEncoding(d_model=16, dropout=0.0)
x = torch.randn(2, 10, 16)  # (B, T, D)
torch.testing.assert_close(add_positions(x), x + sinusoids(10, 16))
# `start` is for decoding one token at a time (Chapter 10): the same sums, one by one.
one_by_one = [add_positions(x[:, t : t + 1], start=t) for t in range(10)]
torch.testing.assert_close(torch.cat(one_by_one, dim=1), add_positions(x))

# %% [markdown]
# ### Why a buffer
#
# The table is a constant. PyTorch offers three places for a constant tensor, and they behave differently.
#
# **Predict.** Which of the three follows the model when it is moved to a GPU or to another precision? Which would an optimiser find?


# %%
class KeepsTable(nn.Module):
    """Holds one constant table in one of three ways, to compare what happens to it."""

    def __init__(self, kind: str):
        super().__init__()
        table = sinusoids(8, 4)
        if kind == "buffer":
            self.register_buffer("pe", table, persistent=False)
        elif kind == "parameter":
            self.pe = nn.Parameter(table)
        else:
            self.pe = table


# %%
kept = []
for kind in ("buffer", "parameter", "plain attribute"):
    module = KeepsTable(kind).to(torch.float32)
    kept.append(
        (
            kind,
            module.pe.dtype == torch.float32,
            len(list(module.parameters())) > 0,
            "pe" in module.state_dict(),
        )
    )
kept = pd.DataFrame(
    kept, columns=["kept as", "follows .to()", "trained and counted", "saved in checkpoints"]
).set_index("kept as")
assert kept.loc["buffer"].tolist() == [True, False, False]
assert kept.loc["parameter"].tolist() == [True, True, True]
assert kept.loc["plain attribute"].tolist() == [False, False, False]
kept.replace({True: "yes", False: "no"})

# %% [markdown]
# Only the buffer does what a constant should: it moves with the model, and no optimiser drifts it. It is not persistent, as it can be computed again. So a checkpoint does not carry it, and a model loads even where another `max_len` was set.
#
# **Pitfall.** What if the sequence is longer than the table? Cutting `pe[start:end]` past its end is no error in Python: one gets fewer rows. Usually the addition then fails with a message about sizes. But if exactly *one* row is left, it broadcasts, and every token gets the same position in silence.
#
# **Predict.** The table has 256 rows. Two tokens come at `start=255`. Which positions do they get without the guard?

# %%
two = torch.zeros(1, 2, 16)
unguarded = two + add_positions.pe[255:257]  # no error
assert torch.equal(unguarded[0, 0], unguarded[0, 1])  # both are at position 255
for x, start in ((two, 255), (torch.zeros(1, 300, 16), 0)):
    try:
        add_positions(x, start=start)
    except ValueError as error:
        print("ValueError:", error)

# %% [markdown]
# ## A shift is a rotation
#
# > **In short.** Go k positions on, and each hand turns by a fixed angle, wherever it stood. So one matrix, the same for all positions, leads from PE(pos) to PE(pos + k).
#
# The paper gives this as its reason for sines: a head can learn to look "three words back" with one linear map. With $\theta = k\,\omega_i$, the addition theorems say for each pair
#
# $$ \begin{pmatrix} \sin((pos+k)\,\omega_i) \\ \cos((pos+k)\,\omega_i) \end{pmatrix}
# = \begin{pmatrix} \cos\theta & \sin\theta \\ -\sin\theta & \cos\theta \end{pmatrix}
# \begin{pmatrix} \sin(pos\,\omega_i) \\ \cos(pos\,\omega_i) \end{pmatrix} $$
#
# All pairs together make a matrix $R_k$ of shape (D, D) with D/2 such blocks on its diagonal, and $PE_{pos+k} = R_k\,PE_{pos}$.


# %%
def shift_matrix(k: int, d_model: int) -> Tensor:
    """R_k (D, D), a rotation in each pair of features: PE[pos + k] = R_k · PE[pos] for all pos (§3.5)."""
    theta = k * 10_000.0 ** -(torch.arange(0, d_model, 2).double() / d_model)  # (D/2,)
    cos, sin = theta.cos(), theta.sin()
    blocks = torch.stack([cos, sin, -sin, cos], dim=-1).view(-1, 2, 2)  # (D/2, 2, 2)
    return torch.block_diag(*blocks)  # (D, D)


# %%
table = sinusoids(200, 32)  # (200, D)
for k in (1, 3, 50, -7):
    shifted = table @ shift_matrix(k, 32).T  # row pos is R_k · PE[pos]
    if k > 0:
        torch.testing.assert_close(shifted[:-k], table[k:])
    else:
        torch.testing.assert_close(shifted[-k:], table[:k])
turn = shift_matrix(3, 32)
torch.testing.assert_close(turn @ turn.T, torch.eye(32))  # a rotation keeps lengths
torch.testing.assert_close(turn @ shift_matrix(4, 32), shift_matrix(7, 32))  # 3 on and 4 on: 7 on

# %% [markdown]
# That used our formula for $R_k$. An independent test: ask least squares for the best matrix that leads from row pos to row pos + 3, for 200 positions at once. For sinusoids it finds a perfect one. For a random table of the same size no matrix comes close.


# %%
def shift_error(table: Tensor, k: int) -> float:
    """Share of table[k:] (n, D) that the best linear map of table[:-k] fails to explain, 0 to 1."""
    before, after = table[:-k], table[k:]
    best = torch.linalg.lstsq(before, after, driver="gelsd").solution  # (D, D)
    return ((before @ best - after).square().sum() / after.square().sum()).item()


# %%
torch.manual_seed(7)
assert shift_error(sinusoids(200, 16), k=3) < 1e-12
assert shift_error(torch.randn(200, 16), k=3) > 0.7


# %%
def clock_chart(positions: int, step: int) -> alt.FacetChart:
    """Where three hands stand at each position; every `step`-th position carries its number."""
    table = sinusoids(positions, 16)
    points = pd.DataFrame(
        [
            (
                pos,
                str(pos) if pos % step == 0 else "",
                f"pair {i}: {360 / (2 * math.pi) * 10_000 ** (-2 * i / 16):.1f}° a step",
                round(table[pos, 2 * i].item(), 4),
                round(table[pos, 2 * i + 1].item(), 4),
                round(1.22 * table[pos, 2 * i].item(), 4),
                round(1.22 * table[pos, 2 * i + 1].item(), 4),
            )
            for i in (0, 1, 2)
            for pos in range(positions)
        ],
        columns=["position", "label", "hand", "sin", "cos", "label x", "label y"],
    )
    scale = alt.Scale(domain=(-1.4, 1.4))
    axis = alt.Axis(values=[-1, 0, 1])
    base = alt.Chart(points)
    dots = base.mark_circle(size=70, opacity=1).encode(
        x=alt.X("sin:Q", scale=scale, axis=axis),
        y=alt.Y("cos:Q", scale=scale, axis=axis),
        color=alt.Color("position:Q", scale=alt.Scale(scheme="viridis")),
    )
    labels = base.mark_text().encode(
        x=alt.X("label x:Q", title="sin"), y=alt.Y("label y:Q", title="cos"), text="label:N"
    )
    return (
        alt.layer(dots, labels)
        .properties(width=190, height=190)
        .facet(facet=alt.Facet("hand:N", title=None), columns=3)
    )


# %%
titled(
    clock_chart(positions=10, step=3),
    "Three steps are the same turn from anywhere",
    "Three hands of sixteen features at positions 0 to 9. From 0 to 3, from 3 to 6 and from 6 to 9 "
    "each hand turns by the same angle; fast hands far, slow hands little.",
)

# %% [markdown]
# ## Only the distance counts
#
# > **In short.** Compare two positions by their dot product, and it does not matter where they are, only how far apart.
#
# From $\cos a\cos b + \sin a\sin b = \cos(a-b)$ follows
#
# $$ PE_p \cdot PE_q = \sum_{i=0}^{D/2-1} \cos\big((p-q)\,\omega_i\big). $$

# %%
table = sinusoids(50, 128)
products = table @ table.T  # (50, 50)
speeds = 10_000.0 ** -(torch.arange(0, 128, 2) / 128)  # (D/2,)
for distance in range(50):
    expected = torch.cos(distance * speeds).sum().expand(50 - distance)
    torch.testing.assert_close(products.diagonal(distance), expected)  # constant along diagonals
    torch.testing.assert_close(products.diagonal(-distance), expected)  # and symmetric

# %% [markdown]
# **Predict.** Does the dot product fall steadily with the distance?

# %%
falling = pd.DataFrame(
    [
        (distance, (sinusoids(201, d) @ sinusoids(1, d)[0])[distance].item() / (d / 2), f"D = {d}")
        for d in (32, 128, 512)
        for distance in range(0, 201, 2)
    ],
    columns=["distance", "cosine", "width"],
)
titled(
    lines(falling, "distance", "cosine", "width", width=560),
    "Near positions are alike, far ones less",
    "Cosine of two position vectors against their distance. It falls fast, then in waves, and "
    "wider models are smoother: more hands, whose waves cancel.",
)

# %% [markdown]
# The product is the same for p − q and q − p: as it stands, "two before" and "two after" look equal. It takes the matrices $W^Q$ and $W^K$ to tell them apart, and the rotation above shows that they can.
#
# ## Learned positions
#
# > **In short.** Let training find the table. It works as well, up to the longest position it has seen.
#
# $$ x_{pos} = E_{i_{pos}}\sqrt{D} + L_{pos}, \qquad L \text{ of shape (max\_len, D), learned} $$


# %%
class LearnedPositions(nn.Module):
    """Adds one learned vector a position (the paper's Table 3, row E), then dropout.

    Raises ValueError for an input longer than `max_len`.
    """

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = MAX_LEN):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.pe = nn.Parameter(torch.empty(max_len, d_model))
        nn.init.normal_(self.pe, std=0.02)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (B, T, D), whose first token stands at position `start`, to (B, T, D)."""
        end = start + x.size(1)
        check_length(end, self.pe.size(0))
        return self.dropout(x + self.pe[start:end])  # (B, T, D)


# %%
torch.manual_seed(8)
learned = LearnedPositions(d_model=16, dropout=0.0, max_len=64)
x = torch.randn(3, 10, 16)  # (B, T, D)
torch.testing.assert_close(learned(x), x + learned.pe[:10])
assert sum(p.numel() for p in learned.parameters()) == 64 * 16
assert not list(PositionalEncoding(16).parameters())  # sinusoids have nothing to learn

# %% [markdown]
# **Predict.** The batch above has sentences of ten tokens, and the table has 64 rows. Which rows learn something from it?

# %%
learned(x).square().sum().backward()
has_learned = learned.pe.grad.abs().sum(-1) > 0  # (max_len,)
assert has_learned[:10].all() and not has_learned[10:].any()
try:
    learned(torch.zeros(1, 65, 16))
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# Row 50 learns only from sentences of at least 51 tokens. If training has few, the row stays noise; and beyond the table there is nothing at all. Sinusoids are defined everywhere, though a model that never saw position 200 in training may still be at a loss there.
#
# Before training the two tables look very different. Compare every position with every other.

# %%
torch.manual_seed(9)
fresh = LearnedPositions(128).pe[:50].detach()
unit = nn.functional.normalize(fresh, dim=-1)
chance = unit @ unit.T  # (50, 50) cosines
look = {
    "scheme": "diverging",
    "domain": (-1, 1),
    "numbers": False,
    "cell": 5,
    "row_title": "position",
    "column_title": "position",
    "value_title": "cosine",
}
assert (chance - torch.eye(50)).abs().max() < 0.5  # no position resembles another
titled(
    alt.hconcat(
        heatmap(products / 64, **look).properties(title="sinusoids"),
        heatmap(chance, **look).properties(title="learned, before training"),
    ),
    "Sinusoids know who is near, a fresh table does not",
    "Cosine of each pair of 50 positions, D = 128. Left: the same along every diagonal, high near "
    "the middle one. Right: chance; neighbourhood has yet to be learned.",
)

# %% [markdown]
# In the paper's Table 3, row E, learned positions reach 25.7 BLEU where sinusoids reach 25.8: no difference to speak of. The authors kept the sinusoids in the hope that they reach beyond the lengths seen in training.
#
# ## Summary
#
# - An embedding is a table; looking up a row is a product with a one-hot vector, done cheaply. Ids must be integers: as half-precision floats they turn into other ids.
# - Times $\sqrt{D}$ lifts a small table (variance $1/D$, so that it can be shared with the last layer) above the positions, whose length is $\sqrt{D/2}$.
# - A narrow table with a projection saves parameters and limits the rank.
# - Without positions, attention and the whole encoder are permutation-equivariant, proved over all orders of five tokens. A causal mask alone already breaks that.
# - Sinusoids are hands of clocks. A shift by k is one rotation for all positions, and dot products depend on the distance only.
# - The table is a buffer: it moves with the model, is not trained and need not be saved. Odd widths and over-long input get a clear error.
#
# ## What the paper did that we don't
#
# - The paper shares one table between both embeddings and the last layer. `Embeddings` is ready for it; Chapter 4 offers it as a switch.
# - The paper's formula interleaves sines and cosines, as we do. Its published code put all sines first and all cosines after. A reordering of features makes no difference to a model whose matrices are learned.
#
# ## Exercises
#
# Six, from a warm-up to a project. [Chapter 1](ch01_attention.ipynb) says how the checkers work: they are silent when your function is right, and otherwise say what is wrong.
#
# ### Exercise 1 *warm-up* · Sines first, cosines after
#
# The paper's published code puts all D/2 sines first and all cosines after. Write `halves(length, d_model)`, that table of shape (length, D), with the speeds of `sinusoids`. For an odd D it should raise a `ValueError`. Then say why a model can't tell the difference.


# %%
def halves_of(angles: Tensor) -> Tensor:
    """The table (length, D) of all sines, then all cosines, of angles (length, D/2)."""
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def check_halves(candidate: Callable[[int, int], Tensor]) -> None:
    """Holds candidate(length, d_model) against the definition, number by number."""
    for length, d_model in ((6, 8), (40, 4)):
        hands = range(d_model // 2)
        angles = [[pos / 10_000 ** (2 * i / d_model) for i in hands] for pos in range(length)]
        angles = torch.tensor(angles, dtype=torch.float64)  # (length, D/2)
        slow = [[pos / 10_000 ** (i / d_model) for i in hands] for pos in range(length)]
        mistakes = {
            "sines and cosines take turns; here each kind fills one half": torch.stack(
                (angles.sin(), angles.cos()), dim=-1
            ).flatten(1),
            "the cosines come first": halves_of(angles).roll(d_model // 2, dims=1),
            "the hands slow down only half as fast: the exponent is 2i/D": halves_of(
                torch.tensor(slow)
            ),
            "positions begin at 0, where all sines are 0": halves_of(angles + angles[1]),
        }
        got = candidate(length, d_model)
        if not same_numbers(got, halves_of(angles)):
            blame(got, mistakes, "other numbers than sine and cosine of position times speed")
    try:
        candidate(6, 7)
    except ValueError:
        return
    except RuntimeError:
        raise AssertionError(
            "an odd D fails inside a tensor operation: say it in words first"
        ) from None
    raise AssertionError("an odd D is accepted: one hand has no cosine, so no shift can turn it")


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_halves(length: int, d_model: int) -> Tensor:
    """`sinusoids`, every second column from 0, then every second from 1; it raises for an odd D."""
    table = sinusoids(length, d_model)
    return torch.cat((table[:, 0::2], table[:, 1::2]), dim=-1)


check_halves(solution_halves)

# %% [markdown]
# Every layer that reads these vectors begins with a matrix. Reorder the features, reorder the matrix's rows in the same way, and the products are the same; a learned matrix doesn't care in which order it starts. Two wrong tables:

# %%
print(rejection(check_halves, sinusoids))
print(rejection(check_halves, lambda length, d: solution_halves(length, d + d % 2)[:, :d]))

# %% [markdown]
# ### Exercise 2 *think* · Where √D could hide
#
# Leave out the factor $\sqrt{D}$ and draw the table with variance 1 instead. The sums of words and positions look just the same at the start. Why does the paper not do this? And what changes for an optimiser such as Adam, whose first steps move every number by about the learning rate?
#
# <details><summary>An answer</summary>
#
# The paper shares the table with the last layer, where a logit is the product of a row and a hidden vector of variance 1. With rows of variance 1 that sum has spread $\sqrt{D}$, and the first softmax is as good as one-hot; with variance $1/D$ the logits start with spread 1 (Chapter 4). As for Adam: a step of $10^{-3}$ is a thousandth of an entry of size 1, but more than a fiftieth of one of size $1/\sqrt{512} \approx 0.044$. With the factor, the words move $\sqrt{D}$ times as fast.
#
# </details>

# %% [markdown]
# ### Exercise 3 *code* · The distance between two rows
#
# "Only the distance counts" says $PE_p \cdot PE_q = f(p - q)$. So the squared length $\lVert PE_p - PE_q \rVert^2$ depends on p − q only, too. Write `squared_gap(distance, d_model)`, which computes it without making a table, for any whole distance. What does it tend to for far positions in a wide model, and why?


# %%
def check_squared_gap(candidate: Callable[[int, int], float]) -> None:
    """Holds candidate(distance, d_model) against two rows of a table, at several places."""
    for d_model in (16, 2, 64):
        table = sinusoids(60, d_model).double()
        for distance in (7, 1, 0, 40, -7):
            start = max(0, -distance)
            pairs = [(table[p], table[p + distance]) for p in (start, start + 3, start + 11)]
            product = torch.stack([a @ b for a, b in pairs]).mean()
            gap = torch.stack([(a - b).square().sum() for a, b in pairs]).mean()
            mistakes = {
                "that is the dot product: a squared gap also has the rows' own lengths": product,
                "a row's squared length is D/2, not D: sin² + cos² is 1 for each pair": d_model * 2
                - 2 * product,
                "a row's squared length isn't 1: it is 1 for each of the D/2 pairs": 2
                - 2 * product,
                "the cross term counts twice: (a − b)² = a² − 2ab + b²": d_model - product,
                "that is the length, not its square": gap.sqrt(),
            }
            got = torch.as_tensor(candidate(distance, d_model), dtype=torch.float64)
            if not same_numbers(got, gap):
                blame(
                    got,
                    mistakes,
                    "other numbers than the table's: which cosine is it for which pair?",
                )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_squared_gap(distance: int, d_model: int) -> float:
    """‖PE_p − PE_q‖² at p − q = distance: D/2 + D/2 − 2 Σ cos(distance · ω_i)."""
    speeds = [10_000 ** (-2 * i / d_model) for i in range(d_model // 2)]
    return sum(2 - 2 * math.cos(distance * speed) for speed in speeds)


check_squared_gap(solution_squared_gap)
wide = [solution_squared_gap(distance, 4096) for distance in (0, 1, 10, 100, 1_000)]
assert wide == sorted(wide) and wide[-1] < 4096
[round(gap / 4096, 4) for gap in wide]

# %% [markdown]
# Each pair is the chord between two hands on a circle, $2 - 2\cos\theta = 4\sin^2(\theta/2)$. Were all angles spread evenly, the cosines would cancel, and the gap would be D: rows as far apart as perpendicular ones. But the slow hands never get far, so within a sentence the share stays below 1. Two wrong formulas:

# %%
print(rejection(check_squared_gap, lambda distance, d: d + solution_squared_gap(distance, d)))
print(rejection(check_squared_gap, lambda distance, d: solution_squared_gap(distance, d) ** 0.5))

# %% [markdown]
# ### Exercise 4 *code* · A longer table from a shorter one
#
# A model was trained with `LearnedPositions` of `max_len` 64, and shall now read 100 tokens. Its table (64, D) must become one of 100 rows. Write `stretched(table, max_len)`: the first rows are the learned ones, unchanged, and the rest continue by the rule of this chapter: one linear map that leads from a row to the next, fitted to the learned rows by least squares (`torch.linalg.lstsq`, `driver="gelsd"`) and applied again and again. Where `max_len` is not larger, the table is cut. For a table of sinusoids the continuation is exact. For which tables is it worthless?


# %%
def check_stretched(candidate: Callable[[Tensor, int], Tensor]) -> None:
    """Lets the candidate continue sinusoids, whose further rows are known; and cut; and leave alone."""
    for d_model in (4, 8):
        table = sinusoids(40, d_model).double()
        given = table[:24].clone()
        step = torch.linalg.lstsq(given[:-1], given[1:], driver="gelsd").solution  # (D, D)
        back = [given[-1] @ torch.linalg.matrix_power(step.T, k) for k in range(1, 17)]
        ahead = [given[0] @ torch.linalg.matrix_power(step, k) for k in range(1, 17)]
        mistakes = {
            "the last row is repeated: those positions can't be told apart": given[-1:].expand(
                16, -1
            ),
            "the table begins again: position 24 looks like position 0": given[:16],
            "the new rows are 0: no position at all": torch.zeros_like(table[24:]),
            "the hands turn backwards: the map is for rows, used as row @ map": torch.stack(back),
            "continued from the first row; the last one is where it goes on": torch.stack(ahead),
        }
        got = candidate(given, 40)
        assert got.shape == table.shape, "the table must have max_len rows, of the old width"
        assert torch.equal(given, table[:24]), (
            "the learned table itself was changed: make a new one"
        )
        assert torch.equal(got[:24], given), "the learned rows must stay, to the last digit"
        if not torch.allclose(got, table, atol=1e-6):
            blame(got[24:], mistakes, "the new rows don't go on as the old ones do")
        assert torch.equal(candidate(given, 10), given[:10]), "a shorter table is the old one, cut"


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_stretched(table: Tensor, max_len: int) -> Tensor:
    """The rows of table (n, D), then rows that each follow from the one before by one map; (max_len, D)."""
    step = torch.linalg.lstsq(table[:-1], table[1:], driver="gelsd").solution  # (D, D)
    rows = list(table[:max_len])
    while len(rows) < max_len:
        rows.append(rows[-1] @ step)
    return torch.stack(rows)


check_stretched(solution_stretched)

# %% [markdown]
# It is worthless where no linear rule holds: for a table of random rows, `shift_error` was above 0.7. Whether a *trained* table follows such a rule is a question for a measurement, and `shift_error` is the instrument. Common ways to load a longer table, and what is wrong with them:


# %%
def padded_by(make: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """A way to stretch a table (n, D): cut, or followed by make(table, number of rows wanted)."""
    return lambda table, max_len: torch.cat((table, make(table, max(0, max_len - len(table)))))[
        :max_len
    ]


# %%
for make in (
    lambda table, more: table[-1:].expand(more, -1),
    lambda table, more: table[:more],
    lambda table, more: table.new_zeros(more, table.size(1)),
):
    print(rejection(check_stretched, padded_by(make)))

# %% [markdown]
# ### Exercise 5 *think* · Twice as far
#
# Fit, with `torch.linalg.lstsq`, one matrix that leads from PE(pos) to PE(2·pos). Does the error of the fit stay small? Why?
#
# <details><summary>An answer</summary>
#
# Doubling the angle is no linear map: $\sin 2\theta = 2\sin\theta\cos\theta$ multiplies two features of the pair. For the slow hands, whose sines are nearly straight lines within the table, a factor of 2 for the sine fits well; the fast ones fail. "k further on" is the same turn from everywhere, "twice as far" another turn from each place.
#
# </details>

# %% [markdown]
# ### Exercise 6 *project* · Order without positions
#
# The causal mask alone breaks the symmetry. Take away the positions, keep the mask, and ask which pairs of orders of four *different* tokens the *last* output can't tell apart, after one layer of causal self-attention, and after two. Write `confused(layers)`: for a list of `MultiHeadedAttention`, applied one after the other with the mask to distinct random tokens, the number of orders, of all 4! = 24, whose last output equals that of the first order. Predict both numbers first.


# %%
def check_confused(candidate: Callable[[list[MultiHeadedAttention]], int]) -> None:
    """Compares the count with one derived by hand, for one layer and for two."""
    torch.manual_seed(0)
    layers = [MultiHeadedAttention(2, 8, dropout=0.0).double() for _ in range(2)]
    for weight in nn.ModuleList(layers).parameters():
        nn.init.normal_(weight, std=0.7)  # sharp heads: plain averages would soon all be one
    found = [candidate(layers[:n]) for n in (1, 2)]
    assert found[0] != 24, "every order agrees: compare one output, the last, not a sum or a set"
    assert found[0] != 1, "no two agree after one layer: compare the *last* output, up to rounding"
    assert found[0] == 6, "after one layer the last token asks, and those before it are a set"
    assert found[1] != 6, "a second layer changes nothing: so it is without the causal mask"
    assert found[1] == 1, "a second layer reads outputs that know what came before them"


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
@torch.no_grad()
def solution_confused(layers: list[MultiHeadedAttention]) -> int:
    """How many of the 24 orders of four tokens have the last output of the first order."""
    first = layers[0].project_query.weight
    tokens = torch.randn(4, first.size(1), dtype=first.dtype)
    x = tokens[torch.tensor(list(permutations(range(4))))]  # (24, T, D)
    for layer in layers:
        x = layer(x, x, x, subsequent_mask(4))  # (24, T, D)
    return torch.isclose(x[:, -1], x[:1, -1]).all(dim=-1).sum().item()


check_confused(solution_confused)

# %% [markdown]
# After one layer the last token is the query, and the three before it are a set: 3! = 6 orders agree. But their outputs differ from order to order, since each has seen only what came before it. The second layer reads those, and no two orders agree. So a decoder can learn order without positions, if it has two layers; an encoder, without the mask, never can:


# %%
def confused_anywhere(layers: list[MultiHeadedAttention], causal: bool, last: bool = True) -> int:
    """Like `solution_confused`, with or without the mask, for the last output or for all of them."""
    first = layers[0].project_query.weight
    x = torch.randn(4, first.size(1), dtype=first.dtype)
    x = x[torch.tensor(list(permutations(range(4))))]  # (24, T, D)
    for layer in layers:
        x = layer(x, x, x, subsequent_mask(4) if causal else None)  # (24, T, D)
    x = x[:, -1:] if last else x
    return torch.isclose(x, x[:1]).flatten(1).all(dim=-1).sum().item()


# %%
print(rejection(check_confused, lambda layers: confused_anywhere(layers, causal=False)))
print(rejection(check_confused, lambda layers: confused_anywhere(layers, causal=True, last=False)))

# %% [markdown]
# Next: [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb)
