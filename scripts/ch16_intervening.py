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
# After this chapter you can change a part of a running model, measure what that costs, and say what a map of attention tells about a head's worth.
#
# | | |
# |---|---|
# | In the paper | Figures 3 to 5 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762), which show heads and test none |
# | Time | 20 minutes to read, 40 with the code; a minute to run on a CPU |
# | Before, after | [Chapter 15 · Looking inside](ch15_looking_inside.ipynb) · [Chapter 17 · A small GPT](ch17_small_gpt.ipynb) |
#
# *If you read only three cells:* the picture of *One vector*, the charts of *Does the map tell?* and *Do heads stand in for one another?*
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures.understanding import (
    halves_chart,
    lens_chart,
    lens_losses_chart,
    map_and_worth_chart,
    patch_chart,
    residual_stream,
    together_chart,
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
# ## One vector
#
# > **In short.** Each part of the model *adds* something to one vector. So we can **cut** what a part adds, **patch** the vector, or **read** early what the model would say.
#
# In a pre-norm model (chapter 4) each position has one vector x, which goes through all layers. Each sublayer reads x and adds its result to it. The vector on its way is the **residual stream**.

# %%
residual_stream()

# %% [markdown]
# ## Cut
#
# > **In short.** To learn what a head is for, take it away and see what gets worse.
#
# The results of a layer's heads stand side by side before the output projection $W^O$ (chapter 2). A head's $d_k$ numbers are what it *says*. PyTorch can call a function of ours there, a *hook*, which replaces some of these numbers. A **silent** head says zeros.


# %% tags=["yours"]
@contextmanager
def heads_changed(
    heads: Iterable[tuple[MultiHeadedAttention, int]], change: Callable[..., Tensor]
) -> Iterator[None]:
    """Inside the block some heads, each a layer and a number from 0, say something else.

    `change` gets what a layer's chosen heads say, (B, T, n · d_k), and returns what they say
    instead. It also gets the output projection, and which of its D inputs these are: n · d_k.
    """
    features = defaultdict(list)  # which inputs of each output projection
    for layer, head in heads:
        d_k = layer.project_output.in_features // layer.h
        features[layer.project_output] += range(head * d_k, (head + 1) * d_k)

    def before_output(output: nn.Linear, inputs: tuple[Tensor]) -> Tensor:
        x, own = inputs[0].clone(), features[output]  # (B, T, D): all heads, side by side
        x[..., own] = change(x[..., own], output, own)
        return x

    with ExitStack() as hooks:
        for output in features:
            hooks.enter_context(output.register_forward_pre_hook(before_output))
        yield


# %%
def silence(head_outputs: Tensor, *_: nn.Linear | list[int]) -> Tensor:
    """Heads that say nothing."""
    return torch.zeros_like(head_outputs)


layer = model.decoder.layers[1].src_attn
x = torch.randn(2, 5, layer.project_output.in_features)  # (B, T, D): all heads, side by side
with heads_changed([(layer, 3)], silence):  # head 2.4
    silent = layer.project_output(x)
x.unflatten(-1, (layer.h, -1))[:, :, 3] = 0  # a view: this changes x
torch.testing.assert_close(silent, layer.project_output(x))


# %% [markdown]
# **Pitfall.** *A hook that is never called.* Our fast decoder reads the layer's weights and never calls the layer: every head seems worthless. Check that something changes.

# %%
cross_heads = [(layer, i) for layer in attention_layers(model)["cross"] for i in range(layer.h)]
with heads_changed(cross_heads, silence):
    assert torch.equal(cached_greedy(model, park.src, None, 30), park.wanted)  # nothing changes
    blind = greedy_decode(model, park.src, None, 30)  # chapter 6's calls it
print(captions[2].texts[0])
for name, ids in (("whole", park.wanted), ("cross-attention silent", blind)):
    print(f"{name}: {trained.tokenizer.decode(ids[0].tolist())}")

# %% [markdown]
# Without the source the decoder still writes a caption, but of another picture: it is also a language model.
#
# ## What is a head worth?
#
# > **In short.** A head's worth is how much the loss rises without it.
#
# BLEU notices a head only when a *word* changes. So the model reads the reference (teacher forcing). A head's **worth** is how much the reference's $-\log p$ rises while the head is silent, in nats a token.


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
    change: Callable[..., Tensor] = silence,
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
# **Predict.** The model's loss on our fifty short, plain captions is 0.78 nats a token. How much does it rise without one head of 72?

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
print(f"the whole model's loss: {whole.sum() / batch.ntokens:.2f} nats a token")
print(f"a head's worth: {worths.mean():.3f} on average, standard error {errors.mean():.3f}")

# %% [markdown]
# A worth's standard error is twice the average worth: fifty captions are too few. So we take the worths from 1,014 validation pairs (the record of `python -m scripts.studies.heads`).

# %%
record = load_record("heads-multi30k")
passed = pass_together([head["silent p"] for head in record["heads"]])  # t tests over the pairs
worth_chart(record["heads"], passed, record["splits"]["val"])

# %% [markdown]
# 24 worths differ from 0 by more than chance (Holm's method, chapter 10). But beside the loss, 1.60 on these pairs, all are small.
#
# ## Does the map tell?
#
# > **In short.** In the encoder, a head's map tells something about its worth. Elsewhere we can't say.
#
# Three numbers of chapter 15 describe a head's map:
#
# - *entropy*: low if the head is *sharp* and looks at few tokens;
# - *previous*: its weight on the previous token;
# - *AER*, in cross-attention: its errors as an aligner of our captions. A *good aligner* has few: it looks at the German of the next English word.
#
# We rank the 24 heads of each kind by a number, and by worth. *Spearman's ρ* compares the two orders: 1 if they agree, −1 if one is reversed, near 0 if unrelated. If maps tell nothing, no ρ differs from 0 by more than chance.
#
# **Predict.** Which are worth more: sharp heads, heads that look at the previous token, good aligners?

# %%
looks = [look_at(trained, *pair.texts) for pair in captions]  # teacher forcing
aligned = [cross_word_weights(*both, "writing") for both in zip(looks, captions, strict=True)]
rates = error_rates(captions, aligned)  # AER (N, H)
lines = dossiers(record, rates)  # a line for each of the 72 heads
of_kind = dict(iter(lines.groupby("kind", sort=False)))
ranks = {}
for kind, heads in of_kind.items():
    for number in ("entropy", "AER" if kind == "cross" else "previous"):
        ranks[kind, number] = spearmanr(heads[number], heads["silent"])
passed = pass_together([rank.pvalue for rank in ranks.values()])
for ((kind, number), rank), ok in zip(ranks.items(), passed, strict=True):
    print(f"{kind:8} {number:9} ρ {rank.statistic:+.2f}{' *' * ok}")
encoder = of_kind["encoder"]
parts = {f"layer {n}": heads for n, heads in encoder.groupby("layer")}
parts["without four heads"] = encoder.query("previous < 0.3")
for name, heads in parts.items():
    rank = spearmanr(heads["entropy"], heads["silent"])
    print(f"entropy, encoder, {name}: ρ {rank.statistic:+.2f}")

# %%
bet = ["encoder 2.1", "cross 1.7", "decoder 3.6", "encoder 3.2", "cross 2.8", "cross 1.5"]
map_and_worth_chart(of_kind, bet, record["splits"]["val"])

# %% [markdown]
# A star marks a ρ beyond chance, with all six tested at once. In the encoder sharp heads are worth more, and so are heads that look at the previous token. Without the four heads that look there most, ρ is still −0.60 for entropy. But the two numbers go together, so we can't tell which of them matters.
#
# Elsewhere no ρ has a star. But there a worth's error is nearly as large as the differences between heads, so the test may miss an order.
#
# Chapter 15's bet: encoder 2.1 is worth most, then cross 1.7 and decoder 3.6; the other three can't be told from 0. If you bet on the good aligners, cross 2.8 and 1.5, you lost. Cross 1.7, worth most of its kind, is the worst aligner; its map doesn't tell why.
#
# ## Do heads stand in for one another?
#
# > **In short.** A worth is what is lost *while all other heads are still there*. If others can do a head's work, little is lost.
#
# Cross-attention is needed, yet each of its heads is worth almost nothing. So we silence all 24 heads of a kind together. If losses add up, this costs the sum of their worths.
#
# **Predict.** In which kind do they cost most, beside that sum?

# %%
together_chart(record["groups"][:3], record["splits"]["val"])  # the other groups: aligners

# %% [markdown]
# In cross-attention they cost 52 times as much together. ([Michel et al. 2019](https://arxiv.org/abs/1905.10650), too, lost most there.) Three explanations:
#
# 1. *A large change does harm, whatever it is.* Test: beside what the heads say, add **noise**, a random vector of the same length.
# 2. *Everything is said louder than needed.* Test: **halve** what all 24 heads say.
# 3. *Heads stand in for one another*: others can do its work. Test: silence twelve heads. If they don't, twelve silent heads should cost much more than all halved, though both take half away.
#
# The twelve are the four best aligners of each layer, or the four worst. To judge their difference we also take random halves.
#
# **Predict.** Are the best aligners missed more than the worst?


# %%
def noise_beside(head_outputs: Tensor, output: nn.Linear, features: list[int]) -> Tensor:
    """What heads say, plus noise: in the residual stream as long as what they add to it."""
    columns = output.weight[:, features]  # (D, n · d_k)
    noise = torch.randn_like(head_outputs)
    lengths = [(x @ columns.T).norm(dim=-1, keepdim=True) for x in (head_outputs, noise)]
    return head_outputs + noise * lengths[0] / lengths[1]


def halve(head_outputs: Tensor, *_: nn.Linear | list[int]) -> Tensor:
    """Heads that say half of what they would."""
    return head_outputs / 2


def aligners(rates: Tensor) -> dict[str, list[tuple[str, int, int]]]:
    """The heads of cross-attention by AER (N, H): the four best of each layer, and the four worst."""
    best_first = rates.argsort(dim=-1)  # (N, H)
    return {
        name: [("cross", layer, head) for layer, row in enumerate(heads.tolist()) for head in row]
        for name, heads in (("best", best_first[:, :4]), ("worst", best_first[:, -4:]))
    }


CROSS_CHANGES = {  # which heads of cross-attention, and what changes them
    "noise beside all 24": ("cross", noise_beside),
    "all 24 halved": ("cross", halve),
    "12 best aligners silent": ("best", silence),
    "12 worst aligners silent": ("worst", silence),
    "all 24 silent": ("cross", silence),
}


# %%
groups = aligners(rates)
groups["cross"] = groups["best"] + groups["worst"]


def lost_with(heads: Iterable[tuple[str, int, int]], change: Callable[..., Tensor]) -> Tensor:
    """What each caption loses while heads of cross-attention are changed, (50,)."""
    return changed_losses(model, batch, heads, change, memory) - whole


torch.manual_seed(0)  # noise
ours = {
    name: cost_per_token(lost_with(groups[group], change), batch.ntokens)
    for name, (group, change) in CROSS_CHANGES.items()
}


# %%
def first_less_second(halves: Mapping[str, list[tuple[str, int, int]]]) -> tuple[float, float]:
    """How much more one half costs than the other, in nats a token, and its standard error."""
    first, second = (lost_with(half, silence) for half in halves.values())
    return cost_per_token(first - second, batch.ntokens)


print("best less worst, our captions: {:+.3f} ± {:.3f}".format(*first_less_second(aligners(rates))))
torch.manual_seed(0)
random = [first_less_second(aligners(torch.rand_like(rates))) for _ in range(20)]
sizes = sorted(abs(difference) for difference, _ in random)
print(f"two random halves differ by {np.median(sizes):.3f} (median of 20), at most {sizes[-1]:.3f}")

# %% [markdown]
# The same on the 1,014 validation pairs (the record of `python -m scripts.studies.aligners`):

# %%
study = load_record("aligners-multi30k")
print(f"24 means instead of zeros: {record['groups'][2]['mean, together']:.2f}")
print("best less worst, validation: {:+.3f} ± {:.3f}".format(*study["best less worst"]))
theirs = {name: (cost, study["errors"][name]) for name, cost in study["costs"].items()}
halves_chart({"our 50 captions": ours, "1,014 validation pairs": theirs}, "all 24 silent")

# %% [markdown]
# 1. *Does any large change do as much harm?* No: noise costs far less than silence. Nor are the zeros to blame: with each head's mean instead, 2.41 are lost.
# 2. *Is everything said louder than needed?* Yes: halving costs little.
# 3. *Do heads stand in for one another?* On validation either twelve cost about 0.2 nats, near the 0.15 of all halved. So the other twelve do nearly all of the work.
#
# **Your prediction.** On our captions the best aligners are missed *more* than the worst, on validation *less*. On our captions random halves differ as much (up to 0.078); on validation we drew none. So we can't say that aligning matters.
#
# ## Patch
#
# > **In short.** Silence shows *that* a part matters. To see *what* it carries, put another sentence's vector in its place.
#
# "Eine Frau liest ihrem Sohn ein Buch vor" means *A woman reads a book to her son*. With "Ein Mann … seinem Sohn" it is *his*. In German grammar "ihrem" or "seinem" alone decides between the two, whoever reads. Does the model rest on this word alone?
#
# We run both sentences through the encoder. In the first run we exchange *one* vector, the stream at position s after layer n, for that of the second, and go on. The decoder has read "A woman reads a book to". How much does it prefer *her*?
#
# $$ \log p(\text{her}) - \log p(\text{his}). $$
#
# If the two vectors don't differ in what matters for this choice, the number stays.


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
def preference(model: EncoderDecoder, memory: Tensor, tgt: Tensor, this: int, that: int) -> float:
    """log p(this) − log p(that) for the token after tgt (1, T)."""
    with dropout_off(model):
        x = model.decode(memory, None, tgt, subsequent_mask(tgt.size(1)))  # (1, T, D)
    logits = model.generator(x[0, -1])  # (V,)
    return (logits[this] - logits[that]).item()


# %%
woman = look_at(trained, "Eine Frau liest ihrem Sohn ein Buch vor.")
man = look_at(trained, "Ein Mann liest seinem Sohn ein Buch vor.")
(her,), (his,) = (trained.tokenizer.encode(word) for word in ("her", "his"))
read = woman.tgt[:, : woman.wanted[0].tolist().index(her) + 1]  # what stands before "her"
own, others = (encoder_stages(model, look.src) for look in (woman, man))  # N + 1 of (1, S, D)
assert own[0].shape == others[0].shape  # so that positions match, piece by piece
clean, foreign = (
    preference(model, memory_from(model, stages[-1], 3), read, her, his) for stages in (own, others)
)
print(f"log p(her) − log p(his): {clean:+.1f}, and {foreign:+.1f} with all of the other's source")

# %% [markdown]
# With the whole other sentence the model prefers *his*, although it has read "woman": the source decides.
#
# **Predict.** Now exchange one vector at a time: ten positions, four depths. Is "Frau" enough to turn *her* into *his*? Is "ihrem"?


# %%
def her_lead(x: Tensor, y: Tensor, position: int, done: int) -> float:
    """log p(her) − log p(his) while x (1, S, D) has one position from y (1, S, D)."""
    mixed = x.clone()
    mixed[:, position] = y[:, position]
    return preference(model, memory_from(model, mixed, done), read, her, his)


table = [  # a row a depth, a column a position
    [her_lead(x, y, s, done) for s in range(x.size(1))]
    for done, (x, y) in enumerate(zip(own, others, strict=True))
]
labels = [[piece_label(piece) for piece in look.source] for look in (woman, man)]
words = [a if a == b else f"{a} / {b}" for a, b in zip(*labels, strict=True)]
mother = look_at(trained, "Eine Mutter liest ihrem Sohn ein Buch vor.")
print(f"Mutter for Frau: {her_lead(own[0], encoder_stages(model, mother.src)[0], 1, 0):+.1f}")
patch_chart(table, words, clean)

# %% [markdown]
# Only two columns change much. Exchanging "ihrem" leaves the model undecided, or after the last layer turns it to *his*. Exchanging "Frau" takes away most of *her*'s lead. So in this sentence *her* rests on two German words, where grammar needs one. After layer 3, exchanging "ihrem" does more and exchanging "Frau" less: some of what "Frau" says has moved to "ihrem".
#
# "Mutter" (mother) for "Frau" changes nothing.
#
# ## Read
#
# > **In short.** What would the decoder say after an early sublayer? This shows what each sublayer changes, not whether the model needs it.
#
# The last norm and the generator can turn the stream into probabilities after *any* sublayer: this is the **logit lens** ([nostalgebraist 2020](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens)).


# %%
@torch.no_grad()
def decoder_stages(model: EncoderDecoder, src: Tensor, tgt: Tensor) -> Tensor:
    """The decoder's residual stream: the embeddings, then after each sublayer, (3N + 1, T, D)."""
    stages = []
    parts = [model.tgt_embed, *(part for layer in model.decoder.layers for part in layer.sublayer)]
    with ExitStack() as hooks, dropout_off(model):
        for part in parts:
            hooks.enter_context(part.register_forward_hook(lambda _, x, y: stages.append(y)))
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
# **Predict.** The embedding and the generator share one table. What will the lens show before the first layer?

# %%
dog = look_at(trained, captions[0].texts[0])
log_p = logit_lens(model, dog.src, dog.tgt)[::3]  # after whole layers, (N + 1, T, V)
tops = [[piece_label(p) for p in pieces_of(trained, stage.tolist())] for stage in log_p.argmax(-1)]
final = log_p.exp()[:, range(dog.wanted.size(1)), dog.wanted[0]]  # (N + 1, T)
lens_chart(tops, final.tolist(), [piece_label(piece) for piece in dog.read])

# %% [markdown]
# Before the first layer the lens shows the word just read: a row of the table usually has its largest product with itself. Look at the column "the": after two layers the model would write *water*, after three *wet*, the English of "nasse".
#
# Does it predict what is needed? For each sublayer we take two numbers: what it *adds* to the lens's log p of a word, and what its cut *costs*: how much the last log p falls if what comes in goes out unchanged. For the last sublayer the two are equal by definition.
#
# First cross-attention and two words: *wet*, and *tall* for "hohe" instead of "nasse".


# %%
sublayers = [part for layer in model.decoder.layers for part in layer.sublayer]


def adds_nothing(_: nn.Module, inputs: tuple[Tensor, Callable], output: Tensor) -> Tensor:
    """A hook that cuts a sublayer: what comes in goes out."""
    return inputs[0]


at = [piece_label(piece) for piece in dog.read].index("the")  # here the adjective is written
for german, english in (("nasse", "wet"), ("hohe", "tall")):
    src = look_at(trained, f"Ein kleiner Hund läuft über die {german} Wiese.").src
    (token,) = trained.tokenizer.encode(english)
    log_p = logit_lens(model, src, dog.tgt)[:, at, token]  # (3N + 1,)
    for i in (1, 4, 7):  # cross-attention
        with sublayers[i].register_forward_hook(adds_nothing):
            cost = log_p[-1] - logit_lens(model, src, dog.tgt)[-1, at, token]
        added = log_p[i + 1] - log_p[i]
        print(f"{english}: layer {i // 3 + 1} adds {added:.1f}, its cut costs {cost:.2f}")

# %% [markdown]
# For *wet* both numbers put layer 2's cross-attention before layer 3's. But for *tall* layer 2's adds 4 nats, and its cut costs next to nothing. Do the two numbers agree in general? We draw the lens's loss on all our references, with and without the word just read.
#
# **Predict.** An even guess loses ln V = 9.0 nats. Where does the lens begin?

# %%
all_words, without_read = [], []  # the lens's loss at each token, (3N + 1, T)
for look in looks:
    places, wanted = range(look.wanted.size(1)), look.wanted[0]
    log_p = logit_lens(model, look.src, look.tgt)  # (3N + 1, T, V)
    all_words.append(-log_p[:, places, wanted])
    log_p[:, places, look.tgt[0]] = -torch.inf  # the word just read is out of the question
    without_read.append(-log_p.log_softmax(-1)[:, places, wanted])
losses, other_losses = (torch.cat(x, dim=1).mean(dim=1) for x in (all_words, without_read))
costs = []
for sublayer in sublayers:
    with sublayer.register_forward_hook(adds_nothing):
        costs.append(cost_per_token(reference_losses(model, batch, memory) - whole, batch.ntokens))
lens_losses_chart(losses.tolist(), other_losses.tolist(), math.log(log_p.size(-1)), costs)

# %% [markdown]
# The lens begins at 25.8 nats, far worse than an even guess, mostly since it insists on the word just read; without that word at 11.8. So much of what layer 1 "adds" is unsaying it.
#
# In order the two numbers mostly agree: layer 1's feed-forward layer gains most and costs most. In size they don't: on the second line, too, each sublayer of layers 1 and 2 gains several times what its cut costs. One layer's cross-attention costs at most 0.1 nats, all three cost 3.2: layers, too, stand in for one another.
#
# ## Summary
#
# - In this model's encoder sharp heads are worth more. In cross-attention half of the heads do nearly all of the work of all, and so do two of three layers.
# - Patching shows what a vector carries: in our pair, *her* rests on two German words.
# - Reading shows how an answer forms, first by unsaying the word just read; not how much the model needs a part.
#
# ## What the paper did that we don't
#
# Its Figures 3 to 5 show heads that seem to find a verb's distant partner, or what "its" means. It cuts none.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Silence, another way
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# Silence head `head` (from 0) of a `MultiHeadedAttention` inside a `with` block through $W^V$ and its bias, instead of what goes into $W^O$. Autograd stays on. Afterwards the layer is what it was, even after an error. (`solution("values_silenced")` shows ours.)


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
# Two heads of a layer do the same thing. Silencing either costs nothing, both 0.3 nats. What is each worth? What goes wrong if we prune heads in the order of their worths?
#
# <details><summary>An answer</summary>
#
# Each is worth nothing *given the other*. So both go early, and the second takes 0.3 nats with it. Measure again after each head.
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
