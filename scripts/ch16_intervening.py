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
# # Chapter 16 · Intervening
#
# After this chapter you can change a part of a running model, measure what that costs, and say when a map of attention tells what a head is worth.
#
# | | |
# |---|---|
# | In the paper | Figures 3 to 5 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), which show heads and test none |
# | Time | 20 minutes to read, 40 with the code; a minute to run on a CPU |
# | Before, after | [Chapter 15 · Looking inside](ch15_looking_inside.ipynb) · [Chapter 17 · A small GPT](ch17_small_gpt.ipynb) |
#
# *If you read only three cells:* the picture of *One road*, the chart of *Does the map tell?*, the chart of *One head alone*.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary, **N** layers; $d_k = D/H$.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures.understanding import (
    lens_chart,
    map_and_worth_chart,
    patch_chart,
    residual_stream,
    worth_chart,
)
from scripts.book.records import load_record
from scripts.book.verdict import pass_together
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import PAD, Batch, greedy_decode
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch08_decoding import dropout_off
from scripts.ch15_looking_inside import (
    Look,
    attention_layers,
    cross_word_weights,
    dossiers,
    error_rates,
    look_at,
    piece_label,
    pieces_of,
)
from scripts.core.models import load_model
from scripts.corpora.captions import aligned_pairs
from scripts.fast.searching import cached_greedy

# %%
torch.set_default_dtype(torch.float64)  # the same numbers on every machine
trained = load_model(ROOT / "models" / "multi30k-de-en")
model = trained.model
captions = aligned_pairs()
park = look_at(trained, captions[2].texts[0])

# %% [markdown]
# ## One road
#
# > **In short.** Each part of the model *adds* something to one vector. So there are three tools: cut what a part adds, patch the vector itself, or read early what it would say.
#
# In a pre-norm model (chapter 4) each position has one vector x, which goes through all layers. Each sublayer reads x and adds to it. The last norm and the generator read the sum. This x is called the **residual stream**.

# %%
residual_stream()

# %% [markdown]
# ## Cut
#
# > **In short.** To learn what a head is for, take it away and see what breaks.
#
# The heads of a layer say vectors of $d_k$ numbers, which stand side by side before $W^O$ (chapter 2). PyTorch lets us hook a function in front of that product. It may change what one head says. To *silence* a head is to put zeros there.


