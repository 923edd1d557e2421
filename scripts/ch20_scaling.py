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
# After this chapter you can say, for a budget of operations, how large a model to train and for how long, and test the law that says so on runs that it hasn't seen.
#
# | | |
# |---|---|
# | In the paper | Table 3, rows (C), of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 40 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 19 · Ablations](ch19_ablations.ipynb) · [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb) |
#
# *If you read only three cells:* the first chart, `fit_law`, the table of *Which parameters count?*
#
# **N** counts parameters, **D** target tokens, **C** operations, and **n** places where a loss was measured.

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
from itertools import product

import numpy as np
import pandas as pd
import torch
from scipy import interpolate, optimize

from scripts.book.charts import lines, long, titled
from scripts.book.exercises import check
from scripts.book.figures.understanding import budget_chart, grid_chart
from scripts.book.records import load_record
from scripts.ch19_ablations import STUDY, layer_parameters
from scripts.core.settings import build_model

Law = Callable[..., np.ndarray]  # theta, N, D to losses

# %% [markdown]
# ## One budget, many models
#
# > **In short.** With a fixed budget, a larger model reads less text. A size in between is best.
#
# A training takes about $C = 6ND$ operations ([chapter 11](ch11_where_the_time_goes.ipynb)): for each parameter and each token read, two forward and four backward. So one budget pays for a small model and many passes, or for a large model and few.
#
# Chapter 19's model read all of Multi30k's pairs eight times in each of six widths ($d_{ff} = 4\,d_{model}$; depth, heads and vocabulary stay), with three seeds. The peak rate was tuned for eight passes of the narrowest and the widest, and interpolated between them. We read the validation loss after each pass. The record is [`grid-multi30k.json`](../results/grid-multi30k.json) (`python -m scripts.studies.grid --save`).

# %%
WIDTHS = (16, 24, 32, 48, 64, 96)  # d_model
PASSES = {1: 8, 2: 12, 4: 16, 8: 24, 16: 32}  # at most, on one of 1, 2, 4 … parts of the pairs


def sizes_of(width: int) -> dict[str, int]:
    """Parameters of a width: in the layers alone, as Kaplan et al. count, and all of them."""
    with torch.device("meta"):  # shapes without storage
        model = build_model(replace(STUDY, d_model=width, d_ff=4 * width), STUDY.vocab)
    return {"layers": layer_parameters(model), "all": sum(p.numel() for p in model.parameters())}


def runs_of(name: str) -> pd.DataFrame:
    """A record's runs with their widths' parameters; `unique`: target tokens of a run's pairs."""
    runs = [run for run in load_record(name)["runs"] if run["seed"]]  # seed 0 chose the rate
    names = {"d_model": "width", "tokens": "unique", "share": "parts"}
    runs = pd.DataFrame(runs).rename(columns=names)
    return runs.join(pd.DataFrame({w: sizes_of(w) for w in WIDTHS}).T, on="width")


