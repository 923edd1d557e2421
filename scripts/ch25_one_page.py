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
# # Chapter 25 · All of it on one page
#
# After this chapter you can write a translator in one evening and on one page: from German text to English text with a score, and you can say what each line is for.
#
# | | |
# |---|---|
# | In the paper | all of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), and what became usual since |
# | Time | 30 minutes to read, 75 with the code; a minute or two to run on a CPU |
# | Before, after | [Chapter 24 · Experts](ch24_experts.ipynb), or none of them · [Chapter 26 · Your own pair](ch26_your_own_pair.ipynb) |
#
# *If you read only three cells:* `MultiHeadAttention`, `Transformer`, `train`.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import io
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from sacrebleu.metrics import BLEU
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from scripts.book.charts import panels, titled
from scripts.book.figures.model import stacks
from scripts.book.figures.training import diary
from scripts.corpora.load import load_corpus

# %% [markdown]
# ## The whole idea
#
# > **In short.** Cut sentences into pieces. Every German piece looks at its whole sentence; every English piece looks at those before it, then at the German ones, and guesses the next. Guess on many sentences at once, correct all weights a little, and do that a thousand times. That is all.
#
# This page is written as if it were the only one. It imports PyTorch, SentencePiece for the pieces, sacreBLEU for the score, and pandas for tables. From the series come only the captions and the charts. Everything between is here, and at each block a link names the chapter that explains it. A test holds the model and the searches of this page equal to theirs: the same weights give the same loss, the same gradients and the same translations. The page is short, not easy: whoever has never met a softmax, a gradient or Adam should begin with [chapter 0](ch00_start_here.ipynb).
#
# The machine has two stacks. The *encoder* reads the whole German sentence at once and turns it into one vector for each piece: the *memory*. The *decoder* writes English from left to right. For each next piece it looks at what it has written, and at the memory.

# %%
titled(
    stacks(3),
    "Two stacks and one bridge",
    "Read from the bottom. Only the memory crosses over; each layer of the decoder reads it.",
    wrap=72,
)

# %% [markdown]
# All numbers that one might want to change stand in one place. `FULL` is the real thing: the 29,000 captions of Multi30k. `SAMPLE` is a small world that the series generates itself (6,000 captions about people, animals and things), and a model that learns it in a minute or two on a laptop. This page runs `SAMPLE`. With a GPU, or an hour or two of a CPU, write `settings = FULL`; with `MULTI30K_DIR` you name the folder of Multi30k's files, else they are downloaded.


# %%
class Settings(NamedTuple):
    """What decides a run."""

    corpus: str
    vocab: int  # V: pieces of German and of English, in one list
    layers: int  # in each stack
    d_model: int  # D
    d_ff: int  # inside the feed-forward networks
    heads: int  # H
    dropout: float
    max_tokens: int  # in a batch, on either side, padding counted
    epochs: int  # passes over the corpus
    peak: float  # the highest learning rate
    warmup: int  # steps until the rate is there


FULL = Settings("multi30k", 8192, 3, 256, 1024, 8, 0.2, 2048, 18, 2e-3, 400)
SAMPLE = Settings("sample", 1000, 2, 128, 256, 4, 0.0, 512, 4, 3e-3, 200)

# %%
settings = SAMPLE
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
corpus = load_corpus(settings.corpus)
print(*(f"{split}: {len(pairs):,} pairs" for split, pairs in corpus.items()), sep=", ")
print(*corpus["train"][0], sep="\n")

# %% [markdown]
# ## Text to numbers
#
# > **In short.** Frequent words get a number of their own; rare ones are put together from parts. So the list is short, and few words are unknown: those with a letter that was never seen.
#
# *Byte-pair encoding* ([chapter 7](ch07_multi30k.ipynb)) starts from letters, and joins the pair of neighbours that is most frequent, again and again, until there are V pieces. Both languages share one list: names are the same in both, and one table of vectors can serve three times. Four numbers are reserved: filler (`PAD`), unknown, begin and end of a sentence. The pieces are learned from the training captions alone.

