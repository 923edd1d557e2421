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
# *If you read only three cells:* the first chart, `fit_law`, the table of *Two meanings of D*.
#
# In this chapter **N** counts parameters, **D** target tokens, **C** operations, and **n** places where a loss was measured.

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

import numpy as np
import pandas as pd
import torch
from scipy import interpolate, optimize

from scripts.book.charts import lines, long, titled
from scripts.book.exercises import check
from scripts.book.figures.understanding import budget_chart, grid_chart
from scripts.book.records import load_record
from scripts.ch19_ablations import STUDY, THE_BASE, counted, layer_parameters
from scripts.core.settings import build_model

Law = Callable[..., np.ndarray]  # theta, N, D to losses

# %% [markdown]
# ## One budget, many models
#
# > **In short.** With a fixed budget, a larger model reads less text. Somewhere between too small and too short lies the best size.
#
# A training takes about $C = 6ND$ operations ([chapter 11](ch11_where_the_time_goes.ipynb)): six for each parameter and each token read. So one budget pays for a small model and many passes over the text, or for a large model and few.
#
# Which is better? Chapter 19's model, without dropout, read all of Multi30k's pairs eight times in each of six widths ($d_{ff} = 4\,d_{model}$; depth, heads and vocabulary stay), with three seeds and a peak rate that suits the width. We read the validation loss after each pass. The record is [`grid-multi30k.json`](../results/grid-multi30k.json) (`python -m scripts.studies.grid --save`).

# %%
WIDTHS = (16, 24, 32, 48, 64, 96)  # d_model
PASSES = {1: 8, 2: 12, 4: 16, 8: 24, 16: 32}  # at most, by the share of the pairs: 1/1, 1/2, …


def sizes_of(width: int) -> dict[str, int]:
    """Parameters of a width: in the layers alone, as Kaplan et al. count, and all of them."""
    with torch.device("meta"):  # shapes without storage
        model = build_model(replace(STUDY, d_model=width, d_ff=4 * width), STUDY.vocab)
    return {"layers": layer_parameters(model), "all": sum(p.numel() for p in model.parameters())}


def runs_of(name: str) -> pd.DataFrame:
    """A record's runs with their widths' parameters; `unique`: target tokens of a run's pairs."""
    runs = [run for run in load_record(name)["runs"] if run["seed"]]  # seed 0 chose the rate
    runs = pd.DataFrame(runs).rename(columns={"d_model": "width", "tokens": "unique"})
    return runs.join(pd.DataFrame({w: sizes_of(w) for w in WIDTHS}).T, on="width")


