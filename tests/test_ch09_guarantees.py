"""Chapter 9's toy and charts: what holds whatever is recorded."""

import pytest

from scripts.book.charts import PALETTE
from scripts.book.figures.runs import history_chart, ingredient_chart
from scripts.book.records import load_record
from scripts.ch06_training import BOS
from scripts.ch07_multi30k import Example
from scripts.ch09_training_run import short_captions
from scripts.core.data import TrainingData, epoch_plan
from scripts.core.settings import PRESETS


def test_short_captions_keeps_pairs_and_their_ids_together():
    pairs = [("ein zwei drei", "c"), ("ein", "a"), ("ein zwei", "b"), ("eins", "d")]
    examples = [Example([n], [BOS, n]) for n in range(4)]
    data = TrainingData({"train": pairs, "val": pairs}, None, examples, examples)
    few = short_captions(data, most=2, validation=2)
    assert [e.src[0] for e in few.train] == [1, 2, 3]
    assert [e.src[0] for e in few.val] == [1, 2]
    assert few.corpus["val"] == pairs[1:3]


def test_a_plan_does_not_depend_on_what_was_planned_before():
    examples = [Example([n], [BOS, n]) for n in range(200)]
    data = TrainingData({}, None, examples, [])
    config = PRESETS["sample"]
    alone = epoch_plan(config, data, 3)
    for epoch in (1, 2):
        epoch_plan(config, data, epoch)
    assert epoch_plan(config, data, 3) == alone != epoch_plan(config, data, 2)


@pytest.mark.parametrize("name", ["sample-de-en", "multi30k-de-en"])
def test_a_history_ends_where_its_data_do(name):
    chart = history_chart(name, "title", "caption").to_dict()
    bleu, perplexity = chart["hconcat"]
    last = max(row["epoch"] for row in load_record(name)["history"])
    for panel in (bleu, perplexity):
        assert panel["encoding"]["x"]["scale"]["domain"] == [1, last]
        assert panel["encoding"]["x"]["axis"]["values"][-1] == last
    low, high = perplexity["encoding"]["y"]["scale"]["domain"]
    highest = max(row["train_ppl"] for row in load_record(name)["history"])
    assert low == 1 and highest < high < 2 * highest
    assert chart["resolve"]["scale"]["color"] == "independent"


def test_the_ingredients_chart_says_its_finding_and_marks_what_is_told():
    chart = ingredient_chart(load_record("recipe-multi30k"), "a finding", {"Muon"}).to_dict()
    assert chart["title"]["text"] == "a finding"
    points = max(chart["datasets"].values(), key=len)
    marked = {row["changed"] for row in points if row["kind"] == "differs from it"}
    assert marked == {"Muon"}
    assert {row["changed"] for row in points if row["kind"] == "the recipe"} == {"the recipe"}


def test_a_history_draws_validation_in_one_colour():
    bleu, perplexity = history_chart("sample-de-en", "title", "caption").to_dict()["hconcat"]
    assert perplexity["encoding"]["color"]["sort"] == ["training", "validation"]
    assert bleu["mark"]["color"] == bleu["mark"]["point"]["color"] == PALETTE[1]
