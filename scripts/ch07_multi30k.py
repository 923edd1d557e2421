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
# After this chapter you can turn captions into the batches of numbers that a Transformer is trained on, and say what words, pieces and padding each cost.
#
# | | |
# |---|---|
# | In the paper | §5.1 (data and batching) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762); [Elliott et al. 2016](https://arxiv.org/abs/1605.00459) for the data, [Sennrich et al. 2016](https://arxiv.org/abs/1508.07909) for subwords |
# | Time | 20 minutes to read, 60 with the code; a minute and a half to run on a CPU |
# | Before, after | [Chapter 6 · Training](ch06_training.ipynb) · [Chapter 8 · Decoding](ch08_decoding.ipynb) |
#
# *If you read only three cells:* the tree of merges in section 4, "Two captions, one batch" in section 5, and the table of section 7, where words race pieces.
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary. Here the source is German and the target is English.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import io
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path

import pandas as pd
import sacrebleu
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from scripts import ROOT
from scripts import ch06_training as ch06
from scripts.book.charts import titled
from scripts.book.exercises import check
from scripts.book.figures.captions import merge_tree, padding_bars, shift_curve, two_batches
from scripts.book.instruments import count_flops
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.ch06_training import BOS, EOS, PAD, UNK, Batch, LabelSmoothing
from scripts.corpora.load import load_corpus

pd.set_option("display.max_colwidth", None)  # show whole sentences
torch.set_default_dtype(torch.float64)  # the same numbers on every machine

# %% [markdown]
# ## 1 · Twenty captions
#
# > **In short.** Read your data before you train on it. Captions are short, and people wrote them: with typos, free translations and a missing line.
#
# **Multi30k** holds English captions of photographs from Flickr, translated into German by professional translators. This notebook needs no network: what it says about Multi30k comes from a record that `python -m scripts.studies.corpus --save` makes from the real files. Here are twenty training pairs. *Predict:* what is wrong with each of the last eight?

# %%
facts = load_record("multi30k-corpus")
captions = {line: (german, english) for line, german, english in facts["captions"]}
print(", ".join(f"{split}: {count:,} pairs" for split, count in facts["pairs"].items()))
pd.DataFrame(captions.values(), index=list(captions), columns=["German", "English"])

# %% [markdown]
# *Keiner Hund* should be *kleiner Hund* (small dog): without its l the word means *no*. *Kletter* and *Hintrgrund* lack a letter too. Somebody is *stadning*, and somebody else *plying a guitar*. *Eine Videospiel* has the wrong gender and *A Oklahoma football player* the wrong article. Line 16,498 is translated very freely, and line 16,663 not at all: its German is `@@`.
#
# `load_corpus("multi30k")` gives a dictionary from each split to its (German, English) pairs: `train` is for learning, `val` for choosing, and the test sets are read only when all choices are made. It downloads the corpus once, or reads it from the folder that the environment variable `MULTI30K_DIR` names.
#
# **Pitfall.** Data ages. The Annotated Transformer can't load its data today: the host is gone, and the torchtext that it needs can't be installed beside a current PyTorch. So we check each file's checksum, and our second corpus and our tokenisers need no download.
#
# ## 2 · A corpus that needs no download
#
# > **In short.** `load_corpus("sample")` makes 7,000 captions, 6,000 of them to train on, from a small lexicon and a few rules of German. Its German is correct, its world is small, and a small model learns it in seconds.
#
# The grammar, [`scripts/corpora/sample.py`](../scripts/corpora/sample.py), has what is hard in German: endings that agree with case, gender and number; a verb that comes last after *weil* (because); and verbs that split. *Hebt … auf* means *picks up* and *hebt … hoch* means *lifts*: the last word decides what the first one means.

# %%
corpus = load_corpus("sample")
for phrase in ("hebt eine", ", weil", ", die"):
    german, english = next(pair for pair in corpus["train"] if phrase in pair[0])
    print(f"{german}\n    {english}")

# %% [markdown]
# Its fourth split asks what Multi30k can't: does a model learn words, or whole phrases by heart? About one combination of words in twelve, such as *sad* with *chef*, is **held out**: sentences with it go only to `test_unseen`.
#
# ## 3 · Words, and the words that are missing
#
# > **In short.** A tokeniser cuts text into words and marks. A vocabulary numbers the frequent words of the training text. Every other word becomes `<unk>`.
#
# Split at spaces, *"Der Mann, der lacht."* gives *Mann,* and *lacht.*: new words, unrelated to *Mann* and *lacht*. spaCy's rules cut marks off, and know when not to.


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
# The vocabulary is a dictionary: after the four special entries of chapter 6 come the words, from frequent to rare. Words that occur fewer than `min_freq` times are left out.

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
# The Annotated Transformer uses torchtext's `Vocab` for this. Its last release in pure Python gives the same numbers:


