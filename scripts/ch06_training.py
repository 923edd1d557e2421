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
# After this chapter you can train the Transformer of chapter 4: you know what it reads and what it must say, what the loss and the perplexity mean, how the learning rate moves, and where to look when a model doesn't learn.
#
# *Attention Is All You Need*, §5.1 to §5.4. About 45 minutes to read; about a minute to run on a CPU, most of it for the copy task at the end.
#
# Previous: [Chapter 4 · Encoder and decoder](ch04_encoder_decoder.ipynb) · Next: [Chapter 7 · Multi30k](ch07_multi30k.ipynb)
#
# Shapes in all chapters: **B** batch, **S** source length, **T** target length, **D** `d_model`, **H** heads, **V** vocabulary.

# %% tags=["bootstrap"]
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "set SERIES_REPOSITORY").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))

# %%
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import altair as alt
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from scripts.book.charts import GREY, PALETTE, bars, heatmap, lines, titled
from scripts.book.exercises import blame, rejection, same_numbers
from scripts.ch01_attention import padding_mask, subsequent_mask
from scripts.ch04_encoder_decoder import EncoderDecoder, make_model

# %% [markdown]
# The examples run in double precision, so that a check can ask for agreement to many digits. Only the copy task at the end trains in single precision, as real trainings do.

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## What the model reads, and what it must say
#
# > **In short.** A pupil practises dictation with the answer sheet beside the page. After each word they look at the right word, whatever they wrote, and go on from there. One wrong word doesn't spoil the rest of the page. That is teacher forcing.
#
# A translation model gives the next word a probability, given the source $x$ and the words so far. The probability of a whole sentence $y$ is the product:
#
# $$ p(y \mid x) = \prod_{t=1}^{T} p(y_t \mid y_{<t},\, x) $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $x$ | (S,) | source ids |
# | $y$ | (T,) | target ids, the last one is `</s>` |
# | $y_{<t}$ | (t − 1,) | the target before position $t$; for $t=1$ only the start symbol `<s>` |
#
# While we train, we know all of $y$. So the decoder gets the true $y_{<t}$ at every position, and all T predictions are made in one pass. The input is the target without its last token; the labels are the target without its first:
#
# | position | 1 | 2 | 3 | 4 |
# |---|---|---|---|---|
# | the decoder reads | `<s>` | a | dog | sleeps |
# | it must say | a | dog | sleeps | `</s>` |
#
# Four ids have a special meaning, the same in every chapter: padding, unknown word, begin and end.

# %%
PAD, UNK, BOS, EOS = 0, 1, 2, 3  # the special ids, the same in every chapter


# %%
class Batch:
    """Padded source and target ids with their masks, ready for teacher forcing.

    src (B, S); the full target (B, T+1) is split into the decoder's input `tgt` (B, T), which
    lacks the last token, and the labels `tgt_y` (B, T), which lack the first.
    src_mask (B, 1, S) hides padding; tgt_mask (B, T, T) hides padding and the future.
    `ntokens` counts the labels that are real: what a loss is divided by.
    """

    def __init__(self, src: Tensor, tgt: Tensor, pad: int = PAD):
        self.src = src
        self.src_mask = padding_mask(src, pad)
        self.tgt = tgt[:, :-1]
        self.tgt_y = tgt[:, 1:]
        causal = subsequent_mask(self.tgt.size(1), tgt.device)
        self.tgt_mask = padding_mask(self.tgt, pad) & causal
        self.ntokens = int((self.tgt_y != pad).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        moved = object.__new__(Batch)
        for name, part in vars(self).items():
            setattr(moved, name, part.to(device) if isinstance(part, Tensor) else part)
        return moved


# %% [markdown]
# Two sentences of different length, so that one needs padding.

# %%
words = ["<pad>", "<unk>", "<s>", "</s>", "ein", "kleiner", "Hund", "schläft"]
words += ["a", "small", "dog", "sleeps"]
two = Batch(
    src=torch.tensor([[4, 6, 7, 3, 0], [4, 5, 6, 7, 3]]),  # ein (kleiner) Hund schläft </s>
    tgt=torch.tensor([[2, 8, 10, 11, 3, 0], [2, 8, 9, 10, 11, 3]]),  # <s> a (small) dog sleeps </s>
)
pd.DataFrame(
    [
        (
            " ".join(words[i] for i in two.tgt[0, : t + 1]),
            words[two.tgt_y[0, t]],
            "yes" if two.tgt_y[0, t] != PAD else "no, padding",
        )
        for t in range(two.tgt.size(1))
    ],
    columns=["the decoder has read", "it must say", "counts in the loss"],
)

# %% [markdown]
# **Predict.** How many of the ten labels in this batch count?

# %%
assert two.ntokens == 4 + 5
for row in range(2):
    for t in range(5):
        for seen in range(5):  # the mask, entry by entry: not the future, and not padding
            allowed = seen <= t and two.tgt[row, seen] != PAD
            assert two.tgt_mask[row, t, seen] == allowed
        if t < 4:
            assert two.tgt_y[row, t] == two.tgt[row, t + 1]  # a label is the next input


# %%
def teacher_forcing_chart(batch: Batch, words: Sequence[str]) -> alt.HConcatChart:
    """For each sentence: which input tokens (columns) a prediction (row) may use."""
    panels = []
    for tgt, labels, mask in zip(batch.tgt, batch.tgt_y, batch.tgt_mask, strict=True):
        rows = [f"says {words[i]}" if i != PAD else "not counted" for i in labels]
        columns = [words[i] for i in tgt]
        panels.append(heatmap(mask, rows, columns, cell=38, words=("visible", "hidden")))
    return alt.hconcat(*panels, spacing=30)


# %%
titled(
    teacher_forcing_chart(two, words),
    "Each label is predicted from the true words before it",
    "Columns: what the decoder reads. Rows: what it must say there. The word to be said is never "
    "among the blue cells of its row: the input stands one place to the right.",
)

# %% [markdown]
# The mask makes the shortcut legal: one pass over the whole sentence gives the same as T passes, each over one prefix. That is worth a check, because everything rests on it.

# %%
torch.manual_seed(0)
model = make_model(12, 12, N=2, d_model=16, d_ff=32, h=2, dropout=0.0)
at_once = model(two.src, two.tgt, two.src_mask, two.tgt_mask)  # (B, T, D)
memory = model.encode(two.src, two.src_mask)  # (B, S, D)
for t in range(5):
    prefix = two.tgt[:, : t + 1]  # (B, t+1)
    one_by_one = model.decode(memory, two.src_mask, prefix, subsequent_mask(t + 1))[:, -1]  # (B, D)
    real = two.tgt_y[:, t] != PAD
    torch.testing.assert_close(at_once[real, t], one_by_one[real])

# %% [markdown]
# ## The loss: cross-entropy and perplexity
#
# > **In short.** The loss is the model's surprise at the right word. Perplexity says the same as a number of choices: at perplexity 8 the model hesitates as if between eight equally likely words.
#
# The model gives logits $z \in \mathbb{R}^V$ at each position, and $p = \mathrm{softmax}(z)$. The surprise at the label $y$ is
#
# $$ -\ln p_y = \ln \sum_{k=1}^{V} e^{z_k} - z_y \qquad\text{(in nats)} $$
#
# and perplexity is $\exp$ of its mean over the real tokens. A model that knows nothing and bets evenly has $p_y = 1/V$, so its loss is $\ln V$ and its perplexity V.
#
# ## Label smoothing
#
# > **In short.** Don't ask for certainty. Give the right word most of the target, and every word a little. The model stops pushing its logits towards infinity.
#
# The paper trains with $\varepsilon = 0.1$ (§5.4) and notes that this *hurts* perplexity, as the model learns to be less sure, but improves BLEU. The target is a distribution over all V words, the label among them:
#
# $$ q_k = (1-\varepsilon)\,[k = y] + \frac{\varepsilon}{V}, \qquad
#    \ell = -\sum_k q_k \ln p_k = (1-\varepsilon)\,(-\ln p_y) + \varepsilon\cdot\frac{1}{V}\sum_k (-\ln p_k) $$
#
# | symbol | shape | meaning |
# |---|---|---|
# | $z, p, q$ | (B, T, V) | logits, the model's distribution, the target's |
# | $y$ | (B, T) | labels |
# | $\varepsilon$ | one number | how much of the target is spread |
#
# The right-hand form needs no $q$ at all: it mixes the surprise at the label with the mean surprise over the vocabulary. Both come from the logits by `logsumexp`, which never takes the logarithm of a zero. Logits in half precision ([chapter 8](ch08_going_fast.ipynb)) are made single first: a 16-bit number keeps two or three digits, too few for sums over a vocabulary. The class returns two sums, the smoothed loss to descend and the plain surprise to report.


# %%
class LabelSmoothing(nn.Module):
    """Cross-entropy against (1 − ε) on the label and ε spread evenly over all V tokens (§5.4).

    The same as `nn.CrossEntropyLoss(label_smoothing=ε, ignore_index=padding_idx, reduction="sum")`.
    The call returns two sums over the real tokens: the smoothed loss, which is descended, and the
    plain negative log-likelihood, which is reported, since only its exponential is a perplexity.
    """

    def __init__(self, smoothing: float = 0.1, padding_idx: int = PAD):
        super().__init__()
        self.smoothing = smoothing
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
def smoothed_targets(
    labels: Tensor, vocab: int, smoothing: float, padding_idx: int = PAD
) -> Tensor:
    """The distribution q that `LabelSmoothing` aims at: labels (...) to (..., V), 0 for padding."""
    q = (1 - smoothing) * F.one_hot(labels, vocab) + smoothing / vocab  # (..., V)
    return q.masked_fill((labels == padding_idx).unsqueeze(-1), 0.0)


# %% [markdown]
# Three independent references: the formula with $q$ written out, PyTorch's loss, and for the gradient the theory, which says $\partial\ell/\partial z = p - q$.

# %%
torch.manual_seed(1)
logits = torch.randn(4, 6, 10, requires_grad=True)  # (B, T, V)
labels = torch.randint(1, 10, (4, 6))  # (B, T)
labels[0, 4:] = labels[1, 2:] = PAD
for smoothing in (0.0, 0.1, 0.4):
    ours, plain_nll = LabelSmoothing(smoothing)(logits, labels)
    (our_gradient,) = torch.autograd.grad(ours, logits)  # (B, T, V)

    theirs = nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=PAD, reduction="sum")
    reference = theirs(logits.flatten(0, 1), labels.flatten())
    (their_gradient,) = torch.autograd.grad(reference, logits)
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(our_gradient, their_gradient)

    q = smoothed_targets(labels, 10, smoothing)  # (B, T, V)
    torch.testing.assert_close(ours, -(q * logits.log_softmax(-1)).sum())
    real = (labels != PAD).unsqueeze(-1)  # (B, T, 1)
    torch.testing.assert_close(our_gradient, (logits.softmax(-1) - q) * real)
    assert (our_gradient[labels == PAD] == 0).all()  # padding teaches nothing
    torch.testing.assert_close(
        plain_nll, F.cross_entropy(logits[labels != PAD], labels[labels != PAD], reduction="sum")
    )

# %% [markdown]
# **Predict.** For V = 8 and $\varepsilon = 0.4$, how much does the label get? (Not 0.6.) And what does the row of a padded position hold?

