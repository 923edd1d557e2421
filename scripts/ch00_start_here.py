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
# After this chapter you have followed a German sentence through a trained Transformer, seen what its heads look at, and found by experiment which of its vectors decide between two meanings of a word.
#
# | | |
# |---|---|
# | In the paper | §1 and §2 (why attention), Figure 1 (the whole machine) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 15 minutes to read, 30 with the code; a quarter of a minute to run on a CPU |
# | After | [Chapter 1 · Attention](ch01_attention.ipynb) |
#
# *If you read only three cells:* your own sentence in "A sentence, translated", the picture in "What you will build", the last picture in "Where does the meaning sit?".

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %% [markdown]
# ## A sentence, translated
#
# This Transformer, trained in [chapter 9](ch09_training_run.ipynb), reads German and writes English, offline.

# %%
from scripts import ROOT
from scripts.ch08_decoding import plain_translate
from scripts.core.models import load_model

translator = load_model(ROOT / "models" / "multi30k-de-en")
mine = "Eine Frau mit einem roten Hut liest am Strand ein Buch."
plain_translate(translator, [mine])[0]

# %% [markdown]
# **Try it.** Put a sentence of your own into `mine` and run the cell again. Describe what a photograph might show: the model learned from 29,000 captions. It never refuses. From *Die Rente wird im nächsten Jahr erhöht.*, about pensions, it makes *The Sit is being lifted at the next to the next to the next.*
#
# You need some Python, matrix products and gradients. Later chapters build what this one uses.
#
# Six letters name sizes in all chapters. A comment such as `# (B, S, D)` gives the shape of what its line makes.
#
# | letter | size of | in this model |
# |---|---|---|
# | **B** | the batch: sentences handled at once | as you like |
# | **S** | the source sentence, in tokens | 7 below |
# | **T** | the target sentence, in tokens | grows by one a step |
# | **D** | a token's vector, `d_model` | 256 |
# | **H** | attention heads (below) | 8 |
# | **V** | the vocabulary, in tokens | 8,192 |

# %%
import pandas as pd
import torch
from torch import Tensor

from scripts.book.charts import heatmap, titled
from scripts.book.exercises import check
from scripts.book.figures.model import architecture_chart, exchange_chart
from scripts.book.machine import machine_report
from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import BOS, EOS
from scripts.ch07_multi30k import source_ids
from scripts.core.models import Trained

# %%
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)  # nothing is trained in this chapter
model, tokenizer = translator.model.double(), translator.tokenizer

# %% [markdown]
# ## What you will build
#
# > **In short.** The encoder turns German tokens into vectors that know their context: the memory. The decoder writes English, one token at a time, and looks at the memory.

# %%
titled(
    architecture_chart(),
    "One stack reads, the other writes",
    "Read each column from the bottom. A pale frame is a layer; this translator has N = 3 of them, one "
    "above the other, the paper 6. Lines past a box are residual connections. Dark chips are masks.",
    wrap=100,
)

# %% [markdown]
# A *residual connection* carries a box's input past the box and adds it to the result. A *norm* brings vectors to one scale; the paper's Figure 1 has it after the addition ([chapter 5](ch05_norms_and_first_steps.ipynb) compares). A *mask* says where each place may look.
#
# - **Self-attention, causal self-attention and cross-attention are one class.** They differ in who asks, who is asked, and the mask.
# - **Between embedding and generator, each box takes and returns vectors of width D.** So they can be stacked and added.
#
# ### Why attention
#
# Read a page, shut the book and translate from memory: so worked early recurrent translators. They kept a single vector, for five words or fifty.
#
# Bahdanau et al. (2014) left the book open: *attention* looks back at every word's vector. The **Transformer** (Vaswani et al. 2017) moves information between words by attention alone: any two words are one step apart, and all are read at once. The price: every word looks at every word, and this work grows with $S^2$ ([chapter 1](ch01_attention.ipynb)).

# %% [markdown]
# ## One sentence, from letters to English
#
# > **In short.** Text becomes tokens, tokens become ids, ids become vectors, which look at one another. From them the decoder makes a probability for every token, and the likeliest is written.
#
# In our sentence *trägt* can mean *carries* or *wears*.