# %%
def torchtext_vocab(sentences: Iterable[list[str]]) -> dict[str, int]:
    """The same by torchtext, which finds a word by `stoi`."""
    from torchtext.vocab import Vocab

    counts = Counter(word for words in sentences for word in words)
    return dict(Vocab(counts, specials=list(SPECIALS)).stoi)


# %%
german_words, english_words = (
    {name: [cut(pair[side]) for pair in corpus[name]] for name in ("train", "test")}
    for side, cut in enumerate(tokenizers)
)
vocab = build_vocab(german_words["train"])
assert vocab == torchtext_vocab(german_words["train"])
print(f"{len(vocab)} entries; the first: {' '.join([*vocab][:12])}")
print([vocab.get(word, UNK) for word in tokenizers[0]("Ein Quantencomputer lacht.")])  # 1 is <unk>

# %% [markdown]
# **Pitfall.** The Annotated Transformer builds its vocabulary from training, validation and test text together. Then you can't measure how often a user's sentence will hold an unseen word: with `min_freq=1` the answer is always zero.

# %%
few, test = german_words["train"][:100], german_words["test"]
honest, leaky = build_vocab(few), build_vocab(few + test)
print(f"from 100 sentences: {unknown_rate(test, honest):.1%} of test words unknown")
print(f"with the test set in it: {unknown_rate(test, leaky):.1%}")

# %% [markdown]
# **How much can unknown words cost?** BLEU (chapter 10) compares a translation with a reference: it counts which runs of one, two, three and four words they share, and 100 means all. A model of words can't write a word that it doesn't know. So the *best* that it can write is the reference with `<unk>` in those places.
#
# *Predict:* of the English test words, 2.5% occur fewer than 20 times in training. If they are unknown, how many of the 100 points are out of reach: about 1, 2.5 or 7?


# %%
def ceiling(references: Sequence[list[str]], vocab: dict[str, int]) -> float:
    """BLEU of the references themselves, each word that `vocab` doesn't know made `<unk>`."""
    best = [" ".join(word if word in vocab else "<unk>" for word in words) for words in references]
    goal = [" ".join(words) for words in references]
    return sacrebleu.corpus_bleu(best, [goal], tokenize="none", force=True).score


# %%
english_vocab, test = build_vocab(english_words["train"], min_freq=20), english_words["test"]
unknown, best = unknown_rate(test, english_vocab), ceiling(test, english_vocab)
print(
    f"{unknown:.1%} unknown: BLEU is at most {best:.1f}; expected {100 * (1 - unknown) ** 2.5:.1f}"
)

# %% [markdown]
# Seven points are out of reach, since an unknown word spoils every run that it stands in. If a share $u$ of the words is unknown and they are scattered, $(1-u)^n$ of the runs of $n$ words have none. BLEU takes the geometric mean over $n = 1, …, 4$, which is $(1-u)^{(1+2+3+4)/4} = (1-u)^{2.5}$, near to what was measured.
#
# ## 4 · Subwords
#
# > **In short.** Start from letters. Again and again, join the two neighbours that stand together most often. Frequent words become one piece; rare words are split into known pieces.
#
# This is byte-pair encoding (BPE), which the paper uses. With $c(a, b)$ the number of times that piece $a$ stands right before piece $b$ inside a word, one step joins
#
# $$(a^*, b^*) = \operatorname*{arg\,max}_{(a,b)}\; c(a, b)$$
#
# everywhere. Each word ends with a mark `</w>`, so *est* at the end of a word is a different piece from *est* inside it. After $m$ merges there are at most $V = 4 + \lvert\text{letters and the mark}\rvert + m$ entries: you choose $V$.
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
assert merge_pair(("a", "a", "a"), ("a", "a")) == ("aa", "a")  # a letter is joined once

# %% [markdown]
# Our text has four words: *low* 5 times, *lower* 2, *newest* 6, *widest* 3. *Predict* the first merge, with a pencil. Then write `learn_merges`.


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
assert ["".join(pair) for pair in merges[:5]] == ["es", "est", "est</w>", "lo", "low"]