def readings_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Loss and cost of each width after each pass over all pairs, means over the seeds."""
    after = runs[runs["parts"] == 1].explode("losses").astype({"losses": float})
    after["passes"] = after.groupby(["width", "seed"]).cumcount() + 1
    after["read"] = after["unique"] * after["passes"]
    after["operations"] = 6 * after["all"] * after["read"]
    keys = ["width", "all", "layers", "passes", "read", "operations"]
    return after.groupby(keys)["losses"].mean().rename("loss").reset_index()


# %% [markdown]
# Width 96 once, 64 twice, 48 three times and 32 six times cost about the same. **Predict.** Which has the lowest loss?

# %%
runs = runs_of("grid-multi30k")
whole = readings_of(runs)
whole.pivot(index=["width", "all"], columns="passes", values="loss").round(2)

# %% [markdown]
# Width 32 has the lowest (2.46), width 48 the next (2.51). But the six passes of width 32 cost 9% more than the three of width 48. For equal costs, we read between passes from a smooth curve.


# %%
def at_budget(readings: pd.DataFrame, budget: float) -> pd.Series:
    """The loss of each width that can spend the budget in one to eight passes."""
    losses = {}
    for width, own in readings.groupby("width"):
        if own["operations"].min() <= budget <= own["operations"].max():
            curve = interpolate.PchipInterpolator(np.log(own["operations"]), own["loss"])
            losses[width] = curve(math.log(budget)).item()
    return pd.Series(losses)


# %%
N_of = {width: sizes_of(width)["all"] for width in WIDTHS}
costs = whole.set_index(["width", "passes"])["operations"]
print("for the cost of six passes of width 32:", at_budget(whole, costs[32, 6]).round(2).to_dict())

# %% [markdown]
# At equal cost the two are level.

# %%
unit = costs[48, 1]  # of budget: one pass of width 48
curves = {doublings: at_budget(whole, unit * 2**doublings) for doublings in range(4)}
bought = long(curves, "doublings", "width", "loss")
bought["N"] = bought["width"].map(N_of)
bought["passes"] = 2.0 ** bought["doublings"] * N_of[48] / bought["N"]
best = {doublings: curve.idxmin() for doublings, curve in curves.items()}
assert all(min(curves[i].index) < best[i] < max(curves[i].index) for i in curves)  # no curve's end
budget_chart(bought, 3, f"Eight times the budget: the best width goes from {best[0]} to {best[3]}")

# %% [markdown]
# With eight times the budget the best width doubles, and its passes grow from 1.8 to 5.1: a larger budget should go into both.
#
# **Pitfall.** *Operations aren't minutes.* Eight passes of width 96 have 14 times the operations of width 16, but took 2.8 times as long on the record's machine: small products use it badly (chapter 11). If you pay for minutes, choose wider.
#
# ### Is it fair to read on the way?
#
# After one of eight passes the rate is near its peak; a training of one pass ends at zero. Hoffmann et al. (2022) blamed such readings for wrong advice; Porian et al. (2024) found that they hardly matter. So the narrowest and the widest model were also trained for one pass, with the same seed and batches ([`budgets-multi30k.json`](../results/budgets-multi30k.json), `python -m scripts.studies.budgets --save`).
#
# **Predict.** Which of the two gains more when its rate ends at zero?

# %%
after = {}
for label, name in (("on the way", "grid-multi30k"), ("to its end", "budgets-multi30k")):
    swept = pd.DataFrame(load_record(name)["runs"]).query("seed == 0 and share == 1")
    after[label] = swept.set_index(["d_model", "lr"])["losses"].str[0]  # after the first pass
pd.DataFrame(after).dropna().round(2)

# %% [markdown]
# Neither, at the chart's rates (0.0336 and 0.0084): on the way, the losses are 0.03 and 0.01 lower (one seed). Five passes of width 64 give 2.10 on the way, and 2.11 to their end (chapter 19's base). The peak rate matters more: with half of it, width 96 is 0.12 nats better after one pass, 0.07 after three. So the chart draws width 96 too high. The fits below leave out the first pass: a third of it is warm-up.
#
# ## Two laws
#
# > **In short.** A law predicts the loss of every size after every number of tokens, also where nobody has trained.
#
# Hoffmann et al. (2022) *add* two losses, one due to the model's size and one due to its text, to a floor $E$. The floor is meant to be the loss that no model can remove:
#
# $$ L(N, D) = E + \frac{A}{N^{\alpha}} + \frac{B}{D^{\beta}} $$
#
# Kaplan et al. (2020) had *joined* the two under one power (with $E = 0$):
#
# $$ L(N, D) = E + \left[ \left( \frac{N_c}{N} \right)^{\alpha/\beta} + \frac{D_c}{D} \right]^{\beta} $$
#
# | symbol | meaning |
# |---|---|
# | $A, B$, or $N_c, D_c$ | the scale of what can be removed |
# | $\alpha, \beta$ | how fast it goes: for $N \to 10N$, its part falls to $10^{-\alpha}$ ($\beta$: the same for $D$) |
#
# In the additive law a larger model gains as much on few tokens as on many. In the joint law the larger of the two terms dominates: when tokens are few, size gains little.


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
# A library's least squares finds the five numbers, on $\log L$, so that a percent counts the same everywhere.

# %%
STARTS = {additive: (0.5, 4, 0.3, 4, 0.3), joint: (0.5, 13, 0.3, 15, 0.3)}
LIMITS = {  # of theta without its floor, which lies between 0 and the lowest loss
    additive: [(-5, 0.01, -5, 0.01), (25, 2, 25, 2)],
    joint: [(0, 0.01, 0, 0.01), (60, 3, 60, 3)],
}


def fit_law(
    law: Law, N: np.ndarray, D: np.ndarray, losses: np.ndarray, floor: float | None = None
) -> np.ndarray:
    """The law's theta (5,) with the least squares of log L; E is free, or held at `floor`."""
    low, high = ([end, *rest] for end, rest in zip((0, losses.min()), LIMITS[law], strict=True))
    start = [*STARTS[law]]
    if floor is not None:
        low[0], start[0], high[0] = floor - 1e-6, floor, floor + 1e-6

    def errors(theta: np.ndarray) -> np.ndarray:
        return np.log(law(theta, N, D) / losses)

    return optimize.least_squares(errors, start, bounds=(low, high), x_scale="jac").x


