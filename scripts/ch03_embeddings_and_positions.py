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
# After this chapter you can turn token ids into vectors that attention can work with, show that attention alone cannot tell *dog bites man* from *man bites dog*, and fix this with a table of sines.
#
# | | |
# |---|---|
# | In the paper | §3.4 (embeddings), §3.5 (positional encoding), Table 3, row E (learned positions) |
# | Time | 20 minutes to read, 50 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb) · [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb) |
#
# *If you read only three cells:* "Attention cannot see order", its table of who sees order; "Sinusoidal positions", the function `sinusoids`; "A shift is a rotation", the picture of the clocks.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. With one sequence only, as here, its length is T.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Callable
from itertools import permutations

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import bars, heatmap, panels, titled
from scripts.book.exercises import check
from scripts.book.figures.model import clocks, lookup
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention

# %%
MAX_LEN = 256  # tokens of the longest sentence that the series' translators take

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## From ids to vectors
#
# > **In short.** A table has one row for each token of the vocabulary. To embed a token is to copy its row.
#
# A token is given as a number, its *id*: 5 might be *dog*. The number means nothing, so each id gets its own vector, learned in training.
#
# $$ \mathrm{embed}(w) = E_w\,\sqrt{D} \;=\; \mathrm{onehot}(w)\,E\,\sqrt{D} $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | ids $w$ | (B, T) | whole numbers from 0 to V−1 |
# | $E$ | (V, D) | the table, learned |
# | $\mathrm{onehot}(w)$ | (V,) | zeros, and a 1 at place $w$ |
# | result | (B, T, D) | one vector for each token |


