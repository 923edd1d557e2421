"""Chapter 20: laws are found again, bands cover what they say, and the record is fitted as told."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from saying import ran

from scripts.book.figures.scaling import data_chart, floor_chart, law_chart
from scripts.book.records import load_record
from scripts.ch19_ablations import layer_parameters
from scripts.ch20_scaling import (
    BEYOND,
    FLOORS,
    NO_FLOOR,
    ONE_PASS,
    bootstrap_law,
    fit_power_law,
    held_out,
    law_curve,
    law_of,
    lines_above,
    misses,
    part_indices,
    power_law,
    scaling_points,
    sized,
)
from scripts.engine.settings import build_model

TRUE_LAW = torch.tensor([2.0, math.log(50.0), 0.3], dtype=torch.float64)
SIZES = torch.logspace(4, 6.2, 9, dtype=torch.float64)


def noisy(law, share=0.01, seed=1, x=SIZES):
    rng = torch.Generator().manual_seed(seed)
    return power_law(law, x) * (share * torch.randn(len(x), generator=rng, dtype=x.dtype)).exp()


# Laws


def test_a_law_is_what_it_says():
    torch.testing.assert_close(power_law(TRUE_LAW, SIZES), 2 + 50 * SIZES**-0.3)
    two = torch.stack([TRUE_LAW, TRUE_LAW + 1])
    assert torch.equal(power_law(two, SIZES)[0], power_law(TRUE_LAW, SIZES))


def test_laws_without_noise_are_found_again_many_at_once():
    laws = torch.tensor(
        [[2.0, 50.0, 0.3], [1.0, 9.0, 0.1], [0.5, 4000.0, 0.8], [0.0, 9.0, 0.1]],
        dtype=torch.float64,
    )
    theta = torch.stack([laws[:, 0], laws[:, 1].log(), laws[:, 2]], dim=1)
    losses = power_law(theta, SIZES)
    found = fit_power_law(SIZES, losses)
    assert (misses(found, SIZES, losses) < 1e-3).all()
    torch.testing.assert_close(found[:, 0], laws[:, 0], atol=0.02, rtol=0)
    torch.testing.assert_close(found[:, 2], laws[:, 2], atol=0, rtol=0.02)
    torch.testing.assert_close(found[3], theta[3])  # a floor of 0 is tried


def test_above_the_true_floor_the_line_is_exact():
    law = lines_above(torch.tensor([[2.0]]), SIZES, power_law(TRUE_LAW, SIZES)[None])
    torch.testing.assert_close(law[0, 0], TRUE_LAW)


def by_lbfgs(start, x, losses):
    """The least squares of log L by PyTorch's LBFGS, from a start nearby."""
    theta = (start + start.new_tensor([0.05, -0.05, 0.01])).requires_grad_()
    descent = torch.optim.LBFGS(
        [theta],
        max_iter=500,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-14,
        tolerance_change=1e-16,
    )

    def again():
        descent.zero_grad()
        loss = (losses.log() - power_law(theta, x).log()).square().sum()
        loss.backward()
        return loss

    for _ in range(20):
        descent.step(again)
    return theta.detach()


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_the_fit_is_as_good_as_lbfgs(seed):
    losses = noisy(TRUE_LAW, seed=seed)
    ours = fit_power_law(SIZES, losses[None])[0]
    theirs = by_lbfgs(ours, SIZES, losses)
    assert ours[0] > 0  # not at the edge
    assert misses(ours, SIZES, losses) < 1.001 * misses(theirs, SIZES, losses)
    torch.testing.assert_close(power_law(ours, SIZES), power_law(theirs, SIZES), rtol=1e-3, atol=0)


def test_units_of_size_and_loss_change_what_they_should():
    losses = noisy(TRUE_LAW)
    plain, bits = fit_power_law(SIZES, torch.stack([losses, losses / math.log(2)]))
    thousands = fit_power_law(SIZES / 1000, losses[None])[0]
    torch.testing.assert_close(plain[2], bits[2])
    torch.testing.assert_close(plain[[0, 2]], thousands[[0, 2]])
    torch.testing.assert_close(bits[0] * math.log(2), plain[0])


