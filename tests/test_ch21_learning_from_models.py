"""Chapter 21: written corpora keep what people wrote; losses and their gradients are right."""

import math
import os
import re

import pytest
import torch

from scripts import ROOT
from scripts.book.figures.understanding import RUNGS, TESTS, ladder_runs, recipe_runs
from scripts.book.records import load_record, sha256
from scripts.ch07_multi30k import encode_pairs
from scripts.ch21_learning_from_models import (
    back_translated,
    beside_others,
    even_words,
    risk_of_candidates,
    shuffled_words,
)
from scripts.core.models import DEFAULT_MODEL
from scripts.evaluate import main as evaluate
from scripts.studies.runner import Plan
from scripts.studies.word_targets import (
    ALL,
    EVEN,
    ONE,
    RATE,
    SEEDS,
    SHUFFLED,
    TARGETS,
    plan_runs,
)

FIRST, SECOND = "test_2016_flickr", "test_2017_flickr"


# Distillation by words


def test_controls_keep_the_labels_share_and_spread_or_deal_the_others():
    q, labels = torch.rand(5, 7).softmax(dim=-1), torch.tensor([0, 6, 3, 3, 1])
    at_label = torch.nn.functional.one_hot(labels, 7).bool()
    dealt, even = shuffled_words(q, labels), even_words(q, labels)
    torch.testing.assert_close(dealt.sort(dim=1)[0], q.sort(dim=1)[0])
    assert torch.equal(dealt[at_label], q[at_label]) and not torch.equal(dealt, q)
    assert torch.equal(even[at_label], q[at_label])
    torch.testing.assert_close(even.sum(dim=1), torch.ones(5))
    assert all(row[~at].unique().numel() == 1 for row, at in zip(even, at_label, strict=True))


def test_all_words_lead_in_every_seed_on_record_and_lead_their_controls_at_every_rate():
    """The chapter's table is of one seed; its text quotes the leads of eight."""
    runs = load_record("word-targets-sample")["runs"]
    plan = Plan(runs)
    plan_runs(plan)
    bleu = {(run["targets"], run["tau"], run["lr"], run["seed"]): run["bleu"] for run in runs}
    assert len(bleu) == len(runs) == len(plan) and len({run["commit"] for run in runs}) == 1

    def leads(row, rival):
        return [bleu[*row, RATE, seed] - bleu[*rival, RATE, seed] for seed in SEEDS]

    for row, rival, quoted in (
        ((ALL, 2), (EVEN, 2), [12, 26]),
        ((ALL, 2), (SHUFFLED, 2), [15, 24]),
        ((ALL, 2), (ONE, 1), [5, 24]),
        ((ALL, 1), (ONE, 1), [2, 11]),
    ):
        found = leads(row, rival)
        assert [round(min(found)), round(max(found))] == quoted
    found = leads((ALL, 1), (EVEN, 1))
    assert [round(min(found), 1), round(max(found), 1)] == [-0.4, 3.7]
    slow, fast = RATE / 2, 2 * RATE
    half, twice = ({row: bleu[*row, rate, 1] for row in TARGETS} for rate in (slow, fast))
    assert max(half[EVEN, 2], half[SHUFFLED, 2]) + 4 < half[ALL, 2] < half[ONE, 1]
    assert max(twice[row] for row in TARGETS if row[1] == 2) < 6 < twice[ONE, 1] / 2
    best = {row: max(bleu[*row, rate, 1] for rate in (slow, RATE, fast)) for row in TARGETS}
    leader, second = sorted(best.values())[:-3:-1]
    assert leader == best[ALL, 2] > second + 5


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


def test_each_target_stands_beside_the_source_of_another_pair(forty_pairs):
    pairs = forty_pairs.train
    others = beside_others(pairs)
    assert [pair.tgt for pair in others] == [pair.tgt for pair in pairs]
    assert all(pair.src != other.src for pair, other in zip(pairs, others, strict=True))
    assert sorted(pair.src for pair in others) == sorted(pair.src for pair in pairs)


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
    """The ladder's control: chapter 9's model with a penalty of 1.4, by the command in the text."""
    means = recipe_runs().groupby("row").mean(numeric_only=True)
    rows = ["a part", "shuffled German", "drawn German", "greedy German"]
    part, shuffled, drawn, greedy = means.loc[rows].itertuples()
    everything, taught = means.loc[["all pairs", "teacher's translations"]].itertuples()
    rises = [row.other_loss - row.loss for row in (shuffled, drawn, part, greedy, everything)]
    assert [round(rise, 1) for rise in rises] == [0, 0.5, 0.9, 0.9, 2.5] and shuffled.distinct == 1
    assert taught.other_loss - taught.loss > rises[-1]
    falls = [part.loss - row.loss for row in (drawn, greedy)]
    assert [round(fall, 1) for fall in falls] == [0.9, 1.0]
    assert 0.2 < (drawn.chrf - part.chrf) / (greedy.chrf - part.chrf) < 0.3
    english = part.loss - shuffled.loss
    assert all(0.65 < english / fall < 0.72 for fall in falls)
    below = [shuffled.loss - row.loss for row in (part, drawn, greedy, everything)]
    above = [row.chrf - shuffled.chrf for row in (part, drawn, greedy, everything)]
    assert below[0] < 0 < below[1] < below[2] < below[3] / 2
    assert 0 < above[0] < above[1] < above[2] < above[3] / 2
    assert abs(everything.words - taught.words) < 0.2

    rungs = ladder_runs(RUNGS).iloc[1:]  # after chapter 9's model
    others, ships = (rungs[(rungs["name"] == "all-mean") == wanted] for wanted in (False, True))
    gains, leads = (table[[*TESTS]] - (41.9, 37.0) for table in (others, ships))
    assert [len(gains), len(leads)] == [13, 2]
    assert leads.min(axis=1).min() > 0.8 > 0.7 > gains.abs().min(axis=1).max()
    means = others.groupby("name").mean()
    for name, quoted in {"risk": [42.3, 37.0], "widened": [41.9, 37.5]}.items():  # docs/
        assert means.loc[name, [*TESTS]].round(1).tolist() == quoted


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
