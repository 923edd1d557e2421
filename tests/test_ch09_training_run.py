"""Chapter 9: settings, checkpoints, resuming, records, and how mistakes are reported."""

import ast
import io
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, fields, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from scripts import ROOT, train
from scripts.book.records import load_record, sha256
from scripts.ch06_training import UNK
from scripts.ch07_multi30k import BPETokenizer, source_ids
from scripts.ch08_decoding import best_ids, decode_rows, plain_translate
from scripts.ch09_training_run import (
    average_checkpoints,
    ingredient_verdicts,
)
from scripts.core import cards
from scripts.core import data as core_data
from scripts.core import training as core_training
from scripts.core.checkpoints import (
    newest_state,
    save_tensors,
    saved_states,
    weights,
)
from scripts.core.data import TrainingData, epoch_plan, prepare
from scripts.core.models import Trained, load_model, save_model
from scripts.core.ranks import Ranks
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.core.settings import PRESETS, TrainConfig, build_model, plain_config
from scripts.core.training import Diverged, differences, identity
from scripts.corpora.load import load_corpus
from scripts.fast import losses
from scripts.fast import run as fast_run
from scripts.fast.fast import fast_loss
from scripts.fast.losses import loss_function_of, resolved
from scripts.fast.run import evaluate, fit, training_of
from scripts.fast.translating import DecodeOptions, translate
from scripts.studies import ingredients

TINY = replace(
    PRESETS["sample"],
    layers=1,
    d_model=16,
    d_ff=32,
    heads=2,
    vocab=500,
    dropout=0.1,
    epochs=2,
    warmup=10,
    device="cpu",
)


@pytest.fixture(scope="module")
def data():
    """A few hundred pairs, enough to train on for a second."""
    whole = prepare(TINY)
    val = whole.corpus["val"][:8]
    corpus = {"val": val, "test": val, "test_unseen": val}
    return TrainingData(corpus, whole.tokenizer, whole.train[:200], whole.val[:8])


@pytest.fixture
def untrained(data):
    torch.manual_seed(0)
    model = build_model(TINY, len(data.tokenizer)).eval()
    return Trained(model, data.tokenizer, TINY)


def test_every_field_is_an_option():
    for name, value in asdict(TINY).items():
        if name != "publish":
            option = [f"--{name}", str(value).lower()]
            chosen = train.main.parse(["--preset", "base", *option])
            assert getattr(plain_config(chosen), name) == value and not chosen.resume
    assert train.main.parse(["--publish", "x", "--resume"]).publish == "x"
    assert train.main.parse(["--resume"]).resume
    chosen = train.main.parse(["--preset", "sample", "--epochs", "3"])
    assert plain_config(chosen) == replace(PRESETS["sample"], epochs=3) and not chosen.resume


def test_both_paths_train_the_same_model(data, tmp_path, monkeypatch):
    """Without dropout, whose masks differ, an epoch by either path ends at the same losses."""
    calls = []
    fast = fast_loss
    monkeypatch.setattr(losses, "fast_loss", lambda *a, **k: calls.append(1) or fast(*a, **k))
    reports = {}
    for path in ("fast", "textbook"):
        before = len(calls)
        training = training_of(replace(TINY, dropout=0.0, path=path), data, tmp_path)
        reports[path] = training.train_epoch()
        assert training.optimizer.defaults["fused"]
        assert (len(calls) > before) is (path == "fast")
    assert reports["fast"].loss == pytest.approx(reports["textbook"].loss, rel=1e-4)
    assert reports["fast"].nll == pytest.approx(reports["textbook"].nll, rel=1e-4)
    assert TrainConfig().path == "fast"


def test_the_best_model_is_kept_and_not_the_last(data, tmp_path):
    training = training_of(TINY, data, tmp_path)
    row = {"epoch": 1, "val_bleu": 5.0}
    training.end_epoch(row)
    best = sha256(tmp_path / "model.safetensors")
    with torch.no_grad():
        next(training.model.parameters()).add_(1.0)
    training.end_epoch(row | {"epoch": 2, "val_bleu": 4.0})
    assert sha256(tmp_path / "model.safetensors") == best
    training.end_epoch(row | {"epoch": 3, "val_bleu": 6.0})
    assert sha256(tmp_path / "model.safetensors") != best


