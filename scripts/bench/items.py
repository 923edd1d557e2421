"""What is owed to a GPU, in order of worth, and what makes each record.

When each is done, and what happens if it fails, is the business of `scripts.ladder.agenda`; the
command is `scripts.gpu`.
"""

import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

from scripts import ROOT
from scripts.bench.gpu import waterfall
from scripts.core.settings import PRESETS
from scripts.fast.run import average_if_better, finish
from scripts.ladder.agenda import Item, Settings
from scripts.ladder.climbing import ALPHAS, ladder_items, learned
from scripts.ladder.rungs import RUNS, rung_of
from scripts.studies.rows import data_of
from scripts.studies.runner import on_record

TRUTH = 2.0  # minutes for the tests that all kinds of a step agree


def base(settings: Settings) -> dict[str, Any]:
    """The record of the base preset with both tests' scores; trains, or goes on, if none exists."""
    config = settings.config(PRESETS["base"], "base")
    if found := on_record(settings.folder("base") / "record.json", config):
        return found
    data, folder = data_of(config.corpus, config.vocab), settings.folder("base")
    history = learned(config, data)
    chosen = average_if_better(config, data, folder, history)
    return finish(config, data, folder, history, chosen, ALPHAS)


def steps_agree(settings: Settings) -> dict[str, Any]:
    """Whether all kinds of a step agree: what pytest says of the file that tests it.

    In a process of its own, which may lose the GPU. Raises RuntimeError if no test ran.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "--noconftest"]
    command += ["-p", "no:cacheprovider", "tests/test_steps_agree.py"]
    command += ["-k", "not muon and not bf16"] * settings.tiny  # half of them, for a trial
    surroundings = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if settings.device.type == "cpu":
        surroundings["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=60 * TRUTH
    )
    lines = done.stdout.splitlines() or [""]
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped)", lines[-1])}
    if not {"passed", "failed"} & counts.keys():
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout} {done.stderr}")
    return {
        "agrees": done.returncode == 0,
        **counts,
        "failures": [line for line in lines if line.startswith("FAILED ")],
        "not_run": ["graphed steps", "whether a step waits"] * (settings.device.type == "cpu"),
    }


def agenda() -> list[Item]:
    """What is owed to a GPU, in order of worth."""
    first, *rungs = ladder_items(hours=False)
    ships = {name for name in RUNS if rung_of(name).candidate}
    soon = ships.union(*(rung.needs for rung in rungs if rung.name in ships))
    wide, small = (partial(waterfall, size) for size in ("base", "small"))
    return [
        first,  # one training comes before all doubts
        Item("truth", TRUTH, "all ways to a step agree", steps_agree),
        *(rung for rung in rungs if rung.name in soon),  # what may ship, and what that needs
        Item("waterfall-base", 4.0, "going fast step by step, base model", wide),
        Item("waterfall-small", 1.0, "going fast step by step, small model", small),
        *(rung for rung in rungs if rung.name not in soon),
        Item("base", 7.0, "the base preset", base, resumes=True),
    ]
