"""Chapter 9: its definitions, its errata, and what it says of its records."""

import ast
from dataclasses import replace

import torch
from conftest import MODULES
from tiny import RUN, few_pairs

from scripts.book.records import load_record
from scripts.ch06_training import BOS
from scripts.ch07_multi30k import Example
from scripts.ch09_training_run import average_checkpoints, ingredient_verdicts, short_captions
from scripts.core.checkpoints import save_tensors
from scripts.core.data import TrainingData
from scripts.core.settings import PRESETS, stored_config
from scripts.fast.run import fit


def test_short_captions_keeps_pairs_and_their_ids_together():
    pairs = [("ein zwei drei", "c"), ("ein", "a"), ("ein zwei", "b"), ("eins", "d")]
    examples = [Example([n], [BOS, n]) for n in range(4)]
    data = TrainingData({"train": pairs, "val": pairs}, None, examples, examples)
    few = short_captions(data, most=2, validation=2)
    assert [e.src[0] for e in few.train] == [1, 2, 3]
    assert [e.src[0] for e in few.val] == [1, 2]
    assert few.corpus["val"] == pairs[1:3]


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
    verdicts = ingredient_verdicts(load_record("recipe-multi30k"))
    claims = {name: verdict.difference < 0 for name, verdict in verdicts.items() if verdict.told}
    assert claims == dict.fromkeys(("dropout 0.3", "peak rate / 4", "BPE-dropout 0.1"), True)


def test_nothing_is_unpickled():
    """No chapter and no helper calls what can run code on loading."""
    for path in MODULES:
        calls = ast.walk(ast.parse(path.read_text("utf-8")))
        called = {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}
        assert not called & {"torch.load", "pickle.load", "pickle.loads"}, path.name
