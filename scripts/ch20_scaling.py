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
# After this chapter you can fit a scaling law in size and data, choose between two laws by runs that neither has seen, say how sure the law's numbers are, and tell what a small study can't say.
#
# | | |
# |---|---|
# | In the paper | Table 3, rows (C), of [Attention Is All You Need](https://arxiv.org/abs/1706.03762) |
# | Time | 20 minutes to read, 40 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 19 · Ablations](ch19_ablations.ipynb) · [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb) |
#
# *If you read only three cells:* `additive` and `joint`, `held_out`, the chart of *The grid*.
#
# Shapes: **n** places where a loss was measured, **R** data sets fitted, **S** seeds of a place. In this chapter **N** is a number of parameters and **D** a number of tokens.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import scipy.optimize as optimize
import torch

from scripts.book.exercises import check
from scripts.book.figures.understanding import grid_chart
from scripts.book.records import load_record
from scripts.ch19_ablations import STUDY, layer_parameters
from scripts.core.settings import build_model

Law = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # theta, N, D to losses

# %% [markdown]
# ## Two laws
#
# > **In short.** As a model and its data grow, the loss falls, ever more slowly. Two laws describe this. They differ in what a larger model gains when data are few.
#
# Hoffmann et al. (2022) *add* two losses, one due to the model's size and one due to its data, to a floor. The floor is meant to be the loss that no model can remove, since how a text goes on is never certain:
#
# $$ L(N, D) = E + \frac{A}{N^{\alpha}} + \frac{B}{D^{\beta}} $$
#
# Kaplan et al. (2020) had *joined* the two under one power, without a floor:
#
# $$ L(N, D) = \left[ \left( \frac{N_c}{N} \right)^{\alpha/\beta} + \frac{D_c}{D} \right]^{\beta} $$
#
# | symbol | meaning |
# |---|---|
# | $L$ | validation loss, nats per piece |
# | $N$ | parameters (which of them: see below) |
# | $D$ | target tokens in the training pairs, each counted once |
# | $E$ | the floor: what remains with unlimited $N$ and $D$ |
# | $A, B$, or $N_c, D_c$ | the scale of what can be removed |
# | $\alpha, \beta$ | how fast it goes: with unlimited data, ten times as many parameters leave $10^{-\alpha}$ of their part of the loss |
#
# In the additive law a larger model gains as much on few data as on many. In the joint law the larger of the two terms dominates: when data are few, size gains little. The trainings differed, too. Hoffmann's models read nearly every token once. Kaplan's, for this law, read small sets again and again until validation stopped improving, as about half of ours will.


