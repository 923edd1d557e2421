"""What each ingredient of chapter 9's recipe is worth: `python -m scripts.studies.ingredients`.

The narrow preset is trained with one of them changed at a time. The same command goes on where it
stopped: finished runs are only read.
"""

from dataclasses import asdict, replace
from typing import Any

from scripts import runs_folder
from scripts.book.command import GOES_ON
from scripts.book.files import writable
from scripts.ch12_going_fast import keep_memory
from scripts.core.checkpoints import saved_states
from scripts.core.data import TrainingData, prepare
from scripts.core.models import load_model
from scripts.core.settings import PRESETS, TrainConfig
from scripts.fast.run import evaluate, fit
from scripts.studies.runner import Run, kept_at
from scripts.studies.subject import SaveOptions, record_command

RECIPE = "the recipe"
INGREDIENTS: dict[str, dict[str, Any]] = {
    RECIPE: {},
    "no label smoothing": {"smoothing": 0.0},
    "dropout 0.3": {"dropout": 0.3},
    "Xavier's tables": {"embedding_init": "xavier"},
    "post-norm": {"norm_first": False},
    "peak rate / 4": {"lr": 7.5e-4},
    "BPE-dropout 0.1": {"bpe_dropout": 0.1},
    "R-Drop 1": {"r_drop": 1.0},
    "Muon": {"optimizer": "muon"},
}
SEEDS, RECIPE_SEEDS = (1, 2), (1, 2, 3)  # the recipe's spread is the noise


def scored_run(config: TrainConfig, data: TrainingData) -> Run:
    """A training and its scores on the validation split; trains only what isn't there yet."""
    folder = writable(runs_folder() / "ablate" / config.name)

    def train() -> Run:
        history = fit(config, data, folder, resume=bool(saved_states(folder)))
        trained = load_model(folder)  # the best epoch's
        beam = evaluate(trained, data.corpus["val"], config.beam, config.alpha)["bleu"]
        bleus = [round(row["val_bleu"], 3) for row in history]
        return {"history": bleus, "best": max(bleus), "beam": beam}

    run = kept_at(folder / "score.json", {"config": asdict(config)}, train)
    del run["config"]
    return {"seed": config.seed} | run


def ablate(_: SaveOptions) -> Run:
    """Train chapter 9's recipe with one ingredient changed at a time."""
    keep_memory()
    base = replace(PRESETS["narrow"], corpus="multi30k", device="cpu")
    data, rows = prepare(base), {}  # no ingredient changes what is read
    for name, changes in INGREDIENTS.items():
        slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        seeds = SEEDS if changes else RECIPE_SEEDS
        configs = [replace(base, seed=n, name=f"{slug}-{n}", **changes) for n in seeds]
        rows[name] = {"changes": changes, "runs": [scored_run(c, data) for c in configs]}
    return {"corpus": base.corpus, "config": asdict(base), "rows": rows}


MODULE = "scripts.studies.ingredients"
main = record_command(MODULE, "recipe-multi30k", ablate, interrupted=GOES_ON)

if __name__ == "__main__":
    raise SystemExit(main())