# %%
example_labels = torch.tensor([4, 7, 2, 3, PAD])  # (T,)
targets = smoothed_targets(example_labels, vocab=8, smoothing=0.4)  # (T, V)
assert targets.isfinite().all()
torch.testing.assert_close(targets.sum(-1), torch.tensor([1.0, 1, 1, 1, 0]))
torch.testing.assert_close(targets[0, 4], torch.tensor(0.6 + 0.4 / 8))
titled(
    heatmap(
        targets,
        [f"label {i}" if i != PAD else "padding" for i in example_labels.tolist()],
        [str(k) for k in range(8)],
        column_title="token",
        value_title="target q",
        domain=(0, 1),
        cell=44,
    ),
    "Where label smoothing aims",
    "V = 8, ε = 0.4, larger than in real life so that it shows. Every row sums to 1, but for padding, "
    "which has no target. The label keeps 0.6 + 0.4/8 = 0.65.",
)


# %% [markdown]
# What does the loss do when the model gets surer and surer of the right word? We give the label the probability $p$ and share the rest evenly.


# %%
def penalty_curve(vocab: int, smoothings: Sequence[float], points: int = 80) -> pd.DataFrame:
    """The loss in nats of giving the label probability p and each other token (1 − p)/(V − 1).

    Columns p, loss and ε. The last p is 0.9999: at 1 the smoothed loss is infinite.
    """
    odds = torch.linspace(-3, math.log(0.9999 / 0.0001), points)  # p closes in on 1
    p = odds.sigmoid()  # (points,)
    rest = ((1 - p) / (vocab - 1)).log().unsqueeze(1).expand(-1, vocab - 1)
    logits = torch.cat((p.log().unsqueeze(1), rest), dim=1)  # (points, V); the label is token 0
    label = torch.zeros(1, dtype=torch.long)
    rows = [
        (
            p[i].item(),
            LabelSmoothing(smoothing, padding_idx=-1)(logits[i : i + 1], label)[0].item(),
            f"ε = {smoothing}",
        )
        for smoothing in smoothings
        for i in range(points)
    ]
    return pd.DataFrame(rows, columns=["p", "loss", "ε"])


# %%
def best_confidence(vocab: int, smoothing: float) -> float:
    """The p at which the smoothed loss is least: where the model's distribution equals q."""
    return 1 - smoothing + smoothing / vocab


# %% [markdown]
# **Predict.** Without smoothing the loss falls for ever. Where does it turn with $\varepsilon = 0.1$ and V = 10?

# %%
penalties = penalty_curve(vocab=10, smoothings=(0.0, 0.1, 0.2, 0.4))
assert penalties.notna().all(axis=None)  # a NaN would leave a hole, or an empty picture
for smoothing in (0.1, 0.2, 0.4):
    curve = penalties[penalties["ε"] == f"ε = {smoothing}"]
    lowest = curve.loc[curve["loss"].idxmin(), "p"]
    assert abs(lowest - best_confidence(10, smoothing)) < 0.04
titled(
    lines(
        penalties,
        "p",
        "loss",
        "ε",
        x_title="probability that the model gives the label",
        y_title="loss (nats)",
    ),
    "Smoothing punishes being too sure",
    "V = 10. Without smoothing (ε = 0) surer is always better. With it each curve has its lowest point at "
    "p = 1 − ε + ε/V, and rises steeply towards 1.",
)

# %% [markdown]
# Note that the lowest point is not 0. It is the entropy of $q$, so a smoothed loss has a floor that depends on $\varepsilon$ and V, and two smoothed losses can't be compared unless both agree. The plain surprise has no such floor. This is why we report that one.

# %%
q = smoothed_targets(torch.tensor([1]), 10, 0.1)  # (1, V)
floor = LabelSmoothing(0.1)(q.log(), torch.tensor([1]))[0]
torch.testing.assert_close(floor, torch.special.entr(q).sum())
print(f"floor of the smoothed loss at ε = 0.1, V = 10: {floor:.4f} nats")

# %% [markdown]
# **Pitfall: 0 · log 0.** Draw such pictures from *probabilities* that contain zeros and you get no picture. In floating point $\ln 0 = -\infty$ and $0\cdot(-\infty)$ is NaN, and one NaN in a sum makes the sum NaN. Charts skip NaN without a word, so the plot is empty. Notice it by asking `isfinite` before you draw. Mend it by starting from logits, or by `torch.special.xlogy`, which knows that the limit is 0.


# %%
def penalty_by_multiplying(p: Tensor, q: Tensor) -> Tensor:
    """The wrong way, kept to be looked at: −Σ q·log p, (..., V) to (...); NaN where q = p = 0."""
    return -(q * p.log()).sum(-1)


# %%
p = torch.tensor([[0.0, 0.9, 0.1, 0.0], [0.0, 0.5, 0.5, 0.0]])  # two sharp predictions, V = 4
q = torch.tensor([0.0, 0.9, 0.1, 0.0])  # a target that leaves padding and one more token out
assert penalty_by_multiplying(p, q).isnan().all()
by_limit = -torch.special.xlogy(q, p).sum(-1)  # (2,)
assert by_limit.isfinite().all() and by_limit[0] < by_limit[1]

# %% [markdown]
# **Pitfall: another smoothing, another number.** Some code gives the label exactly $1-\varepsilon$, the padding token nothing, shares $\varepsilon$ among the other V − 2, and reports the Kullback-Leibler divergence, that is the cross-entropy minus the entropy of the target. It trains well enough. But the number is not the loss of `nn.CrossEntropyLoss(label_smoothing=…)`, and its exponential is no perplexity.


# %%
def smoothing_over_v_minus_2(
    logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int = PAD
) -> Tensor:
    """The other smoothing, kept to be compared: divergence in nats, summed over the real tokens."""
    q = torch.full_like(logits, smoothing / (logits.size(-1) - 2))  # (..., V)
    q = q.scatter(-1, labels.unsqueeze(-1), 1 - smoothing)
    q[..., padding_idx] = 0.0
    divergence = (torch.special.xlogy(q, q) - q * logits.log_softmax(-1)).sum(-1)  # (...)
    return divergence[labels != padding_idx].sum()


# %% [markdown]
# **Predict.** A model that bets evenly on 1,000 tokens hesitates among 1,000. Which of the three columns says so?

# %%
one_label = torch.tensor([5])
guesses = {}
for name, p_label in {"even bet": 1 / 1000, "half sure": 0.5, "as sure as q": 0.9001}.items():
    p = torch.full((1, 1000), (1 - p_label) / 999)  # (1, V)
    p[0, 5] = p_label
    smoothed, nll = LabelSmoothing(0.1)(p.log(), one_label)
    divergence = smoothing_over_v_minus_2(p.log(), one_label, 0.1)
    guesses[name] = [value.exp().item() for value in (nll, smoothed, divergence)]
assert abs(guesses["even bet"][0] - 1000) < 1e-6
assert abs(guesses["even bet"][2] - 1000) > 100
pd.DataFrame.from_dict(
    guesses, orient="index", columns=["exp(plain loss)", "exp(smoothed loss)", "exp(divergence)"]
).map("{:,.2f}".format)

# %% [markdown]
# Only the first column. An even bet on 1,000 tokens has perplexity 1,000; the other two columns mix $\varepsilon$ into the answer.
#
# ## Adam and its settings
#
# > **In short.** Adam keeps two running averages of each weight's gradient: its mean, and its square. It steps along the mean, divided by the usual size. So every weight moves at a similar speed, however steep its slope.
#
# With the gradient $g_n$ at step n (all symbols have the shape of the weights):
#
# $$ m_n = \beta_1 m_{n-1} + (1-\beta_1) g_n,\quad v_n = \beta_2 v_{n-1} + (1-\beta_2) g_n^2,\quad
#    \theta_n = \theta_{n-1} - \eta_n \frac{m_n / (1-\beta_1^n)}{\sqrt{v_n/(1-\beta_2^n)} + \epsilon} $$
#
# | | paper (§5.3) | PyTorch's default | what it does |
# |---|---|---|---|
# | $\beta_1$ | 0.9 | 0.9 | memory of the direction |
# | $\beta_2$ | **0.98** | 0.999 | memory of the size |
# | $\epsilon$ | **1e−9** | 1e−8 | keeps from dividing by zero; not the ε of label smoothing |
# | $\eta_n$ | the schedule below | 0.001 | the learning rate |


# %%
def adam_path(
    gradients: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-9
) -> Tensor:
    """Where Adam goes from 0 by the formula: gradients (steps, …) to weights after each step."""
    m, v, weight = (torch.zeros_like(gradients[0]) for _ in range(3))
    path = []
    for n, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        weight = weight - lr * (m / (1 - betas[0] ** n)) / ((v / (1 - betas[1] ** n)).sqrt() + eps)
        path.append(weight)
    return torch.stack(path)


# %%
torch.manual_seed(2)
gradients = torch.randn(30, 5) * torch.tensor([1e-3, 0.1, 1.0, 10.0, 1000.0])  # (steps, weights)
weight = nn.Parameter(torch.zeros(5))
optimizer = torch.optim.Adam([weight], lr=0.01, betas=(0.9, 0.98), eps=1e-9)
for step, expected in enumerate(adam_path(gradients, lr=0.01)):
    weight.grad = gradients[step]
    optimizer.step()
    torch.testing.assert_close(weight.data, expected)

first = adam_path(gradients, lr=0.01)[0].abs()
torch.testing.assert_close(first, torch.full((5,), 0.01), rtol=1e-5, atol=0)

# %% [markdown]
# Look at the last check. The gradients differ a million times, and yet the first step of every weight is exactly the learning rate. At that moment the average of the sizes rests on one batch. That is one reason to begin with a small rate.
#
# **Predict.** $\beta_2 = 0.98$ or 0.999: which forgets sooner, and after how many steps is half of the memory gone?


# %%
def memory_curve(betas: Sequence[float], steps: int) -> pd.DataFrame:
    """Share of Adam's average that is owed to the newest k gradients: 1 − β^k, k = 1 … steps."""
    rows = [(k, 1 - beta**k, f"β₂ = {beta}") for beta in betas for k in range(1, steps + 1, 4)]
    return pd.DataFrame(rows, columns=["k", "share", "β₂"])


# %%
half_life = {beta: math.ceil(math.log(0.5) / math.log(beta)) for beta in (0.98, 0.999)}
assert half_life == {0.98: 35, 0.999: 693}
titled(
    lines(
        memory_curve((0.98, 0.999), 1000),
        "k",
        "share",
        "β₂",
        x_title="newest k gradients",
        y_title="their share of the average",
    ),
    "How far back Adam looks",
    "Half of the average is owed to the newest 35 steps with the paper's β₂, and to the newest 693 with "
    "PyTorch's default. The shorter memory follows a quickly changing start.",
)

# %% [markdown]
# ## The learning rate: warm up, then cool down
#
# > **In short.** Drive off slowly, then speed up, then brake for the rest of the way. The bigger the model, the slower throughout.
#
# $$ \eta_n = D^{-0.5}\cdot\min\left(n^{-0.5},\; n\cdot w^{-1.5}\right) \qquad\text{(§5.3, equation 3)} $$
#
# | symbol | meaning |
# |---|---|
# | $n$ | number of the step, 1, 2, 3, … |
# | $w$ | warm-up steps, 4,000 in the paper |
# | $D$ | `d_model` |
#
# The second term grows in a straight line, the first falls as $1/\sqrt n$; they meet at $n = w$, where the rate is greatest: $\eta_w = (D\,w)^{-0.5}$.


