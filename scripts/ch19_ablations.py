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
# # Chapter 19 · Ablations
#
# After this chapter you can take a model apart one piece at a time, prove that the piece is really gone, and say which differences are real and which are chance.
#
# | | |
# |---|---|
# | In the paper | §6.2 and Table 3 of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 40 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 18 · One stack](ch18_one_stack.ipynb) · [Chapter 20 · Scaling](ch20_scaling.ipynb) |
#
# *If you read only three cells:* `drop_scale`, `STUDY_ROWS`, the chart of *What the recorded runs show*.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, $d_k$ numbers of a key.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from scripts.book.exercises import check
from scripts.book.figures.understanding import ablation_chart, ablation_rates_chart
from scripts.book.instruments import scramble
from scripts.book.records import load_record
from scripts.book.verdict import pooled_spread, t_exceeded, verdicts
from scripts.ch01_attention import subsequent_mask
from scripts.ch02_multi_head_attention import MultiHeadedAttention, merge_heads, split_heads
from scripts.ch03_embeddings_and_positions import LearnedPositions
from scripts.ch04_encoder_decoder import EncoderDecoder, SublayerConnection, clones, initialise
from scripts.ch06_training import BOS, EOS, Batch, LabelSmoothing, batch_loss
from scripts.core.settings import PRESETS, TrainConfig, build_model, pick_device
from scripts.fast.losses import loss_function_of

# %%
torch.set_default_dtype(torch.float64)  # "equal" can be checked to many digits

# %% [markdown]
# ## A model that can be trained a hundred times
#
# > **In short.** To know what a part is worth, train the model without it. To know whether the difference is real, train both several times, each at a learning rate that suits it.
#
# *Ablation* is a surgeon's word for taking something away. The paper's Table 3 does this to the base model: fewer heads, shorter keys, other sizes, more or less dropout, learned positions. Each of its rows took hours on eight GPUs. One of ours takes minutes on one CPU core: a small model, and five passes over the 29,000 pairs of Multi30k.

# %%
STUDY = replace(
    PRESETS["narrow"],
    d_model=64,
    d_ff=256,
    heads=4,
    vocab=2000,
    epochs=5,
    max_tokens=2048,
    lr=4.2e-3,  # where the sweeps begin
    warmup=100,
    average=0,
    precision="float32",
    device="cpu",
    name="table-3",
)
THE_BASE = "the study's base"
COUNTED_SEEDS = (1, 2, 3)  # other seeds only choose rates


# %%
def layer_parameters(model: EncoderDecoder) -> int:
    """Parameters of encoder and decoder: all but the tables and the generator, as Kaplan et al. count."""
    return sum(p.numel() for part in (model.encoder, model.decoder) for p in part.parameters())


# %%
with torch.device("meta"):  # shapes without storage
    base_model = build_model(STUDY, STUDY.vocab)
everything = sum(p.numel() for p in base_model.parameters())
print(f"{STUDY.layers}+{STUDY.layers} layers, d_model {STUDY.d_model}, {STUDY.heads} heads")
print(f"{everything:,} parameters, of which {layer_parameters(base_model):,} in the layers")

# %% [markdown]
# ## Operating on a model
#
# > **In short.** Some changes are settings, others are operations on the built model. Prove that an operation did what its name says before you spend a training run on it.
#
# Heads, layers, widths, dropout, smoothing, norm placement and warm-up are settings of chapter 9's `TrainConfig`. Positions, residual roads, the scale and $d_k$ need an operation: a short function that changes a built model.
#
# All checks use one *patient*, a small model with random weights.

# %%
PATIENT = replace(STUDY, d_model=32, d_ff=48, dropout=0.0)


