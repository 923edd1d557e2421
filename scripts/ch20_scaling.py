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
# After this chapter you can fit a scaling law, say how sure its numbers are, test it on a point that it hasn't seen, and tell what a small study can't say.
#
# | | |
# |---|---|
# | In the paper | Table 3, rows (C), of [Attention Is All You Need](https://arxiv.org/abs/1706.03762); laws came three years later |
# | Time | 20 minutes to read, 40 with the code; a quarter of a minute to run on a CPU |
# | Before, after | [Chapter 19 · Ablations](ch19_ablations.ipynb) · [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb) |
#
# *If you read only three cells:* `fit_power_law`, the chart of *Size*, the chart of *Data*.
#
# Shapes: **N** parameters, **n** places where a loss was measured, **R** data sets fitted at once, **K** floors tried. In this chapter **D** is a number of tokens, as in the papers on scaling.

# %% tags=["bootstrap"]
# @title Find the series: in a folder above, installed, or fetched
import os, pathlib, runpy, subprocess, sys  # noqa: E401, I001

installed = [s.origin for f in sys.meta_path if (s := f.find_spec("scripts", None)) and s.origin]
places = [globals().get("__file__", "x"), *installed, "from-attention-to-translation/x"]
homes = [home for place in places for home in pathlib.Path(place).resolve().parents]
address = os.environ.get("SERIES_REPOSITORY", "set SERIES_REPOSITORY").removeprefix("git+")
if not (found := [at for home in homes for at in home.glob("scripts/book/at_home.py")]):
    subprocess.run(["git", "clone", "-q", address, "from-attention-to-translation"], check=True)
ours = runpy.run_path(str([*found, "from-attention-to-translation/scripts/book/at_home.py"][0]))

# %%
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from scripts.book.exercises import check
from scripts.book.figures.scaling import data_chart, floor_chart, law_chart
from scripts.book.records import load_record
from scripts.ch19_ablations import STUDY, layer_parameters
from scripts.engine.data import TrainingData
from scripts.engine.settings import build_model

# %%
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## A law in three numbers
#
# > **In short.** As a model or its data grow, the loss falls along a curve that flattens. Three numbers describe it: a floor, how much lies above, and how fast that melts.
#
# Kaplan et al. (2020) found that the loss of language models falls as a power of size, of data and of compute, over many orders of magnitude. Hoffmann et al. (2022) added a floor. No model can go below it, since how a text goes on is never certain:
#
# $$ L(N) = E + \frac{A}{N^{\alpha}}, \qquad L(D) = E' + \frac{B}{D^{\beta}} $$
#
# | symbol | meaning |
# |---|---|
# | $L$ | validation loss, nats per piece |
# | $N$ | parameters; which of them, we'll have to ask |
# | $D$ | target tokens in the training pairs |
# | $E, E'$ | the floor: what more of the same doesn't remove |
# | $A, B$ | the scale of what can be removed |
# | $\alpha, \beta$ | how fast it goes: ten times as many parameters leave $10^{-\alpha}$ of it |
#
# In code a law is a vector $\theta = (E, \log A, \alpha)$.


# %%
def power_law(theta: Tensor, x: Tensor) -> Tensor:
    """E + A·x^−α for theta (..., 3) = (E, log A, α) and x (n,): (..., n)."""
    floor, scale, slope = theta.unsqueeze(-1).unbind(dim=-2)  # (..., 1) each
    return floor + (scale - slope * x.log()).exp()


# %%
true_law = torch.tensor([2.0, math.log(50.0), 0.3])
sizes = torch.logspace(4, 6, 9)
torch.testing.assert_close(power_law(true_law, sizes), 2.0 + 50.0 * sizes**-0.3)
print("losses:", [round(loss, 2) for loss in power_law(true_law, sizes).tolist()])

# %% [markdown]
# ## Fit it: a straight line above each floor
#
# > **In short.** If we knew the floor, the rest would be a straight line on logarithmic axes, and a line can be fitted in one step. We don't know it. So try four hundred floors, and keep the best.
#
# $$ \log(L - E) = \log A - \alpha \log N $$
#
# What should be small are the residuals of $\log L$, so that a percent counts the same everywhere. A small error $\varepsilon$ in $\log(L - E)$ is an error of $\varepsilon\,(L - E)/L$ in $\log L$. So each place gets the weight $w = ((L - E)/L)^2$ in the line's fit.
#
# (Hoffmann et al. minimise Huber's loss by L-BFGS, since one failed run can't pull it far. We have none.)

