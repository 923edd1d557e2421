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
# # Chapter 7 · Multi30k
#
# After this chapter you can turn captions into the batches that a Transformer is trained on, and say what unknown words and padding cost.
#
# | | |
# |---|---|
# | In the paper | §5.1 (data and batching) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762); [Elliott et al. 2016](https://arxiv.org/abs/1605.00459) for the data, [Sennrich et al. 2016](https://arxiv.org/abs/1508.07909) for subwords |
# | Time | 20 minutes to read, 50 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 6 · Training](ch06_training.ipynb) · [Chapter 8 · Decoding](ch08_decoding.ipynb) |
#
# *If you read only three cells:* the BLEU of section 3, the first tree of section 4, the curve of section 7.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. The source is German, the target English.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import io
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path

import pandas as pd
import sacrebleu
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from scripts import ROOT
from scripts.book.charts import titled
from scripts.book.exercises import check, outcome
from scripts.book.figures.captions import merge_tree, shift_curve, two_batches, vocabulary_costs
from scripts.book.instruments import count_flops
from scripts.book.records import load_record
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import BOS, EOS, PAD, UNK, Batch
from scripts.corpora.load import load_corpus
from scripts.corpora.plain import plain_text

pd.set_option("display.max_colwidth", None)  # show whole sentences

# %% [markdown]
# ## 1 · Twenty captions
#
# > **In short.** Read your data. People wrote these captions: with typos, free translations and a missing line.
#
# **Multi30k** holds English captions of photographs from Flickr, translated into German by professional translators; we translate the translations back. All figures about it come from a record (`python -m scripts.studies.corpus --save`). *Predict:* what is wrong with each of the last eight of these twenty training pairs?

# %%
facts = load_record("multi30k-corpus")
captions = {line: pair for line, *pair in facts["captions"]}
print(", ".join(f"{split}: {count:,} pairs" for split, count in facts["pairs"].items()))
pd.DataFrame(captions.values(), index=list(captions), columns=["German", "English"])

# %% [markdown]
# *Keiner Hund* should be *kleiner Hund* (small dog): without its l the word means *no*. *Kletter*, *Hintrgrund* and *plying a guitar* lack a letter too; *stadning* has two swapped. *Eine Videospiel* has the wrong gender, *A Oklahoma football player* the wrong article. Line 16,498 is translated freely, line 16,663 not at all: `@@`. Line 2,900 is wrong too: a person *on* the bus now looks *at* one.
#
# `load_corpus("multi30k")` gives a dictionary from each split to its (German, English) pairs: `train` is for learning, `val` for choosing, and the test sets for when all choices are made. It downloads the corpus once, or reads the folder `MULTI30K_DIR`. The Annotated Transformer's data has lost its host; our second corpus and our tokenisers need no download.
#
# ## 2 · A corpus that needs no download
#
# > **In short.** `load_corpus("sample")` makes 7,000 captions, 6,000 of them to train on, from a small lexicon and a few rules. Its German is correct, and a small model learns it in minutes.
#
# What is hard in German? Endings for case, gender and number; a verb that comes last after *weil* (because); verbs that split: *heben … auf* means *pick up*, *heben … hoch* means *lift*. The [grammar](../scripts/corpora/sample.py) has them all.

# %%
corpus = load_corpus("sample")
for phrase in ("heben eine", " hoch.", ", weil", ", die"):
    german, english = next(pair for pair in corpus["train"] if phrase in pair[0])
    print(f"{german}\n    {english}")

# %% [markdown]
# Does a model learn words, or phrases by heart? One pair of adjective and noun, or of verb and object, in twelve is **held out**, such as *sad* with *chef*: it occurs only in the split `test_unseen`. Our sample model's BLEU (0 to 100, chapter 10) is 96.0 there and 96.8 on `test`: it learned words.
#
# ## 3 · Words, and the words that are missing
#
# > **In short.** A tokeniser cuts text into words and marks. A vocabulary numbers the frequent words; others become `<unk>`.
#
# What is a word? Split at spaces, *"Der Mann, der lacht."* gives *Mann,* and *lacht.*, unrelated to *Mann* and *lacht*. spaCy's rules cut marks off, and know when not to.


# %%
@cache
def word_tokenizer(language: str) -> Callable[[str], list[str]]:
    """spaCy's rule-based tokeniser for "de" or "en": a function from a text to its words."""
    import spacy  # slow to import, and not needed to train on subwords

    nlp = spacy.blank(language)
    return lambda text: [token.text for token in nlp.tokenizer(text) if not token.is_space]


