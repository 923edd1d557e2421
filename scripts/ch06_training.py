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
# # Chapter 6 · Training
#
# After this chapter you can write a training loop, say what each of its refinements is worth and where it hurts, and find out why a model doesn't learn.
#
# | | |
# |---|---|
# | In the paper | §5.3 and label smoothing (§5.4) of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 25 minutes to read, 60 with the code; about a minute to run on a CPU |
# | Before, after | [Chapter 5 · Norms and first steps](ch05_norms_and_first_steps.ipynb) · [Chapter 7 · Multi30k](ch07_multi30k.ipynb) |
#
# *If you read only three cells:* the loop of *Ten lines*, the map of *Warm up*, the chart of *Too good to be true*.
#
# Shapes: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR

from scripts.book.charts import heatmap, lines, panels, titled
from scripts.book.domains import in_domain
from scripts.book.exercises import check, outcome, trains_with
from scripts.book.figures.training import learning_curves
from scripts.book.instruments import dropout_off
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model
from scripts.corpora.reversal import FIRST, VOCAB, reversals, to_text

# %%
torch.set_default_dtype(torch.float64)  # machines then differ little; real runs use float32

# %% [markdown]
# ## Ten lines
#
# > **In short.** Predict, compare, follow the gradient downhill. Everything else is a refinement.
#
# The task is to copy a word of 5 to 10 letters. The decoder reads `<s>` and the word, and at each place gives the next token:

