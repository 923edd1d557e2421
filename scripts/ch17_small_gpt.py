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
# # Chapter 17 · A small GPT
#
# After this chapter you can build and train a language model, measure it in bits per character against a baseline, and sample from it.
#
# | | |
# |---|---|
# | In the paper | nothing: [Attention Is All You Need](https://arxiv.org/abs/1706.03762) has a decoder only behind an encoder. The decoder alone is Liu et al. (2018); GPT (Radford et al. 2018) made it known |
# | Time | 20 minutes to read, 40 with the code; under a minute to run on a CPU |
# | Before, after | [Chapter 16 · Intervening](ch16_intervening.ipynb) · [Chapter 18 · One stack](ch18_one_stack.ipynb) |
#
# *If you read only three cells:* the class `OneStack`, the samples under *Writing*, the chart of *On Multi30k*.
#
# Shapes: **B** batch, **T** length of the whole row (one stack, so no S), **D** `d_model`, **H** heads, **V** vocabulary, **L** tokens in the cache; **n** the order of an n-gram model.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Literal

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from scripts.book.domains import list_of_texts
from scripts.book.exercises import check
from scripts.book.figures.understanding import counting_chart
from scripts.book.records import load_record
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch03_embeddings_and_positions import (
    MAX_LEN,
    Embeddings,
    LearnedPositions,
    PositionalEncoding,
)
from scripts.ch04_encoder_decoder import (
    Encoder,
    EncoderLayer,
    Generator,
    PositionwiseFeedForward,
    initialise,
)
from scripts.ch06_training import BOS, EOS, PAD, UNK, EpochReport, LabelSmoothing
from scripts.ch07_multi30k import BPETokenizer, Example, pad_rows, token_batches
from scripts.ch08_decoding import (
    attend_to_stored,
    drawer,
    dropout_off,
    keys_values_of,
    until_end,
)
from scripts.ch13_decoding_fast import write_and_leave
from scripts.core.optimizers import make_optimizer
from scripts.core.settings import TrainConfig, learning_rate
from scripts.core.steps import Step, train_on
from scripts.corpora.load import load_corpus

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## A decoder alone
#
# > **In short.** Read a text and say, at every position, what comes next. For that, one stack of layers is enough, with a mask that hides the future.
#
# A language model gives a text $x_1, \dots, x_T$ a probability, one token at a time ($x_0$ is `<s>`, $x_T$ is `</s>`):
#
# $$ p(x_1, \dots, x_T) = \prod_{t=1}^{T} p(x_t \mid x_0, \dots, x_{t-1}) $$
#
# Each factor may use only the tokens before it. With the causal mask of chapter 1 all T factors come out of *one* pass.
#
# A decoder layer (chapter 4) has three sublayers: self-attention, attention to the source, feed-forward. Without a source there is no middle one, and what is left *is* chapter 4's `EncoderLayer`: "encoder" and "decoder" differ only in the mask.