# %%
PAD, UNK, BOS, EOS = range(4)


def learn_pieces(texts: Sequence[str], vocab: int) -> SentencePieceProcessor:
    """Byte-pair encoding with `vocab` pieces, learned from these texts."""
    model, ids = io.BytesIO(), {"pad_id": PAD, "unk_id": UNK, "bos_id": BOS, "eos_id": EOS}
    options = {"model_type": "bpe", "character_coverage": 1.0, "num_threads": 1, "minloglevel": 2}
    options |= {"sentence_iterator": iter(texts), "model_writer": model, "vocab_size": vocab}
    SentencePieceTrainer.train(**options, **ids)
    return SentencePieceProcessor(model_proto=model.getvalue())


# %%
pieces = learn_pieces([text for pair in corpus["train"] for text in pair], settings.vocab)
text = corpus["val"][0][0]
print(pieces.encode(text, out_type=str), pieces.encode(text), sep="\n")

# %% [markdown]
# A source ends with `EOS`. A target begins with `BOS`, so that the decoder has something to start from, and ends with `EOS`, so that it can learn to stop.


# %%
Pair = tuple[list[int], list[int]]  # the ids of a sentence and of its translation


def encode_pairs(texts: Sequence[tuple[str, str]], pieces: SentencePieceProcessor) -> list[Pair]:
    """Pairs of sentences to pairs of ids."""
    encode = pieces.encode
    return [([*encode(german), EOS], [BOS, *encode(english), EOS]) for german, english in texts]


# %% [markdown]
# ## Attention
#
# > **In short.** Each position asks a question. Each position it may see offers a key and a value. The better a key fits the question, the more of that value the asker gets.
#
# With queries $Q$ (T, d_k), keys $K$ (S, d_k) and values $V$ (S, d_k), the paper's equation 1 is
#
# $$ \mathrm{Attention}(Q, K, V) = \mathrm{softmax}\Big(\frac{QK^\top}{\sqrt{d_k}}\Big)\,V $$
#
# The softmax makes each row of scores positive and sum to 1, so the result is a weighted mean of the values ([chapter 1](ch01_attention.ipynb)). Without the root, scores would spread as $\sqrt{d_k}$ does, and one key would take most of the weight. What may not be seen gets a score of −∞, thus a weight of 0. H *heads* do all this side by side, each in D/H of the D dimensions, so that a position can look at several places for several reasons ([chapter 2](ch02_multi_head_attention.ipynb)).
#
# There is one class for both uses. In self-attention `memory` is `x` itself; in cross-attention it is the encoder's result.


# %% tags=["yours"]
class MultiHeadAttention(nn.Module):
    """H times softmax(q·kᵀ/√d_k)·v, each between learned projections (§3.2); keeps `weights`."""

    def __init__(self, d_model: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.value, self.output = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        """x (B, T, D) to (B, H, T, d_k)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D) asks, memory (B, S, D) answers; mask (…, T or 1, S): True where x may."""
        q = self.split(self.query(x))  # (B, H, T, d_k)
        k, v = self.split(self.key(memory)), self.split(self.value(memory))  # (B, H, S, d_k) each
        scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, T, S)
        weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
        self.weights = weights.detach()  # kept, to be looked at
        heads = self.dropout(weights) @ v  # (B, H, T, d_k)
        return self.output(heads.transpose(1, 2).flatten(2))  # (B, T, D)


# %% [markdown]
# ## A layer
#
# > **In short.** A layer never replaces a vector. It reads a normed copy, and *adds* what it found.
#
# Attention moves information between positions; the feed-forward network then works on each position alone, through a wider hidden layer ([chapter 4](ch04_encoder_decoder.ipynb)). Around each of these stands the same frame: norm, work, dropout, add. The sum is a road from the first layer to the last that nothing blocks, and gradients travel it backwards ([chapter 5](ch05_norms_and_first_steps.ipynb)). The paper normed after the sum. Norming before it, as here, trains with less care, and became usual.
#
# Encoder and decoder differ in two things: a decoder's layer may not look ahead (its mask, below), and it also asks the memory.