# %%
tokenizers = word_tokenizer("de"), word_tokenizer("en")
print(" | ".join(tokenizers[0]("Der Mann, der lacht, trägt z.B. einen Hut.")))

# %% [markdown]
# The vocabulary is a dictionary: chapter 6's four special entries, then the words that occur at least `min_freq` times, from frequent to rare.

# %%
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")


def build_vocab(sentences: Iterable[list[str]], min_freq: int = 1) -> dict[str, int]:
    """Word to id, for the words in `sentences`: of the training split, and nothing else."""
    counts = Counter(word for words in sentences for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))  # equals by the alphabet
    known = [word for word in ranked if counts[word] >= min_freq]
    return {word: i for i, word in enumerate([*SPECIALS, *known])}


def unknown_rate(sentences: Iterable[list[str]], vocab: dict[str, int]) -> float:
    """The share of words, between 0 and 1, that `vocab` doesn't know."""
    words = [word for sentence in sentences for word in sentence]
    return sum(word not in vocab for word in words) / len(words)


# %% [markdown]
# torchtext gives the same numbers (release 0.6; the Annotated Transformer uses a later one):

# %%
german = [tokenizers[0](text) for text, _ in corpus["train"]]
english, test = ([tokenizers[1](text) for _, text in corpus[name]] for name in ("train", "test"))
vocab = build_vocab(german)
counts = Counter(word for words in german for word in words)
assert vocab == import_module("torchtext.vocab").Vocab(counts, specials=[*SPECIALS]).stoi
print([vocab.get(word, UNK) for word in tokenizers[0]("Ein Quantencomputer lacht.")])  # 1 is <unk>

# %% [markdown]
# **Pitfall.** The Annotated Transformer builds its vocabulary from training, validation and test text together. Then validation and test text seem to hold fewer unknown words than new text.
#
# **How much do unknown words cost?** BLEU counts which runs of one to four words a translation shares with a reference, and a short translation loses points. A perfect model that marks unknown words writes the reference with `<unk>` in their places.
#
# *Predict:* 2.5% of the sample's English test words occur fewer than 20 times in training. If they are unknown, does BLEU lose 1 point, 2.5 or 7? Does a model that leaves them out lose more?


# %%
def bleu_without(references: Sequence[list[str]], vocab: dict[str, int], mark: str) -> float:
    """BLEU of the references themselves, with `mark` for each word that `vocab` doesn't know."""
    written = [" ".join(word if word in vocab else mark for word in words) for words in references]
    goal = [" ".join(words) for words in references]
    return sacrebleu.corpus_bleu(written, [goal], tokenize="none", force=True).score


# %%
english_vocab = build_vocab(english, min_freq=20)
unknown = unknown_rate(test, english_vocab)
marked, left_out = (bleu_without(test, english_vocab, mark) for mark in ("<unk>", ""))
print(f"{unknown:.1%} unknown: BLEU {marked:.1f} marked, {left_out:.1f} left out")
print(f"expected: {100 * (1 - unknown) ** 2.5:.1f}")

# %% [markdown]
# Seven points are lost, since an unknown word spoils every run that it stands in. If a share $u$ of the words, scattered, is unknown, $(1-u)^n$ of the runs of $n$ words have none. BLEU takes the geometric mean over $n = 1, …, 4$, which is $(1-u)^{(1+2+3+4)/4} = (1-u)^{2.5}$. That is a point too high here: words at a sentence's edge stand in fewer runs, but no sentence begins or ends with an unknown one.
#
# Leaving words out loses *less*. A missing word spoils $n-1$ runs of $n$ words and not $n$; the penalty for short translations takes back nearly all of that. The same for Multi30k's validation set. *Leaky* vocabularies have seen validation and test text, too; *de* is as if we translated into German:

# %%
pd.DataFrame(facts["unknown"]).set_index(["language", "min_freq"])

