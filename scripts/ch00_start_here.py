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
# # Chapter 0 · Start here
#
# After this chapter you know why the Transformer was invented, what its parts are, and you have followed one German sentence through a trained one, from letters to English, with the shape of every array on the way.
#
# *Attention Is All You Need*, §1 and §2. About 20 minutes to read; some seconds to run on a CPU.
#
# Next: [Chapter 1 · Attention](ch01_attention.ipynb)

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

# %% [markdown]
# ## A sentence, translated
#
# This is where the series leads. A Transformer that was trained in [chapter 9](ch09_training_run.ipynb) reads a German sentence and writes an English one, on this machine, without a network.

# %%
from scripts import ROOT
from scripts.ch09_training_run import load_model, plain_translate

captioner = load_model(ROOT / "models" / "multi30k-de-en")
mine = "Eine Frau mit einem roten Hut liest am Strand ein Buch."
plain_translate(captioner, [mine])[0]

# %% [markdown]
# Word by word, the German says: *a woman with a red hat reads on-the beach a book.* See what became of the order.
#
# Now give `mine` a sentence of your own and run the cell again. Keep to what a photograph may show: the model was trained on 29,000 captions and knows nothing else. What it makes of other sentences is a pitfall further down.
#
# You need some Python, and to have met a matrix product and a gradient. You don't need to have met a neural network for language. This chapter shows the destination, so it uses things that later chapters build. Don't try to understand every line yet; look at the shapes.

# %%
import math
import os
import platform
from collections.abc import Callable

import altair as alt
import pandas as pd
import torch
from torch import Tensor

from scripts.book.charts import GREY, INK, heatmap, lines, titled
from scripts.book.exercises import blame, rejection, same_numbers
from scripts.ch01_attention import attention, padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import sinusoids
from scripts.ch06_training import BOS, EOS, greedy_decode
from scripts.ch07_multi30k import source_ids
from scripts.ch09_training_run import Trained
from scripts.corpora.load import load_corpus

# %%
torch.set_default_dtype(torch.float64)  # so that every check can ask for many digits

# %% [markdown]
# ## The letters of the series
#
# Six letters name the sizes of every array, in all chapters. A comment such as `# (B, S, D)` at the right of a line says what that line makes.
#
# | letter | size of | in the small model below |
# |---|---|---|
# | **B** | the batch: sentences handled at once | 1 |
# | **S** | the source sentence, in tokens | as long as the German is |
# | **T** | the target sentence, in tokens | as long as the English is |
# | **D** | a token's vector, `d_model` | 128 |
# | **H** | attention heads | 4 |
# | **V** | the vocabulary, in tokens | 1,000 |

# %% [markdown]
# ## Why attention replaced recurrence
#
# > **In short.** Imagine that you read a page, shut the book, and translate from memory. That is a recurrent translator of 2014: one vector of fixed size is all it keeps. Attention leaves the book open.
#
# Before 2017 the usual way to read a sentence was a recurrent network. It holds a state $h$, a vector of $D$ numbers, and takes in one word at a time:
#
# $$ h_t = f(h_{t-1}, x_t), \qquad x_t, h_t \in \mathbb{R}^{D},\quad t = 1 \dots S $$
#
# A translator used two of them. The first read the German. Its last state $h_S$ was handed to the second, which wrote the English (Sutskever et al. 2014; Cho et al. 2014). This has two troubles, one with memory and one with time.
#
# **Memory.** $h_S$ has $D$ numbers, whether the sentence has five words or fifty. It is a bottleneck.
#
# We can watch the bottleneck without training anything. Take the simplest reader that loses nothing on purpose: it turns its state by a rotation $R$ and adds the new word, $h_t = R\,h_{t-1} + x_t$. A rotation shrinks nothing, and it can be undone. So to ask for the word $k$ steps back, turn the last state back $k$ times, and name the word whose vector fits best.


