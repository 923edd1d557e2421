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
# # Chapter 10

# %% tags=["bootstrap"]
# Make this chapter at home: the series is in a folder above, installed, or gets cloned beside it.
import os
import subprocess
import sys
from pathlib import Path

here = Path(globals().get("__file__", "notebook")).resolve()
beside = Path("from-attention-to-translation").resolve()
finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
specs = [finder.find_spec("scripts", None) for finder in finders]
installed = [Path(spec.origin).resolve().parents[1] for spec in specs if spec and spec.origin]
homes = [*here.parents, *installed, beside]
root = next((home for home in homes if (home / "scripts/ch01_attention.py").exists()), None)
if root is None:
    address = os.environ.get("SERIES_REPOSITORY", "").removeprefix("git+")
    if not address:
        raise SystemExit("Set SERIES_REPOSITORY to the series' address, such as git+https://…")
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", address, beside], check=True)
    root = beside
sys.path.insert(0, str(root))  # first, so that no other package named scripts shadows ours
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "scripts" and str(root) not in str(getattr(module, "__file__", "")):
        del sys.modules[name]
if root == beside:
    from scripts.first_cell import install_missing

    install_missing()

# In a terminal, with options or under torchrun, this chapter is a command and shows nothing.
if __name__ == "__main__" and "__file__" in globals() and (sys.argv[1:] or "RANK" in os.environ):
    from scripts.ch10_looking_inside import main

    raise SystemExit(main())


# %%
import bisect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import (
    MultiHeadedAttention,
    split_heads,
    merge_heads,
    weight_panels,
)
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch05_training import BOS, EOS
from scripts.ch06_multi30k import SPECIALS, load_corpus, source_ids
from scripts.ch08_training_run import (
    Trained,
    corpus_bleu,
    dropout_off,
    held_out_splits,
    load_model,
    pick_device,
)
from scripts.ch09_decoding_and_bleu import (
    DecodeOptions,
    cached_greedy,
    decode_texts,
    default_model,
    paired_bootstrap,
    search_rows,
    translate,
    until_end,
)
from scripts.charts import GREY, INK, PALETTE, bars, heatmap, lines, rounded, titled
from scripts.records import load_record, provenance, save_record, sha256