def two_sentences(order: Sequence[int] = range(7)) -> Batch:
    """A batch of two pairs without padding; the source tokens in another `order`, if one is given."""
    sources = torch.tensor([[4, 9, 7, 11, 5, 8, EOS], [12, 5, 4, 10, 13, 6, EOS]])  # (B, S)
    targets = torch.tensor([[BOS, 6, 12, 10, 4, 13, EOS], [BOS, 8, 9, 11, 7, 5, EOS]])  # (B, T + 1)
    return Batch(sources[:, list(order)], targets)


def patient(operate: Callable[[EncoderDecoder], None] | None = None, **changes) -> EncoderDecoder:
    """A fresh small model in double precision, operated on; every weight moved, so that no bias is 0."""
    torch.manual_seed(0)
    model = build_model(replace(PATIENT, **changes), 14)
    if operate is not None:
        operate(model)
    model = model.double().eval()
    scramble(model)
    return model


def loss_on(model: EncoderDecoder, batch: Batch) -> float:
    """The batch's loss by the classes of chapters 1 to 6."""
    return batch_loss(model, batch, LabelSmoothing(0.1))[0].item()


# %% [markdown]
# ### Positions: none, or learned
#
# To take positions away, let them add zeros. The paper's row (E) has a learned table instead (chapter 3).


# %%
def drop_positions(model: EncoderDecoder, sides: Sequence[str] = ("src", "tgt")) -> None:
    """Let the positions add nothing: the sinusoids become zeros, on the sides named."""
    for side in sides:
        getattr(model, f"{side}_embed")[1].pe.zero_()


def learn_positions(model: EncoderDecoder) -> None:
    """A learned table in the sinusoids' place, one on each side (the paper's Table 3, row E)."""
    for embed in (model.src_embed, model.tgt_embed):
        sinusoids = embed[1]
        embed[1] = LearnedPositions(sinusoids.pe.size(1), sinusoids.dropout.p)


# %% [markdown]
# **Predict.** Shuffle the words of the source. Does the loss of a model without positions change? Now shuffle what the *decoder* has written so far. Does the next word change?


# %%
def last_word_moves(layers: int) -> bool:
    """Whether shuffling a positionless decoder's past changes what it says next."""
    model, batch = patient(drop_positions, layers=layers), two_sentences()
    memory, causal = model.encode(batch.src), subsequent_mask(5)
    past = batch.tgt[:, [0, 1, 2, 3, 4]], batch.tgt[:, [2, 1, 0, 3, 4]]
    first, second = (model.decode(memory, None, ids, causal)[:, -1] for ids in past)
    return not torch.allclose(first, second, rtol=1e-9, atol=1e-9)


# %%
batch, shuffled = two_sentences(), two_sentences(order=[3, 0, 6, 2, 5, 1, 4])
for name, operate in {"without positions": drop_positions, "with": None}.items():
    model = patient(operate)
    change = abs(loss_on(model, shuffled) - loss_on(model, batch))
    print(f"{name}: shuffling the source changes the loss by {change:.4f}")
print("one decoder layer sees the order of its past:", last_word_moves(1))
print("two decoder layers see it:", last_word_moves(2))

# %% [markdown]
# The loss doesn't change: an encoder without positions reads a bag of words. A decoder of one layer knows which words came, and which came last (the query itself), but can't tell their order. A second layer can: because of the causal mask, the first layer mixes word 2's vector from two words and word 3's from three, so each vector shows where it stood (Haviv et al. 2022).
#
# ### No residual roads
#
# $x + f(x)$ becomes $f(x)$.


# %%
class WithoutResidual(SublayerConnection):
    """The connection without its road past the sublayer: norm and dropout stay, x + … goes."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, D) to (B, T, D)."""
        if self.norm_first:
            return self.dropout(sublayer(self.norm(x)))
        return self.norm(self.dropout(sublayer(x)))


def drop_residuals(model: EncoderDecoder) -> None:
    """Every residual connection becomes one without its x + …"""
    for layer in (*model.encoder.layers, *model.decoder.layers):
        old = layer.sublayer[0]
        new = WithoutResidual(layer.size, old.dropout.p, old.norm_first)
        layer.sublayer = clones(new, len(layer.sublayer))


