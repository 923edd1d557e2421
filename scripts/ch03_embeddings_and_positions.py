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
# After this chapter you can turn token ids into vectors, show that attention alone takes `decaf` for `faced`, mend this with a table of sines, and say from an experiment of your own how far such a table carries.
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
from itertools import permutations

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import heatmap, lines, panels, titled
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
# > **In short.** Attention treats its input as a set. Shuffle the letters, and the outputs are shuffled alike.
#
# Our machine is to turn `decaf` into `faced`, and `faced` into `decaf`. We give each letter a random vector, let an attention layer read the word, and put a question to what it has read.
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
# The answer is the same, so for one of the words it is wrong, however long we train. Let $P$ be a (T, T) permutation matrix: $PX$ is $X$ with its rows shuffled. Softmax treats each row of the scores by itself, so
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
# **Your turn.** Write `Embeddings`. Refuse floats: a cast back to integers is not safe.


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
def refusal(error: type[Exception], call: Callable[[], Tensor]) -> str:
    """The message with which `call` raises `error`, or nothing if it doesn't."""
    try:
        call()
    except error as raised:
        return str(raised)
    return ""


# %% [markdown]
# **Predict.** We embed `deed` and let gradients flow back into the table. Which of its 14 rows get one? And what does id 2049 become after a cast to float16 and back?

# %%
torch.manual_seed(0)
embed, ids = Embeddings(d_model=4, vocab=VOCAB), torch.tensor([to_ids("deed")])  # ids: (B, T)
one_hot = torch.eye(VOCAB)[ids]  # (B, T, V)
vectors = embed(ids)  # (B, T, D)
torch.testing.assert_close(vectors, one_hot @ embed.lut.weight * math.sqrt(4))
torch.testing.assert_close(embed(ids.int()), vectors)
assert abs(Embeddings(64, 500).lut.weight.var() * 64 - 1) < 0.05, "the table's variance is 1/D"

vectors.sum().backward()
print("rows with a gradient:", embed.lut.weight.grad.any(dim=-1).nonzero().flatten().tolist())
print("2049 →", torch.tensor([2049]).half().long().item())
assert "float16" in refusal(TypeError, lambda: embed(ids.half())), "floats are to be refused"

