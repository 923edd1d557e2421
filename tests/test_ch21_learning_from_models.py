"""Chapter 21: written corpora keep what people wrote; losses and their gradients are right."""

import math
import os
import re
from statistics import mean

import pytest
import torch

from scripts import ROOT
from scripts.book.records import load_record, sha256
from scripts.ch07_multi30k import encode_pairs
from scripts.ch21_learning_from_models import (
    back_translated,
    risk_of_candidates,
    shuffled_words,
)
from scripts.core.models import DEFAULT_MODEL
from scripts.evaluate import main as evaluate
from scripts.studies.runner import Plan
from scripts.studies.word_targets import RATE, SEEDS, TARGETS, plan_runs

FIRST, SECOND = "test_2016_flickr", "test_2017_flickr"


# Distillation by words


def test_shuffled_words_keep_the_labels_share_and_deal_the_others_anew():
    q, labels = torch.rand(5, 7).softmax(dim=-1), torch.tensor([0, 6, 3, 3, 1])
    dealt, at_label = shuffled_words(q, labels), torch.nn.functional.one_hot(labels, 7).bool()
    torch.testing.assert_close(dealt.sort(dim=1)[0], q.sort(dim=1)[0])
    assert torch.equal(dealt == q, at_label)  # no other word keeps its own


def test_all_words_lead_in_every_seed_on_record_and_each_has_its_best_rate():
    """The chapter asserts a lead of 2 in its own run, and quotes those of eight seeds."""
    runs = load_record("word-targets-sample")["runs"]
    plan = Plan(runs)
    plan_runs(plan)
    bleu = {(run["targets"], run["tau"], run["lr"], run["seed"]): run["bleu"] for run in runs}
    assert len(bleu) == len(runs) == len(plan) and len({run["commit"] for run in runs}) == 1
    all_1, all_2, one, shuffled = ("all words", 1), ("all words", 2), ("one word", 1), TARGETS[1]

    def leads(row, rival):
        return [bleu[*row, RATE, seed] - bleu[*rival, RATE, seed] for seed in SEEDS]

    for row, rival, quoted in (
        (all_2, shuffled, [15, 24]),
        (all_2, one, [5, 24]),
        (all_1, one, [2, 11]),
    ):
        found = leads(row, rival)
        assert [round(min(found)), round(max(found))] == quoted
    rates = (1 / 2, 2)
    for row in TARGETS:
        assert all(bleu[*row, rate * RATE, 1] < bleu[*row, RATE, 1] for rate in rates)
    for row, quoted in ((all_2, [-0.4, -10.2]), (all_1, [1.4, 9.1])):
        by = [bleu[*row, rate * RATE, 1] - bleu[*one, rate * RATE, 1] for rate in rates]
        assert [round(lead, 1) for lead in by] == quoted


# Written corpora


def test_back_translation_keeps_every_target_and_the_pairs_that_are_known(forty_pairs):
    before, known, asked = forty_pairs.corpus["train"], {0, 3, 17, 39}, []

    def reverse(texts):
        asked.extend(texts)
        return [text.upper() for text in texts]

    data = back_translated(forty_pairs, known, reverse)
    assert data.corpus["train"] == [
        (source if i in known else target.upper(), target)
        for i, (source, target) in enumerate(before)
    ]
    assert asked == [target for i, (_, target) in enumerate(before) if i not in known]
    assert data.train == encode_pairs(data.corpus["train"], forty_pairs.tokenizer)
    assert data.val is forty_pairs.val and data.corpus["val"] is forty_pairs.corpus["val"]
    with pytest.raises(ValueError):
        back_translated(forty_pairs, known, lambda texts: texts[1:])  # a line is lost


# The risk