def missed(law: Law, theta: np.ndarray, N: np.ndarray, D: np.ndarray, losses: np.ndarray) -> float:
    """Root of the mean squared error of log L: the typical error, as a share of the loss."""
    return np.sqrt(np.square(np.log(losses / law(theta, N, D))).mean()).item()


# %% [markdown]
# We fit each law to the cheap readings, which cost at most one pass of the widest model: 20 readings, of widths 16 to 48. Each law then predicts the others, up to eight times as costly.
#
# **Predict.** Both laws fit the cheap readings within 1%. By how much do they miss the others?


# %%
def columns(frame: pd.DataFrame, N: str = "all", D: str = "read") -> tuple[np.ndarray, ...]:
    """Parameters, tokens and losses of these places, (n,) each."""
    return tuple(frame[name].to_numpy(float) for name in (N, D, "loss"))


by = {"mean": runs} | {f"seed {seed}": own for seed, own in runs.groupby("seed")}
by = {name: readings_of(own).query("passes > 1") for name, own in by.items()}
later = by["mean"]
cheap = later["operations"] <= costs[96, 1]
fitted_to = {
    "1 pass of width 96": cheap,
    "2 passes of width 96": later["operations"] <= costs[96, 2],
    "other widths": later["width"] < 96,
}
rows = {}
for (name, seen), law, (seed, own) in product(fitted_to.items(), (additive, joint), by.items()):
    theta = fit_law(law, *columns(own[seen]))
    fitted, hidden = (missed(law, theta, *columns(own[part])) for part in (seen, ~seen))
    rows[name, law.__name__, seed] = f"{100 * fitted:.1f} → {100 * hidden:.1f}"
pd.Series(rows).unstack().rename_axis(index=["fitted to", "law"], columns="fitted → hidden, %")

# %% [markdown]
# By 3 to 6%: a good fit says little about larger models. The additive law misses by 5 to 7% with each seed, the joint law with one. Fitted to two passes, the joint law predicts better with each seed; with the widest model hidden, with two of three.
#
# ### Decide
#
# Of all sizes that the budget pays for, take the one with the lowest loss.


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
# A test: what do the laws, fitted to the cheap readings, decide for eight of the chart's units?


# %%
def width_of(N: float) -> int:
    """The width, a multiple of 8, whose model has about N parameters."""
    return min(range(8, 513, 8), key=lambda width: abs(sizes_of(width)["all"] - N))


def decisions(readings: pd.DataFrame, units: float) -> pd.DataFrame:
    """By each law, fitted to these readings: the best width, its passes and its loss."""
    one_pass, rows = whole["read"].min(), {}  # tokens
    for law in (additive, joint):
        theta = fit_law(law, *columns(readings))
        N, D = decide(law, theta, units * unit)
        rows[law.__name__] = width_of(N), round(D / one_pass, 1), round(law(theta, N, D), 2)
    return pd.DataFrame(rows, ["width", "passes", "loss"]).T.astype({"width": int})


print("measured:", curves[3].round(2).to_dict())
decisions(later[cheap], 8)

# %% [markdown]
# The best measured width is 64. The joint law takes 56, the additive law 48, which measured only 0.05 nats worse. So a wrong law may still decide well: near its lowest point a curve of equal budget is flat.
#
# **Your turn**: set a budget.

# %%
YOUR_BUDGET = 50  # in units; our largest training costs 25
decisions(later, YOUR_BUDGET)

