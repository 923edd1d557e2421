"""The queue at tiny size: killed and continued, what waits for what, half time, the table."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from scripts.book.records import load_record, save_record, sha256
from scripts.core.cards import model_card, recipe_in_words
from scripts.core.checkpoints import saved_states, weights
from scripts.core.models import load_model
from scripts.core.settings import TrainConfig
from scripts.core.steps import Step
from scripts.core.training import Training
from scripts.fast import run as fast_run
from scripts.ladder import agenda, climbing, queue, risk
from scripts.ladder.agenda import Clock, Item, at_hand, is_done, lacks, owed, serve
from scripts.ladder.climbing import ladder_items, too_far_behind
from scripts.ladder.diversify import pairs_sha256
from scripts.ladder.risk import RiskTraining
from scripts.ladder.rungs import RUNGS, RUNS, ladder_table, pairs_seen

HERE = queue.QueueOptions(tiny=True)
TINY = ("--tiny", "true")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """This process keeps its priority, its threads, and its memory settings."""
    torch.set_num_threads(1)
    for name in ("step_back", "one_thread"):
        monkeypatch.setattr(queue, name, lambda: None)


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The test's own folder of runs."""
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def record_of(name: str) -> dict:
    return load_record(f"ladder-{name}", HERE.records)


# Killed.

KILLED = """
import os, signal, sys
from scripts.core.training import Training
from scripts.ladder import climbing, risk
from scripts.ladder.queue import main

risk.AHEAD = 3
entry, number = sys.argv.pop(1), int(sys.argv.pop(1))
step = Training.step
def fatal(training, *given):
    step(training, *given)
    if training.config.name.endswith(entry) and training.steps_taken == number:
        group = f"/proc/{os.getpid()}/autogroup"
        print(os.nice(0), open(group).read() if os.path.exists(group) else "nice 19")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
Training.step = fatal
sys.exit(main())
"""


@pytest.mark.parametrize(("name", "last", "saved"), [("unidrop-1", 9, 8), ("risk-1", 4, 3)])
def test_killed_in_an_entry_the_same_command_goes_on_to_the_same_weights(
    name, last, saved, runs, tmp_path, monkeypatch
):
    """With layers, features and words dropped the state of the random generator decides much.

    And minimum risk, killed after it wrote for its fourth step of four, doesn't write again before
    the next epoch.
    """
    monkeypatch.setattr(risk, "AHEAD", 3)
    words = [*TINY, "--only", name]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, name, str(last), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,  # whose group is told to step back, too
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert re.search(r"^19 .*nice 19", done.stdout, re.M), done.stdout[-500:]
    assert saved_states(HERE.folder(name))[-1].name == f"state-{saved:08d}.safetensors"
    steps, step, written, write = [], Training.step, [], RiskTraining.write

    def counted(training, *given):
        step(training, *given)
        steps.append(training.steps_taken)

    def noted(training, pairs):
        written.append((training.epoch, training.done))
        return write(training, pairs)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", counted)
        patch.setattr(RiskTraining, "write", noted)
        assert queue.main(words) == 0
    assert steps[0] == saved + 1 and written == [(2, 0), (2, 3)] * (name == "risk-1")
    found = record_of(name)
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path / "straight"))
    assert queue.main(words) == 0
    assert record_of(name)["weights_sha256"] == found["weights_sha256"]
    assert [row["train_loss"] for row in record_of(name)["history"]] == [
        row["train_loss"] for row in found["history"]
    ]


# Whole entries.


@pytest.fixture(scope="module")
def climbed(tmp_path_factory) -> Path:
    """Runs that others need, and runs that need them."""
    home = tmp_path_factory.mktemp("climbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIES_RUNS", str(home))
        for name in ("step_back", "one_thread"):
            patch.setattr(queue, name, lambda: None)
        patch.setattr(climbing, "AT_ONCE", 50)
        patch.setitem(RUNGS, "taught", replace(RUNGS["taught"], teachers=("small-1", "muon-1")))
        assert queue.main([*TINY, "--only", "diverse-1,taught-1"]) == 0
    return home