def test_accumulation_counts_optimizer_steps(data, tmp_path):
    training = training_of(replace(TINY, accumulate=3, max_tokens=256), data, tmp_path)
    plan = epoch_plan(training.config, data, 1)
    assert {len(step) for step in plan} == {3}
    training.train_epoch()
    assert training.steps_taken == len(plan)
    expected = training.lr_at(training.steps_taken)
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_the_kind_of_a_step_is_decided_once_and_kept(data, tmp_path):
    """`auto` takes what suits the device; the state names it, and no other can resume."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolved(TINY, cpu).step == "eager"
    assert resolved(TINY, gpu).step == "graphed"
    for changes, world in (
        ({"compile": True}, 1),
        ({"fused": False}, 1),
        ({"bpe_dropout": 0.1}, 1),
        ({}, 2),
    ):
        assert resolved(replace(TINY, **changes), gpu, world).step == "eager"
        with pytest.raises(ValueError, match="--step graphed"):
            resolved(replace(TINY, step="graphed", **changes), gpu, world)
    assert resolved(replace(TINY, accumulate=2), gpu).step == "static"
    with pytest.raises(ValueError, match="on a GPU"):
        resolved(replace(TINY, step="graphed"), cpu)
    config = replace(TINY, step="static", epochs=1)
    training = training_of(config, data, tmp_path)
    training.train_epoch()
    training.save()
    assert training_of(config, data, tmp_path, resume=True).steps_taken == training.steps_taken
    with pytest.raises(ValueError, match=r"another --step \(static, now eager\)"):
        training_of(replace(config, step="eager"), data, tmp_path, resume=True)
    on_cpu = replace(TINY, step="graphed")  # a model from a GPU is validated here all the same
    assert callable(loss_function_of(on_cpu, cpu))


def test_a_look_now_and_then_finds_what_a_look_each_step_does(data, tmp_path):
    """As on a GPU: the same report, and the step that went wrong."""
    reports = []
    for every in (1, 3):
        training = training_of(TINY, data, tmp_path)
        training.every = every
        reports.append(training.train_epoch())
    assert reports[0] == reports[1] and len(reports[0].grad_norms) == training.done > 5
    honest, calls = training.take.loss_of, []

    def poisoned(*given):
        calls.append(given)
        loss, nll = honest(*given)
        return (loss * math.nan if len(calls) == 2 else loss), nll

    training.epoch, training.done, training.take.loss_of = 2, 0, poisoned
    before = training.steps_taken
    with pytest.raises(Diverged, match=rf"^step {before + 2} \(epoch 2, step 2 of it"):
        training.train_epoch()
    assert len(calls) == 3 and not saved_states(tmp_path)
    with pytest.raises(Diverged):
        training.take.pending.append(torch.full((3,), math.nan))
        training.save()  # nothing that went wrong is ever saved
    assert not saved_states(tmp_path)


def test_saved_models_load_as_they_were(untrained, tmp_path):
    save_model(tmp_path, untrained)
    loaded = load_model(tmp_path)
    for name, tensor in weights(loaded.model).items():
        assert tensor.equal(weights(untrained.model)[name].half().float())
    assert loaded.model.src_embed[0].lut.weight is loaded.model.generator.proj.weight
    sentence = "Ein Hund läuft über die Wiese."
    assert loaded.tokenizer.encode(sentence) == untrained.tokenizer.encode(sentence)


def test_translations_come_back_in_order():
    trained = load_model(ROOT / "models" / "sample-de-en")
    sentences = [german for german, _ in load_corpus("sample")["val"][:7]]
    rows = [source_ids(sentence, trained.tokenizer) for sentence in sentences]
    together = decode_rows(trained, rows, best_ids, batch_size=3)
    assert together == [plain_translate(trained, [s])[0] for s in sentences]


def assert_refused(folder: Path) -> None:
    """Loading says in one line what is wrong where."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.model", "config.json"])
