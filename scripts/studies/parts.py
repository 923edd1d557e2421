"""Chapter 4's small model without a part of it: `python -m scripts.studies.parts`.

Each part is taken out alone, in three trainings; then all those at once that could be spared. What
neither fails nor works trains for twice as long where it was worst: a part that makes learning
faster isn't the same as one without which it fails.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scripts.ch04_encoder_decoder import PARTS, share_reversed, train_to_reverse, without
from scripts.studies.runner import Plan, Run, study_command, these

LENGTHS = (4, 5, 6, 10)  # of the words that are judged
SEEDS = (0, 1, 2)  # the first is that of chapter 4's page
STEPS = 800
SETTING = {"corpus": "reversal", "words": 1_000}  # of all trainings; new words of each length
WORKS, FAILS = 0.95, 0.05  # shares of the ten-letter words


def shares(runs: Sequence[Run], parts: Sequence[str]) -> list[float]:
    """How many ten-letter words were right after `STEPS` without `parts`, seed by seed."""
    place = {"without": [*parts], "steps": STEPS}
    return [these(runs, **place, seed=seed)[0]["right"]["10"] for seed in SEEDS]


def plan_runs(plan: Plan) -> None:
    """Each part out alone; then what can be spared at once, and what is open for twice as long."""

    def add(parts: Sequence[str], seed: int, steps: int = STEPS) -> None:
        plan.append({"without": [*parts], "steps": steps, "seed": seed})

    for seed in SEEDS:
        for parts in ([], *([part] for part in PARTS)):
            add(parts, seed)
    if all(these(plan.runs, **run) for run in plan):
        found = {part: shares(plan.runs, [part]) for part in PARTS}
        for seed in SEEDS:
            add([part for part in PARTS if min(found[part]) > WORKS], seed)
        for part in PARTS:
            if min(found[part]) <= WORKS and max(found[part]) > FAILS:
                worst = SEEDS[found[part].index(min(found[part]))]
                add([part], worst, 2 * STEPS)


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One training: the mean of its last 50 losses, and the share of words right by length."""
    torch.set_default_dtype(torch.float64)  # as in chapter 4: so it draws the same numbers
    model = without(*task["without"], seed=task["seed"])
    last = train_to_reverse(model, task["steps"], task["seed"])[-50:]
    right = {str(n): share_reversed(model, n, setting["words"]) for n in LENGTHS}
    return task | {
        "loss": float(f"{sum(last) / len(last):.3g}"),
        "right": {length: round(share, 4) for length, share in right.items()},
    }


main = study_command("scripts.studies.parts", SETTING, plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
