"""All that is owed to a GPU, at tiny size on a CPU: done in order, stopped, continued."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from scripts import gpu
from scripts.bench import carry, items
from scripts.book import records
from scripts.book.records import load_record, sha256
from scripts.core.checkpoints import saved_states
from scripts.core.models import load_model
from scripts.core.settings import PRESETS
from scripts.core.steps import Step
from scripts.core.training import Training
from scripts.ladder import agenda, climbing, rungs
from scripts.ladder.agenda import Clock, Item, OutOfTime, Settings, listing, owed, serve

TINY = ("--device", "cpu", "--tiny")
HERE = Settings("cpu", tiny=True)
NAMES = [item.name for item in items.agenda()]
MAY_SHIP = [name for name, of in rungs.RUNS.items() if rungs.RUNGS[of].candidate]
# Of items that at tiny size differ in seed or dropout alone, one is done here.
AGAIN = {"final-2", "final-more-2", "final-long-1", "final-long-2", "final-long-3"}
SOME = [name for name in NAMES if name not in AGAIN]
TRAINED = [name for name in (*rungs.RUNS, "base") if name in SOME]
TESTED = [name for name in TRAINED if name in (*MAY_SHIP, "base")]  # others read no test set


def said(text: str) -> list[str]:
    """The lines of a terminal's text, without bars and epochs."""
    lines = (line.strip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line and not line.startswith("epoch ")]


