"""Table 3, with its own rate for each row that may need one: `python -m scripts.studies.table3`.

First the base's dropout and rate are swept, with a seed of their own. Then the rows that change
depth, width or norm, or that may need other steps, are swept. Three fresh seeds count.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.ch19_ablations import STUDY, STUDY_ROWS, THE_BASE
from scripts.studies.rows import Wanted, one_run
from scripts.studies.runner import Run, study_command

BASE = STUDY
DROPOUTS = (0.0, 0.05, 0.1, 0.2)
SWEPT = ("1 layer", "4 layers", "d_model 32", "d_model 128", "d_ff 128", "d_ff 512")
SWEPT += ("no residual", "no √d_k", "no warm-up", "post-norm", "post-norm, no warm-up")


def wanted_runs(runs: Sequence[Run]) -> list[Run]:
    """The base's sweeps, for each dropout; then those of its rows, and the seeds."""
    plan = Wanted(runs)
    bases = [{"row": THE_BASE, "dropout": dropout} for dropout in DROPOUTS]
    best = plan.best(STUDY.lr, bases)
    if best is None:
        return plan.wanted
    for base in bases:
        plan.seeds(plan.sweep(STUDY.lr, **base), **base)
    for row in [row for row in STUDY_ROWS if row != THE_BASE]:
        place, rate = {"row": row, "dropout": best["dropout"]}, best["lr"]
        plan.seeds(plan.sweep(rate, **place) if row in SWEPT else rate, **place)
    return plan.wanted


def work(setting: Mapping[str, Any], wanted: Run) -> Run:
    """One run of the table."""
    return one_run(STUDY_ROWS[wanted["row"]], setting, wanted)


main = study_command("scripts.studies.table3", BASE, wanted_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
