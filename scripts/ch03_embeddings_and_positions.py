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
# After this chapter you can turn token ids into vectors, show that attention alone takes `decaf` for `faced`, tell places apart by a table of sines, and say from an experiment how far such a table carries.
#
# | | |
# |---|---|
# | In the paper | §3.4 (embeddings), §3.5 (positional encoding), Table 3, row E (learned positions) |
# | Time | 20 minutes to read, 50 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 2 · Multi-head attention](ch02_multi_head_attention.ipynb) · [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb) |
#
# *If you read only three cells:* "Sinusoidal positions", the picture of the clocks; "Look three back", the maps of three heads; "Longer words", the curves of where they still work.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Callable
from itertools import permutations, product

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import heatmap, lines, long, panels, titled
from scripts.book.exercises import check
from scripts.book.figures.model import clocks, lookup
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.corpora.reversal import EXAMPLE, FIRST, VOCAB, to_ids

# %%
MAX_LEN = 256  # tokens of the longest sentence that the series' translators take

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Without positions a word is a bag of letters
#
# > **In short.** Attention treats its input as a bag. Shuffle the letters, and the outputs follow.
#
# Our machine is to turn `decaf` into `faced`, and `faced` into `decaf`. We give each letter a random vector, let an attention layer read the word, and ask the same layer a question about what it has read.
#
# **Predict.** One answer must begin with *f*, the other with *d*. Does the question get different answers from the two words?

# %%
torch.manual_seed(4)
letter_vectors, question = torch.randn(VOCAB, 16), torch.randn(1, 1, 16)  # (V, D), (B, 1, D)
attend = MultiHeadedAttention(h=4, d_model=16, dropout=0.0)
x = letter_vectors[torch.tensor([to_ids(EXAMPLE), to_ids(EXAMPLE[::-1])])]  # (B, T, D)
memory = attend(x, x, x)  # (B, T, D)
answers = attend(question.expand(2, 1, 16), memory, memory)  # (B, 1, D)
torch.testing.assert_close(answers[0], answers[1])

# %% [markdown]
# The answer is the same, so for one of the words it is wrong, however long we train. Let $P$ be a (T, T) permutation matrix: $PX$ is $X$ with its rows shuffled. Softmax treats each row by itself, in whatever order its entries stand, so, with or without $1/\sqrt{d_k}$,
#
# $$ \mathrm{softmax}\!\left(PXW^Q\,(PXW^K)^{\top}\right) PXW^V
# = P\;\mathrm{softmax}\!\left(XW^Q\,(XW^K)^{\top}\right) P^{\top}P\,XW^V
# = P \cdot \mathrm{Attention}(X), $$
#
# since $P^{\top}P = I$: attention is *permutation-equivariant*. Everything else in an encoder (chapter 4) works on each position alone.


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
# **Predict.** Does attention see order? And with a causal mask?

# %%
torch.manual_seed(4)
x = torch.randn(5, 16)  # (T, D): five tokens
bare = equivariance_gap(lambda x: attend(x, x, x), x)
causal = equivariance_gap(lambda x: attend(x, x, x, subsequent_mask(5)), x)
print("sees order:", {"no mask": bare > 1e-12, "causal mask": causal > 1e-12})
assert bare < 1e-12 < causal

# %% [markdown]
# Attention alone doesn't. A causal mask shows it order: the first token sees one, the second two. An encoder has no such mask, so its vectors must carry the position.
#
# ## From ids to vectors
#
# > **In short.** A table has a row for each token of the vocabulary. To embed a token is to copy its row.
#
# An *id* such as 7 (for *d*) is only a name. Each gets its own vector, learned in training.
#
# $$ \mathrm{embed}(w) = E_w\,\sqrt{D} \;=\; \mathrm{onehot}(w)\,E\,\sqrt{D} $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $E$ | (V, D) | the table, learned |
# | $\mathrm{onehot}(w)$ | (V,) | zeros, and a 1 at the id $w$ |
# | result | (B, T, D) | one vector for each token |
#
# **Your turn.** Write `Embeddings`. Refuse all but int64 and int32: a cast from floats isn't safe.


