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
# *If you read only three cells:* the picture of *One road*, the chart of *Does the map tell?*, the table of *Who stands in for whom*.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures.understanding import (
    group_costs_chart,
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
    HEAD_NUMBERS,
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
# > **In short.** Each part of the model *adds* something to one vector. So there are three tools: cut what a part adds, patch the vector itself, or read early what the model would say.
#
# In a pre-norm model (chapter 4) each position has one vector x, which goes through all layers. Each sublayer reads x and adds to it. The last norm and the generator read the sum. This x is called the **residual stream**.

# %%
residual_stream()

# %% [markdown]
# ## Cut
#
# > **In short.** To learn what a head is for, take it away and see what breaks.
#
# What the heads of a layer say, $d_k$ numbers each, stands side by side before $W^O$ (chapter 2). PyTorch lets us hook a function in there, which changes what some of them say. A *silent* head says zeros.


# %% tags=["yours"]
@contextmanager
def heads_changed(
    heads: Iterable[tuple[MultiHeadedAttention, int]],
    change: Callable[[Tensor, nn.Linear, Tensor], Tensor],
) -> Iterator[None]:
    """Inside the block some heads, each a layer and a number from 0, say something else.

    `change` gets what a layer's chosen heads say, side by side, (B, T, n · d_k); the layer's output
    projection; and which of its D inputs these are, (n · d_k,). It returns what they say instead.
    """

    def before_output(output: nn.Linear, inputs: tuple[Tensor], features: Tensor) -> Tensor:
        x = inputs[0].clone()  # (B, T, D): all heads, side by side
        x[..., features] = change(x[..., features], output, features)
        return x

    with ExitStack() as hooks:
        for layer, chosen in itertools.groupby(heads, itemgetter(0)):
            output = layer.project_output
            parts = torch.arange(output.in_features).tensor_split(layer.h)  # H of (d_k,)
            features = torch.cat([parts[head] for _, head in chosen])
            hook = partial(before_output, features=features)
            hooks.enter_context(output.register_forward_pre_hook(hook))
        yield


# %%
def silence(head_outputs: Tensor, output: nn.Linear, features: Tensor) -> Tensor:
    """Heads that say nothing."""
    return torch.zeros_like(head_outputs)


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
    with heads_changed([(layer, 3)], silence):
        torch.testing.assert_close(output(x), F.linear(x, weight, output.bias))
    assert not torch.equal(output(x), F.linear(x, weight, output.bias))  # it speaks again

# %% [markdown]
# **Pitfall.** *A hook that nothing calls.* Our fast decoder reads the layer's weights and never calls the module, so the hook changes nothing. Every head would seem worthless. So check that something changed.

# %%
cross_heads = [(layer, i) for layer in attention_layers(model)["cross"] for i in range(layer.h)]
with heads_changed(cross_heads, silence):
    assert torch.equal(cached_greedy(model, park.src, None, 30), park.wanted)  # nothing changes
    blind = greedy_decode(model, park.src, None, 30)  # chapter 6's calls it
print("with cross-attention silent:", trained.tokenizer.decode(blind[0].tolist()))

# %% [markdown]
# Cut off from the source, the decoder still writes a caption: it is a language model, too.
#
# ## What is a head worth?
#
# > **In short.** A head's worth is what its silence costs. The cost is small, so we need many sentences.
#
# BLEU notices a head only if a *word* changes; the probability of the reference moves with every change. So a head's *worth* is how much $-\log p$ of the reference goes up without it, under teacher forcing, in nats a token.


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
    change: Callable[[Tensor, nn.Linear, Tensor], Tensor] = silence,
    memory: Tensor | None = None,
) -> Tensor:
    """`reference_losses` (B,) while some heads are silent, or changed otherwise."""
    layers = attention_layers(model)
    with heads_changed([(layers[kind][n], h) for kind, n, h in heads], change):
        return reference_losses(model, batch, memory)


def cost_per_token(lost: Tensor, tokens: int) -> tuple[float, float]:
    """What pairs lose (n,), in nats a token, and its standard error."""
    return lost.sum().item() / tokens, lost.std().item() * math.sqrt(len(lost)) / tokens


# %% [markdown]
# All 72, one after the other, on our fifty captions. **Predict.** The whole model's loss is 0.78 nats a token here. How much is one head of 72 worth? For how many heads will fifty captions do?

# %%
batch = make_batch(encode_pairs([pair.texts for pair in captions], trained.tokenizer))
whole = reference_losses(model, batch)  # (50,)
with torch.no_grad(), dropout_off(model):
    memory = model.encode(batch.src, batch.src_mask)  # for heads that don't touch it