# %%
CAPTIONS = """
Ein kleiner Hund läuft über die nasse Wiese . | A small dog runs across the wet meadow . | 0-0 1-1 2-2 3-3 4-4 5-5 6-6 7-7 8-8 | 3-2
Zwei Mädchen spielen im Garten mit einem roten Ball . | Two girls are playing with a red ball in the garden . | 0-0 1-1 2p2 2-3 3-8 3-9 4-10 5-4 6-5 7-6 8-7 9-11 | 2-1
Im Park sitzt ein alter Mann auf einer Bank . | An old man is sitting on a bench in the park . | 0-8 0-9 1-10 2p3 2-4 3-0 4-1 5-2 6-5 7-6 8-7 9-11 | 2-5
Eine Frau liest ihrem Sohn ein Buch vor . | A woman is reading a book to her son . | 0-0 1-1 2p2 2-3 3p6 3-7 4-8 5-4 6-5 7p3 8-9 | 2-1
Drei Männer in orangen Westen reparieren die Straße . | Three men in orange vests are repairing the road . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9 | 5-1
Ein Junge springt von einem Felsen ins Wasser . | A boy jumps from a rock into the water . | 0-0 1-1 2-2 3-3 4-4 5-5 6-6 6-7 7-8 8-9 | 2-1
Der Koch schneidet Gemüse in einer kleinen Küche . | The cook is cutting vegetables in a small kitchen . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 7-8 8-9 | 2-1
Eine Gruppe von Wanderern ruht sich im Schatten aus . | A group of hikers is resting in the shade . | 0-0 1-1 2-2 3-3 4p4 4-5 5p5 6-6 6-7 7-8 8p5 9-9 | 4-1
Am Abend füttert ein Mädchen mit Zöpfen die Ziegen . | In the evening a girl with braids feeds the goats . | 0-0 0-1 1-2 2-7 3-3 4-4 5-5 6-6 7-8 8-9 9-10 | 2-4
Ein Radfahrer mit rotem Helm fährt einen steilen Hügel hinauf . | A cyclist with a red helmet is riding up a steep hill . | 0-0 1-1 2-2 3-4 4-5 5p6 5-7 6-9 7-10 8-11 9-8 10-12 | 5-1
Zwei Hunde kämpfen um einen Stock . | Two dogs are fighting over a stick . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 | 2-1
Ein Kind hat einen großen Schneemann gebaut . | A child has built a big snowman . | 0-0 1-1 2-2 3-4 4-5 5-6 6-3 7-7 | 2-1
Auf dem Markt verkauft eine Frau frisches Obst . | A woman is selling fresh fruit at the market . | 0-6 1-7 2-8 3p2 3-3 4-0 5-1 6-4 7-5 8-9 | 3-5
Ein Mann in einem blauen Hemd streicht einen Zaun . | A man in a blue shirt is painting a fence . | 0-0 1-1 2-2 3-3 4-4 5-5 6p6 6-7 7-8 8-9 9-10 | 6-1
Kinder rennen durch einen Springbrunnen . | Children are running through a fountain . | 0-0 1p1 1-2 2-3 3-4 4-5 5-6 | 1-0
Die Katze , die auf dem Sofa liegt , schläft . | The cat that is lying on the sofa is sleeping . | 0-0 1-1 3-2 4-5 5-6 6-7 7p3 7-4 9p8 9-9 10-10 | 9-1
Ein Gitarrist mit langen Haaren singt in ein Mikrofon . | A guitarist with long hair is singing into a microphone . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9 9-10 | 5-1
Mehrere Leute warten an einer Haltestelle auf den Bus . | Several people are waiting for the bus at a stop . | 0-0 1-1 2p2 2-3 3-7 4-8 5-9 6-4 7-5 8-6 9-10 | 2-1
Ein Fußballspieler in Weiß schießt den Ball ins Tor . | A soccer player in white kicks the ball into the goal . | 0-0 1-1 1-2 2-3 3-4 4-5 5-6 6-7 7-8 7-9 8-10 9-11 | 4-1
Zwei junge Frauen machen ein Foto von sich selbst . | Two young women are taking a picture of themselves . | 0-0 1-1 2-2 3p3 3-4 4-5 5-6 6-7 7-8 8p8 9-9 | 3-2
Ein Traktor zieht einen Wagen voller Heu über das Feld . | A tractor pulls a cart full of hay across the field . | 0-0 1-1 2-2 3-3 4-4 5-5 5p6 6-7 7-8 8-9 9-10 10-11 | 2-1
Bei Regen trägt der Mann einen gelben Mantel . | In the rain the man wears a yellow coat . | 0-0 1-2 2-5 3-3 4-4 5-6 6-7 7-8 8-9 | 2-4
Eine Tänzerin in einem weißen Kleid dreht sich auf der Bühne . | A dancer in a white dress is spinning on the stage . | 0-0 1-1 2-2 3-3 4-4 5-5 6p6 6-7 7p7 8-8 9-9 10-10 11-11 | 6-1
Der Torwart fängt den Ball mit beiden Händen . | The goalkeeper catches the ball with both hands . | 0-0 1-1 2-2 3-3 4-4 5-5 6-6 7-7 8-8 | 2-1
Ein schwarzer Hund trägt einen Schuh im Maul . | A black dog is carrying a shoe in its mouth . | 0-0 1-1 2-2 3p3 3-4 4-5 5-6 6-7 6p8 7-9 8-10 | 3-2
Vor dem Haus stehen drei Fahrräder . | Three bicycles are standing in front of the house . | 0-4 0-5 0-6 1-7 2-8 3p2 3-3 4-0 5-1 6-9 | 3-5
Ein Mann schläft auf dem Sofa , während sein Sohn spielt . | A man is sleeping on the sofa while his son is playing . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 7-7 8-8 9-9 10p10 10-11 11-12 | 2-1
Zwei Arbeiter tragen eine schwere Leiter die Treppe hinunter . | Two workers carry a heavy ladder down the stairs . | 0-0 1-1 2-2 3-3 4-4 5-5 6-7 7-8 8-6 9-9 | 2-1
Das Baby hält einen Löffel in der linken Hand . | The baby is holding a spoon in its left hand . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6p7 7-8 8-9 9-10 | 2-1
Eine ältere Dame mit Brille verkauft Blumen auf der Straße . | An older lady with glasses is selling flowers on the street . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9 9-10 10-11 | 5-2
Am Strand bauen zwei Jungen eine Burg aus Sand . | Two boys are building a castle of sand on the beach . | 0-8 0-9 1-10 2p2 2-3 3-0 4-1 5-4 6-5 7-6 8-7 9-11 | 2-4
Ein Surfer reitet auf einer großen Welle . | A surfer is riding on a big wave . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 7-8 | 2-1
Eine Frau wäscht ihre Hände in einem Eimer . | A woman is washing her hands in a bucket . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 7-8 8-9 | 2-1
Der Lehrer zeigt den Schülern eine Karte von Europa . | The teacher shows the students a map of Europe . | 0-0 1-1 2-2 3-3 4-4 5-5 6-6 7-7 8-8 9-9 | 2-1
Ein Mann mit Bart und Hut raucht eine Pfeife . | A man with a beard and a hat is smoking a pipe . | 0-0 1-1 2-2 3-4 4-5 5-7 6p8 6-9 7-10 8-11 9-12 | 6-1
Auf der Wiese grasen viele weiße Schafe . | Many white sheep are grazing in the meadow . | 0-5 1-6 2-7 3p3 3-4 4-0 5-1 6-2 7-8 | 3-6
Zwei Kinder rutschen auf ihren Schlitten den Berg hinunter . | Two children are sliding down the mountain on their sleds . | 0-0 1-1 2p2 2-3 3-7 4-8 5-9 6-5 7-6 8-4 9-10 | 2-1
Ein Mädchen bläst die Kerzen auf ihrem Kuchen aus . | A girl blows out the candles on her cake . | 0-0 1-1 2-2 3-4 4-5 5-6 6-7 7-8 8-3 9-9 | 2-1
Der Feuerwehrmann klettert auf eine Leiter . | The firefighter is climbing a ladder . | 0-0 1-1 2p2 2-3 3p3 4-4 5-5 6-6 | 2-1
Ein Straßenmusiker spielt vor einem Café Geige . | A street musician is playing the violin in front of a café . | 0-0 1-1 1-2 2p3 2-4 3-7 3-8 3-9 4-10 5-11 6-6 7-12 | 2-1
Eine Braut und ein Bräutigam tanzen unter bunten Lichtern . | A bride and a groom are dancing under colorful lights . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9 9-10 | 5-1
Ein Vogel sitzt auf dem Ast eines kahlen Baumes . | A bird is sitting on the branch of a bare tree . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6p7 6-8 7-9 8-10 9-11 | 2-1
Im Hintergrund sieht man hohe Berge . | In the background one can see tall mountains . | 0-0 0-1 1-2 2p4 2-5 3-3 4-6 5-7 6-8 | 2-3
Ein Mann repariert sein Motorrad in der Garage . | A man is repairing his motorcycle in the garage . | 0-0 1-1 2p2 2-3 3-4 4-5 5-6 6-7 7-8 8-9 | 2-1
Die Läufer haben das Ziel fast erreicht . | The runners have almost reached the finish line . | 0-0 1-1 2-2 3-5 4-6 4-7 5-3 6-4 7-8 | 2-1
Eine Frau mit einem Kinderwagen überquert die Straße . | A woman with a stroller is crossing the street . | 0-0 1-1 2-2 3-3 4-4 5p5 5-6 6-7 7-8 8-9 | 5-1
Ein brauner Hund jagt am Ufer einen weißen Vogel . | A brown dog is chasing a white bird along the shore . | 0-0 1-1 2-2 3p3 3-4 4-8 4-9 5-10 6-5 7-6 8-7 9-11 | 3-2
Vier Freunde essen an einem runden Tisch Pizza . | Four friends are eating pizza at a round table . | 0-0 1-1 2p2 2-3 3-5 4-6 5-7 6-8 7-4 8-9 | 2-1
Der Junge , der den Drachen hält , lacht . | The boy who is holding the kite is laughing . | 0-0 1-1 3-2 4-5 5-6 6p3 6-4 8p7 8-8 9-9 | 8-1
Ein Angler in hohen Stiefeln steht mitten im Fluss . | A fisherman in tall boots stands in the middle of the river . | 0-0 1-1 2-2 3-3 4-4 5-5 6p6 6p7 6-8 7p9 7-10 8-11 9-12 | 5-1
"""

