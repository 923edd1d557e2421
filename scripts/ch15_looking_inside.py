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
# # Chapter 15 · Looking inside
#
# After this chapter you can draw what every head of a trained translator looks at, with the right names; put it into numbers; and measure how well attention aligns words.
#
# | | |
# |---|---|
# | In the paper | §4 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) (its last paragraph), and the figures of its appendix |
# | Time | 20 minutes to read, 40 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 14 · Leaving home](ch14_leaving_home.ipynb) · [Chapter 16 · Intervening](ch16_intervening.ipynb) |
#
# *If you read only three cells:* the first map, the two maps of *One map, two readings*, the dots of *Words, or places?*
#
# Shapes: **S** source length, **T** target length, **D** `d_model`, **H** heads, **N** layers; for words instead of pieces **I** (German) and **J** (English).

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import bisect
import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures.understanding import (
    alignment_dots,
    head_shares_chart,
    links_over_maps,
    map_explorer,
    one_map,
)
from scripts.book.records import load_record
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS
from scripts.ch07_multi30k import SPECIALS, source_ids
from scripts.ch08_decoding import dropout_off
from scripts.core.models import Trained, load_model
from scripts.corpora.captions import AlignedPair, aligned_pairs, sure_links
from scripts.fast.searching import cached_greedy

# %% [markdown]
# ## A question for two chapters
#
# > **In short.** A head that looks at the right word seems to be needed. Is it? This chapter looks; the next one cuts.
#
# A map says where a head looks, not what would be lost without it. So: **does a head's map predict its worth?** Here each head of chapter 9's model gets a *dossier*: its map, and a few numbers. At the end you bet; [chapter 16](ch16_intervening.ipynb) has the answer.
#
# The model has three encoder layers, and three decoder layers with two attentions each, their own and cross-attention. So there are three kinds of heads, 24 of each (eight a layer), 72 in all. We use fifty captions of our own, with translations; here is one.

# %%
torch.set_default_dtype(torch.float64)  # the same numbers on every machine
trained = load_model(ROOT / "models" / "multi30k-de-en")
model = trained.model
captions = aligned_pairs()
print(" → ".join(captions[2].texts))

# %% [markdown]
# The model itself writes "An old man sits on a bench in a park." Here is the map of cross-attention's head 2.8, the eighth of layer 2.
#
# **Predict.** The German begins with the park, the English ends with it. If the head finds translations, where will the weights of "in a park" lie?

# %%
german, english = captions[2].texts[0], "An old man sits on a bench in a park."
src, wanted = (torch.tensor([source_ids(text, trained.tokenizer)]) for text in (german, english))
tgt = torch.cat((torch.tensor([[BOS]]), wanted[:, :-1]), dim=1)  # what the decoder reads (1, T)
with torch.no_grad():
    states = model(src, tgt, None, subsequent_mask(tgt.size(1)))  # (1, T, D)
    assert torch.equal(model.generator(states).argmax(-1), wanted)  # it would write this text
rows, columns = (f"{text[:-1]} . </s>".split() for text in (english, german))  # pieces are words
weights = model.decoder.layers[1].src_attn.attn[0, 7]  # (T, S), of layer 2's eighth head
one_map(weights, rows, columns, "About to write “park”, head 2.8 looks at Park")

# %% [markdown]
# They lie in the lower left. About to write "in", the head gives half of its weight to *Im* ("in the"); about to write "park", all to *Park*. But for "on" it gives *auf* only 0.1, and for "An" it looks at *alter*, perhaps because the next word decides between "A" and "An". (We show this head because it aligns well.)
#
# ## One pass, every map
#
# > **In short.** A map belongs to the words that went in. So translate first; then let the model read its own translation once, and take that pass's weights.
#
# `MultiHeadedAttention` keeps its last weights, before dropout (chapter 2). Under the causal mask each position sees in this pass what it saw while writing.
#
# | kind | queries (rows) | keys (columns) | weights |
# |---|---|---|---|
# | encoder | source pieces | source pieces | (N, H, S, S) |
# | decoder | what was read so far | the same | (N, H, T, T), causal |
# | cross | what was read so far | source pieces | (N, H, T, S) |
#
# A decoder's query has two names. At position t it has just *read* $y_{t-1}$, and it is about to *write* $y_t$. From here on we show both: "a → park".


# %%
KINDS_OF_ATTENTION = ("encoder", "decoder", "cross")