memories = {"encoder": None, "decoder": memory, "cross": memory}
alone = {  # what each caption loses without the head, (50,)
    head: changed_losses(model, batch, [head], memory=memories[head[0]]) - whole
    for head in every_head(model)
}
worths, errors = np.array([cost_per_token(lost, batch.ntokens) for lost in alone.values()]).T
print(
    f"the loss is {whole.sum() / batch.ntokens:.2f} nats a token; "
    f"a worth is {worths.mean():.3f} on average, with a standard error of {errors.mean():.3f}; "
    f"{sum(abs(worths) > 2 * errors)} of 72 are beyond two standard errors"
)

# %% [markdown]
# A head is worth 0.002 nats on average, and fifty captions measure it to ±0.004. They do for ten heads, of which chance would give three. With twenty times as many pairs the error is 4.5 times smaller. So we take worths from a record of 1,014 validation pairs (`python -m scripts.studies.heads`).

# %%
record = load_record("heads-multi30k")
looks = [look_at(trained, *pair.texts) for pair in captions]  # teacher forcing
aligned = [cross_word_weights(*both, "writing") for both in zip(looks, captions, strict=True)]
lines = dossiers(record, error_rates(captions, aligned))
passed = pass_together(lines["silent p"].tolist())  # p of a t test over the pairs' losses
worth_chart(record["heads"], passed, record["splits"]["val"])

# %% [markdown]
# Holm's method (`pass_together`, chapter 10) guards the stars against such chance.
#
# ## Does the map tell?
#
# > **In short.** In the encoder it does. Elsewhere we don't see it.
#
# Now chapter 15's question, and its bet on six heads (*2.1*: layer 2, head 1). We rank the 24 heads of a kind by a number of their map, and by their worth. *Spearman's ρ* compares two orders: 1 if they agree, −1 if one is the other reversed, near 0 if they are unrelated.
#
# **Predict.** Sharp heads, previous-token heads, good aligners: which of them are worth much?

# %%
of_kind = dict(iter(lines.groupby("kind", sort=False)))
tries = {
    (kind, number): spearmanr(heads[number], heads["silent"])
    for kind, heads in of_kind.items()
    for number in (*HEAD_NUMBERS, "AER")
    if heads[number].nunique() > 1  # the decoder sees no next token; only cross-attention aligns
}
passed = pass_together([rank.pvalue for rank in tries.values()])
assert {kind for (kind, _), ok in zip(tries, passed, strict=True) if ok} == {"encoder"}
bet = ["encoder 2.1", "encoder 3.2", "decoder 3.6", "cross 1.5", "cross 2.8", "cross 1.7"]
plain = {"silent": "worth", "previous": "weight on the previous token"}
dots = {
    kind: heads[["AER" if kind == "cross" else "previous", "silent"]].rename(columns=plain)
    for kind, heads in of_kind.items()
}
map_and_worth_chart(
    dots,
    bet,
    "In the encoder the map tells a head's worth; elsewhere it isn't seen to",
    "A dot: a head. Right: a number of its map (AER: errors in aligning). Named: the six of the bet.",
)

# %%
print(lines.loc[bet, "silent"].sort_values(ascending=False).round(4).to_dict())
starred = {
    at: f"{rank.statistic:+.2f}{'*' * ok}"
    for (at, rank), ok in zip(tries.items(), passed, strict=True)
}
pd.Series(starred).unstack().loc[list(of_kind), [*HEAD_NUMBERS, "AER"]].fillna("")

# %% [markdown]
# (A star: ρ passes, all 15 tested together.) In the encoder two numbers pass: heads that look at the previous token, and sharp ones (of low entropy), are worth more; often one head is both. Elsewhere no number passes. (In cross-attention only two of 24 worths have a star: their order is uncertain.)
#
# If you bet on the best aligners, 1.5 and 2.8, you lost: we can't see that they are worth anything. The worst aligner, 1.7, is worth most in cross-attention.
#
# ## Who stands in for whom
#
# > **In short.** A worth is what is lost *although all other heads are still there*. If another head says the same, nothing is lost.
#
# So a worth may hide a head's work. We silence heads together: all 24 of a kind; in cross-attention also the four best aligners of each layer, or the four worst. For three reasons a group may cost more than the sum of its worths:
#
# - *A larger disturbance costs more.* The control is **noise**, added to what the heads say, and at each position as long as that (in the stream).
# - *The first losses cost little*, even if no two heads say the same. The control: each head says **half**.
# - *Heads say the same.* If not, silencing half of them costs much more than halving all, which leaves some of each.
#
# **Predict.** Half of cross-attention's heads silent, or all halved: which costs more? Which twelve are missed more?


