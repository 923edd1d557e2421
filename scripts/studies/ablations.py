"""One part changed at a time, and sizes (chapters 19, 20): `python -m scripts.studies.ablations`.

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.files import writable, write_whole
from scripts.book.records import provenance, save_record
from scripts.ch10_judging import paired_difference
from scripts.ch12_going_fast import keep_memory
from scripts.ch19_ablations import STUDY, STUDY_ROWS, THE_BASE, StudyRow, layer_parameters
from scripts.ch20_scaling import FRACTIONS, MOST_EPOCHS, PART_WIDTH, WIDTHS, part_of, sized
from scripts.engine.data import TrainingData, prepare
from scripts.engine.models import Trained
from scripts.engine.scores import corpus_bleu
from scripts.engine.settings import TrainConfig, pick_device
from scripts.engine.training import identity
from scripts.studies.rows import train_row, translations


@dataclass(frozen=True)
class StudyRun:
    """One training of the study: a row, or a size, or a share of the data, with its seed."""

    name: str
    row: StudyRow
    config: TrainConfig
    share: int = 1  # trains on 1/share of the pairs

    @property
    def slug(self) -> str:
        """A name for its folder."""
        plain = self.name.lower().replace("√", "root ").replace("1/", "part ")
        return re.sub(r"[^a-z0-9]+", "-", plain) + f"-{self.config.seed}"

    @property
    def key(self) -> dict[str, Any]:
        """What makes it the run it is: a finished run is reused only where this is the same."""
        return identity(self.config) | {"share": self.share, "row": self.name}


ONE_OF_EACH = (
    "no positions",
    "no residual",
    "no √d_k",
    "post-norm, no warm-up",
    "learned positions",
    "1 head",
    "no dropout",
    "1 layer",
    "no warm-up",
    "16 heads",
    "d_k 4",
    "post-norm",
    "no smoothing",
    "d_model 32",
)


@dataclass
class StudyOptions:
    """What is trained."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    seeds: int = 2
    """Runs of each row, size and share."""
    base_seeds: int = 3
    """Runs of the base."""
    epochs: int = STUDY.epochs
    """Passes over the training split."""
    device: str = "cpu"
    """Where they run."""
    train: bool = True
    """Train what is missing; false: put on record what is there."""
    save: bool = False
    """Rewrite results/ablations-CORPUS.json and results/scaling-CORPUS.json after each run."""


def study_runs(options: StudyOptions) -> list[StudyRun]:
    """Every training asked for, in an order that is worth something wherever it stops.

    The base, the small sizes and the parts of the data, the base's other seeds, one row of each
    kind, the large sizes, the remaining rows; then the next seed.
    """
    base = replace(STUDY, corpus=options.corpus, epochs=options.epochs, device=options.device)

    def row_run(name: str, seed: int) -> StudyRun:
        row = STUDY_ROWS[name]
        return StudyRun(name, row, row.config(base, seed=seed))

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

    small, large = ([w for w in WIDTHS if (w < base.d_model) == cheap] for cheap in (True, False))
    rest = [name for name in STUDY_ROWS if name not in ONE_OF_EACH]
    runs = []
    for seed in range(1, options.seeds + 1):
        runs.append(row_run(THE_BASE, seed))
        runs += [size_run(width, seed) for width in small]
        runs += [once_run(share, seed) for share in FRACTIONS if share > 1]
        runs += [part_run(share, seed) for share in FRACTIONS if share > 1]
        if seed == 1:
            runs += [row_run(THE_BASE, other) for other in range(2, options.base_seeds + 1)]
        runs += [row_run(name, seed) for name in ONE_OF_EACH]
        runs += [
            size_run(width, seed) for width in large if width != base.d_model
        ]  # that's the base
        runs += [row_run(name, seed) for name in rest]
    return list({(run.name, run.config.seed): run for run in runs}.values())


def translated(run: StudyRun, trained: Trained, data: TrainingData) -> dict[str, Any]:
    """Translations of the validation split by a beam of 4, and their BLEU."""
    sources, references = zip(*data.corpus["val"], strict=True)
    texts = translations(run.row, trained, sources)
    return {"bleu": round(corpus_bleu(texts, references).score, 3), "translations": texts}


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
        if run.name in STUDY_ROWS:
            score |= translated(run, Trained(model, data.tokenizer, run.config), data)
    score["seconds"] = round(time.perf_counter() - start)
    return score