def contents(folder: Path) -> dict[str, str]:
    """Every file below `folder` with its SHA-256."""
    return {
        path.relative_to(folder).as_posix(): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The test's own folder of runs; it isn't made yet."""
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def whole(once) -> Path:
    """A folder with `runs` and `out` of an undisturbed agenda of SOME; all workers read it."""

    def make(home: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SERIES_RUNS", str(home / "runs"))
            agree = {"agrees": True, "not_run": []}  # the bare machine below runs them
            patch.setattr(items, "steps_agree", lambda settings: agree)
            before = contents(ROOT / "results")
            assert gpu.main([*TINY, "--only", ",".join(SOME), "--out", str(home / "out")]) == 0
            assert contents(ROOT / "results") == before

    return once("gpu-agenda", make)


@pytest.fixture
def done(whole, monkeypatch) -> Path:
    """`whole`, with its runs as the folder of runs."""
    monkeypatch.setenv("SERIES_RUNS", str(whole / "runs"))
    return whole


# The whole agenda.


def test_every_item_leaves_its_record(done):
    assert {path.stem for path in HERE.records.iterdir()} == {f"gpu-{name}" for name in SOME}
    assert HERE.records == done / "runs/gpu-tiny/results"
    for name in SOME:
        record = load_record(f"gpu-{name}", HERE.records)
        assert list(record)[:3] == ["command", "repeat", "commit"] and record["not_run"]
        assert record["command"] == record["repeat"]
        _, _, module, *words = record["repeat"].split()
        assert module == "scripts.gpu" and gpu.main.parse(words).names == [name]
        assert record == load_record("record", HERE.folder(name))
    for name in TRAINED:
        record = load_record(f"gpu-{name}", HERE.records)
        assert record["weights_sha256"] == sha256(HERE.folder(name) / "model.safetensors")
        assert record["history"] and ("test" in record) is (name in TESTED)
    for name in TESTED:
        record = load_record(f"gpu-{name}", HERE.records)
        assert set(record["test"]) == {"test", "test_unseen"}
        assert record["repeat"] in (HERE.folder(name) / "README.md").read_text("utf-8")
    for size in ("small", "base"):
        record = load_record(f"gpu-waterfall-{size}", HERE.records)
        assert len(record["stages"]) > 3 and "recorded" in record["not_run"]


def test_recipes_are_what_the_table_says(done):
    tiny = {"epochs": 2, "average": 2, "max_tokens": 512, "warmup": 4}  # whatever the table says
    for name in TRAINED[:-1]:  # without the base
        record = load_record(f"gpu-{name}", HERE.records)
        found = record["config"] | record["lesson"]
        changes = rungs.RUNGS[rungs.RUNS[name]].changes | {"seed": int(name[-1])}
        for field, value in (changes | tiny).items():
            assert found[field] == value, (name, field)


def test_what_is_done_is_not_done_again(done, monkeypatch, capsys):
    before = contents(HERE.root)
    monkeypatch.setattr(Step, "run", None)  # training would fail now
    assert gpu.main([*TINY, "--only", ",".join(SOME)]) == 0
    assert "nothing asked for is owed" in capsys.readouterr().out
    assert contents(HERE.root) == before


def test_a_record_that_got_lost_is_only_put_back(done, monkeypatch, tmp_path):
    """The item's folder still has it, as after a kill between two writes."""
    copy = shutil.copytree(done / "runs", tmp_path / "copy")
    monkeypatch.setenv("SERIES_RUNS", str(copy))
    path = HERE.records / "gpu-base.json"
    old = path.read_bytes()
    for name in ("base", "truth"):
        (HERE.records / f"gpu-{name}.json").unlink()
    monkeypatch.setattr(Step, "run", None)
    assert gpu.main([*TINY, "--only", "base,truth"]) == 0 and path.read_bytes() == old
    path.unlink()
    monkeypatch.setitem(PRESETS, "base", replace(PRESETS["base"], lr=1.0))
    assert gpu.main([*TINY, "--only", "base"]) == 0  # another recipe's record isn't accepted
    assert re.search("base  failed: .*holds another run", HERE.log.read_text("utf-8"))
    assert not path.exists()


def test_what_comes_back_is_little_and_all(done):
    out = done / "out"
    assert {path.name for path in out.iterdir()} == {"records.json", "log.txt", *carry.MODEL}
    assert all(path.stat().st_size <= carry.LARGEST for path in out.iterdir())
    told = json.loads((out / "records.json").read_text("utf-8"))
    assert told["records"].keys() == {f"gpu-{name}" for name in SOME}
    scores = {name: rungs.val_bleu(told["records"][f"gpu-{name}"]) for name in TESTED}
    picked = told["model"]  # the best by validation of those that may ship
    assert scores[picked] == max(scores.values())
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["name"].endswith(f"gpu-{picked}")
    log = (out / "log.txt").read_text("utf-8").splitlines()
    assert [line.split("  ")[1:3] for line in log] == [[name, "done"] for name in SOME]
    assert all(re.search(r"\d s$", line) for line in log)


def test_at_home_records_and_model_are_put_in_place(whole, runs, capsys):
    words = ["--collect", str(whole / "out")]
    assert gpu.main(words) == 0
    there = whole / "runs/gpu-tiny/results"
    assert capsys.readouterr().out == (whole / "out/log.txt").read_text("utf-8")
    for name in SOME:
        file = f"gpu-{name}.json"
        assert (HERE.records / file).read_bytes() == (there / file).read_bytes()
    told = json.loads((whole / "out/records.json").read_text("utf-8"))
    model = load_model(HERE.folder(told["model"]))
    assert model.config.name.endswith(f"gpu-{told['model']}")
    before = contents(HERE.root)
    assert gpu.main(words) == 0 and capsys.readouterr().out
    assert contents(HERE.root) == before
    own = HERE.folder(told["model"]) / "model.safetensors"
    own.write_bytes(b"another's")
    assert gpu.main(words) == 2 and "holds another model" in capsys.readouterr().err
    assert own.read_bytes() == b"another's"
    assert gpu.main([*TINY, "--out", str(own.parent)]) == 2
    assert "holds a model" in capsys.readouterr().err
    assert gpu.main([*TINY, "--list"]) == 0
    assert capsys.readouterr().out.count("  done ") == len(SOME)


def test_a_model_travels_if_it_may_ship_and_is_small_enough(done, monkeypatch):
    best = carry.best_model(SOME, HERE)
    rest = [name for name in SOME if name != best]
    assert carry.best_model(rest, HERE) in set(TESTED) - {best}
    assert carry.best_model(["muon-1", "truth"], HERE) == ""
    monkeypatch.setattr(carry, "LARGEST", 1000)
    assert carry.best_model(SOME, HERE) == ""


def test_a_bundle_names_nothing_but_items(whole, runs, tmp_path):
    told = json.loads((whole / "out/records.json").read_text("utf-8"))
    told |= {"records": {"../escape": {}, "gpu-truth": {}}, "model": "../escape"}
    records.save_record("records", told, tmp_path)
    (tmp_path / "log.txt").touch()
    assert gpu.main(["--collect", str(tmp_path)]) == 0
    assert [path.name for path in runs.rglob("*.json")] == ["gpu-truth.json"]


@pytest.mark.parametrize("held", [None, "[]", '{"records": {}}', "{}"])
def test_what_is_no_bundle_is_refused_in_one_line(held, tmp_path, runs, capsys):
    if held is not None:
        (tmp_path / "records.json").write_text(held, "utf-8")
    assert gpu.main(["--collect", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and not runs.exists()


# On a machine with few packages.

# Python reads this when it starts, in the process and in those that it starts.
BARE = """
import sys
from functools import partial
from importlib.machinery import PathFinder

# PyTorch's own needs, and what is carried: by the names that they are imported by.
TORCH = "torch torchgen functorch numpy typing_extensions sympy mpmath networkx jinja2 markupsafe"
NAMES = {"docstring-parser": "docstring_parser", "PyYAML": "yaml", "Pygments": "pygments"}
find, known = PathFinder.find_spec, {"scripts", "filelock", "fsspec", *TORCH.split()}
known |= {"_pytest", "py", "test_steps_agree"} | {NAMES.get(one, one) for one in WHEELS}

def find_carried(name, path=None, target=None):
    top = name.split(".")[0]
    carried = top in known or top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
    return find(name, path, target) if carried else None

PathFinder.find_spec = partial(find_carried)  # no method of a class that keeps it, as pytest's does
"""


def test_what_is_carried_is_all_that_it_needs(runs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"WHEELS = {carry.WHEELS}\n{BARE}", "utf-8")
    names = ("small-1", "truth", "waterfall-small")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu", *TINY, "--only", ",".join(names)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = HERE.log.read_text("utf-8").splitlines()
    assert [line.split("  ")[1:3] for line in log] == [[name, "done"] for name in names]
    truth = load_record("gpu-truth", HERE.records)
    assert truth["agrees"] and truth["failures"] == []
    assert truth["passed"] > 10 and truth["skipped"] == 3 and len(truth["not_run"]) == 3


# Out of minutes.


@pytest.fixture
def clocks(monkeypatch) -> list[Clock]:
    """The clocks that are made; they ring when a test says so."""
    made = []

    def noted(clock, *given):
        own(clock, *given)
        made.append(clock)

    own = Clock.__init__
    monkeypatch.setattr(Clock, "__init__", noted)
    monkeypatch.setattr(Clock, "run", lambda clock: None)
    return made


def at_step(monkeypatch, number, act):
    """Have `act` called after training step `number`."""
    step = Training.step

    def acting(training, *given):
        step(training, *given)
        if training.steps_taken == number:
            act()

    monkeypatch.setattr(Training, "step", acting)


def test_when_the_minutes_are_over_a_training_is_saved_and_goes_on(
    runs, clocks, monkeypatch, capsys, tmp_path
):
    words = [*TINY, "--only", "small-1,waterfall-small", "--out", str(tmp_path / "out")]
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda: clocks[0].ring())
        assert gpu.main(words) == 0
    assert "the same command goes on with: small-1" in capsys.readouterr().out
    assert clocks[0].over.is_set() and len(clocks) == 1
    assert clocks[0].reserve == pytest.approx(0.75 / 60) and 8 < clocks[0].left() < 9
    assert signal.getsignal(signal.SIGTERM) is before
    log = (tmp_path / "out/log.txt").read_text("utf-8")
    assert "waterfall-small  done" in log and "small-1  stopped: goes on next time" in log
    assert saved_states(HERE.folder("small-1"))[-1].name == "state-00000005.safetensors"
    assert "failed" not in log
    first = []
    at_step(monkeypatch, 6, lambda: first.append(6))
    at_step(monkeypatch, 5, lambda: first.append(5))
    assert gpu.main(words) == 0 and first == [6]
    assert "small-1  done" in (tmp_path / "out/log.txt").read_text("utf-8")


def test_scores_may_use_the_reserve_and_then_end(runs, clocks, monkeypatch, capsys):
    """A training has ended, but not its scoring: the first ring allows it, the second doesn't."""
    finish, rings = climbing.finish, []

    def slow(*given):
        for _ in range(2):
            clocks[-1].ring()
            time.sleep(0.01)  # the handler runs here
            rings.append(clocks[-1].rings)
        return finish(*given)

    words = [*TINY, "--only", "small-1"]
    with monkeypatch.context() as patch:
        patch.setattr(climbing, "finish", slow)
        assert gpu.main(words) == 0
    assert rings == [1] and "goes on with: small-1" in capsys.readouterr().out
    monkeypatch.setattr(Step, "run", None)  # all its steps are done
    assert gpu.main(words) == 0 and agenda.is_done("small-1", HERE)


def test_a_clock_rings_twice_and_is_then_put_away():
    """Real timers: the first ring is for a training, the second ends whatever runs."""
    waited, clock = time.monotonic() + 20, Clock(0.3 / 60, 0.2 / 60)
    first = []
    with pytest.raises(OutOfTime) as stop, clock:
        while time.monotonic() < waited:
            time.sleep(0.01)
            first += [time.monotonic()] * (clock.rings == 1 and not first)
    assert clock.rings == 2 and stop.value.code == 0 and time.monotonic() < waited
    assert 0.1 < clock.end - first[0] < 0.25
    before, unrung = signal.getsignal(signal.SIGTERM), Clock(0.2 / 60, 0.1 / 60)
    with unrung:
        pass
    time.sleep(0.3)
    assert unrung.rings == 0 and signal.getsignal(signal.SIGTERM) is before


def test_a_signal_from_outside_ends_a_call_between_the_rings():
    clock = Clock(1.0, 0.5)
    clock.ring = lambda: setattr(clock, "rings", 1)  # answered long ago
    with pytest.raises(OutOfTime) as stop, clock:
        clock.ring()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert stop.value.code == 143


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_signal_that_is_not_the_clocks_has_its_own_code(runs, monkeypatch, number, code):
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), number))
        assert gpu.main([*TINY, "--only", "small-1"]) == code
        assert saved_states(HERE.folder("small-1"))[-1].name == "state-00000003.safetensors"
    finally:
        signal.signal(signal.SIGINT, ours)


