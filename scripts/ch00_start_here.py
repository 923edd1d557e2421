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
# After this chapter you know what a Transformer is made of, and you have followed a German sentence through a trained model, from letters to English, with the shape of every array on the way.
#
# | | |
# |---|---|
# | In the paper | §1 and §2 (why attention), Figure 1 (the whole machine) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 15 minutes to read, 30 with the code; a quarter of a minute to run on a CPU |
# | After | [Chapter 1 · Attention](ch01_attention.ipynb) |
#
# *If you read only three cells:* your own sentence in "A sentence, translated", the picture in "What you will build", the table in "The whole way, with its shapes".

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %% [markdown]
# ## A sentence, translated
#
# A Transformer trained in [chapter 9](ch09_training_run.ipynb) reads a German sentence and writes an English one, offline.

# %%
from scripts import ROOT
from scripts.ch08_decoding import plain_translate
from scripts.core.models import load_model

translator = load_model(ROOT / "models" / "multi30k-de-en")
mine = "Eine Frau mit einem roten Hut liest am Strand ein Buch."
plain_translate(translator, [mine])[0]

# %% [markdown]
# Put a sentence of your own into `mine` and run the cell again. Describe what a photograph might show: the model was trained on 29,000 captions.
#
# You need some Python, matrix products and gradients. This chapter uses code that later chapters build: look at the shapes, not at every line.
#
# Six letters name sizes in all chapters. A comment such as `# (B, S, D)` gives the shape of what its line makes.
#
# | letter | size of |
# |---|---|
# | **B** | the batch: sentences handled at once |
# | **S** | the source sentence, in tokens |
# | **T** | the target sentence, in tokens |
# | **D** | a token's vector, `d_model` |
# | **H** | attention heads |
# | **V** | the vocabulary, in tokens |

# %%
import math

import pandas as pd
import torch
from torch import Tensor

from scripts.book.charts import heatmap, titled
from scripts.book.exercises import check
from scripts.book.figures.model import architecture_chart
from scripts.book.machine import machine_report
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch03_embeddings_and_positions import sinusoids
from scripts.ch06_training import BOS, greedy_decode
from scripts.ch07_multi30k import source_ids
from scripts.core.models import Trained

# %%
torch.set_default_dtype(torch.float64)  # so that every check can ask for many digits

# %% [markdown]
# ## Why attention
#
# > **In short.** Read a page, shut the book and translate from memory: that is how a recurrent translator of 2014 worked. It kept one vector. Attention leaves the book open.
#
# Before 2017, a sentence was usually read by a recurrent network. It keeps a state $h$ and takes in one word at a time, as a vector $x_t$:
#
# $$ h_t = f(h_{t-1}, x_t), \qquad x_t, h_t \in \mathbb{R}^{D},\quad t = 1 \dots S $$
#
# This causes two problems. **Memory:** the last state $h_S$ has $D$ numbers, whether the sentence has five words or fifty. A translator that starts from $h_S$ alone may get worse as sentences get longer. **Time:** $h_{50}$ can't be computed before $h_{49}$, so the words of a sentence can't be read in parallel (§1).
#
# In 2014 Bahdanau et al. gave such translators (Sutskever et al.; Cho et al.) attention, a look back at every state, and solved the first problem. ByteNet (Kalchbrenner et al. 2016) and ConvS2S (Gehring et al. 2017) use convolutions, which work in parallel, but distant words are several layers apart. The **Transformer** (Vaswani et al. 2017) uses attention alone: any two words are one step apart, and all are handled at once. The price: every word looks at every word, so the work grows with $S^2$ ([chapter 1](ch01_attention.ipynb)).

# %% [markdown]
# ## What you will build
#
# > **In short.** The encoder turns German tokens into vectors that know their context. The decoder writes English, one token at a time, and looks at those vectors whenever it needs them.

# %%
titled(
    architecture_chart(),
    "The Transformer",
    "Read each column from the bottom. A pale frame is a layer, and there are N of them, one above the other. "
    "Lines that pass by a box are residual connections. Dark chips are masks.",
    wrap=100,
)

