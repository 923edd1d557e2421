"""What 1,000 pairs give, and 3,000, and 10,000 (chapter 26): `python -m scripts.studies.sizes`.

The preset `small` learns from cuts of Multi30k; so does a recipe by size. For 1,000 pairs it was
chosen on validation, one setting after the other; for more it lies between that and `small`, which
has all 29,000 pairs on record as gpu-small-1, -2 and -3. With 1,000 pairs `small` takes 198 steps,
all within its warm-up: only the control, LONGER, can tell more passes from other sizes. What was
guessed for 10,000 lost to `small` by 1.5 BLEU with the first seed, so it got no others.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.ch07_multi30k import BPETokenizer, encode_pairs
from scripts.core.data import TrainingData
from scripts.core.models import load_model
from scripts.core.scores import held_out_splits
from scripts.core.settings import NARROW, PRESETS, TrainConfig
from scripts.corpora.load import load_corpus
from scripts.fast.run import average_if_better, evaluate, trained_to_end
from scripts.studies.runner import SEEDS, SWEEP, Plan, Run, study_command, these

BASE = replace(PRESETS["small"], device="cpu", save_every=0, name="sizes")
LOOKED_AT = 200  # captions of validation, after each epoch; they choose a run's weights
CHOICE, BY_SIZE, FOR_ALL = "choice", "by size", "one for all"
LONGER = "one for all, with the epochs of the other"  # more steps, and no other sizes
WIDE = {name: getattr(BASE, name) for name in NARROW}

# Where the choice begins: with what fewer pairs chose, and these changes of it.
STARTS: dict[int, Run] = {
    1000: NARROW | {"vocab": 1000, "dropout": 0.3, "epochs": 60, "max_tokens": 1024, "warmup": 200},
    3000: {"vocab": 4000, "epochs": 60},
    10000: WIDE | {"vocab": 6000, "epochs": 25},
}
# What is then tried for the fewest pairs, one after the other, each beside the best so far.
TRIALS: list[Run] = [WIDE, {"epochs": 120}, {"dropout": 0.4}, {"vocab": 2000}, {"max_tokens": 512}]


def cut(pairs: Sequence[tuple[str, str]], count: int, seed: int) -> list[tuple[str, str]]:
    """`count` of the pairs, as the seed draws them; fewer pairs are the first of more."""
    order = list(pairs)
    random.Random(f"sizes:{seed}").shuffle(order)
    return order[:count]


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """Train on a cut with the task's settings; score on validation, and on the test if it counts.

    The tokenizer learns from the cut alone.
    """
    config = replace(TrainConfig(**setting), **task["settings"], seed=task["seed"])
    corpus = load_corpus(config.corpus)
    pairs, looked_at = cut(corpus["train"], task["pairs"], task["seed"]), corpus["val"][:LOOKED_AT]
    tokenizer = BPETokenizer.train((text for pair in pairs for text in pair), config.vocab)
    examples = (encode_pairs(part, tokenizer) for part in (pairs, looked_at))
    data = TrainingData({"train": pairs, "val": looked_at}, tokenizer, *examples)
    with TemporaryDirectory() as name:
        folder = Path(name)
        training = trained_to_end(config, data, folder)
        chosen = average_if_better(training.config, data, folder, training.history)
        trained = load_model(folder)
    splits = {"val": 1}  # the beam of each
    if task["row"] != CHOICE:
        splits[held_out_splits(corpus)[0]] = config.beam
    scores = {split: evaluate(trained, corpus[split], beam) for split, beam in splits.items()}
    kept = ("search", "bleu", "signature")
    return {
        "pieces": len(tokenizer),
        "steps": training.steps_taken,
        "parameters": sum(p.numel() for p in trained.model.parameters()),
        "precision": training.config.precision,
        "val_bleu": scores["val"]["bleu"],
        "scores": {split: {key: score[key] for key in kept} for split, score in scores.items()},
        "looked_at": chosen,
        "seconds": round(sum(row["cpu_seconds"] for row in training.history)),
    }


def choose(plan: Plan, pairs: int, settings: Run) -> Run | None:
    """The recipe for so many pairs, that begins with `settings`; None while runs are wanted."""
    place = {"row": CHOICE, "pairs": pairs, "seed": SWEEP}
    for change in TRIALS if pairs == min(STARTS) else ():
        tasks = [place | {"settings": settings}, place | {"settings": settings | change}]
        plan += tasks
        done = [run for task in tasks for run in these(plan.runs, **task)[:1]]
        if len(done) < len(tasks):
            return None
        settings = max(done, key=lambda run: run["val_bleu"])["settings"]
    return settings


def plan_runs(plan: Plan) -> None:
    """The choice for each number of pairs, its runs, those of `small`, and the control."""
    recipe: Run | None = {}
    longer: list[Run] = []
    for pairs, start in STARTS.items():
        recipe = choose(plan, pairs, recipe | start)
        if recipe is None:
            return
        by_size = {"row": BY_SIZE, "pairs": pairs, "settings": recipe}
        plan.seeds(by_size, SEEDS[:1] if pairs == max(STARTS) else SEEDS)
        plan.seeds({"row": FOR_ALL, "pairs": pairs, "settings": {}})
        if pairs < max(STARTS):
            longer.append({"row": LONGER, "pairs": pairs, "settings": {"epochs": recipe["epochs"]}})
    for place in longer:
        plan.seeds(place)


main = study_command("scripts.studies.sizes", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