@pytest.fixture
def done(climbed, monkeypatch) -> Path:
    """`climbed`, set as the folder of runs."""
    monkeypatch.setenv("SERIES_RUNS", str(climbed))
    monkeypatch.setattr(climbing, "AT_ONCE", 50)
    return climbed


def test_what_is_asked_for_comes_with_what_it_needs(done):
    """Each with its record: how to repeat it, what it learned from, a test only if it may ship."""
    names = [path.stem for path in HERE.records.iterdir()]
    assert sorted(names) == [
        f"ladder-{name}" for name in ("diverse-1", "muon-1", "reverse-1", "small-1", "taught-1")
    ]
    for name in names:
        record = load_record(name, HERE.records)
        assert list(record)[:3] == ["command", "repeat", "commit"]
        assert record["command"] == record["repeat"]
        _, _, module, *words = record["repeat"].split()
        assert module == "scripts.ladder.queue"
        options = queue.main.parse(words)
        assert [f"ladder-{one}" for one in options.names] == [name] and options.tiny
        assert record["history"] and record["hours"] >= 0
        assert ("test" in record) is RUNGS[record["rung"]].candidate
        assert 0 <= record["val_bleu_beam"] <= 100
    home = HERE.folder("muon-1")
    muon, taught = record_of("muon-1"), record_of("taught-1")
    assert muon["weights_sha256"] == sha256(home / "model.safetensors") and not muon["lesson"]
    both = [record_of(name)["weights_sha256"] for name in ("small-1", "muon-1")]
    assert taught["lesson"] == {"taught": 0.5, "teachers": ",".join(both)}
    assert taught["learned_from"]["teachers"] == ["small-1", "muon-1"]
    assert record_of("diverse-1")["learned_from"]["reverse"] == ["reverse-1"]


def test_a_diversified_run_learns_from_what_the_others_wrote(done):
    """The texts are there, in four parts of 50; the digest in the record is theirs."""
    data = climbing.data_of("few", 300)
    texts = {}
    for name in ("small-1", "reverse-1"):
        parts = sorted(HERE.folder(name).glob("texts-*.json"))
        texts[name] = [json.loads(path.read_text("utf-8"))["texts"] for path in parts]
        assert [len(part) for part in texts[name]] == [50] * 4
        texts[name] = sum(texts[name], [])
    pairs = climbing.diversified(data, [texts["small-1"]], [texts["reverse-1"]])
    found = record_of("diverse-1")
    assert found["lesson"] == {"pairs": pairs_sha256(pairs)}
    assert found["train_pairs"] == len(pairs.train)


def test_a_mean_of_runs_has_their_mean_weights_and_both_histories(done, monkeypatch, tmp_path):
    """Nothing is trained. With other runs behind it, it isn't the same item."""
    monkeypatch.setenv("SERIES_RUNS", str(shutil.copytree(done, tmp_path / "copy")))
    monkeypatch.setattr(Step, "run", None)  # training would fail
    rung = replace(RUNGS["risk-mean"], mean_of=("small-1", "muon-1"))
    monkeypatch.setitem(RUNGS, "risk-mean", rung)
    assert queue.main([*TINY, "--only", "risk-mean-1"]) == 0
    one, other, mean = (
        weights(load_model(HERE.folder(name)).model)
        for name in ("small-1", "muon-1", "risk-mean-1")
    )
    for name, found in mean.items():
        assert found.equal(((one[name] + other[name]) / 2).half().float())
    found, parts = record_of("risk-mean-1"), [record_of(name) for name in ("small-1", "muon-1")]
    assert found["history"] == parts[0]["history"] + parts[1]["history"]
    assert found["hours"] == pytest.approx(sum(part["hours"] for part in parts), abs=1e-3)
    assert found["learned_from"]["mean_of"] == ["small-1", "muon-1"] and "test" in found
    assert [*found["chosen_by_val_bleu"]] == ["mean of 2 runs"]
    monkeypatch.setitem(RUNGS, "risk-mean", replace(rung, mean_of=("small-1", "taught-1")))
    with pytest.raises(ValueError, match="holds another run"):
        climbing.climbed("risk-mean-1", HERE)


