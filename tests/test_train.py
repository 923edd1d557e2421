"""The command that trains: options, what it leaves and refuses; and the models that ship."""

import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from test_training import contents
from tiny import RUN, few_pairs

from scripts import ROOT, train
from scripts.book.records import load_record, sha256
from scripts.ch08_decoding import plain_translate
from scripts.core import cards
from scripts.core.checkpoints import STATE, newest_state, saved_states, weights
from scripts.core.data import TrainingData
from scripts.core.models import Trained, load_model, save_model
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.core.settings import PRESETS, build_model, plain_config, stored_config
from scripts.core.steps import Step
from scripts.corpora.load import load_corpus
from scripts.fast import run as fast_run
from scripts.fast.run import evaluate, finish
from scripts.fast.translating import DecodeOptions, translate

ONE = replace(RUN, epochs=1, schedule="inverse_sqrt", name="one")


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return few_pairs()


@pytest.fixture
def untrained(data) -> Trained:
    torch.manual_seed(0)
    return Trained(build_model(RUN, len(data.tokenizer)).eval(), data.tokenizer, RUN)


# Options


def test_every_field_is_an_option():
    words = []
    for name, value in asdict(RUN).items():
        flag = [f"--{name}" if value else f"--no_{name}"]
        words += flag if isinstance(value, bool) else [f"--{name}", str(value)]
    options = train.main.parse(["--preset", "base", *words, "--publish", "x"])
    assert plain_config(options) == RUN and options.publish == "x" and not options.resume


