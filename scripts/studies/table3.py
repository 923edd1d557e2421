"""Table 3, with its own rate for each row that may need one: `python -m scripts.studies.table3`.

First the base's dropout and rate are swept, with a seed of their own. Then the rows that change
depth, width or norm, or that may need other steps, are swept. What counts is the runs of three
fresh seeds. Runs on record aren't repeated, so the work can be done in pieces.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.ch19_ablations import STUDY, STUDY_ROWS, THE_BASE
from scripts.studies.rows import SWEEP, Wanted, one_run
from scripts.studies.runner import Run, study_command, these

BASE = STUDY
DROPOUTS = (0.0, 0.05, 0.1, 0.2)
SWEPT = ("1 layer", "4 layers", "d_model 32", "d_model 128", "d_ff 128", "d_ff 512")
SWEPT += ("no residual", "no √d_k", "no warm-up", "post-norm", "post-norm, no warm-up")


def wanted_runs(runs: Sequence[Run]) -> list[Run]:
    """All that is wanted so far: the base's sweeps; then those of its rows, and the seeds."""
    plan = Wanted(runs)
    rates = {d: plan.sweep(STUDY.lr, row=THE_BASE, dropout=d) for d in DROPOUTS}
    if None in rates.values():
        return plan.wanted
    swept = these(runs, row=THE_BASE, seed=SWEEP)
    best = min(swept, key=lambda run: run["loss"] or float("inf"))["dropout"]
    for dropout, rate in rates.items():
        plan.seeds(rate, row=THE_BASE, dropout=dropout)
    for row in STUDY_ROWS:
        place = {"row": row, "dropout": best}
        if row != THE_BASE:
            rate = rates[best]
            plan.seeds(plan.sweep(rate, **place) if row in SWEPT else rate, **place)
    return plan.wanted


def work(setting: Mapping[str, Any], wanted: Run) -> Run:
    """One run of the table."""
    return one_run(STUDY_ROWS[wanted["row"]], setting, wanted)


main = study_command("scripts.studies.table3", BASE, wanted_runs, work)

if __name__ == "__main__":
    raise SystemExit(main())