# %% [markdown]
# This is the paper's drawing, with N = 6 layers. The model below has 2, and it normalises the *input* of each box (chapters 4 and 5). A residual connection carries a box's input past the box and adds it to the result. A mask says what each position may look at.
#
# - **Self-attention, causal self-attention and cross-attention are one class.** They differ in who asks, who is asked, and the mask.
# - **Between embedding and generator, each box takes and returns vectors of width D.** So layers can be stacked, and results added.

# %% [markdown]
# ## One sentence, from letters to English
#
# > **In short.** Text becomes tokens, tokens become ids, ids become vectors. The vectors look at one another. The last vector gives every token of the vocabulary a probability, and one token is chosen. This repeats until the model says stop.
#
# We follow a sentence through `models/sample-de-en`, a smaller model, trained on 6,000 pairs generated by a grammar ([chapter 7](ch07_multi30k.ipynb)), without our sentence.

# %%
trained = load_model(ROOT / "models" / "sample-de-en")
model, tokenizer = trained.model.double(), trained.tokenizer
text = "Ein freundlicher Musiker hat einen Hammer mitgenommen."

# %% [markdown]
# Word for word, this says *a friendly musician has a hammer taken-along*. The verb, *mitgenommen*, comes last; English needs it earlier, as two words.
#
# ### Characters to tokens to ids
#
# The vocabulary was learned from the training text: common words are one token, rare ones are built from several pieces ([chapter 7](ch07_multi30k.ipynb)). The sign ▁ marks where a word begins.
#
# **Predict.** The sentence has seven words. How many pieces will it become?

# %%
pieces = tokenizer.pieces(text)
src = torch.tensor([source_ids(text, tokenizer)])  # (B, S): the pieces' ids, and one for the end
print(len(text), "characters")
print(len(pieces), "pieces:", " | ".join(pieces))
print(src.size(1), "ids:   ", src[0].tolist())

# %% [markdown]
# **Pitfall.** A word isn't a token. The third id is the third word only if no word before it was split. To count words, count the marks ▁.
#
# ### Ids to vectors
#
# An id is a row number in a table of $V$ rows with $D$ numbers each. The row is scaled by $\sqrt D$. Then a pattern of waves is added that says "you are at place 3" ([chapter 3](ch03_embeddings_and_positions.ipynb)).

# %%
embedded = model.src_embed(src)  # (B, S, D)
B, S, D = embedded.shape
by_hand = model.src_embed[0].lut.weight[src] * math.sqrt(D) + sinusoids(S, D)
torch.testing.assert_close(embedded, by_hand)

# %% [markdown]
# ### The encoder: vectors that know their context
#
# The encoder keeps the shape. What changes is what a row knows.
#
# **Predict.** We replace the full stop at the end with an exclamation mark. In the embedded sentence one row changes. How many rows change in the encoder's output, the *memory*?

# %%
memory = model.encode(src, padding_mask(src))  # (B, S, D)
changed = src.clone()
changed[0, -2] = tokenizer.encode("!")[-1]
for name, before, after in (
    ("embedded sentence", embedded, model.src_embed(changed)),
    ("memory", memory, model.encode(changed, padding_mask(changed))),
):
    rows = (after - before).abs().amax(dim=-1) > 1e-9  # (B, S)
    print(f"rows changed in the {name}: {rows.sum()} of {S}")

# %% [markdown]
# All of them. Each row still stands for its token, but it has looked at all the others.
#
# ### The decoder: one token at a time
#
# The decoder starts with `<s>`, the sign for "begin", and asks which token comes next. The answer is V numbers, the *logits*, one for each token of the vocabulary. Softmax turns them into probabilities. We take the likeliest token, append it, and ask again, until the answer is `</s>`, "end". This is *greedy decoding*.