# %%
KINDS_OF_ATTENTION = ("encoder", "decoder", "cross")


def attention_layers(model: EncoderDecoder) -> dict[str, list[MultiHeadedAttention]]:
    """The model's attention layers by kind, each kind from the first layer to the last."""
    return {
        "encoder": [layer.self_attn for layer in model.encoder.layers],
        "decoder": [layer.self_attn for layer in model.decoder.layers],
        "cross": [layer.src_attn for layer in model.decoder.layers],
    }


# %%
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


# %%
def attention_entropy(weights: Tensor) -> Tensor:
    """Entropy of each row in bits, weights (..., T, S) to (..., T): a row even over n keys has log₂ n."""
    return torch.special.entr(weights).sum(-1) / math.log(2)


def attention_distance(weights: Tensor) -> Tensor:
    """How far each query looks on average, in positions: (..., T, S) to (..., T)."""
    t, s = torch.arange(weights.size(-2)), torch.arange(weights.size(-1))
    return (weights * (t[:, None] - s).abs()).sum(-1)


def share_at(weights: Tensor, offset: int) -> Tensor:
    """Mean weight at the key `offset` places after the query, over queries that have one: (...)."""
    return weights.diagonal(offset, dim1=-2, dim2=-1).mean(-1)


def share_on(weights: Tensor, keys: Tensor) -> Tensor:
    """Mean over the queries of the weight on the marked keys: (..., T, S) and (S,) boolean, to (...)."""
    return weights[..., keys].sum(-1).mean(-1)