def test_three_places_are_too_few():
    with pytest.raises(ValueError, match="3 places"):
        fit_power_law(SIZES[:3], SIZES[None, :3])


def test_a_line_through_a_law_with_a_floor_has_the_wrong_slope_and_breaks_the_floor():
    line = fit_power_law(SIZES, power_law(TRUE_LAW, SIZES)[None], NO_FLOOR)[0]
    assert line[0] == 0 and 0 < line[2] < 0.5 * TRUE_LAW[2]
    assert power_law(line, torch.tensor([1e9], dtype=torch.float64)) < 2.0
    left_over = power_law(TRUE_LAW, SIZES) / power_law(line, SIZES) - 1
    assert left_over[0] > 0 > left_over[4] and left_over[-1] > 0  # an arc


def test_the_held_out_place_is_not_looked_at():
    losses = power_law(TRUE_LAW, SIZES)
    assert held_out(SIZES, losses[None]).abs() < 2e-3
    lied = losses.clone()
    lied[-1] *= 3
    told = held_out(SIZES, torch.stack([losses, lied]))
    torch.testing.assert_close(1 + told[1], 3 * (1 + told[0]))
    assert held_out(SIZES, losses[None], NO_FLOOR) > 0.02


# Draws


def test_the_band_covers_what_it_says():
    held, places = [], torch.stack([SIZES[4], SIZES[-1], 10 * SIZES[-1]])
    wanted = power_law(TRUE_LAW, places)
    for seed in range(100):
        low, high = bootstrap_law(SIZES, noisy(TRUE_LAW, seed=seed), 200, seed=seed).band(places)
        held.append((low <= wanted) & (wanted <= high))
    share = torch.stack(held).double().mean(dim=0)
    assert (share >= 0.85).all()  # a true 95% gives less once in 10,000 times
    assert 0.9 < share.mean() < 0.94


def test_the_band_is_no_wider_than_it_must_be():
    """Against the scatter of fits to truly new data, which a bootstrap only imitates."""
    widths, fits = [], []
    for seed in range(100):
        fit = bootstrap_law(SIZES, noisy(TRUE_LAW, seed=seed), 100, seed=seed)
        low, high = fit.band(SIZES)
        widths.append(high - low)
        fits.append(fit.curve(SIZES))
    true_width = torch.stack(fits).quantile(0.975, dim=0) - torch.stack(fits).quantile(0.025, dim=0)
    ratio = torch.stack(widths).mean(dim=0) / true_width
    assert (ratio > 0.75).all() and (ratio < 1.35).all()


def test_the_bootstrap_is_the_same_twice_and_holds_its_own_fit():
    losses = noisy(TRUE_LAW)
    first, second = (bootstrap_law(SIZES, losses, draws=100) for _ in range(2))
    assert torch.equal(first.draws, second.draws)
    assert not torch.equal(first.draws, bootstrap_law(SIZES, losses, 100, seed=1).draws)
    low, high = first.band(SIZES)
    assert (low <= first.curve(SIZES)).all() and (first.curve(SIZES) <= high).all()
    for number in (0, 2):
        assert first.interval(number)[0] < first.theta[number] < first.interval(number)[1]
    torch.testing.assert_close(first.residuals, losses / first.curve(SIZES) - 1)


# The record


@pytest.fixture(scope="module")
def record():
    return load_record("scaling-multi30k")


def test_the_record_is_of_the_chapters_sizes(record):
    assert record["repeat"].startswith("python -m scripts.studies.ablations")
    base = {name: getattr(ONE_PASS, name) for name in record["config"]}
    assert record["config"] == base | {"corpus": "multi30k"}
    by_width = {(p["d_model"], p["seed"]): p for p in record["sizes"]}
    for (width, _), point in by_width.items():
        model = build_model(replace(ONE_PASS, **sized(width)), ONE_PASS.vocab)
        assert point["layer_parameters"] == layer_parameters(model)
        assert point["parameters"] == sum(p.numel() for p in model.parameters())
        assert point["lr"] == sized(width)["lr"] and point["loss"] == min(point["losses"])


