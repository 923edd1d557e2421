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
# After this chapter you can turn captions into the batches of numbers that a Transformer is trained on, and say what each step costs and what it can't do.
#
# | | |
# |---|---|
# | In the paper | §5.1 (data and batching) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762); [Elliott et al. 2016](https://arxiv.org/abs/1605.00459) for the data, [Sennrich et al. 2016](https://arxiv.org/abs/1508.07909) for subwords |
# | Time | 20 minutes to read, 45 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 6 · Training](ch06_training.ipynb) · [Chapter 8 · Decoding](ch08_decoding.ipynb) |
#
# *If you read only three cells:* the captions of section 1, the merges of a new word in section 4, and "Two captions, one batch" in section 5.
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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path

import pandas as pd
import torch

from scripts import ROOT
from scripts.book.charts import titled
from scripts.book.domains import in_domain, list_of_texts
from scripts.book.exercises import check
from scripts.book.figures.captions import length_curves, padding_bars, size_curves, two_batches
from scripts.book.records import load_record
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch06_training import BOS, EOS, PAD, UNK, Batch
from scripts.corpora.load import load_corpus

pd.set_option("display.max_colwidth", None)  # show whole sentences

# %% [markdown]
# ## 1 · Twenty captions
#
# > **In short.** Read your data before you train on it. Captions are short, and people wrote them: with typos, free translations and a missing line here and there.
#
# **Multi30k** is the corpus of this series: English captions of photographs from Flickr, translated into German by professional translators.
#
# This notebook runs without a network, so what it says about Multi30k comes from a record that `python -m scripts.studies.corpus --save` makes from the real files. It quotes twenty training pairs; the last eight were picked because something is wrong with them.

# %%
facts = load_record("multi30k-corpus")
captions = {line: (german, english) for line, german, english in facts["captions"]}
print(", ".join(f"{split}: {count:,} pairs" for split, count in facts["pairs"].items()))
pd.DataFrame(captions.values(), index=list(captions), columns=["German", "English"])

# %% [markdown]
# *Keiner Hund* should be *kleiner Hund* (small dog): without its l the word means *no*. *Kletter* and *Hintrgrund* lack a letter too. Somebody is *stadning*, and somebody else *plying a guitar*. *Eine Videospiel* has the wrong gender and *A Oklahoma football player* the wrong article. Line 16,498 is translated very freely, and line 16,663 not at all: its German is `@@`.

# %%
for side, language in enumerate(("German", "English")):
    counts, lengths = facts["counts"][language], [len(p[side].split()) for p in captions.values()]
    share = counts["once"] / counts["different"]
    print(f"{language}: {counts['different']:,} different words, {share:.0%} of them occur once;")
    print(f"  {min(lengths)} to {max(lengths)} words in the twenty captions")

# %% [markdown]
# **Picture.** How long are captions? *Predict:* which number of words is the most common?

# %%
shares = facts["lengths"]  # of the training captions: language -> number of words -> share
usual = {language: max(found, key=found.get) for language, found in shares.items()}
print("most common:", ", ".join(f"{n} words in {language}" for language, n in usual.items()))
titled(
    length_curves(shares),
    "Most captions are short, and a few are very long",
    "Six in ten have 8 to 13 words. The long tail on the right matters for batches: one long "
    "sentence makes every row of its batch as long as itself (section 6).",
)

# %% [markdown]
# `load_corpus("multi30k")` gives a dictionary from each split to its (German, English) pairs: `train` is for learning, `val` for choosing, and the test sets are read only when all choices are made. It downloads the corpus once, or reads it from the folder that the environment variable `MULTI30K_DIR` names.
#
# **Pitfall.** Data ages: today The Annotated Transformer can't load its data: the host is gone, and the torchtext that it needs can't be installed beside a current PyTorch. So we check each file's checksum (a number made from all its bytes), our second corpus needs no download, and neither do our tokenisers.
#
# **Pitfall.** Line *i* of one file must translate line *i* of the other. Python's `splitlines` also splits at rare characters such as U+2028, which don't end a line in a text file. If one file has such a character, every pair after it is wrong, and nothing crashes. Our `read_lines` splits only at `\n`.