# %%
PAD, UNK, BOS, EOS = 0, 1, 2, 3  # padding, unknown, <s>, </s>: the same in every chapter
torch.manual_seed(0)
model = make_model(VOCAB, VOCAB, N=1, d_model=64, d_ff=128, h=4, dropout=0.0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
for step in range(1, 81):
    src, _ = reversals(32, (5, 10))  # (B, S), words with </s>; their reversals are not used
    full = F.pad(src, (1, 0), value=BOS)  # (B, S+1)
    x = model(src, full[:, :-1], padding_mask(src), subsequent_mask(src.size(1)))  # (B, T, D)
    logits = model.generator(x)  # (B, T, V)
    loss = F.cross_entropy(logits.flatten(0, 1), full[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (1, 80):
        print(f"step {step}: loss {loss:.1f}")

# %% [markdown]
# It learns. What is each refinement worth?
#
# ## What the model reads, and what it must say
#
# > **In short.** In training the decoder reads the true words so far, whatever it would have said (*teacher forcing*).
#
# A translation model gives each word of the target $y$ (T,) a probability, given the source $x$ and the words before it; the sentence's is the product:
#
# $$ p(y \mid x) = \prod_{t=1}^{T} p(y_t \mid y_{<t},\, x) $$
#
# The decoder reads `<s>` and $y$ without its last token, `</s>`; the labels are $y$. Thanks to the causal mask one pass predicts all T words.
#
# **Your turn.** A `Batch` holds sources and whole targets, `<s>` to `</s>`, cuts the targets in two ways, and makes the masks with chapter 1's functions.


# %% tags=["yours"]
class Batch:
    """Padded ids, ready for teacher forcing: sources `src` (B, S), whole targets `full` (B, T+1).

    `tgt` (B, T) is what the decoder reads, all but the last column of `full`; `tgt_y` (B, T) are
    the labels, all but the first.
    """

    def __init__(self, src: Tensor, full: Tensor):
        self.src = src
        self.full = full
        self.tgt = full[:, :-1]
        self.tgt_y = full[:, 1:]

    @cached_property
    def src_mask(self) -> Tensor:
        """Hides padding (B, 1, S)."""
        return padding_mask(self.src, PAD)

    @cached_property
    def tgt_mask(self) -> Tensor:
        """Hides padding and the future (B, T, T)."""
        return padding_mask(self.tgt, PAD) & subsequent_mask(self.tgt.size(1), self.tgt.device)

    @cached_property
    def ntokens(self) -> int:
        """How many labels are real: what a loss is divided by."""
        return int((self.tgt_y != PAD).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return Batch(self.src.to(device), self.full.to(device))


# %% [markdown]
# **Predict.** How many of these two sentences' ten labels count in the loss?

# %%
words = ["<pad>", "<unk>", "<s>", "</s>", "a", "small", "dog", "sleeps"]  # with numbers 0 to 7
two = Batch(
    src=torch.tensor([[4, 6, 7, 3, 0], [4, 5, 6, 7, 3]]),  # ein (kleiner) Hund schläft </s>
    full=torch.tensor([[2, 4, 6, 7, 3, 0], [2, 4, 5, 6, 7, 3]]),  # a (small) dog sleeps
)
print(f"{two.ntokens} of {two.tgt_y.numel()} labels count: </s> does, padding doesn't")
reads, says = ([words[i] for i in side[0]] for side in (two.tgt, two.tgt_y))
pd.DataFrame({"the decoder reads": reads, "it must say": says})

# %%
assert two.tgt[0].tolist() == [2, 4, 6, 7, 3] and two.tgt_y[0].tolist() == [4, 6, 7, 3, 0]
assert two.ntokens == 9 and isinstance(two.ntokens, int), "three words, four words, two </s>"
assert two.src_mask.tolist() == [[[True] * 4 + [False]], [[True] * 5]]
expected = [[row >= column for column in range(5)] for row in range(5)]
assert two.tgt_mask.tolist() == [expected, expected], "padding, or the future"
assert not Batch(two.src, F.pad(two.full, (0, 1))).tgt_mask[0, :, 5].any(), "padding is hidden, too"
assert two.to("meta").src.is_meta and two.to("meta").tgt_mask.is_meta, "`to` moves both"


# %%
def logits_of(model: EncoderDecoder, batch: Batch) -> Tensor:
    """The model's logits at the place of each label: (B, T, V)."""
    return model.generator(model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask))


# %% [markdown]
# ## Padding must not count
#
# > **In short.** The loss is the surprise at the right word, averaged over the real words. Perplexity 8 means: as unsure as between eight equally likely words.
#
# With the logits $z$ (V,) and $p = \mathrm{softmax}(z)$, the surprise at the label $y$ is
#
# $$ -\ln p_y = \ln \sum_{k=1}^{V} e^{z_k} - z_y \qquad\text{(in nats)}, $$
#
# and perplexity is $\exp$ of its mean.


# %%
def copy_batches(count: int, size: int, seed: int, lengths=(5, 10)) -> Iterator[Batch]:
    """`count` batches of `size` words to be copied; the same `seed` gives the same batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        src, _ = reversals(size, lengths, generator)  # (B, S)
        yield Batch(src, F.pad(src, (1, 0), value=BOS))


# %% [markdown]
# **Predict.** A batch is padded to 40 places. What happens to its loss?

# %%
batch = next(copy_batches(1, size=32, seed=0))
wide = Batch(F.pad(batch.src, (0, 29)), F.pad(batch.full, (0, 29)))  # (B, 40), (B, 41)
for name, padded in {"as it was": batch, "padded to 40": wide}.items():
    flat = logits_of(model, padded).detach().flatten(0, 1), padded.tgt_y.flatten()
    every, real = F.cross_entropy(*flat), F.cross_entropy(*flat, ignore_index=PAD)
    print(f"{name}: mean over places {every:.2f}, over real tokens {real:.2f}")

# %% [markdown]
# The mean over places falls: it rewards saying padding after padding. The other stays: `ignore_index` leaves padding out of sum *and* count.
#
# ## Warm up
#
# > **In short.** A learning rate that begins small may grow higher. Most schedules then let it fall.
#
# Why begin small? Adam keeps running averages of each weight's gradient $g_n$ and of its square, and divides the first by the root of the second. (θ is the weight, η the learning rate; $1-\beta^n$ makes up for averages that begin at 0.)
#
# $$ m_n = \beta_1 m_{n-1} + (1-\beta_1) g_n,\quad v_n = \beta_2 v_{n-1} + (1-\beta_2) g_n^2,\quad
#    \theta_n = \theta_{n-1} - \eta_n \frac{m_n / (1-\beta_1^n)}{\sqrt{v_n/(1-\beta_2^n)} + \delta} $$
#
# The paper (§5.3) sets $\beta_1 = 0.9$, $\beta_2 = 0.98$ and $\delta = 10^{-9}$ (`eps`).
#
# **Predict.** Five weights have gradients between 0.001 and 1,000. How far does the first step move each, at rate 0.01?

# %%
weights = nn.Parameter(torch.zeros(5))
weights.grad = torch.tensor([1e-3, 0.1, 1.0, 10.0, 1000.0])
torch.optim.Adam([weights], lr=0.01, betas=(0.9, 0.98), eps=1e-9).step()
print([round(move, 4) for move in weights.tolist()])

# %% [markdown]
# All move equally far: the averages hold only one gradient, and $g/\sqrt{g^2} = \pm 1$. So at first *every* weight takes a full step, trusting a single gradient. The paper makes the first of its steps $n = 1, 2, \dots$ short, with a warm-up of $w$ steps:
#
# $$ \eta_n = D^{-0.5}\cdot\min\left(n^{-0.5},\; n\cdot w^{-1.5}\right) \qquad\text{(§5.3, equation 3)} $$
#
# The rate grows in a straight line up to $(D\,w)^{-0.5}$ at $n = w$, then falls as $1/\sqrt n$. **Your turn.**


# %% tags=["yours"]
def rate(step: int, model_size: int, warmup: int = 4000) -> float:
    """Linear warm-up, then 1/√step, for `step` = 1, 2, …; below 1 a ValueError (§5.3, eq. 3)."""
    if step < 1:
        raise ValueError(f"steps count from 1, as in the paper, not {step}")
    return model_size**-0.5 * min(step**-0.5, step * warmup**-1.5)


# %%
for step, share in ((100, 1 / 4), (400, 1), (1600, 1 / 2)):  # of the highest rate
    assert math.isclose(rate(step, 128, warmup=400), share * (128 * 400) ** -0.5)
assert outcome(rate, 0, 512) == "ValueError", "a forgotten + 1 would go unnoticed"

# %% [markdown]
# In the paper's base model (D = 512, w = 4,000) that is 0.0007. Common today: after the warm-up, half a cosine down to zero.


# %%
def cosine_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Linear warm-up to `peak`, half a cosine to 0 just after `total`; below 1 a ValueError."""
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    if step <= in_domain("warmup", warmup):
        return peak * step / warmup
    done = min(1.0, (step - warmup) / (total + 1 - warmup))
    return peak * 0.5 * (1 + math.cos(math.pi * done))


# %% [markdown]
# **Pitfall: one step late.** `LambdaLR` counts *finished* steps, from 0, and the paper counts from 1. If step 0 is treated as step 1, the first two steps get the same rate.
#
# Here are the ten lines again, with the corrected loss, and settings for three sections.


# %%
def tiny_model(seed: int = 0, d_model: int = 64, N: int = 1) -> EncoderDecoder:
    """A small Transformer that copies: post-norm as in the paper, without dropout."""
    torch.manual_seed(seed)
    return make_model(VOCAB, VOCAB, N, d_model, 2 * d_model, h=4, dropout=0.0)


def learn_to_copy(
    peak: float = 0.008,
    warmup: int = 40,
    clip: float = math.inf,
    smoothing: float = 0.0,
    broken: int | None = None,  # the step whose loss is 1,000 times too large
    seed: int = 0,
) -> tuple[EncoderDecoder, list[float], list[float]]:
    """A tiny model after 80 steps, the losses of the steps, and the gradient's norms before clipping."""
    model, losses, norms = tiny_model(seed), [], []
    optimizer = torch.optim.Adam(model.parameters(), lr=peak, betas=(0.9, 0.98), eps=1e-9)
    scheduler = LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / warmup))  # times lr
    for step, batch in enumerate(copy_batches(80, size=32, seed=seed), start=1):
        flat = logits_of(model, batch).flatten(0, 1), batch.tgt_y.flatten()  # (B·T, V), (B·T,)
        loss = F.cross_entropy(*flat, ignore_index=PAD, label_smoothing=smoothing)
        optimizer.zero_grad()
        (1000 * loss if step == broken else loss).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return model, losses, norms


# %% [markdown]
# What is warm-up worth? We cross it with the peak rate, which then stays. **Predict.** At the best rate of each, which ends lower: with or without a warm-up?


# %%
pairs = product((1, 40), (0.002, 0.004, 0.008, 0.016))  # of warm-up and peak
live = {(warmup, peak): sum(learn_to_copy(peak, warmup)[1][-10:]) / 10 for warmup, peak in pairs}
assert live[1, 0.008] > live[40, 0.008] + 0.5 and live[1, 0.002] < live[40, 0.002] - 0.1
pd.Series(live).unstack().round(1).rename({1: "no warm-up", 40: "40 steps"})

# %% [markdown]
# (Loss, last ten steps.) At 0.008 warm-up seems indispensable; at 0.002 it costs time: half of these 80 steps are short. The whole map, in five seeds:

# %%
runs = pd.DataFrame(load_record("warm-up-copy")["runs"])
means = runs.groupby(["warmup", "peak"])["loss"].mean().unstack()  # (warm-ups, rates)
best, best_rate = means.min(axis=1), means.idxmin(axis=1)
assert best.max() - best.min() < 0.05 and 2 * best_rate[1] <= best_rate[40]
look = {"row_title": "warm-up", "column_title": "peak rate", "cell": (56, 42), "domain": (0, 2.4)}
titled(
    heatmap(means.round(2), ["none", "10 steps", "40 steps"], [*map(str, means)], **look),
    "Warm-up moves the good rates up, and leaves the best loss where it is",
    "Training loss, last ten of 80 steps; means of five seeds.",
)

# %% [markdown]
# Neither ends lower after 80 steps: the rows' best differ by less than seeds do. The good rates move up by a factor of two.
#
# ## Gradient clipping
#
# > **In short.** Now and then a batch pulls far too hard. Shorten the pull, but keep its direction.
#
# Suppose the loss of step 41 is 1,000 times too large. With all gradients in one vector $g$ and a limit c, clipping is
#
# $$ g \leftarrow g\cdot\min\left(1,\; \frac{c}{\lVert g\rVert}\right) $$
#
# `nn.utils.clip_grad_norm_` does this. **Predict.** Adam divides by this gradient's size, too, so no single step is very long. Does the broken batch harm? What does a limit do to the other steps?

# %%
curves = {"no accident": learn_to_copy()[1]}
for name, limit in {"no limit": math.inf, "limit 5": 5.0, "limit 1": 1.0}.items():
    _, curves[name], norms = learn_to_copy(clip=limit, broken=41)
    print(f"{name}: {sum(norm > limit for norm in norms)} of 80 steps clipped")
after = {name: sum(losses[41:50]) / 9 for name, losses in curves.items()}
assert after["no limit"] > 2 * after["no accident"]
assert after["limit 1"] < after["no accident"] < after["limit 5"] < 1.3 * after["no accident"]
titled(
    learning_curves(curves, every=4),
    "One broken batch costs all that was learned, unless a limit holds it",
    "One seed, means of four steps. Step 41 has 1,000 times the loss, except in the run without "
    "accident, which has no limit. Limit 1 trains faster from the start.",
)

# %% [markdown]
# The broken batch does harm: the loss rises above its first value. It fills Adam's $m$, which goes on pushing, and its $v$, which brakes that push and all later steps. A limit of 5 holds it, and clips 4 of 80 steps: a guard against accidents. A limit of 1 clips 79, and makes nearly all gradients equally long. Is that better *without* an accident, too?

# %%
limited = [learn_to_copy(clip=1.0, seed=seed) for seed in range(5)]
ends = [sum(losses[-10:]) / 10 for _, losses, _ in limited]
unlimited = runs.query("warmup == 40 and peak == 0.008").sort_values("seed")["loss"]
assert all(a < b for a, b in zip(ends, unlimited, strict=True))
print(f"limit 1: {sum(ends) / 5:.2f}, no limit: {unlimited.mean():.2f} (last ten steps)")

# %% [markdown]
# Limit 1 is better in each of five seeds.
#
# ## Label smoothing
#
# > **In short.** Don't ask for certainty. Ask for most of the probability on the right word, and a little on all.
#
# The plain loss is lowest when the label gets probability 1, so it asks for ever larger logits. The paper trains with $\varepsilon = 0.1$, which "hurts perplexity, as the model learns to be more unsure, but improves accuracy and BLEU score" (§5.4). The target becomes a distribution $q$ over all V words ($\mathbb{1}[k = y]$ is 1 for the label, else 0):
#
# $$ q_k = (1-\varepsilon)\,\mathbb{1}[k = y] + \frac{\varepsilon}{V}, \qquad
#    \ell = -\sum_k q_k \ln p_k = (1-\varepsilon)\,(-\ln p_y) + \varepsilon\cdot\frac{1}{V}\sum_k (-\ln p_k) $$
#
# With $-\ln p_k = \ln \sum_j e^{z_j} - z_k$ this needs only the logits. **Your turn.**


# %% tags=["yours"]
class LabelSmoothing(nn.Module):
    """Cross-entropy against (1 − ε) on the label and ε spread evenly over all V tokens (§5.4).

    It keeps `smoothing` (ε) and `padding_idx`, a label that doesn't count. It returns two sums in
    nats: the smoothed loss, and the plain one. Logits in half precision are summed in single.
    """

    def __init__(self, smoothing: float = 0.1, padding_idx: int = PAD):
        super().__init__()
        self.smoothing = in_domain("smoothing", smoothing)
        self.padding_idx = padding_idx

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """logits (..., V), labels (...), to two scalars in nats."""
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()  # three digits don't make a sum
        log_z = logits.logsumexp(dim=-1)  # (...)
        nll = log_z - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)  # (...): −log p(label)
        spread = log_z - logits.mean(dim=-1)  # (...): −log p, averaged over the vocabulary
        smoothed = (1 - self.smoothing) * nll + self.smoothing * spread  # (...)
        padding = labels == self.padding_idx  # (...)
        return smoothed.masked_fill(padding, 0.0).sum(), nll.masked_fill(padding, 0.0).sum()


