"""What is owed to a GPU: records are skipped, a failure stops nothing, the minutes are kept."""

import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
from conftest import ROOT

from scripts import gpu
from scripts.book.records import load_record, save_record
from scripts.gpu import ITEMS, GpuOptions, Item, record_of, run_items, words_of

OPTIONS = GpuOptions(device="cpu", tiny=True)


@pytest.fixture(autouse=True)
def runs(monkeypatch, tmp_path):
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    return tmp_path / "gpu-rehearsal"


def items(monkeypatch, **codes):
    """Items whose processes run this code."""
    monkeypatch.setattr(gpu, "ITEMS", [Item(name, 1.0, "json.tool") for name in codes])
    monkeypatch.setattr(gpu, "words_of", lambda item, options: ["timeit", "-n1", codes[item.name]])


def test_what_is_on_record_is_skipped_and_a_failure_stops_no_other(runs, monkeypatch, capsys):
    items(monkeypatch, first="print('7 passed')", broken="raise OSError('no disk')", last="0")
    assert run_items(OPTIONS) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].split()[0] for line in lines] == ["done", "failed", "done"]
    assert "no disk" in lines[1] and "7 passed" in (runs / "gpu-first.log").read_text()
    record = load_record("gpu-first", runs / "results")
    assert record["agrees"] and record["passed"] > 0 and record["repeat"] == "python -m json.tool"
    assert run_items(OPTIONS) == 1  # tried again
    assert capsys.readouterr().out.startswith("broken: failed")
    assert run_items(replace(OPTIONS, list=True)) == 0
    states = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert states == ["done", "owed", "done", "min"]


def test_a_run_leaves_its_own_record_and_a_study_saves_its_own(runs, monkeypatch):
    items(monkeypatch, run="0", study="0")
    save_record("record", {"bleu": 40.0}, runs / "gpu-run")
    run_items(OPTIONS)
    assert load_record("gpu-run", runs / "results")["bleu"] == 40.0


def test_it_ends_in_time(monkeypatch, capsys):
    items(monkeypatch, slow="import time; time.sleep(60)", last="0")
    monkeypatch.setattr(gpu, "SLACK", 0.0)
    monkeypatch.setattr(gpu, "max", min, raising=False)  # no least minute: it is killed at once
    assert run_items(OPTIONS) == 1
    assert capsys.readouterr().out.startswith("slow: took too long")
    monkeypatch.setattr(gpu, "attempt", None)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    assert run_items(GpuOptions(minutes=0.5)) == 0  # none fits


def test_without_a_gpu_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2 and "rehearses" in capsys.readouterr().err


def test_every_command_parses_at_both_sizes():
    import importlib

    for item in ITEMS:
        for options in (GpuOptions(), OPTIONS):
            module, *words = words_of(item, options)
            if module != "pytest":
                importlib.import_module(module).main.parse(words)
                assert words[words.index("--device") + 1] == options.device
        assert record_of(item, GpuOptions())[0] == f"gpu-{item.name}"


def test_what_runs_on_a_bare_machine_needs_a_few_wheels_only():
    """Nothing that draws, and no spaCy: PyTorch, NumPy and small wheels."""
    code = """
        import importlib, sys
        for name in ("altair", "pandas", "spacy", "torchtext", "vl_convert", "scipy", "PIL"):
            sys.modules[name] = None
        for name in ("scripts.gpu", "scripts.train", "scripts.studies.waterfall"):
            importlib.import_module(name)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
