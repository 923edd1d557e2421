"""Table 3, with its own rate for each row that may need one: `python -m scripts.studies.table3`.

First the base's dropout and rate are swept, with seeds of their own. Then the rows that change
depth, width or norm, or that may need other steps, are swept in steps of 2; and in steps of √2
where a parabola through the best rates says that more could be gained than chance gives (0.03
nats). Three fresh seeds count.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from scripts.ch19_ablations import STUDY, STUDY_ROWS, THE_BASE
from scripts.studies.rows import one_run
from scripts.studies.runner import Plan, Run, study_command

BASE = STUDY
DROPOUTS = (0.0, 0.05, 0.1, 0.2)
SWEPT = ("1 layer", "4 layers", "d_model 32", "d_model 128", "d_ff 128", "d_ff 512")
SWEPT += ("no residual", "no √d_k", "no warm-up", "post-norm", "post-norm, no warm-up")
UNSURE = ("1 layer", "4 layers", "d_model 32", "no √d_k", "no warm-up", "post-norm, no warm-up")


def plan_runs(plan: Plan) -> None:
    """The base's sweeps, for each dropout; then those of its rows, and the seeds."""
    bases = [{"row": THE_BASE, "dropout": dropout} for dropout in DROPOUTS]
    best = plan.best(bases, STUDY.lr)
    if best is None:
        return
    for base in bases:
        plan.seeds(plan.sweep(base, STUDY.lr))
    for row in [row for row in STUDY_ROWS if row != THE_BASE]:
        place = best | {"row": row}
        if row in SWEPT:
            place = plan.sweep({"row": row, "dropout": best["dropout"]}, best["lr"])
        plan.seeds(plan.finer(place) if row in UNSURE else place)
    plan.finer(best)  # how much the base could gain; its rows without a sweep share its rate


def work(setting: Mapping[str, Any], task: Run) -> Run:
    """One run of the table."""
    return one_run(STUDY_ROWS[task["row"]], setting, task)


main = study_command("scripts.studies.table3", asdict(BASE), plan_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