# %%
text = "Ein Mann trägt einen Korb."
pieces = [*tokenizer.pieces(text), "</s>"]  # </s> stands for the end
src = torch.tensor([source_ids(text, tokenizer)])  # (B, S)
print(f"{len(text)} characters, {len(pieces)} pieces:", " | ".join(pieces))
print("their ids:", src[0].tolist())

# %% [markdown]
# A *piece* is a bit of text: a common word, or a part of a rare one; ▁ marks where a word begins ([chapter 7](ch07_multi30k.ipynb)). Pieces and marks such as `</s>` are the *tokens*. A *place* is where a token stands, here 0 to 6. A *row* is the vector at one place.
#
# The *embedding* takes a token's vector from a table and adds a pattern of its place ([chapter 3](ch03_embeddings_and_positions.ipynb)).
#
# ### The encoder: vectors that know their context
#
# **Predict.** We replace the basket (*Korb*) by a hat (*Hut*). In the embedded sentence one row changes. How many of the seven change in the encoder's output, the *memory*? Which changes most among the other six?

# %%
hat = torch.tensor([source_ids("Ein Mann trägt einen Hut.", tokenizer)])  # (B, S)
embedded, memory = model.src_embed(src), model.encode(src, None)  # (B, S, D) both
hat_memory = model.encode(hat, None)  # (B, S, D)
changes = {
    "embedded": (model.src_embed(hat) - embedded).norm(dim=-1) / embedded.norm(dim=-1),  # (B, S)
    "memory": (hat_memory - memory).norm(dim=-1) / memory.norm(dim=-1),
}
pd.DataFrame({name: change[0].numpy() for name, change in changes.items()}, pieces).round(2)

# %% [markdown]
# Each change is a share of the row's length. All seven rows of the memory change, since each has looked at the others. Among the other six, *trägt* changes most, by a third.
#
# ### The decoder: one token at a time
#
# The decoder starts with `<s>`, "begin", and asks which token comes next. The answer is V numbers, the *logits*. Softmax turns them into probabilities. In *greedy decoding* the likeliest token is written, and the decoder asks again, until the answer is `</s>`. All it knows of the German is the memory:


# %%
def write_from(trained: Trained, memory: Tensor, steps: int = 10) -> list[str]:
    """English for each memory (B, S, D), the likeliest token at every step, `steps` at most."""
    ids = torch.full((len(memory), 1), BOS)  # (B, 1)
    for _ in range(steps):
        vectors = trained.model.decode(memory, None, ids, subsequent_mask(ids.size(1)))  # (B, T, D)
        likeliest = trained.model.generator(vectors[:, -1]).argmax(dim=-1, keepdim=True)  # (B, 1)
        ids = torch.cat([ids, likeliest], dim=1)  # (B, T + 1)
        if (ids == EOS).any(dim=1).all():
            break
    return [trained.tokenizer.decode(row) for row in ids.tolist()]


# %%
english = write_from(translator, memory)[0]
assert english == plain_translate(translator, [text])[0]
english

# %% [markdown]
# ### One step, opened
#
# Stop after *A man is*.

# %%
so_far = torch.tensor([[BOS, *tokenizer.encode("A man is")]])  # (B, T)
vectors = model.decode(memory, None, so_far, subsequent_mask(so_far.size(1)))  # (B, T, D)
weights = torch.stack([layer.src_attn.attn for layer in model.decoder.layers])  # (N, B, H, T, S)
probabilities = model.generator(vectors).softmax(dim=-1)  # (B, T, V)
best = probabilities[0, -1].topk(3)
for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True):
    print(f"{tokenizer.processor.id_to_piece(i)} {p:.2f}")

# %% [markdown]
# The decoder has 3 layers of 8 heads. Cross-attention keeps its weights, (B, H, T, S): how much each head looked at each German token, for each English one.
#
# **Predict.** To choose between *carrying* and *wearing*, which pieces would you look at? Will all 24 heads agree?

