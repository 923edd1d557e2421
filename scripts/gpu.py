"""What is owed to a GPU, in order of worth: `python -m scripts.gpu --minutes 9`.

Each item is a command of its own, in its own process, with a time limit; one that fails or hangs
stops no other. What has its record in results/ is skipped, so the same command goes on. Besides
torch and numpy it needs sentencepiece, safetensors, sacrebleu, jsonargparse, docstring-parser, tqdm
and pytest.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from scripts import ROOT, runs_folder
from scripts.book.command import Command
from scripts.book.records import RESULTS, load_record, provenance, save_record
from scripts.core.checkpoints import saved_states

SLACK = 2.0  # a process may take so many times the minutes that it should


@dataclass(frozen=True)
class Item:
    """A command whose record is results/gpu-NAME.json, with the minutes that it should take."""

    name: str
    minutes: float
    words: str  # after `python -m`


ITEMS = [
    Item("small-1", 2.0, "scripts.train --seed 1 --device cuda --name gpu-small-1"),
    Item("truth", 2.0, "pytest -q -rf --tb=no --noconftest tests/test_steps_agree.py"),
    Item("small-2", 2.0, "scripts.train --seed 2 --device cuda --name gpu-small-2"),
    Item("small-3", 2.0, "scripts.train --seed 3 --device cuda --name gpu-small-3"),
    Item("waterfall-small", 1.0, "scripts.studies.waterfall small --save"),
    Item("waterfall-base", 4.0, "scripts.studies.waterfall base --save"),
    Item("base-1", 7.0, "scripts.train --preset base --device cuda --name gpu-base-1"),
]


@dataclass
class GpuOptions:
    """How long."""

    minutes: float = 9.0
    """When to end: no item begins that should take longer than what is left."""
    list: bool = False
    """Only say what is owed, and how long it takes."""


def is_done(item: Item) -> bool:
    """Whether the item has its record."""
    return (RESULTS / f"gpu-{item.name}.json").is_file()


def attempt(item: Item) -> str:
    """Do `item` and see to its record: "done", or what went wrong."""
    folder = runs_folder() / f"gpu-{item.name}"
    goes_on = "scripts.train" in item.words and saved_states(folder)
    words = [*item.words.split(), *(["--resume"] if goes_on else [])]
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ways = {"cwd": ROOT, "env": os.environ | variables, "timeout": 60 * SLACK * item.minutes}
    try:
        subprocess.run([sys.executable, "-m", *words], check=True, **ways)
    except subprocess.TimeoutExpired:
        return "took too long"
    except subprocess.CalledProcessError:
        return "failed"
    if (folder / "record.json").is_file():
        save_record(folder.name, load_record("record", folder))
    elif not is_done(item):  # a study has saved its own
        save_record(folder.name, provenance("python -m scripts.gpu", "cuda") | {"agrees": True})
    return "done"


def run_items(options: GpuOptions) -> int:
    """Do what is owed to a GPU, in order of worth. Returns 1 if something failed."""
    owed = [item for item in ITEMS if not is_done(item)]
    if options.list:
        for item in ITEMS:
            print(f"{item.name:<16} {item.minutes:4.1f} min  {'owed' if item in owed else 'done'}")
        print(f"{'owed':<16} {sum(item.minutes for item in owed):4.1f} min")
        return 0
    if not torch.cuda.is_available():
        raise ValueError("this machine has no usable GPU")
    end, failed = time.monotonic() + 60 * options.minutes, 0
    for item in owed:
        if time.monotonic() + 60 * item.minutes <= end:
            start, outcome = time.monotonic(), attempt(item)
            print(f"{item.name}: {outcome}  {time.monotonic() - start:.0f} s", flush=True)
            failed += outcome != "done"
    return int(failed > 0)


main = Command("scripts.gpu", GpuOptions, run_items)

if __name__ == "__main__":
    raise SystemExit(main())
