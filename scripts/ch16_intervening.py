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
# After this chapter you can find out what a part of a model is worth by changing it: silence a head, replace it by its mean, or patch in a state from another sentence; and say what pictures of attention don't prove.
#
# | | |
# |---|---|
# | In the paper | Figures 3 to 5 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), which show heads and test none |
# | Time | 20 minutes to read, 40 with the code; half a minute to run on a CPU |
# | Before, after | [Chapter 15 · Looking inside](ch15_looking_inside.ipynb) · [Chapter 17 · A small GPT](ch17_small_gpt.ipynb) |
#
# *If you read only three cells:* the chart of *What is each head worth?*, the chart of *Patching*, the table of *The weight is not the contribution*.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary, **N** layers; $d_k = D/H$.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
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
from scripts.book.figures.understanding import lens_chart, patch_chart, pruning_chart, worth_chart
from scripts.book.records import load_record
from scripts.book.verdict import pass_together
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, split_heads
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import PAD, Batch, greedy_decode
from scripts.ch07_multi30k import encode_pairs, make_batch
from scripts.ch08_decoding import dropout_off
from scripts.ch15_looking_inside import (
    Look,
    attention_layers,
    cross_word_weights,
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
# ## Silence
#
# > **In short.** To learn what a part is for, take it away and see what breaks.
#
# The heads of a layer are added up (chapter 2): head i speaks through its own $d_k$ rows of $W^O$, the columns of `.weight`. So to silence the head, set these to 0, translate, and put them back.
#
# Zero is harsh: the layers above never met it in training. **Mean-ablation** may be milder: the head always says its average, which carries no information about any sentence. If head i's mean output is $\bar h_i$ ($d_k$,), it adds the constant $\bar h_i W^O_i$ of shape (D,), which goes into the layer's bias.


# %%
@contextmanager
def heads_silenced(
    heads: Iterable[tuple[MultiHeadedAttention, int]], instead: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Some heads, each a layer and a number from 0, add nothing inside the block.

    Or always the same, with `instead`: a vector (d_k,) for each. Head i speaks only through its
    rows of W^O, so these are 0 meanwhile, and what it says instead goes into the bias.
    Afterwards both are what they were, to the bit, even after an error. Raises IndexError for a
    head that a layer doesn't have.
    """
    kept = []
    try:
        for number, (layer, head) in enumerate(heads):
            weight, bias = (p.detach() for p in layer.project_output.parameters())  # same memory
            columns = weight.unflatten(1, (layer.h, -1))[:, head]  # (D, d_k)
            kept.append((columns, columns.clone(), bias, bias.clone()))
            if instead:
                bias += columns @ instead[number]
            columns.zero_()
        yield
    finally:
        for columns, before, bias, bias_before in reversed(kept):
            columns.copy_(before)
            bias.copy_(bias_before)


# %% [markdown]
# Check the formula, with one head replaced by a constant.

# %%
torch.manual_seed(0)
layer = model.decoder.layers[1].src_attn
project = layer.project_output
with torch.no_grad():
    x = torch.randn(1, 5, project.in_features)  # (1, T, D)
    replaced = x.unflatten(-1, (layer.h, -1)).clone()  # (1, T, H, d_k)
    constant = torch.randn(replaced.size(-1))  # (d_k,)
    replaced[:, :, 3] = constant
    wanted = project(replaced.flatten(2))
    with heads_silenced([(layer, 3)], [constant]):
        torch.testing.assert_close(project(x), wanted)

# %% [markdown]
# **Pitfall.** *A hook that nothing calls.* One usually hooks a function to `project_output` that zeroes the head's part of its input. But our fast decoder reads the layer's weights and never calls the module. So no translation changes, and no head seems to be worth anything. Change something that all paths read, and check that something changed.


# %%
@contextmanager
def heads_silenced_by_hook(heads: Iterable[tuple[MultiHeadedAttention, int]]) -> Iterator[None]:
    """Has no effect on the fast path: zeroes each head's part when the module is called."""

    def hush(linear: nn.Linear, given: tuple[Tensor], head: int, h: int) -> Tensor:
        parts = given[0].unflatten(-1, (h, -1)).clone()  # (B, T, H, d_k)
        parts[..., head, :] = 0
        return parts.flatten(-2)

    with ExitStack() as hooks:
        for layer, head in heads:
            hook = partial(hush, head=head, h=layer.h)
            hooks.enter_context(layer.project_output.register_forward_pre_hook(hook))
        yield


# %%
cross_heads = [(layer, i) for layer in attention_layers(model)["cross"] for i in range(layer.h)]
whole = cached_greedy(model, park.src, None, 30)
with heads_silenced_by_hook(cross_heads):
    assert torch.equal(cached_greedy(model, park.src, None, 30), whole)  # not one token changes
    by_hook = greedy_decode(model, park.src, None, 30)  # the textbook path calls it
with heads_silenced(cross_heads):
    blind = cached_greedy(model, park.src, None, 30)
assert torch.equal(by_hook, blind) and not torch.equal(blind, whole)
print("with cross-attention silenced:", trained.tokenizer.decode(blind[0].tolist()))

# %% [markdown]
# Cut off from the source, the decoder still writes an English caption: it is a language model, too.
#
# ## What is each head worth?
#
# BLEU notices a head only if a *word* changes. The probability of the reference moves with every change, and needs no search. So a head's *worth* is how much $-\log p$ of the reference goes up without it, under teacher forcing, in nats a token.


# %%
def every_head(model: EncoderDecoder) -> list[tuple[str, int, int]]:
    """All heads by kind, layer and number, counted from 0."""
    return [
        (kind, number, head)
        for kind, layers in attention_layers(model).items()
        for number, layer in enumerate(layers)
        for head in range(layer.h)
    ]


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


# %% [markdown]
# For mean-ablation, hooks are right: they only listen to what each head says.


# %%
@torch.no_grad()
def said_by_heads(model: EncoderDecoder, batch: Batch) -> dict[str, Tensor]:
    """What each head says at each real position, one after another: kind to (N, positions, H, d_k).

    For "encoder" these are the source's positions, else the target's.
    """
    layers, heard = attention_layers(model), {}

    def listen(linear: nn.Linear, given: tuple[Tensor]) -> None:
        heard[linear] = given[0]  # (B, T, D): all heads, side by side

    with ExitStack() as hooks, dropout_off(model):
        for layer in itertools.chain(*layers.values()):
            hooks.enter_context(layer.project_output.register_forward_pre_hook(listen))
        model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    said = {}
    for kind, some in layers.items():
        real = (batch.src if kind == "encoder" else batch.tgt) != PAD  # (B, T)
        parts = [heard[layer.project_output][real].unflatten(-1, (layer.h, -1)) for layer in some]
        said[kind] = torch.stack(parts)
    return said


# %% [markdown]
# One head, both ways, on four captions.

# %%
few = make_batch(encode_pairs([pair.texts for pair in captions[:4]], trained.tokenizer))
before = reference_losses(model, few).sum()
words = said_by_heads(model, few)
previous = [(model.encoder.layers[1].self_attn, 0)]  # encoder 2.1, on the previous token
for name, instead in (("silent", ()), ("its mean", [words["encoder"][1, :, 0].mean(0)])):
    with heads_silenced(previous, instead):
        change = (reference_losses(model, few).sum() - before) / few.ntokens
    print(f"encoder 2.1, {name}: {change:+.4f} nats a token")

# %% [markdown]
# Now all 72, both ways, on 1,014 validation pairs (`python -m scripts.studies.heads --save`). For each head a paired t-test compares the references' losses with and without it.
#
# Seventy-two tests at 5% would find three or four "effects" among heads that do nothing. Holm's method (`pass_together`, in [`verdict.py`](../scripts/book/verdict.py)) guards against that: the smallest p must be below 0.05/72, the next one below 0.05/71, and so on; heads *pass* up to the first that fails.
#
# **Predict.** How many of the 72 pass? And is the mean really milder than silence?

# %%
record = load_record("heads-multi30k")
heads = pd.DataFrame(record["heads"])
heads["name"] = [f"{k} {n}.{h}" for k, n, h in heads[["kind", "layer", "head"]].to_numpy()]
passed = {way: pass_together(heads[f"{way} p"].tolist()) for way in ("silent", "mean")}
for way, ok in passed.items():
    alone = sum(heads[f"{way} p"] < 0.05)
    print(f"{way}: {sum(ok)} of {len(heads)} pass; {alone} have p < 0.05 if tested alone")
costliest = heads.nlargest(3, "silent")[["name", "silent"]].to_numpy()
print("costliest:", ", ".join(f"{name} {nats:.4f}" for name, nats in costliest))
print(f"the loss goes up: {sum(heads['silent'] > 0)} of 72, of {record['loss']:.2f} nats a token")
milder = (heads["mean"] < heads["silent"]).groupby(heads["kind"], sort=False).sum()
print("the mean is milder than silence, of 24 each:", milder.to_dict())
worth_chart(record["heads"], passed["silent"], record["splits"]["val"])

# %% [markdown]
# No head costs much beside the model's loss of 1.60 nats. For 71 of 72 heads silence raises the loss. But any disturbance may do so: the fair baseline, noise of the same size, wasn't run.
#
# For most heads the mean isn't milder.
#
# **Predict.** Cross-attention 2.8 and 1.5 were the best aligners of chapter 15. What are they worth? And how well does the costliest head of cross-attention align?

# %%
looks = [look_at(trained, *pair.texts) for pair in captions]  # teacher forcing
word_maps = [cross_word_weights(*both, "writing") for both in zip(looks, captions, strict=True)]
judged = heads.loc[heads["kind"] == "cross", ["name", "silent", "silent p"]].copy()
judged["AER"] = error_rates(captions, word_maps).flatten().tolist()  # (N, H)
agree = spearmanr(judged["AER"], judged["silent"])
print(f"rank correlation of error and worth: {agree.statistic:.2f} (p {agree.pvalue:.2f})")
judged = judged.sort_values("AER").iloc[[0, 1, -1]]
print(judged.round({"silent": 4, "AER": 2}).to_string(index=False))

# %% [markdown]
# The two best aligners are worth hardly anything, given the others: they may stand in for each other. The costliest is the *worst* aligner. Over all 24, error and worth show no clear relation. A striking map is no proof of worth.
#
# ### All eight together
#
# Do most heads matter little, or does each have stand-ins? Silence *all eight* heads of a layer.

# %%
by_layer = pd.DataFrame(record["layers"]).rename(columns={"silent": "together"})
by_layer["added"] = heads.groupby(["kind", "layer"], sort=False)["silent"].sum().to_numpy()
by_layer["times"] = (by_layer["together"] / by_layer["added"]).round(1)
by_layer.round({"together": 3, "added": 3})

# %% [markdown]
# In every layer, all eight together cost more than the sum of the eight worths (*added*), in cross-attention five to seven times as much. Nine heads chosen at random (below) cost 0.6 to 1.2 times their sum. So heads of cross-attention stand in for one another.
#
# Michel et al. (2019) found that most heads of a larger translator can be removed one at a time. We silence more and more together: by their worth, least first, and in five random orders.

# %%
pruned = pd.DataFrame(record["pruning"]).pivot(index="silent", columns="order", values="nats")
by_worth, chance = pruned["least worth first"], pruned.filter(like="random")
for count in (9, 18, 36, 45):
    others = ", ".join(f"{nats:.3f}" for nats in sorted(chance.loc[count]))
    print(f"{count} of 72 silent: {by_worth[count]:.3f} nats by worth; {others} at random")
at_45 = pd.DataFrame(record["pruning"]).query("silent == 45").sort_values("cross")
print("of 45, heads of cross-attention, and nats:", at_45[["cross", "nats"]].to_numpy().tolist())
pruning_chart(record)

# %% [markdown]
# With 9 heads silent the order helps. Later it doesn't: with 36 it is in the middle of the five random orders, with 45 it is worse than all. Each worth was measured with all the other heads there, stand-ins too. By and large, the more heads of cross-attention are among the 45, the more is lost.
#
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