# %%
FLOORS = torch.linspace(0, 0.995, 400, dtype=torch.float64)  # tried; as shares of the smallest loss
NO_FLOOR = torch.zeros(1, dtype=torch.float64)


def lines_above(floors: Tensor, x: Tensor, losses: Tensor) -> Tensor:
    """The best law above each of floors (R, K), for losses (R, n) at x (n,): theta (R, K, 3)."""
    above = losses.unsqueeze(1) - floors.unsqueeze(-1)  # (R, K, n)
    weight = (above / losses.unsqueeze(1)) ** 2
    weight = weight / weight.sum(dim=-1, keepdim=True)
    # Weighted least squares of y = log(L − E) on u = log N: slope −α, and through both means.
    u, y = x.log(), above.log()
    u_mean, y_mean = ((weight * v).sum(dim=-1) for v in (u, y))  # (R, K)
    du, dy = u - u_mean.unsqueeze(-1), y - y_mean.unsqueeze(-1)
    alpha = -(weight * du * dy).sum(dim=-1) / (weight * du**2).sum(dim=-1)
    return torch.stack([floors, y_mean + alpha * u_mean, alpha], dim=-1)


def misses(theta: Tensor, x: Tensor, losses: Tensor) -> Tensor:
    """Root of the mean squared residual of log L, for theta (..., 3) and losses (..., n): (...)."""
    return (losses.log() - power_law(theta, x).log()).square().mean(dim=-1).sqrt()


def fit_power_law(x: Tensor, losses: Tensor, floors: Tensor = FLOORS) -> Tensor:
    """theta (R, 3) for each row of losses (R, n), measured at x (n,).

    Raises ValueError for fewer than four places: three numbers fit any three.
    """
    if len(x) < 4:
        raise ValueError(f"{len(x)} places don't determine a law of three numbers")
    laws = lines_above(losses.amin(dim=-1, keepdim=True) * floors, x, losses)  # (R, K, 3)
    best = misses(laws, x, losses.unsqueeze(1)).argmin(dim=-1)  # (R,)
    return laws[torch.arange(len(laws)), best]


# %% [markdown]
# Check: a law without noise is found again, as well as the spacing of the floors allows. (A test holds the fit against PyTorch's L-BFGS.)

# %%
found = fit_power_law(sizes, power_law(true_law, sizes)[None])[0]
print("floor {:.2f}, exponent {:.3f}".format(*found[[0, 2]]))
torch.testing.assert_close(found, true_law, rtol=0.02, atol=0)

# %% [markdown]
# **Pitfall.** *A straight line through a curve.* Many plots of laws are a line on logarithmic axes: a law without a floor. If there is one, the slope comes out too small, the residuals form an arc, and the extrapolation promises what the floor forbids. $R^2$ looks splendid.
#
# So we need a judge for "floor or none". More numbers always fit better. The judge is a point that the fit hasn't seen: leave the largest size out, fit, predict it. **Predict.** A law with a floor, a law without one, both with 1% of noise. Which fit predicts better on each?


# %%
def held_out(x: Tensor, losses: Tensor, floors: Tensor = FLOORS) -> Tensor:
    """Fit without the largest x; how far its loss lies above the prediction, as a share: (R,)."""
    theta = fit_power_law(x[:-1], losses[:, :-1], floors)
    return losses[:, -1] / power_law(theta, x[-1:])[:, 0] - 1


# %%
noise = 0.01 * torch.randn(200, 9, generator=torch.Generator().manual_seed(0))
floorless = torch.tensor([0.0, math.log(9.0), 0.1])
rows = {}
for name, law in (("floor 2.0", true_law), ("no floor", floorless)):
    many = power_law(law, sizes) * noise.exp()  # (200, n): 200 studies
    rows[name] = {
        told: held_out(sizes, many, floors).abs().median().item()
        for told, floors in (("fit with a floor", FLOORS), ("fit without", NO_FLOOR))
    }