# %% [markdown]
# Leaving out wins in all eight rows. The formula is right to half a point up to 8% unknown. At the Annotated Transformer's `min_freq=2`, its leaky vocabulary seems to miss 1.25% of the English words; an honest one misses 2.05%.
#
# ## 4 · Subwords
#
# > **In short.** Start from letters. Again and again, join the two neighbours that stand together most often. Frequent words become one piece; rare words stay in several.
#
# *Fahrradhund* (bicycle dog) is in no dictionary. Must it be `<unk>`? Not with byte-pair encoding (BPE), which the paper uses. Each word ends with a mark `</w>`, so *est* at a word's end differs from *est* inside it. Each merge adds one entry, so you choose the vocabulary's size $V$.
#
# **Your turn.** Write `merge_pair`, which joins one pair in one word.


# %% tags=["yours"]
def merge_pair(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`pieces` with each occurrence of `pair`, from left to right, joined."""
    merged, i = [], 0
    while i < len(pieces):
        width = 2 if pieces[i : i + 2] == pair else 1
        merged.append("".join(pieces[i : i + width]))
        i += width
    return tuple(merged)


# %%
assert merge_pair(("n", "e", "e", "d", "e", "e"), ("e", "e")) == ("n", "ee", "d", "ee")
assert merge_pair(("a", "a", "a"), ("a", "a")) == ("aa", "a"), "a letter is joined once"
assert merge_pair(("be", "e", "ab", "ee"), ("b", "ee")) == ("be", "e", "ab", "ee"), "whole pieces"

# %% [markdown]
# Sennrich's example has four words: *low* 5 times, *lower* 2, *newest* 6, *widest* 3. *Predict* the first merge. Then write `learn_merges`.


# %% tags=["yours"]
def learn_merges(words: dict[str, int], merges: int) -> list[tuple[str, str]]:
    """The first `merges` merges of byte-pair encoding, for words with their frequencies.

    A word is its letters and "</w>". Each merge is the pair that is most frequent in all words, as
    joined so far; of equals the first met. Sennrich et al. 2016, algorithm 1.
    """
    split = {(*word, "</w>"): times for word, times in words.items()}
    learned = []
    for _ in range(merges):
        counts = Counter()
        for pieces, times in split.items():
            for pair in pairwise(pieces):
                counts[pair] += times
        best = max(counts, key=counts.get)
        learned.append(best)
        split = {merge_pair(pieces, best): times for pieces, times in split.items()}
    return learned


# %%
merges = learn_merges({"low": 5, "lower": 2, "newest": 6, "widest": 3}, merges=10)
print(", ".join(a + "+" + b for a, b in merges))
assert ["".join(pair) for pair in merges[:6]] == ["es", "est", "est</w>", "lo", "low", "ne"]

# %% [markdown]
# The first merge is e+s, which stands in *newest* and *widest*: 6 + 3 times. The pairs s+t and t+`</w>` are as frequent, but are met later.
#
# To *apply* the merges to a new word, always join the neighbours whose joined piece was learned first. (So does SentencePiece; Sennrich asks for the learned *pair*.) *Predict:* which pieces of *lowest* are joined first, and which are left? Then write `merge_steps`.


# %% tags=["yours"]
def merge_steps(word: Iterable[str], rank: dict[str, int]) -> list[list[str]]:
    """`word`'s pieces, from letters on, after each merge; `rank` says when a piece was learned.

    Of all neighbours whose joined piece has a rank, the lowest rank is joined; of equals the first.
    """
    steps = [list(word)]
    while True:
        pieces = steps[-1]
        joined = [a + b for a, b in pairwise(pieces)]
        known = [(rank[piece], i) for i, piece in enumerate(joined) if piece in rank]
        if not known:
            return steps
        _, i = min(known)
        steps.append([*pieces[:i], joined[i], *pieces[i + 2 :]])


# %%
rank = {a + b: i for i, (a, b) in enumerate(merges)}
steps = merge_steps([*"lowest", "</w>"], rank)
assert steps[1] == ["l", "o", "w", "es", "t", "</w>"] and steps[-1] == ["low", "est</w>"]
assert merge_steps("abab", {"ab": 0})[1] == ["ab", "a", "b"], "one at a time, the first"
titled(
    merge_tree(steps),
    "A new word ends as two pieces that were learned",
    "Height is the order of the merges. In a live notebook, a slider plays them.",
)

# %% [markdown]
# The pair e+s is joined first, and stem and ending are left: nobody taught BPE grammar, but both are frequent.
#
# ### SentencePiece
#
# We use SentencePiece, which marks where a word *begins* (▁). One **joint** model serves both languages, so they can share one table (chapter 5).
#
# Text that users paste holds soft hyphens and other unseen characters. What looks the same should translate the same, so [`plain_text`](../scripts/corpora/plain.py) comes first.

# %%
assert plain_text("Fuß\xadball\u2060spieler\xa0\u2010 STRA\u1e9eE") == "Fußballspieler - STRAßE"


# %%
class BPETokenizer:
    """Joint byte-pair encoding of German and English, by SentencePiece (Sennrich et al. 2016).

    `model` holds the bytes of its file, `processor` what SentencePiece makes of them.
    """

    def __init__(self, model: bytes):
        self.model = model
        self.processor = SentencePieceProcessor(model_proto=model)

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn `vocab_size` pieces from `lines`: of the training split alone."""
        model = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=map(plain_text, lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            num_threads=1,  # the same model on every machine
            minloglevel=2,  # silently
        )
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: Path) -> "BPETokenizer":
        """The tokenizer that `save` wrote."""
        return cls(path.read_bytes())

    def save(self, path: Path) -> None:
        """Write the SentencePiece model."""
        path.write_bytes(self.model)

    def __len__(self) -> int:
        return self.processor.get_piece_size()

    def pieces(self, text: str) -> list[str]:
        """The pieces that `text` falls into; "▁" marks a word's start."""
        return self.processor.encode(plain_text(text), out_type=str)

    def encode(self, text: str) -> list[int]:
        """Text to ids, without bos and eos."""
        return self.processor.encode(plain_text(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to plain text; ends at the first eos, and leaves out pad and bos."""
        kept = takewhile(lambda i: i != EOS, map(int, ids))
        return self.processor.decode([i for i in kept if i not in (PAD, BOS)])


# %% [markdown]
# Our Multi30k model's tokenizer has 8,192 pieces: four special ones, the merges in the order of learning, then 100 single characters. So `merge_steps` can replay how it splits words. *Predict* the pieces of *Fahrradhund*.

# %%
bpe = BPETokenizer.load(ROOT / "models/multi30k-de-en/tokenizer.model")
rank = {bpe.processor.id_to_piece(i): i for i in range(4, len(bpe))}
steps = merge_steps("▁Fahrradhund", rank)
words = ["Fahrradhund", *(word for pair in captions.values() for word in " ".join(pair).split())]
assert all(merge_steps("▁" + word, rank)[-1] == bpe.pieces(word) for word in words)
titled(
    merge_tree(steps),
    "Fahrradhund becomes Fahrrad and hund",
    "Eleven letters and the mark of a word's start (_) become two pieces in ten merges.",
)

# %% [markdown]
# It falls into its two words. But BPE knows frequencies and no meaning. This is a rainbow trout, *Regenbogen* and *Forelle*:

# %%
print(" ".join(bpe.pieces("Regenbogenforelle")))

# %% [markdown]
# Only characters that the training text lacks become `<unk>`. (Large models start from bytes, and need none.)
#
# ### How large a vocabulary?
#
# A larger vocabulary makes shorter sentences, and attention's cost grows with the *square* of the length. *Predict:* when 28 pieces become 14, by what factor does an encoder layer's work fall?

# %%
layer = make_model(8, 8, N=1, d_model=256, d_ff=1024, h=8).encoder  # chapter 9's size
long, short = (count_flops(layer, torch.zeros(1, n, 256)) for n in (28, 14))
print(f"28 pieces take {long / short:.2f} times the work of 14")

# %% [markdown]
# By 2.02. In captions the square is 1 to 2% of a layer's work; the rest is done at *each position*. But the generator makes V scores for each target token. *Predict:* of 1,024 to 8,192, which V takes chapter 9's model the fewest operations?

# %%
tokens, operations = facts["tokens"], facts["operations"]  # by V; operations in millions
generator = {v: 2 * 256 * int(v) * (n + 1) / 1e6 for v, n in tokens["English"].items()}
assert min(operations, key=operations.get) == "4096"
titled(
    vocabulary_costs(tokens, operations, generator),
    "Up to 4,096 pieces, shorter sentences save more than the generator costs",
    f"4,096 take the fewest, {operations['4096']:.0f} million. Mean validation pair, German + English.",
)

# %% [markdown]
# 4,096 pieces take the fewest. At 8,192 sentences are up to a tenth shorter, but the generator takes 27% of the operations. We take 8,192, without having compared BLEU: decoding (chapter 8) needs fewer steps, for 6% more operations and a million more parameters.
#
# ## 5 · Two captions, one batch
#
# > **In short.** The source ends with `</s>`. The target begins with `<s>` and ends with `</s>`, which teaches the model to stop. Rows are padded to one length.


# %%
@dataclass(frozen=True)
class Example:
    """One encoded pair: source ids + eos, and bos + target ids + eos."""

    src: list[int]
    tgt: list[int]


def source_ids(text: str, tokenizer: BPETokenizer, max_len: int = MAX_LEN) -> list[int]:
    """The ids of a source sentence and its eos; a longer one is cut so that eos stays."""
    return tokenizer.encode(text)[: max_len - 1] + [EOS]


def encode_pairs(
    pairs: list[tuple[str, str]], tokenizer: BPETokenizer, max_len: int = MAX_LEN
) -> list[Example]:
    """Every pair as an `Example`: at most `max_len` source ids, and as many labels after bos."""
    examples = []
    for source, target in pairs:
        ids = tokenizer.encode(target)[: max_len - 1]
        examples.append(Example(source_ids(source, tokenizer, max_len), [BOS, *ids, EOS]))
    return examples


# %% [markdown]
# **Your turn.** Write `pad_rows` (PyTorch has it as `pad_sequence`).


# %% tags=["yours"]
def pad_rows(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of ids of unequal length to one (B, longest) int64 tensor, `PAD` at the end of each."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


# %%
rows = [[5, 6, 3], [7, 3], [8, 9, 10, 11, 3]]
theirs = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, rows)], True, PAD)
torch.testing.assert_close(pad_rows(rows), theirs)


# %%
def make_batch(examples: Sequence[Example]) -> Batch:
    """Examples to a padded `Batch`."""
    return Batch(pad_rows([e.src for e in examples]), pad_rows([e.tgt for e in examples]))


# %% [markdown]
# *Predict:* how many pieces is the typo *keiner*?

# %%
two = [captions[22112], captions[1691]]
batch = make_batch(encode_pairs(two, bpe))
for (german, _), ids in zip(two, batch.src.tolist(), strict=True):
    print(" ".join(bpe.pieces(german)), ids, sep="\n")
print("tgt  ", batch.tgt.tolist(), "\ntgt_y", batch.tgt_y.tolist())
assert [bpe.decode(row) for row in batch.src.tolist()] == [german for german, _ in two]

# %% [markdown]
# *Keiner* is three pieces, where *kleiner* would be one.
#
# **Pitfall.** A sentence that is too long for the position table (chapter 3) must be cut. The Annotated Transformer adds `</s>` first and cuts afterwards, so a long sentence loses it. (Of Multi30k's training captions the longest has 53 tokens.)

# %%
(example,) = encode_pairs([captions[25091]], bpe, max_len=16)
assert (len(example.src), example.src[-1]) == (16, EOS)
assert EOS not in [BOS, *bpe.encode(captions[25091][0]), EOS][:16]  # the wrong version

# %% [markdown]
# ## 6 · Batches that waste little
#
# > **In short.** A tensor is a rectangle. Padding fills what sentences leave empty. Sentences of similar length leave little.
#
# **Pitfall.** The Annotated Transformer's text says "absolutely minimal padding", but its code pads every pair to 72 tokens or 128. *Predict:* at 72, how much of what it computes is padding?
#
# With rows of lengths $n_1, …, n_B$, the share of the rectangle that is padding is
#
# $$\text{padding} = 1 - \frac{\sum_i n_i}{B \cdot \max_i n_i}.$$
#
# **Your turn.** Write it for many batches, both sides together: add up first, divide once.


# %% tags=["yours"]
def padding_share(lengths: Sequence[tuple[int, int]], batches: Iterable[Sequence[int]]) -> float:
    """The share of padding, between 0 and 1, in all cells of batches of indices.

    `lengths` holds each pair's (source, target) length; each side is a rectangle of its own.
    """
    tokens = cells = 0
    for batch in batches:
        for side in (0, 1):
            sizes = [lengths[i][side] for i in batch]
            tokens += sum(sizes)
            cells += len(sizes) * max(sizes)
    return 1 - tokens / cells


# %%
lengths = [(2, 4), (4, 4), (20, 28)]
assert padding_share(lengths, [[0, 1]]) == 1 - 14 / 16
assert padding_share(lengths, [[0, 1], [2]]) == 1 - 62 / 64, "add up first, divide once"

# %% [markdown]
# **Buckets**: shuffle, sort by length, cut into batches of at most so many *tokens*, padding included, then shuffle the batches. **Your turn.** Write `token_batches`.


# %% tags=["yours"]
def token_batches(
    examples: Sequence[Example], max_tokens: int, rng: random.Random | None = None
) -> list[list[int]]:
    """Indices of `examples` in batches of similar length, at most `max_tokens` a side with padding.

    Sorted by target, then source length; each batch takes as many as fit. With `rng`, equal lengths
    are mixed and the batches come in random order: for training. Without, they go from short to
    long. Raises ValueError if one example alone is too long.
    """
    order = list(range(len(examples)))
    if rng is not None:
        rng.shuffle(order)  # the sort is stable, so this order remains among equals
    order.sort(key=lambda i: (len(examples[i].tgt), len(examples[i].src)))
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        length = max(len(examples[i].src), len(examples[i].tgt))
        if length > max_tokens:
            raise ValueError(f"a sentence has {length} tokens: raise max_tokens from {max_tokens}")
        longest = max(longest, length)
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = length
        batches[-1].append(i)
    if rng is not None:
        rng.shuffle(batches)
    return batches


# %%
toy = [Example([5] * s, [5] * t) for s, t in ((3, 3), (5, 1), (9, 4), (2, 2), (2, 3), (1, 2))]
assert token_batches(toy, 9) == [[1], [5, 3, 4], [0], [2]]  # the second has 3 rows of 3
assert outcome(token_batches, toy, 8) == "ValueError", "nine tokens don't fit"

tokenizer = BPETokenizer.train([text for pair in corpus["train"] for text in pair], 1000)
train = encode_pairs(corpus["train"], tokenizer)
buckets = token_batches(train, 1024, random.Random(0))
assert sorted(sum(buckets, [])) == [*range(len(train))], "each example once"
assert sorted(map(sorted, buckets)) != sorted(map(sorted, token_batches(train, 1024))), "mixed"
assert sorted(buckets, key=lambda batch: len(train[batch[0]].tgt)) != buckets, "batches, too"

# %% [markdown]
# Sixteen sources of all, and sixteen of the bucket of median padding:

# %%
lengths = [(len(e.src), len(e.tgt)) for e in train]
median = sorted(buckets, key=lambda batch: padding_share(lengths, [batch]))[len(buckets) // 2]
random_rows = random.Random(0).sample(range(len(train)), 16)
bucket_rows = random.Random(0).sample(median, 16)
samples = {"all sentences": random_rows, "a bucket": bucket_rows}
masks = {name: pad_rows([train[i].src for i in rows]) != PAD for name, rows in samples.items()}
shares = [float(1 - mask.double().mean()) for mask in masks.values()]
titled(
    two_batches(masks),
    f"Sixteen random sentences are {shares[0]:.0%} padding, sixteen of a bucket {shares[1]:.0%}",
    "Sample corpus, sources. The longest decides the width: more random rows, more padding.",
)

# %% [markdown]
# And all batches, beside a fixed width of 72?

# %%
FIXED_WIDTH = 72  # the Annotated Transformer's; here with our pieces


def padding_table(examples: Sequence[Example], max_tokens: int) -> dict[str, float]:
    """The padding share of three ways to batch `examples`; random batches hold equally many."""
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    buckets = token_batches(examples, max_tokens, random.Random(0))
    size = round(len(examples) / len(buckets))
    order = random.Random(0).sample(range(len(examples)), len(examples))
    drawn = [order[i : i + size] for i in range(0, len(order), size)]
    tokens = sum(min(n, FIXED_WIDTH) for pair in lengths for n in pair)
    return {
        "fixed width of 72": round(1 - tokens / (2 * FIXED_WIDTH * len(lengths)), 4),
        "random order": round(padding_share(lengths, drawn), 4),
        "length buckets": round(padding_share(lengths, buckets), 4),
    }


# %%
padding = pd.DataFrame({"sample": padding_table(train, 2048), "Multi30k": facts["padding"]})
padding.map("{:.0%}".format)

# %% [markdown]
# At 72 three quarters of the cells are padding; buckets compute about a quarter of those cells.
#
# ## 7 · Case: the caption that isn't there
#
# > **Symptom.** Somebody reads two files of translations, line by line. The first pairs are right, later ones aren't, and no error was raised.

# %%
german_lines, english_lines = map(list, zip(*corpus["train"], strict=True))
german_lines[1999] = german_lines[1999].replace(" ", "\u2028", 1)  # one strange space
german_file, english_file = ("\n".join(lines) + "\n" for lines in (german_lines, english_lines))
pairs = [*zip(german_file.splitlines(), english_file.splitlines(), strict=False)]
for i in (0, 5000):
    print(*pairs[i], sep="\n", end="\n\n")

# %% [markdown]
# **Suspects.** (1) One file was shuffled, from some line on. (2) A line is missing in the English file. (3) The translators were too free. (4) Our reader cuts lines where there is no end.
#
# **Instrument.** A translation of a long sentence is long. So we correlate the lengths of both sides, 250 lines at a time. *Predict* the curve for each suspect.


# %%
def length_correlations(pairs: Sequence[tuple[str, str]], window: int = 250) -> dict[int, float]:
    """From each window's first line to the correlation of its German and English lengths."""
    lengths = pd.DataFrame(pairs).map(len)
    parts = lengths.groupby(lengths.index // window * window)
    return parts.apply(lambda part: round(part[0].corr(part[1]), 2)).to_dict()


# %%
as_read = length_correlations(pairs)
next_line = length_correlations([*zip(german_file.splitlines()[1:], english_lines, strict=True)])
before, after = range(0, 2000, 250), range(2000, 6000, 250)
assert min(as_read[i] for i in before) > 0.7 > 0.3 > max(as_read[i] for i in after)
assert min(next_line[i] for i in after) > 0.7
titled(
    shift_curve({"as read": as_read, "next German line": next_line}),
    "From line 2,000 on, the next German line fits",
    "How well the lengths of both sides agree, in 250 lines at a time.",
)

# %% [markdown]
# Free translation would weaken the whole curve. After a shuffle, no line further on would fit. Here it does: suspect 2 or 4. Count the lines:

# %%
print(len(german_file.splitlines()), "and", len(english_file.splitlines()), "lines by splitlines;")
print(german_file.count("\n"), "and", english_file.count("\n"), "ends of lines")
first = next(line for line in german_file.split("\n") if len(line.splitlines()) > 1)
print(ascii(first))  # this search misses a case: exercise 1

# %% [markdown]
# **Culprit.** The reader. Python's `splitlines` also splits at rare characters that end no line of a text file, here U+2028. One shifts every later pair, and `zip` with `strict=False` stays silent. Our [`read_lines`](../scripts/corpora/multi30k.py) splits only at `\n`, and we zip with `strict=True`.
#
# ## Summary
#
# - Read your data, and correlate lengths.
# - Vocabulary and subwords come from the training split alone.
# - A small share $u$ of unknown words leaves a perfect model about $100\,(1-u)^{2.5}$ points of BLEU.
# - Byte-pair encoding writes all words of known characters, with as many pieces as you choose.
# - Cut first, then add `</s>`. Batch by tokens, in buckets of similar length.
#
# ## What the paper did that we don't
#
# - WMT 2014: 4.5 million pairs for German and 36 million for French; Multi30k has 29,000.
# - About 37,000 shared subwords for English to German; we use 8,192.
# - Batches of about 25,000 tokens a side, on eight GPUs; ours have at most 2,048.

# %% [markdown]
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Find the strange line
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Find the number (from 0) of the first line that `splitlines` cuts at something other than its final `\n` or `\r\n`; or None. A strange character just before the `\n` counts: it makes an empty line. `solution("first_shift")` shows ours.


# %%
def first_shift(text: str) -> int | None:
    """The number of the first line that `splitlines` cuts before its end, or None."""
    ...


check(first_shift)

# %% [markdown]
# ### Exercise 2 · What padding costs attention
#
# *code · difficulty ●●○ · worth ●●● · 15 minutes*
#
# In self-attention a row of width $w$ has $w^2$ scores. What share of one side's scores has a padded query or a padded key? `lengths` holds the sentences' lengths, `batches` lists of indices. `solution("wasted_scores")` shows ours.


# %%
def wasted_scores(lengths: Sequence[int], batches: Iterable[Sequence[int]]) -> float:
    """The share, 0 to 1, of w × w scores that padding has a part in."""
    ...


check(wasted_scores)

# %% [markdown]
# Next: [Chapter 8 · Decoding](ch08_decoding.ipynb)