# %%
x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
bare = patient(drop_residuals).encoder.layers[0].sublayer[0]
whole = SublayerConnection(32, 0.0, norm_first=True)
whole.load_state_dict(bare.state_dict())
torch.testing.assert_close(bare(x, torch.sin), torch.sin(bare.norm(x)))
torch.testing.assert_close(whole(x, torch.sin), x + bare(x, torch.sin))

# %% [markdown]
# ### No $1/\sqrt{d_k}$
#
# The division sits inside `attention`, of which several chapters have their own version. We needn't change any: if the queries are $\sqrt{d_k}$ times as long, the division cancels out:
#
# $$ \frac{(\sqrt{d_k}\, W^Q x) \cdot k}{\sqrt{d_k}} = (W^Q x) \cdot k $$
#
# In PyTorch this is a *parametrization*: the layer uses a function of the weight that it learns. The gradient passes through the function, so the model trains like one without the division.


# %%
class Times(nn.Module):
    """A parametrization: the weight that the layer uses is `factor` times the one it learns."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, scaled; any shape."""
        return self.factor * weight


def attentions(model: nn.Module) -> Iterator[MultiHeadedAttention]:
    """Every attention of the model."""
    return (part for part in model.modules() if hasattr(part, "project_query"))


def drop_scale(model: EncoderDecoder) -> None:
    """Attention without 1/√d_k: queries √d_k times as long, so that the division undoes just that."""
    for attn in attentions(model):
        d_k = attn.project_query.out_features // attn.h
        for name in ("weight", "bias"):
            parametrize.register_parametrization(attn.project_query, name, Times(math.sqrt(d_k)))


# %% [markdown]
# ### Shorter keys
#
# Rows (B) of Table 3 shorten queries and keys, which changes only the scores. `MultiHeadedAttention` never asks how wide its projections are, so we can replace two of them.


# %%
def set_d_k(model: EncoderDecoder, d_k: int) -> None:
    """Queries and keys of `d_k` numbers a head; values keep D/H (the paper's Table 3, rows B)."""
    for attn in attentions(model):
        for name in ("project_query", "project_key"):
            layer = nn.Linear(attn.project_query.in_features, attn.h * d_k)
            initialise(layer)
            setattr(attn, name, layer)


# %% [markdown]
# Check both against PyTorch's attention, which takes the scale as an argument.


# %%
def by_torch(attn: MultiHeadedAttention, x: Tensor, scale: float | None = None) -> Tensor:
    """What the layer computes from x (B, T, D), with PyTorch's own attention between the projections."""
    linears = (attn.project_query, attn.project_key, attn.project_value)
    q, k, v = (split_heads(linear(x), attn.h) for linear in linears)
    return attn.project_output(merge_heads(F.scaled_dot_product_attention(q, k, v, scale=scale)))


plain = patient().encoder.layers[0].self_attn
unscaled = copy.deepcopy(plain)
drop_scale(unscaled)
torch.testing.assert_close(unscaled(x, x, x), by_torch(plain, x, scale=1.0))  # no division
assert (unscaled(x, x, x) - plain(x, x, x)).abs().max() > 1e-3  # … which is another model

short = patient(partial(set_d_k, d_k=3))
attn = short.encoder.layers[0].self_attn
torch.testing.assert_close(attn(x, x, x), by_torch(attn, x))  # divides by √3, as it should
gone = layer_parameters(patient()) - layer_parameters(short)
print(f"d_k = 3 instead of 8: {gone:,} parameters fewer in six attentions")

# %% [markdown]
# ## The rows
#
# > **In short.** A row is a name, some settings, and an operation. One check compares each row's loss with that of the model that was built.
#
# **Pitfall.** *An operation that the training doesn't see.* The series trains by chapter 12's fast path, which walks over the modules and reads their weights. It never calls `SublayerConnection.forward`. Replace that method, and the fast path still adds $x$, without a warning. The row "no residual" would be the base under another name, and its result would be a headline: residual roads aren't needed! So each row says how its loss is computed.


