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
# After this chapter you have followed a German sentence through a trained Transformer, seen what its heads look at, and found by experiment which vector decides between two meanings of a word.
#
# | | |
# |---|---|
# | In the paper | §1 and §2 (why attention), Figure 1 (the whole machine) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 15 minutes to read, 30 with the code; a quarter of a minute to run on a CPU |
# | After | [Chapter 1 · Attention](ch01_attention.ipynb) |
#
# *If you read only three cells:* your own sentence in "A sentence, translated", the picture in "What you will build", the bars in "Where does the meaning sit?".

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %% [markdown]
# ## A sentence, translated
#
# This Transformer was trained in [chapter 9](ch09_training_run.ipynb). It reads German and writes English, offline.

# %%
from scripts import ROOT
from scripts.ch08_decoding import plain_translate
from scripts.core.models import load_model

translator = load_model(ROOT / "models" / "multi30k-de-en")
mine = "Eine Frau mit einem roten Hut liest am Strand ein Buch."
plain_translate(translator, [mine])[0]

# %% [markdown]
# **Try it.** Put a sentence of your own into `mine` and run the cell again. Describe what a photograph might show: the model learned from 29,000 captions. It never refuses.
#
# You need some Python, matrix products and gradients. Later chapters build what this one uses: look at the shapes, not at every line.
#
# Six letters name sizes in all chapters. A comment such as `# (B, S, D)` gives the shape of what its line makes.
#
# | letter | size of | in this model |
# |---|---|---|
# | **B** | the batch: sentences handled at once | as you like |
# | **S** | the source sentence, in tokens | 7 below |
# | **T** | the target sentence, in tokens | grows by one a step |
# | **D** | a token's vector, `d_model` | 256 |
# | **H** | attention heads | 8 |
# | **V** | the vocabulary, in tokens | 8,192 |

# %%
import pandas as pd
import torch
from torch import Tensor

from scripts.book.charts import bars, heatmap, titled
from scripts.book.exercises import check
from scripts.book.figures.model import architecture_chart
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
# > **In short.** The encoder turns German tokens into vectors that know their context: the memory. The decoder writes English, one token at a time, and looks at the memory whenever it needs to.

# %%
titled(
    architecture_chart(),
    "One stack reads, the other writes",
    "Read each column from the bottom. A pale frame is a layer; this translator has N = 3 of them, one "
    "above the other, the paper 6. Lines past a box are residual connections. Dark chips are masks.",
    wrap=100,
)

# %% [markdown]
# A *residual connection* carries a box's input past the box and adds it to the result. A *norm* brings vectors to one scale; the paper's Figure 1 has it after the addition ([chapter 5](ch05_norms_and_first_steps.ipynb) compares). A *mask* says what each position may look at.
#
# - **Self-attention, causal self-attention and cross-attention are one class.** They differ in who asks, who is asked, and the mask.
# - **Between embedding and generator, each box takes and returns vectors of width D.** So layers can be stacked, and results added.
#
# ### Why attention
#
# Read a page, shut the book and translate from memory: so worked a recurrent translator of 2014. It read word after word and kept a single vector, for five words or fifty.
#
# Bahdanau et al. (2014) left the book open: *attention* looks back at every word's vector. The **Transformer** (Vaswani et al. 2017) uses attention alone: any two words are one step apart, and all are read at once. The price: every word looks at every word, so the work grows with $S^2$ ([chapter 1](ch01_attention.ipynb)).

# %% [markdown]
# ## One sentence, from letters to English
#
# > **In short.** Text becomes tokens, tokens become ids, ids become vectors. The vectors look at one another. From them the decoder makes a probability for every token of the vocabulary, and the likeliest is written.
#
# In our sentence a man carries a basket, or wears it: *trägt* can mean either.

# %%
text = "Ein Mann trägt einen Korb."
pieces = [*tokenizer.pieces(text), "</s>"]  # </s> stands for the end
src = torch.tensor([source_ids(text, tokenizer)])  # (B, S)
print(f"{len(text)} characters, {len(pieces)} pieces:", " | ".join(pieces))
print("their ids:", src[0].tolist())

# %% [markdown]
# A common word is one piece, a rare one several; ▁ marks where a word begins ([chapter 7](ch07_multi30k.ipynb)). An id is a row number in a table of V vectors, and each place has a pattern of its own that is added ([chapter 3](ch03_embeddings_and_positions.ipynb)).
#
# ### The encoder: vectors that know their context
#
# **Predict.** We replace the basket (*Korb*) by a hat (*Hut*). In the embedded sentence one row changes. How many of the seven rows change in the encoder's output, the *memory*?

# %%
hat = torch.tensor([source_ids("Ein Mann trägt einen Hut.", tokenizer)])  # (B, S)
embedded, memory = model.src_embed(src), model.encode(src, None)  # (B, S, D) both
for name, before, after in (
    ("embedded sentence", embedded, model.src_embed(hat)),
    ("memory", memory, model.encode(hat, None)),
):
    rows = (after - before).abs().amax(dim=-1) > 1e-9  # (B, S)
    print(f"rows changed in the {name}: {rows.sum()} of {len(pieces)}")