# %% [markdown]
# Don't pay for 50 units: they mean more than ten passes, and on half of the captions the widest model, without dropout, was at its best after eight or nine. A law of text read counts the tenth pass like the first.
#
# ## Ours beside Kaplan's and Hoffmann's
#
# > **In short.** How fast the best size grows with the budget depends on which parameters one counts, and on which readings one fits.
#
# In both laws the best size is a power of the budget (Exercise 2):
#
# $$ N_{\text{best}} \propto C^{a}, \qquad a = \frac{\beta}{\alpha + \beta} $$
#
# Kaplan et al. fitted $a = 0.73$ to training curves: most of a larger budget goes into a larger model. (Their joint law's exponents give 0.58.) Hoffmann et al. found about 0.5, equal shares for size and text, and so trained Chinchilla (70 billion parameters, 1.4 trillion tokens). What do additive laws, as published, say for Chinchilla's budget?


# %%
def growth(theta: np.ndarray) -> float:
    """The power of the budget with which the best size grows."""
    return theta[4] / (theta[2] + theta[4])


# %%
PUBLISHED = {  # E, A, α, B, β
    "Hoffmann et al. 2022": (1.6934, 406.4, 0.3392, 410.7, 0.2849),
    "the same, rounded": (1.69, 406.4, 0.34, 410.7, 0.28),
    "Besiroglu et al. 2024": (1.8172, 482.01, 0.3478, 2085.43, 0.3658),
}
rows = {}
for name, (E, A, alpha, B, beta) in PUBLISHED.items():
    theta = np.array([E, math.log(A), alpha, math.log(B), beta])
    size = decide(additive, theta, 6 * 70e9 * 1.4e12)[0]
    rows[name] = f"{growth(theta):.2f}", f"{size / 1e9:.0f} billion"
pd.DataFrame(rows, ["a", "best N"]).T

# %% [markdown]
# The paper prints the rounded constants; Besiroglu et al. quote the others from its source. Rounding alone turns 41 billion into 32. Besiroglu et al. read the same runs off a figure, fitted them again, and come near Chinchilla's size.
#
# ### Which parameters count?
#
# Kaplan et al. count only the parameters in the layers. Pearce and Song (2024) calculate that this, in small models, explains most of the gap. Ours are small. We try three choices of passes.
#
# **Predict.** With the embedding table left out of N and of C, does $a$ rise or fall?

# %%
rows = {}
chosen = ((2, 6), (2, 8), (3, 8))
for law, (first, last), count in product((additive, joint), chosen, ("all", "layers")):
    theta = fit_law(law, *columns(whole[whole["passes"].between(first, last)], count))
    rows[law.__name__, f"{first} to {last}", count] = {"a": growth(theta), "E": theta[0]}
ours = pd.DataFrame(rows).T.round({"a": 2, "E": 1}).unstack()
ours.rename_axis(index=["law", "passes read"], columns=["", "N counts"])

# %% [markdown]
# With the layers alone, $a$ rises in each row. From width 16 to 96 all parameters grow 14 times, those in the layers 34 times. So the same fall of the loss gives a smaller $\alpha$, and $a = \beta/(\alpha + \beta)$ rises.
#
# How large $a$ is, these runs don't say: 0.42 to 0.76 with all parameters, 0.62 to 0.85 with the layers alone. (The first chart's rings give 0.51.) Nor do they say the floor: passes 7 and 8, when the rate is low, gain 0.02 nats at width 96; with them the additive law finds a floor of 0.9, without them none.
#
# ## Two meanings of D
#
# > **In short.** D may be the text that exists, or the text that is read. In one grid of runs, the joint law predicts better by the first meaning, the additive law by the second.
#
# Each width also learned from half of the pairs, and so on to a sixteenth. Such a run ends when validation hasn't improved for three passes, or after the most passes (`PASSES`); its best pass counts. On all captions it was the last in 17 of 18 runs, so more might help.
#
# **Predict.** Start from the smallest model on the smallest part. Which gains more: 14 times as many parameters, or 16 times as many captions?

# %%
read = runs["unique"] * (1 + runs["losses"].map(np.argmin))
kept = {"all": "first", "unique": "first", "read": "mean", "loss": "mean"}
grid = runs.assign(read=read).groupby(["width", "parts"]).agg(kept).reset_index()
grid.pivot(index="width", columns="parts", values="loss")[[16, 1]].loc[[16, 96]].round(2)

# %% [markdown]
# The captions gain 0.85 nats, the parameters 0.19. From the laws, the widest model and the runs on all captions are hidden.

