"""Warm-up and the peak rate, crossed (chapter 6): `python -m scripts.studies.warm_up --save`.

The chapter's `learn_to_copy`, at six peaks and three warm-ups, in five seeds.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from scripts.ch06_training import learn_to_copy
from scripts.studies.runner import Plan, Run, study_command

PEAKS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
WARMUPS = (1, 10, 40)  # 1: none
SEEDS = range(5)


def plan_runs(plan: Plan) -> None:
    """All crossed, seed after seed."""
    for seed, peak, warmup in product(SEEDS, PEAKS, WARMUPS):
        plan.seeds({"peak": peak, "warmup": warmup}, [seed])


def copy_words(_setting: Mapping[str, Any], task: Run) -> Run:
    """The mean loss of a run's last ten steps."""
    torch.set_default_dtype(torch.float64)  # as in the chapter
    _, losses, _ = learn_to_copy(task["peak"], task["warmup"], seed=task["seed"])
    return {"loss": round(sum(losses[-10:]) / 10, 4)}


main = study_command("scripts.studies.warm_up", {"corpus": "copy"}, plan_runs, copy_words)

if __name__ == "__main__":
    raise SystemExit(main())