# %%
def noise_beside(head_outputs: Tensor, output: nn.Linear, features: Tensor) -> Tensor:
    """What heads say, plus noise: in the residual stream as long as what they add to it."""
    columns = output.weight[:, features]  # (D, n · d_k)
    noise = torch.randn_like(head_outputs)
    lengths = [(x @ columns.T).norm(dim=-1, keepdim=True) for x in (head_outputs, noise)]
    return head_outputs + noise * lengths[0] / lengths[1]


def aligners(rates: Tensor) -> dict[str, list[tuple[str, int, int]]]:
    """The heads of cross-attention by AER (N, H): the four best of each layer, and the four worst."""
    best_first = rates.argsort(dim=-1)  # (N, H)
    return {
        name: [("cross", layer, head) for layer, row in enumerate(heads.tolist()) for head in row]
        for name, heads in (("best", best_first[:, :4]), ("worst", best_first[:, -4:]))
    }


# %%
groups = {k: list(heads) for k, heads in itertools.groupby(every_head(model), itemgetter(0))}
groups |= aligners(error_rates(captions, aligned))
ways = {"silent": silence, "noise": noise_beside, "halved": lambda said, *_: said / 2}
torch.manual_seed(0)
lost = {"sum of worths": {name: sum(alone[h] for h in heads) for name, heads in groups.items()}}
for way, change in ways.items():
    lost[way] = {
        name: changed_losses(model, batch, heads, change, memories[heads[0][0]]) - whole
        for name, heads in groups.items()
    }
costs = {  # in nats a token, ± a standard error
    way: {k: "{:.2f} ± {:.2f}".format(*cost_per_token(v, batch.ntokens)) for k, v in of.items()}
    for way, of in lost.items()
}
pd.DataFrame(costs)

# %% [markdown]
# **All heads.** With the encoder's heads silent, no German word sees another; yet the loss rises by only 0.11. Without cross-attention it rises by 3.19, far beyond the sum of the worths, 0.03. Noise of that length costs 0.18, so the disturbance alone doesn't explain it. But halving all costs only 0.13. So small worths alone don't show that heads stand in for one another.
#
# **Half of the heads.** Without the best aligners the loss rises by 0.20, without the worst by 0.15, without both by 3.19. So either twelve alone do nearly the work of all 24: they stand in for one another.
#
# The best less the worst, on our captions and (`python -m scripts.studies.aligners`) on other pairs:


# %%
def group_costs(lost: Mapping[str, Tensor], tokens: int) -> dict[str, float]:
    """The groups' costs, the best less the worst and its standard error, all in nats a token.

    `lost` has what each pair (n,) loses without the group, by the group's name.
    """
    costs = {name: cost_per_token(each, tokens)[0] for name, each in lost.items()}
    difference, error = cost_per_token(lost["best"] - lost["worst"], tokens)
    return costs | {"difference": difference, "error": error}


# %%
live = {"part": "our captions", "pairs": len(captions)}
live |= group_costs(lost["silent"], batch.ntokens)
table = pd.DataFrame([live, *load_record("aligners-multi30k")["lost"]]).set_index("part")
assert table["difference"].iloc[0] > 0 > table["difference"].iloc[1:].max()
group_costs_chart(table)

# %% [markdown]
# On our captions the good aligners are missed more. But on a thousand other pairs they are missed *less*. (Our captions chose the groups, and are easier: a loss of 0.78, there 1.60. Which of the two matters, we can't tell.)
#
# ### Zero, or the mean?
#
# Is 0 fair? The layers above may never have met it. **Mean-ablation** lets a head say its average over all validation pairs instead, which says nothing of any one. **Predict.** Where is the mean milder than 0?

# %%
pd.DataFrame(record["groups"]).set_index("group").filter(regex="silent|mean").round(3)

# %% [markdown]
# The mean is milder only where all of cross-attention is changed. So we keep 0.
#
# ## Patch
#
# > **In short.** Silence says *that* a part matters. To see *what* it carries, give it another sentence's state.
#
# "Eine Frau liest ihrem Sohn ein Buch vor": *A woman reads a book to her son.* With "Ein Mann … seinem Sohn" it is *his*. In German only "ihrem" says whose son it is: "Eine Frau … seinem Sohn" is correct, too.
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
two_words = own[0].clone()
two_words[:, [1, 3]] = others[0][:, [1, 3]]
both = preference(model, memory_from(model, two_words, 0), read, her, his)
print(f"both words at once: {both:+.1f}")
patch_chart(table, words, clean)

# %% [markdown]
# By grammar "seinem" is enough. But patched in at the first three depths, it leaves the model undecided (−0.1); after the last it leans to *his* (−1.3). Exchanging "Frau" alone never gives *his*, but takes most of the lead. Both together (at the embeddings) do nearly all that the other sentence does. (One sentence pair, chosen because it works. Meng et al. 2022 looked for facts in a similar way.)
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
# **Predict.** Embedding and generator share one table in this model. What will the lens say of the bare embedding?