# %% [markdown]
# The first merge is e+s, which stands in *newest* and *widest*: 6 + 3 times. S+t and t+`</w>` are as frequent, but are met later.
#
# To *apply* the merges to a new word, always join the neighbours whose merge was learned first. *Predict:* which pieces of *lowest*, a word that wasn't in the text, are joined first, and where does it end? Then write `merge_steps`.


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
assert merge_steps([*"eses"], {"es": 0})[-1] == ["es", "es"]
titled(
    merge_tree(steps),
    "A new word ends as two pieces that the model knows",
    "Letters at the bottom; each row joins two neighbours. In a live notebook, the slider plays the "
    "merges one by one: predict the next.",
)

# %% [markdown]
# E+s is joined first, though it stands late in the word. *Lowest* ends as its stem and its ending: nobody taught BPE grammar, but both are frequent.
#
# ### SentencePiece
#
# For real work we use SentencePiece, which marks where a word *begins* (▁) instead of where it ends. One **joint** model serves both languages: names, numbers and words like *Park* get the same piece on both sides, and source, target and generator can share one table (chapter 5).
#
# Copied text holds letters that nobody sees, such as soft hyphens. SentencePiece takes most of them for unknown letters, and some for spaces. Text that looks the same should translate the same, so `plain_text` comes first.