# %%
class Embeddings(nn.Module):
    """Token ids to vectors, times √d_model (§3.4). `lut` is the look-up table, of variance 1/d_model.

    Raises TypeError for ids that are not integers.
    """

    def __init__(self, d_model: int, vocab: int):
        super().__init__()
        self.d_model = d_model
        self.lut = nn.Embedding(vocab, d_model)  # (V, D), of variance 1
        self.lut.weight.data *= d_model**-0.5

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) of int64 or int32, to (B, T, D)."""
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"token ids must be int64 or int32, not {ids.dtype}")
        return self.lut(ids) * math.sqrt(self.d_model)  # (B, T, D)


# %% [markdown]
# **Predict.** The gradient of a sum of embedded vectors flows back into the table. For the ids 5, 2, 0, 2, which of the table's six rows get a gradient?

# %%
torch.manual_seed(0)
embed = Embeddings(d_model=4, vocab=6)
ids = torch.tensor([[5, 2, 0, 2]])  # (B, T)
one_hot = torch.eye(6)[ids]  # (B, T, V)
vectors = embed(ids)  # (B, T, D)
torch.testing.assert_close(vectors, one_hot @ embed.lut.weight * math.sqrt(4))

vectors.sum().backward()
touched = embed.lut.weight.grad.abs().sum(dim=-1).nonzero().flatten()
print("rows with a gradient:", touched.tolist())

# %%
token_names = [f"id {i}" for i in ids[0].tolist()]
titled(
    lookup(one_hot[0], embed.lut.weight.detach() * 2, vectors[0].detach(), token_names),
    "To embed is to pick rows",
    "Left times middle is right: each 1 copies one row of the table. The id 2 occurs twice and "
    "gets the same vector twice.",
)

# %% [markdown]
# A row that is not looked up gets no gradient from the lookup, so rare words are rarely trained.
#
# **Pitfall.** Ids must be integers all the way. They often pass through NumPy or mixed precision, so it is tempting to accept floats and cast them back. `Embeddings` refuses floats.
#
# **Predict.** What does id 2049 become after a cast to float16 and back? And 30,001?

# %%
before = torch.tensor([2047, 2049, 5001, 30001])
print(before.tolist(), "→", before.half().long().tolist())
try:
    embed(before.half())
except TypeError as error:
    print("TypeError:", error)

# %% [markdown]
# Float16 has steps of 2 above 2,048, of 4 above 4,096, and so on: without the refusal, a word becomes *another word*.
#
# ## Attention cannot see order
#
# > **In short.** Attention treats its input as a set. Shuffle the words, and you get the same outputs, shuffled the same way.
#
# Let $P$ be a (T, T) permutation matrix, so $PX$ is $X$ with its rows shuffled. Queries, keys and values are shuffled the same way. Softmax treats each row by itself, whatever the order of its columns: $\mathrm{softmax}(PAP^{\top}) = P\,\mathrm{softmax}(A)\,P^{\top}$ for scores $A$. So
#
# $$ \mathrm{softmax}\!\left(PXW^Q\,(PXW^K)^{\top}\right) PXW^V
# = P\;\mathrm{softmax}\!\left(XW^Q\,(XW^K)^{\top}\right) P^{\top}P\,XW^V
# = P \cdot \mathrm{Attention}(X), $$
#
# since $P^{\top}P = I$: attention is *permutation-equivariant*. Everything else in an encoder (chapter 4) works on each position alone, so the whole encoder is equivariant too: *dog* gets the same vector in *dog bites man* and in *man bites dog*.


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
# We test our attention layer, with and without a causal mask, and PyTorch's encoder of three layers.
#
# **Predict.** Which of the three can see order?

# %%
torch.manual_seed(4)
x = torch.randn(5, 16)  # (T, D): five tokens
attend = MultiHeadedAttention(h=4, d_model=16, dropout=0.0)
layer = nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32, dropout=0.0, batch_first=True)
encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
gaps = {
    "attention": equivariance_gap(lambda x: attend(x, x, x), x),
    "encoder, three layers": equivariance_gap(encoder, x),
    "attention, causal mask": equivariance_gap(lambda x: attend(x, x, x, subsequent_mask(5)), x),
}
for name, gap in gaps.items():
    print(f"{name:23} sees order: {'no' if gap < 1e-12 else 'yes'}")
assert [gap < 1e-12 for gap in gaps.values()] == [True, True, False]

# %% [markdown]
# A causal mask *does* distinguish the positions: the first token sees one token, the second sees two, and so on.
#
# ### Who bites?
#
# We train one attention layer on sentences such as *dog bites man*, with twenty names and one verb. The vector at the verb's place must name who bites. On pairs held back from training we test which of the two names the layer prefers.


# %%
def who_bites(positions: nn.Module, steps: int = 80) -> float:
    """Train one attention layer to name who bites; how often it is right on pairs it never saw."""
    names, verb, d = 20, 20, 32
    pairs = torch.tensor(list(permutations(range(names), 2)))  # (380, 2): who bites, who is bitten
    verbs = torch.full((len(pairs), 1), verb)
    ids = torch.cat((pairs[:, :1], verbs, pairs[:, 1:]), dim=1)  # (380, T = 3)
    held_back = pairs.sum(dim=1) % 4 == 0  # always both orders of a pair

    embed, attend = Embeddings(d, names + 1), MultiHeadedAttention(2, d, dropout=0.0)
    head = nn.Linear(d, names)
    parts = nn.ModuleList([embed, positions, attend, head])
    optimizer = torch.optim.Adam(parts.parameters(), lr=0.01)

    def answer(ids: Tensor) -> Tensor:
        x = positions(embed(ids))  # (B, T, D)
        return head(attend(x, x, x)[:, 1])  # (B, names): from the verb's place

    for _ in range(steps):
        loss = F.cross_entropy(answer(ids[~held_back]), pairs[~held_back, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scores = answer(ids[held_back]).gather(1, pairs[held_back])  # (B, 2)
    return (scores[:, 0] > scores[:, 1]).double().mean().item()


# %% [markdown]
# **Predict.** How often is the layer right if no positions are added?

# %%
torch.manual_seed(5)
no_positions = who_bites(nn.Identity())
print(f"right without positions: {no_positions:.0%}")
assert no_positions == 0.5

# %% [markdown]
# Exactly half the time, and no training can change that. *Dog bites man* and *man bites dog* get the same answer, which is right for only one. So the vectors themselves must carry the position.
#
# ## Sinusoidal positions
#
# > **In short.** A clock tells the time with a fast hand and a slow one. Here D/2 hands turn at D/2 speeds, and together their angles tell the position.
#
# $$ PE_{(pos,\,2i)} = \sin\!\big(pos\cdot\omega_i\big), \qquad
# PE_{(pos,\,2i+1)} = \cos\!\big(pos\cdot\omega_i\big), \qquad \omega_i = 10000^{-2i/D} $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $pos$ | 0 … length−1 | the position |
# | $i$ | 0 … D/2−1 | which pair of features: which hand |
# | $\omega_i$ | (D/2,) | the hand's speed; the wavelength $2\pi/\omega_i$ ranges from $2\pi$ to almost $10000\cdot2\pi$ |
# | $PE$ | (length, D) | added to the embeddings |


# %%
def speeds(d_model: int) -> Tensor:
    """ω (D/2,): the angle by which each hand turns from one position to the next; in float64."""
    return 10_000.0 ** -(torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)


def sinusoids(length: int, d_model: int) -> Tensor:
    """PE[pos, 2i] = sin(pos / 10000^(2i/D)), PE[pos, 2i+1] = cos of the same (§3.5): (length, D).

    Raises ValueError for an odd `d_model`: each sine needs its cosine.
    """
    if d_model % 2:
        raise ValueError(f"sinusoidal positions need an even d_model, not {d_model}")
    position = torch.arange(length, dtype=torch.float64)  # (length,)
    angle = torch.outer(position, speeds(d_model))  # (length, D/2)
    waves = torch.stack((angle.sin(), angle.cos()), dim=-1)  # (length, D/2, 2)
    return waves.flatten(-2).to(torch.get_default_dtype())  # (length, D): sin, cos, sin, cos, …


# %% [markdown]
# **Predict.** At D = 64, feature 0 repeats about every six positions. After how many positions does feature 8 repeat?

# %%
pe = sinusoids(40, 64)
for pos in range(40):
    for i in range(32):
        angle = pos / 10_000 ** (2 * i / 64)
        assert math.isclose(pe[pos, 2 * i], math.sin(angle), abs_tol=1e-12)
        assert math.isclose(pe[pos, 2 * i + 1], math.cos(angle), abs_tol=1e-12)
for feature in (0, 8, 16, 32):
    wavelength = 2 * math.pi * 10_000 ** (feature / 64)
    print(f"feature {feature:2} repeats after {wavelength:5.1f} positions")

# %%
titled(
    heatmap(
        sinusoids(32, 64),
        row_title="position",
        column_title="feature",
        value_title="value",
        scheme="diverging",
        domain=(-1, 1),
        numbers=False,
    ),
    "Each row is a position's signature",
    "The fast pairs on the left change from row to row. Those on the right hardly change within a "
    "sentence: there the sine stays near 0 and the cosine near 1.",
)

# %% [markdown]
# **Pitfall.** Each sine needs its cosine, so D must be even. Well-known code fills the table by slices, and at an odd width its error speaks of sizes, not of the cause.
#
# ## Adding them
#
# > **In short.** Positions are *added* to the embeddings, not appended, and the sum goes through dropout (§5.4).
#
# $$ x_{pos} = E_{w_{pos}}\sqrt{D} + PE_{pos}, \qquad x \text{ of shape (B, T, D)} $$
#
# Adding costs no width. If D is large, words and positions still have room to lie in nearly perpendicular directions.


# %%
def check_length(length: int, max_len: int) -> None:
    """Raise ValueError if a sequence of `length` tokens is longer than `max_len`."""
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


# %% [markdown]
# `start` is for decoding one token at a time (chapter 8).

# %%
torch.manual_seed(6)
add_positions = PositionalEncoding(d_model=16, dropout=0.0)
x = torch.randn(2, 5, 16)  # (B, T, D)
torch.testing.assert_close(add_positions(x), x + sinusoids(5, 16))
one_by_one = [add_positions(x[:, t : t + 1], start=t) for t in range(5)]
torch.testing.assert_close(torch.cat(one_by_one, dim=1), add_positions(x))
assert not list(add_positions.parameters()) and not add_positions.state_dict()


def attend_with_positions(x: Tensor) -> Tensor:
    """The attention layer from above on x (B, T, D) with positions added, to (B, T, D)."""
    placed = add_positions(x)  # (B, T, D)
    return attend(placed, placed, placed)


assert equivariance_gap(attend_with_positions, x[0]) > 0.01  # now it sees order

# %% [markdown]
# **Pitfall.** If the sequence is longer than the table, the slice `pe[start:end]` has fewer rows, which is no error in Python. Then the addition usually fails, but not always.
#
# **Predict.** The table has 256 rows. Two tokens come at `start=255`. Without `check_length`, which positions do they get?

# %%
two = torch.zeros(1, 2, 16)
unguarded = two + add_positions.pe[255:257]  # one row is left, and it broadcasts
print("at position 255:", (unguarded[0] == add_positions.pe[255]).all(dim=-1).tolist())
try:
    add_positions(two, start=255)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# ## Why multiply by √d_model
#
# > **In short.** The table's entries are small, but the positions added to them are not. The factor brings the words up to the scale of the positions.
#
# The paper gives no reason; this is the usual explanation. The paper also uses the table $E$ as the model's last linear layer (chapter 4), where each score is a row of $E$ times the model's last vector. The entries of that vector have variance about 1, so for scores of about ±1 the entries of $E$ need a variance of $1/D$. `Embeddings` starts with that variance, and a row of $E$ then has length
#
# $$ \|E_i\| \approx \sqrt{D \cdot \tfrac1D} = 1. $$
#
# A position consists of D/2 pairs of a sine and a cosine, and $\sin^2 + \cos^2 = 1$, so its length is exactly $\sqrt{D/2}$. At D = 512 that is 16.
#
# **Predict.** We compare directions by their cosine. Without the factor, which pair is more alike: the same word at two places, or two words at one place?

# %%
torch.manual_seed(2)
embed, places = Embeddings(512, vocab=400), sinusoids(16, 512)  # places: (16, D)
alike = []
with torch.no_grad():
    for kind, words in (("unscaled", embed.lut.weight), ("× √D", embed(torch.arange(400)))):
        length = words.norm(dim=-1).mean()
        word, other = words[:200], words[200:]  # (200, D) each
        same_word = F.cosine_similarity(word + places[3], word + places[9]).mean().item()
        same_place = F.cosine_similarity(word + places[3], other + places[3]).mean().item()
        cosines = f"cosine of one word {same_word:.2f}, of one place {same_place:.2f}"
        print(f"{kind:8}  lengths {length:4.1f} and {places[3].norm():.1f}, {cosines}")
        alike += [(f"{kind}: same word, other place", same_word, kind)]
        alike += [(f"{kind}: other word, same place", same_place, kind)]
alike = pd.DataFrame(alike, columns=["pair", "cosine", "words"])
assert alike["cosine"][1] > 0.99 > alike["cosine"][0]  # unscaled: two different words look the same
assert alike["cosine"][2] > 0.8 > 0.4 > alike["cosine"][3]  # scaled: the word leads

# %%
titled(
    bars(alike, "pair", "cosine", number_format=".2f", color="words"),
    "The factor lets the word speak",
    "Mean cosine over 200 pairs of words, D = 512. Unscaled, two different words at one place "
    "are all but identical. Scaled, the word counts more than its place.",
)

# %% [markdown]
# **Pitfall.** The factor and the initial variance belong together. `nn.Embedding` by itself starts with variance 1. Times $\sqrt{D}$, its words would have length 512, beside positions of length 16.
#
# ## A shift is a rotation
#
# > **In short.** Move k positions on, and each hand turns by a fixed angle. So one matrix, the same for all positions, takes PE(pos) to PE(pos + k).
#
# This is the paper's reason for sines: with one linear map, a head can learn to look three words ahead, or back. With $\theta = k\,\omega_i$, the angle addition formulas give for each pair
#
# $$ \begin{pmatrix} \sin((pos+k)\,\omega_i) \\ \cos((pos+k)\,\omega_i) \end{pmatrix}
# = \begin{pmatrix} \cos\theta & \sin\theta \\ -\sin\theta & \cos\theta \end{pmatrix}
# \begin{pmatrix} \sin(pos\,\omega_i) \\ \cos(pos\,\omega_i) \end{pmatrix} $$
#
# All pairs together form a matrix $R_k$ of shape (D, D) with D/2 such blocks on its diagonal, and $PE_{pos+k} = R_k\,PE_{pos}$.


# %%
def shift_matrix(k: int, d_model: int) -> Tensor:
    """R_k (D, D), a rotation in each pair of features: PE[pos + k] = R_k · PE[pos] for all pos (§3.5)."""
    theta = k * speeds(d_model)  # (D/2,)
    cos, sin = theta.cos(), theta.sin()
    blocks = torch.stack([cos, sin, -sin, cos], dim=-1).view(-1, 2, 2)  # (D/2, 2, 2)
    return torch.block_diag(*blocks)  # (D, D)


# %%
pe = sinusoids(200, 32)  # (200, D)
for k in (1, 3, 50):
    torch.testing.assert_close(pe[:-k] @ shift_matrix(k, 32).T, pe[k:])  # rows: R_k · PE[pos]
turn = shift_matrix(3, 32)
torch.testing.assert_close(turn @ turn.T, torch.eye(32))  # a rotation keeps lengths
torch.testing.assert_close(turn @ shift_matrix(4, 32), shift_matrix(7, 32))  # 3 on and 4 on: 7 on

# %%
titled(
    clocks(sinusoids(10, 16), pairs=(0, 1, 2), step=3),
    "Three steps are the same turn from anywhere",
    "Three pairs as hands, D = 16, at positions 0 (dark) to 9 (bright). From 0 to 3, from 3 to 6 "
    "and from 6 to 9 each hand turns by the same angle; fast hands far, slow hands little.",
    wrap=80,
)

# %% [markdown]
# As an independent check, we fit by least squares one matrix that takes row pos to row pos + 3, for all 197 pairs of rows.
#
# **Predict.** What share of the rows' squared length does this matrix fail to explain for sinusoids, and for random numbers?


# %%
def shift_error(table: Tensor, k: int) -> float:
    """Share of table[k:] (n, D) that the best linear map of table[:-k] fails to explain, 0 to 1."""
    before, after = table[:-k], table[k:]
    # "gelsd" copes with columns that are almost linearly dependent, as those of slow pairs are
    best = torch.linalg.lstsq(before, after, driver="gelsd").solution  # (D, D)
    return ((before @ best - after).square().sum() / after.square().sum()).item()


# %%
torch.manual_seed(7)
print(f"sinusoids {shift_error(sinusoids(200, 16), k=3):.4f}")
print(f"random    {shift_error(torch.randn(200, 16), k=3):.4f}")

# %% [markdown]
# For random numbers, fitting 16 numbers to 197 rows explains about 16/197 by chance.
#
# ### Only the distance counts
#
# A rotation keeps dot products, so moving both positions by the same k changes nothing. From $\cos a\cos b + \sin a\sin b = \cos(a-b)$ it follows that
#
# $$ PE_p \cdot PE_q = \sum_{i=0}^{D/2-1} \cos\big((p-q)\,\omega_i\big). $$
#
# **Predict.** Divided by D/2, this is the cosine between two positions. Does it fall steadily with the distance?

# %%
pe = sinusoids(50, 128)
products = pe @ pe.T  # (50, 50)
for distance in range(50):
    expected = torch.cos(distance * speeds(128)).sum()
    torch.testing.assert_close(products.diagonal(distance), expected.expand(50 - distance))
for distance in (0, 1, 2, 4, 8, 16, 31, 34, 37, 40, 43):
    print(f"{distance:2} apart: {products[0, distance] / 64:.3f}")
ahead = pe @ shift_matrix(3, 128).T @ pe.T  # (50, 50): each position asks three places on
assert torch.equal(ahead[:47].argmax(dim=1), torch.arange(3, 50))

# %% [markdown]
# Not quite: it falls fast, then slowly and in small waves. It is also the same for p − q and q − p, so it takes $W^Q$ and $W^K$ to tell "before" from "after". With $W^Q = R_k^{\top}$ and $W^K = I$ (positions are now rows), the score is
#
# $$ (PE_p\,R_k^{\top}) \cdot PE_q = PE_{p+k} \cdot PE_q, $$
#
# which is largest at $q = p + k$, as checked above for k = 3.
#
# Today's models add nothing to the embeddings: they rotate the queries and keys, in every layer. [Chapter 22](ch22_todays_block.ipynb) explains these *rotary positions*.
#
# ## Learned positions
#
# > **In short.** Training can find the table instead. In the paper this worked about as well.
#
# $$ x_{pos} = E_{w_{pos}}\sqrt{D} + L_{pos}, \qquad L \text{ of shape (max\_len, D), learned} $$


# %%
class LearnedPositions(nn.Module):
    """Adds one learned vector per position (the paper's Table 3, row E), then dropout.

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


# %% [markdown]
# Row 50 learns only from sentences of at least 51 tokens. If these are rare, the row stays noise, and beyond the table there is nothing. Sinusoids are defined everywhere, and the authors hoped that a model could use them beyond the lengths seen in training. BLEU hardly differed: 25.7 with learned positions, 25.8 with sinusoids (Table 3, row E).

# %%
torch.manual_seed(9)
fresh = F.normalize(LearnedPositions(128).pe[:32].detach(), dim=-1)  # (32, D)
titled(
    panels(
        {"sinusoids": products[:32, :32] / 64, "learned, before training": fresh @ fresh.T},
        row_title="position",
        column_title="position",
        value_title="cosine",
        scheme="diverging",
        domain=(-1, 1),
        numbers=False,
        cell=8,
    ),
    "Sinusoids know who is near, a fresh table does not",
    "Cosine of each pair of 32 positions, D = 128. Left: each diagonal has one value, high near "
    "the middle. Right: chance; who is near has yet to be learned.",
    wrap=80,
)

# %% [markdown]
# ### Who bites, again
#
# **Predict.** Without positions the layer was right half the time. How often will it be right with sinusoids, and with learned positions?

# %%
torch.manual_seed(10)
print(f"right with sinusoids:         {who_bites(PositionalEncoding(32, dropout=0.0)):.0%}")
print(f"right with learned positions: {who_bites(LearnedPositions(32, dropout=0.0)):.0%}")

# %% [markdown]
# ## Summary
#
# - Without positions, attention and the whole encoder are permutation-equivariant: they cannot know who bites.
# - A sinusoidal position is D/2 clock hands. A shift by k is one rotation for all positions, and dot products depend only on the distance.
# - The factor $\sqrt{D}$ lifts a small table (variance $1/D$) above the positions, whose length is $\sqrt{D/2}$.
# - A learned table did about as well in the paper, but ends at its last row.
#
# ## What the paper did that we don't
#
# - The paper's published code puts all sines before all cosines. To a model that learns its matrices, the order makes no difference.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · The distance between two positions
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# The dot product of two positions depends only on their distance. So does the squared length $\lVert PE_p - PE_q \rVert^2$. Write `squared_gap(distance, d_model)`, which computes it without making a table, for any whole distance. `solution("squared_gap")` shows ours.


# %%
def squared_gap(distance: int, d_model: int) -> float:
    """‖PE_p − PE_q‖² where p − q = distance."""
    ...


check(squared_gap)

# %% [markdown]
# ### Exercise 2 · A longer table from a shorter one
#
# *code · difficulty ●●○ · worth ●●● · 20 minutes*
#
# A model was trained with `LearnedPositions` of `max_len` 64, and must now read 100 tokens, so its table (64, D) needs 100 rows. Write `stretched(table, max_len)`. The first rows are the learned ones, unchanged. Each further row follows from the one before by one linear map, fitted to the learned rows as in `shift_error`. If `max_len` is not larger, the table is cut. For sinusoids with many more rows than D, the continuation is exact except for rounding. For which tables is it worthless? `solution("stretched")` shows ours.


# %%
def stretched(table: Tensor, max_len: int) -> Tensor:
    """table (n, D) with further rows, each made from the one before by one map: (max_len, D)."""
    ...


check(stretched)

# %% [markdown]
# ### Exercise 3 · Order without positions
#
# *code · difficulty ●●● · worth ●●● · 30 minutes*
#
# The causal mask alone breaks the symmetry. How far? Write `confused(layers)`: apply a list of `MultiHeadedAttention`, one after the other, with the causal mask and without positions, to all 24 orders of four random tokens (as wide as `project_query.in_features`). Count the orders whose *last* output equals that of the first order, up to rounding. Predict the number for one layer and for two. `solution("confused")` shows ours.


# %%
def confused(layers: list[MultiHeadedAttention]) -> int:
    """How many of the 24 orders of four tokens have the last output of the first order."""
    ...


check(confused)

# %% [markdown]
# <details><summary>What the numbers mean</summary>
#
# In the first layer the last token is the query, and the three before it are a set: 3! = 6 orders agree. But the outputs at those three differ from order to order, since each token has seen only what came before it. The second layer reads these outputs, and no two orders agree: the number is 1. So a decoder with two layers can learn order without positions; an encoder, without the mask, never can.
#
# </details>
#
# Next: [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb)
