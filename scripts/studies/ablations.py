"""Sizes, and parts of the data, in one pass (chapter 20): `python -m scripts.studies.ablations`.

It trains what is missing, in an order that is worth something wherever it stops, and stores each
finished run with all that decided it. The command, given again, reads the finished ones and goes
on. A run counts as finished only if its settings are those asked for now.
"""

if __name__ == "__main__":  # first, so that Ctrl-C while libraries load is answered, too
    from scripts.book.command import launch

    raise SystemExit(launch("scripts.studies.ablations"))

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.files import writable, write_whole
from scripts.book.records import provenance, save_record
from scripts.ch12_going_fast import keep_memory
from scripts.ch19_ablations import StudyRow, layer_parameters
from scripts.ch20_scaling import (
    FRACTIONS,
    MOST_EPOCHS,
    ONE_PASS,
    PART_WIDTH,
    WIDTHS,
    part_of,
    sized,
)
from scripts.engine.data import TrainingData, prepare
from scripts.engine.settings import TrainConfig, pick_device
from scripts.engine.training import identity
from scripts.studies.rows import train_row


@dataclass(frozen=True)
class StudyRun:
    """One training of the study: a size, or a share of the data, with its seed."""

    name: str
    row: StudyRow
    config: TrainConfig
    share: int = 1  # trains on 1/share of the pairs

    @property
    def slug(self) -> str:
        """A name for its folder."""
        plain = self.name.lower().replace("1/", "part ")
        return re.sub(r"[^a-z0-9]+", "-", plain) + f"-{self.config.seed}"

    @property
    def key(self) -> dict[str, Any]:
        """What makes it the run it is: a finished run is reused only where this is the same."""
        return identity(self.config) | {"share": self.share, "row": self.name}


@dataclass
class StudyOptions:
    """What is trained."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    seeds: int = 2
    """Runs of each size and share."""
    epochs: int = ONE_PASS.epochs
    """Passes over the training split."""
    device: str = "cpu"
    """Where they run."""
    train: bool = True
    """Train what is missing; false: put on record what is there."""
    save: bool = False
    """Rewrite results/scaling-CORPUS.json after each run."""


def study_runs(options: StudyOptions) -> list[StudyRun]:
    """Every training asked for: sizes, and parts of the data; then the next seed."""
    base = replace(ONE_PASS, corpus=options.corpus, epochs=options.epochs, device=options.device)

    def size_run(width: int, seed: int) -> StudyRun:
        row = StudyRow("size", sized(width))
        return StudyRun(f"width {width}", row, row.config(base, seed=seed))

    def part_run(share: int, seed: int) -> StudyRun:
        passes = min(MOST_EPOCHS, share * base.epochs)
        row = StudyRow("data", sized(PART_WIDTH) | {"epochs": passes})
        return StudyRun(f"1/{share} of the pairs", row, row.config(base, seed=seed), share)

    def once_run(share: int, seed: int) -> StudyRun:
        warmup = max(1, base.warmup // share)  # the same share of the steps
        row = StudyRow("once", sized(PART_WIDTH) | {"warmup": warmup})
        return StudyRun(f"1/{share} of the pairs, once", row, row.config(base, seed=seed), share)

    runs = []
    for seed in range(1, options.seeds + 1):
        runs += [size_run(width, seed) for width in WIDTHS]
        for kind in (once_run, part_run):
            runs += [kind(share, seed) for share in FRACTIONS if share > 1]
    return runs


def store_score(run: StudyRun, score: dict[str, Any], folder: Path) -> None:
    """Write a run's score, from which `stored_score` reads it."""
    path = writable(folder / run.slug) / "score.json"
    write_whole(path, json.dumps(score, ensure_ascii=False).encode())


def stored_score(run: StudyRun, folder: Path) -> dict[str, Any] | None:
    """The score of a run that was finished earlier with the same settings, or None."""
    path = folder / run.slug / "score.json"
    score = json.loads(path.read_text("utf-8")) if path.is_file() else None
    return score if score and score["key"] == run.key else None


def study_run(run: StudyRun, data: TrainingData) -> dict[str, Any]:
    """Train one run and score it on the validation split; where it diverged, the loss is None."""
    start, part = time.perf_counter(), part_of(data, run.share)
    score = {"key": run.key, "seed": run.config.seed, "loss": None}
    try:
        model, losses, _ = train_row(run.row, run.config, part)
    except FloatingPointError as error:
        score["diverged"] = str(error)
    else:
        score |= {
            "loss": round(min(losses), 5),
            "losses": [round(loss, 5) for loss in losses],
            "parameters": sum(p.numel() for p in model.parameters()),
            "layer_parameters": layer_parameters(model),
            "train_tokens": sum(len(example.tgt) - 1 for example in part.train),
        }
    score["seconds"] = round(time.perf_counter() - start)
    return score


def study_record(
    options: StudyOptions,
    done: Sequence[tuple[StudyRun, dict[str, Any]]],
    data: TrainingData,
) -> dict[str, Any]:
    """The record of the runs that are `done`."""
    command = as_typed(__name__, replace(options, train=True), always=("corpus", "seeds", "epochs"))
    base = replace(ONE_PASS, corpus=options.corpus, epochs=options.epochs, device=options.device)
    opening = provenance(command, pick_device(options.device)) | {
        "corpus": options.corpus,
        "train_pairs": len(data.train),
        "config": asdict(base),
    }
    points: dict[str, list[dict[str, Any]]] = {"size": [], "once": [], "data": []}
    for run, score in done:
        # All of the pairs, once, is one of each.
        whole = run.row.group == "size" and run.config.d_model == PART_WIDTH
        facts = {"d_model": run.config.d_model, "lr": run.config.lr, "share": run.share}
        for group in points if whole else [run.row.group]:
            found = {k: v for k, v in score.items() if k != "key"}
            points[group].append(found | facts | {"epochs": run.config.epochs})
    for found in points.values():
        found.sort(key=lambda point: (point["d_model"], -point["share"], point["seed"]))
    return opening | {"sizes": points["size"], "once": points["once"], "parts": points["data"]}


def run_study(options: StudyOptions) -> dict[str, Any]:
    """Train whatever is missing, one run after the other; the record."""
    if pick_device(options.device).type == "cpu":
        keep_memory()
    data = prepare(replace(ONE_PASS, corpus=options.corpus))
    folder = runs_folder() / f"study-{options.corpus}-{options.epochs}"
    done: list[tuple[StudyRun, dict[str, Any]]] = []
    for run in study_runs(options):
        score = stored_score(run, folder)
        if score is None and options.train:
            score = study_run(run, data)
            store_score(run, score, folder)
            loss, seconds = score["loss"] or math.nan, score["seconds"]
            tqdm.write(f"{run.name}, seed {run.config.seed}: loss {loss:.4f}, {seconds} s")
        if score is not None:
            done.append((run, score))
            if options.save:
                save_record(f"scaling-{options.corpus}", study_record(options, done, data))
    return study_record(options, done, data)


main = Command(
    __name__, StudyOptions, run_study, "Train what is missing (hours).", interrupted=GOES_ON
)