# %%
@dataclass(frozen=True)
class StudyRow:
    """A row of the study: which settings change, what is done to the built model, how it is computed."""

    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    operate: Callable[[EncoderDecoder], None] | None = None
    way: Literal["fast", "apart", "textbook"] = "fast"  # apart: only the fast decoder can't see it

    def config(self, base: TrainConfig, **more: Any) -> TrainConfig:
        """`base` with this row's settings, and `more`."""
        return replace(base, **(self.changes | more))

    def build(self, config: TrainConfig, vocab: int) -> EncoderDecoder:
        """The row's model over `vocab` pieces, from the global seed."""
        model = build_model(config, vocab)
        if self.operate is not None:
            self.operate(model)
        return model

    def loss_of(self, config: TrainConfig) -> Callable[..., tuple[Tensor, Tensor]]:
        """How this row's loss is computed: the fast path, if that can see what was changed."""
        step = "textbook" if self.way == "textbook" else config.step
        return loss_function_of(replace(config, step=step), pick_device(config.device))


# %%
STUDY_ROWS: dict[str, StudyRow] = {
    THE_BASE: StudyRow("base"),
    "1 head": StudyRow("A", {"heads": 1}),
    "2 heads": StudyRow("A", {"heads": 2}),
    "8 heads": StudyRow("A", {"heads": 8}),
    "16 heads": StudyRow("A", {"heads": 16}),
    "d_k 4": StudyRow("B", {}, partial(set_d_k, d_k=4), "apart"),
    "d_k 8": StudyRow("B", {}, partial(set_d_k, d_k=8), "apart"),
    "1 layer": StudyRow("C", {"layers": 1}),
    "4 layers": StudyRow("C", {"layers": 4}),
    "d_model 32": StudyRow("C", {"d_model": 32}),
    "d_model 128": StudyRow("C", {"d_model": 128}),
    "d_ff 128": StudyRow("C", {"d_ff": 128}),
    "d_ff 512": StudyRow("C", {"d_ff": 512}),
    "no smoothing": StudyRow("D", {"smoothing": 0.0}),
    "smoothing 0.2": StudyRow("D", {"smoothing": 0.2}),
    "learned positions": StudyRow("E", {}, learn_positions),
    "no positions": StudyRow("ours", {}, drop_positions),
    "no positions in the encoder": StudyRow("ours", {}, partial(drop_positions, sides=("src",))),
    "no positions in the decoder": StudyRow("ours", {}, partial(drop_positions, sides=("tgt",))),
    "no residual": StudyRow("ours", {}, drop_residuals, "textbook"),
    "no √d_k": StudyRow("ours", {}, drop_scale),
    "no warm-up": StudyRow("ours", {"warmup": 1}),
    "post-norm": StudyRow("ours", {"norm_first": False}),
    "post-norm, no warm-up": StudyRow("ours", {"norm_first": False, "warmup": 1}),
}

# %% [markdown]
# Check: with the same weights, a row's own way must give the loss of the textbook's classes. Dropout is off and no step is made, so this check can't see dropout and warm-up.


# %%
def trained_as_built(row: StudyRow) -> bool:
    """Whether the row's way of computing the loss agrees with its model's own classes."""
    config, batch = row.config(STUDY), two_sentences()
    torch.manual_seed(0)
    model = row.build(config, 14).double().eval()
    scramble(model)
    ours = row.loss_of(config)(model, batch, LabelSmoothing(config.smoothing))
    theirs = batch_loss(model, batch, LabelSmoothing(config.smoothing))
    both = zip(ours, theirs, strict=True)
    return all(math.isclose(a.item(), b.item(), rel_tol=1e-10) for a, b in both)


