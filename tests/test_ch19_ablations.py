"""Chapter 19: operations do what they say, noise is judged."""

import math
from dataclasses import asdict

import pytest
import torch
from scipy.stats import t as student
from torch.nn import functional as F

from scripts.book.records import load_record
from scripts.book.verdict import pooled_spread, verdicts
from scripts.ch04_encoder_decoder import SublayerConnection
from scripts.ch06_training import LabelSmoothing, batch_loss
from scripts.ch19_ablations import (
    PATIENT,
    STUDY,
    STUDY_ROWS,
    TABLE3_PERPLEXITIES,
    counted,
    drop_positions,
    drop_residuals,
    learn_positions,
    loss_on,
    patient,
    two_sentences,
)
from scripts.core.settings import known_settings


@pytest.fixture(scope="module")
def record():
    return load_record("table3-multi30k")


# Operations


@pytest.mark.parametrize(
    "sides, blind", [(("src", "tgt"), True), (("src",), True), (("tgt",), False)]
)
def test_without_positions_the_source_is_a_bag_of_words(sides, blind):
    model = patient(lambda model: drop_positions(model, sides))
    shuffled = two_sentences([3, 0, 6, 2, 5, 1, 4])
    assert (abs(loss_on(model, shuffled) - loss_on(model, two_sentences())) < 1e-10) == blind


def test_learned_positions_learn_where_there_are_tokens():
    model = patient(learn_positions)
    batch_loss(model, two_sentences(), LabelSmoothing(0.1))[0].backward()
    for embed, length in ((model.src_embed, 7), (model.tgt_embed, 6)):
        reached = embed[1].pe.grad.abs().sum(dim=-1) > 0
        assert reached.tolist() == [True] * length + [False] * (len(reached) - length)
        assert embed[1].dropout.p == PATIENT.dropout


@pytest.mark.parametrize("norm_first", [True, False])
def test_without_the_residual_only_the_sublayer_is_left(norm_first):
    model = patient(drop_residuals, norm_first=norm_first)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    connections = [m for m in model.modules() if isinstance(m, SublayerConnection)]
    assert len(connections) == 2 * 2 + 2 * 3
    for bare in connections:
        normed = F.layer_norm(x, (32,), bare.norm.weight, bare.norm.bias, bare.norm.eps)
        sine = F.layer_norm(x.sin(), (32,), bare.norm.weight, bare.norm.bias, bare.norm.eps)
        torch.testing.assert_close(bare(x, torch.sin), normed.sin() if norm_first else sine)


# Noise


def test_the_spread_is_that_within_rows():
    assert pooled_spread([[1.0, 3.0], [10.0, 12.0], [5.0]]) == (math.sqrt(2.0), 2)
    with pytest.raises(ValueError, match="twice"):
        pooled_spread([[1.0], [2.0], []])


def test_a_verdict_is_students_t_over_the_pooled_spread_and_holms_steps():
    rows = {"base": [1.0, 3.0], "far": [12.0, 14.0], "one run": [14.0], "other": [12.5, 14.5]}
    rivals = {"far": "base", "one run": "base", "other": "far"}
    judged = verdicts(rows, rivals)
    assert list(judged) == ["far", "one run", "other"]
    spread = math.sqrt(2.0)  # three rows of two runs, each 2.0 apart: 3 degrees of freedom
    assert judged["far"].t == pytest.approx(11 / spread)
    assert judged["one run"].t == pytest.approx(12 / (spread * math.sqrt(1.5)))
    assert (judged["other"].difference, judged["other"].told) == (0.5, False)
    for row in judged.values():  # the printed table: 3.182 is exceeded once in 20 times
        assert row.p == pytest.approx(2 * student.sf(row.t, 3))
        reach = (row.high - row.difference) / (row.difference / row.t)
        assert reach == pytest.approx(3.182, abs=1e-3)
        assert row.low + row.high == pytest.approx(2 * row.difference)
    level = 2.5 * judged["one run"].p  # the second step asks for level/2; Bonferroni for level/3
    assert [row.told for row in verdicts(rows, rivals, level).values()] == [True, True, False]


# The record


def test_the_record_is_of_the_study_in_the_chapter(record):
    setting = asdict(STUDY) | {"corpus": "multi30k"}
    recorded = known_settings(record["setting"])
    assert {name: recorded[name] for name in setting} == setting
    dropouts = {name for name in counted(record["runs"]) if name.startswith("dropout")}
    assert {*counted(record["runs"])} - dropouts == {*STUDY_ROWS}
    lettered = {name for name, row in STUDY_ROWS.items() if row.group in "ABCDE"}
    assert set(TABLE3_PERPLEXITIES) == lettered | {"dropout 0.1", "dropout 0.2"}


def test_runs_that_diverged_and_those_of_a_sweep_do_not_count():
    runs = [{"row": "a", "dropout": 0.0, "seed": seed, "loss": 2.0 + seed} for seed in range(4)]
    runs += [{"row": "a", "dropout": 0.1, "seed": 1, "loss": 5.0}]
    runs += [{"row": "b", "dropout": 0.0, "seed": 1, "loss": None}]
    assert counted(runs) == {"a": [3.0, 4.0, 5.0], "dropout 0.1": [5.0]}