# %%
written = greedy_decode(model, src, padding_mask(src), max_len=40)  # (B, T)
english = tokenizer.decode(written[0].tolist())
print(written[0].tolist())
print(english)

# %% [markdown]
# Once the ids are known, one call computes all T steps. The causal mask keeps each step from seeing later ones, so the probabilities are the same as one step at a time. Training relies on this ([chapter 6](ch06_training.ipynb)). The first eight steps:


# %%
def next_token_probabilities(trained: Trained, src: Tensor, written: Tensor) -> Tensor:
    """p(next token) at every step of `written`: src (1, S), written (1, T) ids, to (1, T, V).

    Step t is given the source and the tokens before t. `written` carries no start symbol.
    """
    start = torch.full_like(written[:, :1], BOS)  # (1, 1)
    so_far = torch.cat((start, written[:, :-1]), dim=1)  # (1, T)
    with torch.no_grad():
        vectors = trained.model(src, so_far, padding_mask(src), subsequent_mask(so_far.size(1)))
        return trained.model.generator(vectors).softmax(dim=-1)  # (1, T, V)


# %%
probabilities = next_token_probabilities(trained, src, written)  # (B, T, V)
assert torch.equal(probabilities.argmax(dim=-1), written)  # the same choices, made all at once
for t in range(written.size(1)):  # and the same numbers: the decoder gets only what precedes t
    alone = next_token_probabilities(trained, src, written[:, : t + 1])[:, t]  # (B, V)
    torch.testing.assert_close(alone, probabilities[:, t])

# %%
piece_of = tokenizer.processor.id_to_piece
rows = []
for t, (best, second) in enumerate(probabilities[0, :8].topk(2).indices.tolist()):
    p, q = probabilities[0, t, [best, second]].tolist()
    before = "<s> " + tokenizer.decode(written[0, :t].tolist())
    rows.append((before, piece_of(best), f"{p:.2f}", piece_of(second), f"{q:.2f}"))
pd.DataFrame(rows, columns=["written so far", "likeliest next", "p", "second", "p of the second"])

# %% [markdown]
# No choice gets much more than 0.9, although the second gets almost nothing: the model was trained never to be quite sure (*label smoothing*, [chapter 6](ch06_training.ipynb)).
#
# ### Where did it look?
#
# Cross-attention keeps its weights, (B, H, T, S): for each English token, how much the decoder looked at each German one. We average over the heads of the last layer, and join the pieces into words.


# %%
def by_words(weights: Tensor, target: list[str], source: list[str]) -> tuple[Tensor, ...]:
    """Attention between pieces (T, S) as attention between words; with the words of both sides.

    A word's row is that of its first piece, because there the word is chosen; its column is the
    sum of its pieces' columns. So rows still sum to 1.
    """

    def grouped(pieces: list[str]) -> list[list[int]]:
        words: list[list[int]] = []
        for i, piece in enumerate(pieces):
            if words and piece[0].isalnum():  # no ▁: it continues the word before
                words[-1].append(i)
            else:
                words.append([i])
        return words

    rows, columns = grouped(target), grouped(source)
    first = weights[[word[0] for word in rows]]  # (words, S)
    looks = torch.stack([first[:, word].sum(dim=1) for word in columns], dim=1)
    english = ["".join(target[i] for i in word).lstrip("▁") for word in rows]
    german = ["".join(source[i] for i in word).lstrip("▁") for word in columns]
    return looks, english, german


# %% [markdown]
# **Predict.** When the model writes *taken* and *along*, where in the German sentence does it look? And when it goes on with *a hammer*?

# %%
attn = model.decoder.layers[-1].src_attn.attn  # (B, H, T, S)
english_pieces = [piece_of(i) for i in written[0].tolist()]
titled(
    heatmap(
        *by_words(attn[0].mean(dim=0), english_pieces, [*pieces, "</s>"]),
        row_title="word being written",
        column_title="word looked at",
        value_title="weight",
        domain=(0, 1),
    ),
    "An order that nobody taught",
    "Each row sums to 1. Down to 'has' most weight follows the diagonal. Then it jumps to the end, "
    "to fetch the verb, and comes back for the hammer. Not all of it fetches a word: 'taken' puts "
    "0.25 on the full stop, and '.' puts 0.72 on </s>.",
    wrap=74,
)