def test_a_mean_names_only_the_runs_that_went_to_their_end(done, monkeypatch, tmp_path):
    """One that was ended at half time is in neither its weights nor its record."""
    monkeypatch.setenv("SERIES_RUNS", str(shutil.copytree(done, tmp_path / "copy")))
    path = HERE.folder("muon-1") / "record.json"
    path.write_text(json.dumps(load_record("record", path.parent) | {"ended": "too far behind"}))
    rung = replace(RUNGS["risk-mean"], mean_of=("small-1", "muon-1", "taught-1"))
    monkeypatch.setitem(RUNGS, "risk-mean", rung)
    found = climbing.climbed("risk-mean-1", HERE)
    parts = [load_record(f"ladder-{name}", HERE.records) for name in ("small-1", "taught-1")]
    assert found["lesson"]["mean_of"] == ",".join(part["weights_sha256"] for part in parts)
    assert found["learned_from"]["mean_of"] == ["small-1", "taught-1"]
    both = [pairs_seen(part, HERE.records) for part in parts]
    assert pairs_seen(found, HERE.records) == sum(both) and both[0] == 2 * 200


def test_each_seed_of_a_mean_has_its_own_runs():
    """The queue's second seed of the model that ships shares no training with the first."""
    first, second = (climbing.rung_of(f"all-mean-{seed}") for seed in (1, 3))
    assert first.mean_of == tuple(load_record("ladder-all-mean-1")["learned_from"]["mean_of"])
    assert len(second.mean_of) == len(first.mean_of) == 5
    assert not {*first.mean_of} & {*second.mean_of} and {*second.mean_of} <= {*RUNS}
    assert [climbing.rung_of(f"risk-again-{seed}").start for seed in (1, 3)] == [
        "risk-long-1",
        "risk-long-3",
    ]


def test_writing_goes_on_where_it_was_cut_off(done, monkeypatch, tmp_path):
    """And starts again if the model is a different one."""
    copy = shutil.copytree(done, tmp_path / "copy")
    monkeypatch.setenv("SERIES_RUNS", str(copy))
    sentences = [source for source, _ in climbing.data_of("few", 300).corpus["train"]]
    before = climbing.written("small-1", sentences, HERE)
    (HERE.folder("small-1") / "texts-000050.json").unlink()
    asked = []
    monkeypatch.setattr(
        climbing, "translate", lambda _, texts, how: asked.append(len(texts)) or ["x"] * len(texts)
    )
    after = climbing.written("small-1", sentences, HERE)
    assert asked == [50] and after == [*before[:50], *["x"] * 50, *before[100:]]
    for name in ("model.safetensors", "record.json"):
        shutil.copy(HERE.folder("muon-1") / name, HERE.folder("small-1") / name)
    climbing.written("small-1", sentences, HERE)
    assert asked == [50] * 5


def test_what_is_done_is_not_done_again_unless_its_model_is_gone_and_needed(
    done, monkeypatch, tmp_path
):
    copy = shutil.copytree(done, tmp_path / "copy")
    monkeypatch.setenv("SERIES_RUNS", str(copy))
    monkeypatch.setattr(Step, "run", None)  # training would fail now
    words = [*TINY, "--only", "small-1,diverse-1"]
    assert queue.main(words) == 0
    shutil.rmtree(HERE.folder("small-1"))
    assert queue.main(words) == 0  # its record is enough
    (HERE.records / "ladder-diverse-1.json").unlink()
    shutil.rmtree(HERE.folder("diverse-1"))
    items = ladder_items(hours=True)
    asked = replace(HERE, only="diverse-1")
    assert [i.name for i in owed(items, asked)] == ["small-1", "diverse-1"]
    small = ["small-1", "small-2", "small-3"]
    assert [i.name for i in owed(items, HERE)][:4] == [*small, "muon-slow-1"]