far = torch.tensor([1e8])
clean = power_law(true_law, sizes)
line = fit_power_law(sizes, clean[None], NO_FLOOR)[0]
explained = 1 - misses(line, sizes, clean) ** 2 / clean.log().var(correction=0)
print(
    f"a line through the law with a floor: exponent {line[2]:.2f}, not 0.30; R² = {explained:.3f}"
)
print(f"at 100 million it says {power_law(line, far)[0]:.2f}; the floor is {true_law[0]:.2f}")
told, truth = ("fit with a floor", "fit without"), "floor 2.0"
assert rows[truth][told[1]] > 5 * rows[truth][told[0]]
pd.DataFrame(rows).T.map("{:.1%}".format).rename_axis("the truth; typical error held out")

# %% [markdown]
# With a floor in the truth, the fit with a floor is five times as good. Without one, it is hardly worse. The judge works, on data that follow the law.
#
# ## How sure?
#
# > **In short.** Other seeds would have given other points, and those another curve. Make a few hundred such data sets from the residuals, fit each, and see where the curves lie.
#
# Each draw of this *bootstrap* is the fitted curve with residuals picked at random, with repetition. They are widened by $\sqrt{n/(n-3)}$: three numbers were fitted, so what is left over is smaller than the noise was.


# %%
@dataclass(frozen=True)
class LawFit:
    """A fitted law, and the laws that would have been fitted to as likely other data."""

    x: Tensor  # (n,)
    losses: Tensor  # (n,)
    theta: Tensor  # (3,): E, log A, α
    draws: Tensor  # (R, 3)

    @property
    def residuals(self) -> Tensor:
        """How far each measured loss is above the curve, as a share of it: (n,)."""
        return self.losses / self.curve(self.x) - 1

    def curve(self, x: Tensor) -> Tensor:
        """The law at x (n,): (n,)."""
        return power_law(self.theta, x)

    def band(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Between which losses 95% of the draws lie at x (n,): two of (n,)."""
        return tuple(power_law(self.draws, x).quantile(q, dim=0) for q in (0.025, 0.975))

    def interval(self, number: int) -> tuple[float, float]:
        """Between which values 95% of the draws of theta's entry `number` lie."""
        return tuple(self.draws[:, number].quantile(q).item() for q in (0.025, 0.975))

    def __str__(self) -> str:
        (low, high), (slow, fast) = self.interval(0), self.interval(2)
        return (
            f"floor {self.theta[0]:.2f} ({low:.2f} to {high:.2f}), "
            f"exponent {self.theta[2]:.3f} ({slow:.3f} to {fast:.3f})"
        )


def bootstrap_law(x: Tensor, losses: Tensor, draws: int = 400, seed: int = 0) -> LawFit:
    """Fit a law to losses (n,) at x (n,), and again to `draws` data sets of shuffled residuals."""
    theta = fit_power_law(x, losses[None])[0]
    residuals = losses.log() - power_law(theta, x).log()
    widened = (residuals - residuals.mean()) * math.sqrt(len(x) / (len(x) - 3))
    generator = torch.Generator().manual_seed(seed)
    picked = widened[torch.randint(len(x), (draws, len(x)), generator=generator)]  # (R, n)
    others = power_law(theta, x) * picked.exp()
    return LawFit(x, losses, theta, fit_power_law(x, others))


# %% [markdown]
# **Predict.** The true floor is 2, each loss is within about 1%. How exactly will nine sizes tell the floor?

# %%
one_study = bootstrap_law(sizes, power_law(true_law, sizes) * noise[0].exp())
print(one_study, "in brackets 95% of the draws")
assert one_study.interval(0)[0] < 2.0 < one_study.interval(0)[1]
held = []
for study in noise[:100]:
    low, high = bootstrap_law(sizes, clean * study.exp(), draws=100).band(sizes)
    held.append((low <= clean) & (clean <= high))
print(
    f"bands of 100 studies, at nine sizes: {torch.stack(held).double().mean():.0%} hold the truth"
)

# %% [markdown]
# Not very: a low floor with a small exponent draws nearly the same curve as a high floor with a large one. Nor does a band of 95% hold the truth in 95 of 100 places: here it is 86, *and the law has this form*. Whether it has, no band knows.
#
# ## Size
#
# > **In short.** Over nine sizes the loss falls without a pause. The fit says "no floor", and that is no finding: it is the end of what the fit may say.
#
# The model is that of chapter 19, made wider and narrower, with a dropout of 0.1 and half as many tokens a step. Depth stays, $d_{ff} = 4\,d_{model}$, and the peak rate falls as $1/\sqrt{d_{model}}$, as in the paper's equation 3. All are trained for one pass over Multi30k's 29,000 pairs, with two seeds or three.

# %%
ONE_PASS = replace(STUDY, epochs=1, max_tokens=1024, name="study")
WIDTHS = (8, 12, 16, 24, 32, 48, 64, 96, 128)  # d_model of the nine sizes


def sized(width: int) -> dict[str, Any]:
    """The settings that change with the size: widths, and a rate that falls as 1/√d_model (eq. 3)."""
    peak = ONE_PASS.lr * math.sqrt(ONE_PASS.d_model / width)
    return {"d_model": width, "d_ff": 4 * width, "lr": round(peak, 6)}


counts = []
for width in WIDTHS:
    with torch.device("meta"):  # shapes without storage
        counts.append(
            layer_parameters(build_model(replace(ONE_PASS, **sized(width)), ONE_PASS.vocab))
        )
print("parameters in the layers:", ", ".join(f"{count:,}" for count in counts))

# %% [markdown]
# The record is [`scaling-multi30k.json`](../results/scaling-multi30k.json); `make scaling` makes it. A law is fitted to the *means* over seeds: two seeds aren't two sizes.


# %%
def scaling_points(record: dict[str, Any], kind: str, column: str) -> pd.DataFrame:
    """Every run of "sizes", "once" or "parts": its `column` as x, its loss and its seed."""
    runs = [run for run in record[kind] if run["loss"] is not None]
    points = [{"x": run[column], "loss": run["loss"], "seed": run["seed"]} for run in runs]
    return pd.DataFrame(points).sort_values(["x", "seed"], ignore_index=True)


def law_of(points: pd.DataFrame, draws: int = 400) -> LawFit:
    """The law fitted to the mean loss at each place, with its bootstrap."""
    means = points.groupby("x", as_index=False)["loss"].mean()
    x, losses = (torch.tensor(means[name].to_numpy(float)) for name in ("x", "loss"))
    return bootstrap_law(x, losses, draws)


BEYOND = ("fit, within the sizes", "fit, beyond them")


def law_curve(fit: LawFit, beyond: float = 4.0) -> pd.DataFrame:
    """The law and its band, from the smallest x to `beyond` times the largest."""
    ends = fit.x.min().log10() - 0.04, (fit.x.max() * beyond).log10()
    grid = torch.logspace(*(end.item() for end in ends), 60, dtype=torch.float64)
    low, high = fit.band(grid)
    curve = pd.DataFrame({"x": grid, "loss": fit.curve(grid), "low": low, "high": high})
    curve["part"] = [BEYOND[x > fit.x.max().item()] for x in curve["x"]]
    return curve


# %% [markdown]
# **Predict.** Over two hundred times as many parameters. By how much does the loss fall? Is it still falling at the end?

# %%
scaling = load_record("scaling-multi30k")
size_points = scaling_points(scaling, "sizes", "layer_parameters")
size_fit = law_of(size_points)
print(
    f"{counts[-1] / counts[0]:.0f} times the parameters: {size_fit.losses[0]:.2f} to {size_fit.losses[-1]:.2f} nats"
)
print(f"L(N): {size_fit}")
predicted = size_fit.curve(torch.tensor(size_points["x"].to_numpy(float)))
size_points["residual"] = size_points["loss"] / predicted.numpy() - 1
apart = size_points.groupby("x")["loss"].agg(lambda runs: runs.max() / runs.min() - 1)
print(f"seeds of one size differ by {apart.min():.1%} to {apart.max():.1%}")
law_chart(size_points, law_curve(size_fit))

# %% [markdown]
# The best floor is 0.00: the lowest that the fit may try. A number at its own bound isn't an estimate. The residuals say why. They form an arc, and the wrong way round. A floor bends a curve *up* at the end; these losses bend *down*. The law has no number for that, so its floor goes as low as it can. The interval lies on one side, because the floor can't go below 0: noise can only raise it.
#
# What bends them? Perhaps the rate: it was swept for no size. Perhaps what we call N. Kaplan et al. leave embeddings out, and so did we; Hoffmann et al. count all. By this, Pearce and Song (2024) explain much of the gap between the two papers. In our smallest model, tables are four fifths of the parameters. **Predict.** The same runs, with all parameters counted: will the exponent be larger or smaller?

# %%
all_points = scaling_points(scaling, "sizes", "parameters")
all_fit = law_of(all_points)
frames, judged_by = [], {}
for name, fitted in (("without the tables", size_fit), ("all parameters", all_fit)):
    losses = fitted.losses[None]
    laws = lines_above(losses.amin() * FLOORS[None], fitted.x, losses)[0]  # (K, 3)
    frame = pd.DataFrame({"floor": laws[:, 0], "error": misses(laws, fitted.x, fitted.losses)})
    frames.append(frame[frame["floor"] < 2].iloc[::4].assign(counted=name))
    judged_by[name] = {
        "sizes apart": f"{fitted.x[-1] / fitted.x[0]:.0f} times",
        "floor": f"{fitted.theta[0]:.2f}",
        "exponent": f"{fitted.theta[2]:.3f}",
        "without a floor": f"{fit_power_law(fitted.x, losses, NO_FLOOR)[0, 2]:.3f}",
        "largest residual": f"{fitted.residuals.abs().max():.1%}",
        "held out, with a floor": f"{held_out(fitted.x, losses)[0]:+.1%}",
        "held out, without": f"{held_out(fitted.x, losses, NO_FLOOR)[0]:+.1%}",
    }
pd.DataFrame(judged_by).T

# %%
floor_chart(pd.concat(frames))

# %%
print("all parameters:", all_fit)
without_largest = fit_power_law(all_fit.x[:-1], all_fit.losses[None, :-1])[0]
print(f"its floor, fitted without the largest size: {without_largest[0]:.2f}")

# %% [markdown]
# Larger, by more than a half, and now there is a floor. A part needs no floor: the same fall over 54 times instead of 224 times must be steeper. Without a floor the exponent is 0.115; the fitted floor adds the rest. This law misses by less. But its floor rests on one size: without the largest, it is 0 again. So the judge can't choose: for either count, with the largest size held out, the fits with and without a floor are *the same fit*.
#
# Over these sizes a power law follows the mean losses within two percent, in an arc; the seeds of a size differ by nearly as much. Whether there is a floor, nine sizes in one pass don't say. And an exponent means little unless one says which parameters were counted.
#
# ## Data
#
# > **In short.** Fewer captions are also fewer steps. Here it is mostly the steps that were missing.
#
# One width in the middle is trained on 1/2, 1/4, … 1/64 of the pairs, in two ways. *Once*: every caption is new, and half the pairs are half the steps. *Repeated*: as many passes as it takes to make as many steps as all pairs make in one; 32 at most, ended early when validation stops getting better. The vocabulary is that of all pairs.

# %%
FRACTIONS = (1, 2, 4, 8, 16, 32, 64)  # 1/1, 1/2, … of the training pairs
PART_WIDTH = 32  # of the model that is trained on parts of the data
MOST_EPOCHS = 32  # passes over a part


def part_indices(count: int, share: int) -> list[int]:
    """Which 1/`share` of `count` pairs are a part, in their order; each smaller part inside the larger."""
    order = list(range(count))
    random.Random("parts").shuffle(order)
    return sorted(order[: count // share])


def part_of(data: TrainingData, share: int) -> TrainingData:
    """1/`share` of the training pairs, each smaller part inside the larger; the rest as it is."""
    kept = part_indices(len(data.train), share)
    train = [data.train[i] for i in kept]
    pairs = [data.corpus["train"][i] for i in kept]
    return replace(data, corpus=data.corpus | {"train": pairs}, train=train)


# %%
nested = [set(part_indices(29_000, share)) for share in FRACTIONS]
assert all(small < large for large, small in zip(nested, nested[1:], strict=False))
print("pairs in the parts:", ", ".join(f"{len(part):,}" for part in nested))

# %% [markdown]
# **Predict.** An eighth of the pairs, passed over eight times, makes as many steps as all pairs once. How much worse is it? And a sixty-fourth, repeated?

# %%
once_points, repeated_points = (
    scaling_points(scaling, kind, "train_tokens") for kind in ("once", "parts")
)
once_fit = law_of(once_points)
means = {"once": once_points, "repeated": repeated_points}
means = {name: points.groupby("x")["loss"].mean()[::-1].tolist() for name, points in means.items()}
for share in (8, 64):
    once, again = (means[name][FRACTIONS.index(share)] for name in ("once", "repeated"))
    print(
        f"1/{share} of the pairs: once {once:.2f}, repeated {again:.2f}; all {means['once'][0]:.2f}"
    )
print(f"L(D), once: {once_fit}; largest residual {once_fit.residuals.abs().max():.1%}")
both = [
    points.groupby("x", as_index=False)["loss"].mean() for points in (once_points, repeated_points)
]
names = ("each pair once", "repeated, 32 passes at most")
data_chart(
    pd.concat([frame.assign(how=name) for frame, name in zip(both, names, strict=True)]),
    law_curve(once_fit, beyond=1.0)[["x", "loss"]],
)

# %%
rows = {}
for share in FRACTIONS[1:]:
    once, again = ([r for r in scaling[k] if r["share"] == share] for k in ("once", "parts"))
    rows[f"1/{share}"] = {
        "steps, about": math.ceil(once[0]["train_tokens"] / ONE_PASS.max_tokens),
        "once": ", ".join(f"{run['loss']:.2f}" for run in once),
        "first pass of many": ", ".join(f"{run['losses'][0]:.2f}" for run in again),
        "passes": ", ".join(str(len(run["losses"])) for run in again),
        "planned": again[0]["epochs"],
        "best": ", ".join(str(run["losses"].index(run["loss"]) + 1) for run in again),
    }
pd.DataFrame(rows).T

# %% [markdown]
# An eighth of the captions, repeated, is as good as all of them once. So the small runs of the upper curve lacked steps, not captions: a law in D with every token new is also a law in steps, and in schedules. In a run of one pass, warm-up takes the same share of the steps, and the rate ends at 0. The first pass of a longer run makes the same steps on the same pairs, but warms up for 100, and doesn't run down. By that alone they differ by up to a nat, in both directions. So the bend between 30k and 200k tokens may be the schedule's. The floor lies at its bound again, and the residuals reach five percent. We don't call it a law.
#
# With a 64th of the captions, validation stopped improving after some twenty passes: captions do run out. But the runs ended after 22 and 23 passes of 32, their rate not run down. How much of the gap is the captions', and how much the cut schedule's, isn't told apart.
#
# (For large models, Muennighoff et al. 2023 found that some four passes are worth nearly as much as new text, and dozens are not. Here a sixteenth, sixteen times, is within 0.03 of all pairs once. Our models are tiny, and captions are alike: don't carry this over.)
#
# ## Two laws from one set of runs
#
# > **In short.** A law is used to choose a size. Two fits to the same published runs choose sizes that differ by a factor of two.
#
# Hoffmann et al. fitted both at once: $L(N, D) = E + A/N^\alpha + B/D^\beta$. A training takes about $6ND$ operations. So for a budget C, each N has its $D = C/(6N)$, and one N is best. Besiroglu et al. (2024) read the runs off a figure of that paper and fitted them anew: the constants don't fit them, and the intervals are too narrow. **Predict.** How far apart are the best sizes, for the budget of Chinchilla itself (70 billion parameters, 1.4 trillion tokens)?

# %%
budget = 6 * 70e9 * 1.4e12
candidates = torch.logspace(9, 13, 40_001)
constants = {  # E, A, α, B, β
    "Hoffmann et al. 2022, as printed": (1.69, 406.4, 0.34, 410.7, 0.28),
    "the same, with β = 0.2849": (1.69, 406.4, 0.34, 410.7, 0.2849),
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
# The refit agrees with Chinchilla itself, and with the paper's two other methods: about twenty tokens a parameter. The printed constants don't. Some of that is rounding, as the second row shows.
#
# ## How far 29,000 pairs carry
#
# > **In short.** Not far. In one pass, small models are short of steps. After eighteen passes, the model that ships fits its captions better than others: perhaps it is short of them.
#
# The record of the shipped model (chapter 9) goes further.

# %%
shipped = load_record("multi30k-de-en")
history = pd.DataFrame(shipped["history"]).set_index("epoch")
first, last = history.iloc[0], history.iloc[-1]
gap = math.log(last["val_ppl"] / last["train_ppl"])
tokens = int(first["tokens"])
print(f"{shipped['parameters']:,} parameters, {tokens:,} target tokens, {len(history)} passes")
print(
    f"{shipped['parameters'] / tokens:.0f} parameters a token; validation stands {gap:.2f} nats above training"
)

# %% [markdown]
# (8,192 pieces; the study's 2,000 cut them into 539,074.) Training is measured during the pass, with dropout on, so the true gap is larger. It fits a shortage of captions. To prove one, train on half.
#
# - **What these fits say** is how small models of this kind fall in one pass over this corpus: smoothly, by about a third from the smallest to the largest.
# - **What they don't say**: whether there is a floor; the entropy of English captions; what ten million parameters do. The sizes end below one million, and every run carried the dropout that did harm in chapter 19.
# - **Chinchilla's rule** of twenty tokens a parameter has no meaning here. The shipped model has 17 parameters for each token, and reads the same tokens eighteen times.
#
# ## Summary
#
# - A law is three numbers. Above a given floor it is a straight line: so try floors.
# - Judge a floor by a point that the fit hasn't seen. Where the fits with and without are the same, there is nothing to choose.
# - A number at its own bound isn't an estimate. Look at the residuals: an arc says that the form is wrong.
# - A band knows the noise. It doesn't know the form.
# - Say which parameters you count. Keep steps and data apart.
#
# ## What the paper did that we don't
#
# It has no scaling study. Its "big" model has three times the parameters of the base model, and is trained three times as long.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · How large for this loss
#
# *code · difficulty ●○○ · worth ●●○ · 10 minutes*
#
# Turn a law around: for $L = E + A/N^\alpha$, give the N that reaches `loss`. What if the floor forbids it? Then the answer is infinite. (`solution("size_for_loss")` shows ours.)


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
# Above, a search found the best N for a budget of C operations. There is a closed form: put $D = C/(6N)$ into $E + A/N^\alpha + B/D^\beta$, and set the derivative to zero. (`solution("best_size")` shows ours.)


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
# `held_out` hides the largest size only. Hide each in turn: `leave_one_out(x, losses, fit)` calls `fit(x, losses)` with the other n − 1 places, which returns a function from x (m,) to losses (m,). Return the root of the mean squared residual of $\log L$ at the hidden places. Which is the harder question, inside or outside? (`solution("leave_one_out")` shows ours.)


# %%
def leave_one_out(x: Tensor, losses: Tensor, fit: Callable) -> float:
    """The typical residual of log L at places (n,) that the fit hasn't seen, each hidden in turn."""
    ...


check(leave_one_out)

# %% [markdown]
# ### Exercise 4 · Another floor
#
# *think · difficulty ●●○ · worth ●●○ · 10 minutes*
#
# Hoffmann et al. report E = 1.69 nats for web text. Suppose that with more runs our law settles on a floor of 0.6. Name three reasons why the two can't be compared. Are the exponents comparable?
#
# <details><summary>An answer</summary>
#
# The pieces are others: a nat *per piece* depends on the vocabulary. The texts are others: captions of photographs are far more predictable. And the task is another: we predict a sentence whose translation is given. Besides, our sizes are trained for one pass, so our floor contains what longer training would have removed.
#
# The exponents don't depend on the unit of the loss. But they depend on text, task, which parameters are counted, and how well each size was trained.
#
# </details>
#
# Next: [Chapter 21 · Learning from models](ch21_learning_from_models.ipynb)