def attention_layers(model: EncoderDecoder) -> dict[str, list[MultiHeadedAttention]]:
    """The model's attention layers by kind, each kind from the first layer to the last."""
    return {
        "encoder": [layer.self_attn for layer in model.encoder.layers],
        "decoder": [layer.self_attn for layer in model.decoder.layers],
        "cross": [layer.src_attn for layer in model.decoder.layers],
    }


@torch.no_grad()
def attention_maps(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> dict[str, Tensor]:
    """All weights of one pass over src (1, S) and tgt (1, T): kind to (N, H, queries, keys).

    `tgt` begins with bos: what the decoder reads, not what it predicts. Dropout is off.
    """
    with dropout_off(model):
        model(src, tgt, None, subsequent_mask(tgt.size(1), tgt.device))
    return {
        kind: torch.stack([layer.attn[0] for layer in layers])
        for kind, layers in attention_layers(model).items()
    }


# %%
@dataclass(frozen=True)
class Look:
    """One sentence pair under the lens: its ids, its pieces, and every attention map.

    `src` (1, S) and `tgt` (1, T) went into the model; `wanted` (1, T) is what each position predicts.
    `maps` leads from kind to weights (N, H, queries, keys), on the CPU.
    """

    src: Tensor
    tgt: Tensor
    wanted: Tensor
    source: tuple[str, ...]  # S pieces, </s> last
    read: tuple[str, ...]  # T pieces, <s> first
    written: tuple[str, ...]  # T pieces, </s> last
    maps: dict[str, Tensor]


def piece_label(piece: str) -> str:
    """A piece as a chart shows it: "▁Hund" is Hund, and a piece within a word gets a plus, "+chen"."""
    if piece.startswith("▁"):
        return piece[1:] or "▁"
    return f"+{piece}" if piece[0].isalnum() else piece


def pieces_of(trained: Trained, ids: Sequence[int]) -> tuple[str, ...]:
    """Ids to pieces, as the tokenizer writes them: "▁" marks a word's start."""
    return tuple(trained.tokenizer.processor.id_to_piece(int(i)) for i in ids)


# %%
def look_through(trained: Trained, src: Tensor, wanted: Tensor) -> Look:
    """Every attention map while the model goes through src (1, S) and the target wanted (1, T)."""
    tgt = torch.cat((torch.full_like(wanted[:, :1], BOS), wanted[:, :-1]), dim=1)  # (1, T)
    maps = {kind: w.cpu() for kind, w in attention_maps(trained.model, src, tgt).items()}
    named = (pieces_of(trained, ids[0].tolist()) for ids in (src, tgt, wanted))
    return Look(src, tgt, wanted, *named, maps)


def look_at(trained: Trained, german: str, english: str | None = None) -> Look:
    """`look_through` a sentence and its greedy translation, or a given one.

    With `english` the decoder is made to read that text (teacher forcing), whatever it would say.
    """
    src = torch.tensor([source_ids(german, trained.tokenizer)], device=trained.device)  # (1, S)
    if english is None:
        limit = min(MAX_LEN, 2 * src.size(1) + 10)
        return look_through(trained, src, cached_greedy(trained.model, src, None, limit))
    return look_through(trained, src, src.new_tensor([source_ids(english, trained.tokenizer)]))


# %%
def map_labels(look: Look, kind: str) -> tuple[list[str], list[str]]:
    """What stands at the rows (queries) and at the columns (keys) of a map of this kind."""
    source, read, written = (
        [piece_label(piece) for piece in pieces]
        for pieces in (look.source, look.read, look.written)
    )
    queries = [f"{last} → {following}" for last, following in zip(read, written, strict=True)]
    return {
        "encoder": (source, source),
        "decoder": (queries, read),
        "cross": (queries, source),
    }[kind]


# %% [markdown]
# Check: greedy decoding writes what the one pass above predicted.

# %%
park = look_at(trained, german)
assert torch.equal(park.wanted, wanted)
print(" ".join(map(piece_label, park.source)), "→", " ".join(map(piece_label, park.written)))

# %% [markdown]
# ## The explorer
#
# One chart holds all 72 maps of five captions. On GitHub, where its four pickers don't work, you see only cross 1.7 (in code `[0, 6]`), for the same caption.

# %%
shown = [park, *(look_at(trained, captions[i].texts[0]) for i in (0, 11, 9, 15))]
maps = []
for look in shown:
    sentence = " ".join(map(piece_label, look.source[:-1]))
    maps += [(sentence, kind, *map_labels(look, kind), w) for kind, w in look.maps.items()]
map_explorer(maps, ("cross", 1, 7), "About to write “park”, head 1.7 hardly looks at Park")

# %% [markdown]
# ### The right names
#
# > **In short.** A map is numbers without names. Wrong ones look as convincing, so check them.
#
# We can ask the model: exchange one token, and see which rows of the first layer's maps move.


# %%
def moved_rows(model: EncoderDecoder, look: Look, kind: str, side: str, at: int) -> Tensor:
    """Which rows of the first layer's maps change if the token `at` of src or tgt is exchanged: (T,)."""
    ids = {"src": look.src.clone(), "tgt": look.tgt.clone()}
    ids[side][0, at] = (ids[side][0, at] + 1) % model.generator.proj.out_features
    changed = attention_maps(model, ids["src"], ids["tgt"])[kind][0]  # (H, T, keys)
    return (changed - look.maps[kind][0]).abs().amax(dim=(0, 2)) > 1e-9


# %% [markdown]
# **Pitfall.** *Labelling the decoder's own map with source words.* The decoder's first self-attention comes before any look at the source. Exchange a German word, and this map doesn't move. Exchange the token *read* at position t, and it moves from row t on (for t > 0).

# %%
same_length = look_at(trained, captions[3].texts[0])
assert same_length.src.shape == same_length.tgt.shape  # the shape doesn't object
assert not moved_rows(model, same_length, "decoder", "src", at=2).any()
moved = moved_rows(model, same_length, "decoder", "tgt", at=4)
print("rows that move when the token read at 4 is exchanged:", moved.nonzero().flatten().tolist())
print("wrong names:", " ".join(map(piece_label, same_length.source)))
print("right names:", " ".join(map(piece_label, same_length.read)))

# %% [markdown]
# **Pitfall.** *Cross-attention turned on its side, with another text's words.* Weights are a distribution over *keys*, so if the rows are queries, each sums to 1. And no weight was computed for the reference translation, which the decoder didn't read.

# %%
cross_map = park.maps["cross"][1, 7]  # (T, S)
torch.testing.assert_close(cross_map.sum(-1), torch.ones(len(cross_map)))
print("on its side, rows sum to", [round(total, 1) for total in cross_map.T.sum(-1).tolist()][:5])

# %% [markdown]
# ## Numbers, not only pictures
#
# > **In short.** Nobody can look at 72 maps of a thousand sentences. So compute a few numbers for each head, averaged over all.
#
# For the row $w$ of weights of the query at position t:
#
# | number | formula | says |
# |---|---|---|
# | entropy | $-\sum_s w_s \log_2 w_s$ | 0: one key alone; $\log_2 n$: n keys equally |
# | share at an offset | mean of $w_{t+o}$ | o = 0: the same place; −1: the previous token; 1: the next |
# | share on the separator | weight on `</s>`; in the decoder's own attention on `<s>` | perhaps the head looks at nothing in particular |
#
# Offset 0 is the token just read in the decoder's own attention, and the source piece with the same number in cross-attention.


# %%
def attention_entropy(weights: Tensor) -> Tensor:
    """Entropy of each row in bits, weights (..., T, S) to (..., T): a row even over n keys has log₂ n."""
    return torch.special.entr(weights).sum(-1) / math.log(2)


def share_at(weights: Tensor, offset: int) -> Tensor:
    """Mean weight at the key `offset` places after the query, over queries that have one: (...)."""
    return weights.diagonal(offset, dim1=-2, dim2=-1).mean(-1)


# %%
HEAD_NUMBERS = ("entropy", "same place", "previous", "next", "separator")


def head_numbers(look: Look, kind: str) -> Tensor:
    """The numbers named by `HEAD_NUMBERS` of each head of a kind, for one sentence: (N, H, 5).

    The separator is </s> among source keys, and <s> among the decoder's own.
    """
    weights = look.maps[kind]  # (N, H, T, S)
    early = weights.size(-2) // 2 if kind == "decoder" else 0  # queries that see little but <s>
    keys = look.read if kind == "decoder" else look.source
    separator = torch.tensor([key in ("<s>", "</s>") for key in keys])
    return torch.stack(
        [
            attention_entropy(weights).mean(-1),
            share_at(weights, 0),
            share_at(weights, -1),
            share_at(weights, 1),
            weights[..., early:, separator].sum(-1).mean(-1),
        ],
        dim=-1,
    )


# %% [markdown]
# Check: known cases.

# %%
assert math.isclose(attention_entropy(torch.full((8,), 1 / 8)), 3)
previous = torch.eye(6).roll(-1, 1)  # row t looks at t − 1 alone
assert share_at(previous, -1) == 1 and share_at(previous, 0) == share_at(previous, 1) == 0
assert attention_entropy(previous).abs().max() == 0

# %% [markdown]
# We compare with a head that knows nothing. Its attention is *even*: each of n keys gets 1/n.


# %%
def even_look(look: Look) -> Look:
    """The same sentence under a model of one head that looks equally at all it may see."""
    maps = {}
    for kind, weights in look.maps.items():
        seen = torch.ones_like(weights[:1, :1])  # (1, 1, T, S)
        seen = seen.tril() if kind == "decoder" else seen
        maps[kind] = seen / seen.sum(-1, keepdim=True)
    return replace(look, maps=maps)


# %%
for name, look, head in (("encoder 2.1", park, (1, 0)), ("even", even_look(park), (0, 0))):
    numbers = zip(HEAD_NUMBERS, head_numbers(look, "encoder")[head].tolist(), strict=True)
    print(f"{name}, in one sentence:", ", ".join(f"{what} {x:.2f}" for what, x in numbers))

# %% [markdown]
# Now all heads, over 1,014 validation sentences of Multi30k and the model's greedy translations (`python -m scripts.studies.heads`).
#
# **Predict.** In BERT, Clark et al. (2019) found heads that give more than half of their weight to the neighbouring token, and many more that look at the separator `[SEP]`. In large language models the first token collects weight that a head has no use for: an *attention sink* (Xiao et al. 2023). Will a small translator have both kinds of head?

# %%
record = load_record("heads-multi30k")
head_shares_chart(record)

# %% [markdown]
# - **Positional heads**: weak ones. None gives half to a neighbour, but four encoder heads give 31 to 42% to the previous token, about five times the even share. Six look, less, at the next one. (Some may join a word's pieces.)
# - **Sinks** on a separator: only a trace. In the decoder 1.4 and 1.7 give `<s>` twice the even share; no head of cross-attention gives `</s>` over 1.3 times the even share. (The full stop isn't counted.)
#
# ## Does a head know which word translates which?
#
# > **In short.** People can say which German word each English word translates. So ask the heads, and count their mistakes.
#
# For our fifty pairs we drew the links by hand ([`captions.txt`](../scripts/corpora/captions.txt)). A *sure* link is one that everyone would draw, we think; a *possible* link is one that somebody might. German "sitzt" is English "is sitting": its link to "sitting" is sure, the one to "is" possible. With $S$ the sure links (here not a length), $P \supseteq S$ all of them, and $A$ those that a method finds, the *alignment error rate* (Och and Ney 2003) is
#
# $$ \mathrm{AER} = 1 - \frac{|A \cap S| + |A \cap P|}{|A| + |S|}. $$
#
# A possible link costs nothing if it is left out, and counts as right if it is found.


# %% tags=["yours"]
def alignment_error(
    found: Sequence[Set[tuple[int, int]]],
    sure: Sequence[Set[tuple[int, int]]],
    possible: Sequence[Set[tuple[int, int]]],
) -> float:
    """Alignment error rate over a corpus, from 0 (best) to 1 (Och and Ney 2003).

    1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|), with all four counted over all sentences.
    """
    hits = sum(len(a & s) + len(a & p) for a, s, p in zip(found, sure, possible, strict=True))
    return 1 - hits / sum(len(a) + len(s) for a, s in zip(found, sure, strict=True))


# %%
sure, possible = {(0, 0), (1, 1)}, {(0, 0), (1, 1), (1, 2)}
cases = {
    "the sure links": (sure, 0),
    "the possible one as well": (possible, 0),
    "a sure one missing": ({(0, 0)}, 1 - 2 / 3),
    "a wrong one more": ({*sure, (5, 5)}, 1 - 4 / 5),
}
for name, (found, error) in cases.items():
    assert math.isclose(alignment_error([found], [sure], [possible]), error, abs_tol=1e-12), name

# %% [markdown]
# Heads look at pieces, but links are between words. So weight *to* a word is summed over its pieces, and weight *from* it is averaged.


# %%
def word_of_piece(pieces: Sequence[str], words: Sequence[str]) -> list[int]:
    """For each piece the position of the word that it belongs to; a special token has -1.

    Raises ValueError if the pieces don't spell the words.
    """
    ends = list(itertools.accumulate(len(word) for word in words))
    spelt, owners = "", []
    for piece in pieces:
        if piece in SPECIALS:
            owners.append(-1)
            continue
        owners.append(bisect.bisect_right(ends, len(spelt)))
        spelt += piece.removeprefix("▁")
    if spelt != "".join(words):
        raise ValueError(f"{pieces} don't spell {words}")
    return owners


def weights_of_words(weights: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """Weights between pieces (..., T, S) to weights between words (..., J, I).

    `rows` and `columns` say to which word each piece belongs, -1 to none. Over a word's own pieces
    rows are averaged, since each is a distribution, and columns are added (Clark et al. 2019, §4).
    """
    row_of, column_of = (  # (T, J), (S, I); what belongs to no word gets no column
        F.one_hot(torch.tensor(owners) + 1)[:, 1:].to(weights) for owners in (rows, columns)
    )
    return (row_of / row_of.sum(0)).T @ weights @ column_of  # (..., J, I)


# %% [markdown]
# Check, by hand:

# %%
assert word_of_piece(["▁Kl", "etter", "er", ".", "</s>"], ["Kletterer", "."]) == [0, 0, 0, 1, -1]
pieces = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3], [0.3, 0.6, 0.1]])
by_hand = weights_of_words(pieces, [0, 0, 1], [0, 0, 1])
torch.testing.assert_close(by_hand, torch.tensor([[0.5, 0.5], [0.9, 0.1]]))