# %%
looks = weights[:, 0, :, -1]  # (N, H, S): the last step of the only sentence
words = [piece.lstrip("▁") for piece in pieces]
most = [words[i] for i in looks.argmax(dim=-1).flatten()]
print("what 24 heads look at most:", {word: most.count(word) for word in words})
chosen = [(0, 4), (0, 3), (0, 1), (1, 5)]
names = [f"layer {layer + 1}, head {head + 1}" for layer, head in chosen]
four = torch.stack([looks[place] for place in chosen])  # (4, S)
verb, thing, article, last = four
assert verb[2] > 0.9 and thing[4] > 0.9 and article[3] > 0.9 and last[5:].sum() > 0.6
titled(
    heatmap(four, names, words, value_title="weight", domain=(0, 1), cell=54),
    "Four heads, four answers, at one step",
    "Each line sums to 1. One head looks at the verb, one at the thing carried, one at the article. "
    f"The last puts {last[5:].sum():.2f} on the full stop and </s>.",
    wrap=80,
)

# %% [markdown]
# The heads don't agree. Of the 24, 13 look at the verb most, and 6 at the basket; we chose four that differ. The last looks mostly at the end: perhaps it rests there ([chapter 15](ch15_looking_inside.ipynb) asks). On the site, the page *See it think* (`/walk/`) shows every number between, for your own sentence and with a better model.
#
# ## Where does the meaning sit?
#
# > **In short.** Weights show where a head looked. To learn what matters, change it and measure how far the answer moves.
#
# Take the memory of the basket's sentence, replace one of its seven rows by the hat's row at the same place, and let the decoder write.
#
# **Predict.** Which rows, if any, turn *carrying* into *wearing*?


# %%
def memory_of(trained: Trained, texts: list[str]) -> Tensor:
    """The memories (B, S, D) of texts that have equally many pieces."""
    src = torch.tensor([source_ids(text, trained.tokenizer) for text in texts])  # (B, S)
    return trained.model.encode(src, None)


def with_rows(memory: Tensor, other: Tensor, rows: list[int]) -> Tensor:
    """A copy of `memory` (B, S, D) in which some rows, of each sentence, come from `other`."""
    changed = memory.clone()
    changed[:, rows] = other[:, rows]
    return changed


# %%
for row, word in enumerate(words):
    changed = with_rows(memory, hat_memory, [row])
    print(f"row {row}  {word:7}{write_from(translator, changed)[0]}")

# %% [markdown]
# Two rows do. Row 4 is the hat's own. With row 2 the man wears a *basket*: the piece there is *trägt* in both sentences, but the encoder wrote something of the hat into its row.
#
# Greedy decoding shows only who wins, not by how much: with row 2, *wearing* has 0.49 and *carrying* 0.40. We measure the **gap**: the log probability of *wearing* minus that of *carrying*, after *A man is*. Above 0, *wearing* is likelier. One sentence may be luck, so six people get 12 loads each, or a hat, and rows are exchanged both ways. (This model wears chairs, so we leave them out.)
#
# **Predict.** A hat's rows move the gap up. Do a load's rows move it down as far? Is one of them enough to make *carrying* likelier?


# %%
def wearing_gap(trained: Trained, memory: Tensor, begun: Tensor) -> Tensor:
    """log p(wearing) − log p(carrying), as the token after `begun` (B, T), for each memory: (B,)."""
    vectors = trained.model.decode(memory, None, begun, subsequent_mask(begun.size(1)))  # (B, T, D)
    log_p = trained.model.generator(vectors[:, -1]).log_softmax(dim=-1)  # (B, V)
    (wearing,), (carrying,) = map(trained.tokenizer.encode, ("wearing", "carrying"))
    return log_p[:, wearing] - log_p[:, carrying]


# %%
people = {"Ein Mann": "A man", "Eine Frau": "A woman", "Ein Junge": "A boy"}
people |= {"Ein Mädchen": "A girl", "Ein Arbeiter": "A worker", "Ein Kind": "A child"}
things = "einen Korb, einen Ball, eine Kiste, ein Kind, einen Hund, einen Eimer, eine Leiter, "
things += "einen Koffer, ein Fahrrad, eine Tasche, einen Stock, ein Baby"
pairs = [(who, what) for what in things.split(", ") for who in people]
begun = torch.tensor([[BOS, *tokenizer.encode(f"{people[who]} is")] for who, _ in pairs])  # (B, T)
loads = memory_of(translator, [f"{who} trägt {what}." for who, what in pairs])  # (B, S, D)
hats = memory_of(translator, [f"{who} trägt einen Hut." for who, _ in pairs])  # (B, S, D)