# %%
MEANINGS = {"exists": "unique", "was read": "read"}  # up to the best pass
inside = grid["width"].lt(96) & grid["parts"].gt(1)
rows = {}
for (meaning, D), law in product(MEANINGS.items(), (additive, joint)):
    theta = fit_law(law, *columns(grid[inside], D=D))
    rows[meaning, law.__name__] = missed(law, theta, *columns(grid[~inside], D=D))
pd.Series(rows).map("{:.1%}".format).unstack().rename_axis("D: the text that")

# %% [markdown]
# Here the better law depends on D. But a token read again is worth less than a new one (Muennighoff et al. 2023).

# %%
N, D, losses = columns(grid, D="unique")
says = {law.__name__: law(fit_law(law, N, D, losses), N, D) for law in (additive, joint)}
assert np.ptp(says["joint"][4::5]) < np.ptp(says["joint"][::5]) / 2  # on a sixteenth, on all
grid_chart(grid.assign(N=N, D=D, **says), "joint", "additive")

# %% [markdown]
# On the left, the dots lie closer, and so do the joint law's lines. (The schedule may play a part: there the largest model is best soon after its warm-up, the smallest at about half of its peak rate.)
#
# ## Is there a floor?
#
# > **In short.** A fit returns a floor in any case. Hold it at other values, and fit the rest: if the error hardly grows, the runs don't know the floor.
#
# **Predict.** Which floors can the runs rule out?

# %%
FLOORS = np.linspace(0, 1.4, 15).round(1)
floor, error = "floor, nats", "error of the fit, %"
errors = {}
for (meaning, D), law in product(MEANINGS.items(), (additive, joint)):
    places = columns(grid, D=D)
    held = {E: 100 * missed(law, fit_law(law, *places, E), *places) for E in FLOORS}
    errors[f"{law.__name__}: text that {meaning}"] = held
errors = dict(sorted(errors.items(), key=lambda fit: -min(fit[1].values())))  # the worst first
frame = long(errors, "fit", floor, error)
allowed = frame[frame[error] < 1.08 * frame.groupby("fit")[error].transform("min")]
assert allowed["fit"].value_counts(sort=False).is_monotonic_decreasing
drawn, dots = (lines(part, floor, error, "fit", zero=True) for part in (frame, allowed))
titled(
    drawn + dots.mark_circle(size=60),
    "The worse a law fits, the more floors it takes",
    "Error of each law with each D, its floor held. Dots: within 8% of its best.",
)

# %% [markdown]
# By themselves none: it takes a law and a meaning of D. (8%: if a law is right, the dots miss its floor with a chance of 5%, by an F test.)
#
# - The two better fits (1.2% and 1.9% at best) prefer zero and take 0.3 at most. The worst (4.2%) takes all 15: it doesn't describe these runs, so it can't judge.
# - Fitted to passes 2 to 8 of all captions, the laws prefer 0.9 and 0.7 (above). So a floor depends on law and runs.
#
# ## Summary
#
# - Curves of equal budget find the best size. A law extends them to other budgets.
# - Choose a law by runs that it hasn't seen, of the kind that you want to predict.
# - Say which parameters and which tokens you count. The exponents depend on the first, the better law on the second.
# - Before you believe an exponent or a floor, fit again without some readings.
#
# ## What the paper did that we don't
#
# Its "big" model has three times the parameters, and three times the steps.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · How large for this loss
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Turn a law around: for $L = E + A/N^\alpha$, give the N that reaches `loss`; A is `scale`. If the floor forbids it, the answer is infinite. (`solution("size_for_loss")` shows ours.)


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
# ### Exercise 3 · A shorter warm-up
#
# *project · difficulty ●●○ · worth ●●● · 30 minutes*
#
# Porian et al. count a warm-up too long for small models among the causes of Kaplan's large $a$. Ours takes 100 steps. Set `warmup=30` in `BASE` of `scripts/studies/grid.py`, say first which width gains more in one pass, and run `python -m scripts.studies.budgets`.
#
# ### Exercise 4 · Another floor
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Hoffmann et al. report E = 1.69 nats for English text. Someone with more captions finds a floor of 0.6 for ours. Why can't the two be compared? Can the exponents?
#
# <details><summary>An answer</summary>
#
# A nat *per piece* depends on the vocabulary. Captions are more predictable than other texts. And we predict a sentence whose translation is given.
#
# The exponents don't depend on the unit, but on text, task, law and count: above, the same runs give an $a$ from 0.42 to 0.85.
#
# </details>
#
# Next: [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb)