def test_each_source_has_its_own_denominator(float64):
    logs, marks = torch.randn(9, requires_grad=True), torch.rand(9)
    counts, alpha = [2, 4, 3], 0.4
    risks = risk_of_candidates(logs, marks, counts, alpha)
    for risk, log_p, delta in zip(risks, logs.split(counts), marks.split(counts), strict=True):
        p = [math.exp(alpha * x) for x in log_p.tolist()]
        by_hand = sum(a * b for a, b in zip(p, delta.tolist(), strict=True)) / sum(p)
        assert math.isclose(risk.item(), by_hand, rel_tol=1e-12)
    raised = logs + torch.tensor([9.0] * 2 + [-5.0] * 4 + [0.0] * 3)
    torch.testing.assert_close(risk_of_candidates(raised, marks, counts, alpha), risks)
    assert torch.autograd.gradcheck(lambda x: risk_of_candidates(x, marks, counts, alpha), logs)


# What ships


def ladder(rung, *seeds):
    """The records of a rung's runs."""
    return [load_record(f"ladder-{rung}-{seed}") for seed in seeds]


def test_the_model_that_ships_is_a_mean_of_five_runs_with_none_in_common():
    first, ships = ladder("all-mean", 1, 3)
    assert DEFAULT_MODEL.name == "ladder-all-mean-3"
    assert ships["weights_sha256"] == sha256(DEFAULT_MODEL / "model.safetensors")
    parts = [set(record["learned_from"]["mean_of"]) for record in (first, ships)]
    assert parts[0].isdisjoint(parts[1]) and [*map(len, parts)] == [5, 5]


def test_the_titles_of_the_charts_hold_in_the_records():
    runs = load_record("recipes-multi30k")["runs"]

    def mean_of(score, row):
        return mean(run[score] for run in runs if run["row"] == row and run["seed"])

    part, shuffled = "a part", "a part, with shuffled German"
    assert mean_of("loss", shuffled) < mean_of("loss", part) - 0.5
    assert mean_of("bleu", shuffled) < mean_of("bleu", part) - 5
    before = load_record("multi30k-de-en")["test"]
    four, two = (1, 2, 3, 4), (1, 3)
    for rung, seeds, on_second in (
        ("onward", (1, 2), -1),
        ("widened", four, 1),
        ("risk-long", four, -1),
        ("risk-mean", (1,), -1),
        ("all-mean", two, 1),
    ):
        for test, sign in ((FIRST, 1), (SECOND, on_second)):
            leads = [
                record["test"][test]["bleu_greedy"] - before[test]["bleu_greedy"]
                for record in ladder(rung, *seeds)
            ]
            assert min(sign * lead for lead in leads) > 0.1


def test_risk_loses_more_than_its_control_and_the_means_are_those_of_the_ladders_text():
    risk, onward = ladder("risk-long", 1, 2, 3, 4), ladder("onward", 1, 2)
    worst = min(record["test"][SECOND]["bleu_greedy"] for record in onward)
    assert all(record["test"][SECOND]["bleu_greedy"] < worst for record in risk)
    quoted = ((risk, [42.3, 37.0]), (ladder("widened", 1, 2, 3, 4), [41.9, 37.5]))
    for records, figures in quoted:
        means = [mean(run["test"][test]["bleu"] for run in records) for test in (FIRST, SECOND)]
        assert [round(bleu, 1) for bleu in means] == figures


@pytest.mark.audit
@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
def test_the_ladders_command_prints_the_figures_that_are_quoted(capsys):
    prose = (ROOT / "docs" / "ladder.md").read_text("utf-8")
    options = re.search("python -m scripts.evaluate (--beam 5 --against models/[^`]*)`", prose)[1]
    assert evaluate(options.split()) == 0
    printed = capsys.readouterr().out
    for test in (FIRST, SECOND):
        line = rf"{test}: (\S+) BLEU against .*: (\S+) to (\S+); p = (\S+)\)"
        quote = rf"{test} (\S+) \((\S+) to (\S+), p = ([\d.]+)"
        *interval, p = map(float, re.search(line, printed).groups())
        *quoted, at = map(float, re.search(quote, prose.replace("−", "-")).groups())
        assert quoted == pytest.approx(interval, abs=0.1)  # other cores may write other texts
        assert at == pytest.approx(p, rel=0.3, abs=1e-3)