# %%
HEAD_NUMBERS = ("entropy", "distance", "same place", "previous", "next", "separator", "full stop")


def head_numbers(look: Look, kind: str) -> Tensor:
    """The numbers named by `HEAD_NUMBERS` of each head of a kind, for one sentence: (N, H, 7).

    The separator is </s> among source keys, and <s> among the decoder's own.
    """
    weights = look.maps[kind]  # (N, H, T, S)
    keys = look.read if kind == "decoder" else look.source
    separator, stop = (
        torch.tensor([key in marks for key in keys]) for marks in (("<s>", "</s>"), (".",))
    )
    return torch.stack(
        [
            attention_entropy(weights).mean(-1),
            attention_distance(weights).mean(-1),
            share_at(weights, 0),
            share_at(weights, -1),
            share_at(weights, 1).nan_to_num(),
            share_on(weights, separator),
            share_on(weights, stop),
        ],
        dim=-1,
    )


# %%
@contextmanager
def silenced(heads: Iterable[tuple[MultiHeadedAttention, int]]) -> Iterator[None]:
    """Some heads, each a layer and a number from 0, add nothing inside the block.

    Head i speaks only through its columns of the output map, so these are 0 meanwhile. Afterwards
    they are what they were, to the bit, even after an error. Works on every path, since all of them
    read the weights. Raises IndexError for a head that a layer doesn't have.
    """
    kept = []
    try:
        for layer, head in heads:
            if not 0 <= head < layer.h:
                raise IndexError(f"head {head} of a layer that has {layer.h}")
            d_k = layer.project_output.in_features // layer.h
            weight = layer.project_output.weight.detach()  # (D, D), the same memory
            columns = weight[:, head * d_k : (head + 1) * d_k]  # (D, d_k)
            kept.append((columns, columns.clone()))
            columns.zero_()
        yield
    finally:
        for columns, before in reversed(kept):
            columns.copy_(before)


# %%
@dataclass(frozen=True)
class AlignedPair:
    """A caption in both languages, as words, with the links between them made by hand.

    A link is (German position, English position). `sure` are links that everyone would make;
    `possible` holds those and the debatable ones. `verb` and `subject` are German positions.
    """

    german: tuple[str, ...]
    english: tuple[str, ...]
    sure: frozenset[tuple[int, int]]
    possible: frozenset[tuple[int, int]]
    verb: int
    subject: int

    @property
    def texts(self) -> tuple[str, str]:
        """Both captions as plain text, German first."""
        texts = (" ".join(words) for words in (self.german, self.english))
        return tuple(re.sub(r" ([.,])", r"\1", text) for text in texts)