def test_a_signal_between_two_trainings_gets_a_word(runs, monkeypatch, capsys):
    def struck(settings):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(items, "steps_agree", struck)
    assert gpu.main([*TINY, "--only", "truth"]) == 143
    assert "goes on with: truth" in capsys.readouterr().out


# The order of things, with items that only pretend.


class Hands:
    """A clock's hands, moved by the items that pretend to work."""

    def __init__(self):
        self.seconds, self.calls, self.broken = 0.0, [], {}

    def __call__(self) -> float:
        return self.seconds

    def item(self, name: str, minutes: float, resumes: bool = False, takes: float = 0) -> Item:
        def make(settings):
            self.calls.append(name)
            self.seconds += 60 * (takes or minutes)
            if name in self.broken:
                raise self.broken[name]
            return {"made": name}

        return Item(name, minutes, f"pretends to be {name}", make, resumes)


@pytest.fixture
def hands(runs) -> Hands:
    return Hands()


CPU = Settings("cpu")


def call(hands: Hands, given: list[Item], minutes: float, reserve: float = 0.0) -> list[str]:
    """One call of the agenda: the items that it began."""
    hands.calls.clear()
    assert serve(given, CPU, Clock(minutes, reserve, hands)) == 0
    return list(hands.calls)


def test_items_are_done_in_order_as_far_as_they_fit(hands):
    """What doesn't fit waits, and something shorter may come first; the next call goes on."""
    given = [hands.item("a", 2), hands.item("b", 5), hands.item("c", 1), hands.item("d", 4)]
    assert call(hands, given, 5) == ["a", "c"]
    assert call(hands, given, 9) == ["b", "d"]
    assert call(hands, given, 9) == []
    assert load_record("gpu-b", CPU.records)["made"] == "b"