def brief(score: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What of a run's score goes on record."""
    return {k: v for k, v in score.items() if k not in ("key", "translations")} | more


def study_records(
    options: StudyOptions,
    done: dict[tuple[str, int], tuple[StudyRun, dict[str, Any]]],
    data: TrainingData,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The records of ablation and scaling, of the runs that are `done` by name and seed."""
    asked = replace(options, train=True)
    command = as_typed(__name__, asked, always=("corpus", "seeds", "base_seeds", "epochs"))
    base = replace(STUDY, corpus=options.corpus, epochs=options.epochs, device=options.device)
    opening = provenance(command, pick_device(options.device)) | {
        "corpus": options.corpus,
        "train_pairs": len(data.train),
        "config": asdict(base),
    }
    rows: dict[str, Any] = {}
    for name, row in STUDY_ROWS.items():
        runs = [score for (of, _), (_, score) in done.items() if of == name]
        rows[name] = {
            "group": row.group,
            "changes": row.changes | ({"model": name} if row.operate else {}),
            "runs": [brief(score) for score in sorted(runs, key=lambda score: score["seed"])],
        }
    points: dict[str, list[dict[str, Any]]] = {"size": [], "once": [], "data": []}
    for run, score in done.values():
        groups = [group for group in points if group == run.row.group]
        if run.name == THE_BASE:
            groups = ["size"]
        if run.row.group == "size" and run.config.d_model == PART_WIDTH:
            groups = list(points)  # all of the pairs, once, is one of each
        for group in groups:
            facts = {"d_model": run.config.d_model, "lr": run.config.lr, "share": run.share}
            points[group].append(brief(score, epochs=run.config.epochs, **facts))
    for found in points.values():
        found.sort(key=lambda point: (point["d_model"], -point["share"], point["seed"]))
    scaling = {"sizes": points["size"], "once": points["once"], "parts": points["data"]}
    return opening | {"rows": rows}, opening | scaling


def run_study(options: StudyOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train whatever is missing, one run after the other; the two records."""
    if pick_device(options.device).type == "cpu":
        keep_memory()
    data = prepare(replace(STUDY, corpus=options.corpus))  # no row changes what is read
    folder = runs_folder() / f"study-{options.corpus}-{options.epochs}"
    done: dict[tuple[str, int], tuple[StudyRun, dict[str, Any]]] = {}
    for run in study_runs(options):
        score = stored_score(run, folder)
        if score is None and options.train:
            score = study_run(run, data)
            store_score(run, score, folder)
            loss, seconds = score["loss"] or math.nan, score["seconds"]
            tqdm.write(f"{run.name}, seed {run.config.seed}: loss {loss:.4f}, {seconds} s")
        if score is not None:
            done[run.name, run.config.seed] = run, score
            if options.save and options.train:
                save_study(options.corpus, study_records(options, done, data))
    compare_translations(done, data, folder)
    records = study_records(options, done, data)
    if options.save:
        save_study(options.corpus, records)
    return records


def save_study(corpus: str, records: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Write both records into results/."""
    for name, record in zip(("ablations", "scaling"), records, strict=True):
        save_record(f"{name}-{corpus}", record)


def compare_translations(
    done: dict[tuple[str, int], tuple[StudyRun, dict[str, Any]]], data: TrainingData, folder: Path
) -> None:
    """Give each row's score its p against the base of the same seed: chapter 10's swaps."""
    references = [english for _, english in data.corpus["val"]]
    for (_, seed), (run, score) in done.items():
        base = done.get((THE_BASE, seed), (None, {}))[1]
        if "translations" in score and "translations" in base and "p" not in score:
            given = (base["translations"], score["translations"], references)
            score["p"] = None if score is base else round(paired_difference(*given).p, 4)
            store_score(run, score, folder)


main = Command(
    __name__, StudyOptions, run_study, "Train what is missing (hours).", interrupted=GOES_ON
)
