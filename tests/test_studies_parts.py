"""The study of chapter 4: what it plans, what it calls spared, and one short training of it."""

from dataclasses import asdict, replace

import torch

from scripts.book.records import load_record
from scripts.ch04_encoder_decoder import PARTS
from scripts.studies import parts
from scripts.studies.runner import Plan, these

SETTING = asdict(replace(parts.Setting(), early=2, late=3, words=4))


def wanted(runs):
    plan = Plan(runs)
    parts.plan_runs(plan)
    return plan


def test_first_each_part_alone_then_all_that_can_be_spared():
    first = wanted([])
    assert len(first) == 3 * (1 + len(PARTS)) and first[0] == {"without": [], "seed": 0}
    shares = {"positions": 0.97, "LayerNorms": 0.96}
    for worst, both in ((0.96, ["positions", "LayerNorms"]), (0.9, ["positions"])):
        runs = [
            run | {"late": {"right": {"10": shares.get("".join(run["without"]), 0)}}}
            for run in first
        ]
        these(runs, without=["LayerNorms"])[1]["late"]["right"]["10"] = worst
        assert parts.spared(runs) == both
        last = wanted(runs)[len(first) :]
        assert last == [{"without": both, "seed": seed} for seed in parts.SEEDS]


def test_a_training_is_judged_twice_by_length():
    before = torch.get_default_dtype()
    try:
        run = parts.work(SETTING, {"without": ["cross-attention"], "seed": 1})
    finally:
        torch.set_default_dtype(before)
    assert run["early"]["loss"] > run["late"]["loss"] > 0
    for time in ("early", "late"):
        assert [*run[time]["right"]] == ["4", "5", "6", "7", "8", "9", "10"]


def test_the_record_is_complete():
    record = load_record("parts-reversal")
    assert record["setting"] == asdict(parts.Setting())
    assert not [run for run in wanted(record["runs"]) if not these(record["runs"], **run)]