MISTAKES = {
    "accumulate must be from 1 to": ["--accumulate", "0"],
    "of heads, 512, not 128": ["--heads", "512"],
    "name must be a plain name": ["--name", "a/b"],
    "than required_chars. 30 vs 61.": ["--vocab", "30"],
    "raise max_tokens from 10": ["--max_tokens", "10"],
    "--vocab 8192 on sample: Vocabulary size too high": ["--vocab", "8192"],
    "can't write": ["--name", "taken"],
    "no checkpoint": ["--resume", "--name", "never-started"],
    "none holds no run": ["--from", "none"],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_one_line_and_exit_code_2(words, data, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    if "--vocab" not in MISTAKES[words]:
        monkeypatch.setattr(fast_run, "prepare", lambda *given: data)
    (tmp_path / "taken").touch()
    assert train.main(["--preset", "sample", *MISTAKES[words]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error


# What it leaves, and what it replaces


@pytest.fixture(scope="module")
def in_runs(data):
    """Has the command make this file's run, in a folder of runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_run, "prepare", lambda *given: data)
        patch.setitem(PRESETS, "sample", ONE)
        patch.setattr(sys, "argv", ["train"])
        yield lambda runs: patch.setenv("SERIES_RUNS", str(runs))


@pytest.fixture(scope="module")
def finished(in_runs, tmp_path_factory) -> Path:
    """The folder of runs in which the command has trained one."""
    in_runs(runs := tmp_path_factory.mktemp("finished"))
    assert train.main(["--preset", "sample"]) == 0
    return runs


@pytest.fixture
def runs(in_runs, finished, tmp_path, monkeypatch) -> Path:
    """A copy of that folder, in which the command works; what is published lies beside it."""
    in_runs(runs := shutil.copytree(finished, tmp_path / "runs"))
    for name, place in (("ROOT", tmp_path), ("RESULTS", tmp_path / "results")):
        monkeypatch.setattr(cards, name, place)
    save = cards.save_record
    monkeypatch.setattr(cards, "save_record", lambda *args: save(*args, tmp_path / "results"))
    return runs


def test_the_command_leaves_a_model_a_record_a_log_and_publishes_them(
    data, runs, capsys, monkeypatch
):
    folder, record = runs / "one", load_record("record", runs / "one")
    assert record["weights_sha256"] == sha256(folder / "model.safetensors")
    assert (folder / "log.csv").read_text().count("\n") == 2
    assert (folder / "README.md").read_text("utf-8") == cards.model_card(record)
    again = evaluate(load_model(folder), data.corpus["test"])
    assert again["bleu"] == record["test"]["test"]["bleu"]
    # Its record is made again if it was lost; then all of it is published, over itself alone.
    (folder / "record.json").unlink()
    command = ["--preset", "sample", "--resume", "--publish", "mine"]
    assert train.main(command) == train.main(command) == 0
    printed = capsys.readouterr().out
    assert "test: BLEU" in printed and "reference" in printed
    again = load_record("record", folder)
    assert again["test"] == record["test"] and again["history"] == record["history"]
    assert load_record("mine", runs.parent / "results") == again
    published, before = runs.parent / "models/mine", contents(runs.parent / "models")
    assert sha256(published / "model.safetensors") == again["weights_sha256"]
    assert load_model(published).config == load_model(folder).config
    other = ["--preset", "sample", "--name", "two", "--seed", "2", "--publish", "mine"]
    assert train.main(other) == 2 and not (runs / "two").exists()
    monkeypatch.setattr(fast_run, "refuse_to_publish", lambda *_: None)  # it came meanwhile
    assert train.main(other) == 2 and (runs / "two/record.json").is_file()
    assert capsys.readouterr().err.count("models/mine/model.safetensors exists") == 2
    assert contents(runs.parent / "models") == before
    assert train.main([*other, "--overwrite"]) == 0
    assert load_record("mine", runs.parent / "results")["config"]["seed"] == 2


REFUSALS = {
    "go on with --resume, lengthen what is finished by --from": (["record.json"], []),
    "holds a run or a model": (["record.json", "state-*", "epoch-*"], []),
    "lengthened in its own place": ((), ["--from", "ONE", "--name", "one", "--epochs", "2"]),
    "give more by --epochs": ((), ["--from", "ONE"]),
    "another --d_ff (32, now 64), another --seed (1, now 2): go on": (
        (),
        ["--from", "ONE", "--epochs", "2", "--d_ff", "64", "--seed", "2"],
    ),
    "a finished run also has --from": ((), ["--resume", "--epochs", "2"]),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_nothing_trained_is_lost(runs, capsys, words):
    """The command refuses before it trains or deletes anything, and says what is there."""
    lost, options = REFUSALS[words]
    for path in (path for pattern in lost for path in (runs / "one").glob(pattern)):
        path.unlink()
    before = contents(runs)
    options = [str(runs / "one") if word == "ONE" else word for word in options]
    assert train.main(["--preset", "sample", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error
    assert contents(runs) == before


def test_a_run_that_is_asked_to_stop_saves_and_says_so(runs, monkeypatch, capsys):
    run, stop = Step.run, partial(signal.raise_signal, signal.SIGTERM)
    monkeypatch.setattr(Step, "run", lambda *args: stop() or run(*args))
    assert train.main(["--preset", "sample", "--name", "new", "--save_every", "1000"]) == 143
    assert [path.name for path in saved_states(runs / "new")] == [STATE.format(1)]
    error = capsys.readouterr().err.splitlines()[-1]
    assert "stopped by SIGTERM after step 1, and saved" in error and "--resume" in error


def test_a_lengthened_run_is_the_longer_run(runs):
    """To the bit, as its rate doesn't depend on the length; also with a mean as the old model."""
    assert train.main(["--preset", "sample", "--epochs", "2", "--name", "whole"]) == 0
    old = load_model(runs / "one")
    with torch.no_grad():
        next(old.model.parameters()).zero_()
    save_model(runs / "one", old)
    assert train.main(["--from", f"{runs / 'one'}/", "--epochs", "2"]) == 0
    longer, straight = (load_record("record", runs / name) for name in ("one-2", "whole"))
    mean = sha256(runs / "one/model.safetensors")
    assert longer["from"] == {"run": "one", "epochs": 1, "weights_sha256": mean}
    assert "It went on from the run one after 1 epochs." in cards.model_card(longer)
    for name in ("weights_sha256", "test", "samples", "chosen_by_val_bleu", "best_epoch"):
        assert longer[name] == straight[name]
    ends, others = (newest_state(runs / name).tensors for name in ("one-2", "whole"))
    assert ends.keys() == others.keys() and all(ends[name].equal(others[name]) for name in ends)
    assert len(saved_states(runs / "one-2", "epoch")) == 2


def test_validation_chooses_the_length_penalty_and_the_record_scores_it(runs, data, monkeypatch):
    """No test set has a say in it; the model brings the search that its record and card tell of."""
    whole, asked, folder = fast_run.evaluate, [], runs / "one"

    def favoured(trained, pairs, *search):
        validates = pairs == data.corpus["val"]
        asked.append((validates, *search))
        bleus = {0.6: 11.0, 1.0: 12.0} if validates else {0.6: 99.0}
        return whole(trained, pairs) | ({"bleu": bleus.get(search[1], 0.0)} if search else {})

    monkeypatch.setattr(fast_run, "evaluate", favoured)
    history = load_record("record", folder)["history"]
    config = replace(load_model(folder).config, beam=2)
    record = finish(config, data, folder, history, {"best epoch": 1.0}, (0.6, 1.0, 1.4))
    searches = [(True, 2, alpha) for alpha in (0.6, 1.0, 1.4)]
    assert asked == [*searches, *[(False, 2, 1.0), (False,)] * 2]
    assert record["val_bleu_by_alpha"] == {"0.6": 11.0, "1": 12.0, "1.4": 0.0}
    assert (
        load_model(folder).config == replace(config, alpha=1.0) == stored_config(record["config"])
    )
    references = [english for _, english in data.corpus["test"]]
    outputs = [sample["translation"] for sample in record["samples"]]
    lower = corpus_bleu(outputs, references, lowercase=True)
    assert record["test"]["test"]["bleu_lowercased"] == round(lower.score, 2)


# Models


def test_a_saved_model_loads_as_it_was_whatever_it_was_trained_with(untrained, tmp_path):
    """Its settings may be older than today's: those that no longer exist are ignored."""
    save_model(tmp_path, untrained)
    path = tmp_path / "config.json"
    older = {"path": "fast", "fused": True, "compile": False, "tracker": "none", "publish": None}
    path.write_text(json.dumps(asdict(RUN) | older))
    loaded = load_model(tmp_path)
    assert loaded.config == RUN == untrained.config
    assert stored_config(asdict(RUN) | {"path": "textbook"}).step == "textbook"
    for name, tensor in weights(loaded.model).items():
        assert tensor.equal(weights(untrained.model)[name].half().float())
    assert loaded.model.src_embed[0].lut.weight is loaded.model.generator.proj.weight
    assert loaded.tokenizer.model == untrained.tokenizer.model


OTHER_PIECES = (ROOT / "models/sample-de-en/tokenizer.model").read_bytes()
UNFIT = {
    "a setting": ("config.json", json.dumps(asdict(RUN) | {"layerz": 3}).encode()),
    "sizes": ("config.json", json.dumps(asdict(RUN) | {"d_model": 48, "heads": 3}).encode()),
    "other pieces": ("tokenizer.model", OTHER_PIECES),
}
for file in ("model.safetensors", "tokenizer.model", "config.json"):
    UNFIT |= {f"empty {file}": (file, b""), f"without {file}": (file, None)}


@pytest.mark.parametrize("fault", UNFIT)
def test_an_unfit_model_is_refused_in_one_line(untrained, tmp_path, fault):
    save_model(tmp_path, untrained)
    name, content = UNFIT[fault]
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


SHIPPED = sorted(path.parent.name for path in (ROOT / "models").glob("*/tokenizer.model"))
QUICK = [n if n == "sample-de-en" else pytest.param(n, marks=pytest.mark.audit) for n in SHIPPED]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_the_one_on_record(name):
    record, folder = load_record(name), ROOT / "models" / name
    assert record["weights_sha256"] == sha256(folder / "model.safetensors")
    assert load_model(folder).config == stored_config(record["config"])
    assert (folder / "README.md").read_text("utf-8") == cards.model_card(record)
    limit = 2 if name == "sample-de-en" else 16
    assert sum(path.stat().st_size for path in folder.iterdir()) < limit * 2**20


@pytest.mark.parametrize("name", QUICK)
def test_a_shipped_model_scores_what_its_record_says(name):
    """If the corpus is at hand, its first test split; ten texts by the plain and fast searches."""
    record, trained = load_record(name), load_model(ROOT / "models" / name)
    config = trained.config
    search = config.beam, config.alpha
    if config.corpus == "sample" or os.environ.get("MULTI30K_DIR"):
        corpus = load_corpus(config.corpus)
        split = held_out_splits(corpus)[0]
        sources, references = zip(*corpus[split], strict=True)
        outputs = translate(trained, sources, DecodeOptions(*search))
        again, test = corpus_bleu(outputs, references), record["test"][split]
        assert again.score == pytest.approx(test["bleu"], abs=0.1), split
        assert again.signature == test["signature"]
    sources = [sample["source"] for sample in record["samples"]]
    recorded = [sample["translation"] for sample in record["samples"]]
    plain = plain_translate(trained, sources, *search)
    assert sum(map(str.__eq__, plain, recorded)) >= 9  # another machine's rounding may tip one
    assert translate(trained, sources, DecodeOptions(*search)) == plain