# %%
titled(
    lookup(one_hot[0], embed.lut.weight.detach() * 2, vectors[0].detach(), list("deed")),
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
    "In ten places hand 0 goes round, and hand 16 hardly stirs",
    "Four of 32 hands, D = 64, positions 0 (dark) to 9. From anywhere, three steps turn it as far.",
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
# **Your turn.** Write `sinusoids`. At an odd width, well-known code fails with an error about sizes. Yours names the cause.


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
assert single.dtype == torch.float32, "the table is to have the default dtype"
assert (single - sinusoids(5_000, 64)).abs().max() < 1e-6, "compute in float64, then round"
assert "7" in refusal(ValueError, lambda: sinusoids(10, 7)), "an odd width is to be refused by name"
print(f"feature 8 repeats after {2 * math.pi * 10_000 ** (8 / 64):.1f} positions")

# %%
rows = sinusoids(20, 64)  # (20, D)
moving = (rows.amax(dim=0) - rows.amin(dim=0) > 0.5).nonzero().flatten().tolist()
look = {"row_title": "position", "column_title": "feature", "value_title": "value", "cell": 17}
titled(
    heatmap(rows[:, moving], None, moving, scheme="diverging", numbers=False, **look),
    f"In twenty places, {len(moving)} of 64 features move",
    "Each row is a position's signature. Features that change by less than 0.5 are left out.",
)

# %% [markdown]
# Feature 8 repeats after about 20 positions.
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
# **Predict.** The table has 256 rows. Two tokens come at `start=255`. Without `check_length`, which positions would they get?

# %%
torch.manual_seed(6)
add_positions, x = PositionalEncoding(d_model=16, dropout=0.2), torch.randn(2, 5, 16)  # (B, T, D)
dropped = add_positions(x)
kept = dropped != 0
torch.testing.assert_close(dropped[kept], 1.25 * (x + sinusoids(5, 16))[kept])  # 1 / 0.8
assert 0.6 < kept.double().mean() < 1, "dropout falls on the sum, in training"
add_positions.eval()
torch.testing.assert_close(add_positions(x), x + sinusoids(5, 16))
torch.testing.assert_close(add_positions(x[:, 3:], start=3), add_positions(x)[:, 3:])
assert not list(add_positions.parameters()) and not add_positions.state_dict(), "nothing to learn"
assert add_positions.half().pe.dtype == torch.float16, "a buffer moves with the model"

print("rows left for two tokens:", len(sinusoids(256, 16)[255:257]))
assert "257" in refusal(ValueError, lambda: add_positions(x[:, :2], start=255)), "it ends at 255"

# %% [markdown]
# Both would silently get position 255: a slice beyond the end is no error, and its one row broadcasts.
#
# ### Why multiply by √d_model
#
# The paper gives no reason; this is the usual one. The table $E$ is the model's last layer, too (chapter 4), where scores of about ±1 ask for entries of variance $1/D$. So a row of $E$ has a length of about 1. A position's is $\sqrt{D/2}$, since $\sin^2 + \cos^2 = 1$: at D = 512 that is 16. The factor lifts the words to 22.6.
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
# Two words at one place are: without the factor, all but identical.
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
# and is largest at $p = q$. So we can write down a head that looks three back: with $W^Q = s\,R_{-3}^{\top}$, $W^K = I$ (positions are now rows) the score is $s\,PE_{p-3}\cdot PE_q$, sharper with a larger $s$.
#
# **Predict.** D = 128, 50 places, scores divided by $\sqrt{128}$. How much weight falls on the right place, and how much with letters added?

# %%
torch.manual_seed(3)
letters = Embeddings(128, VOCAB)(torch.randint(FIRST, VOCAB, (50,))).detach()  # (50, D)
turn = shift_matrix(-3, 128)
for s in (1, 16, 64):
    heads = [(s * x @ turn.T @ x.T / math.sqrt(128)).softmax(dim=-1) for x in (pe, pe + letters)]
    alone, mixed = (head.diagonal(-3).mean() for head in heads)
    print(f"s = {s:2}: {alone:.2f} on places alone, {mixed:.2f} with letters added")

# %% [markdown]
# On places alone, a tenth of the weight falls there at $s = 1$, since neighbours have almost the same slow hands, and 0.88 at $s = 16$. With letters added no $s$ helps: the letters' own products are larger. So the map exists, but a head must make it sharp *and* keep the letters out.
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
bag = F.one_hot(torch.randint(10, (4_000, 10))).sum(dim=1).amax(dim=1).double().mean().item() / 10
print(f"always the word's most frequent letter: {bag:.0%} right")
assert abs(share["none"] - bag) < 0.03 and min(share["learned"], share["sines"]) > 0.95
assert min(maps[name].diagonal(-3).mean() for name in ("learned", "sines")) > 0.5

# %%
look = {"row_title": "place that looks", "column_title": "place looked at", "value_title": "weight"}
titled(
    panels(maps, numbers=False, cell=18, **look),
    "Nobody said where to look: two of three heads look three back",
    "Mean weights over 400 new words of ten letters. The first three places have nothing to look at.",
)

# %% [markdown]
# Without positions it is right as often as someone who always names the most frequent letter: a bag allows little more. Learned positions and sines do it equally well, so far.
#
# ## Longer words
#
# > **In short.** The paper hoped that sines would let a model go on to longer sequences than in training. Here they don't, and we ask why.
#
# A learned table can't go on: no gradient has reached its rows from 10 on. But the sines are there, and the rotation is the same everywhere.
#
# **Predict.** In words of 20 letters, how often are the two right at places 10 to 19?

# %%
torch.manual_seed(7)  # the same table as before its training
assert torch.equal(positions["learned"].pe[10:], LearnedPositions(64).pe[10:])
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
# They are right less than a third of the time, the sines hardly more often than untrained rows.
#
# **Suspects.** Is it the *length* (twenty keys share the weight) or the *places*? If the places, the fast hands or the slow ones? We take words of ten letters again, and move on by ten places all hands, only the six fastest, or only the others.

# %%
moved, groups = {}, {"all hands": (0, 64), "the six fastest": (0, 12), "the others": (12, 64)}
for hands, (low, high) in groups.items():
    probe = LookBack(PositionalEncoding(64, dropout=0.0))
    probe.load_state_dict(models["sines"].state_dict())
    probe.positions.pe[:10, low:high] = sinusoids(20, 64)[10:, low:high]
    moved[hands], _ = look_back_test(probe, length=10)
    print(f"{hands:15} moved on: {moved[hands]:.0%} right")
assert moved["the others"] > 0.85 and max(moved["all hands"], moved["the six fastest"]) < 0.45

# %% [markdown]
# It is the places, since ten letters fail there, too, and of the hands the fast ones. The 26 slow ones may move: they stood almost still in training, so the head hardly used them. Of the fast ones it saw ten settings. Many matrices serve ten vectors, and nothing in the loss asked for the rotation.
#
# If that is so, more places should help. We let each batch begin at a random position from 0 to 100, with as many letters and steps as before.
#
# **Predict.** Who can look three back at places 0 to 109 now, and who beyond?

# %%
torch.manual_seed(7)
wandering = {
    "sines, from 0 only": models["sines"],
    "learned, random start": train_look_back(LearnedPositions(64, dropout=0.0), last_start=100),
    "sines, random start": train_look_back(PositionalEncoding(64, dropout=0.0), last_start=100),
}
curve = [
    (name, start, round(look_back_test(model, 10, start)[0], 2))
    for name, model in wandering.items()
    for start in range(0, 241, 5)
]
curve = pd.DataFrame(curve, columns=["trained with", "start", "share right"])
beyond = curve[curve["start"] >= 110].groupby("trained with")["share right"]
assert beyond.min()["sines, random start"] > 0.8 and beyond.max()["learned, random start"] < 0.4
titled(
    lines(curve, "start", "share right", "trained with", x_title="first position", zero=True),
    "Sines go on, once training has shown them enough places",
    "Words of ten letters. Random starts went up to 100: from 110 on all is new. Other seeds agree.",
)

# %% [markdown]
# The sines look three back at all places, far beyond 109, too: fewer matrices serve 110 vectors. The learned table is slow, since each row has a small part of the training, and beyond 109 it never will. The head of before does it here and there. So sines don't make a model go on by themselves. They let places share what is learned. How many places are enough? Try `last_start=10`.
#
# Today's models rotate queries and keys instead, and a score depends on the distance by construction ([chapter 22](ch22_todays_block.ipynb)).
#
# ## Summary
#
# - Without positions, attention and the whole encoder are permutation-equivariant: `decaf` and `faced` are one bag.
# - The factor $\sqrt{D}$ lifts a table of variance $1/D$ above the positions, whose length is $\sqrt{D/2}$.
# - A shift by k is one rotation of D/2 hands, but a head trained on ten places need not find it.
#
# ## What the paper did that we don't
#
# - The paper's published code, tensor2tensor, puts all sines before all cosines, which is all the same to learned matrices. And it divides $i$ by D/2 − 1 in place of D/2, so its slowest hand has exactly the wavelength $10000\cdot2\pi$.
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