# %%
def random_rotation(d: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix (d, d): it changes directions and no lengths."""
    return torch.linalg.qr(torch.randn(d, d, generator=generator)).Q


# %%
def read_into_one_vector(words: Tensor, rotation: Tensor) -> Tensor:
    """The last state (B, D) of h = R·h + x over words (B, S, D): a recurrent reader, undressed."""
    state = torch.zeros_like(words[:, 0])  # (B, D)
    for t in range(words.size(1)):
        state = state @ rotation.T + words[:, t]  # (B, D)
    return state


# %%
def recall_from_one_vector(table: Tensor, ids: Tensor, rotation: Tensor) -> float:
    """Share of the words ids (B, S) that can be named again from the one state they were read into.

    table (V, D) holds the words' vectors. The reader is undone step by step, and each step names
    the word whose vector fits the state best.
    """
    state = read_into_one_vector(table[ids], rotation)  # (B, D)
    right = 0
    for t in reversed(range(ids.size(1))):
        named = (state @ table.T).argmax(dim=-1)  # (B,)
        right += int((named == ids[:, t]).sum())
        state = state @ rotation  # one step back
    return right / ids.numel()


# %%
def recall_by_attention(table: Tensor, ids: Tensor) -> float:
    """The same question, asked of a memory that keeps one vector a word: ids (B, S), table (V, D).

    Each position of the sentence asks once; the query is the position's own sinusoid (chapter 3).
    """
    places = sinusoids(ids.size(1), table.size(1))  # (S, D)
    answers, _ = attention(100 * places, places, table[ids])  # (B, S, D)
    named = (answers @ table.T).argmax(dim=-1)  # (B, S)
    return (named == ids).double().mean().item()


# %% [markdown]
# **Predict.** There are 1,000 words in this toy vocabulary, each a random vector. How many can a state of 128 numbers hold before the first one is named wrongly? 5, 20, 60? And if the state is four times as wide?


# %%
def recall_table(
    sizes: tuple[int, ...], lengths: tuple[int, ...], vocab: int = 1000, sentences: int = 40
) -> pd.DataFrame:
    """Recall against sentence length: one curve for each width of the state, and one for attention."""
    found, flat = [], []
    for d in sizes:
        generator = torch.Generator().manual_seed(d)
        table = torch.randn(vocab, d, generator=generator)  # (V, D)
        table = table / table.norm(dim=-1, keepdim=True)  # all words equally loud
        rotation = random_rotation(d, generator)
        for length in lengths:
            ids = torch.randint(vocab, (sentences, length), generator=generator)  # (B, S)
            share = recall_from_one_vector(table, ids, rotation)
            found.append({"memory": f"one vector, D = {d}", "words": length, "recall": share})
            if d == sizes[0]:
                share = recall_by_attention(table, ids)
                flat.append({"memory": "a vector a word", "words": length, "recall": share})
    return pd.DataFrame(found + flat)


# %%
recall = recall_table(sizes=(32, 128, 512), lengths=(1, 2, 4, 8, 16, 32, 64))
curves = recall.pivot(index="words", columns="memory", values="recall")
for d in (32, 128, 512):
    curve = curves[f"one vector, D = {d}"]
    assert curve[1] == 1 and curve.is_monotonic_decreasing
    assert abs(curve[d // 8] - 0.35) < 0.05  # with one word for every 8 numbers, a third is left
assert (curves["a vector a word"] == 1).all()  # attention, with D = 32, forgets nothing

titled(
    lines(
        recall,
        "words",
        "recall",
        "memory",
        x_title="words in the sentence (log scale)",
        y_title="share of words named rightly",
        log_x=True,
        points=True,
    ),
    "One vector forgets; a vector for each word doesn't",
    "Share of words that can be read back. A wider state moves the fall to the right and doesn't stop it. "
    "The flat line: attention over one vector of 32 numbers a word.",
    wrap=78,
)

# %% [markdown]
# The state of 128 numbers begins to err between 4 and 8 words. One four times as wide bears four times as many: the three curves pass 0.35 at 4, 16 and 64 words. So what counts is the share of numbers for each word, and with one vector that share shrinks as the sentence grows.
#
# A trained network packs its state more cleverly than ours, so its curve lies further right. But no cleverness turns a fixed number of numbers into a growing one. For a linear reader like ours this is a small proof: change the first word by any $\delta$ and the second by $-R\,\delta$, and the change is gone before the third word is read.

# %%
torch.manual_seed(0)
rotation = random_rotation(16, torch.Generator().manual_seed(0))
one_sentence = torch.randn(1, 5, 16)  # (B, S, D)
another = one_sentence.clone()
delta = torch.randn(16)
another[0, 0] += delta
another[0, 1] -= rotation @ delta
assert (another - one_sentence).abs().max() > 1  # they differ, and plainly
torch.testing.assert_close(
    read_into_one_vector(another, rotation), read_into_one_vector(one_sentence, rotation)
)  # yet their last states agree: no decoder can tell one from the other

question = torch.randn(1, 1, 16)
answer = attention(question, one_sentence, one_sentence)[0]  # (B, 1, D)
assert (attention(question, another, another)[0] - answer).abs().max() > 1e-3  # attention can

# %% [markdown]
# The trouble was seen in real translators: the quality of those of 2014 fell as sentences grew longer. Bahdanau, Cho and Bengio then let the decoder look back at *all* the encoder's states, and choose by learned weights where to look. The fall all but went away, and the choice was called attention. The recurrence stayed.
#
# **Time.** To know $h_{50}$ one must know $h_{49}$ first. The words of one sentence can't be read side by side, however many processors wait. That is the paper's main complaint in §1: it caps the speed of training just where sentences are long.
#
# Convolutions (ByteNet, ConvS2S; §2) read all positions at once, but each sees only its neighbours. To connect two distant words, layers must be stacked: the more, the further apart the words are. Self-attention connects any two words in one step:
#
# | layer | steps that must wait for one another | steps between two words n apart |
# |---|---|---|
# | recurrent | n | n |
# | convolution, width k | 1 | n / k, or log n with widening gaps |
# | self-attention | 1 | 1 |
#
# [Chapter 1](ch01_attention.ipynb) measures this table instead of quoting it. The price is there too: every word looks at every word, so the work grows with n², and an average over many words blurs. Against the blur the paper uses several attentions side by side, the *heads* of [chapter 2](ch02_multi_head_attention.ipynb).
#
# The rest of the road, in one table:
#
# | year | step | what it kept, what it changed |
# |---|---|---|
# | 1997 | LSTM (Hochreiter, Schmidhuber) | recurrence, with gates so that gradients survive |
# | 2014 | sequence to sequence (Sutskever et al.; Cho et al.) | one network reads, one writes, one vector between |
# | 2014 | attention (Bahdanau et al.) | recurrence, and a look back at every state |
# | 2016–17 | ByteNet (Kalchbrenner et al.), ConvS2S (Gehring et al.) | convolutions for recurrence: parallel, but local |
# | 2017 | **Transformer** (Vaswani et al.) | attention alone; neither recurrence nor convolution |
#
# Self-attention was not new in 2017, and neither were networks that read from a memory. New was a translator made of nothing else.

# %% [markdown]
# ## What you will build
#
# > **In short.** The encoder turns German tokens into vectors that know their context. The decoder writes English, one token at a time, and looks at those vectors whenever it needs them.
#
# Here is the whole machine. Each box names the chapter that builds it.


# %%
def architecture_parts() -> tuple[list[dict], list[dict], list[dict]]:
    """Boxes, arrows (as corner points) and free labels of the picture, in pixels, y upwards."""
    boxes, arrows, labels = [], [], []

    def box(kind, middle, low, name, note="", width=200, height=40):
        edges = {"x": middle - width / 2, "x2": middle + width / 2, "y": low, "y2": low + height}
        boxes.append({"kind": kind, "name": name, "note": note, **edges})

    def arrow(*points):
        number = len({leg["arrow"] for leg in arrows})
        arrows.extend(
            {"arrow": number, "order": i, "x": x, "y": y, "tip": i == len(points) - 1}
            for i, (x, y) in enumerate(points)
        )

    def label(x, y, text, style="shape"):
        labels.append({"x": x, "y": y, "text": text, "style": style})

    def sublayer(middle, start, low, kind, name, note):
        """A box with its residual road and its add & norm; returns where the road goes on."""
        box(kind, middle, low, name, note)
        box("norm", middle, low + 56, "add & norm", width=200, height=28)
        arrow((middle, start), (middle, low - 2))
        arrow((middle, low + 40), (middle, low + 54))
        side = middle + 112
        arrow((middle, low - 16), (side, low - 16), (side, low + 70), (middle + 102, low + 70))
        return low + 84

    def inputs(middle, name, shape, after):
        box("plain", middle, 0, name, shape)
        box("plain", middle, 64, "Embedding × √D", "chapter 3")
        box("plain", middle, 128, "+ positions", "chapter 3")
        arrow((middle, 40), (middle, 62))
        arrow((middle, 104), (middle, 126))
        label(middle + 8, 180, after)

    # the encoder
    inputs(220, "German ids", "(B, S)", "(B, S, D)")
    box("layer", 222, 196, "", width=248, height=250)
    road = sublayer(220, 168, 240, "attention", "Self-attention", "weights (B, H, S, S) · ch. 1, 2")
    road = sublayer(220, road, road + 26, "feed", "Feed-forward", "D → d_ff → D · ch. 4")
    box("memory", 220, 486, "Memory", "(B, S, D), from the last layer")
    arrow((220, road), (220, 484))
    label(98, 458, "Encoder", "heading")
    label(68, 398, "N ×", "times")
    box("mask", 46, 240, "no padding", "(B, 1, S)", width=84)
    arrow((88, 260), (118, 260))

    # the decoder
    inputs(580, "English ids so far", "(B, T)", "(B, T, D)")
    box("layer", 582, 196, "", width=248, height=360)
    road = sublayer(
        580, 168, 240, "attention", "Causal self-attention", "weights (B, H, T, T) · ch. 1, 2"
    )
    cross = road + 26
    road = sublayer(580, road, cross, "memory", "Cross-attention", "weights (B, H, T, S) · ch. 2")
    road = sublayer(580, road, road + 26, "feed", "Feed-forward", "D → d_ff → D · ch. 4")
    box("plain", 580, 590, "Generator", "linear, D → V · ch. 4")
    box("plain", 580, 654, "Softmax", "ch. 1")
    box("plain", 580, 718, "p(next token)", "(B, T, V)")
    arrow((580, road), (580, 588))
    arrow((580, 630), (580, 652))
    arrow((580, 694), (580, 716))
    label(588, 568, "(B, T, D)")
    label(588, 642, "logits (B, T, V)")
    label(458, 568, "Decoder", "heading")
    label(728, 508, "× N", "times")
    box("mask", 400, 240, "no future", "(B, T, T)", width=84)
    arrow((442, 260), (478, 260))
    box("mask", 400, cross - 16, "no padding", "(B, 1, S)", width=84)
    arrow((442, cross + 8), (478, cross + 8))
    arrow((320, 506), (400, 506), (400, cross + 32), (478, cross + 32))
    label(364, 516, "keys, values")
    return boxes, arrows, labels


# %%
def architecture_chart() -> alt.TopLevelMixin:
    """The whole Transformer, encoder at the left and decoder at the right (the paper's Figure 1)."""
    boxes, arrows, labels = (pd.DataFrame(part) for part in architecture_parts())
    fills = {
        "layer": "#F8F8F8",
        "plain": "#EBEBEB",
        "attention": "#CFE3F2",
        "memory": "#CDEBDD",
        "feed": "#F7D9C4",
        "norm": "#F3E3F0",
        "mask": "#444444",
    }
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, 760], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-6, 764], nice=False))
    color = alt.Color(
        "kind:N", legend=None, scale=alt.Scale(domain=list(fills), range=list(fills.values()))
    )
    rects = (
        alt.Chart(boxes)
        .mark_rect(stroke=GREY, strokeWidth=1, cornerRadius=5)
        .encode(x=x, y=y, x2="x2:Q", y2="y2:Q", color=color)
    )
    roads = (
        alt.Chart(arrows)
        .mark_line(color=GREY, strokeWidth=1.4)
        .encode(x=x, y=y, detail="arrow:N", order="order:Q")
    )
    legs = arrows.groupby("arrow")[["x", "y"]].diff()[arrows["tip"]]
    turns = [math.degrees(math.atan2(dx, dy)) for dx, dy in legs.itertuples(index=False)]
    heads = (
        alt.Chart(arrows[arrows["tip"]].assign(turn=turns))
        .mark_point(shape="triangle-up", filled=True, size=55, color=GREY, opacity=1)
        .encode(x=x, y=y, angle=alt.Angle("turn:Q", scale=None))
    )

    def text(frame: pd.DataFrame, words: str, size: int, ink: str, **look) -> alt.Chart:
        mark = alt.Chart(frame).mark_text(fontSize=size, color=ink, **look)
        return mark.encode(x=x, y=y, text=f"{words}:N")

    centre = boxes.assign(x=(boxes.x + boxes.x2) / 2, y=(boxes.y + boxes.y2) / 2)
    dark, light = centre[centre.kind == "mask"], centre[~centre.kind.isin(["mask", "layer"])]
    two, one = light[light.note != ""], light[light.note == ""]
    up, down = {"dy": -8}, {"dy": 9}
    layers = [
        rects,
        roads,
        heads,
        text(two, "name", 14, INK, fontWeight="bold", **up),
        text(two, "note", 12, INK, **down),
        text(one, "name", 13, INK),
        text(dark, "name", 12, "white", fontWeight="bold", **up),
        text(dark, "note", 12, "white", **down),
        text(labels[labels["style"] == "shape"], "text", 12, INK, align="left"),
        text(
            labels[labels["style"] == "heading"], "text", 16, INK, align="left", fontWeight="bold"
        ),
        text(labels[labels["style"] == "times"], "text", 20, INK, fontWeight="bold"),
    ]
    return alt.layer(*layers).properties(width=760, height=770)