# %%
def rate(step: int, model_size: int, factor: float = 1.0, warmup: int = 4000) -> float:
    """The paper's learning rate at `step` = 1, 2, …: linear warm-up, then 1/√step (§5.3, eq. 3)."""
    if step < 1:
        raise ValueError(f"steps count from 1, as in the paper, not {step}")
    return factor * model_size**-0.5 * min(step**-0.5, step * warmup**-1.5)


# %% [markdown]
# The same curve is easier to tune when it is named by its peak. And there is a rival that is common today: warm up in the same way, then follow half a cosine down to zero. It has to know the last step in advance.


# %%
def inverse_sqrt_rate(step: int, peak: float, warmup: int) -> float:
    """The paper's curve, named by its peak: `peak` at `step` = `warmup`, then falling as 1/√step."""
    return peak * min(step / warmup, math.sqrt(warmup / step))


# %%
def cosine_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Linear warm-up to `peak`, then half a cosine down to zero just after step `total`."""
    if step <= warmup:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / (total + 1 - warmup))
    return peak * 0.5 * (1 + math.cos(math.pi * done))


# %% [markdown]
# **Predict.** The paper's base model has D = 512 and w = 4,000. What is its highest rate?

# %%
base_peak = rate(4000, 512)
print(
    f"base model: {base_peak:.6f} at step 4,000, {rate(1, 512):.2e} at step 1, {rate(100_000, 512):.6f} at step 100,000"
)
assert abs(base_peak - 7.0e-4) < 0.02e-4
assert max(range(1, 12_000), key=lambda n: rate(n, 512)) == 4000
for n in (1, 17, 3999, 4000, 4001, 100_000):
    assert math.isclose(rate(n, 512), inverse_sqrt_rate(n, base_peak, 4000))
    assert math.isclose(rate(n, 256) / rate(n, 1024), 2.0)  # four times the width, half the rate
for n in range(1, 4001, 333):  # up to the peak the cosine schedule is the same line
    assert math.isclose(cosine_rate(n, base_peak, 4000, 20_000), rate(n, 512))
assert cosine_rate(20_000, base_peak, 4000, 20_000) > 0  # the last step still moves …
assert cosine_rate(20_001, base_peak, 4000, 20_000) == 0  # … and the one after it would not


# %%
def schedule_table(sizes: Sequence[int], warmup: int, total: int, every: int = 100) -> pd.DataFrame:
    """The paper's rate for each model size, and a cosine with the peak of the middle one."""
    steps = [1, *range(every, total + 1, every)]
    rows = [
        (n, rate(n, size, warmup=warmup), f"paper, D = {size}") for size in sizes for n in steps
    ]
    middle = sizes[len(sizes) // 2]
    peak = rate(warmup, middle, warmup=warmup)
    rows += [(n, cosine_rate(n, peak, warmup, total), f"cosine, peak of {middle}") for n in steps]
    return pd.DataFrame(rows, columns=["step", "rate", "schedule"])


# %%
titled(
    lines(
        schedule_table((256, 512, 1024), warmup=4000, total=20_000),
        "step",
        "rate",
        "schedule",
        y_title="learning rate",
        zero=True,
    ),
    "Warm-up, and two ways down",
    "The paper's schedule peaks at step 4,000 for every width, lower for wider models. The cosine stays "
    "high for longer and then comes down to zero; 1/√n never does.",
)

# %% [markdown]
# ### Which step is step 1?
#
# PyTorch's `LambdaLR` counts finished steps: before the first it asks for `schedule(0)`, before the second for `schedule(1)`. The paper counts from 1. So the schedule that we hand over adds one. A small bench shows what an optimizer really gets.


# %%
def rates_used(schedule: Callable[[int], float], steps: int, accumulate: int = 1) -> list[float]:
    """The rate of each of `steps` optimizer steps under `LambdaLR(optimizer, schedule)`.

    `accumulate` is how often the schedule is advanced per optimizer step; only 1 is right.
    """
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, schedule)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for _ in range(accumulate):
            scheduler.step()
    return used


# %%
ours = rates_used(lambda done: rate(done + 1, 512, warmup=5), 8)
assert ours == [rate(n, 512, warmup=5) for n in range(1, 9)]
assert ours.index(max(ours)) + 1 == 5  # the fifth step has the peak

# %% [markdown]
# **Pitfall: one step late.** Equation 3 divides by $\sqrt n$, so `schedule(0)` would crash. A tempting mend is to treat step 0 as step 1. Then the first *two* steps get the same rate, and all others lag one behind the paper. Our `rate` refuses 0 instead, so that nobody can forget the + 1.


# %%
def rate_with_a_patch(step: int, model_size: int, warmup: int) -> float:
    """The wrong mend, kept to be looked at: step 0 counts as step 1."""
    return rate(max(step, 1), model_size, warmup=warmup)


# %%
late = rates_used(lambda done: rate_with_a_patch(done, 512, warmup=5), 8)
assert (
    late[0] == late[1] and late.index(max(late)) + 1 == 6
)  # twice the same, and the peak comes late
assert len(set(ours[:5])) == 5  # ours: five different rates on the way up
try:
    rate(0, 512)
except ValueError as error:
    print(error)

# %% [markdown]
# With 4,000 warm-up steps one step is nothing. It matters to whoever compares two programs number by number, and hunts for the difference.
#
# ## Gradient clipping
#
# > **In short.** Now and then a batch pulls far too hard. Shorten the pull, keep its direction.
#
# Put all gradients of the model into one long vector $g$. With a limit c:
#
# $$ g \leftarrow g\cdot\min\left(1,\; \frac{c}{\lVert g\rVert}\right) $$
#
# `nn.utils.clip_grad_norm_` does this in place and returns the norm from before, which is worth logging. (It divides by $\lVert g\rVert + 10^{-6}$.)


# %%
def clipped(gradient: Tensor, limit: float) -> Tensor:
    """The same direction, with a norm of at most `limit`: (n,) to (n,)."""
    return gradient * min(1.0, limit / gradient.norm().item())


# %%
torch.manual_seed(3)
for size in (0.01, 1.0, 50.0):
    parts = nn.ParameterList([torch.zeros(3, 4), torch.zeros(7)])
    for part in parts:
        part.grad = size * torch.randn_like(part)
    before = parameters_to_vector(part.grad for part in parts)  # (19,)
    norm = nn.utils.clip_grad_norm_(parts, 1.0)
    after = parameters_to_vector(part.grad for part in parts)  # (19,)
    torch.testing.assert_close(norm, before.norm())
    torch.testing.assert_close(after, clipped(before, 1.0), rtol=2e-6, atol=0)
    assert after.norm() <= 1.0
    torch.testing.assert_close(F.cosine_similarity(before, after, dim=0), torch.tensor(1.0))

# %% [markdown]
# **Pitfall: clipping each entry.** `clip_grad_value_` cuts every entry on its own at ±c. Large entries are cut and small ones are not, so the vector turns.

# %%
pull = torch.tensor([3.0, 0.6])
by_value = pull.clamp(-1, 1)
assert F.cosine_similarity(pull, clipped(pull, 1.0), dim=0) > 1 - 1e-12
assert F.cosine_similarity(pull, by_value, dim=0) < 0.95


# %%
def arrows_chart(arrows: dict[str, Tensor]) -> alt.LayerChart:
    """Vectors in the plane, drawn from the origin, each with its name."""
    rows = [
        (name, order, *(tip * order).tolist()) for name, tip in arrows.items() for order in (0, 1)
    ]
    frame = pd.DataFrame(rows, columns=["name", "order", "x", "y"]).round(4)
    order = list(arrows)
    base = alt.Chart(frame).encode(
        x=alt.X("x:Q", title="gradient of one weight"),
        y=alt.Y("y:Q", title="gradient of another"),
        color=alt.Color("name:N", sort=order, title=None),
    )
    tips = base.transform_filter("datum.order == 1")
    drawn = base.mark_line().encode(order="order:Q", detail="name:N") + tips.mark_point(
        size=90, filled=True
    )
    return drawn.properties(width=480, height=180)


# %%
titled(
    arrows_chart(
        {"the gradient": pull, "clipped by norm": clipped(pull, 1.0), "clipped by value": by_value}
    ),
    "Shorter, or turned",
    "Limit 1. Clipping by norm stays on the gradient's line. Clipping by value points elsewhere.",
)

# %% [markdown]
# The paper doesn't mention clipping. It is cheap insurance, and our trainings use it.
#
# ## Gradient accumulation
#
# > **In short.** A batch that doesn't fit into memory is eaten in bites. Add up the gradients of the bites, then step once. But weigh each bite by its tokens, or the small bites count too much.
#
# A batch of sentences is cut into micro-batches $i = 1 \dots m$ with $\tau_i$ real tokens and the *summed* loss $L_i$. The loss per token of the whole is
#
# $$ L = \frac{\sum_i L_i}{\sum_i \tau_i}, \qquad \nabla L = \sum_i \nabla \frac{L_i}{\sum_j \tau_j} $$
#
# So divide each micro-batch's sum by the tokens of the *group*, and let `backward()` add up. For that the group must be known before its first backward pass. Hence batches are dealt out in lists.


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
        return math.exp(self.nll / self.tokens)


# %%
def grouped(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """`batches` in lists of `size`; the last list is shorter where they do not come out even."""
    source = iter(batches)
    while group := list(islice(source, size)):
        yield group


# %%
def batch_loss(
    model: EncoderDecoder, batch: Batch, criterion: LabelSmoothing
) -> tuple[Tensor, Tensor]:
    """Smoothed loss and negative log-likelihood of one batch, both summed over its real tokens."""
    x = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)  # (B, T, D)
    return criterion(model.generator(x), batch.tgt_y)


# %%
def train_step(
    model: EncoderDecoder,
    group: list[Batch],
    criterion: LabelSmoothing,
    optimizer: torch.optim.Optimizer,
    clip: float = math.inf,
    loss_of: Callable[..., tuple[Tensor, Tensor]] = batch_loss,
    per: float | None = None,
) -> EpochReport:
    """One optimizer step on the mean loss per token of all the batches in `group`.

    Each batch's sum is divided by the *group's* tokens before its backward pass, so the gradient is
    that of one large batch, however unequal the parts are. `loss_of` is how a batch's two sums are
    computed: chapter 8 has a faster way to the same numbers. `per` is another divisor, for a group
    that is only a part of the step (chapter 9).

    Raises FloatingPointError, before any weight has changed, where loss or gradient isn't finite.
    """
    optimizer.zero_grad(set_to_none=True)
    report = EpochReport(tokens=sum(batch.ntokens for batch in group))
    per = report.tokens if per is None else per
    for batch in group:
        loss, nll = loss_of(model, batch, criterion)
        (loss / per).backward()
        report.loss += loss.item()
        report.nll += nll.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    report.grad_norms.append(norm.item())
    if not math.isfinite(report.loss + norm.item()):
        raise FloatingPointError(f"loss {report.loss}, gradient's norm {norm.item()}")
    optimizer.step()
    return report


# %% [markdown]
# To check it we need batches. The copy task provides them for the rest of the chapter: the source is a row of random symbols, and the target is the same row. A toy, but a complete one: the model must find the right place in the source for each word it says.
#
# Lengths are mixed, so that there is padding. To have sequences that a training surely never saw, a simple rule splits them: those whose ids add up to a multiple of 7 are held out.

