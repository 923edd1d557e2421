"""What is owed to a GPU: records are skipped, a failure stops nothing, the minutes are kept."""

import importlib
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT

from scripts import gpu
from scripts.book.records import load_record, save_record
from scripts.gpu import ITEMS, GpuOptions, Item, run_items


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Runs and records go here, and there seems to be a GPU."""
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "save_record", lambda *parts: save_record(*parts, tmp_path))
    monkeypatch.setattr(gpu, "provenance", lambda *parts: {})
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    return tmp_path


def test_what_is_on_record_is_skipped_and_a_failure_stops_no_other(folder, monkeypatch, capsys):
    codes = {"truth": "0", "broken": "1/0", "run": "0"}  # what their processes run
    items = [Item(name, 1.0, f"timeit -n1 -r1 {code}") for name, code in codes.items()]
    monkeypatch.setattr(gpu, "ITEMS", items)
    save_record("record", {"bleu": 40.0}, folder / "gpu-run")
    assert run_items(GpuOptions()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["truth:", "done"],
        ["broken:", "failed"],
        ["run:", "done"],
    ]
    assert load_record("gpu-truth", folder) == {"agrees": True}
    assert load_record("gpu-run", folder) == {"bleu": 40.0}  # a run's own record
    assert run_items(GpuOptions()) == 1  # tried again
    assert capsys.readouterr().out.startswith("broken: failed")
    assert run_items(GpuOptions(list=True)) == 0
    states = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert states == ["done", "owed", "done", "min"]


def test_it_ends_in_time(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "ITEMS", [Item("slow", 0.002, "http.server --bind 127.0.0.1 0")])
    assert run_items(GpuOptions()) == 1
    assert capsys.readouterr().out.startswith("slow: took too long")
    monkeypatch.setattr(gpu, "attempt", None)
    assert run_items(GpuOptions(minutes=0.001)) == 0  # none fits


def test_without_a_gpu_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2 and "no usable GPU" in capsys.readouterr().err


def test_every_command_parses_and_names_its_record():
    for item in ITEMS:
        module, *words = item.words.split()
        if module != "pytest":
            options = importlib.import_module(module).main.parse(words)
            assert getattr(options, "device", "cuda") == "cuda"
        if module == "scripts.train":
            assert options.name == f"gpu-{item.name}"


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