# %%
titled(
    architecture_chart(),
    "The Transformer",
    "Read each column from the bottom. A pale frame is a layer, and there are N of them, one upon the other. "
    "Lines that pass by a box are residual roads. Dark chips are masks.",
    wrap=100,
)

# %% [markdown]
# A stack has N layers; the paper has N = 6, the model below 2. The residual road carries what went into a box past it, and there what the box computed is added. A mask says what a row of attention may look at; the one that hides the future hides padding as well. LayerNorm stands after the addition, as in the paper; chapter 4 also offers it before.
#
# Three things are worth a second look.
#
# - **The same kind of box appears three times.** Self-attention, causal self-attention and cross-attention are one class. What differs is who asks, who is asked, and the mask.
# - **Only attention moves anything between positions.** Embedding, feed-forward, LayerNorm and generator treat each token alone.
# - **The width D never changes** from the embedding to the generator. That is why layers can be stacked, and results added.

# %% [markdown]
# ## One sentence, from letters to English
#
# > **In short.** Text becomes tokens, tokens become ids, ids become vectors. The vectors look at one another. The last vector becomes a probability for every token in the vocabulary, one is chosen, and the game goes on until the model says stop.
#
# We follow a sentence through `models/sample-de-en`, a smaller model that comes with the series as well: its arrays are easier to look at. [Chapter 9](ch09_training_run.ipynb) trains it, on the CPU, on the small corpus that [chapter 7](ch07_multi30k.ipynb) generates.