# %%
places = ["0 ein(e)", "1 person", "2 trägt", "3 article", "4 thing", "5 full stop", "6 </s>"]
exchanged = {"none": [], **{name: [row] for row, name in enumerate(places)}}
exchanged |= {"2 and 4": [2, 4], "all": [*range(len(places))]}
gaps = {
    name: {
        "a load": wearing_gap(translator, with_rows(loads, hats, rows), begun),  # (B,)
        "a hat": wearing_gap(translator, with_rows(hats, loads, rows), begun),
    }
    for name, rows in exchanged.items()
}

# %%
means = pd.DataFrame(gaps).map(lambda gap: gap.mean().item()).T
way = (means - means.loc["none"]) / (means.loc["all"] - means.loc["none"])  # shares of the whole
halves, both, small = way.iloc[[3, 5]], way.loc["2 and 4"], way.iloc[[1, 2, 4, 6, 7]]
assert halves.stack().between(0.4, 0.5).all() and (small < 0.07).all(axis=None)
assert ((both - halves.sum()).abs() < 0.03).all()
titled(
    exchange_chart(means),
    "Verb and thing each hold nearly half of the decision",
    f"Mean gap over {len(pairs)} captions with a load, and as many with a hat, after some rows of their "
    "memory were exchanged. Left of 0 the decoder prefers 'carrying', right of it 'wearing'.",
    wrap=80,
)

# %%
wear = pd.DataFrame(gaps).map(lambda gap: int((gap > 0).sum())).T
other = loads.roll(6, dims=0)  # six captions on: the same person, another load
control = wearing_gap(translator, with_rows(loads, other, [2, 4]), begun)  # (B,)
assert (control < 0).all()
wear.loc[["none", "2 trägt", "4 thing", "2 and 4"]]

