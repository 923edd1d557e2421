"""Chapter 5's study: its record is whole, and one of its runs is repeated from the start."""

import pytest
import torch

from scripts.book.records import load_record
from scripts.studies.first_steps import ALL_SMALL, LAST, RATES, SEEDS, WARMUP, plan_runs, reverse
from scripts.studies.runner import Plan, these

RECORD = load_record("first-steps-reversal")
RUNS = RECORD["runs"]
OUTCOMES = ("loss", "curve", "seconds", "commit")


def test_the_record_holds_the_plan_from_one_commit():
    plan = Plan(RUNS)
    plan_runs(plan)
    assert all(len(these(RUNS, **task)) == 1 for task in plan) and len(RUNS) == len(plan)
    assert {run["commit"] for run in RUNS} == {RECORD["commit"]}
    assert len(these(RUNS, small="", norm_first=False, rate=0.004, warmup=1)) >= len(SEEDS)


def mean(small, norm_first, rate, warmup, residual=True):
    cell = {"small": small, "norm_first": norm_first, "rate": rate, "warmup": warmup}
    runs = these(RUNS, **cell, residual=residual)
    return sum(run["loss"] for run in runs) / len(runs)


def test_the_record_says_what_chapter_5_says():
    gain = {
        (pre, rate): mean("", pre, rate, 1) - mean("", pre, rate, WARMUP)
        for pre in (False, True)
        for rate in RATES
    }
    assert 0.3 < gain[False, 0.004] < 0.5 and -0.3 < gain[True, 0.004] < -0.1
    assert abs(gain[True, 0.008] - gain[False, 0.004]) < 0.15
    best = {
        (pre, warmup): min(mean("", pre, rate, warmup) for rate in RATES)
        for pre in (False, True)
        for warmup in (1, WARMUP)
    }
    assert abs(best[False, 1] - best[False, WARMUP]) < 0.1
    assert 0 < best[True, 1] - best[True, WARMUP] < 0.2
    for small in ("", ALL_SMALL):
        for pre in (False, True):
            assert mean(small, pre, 0.001, WARMUP, residual=False) > 2
    assert mean(ALL_SMALL, False, 0.004, 1) < 0.3 < 1.9 < mean("", False, 0.004, 1)


def test_every_seed_agrees_with_what_chapter_5_runs_live():
    """Each run beside those with the same seed; the chapter asserts the same of one."""
    for seed in SEEDS:
        place = {"seed": seed, "rate": 0.004, "residual": True}
        end = {
            (run["small"], run["norm_first"], run["warmup"]): run["loss"]
            for run in these(RUNS, **place)
        }
        assert end["", True, 1] + 0.5 < end["", False, WARMUP] < end["", False, 1] - 0.1
        assert max(end[ALL_SMALL, False, 1], end[ALL_SMALL, True, 1]) < end["", True, 1] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, -1])
def test_a_runs_first_steps_are_repeated(number):
    before = torch.get_default_dtype()
    run = RUNS[number]
    task = {name: value for name, value in run.items() if name not in OUTCOMES}
    try:
        assert reverse({"steps": LAST}, task)["loss"] == pytest.approx(run["curve"][0], abs=0.02)
    finally:
        torch.set_default_dtype(before)
