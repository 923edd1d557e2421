"""The study of chapter 4: what it plans, what it calls spared, and one short training of it."""

import pytest
import torch

from scripts.book.records import load_record
from scripts.ch04_encoder_decoder import PARTS
from scripts.studies import parts
from scripts.studies.runner import Plan, these

SETTING = parts.SETTING | {"words": 4}


def wanted(runs):
    plan = Plan(runs)
    parts.plan_runs(plan)
    return plan


def test_first_each_part_alone_then_all_that_can_be_spared_then_what_is_between():
    first = wanted([])
    assert len(first) == 3 * (1 + len(PARTS))
    assert first[0] == {"without": [], "steps": 800, "seed": 0}
    shares = {"positions": 0.97, "LayerNorms": 0.96}
    for worst, together, longer in (
        (0.96, ["positions", "LayerNorms"], []),
        (0.9, ["positions"], ["LayerNorms"]),
    ):
        runs = [run | {"right": {"10": shares.get("".join(run["without"]), 0)}} for run in first]
        these(runs, without=["LayerNorms"])[1]["right"]["10"] = worst
        rest = wanted(runs)[len(first) :]
        assert rest[:3] == [{"without": together, "steps": 800, "seed": n} for n in parts.SEEDS]
        assert rest[3:] == [{"without": [p], "steps": 1_600, "seed": 1} for p in longer]


def test_a_training_is_judged_by_length():
    before = torch.get_default_dtype()
    try:
        task = {"without": ["cross-attention"], "steps": 3, "seed": 1}
        run = parts.work(SETTING, task)
    finally:
        torch.set_default_dtype(before)
    assert task.items() <= run.items() and run["loss"] > 0
    assert [*run["right"]] == ["4", "5", "6", "10"]


def test_the_record_is_complete():
    record = load_record("parts-reversal")
    assert record["setting"] == parts.SETTING
    assert not [run for run in wanted(record["runs"]) if not these(record["runs"], **run)]


def test_what_chapter_4_says_of_the_record():
    runs = load_record("parts-reversal")["runs"]
    worst = {part: min(parts.shares(runs, [part])) for part in PARTS}
    longer = {run["without"][0]: run["right"]["10"] for run in runs if run["steps"] == 1_600}
    said = {"residuals": (0.91, 1.0), "encoder self-attention": (0.62, 0.92)}
    for part, figures in said.items():
        assert (worst[part], longer[part]) == pytest.approx(figures, abs=0.006)
    assert all(longer[part] > worst[part] for part in said) and len(said) == len(PARTS) - 7
    together = ["several heads", "LayerNorms", "decoder self-attention", "feed-forward"]
    assert min(worst[part] for part in together) > 0.99
    assert parts.shares(runs, together) == pytest.approx([0.81, 0.94, 1], abs=0.006)
    assert {part for part in PARTS if worst[part] == 0} == {
        "positions",
        "causal mask",
        "cross-attention",
    }
    losses = {part: max(run["loss"] for run in these(runs, without=[part])) for part in PARTS}
    assert losses["cross-attention"] == pytest.approx(2.30, abs=0.05)
    assert losses["causal mask"] < max(run["loss"] for run in these(runs, without=[]))