# %%
def additive(theta: np.ndarray, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """E + A/N^α + B/D^β for theta (5,) = (E, log A, α, log B, β) and N, D (n,): (n,)."""
    E, log_a, alpha, log_b, beta = theta
    return E + np.exp(log_a - alpha * np.log(N)) + np.exp(log_b - beta * np.log(D))


def joint(theta: np.ndarray, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """((N_c/N)^(α/β) + D_c/D)^β for theta (4,) = (log N_c, α, log D_c, β) and N, D (n,): (n,)."""
    log_n, alpha, log_d, beta = theta
    return (np.exp((log_n - np.log(N)) * alpha / beta) + np.exp(log_d - np.log(D))) ** beta


# %%
some_sizes, some_tokens = np.geomspace(1e4, 5e5, 6), np.geomspace(3e4, 5e5, 5)
N, D = (side.ravel() for side in np.meshgrid(some_sizes, some_tokens, indexing="ij"))  # (n,) each
truths = {
    additive: np.array([1.2, math.log(30.0), 0.25, math.log(200.0), 0.4]),
    joint: np.array([14.0, 0.2, 15.0, 0.25]),
}
exact = {law: law(theta, N, D) for law, theta in truths.items()}  # (n,) each
for law, losses in exact.items():
    few, many = (np.ptp(losses[end == D]) for end in (D.min(), D.max()))
    print(f"{law.__name__}: size gains {few:.2f} on the fewest tokens, {many:.2f} on the most")

# %% [markdown]
# ## Fit them
#
# > **In short.** A library's least squares finds the numbers. It minimises the squared error of $\log L$, so a percent counts the same everywhere.
#
# The problem isn't convex, so we start from several guesses and keep the best fit.

# %%
STARTS = {
    additive: [(floor, 4, 0.3, 4, 0.3) for floor in (0.2, 1, 1.7)],
    joint: [(12, 0.5, 12, 0.5), (15, 0.2, 15, 0.2)],
}
BOUNDS = {
    additive: ([0, -5, 0.01, -5, 0.01], [5, 25, 2, 25, 2]),
    joint: ([0, 0.01, 0, 0.01], [60, 3, 60, 3]),
}


def fit_law(
    law: Law, N: np.ndarray, D: np.ndarray, losses: np.ndarray, starts: Sequence = ()
) -> np.ndarray:
    """The law's theta with the least squares of log L, for losses (n,) at N, D (n,).

    The search begins at each of `starts`, else of the law's own.
    """

    def errors(theta: np.ndarray) -> np.ndarray:
        return np.log(law(theta, N, D) / losses)

    how = {"bounds": BOUNDS[law], "x_scale": "jac"}
    fits = [optimize.least_squares(errors, start, **how) for start in starts or STARTS[law]]
    return min(fits, key=lambda fit: fit.cost).x


def missed(law: Law, theta: np.ndarray, N: np.ndarray, D: np.ndarray, losses: np.ndarray) -> float:
    """Root of the mean squared error of log L: about the typical error, as a share."""
    return np.sqrt(np.square(np.log(losses / law(theta, N, D))).mean()).item()


# %%
for law, theta in truths.items():
    np.testing.assert_allclose(fit_law(law, N, D, exact[law]), theta, rtol=1e-3)

# %% [markdown]
# Which law is right for our runs? A law with many numbers easily fits well. So hide the runs of the largest size and those with the most data, fit each law to the rest, and let it predict what is hidden.
#
# **Predict.** Let each law in turn be true, and each run be off by about 1%. How far off is the wrong law's prediction?


# %%
def held_out(
    law: Law, N: np.ndarray, D: np.ndarray, losses: np.ndarray, inside: np.ndarray
) -> float:
    """The typical error, as a share, at places that aren't `inside` (n,), by a fit to those that are."""
    theta = fit_law(law, N[inside], D[inside], losses[inside])
    return missed(law, theta, N[~inside], D[~inside], losses[~inside])


# %%
inside = (N.max() > N) & (D.max() > D)
noise = np.exp(0.01 * np.random.default_rng(0).standard_normal((20, len(N))))  # 20 studies
rivals = {}
for true, losses in exact.items():
    errors = pd.DataFrame()
    for law in exact:
        errors[law.__name__] = [held_out(law, N, D, losses * one, inside) for one in noise]
    wins = (errors.idxmin(axis=1) == true.__name__).sum()
    medians = errors.median().map("{:.1%}".format)
    rivals[true.__name__] = {**medians, "the true law wins": wins}
pd.DataFrame(rivals).T.rename_axis("true law; held-out error of")

# %% [markdown]
# The wrong law misses by far more. So thirty places can distinguish the two.
#
# ## How sure?
#
# > **In short.** Other seeds would have given other points, and so another law. Redraw from the seeds that we have, fit again, and see how the numbers move.
#
# Each draw of this *bootstrap* picks, at each place, as many seeds as were run, with repetition, and takes their mean. With S seeds such means scatter too little, by a factor of $\sqrt{(S-1)/S}$. So we widen by the inverse.


# %%
def bootstrap(
    law: Law, N: np.ndarray, D: np.ndarray, seeds: np.ndarray, draws: int = 100
) -> np.ndarray:
    """theta (R, ·) of laws fitted to means of redrawn seeds; seeds (n, S) are losses at N, D.

    Each search begins at the law of all seeds.
    """
    (places, count), rng = seeds.shape, np.random.default_rng(0)
    mean, fits = seeds.mean(axis=1), []
    start = fit_law(law, N, D, mean)
    for _ in range(draws):
        picked = rng.integers(count, size=(places, count))
        redrawn = np.take_along_axis(seeds, picked, axis=1).mean(axis=1)
        losses = mean + (redrawn - mean) * math.sqrt(count / (count - 1))
        fits.append(fit_law(law, N, D, losses, [start]))
    return np.array(fits)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The two numbers between which 95% of values (R,) lie."""
    return tuple(np.quantile(values, (0.025, 0.975)).tolist())


def with_interval(value: float, draws: np.ndarray) -> str:
    """A number, and in brackets the interval of its draws (R,)."""
    return "{:.2f} ({:.2f} to {:.2f})".format(value, *interval(draws))


# %% [markdown]
# **Predict.** Take thirty places with three seeds each, every run off by about 1%. How precisely does the additive law find its floor if that is 1.2? And if the joint law is true, which has none?

# %%
for true, losses in exact.items():
    three = losses[:, None] * np.exp(0.01 * np.random.default_rng(1).standard_normal((len(N), 3)))
    low, high = interval(bootstrap(additive, N, D, three)[:, 0])
    print(f"true: {true.__name__}. The floor: 95% of the draws from {low:.2f} to {high:.2f}")

# %% [markdown]
# In the first case the truth lies inside the interval. In the second the interval is *narrower*, and the floor that it is so sure of doesn't exist.
#
# **Pitfall.** *Trust in an interval.* This one knows the noise of seeds. It takes the law for granted, and everything else that the runs share.
#
# ## The grid
#
# > **In short.** Ninety trainings choose the joint law: the fewer the captions, the less a larger model gains.
#
# The model is that of chapter 19, without dropout, in six widths; depth, heads and vocabulary stay the same, and $d_{ff} = 4\,d_{model}$. Each width learns from all of Multi30k's pairs, from half of them, and so on to a sixteenth. Each part lies inside the larger ones. A run ends early if validation hasn't improved for three passes, and the weights of its best pass count. A run that took all its passes is *finished*.

# %%
WIDTHS = (16, 24, 32, 48, 64, 96)  # d_model
PASSES = {1: 8, 2: 12, 4: 16, 8: 24, 16: 32}  # at most, by the share of the pairs: 1/1, 1/2, …

# %% [markdown]
# Each size needs its own learning rate, so the rate is swept at the four corners of the grid, and interpolated between them. The record is [`grid-multi30k.json`](../results/grid-multi30k.json) (`python -m scripts.studies.grid --save`).


# %%
def sizes_of(width: int) -> dict[str, int]:
    """Parameters of a width: in the layers alone, as Kaplan et al. count, and all of them."""
    with torch.device("meta"):  # shapes without storage
        model = build_model(replace(STUDY, d_model=width, d_ff=4 * width), STUDY.vocab)
    every = sum(p.numel() for p in model.parameters())
    return {"in the layers": layer_parameters(model), "all": every}


def grid_of(record: dict[str, Any]) -> tuple[pd.DataFrame, np.ndarray]:
    """The places of a grid, and the losses of their seeds (n, S).

    `read` is how many tokens a run has read at its best pass, a mean over seeds; `finished` says
    whether each seed took all its passes.
    """
    runs = pd.DataFrame([run for run in record["runs"] if run["seed"] > 0])
    runs["finished"] = runs["losses"].str.len() == runs["share"].map(PASSES)
    runs["read"] = runs["tokens"] * (1 + runs["losses"].map(np.argmin))
    groups = runs.groupby(["d_model", "share"])
    told = {"tokens": "first", "read": "mean", "finished": "all", "loss": "mean"}
    places = groups.agg(told).reset_index()
    sizes = pd.DataFrame({width: sizes_of(width) for width in WIDTHS}).T
    return places.join(sizes, on="d_model"), np.array(groups["loss"].agg(list).tolist())


# %% [markdown]
# **Predict.** Start from the smallest model on the smallest part. Which gains more: 14 times as many parameters, or 16 times as many captions?

# %%
places, seeds = grid_of(load_record("grid-multi30k"))
finished = places["finished"].to_numpy()
spread = np.log(seeds).std(axis=1, ddof=1) / math.sqrt(seeds.shape[1])  # of each mean, as a share
by_share = pd.Series(spread**2).groupby(places["share"]).mean() ** 0.5
print(f"{len(places)} places, {seeds.size} runs; at {finished.sum()} places all three finished")
print(f"chance in a mean: {by_share[1]:.1%} on all captions, {by_share[16]:.1%} on a sixteenth")
table = places.pivot(index="all", columns="tokens", values="loss").round(2)
table.rename_axis("parameters")

# %% [markdown]
# The table holds the mean validation losses. From the smallest place the captions gain 0.85 nats, the parameters 0.19. On all captions the same parameters gain 1.21.
#
# We fit each law four times: with N without the embedding tables, with them, then to the finished runs alone, then with D as the tokens read. In brackets is the bootstrap's interval.

# %%
inside = (places["d_model"].lt(96) & places["share"].gt(1)).to_numpy()
every = np.ones(len(places), bool)
views = {  # which parameters, which tokens, which places
    "layers alone": ("in the layers", "tokens", every),
    "all parameters": ("all", "tokens", every),
    "finished runs": ("all", "tokens", finished),
    "tokens read": ("all", "read", every),
}
told = {
    additive: {"floor": 0, "α of size": 2, "β of data": 4},
    joint: {"α of size": 1, "β of data": 3},
}
fitted, judged = {}, []
for view, (size, text, kept) in views.items():
    N, D = (places.loc[kept, name].to_numpy(float) for name in (size, text))
    mean = seeds[kept].mean(axis=1)
    for law in (additive, joint):
        theta, draws = fit_law(law, N, D, mean), bootstrap(law, N, D, seeds[kept])
        fitted[law, view] = theta, draws
        row = {"fitted to": view, "law": law.__name__, "floor": "none"}
        for name, i in told[law].items():
            row[name] = with_interval(theta[i], draws[:, i])
        row["typical error"] = f"{missed(law, theta, N, D, mean):.1%}"
        judged.append(row | {"held out": f"{held_out(law, N, D, mean, inside[kept]):.1%}"})
pd.DataFrame(judged).set_index(["fitted to", "law"])

# %%
N, D = (places[name].to_numpy(float) for name in ("all", "tokens"))
lines = {law.__name__: law(fitted[law, "all parameters"][0], N, D) for law in (additive, joint)}
grid_chart(places.assign(N=N, D=D, **lines), "joint", "additive")

# %% [markdown]
# The additive law can't describe the grid: its errors fan out, one way on few tokens, the other way on many. The joint law has one number fewer, misses by a third as much, and predicts the hidden runs better, whichever parameters are counted. The additive law is sure of a floor, as in the experiment above: 0.99 from all runs, but zero from the finished ones. (Zero is the bound that we set, so it isn't an estimate.)
#
# The joint law isn't the whole truth: it misses by 1.2%, and chance alone would make 0.5%. Early stops may be part of the reason: for the finished runs alone the two are 0.4% and 0.3%.
#
# **Pitfall.** *Another D.* Here D is the text that exists; Hoffmann's is the text that was read. With that D (the table's last two rows), the additive law is the better one. (How long a run reads depends on its size, so the contest isn't fair.)
#
# **Predict.** By the joint law, what helps the largest model more, on a sixteenth of the captions and on all: twice the parameters, or twice the captions?


# %%
def gains(law: Law, theta: np.ndarray, N: float, D: float) -> np.ndarray:
    """By how much the loss falls with twice the parameters, and with twice the tokens: (2,)."""
    here, larger, richer = law(theta, np.array([N, 2 * N, N]), np.array([D, D, 2 * D]))
    return np.array([here - larger, here - richer])


twice = pd.DataFrame(index=["twice the parameters", "twice the captions"])
for part, view, at in (
    ("a sixteenth", "all parameters", D.min()),
    ("all", "all parameters", D.max()),
    ("all, by the finished runs", "finished runs", D.max()),
):
    theta, draws = fitted[joint, view]
    drawn = np.array([gains(joint, one, N.max(), at) for one in draws])  # (R, 2)
    twice[part] = [*map(with_interval, gains(joint, theta, N.max(), at), drawn.T)]
twice.T.rename_axis("the captions; nats less")

# %% [markdown]
# On a sixteenth, more captions help, and more parameters hardly do. On all captions both help, captions more. But don't trust the intervals: the finished runs alone give forecasts outside them. (One of these steps was run: from a sixteenth to an eighth the largest model's loss fell by 0.57. That fits: chance may move such a difference of means by 0.07.)
#
# ## Two laws from one set of runs
#
# > **In short.** A law is used to choose a size. Two fits of the additive law, to much the same published runs, choose different sizes.
#
# A training takes about $6ND$ operations: for each parameter and token two forward and four backward. So for a budget C, each N has its $D = C/(6N)$, and one N is best. Besiroglu et al. (2024) read most of Hoffmann's runs off a figure and fitted the law again: the printed constants don't fit these runs, and the printed intervals are too narrow. The source of Hoffmann's paper has more digits of the constants. **Predict.** How far apart are the best sizes for the budget of Chinchilla, the model that Hoffmann et al. trained (70 billion parameters, 1.4 trillion tokens)?

# %%
budget = 6 * 70e9 * 1.4e12
candidates = np.logspace(9, 13, 40_001)
constants = {  # E, A, α, B, β
    "Hoffmann et al. 2022, as printed": (1.69, 406.4, 0.34, 410.7, 0.28),
    "the same, with more digits": (1.6934, 406.4, 0.3392, 410.7, 0.2849),
    "Besiroglu et al. 2024": (1.8172, 482.01, 0.3478, 2085.43, 0.3658),
}
best_for = {}
for name, (E, A, alpha, B, beta) in constants.items():
    total = E + A * candidates**-alpha + B * (budget / (6 * candidates)) ** -beta
    best = candidates[total.argmin()].item()
    ratio = budget / (6 * best) / best
    best_for[name] = {"billion parameters": round(best / 1e9), "tokens a parameter": round(ratio)}
pd.DataFrame(best_for).T

# %% [markdown]
# The refit agrees with Chinchilla's own size, and with two other methods in Hoffmann's paper: about twenty tokens per parameter. The printed constants don't. Some of that is rounding (second row).
#
# ## How far 29,000 pairs carry
#
# > **In short.** They are enough to choose between two laws, but not to find a floor.
#
# - **Why the joint law?** A large model soon fits its small text alone. On a sixteenth, the largest one is best when its training loss is 2.8 nats. Three passes later that is 1.8, and validation is worse. So its size gains little.
# - **Is it the training's fault?** A run that ends early ends while the rate is still high. The finished runs alone choose the joint law, too. But they can't separate the amount of text from the length of training: on all captions they read 4.3 million tokens, on a quarter 2.1. So β measures both together.
# - **What the grid doesn't say**: the entropy of captions (the joint law falls to zero, which no text can); what ten million parameters do (ours end below one million); what dropout would change.
# - **Repeated text** has laws of its own. Muennighoff et al. (2023) find that up to four passes are nearly as good as new text, and later ones are worth less and less. Our best weights came after 7 to 18 passes. Chinchilla's rule of twenty tokens per parameter is for text that is read once.
#
# ## Summary
#
# - A scaling law is a form and a few numbers. Choose the form by runs that the fit hasn't seen.
# - An interval knows the noise, not whether the form is right.
# - When a small text is read again and again without dropout, size and data act together: more of one is worth less while the other is short.
# - Say which parameters and which tokens you count, and give each size its own rate.
#
# ## What the paper did that we don't
#
# Its "big" model has three times the parameters of the base model, and is trained for three times as many steps.
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
# ### Exercise 3 · Leave each one out
#
# *code · difficulty ●●○ · worth ●●○ · 20 minutes*
#
# `held_out` hides the largest. Hide each in turn: `leave_one_out(x, losses, fit)` calls `fit(x, losses)` with the other n − 1 places, and gets a function that predicts losses (m,) from x (m,). (For our grid, let x be row numbers of `places`: the joint law then misses by 1.5%.) Return the root of the mean squared residual of $\log L$ at the hidden places. (`solution("leave_one_out")` shows ours.)


# %%
def leave_one_out(x: np.ndarray, losses: np.ndarray, fit: Callable) -> float:
    """The typical residual of log L at places (n,) that the fit hasn't seen, each hidden in turn."""
    ...


check(leave_one_out)

# %% [markdown]
# ### Exercise 4 · Another floor
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Hoffmann et al. report E = 1.69 nats for English text. Suppose that someone with more captions finds a floor of 0.6 for ours. Name three reasons why the two can't be compared. Are the exponents comparable?
#
# <details><summary>An answer</summary>
#
# The pieces differ: a nat *per piece* depends on the vocabulary. The texts differ: captions of photographs are far more predictable. And the task differs: we predict a sentence whose translation is given.
#
# The exponents don't depend on the unit of the loss. But they depend on the text, the task, which parameters are counted, how well each size was trained, and the form: in the table of *The grid* the same runs give an α from 0.21 to 0.54.
#
# </details>
#
# Next: [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb)
