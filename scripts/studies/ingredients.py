"""What each ingredient of chapter 9's recipe is worth: `python -m scripts.studies.ingredients`.

The narrow preset is trained with one of them changed at a time. The same command goes on where it
stopped: finished runs are only read.
"""

import itertools
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from scripts import runs_folder
from scripts.book.command import GOES_ON, Command, as_typed
from scripts.book.files import writable
from scripts.book.records import provenance, refuse_another, save_record
from scripts.ch12_going_fast import keep_memory
from scripts.core.checkpoints import saved_states
from scripts.core.data import TrainingData, prepare
from scripts.core.models import load_model
from scripts.core.settings import PRESETS, TrainConfig
from scripts.fast.run import average_if_better, evaluate, fit
from scripts.studies.runner import kept_at

INGREDIENTS: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "no label smoothing": {"smoothing": 0.0},
    "dropout 0.3": {"dropout": 0.3},
    "Xavier's tables": {"embedding_init": "xavier"},
    "post-norm": {"norm_first": False},
    "peak rate / 4": {"lr": 7.5e-4},
    "BPE-dropout 0.1": {"bpe_dropout": 0.1},
    "R-Drop 1": {"r_drop": 1.0},
    "Muon": {"optimizer": "muon"},
}


@dataclass
class AblationOptions:
    """What is trained."""

    corpus: Literal["sample", "multi30k"] = "multi30k"
    """What to learn from."""
    seeds: int = 1
    """Runs of each changed row."""
    base_seeds: int = 3
    """Runs of the recipe itself: their spread is the noise that a difference has to exceed."""
    save: bool = False
    """Keep the result as results/recipe-CORPUS.json, which the chapter shows."""


def ablation_run(config: TrainConfig, data: TrainingData, folder: Path) -> dict[str, Any]:
    """One run, scored on the validation split."""
    history = fit(config, data, writable(folder), resume=bool(saved_states(folder)))
    trained = load_model(folder, config.device)  # the best epoch's
    means = average_if_better(config, data, folder, history)
    return {
        "seed": config.seed,
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "seconds": round(sum(row["seconds"] for row in history)),
        "history": [round(row["val_bleu"], 3) for row in history],
        "best": round(max(row["val_bleu"] for row in history), 3),
        "at lowest loss": round(min(history, key=lambda row: row["val_loss"])["val_bleu"], 3),
        "mean of epochs": round(list(means.values())[-1], 3),
        "beam": evaluate(trained, data.corpus["val"], config.beam, config.alpha)["bleu"],
    }


def ablate(options: AblationOptions) -> dict[str, Any]:
    """Train every row of `INGREDIENTS` with every seed; the record."""
    base = replace(PRESETS["narrow"], corpus=options.corpus, device="cpu")
    keep_memory()
    command = as_typed("scripts.studies.ingredients", options, always=("seeds", "base_seeds"))
    if options.save:
        refuse_another(f"recipe-{options.corpus}", command)
    made = provenance(command)  # of this code
    data = prepare(base)  # no ingredient changes what is read
    scores: dict[str, list[dict[str, Any]]] = {name: [] for name in INGREDIENTS}
    most = max(options.seeds, options.base_seeds)
    for seed, (name, changes) in itertools.product(range(1, most + 1), INGREDIENTS.items()):
        if seed > (options.seeds if changes else options.base_seeds):
            continue
        slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        folder = runs_folder() / f"ablate-{options.corpus}" / f"{slug}-{seed}"
        config = replace(base, seed=seed, name=folder.name, **changes)
        given, work = {"config": asdict(config)}, partial(ablation_run, config, data, folder)
        score = kept_at(folder / "score.json", given, work)
        tqdm.write(f"{name}, seed {seed}: {score['best']:.2f}, beam {score['beam']:.2f}")
        scores[name].append(score)
    for run_of in itertools.chain(*scores.values()):
        del run_of["config"]
    rows = {name: {"changes": INGREDIENTS[name], "runs": runs} for name, runs in scores.items()}
    record = made | {"corpus": options.corpus, "config": asdict(base), "rows": rows}
    if options.save:
        save_record(f"recipe-{options.corpus}", record)
    return record


main = Command("scripts.studies.ingredients", AblationOptions, ablate, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