# %%
class OneStack(nn.Module):
    """Embedding, one stack of layers, generator. The mask of a call says what the model may see.

    ids (B, T) and mask (B|1, T|1, T), True where attention is allowed, give vectors (B, T, D);
    `generator` turns those that are asked for into logits.
    """

    def __init__(self, embed: nn.Sequential, stack: Encoder, generator: Generator):
        super().__init__()
        self.embed = embed
        self.stack = stack
        self.generator = generator

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids (B, T), mask (B|1, T|1, T), to (B, T, D)."""
        return self.stack(self.embed(ids), mask)


# %%
def make_stack(
    vocab: int,
    N: int = 4,
    d_model: int = 128,
    d_ff: int = 512,
    h: int = 4,
    dropout: float = 0.1,
    *,
    norm_first: bool = True,
    positions: Literal["sinusoidal", "learned"] = "sinusoidal",
    max_len: int = 2 * MAX_LEN,
) -> OneStack:
    """One stack of N of chapter 4's encoder layers over `vocab` tokens, initialised as `make_model`.

    The generator shares the embedding table. Raises ValueError for unknown positions.
    """
    kinds = {"sinusoidal": PositionalEncoding, "learned": LearnedPositions}
    if positions not in kinds:
        raise ValueError(f'positions must be "sinusoidal" or "learned", not {positions!r}')
    attn = MultiHeadedAttention(h, d_model, dropout)
    feed_forward = PositionwiseFeedForward(d_model, d_ff, dropout)
    layer = EncoderLayer(d_model, attn, feed_forward, dropout, norm_first)
    model = OneStack(
        nn.Sequential(Embeddings(d_model, vocab), kinds[positions](d_model, dropout, max_len)),
        Encoder(layer, N, norm_first),
        Generator(d_model, vocab),
    )
    initialise(model)
    model.generator.proj.weight = model.embed[0].lut.weight
    return model


# %% [markdown]
# **Predict.** We change a row from its 11th token on. Which of the outputs change?

# %%
torch.manual_seed(0)
small = make_stack(30, N=2, d_model=16, d_ff=32, dropout=0.0, positions="learned", max_len=64)
ids = torch.randint(4, 30, (1, 20))
other = ids.clone()
other[:, 10:] = 4  # another future
before, after = (small(x, subsequent_mask(20)) for x in (ids, other))  # (1, 20, D)
same = (before == after).all(dim=-1)[0]  # (20,)
print("".join("=" if equal else "x" for equal in same))
assert same[:10].all() and not same[10:].any()

# %% [markdown]
# All from the 11th on.
#
# ## Bits per character
#
# > **In short.** How many yes-or-no answers does a model need, on average, to learn the next character? Fewer is better. The number compares any two models of the same text with the same alphabet.
#
# Our tokens are *characters*. The alphabet is small, hardly anything is unknown, and the oldest kind of language model, counting (Markov 1913, Shannon 1948), can take part.


# %%
class Characters:
    """The alphabet of a character model: ids 0 to 3 are the series' special ones, then one a character.

    Characters that occur less than `least` times in `texts` are left out, and become `<unk>`.
    """

    def __init__(self, texts: Sequence[str], least: int = 10):
        counts = Counter(char for text in list_of_texts("texts", texts) for char in text)
        self.alphabet = sorted(char for char, count in counts.items() if count >= least)
        self.ids = {char: i for i, char in enumerate(self.alphabet, start=4)}

    def __len__(self) -> int:
        return 4 + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """`<s>`, the characters, `</s>`."""
        return [BOS, *(self.ids.get(char, UNK) for char in text), EOS]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters up to the first `</s>`; `<unk>` shows as a box."""
        kept = (i for i in until_end(ids) if i == UNK or i > EOS)
        return "".join("□" if i == UNK else self.alphabet[i - 4] for i in kept)


# %%
texts = {name: [text for _, text in pairs] for name, pairs in load_corpus("sample").items()}
characters = Characters(texts["train"])
rows_of = {name: [characters.encode(text) for text in lines] for name, lines in texts.items()}
print(len(characters), "ids; the characters:", "".join(characters.alphabet))

# %% [markdown]
# With $T_i$ the number of characters of text $i$, its end included:
#
# $$ \text{bits per character} = -\frac{1}{\sum_i T_i} \sum_i \log_2 p(x^{(i)}) $$


# %%
def bits_per_character(nats: Sequence[float], rows: Sequence[Sequence[int]]) -> float:
    """Mean surprise in bits of all characters of `rows`, each text's `</s>` counted.

    `nats` holds −ln p of each whole row as a model sees it, `<s>` given.
    """
    predicted = sum(len(row) - 1 for row in rows)  # all but <s>
    return math.fsum(nats) / math.log(2) / predicted


# %%
two = [[BOS, 5, 6, EOS], [BOS, 7, EOS]]
assert bits_per_character([0.0, 0.0], two) == 0  # always certain
assert abs(bits_per_character([3 * math.log(32), 2 * math.log(32)], two) - 5) < 1e-12  # 32 symbols
assert bits_per_character([3 * math.log(2), 0.0], two) == 3 / 5  # not (1 + 0) / 2