def test_another_recipe_or_another_lesson_is_refused(done, monkeypatch, tmp_path):
    """If a run is done, and if it is half done."""
    copy = shutil.copytree(done, tmp_path / "copy")
    monkeypatch.setenv("SERIES_RUNS", str(copy))
    for name, changes in (("muon", {"clip": 0.5}), ("taught", {"taught": 0.4})):
        rung = RUNGS[name]
        teachers = ("small-1", "muon-1") if rung.teachers else ()
        other = replace(rung, changes=rung.changes | changes, teachers=teachers)
        monkeypatch.setitem(RUNGS, name, other)
        with pytest.raises(ValueError, match="holds another run"):
            climbing.climbed(f"{name}-1", HERE)
    (HERE.folder("muon-1") / "record.json").unlink()
    (HERE.records / "ladder-muon-1.json").unlink()
    queue.main([*TINY, "--only", "muon-1"])
    assert re.search("muon-1  failed: .*another --clip", agenda.log_text(HERE))


def test_only_a_candidate_is_tested(runs, monkeypatch):
    """With the length penalty that is best by validation; no test set has a say in it."""
    asked, evaluate, val = [], fast_run.evaluate, climbing.data_of("few", 300).corpus["val"]

    def favoured(one, pairs, *how):
        asked.append((pairs == val, *how))
        bleus = {0.6: 11.0, 1.0: 12.0} if pairs == val else {0.6: 99.0}
        found = evaluate(one, pairs, *how)
        return found | {"bleu": bleus.get(how[1], 0.0)} if how else found

    monkeypatch.setattr(fast_run, "evaluate", favoured)
    assert queue.main([*TINY, "--only", "small-1"]) == 0
    assert asked == [
        *((True, 2, alpha) for alpha in climbing.ALPHAS),
        *[(False, 2, 1.0), (False,)] * 2,
    ]
    found = record_of("small-1")
    assert found["val_bleu_by_alpha"] == {"0.6": 11.0, "1": 12.0, "1.4": 0.0, "1.8": 0.0}
    assert set(found["test"]) == {"test", "test_unseen"}
    assert {test["search"] for test in found["test"].values()} == {"beam 2, alpha 1"}
    config = load_model(HERE.folder("small-1")).config
    assert config == TrainConfig(**found["config"]) and config.alpha == 1.0
    (HERE.records / "ladder-small-1.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", None)  # it is read, and not trained again
        assert queue.main([*TINY, "--only", "small-1"]) == 0
    card = (HERE.folder("small-1") / "README.md").read_text("utf-8")
    assert record_of("small-1")["repeat"] in card
    asked.clear()
    assert queue.main([*TINY, "--only", "muon-1"]) == 0 and not asked


def test_killed_behind_its_tests_a_run_is_not_done(runs, monkeypatch):
    """The scores are there, what the ladder adds isn't: the next call completes the record."""
    with monkeypatch.context() as patch:
        patch.setattr(climbing, "evaluate", lambda *_: (_ for _ in ()).throw(agenda.OutOfTime(0)))
        assert queue.main([*TINY, "--only", "small-1"]) == 0
    assert not at_hand("small-1", HERE) and not is_done("small-1", HERE)
    monkeypatch.setattr(Step, "run", None)  # all its steps are done
    assert queue.main([*TINY, "--only", "small-1"]) == 0
    assert {"test", "rung", "train_pairs", "val_bleu_beam"} <= record_of("small-1").keys()


def test_a_candidates_card_names_the_models_that_it_learned_from(done):
    learned, lesson = {"forward": ["a"], "teachers": []}, {"risk": 9.0, "candidates": 8}
    record = record_of("small-1") | {"learned_from": learned, "lesson": lesson}
    found = model_card(record)
    assert "on 8 texts of its own beam a source. It learned from translations by a.\n" in found
    assert "word by word" not in found and "epochs of batches" in found
    averaged = model_card(record_of("small-1") | {"learned_from": {"mean_of": ["b", "c"]}})
    assert "Its weights are the mean of those of b, c.\n" in averaged
    assert "epochs of batches" not in averaged  # it wasn't trained itself
    assert "and alpha by a beam's (0.6: " in found
    assert "learned from" not in (HERE.folder("small-1") / "README.md").read_text("utf-8")
    muon = TrainConfig(**record_of("muon-1")["config"])
    assert "Muon, peak rate 0.02 " in recipe_in_words(muon)


# What waits.