# %% tags=["yours"]
class Layer(nn.Module):
    """`self_attention`, in a decoder `cross_attention`, too, and a feed-forward network (§3.1)."""

    def __init__(self, settings: Settings, decoder: bool):
        super().__init__()
        D, p = settings.d_model, settings.dropout
        self.self_attention = MultiHeadAttention(D, settings.heads, p)
        self.cross_attention = MultiHeadAttention(D, settings.heads, p) if decoder else None
        self.feed_forward = nn.Sequential(
            nn.Linear(D, settings.d_ff), nn.ReLU(), nn.Dropout(p), nn.Linear(settings.d_ff, D)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3 if decoder else 2))
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor, mask: Tensor, memory=None, memory_mask=None) -> Tensor:
        """x (B, T, D) to (B, T, D); a decoder's layer also reads memory (B, S, D)."""
        normed = self.norms[0](x)
        x = x + self.dropout(self.self_attention(normed, normed, mask))
        if self.cross_attention is not None:
            normed = self.norms[1](x)
            x = x + self.dropout(self.cross_attention(normed, memory, memory_mask))
        return x + self.dropout(self.feed_forward(self.norms[-1](x)))


# %% [markdown]
# Attention sees a set: it has no idea which piece came first. So each position adds its own pattern to its piece's vector, sines and cosines of ever longer periods, like the hands of many clocks ([chapter 3](ch03_embeddings_and_positions.ipynb)).


# %%
def sinusoids(length: int, d_model: int) -> Tensor:
    """(length, D): for each pair of dimensions a sine and a cosine of the position (§3.5)."""
    rates = 10_000 ** (-torch.arange(0, d_model, 2) / d_model)  # (D/2,)
    angles = torch.arange(length).unsqueeze(1) * rates  # (length, D/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


# %% [markdown]
# ## The Transformer
#
# > **In short.** A table turns ids into vectors, two stacks of layers work on them, and the same table turns vectors back into scores for each piece.
#
# The one table is used three times: it reads German, it reads English, and it writes English ([§3.4](https://arxiv.org/abs/1706.03762); [chapter 4](ch04_encoder_decoder.ipynb)). Its entries are drawn with a spread of $1/\sqrt D$, which is right for writing; for reading they are multiplied by $\sqrt D$, so that they are about as large as the positions' pattern.
#
# Two masks are all there is. The source's hides padding. The target's is a triangle: position t sees positions up to t. That one line, `tril()`, is what makes it possible to train on all positions of a sentence at once, and still write it word by word later. Padding at a target's end needs no mask of its own: it comes after everything that counts.