# %%
COPY_VOCAB = 14  # the four special ids and ten symbols
HELD_OUT = 7  # sequences whose ids add up to a multiple of this are never trained on


# %%
def copy_sequences(
    count: int, generator: torch.Generator, held_out: bool, lengths: tuple[int, int]
) -> Tensor:
    """`count` random rows of symbols, padded: (count, longest) of ids 4 … 13 and PAD."""
    shortest, longest = lengths
    kept = []
    while sum(map(len, kept)) < count:
        ids = torch.randint(EOS + 1, COPY_VOCAB, (2 * count, longest), generator=generator)
        length = torch.randint(shortest, longest + 1, (2 * count, 1), generator=generator)
        ids = ids.masked_fill(torch.arange(longest) >= length, PAD)
        kept.append(ids[(ids.sum(dim=1) % HELD_OUT == 0) == held_out])
    return torch.cat(kept)[:count]


# %%
def copy_batches(
    count: int,
    size: int,
    seed: int,
    held_out: bool = False,
    lengths: tuple[int, int] = (5, 10),
) -> Iterator[Batch]:
    """`count` batches of `size` sequences to be copied: src is the symbols and </s>, tgt adds <s>.

    Lengths are drawn evenly from `lengths`, both ends included. The same `seed` gives the same
    batches. With `held_out` they are sequences that are in no batch without it.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        symbols = copy_sequences(size, generator, held_out, lengths)  # (B, longest)
        end = (symbols != PAD).sum(dim=1, keepdim=True)  # (B, 1): the place after the last symbol
        src = F.pad(symbols, (0, 1), value=PAD).scatter(1, end, EOS)  # (B, S)
        yield Batch(src, F.pad(src, (1, 0), value=BOS))


# %%
batch = next(copy_batches(1, size=200, seed=0))
held = next(copy_batches(1, size=200, seed=0, held_out=True))
assert (batch.src.sum(1) - EOS).remainder(HELD_OUT).ne(0).all()
assert (held.src.sum(1) - EOS).remainder(HELD_OUT).eq(0).all()
for source, read, labels in zip(batch.src, batch.tgt, batch.tgt_y, strict=True):
    real = source[source != PAD]
    assert 5 <= len(real) - 1 <= 10 and real[-1] == EOS and real[:-1].min() > EOS
    assert torch.equal(labels, source) and read[0] == BOS  # to be copied, after the start symbol
print("source:", batch.src[0].tolist())
print("labels:", batch.tgt_y[0].tolist())

# %% [markdown]
# Three micro-batches, very unequal: many long sequences, few short ones. The gradient of one step over the three must be that of one large batch. We read the gradient off after a step of size 0.


# %%
def tiny_model(seed: int, vocab: int = COPY_VOCAB, N: int = 1, d_model: int = 16) -> EncoderDecoder:
    """A small post-norm Transformer without dropout, for experiments that take a moment."""
    torch.manual_seed(seed)
    return make_model(vocab, vocab, N=N, d_model=d_model, d_ff=2 * d_model, h=2, dropout=0.0)


# %%
def step_gradient(model: EncoderDecoder, group: list[Batch], criterion: LabelSmoothing) -> Tensor:
    """The gradient that `train_step` would descend, as one long vector; the weights stay."""
    train_step(model, group, criterion, torch.optim.SGD(model.parameters(), lr=0.0))
    return parameters_to_vector(p.grad for p in model.parameters())


# %%
def joined(batches: Sequence[Batch]) -> Batch:
    """All sequences of some copy batches as one batch."""
    src = torch.cat([batch.src for batch in batches])
    return Batch(src, F.pad(src, (1, 0), value=BOS))


# %%
unequal = [
    next(copy_batches(1, size, seed=1, lengths=(shortest, 10)))
    for size, shortest in ((16, 10), (4, 5), (1, 1))
]
model, criterion = tiny_model(0), LabelSmoothing(0.1)
in_bites = step_gradient(model, unequal, criterion)
at_once = step_gradient(model, [joined(unequal)], criterion)
torch.testing.assert_close(in_bites, at_once)
print("real tokens in the micro-batches:", [part.ntokens for part in unequal])

# %% [markdown]
# **Pitfall: the mean of means.** The usual recipe takes each micro-batch's mean loss and divides by their number. With equal token counts that is the same. With unequal ones, a token in a small micro-batch weighs more than one in a large one.


# %%
def mean_of_means_gradient(
    model: EncoderDecoder, group: list[Batch], criterion: LabelSmoothing
) -> Tensor:
    """The usual recipe, kept to be compared: every micro-batch counts the same."""
    model.zero_grad()
    for batch in group:
        loss, _ = batch_loss(model, batch, criterion)
        (loss / batch.ntokens / len(group)).backward()
    return parameters_to_vector(p.grad for p in model.parameters())


# %%
by_means = mean_of_means_gradient(model, unequal, criterion)
off_by = (by_means - at_once).norm() / at_once.norm()
assert off_by > 0.1
print(f"the mean of means misses the gradient by {off_by:.0%} of its length")

# %% [markdown]
# **Predict.** How many times too heavy is a token of the smallest micro-batch?

# %%
tokens = [part.ntokens for part in unequal]
weight_frame = pd.DataFrame(
    {
        "micro-batch": [
            f"a token of the {name} ({n} tokens)"
            for name, n in zip(("largest", "middle", "smallest"), tokens, strict=True)
        ],
        "weight": [sum(tokens) / (len(tokens) * n) for n in tokens],
    }
)
assert abs((weight_frame["weight"] * tokens).sum() - sum(tokens)) < 1e-9
titled(
    bars(
        weight_frame,
        "micro-batch",
        "weight",
        value_title="weight of one token (1 is right)",
        number_format=".2f",
    ),
    "What one token weighs in a mean of means",
    "Every bar should end at 1. Divided by the group's tokens, it does.",
)

# %% [markdown]
# **Pitfall: a step on what is no number.** Let one loss overflow to ∞. Somewhere in its backward pass stands ∞ − ∞ or 0 · ∞, so the gradient gets a NaN. Its norm is then NaN too, and clipping, which multiplies by it, makes *all* gradients NaN. One step later so is every weight. Nothing stops: the loss prints as `nan` from then on, and the weights from before are gone. So `train_step` looks at loss and norm first, and refuses. ([Chapter 9](ch09_training_run.ipynb) goes back to the last checkpoint then.)

# %%
victim = tiny_model(0)
optimizer = torch.optim.Adam(victim.parameters(), lr=0.01)
untouched = parameters_to_vector(victim.parameters()).detach().clone()  # (n,)
try:
    train_step(
        victim,
        unequal,
        criterion,
        optimizer,
        clip=1.0,
        loss_of=lambda *given: [math.inf * part for part in batch_loss(*given)],
    )
except FloatingPointError as error:
    print("FloatingPointError:", error)
else:
    raise AssertionError("an infinite loss was stepped on")
assert torch.equal(parameters_to_vector(victim.parameters()), untouched)
assert not optimizer.state  # Adam's averages have heard nothing of it either

optimizer.step()  # what was refused
assert parameters_to_vector(victim.parameters()).isnan().all()

# %% [markdown]
# **Pitfall: stepping on multiples.** A loop that steps when `i % size == 0` steps after the very first micro-batch, since $0 \bmod 10 = 0$. From then on each group is one late, and what is left at the end is never used; if the gradients are not cleared, it even leaks into the next epoch.


# %%
def grouped_by_remainder(batches: Iterable, size: int) -> Iterator[list]:
    """The wrong grouping, kept to be looked at: a step after micro-batches 1, size + 1, …"""
    group = []
    for i, batch in enumerate(batches):
        group.append(batch)
        if i % size == 0:
            yield group
            group = []


# %% [markdown]
# **Predict.** With 25 micro-batches and groups of 10: after which micro-batches does each of the two step?

# %%
numbers = range(1, 26)
steps_after = {
    "ours": [group[-1] for group in grouped(numbers, 10)],
    "by remainder": [group[-1] for group in grouped_by_remainder(numbers, 10)],
}
assert steps_after == {"ours": [10, 20, 25], "by remainder": [1, 11, 21]}
assert [n for group in grouped(numbers, 10) for n in group] == list(numbers)  # nothing lost


# %%
def grouping_chart(count: int, size: int) -> alt.Chart:
    """Which optimizer step each micro-batch goes into, for both groupings."""
    rows = []
    for name, split in (("ours", grouped), ("by remainder", grouped_by_remainder)):
        step_of = {
            n: f"step {k}"
            for k, group in enumerate(split(range(1, count + 1), size), 1)
            for n in group
        }
        rows += [(name, n, step_of.get(n, "never used")) for n in range(1, count + 1)]
    frame = pd.DataFrame(rows, columns=["grouping", "micro-batch", "goes into"])
    names = ["step 1", "step 2", "step 3", "never used"]
    colors = alt.Scale(domain=names, range=[*PALETTE[:3], GREY])
    encoded = (
        alt.Chart(frame)
        .mark_rect(stroke="white", strokeWidth=2)
        .encode(
            x=alt.X("micro-batch:O", axis=alt.Axis(labelAngle=0, ticks=False, domain=False)),
            y=alt.Y("grouping:N", sort=None, title=None, axis=alt.Axis(ticks=False, domain=False)),
            color=alt.Color("goes into:N", scale=colors, title=None),
        )
    )
    return encoded.properties(width=560, height=90)


# %%
titled(
    grouping_chart(25, 10),
    "Who goes into which step",
    "25 micro-batches in groups of 10. By remainder, the first step sees one micro-batch and the last "
    "four are lost. Ours has a last group of five, correctly weighed.",
)

# %% [markdown]
# The gradient tells as well. A first step by remainder descends the loss of one micro-batch, where ten were asked for.

# %%
micro = list(copy_batches(10, size=2, seed=4))
full = step_gradient(model, [joined(micro)], criterion)
first_group = next(grouped(micro, 10))
wrong_first_group = next(grouped_by_remainder(micro, 10))
torch.testing.assert_close(step_gradient(model, first_group, criterion), full)
assert (step_gradient(model, wrong_first_group, criterion) - full).norm() > 0.1 * full.norm()

# %% [markdown]
# **Pitfall: the schedule runs ahead.** If the schedule advances with each micro-batch instead of each optimizer step, 10 micro-batches a step make the warm-up ten times shorter than asked, and the rate falls too early.


# %%
def hasty_schedule_table(warmup: int, accumulate: int, steps: int) -> pd.DataFrame:
    """The rate at each optimizer step when the schedule advances once a step, and once a micro-batch."""
    ways = {"once a step": 1, "once a micro-batch": accumulate}
    rows = [
        (n, used, name)
        for name, times in ways.items()
        for n, used in enumerate(
            rates_used(lambda done: rate(done + 1, 512, warmup=warmup), steps, times), 1
        )
    ]
    return pd.DataFrame(rows, columns=["step", "rate", "the schedule advances"])


# %%
hasty = hasty_schedule_table(warmup=400, accumulate=10, steps=800)
peaks = hasty.loc[hasty.groupby("the schedule advances")["rate"].idxmax()].set_index(
    "the schedule advances"
)["step"]
assert peaks["once a step"] == 400
assert 40 <= peaks["once a micro-batch"] <= 41
titled(
    lines(
        hasty,
        "step",
        "rate",
        "the schedule advances",
        x_title="optimizer step",
        y_title="learning rate",
    ),
    "A warm-up of 400 steps, and what becomes of it",
    "With 10 micro-batches a step and the schedule advanced for each of them, the peak comes at step 40 "
    "instead of 400.",
)

# %% [markdown]
# ## The training loop
#
# > **In short.** Predict, compare, step; again. Keep sums while you go, and divide once at the end.
#
# The same loop trains and validates: with an optimizer it learns, without one it only looks. It reports the smoothed loss, which was descended, and the perplexity of the plain loss.


# %%
@dataclass
class TrainState:
    """What a training has done so far; a run makes its own, so that none inherits another's."""

    steps: int = 0  # optimizer steps
    sentences: int = 0
    tokens: int = 0  # target tokens, padding not counted


