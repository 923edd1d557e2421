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
# # Chapter 18 · One stack
#
# After this chapter you can make one stack of layers an encoder, a decoder or a translator, by its mask and by its labels, and say what each costs.
#
# | | |
# |---|---|
# | In the paper | §3.1 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) has two stacks. The encoder alone is Devlin et al. (2019), BERT |
# | Time | 20 minutes to read, 40 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 17 · A small GPT](ch17_small_gpt.ipynb) · [Chapter 19 · Ablations](ch19_ablations.ipynb) |
#
# *If you read only three cells:* the three maps of *One layer, three masks*, the function `asked_pairs`, the table of *Side by side*.
#
# Shapes: **B** batch, **S** source length, **T** target length (with one stack, the whole row's), **D** `d_model`, **F** `d_ff`, **N** layers, **V** vocabulary, **P** the prefix's length, **n** a row's length.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.book.charts import titled
from scripts.book.exercises import check
from scripts.book.figures.understanding import (
    by_mask,
    classify_chart,
    classify_runs,
    influence_panels,
    lag_panels,
    rival_dots,
)
from scripts.book.instruments import influence, scramble
from scripts.book.records import load_record
from scripts.book.verdict import errors_saved, mean_difference
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch06_training import BOS, EOS, PAD
from scripts.ch07_multi30k import BPETokenizer, Example, encode_pairs, pad_rows
from scripts.ch08_decoding import dropout_off
from scripts.ch13_decoding_fast import write_and_leave
from scripts.ch17_small_gpt import (
    Asked,
    OneStack,
    asked_next,
    learn,
    make_stack,
    sees_its_answer,
)
from scripts.core.settings import TrainConfig
from scripts.corpora.gaps import GapItem, gap_item, german_gaps
from scripts.corpora.load import load_corpus
from scripts.fast.decoding import StackDecoding
from scripts.fast.searching import likeliest

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## One layer, three masks
#
# > **In short.** A layer doesn't know what it is for. The mask decides who may look at whom. Mask and labels decide whether the stack judges, writes or translates.
#
# In a layer, only attention moves anything between positions. So the variants differ in attention's mask:
#
# | variant | position t may look at s | known as |
# |---|---|---|
# | encoder alone | always (except padding) | BERT |
# | decoder alone | if $s \le t$ | GPT |
# | prefix language model | if $s \le t$, or s lies in the first P positions | UniLM (Dong et al. 2019) |
#
# The first two are chapter 1's `padding_mask` and `subsequent_mask`. We write the third.


# %%
def prefix_mask(prefix: Tensor, size: int) -> Tensor:
    """Who may look at whom in a prefix language model: True where allowed, (B, size, size).

    `prefix` (B,) holds each row's prefix length. Every position sees the whole prefix; behind the
    prefix, none sees what comes later. With prefix 0 it is `subsequent_mask`.
    """
    within = torch.arange(size, device=prefix.device) < prefix[:, None]  # (B, size)
    return subsequent_mask(size, prefix.device) | within[:, None, :]  # (B, size, size)


# %% [markdown]
# **Predict.** Two layers of chapter 17's `OneStack`, seven positions, a prefix of three: which inputs can change which outputs? Chapter 1's `influence` measures it.

# %%
torch.manual_seed(0)
sizes = {"N": 2, "d_model": 16, "d_ff": 32, "dropout": 0.0}
one_stack = make_stack(50, **sizes)
scramble(one_stack)
masks = {
    "encoder alone": torch.ones(1, 7, 7, dtype=torch.bool),
    "decoder alone": subsequent_mask(7),
    "prefix of 3": prefix_mask(torch.tensor([3]), 7),
}
x = torch.randn(1, 7, 16)
maps = {}
for name, mask in masks.items():
    maps[name] = influence(lambda x, mask=mask: one_stack.stack(x, mask), x)
    assert torch.equal(maps[name] > 0, mask[0])  # nothing hidden gets through, in no layer
influence_panels(maps)