def test_what_resumes_needs_a_minute_beside_the_reserve(hands):
    given = [hands.item("long", 100, resumes=True, takes=0.1)]
    assert call(hands, given, 1.5, reserve=0.75) == []
    assert call(hands, given, 1.8, reserve=0.75) == ["long"]


@pytest.mark.parametrize(
    "fault",
    [
        ValueError("two\nlines"),
        torch.OutOfMemoryError("CUDA out of memory"),
        FileNotFoundError("no corpus"),
        AssertionError("they differ"),
        KeyError("bleu"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_what_fails_is_noted_and_tried_once_more_after_all_others(hands, fault, capsys):
    given = [hands.item(name, 1) for name in "abc"]
    hands.broken["a"] = fault
    assert call(hands, given, 2) == ["a", "b"]  # c doesn't fit any more
    assert re.search(
        rf"  a  failed: {type(fault).__name__}: .*\d s\n.*  b  done", agenda.log_text(CPU)
    )
    assert agenda.failures(CPU)["a"] == 1
    assert not (CPU.records / "gpu-a.json").exists()
    assert call(hands, given, 9) == ["c", "a"]
    assert "given up" in listing(given, CPU).splitlines()[0]
    capsys.readouterr()
    assert call(hands, given, 9) == []
    assert "failed too often: a;" in capsys.readouterr().out


def test_what_works_the_second_time_is_no_failure_any_more(hands):
    given = [hands.item("a", 1), hands.item("b", 1)]
    hands.broken["a"] = ValueError("not yet")
    assert call(hands, given, 9) == ["a", "b"]
    assert "failed" in listing(given, CPU).splitlines()[0]
    hands.broken.clear()
    assert call(hands, given, 9) == ["a"] and not agenda.failures(CPU)["a"]
    log = agenda.log_text(CPU)
    assert re.findall(r"  (\w)  (\w+)", log) == [("a", "failed"), ("b", "done"), ("a", "done")]


def test_a_failure_that_takes_the_gpu_along_ends_the_process(hands, monkeypatch, capsys):
    """What came before is kept, the failure is noted; the next call goes on with the others."""
    given = [hands.item("a", 1), hands.item("b", 1), hands.item("c", 1)]
    monkeypatch.setattr(gpu, "agenda", lambda: given)
    hands.broken["b"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(agenda, "answers", lambda device: "b" not in hands.calls)
    words = ["--device", "cpu", "--out", str(CPU.root / "out")]
    assert gpu.main(words) == 2 and hands.calls == ["a", "b"]
    said = capsys.readouterr()
    assert said.err.startswith("Traceback") and "illegal memory access" in said.err
    assert said.err.endswith("after b the GPU no longer answers this process\n")
    assert said.out.endswith("the same command goes on with: b, c\n")
    assert [one.name for one in owed(given, CPU)] == ["c", "b"]
    hands.calls.clear()
    hands.broken.clear()
    monkeypatch.setattr(agenda, "answers", lambda device: True)
    assert gpu.main(words) == 0 and hands.calls == ["c", "b"]


def test_what_failed_too_often_is_still_done_when_asked_for(hands, monkeypatch):
    given = [hands.item("a", 0.1), hands.item("b", 0.1)]
    monkeypatch.setattr(gpu, "agenda", lambda: given)
    for _ in range(2):
        agenda.note("a", "failed: no luck", 0.0, CPU)
    gpu.main(["--device", "cpu"])
    assert hands.calls == ["b"]
    gpu.main(["--device", "cpu", "--only", "a"])
    assert hands.calls == ["b", "a"]


@pytest.mark.parametrize(
    ("last", "agrees"),
    [("2 failed, 25 passed, 3 skipped in 9.1s", False), ("27 passed in 9s", True)],
)
def test_what_pytest_says_of_the_steps_is_recorded(last, agrees, monkeypatch):
    told = f"F..\nFAILED tests/test_steps_agree.py::test_a - assert 0.1 <= 0.0001\n{last}\n"
    done = subprocess.CompletedProcess([], int(not agrees), told, "")
    monkeypatch.setattr(items.subprocess, "run", lambda *_, **__: done)
    found = items.steps_agree(Settings("cuda"))
    assert found["agrees"] is agrees and found["not_run"] == []
    assert found["failures"] == [told.splitlines()[1]]
    assert found["passed"] == (27 if agrees else 25) and ("failed" in found) is not agrees


@pytest.mark.parametrize("said", ["", "1 error in 0.32s", "no tests ran in 0.01s"])
def test_where_no_test_ran_nothing_is_recorded(said, monkeypatch):
    done = subprocess.CompletedProcess([], 1, said, "No module named pytest")
    monkeypatch.setattr(items.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match="No module named pytest"):
        items.steps_agree(HERE)


# Out of disk space.


def test_a_full_disk_ends_it_in_one_line(runs, monkeypatch, capsys):
    """All that was written before stays whole; once there is space, the same command goes on."""
    words, rename = [*TINY, "--only", "small-1"], os.replace

    def full(partial, path):
        if "state-00000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(partial, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert gpu.main(words) == 2
    (line,) = said(capsys.readouterr().err)
    assert line.startswith("error: could not write ") and "No space left" in line
    assert "failed" not in agenda.log_text(HERE) and not list(runs.rglob("*.partial"))
    assert [path.name for path in saved_states(HERE.folder("small-1"))] == [
        "state-00000002.safetensors"
    ]
    assert gpu.main(words) == 0 and (HERE.records / "gpu-small-1.json").is_file()


# The command.


@pytest.mark.parametrize("words", [(), TINY])
def test_the_list_names_all_and_touches_nothing(words, runs, capsys):
    """Even without a GPU."""
    results = contents(ROOT / "results")
    assert gpu.main([*words, "--list"]) == 0
    *rows, total = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == NAMES
    assert all(re.search(r" \d+\.\d min  (owed|waits|done) +\w", row) for row in rows)
    assert not runs.exists() and contents(ROOT / "results") == results
    minutes = sum(float(row.split()[1]) for row in rows if " done " not in row)
    _, time, unit, *_ = total.split()
    assert float(time) * {"h": 60, "min": 1}[unit] == pytest.approx(minutes, abs=1.0)


def test_the_order_is_that_of_worth():
    """What may ship comes before the other rungs, right after what it needs."""
    needed = ["reverse-adam-1", "reverse-adam-2", "reverse-onward-1", "reverse-onward-2"]
    small, others = MAY_SHIP[:3], MAY_SHIP[3:]
    first = ["small-1", "truth", *small[1:], *needed, *others, "waterfall-base", "waterfall-small"]
    later = [name for name in rungs.RUNS if name not in first]
    assert [*first, *later, "base"] == NAMES


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--minutes", "0"], "more than 0"),
        (["--only", "small-4"], "unknown item 'small-4'"),
        (["--device", "toaster"], "device"),
        (["--collect", "/nowhere"], "records.json"),
        ([], "no usable GPU"),
    ],
)
def test_a_mistake_gets_one_line(argv, says, runs, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert not runs.exists()


def test_only_a_gpus_records_of_full_size_are_results(runs):
    whole = Settings("cuda")
    assert (whole.root, whole.records) == (runs, ROOT / "results")
    assert whole.config(PRESETS["small"], "small-1").name == "gpu-small-1"
    for other in (Settings("cuda", tiny=True), CPU, HERE):
        assert other.root.parent == runs and other.records == other.root / "results"


# There and back.


@pytest.fixture
def packing(tmp_path, monkeypatch) -> list[list[str]]:
    """A fake pip and a fake corpus; gives the commands that pip got."""
    commands = []

    def pip(command, **_):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for wheel in command[command.index("--dest") + 2 :]:
            (folder / f"{wheel.replace('==', '-')}-py3-none-any.whl").write_bytes(b"wheel")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(carry.subprocess, "run", pip)
    monkeypatch.setattr(carry, "multi30k_text", lambda name: b"captions")
    monkeypatch.setattr(carry, "git_commit", lambda: "c0ffee")
    return commands


def test_what_is_packed(packing, tmp_path, capsys):
    folder = tmp_path / "pack"
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels/old-1.0-py3-none-any.whl").touch()  # with two versions pip would fail
    assert gpu.main(["--pack", str(folder)]) == 0 and "MiB" in capsys.readouterr().out
    (command,) = packing
    line = " ".join(command)
    assert line.startswith(f"{sys.executable} -m pip download ")
    for words in (
        "--no-deps --only-binary=:all: --python-version 3.12",
        "--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64",
        f"sentencepiece=={carry.version('sentencepiece')} ",
    ):
        assert words in line
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    wheels = {one for one in found if one.startswith("wheels/")}
    assert len(wheels) == len(carry.WHEELS) and not any("old" in one for one in wheels)
    corpus = {f"corpus/{name}" for name in carry.MULTI30K_SHA256}
    assert found - wheels == {"start", "commit", *corpus}


def test_what_is_packed_starts(packing, tmp_path, capfd):
    """With a Python that only records its arguments: one installation, then each call's options."""
    folder = tmp_path / "pack"
    carry.pack(folder)
    start = folder / "start"
    assert os.access(start, os.X_OK) and subprocess.call(["sh", "-n", str(start)]) == 0
    (tmp_path / "bin").mkdir()
    told = tmp_path / "told"
    python = tmp_path / "bin/python3"
    python.write_text(
        "#!/bin/sh\n"
        'echo "$* in $PYTHONPATH, $MULTI30K_DIR, $SERIES_COMMIT" '
        f">>{told}\n"
        'while [ $# -gt 0 ]; do test "$1" = --target && mkdir -p "$2"; shift; done; exit 0\n'
    )
    python.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    alone = {"PATH": path, "HOME": str(tmp_path / "home")}
    for _ in range(2):
        words = [str(start), "--minutes", "9", "--out", "a folder"]
        assert subprocess.call(words, cwd=ROOT, env=alone) == 0
    install, *runs = told.read_text("utf-8").splitlines()
    assert install.startswith("-m pip install ") and "--no-index --no-deps" in install
    assert str(tmp_path / "home") in install and len(runs) == 2 and runs[0] == runs[1]
    command, rest = runs[0].split(" in ")
    assert command == "-m scripts.gpu --minutes 9 --out a folder"
    site, corpus, commit = rest.split(", ")
    assert Path(site).is_dir() and (Path(corpus), commit) == (folder / "corpus", "c0ffee")
    assert subprocess.call([str(start)], cwd=tmp_path, env=alone) == 2
    assert "repository's folder" in capfd.readouterr().err


def test_a_pack_without_wheels_is_refused(packing, tmp_path, monkeypatch, capsys):
    fails = subprocess.CompletedProcess([], 1, "", "looking\nERROR: no such wheel")
    monkeypatch.setattr(carry.subprocess, "run", lambda *_, **__: fails)
    assert gpu.main(["--pack", str(tmp_path / "pack")]) == 2
    assert capsys.readouterr().err.endswith("the wheels: ERROR: no such wheel\n")


def test_the_pack_is_never_committed():
    done = subprocess.run(["git", "check-ignore", "build/gpu/start"], cwd=ROOT, capture_output=True)
    assert done.returncode in (0, 128)  # 128: no repository at all


def test_the_commit_is_the_packs_whatever_repository_is_there(tmp_path, monkeypatch):
    """A lent machine may put the copy under its own version control."""
    if (ROOT / ".git").exists():
        assert records.git_commit() not in ("c0ffee", "unknown")
    monkeypatch.setenv("SERIES_COMMIT", "c0ffee")
    assert records.git_commit() == "c0ffee"
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.git_commit() == "c0ffee"
    monkeypatch.delenv("SERIES_COMMIT")
    assert records.git_commit() == "unknown"