# %% [markdown]
# ## One map, two readings
#
# > **In short.** Two rows of a map may speak for a word: the query about to write it, and the one that has just read it.
#
# The links belong to *our* English text, so the decoder must read it: teacher forcing. Each English word gets the German word of its largest weight (`</s>` is left out). But in which row? Papers use both (Kobayashi et al. 2020, Chen et al. 2020).
#
# **Predict.** Which row aligns better, *about to write* or *just read*?


# %%
def best_links(weights: Tensor) -> set[tuple[int, int]]:
    """Each English word (row) linked to the German word (column) of its largest weight, (J, I)."""
    return {(i, j) for j, i in enumerate(weights.argmax(-1).tolist())}


def cross_word_weights(look: Look, pair: AlignedPair, moment: str) -> Tensor:
    """Cross-attention between words (N, H, J, I), for a pair that was read by teacher forcing.

    `moment` says which query speaks for a word: the one that is about to write it ("writing"), or
    the one a step later, which has just read it ("reading").
    """
    pieces = {"writing": look.written, "reading": look.read}[moment]
    rows = word_of_piece(pieces, pair.english)
    columns = word_of_piece(look.source, pair.german)
    return weights_of_words(look.maps["cross"], rows, columns)


# %%
def error_on(pairs: Sequence[AlignedPair], links: Sequence[Set[tuple[int, int]]]) -> float:
    """AER of the links that a method finds in each of `pairs`."""
    return alignment_error(links, [pair.sure for pair in pairs], [pair.possible for pair in pairs])