# %%
trained = load_model(ROOT / "models" / "sample-de-en")
model, tokenizer = trained.model.double(), trained.tokenizer
text = "Ein freundlicher Musiker hat einen Hammer mitgenommen."
reference = "A friendly musician has taken along a hammer."
assert (text, reference) in load_corpus("sample")["test"]  # so it wasn't trained on it

# %% [markdown]
# In German the verb *mitgenommen* (taken along) waits for the end of the sentence. English needs it in the middle, and in two words. So word-by-word translation must fail here.
#
# ### Characters to tokens to ids
#
# The vocabulary was learned from the training text: common words are one token, rare ones are put together from pieces ([chapter 7](ch07_multi30k.ipynb)). The sign ▁ marks where a word begins.

# %%
characters = list(text)
pieces = tokenizer.pieces(text)
src = torch.tensor([source_ids(text, tokenizer)])  # (B, S): the pieces' ids, and one for the end
print(len(characters), "characters:", " ".join(characters))
print(len(pieces), "pieces:    ", " | ".join(pieces))
print(src.size(1), "ids:       ", src[0].tolist())

# %%
assert "".join(pieces).replace("▁", " ").strip() == text  # no letter is lost
assert src.shape == (1, len(pieces) + 1) and src[0, -1] == EOS
assert tokenizer.decode(src[0].tolist()) == text  # and it can be undone

