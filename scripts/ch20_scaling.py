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
# # Chapter 20 · Scaling
#
# After this chapter you can let a law say, for a budget of operations, how large a model to train and for how long, and test how far to trust it.
#
# | | |
# |---|---|
# | In the paper | Table 3, rows (C), of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 40 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 19 · Ablations](ch19_ablations.ipynb) · [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb) |
#
# *If you read only three cells:* the first chart, `fit_law`, the chart of *Which parameters count?*

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import torch
from scipy import interpolate, optimize

from scripts.book.charts import long
from scripts.book.exercises import check
from scripts.book.figures import understanding
from scripts.book.records import load_record
from scripts.ch06_training import cosine_rate
from scripts.ch19_ablations import STUDY
from scripts.core.settings import build_model

Law = Callable[..., np.ndarray]  # theta, N, D to losses

# %% [markdown]
# ## One budget, many models
#
# > **In short.** With a fixed budget, a larger model reads less text. A size in between is best.
#
# Let N be the number of parameters, and D the number of target tokens that a model reads. Its training takes about $C = 6ND$ operations ([chapter 11](ch11_where_the_time_goes.ipynb)). So a budget C pays for a small model that reads much, or for a large one that reads little.
#
# Chapter 19's translator, without dropout, read Multi30k's pairs eight times, in six widths with three seeds. We have the validation loss after each *pass*, a *reading* ([`grid-multi30k.json`](../results/grid-multi30k.json), `python -m scripts.studies.grid --save`).


# %%
WIDTHS = (16, 24, 32, 48, 64, 96)  # d_model; d_ff is four times as large


@cache
def size_of(width: int) -> int:
    """All parameters of chapter 19's model in another width."""
    with torch.device("meta"):  # shapes without storage
        model = build_model(replace(STUDY, d_model=width, d_ff=4 * width), STUDY.vocab)
    return sum(p.numel() for p in model.parameters())


def runs_of(name: str) -> pd.DataFrame:
    """A record's runs with N; `exists` counts the target tokens of one of `parts` of the pairs."""
    # Seed 0 chose the peak rates of widths 16 and 96; those of the others lie between.
    runs = [run for run in load_record(name)["runs"] if run["seed"]]
    names = {"d_model": "width", "tokens": "exists", "share": "parts"}
    runs = pd.DataFrame(runs).rename(columns=names)
    return runs.assign(N=runs["width"].map(size_of))


