"""Loss by parameters and data (chapter 20): `python -m scripts.studies.grid`.

Models of six widths learn from five shares of the training pairs, until validation no longer
improves. The rate is swept at the grid's four corners, and interpolated between them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from scripts.ch19_ablations import STUDY, StudyRow
from scripts.ch20_scaling import PASSES, WIDTHS
from scripts.studies.rows import data_of, one_run
from scripts.studies.runner import Plan, Run, study_command

BASE = replace(STUDY, dropout=0.0, name="grid")
ENDS = [(width, share) for width in (min(WIDTHS), max(WIDTHS)) for share in (1, max(PASSES))]


def rate_at(width: int, share: int, corners: Mapping[tuple[int, int], float]) -> float:
    """The peak rate at a width and a share, to three digits.

    It is interpolated between the four corners' rates, in all three logarithms.
    """
    ends = sorted(corners)
    (narrow, low), (wide, high) = ends[0], ends[-1]
    along = math.log(width / narrow) / math.log(wide / narrow)
    across = math.log(share / low) / math.log(high / low)
    weights = [a * b for a in (1 - along, along) for b in (1 - across, across)]
    rate = math.exp(sum(w * math.log(corners[end]) for w, end in zip(weights, ends, strict=True)))
    return float(f"{rate:.3g}")


def plan_runs(plan: Plan) -> None:
    """The corners' sweeps, then the whole grid."""
    corners = {end: plan.sweep({"d_model": end[0], "share": end[1]}, BASE.lr) for end in ENDS}
    if None not in corners.values():
        rates = {end: corner["lr"] for end, corner in corners.items()}
        for width, share in product(WIDTHS, PASSES):
            plan.seeds({"d_model": width, "share": share, "lr": rate_at(width, share, rates)})


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One run of the grid, and how many target tokens its pairs have."""
    share, size = task["share"], {"d_ff": 4 * task["d_model"]}
    run = one_run(StudyRow("grid", size | {"epochs": PASSES[share]}), setting, task)
    train = data_of(setting["corpus"], setting["vocab"], share).train
    return run | {"tokens": sum(len(example.tgt) - 1 for example in train)}


main = study_command("scripts.studies.grid", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