# %%
logits, labels = torch.randn(4, 6, 10), torch.randint(10, (4, 6))  # (B, T, V), (B, T)
labels[0, 4:] = 7  # this test's padding
for smoothing, ours in zip((0.2, 0.0), LabelSmoothing(0.2, 7)(logits, labels), strict=True):
    theirs = nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=7, reduction="sum")
    torch.testing.assert_close(ours, theirs(logits.flatten(0, 1), labels.flatten()))
half = logits.bfloat16()  # is summed in single
torch.testing.assert_close(LabelSmoothing()(half, labels), LabelSmoothing()(half.float(), labels))

# %% [markdown]
# Now let the label's probability $p$ grow, with the rest shared evenly.


# %%
def smoothed_penalty(p: Tensor, vocab: int, smoothing: float) -> Tensor:
    """The smoothed loss of giving the label p (...) and each other token (1 − p) / (V − 1)."""
    label = 1 - smoothing + smoothing / vocab  # the target's part for the label
    rest = (1 - p) / (vocab - 1)  # (...)
    return -(label * p.log() + torch.xlogy(1 - label, rest))  # 0 · log 0 is 0, by hand it is NaN


# %% [markdown]
# **Predict.** Where is the loss lowest with $\varepsilon = 0.1$ and V = 10?