agree = sum(map(trained_as_built, STUDY_ROWS.values()))
print(f"{agree} of {len(STUDY_ROWS)} rows: the loss is that of the built model, with dropout off")
assert agree == len(STUDY_ROWS)
assert not trained_as_built(replace(STUDY_ROWS["no residual"], way="fast"))  # the headline, caught

# %% [markdown]
# `python -m scripts.studies.table3 --save` trains the rows that the record lacks ([`table3.py`](../scripts/studies/table3.py)).
#
# ## A base that suits the study
#
# > **In short.** First find what suits the model, and then which learning rate suits each change.
#
# The paper's base has a dropout of 0.1, for a training of 100,000 steps. **Predict.** Which dropout suits five passes?

# %%
runs = load_record("table3-multi30k")["runs"]
sweeps = pd.DataFrame([run for run in runs if run["seed"] not in COUNTED_SEEDS])
of_base = sweeps[(sweeps["row"] == THE_BASE) & (sweeps["seed"] == 0)]
by_dropout = of_base.pivot(index="dropout", columns="lr", values="loss").dropna(axis="columns")
by_dropout.rename_axis(columns="peak rate").round(2)

# %% [markdown]
# None. At every rate less dropout is better. So the base has no dropout, and its peak rate is 0.0084.
#
# Some rows may need another rate. For eleven we try the base's rate, half of it and twice it, and go on in the better direction until the best rate has worse ones on both sides. A parabola through these three guesses what the rates between could gain. Where that is over 0.03 nats, two seeds go on in steps of √2; for the base, too.
#
# **Predict.** Which model needs a higher rate, the wide one or the narrow one?


# %%
def best_rates(sweeps: pd.DataFrame, rate: float) -> pd.DataFrame:
    """Each swept row's best rate, what it gains over the base's `rate`, and over a finer grid, in nats.

    Where rates had two seeds, their means decide. The last is a guess: how far a parabola through
    the best rate and its neighbours falls below.
    """
    table = {}
    for name, tried in sweeps.groupby("row", sort=False):
        by_rate = tried.groupby("lr")["loss"]  # no number where a run diverged
        means, seeds = by_rate.mean(), by_rate.size()
        compared = means[seeds == seeds.max()]
        best = compared.argmin()
        low, here, high = compared.iloc[best - 1 : best + 2]
        finer = (low - high) ** 2 / (8 * (low - 2 * here + high))
        table[name] = {
            "best rate": compared.index[best],
            "gain": means[rate] - here,
            "finer": finer,
        }
    return pd.DataFrame(table).T


# %%
without = sweeps[sweeps["dropout"] == 0]
rate = by_dropout.loc[0].idxmin()
rates = best_rates(without, rate)
ablation_rates_chart(without)

# %%
rates.round(4)

# %% [markdown]
# *gain* is what a row would lose at the base's rate. The narrow model needs twice that rate, the wide one half of it.
#
# *finer* guesses what a rate between those tried might still gain: at most 0.02 nats. A row will be called worse only if it stays worse without its *finer*. The base itself is 0.014 nats better at the next rate, by two seeds. The rows without a sweep share its rate, so it keeps it; but a row will be called better only if it stays so when the base is granted 0.014.
#
# **Pitfall.** *One rate for all.* At the base's rate post-norm without warm-up would be 1.4 nats worse than it need be, and the wide model's lead would shrink by 0.18. A table made that way ranks how well each row suits the base's rate.
#
# ## What is a difference, and what is chance
#
# > **In short.** Train one model with three seeds and you get three losses. A change must move the loss by clearly more than chance does. And with many rows, even a rare accident happens somewhere.
#
# Table 3 gives one number a row, and no spread. Here each row has three runs, with seeds that no sweep has used. Three are too few to know one row's scatter, so we assume that all rows scatter alike, and normally, and pool the runs' squared distances from their row's mean:
#
# $$ s^2 = \frac{\sum_r \sum_i (L_{ri} - \bar L_r)^2}{\sum_r (n_r - 1)}, \qquad t_r = \frac{\bar L_r - \bar L_{\text{base}}}{s\sqrt{1/n_r + 1/n_{\text{base}}}} $$
#
# with $n_r$ runs of row $r$ and $L_{ri}$ the loss of its $i$-th run: plain $-\ln p$ per piece on the validation pairs, without smoothing or dropout. If the row were no different from the base, $t_r$ would follow Student's distribution, whose tails, $p$, say how often chance alone goes so far. The whole series judges by this rule, in [`verdict.py`](../scripts/book/verdict.py) (`pooled_spread` is $s$).
#
# With so many rows a few would pass a test at 5% by chance alone. So all rows are tested together, by Holm's steps ([chapter 10](ch10_judging.ipynb)). A row that passes is *told apart* from the base.
#
# ## What the recorded runs show
#
# > **In short.** Each dot is a run. The band spans the base's own seeds. To be told apart, a row's mean must lie 0.03 to 0.04 nats from zero, the base's mean.
#
# The record is [`table3-multi30k.json`](../results/table3-multi30k.json). Beside our rows stand the paper's that change the same thing by about as much.

