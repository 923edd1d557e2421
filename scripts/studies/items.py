"""What is owed to a GPU, in order of worth: the tables of recipes, and what makes each record.

When each is done, and what happens if it fails, is the business of `scripts.studies.agenda`; the
command is `scripts.gpu`.
"""

import math
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

from scripts import ROOT
from scripts.bench.gpu import WaterfallOptions, waterfall
from scripts.book.records import load_record, provenance, save_record
from scripts.engine.settings import PRESETS, TrainConfig
from scripts.engine.training import Diverged
from scripts.studies import block, grid, stacks, table3
from scripts.studies.agenda import Item, Settings, once
from scripts.studies.ladder import data_of, ladder_items, learned, on_record, spread, tested
from scripts.studies.runner import Study, complete
from scripts.studies.speedrun import SpeedOptions, clocked

SEEDS = (1, 2, 3)
SMALLS = tuple(f"small-{seed}" for seed in SEEDS)
KINDS = ("bleu", "bleu_greedy")  # of a test's scores
CLOCKED = SpeedOptions()
TRUTH = 2.0  # minutes for the tests that all kinds of a step agree

# Short trainings: what they all change of the small preset, and what each.
BRIEF = {"epochs": 5, "average": 0}
RATES = {f"adam-{rate:g}": {"lr": rate} for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)} | {
    f"muon-{rate:g}": {"optimizer": "muon", "muon_lr": rate}
    for rate in (0.005, 0.01, 0.02, 0.04, 0.08)
}

STUDIES = {"table3": table3, "block": block, "grid": grid, "stacks": stacks}


def trained(name: str, base: TrainConfig, settings: Settings) -> dict[str, Any]:
    """The record of a training with both tests' scores; trains, or goes on, where there is none."""
    config = settings.config(base, name)
    if found := on_record(settings.folder(name) / "record.json", config):
        return found
    data = data_of(config.corpus, config.vocab, settings.tiny)
    return tested(name, settings, config, data, learned(config, data))


def part(name: str, base: TrainConfig, settings: Settings) -> dict[str, Any]:
    """Validation BLEU of a short training; done before, it is only read. To diverge is a result."""
    config, folder = settings.config(base, name), settings.folder(name)
    if found := on_record(folder / "score.json", config):
        return found
    score: dict[str, Any] = {"config": asdict(config)}
    try:
        history = learned(config, data_of(config.corpus, config.vocab, settings.tiny))
        score["val_bleu"] = max(row["val_bleu"] for row in history)
        score["history"] = [round(row["val_bleu"], 3) for row in history]
        score["seconds"] = round(sum(row["seconds"] for row in history), 2)
    except Diverged as error:
        score["diverged"] = str(error)
    save_record("score", score, folder)
    for weights in folder.glob("*.safetensors"):  # a study leaves many
        weights.unlink()
    return score


def rates(settings: Settings) -> dict[str, Any]:
    """The record of `RATES`: every training's changes and score."""
    scores = {}
    for name, changes in RATES.items():
        base = replace(PRESETS["small"], **BRIEF, **changes)
        scores[name] = {"changes": changes, **part(f"rates/{name}", base, settings)}
    return {"common": BRIEF, "parts": scores}


def many_runs(name: str, settings: Settings) -> dict[str, Any]:
    """The record of one of `STUDIES`: of all its runs, several at once; of one at tiny size."""
    of = STUDIES[name]
    plan = (lambda runs: of.wanted_runs([])[-1:]) if settings.tiny else of.wanted_runs
    study = Study("runs", asdict(settings.config(of.BASE, name)), plan, of.work)
    workers = 1 if settings.tiny else min(12, os.cpu_count() or 1)
    return complete(study, settings.repeat(name), settings.folder(name), math.inf, workers)


def steps_agree(settings: Settings) -> dict[str, Any]:
    """Whether all kinds of a step agree: what pytest says of the file that tests it.

    In a process of its own, which may lose the GPU. Raises RuntimeError where no test ran.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "--noconftest"]
    command += ["-p", "no:cacheprovider", "tests/test_steps_agree.py"]
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


def waterfall_of(size: Literal["small", "base"], settings: Settings) -> dict[str, Any]:
    """The steps of going fast, one on top of the other."""
    where = {"corpus": settings.corpus, "device": str(settings.device)}
    return waterfall(WaterfallOptions(size, tiny=settings.tiny, **where))


def race(settings: Settings) -> dict[str, Any]:
    """The small preset against the clock."""
    config = settings.config(PRESETS["small"], "speedrun")
    data = data_of(config.corpus, config.vocab, settings.tiny)
    return clocked(config, data, 0.1 if settings.tiny else CLOCKED.target, CLOCKED.margin)


def agenda() -> list[Item]:
    """What is owed to a GPU, in order of worth."""
    items: list[Item] = []
    for seed, name in zip(SEEDS, SMALLS, strict=True):
        make = partial(trained, name, replace(PRESETS["small"], seed=seed))
        items.append(Item(name, 4.0, f"the small preset, seed {seed}", make, resumes=True))
    # One training comes before all doubts.
    items.insert(1, Item("truth", TRUTH, "all ways to a step agree", once("truth", steps_agree)))
    about = f"seconds to BLEU {CLOCKED.target:g}"
    items.append(Item("speedrun", 4.0, about, once("speedrun", race)))
    for size, minutes in (("base", 2.0), ("small", 1.0)):
        name, about = f"waterfall-{size}", f"going fast step by step, {size} model"
        items.append(Item(name, minutes, about, once(name, partial(waterfall_of, size))))
    items += ladder_items(hours=False, but=SMALLS)  # of which the first rung is these seeds
    about = f"{len(RATES)} short trainings of the small preset"
    items.append(Item("rates", 12.0, about, rates, resumes=True))
    for name, of in STUDIES.items():
        about = of.__doc__.partition(":")[0].lower()
        items.append(Item(name, 8.0, about, partial(many_runs, name), resumes=True))
    make = partial(trained, "base", PRESETS["base"])
    return [*items, Item("base", 7.0, "the base preset", make, resumes=True)]


def sum_up(settings: Settings) -> dict[str, Any] | None:
    """Make and save the record gpu-small of the seeds that are done; None where none is."""
    paths = [settings.records / f"gpu-{name}.json" for name in SMALLS]
    runs = [load_record(path.stem, path.parent) for path in paths if path.is_file()]
    if not runs:
        return None
    validation = [max(run["chosen_by_val_bleu"].values()) for run in runs]
    seeds = [run["config"]["seed"] for run in runs]
    command = settings.repeat(",".join(SMALLS))
    record = {
        **provenance(command),
        "device": " and ".join(sorted({run["device"] for run in runs})),
        "seeds": seeds,
        "picked_by_validation": seeds[validation.index(max(validation))],
        "validation": spread(validation),
        "test": {
            split: {kind: spread([run["test"][split][kind] for run in runs]) for kind in KINDS}
            for split in runs[0]["test"]
        },
    }
    save_record("gpu-small", record, settings.records)
    return record