@pytest.mark.parametrize("fault", ["missing", "truncated", "foreign"])
def test_a_damaged_model_is_refused_in_one_line(untrained, tmp_path, name, fault):
    save_model(tmp_path, untrained)
    path = tmp_path / name
    whole = path.read_bytes()
    path.unlink()
    if fault != "missing":
        path.write_bytes(whole[: len(whole) // 2] if fault == "truncated" else b"foreign")
    assert_refused(tmp_path)


def test_a_file_of_another_model_is_refused_in_one_line(untrained, data, tmp_path):
    wrong_settings = {"layerz": 3}, {"d_model": "wide"}, {"heads": 0}, {"d_model": 48, "heads": 3}
    for wrong in wrong_settings:
        save_model(tmp_path, untrained)
        (tmp_path / "config.json").write_text(json.dumps(asdict(TINY) | wrong))
        assert_refused(tmp_path)
    save_model(tmp_path, untrained)
    save_tensors(tmp_path / "model.safetensors", {"weight": torch.zeros(2)}, {})
    assert_refused(tmp_path)
    save_model(tmp_path, untrained)
    BPETokenizer.train((german for german, _ in load_corpus("sample")["val"]), 200).save(
        tmp_path / "tokenizer.model"
    )
    assert_refused(tmp_path)


FREE = {"device", "name", "publish", "tracker", "save_every", "beam", "alpha"}
MACHINES = {"path", "fused", "compile", "deterministic", "step"}


@pytest.mark.parametrize("field", [field.name for field in fields(TINY)])
def test_a_resume_refuses_every_other_recipe(field):
    """Except in where it runs, what it writes and what it reports, and how steps are computed."""
    value = getattr(TINY, field)
    other = not value if isinstance(value, bool) else value * 2 if value else f"{value}+"
    other = 1 if value == 0 and not isinstance(value, bool) else other
    change = {field: (value, other)}
    expected = (change, {})
    if field in FREE | MACHINES:
        expected = ({}, change if field in MACHINES else {})
    meta = {"run": identity(TINY), "asked": asdict(TINY)}
    assert differences(meta, replace(TINY, **{field: other})) == expected


def test_pieces_come_from_the_training_split_alone(monkeypatch):
    """ERRATA 18: otherwise the vocabulary knows what the model will be tested on."""
    pairs = [("ein Hund", "a dog"), ("ein roter Ball", "a red ball")] * 20
    corpus = {"train": pairs, "val": [("xylophon", "xylophone")] * 99, "test": pairs}
    monkeypatch.setattr(core_data, "load_corpus", lambda name: corpus)
    tokenizer = prepare(replace(TINY, vocab=40)).tokenizer
    assert UNK not in tokenizer.encode("roter Ball") and UNK in tokenizer.encode("xylophon")


def test_a_checkpoint_of_another_configuration_is_refused(data, tmp_path):
    training = training_of(TINY, data, tmp_path)
    training.end_epoch({"epoch": 1, "val_bleu": 1.0})
    both = r"another --d_ff \(32, now 64\), another --lr \(0.002, now 1e-05\): resume"
    with pytest.raises(ValueError, match=f"another configuration, with {both}"):
        training_of(replace(TINY, d_ff=64, lr=1e-5), data, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("command", "argv", "word"),
    [
        (train, ["--preset", "smal"], "preset"),
        (train, ["--layerz", "3"], "layerz"),
        (train, ["--layers", "three"], "layers"),
        (train, ["--corpus", "wmt14"], "corpus"),
        (train, ["--device", "a toaster"], "unknown device"),
        (train, ["--device", "meta"], "no code for device 'meta'"),
        (train, ["--accumulate", "0"], "accumulate must be from 1 to"),
        (train, ["--preset", "sample", "--heads", "512"], "of heads, 512, not 128"),
        (train, ["--d_model", "33", "--heads", "1"], "d_model must be a multiple of 2, not 33"),
        (train, ["--preset", "base", "--warmup", "0"], "warmup must be at least 1"),
        (train, ["--name", ""], "name must be a plain name"),
        (train, ["--name", "a/b"], "name must be a plain name"),
        (train, ["--publish", "../b"], "publish must be a plain name"),
        (train, ["--preset", "sample", "--vocab", "30"], "than required_chars. 30 vs 61."),
        (train, ["--preset", "sample", "--max_tokens", "10"], "10 a batch: raise max_tokens"),
        (
            train,
            ["--corpus", "sample", "--vocab", "8192"],
            "--vocab 8192 on sample: Vocabulary size too high",
        ),
        (train, ["--preset", "sample", "--from", "none"], "none holds no run"),
        (train, ["--preset", "sample", "--beam", "101"], "beam must be from 1 to 100"),
        (train, ["--preset", "sample", "--name", "taken"], "can't write"),
        (train, ["--preset", "sample", "--resume", "--name", "never-started"], "no checkpoint"),
        (ingredients, ["--seedz", "3"], "seedz"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(
    command, argv, word, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    (tmp_path / "taken").touch()
    assert command.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and word in error


@pytest.mark.parametrize("corpus", ["", "sample", "multi30k"])
@pytest.mark.parametrize("preset", PRESETS)
def test_make_trains_every_preset_on_every_corpus(preset, corpus):
    """Without CORPUS on the preset's own, and with as many pieces as there are words for."""
    told = [f"PRESET={preset}", *[f"CORPUS={corpus}"] * bool(corpus)]
    make = ["make", "--dry-run", "--silent", "--always-make", "VENV=given", "train", *told]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in printed.splitlines() if "scripts.train" in line)
    chosen = plain_config(train.main.parse(line.split("scripts.train ")[1].split()))
    own = PRESETS[preset]
    vocab = 1000 if corpus == "sample" else own.vocab
    assert chosen == replace(own, corpus=corpus or own.corpus, vocab=vocab)
    if chosen.corpus == "sample":
        assert len(prepare(chosen).tokenizer) == vocab


def test_asking_for_a_gpu_without_one(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train.main(["--device", "cuda"]) == 2
    assert "no usable GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert train.main(["--device", "cuda:1"]) == 2
    assert "no 'cuda:1': this machine has 1 GPUs" in capsys.readouterr().err


def test_erratum_25_training_runs_without_a_gpu(data, tmp_path, monkeypatch):
    """A whole epoch on a machine whose CUDA calls all fail, as they do without a GPU."""

    def no_gpu(*_):
        raise RuntimeError("no NVIDIA driver on this machine")

    monkeypatch.setattr(torch.cuda, "set_device", no_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    history = fit(replace(TINY, epochs=1, device="auto"), data, tmp_path)
    assert len(history) == 1 and (tmp_path / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The folder of runs in which the command has trained one, and what it printed."""
    runs, printed = tmp_path_factory.mktemp("finished"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setenv("SERIES_RUNS", str(runs))
        patch.setattr(fast_run, "prepare", lambda config: data)
        patch.setitem(PRESETS, "sample", ONE)
        patch.setattr(sys, "argv", ["train"])
        assert train.main(["--preset", "sample"]) == 0
    return runs, printed.getvalue()


ONE = replace(TINY, epochs=1, average=2, schedule="inverse_sqrt", name="one")


@pytest.fixture
def commands(data, finished, tmp_path, monkeypatch):
    """A copy of the folder of runs, in which the command works; nothing can be published."""
    runs = shutil.copytree(finished[0], tmp_path / "runs")
    monkeypatch.setenv("SERIES_RUNS", str(runs))
    monkeypatch.setattr(fast_run, "prepare", lambda config: data)
    monkeypatch.setitem(PRESETS, "sample", ONE)
    monkeypatch.setattr(fast_run, "publish", None)
    monkeypatch.setattr(sys, "argv", ["train"])
    return runs


def contents(folder: Path) -> dict[str, str]:
    """Every file below `folder` and its SHA-256."""
    return {str(path): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_whole_command_leaves_a_model_a_record_and_a_log(data, finished):
    runs, printed = finished
    assert "test: BLEU" in printed and "reference" in printed
    folder = runs / "one"
    record = load_record("record", folder)
    assert record["weights_sha256"] == sha256(folder / "model.safetensors")
    assert (folder / "log.csv").read_text().count("\n") == 2
    again = evaluate(load_model(folder), data.corpus["test"])
    assert again["bleu"] == record["test"]["test"]["bleu"]


ONE_LINES = {
    "another run": ((), ["--seed", "2"], "finished run (seed 1, epochs 1, BLEU"),
    "fewer epochs": ((), ["--epochs", "3"], "lengthen it by --from"),
    "no record": (["record.json"], [], "lacks its record: finish it with --resume"),
    "no states": (["state-*"], [], "finished run (seed 1"),
    "by hand": (["record.json", "state-*", "epoch-*"], [], "holds a model: choose another --name"),
    "a shipped model": (
        (),
        ["--name", "x", "--publish", "sample-de-en"],
        "choose another --publish",
    ),
    "a record": ((), ["--name", "x", "--publish", "table3-multi30k"], "choose another --publish"),
    "same folder": ((), ["--from", "ONE", "--name", "one", "--epochs", "2"], "another --name"),
    "in a model's place": (
        ["record.json", "state-*", "epoch-*"],
        ["--from", "TWO", "--epochs", "2", "--name", "one", "--resume"],
        "holds a model: choose another --name",
    ),
    "as long": ((), ["--from", "ONE"], "give more by --epochs"),
    "no longer run": (
        (),
        ["--from", "ONE", "--epochs", "2", "--lr", "1", "--d_ff", "64", "--seed", "2"],
        "another --d_ff (32, now 64), another --lr (0.002, now 1.0), another --seed (1, now 2): a",
    ),
}


@pytest.mark.parametrize(("lost", "options", "says"), ONE_LINES.values(), ids=ONE_LINES)
def test_nothing_trained_is_lost(commands, capsys, lost, options, says):
    """The command refuses before it trains or deletes anything, and says what is there."""
    shutil.copytree(commands / "one", commands / "two")
    for path in (path for pattern in lost for path in (commands / "one").glob(pattern)):
        path.unlink()
    before, folders = contents(commands), {"ONE": "one", "TWO": "two"}
    options = [str(commands / folders[w]) if w in folders else w for w in options]
    assert train.main(["--preset", "sample", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert contents(commands) == before


def test_a_run_is_done_once_and_replaced_if_asked(commands, finished, monkeypatch, capsys):
    """Asked for again it prints its report; without its record, `--resume` makes that."""
    before = contents(commands)
    with monkeypatch.context() as patch:
        patch.setattr(fast_run, "prepare", None)  # any training now fails
        assert train.main(["--preset", "sample"]) == 0
    first, *report = capsys.readouterr().out.splitlines()
    assert "nothing to train" in first and finished[1].endswith("\n".join(report) + "\n")
    for other in (["--beam", "3"], ["--precision", "bf16"]):  # what decides the scores, too
        assert train.main(["--preset", "sample", *other]) == 2
    assert contents(commands) == before
    record = load_record("record", commands / "one")
    (commands / "one/record.json").unlink()
    assert train.main(["--preset", "sample", "--resume"]) == 0
    assert load_record("record", commands / "one") | {"date": record["date"]} == record
    assert train.main(["--preset", "sample", "--seed", "2", "--overwrite"]) == 0
    other = load_record("record", commands / "one")
    assert (record["config"]["seed"], other["config"]["seed"]) == (1, 2)
    assert other["weights_sha256"] != record["weights_sha256"]


def test_a_model_is_published_over_itself_alone(tmp_path, untrained, monkeypatch):
    """A resumed run may have published a part already."""
    monkeypatch.setattr(cards, "ROOT", tmp_path)
    monkeypatch.setattr(cards, "RESULTS", tmp_path)
    save_model(tmp_path / "run", untrained)
    cards.refuse_to_publish(tmp_path / "run", "mine")
    save_model(tmp_path / "models/mine", untrained)
    (tmp_path / "mine.json").touch()
    cards.refuse_to_publish(tmp_path / "run", "mine")
    for there in ("models/mine/model.safetensors", "mine.json"):
        with pytest.raises(ValueError, match=f"{there} exists"):
            cards.refuse_to_publish(tmp_path / "another", "mine")
        (tmp_path / there).unlink()


def test_a_refusal_reaches_every_process(monkeypatch):
    """The first process alone looks at the folder; the others must not wait for it."""

    class Second(Ranks):
        def gather(self, value):
            return [(None, ValueError("holds a run")), value]

    monkeypatch.setattr(fast_run, "join_ranks", lambda device: nullcontext(Second(1, 2)))
    with pytest.raises(ValueError, match="holds a run"):
        fast_run.run(TINY)


def test_what_was_published_meanwhile_stays(commands, monkeypatch, capsys):
    """The name was free when the training began; its own folder has all of it."""
    refuse = Mock(side_effect=[None, ValueError("models/mine exists")])
    monkeypatch.setattr(fast_run, "refuse_to_publish", refuse)
    monkeypatch.setattr(fast_run, "writable", lambda folder: folder)
    assert train.main(["--preset", "sample", "--name", "late", "--publish", "mine"]) == 2
    assert "models/mine exists" in capsys.readouterr().err
    assert load_record("record", commands / "late")["weights_sha256"]


def test_a_lengthened_run_is_the_longer_run(commands, capsys, monkeypatch):
    """To the bit, as its rate doesn't depend on the length; also with a mean as the old model."""
    whole = ["--preset", "sample", "--epochs", "2", "--name", "whole"]
    assert train.main(whole) == 0
    old = load_model(commands / "one")
    digest = sha256(commands / "one/model.safetensors")
    with torch.no_grad():
        next(old.model.parameters()).zero_()
    save_model(commands / "one", old)
    assert train.main(["--from", f"{commands / 'one'}/", "--epochs", "2"]) == 0
    longer, straight = (load_record("record", commands / name) for name in ("one-2", "whole"))
    mean = sha256(commands / "one/model.safetensors")
    assert longer["from"] == {"run": "one", "epochs": 1, "weights_sha256": mean} and mean != digest
    assert "It went on from the run one after 1 epochs." in cards.model_card(longer)
    assert longer["weights_sha256"] == straight["weights_sha256"]
    same = ("test", "samples", "chosen_by_val_bleu", "best_epoch")
    assert [longer[name] for name in same] == [straight[name] for name in same]
    one, other = (newest_state(commands / name).tensors for name in ("one-2", "whole"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    assert [path.name for path in saved_states(commands / "one-2", "epoch")] == [
        "epoch-001.safetensors",
        "epoch-002.safetensors",
    ]
    cut = ["--from", str(commands / "one"), "--epochs", "2", "--name", "cut"]
    with monkeypatch.context() as patch:  # it ends between its first state and its model
        patch.setattr(core_training, "save_model", Mock(side_effect=OSError("killed")))
        assert train.main(cut) == 2
    assert train.main([*cut, "--resume"]) == 0
    assert load_record("record", commands / "cut")["weights_sha256"] == straight["weights_sha256"]
    shutil.rmtree(commands / "one")  # as on another machine: its own state knows the settings
    (commands / "one-2/record.json").unlink()
    assert train.main(["--from", "runs/one", "--epochs", "2", "--resume"]) == 0
    again = load_record("record", commands / "one-2")
    assert again | {name: longer[name] for name in ("date", "command", "repeat")} == longer


def test_the_ablation_goes_on_where_it_stopped(data, tmp_path, monkeypatch):
    """Every ingredient trains; a run that is done is read, not trained again."""
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    monkeypatch.setattr(ingredients, "prepare", lambda config: data)
    monkeypatch.setitem(PRESETS, "narrow", replace(TINY, epochs=1, average=2, beam=2))
    few = {name: ingredients.INGREDIENTS[name] for name in ("the recipe", "post-norm", "Muon")}
    monkeypatch.setattr(ingredients, "INGREDIENTS", few)
    options = ingredients.IngredientsOptions(corpus="sample")
    record = ingredients.ablate(options)
    assert [len(row["runs"]) for row in record["rows"].values()] == [3, 2, 2]
    assert ingredient_verdicts(record).keys() == {"post-norm", "Muon"}
    monkeypatch.setattr(ingredients, "fit", None)  # any training now fails
    assert ingredients.ablate(options)["rows"] == record["rows"]


def test_every_ingredient_changes_what_the_preset_says():
    narrow = PRESETS["narrow"]
    for name, changes in ingredients.INGREDIENTS.items():
        assert (replace(narrow, **changes) == narrow) is (name == "the recipe"), name


def test_only_what_exceeds_the_spread_between_seeds_counts():
    """Seeds are half a point apart: what is near, or would only pass by itself, is not claimed."""

    def row(*scores, changes=True):
        changed = {"lr": 1.0} if changes else {}
        return {
            "changes": changed,
            "runs": [{"seed": i, "best": score} for i, score in enumerate(scores)],
        }

    rows = {
        "the recipe": row(31.0, 31.5, 32.0, changes=False),
        "up": row(35.0, 35.5),
        "down, one run": row(25.0),
        "near": row(32.4, 31.9),
        "alone": row(32.5, 32.6),
    }
    record = {"rows": rows}
    found = ingredient_verdicts(record)
    told = {name: verdict.difference > 0 for name, verdict in found.items() if verdict.told}
    assert told == {"up": True, "down, one run": False}
    assert found["alone"].p < 0.05 and not found["alone"].told  # it would pass by itself


def shipped() -> list[str]:
    return sorted(path.name for path in (ROOT / "models").iterdir())


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_model_is_the_one_on_record(name):
    record, folder = load_record(name), ROOT / "models" / name
    assert record["weights_sha256"] == sha256(folder / "model.safetensors")
    assert load_model(folder).config == TrainConfig(**record["config"])
    assert (folder / "README.md").read_text("utf-8") == cards.model_card(record)
    limit = 2 if name == "sample-de-en" else 16
    assert sum(path.stat().st_size for path in folder.iterdir()) < limit * 2**20


def at_hand(corpus: str) -> bool:
    return corpus == "sample" or bool(os.environ.get("MULTI30K_DIR"))


def test_what_is_published_is_whole(untrained, tmp_path, monkeypatch):
    """Weights, tokenizer and settings are unchanged; the card is the record's."""
    save_model(tmp_path / "run", untrained)
    record, saved = load_record("sample-de-en"), {}
    monkeypatch.setattr(cards, "ROOT", tmp_path)
    monkeypatch.setattr(cards, "save_record", lambda name, of: saved.update({name: of}))
    cards.publish(tmp_path / "run", "mine", record)
    assert saved == {"mine": record}
    there = tmp_path / "models/mine"
    assert (there / "README.md").read_text("utf-8") == cards.model_card(record)
    kept = weights(load_model(tmp_path / "run").model)
    assert all(kept[n].equal(t) for n, t in weights(load_model(there).model).items())


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_model_scores_what_its_record_says(name):
    """If the corpus is at hand, its first test split; ten texts by the plain and fast searches."""
    record, trained = load_record(name), load_model(ROOT / "models" / name)
    config = trained.config
    search = (config.beam, config.alpha)
    if at_hand(config.corpus):
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
    quick = translate(trained, sources, DecodeOptions(*search))
    assert quick == plain


def test_the_records_hold_the_bars():
    sample = load_record("sample-de-en")
    assert sample["test"]["test"]["bleu"] >= 95
    assert "test_unseen" in sample["test"]
    multi30k = load_record("multi30k-de-en")["test"]["test_2016_flickr"]
    assert multi30k["bleu"] >= 40 and load_record("multi30k-de-en")["parameters"] <= 8e6
    assert "test_2017_flickr" in load_record("multi30k-de-en")["test"]
    assert "tok:13a" in multi30k["signature"] and "case:mixed" in multi30k["signature"]


def test_the_records_say_what_the_chapter_says():
    """The figures and the sentences in the chapter's prose."""
    record, recipe = load_record("multi30k-de-en"), load_record("recipe-multi30k")
    train, val, bleu = (
        {row["epoch"]: row[name] for row in record["history"]}
        for name in ("train_loss", "val_loss", "val_bleu")
    )
    assert list(train.values()) == sorted(train.values(), reverse=True)
    assert val[11] < min(val[epoch] for epoch in range(1, 11)) and bleu[11] < bleu[10] - 2
    names = {"name": "multi30k", "publish": "multi30k-de-en"}
    assert TrainConfig(**record["config"]) == replace(PRESETS["small"], **names)
    said = str(record["samples"][:4])
    assert all(word in said for word in ("throwing", "Boon", "spraying", "starring"))
    found = ingredient_verdicts(recipe)
    told = {name for name, verdict in found.items() if verdict.told}
    assert told == {"dropout 0.3", "peak rate / 4", "BPE-dropout 0.1"}
    assert all(found[name].difference < 0 for name in told)
    assert TrainConfig(**recipe["config"]) == replace(PRESETS["narrow"], device="cpu")
    gpu = load_record("gpu-small-1")
    assert record["device"].startswith("CPU (x86_64), 1 of ") and "H200" in gpu["device"]
    assert (round(record["seconds"] / 60), gpu["seconds"]) == (95, 22)


def test_nothing_is_unpickled():
    """No chapter and no helper calls what can run code on loading."""
    for path in Path(ROOT, "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in {"torch.load", "pickle.load", "pickle.loads"}, path.name


def test_erratum_23_the_average_of_equals_is_the_same(untrained, tmp_path):
    save_model(tmp_path, untrained)
    same = average_checkpoints([tmp_path / "model.safetensors"] * 3)
    for name, tensor in weights(untrained.model).items():
        torch.testing.assert_close(same[name], tensor.half().float(), rtol=0, atol=0)
    paths = []
    for number, value in enumerate((1.0, 2.0, 6.0)):
        paths.append(tmp_path / f"{number}.safetensors")
        save_tensors(paths[-1], {"w": torch.full((2,), value)}, {})
    torch.testing.assert_close(average_checkpoints(paths)["w"], torch.full((2,), 3.0))