# %%
# Perplexities of the paper's Table 3, of the row that changes the same thing by about as much.
TABLE3_BASE, TABLE3_NO_DROPOUT = 4.92, 5.77
TABLE3_PERPLEXITIES = {
    "1 head": 5.29,
    "2 heads": 5.00,  # half of them
    "8 heads": 4.91,  # twice as many
    "16 heads": 5.01,  # four times
    "d_k 4": 5.16,  # a quarter
    "d_k 8": 5.01,  # half
    "1 layer": 5.19,  # 4 of 6
    "4 layers": 4.88,  # 8, not 12
    "d_model 32": 5.75,
    "d_model 128": 4.66,
    "d_ff 128": 5.12,
    "d_ff 512": 4.75,
    "dropout 0.1": 4.92,  # the paper's own base
    "dropout 0.2": 4.95,
    "no smoothing": 4.67,
    "smoothing 0.2": 5.47,
    "learned positions": 4.92,
}


# %%
def counted(runs: Sequence[dict[str, Any]], what: str = "loss") -> dict[str, list[float]]:
    """What each row's runs found, without those of the sweeps and those that diverged.

    The base with a dropout is a row of its own: all other rows have none.
    """
    rows: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        if run["seed"] in COUNTED_SEEDS and run["loss"] is not None:
            name = f"dropout {run['dropout']}" if run["dropout"] else run["row"]
            rows.setdefault(name, []).append(run[what])
    return rows


def judged(losses: dict[str, list[float]], spare: dict[str, float]) -> pd.DataFrame:
    """Each row against the base: difference of the losses, its interval, the paper's, p, verdict.

    `spare` are the nats that another rate might gain. A row is worse only if it would also be so
    with its own, and better only if the base would still be behind with the base's.
    """
    against = {name: THE_BASE for name in losses if name != THE_BASE}
    granted = {name: [loss - spare.get(name, 0) for loss in losses[name]] for name in losses}
    base, rest = {THE_BASE: losses[THE_BASE]}, {name: losses[name] for name in against}
    if_worse = verdicts(granted | base, against)
    if_better = verdicts(rest | {THE_BASE: granted[THE_BASE]}, against)
    table = {}
    for name, found in verdicts(losses, against).items():
        stays = (if_worse if found.difference > 0 else if_better)[name]
        direction = "worse" if found.difference > 0 else "better"
        if not (stays.told and stays.difference * found.difference > 0):
            direction = "rate unsure"
        theirs = TABLE3_NO_DROPOUT if name.startswith("dropout") else TABLE3_BASE
        table[name] = {
            "difference": found.difference,
            "low": found.low,
            "high": found.high,
            "paper's": math.log(TABLE3_PERPLEXITIES.get(name, math.nan) / theirs),
            "p": found.p,
            "verdict": direction if found.told else "within noise",
        }
    return pd.DataFrame.from_dict(table, orient="index")