# %%
@torch.no_grad()
def evaluate_group(
    model: EncoderDecoder,
    group: list[Batch],
    criterion: LabelSmoothing,
    loss_of: Callable[..., tuple[Tensor, Tensor]] = batch_loss,
) -> EpochReport:
    """The losses of a few batches, without gradients."""
    report = EpochReport()
    for batch in group:
        loss, nll = loss_of(model, batch, criterion)
        report.loss += loss.item()
        report.nll += nll.item()
        report.tokens += batch.ntokens
    return report


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
    loss_of: Callable[..., tuple[Tensor, Tensor]] = batch_loss,
    state: TrainState | None = None,
    progress: tqdm | None = None,
) -> EpochReport:
    """One pass over `batches`: training with an optimizer, evaluation (no gradients) without.

    `accumulate` batches make one optimizer step, and the schedule advances once a step. `clip`
    bounds the gradient's norm. `loss_of` is as in `train_step`. `state` is counted up in place. `progress` advances by one a batch.
    """
    training = optimizer is not None
    model.train(training)
    total = EpochReport()
    for group in grouped(batches, accumulate):
        if training:
            report = train_step(model, group, criterion, optimizer, clip, loss_of)
            if scheduler is not None:
                scheduler.step()
        else:
            report = evaluate_group(model, group, criterion, loss_of)
        total.loss += report.loss
        total.nll += report.nll
        total.tokens += report.tokens
        total.grad_norms += report.grad_norms
        if state is not None:
            state.steps += training
            state.sentences += sum(batch.src.size(0) for batch in group)
            state.tokens += report.tokens
        if progress is not None:
            now = {"loss": f"{total.loss_per_token:.3f}", "ppl": f"{total.perplexity:.1f}"}
            progress.set_postfix(now, refresh=False)  # shown with the next update
            progress.update(len(group))
    return total


# %% [markdown]
# 25 micro-batches, 10 to a step. **Predict** what the counters will say.

# %%
data = list(copy_batches(25, size=3, seed=5))
model, criterion, state = tiny_model(1), LabelSmoothing(0.1), TrainState()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
scheduler = LambdaLR(optimizer, lambda done: rate(done + 1, 16, factor=0.1, warmup=20))
report = run_epoch(
    data, model, criterion, optimizer, scheduler, accumulate=10, clip=1.0, state=state
)
assert state == TrainState(steps=3, sentences=75, tokens=joined(data).ntokens)
assert len(report.grad_norms) == 3 and scheduler.last_epoch == 3

# %% [markdown]
# And the evaluation against one large batch and PyTorch's loss. Whatever the batches are, the answer must be the same.

# %%
whole = joined(data)
logits = model.generator(model(whole.src, whole.tgt, whole.src_mask, whole.tgt_mask))  # (B, T, V)
plain = F.cross_entropy(logits.flatten(0, 1), whole.tgt_y.flatten(), ignore_index=PAD)
weights_before = parameters_to_vector(model.parameters()).detach().clone()
for accumulate in (1, 7, 25):
    looked = run_epoch(data, model, criterion, accumulate=accumulate)
    assert math.isclose(looked.perplexity, plain.exp().item())
assert torch.equal(weights_before, parameters_to_vector(model.parameters()))  # it only looked

# %% [markdown]
# **Pitfall: a counter that remembers.** Python makes the default value of an argument once, when it reads the `def`. `state=TrainState()` in a signature is one object for all calls that ever come, and the second training begins at the first one's step count. `run_epoch` has `None` there.


# %%
def count_steps_forever(steps: int, state: TrainState = TrainState()) -> TrainState:  # noqa: B008
    """The wrong default, kept to be looked at: all calls share one state."""
    state.steps += steps
    return state


# %%
first_run, second_run = count_steps_forever(100), count_steps_forever(100)
assert second_run.steps == 200 and first_run is second_run
for _ in range(2):  # ours: a new run, a new state
    state = TrainState()
    run_epoch(data[:3], model, criterion, optimizer, state=state)
    assert state.steps == 3

# %% [markdown]
# **Pitfall: validation that means nothing.** Three mistakes are common, and each gives a number that looks fine.
#
# 1. *Without `no_grad`.* Every activation is kept for a backward pass that never comes. The number is right, the memory is gone.
# 2. *The smoothed loss is reported.* It has a floor above 0, and its exponential is no perplexity.
# 3. *Means are averaged.* Batches, or the parts of a validation set on several GPUs, differ in tokens. Add up the sums, divide once.


# %%
def bytes_kept(call: Callable[[], object]) -> int:
    """Bytes of the tensors that autograd keeps for a backward pass while `call()` runs."""
    kept = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    return sum(kept)


# %%
def pooled(reports: Iterable[EpochReport]) -> EpochReport:
    """One report of several parts, such as GPUs: sums are added, so that means are taken once."""
    total = EpochReport()
    for report in reports:
        total.loss += report.loss
        total.nll += report.nll
        total.tokens += report.tokens
    return total


# %%
assert bytes_kept(lambda: run_epoch(data, model, criterion)) == 0
assert bytes_kept(lambda: batch_loss(model, whole, criterion)) > 1_000_000  # for 75 sequences!

long_part, short_part = [joined(data)], list(copy_batches(1, size=40, seed=6, lengths=(1, 1)))
ranks = [run_epoch(part, model, criterion) for part in (long_part, short_part)]
everything = run_epoch(long_part + short_part, model, criterion)
assert math.isclose(pooled(ranks).perplexity, everything.perplexity)
assert pooled(ranks).tokens == everything.tokens
mean_of_means = math.exp(sum(rank.nll / rank.tokens for rank in ranks) / len(ranks))
assert abs(mean_of_means / everything.perplexity - 1) > 0.02

# %% [markdown]
# **Predict.** Two "GPUs" have validated: one on 75 longish sequences, one on 40 of a single symbol. Which of the bars is the perplexity of the whole?

# %%
called_perplexity = pd.DataFrame(
    {
        "reported": ["sums added, plain loss", "mean of the two means", "smoothed loss"],
        "perplexity": [everything.perplexity, mean_of_means, math.exp(everything.loss_per_token)],
    }
)
titled(
    bars(called_perplexity, "reported", "perplexity", number_format=".2f"),
    "Three numbers that are called perplexity",
    "One model, one validation set. Only the first is the perplexity, and only it stays the same "
    "however the data are cut.",
)

# %% [markdown]
# **Pitfall: an import that works.** Where a chapter's examples run whenever it is imported, every worker process of a data loader or of a multi-GPU training runs them again. In this series an import runs definitions only: no training, no picture, no output. A test in a fresh process holds this chapter to it.
#
# ## Greedy decoding
#
# > **In short.** Say the likeliest word, read it back, say the next. Stop at the end symbol.
#
# In training the model reads the true prefix. Now there is none, and it reads its own words:
#
# $$ \hat y_t = \arg\max_k \; p(k \mid \hat y_{<t},\, x) $$
#
# Rows of a batch end at different times. A row that has ended is padded while the others go on, and the loop stops when all have ended. Chapter 10 has better searches.


# %%
@torch.no_grad()
def greedy_decode(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    max_len: int,
    start_symbol: int = BOS,
    end_symbol: int = EOS,
) -> Tensor:
    """The likeliest token, again and again: src (B, S) to ids (B, ≤ max_len), without the start.

    Each row ends with `end_symbol`, unless `max_len` tokens came first, and is padded after it. The
    loop stops when every row has ended. Dropout is off while it runs.
    """
    was_training = model.training
    model.eval()
    memory = model.encode(src, src_mask)  # (B, S, D)
    ids = src.new_full((src.size(0), 1), start_symbol)  # (B, 1)
    ended = torch.zeros(src.size(0), dtype=torch.bool, device=src.device)  # (B,)
    for _ in range(max_len):
        mask = subsequent_mask(ids.size(1), ids.device)  # (1, T, T)
        last = model.decode(memory, src_mask, ids, mask)[:, -1]  # (B, D)
        token = model.generator(last).argmax(dim=-1)  # (B,)
        ids = torch.cat((ids, token.masked_fill(ended, PAD).unsqueeze(1)), dim=1)  # (B, T+1)
        ended |= token == end_symbol
        if ended.all():
            break
    model.train(was_training)
    return ids[:, 1:]


# %% [markdown]
# To check the loop without a trained model we use an actor who speaks from a script: at position t it gives the script's token t, whatever it reads. The scripts run on after their `</s>` (id 3), as an untended model does.


# %%
class ScriptedModel(nn.Module):
    """Stands in for a Transformer: says `script` (B, L), whatever it reads, and counts its calls."""

    def __init__(self, script: Tensor):
        super().__init__()
        self.script = script
        self.calls = 0

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """The memory is the source itself."""
        return src

    def decode(
        self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor
    ) -> Tensor:
        """tgt (B, T) to the script's next tokens as one-hot vectors (B, T, V)."""
        self.calls += 1
        return F.one_hot(self.script[:, : tgt.size(1)], COPY_VOCAB)

    def generator(self, x: Tensor) -> Tensor:
        """The one-hot vectors are the logits."""
        return x


# %%
script = torch.tensor([[5, 3, 9, 9, 9, 9], [6, 7, 8, 3, 9, 9], [3, 9, 9, 9, 9, 9]])
actor = ScriptedModel(script).train()
said = greedy_decode(actor, script, None, max_len=6)
assert said.tolist() == [[5, 3, 0, 0], [6, 7, 8, 3], [3, 0, 0, 0]]
assert actor.calls == 4 and actor.training  # stopped at the longest; training mode is back
assert greedy_decode(actor, script, None, max_len=2).tolist() == [[5, 3], [6, 7], [3, 0]]
pd.DataFrame(
    [[str(row) for row in script.tolist()], [str(row) for row in said.tolist()]],
    index=["the script", "decoded"],
    columns=["row 0", "row 1", "row 2"],
).T

# %% [markdown]
# ## The copy task, learned
#
# > **In short.** Before you train on sentences, train on something whose right answer you know. If a model can't learn to copy, nothing else is worth trying.
#
# Everything of this chapter comes together: batches, smoothing, Adam, warm-up, clipping, the loop, decoding. The model has two layers a side and 64 features. It is good when it copies *whole sequences* without a mistake, sequences that it never saw.


# %%
def exact_share(model: EncoderDecoder, batches: Iterable[Batch], start_symbol: int = BOS) -> float:
    """Share of sequences that greedy decoding gives back without a single mistake, 0 to 1."""
    right = total = 0
    for batch in batches:
        labels = batch.tgt_y  # (B, T)
        said = greedy_decode(model, batch.src, batch.src_mask, labels.size(1), start_symbol)
        said = F.pad(said, (0, labels.size(1) - said.size(1)), value=PAD)  # (B, T)
        right += int((said == labels).all(dim=1).sum())
        total += len(labels)
    return right / total


