"""First steps at every rate (chapter 5): `python -m scripts.studies.first_steps --save`.

Six and six layers learn to reverse words: both places of the LayerNorm, both starts, with warm-up
and without, at three rates; then without residual connections, and with a small start in one kind
of part only. What the chapter runs live has ten seeds.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from scripts.ch05_norms_and_first_steps import ALL_SMALL, deep_model, first_steps
from scripts.studies.runner import Plan, Run, study_command

RATES = (0.001, 0.004, 0.008)
WARMUP = 40
SEEDS = range(10)  # three for most cells
SETTING = {"corpus": "reversal", "steps": 120}  # of all runs, beside what stands in chapter 5
LAST = 20  # steps whose mean is a run's loss, and a point of its curve


def plan_runs(plan: Plan) -> None:
    """All crossed; then one thing at a time; then more seeds for what the chapter runs live."""
    live, others = [], []
    for small, norm_first in product(("", ALL_SMALL), (False, True)):
        place = {"small": small, "norm_first": norm_first, "residual": True}
        for rate, warmup in product(RATES, (1, WARMUP)):
            shown = rate == 0.004 and (warmup == 1 or (small, norm_first) == ("", False))
            (live if shown else others).append(place | {"rate": rate, "warmup": warmup})
        others.append(place | {"residual": False, "rate": 0.001, "warmup": WARMUP})
    one_thing = {"norm_first": False, "residual": True, "rate": 0.004, "warmup": 1}
    others += [{"small": word} | one_thing for word in ALL_SMALL.split()]
    for cells, seeds in ((live, SEEDS[:3]), (others, SEEDS[:3]), (live, SEEDS[3:])):
        for seed, cell in product(seeds, cells):
            plan.seeds(cell, [seed])


def reverse(setting: Mapping[str, Any], task: Run) -> Run:
    """The curve of a run: the mean loss of each 20 steps, of which the last counts."""
    torch.set_default_dtype(torch.float64)  # as in the chapter, where models begin so
    choice = dict(task)
    rate, warmup = choice.pop("rate"), choice.pop("warmup")
    losses = first_steps(deep_model(**choice), rate, warmup, task["seed"], setting["steps"])
    means = torch.tensor(losses).view(-1, LAST).mean(1)
    curve = [round(mean, 4) for mean in means.tolist()]
    return {"loss": curve[-1], "curve": curve}


main = study_command("scripts.studies.first_steps", SETTING, plan_runs, reverse)

if __name__ == "__main__":
    raise SystemExit(main())