# %% [markdown]
# **Pitfall.** *Figures that count different things.* A loss per piece and one per character differ by a piece's length. Count `</s>` in one model only, or take the mean of the texts' means, and the second digit moves; models differ by no more than that. And a character that becomes `<unk>` costs less, since the model needn't say which one it was. So take the same symbols and the same text, convert to bits, and divide by the same count.
#
# ## The baseline: count
#
# > **In short.** An n-gram model counts what followed the last n − 1 characters. The art is in contexts that it has seen rarely.
#
# Without a strong baseline, a number says nothing. Ours is *modified Kneser-Ney*, interpolated (Chen and Goodman 1998), the best of the classical models for words. With w a character, h what stands before it, c(hw) how often the two occur together, h′ the same as h without its first character, and v all that may come next:
#
# $$ p(w\mid h) = \frac{c(hw) - d(c(hw))}{\sum_v c(hv)} + \frac{\sum_v d(c(hv))}{\sum_v c(hv)}\; p(w\mid h') $$
#
# Each count c gives up a little, d(c), with d(0) = 0. What is given up goes to the shorter context; the empty context falls back on 1/(V − 2), since `<pad>` and `<s>` never come next. Two ideas matter:
#
# - d depends on whether the count is 1, 2 or more, and is *estimated*. If $n_i$ n-grams of one length have the count i, and $Y = n_1/(n_1 + 2n_2)$, then $d(i) = i - (i+1)\,Y\,n_{i+1}/n_i$; for 3 and more it is $d(3)$.
# - For every context except the longest, c(hv) is not how often hv occurs, but the number of *different* characters in front of it. `u` often comes after `q`, but that says little about where else `u` may stand. (What begins with `<s>` keeps its plain count.)


# %%
def gram_counts(rows: Sequence[Sequence[int]], order: int) -> list[Counter[tuple[int, ...]]]:
    """How often each n-gram occurs in `rows`, for n = 1 to `order`; `<s>` alone is not counted."""
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(order)]
    for row in map(tuple, rows):
        for n, table in enumerate(counts, start=1):
            table.update(row[i : i + n] for i in range(len(row) - n + 1))
    del counts[0][(BOS,)]
    return counts


def discounts(table: Counter[tuple[int, ...]]) -> tuple[float, ...]:
    """What is taken off counts of 0, of 1, of 2, and of 3 and more (Chen and Goodman 1998, eq. 26).

    For tables in which one of the numbers is missing, or a result is negative: 0, ½, 1, 1½.
    """
    n, usual = Counter(table.values()), (0.0, 0.5, 1.0, 1.5)
    if not all(n[i] for i in (1, 2, 3, 4)):
        return usual
    y = n[1] / (n[1] + 2 * n[2])
    found = 0.0, *(i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3))
    return found if min(found) >= 0 else usual


# %%
class KneserNey:
    """An n-gram model with interpolated modified Kneser-Ney smoothing, from `gram_counts`.

    Of `vocab` ids, all but `<pad>` and `<s>` can come next; before counting, all equally likely.
    """

    def __init__(self, counts: Sequence[Counter[tuple[int, ...]]], vocab: int):
        self.order, self.nexts = len(counts), vocab - 2
        # Each longer n-gram once: one more different character in front of the rest.
        self.tables = [Counter(gram[1:] for gram in longer) for longer in counts[1:]]
        for table, plain in zip(self.tables, counts, strict=False):  # nothing stands before <s>
            table.update({gram: count for gram, count in plain.items() if gram[0] == BOS})
        self.tables.append(counts[-1])  # the longest keep their counts
        self.discounts = [discounts(table) for table in self.tables]
        self.total: Counter[tuple[int, ...]] = Counter()  # of each context
        self.saved: Counter[tuple[int, ...]] = Counter()  # what was taken off in it
        for table, off in zip(self.tables, self.discounts, strict=True):
            for gram, count in table.items():
                self.total[gram[:-1]] += count
                self.saved[gram[:-1]] += off[min(count, 3)]

    def probability(self, token: int, context: tuple[int, ...]) -> float:
        """p(token | context), at most `order` − 1 tokens of it."""
        context = context[max(0, len(context) - self.order + 1) :]
        lower = self.probability(token, context[1:]) if context else 1 / self.nexts
        total = self.total.get(context)
        if not total:  # a context that was never seen says nothing
            return lower
        count = self.tables[len(context)].get((*context, token), 0)
        kept = count - self.discounts[len(context)][min(count, 3)]
        return (kept + self.saved[context] * lower) / total

    def nats(self, row: Sequence[int]) -> float:
        """−ln p of a row after its `<s>`."""
        row = tuple(row)
        return -sum(math.log(self.probability(row[i], row[:i])) for i in range(1, len(row)))


# %% [markdown]
# Check, in two contexts, one of them never seen: the probabilities sum to 1. **Predict.** What does a 7-gram model expect after *The do*? And after *xyz*?