# %% tags=["yours"]
@contextmanager
def heads_changed(
    heads: Iterable[tuple[MultiHeadedAttention, int]], change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Inside the block some heads, each a layer and a number from 0, say something else.

    `change` gets what a head says at each position, (B, T, d_k), and returns what it says instead.
    """

    def before_output(linear: nn.Linear, inputs: tuple[Tensor], head: int, h: int) -> Tensor:
        parts = list(inputs[0].tensor_split(h, dim=-1))  # H of (B, T, d_k)
        parts[head] = change(parts[head])
        return torch.cat(parts, dim=-1)  # (B, T, D)

    with ExitStack() as hooks:
        for layer, head in heads:
            hook = partial(before_output, head=head, h=layer.h)
            hooks.enter_context(layer.project_output.register_forward_pre_hook(hook))
        yield


# %% [markdown]
# Check: a silent head is one whose columns of the output's weight are 0.

# %%
torch.manual_seed(0)
layer = model.decoder.layers[1].src_attn
output = layer.project_output
with torch.no_grad():
    x = torch.randn(2, 5, output.in_features)  # (B, T, D): all heads, side by side
    weight = output.weight.clone()  # (D, D)
    weight.unflatten(1, (layer.h, -1))[:, 3] = 0
    with heads_changed([(layer, 3)], torch.zeros_like):
        torch.testing.assert_close(output(x), F.linear(x, weight, output.bias))
    assert not torch.equal(output(x), F.linear(x, weight, output.bias))  # it speaks again

# %% [markdown]
# **Pitfall.** *A hook that nothing calls.* Our fast decoder reads the layer's weights and never calls the module, so the hook changes nothing. Every head would seem worthless. So check that something changed.

# %%
cross_heads = [(layer, i) for layer in attention_layers(model)["cross"] for i in range(layer.h)]
with heads_changed(cross_heads, torch.zeros_like):
    assert torch.equal(cached_greedy(model, park.src, None, 30), park.wanted)  # nothing changes
    blind = greedy_decode(model, park.src, None, 30)  # chapter 6's calls it
print("with cross-attention silent:", trained.tokenizer.decode(blind[0].tolist()))

# %% [markdown]
# Cut off from the source, the decoder still writes an English caption: it is a language model, too.
#
# ## What is a head worth?
#
# > **In short.** A head's worth is what its silence costs. The cost is small, so we need many sentences.
#
# BLEU notices a head only if a *word* changes. The probability of the reference moves with every change, and needs no search. So a head's *worth* is how much $-\log p$ of the reference goes up without it, under teacher forcing, in nats a token.


# %%
@torch.no_grad()
def reference_losses(model: EncoderDecoder, batch: Batch) -> Tensor:
    """−log p of each reference, in nats: (B,). Teacher forcing, no dropout, no smoothing."""
    with dropout_off(model):
        memory = model.encode(batch.src, batch.src_mask)
        x = model.decode(memory, batch.src_mask, batch.tgt, batch.tgt_mask)  # (B, T, D)
    real = batch.tgt_y != PAD  # (B, T)
    losses = x.new_zeros(real.shape)
    losses[real] = F.cross_entropy(model.generator(x[real]), batch.tgt_y[real], reduction="none")
    return losses.sum(-1)


# %%
Head = tuple[str, int, int]  # its kind, its layer and its number, from 0


def every_head(model: EncoderDecoder) -> list[Head]:
    """All heads by kind, layer and number."""
    return [
        (kind, number, head)
        for kind, layers in attention_layers(model).items()
        for number, layer in enumerate(layers)
        for head in range(layer.h)
    ]


def changed_losses(
    model: EncoderDecoder,
    batch: Batch,
    heads: Iterable[Head],
    change: Callable[[Tensor], Tensor] = torch.zeros_like,
) -> Tensor:
    """`reference_losses` (B,) while some heads are silent, or changed otherwise."""
    layers = attention_layers(model)
    with heads_changed([(layers[kind][n], h) for kind, n, h in heads], change):
        return reference_losses(model, batch)


# %% [markdown]
# All 72, one after the other, on our fifty captions. **Predict.** The whole model's loss is 0.78 nats a token here. How much is one head of 72 worth? For how many will fifty captions do?

# %%
batch = make_batch(encode_pairs([pair.texts for pair in captions], trained.tokenizer))
whole = reference_losses(model, batch)  # (50,)
worths, errors = [], []
for head in every_head(model):
    change = changed_losses(model, batch, [head]) - whole  # (50,)
    worths.append(change.sum().item() / batch.ntokens)
    errors.append(change.std().item() * math.sqrt(len(change)) / batch.ntokens)
clear = sum(abs(worth) > 2 * error for worth, error in zip(worths, errors, strict=True))
print(f"loss {whole.sum() / batch.ntokens:.2f}; a worth is {np.mean(worths):.3f} on average,")
print(f"its standard error {np.mean(errors):.3f}; {clear} of 72 are beyond two standard errors")

# %% [markdown]
# TODO-answer. The record repeats this on 1,014 validation pairs (`python -m scripts.studies.heads --save`).
#
# ### Beside noise of the same size
#
# > **In short.** Any disturbance may cost something. So disturb as much, and leave the head's words in place.
#
# The control adds noise to what the head says. The noise goes through the head's own $W^O$, and at each position it is as long there as what silence takes away.


# %%
def noise_beside(said: Tensor, layer: MultiHeadedAttention, head: int) -> Tensor:
    """What a head says, (B, T, d_k), plus noise that is as long in the residual stream."""
    columns = layer.project_output.weight.unflatten(1, (layer.h, -1))[:, head]  # (D, d_k)
    noise = torch.randn_like(said)
    lengths = [(parts @ columns.T).norm(dim=-1, keepdim=True) for parts in (said, noise)]
    return said + noise * lengths[0] / lengths[1]


# %% [markdown]
# **Predict.** Is silence worse than noise?

# %%
# %% [markdown]
# ## Patching
#
# > **In short.** Silence says *that* a part matters. To see *what* it carries, give it another sentence's state.
#
# "Eine Frau liest ihrem Sohn ein Buch vor": *A woman reads a book to her son.* With "Ein Mann … seinem Sohn" it is *his*. Two German words tell which: the subject and "ihrem".
#
# So run both sentences. In the first, replace *one* vector of the encoder, the state after layer n at position s, by that of the second. Then go on as usual, and let the decoder read "A woman reads a book to". The outcome is one number,
#
# $$ \log p(\text{her}) - \log p(\text{his}). $$


# %%
@torch.no_grad()
def encoder_stages(model: EncoderDecoder, src: Tensor) -> list[Tensor]:
    """The encoder's states: the embeddings, then after each layer; N + 1 of (1, S, D)."""
    with dropout_off(model):
        stages = [model.src_embed(src)]
        for layer in model.encoder.layers:
            stages.append(layer(stages[-1]))
    return stages


@torch.no_grad()
def memory_from(model: EncoderDecoder, x: Tensor, done: int) -> Tensor:
    """The memory (1, S, D), from the state x (1, S, D) after `done` of the encoder's layers."""
    with dropout_off(model):
        for layer in model.encoder.layers[done:]:
            x = layer(x)
        return model.encoder.norm(x)


@torch.no_grad()
def preference(
    model: EncoderDecoder, memory: Tensor, tgt: Tensor, either: int, other: int
) -> float:
    """log p(either) − log p(other) for the token after tgt (1, T)."""
    with dropout_off(model):
        x = model.decode(memory, None, tgt, subsequent_mask(tgt.size(1)))  # (1, T, D)
    logits = model.generator(x[0, -1])  # (V,)
    return (logits[either] - logits[other]).item()


# %%
woman, man = (
    look_at(trained, german)
    for german in (
        "Eine Frau liest ihrem Sohn ein Buch vor.",
        "Ein Mann liest seinem Sohn ein Buch vor.",
    )
)
(her,), (his,) = (trained.tokenizer.encode(word) for word in ("her", "his"))
read = woman.tgt[:, : woman.wanted[0].tolist().index(her) + 1]  # what stands before "her"
print(" ".join(map(piece_label, pieces_of(trained, read[0].tolist()))))
own, others = (encoder_stages(model, look.src) for look in (woman, man))  # N + 1 of (1, S, D)
assert own[0].shape == others[0].shape  # so that positions match, piece by piece
clean, foreign = (
    preference(model, memory_from(model, s[-1], 3), read, her, his) for s in (own, others)
)
print(f"log p(her) − log p(his): {clean:+.1f}, and {foreign:+.1f} with all of the other's source")

# %% [markdown]
# The second number is the check: the English text still says "woman", but the source decides. **Predict.** Exchange one vector at a time: ten positions, four depths. Is exchanging "Frau" enough to turn *her* into *his*? Is "ihrem"?


# %%
table = []  # a row a depth, a column a position
for done, (x, y) in enumerate(zip(own, others, strict=True)):
    table.append([])
    for s in range(x.size(1)):
        mixed = torch.cat((x[:, :s], y[:, s : s + 1], x[:, s + 1 :]), dim=1)  # (1, S, D)
        table[-1].append(preference(model, memory_from(model, mixed, done), read, her, his))
words = [
    f"{piece_label(a)} / {piece_label(b)}" if a != b else piece_label(a)
    for a, b in zip(woman.source, man.source, strict=True)
]
for s in (1, 3):
    print(f"{words[s]}:", " ".join(f"{row[s]:+.1f}" for row in table))
rest = min(x for row in table for s, x in enumerate(row) if s not in (1, 3))
print(f"all others, at least: {rest:+.1f}")
two_words = own[0].clone()
two_words[:, [1, 3]] = others[0][:, [1, 3]]
both = preference(model, memory_from(model, two_words, 0), read, her, his)
print(f"both words at once: {both:+.1f}")
patch_chart(table, words, clean)

# %% [markdown]
# Two columns stand out. At the first three depths, exchanging "ihrem" alone leaves a toss-up (−0.1). After the last layer it gives −1.3, and "Frau" counts less: the last layer seems to have brought some information from *Frau* to *ihrem*. Exchanging "Frau" alone never gives *his*; both words together (at the embeddings) do nearly all that the other sentence does.
#
# This is one sentence pair, chosen because it works. It doesn't show that the model always reads "ihrem" like this. (Meng et al. 2022, looking for facts, put clean states back into noisy runs.)
#
# ## The logit lens
#
# > **In short.** If the decoder had to speak after its first layer, what would it say?
#
# In a pre-norm model (chapter 4) x goes through all layers, each sublayer adds to it, and the last norm and the generator read it. This x is called the **residual stream**. So apply the norm and the generator to the stream after *any* layer (nostalgebraist 2020: the *logit lens*).


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
    stages = decoder_stages(model, src, tgt)  # (N + 1, T, D)
    return model.generator(model.decoder.norm(stages)).log_softmax(-1)


# %% [markdown]
# **Predict.** Tables are tied in this model: a token's embedding is also its row in the generator. What will the lens say of the bare embedding?

# %%
agreement = torch.zeros(4)  # N + 1
for look in looks[::2]:
    choices = logit_lens(model, look.src, look.tgt).argmax(-1)  # (N + 1, T)
    agreement += (choices == choices[-1]).double().mean(-1) / len(looks[::2])
print("agrees with the final choice:", ", ".join(f"{share:.0%}" for share in agreement.tolist()))

dog = look_at(trained, captions[0].texts[0])
log_p = logit_lens(model, dog.src, dog.tgt)  # (N + 1, T, V)
right_at_once = log_p[1].argmax(-1) == dog.wanted[0]  # (T,), after the first layer
tops = [[piece_label(p) for p in pieces_of(trained, stage.tolist())] for stage in log_p.argmax(-1)]
final = log_p.exp()[:, range(dog.wanted.size(1)), dog.wanted[0]]  # (N + 1, T)
here = f"{right_at_once.sum()} of {len(right_at_once)}"
early = (here, len(looks[::2]), agreement[1].item())
lens_chart(tops, final.tolist(), [piece_label(piece) for piece in dog.read], early)

# %% [markdown]
# The bare embedding repeats the word just read. After the first layer the lens agrees with the final choice in three of ten cases (fewer than two of ten without each text's last two positions), after the second in about eight. The lens is a crude instrument, made for the last layer: "not readable yet" is not "not there yet".
#
# ## What attention weights do not tell
#
# > **In short.** A weight says where a head looked, not what it saw there, nor whether it mattered.
#
# ### The weight is not the contribution
#
# What key s adds to the stream through head i is not the weight but
#
# $$ w_s \cdot v_s, \qquad v_s = (x_s W^V_i + b_i)\,W^O_i \quad \text{of shape (D,)}. $$
#
# A large weight on a short $v_s$ says little (Kobayashi et al. 2020). We take the decoder's first self-attention.


# %%
@torch.no_grad()
def heard_values(layer: MultiHeadedAttention, key: Tensor) -> Tensor:
    """What each key (1, S, D) would send through each head at weight 1: (H, S, D).

    With the weights and the output's bias, it is all that reaches the residual stream.
    """
    values = split_heads(layer.project_value(key), layer.h)[0]  # (H, S, d_k)
    out = layer.project_output.weight.view(-1, layer.h, values.size(-1))  # (D, H, d_k)
    return torch.einsum("hsk,dhk->hsd", values, out)


# %%
layer = model.decoder.layers[0]
same_key, layer_maps = [], []  # of each row of this layer: does the same key have the most of both?
for look in looks:
    with torch.no_grad():
        x = layer.sublayer[0].norm(model.tgt_embed(look.tgt))  # (1, T, D)
        output = layer.self_attn(x, x, x, subsequent_mask(x.size(1)))[0]  # (T, D)
    heard = heard_values(layer.self_attn, x)  # (H, T, D)
    weights = look.maps["decoder"][0]  # (H, T, T)
    added = torch.einsum("hts,hsd->td", weights, heard)  # all heads, all keys
    torch.testing.assert_close(added + layer.self_attn.project_output.bias, output)  # the check
    parts = weights * heard.norm(dim=-1).unsqueeze(1)  # (H, T, T)
    shares = torch.stack((weights, parts / parts.sum(-1, keepdim=True)))  # (2, H, T, T)
    layer_maps.append(shares)
    same_key += (weights.argmax(-1) == parts.argmax(-1))[:, 1:].flatten().tolist()  # row 0: one key
print(f"the same key has the most of both in {np.mean(same_key):.0%} of {len(same_key):,} rows")
on_first = torch.cat([pair[:, :, 1:, 0].flatten(1) for pair in layer_maps], dim=1).mean(1)  # (2,)
print(f"<s> has {on_first[0]:.2f} of the weight, and {on_first[1]:.2f} of the contribution")

row, look = 7, looks[8]  # one row of head 1.1, chosen to show it
share, contribution = layer_maps[8][:, 0, row, : row + 1]
labels = [piece_label(piece) for piece in look.read[: row + 1]]
both = {"weight": share.tolist(), "share of the contribution": contribution.tolist()}
pd.DataFrame(both, index=labels).T.round(2)

# %% [markdown]
# (The table compares lengths of contributions.) This row was chosen to show the difference at `<s>`, which over all rows of this layer has 18% and 14%. In nine of ten rows the same key has the most of both; many rows are short, so that is less than it sounds.
#
# ### The weight is not the effect
#
# **Erasure**: *hide* a source token from the encoder and from cross-attention, and see how much less likely the words of our translation become. If weights told what matters, hiding the tokens with much weight should hurt most.


# %%
@torch.no_grad()
def erasure_effects(model: EncoderDecoder, look: Look) -> Tensor:
    """How much log p of each written token falls when one source token is hidden from all: (T, S)."""
    S, T = look.src.size(1), look.tgt.size(1)
    mask = ~torch.eye(S, dtype=torch.bool).unsqueeze(1)  # (S, 1, S): run s hides token s
    mask = torch.cat((torch.ones_like(mask[:1]), mask))  # (S + 1, 1, S): the first hides nothing
    with dropout_off(model):
        src, tgt = (ids.expand(S + 1, -1) for ids in (look.src, look.tgt))
        x = model(src, tgt, mask, subsequent_mask(T))  # (S + 1, T, D)
        log_p = model.generator(x).log_softmax(-1)  # (S + 1, T, V)
    said = log_p.gather(-1, look.wanted.expand(S + 1, -1).unsqueeze(-1)).squeeze(-1)  # (S + 1, T)
    return (said[:1] - said[1:]).T


# %%
rows = []
for number, look in enumerate(looks):
    weights, effect = look.maps["cross"].mean((0, 1)), erasure_effects(model, look)  # (T, S)
    dearest = effect.argmax(-1)  # (T,)
    place = torch.linspace(0, weights.size(1) - 1, len(weights)).round()  # the same relative place
    by_word = zip(weights.tolist(), effect.tolist(), strict=True)
    found = {
        "most weight": weights.argmax(-1) == dearest,
        "same place": place == dearest,
        "needs the source": effect.amax(-1) >= math.log(2),  # p falls to half, or further
        "rank correlation": [spearmanr(*both).statistic for both in by_word],
    }
    rows.append(pd.DataFrame(found).assign(caption=number))
erased = pd.concat(rows)
told = ["most weight", "same place", "rank correlation"]
print(f"{len(erased)} tokens; {erased['needs the source'].mean():.0%} need the source")
print(erased[told].mean().round(2).to_dict())
erased["lead"] = erased["most weight"].astype(int) - erased["same place"].astype(int)
sums = erased.groupby("caption")["lead"].agg(["sum", "size"]).to_numpy()
draws = sums[np.random.default_rng(0).integers(50, size=(10_000, 50))].sum(1)  # captions again
low, high = np.quantile(draws[:, 0] / draws[:, 1], (0.025, 0.975))
print(f"most weight, less same place: {low:+.2f} to {high:+.2f}")
erased.groupby("needs the source")[told].mean().round(2)

# %% [markdown]
# Weight here is the mean over all 24 heads. A written token *needs the source* if hiding one source token at least halves its probability. For 66% of written tokens, the source token with the most weight is the one whose absence hurts most; for 52%, the one at the same relative place is. Over captions drawn again the lead is 8 to 19 points. If a token needs the source, the weights point well, 77% against 50%. If it doesn't, place leads, but only thanks to full stops and ends. Weights and effects order the source tokens differently (a low rank correlation) in both groups.
#
# Jain and Wallace (2019) found such low correlations in classifiers. Wiegreffe and Pinter (2019) answered that this doesn't make weights worthless, and asked for the right baselines. (Hiding isn't the truth either: the model has never seen a sentence with a hole.)
#
# ## Summary
#
# - Change something that every path reads, put it back, and check that something changed.
# - A head's worth is what is lost without it, given all the others.
# - Worths don't add up: heads have stand-ins. So silencing by worth helps for a few heads, not for many.
# - Patching shows what a state carries: in our pair, *her* rests on two German words at once.
# - A weight is neither a contribution nor an effect.
#
# ## What the paper did that we don't
#
# Its Figures 3 to 5 show heads that seem to find a verb's distant partner, or what "its" refers to. It intervenes nowhere.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Silence, another way
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# Silence head `head` of a `MultiHeadedAttention` inside a `with` block through $W^V$ and its bias instead of $W^O$. Gradients stay on. Afterwards the layer is what it was, even after an error. (`solution("values_silenced")` shows ours.)


# %%
@contextmanager
def values_silenced(layer: MultiHeadedAttention, head: int) -> Iterator[None]:
    """The head's values are 0 inside the block."""
    ...


check(values_silenced)

# %% [markdown]
# ### Exercise 2 · On paper
#
# *think · difficulty ●●○ · worth ●●● · 10 minutes*
#
# Two heads of a layer do the same thing. Silencing either costs nothing, silencing both costs 3 BLEU. What is each worth, and what does a ranking by worth do with them? A colleague silences heads, picks the 20 that cost least on the test set, and reports the pruned model's BLEU on that same set. What is wrong? And which of zero and mean should one use for a head that always says the same thing?
#
# <details><summary>An answer</summary>
#
# Each is worth nothing *given the other*. A ranking throws both out first, and loses 3 BLEU at the second. The 20 were chosen for their luck on those sentences, so the figure is too good; choose on validation. A head that always says the same thing carries no information, and its mean shows that: nothing changes. Zero may break the layers above, which count on the constant.
#
# </details>
#
# ### Exercise 3 · Prune and train again
#
# *project · difficulty ●●● · worth ●●○ · 240 minutes*
#
# Silence half of the heads by worth, keep them silent, and train the rest for one more epoch at a low rate (`Training` of [`core`](../scripts/core/training.py)). How much of the loss comes back? Compare with a random half, and with a model that never had those heads.
#
# Next: [Chapter 17 · A small GPT](ch17_small_gpt.ipynb)