# %% [markdown]
# All seven rows of the memory change. Each still stands for its token, but it has looked at all the others.
#
# ### The decoder: one token at a time
#
# The decoder starts with `<s>`, "begin", and asks which token comes next. The answer is V numbers, the *logits*. Softmax turns them into probabilities. The likeliest token is written, and the decoder asks again, until the answer is `</s>`. This is *greedy decoding*. All that the decoder knows of the German is the memory:


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
# We stop where *A man is* is written.

# %%
so_far = torch.tensor([[BOS, *tokenizer.encode("A man is")]])  # (B, T)
vectors = model.decode(memory, None, so_far, subsequent_mask(so_far.size(1)))  # (B, T, D)
weights = torch.stack([layer.src_attn.attn for layer in model.decoder.layers])  # (N, B, H, T, S)
probabilities = model.generator(vectors).softmax(dim=-1)  # (B, T, V)
best = probabilities[0, -1].topk(3)
for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True):
    print(f"{tokenizer.processor.id_to_piece(i)} {p:.2f}")

# %% [markdown]
# The decoder has 3 layers of 8 heads. Cross-attention keeps its weights, (B, H, T, S): how much each head looked at each German piece, for each English one.
#
# **Predict.** To choose between *carrying* and *wearing*, which pieces would you look at? Will all 24 heads look at the same ones?

# %%
looks = weights[:, 0, :, -1]  # (N, H, S): the last step of the only sentence
words = [piece.lstrip("▁") for piece in pieces]
most = [words[i] for i in looks.argmax(dim=-1).flatten()]
print("what 24 heads look at most:", {word: most.count(word) for word in words})
chosen = {"layer 1, head 5": (0, 4), "layer 1, head 4": (0, 3), "layer 1, head 2": (0, 1)}
chosen["layer 2, head 6"] = (1, 5)
four = torch.stack([looks[place] for place in chosen.values()])  # (4, S)
verb, thing, article, parked = four
assert verb[2] > 0.9 and thing[4] > 0.9 and article[3] > 0.9 and parked[5:].sum() > 0.6
titled(
    heatmap(four, list(chosen), words, value_title="weight", domain=(0, 1), cell=54),
    "Four heads, four answers, at one step",
    "Each row sums to 1. One head looks at the verb, one at the thing carried, one at the article. "
    f"The last puts {parked[5:].sum():.2f} on the full stop and </s>.",
    wrap=80,
)

# %% [markdown]
# The heads don't agree, so an average over them would show what none of them does. Of the 24, 13 look at the verb most, and 6 at the basket. The last of the four *parks*: softmax must put its weight somewhere. We chose four that differ; [chapter 15](ch15_looking_inside.ipynb) looks at all.
#
# ## Where does the meaning sit?
#
# > **In short.** A map of weights shows where a head looked. To learn what it found there, change what lies there.
#
# Take the memory of *Ein Mann trägt einen **Korb**.* and replace one of its seven rows by the same row of *Ein Mann trägt einen **Hut**.* Then let the decoder write. But for the thing itself, row 4, each row stands for the same piece in both sentences.
#
# **Predict.** Which row, if any, turns *carrying a basket* into *wearing a basket*?


# %%
def memory_of(trained: Trained, texts: list[str]) -> Tensor:
    """The memories (B, S, D) of texts that have equally many pieces."""
    src = torch.tensor([source_ids(text, trained.tokenizer) for text in texts])  # (B, S)
    return trained.model.encode(src, None)


def with_row(memory: Tensor, other: Tensor, row: int) -> Tensor:
    """A copy of `memory` (B, S, D) in which one row, of each sentence, comes from `other`."""
    changed = memory.clone()
    changed[:, row] = other[:, row]
    return changed


# %%
for row, word in enumerate(words):
    changed = with_row(memory, model.encode(hat, None), row)
    print(f"row {row}  {word:7}{write_from(translator, changed)[0]}")

# %% [markdown]
# The row of *trägt* does it, although both sentences have the same *trägt* there. So the encoder had written news of the hat into the verb's row.
#
# One sentence may be luck. So we take 13 things, carried by six people, and keep the captions that the translator renders with *carrying*. As a control, *trägt* gets a row from another *carrying* caption. If the row held only its own piece, no caption would change; if any foreign row confused the decoder, the control would change, too.

