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
def reference_losses(model: EncoderDecoder, batch: Batch, memory: Tensor | None = None) -> Tensor:
    """−log p of each reference, in nats: (B,). Teacher forcing, no dropout, no smoothing.

    A `memory` (B, S, D) that is given spares the encoder.
    """
    with dropout_off(model):
        if memory is None:
            memory = model.encode(batch.src, batch.src_mask)
        x = model.decode(memory, batch.src_mask, batch.tgt, batch.tgt_mask)  # (B, T, D)
    real = batch.tgt_y != PAD  # (B, T)
    losses = x.new_zeros(real.shape)
    losses[real] = F.cross_entropy(model.generator(x[real]), batch.tgt_y[real], reduction="none")
    return losses.sum(-1)


# %%
def every_head(model: EncoderDecoder) -> list[tuple[str, int, int]]:
    """All heads: kind, layer and number, from 0."""
    return [
        (kind, number, head)
        for kind, layers in attention_layers(model).items()
        for number, layer in enumerate(layers)
        for head in range(layer.h)
    ]


def changed_losses(
    model: EncoderDecoder,
    batch: Batch,
    heads: Iterable[tuple[str, int, int]],
    change: Callable[[Tensor], Tensor] = torch.zeros_like,
    memory: Tensor | None = None,
) -> Tensor:
    """`reference_losses` (B,) while some heads are silent, or changed otherwise."""
    layers = attention_layers(model)
    with heads_changed([(layers[kind][n], h) for kind, n, h in heads], change):
        return reference_losses(model, batch, memory)


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
record = load_record("heads-multi30k")
looks = [look_at(trained, *pair.texts) for pair in captions]  # teacher forcing
aligned = [cross_word_weights(*both, "writing") for both in zip(looks, captions, strict=True)]
lines = dossiers(record, error_rates(captions, aligned))
passed = {way: sum(pass_together(lines[f"{way} p"].tolist())) for way in ("silent", "noise")}
print("heads that pass, of 72:", passed)
print(lines.groupby("kind", sort=False)[["silent", "noise"]].mean().round(4))
larger = (lines["silent"] > lines["noise"]).groupby(lines["kind"], sort=False).sum()
worth_chart(lines, f"Silence costs more than noise of the same size in {larger.sum()} of 72 heads")

# %% [markdown]
# Seventy-two tests at 5% would find three or four "effects" among heads that do nothing. Holm's method (`pass_together`, chapter 10) guards against that.
#
# TODO
#
# ## Does the map tell?
#
# > **In short.** In the encoder it does. Across it doesn't.
#
# Now the question of chapter 15. We rank a kind's 24 heads by a number of their map, and by their worth. *Spearman's ρ* is 1 if both orders agree, −1 if one is the other reversed, and near 0 if they have nothing to do with each other.


