"""Chapter 20: fits recover laws, intervals cover what they say, the grid is read correctly."""

import math
from dataclasses import replace

import numpy as np
import pytest
from saying import ran
from scipy.optimize import least_squares, minimize

from scripts.book.figures.scaling import grid_chart
from scripts.book.records import load_record
from scripts.ch19_ablations import STUDY, layer_parameters
from scripts.ch20_scaling import (
    BOUNDS,
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
    sizes_of,
)
from scripts.core.settings import build_model
from scripts.exercises.ch20 import leave_one_out

TRUTHS = {
    additive: np.array([1.2, math.log(30.0), 0.25, math.log(200.0), 0.4]),
    joint: np.array([14.0, 0.2, 15.0, 0.25]),
}
SIDES = np.geomspace(1e4, 5e5, 6), np.geomspace(3e4, 5e5, 5)
SIZE, TOKENS = (side.ravel() for side in np.meshgrid(*SIDES, indexing="ij"))
EXACT = {law: law(theta, SIZE, TOKENS) for law, theta in TRUTHS.items()}
INSIDE = (SIZE.max() > SIZE) & (TOKENS.max() > TOKENS)
LAWS = pytest.mark.parametrize("law", TRUTHS)


def noisy(law, seed, count=1, share=0.01):
    """Losses (30, count) of a true law, each off by about `share`."""
    rng = np.random.default_rng(seed)
    return EXACT[law][:, None] * np.exp(share * rng.standard_normal((len(SIZE), count)))


# Laws


def test_laws_are_what_they_say():
    np.testing.assert_allclose(EXACT[additive], 1.2 + 30 / SIZE**0.25 + 200 / TOKENS**0.4)
    size, data = (np.exp(14.0) / SIZE) ** (0.2 / 0.25), np.exp(15.0) / TOKENS
    np.testing.assert_allclose(EXACT[joint], (size + data) ** 0.25)


def test_each_exponent_is_that_of_one_thing_where_the_other_has_no_end():
    """Ten times as much of one leaves 10^-exponent of what lies above the floor."""
    ten, endless = np.array([1e5, 1e6]), np.full(2, 1e60)
    for law, theta in TRUTHS.items():
        floor = theta[0] if law is additive else 0
        for i, sides in ((-3, (ten, endless)), (-1, (endless, ten))):
            left = law(theta, *sides) - floor
            assert math.isclose(left[1] / left[0], 10 ** -theta[i], rel_tol=1e-6)


@pytest.mark.parametrize("floor", [0.2, 1.2, 2.5])
@pytest.mark.parametrize("exponents", [(0.25, 0.4), (0.6, 0.2)])
def test_laws_without_noise_are_found_again(floor, exponents):
    for law, theta in (
        (additive, [floor, math.log(30.0), exponents[0], math.log(20.0), exponents[1]]),
        (joint, [12 + floor, exponents[0], 14.0, exponents[1]]),
    ):
        losses = law(theta, SIZE, TOKENS)
        found = fit_law(law, SIZE, TOKENS, losses)
        np.testing.assert_allclose(found, theta, rtol=5e-3)
        assert missed(law, found, SIZE, TOKENS, losses) < 1e-5


@LAWS
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_other_search_finds_a_better_fit(law, seed):
    """The other search: Nelder and Mead's, without gradients, started at the truth."""
    losses = noisy(law, seed)[:, 0]

    def cost(theta):
        return np.square(np.log(law(theta, SIZE, TOKENS) / losses)).mean()

    options = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-9, "fatol": 1e-15, "adaptive": True}
    theirs = minimize(cost, TRUTHS[law], method="Nelder-Mead", options=options)
    assert cost(fit_law(law, SIZE, TOKENS, losses)) < (1 + 1e-3) * theirs.fun


def test_units_of_size_and_loss_change_what_they_should():
    losses = noisy(additive, 0)[:, 0]
    plain, bits, thousands = (
        fit_law(additive, SIZE / n, TOKENS, losses / unit)
        for n, unit in ((1, 1), (1, math.log(2)), (1e3, 1))
    )
    np.testing.assert_allclose(bits[[0]] * math.log(2), plain[[0]], rtol=0.02)
    np.testing.assert_allclose(bits[[2, 4]], plain[[2, 4]], rtol=0.02)
    np.testing.assert_allclose(thousands[[0, 2, 4]], plain[[0, 2, 4]], rtol=0.02)


@LAWS
def test_the_held_out_places_are_not_looked_at(law):
    assert held_out(law, SIZE, TOKENS, EXACT[law], INSIDE) < 1e-3
    lied = np.where(INSIDE, EXACT[law], 3 * EXACT[law])
    assert math.isclose(held_out(law, SIZE, TOKENS, lied, INSIDE), math.log(3), rel_tol=1e-3)


# Draws