# %%
INVISIBLE = re.compile(  # Unicode's default-ignorable letters, and control characters
    "[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
BLANK = re.compile(r"[\s\u2800]")
LOOKALIKES = str.maketrans(  # hyphens, dashes, apostrophes, a low quotation mark, a capital
    "\u2010\u2011\u2012\u2212\u02bc\xb4\u2032\u201a\u1e9e", "--––’’’,ß"
)


def plain_text(text: str) -> str:
    """`text` without what can't be seen, with plain spaces, and with the commoner of two lookalikes."""
    return BLANK.sub(" ", INVISIBLE.sub("", text)).translate(LOOKALIKES)


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
            **{"pad_id": PAD, "unk_id": UNK, "bos_id": BOS, "eos_id": EOS},
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
# The tokenizer of our Multi30k model has 8,192 pieces, learned from the 29,000 training pairs. Its ids are in the order of learning, so `merge_steps` can replay how it splits a word. *Fahrradhund* (bicycle dog) is in no dictionary. *Predict* its pieces: a tidy *Fahrrad* and *hund*?

# %%
bpe = BPETokenizer.load(ROOT / "models/multi30k-de-en/tokenizer.model")
rank = {bpe.processor.id_to_piece(i): i for i in range(4, len(bpe))}
steps = merge_steps("▁Fahrradhund", rank)
assert steps[-1] == bpe.pieces("Fahrradhund")  # our dozen lines agree with SentencePiece
titled(
    merge_tree(steps),
    "Fahrradhund becomes Fahrrad and hund",
    "Eleven letters and the mark of a word's start (_) become two pieces in ten merges.",
)

# %% [markdown]
# *Fahrradhund* does fall into its two words. But BPE knows frequencies and no meaning. This is a rainbow trout:

# %%
print(" ".join(bpe.pieces("Regenbogenforelle")))
assert bpe.pieces("Fahrradhund") == ["▁Fahrrad", "hund"]

# %% [markdown]
#
# SentencePiece's own ids put `<unk>` at 0, where our masks look for padding, so `train` sets the ids. There is still an `<unk>`, for letters that the training text lacks. And SentencePiece first replaces some characters with plainer ones (Unicode's NFKC): ½ becomes 1⁄2, whose slash is an unknown letter.

# %%
for text in ("Ein Hund rennt.", "Eine  ﬁne Katze…", "½ Apfel"):
    print(f"{text!r} becomes {bpe.decode(bpe.encode(text))!r}")
assert UNK in bpe.encode("½")

# %% [markdown]
# ### How large a vocabulary?
#
# A larger vocabulary makes shorter sentences. How much work does that save? Attention compares all pairs of positions, so its cost grows with the *square* of the length. *Predict:* by what factor does the work of an encoder layer fall when a sentence of 28 pieces becomes one of 14?

# %%
layer = make_model(8, 8, N=1, d_model=256, d_ff=1024, h=8).encoder  # chapter 9's size
products = {n: count_flops(layer, torch.zeros(1, n, 256)) for n in (14, 28, 256, 512)}
print(f"28 pieces take {products[28] / products[14]:.2f} times the work of 14;")
print(f"512 pieces take {products[512] / products[256]:.2f} times that of 256")

# %% [markdown]
# By 2.02. In captions the square is about 1% of a layer's work; nearly all is matrix products at *each position*, which halve with the length. So count the tokens of an average test pair:

# %%
for v in (125, 250, 500, 1000):
    tokenizer = BPETokenizer.train([text for pair in corpus["train"] for text in pair], v)
    sides = zip(*corpus["test"], strict=True)
    means = (statistics.mean(len(tokenizer.encode(text)) for text in side) for side in sides)
    print(f"V = {v}:", " + ".join(f"{mean:.0f}" for mean in means), "tokens")

# %% [markdown]
# Each doubling of V saves fewer tokens than the one before. And the generator, which makes V scores for each target token, grows with V. *Predict:* our Multi30k model has 8,192 pieces. Would 4,096 take more operations for a pair, or fewer? Section 7 answers.
#
# ## 5 · Two captions, one batch
#
# > **In short.** The source ends with `</s>`. The target begins with `<s>` and ends with `</s>`, which teaches the model to stop. Then rows are padded to one length.


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
# **Your turn.** Write `pad_rows`.


# %% tags=["yours"]
def pad_rows(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of ids of unequal length to one (B, longest) int64 tensor, `PAD` at the end of each."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


# %%
rows = [[5, 6, 3], [7, 3], [8, 9, 10, 11, 3]]
tensors = [torch.tensor(row) for row in rows]
theirs = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD)
torch.testing.assert_close(pad_rows(rows), theirs)


# %%
def make_batch(examples: Sequence[Example]) -> Batch:
    """Examples to a padded `Batch`."""
    return Batch(pad_rows([e.src for e in examples]), pad_rows([e.tgt for e in examples]))


# %% [markdown]
# Two of the captions above go the whole way, one line per step. *Predict:* how many pieces is the typo *keiner*?

# %%
two = [captions[22112], captions[1691]]
for german, _ in two:
    print("text    ", german)
    print("pieces  ", " ".join(bpe.pieces(german)))
    print("ids     ", bpe.encode(german))
    print("source  ", source_ids(german, bpe), "\n")
batch = make_batch(encode_pairs(two, bpe))
assert len(bpe.pieces("keiner")) == 3 and len(bpe.pieces("kleiner")) == 1
print("src     ", batch.src.tolist(), tuple(batch.src.shape))
print("tgt     ", batch.tgt.tolist(), tuple(batch.tgt.shape))
print("tgt_y   ", batch.tgt_y.tolist(), tuple(batch.tgt_y.shape))
print("src_mask", batch.src_mask.int().tolist(), tuple(batch.src_mask.shape))
print("tgt_mask", tuple(batch.tgt_mask.shape), "and", batch.ntokens, "labels that count")

# %% [markdown]
# *Keiner* is three pieces; *kleiner* would be one. Decoded, the rows are the two captions again:

# %%
assert [bpe.decode(row) for row in batch.src.tolist()] == [german for german, _ in two]
assert [bpe.decode(row) for row in batch.tgt_y.tolist()] == [english for _, english in two]

# %% [markdown]
# **Pitfall.** A sentence that is too long for the position table (chapter 3) must be cut. The Annotated Transformer adds `<s>` and `</s>` first and cuts afterwards, so a long sentence loses its `</s>`, and nothing tells the model to stop there. Cut first, then add `</s>`.

# %%
(long,) = encode_pairs([captions[25091]], bpe, max_len=16)
assert (len(long.src), long.src[-1]) == (16, EOS)
assert (len(long.tgt), long.tgt[-1]) == (17, EOS)  # the decoder reads 16 and predicts 16
assert EOS not in [BOS, *bpe.encode(captions[25091][1]), EOS][:16]  # the wrong version

# %% [markdown]
# ## 6 · Batches that waste little
#
# > **In short.** A tensor is a rectangle. Padding fills what sentences leave empty, and the machine computes it all. With sentences of similar length there is little to fill.
#
# With rows of lengths $n_1, …, n_B$, the share of the rectangle that is padding is
#
# $$\text{padding} = 1 - \frac{\sum_i n_i}{B \cdot \max_i n_i}.$$
#
# **Your turn.** Write it for many batches, source and target together: add up first, then divide once.


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
lengths = [(2, 4), (4, 4), (3, 9)]
assert padding_share(lengths, [[0, 1]]) == 1 - 14 / 16
assert padding_share(lengths, [[0, 1], [2]]) == 1 - 26 / 28

# %% [markdown]
# **Buckets**: shuffle, sort by length, cut into batches of at most so many *tokens* (padding counted), then shuffle the batches. Batches of short sentences have many rows, batches of long ones few.
#
# **Your turn.** Write `token_batches`.


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
    batch: list[int] = []
    longest = 0
    for i in order:
        length = max(len(examples[i].src), len(examples[i].tgt))
        if length > max_tokens:
            raise ValueError(
                f"a sentence of {length} tokens does not fit {max_tokens} a batch: raise max_tokens"
            )
        longest = max(longest, length)
        if longest * (len(batch) + 1) > max_tokens:
            batches.append(batch)
            batch, longest = [], length
        batch.append(i)
    if batch:
        batches.append(batch)
    if rng is not None:
        rng.shuffle(batches)
    return batches


# %%
train = encode_pairs(corpus["train"], tokenizer)  # of 1,000 pieces
in_order = token_batches(train, 1024)
buckets = token_batches(train, 1024, random.Random(0))
longest = [max(max(len(train[i].src), len(train[i].tgt)) for i in batch) for batch in in_order]
for batches in (in_order, buckets):
    assert sorted(sum(batches, [])) == [*range(len(train))], "each example once"
assert all(len(b) * n <= 1024 for b, n in zip(in_order, longest, strict=True)), "too many tokens"
assert all((len(b) + 1) * max(n) > 1024 for b, n in zip(in_order, pairwise(longest), strict=False))
target_lengths = [[len(train[i].tgt) for i in batch] for batch in in_order]
assert sum(target_lengths, []) == sorted(len(e.tgt) for e in train), "not from short to long"
assert buckets == token_batches(train, 1024, random.Random(0)) != in_order
assert sorted(map(sorted, buckets)) != sorted(map(sorted, in_order)), "equals must be mixed"
starts = [len(train[batch[0]].tgt) for batch in buckets]
assert starts != sorted(starts), "batches must be mixed"
try:
    token_batches(train, max(longest) - 1)
    raise AssertionError("no ValueError for a sentence that is too long")
except ValueError as error:
    print(
        f"{len(buckets)} batches of {min(map(len, buckets))} to {max(map(len, buckets))} sentences;"
    )
    print(error)

# %% [markdown]
# **Picture.** Sixteen sources of a random batch, and of a bucket that has a typical share of padding.

# %%
lengths = [(len(e.src), len(e.tgt)) for e in train]
middle = sorted(buckets, key=lambda batch: padding_share(lengths, [batch]))[len(buckets) // 2]
middle = middle[:: len(middle) // 16][:16]
masks = {
    name: pad_rows([train[i].src for i in chosen]) != PAD
    for name, chosen in (("random order", range(16)), ("a bucket", middle))
}
titled(
    two_batches(masks),
    "One long sentence widens the whole batch",
    "Each row is a source sentence. In random order most rows end early, and the rest is padding. In "
    "the bucket little is.",
)

# %% [markdown]
# **Pitfall.** The Annotated Transformer's text says "absolutely minimal padding", but its code pads every pair to 72 tokens or 128:

# %%
FIXED_WIDTH = 72


def three_plans(examples: Sequence[Example], max_tokens: int) -> dict[str, list[list[int]]]:
    """Batches of indices: buckets, and twice as many batches of equally many random examples."""
    buckets = token_batches(examples, max_tokens, random.Random(0))
    size = round(len(examples) / len(buckets))
    order = random.Random(0).sample(range(len(examples)), len(examples))
    drawn = [order[i : i + size] for i in range(0, len(order), size)]
    return {"fixed width of 72": drawn, "random order": drawn, "length buckets": buckets}


def padding_table(examples: Sequence[Example], max_tokens: int) -> dict[str, float]:
    """The padding share of three ways to batch `examples`."""
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    plans = three_plans(examples, max_tokens)
    shares = {name: padding_share(lengths, plan) for name, plan in plans.items()}
    tokens = sum(min(n, FIXED_WIDTH) for pair in lengths for n in pair)
    shares["fixed width of 72"] = 1 - tokens / (2 * FIXED_WIDTH * len(lengths))
    return {name: round(share, 4) for name, share in shares.items()}


# %%
padding = padding_table(train, 1024)
titled(
    padding_bars(padding),
    f"Buckets cut padding from {padding['random order']:.0%} to {padding['length buckets']:.0%}",
    "Sample corpus. A fixed width is mostly padding. Random batches hold as many sentences as a "
    "bucket does on average.",
)

# %% [markdown]
# Does wasted space waste time? A large matrix runs more efficiently than a small one. *Predict:* with a fixed width, these captions fill 3.7 times the cells that they fill in buckets. Is that 3.7 times slower, less, or more? We run the small model forward and backward over 500 captions, batched in the three ways.


# %%
def small_model(source_size: int, target_size: int, seed: int = 0) -> EncoderDecoder:
    """A fresh Transformer for vocabularies of these sizes: one layer a side, D = 64."""
    torch.manual_seed(seed)
    sizes = {"N": 1, "d_model": 64, "d_ff": 128, "h": 4, "dropout": 0.0}
    return make_model(source_size, target_size, **sizes, norm_first=True)


def pass_over(model: EncoderDecoder, batches: Sequence[Batch]) -> None:
    """Forward and backward over all batches: an epoch without the optimizer."""
    for batch in batches:
        loss, _ = ch06.batch_loss(model, batch, LabelSmoothing(0.0))
        loss.backward()


# %%
some, model, costs = train[:500], small_model(1000, 1000), {}
widened = [[ids + [PAD] * (FIXED_WIDTH - len(ids)) for ids in (e.src, e.tgt)] for e in some]
for name, plan in three_plans(some, 1024).items():
    examples = [Example(*sides) for sides in widened] if "fixed" in name else some
    batches = [make_batch([examples[i] for i in indices]) for indices in plan]
    cells = sum(batch.src.numel() + batch.tgt.numel() for batch in batches)
    operations, start = count_flops(pass_over, model, batches), time.perf_counter()
    pass_over(model, batches)
    costs[name] = {"cells": cells, "operations": operations}
    costs[name] |= {"seconds": time.perf_counter() - start}
times = pd.DataFrame(costs).T / pd.Series(costs["length buckets"])  # in times of buckets
assert times["seconds"]["fixed width of 72"] > 2.5
times[["cells", "operations"]].round(1)

# %% [markdown]
# More: 4.3 times the operations, since each row has 72 · 72 scores, and a square hurts in a model as narrow as this one (D = 64). The clock's times differ between machines, so the cell only asserts 2.5: four sets of captions took 4.8 to 6.5 times as long as in buckets, and 1.4 to 1.6 times in random order.
#
# ## 7 · Words race pieces
#
# > **In short.** The same small model, trained twice: on words, the rare ones made `<unk>`, and on pieces. Only the cutting differs, and what follows from it: pieces make more tokens, so four epochs take more steps.
#
# Words that occur fewer than 20 times in training are `<unk>` for the model of words: 2.9% of the German test words, as many as are new in Multi30k's test set (2.8%). The model of pieces gets the same captions in 1,000 pieces.
#
# *Predict.* (a) On captions of common words, which model is better? This is the control: if pieces win *there*, their lead elsewhere has another reason than rare words. (b) A rare word was seen 8 to 19 times in training. How many of 118 rare English words does the model of pieces write: a tenth, half, nine tenths? (c) Does an unknown word spoil the common words beside it?


# %%
def train_translator(examples: Sequence[Example], sizes: Sequence[int], seed: int = 0):
    """The small model after four epochs on `examples`: Adam, its rate falling to 0."""
    model, order = small_model(*sizes, seed), random.Random(seed)
    plan = [batch for _ in range(4) for batch in token_batches(examples, 1024, order)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(plan))
    for indices in plan:
        group = [make_batch([examples[i] for i in indices])]
        ch06.train_step(model, group, LabelSmoothing(0.0), optimizer)
        decay.step()
    return model


def written_rows(model: EncoderDecoder, examples: Sequence[Example]) -> list[list[int]]:
    """What the model writes for each source, greedily (chapter 6): ids up to eos."""
    src = pad_rows([e.src for e in examples])
    rows = ch06.greedy_decode(model, src, padding_mask(src, PAD), max_len=40)
    return [[*takewhile(lambda i: i != EOS, row)] for row in rows.tolist()]


# %%
german_vocab = build_vocab(german_words["train"], min_freq=20)
print(f"{unknown_rate(german_words['test'], german_vocab):.1%} of German test words are unknown")


def word_examples(split: str) -> list[Example]:
    """The pairs of a split as ids of words."""
    german, english = (
        [[vocab.get(word, UNK) for word in words] for words in sentences[split]]
        for vocab, sentences in ((german_vocab, german_words), (english_vocab, english_words))
    )
    return [Example([*s, EOS], [BOS, *t, EOS]) for s, t in zip(german, english, strict=True)]


def race(seed: int = 0) -> dict[str, list[list[str]]]:
    """Both models trained, and the words that each writes for the test captions."""
    names = [*english_vocab]
    by_words = train_translator(word_examples("train"), (len(german_vocab), len(names)), seed)
    by_pieces = train_translator(train, (len(tokenizer), len(tokenizer)), seed)
    rows = written_rows(by_pieces, encode_pairs(corpus["test"], tokenizer))
    return {
        "words": [[names[i] for i in row] for row in written_rows(by_words, word_examples("test"))],
        "pieces": [tokenizers[1](tokenizer.decode(row)) for row in rows],
    }


# %%
texts = race()
rare = [UNK in e.src + e.tgt for e in word_examples("test")]
for name in texts:
    print(f"{name:7}", " ".join(texts[name][rare.index(True)]))
print("correct", " ".join(english_words["test"][rare.index(True)]))


# %%
def race_table(texts: dict[str, list[list[str]]]) -> dict[str, dict[str, float]]:
    """Shares: of captions right to the last word, and of the words of captions with a rare one."""
    table = {}
    for name, outputs in texts.items():
        right, written = {True: [], False: []}, {True: [], False: []}
        for output, words, has_rare in zip(outputs, english_words["test"], rare, strict=True):
            right[has_rare].append(output == words)
            for word in words if has_rare else ():
                written[word not in english_vocab].append(word in output)
        table[name] = {
            "captions of common words": statistics.mean(right[False]),
            "captions with a rare word": statistics.mean(right[True]),
            "rare words": statistics.mean(written[True]),
            "common words beside them": statistics.mean(written[False]),
        }
    return table


# %%
table = race_table(texts)
assert table["words"]["rare words"] == 0
pd.DataFrame(table).T.map(lambda share: f"{share:.0%}")

# %% [markdown]
# (a) On captions of common words the model of words is four or five points better, in each of three seeds. So pieces don't lead elsewhere because they are the better model in general. (b) The model of words writes none of the rare words, and the model of pieces nearly nine in ten (86 to 89%), from at most 19 examples each. (c) Of the common words beside a rare one the model of words loses two or three in a hundred more than the other. In the example it guesses *happy* for *müdes*: fluent, plausible and wrong.

# %% [markdown]
# **The same at full size.** Multi30k's figures, from the record that section 1 named. Unknown words occur fewer than `min_freq` times in training; "sentences" is the share that has one.

# %%
print("million operations for a pair, by V:", facts["operations"])
print("padding:", {name: f"{share:.0%}" for name, share in facts["padding"].items()})
pd.DataFrame(facts["unknown"])

# %% [markdown]
# The formula of section 3 is right to half a point in all six rows. German, in which anyone may make a new compound, has twice as many unknown words as English. Of the four vocabularies 4,096 pieces take the fewest operations: at 8,192 the generator alone takes 2 · 256 · 8,192 for each of 15 target tokens, 63 of 230 million. Padding goes from 78% at a fixed width over 54% in random order to 4% in buckets.
#
# ## 8 · Case: the caption that isn't there
#
# > **Symptom.** Somebody reads two files of 6,000 lines each. The first pairs are translations. Later ones have nothing to do with each other, and no error was raised.

# %%
german_lines, english_lines = map(list, zip(*corpus["train"], strict=True))
german_lines[1999] = german_lines[1999].replace(" ", "\u2028", 1)  # one strange space
german_file, english_file = ("\n".join(lines) + "\n" for lines in (german_lines, english_lines))
pairs = [*zip(german_file.splitlines(), english_file.splitlines(), strict=False)]
for i in (0, 5000):
    print(*pairs[i], sep="\n", end="\n\n")

# %% [markdown]
# **Suspects.** (1) One file was shuffled. (2) A line is missing in the English file. (3) The translators were too free. (4) Our reader cuts lines where there is no end.
#
# **Instrument.** A translation of a long sentence is long. So we take 250 lines at a time and correlate the lengths of both sides. No German is needed. *Predict* the curve for each suspect.


# %%
def length_correlations(pairs: Sequence[tuple[str, str]], window: int = 250) -> dict[int, float]:
    """From each window's first line to the correlation of its German and English lengths."""
    starts = range(0, len(pairs) - window + 1, window)
    sides = {start: zip(*pairs[start : start + window], strict=True) for start in starts}
    return {
        start: round(statistics.correlation(*([*map(len, texts)] for texts in both)), 2)
        for start, both in sides.items()
    }


# %%
curves = {
    "splitlines": length_correlations(pairs),
    "split at \\n": length_correlations(corpus["train"]),
}
before, after = (
    [r for start, r in curves["splitlines"].items() if (start >= 2000) == late] for late in (0, 1)
)
assert min(before) > 0.7 and max(after) < 0.3
titled(
    shift_curve(curves),
    "Up to line 2,000 the lengths agree, and from there on they don't",
    "Correlation of German and English lengths in 250 lines at a time.",
)

# %% [markdown]
# A shuffled file would have no correlation anywhere, and free translation a weaker one everywhere. A sudden end means that something at line 2,000 moved all that follows. Which line of which file is it? Count:

# %%
print(len(german_file.splitlines()), "and", len(english_file.splitlines()), "lines by splitlines;")
print(german_file.count("\n"), "and", english_file.count("\n"), "ends of lines")
first = next(line for line in german_file.split("\n") if len(line.splitlines()) > 1)
print(ascii(first))

# %% [markdown]
# **Culprit.** The reader. Python's `splitlines` also splits at rare characters that don't end a line in a text file, here U+2028. One of them, and every later pair is wrong; `zip` drops the last line, and nothing crashes. Our `read_lines` splits only at `\n`.
#
# ## 9 · Now train your own
#
# In a terminal, in the folder of the series, `make run` trains a Transformer of 0.8 million parameters on the sample corpus, in two to four minutes of a CPU, and saves it in `runs/sample`. Translate with it:
#
# ```
# make translate MODEL=runs/sample TEXT="Ein trauriger Koch sucht den Hund."
# ```
#
# ## Summary
#
# - Read your data. Count lines and correlate lengths, or the error shows up as a bad model.
# - Vocabulary and subwords come from the training split alone.
# - An unknown word costs more than itself: with a share $u$ of them BLEU ends at $100\,(1-u)^{2.5}$.
# - Byte-pair encoding leaves hardly any word unknown, at a size that you choose. It learns words from a handful of examples that a vocabulary of words would leave out.
# - Cut a long sentence first, then end it. Batch by tokens, in buckets of similar length: padding costs time.
#
# ## What the paper did that we don't
#
# - WMT 2014: 4.5 million pairs for German and 36 million for French; Multi30k has 29,000.
# - About 37,000 shared subwords for English to German; we use 8,192.
# - Batches of about 25,000 source and 25,000 target tokens, on eight GPUs; ours have a few thousand.

# %% [markdown]
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Find the strange line
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Write the instrument that the case lacked: the number (from 0) of the first line, between two `\n`, inside or at the end of which `splitlines` would cut once more, or None. Windows ends lines with `\r\n`, which both count once. `solution("first_shift")` shows ours.


# %%
def first_shift(text: str) -> int | None:
    """The first line that `splitlines` cuts although it holds no newline."""
    ...


check(first_shift)

# %% [markdown]
# ### Exercise 2 · What padding costs attention
#
# *code · difficulty ●●○ · worth ●●● · 15 minutes*
#
# In attention a row of width $w$ has $w^2$ scores. Find the share of one side's self-attention scores that have a padded query or a padded key. `lengths` holds the sentences' lengths, `batches` lists of indices. `solution("wasted_scores")` shows ours.


# %%
def wasted_scores(lengths: Sequence[int], batches: Iterable[Sequence[int]]) -> float:
    """The share, 0 to 1, of T × T scores that padding has a part in."""
    ...


check(wasted_scores)

# %% [markdown]
# ### Exercise 3 · A budget for both sides
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# `token_batches` limits the longer side. Memory pays for both: let rows × (longest source + longest target) be at most `max_tokens`. Every example is in one batch, batches hold similar lengths and are as full as the limit allows, their order depends on `rng` alone, and an example that is too long by itself is a `ValueError`. `solution("budget_batches")` shows ours.


# %%
def budget_batches(
    examples: Sequence[Example], max_tokens: int, rng: random.Random
) -> list[list[int]]:
    """Indices in batches whose two rectangles together hold at most `max_tokens` cells."""
    ...


check(budget_batches)

# %% [markdown]
# Next: [Chapter 8 · Decoding](ch08_decoding.ipynb)