# %% [markdown]
# **Pitfall.** A word isn't a token. Whoever takes the third id for the third word is right until the first word that falls into pieces, and gets no error after it. The sign ▁ tells where words begin, so count those: there are as many as words, and no more.

# %%
begins = [piece.startswith("▁") for piece in pieces]
assert sum(begins) == len(text.split())
rare = tokenizer.pieces("Xylophonspieler")
assert len(rare) > 1 and sum(piece.startswith("▁") for piece in rare) == 1

# %% [markdown]
# ### Ids to vectors
#
# An id is a row number in a table of $V$ rows with $D$ numbers each. The row is scaled by $\sqrt D$, and a pattern of waves that says "you are at place 3" is added ([chapter 3](ch03_embeddings_and_positions.ipynb)).

# %%
embedded = model.src_embed(src)  # (B, S, D)
B, S, D = embedded.shape
assert (D, len(tokenizer), model.encoder.layers[0].self_attn.h) == (128, 1000, 4)  # D, V, H
by_hand = model.src_embed[0].lut.weight[src] * math.sqrt(D) + sinusoids(src.size(1), D)
torch.testing.assert_close(embedded, by_hand)

source_names = [*pieces, "</s>"]
titled(
    heatmap(
        embedded[0, :, :64].detach(),
        source_names,
        row_title="token",
        column_title="feature",
        value_title="value",
        scheme="diverging",
        cell=9,
        numbers=False,
    ).properties(height=24 * len(source_names)),
    "A sentence, as the model sees it",
    "One row for each token, one column for each feature, the first 64 of D. No single column means anything to us: "
    "what a token means is spread over all of them.",
    wrap=84,
)

# %% [markdown]
# ### The encoder: vectors that know their context
#
# Going through the encoder, the array keeps its shape. What changes is what a row knows.
#
# **Predict.** We replace the full stop at the end by an exclamation mark. In the embedded sentence one row changes. How many rows change in the encoder's output, the memory?

# %%
memory = model.encode(src, padding_mask(src))  # (B, S, D)
changed = src.clone()
changed[0, -2] = tokenizer.encode("!")[-1]
embedded_rows = (model.src_embed(changed) - embedded).abs().amax(dim=-1)[0] > 1e-9  # (S,)
memory_rows = (model.encode(changed, padding_mask(changed)) - memory).abs().amax(dim=-1)[0] > 1e-9
print("rows changed in the embedded sentence:", int(embedded_rows.sum()), "of", src.size(1))
print("rows changed in the memory:           ", int(memory_rows.sum()), "of", src.size(1))
assert embedded_rows.sum() == 1 and memory_rows.all()
assert memory.shape == embedded.shape

# %% [markdown]
# All of them. Each row still stands for its token, but it has looked at all the others. This is the memory of which the picture spoke: no single vector, but S of them.
#
# ### The decoder: one token at a time
#
# The decoder starts with `<s>`, the sign for "begin", and asks: which token comes next? It gets a number for each of the V tokens, the *logits*. Softmax makes them probabilities. We take the likeliest token, append it, and ask again, until the answer is `</s>`. That is *greedy decoding*.

# %%
written = greedy_decode(model, src, padding_mask(src), max_len=40)  # (B, T)
print(written[0].tolist())
print(tokenizer.decode(written[0].tolist()))
assert written[0, -1] == EOS

# %% [markdown]
# Once the ids are known, all T steps can be computed in one call. The causal mask keeps each step from seeing the later ones, so the numbers are the same as before. Training rests on this ([chapter 6](ch06_training.ipynb)).


# %%
def next_token_probabilities(trained: Trained, src: Tensor, written: Tensor) -> Tensor:
    """p(next token) at every step of `written`: src (1, S), written (1, T) ids, to (1, T, V).

    Step t is told the source and the tokens before t. `written` carries no start symbol.
    """
    start = torch.full_like(written[:, :1], BOS)  # (1, 1)
    so_far = torch.cat((start, written[:, :-1]), dim=1)  # (1, T)
    with torch.no_grad():
        vectors = trained.model(src, so_far, padding_mask(src), subsequent_mask(so_far.size(1)))
        return trained.model.generator(vectors).softmax(dim=-1)  # (1, T, V)


# %%
probabilities = next_token_probabilities(trained, src, written)  # (B, T, V)
assert torch.equal(probabilities.argmax(dim=-1), written)  # the same choices, made all at once
torch.testing.assert_close(probabilities.sum(dim=-1), torch.ones(1, written.size(1)))


# %%
def choices_table(trained: Trained, probabilities: Tensor, written: Tensor) -> pd.DataFrame:
    """What was written before each step, and the two likeliest next tokens: one row a step."""
    name = trained.tokenizer.processor.id_to_piece
    top = probabilities[0].topk(2)
    rows = []
    for t, ((p1, p2), (first, second)) in enumerate(
        zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ):
        before = "<s> " + trained.tokenizer.decode(written[0, :t].tolist())
        rows.append((before, name(first), f"{p1:.2f}", name(second), f"{p2:.2f}"))
    columns = ["written so far", "likeliest next", "p", "second", "p of the second"]
    return pd.DataFrame(rows, columns=columns)