def aligned_pairs(text: str = CAPTIONS) -> list[AlignedPair]:
    """The pairs of a text in the form of `CAPTIONS`. Raises ValueError for a link that leads nowhere."""
    pairs = []
    for line in text.strip().splitlines():
        german, english, links, relation = (part.split() for part in line.split(" | "))
        found = [re.fullmatch(r"(\d+)([-p])(\d+)", link) for link in links]
        if not all(found):
            raise ValueError(f"not a link, such as 3-2 or 3p2, in {line!r}")
        sure = {(int(m[1]), int(m[3])) for m in found if m[2] == "-"}
        possible = {(int(m[1]), int(m[3])) for m in found}
        verb, subject = map(int, relation[0].split("-"))
        inside = all(i < len(german) and j < len(english) for i, j in possible)
        if not inside or max(verb, subject) >= len(german):
            raise ValueError(f"a position beyond the sentence in {line!r}")
        links = (frozenset(sure), frozenset(possible))
        pairs.append(AlignedPair(tuple(german), tuple(english), *links, verb, subject))
    return pairs


# %%
def word_of_piece(pieces: Sequence[str], words: Sequence[str]) -> list[int]:
    """For each piece the position of the word that it belongs to; a special token has -1.

    Raises ValueError where the pieces don't spell the words.
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


def word_weights(weights: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """Weights between pieces (..., T, S) to weights between words (..., J, I).

    `rows` and `columns` say to which word each piece belongs, -1 to none. Over a word's own pieces
    rows are averaged, since each is a distribution, and columns are added (Clark et al. 2019, §4).
    """
    row_of, column_of = (
        torch.tensor([[owner == word for owner in owners] for word in range(max(owners) + 1)])
        for owners in (rows, columns)
    )  # (J, T), (I, S) boolean
    row_of, column_of = row_of.to(weights.dtype), column_of.to(weights.dtype)
    return (row_of / row_of.sum(-1, keepdim=True)) @ weights @ column_of.T  # (..., J, I)


# %%
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


def best_links(weights: Tensor) -> set[tuple[int, int]]:
    """Each English word (row) linked to the German word (column) of its largest weight, (J, I)."""
    return {(i, j) for j, i in enumerate(weights.argmax(-1).tolist())}


# %%
def cross_word_weights(look: Look, pair: AlignedPair, moment: str) -> Tensor:
    """Cross-attention between words (N, H, J, I), for a pair that was read by teacher forcing.

    `moment` says which query speaks for a word: the one that is about to write it ("writing"), or
    the one a step later, which has just read it ("reading").
    """
    pieces = {"writing": look.written, "reading": look.read}[moment]
    rows = word_of_piece(pieces, pair.english)
    columns = word_of_piece(look.source, pair.german)
    return word_weights(look.maps["cross"], rows, columns)


# %%
def diagonal_links(pair: AlignedPair) -> set[tuple[int, int]]:
    """The guess of one who knows no word: the German word at the same relative place."""
    slope = (len(pair.german) - 1) / (len(pair.english) - 1)
    return {(round(j * slope), j) for j in range(len(pair.english))}


# %%
class WordTranslation:
    """IBM Model 1 (Brown et al. 1993): p(English word | German word), learned from pairs alone.

    Every English word comes from one German word of its sentence, or from none, each position being
    as likely as the next. `rounds` of expectation maximisation, from the even distribution.
    """

    def __init__(self, pairs: Sequence[tuple[Sequence[str], Sequence[str]]], rounds: int = 5):
        self.ids: dict[tuple[str, str], int] = {}
        cells, sources = [], []  # one entry for each word pair of each sentence
        numbers: dict[str, int] = {}
        groups: list[int] = []  # which English word, of all, a cell explains
        group = 0
        for german, english in pairs:
            for target in english:
                for source in ("", *german):
                    cells.append(self.ids.setdefault((source, target), len(self.ids)))
                    groups.append(group)
                group += 1
        for source, _ in self.ids:
            sources.append(numbers.setdefault(source, len(numbers)))
        cell, owner, source_of = (np.array(x) for x in (cells, groups, sources))
        self.p = np.ones(len(self.ids))
        for _ in range(rounds):
            shares = self.p[cell]  # expectation: who explains each English word
            shares /= np.bincount(owner, shares)[owner]
            counts = np.bincount(cell, shares, len(self.ids))  # maximisation
            self.p = counts / np.bincount(source_of, counts)[source_of]

    def weights(self, german: Sequence[str], english: Sequence[str]) -> Tensor:
        """p(english word | german word) for each pair of words: (J, I); 0 for a pair never met."""
        table = [[self.ids.get((s, t), -1) for s in german] for t in english]
        p = [[self.p[k] if k >= 0 else 0.0 for k in row] for row in table]
        return torch.tensor(p, dtype=torch.float64)


# %%
@torch.no_grad()
def decoder_stages(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> Tensor:
    """The decoder's residual stream: the embeddings, then after each layer, (N + 1, T, D)."""
    with dropout_off(model):
        memory = model.encode(src)  # (1, S, D)
        stages = [model.tgt_embed(tgt)]  # (1, T, D)
        for layer in model.decoder.layers:
            stages.append(layer(stages[-1], memory, None, subsequent_mask(tgt.size(1))))
    return torch.cat(stages)