# %% tags=["yours"]
class Embeddings(nn.Module):
    """Token ids to vectors, times √d_model (§3.4). It keeps `d_model` and `lut`.

    `lut` is an nn.Embedding of variance 1/d_model. Raises TypeError for ids not int64 or int32.
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


# %%
def refuses(call: Callable[..., Tensor], *inputs, error: type[Exception] = ValueError) -> bool:
    """Whether `call` raises `error` for these inputs."""
    try:
        call(*inputs)
    except error:
        return True
    return False


# %% [markdown]
# **Predict.** We embed `deed` and let gradients flow back into the table. Which of its 14 rows get one? And what does id 2049 become after a cast to float16 and back?

# %%
torch.manual_seed(0)
embed, ids = Embeddings(d_model=5, vocab=VOCAB), torch.tensor([to_ids("deed")])  # ids: (B, T)
one_hot, vectors = torch.eye(VOCAB)[ids], embed(ids)  # (B, T, V), (B, T, D)
torch.testing.assert_close(vectors, one_hot @ embed.lut.weight * math.sqrt(5))
torch.testing.assert_close(embed(ids.int()), vectors)
assert abs(Embeddings(64, 500).lut.weight.var() * 64 - 1) < 0.05, "the table's variance is 1/D"

vectors.sum().backward()
print("rows with a gradient:", embed.lut.weight.grad.any(dim=-1).nonzero().flatten().tolist())
print("2049 →", torch.tensor([2049]).half().long().item())
for wrong in (ids.half(), ids.short(), ids.bool()):
    assert refuses(embed, wrong, error=TypeError), f"{wrong.dtype} is to be refused"

# %%
titled(
    lookup(one_hot[0], embed.lut.weight.detach() * 5**0.5, vectors[0].detach(), list("deed")),
    "To embed is to pick rows",
    "Left times middle is right: each 1 copies a row. Both e get the same vector, both d another.",
)

# %% [markdown]
# Only the rows of *d* and *e* (7 and 8) get a gradient: rare words are rarely trained. Id 2049 becomes 2048, *another word*, since float16 has steps of 2 there.
#
# ## Sinusoidal positions
#
# > **In short.** A clock tells the time with a fast hand and a slow one. Here D/2 hands at D/2 speeds tell the position.
#
# Hand $i$ turns by the angle $\omega_i = 10000^{-2i/D}$ from one position to the next.


# %%
def speeds(d_model: int) -> Tensor:
    """ω (D/2,): the angle by which each hand turns from one position to the next; in float64."""
    return 10_000.0 ** -(torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)


# %%
assert 9 * speeds(64)[0] > 2 * math.pi and 9 * speeds(64)[16] < 0.1  # angles from 0 to 9
titled(
    clocks(speeds(64), hands=(0, 4, 8, 16), length=10, step=3),
    "In ten places hand 0 goes round, and hand 16 hardly moves",
    "Four of 32 hands, D = 64, positions 0 (dark) to 9. Three steps always turn a hand by the same angle.",
)

# %% [markdown]
# We write down each hand's tip, a sine and a cosine:
#
# $$ PE_{(pos,\,2i)} = \sin\!\big(pos\cdot\omega_i\big), \qquad
# PE_{(pos,\,2i+1)} = \cos\!\big(pos\cdot\omega_i\big) $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $pos$ | 0 … length−1 | the position |
# | $i$ | 0 … D/2−1 | which hand |
# | $\omega_i$ | (D/2,) | the hand's speed; wavelengths $2\pi/\omega_i$ from $2\pi$ to almost $10000\cdot2\pi$ |
#
# **Your turn.** Write `sinusoids`. At an odd width, well-known code fails later, with an error about sizes.


# %% tags=["yours"]
def sinusoids(length: int, d_model: int) -> Tensor:
    """PE[pos, 2i] = sin(pos · ω_i), PE[pos, 2i+1] = cos(pos · ω_i) (§3.5): (length, D).

    Computed in float64, returned in the default dtype. Raises ValueError for an odd `d_model`.
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
angles = [[pos / 10_000 ** (2 * i / 64) for i in range(32)] for pos in range(40)]
by_hand = [[f(a) for a in row for f in (math.sin, math.cos)] for row in angles]
torch.testing.assert_close(pe, torch.tensor(by_hand))
torch.set_default_dtype(torch.float32)
single = sinusoids(5_000, 64)
torch.set_default_dtype(torch.float64)
torch.testing.assert_close(single, sinusoids(5_000, 64).float())  # computed in float64
assert refuses(sinusoids, 10, 7) and refuses(sinusoids, 10, 1), "odd widths are to be refused"
print(f"feature 8 repeats after {2 * math.pi * 10_000 ** (8 / 64):.1f} positions")