# %%
text = "Ein Hund\u2028rennt.\nEine Katze schläft.\n"
assert len(text.removesuffix("\n").split("\n")) == 2
assert len(text.splitlines()) == 3  # the wrong version: from here on all pairs are shifted

# %% [markdown]
# ## 2 · A corpus that needs no download
#
# > **In short.** `load_corpus("sample")` makes 7,000 captions, 6,000 of them to train on, from a small lexicon and a few rules of German. Its German is correct, its world is small, and a small model learns it in minutes.
#
# The grammar, [`scripts/corpora/sample.py`](../scripts/corpora/sample.py), makes the same corpus on every machine. It has what is hard in German: endings that agree with case, gender and number; a verb that comes last after *weil* (because); and verbs that split. *Hebt … auf* means *picks up* and *hebt … hoch* means *lifts*: the last word decides what the first one means.

# %%
corpus = load_corpus("sample")
for wanted in ("hebt eine", ", weil", ", die"):
    german, english = next(pair for pair in corpus["train"] if wanted in pair[0])
    print(f"{german}\n    {english}")

# %% [markdown]
# Its fourth split asks what Multi30k can't: does a model learn words, or whole phrases by heart? About one combination of words in twelve is **held out**: an adjective with its noun, or a verb with its object. Sentences with such a combination go only to `test_unseen`. *Sad* with *chef* is held out, in either order.

# %%
for phrase in ("sad clown", "cheerful chef", "sad chef", "chef is sad"):
    found = {s: sum(phrase in e for _, e in corpus[s]) for s in ("train", "test_unseen")}
    print(f"{phrase:14} {found['train']:3} times in train, {found['test_unseen']} in test_unseen")
assert found["train"] == 0 < found["test_unseen"]

# %% [markdown]
# ## 3 · Words, and the words that are missing
#
# > **In short.** A tokeniser cuts text into words and marks. A vocabulary numbers the words of the training text. Every other word becomes `<unk>`, and a model can only guess what stood there.
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
for language, sentence in (
    ("de", "Der Mann, der lacht, trägt z.B. einen Hut."),
    ("en", "The man who's laughing doesn't wear a hat."),
):
    words = word_tokenizer(language)(sentence)
    assert "".join(words) == sentence.replace(" ", "")  # nothing lost, nothing added
    print(" | ".join(words))

# %% [markdown]
# `Vocab`, from torchtext's last release in pure Python, numbers the words that we count from frequent to rare, after the four special entries of chapter 6. Words that occur fewer than `min_freq` times are left out.

# %%
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")


def build_vocab(sentences: Iterable[list[str]], min_freq: int = 1):
    """A torchtext `Vocab` of the words in `sentences`: of the training split, and nothing else."""
    from torchtext.vocab import Vocab

    counts = Counter(word for words in sentences for word in list_of_texts("sentence", words))
    return Vocab(counts, min_freq=min_freq, specials=list(SPECIALS))


def unknown_rate(sentences: Iterable[list[str]], vocab) -> float:
    """The share of words, between 0 and 1, that `vocab` doesn't know."""
    words = [word for sentence in sentences for word in list_of_texts("sentence", sentence)]
    if not words:
        raise ValueError("there are no words")
    # Not `in`: torchtext adds a word to `stoi` as soon as it is looked up there.
    return sum(vocab.stoi.get(word, UNK) == UNK for word in words) / len(words)


# %%
split = word_tokenizer("de")
words_of = {name: [split(german) for german, _ in corpus[name]] for name in ("train", "test")}
vocab = build_vocab(words_of["train"])
assert [vocab.stoi[name] for name in SPECIALS] == [PAD, UNK, BOS, EOS]
print(f"{len(vocab)} entries; the first: {' '.join(vocab.itos[:12])}")
print([vocab.stoi[word] for word in split("Ein Quantencomputer lacht.")])  # 1 is <unk>

# %% [markdown]
# **Pitfall.** The Annotated Transformer builds its vocabulary from training, validation and test text together. Then you can't measure how often a user's sentence will hold an unseen word: with `min_freq=1` the answer is always zero.

