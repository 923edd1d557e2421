"""pytest in a process of its own, forked from one that has imported what is slow to import."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

SLOW = [
    "altair",
    "IPython",
    "pandas",
    "pytest",
    "sacrebleu",
    "safetensors",
    "sentencepiece",
    "torch",
]
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(SLOW)


def run(folder: Path, log: Path, words: list[str]) -> None:
    """The process's part: `folder` is the first place where modules are looked for."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]  # of the pytest that asks
    os.chdir(folder)
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.exit(int(pytest.main(words)))


def pytest_elsewhere(folder: Path, log: Path, *words: str) -> int | None:
    """pytest's exit code in `folder`, None if it takes too long; all that it prints goes to log."""
    process = context.Process(target=run, args=(folder, log, list(words)))
    process.start()
    process.join(900)
    process.kill()
    return process.exitcode