# %%
p = torch.linspace(0.05, 0.995, 190)
penalties = {f"ε = {e}": smoothed_penalty(p, 10, e) for e in (0.0, 0.1, 0.2)}
frame = pd.DataFrame(penalties | {"p": p}).melt("p", var_name="ε", value_name="loss (nats)")
titled(
    lines(frame, "p", "loss (nats)", "ε", x_title="probability that the model gives the label"),
    f"With ε = 0.1 the loss rises again after p = {p[penalties['ε = 0.1'].argmin()]:.2f}",
    "V = 10. With smoothing each curve has its lowest point at p = 1 − ε + ε/V.",
)

# %% [markdown]
# What does it change? We ask on new words of 5 to 10 letters, and at places 11 to 14 of longer ones, where no training word had a letter. A model is *calibrated* on average if its mean probability for its first choice is the share that is right. **Predict.** Where is the plain model too sure? Does smoothing cure it?


# %%
@torch.no_grad()
def sureness(model: EncoderDecoder, batch: Batch, skip: int = 0) -> tuple[float, float]:
    """Which share of first choices is right, and their mean probability, after `skip` places."""
    probability, choice = logits_of(model, batch).softmax(-1).max(dim=-1)  # (B, T) each
    real = batch.tgt_y != PAD
    real[:, :skip] = False
    return (choice == batch.tgt_y)[real].double().mean().item(), probability[real].mean().item()


