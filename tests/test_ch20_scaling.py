"""Chapter 20: fits recover laws, draws are as wide as seeds allow, the grid is read correctly."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from scripts import ch20_scaling as ch20
from scripts.book.records import load_record
from scripts.ch20_scaling import (
    PASSES,
    WIDTHS,
    additive,
    bootstrap,
    fit_law,
    gains,
    grid_of,
    held_out,
    interval,
    joint,
    missed,
)

TRUTHS = {
    additive: np.array([1.2, math.log(30.0), 0.25, math.log(200.0), 0.4]),
    joint: np.array([14.0, 0.2, 15.0, 0.25]),
}
SIDES = np.geomspace(1e4, 5e5, 6), np.geomspace(3e4, 5e5, 5)
SIZE, TOKENS = (side.ravel() for side in np.meshgrid(*SIDES, indexing="ij"))
EXACT = {law: law(theta, SIZE, TOKENS) for law, theta in TRUTHS.items()}
LAWS = pytest.mark.parametrize("law", TRUTHS)


@pytest.fixture(scope="module")
def record():
    return load_record("grid-multi30k")


# Laws


def test_laws_are_what_they_say():
    np.testing.assert_allclose(EXACT[additive], 1.2 + 30 / SIZE**0.25 + 200 / TOKENS**0.4)
    size, data = (np.exp(14.0) / SIZE) ** (0.2 / 0.25), np.exp(15.0) / TOKENS
    np.testing.assert_allclose(EXACT[joint], (size + data) ** 0.25)
    size, data = 30 / 1e5**0.25 * (1 - 2**-0.25), 200 / 1e5**0.4 * (1 - 2**-0.4)
    np.testing.assert_allclose(gains(additive, TRUTHS[additive], 1e5, 1e5), [size, data])


@pytest.mark.parametrize("floor", [0.2, 2.5])
def test_laws_without_noise_are_found_again(floor):
    for law, theta in (
        (additive, [floor, math.log(30.0), 0.6, math.log(20.0), 0.2]),
        (joint, [12 + floor, 0.6, 14.0, 0.2]),
    ):
        losses = law(theta, SIZE, TOKENS)
        fitted = fit_law(law, SIZE, TOKENS, losses)
        np.testing.assert_allclose(fitted, theta, rtol=5e-3)
        assert missed(law, fitted, SIZE, TOKENS, losses) < 1e-5


@LAWS
def test_no_other_search_finds_a_better_fit(law):
    """The other search: Nelder and Mead's, without gradients, started at the truth."""
    losses = EXACT[law] * np.exp(0.01 * np.random.default_rng(1).standard_normal(len(SIZE)))

    def cost(theta):
        return np.square(np.log(law(theta, SIZE, TOKENS) / losses)).mean()

    options = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-9, "fatol": 1e-15, "adaptive": True}
    simplex = minimize(cost, TRUTHS[law], method="Nelder-Mead", options=options)
    fitted = fit_law(law, SIZE, TOKENS, losses)
    assert cost(fitted) < (1 + 1e-3) * simplex.fun
    assert math.isclose(missed(law, fitted, SIZE, TOKENS, losses), math.sqrt(cost(fitted)))


@LAWS
def test_the_held_out_places_are_not_looked_at(law):
    inside = (SIZE.max() > SIZE) & (TOKENS.max() > TOKENS)
    tripled = np.where(inside, EXACT[law], 3 * EXACT[law])
    error = held_out(law, SIZE, TOKENS, tripled, inside)
    assert math.isclose(error, math.log(3), rel_tol=1e-3)


# Draws


def test_draws_scatter_like_means_of_new_seeds(monkeypatch):
    """One place, and a law that is its loss: the draws' spread is the standard error, s/√S."""

    def flat(theta, N, D):
        return theta[0] * np.ones(len(N))

    monkeypatch.setitem(ch20.STARTS, flat, [(3.0,)])
    monkeypatch.setitem(ch20.BOUNDS, flat, ([0], [10]))
    seeds, place = np.array([[2.9, 3.0, 3.3]]), np.ones(1)
    draws = bootstrap(flat, place, place, seeds, draws=400)[:, 0]
    assert abs(draws.std() / (seeds.std(ddof=1) / math.sqrt(3)) - 1) < 0.1
    assert abs(draws.mean() - seeds.mean()) < 0.02
    np.testing.assert_array_equal(draws[:5], bootstrap(flat, place, place, seeds, 5)[:, 0])
    assert interval(np.arange(1001.0)) == (25.0, 975.0)


# The record


def test_what_a_place_says_is_counted_run_by_run(record):
    places, seeds = grid_of(record)
    assert len(places) == len(WIDTHS) * len(PASSES) and seeds.shape[1] == 3
    for i, (_, place) in enumerate(places.iterrows()):
        key = (place["d_model"], place["share"])
        runs = [run for run in record["runs"] if (run["d_model"], run["share"]) == key]
        runs = [run for run in runs if run["seed"]]
        assert sorted(seeds[i]) == sorted(min(run["losses"]) for run in runs)
        read = [run["tokens"] * (run["losses"].index(run["loss"]) + 1) for run in runs]
        assert math.isclose(place["read"], sum(read) / 3)
        assert place["finished"] == all(len(run["losses"]) == PASSES[key[1]] for run in runs)
