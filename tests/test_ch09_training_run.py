"""Chapter 9: its definitions, its errata, and what it says of its records."""

import ast
import math
import os
import random
import signal
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest
import torch
from conftest import MODULES
from tiny import RUN, few_pairs

from scripts import ch09_training_run as ch09
from scripts.book.figures.training import ORDERS, symptoms_table, usual_scores
from scripts.book.records import load_record
from scripts.ch09_training_run import (
    TINY_RUN,
    Run,
    Trainer,
    all_weights,
    average_checkpoints,
    killed_run,
)
from scripts.core.checkpoints import newest_state, save_tensors, weights
from scripts.core.data import epoch_plan, prepare
from scripts.core.settings import PRESETS, stored_config
from scripts.fast.run import fit
from scripts.studies.epochs import labels_each


def test_a_worse_model_does_not_replace_the_best(tmp_path, monkeypatch):
    """Here the second epoch translates worse than the first."""
    rows, kept = iter([{"val_bleu": 2.0}, {"val_bleu": 1.0}]), []
    monkeypatch.setattr("scripts.ch09_training_run.validate", lambda *_: next(rows))
    monkeypatch.setattr("scripts.ch09_training_run.save_model", lambda *_: kept.append("model"))
    Trainer(RUN, few_pairs(), tmp_path).fit()
    assert kept == ["model"]


@pytest.mark.parametrize(("step", "dropout"), [("textbook", 0.1), ("eager", 0.0)])
def test_the_engine_takes_the_trainers_steps(tmp_path, step, dropout):
    """The textbook's to the bit, with dropout; the fast path's to four digits of the loss."""
    config, data = replace(RUN, average=0, dropout=dropout, step=step), few_pairs()
    trainer = Trainer(config, data, tmp_path / "trainer")
    trainer.fit()
    history = fit(config, data, tmp_path / "engine")
    for name in ("train_loss", "val_loss"):
        ours, engines = ([row[name] for row in rows] for rows in (trainer.history, history))
        assert ours == pytest.approx(engines, rel=1e-4)
    stored = newest_state(tmp_path / "engine").tensors
    for name, weight in weights(trainer.model).items() if step == "textbook" else ():
        assert weight.equal(stored[f"model.{name}"]), name


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is a matter of POSIX")
@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.audit)])
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, kills):
    """With another seed set: with the old one a run that starts again would pass."""
    luck, data = random.Random(kills), ch09.sample_pairs()
    for step in sorted(luck.sample(range(2, 40), kills)):
        assert killed_run(tmp_path, step, luck.uniform(0.0, 0.03)) == -signal.SIGKILL
    straight, resumed = Run(TINY_RUN, data), Trainer(TINY_RUN, data, tmp_path)
    straight.fit()
    torch.manual_seed(12345)
    assert resumed.resume() and 0 < resumed.steps_taken < straight.steps_taken
    resumed.fit()
    assert all_weights(resumed).equal(all_weights(straight))
    assert resumed.history == straight.history


def test_damaged_states_do_not_push_out_new_ones(tmp_path):
    """With both damaged the run starts again, and what it then saves stays."""
    for _ in range(2):
        trainer = Trainer(TINY_RUN, ch09.sample_pairs(), tmp_path)
        assert trainer.resume() is None
        trainer.train_epoch(until=4)
        assert [path.name for path in trainer.saved()] == ["state-000002", "state-000004"]
        for path in trainer.saved():
            path.write_bytes(path.read_bytes()[:-1])


def test_erratum_23_the_average_of_equals_is_the_same(tmp_path):
    """And the average of others is their mean, in 32 bits whatever is stored."""
    paths, values = [], (1.0, 2.0, 6.0)
    for number, value in enumerate(values):
        paths.append(tmp_path / f"{number}.safetensors")
        save_tensors(paths[-1], {"w": torch.full((2,), value).half()}, {})
    same = average_checkpoints(paths[:1] * 3)["w"]
    assert same.dtype == torch.float32 and same.tolist() == [1.0, 1.0]
    torch.testing.assert_close(average_checkpoints(paths)["w"], torch.full((2,), 3.0))