# %%
exam = next(copy_batches(1, size=500, seed=1000))
longer = next(copy_batches(1, size=500, seed=1001, lengths=(11, 13)))
rows = []
for seed, (plain, *_) in enumerate(limited):
    smooth, *_ = learn_to_copy(clip=1.0, smoothing=0.1, seed=seed)
    for name, model in {"ε = 0": plain, "ε = 0.1": smooth}.items():
        rows.append((name, "1 to 11, short words", *sureness(model, exam)))
        rows.append((name, "11 to 14, long words", *sureness(model, longer, skip=10)))
answers = pd.DataFrame(rows, columns=["trained with", "places", "right", "sure"])
answers["too sure by"] = answers["sure"] - answers["right"]
seeds = answers.groupby(["trained with", "places"], sort=False)
lowest, highest = seeds["too sure by"].min(), seeds["too sure by"].max()
assert lowest.iloc[[1, 3]].min() > 0.2 and highest.iloc[2] < -0.05 and highest.iloc[0] < 0.08
seeds.mean().assign(lowest=lowest, highest=highest).map("{:.0%}".format)

# %% [markdown]
# (Five seeds: means, lowest and highest.) At known places the plain model is calibrated. At unknown ones it is right one time in five, and too sure by 41 points. Smoothing lowers the sureness *everywhere*: it takes off only 8 of these, and makes the model too unsure where it knows. Two points more are right there, but not in every seed: no gain is shown.
#
# ## Gradient accumulation
#
# > **In short.** A batch that doesn't fit into memory is taken in parts. Add up their gradients, then step once.
#
# We cut a batch into micro-batches $i = 1 \dots m$ with $\tau_i$ real tokens and the *summed* loss $L_i$. The whole batch's loss per token is
#
# $$ L = \frac{\sum_i L_i}{\sum_i \tau_i}, \qquad \nabla L = \sum_i \nabla \frac{L_i}{\sum_j \tau_j} $$
#
# So a training step divides each sum by the tokens of the whole *group*; `backward()` adds to the gradients already there.


# %%
@dataclass
class EpochReport:
    """Sums over one pass of the data, from which the means are taken once, at the end."""

    loss: float = 0.0  # smoothed, in nats
    nll: float = 0.0  # not smoothed, in nats
    tokens: int = 0
    grad_norms: list[float] = field(default_factory=list)  # before clipping, one an optimizer step

    @property
    def loss_per_token(self) -> float:
        """Smoothed loss in nats a token."""
        return self.loss / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the unsmoothed loss a token: among how many tokens the model still hesitates."""
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 709 else math.inf  # more than a float can hold

    def __iadd__(self, other: "EpochReport") -> "EpochReport":
        """`report += other`: add what another report has summed."""
        self.loss += other.loss
        self.nll += other.nll
        self.tokens += other.tokens
        self.grad_norms += other.grad_norms
        return self


# %%
def batch_loss(
    model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing
) -> tuple[Tensor, Tensor]:
    """Smoothed loss and negative log-likelihood of one batch, both summed over its real tokens."""
    return criterion(logits_of(model, batch), batch.tgt_y)


# %% [markdown]
# **Your turn.** One NaN in a gradient makes the norm NaN, and clipping multiplies *all* gradients by it. So the step checks first.


# %% tags=["yours"]
def train_step(
    model: EncoderDecoder,
    group: list[Batch],
    criterion: LabelSmoothing,
    optimizer: torch.optim.Optimizer,
    clip: float = math.inf,
) -> EpochReport:
    """One optimizer step on the mean smoothed loss per token of all the batches in `group`.

    Earlier gradients don't count. The gradient's norm is reported, then bounded by `clip` (0: no
    limit). FloatingPointError, before any weight has changed, if loss or gradient isn't finite.
    """
    optimizer.zero_grad(set_to_none=True)
    per = sum(batch.ntokens for batch in group)  # the group's tokens, not each batch's own
    report = EpochReport()
    for batch in group:
        loss, nll = batch_loss(model, batch, criterion)
        (loss / per).backward()
        report += EpochReport(loss.item(), nll.item(), batch.ntokens)
    norm = nn.utils.clip_grad_norm_(model.parameters(), in_domain("clip", clip) or math.inf)
    report.grad_norms.append(norm.item())
    if not math.isfinite(report.loss + norm.item()):
        raise FloatingPointError(f"loss {report.loss}, gradient's norm {norm.item()}")
    optimizer.step()
    return report


# %% [markdown]
# The check: three parts lead where PyTorch's loss on the whole leads.


# %%
def one_step(group: list[Batch], clip: float = math.inf) -> tuple[Tensor, EpochReport]:
    """How a small model moves by one step of gradient descent at rate 1, and the step's report."""
    model = tiny_model(d_model=16)
    model.generator.proj.weight.grad = torch.ones_like(model.generator.proj.weight)  # an old one
    before = parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    report = train_step(model, group, LabelSmoothing(0.1), optimizer, clip)
    return parameters_to_vector(model.parameters()).detach() - before, report