# %%
COPY_STEPS = 250


# %%
def train_copy_task(
    seed: int, steps: int = COPY_STEPS, progress: tqdm | None = None
) -> tuple[EncoderDecoder, list[float]]:
    """A small pre-norm Transformer (float32, CPU) trained to copy, and its perplexity every 10 steps.

    `seed` decides the first weights and the data, 64 fresh sequences a step. `progress` advances
    by one a step.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(
            COPY_VOCAB, COPY_VOCAB, N=2, d_model=64, d_ff=128, h=4, dropout=0.0, norm_first=True
        ).float()
    settings = {"lr": 1.0, "betas": (0.9, 0.98), "eps": 1e-9}
    optimizer = torch.optim.Adam(model.parameters(), **settings, fused=True)  # one quick kernel
    scheduler = LambdaLR(optimizer, lambda done: cosine_rate(done + 1, 3e-3, 50, steps))
    criterion, perplexities = LabelSmoothing(0.1), []
    batches = copy_batches(steps, size=64, seed=seed)
    while part := list(islice(batches, 10)):
        report = run_epoch(
            part, model, criterion, optimizer, scheduler, clip=1.0, progress=progress
        )
        perplexities.append(report.perplexity)
    return model, perplexities


# %%
def copy_curves_chart(curves: dict[int, list[float]]) -> alt.Chart:
    """Perplexity on the training batches over the steps, one curve a seed."""
    rows = [
        (10 * (i + 1), perplexity, f"seed {seed}")
        for seed, curve in curves.items()
        for i, perplexity in enumerate(curve)
    ]
    frame = pd.DataFrame(rows, columns=["step", "perplexity", "seed"])
    return lines(frame, "step", "perplexity", "seed", log_y=True)


# %% [markdown]
# Three seeds, so that luck is no explanation. The next cell trains all three, in under a minute on two cores.
#
# **Predict.** Which perplexity does the model start from? Can it reach 1, with $\varepsilon = 0.1$?

# %%
# NBVAL_IGNORE_OUTPUT
# (a progress bar, and curves that went through hundreds of float32 steps: they differ in the last digits)
copiers, curves = {}, {}
with tqdm(total=3 * COPY_STEPS, unit="step", mininterval=5) as progress:
    for seed in (0, 1, 2):
        copiers[seed], curves[seed] = train_copy_task(seed, progress=progress)
titled(
    copy_curves_chart(curves),
    "Learning to copy",
    "Perplexity on fresh training batches, on a logarithmic axis, averaged over 10 steps. It falls to 1.10 "
    "and stays there: that is where label smoothing holds it.",
)

# %% [markdown]
# Now the exam: 1,000 held-out sequences for each model, decoded greedily. A sequence counts only if every symbol is right *and* the end stands in its place.

# %%
exam = list(copy_batches(4, size=250, seed=1000, held_out=True))
for seed, copier in copiers.items():
    share = exact_share(copier, exam)
    assert share >= 0.999, f"seed {seed}: {share:.1%} exact"
    report = run_epoch(exam, copier, LabelSmoothing(0.1))
    assert 1.0 < report.perplexity < 1.3
print("Three seeds: each copies at least 99.9% of 1,000 unseen sequences exactly.")

# %% [markdown]
# The perplexity doesn't reach 1, and shouldn't: smoothing asks for 0.9 + 0.1/14 = 0.907 on the right token, which is a perplexity of 1/0.907 = 1.10. A model can be right about everything and still hold back.
#
# **Pitfall: the wrong start.** A model that was trained to begin with `<s>` must be decoded from `<s>`. Start it from another id, 0 say, which was the padding, and it gets an input that it never saw at that place. It may stumble, and the fault looks like a badly trained model.
#
# **Predict.** How many sequences survive a start from padding?

# %%
shares = [exact_share(copier, exam, start_symbol=PAD) for copier in copiers.values()]
assert max(shares) < 0.9  # with <s> it was at least 0.999
print("Started from padding, each model copies less than 90%.")

# %% [markdown]
# ## My model doesn't learn
#
# > **In short.** Don't stare at the loss of a long run. Ask four quick questions whose answers you know beforehand.
#
# | question | the right answer | what a wrong one points to |
# |---|---|---|
# | What is the first loss? | about $\ln V$ | initialisation, a scale, the loss itself |
# | Can it learn one batch by heart? | yes, within a hundred steps | the optimizer's step, the rate |
# | Does every layer get a gradient? | yes, of similar size | something detached or frozen |
# | Does it learn from *noise*? | no | a leak: it sees what it must predict |
#
# We answer each on a healthy model and on one that we broke.
#
# ### What is the first loss?
#
# A fresh model should bet about evenly, so its loss is near $\ln V$: 6.9 nats for V = 1,000. A model that starts far above is sure of random things, and must first unlearn them. The usual cause is a scale: here a generator whose weights are drawn from N(0, 1), as `nn.Embedding` does by default, which matters when it shares them.


# %%
def first_loss(model: EncoderDecoder, batch: Batch) -> float:
    """The plain loss in nats a token before any training."""
    return run_epoch([batch], model, LabelSmoothing(0.0)).loss_per_token


# %%
sample = next(copy_batches(1, size=32, seed=7))
healthy = tiny_model(0, vocab=1000, N=2, d_model=64)
loud = tiny_model(0, vocab=1000, N=2, d_model=64)
torch.manual_seed(8)
nn.init.normal_(loud.generator.proj.weight)  # the fault
first_losses = {
    "even bet, ln V": math.log(1000),
    "healthy": first_loss(healthy, sample),
    "loud generator": first_loss(loud, sample),
}
assert abs(first_losses["healthy"] - math.log(1000)) < 0.5
assert first_losses["loud generator"] > 2 * math.log(1000)
titled(
    bars(
        pd.DataFrame(first_losses.items(), columns=["model", "loss"]),
        "model",
        "loss",
        value_title="first loss (nats)",
        number_format=".1f",
    ),
    "The first loss tells whether the scales are right",
    "V = 1,000. The healthy model bets about evenly. The loud one is confidently wrong.",
)

# %% [markdown]
# ### Can it learn one batch by heart?
#
# Feed the same small batch again and again. Any model with enough weights must bring the loss close to 0. We switch smoothing off, since it would hold the loss above 0.
#
# The broken one here forgets `zero_grad`. PyTorch *adds* each gradient to the old ones, so every step follows the sum of all that came before: a ball that rolls without friction.


# %%
def loss_curve(
    model: EncoderDecoder, batches: Iterable[Batch], lr: float = 5e-3, clear: bool = True
) -> list[float]:
    """The plain loss at each step of Adam over `batches`; with `clear=False`, `zero_grad` does nothing."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-9)
    if not clear:
        optimizer.zero_grad = lambda set_to_none=True: None  # the fault
    criterion = LabelSmoothing(0.0)
    return [train_step(model, [b], criterion, optimizer).loss_per_token for b in batches]


# %%
def curves_chart(curves: dict[str, list[float]], marks: dict[str, float]) -> alt.LayerChart:
    """Loss curves over the steps, with dashed horizontal lines at the named heights."""
    rows = [(i + 1, loss, name) for name, curve in curves.items() for i, loss in enumerate(curve)]
    drawn = lines(
        pd.DataFrame(rows, columns=["step", "loss", "model"]).round(2),
        "step",
        "loss",
        "model",
        y_title="loss (nats a token)",
        zero=True,
    )
    frame = pd.DataFrame(marks.items(), columns=["mark", "height"]).round(4)
    base = alt.Chart(frame).encode(y="height:Q")
    rules = base.mark_rule(strokeDash=[4, 4], color=GREY)
    names = base.mark_text(align="right", dy=11, color=GREY).encode(text="mark:N", x=alt.value(475))
    return drawn + rules + names


# %%
one_batch = next(copy_batches(1, size=4, seed=9))
by_heart = {
    "healthy": loss_curve(tiny_model(0, d_model=32), [one_batch] * 80),
    "no zero_grad": loss_curve(tiny_model(0, d_model=32), [one_batch] * 80, clear=False),
}
assert by_heart["healthy"][-1] < 0.05
assert by_heart["no zero_grad"][-1] > 1.0
titled(
    curves_chart(by_heart, {"ln V": math.log(COPY_VOCAB)}),
    "One batch, again and again",
    "The healthy model learns the four sequences by heart. Without zero_grad the loss rises and swings, however "
    "long one waits.",
)

# %% [markdown]
# ### Does every layer get a gradient?
#
# One backward pass, and then the norm of the gradient of each part. The healthy model's bars are of similar height. The broken one detaches the encoder's output, as happens when somebody computes the memory under `no_grad`, or takes it through NumPy.


# %%
def gradient_norms(model: EncoderDecoder, batch: Batch) -> dict[str, float]:
    """The norm of the loss's gradient in each part of the model; 0 where none arrives."""
    model.zero_grad()
    loss, _ = batch_loss(model, batch, LabelSmoothing(0.0))
    (loss / batch.ntokens).backward()
    parts = {"source embedding": model.src_embed}
    parts |= {f"encoder layer {i}": layer for i, layer in enumerate(model.encoder.layers, 1)}
    parts |= {"target embedding": model.tgt_embed}
    parts |= {f"decoder layer {i}": layer for i, layer in enumerate(model.decoder.layers, 1)}
    parts |= {"generator": model.generator}
    return {
        name: math.sqrt(
            sum(p.grad.square().sum().item() for p in part.parameters() if p.grad is not None)
        )
        for name, part in parts.items()
    }


# %%
def cut_off(module: nn.Module) -> None:
    """Breaks a model on purpose: no gradient passes back through `module`'s output any more."""
    module.register_forward_hook(lambda _module, _inputs, output: output.detach())


# %% [markdown]
# **Predict.** With the memory detached, which bars are 0? And could you tell from the loss on one batch?

# %%
norms = {}
for name, part in {
    "healthy": None,
    "memory detached": "encoder",
    "decoder layer 1 detached": "decoder.layers.0",
}.items():
    model = tiny_model(0, N=3, d_model=32)
    if part:
        cut_off(model.get_submodule(part))
    norms[name] = gradient_norms(model, one_batch)
silent = {
    name: [part for part, norm in found.items() if norm == 0] for name, found in norms.items()
}
encoder_side = ["source embedding", "encoder layer 1", "encoder layer 2", "encoder layer 3"]
assert silent["healthy"] == []
assert silent["memory detached"] == encoder_side
assert silent["decoder layer 1 detached"] == ["target embedding", "decoder layer 1"]


# %%
def gradient_chart(norms: dict[str, dict[str, float]]) -> alt.FacetChart:
    """Gradient norm of each part, one panel a model; a part that gets nothing is marked."""
    rows = [(name, part, norm) for name, found in norms.items() for part, norm in found.items()]
    frame = pd.DataFrame(rows, columns=["model", "part", "norm"]).round(3)
    frame["note"] = ["no gradient" if norm == 0 else "" for norm in frame["norm"]]
    base = alt.Chart(frame).encode(
        x=alt.X("norm:Q", title="gradient norm"),
        y=alt.Y("part:N", sort=None, title=None, axis=alt.Axis(ticks=False)),
    )
    notes = base.mark_text(align="left", dx=4, color=PALETTE[1]).encode(text="note:N")
    drawn = (base.mark_bar(color=PALETTE[0]) + notes).properties(width=150, height=190)
    return drawn.facet(facet=alt.Facet("model:N", sort=list(norms), title=None), columns=3)