def test_erratum_25_training_runs_without_a_gpu(tmp_path, monkeypatch):
    """A whole epoch on a machine whose CUDA calls all fail, as they do without a GPU."""

    def no_gpu(*_):
        raise RuntimeError("no NVIDIA driver on this machine")

    monkeypatch.setattr(torch.cuda, "set_device", no_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    history = fit(replace(RUN, epochs=1, device="auto"), few_pairs(), tmp_path)
    assert len(history) == 1 and (tmp_path / "model.safetensors").is_file()


def test_the_records_pass_the_bars_and_say_what_the_chapter_says():
    sample, record = load_record("sample-de-en")["test"], load_record("multi30k-de-en")
    assert sample["test"]["bleu"] >= 95 and "test_unseen" in sample
    assert record["test"]["test_2016_flickr"]["bleu"] >= 40 and record["parameters"] <= 8e6
    assert stored_config(record["config"]) == replace(PRESETS["small"], name="multi30k")


def test_epoch_11_fell_as_its_chart_says():
    """Titles and captions of the charts, and the numbers of the text between them."""
    record, earlier = load_record("epochs-multi30k"), load_record("epochs-multi30k-earlier")
    fall, after = record["fall"], record["epochs"][10]
    assert fall["epoch"] == 11 and fall["difference"]["high"] < -1.9
    names = ("multi30k-de-en", "gpu-small-1", "gpu-small-2", "gpu-small-3")
    histories = [[row["val_bleu"] for row in load_record(name)["history"]] for name in names]
    histories.append([row["bleu"] for row in earlier["epochs"]])
    shipped, *on_gpus, repeated = ([b - a for a, b in pairwise(scores)] for scores in histories)
    assert round(shipped[9], 1) == round(min(shipped), 1) == -3.2
    assert round(repeated[9], 1) == round(min(repeated), 1) == -2.5
    assert all(changes[9] > 0 for changes in on_gpus)  # from epoch 10 to 11
    assert round(min(min(changes[4:]) for changes in on_gpus), 1) >= -1.3
    scores, ratios = ([row[k] for row in record["epochs"]] for k in ("bleu", "length_ratio"))
    changes = {epoch: b - a for epoch, (a, b) in enumerate(pairwise(scores), 2)}
    assert round(changes[11], 1) == -3.7 and round(changes[5], 1) == -2.1
    assert ratios[9] < 1 < 1.1 < ratios[10]
    assert max(scores[-4:]) - min(scores[-4:]) < 0.5
    looks = {row["step"]: row for row in fall["step by step"]}
    bleu = {step: row["bleu"] for step, row in looks.items()}
    assert round(bleu[240] - bleu[255], 1) == 5.2
    start, ratio = looks[240]["bleu"], looks[240]["length_ratio"]
    no_penalty = start / math.exp(1 - 1 / ratio)
    assert (round(no_penalty, 1), ratio, looks[255]["length_ratio"]) == (41.9, 0.963, 1.158)
    lengths = [13_289 * r for r in (ratio, looks[255]["length_ratio"])]  # the references' tokens
    fewer = [(n - 1) * 1_014 for n in range(1, 5)]  # a text of L has L − (n−1) n-grams
    shares = [(lengths[0] - less) / (lengths[1] - less) for less in fewer]
    assert round(no_penalty * math.prod(shares) ** 0.25, 1) == 34.0
    plain, cut = (symptoms_table(record)[name] for name in ("BLEU", "BLEU, loops cut"))
    assert round((cut - plain)["greedy", 11], 1) == 2.0
    assert cut["beam of 5", 11] > cut["beam of 5", 10]
    cut = [row["bleu_cut"] for row in record["epochs"]]
    assert cut[4] > cut[3] and changes[5] < -2  # epoch 5 falls by its loops
    assert [*fall["long_steps"]] == ["241", "243", "244", "245", "246"]
    steady = usual_scores(fall)
    assert bleu[250] < min(steady) < bleu[245] and bleu[260] > min(steady)
    # The replay of the whole epoch ends as the run's epoch 11 did, to the digit.
    assert looks[255].items() - {("step", 255), ("recent_length", 15.2)} <= after.items()


def test_the_orders_do_what_their_charts_and_the_verdict_say():
    """A run's looks are at steps 245, 250 and 255."""
    fall, looks = load_record("epochs-multi30k")["fall"], {}
    for name, (control, _) in ORDERS.items():
        runs = [[*run["earlier"], run] for run in fall["controls"][control]]
        looks[name] = [[look["bleu"] for look in run] for run in runs]
    low = min(usual_scores(fall))
    for name in ("as it came", "five others first"):
        assert max(x for run in looks[name] for x in run[1:]) < low - 1
    assert min(x for run in looks["long steps first"] for x in run) > low + 0.5
    starts, middles, ends = zip(*looks["neighbours swapped"], strict=True)
    assert round(mean(starts) - mean(middles), 1) == 2.2 and min(ends) > low + 1
    after_shuffles = [*looks["shuffled before"], *looks["shuffled again"]]
    changes = [end - start for start, _, end in after_shuffles]
    assert [round(f(changes), 1) for f in (min, max)] == [-1.5, 0.9]
    for name in ("neighbours swapped", "shuffled before", "shuffled again"):
        assert mean(r[2] for r in looks[name]) > mean(r[2] for r in looks["as it came"]) + 5.5


def test_means_of_weights_hide_the_fall_as_older_weights_do():
    record, sizes = load_record("epochs-multi30k"), ("bleu", "mean of 20", "mean of 40")
    by_epoch = {
        epoch: [[run[n] for n in sizes] for run in runs] for epoch, runs in record["means"].items()
    }
    assert all(mean_20 - last > 4 for last, mean_20, _ in by_epoch["11"])
    for run in record["means"]["11"]:  # all ten are from the fall
        assert run["mean of 10"] < 37
    own = [r["earlier"][0]["bleu"] for r in record["fall"]["controls"]["as they came"]]
    assert round(mean(own), 1) == 39.2
    means = {
        epoch: [mean(column) for column in zip(*runs, strict=True)]
        for epoch, runs in by_epoch.items()
    }
    assert [round(x, 1) for x in means["11"][1:]] == [39.9, 40.9]
    last_five = load_record("multi30k-de-en")["chosen_by_val_bleu"]["mean of the last 5"]
    assert round(last_five, 1) == 41.2
    assert max(abs(x - means["18"][0]) for x in means["18"]) < 0.1


def test_six_long_steps_in_a_row_are_rare():
    longest = {row["epoch"]: row["longest_six"] for row in load_record("epochs-multi30k")["epochs"]}
    assert {epoch for epoch, length in longest.items() if length > 25} == {7, 11, 18}


@pytest.mark.skipif(not os.environ.get("MULTI30K_DIR"), reason="needs Multi30k at hand")
@pytest.mark.parametrize("name", ["multi30k-de-en", "gpu-small-1"])
def test_only_in_epoch_11_are_they_near_the_end_also_on_the_gpu(name):
    config = stored_config(load_record(name)["config"])
    data = prepare(config)
    for epoch in (7, 11, 18):
        lengths = [labels_each(data, step) for step in epoch_plan(config, data, epoch)]
        sixes = {i + 1: sum(lengths[i : i + 6]) / 6 for i in range(len(lengths) - 5)}
        late = {step for step, length in sixes.items() if length > 25 and step > len(lengths) / 2}
        assert bool(late) == (epoch == 11)
        assert epoch != 11 or max(sixes, key=sixes.get) == 241


def test_nothing_is_unpickled():
    """No chapter and no helper calls what can run code on loading."""
    for path in MODULES:
        calls = ast.walk(ast.parse(path.read_text("utf-8")))
        called = {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}
        assert not called & {"torch.load", "pickle.load", "pickle.loads"}, path.name