# %%
whole = next(copy_batches(1, size=21, seed=1, lengths=(1, 10)))
parts = [Batch(whole.src[a:b], whole.full[a:b]) for a, b in ((0, 2), (2, 8), (8, 21))]
model = tiny_model(d_model=16)
flat = logits_of(model, whole).flatten(0, 1), whole.tgt_y.flatten()
theirs = F.cross_entropy(*flat, label_smoothing=0.1, ignore_index=PAD)
theirs.backward()
gradient = parameters_to_vector(p.grad for p in model.parameters())
for clip in (0, 0.1):  # 0 is no limit
    moved, report = one_step(parts, clip)
    share = min(1.0, (clip or math.inf) / gradient.norm())  # what clipping leaves
    torch.testing.assert_close(moved, -share * gradient, rtol=1e-4, atol=1e-9)
    assert math.isclose(report.grad_norms[-1], gradient.norm()), "clip, then report"
assert math.isclose(report.loss, theirs.item() * whole.ntokens), "a sum, not a mean"
model.generator.proj.bias.register_hook(lambda gradient: gradient + math.inf)
before = parameters_to_vector(model.parameters()).detach()
step = model, parts, LabelSmoothing(0.1), torch.optim.SGD(model.parameters())
assert outcome(train_step, *step) == "FloatingPointError"
assert parameters_to_vector(model.parameters()).equal(before), "check before the step"

# %% [markdown]
# **Pitfall: the mean of means.** The usual recipe averages the parts' mean losses. A token in a small part then weighs more. **Predict.** How far is the gradient off for our parts of 2, 6 and 13 words? And for four batches of 32?

# %%
for group in (parts, [*copy_batches(4, size=32, seed=3)]):
    right, _ = one_step(group)
    error = sum(one_step([part])[0] for part in group) / len(group) - right
    print(f"{[part.ntokens for part in group]} tokens: off by {error.norm() / right.norm():.1%}")

# %% [markdown]
# With even parts it is nearly right.
#
# (Loops that step when `i % size == 0` step after batch 0, and may lose the last ones.)