# %%
rows = sinusoids(20, 64)  # (20, D)
still = (rows.amax(dim=0) - rows.amin(dim=0) < 0.5).sum().item()
look = {"row_title": "position", "column_title": "feature", "value_title": "value", "cell": (9, 16)}
titled(
    heatmap(rows, scheme="diverging", numbers=False, **look),
    f"In twenty places, {still} of 64 features hardly move",
    "A row is a position's signature; columns 2i and 2i + 1 are hand i. Hardly: by less than 0.5.",
)

# %% [markdown]
# Feature 8 (hand 4, 18.1° a step) repeats after about 20 positions.
#
# ## Adding them
#
# > **In short.** Positions are *added* to the embeddings, not appended, and the sum goes through dropout (§5.4).
#
# $$ x_{pos} = E_{w_{pos}}\sqrt{D} + PE_{pos}, \qquad x \text{ of shape (B, T, D)} $$


# %%
def check_length(length: int, max_len: int) -> None:
    """Raise ValueError if a sequence of `length` tokens is longer than `max_len`."""
    if length > max_len:
        raise ValueError(f"a sequence of {length} tokens is longer than the maximum of {max_len}")


# %% [markdown]
# **Your turn.** Write `PositionalEncoding`. A *buffer* (`register_buffer`) moves with the model, and no optimizer touches it. `start` serves decoding token by token (chapter 8).


# %% tags=["yours"]
class PositionalEncoding(nn.Module):
    """Adds the sinusoids to the embeddings, then `dropout` on the sum (§3.5, §5.4). Learns nothing.

    `pe` (max_len, D) is a buffer, not persistent: it can be computed again. `check_length` refuses
    what would stand beyond it, with a ValueError.
    """

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = MAX_LEN):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", sinusoids(max_len, d_model), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x (B, T, D), whose first token stands at position `start`, to (B, T, D)."""
        end = start + x.size(1)
        check_length(end, self.pe.size(0))
        return self.dropout(x + self.pe[start:end])  # (B, T, D)


# %% [markdown]
# **Predict.** A table has 20 rows. Two tokens come at `start=19`. Without `check_length`, which positions would they get?

# %%
torch.manual_seed(6)
add_positions, x = PositionalEncoding(16, dropout=0.2, max_len=20), torch.randn(2, 5, 16)
dropped = add_positions(x)
kept = dropped != 0
torch.testing.assert_close(dropped[kept], (x + sinusoids(5, 16))[kept] / 0.8)  # (B, T, D)
assert 0.7 < kept.double().mean() < 0.9, "dropout falls on the sum, in training"
add_positions.eval()
torch.testing.assert_close(add_positions(x), x + sinusoids(5, 16))
torch.testing.assert_close(add_positions(x, start=15), x + sinusoids(20, 16)[15:])
assert not list(add_positions.parameters()) and not add_positions.state_dict(), "nothing to learn"
assert add_positions.half().pe.dtype == torch.float16, "a buffer moves with the model"

print("rows left for two tokens:", len(sinusoids(20, 16)[19:21]))
assert refuses(add_positions, x[:, :2], 19), "a table of 20 rows ends at position 19"

# %% [markdown]
# A slice beyond the end is no error, and its one row broadcasts: both would silently get position 19.
#
# ### Why multiply by √d_model
#
# The paper gives no reason; this is the usual one. In the paper the table $E$ is the model's last layer, too (chapter 4), where scores of about ±1 ask for entries of variance $1/D$. So a row of $E$ has a length of about 1. A position's is $\sqrt{D/2}$, since $\sin^2 + \cos^2 = 1$: at D = 512 that is 16. The factor lifts the words to 22.6.
#
# **Predict.** Without the factor, what is more alike in direction: one word at two places, or two words at one place?

# %%
torch.manual_seed(2)
embed, places = Embeddings(512, vocab=400), sinusoids(16, 512)  # places: (16, D)
for kind, factor in (("unscaled", 1), ("times √D", math.sqrt(512))):
    words = embed.lut.weight.detach() * factor  # (400, D)
    same_word = F.cosine_similarity(words + places[3], words + places[9]).mean()
    same_place = F.cosine_similarity(words + places[3], words.roll(1, 0) + places[3]).mean()
    print(f"{kind}: cosine {same_word:.2f} for one word, {same_place:.2f} for one place")
    assert (same_word > same_place) == (factor > 1)