def readings_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The loss of each width after each pass over all pairs, a mean over its seeds."""
    after = runs[runs["share"] == 1].explode("losses").astype({"losses": float})
    after["passes"] = after.groupby(["width", "seed"]).cumcount() + 1
    after["read"] = after["unique"] * after["passes"]
    keys = ["width", "all", "layers", "passes", "read"]
    return after.groupby(keys)["losses"].mean().rename("loss").reset_index()


# %% [markdown]
# Width 96 once, 64 twice, 48 three times and 32 six times cost about the same. **Predict.** Which has the lowest loss?

# %%
runs = runs_of("grid-multi30k")
whole = readings_of(runs)
whole["operations"] = 6 * whole["all"] * whole["read"]
whole.pivot(index=["width", "all"], columns="passes", values="loss").round(2)

# %% [markdown]
# Width 32 (2.46), just before 48 (2.51). The larger ones have seen less text (and, see below, are read at a higher rate). And for other budgets? Between passes we read a width's loss from a smooth curve.


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
unit = costs[48, 1]  # of budget: one pass of width 48
curves = {doublings: at_budget(whole, unit * 2**doublings) for doublings in range(4)}
bought = long(curves, "doublings", "width", "loss")
bought["N"] = bought["width"].map(N_of)
bought["passes"] = 2.0 ** bought["doublings"] * N_of[48] / bought["N"]
best = {doublings: curve.idxmin() for doublings, curve in curves.items()}
assert all(min(curves[i].index) < best[i] < max(curves[i].index) for i in curves)  # no curve's end
budget_chart(bought, 3, f"Eight times the budget: the best width goes from {best[0]} to {best[3]}")

# %% [markdown]
# With eight times the budget the best width doubles, and its passes grow from 1.8 to 5.1. So a larger budget should go into both.
#
# **Pitfall.** *Operations aren't minutes.* Eight passes of width 96 have 14 times the operations of width 16, but took 2.8 times as long on the record's machine: small products use it badly (chapter 11). If you pay for minutes, choose wider.
#
# ### Is it fair to read on the way?
#
# A training of five passes ends with a rate of zero. On the way to eight, the rate is then still a third of its peak. Hoffmann et al. (2022) blamed such readings for wrong advice; Porian et al. (2024) found that they hardly matter. Chapter 19's base is our width 64, trained for five passes to its own end.

# %%
ended = counted(load_record("table3-multi30k")["runs"])[THE_BASE]  # three seeds
on_the_way = whole.set_index(["width", "passes"])["loss"][64, 5]
print(f"width 64, five passes: to its end {np.mean(ended):.2f}, on the way {on_the_way:.2f}")

# %% [markdown]
# They differ by less than two seeds do (2.09 to 2.13), though the peak rates differ, too (0.0084 and 0.0115). So after five passes the reading is fair. After one or two it may not be: the rate is then near its peak, which may make the larger models look worse than they are. So the best widths may be larger than the chart says (Exercise 3 is the test), and the fits below leave the first pass out.
#
# ## Two laws
#
# > **In short.** A law says the loss of every size and every number of tokens. So it can decide where nobody has trained.
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
    held = [] if floor is None else [floor]
    low, high = ([end, *rest] for end, rest in zip((0, losses.min()), LIMITS[law], strict=True))

    def errors(free: np.ndarray) -> np.ndarray:
        return np.log(law([*held, *free], N, D) / losses)

    bounds = low[len(held) :], high[len(held) :]
    fit = optimize.least_squares(errors, STARTS[law][len(held) :], bounds=bounds, x_scale="jac")
    return np.array([*held, *fit.x])


def missed(law: Law, theta: np.ndarray, N: np.ndarray, D: np.ndarray, losses: np.ndarray) -> float:
    """Root of the mean squared error of log L: the typical error, as a share of the loss."""
    return np.sqrt(np.square(np.log(losses / law(theta, N, D))).mean()).item()


# %% [markdown]
# Let each law predict. We fit it to the cheap readings, which cost at most one pass of the widest model, and compare its predictions with the others, up to eight times as costly. (Two other choices follow.)
#
# **Predict.** Will the law that fits the cheap readings better also predict the larger ones better?


# %%
def columns(frame: pd.DataFrame, N: str = "all", D: str = "read") -> tuple[np.ndarray, ...]:
    """Parameters, tokens and losses of these places, (n,) each."""
    return tuple(frame[name].to_numpy(float) for name in (N, D, "loss"))


later = whole[whole["passes"] > 1]  # the first pass is read near the peak of the rate
fitted_to = {
    "1 pass of width 96": later["operations"] <= costs[96, 1],  # at most
    "2 passes": later["operations"] <= costs[96, 2],
    "all other widths": later["width"] < 96,
}
rows = {}
for name, seen in fitted_to.items():
    for law in (additive, joint):
        theta = fit_law(law, *columns(later[seen]))
        for part, chosen in (("fitted", seen), ("hidden", ~seen)):
            rows[name, law.__name__, part] = missed(law, theta, *columns(later[chosen]))
pd.Series(rows).map("{:.1%}".format).unstack().rename_axis(["fitted to", "error of"])

# %% [markdown]
# No: the additive law fits the cheap readings better, and predicts much worse. But the test decides, too: fitted to two passes, the joint law does both better; with the widest model hidden, both predict about equally well.
#
# ### Decide
#
# A law decides: of all sizes that the budget pays for, take the one with the lowest loss.


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
# First a test: by the cheap readings, what do the laws decide for eight units (a unit is one pass of width 48), where three widths were measured?


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
decisions(later[fitted_to["1 pass of width 96"]], 8)

# %% [markdown]
# The joint law comes near the measurement. The additive law takes width 48, which measured only 0.05 nats worse (2.15; it had expected 2.21). So a wrong law may still decide well: near its lowest point a curve of equal budget is flat.
#
# **Your turn**: set a budget. (The laws are fitted to all readings but the first pass's.)

# %%
YOUR_BUDGET = 50  # in units; our largest training costs 25
decisions(later, YOUR_BUDGET)

# %% [markdown]
# Don't pay for 50 units: they mean more than ten passes, and on half of the captions the widest model was at its best after eight or nine. A law of text read doesn't know that text wears out.
#
# ## Ours beside Kaplan's and Hoffmann's
#
# > **In short.** How fast the best size grows with the budget depends on which parameters one counts.
#
# In both laws the best size is a power of the budget (Exercise 2):
#
# $$ N_{\text{best}} \propto C^{a}, \qquad a = \frac{\beta}{\alpha + \beta} $$
#
# Kaplan et al. published $a = 0.73$ (by another law, of training steps; their α and β in this one give 0.56): put most of a larger budget into a larger model. Hoffmann et al. found about 0.5, equal shares for size and text, and so trained Chinchilla (70 billion parameters, 1.4 trillion tokens). But Kaplan et al. count only the parameters in the layers. Pearce and Song (2024) calculate that this, in small models, explains most of the gap. Ours are small, so we can try.
#
# **Predict.** With the embedding table left out of N and of C, does $a$ rise or fall?


# %%
def growth(theta: np.ndarray) -> float:
    """The power of the budget with which the best size grows."""
    return theta[4] / (theta[2] + theta[4])


# %%
PRINTED = {  # E, A, α, B, β
    "Hoffmann et al. 2022": (1.69, 406.4, 0.34, 410.7, 0.28),
    "Besiroglu et al. 2024": (1.8172, 482.01, 0.3478, 2085.43, 0.3658),
}


def exponents(theta: np.ndarray) -> dict[str, str]:
    """α, β and a of a law, as a table shows them."""
    return {"α": f"{theta[2]:.2f}", "β": f"{theta[4]:.2f}", "a": f"{growth(theta):.2f}"}


rows = {("Kaplan et al. 2020", "layers"): {"α": "0.08", "β": "0.10", "a": "0.73"}}
for name, (E, A, alpha, B, beta) in PRINTED.items():
    theta = np.array([E, math.log(A), alpha, math.log(B), beta])
    size = decide(additive, theta, 6 * 70e9 * 1.4e12)[0]
    rows[name, "all"] = exponents(theta) | {"Chinchilla's budget": f"N = {size / 1e9:.0f} billion"}
for law in (additive, joint):
    for count in ("all", "layers"):
        row = exponents(fit_law(law, *columns(later, count)))
        with_first = exponents(fit_law(law, *columns(whole, count)))["a"]
        rows[f"ours, {law.__name__}", count] = row | {"a with pass 1": with_first}
pd.DataFrame(rows).T.rename_axis(["law of", "N counts"]).fillna("")

# %% [markdown]
# It rises, by both laws, to 0.74: about Kaplan's value. Outside the layers lie 69% of the parameters at width 16, and 27% at width 96. Without them small models look too small, so the best size seems to grow faster.
#
# Don't trust the second digit: with the first pass, $a$ is 0.05 to 0.11 lower. Nor printed constants: Besiroglu et al. fitted the same law to Hoffmann's runs, read off a figure. For Chinchilla's budget the two differ by a factor of two; the refit agrees with Chinchilla's own size.
#
# ## Two meanings of D
#
# > **In short.** D may be the text that exists, or the text that is read. In one grid of runs, the joint law wins by the first meaning, the additive law by the second.
#
# Text can run out. So each width also learned from half of the pairs, and so on to a sixteenth. Such a run ends when validation hasn't improved for three passes, or after 8 (all pairs) to 32 (a sixteenth); its best pass counts. Hidden from the laws are the widest model and all runs on all captions.
#
# **Predict.** Start from the smallest model on the smallest part. Which gains more: 14 times as many parameters, or 16 times as many captions?

# %%
MEANINGS = {"text that exists": "unique", "text read to the best pass": "read"}
read = runs["unique"] * (1 + runs["losses"].map(np.argmin))
kept = {"all": "first", "unique": "first", "read": "mean", "loss": "mean"}
grid = runs.assign(read=read).groupby(["width", "share"]).agg(kept).reset_index()
inside = grid["width"].lt(96) & grid["share"].gt(1)
rows = {}
for meaning, D in MEANINGS.items():
    for law in (additive, joint):
        theta = fit_law(law, *columns(grid, D=D))
        hidden = fit_law(law, *columns(grid[inside], D=D))
        rows[meaning, law.__name__] = {
            "floor": f"{theta[0]:.2f}",
            "error": f"{missed(law, theta, *columns(grid, D=D)):.1%}",
            "error on hidden runs": f"{missed(law, hidden, *columns(grid[~inside], D=D)):.1%}",
        }
pd.DataFrame(rows).T.rename_axis(["D is the", "law"])

# %%
N, D, losses = columns(grid, D="unique")
says = {law.__name__: law(fit_law(law, N, D, losses), N, D) for law in (additive, joint)}
grid_chart(grid.assign(N=N, D=D, **says), "joint", "additive")

# %% [markdown]
# The captions do: they gain 0.85 nats, the parameters 0.19.
#
# Where D is the text that exists, as in Kaplan's law of N and D, the joint law wins. Where D is the text read up to the best pass, the additive law wins.
#
# So is the additive law right for text read, as in Hoffmann's study? No: above, where D was text read, too, it lost. There all models read the same text; here the text differs, and a token read again is worth less than a new one (Muennighoff et al. 2023). Hoffmann's models read nearly every token once; there both meanings are one.
#
# Only the joint law follows the chart: the lines lie closer on the left. On a sixteenth, the largest model is best at a training loss of 2.8 nats; three passes later, at 1.8, validation is worse. Size gains little there. (Part may be the rate: at its best pass it was still at 0.89 of its peak, the smallest model's at 0.40.)
#
# ## Is there a floor?
#
# > **In short.** A fit returns a floor in any case. Hold it at other values, and fit the rest: if the error hardly grows, the runs don't know the floor.
#
# **Predict.** Which floors can the runs rule out?

# %%
FLOORS = np.linspace(0, 1.4, 15).round(1)
errors = {}
for meaning, D in MEANINGS.items():
    for law in (additive, joint):
        places = columns(grid, D=D)
        held = {E: 100 * missed(law, fit_law(law, *places, E), *places) for E in FLOORS}
        errors[f"{law.__name__}, {meaning}"] = held
frame = long(errors, "law and D", "floor, nats", error := "error of the fit, %")
allowed = frame[frame[error] < 1.08 * frame.groupby("law and D")[error].transform("min")]
count = allowed["law and D"].value_counts()
assert count["additive, text that exists"] == len(FLOORS) > 5 > count["joint, text that exists"]
drawn, dots = (lines(f, "floor, nats", error, "law and D", zero=True) for f in (frame, allowed))
titled(
    drawn + dots.mark_circle(size=60),
    "With text that exists, the additive law takes any floor, the joint law only small ones",
    "Error of each law, its floor held. Dots: within 8% of the best (95%, F test).",
)

# %%
for first, last in ((2, 8), (2, 6), (3, 8)):
    part = columns(whole[whole["passes"].between(first, last)])
    floors = [f"{law.__name__} {fit_law(law, *part)[0]:.1f}" for law in (additive, joint)]
    print(f"floors from passes {first} to {last}:", ", ".join(floors))

# %% [markdown]
# By themselves, none: it depends on the law and on D.
#
# - *Additive, text that exists*: 0.99 is best, but from 0 to 1.4 the error hardly changes.
# - *Joint, text that exists*: a floor of zero is best, at 1.24%; one of 1.0 makes it 2.2%. But the same law, fitted to passes 2 to 8 of all captions, prefers 0.7 (above): the floor belongs to law and runs, not to the language.
#
# ## Summary
#
# - Curves of equal budget find the best size. A law carries it further.
# - Choose a law by runs that it hasn't seen, and of the kind that you want to foresee.
# - Say which parameters and which tokens you count. The exponents depend on the first, the better law on the second.
# - Hold a floor at other values before you believe it.
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
# ### Exercise 3 · Trained to its end
#
# *project · difficulty ●●○ · worth ●●● · 30 minutes*
#
# Is it fair to read after one pass, or two? Train widths 96, 64, 48 and 32 for one, two, three and six passes, each to its own end. Write down first what would refute the chart. Then run `python -m scripts.studies.budgets`. Which width is best now?
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
# The exponents don't depend on the unit. But they depend on text, task, law and count: above, the same readings give an α from 0.20 to 0.43.
#
# </details>
#
# Next: [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb)
