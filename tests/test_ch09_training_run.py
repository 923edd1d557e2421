"""Chapter 9: its definitions, its errata, and what it says of its records."""

import ast
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
from scripts.book.records import load_record
from scripts.ch09_training_run import (
    SHORT_RUN,
    Run,
    Trainer,
    all_weights,
    average_checkpoints,
    killed_run,
)
from scripts.core.checkpoints import newest_state, save_tensors, weights
from scripts.core.settings import PRESETS, stored_config
from scripts.fast.run import fit


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
    straight, resumed = Run(SHORT_RUN, data), Trainer(SHORT_RUN, data, tmp_path)
    straight.fit()
    torch.manual_seed(12345)
    assert resumed.resume() and 0 < resumed.steps_taken < straight.steps_taken
    resumed.fit()
    assert all_weights(resumed).equal(all_weights(straight))
    assert resumed.history == straight.history


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


LOW = ("as they came", "five others first", "three long steps late")


def test_epoch_11_fell_as_its_chart_says():
    """Titles and captions of the charts, and the numbers of the text between them."""
    record = load_record("epochs-multi30k")
    fall, (before, after) = record["fall"], record["epochs"][9:11]
    assert after["train_loss"] < before["train_loss"] and after["val_loss"] < before["val_loss"]
    assert (before["loops"], after["loops"]) == (21, 35) and fall["epoch"] == 11
    assert round(before["bleu_cut"] - after["bleu_cut"], 1) == 0.3
    losses = [(row["train_loss"], row["val_loss"]) for row in record["epochs"]]
    assert all(x >= y for pair in pairwise(losses) for x, y in zip(*pair, strict=True))
    names = ("multi30k-de-en", "gpu-small-1", "gpu-small-2", "gpu-small-3")
    histories = ([row["val_bleu"] for row in load_record(name)["history"]] for name in names)
    shipped, *on_gpus = ([b - a for a, b in pairwise(scores)] for scores in histories)
    assert round(shipped[9], 1) == round(min(shipped), 1) == -3.2
    assert all(changes[9] > 0 for changes in on_gpus)  # from epoch 10 to 11
    scores, ratios = ([row[k] for row in record["epochs"]] for k in ("bleu", "length_ratio"))
    changes = {epoch: b - a for epoch, (a, b) in enumerate(pairwise(scores), 2)}
    assert sorted(changes, key=changes.get)[:2] == [11, 5]
    assert sorted(changes, key=lambda epoch: ratios[epoch - 1])[:-3:-1] == [11, 5]
    assert round(max(scores[-4:]) - min(scores[-4:]), 1) == 0.3
    looks = {row["step"]: row for row in fall["step by step"]}
    bleu, cut = ({step: row[key] for step, row in looks.items()} for key in ("bleu", "bleu_cut"))
    assert [round(scores[240] - scores[255], 1) for scores in (bleu, cut)] == [3.7, 1.5]
    assert [*fall["long_steps"]] == ["241", "243", "244", "245", "246"]
    steady = [score for step, score in bleu.items() if not 240 < step <= 255]
    assert bleu[250] < min(steady) < bleu[245] and bleu[240] < bleu[260]
    assert round(max(steady) - min(steady), 1) == 2.8 and max(looks) - min(looks) == 90
    for name in LOW:  # the circles
        assert mean(run["bleu_cut"] for run in fall["controls"][name]) < min(steady)
    assert min(run["bleu"] for run in fall["next epoch, longest steps late"]) > min(steady)


def test_cutting_helps_exactly_when_outputs_are_longer_than_references():
    record = load_record("epochs-multi30k")
    fall = record["fall"]
    rows = [*record["epochs"], *fall["by a beam of 5"].values(), *fall["step by step"]]
    rows += sum(fall["controls"].values(), fall["next epoch, longest steps late"])
    fits = [(row["bleu_cut"] > row["bleu"]) == (row["length_ratio"] > 1) for row in rows]
    assert (sum(fits), len(rows)) == (65, 66)


def test_with_the_runs_own_code_a_repeat_of_epoch_11_ends_as_the_run_did():
    """Today's repeat began with the same state, and has newer code."""
    record, earlier = load_record("epochs-multi30k"), load_record("epochs-multi30k-earlier")
    ends = [
        next(r for r in x["fall"]["step by step"] if r["step"] == 255) for x in (earlier, record)
    ]
    assert earlier["epochs"] == record["epochs"]
    assert ends[0].items() - {("step", 255)} <= earlier["epochs"][10].items()
    assert (ends[0]["bleu"], ends[1]["bleu"]) == (36.05, 36.25)


def test_nothing_is_unpickled():
    """No chapter and no helper calls what can run code on loading."""
    for path in MODULES:
        calls = ast.walk(ast.parse(path.read_text("utf-8")))
        called = {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}
        assert not called & {"torch.load", "pickle.load", "pickle.loads"}, path.name