def test_what_lacks_something_is_not_begun(runs):
    began = []

    def make(settings):
        began.append(settings.prefix)
        return {}

    given = [
        Item(name, 0.01, f"pretends to be {name}", make, needs=needs)
        for name, needs in (("a", ()), ("b", ()), ("c", ("a", "b")))
    ]
    assert lacks(given[2], HERE) == ["a", "b"] and "waits" in agenda.listing(given, HERE)
    assert serve(given[2:], HERE, Clock(10, 0)) == 0 and not began
    assert serve(given[1:], HERE, Clock(10, 0)) == 0 and len(began) == 1  # b; c still waits for a
    assert [item.name for item in owed(given, HERE)] == ["a", "c"]
    shutil.rmtree(HERE.folder("b"))
    assert [item.name for item in owed(given, HERE)] == ["a", "b", "c"]  # c needs it again
    assert not at_hand("b", HERE) and is_done("b", HERE)


def test_without_a_corpus_nothing_is_begun(runs, monkeypatch, capsys):
    def gone(*_):
        raise FileNotFoundError("no corpus: set MULTI30K_DIR")

    monkeypatch.setattr(queue, "data_of", gone)
    assert queue.main([*TINY]) == 2 and "MULTI30K_DIR" in capsys.readouterr().err
    assert not HERE.log.exists()


def test_a_rung_for_gpus_alone_is_unknown_to_the_queue(runs, capsys):
    assert queue.main([*TINY, "--only", "agreed-1"]) == 2
    assert "unknown item 'agreed-1'" in capsys.readouterr().err


def test_two_queues_do_not_work_at_once(runs, capsys):
    with queue.alone(HERE.root):
        assert queue.main([*TINY, "--only", "small-1"]) == 2
    assert "another queue is at work" in capsys.readouterr().err
    assert not HERE.folder("small-1").exists()


# Half time.


@pytest.mark.parametrize(
    ("bleus", "epochs", "best", "ended"),
    [
        ([10, 20, 30], 6, [1, 20, 34, 40, 41, 42], False),  # 4 behind is not more than 4
        ([10, 20, 29.9], 6, [1, 20, 34, 40, 41, 42], True),
        ([30, 20, 10], 6, [1, 20, 34, 40, 41, 42], False),  # its best counts, not its last
        ([10, 20], 6, [1, 50, 60, 60, 60, 60], False),  # before half time
        ([10, 20, 29, 30], 6, [90] * 6, False),  # after it
        ([10, 20, 29], 6, [1, 33.5, 50], True),  # half of the best one's 3 epochs counts as 2
        ([10, 20, 29], 6, [1, 33.0, 50], False),
        ([10, 20, 29], 6, [33.5, 90], True),
        ([10, 20, 29], 7, [90] * 6, True),  # half of 7 is 3
        ([1], 1, [90], False),  # one epoch has no half
        ([1, 2, 3], 6, [], False),  # nothing to compare with
    ],
)
def test_half_time(bleus, epochs, best, ended):
    why = too_far_behind(bleus, epochs, best)
    assert bool(why) is ended
    if ended:
        assert f"{len(bleus)} of {epochs} epochs" in why


def test_a_hopeless_rung_is_ended_with_a_record(runs, monkeypatch):
    """If it is killed before its record is there, it isn't trained any further."""
    monkeypatch.setattr(climbing, "best_history", lambda but, settings: [50.0, 60.0])
    with monkeypatch.context() as patch:
        patch.setattr(climbing, "course", None)
        with pytest.raises(TypeError):
            climbing.climbed("small-1", HERE)
    monkeypatch.setattr(Step, "run", None)
    assert queue.main([*TINY, "--only", "small-1"]) == 0
    found = record_of("small-1")
    assert re.search(r"1 of 2 epochs \d+\.\d\d BLEU behind", found["ended"])
    assert len(found["history"]) == 1 and "test" not in found
    assert found["chosen_by_val_bleu"] == {"best epoch": found["history"][0]["val_bleu"]}
    (row,) = ladder_table(HERE.records)
    assert row["epochs"] == 1
    assert queue.main([*TINY, "--only", "small-1"]) == 0
    with pytest.raises(ValueError, match="all were ended"):
        climbing.standing(("small-1",), HERE)