# %%
people = ["Ein Mann", "Eine Frau", "Ein Junge", "Ein Mädchen", "Ein Arbeiter", "Ein Kind"]
things = "einen Korb, einen Ball, eine Kiste, ein Kind, einen Hund, einen Eimer, eine Leiter, "
things += "einen Koffer, ein Fahrrad, eine Tasche, einen Stock, ein Baby, einen Stuhl"
captions = [f"{who} trägt {what}." for what in things.split(", ") for who in people]
first = write_from(translator, memory_of(translator, captions))
carried = [de for de, en in zip(captions, first, strict=True) if "carrying" in en]
with_hats = [" ".join([*caption.split()[:3], "einen Hut."]) for caption in carried]
theirs, hats = memory_of(translator, carried), memory_of(translator, with_hats)  # (B, S, D)
others = theirs.roll(6, dims=0)  # six captions on: of another thing

swaps = {f"{word}, from a hat": (hats, row) for row, word in enumerate(words) if row != 4}
swaps["trägt, from another load"] = (others, 2)
counts = {
    name: sum("wearing" in en for en in write_from(translator, with_row(theirs, *swap)))
    for name, swap in swaps.items()
}
verb, control = counts["trägt, from a hat"], counts["trägt, from another load"]
assert (len(carried), verb, control) == (68, 58, 0) and sorted(counts.values())[-2] == 2
titled(
    bars(pd.DataFrame(counts.items(), columns=["row", "captions"]), "row", "captions", end=68),
    f"One row makes {verb} of {len(carried)} carriers wear their load",
    "Captions that say 'wearing' after one row of their memory was exchanged. Before, all said 'carrying'.",
    wrap=70,
)

# %% [markdown]
# The row of *trägt* changes 58 of 68 captions. Any other row changes two at most, the full stop and `</s>` included, where a head parked; the control changes none. (Row 4 would bring the hat itself. Ten captions didn't say *carrying*; all six chairs, *Stuhl*, are worn.) The hat is a strong donor: twelve garments turn between 20 and 63 of the 68. And the place isn't the same in every sentence: in *Ein Mann, der einen Korb trägt, geht am Strand entlang.* and its like, the hat turns 10 of 62.
#
# Is it the verb's row alone, then? We try the other direction: clothes, and the row of *trägt* from a caption with a basket.

# %%
clothes = "einen Hut, einen Helm, eine Jacke, einen Mantel, eine Brille, ein Kleid, ein Hemd, "
clothes += "einen Schal, eine Maske, eine Uniform, eine Krawatte, eine Hose"
dressed = [f"{who} trägt {what}." for what in clothes.split(", ") for who in people]
baskets = [f"{who} trägt einen Korb." for _ in clothes.split(", ") for who in people]
changed = with_row(memory_of(translator, dressed), memory_of(translator, baskets), 2)  # (B, S, D)
worn = sum("wearing" in en for en in write_from(translator, changed))
assert worn == len(dressed) == 72
print(f"{worn} of {len(dressed)} still wear their clothes")

# %% [markdown]
# All 72 do. So the verb's row isn't all: from a hat it turns *carrying* into *wearing*, from a basket it turns no *wearing* into *carrying*. The decoder asks the thing, too, as two heads of the picture suggest. [Chapter 16](ch16_intervening.ipynb) goes on like this.
#
# ### The whole way

# %%
here = {
    "ids (B, S)": src,
    "vectors (B, S, D)": embedded,
    "memory (B, S, D)": memory,
    "cross-attention (B, H, T, S)": weights[0],
    "probabilities (B, T, V)": probabilities,
}
pd.Series(
    {name: str(tuple(x.shape)) for name, x in here.items()}, name="when 'A man is' is written"
).to_frame()

# %% [markdown]
# ## How to read this series
#
# Each chapter is also a script in `scripts/`: an `import` tells which chapter explains a name.
#
# A **Pitfall** is a common mistake and how to notice it. At **Predict**, stop and guess before you run the next cell. Every cell without `def` is there to be changed.
#
# **Rather write it yourself?** `make workbook` writes each chapter with its central definitions left for you. The checks below each tell whether yours is right.
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
#
# ## Your machine
#
# Everything runs on a CPU. A GPU matters only for chapter 9's long training.

# %%
# NBVAL_IGNORE_OUTPUT
machine_report()

# %% [markdown]
# ## Summary
#
# - The encoder makes a vector for each token, which knows the others. The decoder writes one token at a time and looks at these vectors.
# - Heads look at different things at one step. Where they look is a hint; an exchange of rows is a test.
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
# In the picture, find every place where information can pass from one position to another. Now cover the chip "no future". What would the model learn in training, and what would it write afterwards?
#
# <details><summary>An answer</summary>
#
# Only in the three attentions: all other boxes treat each token on its own. In training the decoder reads the right English, shifted by one place. Without the mask it can copy the next token: the loss falls to nearly nothing, and the model learns no German. When it writes alone, there is no later token to copy, and it writes nonsense.
#
# </details>
#
# ### Exercise 3 · Where does it sit here?
#
# *project · difficulty ●●○ · worth ●●● · 60 minutes*
#
# In sentences with *der einen Korb trägt*, the verb's row decides in few captions. Which rows do? Exchange two at once, or all but one. Add a control, and count.
#
# Next: [Chapter 1 · Attention](ch01_attention.ipynb)