# %%
def grouped(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """`batches` in lists of `size`; the last list is shorter if they do not come out even."""
    source, size = iter(batches), in_domain("accumulate", size)
    while group := list(islice(source, size)):
        yield group


# %% [markdown]
# ## The loop, and validation
#
# > **In short.** Judge without an optimizer: on data kept apart, with dropout off and the plain loss.
#
# The schedule advances once an optimizer step: counting batches would end the warm-up too early.


# %%
def run_epoch(
    batches: Iterable[Batch],
    model: EncoderDecoder,
    criterion: LabelSmoothing,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: LambdaLR | None = None,
    *,
    accumulate: int = 1,
    clip: float = math.inf,
) -> EpochReport:
    """One pass over `batches`: training with an optimizer, evaluation (no gradients) without.

    `accumulate` batches make one optimizer step, and the schedule advances once a step.
    """
    model.train(optimizer is not None)
    total = EpochReport()
    for group in grouped(batches, accumulate):
        if optimizer is not None:
            total += train_step(model, group, criterion, optimizer, clip)
            if scheduler is not None:
                scheduler.step()
            continue
        with torch.no_grad():
            for batch in group:
                loss, nll = batch_loss(model, batch, criterion)
                total += EpochReport(loss.item(), nll.item(), batch.ntokens)
    return total


# %% [markdown]
# **Pitfall: validation as if in training.** The smoothed loss depends on $\varepsilon$. A forgotten `eval` leaves dropout on; a forgotten `no_grad` only costs memory.
#
# ## The copy task, learned
#
# > **In short.** Before you train on sentences, train on something whose right answer you know.
#
# All together: the cosine, a limit of 1, $\varepsilon = 0.1$.

# %%
row = next(copy_batches(1, size=1, seed=1566, lengths=(9, 9)))  # nine different letters
maps = {}
copier, criterion = tiny_model(), LabelSmoothing(0.1)
optimizer = torch.optim.Adam(copier.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
scheduler = LambdaLR(optimizer, lambda done: cosine_rate(done + 1, 0.01, 40, 200))  # times 1.0
for step, batch in enumerate(copy_batches(200, size=32, seed=0), start=1):
    report = run_epoch([batch], copier, criterion, optimizer, scheduler, clip=1.0)
    if step in (1, 50, 100, 200):
        copier(row.src, row.tgt, row.src_mask, row.tgt_mask)
        attention = copier.decoder.layers[-1].src_attn.attn[0]  # (H, T, S)
        maps[f"after step {step}"] = attention.mean(dim=0)  # (T, S)
print(f"perplexity on new words: {run_epoch([exam], copier, criterion).perplexity:.2f}")

# %% [markdown]
# That is what $\varepsilon$ asks for: with V = 14, $1-\varepsilon+\varepsilon/V$ is 0.907, and 1/0.907 = 1.10.
#
# To say letter t, the decoder best reads the source at place t. **Predict.** How much cross-attention falls there at first, and at last?
#
# %%
letters = [*to_text(row.src[0]), "</s>"]
shares = ", ".join(f"{weights.diagonal().mean():.2f}" for weights in maps.values())
look = {"per_line": 2, "cell": 22, "numbers": False, "value_title": "weight"}
look |= {"row_title": "it must say", "column_title": "it looks at"}
titled(
    panels({n: maps[n].round(decimals=2) for n in maps}, letters, letters, **look),
    f"The diagonal takes {shares} of the weight",
    "Cross-attention on a word that the model never saw, mean of four heads. At first it looks "
    "everywhere, then near the diagonal, in the end along it.",
)

# %% [markdown]
# ## Greedy decoding
#
# > **In short.** Say the likeliest word, read it back, say the next. Stop at the end symbol.
#
# What does the model write *alone*? It must read its own letters, which it never did in training (*exposure bias*):
#
# $$ \hat y_t = \arg\max_k \; p(k \mid \hat y_{<t},\, x) $$
#
# **Your turn.** Chapter 4's `model.encode`, `model.decode` and `model.generator` do the work, and `with dropout_off(model):` switches dropout off.


# %% tags=["yours"]
@torch.no_grad()
def greedy_decode(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int = BOS,
) -> Tensor:
    """The likeliest token, again and again: src (B, S) to ids (B, ≤ max_len), without the start.

    Each row ends with `EOS`, unless `max_len` tokens came first, and is padded after it. The
    loop stops when every row has ended. Dropout is off while it runs.
    """
    ids = src.new_full((src.size(0), 1), start_symbol)  # (B, 1)
    ended = torch.zeros(src.size(0), dtype=torch.bool, device=src.device)  # (B,)
    with dropout_off(model):
        memory = model.encode(src, src_mask)  # (B, S, D)
        for _ in range(max_len):
            mask = subsequent_mask(ids.size(1), ids.device)  # (1, T, T)
            last = model.decode(memory, src_mask, ids, mask)[:, -1]  # (B, D)
            token = model.generator(last).argmax(dim=-1)  # (B,)
            ids = torch.cat((ids, token.masked_fill(ended, PAD).unsqueeze(1)), dim=1)  # (B, T+1)
            ended |= token == EOS
            if ended.all():
                break
    return ids[:, 1:]


# %% [markdown]
# The check: one pass over its text says the same, and nothing follows the end.

# %%
untrained = make_model(VOCAB, VOCAB, N=2, d_model=64, d_ff=128, h=4, dropout=0.1)
for model, longest in ((untrained, 6), (copier, 20)):
    said = greedy_decode(model.train(), exam.src, exam.src_mask, max_len=longest)  # (B, T)
    assert model.training, "the model must be left in the mode in which it came"
    read = F.pad(said, (1, 0), value=BOS)[:, :-1]
    x = model.eval()(exam.src, read, exam.src_mask, subsequent_mask(read.size(1)))
    over = (said == EOS).cumsum(dim=1) > (said == EOS).long()  # (B, T), the places after the end
    likeliest = model.generator(x).argmax(-1).masked_fill(over, PAD)
    assert torch.equal(said, likeliest), "not the likeliest, or no padding after the end"
    assert said.size(1) == min(longest, exam.src.size(1)), "it stops when every row has ended"


# %%
def copied(model: EncoderDecoder, batch: Batch, start_symbol: int = BOS) -> Tensor:
    """Which rows of a copy batch greedy decoding copies without a mistake (B,)."""
    size = batch.src.size(1)
    said = greedy_decode(model, batch.src, batch.src_mask, size, start_symbol)
    said = F.pad(said, (0, size - said.size(1)), value=PAD)  # (B, S)
    return (said == batch.src).all(dim=1)


# %% [markdown]
# **Pitfall: the wrong start.** Decoded from padding, 0, instead of `<s>`, a good model looks badly trained.

# %%
print(f"from padding: {copied(copier, exam, PAD).double().mean():.0%} right")
for size in (5, 10, 11, 12, 13):
    words = next(copy_batches(1, 500, seed=1001, lengths=(size, size)))
    print(f"{size} letters: {copied(copier, words).double().mean():.0%} right")

# %% [markdown]
# Words of 5 and of 10 letters come out right, some of 11, hardly any longer: no training word had a letter after place 10.
#
# ## Case · Too good to be true
#
# > **In short.** Ask three questions whose answers you know beforehand.
#
# **Symptom.** Anna and Ben write the batches of the copy task anew. Anna's training goes better than ever:


# %%
class AnnasBatch(Batch):
    """As many labels as source tokens."""

    def __init__(self, src: Tensor, full: Tensor):
        super().__init__(src, full)
        self.tgt_y = full[:, : src.size(1)]


class BensBatch(Batch):
    """What is to be copied is the source."""

    def __init__(self, src: Tensor, full: Tensor):
        super().__init__(src, full)
        self.tgt_y = src


BATCH_KINDS = {"ours": Batch, "Anna's": AnnasBatch, "Ben's": BensBatch}


def loss_curve(model: EncoderDecoder, batches: Iterable[Batch]) -> list[float]:
    """The plain loss per token at each step of Adam over `batches`."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98), eps=1e-9)
    criterion = LabelSmoothing(0.0)
    return [train_step(model, [b], criterion, optimizer).loss_per_token for b in batches]


# %%
for name, kind in BATCH_KINDS.items():
    suspect = tiny_model()
    losses = loss_curve(suspect, (kind(b.src, b.full) for b in copy_batches(80, 32, seed=0)))
    right = copied(suspect, exam).double().mean()
    print(f"{name}: loss {losses[-1]:.1f}, exact copies {right:.0%}")

# %% [markdown]
# **Suspects.** The model, the optimizer, the masks, the labels.
#
# **Instrument.** Three questions:
#
# | question | the right answer | what a wrong one points to |
# |---|---|---|
# | What is the first loss? | $\ln V$ and about half the logits' variance, here a nat more | initialisation, a scale, the loss itself |
# | Can it learn one batch by heart? | yes, within a hundred steps | the optimizer's step, the rate |
# | Does it beat the best guess on *noise*? | no, unless the input holds the labels | a way from input to labels |
#
# In noise, source and target are unrelated and always new. For six of ten letters, then `</s>`, a guess costs $(6 \ln 10 + 0)/7 = 1.97$ nats a token.
#
# **Predict.** Which does Anna's model pass? And Ben's?

# %%
torch.manual_seed(10)
sides = F.pad(torch.randint(FIRST, VOCAB, (100, 2, 16, 6)), (0, 1), value=EOS)
noise = [(src, F.pad(tgt, (1, 0), value=BOS)) for src, tgt in sides]  # (16, 7) and (16, 8) each
few = next(copy_batches(1, size=4, seed=9))
on_noise = {}
for name, kind in BATCH_KINDS.items():
    by_heart = loss_curve(tiny_model(d_model=32), [kind(few.src, few.full)] * 80)
    print(f"{name}: first loss {by_heart[0]:.1f}, one batch by heart {by_heart[-1]:.2f}")
    on_noise[name] = loss_curve(tiny_model(d_model=32), (kind(*pair) for pair in noise))
ends = [sum(losses[-10:]) / 10 for losses in on_noise.values()]
assert ends[0] > 1.93 and ends[1] < 0.1 and 0.2 < ends[2] < 1.5
titled(
    learning_curves(on_noise, {"the best guess": 6 * math.log(10) / 7}, every=5),
    "Two models beat the best guess on noise; only one of them cheats",
    "Ours learns where words end and nearly reaches the dashed line. The others fall below.",
)

# %% [markdown]
# All pass the first two (ln V = 2.64). On noise Anna's falls, and so does Ben's, whose run on copies was ours to the digit. What must each say?

# %%
src, full = noise[0]
print("both read the source", src[0].tolist(), "and the target", full[0, :-1].tolist())
for name in ("Anna's", "Ben's"):
    print(name, "must say", BATCH_KINDS[name](src, full).tgt_y[0].tolist())

# %% [markdown]
# **Culprit.** Anna's labels aren't shifted: her model must say the token that it has just read. Alone, it says `<s>` for ever. Ben is innocent: his labels are the source, the copy task's right answer. The test finds *any* way from input to labels; only a look at both tells whether it's meant.
#
# ## Milestone · Your step begins a translator
#
# > **In short.** Your functions train the model of chapter 9's preset `sample`, on captions that a grammar makes.
#
# `trains_with` takes 20 steps with your parts and with ours. If the losses part, it tells at which step. Then yours trains on alone and translates (better with `steps=2000`, in two minutes).

# %%
last = trains_with(Batch, LabelSmoothing, cosine_rate, train_step, greedy_decode)
assert last < 3  # nats a token, smoothed; it begins at 7.8

# %% [markdown]
# ## Summary
#
# - In training the decoder reads the true words so far, and predicts the next. Only real tokens count.
# - Warm-up makes higher rates possible, but doesn't lower our small models' best loss.
# - Clip by norm: a high limit guards against accidents; a low one clips nearly all, here for the better.
# - Smoothing makes a model less sure everywhere, and hardly cures false certainty. Minimise the smoothed loss, report the plain one.
# - If a model doesn't learn, check the first loss, one batch, and noise.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · Up and down in straight lines
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Linear warm-up, then a straight line down; in all else like `cosine_rate`: step `total` still moves, and step 0 is a `ValueError`. (`solution("linear_rate")` shows ours.)


# %%
def linear_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Up to `peak` at step `warmup`, then down to 0 just after step `total`, in straight lines."""
    ...


check(linear_rate)

# %% [markdown]
# ### Exercise 2 · A group that comes in a stream
#
# *code · difficulty ●●○ · worth ●●● · 20 minutes*
#
# `train_step` counts its group's tokens before the first backward pass. Now the batches come from an iterator, and only one may be in memory. Leave in each parameter's `p.grad` the gradient of the mean smoothed loss per token of *all* batches, and nothing else. Take no step. (`solution("streamed_gradient")` shows ours.)


# %%
def streamed_gradient(model: EncoderDecoder, batches: Iterator[Batch], criterion) -> None:
    """The gradient of one large batch in each `p.grad`, from batches that come one by one."""
    ...


check(streamed_gradient)

# %% [markdown]
# Next: [Chapter 7 · Multi30k](ch07_multi30k.ipynb)