# %% [markdown]
# The table counts pairs, of 72, that prefer *wearing*. Loads begin at a mean gap of −2.1, hats at +4.1: the whole way is 6.2. The row of *trägt* goes 2.9 of it, the thing's row 2.6, any other 0.4 at most. Downwards the same rows go as far: 3.0, 2.6, 0.4. Together the two go 5.6: they add.
#
# So each goes about half way, to a gap near +1, where *wearing* still leads: 59 or 60 loads are worn, only five hats carried. With both, all 72 loads are worn and 67 hats carried. Greedy decoding would have shown a rule for one direction only.
#
# A control: with both rows of *another* load, all 72 stay at *carrying*. With eleven other garments, the verb's row goes 31 to 54% of the way, the thing's 38 to 58%. Another form of sentence differs (exercise 3). [Chapter 16](ch16_intervening.ipynb) works like this throughout.
#
# ## How to read this series
#
# Each chapter is also a script in `scripts/`: an `import` tells which chapter explains a name.
#
# A **Pitfall** is a common mistake and how to notice it. At **Predict**, stop and guess before you run the next cell. Every cell without `def` is there to be changed.
#
# `make workbook` leaves each chapter's central definitions for you to write, with checks below.
#
# ● marks the short way: in these chapters you build, train and judge a translator.
#
# | chapter | you leave with |
# |---|---|
# | **I · The model** | |
# | [1 · Attention](ch01_attention.ipynb) ● | attention by hand and in PyTorch |
# | [2 · Multi-head attention](ch02_multi_head_attention.ipynb) ● | what several heads are for |
# | [3 · Embeddings and positions](ch03_embeddings_and_positions.ipynb) ● | how a model knows order |
# | [4 · Encoder and decoder](ch04_encoder_decoder.ipynb) ● | the whole model on one screen |
# | [5 · Norms and first steps](ch05_norms_and_first_steps.ipynb) | residual connections, norms, initialisation |
# | **II · Training and translating** | |
# | [6 · Training](ch06_training.ipynb) ● | the loop, the loss, the schedule |
# | [7 · Multi30k](ch07_multi30k.ipynb) ● | captions, tokens, batches |
# | [8 · Decoding](ch08_decoding.ipynb) ● | beam search, sampling, a cache |
# | [9 · The training run](ch09_training_run.ipynb) ● | a translator trained, saved and resumed |
# | [10 · Judging](ch10_judging.ipynb) ● | BLEU, and whether a difference is real |
# | **III · Speed** | |
# | [11 · Where the time goes](ch11_where_the_time_goes.ipynb) | what limits a training step |
# | [12 · Going fast](ch12_going_fast.ipynb) | the same numbers, sooner |
# | [13 · Decoding fast](ch13_decoding_fast.ipynb) | the same sentences, sooner |
# | [14 · Leaving home](ch14_leaving_home.ipynb) | the model in a browser |
# | **IV · Understanding** | |
# | [15 · Looking inside](ch15_looking_inside.ipynb) | what heads do |
# | [16 · Intervening](ch16_intervening.ipynb) | what a head is worth |
# | [17 · A small GPT](ch17_small_gpt.ipynb) | the same layers as a writer |
# | [18 · One stack](ch18_one_stack.ipynb) | the same layers as a classifier |
# | [19 · Ablations](ch19_ablations.ipynb) | which parts matter |
# | [20 · Scaling](ch20_scaling.ipynb) | two laws of size and data |
# | [21 · Learning from models](ch21_learning_from_models.ipynb) | what a model learns from other models |
# | **V · Since 2017** | |
# | [22 · Today's block](ch22_todays_block.ipynb) | what replaced each part |
# | [23 · Long memory](ch23_long_memory.ipynb) | what a cache costs |
# | [24 · Experts](ch24_experts.ipynb) | many feed-forward layers; a token visits few |
# | **VI · All of it** | |
# | [25 · All of it on one page](ch25_one_page.ipynb) | the whole translator again, in one evening |
# | [26 · Your own pair](ch26_your_own_pair.ipynb) | two columns of sentences become a translator |
#
# ## Your machine
#
# Everything runs on a CPU. You need a GPU only for chapter 9's long training.

# %%
# NBVAL_IGNORE_OUTPUT
machine_report()

# %% [markdown]
# ## Summary
#
# - The encoder makes a vector for each token, which knows the others. The decoder looks at them and writes one token at a time.
# - Where heads look is a hint; an exchange of rows is a test. Verb and thing each hold nearly half of our decision.
#
# ## What the paper did that we don't
#
# - It trained on WMT 2014, millions of sentence pairs; our corpora are smaller.
# - It translated *from* English; we translate into English, which more readers can judge.
#
# ## Exercises
#
# A *code* exercise has a stub: write its body and run the cell. `check` is silent if your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Pieces to text
#
# *code · difficulty ●○○ · worth ●○○ · 5 minutes*
#
# Write `as_text(pieces)`, which turns `pieces` (perhaps none) back into a text. `solution("as_text")`, from `scripts.book.exercises`, shows ours.


# %%
def as_text(pieces: list[str]) -> str:
    """The text that `pieces` were cut from: ▁ marks where a word begins."""
    ...


check(as_text)

# %% [markdown]
# ### Exercise 2 · Where information passes
#
# *think · difficulty ●●○ · worth ●●● · 10 minutes*
#
# In the picture, find every box in which information can pass from one token to another. Now cover the chip "no future". What would the model learn in training, and what would it write afterwards?
#
# <details><summary>An answer</summary>
#
# Only in the three attentions: all other boxes treat each token on its own. In training the decoder reads the right English. Without the mask it copies the next token: the loss falls to nearly nothing, and it learns no German. Writing alone, it has nothing to copy, and writes nonsense.
#
# </details>
#
# ### Exercise 3 · Where does it sit here?
#
# *project · difficulty ●●○ · worth ●●● · 60 minutes*
#
# In sentences such as *Ein Mann, der einen Korb trägt, geht am Strand entlang.* the verb's row goes about a tenth of the way, the thing's half. Who holds the rest? Measure the gap after *A man*, and add a control.
#
# Next: [Chapter 1 · Attention](ch01_attention.ipynb)