# %% [markdown]
# **Predict.** Which change helps most? Which harms most? And does the paper agree?

# %%
by_row = counted(runs)
spare = rates["finer"].to_dict() | {THE_BASE: rates["gain"][THE_BASE]}
judgement = judged(by_row, spare).sort_values("difference")
groups = {name: row.group for name, row in STUDY_ROWS.items() if row.group in "ABCDE"}
labels = {name: f"{groups.get(name, 'D')} · {name}" for name in TABLE3_PERPLEXITIES}
ablation_chart(judgement, by_row, THE_BASE, labels)

# %%
spread, freedom = pooled_spread(list(by_row.values()))
counts = [f"{n} {verdict}" for verdict, n in judgement["verdict"].value_counts().items()]
print(f"seeds differ by {spread:.3f} nats ({freedom} degrees of freedom)")
print(f"{len(judgement)} rows: {', '.join(counts)}")
bleus = {name: statistics.mean(scores) for name, scores in counted(runs, "bleu").items()}
shown = judgement.assign(BLEU=pd.Series(bleus)).round(3).astype(object).fillna("")
shown["p"] = shown["p"].map(lambda p: p or "< 0.001")
shown

# %%
calm = {name: losses for name, losses in by_row.items() if name != "no residual"}
less, fewer = pooled_spread(list(calm.values()))
again = judged(calm, spare)["verdict"]
share = 1 - less**2 * fewer / (spread**2 * freedom)
print(f"one row, no residual: {share:.0%} of the sum of squares; without it s = {less:.3f},")
print("and told apart are:", ", ".join(again.index[again != judgement["verdict"][again.index]]))
told = judgement[judgement["verdict"].isin(["better", "worse"])]
signs = told[["difference", "paper's"]].dropna().prod(axis=1) > 0
print(f"told apart and in the paper: the same sign in {signs.sum()} of {len(signs)} rows,")
print("not in", ", ".join(signs[~signs].index))

# %% [markdown]
# The interval from low to high is a 95% interval for a row on its own. The verdict tests all rows together, so it is stricter. BLEU is that of the validation captions, with a beam of 4.
#
# Do all rows scatter by the same amount? Not quite: *no residual* makes up two fifths of the sum of squares, and without it *8 heads* and *d_ff 512* pass, too.
#
# What the record says, *in this setting*:
#
# - **Width** helps most: `d_model` 128 has the lowest loss, 0.24 nats below the base, and 33.1 BLEU against 30.1. (Its layers hold 2.8 times as many parameters.) Half the width costs 0.39. A wider feed-forward layer, 0.04 ahead, may owe that to the base's rate.
# - **Without residual roads** the harm is greatest: the model hardly learns (2 BLEU), even with only two layers a side and a rate of its own. In chapter 5 all positions became alike without them, before training.
# - **Without $1/\sqrt{d_k}$** the loss is 0.20 nats higher, though $d_k$ is only 16.
# - **Warm-up** is worth 0.10 nats to the base, which is pre-norm, and 0.15 to post-norm. Post-norm itself costs 0.15.
# - **Positions** are needed in the encoder: 25 BLEU without. In the decoder they are worth 0.03 nats. Learned positions make no visible difference, here or in the paper.
# - **Heads**, at the base's rate: one, two and eight aren't told apart from four; sixteen, of four numbers each, are worse. So are shorter keys for four heads.
# - **Depth**: one layer is 0.10 behind, and four a side are 0.05 behind: five passes may be too few for them. The paper's eight layers change next to nothing.
# - **Dropout** of 0.1 costs 0.19 nats here, and gains 0.16 in the paper.
#
# ## What they can't show
#
# > **In short.** "Within noise" isn't "without effect". And a verdict holds for one size, one corpus, five passes.
#
# **Predict.** How far from the base must a row lie to be called different? Less than the base's own three seeds differ, or more?