# %% [markdown]
# ### The whole way, with its shapes
#
# Here S and T happen to be equal.

# %%
steps = [
    ("characters", "letters and blanks", "(characters,)", (len(text),)),
    ("tokens", "pieces of words", "(S − 1,)", (len(pieces),)),
    ("ids", "row numbers; </s> appended", "(B, S)", src.shape),
    ("vectors", "table row × √D + position", "(B, S, D)", embedded.shape),
    ("memory", "vectors in context", "(B, S, D)", memory.shape),
    ("cross-attention", "who looks where, each head", "(B, H, T, S)", attn.shape),
    ("probabilities", "for each token of V", "(B, T, V)", probabilities.shape),
    ("English ids", "the likeliest, one by one", "(B, T)", written.shape),
    ("English", english, "(characters,)", (len(english),)),
]
pd.DataFrame(
    [(step, what, letters, str(tuple(shape))) for step, what, letters, shape in steps],
    columns=["step", "what it holds", "shape", "here"],
)

# %% [markdown]
# ### What a translator doesn't know
#
# Back to `translator`, the larger model.
#
# **Pitfall.** The model never refuses: given a sentence unlike any caption, it still writes something. High probabilities prove nothing, but low ones may be a warning.
#
# **Predict.** The second sentence below says that the federal government passed a law on pensions. What will the model make of it, and how sure will it be?

# %%
translator.model.double()  # digits as in the rest of the chapter
for question in (mine, "Die Bundesregierung beschloss ein Gesetz über die Rentenversicherung."):
    ids = torch.tensor([source_ids(question, translator.tokenizer)])  # (B, S)
    found = greedy_decode(translator.model, ids, padding_mask(ids), max_len=40)  # (B, T)
    sure = next_token_probabilities(translator, ids, found).amax(dim=-1).mean()  # over T
    print(translator.tokenizer.decode(found[0].tolist()), f"(mean probability {sure:.2f})")

# %% [markdown]
# ## How to read this series
#
# Each chapter is also a Python script in `scripts/`, from which later chapters import. So an `import` tells you which chapter explains a name.
#
# Each idea comes first **In short**, then as a formula, as code with a check, and as a picture. A **Pitfall** is a common mistake, with a way to notice it. At **Predict**, stop and guess before you run the next cell. Every cell without `def` is there to be changed.
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
# Everything runs on a CPU. A GPU matters only for the long training of chapter 9.

# %%
# NBVAL_IGNORE_OUTPUT
machine_report()

# %% [markdown]
# ## Summary
#
# - Attention keeps a vector for each word and connects any two in one step. The Transformer is an encoder and a decoder built from it.
# - The decoder writes one token at a time.
#
# ## What the paper did that we don't
#
# - It trained on WMT 2014, millions of sentence pairs; our corpora are smaller.
# - It translated *from* English; we translate into English, so that more readers can judge the result.
#
# ## Exercises
#
# A *code* exercise has a stub: write its body and run the cell. `check` says nothing if your function is right, and otherwise what is wrong and why. `solution` comes from `scripts.book.exercises`.
#
# ### Exercise 1 · Pieces to text
#
# *code · difficulty ●○○ · worth ●○○ · 5 minutes*
#
# Write `as_text(pieces)`, which turns `pieces` (perhaps none) back into a text. `solution("as_text")` shows ours.


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
# ### Exercise 3 · Where it fails
#
# *project · difficulty ●●○ · worth ●●● · 90 minutes*
#
# Find a sentence of simple words on which a model fails. Look at its table of choices: at which step does it go wrong, and was it sure? Collect ten such sentences.
#
# Next: [Chapter 1 · Attention](ch01_attention.ipynb)