# %% [markdown]
# Without the factor, two words at one place are the more alike: the position drowns the word.
#
# ## A shift is a rotation
#
# > **In short.** Move k positions on, and each hand turns by a fixed angle: one matrix does it, the same for all positions.
#
# This is the paper's reason for sines. With $\theta = k\,\omega_i$, for each hand
#
# $$ \begin{pmatrix} \sin((pos+k)\,\omega_i) \\ \cos((pos+k)\,\omega_i) \end{pmatrix}
# = \begin{pmatrix} \cos\theta & \sin\theta \\ -\sin\theta & \cos\theta \end{pmatrix}
# \begin{pmatrix} \sin(pos\,\omega_i) \\ \cos(pos\,\omega_i) \end{pmatrix} $$
#
# Such blocks on its diagonal make a matrix $R_k$ (D, D), and $PE_{pos+k} = R_k\,PE_{pos}$.


# %%
def shift_matrix(k: int, d_model: int) -> Tensor:
    """R_k (D, D), a rotation in each pair of features: PE[pos + k] = R_k · PE[pos] for all pos (§3.5)."""
    theta = k * speeds(d_model)  # (D/2,)
    cos, sin = theta.cos(), theta.sin()
    blocks = torch.stack([cos, sin, -sin, cos], dim=-1).view(-1, 2, 2)  # (D/2, 2, 2)
    return torch.block_diag(*blocks)  # (D, D)


# %%
pe = sinusoids(50, 128)  # (50, D)
torch.testing.assert_close(pe[:-3] @ shift_matrix(3, 128).T, pe[3:])  # rows: R_k · PE[pos]
products = pe @ pe.T  # (50, 50)
torch.testing.assert_close(products[3:, 3:], products[:-3, :-3])  # both moved on by three
torch.testing.assert_close(products[0], torch.arange(50).outer(speeds(128)).cos().sum(dim=1))

# %% [markdown]
# The last lines: since $\cos a\cos b + \sin a\sin b = \cos(a-b)$, a product depends only on the distance,
#
# $$ PE_p \cdot PE_q = \sum_{i=0}^{D/2-1} \cos\big((p-q)\,\omega_i\big), $$
#
# and is largest at $p = q$. So we can write down a head that looks three back. Let $W^K = I$, and let $W^Q = s\,R_{-3}^{\top}$ turn place p's row into $s\,PE_{p-3}$. The score is $s\,PE_{p-3}\cdot PE_q$, sharper with a larger $s$.
#
# **Predict.** D = 128, 50 places, scores divided by $\sqrt{128}$. How much weight falls on the right place? How much with letters added?

# %%
torch.manual_seed(3)
letters = Embeddings(128, VOCAB)(torch.randint(FIRST, VOCAB, (50,))).detach()  # (50, D)
turn = shift_matrix(-3, 128)
for s in (1, 16, 64):
    heads = [(s * x @ turn.T @ x.T / math.sqrt(128)).softmax(dim=-1) for x in (pe, pe + letters)]
    alone, mixed = (head.diagonal(-3).mean() for head in heads)
    print(f"s = {s:2}: {alone:.2f} on places alone, {mixed:.2f} with letters added")

# %% [markdown]
# On places alone it is a tenth at $s = 1$, since neighbours have almost the same slow hands, and 0.88 at $s = 16$. With letters added no $s$ helps: the head always prefers the *same letter*, mostly itself, since a letter, even turned by $R_{-3}$, is most like itself. So a head must be sharp *and* keep the letters out.
#
# ## Learned positions
#
# > **In short.** Training can find the table instead. With it the paper reached 25.7 BLEU, with sines 25.8.


# %%
class LearnedPositions(PositionalEncoding):
    """Adds one learned vector per position (the paper's Table 3, row E), then dropout."""

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = MAX_LEN):
        super().__init__(d_model, dropout, max_len)
        self.pe = nn.Parameter(nn.init.normal_(self.pe, std=0.02))  # in place of the buffer


# %% [markdown]
# The spread of 0.02 is that of BERT, whose words start as small. Here, at D = 512, a row starts with a length of 0.45 beside words of 22.6: almost no position, until training makes one.
#
# ## Look three back
#
# > **In short.** One head must name the letter three places to the left, with no positions, learned ones, or sines. All else is equal.
#
# The loss compares letters. It never says where to look.


