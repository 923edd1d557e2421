"""What is owed to a GPU, in order of worth: `python -m scripts.gpu --minutes 9`.

Each item is a command of its own, in its own process, with a time limit; one that fails or hangs
stops no other. What has its record in results/ is skipped, so the same command goes on. `--list`
says what is owed; `--tiny --device cpu` rehearses it all. Besides torch and numpy it needs
sentencepiece, safetensors, sacrebleu, jsonargparse, docstring-parser, tqdm and pytest.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from scripts import ROOT, runs_folder
from scripts.book.command import Command
from scripts.book.files import writable
from scripts.book.records import RESULTS, load_record, provenance, save_record
from scripts.core.checkpoints import saved_states

SLACK = 2.0  # a process may take so many times the minutes that it should
TINY = "--corpus sample --layers 1 --d_model 32 --d_ff 64 --heads 2 --vocab 300 --epochs 1 --beam 1"


@dataclass(frozen=True)
class Item:
    """A command, by the end of its record's name, with the minutes that it should take."""

    name: str
    minutes: float
    words: str  # after `python -m`


ITEMS = [
    Item("small-1", 2.0, "scripts.train --seed 1 --name gpu-small-1"),
    Item("truth", 2.0, "pytest -q -rf --tb=no --noconftest tests/test_steps_agree.py"),
    Item("small-2", 2.0, "scripts.train --seed 2 --name gpu-small-2"),
    Item("small-3", 2.0, "scripts.train --seed 3 --name gpu-small-3"),
    Item("waterfall-small", 1.0, "scripts.studies.waterfall small --save"),
    Item("waterfall-base", 4.0, "scripts.studies.waterfall base --save"),
    Item("base-1", 7.0, "scripts.train --preset base --name gpu-base-1"),
]


@dataclass
class GpuOptions:
    """How long, and where."""

    minutes: float = 9.0
    """When to end: no item begins that should take longer than what is left."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu is for a rehearsal."""
    tiny: bool = False
    """All of it at tiny size: in runs/gpu-rehearsal, whose records stay there."""
    list: bool = False
    """Only say what is owed, and how long it takes."""


def home_of(options: GpuOptions) -> Path:
    """The folder of runs; a rehearsal has its own."""
    return runs_folder() / ("gpu-rehearsal" if options.tiny else "")


def record_of(item: Item, options: GpuOptions) -> tuple[str, Path]:
    """The name of the item's record, and the folder that it is in when it is done."""
    return f"gpu-{item.name}", home_of(options) / "results" if options.tiny else RESULTS


def is_done(item: Item, options: GpuOptions) -> bool:
    """Whether the item has its record."""
    name, folder = record_of(item, options)
    return (folder / f"{name}.json").is_file()


def words_of(item: Item, options: GpuOptions) -> list[str]:
    """The item's command in this call: at this size, on this device, going on if it was stopped."""
    module, *words = item.words.split()
    if module == "pytest":
        words += ["-p", "no:cacheprovider"] + ["-k", "not muon and not bf16"] * options.tiny
        return [module, *words]
    if options.tiny:
        words = [word for word in words if word != "--save"]
        words += TINY.split() if module == "scripts.train" else ["--tiny"]
    resumes = module == "scripts.train" and saved_states(home_of(options) / f"gpu-{item.name}")
    return [module, *words, "--device", options.device, *(["--resume"] * bool(resumes))]


def attempt(item: Item, options: GpuOptions) -> str:
    """Do `item` and see to its record: "done", or what went wrong. Its output goes to a log."""
    home, (name, folder) = home_of(options), record_of(item, options)
    log, words = writable(home) / f"gpu-{item.name}.log", words_of(item, options)
    surroundings = os.environ | {"SERIES_RUNS": str(home), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    surroundings["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if options.device == "cpu":
        surroundings["CUDA_VISIBLE_DEVICES"] = ""
    command = "scripts.gpu" if words[0] == "pytest" else item.words
    record = provenance(f"python -m {command}", options.device)
    with open(log, "wb") as output:
        try:
            code = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env=surroundings,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=60 * max(1.0, SLACK * item.minutes),
            ).returncode
        except subprocess.TimeoutExpired:
            return f"took too long: see {log}"
    text = log.read_text("utf-8", "replace")
    if code:
        return f"failed: {(text.strip() or 'without a word').splitlines()[-1][:200]}; see {log}"
    if not is_done(item, options):  # else the command has saved it
        made = home / name / "record.json"
        counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|skipped)", text)}
        record |= (
            load_record("record", made.parent) if made.is_file() else {"agrees": True} | counts
        )
        save_record(name, record, folder)
    return "done"


def run_items(options: GpuOptions) -> int:
    """Do what is owed to a GPU, in order of worth. Returns 1 if something failed."""
    owed = [item for item in ITEMS if not is_done(item, options)]
    if options.list:
        for item in ITEMS:
            print(f"{item.name:<16} {item.minutes:4.1f} min  {'owed' if item in owed else 'done'}")
        print(f"{'owed':<16} {sum(item.minutes for item in owed):4.1f} min")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU: --tiny --device cpu rehearses all of it")
    end, failed = time.monotonic() + 60 * options.minutes, 0
    for item in owed:
        if time.monotonic() + 60 * item.minutes * (not options.tiny) <= end:
            start, outcome = time.monotonic(), attempt(item, options)
            print(f"{item.name}: {outcome}  {time.monotonic() - start:.0f} s", flush=True)
            failed += outcome != "done"
    return int(failed > 0)


main = Command("scripts.gpu", GpuOptions, run_items)

if __name__ == "__main__":
    raise SystemExit(main())