# %%
def rank_correlation(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Spearman's ρ, and the ends of the middle 95% when the heads are drawn again 1,000 times."""
    pairs = np.array([x, y]).T  # (24, 2)
    draws = np.random.default_rng(0).integers(len(pairs), size=(1_000, len(pairs)))
    again = [spearmanr(pairs[draw]).statistic for draw in draws]
    return [spearmanr(pairs).statistic, *np.quantile(again, (0.025, 0.975))]


# %% [markdown]
# **Predict.** Sharp heads, previous-token heads, good aligners: which of them are worth much?

# %%
questions = [("encoder", "previous"), ("decoder", "previous"), ("cross", "AER")]
questions += [(kind, "entropy") for kind in ("encoder", "decoder", "cross")]
told = {}
for kind, number in questions:
    own = lines[lines["kind"] == kind]
    told[kind, number] = rank_correlation(own[number], own["silent"])
pd.DataFrame(told, index=["ρ", "from", "to"]).T.round(2)

# %%
some = ["encoder 2.1", "encoder 3.2", "decoder 3.6", "cross 1.5", "cross 2.8", "cross 1.7"]
lines.loc[some, ["previous", "entropy", "AER", "silent", "noise"]].round(4)

# %% [markdown]
# TODO
#
# ## Who stands in for whom
#
# > **In short.** A head's worth is what is lost *although all others are still there*. If another head says the same, nothing is lost.
#
# So worth may be silent about a head that has stand-ins. **Test 1.** Silence all heads of a kind together. If nobody stands in for anybody, that costs about the sum of the worths.

# %%
together = pd.DataFrame(record["kinds"]).set_index("kind")[["silent"]]
together["sum of worths"] = lines.groupby("kind", sort=False)["silent"].sum()
together["times"] = together["silent"] / together["sum of worths"]
together.round(2)

# %% [markdown]
# TODO
#
# **Test 2.** Take stand-ins away, too. We silence twelve heads of a kind at once, four in each layer, drawn by chance, sixty times. If good aligners stand in for one another, losing many of them at once must cost much, although losing one costs nothing: the *worse* the silent heads align, the *less* should be lost. If our explanation is wrong, costs add up, and the order of costs is that of the sums of worths.


# %%
def half_of_the_heads(kind: str, rng: np.random.Generator) -> list[tuple[str, int, int]]:
    """Four heads, drawn by chance, of each of the three layers: kind, layer and number, from 0."""
    return [(kind, layer, head) for layer in range(3) for head in rng.permutation(8)[:4].tolist()]


# %% [markdown]
# ## Patch
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
# ## Read
#
# > **In short.** If the decoder had to speak after its first layer, what would it say?
#
# Apply the last norm and the generator to the stream after *any* layer: this is the *logit lens* (nostalgebraist 2020).


# %%
@torch.no_grad()
def decoder_stages(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> Tensor:
    """The decoder's residual stream: the embeddings, then after each sublayer, (3N + 1, T, D)."""
    stages = []
    parts = [model.tgt_embed, *(part for layer in model.decoder.layers for part in layer.sublayer)]
    with ExitStack() as hooks, dropout_off(model):
        for part in parts:
            hook = part.register_forward_hook(lambda _, inputs, output: stages.append(output))
            hooks.enter_context(hook)
        model(src, tgt, None, subsequent_mask(tgt.size(1)))
    return torch.cat(stages)


@torch.no_grad()
def logit_lens(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> Tensor:
    """log p(next token) at each stage, by the model's own last norm and generator.

    src (1, S) and tgt (1, T) to (3N + 1, T, V); the last stage is what the model says.
    """
    stages = decoder_stages(model, src, tgt)  # (3N + 1, T, D)
    return model.generator(model.decoder.norm(stages)).log_softmax(-1)


# %% [markdown]
# **Predict.** Tables are tied in this model: a token's embedding is also its row in the generator. What will the lens say of the bare embedding?

# %%
dog = look_at(trained, captions[0].texts[0])
log_p = logit_lens(model, dog.src, dog.tgt)[::3]  # after whole layers, (N + 1, T, V)
tops = [[piece_label(p) for p in pieces_of(trained, stage.tolist())] for stage in log_p.argmax(-1)]
final = log_p.exp()[:, range(dog.wanted.size(1)), dog.wanted[0]]  # (N + 1, T)
lens_chart(tops, final.tolist(), [piece_label(piece) for piece in dog.read])

# %% [markdown]
# The bare embedding repeats the word just read. Look at the column "the": after two layers the model would write *water*, after three it writes *wet*. The German is "über die nasse Wiese", and there is no water in it. Two questions. Who brings *wet*? And is *water* a misreading of "nasse", or a habit: dogs in captions often run through water?
#
# So we read after each sublayer of the last two layers. As a control we exchange the adjective: "hohe" (tall). If *water* comes from "nasse", it must go.

# %%
at = [piece_label(piece) for piece in dog.read].index("the")
for adjective in ("nasse", "hohe"):
    other = look_at(trained, f"Ein kleiner Hund läuft über die {adjective} Wiese.")
    stages = logit_lens(model, other.src, dog.tgt)[:, at]  # (3N + 1, V)
    print(adjective)
    for n, stage in enumerate(stages[3:]):
        top = stage.topk(3)
        words = ", ".join(
            f"{piece_label(w)} {p:.2f}"
            for w, p in zip(pieces_of(trained, top.indices.tolist()), top.values.exp().tolist())
        )
        print(f"  layer {(n + 2) // 3}.{(n + 2) % 3}: {words}")

# %% [markdown]
# TODO
#
# The lens is a crude instrument, made for the last layer: "not readable yet" is not "not there yet".
#
# ## Where a head looks, and what matters
#
# > **In short.** A weight says where a head looked, not what it saw there, nor whether it mattered.
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