# %%
choices_table(trained, probabilities, written)

# %% [markdown]
# Even where the model is sure it gives about 0.9. It was trained so, by label smoothing ([chapter 6](ch06_training.ipynb)).
#
# ### Where did it look?
#
# Cross-attention leaves its weights behind, (B, H, T, S): for each English token and each German one, how much the decoder looked there. We average over the heads of the last layer. To read them as words, we add up the pieces of each German word, and take the row in which each English word begins.


# %%
def word_starts(pieces: list[str]) -> list[int]:
    """Where words begin among `pieces`; a punctuation mark and the end sign count as words."""
    return [i for i, piece in enumerate(pieces) if not piece[0].isalnum()]


# %%
def words_of(pieces: list[str]) -> list[str]:
    """The words that `pieces` make up, cut where `word_starts` says."""
    edges = [*word_starts(pieces), len(pieces)]
    return ["".join(pieces[a:b]).lstrip("▁") for a, b in zip(edges, edges[1:], strict=False)]


# %%
def word_weights(weights: Tensor, target: list[str], source: list[str]) -> Tensor:
    """Attention between pieces (T, S) as attention between words: rows still sum to 1.

    A row is that of the piece with which the target word begins, for there the word is chosen; a
    column is the sum over the pieces of the source word.
    """
    chosen = weights[word_starts(target)]  # (words, S)
    parts = chosen.tensor_split(word_starts(source)[1:], dim=1)
    return torch.stack([part.sum(dim=1) for part in parts], dim=1)


# %% [markdown]
# **Predict.** German says *hat einen Hammer mitgenommen*, has a hammer taken-along. When the model writes *taken* and *along*, where does it look? And when it goes on with *a hammer*?

# %%
attn = model.decoder.layers[-1].src_attn.attn  # (B, H, T, S)
mean_weights = attn[0].mean(dim=0)  # (T, S)
target_names = [tokenizer.processor.id_to_piece(i) for i in written[0].tolist()]
looks = word_weights(mean_weights, target_names, source_names)
english, german = words_of(target_names), words_of(source_names)
torch.testing.assert_close(looks.sum(dim=-1), torch.ones(len(english)))
most = {word: german[i] for word, i in zip(english, looks.argmax(dim=-1).tolist(), strict=True)}
assert most["taken"] == most["along"] == "mitgenommen" and most["hammer"] == "Hammer"

titled(
    heatmap(
        looks,
        english,
        german,
        row_title="word being written",
        column_title="word looked at",
        value_title="weight",
        domain=(0, 1),
    ),
    "An order that nobody taught",
    "Each row sums to 1. Down to 'has' the looks follow the diagonal. Then they leap to the end, "
    "to fetch the verb, and come back for the hammer.",
    wrap=74,
)

# %% [markdown]
# ### The whole way, with its shapes

# %%
steps = [
    ("characters", "letters and spaces", "(characters,)", (len(characters),)),
    ("tokens", "pieces of words", "(S − 1,)", (len(pieces),)),
    ("ids", "row numbers; </s> appended", "(B, S)", src.shape),
    ("vectors", "table row × √D + position", "(B, S, D)", embedded.shape),
    ("memory", "vectors in context", "(B, S, D)", memory.shape),
    ("cross-attention", "who looks where, each head", "(B, H, T, S)", attn.shape),
    ("probabilities", "for each token of V", "(B, T, V)", probabilities.shape),
    ("English ids", "the likeliest, one by one", "(B, T)", written.shape),
    ("English", tokenizer.decode(written[0].tolist()), "(characters,)", (len(reference),)),
]
pd.DataFrame(
    [(name, what, letters, str(tuple(shape))) for name, what, letters, shape in steps],
    columns=["step", "what it holds", "shape", "here"],
)

# %% [markdown]
# ### What a translator doesn't know
#
# The small model knows only the world of its grammar. The one that opened this chapter, `captioner`, is the same machine, only larger. Your sentence went through it by the same steps. Its world is wider, and has an end too.
#
# **Pitfall.** Fluent isn't right. Ask for something that no caption ever said, and the model doesn't say "I don't know": it writes an English sentence all the same. How to notice? Not by reading the English alone. Look at the probabilities.
#
# **Predict.** The second sentence below says that the federal government passed a law on pensions. What will a writer of captions make of it?

# %%
captioner.model.double()  # digits as in the rest of the chapter
sure = {}
for question in (mine, "Die Bundesregierung beschloss ein Gesetz über die Rentenversicherung."):
    ids = torch.tensor([source_ids(question, captioner.tokenizer)])  # (B, S)
    found = greedy_decode(captioner.model, ids, padding_mask(ids), max_len=40)  # (B, T)
    likeliest = next_token_probabilities(captioner, ids, found).amax(dim=-1)  # (B, T)
    sure[question] = likeliest.mean().item()
    print(captioner.tokenizer.decode(found[0].tolist()), f"(mean probability {sure[question]:.2f})")
assert min(sure, key=sure.get) != mine  # the made-up answer is the less certain one

