"""Chapter 5's study: its record is whole, and one of its runs is repeated from the start."""

from itertools import product

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
    best = {}
    for small, pre in product(("", ALL_SMALL), (False, True)):
        without, warm = ([mean(small, pre, rate, w) for rate in RATES] for w in (1, WARMUP))
        best[small, pre] = min(without)
        assert abs(min(without) - min(warm)) < 0.1 and without[0] < warm[0] < without[0] + 0.35
        gain = {("", False): 0.4, (ALL_SMALL, False): 1.3, ("", True): 0.2, (ALL_SMALL, True): 0.0}
        assert without[2] - warm[2] == pytest.approx(gain[small, pre], abs=0.05)
        assert 2.04 < mean(small, pre, 0.001, WARMUP, residual=False) < 2.14
    assert best["", False] == pytest.approx(1.5, abs=0.05)
    assert best["", False] - best["", True] == pytest.approx(0.9, abs=0.05)
    assert best[ALL_SMALL, False] == pytest.approx(0.2, abs=0.05)
    assert abs(best[ALL_SMALL, False] - best[ALL_SMALL, True]) < 0.05
    for rate, warmup in product(RATES, (1, WARMUP)):
        assert mean("", True, rate, warmup) + 0.3 < mean("", False, rate, warmup)


def test_the_attentions_alone_help_most_but_do_not_reach_pre_norm():
    ends = {part: mean(part, False, 0.004, 1) for part in ("", *ALL_SMALL.split(), ALL_SMALL)}
    said = {"": 2.1, "attn": 1.1, "feed_forward": 1.9, "generator": 1.9, ALL_SMALL: 0.2}
    assert ends == pytest.approx(said, abs=0.06)
    worst_of_pre_norm = max(
        run["loss"] for run in these(RUNS, small="", norm_first=True, rate=0.004, warmup=1)
    )
    assert min(run["loss"] for run in these(RUNS, small="attn")) > worst_of_pre_norm


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