# %%
counts = gram_counts(rows_of["train"], 7)
seven = KneserNey(counts, len(characters))
nexts = [UNK, EOS, *characters.ids.values()]
for context in ("The do", "xyz"):
    past = tuple(characters.encode(context)[1:-1])
    chances = {i: seven.probability(i, past) for i in nexts}
    best = sorted(nexts, key=lambda i: -chances[i])[:3]
    print(f"{context!r}:", ", ".join(f"{characters.decode([i])!r} {chances[i]:.3f}" for i in best))
    assert abs(sum(chances.values()) - 1) < 1e-12 and min(chances.values()) > 0

# %% [markdown]
# Doctors, donkeys and dogs: the only captions that begin like this. Neither *xyz* nor *yz* was ever seen, so the model asks what follows *z*. That was always *o*, 63 times. But only one character ever stood before *zo*, so c = 1, and about half of that is given up.
#
# **Predict.** How many bits does a character cost when the model sees 0, 1, 2, 4, or 6 characters before it? (n is one more than these.)

# %%
few = rows_of["val"][:100]
ngrams = {}
for order in (1, 2, 3, 5, 7):
    ngram = KneserNey(counts[:order], len(characters))
    bits = bits_per_character([ngram.nats(row) for row in few], few)
    ngrams[order] = {"bits per character": bits, "entries": sum(map(len, ngram.tables))}
ngrams = pd.DataFrame(ngrams).T.rename_axis("n")
ngrams.round(2).astype({"entries": int})

# %% [markdown]
# Fewer and fewer: a grammar wrote these captions, and after six characters fewer than two choices are left, on average. (*Entries*: the n-grams in its tables, of all lengths.)
#
# ## One question
#
# > **In short.** A batch holds rows, a mask, and the right answer wherever something is asked. Here that is the next character, at every position.
#
# Padding stands at the end, where the causal mask hides it from every real position. The next chapter asks other questions, with the same class, `Asked`, and the same loss, chapter 6's.


# %%
@dataclass
class Asked:
    """Rows of tokens with a question at some positions.

    ids (B, T); labels (B, T), `PAD` where nothing is asked; mask (B|1, T|1, T).
    """

    ids: Tensor
    labels: Tensor
    mask: Tensor

    @property
    def ntokens(self) -> int:
        """The positions that are asked: what the loss is divided by."""
        return int((self.labels != PAD).sum())

    def to(self, device: torch.device | str) -> "Asked":
        """The same on another device."""
        return Asked(self.ids.to(device), self.labels.to(device), self.mask.to(device))


def asked_next(rows: Sequence[Sequence[int]]) -> Asked:
    """A language model's question: every token's next one. Rows of ids with `<s>` and `</s>`."""
    ids = pad_rows(rows)  # (B, T+1)
    return Asked(ids[:, :-1], ids[:, 1:], subsequent_mask(ids.size(1) - 1))


def stack_loss(model: OneStack, batch: Asked, criterion: LabelSmoothing) -> tuple[Tensor, Tensor]:
    """Smoothed loss and negative log-likelihood, both summed over the positions that are asked."""
    asked = batch.labels != PAD  # (B, T)
    x = model(batch.ids, batch.mask)[asked]  # (N, D): only these pass the generator
    return criterion(model.generator(x), batch.labels[asked])


# %% [markdown]
# **Pitfall.** *The question that contains its answer.* Forget the shift, and each position is asked for the token that it reads; the loss falls to almost nothing. Turning the mask around has the same fault. Check the question before you train: may an asked position see the place of its label?


# %%
def sees_its_answer(batch: Asked) -> bool:
    """Whether a "what comes next" question lets some asked position look at its own label directly.

    A roundabout way through two layers would leak, too; it isn't looked for. Labels that aren't the
    next token count as seen: if the shift was forgotten, each position reads its own.
    """
    T = batch.ids.size(1)
    asked = batch.labels[:, :-1] != PAD  # (B, T-1)
    if not torch.equal(batch.labels[:, :-1][asked], batch.ids[:, 1:][asked]):
        return True
    mask = batch.mask.expand(len(batch.ids), T, T)
    return bool((asked & mask.diagonal(1, 1, 2)).any())


def unshifted(rows: Sequence[Sequence[int]]) -> Asked:
    """The slip: every token is asked for itself. Shown to be useless."""
    right = asked_next(rows)
    return Asked(right.ids, right.ids, right.mask)