def readings_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Loss, D and cost of each width after each pass over all pairs, means over the seeds."""
    each = runs[runs["parts"] == 1].explode("losses").astype({"losses": float})
    each["passes"] = each.groupby(["width", "seed"]).cumcount() + 1
    each["D"] = each["exists"] * each["passes"]
    each["operations"] = 6 * each["N"] * each["D"]
    keys = ["width", "N", "passes", "D", "operations"]
    return each.groupby(keys)["losses"].mean().rename("loss").reset_index()


# %% [markdown]
# **Predict.** One pass of width 96, two of 64, three of 48 and six of 32 cost about the same. Which gives the lowest loss?

# %%
runs = runs_of("grid-multi30k")
readings = readings_of(runs)
readings.pivot(index=["width", "N"], columns="passes", values="loss").round(2)

# %% [markdown]
# Width 32 does (2.46), but width 48 is close and costs 8% less. For equal costs, we draw curves through each width's readings.


# %%
def at_budget(readings: pd.DataFrame, budget: float) -> pd.Series:
    """The loss of each width that can spend the budget in one to eight passes."""
    losses = {}
    for width, own in readings.groupby("width"):
        if own["operations"].min() <= budget <= own["operations"].max():
            curve = interpolate.PchipInterpolator(np.log(own["operations"]), own["loss"])
            losses[width] = curve(math.log(budget)).item()
    return pd.Series(losses)


# %% [markdown]
# After one of eight passes, the learning rate is still near its peak; a training of one pass ends at zero. If a loss at the end is much lower, readings on the way say nothing. So two models of about equal cost were trained to their end: two passes of width 32, one of width 48 ([`budgets-multi30k.json`](../results/budgets-multi30k.json), `python -m scripts.studies.budgets --save`). They are the chart's crosses.

# %%
costs = readings.set_index(["width", "passes"])["operations"]
unit = costs[48, 1]  # of budget: one pass of width 48
curves = {budget: at_budget(readings, budget * unit) for budget in (1, 2, 4, 8)}
bought = long(curves, "budget", "width", "loss")
bought["N"] = bought["width"].map(size_of)
bought["passes"] = bought["budget"] * size_of(48) / bought["N"]
understanding.budget_chart(bought, runs_of("budgets-multi30k"))

# %% [markdown]
# With each budget a width in between is best. With eight units instead of one, the best model also reads more, 5.1 passes instead of 1.8. So a larger budget should go into size and text.
#
# ### How wrong is a reading on the way?
#
# The cross of width 32 lies below its curve (it cost 9% more), the cross of width 48 above. The table compares ends with readings after equal passes, at equal rates and seeds.

# %%
understanding.ends_table()

# %% [markdown]
# At the chart's rate, no end's mean lies more than 0.013 nats below its reading. So a schedule of its own gains next to nothing after one or two passes. Hoffmann et al. (2022) objected to readings on the way in Kaplan et al. (2020); Porian et al. (2024), too, find that the decay isn't essential.
#
# But another peak rate may lower a reading: at half of the chart's, width 96 is 0.12 nats lower after one pass (one seed). What is left of the chart's title?
#
# - *In between* holds on the wide side: each curve's widest model is at least 0.16 nats worse. The narrowest is often only 0.05 worse.
# - *It grows* holds: width 48 is 0.20 nats worse than width 32 with one unit, and 0.06 better with four.
# - *Which* width is best isn't certain: a neighbour is only some 0.05 nats worse.
#
# ## Two laws
#
# > **In short.** A law predicts the loss of any size after any number of tokens.
#
# Hoffmann et al. *add* three terms: a *floor* E, below which no model can go, a term that shrinks with the model, and one that shrinks with the text:
#
# $$ L(N, D) = E + \frac{A}{N^{\alpha}} + \frac{B}{D^{\beta}} $$
#
# Kaplan et al. had *joined* the two shrinking terms under one power. (They set $E = 0$; we leave it free.)
#
# $$ L(N, D) = E + \left[ \left( \frac{N_c}{N} \right)^{\alpha/\beta} + \frac{D_c}{D} \right]^{\beta} $$
#
# $A$, $B$, $N_c$ and $D_c$ are scales; the exponents say how fast a term shrinks.
#
# The laws disagree about short texts. In the additive law, a larger model gains as much on few tokens as on many. In the joint law it gains little on few: there $D_c/D$ rules the bracket. **Your turn.** Write both laws.


# %% tags=["yours"]
def additive(theta: np.ndarray, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """E + A/N^α + B/D^β for theta = (E, log A, α, log B, β) and N, D (n,): (n,)."""
    E, log_a, alpha, log_b, beta = theta
    return E + np.exp(log_a - alpha * np.log(N)) + np.exp(log_b - beta * np.log(D))


def joint(theta: np.ndarray, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """E + ((N_c/N)^(α/β) + D_c/D)^β for theta = (E, log N_c, α, log D_c, β) and N, D (n,): (n,)."""
    E, log_n, alpha, log_d, beta = theta
    return E + (np.exp((log_n - np.log(N)) * alpha / beta) + np.exp(log_d - np.log(D))) ** beta


# %%
np.testing.assert_allclose(additive((1, math.log(30), 0.5, math.log(80), 2), 9, 4), 1 + 10 + 5)
np.testing.assert_allclose(joint((1, math.log(64), 1, math.log(90), 0.5), 16, 10), 1 + 5)

# %% [markdown]
# To *fit* a law is to choose its five numbers so that it comes close to measured losses. Least squares on logarithms does it: one percent counts the same at every loss.


# %%
FIRST_GUESSES = {additive: (0.5, 4, 0.3, 4, 0.3), joint: (0.5, 13, 0.3, 15, 0.3)}
LIMITS = {  # of theta without its floor, which lies between 0 and the lowest loss
    additive: [(-5, 0.01, -5, 0.01), (25, 2, 25, 2)],
    joint: [(0, 0.01, 0, 0.01), (60, 3, 60, 3)],
}


def fit_law(law: Law, N: np.ndarray, D: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """The law's theta (5,) with the least squares of log L."""
    low, high = ((floor, *rest) for floor, rest in zip((0, losses.min()), LIMITS[law], strict=True))

    def errors(theta: np.ndarray) -> np.ndarray:
        return np.log(law(theta, N, D) / losses)

    # One start is enough: from a second one, all fits of the next table came out the same.
    return optimize.least_squares(errors, FIRST_GUESSES[law], bounds=(low, high), x_scale="jac").x