# %%
titled(
    gradient_chart(norms),
    "Who gets a gradient",
    "Three layers a side. Detach the memory, and the whole encoder learns nothing. Detach a decoder layer, and what lies "
    "below it on the target side is silent.",
)

# %% [markdown]
# The model with the frozen encoder still learns one batch by heart: its decoder is large enough. So the question before would not have found it.

# %%
blind = tiny_model(0, d_model=32)
cut_off(blind.encoder)
assert loss_curve(blind, [one_batch] * 80)[-1] < 0.1

# %% [markdown]
# ### Does it learn from noise?
#
# A loss that is too good is the worst fault, as nobody complains. So ask for the impossible. Let source and target be random and unrelated, and fresh at every step. An honest model can learn how long the sequences are and which symbols there are, but not which one comes next. With six symbols drawn evenly from ten and then `</s>`, nobody gets below
#
# $$ \frac{6 \ln 10 + 0}{7} = 1.97 \text{ nats a token.} $$
#
# Two broken ones: a decoder whose mask hides padding but not the future, and labels that were not shifted, so that the right answer is the very token just read.


# %%
def noise_batches(count: int, size: int, seed: int, length: int = 6) -> Iterator[Batch]:
    """Batches (B = `size`) whose target has nothing to do with the source: nothing to be learned."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        src, tgt = torch.randint(EOS + 1, COPY_VOCAB, (2, size, length), generator=generator)
        yield Batch(src, F.pad(F.pad(tgt, (1, 0), value=BOS), (0, 1), value=EOS))


# %%
def unmasked(batch: Batch) -> Batch:
    """Breaks a batch on purpose: the future is visible."""
    batch.tgt_mask = padding_mask(batch.tgt)  # (B, 1, T)
    return batch


# %%
def unshifted(batch: Batch) -> Batch:
    """Breaks a batch on purpose: the label is the token that was just read."""
    batch.tgt_y = batch.tgt
    return batch


# %%
honest_floor = 6 * math.log(10) / 7
on_noise = {
    "healthy": loss_curve(tiny_model(0, d_model=32), noise_batches(150, 16, seed=10)),
    "no causal mask": loss_curve(
        tiny_model(0, d_model=32), map(unmasked, noise_batches(150, 16, seed=10))
    ),
    "labels not shifted": loss_curve(
        tiny_model(0, d_model=32), map(unshifted, noise_batches(150, 16, seed=10))
    ),
}
settled = {name: sum(curve[-20:]) / 20 for name, curve in on_noise.items()}
assert abs(settled["healthy"] - honest_floor) < 0.15
assert settled["no causal mask"] < honest_floor - 0.3
assert settled["labels not shifted"] < 0.1
titled(
    curves_chart(on_noise, {"the best an honest model can do": honest_floor}),
    "Learning from noise means cheating",
    "Random targets, fresh at every step. The healthy model stays at the dashed line. The two broken ones fall "
    "below it: they read the answer.",
)

# %% [markdown]
# Both broken models would show a wonderful training loss on real data, and would say nonsense when they decode, since then there is no future to read from.
#
# The faults of this section, and the question that found each:
#
# | fault | found by | what it shows |
# |---|---|---|
# | loud generator | the first loss | far above $\ln V$ |
# | no `zero_grad` | one batch | the loss swings, and never gets to 0 |
# | memory detached | gradients by layer | the encoder gets none; one batch is learned all the same |
# | no causal mask | noise | a loss that no honest model can have |
# | labels not shifted | noise | the same, and very soon |
#
# ## Summary
#
# - Teacher forcing: the decoder reads the target without its last token and predicts the target without its first. A causal mask makes one pass equal to T passes.
# - The loss is the surprise at the label; perplexity is its exponential, per real token. Label smoothing mixes in the mean surprise over the vocabulary, and puts a floor under the loss. Descend the smoothed one, report the plain one.
# - The learning rate warms up and then falls; steps count from 1. The schedule advances once per optimizer step.
# - Clip by norm, so that the direction stays.
# - Accumulate sums and divide by the tokens of the whole group; the gradient is then that of one large batch, also for the last, shorter group.
# - Validation: no gradients, no dropout, sums first and one division at the end.
# - A small Transformer learns to copy unseen sequences within seconds. Try a new model on such a task first.
# - When it doesn't learn: first loss, one batch, gradients by layer, noise.
#
# ## What the paper did that we don't
#
# - The paper trains with batches of about 25,000 source and 25,000 target tokens on 8 GPUs, for 100,000 steps (base) or 300,000 (big). The copy task takes 250 steps of some 550 tokens.
# - It uses the warm-up and 1/√n schedule throughout. Our copy task warms up and then follows the cosine, which suits a run whose end is known.
# - It normalises after each sublayer; the copy task uses pre-norm, which starts more easily (chapter 4).
# - It doesn't mention gradient clipping. We clip at norm 1.
#
# ## Exercises
#
# Six, from a warm-up to a project. [Chapter 1](ch01_attention.ipynb) says how the checkers work: they are silent when your function is right, and otherwise say what is wrong.
#
# ### Exercise 1 *warm-up* · Up and down in straight lines
#
# A third schedule is common: linear warm-up, then a straight line down. Write `linear_rate(step, peak, warmup, total)`. Like `cosine_rate` it has its peak at step `warmup`, still moves at the last step, `total`, and is 0 from the step after that. Steps count from 1; step 0 is a `ValueError`.


# %%
def check_linear_rate(candidate: Callable[[int, float, int, int], float]) -> None:
    """Holds the rates of every step against the two straight lines; then the steps outside."""
    for warmup, total in ((4, 10), (1, 5), (5, 5)):
        steps, peak = range(1, total + 2), 0.25
        up = [n / warmup for n in steps]
        down = [(total + 1 - n) / (total + 1 - warmup) for n in steps]
        right = [min(a, b) for a, b in zip(up, down, strict=True)]  # the lower line holds
        early = [(total - n) / max(1, total - warmup) for n in steps]
        mistakes = {
            "the first step has rate 0, and all are one late: steps count from 1": [
                0.0,
                *right[:-1],
            ],
            "the last step has rate 0 and is wasted: reach 0 one step later": [
                max(0.0, min(a, b)) for a, b in zip(up, early, strict=True)
            ],
            "the rate jumps after the warm-up: both lines must meet at the peak": [
                a if n <= warmup else 1 - n / (total + 1) for n, a in zip(steps, up, strict=True)
            ],
            "that falls like a cosine": [cosine_rate(n, 1, warmup, total) for n in steps],
            "that is the paper's 1/√n: it never comes down to 0": [
                inverse_sqrt_rate(n, 1, warmup) for n in steps
            ],
            "the warm-up is missing": [min(1.0, b) for b in down],
        }
        got = torch.tensor([float(candidate(n, peak, warmup, total)) for n in steps]).double()
        mistakes = {said: peak * torch.tensor(rates).double() for said, rates in mistakes.items()}
        if not same_numbers(got, peak * torch.tensor(right).double()):
            blame(got, mistakes, "other rates than those of the two straight lines")
        assert candidate(total + 3, peak, warmup, total) == 0, (
            "after the last step the rate isn't 0: below it, the weights would climb"
        )
    try:
        candidate(0, 0.25, 4, 10)
    except ValueError:
        return
    raise AssertionError("step 0 is accepted: whoever forgets the + 1 won't notice")


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_linear_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Up to `peak` at step `warmup`, then down to 0 just after step `total`, in straight lines."""
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    left = max(0, total + 1 - step)  # steps still to be taken, this one included
    return peak * min(step / warmup, left / (total + 1 - warmup))


check_linear_rate(solution_linear_rate)

# %% [markdown]
# The pitfall "one step late" again, and the other end of the same fence:

# %%
print(
    rejection(
        check_linear_rate, lambda n, *rest: solution_linear_rate(n - 1, *rest) if n > 1 else 0
    )
)
print(
    rejection(
        check_linear_rate,
        lambda n, peak, warmup, total: (
            peak * min(n / warmup, max(0, total - n) / max(1, total - warmup))
        ),
    )
)

# %% [markdown]
# ### Exercise 2 *code* · Smooth towards what is frequent
#
# Uniform smoothing gives the rarest word as much as the commonest. Write `smoothing_towards(logits, labels, prior, smoothing)`, the cross-entropy against $q = (1-\varepsilon)\,\mathrm{onehot}(y) + \varepsilon\,\pi$, summed over the real tokens, for logits (…, V), labels (…) and a distribution $\pi$ (V,), such as the words' frequencies. With $\pi_k = 1/V$ it must be `LabelSmoothing`. A word that never occurs has $\pi_k = 0$; if its logit is −∞, it must cost nothing.


# %%
def loss_against(logits: Tensor, q: Tensor, real: Tensor) -> Tensor:
    """PyTorch's cross-entropy against distributions q (..., V), summed where `real` (...) is True."""
    return F.cross_entropy(logits[real], q[real], reduction="sum")


def smoothing_mistakes(
    logits: Tensor, labels: Tensor, prior: Tensor, smoothing: float
) -> dict[str, Tensor]:
    """What wrong smoothings make of the same input, by the message that explains each."""
    real = labels != PAD
    onehot = F.one_hot(labels, len(prior)).double()  # (B, T, V)
    q = (1 - smoothing) * onehot + smoothing * prior
    right = loss_against(logits, q, real)
    others = prior * (1 - onehot)
    others = (1 - smoothing) * onehot + smoothing * others / others.sum(-1, keepdim=True)
    return {
        "all words get the same: ε goes to the prior, not to 1/V": LabelSmoothing(smoothing)(
            logits, labels
        )[0],
        "the label is left out when ε is shared; it has its part in the prior too": loss_against(
            logits, others, real
        ),
        "that is a divergence: the entropy of q was taken off": right
        + torch.special.xlogy(q[real], q[real]).sum(),
        "padding is counted": loss_against(logits, q, real | True),
        "that is a mean: give the sum, and let the step divide by its tokens": right / real.sum(),
        "ε and 1 − ε are swapped": loss_against(
            logits, smoothing * onehot + (1 - smoothing) * prior, real
        ),
        "nothing is smoothed": loss_against(logits, onehot, real),
    }


