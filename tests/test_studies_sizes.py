"""The study of sizes: its smallest repeat, the table of recipes that it chose, and its chart."""

from dataclasses import asdict, replace

import pytest

from scripts.book.figures.training import (
    size_frame,
    size_gains,
    size_means,
    sizes_chart,
)
from scripts.book.records import load_record
from scripts.core.recipes import recipe_for
from scripts.studies import sizes

TINY = {"layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "vocab": 300, "epochs": 1, "warmup": 1}


def test_a_run_learns_from_its_cut_and_is_tested_if_it_counts():
    setting = asdict(replace(sizes.BASE, corpus="sample", precision="float32"))
    task = {"row": sizes.BY_SIZE, "pairs": 60, "settings": TINY, "seed": 1}
    run = sizes.work(setting, task)
    assert run["pieces"] == 300 and run["steps"] <= 3 and list(run["scores"]) == ["val", "test"]


def test_fewer_pairs_are_the_first_of_more_and_another_seed_draws_others():
    pairs = [(str(i), str(i)) for i in range(50)]
    assert sizes.cut(pairs, 20, 1)[:10] == sizes.cut(pairs, 10, 1) != sizes.cut(pairs, 10, 2)


def test_the_table_of_recipes_holds_what_was_measured():
    """The better of two for each number of pairs, by the mean on the test set."""
    means = size_means(size_frame(load_record("sizes-multi30k"), []))
    settings = {
        r["pairs"]: r["settings"]
        for r in load_record("sizes-multi30k")["runs"]
        if r["row"] == sizes.BY_SIZE
    }
    for pairs, row in means[[sizes.BY_SIZE, sizes.FOR_ALL]].idxmax(axis=1).items():
        best = settings[pairs] if row == sizes.BY_SIZE else {"vocab": 8192}
        assert recipe_for(pairs) == best, pairs


def test_the_chart_says_what_the_record_says():
    wholes = [load_record(f"gpu-small-{k}") for k in (1, 2, 3)]
    frame = size_frame(load_record("sizes-multi30k"), wholes)
    gains = size_gains(frame)
    assert gains["gain"].round(1).tolist() == [9.6, 1.3, -1.5]  # the last of the one shared draw
    assert gains["draws"].tolist() == [3, 3, 1]
    means, minutes = size_means(frame), size_means(frame, "minutes")
    times = minutes["longer"] / minutes["by size"]
    assert times[[1000, 3000]].between(2.5, 3.5).all()  # "three times as fast", "as long"
    assert (means["longer"] - means["by size"])[[1000, 3000]].round().tolist() == [-1, 1]
    runs = [run for run in load_record("sizes-multi30k")["runs"] if run["pairs"] == 1000]
    assert {run["settings"]["epochs"] for run in runs if run["row"] == sizes.BY_SIZE} == {120}
    short = [run["steps"] for run in runs if run["row"] == sizes.FOR_ALL]
    assert sizes.BASE.epochs == 18 and max(short) < 200 < sizes.BASE.warmup  # as chapter 26 says
    with pytest.raises(ValueError, match="isn't larger than the spread"):
        sizes_chart(frame.assign(bleu=20.0))
    with pytest.raises(ValueError, match="about 8 BLEU"):
        sizes_chart(frame.assign(bleu=frame["bleu"] - 2 * (frame["pairs"] == 10_000)))