def missed(law: Law, theta: np.ndarray, N: np.ndarray, D: np.ndarray, losses: np.ndarray) -> float:
    """The typical error, in percent of the loss: the root of the mean squared error of log L."""
    return 100 * np.sqrt(np.square(np.log(losses / law(theta, N, D))).mean()).item()


# %% [markdown]
# A law is worth something if it predicts losses that it hasn't seen. So we hide, in turn:
#
# 1. the last passes, 6 to 8;
# 2. the widest models, 64 and 96;
# 3. the *costly* readings, above the cost of one pass of width 96 (the widest model still seen is 48, after two and three passes);
# 4. the costly readings but two of width 48, after four and five passes;
# 5. as a control, the costly readings but two of width 32, after seven and eight.
#
# (The first pass, a third of it warm-up, isn't used.)
#
# **Predict.** Both laws fit what they see within 1.4%. Which of the first three do they miss by more than 4%?


# %%
def columns(frame: pd.DataFrame, D: str = "D") -> tuple[np.ndarray, ...]:
    """Parameters, tokens and losses of a frame's rows, (n,) each."""
    return tuple(frame[name].to_numpy(float) for name in ("N", D, "loss"))


def fit_and_test(law: Law, frame: pd.DataFrame, hidden: pd.Series, D: str = "D") -> list[float]:
    """Fit the law without the hidden rows; what it misses of the seen and of the hidden."""
    theta = fit_law(law, *columns(frame[~hidden], D))
    return [missed(law, theta, *columns(frame[part], D)) for part in (~hidden, hidden)]


# %%
limit = costs[96, 1]
HIDE = {
    "passes 6 to 8": "passes > 5",
    "widths 64 and 96": "width > 48",
    "costly": "operations > @limit",
    "costly but two of 48": "operations > @limit and not (width == 48 and passes in [4, 5])",
    "costly but two of 32": "operations > @limit and not (width == 32 and passes in [7, 8])",
}
rows = []
for law in (additive, joint):
    for seed, own in runs.groupby("seed"):
        later = readings_of(own).query("passes > 1")
        for hidden, query in HIDE.items():
            rows.append([hidden, law.__name__, seed, *fit_and_test(law, later, later.eval(query))])
trials = pd.DataFrame(rows, columns=["hidden", "law", "seed", "seen, %", "hidden, %"])
assert trials["seen, %"].max() < 1.4
trials.pivot(index="hidden", columns=["law", "seed"], values="hidden, %").loc[[*HIDE]].round(1)

# %% [markdown]
# Both laws miss the last passes and the widest models by less than 3%. The additive law misses the costly readings by 5 to 7% with each seed, the joint law with one.
#
# If the additive law also sees two late readings of width 48, it misses the others by less than 3.5%. Two of width 32 don't help it. So it lacked costly readings of wide models.
#
# ### Decide
#
# For a budget, take the size with the lowest predicted loss. **Your turn.** Write `decide`.