# %%
error = spread * math.sqrt(1 / 3 + 1 / 3)
needed = [t_exceeded(0.05 / rows, freedom) for rows in (len(judgement), 1)]
first, single = (t * error for t in needed)
print(f"to pass first of {len(judgement)}: {first:.3f} nats; alone: {single:.3f}")
print(f"the base's seeds: {max(by_row[THE_BASE]) - min(by_row[THE_BASE]):.3f} nats apart")

# %% [markdown]
# More if it is to pass first, less if it is tested alone. So a true effect of 0.02 nats, which Table 3 would print as 4.92 against 5.02, is mostly missed here, and some of the paper's rows (A) are of that size.
#
# - **Five passes.** The paper's models trained for much longer. A study of one length can't say whether that is why they gained by dropout and didn't lose by depth.
# - **The loss isn't BLEU.** Without smoothing the loss is 0.07 lower, and with twice as much it is 0.14 higher: a model that is taught to aim at 90% or 80% pays for it in nats. BLEU, 0.4 lower in both, tells neither from the base.
# - **Rates** were swept for eleven rows, with one or two seeds. The others use the base's, which may count against them: sweeps gained up to 1.4 nats.
# - **The sentences** are another source of chance, which chapter 10 measures. Verdicts here are about seeds alone.
#
# ## Summary
#
# - Change one thing, and prove that it was changed.
# - A difference counts only if it exceeds the spread between seeds. With many rows the bar is higher for each.
# - "Within noise" means that so few runs can't tell. Say how small a difference they could have seen.
# - Give each row the rate that suits it, and let the verdict allow for the rates that you didn't try.
#
# ## What the paper did that we don't
#
# Table 3 has the row "big", for which we have too little data. It doesn't say whether rates were tuned for each row, and its smaller differences may be chance.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · How many false alarms
#
# *code · difficulty ●○○ · worth ●●○ · 5 minutes*
#
# A study tests `rows` independent rows that make no difference, each at `level`. How likely is at least one false alarm? (`solution("false_alarms")` shows ours.)


# %%
def false_alarms(rows: int, level: float) -> float:
    """The probability that at least one of the rows is called different."""
    ...


check(false_alarms)

# %% [markdown]
# ### Exercise 2 · Less strict than Bonferroni, and as safe
#
# *code · difficulty ●●○ · worth ●●● · 20 minutes*
#
# *Adjusted* p-values say what Holm's steps (chapter 10) say, without a level. Sort the p-values; multiply the k-th smallest of m by $m - k + 1$; let none be smaller than the one before it, and none larger than 1. Return them in the original order. (`solution("holm")` shows ours.)


# %%
def holm(ps: Sequence[float]) -> Sequence[float]:
    """Holm's adjusted p-values, in the order of `ps`."""
    ...


check(holm)

# %% [markdown]
# ### Exercise 3 · One layer, many times
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Another operation. Make every encoder layer *the same layer*, the first, as in Dehghani et al. (2018) and ALBERT (Lan et al. 2020). The depth stays; the parameters of all other layers go. Change the model in place. (`solution("shared_layers")` shows ours.)


# %%
def shared_layers(model: EncoderDecoder) -> None:
    """The model's encoder uses its first layer in every place."""
    ...


check(shared_layers)

# %% [markdown]
# ### Exercise 4 · A row of your own
#
# *project · difficulty ●●● · worth ●●● · 60 minutes*
#
# Add a row to `STUDY_ROWS` in `scripts/ch19_ablations.py`: the shared layers of Exercise 3, say (which `way` does it need?). Write down the verdict that you expect. Put its name into `SWEPT` of [`table3.py`](../scripts/studies/table3.py) and run `python -m scripts.studies.table3 --save`: only your runs are missing. Does its best rate differ from the base's? And what does one more row do to the verdicts of all the others?
#
# Next: [Chapter 20 · Scaling](ch20_scaling.ipynb)