@LAWS
def test_the_interval_covers_what_it_says(law):
    """For a place on the grid and one beyond it, in forty studies of three seeds."""
    places, held = (np.array([SIZE[12], 4 * SIZE.max()]), np.array([TOKENS[12], TOKENS.max()])), []
    wanted = law(TRUTHS[law], *places)
    for seed in range(40):
        draws = bootstrap(law, SIZE, TOKENS, noisy(law, seed, 3), draws=60)
        losses = np.stack([law(theta, *places) for theta in draws])
        low, high = np.quantile(losses, (0.025, 0.975), axis=0)
        held.append((low <= wanted) & (wanted <= high))
    share = np.mean(held, axis=0)
    assert (share >= 0.8).all() and share.mean() < 0.999  # below 0.8: once in 2,000


@LAWS
def test_draws_are_the_same_twice_and_as_wide_as_seeds_allow(law):
    seeds = noisy(law, 0, 3)
    first, second = (bootstrap(law, SIZE, TOKENS, seeds, draws=20) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    at = law(fit_law(law, SIZE, TOKENS, seeds.mean(axis=1)), SIZE, TOKENS)
    spread = np.stack([law(theta, SIZE, TOKENS) for theta in first]).std(axis=0) / at
    assert 0.001 < spread.mean() < 0.01 / math.sqrt(3)  # the law knows more than a place alone
    same = np.repeat(seeds[:, :1], 3, axis=1)
    assert np.ptp(bootstrap(law, SIZE, TOKENS, same, draws=3), axis=0).max() < 1e-9
    assert interval(np.arange(1001.0)) == (25.0, 975.0)


def test_an_interval_is_sure_of_a_floor_that_does_not_exist():
    """The joint law falls to zero; what the chapter prints isn't one seed's luck."""
    for seed in range(3):
        floors = bootstrap(additive, SIZE, TOKENS, noisy(joint, seed, 3), draws=60)[:, 0]
        assert interval(floors)[0] > 0.9 and np.ptp(interval(floors)) < 0.2
    assert joint(TRUTHS[joint], np.array([1e60]), np.array([1e60])) < 1e-6


def test_gains_are_the_laws():
    found = gains(additive, TRUTHS[additive], 1e5, 1e5)
    size, data = 30 / 1e5**0.25 * (1 - 2**-0.25), 200 / 1e5**0.4 * (1 - 2**-0.4)
    np.testing.assert_allclose(found, [size, data])


# Sizes and the record


def test_sizes_are_counted_in_the_model_itself():
    for width in (16, 96):
        model = build_model(replace(STUDY, d_model=width, d_ff=4 * width), STUDY.vocab)
        assert sizes_of(width) == {
            "in the layers": layer_parameters(model),
            "all": sum(p.numel() for p in model.parameters()),
        }


@pytest.fixture(scope="module")
def record():
    return load_record("grid-multi30k")


def test_the_record_is_the_whole_grid(record):
    assert record["repeat"] == "python -m scripts.studies.grid --save"
    places, seeds = grid_of(record)
    assert len(places) == len(WIDTHS) * len(PASSES) and seeds.shape[1] == 3
    assert (places.groupby("share")["tokens"].nunique() == 1).all()
    for run in record["runs"]:
        assert run["loss"] == min(run["losses"]) and len(run["losses"]) <= PASSES[run["share"]]


def test_what_a_place_says_is_counted_run_by_run(record):
    places, seeds = grid_of(record)
    for i, (_, place) in enumerate(places.iterrows()):
        key = (place["d_model"], place["share"])
        runs = [run for run in record["runs"] if (run["d_model"], run["share"]) == key]
        runs = sorted((run for run in runs if run["seed"]), key=lambda run: run["seed"])
        assert sorted(seeds[i]) == sorted(run["loss"] for run in runs)
        read = [run["tokens"] * (run["losses"].index(run["loss"]) + 1) for run in runs]
        assert math.isclose(place["read"], sum(read) / 3)
        assert place["finished"] == all(len(run["losses"]) == PASSES[key[1]] for run in runs)


def test_the_chart_draws_what_it_is_given(record):
    places, _ = grid_of(record)
    drawn = places.rename(columns={"all": "N", "tokens": "D"})
    drawn = grid_chart(drawn.assign(one=places["loss"], two=places["loss"]), "one", "two").to_dict()
    assert max(map(len, drawn["datasets"].values())) == len(places)


# What the chapter says


@pytest.fixture(scope="module")
def chapter():
    return ran("ch20")


def test_the_table_carries_the_choice(chapter):
    shown = {(row["fitted to"], row["law"]): row for row in chapter.judged}

    def said(view, column, law):
        return float(shown[view, law][column].removesuffix("%"))

    for view in ("layers alone", "all parameters", "finished runs"):
        assert said(view, "held out", "joint") < 0.5 * said(view, "held out", "additive")
        assert said(view, "typical error", "joint") < 0.4 * said(view, "typical error", "additive")
    for column in ("held out", "typical error"):
        assert said("tokens read", column, "additive") < 0.7 * said("tokens read", column, "joint")
    assert shown["all parameters", "joint"]["typical error"] == "1.2%"
    assert shown["finished runs", "joint"]["typical error"] == "0.4%"
    floors = [shown[view, "additive"]["floor"] for view in ("all parameters", "finished runs")]
    assert [floor[:4] for floor in floors] == ["0.99", "0.00"]


def test_thirty_places_tell_the_laws_apart(chapter):
    for true, row in chapter.rivals.items():
        right, *wrong = (float(row[law][:-1]) for law in (true, *{"additive", "joint"} - {true}))
        assert row["the true law wins"] == 20 and 2.9 < wrong[0] / right < 5


def test_the_grid_is_read_as_it_is(chapter, record):
    loss = chapter.places.set_index(["d_model", "share"])["loss"]
    size_alone, data_alone = (loss[16, 16] - loss[there] for there in ((96, 16), (16, 1)))
    on_all, run = loss[16, 1] - loss[96, 1], loss[96, 16] - loss[96, 8]
    gained = [f"{gain:.2f}" for gain in (data_alone, size_alone, on_all, run)]
    assert gained == ["0.85", "0.19", "1.21", "0.57"]
    errors = [chapter.by_share[share] * loss[96, share] for share in (16, 8)]
    assert round(1.96 * math.hypot(*errors), 2) == 0.07
    chance = [
        np.sqrt(np.square(of).mean()) for of in (chapter.spread, chapter.spread[chapter.finished])
    ]
    assert [f"{share:.1%}" for share in chance] == ["0.5%", "0.3%"]

    def ends(part, row):
        return [float(number) for number in chapter.twice[part].iloc[row][6:-1].split(" to ")]

    assert not ends("a sixteenth", 1)[0] <= run <= ends("a sixteenth", 1)[1]
    assert ends("all, by the finished runs", 0)[0] > ends("all", 0)[1]  # no overlap
    runs = [run for run in record["runs"] if run["seed"]]
    best = [run["losses"].index(run["loss"]) + 1 for run in runs]
    assert (min(best), max(best)) == (7, 18)
    small = [run for run in runs if (run["d_model"], run["share"]) == (96, 16)]
    at = [(run["losses"].index(run["loss"]), len(run["losses"]) - 1) for run in small]
    assert all(last - best == 3 for best, last in at)
    assert all(
        run["losses"][last] > run["loss"] + 0.1 for run, (_, last) in zip(small, at, strict=True)
    )
    trained = [[run["trained"][i] for i in pair] for run, pair in zip(small, at, strict=True)]
    assert np.mean(trained, axis=0).round(1).tolist() == [2.8, 1.8]
    tokens = chapter.places.groupby("share")["tokens"].first()
    assert [f"{tokens[share] * PASSES[share] / 1e6:.1f}" for share in (1, 4)] == ["4.3", "2.1"]
    assert {*chapter.places["share"][chapter.finished]} == {1, 2, 4}


def test_the_additive_law_does_not_lose_by_a_bad_start(chapter):
    N, D, mean = (chapter.places[name].to_numpy(float) for name in ("all", "tokens", "loss"))
    found, rng = fit_law(additive, N, D, mean), np.random.default_rng(0)
    low, high = BOUNDS[additive]
    for _ in range(60):
        start = rng.uniform((0.1, 0, 0.05, 0, 0.05), (2.5, 12, 1.5, 12, 1.5))

        def errors(theta):
            return np.log(additive(theta, N, D) / mean)

        other = least_squares(errors, start, bounds=(low, high), x_scale="jac")
        assert 2 * other.cost > (1 - 1e-6) * np.square(errors(found)).sum()


def test_a_floor_under_the_joint_law_stays_at_zero(chapter):
    N, D, mean = (chapter.places[name].to_numpy(float) for name in ("all", "tokens", "loss"))

    def errors(theta):
        return np.log((theta[4] + joint(theta[:4], N, D)) / mean)

    bounds = ([0, 0.01, 0, 0.01, 0], [60, 3, 60, 3, 3])
    found = least_squares(errors, (15, 0.2, 15, 0.2, 0.9), bounds=bounds, x_scale="jac").x
    assert found[4] < 1e-3
    np.testing.assert_allclose(found[:4], fit_law(joint, N, D, mean), rtol=1e-2)


def test_outside_is_harder_than_inside(chapter):
    N, D, mean = (chapter.places[name].to_numpy(float) for name in ("all", "tokens", "loss"))

    def fit(x, losses):
        theta = fit_law(joint, N[x], D[x], losses)
        return lambda hidden: joint(theta, N[hidden], D[hidden])

    inside = leave_one_out(np.arange(len(mean)), mean, fit)
    outside = held_out(joint, N, D, mean, chapter.inside)
    assert [f"{share:.1%}" for share in (inside, outside)] == ["1.5%", "2.5%"]