# %% tags=["yours"]
def decide(law: Law, theta: np.ndarray, budget: float) -> tuple[float, float]:
    """The best N of many for 6·N·D = `budget` operations (Exercise 2 solves it), and its D."""
    N = np.geomspace(1e3, 1e14, 100_001)
    D = budget / (6 * N)
    best = law(theta, N, D).argmin()
    return N[best].item(), D[best].item()


# %%
equal = (0, 0, 0.5, 0, 0.5)  # 1/√N + 1/√D: best where N = D
np.testing.assert_allclose(decide(additive, equal, 6e12), (1e6, 1e6), rtol=1e-3)

# %% [markdown]
# **Predict.** Does the additive law, which predicted worse, also pick worse for eight units?


# %%
def fit_cheap(law: Law, runs: pd.DataFrame) -> np.ndarray:
    """The law fitted to the readings that aren't costly."""
    return fit_law(law, *columns(readings_of(runs).query("passes > 1 and operations <= @limit")))


# %%
rows = [
    [law.__name__, seed, decide(law, fit_cheap(law, own), 8 * unit)[0]]
    for law in (additive, joint)
    for seed, own in runs.groupby("seed")
]
picks = pd.DataFrame(rows, columns=["law", "seed", "best N"])
picks.pivot(index="law", columns="seed").round(-3).astype(int)

# %%
sizes = np.geomspace(size_of(44), size_of(104), 120)
text = 8 * unit / (6 * sizes)
predicted = {law.__name__: law(fit_cheap(law, runs), sizes, text) for law in (additive, joint)}
understanding.decision_chart(curves[8].rename(size_of), pd.DataFrame(predicted, sizes))

# %% [markdown]
# The additive law's picks are hardly worse. Five of six picks lie between widths 48 and 64, whose measured losses differ by only 0.05 nats. So a wrong law may decide well: near its lowest point, a curve of equal budget is flat.
#
# But the test is mild. With two units, width 32 was best. If size and text grow equally, eight units buy twice its size, 251,000: a good guess without a fit. **Your turn**: set a budget.

# %%
YOUR_BUDGET = 50  # in units; our largest training costs 25
for law in (additive, joint):
    theta = fit_law(law, *columns(readings.query("passes > 1")))
    size, text = decide(law, theta, YOUR_BUDGET * unit)
    print(f"{law.__name__} law: {size:,.0f} parameters, {text / readings['D'].min():.1f} passes")

# %% [markdown]
# Don't pay yet: these laws count the tenth pass like the first.
#
# ## Ours beside Kaplan's and Hoffmann's
#
# > **In short.** How fast the best size grows with the budget depends on which parameters one counts.
#
# In both laws the best size is a power of the budget (Exercise 2 shows it for the additive law):
#
# $$ N_{\text{best}} \propto C^{a}, \qquad a = \frac{\beta}{\alpha + \beta} $$
#
# Kaplan et al. read $a = 0.73$ from their best runs, not from their joint law: most of a larger budget should go into size. Hoffmann et al. found about 0.5, equal growth of size and text, and trained Chinchilla (70 billion parameters, 1.4 trillion tokens). What do published additive laws say for Chinchilla's budget?


# %%
def growth(theta: np.ndarray) -> float:
    """The power of the budget with which the best size grows."""
    _, _, alpha, _, beta = theta
    return beta / (alpha + beta)


# %%
PUBLISHED = {  # E, A, α, B, β; Hoffmann's, which the paper rounds, from its LaTeX source
    "Hoffmann et al. 2022": (1.6934, 406.4, 0.3392, 410.7, 0.2849),
    "Besiroglu et al. 2024": (1.8172, 482.01, 0.3478, 2085.43, 0.3658),
}
laws, rows = {}, {}
for name, (E, A, alpha, B, beta) in PUBLISHED.items():
    laws[name] = np.array([E, math.log(A), alpha, math.log(B), beta])
    size = decide(additive, laws[name], 6 * 70e9 * 1.4e12)[0]
    rows[name] = f"{growth(laws[name]):.2f}", f"{size / 1e9:.0f} billion"