# %% [markdown]
# From a terminal, `make translate TEXT="…"` asks the same model, and searches a little longer for the best sentence ([chapter 10](ch10_decoding_and_bleu.ipynb)).
#
# ## How to read this series
#
# Each chapter is a notebook, and the same chapter is a Python script of the same name in `scripts/`. In the notebook you read and play; the script is what tests and later chapters import. So a line like `from scripts.ch02_multi_head_attention import MultiHeadedAttention` is also a cross-reference: it names the chapter that explains the thing.
#
# An idea always comes in the same order:
#
# 1. **In short**: the idea in plain words.
# 2. The formula, with the shape of every symbol.
# 3. A small piece of code.
# 4. A check: the code is held against something independent, PyTorch's own version or a slow loop or a number from the paper.
# 5. A picture.
# 6. **Pitfall**: a wrong version that runs without complaint, and how to notice.
#
# Two habits make it work. Where the text says **Predict**, stop and guess before you run the next cell: a wrong guess teaches more than a right answer. And change things: every cell without `def` is there to be poked at. The exercises at the end of a chapter are such pokes, and some come with a checker that answers you.
#
# | chapter | you leave with |
# |---|---|
# | [1 · Attention](ch01_attention.ipynb) | attention by hand, in NumPy, in PyTorch; masks; what it costs |
# | [2 · Multi-head attention](ch02_multi_head_attention.ipynb) | queries, keys and values; heads; parity with PyTorch |
# | [3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb) | tokens as vectors; how a model knows order |
# | [4 · Encoder and decoder](ch04_encoder_decoder.ipynb) | the whole model, equal to `nn.Transformer` |
# | [6 · Training](ch06_training.ipynb) | loss, schedule, loop; a first task learned |
# | [7 · Multi30k](ch07_multi30k.ipynb) | the corpora, tokens, batches |
# | [8 · Going fast](ch08_going_fast.ipynb) | the same numbers, sooner; where a machine's limits are |
# | [9 · The training run](ch09_training_run.ipynb) | a translator trained, saved and measured |
# | [10 · Decoding and BLEU](ch10_decoding_and_bleu.ipynb) | beam search, sampling, BLEU; your sentences translated |
# | [11 · Looking inside](ch11_looking_inside.ipynb) | attention maps; what heads do, and what they are worth |
# | [12 · Variants](ch12_variants.ipynb) | the same layers as a classifier, a writer and another translator |
# | [13 · Ablations and scaling](ch13_ablations_and_scaling.ipynb) | which parts matter, how sure that is; size and data |
# | [14 · Since 2017](ch14_since_2017.ipynb) | what replaced each part, proven one at a time |
#
# ## Your machine
#
# Everything runs on a CPU. A GPU only matters for the long training of chapter 9. What is here?


# %%
def gpu_rows() -> list[tuple[str, str]]:
    """What GPUtil says of each NVIDIA GPU, or plainly that there is none; it never fails.

    GPUtil asks the program nvidia-smi. Where that is missing or broken PyTorch is asked for names.
    """
    rows = []
    try:
        import GPUtil

        gpus = GPUtil.getGPUs()
    except Exception as error:  # whatever the parsing of nvidia-smi's answer runs into
        gpus = []
        rows.append(("GPUtil", f"gave no answer ({type(error).__name__})"))
    for gpu in gpus:
        load = "load not reported" if math.isnan(gpu.load) else f"load {gpu.load:.0%}"
        memory = f"{gpu.memoryUsed:,.0f} of {gpu.memoryTotal:,.0f} MiB in use"
        rows.append((f"GPU {gpu.id}", f"{gpu.name}, {memory}, {load}"))
    if torch.cuda.is_available():
        if not gpus:
            names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            rows += [(f"GPU {i}", name) for i, name in enumerate(names)]
    elif gpus:
        rows.append(("note", "this PyTorch can't use the GPU: everything runs on the CPU"))
    else:
        rows.append(("GPU", "none found: everything runs on the CPU, and that is enough"))
    return rows


# %%
def machine_report() -> pd.DataFrame:
    """Python, PyTorch, CPU threads, and each GPU with its memory and load: one row each."""
    threads = f"PyTorch uses {torch.get_num_threads()} of {os.cpu_count()}"
    rows = [
        ("Python", platform.python_version()),
        ("PyTorch", torch.__version__),
        ("CPU threads", threads),
        *gpu_rows(),
    ]
    return pd.DataFrame(rows, columns=["part", "found"])


# %%
# NBVAL_IGNORE_OUTPUT
machine_report()