@torch.no_grad()
def logit_lens(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> Tensor:
    """log p(next token) read off after each layer, by the model's own last norm and generator.

    src (1, S) and tgt (1, T) to (N + 1, T, V); the last stage is what the model says.
    """
    stages = decoder_stages(model, src, tgt)
    return model.generator(model.decoder.norm(stages)).log_softmax(-1)


# %%
@torch.no_grad()
def residual_norms(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> pd.DataFrame:
    """Along both stacks: the length of what each sublayer adds, and of the stream after it.

    Means over the positions of src (1, S) or tgt (1, T), for a pre-norm model.
    """
    rows, hooks = [], []
    names = {"encoder": ("attention", "feed-forward")}
    names["decoder"] = ("self-attention", "cross-attention", "feed-forward")

    def note(stack: str, layer: int, name: str, x: Tensor, after: Tensor) -> None:
        if not rows or rows[-1]["stack"] != stack:
            rows.append(row(stack, 0, "embedding", x, x))
        rows.append(row(stack, layer, name, after - x, after))

    def row(stack: str, layer: int, name: str, added: Tensor, after: Tensor) -> dict[str, Any]:
        added, after = (t.norm(dim=-1).mean().item() for t in (added, after))
        return {"stack": stack, "layer": layer, "part": name, "added": added, "stream": after}

    for stack in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(model, stack).layers, start=1):
            for name, connection in zip(names[stack], layer.sublayer, strict=True):
                call = lambda _, given, y, at=(stack, number, name): note(*at, given[0], y)  # noqa: E731
                hooks.append(connection.register_forward_hook(call))
    try:
        with dropout_off(model):
            model(src, tgt, None, subsequent_mask(tgt.size(1)))
    finally:
        for hook in hooks:
            hook.remove()
    return pd.DataFrame(rows)


# %%
@torch.no_grad()
def heard_values(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> dict[str, Tensor]:
    """What each key would send through each head at weight 1: kind to (N, H, keys, D).

    Head i sends (x·W^V_i + b_i)·W^O_i: with the weights, it is all that reaches the residual stream.
    """
    heard: dict[str, list[Tensor]] = {kind: [] for kind in KINDS_OF_ATTENTION}

    def note(kind: str, layer: MultiHeadedAttention, key: Tensor) -> None:
        values = split_heads(layer.project_value(key), layer.h)[0]  # (H, S, d_k)
        out = layer.project_output.weight.view(-1, layer.h, values.size(-1))  # (D, H, d_k)
        heard[kind].append(torch.einsum("hsk,dhk->hsd", values, out))  # (H, S, D)

    hooks = [
        layer.register_forward_pre_hook(lambda layer, given, kind=kind: note(kind, layer, given[1]))
        for kind, layers in attention_layers(model).items()
        for layer in layers
    ]
    try:
        with dropout_off(model):
            model(src, tgt, None, subsequent_mask(tgt.size(1)))
    finally:
        for hook in hooks:
            hook.remove()
    return {kind: torch.stack(parts) for kind, parts in heard.items()}


# %%
def even_look(look: Look) -> Look:
    """The same sentences under a model of one head that looks at all it may see alike."""
    maps = {
        kind: (w[:1, :1] > 0) / (w[:1, :1] > 0).sum(-1, keepdim=True)
        for kind, w in look.maps.items()
    }
    return replace(look, maps=maps)


# %%
def every_head(model: EncoderDecoder) -> list[tuple[str, int, int]]:
    """All heads by kind, layer and number, counted from 0."""
    return [
        (kind, number, head)
        for kind, layers in attention_layers(model).items()
        for number, layer in enumerate(layers)
        for head in range(layer.h)
    ]


def without_heads(
    trained: Trained, rows: Sequence[Sequence[int]], heads: Iterable[tuple[str, int, int]]
) -> list[str]:
    """Greedy translations of encoded sources while the named heads are silent."""
    layers = attention_layers(trained.model)
    with silenced((layers[kind][number], head) for kind, number, head in heads):
        return decode_texts(trained, rows, DecodeOptions(beam=1))


# %%
def holm(p: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of many tests pass together: at most a chance of `level` that any passes wrongly (Holm 1979)."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    passed = [False] * len(p)
    for rank, i in enumerate(order):
        if p[i] > level / (len(p) - rank):
            break
        passed[i] = True
    return passed


# %%
@dataclass
class InspectOptions:
    """Options of `inspect`."""

    model: str | None = None
    """A model's folder; by default the best one that ships."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to translate."""
    sentences: int | None = None
    """Only so many of each split."""
    save: bool = False
    """Keep the result as results/heads-CORPUS.json, which the chapter shows."""


MANY_DRAWS = 10_000  # of the bootstrap: with 72 tests, p has to be measured finely
PRUNING_STEP = 9  # heads silenced more at each point of the curve
RANDOM_ORDERS = 3


# %%
def mean_numbers(looks: Iterable[Look], kind: str) -> Tensor:
    """`head_numbers` of a kind, averaged over sentences: (N, H, 7)."""
    return torch.stack([head_numbers(look, kind) for look in looks]).mean(0)


def numbers_on_record(
    trained: Trained, rows: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each kind's numbers (N, H, 7) over the greedy translations of `rows`, and those of even attention."""
    found = search_rows(trained.model, rows, cached_greedy)
    looks = []
    for row, ids in zip(tqdm(rows, desc="maps"), found, strict=True):
        src = torch.tensor([row], device=trained.device)  # (1, S)
        wanted = src.new_tensor([until_end(ids.tolist())])  # (1, T)
        looks.append(look_through(trained, src, wanted))
    even = [even_look(look) for look in looks]
    return tuple({k: mean_numbers(some, k) for k in KINDS_OF_ATTENTION} for some in (looks, even))


# %%
def silence_each(
    trained: Trained, rows: Sequence[Sequence[int]], references: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """BLEU without each head, with its bootstrap against the whole model, and without each layer's heads."""
    whole = without_heads(trained, rows, ())
    heads, layers = [], []
    for kind, number, head in tqdm(every_head(trained.model), desc="silenced"):
        outputs = without_heads(trained, rows, [(kind, number, head)])
        test = paired_bootstrap(whole, outputs, references, MANY_DRAWS)
        row = {"kind": kind, "layer": number + 1, "head": head + 1}
        row |= {"bleu": round(corpus_bleu(outputs, references).score, 2)}
        row |= {key: round(getattr(test, key), 4) for key in ("difference", "low", "high", "p")}
        heads.append(row)
    for kind, found in attention_layers(trained.model).items():
        for number, layer in enumerate(found):
            outputs = without_heads(trained, rows, [(kind, number, h) for h in range(layer.h)])
            bleu = round(corpus_bleu(outputs, references).score, 2)
            layers.append({"kind": kind, "layer": number + 1, "bleu": bleu})
    return heads, layers


def pruning_curve(
    trained: Trained,
    rows: Sequence[Sequence[int]],
    references: Sequence[str],
    orders: Mapping[str, Sequence[tuple[str, int, int]]],
) -> list[dict[str, Any]]:
    """BLEU with the first 0, 9, 18, … heads of each order silent."""
    points = []
    for name, order in orders.items():
        for count in range(0, len(order) + 1, PRUNING_STEP):
            outputs = without_heads(trained, rows, order[:count])
            bleu = round(corpus_bleu(outputs, references).score, 2)
            points.append({"order": name, "silent": count, "bleu": bleu})
    return points


# %%
def words_of(text: str) -> list[str]:
    """Words and punctuation marks, lower-cased."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def translation_table(
    pairs: Iterable[tuple[str, str]], ours: Sequence[AlignedPair]
) -> WordTranslation:
    """IBM Model 1 of a corpus and our captions' texts; it never sees their links."""
    texts = [*pairs, *(pair.texts for pair in ours)]
    return WordTranslation([(words_of(german), words_of(english)) for german, english in texts])


def table_links(table: WordTranslation, pair: AlignedPair) -> set[tuple[int, int]]:
    """Each English word linked to the German word that explains it best."""
    german, english = ([word.lower() for word in words] for words in (pair.german, pair.english))
    return best_links(table.weights(german, english))


# %%
def inspect_model(
    trained: Trained, corpus: dict[str, list[tuple[str, str]]], options: InspectOptions
) -> dict[str, Any]:
    """All that the record says about the heads, but where it came from."""
    chosen = {
        name: corpus[name][: options.sentences] for name in ("val", held_out_splits(corpus)[0])
    }
    val, test = (
        ([source_ids(german, trained.tokenizer) for german, _ in pairs], [e for _, e in pairs])
        for pairs in chosen.values()
    )
    numbers, even = numbers_on_record(trained, val[0])
    heads, layers = silence_each(trained, *val)
    by_worth = sorted(heads, key=lambda row: -row["difference"])
    every = every_head(trained.model)
    orders = {"least worth first": [(r["kind"], r["layer"] - 1, r["head"] - 1) for r in by_worth]}
    for seed in range(RANDOM_ORDERS):
        orders[f"random {seed + 1}"] = [
            every[i] for i in np.random.default_rng(seed).permutation(len(every))
        ]
    for row in heads:
        values = numbers[row["kind"]][row["layer"] - 1, row["head"] - 1].tolist()
        row |= {k: round(v, 4) for k, v in zip(HEAD_NUMBERS, values, strict=True)}
    pairs = aligned_pairs()
    table = translation_table(corpus["train"], pairs)
    found = [table_links(table, pair) for pair in pairs]
    whole = corpus_bleu(without_heads(trained, val[0], ()), val[1])
    return {
        "corpus": options.corpus,
        "splits": {name: len(some) for name, some in chosen.items()},
        "search": "greedy",
        "bleu": round(whole.score, 2),
        "signature": whole.signature,
        "draws": MANY_DRAWS,
        "heads": heads,
        "even": {
            k: dict(zip(HEAD_NUMBERS, np.round(v[0, 0].tolist(), 4).tolist(), strict=True))
            for k, v in even.items()
        },
        "layers": layers,
        "pruning": pruning_curve(trained, *test, orders),
        "ibm_model_1": {
            "trained_on": len(corpus["train"]) + len(pairs),
            "links": [
                " ".join(f"{i}-{j}" for i, j in sorted(links, key=lambda link: link[1]))
                for links in found
            ],
        },
    }


def run_inspect(options: InspectOptions) -> dict[str, Any]:
    """The inspection as a record, which is saved if the options say so."""
    folder = Path(options.model) if options.model else default_model()
    trained = load_model(folder, pick_device(options.device))
    said = {"model": options.model, "corpus": options.corpus, "sentences": options.sentences}
    defaults = InspectOptions()
    words = [f"--{k} {v}" for k, v in said.items() if v != getattr(defaults, k)]
    command = ["python scripts/ch10_looking_inside.py inspect", *words, "--save true"]
    record = {
        **provenance(" ".join(command), trained.device),
        "model": folder.resolve().name,
        "weights_sha256": sha256(folder / "model.safetensors"),
        **inspect_model(trained, load_corpus(options.corpus), options),
    }
    if options.save:
        save_record(f"heads-{options.corpus}", record)
    worst = min(record["heads"], key=lambda row: row["difference"])
    print(f"BLEU {record['bleu']:.2f} with all heads ({record['signature']})")
    print(
        f"dearest head: {worst['kind']} {worst['layer']}.{worst['head']}, "
        f"{worst['difference']:+.2f} BLEU without it"
    )
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 2 for a mistake, 130 after Ctrl-C."""
    from jsonargparse import ArgumentError, ArgumentParser

    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = ArgumentParser(prog="ch10_looking_inside.py", exit_on_error=False)
        part = ArgumentParser(exit_on_error=False)
        part.add_class_arguments(InspectOptions)
        parser.add_subcommands(required=True, metavar="COMMAND").add_subcommand("inspect", part)
        try:
            options = InspectOptions(**parser.parse_args(argv).as_dict()["inspect"])
        except ArgumentError as error:
            raise ValueError(" ".join(str(error).split())) from error
        run_inspect(options)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
