"""What is owed to a GPU, in order of worth: the tables of recipes, and what makes each record.

When each is done, and what happens if it fails, is the business of `scripts.ladder.agenda`; the
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

from scripts import ROOT, runs_folder
from scripts.bench.gpu import WaterfallOptions, waterfall
from scripts.book.files import write_whole
from scripts.book.records import load_record, provenance, save_record
from scripts.engine.cards import model_card
from scripts.engine.settings import PRESETS, TrainConfig
from scripts.engine.training import Diverged
from scripts.ladder.agenda import Item, Settings
from scripts.ladder.climbing import ladder_items, learned, on_record, tested
from scripts.ladder.rungs import RUNS, spread, val_bleu
from scripts.studies import block, gpt, grid, stacks, table3
from scripts.studies.rows import data_of
from scripts.studies.runner import Study, complete, kept_at

SMALLS = tuple(name for name, of in RUNS.items() if of == "small")  # the preset, by seed
NEXT = ("final-more-1", "final-long-1", "final-long-2")  # the likeliest to ship
KINDS = ("bleu", "bleu_greedy")  # of a test's scores
TRUTH = 2.0  # minutes for the tests that all kinds of a step agree

# Short trainings: what all of them change in the small preset, and what each changes.
BRIEF = {"epochs": 5, "average": 0}
RATES = {f"adam-{rate:g}": {"lr": rate} for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)} | {
    f"muon-{rate:g}": {"optimizer": "muon", "muon_lr": rate}
    for rate in (0.005, 0.01, 0.02, 0.04, 0.08)
}

STUDIES = {"table3": table3, "block": block, "grid": grid, "stacks": stacks, "gpt": gpt}


def base(settings: Settings) -> dict[str, Any]:
    """The record of the base preset with both tests' scores; trains, or goes on, if none exists."""
    config = settings.config(PRESETS["base"], "base")
    if found := on_record(settings.folder("base") / "record.json", config):
        return found
    data = data_of(config.corpus, config.vocab)
    record = tested("base", settings, config, data, learned(config, data))
    write_whole(settings.folder("base") / "README.md", model_card(record).encode())
    return record


def brief(config: TrainConfig) -> dict[str, Any]:
    """Validation BLEU of a short training: the best, and each epoch's. Diverging is a result."""
    try:
        history = learned(config, data_of(config.corpus, config.vocab))
    except Diverged as error:
        return {"diverged": str(error)}
    bleus = [round(row["val_bleu"], 3) for row in history]
    seconds = round(sum(row["seconds"] for row in history), 2)
    return {"val_bleu": max(bleus), "history": bleus, "seconds": seconds}


def rates(settings: Settings) -> dict[str, Any]:
    """The record of `RATES`: every training's changes and score."""
    parts = {}
    for name, changes in RATES.items():
        config = settings.config(replace(PRESETS["small"], **BRIEF, **changes), f"rates/{name}")
        given, folder = {"changes": changes, "config": asdict(config)}, runs_folder() / config.name
        parts[name] = kept_at(folder / "score.json", given, partial(brief, config))
        for weights in folder.glob("*.safetensors"):  # a study leaves many
            weights.unlink()
    return {"common": BRIEF, "parts": parts}


def many_runs(name: str, settings: Settings) -> dict[str, Any]:
    """The record of one of `STUDIES`: all its runs, several at once; one at tiny size."""
    of = STUDIES[name]
    plan = (lambda runs: of.wanted_runs([])[-1:]) if settings.tiny else of.wanted_runs
    study = Study("runs", asdict(settings.config(of.BASE, name)), plan, of.work)
    workers = 1 if settings.tiny else min(12, os.cpu_count() or 1)
    return complete(study, settings.repeat(name), settings.folder(name), math.inf, workers)


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


def waterfall_of(size: Literal["small", "base"], settings: Settings) -> dict[str, Any]:
    """The steps of going fast, one on top of the other."""
    return waterfall(WaterfallOptions(size, settings.corpus, settings.tiny, str(settings.device)))


def agenda() -> list[Item]:
    """What is owed to a GPU, in order of worth."""
    ladder = ladder_items(hours=False)
    (first, *seeds), rungs = ladder[: len(SMALLS)], ladder[len(SMALLS) :]  # the preset, then others
    soon = {*NEXT}.union(*(rung.needs for rung in rungs if rung.name in NEXT))
    wide, small = (partial(waterfall_of, size) for size in ("base", "small"))
    studies = (
        Item(
            name, 8.0, of.__doc__.partition(":")[0].lower(), partial(many_runs, name), resumes=True
        )
        for name, of in STUDIES.items()
    )
    return [
        first,  # one training comes before all doubts
        Item("truth", TRUTH, "all ways to a step agree", steps_agree),
        *seeds,
        *(rung for rung in rungs if rung.name in soon),
        Item("waterfall-base", 4.0, "going fast step by step, base model", wide),
        Item("waterfall-small", 1.0, "going fast step by step, small model", small),
        *(rung for rung in rungs if rung.name not in soon),
        Item("rates", 5.0, f"{len(RATES)} short trainings", rates, resumes=True),
        *studies,
        Item("base", 7.0, "the base preset", base, resumes=True),
    ]


def sum_up(settings: Settings) -> None:
    """Save the record gpu-small of the seeds that are done, if any are."""
    paths = [settings.record(name) for name in SMALLS]
    runs = [load_record(path.stem, path.parent) for path in paths if path.is_file()]
    if not runs:
        return
    seeds = [run["config"]["seed"] for run in runs]
    validation = [*map(val_bleu, runs)]
    test = {
        split: {kind: spread([run["test"][split][kind] for run in runs]) for kind in KINDS}
        for split in runs[0]["test"]
    }
    record = provenance(settings.repeat(",".join(SMALLS))) | {
        "device": " and ".join(sorted({run["device"] for run in runs})),
        "seeds": seeds,
        "picked_by_validation": seeds[validation.index(max(validation))],
        "validation": spread(validation),
        "test": test,
    }
    save_record("gpu-small", record, settings.records)
