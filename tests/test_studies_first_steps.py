"""Chapter 5's study: its record is whole, and one of its runs is repeated from the start."""

import pytest
import torch

from scripts.book.records import load_record
from scripts.studies.first_steps import LAST, SEEDS, plan_runs, reverse
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