# %% [markdown]
# Each output depends on exactly the inputs that its mask allows. In two layers, t could learn of s by way of a third position. But where these masks allow that detour, t may look at s directly.
#
# ## An encoder alone: hidden words
#
# > **In short.** A model that sees the whole text can't be asked for the next token. So hide some tokens, and ask for those.
#
# Devlin et al. (2019) choose 15% of the tokens. Of these, 80% become a mask token (the *gap*), 10% a random token, and 10% stay. Why the exceptions? BERT is later used on texts without gaps. So it must learn about visible words, too, and not simply copy them.


# %%
def hide_some(ids: Tensor, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids (B, T) with some of them hidden, and the labels (B, T): `PAD` where nothing is asked.

    15% of the real tokens are chosen. Of those, 80% become the gap (id `vocab`), 10% any token,
    10% stay (Devlin et al. 2019, §3.1). Special tokens are neither chosen nor put in.
    """
    draw = torch.rand(ids.shape, generator=generator)  # (B, T)
    chosen = (ids > EOS) & (draw < 0.15)
    fate = torch.rand(ids.shape, generator=generator)
    others = torch.randint(EOS + 1, vocab, ids.shape, generator=generator)
    hidden = ids.masked_fill(chosen & (fate < 0.8), vocab)
    hidden = torch.where(chosen & (fate >= 0.9), others, hidden)
    return hidden, ids.masked_fill(~chosen, PAD)


def asked_hidden(rows: Sequence[Sequence[int]], vocab: int, generator: torch.Generator) -> Asked:
    """A masked language model's question: which tokens are hidden here? Every token sees all."""
    ids = pad_rows(rows)  # (B, T)
    hidden, labels = hide_some(ids, vocab, generator)
    return Asked(hidden, labels, padding_mask(ids))


# %%
corpus = load_corpus("sample")
tokenizer = BPETokenizer.train((text for both in corpus["train"][:300] for text in both), 200)
gap, german = len(tokenizer), corpus["train"][0][0]  # the gap's id follows those of the pieces
batch = asked_hidden([[BOS, *tokenizer.encode(german), EOS]], gap, torch.Generator().manual_seed(1))
pieces = [*map(tokenizer.processor.id_to_piece, range(gap)), "___"]
print(german)
for ids in (batch.ids, batch.labels):  # what is read, and what is asked
    print(" ".join("." if i == PAD else pieces[i] for i in ids[0].tolist()))

# %% [markdown]
# Three tokens are asked: one became the gap, one became *hungr*, and one stayed (*l*).
#
# **Pitfall.** *The loss over all positions.* If all tokens are asked, not only the chosen ones, the model mostly practises copying. **Predict.** What share of the asked positions show their answer in each case?


# %%
def share_given_away(hidden: Tensor, labels: Tensor) -> float:
    """Of the asked positions, the share whose input is the answer."""
    asked = labels != PAD
    return float((hidden[asked] == labels[asked]).double().mean())


# %%
ids = torch.randint(0, 50, (200, 500), generator=torch.Generator().manual_seed(0))
hidden, labels = hide_some(ids, 50, torch.Generator().manual_seed(1))
all_labels = ids.masked_fill(ids <= EOS, PAD)
print(f"the chosen tokens asked: {share_given_away(hidden, labels):.1%} show their answer")
print(f"all tokens asked: {share_given_away(hidden, all_labels):.1%} show their answer")

# %% [markdown]
# Of the chosen tokens, the 10% that stay show their answer. If all are asked, the unchosen ones do, too.
#
# ## Singular or plural?
#
# > **In short.** Take the verb out of a German caption: was it singular or plural? A model that has practised on gaps, verbs among them, needs few labels, or none.
#
# *Ein Mann mit zwei Hunden* `___` *durch den Park*: läuft or laufen? The verb agrees with its subject, which need not be the nearest noun (Linzen et al. 2016). A rule reads the label off the verb, if that is one of some thirty ([`scripts/corpora/gaps.py`](../scripts/corpora/gaps.py)).

# %%
captions = "Zwei Hunde laufen durch den Park.", "Ein Mann mit zwei Hunden läuft durch den Park."
for text in captions:
    item = gap_item(text)
    print(" ".join(item.words), "→", "plural" if item.plural else "singular")

# %% [markdown]
# **The baseline** is a bag of words: one weight for each word, and for each pair of neighbours. The gap counts as a word, so its neighbours are known.
#
# $$ p(\text{plural}\mid x) = \sigma\Bigl(b + \sum_{f \in x} w_f\Bigr), \qquad \min_{w, b}\; \sum_i -\ln p(y_i \mid x_i) + \frac{\lambda}{2} \sum_f w_f^2 $$
#
# The problem is convex: no seed, no learning rate, one best answer.


# %%
def features(item: GapItem) -> dict[tuple[str, ...], None]:
    """A caption's words and pairs of neighbours, each once; the gap is a word."""
    return dict.fromkeys([*((word,) for word in item.words), *pairwise(item.words)])


def fit_bag_of_words(
    items: Sequence[GapItem], penalty: float, steps: int = 60
) -> Callable[[Sequence[GapItem]], Tensor]:
    """Logistic regression, by L-BFGS: a function from items to logits (N,). `penalty` is λ.

    It knows the features that at least two of `items` have.
    """
    counts = Counter(feature for item in items for feature in features(item))
    kept = [feature for feature, count in counts.items() if count > 1]
    number = {feature: i for i, feature in enumerate(kept, start=1)}  # 0 pads
    weight = torch.zeros(len(kept) + 1, 1, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def numbered(items: Sequence[GapItem]) -> Tensor:  # (N, L): each item's features
        return pad_rows([[number[f] for f in features(item) if f in number] for item in items])

    def logits(ids: Tensor) -> Tensor:  # (N, L) to (N,): weights are looked up and added
        return F.embedding_bag(ids, weight, mode="sum", padding_idx=0).squeeze(1) + b

    known, plural = numbered(items), torch.tensor([item.plural for item in items]).double()
    optimizer = torch.optim.LBFGS([weight, b], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(logits(known), plural, reduction="sum")
        value = value + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return lambda items: logits(numbered(items)).detach()


def share_right(logits: Tensor, items: Sequence[GapItem]) -> float:
    """The share of items whose number the sign of the logit tells."""
    plural = torch.tensor([item.plural for item in items])
    return float(((logits.cpu() > 0) == plural).double().mean())


# %% [markdown]
# **Predict.** On the sample corpus, how much better than "always singular" is a bag of words with 20 labels? With 200?

# %%
gaps = german_gaps(corpus)
singular = 1 - sum(item.plural for item in gaps["test"]) / len(gaps["test"])
print(f"{len(gaps['test'])} test captions; always singular: {singular:.1%} right")
for size in (20, 200):
    bag = fit_bag_of_words(gaps["train"][:size], penalty=0.1)
    print(f"{size} labels: {share_right(bag(gaps['test']), gaps['test']):.1%} right")
for text in captions:  # write your own
    print(f"plural with probability {bag([gap_item(text)]).sigmoid().item():.2f}: {text}")

# %% [markdown]
# With 20 labels the bag is no better. With 200 it leads by ten points. In our captions *Zwei* and *Ein* weigh most: it knows neither *Hunde* nor *Hunden*.
#
# **The classifier** is an encoder that has learned to fill gaps. A new head of D + 1 numbers reads the vector *at the gap*, and all weights are trained.


# %%
class NumberClassifier(nn.Module):
    """An encoder and one linear layer that reads the vector at the gap."""

    def __init__(self, encoder: OneStack, gap: int):
        super().__init__()
        self.encoder, self.gap = encoder, gap
        self.head = nn.Linear(encoder.embed[0].d_model, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T), one gap in each row, to the logits (B,) of "plural"."""
        x = self.encoder(ids, padding_mask(ids))  # (B, T, D)
        return self.head(x[ids == self.gap]).squeeze(1)  # (B, D) to (B,)


# %% [markdown]
# **Without any label.** Ask the masked model itself: does it expect the rule's plural verbs at the gap, or the singular ones? (We ask for those that are one piece.)


# %%
def expected_number(masked: OneStack, ids: Tensor, singular: Tensor, plural: Tensor) -> Tensor:
    """Logits (B,) of "plural" from what a masked model expects at the gap, its last id.

    ids (B, T) have one gap in each row; `singular` and `plural` are ids of verbs.
    """
    logits = masked.generator(masked(ids, padding_mask(ids)))  # (B, T, V + 1)
    at_gap = logits[ids == logits.size(-1) - 1]  # (B, V + 1)
    return at_gap[:, plural].logsumexp(1) - at_gap[:, singular].logsumexp(1)


# %% [markdown]
# **Does practice with gaps save labels?** At full size ([`classify-multi30k.json`](../results/classify-multi30k.json), by `python -m scripts.studies.classify --save`):
#
# | | practice | labels it learns from |
# |---|---|---|
# | *bag of words* | none | 100, 1,000 or all |
# | encoder *from scratch* | none | the same |
# | *pretrained* encoder | gaps in the German training captions, up to 24 times | the same |
# | *masked model, asked* | the same | none |
# | *counts of words* | the words around each verb that the rule takes out | the verbs' forms, which are our labels: all |
#
# In practice each caption's verb is asked for, too, up to 3.6 times on average: nearly our question. *Counts of words* is naive Bayes: each word votes, by how often it stood with plural verbs and with singular ones.
#
# If practice saves labels, *pretrained* must lead both kinds without it. If practice needs no label, the masked model must lead the counts.
#
# Eight seeds chose which captions have a label, the encoders' batches and dropout, and the first weights of those from scratch; three masked models are asked. Another 533 captions with labels chose λ, learning rates, and when a training ends. The test is 940 captions.
#
# **Predict.** Where does the pretrained encoder lead the bag by most?

# %%
PRETRAINED, SCRATCH, BAG = "pretrained", "from scratch", "bag of words"
MASKED, COUNTS = "masked model, asked", "counts of words"
runs, captions_tested, singular = classify_runs()
errors = runs.set_index(["kind", "labels", "seed"])["errors"].sort_index()
means = errors.groupby(["labels", "kind"]).mean().unstack().loc[100:]
every = means.index[-1]  # all captions with a label
assert means.loc[1000, PRETRAINED] < means.loc[every, [SCRATCH, BAG]].min()  # the title
title = f"1,000 labels after practice go as far as all {every:,} without"
classify_chart(runs, 1 - singular, title)

# %%
sizes = (100, 1000, every)
compared = [((PRETRAINED, n), (rival, n)) for rival in (BAG, SCRATCH) for n in sizes]
compared += [((PRETRAINED, 1000), (BAG, every)), ((PRETRAINED, 100), (MASKED, 0))]
compared += [((MASKED, 0), (COUNTS, 0)), ((MASKED, 0), (BAG, every))]
lines = []
for own, rival in compared:
    mine, theirs = errors[own], errors[rival]  # the shares wrong of the runs, by seed
    saved = errors_saved(mine, theirs, captions_tested)
    lines.append((*own, f"{mine.mean():.1%}", *rival, f"{theirs.mean():.1%}", saved))
columns = ["kind", "labels", "errors", "compared with", "its labels", "its errors", "saved"]
pd.DataFrame(lines, columns=columns).set_index(columns[:2])

# %% [markdown]
# *Saved* is the difference of the two shares. Its 95% interval counts the chance of the seeds and of the test captions, the latter as if the two never erred on the same one.
#
# - **Few labels.** The lead is widest at 100 labels: there the pretrained encoder errs in 3.2%, the bag in 10.2%. (533 more chose the settings.) With 1,000 it errs on average no more often than the others with all. With all, 940 test captions are too few to be sure of its lead.
# - **No label.** The three masked models err in 3.8% of the captions on average, clearly less often than counts of words. That 100 labels help beyond this isn't shown. A bag of all labels, which knows only words and neighbours, errs no more often. So this success doesn't prove grammar.
#
# All pretrained encoders began as one masked model, of seed 1: the chance of its training isn't counted.
#
# ## Translating with one stack
#
# > **In short.** A translation is a continuation. Write the source and a separator, and let the model go on in the other language.
#
# One row holds `source </s> <s> target </s>`. The `<s>` that begins every target is the separator. Only the target is asked. Under a causal mask the source is read from left to right, under a prefix mask in both directions.


# %%
def asked_pairs(examples: Sequence[Example], sees: Literal["causal", "prefix"]) -> Asked:
    """Pairs as one row each: source, its eos, then bos and the target; asked is the target alone.

    The bos that begins a target is the separator. `sees` "prefix" lets every position see the whole
    source; "causal" lets none see what comes later.
    """
    rows = pad_rows([e.src + e.tgt for e in examples])  # (B, T+1)
    prefix = torch.tensor([len(e.src) for e in examples])  # (B,)
    ids, labels = rows[:, :-1], rows[:, 1:]
    size = ids.size(1)
    in_source = torch.arange(size) < prefix[:, None]  # (B, T)
    mask = prefix_mask(prefix, size) if sees == "prefix" else subsequent_mask(size)
    return Asked(ids, labels.masked_fill(in_source, PAD), mask)


# %%
pair = Example([5, 6, 7, EOS], [BOS, 8, 9, EOS])
batch = asked_pairs([pair], "prefix")
print(batch.ids.tolist()[0], "asks", batch.labels.tolist()[0], "(0 asks nothing)")

# %% [markdown]
# **Pitfall.** *Asking for the source as well.* **Predict.** Under which mask does a question then show its answer? Chapter 17's `sees_its_answer` tells.

# %%
for sees in ("causal", "prefix"):
    everything = asked_next([pair.src + pair.tgt])
    mask = asked_pairs([pair], sees).mask
    print(f"{sees}: {sees_its_answer(Asked(everything.ids, everything.labels, mask))}")

# %% [markdown]
# Under the prefix mask a position sees the source's next token, its label. About half of the questions are then copying, and the mean loss looks too good.
#
# **Decoding.** The source is read once, then [`StackDecoding`](../scripts/fast/decoding.py) writes the target behind it. In a batch, short sources are padded. The padding must stay hidden, and a target's first token stands behind its *own* source.


# %%
class AfterSource(StackDecoding):
    """Targets in progress behind sources src (B, S), padded at their end; `sees` as in `asked_pairs`."""

    def __init__(self, model: OneStack, src: Tensor, sees: Literal["causal", "prefix"]):
        super().__init__(model)
        self.real = src != PAD  # (B, L): which of the L cached tokens aren't padding
        self.lengths = self.real.sum(1)  # (B,): where the next token stands
        S = src.size(1)
        mask = self.real[:, None].expand(-1, S, -1)  # (B, S, S)
        if sees == "causal":
            mask = mask & subsequent_mask(S, src.device)
        self.read(src, torch.arange(S, device=src.device)[None], mask)

    def step(self, tokens: Tensor) -> Tensor:
        """Continue each text by one of tokens (B, 1): the last positions (B, D)."""
        self.real = torch.cat((self.real, torch.ones_like(tokens, dtype=torch.bool)), dim=1)
        x = self.read(tokens, self.lengths[:, None], self.real[:, None])
        self.lengths = self.lengths + 1
        return x[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Go on with the texts numbered rows (N,) alone."""
        super().keep(rows)
        self.real, self.lengths = self.real[rows], self.lengths[rows]


def stack_greedy(
    model: OneStack,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    sees: Literal["causal", "prefix"] = "causal",
    reading: type[AfterSource] = AfterSource,
) -> Tensor:
    """The likeliest token at every step, behind src (B, S): ids (B, ≤ max_len), as `greedy_decode`.

    `src_mask` is there only so that every search is called alike.
    """
    with dropout_off(model), torch.no_grad():
        ids, _ = write_and_leave(reading(model, src, sees), src, max_len, likeliest)
    return ids


# %% [markdown]
# The smallest test of a translator is eight pairs, learned by heart under each mask. If labels, mask, positions and cache agree, all come back. In the broken version every target begins behind the batch's *longest* source. **Predict.** How many come back then, and which?


# %%
class BehindPadding(AfterSource):
    """The fault: all targets of a batch begin at the same position."""

    def __init__(self, model: OneStack, src: Tensor, sees: Literal["causal", "prefix"]):
        super().__init__(model, src, sees)
        self.lengths = torch.full_like(self.lengths, src.size(1))


# %%
pairs = corpus["train"][:8]
examples = encode_pairs(pairs, tokenizer)
src = pad_rows([e.src for e in examples])
print(pairs[0][0])
for sees in ("causal", "prefix"):
    torch.manual_seed(0)
    by_heart = make_stack(len(tokenizer), 2, 32, 64, dropout=0.0)
    one_pass = 80 * [asked_pairs(examples, sees)]  # 80 steps on one batch
    list(learn(by_heart, [one_pass], TrainConfig(lr=1e-2, warmup=10)))  # trains
    for reading in (AfterSource, BehindPadding):
        ids = stack_greedy(by_heart, src, None, 60, sees, reading)
        texts = [tokenizer.decode(row) for row in ids.tolist()]
        recalled = [text == english for text, (_, english) in zip(texts, pairs, strict=True)]
        print(f"{sees}, {reading.__name__}: {sum(recalled)} of 8 come back\n    {texts[0]}")
    assert recalled == (src != PAD).all(1).tolist()  # broken: the longest source's target alone

# %% [markdown]
# The right code brings all back, the broken one only the target of the longest source, which has no padding.
#
# ## Two stacks or one
#
# > **In short.** With equally many weights, one causal stack and the encoder-decoder show no clear difference in BLEU. The prefix mask is worse, clearly so in BLEU where source and target are numbered through. With own weights for the source and relative positions the two masks score alike.
#
# With F = 2D an encoder layer holds about $8D^2$ weights and a decoder layer $12D^2$. So 2 + 2 layers have as many as 5 of one stack.
#
# The models are the base of [chapter 19](ch19_ablations.ipynb) (D = 64) with F = 2D, without dropout, after five passes over Multi30k ([`stacks-multi30k.json`](../results/stacks-multi30k.json), by `python -m scripts.studies.stacks --save`). One seed found each model's learning rate; three others are compared. BLEU is greedy, on validation captions.
#
# In one stack a target's positions go on behind its source's. In two more rows they begin at 0 (*positions anew*). **Predict.** Does it help that the source is read in both directions? And that a target has positions of its own?

# %%
RIVALS = {  # each row, and the row it is compared with
    "causal": "encoder-decoder",
    "prefix": "causal",
    "causal, positions anew": "causal",
    "prefix, positions anew": "prefix",
}
runs = pd.DataFrame(load_record("stacks-multi30k")["runs"])
runs = runs[runs["seed"] > 0]  # seed 0 chose the rates
by_row = runs.set_index("row")
is_prefix = by_row.index.str.startswith("prefix")
assert by_row.loc[is_prefix, "bleu"].max() < by_row.loc[~is_prefix, "bleu"].min()  # the title
titled(
    rival_dots(runs, RIVALS),
    "Every prefix run scores below every other run",
    "Each point is a run, the tick a row's mean, the open diamond the mean of the row that it is "
    "compared with.",
)

# %%
anew = "prefix, positions anew"
more = [(anew, "causal, positions anew"), (anew, "encoder-decoder")]
differences = []
for row, rival in [*RIVALS.items(), *more]:
    own, other = by_row.loc[row], by_row.loc[rival]
    by_score = [mean_difference(own[score], other[score]) for score in ("bleu", "loss")]
    differences.append([row, rival, *by_score])
columns = ["row", "compared with", "BLEU, difference", "loss, difference (nats a piece)"]
pd.DataFrame(differences, columns=columns).set_index("row")

# %% [markdown]
# Each interval (95%, Welch's: rows may vary unequally) comes from three runs a row.
#
# - **Two stacks or one.** The causal stack and the encoder-decoder differ by 0.03 BLEU, but the interval reaches 0.8 on either side. By the loss the encoder-decoder is ahead by 0.05. That interval begins at 0.00, and among twelve intervals this may be chance.
# - **Causal or prefix.** By the loss the prefix mask is worse in both forms, by BLEU clearly where positions go on, by 3.4. In T5, which was pretrained, prefix beat causal (Raffel et al. 2020).
# - **Positions anew** give the prefix mask 1.7 BLEU back, and leave it 1.7 behind the encoder-decoder. Under the causal mask no difference shows.
#
# The record doesn't say what longer training, larger models, or an encoder-decoder with equal *work* would give: one stack did about 1.7 times as much (next section).
#
# **Why is the prefix mask worse?** The encoder-decoder also reads both ways, and isn't behind the causal stack: something else must do harm. We change one thing at a time, and then two together, under both masks ([record](../results/prefix-causes-multi30k.json), by `python -m scripts.studies.prefix_causes --save`; three seeds, trained anew):
#
# - *own weights for the source*: one set of layers reads the source, another writes (so the layers have twice the weights);
# - *relative positions*: beside the positions, which stay, each layer and head adds a learned number to a score, one for each offset from −16 to 16;
# - *own weights and relative positions*: both;
# - *targets from position 128*: a target's positions no longer depend on its source's length;
# - *source asked, too*: each next token under the causal mask. The prefix mask would show it, so there 15% are hidden, which also spoils the source.
#
# What counts is the *lag*: how far the prefix mask is behind the causal one, with the same change and seed. A change that removes the whole cause closes it. **Predict.** Which does?

# %%
losses, bleu = by_mask(pd.DataFrame(load_record("prefix-causes-multi30k")["runs"]))
in_loss, in_bleu = losses.loc["prefix"] - losses.loc["causal"], bleu["causal"] - bleu["prefix"]
assert in_loss.loc["own weights and relative positions"].abs().max(axis=None) < 0.03  # the title
assert in_loss.loc["unchanged"][5].min() > 0.1  # the last pass
lag_panels(in_loss, in_bleu, "With own weights and relative positions no lag in loss opens")

# %%
bleu.groupby(["change", "sees"]).mean().unstack().sort_values("causal").round(1)

# %% [markdown]
# - **No change alone is shown to close the lag in BLEU:** under each, the prefix mask is behind with all three seeds. The intervals of *relative positions* and *source asked, too* still reach 0. The latter harms both masks, and asks less under the prefix mask, so its lag tells little.
# - **Two together leave none that we could see.** In BLEU a lag of 1 could hide in the interval.
#
# So reading both ways isn't enough to do the harm. But is the lag small just because both masks became better? This the record can't rule out: the better the causal mask, the smaller the lag (but for *source asked, too*). Only *targets from position 128* narrows it (by a third, in loss) without a better causal mask.
#
# In BLEU three seeds can't tell whether own weights, twice the layers' weights, are needed beside relative positions. No changed stack had a learning rate of its own. *Own weights* with *positions anew*, as in the encoder-decoder, wasn't run.
#
# ## Side by side
#
# > **In short.** Mask and labels say what each variant is for. What each costs follows from counting.
#
# The multiplications of one pass follow from the shapes. A layer's matrices have $4D^2 + 2DF$ weights, and each is used once a token. Attention needs 2D products for each pair of positions, masked ones included. We leave out the generator: VD for each question. A cache holds a key and a value, 2D numbers, for each token and layer that is attended to.


# %%
def stack_products(N: int, D: int, d_ff: int, n: int) -> int:
    """Multiplications of N layers over a row of n tokens, without the generator."""
    matrices = n * (4 * D * D + 2 * D * d_ff)
    attention = 2 * D * n * n
    return N * (matrices + attention)


def pair_products(N: int, D: int, d_ff: int, S: int, T: int) -> int:
    """Multiplications of an encoder-decoder of N + N layers over S and T tokens, without the generator."""
    matrices = (S + T) * (4 * D * D + 2 * D * d_ff)
    across = (S + T) * 2 * D * D  # queries and outputs for T positions, keys and values for S
    attention = 2 * D * (S * S + T * T + S * T)
    return N * (matrices + across + attention)


# %% [markdown]
# **Predict.** Say S = 20, T = 19, as captions have on average. With equally many weights, which does more work for a pair, and by what factor?

# %%
D, d_ff, V, S, T = 64, 128, 2000, 20, 19
stack_work, pair_work = stack_products(5, D, d_ff, S + T), pair_products(2, D, d_ff, S, T)
generator = V * D * T
print(f"one stack: {stack_work / pair_work:.1f} times the multiplications, {5 / 2} times the cache")
print(f"with the generator: {(stack_work + generator) / (pair_work + generator):.1f} times")
layered = "encoder: all; decoder: the past; across: all"
variants = [
    ("encoder alone", "all", "hidden tokens", "judging", stack_products(5, D, d_ff, S), 0),
    ("decoder alone", "the past", "next token", "writing", stack_products(5, D, d_ff, T), 5 * T),
    ("one stack, pairs", "past (and source)", "target", "translating", stack_work, 5 * (S + T)),
    ("encoder-decoder", layered, "target", "translating", pair_work, 2 * (S + T)),
]
columns = ["variant", "sees", "asked", "good for", "multiplications", "cached tokens × layers"]
table = pd.DataFrame(variants, columns=columns).set_index("variant")
table.assign(multiplications=table["multiplications"].map("{:,}".format))

# %% [markdown]
# One stack does about twice the work: every token passes five layers, and in the encoder-decoder only the two of its side.
#
# A decoder alone has advantages: any text trains it, with a question at each token, and a shared beginning can be read once (exercise 3).
#
# ## Summary
#
# - One layer serves all. The mask says what it sees, the labels say what it is asked.
# - Hidden words train a model that sees both ways. Trained further with a hundred labels, such models made three tenths of a bag of words' errors.
# - In one stack, mind positions behind padding, and questions that show their answer.
# - One causal stack showed no clear difference from two in BLEU. In BLEU the prefix mask was worse where positions go on. With own weights for the source and relative positions the two masks scored alike. Equally many weights are not equal work.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Hide whole words
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# When a word falls into three pieces and one is hidden, the other two give it away. ids (T,) are one sentence; starts (T,) is True where a piece begins a word. Choose each *word* with probability 15%. All its pieces become `gap`, and the labels hold them (`PAD` elsewhere). Special tokens (up to `EOS`) belong to no word. Leave 80/10/10 aside. (`solution("hide_words")` shows ours.)


# %%
def hide_words(
    ids: Tensor, starts: Tensor, gap: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids (T,) with whole words hidden, and the labels (T,)."""
    ...


check(hide_words)

# %% [markdown]
# ### Exercise 2 · Has it seen no label?
#
# *think · difficulty ●●○ · worth ●●● · 10 minutes*
#
# Nobody told the masked model which captions are plural. Has it really seen no label? Which training would tell how much of its success is practice?
#
# <details><summary>An answer</summary>
#
# It has: each hidden verb answers this question. Train another masked model that reads our list's verbs, but is never asked for one. Then give both encoders the same labels.
#
# </details>
#
# ### Exercise 3 · A prefix and a cache
#
# *think · difficulty ●●○ · worth ●●● · 5 minutes*
#
# A chat sends the same long instruction before every question, and both belong to the prefix. Under which mask can the instruction's keys and values be kept from one question to the next?
#
# <details><summary>An answer</summary>
#
# Under the causal one: the instruction's vectors depend on the instruction alone. Under the prefix mask they look at the question as well, and must be computed again.
#
# </details>
#
# Next: [Chapter 19 · Ablations](ch19_ablations.ipynb)