# %%
class Transformer(nn.Module):
    """Source ids and target ids so far in, scores for each next piece out (Figure 1)."""

    def __init__(self, settings: Settings, vocab: int, longest: int = 256):
        super().__init__()
        D = settings.d_model
        self.embedding = nn.Embedding(vocab, D)
        self.encoder = nn.ModuleList(Layer(settings, decoder=False) for _ in range(settings.layers))
        self.decoder = nn.ModuleList(Layer(settings, decoder=True) for _ in range(settings.layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.generator = nn.Linear(D, vocab)
        self.dropout = nn.Dropout(settings.dropout)
        self.register_buffer("positions", sinusoids(longest, D), persistent=False)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                nn.init.zeros_(part.bias)
        nn.init.normal_(self.embedding.weight, std=D**-0.5)
        self.generator.weight = self.embedding.weight  # one table

    def embed(self, ids: Tensor) -> Tensor:
        """ids (B, T) to (B, T, D)."""
        words = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(words + self.positions[: ids.size(1)])

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """src (B, S) to the memory (B, S, D) and its mask (B, 1, 1, S)."""
        x, mask = self.embed(src), (src != PAD)[:, None, None]
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, tgt: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """tgt (B, T) to logits (B, T, V): at each position, scores of what comes next."""
        T = tgt.size(1)
        past = torch.ones(T, T, dtype=torch.bool, device=tgt.device).tril()
        x = self.embed(tgt)
        for layer in self.decoder:
            x = layer(x, past, memory, memory_mask)
        return self.generator(self.decoder_norm(x))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """src (B, S) and tgt (B, T) to logits (B, T, V)."""
        return self.decode(tgt, *self.encode(src))


# %% [markdown]
# ## Batches
#
# > **In short.** Sentences of similar length go together, so that little of a batch is filler; and a batch is as large as its tokens, not its sentences.
#
# ([Chapter 7](ch07_multi30k.ipynb) measures what that saves.)


# %%
def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of different lengths as one tensor (B, longest)."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def make_batches(pairs: Sequence[Pair], max_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """All pairs, in batches of sources (B, S) and targets (B, T + 1)."""
    batches, batch = [], []
    for pair in sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0]))):
        longest = max(len(side) for sides in (*batch, pair) for side in sides)
        if batch and longest * (len(batch) + 1) > max_tokens:
            batches.append(batch)
            batch = []
        batch.append(pair)
    return [tuple(map(padded, zip(*batch, strict=True))) for batch in (*batches, batch)]


# %% [markdown]
# ## The loss
#
# > **In short.** At every position the model is asked for the next piece, given the *right* earlier ones. The loss is how surprised it is.
#
# The decoder reads the target without its last token and must say the target without its first: the same row, shifted by one ([chapter 6](ch06_training.ipynb)). The loss is the mean of $-\log p(\text{right piece})$ in nats, over real pieces. *Label smoothing* asks for 90% on the right piece and spreads 10% over all: a model that is never quite sure translates better.


# %% tags=["yours"]
def batch_loss(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    """The smoothed cross-entropy of a batch, in nats for each real token."""
    logits, labels = model(src, tgt[:, :-1]), tgt[:, 1:].flatten()  # (B, T, V), (B·T,)
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=PAD, label_smoothing=0.1)


# %% [markdown]
# The learning rate climbs for the first steps, while Adam's averages rest on few gradients and every weight would take a full step; then it falls along half a cosine ([chapter 6](ch06_training.ipynb)).


# %% tags=["yours"]
def learning_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """The rate at step 1, 2, …, `total`."""
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total + 1 - warmup)))


# %% [markdown]
# ## Training
#
# > **In short.** Loss, gradient, a small step against the gradient; for every batch, for every epoch.
#
# Four lines are the heart: `batch_loss`, `zero_grad` (else old gradients would add up), `backward` and `step`. Clipping bounds the gradient's length: at first it acts on most steps, later hardly ever. Where the processor multiplies 16-bit numbers, `autocast` lets it, in one line; the weights stay in 32 bits ([chapter 12](ch12_going_fast.ipynb)). The function is a generator: now and then it pauses and hands its loss to whoever is watching.


# %%
def has_16_bits(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 itself, and doesn't only emulate it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()


def train(
    model: Transformer, pairs: Sequence[Pair], settings: Settings, looks: int = 16
) -> Iterator[tuple[int, float]]:
    """Train on all pairs; `looks` times, yield the steps so far and the mean loss since before."""
    device, rng = next(model.parameters()).device, random.Random(torch.initial_seed())
    batches = make_batches(pairs, settings.max_tokens)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    step, total, losses = 0, settings.epochs * len(batches), []
    for _ in range(settings.epochs):
        rng.shuffle(batches)
        for src, tgt in batches:
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings.peak, settings.warmup, total)
            with torch.autocast(device.type, torch.bfloat16, enabled=has_16_bits(device)):
                loss = batch_loss(model.train(), src.to(device), tgt.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            if len(losses) == total // looks:
                yield step, torch.stack(losses).mean().item()
                losses = []


# %% [markdown]
# ## Writing a translation
#
# > **In short.** Ask for the next piece, append it, ask again, until the piece is the end.
#
# *Greedy* decoding always takes the likeliest piece. It is quick, and good enough to watch with.


# %% tags=["yours"]
@torch.inference_mode()
def greedy_decode(model: Transformer, memory: Tensor, mask: Tensor, max_len: int) -> Tensor:
    """What `encode` gave to ids (B, up to `max_len`): always the likeliest next piece."""
    ids = torch.full((len(memory), 1), BOS, device=memory.device)
    ended = torch.zeros(len(memory), dtype=torch.bool, device=memory.device)
    while ids.size(1) <= max_len and not ended.all():
        likeliest = model.decode(ids, memory, mask)[:, -1].argmax(dim=-1)  # (B,)
        ids = torch.cat((ids, likeliest.masked_fill(ended, PAD).unsqueeze(1)), dim=1)
        ended |= likeliest == EOS
    return ids[:, 1:]


# %% [markdown]
# It can't take anything back, though. *Beam search* ([chapter 8](ch08_decoding.ipynb)) keeps the `beam` best beginnings. Each step tries every beginning with every piece, and the best of all these go on; those that end are put aside. Long texts have more factors below 1, so scores are divided by length$^\alpha$ (the paper's penalty is a little different: chapter 8).


# %%
@torch.inference_mode()
def beam_search(
    model: Transformer, src: Tensor, max_len: int, beam: int = 5, alpha: float = 0.6
) -> list[tuple[float, list[int]]]:
    """One source (1, S) to its finished texts, each with its score, the best first."""
    memory, mask = model.eval().encode(src)
    ids, scores = src.new_full((1, 1), BOS), torch.zeros(1, device=src.device)
    finished = []
    for step in range(1, max_len + 1):
        logits = model.decode(ids, memory.expand(len(ids), -1, -1), mask)[:, -1]
        totals = scores.unsqueeze(1) + logits.log_softmax(dim=-1)  # (beginnings, V)
        best, place = totals.flatten().topk(2 * beam)  # at most half of them end
        rows, tokens = place // totals.size(1), place % totals.size(1)
        ends = tokens == EOS
        for i in range(beam):
            if (ends[i] or step == max_len) and len(finished) < beam:
                text = [*ids[rows[i], 1:].tolist(), tokens[i].item()]
                finished.append((best[i].item() / len(text) ** alpha, text))
        if len(finished) == beam:
            break
        on = (~ends).nonzero().flatten()[:beam]  # the best that don't end
        ids, scores = torch.cat((ids[rows[on]], tokens[on].unsqueeze(1)), dim=1), best[on]
    return sorted(finished, key=lambda scored: -scored[0])


# %%
@torch.inference_mode()
def translate(
    model: Transformer, pieces: SentencePieceProcessor, texts: Sequence[str], beam: int = 1
) -> list[str]:
    """German texts to English ones: a hundred at a time greedily, or each by a beam."""
    device, size, results = next(model.parameters()).device, 100 if beam == 1 else 1, []
    rows = [[*pieces.encode(text), EOS] for text in texts]
    for start in range(0, len(rows), size):
        src = padded(rows[start : start + size]).to(device)  # (B, S)
        longest = 2 * src.size(1) + 10
        if beam == 1:
            results += greedy_decode(model, *model.eval().encode(src), longest).tolist()
        else:
            results.append(beam_search(model, src, longest, beam)[0][1])
    return [pieces.decode([i for i in ids if i not in (PAD, EOS)]) for ids in results]


# %% [markdown]
# ## A translator is born
#
# Sixteen times we ask for the translation of one caption, to see how it goes. It is not in the training split, and it is German at its most German: the verb *zuwinken* (wave to) falls into two parts, *winkt* early and *zu* at the very end. The right answer is *In summer, a sad singer is waving to an athlete.*
#
# **Predict.** The model makes 920 steps. What will its first translation look like, after 57: letters, words, a sentence? And after a quarter of them?

# %%
# NBVAL_IGNORE_OUTPUT
CAPTION = "Im Sommer winkt eine traurige Sängerin einem Sportler zu."
torch.manual_seed(1)
model = Transformer(settings, len(pieces)).to(device)
training = train(model, encode_pairs(corpus["train"], pieces), settings)
looks = [(step, loss, *translate(model, pieces, [CAPTION])) for step, loss in training]

titled(
    diary(pd.DataFrame(looks, columns=["step", "loss", "translation"])),
    "The loss falls, and a sentence appears",
    "The loss, in nats for each piece, and what the model makes of the caption at that step.",
    wrap=72,
)

# %% [markdown]
# What is said here and below is of `SAMPLE`, of our run, and of eight seeds (`python -m scripts.studies.page_seeds` repeats them); yours will differ in details. After 57 steps the model knows how a sentence begins and ends, and one or two frequent words. By step 171 it reads the German (*In*, a comma, an adjective), but it loses its place and repeats itself. After 285 the frame stands. Then the nouns still waver, and *an* before *athlete*, not *a*, comes late. Of eight seeds, seven ended with exactly the right sentence, and one with *an sad singer*.
#
# The loss doesn't go to 0, and can't. With smoothing even a perfect model pays for the 10% that it is told to give away: with 1,000 pieces $-0.9001\ln 0.9001 - 999 \cdot 0.0001 \ln 0.0001 \approx 1.01$ nats ([chapter 6](ch06_training.ipynb) has the formula). So in the last epoch only some 0.08 nats are left to learn.

# %% [markdown]
# ## What it is worth
#
# > **In short.** BLEU counts how many words, pairs, triples and quadruples of words a translation shares with a reference, from 0 to 100. It is for comparing systems on the same texts ([chapter 10](ch10_judging.ipynb)).
#
# sacreBLEU computes it. The sample corpus has two test sets, both of sentences that no training pair contains. Some combinations of words (an adjective and its noun, a verb and its object) were kept out of training on purpose. In `test` there is none of these; in `test_unseen` each sentence has at least one. As these are two sets of texts, BLEU alone doesn't compare them well, so we also count the sentences that are exactly right.
#
# **Predict.** Every word of `test_unseen` was met in training, but not in this company. Will the model get fewer sentences right?

# %%
# NBVAL_IGNORE_OUTPUT
scores = {}
for split in (name for name in corpus if name.startswith("test")):
    sources, references = zip(*corpus[split], strict=True)
    outputs = translate(model, pieces, sources)
    right = sum(map(str.__eq__, outputs, references)) / len(outputs)
    scores[split] = {"bleu": BLEU().corpus_score(outputs, [references]).score, "right": right}
    print(f"{split:<12} BLEU {scores[split]['bleu']:.1f}, {right:.0%} exactly right")
beams = translate(model, pieces, sources[:80], beam=5)
print(f"a beam of 5 changes {sum(map(str.__ne__, beams, outputs))} of 80")

# %% [markdown]
# Fewer, with each of eight seeds: 79 to 84%, where `test` has 86 to 91%. BLEU was 94.0 to 96.1, and 95.6 to 97.0 on `test`: too close to tell. But its sentences are longer, and chance alone is some 3 points. Most come out right: the model has learned what each word does. (The corpus makes that easy: it deals its words from shuffled decks, so hardly any company is usual.)
#
# **The real thing.** With `FULL`, one thread of a CPU that multiplies 16-bit numbers needed 49 minutes for Multi30k's 29,000 captions. BLEU was 41.0 on `test_2016_flickr` and 36.7 on `test_2017_flickr` with a beam of 5, and 40.0 and 36.0 greedily (`python -m scripts.studies.one_page`, one seed). [Chapter 9](ch09_training_run.ipynb) has the same settings, new batches each epoch and the best epoch's weights: 41.6 and 37.4.

# %% [markdown]
# ## What it looks at, and what it needs
#
# `MultiHeadAttention` keeps its last weights, so we can look at them. For each English piece, this is where the heads of the last decoder layer looked.
#
# **Predict.** Where do they look before *waving* is written: at *winkt*, at *zu*, or at both?

# %%
# NBVAL_IGNORE_OUTPUT
[(source, target)] = encode_pairs([(CAPTION, *translate(model, pieces, [CAPTION]))], pieces)
model(torch.tensor([source], device=device), torch.tensor([target[:-1]], device=device))
weights = model.decoder[-1].cross_attention.weights[0]  # (H, T, S)
heads = {f"head {h}": matrix for h, matrix in enumerate(weights, start=1)}
german, english = ([pieces.id_to_piece(i) for i in ids] for ids in (source, target[1:]))

titled(
    panels(heads, english, german, per_line=2, cell=22, numbers=False),
    "Mostly word by word, and at the parts of the verb, wherever they stand",
    "The weights of the last decoder layer's cross-attention; each row sums to 1.",
    wrap=72,
)

# %% [markdown]
# In our run they look at both: before *wa-*, the beginning of *waving*, two heads look at pieces of *winkt* and two at *zu*. (Together they got 0.72 to 1.00 with eight seeds.) But in many rows the full stop and the end are looked at, though they say so little. Does the model need what it looks at?
#
# We translate the caption again, once for each of its pieces, and hide that piece from cross-attention. The full stop and the end say the same, so we hide them together. (The encoder has seen it, so the other pieces may know of it.)
#
# **Predict.** What is lost without *zu*? And without the full stop?


# %%
# NBVAL_IGNORE_OUTPUT
@torch.inference_mode()
def without_each(model: Transformer, source: Sequence[int]) -> list[list[int]]:
    """S translations of one source of S ids: in each, the decoder can't see another one."""
    device, S = next(model.parameters()).device, len(source)
    memory, mask = model.eval().encode(torch.tensor([source] * S, device=device))  # (S, S, D)
    hidden = torch.eye(S, dtype=torch.bool, device=device).view(S, 1, 1, S)
    hidden[-2:, ..., -2:] = True  # the full stop and the end only together
    rows = greedy_decode(model, memory, mask & ~hidden, 2 * S + 10).tolist()
    return [[i for i in row if i not in (PAD, EOS)] for row in rows]


for piece, ids in zip(german, without_each(model, source), strict=True):
    print(f"{piece:<8}", pieces.decode(ids))

# %% [markdown]
# Without *zu* the verb stays right: the other pieces know of it, and in this small world nobody *winkt* without *zu*. Without the full stop nothing changes. But one caption proves little. So here are twenty more. For each piece we note the weight that it gets, the mean of all heads of the last layer and of all rows, and whether the translation changes without it.

# %%
# NBVAL_IGNORE_OUTPUT
notes = []
for pair in [(text, *translate(model, pieces, [text])) for text, _ in corpus["val"][:20]]:
    [(source, target)] = encode_pairs([pair], pieces)
    model(torch.tensor([source], device=device), torch.tensor([target[:-1]], device=device))
    shares = model.decoder[-1].cross_attention.weights[0].mean(dim=(0, 1)).tolist()  # S of them
    for place, ids in enumerate(without_each(model, source)):
        kind = "full stop and end" if place >= len(source) - 2 else "all others"
        notes.append((kind, shares[place], pieces.decode(ids) != pair[1]))
needs = pd.DataFrame(notes, columns=["piece", "weight", "changes"]).groupby("piece").mean()
needs.round(2)

# %% [markdown]
# The full stop and the end get twice the weight of other pieces, and matter least: without both at most 20% of the translations change, without another piece 46 to 52% (eight seeds). A row's weights sum to 1, whether or not there is something to look for; what isn't needed must go somewhere. So a map shows where a model looks, not what it needs ([chapter 16](ch16_intervening.ipynb) makes a method of that).

# %%
assert settings is FULL or min(score["bleu"] for score in scores.values()) > 90
assert settings is FULL or needs["weight"].idxmax() != needs["changes"].idxmax()

# %% [markdown]
# ## What this page leaves out
#
# | add | when | chapter |
# |---|---|---|
# | saved states, and going on where a run stopped | a run takes longer than you can wait | [9](ch09_training_run.ipynb) |
# | new batches each epoch, the best epoch by validation | a run should not depend on its last step | [9](ch09_training_run.ipynb) |
# | a test of difference | you compare two models | [10](ch10_judging.ipynb) |
# | no padding, fused operations, and on a GPU steps that are recorded once | a training takes hours | [12](ch12_going_fast.ipynb) |
# | keys and values computed once, beams side by side | you translate more than a page | [13](ch13_decoding_fast.ipynb) |
# | ONNX, a model in the browser | others should use it | [14](ch14_leaving_home.ipynb) |
# | back-translation | you have English that nobody translated | [21](ch21_learning_from_models.ipynb) |
# | rotary positions, RMSNorm, SwiGLU, grouped heads | you build what is built today | [22](ch22_todays_block.ipynb) |
#
# ## Summary
#
# - A Transformer is attention, a small network for each position, and a sum around both; two stacks of that, and one table.
# - Training is one question asked at every position at once, which the triangular mask makes honest.
# - Writing is the same question asked again and again.
# - **What the paper did that we don't:** it normed after each sum, let the rate fall as $1/\sqrt{\text{step}}$, and trained for 100,000 steps on 4.5 million pairs.
#
# ## Exercises
#
# The first two change one line; then run the page again, which takes a minute or two. (The last cell will complain, rightly.)
#
# ### Exercise 1 · Let it cheat
#
# *think · difficulty ●○○ · worth ●●● · 10 minutes*
#
# Take `.tril()` away. Predict loss and BLEU, then run.
#
# <details><summary>What happens</summary>
#
# The loss falls to 1.03, almost the floor, and BLEU is 0.0. Each position may now look at the next piece of the target, which is the very piece that it should guess. It copies, and has learned nothing else; when it has to write by itself, there is nothing to copy. The loss alone would have told you that all is well.
#
# </details>
#
# ### Exercise 2 · A bag of words
#
# *think · difficulty ●○○ · worth ●●● · 10 minutes*
#
# Let `embed` leave the positions out: `return self.dropout(words)`. The encoder can no longer tell *das Pferd jagt die Katze* from *die Katze jagt das Pferd*. What about the decoder? Predict, then run.
#
# <details><summary>What happens</summary>
#
# The decoder keeps the order of what it has written: through the triangle, each position sees a different set. The encoder gets a bag of words. BLEU falls to 74.9 on `test` and 69.4 on `test_unseen`. Order is not all there is: *den* and *dem*, *-en* and *-er* still say who does what to whom.
#
# </details>
#
# ### Exercise 3 · A GPT
#
# *think · difficulty ●●○ · worth ●●● · 20 minutes*
#
# Which lines would you delete to get a GPT, a model that only continues English? Write them down before you look at [chapter 17](ch17_small_gpt.ipynb).
#
# <details><summary>An answer</summary>
#
# The encoder, its norm and `encode`; `cross_attention` with its norm, and whatever mentions `memory`, but for `MultiHeadAttention`; the sources in `encode_pairs` and `make_batches`. What is left is `embed`, a stack of layers with the triangular mask, the norm, the generator, and the same loss. Nothing is added.
#
# </details>
#
# Next: [Chapter 26 · Your own pair](ch26_your_own_pair.ipynb)