# %%
class LookBack(nn.Module):
    """Which letter stood three places back? Embeddings, `positions`, one head, a readout."""

    def __init__(self, positions: nn.Module, d_model: int = 64):
        super().__init__()
        self.embed, self.positions = Embeddings(d_model, VOCAB), positions
        self.attend = MultiHeadedAttention(1, d_model, dropout=0.0)
        self.readout = nn.Linear(d_model, VOCAB)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """ids (B, T), whose first letter stands at position `start`, to logits (B, T, V)."""
        x = self.positions(self.embed(ids), start)  # (B, T, D)
        return self.readout(self.attend(x, x, x))


def train_look_back(positions: nn.Module, last_start: int = 0, seed: int = 0) -> LookBack:
    """Train on words of 4 to 10 letters; a batch starts at a random position up to `last_start`."""
    torch.manual_seed(seed)
    model = LookBack(positions)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(600):
        length, start = torch.randint(4, 11, ()), torch.randint(last_start + 1, ())
        ids = torch.randint(FIRST, VOCAB, (64, length))  # (B, T)
        loss = F.cross_entropy(model(ids, start)[:, 3:].transpose(1, 2), ids[:, :-3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def look_back_test(model: LookBack, length: int, start=0, first=3) -> tuple[float, Tensor]:
    """On 400 new words: the share right from place `first` on, and the mean weights (T, T)."""
    torch.manual_seed(1)
    ids = torch.randint(FIRST, VOCAB, (400, length))  # (B, T)
    right = model(ids, start).argmax(dim=-1)[:, first:] == ids[:, first - 3 : -3]
    return right.double().mean().item(), model.attend.attn[:, 0].mean(dim=0).round(decimals=2)


# %% [markdown]
# **Predict.** Without positions the head knows a word's letters, not their order. How often can it be right in words of ten letters?

# %%
torch.manual_seed(7)
kinds = {"none": PositionalEncoding, "learned": LearnedPositions, "sines": PositionalEncoding}
positions = {name: kind(64, dropout=0.0) for name, kind in kinds.items()}
positions["none"].pe.zero_()
models = {name: train_look_back(table) for name, table in positions.items()}
share, maps = {}, {}
for name, model in models.items():
    share[name], maps[name] = look_back_test(model, length=10)
    print(f"{name:8} {share[name]:.0%} right, weight there {maps[name].diagonal(-3).mean():.1f}")
bag = F.one_hot(torch.randint(10, (4_000, 9))).sum(dim=1).amax(dim=1).double().mean().item() / 9
print(f"always the most frequent of the nine other letters: {bag:.0%} right")
assert abs(share["none"] - bag) < 0.03 and min(share["learned"], share["sines"]) > 0.95
assert min(maps[name].diagonal(-3).mean() for name in ("learned", "sines")) > 0.5

# %%
look = {"row_title": "place that looks", "column_title": "place looked at", "value_title": "weight"}
titled(
    panels(maps, numbers=False, cell=18, **look),
    "Nobody said where to look: two of three heads look three back",
    "Mean weights over 400 new words of ten letters. Places 3 to 9 are to look three left.",
)

# %% [markdown]
# Without positions it is right as often as someone who always names the most frequent of the other letters: a bag allows no more. Learned positions and sines do equally well, so far.
#
# ## Longer words
#
# > **In short.** The paper hoped that sines would carry a model to longer sequences than in training. At first they don't, and we ask why.
#
# A learned table can't go on: no gradient has reached its rows from 10 on. But the sines are there, and the rotation is the same everywhere.
#
# **Predict.** In words of 20 letters, how often are the two right at places 10 to 19?

# %%
assert not positions["learned"].pe.grad[10:].any(), "words of ten letters don't train these rows"
for name in maps:
    beyond, maps[name] = look_back_test(models[name], length=20, first=10)
    weight = maps[name].diagonal(-3)[7:].mean()
    print(f"{name:8} {beyond:.0%} right, weight there {weight:.1f}")
    assert beyond < 0.3 and weight < 0.15
titled(
    panels(maps, numbers=False, cell=11, **look),
    "Beyond place 9 the other two are lost as well",
    "Mean weights over 400 words of twenty letters. Training went up to ten.",
)

# %% [markdown]
# The sines do hardly better than untrained rows.
#
# **Suspects.** Is it the *length* (twenty keys share the weight) or the *places*? If the places, the fast hands or the slow ones? We take words of ten letters again and change some hands: moved on by ten places, or set to 0.

# %%
groups = {"all": slice(64), "hand 0": slice(2), "hands 0–5": slice(12), "hands 6–31": slice(12, 64)}
tables = {"moved on": sinusoids(20, 64)[10:], "set to 0": torch.zeros(10, 64)}
right = pd.DataFrame(index=groups, columns=tables, dtype=float)
for hands, change in product(groups, tables):
    probe = LookBack(PositionalEncoding(64, dropout=0.0))
    probe.load_state_dict(models["sines"].state_dict())
    probe.positions.pe[:10, groups[hands]] = tables[change][:, groups[hands]]
    right.loc[hands, change], _ = look_back_test(probe, length=10)
print(right.map("{:.0%}".format))
assert right.loc["hands 6–31"].min() > 0.85 and right.loc["hands 0–5"].max() < 0.45

# %% [markdown]
# It is mainly the places: ten letters fail there, too. And it's the fast hands, in which neighbours differ most: moving hand 0 alone costs 41 points. Hands 6 to 31 the head hardly uses: without them it is as right as before. Ten positions span at most 10 of 64 dimensions, so many matrices do the same to them, and nothing in the loss asked for the rotation.
#
# If that is so, more places should help. We let each batch begin at a random position from 0 to 100, all else as before.
#
# **Predict.** Who can look three back at places 0 to 109 now, and who beyond?

# %%
torch.manual_seed(7)
wandering = {"sines, from 0 only": models["sines"]}
for name in ("learned", "sines"):
    wandering[f"{name}, random start"] = train_look_back(kinds[name](64, 0.0), last_start=100)
curve = {
    name: {start: round(look_back_test(model, 10, start)[0], 2) for start in range(0, 241, 5)}
    for name, model in wandering.items()
}
beyond = pd.DataFrame(curve).loc[110:]
assert beyond["sines, random start"].min() > 0.8 and beyond["learned, random start"].max() < 0.4
longer = {n: look_back_test(wandering["sines, random start"], n)[0] for n in (20, 40)}
print(", ".join(f"{n} letters: {share:.0%} right" for n, share in longer.items()))
assert longer[20] > 0.95
curve = long(curve, "trained with", "first position", "share right")
titled(
    lines(curve, "first position", "share right", "trained with", zero=True, points=True),
    "Sines go on, once training has shown them enough places",
    "Ten letters. Random starts: up to 100, so from 110 on all is new (eight seeds: sines 86% or more).",
)

# %% [markdown]
# The sines look three back far beyond 109, too, as we expect if fewer matrices serve 110 positions. Length itself costs less: 99% right with 20 letters, 88% with 40, all at trained places. The learned table is slower, since each row is trained in few batches, and beyond 109 in none. So sines don't go on by themselves. They let places share what is learned. Are twenty places enough? No: with `last_start=10` the share beyond jumps between 42 and 92%.
#
# Today's models rotate queries and keys instead, and the position enters a score only as a distance ([chapter 22](ch22_todays_block.ipynb)).
#
# ## Summary
#
# - Without positions, attention and the whole encoder are permutation-equivariant: `decaf` and `faced` are one bag.
# - The factor $\sqrt{D}$ lifts a table of variance $1/D$ above the positions, whose length is $\sqrt{D/2}$.
# - A shift by k is one rotation of D/2 hands, but a head trained on ten places need not find it.
#
# ## What the paper did that we don't
#
# - The paper's published code, tensor2tensor, puts all sines before all cosines, which is all the same to learned matrices. And it divides $i$ by D/2 − 1 in place of D/2.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · The distance between two positions
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# The squared length $\lVert PE_p - PE_q \rVert^2$ depends only on the distance, too. Write `squared_gap(distance, d_model)`, which computes it without making a table, for any whole distance. `solution("squared_gap")` shows ours.


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
# A model with `LearnedPositions` of 64 rows must now read 100 tokens. Write `stretched(table, max_len)`. The learned rows stay. Each further row follows from the one before by one linear map, the best for all pairs of neighbouring learned rows (`torch.linalg.lstsq` with `driver="gelsd"`). If `max_len` is smaller, the table is cut. For sinusoids with many more rows than D, the continuation is exact except for rounding. For which tables is it worthless? `solution("stretched")` shows ours.


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
# In the first layer the three tokens before the last are a set: 3! = 6 orders agree. But the outputs at those three differ from order to order, since each has seen only what came before it. The second layer reads these, and no two orders agree: the number is 1. So a decoder with two layers can learn order without positions.
#
# </details>
#
# Next: [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb)
