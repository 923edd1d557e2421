"""Chapter 20: fits recover laws, decisions are the best, the records are read correctly."""

import math
import os
import random

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize

from scripts.book.records import load_record
from scripts.ch07_multi30k import token_batches
from scripts.ch19_ablations import STUDY
from scripts.ch20_scaling import (
    PASSES,
    STEPS,
    WIDTHS,
    additive,
    at_budget,
    decide,
    fit_law,
    growth,
    joint,
    missed,
    readings_of,
    runs_of,
)
from scripts.studies.rows import data_of

TRUTHS = {
    additive: np.array([1.2, math.log(30.0), 0.25, math.log(200.0), 0.4]),
    joint: np.array([0.8, 14.0, 0.2, 15.0, 0.25]),
}
SIDES = np.geomspace(1e4, 5e5, 6), np.geomspace(3e4, 5e5, 5)
SIZE, TOKENS = (side.ravel() for side in np.meshgrid(*SIDES, indexing="ij"))
EXACT = {law: law(theta, SIZE, TOKENS) for law, theta in TRUTHS.items()}
LAWS = pytest.mark.parametrize("law", TRUTHS)

# Laws


@pytest.mark.parametrize("floor", [0.2, 1.0])
def test_laws_without_noise_are_found_again(floor):
    for law, theta in (
        (additive, [floor, math.log(30.0), 0.6, math.log(20.0), 0.2]),
        (joint, [floor, 13.0, 0.6, 14.0, 0.2]),
    ):
        losses = law(theta, SIZE, TOKENS)
        np.testing.assert_allclose(fit_law(law, SIZE, TOKENS, losses), theta, rtol=5e-3)


@LAWS
def test_no_other_search_finds_a_better_fit(law):
    """The other search: Nelder and Mead's, without gradients, started at the truth."""
    losses = EXACT[law] * np.exp(0.01 * np.random.default_rng(1).standard_normal(len(SIZE)))

    def cost(theta):
        return np.square(np.log(law(theta, SIZE, TOKENS) / losses)).mean()

    options = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-9, "fatol": 1e-15, "adaptive": True}
    bounds = [(0, None), *([(None, None)] * 4)]
    simplex = minimize(cost, TRUTHS[law], method="Nelder-Mead", options=options, bounds=bounds)
    fitted = fit_law(law, SIZE, TOKENS, losses)
    assert cost(fitted) < (1 + 1e-3) * simplex.fun
    assert math.isclose(missed(law, fitted, SIZE, TOKENS, losses), 100 * math.sqrt(cost(fitted)))


@LAWS
def test_the_best_size_grows_with_the_budget_as_the_exponents_say(law):
    """No other size is better, and ten times the budget multiplies it by ten to the power a."""
    theta = TRUTHS[law]
    sizes = [decide(law, theta, budget)[0] for budget in (1e12, 1e13)]
    assert abs(math.log10(sizes[1] / sizes[0]) - growth(theta)) < 1e-3
    for size in (sizes[0] / 1.1, 1.1 * sizes[0]):
        assert law(theta, size, 1e12 / 6 / size) > law(theta, sizes[0], 1e12 / 6 / sizes[0])


def test_a_budget_is_read_between_a_widths_own_trainings():
    trainings = pd.DataFrame({"width": [16, 16, 32, 32], "operations": [1.0, 16.0, 8.0, 64.0]})
    trainings["loss"] = [4.0, 3.0, 3.6, 2.6]
    assert at_budget(trainings, 4.0).to_dict() == {16: 3.5}
    assert at_budget(trainings, 8.0).index.tolist() == [16, 32]


# The records


def test_readings_are_the_means_of_the_runs_after_each_pass():
    readings = readings_of(runs_of("grid-multi30k"))
    assert len(readings) == len(WIDTHS) * PASSES[1]
    runs = [run for run in load_record("grid-multi30k")["runs"] if run["seed"]]
    for _, reading in readings.iterrows():
        own = [run for run in runs if (run["d_model"], run["share"]) == (reading["width"], 1)]
        passes = int(reading["passes"])
        assert math.isclose(reading["loss"], np.mean([run["losses"][passes - 1] for run in own]))
        assert reading["D"] == passes * own[0]["tokens"] and len(own) == 3


@pytest.mark.audit
@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
def test_a_pass_over_a_part_has_as_many_steps_as_the_schedule_on_the_page():
    for parts, steps in STEPS.items():
        train = data_of("multi30k", STUDY.vocab, parts).train
        assert len(token_batches(train, STUDY.max_tokens, random.Random("1:1"))) == steps