pd.DataFrame(rows, ["a", "best N"]).T

# %% [markdown]
# Hoffmann et al.'s fit says 41 billion, far from Chinchilla's 70. Besiroglu et al. fitted the same runs, read from a figure, and come near.
#
# We fit our readings without passes 7 and 8, and without pass 2.

# %%
ours = {}
for law in (additive, joint):
    for first, last in ((2, 6), (2, 8), (3, 8)):
        theta = fit_law(law, *columns(readings[readings["passes"].between(first, last)]))
        ours[law.__name__, f"{first} to {last}"] = {"a": growth(theta), "E": theta[0]}
pd.DataFrame(ours).T.round({"a": 2, "E": 1}).rename_axis(["law", "passes fitted"])

# %% [markdown]
# Our runs don't say. A few readings move a from 0.42 to 0.76 in the additive law, from 0.61 to 0.68 in the joint law; the floor moves too. Either the additive law leaves a open, or the falling rate of the last passes bends the curve.
#
# ### Which parameters count?
#
# Kaplan et al. leave the embedding table out of N and C. Pearce and Song (2024) find that this explains much of the difference at small scale. Is it enough? We take the last published law, whose a is 0.51, and let C pay for the layers alone.
#
# A layer of width d has about $12d^2$ parameters, the table d for each of 50,257 tokens. We let the width be 100 times the number of layers, and search the best size for a hundred budgets. Its growth from one to the next is a *local* a.
#
# **Predict.** If the local a stays at 0.51, the count explains nothing. Is it higher or lower for small models?

# %%
in_layers = np.geomspace(1e2, 1e12, 100_001)
in_all = in_layers + 50_257 * (100 * in_layers / 12) ** (1 / 3)  # the table: tokens times width
budgets = np.geomspace(4e12, 1e22, 100)
theta = laws["Besiroglu et al. 2024"]
best = [in_layers[additive(theta, in_all, C / (6 * in_layers)).argmin()] for C in budgets]
local_a = np.gradient(np.log(best), np.log(budgets))
understanding.local_chart(pd.Series(local_a, best), kaplan=0.73, law=growth(theta))


# %% [markdown]
# In this replay the count may be enough: up to some 80 million parameters, the local a is above 0.73. (Another shape moves this point.)
#
# - Small models are nearly all table, which grows with the cube root of the layers. So their loss falls with the power α/3 of the layers, and a is $\beta/(\alpha/3 + \beta) = 0.76$.
# - Where the layers take over, the loss falls faster. So size pays more, and a rises to 0.98.
# - In large models the table hardly counts, and a falls towards 0.51.
#
# Porian et al. name other causes: warm-up and tuning.
#
# ## Two meanings of D
#
# > **In short.** D may be the text that exists, or the text that is read. Each law prefers its own.
#
# So far a token counted each time that it was read. Does the text that *exists* predict better?
#
# Each width also learned from a half of the pairs, a quarter, … a sixteenth, until validation no longer improved (at most `PASSES`). Its best pass counts.

# %%
PASSES = {1: 8, 2: 12, 4: 16, 8: 24, 16: 32}  # at most, on all pairs, a half, a quarter …
STEPS = {1: 318, 2: 165, 4: 88, 8: 48, 16: 26}  # a pass (a test counts them)
runs["passes"] = 1 + runs["losses"].map(np.argmin)  # to the best one
runs["of peak rate"] = [
    cosine_rate(passes * STEPS[parts], 1, STUDY.warmup, PASSES[parts] * STEPS[parts])
    for passes, parts in zip(runs["passes"], runs["parts"], strict=True)
]
keys = ["width", "N", "parts", "exists"]
grid = runs.groupby(keys)[["passes", "of peak rate", "loss"]].mean().reset_index()
grid.query("width in [16, 96] and parts in [1, 16]").round(2)