def check_smoothing_towards(candidate: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> None:
    """Compares with PyTorch's loss; then forbids a word that the prior doesn't know either."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 7, dtype=torch.float64, generator=generator)  # (B, T, V)
    labels = torch.tensor([[4, 6, 5, 3], [6, 3, PAD, PAD]])  # (B, T)
    prior = torch.tensor([0, 0, 0, 2, 1, 1, 4]).double() / 8  # (V,)
    q = 0.7 * F.one_hot(labels, 7) + 0.3 * prior  # (B, T, V)
    got, right = candidate(logits, labels, prior, 0.3), loss_against(logits, q, labels != PAD)
    if not same_numbers(got, right):
        blame(got, smoothing_mistakes(logits, labels, prior, 0.3), "another loss than against q")
    forbidden = logits.clone()
    forbidden[..., UNK] = -math.inf
    forbidden.requires_grad_()
    got = candidate(forbidden, labels, prior, 0.3)
    assert not got.isnan(), "NaN: 0 · ∞ for a word that is neither allowed nor expected"
    known = [i for i in range(7) if i != UNK]
    right = loss_against(logits[..., known], q[..., known], labels != PAD)
    assert same_numbers(got, right), "a word that is neither allowed nor expected must cost nothing"
    (gradient,) = torch.autograd.grad(got, forbidden)
    assert gradient.isfinite().all(), (
        "the loss is right, its gradient is NaN: start from logits, not from a probability of 0"
    )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_smoothing_towards(
    logits: Tensor, labels: Tensor, prior: Tensor, smoothing: float
) -> Tensor:
    """Cross-entropy in nats against (1 − ε) on the label and ε spread like prior (V,); a sum."""
    log_p = logits.log_softmax(dim=-1)  # (..., V)
    at_label = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)  # (...)
    spread = -log_p.masked_fill(prior == 0, 0.0) @ prior  # (...), without any 0 · ∞
    loss = (1 - smoothing) * at_label + smoothing * spread
    return loss[labels != PAD].sum()


check_smoothing_towards(solution_smoothing_towards)
flat = torch.full((10,), 0.1)
torch.manual_seed(0)
logits, labels = torch.randn(3, 5, 10), torch.randint(10, (3, 5))
torch.testing.assert_close(
    solution_smoothing_towards(logits, labels, flat, 0.1), LabelSmoothing(0.1)(logits, labels)[0]
)

# %% [markdown]
# Pitfalls of this chapter: ε shared among the others only, and 0 · ln 0. `xlogy`, which mends a picture, is no mend for a loss: its value is right, and its slope at 0 is 0/0.


# %%
def smoothing_among_others(
    logits: Tensor, labels: Tensor, prior: Tensor, smoothing: float
) -> Tensor:
    """The wrong share: the label gets exactly 1 − ε, the other words divide ε by the prior."""
    onehot = F.one_hot(labels, len(prior))
    others = prior * (1 - onehot)
    q = (1 - smoothing) * onehot + smoothing * others / others.sum(-1, keepdim=True)  # (..., V)
    return -(q * logits.log_softmax(-1)).sum(-1)[labels != PAD].sum()


# %%
def smoothing_by(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Smoothing towards a prior, with product(q, logits) for the terms q · ln p (..., V)."""

    def loss(logits: Tensor, labels: Tensor, prior: Tensor, smoothing: float) -> Tensor:
        q = (1 - smoothing) * F.one_hot(labels, len(prior)) + smoothing * prior  # (..., V)
        return -product(q, logits)[labels != PAD].sum()

    return loss


# %%
print(rejection(check_smoothing_towards, smoothing_among_others))
for product in (
    lambda q, logits: q * logits.log_softmax(-1),
    lambda q, logits: torch.special.xlogy(q, logits.softmax(-1)),
):
    print(rejection(check_smoothing_towards, smoothing_by(product)))

# %% [markdown]
# ### Exercise 3 *code* · A group that comes in a stream
#
# `train_step` knows the tokens of its whole group before the first backward pass. Suppose it can't: the micro-batches come from an iterator, one after the other, and only one may be in memory. Write `streamed_gradient(model, batches, criterion)`. It leaves the gradient of the mean smoothed loss per token of *all* batches in `p.grad` of each parameter, whatever was there before, and takes no step.


# %%
def gradient_mistakes(
    model: EncoderDecoder, group: list[Batch], criterion: LabelSmoothing
) -> dict[str, Tensor]:
    """Gradients that are not the one of the mean loss per token, by the message for each."""
    right = step_gradient(model, [joined(group)], criterion)
    tokens = sum(batch.ntokens for batch in group)
    positions = sum(batch.tgt_y.numel() for batch in group)
    by_means = mean_of_means_gradient(model, group, criterion)
    return {
        "a mean of means: a token of a small batch weighs more than one of a large batch": by_means,
        "a sum of means: it grows with the number of batches": by_means * len(group),
        "a sum over tokens: it must be divided by their number in the end": right * tokens,
        "divided by the batches, not by the tokens": right * tokens / len(group),
        "padding is counted among the tokens": right * tokens / positions,
        "what stood in p.grad before is still in it": right + 1,
        "only the last batch is left: each one's gradient is added to those before": step_gradient(
            model, group[-1:], criterion
        ),
    }


def check_streamed_gradient(
    candidate: Callable[[EncoderDecoder, Iterator[Batch], LabelSmoothing], None],
) -> None:
    """Compares with the gradient of one large batch; counts backward passes; looks at the weights."""
    sizes = ((8, 10), (4, 5), (1, 1))  # sequences, and the length of the shortest
    group = [next(copy_batches(1, n, seed=1, lengths=(short, 10))) for n, short in sizes]
    model, criterion = tiny_model(0).double(), LabelSmoothing(0.1)
    right = step_gradient(model, [joined(group)], criterion)
    mistakes = gradient_mistakes(model, group, criterion)
    before = parameters_to_vector(model.parameters()).detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    passes: list[Tensor] = []
    hook = model.generator.proj.bias.register_hook(passes.append)
    candidate(model, iter(group), criterion)
    hook.remove()
    assert torch.equal(parameters_to_vector(model.parameters()), before), "a step was taken"
    assert all(p.grad is not None for p in model.parameters()), "p.grad is empty"
    got = parameters_to_vector(p.grad for p in model.parameters())
    if not same_numbers(got, right):
        blame(got, mistakes, "another gradient than that of one large batch")
    assert len(passes) == len(group), (
        "one backward pass for all: until then the graphs of all batches were in memory"
    )


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_streamed_gradient(
    model: EncoderDecoder, batches: Iterator[Batch], criterion: LabelSmoothing
) -> None:
    """Adds up gradients of sums, and divides them once the tokens are known."""
    model.zero_grad()
    tokens = 0
    for batch in batches:
        loss, _ = batch_loss(model, batch, criterion)
        loss.backward()
        tokens += batch.ntokens
    for p in model.parameters():
        p.grad /= tokens


check_streamed_gradient(solution_streamed_gradient)

# %% [markdown]
# A gradient is linear in the loss, so it can be divided afterwards as well as before. (In half precision before is safer: a large sum may overflow.) The usual recipe, and one that holds all graphs until the end:


# %%
def gradient_all_at_once(
    model: EncoderDecoder, batches: Iterator[Batch], criterion: LabelSmoothing
) -> None:
    """The right gradient at the wrong price: one backward pass through all batches."""
    model.zero_grad()
    group = list(batches)
    loss = sum(batch_loss(model, batch, criterion)[0] for batch in group)
    (loss / sum(batch.ntokens for batch in group)).backward()


# %%
print(
    rejection(
        check_streamed_gradient,
        lambda model, batches, criterion: mean_of_means_gradient(model, list(batches), criterion),
    )
)
print(rejection(check_streamed_gradient, gradient_all_at_once))

# %% [markdown]
# ### Exercise 4 *think* · On paper
#
# 1. Which `factor` gives the paper's schedule, `rate(step, 64, factor, warmup=50)`, the peak of the copy task, 3e-3?
# 2. Predict the perplexity that the copy task can reach with $\varepsilon = 0$ and with $\varepsilon = 0.3$. Does the share of exact copies change?
# 3. Write `train_step` for several GPUs: what must be summed over them before the division, and when?
#
# <details><summary>An answer</summary>
#
# 1. The peak is $\text{factor}\cdot(D\,w)^{-0.5}$, so the factor is $0.003\cdot\sqrt{64 \cdot 50} \approx 0.17$.
# 2. The best bet on the label is $1 - \varepsilon + \varepsilon/14$: 1 and 0.721, perplexities of 1 and 1.39. Exact copies need only the *largest* bet to be right, and it is far ahead either way.
# 3. The tokens of the group, over all GPUs, before the first backward pass: they are the divisor. The gradients, once, after the last backward pass. Then each GPU clips and steps alike. Most libraries take the *mean* of the gradients over GPUs; then multiply by their number, or divide by the mean number of tokens.
#
# </details>

# %% [markdown]
# ### Exercise 5 *code* · A task that turns round
#
# Turn the copy task into *reversing*. Write `reversed_target(src)` for ids (B, S) whose rows are symbols, `</s>`, padding. It returns the full target (B, S + 1): `<s>`, the symbols backwards, `</s>`, padding. Rows have different lengths. A loop is allowed; can you do without?


# %%
def check_reversed_target(candidate: Callable[[Tensor], Tensor]) -> None:
    """Holds candidate(src) against lists that are turned round one by one."""
    rows = [[5, 6, 7], [8, 9], [4, 5, 6, 13, 8], [12]]

    def tensor(rows: list[list[int]]) -> Tensor:
        return torch.tensor([row + [PAD] * (7 - len(row)) for row in rows])

    src = tensor([[*row, EOS] for row in rows])[:, :6]  # (B, S)
    right = tensor([[BOS, *row[::-1], EOS] for row in rows])  # (B, S+1)
    mistakes = {
        "nothing is reversed: that is the copy task": F.pad(src, (1, 0), value=BOS),
        "padding was turned round too: it must stay behind the end": F.pad(
            src.flip(1), (1, 0), value=BOS
        ),
        "the end symbol was turned round too: the model would learn to stop at once": tensor(
            [[BOS, EOS, *row[::-1]] for row in rows]
        ),
        "the start symbol is missing: the decoder has nothing to read at first": right[:, 1:],
        "the end symbol is missing: decoding would never stop": tensor(
            [[BOS, *row[::-1]] for row in rows]
        ),
    }
    got = candidate(src.clone())
    if not same_numbers(got, right):
        blame(got, mistakes, "another target than <s>, the symbols backwards, </s>, padding")
    assert got.dtype == src.dtype, "ids must stay integers"


# %% [markdown]
# *A solution follows; try first.*


# %% tags=["solution", "hide-input"]
# A solution
def solution_reversed_target(src: Tensor) -> Tensor:
    """(B, S) symbols, </s>, padding to (B, S+1) <s>, symbols backwards, </s>, padding."""
    count = (src > EOS).sum(dim=1, keepdim=True)  # (B, 1), the symbols of each row
    place = torch.arange(src.size(1)).expand_as(src)  # (B, S)
    mirrored = src.gather(1, (count - 1 - place).clamp(min=0))  # (B, S), right where a symbol is
    return F.pad(torch.where(place < count, mirrored, src), (1, 0), value=BOS)


check_reversed_target(solution_reversed_target)

# %%
print(rejection(check_reversed_target, lambda src: F.pad(src.flip(1), (1, 0), value=BOS)))
print(rejection(check_reversed_target, lambda src: F.pad(src, (1, 0), value=BOS)))

# %% [markdown]
# ### Exercise 6 *project* · Learn to reverse, and find the limits
#
# 1. Write a variant of `copy_batches` with `reversed_target`, train the copy task's model on it, and examine it with `exact_share`. How many steps does it take? Which of encoder, decoder and cross-attention has more to do than in copying?
# 2. Train on lengths 5 to 10 and examine on lengths 11 to 14. What happens, and which part of the model is to blame?
# 3. Break a model in a way of your own (freeze a layer, swap source and target, drop the positions), give it to a friend, and find out which of the four questions of "My model doesn't learn" notices.
#
# <details><summary>What to expect</summary>
#
# 1. Begin with the 250 steps of the copy task; the two tasks ask for much the same. Only cross-attention has something else to do: at step t it must look at the place that is t from the *end*, and the end is elsewhere in each row, so the encoder must have said in its vectors how far it is.
# 2. Most sequences come out wrong, reversed or copied. The sinusoids of positions 11 and beyond are defined, but no matrix has learned to read them: positions are to blame.
#
# </details>
#
# Next: [Chapter 7 · Multi30k](ch07_multi30k.ipynb)