def error_rates(pairs: Sequence[AlignedPair], weights: Sequence[Tensor]) -> Tensor:
    """AER of every head, each over the whole of `pairs`: word weights (N, H, J, I) to (N, H)."""
    maps_of_heads = zip(*(w.flatten(0, 1) for w in weights), strict=True)
    rates = [error_on(pairs, list(map(best_links, maps))) for maps in maps_of_heads]
    return torch.tensor(rates).view(weights[0].shape[:2])


# %%
looks = [look_at(trained, *pair.texts) for pair in captions]  # teacher forcing
word_maps = {
    moment: [cross_word_weights(*both, moment) for both in zip(looks, captions, strict=True)]
    for moment in ("writing", "reading")
}
evening = 8  # a caption whose words change places
links_over_maps(
    {moment: maps[evening][1, 7] for moment, maps in word_maps.items()}, captions[evening]
)

# %% [markdown]
# This is head 2.8 again. Except at words of several pieces, the right map is the left one moved up by a row: the query that has read a word writes the next. So a head can hardly be good in both readings. In which, over all captions?

# %%
rates = {moment: error_rates(captions, maps) for moment, maps in word_maps.items()}  # (N, H)
assert (rates["writing"] < rates["reading"]).all()
for moment, rate in rates.items():
    print(f"{moment}: AER {rate.min():.2f} to {rate.max():.2f}")