# %% [markdown]
# For the smallest model on a sixteenth, 16 times as many pairs gain 0.85 nats, 14 times as many parameters only 0.19. Part of this difference may come from the schedule. On a sixteenth, warm-up lasts 3.8 passes; width 96 is best at 97% of the peak rate, width 16 at 50%. On all pairs both end near zero.
#
# The text that *was read* depends on the width, too: on a sixteenth, 18 passes for width 16, and 7 for width 96. A control, *on average*, gives each run the mean passes of its part. (Both are known only after a run: they explain, they don't predict.) We hide the widest model and the runs on all pairs.
#
# **Predict.** Which law gains by the text that was read, and does it in the control?

# %%
runs["was read"] = runs["exists"] * runs["passes"]
of_part = runs.groupby("parts")["passes"].transform("mean")
runs["was read on average"] = runs["exists"] * of_part
rows = []
for D in ("exists", "was read", "was read on average"):
    for law in (additive, joint):
        for seed, own in runs.groupby("seed"):
            hidden = own.eval("width == 96 or parts == 1")
            rows.append([D, law.__name__, seed, fit_and_test(law, own, hidden, D)[1]])
meanings = pd.DataFrame(rows, columns=["D: text that", "law", "seed", "hidden, %"])
meanings.pivot(index=["D: text that", "law"], columns="seed").round(1)

# %% [markdown]
# Only the additive law gains by the text that was read, and the control takes the gain away, with each seed. So it came from the width.
#
# Each law does best by the D for which it was made: the joint law for short texts, read until the loss rises; the additive law for text read about once.

# %%
N, D, losses = columns(grid, "exists")
by_law = {law.__name__: law(fit_law(law, N, D, losses), N, D) for law in (additive, joint)}
understanding.grid_chart(grid.assign(D=D, **by_law), "joint", "additive")

# %% [markdown]
# On the left, where the text is short, size gains little. There the joint law's lines draw together, all but the smallest model's; the additive law's stay equally far apart.
#
# ## Summary
#
# - With a fixed budget, a size in between is best. It grows with the budget.
# - Choose a law by losses that it hasn't seen, of the kind that you want to predict.
# - Say which parameters you count: the exponent depends on it. Ask whether your D depends on the model.
# - Before you believe an exponent, fit again without some readings.
#
# ## What the paper did that we don't
#
# Its rows (C) compare sizes after equally many steps, not operations.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · How large for this loss
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Turn a law around: for $L = E + A/N^\alpha$, give the N that reaches `loss`; A is `scale`. (`solution("size_for_loss")` shows ours.)


# %%
def size_for_loss(floor: float, scale: float, alpha: float, loss: float) -> float:
    """The size at which the law E, A, α reaches `loss`; `math.inf` where none does."""
    ...


check(size_for_loss)

# %% [markdown]
# ### Exercise 2 · The best size for a budget
#
# *code · difficulty ●●○ · worth ●●● · 25 minutes*
#
# The best N for a budget of C operations has a closed form: put $D = C/(6N)$ into $E + A/N^\alpha + B/D^\beta$, and set the derivative to zero. (`solution("best_size")` shows ours.)


# %%
def best_size(C: float, A: float, alpha: float, B: float, beta: float) -> float:
    """The size N with the lowest loss for C = 6·N·D operations."""
    ...


check(best_size)

# %% [markdown]
# ### Exercise 3 · A budget trained to its end
#
# *project · difficulty ●●○ · worth ●●● · 40 minutes*
#
# Five passes of width 16 and three of width 24 cost about one unit. Put them into `ONE_UNIT` in `scripts/studies/budgets.py`: `{(16, 5): 0.0336, (24, 3): 0.0246}`. Guess their losses, and run `python -m scripts.studies.budgets`.
#
# Next: [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb)