def test_the_best_rung_is_of_the_same_language_and_not_oneself(runs):
    def leave(name, bleus, **more):
        history = [{"val_bleu": bleu} for bleu in bleus]
        chosen = {"chosen_by_val_bleu": {"best epoch": max(bleus)}}
        save_record(f"ladder-{name}", chosen | {"history": history} | more, HERE.records)

    assert climbing.best_history("small-1", HERE) == []
    leave("small-1", [1, 2])
    leave("muon-1", [5, 6])
    leave("reverse-1", [90, 91])
    leave("r-drop-1", [7, 8], ended="early")
    leave("risk-1", [95])  # began from a trained model
    assert climbing.best_history("unidrop-1", HERE) == [5, 6]
    assert climbing.best_history("muon-1", HERE) == [1, 2]


# The table.


def fake(name: str, bleu: float, folder: Path, **more) -> None:
    record = {"hours": 1.25, "val_bleu_beam": bleu + 0.7, "train_pairs": 30_000}
    record["chosen_by_val_bleu"] = {"best epoch": bleu - 1, "mean of the last 5": bleu}
    save_record(f"ladder-{name}", record | {"history": [{}] * 7} | more, folder)


def test_the_table_of_none_one_and_all_records(tmp_path):
    assert ladder_table(tmp_path) == ladder_table(tmp_path / "nowhere") == []
    fake("muon-1", 42.0, tmp_path)
    (row,) = ladder_table(tmp_path)
    assert (row["rung"], row["val_bleu"], row["gain"]) == ("muon", 42, None)
    for name in RUNS:
        fake(name, 41.0 if RUNS[name] == "small" else 42.0 + (name == "final-2"), tmp_path)
    rows = {row["rung"]: row for row in ladder_table(tmp_path)}
    steps = [rung.step for rung in RUNGS.values()]
    assert list(rows) == list(RUNGS) and steps == sorted(steps)
    assert rows["small"]["gain"] == 0 and rows["muon"]["gain"] == 1
    assert rows["reverse"]["gain"] is None and rows["final"]["seeds"] == 2
    final = rows["final"]
    assert (final["val_bleu"], final["gain"], final["hours"]) == (42.5, 1.5, 2.5)
    assert final["beam"] == pytest.approx(43.2)
    assert final["seen"] == 0.21  # millions of pairs, in seven passes
    assert (final["each"], final["epochs"]) == ([42.0, 43.0], 7)


def test_the_ladder_holds_together():
    """What is needed comes first; no run takes very long; the first and last step may ship."""
    seen = set()
    for item in ladder_items(hours=True):
        assert {*item.needs} <= seen, item.name
        assert item.resumes and item.make and 3 < item.minutes < 120
        seen.add(item.name)
    assert seen == {name for name, of in RUNS.items() if not RUNGS[of].gpu}
    for name, rung in RUNGS.items():
        assert rung.candidate is (rung.step in (0, 6))
        config = climbing.config_of(f"{name}-1", queue.QueueOptions())
        assert (config.layers, config.d_model) == (3, 256)
        assert all(getattr(config, field) == value for field, value in rung.changes.items())


# The command.


def test_the_list_names_all_and_touches_nothing(runs, capsys):
    assert queue.main(["--list", "true"]) == 0
    *rows, total = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [item.name for item in ladder_items(hours=True)]
    assert (
        all(re.search(r" \d+\.\d+ (h|min)  \w+ +\S", row) for row in rows) and " h  in all" in total
    )
    assert not runs.exists()


def test_records_are_results_only_when_asked(runs):
    assert queue.QueueOptions(save=True).records == ROOT / "results"
    for other in (queue.QueueOptions(), queue.QueueOptions(tiny=True, save=True)):
        assert runs in other.records.parents


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--hours", "0"], "more than 0"),
        (["--only", "small-9"], "unknown item 'small-9'"),
        (["--list", "perhaps"], "list"),
    ],
)
def test_a_mistake_gets_one_line(argv, says, runs, capsys):
    assert queue.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert not runs.exists()
