"""Chapter 4's small model without a part of it: `python -m scripts.studies.parts`.

Each part is taken out alone, in three trainings; then all those at once that could be spared. What
neither fails nor works gets twice the steps: a part that makes learning faster isn't the same as
one without which it fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scripts.ch04_encoder_decoder import PARTS, share_reversed, train_to_reverse, without
from scripts.studies.runner import Plan, Run, study_command, these

LENGTHS = (4, 5, 6, 10)  # of the words that are judged
SEEDS = (0, 1, 2)  # the first is that of chapter 4's page
STEPS = 800
WORKS, FAILS = 0.95, 0.05  # shares of the ten-letter words


@dataclass(frozen=True)
class Setting:
    """What all trainings share."""

    corpus: str = "reversal"
    words: int = 1_000
    """New words of each length."""


def shares(runs: Sequence[Run], parts: Sequence[str]) -> list[float]:
    """How many ten-letter words were right in each training of `STEPS` without `parts`."""
    return [run["right"]["10"] for run in these(runs, without=[*parts], steps=STEPS)]


def plan_runs(plan: Plan) -> None:
    """The whole model, each part out alone, then what can be spared at once, then longer ones."""

    def add(rows: Sequence[Sequence[str]], steps: int) -> None:
        plan.extend(
            {"without": [*parts], "steps": steps, "seed": seed} for seed in SEEDS for parts in rows
        )

    add([[], *([part] for part in PARTS)], STEPS)
    if all(these(plan.runs, **run) for run in plan):
        found = {part: shares(plan.runs, [part]) for part in PARTS}
        add([[part for part in PARTS if min(found[part]) > WORKS]], STEPS)
        add([[p] for p in PARTS if min(found[p]) <= WORKS and max(found[p]) > FAILS], 2 * STEPS)


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


main = study_command("scripts.studies.parts", Setting(), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