# %% [markdown]
# ## Summary
#
# - A recurrent reader packs a sentence into one vector of fixed size, and must read word after word. Attention keeps a vector for each word and connects any two in one step.
# - The Transformer is an encoder and a decoder, each N layers of attention and feed-forward with residual roads around them.
# - Text goes characters → tokens → ids (B, S) → vectors (B, S, D) → memory (B, S, D) → probabilities (B, T, V) → ids → text.
# - Only attention moves information between positions. A mask says what it may not see.
# - The decoder writes one token at a time and stops itself with `</s>`.
#
# ## What the paper did that we don't
#
# - It trained on WMT 2014: 4.5 million sentence pairs for English to German, 36 million for French. We use a generated corpus of 6,000 pairs, and Multi30k with 29,000 captions. The architecture is the same, only smaller.
# - It translated *from* English; we translate into English, so that more readers can judge the result.
#
# ## Exercises
#
# Each exercise says what kind it is: a *warm-up*, a *think* that wants a pencil and may have an answer folded below it, a *code* exercise, or a *project* that takes an evening. A code exercise comes with a checker, `check_…`, that takes your function, is silent if it is right, and otherwise says what is wrong and why; its solution stands in the next cell, folded away where your notebook program folds, so scroll slowly and try first.
#
# ### Exercise 1 *warm-up* · English order
#
# Give the translator a sentence with the words in English order, "Ein freundlicher Musiker hat mitgenommen einen Hammer." Does the translation change? What does the attention map look like?
#
# ### Exercise 2 *think* · Ten words
#
# In `recall_table`, make the vocabulary 10 words instead of 1,000. What happens to the curves, and why? How many bits does a word need?
#
# <details><summary>An answer</summary>
#
# They move to the right: with 512 numbers and 64 words, a third was named rightly, now it is four of five. One word of 1,000 is 10 bits, one of 10 is 3.3. And naming is easier with nine rivals than with 999. But every curve still falls.
#
# </details>
#
# ### Exercise 3 *code* · Two sentences, one memory
#
# Above, the second word hid what the first one had changed. Could the *last* word do it, however far away? Write `twin_sentence(words, rotation, delta)` for words (B, S, D): the same sentences, but with `delta` (D,) added to their first word, and with the last word changed such that `read_into_one_vector` returns the same state as before.


# %%
def check_twin_sentence(candidate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Reads the sentences and their twins, of several lengths, into one vector each."""
    generator = torch.Generator().manual_seed(0)
    rotation = random_rotation(6, generator).double()
    delta = torch.randn(6, generator=generator, dtype=torch.float64)
    for length in (5, 2):
        words = torch.randn(3, length, 6, generator=generator, dtype=torch.float64)  # (B, S, D)
        given = words.clone()
        twin = candidate(given, rotation, delta)
        assert twin.shape == words.shape, "a twin has as many words as its sentence"
        assert torch.equal(given, words), "the sentences themselves were changed: work on a copy"
        assert same_numbers(twin[:, 0], words[:, 0] + delta), "the first word must change by delta"
        assert torch.equal(twin[:, 1:-1], words[:, 1:-1]), "only the first and the last word change"
        far = torch.linalg.matrix_power(rotation, length - 1) @ delta
        mistakes = {
            "delta is taken off as it was put in; on its way it has been turned": delta,
            "the change is doubled, not undone": -far,
            "turned back: reading turns forwards": torch.linalg.matrix_power(rotation.T, length - 1)
            @ delta,
            "turned once: each later word turns the state once more": rotation @ delta,
            "turned once too often: the first word itself isn't turned": rotation @ far,
        }
        if not same_numbers(
            read_into_one_vector(twin, rotation), read_into_one_vector(words, rotation)
        ):
            taken = (words - twin)[0, -1]
            blame(taken, mistakes, "the last states differ: what has become of delta by then?")


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_twin_sentence(words: Tensor, rotation: Tensor, delta: Tensor) -> Tensor:
    """words (B, S, D) with another first and last word, and the same last state."""
    twin = words.clone()
    twin[:, 0] += delta
    for _ in range(words.size(1) - 1):
        delta = rotation @ delta  # each word that is read turns the state once
    twin[:, -1] -= delta
    return twin


check_twin_sentence(solution_twin_sentence)

# %% [markdown]
# So the first word of a sentence may be anything, and the state won't tell, if the last one plays along. A wrong candidate, and what the checker says to it:


# %%
def twin_without_turning(words: Tensor, rotation: Tensor, delta: Tensor) -> Tensor:
    """Takes off at the end exactly what was added at the beginning."""
    twin = words.clone()
    twin[:, 0] += delta
    twin[:, -1] -= delta
    return twin


# %%
print(rejection(check_twin_sentence, twin_without_turning))

# %% [markdown]
# ### Exercise 4 *think* · A reader that shrinks
#
# Replace the rotation by `0.8 * rotation` in reading and by `rotation / 0.8` in reading back. Which words are lost first, those at the beginning or those at the end? That is what happens to gradients, too.
#
# <details><summary>An answer</summary>
#
# Those at the beginning. At the end of the sentence the first word is left with $0.8^{S-1}$ of its size. Turned back and blown up, it has its size again, but all that came later was blown up with it and drowns it. A gradient that runs back through the same steps shrinks by the same factor, so what the beginning has to do with the end is learned last.
#
# </details>
#
# ### Exercise 5 *think* · Where information passes
#
# In the picture, find every place where information can pass from one position to another. Now cover the chip "no future": which of the checks in this chapter would still pass, and what would the model learn in training?
#
# ### Exercise 6 *project* · Where it fails
#
# Find a sentence of simple words on which a model fails. Look at `choices_table`: at which step does it go wrong, and was it sure? Collect ten such sentences, sort them by what they have in common, and keep them: chapters 10 and 11 have instruments for them.
#
# Next: [Chapter 1 · Attention](ch01_attention.ipynb)