# %%
right = asked_next(few[:3])
wrong = {
    "no shift": unshifted(few[:3]),
    "mask turned around": Asked(right.ids, right.labels, right.mask.mT),
}
assert not sees_its_answer(right) and all(map(sees_its_answer, wrong.values()))


# %%
def row_nats(model: OneStack, rows: Sequence[Sequence[int]], size: int = 64) -> list[float]:
    """−ln p of each row under a language model, dropout off; for `bits_per_character`."""
    device, nats = next(model.parameters()).device, []
    with dropout_off(model), torch.no_grad():
        for start in range(0, len(rows), size):
            batch = asked_next(rows[start : start + size]).to(device)
            logits = model.generator(model(batch.ids, batch.mask)).mT  # (B, V, T)
            each = F.cross_entropy(logits, batch.labels, ignore_index=PAD, reduction="none")
            nats += each.double().sum(1).tolist()  # (B, T) to (B,)
    return nats


# %% [markdown]
# ## Trained, now
#
# > **In short.** The loop is chapter 6's: a batch, a loss, a step. Only the question is new.


# %%
def learn(
    model: OneStack, batches: Sequence[Asked], lr: float = 1e-2, warmup: int = 30
) -> EpochReport:
    """Train on the batches, one step each, by Adam; the peak rate `lr` runs down to 0."""
    config = TrainConfig(lr=lr, warmup=warmup)
    optimizer, rate_at = make_optimizer(config, model), learning_rate(config, len(batches))
    schedule = LambdaLR(optimizer, lambda done: rate_at(done + 1))
    step = Step(model, LabelSmoothing(0.0), optimizer, stack_loss, config.clip)
    return train_on(batches, step, schedule)


# %% [markdown]
# The model reads 2,000 English captions of the sample corpus once, in about 500 steps. The tables count the same 2,000. **Predict.** Will the model beat counting pairs? Triples?

# %%
captions = rows_of["train"][:2000]


def mini_gpt(rows: Sequence[Sequence[int]], ask: Callable[..., Asked] = asked_next) -> OneStack:
    """A very small language model after one pass over `rows`; `ask` makes a batch of some."""
    torch.manual_seed(1)
    model = make_stack(len(characters), 2, 32, 128, dropout=0.0, positions="learned", max_len=128)
    parts = token_batches([Example([], row) for row in rows], 256, random.Random(1))
    learn(model, [ask([rows[i] for i in part]) for part in parts])
    return model


mini = mini_gpt(captions)
found = bits_per_character(row_nats(mini, few), few)
size = sum(p.numel() for p in mini.parameters())
same_counts = gram_counts(captions, 3)
pairs, triples = (KneserNey(same_counts[:n], len(characters)) for n in (2, 3))
by_pairs, by_triples = (
    bits_per_character([table.nats(row) for row in few], few) for table in (pairs, triples)
)
print(f"counting pairs {by_pairs:.1f}, counting triples {by_triples:.1f} bits per character")
print(f"mini-GPT, {size:,} numbers: {found:.1f}")

# %% [markdown]
# It beats pairs, so it uses more than the last character (if only its place); but not triples: it doesn't yet use two characters as well as a table does.
#
# **Predict.** What does a model learn without the shift, if each position is asked for the token that it reads?

# %%
copier, batch = mini_gpt(captions[:500], unshifted), unshifted(few)
with torch.no_grad():
    copying = stack_loss(copier, batch, LabelSmoothing(0.0))[1].item() / batch.ntokens
nexts_cost = bits_per_character(row_nats(copier, few), few)
print(f"the token that it reads: {copying / math.log(2):.2f} bits on new captions")
print(f"the next one: {nexts_cost:.0f} bits")

# %% [markdown]
# To copy. With all characters equally likely, the next one would cost 5.3 bits: the copier does far worse.
#
# ## Writing
#
# > **In short.** Draw a character from the model's distribution, append it, and go on. The temperature says how daring the draw is.
#
# Chapter 13's `write_and_leave` goes on until every text has ended; chapter 8's `drawer` draws. What is missing is a cache for one stack: for each layer, the keys and values of all tokens so far, (B, H, L, d_k).