def test_laws_are_fitted_to_means(record):
    for kind, column in (("sizes", "parameters"), ("once", "train_tokens")):
        points = scaling_points(record, kind, column)
        assert len(points) == len(record[kind]) and points["x"].is_monotonic_increasing
        fit = law_of(points, draws=30)
        means = points.groupby("x")["loss"].mean()
        assert fit.x.tolist() == means.index.tolist() and fit.losses.tolist() == means.tolist()


def test_a_curve_reaches_as_far_as_it_says():
    fit = bootstrap_law(SIZES, noisy(TRUE_LAW), draws=30)
    curve = law_curve(fit, beyond=4.0)
    assert math.isclose(curve["x"].max(), 4 * SIZES[-1]) and curve["x"].min() < SIZES[0]
    measured = curve["part"] == BEYOND[0]
    assert (curve["x"][measured] <= SIZES[-1].item()).all()
    assert (curve["x"][~measured] > SIZES[-1].item()).all()
    assert (curve["low"] <= curve["high"]).all()


def test_parts_of_a_corpus_lie_inside_each_other():
    parts = [part_indices(100, share) for share in (1, 2, 4, 8)]
    assert [len(part) for part in parts] == [100, 50, 25, 12]
    assert all(set(small) < set(large) for large, small in zip(parts, parts[1:], strict=False))
    assert all(part == sorted(part) for part in parts)
    assert part_indices(100, 4) == parts[2] != list(range(25))


def test_charts_draw_what_they_are_given():
    fit = bootstrap_law(SIZES, noisy(TRUE_LAW), draws=30)
    points = pd.DataFrame({"x": SIZES, "loss": fit.losses, "residual": fit.residuals})
    curve = law_curve(fit)
    drawn = law_chart(points, curve).to_dict()
    assert sorted(map(len, drawn["datasets"].values())) == [1, len(points), len(curve)]
    errors = pd.DataFrame({"floor": FLOORS, "error": FLOORS + 0.01, "counted": "all"})
    assert len(next(iter(floor_chart(errors).to_dict()["datasets"].values()))) == len(FLOORS)
    both = pd.concat([points.assign(how=how) for how in ("once", "repeated")])
    drawn = data_chart(both[["x", "loss", "how"]], curve[["x", "loss"]]).to_dict()
    assert sorted(map(len, drawn["datasets"].values())) == [2 * len(points), len(curve)]


# What the chapter says.


def test_what_the_chapter_says_of_sizes():
    said = ran("ch20")
    small, full = said.size_fit, said.all_fit
    assert small.x.tolist() == said.counts and (small.losses.diff() < 0).all()
    assert small.theta[0] == 0 and said.without_largest[0] == 0 and 0.5 < full.theta[0] < 0.7
    assert full.residuals.abs().max() < 0.01 < small.residuals.abs().max() < 0.02
    assert full.theta[2] > 1.5 * small.theta[2] and 0.8 < 1 - small.x[0] / full.x[0] < 0.82
    printed, rounding, refit = (one["billion parameters"] for one in said.best_for.values())
    assert printed < rounding < refit / 1.8


def test_what_the_chapter_says_of_data():
    said = ran("ch20")
    once, repeated = said.means["once"], said.means["repeated"]
    assert abs(repeated[3] - once[0]) < 0.05  # no captions were missing,
    assert once[3] > repeated[3] + 1.5  # but steps were
    assert abs(repeated[4] - once[0]) < 0.03  # a sixteenth
    assert repeated[6] > once[0] + 0.9  # here more passes don't help
    assert said.once_points["x"].max() == 539_074
    assert said.once_fit.theta[0] == 0 and said.once_fit.residuals.abs().max() > 0.04
    assert said.gap > 0.4 and said.shipped["parameters"] > 10 * said.tokens
    assert said.shipped["config"]["dropout"] == 0.2