# %%
dog = look_at(trained, captions[0].texts[0])
log_p = logit_lens(model, dog.src, dog.tgt)[::3]  # after whole layers, (N + 1, T, V)
tops = [[piece_label(p) for p in pieces_of(trained, stage.tolist())] for stage in log_p.argmax(-1)]
final = log_p.exp()[:, range(dog.wanted.size(1)), dog.wanted[0]]  # (N + 1, T)
lens_chart(tops, final.tolist(), [piece_label(piece) for piece in dog.read])

# %% [markdown]
# The bare embedding repeats the word just read. Look at the column "the": after two layers the model would write *water*, after three it writes *wet*. The German is "über die nasse Wiese": no water there. Is *water* a habit, since some dogs in captions run through water? Or does it come from "nasse"?
#
# So we replace the adjective by "hohe" (tall), and by "krumme" (crooked), which no training caption holds. We read after each sublayer of layers 2 and 3. A habit would stay. (A lone letter begins a word.)


# %%
def best_tokens(log_p: Tensor) -> str:
    """The three likeliest tokens of log p (V,), each with its probability."""
    top = log_p.exp().topk(3)
    pieces = map(piece_label, pieces_of(trained, top.indices.tolist()))
    return ", ".join(f"{w} {p:.2f}" for w, p in zip(pieces, top.values.tolist(), strict=True))


at = [piece_label(piece) for piece in dog.read].index("the")
sources = {
    adjective: look_at(trained, f"Ein kleiner Hund läuft über die {adjective} Wiese.").src
    for adjective in ("nasse", "hohe", "krumme")
}
parts = ("self-attention", "cross-attention", "feed-forward")
names = [f"after layer {n}'s {part}" for n in (2, 3) for part in parts]
read_early = {}
for adjective, src in sources.items():
    stages = logit_lens(model, src, dog.tgt)[4:, at]  # from layer 2 on, (6, V)
    read_early[adjective] = dict(zip(names, map(best_tokens, stages), strict=True))
pd.DataFrame(read_early)

# %% [markdown]
# *Water* comes from "nasse": from layer 2's cross-attention on, no other column has it among its three. For "hohe" that sublayer brings *tall*, for "nasse" only *water*, barely ahead. After layer 3's, *wet* leads. Are these sublayers needed? Reading can't tell. Cutting can:

# %%
ends = {adjective: {} for adjective in sources}
for (adjective, src), layer in itertools.product(sources.items(), (2, 3)):
    cut = [(attention_layers(model)["cross"][layer - 1], head) for head in range(8)]
    with heads_changed(cut, silence):
        log_p = logit_lens(model, src, dog.tgt)[-1, at]  # (V,)
    ends[adjective][f"without layer {layer}'s cross-attention"] = best_tokens(log_p)
pd.DataFrame(ends)

# %% [markdown]
# Without layer 2's cross-attention *wet* is lost; *tall* isn't, though it first leads there. Without layer 3's, where *wet* first leads, it still leads (0.13 instead of 0.21). So the sublayer where a word first leads may not be needed.
#
# ## Summary
#
# - Everything is added to one stream. Cut what is added, patch what is there, read it early.
# - A head's worth is what is lost without it, given all the others. Compare silence with noise and halving.
# - In this model's encoder sharp heads are worth more. In cross-attention heads stand in for one another: silencing half of them costs little more than halving all. Good aligners are missed more only on the captions that chose them: a finding needs a second set of sentences.
# - Patching shows what a state carries: in our pair, *her* rests on two German words.
# - Reading shows where a word first leads, cutting whether that place is needed.
#
# ## What the paper did that we don't
#
# Its Figures 3 to 5 show heads that seem to find a verb's distant partner, or what "its" refers to. It intervenes nowhere, so it can't tell whether they have stand-ins.
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
# Two heads of a layer do the same thing. Silencing either costs nothing, silencing both costs 3 BLEU. What is each worth, and what does a ranking by worth do with them? A colleague silences the 20 heads that cost least on the test set, and reports the model's BLEU on that same set. What is wrong?
#
# <details><summary>An answer</summary>
#
# Each is worth nothing *given the other*. A ranking throws both out first, and loses 3 BLEU at the second. The 20 were chosen for their luck on those sentences, so the figure is too good; choose on validation.
#
# </details>
#
# ### Exercise 3 · Prune and train again
#
# *project · difficulty ●●● · worth ●●○ · 240 minutes*
#
# Silence the half of the heads that is worth least, and train the rest for one more epoch at a low rate (`Training` of [`core`](../scripts/core/training.py)). How much of the loss comes back? Compare with a random half.
#
# Next: [Chapter 17 · A small GPT](ch17_small_gpt.ipynb)