# %%
few = words_of["train"][:100]
honest, leaky = build_vocab(few), build_vocab(few + words_of["test"])
print(f"from 100 sentences: {unknown_rate(words_of['test'], honest):.1%} of test words unknown")
print(f"with the test set in it: {unknown_rate(words_of['test'], leaky):.1%}")
for row in facts["unknown"]:
    real = f"{row['train only']:.1%} unknown ({row['all splits (wrong)']:.1%} if it leaks)"
    print(f"Multi30k, min_freq={row['min_freq']}: {real}, in {row['sentences']:.0%} of sentences")

# %% [markdown]
# Three unknown words in a hundred don't sound like many, but a quarter of the test sentences have one. German makes it worse, since anyone may make a new compound word.
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


# %%
def merge_pair(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`pieces` with each occurrence of `pair`, from left to right, joined."""
    merged, i = [], 0
    while i < len(pieces):
        width = 2 if pieces[i : i + 2] == pair else 1
        merged.append("".join(pieces[i : i + width]))
        i += width
    return tuple(merged)


def learn_merges(words: dict[str, int], merges: int) -> list[tuple[str, str]]:
    """The first `merges` merges of byte-pair encoding, for words with their frequencies.

    Of equally frequent pairs the first met wins. Sennrich et al. 2016, algorithm 1.
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


# %% [markdown]
# **Check.** Four words: *low* 5 times, *lower* 2, *newest* 6, *widest* 3. *Predict* the first merge.

# %%
merges = learn_merges({"low": 5, "lower": 2, "newest": 6, "widest": 3}, merges=10)
print(", ".join(a + "+" + b for a, b in merges))
assert merges[0] == ("e", "s")  # 6 + 3 times; so are s+t and t+</w>, met later
assert ["".join(pair) for pair in merges[:5]] == ["es", "est", "est</w>", "lo", "low"]

# %% [markdown]
# To *apply* the merges to a new word, always join the neighbours whose merge was learned first.


# %%
def merge_steps(word: Iterable[str], rank: dict[str, int]) -> list[list[str]]:
    """`word`'s pieces, from letters on, after each merge; `rank` says when a piece was learned."""
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
for pieces in merge_steps([*"lowest", "</w>"], rank):
    print(" ".join(pieces))
assert pieces == ["low", "est</w>"]

# %% [markdown]
# ### SentencePiece
#
# For real work we use SentencePiece, which marks where a word *begins* (▁) instead of where it ends. One **joint** model serves both languages: names, numbers and words like *Park* get the same piece on both sides, and source, target and generator can share one table (chapter 5).
#
# Copied text holds letters that nobody sees, such as soft hyphens and marks of writing direction. SentencePiece takes most of them for unknown letters, and some for spaces. Text that looks the same should translate the same, so `plain_text` comes first.


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

    Ids 0 to 3 are pad, unk, bos and eos. `model` is the trained model, serialised.
    """

    def __init__(self, model: bytes):
        from sentencepiece import SentencePieceProcessor

        self.model = model
        self.processor = SentencePieceProcessor(model_proto=model)

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn `vocab_size` pieces from `lines`: of the training split alone."""
        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=map(plain_text, list_of_texts("lines", lines)),
            model_writer=model,
            model_type="bpe",
            vocab_size=in_domain("vocab", vocab_size),
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
# The tokenizer of our Multi30k model has 8,192 pieces, learned from the 29,000 training pairs. Its ids are in the order of learning, so `merge_steps` can replay how it splits a word. *Fahrradhund* (bicycle dog) is in no dictionary.

# %%
bpe = BPETokenizer.load(ROOT / "models/multi30k-de-en/tokenizer.model")
rank = {bpe.processor.id_to_piece(i): i for i in range(4, len(bpe))}
for pieces in merge_steps("▁Fahrradhund", rank):
    print(" ".join(pieces))
assert pieces == bpe.pieces("Fahrradhund")  # our dozen lines agree with SentencePiece

# %% [markdown]
# What does a word become as the vocabulary grows?

# %%
pd.DataFrame({"word": facts["words"]} | {f"V = {v}": p for v, p in facts["pieces"].items()})

# %% [markdown]
# Frequent parts become pieces, such as *fahrer* (driver) and *bogen* (bow). But BPE knows no meaning: *Forelle* (trout) falls into *f ore l le*.
#
# **Picture.** A larger vocabulary makes shorter sentences, which take less work. But each entry is a row of D numbers to be learned, and the rows of rare pieces are learned badly.


# %%
def tokens_per_sentence(texts: Sequence[str], tokenizer: BPETokenizer) -> float:
    """The mean number of pieces in a text."""
    texts = list_of_texts("texts", texts, some=True)
    return sum(len(tokenizer.encode(text)) for text in texts) / len(texts)


# %%
texts = [text for pair in corpus["train"] for text in pair]
german_tests = [german for german, _ in corpus["test"]]
rows = []
for v in (125, 250, 500, 1000):
    tokenizer = BPETokenizer.train(texts, v)
    rows.append(("sample, German", v, tokens_per_sentence(german_tests, tokenizer)))
for name, found in facts["tokens"].items():
    rows += [(f"Multi30k, {name}", int(v), tokens) for v, tokens in found.items()]
frame = pd.DataFrame(rows, columns=["text", "V", "tokens"])
titled(
    size_curves(frame),
    "Each doubling of the vocabulary saves fewer tokens than the one before",
    "The models that ship have 8,192 pieces for Multi30k and 1,000 for the sample corpus.",
)

# %% [markdown]
# Three things to know about SentencePiece:
#
# - **Ids.** By default it gives `<unk>` 0, `<s>` 1 and `</s>` 2, and has no padding. A mask that hides 0 would then hide every unknown word. So `train` sets the ids.
# - **Unknown letters.** There is still an `<unk>`, for letters that the training text doesn't contain. SentencePiece decodes it as ⁇.
# - **Normalisation.** It first replaces some characters with plainer ones (Unicode's NFKC), and runs of spaces with one. `decode(encode(text))` doesn't restore them. Below, ½ first becomes 1⁄2, and its slash is an unknown letter.

# %%
for text in ("Ein Hund rennt.", "Eine  ﬁne Katze…", "½ Apfel"):
    print(f"{text!r} becomes {bpe.decode(bpe.encode(text))!r}")
changed, total = facts["changed"], 2 * facts["pairs"]["train"]
print(f"Multi30k: {changed} of {total:,} training sentences come back changed")
assert UNK in bpe.encode("½")

# %% [markdown]
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


def pad_rows(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rows of ids of unequal length to one (B, longest) int64 tensor."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


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
# **Pitfall.** A sentence that is too long for the position table (chapter 3) must be cut. The Annotated Transformer adds `<s>` and `</s>` first and cuts afterwards, so a long sentence loses its `</s>`. The model then sees sentences that don't end, and learns to run on. Cut first, then add `</s>`.

# %%
(long,) = encode_pairs([captions[25091]], bpe, max_len=16)
assert (len(long.src), long.src[-1]) == (16, EOS)
assert (len(long.tgt), long.tgt[-1]) == (17, EOS)  # the decoder reads 16 and predicts 16
assert EOS not in [BOS, *bpe.encode(captions[25091][1]), EOS][:16]  # the wrong version

# %% [markdown]
# ## 6 · Batches that waste little
#
# > **In short.** A tensor is a rectangle; sentences are not. Padding fills the rest, and the machine computes it all. With sentences of similar length there is little to fill.
#
# With rows of lengths $n_1, …, n_B$, the share of the rectangle that is padding is
#
# $$\text{padding} = 1 - \frac{\sum_i n_i}{B \cdot \max_i n_i}.$$


# %%
def padding_share(lengths: Sequence[tuple[int, int]], batches: Iterable[Sequence[int]]) -> float:
    """The share of padding, between 0 and 1, in batches of indices.

    `lengths` holds each pair's (source, target) length; padding counts on both sides.
    """
    tokens = cells = 0
    for batch in batches:
        for side in (0, 1):
            found = [lengths[i][side] for i in batch]
            tokens += sum(found)
            cells += len(found) * max(found)
    return 1 - tokens / cells


# %% [markdown]
# **Buckets**: shuffle, sort by length, cut into batches of at most so many *tokens* (padding counted), then shuffle the batches. Batches of short sentences have many rows and batches of long ones few, so all cost about the same.


# %%
def token_batches(
    examples: Sequence[Example], max_tokens: int, rng: random.Random | None = None
) -> list[list[int]]:
    """Indices of `examples` in batches of similar length, at most `max_tokens` a side with padding.

    With `rng`, equal lengths are mixed and the batches come in random order: for training. Without,
    they go from short to long. Raises ValueError if one example alone is too long.
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
buckets = token_batches(train, 2048, random.Random(0))
print(f"{len(buckets)} batches of {min(map(len, buckets))} to {max(map(len, buckets))} sentences")

# %%
typical = sorted(buckets, key=lambda batch: len(train[batch[0]].tgt))[len(buckets) // 2]
masks = {
    name: pad_rows([train[i].tgt for i in chosen]) != PAD
    for name, chosen in (("random order", range(16)), ("a bucket", typical[:16]))
}
titled(
    two_batches(masks),
    "One long sentence widens the whole batch",
    "Each row is a sentence. In random order most rows end early, and the rest is padding. In "
    "this bucket all rows end together; in others a few cells are padding.",
)

# %% [markdown]
# **Pitfall.** The Annotated Transformer's text says "absolutely minimal padding", but its code pads every pair to 72 tokens or 128:

# %%
FIXED_WIDTH = 72


def padding_table(examples: Sequence[Example], max_tokens: int) -> dict[str, float]:
    """The padding share of three ways to batch `examples`."""
    lengths = [(len(e.src), len(e.tgt)) for e in examples]
    buckets = token_batches(examples, max_tokens, random.Random(0))
    size = round(len(lengths) / len(buckets))  # as many batches as the buckets make
    order = random.Random(0).sample(range(len(lengths)), len(lengths))
    in_order = [order[i : i + size] for i in range(0, len(order), size)]
    tokens = sum(min(n, FIXED_WIDTH) for pair in lengths for n in pair)
    shares = {
        "fixed width of 72": 1 - tokens / (2 * FIXED_WIDTH * len(lengths)),
        "random order": padding_share(lengths, in_order),
        "length buckets": padding_share(lengths, buckets),
    }
    return {name: round(share, 4) for name, share in shares.items()}


# %%
padding = {"sample": padding_table(train, 2048), "Multi30k": facts["padding"]}
for name, table in padding.items():
    print(name, {way: f"{share:.0%}" for way, share in table.items()})
titled(
    padding_bars(padding),
    "On real captions, buckets cut padding from 54% to 4%",
    "A fixed width wastes most of the work. Random order's share grows with the batch: here batches "
    "hold as many sentences as a bucket does on average.",
)

# %% [markdown]
# ## 7 · Now train your own
#
# In a terminal, in the folder of the series, type
#
# ```
# make run
# ```
#
# It trains a Transformer of 0.8 million parameters on the sample corpus, on a CPU, in two to four minutes. Then it prints some translations and the BLEU (a score, chapter 10) of `test` and `test_unseen`, and saves the weights and the tokenizer in `runs/sample`. Translate with it:
#
# ```
# make translate MODEL=runs/sample TEXT="Ein trauriger Koch sucht den Hund."
# ```

# %% [markdown]
# ## Summary
#
# - Read your data. Check files and line counts, or the error shows up as a bad model.
# - Vocabulary and subwords come from the training split alone.
# - Byte-pair encoding leaves hardly any word unknown, at a size that you choose. Its pieces needn't mean anything.
# - Cut a long sentence first, then end it. Batch by tokens, in buckets of similar length.
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
# ### Exercise 1 · Number the words
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Write what torchtext did for us. `splits` holds tokenised sentences by split, `{"train": …, "val": …, "test": …}`. The four `SPECIALS` come first, then the words from frequent to rare. Words that occur fewer than `min_freq` times have no id. `solution("word_numbers")` shows ours.


# %%
def word_numbers(splits: dict[str, list[list[str]]], min_freq: int) -> dict[str, int]:
    """Word -> id: the specials, then the words by count."""
    ...


check(word_numbers)

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