# %%
class StackDecoding:
    """Texts in progress, every token computed once; for `write_and_leave`."""

    def __init__(self, model: OneStack):
        self.model, self.length = model, 0
        self.past: list[Tensor | None] = [None] * len(model.stack.layers)

    def read(self, ids: Tensor, places: Tensor, mask: Tensor | None = None) -> Tensor:
        """New tokens ids (B, T) at places (B|1, T), mask (B, T, L + T) or all: to (B, T, D)."""
        embedding, position = self.model.embed
        x = embedding(ids) + position.pe[places]  # (B, T, D)
        for i, layer in enumerate(self.model.stack.layers):
            x = layer.sublayer[0](x, partial(self.look, i, layer.self_attn, mask))
            x = layer.sublayer[1](x, layer.feed_forward)
        return self.model.stack.norm(x)

    def look(self, i: int, attn: MultiHeadedAttention, mask: Tensor | None, x: Tensor) -> Tensor:
        """Self-attention of layer i from new x (B, T, D) to all that is cached and to itself."""
        stored = keys_values_of(attn, x)  # (2, B, H, T, d_k)
        if self.past[i] is not None:
            stored = torch.cat((self.past[i], stored), dim=-2)  # (2, B, H, L + T, d_k)
        self.past[i] = stored
        return attend_to_stored(attn, x, stored, None if mask is None else mask.unsqueeze(1))

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each text by one of tokens (B, 1): the last positions (B, D)."""
        self.length += 1
        return self.read(tokens, torch.tensor([[self.length - 1]]))[:, -1]

    def logits(self, x: Tensor) -> Tensor:
        """Last positions x (B, D) to what may come next, (B, V)."""
        return self.model.generator(x)

    def keep(self, rows: Tensor) -> None:
        """Go on with the texts numbered rows (N,) alone."""
        self.past = [stored[:, rows] for stored in self.past]


# %% [markdown]
# `step` needs no mask: what lies in the future isn't there yet. Check: step by step gives the same as the whole row in one pass.

# %%
whole = pad_rows(few[:5])[:, :20]
with torch.no_grad():
    decoding = StackDecoding(mini)
    by_steps = torch.stack([decoding.step(whole[:, t : t + 1]) for t in range(20)], dim=1)
    torch.testing.assert_close(by_steps, mini(whole, subsequent_mask(20)))


# %%
def sample_texts(
    model: OneStack, count: int, temperature: float, seed: int, max_len: int = 120
) -> Tensor:
    """`count` texts drawn from a language model, from `<s>` on: ids (count, ≤ max_len)."""
    device = next(model.parameters()).device
    nothing = torch.empty(count, 0, dtype=torch.int64, device=device)  # (B, 0): no source
    draw = drawer(temperature, generator=torch.Generator(device).manual_seed(seed))
    with dropout_off(model), torch.no_grad():
        choose = lambda decoding, x: draw(decoding.logits(x))  # noqa: E731
        return write_and_leave(StackDecoding(model), nothing, max_len, choose)[0]


# %%
for temperature in (0.5, 1.0):
    print(f"temperature {temperature}:")
    for ids in sample_texts(mini, 3, temperature, seed=1, max_len=80).tolist():
        print("   ", characters.decode(ids))
print("the copier's ids:", sample_texts(copier, 1, 0.5, seed=1, max_len=8)[0].tolist())

# %% [markdown]
# The copier writes `<s>` after `<s>`, for ever. The other model writes words of the right length, a few of them real.
#
# ## On Multi30k
#
# > **In short.** A larger model, trained on real captions with three seeds, ends just behind the best table of counts, and ahead of a compressor.
#
# The record (`python -m scripts.studies.gpt --save`) holds models of four layers, D = 128, trained by Muon for eight passes over the 29,000 English captions. The tables got the same captions, and so did a compressor. *PPM* (Cleary and Witten 1984; library pyppmd) counts contexts, too. We ask how many bits the test captions add to the packed training captions, while PPM goes on learning. Validation chose n. **Predict.** The tables improve with n. Where do they stop getting better?

# %%
gpt, test = load_record("gpt-multi30k")["runs"], "test_2016_flickr"
tables = {run["row"]: run["orders"] for run in gpt if "orders" in run}
models = sorted((run for run in gpt if run.get("seed")), key=itemgetter("seed"))  # seed 0 chose
for name, orders in tables.items():
    best = min(orders, key=itemgetter("val"))
    print(f"{name}: {best[test]:.3f} bits, order {best['order']}")
print(f"mini-GPT, {models[0]['parameters']:,} numbers:", *(f"{run[test]:.3f}" for run in models))
counting_chart(tables, [run[test] for run in models], test)

# %% [markdown]
# At n = 12. Captions repeat themselves, and that table's 3.4 million entries may remember how. The model has 0.8 million numbers, and each seed ends just behind: by at most 0.005 bits on the test, and 0.013 on validation.
#
# Did each side get the same care? For a table only n must be chosen. For the model, rates were tried with three dropouts, two passes each. In bits on validation (NaN: not tried):

# %%
tried = pd.DataFrame([run for run in gpt if run.get("seed") == 0])
tried["bits"] = tried["loss"] / math.log(2)
tried.pivot(index="dropout", columns="lr", values="bits").round(3)

# %%
for run in models:
    learned, held_out = run["trained"][-1] / math.log(2), run["losses"][-1] / math.log(2)
    print(f"the eighth pass: {learned:.3f} bits in training, {held_out:.3f} on validation after it")

# %% [markdown]
# The model is best without dropout: in two passes little is learned by heart. After eight that may differ; we didn't try. By then the model knows the training captions better than new ones. The record doesn't say what a mini-GPT of this size can reach.
#
# What does it write? Here is the first of 200 texts at each temperature, with figures for all 200. **Predict.** At which temperature does it use the most different words? Does it recite the training captions?

# %%
for temperature, part in models[0]["samples"].items():
    share = part["different words"] / part["words"]
    print(f"temperature {temperature}: {share:.0%} different words, {part['copied']} of 200 copied")
    print("   ", part["texts"][0])

# %% [markdown]
# At the highest. (All four use the same seed, so they begin the same way.) In 200 training captions 30% of the words are different ones: temperature 1 comes nearest. At low temperatures the model says what is likeliest; at high ones it invents spellings. It recites almost nothing: one whole caption, at 0.5. But only exact copies are counted.
#
# ## Summary
#
# - A decoder alone is an encoder with a causal mask. One pass asks every position for its next token.
# - Compare language models in bits of the same text, by one count, against a baseline that is hard to beat.
# - A loss that is too good may come from a question that contains its answer. Check the question first.
# - A comparison is worth as much as the care that each side got.
#
# ## What the paper did that we don't
#
# It has no model of this kind. GPT (Radford et al. 2018) trained twelve layers, 117 million parameters, on books: post-norm, with learned positions, pieces instead of characters, GELU instead of ReLU, and dropout 0.1.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Pieces into characters
#
# *code · difficulty ●○○ · worth ●●● · 10 minutes*
#
# One model has a loss of 1.9 nats a piece, another has 1.3 bits a character. Which is better depends on how long a piece is. Give the bits per character of a model of pieces whose mean loss over the pieces of all texts, each text's `</s>` counted, is `nats_per_piece`. `tokenizer.encode(text)` gives a text's pieces, without `</s>`. An end counts as one character, as above. (`solution("bits_from_pieces")` shows ours.)


# %%
def bits_from_pieces(nats_per_piece: float, texts: Sequence[str], tokenizer: BPETokenizer) -> float:
    """Bits per character of a model of pieces, from its mean loss per piece."""
    ...


check(bits_from_pieces)

# %% [markdown]
# ### Exercise 2 · Several texts in one row
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# Short texts waste a row's length. So language models pack several into one row, and each position sees its own text up to itself. `owner` (B, T) holds the number of each position's text, −1 for padding. Give the mask (B, T, T), boolean. Padding looks at itself only, so that no softmax is empty. *Further:* what else has to change, besides the mask? (`solution("packed_mask")` shows ours.)


# %%
def packed_mask(owner: Tensor) -> Tensor:
    """Who may look at whom if rows hold several texts: owner (B, T) to (B, T, T) of bool."""
    ...


check(packed_mask)

# %% [markdown]
# ### Exercise 3 · Both together
#
# *project · difficulty ●●○ · worth ●●● · 60 minutes*
#
# Counts remember, a model generalises. Count 4-grams in all training captions, and let `mini` read these captions until it wins. Then mix the two: $p = \lambda\, p_{\text{table}} + (1 - \lambda)\, p_{\text{mini}}$ for each next character. Find λ on one half of the validation captions, and measure on the other. What does the mixture gain over the better of the two? What if you mix `mini` and `triples`, which is far behind?
#
# Next: [Chapter 18 · One stack](ch18_one_stack.ipynb)