# %% [markdown]
# The query about to write shows the links better, in all 24 heads. (Links drawn at random would have 0.89.) In a good aligner the other row shows the next word's German.
#
# ### Words, or places?
#
# The best head has an AER of 0.20. Is that good? A guess that knows no word, the German word at the same relative place, is often right where both languages keep the order. So we split the captions: into those whose sure links never cross, and those whose words change places.
#
# Beside the guess stands *IBM Model 1* (Brown et al. 1993), twenty lines that know no places ([`word_translation`](../scripts/studies/heads.py)). It learns from training pairs and our captions which words occur together.
#
# **Predict.** Where words change places, will the best head be nearer to the guess, or to Model 1?


# %%
def keeps_order(pair: AlignedPair) -> bool:
    """Whether no two sure links cross."""
    english = [j for _, j in sorted(pair.sure)]  # from left to right in German
    return english == sorted(english)


def diagonal_links(pair: AlignedPair) -> set[tuple[int, int]]:
    """A guess that knows no word: the German word at the same relative place."""
    slope = (len(pair.german) - 1) / (len(pair.english) - 1)
    return {(round(j * slope), j) for j in range(len(pair.english))}


def chosen(items: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """The items at these places."""
    return [items[i] for i in places]


# %%
groups = {"the order is kept": [], "words change places": []}
for i, pair in enumerate(captions):
    groups["the order is kept" if keeps_order(pair) else "words change places"].append(i)
print({group: len(places) for group, places in groups.items()})
methods = {
    "the guess": [diagonal_links(pair) for pair in captions],
    "IBM Model 1": [sure_links(line) for line in record["ibm_model_1"]["links"]],
}
aligned, heads, rivals = word_maps["writing"], {}, {}
for group, places in groups.items():
    pairs = chosen(captions, places)
    heads[group] = error_rates(pairs, chosen(aligned, places))  # (N, H)
    rivals[group] = {
        name: error_on(pairs, chosen(links, places)) for name, links in methods.items()
    }
alignment_dots(heads, rivals)

# %% [markdown]
# The best of 24 heads can look good by luck. So each half of the captions is aligned by the head that was best on the other half.

# %%
by_half = [error_rates(captions[half::2], aligned[half::2]) for half in (0, 1)]  # (N, H) each
best = [divmod(int(by_half[1 - half].argmin()), 8) for half in (0, 1)]  # on the *other* half
print("chosen:", " and ".join(f"{n + 1}.{h + 1}" for n, h in best))
methods["the best head"] = [best_links(w[best[i % 2]]) for i, w in enumerate(aligned)]

# %%
torch.manual_seed(0)
for group, places in groups.items():
    draws = torch.tensor(places)[torch.randint(len(places), (1_000, len(places)))].tolist()
    for name, links in methods.items():
        error = error_on(chosen(captions, places), chosen(links, places))
        redrawn = torch.tensor([error_on(chosen(captions, i), chosen(links, i)) for i in draws])
        low, high = redrawn.quantile(torch.tensor((0.025, 0.975))).tolist()
        print(f"{group}: {name} {error:.2f} (95%: {low:.2f} to {high:.2f})")

# %% [markdown]
# Where the order is kept, the guess is about as good as the best head: by this number such captions can't tell knowing words from counting places. Where words change places, the best head's AER is half the guess's, and nearer to Model 1's. Nobody taught it to align. (95%: the captions drawn again, the bootstrap of [chapter 10](ch10_judging.ipynb). One person drew the links.)
#
# The model of 1993 does better than any one head. But it is shown the English word, and the head looks before the word is written. **Predict.** If only the words count that our model would write there itself, does the head catch up?


# %%
@torch.no_grad()
def own_words(look: Look, pair: AlignedPair) -> set[int]:
    """The places of the English words of which each piece is the model's own first choice."""
    states = model(look.src, look.tgt, None, subsequent_mask(look.tgt.size(1)))
    same = (model.generator(states).argmax(-1) == look.wanted)[0].tolist()
    words = word_of_piece(look.written, pair.english)
    return {*words} - {word for word, own in zip(words, same, strict=True) if not own}


moved = groups["words change places"]
for name in ("IBM Model 1", "the best head"):
    links = []  # of each caption: those that the method finds, the sure and the possible ones
    for i in moved:
        every = methods[name][i], captions[i].sure, captions[i].possible
        own = own_words(looks[i], captions[i])
        links.append([{link for link in some if link[1] in own} for some in every])
    print(
        f"words change places, own words: {name} {alignment_error(*zip(*links, strict=True)):.2f}"
    )

# %% [markdown]
# No. Both do better on such words, and Model 1 stays as far ahead. So being shown the word doesn't explain its lead.
#
# ## Six of 72 dossiers
#
# > **In short.** One line for each head, and a bet.


# %%
def dossiers(record: Mapping[str, Any], alignment: Tensor) -> pd.DataFrame:
    """A line for each head: what the record says, and the AER (N, H) of cross-attention's heads."""
    lines = pd.DataFrame(record["heads"])
    lines.loc[lines["kind"] == "cross", "AER"] = alignment.flatten().tolist()
    names = lines["kind"] + " " + lines["layer"].astype(str) + "." + lines["head"].astype(str)
    return lines.set_index(names.rename("name"))


# %%
lines = dossiers(record, rates["writing"])
numbers = ["entropy", "previous", "same place", "separator", "AER"]
some = ["encoder 2.1", "encoder 3.2", "decoder 3.6", "cross 1.5", "cross 2.8", "cross 1.7"]
even = pd.DataFrame(record["even"]).T.rename("even, {}".format)
pd.concat([lines.loc[some], even])[numbers].round(2)

# %% [markdown]
# **Your bet.** Encoder 2.1 looks at the previous token, 3.2 spreads as if evenly over two thirds of its keys. Decoder 3.6 has the lowest entropy (but few keys: see *even*). Cross 1.5 and 2.8 align best, 1.7 worst. Order these six by what the model would lose without each. (`lines` has all 72.)
#
# ## Summary
#
# - A map belongs to the text that went through the model. Rows are queries, columns keys.
# - Wrong names look right. Exchange a token, and see what moves.
# - Trust numbers over many sentences, beside even attention. This model has weak previous-token heads, and hardly any that rest on `<s>` or `</s>`.
# - Some heads of cross-attention align words, even where words change places, in the query that is about to write.
#
# ## What the paper did that we don't
#
# It shows the encoder's maps of single sentences, and says that heads "appear to exhibit behavior related to the syntactic and semantic structure". We count over many, beside a baseline.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Read the maps
#
# *think · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Find (a) an encoder head that looks at the previous token, (b) a cross-attention head of the *first* layer that aligns as well as the best of the second, (c) a head of the decoder's own attention whose rows mostly have one dark cell. Which of them would you call important, from their maps?
#
# <details><summary>An answer</summary>
#
# (a) 2.1, 2.4, 2.8 and 3.3. (b) 1.5. (c) Among others 3.6 and 2.7 (see `lines`), also because these heads see few keys. A map alone doesn't say what is important.
#
# </details>
#
# ### Exercise 2 · Rollout
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# The second layer looks at what the first made of the words. *Attention rollout* (Abnar and Zuidema 2020) follows the weights down to the words: average each layer's heads, mix this half and half with the identity (for the residual connection), and multiply the layers, the later one on the left. For an encoder's maps (N, H, S, S), return the S × S matrix whose row t estimates how much of each word reaches position t. (`solution("rollout")` shows ours.)


# %%
def rollout(maps: Tensor) -> Tensor:
    """How much of each word reaches each position after all layers: (N, H, S, S) to (S, S)."""
    ...


check(rollout)

# %% [markdown]
# ### Exercise 3 · One step later
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# In this model the query that has just read a word shows, at best, the next word's German. Papers on deeper models found it the better one in the lower layers. What might the first layers want with "which source word was that?", and why might three layers have no room for it?
#
# <details><summary>An answer</summary>
#
# A query that has read word t − 1 can look up its source and so learn how far the translation has come; the layers above can then look for what comes next. With only three layers, each cross-attention may have to fetch something for the next word at once. Our numbers fit this, but don't prove it.
#
# </details>
#
# Next: [Chapter 16 · Intervening](ch16_intervening.ipynb)
